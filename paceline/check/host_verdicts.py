"""
Verdicts on the host: memory, limits, shared memory, processes, compilers, and variables that are left from elsewhere.
"""

from collections.abc import Iterator

from paceline.check.ask import Ask
from paceline.check.verdict import Facts, Seen, Verdict, at, env, is_on, num_ranks, version_of, wants_cuda
from paceline.units import GIB, MIB, format_bytes

SHM_PER_RANK = 64 * MIB  # NCCL's buffers and a data loader's batches
NOFILE_LOW = 1024
NPROC_PER_RANK = 256  # threads count too
MEMLOCK_LOW = 64 * MIB
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "GROUP_RANK")
DEBUG_VALUES = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "NCCL_DEBUG": ("TRACE",),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1",),
}


def probe_failed(facts: Facts, ask: Ask) -> Iterator[Seen]:
    for name, probe in (facts.get("probes") or {}).items():
        if probe and probe.get("ok") is False and not (name == "torch" and facts.get("torch")):
            fix = f"echo '{{}}' | python -m paceline.check.{name}_probe"
            yield Seen(f"the {name} probe: {probe.get('error')}", fix, (f"probes.{name}",))


def memory_limit(facts: Facts) -> tuple[int | None, bool]:
    """Bytes that processes may have here, and whether a cgroup says so."""
    total, limit = at(facts, "host.memory.total_bytes"), at(facts, "host.memory.cgroup_limit_bytes")
    known: list[int] = [value for value in (total, limit) if value is not None]
    return (min(known) if known else None), limit is not None and limit == min(known)


def swap_bytes(facts: Facts, by_cgroup: bool) -> int:
    """What may go to the disk before the kernel ends a process; within a cgroup nothing that is known."""
    return 0 if by_cgroup else at(facts, "host.memory.swap_total_bytes") or 0


def memory_is_short(facts: Facts, ask: Ask) -> Iterator[Seen]:
    limit, by_cgroup = memory_limit(facts)
    if limit is None or not ask.need_host_bytes or limit >= ask.need_host_bytes:
        return
    ranks = num_ranks(facts, ask)
    fitting = limit * ranks // ask.need_host_bytes
    source = "the cgroup's memory limit is" if by_cgroup else "this host has"
    if by_cgroup and (at(facts, "host.memory.total_bytes") or 0) >= ask.need_host_bytes and not fitting:
        fix = f"raise the limit to {format_bytes(ask.need_host_bytes)}: docker --memory, systemd MemoryMax, Slurm --mem"
    else:
        fix = f"--nproc {fitting}" if fitting else "a host with more memory, or a smaller --depth"
    yield Seen(
        f"{source} {format_bytes(limit)}, {ranks} processes need {format_bytes(ask.need_host_bytes)} at least",
        fix,
        ("host.memory",),
        "stop" if limit + swap_bytes(facts, by_cgroup) < ask.need_host_bytes else "warn",
    )


def memory_is_held(facts: Facts, ask: Ask) -> Iterator[Seen]:
    limit, by_cgroup = memory_limit(facts)
    if limit is None or not ask.need_host_bytes or limit < ask.need_host_bytes:
        return
    used = at(facts, "host.memory.cgroup_used_bytes")
    free = [at(facts, "host.memory.available_bytes"), None if used is None or not by_cgroup else limit - used]
    left = min([value for value in free if value is not None], default=None)
    if left is None or left >= ask.need_host_bytes:
        return
    largest = at(facts, "host.memory.largest") or []
    held = ", ".join(f"{each['name']} (pid {each['pid']}, {format_bytes(each['rss_bytes'])})" for each in largest[:3])
    ours = [each["pid"] for each in largest[:1] if each["name"].startswith("python")]  # never a desktop or a service
    yield Seen(
        f"{format_bytes(left)} of {format_bytes(limit)} are free, {num_ranks(facts, ask)} processes need"
        f" {format_bytes(ask.need_host_bytes)} at least" + (f"; most is held by {held}" if held else ""),
        f"kill {ours[0]}" if ours else "ps -eo pid,rss,args --sort=-rss | head",
        ("host.memory",),
        "stop" if left + swap_bytes(facts, by_cgroup) < ask.need_host_bytes else "warn",
    )


