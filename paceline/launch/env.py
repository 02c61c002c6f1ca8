"""
What the workers' environment must say, and why. Pure: from the user's environment to the workers'.

Whatever the user has set stays as it is; a value that is known to hurt is named in one line. What torch's elastic
agent sets itself (RANK, MASTER_ADDR, ...) is not repeated here. CUDA_VISIBLE_DEVICES is the user's: it is written only
to hide the GPUs from a script that was asked to stay on the CPU.

torch 2.13 reads TORCH_FR_BUFFER_SIZE, and TORCH_NCCL_TRACE_BUFFER_SIZE with a warning that it is the older name
(FlightRecorder.hpp). USE_LIBUV is read where a worker hosts its own store (torch/distributed/rendezvous.py), not where it
joins an agent's.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name of the first
RECORDER_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
RECORDED_COLLECTIVES = 2000  # torch 2.13's own default; older ones record none
LOOPBACK_INTERFACE = "lo"

Origin = Literal["added", "yours", "yours-harmful"]


class EnvRow(NamedTuple):
    """One variable of the workers. reason: why it is added, what would be set instead, or what the user's value does."""

    name: str
    value: str
    reason: str
    origin: Origin


class Launch(NamedTuple):
    """What the environment depends on, besides the user's own."""

    nproc: int  # on this host
    device: str
    cpu_cores: int
    num_hosts: int
    interface: str | None
    libuv: bool
    for_script: bool


def worker_env(
    user_env: Mapping[str, str],
    *,
    nproc: int,
    device: str,
    cpu_cores: int,
    num_hosts: int = 1,
    interface: str | None = None,
    libuv: bool = True,
    for_script: bool = False,
) -> tuple[dict[str, str], list[EnvRow]]:
    """The environment of every worker on one host, and a row for each variable that was added or is the user's.

    interface: of this host, towards the others; only with several hosts. libuv: whether this torch has it.
    for_script: the workers are a script of the user's, which may use any library.
    """
    launch = Launch(nproc, device, cpu_cores, num_hosts, interface, libuv, for_script)
    wanted = {name: (value, reason) for name, value, reason in wanted_values(user_env, launch)}
    rows = [EnvRow(name, value, reason, "added") for name, (value, reason) in wanted.items() if name not in user_env]
    for name, value in sorted(user_env.items()):
        harm = harm_of(name, value, launch)
        if harm:
            rows.append(EnvRow(name, value, harm, "yours-harmful"))
        elif name in wanted:
            ours, reason = wanted[name]
            unlike = "" if value == ours else f"; paceline would set {ours or 'it empty'}"
            rows.append(EnvRow(name, value, reason if value == ours else f"set by you{unlike}", "yours"))
    added = {row.name: row.value for row in rows if row.origin == "added"}
    return {**user_env, **added}, rows


