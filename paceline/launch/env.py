"""
What a worker finds around it: its environment variables, with the reason for each, and accelerate's config for the same launch.

Whatever the user has set stays; a value that is known to hurt is reported in one line. What torch's elastic agent sets itself
(RANK, MASTER_ADDR, ...) is not repeated here. CUDA_VISIBLE_DEVICES belongs to the user: it is set only to hide the GPUs from a
script that runs on the CPU.

torch 2.13 reads TORCH_FR_BUFFER_SIZE, and TORCH_NCCL_TRACE_BUFFER_SIZE with a warning that the name is old (FlightRecorder.hpp).
USE_LIBUV is read where a worker hosts its own store (torch/distributed/rendezvous.py), not where it joins an agent's.

With the config, `accelerate launch --config_file FILE script.py` does what `paceline run` would. Its keys are those of accelerate
1.15 (commands/config/config_args.py, commands/launch.py), which is not needed to write it. Two facts decide what it has for a CPU:

- distributed_type MULTI_CPU starts one process, whatever num_processes is, and leaves the others to mpirun; the launcher that
  starts several processes on a host belongs to MULTI_GPU, with or without GPUs;
- processes join on the CPU only where ACCELERATE_USE_CPU is set or the script has Accelerator(cpu=True).
"""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from paceline.check.probes.network_probe import route_to
from paceline.config import Config
from paceline.config_file import checked_value
from paceline.errors import PacelineError, UsageError, check_new_file
from paceline.launch.hosts import HostEntry, is_this_host, parse_hosts, ranks_of
from paceline.launch.preemption import check_preempt_options
from paceline.launch.ssh import ssh_name
from paceline.options import AccelerateOptions, LaunchOptions
from paceline.plan.machine import Machine, parse_threads
from paceline.plan.planner import choose_device, choose_world_size
from paceline.plan.precision import choose_precision
from paceline.terminal import cells, pad, write_output
from paceline.units import format_number_of

ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name of the first
RECORDER_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
RECORDED_COLLECTIVES = 2000  # torch 2.13's own default; older ones record none

ACCELERATE_TRUE = ("1", "true", "yes", "on", "y", "t")
DEFAULT_PORT = 29500  # between hosts all must name the same one
MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}

# FSDP2; what is not here is accelerate's default
FSDP: dict[str, Any] = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    "fsdp_activation_checkpointing": False,
}
COMMENTS = {
    "num_processes": "on all hosts together",
    "main_process_port": "0: each launch finds a free port",
    "fsdp_auto_wrap_policy": "transformers models have their layers' names; for others set fsdp_transformer_layer_cls_to_wrap",
}

Origin = Literal["added", "yours", "yours, hurts"]


class EnvRow(NamedTuple):
    """One variable. reason: why it is added, what paceline would set instead, or what the user's value does."""

    name: str
    value: str
    reason: str
    origin: Origin


class Launch(NamedTuple):
    """What the environment depends on, besides the user's variables. All processes are on this host."""

    nproc: int
    device: str
    cpu_cores: int
    libuv: bool = True  # whether this torch has it
    for_script: bool = False  # the workers run a script of the user's, which may use any library


def worker_env(user_env: Mapping[str, str], launch: Launch) -> tuple[dict[str, str], list[EnvRow]]:
    """Returns the workers' environment, and a row for each variable that paceline adds or would have set."""
    defaults = default_values(user_env, launch)
    rows = [EnvRow(name, value, reason, "added") for name, (value, reason) in defaults.items() if name not in user_env]
    for name, value in sorted(user_env.items()):
        harm = harm_of(name, value, launch)
        if harm:
            rows.append(EnvRow(name, value, harm, "yours, hurts"))
        elif name in defaults:
            default, reason = defaults[name]
            difference = f"set by you; paceline would set {default or 'it empty'}"
            rows.append(EnvRow(name, value, reason if value == default else difference, "yours"))
    return {**user_env, **{row.name: row.value for row in rows}}, rows


