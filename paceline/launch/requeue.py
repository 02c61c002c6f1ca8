"""
A run inside a Slurm job: noticed when its time is nearly over or another job takes its nodes, and requeued when it has saved.

Slurm warns the batch script by the SIGUSR1 of --signal=B:USR1@120. A job that is preempted, or was submitted without --signal, is
not warned: so this process asks Slurm for its own job now and then, and warns itself. A job that was requeued starts its script
again; the training in it is known by slurm.json in the run folder, and continues.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Literal

from paceline.errors import PacelineError
from paceline.launch.failure import HOST_LOST
from paceline.launch.stop_signals import StopSignals
from paceline.launch.supervisor import Outcome
from paceline.rundir import (
    RunDir,
    append_event,
    is_locked,
    is_queued,
    job_facts,
    read_json_lines,
    resume_command,
    utc_now,
    write_atomic,
)
from paceline.slurm import (
    Allocation,
    JobId,
    SlurmError,
    SlurmJob,
    allocation,
    ask,
    format_allocation,
    parse_job_id,
    read_job,
)
from paceline.watch.events import end_state

POLL_S = 10.0
WARN_S = 120.0  # before the end of the job's limit, where Slurm itself has not warned
WARN_SHARE = 0.1  # of a short limit


@contextmanager
def job_watch(signals: StopSignals) -> Iterator[None]:
    """Warns this process by SIGUSR1, once, before its Slurm job ends; does nothing outside of Slurm.

    Within the block and after it the signal ends nothing: Slurm may repeat its warning while the job is requeued.
    """
    place, is_over = allocation(), threading.Event()
    if place is None:
        yield
        return
    signal.signal(signal.SIGUSR1, signals.add)
    threading.Thread(target=watch_job, args=(place.job_id, is_over), daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def watch_job(job_id: JobId, is_over: threading.Event) -> None:
    """Asks for the job every POLL_S until `is_over`, or until this process was warned."""
    while not is_over.wait(POLL_S):
        with suppress(PacelineError):  # Slurm is busy, or restarts
            job = read_job(job_id)
            if job and is_ending(job, now=time.time()) and not is_over.is_set():
                os.kill(os.getpid(), signal.SIGUSR1)
                return


def is_ending(job: SlurmJob, *, now: float) -> bool:
    """Whether a job that runs has to save now."""
    if job.state != "RUNNING":
        return False
    return job.is_preempted or (job.end is not None and job.end - now < min(WARN_S, WARN_SHARE * job.limit_s))


def requeue_reason(outcome: Outcome, first_signal: str | None, job: SlurmJob | None) -> str | None:
    """Returns why the job is to run again; None where it is over, was stopped by its user, or failed for good."""
    if job is None or not (job.is_batch and job.can_requeue and job.state == "RUNNING"):
        return None  # it was cancelled or requeued by Slurm, or nobody may
    if outcome.state == "failed" and not first_signal:
        explanation = outcome.explanation
        return f"lost host {explanation.host}" if explanation and explanation.cause == HOST_LOST else None
    if outcome.state != "interrupted" or first_signal == "SIGINT":
        return None
    if job.is_preempted:
        return "preempted by another job"
    return "its time was nearly over" if first_signal == "SIGUSR1" else None


def has_progressed(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether this job or the one before it has made a newer checkpoint: else the jobs of the run are too short for one."""
    steps: list[int] = [0, 0]  # the newest checkpoint at the start, at each requeue, and now
    for event in events:
        if event.get("event") == "checkpoint":
            steps[-1] = max(steps[-1], event["step"])
        elif event.get("event") == "set_aside":  # back to an older checkpoint, by --step
            steps = [event["step"], event["step"]]
        elif event.get("event") == "requeued":
            steps.append(steps[-1])
    return len(steps) == 2 or steps[-1] > steps[-3]


def decide_requeue(run: RunDir, outcome: Outcome, signals: StopSignals) -> tuple[str | None, list[str]]:
    """Returns why the Slurm job of this process is to run again, None where it is not, and what to print about it.

    Call it while the run is locked: its event then keeps others from resuming the run before requeue_job.
    """
    place = allocation()
    if place is None or outcome.state == "finished":
        return None, []
    try:
        job = read_job(place.job_id)
    except SlurmError as error:
        return None, not_requeued(run, place, error.message, error.fix)
    # an administrator's `scontrol requeue`, or a preemption that gave no notice
    if job and job.restarts > place.restarts:
        append_event(run, "requeued", job_id=place.job_id, why="by Slurm")
        return None, [format_requeued(place, "by Slurm")]
    reason = requeue_reason(outcome, signals.first, job)
    if reason is None:
        return None, []
    if not has_progressed(list(read_json_lines(run.events))):
        fix = f"a longer --time, or a smaller --save-every, then {resume_command(run)}"
        return None, not_requeued(run, place, "two in a row ended without a new checkpoint", fix)
    append_event(run, "requeued", job_id=place.job_id, why=reason)
    return reason, []


