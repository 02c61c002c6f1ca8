"""
All attempts of a job, from the first start to the closing lines: of a training (launch/job.py) or a script (launch/script.py).

Each failed attempt is explained, and the policy decides what happens next; both are written to events.jsonl and printed. Ctrl-C and
SIGTERM end an attempt (launch/supervisor.py) or the wait before the next one. No torch.
"""

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from paceline.errors import INTERRUPTED, PacelineError
from paceline.explain.catalogue import load_catalogue
from paceline.explain.explanation import UNKNOWN, Explanation, format_explanation, format_summary
from paceline.explain.recorded_end import HANG, SUPERVISOR_LOST, earlier_failures, lost_supervisor_texts, next_command
from paceline.explain.run_folder import explain_run
from paceline.file_systems import reserve_space
from paceline.launch.cluster import Cluster
from paceline.launch.failure import REJOINS, explain_end
from paceline.launch.log_tail import read_log_tail
from paceline.launch.losses import await_hosts, awaited_hosts
from paceline.launch.notify import run_services
from paceline.launch.policy import AWAIT_S, Abilities, AttemptEnd, Decision, Situation, decide
from paceline.launch.preemption import short_notice, watch_preemption
from paceline.launch.requeue import current_job_end, decide_requeue, job_watch, requeue_job
from paceline.launch.stop_signals import StopSignals, catch_signals
from paceline.launch.supervisor import Outcome
from paceline.model.manifest import saved_step
from paceline.options import LaunchOptions, Recovery, Services
from paceline.plan.host import oom_kills
from paceline.rundir import NO_SPACE, RunDir, append_event, read_json_lines, resume_command
from paceline.slurm import SlurmJob
from paceline.terminal import TolerantStream
from paceline.watch.events import one_line
from paceline.watch.run_reader import RunReader
from paceline.watch.summary import goodput_line

POLL_S = 0.05
EVENT_BYTES = 16 << 10  # reserved, so that the events of an end fit on a full disk
JOB_OVER = "job-over"
TRACEBACK_LINES = 40
LOG_LINES = 10  # shown of a rank that left no traceback
MESSAGE_CHARS = 160


@dataclass
class Job:
    """What is attempted: a training or a script."""

    run: RunDir
    lock: int  # the file descriptor that holds the run
    libuv: bool  # whether this torch has it
    options: LaunchOptions
    cluster: Cluster | None = field(default=None, kw_only=True)  # the hosts, where there are several
    resumes_itself = False  # whether the same command, started again by Slurm, continues the run
    is_training = False  # by paceline's own trainer, which saves before it stops
    old_folder = ""  # its parent's and its own name, if it was renamed during the last attempt
    workers_record_end = False  # whether the workers write `finished` and `stopped` to events.jsonl themselves

    def attempt(self, number: int, signals: StopSignals) -> Outcome:
        """Makes one attempt. signals: those since the first attempt began; it adds the ones it receives."""
        raise NotImplementedError

    def made_progress(self, outcome: Outcome, *, seconds: float) -> bool:
        """Whether the attempt made progress that its checkpoints do not show."""
        return False

    def save_s(self) -> float | None:
        """Returns how long the ranks may take to save, where that is known."""
        return None

    def abilities(self, end: AttemptEnd) -> Abilities:
        """Returns what can be changed for the next attempt."""
        return Abilities()

    def change(self, decision: Decision) -> None:
        """Prepares the next attempt as `abilities` has promised."""

    def move(self, run: RunDir) -> None:
        """Takes the place to which the run folder was renamed during an attempt."""
        self.old_folder = "/".join(self.run.path.absolute().parts[-2:])  # as in an absolute path and in a relative one
        self.run = run
        self.show([f"the run folder was renamed: it is {run.path} now"])

    def regroup(self) -> None:
        """Prepares an attempt on more hosts, after the last one was saved and ended for it."""
        raise NotImplementedError

    def choose_hosts(self, count: int) -> int:
        """Returns how many of so many hosts can make the next attempt, and prepares that; 0 where they are too few."""
        return count if count >= self.options.min_hosts else 0

    def show(self, lines: Sequence[str], *, exit_code: int = 0) -> None:
        """Prints lines of paceline's own. exit_code: of the run, for its closing lines."""
        raise NotImplementedError

    def shown_failure(self, outcome: Outcome) -> Explanation | None:
        """Returns what the output shows of a failure although all ranks ended with exit code 0."""
        return None

    def exit_code(self, outcome: Outcome) -> int:
        """Returns the exit code of the command."""
        return outcome.exit_code

    def closing_lines(self, outcome: Outcome, *, seconds: float, time_line: str) -> list[str]:
        """Returns what to print after a run that did not fail. time_line: where the run's time went."""
        raise NotImplementedError


