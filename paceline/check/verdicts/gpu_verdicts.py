"""
Verdicts on the GPUs: their number, free memory, kind, links and health.

P2P on consumer boards (nccl-tests#117, nccl#1999): drivers before 570 report it on RTX 40 and 50 cards where it does not work,
and an IOMMU breaks it as well.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.check.verdicts.rules import (
    Case,
    Facts,
    Intent,
    Verdict,
    at,
    env,
    is_on,
    named_gpus,
    num_ranks,
    short_name,
    version_of,
    visible_gpus,
    wants_cuda,
)
from paceline.units import format_bytes

P2P_DRIVER = 570
CONSUMER_WITHOUT_P2P = ("RTX 40", "RTX 50")
USED_SHARE = 0.05  # of a card; a desktop takes less
LIST_GPU_PROCESSES = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"
HOT_C = 85
LOW_POWER_SHARE = 0.8
NARROW_WIDTH = 4
BF16_CAPABILITY, FP16_CAPABILITY = (8, 0), (5, 3)


def gpus_are_missing(facts: Facts, intent: Intent) -> Iterator[Case]:
    if facts.get("gpus") is None or visible_gpus(facts) or intent.device != "cuda":
        return
    cards, hidden = facts.get("nvidia_cards") or 0, env(facts, "CUDA_VISIBLE_DEVICES")
    if facts["gpus"] and hidden is not None:
        yield Case(
            f"CUDA_VISIBLE_DEVICES={hidden} hides all {len(facts['gpus'])} GPUs",
            "unset CUDA_VISIBLE_DEVICES",
            ("env.CUDA_VISIBLE_DEVICES",),
        )
    elif cards:
        yield Case(
            f"{cards} NVIDIA cards are in this machine, but no driver answers", "nvidia-smi", ("nvidia_cards", "driver")
        )
    else:
        yield Case("device is cuda, but this host has no GPU", "--device cpu", ("gpus",))


def gpus_are_too_few(facts: Facts, intent: Intent) -> Iterator[Case]:
    here = len(visible_gpus(facts))
    if wants_cuda(facts, intent) and intent.nproc and 0 < here < intent.nproc:
        hidden = len(facts["gpus"]) - here
        more = (
            f", {hidden} more are hidden by CUDA_VISIBLE_DEVICES={env(facts, 'CUDA_VISIBLE_DEVICES')}" if hidden else ""
        )
        yield Case(f"{intent.nproc} GPUs are requested, {here} visible{more}", f"--nproc {here}", ("gpus",))


def gpus_are_hidden(facts: Facts, intent: Intent) -> Iterator[Case]:
    hidden = [gpu for gpu in facts.get("gpus") or () if gpu.get("visible") is False]
    if hidden and visible_gpus(facts):
        yield Case(
            f"CUDA_VISIBLE_DEVICES={env(facts, 'CUDA_VISIBLE_DEVICES')} hides {len(hidden)} of {len(facts['gpus'])} GPUs",
            "unset CUDA_VISIBLE_DEVICES",
            ("env.CUDA_VISIBLE_DEVICES",),
        )


def visible_devices_are_unknown(facts: Facts, intent: Intent) -> Iterator[Case]:
    listed = [device.strip() for device in (env(facts, "CUDA_VISIBLE_DEVICES") or "").split(",") if device.strip()]
    gpus = facts.get("gpus")
    if not gpus or not listed:
        return
    known = [str(gpu.get("index")) for gpu in gpus]
    uuids = [str(gpu.get("uuid")) for gpu in gpus]
    absent = [name for name in listed if name not in known and not any(uuid.startswith(name) for uuid in uuids)]
    if absent:
        yield Case(
            f"CUDA_VISIBLE_DEVICES={','.join(listed)} lists {', '.join(absent)}, the GPUs of this host are {', '.join(known)}",
            f"export CUDA_VISIBLE_DEVICES={','.join(known)}",
            ("env.CUDA_VISIBLE_DEVICES",),
        )


def gpu_memory_is_in_use(facts: Facts, intent: Intent) -> Iterator[Case]:
    for name, gpu in named_gpus(facts):
        total, free = gpu.get("memory_total_bytes"), gpu.get("memory_free_bytes")
        processes = gpu.get("processes") or []
        if not total or free is None:
            continue
        short = intent.need_gpu_bytes is not None and free < intent.need_gpu_bytes <= total
        if not short and (not processes or total - free < USED_SHARE * total):
            continue
        users = ", ".join(map(describe_process, processes)) or "processes that are not visible from here"
        needs = f", {format_bytes(intent.need_gpu_bytes)} needed" if short and intent.need_gpu_bytes else ""
        yield Case(
            f"{name}: {format_bytes(total - free)} of {format_bytes(total)} used by {users}{needs}",
            fix_for_used_memory(facts, gpu, intent),
            ("gpus",),
            "stop" if short and wants_cuda(facts, intent) else "warn",
        )


def describe_process(process: Mapping[str, Any]) -> str:
    used = process.get("used_bytes")
    size = f", {format_bytes(used)}" if used else ""
    return f"{process.get('name') or 'unknown'} (pid {process.get('pid')}{size})"


def fix_for_used_memory(facts: Facts, gpu: Mapping[str, Any], intent: Intent) -> str:
    """Returns a kill only for Python processes: never for a desktop, nor for a pid without a name (outside this container)."""
    ours = [str(user["pid"]) for user in gpu.get("processes") or () if str(user.get("name") or "").startswith("python")]
    free = [str(other.get("index")) for other in visible_gpus(facts) if is_free(other, intent)]
    return (
        f"kill {' '.join(ours)}"
        if ours
        else f"export CUDA_VISIBLE_DEVICES={','.join(free)}"
        if free
        else LIST_GPU_PROCESSES
    )


def is_free(gpu: Mapping[str, Any], intent: Intent) -> bool:
    total, free = gpu.get("memory_total_bytes") or 0, gpu.get("memory_free_bytes") or 0
    return total - free < USED_SHARE * total and free >= (intent.need_gpu_bytes or 1)


def gpu_memory_is_too_small(facts: Facts, intent: Intent) -> Iterator[Case]:
    for name, gpu in named_gpus(facts):
        total = gpu.get("memory_total_bytes")
        if wants_cuda(facts, intent) and total and intent.need_gpu_bytes and total < intent.need_gpu_bytes:
            depth = (intent.config or {}).get("depth")
            yield Case(
                f"{name} has {format_bytes(total)}, weights and optimizer alone need {format_bytes(intent.need_gpu_bytes)}",
                f"--depth {max(1, depth // 2)}" if depth else "a smaller model",
                ("gpus",),
            )


def pcie_link_is_narrow(facts: Facts, intent: Intent) -> Iterator[Case]:
    if num_ranks(facts, intent) < 2 or not wants_cuda(facts, intent):
        return
    for name, gpu in named_gpus(facts):
        width, widest = at(gpu, "pcie.width"), at(gpu, "pcie.width_max")
        if width and not gpu.get("nvlinks") and (width <= NARROW_WIDTH or (widest and 2 * width <= widest)):
            yield Case(
                f"{name} uses {width} PCIe lanes of {widest or 'n/a'}, generation {at(gpu, 'pcie.generation_max') or 'n/a'}",
                "paceline comm",
                ("gpus",),
            )


def p2p_is_unreliable(facts: Facts, intent: Intent) -> Iterator[Case]:
    if num_ranks(facts, intent) < 2 or not wants_cuda(facts, intent) or is_on(env(facts, "NCCL_P2P_DISABLE")):
        return
    driver, iommu = version_of(at(facts, "driver.version")), at(facts, "network.iommu")
    cards = [
        (name, gpu)
        for name, gpu in named_gpus(facts)
        if any(model in str(gpu.get("name")) for model in CONSUMER_WITHOUT_P2P) and any((gpu.get("p2p") or {}).values())
    ]
    if len(cards) > 1 and ((driver and driver[0] < P2P_DRIVER) or iommu):
        because = f"driver {at(facts, 'driver.version')} is older than {P2P_DRIVER}"
        if driver and driver[0] >= P2P_DRIVER:
            because = "the IOMMU is on"
        yield Case(
            f"the driver reports P2P between {len(cards)} {short_name(cards[0][1].get('name'))}, and {because}",
            "export NCCL_P2P_DISABLE=1",
            ("gpus", "driver.version", "network.iommu"),
        )


def p2p_is_disabled(facts: Facts, intent: Intent) -> Iterator[Case]:
    links = [gpu.get("nvlinks") or 0 for _, gpu in named_gpus(facts)]
    if is_on(env(facts, "NCCL_P2P_DISABLE")) and len(links) > 1 and all(links):
        yield Case(
            f"NCCL_P2P_DISABLE={env(facts, 'NCCL_P2P_DISABLE')}, and the {len(links)} GPUs have NVLink",
            "unset NCCL_P2P_DISABLE",
            ("env.NCCL_P2P_DISABLE", "gpus"),
        )


def gpus_are_mixed(facts: Facts, intent: Intent) -> Iterator[Case]:
    names = sorted({short_name(gpu.get("name")) for gpu in visible_gpus(facts)})
    if len(names) > 1 and wants_cuda(facts, intent) and num_ranks(facts, intent) > 1:
        best = max(visible_gpus(facts), key=lambda gpu: gpu.get("memory_total_bytes") or 0).get("name")
        same = [str(gpu.get("index")) for gpu in visible_gpus(facts) if gpu.get("name") == best]
        yield Case(f"the GPUs are {' and '.join(names)}", f"export CUDA_VISIBLE_DEVICES={','.join(same)}", ("gpus",))


def compute_mode_refuses(facts: Facts, intent: Intent) -> Iterator[Case]:
    for name, gpu in named_gpus(facts):
        mode = gpu.get("compute_mode")
        busy = mode == "exclusive" and bool(gpu.get("processes"))
        if wants_cuda(facts, intent) and (mode == "prohibited" or busy):
            used = " and another process uses it" if busy else ""
            fix = f"sudo nvidia-smi -i {gpu.get('index')} -c DEFAULT"
            yield Case(f"{name} is in compute mode {mode}{used}", fix, ("gpus",))


def mig_is_on(facts: Facts, intent: Intent) -> Iterator[Case]:
    for name, gpu in named_gpus(facts):
        if gpu.get("mig") and wants_cuda(facts, intent) and num_ranks(facts, intent) > 1:
            yield Case(f"{name} is split by MIG", f"sudo nvidia-smi -i {gpu.get('index')} -mig 0", ("gpus",))


def gpu_has_memory_errors(facts: Facts, intent: Intent) -> Iterator[Case]:
    for name, gpu in named_gpus(facts):
        if gpu.get("ecc_errors"):
            fix = f"sudo nvidia-smi -i {gpu.get('index')} --gpu-reset"
            yield Case(f"{name} counts {gpu['ecc_errors']} uncorrected memory errors", fix, ("gpus",))


def gpu_is_hot(facts: Facts, intent: Intent) -> Iterator[Case]:
    for name, gpu in named_gpus(facts):
        hot, throttle = (gpu.get("temperature_c") or 0) >= HOT_C, [t for t in gpu.get("throttle") or () if t != "power"]
        if hot or throttle:
            slowed = f", throttled by {' and '.join(throttle)}" if throttle else ""
            at_c = (
                f"{gpu.get('temperature_c')} °C" if gpu.get("temperature_c") is not None else "of unknown temperature"
            )
            yield Case(
                f"{name} is {at_c}{slowed}",
                f"nvidia-smi -i {gpu.get('index')} -q -d TEMPERATURE,PERFORMANCE",
                ("gpus",),
            )


def gpu_power_is_limited(facts: Facts, intent: Intent) -> Iterator[Case]:
    for name, gpu in named_gpus(facts):
        limit, usual = gpu.get("power_limit_w"), gpu.get("power_limit_default_w")
        if limit and usual and limit < LOW_POWER_SHARE * usual:
            fix = f"sudo nvidia-smi -i {gpu.get('index')} -pl {usual:.0f}"
            yield Case(f"{name} is limited to {limit:.0f} W of {usual:.0f} W", fix, ("gpus",))


def driver_does_not_answer(facts: Facts, intent: Intent) -> Iterator[Case]:
    error = facts.get("nvml_error")
    if not error:
        return
    fix = "sudo reboot" if "mismatch" in error else "nvidia-smi"
    if "nvidia-ml-py" in error:
        fix = "pip install nvidia-ml-py"
    working = [str(gpu.get("index")) for gpu in visible_gpus(facts) if gpu.get("name")]
    if working:
        fix = f"export CUDA_VISIBLE_DEVICES={','.join(working)}"
    yield Case(
        f"the GPUs cannot be queried: {error}",
        fix,
        ("nvml_error", "driver"),
        "stop" if intent.device == "cuda" and not working else "warn",
    )


def precision_is_unsupported(facts: Facts, intent: Intent) -> Iterator[Case]:
    needed = {"bf16": BF16_CAPABILITY, "fp16": FP16_CAPABILITY}.get(intent.precision or "")
    if needed is None or not wants_cuda(facts, intent):
        return
    for name, gpu in named_gpus(facts):
        capability = tuple(gpu.get("capability") or ())
        if capability and capability < needed:
            other = "fp16" if intent.precision == "bf16" and capability >= FP16_CAPABILITY else "fp32"
            yield Case(
                f"{name} has capability {'.'.join(map(str, capability))}, {intent.precision} needs"
                f" {'.'.join(map(str, needed))}",
                f"--precision {other}",
                ("gpus",),
            )


GPU_VERDICTS = (
    Verdict("gpu-missing", "stop", rule=gpus_are_missing,
            cause="device is cuda and no GPU is visible.",
            why="there is no device to train on", fix="Check CUDA_VISIBLE_DEVICES and nvidia-smi, or train on the CPU."),
    Verdict("gpu-driver-silent", "warn", rule=driver_does_not_answer,
            cause="The NVIDIA driver does not answer; `Driver/library version mismatch` follows an update without a "
                  "reboot.",
            why="CUDA does not start", fix="Reboot, or read the output of nvidia-smi."),
    Verdict("gpu-fewer", "stop", rule=gpus_are_too_few,
            cause="Fewer GPUs are visible than processes are requested.",
            why="two ranks would share a card, and NCCL refuses that", fix="Start as many processes as there are GPUs."),
    Verdict("gpu-hidden", "note", rule=gpus_are_hidden,
            cause="CUDA_VISIBLE_DEVICES hides some of the GPUs.",
            why="they will not be used", fix="Unset it, if that is not intended."),
    Verdict("gpu-name-wrong", "warn", rule=visible_devices_are_unknown,
            cause="CUDA_VISIBLE_DEVICES lists a GPU that this host does not have.",
            why="CUDA hides it and every GPU after it", fix="List the GPUs of this host."),
    Verdict("gpu-memory-held", "warn", rule=gpu_memory_is_in_use,
            cause="Another process uses memory of a GPU, visible from here or not; a stop where the free memory is too small.",
            why="out of memory, at the start or at the first evaluation", fix="End that process, or hide that card."),
    Verdict("gpu-memory-short", "stop", rule=gpu_memory_is_too_small,
            cause="Weights, gradients and optimizer states alone exceed the memory of the card.",
            why="out of memory before the first step", fix="Use a smaller depth, or more GPUs to shard the states over."),
    Verdict("gpu-link-narrow", "warn", rule=pcie_link_is_narrow,
            cause="A card has four PCIe lanes or fewer, or half of those that it supports: a chipset slot, a riser, a shared "
                  "M.2.",
            why="gradients wait for the link: several cards may be no faster than one",
            fix="Use another slot; `paceline comm` measures what it costs."),
    Verdict("gpu-p2p-lies", "warn", rule=p2p_is_unreliable,
            cause="Consumer cards report P2P in a configuration where it does not work.",
            why="NCCL hangs with the GPUs at 100 %, or gives wrong sums", fix="Update the driver to 570, or switch P2P off."),
    Verdict("gpu-p2p-off", "warn", rule=p2p_is_disabled,
            cause="P2P is switched off on cards with NVLink.",
            why="traffic goes through the CPU's memory instead", fix="Unset NCCL_P2P_DISABLE."),
    Verdict("gpu-mixed", "warn", rule=gpus_are_mixed,
            cause="The cards are different models.",
            why="all cards wait for the slowest, and the smallest memory limits the batch", fix="Use the cards of one model."),
    Verdict("gpu-refuses-work", "stop", rule=compute_mode_refuses,
            cause="The card is in compute mode prohibited, or exclusive with another process on it.",
            why="CUDA refuses the process", fix="Reset the mode."),
    Verdict("gpu-mig", "warn", rule=mig_is_on,
            cause="MIG splits a card.",
            why="NCCL does not work between the parts of one card", fix="Switch MIG off."),
    Verdict("gpu-ecc-errors", "warn", rule=gpu_has_memory_errors,
            cause="The card reports uncorrected memory errors.",
            why="it may compute wrong results or fail during the run", fix="Reset it; replace it if the errors return."),
    Verdict("gpu-hot", "warn", rule=gpu_is_hot,
            cause="The card is at 85 °C or more, or throttled by heat or by its power supply.",
            why="it trains slower than it could", fix="Find out what throttles it."),
    Verdict("gpu-power-limited", "note", rule=gpu_power_is_limited,
            cause="The power limit is under four fifths of the default.",
            why="it trains slower than it could", fix="Raise it, if that is not intended."),
    Verdict("precision-unsupported", "stop", rule=precision_is_unsupported,
            cause="The card does not support the precision.",
            why="it would be emulated or refused", fix="Use another precision."),
)  # fmt: skip
