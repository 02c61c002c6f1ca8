"""
Verdicts on names, interfaces and ports. On one host paceline needs none of them: its ranks meet on the loopback; what
fails there is a script that looks its own name up, and every launch over several hosts.

Interface variables: NCCL takes a list of prefixes, `=` for exact names, `^` for those to leave out; gloo an exact list.
"""

from collections.abc import Iterator
from typing import Any, Literal

from paceline.check.ask import Ask
from paceline.check.verdict import Facts, Seen, Verdict, at, env, is_on, num_ranks, wants_cuda

SLOW_LOOKUP_S = 1.0
VIRTUAL = ("bridge", "veth", "tunnel")


def severity_of_names(ask: Ask) -> Literal["stop", "warn", "note"]:
    return "stop" if ask.num_hosts > 1 else "warn" if ask.command in ("run", "check") else "note"


def own_address(facts: Facts) -> str:
    """That of the interface with the default route, else of the first that is up."""
    interfaces = [each for each in at(facts, "network.interfaces") or () if each.get("up") and not each.get("loopback")]
    interfaces.sort(
        key=lambda each: (each["name"] != at(facts, "network.default_interface"), each.get("kind") in VIRTUAL)
    )
    addresses = [address for each in interfaces for address in each.get("addresses") or () if "." in address]
    return addresses[0] if addresses else "127.0.0.1"


def name_is_unknown(facts: Facts, ask: Ask) -> Iterator[Seen]:
    name, error = at(facts, "network.hostname"), at(facts, "network.resolve_error")
    if name and error:
        yield Seen(
            f"this host's own name {name} does not resolve: {error}",
            f"echo '{own_address(facts)} {name}' | sudo tee -a /etc/hosts",
            ("network.hostname", "network.resolve_error"),
            severity_of_names(ask),
        )


def name_is_loopback(facts: Facts, ask: Ask) -> Iterator[Seen]:
    name, addresses = at(facts, "network.hostname"), at(facts, "network.addresses") or []
    alias = [address for address in addresses if address.startswith("127.") and address != "127.0.0.1"]
    only = addresses and all(address.startswith("127.") or address == "::1" for address in addresses)
    if name and only and (alias or ask.num_hosts > 1):
        shown = addresses[0]
        without = f"sed -E '/^127[.]/s/[[:space:]]+{name.replace('.', '[.]')}\\b//g' /etc/hosts"  # localhost stays
        yield Seen(
            f"this host's own name {name} resolves to {shown}, its address is {own_address(facts)}",
            f"({without}; echo '{own_address(facts)} {name}') | sudo tee /etc/hosts.new && sudo cp /etc/hosts.new /etc/hosts",
            ("network.hostname", "network.addresses"),
            severity_of_names(ask),
        )


def lookup_is_slow(facts: Facts, ask: Ask) -> Iterator[Seen]:
    seconds, name = at(facts, "network.resolve_s"), at(facts, "network.hostname")
    if seconds is not None and seconds > SLOW_LOOKUP_S:
        yield Seen(
            f"looking up the own name {name} takes {seconds:.1f} s",
            f"echo '{own_address(facts)} {name}' | sudo tee -a /etc/hosts",
            ("network.resolve_s",),
        )


def chosen_interfaces(facts: Facts, name: str) -> tuple[str, list[dict[str, Any]]] | None:
    """The variable's value, and the interfaces that it means; None where it is not set or the interfaces are unknown."""
    value, interfaces = env(facts, name), at(facts, "network.interfaces")
    if not value or interfaces is None:
        return None
    if name == "GLOO_SOCKET_IFNAME":
        return value, [each for each in interfaces if each["name"] in value.split(",")]
    exact, words = value.lstrip("^").startswith("="), value.lstrip("=^").split(",")
    named = [
        each
        for each in interfaces
        if any(each["name"] == w if exact else each["name"].startswith(w) for w in words if w)
    ]
    if value.startswith("^"):
        return value, [each for each in interfaces if each not in named and not each.get("loopback")]
    return value, named


def interface_is_missing(facts: Facts, ask: Ask) -> Iterator[Seen]:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        found = chosen_interfaces(facts, name)
        if found is None:
            continue
        value, interfaces = found
        usable = [each for each in interfaces if each.get("up") and each.get("addresses")]
        if usable:
            continue
        state = "is down or has no address" if interfaces else "is not here"
        here = ", ".join(each["name"] for each in at(facts, "network.interfaces") if each.get("up"))
        yield Seen(
            f"{name}={value} {state}; up are {here}",
            f"unset {name}",
            (f"env.{name}", "network.interfaces"),
            "stop" if uses_interface(facts, ask, name) else "warn",
        )


def uses_interface(facts: Facts, ask: Ask, name: str) -> bool:
    """Several ranks of ours: NCCL on GPUs, gloo on CPUs. A script may use either, or none."""
    ours = "NCCL_SOCKET_IFNAME" if wants_cuda(facts, ask) else "GLOO_SOCKET_IFNAME"
    return name == ours and ask.command != "run" and num_ranks(facts, ask) * ask.num_hosts > 1


def interface_is_wrong(facts: Facts, ask: Ask) -> Iterator[Seen]:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        found = chosen_interfaces(facts, name)
        if found is None or not found[1] or ask.num_hosts < 2:
            continue
        value, interfaces = found
        if all(each.get("loopback") or each.get("kind") in VIRTUAL for each in interfaces):
            best = at(facts, "network.default_interface")
            kinds = ", ".join(sorted({str(each.get("kind")) for each in interfaces}))
            yield Seen(
                f"{name}={value} is {kinds}, which other hosts do not reach",
                f"export {name}={best}" if best else f"unset {name}",
                (f"env.{name}", "network.interfaces"),
            )


