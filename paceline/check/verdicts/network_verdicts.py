"""
Verdicts on names, interfaces, ports, and on what must be equal on several hosts.

On one host paceline's ranks meet on the loopback and need no name. Scripts that look up their own name fail, and so does every
launch over several hosts. Interface variables: NCCL takes a list of prefixes, `=` before exact names, `^` before excluded ones;
gloo takes a list of exact names.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Literal

from paceline.check.verdicts.rules import (
    Case,
    Facts,
    Intent,
    Verdict,
    at,
    env,
    is_on,
    num_ranks,
    short_name,
    version_of,
    visible_gpus,
    wants_cuda,
)
from paceline.check.verdicts.torch_verdicts import WHEELS
from paceline.units import format_list

SLOW_LOOKUP_S = 1.0
CLOCK_SKEW_S = 5.0  # facts of hosts are gathered within this
SETTINGS = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "USE_LIBUV")
PACKAGES = ("numpy", "tokenizers", "safetensors", "triton", "paceline", "accelerate", "transformers")
VIRTUAL = ("bridge", "veth", "tunnel")


def severity_of_names(intent: Intent) -> Literal["stop", "warn", "note"]:
    return "stop" if intent.num_hosts > 1 else "warn" if intent.command in ("run", "check") else "note"


def own_address(facts: Facts) -> str:
    """Returns the address of the interface with the default route, else of the first that is up."""
    default = at(facts, "network.default_interface")
    interfaces = [nic for nic in interfaces_up(facts) if not nic.get("loopback")]
    interfaces.sort(key=lambda nic: (nic["name"] != default, nic.get("kind") in VIRTUAL))
    addresses = [address for nic in interfaces for address in nic.get("addresses") or () if "." in address]
    return addresses[0] if addresses else "127.0.0.1"


def interfaces_up(facts: Facts) -> list[dict[str, Any]]:
    return [nic for nic in at(facts, "network.interfaces") or () if nic.get("up")]


def name_is_unknown(facts: Facts, intent: Intent) -> Iterator[Case]:
    name, error = at(facts, "network.hostname"), at(facts, "network.resolve_error")
    if name and error:
        yield Case(
            f"the name of this host, {name}, does not resolve: {error}",
            f"echo '{own_address(facts)} {name}' | sudo tee -a /etc/hosts",
            ("network.hostname", "network.resolve_error"),
            severity_of_names(intent),
        )


def name_is_loopback(facts: Facts, intent: Intent) -> Iterator[Case]:
    name, addresses = at(facts, "network.hostname"), at(facts, "network.addresses") or []
    alias = [address for address in addresses if address.startswith("127.") and address != "127.0.0.1"]
    only = addresses and all(address.startswith("127.") or address == "::1" for address in addresses)
    if name and only and (alias or intent.num_hosts > 1):
        without = f"sed -E '/^127[.]/s/[[:space:]]+{name.replace('.', '[.]')}\\b//g' /etc/hosts"  # localhost stays
        yield Case(
            f"the name of this host, {name}, resolves to {addresses[0]}; its address is {own_address(facts)}",
            f"({without}; echo '{own_address(facts)} {name}') | sudo tee /etc/hosts.new && sudo cp /etc/hosts.new /etc/hosts",
            ("network.hostname", "network.addresses"),
            severity_of_names(intent),
        )


def lookup_is_slow(facts: Facts, intent: Intent) -> Iterator[Case]:
    seconds, name = at(facts, "network.resolve_s"), at(facts, "network.hostname")
    if seconds is not None and seconds > SLOW_LOOKUP_S:
        yield Case(
            f"looking up the name of this host, {name}, takes {seconds:.1f} s",
            f"echo '{own_address(facts)} {name}' | sudo tee -a /etc/hosts",
            ("network.resolve_s",),
        )


def chosen_interfaces(facts: Facts, name: str) -> tuple[str, list[dict[str, Any]]] | None:
    """Returns the variable's value and the interfaces that it selects; None where it is not set or the interfaces are unknown."""
    value, interfaces = env(facts, name), at(facts, "network.interfaces")
    if not value or interfaces is None:
        return None
    if name == "GLOO_SOCKET_IFNAME":
        return value, [nic for nic in interfaces if nic["name"] in value.split(",")]
    exact, patterns = value.lstrip("^").startswith("="), value.lstrip("=^").split(",")
    named = [
        nic
        for nic in interfaces
        if any(nic["name"] == pattern if exact else nic["name"].startswith(pattern) for pattern in patterns if pattern)
    ]
    if value.startswith("^"):
        return value, [nic for nic in interfaces if nic not in named and not nic.get("loopback")]
    return value, named


