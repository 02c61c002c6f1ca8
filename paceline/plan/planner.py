"""
Config + Machine -> Plan: what every "auto" becomes, worked out before anything starts, and refused here if it is impossible.

Pure arithmetic. The worker reads the Plan from the run folder and decides none of it again. plan/replan.py plans a resumed run.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

from paceline.config import FLASH, Config, ModelConfig, format_flags
from paceline.errors import Change, PlanError
from paceline.plan.activations import MemorySetup
from paceline.plan.algorithms import GroupSettings, group_settings, rate_notes
from paceline.plan.cost import LOGITS_MIB, RunSetup, flops_per_token
from paceline.plan.machine import AttentionCase, Machine
from paceline.plan.offloading import choose_offload
from paceline.plan.precision import LowPrecision, choose_low_precision, choose_precision, precision_notes
from paceline.plan.shapes import batch_of_horizon, choose_num_steps, width_of_depth
from paceline.plan.sizing import NOTHING_MEASURED, SIZE_KEYS, DoesNotFit, Measured, choose_fit, divisors
from paceline.units import MIB, format_bytes, format_number_of, parse_duration

SETUP_FIELDS = tuple(field.name for field in fields(RunSetup))
RATE_KEYS = ("optimizer", "tokens_per_param", "matrix_lr", "embedding_lr", "unembedding_lr", "weight_decay")
SHORT_RUN_FLOPS = 2e15  # a CPU run under this ends sooner than compiling pays back
SHORT_RUN_S = {"cpu": 10_000.0, "cuda": 600.0}  # the same for a run whose length is a time
FIX_DEPTH = 3  # refusals in a row that one fix may answer
# the steps stay the same, with other rounding at most
SAME_RUN_KEYS = {*SIZE_KEYS, "profile", "memory_share", "nproc", "offload", "optimizer_states"}


@dataclass(frozen=True, kw_only=True)
class Plan(RunSetup):
    """What a run will do. Rows, tokens and steps are exact."""

    device_name: str
    threads: int
    total_batch_size: int
    num_steps: int  # an estimate where `time` is set
    num_rows: int  # training rows of one epoch; 0 while the text is not prepared
    groups: Mapping[str, GroupSettings]
    attention: str | None  # one of config.ATTENTION; None: the worker measures
    compile: bool | None  # None: the worker measures
    flops_per_token: int
    peak_flops: float | None
    hosts: int = 1
    # of each matrix of a block: how many times as fast as in 16 bits; None: not measured yet, or all products are low ones
    product_gains: Mapping[str, float] | None = None
    onednn: bool | None = None  # fp32 matmuls of a CPU go through oneDNN; None: the worker measures
    attention_choices: tuple[str, ...] = ()  # that it may measure, the first expected
    fused_loss: bool = False  # by the Triton kernel of model/kernels.py; a GPU's worker tries it at each start
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
        return self.epochs_of(self.num_rows)

    def epochs_of(self, num_rows: int) -> float | None:
        """Returns how often the run reads a text of so many rows; None where there are none."""
        return self.num_steps * self.rows_per_step / num_rows if num_rows else None

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
        values |= {name: tuple(values.get(name, ())) for name in ("notes", "attention_choices")}
        if low := values.get("low_precision"):
            values["low_precision"] = LowPrecision(**low)
        known = {field.name for field in fields(Plan)}
        return Plan(**{name: value for name, value in values.items() if name in known})


def make_plan(
    config: Config,
    machine: Machine,
    *,
    vocab_size: int,
    num_rows: int,
    measured: Measured = NOTHING_MEASURED,
    find_fix: bool = True,
) -> Plan:
    """Returns the plan; raises PlanError where there is none, with a change that gives one as its fix.

    vocab_size: the tokenizer's. num_rows: rows of one epoch, 0 if not known yet (then epochs cannot be worked out). find_fix: False
    for a caller that only asks whether there is a plan.
    """

    def plan_of(changed: Config) -> Plan:
        vocab = vocab_size if changed.vocab_size == config.vocab_size else changed.vocab_size
        return _plan(changed, machine, vocab_size=vocab, num_rows=num_rows, measured=measured)

    try:
        return plan_of(config)
    except PlanError as error:
        if find_fix:
            error.fix = working_fix(error, config, plan_of)
        raise


def working_fix(error: PlanError, config: Config, plan_of: Callable[[Config], Plan]) -> str:
    """Returns the error's fix where each of its changes gives a plan, else flags that do; without any, what is left to do."""
    changes, too_large = error.changes, isinstance(error, DoesNotFit)
    if not too_large:
        changes = list(changes)
        if all(_first_plan([change], config, plan_of, depth=0) for change in changes):
            return error.fix
    accepted = _first_plan(changes, config, plan_of, depth=0 if too_large else FIX_DEPTH)
    if accepted is None:
        return "a device with more memory, or a smaller model"
    change, plan = accepted
    same = f" needs {format_bytes(plan.memory['process_bytes']['expected'])}, same total_batch_size"
    return format_flags(change) + (same if set(change) <= SAME_RUN_KEYS else "")


