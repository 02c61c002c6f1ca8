"""
A run without its terminal: `--detach` lets the supervisor go on in the background, `paceline stop` finds it and ends it.

The lock of the run folder names the supervisor's process and host. A stop is what Ctrl-C is in the terminal of the run: the first
signal saves a checkpoint and ends, the second ends at once. Only the ranks of a script get another signal (launch/supervisor.py).
What may stand in the folder of a new run is decided here too, how `resume` takes a folder, and which other runs share its cores.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, TrainingFailed
from paceline.explain.explanation import format_summary
from paceline.file_systems import LOCK_WAIT_S
from paceline.launch.hosts import HostEntry, is_this_host, parse_hosts
from paceline.launch.queue import active_job, format_next_commands, stop_job
from paceline.launch.ssh import agent_note
from paceline.launch.stacks import GONE, process_state
from paceline.launch.stop_signals import request_stop
from paceline.model.manifest import (
    clean_leftovers,
    free_name,
    list_checkpoints,
    step_folders,
    step_of,
    verified_checkpoint,
)
from paceline.plan.planner import Plan
from paceline.run_options import StopOptions
from paceline.rundir import (
    RunDir,
    RunInUse,
    append_whole,
    find_run,
    holder_of,
    is_queued,
    is_script_run,
    lock_run,
    read_config,
    read_json_lines,
    resume_command,
    unwritable_run,
    utc_now,
    write_holder,
)
from paceline.typed_fields import read_run_file
from paceline.units import format_list
from paceline.watch.status import run_folders, run_status

POLL_S, LOCK_POLL_S = 0.1, 0.2
SUPERVISOR_LOG = "supervisor.log"


def detach(run: RunDir, lock: int, *, destinations: Sequence[str] = ()) -> bool:
    """Continues in a process of its own, without the terminal; returns whether this is the process that has done its part.

    Call it before anything else is started: what this process has started is not the child's of the other one. destinations: the
    hosts that it reaches by ssh.
    """
    if note := agent_note(destinations):
        print(note)
    path = run.path / "logs" / SUPERVISOR_LOG
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        print(f"detached: process {pid}, output in {path}")
        print(format_next_commands(run), flush=True)
        return True
    os.setsid()  # a terminal that closes reaches it no more
    with path.open("ab") as log, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    write_holder(lock)
    return False


def check_unused(run: RunDir, *, fix: str, is_submitted: bool = False) -> None:
    """Raises PacelineError where the folder holds something. fix: for a folder that is a run.

    is_submitted: it holds what the submission of a Slurm job has left.
    """
    # a killed preparation has left the first three, perhaps with a half of its next version
    remains = (run.lock.name, run.preparing_json.name, run.notes.name) + (
        ("slurm", "submitted", "events") if is_submitted else ()
    )
    if run.path.exists() and not (
        run.path.is_dir() and all(path.name.startswith(remains) for path in run.path.iterdir())
    ):
        has_begun = run.config_toml.is_file()
        text = f"{run.path} already exists" + ("" if has_begun else " and is not a run")
        raise PacelineError(text, fix=fix if has_begun else "another --name")


def create_folder(run: RunDir, *, is_named: bool) -> RunDir:
    """Creates the folder of a new run and returns the run.

    A run that the user did not name gets a number where another command has taken the same name at the same time.
    """
    path, number = run.path, 1
    while True:
        try:
            run.path.mkdir(parents=True, exist_ok=is_named)
        except FileExistsError:
            if is_named or not run.path.exists():
                raise
            number += 1
            run = RunDir(path.with_name(f"{path.name}-{number}"))
        else:
            return run


def neighbour_notes(run: RunDir, plan: Plan) -> list[str]:
    """Returns a line where other runs of the same folder use the same hosts' cores; of a GPU the checks show who uses it."""
    if plan.device != "cpu":
        return []
    names, own, shared = list[str](), hosts_used(run), set[str]()
    folders = set(map(os.path.realpath, run_folders(run.path.parent)))  # a link to a run is no run of its own
    for other in (RunDir(Path(path)) for path in sorted(folders - {os.path.realpath(run.path)})):
        if (holder_of(other) or "").endswith(f" {socket.gethostname()}"):
            with suppress(PacelineError):  # it is damaged, or has no plan yet
                device = read_config(other).get("device") if is_script_run(other) else planned_device(other)
                if device == "cpu" and (common := own & hosts_used(other)):
                    names.append(other.name)
                    shared |= common
    are = f"{format_list(names, limit=3)} {'runs' if len(names) == 1 else 'run'}"
    cores = f"the cores of {format_list(sorted(shared), limit=3)}"
    return [f"note    {are} on {cores} too: all of them are slower than planned"] if names else []


