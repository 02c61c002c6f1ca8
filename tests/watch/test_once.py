"""`paceline watch --once`, and which run the command means."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from snapshots import NOW, STATES, failed, hostile, training, unknown_log

from paceline.cli import run_command
from paceline.rundir import RunDir, append_json_line, lock_run
from paceline.watch.look import KNOWN
from paceline.watch.once import format_once


def once(snapshot, **options) -> str:
    return format_once(snapshot, **{"now": NOW, "width": 100, **options})


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("width", [60, 100, 200])
def test_no_line_is_wider_than_asked_but_cause_and_fix(state, width):
    lines = once(STATES[state](NOW), width=width).splitlines()
    assert lines[0].startswith(" ")
    assert all(len(line) <= width or re.match(r" (cause|fix): ", line) for line in lines)
    assert not any(line.endswith(" ") for line in lines)


def test_everything_that_is_known_of_a_training():
    shown = once(training())
    for word in (
        "books  ● training", "49.6 %", "1,240/2,500  12m51s left", "loss 2.9216", "── curves ──", " val_bpb ", "── machines ──",
        "26.3/31.4 GiB", "97 %", "cpu 23 % of 32", "── ranks, own work a step", "── plan ──", "── time ──", "steps that counted",
        "── events, UTC ──", "08:29:29  ! steps take 612 ms",
    ):  # fmt: skip
        assert word in shown


def test_what_is_not_known_takes_no_line():
    assert once(replace(unknown_log(), notes=[])).splitlines() == [
        " output.txt  ? unknown  5m00s ago" + " " * 49 + "log  08:33:20 UTC",
        " n/a  " + "─" * 93,
    ]


def test_cause_and_fix_stand_whole_on_a_line_each():
    lines = once(failed(), width=60).splitlines()
    assert (
        " cause: cuda-oom: rank 1 asked for 2.00 GiB more than its GPU had (31.4 GiB, 29.9 in use by this process)"
        in lines
    )
    assert " fix: paceline resume books --device-batch-size 16" in lines


def test_a_pipe_gets_no_codes_a_terminal_its_colours_and_an_old_one_plain_characters():
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
        run.metrics, {"time": "2026-11-21T13:00:00.000Z", "step": 50, "loss": 2.5, "tok_per_sec": 1e3, "step_ms": 9.0}
    )
    return run


def test_without_a_word_it_is_the_run_that_runs_else_the_latest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, _ = make_run(tmp_path, "first"), make_run(tmp_path, "second")
    assert run_command(["watch", "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "second"
    fd = lock_run(first)
    run_command(["watch", "--once", "--json"])
    assert json.loads(capsys.readouterr().out)["name"] == "first"
    os.close(fd)


def test_a_run_by_its_name_a_log_with_and_without_saying_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "first")
    (tmp_path / "any.log").write_text("step 00010/00100 | loss 3.5\n" * 3)
    for words, name in ((["first"], "first"), (["--log", "any.log"], "any.log"), (["any.log"], "any.log")):
        assert run_command(["watch", *words, "--once"]) == 0
        assert capsys.readouterr().out.startswith(f" {name}  ")


def test_in_a_pipe_it_looks_once_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "first")
    assert run_command(["watch"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(" first  ") and "no terminal: one look" in shown.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 1, "no runs in runs"),
        (["nowhere"], 1, "no run nowhere"),
        (["--log", "nowhere.log", "--once"], 1, "no such file: nowhere.log"),
        (["a", "b"], 2, "watch takes one RUN"),
        (["a", "--log", "b"], 2, "both are given"),
        (["--interval", "0"], 2, "--interval 0: not between"),
        (["--json"], 2, "--json is of --once"),
        (["--port", "80"], 2, "--port and --open are of --web"),
        (["--web", "--once", "--json"], 2, "--once is not of --web"),
        (["--web", "--interval", "5"], 2, "--interval is not of --web"),
        (["--web", "--ascii"], 2, "--ascii is not of --web"),
    ],
)
def test_what_cannot_be_watched_is_said_with_a_fix(words, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command(["watch", *words]) == code
    error = capsys.readouterr().err
    assert said in error and "fix: " in error


def test_the_help_of_watch_names_every_option(capsys):
    assert run_command(["watch", "--help"]) == 0
    usage = capsys.readouterr().out.partition("\n\n")[0]
    assert [name for name in KNOWN if f"--{name}" not in usage] == []


def test_help_and_one_look_load_no_library(tmp_path):
    make_run(tmp_path, "first")
    for words in (["watch", "--help"], ["watch", "--once"]):
        code = (
            "import sys; from paceline.cli import run_command; run_command(sys.argv[1:]);"
            "print('loaded', {'torch', 'rich', 'textual', 'starlette'} & set(sys.modules))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path, check=True
        )
        assert done.stdout.splitlines()[-1] == "loaded set()"
