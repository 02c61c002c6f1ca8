"""
Bits per byte on held-out text, during a run and of its checkpoints; and text from a run's model.

Bits per byte, unlike loss, compare between tokenizers, and are the same number at any world size. The functions on a run's
checkpoints run in one process and change nothing in the run.

A text is made one token at a time: the prompt is read once, then each step costs one token per sample. Samples are drawn on the CPU
from their own generator, so one seed gives the same tokens on every device whose logits agree. A prompt longer than sequence_len is
cut to its last sequence_len tokens. Generation continues past sequence_len: positions count on, and each layer sees as many tokens
back as its window did in training.
"""

# B rows in a micro-batch, T tokens in a row, S samples, V vocab_size

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from paceline.config_file import load_config
from paceline.data.dataset import TokenSplit
from paceline.data.prepare import TokenDataset, run_tokenizer
from paceline.data.tokenizer import DecodeStream, Tokenizer
from paceline.errors import PacelineError
from paceline.model.attention import KVCache, attention_problem
from paceline.model.checkpoint import CheckpointReader, NonFiniteWeights
from paceline.model.gpt import DTYPES, GPT
from paceline.model.layers import fused_loss_problem
from paceline.model.manifest import better_checkpoint, format_steps, newest_good, step_of, verified_checkpoint
from paceline.plan.machine import AttentionCase
from paceline.plan.planner import Plan
from paceline.plan.shapes import param_shapes
from paceline.run_options import EvalOptions, SampleOptions
from paceline.rundir import NO_SPACE, RunDir, append_event, write_atomic
from paceline.terminal import show_progress
from paceline.train.loop import to_device
from paceline.train.process import all_reduce_sum
from paceline.typed_fields import read_run_file
from paceline.units import format_number_of

log = logging.getLogger("paceline")

SAMPLE_PROMPT_TOKENS, SAMPLE_TOKENS = 48, 160
RUN_BATCH_ROWS = 8  # of evaluate_run


def val_bpb(
    model: GPT,
    split: TokenSplit,
    *,
    token_bytes: Tensor,
    max_tokens: int,
    device_batch_size: int,
    rank: int,
    world_size: int,
) -> float:
    """Returns bits per byte over at most max_tokens of the split, but at least a row, evenly spread over it, always the same rows.

    token_bytes: (V,) int64, UTF-8 length of each token, 0 for special tokens: those do not count.
    Collective: every rank must call it, and every rank gets the same number.
    """
    rows = eval_rows(split.num_rows(model.config.sequence_len), max_tokens, sequence_len=model.config.sequence_len)
    most = -(-len(rows) // world_size)  # of one rank
    rows = rows[rank::world_size]  # this rank's
    sums = torch.zeros(3, dtype=torch.float64, device=token_bytes.device)
    model.zero_grad()  # the compiler breaks its graph at every bf16 weight that has a gradient in fp32
    for start in range(0, most, device_batch_size):  # as many on all ranks, which may gather weights in each
        batch = rows[start : start + device_batch_size]
        sums += score_rows(model, split, batch, token_bytes=token_bytes, device_batch_size=device_batch_size)
    all_reduce_sum(sums)  # sums first, one division last: a mean of per-rank means weighs ranks wrongly
    nats, num_bytes, _ = sums.tolist()
    return bits_per_byte(nats, num_bytes)


@torch.no_grad()
def score_rows(
    model: GPT, split: TokenSplit, rows: np.ndarray, *, token_bytes: Tensor, device_batch_size: int
) -> Tensor:
    """Returns nats, bytes and predicted tokens of at most device_batch_size rows, (3,) fp64.

    Special tokens are predicted too, but count neither nats nor bytes.
    """
    inputs, answers = split.rows(rows, model.config.sequence_len)
    # a shorter last batch would be compiled for itself, and none at all is no batch
    missing = ((0, (device_batch_size if model.compiled else max(1, len(inputs))) - len(inputs)), (0, 0))
    inputs, answers = np.pad(inputs, missing), np.pad(answers, missing, constant_values=-1)
    idx, targets = to_device(inputs, token_bytes.device), to_device(answers, token_bytes.device)  # (B, T) int64
    nats = model(idx, targets, reduction="none")  # (B, T) fp32
    size = token_bytes[targets.clamp_min(0)] * (targets >= 0)  # (B, T) int64
    return torch.stack(((nats * (size > 0)).sum(dtype=torch.float64), size.sum(), (targets >= 0).sum()))


def bits_per_byte(nats: float, num_bytes: float) -> float:
    """Returns nats as bits per byte. Raises PacelineError where nothing was scored."""
    if not num_bytes:
        raise PacelineError("the text has no bytes to score", fix="more text, or another --data")
    return float(nats / (math.log(2) * num_bytes))


def eval_rows(num_rows: int, max_tokens: int, *, sequence_len: int) -> np.ndarray:
    """Returns all rows, or as many as max_tokens fill at even distances but at least one, (n,) int64.

    The last row may be shorter: max_tokens that reach it are all.
    """
    count = num_rows if max_tokens > (num_rows - 1) * sequence_len else max(1, max_tokens // sequence_len)
    return np.arange(count, dtype=np.int64) * num_rows // count


@torch.no_grad()
def write_sample(run: RunDir, model: GPT, dataset: TokenDataset, *, step: int, seed: int, rank: int) -> None:
    """Writes text that continues held-out tokens, to samples/ and the screen. On rank 0 alone; the others wait in the next step.

    Where weights are sharded, on all ranks, which gather them for each token; rank 0 writes.
    """
    together = model.passage is not None
    if rank and not together:
        return
    tokenizer = Tokenizer.load(dataset.tokenizer_json)
    held_out = dataset.split("val", "stream")
    middle = held_out.num_tokens // 2
    prompt = held_out.tokens(middle, min(middle + SAMPLE_PROMPT_TOKENS, held_out.num_tokens)).tolist()
    tokens: list[int] = []
    stop = None if together else tokenizer.bos_id  # all ranks must take as many steps
    choices: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "seed": seed}
    for new in generate(model, prompt, num_samples=1, max_new_tokens=SAMPLE_TOKENS, stop_token=stop, **choices):
        tokens += [token for token in new if token is not None]
    if rank:
        return
    if tokenizer.bos_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.bos_id)]
    prompt_text, text = tokenizer.decode(prompt), tokenizer.decode(tokens)
    try:
        run.samples.mkdir(exist_ok=True)
        write_atomic(run.sample(step), prompt_text + text)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        log.warning(f"{run.sample(step)} not written: {error.strerror}")  # the event below has the text
    append_event(run, "sample", step=step, prompt=prompt_text, text=text)


