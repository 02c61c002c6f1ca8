"""
What is asked of the hosts before a launch: the facts of each, and how they reach each other.

The host that this process runs on needs no ssh. One that does not answer has facts that say why, so the verdicts about it are as
pure as all others.
"""

import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations, repeat
from typing import Any, TextIO

from paceline.check.probes.facts import AUTO, FOLDER_PROBES, OnProbe, gather_facts
from paceline.check.probes.network_probe import route_to
from paceline.check.ready import (
    CheckResult,
    find_findings,
    intent_of_each,
    machine_of_hosts,
    report_and_refuse,
    start_gathering,
    training_intent,
)
from paceline.check.verdicts.rules import Facts, Intent, at, visible_gpus
from paceline.config import Config, cache_dir
from paceline.data.corpus import Progress
from paceline.errors import PacelineError
from paceline.launch.connect import open_module
from paceline.launch.hosts import HostEntry, hosts_of, is_this_host, parse_ports
from paceline.launch.ssh import ANSWER_S, ModuleProcess
from paceline.model.manifest import step_folders
from paceline.options import TrainOptions
from paceline.plan.machine import Machine, probe_machine
from paceline.plan.planner import Plan
from paceline.run_options import ResumeOptions
from paceline.rundir import RunDir
from paceline.terminal import progress_line

FACTS, LINKS = "paceline.check.probes.facts", "paceline.check.probes.link_probe"
HostFacts = tuple[Sequence[Facts], Facts | None]  # of the hosts, and of this machine's folders where it is none of them
UNKNOWN_LINK: dict[str, Any] = {"port": 0, "tried": [], "error": "probe"}
UNKNOWN_LINK |= dict.fromkeys(("address", "rtt_us", "bits_per_s", "back_bits_per_s", "mtu"))


def hosts_asker(
    entries: Sequence[HostEntry],
    config: Config,
    *,
    port: int | None = None,
    is_whole: bool = False,
    on_answer: OnProbe = lambda name: None,
) -> Callable[[Callable[[], Facts]], list[Facts]]:
    """Returns a function that gathers the facts of all these hosts at once; it takes one for the host that it runs on.

    The facts of a host have its links to those after it in the list. config: its interpreter, interface and ports. port: to try.
    is_whole: for a report; before a launch what is known of torch is not tried again.
    on_answer: called with each host that has answered, and with `links` before they are measured.
    """
    request = {"port": port, "cache_dir": AUTO, "measure_disk": False}
    request |= {} if is_whole else {"cached_torch": AUTO}

    def gather(entry: HostEntry, gather_here: Callable[[], Facts]) -> Facts:
        connection = {"destination": entry.destination, "here": is_this_host(entry), "error": None, "fix": None}
        connection |= {"way": entry.way} if entry.way != "ssh" else {}
        try:
            facts = gather_here() if connection["here"] else ask_host(entry, request, python=config.python)
        except PacelineError as error:
            return {"connection": {**connection, "error": error.message, "fix": error.fix}}
        on_answer(entry.destination)
        return {**facts, "connection": connection}

    def gather_all(gather_here: Callable[[], Facts]) -> list[Facts]:
        ports, interface = parse_ports(config.ports), config.interface
        with link_probes(entries, python=config.python, port=port, ports=ports, interface=interface) as probes:
            with ThreadPoolExecutor(max_workers=min(32, len(entries))) as pool:
                hosts = list(pool.map(gather, entries, repeat(gather_here)))
            reached = [
                entry for entry, facts in zip(entries, hosts, strict=True) if facts["connection"]["error"] is None
            ]
            on_answer("links")
            links = measure_links(reached, probes, ports=ports, interface=interface)
        names = [facts["connection"]["destination"] for facts in hosts]
        return [{**facts, "links": links.get(name, [])} for name, facts in zip(names, hosts, strict=True)]

    return gather_all


def ask_host(entry: HostEntry, request: Mapping[str, Any], *, python: str | None) -> Facts:
    """Returns the facts that another host answers; raises PacelineError with a fix where it does not."""
    with open_module(entry, FACTS, python=python) as remote:
        remote.send(request)
        remote.stdin.close()  # the request is all of stdin
        return remote.next_line()


