"""
Which PyTorch fits these cards and this driver: the wheel to install, or the options of a build and the script that builds it.

Wheels and their kernels: pytorch/pytorch RELEASE.md, release and CUDA support matrices as of 2.14. Driver of a CUDA version:
torch_verdicts.py. Options: pytorch/pytorch CMakeLists.txt and cmake/Dependencies.cmake. docs/torch.md explains them. The script is
torch_build.sh with its settings; the tests run it on a stand-in for PyTorch with the same option names, not on PyTorch itself.
GPU architectures are written as PyTorch's CMake accepts them: cmake/Modules_CUDA_fix/upstream/FindCUDA/select_compute_arch.cmake
of torch 2.13. Commas are an addition of ours; CMake gets semicolons.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from paceline.check.verdicts.torch_verdicts import driver_command, driver_of, install, runs_on, runs_on_driver
from paceline.errors import PacelineError, UsageError, expand_home

Capability = tuple[int, int]
AUTO = "Auto"  # the cards that are here
SETS = (AUTO, "Common", "All")  # these stand alone; the toolkit decides what they contain
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
# what CUDA has kernels for beside those; a later major version may come
REAL = sorted({*chain(*NAMED.values()), (3, 0), (3, 2), (6, 2), (8, 8), (10, 3), (11, 0), (12, 1)})
PTX = "+PTX"
# 9.0a: for that one alone; 10.0f: for its family; 8.9(8.6): from the PTX of 8.6
NUMBER = re.compile(r"(\d+)\.(\d)[af]?(\(\d+\.\d\))?")
NEARLY = re.compile(r"(?:sm_?|compute_?)?([3-9]|\d\d)\.?(\d)([af]?)(\+ptx)?")  # sm_120, 120, 9.0A
EXAMPLE = "12.0"


def split_archs(text: str) -> list[str]:
    return [arch for arch in re.split(r"[;,\s]+", text) if arch]


def parse_archs(text: str) -> tuple[Capability, ...]:
    """Returns the capabilities of '7.0;12.0', '8.6, 9.0a', '12.0+PTX' or 'Ampere Hopper'; none for a set such as 'All'."""
    archs = split_archs(text)
    if len(archs) == 1 and archs[0] in SETS:
        return ()
    unknown = [arch for arch in archs if not capabilities_in(arch)]
    if unknown or not archs:
        corrected = ";".join(arch if capabilities_in(arch) else nearest_arch(arch) for arch in archs) or EXAMPLE
        raise UsageError(
            f"--arch {text}: {unknown[0] if unknown else 'nothing'} is not an architecture",
            fix=f"--arch {shlex.quote(corrected)}",
        )
    capabilities = tuple(dict.fromkeys(capability for arch in archs for capability in capabilities_in(arch)))
    for major, minor in capabilities:
        if (major, minor) not in REAL and major <= REAL[-1][0]:
            fix = f"one of {', '.join(f'{major}.{minor}' for major, minor in REAL)}"
            raise UsageError(f"--arch {text}: no GPU has compute capability {major}.{minor}", fix=fix)
    return capabilities


def capabilities_in(arch: str) -> tuple[Capability, ...]:
    """Returns the capabilities of one name or number; none for what CMake refuses."""
    bare = arch.removesuffix(PTX)
    number = NUMBER.fullmatch(bare)
    return ((int(number[1]), int(number[2])),) if number else NAMED.get(bare, ())


def nearest_arch(text: str) -> str:
    """Returns the architecture that was probably meant."""
    match = NEARLY.fullmatch(text.lower())
    if match:
        return f"{match[1]}.{match[2]}{match[3]}" + (PTX if match[4] else "")
    names = {name.lower(): name for name in NAMED}
    return names.get(text.lower().removesuffix(PTX.lower()), EXAMPLE)


X86_64 = ("50", "60", "70", "75", "80", "86", "90")
X86_64_13 = ("75", "80", "86", "90", "100", "120", "+120")  # + for PTX
AARCH64_13 = ("80", "90", "100", "110", "120", "+120")
SOURCE = (
    "pytorch/pytorch RELEASE.md (release and CUDA support matrices, as of 2.14); NVIDIA's CUDA release notes (drivers)"
)


@dataclass(frozen=True)
class Wheel:
    """The wheels of one index: torch from `first` to `last` (None: still released), built for CUDA `cuda`."""

    tag: str
    cuda: str
    first: str
    last: str | None
    x86_64: tuple[str, ...]  # kernels on that machine
    aarch64: tuple[str, ...]

    @property
    def driver(self) -> int:
        return driver_of(self.cuda)

    @property
    def torch(self) -> str:
        return self.first if self.first == self.last else f"{self.first} - {self.last or NEWEST_TORCH}"

    def kernels(self, machine: str) -> tuple[str, ...]:
        return {"x86_64": self.x86_64, "aarch64": self.aarch64}.get(machine, ())

    def lacking(self, capabilities: Iterable[Capability], machine: str, *, ptx: bool) -> list[Capability]:
        """Returns the cards for which the wheel has no kernels. ptx: what the driver can compile from its PTX counts."""
        kernels = [arch for arch in self.kernels(machine) if ptx or not arch.startswith("+")]
        archs = [f"compute_{arch[1:]}" if arch.startswith("+") else f"sm_{arch}" for arch in kernels]
        return [card for card in capabilities if not any(runs_on(arch, card) for arch in archs)]

    def why_not(self, capabilities: Sequence[Capability], driver: str | None, machine: str) -> str | None:
        """Returns None where the wheel fits."""
        if lacking := self.lacking(capabilities, machine, ptx=True):
            return f"no kernels for {join(lacking)}"
        if runs_on_driver(self.cuda, driver, capabilities):
            return None
        return f"needs driver {driver_of(self.cuda, capabilities)}"


NEWEST_TORCH = "2.14"
WHEELS = (  # the first that fits is recommended
    Wheel("cu130", "13.0", "2.11", None, X86_64_13, AARCH64_13),
    Wheel("cu126", "12.6", "2.11", None, X86_64, ("80", "90")),
    Wheel("cu128", "12.8", "2.11", "2.11", ("75", "80", "86", "90", "100", "120"), ("80", "90", "100", "120")),
    Wheel("cu132", "13.2", "2.12", None, X86_64_13, AARCH64_13),
)
# CUDA version, first and last capability that its nvcc compiles for
TOOLKITS: tuple[tuple[str, Capability, Capability], ...] = (
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


@dataclass(frozen=True)
class Tools:
    """The build tools that this host has. nvcc: its version."""

    nvcc: str | None = None
    cudnn: bool = False
    ccache: bool = False


SCRIPT = "paceline torch recipe --script build.sh"
REQUESTED = "a build was requested"
SOURCE_NOTE = "the script downloads the sources, compiles and installs them; read it, then run it with bash"


@dataclass(frozen=True)
class Recipe:
    """The answer of `paceline torch recipe`: what to install, build or update, and why."""

    kind: Literal["wheel", "build", "driver"]
    command: str
    why: str
    capabilities: tuple[Capability, ...]
    driver: str | None
    machine: str
    notes: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    toolkit: str | None = None  # the CUDA version that a build needs

    def to_json(self) -> dict[str, Any]:
        offered = WHEELS if self.capabilities else ()
        wheels = [{**asdict(wheel), "driver": wheel.driver, "why_not": self.why_not(wheel)} for wheel in offered]
        return {**asdict(self), "wheels": wheels, "source": SOURCE}

    def why_not(self, wheel: Wheel) -> str | None:
        return wheel.why_not(self.capabilities, self.driver, self.machine)


def make_recipe(
    capabilities: Sequence[Capability],
    *,
    driver: str | None,
    machine: str,
    tools: Tools,
    build: bool,
    archs: Sequence[str] = (),
) -> Recipe:
    """Returns the wheel, the build or the driver that these cards need. Raises PacelineError where no CUDA compiles for them.

    capabilities: of the cards; none: CPU only. driver: None where unknown, a new one is assumed. build: a build even where a
    wheel fits. archs: the architectures of a build as the user wrote them, by default the capabilities.
    """
    cards = tuple(sorted(set(capabilities)))
    common: dict[str, Any] = {"capabilities": cards, "driver": driver, "machine": machine}
    if not cards and not build:
        return Recipe("wheel", install("cpu"), "there is no GPU, here or in --arch", **common)
    if not cards:
        return Recipe("build", SCRIPT, REQUESTED, notes=(SOURCE_NOTE,), options=build_options([], tools), **common)
    wheel = first_wheel(cards, driver, machine)
    if wheel and not build:
        why, notes = why_wheel(wheel, cards, machine)
        return Recipe("wheel", install(wheel.tag), why, notes=notes, **common)
    if not wheel and not build and (newer_wheel := first_wheel(cards, None, machine)):
        why = f"the wheels with kernels for {join(cards)} need it"
        return Recipe("driver", driver_command(driver_of(newer_wheel.cuda, cards)), why, **common)
    toolkits = [name for name, first, last in TOOLKITS if all(first <= card <= last for card in cards)]
    if not toolkits:
        raise PacelineError(
            f"neither CUDA 12 nor 13 compiles for {join(cards)}, and PyTorch 2.11 and later need one of them",
            fix="cards of capability 5.0 or later; or train with --device cpu",
        )
    toolkit = next((name for name in toolkits if runs_on_driver(name, driver, cards)), None)
    if toolkit is None:
        why = f"CUDA {toolkits[-1]}, which has kernels for {join(cards)}, needs it"
        return Recipe("driver", driver_command(driver_of(toolkits[-1], cards)), why, **common)
    archs = archs or [f"{major}.{minor}" for major, minor in cards]
    nvcc = f"this host has {tools.nvcc}" if tools.nvcc else "this host has none"
    return Recipe(
        "build",
        f"{SCRIPT} --arch '{';'.join(archs)}'",
        REQUESTED if wheel else f"no wheel for {machine} has kernels for {join(cards)} together",
        notes=(f"it needs nvcc of CUDA {toolkit}, which compiles for {join(cards)}; {nvcc}", SOURCE_NOTE),
        options=build_options(archs, tools),
        toolkit=toolkit,
        **common,
    )


def why_wheel(wheel: Wheel, cards: Sequence[Capability], machine: str) -> tuple[str, tuple[str, ...]]:
    """Returns why a wheel fits these cards, and what to note about it."""
    why = f"CUDA {wheel.cuda} has kernels for {join(cards)} and runs on driver {driver_of(wheel.cuda, cards)} and later"
    if newer_cards := wheel.lacking(cards, machine, ptx=False):
        why = f"CUDA {wheel.cuda} has PTX, from which the driver compiles kernels for {join(newer_cards)} at the first start"
    if wheel.last is None:
        return why, ()
    newer = next(other for other in WHEELS if other.last is None and other.driver > wheel.driver)
    fits = f"with driver {newer.driver} or later {newer.tag} fits, up to torch {NEWEST_TORCH}"
    return why, (f"torch {wheel.last} is the last with CUDA {wheel.cuda}; {fits}",)


def first_wheel(cards: Sequence[Capability], driver: str | None, machine: str) -> Wheel | None:
    return next((wheel for wheel in WHEELS if wheel.why_not(cards, driver, machine) is None), None)


def build_options(archs: Sequence[str], tools: Tools) -> tuple[Option, ...]:
    """Returns the CMake options of a build. archs: as in TORCH_CUDA_ARCH_LIST; none: a build without CUDA."""
    cuda = bool(archs)
    options = [
        Option("CMAKE_BUILD_TYPE", "Release", "a debug build is several times slower"),
        Option("BUILD_PYTHON", "ON", "libtorch_python and torch._C"),
        Option("BUILD_TEST", "OFF", "C++ tests are not needed; their default in setup.py is ON"),
        Option("USE_DISTRIBUTED", "ON", "torch.distributed; OFF silently switches tensorpipe, gloo and NCCL off"),
        Option("USE_TENSORPIPE", "ON", "brings libuv: Dependencies.cmake then adds -DTORCH_USE_LIBUV and the libuv in third_party"),
        Option("USE_GLOO", "ON", "collectives between CPUs"),
        Option("USE_MPI", "OFF", "ON would use any MPI on this host and tie the build to it"),
        Option("USE_CUDA", "ON" if cuda else "OFF", "kernels for the GPUs" if cuda else "there is no GPU, here or in --arch"),
    ]  # fmt: skip
    if cuda:
        options += [
            Option("TORCH_CUDA_ARCH_LIST", ";".join(archs), "only these cards; every further one lengthens the build"),
            Option("USE_NCCL", "ON", "collectives between GPUs"),
            Option("USE_SYSTEM_NCCL", "OFF", "the NCCL version that this PyTorch pins, compiled and linked with it"),
            Option("USE_CUDNN", "ON" if tools.cudnn else "OFF", "this host has cudnn.h" if tools.cudnn else "no cudnn.h here, and"
                   " paceline's models do not need it"),
        ]  # fmt: skip
    if tools.ccache:
        languages = ("C", "CXX", "CUDA") if cuda else ("C", "CXX")
        options += [Option(f"CMAKE_{name}_COMPILER_LAUNCHER", "ccache", "a second build is fast") for name in languages]
    return tuple(options)


def format_recipe(recipe: Recipe, *, script: Path | None = None) -> str:
    """Returns the recipe as text. script: the file that the build script was written to."""
    cards = f"capability {join(recipe.capabilities)}" if recipe.capabilities else "none"
    driver = recipe.driver or "unknown, a new one is assumed"
    lines = [f"cards    {cards}" + (f"; driver {driver}" if recipe.capabilities else "")]
    name = {"wheel": "install", "build": "build", "driver": "need"}[recipe.kind]
    command = f"bash {shlex.quote(str(script))}" if script else recipe.command
    lines += [f"{name:<9}{command}", f"why      {recipe.why}", *(f"note     {note}" for note in recipe.notes)]
    if recipe.options:
        lines += ["", *format_options(recipe.options)]
    if recipe.capabilities:
        lines += ["", *format_wheels(recipe)]
    return "\n".join(lines)


def format_wheels(recipe: Recipe) -> list[str]:
    rows = [("wheel", "torch", "CUDA", "driver", f"kernels ({recipe.machine})", "here")]
    for wheel in WHEELS:
        archs = " ".join(capability_text(arch) for arch in wheel.kernels(recipe.machine))
        rows.append((wheel.tag, wheel.torch, wheel.cuda, str(wheel.driver), archs, recipe.why_not(wheel) or "fits"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, f"source   {SOURCE}"]


def format_options(
    options: Iterable[Option], *, write: Callable[[str], str] = "-D{}".format, before_why: str = "  "
) -> list[str]:
    """Returns NAME=VALUE, as `write` makes it, and why, aligned."""
    definitions = [write(f"{option.name}={option.value}") for option in options]
    width = max(map(len, definitions))
    pairs = zip(definitions, options, strict=True)
    return [f"{definition:<{width}}{before_why}{option.why}" for definition, option in pairs]


def join(capabilities: Iterable[Capability]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in capabilities)


def capability_text(arch: str) -> str:
    """Returns 9.0 for '90' and 12.0+PTX for '+120'."""
    digits = arch.lstrip("+")
    return f"{digits[:-1]}.{digits[-1]}" + ("+PTX" if arch.startswith("+") else "")


SIGNATURE = "Written by `paceline torch recipe --script`"
INSTALLERS = (  # how the os-release NAMEs begin, and what installs a compiler, git and Python's headers there
    (("debian", "ubuntu", "linux mint", "pop!_os"), "apt-get install -y git g++ python{python}-dev"),
    (("fedora", "red", "rocky", "almalinux", "centos"), "dnf install -y git gcc-c++ python3-devel"),
    (("opensuse", "sles"), "zypper install -y git gcc-c++ python3-devel"),
    (("arch", "manjaro"), "pacman -S --needed git gcc python"),
)


def write_script(path: Path, recipe: Recipe, *, system: str) -> None:
    """Writes the build script of a recipe. Raises PacelineError for a driver that is too old, and for a file of the user's."""
    if recipe.kind == "driver":
        raise PacelineError(f"the build needs {recipe.command}: {recipe.why}", fix="update the driver first")
    path = expand_home(path)
    try:
        if path.exists() and SIGNATURE not in path.read_text(encoding="utf-8", errors="replace"):
            raise PacelineError(f"{path} exists, and paceline did not write it", fix="--script another file")
        path.write_text(make_script(recipe, system=system), encoding="utf-8")
        path.chmod(0o755)
    except OSError as error:
        raise PacelineError(f"{path} cannot be written: {error.strerror}", fix="--script another file") from error


