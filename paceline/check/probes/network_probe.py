"""
Names, interfaces, routes and ports of this host. `python -m paceline.check.probes.network_probe`.

Nothing is sent but what a look-up of the own name sends, and that has its own deadline: a dead name server answers never.
"""

import array
import errno
import fcntl
import ipaddress
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.check.probes.facts import Json, answer
from paceline.errors import PacelineError
from paceline.plan.host import names_in, process_name, read_int, read_text

RESOLVE_DEADLINE_S = 2.0
NUM_PORTS = 10  # that are tried after the requested one
SIOCETHTOOL, ETHTOOL_GDRVINFO, DRVINFO_BYTES = 0x8946, 3, 196  # linux/sockios.h, linux/ethtool.h
IFF_UP, IFF_LOOPBACK = 0x1, 0x8
RTF_UP = 0x1
LISTENING = "0A"
LINK_LOCAL = ("fe80:", "169.254.")
ARPHRD = {1: "ethernet", 32: "infiniband", 772: "loopback"}  # linux/if_arp.h
ARPHRD_TUNNELS = {512, 768, 769, 776, 778, 823, 65534}  # ppp, ipip, ip6tnl, sit, gre, ip6gre, none (tun, wireguard)
DEVTYPES = {"wlan": "wifi", "bridge": "bridge", "bond": "bond", "vlan": "ethernet"}
DRIVERS = {
    "veth": "veth",
    "bridge": "bridge",
    "bonding": "bond",
    **dict.fromkeys(("tun", "wireguard", "vxlan"), "tunnel"),
}


