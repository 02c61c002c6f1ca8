"""
Verdicts on PyTorch: whether it is installed, fits these cards and this driver, and is the one that is loaded.

Wheels: pytorch/pytorch RELEASE.md. Driver of a CUDA version: NVIDIA's CUDA Toolkit release notes, table of minor version
compatibility: any driver of the family runs every minor version of a major one, from the family's first driver on.
"""

import re
from collections.abc import Iterator

from paceline.check.verdicts.rules import (
    Case,
    Facts,
    Intent,
    Verdict,
    at,
    env,
    named_gpus,
    num_ranks,
    version_of,
    visible_gpus,
    wants_cuda,
)

OLDEST_TORCH = (2, 11)
WHEELS = "https://download.pytorch.org/whl"
DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}  # Linux, major CUDA version -> first driver
OLDEST_WHEEL_DRIVER = 525  # of cu126 and cu128
# of torch_probe.py: the import succeeded
STAGE = re.compile(r"(versions|distributed|store|cuda|cuda_libraries|compile): ")
BLACKWELL = (10, 0)  # from here on kernels need CUDA 12.8


def install(tag: str) -> str:
    return f"pip install --force-reinstall torch -i {WHEELS}/{tag}"


def wheel_for(facts: Facts) -> str:
    """Returns the tag of the wheels that fit the driver and the cards."""
    driver = version_of(at(facts, "driver.version"))
    newest = max((tuple(gpu.get("capability") or (0, 0)) for gpu in visible_gpus(facts)), default=(0, 0))
    if driver is None or driver[0] >= 580:
        return "cu130" if newest >= (7, 5) or not newest[0] else "cu126"
    return "cu128" if newest >= BLACKWELL else "cu126"


def torch_is_missing(facts: Facts, intent: Intent) -> Iterator[Case]:
    if facts.get("torch") is None and at(facts, "probes.torch.ok"):
        tag = wheel_for(facts) if facts.get("gpus") else "cpu"
        where = at(facts, "python.executable")
        yield Case(f"no torch in {where}", f"pip install torch -i {WHEELS}/{tag}", ("python.executable", "torch"))


def torch_is_broken(facts: Facts, intent: Intent) -> Iterator[Case]:
    error = at(facts, "torch.error")
    if error:
        part, late = STAGE.match(error), error.startswith("no answer")
        fix = install(wheel_for(facts) if facts.get("gpus") else "cpu")
        if foreign_libraries(facts):
            fix = "unset LD_LIBRARY_PATH LD_PRELOAD"
        elif late:
            fix = "time python -c 'import torch'"
        yield Case(
            f"torch {at(facts, 'torch.version')} {'is imported, but' if part else 'cannot be imported:'} {error}",
            fix,
            ("torch.error", "torch.path"),
            "warn" if part or late else "stop",
        )


def foreign_libraries(facts: Facts) -> list[str]:
    """Returns the libraries that are loaded, or would be, instead of torch's own of the same name."""
    loaded = at(facts, "torch.libraries") or ()
    return sorted({*(at(facts, "torch.shadowing") or ()), *(lib["path"] for lib in loaded if lib["expected"] is False)})


def torch_is_old(facts: Facts, intent: Intent) -> Iterator[Case]:
    version = version_of(at(facts, "torch.version"))
    if version and version < OLDEST_TORCH:
        yield Case(
            f"torch {at(facts, 'torch.version')}, paceline's trainer needs 2.11 or later",
            "pip install --upgrade 'torch>=2.11'",
            ("torch.version",),
            "stop" if intent.command in ("train", "resume", "comm") else "warn",
        )