def load_model(run: RunDir, *, step: int | str | None, device: str | None) -> tuple[GPT, CheckpointReader]:
    """Returns the run's model at its newest good checkpoint, at `step` or its best, in the precision that it was trained in."""
    plan = read_run_file(run.plan_json, Plan.from_json)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cuda", "cpu") or (device == "cuda" and not torch.cuda.is_available()):
        raise PacelineError(f"device {device} is not here", fix="--device cpu")
    if step is None:
        reader, state = read_newest(run, plan)
    else:
        reader, state = read_checkpoint(verified_checkpoint(run, step), plan)
    dtype, attention = DTYPES[plan.precision], choose_way(plan, torch.device(device))
    model = GPT(plan.model, compute_dtype=dtype, logits_budget_bytes=plan.logits_budget_bytes, attention=attention)
    model.load_state_dict(state, strict=True)
    return model.to(device).eval(), reader


def read_newest(run: RunDir, plan: Plan) -> tuple[CheckpointReader, dict[str, Tensor]]:
    """Returns the newest good checkpoint and its parameters; of those that are left, while the trainer removes older ones."""
    while True:
        path, notes = newest_good(run.checkpoints, set_aside=False)
        try:
            checkpoint = read_checkpoint(path, plan)
        except PacelineError:
            if path.exists():
                raise
            continue  # the trainer has removed it meanwhile
        if best := better_checkpoint(run.checkpoints, step_of(path)):
            notes.append(f"note: val_bpb is lowest at step {best.step:,}, {best.val_bpb:.4f}: --step {best.step}")
        for note in notes:
            print(note, file=sys.stderr)
        return checkpoint


def read_checkpoint(path: Path, plan: Plan) -> tuple[CheckpointReader, dict[str, Tensor]]:
    """Returns a checkpoint and its parameters by their names in the module, fp32."""
    reader = CheckpointReader(path)
    reader.check_model(param_shapes(plan.model))
    try:
        return reader, reader.load_model_state()
    except NonFiniteWeights as error:
        fix = (
            format_steps(RunDir(path.parent.parent), without=reader.step) or f"no other checkpoint is left; {error.fix}"
        )
        raise PacelineError(error.message, fix=fix) from error


