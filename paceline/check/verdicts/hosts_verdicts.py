"""
Verdicts on what must be equal on several hosts, and on the links between them.

A link is measured over the addresses that a launch uses (check/probes/link_probe.py). gloo and NCCL listen on ports that the kernel
chooses, and neither can be limited to a range (gloo issue 54, nccl issue 388): what can is the kernel's own range.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from paceline.check.verdicts.host_verdicts import memory_limit
from paceline.check.verdicts.network_verdicts import VIRTUAL, interface_absent, interfaces_up, network_of
from paceline.check.verdicts.rules import Case, Cases, Host, count_names, fix_for_all, short_name, version_of
from paceline.check.verdicts.torch_verdicts import WHEELS
from paceline.units import format_bytes, format_list

CLOCK_SKEW_S = 1.0  # on a busy host an answer takes as long
SETTINGS = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "USE_LIBUV")
PACKAGES = ("numpy", "tokenizers", "safetensors", "triton", "accelerate", "transformers")
SLOW_LINK = 0.6  # of the speed that the interfaces report; one TCP stream reaches 0.94 of it
SLOW_BITS_PER_S = 100e6  # slow whatever the interfaces report: Fast Ethernet reaches 94 Mb/s
SLOW_WAY = 0.1  # of the other direction
FAR_US = 2000.0  # two hosts on one switch have 50 to 500
UNEQUAL_MEMORY = 0.9  # of the larger: below, the plan leaves a tenth of it idle
INDIRECT = ("tunnel", "wifi")
NO_GPU = "no GPU"


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


def behind(hosts: Sequence[Host], path: str, value: str) -> list[Host]:
    """Returns the hosts on which a fact is known and another one."""
    return [host for host in hosts if host.at(path) not in (None, value)]


def differs(what: str, path: str, fix: str) -> Callable[[Sequence[Host]], Cases]:
    """Returns the rule that one fact is equal on all hosts. fix: {newest} stands for the highest value."""

    def rule(hosts: Sequence[Host]) -> Cases:
        if values := differing(hosts, lambda host: host.at(path)):
            latest = newest(values)
            others = behind(hosts, path, latest)
            yield Case(f"{what}: {values_by_host(values)}", fix_for_all(others, fix.format(newest=latest)))

    return rule


hosts_cuda = differs("CUDA", "torch.cuda", "pip install --force-reinstall torch")
hosts_driver = differs("driver", "driver.version", "install driver {newest} on all hosts")


def hosts_nccl(hosts: Sequence[Host]) -> Cases:
    for case in differs("NCCL", "torch.nccl", "pip install --force-reinstall torch")(hosts):
        yield case if any(host.uses_cuda for host in hosts) else replace(case, severity="note")


def hosts_same(hosts: Sequence[Host]) -> Cases:
    """Compares names and addresses: two hosts may both be called ubuntu, and share the address of a bridge."""
    names: dict[tuple[Any, ...], list[str]] = {}
    for host in hosts:
        if name := host.at("host.name"):
            nics = [nic for nic in interfaces_up(host) if not nic.get("loopback")]
            addresses = frozenset(address for nic in nics for address in nic.get("addresses") or ())
            names.setdefault((name, addresses), []).append(host.name)
    for (name, _), destinations in names.items():
        if len(destinations) > 1:
            user, at, address = destinations[0].rpartition("@")
            fix = f"--hosts {user}{at}{f'[{address}]' if ':' in address else address}:2 for two ranks there"
            yield Case(f"{format_list(destinations)} are one host, {name}", fix)


def links(hosts: Sequence[Host]) -> Iterator[tuple[Host, Host, dict[str, Any]]]:
    """Yields each pair of hosts with its link."""
    by_name = {host.name: host for host in hosts}
    for host in hosts:
        for link in host.at("links") or ():
            if link["to"] in by_name:
                yield host, by_name[link["to"]], link


def interfaces_of(host: Host, other: Host, link: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the interfaces at both ends of a link, as far as they are known."""
    ends = (host, link.get("local")), (other, link["address"])
    return [
        nic
        for end, address in ends
        for nic in end.at("network.interfaces") or ()
        if address and address.removeprefix("::ffff:") in (nic.get("addresses") or ())
    ]


