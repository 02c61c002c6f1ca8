"""
The hosts of a launch: the list that `--hosts` gives, the facts of each, and how they reach each other.

The host that this process runs on needs no ssh. The others are reached by launch/ssh.py; one that does not answer has facts that
say why, so the verdicts about it are as pure as all others.
"""

import getpass
import ipaddress
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations, repeat
from pathlib import Path
from typing import Any, TextIO

import psutil

from paceline.check.probes.facts import AUTO, gather_facts
from paceline.check.probes.network_probe import route_to
from paceline.check.ready import (
    CheckResult,
    intent_of_each,
    judge_facts,
    machine_of_hosts,
    report_and_refuse,
    start_gathering,
    training_intent,
)
from paceline.check.verdicts.rules import Facts, Intent, at
from paceline.config import Config, cache_dir
from paceline.errors import PacelineError, UsageError
from paceline.launch.ssh import ModuleProcess, SshModule, ssh_name
from paceline.options import ResumeOptions, TrainOptions
from paceline.plan.machine import Machine, probe_machine
from paceline.plan.planner import Plan
from paceline.rundir import RunDir
from paceline.terminal import progress_line

FACTS, LINKS = "paceline.check.probes.facts", "paceline.check.probes.link_probe"
UNKNOWN_LINK: dict[str, Any] = {"port": 0, "tried": [], "error": "probe"}
UNKNOWN_LINK |= dict.fromkeys(("address", "rtt_us", "bits_per_s", "back_bits_per_s", "mtu"))
EXAMPLE = "--hosts ada,bob, user@ada, ada:2 for two ranks, node[1-4], [fe80::1], or a file with a host on each line"
HOST_KEYS = ("hosts", "python", "interface", "ports")
MAX_HOSTS = 1024
ENTRY = re.compile(
    r"(?:(?P<user>[^@\s:]+)@)?(?:\[(?P<ipv6>[0-9A-Fa-f:.%\w]*:[^\]]*)\]|(?P<host>[^:@]+))(?::(?P<nproc>\d+))?"
)
FILE_LINE = re.compile(r"(?P<entry>\S+)(?:\s+slots\s*=\s*(?P<slots>\d+))?")
UNSAFE = re.compile(r"^-|[\s'\"`$&|;<>(){}\\!*?\[\]]|[^ -~\w]")  # in a host's or a user's name
RANGE = re.compile(r"\[([\d,-]+)\]")


@dataclass(frozen=True)
class HostEntry:
    """One host of the list."""

    host: str  # a name, an alias of ~/.ssh/config, or an address
    user: str | None = None
    nproc: int | None = None  # ranks there

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
    elif "/" in text:
        raise UsageError(f"{text}: no such file", fix=EXAMPLE)
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
            words = [f"{name.host} has {name.nproc or 'no number of'} ranks" for name in (first, entry)]
            raise UsageError(", ".join(words), fix="the same number on every host, or --nproc N for all")
    return first.nproc


def hosts_of(config: Config) -> tuple[list[HostEntry], Config]:
    """Returns the hosts of a config, none where it names none, and the config with the ranks on each that the list gives."""
    if config.hosts is None:
        for key in HOST_KEYS[1:]:
            if getattr(config, key) is not None:
                raise UsageError(f"--{key} is about several hosts", fix=f"--hosts ada,bob, or leave --{key} out")
        return [], config
    entries = parse_hosts(config.hosts)
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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", fix="a text file with one host on each line") from error
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].strip():
            yield number, words


def parse_line(line: str, place: str) -> list[HostEntry]:
    match = FILE_LINE.fullmatch(line)
    if match is None:
        raise UsageError(f"{place}: {line!r} is not a host", fix="HOST, HOST:2 or HOST slots=2 on each line")
    suffix = f":{match['slots']}" if match["slots"] else ""
    return parse_entry(match["entry"] + suffix, place)


def parse_entry(word: str, place: str) -> list[HostEntry]:
    """Returns the hosts of one word; a range stands for several."""
    entries = []
    for name in expand_range(word, place):
        match = ENTRY.fullmatch(name)
        host = match and (match["ipv6"] or match["host"])
        if not match or not host or UNSAFE.search(host) or UNSAFE.search(match["user"] or ""):
            ipv6 = f"an IPv6 address stands in brackets: [{word}]; " if word.count(":") > 1 and "[" not in word else ""
            raise UsageError(f"{place}: {word!r} is not a host", fix=ipv6 + EXAMPLE)
        if host.isdecimal():
            raise UsageError(f"{place}: {host} is a number, not a host", fix=EXAMPLE)
        nproc = int(match["nproc"]) if match["nproc"] else None
        if nproc is not None and not 1 <= nproc <= 64:
            raise UsageError(f"{place}: {nproc} ranks on {host}", fix="1 to 64 ranks on a host")
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
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return [word[: match.start()] + number + word[match.end() :] for number in numbers]