def torch_is_a_cpu_build(facts: Facts, intent: Intent) -> Iterator[Case]:
    gpus = visible_gpus(facts)
    if facts.get("torch") and gpus and at(facts, "torch.cuda") is None and at(facts, "torch.hip") is None:
        yield Case(
            f"torch {at(facts, 'torch.version')} was built without CUDA, and this host has {len(gpus)} GPUs",
            install(wheel_for(facts)),
            ("torch.version", "torch.cuda"),
            "note" if not wants_cuda(facts, intent) else "warn" if intent.command == "run" else "stop",
        )


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Returns whether kernels of `arch` run: sm_90 from 9.0 to 9.x, sm_90a on 9.0 alone, compute_90 (PTX) on 9.0 and later."""
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


def torch_lacks_kernels(facts: Facts, intent: Intent) -> Iterator[Case]:
    archs = at(facts, "torch.archs")
    if not archs:
        return
    for name, gpu in named_gpus(facts):
        capability = tuple(gpu.get("capability") or ())
        if capability and not any(runs_on(arch, capability) for arch in archs):
            yield Case(
                f"{name} needs sm_{capability[0]}{capability[1]}, torch {at(facts, 'torch.version')} has {' '.join(archs)}",
                install(wheel_for(facts)),
                ("torch.archs", "torch.version"),
                "stop" if wants_cuda(facts, intent) else "note",
            )


def driver_is_too_old(facts: Facts, intent: Intent) -> Iterator[Case]:
    cuda, driver = version_of(at(facts, "torch.cuda")), version_of(at(facts, "driver.version"))
    needed = DRIVER_OF_CUDA.get(cuda[0]) if cuda else None
    works = at(facts, "torch.cuda_available")  # with NVIDIA's forward compatibility package an older one does
    if cuda and driver and needed and driver[0] < needed and not works:
        fitting = wheel_for(facts) if driver[0] >= OLDEST_WHEEL_DRIVER else None
        newer = f"a driver {needed} or later: https://www.nvidia.com/drivers"
        yield Case(
            f"driver {at(facts, 'driver.version')}, torch's CUDA {at(facts, 'torch.cuda')} needs {needed} or later",
            install(fitting) if fitting else newer,
            ("driver.version", "torch.cuda"),
            "stop" if wants_cuda(facts, intent) else "note",
        )


def cuda_does_not_work(facts: Facts, intent: Intent) -> Iterator[Case]:
    known = at(facts, "torch.cuda") and not list(driver_is_too_old(facts, intent)) and not at(facts, "torch.error")
    if known and visible_gpus(facts) and at(facts, "torch.cuda_available") is False and wants_cuda(facts, intent):
        error = at(facts, "torch.cuda_error") or "torch.cuda.is_available() is False"
        yield Case(f"torch cannot use the GPUs: {error}", "nvidia-smi", ("torch.cuda_error", "driver.version"))


def torch_lacks_libuv(facts: Facts, intent: Intent) -> Iterator[Case]:
    if at(facts, "torch.libuv") is False:
        yield Case(
            f"torch {at(facts, 'torch.version')} has no libuv; paceline starts its ranks with USE_LIBUV=0 and its own"
            " store, plain torchrun does not start",
            "paceline torch recipe",
            ("torch.libuv", "torch.libuv_error"),
        )


def torch_lacks_a_backend(facts: Facts, intent: Intent) -> Iterator[Case]:
    if num_ranks(facts, intent) * intent.num_hosts < 2 or not facts.get("torch") or at(facts, "torch.error"):
        return
    cuda = wants_cuda(facts, intent)
    backend = "nccl" if cuda else "gloo"
    there = at(facts, "torch.nccl_backend" if cuda else "torch.gloo")
    if at(facts, "torch.distributed") is False:
        there, backend = False, "distributed"
    if there is False and not (cuda and at(facts, "torch.cuda") is None):
        yield Case(
            f"torch {at(facts, 'torch.version')} was built without {backend}, which {num_ranks(facts, intent)} ranks need",
            "--nproc 1",
            ("torch.distributed", "torch.gloo", "torch.nccl_backend"),
        )


def libraries_are_foreign(facts: Facts, intent: Intent) -> Iterator[Case]:
    by_path = env(facts, "LD_LIBRARY_PATH") or env(facts, "LD_PRELOAD")
    for path in foreign_libraries(facts):
        yield Case(
            f"{path} is loaded instead of torch's own library",
            "unset LD_LIBRARY_PATH LD_PRELOAD" if by_path else f"mv {path} {path}.old",
            ("torch.libraries", "torch.shadowing", "env.LD_LIBRARY_PATH"),
        )


def libuv_versions_differ(facts: Facts, intent: Intent) -> Iterator[Case]:
    header, library = at(facts, "torch.libuv_header"), at(facts, "torch.libuv_library")
    if header and library and version_of(header)[:2] != version_of(library)[:2]:  # type: ignore[index]
        yield Case(
            f"built against libuv {header}, {library} is loaded",
            "unset LD_LIBRARY_PATH LD_PRELOAD",
            ("torch.libuv_header", "torch.libuv_library"),
        )


def built_libraries_are_not_installed(facts: Facts, intent: Intent) -> Iterator[Case]:
    newer = at(facts, "torch.build_tree.libraries_newer")
    if newer:
        tree = at(facts, "torch.build_tree.path")
        yield Case(
            f"{len(newer)} libraries in {tree} are newer than those that torch loads: {', '.join(newer[:3])}",
            f"cmake --install {tree}",
            ("torch.build_tree",),
        )


def torch_is_a_debug_build(facts: Facts, intent: Intent) -> Iterator[Case]:
    if at(facts, "torch.debug"):
        yield Case("torch is a debug build", install(wheel_for(facts)), ("torch.debug",))


def nccl_versions_differ(facts: Facts, intent: Intent) -> Iterator[Case]:
    used = version_of(at(facts, "torch.nccl"))
    major = (version_of(at(facts, "torch.cuda")) or (0,))[0]
    package = at(facts, f"packages.nvidia-nccl-cu{major}")
    installed = version_of(package)
    if used and installed and used[:3] != installed[:3]:
        yield Case(
            f"torch runs with NCCL {at(facts, 'torch.nccl')}, nvidia-nccl-cu{major} is {package}",
            f"pip install nvidia-nccl-cu{major}=={at(facts, 'torch.nccl')}",
            ("torch.nccl", f"packages.nvidia-nccl-cu{major}"),
        )


def torch_is_from_pythonpath(facts: Facts, intent: Intent) -> Iterator[Case]:
    path, prefix = at(facts, "torch.path") or "", at(facts, "python.prefix") or ""
    folders = [folder for folder in (env(facts, "PYTHONPATH") or "").split(":") if folder]
    if path and prefix and not path.startswith(prefix) and any(path.startswith(folder) for folder in folders):
        yield Case(f"torch comes from PYTHONPATH: {path}", "unset PYTHONPATH", ("torch.path", "env.PYTHONPATH"))


TORCH_VERDICTS = (
    Verdict("torch-missing", "stop", rule=torch_is_missing,
            cause="PyTorch is not installed for this Python.",
            why="training needs it", fix="Install the wheel for this driver and card; `paceline torch recipe` prints which."),
    Verdict("torch-broken", "stop", rule=torch_is_broken,
            cause="`import torch` fails: a library is missing, foreign or of another version. A warning where the import "
                  "is only slow, or where a part of torch fails after it.",
            why="every rank would fail at its first line", fix="Unset LD_LIBRARY_PATH, or reinstall the wheel."),
    Verdict("torch-old", "warn", rule=torch_is_old,
            cause="PyTorch is older than 2.11; for paceline's own trainer this is a stop.",
            why="the trainer uses functions that it does not have", fix="Upgrade torch."),
    Verdict("torch-cpu-build", "stop", rule=torch_is_a_cpu_build,
            cause="A CPU wheel on a machine with GPUs.",
            why="the GPUs would be idle", fix="Install a CUDA wheel."),
    Verdict("torch-no-kernels", "stop", rule=torch_lacks_kernels,
            cause="The wheel has no kernels for the card (sm_XY), and no PTX that the driver could compile for it.",
            why="the first kernel fails with `no kernel image is available for execution on the device`",
            fix="Install a wheel that has them; `paceline torch recipe` prints which."),
    Verdict("driver-old", "stop", rule=driver_is_too_old,
            cause="The driver is older than the CUDA version of the wheel allows.",
            why="CUDA does not initialise", fix="Update the driver, or install a wheel for an older CUDA."),
    Verdict("torch-no-cuda", "stop", rule=cuda_does_not_work,
            cause="GPUs, driver and wheel are present, but torch cannot use CUDA.",
            why="the run would fail at its start", fix="Read the output of nvidia-smi."),
    Verdict("torch-no-libuv", "warn", rule=torch_lacks_libuv,
            cause="PyTorch was built without libuv, which its TCPStore uses by default.",
            why="scripts that make a TCPStore themselves fail with `use_libuv was requested but PyTorch was built without "
                "libuv support`",
            fix="Install a wheel, which has libuv; in your own build it comes with USE_TENSORPIPE."),
    Verdict("torch-no-backend", "stop", rule=torch_lacks_a_backend,
            cause="PyTorch was built without the backend that several ranks need: NCCL on GPUs, gloo on CPUs.",
            why="init_process_group fails", fix="Start one process, or install another build."),
    Verdict("library-foreign", "warn", rule=libraries_are_foreign,
            cause="A library of the same name is loaded from outside torch: LD_LIBRARY_PATH, LD_PRELOAD, an old local "
                  "build.",
            why="mixed versions crash or compute wrong results, far from the cause",
            fix="Unset the variable, or move the file away."),
    Verdict("libuv-mismatch", "warn", rule=libuv_versions_differ,
            cause="torch was built with the headers of one libuv and loads another.",
            why="the store may crash or hang", fix="Unset what makes the loader find the other one."),
    Verdict("torch-build-left", "warn", rule=built_libraries_are_not_installed,
            cause="A build tree has newer libraries than those that are loaded.",
            why="your last build is not the one that runs", fix="Install it."),
    Verdict("torch-debug", "warn", rule=torch_is_a_debug_build,
            cause="A debug build of PyTorch.",
            why="it is several times slower", fix="Install a release."),
    Verdict("nccl-mixed", "warn", rule=nccl_versions_differ,
            cause="The installed NCCL package has another version than the NCCL that torch runs with.",
            why="NCCL calls fail or hang when the versions differ", fix="Install the matching version."),
    Verdict("torch-from-pythonpath", "note", rule=torch_is_from_pythonpath,
            cause="PYTHONPATH puts another torch before the installed one.",
            why="the torch that pip installed is not the one that runs", fix="Unset PYTHONPATH."),
)  # fmt: skip
