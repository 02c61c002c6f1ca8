"""
What a rule is: a pure function from the facts of one host, or of all hosts, and the user's intent, to the cases it finds.

The rule of the verdict gpu-hot is the function gpu_hot; its texts are in check/verdicts.toml. An unknown fact (None) never fires:
`at` returns None for everything below it. A fix is a command or a value that can be pasted; a fix that begins with `--` is a flag
for the command that was checked.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from shlex import quote
from typing import Any, Literal


@dataclass(frozen=True)
class Intent:
    """What the user is about to run, in numbers. None: unknown, or not applicable; without arguments only the machine is judged."""

    command: str = "check"
    device: str | None = None  # None: cuda where there is a GPU
    nproc: int | None = None  # on each host
    num_hosts: int = 1
    precision: str | None = None
    low_precision: str | None = None  # of the blocks' products, where the hardware is to compute them
    compile: bool | None = None
    # every key of Config; of a script only those about its ranks and hosts
    config: dict[str, Any] = field(default_factory=dict)
    set_keys: frozenset[str] = field(default_factory=frozenset)  # the keys that the user has set
    run_dir: str | None = None
    resumes: bool = False  # the run in that folder
    sequence_len: int | None = None
    device_batch_size: int | None = None
    total_batch_size: int | None = None
    num_steps: int | None = None
    epochs: float | None = None
    need_gpu_bytes: int | None = None  # at least, on each GPU
    need_host_bytes: int | None = None  # at least, of all processes on a host
    checkpoint_bytes: int | None = None
    num_checkpoints: int | None = None  # at one time
    saved_checkpoints: int = 0  # of them, those that the run folder has already
    shard_bytes: int | None = None  # of the prepared text; about, where it is not prepared yet
    text_folder: str | None = None  # its name in the cache of the host where it is prepared
    port: int | None = None  # None: the kernel chooses one
    trackers: tuple[str, ...] = ()  # which follow the run, on the host that this process runs on
    refused: tuple[str, str] | None = None  # message and fix of a plan that is impossible

    def set_value(self, key: str) -> Any:
        """Returns the value of a config key that the user has set, None for other keys."""
        return self.config.get(key) if key in self.set_keys else None


Facts = Mapping[str, Any]
Severity = Literal["stop", "warn", "note"]


@dataclass(frozen=True)
class Case:
    """One fault that a rule has found. severity and evidence (paths into the facts): where they differ from the verdict's."""

    what: str
    fix: str
    severity: Severity | None = None
    evidence: tuple[str, ...] | None = None


Cases = Iterator[Case]


@dataclass(frozen=True)
class Host:
    """The facts of one host, and what is about to run there."""

    facts: Facts
    intent: Intent
    keeps_checkpoints: bool = False  # whole ones, where the hosts share no run folder (launch/copies.py)

    def at(self, path: str) -> Any:
        return at(self.facts, path)

    def env(self, name: str) -> str | None:
        value: str | None = self.at(f"env.{name}")
        return value

    @property
    def name(self) -> str:
        """The name by which it was reached, or its own; with a user where one was given."""
        return str(self.at("connection.destination") or self.at("host.name"))

    @property
    def gpus(self) -> list[Mapping[str, Any]]:
        """The cards that CUDA sees."""
        return visible_gpus(self.facts)

    def named_gpus(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yields `GPU 0 (RTX 5090)` and the card, for the cards that CUDA sees."""
        for gpu in self.gpus:
            yield f"GPU {gpu.get('index')} ({short_name(gpu.get('name'))})", gpu

    @property
    def uses_cuda(self) -> bool:
        """Whether the run will use GPUs: they are requested, or no device is and there are GPUs."""
        return self.intent.device == "cuda" or (self.intent.device is None and bool(self.gpus))

    @property
    def torch_is_cpu_build(self) -> bool:
        """Whether torch is here and was built without CUDA and ROCm."""
        return bool(self.at("torch")) and self.at("torch.cuda") is None and self.at("torch.hip") is None

    @property
    def is_other(self) -> bool:
        """Whether it is another host than the one that starts the run."""
        return self.at("connection.here") is False

    @property
    def num_ranks(self) -> int:
        """The number of processes on this host, at least one."""
        return self.intent.nproc or (len(self.gpus) if self.uses_cuda else 1) or 1

    @property
    def uses_several_gpus(self) -> bool:
        return self.uses_cuda and self.num_ranks > 1

    @property
    def active_infiniband(self) -> list[Mapping[str, Any]]:
        return [device for device in self.at("network.ib_devices") or () if device.get("state") == "ACTIVE"]


Rule = Callable[[Host], Iterable[Case]]


def at(facts: Any, path: str) -> Any:
    """Returns facts["torch"]["libuv"] for "torch.libuv"; None where any part of the path is unknown."""
    value = facts
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def fix_for(facts: Facts, fix: str) -> str:
    """Returns a fix as it is typed here: what pip installs on another host goes through ssh, to the interpreter used there."""
    if not fix.startswith("pip install") or at(facts, "connection.here") is not False:
        return fix
    python = at(facts, "python.executable") or "python3"
    if at(facts, "connection.way") is not None:
        return f"on {at(facts, 'connection.destination')}: {quote(python)} -m {fix}"
    return f"ssh {quote(at(facts, 'connection.destination'))} {quote(python)} -m {fix}"


def fix_for_all(hosts: Iterable["Host"], fix: str) -> str:
    """Returns the fix of each of these hosts, to be typed one after the other."""
    return " && ".join(dict.fromkeys(fix_for(host.facts, fix) for host in hosts))


def visible_gpus(facts: Facts) -> list[Mapping[str, Any]]:
    """Returns the cards that CUDA sees."""
    return [gpu for gpu in facts.get("gpus") or () if gpu.get("visible") is not False and not is_lost(gpu)]


def is_lost(gpu: Mapping[str, Any]) -> bool:
    """Returns whether a card does not answer, as one that left the bus: it was asked for its name and has none."""
    return gpu.get("name", "") is None


def version_of(text: str | None) -> tuple[int, ...] | None:
    """Returns (2, 13, 0) for '2.13.0+cu128'; None for what is not a version."""
    match = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(map(int, match[0].split("."))) if match else None


def is_on(value: str | None) -> bool:
    return value is not None and value.lower() not in ("", "0", "false", "off", "no")


def short_name(name: Any) -> str:
    return str(name or "unknown").removeprefix("NVIDIA ").removeprefix("GeForce ")


def count_names(names: Iterable[str]) -> str:
    """Returns `2 x H100 80GB HBM3, 1 x RTX 3060`."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())
