"""
Facts of the NVIDIA cards and their driver. `python -m paceline.check.probes.gpu_probe`.

It runs as a process of its own, since a wedged driver never answers: whoever starts it has the deadline.
"""

import os
from contextlib import suppress
from typing import Any

from paceline.check.probes.facts import Json, answer
from paceline.plan.nvml import (
    ABSENT,
    MISMATCH,
    SINCE_BOOT,
    UNCORRECTED,
    Card,
    as_text,
    ask,
    count_nvidia_cards,
    cuda_indices,
    import_nvml,
    kernel_driver_version,
    list_cards,
    watts,
)

P2P_READ, P2P_WRITE, P2P_OK = 0, 1, 0  # nvml.h; the binding's own NVML_P2P_CAPS_INDEX_READ is a tuple by mistake
COMPUTE_MODES = {0: "default", 1: "exclusive", 2: "prohibited", 3: "exclusive"}
MAX_NVLINKS = 18


def probe_gpus(request: Json) -> Json:
    """Returns the facts of the driver and of every NVIDIA card."""
    num_cards, nvml = count_nvidia_cards(), import_nvml()
    if nvml is None:
        error = "the package nvidia-ml-py is not installed" if num_cards else None
        facts: Json = {"driver": None, "nvml_error": error, "gpus": None if num_cards else []}
    else:
        facts = describe_gpus(nvml, visible=os.environ.get("CUDA_VISIBLE_DEVICES"), num_cards=num_cards)
    version = kernel_driver_version()
    if facts["driver"] is None and version is not None:  # NVML does not answer
        facts["driver"] = {"version": version, "cuda": None}
    return {**facts, "nvidia_cards": num_cards}


def describe_gpus(nvml: Any, *, visible: str | None, num_cards: int | None) -> Json:
    """Returns driver, nvml_error and gpus, from `nvml` with pynvml's functions. What a card does not report is None."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        kind = type(error).__name__
        message = "Driver/library version mismatch" if kind == MISMATCH else str(error)
        absent = kind in ABSENT and not num_cards
        return {"driver": None, "nvml_error": None if absent else message, "gpus": [] if kind in ABSENT else None}
    try:
        cuda = ask(nvml, nvml.nvmlSystemGetCudaDriverVersion)
        driver = {
            "version": as_text(ask(nvml, nvml.nvmlSystemGetDriverVersion)),
            "cuda": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        }
        cards = list_cards(nvml)
        chosen = cuda_indices(visible, cards)
        gpus = [describe_gpu(cards, index) for index in range(len(cards))]
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    lost = [str(gpu["index"]) for gpu in gpus if gpu["name"] is None]
    return {
        "driver": driver,
        "nvml_error": f"GPU {', '.join(lost)} does not answer" if lost else None,
        "gpus": [{**gpu, "visible": gpu["index"] in chosen} for gpu in gpus],
    }


def describe_gpu(cards: list[Card], index: int) -> Json:
    """Returns the facts of one card; some of them are about its links to the others."""
    card, value = cards[index], cards[index].value
    memory, utilization = value("nvmlDeviceGetMemoryInfo"), value("nvmlDeviceGetUtilizationRates")
    capability, ecc = (value(f"nvmlDeviceGet{name}") for name in ("CudaComputeCapability", "EccMode"))
    mode, display = value("nvmlDeviceGetComputeMode"), value("nvmlDeviceGetDisplayActive")
    return {
        "index": index,
        "uuid": card.uuid() or None,
        "name": card.name(),
        "capability": None if capability is None else list(capability),
        "memory_total_bytes": None if memory is None else int(memory.total),
        "memory_free_bytes": None if memory is None else int(memory.free),
        "processes": card.processes(),
        "utilization": None if utilization is None else utilization.gpu / 100,
        "power_w": card.power_w(),
        "power_limit_w": card.power_limit_w(),
        "power_limit_default_w": watts(value("nvmlDeviceGetPowerManagementDefaultLimit")),
        "temperature_c": card.temperature_c(),
        "ecc": None if ecc is None else bool(ecc[0]),
        "ecc_errors": value("nvmlDeviceGetTotalEccErrors", UNCORRECTED, SINCE_BOOT),
        "compute_mode": COMPUTE_MODES.get(mode),
        "mig": card.is_split(),
        "display": None if display is None else bool(display),
        "throttle": card.throttle(),
        "pcie": {
            "generation": value("nvmlDeviceGetCurrPcieLinkGeneration"),
            "generation_max": value("nvmlDeviceGetMaxPcieLinkGeneration"),
            "width": value("nvmlDeviceGetCurrPcieLinkWidth"),
            "width_max": value("nvmlDeviceGetMaxPcieLinkWidth"),
        },
        "p2p": {str(i): p2p(card, other) for i, other in enumerate(cards) if i != index},
        "nvlinks": nvlinks(card),
    }


def p2p(card: Card, other: Card) -> bool | None:
    """Returns whether the driver says that the two cards may read and write each other's memory."""
    states = [card.value("nvmlDeviceGetP2PStatus", other.handle, kind) for kind in (P2P_READ, P2P_WRITE)]
    return None if None in states else states == [P2P_OK, P2P_OK]


def nvlinks(card: Card) -> int | None:
    """Returns the number of links that are up; 0 where the card has none."""
    if card.handle is None:
        return None
    return sum(bool(card.value("nvmlDeviceGetNvLinkState", link)) for link in range(MAX_NVLINKS))


if __name__ == "__main__":
    answer(probe_gpus)
