"""
Verdicts on PyTorch: whether it is installed, fits these cards and this driver, and is the one that is loaded.

Wheels: pytorch/pytorch RELEASE.md. Driver of a CUDA version: NVIDIA's CUDA Toolkit release notes, table of minor version
compatibility: any driver of the family runs every minor version of a major one, from the family's first driver on.
"""

import re
from collections.abc import Iterable

from paceline.check.verdicts.rules import Case, Cases, Facts, Host, Severity, at, version_of, visible_gpus

OLDEST_TORCH = (2, 11)
WHEELS = "https://download.pytorch.org/whl"
DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}  # Linux, major CUDA version -> first driver
OLDEST_WHEEL_DRIVER = 525  # of cu126 and cu128
# of torch_probe.py: the import succeeded
STAGE = re.compile(r"(versions|distributed|store|cuda|cuda_libraries|compile): ")
BLACKWELL, BLACKWELL_DRIVER = (10, 0), 570  # from here on kernels need CUDA 12.8, and the driver that came with it
UNSET_LIBRARIES = "unset LD_LIBRARY_PATH LD_PRELOAD"


def install(tag: str) -> str:
    return f"pip install --force-reinstall torch -i {WHEELS}/{tag}"


def driver_of(cuda: str, cards: Iterable[tuple[int, int]] = ()) -> int:
    """Returns the first driver that runs this CUDA version, on these cards."""
    of_cards = BLACKWELL_DRIVER if any(card >= BLACKWELL for card in cards) else 0
    return max(DRIVER_OF_CUDA[int(cuda.partition(".")[0])], of_cards)


def runs_on_driver(cuda: str, driver: str | None, cards: Iterable[tuple[int, int]]) -> bool:
    version = version_of(driver)
    return version is None or version[0] >= driver_of(cuda, cards)


def driver_command(first: int) -> str:
    return f"a driver {first} or later: https://www.nvidia.com/drivers"


def wheel_for(facts: Facts) -> str:
    """Returns the tag of the wheels that fit the driver and the cards."""
    driver = version_of(at(facts, "driver.version"))
    newest = max((tuple(gpu.get("capability") or (0, 0)) for gpu in visible_gpus(facts)), default=(0, 0))
    if driver is None or driver[0] >= DRIVER_OF_CUDA[13]:
        return "cu130" if newest >= (7, 5) or not newest[0] else "cu126"
    return "cu128" if newest >= BLACKWELL else "cu126"


def torch_missing(host: Host) -> Cases:
    if host.at("torch") is None and host.at("probes.torch.ok"):
        tag = wheel_for(host.facts) if host.at("gpus") else "cpu"
        yield Case(f"no torch in {host.at('python.executable')}", f"pip install torch -i {WHEELS}/{tag}")


def torch_broken(host: Host) -> Cases:
    error = host.at("torch.error")
    if not error:
        return
    part, late = STAGE.match(error), error.startswith("no answer")
    if foreign_libraries(host):
        fix = UNSET_LIBRARIES
    elif late:
        fix = "time python -c 'import torch'"
    elif "Invalid log settings" in error:
        fix = "unset TORCH_LOGS"
    else:
        fix = install(wheel_for(host.facts) if host.at("gpus") else "cpu")
    state = "is imported, but" if part else "cannot be imported:"
    yield Case(f"torch {host.at('torch.version')} {state} {error}", fix, "warn" if part or late else "stop")


def foreign_libraries(host: Host) -> list[str]:
    """Returns the libraries that are loaded, or would be, instead of torch's own of the same name."""
    loaded = host.at("torch.libraries") or ()
    return sorted({*(host.at("torch.shadowing") or ()), *(lib["path"] for lib in loaded if lib["expected"] is False)})


def torch_old(host: Host) -> Cases:
    version = version_of(host.at("torch.version"))
    if version and version < OLDEST_TORCH:
        what = f"torch {host.at('torch.version')}, paceline's trainer needs 2.11 or later"
        needed = host.intent.command in ("train", "resume", "comm")
        yield Case(what, "pip install --upgrade 'torch>=2.11'", "stop" if needed else "warn")


def torch_cpu_build(host: Host) -> Cases:
    gpus, driver = len(host.gpus), version_of(host.at("driver.version"))
    if gpus and host.torch_is_cpu_build:
        what = (
            f"torch {host.at('torch.version')} was built without CUDA, and this host has {gpus} GPU{'s' * (gpus > 1)}"
        )
        fix = install(wheel_for(host.facts))
        severity: Severity = "stop"
        if driver and driver[0] < OLDEST_WHEEL_DRIVER:
            what += f"; its driver {host.at('driver.version')} is older than all wheels need"
            fix = f"{driver_command(OLDEST_WHEEL_DRIVER)}, then {fix}"
        if not host.uses_cuda or host.intent.command == "run":
            severity = "warn" if host.uses_cuda else "note"
        yield Case(what, fix, severity)


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


