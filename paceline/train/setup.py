"""
What a rank trains with: process group, model and optimizer as planned, compiled or not, and the checkpoint that it resumes from.

The rows of the next steps are not saved: they follow from the step, the seed and RUN/skipped.json.
"""

import contextlib
import json
import logging
import math
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from paceline.config import FLASH
from paceline.errors import PacelineError
from paceline.model.attention import attend, attention_problem, make_mask, use_flash3, with_gradients
from paceline.model.checkpoint import CheckpointReader, Piece
from paceline.model.gpt import DTYPES, GPT, initial_value
from paceline.model.layers import fused_loss_problem
from paceline.model.manifest import NoCheckpoint, clean_leftovers, newest_good
from paceline.plan.machine import AttentionCase
from paceline.plan.planner import Plan
from paceline.plan.precision import loses, precision_name
from paceline.plan.shapes import param_shapes, window_sizes
from paceline.plan.sharding import compiles_by_block
from paceline.plan.states import BASE
from paceline.rundir import RunDir, append_event, read_json_lines, write_atomic
from paceline.train.loop import Loop
from paceline.train.process import (
    ONEDNN_GAIN,
    answer_with_collectives,
    any_rank,
    broadcast_object,
    finish_work,
    forget_peaks,
    init_distributed,
    keep_freed_memory,
    onednn_gain,
    onednn_is_exact,
    use_onednn,
)
from paceline.train.product_trial import choose_products
from paceline.units import format_duration

log = logging.getLogger("paceline")

COMPILE_TRIAL_MICRO_STEPS = 3
ATTENTION_TRIALS = 6  # of each kind of layer


def start_ranks(run: RunDir, *, deterministic: bool = False) -> tuple[Plan, torch.device, int]:
    """Joins the process group; returns the run's plan, this rank's device and its number.

    Raises PacelineError if the world is not the plan's. Collective.
    """
    plan = Plan.from_json(run.plan_json.read_text())
    torch.set_num_threads(plan.threads)
    if deterministic and plan.device == "cuda":
        use_deterministic_kernels()
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise PacelineError(
            f"the plan is for {plan.device_name}, but this PyTorch ({torch.__version__}) cannot use CUDA here",
            fix="install a CUDA build of PyTorch, or --device cpu",
        )
    rank, world_size, local_rank = init_distributed(plan.device)
    if world_size != plan.world_size:
        raise PacelineError(
            f"{world_size} ranks were started, the plan is for {plan.world_size}",
            fix="start it through paceline train or resume",
        )
    answer_with_collectives(rank)
    untried, device = plan, torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.set_float32_matmul_precision("highest" if plan.precision == "fp32" else "high")
        plan, *notes = choose_kernels(plan, device)
        for note in notes if rank == 0 else ():
            write_note(run, note)
    else:
        keep_freed_memory()
        if plan.precision == "fp32":
            plan = choose_matmul(plan)
    if rank == 0 and (low := plan.low_precision):
        log.info(f"{precision_name(plan.precision, low)} in {low.num_layers} of {plan.model.n_layer} blocks")
    if rank == 0 and plan != untried:
        write_atomic(run.plan_json, plan.to_json())
    return plan, device, rank


def choose_matmul(plan: Plan) -> Plan:
    """Sends fp32 matmuls of the CPU to oneDNN where the plan says so; where it leaves that open, a trial decides.

    Each rounds in its own way, so one answer holds for all ranks and, in plan.json, for the whole run. It must be much faster to be
    taken: two starts on one CPU are then not decided by noise.
    """
    use, reason = plan.onednn, "as in the attempts before"
    if use is None:
        is_first = os.environ.get("RANK", "0") == "0"
        gain = broadcast_object(onednn_gain() if is_first else None)  # the other ranks wait, and do not disturb it
        use = gain >= ONEDNN_GAIN
        reason = f"oneDNN is {gain:.2f} times as fast on rank 0's CPU" if gain else "oneDNN would not keep them fp32"
    if use:
        if use := not any_rank(not onednn_is_exact(), torch.device("cpu")):
            use_onednn()
        else:
            reason = "oneDNN would not keep them fp32 on every rank's CPU"
    log.info(f"fp32 matmuls go through {'oneDNN' if use else 'the default library'}: {reason}")
    return replace(plan, onednn=use)