def _first_plan(
    changes: Iterable[Change], config: Config, plan_of: Callable[[Config], Plan], *, depth: int
) -> tuple[Change, Plan] | None:
    """Returns the first change that gives a plan, and the plan. depth: how often a refused change may be joined by another."""
    refusals: list[tuple[Change, PlanError]] = []
    for change in changes:
        try:
            return change, plan_of(replace(config, **change))
        except PlanError as error:
            refusals.append((change, error))
    for change, refusal in refusals if depth else ():
        further = 0 if isinstance(refusal, DoesNotFit) else depth - 1
        if joined := _first_plan(refusal.changes, replace(config, **change), plan_of, depth=further):
            return {**change, **joined[0]}, joined[1]
    return None


def _plan(config: Config, machine: Machine, *, vocab_size: int, num_rows: int, measured: Measured) -> Plan:
    """Returns the plan; raises PlanError, whose changes nobody has tried."""
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
    gpu = machine.gpus[0] if device == "cuda" else None
    case = AttentionCase(model, device, precision, gpu.capability if gpu else None, config.deterministic)
    attention, rates = choose_attention(config, case), {key: getattr(config, key) for key in RATE_KEYS}
    setup = MemorySetup(  # what the config leaves open has its preferred value until it is sized
        model=model,
        device=device,
        world_size=world_size,
        optimizer=config.optimizer,
        shard=config.shard or "optimizer",
        precision=precision,
        device_batch_size=rows,
        grad_accum_steps=accum,
        logits_budget_bytes=(config.logits_mib or LOGITS_MIB) * MIB,
        activation_checkpointing=config.activation_checkpointing or False,
        attention=case.kernel(attention[0]),
        compiled=compiled is True,
        offload=choose_offload(config, device=device),
        optimizer_states=config.optimizer_states,
        low_precision=choose_low_precision(config, model, gpu=gpu),
    )
    sized = choose_fit(config, setup, machine, measured=measured, compile=compiled)
    return Plan(
        **{name: getattr(sized.setup, name) for name in SETUP_FIELDS},
        device_name=gpu.name if gpu else "CPU",
        threads=threads_of(machine, world_size),
        total_batch_size=total,
        num_steps=num_steps,
        num_rows=num_rows,
        groups=group_settings(model, total_batch_size=total, num_steps=num_steps, **rates),
        attention=None if len(attention) > 1 and attention[0] in FLASH else attention[0],
        attention_choices=attention,
        compile=compiled,
        flops_per_token=flops,
        peak_flops=gpu.spec.peak_flops.get(precision) if gpu and gpu.spec else None,
        hosts=machine.hosts,
        attention_kernel=setup.attention,
        memory_share=sized.share,
        memory=sized.estimate.to_json(),
        time=config.time,
        notes=(
            *sized.notes,
            *precision_notes(setup.low_precision, model, bf16_finish=config.bf16_finish),
            *rate_notes(config, total_batch_size=total, num_steps=num_steps),
        ),
    )


