"""Attempts in a row, without any process: what is written about each, what is waited for, when it ends."""

import os
import pickle
import re
import signal
import threading
from dataclasses import replace

import pytest

from paceline.explain.explanation import Evidence, Explanation
from paceline.explain.run_folder import explain_run
from paceline.launch.attempts import failed_at, format_explained, run_attempts
from paceline.launch.failure import SCRIPT_EXIT, Failure, explain_end
from paceline.launch.policy import Abilities
from paceline.launch.supervisor import Outcome
from paceline.options import LaunchOptions, Recovery
from paceline.rundir import RECORDER_DUMP, RunDir, append_event, read_json_lines
from paceline.slurm import SlurmJob


def failure(rank=0, *, signal=None, message="boom", fix=None, traceback=None):
    return Failure(
        rank, exit_code=None if signal else 1, signal=signal, message=message, time=1.0, consequence=False, fix=fix,
        traceback=traceback,
    )  # fmt: skip


KILLED = failure(1, signal="SIGKILL", message="ended by SIGKILL")
TYPO = failure(message="ModuleNotFoundError: No module named 'nmupy'", traceback="...")


class FakeJob:
    """A job whose attempts end as given: a Failure, "interrupted", or None for success."""

    options, cluster, choose_hosts = LaunchOptions(min_hosts=2), None, None
    old_folder = ""

    def __init__(self, folder, *ends, abilities=None, on_attempt=lambda number: None, world_size=1):
        self.run = RunDir(folder)
        self.ends = list(ends)
        self.world_size = world_size
        self.next_abilities = abilities or Abilities(own_trainer=True)
        self.on_attempt = on_attempt
        self.changes, self.lines = [], []

    def attempt(self, number, signals):
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

    def made_progress(self, outcome, *, seconds):
        return False

    def abilities(self, end):
        return self.next_abilities

    def change(self, decision):
        self.changes.append(decision.action)

    def show(self, lines, *, exit_code=0):
        self.lines += lines

    def events(self, kind):
        return [event for event in read_json_lines(self.run.events) if event["event"] == kind]


def test_a_killed_rank_is_explained_and_the_next_attempt_finishes(tmp_path):
    job = FakeJob(tmp_path, KILLED, None)
    outcome = run_attempts(job, Recovery())
    assert (outcome.state, outcome.attempt, outcome.explanation) == ("finished", 2, None)
    [verdict], [decision] = job.events("verdict"), job.events("decision")
    assert (verdict["attempt"], verdict["cause"], verdict["rank"]) == (1, "killed-from-outside", 1)
    facts = {key: decision[key] for key in ("attempt", "action", "why", "wait_s", "cause", "rank")}
    assert facts == {
        "attempt": 1, "action": "retry", "why": "this is usually transient", "wait_s": 1.0, "cause": "killed-from-outside",
        "rank": 1,
    }  # fmt: skip
    assert job.changes == ["retry"]
    assert job.lines == [
        "attempt 1 failed: rank 1 was killed by SIGKILL from outside the run (last step 1)",
        "attempt 2 in 1 s: this is usually transient",
    ]


def test_without_recovery_there_is_one_attempt_and_its_explanation_stands_last(tmp_path):
    job = FakeJob(tmp_path, KILLED, None)
    outcome = run_attempts(job, Recovery(recover=False))
    assert outcome.attempt == 1
    shown = format_explained(outcome, job.run)
    first = "killed-from-outside: rank 1 was killed by SIGKILL from outside the run (last step 1)"
    assert f"\n\n{first}\n  fix: {outcome.explanation.fix}" in shown


def test_a_mistake_is_not_retried(tmp_path):
    job = FakeJob(tmp_path, TYPO, None)
    outcome = run_attempts(job, Recovery())
    assert (outcome.attempt, outcome.explanation.cause) == (1, "import-error")
    assert job.lines == ["no further attempt: another attempt would fail the same way"]