def hosts_unconnected(hosts: Sequence[Host]) -> Cases:
    for host, other, link in links(hosts):
        if any(interface_absent(host)) or any(interface_absent(other)):
            continue  # that is why the link was not measured, or only within a host
        name, peer = host.name, other.name
        reason = link.get("reason") or "no answer"
        if link["error"] == "probe":
            yield Case(f"the link from {name} to {peer} was not measured: {reason}", "repeat the check", "warn")
        elif link["error"] in ("connect", "token", "small") and link.get("store_port") and not link.get("store_error"):
            low, _, high = host.intent.config["ports"].partition("-")
            kernel = other.at("network.ephemeral_ports") or ("n/a", "n/a")
            yield Case(
                f"{name} reaches port {link['store_port']} of {peer}, but not port {link['port']}: gloo and NCCL listen on"
                f" ports that the kernel chooses, from {kernel[0]} to {kernel[1]}",
                f"on each host: sudo sysctl -w net.ipv4.ip_local_port_range='{low} {high or low}'",
            )
        elif link["error"] in ("connect", "token", "small"):
            what = f"{name} cannot connect to {peer}: {link['address']} port {link['port']}: {reason}"
            yield Case(what, f"on {peer}, for a firewall: sudo ufw allow from the address of {name}")


def hosts_store_port(hosts: Sequence[Host]) -> Cases:
    """The store is on the host of rank 0: the one where the command is typed, else the first."""
    first = next((host for host in hosts if host.at("connection.here")), hosts[0])
    for host, other, link in links(hosts):
        ports, name, peer = host.intent.config.get("ports"), host.name, other.name
        if host is first and link.get("own_store_port", 0) is None:
            what = f"none of the ports {ports} is free on {name}, where the ranks meet"
            yield Case(what, f"other --ports, or wait for the program that has them: ss -ltnp on {name} shows it")
            return
        if error := link.get("store_error"):
            port = f"port {link['store_port']} of {peer}" if link["store_port"] else f"ports {ports} of {peer}"
            fix = f"on {peer}: sudo ufw allow {str(ports).replace('-', ':')}/tcp"
            yield Case(f"{name} cannot use {port} for the store: {error}", fix)


def hosts_address(hosts: Sequence[Host]) -> Cases:
    """A launch uses the address by which ssh reaches a host; the other hosts may be in another network than this one."""
    for host, other, link in links(hosts):
        if link["bits_per_s"] and link.get("tried"):
            names = {nic["name"] for nic in interfaces_of(host, other, link)}
            yield Case(
                f"{host.name} cannot connect to {other.name} at {link['tried'][0]}, where it is known here;"
                f" {link['address']} answers",
                f"--interface {names.pop() if len(names) == 1 else network_of(link['address'])}",
            )


def hosts_path_mtu(hosts: Sequence[Host]) -> Cases:
    for host, other, link in links(hosts):
        if link["error"] == "large":
            interface = next(iter(interfaces_of(host, other, link)), {})
            what = (
                f"small messages reach {other.name} from {host.name}, and large ones do not: the MTU on the way is"
                " smaller than theirs"
            )
            yield Case(what, f"sudo ip link set {interface.get('name') or 'eth0'} mtu 1500, on both")


def nominal_bits_per_s(nics: Sequence[dict[str, Any]]) -> float | None:
    """Returns what the slowest interface of a link reports; None where one is virtual, whose figure means nothing."""
    if any(nic.get("kind") in VIRTUAL for nic in nics):
        return None
    return min((nic["speed_mbps"] * 1e6 for nic in nics if nic.get("speed_mbps")), default=None)


def hosts_link_slow(hosts: Sequence[Host]) -> Cases:
    for host, other, link in links(hosts):
        nics, name, peer = interfaces_of(host, other, link), host.name, other.name
        nominal = nominal_bits_per_s(nics)
        there, back = (link["bits_per_s"], name, peer), (link.get("back_bits_per_s"), peer, name)
        for (speed, sender, receiver), (opposite, *_) in ((there, back), (back, there)):
            if not speed:
                continue
            if nominal and speed < SLOW_LINK * nominal:
                than = f", over interfaces of {nominal / 1e9:g} Gb/s"
            elif opposite and speed < SLOW_WAY * opposite:
                than = f", which sends {format_rate(opposite)} back"
            elif speed < SLOW_BITS_PER_S:
                than = ""
            else:
                continue
            interface = nics[0]["name"] if nics else "eth0"
            limits = "" if nominal else f" and tc qdisc show dev {interface}"
            fix = f"ethtool {interface}{limits}, on both; then the cable and the switch between them"
            yield Case(f"{sender} sends {format_rate(speed)} to {receiver}{than}", fix)
            break


def format_rate(bits_per_s: float) -> str:
    """Returns `9.41 Gb/s`, or Mb/s for less than a tenth of one."""
    return f"{bits_per_s / 1e9:.2f} Gb/s" if bits_per_s >= SLOW_BITS_PER_S else f"{bits_per_s / 1e6:.3g} Mb/s"


def hosts_link_indirect(hosts: Sequence[Host]) -> Cases:
    for host, other, link in links(hosts):
        for nic in interfaces_of(host, other, link):
            if nic.get("kind") in INDIRECT:
                wired = next(
                    (n["name"] for n in interfaces_up(host) if n["kind"] == "ethernet" and n["addresses"]), None
                )
                what = f"{host.name} and {other.name} meet over {nic['name']}, which is {nic['kind']}"
                yield Case(what, f"--interface {wired}" if wired else "connect them by a cable")
                break