def choose_kernels(plan: Plan, device: torch.device) -> tuple[Plan, *tuple[str, ...]]:
    """Returns the plan with the kernels that this GPU takes, and what is to be reported of them. Collective."""
    plan, notes = choose_products(plan, device)
    plan, of_attention = choose_attention(plan, device)
    notes += of_attention
    problem = fused_loss_problem(device)
    if problem is not None:
        notes.append(f"the loss is computed without its Triton kernel, which is slower: {problem}")
    return replace(plan, fused_loss=problem is None), *notes


def choose_attention(plan: Plan, device: torch.device) -> tuple[Plan, list[str]]:
    """Tries the ways of attention that the plan leaves open, and takes the fastest that is right; or checks the one that it has.

    Flash kernels are compared with each other. The others are tried where none of these runs, in their order: FlexAttention takes
    some 20 s to compile, and on an H100 was as fast as a flash kernel. One answer holds for all ranks and, in plan.json, for the
    whole run, since each way rounds in its own way. Collective.
    """
    if plan.attention is not None and plan.attention not in FLASH:
        return plan, []
    times: dict[str, float] = {}
    problems: dict[str, str] = {}
    for name in plan.attention_choices if plan.attention is None else (plan.attention,):
        if times and name not in FLASH:
            break
        problem, ms = try_attention(plan, name, device)
        if any_rank(problem is not None, device):
            problems[name] = problem or "not on every rank"
        else:
            times[name] = ms
    reasons = "; ".join(f"{name} not: {problem}" for name, problem in problems.items())
    if not times:
        fix = "--attention auto" if plan.attention else "another PyTorch; `paceline torch` shows this one"
        raise PacelineError(f"no attention for this model runs on {plan.device_name}: {reasons}", fix=fix)
    chosen = broadcast_object(min(times, key=lambda name: times[name]))  # by rank 0's clock
    use_flash3(chosen == "fa3")
    forget_peaks(device)
    if plan.attention is not None:
        return plan, []
    measured = ", ".join(f"{name} {ms:.1f} ms" for name, ms in times.items())
    note = f"attention: {chosen}; in a micro-step: {measured}{'; ' if reasons else ''}{reasons}"
    case = AttentionCase(plan.model, plan.device, plan.precision, torch.cuda.get_device_capability(device))
    return replace(plan, attention=chosen, attention_kernel=case.kernel(chosen)), [note]


def try_attention(plan: Plan, name: str, device: torch.device) -> tuple[str | None, float]:
    """Returns why a way of attention cannot be taken here, or None; and the milliseconds that it takes of a micro-step."""
    problem = attention_problem(plan.model, name, DTYPES[plan.precision], device)
    try:
        return problem, math.inf if problem else attention_ms(plan, name, device)
    except RuntimeError as error:  # with all rows it may fail where one did not: memory, or a library's limit
        return str(error).splitlines()[0], math.inf


def attention_ms(plan: Plan, name: str, device: torch.device) -> float:
    """Returns the milliseconds that attention takes of a micro-step, forward and backward, by the median of a few layers."""
    model, num_rows, total_ms = plan.model, plan.device_batch_size, 0.0
    shapes = [(num_rows, model.sequence_len, heads, model.head_dim) for heads in (model.n_head, *[model.n_kv_head] * 2)]
    inputs = [torch.randn(shape, dtype=DTYPES[plan.precision], device=device).transpose(1, 2) for shape in shapes]
    for window, num_layers in Counter(window_sizes(model)).items():
        mask, times = make_mask(model.sequence_len, window, device, way=name), []
        for _ in range(ATTENTION_TRIALS):
            finish_work(device)
            started = time.perf_counter()
            with_gradients(partial(attend, mask=mask, window=window, way=name), inputs)
            finish_work(device)
            times.append(1000 * (time.perf_counter() - started))
        total_ms += num_layers * median(times[1:])  # the first one compiles and allocates
    return total_ms


