"""
Verdicts on the GPUs: as many as asked, free, alike, well connected, healthy.

P2P on consumer boards: pain 11 of the field's public threads (nccl-tests#117, nccl#1999): drivers before 570 report it on
RTX 40 and 50 cards where it does not work, and an IOMMU breaks it as well.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.check.ask import Ask
from paceline.check.verdict import (
    Facts,
    Seen,
    Verdict,
    at,
    each_gpu,
    env,
    is_on,
    num_ranks,
    short_name,
    version_of,
    visible_gpus,
    wants_cuda,
)
from paceline.units import format_bytes

P2P_DRIVER = 570
CONSUMER_WITHOUT_P2P = ("RTX 40", "RTX 50")
HELD_SHARE = 0.05  # of a card; a desktop takes less
SEE_HOLDERS = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"
HOT_C = 85
LOW_POWER_SHARE = 0.8
NARROW_WIDTH = 4
BF16_CAPABILITY, FP16_CAPABILITY = (8, 0), (5, 3)


def are_missing(facts: Facts, ask: Ask) -> Iterator[Seen]:
    if facts.get("gpus") is None or visible_gpus(facts) or ask.device != "cuda":
        return
    cards, hidden = facts.get("nvidia_cards") or 0, env(facts, "CUDA_VISIBLE_DEVICES")
    if facts["gpus"] and hidden is not None:
        yield Seen(
            f"CUDA_VISIBLE_DEVICES={hidden} hides all {len(facts['gpus'])} GPUs",
            "unset CUDA_VISIBLE_DEVICES",
            ("env.CUDA_VISIBLE_DEVICES",),
        )
    elif cards:
        yield Seen(
            f"{cards} NVIDIA cards are in this machine, no driver answers", "nvidia-smi", ("nvidia_cards", "driver")
        )
    else:
        yield Seen("device is cuda, and no GPU is here", "--device cpu", ("gpus",))


def are_fewer(facts: Facts, ask: Ask) -> Iterator[Seen]:
    here = len(visible_gpus(facts))
    if wants_cuda(facts, ask) and ask.nproc and 0 < here < ask.nproc:
        hidden = len(facts["gpus"]) - here
        more = (
            f", {hidden} more are hidden by CUDA_VISIBLE_DEVICES={env(facts, 'CUDA_VISIBLE_DEVICES')}" if hidden else ""
        )
        yield Seen(f"{ask.nproc} GPUs are asked, {here} visible{more}", f"--nproc {here}", ("gpus",))


def are_hidden(facts: Facts, ask: Ask) -> Iterator[Seen]:
    hidden = [gpu for gpu in facts.get("gpus") or () if gpu.get("visible") is False]
    if hidden and visible_gpus(facts):
        yield Seen(
            f"CUDA_VISIBLE_DEVICES={env(facts, 'CUDA_VISIBLE_DEVICES')} hides {len(hidden)} of {len(facts['gpus'])} GPUs",
            "unset CUDA_VISIBLE_DEVICES",
            ("env.CUDA_VISIBLE_DEVICES",),
        )


def names_absent(facts: Facts, ask: Ask) -> Iterator[Seen]:
    words = [word.strip() for word in (env(facts, "CUDA_VISIBLE_DEVICES") or "").split(",") if word.strip()]
    gpus = facts.get("gpus")
    if not gpus or not words:
        return
    known = [str(gpu.get("index")) for gpu in gpus]
    uuids = [str(gpu.get("uuid")) for gpu in gpus]
    absent = [word for word in words if word not in known and not any(uuid.startswith(word) for uuid in uuids)]
    if absent:
        yield Seen(
            f"CUDA_VISIBLE_DEVICES={','.join(words)} names {', '.join(absent)}, the GPUs here are {', '.join(known)}",
            f"export CUDA_VISIBLE_DEVICES={','.join(known)}",
            ("env.CUDA_VISIBLE_DEVICES",),
        )


def are_held(facts: Facts, ask: Ask) -> Iterator[Seen]:
    for name, gpu in each_gpu(facts):
        total, free = gpu.get("memory_total_bytes"), gpu.get("memory_free_bytes")
        processes = gpu.get("processes") or []
        if not total or free is None:
            continue
        short = ask.need_gpu_bytes is not None and free < ask.need_gpu_bytes <= total
        if not short and (not processes or total - free < HELD_SHARE * total):
            continue
        held = ", ".join(holder(each) for each in processes) or "processes that are not seen from here"
        needs = f", {format_bytes(ask.need_gpu_bytes)} needed" if short and ask.need_gpu_bytes else ""
        yield Seen(
            f"{name}: {format_bytes(total - free)} of {format_bytes(total)} held by {held}{needs}",
            way_out(facts, gpu, ask),
            ("gpus",),
            "stop" if short and wants_cuda(facts, ask) else "warn",
        )


def holder(process: Mapping[str, Any]) -> str:
    used = process.get("used_bytes")
    size = f", {format_bytes(used)}" if used else ""
    return f"{process.get('name') or 'unknown'} (pid {process.get('pid')}{size})"


def way_out(facts: Facts, gpu: Mapping[str, Any], ask: Ask) -> str:
    """kill for Python alone, never for a desktop, nor for a pid without a name: that is one of outside this container."""
    ours = [str(each["pid"]) for each in gpu.get("processes") or () if str(each.get("name") or "").startswith("python")]
    free = [str(each.get("index")) for each in visible_gpus(facts) if is_free(each, ask)]
    return (
        f"kill {' '.join(ours)}" if ours else f"export CUDA_VISIBLE_DEVICES={','.join(free)}" if free else SEE_HOLDERS
    )


def is_free(gpu: Mapping[str, Any], ask: Ask) -> bool:
    total, free = gpu.get("memory_total_bytes") or 0, gpu.get("memory_free_bytes") or 0
    return total - free < HELD_SHARE * total and free >= (ask.need_gpu_bytes or 1)


def are_short(facts: Facts, ask: Ask) -> Iterator[Seen]:
    for name, gpu in each_gpu(facts):
        total = gpu.get("memory_total_bytes")
        if wants_cuda(facts, ask) and total and ask.need_gpu_bytes and total < ask.need_gpu_bytes:
            depth = (ask.config or {}).get("depth")
            yield Seen(
                f"{name} has {format_bytes(total)}, weights and optimizer alone need {format_bytes(ask.need_gpu_bytes)}",
                f"--depth {max(1, depth // 2)}" if depth else "a smaller model",
                ("gpus",),
            )


def link_is_narrow(facts: Facts, ask: Ask) -> Iterator[Seen]:
    if num_ranks(facts, ask) < 2 or not wants_cuda(facts, ask):
        return
    for name, gpu in each_gpu(facts):
        width, widest = at(gpu, "pcie.width"), at(gpu, "pcie.width_max")
        if width and not gpu.get("nvlinks") and (width <= NARROW_WIDTH or (widest and 2 * width <= widest)):
            yield Seen(
                f"{name} has {width} PCIe lanes of {widest or 'n/a'}, generation {at(gpu, 'pcie.generation_max') or 'n/a'}",
                "paceline comm",
                ("gpus",),
            )


def p2p_lies(facts: Facts, ask: Ask) -> Iterator[Seen]:
    if num_ranks(facts, ask) < 2 or not wants_cuda(facts, ask) or is_on(env(facts, "NCCL_P2P_DISABLE")):
        return
    driver, iommu = version_of(at(facts, "driver.version")), at(facts, "network.iommu")
    cards = [
        (name, gpu)
        for name, gpu in each_gpu(facts)
        if any(word in str(gpu.get("name")) for word in CONSUMER_WITHOUT_P2P) and any((gpu.get("p2p") or {}).values())
    ]
    if len(cards) > 1 and ((driver and driver[0] < P2P_DRIVER) or iommu):
        because = f"driver {at(facts, 'driver.version')} is older than {P2P_DRIVER}"
        if driver and driver[0] >= P2P_DRIVER:
            because = "the IOMMU is on"
        yield Seen(
            f"the driver reports P2P between {len(cards)} {short_name(cards[0][1].get('name'))}, and {because}",
            "export NCCL_P2P_DISABLE=1",
            ("gpus", "driver.version", "network.iommu"),
        )


def p2p_is_off(facts: Facts, ask: Ask) -> Iterator[Seen]:
    links = [gpu.get("nvlinks") or 0 for _, gpu in each_gpu(facts)]
    if is_on(env(facts, "NCCL_P2P_DISABLE")) and len(links) > 1 and all(links):
        yield Seen(
            f"NCCL_P2P_DISABLE={env(facts, 'NCCL_P2P_DISABLE')}, and the {len(links)} GPUs have NVLink",
            "unset NCCL_P2P_DISABLE",
            ("env.NCCL_P2P_DISABLE", "gpus"),
        )


def are_mixed(facts: Facts, ask: Ask) -> Iterator[Seen]:
    names = sorted({short_name(gpu.get("name")) for gpu in visible_gpus(facts)})
    if len(names) > 1 and wants_cuda(facts, ask) and num_ranks(facts, ask) > 1:
        best = max(visible_gpus(facts), key=lambda gpu: gpu.get("memory_total_bytes") or 0).get("name")
        same = [str(gpu.get("index")) for gpu in visible_gpus(facts) if gpu.get("name") == best]
        yield Seen(f"the GPUs are {' and '.join(names)}", f"export CUDA_VISIBLE_DEVICES={','.join(same)}", ("gpus",))


def refuses_work(facts: Facts, ask: Ask) -> Iterator[Seen]:
    for name, gpu in each_gpu(facts):
        mode = gpu.get("compute_mode")
        busy = mode == "exclusive" and bool(gpu.get("processes"))
        if wants_cuda(facts, ask) and (mode == "prohibited" or busy):
            whom = " and another process has it" if busy else ""
            fix = f"sudo nvidia-smi -i {gpu.get('index')} -c DEFAULT"
            yield Seen(f"{name} is in compute mode {mode}{whom}", fix, ("gpus",))


def has_mig(facts: Facts, ask: Ask) -> Iterator[Seen]:
    for name, gpu in each_gpu(facts):
        if gpu.get("mig") and wants_cuda(facts, ask) and num_ranks(facts, ask) > 1:
            yield Seen(f"{name} is split by MIG", f"sudo nvidia-smi -i {gpu.get('index')} -mig 0", ("gpus",))


def has_errors(facts: Facts, ask: Ask) -> Iterator[Seen]:
    for name, gpu in each_gpu(facts):
        if gpu.get("ecc_errors"):
            fix = f"sudo nvidia-smi -i {gpu.get('index')} --gpu-reset"
            yield Seen(f"{name} has counted {gpu['ecc_errors']} uncorrected memory errors", fix, ("gpus",))


def is_hot(facts: Facts, ask: Ask) -> Iterator[Seen]:
    for name, gpu in each_gpu(facts):
        hot, throttle = (gpu.get("temperature_c") or 0) >= HOT_C, [t for t in gpu.get("throttle") or () if t != "power"]
        if hot or throttle:
            slowed = f", slowed down by {' and '.join(throttle)}" if throttle else ""
            at_c = (
                f"{gpu.get('temperature_c')} °C" if gpu.get("temperature_c") is not None else "of unknown temperature"
            )
            yield Seen(
                f"{name} is {at_c}{slowed}",
                f"nvidia-smi -i {gpu.get('index')} -q -d TEMPERATURE,PERFORMANCE",
                ("gpus",),
            )


def has_little_power(facts: Facts, ask: Ask) -> Iterator[Seen]:
    for name, gpu in each_gpu(facts):
        limit, usual = gpu.get("power_limit_w"), gpu.get("power_limit_default_w")
        if limit and usual and limit < LOW_POWER_SHARE * usual:
            fix = f"sudo nvidia-smi -i {gpu.get('index')} -pl {usual:.0f}"
            yield Seen(f"{name} is limited to {limit:.0f} W of {usual:.0f} W", fix, ("gpus",))


def driver_is_silent(facts: Facts, ask: Ask) -> Iterator[Seen]:
    error = facts.get("nvml_error")
    if not error:
        return
    fix = "sudo reboot" if "mismatch" in error else "nvidia-smi"
    if "nvidia-ml-py" in error:
        fix = "pip install nvidia-ml-py"
    rest = [str(gpu.get("index")) for gpu in visible_gpus(facts) if gpu.get("name")]
    if rest:
        fix = f"export CUDA_VISIBLE_DEVICES={','.join(rest)}"
    yield Seen(
        f"the GPUs cannot be asked: {error}",
        fix,
        ("nvml_error", "driver"),
        "stop" if ask.device == "cuda" and not rest else "warn",
    )


def lacks_precision(facts: Facts, ask: Ask) -> Iterator[Seen]:
    needed = {"bf16": BF16_CAPABILITY, "fp16": FP16_CAPABILITY}.get(ask.precision or "")
    if needed is None or not wants_cuda(facts, ask):
        return
    for name, gpu in each_gpu(facts):
        capability = tuple(gpu.get("capability") or ())
        if capability and capability < needed:
            other = "fp16" if ask.precision == "bf16" and capability >= FP16_CAPABILITY else "fp32"
            yield Seen(
                f"{name} has capability {'.'.join(map(str, capability))}, {ask.precision} units come with"
                f" {'.'.join(map(str, needed))}",
                f"--precision {other}",
                ("gpus",),
            )


VERDICTS = (
    Verdict("gpu-missing", "stop", look=are_missing,
            cause="CUDA is asked for and no GPU is visible.",
            why="there is nothing to train on",
            fix="See CUDA_VISIBLE_DEVICES and nvidia-smi, or train on the CPU."),
    Verdict("gpu-driver-silent", "warn", look=driver_is_silent,
            cause="The NVIDIA driver does not answer; `Driver/library version mismatch` comes after an update without a "
                  "reboot.",
            why="CUDA will not start",
            fix="Reboot, or see nvidia-smi."),
    Verdict("gpu-fewer", "stop", look=are_fewer,
            cause="Fewer GPUs are visible than processes are asked for.",
            why="two ranks would share a card, and NCCL refuses that",
            fix="Take as many as there are."),
    Verdict("gpu-hidden", "note", look=are_hidden,
            cause="CUDA_VISIBLE_DEVICES hides some of the GPUs.",
            why="they will not be used",
            fix="Unset it, if that is not meant."),
    Verdict("gpu-name-wrong", "warn", look=names_absent,
            cause="CUDA_VISIBLE_DEVICES names a GPU that is not here.",
            why="CUDA hides it and all that stand after it",
            fix="Name those that are here."),
    Verdict("gpu-memory-held", "warn", look=are_held,
            cause="Another process holds memory of a GPU, seen from here or not; a stop where what is left is too little.",
            why="out of memory, at the start or at the first evaluation",
            fix="End it, or hide that card."),
    Verdict("gpu-memory-short", "stop", look=are_short,
            cause="Weights, gradients and optimizer states alone are more than the card has.",
            why="out of memory before the first step",
            fix="A smaller depth, or more GPUs to share the states."),
    Verdict("gpu-link-narrow", "warn", look=link_is_narrow,
            cause="A card has four PCIe lanes or fewer, or half of what it could have: a chipset slot, a riser, a shared "
                  "M.2.",
            why="gradients wait for the link: several cards may be no faster than one",
            fix="Another slot; `paceline comm` measures what it costs."),
    Verdict("gpu-p2p-lies", "warn", look=p2p_lies,
            cause="Consumer cards report P2P where it is known not to work.",
            why="NCCL hangs with the GPUs at 100 %, or gives wrong sums",
            fix="Update the driver to 570, or turn P2P off."),
    Verdict("gpu-p2p-off", "warn", look=p2p_is_off,
            cause="P2P is turned off on cards with NVLink.",
            why="traffic goes through the CPU's memory instead",
            fix="Unset NCCL_P2P_DISABLE."),
    Verdict("gpu-mixed", "warn", look=are_mixed,
            cause="The cards are of different kinds.",
            why="all wait for the slowest, and the smallest memory decides the batch",
            fix="Take those of one kind."),
    Verdict("gpu-refuses-work", "stop", look=refuses_work,
            cause="Compute mode prohibited, or exclusive with another process on it.",
            why="CUDA refuses the process",
            fix="Set the mode back."),
    Verdict("gpu-mig", "warn", look=has_mig,
            cause="MIG splits a card.",
            why="NCCL does not work between parts of one card",
            fix="Turn MIG off."),
    Verdict("gpu-ecc-errors", "warn", look=has_errors,
            cause="The card has counted uncorrected memory errors.",
            why="it may compute wrong or be lost in mid-run",
            fix="Reset it; replace it if they come again."),
    Verdict("gpu-hot", "warn", look=is_hot,
            cause="The card is at 85 °C or more, or slowed down by heat or by its supply.",
            why="it trains slower than it could",
            fix="See what slows it."),
    Verdict("gpu-power-limited", "note", look=has_little_power,
            cause="The power limit is under four fifths of the default.",
            why="it trains slower than it could",
            fix="Raise it, if that is not meant."),
    Verdict("precision-unsupported", "stop", look=lacks_precision,
            cause="The card has no units for the precision.",
            why="it would be emulated or refused",
            fix="Another precision."),
)  # fmt: skip