def requeue_job(run: RunDir, reason: str) -> list[str]:
    """Requeues the Slurm job of this process, which Slurm then ends; returns what to print."""
    place = allocation()
    assert place
    try:
        ask("scontrol", "requeue", str(place.job_id))
    except SlurmError as error:
        return [*not_requeued(run, place, error.message, error.fix), f"next    {resume_command(run)}"]
    return [format_requeued(place, reason)]


def format_requeued(place: Allocation, reason: str) -> str:
    return f"requeued: job {place.job_id} continues the run when Slurm starts it again ({reason})"


def not_requeued(run: RunDir, place: Allocation, why: str, fix: str) -> list[str]:
    """Writes why a job is not requeued, and returns the lines that say so."""
    text = f"job {place.job_id} is not requeued: {why}"
    append_event(run, "note", text=text)
    return [text, f"  fix: {fix}"]


def record_job(run: RunDir, job_id: JobId, **facts: Any) -> None:
    """Writes which Slurm job has the run; facts that were written before stay: the submitter and the job both write."""
    write_atomic(run.slurm_json, json.dumps({**job_facts(run), "job_id": job_id, "time": utc_now(), **facts}) + "\n")


def job_of(run: RunDir) -> JobId | None:
    """Returns the Slurm job that had the run last."""
    return parse_job_id(job_facts(run).get("job_id"))


def find_start(run: RunDir) -> Literal["new", "submitted", "continues"]:
    """Returns what `train` finds in its folder: nothing of this job's, what a submission left, or the run that the job has begun.

    The job may start before its submitter has written slurm.json; check_free knows that no other job has the run.
    """
    place = allocation()
    if place is None:
        return "new"
    if is_queued(run):
        return "submitted"
    return "continues" if job_of(run) == place.job_id and run.config_toml.is_file() else "new"


def has_ended(run: RunDir) -> bool:
    """Whether the run itself has ended, though the job that had it goes on with something else."""
    return not is_locked(run) and end_state(read_json_lines(run.events)) in ("finished", "stopped", "failed")


def announce_job(place: Allocation | None, *, last_job: JobId | None = None) -> None:
    """Prints which job of Slurm the run is in. A warning that comes before the first attempt ends this process with a reason.

    last_job: the one that had the run before. Outside of Slurm a line says that the run continues there.
    """
    if place is None:
        if last_job is not None:
            text = f"the run was in job {last_job}, and continues outside of Slurm; --slurm makes it a job again"
            print(f"slurm   {text}", flush=True)
        return
    signal.signal(signal.SIGUSR1, end_early)
    print(format_allocation(place, current_job()), flush=True)


def current_job() -> SlurmJob | None:
    """Returns the Slurm job that this process is in; None outside of Slurm, and where Slurm does not answer."""
    place = allocation()
    with suppress(SlurmError):
        return read_job(place.job_id) if place else None
    return None


def current_job_end() -> SlurmJob | None:
    """Returns the Slurm job that this process is in where it has ended, or is about to; else None."""
    job = current_job()
    return job if job and (job.is_over or job.state == "COMPLETING") else None


def end_early(signum: int, frame: FrameType | None) -> None:
    """Is the signal handler until the attempts begin: nothing is there to save, and the next job would come no further."""
    raise PacelineError(
        "the time of the Slurm job is nearly over, and no attempt has begun",
        fix="a longer --time; or prepare the text before: paceline data prepare, with the same config",
    )


def check_free(run: RunDir) -> Allocation | None:
    """Returns the allocation of this process. Raises PacelineError where another job of Slurm has the run, or may start it."""
    place, job_id = allocation(), job_of(run)
    if job_id is None or (place and place.job_id == job_id):
        return place
    job = None
    with suppress(SlurmError):  # another machine, without Slurm: the lock alone says who holds the run
        job = read_job(job_id)
    if job and job.is_batch and not job.is_over and not has_ended(run):
        raise PacelineError(
            f"{run.name} is in Slurm's job {job_id}, {job.text}", fix=f"paceline stop {run.quoted} ends it"
        )
    return place
