"""
A plan that fills most of a device, tried on it before the run: two steps (train/probe.py), and fewer rows where memory runs out.

Starts one process per rank as a run does, in a folder of its own under the cache. No torch.
"""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, TrainingFailed
from paceline.launch.failure import Failure
from paceline.launch.supervisor import run_attempt
from paceline.launch.watchdog import Watchdog
from paceline.plan.fit import divisors
from paceline.plan.kept import PROBE, MemoryRecord, keep_record, record_of
from paceline.plan.planner import Plan
from paceline.rundir import RunDir, read_json_lines
from paceline.terminal import waiting
from paceline.units import format_bytes

TRIED_FROM = 0.85  # of a device's memory: what is planned below has room for what arithmetic does not see
PROBE_COMMAND = (sys.executable, "-m", "paceline.train.probe")
STOP_GRACE_S = 1.0  # there is nothing to save
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|MemoryError|out of memory|allocate memory|not enough memory|bad_alloc|ALLOC_FAILED",
    re.IGNORECASE,
)

NO_PRIMITIVE = re.compile(r"could not (create|execute) a primitive( descriptor)?")  # oneDNN's only words for it


class ProbeFailed(PacelineError):
    """Something else than memory: the run would fail of it too."""

    exit_code = TrainingFailed.exit_code


@dataclass(frozen=True)
class Confirmed:
    """What passed. plan: with its rows. text: what was tried, in a line."""

    plan: Plan
    text: str


@dataclass(frozen=True)
class OutOfMemory:
    rank: int | None
    how: str


def wants_probe(plan: Plan) -> bool:
    """Rows that the user has set are the user's."""
    return plan.memory_share is not None and plan.memory_share >= TRIED_FROM


def confirm(
    plan: Plan, *, folder: Path, env: Mapping[str, str], libuv: bool, probe: tuple[str, ...] = PROBE_COMMAND
) -> Confirmed:
    """The plan with the most rows that pass, from those it has down; what they took is kept in `folder`, paceline's cache.

    Prints a line. Ctrl-C raises KeyboardInterrupt.
    """
    tries: list[str] = []
    share_rows = plan.device_batch_size * plan.grad_accum_steps
    with waiting("trying two steps") as on_try:
        for rows in (rows for rows in divisors(share_rows) if rows <= plan.device_batch_size):
            on_try(_rows(rows))
            tried = replace(plan, device_batch_size=rows, grad_accum_steps=share_rows // rows)
            found = try_once(tried, folder=folder, env=env, libuv=libuv, probe=probe)
            if not isinstance(found, OutOfMemory):
                break
            who = "" if found.rank is None else f" on rank {found.rank}"
            tries.append(f"{_rows(rows)} {'does' if rows == 1 else 'do'} not fit{who} ({found.how})")
        else:
            smaller = f"--depth {max(1, plan.model.n_layer - 1)}"
            fix = smaller if plan.activation_checkpointing else f"--activation-checkpointing, or {smaller}"
            raise PacelineError(f"probe: {'; '.join(tries)}", fix=fix)
    for record in found:
        keep_record(folder, record)
    text = f"probe: {'; '.join([*tries, kept_text(tried, found)])}"
    print(text, flush=True)
    return Confirmed(tried, text)


def kept_text(plan: Plan, records: tuple[MemoryRecord, ...]) -> str:
    """7 rows: 21.3 GiB of 31.8 GiB, kept"""
    sizes = [record.driver_bytes or record.reserved_bytes for record in records]
    took = max((size for size in sizes if size is not None), default=None)
    card = plan.memory.get("card_bytes")
    of_card = f" of {format_bytes(card)}" if card else ""
    return f"{_rows(plan.device_batch_size)}: {'n/a' if took is None else format_bytes(took)}{of_card}, kept"


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def try_once(
    plan: Plan, *, folder: Path, env: Mapping[str, str], libuv: bool, probe: tuple[str, ...]
) -> tuple[MemoryRecord, ...] | OutOfMemory:
    """Leaves its folder only where something else than memory went wrong, for its logs."""
    run = new_folder(folder)
    plan_json = run.path / "plan.json"
    plan_json.write_text(plan.to_json())
    failed = False
    try:
        outcome = run_attempt(
            run,
            command=[*probe, str(plan_json), str(run.path)],
            nproc=plan.world_size,
            attempt=1,
            env=env,
            lock_fd=None,
            on_tick=lambda: None,
            watchdog=Watchdog(run, 1, plan.world_size),
            stop_grace_s=STOP_GRACE_S,
            libuv=libuv,
        )
        if outcome.state == "interrupted":
            raise KeyboardInterrupt
        if outcome.state == "finished":
            return read_records(run, plan)
        hung = any(event.get("event") == "hang" for event in read_json_lines(run.events))
        for failure in outcome.failures:
            if not hung and (how := ran_out(failure, plan)):
                return OutOfMemory(failure.rank, how)
        failed = True
        raise said(run, outcome.failures[0])
    finally:
        if not failed:
            shutil.rmtree(run.path, ignore_errors=True)


def new_folder(folder: Path) -> RunDir:
    parent = folder / "probe"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return RunDir(Path(tempfile.mkdtemp(dir=parent)).resolve())
    except OSError as error:
        raise PacelineError(
            f"{parent} cannot be written: {error.strerror}", fix="--cache-dir DIR in a place you can write"
        ) from error


def ran_out(failure: Failure, plan: Plan) -> str | None:
    """How memory ran out, if it did. The kernel ends a process that takes a host's last memory, and tells it nothing."""
    if failure.consequence:
        return None
    if OUT_OF_MEMORY.search(failure.message):
        return "out of memory"
    if plan.device == "cpu" and (found := NO_PRIMITIVE.search(failure.message)):
        return f"{found[0]}, as where memory runs out"
    if plan.device == "cpu" and failure.signal == "SIGKILL":
        return "ended by SIGKILL, as the kernel does when memory runs out"
    return None


def said(run: RunDir, root: Failure) -> ProbeFailed:
    who = "the launch" if root.rank is None else f"rank {root.rank}"
    return ProbeFailed(
        f"two steps were tried before the run, and {who} failed: {root.message}",
        fix=root.fix or f"the logs tell more: {run.logs(1)}; --profile balanced starts without the trial",
    )


def read_records(run: RunDir, plan: Plan) -> tuple[MemoryRecord, ...]:
    """One for eager and compiled each, as far as they were tried."""
    ranks: list[list[dict[str, Any]]] = [
        json.loads((run.path / "probe" / f"{rank}.json").read_text()) for rank in range(plan.world_size)
    ]
    found = (
        record_of(replace(plan, compile=stage[0]["compiled"]), stage, source=PROBE)
        for stage in zip(*ranks, strict=True)
    )
    return tuple(record for record in found if record is not None)
