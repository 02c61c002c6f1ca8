"""Ranks that hang, with real processes: which rank is named, how soon, what is kept; and what is not a hang."""

import json
import os
import re
import signal
import sys
import time
from textwrap import dedent

import psutil
import pytest
from launch.conftest import DRIVE, Launch

from paceline.explain.collectives import read_dump
from paceline.explain.run_folder import explain_run
from paceline.heartbeat import read_heartbeat
from paceline.rundir import RECORDER_DUMP, RunDir

pytestmark = pytest.mark.dist


# steps of a trainer with heartbeats: two micro-steps, then a collective; `load_batch` stands for the data loader
TRAINS = """
    import os, sys, time
    from pathlib import Path
    import torch, torch.distributed as dist
    from paceline.rundir import RunDir
    from paceline.heartbeat import HeartbeatWriter
    from paceline.train.process import answer_with_collectives, answer_with_stacks
    run, rank = RunDir(Path(sys.argv[1])), int(os.environ["RANK"])
    num_steps = int(sys.argv[2])
    progress = HeartbeatWriter(run, rank)
    progress.beat(0, "start")
    answer_with_stacks(run, attempt=1, rank=rank)
    dist.init_process_group("gloo")
    answer_with_collectives(rank)

    def load_batch(step):
        pass

    def evaluate(step):
        pass

{more}
    progress.beat(0, "train")
    print("ready", flush=True)
    for step in range(num_steps):
        for micro_step in range(2):
            progress.beat(step, "load", micro_step)
            load_batch(step)
            progress.beat(step, "forward", micro_step)
            time.sleep(0.05)
        progress.beat(step, "reduce", 1)
        dist.all_reduce(torch.ones(1))
        progress.beat(step + 1, "train")
        evaluate(step + 1)
    progress.beat(num_steps, "ending")
    dist.barrier()
    progress.beat(num_steps, "done")
    os._exit(0)
"""

LOOPS_IN_THE_LOADER = """
    def load_batch(step):
        while rank == 1 and step == 5:
            sum(range(1000))
"""


@pytest.fixture
def watched(tmp_path, launches):
    def start(script, *, nproc=2, hang_after_s=8, kind="own", more="", num_steps=100_000):
        path = tmp_path / "script.py"
        path.write_text(dedent(script.replace("{more}", more)))
        watch = ["env", f"HANG_AFTER_S={hang_after_s}", f"RANKS_ARE={kind}"]
        run_path, args = str(tmp_path / "run"), [str(path), str(tmp_path / "run"), str(num_steps)]
        launches.append(
            Launch(RunDir(tmp_path / "run"), [*watch, sys.executable, str(DRIVE), run_path, str(nproc), "60", *args])
        )
        return launches[-1]

    return start


def wait_for_step(launch, step):
    launch.wait_until_running()
    launch.wait_for(
        lambda: (heartbeat := read_heartbeat(launch.run.progress(0))) is not None and heartbeat.step >= step
    )


def wait_for_hang(launch):
    launch.wait_for(lambda: "hang" in launch.events())
    return launch.event("hang")


def is_over(launch, *, exit_code=3):
    launch.end()
    assert launch.left() == []
    assert launch.exit_code == exit_code
    assert launch.events()[-3:].count("attempt_ended") == 1
    return [event for event in launch.events() if event == "hang"] == ["hang"]


@pytest.mark.parametrize(
    ("nproc", "stopped"), [(2, 0), *(pytest.param(*ranks, marks=pytest.mark.soak) for ranks in ((2, 1), (3, 2)))]
)
def test_a_stopped_rank_is_named_when_its_silence_is_too_long_and_killed_and_every_process_ends(
    watched, nproc, stopped
):
    launch = watched(TRAINS, nproc=nproc, hang_after_s=5)
    wait_for_step(launch, 5)
    os.kill(launch.worker_pid(stopped), signal.SIGSTOP)
    hang = wait_for_hang(launch)
    assert hang["silent_s"] >= 5
    assert hang["rank"] == stopped
    assert f"rank {stopped} is stopped (state T)" in hang["text"]
    assert is_over(launch)
    named = [e for e in failures(launch) if not e["consequence"]]
    assert [(e["rank"], e["signal"]) for e in named] == [(stopped, "SIGKILL")]
    kept = launch.run.hang(1)
    assert {path.name for path in kept.iterdir()} == {"hang.json", *(f"{rank}.txt" for rank in range(nproc))}
    waiting = (stopped + 1) % nproc
    assert "all_reduce" in (kept / f"{waiting}.txt").read_text()
    assert json.loads((kept / "hang.json").read_text())["ranks"][stopped]["state"] == "T"
    recorded = launch.run.recorder_dumps(1)
    assert [path.name for path in recorded] == [f"{RECORDER_DUMP}{rank}" for rank in range(nproc) if rank != stopped]
    assert read_dump(recorded[0]).last.operation == "gloo:all_reduce"
    assert str(recorded[0].relative_to(launch.run.path)) in hang["evidence"]
    assert not list(launch.run.logs(1).glob("*.pipe"))