def hosts_used(run: RunDir) -> set[str]:
    """Returns the hosts that a run names; raises PacelineError where its list is damaged."""
    text = read_config(run).get("hosts")
    entries = parse_hosts(str(text)) if text and not str(text).isdecimal() else [HostEntry("localhost")]
    return {"this host" if is_this_host(entry) else entry.host for entry in entries}


def planned_device(run: RunDir) -> str:
    """Returns the device of a training run; raises PacelineError where its plan is missing or damaged."""
    return read_run_file(run.plan_json, lambda text: str(json.loads(text)["device"]))


def answer_stop(options: StopOptions) -> int:
    """Ends the run that the options name, and prints how it ended; returns the exit code: that of a failed run if it failed."""
    result = stop_run(find_run(options.run, runs_dir=options.runs_dir), now=options.now)
    print(json.dumps(result, indent=1) if options.json else format_stop(result))
    return TrainingFailed.exit_code if result["state"] == "failed" else 0


def stop_run(run: RunDir, *, now: bool) -> dict[str, Any]:
    """Ends a run that a supervisor on this host holds, and returns how it ended. now: without a checkpoint.

    Raises PacelineError where the run has no supervisor here.
    """
    job = active_job(run)
    if job and job.is_batch:  # a shell of salloc is no part of the run, and has others in it
        request_stop(run, now=now)
        stop_job(run, job, now=now)
        state = state_of(run)
        if is_queued(run):  # nothing has run
            shutil.rmtree(run.path)
            state = {"state": "cancelled", "checkpoint_step": None}
        return {"run": str(run.path), "job_id": job.job_id, **state}
    holder = holder_of(run)
    if holder is None:
        raise not_running(run)
    word, _, host = holder.partition(" ")
    if host and host != socket.gethostname():
        raise PacelineError(
            f"{run.name} is run by process {word} on {host}", fix=f"on {host}: paceline stop {run.name}"
        )
    pid = int(word) if word.isdigit() else 0
    if not holds(pid, run):
        raise PacelineError(
            f"process {word or 'n/a'}, which ran {run.name}, has ended; its ranks save and end by themselves",
            fix="wait half a minute; paceline watch shows the run",
        )
    if not now:
        check_saves(run)
    request_stop(run, now=now)
    try:
        os.kill(pid, signal.SIGINT)
    except PermissionError as error:
        raise PacelineError(f"process {pid} is another user's", fix=f"sudo paceline stop {run.quoted}") from error
    if not now:
        work = "SIGTERM sent, waiting for the script to end" if is_script_run(run) else "saving a checkpoint"
        print(f"stopping: {work}; paceline stop {run.quoted} --now ends it at once", file=sys.stderr, flush=True)
    while holder_of(run) == holder:
        time.sleep(POLL_S)
    return {"run": str(run.path), "pid": pid, **state_of(run)}


def check_saves(run: RunDir) -> None:
    """Raises PacelineError where the last save failed, so that a stop would lose work. It saves when there is room."""
    saves = [e for e in read_json_lines(run.events) if e.get("event") in ("attempt", "checkpoint", "save_failed")]
    if not saves or saves[-1]["event"] != "save_failed":
        return
    steps = [manifest.step for _, manifest in list_checkpoints(run.checkpoints, skip_unreadable=True)]
    since = f"the steps since its checkpoint at step {max(steps):,}" if steps else "its work: it has no checkpoint"
    host = saves[-1].get("host")
    raise PacelineError(
        f"{run.name} cannot save: {saves[-1].get('message')}",
        fix=f"free some space{f' on {host}' if host else ''}: it then saves within seconds, and the same command ends it;"
        f" paceline stop {run.quoted} --now ends it without {since}",
    )


def not_running(run: RunDir) -> PacelineError:
    """Returns the error for a run that nothing holds."""
    end = ": it has finished" if run_status(run).state == "finished" else ""
    return PacelineError(f"{run.name} is not running{end}", fix=continuing_fix(run))


def continuing_fix(run: RunDir) -> str:
    """Returns the command that continues a run; where none does, the one that shows it or lists the others."""
    if is_queued(run):
        return "the command that submitted it does so again"
    if holder_of(run) is not None:
        return f"paceline watch {run.quoted} shows it: it is running"
    status = run_status(run)
    if status.state != "finished":
        return f"{resume_command(run)} {'starts it again' if is_script_run(run) else 'continues it'}"
    if is_script_run(run) or not status.num_steps:
        return f"paceline runs {shlex.quote(str(run.path.parent))} shows which runs are running"
    return f"{resume_command(run)} --num-steps {2 * status.num_steps} continues it"


