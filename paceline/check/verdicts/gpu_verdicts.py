"""
Verdicts on the GPUs: their number, free memory, kind, links and health.

P2P on consumer boards (nccl-tests#117, nccl#1999): drivers before 570 report it on RTX 40 and 50 cards where it does not work,
and an IOMMU breaks it as well.

Capability 12.x lacks instructions of 10.x, which libraries that ask for 10.0 or later do not notice. NVFP4: TransformerEngine#2255,
#2956 and #3281; torchao 0.18 and torchtitan 0.3, whose gates are has_cuda_capability(10, 0). MXFP8: pytorch#198126, and
TransformerEngine's pytorch/quantization.py up to 2.20.
"""

from collections.abc import Mapping
from typing import Any

from paceline.check.verdicts.rules import Case, Cases, Host, Severity, at, is_lost, is_on, short_name, version_of
from paceline.check.verdicts.torch_verdicts import BLACKWELL_DRIVER, driver_command, install, wheel_for
from paceline.plan.precision import NATIVE_FROM
from paceline.units import format_bytes, format_list

P2P_DRIVER = 570
CONSUMER_WITHOUT_P2P = ("RTX 40", "RTX 50")
USED_SHARE = 0.05  # of a card; a desktop takes less
LIST_GPU_PROCESSES = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"
HOT_C = 85
LOW_POWER_SHARE = 0.8
NARROW_WIDTH = 4
BF16_CAPABILITY, FP16_CAPABILITY = (8, 0), (5, 3)
LOW_CUDA = {"fp8": (12, 0), "mxfp8": (12, 8), "nvfp4": (12, 8)}  # the first whose cuBLAS has the products
SCALED_MM_TORCH = (2, 10)
ALL_MXFP8_LAYOUTS = (13, 6)  # cuBLAS, with CUDA 13.3 update 1
TRANSFORMER_ENGINE = "transformer-engine"
UPGRADE_ENGINE = "pip install --upgrade --no-build-isolation 'transformer_engine[pytorch]>=2.20'"
OTHER_FORMAT = "in the script: {}, or bf16"
AO_FP8 = OTHER_FORMAT.format("fp8 with one scale a tensor (torchao.float8.convert_to_float8_training)")
ENGINE_FP8 = OTHER_FORMAT.format("Float8CurrentScaling() as the recipe, in place of MXFP8BlockScaling()")
NO_KERNELS = "has its kernels for 10.x alone, and lets 12.x pass"
# package, versions from and up to, what it does with NVFP4 on capability 12.x, fix
FALSE_FP4 = (
    (
        TRANSFORMER_ENGINE,
        (2, 8),
        (2, 20),
        "makes gradients that are all zeros, or does not start its kernel",
        UPGRADE_ENGINE,
    ),
    ("torchao", (0, 18), (0, 20), NO_KERNELS, AO_FP8),
    ("torchtitan", (0, 3), (0, 4), NO_KERNELS, AO_FP8),
)
ENGINE_REFUSES_MXFP8 = (2, 0), (2, 21)  # versions from and up to


def gpu_missing(host: Host) -> Cases:
    gpus, hidden = host.at("gpus"), host.env("CUDA_VISIBLE_DEVICES")
    if gpus is None or host.gpus or host.intent.device != "cuda":
        return
    if gpus and hidden is not None:
        what = f"CUDA_VISIBLE_DEVICES={hidden} hides all {len(gpus)} GPUs"
        yield Case(what, "unset CUDA_VISIBLE_DEVICES", evidence=("env.CUDA_VISIBLE_DEVICES",))
    elif cards := host.at("nvidia_cards"):
        what = f"{cards} NVIDIA cards are in this machine, but no driver answers"
        yield Case(what, "nvidia-smi", evidence=("nvidia_cards", "driver"))
    else:
        yield Case("device is cuda, but this host has no GPU", "--device cpu")


def gpu_driver_silent(host: Host) -> Cases:
    error = host.at("nvml_error")
    if not error:
        return
    working = [str(gpu.get("index")) for gpu in host.gpus]
    lost = [gpu for gpu in host.at("gpus") or () if is_lost(gpu)]
    if lost and not any(gpu.get("visible") for gpu in lost):
        return
    if working:
        fix = f"export CUDA_VISIBLE_DEVICES={','.join(working)}"
    elif "nvidia-ml-py" in error:
        fix = "pip install nvidia-ml-py"
    else:
        fix = "sudo reboot" if lost or "mismatch" in error else "nvidia-smi"
    fatal = host.intent.device != "cpu" and not working
    yield Case(f"the GPUs cannot be queried: {error}", fix, "stop" if fatal else "warn")


