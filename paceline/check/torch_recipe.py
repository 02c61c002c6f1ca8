"""
Which PyTorch fits these cards and this driver: the wheel to install, or the CMake options of a build that does. Pure.

Wheels and their kernels: pytorch/pytorch RELEASE.md, release and CUDA support matrices, as they stand for 2.14. Driver of a
CUDA version: torch_verdicts.py. Options: pytorch/pytorch CMakeLists.txt and cmake/Dependencies.cmake. docs/torch.md has the rest.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from paceline.check.torch_archs import Capability
from paceline.check.torch_verdicts import DRIVER_OF_CUDA, install, runs_on
from paceline.check.verdict import version_of
from paceline.errors import PacelineError
from paceline.units import GIB

X86_64 = ("50", "60", "70", "75", "80", "86", "90")
X86_64_13 = ("75", "80", "86", "90", "100", "120", "+120")  # + for PTX
AARCH64_13 = ("80", "90", "100", "110", "120", "+120")
SOURCE = (
    "pytorch/pytorch RELEASE.md (release and CUDA support matrices, as of 2.14); NVIDIA's CUDA release notes (drivers)"
)
JOB_BYTES = {  # our rule, so that no compiler is killed; pytorch issue 124018: 4.5 GiB seen for one CUDA file
    True: 4 * GIB,
    False: 2 * GIB,
}
DISK_BYTES = {True: 40 * GIB, False: 15 * GIB}  # our rule: sources with submodules, objects and libraries
DEPENDS = {  # cmake_dependent_option in CMakeLists.txt: off, without a word, where what it depends on is off
    "USE_TENSORPIPE": "USE_DISTRIBUTED",
    "USE_GLOO": "USE_DISTRIBUTED",
    "USE_MPI": "USE_DISTRIBUTED",
    "USE_NCCL": "USE_CUDA",
    "USE_CUDNN": "USE_CUDA",
    "USE_SYSTEM_NCCL": "USE_NCCL",
}


@dataclass(frozen=True)
class Wheel:
    """The wheels of one index: torch from `first` to `last` (None: still made), built for CUDA `cuda`."""

    tag: str
    cuda: str
    first: str
    last: str | None
    x86_64: tuple[str, ...]  # kernels, by machine
    aarch64: tuple[str, ...]

    @property
    def driver(self) -> int:
        return DRIVER_OF_CUDA[int(self.cuda.partition(".")[0])]

    @property
    def torch(self) -> str:
        return self.first if self.first == self.last else f"{self.first} - {self.last or NEWEST_TORCH}"

    def kernels(self, machine: str) -> tuple[str, ...]:
        return {"x86_64": self.x86_64, "aarch64": self.aarch64}.get(machine, ())

    def why_not(self, capabilities: Iterable[Capability], driver: str | None, machine: str) -> str | None:
        """None where it fits."""
        archs = [arch_name(arch) for arch in self.kernels(machine)]
        lacking = [each for each in capabilities if not any(runs_on(arch, each) for arch in archs)]
        if lacking:
            return f"no kernels for {join(lacking)}"
        major = version_of(driver)
        return f"needs driver {self.driver}" if major and major[0] < self.driver else None


NEWEST_TORCH = "2.14"
WHEELS = (  # the first that fits is taken
    Wheel("cu130", "13.0", "2.11", None, X86_64_13, AARCH64_13),
    Wheel("cu126", "12.6", "2.11", None, X86_64, ("80", "90")),
    Wheel("cu128", "12.8", "2.11", "2.11", ("75", "80", "86", "90", "100", "120"), ("80", "90", "100", "120")),
    Wheel("cu132", "13.2", "2.12", None, X86_64_13, AARCH64_13),
)
TOOLKITS: tuple[tuple[str, Capability, Capability], ...] = (  # nvcc of CUDA, first and last capability it compiles for
    ("13.0", (7, 5), (12, 1)),  # CUDA 13.0 release notes: Maxwell, Pascal and Volta removed
    ("12.9", (5, 0), (12, 1)),
    ("12.8", (5, 0), (12, 0)),
    ("12.6", (5, 0), (9, 0)),  # older ones do not build PyTorch 2.14
)


@dataclass(frozen=True)
class Option:
    """A variable of PyTorch's CMake, and why it is set."""

    name: str
    value: str
    why: str

    @property
    def is_switch(self) -> bool:
        return self.value in ("ON", "OFF")


