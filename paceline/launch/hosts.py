"""The list of hosts that `--hosts` gives, with what a config says about them. The one that this process runs on needs no ssh."""

import getpass
import ipaddress
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

from paceline.check.probes.network_probe import own_addresses
from paceline.config import MAX_HOSTS, Config
from paceline.errors import UsageError
from paceline.launch.meeting import NodeLink
from paceline.launch.ssh import ssh_name
from paceline.slurm import allocation, numbers_of
from paceline.units import format_number_of

EXAMPLE = "--hosts ada,bob, user@ada, ada:2 for two ranks, node[1-4], [fe80::1], or a file with a host on each line"
HOST_KEYS = ("hosts", "python", "interface", "ports")
FILE_NAME = re.compile(r"(?i)[^,\[@:]+\.(txt|hosts|list|lst|conf|cfg)|(host|machine|node)_?file")  # no name of a host
ENTRY = re.compile(
    r"(?:(?P<user>[^@\s:]+)@)?(?:\[(?P<ipv6>[0-9A-Fa-f:.%\w]*:[^\]]*)\]|(?P<host>[^:@]+))(?::(?P<nproc>\d+))?"
)
FILE_LINE = re.compile(
    r"(?P<entry>\S+)(?:\s+slots\s*=\s*(?P<slots>\d+))?(?:\s+max[_-]slots\s*=\s*\d+)?"
)  # Open MPI's too
UNSAFE = re.compile(r"^-|[\s,'\"`$&|;<>(){}\\!*?\[\]]|[^ -~\w]")  # in a host's or a user's name
RANGE = re.compile(r"\[([\d,-]+)\]")