class LinkProbe:
    """The link probe of one host. `listens` says on what, or has the reason why it does not."""

    def __init__(self, entry: HostEntry, request: Mapping[str, Any], *, python: str | None):
        self.process: ModuleProcess | None = None
        try:
            if is_this_host(entry):
                self.process = ModuleProcess([sys.executable, "-P", "-m", LINKS])
            else:
                self.process = open_module(entry, LINKS, python=python)
            self.process.send(request)
            self.listens = self.process.next_line()
        except PacelineError as error:
            self.listens = {"reason": f"{entry.destination}: {error.message}"}

    def clock_ahead_s(self) -> float:
        """Returns how far the clock of the host is ahead of this one's."""
        sent = time.time()
        return float(self.ask({"clock": True})["unix"] - (sent + time.time()) / 2)

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process
        self.process.deadline = time.monotonic() + ANSWER_S  # it may have waited long for the facts
        self.process.send(order)
        return self.process.next_line()


@contextmanager
def link_probes(
    entries: Sequence[HostEntry],
    *,
    python: str | None,
    port: int | None = None,
    ports: tuple[int, int] | None = None,
    interface: str | None = None,
) -> Iterator[dict[HostEntry, Future[LinkProbe]]]:
    """Starts a probe on each host, for as long as the block lasts. A host alone has no links."""
    request = {"token": secrets.token_hex(16), "port": port, "ports": ports, "interface": interface}
    listed = entries if len(entries) > 1 else ()
    with ThreadPoolExecutor(max_workers=min(32, len(entries))) as pool:
        probes = {entry: pool.submit(LinkProbe, entry, request, python=python) for entry in listed}
        try:
            yield probes
        finally:
            for probe in probes.values():
                if process := probe.result().process:
                    process.__exit__()