@dataclass(frozen=True)
class Tools:
    """What of a build's tools is here. nvcc: its version."""

    nvcc: str | None = None
    cudnn: bool = False
    ccache: bool = False


@dataclass(frozen=True)
class Recipe:
    kind: Literal["wheel", "build", "driver"]
    command: str
    why: str
    capabilities: tuple[Capability, ...]
    driver: str | None
    machine: str
    notes: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()

    def to_json(self) -> dict[str, Any]:
        wheels = [
            {**asdict(wheel), "driver": wheel.driver, "why_not": self.why_not(wheel)}
            for wheel in WHEELS
            if self.capabilities
        ]
        return {**asdict(self), "wheels": wheels, "source": SOURCE}

    def why_not(self, wheel: Wheel) -> str | None:
        return wheel.why_not(self.capabilities, self.driver, self.machine)


def make_recipe(
    capabilities: Sequence[Capability],
    *,
    driver: str | None,
    machine: str,
    tools: Tools,
    build: bool = False,
    archs: Sequence[str] = (),
) -> Recipe:
    """capabilities: of the cards, none for a CPU alone. driver: None where unknown, then a new one is assumed.

    build: the build, though a wheel may fit. archs: what a build is for, as it was asked; else the capabilities.
    """
    cards = tuple(sorted(set(capabilities)))
    common: dict[str, Any] = {"capabilities": cards, "driver": driver, "machine": machine}
    if build and not cards:
        return build_recipe("a build was asked for", [], toolkit=None, tools=tools, common=common)
    if not cards:
        return Recipe("wheel", install("cpu"), "no GPU is asked for or found here", **common)
    fitting = next((wheel for wheel in WHEELS if wheel.why_not(cards, driver, machine) is None), None)
    if fitting and not build:
        why = f"CUDA {fitting.cuda} has kernels for {join(cards)} and runs on driver {fitting.driver} and later"
        return Recipe("wheel", install(fitting.tag), why, notes=notes_on(fitting), **common)
    late = next((wheel for wheel in WHEELS if wheel.why_not(cards, None, machine) is None), None)
    if late and not fitting:
        return newer_driver(late.driver, f"the wheels with kernels for {join(cards)} need it", common)
    toolkit = next((each for each in TOOLKITS if all(each[1] <= card <= each[2] for card in cards)), None)
    if toolkit is None:
        raise PacelineError(
            f"neither CUDA 12 nor 13 compiles for {join(cards)}, and PyTorch 2.11 and later need one of them",
            fix="cards of capability 5.0 or later; or train with --device cpu",
        )
    first_driver = DRIVER_OF_CUDA[int(toolkit[0].partition(".")[0])]
    if (version_of(driver) or (first_driver,))[0] < first_driver:
        return newer_driver(first_driver, f"CUDA {toolkit[0]}, which has kernels for {join(cards)}, needs it", common)
    why = "a build was asked for" if fitting else f"no wheel for {machine} has kernels for {join(cards)} together"
    archs = archs or [f"{major}.{minor}" for major, minor in cards]
    return build_recipe(why, archs, toolkit=toolkit[0], tools=tools, common=common)


def build_recipe(
    why: str, archs: Sequence[str], *, toolkit: str | None, tools: Tools, common: Mapping[str, Any]
) -> Recipe:
    asked = f" --arch '{';'.join(archs)}'" if archs else ""
    notes = ["DIR: git clone --recursive https://github.com/pytorch/pytorch"]
    if toolkit:
        here = f"here is {tools.nvcc}" if tools.nvcc else "there is none here"
        notes.insert(0, f"CUDA {toolkit} compiles for {join(common['capabilities'])}; of nvcc {here}")
    return Recipe(
        "build",
        f"paceline torch build --source DIR{asked}",
        why,
        notes=tuple(notes),
        options=build_options(archs, tools),
        **common,
    )


def newer_driver(first: int, why: str, common: Mapping[str, Any]) -> Recipe:
    return Recipe("driver", f"a driver {first} or later: https://www.nvidia.com/drivers", why, **common)


def notes_on(wheel: Wheel) -> tuple[str, ...]:
    if wheel.last is None:
        return ()
    newer = next(each for each in WHEELS if each.last is None and each.driver > wheel.driver)
    return (
        f"torch {wheel.last} is the last with CUDA {wheel.cuda}; driver {newer.driver} or later takes {newer.tag},"
        f" up to torch {NEWEST_TORCH}",
    )