def threads_of(machine: Machine, world_size: int) -> int:
    """Returns the CPU threads of each rank. world_size: the ranks of all hosts."""
    return machine.threads or max(1, machine.cpu_cores * machine.hosts // world_size)


def memory_setup(plan: Plan) -> MemorySetup:
    """Returns all that the memory of a plan's ranks depends on."""
    shared = {name: getattr(plan, name) for name in SETUP_FIELDS}
    return MemorySetup(**shared, attention=plan.attention_kernel, compiled=plan.compile is True)


def choose_attention(config: Config, case: AttentionCase) -> tuple[str, ...]:
    """Returns the ways of attention that a trial may take, the first expected; raises PlanError for a way that cannot be taken."""
    if config.attention is None:
        return case.choices
    if problem := case.problem(config.attention):
        raise PlanError(
            f"attention is {config.attention}, but {problem}",
            fix=f"--attention {case.choices[0]}, or auto",
            changes=({"attention": None},),
        )
    return (config.attention,)


def choose_device(config: Config, machine: Machine) -> str:
    """Returns cuda or cpu; raises PlanError where no GPU is visible for cuda, or the driver that should tell does not answer."""
    if machine.driver_error and config.device != "cpu":
        raise machine.driver_error
    device = config.device or ("cuda" if machine.gpus else "cpu")
    if device == "cuda" and not machine.gpus:
        raise PlanError(
            "device is cuda, but no GPU is visible here",
            fix="--device cpu, or see CUDA_VISIBLE_DEVICES and nvidia-smi",
            changes=({"device": "cpu"},),
        )
    return device


def choose_world_size(config: Config, machine: Machine, *, device: str) -> int:
    """Returns the ranks of all hosts; raises PlanError for more than the machine has devices for."""
    if device == "cuda":
        if config.nproc is not None and config.nproc > len(machine.gpus):
            raise PlanError(
                f"nproc is {config.nproc}, but {len(machine.gpus)} GPUs are visible",
                fix=f"--nproc {len(machine.gpus)}",
                changes=({"nproc": len(machine.gpus)},),
            )
        return (config.nproc or len(machine.gpus)) * machine.hosts
    if config.nproc is not None and config.nproc > 8 * machine.cpu_cores:
        raise PlanError(
            f"nproc is {config.nproc}, but this machine has {machine.cpu_cores} cores",
            fix=f"--nproc {machine.cpu_cores}",
            changes=({"nproc": machine.cpu_cores},),
        )
    return (config.nproc or min(2, machine.cpu_cores)) * machine.hosts


def make_model_config(config: Config, *, vocab_size: int, device: str) -> ModelConfig:
    """Returns the network's dimensions; raises PlanError where heads do not divide them."""
    n_embd = config.n_embd or width_of_depth(config.depth, head_dim=config.head_dim)
    n_head, remainder = divmod(n_embd, config.head_dim)
    if remainder or not n_head:
        lower = n_head * config.head_dim
        raise PlanError(
            f"n_embd {n_embd} is not a multiple of head_dim {config.head_dim}",
            fix=f"--n-embd {lower + config.head_dim}" + (f" or {lower}" if lower else ""),
            changes=[{"n_embd": width} for width in (lower + config.head_dim, lower) if width],
        )
    if config.head_dim % 2:
        raise PlanError(
            f"head_dim {config.head_dim} is odd, rotary positions turn pairs",
            fix=f"--head-dim {config.head_dim + 1}",
            changes=({"head_dim": config.head_dim + 1},),
        )
    n_kv_head = config.n_kv_head or n_head
    if n_head % n_kv_head:
        options = divisors(n_head)
        raise PlanError(
            f"n_kv_head {n_kv_head} does not divide {n_head} heads",
            fix=f"one of {', '.join(map(str, reversed(options)))}",
            changes=[{"n_kv_head": option} for option in options],
        )
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
        changes: list[Change] = [{"total_batch_size": tokens} for tokens in (upper, lower) if tokens]
        rows, uneven = divmod(total_batch_size, sequence_len * world_size)
        fix = f"set total_batch_size to {upper:,}" + (f" or {lower:,}" if lower else "")
        if not uneven:  # the total stays, and with it the steps
            changes.insert(0, {"device_batch_size": next(n for n in divisors(rows) if n < device_batch_size)})
            fix = f"{format_flags(changes[0])}, same total_batch_size; or {fix}"
        if world_size > 1 and total_batch_size % (tokens_per_micro_step // world_size) == 0:
            changes.append({"nproc": 1})
            fix += f"; or --nproc 1, one process in place of {world_size}"
        takers = format_number_of(world_size, "process takes", "processes take")
        raise PlanError(
            f"total_batch_size {total_batch_size:,} is not a multiple of the {tokens_per_micro_step:,} tokens"
            f" that {takers} at once ({format_number_of(device_batch_size, 'row')} x {sequence_len} tokens each)",
            fix=fix,
            changes=changes,
        )
    return steps


def _auto_total_batch_size(config: Config, model: ModelConfig, *, world_size: int) -> int:
    """Returns the scaling rule's power of two, rounded to what the devices can share: at least a row for each.

    Where the micro-batch is open, a device's rows divide well: with a prime number of them, a micro-step has all rows or one.
    """
    ideal = batch_of_horizon(model)
    unit = (config.device_batch_size or 1) * model.sequence_len * world_size
    count = max(1, round(ideal / unit))
    if config.device_batch_size is None:
        near = (count + sign * distance for distance in range(count) for sign in (1, -1))
        count = next(filter(divides_well, near))
    return count * unit


def divides_well(rows: int) -> bool:
    """Returns whether each divisor is at most twice the next smaller one: what fits is then used by more than a half."""
    return all(larger <= 2 * smaller for larger, smaller in pairwise(divisors(rows)))


def _auto_compile(config: Config, *, flops: float, device: str) -> bool | None:
    """Returns False where a run is too short to win back the compile time; None where the worker is to measure."""
    if config.compile is not None:
        return config.compile
    if config.time is not None:
        return False if parse_duration(config.time) < SHORT_RUN_S[device] else None
    return False if device == "cpu" and flops < SHORT_RUN_FLOPS else None