@pytest.mark.parametrize("error, action", [
    ("ValueError: dataset shard 12 has a wrong magic number", "stop"), ("OSError: failed to download the dataset", "retry"),
])  # fmt: skip
def test_data_that_is_damaged_does_not_come_back_by_itself(error, action, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.launch.policy.UNAVAILABLE_WAIT_S", 0.0)
    job = FakeJob(tmp_path, failure(message=error), "interrupted")
    traceback = f'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n{error}\n'
    job.on_attempt = lambda number: job.run.rank_log(number, 0).write_text(traceback)
    run_attempts(job, Recovery())
    decision = job.events("decision")[0]
    assert (decision["cause"], decision["action"]) == ("dataset-download", action)


def test_an_error_with_its_own_fix_is_a_mistake(tmp_path):
    job = FakeJob(tmp_path, failure(message="the plan is for 2 ranks", fix="start it through paceline train"), None)
    assert run_attempts(job, Recovery()).attempt == 1
    assert job.events("verdict")[0]["cause"] == "refused"


def test_attempts_are_numbered_over_all_commands(tmp_path):
    append_event(RunDir(tmp_path), "attempt", attempt=4)
    assert run_attempts(FakeJob(tmp_path, None), Recovery()).attempt == 5


def test_a_checkpoint_of_the_attempt_is_progress_and_one_before_it_is_not(tmp_path):
    def save(number):
        if number < 4:
            append_event(RunDir(tmp_path), "checkpoint", step=number)
            (folder := RunDir(tmp_path).checkpoints / f"step_00000{number}").mkdir(parents=True)
            (folder / "manifest.json").touch()

    job = FakeJob(tmp_path, *[KILLED] * 4, on_attempt=save)
    run_attempts(job, Recovery(max_attempts=4))
    assert [event["wait_s"] for event in job.events("decision")] == [0.0, 0.0, 0.0, 0.0]
    assert "attempt 4 now from step 3: this is usually transient" in job.lines


def test_a_hang_is_the_cause_whatever_the_log_shows(tmp_path):
    def hang(number):
        append_event(RunDir(tmp_path), "hang", attempt=number, rank=1, silent_s=61.0, phase="train", step=9)

    job = FakeJob(tmp_path, KILLED, "interrupted", on_attempt=hang)
    run_attempts(job, Recovery())
    [verdict] = job.events("verdict")
    assert (verdict["cause"], verdict["rank"], verdict["step"]) == ("hang", 1, 9)
    assert f"`less {tmp_path}/hangs/{verdict['attempt']}/*.txt`" in verdict["fix"]
    assert job.lines[0] == "attempt 1 failed: rank 1 made no step for 61 s (last step 9)"


@pytest.mark.parametrize(
    "file, names_lock", [("torch/utils/file_baton.py", True), ("torch/utils/data/worker.py", False)]
)
def test_a_rank_that_waits_for_the_build_of_an_extension_is_told_of_its_lock(file, names_lock, tmp_path):
    def hang(number):
        append_event(RunDir(tmp_path), "hang", attempt=number, rank=1, silent_s=601.0, text="the only rank is waiting")
        stack = f'py-spy\nThread 77 (idle): "MainThread"\n    wait (/env/site-packages/{file}:50)\n    main (/w/train.py:2)\n'
        path = RunDir(tmp_path).hang(number) / "1.txt"
        path.parent.mkdir(parents=True)
        path.write_text(f"State:\tS (sleeping)\n\n{stack}")

    job = FakeJob(tmp_path, KILLED, "interrupted", on_attempt=hang)
    run_attempts(job, Recovery())
    [verdict] = job.events("verdict")
    assert (verdict["cause"], "-name lock -delete" in verdict["fix"]) == ("hang", names_lock)


def test_a_hang_without_a_rank_gets_the_rank_that_the_flight_recorders_show(tmp_path):
    def hang(number):
        append_event(RunDir(tmp_path), "hang", attempt=number, rank=None, silent_s=61.0, text="the ranks look the same")
        for rank, sequence in enumerate((41, 40)):
            entries = [
                {"pg_id": 0, "collective_seq_id": sequence, "profiling_name": "gloo:all_reduce", "is_p2p": False}
            ]
            path = RunDir(tmp_path).logs(number) / f"{RECORDER_DUMP}{rank}"
            path.write_bytes(pickle.dumps({"entries": entries}))

    job = FakeJob(tmp_path, KILLED, "interrupted", on_attempt=hang, world_size=2)
    run_attempts(job, Recovery())
    assert [(verdict["cause"], verdict["rank"]) for verdict in job.events("verdict")] == [("hang", 1)]


def test_a_rank_that_the_kernel_killed_for_memory_was_not_killed_from_outside(tmp_path, monkeypatch):
    counts = iter([4, 5])
    monkeypatch.setattr("paceline.launch.attempts.oom_kills", lambda: next(counts))
    job = FakeJob(tmp_path, KILLED, abilities=Abilities(own_trainer=True))
    run_attempts(job, Recovery())
    [decision] = job.events("decision")
    assert (decision["cause"], decision["why"]) == (
        "host-oom-killed",
        "memory ran out, and no smaller configuration exists",
    )
    assert re.search(r"(this host has|its cgroup may use) [\d.]+ GiB of memory", job.events("verdict")[0]["summary"])


def test_a_killed_agent_is_not_blamed_on_a_rank(tmp_path):
    job = FakeJob(tmp_path, failure(None, signal="SIGKILL", message="the launch agent was killed by SIGKILL"), None)
    assert run_attempts(job, Recovery()).attempt == 2
    assert job.lines[0].startswith("attempt 1 failed: the launch agent was killed by SIGKILL")


def test_a_rank_that_exits_with_0_too_early_is_retried_once(tmp_path):
    left = replace(failure(1, message="exit code 0 after step 9, in load"), exit_code=0)
    job = FakeJob(tmp_path, left, left, None)
    outcome = run_attempts(job, Recovery())
    assert [event["cause"] for event in job.events("verdict")] == ["exited-early"] * 2
    assert (outcome.attempt, outcome.explanation.summary) == (2, f"rank 1 ended with {left.message}")
    assert job.lines[-1] == "no further attempt: the same error as in an earlier attempt: it is not transient"


def test_a_rank_of_a_script_that_exits_with_0_too_early_would_do_so_again_with_as_few_batches(tmp_path):
    left = replace(failure(1, message=SCRIPT_EXIT), exit_code=0)
    job = FakeJob(tmp_path, left, None)
    fix = run_attempts(job, Recovery()).explanation.fix
    assert "fewer batches" in fix and f"read the end of {job.run.rank_log(1, 1)}" in fix
    assert job.lines == ["no further attempt: another attempt would fail the same way"]


def test_an_end_without_output_on_a_full_disk_is_blamed_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.explain.recorded_end.FULL_DISK_BYTES", 1 << 62)
    job = FakeJob(tmp_path, failure(message="exit code 120, no output"), None)
    run_attempts(job, Recovery(recover=False))
    [verdict] = job.events("verdict")
    assert (verdict["cause"], verdict["summary"]) == (
        "disk-full", "the disk of the run folder is full: nothing could be written",
    )  # fmt: skip


def test_a_hang_is_told_once_and_an_exception_that_ended_its_program_is_its_cause(tmp_path):
    what = {"text": "rank 1 is stopped (state T)", "places": ["rank 1: f at x.py:1"]}
    where = {"rank": 1, "silent_s": 61.0, "step": None, **what}
    append_event(RunDir(tmp_path), "hang", attempt=1, **where)
    root = replace(failure(1, signal="SIGKILL", message="rank 1 is stopped (state T)"), cause="hang")
    job = FakeJob(tmp_path, root)
    outcome = run_attempts(job, Recovery(recover=False))
    assert outcome.explanation.cause == "hang" and job.events("decision")[0]["rank"] == 1
    assert format_explained(outcome, job.run).count("rank 1 is stopped") == 1
    assert "  fix: find what stopped the process: SIGSTOP, Ctrl-Z, " in format_explained(outcome, job.run)

    append_event(job.run, "hang", attempt=2, **where, error="ValueError: boom")
    shown = Explanation("user-code-exception", rank=1, summary="ValueError: boom")
    end, explanation = explain_end(job.run, 2, failure(1), shown, memory_ran_out=None)
    assert (end.cause, end.retry) == ("user-code-exception", "never")
    alive = f"its process did not end: see the threads in {job.run.hang(2)}/1.txt"
    assert explanation.summary == f"ValueError: boom; {alive}"


def test_a_failure_that_no_log_shows_is_never_healthy(tmp_path):
    root = failure(message="exit code 1, no output")
    job = FakeJob(tmp_path, root)
    end, explanation = explain_end(job.run, 1, root, Explanation("healthy"), memory_ran_out=None)
    assert (end.cause, explanation.summary) == ("unknown", "rank 0: exit code 1, no output") and explanation.fix
    append_event(job.run, "save_failed", step=20, needed_bytes=1, free_bytes=0)
    end, explanation = explain_end(job.run, 1, root, Explanation("healthy"), memory_ran_out=None)
    assert (end.cause, explanation.summary) == (
        "disk-full",
        "the disk of the run folder had no room for the checkpoint of step 20",
    )


def test_the_next_command_reports_that_the_one_before_was_killed(tmp_path):
    append_event(RunDir(tmp_path), "attempt", attempt=1)
    append_event(RunDir(tmp_path), "attempt_ended", attempt=1, state="failed")
    append_event(RunDir(tmp_path), "attempt", attempt=2)
    job = FakeJob(tmp_path, None)
    run_attempts(job, Recovery())
    [verdict] = job.events("verdict")
    assert (verdict["attempt"], verdict["cause"], verdict["rank"]) == (2, "supervisor-lost", None)
    assert job.lines[0].startswith("attempt 2: the command that ran attempt 2 was itself killed")


def test_the_report_of_a_lost_supervisor_of_several_hosts_names_its_host(tmp_path):
    append_event(RunDir(tmp_path), "attempt", attempt=1, hosts={"ada": [0], "bob": [1]}, head="ada")
    job = FakeJob(tmp_path, None)
    run_attempts(job, Recovery())
    [verdict] = job.events("verdict")
    assert (verdict["cause"], verdict["host"], verdict["rank"]) == ("supervisor-lost", "ada", None)
    assert "attempt 1 on ada ended without a report, or ada was lost" in job.lines[0]


def test_in_a_slurm_job_that_was_cancelled_nothing_is_tried_again_and_the_job_is_the_cause(tmp_path, monkeypatch):
    job = FakeJob(tmp_path, KILLED, None)
    monkeypatch.setattr("paceline.launch.attempts.current_job_end", lambda: SlurmJob(4711, "COMPLETING"))
    outcome = run_attempts(job, Recovery())
    text = "job 4711 of Slurm, which gave the nodes, was cancelled or has ended (COMPLETING)"
    assert (outcome.explanation.cause, outcome.explanation.summary) == ("job-over", text)
    assert job.lines == ["no further attempt: the Slurm job that gave the nodes is over"]
    explanation = explain_run(job.run)
    assert explanation.summary == text and f"paceline resume {tmp_path}" in explanation.fix
    job = FakeJob(tmp_path / "stopped", KILLED, on_attempt=lambda number: os.kill(os.getpid(), signal.SIGTERM))
    outcome = run_attempts(job, Recovery())  # SIGTERM comes with the end of a job
    assert (outcome.state, outcome.exit_code, outcome.explanation.cause) == ("failed", 3, "job-over")


def test_the_fix_is_shown_where_the_run_goes_on_with_less(tmp_path):
    left = Failure(
        None, None, None, "it is silent", 1.0, consequence=False, fix="plug it in", host="bob", cause="host-lost"
    )
    abilities = Abilities(own_trainer=True, lost_hosts=("bob",), hosts_left=("ada",), ranks_left=1)
    job = FakeJob(tmp_path, left, None, abilities=abilities)
    run_attempts(job, Recovery())
    assert job.lines == [
        "attempt 1 failed: host bob: it is silent",
        "  fix: plug it in",
        "attempt 2 now: lost bob: continuing on ada",
    ]


def test_an_explanation_that_fails_hides_nothing(tmp_path, monkeypatch):
    def breaks(run, *, attempt):
        raise KeyError("rank")

    monkeypatch.setattr("paceline.launch.attempts.explain_run", breaks)
    job = FakeJob(tmp_path, TYPO, None)
    outcome = run_attempts(job, Recovery())
    assert job.lines == ["no further attempt: the failure could not be explained (KeyError: 'rank')"]
    assert TYPO.message in format_explained(outcome, job.run)


@pytest.mark.parametrize(("is_back", "outcome", "lines"), [
    (True, "finished", []),
    (False, "failed", ["no further attempt: not enough hosts answered again within 30 min"]),
])  # fmt: skip
def test_a_run_that_cannot_go_on_without_its_hosts_waits_for_them(tmp_path, monkeypatch, is_back, outcome, lines):
    monkeypatch.setattr("paceline.launch.attempts.awaited_hosts", lambda cluster: ("ada", "cy"))
    monkeypatch.setattr("paceline.launch.attempts.await_hosts", lambda *_, **__: is_back)
    lost = replace(failure(None, message="it is silent"), host="cy", cause="host-lost")
    job = FakeJob(tmp_path, lost, None, abilities=Abilities(lost_hosts=("ada", "cy"), ranks_left=0))
    end = run_attempts(job, Recovery())
    assert (end.state, job.lines[2:]) == (
        outcome,
        ["attempt 2 once they are back, within 30 min: lost ada, cy", *lines],
    )
    assert is_back or "joins the run again" not in end.explanation.fix


def test_a_lost_host_that_ends_the_run_names_min_hosts_and_promises_no_return(tmp_path):
    lost = replace(failure(None, message="nothing was heard of it for 6 s"), host="cy", cause="host-lost")
    job = FakeJob(tmp_path, lost, abilities=Abilities(lost_hosts=("cy",), hosts_left=("ada",), ranks_left=0))
    outcome = run_attempts(job, Recovery())
    assert job.lines == ["no further attempt: lost cy: 1 host remains, fewer than --min-hosts 2"]
    [verdict] = job.events("verdict")
    assert outcome.explanation.summary == verdict["summary"]
    assert verdict["summary"] == "host cy: nothing was heard of it for 6 s; 1 host remains, fewer than --min-hosts 2"
    assert verdict["fix"] == (
        f"see that cy is on and in the network: ssh cy true; then `paceline resume {job.run.path}` goes on from the last"
        " checkpoint; or on the others alone, with --min-hosts 1, and --hosts without cy"
    )


def test_a_rollback_is_retried_at_once(tmp_path):
    def roll_back(number):
        if number == 1:
            RunDir(tmp_path).rank_error(1, 0).write_text('{"rollback": true, "step": 9, "message": "nan", "fix": "x"}')

    job = FakeJob(tmp_path, failure(message="the loss is not finite", fix="x"), None, on_attempt=roll_back)
    run_attempts(job, Recovery())
    [decision] = job.events("decision")
    assert (decision["action"], decision["wait_s"], decision["why"]) == ("retry", 0.0, "skipping the batch of step 9")


def test_a_failure_after_the_order_to_stop_is_not_retried(tmp_path):
    job = FakeJob(tmp_path, KILLED, None, on_attempt=lambda n: append_event(RunDir(tmp_path), "stopping", attempt=n))
    assert run_attempts(job, Recovery()).state == "failed"
    assert job.events("decision") == []


@pytest.mark.parametrize(
    ("end", "signum", "state"),
    [(KILLED, signal.SIGTERM, "interrupted"), (KILLED, signal.SIGINT, "failed"), (TYPO, signal.SIGTERM, "failed")],
)
def test_a_stop_after_a_failure_that_would_be_retried_is_one_between_two_attempts(end, signum, state, tmp_path):
    job = FakeJob(tmp_path, end, None, on_attempt=lambda number: os.kill(os.getpid(), signum))
    outcome = run_attempts(job, Recovery())
    assert (outcome.state, outcome.between_attempts) == (state, state == "interrupted")
    assert job.lines == ["no further attempt: the run was stopped"]


def test_ctrl_c_ends_a_wait_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.launch.policy.WAITS_S", (0.0, 1000.0))
    job = FakeJob(tmp_path, KILLED, None)
    job.change = lambda decision: threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    outcome = run_attempts(job, Recovery())  # long before the wait is over
    assert (outcome.state, outcome.exit_code, outcome.between_attempts) == ("interrupted", 130, True)


def test_an_attempt_failed_at_the_old_place_of_its_folder_if_its_error_names_that():
    def failed(path, cause="checkpoint-missing-or-perm"):
        return failed_at("runs/depth12", Explanation(cause, evidence=(Evidence(1, f"FileNotFoundError: '{path}'"),)))

    assert failed("/home/ada/runs/depth12/last.pt") and failed("runs/depth12")
    assert not failed("/home/ada/runs/depth12-lr3/typo.csv") and not failed("runs/depth1/last.pt")
    assert failed("metrics.jsonl", "storage-io-error")  # a file of the trainer's own, whose message has no path