def wanted_values(user_env: Mapping[str, str], launch: Launch) -> list[tuple[str, str, str]]:
    """Name, value and reason of everything that paceline would set."""
    threads = max(1, launch.cpu_cores // launch.nproc)
    wanted = [
        ("OMP_NUM_THREADS", str(threads), f"{launch.cpu_cores} CPU cores for {launch.nproc} processes"),
        ("PYTHONUNBUFFERED", "1", "a log is whole up to the moment of a crash"),
        ("PYTHONFAULTHANDLER", "1", "a crash in native code leaves a traceback"),
        ("TOKENIZERS_PARALLELISM", "false", "tokenizers must not start a thread per core in every process"),
    ]
    if launch.num_hosts == 1:
        why = "all processes are on this host, whatever its name resolves to"
        wanted.append(("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE, why))
    elif launch.interface:
        wanted.append(("GLOO_SOCKET_IFNAME", launch.interface, "the way from this host to the others"))
    if not any(name in user_env for name in RECORDER_NAMES):
        why = "each rank remembers its last collectives, for the day they hang"
        wanted.append((RECORDER_NAMES[0], str(RECORDED_COLLECTIVES), why))
    if not launch.libuv:
        wanted.append(("USE_LIBUV", "0", "this torch was built without libuv"))
    return [*wanted, *(cuda_values(user_env, launch) if launch.device == "cuda" else cpu_values(launch))]


def cuda_values(user_env: Mapping[str, str], launch: Launch) -> list[tuple[str, str, str]]:
    wanted = [("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "GPU numbers are those of nvidia-smi and of the plan")]
    if not any(name in user_env for name in ALLOCATOR_NAMES):
        wanted.append((ALLOCATOR_NAMES[0], "expandable_segments:True", "less GPU memory lost to fragments"))
    if launch.num_hosts == 1:
        why = "all processes are on this host: no VPN, bridge or Wi-Fi between them"
        wanted.append(("NCCL_SOCKET_IFNAME", LOOPBACK_INTERFACE, why))
    elif launch.interface:
        wanted.append(("NCCL_SOCKET_IFNAME", f"={launch.interface}", "the way to the others, by its whole name"))
    return wanted


def cpu_values(launch: Launch) -> list[tuple[str, str, str]]:
    if not launch.for_script:
        return []
    return [
        ("CUDA_VISIBLE_DEVICES", "", "the device is cpu: the script sees no GPU"),
        ("ACCELERATE_USE_CPU", "true", "accelerate joins processes on the CPU only when it is told"),
    ]


def harm_of(name: str, value: str, launch: Launch) -> str | None:
    """What a user's value is known to do, if it does harm; None else."""
    several = launch.num_hosts > 1
    match name:
        case "OMP_NUM_THREADS":
            return harm_of_threads(value, launch)
        case "PYTHONUNBUFFERED" if not value:
            return "output is held back, and lost when a rank is killed"
        case "TOKENIZERS_PARALLELISM" if value.lower() not in ("", "0", "false", "off", "f", "no", "n"):
            return f"each of {launch.nproc} processes starts a thread per core"
        case "GLOO_SOCKET_IFNAME" | "NCCL_SOCKET_IFNAME" if several and value.lstrip("=") == LOOPBACK_INTERFACE:
            return f"{launch.num_hosts} hosts do not reach each other over the loopback"
        case "TORCH_FR_BUFFER_SIZE" | "TORCH_NCCL_TRACE_BUFFER_SIZE" if value == "0":
            return "no rank remembers its collectives: a hang cannot be traced"
        case "USE_LIBUV" if value != "0" and not launch.libuv:
            return "this torch was built without libuv: a store cannot be made; set it to 0"
        case "CUDA_DEVICE_ORDER" if value != "PCI_BUS_ID" and launch.device == "cuda":
            return "GPU numbers may not be those of nvidia-smi and of the plan, where cards differ"
        case "PYTORCH_ALLOC_CONF" | "PYTORCH_CUDA_ALLOC_CONF" if "expandable_segments:False" in value:
            return "GPU memory is lost to fragments"
        case "CUDA_LAUNCH_BLOCKING" if value not in ("", "0") and launch.device == "cuda":
            return "every kernel is waited for: good for finding a fault, slow for training"
        case "TORCH_DISTRIBUTED_DEBUG" if value.upper() == "DETAIL":
            return "every collective is checked by another one: good for finding a fault, slow for training"
        case "TORCH_NCCL_ASYNC_ERROR_HANDLING" | "NCCL_ASYNC_ERROR_HANDLING" if value == "0":
            return "a rank whose peer has failed waits without end"
        case "CUDA_VISIBLE_DEVICES" if value and launch.for_script and launch.device == "cpu":
            return "the device is cpu, and the script sees these GPUs"
        case "ACCELERATE_USE_CPU" if launch.for_script and launch.device == "cuda" and is_true(value):
            return "accelerate stays on the CPU"
        case _:
            return None


def harm_of_threads(value: str, launch: Launch) -> str | None:
    if not value.isdigit() or not int(value):
        return "not a number of threads: each process takes every core" if "," not in value else None
    wanted = launch.nproc * int(value)
    if wanted <= launch.cpu_cores or int(value) == 1:
        return None
    return f"{launch.nproc} processes x {value} threads wait for each other on {launch.cpu_cores} cores"


def is_true(value: str) -> bool:
    return value.lower() in ("1", "true", "yes", "on", "y", "t")


def harm_lines(rows: list[EnvRow]) -> list[str]:
    """One line for each value of the user's that is known to hurt; it stays all the same."""
    return [f"note    {row.name}={row.value} is yours: {row.reason}" for row in rows if row.origin == "yours-harmful"]


def format_env(rows: list[EnvRow]) -> str:
    """A table for --show-env: what is added, what is the user's, and why."""
    said = {"added": "added", "yours": "yours", "yours-harmful": "yours, hurts"}
    table = [(f"{row.name}={row.value}", said[row.origin], row.reason) for row in rows]
    widths = [max(len(row[i]) for row in table) for i in range(2)]
    return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in table)
