"""Metrics of real writers and of files in their formats, whole, cut and damaged; runs, folders and output formats."""

import csv
import json
import lzma
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from curve_shapes import Noise, falling
from rows import with_rows

from paceline.cli import run_command
from paceline.explain.curve_verdict import judge_curves
from paceline.explain.evidence import grows_by_much, judge_run, metric_lines, read_run_series
from paceline.explain.run_folder import explain_run
from paceline.explain.series import (
    ACCURACY,
    GRADIENT,
    LOSS,
    MEMORY,
    PART_LOSS,
    RATE,
    REWARD,
    STEP_TIME,
    THROUGHPUT,
    VALIDATION,
    SeriesTable,
    kind_of,
    read_series,
)
from paceline.rundir import RunDir, append_event, write_atomic

NAMES = {
    LOSS: [
        "loss", "train/loss", "train_loss", "train_loss_step", "train_loss_epoch", "Loss/train", "lm loss", "step_loss",
        "loss_metrics/global_avg_loss", "reduced_train_loss", "Train/Samples/train_loss", "train/epoch_loss", "loss_train/loss",
        "training_losses", "mse_step", "Loss - train",
    ],
    VALIDATION: [
        "eval_loss", "eval/loss", "eval_wikitext_loss", "val_loss", "val/loss", "val_bpb", "val/bpb", "valid_loss", "Loss/val",
        "validation/epoch_loss", "validation_metrics/loss", "lm loss validation", "Train/Eval/eval_loss", "loss_val/loss",
        "validation_losses", "Val - loss", "Loss - val",
    ],
    GRADIENT: ["grad_norm", "train/grad_norm", "grad-norm", "actor/grad_norm", "grad_2.0_norm_total"],
    RATE: ["learning_rate", "train/learning_rate", "lr", "lr-AdamW", "lr-AdamW/pg1", "learning-rate", "lr_mult", "train/lrm"],
    MEMORY: [
        "peak_bytes", "memory/max_active(GiB)", "memory/max_reserved(%)", "peak_memory_alloc", "mem-allocated-bytes",
        "ada ram_used", "perf/max_memory_allocated_gb", "proc.memory.rssMB", "gpu.0.memoryAllocatedBytes", "ada GPU 0 used_bytes",
    ],
    THROUGHPUT: ["tok_per_sec", "tokens_per_second_per_gpu", "throughput(tps)", "train_samples_per_second"],
    STEP_TIME: ["step_ms", "train/dt", "iteration-time", "time_metrics/end_to_end(s)", "perf/time_per_step", "iter_time"],
    REWARD: ["reward", "train/reward", "kl", "objective/kl", "critic/rewards/mean", "episode_reward", "scalars_train_return"],
    ACCURACY: ["train_acc", "accuracy", "small - accuracy"],
    PART_LOSS: ["d_loss", "Gen Loss", "actor/pg_loss", "train_variety_loss"],
    None: [
        "epoch", "train/epoch", "eval_runtime", "eval_samples_per_second", "memory/num_alloc_retries", "mfu",
        "rewards/chosen", "train_runtime", "loss-scale", "lm loss vs samples", "tokens",
        "run-a - train/loss__MIN", "run-a - train/loss__MAX",
    ],
}  # fmt: skip
OFFLINE_RUN = Path(__file__).with_name("offline_run.wandb.xz")
TURN = 60  # where the loss of LOSSES begins to rise
LOSSES = [value * (1 + 0.05 * max(0, n - TURN)) for n, value in enumerate(falling(Noise(1, 0.01), 100, scale=10))]
WANDB = """
import os, sys
os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
import wandb
run = wandb.init(project="p", dir=sys.argv[1], settings=wandb.Settings(x_disable_stats=True))
for number, loss in enumerate(eval(sys.argv[2])):
    run.log({"train/loss": loss, "train/global_step": 10 * number, "nested": {"lr": 0.5}, "bad": float("nan"), "word": "x"})
run.log({f"key {number}": number for number in range(4000)} | {"train/loss": float("inf"), "train/global_step": 7000})
run.finish()
"""


@pytest.fixture(scope="module")
def event_folder(tmp_path_factory):
    writer_of = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard").SummaryWriter
    folder = tmp_path_factory.mktemp("tensorboard")
    writer = writer_of(folder)
    for number, loss in enumerate(LOSSES):
        writer.add_scalar("train/loss", loss, 10 * number, walltime=1.8e9 + number)
        writer.add_scalar("train/lr", 1e-3, 10 * number, new_style=True)
        writer.add_text("note", "loss", number)
    writer.close()
    return folder


