"""
Using a trained model in one process: evaluate a checkpoint, sample from it. The run is only read, never changed.
"""

from collections.abc import Callable
from typing import Any

import torch

from paceline.config import load_config
from paceline.data.shards import TokenDataset
from paceline.data.tokenizer import Tokenizer
from paceline.errors import PacelineError
from paceline.model.checkpoint import CheckpointReader, load_newest_good, open_checkpoint
from paceline.model.generate import generate
from paceline.model.gpt import GPT
from paceline.plan.planner import Plan
from paceline.rundir import RunDir
from paceline.train.evaluate import val_bpb
from paceline.train.worker import DTYPES


def load_model(run: RunDir, *, step: int | None, device: str | None) -> tuple[GPT, CheckpointReader]:
    """The run's model at its newest good checkpoint, or at `step`, in the precision it was trained in."""
    plan = Plan.from_json(run.plan_json.read_text())
    reader = find_checkpoint(run, step)
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cuda", "cpu") or (chosen == "cuda" and not torch.cuda.is_available()):
        raise PacelineError(f"device {chosen} is not here", fix="--device cpu")
    model = GPT(plan.model, compute_dtype=DTYPES[plan.precision], logits_budget_bytes=plan.logits_budget_bytes)
    model.load_state_dict(reader.load_model_state(), strict=True)
    return model.to(chosen).eval(), reader


def find_checkpoint(run: RunDir, step: int | None) -> CheckpointReader:
    if step is None:
        reader, notes = load_newest_good(run.checkpoints)
        for note in notes:
            print(note)
        return reader
    path = run.checkpoints / f"step_{step:06d}"
    if not path.is_dir():
        kept = sorted(int(p.name[5:]) for p in run.checkpoints.glob("step_*") if p.name[5:].isdigit())
        raise PacelineError(
            f"{run.name} has no checkpoint at step {step}",
            fix="--step " + (" or ".join(map(str, kept)) or "after a save; none yet"),
        )
    return open_checkpoint(path)


def evaluate_run(
    run: RunDir, *, dataset: TokenDataset, max_tokens: int | None, step: int | None, device: str | None
) -> dict[str, Any]:
    """val_bpb of a checkpoint on the held-out part of `dataset`, which the run's own tokenizer has cut."""
    config, _ = load_config(run.config_toml, {})
    model, reader = load_model(run, step=step, device=device)
    split, tokenizer = dataset.split("val"), Tokenizer.load(run.tokenizer_json)
    max_tokens = max_tokens or config.eval_tokens
    bpb = val_bpb(
        model,
        split,
        token_bytes=torch.from_numpy(tokenizer.token_bytes()).to(next(model.parameters()).device),
        max_tokens=max_tokens,
        device_batch_size=8,
        rank=0,
        world_size=1,
    )
    tokens = min(max_tokens, split.num_tokens)
    return {"step": reader.step, "val_bpb": bpb, "tokens": tokens, "data": dataset.meta["source"]}


def sample_run(
    run: RunDir,
    *,
    prompt: str,
    num_samples: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    step: int | None,
    device: str | None,
    write: Callable[[str], None],
) -> list[str]:
    """Streams the texts through `write`, one sample live and the others after it; returns all of them."""
    for name, value, low in (
        ("num", num_samples, 1),
        ("tokens", max_new_tokens, 1),
        ("temperature", temperature, 0),
        ("top-k", top_k, 0),
    ):
        if not low <= value <= 1_000_000:
            raise PacelineError(f"--{name} is {value}", fix=f"a number from {low} to 1,000,000")
    model, _ = load_model(run, step=step, device=device)
    tokenizer = Tokenizer.load(run.tokenizer_json)
    live = tokenizer.decode_stream()
    tokens: list[list[int]] = [[] for _ in range(num_samples)]
    write(prompt)
    for new in generate(
        model,
        [tokenizer.bos_id, *tokenizer.encode(prompt)],
        num_samples=num_samples,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k or None,
        seed=seed,
        stop_token=tokenizer.bos_id,
    ):
        for row, token in zip(tokens, new, strict=True):
            if token is not None:
                row.append(token)
        if new[0] is not None:
            write(live.push(new[0]))
    write(live.end())
    texts = [tokenizer.decode(row) for row in tokens]
    write("\n")
    for number, text in enumerate(texts[1:], 2):
        write(f"\n--- {number} of {num_samples}\n{prompt}{text}\n")
    return texts
