"""
The check before a launch: facts become findings, and a run that would certainly fail is refused. `paceline check` only reports.

The facts are gathered by a process of their own while the caller does other work. The findings follow from the facts alone, so
verdicts on hosts that are not here are tested from recorded facts. docs/checks.md is generated from the table of verdicts:
`python -m paceline.check.ready > docs/checks.md`; a test compares them.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from paceline.check.probes.facts import MAX_ANSWER_BYTES, OnProbe, as_json, gather_facts
from paceline.check.verdicts.gpu_verdicts import GPU_VERDICTS
from paceline.check.verdicts.host_verdicts import HOST_VERDICTS
from paceline.check.verdicts.network_verdicts import HOST_EQUALITY_VERDICTS, NETWORK_VERDICTS
from paceline.check.verdicts.rules import Case, Facts, Intent, Verdict, at, short_name, visible_gpus
from paceline.check.verdicts.run_verdicts import CONFIG_VERDICTS, STORAGE_VERDICTS
from paceline.check.verdicts.torch_verdicts import TORCH_VERDICTS
from paceline.config import Config, cache_dir
from paceline.errors import Finding, PacelineError, PlanError
from paceline.plan.history import load_calibration
from paceline.plan.machine import Machine
from paceline.plan.memory import checkpoint_bytes, fullest_state
from paceline.plan.planner import Plan, make_plan, memory_setup
from paceline.rundir import RunDir, write_atomic
from paceline.units import format_bytes

DEADLINE_S = 40.0  # the slowest probe has 30
PROCESS_BYTES = 300 << 20  # Python with torch on a CPU before it holds any weight: RSS with torch 2.13
CUDA_CONTEXT_BYTES = 400 << 20  # a lower bound: context and NCCL took 0.77 GiB on an RTX 5090 D
SUBJECTS = (
    ("Config", CONFIG_VERDICTS),
    ("PyTorch", TORCH_VERDICTS),
    ("GPUs", GPU_VERDICTS),
    ("Host", HOST_VERDICTS),
    ("Disk and text", STORAGE_VERDICTS),
    ("Network", NETWORK_VERDICTS),
    ("Several hosts", HOST_EQUALITY_VERDICTS),
)
VERDICTS: tuple[Verdict, ...] = tuple(verdict for _, verdicts in SUBJECTS for verdict in verdicts)
ORDER = {"stop": 0, "warn": 1, "note": 2}
CODES = {"stop": "1;31", "warn": "33", "note": "36"}  # ANSI: bold red, yellow, cyan
INTRO = """\
# What `paceline check` checks

Generated from the code: `python -m paceline.check.ready > docs/checks.md`.

`stop`: the launch would fail; `train`, `resume` and `run` do not start, except with `--no-check`. `warn`: it would hurt.
`note`: good to know. An unknown fact never causes a finding. `paceline check --json` prints the findings with all facts
(`check.schema.json`, `facts.schema.json`); `--verbose` shows the facts that a finding follows from.
"""


class FactsProcess:
    """The process that gathers this host's facts."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process

    def facts(self) -> Facts:
        """Waits for the facts; raises PacelineError when they do not come."""
        with suppress(subprocess.TimeoutExpired, ValueError):
            answer, stderr = self._process.communicate(timeout=DEADLINE_S)
            if self._process.returncode == 0:
                facts: Facts = json.loads(answer[:MAX_ANSWER_BYTES])
                return facts
            last = stderr.decode(errors="replace").strip().splitlines()
            raise PacelineError(
                f"the facts of this host could not be gathered: {last[-1] if last else 'no answer'}", fix="--no-check"
            )
        raise PacelineError(f"the facts of this host were not gathered in {DEADLINE_S:.0f} s", fix="--no-check")


