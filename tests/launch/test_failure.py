"""Which rank failed first, from what the ranks left behind."""

import json
import os
import socket

import pytest

from paceline.explain.explanation import Evidence, Explanation
from paceline.explain.run_folder import explain_run
from paceline.heartbeat import HeartbeatWriter
from paceline.launch.failure import (
    Failure,
    explain_end,
    find_early_exits,
    find_failures,
    find_script_exits,
    port_holder,
)
from paceline.rundir import RunDir, append_event

BOOM = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nValueError: boom\n'
PEER = BOOM.replace("ValueError: boom", "RuntimeError: [../pair.cc:553] Connection closed by peer [127.0.0.1]:1")


def ended(rank, exit_code, *, time=100.0, ended_by_us=False, is_shell=False):
    return {"rank": rank, "exit_code": exit_code, "time": time, "ended_by_us": ended_by_us, "is_shell": is_shell}


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path)
    run.logs(1).mkdir(parents=True)
    return run


def test_a_rank_that_lost_its_peer_is_not_the_root_though_it_ended_first(run):
    run.rank_log(1, 0).write_text(PEER)
    run.rank_log(1, 1).write_text(BOOM)
    failures = find_failures(run, 1, [ended(0, 1, time=100.0), ended(1, 1, time=100.5)])
    assert [(failure.rank, failure.consequence) for failure in failures] == [(1, False), (0, True)]


def test_a_rank_that_hangs_with_its_own_error_until_it_is_ended_is_the_root(run):
    run.rank_log(1, 0).write_text(PEER)
    run.rank_log(1, 1).write_text(BOOM)
    failures = find_failures(run, 1, [ended(0, 1), ended(1, -9, time=103.0, ended_by_us=True)])
    assert (failures[0].rank, failures[0].message) == (1, "ValueError: boom")


def test_a_lost_connection_is_the_root_when_the_others_were_only_ended(run):
    run.rank_log(1, 0).write_text(PEER)
    failures = find_failures(run, 1, [ended(0, 1), ended(1, -15, ended_by_us=True)])
    assert failures[0].rank == 0


def test_a_killed_rank_is_the_root_and_what_it_had_survived_before_is_not_shown(run):
    run.rank_log(1, 0).write_text(PEER)
    run.rank_log(1, 1).write_text(BOOM + "trying again\n")
    failures = find_failures(run, 1, [ended(0, 1), ended(1, -9, time=100.1)])
    assert (failures[0].rank, failures[0].signal, failures[0].traceback) == (1, "SIGKILL", None)


@pytest.mark.parametrize(("exit_code", "signal"), [
    (-9, "SIGKILL"), (137, "SIGKILL"), (139, "SIGSEGV"), (134, "SIGABRT"), (135, "SIGBUS"), (143, "SIGTERM"),
    (130, None), (3, None), (255, None),
])  # fmt: skip
def test_a_shell_reports_the_signal_that_ended_its_program_as_an_exit_code(run, exit_code, signal):
    (failure,) = find_failures(run, 1, [ended(0, exit_code, is_shell=True)])
    assert (failure.signal, failure.exit_code) == (signal, None if signal else exit_code)


@pytest.mark.parametrize("exit_code", [137, 139, 143])
def test_a_program_that_is_no_shell_exits_with_its_own_code(run, exit_code):
    run.rank_log(1, 0).write_text("quota of the data service reached, leaving\n")
    (failure,) = find_failures(run, 1, [ended(0, exit_code)])
    assert (failure.signal, failure.exit_code) == (None, exit_code)
    assert failure.message == f"exit code {exit_code}, last line: quota of the data service reached, leaving"


@pytest.mark.parametrize("exit_code", [-9, 137])
def test_a_kill_behind_a_shell_is_a_kill_from_outside_and_retried(run, exit_code):
    run.rank_log(1, 0).write_text("train.sh: line 1: 4711 Killed                  python train.py\n")
    append_event(run, "attempt", attempt=1)
    (failure,) = find_failures(run, 1, [ended(0, exit_code, is_shell=True)])
    oom = Explanation("host-oom-killed", confidence=0.88, rank=0, summary="rank 0 could not allocate memory")
    end, explanation = explain_end(run, 1, failure, oom, memory_ran_out=False)
    assert (explanation.cause, end.retry) == ("killed-from-outside", "same")
    end, explanation = explain_end(run, 1, failure, oom, memory_ran_out=True)
    assert (explanation.cause, end.retry) == ("host-oom-killed", "smaller")