@dataclass(frozen=True)
class HostEntry:
    """One host of the list."""

    host: str  # a name, an alias of ~/.ssh/config, or an address
    user: str | None = None
    nproc: int | None = None  # ranks there
    # how a process is started there; srun: it is a node of this Slurm job; joined: its own command has connected to this one
    way: Literal["ssh", "srun", "joined"] = "ssh"
    node: NodeLink | None = field(default=None, compare=False, repr=False)  # of a host that has joined

    @property
    def destination(self) -> str:
        return self.host if self.user is None else f"{self.user}@{self.host}"

    @property
    def text(self) -> str:
        """Returns the entry as --hosts takes it, without its ranks."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.user is None else f"{self.user}@{host}"


def parse_hosts(text: str) -> list[HostEntry]:
    """Returns the hosts that --hosts names, or that the file names which it gives; raises UsageError, also for duplicates."""
    path = Path(text)
    if path.is_file():
        entries = [entry for number, line in host_lines(path) for entry in parse_line(line, f"{path}:{number}")]
        empty = f"{path} names no host"
    elif path.is_fifo():
        raise UsageError(
            f"{text} is a pipe, which can be read only once", fix="write the hosts into a file, and --hosts FILE"
        )
    elif "/" in text and "://" not in text:
        raise UsageError(f"{text}: {'not a regular file' if path.exists() else 'no such file'}", fix=EXAMPLE)
    elif FILE_NAME.fullmatch(text):
        raise UsageError(f"--hosts: no file {text} in {Path.cwd()}", fix=EXAMPLE)
    else:
        words = [word.strip() for word in re.split(r",(?![^\[]*\])", text)]
        entries = [entry for word in words if word for entry in parse_entry(word, "--hosts")]
        empty = "--hosts names no host"
    if not entries:
        raise UsageError(empty, fix=EXAMPLE)
    for entry in entries:
        if sum(other.host == entry.host for other in entries) > 1:
            raise UsageError(f"{entry.host} is listed twice", fix=f"once, with its ranks: {entry.text}:2")
    return entries


def ranks_of(entries: Sequence[HostEntry]) -> int | None:
    """Returns the ranks on each host, None where the list names none; raises UsageError where hosts have different numbers."""
    first = entries[0]
    for entry in entries:
        if entry.nproc != first.nproc:
            counts = [
                (host, format_number_of(host.nproc, "rank") if host.nproc else "no number of ranks")
                for host in (first, entry)
            ]
            what = ", ".join(f"{host.host} has {count}" for host, count in counts)
            raise UsageError(what, fix="the same number on every host of the list, or none there and --nproc N for all")
    return first.nproc


def hosts_of(config: Config, nodes: Sequence[HostEntry] = ()) -> tuple[list[HostEntry], Config]:
    """Returns the hosts of a config, none where it names none, and the config with the ranks on each that the list gives.

    nodes: those that have joined (launch/connect.py), in place of a list. Else in a Slurm job they are its nodes, where it has
    several: the config goes on without their names, as a requeued job has others.
    """
    if nodes:
        return nodes_of(config, nodes)
    place = allocation()
    if place and (config.hosts is None or config.hosts.isdecimal()):
        count = int(config.hosts or len(place.nodes))
        if not 1 <= count <= len(place.nodes):
            has = format_number_of(len(place.nodes), "node")
            raise UsageError(
                f"--hosts {count}, and job {place.job_id} has {has}", fix="leave --hosts out: all are taken"
            )
        if count > 1 or place.node is None:
            parse_ports(config.ports)
            check_interface(config.interface)
            return [HostEntry(node, way="srun") for node in place.nodes[:count]], config
        config = replace(config, hosts=None)
    if config.hosts is None:
        for key in HOST_KEYS[1:]:
            if getattr(config, key) is not None:
                raise UsageError(f"--{key} is about several hosts", fix=f"--hosts ada,bob, or leave --{key} out")
        return [], config
    entries = parse_hosts(config.hosts)
    if place and all(entry.user is None and entry.host in place.nodes for entry in entries):
        entries = [replace(entry, way="srun") for entry in entries]
    parse_ports(config.ports)
    check_interface(config.interface)
    nproc = ranks_of(entries)
    if nproc is not None and config.nproc not in (None, nproc):
        raise UsageError(f"--hosts gives {nproc} ranks to a host, --nproc {config.nproc}", fix="leave one of them out")
    here = [entry for entry in entries if is_this_host(entry)]
    if len(here) > 1:
        what = f"{here[0].host} and {here[1].host} are both this host"
        raise UsageError(what, fix=f"one of them, with its ranks: {here[0].text}:2")
    names = ",".join(entry.text for entry in entries)  # the file may change, or lie on another machine
    return entries, replace(config, hosts=names, nproc=config.nproc if nproc is None else nproc)


def nodes_of(config: Config, nodes: Sequence[HostEntry]) -> tuple[list[HostEntry], Config]:
    """Returns the nodes that have joined, and the config with the ranks on each that their launcher gives, unless it has them."""
    for key in ("hosts", "python"):
        if (value := getattr(config, key)) is not None:
            what = (
                f"--{key} {value} is for hosts that this command reaches by itself, and {len(nodes)} nodes have joined"
            )
            raise UsageError(what, fix=f"leave --{key} out (--{key} auto, if the config has it), or --no-join")
    parse_ports(config.ports)
    check_interface(config.interface)
    return list(nodes), replace(config, nproc=nodes[0].nproc if config.nproc is None else config.nproc)


def parse_ports(text: str | None) -> tuple[int, int] | None:
    """Returns the first and the last port of '29400-29500'; None for any."""
    if text is None:
        return None
    low, _, high = text.partition("-")
    if not low.isdecimal() or not (high or low).isdecimal() or not 1024 <= int(low) <= int(high or low) <= 65_535:
        raise UsageError(f"--ports {text} is not a range of ports", fix="--ports 29400-29500")
    return int(low), int(high or low)


def check_interface(choice: str | None) -> None:
    """Raises UsageError for a network that is none; whether an interface exists, each host says."""
    if choice is not None and "/" in choice:
        try:
            ipaddress.ip_network(choice, strict=False)
        except ValueError:
            raise UsageError(f"--interface {choice} is not a network", fix="--interface eth0, or 10.0.0.0/24") from None


def host_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields number and text of each line of a host file that is not empty or a comment."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}", fix="a text file in UTF-8 with one host on each line"
        ) from error
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].strip():
            yield number, words


def parse_line(line: str, place: str) -> list[HostEntry]:
    match = FILE_LINE.fullmatch(line)
    if match is None:
        raise UsageError(
            f"{place}: {line!r} is not a host and its number of ranks", fix="HOST, HOST:2 or HOST slots=2 on each line"
        )
    entries = parse_entry(match["entry"], place)
    if match["slots"] is None:
        return entries
    if entries[0].nproc is not None:
        raise UsageError(f"{place}: {line!r} gives the number of ranks twice", fix="HOST:2 or HOST slots=2")
    return parse_entry(f"{match['entry']}:{match['slots']}", place)


def parse_entry(word: str, place: str) -> list[HostEntry]:
    """Returns the hosts of one word; a range stands for several."""
    entries = []
    for name in expand_range(word, place):
        match = ENTRY.fullmatch(name)
        host = match and (match["ipv6"] or match["host"])
        if not match or not host or UNSAFE.search(host) or UNSAFE.search(match["user"] or ""):
            ipv6 = (
                f"an IPv6 address stands in brackets: [{word}]; "
                if word.count(":") > 1 and not set("[/") & set(word)
                else ""
            )
            raise UsageError(f"{place}: {word!r} is not a host", fix=ipv6 + EXAMPLE)
        if host.isdecimal():
            raise UsageError(f"{place}: {host} is a number, not a host", fix=EXAMPLE)
        nproc = int(match["nproc"]) if match["nproc"] else None
        if nproc is not None and not 1 <= nproc <= 64:
            ssh = f"; a port of ssh is in ~/.ssh/config: Host {host}, Port {nproc}" if nproc else ""
            raise UsageError(f"{place}: {nproc} ranks on {host}", fix=f"1 to 64 ranks on a host{ssh}")
        entries.append(HostEntry(host, match["user"], nproc))
    return entries


def expand_range(word: str, place: str) -> list[str]:
    """Returns node1 to node4 for node[1-4]; leading zeros stay: node[08-10]."""
    match = RANGE.search(word)
    if match is None:
        return [word]
    numbers: list[str] = []
    for part in match[1].split(","):
        low, _, high = part.partition("-")
        if not low.isdecimal() or not (high or low).isdecimal() or int(high or low) < int(low):
            raise UsageError(f"{place}: {match[0]} in {word!r} is not a range", fix="node[1-4], node[01-04,7]")
        if int(high or low) - int(low) + len(numbers) >= MAX_HOSTS:
            raise UsageError(f"{place}: {word!r} stands for more than {MAX_HOSTS:,} hosts", fix="node[1-4]")
        numbers += numbers_of(part)
    return [word[: match.start()] + number + word[match.end() :] for number in numbers]


@cache
def is_this_host(entry: HostEntry) -> bool:
    """Whether the entry is the host that this process runs on, as the same user: it needs no ssh."""
    if entry.way == "joined":
        return False
    if entry.way == "srun":
        place = allocation()
        return entry.host == ((place and place.node) or socket.gethostname().partition(".")[0])
    if entry.user is not None and entry.user != getpass.getuser():
        return False
    name = socket.gethostname()
    if entry.host in ("localhost", "127.0.0.1", "::1", name, name.partition(".")[0]):
        return True
    own = own_addresses()
    with suppress(OSError):
        addresses = socket.getaddrinfo(ssh_name(entry.destination), None, type=socket.SOCK_STREAM)
        return any(address[0] in own for *_, address in addresses)
    return False