def default_values(user_env: Mapping[str, str], launch: Launch) -> dict[str, tuple[str, str]]:
    """Returns value and reason of every variable that paceline sets where the user does not."""
    on_gpu = launch.device == "cuda"
    on_cpu_script = launch.for_script and not on_gpu
    num_threads = max(1, launch.cpu_cores // launch.nproc)
    has_threads = (parse_threads(user_env.get("OMP_NUM_THREADS", str(num_threads))) or launch.cpu_cores) > 1
    record = user_env.keys().isdisjoint(RECORDER_NAMES)
    expand = on_gpu and user_env.keys().isdisjoint(ALLOCATOR_NAMES)
    why_record = "each rank remembers its last collectives, so that a hang can be traced"
    table = (
        (True, "OMP_NUM_THREADS", str(num_threads), f"{launch.cpu_cores} CPU cores for {launch.nproc} processes"),
        # a thread that spins takes the time of the one for which it waits: on 2 busy cores a tenth of the speed
        (not on_gpu and has_threads, "OMP_WAIT_POLICY", "PASSIVE", "threads that wait leave their core to others"),
        (True, "PYTHONUNBUFFERED", "1", "a log is whole up to the moment of a crash"),
        (True, "PYTHONFAULTHANDLER", "1", "a crash in native code leaves a traceback"),
        (True, "TOKENIZERS_PARALLELISM", "false", "tokenizers must not start a thread per core in every process"),
        (True, "GLOO_SOCKET_IFNAME", "lo", "all processes are on this host, whatever its name resolves to"),
        (record, RECORDER_NAMES[0], str(RECORDED_COLLECTIVES), why_record),
        (not launch.libuv, "USE_LIBUV", "0", "this torch was built without libuv"),
        (on_gpu, "CUDA_DEVICE_ORDER", "PCI_BUS_ID", "GPU numbers are those of nvidia-smi and of the plan"),
        (expand, ALLOCATOR_NAMES[0], "expandable_segments:True", "less GPU memory is lost to fragmentation"),
        (on_gpu, "NCCL_SOCKET_IFNAME", "lo", "all processes are on this host: no VPN, bridge or Wi-Fi between them"),
        (on_cpu_script, "CUDA_VISIBLE_DEVICES", "", "the device is cpu: the script sees no GPU"),
        (on_cpu_script, "ACCELERATE_USE_CPU", "true", "accelerate joins processes on the CPU only if this is set"),
    )
    return {name: (value, reason) for applies, name, value, reason in table if applies}


def harm_of(name: str, value: str, launch: Launch) -> str | None:
    """Returns the harm that a user's value is known to do; None where it does none."""
    threads = parse_threads(value) or 0
    match name:
        case "OMP_NUM_THREADS" if not threads:
            return "not a number of threads: each process uses every core"
        case "OMP_NUM_THREADS" if threads > 1 and launch.nproc * threads > launch.cpu_cores:
            return f"{launch.nproc} processes x {threads} threads wait for each other on {launch.cpu_cores} cores"
        case "PYTHONUNBUFFERED" if not value:
            return "output is buffered, and lost when a rank is killed"
        case "TOKENIZERS_PARALLELISM" if value.lower() not in ("", "0", "false", "off", "f", "no", "n"):
            return f"each of {launch.nproc} processes starts a thread per core"
        case "TORCH_FR_BUFFER_SIZE" | "TORCH_NCCL_TRACE_BUFFER_SIZE" if value == "0":
            return "no rank remembers its collectives: a hang cannot be traced"
        case "USE_LIBUV" if value != "0" and not launch.libuv:
            return "this torch was built without libuv and cannot create a store with it: set it to 0"
        case "CUDA_DEVICE_ORDER" if value != "PCI_BUS_ID" and launch.device == "cuda":
            return "GPU numbers may not be those of nvidia-smi and of the plan, where cards differ"
        case "PYTORCH_ALLOC_CONF" | "PYTORCH_CUDA_ALLOC_CONF" if "expandable_segments:False" in value:
            return "GPU memory is lost to fragmentation"
        case "CUDA_LAUNCH_BLOCKING" if value not in ("", "0") and launch.device == "cuda":
            return "the host waits for every kernel: good for debugging, slow for training"
        case "TORCH_DISTRIBUTED_DEBUG" if value.upper() == "DETAIL":
            return "every collective is checked by another one: good for debugging, slow for training"
        case "TORCH_NCCL_ASYNC_ERROR_HANDLING" | "NCCL_ASYNC_ERROR_HANDLING" if value == "0":
            return "a rank whose peer has failed waits forever"
        case "CUDA_VISIBLE_DEVICES" if value and launch.for_script and launch.device == "cpu":
            return "the device is cpu, and the script sees these GPUs"
        case "ACCELERATE_USE_CPU" if launch.for_script and launch.device == "cuda" and value.lower() in ACCELERATE_TRUE:
            return "accelerate stays on the CPU"
        case _:
            return None


def env_elsewhere(user_env: Mapping[str, str], launch: Launch, names: Sequence[str]) -> dict[str, str]:
    """Returns the variables for other hosts: what paceline sets, and those of --env; nothing else of the user's travels."""
    listed = listed_env(user_env, names, several=True)
    return {**{name: value for name, (value, _) in default_values(listed, launch).items()}, **listed}


def check_host_options(
    user_env: Mapping[str, str], options: LaunchOptions, *, num_hosts: int, rejoin: bool = True
) -> None:
    """Raises PacelineError for options that do not fit the hosts or each other. num_hosts: 0 where none are named."""
    check_preempt_options(options)
    listed_env(user_env, options.env, several=num_hosts > 0)
    if num_hosts == 0 and (options.min_hosts > 1 or not rejoin):
        flag = "--no-rejoin" if options.min_hosts == 1 else f"--min-hosts {options.min_hosts}"
        raise UsageError(f"{flag} is about several hosts", fix="--hosts ada,bob, or leave it out")
    if options.min_hosts > max(1, num_hosts):
        what = f"--min-hosts {options.min_hosts}, and --hosts names {num_hosts}"
        raise UsageError(what, fix=f"--min-hosts {num_hosts}, or fewer")


def listed_env(user_env: Mapping[str, str], names: Sequence[str], *, several: bool) -> dict[str, str]:
    """Returns the variables of --env. several: whether there are other hosts. Raises PacelineError for what cannot be sent."""
    listed = [name.strip() for text in names for name in text.split(",") if name.strip()]
    if names and not several:
        raise UsageError(
            "--env is about several hosts: ranks here have every variable", fix="--hosts ada,bob, or leave --env out"
        )
    for name in listed:
        key, equals, _ = name.partition("=")
        if equals:
            fix = f"export {key}=..., then --env {key}"
            raise UsageError("--env takes names: a value in a command is seen by everyone on this host", fix=fix)
        if name not in user_env:
            raise PacelineError(f"{name} of --env is not set here", fix=f"export {name}=..., or leave it out")
    return {name: user_env[name] for name in listed}


def harm_lines(rows: list[EnvRow]) -> list[str]:
    """Returns a line for each value of the user's that is known to hurt; it stays anyway."""
    return [f"note    {row.name}={row.value} is yours: {row.reason}" for row in rows if row.origin == "yours, hurts"]


def format_env(rows: list[EnvRow]) -> str:
    """Returns the table of --show-env: which variables are added, which are the user's, and why."""
    table = [(f"{row.name}={row.value}", row.origin, row.reason) for row in rows]
    widths = [max(cells(row[i]) for row in table) for i in range(2)]
    return "\n".join(f"{pad(a, widths[0])}  {pad(b, widths[1])}  {c}" for a, b, c in table)


def make_accelerate_config(options: AccelerateOptions, machine: Machine) -> dict[str, Any]:
    """Returns accelerate's keys and values; without nproc there is one process for each GPU, two on the CPU.

    Raises UsageError for hosts that do not match, PacelineError for what this machine does not have.
    """
    config = Config(**{key: checked_value(key, value, where=f"--{key}") for key, value in options.keys.items()})
    if config.precision not in (None, *MIXED_PRECISION):
        raise PacelineError(
            f"accelerate's {config.precision} needs a library and settings of its own", fix="--precision bf16"
        )
    device = choose_device(config, machine)
    world_size = choose_world_size(config, machine, device=device) * options.nnodes
    check_hosts(options)
    if options.fsdp and device == "cpu":
        raise PacelineError("accelerate supports FSDP on GPUs only, and device is cpu", fix="leave --fsdp out")
    if options.fsdp and world_size == 1:
        raise PacelineError("FSDP shards a model over GPUs, and there is one process", fix="leave --fsdp out")
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if options.fsdp else "MULTI_GPU" if world_size > 1 else "NO",
        "use_cpu": device == "cpu",
        "mixed_precision": MIXED_PRECISION[choose_precision(config, machine, device=device)],
        "num_processes": world_size,
        "num_machines": options.nnodes,
        "machine_rank": options.node_rank or 0,
    }
    if options.nnodes > 1:
        port = options.main_port or DEFAULT_PORT
        values |= {"main_process_ip": options.main_address, "main_process_port": port, "rdzv_backend": "static"}
    elif world_size > 1:
        values["main_process_port"] = options.main_port or 0
    return {**values, "fsdp_config": FSDP} if options.fsdp else values