def shm_is_small(facts: Facts, ask: Ask) -> Iterator[Seen]:
    free, total = at(facts, "host.shm.free_bytes"), at(facts, "host.shm.total_bytes")
    ranks = num_ranks(facts, ask)
    wanted = SHM_PER_RANK * max(2, ranks)
    if free is None or free >= wanted or (ranks < 2 and ask.command != "run"):
        return
    in_docker = at(facts, "host.container") in ("docker", "podman")
    yield Seen(
        f"/dev/shm has {format_bytes(free)} free of {format_bytes(total)}, {max(2, ranks)} ranks want {format_bytes(wanted)}",
        "mount -o remount,size=8G /dev/shm" + ("  # or start the container with --shm-size 8g" if in_docker else ""),
        ("host.shm",),
        "stop" if wants_cuda(facts, ask) and free < MIB else "warn",
    )


def nofile_is_low(facts: Facts, ask: Ask) -> Iterator[Seen]:
    soft, hard = at(facts, "host.limits.nofile") or (-1, -1)
    if not 0 <= soft < NOFILE_LOW:
        return
    more = 65536 if hard == -1 else min(hard, 65536)
    fix = f"ulimit -n {more}" if more > soft else "echo '* - nofile 65536' | sudo tee -a /etc/security/limits.conf"
    yield Seen(
        f"{soft} open files are allowed, {'any number' if hard == -1 else hard} at most",
        fix,
        ("host.limits.nofile",),
    )


def nproc_is_low(facts: Facts, ask: Ask) -> Iterator[Seen]:
    soft, hard = at(facts, "host.limits.nproc") or (-1, -1)
    wanted = NPROC_PER_RANK * max(2, num_ranks(facts, ask))
    if 0 <= soft < wanted and not at(facts, "host.root"):
        yield Seen(
            f"{soft} processes and threads are allowed, {wanted} are wanted",
            f"ulimit -u {wanted if hard == -1 or hard >= wanted else hard}",
            ("host.limits.nproc",),
        )


def memlock_is_low(facts: Facts, ask: Ask) -> Iterator[Seen]:
    soft = (at(facts, "host.limits.memlock") or (None,))[0]
    active = any(device.get("state") == "ACTIVE" for device in at(facts, "network.ib_devices") or ())
    if active and soft is not None and 0 <= soft < MEMLOCK_LOW and ask.num_hosts > 1:
        yield Seen(
            f"{format_bytes(soft)} may be locked, and InfiniBand locks its buffers",
            "ulimit -l unlimited",
            ("host.limits.memlock", "network.ib_devices"),
        )


def clock_is_free(facts: Facts, ask: Ask) -> Iterator[Seen]:
    if ask.num_hosts > 1 and at(facts, "host.clock.synchronized") is False:
        yield Seen("the clock is not synchronised", "sudo timedatectl set-ntp true", ("host.clock",))


def is_wsl(facts: Facts, ask: Ask) -> Iterator[Seen]:
    if at(facts, "host.wsl"):
        yield Seen("this is WSL", "keep the run folder under ~, not under /mnt", ("host.wsl",))


def cores_are_few(facts: Facts, ask: Ask) -> Iterator[Seen]:
    cores, ranks = at(facts, "host.cpu.cores"), num_ranks(facts, ask)
    if cores and ranks > cores:
        fix = f"--nproc {cores}" if not wants_cuda(facts, ask) else "give the container or job as many cores as GPUs"
        yield Seen(f"{ranks} processes on {cores} CPU cores", fix, ("host.cpu.cores",))


def cpu_lacks_bf16(facts: Facts, ask: Ask) -> Iterator[Seen]:
    if ask.precision in ("bf16", "fp16") and not wants_cuda(facts, ask) and at(facts, "host.cpu.bf16") is False:
        model = at(facts, "host.cpu.model")
        yield Seen(f"{model} has no {ask.precision} instructions", "--precision fp32", ("host.cpu",))