def interface_is_missing(facts: Facts, intent: Intent) -> Iterator[Case]:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        chosen = chosen_interfaces(facts, name)
        if chosen is None:
            continue
        value, interfaces = chosen
        if any(nic.get("up") and nic.get("addresses") for nic in interfaces):
            continue
        state = "is down or has no address" if interfaces else "does not exist"
        here = ", ".join(nic["name"] for nic in interfaces_up(facts))
        yield Case(
            f"{name}={value} {state}; up are {here}",
            f"unset {name}",
            (f"env.{name}", "network.interfaces"),
            "stop" if uses_interface(facts, intent, name) else "warn",
        )


def uses_interface(facts: Facts, intent: Intent, name: str) -> bool:
    """Returns whether paceline's own ranks use it: NCCL on GPUs, gloo on CPUs. A script may use either, or none."""
    ours = "NCCL_SOCKET_IFNAME" if wants_cuda(facts, intent) else "GLOO_SOCKET_IFNAME"
    return name == ours and intent.command != "run" and num_ranks(facts, intent) * intent.num_hosts > 1


def interface_is_wrong(facts: Facts, intent: Intent) -> Iterator[Case]:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        chosen = chosen_interfaces(facts, name)
        if chosen is None or not chosen[1] or intent.num_hosts < 2:
            continue
        value, interfaces = chosen
        if all(nic.get("loopback") or nic.get("kind") in VIRTUAL for nic in interfaces):
            best = at(facts, "network.default_interface")
            kinds = ", ".join(sorted({str(nic.get("kind")) for nic in interfaces}))
            fix = f"export {name}={best}" if best else f"unset {name}"
            what = f"{name}={value} is {kinds}, which other hosts cannot reach"
            yield Case(what, fix, (f"env.{name}", "network.interfaces"))


def bridge_is_ambiguous(facts: Facts, intent: Intent) -> Iterator[Case]:
    if intent.num_hosts < 2 or env(facts, "NCCL_SOCKET_IFNAME"):
        return
    best = at(facts, "network.default_interface")
    virtual = [
        nic["name"]
        for nic in interfaces_up(facts)
        if nic.get("kind") in VIRTUAL and not nic["name"].startswith("docker") and nic.get("addresses")
    ]
    if virtual and best:
        yield Case(
            f"{', '.join(virtual)} are up in addition to {best}",
            f"export NCCL_SOCKET_IFNAME=={best} GLOO_SOCKET_IFNAME={best}",
            ("network.interfaces",),
        )


def infiniband_is_off(facts: Facts, intent: Intent) -> Iterator[Case]:
    active = [device for device in at(facts, "network.ib_devices") or () if device.get("state") == "ACTIVE"]
    if active and is_on(env(facts, "NCCL_IB_DISABLE")) and intent.num_hosts > 1:
        name, rate = active[0]["name"], active[0].get("rate_gbps") or "n/a"
        yield Case(
            f"NCCL_IB_DISABLE={env(facts, 'NCCL_IB_DISABLE')}, and {name} is active at {rate} Gb/s",
            "unset NCCL_IB_DISABLE",
            ("env.NCCL_IB_DISABLE", "network.ib_devices"),
        )


def infiniband_is_down(facts: Facts, intent: Intent) -> Iterator[Case]:
    devices = at(facts, "network.ib_devices") or []
    active = [device for device in devices if device.get("state") == "ACTIVE"]
    if devices and not active and not is_on(env(facts, "NCCL_IB_DISABLE")) and intent.num_hosts > 1:
        names = ", ".join(device["name"] for device in devices)
        what = f"{names} {'is' if len(devices) == 1 else 'are'} down"
        yield Case(what, "export NCCL_IB_DISABLE=1", ("network.ib_devices",))


