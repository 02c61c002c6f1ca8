"""
Config + Machine -> Plan: everything that "auto" became, worked out before anything starts, and refused here if it cannot be.

Pure arithmetic. The worker reads the Plan from the run folder and decides nothing of it again.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from paceline.config import Config, ModelConfig
from paceline.errors import PlanError
from paceline.plan.activations import MemorySetup
from paceline.plan.cost import flops_per_token
from paceline.plan.estimate import Calibrate
from paceline.plan.fit import LOGITS_MIB, TooLarge, choose_fit
from paceline.plan.gpus import peak_flops
from paceline.plan.machine import Machine
from paceline.plan.scaling import GroupSettings, batch_of_horizon, group_settings, horizon_tokens, width_of_depth
from paceline.plan.shapes import num_params
from paceline.units import MIB, format_bytes, format_count, format_duration

SHORT_RUN_FLOPS = 2e15  # a CPU run under this ends sooner than compiling pays back


@dataclass(frozen=True)
class Plan:
    """What a run will do. Rows, tokens and steps are exact."""

    model: ModelConfig
    device: str
    device_name: str
    world_size: int
    threads: int
    precision: str
    optimizer: str
    shard: str
    device_batch_size: int
    grad_accum_steps: int
    total_batch_size: int
    num_steps: int
    num_rows: int  # training rows of one epoch; 0 while the text is not prepared
    groups: Mapping[str, GroupSettings]
    attention: str
    compile: bool | None  # None: the worker measures
    logits_budget_bytes: int
    activation_checkpointing: bool
    flops_per_token: int
    peak_flops: float | None
    hosts: int = 1
    attention_kernel: str = "cpu"  # that `attention` is expected to take: decides what backward keeps
    memory_share: float | None = None  # of the device that was to be filled; None where device_batch_size was given
    memory: Mapping[str, Any] = field(default_factory=dict)  # estimate.MemoryEstimate.to_json
    cost: Mapping[str, Any] = field(default_factory=dict)  # what a step and the run are expected to take
    notes: tuple[str, ...] = ()  # what was chosen and costs speed, or was set and is not used

    @property
    def rows_per_step(self) -> int:
        return self.total_batch_size // self.model.sequence_len

    @property
    def epochs(self) -> float | None:
        return self.num_steps * self.rows_per_step / self.num_rows if self.num_rows else None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> "Plan":
        values: dict[str, Any] = json.loads(text)
        values["model"] = ModelConfig(**values["model"])
        values["groups"] = {
            name: GroupSettings(**{**group, "betas": tuple(group["betas"])}) for name, group in values["groups"].items()
        }
        values["notes"] = tuple(values.get("notes", ()))
        known = {each.name for each in fields(Plan)}
        return Plan(**{name: value for name, value in values.items() if name in known})


def make_plan(
    config: Config,
    machine: Machine,
    *,
    vocab_size: int,
    num_rows: int,
    calibrate: Calibrate | None = None,
    too_large: TooLarge | None = None,
) -> Plan:
    """vocab_size: the tokenizer's. num_rows: rows of one epoch, 0 if not known yet (then epochs cannot be worked out).

    calibrate: finds what this machine measured of such models. too_large: what ran out of memory here.
    """
    device = choose_device(config, machine)
    world_size = choose_world_size(config, machine, device=device)
    precision = choose_precision(config, machine, device=device)
    model = make_model_config(config, vocab_size=vocab_size, device=device)
    total = config.total_batch_size or _auto_total_batch_size(config, model, world_size=world_size)
    grad_accum_steps(
        total,
        device_batch_size=config.device_batch_size or 1,
        sequence_len=model.sequence_len,
        world_size=world_size,
    )
    num_steps = choose_num_steps(config, model, total_batch_size=total, num_rows=num_rows)
    flops = flops_per_token(model)
    compiled = _auto_compile(config, flops=flops * total * num_steps, device=device)
    attention = "flex" if device == "cuda" and "S" in model.window_pattern else "sdpa"
    share_rows = total // model.sequence_len // world_size
    rows = config.device_batch_size or 1
    setup = MemorySetup(
        model=model,
        device=device,
        world_size=world_size,
        optimizer=config.optimizer,
        shard=config.shard,
        precision=precision,
        device_batch_size=rows,
        grad_accum_steps=share_rows // rows,
        logits_budget_bytes=(config.logits_mib or LOGITS_MIB) * MIB,
        activation_checkpointing=bool(config.activation_checkpointing),
        attention=attention_kernel(model, machine, device=device, attention=attention, precision=precision),
        compiled=compiled is True,
    )
    chosen = choose_fit(config, setup, machine, share_rows=share_rows, calibrate=calibrate, too_large=too_large)
    setup = chosen.setup
    gpu = machine.gpus[0] if device == "cuda" else None
    return Plan(
        model=model,
        device=device,
        device_name=gpu.name if gpu else "CPU",
        world_size=world_size,
        threads=max(1, machine.cpu_cores * machine.hosts // world_size),
        precision=precision,
        optimizer=config.optimizer,
        shard=config.shard,
        device_batch_size=setup.device_batch_size,
        grad_accum_steps=setup.grad_accum_steps,
        total_batch_size=total,
        num_steps=num_steps,
        num_rows=num_rows,
        groups=group_settings(
            model,
            optimizer=config.optimizer,
            total_batch_size=total,
            num_steps=num_steps,
            tokens_per_param=config.tokens_per_param,
            matrix_lr=config.matrix_lr,
            embedding_lr=config.embedding_lr,
            unembedding_lr=config.unembedding_lr,
            weight_decay=config.weight_decay,
        ),
        attention=attention,
        compile=compiled,
        logits_budget_bytes=setup.logits_budget_bytes,
        activation_checkpointing=setup.activation_checkpointing,
        flops_per_token=flops,
        peak_flops=peak_flops(gpu.spec, precision) if gpu else None,
        hosts=machine.hosts,
        attention_kernel=setup.attention,
        memory_share=chosen.share,
        memory=chosen.estimate.to_json(),
        notes=chosen.notes,
    )


def memory_setup(plan: Plan) -> MemorySetup:
    """What the memory of a plan's ranks depends on."""
    return MemorySetup(
        model=plan.model,
        device=plan.device,
        world_size=plan.world_size,
        optimizer=plan.optimizer,
        shard=plan.shard,
        precision=plan.precision,
        device_batch_size=plan.device_batch_size,
        grad_accum_steps=plan.grad_accum_steps,
        logits_budget_bytes=plan.logits_budget_bytes,
        activation_checkpointing=plan.activation_checkpointing,
        attention=plan.attention_kernel,
        compiled=plan.compile is True,
    )