def use_deterministic_kernels() -> None:
    """Makes a repeat of the same work give the same bits on a GPU; call it before the first kernel.

    Without, FlashAttention's backward adds to the queries' gradient in the order in which blocks end. An operation that has no
    deterministic kernel raises an error.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS then shares no workspace between streams
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # compiled kernels are not chosen by a clock
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # we read none


def make_model(plan: Plan, *, seed: int, device: torch.device) -> GPT:
    """Returns the plan's model with its first weights, fp32, on the device; where weights are sharded, without their memory."""
    hollow = plan.shards_weights
    with torch.device("meta") if hollow else contextlib.nullcontext():
        model = GPT(
            plan.model,
            compute_dtype=DTYPES[plan.precision],
            logits_budget_bytes=plan.logits_budget_bytes,
            activation_checkpointing=plan.activation_checkpointing,
            attention=plan.attention or plan.attention_choices[0],
        )
    if hollow:
        hollow_out(model, device, lambda name, shape: initial_value(name, shape, plan.model, seed=seed))
    else:
        model.init_weights(seed=seed)
        model.to(device)
    model.masks(plan.model.sequence_len, device)
    model.rotary(0, plan.model.sequence_len, device)
    model.fused_loss = plan.fused_loss
    if low := plan.low_precision:
        model.low_products = model.use_low_products(
            low.name,
            low.num_layers,
            without=loses(low, plan.product_gains),
            native=not low.emulated,
            keeps_codes=not hollow,
            device=device,
        )
    return model


def hollow_out(model: GPT, device: torch.device, draw: Callable[[str, tuple[int, ...]], Tensor]) -> None:
    """Moves the parameters to the device without memory, for an optimizer that calls first_value for the rows that it owns.

    draw: returns a parameter's first value by its name and shape. No rank ever holds the whole model in fp32.
    """
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    model.first_value = lambda name: draw(name, shapes[name]).to(device)
    for name, shape in shapes.items():
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, nn.Parameter(torch.empty((), device=device).expand(shape)))


def compile_model(model: GPT, plan: Plan) -> None:
    """Compiles the model as its plan's memory and time assume it."""
    model.compile(dynamic=False, by_block=compiles_by_block(world_size=plan.world_size, shard=plan.shard))


def choose_compile(loop: Loop, model: GPT) -> None:
    """Compiles the model where the plan says so; where it leaves that open, a trial decides and plan.json keeps the result."""
    run, plan = loop.run, loop.plan
    if plan.compile is None:
        eager_ms = trial_ms(loop)
        started = time.perf_counter()
        compile_model(model, plan)
        trial_ms(loop)
        compile_s = time.perf_counter() - started
        compiled_ms = trial_ms(loop)
        saved_s = (eager_ms - compiled_ms) / 1000 * plan.grad_accum_steps * plan.num_steps
        use = broadcast_object(saved_s > 0)  # rank 0's clock decides for all: different graphs would round differently
        if not use:
            model.uncompile()
        if loop.rank == 0:
            write_atomic(run.plan_json, replace(plan, compile=use).to_json())
            text = (
                f"compile: a micro-step takes {compiled_ms:.0f} ms compiled, {eager_ms:.0f} ms eager"
                f" ({format_duration(compile_s)} to compile): {'compiled' if use else 'eager'}"
            )
            write_note(run, text)
    elif plan.compile:
        compile_model(model, plan)


def write_note(run: RunDir, text: str) -> None:
    """Writes a line to the run's events, which the terminal shows, and to this rank's log."""
    append_event(run, "note", text=text)
    log.info(text)


def trial_ms(loop: Loop) -> float:
    """Returns the median milliseconds of a micro-step, whose gradients are thrown away; it changes no weight."""
    times = []
    for _ in range(COMPILE_TRIAL_MICRO_STEPS):
        started = time.perf_counter()
        loop.optimizer.zero_grad()
        idx, targets = loop.micro_batch(0, 0)
        loop.begin(0, 0)
        with loop.optimizer.micro_step(last=False):
            loop.forward(idx, targets).backward()  # type: ignore[no-untyped-call]
        finish_work(loop.device)
        times.append(1000 * (time.perf_counter() - started))
    return median(times)


