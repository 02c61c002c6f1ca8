"""Nothing that a run contains steers the terminal of who looks at it, whichever command prints it."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress

import pytest
from run_folders import utc, write_run

from paceline import terminal
from paceline.cli import run_command
from paceline.rundir import append_json_line, write_atomic
from paceline.terminal import STEERING, PlainStream, own_stream, problem_of

EVIL = "\x1b[2J\x1b]52;c;ZXZpbA==\x07\x1b]0;title\x1b\\\x9b2J\r\x08\u202e\x1b[31mred\x1b[0m\x1bc"
NAME = f"kept{EVIL.replace('/', '')}"
COMMANDS = (
    ["runs", "."],
    ["runs", ".", "--json"],
    ["runs", "show", NAME, "--runs-dir", "."],
    ["runs", "show", NAME, "--runs-dir", ".", "--json"],
    ["watch", NAME, "--runs-dir", ".", "--once"],
    ["watch", NAME, "--runs-dir", ".", "--once", "--json"],
    ["watch", "--log", f"{NAME}/logs/1/0.log", "--once"],
    ["explain", NAME, "--runs-dir", "."],
    ["explain", NAME, "--runs-dir", ".", "--markdown"],
    ["explain", f"{NAME}/logs/1/0.log"],
    ["report", NAME, "--runs-dir", "."],
    ["report", NAME, "--runs-dir", ".", "--markdown"],
    ["resume", NAME, "--runs-dir", "."],
    ["watch", f"no{EVIL}"],
    ["explain", f"no{EVIL}"],
    ["plan", "--run_name", EVIL],
    [f"no{EVIL}"],
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a failed run in whose every text there are escape sequences."""
    folder = tmp_path_factory.mktemp("runs")
    log = f"step 1 loss 2.0\n[rank0]: Traceback (most recent call last):\nValueError: {EVIL} broken\n"
    run = write_run(folder, NAME, end=None, log=log, note=EVIL)
    for event in (
        {"event": "note", "text": EVIL},
        {"event": "rank_failed", "rank": 0, "message": EVIL},
        {"event": "attempt_ended", "attempt": 1, "state": "failed"},
        {"event": "verdict", "attempt": 1, "cause": f"cause{EVIL}", "summary": EVIL, "fix": EVIL},
        {"event": "decision", "attempt": 1, "action": "stop", "why": EVIL},
        {"event": "failed"},
    ):
        append_json_line(run.events, {"time": utc(120), **event})
    run.findings.write_text(json.dumps([{"id": "x", "severity": "warn", "what": EVIL, "why": EVIL, "fix": EVIL}]))
    run.samples.mkdir()
    run.sample(1).write_text(EVIL)
    return folder


@pytest.mark.parametrize(
    "command", COMMANDS, ids=lambda command: " ".join(command).replace(EVIL, "").replace(NAME, "RUN")
)
def test_no_command_prints_an_escape_sequence_of_a_run(command, runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    run_command(command)
    output = capsys.readouterr()
    assert output.out or output.err
    assert STEERING.findall(output.out + output.err) == []


@pytest.mark.soak  # every command prints through the same stream, so the tests above show it too
def test_the_last_lines_of_a_script_that_fails_are_plain(tmp_path):
    (tmp_path / "fail.py").write_text(f"raise ValueError({EVIL!r} + ' broken')\n")
    command = [
        sys.executable,
        "-m",
        "paceline.cli",
        "run",
        "--no-check",
        "--nproc",
        "1",
        "--max-attempts",
        "1",
        "--",
        "fail.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode and "broken" in done.stdout + done.stderr
    assert STEERING.findall(done.stdout + done.stderr) == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_colours_and_nothing_else_but_from_a_bar_of_our_own(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    print(f"before {EVIL} after", file=PlainStream(terminal), end="")
    assert terminal.getvalue() == "before 2J\x1b[31mred\x1b[0m after"
    print("\r\x1b[2K", file=own_stream(PlainStream(terminal)), end="")
    assert terminal.getvalue().endswith("\r\x1b[2K")


@pytest.mark.parametrize(
    ("env", "expected"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)],
)
def test_no_command_colours_a_terminal_that_has_no_colours_or_whose_user_wants_none(env, expected, runs):
    words = [sys.executable, "-m", "paceline.cli"]
    for command in (["explain", "."], ["watch", ".", "--once"]):
        ours, theirs = pty.openpty()
        clean = {name: value for name, value in os.environ.items() if name not in ("TERM", "NO_COLOR")}
        viewer = subprocess.Popen(
            [*words, *command], cwd=runs / NAME, stdin=theirs, stdout=theirs, stderr=theirs, env=clean | env
        )
        os.close(theirs)
        output = b""
        with suppress(OSError):  # the other end is closed
            while chunk := os.read(ours, 4096):
                output += chunk
        os.close(ours)
        assert (viewer.wait(), b"\x1b" in output) == (0, expected), output


def test_a_full_disk_behind_stdout_is_one_line(runs):
    command = [sys.executable, "-m", "paceline.cli", "watch", NAME, "--runs-dir", str(runs), "--once"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    lines = ["error: the output cannot be written: No space left on device", "  fix: write it to another place"]
    assert (done.returncode, done.stderr.splitlines()) == (1, lines)


def test_a_file_that_a_full_disk_takes_no_more_is_no_output(tiny_disk):
    (tiny_disk / "fill").write_bytes(b"x" * (1 << 20))
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomic(tiny_disk / "config.toml", "depth = 2")
    problem = problem_of(caught.value)
    assert problem.message == f"{tiny_disk}/config.toml cannot be written: No space left on device"
    assert problem.fix == "make room in its file system (df -h), then repeat the command"


def test_a_bar_stays_one_on_a_terminal_without_utf8():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainStream(stream).write("weights █▊··  caf\xe9\n")
    stream.seek(0)
    assert stream.read() == "weights ##..  caf?\n"


def test_long_work_in_a_pipe_prints_how_far_it_is_and_how_long_it_may_still_take(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.0)
    with terminal.show_progress() as progress:
        for done in (0, 1, 3):
            progress("evaluate", done, 4)
    first, *following = capsys.readouterr().err.splitlines()
    assert first == "evaluate ..."
    assert [re.sub(r"\d+\w+ left", "TIME left", line) for line in following] == [
        "evaluate 25 %, TIME left",
        "evaluate 75 %, TIME left",
    ]
