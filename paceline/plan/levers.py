"""
What would make a step faster, and by how much: each lever is the same step reckoned with one thing changed.

Only what the trainer can do. A measured step that is far from the planned one is a finding with its likely cause.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.errors import Finding
from paceline.plan.links import Link, inner_link, read_link
from paceline.plan.step_time import StepSetup, StepTime, step_time

LEAST_GAIN = 0.01
GAP = 0.20
FASTER_ETHERNET = {1: 10, 10: 25, 25: 100}


@dataclass(frozen=True)
class Lever:
    """gain: tokens/s more, as a share of what they are."""

    what: str
    gain: float


def levers(
    setup: StepSetup, *, largest_device_batch_size: int | None = None, fits_without_checkpointing: bool = False
) -> tuple[Lever, ...]:
    """The largest gain first. largest_device_batch_size: rows that fit, if that is known."""
    before = step_time(setup)
    if before.tok_per_sec is None:
        return ()
    found = []
    for what, changed in _changes(setup, largest_device_batch_size, fits_without_checkpointing):
        after = step_time(changed)
        if after.tok_per_sec is not None:
            found.append(Lever(what, after.tok_per_sec.expected / before.tok_per_sec.expected - 1))
    return tuple(sorted((each for each in found if each.gain >= LEAST_GAIN), key=lambda each: -each.gain))


def _changes(
    setup: StepSetup, largest_device_batch_size: int | None, fits_without_checkpointing: bool
) -> Iterator[tuple[str, StepSetup]]:
    accum = setup.grad_accum_steps
    yield "twice the total batch", replace(setup, grad_accum_steps=2 * accum)
    share = accum * setup.device_batch_size
    rows = [rows for rows in range(1, min(share, largest_device_batch_size or 0) + 1) if share % rows == 0]
    if rows and rows[-1] > setup.device_batch_size:
        more = replace(setup, device_batch_size=rows[-1], grad_accum_steps=share // rows[-1])
        yield f"--device-batch-size {rows[-1]}", more
    if setup.activation_checkpointing and fits_without_checkpointing:
        yield "--no-activation-checkpointing", replace(setup, activation_checkpointing=False)
    if not setup.compiled and setup.device == "cuda":
        yield "--compile", replace(setup, compile=True)
    if setup.world_size > 1 and setup.link is not None:
        for what, link in _faster_links(setup, setup.link):
            if link.bytes_per_s > setup.link.bytes_per_s:
                yield what, replace(setup, link=link)
    if setup.hosts > 1 and setup.spec is not None:
        one = inner_link(setup.spec, num_gpus=setup.world_size, device=setup.device)
        if one is not None:
            yield f"all {setup.world_size} GPUs in one host", replace(setup, link=one, hosts=1)


def _faster_links(setup: StepSetup, link: Link) -> Iterator[tuple[str, Link]]:
    if found := re.fullmatch(r"PCIe (\d) x(\d+)( P2P)?", link.name):
        generation, lanes = found[1], int(found[2])
        if lanes < 16 and setup.spec is not None and lanes < (setup.spec.pcie_lanes or 0):
            yield "a x16 slot for each card", read_link(f"PCIe {generation} x16{found[3] or ''}", setup.spec)
    if found := re.fullmatch(r"(\d+)GbE", link.name):
        faster = FASTER_ETHERNET.get(int(found[1]))
        if faster is not None:
            yield f"{faster}GbE between the hosts", read_link(f"{faster}GbE", setup.spec)


def step_gap(setup: StepSetup, planned: StepTime, measured_s: float) -> Finding | None:
    """After the first steps of a run; None where the plan was near enough or had no figure."""
    if planned.seconds is None:
        return None
    gap = measured_s / planned.seconds.expected - 1
    if abs(gap) <= GAP:
        return None
    planned_ms, measured_ms = 1000 * planned.seconds.expected, 1000 * measured_s
    what = f"a step takes {measured_ms:,.0f} ms, {planned_ms:,.0f} were planned ({gap:+.0%})"
    evidence = {"measured_s": measured_s, "planned_s": planned.seconds.expected, "limit": planned.limit}
    if gap < 0:
        why = "the plan stood on figures that are too low for this device"
        return Finding("step-faster-than-planned", "note", what, why, "nothing: the next plan here knows it", evidence)
    why, fix = _cause(setup, planned, extra_s=measured_s - planned.seconds.expected)
    return Finding("step-slower-than-planned", "warn", what, why, fix, evidence)


def _cause(setup: StepSetup, planned: StepTime, *, extra_s: float) -> tuple[str, str]:
    """The likely cause, and how to tell. A step's length alone does not prove any."""
    sending = planned.hidden_s + planned.parts.get("gradients sent", 0.0) + planned.parts.get("weights sent", 0.0)
    if setup.device == "cpu":
        why = "likely other processes on these cores: the plan counts on all of them"
        return why, "look at top; then python -m paceline.train.measure again"
    if setup.world_size > 1 and extra_s < 4 * sending and sending > 0.05 * extra_s and planned.limit != "host":
        name = setup.link.name if setup.link is not None else "the link"
        why = f"likely the link: {name} slower than {planned_rate(setup.link)}, or nothing hidden under the backward"
        return why, f"paceline comm --nproc {setup.world_size} measures it"
    if planned.limit == "host":
        return "likely the host: it prepares ops slower than planned", "--compile, or a larger --device-batch-size"
    if not setup.compiled:
        return "likely ops that are not fused: the model runs eager", "--compile"
    why = "likely the cards run below their clock (power limit, heat), or others use them"
    return why, "nvidia-smi -q -d PERFORMANCE,POWER while it trains"


def planned_rate(link: Link | None) -> str:
    return "planned" if link is None else f"the planned {link.bytes_per_s / 1e9:.3g} GB/s"
