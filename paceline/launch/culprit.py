"""
Who holds up the others: named from where each rank is, what its process does and where its stack stands. Pure.

The first of these that tells some ranks from the others decides: a process that cannot run; a mark behind; a stack outside any
collective while others wait in one; a processor at work while others idle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.launch.hang import STATES, STILL
from paceline.launch.signs import WORKING
from paceline.launch.stacks import Frame, waits_for_others, what_it_does
from paceline.marks import Mark

GONE = ("Z", None)
ENDED = ("stopped", "done")
BETWEEN = ("start", "compile", "ending", "stopped", "done")  # phases that belong to no step


@dataclass(frozen=True)
class Rank:
    """All that is known of one at the end of the silence."""

    rank: int
    pid: int | None
    state: str | None  # the letter in /proc/PID/stat; None: there is no such process
    mark: Mark | None = None  # None: it has made none, or is a script's
    frames: tuple[Frame, ...] = ()  # of its main thread, the innermost first
    cores: float = 0.0  # at work during the silence, with its children

    @property
    def place(self) -> tuple[int, int, int]:
        return (-1, 0, 0) if self.mark is None else self.mark.place


def find_culprits(ranks: Sequence[Rank]) -> list[Rank]:
    """All of them, where nothing tells one from another."""
    if all(each.state in GONE for each in ranks):
        return list(ranks)
    furthest = max(each.place for each in ranks)
    waits = any(waits_for_others(list(each.frames)) for each in ranks)
    signs: tuple[Callable[[Rank], bool], ...] = (
        lambda each: each.state in STILL and not (each.mark and each.mark.phase in ENDED),
        lambda each: each.place < furthest,
        lambda each: waits and bool(each.frames) and not waits_for_others(list(each.frames)),
        lambda each: each.cores >= WORKING,
    )
    for sign in signs:
        found = [each for each in ranks if sign(each)]
        if found and len(found) < len(ranks):
            last = min(each.place for each in found)
            return [each for each in found if each.place == last]
    return list(ranks)


def tell(ranks: Sequence[Rank], culprits: Sequence[Rank], *, silent_s: float) -> str:
    """One sentence: who did not come to what, what it is doing, and who waits for it where."""
    late, others = culprits[0], [each for each in ranks if each not in culprits]
    doing = f"{'is' if len(culprits) == 1 else 'are'} {state_of(late)}{where(late)}"
    start = f"no rank got on for {silent_s:.0f} s"
    if not others:
        who = "the only rank" if len(ranks) == 1 else "nothing tells the ranks apart: all"
        return f"{start}: {who} {doing}"
    ahead = max(others, key=lambda each: each.place)
    missed = ""
    if ahead.mark is not None and ahead.place > late.place:
        missed = f" and did not come to {words_of(ahead.mark)}"
    waits = f"{name_ranks(others)} {'waits' if len(others) == 1 else 'wait'}{where(ahead)}"
    return f"{start}: {name_ranks(culprits)} {doing}{missed}; {waits}"


def where(rank: Rank) -> str:
    """' in load of step 3, micro_batch at train/loader.py:80', as far as it is known."""
    known = [words_of(rank.mark) if rank.mark else None, what_it_does(list(rank.frames))]
    said = ", ".join(each for each in known if each)
    return f" in {said}" if said else ""


def words_of(mark: Mark) -> str:
    return mark.phase if mark.phase in BETWEEN else f"{mark.phase} of step {mark.step + 1:,}"


def state_of(rank: Rank) -> str:
    if rank.state in ("S", "R") and rank.cores >= WORKING:
        return f"at work ({rank.cores:.1f} cores)"
    return STATES.get(rank.state or "", "gone")


def name_ranks(ranks: Sequence[Rank]) -> str:
    numbers = [str(each.rank) for each in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