@contextmanager
def records_early_stop(job: Job) -> Iterator[None]:
    """Records a Ctrl-C or SIGTERM that ends the block before its first attempt, and prints how the run continues.

    An attempt records its own end. The folder of a run that was removed again has nothing to continue.
    """
    num_attempts = count_attempts(job.run)
    try:
        yield
    except KeyboardInterrupt:
        if job.run.config_toml.is_file() and count_attempts(job.run) == num_attempts:
            append_event(job.run, "interrupted")
            job.show([f"next    {resume_command(job.run)}"], exit_code=INTERRUPTED)
        raise


def count_attempts(run: RunDir) -> int:
    """Returns how many attempts of the run its events have."""
    return sum(event.get("event") == "attempt" for event in read_json_lines(run.events))


def run_job(job: Job, services: Services) -> int:
    """Runs all attempts with trackers and notifications beside them, prints the closing lines and returns the exit code.

    It releases the run's lock when the last attempt has ended. Call it from the main thread, as it handles signals.
    """
    signals = StopSignals()
    reserve_space(job.run.events, EVENT_BYTES)
    with job_watch(signals) if job.is_training else nullcontext():
        exit_code, reason = finish_job(job, services, signals)
        if reason:
            job.show(requeue_job(job.run, reason))
    return exit_code


def finish_job(job: Job, services: Services, signals: StopSignals) -> tuple[int, str | None]:
    """Runs all attempts with services beside them, releases the lock and prints the closing lines.

    Returns the exit code, and why Slurm is to start the job again, if it is.
    """
    started, reason, notes = time.monotonic(), None, list[str]()
    if line := short_notice(job.options, needed_s=job.save_s()):
        job.show([line])
    with run_services(job.run, services):
        try:
            with watch_preemption(job.options, signals.preempt, partial(note_problem, job.run)):
                outcome = run_attempts(job, job.options, signals)
            seconds = time.monotonic() - started
            exit_code = job.exit_code(outcome)
            if outcome.state == "failed":
                append_event(job.run, "failed", rank=outcome.failures[0].rank, exit_code=exit_code)
            elif outcome.between_attempts or not job.workers_record_end:
                append_event(job.run, outcome.state)
            if outcome.state == "finished" and (explanation := job.shown_failure(outcome)):
                outcome = replace(outcome, explanation=explanation)
                record_verdict(job, outcome.attempt, explanation)
            if job.resumes_itself:
                reason, notes = decide_requeue(job.run, outcome, signals)
        finally:
            os.close(job.lock)
        time_line = f"time    {goodput_line(RunReader(job.run).goodput())}"
        if outcome.state == "failed":
            lines = ["", time_line, "", format_explained(outcome, job.run)]
        else:
            lines = job.closing_lines(outcome, seconds=seconds, time_line=time_line)
            if outcome.state == "interrupted":
                texts = [*earlier_failures(read_json_lines(job.run.events)), *filter(None, [outcome.message])]
                lines[1:1] = [f"note    {text}" for text in texts]
        job.show([*lines, *notes], exit_code=exit_code)
        if isinstance(sys.stdout, TolerantStream) and sys.stdout.problem:
            lost = f"a part of the output could not be written ({sys.stdout.problem})"
            print(f"note    {lost}: that of the ranks is in {job.run.logs(outcome.attempt)}", file=sys.stderr)
    return exit_code, reason


