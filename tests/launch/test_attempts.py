"""Attempts in a row, without any process: what is written of each, what is waited for, when it ends."""

import os
import pickle
import re
import signal
import threading
import time
from dataclasses import replace

import pytest

from paceline.errors import UsageError
from paceline.launch.attempts import Recovery, recovery_of, run_attempts
from paceline.launch.digest import format_explained
from paceline.launch.failure import Failure
from paceline.launch.policy import Abilities
from paceline.launch.supervisor import Outcome
from paceline.rundir import RECORDED, RunDir, append_event, read_json_lines


def failure(rank=0, *, signal=None, message="boom", fix=None, traceback=None):
    return Failure(
        rank, exit_code=None if signal else 1, signal=signal, message=message, time=1.0, consequence=False, fix=fix,
        traceback=traceback,
    )  # fmt: skip


KILLED = failure(1, signal="SIGKILL", message="ended by SIGKILL")
TYPO = failure(message="ModuleNotFoundError: No module named 'nmupy'", traceback="...")


class Told:
    """A job whose attempts end as told: a Failure, "interrupted", or None for a good end."""

    def __init__(self, folder, *ends, can=None, on_attempt=lambda number: None, world_size=1):
        self.run = RunDir(folder)
        self.ends = list(ends)
        self.world_size = world_size
        self.can = can or Abilities(own_trainer=True)
        self.on_attempt = on_attempt
        self.changes, self.said = [], []

    def attempt(self, number, caught):
        end = self.ends.pop(0)
        self.run.logs(number).mkdir(parents=True)
        self.run.rank_log(number, 0).write_text(
            f"Traceback (most recent call last):\n  File 'x'\n{TYPO.message}\n" if end == TYPO else "step 1\n"
        )
        append_event(self.run, "attempt", attempt=number, world_size=self.world_size)
        if isinstance(end, Failure):
            append_event(
                self.run, "rank_failed", attempt=number, rank=end.rank, exit_code=end.exit_code, signal=end.signal
            )
        self.on_attempt(number)
        state = "failed" if isinstance(end, Failure) else end or "finished"
        return Outcome(
            state, {"finished": 0, "failed": 3, "interrupted": 130}[state], number, [end] if state == "failed" else []
        )

    def came_further(self, ended):
        return False

    def abilities(self, ended):
        return self.can

    def change(self, decision):
        self.changes.append(decision.action)

    def say(self, lines):
        self.said += lines

    def events(self, kind):
        return [event for event in read_json_lines(self.run.events) if event["event"] == kind]


def test_a_killed_rank_is_explained_and_the_next_attempt_ends_it(tmp_path):
    job = Told(tmp_path, KILLED, None)
    ending = run_attempts(job, Recovery())
    assert (ending.outcome.state, ending.outcome.attempt, ending.explanation) == ("finished", 2, None)
    [verdict], [decision] = job.events("verdict"), job.events("decision")
    assert (verdict["attempt"], verdict["cause"], verdict["rank"]) == (1, "killed-from-outside", 1)
    decided = {key: decision[key] for key in ("attempt", "action", "why", "wait_s", "cause", "rank")}
    assert decided == {
        "attempt": 1, "action": "retry", "why": "it may pass", "wait_s": 1.0, "cause": "killed-from-outside", "rank": 1,
    }  # fmt: skip
    assert job.changes == ["retry"]
    assert job.said == [
        "attempt 1 failed: rank 1 was ended by SIGKILL, which something outside the run has sent (step 1)",
        "attempt 2 in 1 s: it may pass",
    ]


def test_the_explanation_stands_last(tmp_path):
    job = Told(tmp_path, KILLED)
    ending = run_attempts(job, Recovery(recover=False))
    shown = format_explained(ending.outcome, job.run, ending.explanation)
    first = "killed-from-outside: rank 1 was ended by SIGKILL, which something outside the run has sent (step 1)"
    assert f"\n\n{first}\n  fix: {ending.explanation.fix}" in shown