def threads_are_many(facts: Facts, ask: Ask) -> Iterator[Seen]:
    value, cores, ranks = env(facts, "OMP_NUM_THREADS"), at(facts, "host.cpu.cores"), num_ranks(facts, ask)
    if value and value.isdigit() and cores and ranks > 1 and int(value) > 1 and int(value) * ranks > cores:
        yield Seen(
            f"OMP_NUM_THREADS={value} for each of {ranks} processes, on {cores} cores",
            f"export OMP_NUM_THREADS={max(1, cores // ranks)}",
            ("env.OMP_NUM_THREADS", "host.cpu.cores"),
        )


def threads_are_few(facts: Facts, ask: Ask) -> Iterator[Seen]:
    value, cores, ranks = env(facts, "OMP_NUM_THREADS"), at(facts, "host.cpu.cores"), num_ranks(facts, ask)
    if value and value.isdigit() and cores and not wants_cuda(facts, ask) and 2 * max(1, int(value)) * ranks <= cores:
        yield Seen(
            f"OMP_NUM_THREADS={value} for each of {ranks} processes, on {cores} cores",
            "unset OMP_NUM_THREADS",
            ("env.OMP_NUM_THREADS", "host.cpu.cores"),
        )


def launcher_left(facts: Facts, ask: Ask) -> Iterator[Seen]:
    left = [name for name in LAUNCHER_NAMES if env(facts, name) is not None]
    if left:
        shown = " ".join(f"{name}={env(facts, name)}" for name in left)
        yield Seen(shown, f"unset {' '.join(left)}", tuple(f"env.{name}" for name in left))


def debug_left(facts: Facts, ask: Ask) -> Iterator[Seen]:
    for name, values in DEBUG_VALUES.items():
        if (env(facts, name) or "").upper() in values:
            yield Seen(f"{name}={env(facts, name)}", f"unset {name}", (f"env.{name}",))


def errors_are_ignored(facts: Facts, ask: Ask) -> Iterator[Seen]:
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if env(facts, name) == "0":
            yield Seen(f"{name}=0", f"unset {name}", (f"env.{name}",))


def allocator_is_named_twice(facts: Facts, ask: Ask) -> Iterator[Seen]:
    old, new = env(facts, "PYTORCH_CUDA_ALLOC_CONF"), env(facts, "PYTORCH_ALLOC_CONF")
    if old and new and old != new:
        yield Seen(
            f"PYTORCH_ALLOC_CONF={new} and PYTORCH_CUDA_ALLOC_CONF={old}",
            "unset PYTORCH_CUDA_ALLOC_CONF",
            ("env.PYTORCH_ALLOC_CONF", "env.PYTORCH_CUDA_ALLOC_CONF"),
        )


def allocator_has_its_old_name(facts: Facts, ask: Ask) -> Iterator[Seen]:
    old = env(facts, "PYTORCH_CUDA_ALLOC_CONF")
    if old and not env(facts, "PYTORCH_ALLOC_CONF") and (version_of(at(facts, "torch.version")) or (0,)) >= (2, 9):
        yield Seen(
            f"PYTORCH_CUDA_ALLOC_CONF={old}",
            f"export PYTORCH_ALLOC_CONF={old}; unset PYTORCH_CUDA_ALLOC_CONF",
            ("env.PYTORCH_CUDA_ALLOC_CONF",),
        )


def allocator_clashes(facts: Facts, ask: Ask) -> Iterator[Seen]:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = env(facts, name) or ""
        if "expandable_segments:True" in value and (at(facts, "host.wsl") or "max_split_size_mb" in value):
            what = (
                "on WSL, where they do not work"
                if at(facts, "host.wsl")
                else "with max_split_size_mb, which they ignore"
            )
            fix = f"unset {name}" if at(facts, "host.wsl") else f"export {name}=expandable_segments:True"
            yield Seen(f"{name}={value}: expandable segments {what}", fix, (f"env.{name}",))