def probe_network(request: Json) -> Json:
    """Returns the facts of the network. Request: port (None: no port is probed)."""
    port = request.get("port")
    others = () if port is None else range(port + 1, min(port + 1 + NUM_PORTS, 65536))
    ephemeral = (read_text("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    iommu = Path("/sys/class/iommu")
    return {
        "network": {
            **resolve_own_name(),
            "interfaces": probe_interfaces(),
            "default_interface": default_interface(),
            "ib_devices": probe_ib_devices(Path("/sys/class/infiniband")),
            "ports": [] if port is None else [probe_port(port)],
            "free_port": next((other for other in others if port_error(other) is None), None),
            "ephemeral_ports": [int(text) for text in ephemeral] if len(ephemeral) == 2 else None,
            "iommu": bool(names_in(iommu)) if iommu.is_dir() else None,
            "acs": None,  # in PCI configuration space, which root alone may read
        }
    }


def resolve_own_name() -> dict[str, Any]:
    """Returns hostname, addresses, resolve_error and resolve_s: every rank looks up this host's name to meet there."""
    hostname = socket.gethostname()
    started = time.monotonic()
    facts: dict[str, Any] = {"addresses": None, "resolve_error": f"no answer in {RESOLVE_DEADLINE_S:.0f} s"}

    def look_up() -> None:
        nonlocal facts
        try:
            entries = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            facts = {"addresses": [], "resolve_error": getattr(error, "strerror", None) or str(error)}
            return
        facts = {"addresses": list(dict.fromkeys(str(entry[4][0]) for entry in entries)), "resolve_error": None}

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(RESOLVE_DEADLINE_S)
    return {"hostname": hostname, **facts, "resolve_s": round(time.monotonic() - started, 4)}


def probe_interfaces() -> list[dict[str, Any]]:
    addresses, interfaces = interface_addresses(), []
    for _, name in socket.if_nameindex():
        folder, driver = Path("/sys/class/net", name), ethtool_driver(name)
        flags = int(read_text(folder / "flags") or "0", 16)
        interfaces.append(
            {
                "name": name,
                "up": bool(flags & IFF_UP) and read_text(folder / "operstate") not in ("down", "lowerlayerdown"),
                "loopback": bool(flags & IFF_LOOPBACK),
                "kind": interface_kind(folder, driver=driver),
                "addresses": None if addresses is None else addresses.get(name, []),
                "mtu": read_int(folder / "mtu"),
                "speed_mbps": max(0, read_int(folder / "speed") or 0) or None,  # -1: not known to the driver
                "driver": driver,
            }
        )
    return interfaces


def interface_kind(folder: Path, *, driver: str | None) -> str:
    """Returns the kind that the kernel reports; the name says nothing: eth0 may be anything."""
    number = read_int(folder / "type")
    uevent = dict(line.partition("=")[::2] for line in (read_text(folder / "uevent") or "").splitlines())
    if (folder / "wireless").is_dir() or (folder / "phy80211").exists():
        return "wifi"
    if (folder / "bridge").is_dir():
        return "bridge"
    if (folder / "bonding").is_dir():
        return "bond"
    if (folder / "tun_flags").exists() or number in ARPHRD_TUNNELS:
        return "tunnel"
    if uevent.get("DEVTYPE"):
        return DEVTYPES.get(uevent["DEVTYPE"], "tunnel")  # vxlan, gre, geneve, wireguard, ...
    if driver in DRIVERS:
        return DRIVERS[driver]
    kind = ARPHRD.get(number or -1, "other")
    virtual = kind == "ethernet" and folder.is_dir() and not (folder / "device").exists()
    return "other" if virtual and not any(name.startswith("lower_") for name in names_in(folder)) else kind


def own_addresses() -> list[str]:
    """Returns the addresses of all interfaces of this host."""
    return [address for nic in (interface_addresses() or {}).values() for address in nic]


def interface_addresses() -> dict[str, list[str]] | None:
    """Returns the IPv4 and IPv6 addresses of every interface, without the zone; None without psutil."""
    try:
        import psutil  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return None
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def link_address() -> str | None:
    """Returns the address of this host by which the supervisor reaches it.

    It is that of a connection on stdin, that on the way to srun, or that of the ssh server.
    """
    if stat.S_ISSOCK(os.fstat(0).st_mode):
        with socket.socket(fileno=os.dup(0)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                return str(connection.getsockname()[0]).removeprefix("::ffff:").partition("%")[0]
    if launcher := os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):  # a step; the job may have been started over ssh
        return route_to(launcher)
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else None


def route_to(address: str) -> str | None:
    """Returns this host's own address on the way to another one; nothing is sent."""
    with suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    return None


def interface_to(address: str) -> str | None:
    """Returns the name of the interface by which this host reaches an address; None where there is no way."""
    own, nics = route_to(address), interface_addresses() or {}
    return next((name for name, addresses in nics.items() if own in addresses), None)


def choose_interface(choice: str, nics: Mapping[str, Sequence[str]]) -> tuple[str, str] | None:
    """Returns name and address of the interface that --interface means: its name, or a network in which it has an address.

    IPv4 comes first. None where no interface fits, or where it has no address that other hosts reach. nics: addresses by name.
    """
    for name, addresses in nics.items():
        for address in sorted(addresses, key=lambda address: ":" in address):
            if "/" in choice:
                fits = ipaddress.ip_address(address) in ipaddress.ip_network(choice, strict=False)
            else:
                fits = name == choice and not address.startswith(LINK_LOCAL)
            if fits:
                return name, address
    return None


def interface_here(choice: str) -> tuple[str, str]:
    """Returns name and address of the interface on this host; raises PacelineError where there is none."""
    nics = interface_addresses() or {}
    if chosen := choose_interface(choice, nics):
        return chosen
    others = ", ".join(f"{name} {addresses[0]}" for name, addresses in nics.items() if addresses)
    fix = "--interface NAME of one of them, or a network such as 10.0.0.0/24"
    raise PacelineError(f"no interface {choice} with an address; there are {others}", fix=fix)


def interface_env(reach: str | None, choice: str | None) -> dict[str, str]:
    """Returns which network interface gloo and NCCL use: the chosen one, else that by which this host reaches an address.

    A variable that the user has set on this host stays, except beside --interface. NCCL takes a name without `=` as a prefix.
    """
    name = interface_here(choice)[0] if choice else interface_to(reach) if reach else None
    if name is None:
        return {}
    env = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return env if choice else {key: value for key, value in env.items() if key not in os.environ}


def ethtool_driver(name: str) -> str | None:
    """Returns the kernel driver behind an interface: `virtio_net`, `veth`, `r8169`."""
    drvinfo = array.array("B", struct.pack("I", ETHTOOL_GDRVINFO).ljust(DRVINFO_BYTES, b"\0"))
    ifreq = struct.pack("16sP16x", name.encode(), drvinfo.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, SIOCETHTOOL, ifreq)
        except OSError:
            return None
    return drvinfo.tobytes()[4:36].partition(b"\0")[0].decode(errors="replace") or None


def default_interface() -> str | None:
    """Returns the interface of the default route, by IPv4 or else by IPv6; of several, that with the smallest metric."""
    routes = [line.split() for line in (read_text("/proc/net/route") or "").splitlines()[1:]]
    v4 = [(int(r[6]), r[0]) for r in routes if r[1] == "00000000" and r[7] == "00000000" and int(r[3], 16) & RTF_UP]
    routes = [line.split() for line in (read_text("/proc/net/ipv6_route") or "").splitlines()]
    v6 = [(int(r[5], 16), r[9]) for r in routes if r[0] == "0" * 32 and r[1] == "00" and r[9] != "lo"]
    return min(v4 or v6, default=(0, None))[1]


def probe_ib_devices(folder: Path) -> list[dict[str, Any]]:
    """Returns every port of every InfiniBand or RoCE device."""
    devices = []
    for device in names_in(folder):
        interfaces = names_in(folder / device / "device" / "net")
        for port in names_in(folder / device / "ports"):
            ports = folder / device / "ports" / port
            rate = (read_text(ports / "rate") or "").split()  # "100 Gb/sec (4X EDR)"
            devices.append(
                {
                    "name": device,
                    "port": int(port),
                    "state": (read_text(ports / "state") or "").rpartition(": ")[2] or None,  # "4: ACTIVE"
                    "rate_gbps": float(rate[0]) if rate else None,
                    "link_layer": read_text(ports / "link_layer"),
                    "interface": interfaces[0] if interfaces else None,
                }
            )
    return devices


def probe_port(port: int) -> dict[str, Any]:
    error = port_error(port)
    holder = port_holder(port) if error else None
    return {"port": port, "free": error is None, "error": error, "holder": holder}


def port_error(port: int) -> str | None:
    """Returns why a store cannot listen on all addresses, as torch's does, by IPv6 and IPv4 or by IPv4 alone; None if it can."""
    for family in (socket.AF_INET6, socket.AF_INET):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just closed is free
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                listener.bind(("", port))
                listener.listen(1)
            return None
        except (OSError, OverflowError) as error:
            number = getattr(error, "errno", None)
            if family == socket.AF_INET6 and number in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                continue  # a kernel without IPv6
            return os.strerror(number) if number else str(error)
    return None


def port_holder(port: int) -> dict[str, Any] | None:
    """Returns the process that listens there; None where it is not visible (another user's, another container's)."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for fields in (line.split() for line in (read_text(table) or "").splitlines()[1:]):
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == LISTENING:
                sockets.add(f"socket:[{fields[9]}]")
    if not sockets:
        return None
    for pid in (name for name in names_in("/proc") if name.isdigit()):
        for fd in names_in(f"/proc/{pid}/fd"):
            try:
                if os.readlink(f"/proc/{pid}/fd/{fd}") in sockets:  # noqa: PTH115
                    return {"pid": int(pid), "name": process_name(int(pid))}
            except OSError:
                continue  # it was closed or ended in the meantime
    return None


if __name__ == "__main__":
    answer(probe_network)
