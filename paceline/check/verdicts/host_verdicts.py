"""
Verdicts on the host: memory, limits, shared memory, processes, compilers, and environment variables.
"""

from collections.abc import Iterator, Mapping

from paceline.check.verdicts.rules import (
    Case,
    Facts,
    Intent,
    Rule,
    Verdict,
    at,
    env,
    is_on,
    num_ranks,
    version_of,
    wants_cuda,
)
from paceline.units import GIB, MIB, format_bytes

SHM_PER_RANK = 64 * MIB  # NCCL's buffers and a data loader's batches
NOFILE_LOW = 1024
NPROC_PER_RANK = 256  # threads count too
MEMLOCK_LOW = 64 * MIB
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "GROUP_RANK")
PROBE_MODULES = {  # where it is not NAME_probe
    "python": "paceline.check.probes.host_probe python",
    "tools": "paceline.check.probes.host_probe tools",
    "text": "paceline.check.probes.storage_probe text",
}
IGNORED_ERRORS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0",), "NCCL_ASYNC_ERROR_HANDLING": ("0",)}
DEBUG_VALUES = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "NCCL_DEBUG": ("TRACE",),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1",),
}


def probe_failed(facts: Facts, intent: Intent) -> Iterator[Case]:
    for name, probe in (facts.get("probes") or {}).items():
        if probe and probe.get("ok") is False and not (name == "torch" and facts.get("torch")):
            fix = f"echo '{{}}' | python -m {PROBE_MODULES.get(name, f'paceline.check.probes.{name}_probe')}"
            yield Case(f"the {name} probe: {probe.get('error')}", fix, (f"probes.{name}",))


def memory_limit(facts: Facts) -> tuple[int | None, bool]:
    """Returns the bytes that processes may use here, and whether a cgroup limits them."""
    total, limit = at(facts, "host.memory.total_bytes"), at(facts, "host.memory.cgroup_limit_bytes")
    known: list[int] = [value for value in (total, limit) if value is not None]
    return (min(known) if known else None), limit is not None and limit == min(known)


def swap_bytes(facts: Facts, by_cgroup: bool) -> int:
    """Returns the swap that is available before the kernel kills a process; 0 in a cgroup, where it is unknown."""
    return 0 if by_cgroup else at(facts, "host.memory.swap_total_bytes") or 0


def memory_is_short(facts: Facts, intent: Intent) -> Iterator[Case]:
    limit, by_cgroup = memory_limit(facts)
    if limit is None or not intent.need_host_bytes or limit >= intent.need_host_bytes:
        return
    ranks = num_ranks(facts, intent)
    fitting = limit * ranks // intent.need_host_bytes
    source = "the cgroup's memory limit is" if by_cgroup else "this host has"
    if by_cgroup and (at(facts, "host.memory.total_bytes") or 0) >= intent.need_host_bytes and not fitting:
        fix = f"raise the limit to {format_bytes(intent.need_host_bytes)}: docker --memory, systemd MemoryMax, Slurm --mem"
    else:
        fix = f"--nproc {fitting}" if fitting else "a host with more memory, or a smaller --depth"
    yield Case(
        f"{source} {format_bytes(limit)}, {ranks} processes need {format_bytes(intent.need_host_bytes)} at least",
        fix,
        ("host.memory",),
        "stop" if limit + swap_bytes(facts, by_cgroup) < intent.need_host_bytes else "warn",
    )


def memory_is_in_use(facts: Facts, intent: Intent) -> Iterator[Case]:
    limit, by_cgroup = memory_limit(facts)
    if limit is None or not intent.need_host_bytes or limit < intent.need_host_bytes:
        return
    used = at(facts, "host.memory.cgroup_used_bytes")
    free = [at(facts, "host.memory.available_bytes"), None if used is None or not by_cgroup else limit - used]
    left = min([value for value in free if value is not None], default=None)
    if left is None or left >= intent.need_host_bytes:
        return
    largest = at(facts, "host.memory.largest") or []
    users = ", ".join(f"{user['name']} (pid {user['pid']}, {format_bytes(user['rss_bytes'])})" for user in largest[:3])
    ours = [user["pid"] for user in largest[:1] if user["name"].startswith("python")]  # never a desktop or a service
    yield Case(
        f"{format_bytes(left)} of {format_bytes(limit)} are free, {num_ranks(facts, intent)} processes need"
        f" {format_bytes(intent.need_host_bytes)} at least" + (f"; the largest are {users}" if users else ""),
        f"kill {ours[0]}" if ours else "ps -eo pid,rss,args --sort=-rss | head",
        ("host.memory",),
        "stop" if left + swap_bytes(facts, by_cgroup) < intent.need_host_bytes else "warn",
    )