@pytest.fixture(scope="module", params=["recorded", pytest.param("written", marks=pytest.mark.soak)])
def wandb_folder(tmp_path_factory, request):
    """What WANDB writes: recorded with wandb 0.31 without the facts of the machine, or written now, for which it is imported."""
    folder = tmp_path_factory.mktemp("wandb")
    if request.param == "recorded":
        (folder / "run-recorded.wandb").write_bytes(lzma.decompress(OFFLINE_RUN.read_bytes()))
        return folder
    pytest.importorskip("wandb", reason="needs wandb")
    subprocess.run([sys.executable, "-c", WANDB, folder, repr(LOSSES)], check=True, capture_output=True, timeout=120)
    return folder


def explained(capsys, *args):
    assert run_command(["explain", *map(str, args)]) == 0
    return capsys.readouterr().out


def read(*paths):
    """The curves by name, and the notes."""
    series, notes = read_series(paths)
    return {item.name: item for item in series}, notes


def only(folder, pattern):
    [path] = folder.rglob(pattern)
    return path


@with_rows(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_the_names_of_common_trainers_have_a_kind(kind, name):
    assert kind_of(name) == kind


def test_scalars_of_tensorboard_are_read_in_both_of_its_forms(event_folder):
    curves, notes = read(only(event_folder, "*tfevents*"))
    assert notes == [] and set(curves) == {"train/loss", "train/lr"}
    loss = curves["train/loss"]
    assert loss.steps == [10 * number for number in range(100)]
    assert loss.values == pytest.approx(LOSSES, rel=1e-6) and loss.times[:2] == [1.8e9, 1.8e9 + 1]
    assert curves["train/lr"].values == pytest.approx([1e-3] * 100)


def test_what_is_explained_of_tensorboard_is_what_its_own_reader_has(event_folder):
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    reader = module.EventAccumulator(str(event_folder), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    loss = read(only(event_folder, "*tfevents*"))[0]["train/loss"]
    assert [(event.step, event.value, event.wall_time) for event in reader.Scalars("train/loss")] == list(
        zip(loss.steps, loss.values, loss.times, strict=True)
    )


def test_event_files_of_one_folder_are_one_run_and_a_resume_replaces_steps(event_folder, tmp_path):
    writer_of = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard").SummaryWriter
    for suffix, first, value in ((".1", 0, 3.0), (".2", 50, 2.0)):
        writer = writer_of(tmp_path, filename_suffix=suffix)
        for step in range(first, first + 60):
            writer.add_scalar("loss", value, step)
        writer.close()
    first, second = sorted(tmp_path.glob("*tfevents*"), key=lambda path: path.suffix)
    # a process numbers its files, and 10 comes after 9
    first, second = (path.rename(tmp_path / f"events.out.tfevents.1.h.1.{n}") for path, n in ((first, 9), (second, 10)))
    curves, _ = read(second, first)
    assert curves["loss"].steps == list(range(110))
    assert curves["loss"].values == [3.0] * 50 + [2.0] * 60


def test_scalars_that_share_a_chart_are_read_from_their_folders(tmp_path, capsys):
    writer_of = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard").SummaryWriter
    writer = writer_of(tmp_path)
    for number in range(60):
        writer.add_scalars("loss", {"train": 3 - number / 60, "val": 3 + abs(number - 30) / 30}, number)
    writer.close()
    assert explained(capsys, tmp_path).startswith("validation-turns-up: the validation loss is lowest at step 30 ")


def test_an_event_file_whose_writer_still_writes_gives_what_is_whole(event_folder, tmp_path):
    whole = only(event_folder, "*tfevents*").read_bytes()
    for end in range(1, len(whole), 389):
        (tmp_path / "tfevents").write_bytes(whole[:end])
        curves, notes = read(tmp_path / "tfevents")
        values = curves["train/loss"].values if curves else []
        assert values == pytest.approx(LOSSES[: len(values)], rel=1e-6)
        assert notes == ([] if end >= 12 else ["tfevents: not an event file"])
    assert len(values) > 90


def test_a_damaged_event_is_left_out_and_the_others_are_read(event_folder, tmp_path):
    data = bytearray(only(event_folder, "*tfevents*").read_bytes())
    for number in (20, 70):
        at = data.index(b"\x0a\x0atrain/loss", len(data) * number // 100)
        data[at + 5] ^= 1
    (tmp_path / "tfevents").write_bytes(data)
    curves, notes = read(tmp_path / "tfevents")
    assert len(curves["train/loss"].steps) == 98 and len(curves["train/lr"].steps) == 100
    assert notes == ["tfevents: left out 2 damaged records"]


@pytest.mark.parametrize("name", ["tfevents", "a.wandb", "trainer_state.json", "metrics.csv", "metrics.jsonl"])
@pytest.mark.parametrize(
    "content", [b"", b"\0" * 5000, os.urandom(5000), b"version https://git-lfs.github.com/spec/v1\n"]
)
def test_a_file_of_something_else_is_unknown(name, content, tmp_path, capsys):
    (tmp_path / name).write_bytes(content)
    assert explained(capsys, tmp_path / name).startswith(f"unknown: {name}: ")


def test_an_offline_run_of_wandb_is_read(wandb_folder):
    curves, notes = read(only(wandb_folder, "run-*.wandb"))
    loss = curves["train/loss"]
    assert notes == [] and set(curves) == {"train/loss", "nested.lr"}
    assert loss.steps == [*(10 * number for number in range(100)), 7000]
    assert loss.values == [*LOSSES, math.inf]  # the last record is longer than a block
    assert 0 <= loss.times[-1] - loss.times[0] < 120


def test_a_cut_run_of_wandb_gives_what_is_whole_and_a_damaged_one_says_so(wandb_folder, tmp_path):
    whole = only(wandb_folder, "run-*.wandb").read_bytes()
    for end in (*range(1, len(whole), 3989), len(whole) - 1):
        (tmp_path / "a.wandb").write_bytes(whole[:end])
        curves, notes = read(tmp_path / "a.wandb")
        values = curves["train/loss"].values if curves else []
        assert values[:100] == LOSSES[: len(values)]
        assert notes == ([] if end >= 7 else ["a.wandb: not a file of W&B, or of an unknown version"])
    assert len(values) >= 100
    damaged = bytearray(whole)
    damaged[whole.index(json.dumps(LOSSES[60]).encode())] ^= 1
    (tmp_path / "a.wandb").write_bytes(damaged)
    curves, notes = read(tmp_path / "a.wandb")
    # the rest of that block is lost, whatever else wandb wrote into it
    assert 0 < len(curves["train/loss"].values) < 101
    assert "damaged at byte" in notes[0]


def test_a_folder_of_wandb_is_explained_without_its_own_logs(wandb_folder, capsys):
    output = explained(capsys, wandb_folder)
    assert output.startswith(
        "loss-nan: loss, gradients or metrics are NaN or infinite: train/loss from step 7000 to its end"
    )
    assert "debug" not in output and "loss-diverged, the loss diverges" in output


def trainer_state(folder, *, nan_from=None, steps=80):
    """As transformers writes it: log and evaluation are records of one list, keys are sorted, NaN is a bare word."""
    history = []
    for number, loss in enumerate(falling(Noise(3, 0.02), steps), 1):
        is_nan = nan_from is not None and number >= nan_from
        values = {"grad_norm": math.nan if is_nan else 1.5, "loss": 0.0 if is_nan else round(loss, 4)}
        history.append({"epoch": number / 10, "learning_rate": 5e-5, "step": 10 * number, **values})
        if number % 10 == 0:
            history.append(
                {
                    "epoch": number / 10,
                    "eval_loss": loss,
                    "eval_samples_per_second": 9 - number / 10,
                    "step": 10 * number,
                }
            )
    history.append(
        {"epoch": 8.0, "step": 10 * steps, "total_flos": 1e15, "train_loss": 3.1, "train_samples_per_second": 8.2}
    )
    state = {
        "best_metric": None,
        "global_step": 10 * steps,
        "log_history": history,
        "max_steps": 1000,
        "trial_name": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trainer_state.json"
    path.write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
    return path


def test_a_trainer_state_is_judged_by_its_history(tmp_path, capsys):
    assert explained(capsys, trainer_state(tmp_path)).startswith("healthy: no failure found: loss 10.")
    first, *_ = explained(capsys, trainer_state(tmp_path, nan_from=41)).splitlines()
    assert (
        first
        == "loss-nan: loss, gradients or metrics are NaN or infinite: grad_norm from step 410 to its end, step 800"
    )


def test_an_output_folder_of_the_trainer_is_judged_by_its_newest_state(tmp_path, capsys):
    old, new = (
        trainer_state(tmp_path / "checkpoint-400", steps=40),
        trainer_state(tmp_path / "checkpoint-800", nan_from=60),
    )
    os.utime(old, (1, 1))
    (tmp_path / "checkpoint-800" / "merges.txt").write_text("Error: t h\n")  # a tokenizer's file
    output = explained(capsys, tmp_path)
    assert (
        output.startswith("loss-nan: ")
        and f"judged {new.resolve()}, the newest, without 1 other file with metrics" in output
    )


def test_a_cut_trainer_state_gives_its_whole_records(tmp_path, capsys):
    path = trainer_state(tmp_path)
    path.write_text(path.read_text()[:8000])
    output = explained(capsys, path)
    assert output.startswith("healthy: ") and "trainer_state.json: not whole: read " in output


def lightning_csv(folder, *, turn):
    """As Lightning's CSVLogger writes it: training and validation on rows of their own, in columns of all."""
    folder.mkdir(parents=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, ["epoch", "lr-AdamW", "step", "train_loss_epoch", "train_loss_step", "val_loss"])
        rows.writeheader()
        for number, loss in enumerate(falling(Noise(5, 0.01), 200)):
            rows.writerow({"epoch": number // 10, "step": 50 * number + 49, "train_loss_step": loss})
            if number % 10 == 9:
                val_loss = 3 + 4 * math.exp(-number / 30) + 0.1 * max(0, number // 10 - turn)
                rows.writerow({"epoch": number // 10, "step": 50 * number + 49, "val_loss": val_loss})
    (folder / "hparams.yaml").write_text("lr: 0.1\n")
    return folder


def test_a_folder_of_lightning_is_judged_by_its_csv(tmp_path, capsys):
    folder = lightning_csv(tmp_path / "lightning_logs" / "version_0", turn=12)
    fields = json.loads(explained(capsys, folder, "--json"))
    assert (fields["cause"], fields["step"]) == ("validation-turns-up", 50 * 129 + 49)
    [curve] = fields["curves"]
    assert (curve["name"], curve["cause"], len(curve["steps"])) == ("val_loss", "validation-turns-up", 20)
    assert explained(capsys, lightning_csv(tmp_path / "b", turn=99)).startswith("healthy: ")


def test_a_row_that_is_cut_is_left_out(tmp_path):
    folder = lightning_csv(tmp_path / "a", turn=99)
    path = folder / "metrics.csv"
    path.write_text(path.read_text()[:-24])
    curves, notes = read(path)
    assert len(curves["train_loss_step"].steps) == 200 and len(curves["val_loss"].steps) == 19
    assert notes == []  # its writer may still write it
    path.write_text(path.read_text() + "\n1,2\n")
    assert "metrics.csv: left out 2 rows with too few columns" in read(path)[1]


def test_a_last_row_without_a_newline_counts_if_it_has_all_columns(tmp_path, capsys):
    (tmp_path / "a.csv").write_text(
        "step,loss\n" + "".join(f"{step},{3 - step / 100}\n" for step in range(60)) + "60,nan"
    )
    assert explained(capsys, tmp_path / "a.csv").startswith("loss-nan: ")


def test_steps_that_start_over_in_each_epoch_are_counted(tmp_path):
    lines = [f"{step},{3 - epoch / 9 - step / 900}" for epoch in range(4) for step in range(25)]
    (tmp_path / "metrics.csv").write_text("\n".join(["step,loss", *lines, ""]))
    curves, _ = read(tmp_path / "metrics.csv")
    assert curves["loss"].steps == list(range(1, 101))


def test_a_file_of_rewards_or_accuracies_alone_shows_that_a_run_works(tmp_path, capsys):
    def summary(name, header, row):
        (tmp_path / name).write_text("\n".join([header, *map(row, range(1, 31)), ""]))
        return explained(capsys, tmp_path / name).splitlines()[0]

    assert "accuracy 0.51 to 0.8, step 10 to 300" in summary(
        "a.csv", "Step,accuracy", lambda n: f"{10 * n},{0.5 + n / 100}"
    )
    assert summary("a.csv", "Step,accuracy", lambda n: f"{n},{0.8 - n / 100}").startswith("unknown: ")
    exported = summary("run-a-tag-train_return_(1).csv", "Wall time,Step,Value", lambda n: f"1.7e9,{n},{n - 20}")
    assert exported.startswith("healthy: no failure found: train_return -19 to 10, step 1 to 30")
    parts = summary("a.csv", "Epoch,Batch,Gen Loss,Disc Loss", lambda n: f"{n // 9},{n % 9},{n / 20},0.4")
    assert parts.startswith("healthy: no failure found: Gen Loss 0.05 to 1.5, step 1 to 30")


def test_a_loss_that_rises_in_an_exported_table_of_wandb_or_with_semicolons_or_an_unknown_name_shows_no_health(
    tmp_path, capsys
):
    def explained_table(header, row):
        (tmp_path / "a.csv").write_text("".join(f"{line}\n" for line in [header, *map(row, range(100), LOSSES)]))
        return explained(capsys, tmp_path / "a.csv").splitlines()[0]

    columns = ["Step", *(f"run-a - train/loss{end}" for end in ("", "__MIN", "__MAX"))]
    table = explained_table(",".join(f'"{column}"' for column in columns), lambda n, loss: f"{n},{loss},1,1")
    assert table.startswith("loss-diverged: the loss diverges: run-a - train/loss is ")
    table = explained_table("step;loss", lambda n, loss: f"{n};{loss}".replace(".", ","))
    assert table.startswith("loss-diverged: ")
    table = explained_table("step,my_loss", lambda n, loss: f"{n},{1 + n / 50}")
    assert table == "unknown: no failure is certain, but my_loss ends above its first value: 1 to 2.98, 100 points"
    assert explained_table("step,kl_loss", lambda n, loss: f"{n},{1 + n / 50}").startswith("healthy: ")


@pytest.mark.parametrize("name", ["train_log.jsonl", "out.txt"])
def test_json_lines_of_any_name_are_judged_by_their_curves(name, tmp_path, capsys):
    lines = [json.dumps({"step": n, "loss": LOSSES[min(n, TURN)], "lr": max(0, TURN - n)}) for n in range(150)]
    (tmp_path / name).write_text("\n".join([*lines, ""]))
    output = explained(capsys, tmp_path / name)
    assert output.startswith(f"loss-stands-still: the loss stands still from step {TURN} on: ")
    (tmp_path / name).write_text("\n".join([*lines, "Traceback (most recent call last):", "KeyError: 'x'", ""]))
    assert explained(capsys, tmp_path / name).startswith("user-code-exception: KeyError")


def test_a_line_that_is_cut_is_left_out(tmp_path):
    path, lines = (
        tmp_path / "metrics.jsonl",
        [json.dumps({"step": step, "loss": 3.0 - step / 50}) for step in range(50)],
    )
    path.write_text("\n".join([*lines, '{"step": 50, "lo']))
    curves, notes = read(path)
    assert (curves["loss"].steps, notes) == (list(range(50)), [])
    path.write_text("\n".join([*lines, '{"step": 50, "lo', ""]))
    assert read(path)[1] == ["metrics.jsonl: left out 1 line that cannot be parsed, of 51"]


@pytest.mark.parametrize(("field", "part"), [("mode", "evaluating"), ("split", "val"), ("phase", "Validation")])
def test_records_of_an_evaluation_are_no_training(field, part, tmp_path, capsys):
    records = []
    for step in range(200):
        loss = 1.5 + 2.5 * math.exp(-step / 60)
        records.append({field: "train", "step": step, "loss": loss, "lr": 0.1})
        if step % 10 == 9:
            records.append({field: part, "step": step, "loss": loss + 1 + step * step / 9000, "lr": 0.1})
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    curves, _ = read(path)
    name = "eval/loss" if field == "mode" else "val/loss"
    assert {name: len(item.steps) for name, item in curves.items()} == {"loss": 200, "lr": 200, name: 20}
    for name in ("metrics.jsonl", "train.log"):
        path = path.rename(tmp_path / name)
        assert explained(capsys, path).startswith("validation-turns-up: the validation loss is lowest")


@pytest.mark.parametrize("part", ["validate", "Validating", "evaluate", "evaluation", "dev", "test", "testing"])
def test_each_word_for_an_evaluation_makes_its_records_losses_of_validation(part, tmp_path):
    records = [
        {"step": step, "loss": 3.0, **fields} for step in range(9) for fields in ({}, {"mode": part, "acc": 0.5})
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert [item.kind for item in read(tmp_path / "metrics.jsonl")[0].values()] == ["loss", "validation loss", "score"]


@pytest.mark.parametrize(("field", "name"), [("mode", "loss"), ("type", "loss"), ("stage", "train_loss")])
def test_a_field_that_is_the_same_in_all_records_is_no_part_of_the_text(field, name, tmp_path, capsys):
    losses = [3 - step / 100 if step < 100 else 3 * 1.1 ** (step - 100) for step in range(160)]
    records = [{"step": step, field: "test", name: loss} for step, loss in enumerate(losses)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lines = (f"{field}=test step {step} {name} {loss:.4f}\n" for step, loss in enumerate(losses))
    (tmp_path / "train.log").write_text("".join(lines))
    for path in tmp_path.iterdir():
        assert explained(capsys, path).startswith(f"loss-diverged: the loss diverges: {name} is ")


def test_losses_of_parts_are_nan_if_half_of_them_are(tmp_path, capsys):
    def cause(row):
        (tmp_path / "metrics.csv").write_text("step,d_loss,g_loss\n" + "".join(f"{n},{row}\n" for n in range(30)))
        return explained(capsys, tmp_path / "metrics.csv").partition(":")[0]

    assert (cause("nan,0.5"), cause("1.2,0.5")) == ("loss-nan", "healthy")


def test_a_trainer_state_of_few_points_whose_steps_are_all_done_is_healthy(tmp_path, capsys):
    state = {"max_steps": 100, "log_history": [{"step": 50, "loss": 0.4}, {"step": 100, "loss": 0.3}]}
    path = tmp_path / "trainer_state.json"
    for steps, cause in ((100, "healthy"), (60, "unknown")):
        path.write_text(json.dumps(state | {"global_step": steps}))
        assert explained(capsys, path).startswith(f"{cause}: ")
    state["log_history"][1]["loss"] = 0.399  # proves nothing
    path.write_text(json.dumps(state | {"global_step": 100}))
    assert explained(capsys, path).startswith("unknown: ")


def test_a_log_beside_the_metrics_stays_the_cause(tmp_path, capsys):
    trainer_state(tmp_path, nan_from=41)
    (tmp_path / "train.log").write_text("step 1/9 | loss 3.1\n[rank1]: OSError: [Errno 28] No space left on device\n")
    output = explained(capsys, tmp_path)
    assert output.startswith("disk-full: ") and "loss-nan, loss, gradients or metrics are NaN" in output
    (tmp_path / "train.log").write_text("step 1/9 | loss 3.1\nstep 9/9 | loss 3.0\n")
    assert explained(capsys, tmp_path).startswith("loss-nan: ")


def test_markdown_and_piped_text_have_the_curve_without_colours(tmp_path, capsys):
    path = trainer_state(tmp_path, nan_from=41)
    text, markdown = explained(capsys, path), explained(capsys, path, "--markdown")
    assert "│×" in text and "│×" in markdown and "\x1b" not in text + markdown
    assert "\nCurves:\n\n```text\n  grad_norm (" in markdown


def test_the_curves_are_judged_without_torch_or_numpy(tmp_path):
    code = "import sys; from paceline.cli import run_command; run_command(sys.argv[1:]); "
    code += "print({'torch', 'numpy', 'rich'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, "explain", trainer_state(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("\nset()\n")


@pytest.fixture
def run(tmp_path):
    """A run of ours that has finished, with a loss that falls, a level speed and level memory."""
    return own_run(tmp_path / "books")


def own_run(path, *, leaks=0.0, val_turns=False, speed=1.0):
    run = RunDir(path)
    run.logs(1).mkdir(parents=True)
    run.health_dir.mkdir()
    write_atomic(run.config_toml, 'name = "books"\n')
    append_event(run, "attempt", attempt=1, nproc=1, world_size=1, pids=[4711])
    run.rank_log(1, 0).write_text("step 00001/00200 | loss 3.1\nstep 00200/00200 | loss 2.6\n")
    noise = Noise(7, 0.01)
    with run.metrics.open("w") as metrics, run.health("ada").open("w") as health:
        for number, loss in enumerate(falling(noise, 200), 1):
            clock = f"2036-01-01T{number // 60:02d}:{number % 60:02d}:00.000Z"
            pace = speed if number > 120 else 1.0
            record = {"step": number, "loss": loss, "tok_per_sec": 1e5 * pace * noise.factor(), "step_ms": 9 / pace}
            record |= {"peak_bytes": 2**30, "lr_mult": 1.0, "grad_norm": 1.0, "rank_ms": [9.0], "time": clock}
            if number % 10 == 0:
                record["val_bpb"] = 1 + math.exp(-number / 30) + (0.003 * max(0, number - 100) if val_turns else 0)
            metrics.write(json.dumps(record) + "\n")
            used = 2**33 * (1 + leaks * number) * noise.factor(0.1)
            gpu = {"index": 0, "used_bytes": 2**33, "total_bytes": 2**35}
            health.write(json.dumps({"time": clock, "ram_used": int(used), "ram_total": 2**36, "gpus": [gpu]}) + "\n")
    return run


def test_the_curves_of_a_run_of_ours_are_its_metrics_and_the_memory_of_its_hosts(tmp_path):
    kinds = {item.name: item.kind for item in read_run_series(own_run(tmp_path, leaks=0.01))}
    assert kinds == {
        "loss": LOSS, "val_bpb": VALIDATION, "tok_per_sec": THROUGHPUT, "step_ms": STEP_TIME, "peak_bytes": MEMORY,
        "lr_mult": RATE, "grad_norm": GRADIENT, "ada ram_used": MEMORY, "ada GPU 0 used_bytes": MEMORY,
    }  # fmt: skip


@pytest.mark.parametrize("growth", [0.0, 0.001])  # other programs of the host may take some of its memory
def test_a_finished_healthy_run_stays_healthy(growth, tmp_path):
    explanation = explain_run(own_run(tmp_path / "books", leaks=growth))
    assert (explanation.cause, explanation.curves) == ("healthy", ())


@pytest.mark.parametrize(
    ("fault", "cause", "name", "step"),
    [
        ({"leaks": 0.01}, "memory-grows", "ada ram_used", 1),
        ({"val_turns": True}, "validation-turns-up", "val_bpb", 100),
        ({"speed": 0.5}, "throughput-decays", "tok_per_sec", 121),
    ],
)
def test_a_finished_run_is_explained_by_its_curves(fault, cause, name, step, tmp_path):
    explanation = explain_run(own_run(tmp_path / "books", **fault))
    assert (explanation.cause, explanation.curves[0].name) == (cause, name)
    assert abs(explanation.step - step) <= 10


def test_a_run_that_was_killed_has_its_memory_as_evidence(tmp_path):
    run = own_run(tmp_path / "books", leaks=0.01)
    run.rank_log(1, 0).write_text("step 00001/00200 | loss 3.1\n")
    lost = {"attempt": 1, "exit_code": None, "message": "x"}
    append_event(run, "rank_failed", rank=0, signal="SIGKILL", consequence=False, **lost)
    explanation = explain_run(run)
    assert explanation.cause in ("host-oom-killed", "killed-from-outside")
    assert [curve.cause for curve in explanation.curves] == ["memory-grows"]


def test_memory_and_speed_of_an_earlier_attempt_do_not_count(tmp_path):
    run = own_run(tmp_path / "books", leaks=0.01, speed=0.5)
    append_event(run, "attempt", attempt=2, nproc=1, world_size=1, pids=[4712])
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    events[-1]["time"] = "2036-01-01T03:00:00.000Z"  # after step 180
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    run.logs(2).mkdir()
    run.rank_log(2, 0).write_text("step 00180/00200 | loss 2.6\nstep 00200/00200 | loss 2.6\n")
    assert explain_run(run).cause == "healthy"
    assert {curve.cause for curve in explain_run(run, attempt=1).curves} == {"memory-grows", "throughput-decays"}


def test_of_long_metrics_a_bounded_number_of_lines_all_evaluations_and_each_change_to_nan_are_read(tmp_path):
    lines = [b'{"step": %d, "loss": 2.5, "rank_ms": [9.25, 9.75, 9.5, 9.0]}\n' % step for step in range(1, 160_001)]
    lines[249::500] = [line[:-2] + b', "val_bpb": 0.9}\n' for line in lines[249::500]]
    lines[70_001:70_005] = [line.replace(b"2.5", b"NaN") for line in lines[70_001:70_005]]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(lines))
    sampled = list(metric_lines(path))
    assert len(sampled) < 40_000 and sampled[-1] == lines[-1]
    assert {line for line in lines if b"val_bpb" in line or b"NaN" in line} <= set(sampled)
    steps = [json.loads(line)["step"] for line in sampled]
    assert all(0 < after - step <= 5 for step, after in pairwise(steps))
    path.write_bytes(b"".join(lines[:9000]))
    assert list(metric_lines(path)) == lines[:9000]


def test_metrics_that_become_shorter_while_they_are_read_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.5}\n' * 200_000)
    lines = metric_lines(path)
    next(lines)
    path.write_bytes(b"")
    assert len(list(lines)) < 200_000


@pytest.mark.parametrize(
    ("name", "value", "causes"),
    [
        ("loss", lambda step, noise: 2.5 + 3 * math.exp(-step / 900) + noise, set()),
        ("loss", lambda step, noise: math.nan if step == 4000 else 2.5 + 3 * math.exp(-step / 900), {"loss-nan"}),
        (
            "loss",
            lambda step, noise: 2.5 + noise + (3 * math.exp(-step / 900) if step < 3800 else 2),
            {"loss-diverged"},
        ),
        ("loss", lambda step, noise: 5 + noise, {"loss-stands-still"}),
        ("val_bpb", lambda step, noise: None if step % 160 else 1 + abs(step - 2400) / 4000, {"validation-turns-up"}),
        ("peak_bytes", lambda step, noise: 2e9 * (1 + step / 4000 + noise), {"memory-grows"}),
        ("step_ms", lambda step, noise: (9 if step < 2500 else 18) + noise, {"throughput-decays"}),
    ],
)
def test_a_part_of_the_lines_of_long_metrics_shows_what_all_of_them_do(name, value, causes, tmp_path, monkeypatch):
    run, noise, clock = RunDir(tmp_path), Noise(5, 0.01), "2036-01-01T%02d:%02d:00Z"
    values = [value(step, noise.factor() - 1) for step in range(1, 4001)]
    records = [
        {"step": n, name: v, "time": clock % divmod(n // 3, 60)} for n, v in enumerate(values, 1) if v is not None
    ]
    records += [{"step": n, "lr_mult": 1.0, "grad_norm": 1.0} for n in range(1, 4001) if n % 160 and name == "val_bpb"]
    records.sort(key=lambda record: record["step"])
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))

    def judged_causes():
        return {finding.cause for finding in judge_run(run, since=math.nan, until=math.nan)}

    assert judged_causes() == causes
    monkeypatch.setattr("paceline.explain.evidence.WHOLE_METRICS", 32 << 10)
    assert len(list(metric_lines(run.metrics))) < 700 and judged_causes() == causes


def script_run(path, *, log="", losses=(), held_out=(), state="finished"):
    """A script's run whose one rank wrote a log, and Lightning's file of metrics into the run folder."""
    run = RunDir(path)
    run.logs(1).mkdir(parents=True)
    write_atomic(run.config_toml, 'command = ["train.py"]\n')
    append_event(run, "attempt", attempt=1, nproc=1, world_size=1, pids=[4711])
    run.rank_log(1, 0).write_text(log)
    if losses or held_out:
        rows = [f"{10 * at},{loss}," for at, loss in enumerate(losses)]
        rows += [f"{10 * at},,{loss}" for at, loss in enumerate(held_out)]
        folder = run.path / "lightning_logs/version_0"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("step,train_loss,val_loss\n" + "".join(f"{row}\n" for row in rows))
    if state == "failed":
        append_event(run, "rank_failed", attempt=1, rank=0, exit_code=3, signal=None, message="x", consequence=False)
    append_event(run, "attempt_ended", attempt=1, state=state)
    append_event(run, state)
    return run


GOOD = falling(Noise(2, 0.01), 100)
LINES = "".join(f"step {at} loss {loss}\n" for at, loss in enumerate(LOSSES))
ERROR = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nKeyError: "x"\n'
SCRIPTS = {  # what a script wrote, and the cause and the step of its explanation
    "healthy": ({"log": "loading\n", "losses": GOOD}, "healthy", None),
    "NaN to the end": ({"log": "loading\n", "losses": [*GOOD[:60], *[math.nan] * 40]}, "loss-nan", 600),
    "divergence": ({"log": "loading\n", "losses": LOSSES}, "loss-diverged", 640),
    "overfitting": (
        {"losses": GOOD, "held_out": [abs(at - 40) + 60 for at in range(100)]},
        "validation-turns-up",
        400,
    ),
    "lines that diverge": ({"log": LINES}, "loss-diverged", 64),
    "an error beside a good curve": (
        {"log": ERROR, "losses": GOOD, "state": "failed"},
        "user-code-exception",
        None,
    ),
    "a bare exit code beside a good curve": ({"log": "loading\n", "losses": GOOD, "state": "failed"}, "unknown", None),
    "an error beside NaN": (
        {"log": ERROR, "losses": [*GOOD[:60], *[math.nan] * 40], "state": "failed"},
        "user-code-exception",
        None,
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_explained_by_its_files_of_metrics_and_its_lines_unless_its_log_shows_a_failure(name, tmp_path):
    written, cause, step = SCRIPTS[name]
    explanation = explain_run(script_run(tmp_path / "r", **written))
    assert (explanation.cause, explanation.step) == (cause, step)


@pytest.mark.parametrize(
    ("values", "other", "cause"),
    [
        ({0: 4.1, 100: 4.6, 200: 4.7}, {}, "loss-diverged"),
        ({0: 4.1, 100: 4.6, 200: 4.1}, {}, "healthy"),
        ({0: 4.1, 100: 3.2, 200: 2.9}, {}, "healthy"),
        ({0: 4.1, 200: 4.7}, {}, "healthy"),  # in the warm-up
        ({0: -3.0, 100: -3.0, 200: -3.0}, {}, "healthy"),
        ({0: 2.0, 100: 2.1, 200: 2.1}, {0: 3.0, 100: 2.8, 200: 2.5}, "healthy"),
    ],
)
def test_a_run_that_ends_worse_than_before_its_first_step_has_diverged(values, other, cause, tmp_path):
    run = own_run(tmp_path / "books")
    records = [{"step": 0}, *(json.loads(line) for line in run.metrics.read_text().splitlines())]
    for record in records:
        record.pop("val_bpb", None)
        curves = {"val_bpb": values, "val_books_loss": other}
        record |= {name: curve[record["step"]] for name, curve in curves.items() if record["step"] in curve}
    run.metrics.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    explanation = explain_run(run)
    assert explanation.cause == cause
    is_worse = cause != "healthy"
    assert ("a tenth as high" in explanation.fix, "worse than untrained" in explanation.summary) == (is_worse, is_worse)


@with_rows("name, limit, start, cause", [
    ("ram_used", 64, 30, "healthy"),  # other programs of the host may take so much
    ("ram_used", 64, 51, "memory-grows"),
    ("cgroup_used", 64, 30, "memory-grows"),
])  # fmt: skip
def test_memory_of_a_host_that_grows_by_little_is_a_failure_where_it_is_nearly_full(name, limit, start, cause):
    table = SeriesTable("health/ada.jsonl", prefix="ada ")
    for step in range(200):
        table.add_record({name: round((start + 0.057 * step) * 2**30)}, number=step, time=60.0 * step, step=step)
    [memory] = table.take_series()
    found = [item.cause for item in judge_curves([memory] if grows_by_much(memory, {name: limit * 2**30}) else [])]
    assert found == ([] if cause == "healthy" else [cause])