def check_hosts(options: AccelerateOptions) -> None:
    """Raises UsageError where the options about hosts do not match."""
    nnodes, node_rank = options.nnodes, options.node_rank
    if nnodes == 1:
        if node_rank or options.main_address:
            raise UsageError("--node-rank and --main-address need several hosts", fix="--nnodes 2, or leave them out")
        return
    if node_rank is None or not 0 <= node_rank < nnodes:
        value = "not set" if node_rank is None else node_rank
        raise UsageError(
            f"--node-rank must be 0 to {nnodes - 1} on {nnodes} hosts, it is {value}",
            fix="write one file on each host, with --node-rank 0 on the host of --main-address",
        )
    if not options.main_address:
        raise UsageError(f"{nnodes} hosts need --main-address", fix="the IP address of the host with --node-rank 0")
    if options.main_port == 0:
        raise UsageError("--main-port 0: several hosts must use the same port", fix=f"--main-port {DEFAULT_PORT}")


def format_yaml(values: dict[str, Any]) -> str:
    """Returns the config file, with the command that uses it on top."""
    lines = [f"# {line}" for line in launch_lines(values)]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [f"{key}:", *(f"  {yaml_line(name, inner)}" for name, inner in value.items())]
        else:
            lines.append(yaml_line(key, value))
    return "\n".join(lines) + "\n"