def run_attempts(job: Job, recovery: Recovery, signals: StopSignals | None = None) -> Outcome:
    """Makes attempts until one succeeds, no further one would help, or the user stops the run. Call it from the main thread.

    Attempts are counted from 1 over all commands that ran the job. Returns the outcome of the last one.

    signals: those that came before count too, and preemption notices.
    """
    attempts = [event["attempt"] for event in read_json_lines(job.run.events) if event.get("event") == "attempt"]
    attempts += [int(path.name) for path in job.run.path.glob("logs/*") if path.name.isdecimal()]  # events may be lost
    number, history = 1 + max(attempts, default=0), list[AttemptEnd]()
    record_lost_supervisor(job)
    with catch_signals(signals or StopSignals()) as signals:
        while True:
            outcome, end = run_one_attempt(job, number, signals)
            if outcome.state == "regrouped" and not signals.first:
                job.regroup()
                number += 1
                continue
            if end is None or outcome.explanation is None:
                return outcome
            history.append(end)
            decision, explanation = decide_next(job, history, recovery, outcome.explanation)
            stops = [event for event in read_json_lines(job.run.events) if event.get("event") == "stopping"]
            is_during = any(stop.get("attempt") == number for stop in stops)
            if signals.first or is_during:
                record_verdict(job, number, explanation)
                job.show(["no further attempt: the run was stopped"])
                if is_during or signals.by_person or decision.action == "stop":
                    return replace(outcome, explanation=explanation)
                return Outcome("interrupted", INTERRUPTED, number, [], between_attempts=True)
            outcome = replace(outcome, explanation=explanation)
            record_verdict(job, number, explanation)
            record_decision(job, end, decision, explanation, number)
            if decision.action == "stop":
                return outcome
            job.change(decision)
            is_back = decision.action != "await-hosts" or await_hosts(
                job.cluster, job.choose_hosts, is_over=lambda: signals.first is not None, show=job.show
            )
            until = time.monotonic() + decision.wait_s
            while not signals.first and (remaining_s := until - time.monotonic()) > 0:
                time.sleep(min(POLL_S, remaining_s))
            if signals.first:
                return Outcome("interrupted", INTERRUPTED, number, [], between_attempts=True)
            if not is_back:
                why = f"not enough hosts answered again within {AWAIT_S / 60:.0f} min"
                record_decision(job, end, Decision("stop", 0.0, why), explanation, number)
                fix = f"{explanation.fix.partition(REJOINS)[0]}; then {next_command(job.run)}"
                return replace(outcome, explanation=replace(explanation, fix=fix))
            number += 1


def decide_next(
    job: Job, history: Sequence[AttemptEnd], recovery: Recovery, explanation: Explanation
) -> tuple[Decision, Explanation]:
    """Returns what follows the last attempt of the history, and its explanation, corrected by what its job and hosts say."""
    job_end = current_job_end()
    if job_end:
        explanation = explain_job_end(job_end, explanation, job.run)
    abilities = replace(
        job.abilities(history[-1]), awaited_hosts=awaited_hosts(job.cluster),
        min_hosts=job.options.min_hosts, is_job_over=job_end is not None,
        is_folder_moved=bool(job.old_folder) and failed_at(job.old_folder, explanation),
    )  # fmt: skip
    job.old_folder = ""
    decision = decide(Situation(history, recovery, abilities))
    if decision.action == "stop" and abilities.lost_hosts and not job_end:
        explanation = explain_end_without_host(explanation, job.run, abilities)
    return decision, explanation


