"""How runs end: in a narrow precision, compiled, after epochs; test_signals.py has runs that are stopped."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from runs import SMALL, STEPS, Workshop, events, metrics

pytestmark = [pytest.mark.soak, pytest.mark.dist]


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("endings"))


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < step:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_whose_model_was_changed_by_hand_is_refused(shop, unbroken):
    run = shop.copy(unbroken, "widened")
    for path, before, after in [
        ("config.toml", "n_embd = 64", "n_embd = 128"),
        ("plan.json", '"n_embd": 64', '"n_embd": 128'),
    ]:
        text = (run / path).read_text()
        assert before in text
        (run / path).write_text(text.replace(before, after))
    another = "is of another model: model.wte.weight is 512 x 64 in it and 512 x 128 in the run"
    assert another in shop.finish(shop.command("eval", str(run), device="cpu"), code=1)
    assert another in shop.finish(shop.resume_command(run, num_steps=STEPS + 2), code=1)


def test_plain_ddp_trains_like_the_sharded_optimizer(shop):
    sharded = shop.train("sharded", nproc=2, optimizer="adamw")
    replicated = shop.train("replicated", nproc=2, optimizer="adamw", shard="none")
    for one, other in zip(metrics(sharded), metrics(replicated), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_narrow_precision_trains_close_to_fp32(shop, unbroken, precision):
    narrow = metrics(shop.train(precision, nproc=2, precision=precision, num_steps=STEPS))
    assert [line["loss"] for line in narrow] == pytest.approx([line["loss"] for line in metrics(unbroken)], abs=0.05)


@pytest.mark.slow
@pytest.mark.compiler
def test_compile_changes_the_graph_not_the_losses(shop):
    eager = metrics(shop.train("eager", nproc=1, compile="false"))
    run = shop.train("compiled", nproc=1, compile="true")
    assert [line["loss"] for line in metrics(run)] == pytest.approx([line["loss"] for line in eager], abs=2e-3)


@pytest.mark.slow
@pytest.mark.compiler
def test_a_long_run_measures_whether_compiling_pays_and_keeps_the_answer(shop):
    command = shop.train_command("measured", nproc=1, num_steps=10_000_000)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = shop.folder / "runs" / "measured"
    wait_for_step(run, 3)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output
    [note] = [event["text"] for event in events(run, "note") if event["text"].startswith("compile: a micro-step takes")]
    assert "compile: measured first" in output
    assert note in output
    assert json.loads((run / "plan.json").read_text())["compile"] is note.endswith(": compiled")


def test_epochs_train_on_every_row_so_many_times(shop):
    whole = shop.train("epochs", nproc=2, epochs=0.5, num_steps="auto")
    facts = json.loads(Path(json.loads((whole / "dataset.json").read_text())["path"], "meta.json").read_text())
    num_rows = (facts["splits"]["train"]["num_tokens"] - 1) // SMALL["sequence-len"]
    rows_per_step = SMALL["total-batch-size"] // SMALL["sequence-len"]
    assert metrics(whole)[-1]["step"] == -(-num_rows // 2 // rows_per_step)
