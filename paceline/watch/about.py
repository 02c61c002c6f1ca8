"""
What a run folder says of itself beside its numbers: its config, the facts of its hosts, what the model wrote. Reads files only.

For the browser and the report. Each file is looked up by listing the folder, is read only in part if it is large, and only
where it lies within the folder: a link that leads out of it is passed over.
"""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.rundir import RunDir
from paceline.units import format_bytes

MAX_BYTES = 1 << 20
MAX_SAMPLES = 50


def read_about(run: RunDir) -> dict[str, Any]:
    """{config: {key: value}, facts: [{host, rows: [[name, value]]}], samples: [{name, text}], the latest first}."""
    return {
        "config": read_config(run),
        "facts": [{"host": path.stem, "rows": rows_of(facts)} for path, facts in read_facts(run)],
        "samples": [
            {"name": path.stem.replace("_", " "), "text": text}
            for path in sorted(files_in(run, "samples/*.txt"), reverse=True)[:MAX_SAMPLES]
            if (text := read_start(path)) is not None
        ],
    }


def files_in(run: RunDir, pattern: str) -> list[Path]:
    inside = run.path.resolve()
    return [path for path in sorted(run.path.glob(pattern)) if path.is_file() and path.resolve().is_relative_to(inside)]


def read_start(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return None


def read_config(run: RunDir) -> dict[str, Any]:
    texts = [read_start(path) for path in files_in(run, run.config_toml.name)]
    try:
        return {key: value for text in texts if text for key, value in tomllib.loads(text).items()}
    except ValueError:
        return {}


def read_facts(run: RunDir) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in files_in(run, "facts/*.json"):
        try:
            facts = json.loads(read_start(path) or "")
        except ValueError:
            continue
        if isinstance(facts, dict):
            yield path, facts


def rows_of(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts that a reader asks for first, in words; what is not known is left out."""
    host, torch = facts.get("host") or {}, facts.get("torch") or {}
    cpu, memory = host.get("cpu") or {}, host.get("memory") or {}
    gpus = [str(gpu.get("name")) for gpu in facts.get("gpus") or ()]
    names = {name: gpus.count(name) for name in gpus}
    rows = {
        "GPUs": ", ".join(f"{count} x {name}" for name, count in names.items()) or "none",
        "driver": facts.get("driver"),
        "CPU": f"{cpu['model']}, {cpu.get('logical')} threads" if cpu.get("model") else None,
        "RAM": format_bytes(memory["total_bytes"]) if memory.get("total_bytes") else None,
        "system": " ".join(filter(None, (host.get("os"), host.get("arch"), host.get("kernel")))),
        "container": host.get("container"),
        "torch": torch.get("version"),
        "CUDA": torch.get("cuda"),
        "NCCL": torch.get("nccl"),
        "Python": (facts.get("python") or {}).get("version"),
        "paceline": (facts.get("packages") or {}).get("paceline"),
        "commit": ((facts.get("tools") or {}).get("code") or {}).get("commit"),
        "read": str(facts.get("time", ""))[:19].replace("T", " ") + " UTC",
    }
    return [(name, str(value)) for name, value in rows.items() if value]
