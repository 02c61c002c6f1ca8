"""
Verdicts on names, interfaces and ports of one host.

On one host paceline's ranks meet on the loopback and need no name. Scripts that look up their own name fail, and so does every
launch over several hosts. Interface variables: NCCL takes a list of prefixes, `=` before exact names, `^` before excluded ones;
gloo takes a list of exact names.
"""

import ipaddress
from collections.abc import Iterator
from typing import Any

from paceline.check.probes.network_probe import choose_interface
from paceline.check.verdicts.rules import Case, Cases, Host, Severity, is_on

SLOW_LOOKUP_S = 1.0
VIRTUAL = ("bridge", "veth", "tunnel")


def severity_of_names(host: Host) -> Severity:
    """paceline gives its ranks addresses and interfaces; a script may look up its own name."""
    return "warn" if host.intent.command in ("run", "check") else "note"


def own_address(host: Host) -> str:
    """Returns the address of the interface with the default route, else of the first that is up."""
    default = host.at("network.default_interface")
    interfaces = [nic for nic in interfaces_up(host) if not nic.get("loopback")]
    interfaces.sort(key=lambda nic: (nic["name"] != default, nic.get("kind") in VIRTUAL))
    addresses = (address for nic in interfaces for address in nic.get("addresses") or () if "." in address)
    return next(addresses, "127.0.0.1")


def network_of(address: str) -> str:
    """Returns the usual network around an address, for --interface."""
    return str(ipaddress.ip_network(f"{address}/{64 if ':' in address else 24}", strict=False))


def interfaces_up(host: Host) -> list[dict[str, Any]]:
    return [nic for nic in host.at("network.interfaces") or () if nic.get("up")]


def host_unreachable(host: Host) -> Cases:
    if error := host.at("connection.error"):
        yield Case(str(error), str(host.at("connection.fix")))


def name_unknown(host: Host) -> Cases:
    name, error = host.at("network.hostname"), host.at("network.resolve_error")
    if name and error:
        fix = f"echo '{own_address(host)} {name}' | sudo tee -a /etc/hosts"
        yield Case(f"the name of this host, {name}, does not resolve: {error}", fix, severity_of_names(host))


def name_loopback(host: Host) -> Cases:
    name, addresses = host.at("network.hostname"), host.at("network.addresses") or []
    alias = [address for address in addresses if address.startswith("127.") and address != "127.0.0.1"]
    only = addresses and all(address.startswith("127.") or address == "::1" for address in addresses)
    if name and only and (alias or host.intent.num_hosts > 1):
        without = f"sed -E '/^127[.]/s/[[:space:]]+{name.replace('.', '[.]')}\\b//g' /etc/hosts"  # localhost stays
        address = own_address(host)
        yield Case(
            f"the name of this host, {name}, resolves to {addresses[0]}; its address is {address}",
            f"({without}; echo '{address} {name}') | sudo tee /etc/hosts.new && sudo cp /etc/hosts.new /etc/hosts",
            severity_of_names(host),
        )


def name_slow(host: Host) -> Cases:
    seconds, name = host.at("network.resolve_s"), host.at("network.hostname")
    if seconds is not None and seconds > SLOW_LOOKUP_S:
        fix = f"echo '{own_address(host)} {name}' | sudo tee -a /etc/hosts"
        yield Case(f"looking up the name of this host, {name}, takes {seconds:.1f} s", fix)