@cache
def is_this_host(entry: HostEntry) -> bool:
    """Whether the entry is the host that this process runs on, as the same user: it needs no ssh."""
    if entry.user is not None and entry.user != getpass.getuser():
        return False
    name = socket.gethostname()
    if entry.host in ("localhost", "127.0.0.1", "::1", name, name.partition(".")[0]):
        return True
    own = {address.address.partition("%")[0] for nics in psutil.net_if_addrs().values() for address in nics}
    with suppress(OSError):
        addresses = socket.getaddrinfo(ssh_name(entry.destination), None, type=socket.SOCK_STREAM)
        return any(address[0] in own for *_, address in addresses)
    return False


def hosts_asker(
    entries: Sequence[HostEntry], config: Config, *, port: int | None = None, is_whole: bool = False
) -> Callable[[Callable[[], Facts]], list[Facts]]:
    """Returns a function that gathers the facts of all these hosts at once; it takes one for the host that it runs on.

    The facts of a host have its links to those after it in the list. config: its interpreter, interface and ports. port: to try.
    is_whole: for a report; before a launch the disks are not measured, and what is known of torch is not tried again.
    """
    request = {"port": port} | ({} if is_whole else {"measure_disk": False, "cached_torch": AUTO})

    def gather(entry: HostEntry, gather_here: Callable[[], Facts]) -> Facts:
        connection = {"destination": entry.destination, "here": is_this_host(entry), "error": None, "fix": None}
        try:
            facts = gather_here() if connection["here"] else ask_host(entry, request, python=config.python)
        except PacelineError as error:
            return {"connection": {**connection, "error": error.message, "fix": error.fix}}
        return {**facts, "connection": connection}

    def gather_all(gather_here: Callable[[], Facts]) -> list[Facts]:
        with ThreadPoolExecutor(max_workers=min(32, len(entries))) as pool:
            hosts = list(pool.map(gather, entries, repeat(gather_here)))
        reached = [entry for entry, facts in zip(entries, hosts, strict=True) if facts["connection"]["error"] is None]
        ports, interface = parse_ports(config.ports), config.interface
        links = measure_links(reached, python=config.python, port=port, ports=ports, interface=interface)
        names = [facts["connection"]["destination"] for facts in hosts]
        return [{**facts, "links": links.get(name, [])} for name, facts in zip(names, hosts, strict=True)]

    return gather_all


def ask_host(entry: HostEntry, request: Mapping[str, Any], *, python: str | None) -> Facts:
    """Returns the facts that another host answers; raises PacelineError with a fix where it does not."""
    with SshModule(entry.destination, FACTS, python=python) as remote:
        remote.send(request)
        remote.stdin.close()  # the request is all of stdin
        return remote.next_line()