def choose_way(plan: Plan, device: torch.device) -> str:
    """Returns flash where it runs, since the run's own way may need what is not here; else sdpa, and prints why."""
    if device.type == "cpu":
        return "sdpa"
    case = AttentionCase(plan.model, device.type, plan.precision, torch.cuda.get_device_capability(device))
    problem = case.problem("flash") or attention_problem(plan.model, "flash", DTYPES[plan.precision], device)
    if problem is not None and case.has_windows:
        print(f"windows of attention by dense masks, which are slower: {problem}")
    return "sdpa" if problem else "flash"


def evaluate_run(run: RunDir, options: EvalOptions, *, dataset: TokenDataset) -> dict[str, Any]:
    """Returns val_bpb of a checkpoint on the text of the options, which the run's own tokenizer has encoded into `dataset`.

    It scores all rows, or as many as options.tokens fill, evenly spread. Of another text it takes both splits.
    """
    config, _ = load_config(run.config_toml, {})
    names: Sequence[Literal["train", "val"]] = ("val",) if options.data is None else ("train", "val")
    splits = [dataset.split(name, config.packing) for name in names]
    model, reader = load_model(run, step=options.step, device=options.device)
    choose_loss(model)
    token_bytes = torch.from_numpy(Tokenizer.load(run_tokenizer(run)).token_bytes()).to(model.lm_head.weight.device)
    sums = torch.zeros(3, dtype=torch.float64, device=token_bytes.device)
    batches = run_batches(splits, model.config.sequence_len, options.tokens)
    with show_progress() as progress:
        for number, (split, rows) in enumerate(batches):
            progress("evaluate", number, len(batches))
            sums += score_rows(model, split, rows, token_bytes=token_bytes, device_batch_size=RUN_BATCH_ROWS)
    nats, num_bytes, tokens = sums.tolist()
    bpb = bits_per_byte(nats, num_bytes)
    source = dataset.meta.get("val_source") or dataset.meta["source"]
    return {"run": run.name, "step": reader.step, "val_bpb": bpb, "tokens": int(tokens), "data": source}


def run_batches(
    splits: Sequence[TokenSplit], sequence_len: int, max_tokens: int | None
) -> list[tuple[TokenSplit, np.ndarray]]:
    """Returns the batches of rows that evaluate_run scores: all rows of the splits, or those of max_tokens."""
    num_rows = [split.num_rows(sequence_len) for split in splits]
    most = sum(num_rows) * sequence_len if max_tokens is None else max_tokens
    chosen, batches, first = eval_rows(sum(num_rows), most, sequence_len=sequence_len), [], 0
    for split, count in zip(splits, num_rows, strict=True):
        rows = chosen[(chosen >= first) & (chosen < first + count)] - first
        batches += [(split, rows[start : start + RUN_BATCH_ROWS]) for start in range(0, len(rows), RUN_BATCH_ROWS)]
        first += count
    return batches


def choose_loss(model: GPT) -> None:
    """Makes the model compute its loss as training does: by the Triton kernel where it runs. On a GPU without it, prints why."""
    device = model.lm_head.weight.device
    problem = fused_loss_problem(device)
    model.fused_loss = problem is None
    if problem is not None and device.type == "cuda":
        print(f"the loss is computed without its Triton kernel, which is slower: {problem}")


def format_evaluation(result: Mapping[str, Any]) -> str:
    """Returns the line of `paceline eval` for a result of evaluate_run."""
    step, tokens = f"step {result['step']:,}", f"{format_number_of(result['tokens'], 'token')} of {result['data']}"
    return f"{result['run']} at {step}: val_bpb {result['val_bpb']:.4f} on {tokens}"