def launch_lines(values: dict[str, Any], *, file: str = "FILE") -> list[str]:
    """Returns the command that launches with the config."""
    command = f"accelerate launch --config_file {file} script.py"
    if values["use_cpu"] and values["num_processes"] > 1:
        note = "(without that variable the processes do not join; the config has no key for it)"
        return [f"ACCELERATE_USE_CPU=true {command}", note]
    return [command]


def yaml_line(key: str, value: Any) -> str:
    """Returns a key with its value, and its comment if there is one."""
    comment = f"  # {COMMENTS[key]}" if key in COMMENTS and (key != "main_process_port" or value == 0) else ""
    # a JSON string is a YAML string too; it is always quoted, since NO and no would be booleans
    return f"{key}: {json.dumps(value, ensure_ascii=False)}{comment}"


def options_of_hosts(options: AccelerateOptions) -> dict[str, AccelerateOptions]:
    """Returns the options of each host of --hosts. Raises UsageError for a list that gives no config."""
    entries = parse_hosts(options.hosts or "")
    nproc = options.keys.get("nproc", ranks_of(entries))
    if len(entries) < 2:
        raise UsageError(f"--hosts names {entries[0].host} alone", fix="leave --hosts out, or name two hosts")
    if options.nnodes != 1 or options.node_rank is not None:
        raise UsageError("--hosts counts the hosts itself", fix="leave --nnodes and --node-rank out")
    if not any(map(is_this_host, entries)):
        fix = f"ssh {entries[0].destination} paceline accelerate-config --hosts {options.hosts}"
        raise UsageError("this host is not among --hosts, and its devices decide what the files have", fix=fix)
    address = options.main_address or first_address(entries)
    keys = {**options.keys, **({} if nproc is None else {"nproc": nproc})}
    several = replace(options, nnodes=len(entries), main_address=address, keys=keys)
    return {entry.host: replace(several, node_rank=index) for index, entry in enumerate(entries)}