def failed_at(folder: str, explanation: Explanation) -> bool:
    """Whether an attempt failed because a folder is no longer at its place. folder: its parent's and its own name."""
    names = re.compile(rf"{re.escape(folder)}(?![\w.-])")
    texts = (explanation.summary, *(item.text for item in explanation.evidence))
    return explanation.cause == "storage-io-error" or any(map(names.search, texts))


def explain_job_end(job: SlurmJob, explanation: Explanation, run: RunDir) -> Explanation:
    """Returns the explanation of an attempt whose Slurm job has ended: what the ranks report follows from that."""
    summary = f"job {job.job_id} of Slurm, which gave the nodes, was cancelled or has ended ({job.state})"
    fix = f"nothing is broken: a new job, as by salloc, then {resume_command(run)}"
    return Explanation(JOB_OVER, confidence=1.0, step=explanation.step, summary=summary, fix=fix)


def explain_end_without_host(explanation: Explanation, run: RunDir, abilities: Abilities) -> Explanation:
    """Returns the explanation of a lost host where the run does not wait for it."""
    fix = f"{explanation.fix.partition(REJOINS)[0]}; then {next_command(run)}"
    if not abilities.too_few_hosts:
        return replace(explanation, fix=fix)
    others = f"--min-hosts {len(abilities.hosts_left)}, and --hosts without {', '.join(abilities.lost_hosts)}"
    summary = f"{explanation.summary}; {abilities.too_few_hosts}"
    return replace(explanation, summary=summary, fix=f"{fix}; or on the others alone, with {others}")


def note_problem(run: RunDir, text: str) -> None:
    """Writes a line about preemption notices to events.jsonl, where the digest finds it; a folder that is gone stops nothing."""
    with suppress(PacelineError, OSError):
        append_event(run, "note", text=text)


def run_one_attempt(job: Job, number: int, signals: StopSignals) -> tuple[Outcome, AttemptEnd | None]:
    """Makes one attempt; returns its outcome and, if it failed and could be explained, how and why it ended.

    If the explanation itself fails, a line on the screen says so, and the failure is then shown unexplained.
    """
    started, num_kills_before = time.monotonic(), oom_kills()
    try:
        outcome = job.attempt(number, signals)
    except OSError as error:  # from writing logs/ and plan.json; a full disk in a worker is a failure of that worker
        if error.errno not in NO_SPACE:
            raise
        raise PacelineError(
            f"attempt {number} could not start: no space in {job.run.path}",
            fix=f"make room in its file system (df -h), then: {resume_command(job.run)}",
        ) from error
    seconds = time.monotonic() - started
    if outcome.state != "failed":
        return outcome, None
    num_kills = oom_kills()
    try:
        explanation = explain_run(job.run, attempt=number)
    except PacelineError as error:  # logs that cannot be read
        explanation = Explanation(UNKNOWN, summary=error.message, fix=error.fix)
    except Exception as error:  # a bug of paceline's must not hide the failure of the run
        text = f"the failure could not be explained ({type(error).__name__}: {error})"
        append_event(job.run, "note", text=f"attempt {number}: {text}")
        job.show([f"no further attempt: {text}"])
        return outcome, None
    ran_out, root = None, outcome.failures[0]
    attempts = [event for event in read_json_lines(job.run.events) if event.get("event") == "attempt"]
    is_here = root.host is None or root.host == attempts[-1].get("head")
    if is_here and num_kills is not None and num_kills_before is not None:
        ran_out = num_kills > num_kills_before
    end, explanation = explain_end(
        job.run, number, root, explanation, memory_ran_out=ran_out, free_bytes=outcome.free_bytes
    )
    if job.made_progress(outcome, seconds=seconds):
        end = replace(end, new_checkpoint=True)
    return replace(outcome, explanation=explanation), end


