"""
Which row of the table a name means: the driver's, or what a user typed.

A bare name means the variant that has it as its name or among its aliases, the one that people mean by it: H100 and H200
are the SXM modules, A100 the SXM one with 80 GB, RTX 3060 the one with 12 GB and RTX 3080 with 10. Where no variant is
meant more than the others (RTX 4060 Ti, V100) the bare name is an error that lists them; one is never picked in silence.
Laptop GPUs carry the names of desktop cards but other chips and clocks: none is in the table.
"""

import difflib
import re
from collections.abc import Iterator

from paceline.errors import PlanError
from paceline.plan.gpu_table import GPUS, GpuSpec
from paceline.units import MIB

__all__ = ["GPUS", "GpuSpec", "find_gpu", "peak_flops", "spec_of"]

SAME_MEMORY = 0.08  # ECC on or off moves it by a sixteenth, old drivers print 2 % less; variants differ by a fifth
NOT_A_NAME = re.compile(r"nvidia|geforce|tesla|generation|edition|[^a-z0-9]")
LISTED = 8  # names in an error


def find_gpu(words: str) -> GpuSpec:
    """The card that a user typed, in any case and spacing, with or without NVIDIA, GeForce and RTX."""
    key = plain(words)
    forms = (key, "rtx" + key) if key else ()
    for names in (typed_names, driver_keys, first_words):
        for form in forms:
            found = [gpu for gpu in GPUS if form in names(gpu)]
            if len(found) == 1:
                return found[0]
            if found:
                raise PlanError(
                    f"{words} is the name of {len(found)} cards: {listed([gpu.name for gpu in found])}",
                    fix=f'name one of them, such as "{found[0].name}"',
                )
    raise PlanError(f"no GPU called {words} is known", fix=f"the nearest known: {listed(nearest(words))}")


def spec_of(driver_name: str, memory_bytes: int) -> GpuSpec | None:
    """The row of a card here; None if its name is not in the table, or its memory is none that it is sold with.

    memory_bytes: as the driver reports it, 0 if it reports none (GB10 shares the host's).
    """
    key = plain(driver_name)
    found = [gpu for gpu in GPUS if key in driver_keys(gpu)]
    if not memory_bytes:
        return found[0] if len(found) == 1 else None
    same = [gpu for gpu in found if abs(memory_bytes / (gpu.memory_mib * MIB) - 1) <= SAME_MEMORY]
    return same[0] if len(same) == 1 else None


def peak_flops(spec: GpuSpec | None, precision: str) -> float | None:
    """Dense peak of one device in FLOP/s; None where no figure with a source is known."""
    return spec.peak_flops.get(precision) if spec else None


def plain(words: str) -> str:
    """NVIDIA GeForce RTX 4060 Ti -> rtx4060ti."""
    return NOT_A_NAME.sub("", words.lower())


def typed_names(gpu: GpuSpec) -> Iterator[str]:
    return (plain(name) for name in (gpu.name, *gpu.aliases))


def driver_keys(gpu: GpuSpec) -> Iterator[str]:
    return (plain(name) for name in gpu.driver_names)


def first_words(gpu: GpuSpec) -> Iterator[str]:
    """rtx, rtx4060, rtx4060ti, rtx4060ti16gb: what may stand for the whole name if no other card's begins so."""
    words = gpu.name.split()
    return (plain("".join(words[:count])) for count in range(1, len(words) + 1))


def nearest(words: str) -> list[str]:
    """Names with all of these words, else names spelt much like them, else three that people often have."""
    wanted = [plain(word) for word in words.split()]
    if holding := [gpu.name for gpu in GPUS if all(word in plain(gpu.name) for word in wanted)]:
        return holding
    names = {key: gpu.name for gpu in GPUS for key in typed_names(gpu)}
    key = plain(words)
    near = difflib.get_close_matches("rtx" + key if key[:1].isdigit() else key, names, n=3)
    return list(dict.fromkeys(names[match] for match in near)) or ["RTX 4090", "RTX 5090", "H100 SXM"]


def listed(names: list[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")
