"""
Verdicts on PyTorch: is it there, is it for these cards and this driver, is it the one that is really loaded.

Wheels: pytorch/pytorch RELEASE.md. Driver of a CUDA version: NVIDIA's CUDA Toolkit release notes, table of minor version
compatibility: any driver of the family runs every minor version of a major one, from the family's first driver on.
"""

import re
from collections.abc import Iterator

from paceline.check.ask import Ask
from paceline.check.verdict import (
    Facts,
    Seen,
    Verdict,
    at,
    each_gpu,
    env,
    num_ranks,
    version_of,
    visible_gpus,
    wants_cuda,
)

OLDEST_TORCH = (2, 11)
WHEELS = "https://download.pytorch.org/whl"
DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}  # Linux, major CUDA version -> first driver
OLDEST_WHEEL_DRIVER = 525  # of cu126 and cu128
STAGE = re.compile(r"(versions|distributed|store|cuda|cuda_libraries|compile): ")  # torch_probe.py: it was imported
BLACKWELL = (10, 0)  # from here on kernels need CUDA 12.8


def install(tag: str) -> str:
    return f"pip install --force-reinstall torch -i {WHEELS}/{tag}"


def wheel_for(facts: Facts) -> str:
    """The tag of the wheels that fit the driver and the cards."""
    driver = version_of(at(facts, "driver.version"))
    newest = max((tuple(gpu.get("capability") or (0, 0)) for gpu in visible_gpus(facts)), default=(0, 0))
    if driver is None or driver[0] >= 580:
        return "cu130" if newest >= (7, 5) or not newest[0] else "cu126"
    return "cu128" if newest >= BLACKWELL else "cu126"


def is_missing(facts: Facts, ask: Ask) -> Iterator[Seen]:
    if facts.get("torch") is None and at(facts, "probes.torch.ok"):
        tag = wheel_for(facts) if facts.get("gpus") else "cpu"
        where = at(facts, "python.executable")
        yield Seen(f"no torch in {where}", f"pip install torch -i {WHEELS}/{tag}", ("python.executable", "torch"))


def is_broken(facts: Facts, ask: Ask) -> Iterator[Seen]:
    error = at(facts, "torch.error")
    if error:
        part, late = STAGE.match(error), error.startswith("no answer")
        fix = install(wheel_for(facts) if facts.get("gpus") else "cpu")
        if foreign_libraries(facts):
            fix = "unset LD_LIBRARY_PATH LD_PRELOAD"
        elif late:
            fix = "time python -c 'import torch'"
        yield Seen(
            f"torch {at(facts, 'torch.version')} {'is imported, but' if part else 'cannot be imported:'} {error}",
            fix,
            ("torch.error", "torch.path"),
            "warn" if part or late else "stop",
        )


def foreign_libraries(facts: Facts) -> list[str]:
    """Paths of what is loaded, or would be, before torch's own of the same name."""
    loaded = at(facts, "torch.libraries") or ()
    return sorted({*(at(facts, "torch.shadowing") or ()), *(lib["path"] for lib in loaded if lib["expected"] is False)})


def is_old(facts: Facts, ask: Ask) -> Iterator[Seen]:
    version = version_of(at(facts, "torch.version"))
    if version and version < OLDEST_TORCH:
        yield Seen(
            f"torch {at(facts, 'torch.version')}, paceline's trainer is made for 2.11 and later",
            "pip install --upgrade 'torch>=2.11'",
            ("torch.version",),
            "stop" if ask.command in ("train", "resume", "comm") else "warn",
        )


def is_cpu_build(facts: Facts, ask: Ask) -> Iterator[Seen]:
    gpus = visible_gpus(facts)
    if facts.get("torch") and gpus and at(facts, "torch.cuda") is None and at(facts, "torch.hip") is None:
        yield Seen(
            f"torch {at(facts, 'torch.version')} was built without CUDA, and {len(gpus)} GPUs are here",
            install(wheel_for(facts)),
            ("torch.version", "torch.cuda"),
            "note" if not wants_cuda(facts, ask) else "warn" if ask.command == "run" else "stop",
        )


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """sm_90: binary, for its major version from its minor on; sm_90a: for that one alone. compute_90: PTX, for all later."""
    kind, _, digits = arch.partition("_")
    if digits.endswith("a"):
        return digits[:-1] == f"{capability[0]}{capability[1]}"
    digits = digits.rstrip("f")
    if not digits.isdigit():
        return False
    major, minor = int(digits[:-1]), int(digits[-1])
    if kind == "compute":
        return (major, minor) <= capability
    return major == capability[0] and minor <= capability[1]