def torch_no_kernels(host: Host) -> Cases:
    archs = host.at("torch.archs") or []
    for name, gpu in host.named_gpus():
        capability = tuple(gpu.get("capability") or ())
        if archs and capability and not any(runs_on(arch, capability) for arch in archs):
            sm = f"sm_{capability[0]}{capability[1]}"
            what = f"{name} needs {sm}, torch {host.at('torch.version')} has {' '.join(archs)}"
            yield Case(what, install(wheel_for(host.facts)), "stop" if host.uses_cuda else "note")


def driver_old(host: Host) -> Cases:
    cuda, driver = version_of(host.at("torch.cuda")), version_of(host.at("driver.version"))
    needed = DRIVER_OF_CUDA.get(cuda[0]) if cuda else None
    works = host.at("torch.cuda_available")  # with NVIDIA's forward compatibility package an older one does
    if driver and needed and driver[0] < needed and not works:
        what = f"driver {host.at('driver.version')}, torch's CUDA {host.at('torch.cuda')} needs {needed} or later"
        wheel_fits = driver[0] >= OLDEST_WHEEL_DRIVER
        fix = install(wheel_for(host.facts)) if wheel_fits else driver_command(needed)
        yield Case(what, fix, "stop" if host.uses_cuda else "note")


def torch_no_cuda(host: Host) -> Cases:
    known = host.at("torch.cuda") and not list(driver_old(host)) and not host.at("torch.error")
    if known and host.gpus and host.at("torch.cuda_available") is False and host.uses_cuda:
        error = host.at("torch.cuda_error") or "torch.cuda.is_available() is False"
        yield Case(f"torch cannot use the GPUs: {error}", "nvidia-smi")


def torch_no_libuv(host: Host) -> Cases:
    if host.at("torch.libuv") is False and host.intent.num_hosts > 1:
        yield Case(
            f"torch {host.at('torch.version')} has no libuv, by which the ranks of several hosts meet",
            install(wheel_for(host.facts) if host.at("gpus") else "cpu"),
            "stop",
        )
    elif host.at("torch.libuv") is False:
        yield Case(
            f"torch {host.at('torch.version')} has no libuv; paceline starts its ranks with USE_LIBUV=0 and its own"
            " store, plain torchrun does not start",
            "paceline torch recipe",
        )


def torch_no_backend(host: Host) -> Cases:
    if host.num_ranks * host.intent.num_hosts < 2 or not host.at("torch") or host.at("torch.error"):
        return
    backend, fact = ("nccl", "torch.nccl_backend") if host.uses_cuda else ("gloo", "torch.gloo")
    missing = host.at(fact) is False
    if host.at("torch.distributed") is False:
        missing, backend = True, "distributed"
    if missing and not (host.uses_cuda and host.at("torch.cuda") is None):
        what = f"torch {host.at('torch.version')} was built without {backend}, which {host.num_ranks} ranks need"
        yield Case(what, "--nproc 1")


def library_foreign(host: Host) -> Cases:
    by_path = host.env("LD_LIBRARY_PATH") or host.env("LD_PRELOAD")
    for path in foreign_libraries(host):
        fix = UNSET_LIBRARIES if by_path else f"mv {path} {path}.old"
        yield Case(f"{path} is loaded instead of torch's own library", fix)


def libuv_mismatch(host: Host) -> Cases:
    header, library = host.at("torch.libuv_header"), host.at("torch.libuv_library")
    if header and library and (version_of(header) or ())[:2] != (version_of(library) or ())[:2]:
        yield Case(f"built against libuv {header}, {library} is loaded", UNSET_LIBRARIES)


def torch_build_left(host: Host) -> Cases:
    newer, tree = host.at("torch.build_tree.libraries_newer"), host.at("torch.build_tree.path")
    if newer:
        what = f"{len(newer)} libraries in {tree} are newer than those that torch loads: {', '.join(newer[:3])}"
        yield Case(what, f"cmake --install {tree}")


def torch_debug(host: Host) -> Cases:
    if host.at("torch.debug"):
        yield Case("torch is a debug build", install(wheel_for(host.facts)))


def nccl_mixed(host: Host) -> Cases:
    nccl, cuda = host.at("torch.nccl"), version_of(host.at("torch.cuda"))
    package = f"nvidia-nccl-cu{cuda[0] if cuda else 0}"
    installed = host.at(f"packages.{package}")
    used_version, installed_version = version_of(nccl), version_of(installed)
    if used_version and installed_version and used_version[:3] != installed_version[:3]:
        what = f"torch runs with NCCL {nccl}, {package} is {installed}"
        yield Case(what, f"pip install {package}=={nccl}", evidence=("torch.nccl", f"packages.{package}"))


def torch_from_pythonpath(host: Host) -> Cases:
    path, prefix = host.at("torch.path") or "", host.at("python.prefix") or ""
    folders = tuple(folder for folder in (host.env("PYTHONPATH") or "").split(":") if folder)
    if path and prefix and not path.startswith(prefix) and path.startswith(folders):
        yield Case(f"torch comes from PYTHONPATH: {path}", "unset PYTHONPATH")
