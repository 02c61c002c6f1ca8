"""
What a verdict is: a pure function from the facts of one host, or of all, and what is asked of them, to what it saw.

An unknown fact (None) never fires: `at` gives None for whatever lies below it. A fix is a command or a value that can be
pasted; what starts with `--` is a flag for the command that was checked.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.check.ask import Ask

Facts = Mapping[str, Any]
Severity = Literal["stop", "warn", "note"]


@dataclass(frozen=True)
class Seen:
    """One thing seen. evidence: paths into the facts. severity: where the case differs from the verdict's own."""

    what: str
    fix: str
    evidence: tuple[str, ...] = ()
    severity: Severity | None = None


@dataclass(frozen=True)
class Verdict:
    """cause and fix are for docs/checks.md; what is printed has the numbers of the case."""

    id: str
    severity: Severity
    cause: str
    why: str
    fix: str
    look: Callable[[Facts, Ask], Iterable[Seen]] | None = None  # at each host by itself
    compare: Callable[[Sequence[Facts], Ask], Iterable[Seen]] | None = field(default=None)  # all hosts together


def at(facts: Any, path: str) -> Any:
    """facts["torch"]["libuv"] for "torch.libuv"; None where any part of it is unknown."""
    value = facts
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def env(facts: Facts, name: str) -> str | None:
    value: str | None = (facts.get("env") or {}).get(name)
    return value


def visible_gpus(facts: Facts) -> list[Mapping[str, Any]]:
    return [gpu for gpu in facts.get("gpus") or () if gpu.get("visible") is not False]


def wants_cuda(facts: Facts, ask: Ask) -> bool:
    """Whether it will run on GPUs: asked for, or nothing asked and GPUs there."""
    return ask.device == "cuda" or (ask.device is None and bool(visible_gpus(facts)))


def num_ranks(facts: Facts, ask: Ask) -> int:
    """Processes on this host, at least one."""
    return ask.nproc or (len(visible_gpus(facts)) if wants_cuda(facts, ask) else 1) or 1


def version_of(text: str | None) -> tuple[int, ...] | None:
    """'2.13.0+cu128' -> (2, 13, 0); None for what is no version."""
    parts = (text or "").partition("+")[0].split(".")
    numbers: list[int] = []
    for part in parts:
        digits = "".join(each for each in part if each.isdigit())
        if not part[:1].isdigit():
            break
        numbers.append(int(digits if part.isdigit() else part[: len(part) - len(part.lstrip("0123456789"))] or 0))
    return tuple(numbers) or None


def is_on(value: str | None) -> bool:
    return value is not None and value.lower() not in ("", "0", "false", "off", "no")


def each_gpu(facts: Facts) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """`GPU 0 (RTX 5090)` and the card, for those that CUDA sees."""
    for gpu in visible_gpus(facts):
        yield f"GPU {gpu.get('index')} ({short_name(gpu.get('name'))})", gpu


def short_name(name: Any) -> str:
    return str(name or "unknown").removeprefix("NVIDIA ").removeprefix("GeForce ")