def hosts_link_far(hosts: Sequence[Host]) -> Cases:
    for host, other, link in links(hosts):
        if link["rtt_us"] and link["rtt_us"] > FAR_US:
            what = f"a message from {host.name} to {other.name} and back takes {link['rtt_us'] / 1000:.1f} ms"
            yield Case(what, "use hosts on one switch, or a larger total_batch_size: fewer steps, so fewer messages")


def hosts_torch(hosts: Sequence[Host]) -> Cases:
    """Another release may use another protocol; another build or patch of the same release does not."""
    if values := differing(hosts, lambda host: host.at("torch.version")):
        release, _, tag = newest(values).partition("+")
        install = f"pip install torch=={release}" + (f" -i {WHEELS}/{tag}" if tag else "")
        fix = fix_for_all(behind(hosts, "torch.version", newest(values)), install)
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
    """A host without GPUs beside others would bring the whole run to the CPU."""

    def cards(host: Host) -> str | None:
        if host.at("gpus") is None:
            return None
        return count_names(sorted(short_name(gpu.get("name")) for gpu in host.gpus)) or NO_GPU

    values = differing(hosts, cards) if host_device(hosts) != "cpu" else {}
    if NO_GPU in values:
        fix = "--device cpu trains on the CPUs of all; or leave the host out, or install its driver"
        yield Case(f"GPUs: {values_by_host(values)}", fix, "stop")
    elif values:
        yield Case(
            f"GPUs: {values_by_host(values)}", "export CUDA_VISIBLE_DEVICES so that each host has the same cards"
        )


def host_device(hosts: Sequence[Host]) -> str | None:
    """Returns the device that the user asked for."""
    device: str | None = hosts[0].intent.config.get("device")
    return device


def hosts_memory(hosts: Sequence[Host]) -> Cases:
    uses_cuda = all(host.gpus for host in hosts) and host_device(hosts) != "cpu"
    sizes: dict[str, int] = {}
    for host in hosts:
        cards = [gpu["memory_total_bytes"] for gpu in host.gpus if gpu.get("memory_total_bytes")]
        size = min(cards, default=None) if uses_cuda else memory_limit(host.facts)[0]
        if size:
            sizes[host.name] = size
    if sizes and min(sizes.values()) < UNEQUAL_MEMORY * max(sizes.values()):
        what = "GPU memory" if uses_cuda else "memory"
        text = ", ".join(f"{format_bytes(size)} on {name}" for name, size in sizes.items())
        yield Case(
            f"{what}: {text}", "leave the smallest host out, if the model needs more", None if uses_cuda else "note"
        )


def hosts_clock(hosts: Sequence[Host]) -> Cases:
    for host, other, link in links(hosts):
        ahead_s = link.get("clock_s") or 0.0
        if abs(ahead_s) > CLOCK_SKEW_S:
            late, early = (other, host) if ahead_s > 0 else (host, other)
            what = f"the clock of {late.name} is {abs(ahead_s):.1f} s ahead of that of {early.name}"
            yield Case(what, "sudo timedatectl set-ntp true, on both")


def clock_free(hosts: Sequence[Host]) -> Cases:
    """Only where the clocks were not compared: hosts_clock judges by how far they are apart."""
    compared = {end.name for *ends, link in links(hosts) if link.get("clock_s") is not None for end in ends}
    free = [host for host in hosts if host.at("host.clock.synchronized") is False and host.name not in compared]
    if free:
        what = f"no time service keeps the clock{'s' * (len(free) > 1)} of {format_list([host.name for host in free])}"
        yield Case(what, f"sudo timedatectl set-ntp true, on {format_list([host.name for host in free])}")


def hosts_mtu(hosts: Sequence[Host]) -> Cases:
    """Compares the interfaces of each link; where none was measured, those of the default routes."""
    for host, other, link in links(hosts):
        nics = interfaces_of(host, other, link)
        sizes = {end.name: nic["mtu"] for end, nic in zip((host, other), nics, strict=False)}
        if len(nics) == 2 and len(set(sizes.values())) > 1:
            text = ", ".join(f"{size} on {name}" for name, size in sizes.items())
            yield Case(f"MTU: {text}", f"sudo ip link set {nics[0]['name']} mtu {min(sizes.values())}, on both")
            return

    def mtu(host: Host) -> int | None:
        name = host.at("network.default_interface")
        return next((nic["mtu"] for nic in host.at("network.interfaces") or () if nic["name"] == name), None)

    if not any(links(hosts)) and (values := differing(hosts, mtu)):
        name = hosts[0].at("network.default_interface")
        yield Case(f"MTU: {values_by_host(values)}", f"sudo ip link set {name} mtu {min(values)}")
