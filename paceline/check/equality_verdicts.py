"""
Verdicts on several hosts together: what must be equal, and is not.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from paceline.check.ask import Ask
from paceline.check.torch_verdicts import WHEELS
from paceline.check.verdict import Facts, Seen, Verdict, at, short_name, version_of, visible_gpus

CLOCK_SKEW_S = 5.0  # facts of hosts are gathered within this
SETTINGS = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "USE_LIBUV")
PACKAGES = ("numpy", "tokenizers", "safetensors", "triton", "paceline", "accelerate", "transformers")


def by_value(hosts: Sequence[Facts], value: Callable[[Facts], Any]) -> dict[Any, list[str]]:
    """value -> names of the hosts that have it; unknown values are left out."""
    found: dict[Any, list[str]] = {}
    for host in hosts:
        each = value(host)
        if each is not None:
            found.setdefault(each, []).append(str(at(host, "host.name")))
    return found


def told(found: dict[Any, list[str]]) -> str:
    return ", ".join(
        f"{value} on {' and '.join(names)}" for value, names in sorted(found.items(), key=lambda item: str(item[0]))
    )


def differs(what: str, path: str, fix: str) -> Callable[[Sequence[Facts], Ask], Iterator[Seen]]:
    """A verdict that one fact is the same on all hosts. fix: with {newest} for the highest value."""

    def compare(hosts: Sequence[Facts], ask: Ask) -> Iterator[Seen]:
        found = by_value(hosts, lambda host: at(host, path))
        if len(found) > 1:
            yield Seen(f"{what}: {told(found)}", fix.format(newest=newest(found)))

    return compare


def newest(found: Iterable[Any]) -> str:
    """2.13 is newer than 2.9, which as text comes after it."""
    return str(max(found, key=lambda value: (version_of(str(value)) or (0,), str(value))))


def torch_differs(hosts: Sequence[Facts], ask: Ask) -> Iterator[Seen]:
    """Another release may speak another protocol; another build or patch of it does not."""
    found = by_value(hosts, lambda host: at(host, "torch.version"))
    if len(found) > 1:
        release, _, tag = newest(found).partition("+")
        index = f" -i {WHEELS}/{tag}" if tag else ""
        apart = len({(version_of(version) or ())[:2] for version in found}) > 1
        yield Seen(f"torch: {told(found)}", f"pip install torch=={release}{index}", (), "stop" if apart else "warn")


def python_differs(hosts: Sequence[Facts], ask: Ask) -> Iterator[Seen]:
    found = by_value(hosts, lambda host: at(host, "python.version"))
    if len(found) > 1:
        apart = len({(version_of(version) or ())[:2] for version in found}) > 1
        fix = f"python{'.'.join(newest(found).split('.')[:2])} -m venv .venv"
        yield Seen(f"Python: {told(found)}", fix, (), "warn" if apart else "note")


def packages_differ(hosts: Sequence[Facts], ask: Ask) -> Iterator[Seen]:
    for package in PACKAGES:
        found = by_value(hosts, lambda host, package=package: at(host, f"packages.{package}"))  # type: ignore[misc]
        if len(found) > 1:
            yield Seen(f"{package}: {told(found)}", f"pip install {package}=={newest(found)}")


def code_differs(hosts: Sequence[Facts], ask: Ask) -> Iterator[Seen]:
    found = by_value(hosts, lambda host: (at(host, "tools.code.commit") or "")[:12] or None)
    dirty = [str(at(host, "host.name")) for host in hosts if at(host, "tools.code.dirty")]
    if len(found) > 1:
        first = next(iter(found))  # of the host that asks
        yield Seen(f"commit of the code: {told(found)}", f"git fetch && git checkout {first}")
    elif dirty and len(dirty) < len(hosts):
        yield Seen(f"the code is changed on {' and '.join(dirty)} alone", "git stash")


def settings_differ(hosts: Sequence[Facts], ask: Ask) -> Iterator[Seen]:
    """Variables that change how ranks talk or compute; interfaces may have another name on each host."""
    names = {name for host in hosts for name in host.get("env") or {} if name.startswith(SETTINGS)}
    hosts = [host for host in hosts if host.get("env") is not None]
    for name in sorted(name for name in names if not name.endswith("_SOCKET_IFNAME")):
        found = by_value(hosts, lambda host, name=name: host["env"].get(name, "not set"))  # type: ignore[misc]
        if len(found) > 1:
            yield Seen(f"{name}: {told(found)}", f"unset {name}")


def gpus_differ(hosts: Sequence[Facts], ask: Ask) -> Iterator[Seen]:
    def cards(host: Facts) -> str | None:
        names = [short_name(gpu.get("name")) for gpu in visible_gpus(host)]
        return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names))) or None

    found = by_value(hosts, cards)
    if len(found) > 1:
        yield Seen(f"GPUs: {told(found)}", "export CUDA_VISIBLE_DEVICES so that each host has the same cards")


def clocks_differ(hosts: Sequence[Facts], ask: Ask) -> Iterator[Seen]:
    """Each host's clock against the time at which its facts came, by the clock of the host that asked."""
    skews = {}
    for host in hosts:
        unix, received = at(host, "host.clock.unix"), host.get("received") or host.get("time")
        if unix is not None and received:
            skews[str(at(host, "host.name"))] = unix - datetime.fromisoformat(received).timestamp()
    if len(skews) > 1 and max(skews.values()) - min(skews.values()) > CLOCK_SKEW_S:
        early, late = min(skews, key=lambda name: skews[name]), max(skews, key=lambda name: skews[name])
        yield Seen(
            f"the clock of {late} is {skews[late] - skews[early]:.0f} s ahead of that of {early}",
            "sudo timedatectl set-ntp true",
        )


