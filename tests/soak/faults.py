"""
The kinds of faults, which of them a seed chooses, and how they are distributed over runs. Pure: no process, no clock.

A fault strikes when one rank reaches one place of one step. Several faults strike one run, each in its own window of steps, with a
checkpoint between any two.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

INTERVAL = 4  # steps from one checkpoint to the next, and from one evaluation to the next
WINDOW = 2 * INTERVAL  # steps for each fault

RANKS = ("first", "middle", "last")
PHASES = ("start", "step", "save", "eval")
IN_STEP = ("load", "forward", "backward", "reduce", "update")


@dataclass(frozen=True)
class Kind:
    what: str  # for the table
    restarts: bool = True  # it ends the attempt
    inside: bool = False  # the rank does it itself (inside/sitecustomize.py)
    phases: tuple[str, ...] = PHASES


KINDS = {
    "sigkill": Kind("a rank killed (SIGKILL)"),
    "sigstop": Kind("a rank stopped (SIGSTOP)"),
    "sigsegv": Kind("a rank reads address 0", inside=True),
    "exception": Kind("a rank raises an exception", inside=True),
    "exit0": Kind("a rank exits with 0 too early", inside=True),
    "memory": Kind("memory runs out", inside=True),
    "disk": Kind("the disk is full for a while", restarts=False),
    "checkpoint": Kind("the newest checkpoint flipped or cut"),
    "port": Kind("the port is in use", inside=True, phases=("start",)),
    "agent": Kind("the launch agent or torch's agent killed"),
    "supervisor": Kind("the command itself killed, then resumed"),
    "slow": Kind("a rank is slow for a while", restarts=False, inside=True),
}


@dataclass(frozen=True)
class Fault:
    kind: str
    rank: str  # of RANKS: the one that it strikes, or that must reach the place first
    phase: str
    variant: int  # 0 or 1: a kind has two
    place: str  # the phase of the heartbeat at which it strikes
    delay_ms: int  # after that heartbeat
    offset: int  # of the step in its window

    @property
    def restarts(self) -> bool:
        """Whether the fault ends the attempt; damage to a checkpoint before it is read does not."""
        return KINDS[self.kind].restarts and (self.kind, self.phase) != ("checkpoint", "start")


@dataclass(frozen=True)
class Run:
    """One run and its faults, in the order in which they strike."""

    nproc: int
    faults: tuple[Fault, ...]

    def step(self, number: int) -> int | None:
        """Returns the number of completed steps at which fault `number` strikes; None: at the start of an attempt."""
        fault = self.faults[number]
        return None if fault.phase == "start" else WINDOW * (number + 1) + fault.offset

    def rank(self, number: int) -> int:
        return {"first": 0, "middle": self.nproc // 2, "last": self.nproc - 1}[self.faults[number].rank]


def num_steps(most_faults: int) -> int:
    """Returns the length of every run: all runs need the same learning rates to be compared."""
    return WINDOW * (most_faults + 1) + INTERVAL


def sample(seed: int, count: int, *, kinds: Sequence[str] = tuple(KINDS), ranks: Sequence[str] = RANKS) -> list[Fault]:
    """Returns faults of every kind in turn; for each kind all pairs of rank and phase come before one is repeated."""
    rng = random.Random(seed)
    first = {kind: rng.randrange(len(RANKS) * len(PHASES)) for kind in KINDS}
    faults = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        turn = first[kind] + number // len(kinds)
        phases = KINDS[kind].phases
        faults.append(make_fault(rng, kind, rank=ranks[turn % len(ranks)], phase=phases[turn % len(phases)], turn=turn))
    return faults


def make_fault(rng: random.Random, kind: str, *, rank: str, phase: str, turn: int) -> Fault:
    places = {"step": IN_STEP, "start": ("start",) if kind == "checkpoint" else ("start", "compile")}
    place = rng.choice(places.get(phase, (phase,)))
    offset = {"start": 0, "step": rng.randint(INTERVAL + 1, WINDOW - 1), "save": WINDOW, "eval": INTERVAL}[phase]
    delay_ms = rng.choice((0, 0, 3, 10, 30, 60))
    is_exact = kind in ("checkpoint", "disk") or KINDS[kind].inside  # the rank must still be at its place
    return Fault(kind, rank, phase, turn // 2 % 2, place, 0 if is_exact else delay_ms, offset)


def pack(faults: Sequence[Fault], *, seed: int, most: int, nprocs: Sequence[int] = (2, 3)) -> list[Run]:
    """Distributes the faults over as few runs as possible; a middle rank needs three ranks."""
    rng = random.Random(seed)
    open_runs: list[tuple[int, list[Fault]]] = [(nprocs[n % len(nprocs)], []) for n in range(-(-len(faults) // most))]
    for fault in sorted(faults, key=lambda fault: (hard_to_place(fault), rng.random())):
        wide = fault.rank == "middle"
        room = [
            run for run in open_runs if len(run[1]) < most and (run[0] > 2 or not wide) and ordered([*run[1], fault])
        ]
        if not room:
            room = [(3 if wide else nprocs[0], [])]
            open_runs += room
        min(room, key=lambda run: (len(run[1]), run[0] > 2 and not wide))[1].append(fault)
    runs = [Run(nproc, ordered(members) or ()) for nproc, members in open_runs if members]
    rng.shuffle(runs)
    return runs


def hard_to_place(fault: Fault) -> int:
    """Sorts first what a run can have only once; last the starts, which need a fault before them that ends an attempt."""
    return 0 if fault.kind in ("memory", "disk") else 2 if fault.phase == "start" else 1


def ordered(members: Sequence[Fault]) -> tuple[Fault, ...] | None:
    return next((order for order in permutations(members) if fits(order)), None)


def fits(order: Sequence[Fault]) -> bool:
    """Whether the faults can strike in this order: a start needs a restart before it, a damaged checkpoint one before it."""
    for number, fault in enumerate(order):
        before = order[number - 1] if number else None
        if fault.phase == "start" and before is not None and (not before.restarts or before.phase == "start"):
            return False
        if fault.kind == "checkpoint" and fault.phase == "start" and before is None:
            return False
        if fault.kind == "disk" and number < len(order) - 1:
            return False  # the checkpoint that it costs must not be needed
    return (
        sum(fault.kind == "memory" for fault in order) <= 1
    )  # with a micro-batch of one row there is one way to need less memory
