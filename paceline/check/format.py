"""
Findings and hosts as text for a terminal. The texts of a finding are its verdict's; here they only get their places.
"""

import json
import re
import socket
from collections.abc import Sequence
from typing import Any

from paceline.check.verdicts.host_verdicts import memory_limit
from paceline.check.verdicts.network_verdicts import VIRTUAL
from paceline.check.verdicts.rules import Facts, at, count_names, short_name, visible_gpus
from paceline.errors import Finding
from paceline.units import format_bytes, format_number_of

SHOWN_CHARS = 60  # of a fact
CODES = {"stop": "1;31", "warn": "33", "note": "36"}  # the worst first; ANSI: bold red, yellow, cyan


def format_findings(findings: Sequence[Finding], *, verbose: bool = False, several: bool = False) -> str:
    """Returns three lines for each finding: what, why, fix. verbose: also the facts that it follows from. several: hosts."""
    width = max((len(finding.id) for finding in findings), default=0)
    lines = []
    for finding in findings:
        host = f"{finding.host}: " if several and finding.host else ""
        lines.append(f"{finding.severity}  {finding.id:<{width}}  {host}{finding.what}")
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
    """Returns one line about a host."""
    if error := at(facts, "connection.error"):
        return f"{host_name(facts)}: {error}"
    torch = facts.get("torch")
    cards = count_names(short_name(gpu.get("name")) for gpu in visible_gpus(facts)) or "no GPU"
    (memory, _), cores = memory_limit(facts), at(facts, "host.cpu.cores")
    driver, cuda = at(facts, "driver.version"), at(facts, "driver.cuda")
    libraries = [f"{name} {version}" for name in ("CUDA", "NCCL") if (version := at(torch, name.lower()))]
    return ", ".join(
        [
            f"{host_name(facts)}: {at(facts, 'host.os') or 'unknown system'}",
            f"Python {at(facts, 'python.version') or 'n/a'}",
            (f"torch {torch['version']}" if torch else "no torch")
            + (f" ({', '.join(libraries)})" if libraries else ""),
            cards + (f", driver {driver}" if driver else "") + (f" (CUDA {cuda})" if driver and cuda else ""),
            "n/a cores" if cores is None else format_number_of(cores, "core"),
            "n/a memory" if memory is None else format_bytes(memory),
        ]
    )


def format_links(facts: Facts) -> list[str]:
    """Returns a line for each measured link from this host: round trip, speed each way, the speed of the interfaces, address."""
    lines = []
    speeds = {
        address: nic.get("speed_mbps")
        for nic in at(facts, "network.interfaces") or ()
        for address in nic["addresses"] or ()
        if nic.get("kind") not in VIRTUAL
    }
    for link in facts.get("links") or ():
        if link["bits_per_s"]:
            rates = " and ".join(f"{rate / 1e9:.2f}" for rate in (link["bits_per_s"], link["back_bits_per_s"]) if rate)
            nominal = speeds.get(link.get("local"))
            of_nominal = f" of {nominal / 1e3:g}" if nominal else ""
            lines.append(
                f"{at(facts, 'connection.destination')} to {link['to']}: {link['rtt_us'] / 1000:.2f} ms there and back,"
                f" {rates}{of_nominal} Gb/s, MTU {link['mtu'] or 'n/a'}, at {link['address']}"
            )
    return lines


def colour(text: str) -> str:
    """Returns the text with coloured severities, for a terminal."""
    return re.sub(r"(?m)^(stop|warn|note)(?=  )", lambda match: f"\x1b[{CODES[match[1]]}m{match[1]}\x1b[0m", text)


def host_name(facts: Facts) -> str:
    """Returns the name of a host, or the one by which it was not reached; that of this host where its probe gave none."""
    return str(at(facts, "host.name") or at(facts, "connection.destination") or socket.gethostname())


def is_ready(findings: Sequence[Finding]) -> bool:
    return not any(finding.severity == "stop" for finding in findings)


def short_value(value: Any) -> str:
    """Returns a fact in a few words; a table or a list only by its length."""
    if isinstance(value, dict | list) and len(json.dumps(value)) > SHOWN_CHARS:
        return f"({len(value)} entries)"
    return "n/a" if value is None else json.dumps(value)[:SHOWN_CHARS]
