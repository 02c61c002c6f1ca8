"""`paceline watch --once`, and which run the command means."""

import json
import os
import pty
import re
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from snapshots import NOW, STATES, failed, hostile, training, unknown_log

from paceline.cli import run_command
from paceline.run_options import WatchOptions
from paceline.rundir import RunDir, append_json_line, lock_run
from paceline.watch.terminal.pages import format_once
from paceline.watch.view import folder_of_runs


def once(snapshot, **options) -> str:
    return format_once(snapshot, **{"now": NOW, "width": 100, **options})


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_only_cause_and_fix_may_be_wider_than_the_terminal(state, width):
    lines = once(STATES[state](NOW), width=width).splitlines()
    assert lines[0].startswith(" ")
    assert all(len(line) <= width or re.match(r" (cause|fix): ", line) for line in lines)
    assert not any(line.endswith(" ") for line in lines)


def test_a_training_shows_all_blocks():
    output = once(training())
    for word in (
        "books  ● training", "49.6 %", "1,240/2,500  12m51s left", "loss 2.9216", "── curves ──", " val_bpb ", "── machines ──",
        "26.3/31.4 GiB", "97 %", "cpu 23 % of 32", "── ranks, own work per step", "── plan ──", "── time ──", "steps that counted",
        "── events, UTC ──", "08:29:29  ! steps take 612 ms",
    ):  # fmt: skip
        assert word in output


def test_unknown_values_take_no_line():
    assert once(replace(unknown_log(), notes=[])).splitlines() == [
        " output.txt  ? unknown  5m00s ago" + " " * 49 + "log  08:33:20 UTC",
        " n/a  " + "─" * 93,
        " · This log shows no known step, no known loss and no known error.",
    ]


def test_cause_and_fix_are_whole_lines():
    lines = once(failed(), width=60).splitlines()
    assert (
        " cause: cuda-oom: rank 1 asked for 2.00 GiB more than its GPU had (31.4 GiB, 29.9 in use by this process)"
        in lines
    )
    assert " fix: paceline resume books --device-batch-size 16" in lines


def test_a_pipe_gets_no_colour_codes_and_an_old_terminal_plain_characters():
    assert "\x1b" not in once(hostile())
    assert "\x1b[31m" in once(failed(), colour=True)
    assert once(failed(), ascii_only=True).isascii()


def make_run(folder, name: str) -> RunDir:
    run = RunDir(folder / "runs" / name)
    run.path.mkdir(parents=True)
    run.config_toml.write_text("depth = 4\n")
    run.plan_json.write_text('{"num_steps": 100, "total_batch_size": 1000}')
    time = f"2026-11-21T12:00:{len(list(run.path.parent.iterdir())):02d}.000Z"  # each run later than those before it
    append_json_line(run.events, {"time": time, "event": "attempt", "attempt": 1, "world_size": 1})
    append_json_line(
        run.metrics, {"time": time.replace("T12", "T13"), "step": 50, "loss": 2.5, "tok_per_sec": 1e3, "step_ms": 9.0}
    )
    return run


def test_without_arguments_the_running_run_is_shown_else_the_latest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, _ = make_run(tmp_path, "first"), make_run(tmp_path, "second")
    assert run_command(["watch", "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "second"
    fd = lock_run(first)
    run_command(["watch", "--once", "--json"])
    assert json.loads(capsys.readouterr().out)["name"] == "first"
    os.close(fd)


def test_a_run_is_given_by_its_name_and_a_log_with_or_without_its_option(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "first")
    (tmp_path / "any.log").write_text("step 00010/00100 | loss 3.5\n" * 3)
    for args, name in ((["first"], "first"), (["--log", "any.log"], "any.log"), (["any.log"], "any.log")):
        assert run_command(["watch", *args, "--once"]) == 0
        assert capsys.readouterr().out.startswith(f" {name}  ")


@pytest.mark.parametrize(
    ("runs_dir", "given", "listed"),
    [
        ("runs", "elsewhere/runs/first", "elsewhere/runs"),  # the run's neighbours
        ("runs", ".", ""),
        ("other", "elsewhere/runs/first", "other"),
        ("runs", "any.log", "runs"),
        ("runs", None, "runs"),
    ],
)
def test_the_listed_runs_are_those_beside_the_given_run_unless_a_folder_is_set(
    runs_dir, given, listed, tmp_path, monkeypatch
):
    here = tmp_path / "here"
    here.mkdir()
    make_run(here / "elsewhere", "first")
    monkeypatch.chdir(here)
    folder = folder_of_runs(WatchOptions(runs_dir=runs_dir), given and Path(given))
    assert (here / folder).resolve() == (here / listed if listed else tmp_path)


def test_in_a_pipe_it_prints_once_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "first")
    assert run_command(["watch"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(" first  ") and "not a terminal: printing one view" in output.err


def test_a_terminal_whose_standard_error_is_a_file_gets_one_view_in_place_of_a_blank_screen(tmp_path):
    make_run(tmp_path, "first")
    ours, theirs = pty.openpty()
    with (tmp_path / "errors").open("w") as errors:
        words = [sys.executable, "-m", "paceline.cli", "watch"]
        env = {**os.environ, "TERM": "xterm"}
        viewer = subprocess.Popen(words, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=errors, env=env)
    os.close(theirs)
    ready, _, _ = select.select([ours], [], [], 30)
    screen = os.read(ours, 1000).decode() if ready else ""
    viewer.kill()
    viewer.wait()
    os.close(ours)
    assert "first" in screen
    assert (tmp_path / "errors").read_text().startswith("standard error is not a terminal: printing one view")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 1, "no runs in runs"),
        (["nowhere"], 1, "no run nowhere"),
        (["--log", "nowhere.log", "--once"], 1, "no such file: nowhere.log"),
        (["a", "b"], 2, "watch takes one RUN"),
        (["a", "--log", "b"], 2, "both are given"),
        (["--interval", "0"], 2, "--interval 0 is out of range"),
        (["--json"], 1, "no runs in runs"),
        (["--port", "80"], 2, "--port and --open need --web"),
        (["--web", "--once", "--json"], 2, "--once cannot be combined with --web"),
        (["--web", "--interval", "5"], 2, "--interval cannot be combined with --web"),
        (["--web", "--ascii"], 2, "--ascii cannot be combined with --web"),
    ],
)
def test_a_wrong_argument_is_an_error_with_a_fix(args, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command(["watch", *args]) == code
    error = capsys.readouterr().err
    assert message in error and "fix: " in error


def test_help_and_once_load_no_heavy_library(tmp_path):
    make_run(tmp_path, "first")
    for args in (["watch", "--help"], ["watch", "--once"]):
        code = (
            "import sys; from paceline.cli import run_command; run_command(sys.argv[1:]);"
            "print('loaded', {'torch', 'rich', 'textual', 'starlette'} & set(sys.modules))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=tmp_path, check=True
        )
        assert done.stdout.splitlines()[-1] == "loaded set()"
