"""The explanation of ends that a run's events show better than its logs."""

import os

import pytest
from log_samples import raised

from paceline.explain.explanation import RECORDED
from paceline.explain.run_folder import explain_run
from paceline.rundir import RunDir, append_event, lock_run


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "books")
    run.logs(1).mkdir(parents=True)
    run.config_toml.write_text("device_batch_size = 8\n")
    append_event(run, "attempt", attempt=1, world_size=2, pids=[101, 102])
    for rank in range(2):
        run.rank_log(1, rank).write_text("".join(f"step {step} | loss 3.{9 - step}\n" for step in range(1, 9)))
    return run


def test_an_attempt_without_an_end_lost_its_supervisor_unless_it_goes_on(run):
    append_event(run, "stopped", step=8)
    lock = lock_run(run)
    explanation = explain_run(run)
    summary = "the run is still running; no failure found: 8 progress lines, step 1 to 8, loss 3.1"
    assert (explanation.cause, explanation.summary) == ("healthy", summary)
    assert explanation.fix == f"watch it: `paceline watch {run.path}`"
    os.close(lock)
    explanation = explain_run(run)
    assert explanation.cause == "supervisor-lost"
    assert explanation.fix.endswith(f"`paceline resume {run.path}` goes on from the last checkpoint")


def test_a_run_that_was_made_longer_and_lost_its_supervisor_is_not_finished(run):
    os.close(lock_run(run))
    append_event(run, "finished", step=8)
    append_event(run, "attempt_ended", attempt=1, state="finished", exit_code=0)
    run.logs(2).mkdir()
    run.rank_log(2, 0).write_text("step 9 | loss 2.9\n")
    append_event(run, "attempt", attempt=2, world_size=2, pids=[103, 104])
    assert explain_run(run).cause == "supervisor-lost"
    assert explain_run(run, attempt=1).cause == "healthy"


def test_a_run_that_recovered_is_healthy_and_says_what_it_recovered_from(run):
    append_event(run, "verdict", attempt=1, cause="hang")
    append_event(run, "attempt_ended", attempt=1, state="failed", exit_code=1)
    assert explain_run(run).notes == ()
    run.logs(2).mkdir()
    run.rank_log(2, 0).write_text("step 9 | loss 2.9\n")
    append_event(run, "attempt", attempt=2, world_size=2, pids=[103, 104])
    append_event(run, "finished", step=9)
    explanation = explain_run(run)
    assert explanation.cause == "healthy"
    recovered = f"earlier attempts failed and the run recovered: hang; paceline runs show {run.path}"
    assert explanation.notes == (recovered,)
    run.config_toml.write_text('command = ["train.py"]\n')
    alone = f"this is the progress of attempt 2 alone; paceline watch {run.path} has all attempts"
    assert explain_run(run).notes == (alone, recovered)


def test_what_the_supervisor_added_to_the_cause_in_the_log_is_in_the_explanation_too(run):
    run.rank_log(1, 1).write_text("OSError: [Errno 98] Address already in use\n")
    texts = {"summary": f"{explain_run(run).summary}, which the script itself opens", "fix": "open it on rank 0 alone"}
    append_event(run, "verdict", attempt=1, cause="port-in-use", rank=1, step=None, confidence=0.97, **texts)
    explanation = explain_run(run)
    assert {"summary": explanation.summary, "fix": explanation.fix} == texts
    assert [item.rank for item in explanation.evidence] == [1]


def test_a_damaged_checkpoint_that_a_run_did_not_resume_from_is_a_note_with_what_to_check(run):
    append_event(
        run, "damaged", message="checkpoint step_000060 is damaged (sha256 differs): going on from step_000040"
    )
    append_event(run, "finished", step=9)
    [note] = explain_run(run).notes
    assert note.startswith("checkpoint step_000060 is damaged") and "; check the disk (smartctl -a DEVICE" in note


def test_a_run_whose_last_save_had_no_room_and_that_recorded_no_end_filled_the_disk(run):
    os.close(lock_run(run))
    append_event(run, "save_failed", step=8, needed_bytes=1 << 20, free_bytes=0)
    explanation = explain_run(run)
    assert (explanation.cause, explanation.summary) == (
        "disk-full", "the disk of the run folder had no room for the checkpoint of step 8",
    )  # fmt: skip


def test_a_run_that_waits_for_room_is_explained_by_the_disk_while_it_runs(run):
    lock = lock_run(run)
    run.rank_log(1, 0).write_text("".join(f"step {step}/8 | loss 3.{9 - step}\n" for step in range(1, 9)))
    message = "no space for the checkpoint of step 8: rank 1 of 2 on bob has not enough"
    append_event(run, "save_failed", step=8, needed_bytes=1 << 20, host="bob", last=True, message=message)
    explanation = explain_run(run)
    assert (explanation.cause, explanation.step) == ("disk-full", 8)
    assert explanation.summary.endswith(f"since its last checkpoint is not saved: {message}")
    assert explanation.fix.startswith("make room (ssh bob 'df -h ${XDG_CACHE_HOME:-~/.cache}'): it then saves")
    append_event(run, "checkpoint", step=8)
    assert explain_run(run).cause == "healthy"
    os.close(lock)