def test_a_mistake_is_attempted_once(tmp_path):
    job = Told(tmp_path, TYPO, None)
    ending = run_attempts(job, Recovery())
    assert (ending.outcome.attempt, ending.explanation.cause) == (1, "import-error")
    assert job.said == ["no further attempt: another attempt would end the same"]


def test_what_a_rank_says_with_a_fix_of_its_own_is_a_mistake(tmp_path):
    job = Told(tmp_path, failure(message="the plan is for 2 ranks", fix="start it through paceline train"), None)
    assert run_attempts(job, Recovery()).outcome.attempt == 1
    assert job.events("verdict")[0]["cause"] == "refused"


def test_numbers_go_on_from_an_earlier_command(tmp_path):
    append_event(RunDir(tmp_path), "attempt", attempt=4)
    assert run_attempts(Told(tmp_path, None), Recovery()).outcome.attempt == 5


def test_without_recovery_the_first_end_is_the_last(tmp_path):
    job = Told(tmp_path, KILLED, None)
    assert run_attempts(job, Recovery(recover=False)).outcome.attempt == 1


def test_a_checkpoint_of_the_attempt_is_progress_and_one_before_it_is_not(tmp_path):
    def save(number):
        if number < 4:
            append_event(RunDir(tmp_path), "checkpoint", step=number)

    job = Told(tmp_path, *[KILLED] * 4, on_attempt=save)
    run_attempts(job, Recovery(max_attempts=4))
    assert [event["wait_s"] for event in job.events("decision")] == [0.0, 0.0, 0.0, 0.0]
    assert "attempt 4 now from step 3: it may pass" in job.said


def test_a_hang_is_the_cause_whatever_the_log_says(tmp_path):
    def hang(number):
        append_event(RunDir(tmp_path), "hang", attempt=number, rank=1, silent_s=61.0, phase="train", step=9)

    job = Told(tmp_path, KILLED, "interrupted", on_attempt=hang)
    run_attempts(job, Recovery())
    [verdict] = job.events("verdict")
    assert (verdict["cause"], verdict["rank"], verdict["step"]) == ("hang", 1, 9)
    assert job.said[0] == "attempt 1 failed: rank 1 made no step for 61 s (step 9)"


def test_a_hang_of_ranks_that_nothing_tells_apart_has_the_rank_that_the_flight_recorders_name(tmp_path):
    def hang(number):
        append_event(
            RunDir(tmp_path), "hang", attempt=number, rank=None, silent_s=61.0, text="nothing tells them apart"
        )
        for rank, sequence in enumerate((41, 40)):
            entries = [
                {"pg_id": 0, "collective_seq_id": sequence, "profiling_name": "gloo:all_reduce", "is_p2p": False}
            ]
            path = RunDir(tmp_path).logs(number) / f"{RECORDED}{rank}"
            path.write_bytes(pickle.dumps({"entries": entries}))

    job = Told(tmp_path, KILLED, "interrupted", on_attempt=hang, world_size=2)
    run_attempts(job, Recovery())
    assert [(verdict["cause"], verdict["rank"]) for verdict in job.events("verdict")] == [("hang", 1)]


def test_a_rank_that_the_kernel_killed_for_memory_is_not_a_killed_one(tmp_path, monkeypatch):
    counts = iter([4, 5])
    monkeypatch.setattr("paceline.launch.attempts.oom_kills", lambda: next(counts))
    job = Told(tmp_path, KILLED, can=Abilities(own_trainer=True))
    run_attempts(job, Recovery())
    [decision] = job.events("decision")
    assert (decision["cause"], decision["why"]) == ("host-oom-killed", "memory ran out, and nothing smaller is left")
    assert re.search(r"(this host has|its group may take) [\d.]+ GiB of memory", job.events("verdict")[0]["summary"])


def test_an_agent_that_is_killed_is_no_fault_of_a_rank(tmp_path):
    job = Told(tmp_path, failure(None, signal="SIGKILL", message="the launch agent was ended by SIGKILL"), None)
    assert run_attempts(job, Recovery()).outcome.attempt == 2
    assert job.said[0].startswith("attempt 1 failed: the launch agent was ended by SIGKILL")