def first_address(entries: Sequence[HostEntry]) -> str:
    """Returns the address by which the other hosts reach the first one."""
    first, second = (ssh_name(entry.destination) for entry in entries[:2])
    if is_this_host(entries[0]):
        address = route_to(second)
    else:
        try:
            address = str(socket.getaddrinfo(first, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError:
            address = None
    if address is None or address.startswith("127."):
        reason = f"the way to {second} is not known" if is_this_host(entries[0]) else f"{first} has no address here"
        raise UsageError(reason, fix=f"--main-address ADDRESS, that of {entries[0].host}")
    return address


def accelerate_configs(options: AccelerateOptions, machine: Machine) -> str:
    """Writes a file for each host of --hosts, accelerate-bob.yaml, and returns what to print."""
    hosts = {
        host: (
            own,
            make_accelerate_config(own, machine),
            Path(options.out).with_stem(f"{Path(options.out).stem}-{host.replace(':', '-')}"),
        )
        for host, own in options_of_hosts(options).items()
    }
    if options.json:
        return json.dumps({host: values for host, (_, values, _) in hosts.items()}, ensure_ascii=False)
    if options.out == "-":
        return "\n\n".join(f"# on {host}\n{format_yaml(values)}".rstrip() for host, (_, values, _) in hosts.items())
    lines = []
    for host, (own, _, path) in hosts.items():
        lines.append(
            accelerate_config(replace(own, out=str(path), hosts=None), machine).replace("next    ", f"on {host}: ")
        )
    others = [entry for entry in parse_hosts(options.hosts or "") if not is_this_host(entry)]
    copies = [f"scp {hosts[entry.host][2]} {entry.text}:" for entry in others]
    return "\n".join([*lines, f"copy    {'; '.join(copies)}"])


def accelerate_config(options: AccelerateOptions, machine: Machine) -> str:
    """Writes the file of `accelerate-config` and returns what to print. Raises PacelineError for what the user can fix."""
    if options.hosts is not None:
        return accelerate_configs(options, machine)
    values = make_accelerate_config(options, machine)
    if options.json:
        return json.dumps(values, ensure_ascii=False)
    file = options.out
    if file == "-":
        return format_yaml(values).rstrip("\n")
    check_new_file(Path(file), force=options.force)
    write_output(Path(file), format_yaml(values))
    processes = format_number_of(values["num_processes"], "process", "processes")
    hosts = f" on {values['num_machines']} hosts" if values["num_machines"] > 1 else ""
    device = "CPU" if values["use_cpu"] else "GPU"
    sharding = {"FSDP": ", FSDP2", "MULTI_GPU": ", DDP", "NO": ""}[values["distributed_type"]]
    text = f"{processes}{hosts}, {device}{sharding}, mixed precision {values['mixed_precision']}"
    command = "\n        ".join(launch_lines(values, file=file))
    return f"wrote   {file}: {text}\nnext    {command}"