@pytest.mark.parametrize("is_ended", [False, True])
def test_an_attempt_of_which_a_full_disk_keeps_the_events_away_is_not_healthy(run, is_ended):
    append_event(run, "save_failed", step=8, needed_bytes=1 << 20, free_bytes=0)
    append_event(run, "attempt_ended", attempt=1, state="failed", exit_code=1)
    os.close(lock_run(run))
    run.logs(2).mkdir()
    run.rank_log(2, 0).touch()
    if is_ended:
        append_event(run, "attempt", attempt=2, world_size=2, pids=[103, 104])
        append_event(run, "rank_failed", attempt=2, rank=0, exit_code=1, signal=None, message="no output")
        append_event(run, "attempt_ended", attempt=2, state="failed", exit_code=3)
    assert explain_run(run).cause == "disk-full"


def test_a_cause_that_was_recorded_counts_where_the_logs_show_only_an_exit_code(run):
    append_event(run, "rank_failed", attempt=1, rank=1, exit_code=1, message="exit code 1")
    append_event(run, "attempt_ended", attempt=1, state="failed", exit_code=1)
    append_event(run, "verdict", attempt=1, cause="disk-full", rank=1, summary="it was full", fix="x", confidence=0.9)
    explanation = explain_run(run)  # when the disk has room again
    assert (explanation.cause, explanation.summary, explanation.rank) == ("disk-full", "it was full", 1)


def test_the_evidence_of_a_hang_has_the_stack_by_py_spy_and_no_heartbeat_of_a_script(run):
    run.hang(1).mkdir(parents=True)
    (run.hang(1) / "1.txt").write_text(
        "rank 1, process 102\nmark: none\ncores in use: 0.00\n\nState: S (sleeping)\n\nstacks, taken by py-spy\n"
        'Process 102: python train.py\nPython v3.11.2 (/usr/bin/python3.11)\n\nThread 102 (idle): "MainThread"\n'
        "    read (/home/ann/loader.py:80)\n    <module> (/home/ann/train.py:9)\n"
    )
    append_event(run, "verdict", attempt=1, cause="hang", rank=1, summary="rank 1 made no progress", fix="x")
    texts = [item.text for item in explain_run(run).evidence[:3]]
    assert texts[:2] == ["State: S (sleeping)", "read (/home/ann/loader.py:80)"]


def stop_after_silence(run, text, *, rank, **fields):
    """A stop with Ctrl-C, before which the supervisor recorded what the ranks did."""
    append_event(run, "silence", attempt=1, rank=rank, silent_s=25.0, phase=None, step=None, text=text, **fields)
    append_event(run, "stopping", attempt=1, signal="SIGINT")
    append_event(run, "attempt_ended", attempt=1, state="interrupted", exit_code=130)
    return explain_run(run)


def test_a_stop_after_a_silence_is_a_hang_where_the_stacks_show_one(run):
    text = "no rank made progress for 25 s: rank 1 is waiting (state S) in shuffle at ann/train.py:22; rank 0 waits in backward"
    explanation = stop_after_silence(run, text, rank=1, is_seen=True)
    assert (explanation.cause, explanation.rank, explanation.also) == ("hang", 1, ("keyboard-interrupt",))
    assert text in explanation.summary and "Ctrl-C" in explanation.summary
    assert f"less {run.hang(1)}/*.txt" in explanation.fix and "if it was only slow, `paceline resume" in explanation.fix


def test_ranks_in_different_collectives_have_a_fix_of_their_own(run):
    text = (
        "no rank made progress for 14 s: nothing shows which rank is to blame: rank 0 is waiting (state S) in barrier, called at"
        " ann/train.py:37 and rank 1 is waiting (state S) in all_reduce, called at ann/train.py:38"
    )
    explanation = stop_after_silence(run, text, rank=None, is_seen=True, in_collectives=True)
    assert explanation.cause == "hang" and explanation.fix.startswith("all ranks must make the same collectives")


def test_a_stop_after_a_silence_stays_a_stop_where_no_rank_is_seen_waiting_for_another(run):
    text = "no rank made progress for 25 s: the only rank is working (1.0 cores) in evaluate at ann/train.py:22"
    explanation = stop_after_silence(run, text, rank=0, is_seen=False)
    assert explanation.cause == "keyboard-interrupt"
    assert explanation.summary.endswith(f"before that {text}")
    assert explanation.fix.startswith("if it hung, read what every rank was doing") and "; if not, `" in explanation.fix