def test_a_rank_that_leaves_with_0_too_early_is_tried_again_once(tmp_path):
    left = replace(failure(1, message="rank 1 ended with exit code 0 after step 9, in load"), exit_code=0)
    job = Told(tmp_path, left, left, None)
    ending = run_attempts(job, Recovery())
    assert [event["cause"] for event in job.events("verdict")] == ["exited-early"] * 2
    assert (ending.outcome.attempt, ending.explanation.summary) == (2, left.message)
    assert job.said[-1] == "no further attempt: the same error as before: it does not come from outside"


def test_a_wordless_end_on_a_full_disk_is_the_disks(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.launch.ending.NO_ROOM_BYTES", 1 << 62)
    job = Told(tmp_path, failure(message="exit code 120, without a word"), None)
    run_attempts(job, Recovery(recover=False))
    [verdict] = job.events("verdict")
    assert (verdict["cause"], verdict["summary"]) == (
        "disk-full", "the disk of the run folder is full: nothing could be written",
    )  # fmt: skip


def test_an_attempt_whose_command_was_ended_is_told_by_the_next(tmp_path):
    append_event(RunDir(tmp_path), "attempt", attempt=1)
    append_event(RunDir(tmp_path), "attempt_ended", attempt=1, state="failed")
    append_event(RunDir(tmp_path), "attempt", attempt=2)
    job = Told(tmp_path, None)
    run_attempts(job, Recovery())
    [verdict] = job.events("verdict")
    assert (verdict["attempt"], verdict["cause"], verdict["rank"]) == (2, "supervisor-lost", None)
    assert job.said[0].startswith("attempt 2: the command that ran attempt 2 was itself ended")


def test_an_explanation_that_breaks_hides_nothing(tmp_path, monkeypatch):
    def breaks(run, *, attempt):
        raise KeyError("rank")

    monkeypatch.setattr("paceline.launch.attempts.explain_run", breaks)
    job = Told(tmp_path, TYPO, None)
    ending = run_attempts(job, Recovery())
    assert job.said == ["no further attempt: what it died of could not be explained (KeyError: 'rank')"]
    assert TYPO.message in format_explained(ending.outcome, job.run, ending.explanation)


def test_a_rollback_goes_on_at_once(tmp_path):
    def roll_back(number):
        if number == 1:
            RunDir(tmp_path).rank_error(1, 0).write_text('{"rollback": true, "step": 9, "message": "nan", "fix": "x"}')

    job = Told(tmp_path, failure(message="the loss is not finite", fix="x"), None, on_attempt=roll_back)
    run_attempts(job, Recovery())
    [decision] = job.events("decision")
    assert (decision["action"], decision["wait_s"], decision["why"]) == ("retry", 0.0, "past the rows at step 9")


def test_a_failure_after_the_order_to_stop_is_not_tried_again(tmp_path):
    job = Told(tmp_path, KILLED, None, on_attempt=lambda n: append_event(RunDir(tmp_path), "stopping", attempt=n))
    assert run_attempts(job, Recovery()).outcome.state == "failed"
    assert job.events("decision") == []


def test_ctrl_c_ends_a_wait_at_once(tmp_path):
    job = Told(tmp_path, KILLED, KILLED, None)
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()  # in the second wait, of 5 s
    started = time.monotonic()
    ending = run_attempts(job, Recovery())
    assert time.monotonic() - started < 4
    assert (ending.outcome.state, ending.outcome.exit_code, ending.waiting) == ("interrupted", 130, True)


@pytest.mark.parametrize("wrong", [{"max_attempts": 0}, {"hang_after_s": 0.0}, {"hang_after_s": float("nan")}])
def test_an_attempt_at_least_is_made_and_some_silence_is_borne(wrong):
    options = {"max_attempts": None, "no_recover": False, "hang_after_s": None}
    with pytest.raises(UsageError):
        recovery_of(**{**options, **wrong})
    assert recovery_of(**options) == Recovery()
    assert recovery_of(max_attempts=3, no_recover=True, hang_after_s=8) == Recovery(3, recover=False, hang_after_s=8)
