"""What a training prints, on a pipe and on a terminal, from its files alone; and what is printed about a failure."""

import io
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rows import with_rows

from paceline.errors import Finding
from paceline.heartbeat import HeartbeatWriter
from paceline.launch.attempts import format_failure
from paceline.launch.digest import Digest, NewRecords, format_step, seconds_left
from paceline.launch.failure import Failure
from paceline.launch.supervisor import Outcome
from paceline.rundir import RunDir, append_event, append_json_line, utc_now, write_atomic

STEP = {
    "step": 120, "loss": 4.12034, "lr_mult": 1.0, "grad_norm": 0.4, "step_ms": 612.2, "tok_per_sec": 856679.4,
    "mfu": 0.412, "peak_bytes": 40909668352, "time": "2026-11-20T10:00:00.000Z",
}  # fmt: skip


def metrics(step, **fields):
    return {**STEP, "step": step, "time": utc_now(), **fields}


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def digest(run, stream):
    return Digest(run, num_steps=2500, total_batch_size=524_288, stream=stream)


UNKNOWN = dict.fromkeys(("step_ms", "tok_per_sec", "mfu", "peak_bytes"))


@with_rows(("fields", "num_steps", "eta_s", "line"), [
    ({}, 2500, 1457, "step 00120/02500 | loss 4.1203 | 612 ms | 856,679 tok/s | mfu 41.2% | 38.1 GiB | eta 24m17s"),
    (UNKNOWN, 2500, None, "step 00120/02500 | loss 4.1203 | n/a ms | n/a tok/s | mfu n/a | n/a GiB | eta n/a"),
    # quick steps keep decimals, and long runs their columns
    ({"step_ms": 8.44}, 1_000_000, 1,
     "step 0000120/1000000 | loss 4.1203 | 8.44 ms | 856,679 tok/s | mfu 41.2% | 38.1 GiB | eta 1s"),
])  # fmt: skip
def test_a_step_is_one_line_with_units(fields, num_steps, eta_s, line):
    assert format_step({**STEP, **fields}, num_steps=num_steps, eta_s=eta_s) == line


def test_a_pipe_gets_a_line_for_each_step_and_event_in_order(run, stream, digest):
    append_event(run, "attempt", attempt=1, nproc=2, world_size=2)
    append_json_line(run.metrics, metrics(1, mfu=None))
    append_json_line(run.metrics, metrics(2, val_bpb=1.70124))
    append_event(run, "checkpoint", step=2, seconds=3.44, bytes=1 << 30)
    append_event(run, "sample", step=2, text="def main():\n    pass")
    append_event(run, "note", text="compile pays: on")
    digest.close()
    first, second, *lines = stream.getvalue().splitlines()
    assert first.startswith("step 00001/02500 | loss 4.1203 | 612 ms | 856,679 tok/s | mfu n/a | 38.1 GiB | eta 25m")
    assert second.startswith("step 00002/02500 | loss ")
    assert lines == [
        "step 00002/02500 | val_bpb 1.7012",
        "step 00002/02500 | checkpoint saved | 1.0 GiB | 3.4 s",
        "step 00002/02500 | sample: def main(): pass",
        "compile pays: on",
    ]


def test_the_sample_of_the_last_step_is_left_to_the_closing_lines(run, stream):
    digest = Digest(run, num_steps=10, total_batch_size=1, stream=stream)
    for step in (5, 10):
        append_event(run, "sample", step=step, text="def main(): pass")
    digest.close()
    assert stream.getvalue().splitlines() == ["step 00005/00010 | sample: def main(): pass"]


def test_a_half_written_line_is_shown_once_it_is_whole(run, stream, digest):
    line = json.dumps(metrics(1)).encode() + b"\n"
    with run.metrics.open("ab", buffering=0) as file:
        file.write(line[:40])
        digest.poll()
        assert stream.getvalue() == ""
        file.write(line[40:] + b'{"broken\n[1]\n')
    digest.poll()
    digest.poll()
    assert stream.getvalue().count("\n") == 1


def test_a_resumed_run_does_not_repeat_what_was_shown_before(run, stream):
    append_json_line(run.metrics, metrics(1))
    time.sleep(0.002)
    digest = Digest(run, num_steps=10, total_batch_size=1, stream=stream)
    append_json_line(run.metrics, metrics(2))
    digest.poll()
    assert stream.getvalue().startswith("step 00002/00010 ")


def test_steps_that_a_resume_repeats_are_shown_again(run, stream):
    for step in (1, 2, 3):
        append_json_line(run.metrics, metrics(step))
    digest = Digest(run, num_steps=10, total_batch_size=1, stream=stream)
    time.sleep(0.002)
    first, _, _ = run.metrics.read_text().splitlines(keepends=True)
    write_atomic(run.metrics, first)  # the worker removes what came after its checkpoint
    append_json_line(run.metrics, metrics(2))
    digest.poll()
    append_json_line(run.metrics, metrics(3))
    digest.poll()
    assert [line.split(" | ")[0] for line in stream.getvalue().splitlines()] == ["step 00002/00010", "step 00003/00010"]


def test_the_time_left_counts_what_happens_between_steps():
    records = [
        {"step": 10, "time": "2026-01-01T00:00:00.000Z", "step_ms": 1000.0},
        {"step": 30, "time": "2026-01-01T00:01:00.000Z", "step_ms": 1000.0},
    ]
    assert seconds_left(records[:1], num_steps=30) == 20.0
    assert seconds_left(records, num_steps=130) == 300.0
    assert seconds_left([{"step": 1, "time": "2026-01-01T00:00:00.000Z"}], num_steps=2) is None