def mtu_differs(hosts: Sequence[Facts], ask: Ask) -> Iterator[Seen]:
    def mtu(host: Facts) -> int | None:
        name = at(host, "network.default_interface")
        return next((each["mtu"] for each in at(host, "network.interfaces") or () if each["name"] == name), None)

    found = by_value(hosts, mtu)
    if len(found) > 1:
        name = at(hosts[0], "network.default_interface")
        yield Seen(f"MTU: {told(found)}", f"sudo ip link set {name} mtu {min(found)}")


VERDICTS = (
    Verdict("hosts-torch", "stop", compare=torch_differs,
            cause="Hosts have different versions of torch; a warning where only the build or the patch differs.",
            why="ranks may speak different protocols and hang",
            fix="The same version on all."),
    Verdict("hosts-nccl", "stop", compare=differs("NCCL", "torch.nccl", "pip install --force-reinstall torch"),
            cause="Hosts have different versions of NCCL.",
            why="NCCL refuses or hangs: its version must match on all hosts (nccl-tests#15)",
            fix="The same torch wheel on all."),
    Verdict("hosts-cuda", "warn", compare=differs("CUDA", "torch.cuda", "pip install --force-reinstall torch"),
            cause="The torch of the hosts is built for different CUDA versions.",
            why="kernels, and with them results, differ",
            fix="The same torch wheel on all."),
    Verdict("hosts-driver", "warn", compare=differs("driver", "driver.version", "install driver {newest} on all hosts"),
            cause="Hosts have different NVIDIA drivers.",
            why="one of them may lack what the others use",
            fix="The same driver on all."),
    Verdict("hosts-python", "warn", compare=python_differs,
            cause="Hosts have different versions of Python; a note where only the patch differs.",
            why="pickled objects and packages may not fit",
            fix="The same version on all."),
    Verdict("hosts-packages", "warn", compare=packages_differ,
            cause="Hosts have different versions of a package.",
            why="the same text may give other tokens, the same code other results",
            fix="The same version on all."),
    Verdict("hosts-code", "warn", compare=code_differs,
            cause="Hosts have different code in the current folder.",
            why="ranks that run different code wait for each other",
            fix="The same commit on all."),
    Verdict("hosts-settings", "warn", compare=settings_differ,
            cause="A variable of NCCL, gloo, torch or its allocator is set on some hosts, or has another value there.",
            why="ranks may take different ways to each other, and hang",
            fix="The same on all, or on none."),
    Verdict("hosts-gpus", "warn", compare=gpus_differ,
            cause="Hosts have different GPUs.",
            why="all wait for the slowest",
            fix="The same cards on each."),
    Verdict("hosts-clock", "warn", compare=clocks_differ,
            cause="The clocks of the hosts differ by over 5 s.",
            why="events of hosts cannot be put in order",
            fix="Turn NTP on."),
    Verdict("hosts-mtu", "warn", compare=mtu_differs,
            cause="The MTU of the hosts differs.",
            why="where the way between them has the smaller one, small messages pass and large ones hang",
            fix="The smaller one on all."),
)  # fmt: skip
