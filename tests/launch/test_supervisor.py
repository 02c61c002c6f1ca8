"""One attempt with real processes: a normal end, a rank that fails, Ctrl-C, odd paths and host names."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.explain.run_folder import explain, explain_run
from paceline.launch.cluster import Cluster
from paceline.launch.stop_signals import ONE_CTRL_C_S, StopSignals
from paceline.launch.supervisor import AttemptRecord, moved_run, run_attempt
from paceline.rundir import RunDir, read_json_lines

pytestmark = pytest.mark.dist

SLEEPS = """
    import os, time
    print("ready", flush=True)
    time.sleep(600)
"""

SAVES_ON_SIGTERM = """
    import os, pathlib, signal, sys, time
    def save(*_):
        time.sleep(0.3)
        print("saved", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    print("ready", flush=True)
    time.sleep(600)
"""

JOINS = """
    import os
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("world", dist.get_world_size(), "sum", total.item())
    dist.destroy_process_group()
    os._exit(0)  # gloo aborts now and then in torch 2.13's interpreter exit, under torchrun as well
"""


def samples(run):
    return [line for path in run.health_dir.glob("*") for line in read_json_lines(path)]


def test_a_run_of_any_name_that_succeeds_has_its_events_samples_and_the_whole_output_of_each_rank_and_leaves_nothing(
    launch, tmp_path, monkeypatch
):
    monkeypatch.setenv("HEALTH_EVERY_S", "0.1")
    script = """
        import os, subprocess, sys, time
        from pathlib import Path
        os.write(1, b"first\\n")
        print("out", os.environ["RANK"], sys.argv[0])
        print("err", os.environ["RANK"], file=sys.stderr)
        subprocess.Popen(["sleep", "600"])  # as a data loader
        subprocess.Popen(["sleep", "601"], start_new_session=True)  # as a tracker
        print("ready", flush=True)
        while not Path(__file__).with_name("end").exists():
            time.sleep(0.02)
        os.write(1, b"last, no newline")
    """
    name = "größe 模型, a run with spaces, a quote ' and $HOME"  # any path works
    running = launch(script, name=name).wait_until_running()
    commands = [process.cmdline() for process in running.tree]
    assert ["sleep", "601"] in commands and any("paceline.launch.health" in command for command in commands)
    running.wait_for(lambda: len(samples(running.run)) >= 3)
    (tmp_path / "end").touch()
    ended = running.end()
    assert [command for command in running.left(timeout_s=0) if "paceline.launch.health" not in command] == []
    assert running.left() == []  # the sampler too
    assert (ended.exit_code, ended.outcome["state"]) == (0, "finished")
    assert "ram_used" in samples(ended.run)[-1]
    assert ended.events() == ["attempt", "note", "attempt_ended"]
    assert ended.event("note")["text"].count("sleep 60") == 4
    attempt = ended.event("attempt")
    assert (attempt["nproc"], attempt["world_size"], len(attempt["pids"])) == (2, 2, 2)
    for rank in range(2):
        script = f"{ended.run.path}.py"
        assert ended.log(rank) == f"first\nout {rank} {script}\nerr {rank}\nready\nlast, no newline"


@pytest.mark.soak
def test_a_crash_while_importing_is_shown_with_its_traceback(launch):
    ended = launch("import a_module_that_is_not_there").end()
    assert (ended.exit_code, ended.outcome["state"]) == (3, "failed")
    # one rank may be stopped for the other's crash before it comes to its own
    assert "ModuleNotFoundError: No module named 'a_module_that_is_not_there'" in ended.log(0) + ended.log(1)
    assert "    import a_module_that_is_not_there\n" in ended.output


@pytest.mark.soak
def test_the_traceback_shown_is_that_of_the_rank_that_raised(launch):
    script = """
        import os, torch.distributed as dist, torch
        dist.init_process_group("gloo")
        print("ready", flush=True)
        if os.environ["RANK"] == "1":
            raise ValueError("boom")
        dist.all_reduce(torch.ones(1))
    """
    ended = launch(script).end()
    assert ended.outcome["failures"][0]["rank"] == 1
    assert ended.outcome["failures"][0]["message"] == "ValueError: boom"
    assert ended.output.startswith("rank 1 failed: ValueError: boom\nrank 0 ended after it: ")
    assert '    raise ValueError("boom")\n' in ended.output
    assert "Connection closed" not in ended.output.partition("Traceback")[2].partition("log: ")[0]


def test_the_output_and_the_log_of_the_launch_blame_the_rank_that_failed_and_nothing_of_the_others_is_left(launch):
    script = """
        import os, subprocess, time
        from pathlib import Path
        subprocess.Popen(["sleep", "600"])  # as a data loader
        subprocess.Popen(["sleep", "601"], start_new_session=True)  # as a tracker
        print("ready", flush=True)
        while os.environ["RANK"] == "0" or not Path(__file__).with_name("fail").exists():
            time.sleep(0.02)
        raise ValueError("dataset shard 12 has a wrong magic number")
    """
    running = launch(script).wait_until_running()
    running.run.path.with_name("fail").touch()
    ended = running.end()
    assert running.left(timeout_s=0) == []
    run, message = ended.run, "ValueError: dataset shard 12 has a wrong magic number"
    assert (ended.outcome["failures"][0]["rank"], ended.outcome["failures"][0]["message"]) == (1, message)
    assert ended.output.startswith(f"rank 1 failed: {message}\n")
    assert '    raise ValueError("dataset shard 12' in ended.output
    assert "failed (exitcode: 1) local_rank: 1" in run.launch_log(1).read_text()
    for explanation in (explain_run(run), explain(run.logs(1))):
        assert (explanation.cause, explanation.rank) == ("dataset-download", 1)


@pytest.mark.soak
def test_peers_that_take_no_signal_are_killed_long_before_torchs_own_thirty_seconds(launch):
    script = """
        import ctypes, os, signal, time
        from pathlib import Path
        deaf = Path(__file__).with_name("deaf")
        if os.environ["RANK"] == "0":
            while not deaf.exists():
                time.sleep(0.02)
            raise ValueError("boom")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        deaf.touch()
        ctypes.PyDLL(None).sleep(600)  # in C and holding the GIL, as a rank in a collective can be
    """
    ended = launch(script).end()
    root, peer = ended.outcome["failures"]
    assert (root["rank"], peer["signal"], peer["consequence"]) == (0, "SIGKILL", True)
    assert peer["time"] - root["time"] < 30  # as the launcher saw it; its grace is 3 s
    assert peer["message"].startswith("ended by SIGKILL: sent by the launcher")


def test_a_peer_in_a_script_has_as_long_to_save_as_under_torchrun(launch):
    script = """
        import os, signal, subprocess, time
        from pathlib import Path
        ready, saved = (Path(__file__).with_name(name) for name in ("ready", "saved"))
        loader = subprocess.Popen(["sleep", "600"])  # a save needs its data loaders

        def save(signum, frame):
            time.sleep(5)
            if loader.poll() is None:
                saved.touch()
            os._exit(0)

        if os.environ["RANK"] == "0":
            while not ready.exists():
                time.sleep(0.02)
            raise ValueError("boom")
        signal.signal(signal.SIGTERM, save)
        ready.touch()
        time.sleep(600)
    """
    ended = launch(script, prefix=("env", "RANKS_ARE=script"))
    ended.wait_for(lambda: "note" in ended.events())
    ended.signal(signal.SIGINT)
    ended.end()
    assert [failure["rank"] for failure in ended.outcome["failures"]] == [0]
    assert (ended.run.path.parent / "saved").exists()
    assert ended.event("note")["text"] == "a rank has failed: the others have 30 s to save and end"
    explanation = explain_run(ended.run)  # the stop came behind the failure
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 0)


def test_a_peer_that_fails_behind_a_stop_does_not_make_the_stop_the_cause(tmp_path):
    record = AttemptRecord(RunDir(tmp_path), 1, Cluster.here(2), script=True)
    failed = {"event": "rank_failed", "ranks": []}
    record.add(None, failed)
    record.stopping = True
    record.add(None, failed)
    assert record.failed_first


@pytest.mark.soak
def test_a_rank_without_output_is_reported_with_its_exit_code(launch):
    ended = launch("import os, time; os.environ['RANK'] == '0' and os._exit(3); time.sleep(600)").end()
    root = ended.outcome["failures"][0]
    assert (root["rank"], root["exit_code"], root["message"]) == (0, 3, "exit code 3, no output")


@pytest.mark.soak
def test_a_crash_in_native_code_leaves_a_traceback(launch):
    ended = launch("import ctypes, numpy\nctypes.string_at(0)", nproc=1).end()
    root = ended.outcome["failures"][0]
    assert (root["signal"], root["message"]) == ("SIGSEGV", "Fatal Python error: Segmentation fault")
    assert "Extension modules: " in ended.log(0) and "Extension modules: " not in ended.output.partition("\nlog: ")[0]


@pytest.mark.soak
def test_an_error_with_a_fix_is_shown_in_two_lines(launch):
    script = """
        import json, os, sys
        path = os.environ["TORCHELASTIC_ERROR_FILE"]
        error = {"time": "2026-01-01T00:00:00.000Z", "type": "PlanError", "message": "no room", "fix": "make room",
                 "exit_code": 1, "traceback": "Traceback (most recent call last):\\n  ...", "step": 0}
        json.dump(error, open(path, "w"))
        sys.exit(1)
    """
    ended = launch(script, nproc=1).end()
    assert ended.exit_code == 1
    assert ended.output.splitlines()[-3:-1] == ["error: no room", "  fix: make room"]
    assert "Traceback" not in ended.output.rpartition("\n{")[0]


def test_the_warning_of_a_batch_system_lets_ranks_save_and_one_that_does_not_stop_is_killed_after_its_grace(launch):
    one_saves = SAVES_ON_SIGTERM.replace(", save)", ", save if os.environ['RANK'] == '0' else signal.SIG_IGN)")
    running = launch(one_saves, stop_grace_s=4.0).wait_until_running()
    running.signal(signal.SIGUSR1)
    ended = running.end()
    assert (ended.exit_code, ended.outcome["state"]) == (130, "interrupted")
    assert [failure["rank"] for failure in ended.outcome["failures"]] == [1]
    assert (ended.log(0), ended.log(1)) == ("ready\nsaved\n", "ready\n")
    assert "stopping on SIGUSR1, sending SIGTERM; Ctrl-C again to end now\n" in ended.output
    assert ended.events() == ["attempt", "stopping", "attempt_ended"]
    text = "killed rank 1, which did not end in 4 s: what was being saved is incomplete"
    assert ended.event("attempt_ended")["message"] == text
    explanation = explain_run(ended.run)
    assert explanation.summary.endswith(f"; {text}") and "nothing is broken" not in explanation.fix


@pytest.mark.soak
def test_sigterm_saves_too_and_a_rank_that_dies_of_it_does_not_cut_the_others_short(launch):
    script = """
        import os, signal, sys, time
        def save(*_):
            time.sleep(3.5)  # longer than the grace for the peers of a failed rank
            print("saved", flush=True)
            sys.exit(0)
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        time.sleep(600)
    """
    running = launch(script).wait_until_running()
    running.signal(signal.SIGTERM)
    ended = running.end()
    assert (ended.exit_code, ended.outcome["state"]) == (130, "interrupted")
    assert ended.log(0) == "ready\nsaved\n"
    assert "rank_failed" not in ended.events()


@pytest.mark.soak
def test_ctrl_c_twice_ends_at_once(launch):
    script = """
        import signal, time
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(600)
    """
    running = launch(script, stop_grace_s=1000.0, prefix=("env", "RANKS_ARE=script")).wait_until_running()
    running.signal(signal.SIGINT)
    running.wait_for(lambda: "stopping" in running.events())
    time.sleep(2 * ONE_CTRL_C_S)  # a second one that is sooner is the first one once more
    running.signal(signal.SIGINT)
    ended = running.end()  # long before the grace is over
    assert (ended.exit_code, ended.outcome["state"]) == (130, "interrupted")
    text = "killed ranks 0 and 1 at once, as requested: what was being saved is incomplete"
    assert ended.event("attempt_ended")["message"] == text
    assert running.left(0) == []


def test_a_second_ctrl_c_cuts_off_the_ranks_that_had_not_ended():
    ranks = [{"rank": rank, "killed": False, "exit_code": code} for rank, code in enumerate((None, 0))]
    record = SimpleNamespace(is_overdue=False, is_cut_short=True, stop_s=5.0, ranks=ranks)
    text = "killed rank 0 at once, as requested: what was being saved is incomplete"
    assert AttemptRecord.cut_off(record) == text
    record.is_cut_short = False  # of a training's ranks: their checkpoints are complete or absent
    assert AttemptRecord.cut_off(record) is None


def test_one_ctrl_c_that_a_wrapper_repeats_is_one(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("paceline.launch.supervisor.time.monotonic", lambda: now[0])
    monkeypatch.setattr("paceline.launch.stop_signals.os.getpgrp", lambda: os.getpid() + 1)  # the wrapper's
    signals = StopSignals()
    signals.add(signal.SIGINT, None)
    now[0] += 0.9 * ONE_CTRL_C_S
    signals.add(signal.SIGINT, None)
    assert (signals.first, signals.kill) == ("SIGINT", False)
    now[0] += 0.2 * ONE_CTRL_C_S
    signals.add(signal.SIGINT, None)
    assert signals.kill


def test_a_second_ctrl_c_counts_at_once_where_no_wrapper_can_repeat_the_first(monkeypatch):
    monkeypatch.setattr("paceline.launch.stop_signals.os.getpgrp", os.getpid)
    signals = StopSignals()
    signals.add(signal.SIGINT, None)
    assert not signals.kill
    signals.add(signal.SIGINT, None)
    assert signals.kill
    signals = StopSignals()  # a batch system may send both
    signals.add(signal.SIGTERM, None)
    signals.add(signal.SIGINT, None)
    assert not signals.kill


@pytest.mark.soak
def test_an_error_while_saving_is_a_failure_not_an_interruption(launch):
    script = """
        import signal, time
        def save(*_):
            raise OSError("No space left on device")
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        time.sleep(600)
    """
    running = launch(script, nproc=1).wait_until_running()
    running.signal(signal.SIGINT)
    ended = running.end()
    assert (ended.exit_code, ended.outcome["failures"][0]["message"]) == (3, "OSError: No space left on device")


def test_ctrl_c_before_the_workers_have_started_ends_as_interrupted(launch):
    running = launch(SLEEPS)
    running.wait_for((running.run.logs(1) / "job.json").exists)
    running.signal(signal.SIGINT)
    ended = running.end()
    assert (ended.exit_code, ended.outcome["state"]) == (130, "interrupted")


@pytest.mark.soak
def test_scripts_for_torchrun_join_as_they_are_and_two_at_the_same_time_do_not_interfere(launch):
    runs = [launch(JOINS, name=name) for name in ("one", "two")]
    for run in runs:
        assert run.end().exit_code == 0, run.output
        assert run.log(0) == run.log(1) == "world 2 sum 2.0\n"


@pytest.mark.soak
def test_ranks_join_on_a_host_that_cannot_resolve_its_own_name(launch):
    set_up = 'ip link set lo up && hostname no-such-host && exec "$@"'
    unshare = ["unshare", "--net", "--uts", "--", "sh", "-c", set_up, "sh"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    ended = launch(JOINS, prefix=tuple(unshare)).end()
    assert ended.exit_code == 0, ended.output
    assert ended.log(0).endswith("world 2 sum 2.0\n")


def test_a_signal_that_came_before_the_attempt_ends_it(tmp_path):
    signals = StopSignals()
    signals.add(signal.SIGTERM, None)
    outcome = run_attempt(
        RunDir(tmp_path / "run"),
        command=[sys.executable, "-c", "import time; time.sleep(600)"],
        nproc=1,
        attempt=1,
        env=os.environ,
        lock_fd=None,
        signals=signals,
        on_tick=lambda: None,
        stop_grace_s=2.0,
    )
    assert (outcome.state, outcome.exit_code) == ("interrupted", 130)


def test_a_run_folder_that_does_not_answer_was_not_renamed(tmp_path, monkeypatch):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    with run.lock.open("w") as lock:
        assert moved_run(run, lock.fileno()) is None
        moved = run.path.rename(tmp_path / "renamed")
        assert moved_run(run, lock.fileno()) == RunDir(moved)

        def fail(path):
            raise OSError(errno.ESTALE, "Stale file handle")

        monkeypatch.setattr(Path, "exists", fail)
        assert moved_run(run, lock.fileno()) is None