def measure_links(
    entries: Sequence[HostEntry],
    probes: Mapping[HostEntry, Future[LinkProbe]],
    *,
    ports: tuple[int, int] | None = None,
    interface: str | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Returns how each host reaches those after it, by destination: one pair at a time, so that none slows another."""
    links: dict[str, list[dict[str, Any]]] = {entry.destination: [] for entry in entries}
    clocks_s: dict[HostEntry, float] = {}

    def try_link(first: HostEntry, second: HostEntry) -> dict[str, Any]:
        ours, theirs = probes[first].result(), probes[second].result()
        if reason := ours.listens.get("reason") or theirs.listens.get("reason"):
            return {**UNKNOWN_LINK, "reason": reason}
        addresses = list(theirs.listens["addresses"])
        if is_this_host(second) and interface is None:  # a launch takes the address on the way to the first
            addresses = [route_to(address) for address in ours.listens["addresses"][:1]] + addresses
        order = {"addresses": addresses, "port": theirs.listens["port"], "store_port": theirs.listens["store_port"]}
        try:
            for entry, probe in ((first, ours), (second, theirs)):
                if entry not in clocks_s:
                    clocks_s[entry] = probe.clock_ahead_s()
            own = {"own_store_port": ours.listens["store_port"]} if ports else {}
            return {**ours.ask(order), **own, "clock_s": round(clocks_s[second] - clocks_s[first], 3)}
        except PacelineError as error:
            ours.listens = {"reason": f"{first.destination}: {error.message}"}
            return {**UNKNOWN_LINK, "reason": ours.listens["reason"]}

    for first, second in combinations(entries, 2):
        links[first.destination].append({"to": second.destination, **try_link(first, second)})
    return links


@contextmanager
def start_asking(entries: Sequence[HostEntry], config: Config, **request: Any) -> Iterator[Future[HostFacts]]:
    """Starts to gather the facts of this host, or of all hosts; yields them when they are there.

    request: arguments of gather_facts for this machine.
    """
    is_listed = not entries or any(map(is_this_host, entries))
    probes = None if is_listed else FOLDER_PROBES
    with ThreadPoolExecutor(1) as pool, start_gathering(**request, measure_disk=False, probes=probes) as own_facts:

        def wait_for_all() -> HostFacts:
            hosts = hosts_asker(entries, config)(own_facts) if entries else [own_facts()]
            return hosts, None if is_listed else own_facts()

        yield pool.submit(wait_for_all)


@dataclass(frozen=True)
class StartCheck:
    """The facts of the hosts while they are gathered, and what follows from them."""

    facts: Future[HostFacts] | None  # None: none are needed
    entries: Sequence[HostEntry]
    intent: Callable[[Plan], Intent]
    is_on: bool
    stream: TextIO | None = None  # for findings; None: stdout

    def machine(self) -> Machine:
        """Returns what the plan is for: this machine, or what the least of the hosts has. Raises PacelineError if none answered."""
        if not self.entries:
            return probe_machine()
        machine = machine_of_hosts(self.facts.result()[0]) if self.facts else None
        if machine is None:
            self._judge(Intent(num_hosts=len(self.entries)))
            raise PacelineError("no host could be asked", fix=f"paceline check --hosts {self.entries[0].text}")
        return machine

    def with_refusal(self, progress: Progress) -> Progress:
        """Returns `progress`, which now raises PacelineError once a host is known not to answer: a text may take hours."""

        def report(label: str, done: float, total: float) -> None:
            hosts = self.facts.result()[0] if self.is_on and self.facts and self.facts.done() else ()
            if any(at(facts, "connection.error") for facts in hosts):
                self._judge(Intent(num_hosts=len(self.entries)))
            progress(label, done, total)

        return report

    def judge(self, plan: Plan) -> CheckResult:
        """Prints what would hurt the run; raises PacelineError if it would surely fail. With --no-check it finds nothing."""
        if not self.is_on:
            return CheckResult((), ())
        return self._judge(intent_of_each(self.intent(plan), num_hosts=max(1, len(self.entries))))

    def _judge(self, intent: Intent) -> CheckResult:
        hosts, driver = self.facts.result() if self.facts else ((), None)
        checked = CheckResult(hosts, find_findings(hosts, intent, driver))
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


def facts_of_ranks(entries: Sequence[HostEntry], config: Config) -> list[Facts]:
    """Returns the facts of the hosts of a measurement, or of this one; raises PacelineError where their ranks would fail."""
    if entries:
        facts = ask_hosts(entries, config)
    else:
        facts = [gather_facts(measure_disk=False, cached_torch=cache_dir(config) / "torch.json")]
    device = config.device or ("cuda" if all(visible_gpus(host) for host in facts) else "cpu")
    # the ranks of a measurement compile nothing and read no text: here only torch and the GPUs can stop them
    values = asdict(config) if entries else {}
    intent = Intent(device=device, nproc=config.nproc, num_hosts=len(facts), config=values)
    stops = [finding for finding in find_findings(facts, intent) if finding.severity == "stop"]
    report_and_refuse(stops, stopped="this measurement", several=bool(entries), has_no_check=False)
    return facts


@contextmanager
def start_check(
    config: Config,
    run: RunDir,
    options: TrainOptions | ResumeOptions,
    *,
    command: str,
    trackers: tuple[str, ...],
    entries: Sequence[HostEntry] = (),
) -> Iterator[StartCheck]:
    """Gathers the facts of this host, or of all hosts, while the block prepares the run."""

    def intent(plan: Plan) -> Intent:
        keys = frozenset(options.keys)
        training = training_intent(config, plan, command=command, set_keys=keys, run_path=run.path)
        saved = step_folders(run.checkpoints) if command == "resume" else ()
        return replace(training, trackers=trackers, saved_checkpoints=len(saved))

    if not options.check and not entries:
        yield StartCheck(None, entries, intent, is_on=False)
        return
    folders = {"run_dir": run.path, "cache_dir": cache_dir(config), "cached_torch": cache_dir(config) / "torch.json"}
    text = {key: getattr(config, key) for key in ("data", "val_data", "text_field", "tokenizer", "vocab_size")}
    if command == "resume":  # it trains on the shards that the run recorded: the text may be gone
        text = {}
    with start_asking(entries, config, **folders, **text) as facts:
        yield StartCheck(facts, entries, intent, is_on=options.check)
