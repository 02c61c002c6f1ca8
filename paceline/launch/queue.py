"""
A run in Slurm's queue, seen from outside: followed until it has ended, stopped with a checkpoint, and how its job ended.

Ctrl-C ends the following alone. What a job ended of (OUT_OF_MEMORY, TIMEOUT, NODE_FAIL, ...) becomes an event of the run, once, as
Slurm forgets its jobs.
"""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import INTERRUPTED, PacelineError, TrainingFailed
from paceline.launch.requeue import job_of
from paceline.rundir import RunDir, append_event, read_json_lines
from paceline.slurm import ENDED, JobId, SlurmError, SlurmJob, ask, format_job, read_job
from paceline.watch.status import run_status

POLL_S = 2.0  # squeue is not asked faster
LOOK_S = 0.3  # at the log
STOP_POLL_S = 0.5


class LogFollower:
    """Prints what is new in the log of a job."""

    def __init__(self, path: Path):
        self.path, self.place = path, path.stat().st_size if path.exists() else 0

    def poll(self) -> None:
        with suppress(FileNotFoundError), self.path.open("rb") as log:
            log.seek(self.place)
            chunk = log.read()
            chunk = chunk[: chunk.rfind(b"\n") + 1]
            self.place += len(chunk)
            sys.stdout.write(chunk.decode(errors="replace"))
            sys.stdout.flush()


def follow_job(run: RunDir, job_id: JobId) -> int:
    """Prints the state of a job in the queue and the log of its run until it has ended; returns the exit code of the run.

    Ctrl-C or SIGTERM ends the following alone, with the exit code of a command that was interrupted.
    """
    log = LogFollower(run.path / f"slurm-{job_id}.log")
    shown, asked_at, job = "", 0.0, None
    try:
        while True:
            if time.monotonic() - asked_at > POLL_S:
                asked_at = time.monotonic()
                current, has_ended = poll_job(job_id)
                job = current if current or has_ended else job
                if has_ended:
                    break
                if job and job.text != shown:
                    log.poll()
                    shown = job.text
                    print(f"slurm   {format_job(job)}", flush=True)
            log.poll()
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        print(f"\ndetached: job {job_id} continues\n{format_next_commands(run)}", flush=True)
        return INTERRUPTED
    time.sleep(LOOK_S)  # for a file system that shows the last lines late
    log.poll()
    state = record_job_end(run) or (job.state if job else "n/a")
    end = run_status(run).state
    # Slurm reports a stop on request, exit code 130, as FAILED
    print(f"slurm   job {job_id} {state}" + ": the run was stopped" * (end == "stopped"), flush=True)
    return {"finished": 0, "stopped": INTERRUPTED}.get(end, TrainingFailed.exit_code)


def format_next_commands(run: RunDir) -> str:
    return f"next    paceline watch {run.quoted}\n        paceline stop {run.quoted}"


def active_job(run: RunDir) -> SlurmJob | None:
    """Returns the job of Slurm that has the run, if it waits or runs."""
    job_id = job_of(run)
    if job_id is None:
        return None
    job, has_ended = poll_job(job_id)
    return None if has_ended else job


def poll_job(job_id: JobId) -> tuple[SlurmJob | None, bool]:
    """Returns a job, and whether it has ended; None and False where Slurm does not answer, as while slurmctld restarts."""
    with suppress(SlurmError):
        job = read_job(job_id)
        return job, job is None or job.is_over
    return None, False


def stop_job(run: RunDir, job: SlurmJob, *, now: bool) -> None:
    """Ends a run in Slurm with a checkpoint and without a requeue, and waits for its end. now: without a checkpoint."""
    job_id = str(job.job_id)
    try:
        if now or job.state != "RUNNING":  # what waits has nothing to save
            ask("scancel", job_id)
        else:
            ask("scancel", "--signal=INT", "--batch", job_id)
    except SlurmError as error:
        raise PacelineError(error.message, fix=f"scancel {job_id}") from error
    while not poll_job(job.job_id)[1]:
        time.sleep(STOP_POLL_S)
    record_job_end(run)


def record_job_end(run: RunDir) -> str | None:
    """Writes how the run's last job of Slurm ended to events.jsonl, unless it is known or the job goes on; returns its state."""
    job_id = job_of(run)
    if job_id is None:
        return None
    job, has_ended = poll_job(job_id)
    if job is not None and not has_ended:
        return None
    state, source = (job.state, "scontrol show job") if job else (accounted_state(job_id), "sacct")
    if not state:
        return None
    events = list(read_json_lines(run.events))
    if not any(event.get("event") == "slurm_job" and event.get("job_id") == job_id for event in events):
        attempt = attempt_of_job(events, job_id)
        facts = {"exit_code": job.exit_code, "nodes": job.nodes, "limit_s": job.limit_s} if job else {}
        known = {name: value for name, value in facts.items() if value not in (None, "", float("inf"))}
        append_event(
            run,
            "slurm_job",
            job_id=job_id,
            state=state,
            source=source,
            **({"attempt": attempt} if attempt else {}),
            **known,
        )
    return state


def attempt_of_job(events: Sequence[Mapping[str, Any]], job_id: JobId) -> int | None:
    """Returns the last attempt of a job; None where it ended before it began or continued its run."""
    attempt = None
    for event in events:
        if event.get("event") in ("submitted", "requeued") and event.get("job_id") == job_id:
            attempt = None
        elif event.get("event") == "attempt":
            attempt = event["attempt"]
    return attempt


def record_job_ends(names: Sequence[str], *, runs_dir: str) -> None:
    """record_job_end for each of these that is a run: a path, or a name in runs_dir."""
    for name in names:
        for run in {RunDir(Path(name)), RunDir(Path(runs_dir) / name)}:
            if run.slurm_json.is_file():
                with suppress(PacelineError):  # somebody else's run, which this user cannot write
                    record_job_end(run)


def accounted_state(job_id: JobId) -> str | None:
    """Returns how a job ended, as sacct knows it for months; None where the cluster keeps no accounts."""
    with suppress(SlurmError):
        options = ("--allocations", "--noheader", "--parsable2", "--format=State")
        return parse_accounted(ask("sacct", f"--jobs={job_id}", *options))
    return None


def parse_accounted(text: str) -> str | None:
    """Returns the state of the last line of sacct: `CANCELLED by 1000` is CANCELLED."""
    states = [match[0] for line in text.splitlines() if (match := re.match(r"[A-Z_]+", line.strip()))]
    return states[-1] if states and states[-1] in ENDED else None
