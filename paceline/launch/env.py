"""
What the workers' environment must say, and why. Pure: from the user's environment to the workers'.

Whatever the user has set stays as it is, and CUDA_VISIBLE_DEVICES is never touched. What torch's elastic agent sets
itself (RANK, MASTER_ADDR, TORCH_NCCL_ASYNC_ERROR_HANDLING, ...) is not repeated here.
"""

from collections.abc import Mapping

ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name of the first


def worker_env(
    user_env: Mapping[str, str], *, nproc: int, device: str, cpu_cores: int
) -> tuple[dict[str, str], list[str]]:
    """The environment of every worker on one host, and a line of reason for each variable that was added."""
    threads = max(1, cpu_cores // nproc)
    wanted = [
        ("OMP_NUM_THREADS", str(threads), f"{cpu_cores} CPU cores for {nproc} processes"),
        ("PYTHONUNBUFFERED", "1", "a log is whole up to the moment of a crash"),
        ("PYTHONFAULTHANDLER", "1", "a crash in native code leaves a traceback"),
        ("TOKENIZERS_PARALLELISM", "false", "tokenizers must not start a thread per core in every process"),
        ("GLOO_SOCKET_IFNAME", "lo", "all processes are on this host, whatever its name resolves to"),
    ]
    if device == "cuda" and not any(name in user_env for name in ALLOCATOR_NAMES):
        wanted.append((ALLOCATOR_NAMES[0], "expandable_segments:True", "less GPU memory lost to fragments"))

    added = [(name, value, reason) for name, value, reason in wanted if name not in user_env]
    env = {**user_env, **{name: value for name, value, _ in added}}
    return env, [f"{name}={value}: {reason}" for name, value, reason in added]