@pytest.mark.parametrize(("frame", "fix"), [
    ('/x/site-packages/numpy/_core/_methods.py", line 49 in _sum', "check `df -h /dev/shm`"),
    ('/x/site-packages/numpy/_core/memmap.py", line 360 in __getitem__', "see whether the file that is mapped"),
])  # fmt: skip
def test_a_bus_error_has_the_place_that_used_the_memory_and_the_fix_for_a_mapped_file(run, frame, fix):
    stack = f'Current thread 0x01 (most recent call first):\n  File "{frame}\n  File "/my/data.py", line 10 in batch\n'
    run.rank_log(1, 0).write_text(f"step 1\nFatal Python error: Bus error\n\n{stack}")
    append_event(run, "attempt", attempt=1)
    append_event(run, "rank_failed", attempt=1, rank=0, exit_code=None, signal="SIGBUS", message="", consequence=False)
    (failure,) = find_failures(run, 1, [ended(0, -7)])
    _, explanation = explain_end(run, 1, failure, explain_run(run), memory_ran_out=False)
    assert explanation.cause == "sigbus" and explanation.also == ()
    assert explanation.summary.endswith(", used in batch at my/data.py:10") and explanation.fix.startswith(fix)
    append_event(run, "verdict", attempt=1, **{n: getattr(explanation, n) for n in ("cause", "rank", "summary", "fix")})
    assert explain_run(run).summary == explanation.summary


def test_a_peer_that_outlives_its_sigterm_is_killed_by_the_launcher_and_by_nobody_else(run):
    run.rank_log(1, 1).write_text(BOOM)
    ranks = [ended(0, -9, ended_by_us=True), ended(1, 1)]
    peer = find_failures(run, 1, ranks)[1]
    assert peer.message == "ended by SIGKILL: sent by the launcher, as it had not ended in time after SIGTERM"