def rng_pieces(rank: int, device: torch.device) -> list[Piece]:
    """Returns this rank's random number generators, uint8."""
    states = {f"rng.cpu.{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state(device)
    return [Piece(key, tuple(state.shape), (0, len(state)), state) for key, state in states.items()]


def resume(loop: Loop) -> int:
    """Loads the newest good checkpoint and returns its step, 0 for a fresh run. Rank 0 alone checks the hashes. Collective."""
    run, rank, scale = loop.run, loop.rank, loop.scale
    choice: tuple[str | None, list[str]] = (None, [])
    if rank == 0 and run.checkpoints.is_dir():
        clean_leftovers(run.checkpoints)
        with contextlib.suppress(NoCheckpoint):
            newest, damage = newest_good(run.checkpoints, set_aside=True)
            choice = (newest.name, damage)
    path, damage = broadcast_object(choice)  # each host may have its own folder of the run
    if path is None and loop.config.init_from:
        raise PacelineError(
            f"no checkpoint of {run.name} is left, not even the weights that it started with",
            fix=f"start it again: paceline train {shlex.quote(str(run.config_toml))} --name NEW",
        )
    checkpoint = CheckpointReader(run.checkpoints / path) if path else None
    if checkpoint:
        checkpoint.check_model(param_shapes(loop.plan.model))
        loop.optimizer.load(checkpoint.read, with_states="optimizer" in checkpoint.state)
    if checkpoint is None or "optimizer" not in checkpoint.state:  # the weights that a run starts with have no states
        if rank == 0 and (dropped := drop_metrics_after(run, -1)):  # an attempt that ended before its first checkpoint
            append_event(run, "resumed", step=0, from_world_size=None, dropped_metrics=dropped)
        return 0
    loop.optimizer.load_state_dict(checkpoint.state["optimizer"])
    scale.load_state_dict(checkpoint.state["scale"])
    if "loss_guard" in checkpoint.state:  # not in those of earlier versions
        loop.guard.load_state_dict(checkpoint.state["loss_guard"])
    keys = checkpoint.keys()  # a rank that did not exist at the save keeps its fresh seed
    if f"rng.cpu.{rank}" in keys:
        torch.set_rng_state(checkpoint.read(f"rng.cpu.{rank}"))
    if loop.device.type == "cuda" and f"rng.cuda.{rank}" in keys:
        torch.cuda.set_rng_state(checkpoint.read(f"rng.cuda.{rank}"), loop.device)
    if rank == 0:
        for message in damage:
            append_event(run, "damaged", message=message)
        for note in conversion_notes(keys, loop.plan.optimizer_states):
            append_event(run, "note", text=note)
        dropped = drop_metrics_after(run, checkpoint.step)
        append_event(
            run, "resumed", step=checkpoint.step, from_world_size=checkpoint.world_size, dropped_metrics=dropped
        )
        log.info(f"resumed from {checkpoint.path}; saved by {checkpoint.world_size} ranks, now {loop.plan.world_size}")
    return checkpoint.step


def conversion_notes(keys: Iterable[str], optimizer_states: str) -> list[str]:
    """Returns the line about states that were converted on their way from a checkpoint; keys: of its tensors."""
    saved = "8bit" if any(key.startswith("optim.") and key.endswith(BASE) for key in keys) else "fp32"
    text = f"optimizer states converted from the checkpoint's {saved} to {optimizer_states}"
    return [] if saved == optimizer_states else [text]


def drop_metrics_after(run: RunDir, step: int) -> int:
    """Removes the lines of steps that will be redone, so that metrics.jsonl never holds a step twice; returns how many."""
    records = list(read_json_lines(run.metrics))
    remaining = [record for record in records if record["step"] <= step]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in remaining)
    # without a change, whoever follows the file need not read all of it a second time
    if run.metrics.exists() and run.metrics.stat().st_size != len(text.encode()):
        write_atomic(run.metrics, text)
    return len(records) - len(remaining)