@contextmanager
def start_gathering(**request: Any) -> Iterator[FactsProcess]:
    """Starts to gather facts, with the arguments of facts.gather_facts; the process ends with the block in any case."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "paceline.check.probes.facts"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches this process, which ends that one
    )
    assert process.stdin is not None
    try:
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(as_json(request)).encode())
        process.stdin = None  # otherwise communicate() would write to it
        yield FactsProcess(process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # it ends its probes first
            with suppress(subprocess.TimeoutExpired):
                process.wait(2.0)
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def training_intent(config: Config, plan: Plan, *, command: str, set_keys: frozenset[str], run_path: Path) -> Intent:
    """Returns what `train` and `resume` are about to run, in numbers."""
    state_bytes_per_rank = fullest_state(memory_setup(plan)).total
    on_gpu = plan.device == "cuda"
    return Intent(
        command=command,
        device=plan.device,
        nproc=plan.world_size,
        precision=plan.precision,
        compile=plan.compile,
        config={key: getattr(config, key) for key in config.__dataclass_fields__},
        set_keys=set_keys,
        run_dir=str(run_path),
        sequence_len=plan.model.sequence_len,
        device_batch_size=plan.device_batch_size,
        total_batch_size=plan.total_batch_size,
        num_steps=None if plan.time else plan.num_steps,
        need_gpu_bytes=state_bytes_per_rank + CUDA_CONTEXT_BYTES if on_gpu else None,
        need_host_bytes=plan.world_size * (PROCESS_BYTES + (0 if on_gpu else state_bytes_per_rank)),
        checkpoint_bytes=checkpoint_bytes(plan.model, optimizer=plan.optimizer),
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
        return all((facts.get("torch") or {}).get("libuv") is not False for facts in self.facts)


def judge_facts(hosts: Sequence[Facts], intent: Intent) -> CheckResult:
    return CheckResult(hosts, find_findings(hosts, intent))


def check_config_here(
    config: Config, machine: Machine, *, set_keys: frozenset[str], port: int | None, on_probe: OnProbe
) -> CheckResult:
    """Checks whether this machine is ready for `train` with this config, without starting it."""
    run_path = Path(config.runs_dir) / (config.name or "")
    cache = Path(config.cache_dir).expanduser() if config.cache_dir else None
    facts = gather_facts(
        run_dir=run_path,
        data=config.data,
        tokenizer=config.tokenizer,
        cache_dir=cache,
        vocab_size=config.vocab_size,
        port=port,
        on_probe=on_probe,
    )
    try:
        calibrate = load_calibration(cache_dir(config))
        plan = make_plan(config, machine, vocab_size=config.vocab_size, num_rows=0, calibrate=calibrate)
        intent = training_intent(config, plan, command="check", set_keys=set_keys, run_path=run_path)
    except PlanError as error:
        intent = Intent(
            device=config.device,
            nproc=config.nproc or (len(machine.gpus) if machine.gpus else min(2, machine.cpu_cores)),
            precision=config.precision,
            compile=config.compile,
            set_keys=set_keys,
            run_dir=str(run_path),
            sequence_len=config.sequence_len,
            device_batch_size=config.device_batch_size or 1,
            total_batch_size=config.total_batch_size,
            refused=(error.message, error.fix),
        )
    return judge_facts([facts], replace(intent, port=port))


def report_and_refuse(findings: Sequence[Finding], *, stopped: str, stream: TextIO | None = None) -> None:
    """Prints warnings and stops; raises PacelineError if there is a stop. Notes are left to `paceline check`."""
    stream = stream or sys.stdout
    relevant = [finding for finding in findings if finding.severity != "note"]
    if relevant:
        text = format_findings(relevant)
        print(colour(text) if stream.isatty() else text, file=stream, flush=True)
    stops = [finding.id for finding in relevant if finding.severity == "stop"]
    if stops:
        raise PacelineError(
            f"{stopped} would fail: {', '.join(dict.fromkeys(stops))}",
            fix="apply the fixes above, or start anyway with --no-check",
        )


def save_check(run: RunDir, checked: CheckResult) -> None:
    """Writes the facts and the findings into the run folder."""
    for path, text in check_files(run, checked).items():
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, text)


def check_files(run: RunDir, checked: CheckResult) -> dict[Path, str]:
    files = {run.findings: json.dumps([finding.to_json() for finding in checked.findings], indent=1) + "\n"}
    for facts in checked.facts:
        files[run.facts((facts.get("host") or {}).get("name") or "host")] = json.dumps(facts, indent=1) + "\n"
    return files


def find_findings(hosts: Sequence[Facts], intent: Intent) -> list[Finding]:
    """Returns the findings, stops first. Within a severity they have the order of the table: causes before consequences."""
    findings = []
    for verdict in VERDICTS:
        if verdict.rule is not None:
            findings += [make_finding(verdict, case, host) for host in hosts for case in verdict.rule(host, intent)]
        if verdict.compare is not None and len(hosts) > 1:
            findings += [make_finding(verdict, case, None) for case in verdict.compare(hosts, intent)]
    return sorted(findings, key=lambda finding: ORDER[finding.severity])


def make_finding(verdict: Verdict, case: Case, host: Facts | None) -> Finding:
    return Finding(
        id=verdict.id,
        severity=case.severity or verdict.severity,
        what=case.what,
        why=verdict.why,
        fix=case.fix,
        evidence={} if host is None else {path: at(host, path) for path in case.evidence},
        host=None if host is None else at(host, "host.name"),
    )


def format_findings(findings: Sequence[Finding], *, verbose: bool = False, num_hosts: int = 1) -> str:
    """Returns three lines for each finding: what, why, fix. verbose: also the facts that it follows from."""
    width = max((len(finding.id) for finding in findings), default=0)
    lines = []
    for finding in findings:
        where = f"{finding.host}: " if finding.host and num_hosts > 1 else ""
        lines.append(f"{finding.severity}  {finding.id:<{width}}  {where}{finding.what}")
        lines.append(f"  why {'':<{width}}  {finding.why}")
        lines.append(f"  fix {'':<{width}}  {finding.fix}")
        if verbose:
            lines += [f"      {'':<{width}}  {path} = {value}" for path, value in finding.evidence.items()]
    return "\n".join(lines)


def format_summary(findings: Sequence[Finding]) -> str:
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in CODES}
    names = {"stop": "would stop it", "warn": "would hurt", "note": "good to know"}
    summary = ", ".join(f"{count} {names[severity]}" for severity, count in counts.items() if count)
    return ("not ready: " if counts["stop"] else "ready: ") + (summary or "nothing found")


def format_host(facts: Facts) -> str:
    """Returns one line about this host."""
    torch = facts.get("torch")
    gpus = [short_name(gpu.get("name")) for gpu in visible_gpus(facts)]
    cards = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "no GPU"
    total, limit = at(facts, "host.memory.total_bytes"), at(facts, "host.memory.cgroup_limit_bytes")
    memory = min((value for value in (total, limit) if value is not None), default=None)
    driver = at(facts, "driver.version")
    return ", ".join(
        [
            f"{at(facts, 'host.name') or 'this host'}: {at(facts, 'host.os') or 'unknown system'}",
            f"Python {at(facts, 'python.version') or 'n/a'}",
            f"torch {torch['version']}" if torch else "no torch",
            cards + (f", driver {driver}" if driver else ""),
            f"{at(facts, 'host.cpu.cores') or 'n/a'} cores",
            "n/a memory" if memory is None else format_bytes(memory),
        ]
    )


def colour(text: str) -> str:
    """Returns the text with coloured severities, for a terminal."""
    return re.sub(r"(?m)^(stop|warn|note)(?=  )", lambda match: f"\x1b[{CODES[match[1]]}m{match[1]}\x1b[0m", text)


def to_json(findings: Sequence[Finding], hosts: Sequence[Facts]) -> dict[str, Any]:
    facts: dict[str, Mapping[str, Any]] = {str(at(host, "host.name") or "host"): host for host in hosts}
    return {
        "ready": not any(finding.severity == "stop" for finding in findings),
        "findings": [finding.to_json() for finding in findings],
        "facts": facts,
    }


def format_catalogue() -> str:
    """Returns docs/checks.md."""
    lines = [INTRO]
    for title, verdicts in SUBJECTS:
        lines += [f"## {title}", ""]
        for verdict in verdicts:
            lines.append(f"### {verdict.id} ({verdict.severity})")
            lines += ["", verdict.cause, "", f"- Consequence: {verdict.why}.", f"- Fix: {verdict.fix}", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(format_catalogue(), end="")