def bridge_comes_first(facts: Facts, ask: Ask) -> Iterator[Seen]:
    if ask.num_hosts < 2 or env(facts, "NCCL_SOCKET_IFNAME"):
        return
    best = at(facts, "network.default_interface")
    virtual = [
        each["name"]
        for each in at(facts, "network.interfaces") or ()
        if each.get("up")
        and each.get("kind") in VIRTUAL
        and not each["name"].startswith("docker")
        and each.get("addresses")
    ]
    if virtual and best:
        yield Seen(
            f"{', '.join(virtual)} are up beside {best}",
            f"export NCCL_SOCKET_IFNAME=={best} GLOO_SOCKET_IFNAME={best}",
            ("network.interfaces",),
        )


def infiniband_is_off(facts: Facts, ask: Ask) -> Iterator[Seen]:
    active = [device for device in at(facts, "network.ib_devices") or () if device.get("state") == "ACTIVE"]
    if active and is_on(env(facts, "NCCL_IB_DISABLE")) and ask.num_hosts > 1:
        rate = active[0].get("rate_gbps")
        yield Seen(
            f"NCCL_IB_DISABLE={env(facts, 'NCCL_IB_DISABLE')}, and {active[0]['name']} is active at {rate or 'n/a'} Gb/s",
            "unset NCCL_IB_DISABLE",
            ("env.NCCL_IB_DISABLE", "network.ib_devices"),
        )


def infiniband_is_down(facts: Facts, ask: Ask) -> Iterator[Seen]:
    devices = at(facts, "network.ib_devices") or []
    active = [device for device in devices if device.get("state") == "ACTIVE"]
    if devices and not active and not is_on(env(facts, "NCCL_IB_DISABLE")) and ask.num_hosts > 1:
        names = ", ".join(device["name"] for device in devices)
        yield Seen(
            f"{names} {'is' if len(devices) == 1 else 'are'} down", "export NCCL_IB_DISABLE=1", ("network.ib_devices",)
        )


def port_is_taken(facts: Facts, ask: Ask) -> Iterator[Seen]:
    for port in at(facts, "network.ports") or ():
        if port.get("free") is not False:
            continue
        holder, other = port.get("holder"), at(facts, "network.free_port")
        whom = f"held by {holder.get('name') or 'unknown'} (pid {holder['pid']})" if holder else port.get("error")
        tried = "" if other else "; so are the ten after it"
        fix = f"--port {other}" if other else f"kill {holder['pid']}" if holder else "--port 28500"
        yield Seen(f"port {port['port']} is {whom}{tried}", fix, ("network.ports", "network.free_port"))


def port_is_ephemeral(facts: Facts, ask: Ask) -> Iterator[Seen]:
    low, high = at(facts, "network.ephemeral_ports") or (0, -1)
    if ask.port and low <= ask.port <= high:
        yield Seen(
            f"port {ask.port} is in the range of outgoing connections, {low} to {high}",
            "--port 29500",
            ("network.ephemeral_ports",),
        )


VERDICTS = (
    Verdict("name-unknown", "warn", look=name_is_unknown,
            cause="The host's own name does not resolve. A stop over several hosts.",
            why="torchrun and scripts that look it up end with `socket.gaierror`; paceline's ranks on one host meet on "
                "the loopback",
            fix="Name it in /etc/hosts."),
    Verdict("name-loopback", "warn", look=name_is_loopback,
            cause="The host's own name resolves to 127.0.1.1, as Debian and Ubuntu install it. A stop over several hosts.",
            why="other hosts are told to connect to their own loopback; no torchrun agent thinks itself the host of the "
                "store",
            fix="Name the real address in /etc/hosts."),
    Verdict("name-slow", "warn", look=lookup_is_slow,
            cause="Looking up the own name takes over a second.",
            why="torch does it several times at every start",
            fix="Name it in /etc/hosts."),
    Verdict("interface-missing", "stop", look=interface_is_missing,
            cause="GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface that is not here, down, or without an "
                  "address. A warning where the run does not use that backend.",
            why="gloo ends with `Unable to find address`, the other ranks wait out their timeout",
            fix="Unset it: paceline sets what is right."),
    Verdict("interface-wrong", "stop", look=interface_is_wrong,
            cause="The interface variables name the loopback or a bridge, and there are several hosts.",
            why="the ranks of one host find each other, those of the others do not",
            fix="The interface of the default route."),
    Verdict("interface-bridge", "warn", look=bridge_comes_first,
            cause="Bridges or tunnels are up beside the real interface, and no variable says which to take.",
            why="NCCL and gloo may pick one that leads nowhere",
            fix="Name the interface."),
    Verdict("infiniband-off", "warn", look=infiniband_is_off,
            cause="NCCL_IB_DISABLE is set where InfiniBand is active.",
            why="traffic goes over Ethernet, many times slower",
            fix="Unset it."),
    Verdict("infiniband-down", "note", look=infiniband_is_down,
            cause="InfiniBand devices are there and none is active.",
            why="NCCL tries them first and may stop at them",
            fix="Turn it off for NCCL."),
    Verdict("port-taken", "stop", look=port_is_taken,
            cause="The port is in use.",
            why="the store cannot be made: `Address already in use`, or a silent wait for a stranger",
            fix="The next free one."),
    Verdict("port-ephemeral", "note", look=port_is_ephemeral,
            cause="The port lies in the range that the kernel gives to outgoing connections.",
            why="now and then another program will have it",
            fix="One below that range."),
)  # fmt: skip