def port_is_taken(facts: Facts, intent: Intent) -> Iterator[Case]:
    for port in at(facts, "network.ports") or ():
        if port.get("free") is not False:
            continue
        holder, other = port.get("holder"), at(facts, "network.free_port")
        use = (
            f"used by {holder.get('name') or 'unknown'} (pid {holder['pid']})"
            if holder
            else f"not usable: {port.get('error')}"
        )
        more = "" if other else "; the next ten are in use as well"
        fix = f"--port {other}" if other else f"kill {holder['pid']}" if holder else "--port 28500"
        yield Case(f"port {port['port']} is {use}{more}", fix, ("network.ports", "network.free_port"))


def port_is_ephemeral(facts: Facts, intent: Intent) -> Iterator[Case]:
    low, high = at(facts, "network.ephemeral_ports") or (0, -1)
    if intent.port and low <= intent.port <= high:
        what = f"port {intent.port} is in the range of outgoing connections, {low} to {high}"
        yield Case(what, "--port 29500", ("network.ephemeral_ports",))


NETWORK_VERDICTS = (
    Verdict("name-unknown", "warn", rule=name_is_unknown,
            cause="The host's own name does not resolve. A stop with several hosts.",
            why="torchrun and scripts that look it up fail with `socket.gaierror`; paceline's ranks on one host use "
                "the loopback",
            fix="Add it to /etc/hosts."),
    Verdict("name-loopback", "warn", rule=name_is_loopback,
            cause="The host's own name resolves to 127.0.1.1, as Debian and Ubuntu install it. A stop with several hosts.",
            why="other hosts connect to their own loopback; no torchrun agent recognizes itself as the host of the "
                "store",
            fix="Add the real address to /etc/hosts."),
    Verdict("name-slow", "warn", rule=lookup_is_slow,
            cause="Looking up the host's own name takes more than a second.",
            why="torch looks it up several times at every start", fix="Add it to /etc/hosts."),
    Verdict("interface-missing", "stop", rule=interface_is_missing,
            cause="GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface that does not exist, is down or has no "
                  "address. A warning where the run does not use that backend.",
            why="gloo fails with `Unable to find address`, and the other ranks wait for their timeout",
            fix="Unset it: paceline chooses the right one."),
    Verdict("interface-wrong", "stop", rule=interface_is_wrong,
            cause="The interface variables name the loopback or a bridge, and there are several hosts.",
            why="the ranks of one host reach each other, those of other hosts do not",
            fix="Use the interface of the default route."),
    Verdict("interface-bridge", "warn", rule=bridge_is_ambiguous,
            cause="Bridges or tunnels are up in addition to the real interface, and no variable chooses one.",
            why="NCCL and gloo may choose one that does not reach the other hosts", fix="Name the interface."),
    Verdict("infiniband-off", "warn", rule=infiniband_is_off,
            cause="NCCL_IB_DISABLE is set where InfiniBand is active.",
            why="traffic uses Ethernet, which is many times slower", fix="Unset it."),
    Verdict("infiniband-down", "note", rule=infiniband_is_down,
            cause="There are InfiniBand devices, but none is active.",
            why="NCCL tries them first and may fail", fix="Switch it off for NCCL."),
    Verdict("port-taken", "stop", rule=port_is_taken,
            cause="The port is in use.",
            why="the store cannot be made: `Address already in use`, or the ranks wait silently for another program",
            fix="Use the next free port."),
    Verdict("port-ephemeral", "note", rule=port_is_ephemeral,
            cause="The port is in the range that the kernel uses for outgoing connections.",
            why="another program may use it at any time", fix="Use a port below that range."),
)  # fmt: skip


def differing(hosts: Sequence[Facts], value: Callable[[Facts], Any]) -> dict[Any, list[str]]:
    """Returns the names of the hosts that have each known value; nothing where the hosts agree."""
    names: dict[Any, list[str]] = {}
    for host in hosts:
        key = value(host)
        if key is not None:
            names.setdefault(key, []).append(str(at(host, "host.name")))
    return names if len(names) > 1 else {}