def num_jobs(*, memory_bytes: int | None, cores: int, cuda: bool) -> int:
    """Compilers that fit into memory at once; at least one."""
    return max(1, cores if memory_bytes is None else min(cores, memory_bytes // JOB_BYTES[cuda]))


def build_options(archs: Sequence[str], tools: Tools) -> tuple[Option, ...]:
    """archs: as TORCH_CUDA_ARCH_LIST has them; none: a build for the CPU alone."""
    cuda = bool(archs)
    options = [
        Option("CMAKE_BUILD_TYPE", "Release", "a debug build is several times slower"),
        Option("BUILD_PYTHON", "ON", "libtorch_python and torch._C"),
        Option("BUILD_TEST", "OFF", "C++ tests that nobody runs here; their default in setup.py is ON"),
        Option("USE_DISTRIBUTED", "ON", "torch.distributed; OFF takes tensorpipe, gloo and NCCL with it, without a word"),
        Option("USE_TENSORPIPE", "ON", "brings libuv: with it Dependencies.cmake adds -DTORCH_USE_LIBUV and third_party's"
               " own libuv; an option USE_LIBUV does nothing on Linux"),
        Option("USE_GLOO", "ON", "collectives between CPUs"),
        Option("USE_MPI", "OFF", "ON would take any MPI that is found, and tie the build to it"),
        Option("USE_CUDA", "ON" if cuda else "OFF", "kernels for the GPUs" if cuda else "no GPU is asked for or found here"),
    ]  # fmt: skip
    if cuda:
        listed = ";".join(archs)
        options += [
            Option("TORCH_CUDA_ARCH_LIST", listed, "these cards alone; each further one lengthens the build"),
            Option("USE_NCCL", "ON", "collectives between GPUs"),
            Option("USE_SYSTEM_NCCL", "OFF", "the NCCL that this PyTorch pins, built along and linked in"),
            Option("USE_CUDNN", "ON" if tools.cudnn else "OFF", "cudnn.h is here" if tools.cudnn else "no cudnn.h here; paceline's"
                   " models do without it"),
        ]  # fmt: skip
    if tools.ccache:
        languages = ("C", "CXX", "CUDA") if cuda else ("C", "CXX")
        options += [Option(f"CMAKE_{each}_COMPILER_LAUNCHER", "ccache", "a second build is fast") for each in languages]
    return tuple(options)


def format_recipe(recipe: Recipe) -> str:
    cards = f"capability {join(recipe.capabilities)}" if recipe.capabilities else "none"
    driver = recipe.driver or "not known, a new one is assumed"
    lines = [f"cards    {cards}" + (f"; driver {driver}" if recipe.capabilities else "")]
    name = {"wheel": "install", "build": "build", "driver": "need"}[recipe.kind]
    lines += [f"{name:<9}{recipe.command}", f"why      {recipe.why}", *(f"note     {note}" for note in recipe.notes)]
    if recipe.options:
        lines += ["", *format_options(recipe.options)]
    if recipe.capabilities:
        lines += ["", *format_wheels(recipe)]
    return "\n".join(lines)


def format_wheels(recipe: Recipe) -> list[str]:
    rows = [("wheel", "torch", "CUDA", "driver", f"kernels ({recipe.machine})", "here")]
    for wheel in WHEELS:
        archs = " ".join(shown(arch) for arch in wheel.kernels(recipe.machine))
        rows.append((wheel.tag, wheel.torch, wheel.cuda, str(wheel.driver), archs, recipe.why_not(wheel) or "fits"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, f"source   {SOURCE}"]


def format_options(options: Iterable[Option]) -> list[str]:
    words = [f"-D{option.name}={option.value}" for option in options]
    width = max(map(len, words))
    return [f"{word:<{width}}  {option.why}" for word, option in zip(words, options, strict=True)]


def join(capabilities: Iterable[Capability]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in capabilities)


def arch_name(arch: str) -> str:
    """'90' -> sm_90, '+120' -> compute_120, as torch lists them."""
    return f"compute_{arch[1:]}" if arch.startswith("+") else f"sm_{arch}"


def shown(arch: str) -> str:
    digits = arch.lstrip("+")
    return f"{digits[:-1]}.{digits[-1]}" + ("+PTX" if arch.startswith("+") else "")