def shm_is_small(facts: Facts, intent: Intent) -> Iterator[Case]:
    free, total = at(facts, "host.shm.free_bytes"), at(facts, "host.shm.total_bytes")
    ranks = num_ranks(facts, intent)
    needed = SHM_PER_RANK * max(2, ranks)
    if free is None or free >= needed or (ranks < 2 and intent.command != "run"):
        return
    in_docker = at(facts, "host.container") in ("docker", "podman")
    yield Case(
        f"/dev/shm has {format_bytes(free)} free of {format_bytes(total)}, {max(2, ranks)} ranks need {format_bytes(needed)}",
        "mount -o remount,size=8G /dev/shm" + ("  # or start the container with --shm-size 8g" if in_docker else ""),
        ("host.shm",),
        "stop" if wants_cuda(facts, intent) and free < MIB else "warn",
    )


def nofile_is_low(facts: Facts, intent: Intent) -> Iterator[Case]:
    soft, hard = at(facts, "host.limits.nofile") or (-1, -1)
    if not 0 <= soft < NOFILE_LOW:
        return
    more = 65536 if hard == -1 else min(hard, 65536)
    fix = f"ulimit -n {more}" if more > soft else "echo '* - nofile 65536' | sudo tee -a /etc/security/limits.conf"
    yield Case(
        f"{soft} open files are allowed, the hard limit is {'unlimited' if hard == -1 else hard}",
        fix,
        ("host.limits.nofile",),
    )


def nproc_is_low(facts: Facts, intent: Intent) -> Iterator[Case]:
    soft, hard = at(facts, "host.limits.nproc") or (-1, -1)
    needed = NPROC_PER_RANK * max(2, num_ranks(facts, intent))
    if 0 <= soft < needed and not at(facts, "host.root"):
        yield Case(
            f"{soft} processes and threads are allowed, {needed} are needed",
            f"ulimit -u {needed if hard == -1 or hard >= needed else hard}",
            ("host.limits.nproc",),
        )


def memlock_is_low(facts: Facts, intent: Intent) -> Iterator[Case]:
    soft = (at(facts, "host.limits.memlock") or (None,))[0]
    active = any(device.get("state") == "ACTIVE" for device in at(facts, "network.ib_devices") or ())
    if active and soft is not None and 0 <= soft < MEMLOCK_LOW and intent.num_hosts > 1:
        yield Case(
            f"{format_bytes(soft)} may be locked, and InfiniBand locks its buffers",
            "ulimit -l unlimited",
            ("host.limits.memlock", "network.ib_devices"),
        )


def clock_is_not_synchronized(facts: Facts, intent: Intent) -> Iterator[Case]:
    if intent.num_hosts > 1 and at(facts, "host.clock.synchronized") is False:
        yield Case("the clock is not synchronized", "sudo timedatectl set-ntp true", ("host.clock",))


def host_is_wsl(facts: Facts, intent: Intent) -> Iterator[Case]:
    if at(facts, "host.wsl"):
        yield Case("this is WSL", "keep the run folder under ~, not under /mnt", ("host.wsl",))


def cores_are_few(facts: Facts, intent: Intent) -> Iterator[Case]:
    cores, ranks = at(facts, "host.cpu.cores"), num_ranks(facts, intent)
    if cores and ranks > cores:
        fix = f"--nproc {cores}" if not wants_cuda(facts, intent) else "give the container or job as many cores as GPUs"
        yield Case(f"{ranks} processes on {cores} CPU cores", fix, ("host.cpu.cores",))


def cpu_lacks_bf16(facts: Facts, intent: Intent) -> Iterator[Case]:
    if intent.precision in ("bf16", "fp16") and not wants_cuda(facts, intent) and at(facts, "host.cpu.bf16") is False:
        model = at(facts, "host.cpu.model")
        yield Case(f"{model} has no {intent.precision} instructions", "--precision fp32", ("host.cpu",))


