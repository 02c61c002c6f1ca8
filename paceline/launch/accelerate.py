"""
The accelerate config that fits this machine: `accelerate launch --config_file FILE script.py` does what `paceline run` would.

Arithmetic and text; accelerate itself is not needed to write it. Its keys are those of accelerate 1.15
(commands/config/config_args.py, commands/launch.py). Two things there decide what is written for a CPU:

- distributed_type MULTI_CPU starts one process, whatever num_processes says, and leaves the others to mpirun; the
  launcher that starts several on a host is MULTI_GPU's, with or without GPUs;
- its processes join on the CPU only where ACCELERATE_USE_CPU is set or the script says Accelerator(cpu=True).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.config import Config, checked_value
from paceline.errors import PacelineError, UsageError
from paceline.plan.machine import Machine
from paceline.plan.planner import choose_device, choose_precision, choose_world_size

DEFAULT_PORT = 29500  # between hosts all must name the same one
DEFAULT_FILE = "accelerate.yaml"
OPTIONS: dict[str, Callable[[str], Any]] = {
    "out": str, "nproc": int, "device": str, "precision": str, "nnodes": int, "node-rank": int, "main-address": str,
    "main-port": int, "fsdp": bool, "force": bool, "json": bool,
}  # fmt: skip
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
ABOUT = {
    "num_processes": "on all hosts together",
    "main_process_port": "0: a free port is found at each launch",
    "fsdp_auto_wrap_policy": "transformers models name their layers; for others set fsdp_transformer_layer_cls_to_wrap",
}


def make_config(
    machine: Machine,
    *,
    nproc: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    nnodes: int = 1,
    node_rank: int | None = None,
    main_address: str | None = None,
    main_port: int | None = None,
    fsdp: bool = False,
) -> dict[str, Any]:
    """accelerate's keys and values. nproc: processes on this host; auto: one per GPU, two on the CPU."""
    asked = {"nproc": nproc, "device": device, "precision": precision}
    config = Config(**{key: checked_value(key, value, where=f"--{key}") for key, value in asked.items()})
    device = choose_device(config, machine)
    nproc = choose_world_size(config, machine, device=device)
    world_size = nproc * nnodes
    check_hosts(nnodes, node_rank=node_rank, main_address=main_address, main_port=main_port)
    if fsdp:
        check_fsdp(world_size, device=device)
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if fsdp else "MULTI_GPU" if world_size > 1 else "NO",
        "use_cpu": device == "cpu",
        "mixed_precision": MIXED_PRECISION[choose_precision(config, machine, device=device)],
        "num_processes": world_size,
        "num_machines": nnodes,
        "machine_rank": node_rank or 0,
    }
    if nnodes > 1:
        values |= {
            "main_process_ip": main_address,
            "main_process_port": main_port or DEFAULT_PORT,
            "rdzv_backend": "static",
        }
    elif world_size > 1:
        values["main_process_port"] = main_port or 0
    return {**values, "fsdp_config": FSDP} if fsdp else values


def check_hosts(nnodes: int, *, node_rank: int | None, main_address: str | None, main_port: int | None) -> None:
    if nnodes < 1:
        raise UsageError(f"--nnodes {nnodes}: not a number of hosts", fix="--nnodes 2")
    if main_port is not None and not 0 <= main_port < 1 << 16:
        raise UsageError(f"--main-port {main_port}: not a port", fix=f"--main-port {DEFAULT_PORT}")
    if nnodes == 1:
        if node_rank or main_address:
            raise UsageError(
                "--node-rank and --main-address are for several hosts", fix="--nnodes 2, or leave them out"
            )
        return
    if node_rank is None or not 0 <= node_rank < nnodes:
        given = "none is given" if node_rank is None else f"not {node_rank}"
        raise UsageError(
            f"--node-rank is 0 to {nnodes - 1} on {nnodes} hosts, {given}",
            fix="write one file on each host, with --node-rank 0 on the host of --main-address",
        )
    if not main_address:
        raise UsageError(f"{nnodes} hosts need --main-address", fix="the IP address of the host with --node-rank 0")
    if main_port == 0:
        raise UsageError("--main-port 0: several hosts cannot each pick one", fix=f"--main-port {DEFAULT_PORT}")


def check_fsdp(world_size: int, *, device: str) -> None:
    if device == "cpu":
        raise PacelineError("accelerate has FSDP on GPUs only, and device is cpu", fix="leave --fsdp out")
    if world_size == 1:
        raise PacelineError("FSDP splits a model over GPUs, and there is one process", fix="leave --fsdp out")


def format_yaml(values: dict[str, Any]) -> str:
    lines = [f"# {line}" for line in usage(values)]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [f"{key}:", *(f"  {yaml_line(name, inner)}" for name, inner in value.items())]
        else:
            lines.append(yaml_line(key, value))
    return "\n".join(lines) + "\n"


def usage(values: dict[str, Any], *, file: str = "FILE") -> list[str]:
    """The command to launch with."""
    command = f"accelerate launch --config_file {file} script.py"
    if values["use_cpu"] and values["num_processes"] > 1:
        return [
            f"ACCELERATE_USE_CPU=true {command}",
            "(without that word the processes do not join: no key here says it)",
        ]
    return [command]


def yaml_line(key: str, value: Any) -> str:
    about = f"  # {ABOUT[key]}" if key in ABOUT and (key != "main_process_port" or value == 0) else ""
    return f"{key}: {yaml_value(value)}{about}"


def yaml_value(value: Any) -> str:
    """A JSON string is a YAML one; quoted always, as NO and no are booleans without."""
    return json.dumps(value, ensure_ascii=False)


def write_config(values: dict[str, Any], file: Path, *, force: bool) -> None:
    if file.exists() and not force:
        raise PacelineError(f"{file} is already there", fix="--force writes over it, --out FILE another one")
    try:
        file.write_text(format_yaml(values), encoding="utf-8")
    except OSError as error:
        raise PacelineError(
            f"{file} cannot be written: {error.strerror}", fix="--out FILE in a place you can write"
        ) from error


def accelerate_config(options: dict[str, Any], machine: Machine) -> str:
    """The command: writes the file, returns what to print. options: as parse_options gives them."""
    values = make_config(
        machine,
        nproc=options.get("nproc"),
        device=options.get("device"),
        precision=options.get("precision"),
        nnodes=options.get("nnodes", 1),
        node_rank=options.get("node-rank"),
        main_address=options.get("main-address"),
        main_port=options.get("main-port"),
        fsdp=bool(options.get("fsdp")),
    )
    if options.get("json"):
        return json.dumps(values, ensure_ascii=False)
    file = options.get("out", DEFAULT_FILE)
    if file == "-":
        return format_yaml(values).rstrip("\n")
    write_config(values, Path(file), force=bool(options.get("force")))
    first, *more = usage(values, file=file)
    return "\n".join([f"wrote   {file}: {describe(values)}", f"next    {first}", *(f"        {line}" for line in more)])


def describe(values: dict[str, Any]) -> str:
    where = "CPU" if values["use_cpu"] else "GPU"
    how = {"FSDP": ", FSDP2", "MULTI_GPU": ", DDP", "NO": ""}[values["distributed_type"]]
    hosts = f" on {values['num_machines']} hosts" if values["num_machines"] > 1 else ""
    processes = "1 process" if values["num_processes"] == 1 else f"{values['num_processes']} processes"
    return f"{processes}{hosts}, {where}{how}, mixed precision {values['mixed_precision']}"