def compiler_is_missing(facts: Facts, ask: Ask) -> Iterator[Seen]:
    tools, config = facts.get("tools"), ask.config or {}
    pattern = config.get("window_pattern") or "SSSL"
    cuda = wants_cuda(facts, ask)
    always = cuda and bool(config) and "S" in pattern  # FlexAttention is compiled even in an eager model
    tried = ask.compile or (ask.compile is None and bool(config))  # None: the worker compiles, to see what it gives
    if tools is None or not (always or tried):
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
        yield Seen(
            f"torch.compile needs {' and '.join(missing)}, not found here",
            " && ".join(fixes),
            ("tools.cxx", "tools.python_headers", "packages.triton"),
        )


def has_triton(facts: Facts) -> bool:
    """Under whichever name: nightly wheels bring pytorch-triton."""
    installed = any("triton" in name and version for name, version in facts["packages"].items())
    return installed or str(at(facts, "torch.compile_backend") or "").startswith("triton")


def tracker_is_silent(facts: Facts, ask: Ask) -> Iterator[Seen]:
    wandb = at(facts, "tools.wandb")
    asked = ask.tracker == "wandb" or any(env(facts, f"WANDB_{name}") for name in ("PROJECT", "ENTITY", "RUN_GROUP"))
    if not asked or wandb is None:
        return
    if wandb.get("installed") is False:
        yield Seen("W&B is asked for, and not installed", "pip install wandb", ("tools.wandb",))
    elif wandb.get("mode") in ("offline", "disabled"):
        yield Seen(f"WANDB_MODE={wandb['mode']}: nothing is sent", "export WANDB_MODE=online", ("tools.wandb",))
    elif wandb.get("logged_in") is False:
        yield Seen("W&B is asked for, and nobody is logged in", "wandb login", ("tools.wandb",))


def container_hides_gpus(facts: Facts, ask: Ask) -> Iterator[Seen]:
    cards = facts.get("nvidia_cards")
    if cards and facts.get("gpus") == [] and at(facts, "host.container") and ask.device is None:
        yield Seen(
            f"{cards} NVIDIA cards are in this machine, the container sees none",
            "start the container with --gpus all",
            ("nvidia_cards", "host.container"),
        )


def memory_is_low(facts: Facts, ask: Ask) -> Iterator[Seen]:
    available, swap = at(facts, "host.memory.available_bytes"), at(facts, "host.memory.swap_total_bytes")
    if available is not None and available < 2 * GIB and swap == 0:
        yield Seen(
            f"{format_bytes(available)} of memory are available and there is no swap", "free -h", ("host.memory",)
        )


def nccl_shm_is_off(facts: Facts, ask: Ask) -> Iterator[Seen]:
    if is_on(env(facts, "NCCL_SHM_DISABLE")) and num_ranks(facts, ask) > 1:
        yield Seen(
            f"NCCL_SHM_DISABLE={env(facts, 'NCCL_SHM_DISABLE')}", "unset NCCL_SHM_DISABLE", ("env.NCCL_SHM_DISABLE",)
        )