def test_a_finding_is_shown_whole(run, stream, digest):
    append_event(
        run, "finding", **Finding("slow-link", "warn", "a slow link", "steps take longer", "use another").to_json()
    )
    digest.poll()
    assert stream.getvalue().splitlines() == [
        "warn  slow-link  a slow link",
        "  why            steps take longer",
        "  fix            use another",
    ]


def test_records_start_at_an_offset_that_somebody_else_has_read(run):
    append_event(run, "finished")
    assert [event["event"] for event in NewRecords(run.events, offset=0).read()] == ["finished"]
    assert NewRecords(run.events).read() == []


def test_the_order_to_stop_is_shown_once_though_every_process_writes_it(run, stream, digest):
    append_event(run, "stopping", signal="SIGINT")
    append_event(run, "stopping", step=3)
    digest.poll()
    assert stream.getvalue() == "stopping on SIGINT; Ctrl-C again to end now\n"


BY_CTRL_C, BY_NOTICE = {"signal": "SIGINT"}, {"reason": "the notice file x", "seconds_left": 30}
SLOW = {"step_ms": 53e3}


@pytest.mark.parametrize(("step", "phase", "order", "start", "end"), [
    ({}, "train", BY_CTRL_C, "stopping on SIGINT: saving a checkpoint; ", "Ctrl-C again to end now"),
    (SLOW, "forward", BY_CTRL_C, "stopping on SIGINT: finishing the step, 53s each, ", "then saving a checkpoint, 1m00s at most; "),
    (SLOW, "eval", BY_CTRL_C, "stopping on SIGINT: finishing the evaluation, ", "then saving a checkpoint, 1m00s at most; "),
    (SLOW, "forward", BY_NOTICE, "stopping on the notice file x, 30 s left: finishing the step, ", ", 30s at most; "),
])  # fmt: skip
def test_a_stop_says_what_it_waits_for_and_how_long_at_most(run, stream, digest, step, phase, order, start, end):
    append_json_line(run.metrics, {"step": 1, "loss": 2.0, "time": "2026-01-01T00:00:00.000Z", **step})
    HeartbeatWriter(run, 0).beat(1, phase)
    append_event(run, "stopping", **order)
    digest.poll()
    last = stream.getvalue().splitlines()[-1]
    assert last.startswith(start) and end in last


def on_a_terminal(run: RunDir, env: dict[str, str]) -> str:
    """All that a real terminal of 100 columns receives while a digest shows three steps."""
    script = Path(__file__).with_name("show_digest.py")
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(script), str(run.path)], stdout=follower, env={**os.environ, "COLUMNS": "100", **env}
    )
    os.close(follower)
    received = b""
    try:
        while chunk := os.read(leader, 1 << 16):
            received += chunk
    except OSError:  # Linux says so when the other end is closed
        pass
    assert process.wait() == 0
    return received.decode()


def test_a_terminal_gets_a_bar_with_the_events_above_it(run):
    received = on_a_terminal(run, {"TERM": "xterm-256color"})
    assert "step 3/3" in received
    assert "loss 4.1203" in received
    assert "step 00003/00003 | checkpoint saved | 1.0 MiB | 0.5 s\r\n" in received
    assert "\x1b[38;5;" in received or "\x1b[3" in received


def test_no_color_is_respected_on_a_terminal(run):
    received = on_a_terminal(run, {"TERM": "xterm-256color", "NO_COLOR": "1"})
    assert "step 3/3" in received
    assert "\x1b[3" not in received


def test_a_dumb_terminal_gets_plain_lines(run):
    received = on_a_terminal(run, {"TERM": "dumb"})
    assert "\x1b" not in received
    assert received.count("| loss 4.1203 |") == 3


def failure(rank, message, **fields):
    return Failure(
        rank, **{"exit_code": 1, "signal": None, "message": message, "time": 0.0, "consequence": False, **fields}
    )


def test_a_failure_names_the_rank_and_shows_its_own_traceback_and_log(run):
    traceback = "Traceback (most recent call last):\n  ...\nValueError: boom"
    lost = failure(0, "RuntimeError: Connection closed by peer", consequence=True)
    outcome = Outcome("failed", 3, 2, [failure(1, "ValueError: boom", traceback=traceback), lost])
    assert format_failure(outcome, run).splitlines() == [
        "rank 1 failed: ValueError: boom",
        "rank 0 ended after it: RuntimeError: Connection closed by peer",
        "",
        *traceback.splitlines(),
        "",
        f"log: {run.path}/logs/2/1.log",
    ]


def test_a_mistake_of_the_user_is_shown_as_error_and_fix_without_a_traceback(run):
    outcome = Outcome("failed", 1, 1, [failure(0, "no room", fix="make room", traceback="Traceback ...")])
    assert format_failure(outcome, run).splitlines() == [
        f"rank 0 failed, log: {run.path}/logs/1/0.log",
        "error: no room",
        "  fix: make room",
    ]


def test_a_rank_without_a_traceback_is_shown_with_the_end_of_its_log(run):
    run.logs(1).mkdir(parents=True)
    run.rank_log(1, 0).write_text("".join(f"line {number}\n" for number in range(30)))
    shown = format_failure(
        Outcome("failed", 3, 1, [failure(0, "ended by SIGKILL", signal="SIGKILL")]), run
    ).splitlines()
    assert shown == [
        "rank 0 failed: ended by SIGKILL",
        "",
        *(f"line {n}" for n in range(20, 30)),
        "",
        f"log: {run.path}/logs/1/0.log",
    ]


def test_a_launch_that_failed_before_any_rank_points_at_its_own_log(run):
    outcome = Outcome("failed", 3, 1, [failure(None, "the launch agent was killed by SIGKILL")])
    assert format_failure(outcome, run) == (
        f"launch failed: the launch agent was killed by SIGKILL\nlog: {run.path}/logs/1/launch.log"
    )