def failures(launch):
    lines = [json.loads(line) for line in launch.run.events.read_text().splitlines()]
    return [event for event in lines if event["event"] == "rank_failed"]


@pytest.mark.soak
def test_a_loop_in_a_data_loader_is_named_with_its_place_while_the_others_wait(watched):
    launch = watched(TRAINS, nproc=3, hang_after_s=4, more=LOOPS_IN_THE_LOADER)
    wait_for_step(launch, 5)
    hang = wait_for_hang(launch)
    assert (hang["rank"], hang["phase"], hang["step"]) == (1, "load", 5)
    # a busy machine gives it less of a core than shows work
    assert re.search(r"rank 1 is (working|running \(state R\))", hang["text"])
    assert "load_batch at" in hang["text"]
    assert (
        "did not reach reduce of step 6; ranks 0 and 2 wait in reduce of step 6, all_reduce, called at" in hang["text"]
    )
    assert is_over(launch)
    assert "load_batch" in (launch.run.hang(1) / "1.txt").read_text()


@pytest.mark.soak
def test_at_equal_heartbeats_the_rank_outside_the_collective_is_named_by_its_stack(watched):
    more = """
    def evaluate(step):
        while rank == 1 and step == 3:
            time.sleep(0.1)
    """
    without_beats = TRAINS.replace('progress.beat(step, "load", micro_step)', "pass").replace(
        'progress.beat(step, "forward", micro_step)', "pass"
    )
    script = without_beats.replace('progress.beat(step, "reduce", 1)', "pass")
    launch = watched(script, hang_after_s=4, more=more)
    wait_for_step(launch, 3)
    hang = wait_for_hang(launch)
    assert hang["rank"] == 1
    assert "evaluate at" in hang["text"]
    assert is_over(launch)


@pytest.mark.soak
def test_a_long_evaluation_a_slow_first_step_and_a_slow_start_are_not_hangs(watched):
    more = """
    def evaluate(step):
        if step in (2, 4):
            progress.beat(step, "eval")
            time.sleep(6)

    def load_batch(step):
        if step == 0 and rank == 0:
            time.sleep(5)

    time.sleep(5)
    """
    launch = watched(TRAINS, hang_after_s=4, more=more, num_steps=6)
    assert launch.end().exit_code == 0, launch.output
    assert "hang" not in launch.events()


@pytest.mark.soak
def test_a_run_that_is_suspended_as_a_whole_continues_without_a_hang(watched):
    launch = watched(TRAINS, hang_after_s=3)
    wait_for_step(launch, 3)
    everyone = [psutil.Process(launch.process.pid), *launch.tree]
    for process in everyone:
        process.suspend()
    time.sleep(8)
    for process in everyone:
        process.resume()
    before = read_heartbeat(launch.run.progress(0)).step
    wait_for_step(launch, before + 20)
    assert "hang" not in launch.events()


@pytest.mark.soak
def test_a_stopped_rank_is_named_during_the_start(watched):
    more = """
    if rank == 1:
        print("ready", flush=True)
        os.kill(os.getpid(), 19)
    print("ready", flush=True)
    """
    launch = watched(TRAINS, hang_after_s=3, more=more)
    launch.wait_until_running()
    hang = wait_for_hang(launch)
    assert (hang["rank"], hang["phase"]) == (1, "start")
    assert is_over(launch)