def make_script(recipe: Recipe, *, system: str) -> str:
    """Returns torch_build.sh with the settings of a recipe. system: name and version of the operating system, as facts have it."""
    cuda = bool(recipe.capabilities)
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    cards = f"GPUs of capability {join(recipe.capabilities)}" if cuda else "the CPU alone"
    driver = f" (driver {recipe.driver})" if cuda and recipe.driver else ""
    archs = " ".join(f"{major}{minor}" for major, minor in recipe.capabilities)
    settings = [
        f"# {SIGNATURE}",
        f"# for {cards}{driver}, on {system} {recipe.machine}, for Python {python}.",
        f"VERSION=${{VERSION:-v{NEWEST_TORCH}.0}}",
        f"PYTHON=${{PYTHON:-{shlex.quote(sys.executable)}}}",
        f"PACELINE_PYTHON={shlex.quote(sys.executable)} # its paceline checks the torch at the end",
        f"PACKAGES={shlex.quote(install_command(system, python))}",
        f"ARCHS='{archs}' # of the cards; empty: a build without CUDA",
        f"TOOLKIT='CUDA {recipe.toolkit}: https://developer.nvidia.com/cuda-toolkit-archive'" if cuda else "TOOLKIT=",
        f"JOB_GIB={4 if cuda else 2} # memory of one compiler; pytorch issue 124018: 4.5 GiB for one CUDA file",
        f"DISK_GIB={40 if cuda else 15} # of sources with submodules, objects and libraries",
        "OPTIONS=(",
        *(f"  {line}" for line in format_options(recipe.options, write=shlex.quote, before_why=" # ")),
        ")",
    ]
    text = Path(__file__).with_name("torch_build.sh").read_text(encoding="utf-8")
    return text.replace("# SETTINGS", "\n".join(settings))


def install_command(system: str, python: str) -> str:
    command = next((command for names, command in INSTALLERS if system.lower().startswith(names)), None)
    if command is None:
        return f"install g++ and the headers of Python {python}"
    return ("" if os.geteuid() == 0 else "sudo ") + command.format(python=python)