def test_a_rank_that_ended_itself_without_an_error_is_looked_up_in_its_own_log(run):
    append_event(run, "rank_failed", attempt=1, rank=1, exit_code=3, signal=None, message="", consequence=False)
    append_event(run, "attempt_ended", attempt=1, state="failed", exit_code=3)
    explanation = explain_run(run)
    assert (explanation.cause, explanation.rank) == ("unknown", 1)
    assert str(run.rank_log(1, 1)) in explanation.fix and "exits with 3" in explanation.fix


@pytest.mark.parametrize("message, fix", [
    ("exit code 1, last line: config.yaml: unknown key 'lr'", "its last line may be its own reason"),
    (
        "exit code 1, last line: too few files: want 5",
        "its last line may be its own reason, as sys.exit(TEXT) prints one and ends with 1; find what prints it:"
        " `grep -rnF 'too few files' --include='*.py' .`",
    ),
    (
        "exit code 1, last line: no dataset called wikitext",
        "its last line may be its own reason, as sys.exit(TEXT) prints one and ends with 1; find what prints it:"
        " `grep -rnF 'no dataset called' --include='*.py' .`",
    ),
    ("exit code 1, no output", "find where the program exits with 1: `grep"),
])  # fmt: skip
def test_a_rank_that_ended_itself_may_have_said_why(run, message, fix):
    append_event(run, "rank_failed", attempt=1, rank=1, exit_code=1, signal=None, message=message, consequence=False)
    append_event(run, "attempt_ended", attempt=1, state="failed", exit_code=1)
    assert explain_run(run).fix.startswith(fix)


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
@pytest.mark.parametrize(
    "printed", ["", "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:21900"]
)
def test_a_signal_to_one_rank_is_no_stop_of_the_run(run, signal, printed):
    with run.rank_log(1, 0).open("a") as log:
        log.write(printed and raised(0, printed))
    append_event(run, "rank_failed", attempt=1, rank=1, exit_code=None, signal=signal, message="", consequence=False)
    append_event(run, "rank_failed", attempt=1, rank=0, exit_code=None, signal="SIGTERM", message="", consequence=True)
    append_event(run, "attempt_ended", attempt=1, state="failed", exit_code=1)
    explanation = explain_run(run)
    assert (explanation.cause, explanation.rank) == ("killed-from-outside", 1)
    assert explanation.summary == f"rank 1 was ended by {signal}, which was sent to it alone"
    assert explanation.step == 8 and explanation.confidence >= 0.8


def test_the_rank_that_was_recorded_as_the_first_to_fail_is_to_blame(run):
    """torch's launcher lists rank 0 first, which failed while it was stopped, and names its error as the root cause."""
    for rank, error in enumerate(
        ("FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/ckpt.pt'", "ValueError: bad batch")
    ):
        with run.rank_log(1, rank).open("a") as log:
            log.write(raised(rank, error))
    run.launch_log(1).write_text(
        "E1127 06:04:26.050000 16210 torch/x.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 16268)\n"
    )
    append_event(
        run,
        "rank_failed",
        attempt=1,
        rank=1,
        exit_code=1,
        signal=None,
        message="ValueError: bad batch",
        consequence=False,
    )
    append_event(run, "rank_failed", attempt=1, rank=0, exit_code=1, signal=None, message="", consequence=True)
    append_event(run, "attempt_ended", attempt=1, state="failed", exit_code=1)
    explanation = explain_run(run)
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 1)
    assert {item.line for item in explanation.evidence if item.source == RECORDED} <= {2, 3}


def test_what_orphaned_workers_write_shows_no_end_of_the_run(run):
    os.close(lock_run(run))
    run.launch_log(1).write_text(
        "E1127 06:04:26.050000 16210 torch/x.py:1002] failed (exitcode: -15) local_rank: 0 (pid: 16268)\n"
    )
    assert explain_run(run).cause == "supervisor-lost"


def test_a_notice_that_the_time_is_over_is_told(run):
    append_event(run, "stopping", attempt=1, reason="the notice file /run/notice", seconds_left=20)
    append_event(run, "attempt_ended", attempt=1, state="interrupted", exit_code=130)
    explanation = explain_run(run)
    assert explanation.cause == "preempted-sigterm" and "the notice file /run/notice" in explanation.summary


