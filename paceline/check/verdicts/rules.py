"""
What a verdict is: a pure function from the facts of one host, or of all hosts, and the user's intent, to the cases it finds.

An unknown fact (None) never fires: `at` returns None for everything below it. A fix is a command or a value that can be pasted;
a fix that begins with `--` is a flag for the command that was checked.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Intent:
    """What the user is about to run, in numbers. None: unknown, or not applicable; without arguments only the machine is judged."""

    command: str = "check"
    device: str | None = None  # None: cuda where there is a GPU
    nproc: int | None = None  # on each host
    num_hosts: int = 1
    precision: str | None = None
    compile: bool | None = None
    config: dict[str, Any] | None = None  # every key of Config
    set_keys: frozenset[str] = field(default_factory=frozenset)  # the keys that the user has set
    run_dir: str | None = None
    sequence_len: int | None = None
    device_batch_size: int | None = None
    total_batch_size: int | None = None
    num_steps: int | None = None
    need_gpu_bytes: int | None = None  # at least, on each GPU
    need_host_bytes: int | None = None  # at least, of all processes on a host
    checkpoint_bytes: int | None = None
    num_checkpoints: int | None = None  # at one time
    port: int | None = None  # None: the kernel chooses one
    tracker: str | None = None
    refused: tuple[str, str] | None = None  # message and fix of a plan that is impossible


Facts = Mapping[str, Any]
Severity = Literal["stop", "warn", "note"]


@dataclass(frozen=True)
class Case:
    """One fault that a rule has found. evidence: paths into the facts. severity: where it differs from the verdict's."""

    what: str
    fix: str
    evidence: tuple[str, ...] = ()
    severity: Severity | None = None


Rule = Callable[[Facts, Intent], Iterable[Case]]


@dataclass(frozen=True)
class Verdict:
    """A rule with its texts. cause and fix are for docs/checks.md; the printed finding has the numbers of the case."""

    id: str
    severity: Severity
    cause: str
    why: str
    fix: str
    rule: Rule | None = None  # for each host by itself
    compare: Callable[[Sequence[Facts], Intent], Iterable[Case]] | None = None  # for all hosts together


def at(facts: Any, path: str) -> Any:
    """Returns facts["torch"]["libuv"] for "torch.libuv"; None where any part of the path is unknown."""
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


def wants_cuda(facts: Facts, intent: Intent) -> bool:
    """Returns whether the run will use GPUs: they are requested, or no device is and there are GPUs."""
    return intent.device == "cuda" or (intent.device is None and bool(visible_gpus(facts)))


def num_ranks(facts: Facts, intent: Intent) -> int:
    """Returns the number of processes on this host, at least one."""
    return intent.nproc or (len(visible_gpus(facts)) if wants_cuda(facts, intent) else 1) or 1


def version_of(text: str | None) -> tuple[int, ...] | None:
    """Returns (2, 13, 0) for '2.13.0+cu128'; None for what is not a version."""
    match = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(map(int, match[0].split("."))) if match else None


def is_on(value: str | None) -> bool:
    return value is not None and value.lower() not in ("", "0", "false", "off", "no")


def named_gpus(facts: Facts) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields `GPU 0 (RTX 5090)` and the card, for the cards that CUDA sees."""
    for gpu in visible_gpus(facts):
        yield f"GPU {gpu.get('index')} ({short_name(gpu.get('name'))})", gpu


def short_name(name: Any) -> str:
    return str(name or "unknown").removeprefix("NVIDIA ").removeprefix("GeForce ")