def gpu_fewer(host: Host) -> Cases:
    num_visible, nproc = len(host.gpus), host.intent.nproc
    if host.uses_cuda and nproc and 0 < num_visible < nproc:
        hidden, visible = len(hidden_gpus(host)), host.env("CUDA_VISIBLE_DEVICES")
        more = f", {hidden} more are hidden by CUDA_VISIBLE_DEVICES={visible}" if hidden else ""
        yield Case(f"{nproc} GPUs are requested, {num_visible} visible{more}", f"--nproc {num_visible}")


def gpu_hidden(host: Host) -> Cases:
    num_gpus, num_hidden = len(host.at("gpus") or ()), len(hidden_gpus(host))
    if host.gpus and num_hidden:
        visible = host.env("CUDA_VISIBLE_DEVICES")
        what = f"CUDA_VISIBLE_DEVICES={visible} hides {num_hidden} of {num_gpus} GPUs"
        yield Case(what, "unset CUDA_VISIBLE_DEVICES")


def hidden_gpus(host: Host) -> list[Mapping[str, Any]]:
    """Returns the cards that CUDA_VISIBLE_DEVICES hides; hiding one that does not answer is as it should be."""
    return [gpu for gpu in host.at("gpus") or () if gpu.get("visible") is False and not is_lost(gpu)]


def gpu_name_wrong(host: Host) -> Cases:
    listed = [device.strip() for device in (host.env("CUDA_VISIBLE_DEVICES") or "").split(",") if device.strip()]
    gpus = host.at("gpus") or []
    known, uuids = [str(gpu.get("index")) for gpu in gpus], [str(gpu.get("uuid")) for gpu in gpus]
    absent = [name for name in listed if name not in known and not any(uuid.startswith(name) for uuid in uuids)]
    if any(gpu.get("mig") and gpu.get("visible") for gpu in gpus):  # the UUIDs of its parts are no facts
        absent = [name for name in absent if not name.startswith("MIG-")]
    if known and absent:
        yield Case(
            f"CUDA_VISIBLE_DEVICES={','.join(listed)} lists {', '.join(absent)}, the GPUs of this host are {', '.join(known)}",
            f"export CUDA_VISIBLE_DEVICES={','.join(known)}",
        )


def gpu_memory_held(host: Host) -> Cases:
    needed = host.intent.need_gpu_bytes
    for name, gpu in host.named_gpus():
        total, free = gpu.get("memory_total_bytes"), gpu.get("memory_free_bytes")
        processes = gpu.get("processes") or []
        if not total or free is None:
            continue
        short = needed is not None and free < needed <= total
        if not short and (not processes or total - free < USED_SHARE * total):
            continue
        users = ", ".join(map(describe_process, processes)) or "processes that are not visible from here"
        needs = f", {format_bytes(needed)} needed" if short and needed else ""
        what = f"{name}: {format_bytes(total - free)} of {format_bytes(total)} used by {users}{needs}"
        # a kill only for Python processes: never for a desktop, nor for a pid without a name (outside this container)
        ours = [str(user["pid"]) for user in processes if str(user.get("name") or "").startswith("python")]
        others = [str(other.get("index")) for other in host.gpus if is_free(other, needed or 1)]
        if ours:
            fix = f"kill {' '.join(ours)}"
        else:
            fix = f"export CUDA_VISIBLE_DEVICES={','.join(others)}" if others else LIST_GPU_PROCESSES
        yield Case(what, fix, "stop" if short and host.uses_cuda else "warn")


def describe_process(process: Mapping[str, Any]) -> str:
    used = process.get("used_bytes")
    size = f", {format_bytes(used)}" if used else ""
    return f"{process.get('name') or 'unknown'} (pid {process.get('pid')}{size})"


def is_free(gpu: Mapping[str, Any], needed_bytes: int) -> bool:
    total, free = gpu.get("memory_total_bytes") or 0, gpu.get("memory_free_bytes") or 0
    return total - free < USED_SHARE * total and free >= needed_bytes


def gpu_memory_short(host: Host) -> Cases:
    needed, depth = host.intent.need_gpu_bytes, host.intent.config.get("depth")
    for name, gpu in host.named_gpus():
        total = gpu.get("memory_total_bytes")
        if host.uses_cuda and total and needed and total < needed:
            what = f"{name} has {format_bytes(total)}, weights and optimizer alone need {format_bytes(needed)}"
            yield Case(what, f"--depth {max(1, depth // 2)}" if depth else "a smaller model")


