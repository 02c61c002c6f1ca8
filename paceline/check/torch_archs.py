"""
GPU architectures as a build of PyTorch is told them: --arch, or TORCH_CUDA_ARCH_LIST in the environment. Pure.

What is taken, and what a name stands for, is what PyTorch's CMake takes: cmake/Modules_CUDA_fix/upstream/FindCUDA/
select_compute_arch.cmake, as torch 2.13 ships it. Commas are ours; CMake is given semicolons.
"""

import re
import shlex

from paceline.errors import UsageError

Capability = tuple[int, int]
ARCH_FLAG, ARCH_VARIABLE = "--arch", "TORCH_CUDA_ARCH_LIST"
AUTO = "Auto"  # the cards that are here
SETS = (AUTO, "Common", "All")  # each the whole list or nothing; the toolkit decides which they are
NAMED: dict[str, tuple[Capability, ...]] = {
    "Kepler+Tesla": ((3, 7),),
    "Kepler": ((3, 5),),
    "Maxwell+Tegra": ((5, 3),),
    "Maxwell": ((5, 0), (5, 2)),
    "Pascal": ((6, 0), (6, 1)),
    "Volta+Tegra": ((7, 2),),
    "Volta": ((7, 0),),
    "Turing": ((7, 5),),
    "Ampere+Tegra": ((8, 7),),
    "Ampere": ((8, 0), (8, 6)),
    "Ada": ((8, 9),),
    "Hopper": ((9, 0),),
    "Blackwell+Tegra": ((10, 1),),
    "Blackwell": ((10, 0), (12, 0)),
}
PTX = "+PTX"
NUMBER = re.compile(
    r"(\d+)\.(\d)[af]?(\(\d+\.\d\))?"
)  # 9.0a: for that one alone; 10.0f: its family; 8.9(8.6): from that PTX
NEARLY = re.compile(r"(?:sm_?|compute_?)?([3-9]|\d\d)\.?(\d)([af]?)(\+ptx)?")  # sm_120, 120, 9.0A
EXAMPLE = "12.0"


def split_archs(text: str) -> list[str]:
    return [word for word in re.split(r"[;,\s]+", text) if word]


def parse_archs(text: str, *, given: str = ARCH_FLAG) -> tuple[Capability, ...]:
    """Capabilities of '7.0;12.0', '8.6, 9.0a', '12.0+PTX' or 'Ampere Hopper'; none of a set. given: the flag or the variable."""
    words = split_archs(text)
    if len(words) == 1 and words[0] in SETS:
        return ()
    wrong = [word for word in words if not capabilities_in(word)]
    if wrong or not words:
        raise not_an_arch(text, wrong[0] if wrong else "nothing", given=given)
    return tuple(dict.fromkeys(each for word in words for each in capabilities_in(word)))


def capabilities_in(word: str) -> tuple[Capability, ...]:
    """None for what CMake refuses."""
    bare = word.removesuffix(PTX)
    number = NUMBER.fullmatch(bare)
    return ((int(number[1]), int(number[2])),) if number else NAMED.get(bare, ())


def not_an_arch(text: str, word: str, *, given: str) -> UsageError:
    mended = shlex.quote(
        ";".join(each if capabilities_in(each) else nearest(each) for each in split_archs(text)) or EXAMPLE
    )
    if given == ARCH_FLAG:
        return UsageError(f"{ARCH_FLAG} {text}: {word} is no architecture", fix=f"{ARCH_FLAG} {mended}")
    return UsageError(
        f"{given}={text}, set in your environment: {word} is no architecture",
        fix=f"export {given}={mended}, or unset it: then the build is for the cards here",
    )


def nearest(word: str) -> str:
    """What was probably meant."""
    found = NEARLY.fullmatch(word.lower())
    if found:
        return f"{found[1]}.{found[2]}{found[3]}" + (PTX if found[4] else "")
    names = {name.lower(): name for name in NAMED}
    return names.get(word.lower().removesuffix(PTX.lower()), EXAMPLE)
