"""
Is the run still getting on: no sign of life for longer than usual is a hang, and the rank that holds up the others is named.

The ranks of our trainer mark every step and what they do in it (train/progress.py). A script of the user's is only seen to write
lines and to use the processor. Whatever was learned is kept under RUN/hangs/<attempt>/; who is named, launch/supervisor.py ends.
Time in which nobody looked does not count: a suspended laptop, a stopped container or a paused supervisor is no hang, and
neither is a jump of the clock. A rank under a debugger is left alone.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.launch.culprit import Rank, find_culprits, tell
from paceline.launch.hang import STILL, process_state
from paceline.launch.processes import cpu_seconds, describe_process, rank_pids
from paceline.launch.recorder import ask_recorders, wait_for_dumps
from paceline.launch.signs import LONG, LogSigns, MarkSigns
from paceline.launch.stacks import main_frames, take_stacks
from paceline.rundir import RunDir, read_end, utc_now, write_atomic

HANG_AFTER_S = 60.0  # of silence within a step
SCRIPT_HANG_AFTER_S = 600.0  # of a script, which may say nothing for long
LOOK_EVERY_S = 0.5  # at processes, once silence lasts
UNSEEN_S = 1.0  # between two polls no more than this counts
SAMPLE_BYTES = 1 << 16  # of the end of health/<host>.jsonl: more than one line
ENDED = ("Z", None)  # states of a process


@dataclass(frozen=True)
class Hang:
    """rank: None where nothing tells the ranks apart. text: one sentence for the user."""

    rank: int | None
    silent_s: float
    phase: str | None
    step: int | None
    text: str
    evidence: tuple[str, ...] = ()  # files, relative to the run folder


class Watchdog:
    """poll() some times a second, from the start of an attempt; it returns a hang once, and then never again.

    hang_after_s: of silence within a step; None: the default. script: the ranks are not our trainer's.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        nproc: int,
        *,
        hang_after_s: float | None = None,
        script: bool = False,
        pids: Callable[[], dict[int, int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.run, self.attempt, self.nproc = run, attempt, nproc
        self.pids = pids or (lambda: rank_pids(run, attempt, nproc))
        default_s = SCRIPT_HANG_AFTER_S if script else HANG_AFTER_S
        self.floor_s = default_s if hang_after_s is None else hang_after_s
        self.signs: MarkSigns | LogSigns = (
            LogSigns(run, attempt, nproc, self.floor_s) if script else MarkSigns(run, nproc, self.floor_s)
        )
        self._clock, self._last = clock, clock()
        self._awake_s = self._since_s = self._looked_s = 0.0
        self._cpu: dict[int, float] = {}  # what each rank had used at _cpu_s, soon after the last sign of life
        self._cpu_s = 0.0
        self._stopped_s: float | None = None  # since when some process was seen to be stopped
        self._ended: set[int] = set()  # ranks; one that ends has got on
        self._found = False

    def poll(self) -> Hang | None:
        now = self._clock()
        self._awake_s += min(max(0.0, now - self._last), UNSEEN_S)
        self._last = now
        if self._found:
            return None
        if self.signs.changed(self._awake_s):
            self._since_s = self._looked_s = self._awake_s
            self._cpu, self._stopped_s = {}, None
            return None
        if self._awake_s - self._looked_s < LOOK_EVERY_S:
            return None
        self._looked_s = self._awake_s
        return self._look(self.pids(), silent_s=self._awake_s - self._since_s)

    def _look(self, pids: dict[int, int], *, silent_s: float) -> Hang | None:
        """At the processes, while there is no sign of life."""
        if not self._cpu:
            self._cpu, self._cpu_s = {rank: cpu_seconds(pid) for rank, pid in pids.items()}, self._awake_s
        states = {rank: process_state(pid) for rank, pid in pids.items()}
        if "T" not in states.values():
            self._stopped_s = None
        elif self._stopped_s is None:
            self._stopped_s = self._awake_s
        ended = {rank for rank, state in states.items() if state in ENDED}
        if "t" in states.values() or ended != self._ended:
            self._ended, self._since_s = ended, self._awake_s
            return None
        all_ended = len(ended) == len(states)  # or none has begun; the engine knows, unless it hangs itself
        if silent_s < self.floor_s * (LONG if all_ended else 1):
            return None
        cores = self._cores(pids)
        stopped = self._stopped_s is not None and self._awake_s - self._stopped_s >= self.floor_s
        if not stopped and silent_s < self.signs.allowed_s(cores):
            return None
        self._found = True
        return self._find(pids, states, cores, silent_s=silent_s)

    def _find(
        self, pids: dict[int, int], states: Mapping[int, str | None], cores: Mapping[int, float], *, silent_s: float
    ) -> Hang:
        asked = ask_recorders(self.run, self.attempt, [rank for rank in pids if states.get(rank) not in STILL])
        stacks = take_stacks(self.run, self.attempt, pids, own=self.signs.own)
        ranks = [
            Rank(
                rank,
                pids.get(rank),
                states.get(rank),
                self.signs.marks.get(rank),
                tuple(main_frames(stacks.get(rank, ""))),
                cores.get(rank, 0.0),
            )
            for rank in range(self.nproc)
        ]
        wait_for_dumps(asked)
        return self._name(ranks, stacks, silent_s=silent_s)

    def _cores(self, pids: Mapping[int, int]) -> dict[int, float]:
        """Of the processors, at work for each rank during the silence."""
        seconds = max(self._awake_s - self._cpu_s, LOOK_EVERY_S)
        return {
            rank: max(0.0, cpu_seconds(pid) - self._cpu[rank]) / seconds
            for rank, pid in pids.items()
            if rank in self._cpu
        }

    def _name(self, ranks: Sequence[Rank], stacks: Mapping[int, str], *, silent_s: float) -> Hang:
        culprits = find_culprits(ranks)
        told_apart = len(culprits) < len(ranks) or len(ranks) == 1
        mark = culprits[0].mark
        hang = Hang(
            rank=culprits[0].rank if told_apart else None,
            silent_s=round(silent_s, 1),
            phase=mark.phase if mark else None,
            step=mark.step if mark else None,
            text=tell(ranks, culprits, silent_s=silent_s),
        )
        return replace(hang, evidence=keep_evidence(self.run, self.attempt, hang, ranks, stacks))


def keep_evidence(
    run: RunDir, attempt: int, hang: Hang, ranks: Sequence[Rank], stacks: Mapping[int, str]
) -> tuple[str, ...]:
    """A file for each rank and hang.json; returns those that could be written."""
    folder = run.hang(attempt)
    texts = {f"{each.rank}.txt": describe_rank(each, stacks.get(each.rank)) for each in ranks}
    record = {"time": utc_now(), **asdict(hang), "ranks": [asdict(each) for each in ranks], "host": describe_host(run)}
    texts["hang.json"] = json.dumps({key: value for key, value in record.items() if key != "evidence"}, indent=1) + "\n"
    kept = []
    with suppress(OSError):  # a full disk must not keep the run from going on
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomic(folder / name, text)
            kept.append(str((folder / name).relative_to(run.path)))
    kept += [str(path.relative_to(run.path)) for path in run.recorded(attempt)]
    return tuple(kept)


def describe_rank(rank: Rank, stacks: str | None) -> str:
    mark = json.dumps(asdict(rank.mark)) if rank.mark else "none"
    known = describe_process(rank.pid) if rank.pid is not None and rank.state is not None else "gone"
    return (
        f"rank {rank.rank}, process {rank.pid or 'n/a'}\nmark: {mark}\nprocessors at work: {rank.cores:.2f}\n\n{known}\n\n"
        f"stacks, by {stacks or 'nobody: no tool could take them'}\n"
    )


def describe_host(run: RunDir) -> dict[str, Any]:
    """Load and memory, as /proc has them; and the last sample of health, the GPUs' too."""
    found: dict[str, Any] = {}
    for path in sorted(run.health_dir.glob("*.jsonl")):
        with suppress(ValueError, IndexError):
            found[path.stem] = json.loads(read_end(path, SAMPLE_BYTES)[0].splitlines()[-1])
    for name in ("loadavg", "meminfo"):
        with suppress(OSError):
            lines = Path("/proc", name).read_text().splitlines()
            found[name] = "; ".join(lines[:3])
    return found
