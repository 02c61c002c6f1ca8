"""
The check before a launch: facts become findings, and a run that would certainly fail is refused. `paceline check` only reports.

The facts are gathered by a process of their own while the caller does other work. The findings follow from the facts alone, so
verdicts on hosts that are not here are tested from recorded facts. The verdicts are the entries of verdicts.toml with their rules
in verdicts/. dev/checks_page.py writes docs/checks.md from them.
"""

import json
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from paceline.check.format import (
    CODES,
    colour,
    format_findings,
    format_host,
    format_links,
    format_summary,
    host_name,
    is_ready,
    short_value,
)
from paceline.check.probes.facts import FOLDER_PROBES, MAX_ANSWER_BYTES, OnProbe, gather_facts
from paceline.check.verdicts import (
    gpu_verdicts,
    host_verdicts,
    hosts_verdicts,
    network_verdicts,
    run_verdicts,
    torch_verdicts,
)
from paceline.check.verdicts.rules import Case, Facts, Host, Intent, Severity, at, fix_for, visible_gpus
from paceline.config import Config, cache_dir
from paceline.errors import Finding, PacelineError, PlanError
from paceline.plan.forecast import measured_here
from paceline.plan.machine import Gpu, HostLink, Machine, with_spec
from paceline.plan.memory import checkpoint_bytes, copies_bytes, fullest_state
from paceline.plan.planner import Plan, make_plan, memory_setup
from paceline.rundir import RunDir, write_atomic
from paceline.units import format_list

DEADLINE_S = 130.0  # the slowest probe has 30, and four times as long on a busy machine
PROCESS_BYTES = 300 << 20  # Python with torch on a CPU before it holds any weight: RSS with torch 2.13
CUDA_CONTEXT_BYTES = 400 << 20  # a lower bound: context and NCCL took 0.77 GiB on an RTX 5090 D
AskHosts = Callable[[Callable[[], Facts]], Sequence[Facts]]  # takes a function that gathers this host's facts
SUBJECTS: dict[str, ModuleType] = {  # table of verdicts.toml -> module with the rules
    "config": run_verdicts,
    "torch": torch_verdicts,
    "gpu": gpu_verdicts,
    "host": host_verdicts,
    "storage": run_verdicts,
    "network": network_verdicts,
    "hosts": hosts_verdicts,
}


@dataclass(frozen=True)
class Verdict:
    """A rule with its texts. cause and fix are for docs/checks.md; the printed finding has the numbers of the case."""

    id: str
    subject: str
    rule: Callable[..., Iterable[Case]]  # takes a Host; of the subject hosts: all hosts together
    severity: Severity
    cause: str
    why: str
    fix: str
    evidence: Sequence[str] = ()  # paths into the facts


@cache
def load_verdicts() -> tuple[Verdict, ...]:
    """Returns the verdicts in the order of verdicts.toml; the rule of `gpu-hot` is the function gpu_hot."""
    tables = tomllib.loads(Path(__file__).with_name("verdicts.toml").read_text(encoding="utf-8"))
    return tuple(
        Verdict(id, subject, vars(SUBJECTS[subject])[id.replace("-", "_")], **texts)
        for subject, entries in tables.items()
        for id, texts in entries.items()
    )