@pytest.mark.parametrize(
    ("file", "retry"), [("serve.py", "same"), ("site-packages/torch/distributed/rendezvous.py", "other-port")]
)
def test_a_port_that_the_script_opens_itself_is_told_from_the_ranks_own_with_the_process_that_holds_it(
    run, file, retry
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        call = f"    listen(('', {server.getsockname()[1]}))"
        traceback = f'Traceback (most recent call last):\n  File "/code/{file}", line 4, in serve\n{call}\nOSError: x\n'
        root = Failure(0, 1, None, "OSError: x", 1.0, consequence=False, traceback=traceback)
        end, explanation = explain_end(run, 1, root, Explanation("port-in-use", summary="taken"), memory_ran_out=None)
    holder = f"; process {os.getpid()} ("
    assert (end.retry, holder in explanation.summary) == (retry, retry == "same")
    if retry == "same":
        own = "taken, which the script itself opens (serve at code/serve.py:4): paceline cannot change it; process "
        assert explanation.summary.startswith(own) and "\n" not in explanation.summary
        assert explanation.fix.startswith("change the port in the script (serve at code/serve.py:4)")


@pytest.mark.parametrize(
    ("host", "shows_port", "retry"), [(None, True, "never"), ("bob", True, "same"), (None, False, "same")]
)
def test_a_port_that_each_rank_of_a_script_opens_is_not_retried_where_it_is_seen_that_nobody_holds_it(
    run, host, shows_port, retry
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if shows_port else "port"
    traceback = (
        f'Traceback (most recent call last):\n  File "/code/serve.py", line 4, in serve\n    listen(("", {port}))\n'
    )
    root = Failure(1, 1, None, "OSError: x", 1.0, consequence=False, traceback=f"{traceback}OSError: x\n", host=host)
    end, explanation = explain_end(run, 1, root, Explanation("port-in-use", summary="taken"), memory_ran_out=None)
    assert end.retry == retry
    is_peer = retry == "never"
    assert explanation.summary.endswith("most likely another rank did so first") == is_peer
    assert explanation.fix.startswith("open it on rank 0 alone, or give each rank a port of its own") == is_peer


def test_a_number_that_is_no_address_names_no_process_that_listens_there():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_holder(f"    listen(('', 1), max_connections={port})\nOSError: x") is None
        assert port_holder(f"OSError: could not bind to port {port}").startswith(f"process {os.getpid()} (")


def test_a_launch_log_that_shows_how_a_hung_rank_was_ended_is_no_explanation_of_its_error(run):
    append_event(run, "hang", attempt=1, rank=1, error="ValueError: boom", text="no rank made progress", step=None)
    root = Failure(1, 1, None, "ValueError: boom", 1.0, consequence=False)
    for source, cause in ((run.launch_log(1), "hang"), (run.rank_log(1, 1), "host-oom-killed")):
        shown = Explanation("host-oom-killed", evidence=(Evidence(1, "exitcode: -9", 1, str(source)),), rank=1)
        end, _ = explain_end(run, 1, root, shown, memory_ran_out=None)
        assert end.cause == cause


def test_the_earlier_of_two_own_errors_is_the_root(run):
    for rank, second in ((0, 5), (1, 4)):
        error = {"time": f"2026-01-01T00:00:0{second}.000Z", "type": "ValueError", "message": "boom", "traceback": BOOM}
        run.rank_error(1, rank).write_text(json.dumps(error))
    assert find_failures(run, 1, [ended(0, 1), ended(1, 1)])[0].rank == 1


def test_an_error_file_cut_by_a_kill_counts_as_none(run):
    run.rank_error(1, 0).write_text('{"time": "2026-01-01T0')
    run.rank_log(1, 0).write_text("fatal: no config\n")
    assert find_failures(run, 1, [ended(0, 2)])[0].message == "exit code 2, last line: fatal: no config"


def test_a_real_time_signal_is_reported_like_any_other(run):
    failure = find_failures(run, 1, [ended(0, -40)])[0]
    assert (failure.signal, failure.message) == ("SIGRTMIN+6", "ended by SIGRTMIN+6")


@pytest.mark.parametrize(("error_type", "exit_code"), [("PlanError", 1), ("TrainingFailed", 3)])
def test_an_error_with_a_fix_keeps_its_exit_code(run, error_type, exit_code):
    error = {"type": error_type, "message": "no room", "fix": "make room", "exit_code": exit_code}
    run.rank_error(1, 0).write_text(json.dumps({**error, "time": "2026-01-01T00:00:00.000Z"}))
    failure = find_failures(run, 1, [ended(0, exit_code)])[0]
    assert (failure.exit_with, failure.message, failure.fix) == (exit_code, "no room", "make room")


def test_the_fix_of_another_host_names_the_run_as_it_is_here(run):
    fix = "free some space on bob, then: paceline resume /home/me/.cache/paceline/runs/b48f746835ee/full"
    error = {"type": "NoSpace", "message": "no room", "fix": fix, "time": "2026-01-01T00:00:00.000Z"}
    run.rank_error(1, 0).write_text(json.dumps(error))
    assert find_failures(run, 1, [ended(0, 1)])[0].fix == f"free some space on bob, then: paceline resume {run.path}"


def test_the_prefix_that_torch_puts_before_a_traceback_is_taken_off(run):
    run.rank_log(1, 3).write_text("".join(f"[rank3]: {line}\n" for line in BOOM.splitlines()))
    assert find_failures(run, 1, [ended(3, 1)])[0].traceback == BOOM.rstrip()


def test_a_traceback_that_begins_behind_a_progress_bar_is_read(run):
    run.rank_log(1, 0).write_text("\rEpoch 1:  50%|#####     | 50/100 [00:01<00:01, loss=2.5]" + BOOM)
    failure = find_failures(run, 1, [ended(0, 1)])[0]
    assert (failure.message, failure.traceback) == ("ValueError: boom", BOOM.rstrip())


def test_a_rank_that_ends_with_0_has_left_too_early_unless_its_mark_says_that_it_is_done(run):
    for rank, phase in enumerate(("backward", "done", "stopped", "start")):
        HeartbeatWriter(run, rank).beat(rank, phase)
    ranks = [ended(0, 0), ended(1, 0), ended(2, 0), ended(3, 0, ended_by_us=True), ended(4, 0)]
    [early] = find_early_exits(run, ranks)
    assert (early.rank, early.exit_code, early.consequence) == (0, 0, False)
    assert early.message == "exit code 0 after step 0, in backward, before its work was done"


def test_a_rank_of_a_script_that_ends_with_0_is_to_blame_where_the_others_only_lost_it(run):
    run.rank_log(1, 0).write_text(
        "Traceback (most recent call last):\nRuntimeError: Connection closed by peer [127.0.0.1]:21419\n"
    )
    ranks = [ended(0, 1), ended(1, 0), ended(2, 0, ended_by_us=True)]
    [early] = find_script_exits(ranks, find_failures(run, 1, ranks))
    assert (early.rank, early.exit_code, early.consequence) == (1, 0, False)
    run.rank_log(1, 0).write_text(BOOM)
    assert find_script_exits(ranks, find_failures(run, 1, ranks)) == []


GLOO = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:537] "


@pytest.mark.parametrize(("error", "is_lost_peer"), [
    (GLOO + "Read error [127.0.0.1]:702: Connection reset by peer.", True),
    (GLOO + "writev [127.0.0.1]:702: Broken pipe", True),
    ("RuntimeError: Connection reset by peer", True),
    ("torch.distributed.DistNetworkError: Connection reset by peer", True),
    ("torch.distributed.DistNetworkError: The client socket has failed to connect to (ada, 29500)", True),
    ("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network", False),
    ("ConnectionResetError: [Errno 104] Connection reset by peer", False),
    ("BrokenPipeError: [Errno 32] Broken pipe", False),
    ("requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'reset by peer'))", False),
    ("RuntimeError: upload to s3://books failed: Connection reset by peer", False),
])  # fmt: skip
def test_a_connection_of_the_script_s_own_is_no_lost_peer(run, error, is_lost_peer):
    run.rank_log(1, 0).write_text(BOOM.replace("ValueError: boom", error))
    ranks = [ended(0, 1), ended(1, 0)]
    failures = find_failures(run, 1, ranks)
    assert failures[0].consequence == is_lost_peer
    assert [early.rank for early in find_script_exits(ranks, failures)] == [1] * is_lost_peer