def threads_are_many(facts: Facts, intent: Intent) -> Iterator[Case]:
    value, cores, ranks = env(facts, "OMP_NUM_THREADS"), at(facts, "host.cpu.cores"), num_ranks(facts, intent)
    if value and value.isdigit() and cores and ranks > 1 and int(value) > 1 and int(value) * ranks > cores:
        yield Case(
            f"OMP_NUM_THREADS={value} for each of {ranks} processes, on {cores} cores",
            f"export OMP_NUM_THREADS={max(1, cores // ranks)}",
            ("env.OMP_NUM_THREADS", "host.cpu.cores"),
        )


def threads_are_few(facts: Facts, intent: Intent) -> Iterator[Case]:
    value, cores, ranks = env(facts, "OMP_NUM_THREADS") or "", at(facts, "host.cpu.cores"), num_ranks(facts, intent)
    known = value.isdigit() and cores and not wants_cuda(facts, intent)
    if known and 2 * max(1, int(value)) * ranks <= cores:
        yield Case(
            f"OMP_NUM_THREADS={value} for each of {ranks} processes, on {cores} cores",
            "unset OMP_NUM_THREADS",
            ("env.OMP_NUM_THREADS", "host.cpu.cores"),
        )


def launcher_variables_are_set(facts: Facts, intent: Intent) -> Iterator[Case]:
    left = [name for name in LAUNCHER_NAMES if env(facts, name) is not None]
    if left:
        shown = " ".join(f"{name}={env(facts, name)}" for name in left)
        yield Case(shown, f"unset {' '.join(left)}", tuple(f"env.{name}" for name in left))


def variables_have(values: Mapping[str, tuple[str, ...]]) -> Rule:
    """Returns the rule about variables that have one of these values."""

    def rule(facts: Facts, intent: Intent) -> Iterator[Case]:
        for name, harmful in values.items():
            if (env(facts, name) or "").upper() in harmful:
                yield Case(f"{name}={env(facts, name)}", f"unset {name}", (f"env.{name}",))

    return rule


def allocator_is_named_twice(facts: Facts, intent: Intent) -> Iterator[Case]:
    old, new = env(facts, "PYTORCH_CUDA_ALLOC_CONF"), env(facts, "PYTORCH_ALLOC_CONF")
    if old and new and old != new:
        yield Case(
            f"PYTORCH_ALLOC_CONF={new} and PYTORCH_CUDA_ALLOC_CONF={old}",
            "unset PYTORCH_CUDA_ALLOC_CONF",
            ("env.PYTORCH_ALLOC_CONF", "env.PYTORCH_CUDA_ALLOC_CONF"),
        )


def allocator_has_its_old_name(facts: Facts, intent: Intent) -> Iterator[Case]:
    old = env(facts, "PYTORCH_CUDA_ALLOC_CONF")
    if old and not env(facts, "PYTORCH_ALLOC_CONF") and (version_of(at(facts, "torch.version")) or (0,)) >= (2, 9):
        yield Case(
            f"PYTORCH_CUDA_ALLOC_CONF={old}",
            f"export PYTORCH_ALLOC_CONF={old}; unset PYTORCH_CUDA_ALLOC_CONF",
            ("env.PYTORCH_CUDA_ALLOC_CONF",),
        )


def allocator_clashes(facts: Facts, intent: Intent) -> Iterator[Case]:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = env(facts, name) or ""
        if "expandable_segments:True" in value and (at(facts, "host.wsl") or "max_split_size_mb" in value):
            what = (
                "on WSL, where they do not work"
                if at(facts, "host.wsl")
                else "with max_split_size_mb, which they ignore"
            )
            fix = f"unset {name}" if at(facts, "host.wsl") else f"export {name}=expandable_segments:True"
            yield Case(f"{name}={value}: expandable segments {what}", fix, (f"env.{name}",))