@contextmanager
def start_gathering(**request: Any) -> Iterator[Callable[[], Facts]]:
    """
    Starts to gather facts, with the arguments of facts.gather_facts; the process ends with the block in any case.

    Yields a function that waits for the facts.
    """
    command = [sys.executable, "-P", "-m", "paceline.check.probes.facts"]
    pipe = subprocess.PIPE
    # a session of its own: Ctrl-C reaches this process, which ends that one
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as process:
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps(request, default=str).encode())
            process.stdin = None  # otherwise communicate() would write to it
            yield partial(read_facts, process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # it ends its probes first
                with suppress(subprocess.TimeoutExpired):
                    process.wait(2.0)
                process.kill()


def read_facts(process: subprocess.Popen[bytes]) -> Facts:
    """Waits for the facts that a process gathers; raises PacelineError when they do not come."""
    with suppress(subprocess.TimeoutExpired, ValueError):
        answer, stderr = process.communicate(timeout=DEADLINE_S)
        if process.returncode == 0:
            facts: Facts = json.loads(answer[:MAX_ANSWER_BYTES])
            return facts
        last = stderr.decode(errors="replace").strip().splitlines()
        raise PacelineError(
            f"the facts of this host could not be gathered: {last[-1] if last else 'no answer'}", fix="--no-check"
        )
    raise PacelineError(f"the facts of this host were not gathered in {DEADLINE_S:.0f} s", fix="--no-check")


def training_intent(config: Config, plan: Plan, *, command: str, set_keys: frozenset[str], run_path: Path) -> Intent:
    """Returns what `train` and `resume` are about to run, in numbers."""
    setup = memory_setup(plan)
    state_bytes_per_rank, offloaded = fullest_state(setup).total, fullest_state(setup).on_host
    on_gpu = plan.device == "cuda"
    # of each process; what is offloaded has a checkpoint's copies beside it
    on_host = PROCESS_BYTES + (offloaded and offloaded + copies_bytes(setup)) + (0 if on_gpu else state_bytes_per_rank)
    return Intent(
        command=command,
        device=plan.device,
        nproc=plan.world_size,
        precision=plan.precision,
        low_precision=low.name if (low := plan.low_precision) and not low.emulated else None,
        compile=plan.compile,
        config=asdict(config),
        set_keys=set_keys,
        run_dir=str(run_path),
        resumes=command == "resume",
        sequence_len=plan.model.sequence_len,
        device_batch_size=plan.device_batch_size,
        total_batch_size=plan.total_batch_size,
        num_steps=None if plan.time else plan.num_steps,
        epochs=config.epochs or plan.epochs,
        need_gpu_bytes=state_bytes_per_rank + CUDA_CONTEXT_BYTES if on_gpu else None,
        need_host_bytes=plan.world_size * on_host,
        checkpoint_bytes=checkpoint_bytes(plan),
        num_checkpoints=config.keep_last + 2,  # the best, and the one that is being written
    )


@dataclass(frozen=True)
class CheckResult:
    """The facts of the hosts, and the findings that follow from them."""

    facts: Sequence[Facts]
    findings: Sequence[Finding]

    @property
    def libuv(self) -> bool:
        """Whether this torch can make its store with libuv; assumed where unknown, since every wheel can."""
        return all(at(facts, "torch.libuv") is not False for facts in self.facts)

    def to_json(self) -> dict[str, Any]:
        return {
            "ready": is_ready(self.findings),
            "findings": [finding.to_json() for finding in self.findings],
            "facts": {host_name(facts): facts for facts in self.facts},
        }


def check_config(
    config: Config,
    machine: Machine,
    *,
    set_keys: frozenset[str],
    port: int | None,
    on_probe: OnProbe,
    ask_hosts: AskHosts | None = None,
) -> CheckResult:
    """Checks whether this machine, or the hosts that ask_hosts gives, are ready for `train` with this config; starts nothing."""
    run_path = Path(config.runs_dir) / (config.name or "")
    gather_here = partial(
        gather_facts,
        run_dir=run_path,
        data=config.data,
        val_data=config.val_data,
        text_field=config.text_field,
        tokenizer=config.tokenizer,
        cache_dir=cache_dir(config),
        vocab_size=config.vocab_size,
        port=port,
        on_probe=on_probe,
    )
    hosts = [gather_here()] if ask_hosts is None else ask_hosts(gather_here)
    is_listed = ask_hosts is None or any(at(facts, "connection.here") for facts in hosts)
    driver = None if is_listed else gather_here(probes=FOLDER_PROBES)
    machine = machine if ask_hosts is None else machine_of_hosts(hosts) or replace(machine, hosts=len(hosts))
    try:
        measured = measured_here(cache_dir(config), machine=machine)
        vocab_size = next(filter(None, (at(facts, "text.vocab_size") for facts in hosts)), config.vocab_size)
        plan = make_plan(config, machine, vocab_size=vocab_size, num_rows=0, measured=measured)
        intent = training_intent(config, plan, command="check", set_keys=set_keys, run_path=run_path)
    except PlanError as error:
        intent = Intent(
            device=config.device,
            nproc=machine.hosts * (config.nproc or (len(machine.gpus) or min(2, machine.cpu_cores))),
            precision=config.precision,
            compile=config.compile,
            set_keys=set_keys,
            run_dir=str(run_path),
            sequence_len=config.sequence_len,
            device_batch_size=config.device_batch_size or 1,
            total_batch_size=config.total_batch_size,
            # a silent driver is a finding of its own
            refused=None if error is machine.driver_error else (error.message, error.fix),
        )
    intent = replace(intent_of_each(intent, num_hosts=len(hosts)), port=port)
    return CheckResult(hosts, find_findings(hosts, intent, driver))


def intent_of_each(intent: Intent, *, num_hosts: int) -> Intent:
    """Returns what each of the hosts is to run, from what all of them are."""
    share = None if intent.need_host_bytes is None else intent.need_host_bytes // num_hosts
    nproc = None if intent.nproc is None else -(-intent.nproc // num_hosts)
    return replace(intent, num_hosts=num_hosts, nproc=nproc, need_host_bytes=share)


def machine_of_hosts(hosts: Sequence[Facts]) -> Machine | None:
    """Returns what the least of these hosts has, and the slowest link between them; None where no host answered."""
    machines = [machine_of(facts) for facts in hosts if at(facts, "host.cpu")]
    if not machines:
        return None
    names = tuple(str(at(facts, "connection.destination") or host_name(facts)).rpartition("@")[2] for facts in hosts)
    return Machine(
        gpus=min((machine.gpus for machine in machines), key=lambda gpus: (len(gpus), [g.memory_bytes for g in gpus])),
        cpu_cores=min(machine.cpu_cores for machine in machines),
        cpu_bf16=all(machine.cpu_bf16 for machine in machines),
        memory_bytes=min(machine.memory_bytes for machine in machines),
        hosts=len(hosts),
        names=names,
        link=min(measured_links(hosts), key=lambda link: link.bytes_per_s, default=None),
    )


def measured_links(hosts: Sequence[Facts]) -> Iterator[HostLink]:
    """Yields the link of each pair of hosts that was measured."""
    for facts in hosts:
        for link in facts.get("links") or ():
            if link["bits_per_s"]:
                slower = min(link["bits_per_s"], link["back_bits_per_s"] or link["bits_per_s"])
                pair = (str(at(facts, "connection.destination")), str(link["to"]))
                yield HostLink(pair, slower / 8, link["rtt_us"] / 1e6)


def machine_of(facts: Facts) -> Machine:
    """Returns the machine that a host's facts describe."""
    gpus = [
        Gpu(
            index,
            str(gpu["name"]),
            gpu["memory_total_bytes"] or 0,
            tuple(gpu["capability"]) if gpu["capability"] else None,
        )
        for index, gpu in enumerate(visible_gpus(facts))
    ]
    return Machine(
        gpus=tuple(map(with_spec, gpus)),
        cpu_cores=at(facts, "host.cpu.cores") or 1,
        cpu_bf16=bool(at(facts, "host.cpu.bf16")),
        memory_bytes=host_verdicts.memory_limit(facts)[0] or 0,
    )


def report_and_refuse(
    findings: Sequence[Finding], *, stopped: str, stream: TextIO | None = None, several: bool, has_no_check: bool = True
) -> None:
    """Prints warnings and stops; raises PacelineError if there is a stop. Notes are left to `paceline check`.

    has_no_check: whether the command has that option.
    """
    stream = stream or sys.stdout
    relevant = [finding for finding in findings if finding.severity != "note"]
    if relevant:
        text = format_findings(relevant, several=several)
        print(colour(text) if stream.isatty() else text, file=stream, flush=True)
    stops = [finding.id for finding in relevant if finding.severity == "stop"]
    if stops:
        silent = [str(finding.host) for finding in relevant if finding.id == "host-unreachable"]
        otherwise = f"leave {format_list(silent)} out of --hosts" if silent else "start anyway with --no-check"
        fix = "apply the fixes above" + (f", or {otherwise}" if silent or has_no_check else "")
        raise PacelineError(f"{stopped} would fail: {', '.join(dict.fromkeys(stops))}", fix=fix)


def save_check(run: RunDir, checked: CheckResult) -> None:
    """Writes the facts and the findings into the run folder."""
    write_atomic(run.findings, json.dumps([finding.to_json() for finding in checked.findings], indent=1) + "\n")
    for facts in checked.facts:
        path = run.facts(host_name(facts))
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, json.dumps(facts, indent=1) + "\n")


def find_findings(hosts: Sequence[Facts], intent: Intent, driver: Facts | None = None) -> list[Finding]:
    """Returns the findings, stops first, then in the order of the table. driver: of this machine, where it is none of the hosts."""
    source: Facts = next((facts for facts in (*hosts, driver) if facts and at(facts, "text.data")), {})
    num_bytes = at(source, "text.prepared_bytes") or run_verdicts.shard_bytes(source)  # each host gets the text
    intent = replace(intent, shard_bytes=num_bytes, text_folder=at(source, "text.folder"))
    findings, checked = [], [Host(facts, intent, keeps_checkpoints=i < 2) for i, facts in enumerate(hosts)]
    with_driver = [*checked, Host(driver, intent)] if driver else checked  # it prepares the text and keeps the run
    for verdict in load_verdicts():
        if verdict.subject == "hosts":
            findings += [make_finding(verdict, case, None) for case in verdict.rule(checked)] if len(hosts) > 1 else []
            continue
        is_of_all = verdict.subject == "config" and len(hosts) > 1  # the hosts have one config: one finding is enough
        for host in checked[:1] if is_of_all else with_driver if verdict.subject == "storage" else checked:
            facts = None if is_of_all else host.facts
            findings += [make_finding(verdict, case, facts) for case in verdict.rule(host)]
    return sorted(findings, key=lambda finding: list(CODES).index(finding.severity))


def make_finding(verdict: Verdict, case: Case, host: Facts | None) -> Finding:
    return Finding(
        id=verdict.id,
        severity=case.severity or verdict.severity,
        what=case.what,
        why=verdict.why,
        fix=fix_for(host, case.fix) if host else case.fix,
        evidence={path: at(host, path) for path in case.evidence or verdict.evidence},
        host=host_name(host) if host else None,
    )


def format_check(checked: CheckResult, *, verbose: bool, coloured: bool) -> str:
    """Returns the hosts, their links, the findings and a summary; verbose: also the facts and the checks that passed."""
    names = {host_name(facts) for facts in checked.facts} | {finding.host for finding in checked.findings}
    text = format_findings(checked.findings, verbose=verbose, several=len(names) > 1)
    blocks = [
        "\n".join(map(format_host, checked.facts)),
        "\n".join(line for facts in checked.facts for line in format_links(facts)),
        colour(text) if coloured else text,
        format_passed(checked) if verbose else "",
        format_summary(checked.findings),
    ]
    return "\n\n".join(block for block in blocks if block)


def format_passed(checked: CheckResult) -> str:
    """Returns a line for each check that found nothing, with the facts that it looked at."""
    fired = {finding.id for finding in checked.findings}
    verdicts = [verdict for verdict in load_verdicts() if verdict.subject != "hosts" and verdict.id not in fired]
    width, lines = max(len(verdict.id) for verdict in verdicts), []
    for verdict in verdicts:
        values = [f"{path} {short_value(at(facts, path))}" for path in verdict.evidence for facts in checked.facts]
        lines.append(f"ok    {verdict.id:<{width}}  {', '.join(values)}".rstrip())
    return "\n".join(lines)