def values_by_host(hosts_by_value: dict[Any, list[str]]) -> str:
    return ", ".join(
        f"{value} on {format_list(names)}"
        for value, names in sorted(hosts_by_value.items(), key=lambda item: str(item[0]))
    )


def differs(what: str, path: str, fix: str) -> Callable[[Sequence[Facts], Intent], Iterator[Case]]:
    """Returns the rule that one fact is equal on all hosts. fix: {newest} stands for the highest value."""

    def compare(hosts: Sequence[Facts], intent: Intent) -> Iterator[Case]:
        if values := differing(hosts, lambda host: at(host, path)):
            yield Case(f"{what}: {values_by_host(values)}", fix.format(newest=newest(values)))

    return compare


def newest(versions: Iterable[Any]) -> str:
    """Returns the highest version: 2.13 is newer than 2.9, although it sorts before it as text."""
    return str(max(versions, key=lambda value: (version_of(str(value)) or (0,), str(value))))


def torch_differs(hosts: Sequence[Facts], intent: Intent) -> Iterator[Case]:
    """Another release may use another protocol; another build or patch of the same release does not."""
    if values := differing(hosts, lambda host: at(host, "torch.version")):
        release, _, tag = newest(values).partition("+")
        index = f" -i {WHEELS}/{tag}" if tag else ""
        releases = {(version_of(version) or ())[:2] for version in values}
        yield Case(
            f"torch: {values_by_host(values)}",
            f"pip install torch=={release}{index}",
            (),
            "stop" if len(releases) > 1 else "warn",
        )


def python_differs(hosts: Sequence[Facts], intent: Intent) -> Iterator[Case]:
    if values := differing(hosts, lambda host: at(host, "python.version")):
        releases = {(version_of(version) or ())[:2] for version in values}
        fix = f"python{'.'.join(newest(values).split('.')[:2])} -m venv .venv"
        yield Case(f"Python: {values_by_host(values)}", fix, (), "warn" if len(releases) > 1 else "note")


def packages_differ(hosts: Sequence[Facts], intent: Intent) -> Iterator[Case]:
    for package in PACKAGES:
        if values := differing(hosts, lambda host, package=package: at(host, f"packages.{package}")):  # type: ignore[misc]
            yield Case(f"{package}: {values_by_host(values)}", f"pip install {package}=={newest(values)}")


def code_differs(hosts: Sequence[Facts], intent: Intent) -> Iterator[Case]:
    values = differing(hosts, lambda host: (at(host, "tools.code.commit") or "")[:12] or None)
    dirty = [str(at(host, "host.name")) for host in hosts if at(host, "tools.code.dirty")]
    if len(values) > 1:
        first = next(iter(values))  # of the host that gathers the facts
        yield Case(f"commit of the code: {values_by_host(values)}", f"git fetch && git checkout {first}")
    elif dirty and len(dirty) < len(hosts):
        yield Case(f"the code is modified only on {format_list(dirty)}", "git stash")


def settings_differ(hosts: Sequence[Facts], intent: Intent) -> Iterator[Case]:
    """Compares variables that affect communication or results; interfaces may have different names on each host."""
    names = {name for host in hosts for name in host.get("env") or {} if name.startswith(SETTINGS)}
    hosts = [host for host in hosts if host.get("env") is not None]
    for name in sorted(name for name in names if not name.endswith("_SOCKET_IFNAME")):
        if values := differing(hosts, lambda host, name=name: host["env"].get(name, "not set")):  # type: ignore[misc]
            yield Case(f"{name}: {values_by_host(values)}", f"unset {name}")


def gpus_differ(hosts: Sequence[Facts], intent: Intent) -> Iterator[Case]:
    def cards(host: Facts) -> str | None:
        names = [short_name(gpu.get("name")) for gpu in visible_gpus(host)]
        return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names))) or None

    if values := differing(hosts, cards):
        yield Case(
            f"GPUs: {values_by_host(values)}", "export CUDA_VISIBLE_DEVICES so that each host has the same cards"
        )


