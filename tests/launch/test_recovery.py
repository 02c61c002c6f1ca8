"""Real runs that fail and recover: killed, out of a device's or the host's memory, a checkpoint damaged, a script of the user's."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from textwrap import dedent

import pytest
from waiting import wait_for

from paceline.cli import run_command

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from runs import Workshop, events, final_bits, metrics

pytestmark = pytest.mark.dist
SMALL_MEMORY = Path(__file__).with_name("small_memory")
# a size that takes more than a GiB
LARGE = {
    "nproc": 1, "sequence_len": 512, "total_batch_size": 64 * 512, "device_batch_size": 64, "depth": 4, "n_embd": 128,
}  # fmt: skip
DEADLINE_S = 240.0  # against hanging; a run of several attempts on a busy machine
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("recovery"))


@pytest.fixture(scope="module")
def unbroken(shop) -> dict[str, str]:
    return final_bits(shop.train("unbroken", nproc=2, num_steps=30))


def start(command: list[str], **kwargs) -> subprocess.Popen:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **{"env": ENV, **kwargs}
    )


def at_step(run: Path, step: int) -> None:
    wait_for(lambda: (run / "metrics.jsonl").exists() and metrics(run) and metrics(run)[-1]["step"] >= step)


def kill(run: Path, rank: int) -> None:
    os.kill(events(run, "attempt")[-1]["pids"][rank], signal.SIGKILL)


def decisions(run: Path) -> list[tuple]:
    return [(event["action"], event["cause"], event["rank"]) for event in events(run, "decision")]


@pytest.mark.soak
def test_after_a_rank_is_killed_the_run_ends_as_if_nothing_had_happened(shop, unbroken):
    process = start(shop.train_command("killed", nproc=2, num_steps=30, save_every=10))
    run = shop.folder / "runs" / "killed"
    at_step(run, 15)
    kill(run, 1)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    assert decisions(run) == [("retry", "killed-from-outside", 1)]
    assert "attempt 2 now from step 10: this is usually transient" in output
    assert [line["step"] for line in metrics(run)] == list(range(1, 31))
    assert final_bits(run) == unbroken


@pytest.mark.soak
def test_a_run_whose_folder_is_renamed_continues_there_at_once(shop, unbroken):
    process = start(shop.train_command("before", nproc=2, num_steps=30, save_every=10))
    run = shop.folder / "runs" / "before"
    at_step(run, 15)
    run = run.rename(shop.folder / "runs" / "after")
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    assert "attempt 2 now from step 10: continuing in the renamed folder" in output and "put it back" not in output
    assert [line["step"] for line in metrics(run)] == list(range(1, 31))
    assert final_bits(run) == unbroken and not (shop.folder / "runs" / "before").exists()


@pytest.mark.soak
def test_a_stopped_rank_is_reported_and_killed_and_the_run_continues(shop, unbroken):
    process = start([*shop.train_command("stopped", nproc=2, num_steps=30, save_every=10), "--hang-after", "5"])
    run = shop.folder / "runs" / "stopped"
    at_step(run, 15)
    os.kill(events(run, "attempt")[-1]["pids"][1], signal.SIGSTOP)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    assert decisions(run) == [("retry", "hang", 1)]
    [hang] = events(run, "hang")
    assert hang["rank"] == 1
    assert "rank 1 is stopped (state T)" in hang["text"]
    assert [rank["state"] for rank in json.loads((run / "hangs" / "1" / "hang.json").read_text())["ranks"]][1] == "T"
    assert final_bits(run) == unbroken


@pytest.mark.soak
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(shop, unbroken):
    process = start(shop.train_command("damaged", nproc=2, num_steps=30, save_every=10))
    run = shop.folder / "runs" / "damaged"
    wait_for(lambda: (run / "events.jsonl").exists() and len(events(run, "checkpoint")) > 1)
    [file, *_] = sorted((run / "checkpoints" / "step_000020").glob("*.safetensors"))
    with file.open("r+b") as opened:
        opened.seek(-100, os.SEEK_END)
        opened.write(b"\xff" * 50)
    kill(run, 0)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    assert events(run, "resumed")[0]["step"] == 10
    assert final_bits(run) == unbroken


@pytest.mark.soak
def test_a_device_that_runs_out_of_memory_gets_a_smaller_micro_batch_for_the_same_steps(shop, capsys):
    """The same weights as of a run that began with the rows that fit; no later plan chooses the others."""
    env = {**ENV, "PYTHONPATH": str(SMALL_MEMORY), "MOST_ROWS": "3"}
    cache = {"cache_dir": shop.folder / "cache-of-oom"}
    keys = {"nproc": 2, "num_steps": 3, "compile": "false"}
    process = start(shop.train_command("oom", device_batch_size="auto", **keys, **cache), env=env)
    output, _ = process.communicate(timeout=DEADLINE_S)
    run = shop.folder / "runs" / "oom"
    assert process.returncode == 0, output
    assert [(action, cause) for action, cause, _ in decisions(run)] == [("smaller", "cuda-oom")]
    assert "memory ran out: device_batch_size 3 instead of 6, 2 micro-steps instead of 1" in output
    assert events(run, "plan_changed")[-1]["device_batch_size"] == 3
    assert "device_batch_size" not in tomllib.loads((run / "config.toml").read_text())
    assert final_bits(run) == final_bits(shop.train("rows-that-fit", device_batch_size=3, **keys))
    _, _, _, _, *flags = shop.train_command("after-oom", device_batch_size="auto", **keys, **cache)
    to_plan = [flag for flag in flags if not flag.startswith(("--no-check", "--health-every"))]
    assert run_command(["plan", "--json", *to_plan]) == 0
    assert json.loads(capsys.readouterr().out)["device_batch_size"] == 3


@pytest.mark.soak
def test_without_a_smaller_configuration_the_run_stops(shop):
    env = {**ENV, "PYTHONPATH": str(SMALL_MEMORY), "MOST_ROWS": "0"}
    keys = {"nproc": 1, "device_batch_size": 1, "total_batch_size": 64, "activation_checkpointing": "true"}
    keys["compile"] = "false"
    process = start(shop.train_command("hopeless", **keys), env=env)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3
    assert decisions(shop.folder / "runs" / "hopeless") == [("stop", "cuda-oom", 0)]
    assert "no further attempt: memory ran out, and no smaller configuration exists" in output


@pytest.mark.soak
def test_a_host_that_runs_out_of_memory_gets_a_smaller_micro_batch(shop, cgroup):
    """The kernel kills the rank as soon as others have taken what it needs: here, the limit is lowered under it."""
    command = shop.train_command("host", num_steps=2, **LARGE)
    inside = ["bash", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "bash"]
    process = start([*inside, *command])
    run = shop.folder / "runs" / "host"
    wait_for(lambda: (run / "events.jsonl").exists() and events(run, "attempt"))
    (cgroup / "memory.limit_in_bytes").write_text(str(1300 << 20))
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    assert decisions(run)[0] == ("smaller", "host-oom-killed", 0)
    assert json.loads((run / "plan.json").read_text())["device_batch_size"] < 64
    assert metrics(run)[-1]["step"] == 2


@pytest.mark.soak
def test_an_allocator_without_memory_gets_a_smaller_micro_batch(shop):
    """torch's own, under a limit of the address space that half of the rows keep to."""
    command = shop.train_command("capped", num_steps=2, **LARGE)
    limited = ["bash", "-c", 'ulimit -v 1800000; exec "$@"', "bash"]
    process = start([*limited, *command])
    output, _ = process.communicate(timeout=DEADLINE_S)
    run = shop.folder / "runs" / "capped"
    assert process.returncode == 0, output
    assert decisions(run)[0] == ("smaller", "host-oom-killed", 0)
    assert json.loads((run / "plan.json").read_text())["device_batch_size"] < 64
    assert metrics(run)[-1]["step"] == 2