def compiler_is_missing(facts: Facts, intent: Intent) -> Iterator[Case]:
    tools, config = facts.get("tools"), intent.config or {}
    pattern = config.get("window_pattern") or "SSSL"
    cuda = wants_cuda(facts, intent)
    always = cuda and bool(config) and "S" in pattern  # FlexAttention is compiled even in an eager model
    will_try = intent.compile or (intent.compile is None and bool(config))  # None: the worker compiles to measure
    if tools is None or not (always or will_try):
        return
    missing = [] if tools.get("cxx") else ["a C++ compiler"]
    if cuda and tools.get("python_headers") is False:
        missing.append("Python's headers")
    if cuda and facts.get("packages") and not has_triton(facts):
        missing.append("triton")
    fixes = ["pip install triton"] if "triton" in missing else []
    if missing != ["triton"]:
        fixes.append("sudo apt-get install -y g++ python3-dev")
    if missing:
        yield Case(
            f"torch.compile needs {' and '.join(missing)}, which this host does not have",
            " && ".join(fixes),
            ("tools.cxx", "tools.python_headers", "packages.triton"),
        )


def has_triton(facts: Facts) -> bool:
    """Returns whether Triton is installed under any name: nightly wheels bring pytorch-triton."""
    installed = any("triton" in name and version for name, version in facts["packages"].items())
    return installed or str(at(facts, "torch.compile_backend") or "").startswith("triton")


def wandb_does_not_record(facts: Facts, intent: Intent) -> Iterator[Case]:
    wandb = at(facts, "tools.wandb")
    is_requested = intent.tracker == "wandb" or any(
        env(facts, f"WANDB_{name}") for name in ("PROJECT", "ENTITY", "RUN_GROUP")
    )
    if not is_requested or wandb is None:
        return
    if wandb.get("installed") is False:
        yield Case("W&B is requested but not installed", "pip install wandb", ("tools.wandb",))
    elif wandb.get("mode") in ("offline", "disabled"):
        yield Case(f"WANDB_MODE={wandb['mode']}: nothing is sent", "export WANDB_MODE=online", ("tools.wandb",))
    elif wandb.get("logged_in") is False:
        yield Case("W&B is requested but not logged in", "wandb login", ("tools.wandb",))


def container_hides_gpus(facts: Facts, intent: Intent) -> Iterator[Case]:
    cards = facts.get("nvidia_cards")
    if cards and facts.get("gpus") == [] and at(facts, "host.container") and intent.device is None:
        yield Case(
            f"{cards} NVIDIA cards are in this machine, but the container sees none",
            "start the container with --gpus all",
            ("nvidia_cards", "host.container"),
        )


def memory_is_low(facts: Facts, intent: Intent) -> Iterator[Case]:
    available, swap = at(facts, "host.memory.available_bytes"), at(facts, "host.memory.swap_total_bytes")
    if available is not None and available < 2 * GIB and swap == 0:
        yield Case(
            f"{format_bytes(available)} of memory is available and there is no swap", "free -h", ("host.memory",)
        )


def nccl_shm_is_off(facts: Facts, intent: Intent) -> Iterator[Case]:
    if is_on(env(facts, "NCCL_SHM_DISABLE")) and num_ranks(facts, intent) > 1:
        yield Case(
            f"NCCL_SHM_DISABLE={env(facts, 'NCCL_SHM_DISABLE')}", "unset NCCL_SHM_DISABLE", ("env.NCCL_SHM_DISABLE",)
        )