def state_of(run: RunDir) -> dict[str, Any]:
    """Returns the state of a run that was stopped, the step of its newest checkpoint, and a message where ranks were killed."""
    steps = [manifest.step for _, manifest in list_checkpoints(run.checkpoints, skip_unreadable=True)]
    state = run_status(run).state if run.config_toml.is_file() else "stopped"
    ends = [event for event in read_json_lines(run.events) if event.get("event") == "attempt_ended"]
    message = ends[-1].get("message") if ends else None
    if state == "failed" and (
        reasons := [event for event in read_json_lines(run.events) if event.get("event") == "verdict"]
    ):
        message = f"{reasons[-1]['cause']}: {format_summary(reasons[-1])}"
    return {"state": state, "checkpoint_step": max(steps, default=None), **({"message": message} if message else {})}


def holds(pid: int, run: RunDir) -> bool:
    """Whether a process has the run's lock open: a process id alone may be another program's by now. True where that is hidden."""
    try:
        return any(os.path.samefile(fd, run.lock) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.exists())  # noqa: PTH121
    except PermissionError:
        return True
    except OSError:
        return False


def format_stop(result: dict[str, Any]) -> str:
    """Returns how the run ended, and the command that continues it; what a script has saved is not known."""
    if result["state"] == "cancelled":
        return f"cancelled: job {result['job_id']}, before {result['run']} began"
    step = result["checkpoint_step"]
    saved = "no checkpoint" if step is None else f"checkpoint at step {step:,}"
    run = RunDir(Path(result["run"]))
    lines = [f"{result['state']}: {run.path}" + ("" if is_script_run(run) else f", {saved}")]
    lines += [f"note    {result['message']}"] if result.get("message") else []
    if result["state"] != "finished":
        lines.append(f"next    {resume_command(run)}")
    return "\n".join(lines)


def adopt_copy(run: RunDir) -> None:
    """Makes the copy of a run that another machine's supervisor left here a run of its own, with its history. Raises RunInUse."""
    history = run.path / "history"
    if not history.is_dir():
        return
    lock = wait_for_lock(run)  # as long as that run goes on, the copy is its own
    try:
        for path in history.glob("*.jsonl"):
            path.replace(run.path / path.name)
        with suppress(OSError):
            history.rmdir()
    finally:
        os.close(lock)


def wait_for_lock(run: RunDir) -> int:
    """Locks the run. Where its supervisor is dead and its workers are still saving, waits for them. Raises RunInUse."""
    deadline, announced = time.monotonic() + LOCK_WAIT_S, False
    while True:
        try:
            return lock_run(run)
        except RunInUse as error:
            if error.pid is None or process_state(error.pid) not in GONE or time.monotonic() > deadline:
                raise
        except OSError as error:
            raise unwritable_run(run, error) from error
        if not announced:
            print(f"waiting for the workers of {run.name}'s last attempt to end", flush=True)
            announced = True
        time.sleep(LOCK_POLL_S)


def go_back(run: RunDir, step: int) -> None:
    """Sets aside the checkpoints after a step, so that the run goes on from it, and prints a line about it. Needs the lock.

    What `paceline eval` measured of them is no longer the run's: its readers compare its time with that of the event, which is
    therefore written first. Where it is killed between two renames, a second call sets aside what remains. Raises PacelineError
    where the checkpoint of the step is damaged, and on a full disk, before it has changed anything.
    """
    try:
        clean_leftovers(run.checkpoints)  # it may bring back a later checkpoint, whose replacement was killed
        verified_checkpoint(run, step)
        newer = [path for path in reversed(step_folders(run.checkpoints)) if step_of(path) > step]
        if not newer:
            return
        places = [free_name(path, "aside") for path in newer]
        names, folder = [path.name for path in places], shlex.quote(str(run.checkpoints))
        delete = f"to delete: rm -r {folder}/*.aside*"
        text = f"going back to step {step:,}, as --step asks; set aside in {folder}: {format_list(names)} ({delete})"
        event = {"time": utc_now(), "event": "set_aside", "step": step, "checkpoints": names, "text": text}
        append_whole(run.events, (json.dumps(event, ensure_ascii=False) + "\n").encode())
        for path, place in zip(newer, places, strict=True):
            path.rename(place)  # the newest last: until then a resume without --step goes on from it
    except OSError as error:
        raise unwritable_run(run, error) from error
    print(text, flush=True)