def record_lost_supervisor(job: Job) -> None:
    """Writes the verdict on an attempt whose supervisor was killed and could not write it. Its workers have saved and ended."""
    events = [e for e in read_json_lines(job.run.events) if e.get("event") in ("attempt", "attempt_ended")]
    if not events or events[-1]["event"] == "attempt_ended":
        return
    attempt, head = events[-1]["attempt"], events[-1].get("head")
    summary, fix = lost_supervisor_texts(attempt, head)
    record_verdict(job, attempt, Explanation(SUPERVISOR_LOST, host=head, confidence=1.0, summary=summary, fix=fix))
    job.show([f"attempt {attempt}: {summary}"])


def record_verdict(job: Job, attempt: int, explanation: Explanation) -> None:
    """Writes why an attempt failed to events.jsonl."""
    names = ("cause", "rank", "step", "confidence", "summary", "fix", *(["host"] if explanation.host else []))
    append_event(job.run, "verdict", attempt=attempt, **{name: getattr(explanation, name) for name in names})


def record_decision(job: Job, end: AttemptEnd, decision: Decision, explanation: Explanation, attempt: int) -> None:
    """Writes the decision to events.jsonl and prints it; the failure too, unless the closing lines will show it."""
    facts = {"action": decision.action, "why": decision.why, "wait_s": decision.wait_s}
    append_event(job.run, "decision", attempt=attempt, **facts, cause=end.cause, rank=end.rank)
    if decision.action == "stop":
        job.show([f"no further attempt: {decision.why}"])
    else:
        step = saved_step(job.run.checkpoints)
        start = f" from step {step:,}" if step else ""
        wait = f" in {decision.wait_s:.0f} s" if decision.wait_s else " now"
        if decision.action == "await-hosts":
            wait = f" once they are back, within {AWAIT_S / 60:.0f} min"
        failed = f"attempt {attempt} failed: {format_summary(explanation)}"
        # nobody does it meanwhile
        fix = [f"  fix: {explanation.fix}"] if decision.action in ("fewer-ranks", "await-hosts") else []
        job.show([failed, *fix, f"attempt {attempt + 1}{wait}{start}: {decision.why}"])


def format_explained(outcome: Outcome, run: RunDir) -> str:
    """Returns the closing lines of a failed run: the failed rank's output, then the cause and the fix."""
    failure, explanation = format_failure(outcome, run), outcome.explanation
    if explanation is None or outcome.failures[0].fix is not None:
        return failure  # the rank itself reported cause and fix
    if explanation.cause not in {UNKNOWN, *load_catalogue().causes}:  # only the supervisor knows it
        return f"{failure}\n\n{explanation.cause}: {format_summary(explanation)}\n  fix: {explanation.fix}"
    return f"{failure}\n\n{format_explanation(explanation)}"


def format_failure(outcome: Outcome, run: RunDir) -> str:
    """Returns which rank failed, its output and its log. A mistake that the user can fix takes two lines and no traceback."""
    root, *others = outcome.failures
    log = run.launch_log(outcome.attempt)
    what = f"failed: {root.message}"
    if root.cause == HANG:
        what = "hung" if outcome.explanation else f"hung: {root.message}"  # the explanation has the sentence
        if root.rank is None:
            return f"{root.subject} {what}\nstacks: {run.hang(outcome.attempt)}"
    if root.rank is not None:
        log = run.rank_log(outcome.attempt, root.rank)
    elif root.host and run.launch_log(outcome.attempt, root.host).exists():
        log = run.launch_log(outcome.attempt, root.host)
    if root.fix is not None:
        return f"{root.subject} failed, log: {log}\nerror: {root.message}\n  fix: {root.fix}"
    lines = [f"{root.subject} {what}"]
    for failure in others:
        verb = "ended after it" if failure.consequence else "failed too"
        lines.append(f"{failure.subject} {verb}: {one_line(failure.message, MESSAGE_CHARS)}")
    output = root.traceback.splitlines()[-TRACEBACK_LINES:] if root.traceback else read_log_tail(log)[-LOG_LINES:]
    output = [line for line in output if not line.startswith("Extension modules: ")]  # faulthandler's, of any length
    return "\n".join([*lines, *(["", *output, ""] if output else []), f"log: {log}"])