def gpu_link_narrow(host: Host) -> Cases:
    for name, gpu in host.named_gpus():
        width, widest, generation = (at(gpu, f"pcie.{key}") for key in ("width", "width_max", "generation_max"))
        narrow = width and (width <= NARROW_WIDTH or (widest and 2 * width <= widest))
        if host.uses_several_gpus and narrow and not gpu.get("nvlinks"):
            what = f"{name} uses {width} PCIe lanes of {widest or 'n/a'}, generation {generation or 'n/a'}"
            yield Case(what, "paceline comm")


def gpu_p2p_lies(host: Host) -> Cases:
    driver = version_of(host.at("driver.version"))
    cards = [
        short_name(gpu.get("name"))
        for gpu in host.gpus
        if any(model in str(gpu.get("name")) for model in CONSUMER_WITHOUT_P2P) and any((gpu.get("p2p") or {}).values())
    ]
    old = driver is not None and driver[0] < P2P_DRIVER
    wrong = len(cards) > 1 and (old or host.at("network.iommu"))
    if wrong and host.uses_several_gpus and not is_on(host.env("NCCL_P2P_DISABLE")):
        because = f"driver {host.at('driver.version')} is older than {P2P_DRIVER}" if old else "the IOMMU is on"
        what = f"the driver reports P2P between {len(cards)} {cards[0]}, and {because}"
        yield Case(what, "export NCCL_P2P_DISABLE=1")


def gpu_p2p_off(host: Host) -> Cases:
    value, links = host.env("NCCL_P2P_DISABLE"), [gpu.get("nvlinks") or 0 for gpu in host.gpus]
    if is_on(value) and len(links) > 1 and all(links):
        yield Case(f"NCCL_P2P_DISABLE={value}, and the {len(links)} GPUs have NVLink", "unset NCCL_P2P_DISABLE")


def gpu_mixed(host: Host) -> Cases:
    names = sorted({short_name(gpu.get("name")) for gpu in host.gpus})
    if len(names) > 1 and host.uses_several_gpus:
        best = max(host.gpus, key=lambda gpu: gpu.get("memory_total_bytes") or 0).get("name")
        same = [str(gpu.get("index")) for gpu in host.gpus if gpu.get("name") == best]
        yield Case(f"the GPUs are {' and '.join(names)}", f"export CUDA_VISIBLE_DEVICES={','.join(same)}")


def gpu_refuses_work(host: Host) -> Cases:
    for name, gpu in host.named_gpus():
        mode = gpu.get("compute_mode")
        busy = mode == "exclusive" and bool(gpu.get("processes"))
        if host.uses_cuda and (mode == "prohibited" or busy):
            used = " and another process uses it" if busy else ""
            yield Case(f"{name} is in compute mode {mode}{used}", f"sudo nvidia-smi -i {gpu.get('index')} -c DEFAULT")


def gpu_mig(host: Host) -> Cases:
    for name, gpu in host.named_gpus():
        if gpu.get("mig") and host.uses_several_gpus:
            yield Case(f"{name} is split by MIG", f"sudo nvidia-smi -i {gpu.get('index')} -mig 0")


def gpu_ecc_errors(host: Host) -> Cases:
    for name, gpu in host.named_gpus():
        if errors := gpu.get("ecc_errors"):
            fix = f"sudo nvidia-smi -i {gpu.get('index')} --gpu-reset"
            yield Case(f"{name} counts {errors} uncorrected memory errors", fix)


def gpu_hot(host: Host) -> Cases:
    for name, gpu in host.named_gpus():
        celsius, throttle = gpu.get("temperature_c"), [cause for cause in gpu.get("throttle") or () if cause != "power"]
        if throttle or (celsius or 0) >= HOT_C:
            slowed = f", throttled by {' and '.join(throttle)}" if throttle else ""
            temperature = "of unknown temperature" if celsius is None else f"{celsius} °C"
            fix = f"nvidia-smi -i {gpu.get('index')} -q -d TEMPERATURE,PERFORMANCE"
            yield Case(f"{name} is {temperature}{slowed}", fix)


def gpu_power_limited(host: Host) -> Cases:
    for name, gpu in host.named_gpus():
        limit, usual = gpu.get("power_limit_w"), gpu.get("power_limit_default_w")
        if limit and usual and limit < LOW_POWER_SHARE * usual:
            fix = f"sudo nvidia-smi -i {gpu.get('index')} -pl {usual:.0f}"
            yield Case(f"{name} is limited to {limit:.0f} W of {usual:.0f} W", fix)


