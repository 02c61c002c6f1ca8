"""
All verdicts, and what they say of the hosts and of what is asked: stop first, then warn, then note.

Pure: from facts alone, so a verdict on hosts that are not here is tested from recorded facts. docs/checks.md is made from
this table.
"""

from collections.abc import Sequence

from paceline.check import (
    config_verdicts,
    equality_verdicts,
    gpu_verdicts,
    host_verdicts,
    network_verdicts,
    storage_verdicts,
    torch_verdicts,
)
from paceline.check.ask import Ask
from paceline.check.verdict import Facts, Seen, Verdict, at
from paceline.errors import Finding

SUBJECTS = (
    ("Config", config_verdicts.VERDICTS),
    ("PyTorch", torch_verdicts.VERDICTS),
    ("GPUs", gpu_verdicts.VERDICTS),
    ("Host", host_verdicts.VERDICTS),
    ("Disk and text", storage_verdicts.VERDICTS),
    ("Network", network_verdicts.VERDICTS),
    ("Several hosts", equality_verdicts.VERDICTS),
)
VERDICTS: tuple[Verdict, ...] = tuple(verdict for _, verdicts in SUBJECTS for verdict in verdicts)
ORDER = {"stop": 0, "warn": 1, "note": 2}


def find(hosts: Sequence[Facts], ask: Ask) -> list[Finding]:
    """hosts: the facts of each. The order within a severity is that of the table, the causes before their consequences."""
    findings = []
    for verdict in VERDICTS:
        if verdict.look is not None:
            findings += [as_finding(verdict, seen, host) for host in hosts for seen in verdict.look(host, ask)]
        if verdict.compare is not None and len(hosts) > 1:
            findings += [as_finding(verdict, seen, None) for seen in verdict.compare(hosts, ask)]
    return sorted(findings, key=lambda finding: ORDER[finding.severity])


def as_finding(verdict: Verdict, seen: Seen, host: Facts | None) -> Finding:
    return Finding(
        id=verdict.id,
        severity=seen.severity or verdict.severity,
        what=seen.what,
        why=verdict.why,
        fix=seen.fix,
        evidence={} if host is None else {path: at(host, path) for path in seen.evidence},
        host=None if host is None else at(host, "host.name"),
    )