def attention_kernel(model: ModelConfig, machine: Machine, *, device: str, attention: str, precision: str) -> str:
    """The kernel that PyTorch takes: flash for 16 bits from Ampere on, else the memory-efficient one, which knows no GQA."""
    if device == "cpu":
        return "cpu"
    capability = machine.gpus[0].capability
    if attention == "flex" or (precision != "fp32" and (capability is None or capability >= (8, 0))):
        return "flash"
    return "efficient" if model.n_kv_head == model.n_head else "math"


def choose_device(config: Config, machine: Machine) -> str:
    device = config.device or ("cuda" if machine.gpus else "cpu")
    if device == "cuda" and not machine.gpus:
        raise PlanError(
            "device is cuda, but no GPU is visible here", fix="--device cpu, or see CUDA_VISIBLE_DEVICES and nvidia-smi"
        )
    return device


def choose_world_size(config: Config, machine: Machine, *, device: str) -> int:
    if device == "cuda":
        if config.nproc is not None and config.nproc > len(machine.gpus):
            raise PlanError(
                f"nproc is {config.nproc}, but {len(machine.gpus)} GPUs are visible", fix=f"--nproc {len(machine.gpus)}"
            )
        return (config.nproc or len(machine.gpus)) * machine.hosts
    if config.nproc is not None and config.nproc > 8 * machine.cpu_cores:
        raise PlanError(
            f"nproc is {config.nproc}, but this machine has {machine.cpu_cores} cores",
            fix=f"--nproc {machine.cpu_cores}",
        )
    return config.nproc or min(2, machine.cpu_cores)


def choose_precision(config: Config, machine: Machine, *, device: str) -> str:
    capability = machine.gpus[0].capability if device == "cuda" else None
    if device == "cuda":
        native = capability is None or capability >= (8, 0)
        if config.precision == "bf16" and not native:
            raise PlanError(
                f"precision is bf16, but {machine.gpus[0].name} has no bf16 units (capability {capability})",
                fix="--precision fp16",
            )
    else:
        native = machine.cpu_bf16
    return config.precision or ("bf16" if native else "fp32")


def make_model_config(config: Config, *, vocab_size: int, device: str) -> ModelConfig:
    n_embd = config.n_embd or width_of_depth(config.depth, head_dim=config.head_dim)
    n_head, rest = divmod(n_embd, config.head_dim)
    if rest or not n_head:
        lower = n_head * config.head_dim
        raise PlanError(
            f"n_embd {n_embd} is not a multiple of head_dim {config.head_dim}",
            fix=f"--n-embd {lower + config.head_dim}" + (f" or {lower}" if lower else ""),
        )
    if config.head_dim % 2:
        raise PlanError(
            f"head_dim {config.head_dim} is odd, rotary positions turn pairs", fix=f"--head-dim {config.head_dim + 1}"
        )
    n_kv_head = config.n_kv_head or n_head
    if n_head % n_kv_head:
        divisors = [str(n) for n in range(1, n_head + 1) if n_head % n == 0]
        raise PlanError(f"n_kv_head {n_kv_head} does not divide {n_head} heads", fix=f"one of {', '.join(divisors)}")
    return ModelConfig(
        n_layer=config.depth,
        n_embd=n_embd,
        n_head=n_head,
        n_kv_head=n_kv_head,
        head_dim=config.head_dim,
        sequence_len=config.sequence_len,
        vocab_size=vocab_size,
        window_pattern=config.window_pattern or ("SSSL" if device == "cuda" else "L"),
    )


