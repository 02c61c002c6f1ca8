"""
Verdicts on the host: memory, limits, shared memory, processes, compilers, and environment variables.
"""

from collections.abc import Mapping

from paceline.check.probes.facts import BUSY
from paceline.check.verdicts.rules import Case, Cases, Facts, Host, Rule, Severity, at, is_on, version_of
from paceline.plan.machine import parse_threads
from paceline.units import GIB, MIB, format_bytes, format_duration, format_list

SHM_PER_RANK = 64 * MIB  # NCCL's buffers and a data loader's batches
NOFILE_LOW = 1024
JOB_SHORT_S = 600.0
NPROC_PER_RANK = 256  # threads count too
MEMLOCK_LOW = 64 * MIB
RANK_PACKAGES = ("psutil",)  # what launch/agent.py imports; torch has verdicts of its own
TRAINER_PACKAGES = ("numpy", "safetensors", "tokenizers")  # and paceline.train.worker
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "GROUP_RANK")
# the number of nodes by those contracts of launch/places.py that take the address of node 0 from JOIN_NAMES
NUM_NODES_NAMES, JOIN_NAMES = ("NNODES", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"), ("MASTER_ADDR", "MASTER_PORT")
ALLOCATOR, OLD_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
# what helps inside of a container: docker's or podman's option, and what a Kubernetes pod or node needs
CONTAINER_FIXES = {
    "shm": (
        "start the container with --shm-size 8g",
        "mount a volume `emptyDir: {medium: Memory}` at /dev/shm, as `paceline emit k8s` does",
    ),
    "nofile": (
        "start the container with --ulimit nofile=65536:65536",
        "set LimitNOFILE=65536 for the container runtime of the node: a pod cannot",
    ),
    "memlock": (
        "start the container with --ulimit memlock=-1",
        "set LimitMEMLOCK=infinity for the container runtime of the node: a pod cannot",
    ),
    "gpus": (
        "start the container with --gpus all",
        "ask for them in the pod: `resources: {limits: {nvidia.com/gpu: 1}}`",
    ),
}
PROBE_MODULES = {"python": "host_probe python", "tools": "host_probe tools", "text": "storage_probe text"}


def probe_failed(host: Host) -> Cases:
    probes = host.at("probes") or {}
    errors = {
        name: str(probe.get("error"))
        for name, probe in probes.items()
        if probe and probe.get("ok") is False and not (name == "torch" and host.at("torch"))
    }
    busy = {name: error for name, error in errors.items() if error.startswith(BUSY)}
    if errors and len(errors) == len(probes) and not busy:
        fix = "python -V, as this user: the interpreter and its packages must be readable"
        evidence = tuple(f"probes.{name}" for name in errors)
        yield Case(f"no probe gave an answer: {next(iter(errors.values()))}", fix, "stop", evidence)
        return
    for name in (name for name in errors if name not in busy):
        fix = f"echo '{{}}' | python -m paceline.check.probes.{PROBE_MODULES.get(name, f'{name}_probe')}"
        yield Case(f"the {name} probe: {errors[name]}", fix, evidence=(f"probes.{name}",))
    if busy:
        noun, error = "probe" if len(busy) == 1 else "probes", next(iter(busy.values()))
        what = f"the {format_list(list(busy))} {noun}: {error}, the machine is busy"
        # the processes that keep it busy, the busiest first
        yield Case(what, "ps -eo pcpu,pid,args --sort=-pcpu | head", evidence=tuple(f"probes.{name}" for name in busy))


def memory_limit(facts: Facts) -> tuple[int | None, bool]:
    """Returns the bytes that processes may use here, and whether a cgroup limits them."""
    total, limit = at(facts, "host.memory.total_bytes"), at(facts, "host.memory.cgroup_limit_bytes")
    smaller = min((value for value in (total, limit) if value is not None), default=None)
    return smaller, limit is not None and limit == smaller


def severity_of_memory(host: Host, free: int, needed: int, *, by_cgroup: bool) -> Severity:
    """Returns stop where the kernel will kill a process, even after using the swap, which is unknown in a cgroup."""
    swap = 0 if by_cgroup else host.at("host.memory.swap_total_bytes") or 0
    return "stop" if free + swap < needed else "warn"


def memory_short(host: Host) -> Cases:
    limit, by_cgroup = memory_limit(host.facts)
    needed, ranks = host.intent.need_host_bytes, host.num_ranks
    if limit is None or not needed or limit >= needed:
        return
    fitting = limit * ranks // needed
    source = "the cgroup's memory limit is" if by_cgroup else "this host has"
    if by_cgroup and (host.at("host.memory.total_bytes") or 0) >= needed and not fitting:
        fix = f"raise the limit to {format_bytes(needed)}: docker --memory, systemd MemoryMax, Slurm --mem"
    else:
        fix = f"--nproc {fitting}" if fitting else "a host with more memory, or a smaller --depth"
    what = f"{source} {format_bytes(limit)}, {ranks} processes need {format_bytes(needed)} at least"
    yield Case(what, fix, severity_of_memory(host, limit, needed, by_cgroup=by_cgroup))


def memory_held(host: Host) -> Cases:
    limit, by_cgroup = memory_limit(host.facts)
    needed, used = host.intent.need_host_bytes, host.at("host.memory.cgroup_used_bytes")
    if limit is None or not needed or limit < needed:
        return
    free = [host.at("host.memory.available_bytes"), None if used is None or not by_cgroup else limit - used]
    left = min((value for value in free if value is not None), default=None)
    if left is None or left >= needed:
        return
    largest = host.at("host.memory.largest") or []
    users = ", ".join(f"{user['name']} (pid {user['pid']}, {format_bytes(user['rss_bytes'])})" for user in largest[:3])
    ours = [user["pid"] for user in largest[:1] if user["name"].startswith("python")]  # never a desktop or a service
    yield Case(
        f"{format_bytes(left)} of {format_bytes(limit)} are free, {host.num_ranks} processes need"
        f" {format_bytes(needed)} at least" + (f"; the largest are {users}" if users else ""),
        f"kill {ours[0]}" if ours else "ps -eo pid,rss,args --sort=-rss | head",
        severity_of_memory(host, left, needed, by_cgroup=by_cgroup),
    )


def memory_low(host: Host) -> Cases:
    available, swap = host.at("host.memory.available_bytes"), host.at("host.memory.swap_total_bytes")
    if available is not None and available < 2 * GIB and swap == 0:
        yield Case(f"{format_bytes(available)} of memory is available and there is no swap", "free -h")


def container_fix(host: Host, name: str, *, outside: str) -> str:
    """Returns the fix of CONTAINER_FIXES that the container around this host needs; `outside` where there is none."""
    container, (by_docker, by_kubernetes) = host.at("host.container"), CONTAINER_FIXES[name]
    return {"docker": by_docker, "podman": by_docker, "kubernetes": by_kubernetes}.get(container, outside)


def shm_fix(host: Host, option: str) -> str:
    """Returns how /dev/shm gets a mount option; root may also do it inside of some containers."""
    command = f"mount -o remount,{option} /dev/shm"
    fix = container_fix(host, "shm", outside=command)
    return f"{command}  # or {fix}" if host.at("host.root") and fix != command else fix


def shm_small(host: Host) -> Cases:
    free, total, ranks = host.at("host.shm.free_bytes"), host.at("host.shm.total_bytes"), max(2, host.num_ranks)
    needed = SHM_PER_RANK * ranks
    if free is None or (host.num_ranks < 2 and host.intent.command != "run"):
        return
    if host.at("host.shm.writable") is False and free >= MIB:  # a full one cannot be written either
        yield Case("/dev/shm cannot be written", shm_fix(host, "rw"), "stop" if host.uses_cuda else "warn")
    elif free < needed:
        yield Case(
            f"/dev/shm has {format_bytes(free)} free of {format_bytes(total)}, {ranks} ranks need {format_bytes(needed)}",
            shm_fix(host, "size=8G"),
            "stop" if host.uses_cuda and free < MIB else "warn",
        )


def nofile_low(host: Host) -> Cases:
    soft, hard = host.at("host.limits.nofile") or (-1, -1)
    if 0 <= soft < NOFILE_LOW:
        more = 65536 if hard == -1 else min(hard, 65536)
        lasting = "echo '* - nofile 65536' | sudo tee -a /etc/security/limits.conf"
        fix = f"ulimit -n {more}" if more > soft else container_fix(host, "nofile", outside=lasting)
        yield Case(f"{soft} open files are allowed, the hard limit is {'unlimited' if hard == -1 else hard}", fix)


def nproc_low(host: Host) -> Cases:
    soft, hard = host.at("host.limits.nproc") or (-1, -1)
    needed = NPROC_PER_RANK * max(2, host.num_ranks)
    if 0 <= soft < needed and not host.at("host.root"):
        fix = f"ulimit -u {needed if hard == -1 or hard >= needed else hard}"
        yield Case(f"{soft} processes and threads are allowed, {needed} are needed", fix)


def memlock_low(host: Host) -> Cases:
    soft, _ = host.at("host.limits.memlock") or (-1, -1)
    if host.active_infiniband and 0 <= soft < MEMLOCK_LOW and host.intent.num_hosts > 1:
        fix = container_fix(host, "memlock", outside="ulimit -l unlimited")
        yield Case(f"{format_bytes(soft)} may be locked, and InfiniBand locks its buffers", fix)


def wsl(host: Host) -> Cases:
    if host.at("host.wsl"):
        yield Case("this is WSL", "keep the run folder under ~, not under /mnt")


def container_no_gpus(host: Host) -> Cases:
    cards = host.at("nvidia_cards")
    if cards and host.at("gpus") == [] and host.at("host.container") and host.intent.device is None:
        what = f"{cards} NVIDIA cards are in this machine, but the container sees none"
        yield Case(what, container_fix(host, "gpus", outside="start the container with --gpus all"))


def cores_few(host: Host) -> Cases:
    cores, ranks = host.at("host.cpu.cores"), host.num_ranks
    if cores and ranks > cores:
        fix = "give the container or job as many cores as GPUs" if host.uses_cuda else f"--nproc {cores}"
        yield Case(f"{ranks} processes on {cores} CPU cores", fix)


def cpu_precision_emulated(host: Host) -> Cases:
    precision = host.intent.precision
    if precision in ("bf16", "fp16") and not host.uses_cuda and host.at("host.cpu.bf16") is False:
        yield Case(f"{host.at('host.cpu.model')} has no {precision} instructions", "--precision fp32")


def omp_threads(host: Host) -> Cases:
    value, cores, ranks = host.env("OMP_NUM_THREADS") or "", host.at("host.cpu.cores"), host.num_ranks
    threads = parse_threads(value)
    if threads and cores and ranks > 1 and threads > 1 and threads * ranks > cores:
        what = f"OMP_NUM_THREADS={value} for each of {ranks} processes, on {cores} cores"
        yield Case(what, f"export OMP_NUM_THREADS={max(1, cores // ranks)}")


def omp_threads_few(host: Host) -> Cases:
    value, cores, ranks = host.env("OMP_NUM_THREADS") or "", host.at("host.cpu.cores"), host.num_ranks
    threads = parse_threads(value)
    if threads and cores and not host.uses_cuda and 2 * threads * ranks <= cores:
        who = f"each of {ranks} processes" if ranks > 1 else "one process"
        most = f"a step may take up to {cores // (threads * ranks)} times as long"
        yield Case(f"OMP_NUM_THREADS={value} for {who}, on {cores} cores: {most}", "unset OMP_NUM_THREADS")


def package_missing(host: Host) -> Cases:
    packages = host.at("packages")
    if packages is None:
        return
    needed = [*RANK_PACKAGES, *(TRAINER_PACKAGES if host.intent.command != "run" else ())]
    needed += ["nvidia-ml-py"] if host.at("nvidia_cards") and host.intent.device != "cpu" else []
    if missing := [name for name in needed if packages.get(name) is None]:
        what = f"{format_list(missing)} {'is' if len(missing) == 1 else 'are'} not installed for"
        yield Case(f"{what} {host.at('python.executable') or 'this Python'}", f"pip install {' '.join(missing)}")


def launcher_left(host: Host) -> Cases:
    is_one_of_several = any(host.env(name) not in (None, "1") for name in NUM_NODES_NAMES)
    used = JOIN_NAMES if is_one_of_several else ()  # this process joins the others there: docs/clusters.md
    left = [name for name in LAUNCHER_NAMES if name not in used and host.env(name) is not None]
    if left:
        shown = " ".join(f"{name}={host.env(name)}" for name in left)
        yield Case(shown, f"unset {' '.join(left)}", evidence=tuple(f"env.{name}" for name in left))


def variables_have(values: Mapping[str, str]) -> Rule:
    """Returns the rule about variables that have a harmful value."""

    def rule(host: Host) -> Cases:
        for name, harmful in values.items():
            if (host.env(name) or "").upper() == harmful:
                yield Case(f"{name}={host.env(name)}", f"unset {name}", evidence=(f"env.{name}",))

    return rule


debug_left = variables_have(
    {
        "CUDA_LAUNCH_BLOCKING": "1",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "NCCL_DEBUG": "TRACE",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
)
async_errors_off = variables_have({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_ASYNC_ERROR_HANDLING": "0"})


def nccl_shm_off(host: Host) -> Cases:
    value = host.env("NCCL_SHM_DISABLE")
    if is_on(value) and host.num_ranks > 1:
        yield Case(f"NCCL_SHM_DISABLE={value}", "unset NCCL_SHM_DISABLE")


def allocator_twice(host: Host) -> Cases:
    old, new = host.env(OLD_ALLOCATOR), host.env(ALLOCATOR)
    if host.uses_cuda and old and new and old != new:
        what = f"PYTORCH_ALLOC_CONF={new} and PYTORCH_CUDA_ALLOC_CONF={old}"
        yield Case(what, f"unset {OLD_ALLOCATOR}")


def is_renamed(host: Host) -> bool:
    """Returns whether this torch has the allocator's variable under its new name."""
    return (version_of(host.at("torch.version")) or (0,)) >= (2, 9)


def allocator_old_name(host: Host) -> Cases:
    old = host.env(OLD_ALLOCATOR)
    if host.uses_cuda and old and not host.env(ALLOCATOR) and is_renamed(host) and not any(allocator_clash(host)):
        yield Case(f"{OLD_ALLOCATOR}={old}", f"export {ALLOCATOR}={old}; unset {OLD_ALLOCATOR}")


def allocator_clash(host: Host) -> Cases:
    """Yields one case: its fix also gives the variable its new name, and leaves the old one unset where both are set."""
    name = ALLOCATOR if host.env(ALLOCATOR) else OLD_ALLOCATOR
    value = host.env(name) or ""
    if not host.uses_cuda or "expandable_segments:True" not in value:
        return
    if host.at("host.wsl"):
        what, fix = "on WSL, where they do not work", f"unset {name}"
    elif "max_split_size_mb" in value:
        what, fix = "with max_split_size_mb, which they ignore", f"export {name}=expandable_segments:True"
        if name == OLD_ALLOCATOR and is_renamed(host):
            fix = f"export {ALLOCATOR}=expandable_segments:True; unset {OLD_ALLOCATOR}"
    else:
        return
    yield Case(f"{name}={value}: expandable segments {what}", fix, evidence=(f"env.{name}",))


def compiler_missing(host: Host) -> Cases:
    tools, config, compiles = host.at("tools"), host.intent.config, host.intent.compile
    if compiles is None:
        compiles = "depth" in config  # the worker compiles to measure
    # FlexAttention is compiled even in an eager model
    flex = host.uses_cuda and "depth" in config and "S" in (config.get("window_pattern") or "SSSL")
    if tools is None or not (flex or compiles):
        return
    missing = [] if tools.get("cxx") else ["a C++ compiler"]
    if host.uses_cuda and tools.get("python_headers") is False:
        missing.append("Python's headers")
    fixes = ["sudo apt-get install -y g++ python3-dev"] if missing else []
    # a CUDA wheel brings Triton, so where torch is a CPU build that is what is missing
    if host.uses_cuda and host.at("packages") and not host.torch_is_cpu_build and not has_triton(host):
        missing.append("triton")
        fixes.insert(0, "pip install triton")
    if missing:
        yield Case(f"torch.compile needs {' and '.join(missing)}, which this host does not have", " && ".join(fixes))


def has_triton(host: Host) -> bool:
    """Returns whether Triton is installed under any name: nightly wheels bring pytorch-triton."""
    installed = any("triton" in name and version for name, version in host.facts["packages"].items())
    return installed or str(host.at("torch.compile_backend") or "").startswith("triton")


def wandb_silent(host: Host) -> Cases:
    wandb, names = host.at("tools.wandb") or {}, ("PROJECT", "ENTITY", "RUN_GROUP")
    is_followed = "wandb" in host.intent.trackers and host.at("connection.here") is not False
    if not is_followed and not any(host.env(f"WANDB_{name}") for name in names):
        return
    if wandb.get("installed") is False:
        yield Case("W&B is requested but not installed", "pip install wandb")
    elif wandb.get("mode") in ("offline", "disabled"):
        yield Case(f"WANDB_MODE={wandb['mode']}: nothing is sent", "export WANDB_MODE=online")
    elif wandb.get("logged_in") is False:
        effect = "; what was saved offline is sent later by paceline track RUN --to wandb" if is_followed else ""
        yield Case("W&B is requested but not logged in", f"wandb login{effect}")


def slurm_outside(host: Host) -> Cases:
    """Finds a login node, where a run would train on the CPU, beside GPUs that Slurm gives."""
    partitions = host.at("tools.slurm.gpu_partitions")
    if partitions and not host.gpus and host.intent.set_value("device") is None:
        partition = max(partitions, key=lambda partition: partition["nodes_up"] > 0)
        name, nodes, up = partition["name"], partition["nodes"], partition["nodes_up"]
        state = "" if up == nodes else f", {up} of {nodes} up"
        what = f"this machine has no GPU and is in no job of Slurm; the nodes of partition {name} have GPUs{state}"
        is_script = host.intent.command == "run"
        submit = f'--slurm --slurm-args "--partition={name}"'
        yield Case(what, f"salloc --partition={name} --gpus-per-node=1" if is_script else submit)


def slurm_ends_soon(host: Host) -> Cases:
    job_id, left = host.at("tools.slurm.job_id"), host.at("tools.slurm.seconds_left")
    if left is not None and left < JOB_SHORT_S and not host.at("tools.slurm.requeues"):
        yield Case(
            f"job {job_id} of Slurm ends in {format_duration(left)}",
            "salloc --time=8:00:00, or --slurm outside of a job",
        )
