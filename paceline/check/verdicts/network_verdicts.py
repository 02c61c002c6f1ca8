"""
Verdicts on names, interfaces, ports, and on what must be equal on several hosts.

On one host paceline's ranks meet on the loopback and need no name. Scripts that look up their own name fail, and so does every
launch over several hosts. Interface variables: NCCL takes a list of prefixes, `=` before exact names, `^` before excluded ones;
gloo takes a list of exact names.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from paceline.check.verdicts.rules import Case, Cases, Host, Severity, count_names, is_on, short_name, version_of
from paceline.check.verdicts.torch_verdicts import WHEELS
from paceline.units import format_list

SLOW_LOOKUP_S = 1.0
CLOCK_SKEW_S = 5.0  # facts of hosts are gathered within this
SETTINGS = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "USE_LIBUV")
PACKAGES = ("numpy", "tokenizers", "safetensors", "triton", "paceline", "accelerate", "transformers")
SLOW_LINK = 0.6  # of the speed that the interfaces report; one TCP stream reaches 0.94 of it
VIRTUAL = ("bridge", "veth", "tunnel")


def severity_of_names(host: Host) -> Severity:
    if host.intent.num_hosts > 1:
        return "stop"
    return "warn" if host.intent.command in ("run", "check") else "note"


def own_address(host: Host) -> str:
    """Returns the address of the interface with the default route, else of the first that is up."""
    default = host.at("network.default_interface")
    interfaces = [nic for nic in interfaces_up(host) if not nic.get("loopback")]
    interfaces.sort(key=lambda nic: (nic["name"] != default, nic.get("kind") in VIRTUAL))
    addresses = (address for nic in interfaces for address in nic.get("addresses") or () if "." in address)
    return next(addresses, "127.0.0.1")


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


def interface_bridge(host: Host) -> Cases:
    best = host.at("network.default_interface")
    virtual = [
        nic["name"]
        for nic in interfaces_up(host)
        if nic.get("kind") in VIRTUAL and not nic["name"].startswith("docker") and nic.get("addresses")
    ]
    if virtual and best and host.intent.num_hosts > 1 and not host.env("NCCL_SOCKET_IFNAME"):
        fix = f"export NCCL_SOCKET_IFNAME=={best} GLOO_SOCKET_IFNAME={best}"
        yield Case(f"{', '.join(virtual)} are up in addition to {best}", fix)


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


def differing(hosts: Sequence[Host], value: Callable[[Host], Any]) -> dict[Any, list[str]]:
    """Returns the names of the hosts that have each known value; nothing where the hosts agree."""
    names: dict[Any, list[str]] = {}
    for host in hosts:
        key = value(host)
        if key is not None:
            names.setdefault(key, []).append(str(host.at("host.name")))
    return names if len(names) > 1 else {}


def values_by_host(hosts_by_value: dict[Any, list[str]]) -> str:
    items = sorted(hosts_by_value.items(), key=lambda item: str(item[0]))
    return ", ".join(f"{value} on {format_list(names)}" for value, names in items)


def newest(versions: Iterable[Any]) -> str:
    """Returns the highest version: 2.13 is newer than 2.9, although it sorts before it as text."""
    return str(max(versions, key=lambda value: (version_of(str(value)) or (0,), str(value))))


def releases_of(versions: Iterable[str]) -> set[tuple[int, ...]]:
    return {(version_of(version) or ())[:2] for version in versions}


def differs(what: str, path: str, fix: str) -> Callable[[Sequence[Host]], Cases]:
    """Returns the rule that one fact is equal on all hosts. fix: {newest} stands for the highest value."""

    def rule(hosts: Sequence[Host]) -> Cases:
        if values := differing(hosts, lambda host: host.at(path)):
            yield Case(f"{what}: {values_by_host(values)}", fix.format(newest=newest(values)))

    return rule


hosts_nccl = differs("NCCL", "torch.nccl", "pip install --force-reinstall torch")
hosts_cuda = differs("CUDA", "torch.cuda", "pip install --force-reinstall torch")
hosts_driver = differs("driver", "driver.version", "install driver {newest} on all hosts")


def hosts_same(hosts: Sequence[Host]) -> Cases:
    """Compares names and addresses: two hosts may both be called ubuntu, and share the address of a bridge."""
    names: dict[tuple[Any, ...], list[str]] = {}
    for host in hosts:
        if name := host.at("host.name"):
            nics = [nic for nic in interfaces_up(host) if not nic.get("loopback")]
            addresses = frozenset(address for nic in nics for address in nic.get("addresses") or ())
            names.setdefault((name, addresses), []).append(str(host.at("connection.destination") or name))
    for (name, _), destinations in names.items():
        if len(destinations) > 1:
            fix = f"--hosts {destinations[0]}:2 for two ranks there"
            yield Case(f"{format_list(destinations)} are one host, {name}", fix)


def links(hosts: Sequence[Host]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields each measured pair of hosts."""
    for host in hosts:
        for link in host.at("links") or ():
            yield str(host.at("connection.destination")), str(link["to"]), link


def hosts_unconnected(hosts: Sequence[Host]) -> Cases:
    for name, other, link in links(hosts):
        if link["error"] in ("connect", "token", "small"):
            reason = link.get("reason") or "no answer"
            what = f"{name} cannot connect to {other}: {link['address']} port {link['port']}: {reason}"
            yield Case(what, f"on {other}, for a firewall: sudo ufw allow from the address of {name}")
        elif link["error"] == "probe":
            what = f"the link from {name} to {other} was not measured: {link.get('reason')}"
            yield Case(what, "repeat the check", "warn")