VERDICTS = (
    Verdict("probe-failed", "warn", look=probe_failed,
            cause="A part of the check gave no answer: it hung, crashed, or was not allowed to look.",
            why="what it would have told is not known",
            fix="Run that part alone and see what it says."),
    Verdict("memory-short", "stop", look=memory_is_short,
            cause="The host, or the cgroup around this process, has less memory than the processes need. A warning where "
                  "swap makes up for it.",
            why="the kernel ends a rank with SIGKILL, exit -9 and no traceback",
            fix="Fewer processes, or a higher limit."),
    Verdict("memory-held", "stop", look=memory_is_held,
            cause="There is enough memory, but others hold it. A warning where swap makes up for it.",
            why="the kernel ends a rank with SIGKILL, exit -9 and no traceback",
            fix="End what holds it."),
    Verdict("memory-low", "note", look=memory_is_low,
            cause="Under 2 GiB of memory are available and there is no swap.",
            why="a checkpoint or an evaluation may be the last straw",
            fix="See what holds it."),
    Verdict("shm-small", "warn", look=shm_is_small,
            cause="/dev/shm is small, as in a container with Docker's default of 64 MiB.",
            why="NCCL and data loader workers fail with `unable to allocate shared memory` or bus errors",
            fix="Make it larger."),
    Verdict("nofile-low", "warn", look=nofile_is_low,
            cause="Few open files are allowed.",
            why="sockets and token shards fail with `Too many open files`",
            fix="Raise the limit."),
    Verdict("nproc-low", "warn", look=nproc_is_low,
            cause="Few processes and threads are allowed.",
            why="a rank cannot start its threads",
            fix="Raise the limit."),
    Verdict("memlock-low", "warn", look=memlock_is_low,
            cause="Little memory may be locked, and InfiniBand is in use.",
            why="NCCL fails to register its buffers",
            fix="Raise the limit."),
    Verdict("clock-free", "warn", look=clock_is_free,
            cause="No time service keeps the clock, and there are several hosts.",
            why="logs of hosts cannot be put in order",
            fix="Turn NTP on."),
    Verdict("wsl", "note", look=is_wsl,
            cause="This is the Windows Subsystem for Linux.",
            why="files under /mnt are slow, and locked memory is scarce",
            fix="Work under the Linux home folder."),
    Verdict("container-no-gpus", "note", look=container_hides_gpus,
            cause="The machine has NVIDIA cards, the container does not show them.",
            why="training runs on the CPU",
            fix="Start the container with --gpus all."),
    Verdict("cores-few", "warn", look=cores_are_few,
            cause="More processes than CPU cores.",
            why="they take turns, and each collective waits for the last",
            fix="As many processes as cores."),
    Verdict("cpu-no-bf16", "warn", look=cpu_lacks_bf16,
            cause="The CPU has no instructions for the precision.",
            why="it is emulated, several times slower than fp32",
            fix="Train in fp32."),
    Verdict("omp-threads", "warn", look=threads_are_many,
            cause="OMP_NUM_THREADS times processes is more than there are cores.",
            why="threads wait for each other",
            fix="As many as there are cores for a process."),
    Verdict("omp-threads-few", "warn", look=threads_are_few,
            cause="OMP_NUM_THREADS leaves half of the cores or more without work, as images that set it to 1 do.",
            why="a CPU run takes several times as long",
            fix="Unset it: paceline sets what fits."),
    Verdict("launcher-left", "warn", look=launcher_left,
            cause="Variables of a launcher are set outside of it.",
            why="a script may think itself a rank of another job and wait for the others",
            fix="Unset them."),
    Verdict("debug-left", "warn", look=debug_left,
            cause="A debugging variable is still set.",
            why="it costs much of the speed",
            fix="Unset it."),
    Verdict("async-errors-off", "warn", look=errors_are_ignored,
            cause="NCCL's error handling is turned off.",
            why="a rank whose peer has failed waits without end",
            fix="Unset it."),
    Verdict("nccl-shm-off", "warn", look=nccl_shm_is_off,
            cause="NCCL's shared memory is turned off.",
            why="traffic within the host goes through sockets",
            fix="Unset it."),
    Verdict("allocator-twice", "warn", look=allocator_is_named_twice,
            cause="Both names of the allocator's variable are set, and differ.",
            why="which one counts depends on the version of torch",
            fix="Keep PYTORCH_ALLOC_CONF."),
    Verdict("allocator-old-name", "note", look=allocator_has_its_old_name,
            cause="The allocator's variable has its name from before torch 2.9.",
            why="a later torch will not read it",
            fix="Use the new name."),
    Verdict("allocator-clash", "warn", look=allocator_clashes,
            cause="Allocator settings that do not go together.",
            why="one of them does nothing",
            fix="Keep one."),
    Verdict("compiler-missing", "stop", look=compiler_is_missing,
            cause="torch.compile is asked for or will be tried, or window_pattern has an S on a GPU, and a compiler, Python's "
                  "headers or triton is missing.",
            why="the first step fails in inductor",
            fix="Install them; or --compile false, on a GPU with --window-pattern L."),
    Verdict("wandb-silent", "warn", look=tracker_is_silent,
            cause="W&B is asked for, but not installed, not logged in, or offline.",
            why="curves are missing, or the script stops to ask for a key",
            fix="Install it, log in, or go online."),
)  # fmt: skip