def lacks_kernels(facts: Facts, ask: Ask) -> Iterator[Seen]:
    archs = at(facts, "torch.archs")
    if not archs:
        return
    for name, gpu in each_gpu(facts):
        capability = tuple(gpu.get("capability") or ())
        if capability and not any(runs_on(arch, capability) for arch in archs):
            yield Seen(
                f"{name} needs sm_{capability[0]}{capability[1]}, torch {at(facts, 'torch.version')} has {' '.join(archs)}",
                install(wheel_for(facts)),
                ("torch.archs", "torch.version"),
                "stop" if wants_cuda(facts, ask) else "note",
            )


def has_old_driver(facts: Facts, ask: Ask) -> Iterator[Seen]:
    cuda, driver = version_of(at(facts, "torch.cuda")), version_of(at(facts, "driver.version"))
    needed = DRIVER_OF_CUDA.get(cuda[0]) if cuda else None
    works = at(facts, "torch.cuda_available")  # with NVIDIA's forward compatibility package an older one does
    if cuda and driver and needed and driver[0] < needed and not works:
        fitting = wheel_for(facts) if driver[0] >= OLDEST_WHEEL_DRIVER else None
        newer = f"a driver {needed} or later: https://www.nvidia.com/drivers"
        yield Seen(
            f"driver {at(facts, 'driver.version')}, torch's CUDA {at(facts, 'torch.cuda')} needs {needed} or later",
            install(fitting) if fitting else newer,
            ("driver.version", "torch.cuda"),
            "stop" if wants_cuda(facts, ask) else "note",
        )


def cannot_use_cuda(facts: Facts, ask: Ask) -> Iterator[Seen]:
    known = at(facts, "torch.cuda") and not list(has_old_driver(facts, ask)) and not at(facts, "torch.error")
    if known and visible_gpus(facts) and at(facts, "torch.cuda_available") is False and wants_cuda(facts, ask):
        error = at(facts, "torch.cuda_error") or "torch.cuda.is_available() is False"
        yield Seen(f"torch cannot use the GPUs: {error}", "nvidia-smi", ("torch.cuda_error", "driver.version"))


def lacks_libuv(facts: Facts, ask: Ask) -> Iterator[Seen]:
    if at(facts, "torch.libuv") is False:
        yield Seen(
            f"torch {at(facts, 'torch.version')} has no libuv; paceline starts its ranks with USE_LIBUV=0 and a store of"
            " their own, plain torchrun does not start at all",
            "paceline torch recipe",
            ("torch.libuv", "torch.libuv_error"),
        )


def lacks_backend(facts: Facts, ask: Ask) -> Iterator[Seen]:
    if num_ranks(facts, ask) * ask.num_hosts < 2 or not facts.get("torch") or at(facts, "torch.error"):
        return
    cuda = wants_cuda(facts, ask)
    backend = "nccl" if cuda else "gloo"
    there = at(facts, "torch.nccl_backend" if cuda else "torch.gloo")
    if at(facts, "torch.distributed") is False:
        there, backend = False, "distributed"
    if there is False and not (cuda and at(facts, "torch.cuda") is None):
        yield Seen(
            f"torch {at(facts, 'torch.version')} was built without {backend}, which {num_ranks(facts, ask)} ranks need",
            "--nproc 1",
            ("torch.distributed", "torch.gloo", "torch.nccl_backend"),
        )


def loads_foreign_libraries(facts: Facts, ask: Ask) -> Iterator[Seen]:
    by_path = env(facts, "LD_LIBRARY_PATH") or env(facts, "LD_PRELOAD")
    for path in foreign_libraries(facts):
        yield Seen(
            f"{path} is loaded in place of torch's own library",
            "unset LD_LIBRARY_PATH LD_PRELOAD" if by_path else f"mv {path} {path}.old",
            ("torch.libraries", "torch.shadowing", "env.LD_LIBRARY_PATH"),
        )


def mixes_libuv(facts: Facts, ask: Ask) -> Iterator[Seen]:
    header, library = at(facts, "torch.libuv_header"), at(facts, "torch.libuv_library")
    if header and library and version_of(header)[:2] != version_of(library)[:2]:  # type: ignore[index]
        yield Seen(
            f"built against libuv {header}, {library} is loaded",
            "unset LD_LIBRARY_PATH LD_PRELOAD",
            ("torch.libuv_header", "torch.libuv_library"),
        )


def left_its_libraries(facts: Facts, ask: Ask) -> Iterator[Seen]:
    newer = at(facts, "torch.build_tree.libraries_newer")
    if newer:
        tree = at(facts, "torch.build_tree.path")
        yield Seen(
            f"{len(newer)} libraries in {tree} are newer than those that torch loads: {', '.join(newer[:3])}",
            f"cmake --install {tree}",
            ("torch.build_tree",),
        )


def is_debug(facts: Facts, ask: Ask) -> Iterator[Seen]:
    if at(facts, "torch.debug"):
        yield Seen("torch is a debug build", install(wheel_for(facts)), ("torch.debug",))