def sample_run(run: RunDir, options: SampleOptions, *, prompt: str, write: Callable[[str], None]) -> dict[str, Any]:
    """Streams the first sample through `write`, then writes the others; returns all of them, with what they were made from."""
    model, reader = load_model(run, step=options.step, device=options.device)
    tokenizer = Tokenizer.load(run_tokenizer(run))
    live = DecodeStream(tokenizer)
    is_drawn = options.temperature > 0 and options.top_k != 1 and options.top_p > 0
    num = options.num if is_drawn else 1
    if num < options.num:
        print(
            f"note    each token is the likeliest one, so all {options.num} texts would be equal: writing one",
            file=sys.stderr,
        )
    tokens: list[list[int]] = [[] for _ in range(num)]
    write(prompt)
    for new in generate(
        model,
        [tokenizer.bos_id, *tokenizer.encode(prompt)],
        num_samples=num,
        max_new_tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k or None,
        top_p=options.top_p,
        seed=options.seed,
        stop_token=tokenizer.bos_id,
    ):
        for row, token in zip(tokens, new, strict=True):
            if token is not None:
                row.append(token)
        if new[0] is not None:
            write(live.push(new[0]))
    write(live.end() + "\n")
    texts = [tokenizer.decode(row) for row in tokens]
    for number, text in enumerate(texts[1:], 2):
        write(f"\n--- {number} of {num}\n{prompt}{text}\n")
    choices = {name: getattr(options, name) for name in ("seed", "temperature", "top_k", "top_p")}
    return {"run": run.name, "step": reader.step, "prompt": prompt, **choices, "samples": texts}


def generate(
    model: GPT,
    prompt_tokens: list[int],
    *,
    num_samples: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    stop_token: int | None,
    top_p: float = 1.0,
) -> Iterator[list[int | None]]:
    """Yields at each step the next token of every sample, None for one that has ended; ends when all have.

    temperature 0 takes the most probable token. A sample ends at stop_token, which is not yielded. Raises PacelineError for an
    empty prompt and for a token that the model does not have.
    """
    if not prompt_tokens:
        fix = "begin with the tokenizer's document mark, or with some text"
        raise PacelineError("the prompt has no tokens", fix=fix)
    if outside := [token for token in prompt_tokens if not 0 <= token < model.config.vocab_size]:
        raise PacelineError(
            f"token {outside[0]} of the prompt is outside the model's vocabulary of {model.config.vocab_size:,}",
            fix="encode it with the run's own tokenizer",
        )
    generator = torch.Generator().manual_seed(seed)
    ended = [False] * num_samples
    logits, cache = prefill(model, prompt_tokens, num_samples)
    for step in range(1, max_new_tokens + 1):
        newest = next_tokens(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        ended = [done or token == stop_token for done, token in zip(ended, newest, strict=True)]
        if all(ended):
            return
        yield [None if done else token for done, token in zip(ended, newest, strict=True)]
        if step < max_new_tokens:
            logits = decode(model, newest, cache)


@torch.inference_mode()
def prefill(model: GPT, prompt_tokens: list[int], num_samples: int) -> tuple[Tensor, KVCache]:
    """Returns (S, V) fp32 logits of the first new token, and the cache; the prompt is read once for all samples."""
    device = model.lm_head.weight.device
    cache = KVCache(model.config, num_rows=1, dtype=model.compute_dtype, device=device)
    idx = torch.tensor([prompt_tokens[-model.config.sequence_len :]], device=device)  # (1, T)
    logits = model.logits(idx, cache=cache, newest_only=True)  # (1, 1, V)
    cache.repeat(num_samples)
    return logits[:, -1].repeat(num_samples, 1), cache


@torch.inference_mode()
def decode(model: GPT, newest: list[int], cache: KVCache) -> Tensor:
    """Returns (S, V) fp32 logits after one more token of each sample."""
    idx = torch.tensor(newest, device=model.lm_head.weight.device).unsqueeze(1)  # (S, 1)
    return model.logits(idx, cache=cache)[:, -1]


@torch.inference_mode()
def next_tokens(
    logits: Tensor, *, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator
) -> list[int]:
    """Draws a token from each row of (S, V) logits. The host waits here for the device: the caller shows the token.

    top_p: nucleus sampling, arXiv 1904.09751, among what top_k leaves.
    """
    logits = logits.cpu()
    if temperature == 0:
        return logits.argmax(-1).tolist()
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # the maximum is taken off first: a tiny temperature then gives the most probable token instead of infinity
    shares = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_p < 1:
        ordered, order = shares.sort(descending=True)
        # of each token the share of those before it: 0 for the first, which stays
        likelier = ordered.cumsum(-1) - ordered
        shares = shares.scatter(-1, order, ordered.masked_fill(likelier > top_p, 0))
    return torch.multinomial(shares, 1, generator=generator).flatten().tolist()