SCRIPT = """
    import os, sys, time
    import torch, torch.distributed as dist
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    print("ready", flush=True)
    for step in range(10_000):
        time.sleep(0.1)
{more}
        dist.all_reduce(torch.ones(1))
        print(rank, "step", step, flush=True)
"""


@pytest.mark.soak
def test_a_silent_idle_script_is_ended_and_its_stopped_rank_named(watched):
    launch = watched(SCRIPT, kind="script", hang_after_s=5)
    launch.wait_until_running()
    launch.wait_for(lambda: "step 3" in launch.log(0))
    os.kill(launch.worker_pid(0), signal.SIGSTOP)
    hang = wait_for_hang(launch)
    assert hang["silent_s"] >= 5
    assert (hang["rank"], hang["phase"]) == (0, None)
    assert is_over(launch)


@pytest.mark.soak
def test_a_script_whose_ranks_all_wait_is_ended_without_naming_one(watched):
    more = """
        if step == 3:
            time.sleep(1000)
    """
    launch = watched(SCRIPT, kind="script", hang_after_s=3, more=more)
    launch.wait_until_running()
    hang = wait_for_hang(launch)
    assert hang["rank"] is None
    assert "nothing distinguishes the ranks" in hang["text"]
    assert is_over(launch)


RAISES_BESIDE_A_THREAD = """
    import os, threading, time
    from pathlib import Path
    print("ready", flush=True)
    other = Path(__file__).with_name("other")
    if os.environ["RANK"] == "0":
        other.touch()
        time.sleep(1000)
    while not other.exists():  # no rank may print a line after the traceback
        time.sleep(0.02)
    threading.Thread(target=time.sleep, args=(1000,)).start()
    raise ValueError("boom")
"""


def test_an_exception_whose_process_lives_on_in_a_thread_is_the_failure_and_no_hang(watched):
    launch = watched(RAISES_BESIDE_A_THREAD, kind="script", hang_after_s=3)
    launch.wait_until_running()
    assert wait_for_hang(launch)["error"] == "ValueError: boom"
    assert is_over(launch, exit_code=1)
    root = next(failure for failure in failures(launch) if not failure["consequence"])
    assert (root["rank"], root["exit_code"], root["message"]) == (1, 1, "ValueError: boom")
    explanation = explain_run(launch.run)  # the supervisor's own SIGKILL is no cause
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 1)


def test_a_stop_while_a_thread_keeps_a_process_whose_program_an_exception_ended_leaves_the_exception_as_the_failure(
    watched,
):
    launch = watched(RAISES_BESIDE_A_THREAD, kind="script", hang_after_s=600)
    launch.wait_until_running()
    launch.wait_for(lambda: "ValueError: boom" in launch.log(1))
    launch.signal(signal.SIGTERM)
    assert is_over(launch, exit_code=1)
    root = next(failure for failure in failures(launch) if not failure["consequence"])
    assert (root["rank"], root["message"]) == (1, "ValueError: boom")
    assert launch.event("note")["signal"] == "SIGTERM"
    assert explain_run(launch.run).cause == "user-code-exception"


@pytest.mark.soak
def test_a_silent_script_that_works_is_left_alone(watched):
    more = """
        if step == 3:
            until = time.monotonic() + 8
            while time.monotonic() < until:
                sum(range(1000))
            os._exit(0)
    """
    launch = watched(SCRIPT, kind="script", hang_after_s=2, more=more)
    assert launch.end().exit_code == 0
    assert "hang" not in launch.events()


@pytest.mark.soak
def test_a_stop_of_a_script_that_hangs_records_where_each_rank_was(watched):
    more = """
        if step == 3 and rank == 1:
            time.sleep(1000)
    """
    launch = watched(SCRIPT, kind="script", hang_after_s=600, more=more)
    started = time.monotonic()
    launch.wait_until_running()
    launch.wait_for(lambda: "step 2" in launch.log(0))
    time.sleep(30 + 2 * (time.monotonic() - started))  # longer than NOTICED_AFTER_S, and than twice any pause before
    launch.signal(signal.SIGINT)
    launch.end()
    silence = launch.event("silence")
    assert (silence["rank"], silence["is_seen"]) == (1, True)
    assert (launch.run.hang(1) / "0.txt").exists()
    assert launch.left() == []
