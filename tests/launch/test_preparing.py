"""A command that prepares text can be watched, and leaves nothing behind where it ends before the training."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from waiting import wait_for

from paceline.launch.background import check_unused
from paceline.rundir import RunDir, lock_run
from paceline.watch.panels import run_panels
from paceline.watch.status import RunList, open_reader, run_status
from paceline.watch.summary import summarize
from paceline.watch.terminal.pages import format_once

DEADLINE_S = 120
CLI = [sys.executable, "-m", "paceline.cli"]
TRAIN = [*CLI, "train", "--no-check", "--depth=2", "--sequence-len=64", "--name=books"]


@pytest.fixture
def preparing(tmp_path):
    """A real command that prepares four megabytes of text, and its run folder."""
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 9))) for _ in range(2000)]
    (tmp_path / "books.txt").write_text("\n".join(" ".join(chance.choices(words, k=100)) for _ in range(6000)))
    keys = ["--data", "books.txt", "--vocab-size", "1024", "--cache-dir", str(tmp_path / "cache")]
    keys += ["--tag", "wide", "--tag=first", "--note", "a new  text"]
    process = subprocess.Popen(
        [*TRAIN, *keys], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    yield process, RunDir(tmp_path / "runs" / "books")
    process.kill()
    process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_text_that_is_prepared_is_a_state_with_progress_and_an_end_of_the_command_is_reported(preparing, signum):
    process, run = preparing
    wait_for(run.preparing_json.exists)
    reader = open_reader(run.path)

    def tokenizing():
        snapshot = reader.update()
        return snapshot if (snapshot.preparing or {}).get("label") == "tokenize" else None

    snapshot = wait_for(tokenizing)
    assert (snapshot.state, [status.state for status in RunList(run.path.parent).read()]) == (
        "preparing",
        ["preparing"],
    )
    (status,) = RunList(run.path.parent).read()
    assert (status.tags, status.note) == (["wide", "first"], "a new text")
    assert 0 < snapshot.preparing["share"] <= 1
    explained = subprocess.run([*CLI, "explain", str(run.path)], capture_output=True, text=True, timeout=DEADLINE_S)
    line = "healthy: books has no attempt yet: its command is preparing it\n"
    assert (explained.returncode, explained.stdout) == (0, line), explained
    assert "tokenize, " in summarize(snapshot, now=time.time()).text
    assert "preparing" in format_once(snapshot, now=time.time(), width=80)
    assert run_panels(snapshot, now=time.time())["head"]["progress"]["percent"] > 0
    os.kill(process.pid, signum)
    assert process.wait(DEADLINE_S) == 130
    assert process.stderr.read().splitlines()[-1] == b"interrupted"
    assert not run.path.exists()
    text = "The command ended before the training began; its own output shows why."
    assert (reader.update().state, summarize(reader.update(), now=time.time()).text) == ("gone", text)


def test_what_a_killed_preparation_leaves_is_no_run_and_its_name_can_be_used(preparing):
    process, run = preparing
    wait_for(run.preparing_json.exists)
    process.kill()
    process.wait()
    assert run.preparing_json.exists()
    assert RunList(run.path.parent).read() == []
    check_unused(run, fix="another name")


def test_a_viewer_goes_over_from_the_preparation_to_the_run(tmp_path):
    run = RunDir(tmp_path / "r")
    run.path.mkdir()
    lock = lock_run(run)
    moment = "2026-11-21T12:00:00.000Z"
    times = f'"started": "{moment}", "since": "{moment}", "time": "{moment}"'
    run.preparing_json.write_text(f'{{{times}, "label": "tokenize", "share": 0.25}}')
    reader = open_reader(run.path)
    assert (reader.update().state, run_status(run).state) == ("preparing", "preparing")
    run.config_toml.write_text("depth = 2\n")
    run.preparing_json.unlink()
    assert (reader.update().state, run_status(run).state) == ("starting", "starting")
    os.close(lock)


SCRIPT = [*CLI, "run", "--device=cpu", "--nproc=1", "--name=s", "--"]
TINY = ["--device=cpu", "--nproc=1", "--n-embd=64", "--head-dim=32", "--vocab-size=300"]


@pytest.mark.parametrize(
    "command, line",
    [
        pytest.param([*TRAIN, *TINY], "memory ", id="train", marks=pytest.mark.soak),
        pytest.param([*SCRIPT, "wait.py"], "script ", id="run"),
    ],
)
def test_a_stop_before_the_first_attempt_is_a_stop_in_every_view(tmp_path, command, line):
    (tmp_path / "wait.py").write_text("import time\ntime.sleep(600)\n")
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert any(text.startswith(line) for text in process.stdout)  # the lines of a plan come at once
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE_S)
    [run] = map(RunDir, (tmp_path / "runs").iterdir())
    assert (process.returncode, f"next    paceline resume runs/{run.name}" in output.splitlines()) == (130, True)
    assert (run_status(run).state, open_reader(run.path).update().state) == ("stopped", "stopped")
    assert run_status(run).time is not None


def test_a_run_whose_command_was_killed_before_the_first_attempt_says_so_and_has_the_time_of_its_folder(tmp_path):
    run = RunDir(tmp_path / "r")
    run.path.mkdir()
    run.config_toml.write_text("depth = 2\n")
    os.utime(run.config_toml, (1e9, 1e9))
    status, snapshot = run_status(run), open_reader(run.path).update()
    note = "nothing was started: the command ended before the first attempt; paceline resume starts it"
    assert (status.state, status.time, status.notes[-1]) == ("broken", "2001-09-09T01:46:40.000Z", note)
    assert (snapshot.state, snapshot.updated, snapshot.notes[-1]) == ("broken", 1e9, note)
    run.logs(1).mkdir(parents=True)  # its events are lost
    assert note not in run_status(run).notes and note not in open_reader(run.path).update().notes
