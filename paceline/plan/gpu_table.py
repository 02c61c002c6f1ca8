"""
What is known of each GPU, from gpus.toml, and the card that a name means: one that a user typed, or one that the driver reports.

A bare name means the variant that has it as its name or among its aliases, the one that people mean by it: H100 and H200 are the
SXM modules, A100 the SXM one with 80 GB, RTX 3060 the one with 12 GB and RTX 3080 with 10. Where no variant is meant more than the
others (RTX 4060 Ti, V100) the bare name is an error that lists them. Laptop GPUs carry the names of desktop cards but other chips
and clocks: none is in the table.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from paceline.errors import PlanError
from paceline.units import MIB

SAME_MEMORY = 0.08  # ECC on or off moves it by a sixteenth, old drivers print 2 % less; variants differ by a fifth
NOT_A_NAME = re.compile(r"nvidia|geforce|tesla|generation|edition|[^a-z0-9]")
COUNTED = re.compile(r"([1-9]\d{0,2}) ?[x×] ?(.+)", re.IGNORECASE)
MOST_NAMES = 8  # in an error


@dataclass(frozen=True)
class GpuSpec:
    """One card of the table."""

    name: str  # short and unique: what a user types
    driver_names: tuple[str, ...]  # as NVML reports it; variants that differ in memory share one
    aliases: tuple[str, ...]  # what people say when they mean this variant
    consumer: bool  # GeForce and Titan
    sources: Mapping[str, str] = field(hash=False)  # figure -> where it is from
    memory_mib: int  # total as the driver reports it
    bytes_per_s: float  # DRAM bandwidth
    peak_flops: Mapping[str, float] = field(hash=False)  # by "fp32" "tf32" "fp16" "bf16" "fp8" "fp4"; absent: n/a
    capability: tuple[int, int] | None  # None: not NVIDIA
    pcie_gen: int | None  # None: not known, or the host is reached by another link
    pcie_lanes: int | None
    nvlink_bytes_per_s: float | None  # each direction, all links of the card; a bridge may have to be bought
    peer_bytes_per_s: float | None  # each direction, to each other GPU of the host
    watts: int  # board power as shipped


@cache
def gpu_table() -> tuple[GpuSpec, ...]:
    """Returns every card of gpus.toml, which is read once, in the order of the file."""
    families = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
    defaults = families.pop("defaults")
    return tuple(
        make_spec(name, defaults | family | row)
        for family in families.values()
        for name, row in family["boards"].items()
    )


def make_spec(name: str, row: Mapping[str, Any]) -> GpuSpec:
    """Returns the card of a row, which has the keys of its family too."""
    if "tflops" in row:
        peaks = {precision: float(round(tflops * 10**12)) for precision, tflops in row["tflops"].items()}
    else:  # rounded to a tenth of a TFLOP/s, as data sheets are
        clocks = row["sms"] * row["boost_mhz"] * 10**6
        peaks = {precision: float(round(clocks * flops, -11)) for precision, flops in row["flops_per_clock"].items()}
    pcie_gen, pcie_lanes = row.get("pcie", (None, None))
    figures = {
        "memory_mib": row["memory_mib"],
        "bytes_per_s": row["gb_per_s"] * 1e9,
        "peak_flops": peaks,
        "capability": tuple(row["capability"]) if "capability" in row else None,
        "pcie_gen": pcie_gen,
        "pcie_lanes": pcie_lanes,
        "nvlink_bytes_per_s": row["nvlink_gb_per_s"] * 1e9 if "nvlink_gb_per_s" in row else None,
        "peer_bytes_per_s": row["peer_gb_per_s"] * 1e9 if "peer_gb_per_s" in row else None,
        "watts": row["watts"],
    }
    known = [figure for figure, value in figures.items() if value is not None]
    return GpuSpec(
        name,
        driver_names=tuple(row["driver"].format(part) for part in row.get("driver_names", [name])),
        aliases=tuple(row.get("aliases", ())),
        consumer=row["consumer"],
        sources={figure: row.get(f"{figure}_source", row["source"]).format_map(row) for figure in known},
        **figures,
    )


def find_gpu(name: str) -> GpuSpec:
    """Returns the card that a user named, in any case and spacing, with or without NVIDIA, GeForce, RTX and its memory.

    Raises PlanError for an unknown name, or one of several cards.
    """
    key = normalize(name)
    forms = (key, "rtx" + key) if key else ()
    for names in (typed_names, driver_keys, name_prefixes):
        for form in forms:
            matches = [gpu for gpu in gpu_table() if form in names(gpu)]
            if len(matches) == 1:
                return matches[0]
            if matches:
                raise PlanError(
                    f"{name} is the name of {len(matches)} cards: {join_names([gpu.name for gpu in matches])}",
                    fix=f'name one of them, such as "{matches[0].name}"',
                )
    if sized := re.fullmatch(r"(.*\w)[ -]*\b(\d+) ?gi?b", name.strip(), re.IGNORECASE):
        with suppress(PlanError):
            gpu = find_gpu(sized[1])
            if abs(int(sized[2]) * 1024 / gpu.memory_mib - 1) <= SAME_MEMORY:
                return gpu
    if counted := COUNTED.fullmatch(name.strip()):
        fix = f'--gpu "{find_gpu(counted[2]).name}" --gpus {counted[1]}'
        raise PlanError(f"{name} is not the name of one GPU", fix=fix)
    if len(parts := re.split(r" *[,+] *", name.strip(" ,+"))) > 1:
        least = min(map(find_gpu, parts), key=lambda gpu: (round(gpu.memory_mib, -3), gpu.bytes_per_s))
        fix = f'--gpu "{least.name}" --gpus {len(parts)}: the ranks have equal shares, so the smallest and slowest card decides'
        raise PlanError(f"{name} is not the name of one GPU", fix=fix)
    near = join_names(nearest_names(name))
    fix = (
        f"the nearest known: {near}"
        if near
        else "a known card, such as RTX 4090, RTX 5090 or H100 SXM; docs/plan.md lists all"
    )
    raise PlanError(f"no GPU called {name} is known", fix=fix)


def spec_of(driver_name: str, memory_bytes: int) -> GpuSpec | None:
    """Returns the table's row of a card; None if its name is not in the table, or it is not sold with this much memory.

    memory_bytes: as the driver reports it, 0 if it reports none (GB10 shares the host's).
    """
    key = normalize(driver_name)
    matches = [gpu for gpu in gpu_table() if key in driver_keys(gpu)]
    if memory_bytes:
        matches = [gpu for gpu in matches if abs(memory_bytes / (gpu.memory_mib * MIB) - 1) <= SAME_MEMORY]
    return matches[0] if len(matches) == 1 else None


def normalize(name: str) -> str:
    """Returns rtx4060ti for NVIDIA GeForce RTX 4060 Ti."""
    return NOT_A_NAME.sub("", name.lower())


def typed_names(gpu: GpuSpec) -> Iterator[str]:
    """Yields the names by which users know a card, normalized."""
    return map(normalize, (gpu.name, *gpu.aliases))


def driver_keys(gpu: GpuSpec) -> Iterator[str]:
    """Yields the names that drivers print for a card, normalized."""
    return map(normalize, gpu.driver_names)


def name_prefixes(gpu: GpuSpec) -> Iterator[str]:
    """Yields rtx, rtx4060, rtx4060ti, rtx4060ti16gb: each stands for the whole name if no other card's begins with it."""
    parts = gpu.name.split()
    return (normalize("".join(parts[:count])) for count in range(1, len(parts) + 1))


def nearest_names(name: str) -> list[str]:
    """Returns names with all parts of this one, else names spelt much like it whose number begins with the same digit."""
    parts = [normalize(part) for part in name.split()]
    if matches := [gpu.name for gpu in gpu_table() if all(part in normalize(gpu.name) for part in parts)]:
        return matches
    names = {key: gpu.name for gpu in gpu_table() for key in typed_names(gpu)}
    key = normalize(name)
    near = difflib.get_close_matches("rtx" + key if key[:1].isdigit() else key, names, n=3)
    digit = re.sub(r"\D", "", key)[:1]
    return list(dict.fromkeys(names[match] for match in near if re.sub(r"\D", "", match)[:1] == digit))


def join_names(names: list[str]) -> str:
    """Returns the first names, and how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
