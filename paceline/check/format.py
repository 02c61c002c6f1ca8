"""
Findings and facts for a reader: on the terminal, and as the JSON of `paceline check --json` (docs/check.schema.json).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.check.verdict import Facts, at, short_name, visible_gpus
from paceline.errors import Finding
from paceline.units import format_bytes

CODES = {"stop": "1;31", "warn": "33", "note": "36"}  # ANSI: bold red, yellow, cyan


def format_findings(findings: Sequence[Finding], *, verbose: bool = False, num_hosts: int = 1) -> str:
    """Three lines each: what with numbers, what comes of it, what mends it. verbose: the facts it follows from as well."""
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
    told = ", ".join(f"{count} {names[severity]}" for severity, count in counts.items() if count)
    return ("not ready: " if counts["stop"] else "ready: ") + (told or "nothing found")


def format_host(facts: Facts) -> str:
    """One line: what this host is."""
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
    """The severities in colour, for a terminal; the words say the same without."""

    lines = []
    for line in text.split("\n"):
        word = line[:4]
        lines.append(f"\x1b[{CODES[word]}m{word}\x1b[0m{line[4:]}" if word in CODES and line[4:6] == "  " else line)
    return "\n".join(lines)


def to_json(findings: Sequence[Finding], hosts: Sequence[Facts]) -> dict[str, Any]:
    facts: dict[str, Mapping[str, Any]] = {str(at(host, "host.name") or "host"): host for host in hosts}
    return {
        "ready": not any(finding.severity == "stop" for finding in findings),
        "findings": [finding.to_json() for finding in findings],
        "facts": facts,
    }