@pytest.mark.soak
def test_ctrl_c_between_two_attempts_ends_at_once_and_shows_how_to_resume(shop):
    process = start(shop.train_command("waiting", nproc=1, num_steps=100_000, compile="false"))
    run = shop.folder / "runs" / "waiting"
    at_step(run, 1)
    kill(run, 0)
    wait_for(lambda: events(run, "decision"))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert len(events(run, "attempt")) == 1
    assert output.rstrip().endswith(f"next    paceline resume {run}")


def run_script(folder: Path, text: str, *flags: str) -> subprocess.CompletedProcess:
    (folder / "train.py").write_text(dedent(text))
    ours = [sys.executable, "-m", "paceline.cli", "run", "--no-check", "--name", "r"]
    command = [*ours, *flags, "--", "train.py", "a b"]
    return subprocess.run(command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.soak
def test_a_script_learns_its_attempt_and_resumes_from_its_own_checkpoint(tmp_path):
    done = run_script(tmp_path, """
        import os, pathlib, signal, sys
        saved = pathlib.Path(os.environ["PACELINE_RUN"]) / "mine.txt"
        print("attempt", os.environ["PACELINE_ATTEMPT"], sys.argv[1:], saved.exists())
        if os.environ["RANK"] == "1" and not saved.exists():
            saved.write_text("step 7")
            os.kill(os.getpid(), signal.SIGKILL)
    """, "--nproc", "2")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "[1] attempt 2 ['a b'] True" in done.stdout
    assert decisions(tmp_path / "runs" / "r") == [("retry", "killed-from-outside", 1)]
    assert "attempt 2 in 1 s: this is usually transient" in done.stderr


@pytest.mark.soak
def test_a_script_whose_port_is_in_use_runs_on_another(tmp_path):
    done = run_script(tmp_path, """
        import os
        import torch.distributed as dist
        if os.environ["PACELINE_ATTEMPT"] == "1":
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # a store of its own, on the port of the agent's
            dist.init_process_group("gloo")
        print("attempt 2 on port", os.environ["MASTER_PORT"])
    """, "--nproc", "1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert decisions(tmp_path / "runs" / "r") == [("other-port", "port-in-use", 0)]
    assert "port in use: retrying on another port" in done.stderr
    assert "attempt 2 on port" in done.stdout


@pytest.mark.parametrize("text, cause", [
    ("import nmupy", "import-error"),
    pytest.param("import torch; torch.ones(2, 3) @ torch.ones(2, 3)", "shape-mismatch", marks=pytest.mark.soak),
    pytest.param("import argparse; argparse.ArgumentParser().parse_args()", None, marks=pytest.mark.soak),
])  # fmt: skip
def test_a_mistake_in_a_script_is_attempted_once_and_explained_last(text, cause, tmp_path):
    done = run_script(tmp_path, text)
    assert done.returncode == 1
    run = tmp_path / "runs" / "r"
    assert len(events(run, "attempt")) == 1
    [verdict] = events(run, "verdict")
    assert cause in (None, verdict["cause"])
    assert verdict["summary"] in done.stderr[done.stderr.index("no further attempt") :]


@pytest.mark.soak
def test_a_script_that_is_always_killed_is_attempted_max_attempts_times(tmp_path):
    done = run_script(tmp_path, "import os; os.kill(os.getpid(), 9)", "--max-attempts", "2")
    assert done.returncode == 137
    assert [action for action, *_ in decisions(tmp_path / "runs" / "r")] == ["retry", "stop"]
    assert "no further attempt: 2 attempts were made, --max-attempts allows no more" in done.stderr


@pytest.mark.soak
def test_a_script_that_hangs_is_reported_and_killed(tmp_path):
    done = run_script(tmp_path, """
        import os, time
        print("ready", flush=True)
        time.sleep(600)
    """, "--nproc", "2", "--hang-after", "2", "--max-attempts", "1")  # fmt: skip
    run = tmp_path / "runs" / "r"
    assert done.returncode == 3
    assert {verdict["cause"] for verdict in events(run, "verdict")} == {"hang"}
    assert "time    " in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("  fix: ")


def start_unread(command: list[str], **kwargs) -> subprocess.Popen:
    """Starts a command whose reader has left before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(command, stdout=writer, stderr=writer, env=ENV, **kwargs)
    os.close(writer)
    return process


@pytest.mark.soak
def test_neither_a_reader_that_leaves_nor_a_full_disk_under_the_log_of_the_screen_ends_a_training(shop, tiny_disk):
    """The reader leaves before the first line; the log is that of a resumed run."""
    config = shop.folder / "nano.py"
    config.write_text("wandb_log = False\n")  # a note about it is the first line
    program, module, cli, train, *keys = shop.train_command("unread", nproc=1, num_steps=4, compile="false")
    run = shop.folder / "runs" / "unread"
    assert start_unread([program, module, cli, train, str(config), *keys]).wait(DEADLINE_S) == 0
    assert metrics(run)[-1]["step"] == 4
    with (tiny_disk / "train.log").open("wb") as log:
        (tiny_disk / "filler").write_bytes(bytes(shutil.disk_usage(tiny_disk).free))
        command = shop.resume_command(run, num_steps=8)
        done = subprocess.run(command, stdout=log, stderr=log, env=ENV, timeout=DEADLINE_S)
    assert done.returncode == 0
    assert metrics(run)[-1]["step"] == 8


@pytest.mark.soak
def test_a_reader_that_leaves_before_the_first_line_or_has_seen_enough_prevents_no_resume(shop):
    run = shop.train("resumed-unread", nproc=1, num_steps=4, compile="false")
    assert start_unread(shop.resume_command(run, num_steps=8)).wait(DEADLINE_S) == 0
    assert metrics(run)[-1]["step"] == 8
    command = " ".join(shop.resume_command(run, num_steps=12))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -2"], env=ENV, capture_output=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    assert metrics(run)[-1]["step"] == 12