def clocks_differ(hosts: Sequence[Facts], intent: Intent) -> Iterator[Case]:
    """Compares each host's clock with the time at which its facts arrived, by the clock of the gathering host."""
    skews = {}
    for host in hosts:
        unix, received = at(host, "host.clock.unix"), host.get("received") or host.get("time")
        if unix is not None and received:
            skews[str(at(host, "host.name"))] = unix - datetime.fromisoformat(received).timestamp()
    if len(skews) > 1 and max(skews.values()) - min(skews.values()) > CLOCK_SKEW_S:
        early, late = min(skews, key=lambda name: skews[name]), max(skews, key=lambda name: skews[name])
        yield Case(
            f"the clock of {late} is {skews[late] - skews[early]:.0f} s ahead of that of {early}",
            "sudo timedatectl set-ntp true",
        )


def mtu_differs(hosts: Sequence[Facts], intent: Intent) -> Iterator[Case]:
    def mtu(host: Facts) -> int | None:
        name = at(host, "network.default_interface")
        return next((i["mtu"] for i in at(host, "network.interfaces") or () if i["name"] == name), None)

    if values := differing(hosts, mtu):
        name = at(hosts[0], "network.default_interface")
        yield Case(f"MTU: {values_by_host(values)}", f"sudo ip link set {name} mtu {min(values)}")


HOST_EQUALITY_VERDICTS = (
    Verdict("hosts-torch", "stop", compare=torch_differs,
            cause="Hosts have different versions of torch; a warning where only the build or the patch differs.",
            why="ranks may speak different protocols and hang", fix="Install the same version on all hosts."),
    Verdict("hosts-nccl", "stop", compare=differs("NCCL", "torch.nccl", "pip install --force-reinstall torch"),
            cause="Hosts have different versions of NCCL.",
            why="NCCL refuses or hangs: its version must match on all hosts (nccl-tests#15)",
            fix="Install the same torch wheel on all hosts."),
    Verdict("hosts-cuda", "warn", compare=differs("CUDA", "torch.cuda", "pip install --force-reinstall torch"),
            cause="The torch of the hosts is built for different CUDA versions.",
            why="kernels differ, and so do results", fix="Install the same torch wheel on all hosts."),
    Verdict("hosts-driver", "warn", compare=differs("driver", "driver.version", "install driver {newest} on all hosts"),
            cause="Hosts have different NVIDIA drivers.",
            why="one of them may lack a feature that the others use", fix="Install the same driver on all hosts."),
    Verdict("hosts-python", "warn", compare=python_differs,
            cause="Hosts have different versions of Python; a note where only the patch differs.",
            why="pickled objects and packages may be incompatible", fix="Install the same version on all hosts."),
    Verdict("hosts-packages", "warn", compare=packages_differ,
            cause="Hosts have different versions of a package.",
            why="the same text may give different tokens, the same code different results",
            fix="Install the same version on all hosts."),
    Verdict("hosts-code", "warn", compare=code_differs,
            cause="Hosts have different code in the current folder.",
            why="ranks that run different code wait for each other", fix="Check out the same commit on all hosts."),
    Verdict("hosts-settings", "warn", compare=settings_differ,
            cause="A variable of NCCL, gloo, torch or its allocator is set on some hosts, or has another value there.",
            why="ranks may use different transports and hang", fix="Set it on all hosts, or on none."),
    Verdict("hosts-gpus", "warn", compare=gpus_differ,
            cause="The hosts have different GPUs.",
            why="all hosts wait for the slowest", fix="Use the same cards on all hosts."),
    Verdict("hosts-clock", "warn", compare=clocks_differ,
            cause="The clocks of the hosts differ by more than 5 s.",
            why="the events of the hosts cannot be ordered by time", fix="Switch NTP on."),
    Verdict("hosts-mtu", "warn", compare=mtu_differs,
            cause="The MTU of the hosts differs.",
            why="with the smaller MTU on the way, small messages arrive and large ones hang",
            fix="Set the smaller one on all hosts."),
)  # fmt: skip