def grad_accum_steps(total_batch_size: int, *, device_batch_size: int, sequence_len: int, world_size: int) -> int:
    """Micro-steps per optimizer step. total_batch_size is in tokens, device_batch_size in rows."""
    tokens_per_micro_step = device_batch_size * sequence_len * world_size
    steps, rest = divmod(total_batch_size, tokens_per_micro_step)
    if rest:
        lower, upper = steps * tokens_per_micro_step, (steps + 1) * tokens_per_micro_step
        takers = _counted(world_size, "process takes", "processes take")
        raise PlanError(
            f"total_batch_size {total_batch_size:,} is not a multiple of the {tokens_per_micro_step:,} tokens"
            f" that {takers} at once ({device_batch_size} rows x {sequence_len} tokens each)",
            fix=f"set total_batch_size to {upper:,}" + (f" or {lower:,}" if lower else ""),
        )
    return steps


def choose_num_steps(config: Config, model: ModelConfig, *, total_batch_size: int, num_rows: int) -> int:
    if config.num_steps is not None:
        return config.num_steps
    if config.epochs is not None:
        rows_per_step = total_batch_size // model.sequence_len
        return max(1, -(-int(config.epochs * num_rows) // rows_per_step))
    return max(1, round(horizon_tokens(model, tokens_per_param=config.tokens_per_param) / total_batch_size))


def _auto_total_batch_size(config: Config, model: ModelConfig, *, world_size: int) -> int:
    """The scaling rule's power of two, at least one row a device, rounded to what the devices can share."""
    wanted = batch_of_horizon(model, tokens_per_param=config.tokens_per_param)
    unit = (config.device_batch_size or 1) * model.sequence_len * world_size
    return max(1, round(wanted / unit)) * unit


def _auto_compile(config: Config, *, flops: float, device: str) -> bool | None:
    """False where a run is too short to win back the compiling; None where the worker is to measure."""
    if config.compile is None and device == "cpu" and flops < SHORT_RUN_FLOPS:
        return False
    return config.compile


def format_plan(plan: Plan, *, source: str) -> list[str]:
    """What is about to be done, for the screen: the plan with its text, and what it is expected to need."""
    model, *rest = plan_lines(plan)
    return [model, f"text    {source}", *rest, *expected_lines(plan), *(f"note    {note}" for note in plan.notes)]


def plan_lines(plan: Plan) -> list[str]:
    """Aligned lines."""
    model, accum = plan.model, plan.grad_accum_steps
    devices = (
        f"{plan.world_size} x {plan.device_name}"
        if plan.device == "cuda"
        else f"{_counted(plan.world_size, 'CPU process', 'CPU processes')} x {_counted(plan.threads, 'thread', 'threads')}"
    )
    if plan.hosts > 1:
        devices += f" on {plan.hosts} hosts"
    compiled = {True: "compiled", False: "eager", None: "compile: measured first"}[plan.compile]
    states = (
        "states replicated (DDP)" if plan.shard == "none" else "states sharded" if plan.world_size > 1 else "one device"
    )
    epochs = f", {plan.epochs:.3g} epochs" if plan.epochs else ""
    return [
        f"model   depth {model.n_layer}, {model.n_embd} wide, {model.n_head} heads, vocabulary {model.vocab_size:,},"
        f" {format_count(num_params(model))} parameters",
        f"step    {plan.total_batch_size:,} tokens = {plan.device_batch_size} rows x {model.sequence_len:,} tokens"
        f" x {_counted(plan.world_size, 'process', 'processes')} x {_counted(accum, 'micro-step', 'micro-steps')}",
        f"length  {plan.num_steps:,} steps, {format_count(plan.num_steps * plan.total_batch_size)} tokens{epochs}",
        f"device  {devices}, {plan.precision}, {plan.optimizer}, {states}, {compiled}",
    ]


def expected_lines(plan: Plan) -> list[str]:
    """Memory and time in a line each; none for a plan of an older version."""
    lines = []
    if plan.memory:
        need, card = plan.memory["process_bytes"]["expected"], plan.memory["card_bytes"]
        of_card = f" of {format_bytes(card)}, {100 * need / card:.0f} %" if card else ""
        lines.append(
            f"memory  {format_bytes(need)} expected on each {'GPU' if plan.device == 'cuda' else 'process'}{of_card}"
        )
    if plan.cost.get("seconds"):
        seconds = plan.cost["seconds"]["expected"]
        lines.append(
            f"time    {1000 * seconds:,.0f} ms a step expected, {format_duration(seconds * plan.num_steps)} in all"
        )
    return lines


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
