"""
Config + Machine -> Plan: what every "auto" becomes, worked out before anything starts, and refused here if it is impossible.

Pure arithmetic. The worker reads the Plan from the run folder and decides none of it again. A run that is resumed is planned again
here, with the choices of its first plan.
"""

import json
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from paceline.config import Config, ModelConfig
from paceline.errors import PlanError
from paceline.plan.activations import MemorySetup
from paceline.plan.algorithms import GroupSettings, group_settings
from paceline.plan.cost import flops_per_token
from paceline.plan.estimate import Calibrate
from paceline.plan.machine import Machine
from paceline.plan.shapes import batch_of_horizon, choose_num_steps, width_of_depth
from paceline.plan.sizing import LOGITS_MIB, DoesNotFit, TooLarge, choose_fit, divisors
from paceline.units import MIB, format_number_of, parse_duration

# fields that a MemorySetup and a Plan have in common
SETUP_FIELDS = tuple(field.name for field in fields(MemorySetup) if field.name not in ("attention", "compiled"))
RATE_KEYS = ("optimizer", "tokens_per_param", "matrix_lr", "embedding_lr", "unembedding_lr", "weight_decay")
SHORT_RUN_FLOPS = 2e15  # a CPU run under this ends sooner than compiling pays back
SHORT_RUN_S = {"cpu": 10_000.0, "cuda": 600.0}  # the same for a run whose length is a time
# a user who sets one of these on resume wants another fit
FIT_KEYS = frozenset({"profile", "memory_share", "precision"})


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
    num_steps: int  # an estimate where `time` is set
    num_rows: int  # training rows of one epoch; 0 while the text is not prepared
    groups: Mapping[str, GroupSettings]
    attention: str
    compile: bool | None  # None: the worker measures
    logits_budget_bytes: int
    activation_checkpointing: bool
    flops_per_token: int
    peak_flops: float | None
    hosts: int = 1
    attention_kernel: str = "cpu"  # the kernel that `attention` is expected to take: decides what backward keeps
    memory_share: float | None = None  # of the device that was to be filled; None where device_batch_size is set
    memory: Mapping[str, Any] = field(default_factory=dict)  # estimate.MemoryEstimate.to_json
    cost: Mapping[str, Any] = field(default_factory=dict)  # what a step and the run are expected to take
    # the length that was requested as a time, until a trial has measured how many steps that is
    time: str | None = None
    notes: tuple[str, ...] = ()  # what was chosen and costs speed, or was set and is not used

    @property
    def rows_per_step(self) -> int:
        return self.total_batch_size // self.model.sequence_len

    @property
    def epochs(self) -> float | None:
        return self.num_steps * self.rows_per_step / self.num_rows if self.num_rows else None

    def to_json(self) -> str:
        """Returns the text of plan.json."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Reads the text of plan.json, ignoring fields of another version."""
        values: dict[str, Any] = json.loads(text)
        values["model"] = ModelConfig(**values["model"])
        values["groups"] = {
            name: GroupSettings(**{**group, "betas": tuple(group["betas"])}) for name, group in values["groups"].items()
        }
        values["notes"] = tuple(values.get("notes", ()))
        known = {field.name for field in fields(Plan)}
        return Plan(**{name: value for name, value in values.items() if name in known})