def precision_unsupported(host: Host) -> Cases:
    low, precision = host.intent.low_precision, host.intent.low_precision or host.intent.precision
    needed = NATIVE_FROM.get(low) if low else {"bf16": BF16_CAPABILITY, "fp16": FP16_CAPABILITY}.get(precision or "")
    for name, gpu in host.named_gpus():
        capability = tuple(gpu.get("capability") or ())
        if host.uses_cuda and needed and capability and capability < needed:
            other = "fp16" if precision == "bf16" and capability >= FP16_CAPABILITY else "auto" if low else "fp32"
            what = f"{name} has capability {dotted(capability)}, {precision} needs {dotted(needed)}"
            yield Case(what, f"--precision {other}")


def dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def precision_library_old(host: Host) -> Cases:
    """Compares what hardware products of the config need with torch, its cuBLAS and the driver; emulated ones need nothing."""
    name, version = host.intent.low_precision or "", host.at("torch.version")
    needed, torch, cuda = LOW_CUDA.get(name), version_of(version), version_of(host.at("torch.cuda"))
    if needed is None or not host.uses_cuda:
        return
    if torch and torch < SCALED_MM_TORCH:
        what = f"torch {version} has no torch.nn.functional.scaled_mm, with which {name} products are computed"
        yield Case(what, "pip install --upgrade 'torch>=2.11'", evidence=("torch.version",))
    package, cublas = cublas_of(host)
    old = ""
    if cuda and cuda[:2] < needed:
        old = f"torch {version} is for CUDA {dotted(cuda)}"
    elif cublas and cublas[:2] < needed:
        old = f"{package} is {dotted(cublas)}"
    if old:
        what = f"{old}, {name} products need the cuBLAS of CUDA {dotted(needed)}"
        yield Case(what, install(wheel_for(host.facts)), evidence=("torch.cuda", f"packages.{package}"))
    driver = version_of(host.at("driver.version"))
    if driver and driver[0] < BLACKWELL_DRIVER and needed >= (12, 8):
        what = f"driver {host.at('driver.version')}, {name} products need {BLACKWELL_DRIVER}, which came with CUDA 12.8"
        yield Case(what, driver_command(BLACKWELL_DRIVER), evidence=("driver.version",))


def cublas_of(host: Host) -> tuple[str, tuple[int, ...] | None]:
    """Returns the package of the cuBLAS that torch loads, and its version; from CUDA 13 on the name has no number."""
    cuda = version_of(host.at("torch.cuda"))
    package = f"nvidia-cublas-cu{cuda[0]}" if cuda and cuda[0] < 13 else "nvidia-cublas"
    return package, version_of(host.at(f"packages.{package}"))


def fp4_false_support(host: Host) -> Cases:
    card = capability_12(host)
    for package, first, end, does, fix in FALSE_FP4:
        if card and first <= installed(host, package) < end:
            what = f"{card}: {package} {host.at(f'packages.{package}')} offers NVFP4 there, and {does}"
            yield Case(what, fix, severity_of_scripts(host), ("gpus", f"packages.{package}"))


def mxfp8_not_on_sm120(host: Host) -> Cases:
    card = capability_12(host)
    if card is None:
        return
    first, end = ENGINE_REFUSES_MXFP8
    if first <= installed(host, TRANSFORMER_ENGINE) < end:
        what = f"{card}: {TRANSFORMER_ENGINE} {host.at(f'packages.{TRANSFORMER_ENGINE}')} refuses MXFP8 there"
        yield Case(what, ENGINE_FP8, severity_of_scripts(host), ("gpus", f"packages.{TRANSFORMER_ENGINE}"))
    package, cublas = cublas_of(host)
    libraries = [library for library in ("torchao", "torchtitan") if installed(host, library)]
    if libraries and cublas and cublas < ALL_MXFP8_LAYOUTS:
        what = f"{card}, where {package} {dotted(cublas)} has one of three layouts of MXFP8 products; {format_list(libraries)}"
        what += f" {'use' if len(libraries) > 1 else 'uses'} all"
        evidence = ("gpus", f"packages.{package}", *(f"packages.{library}" for library in libraries))
        yield Case(what, AO_FP8, severity_of_scripts(host), evidence)


def capability_12(host: Host) -> str | None:
    """Returns `GPU 0 (RTX 5090) has compute capability 12.0` of the first such card."""
    for name, gpu in host.named_gpus():
        capability = tuple(gpu.get("capability") or ())
        if capability[:1] == (12,):
            return f"{name} has compute capability {dotted(capability)}"
    return None


def installed(host: Host, package: str) -> tuple[int, ...]:
    """Returns the version of a package, () where it is not known to be installed."""
    return version_of(host.at(f"packages.{package}")) or ()


def severity_of_scripts(host: Host) -> Severity:
    """Returns how much a library matters that a script may use and paceline's trainer does not."""
    return "warn" if host.intent.command in ("check", "run") else "note"