def measure_links(
    entries: Sequence[HostEntry],
    *,
    python: str | None,
    port: int | None = None,
    ports: tuple[int, int] | None = None,
    interface: str | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Returns how each host reaches those after it, by destination: one pair at a time, so that none slows another."""
    links: dict[str, list[dict[str, Any]]] = {entry.destination: [] for entry in entries}
    request = {"token": secrets.token_hex(16), "port": port, "ports": ports, "interface": interface}
    pairs = list(combinations(entries, 2))
    processes: dict[HostEntry, ModuleProcess] = {}
    probes: dict[HostEntry, dict[str, Any]] = {}  # what each listens on; or the reason why it does not

    def try_link(first: HostEntry, second: HostEntry) -> dict[str, Any]:
        if reason := probes[first].get("reason") or probes[second].get("reason"):
            return {**UNKNOWN_LINK, "reason": reason}
        target, addresses = probes[second], list(probes[second]["addresses"])
        if is_this_host(second) and interface is None:  # a launch takes the address on the way to the first
            addresses = [route_to(address) for address in probes[first]["addresses"][:1]] + addresses
        own = {"own_store_port": probes[first]["store_port"]} if ports else {}
        order = {"addresses": addresses, "port": target["port"], "store_port": target["store_port"]}
        try:
            processes[first].send(order)
            ahead_s = round(target["clock_s"] - probes[first]["clock_s"], 3)
            return {**processes[first].next_line(), **own, "clock_s": ahead_s}
        except PacelineError as error:
            probes[first] = {"reason": f"{first.destination}: {error.message}"}
            return {**UNKNOWN_LINK, "reason": probes[first]["reason"]}

    with ExitStack() as stack:
        for entry in entries if pairs else ():
            try:
                processes[entry] = stack.enter_context(open_probe(entry, python=python))
                processes[entry].send(request)
                probes[entry] = processes[entry].next_line()
                if "reason" not in probes[entry]:
                    probes[entry]["clock_s"] = clock_ahead_s(processes[entry])
            except PacelineError as error:
                probes[entry] = {"reason": f"{entry.destination}: {error.message}"}
        for first, second in pairs:
            links[first.destination].append({"to": second.destination, **try_link(first, second)})
    return links


def clock_ahead_s(process: ModuleProcess) -> float:
    """Returns how far the clock of the process's host is ahead of this one's."""
    sent = time.time()
    process.send({"clock": True})
    unix = process.next_line()["unix"]
    return float(unix - (sent + time.time()) / 2)


def open_probe(entry: HostEntry, *, python: str | None) -> ModuleProcess:
    if is_this_host(entry):
        return ModuleProcess([sys.executable, "-P", "-m", LINKS])
    return SshModule(entry.destination, LINKS, python=python)


@dataclass(frozen=True)
class StartCheck:
    """The facts of the hosts while they are gathered, and what follows from them."""

    facts: Callable[[], Sequence[Facts]]  # waits for them
    entries: Sequence[HostEntry]
    intent: Callable[[Plan], Intent]
    is_on: bool
    stream: TextIO | None = None  # for findings; None: stdout

    def machine(self) -> Machine:
        """Returns what the plan is for: this machine, or what the least of the hosts has. Raises PacelineError if none answered."""
        if not self.entries:
            return probe_machine()
        machine = machine_of_hosts(self.facts())
        if machine is None:
            self._judge(Intent(num_hosts=len(self.entries)))
            raise PacelineError("no host could be asked", fix=f"paceline check --hosts {self.entries[0].text}")
        return machine

    def judge(self, plan: Plan) -> CheckResult:
        """Prints what would hurt the run; raises PacelineError if it would surely fail. With --no-check it finds nothing."""
        if not self.is_on:
            return CheckResult((), ())
        return self._judge(intent_of_each(self.intent(plan), num_hosts=max(1, len(self.entries))))

    def _judge(self, intent: Intent) -> CheckResult:
        checked = judge_facts(self.facts(), intent)
        report_and_refuse(checked.findings, stopped="this run", several=bool(self.entries), stream=self.stream)
        return checked


def ask_hosts(entries: Sequence[HostEntry], config: Config) -> list[Facts]:
    """Returns the facts and links of hosts for what is no run: a plan, a measurement. Raises PacelineError for a silent host."""
    cached = cache_dir(config) / "torch.json"
    facts = hosts_asker(entries, config)(partial(gather_facts, measure_disk=False, cached_torch=cached))
    for host in facts:
        if error := at(host, "connection.error"):
            raise PacelineError(f"{at(host, 'connection.destination')}: {error}", fix=str(at(host, "connection.fix")))
    return facts


def ask_machine(config: Config) -> Machine:
    """Returns what the hosts that a config names are like, for a plan; raises PacelineError where one does not answer."""
    entries, config = hosts_of(config)
    with progress_line("asking the hosts") as show:
        show(", ".join(entry.host for entry in entries))
        machine = machine_of_hosts(ask_hosts(entries, config))
    assert machine is not None  # each of them answered
    return machine


@contextmanager
def start_check(
    config: Config,
    run: RunDir,
    options: TrainOptions | ResumeOptions,
    *,
    command: str,
    entries: Sequence[HostEntry] = (),
) -> Iterator[StartCheck]:
    """Gathers the facts of this host, or of all hosts, while the block prepares the run."""

    def intent(plan: Plan) -> Intent:
        return training_intent(config, plan, command=command, set_keys=frozenset(options.keys), run_path=run.path)

    if not options.check and not entries:
        yield StartCheck(tuple, entries, intent, is_on=False)
        return
    folders = {"run_dir": run.path, "cache_dir": cache_dir(config), "cached_torch": cache_dir(config) / "torch.json"}
    text = {"data": config.data, "tokenizer": config.tokenizer, "vocab_size": config.vocab_size}
    with ThreadPoolExecutor(1) as pool, start_gathering(**folders, **text, measure_disk=False) as gathered:
        if not entries:
            facts: Callable[[], Sequence[Facts]] = lambda: [gathered.facts()]  # noqa: E731
        else:
            facts = pool.submit(hosts_asker(entries, config), gathered.facts).result
        yield StartCheck(facts, entries, intent, is_on=options.check)