def mixes_nccl(facts: Facts, ask: Ask) -> Iterator[Seen]:
    used = version_of(at(facts, "torch.nccl"))
    major = (version_of(at(facts, "torch.cuda")) or (0,))[0]
    package = at(facts, f"packages.nvidia-nccl-cu{major}")
    installed = version_of(package)
    if used and installed and used[:3] != installed[:3]:
        yield Seen(
            f"torch runs with NCCL {at(facts, 'torch.nccl')}, nvidia-nccl-cu{major} is {package}",
            f"pip install nvidia-nccl-cu{major}=={at(facts, 'torch.nccl')}",
            ("torch.nccl", f"packages.nvidia-nccl-cu{major}"),
        )


def comes_from_pythonpath(facts: Facts, ask: Ask) -> Iterator[Seen]:
    path, prefix = at(facts, "torch.path") or "", at(facts, "python.prefix") or ""
    folders = [folder for folder in (env(facts, "PYTHONPATH") or "").split(":") if folder]
    if path and prefix and not path.startswith(prefix) and any(path.startswith(folder) for folder in folders):
        yield Seen(f"torch comes from PYTHONPATH: {path}", "unset PYTHONPATH", ("torch.path", "env.PYTHONPATH"))


VERDICTS = (
    Verdict("torch-missing", "stop", look=is_missing,
            cause="PyTorch is not installed for this Python.",
            why="nothing can be trained without it",
            fix="Install the wheel for this driver and card; `paceline torch recipe` prints which."),
    Verdict("torch-broken", "stop", look=is_broken,
            cause="`import torch` fails: a library is missing, foreign or of another version. A warning where it is only "
                  "slow, or where a part of it fails after the import.",
            why="every rank would end at its first line",
            fix="Clear LD_LIBRARY_PATH, or install the wheel again."),
    Verdict("torch-old", "warn", look=is_old,
            cause="PyTorch is older than 2.11; for paceline's own trainer this is a stop.",
            why="the trainer uses calls that it does not have",
            fix="Upgrade torch."),
    Verdict("torch-cpu-build", "stop", look=is_cpu_build,
            cause="A CPU wheel on a machine with GPUs.",
            why="the GPUs would stand idle",
            fix="Install a CUDA wheel."),
    Verdict("torch-no-kernels", "stop", look=lacks_kernels,
            cause="The wheel has no kernels for the card (sm_XY), and no PTX that it could translate.",
            why="the first kernel fails with `no kernel image is available for execution on the device`",
            fix="Install a wheel that has them; `paceline torch recipe` knows which."),
    Verdict("driver-old", "stop", look=has_old_driver,
            cause="The driver is older than the CUDA version of the wheel allows.",
            why="CUDA does not initialise",
            fix="Update the driver, or install a wheel for an older CUDA."),
    Verdict("torch-no-cuda", "stop", look=cannot_use_cuda,
            cause="GPUs, driver and wheel are there, and torch cannot use CUDA all the same.",
            why="the run would fail at its start",
            fix="See what the driver says."),
    Verdict("torch-no-libuv", "warn", look=lacks_libuv,
            cause="PyTorch was built without libuv, which its TCPStore wants by default.",
            why="scripts that make a TCPStore themselves end with `use_libuv was requested but PyTorch was built without "
                "libuv support`",
            fix="A wheel has libuv; in a build of your own it comes with USE_TENSORPIPE."),
    Verdict("torch-no-backend", "stop", look=lacks_backend,
            cause="PyTorch was built without the backend that several ranks need: NCCL on GPUs, gloo on CPUs.",
            why="init_process_group fails",
            fix="One process, or another build."),
    Verdict("library-foreign", "warn", look=loads_foreign_libraries,
            cause="A library of the same name is loaded from outside torch: LD_LIBRARY_PATH, LD_PRELOAD, an old local "
                  "build.",
            why="mixed versions crash, or compute wrong, far from the cause",
            fix="Clear the variable, or move the file away."),
    Verdict("libuv-mismatch", "warn", look=mixes_libuv,
            cause="Headers of one libuv and the library of another.",
            why="the store may crash or hang",
            fix="Let one of them be found alone."),
    Verdict("torch-build-left", "warn", look=left_its_libraries,
            cause="A build tree holds newer libraries than the ones that are loaded.",
            why="what you built last is not what runs",
            fix="Install it."),
    Verdict("torch-debug", "warn", look=is_debug,
            cause="A debug build of PyTorch.",
            why="it is several times slower",
            fix="Install a release."),
    Verdict("nccl-mixed", "warn", look=mixes_nccl,
            cause="The installed NCCL package is not of the version that torch runs with.",
            why="NCCL calls fail or hang when the versions differ",
            fix="Install the matching one."),
    Verdict("torch-from-pythonpath", "note", look=comes_from_pythonpath,
            cause="PYTHONPATH puts another torch before the installed one.",
            why="pip's version is not the one that runs",
            fix="Unset PYTHONPATH."),
)  # fmt: skip