def chosen_interfaces(host: Host) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Yields each interface variable that is set, its value and the interfaces that it selects; nothing where they are unknown."""
    interfaces = host.at("network.interfaces")
    gloo, nccl = host.env("GLOO_SOCKET_IFNAME"), host.env("NCCL_SOCKET_IFNAME")
    if gloo and interfaces is not None:
        yield "GLOO_SOCKET_IFNAME", gloo, [nic for nic in interfaces if nic["name"] in gloo.split(",")]
    if nccl and interfaces is not None:
        patterns = tuple(pattern for pattern in nccl.lstrip("=^").split(",") if pattern)
        if nccl.lstrip("^").startswith("="):
            chosen = [nic for nic in interfaces if nic["name"] in patterns]
        else:
            chosen = [nic for nic in interfaces if nic["name"].startswith(patterns)]
        if nccl.startswith("^"):
            chosen = [nic for nic in interfaces if nic not in chosen and not nic.get("loopback")]
        yield "NCCL_SOCKET_IFNAME", nccl, chosen


def interface_missing(host: Host) -> Cases:
    # paceline's own ranks use NCCL on GPUs and gloo on CPUs; a script may use either, or none
    several = host.intent.command != "run" and host.num_ranks * host.intent.num_hosts > 1
    ours = "NCCL_SOCKET_IFNAME" if host.uses_cuda else "GLOO_SOCKET_IFNAME"
    for name, value, interfaces in chosen_interfaces(host):
        if not any(nic.get("up") and nic.get("addresses") for nic in interfaces):
            state = "is down or has no address" if interfaces else "does not exist"
            what = f"{name}={value} {state}; up are {', '.join(nic['name'] for nic in interfaces_up(host))}"
            severity: Severity = "stop" if several and name == ours else "warn"
            yield Case(what, f"unset {name}", severity, (f"env.{name}", "network.interfaces"))


def interface_wrong(host: Host) -> Cases:
    for name, value, interfaces in chosen_interfaces(host):
        unreachable = all(nic.get("loopback") or nic.get("kind") in VIRTUAL for nic in interfaces)
        if interfaces and unreachable and host.intent.num_hosts > 1:
            best = host.at("network.default_interface")
            kinds = ", ".join(sorted({str(nic.get("kind")) for nic in interfaces}))
            fix = f"export {name}={best}" if best else f"unset {name}"
            what = f"{name}={value} is {kinds}, which other hosts cannot reach"
            yield Case(what, fix, evidence=(f"env.{name}", "network.interfaces"))


def interface_absent(host: Host) -> Cases:
    choice, interfaces = host.intent.config.get("interface"), host.at("network.interfaces")
    if choice is None or interfaces is None:
        return
    chosen = choose_interface(choice, {nic["name"]: nic.get("addresses") or () for nic in interfaces_up(host)})
    if chosen is None or next(nic for nic in interfaces if nic["name"] == chosen[0]).get("loopback"):
        others = [f"{nic['name']} {nic['addresses'][0]}" for nic in interfaces_up(host) if nic.get("addresses")]
        state = "is the loopback" if chosen else "is not up here with an address"
        yield Case(
            f"--interface {choice} {state}; up are {', '.join(others) or 'none'}",
            f"--interface {network_of(own_address(host))}",
        )


def infiniband_off(host: Host) -> Cases:
    active, value = host.active_infiniband, host.env("NCCL_IB_DISABLE")
    if active and is_on(value) and host.intent.num_hosts > 1:
        name, rate = active[0]["name"], active[0].get("rate_gbps") or "n/a"
        yield Case(f"NCCL_IB_DISABLE={value}, and {name} is active at {rate} Gb/s", "unset NCCL_IB_DISABLE")


def infiniband_down(host: Host) -> Cases:
    names = [device["name"] for device in host.at("network.ib_devices") or ()]
    disabled = is_on(host.env("NCCL_IB_DISABLE"))
    if names and not host.active_infiniband and not disabled and host.intent.num_hosts > 1:
        yield Case(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} down", "export NCCL_IB_DISABLE=1")


def port_taken(host: Host) -> Cases:
    other = host.at("network.free_port")
    for port in host.at("network.ports") or ():
        if port.get("free") is False:
            holder = port.get("holder")
            use = f"not usable: {port.get('error')}"
            if holder:
                use = f"used by {holder.get('name') or 'unknown'} (pid {holder['pid']})"
            more = "" if other else "; the next ten are in use as well"
            fix = f"--port {other}" if other else f"kill {holder['pid']}" if holder else "--port 28500"
            yield Case(f"port {port['port']} is {use}{more}", fix)


def port_ephemeral(host: Host) -> Cases:
    low, high = host.at("network.ephemeral_ports") or (0, -1)
    port = host.intent.port
    if port and low <= port <= high:
        yield Case(f"port {port} is in the range of outgoing connections, {low} to {high}", "--port 29500")