@pytest.mark.parametrize("later, summary, fix", [
    ([], "stopped by SIGUSR1, a batch system's warning", "`paceline resume"),
    ([("requeued", {"why": "its time was nearly over"})], "its Slurm job requeued: its time was nearly over", "job 4711 continues"),
    ([("requeued", {"why": "by Slurm"}), ("slurm_job", {"attempt": 1})], "requeued: by Slurm", "`paceline resume"),
    ([("launch", {}), ("requeued", {"why": "of the next attempt"})], "stopped by SIGUSR1", "`paceline resume"),
])  # fmt: skip
def test_the_warning_of_a_batch_system_is_no_failure_and_says_whether_the_job_continues(run, later, summary, fix):
    append_event(run, "stopping", attempt=1, signal="SIGUSR1")
    append_event(run, "attempt_ended", attempt=1, state="interrupted", exit_code=130)
    for kind, facts in later:
        append_event(run, kind, job_id=4711, **facts)
    explanation = explain_run(run)
    assert (explanation.cause, explanation.confidence) == ("preempted-sigterm", 1.0)
    assert summary in explanation.summary and fix in explanation.fix


def test_a_requeued_run_whose_ranks_were_killed_while_they_saved_is_not_called_whole(run):
    message = "killed ranks 0 and 1, which did not end in 2 s: what was being saved is incomplete"
    append_event(run, "stopping", attempt=1, signal="SIGUSR1")
    append_event(run, "attempt_ended", attempt=1, state="interrupted", exit_code=130, message=message)
    append_event(run, "requeued", job_id=4711, why="its time was nearly over")
    assert explain_run(run).fix.startswith("job 4711 continues the run")


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_behind_the_last_step_stopped_nothing(run, signal):
    append_event(run, "checkpoint", step=8)
    append_event(run, "stopping", attempt=1, signal=signal)
    append_event(run, "finished", step=8)
    append_event(run, "attempt_ended", attempt=1, state="finished", exit_code=0)
    explanation = explain_run(run)
    assert explanation.cause == "healthy" and "step 1 to 8" in explanation.summary


def test_a_run_that_was_made_longer_and_then_stopped_was_stopped(run):
    append_event(run, "finished", step=8)
    append_event(run, "attempt_ended", attempt=1, state="finished", exit_code=0)
    run.logs(2).mkdir()
    run.rank_log(2, 0).write_text("step 9 | loss 2.9\n")
    append_event(run, "attempt", attempt=2, world_size=2, pids=[103, 104])
    append_event(run, "stopping", attempt=2, signal="SIGINT")
    assert explain_run(run).cause == "keyboard-interrupt"
    append_event(run, "attempt_ended", attempt=2, state="interrupted", exit_code=130)
    assert explain_run(run).cause == "keyboard-interrupt"


def test_an_error_behind_the_last_step_is_a_failure_after_a_stop_too(run):
    with run.rank_log(1, 1).open("a") as log:
        log.write(raised(1, "OSError: [Errno 28] No space left on device"))
    append_event(run, "stopping", attempt=1, signal="SIGINT")
    append_event(run, "rank_failed", attempt=1, rank=1, exit_code=1, signal=None, message="OSError")
    append_event(run, "attempt_ended", attempt=1, state="failed", exit_code=1)
    assert explain_run(run).cause == "disk-full"


def test_the_exit_code_of_an_interrupt_is_none_where_nobody_has_asked_for_a_stop(run):
    append_event(run, "rank_failed", attempt=1, rank=1, exit_code=130, signal=None, message="no output")
    append_event(run, "attempt_ended", attempt=1, state="failed", exit_code=130)
    explanation = explain_run(run)
    assert explanation.cause == "unknown" and "rank 1 ended itself with exit code 130" in explanation.summary


def test_a_stop_does_not_hide_why_the_attempts_before_it_failed(run):
    for attempt in (1, 2):
        append_event(run, "verdict", attempt=attempt, cause="hang", rank=1, step=7, summary="rank 1 hung")
    append_event(run, "attempt", attempt=3)
    append_event(run, "stopping", attempt=3, signal="SIGINT")
    append_event(run, "attempt_ended", attempt=3, state="interrupted", exit_code=130)
    run.logs(3).mkdir()
    explanation = explain_run(run)
    assert explanation.cause == "keyboard-interrupt"
    assert explanation.notes == ("attempts 1 and 2 failed: hang: rank 1 hung (last step 7)",)


def test_a_run_whose_terminal_was_closed_has_not_failed(run):
    append_event(run, "stopping", attempt=1, signal="SIGHUP")
    append_event(run, "attempt_ended", attempt=1, state="interrupted", exit_code=130)
    explanation = explain_run(run)
    assert (explanation.cause, explanation.confidence) == ("terminal-hangup", 1.0)
    assert "nothing is broken" in explanation.fix and "--detach" in explanation.fix


def test_a_finished_run_does_not_stop_without_a_message(run):
    append_event(run, "attempt_ended", attempt=1, state="finished", exit_code=0)
    append_event(run, "finished")
    explanation = explain_run(run)
    assert explanation.cause == "healthy" and "the log stops" not in explanation.summary and not explanation.fix