HOST_VERDICTS = (
    Verdict("probe-failed", "warn", rule=probe_failed,
            cause="A part of the check gave no answer: it hung, crashed or lacked a permission.",
            why="the facts that it would have found are unknown", fix="Run that part alone and read its output."),
    Verdict("memory-short", "stop", rule=memory_is_short,
            cause="The host, or the cgroup around this process, has less memory than the processes need. A warning where "
                  "swap is large enough.",
            why="the kernel kills a rank: SIGKILL, exit code -9, no traceback",
            fix="Start fewer processes, or raise the limit."),
    Verdict("memory-held", "stop", rule=memory_is_in_use,
            cause="There is enough memory, but other processes use it. A warning where swap is large enough.",
            why="the kernel kills a rank: SIGKILL, exit code -9, no traceback", fix="End the processes that use it."),
    Verdict("memory-low", "note", rule=memory_is_low,
            cause="Under 2 GiB of memory is available and there is no swap.",
            why="a checkpoint or an evaluation may exceed it", fix="Find the processes that use it."),
    Verdict("shm-small", "warn", rule=shm_is_small,
            cause="/dev/shm is small, as in a container with Docker's default of 64 MiB.",
            why="NCCL and data loader workers fail with `unable to allocate shared memory` or bus errors", fix="Enlarge it."),
    Verdict("nofile-low", "warn", rule=nofile_is_low,
            cause="The limit of open files is low.",
            why="sockets and token shards fail with `Too many open files`", fix="Raise the limit."),
    Verdict("nproc-low", "warn", rule=nproc_is_low,
            cause="The limit of processes and threads is low.",
            why="a rank cannot start its threads", fix="Raise the limit."),
    Verdict("memlock-low", "warn", rule=memlock_is_low,
            cause="The limit of locked memory is low, and InfiniBand is in use.",
            why="NCCL fails to register its buffers", fix="Raise the limit."),
    Verdict("clock-free", "warn", rule=clock_is_not_synchronized,
            cause="No time service synchronizes the clock, and there are several hosts.",
            why="the logs of the hosts cannot be ordered by time", fix="Switch NTP on."),
    Verdict("wsl", "note", rule=host_is_wsl,
            cause="This is the Windows Subsystem for Linux.",
            why="files under /mnt are slow, and locked memory is scarce", fix="Work under the Linux home folder."),
    Verdict("container-no-gpus", "note", rule=container_hides_gpus,
            cause="The machine has NVIDIA cards, but the container does not show them.",
            why="training runs on the CPU", fix="Start the container with --gpus all."),
    Verdict("cores-few", "warn", rule=cores_are_few,
            cause="There are more processes than CPU cores.",
            why="they share cores, and each collective waits for the slowest",
            fix="Start as many processes as there are cores."),
    Verdict("cpu-no-bf16", "warn", rule=cpu_lacks_bf16,
            cause="The CPU has no instructions for the precision.",
            why="it is emulated, several times slower than fp32", fix="Train in fp32."),
    Verdict("omp-threads", "warn", rule=threads_are_many,
            cause="OMP_NUM_THREADS times the number of processes exceeds the number of cores.",
            why="threads wait for each other", fix="Set it to the cores for each process."),
    Verdict("omp-threads-few", "warn", rule=threads_are_few,
            cause="OMP_NUM_THREADS leaves at least half of the cores idle; some container images set it to 1.",
            why="a CPU run takes several times as long", fix="Unset it: paceline sets the right number."),
    Verdict("launcher-left", "warn", rule=launcher_variables_are_set,
            cause="Variables of a launcher are set outside of a launcher.",
            why="a script may take itself for a rank of another job and wait for its peers", fix="Unset them."),
    Verdict("debug-left", "warn", rule=variables_have(DEBUG_VALUES),
            cause="A debugging variable is still set.",
            why="it slows training down considerably", fix="Unset it."),
    Verdict("async-errors-off", "warn", rule=variables_have(IGNORED_ERRORS),
            cause="NCCL's error handling is switched off.",
            why="a rank whose peer has failed waits forever", fix="Unset it."),
    Verdict("nccl-shm-off", "warn", rule=nccl_shm_is_off,
            cause="NCCL's shared memory is switched off.",
            why="traffic within the host uses sockets", fix="Unset it."),
    Verdict("allocator-twice", "warn", rule=allocator_is_named_twice,
            cause="Both names of the allocator's variable are set, to different values.",
            why="which one is used depends on the version of torch", fix="Keep PYTORCH_ALLOC_CONF."),
    Verdict("allocator-old-name", "note", rule=allocator_has_its_old_name,
            cause="The allocator's variable is set by its name from before torch 2.9.",
            why="a later torch will ignore it", fix="Use the new name."),
    Verdict("allocator-clash", "warn", rule=allocator_clashes,
            cause="Two allocator settings exclude each other.",
            why="one of them has no effect", fix="Keep one of them."),
    Verdict("compiler-missing", "stop", rule=compiler_is_missing,
            cause="torch.compile is requested or will be tried, or window_pattern has an S on a GPU, and a compiler, Python's "
                  "headers or triton is missing.",
            why="the first step fails in inductor", fix="Install them; or --compile false, on a GPU with --window-pattern L."),
    Verdict("wandb-silent", "warn", rule=wandb_does_not_record,
            cause="W&B is requested, but not installed, not logged in, or offline.",
            why="curves are missing, or the script stops and asks for a key", fix="Install it, log in, or go online."),
)  # fmt: skip