def make_plan(
    config: Config,
    machine: Machine,
    *,
    vocab_size: int,
    num_rows: int,
    calibrate: Calibrate = lambda *_: None,
    too_large: TooLarge = lambda *_: False,
) -> Plan:
    """Returns the plan; raises PlanError where there is none.

    vocab_size: the tokenizer's. num_rows: rows of one epoch, 0 if not known yet (then epochs cannot be worked out).
    calibrate: returns what this machine measured of such models. too_large: returns whether a size ran out of memory here.
    """
    device = choose_device(config, machine)
    world_size = choose_world_size(config, machine, device=device)
    model = make_model_config(config, vocab_size=vocab_size, device=device)
    total = config.total_batch_size or _auto_total_batch_size(config, model, world_size=world_size)
    rows = config.device_batch_size or 1
    accum = grad_accum_steps(total, device_batch_size=rows, sequence_len=model.sequence_len, world_size=world_size)
    num_steps = choose_num_steps(config, model, total_batch_size=total, num_rows=num_rows)
    flops = flops_per_token(model)
    compiled = _auto_compile(config, flops=flops * total * num_steps, device=device)
    precision = choose_precision(config, machine, device=device)
    setup = MemorySetup(  # what the config leaves open has its preferred value until it is sized
        model=model,
        device=device,
        world_size=world_size,
        optimizer=config.optimizer,
        shard=config.shard,
        precision=precision,
        device_batch_size=rows,
        grad_accum_steps=accum,
        logits_budget_bytes=(config.logits_mib or LOGITS_MIB) * MIB,
        activation_checkpointing=bool(config.activation_checkpointing),
        attention=attention_kernel(model, machine, device=device, precision=precision),
        compiled=compiled is True,
    )
    sized = choose_fit(config, setup, machine, calibrate=calibrate, too_large=too_large)
    rates = {key: getattr(config, key) for key in RATE_KEYS}
    gpu = machine.gpus[0] if device == "cuda" else None
    return Plan(
        **{name: getattr(sized.setup, name) for name in SETUP_FIELDS},
        device_name=gpu.name if gpu else "CPU",
        threads=max(1, machine.cpu_cores * machine.hosts // world_size),
        total_batch_size=total,
        num_steps=num_steps,
        num_rows=num_rows,
        groups=group_settings(model, total_batch_size=total, num_steps=num_steps, **rates),
        attention=attention_function(model, device=device),
        compile=compiled,
        flops_per_token=flops,
        peak_flops=gpu.spec.peak_flops.get(precision) if gpu and gpu.spec else None,
        hosts=machine.hosts,
        attention_kernel=setup.attention,
        memory_share=sized.share,
        memory=sized.estimate.to_json(),
        time=config.time,
        notes=sized.notes,
    )


def memory_setup(plan: Plan) -> MemorySetup:
    """Returns all that the memory of a plan's ranks depends on."""
    shared = {name: getattr(plan, name) for name in SETUP_FIELDS}
    return MemorySetup(**shared, attention=plan.attention_kernel, compiled=plan.compile is True)


def attention_function(model: ModelConfig, *, device: str) -> str:
    """Returns flex for windows on a GPU, else PyTorch's scaled dot product."""
    return "flex" if device == "cuda" and "S" in model.window_pattern else "sdpa"


def attention_kernel(model: ModelConfig, machine: Machine, *, device: str, precision: str) -> str:
    """Returns the kernel that PyTorch takes: flash for 16 bits from Ampere on, else the memory-efficient one, which has no GQA."""
    if device == "cpu":
        return "cpu"
    capability = machine.gpus[0].capability
    if attention_function(model, device=device) == "flex" or (
        precision != "fp32" and (capability is None or capability >= (8, 0))
    ):
        return "flash"
    return "efficient" if model.n_kv_head == model.n_head else "math"


def choose_device(config: Config, machine: Machine) -> str:
    """Returns cuda or cpu; raises PlanError for cuda where no GPU is visible."""
    device = config.device or ("cuda" if machine.gpus else "cpu")
    if device == "cuda" and not machine.gpus:
        raise PlanError(
            "device is cuda, but no GPU is visible here", fix="--device cpu, or see CUDA_VISIBLE_DEVICES and nvidia-smi"
        )
    return device


def choose_world_size(config: Config, machine: Machine, *, device: str) -> int:
    """Returns the ranks of all hosts; raises PlanError for more than the machine has devices for."""
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
    return (config.nproc or min(2, machine.cpu_cores)) * machine.hosts


def choose_precision(config: Config, machine: Machine, *, device: str) -> str:
    """Returns the config's precision, or bf16 where the hardware multiplies it natively, else fp32."""
    if device == "cpu":
        native = machine.cpu_bf16
    else:
        capability = machine.gpus[0].capability
        native = capability is None or capability >= (8, 0)
        if config.precision == "bf16" and not native:
            raise PlanError(
                f"precision is bf16, but {machine.gpus[0].name} has no bf16 units (capability {capability})",
                fix="--precision fp16",
            )
    return config.precision or ("bf16" if native else "fp32")


def make_model_config(config: Config, *, vocab_size: int, device: str) -> ModelConfig:
    """Returns the network's dimensions; raises PlanError where heads do not divide them."""
    n_embd = config.n_embd or width_of_depth(config.depth, head_dim=config.head_dim)
    n_head, remainder = divmod(n_embd, config.head_dim)
    if remainder or not n_head:
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
        options = ", ".join(map(str, reversed(divisors(n_head))))
        raise PlanError(f"n_kv_head {n_kv_head} does not divide {n_head} heads", fix=f"one of {options}")
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
    """Returns micro-steps per optimizer step. total_batch_size is in tokens, device_batch_size in rows."""
    tokens_per_micro_step = device_batch_size * sequence_len * world_size
    steps, remainder = divmod(total_batch_size, tokens_per_micro_step)
    if remainder:
        lower, upper = steps * tokens_per_micro_step, (steps + 1) * tokens_per_micro_step
        takers = format_number_of(world_size, "process takes", "processes take")
        raise PlanError(
            f"total_batch_size {total_batch_size:,} is not a multiple of the {tokens_per_micro_step:,} tokens"
            f" that {takers} at once ({device_batch_size} rows x {sequence_len} tokens each)",
            fix=f"set total_batch_size to {upper:,}" + (f" or {lower:,}" if lower else ""),
        )
    return steps


def _auto_total_batch_size(config: Config, model: ModelConfig, *, world_size: int) -> int:
    """Returns the scaling rule's power of two, rounded to what the devices can share: at least a row for each."""
    ideal = batch_of_horizon(model, tokens_per_param=config.tokens_per_param)
    unit = (config.device_batch_size or 1) * model.sequence_len * world_size
    return max(1, round(ideal / unit)) * unit


def _auto_compile(config: Config, *, flops: float, device: str) -> bool | None:
    """Returns False where a run is too short to win back the compile time; None where the worker is to measure."""
    if config.compile is not None:
        return config.compile
    if config.time is not None:
        return False if parse_duration(config.time) < SHORT_RUN_S[device] else None
    return False if device == "cpu" and flops < SHORT_RUN_FLOPS else None


MakePlan = Callable[[Config, Machine], Plan]


def replan(old: Plan, config: Config, machine: Machine, *, make: MakePlan, set_keys: Set[str] = frozenset()) -> Plan:
    """Returns what `make` does, with the rows, chunks, checkpointing and compiling of `old` where the config leaves them open.

    These decide the order of additions, and with it every bit that follows: what was measured here since then must not change them
    under a run that was interrupted. set_keys: keys that the user sets on resume, "auto" among their values. On other devices, or
    another number of them, nothing is kept. What has run on this device is not refused by arithmetic.
    """
    device = choose_device(config, machine)
    same = (device, choose_world_size(config, machine, device=device)) == (old.device, old.world_size)
    rows_are_open = "device_batch_size" in set_keys and config.device_batch_size is None
    if not same or rows_are_open or set_keys & FIT_KEYS:
        return make(config, machine)
    values: dict[str, Any] = {
        "device_batch_size": old.device_batch_size,
        "logits_mib": old.logits_budget_bytes // MIB,
        "activation_checkpointing": old.activation_checkpointing,
        "compile": old.compile,
    }
    old_values = {key: value for key, value in values.items() if getattr(config, key) is None and key not in set_keys}
    plan = _make_unrefused(old, replace(config, **old_values), machine, make)
    if "compile" in old_values:
        plan = replace(plan, compile=old.compile)  # a trial's answer holds for the whole run
    if "device_batch_size" in old_values:
        plan = replace(plan, memory_share=old.memory_share, notes=old.notes)
    return plan


def smaller_plan(old: Plan, config: Config, machine: Machine, *, make: MakePlan) -> Plan | None:
    """Returns the next plan that needs less memory for the same steps: a smaller micro-batch, then activation checkpointing."""
    share_rows = old.device_batch_size * old.grad_accum_steps
    fewer = [count for count in divisors(share_rows) if count < old.device_batch_size]
    changes: list[dict[str, Any]] = [{"device_batch_size": count} for count in fewer]
    if not old.activation_checkpointing and config.activation_checkpointing is None:
        changes.append({"device_batch_size": old.device_batch_size, "activation_checkpointing": True})
    for change in changes:
        with suppress(DoesNotFit):
            return replan(old, replace(config, **change), machine, make=make, set_keys=frozenset(change))
    return None


def format_change(old: Plan, new: Plan) -> str:
    """Returns `device_batch_size 4 instead of 8, 6 micro-steps instead of 3`."""
    parts = []
    if new.device_batch_size != old.device_batch_size:
        parts.append(f"device_batch_size {new.device_batch_size} instead of {old.device_batch_size}")
    if new.grad_accum_steps != old.grad_accum_steps:
        parts.append(f"{new.grad_accum_steps} micro-steps instead of {old.grad_accum_steps}")
    if new.activation_checkpointing and not old.activation_checkpointing:
        parts.append("activation checkpointing")
    return ", ".join(parts)


def fewer_ranks(old: Plan, *, devices: int) -> int:
    """Returns the most ranks, on so many devices, that can share the rows of each step; 0 if none can."""
    rows = old.total_batch_size // old.model.sequence_len
    return next((count for count in range(min(devices, old.world_size), 0, -1) if rows % count == 0), 0)


def _make_unrefused(old: Plan, config: Config, machine: Machine, make: MakePlan) -> Plan:
    """Returns the plan; one that equals the old plan is made even where arithmetic says that it does not fit."""
    try:
        return make(config, machine)
    except DoesNotFit as error:
        plan = make(config, of_unknown_memory(machine))
        old_bytes, card_bytes = old.memory.get("card_bytes"), error.estimate.card_bytes
        is_same = (plan.device_name, memory_setup(plan)) == (old.device_name, memory_setup(old))
        if not is_same or old_bytes is None or card_bytes is None or card_bytes < old_bytes:
            raise
        return replace(plan, memory=error.estimate.to_json())


def of_unknown_memory(machine: Machine) -> Machine:
    """Returns the machine with devices of unknown memory, on which nothing is refused."""
    gpus = tuple(replace(gpu, memory_bytes=0) for gpu in machine.gpus)
    return replace(machine, gpus=gpus, memory_bytes=0)