def hosts_path_mtu(hosts: Sequence[Host]) -> Cases:
    for name, other, link in links(hosts):
        if link["error"] == "large":
            interface = next((nic for nic in of_address(hosts, link.get("local"))), {})
            what = f"small messages reach {other} from {name}, and large ones do not: the MTU on the way is smaller than theirs"
            yield Case(what, f"sudo ip link set {interface.get('name') or 'eth0'} mtu 1500, on both")


def hosts_link_slow(hosts: Sequence[Host]) -> Cases:
    for name, other, link in links(hosts):
        nics = [nic for address in (link.get("local"), link["address"]) for nic in of_address(hosts, address)]
        nominal = min((nic["speed_mbps"] * 1e6 for nic in nics if nic.get("speed_mbps")), default=None)
        is_real = not any(nic.get("kind") in VIRTUAL for nic in nics)
        if nominal and is_real and link["bits_per_s"] and link["bits_per_s"] < SLOW_LINK * nominal:
            what = f"{name} sends {link['bits_per_s'] / 1e9:.2f} Gb/s to {other}, over interfaces of {nominal / 1e9:g} Gb/s"
            yield Case(what, f"ethtool {nics[0]['name']}, on both; then the cable and the switch between them")


def of_address(hosts: Sequence[Host], address: str | None) -> Iterator[dict[str, Any]]:
    """Yields the interfaces that have this address."""
    for host in hosts:
        for nic in host.at("network.interfaces") or ():
            if address and address.removeprefix("::ffff:") in (nic.get("addresses") or ()):
                yield nic


def hosts_torch(hosts: Sequence[Host]) -> Cases:
    """Another release may use another protocol; another build or patch of the same release does not."""
    if values := differing(hosts, lambda host: host.at("torch.version")):
        release, _, tag = newest(values).partition("+")
        fix = f"pip install torch=={release}" + (f" -i {WHEELS}/{tag}" if tag else "")
        yield Case(f"torch: {values_by_host(values)}", fix, "stop" if len(releases_of(values)) > 1 else "warn")


def hosts_python(hosts: Sequence[Host]) -> Cases:
    if values := differing(hosts, lambda host: host.at("python.version")):
        fix = f"python{'.'.join(newest(values).split('.')[:2])} -m venv .venv"
        yield Case(f"Python: {values_by_host(values)}", fix, "warn" if len(releases_of(values)) > 1 else "note")


def hosts_packages(hosts: Sequence[Host]) -> Cases:
    for name in PACKAGES:
        yield from differs(name, f"packages.{name}", f"pip install {name}=={{newest}}")(hosts)


def hosts_settings(hosts: Sequence[Host]) -> Cases:
    """Compares variables that affect communication or results; interfaces may have different names on each host."""
    hosts = [host for host in hosts if host.at("env") is not None]
    names = {name for host in hosts for name in host.facts["env"] if name.startswith(SETTINGS)}
    for name in sorted(name for name in names if not name.endswith("_SOCKET_IFNAME")):
        if values := differing(hosts, lambda host, name=name: host.facts["env"].get(name, "not set")):  # type: ignore[misc]
            yield Case(f"{name}: {values_by_host(values)}", f"unset {name}")


def hosts_gpus(hosts: Sequence[Host]) -> Cases:
    def cards(host: Host) -> str | None:
        return count_names(sorted(short_name(gpu.get("name")) for gpu in host.gpus)) or None

    if values := differing(hosts, cards):
        fix = "export CUDA_VISIBLE_DEVICES so that each host has the same cards"
        yield Case(f"GPUs: {values_by_host(values)}", fix)


def hosts_code(hosts: Sequence[Host]) -> Cases:
    values = differing(hosts, lambda host: (host.at("tools.code.commit") or "")[:12] or None)
    dirty = [str(host.at("host.name")) for host in hosts if host.at("tools.code.dirty")]
    if values:
        first = next(iter(values))  # of the host that gathers the facts
        yield Case(f"commit of the code: {values_by_host(values)}", f"git fetch && git checkout {first}")
    elif dirty and any(host.at("tools.code.dirty") is False for host in hosts):
        yield Case(f"the code is modified only on {format_list(dirty)}", "git stash")


def hosts_clock(hosts: Sequence[Host]) -> Cases:
    """Compares each host's clock with the time at which its facts arrived, by the clock of the gathering host."""
    skews = []
    for host in hosts:
        unix, received = host.at("host.clock.unix"), host.at("received") or host.at("time")
        if unix is not None and received:
            skews.append((unix - datetime.fromisoformat(received).timestamp(), str(host.at("host.name"))))
    (early_s, early), (late_s, late) = min(skews, default=(0, "")), max(skews, default=(0, ""))
    if late_s - early_s > CLOCK_SKEW_S:
        what = f"the clock of {late} is {late_s - early_s:.0f} s ahead of that of {early}"
        yield Case(what, "sudo timedatectl set-ntp true")


def hosts_mtu(hosts: Sequence[Host]) -> Cases:
    def mtu(host: Host) -> int | None:
        name = host.at("network.default_interface")
        return next((nic["mtu"] for nic in host.at("network.interfaces") or () if nic["name"] == name), None)

    if values := differing(hosts, mtu):
        name = hosts[0].at("network.default_interface")
        yield Case(f"MTU: {values_by_host(values)}", f"sudo ip link set {name} mtu {min(values)}")
