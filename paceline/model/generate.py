"""
Text from a model, one token at a time: prefill once, then each step costs one token per sample.

Samples are drawn on the CPU from their own generator, so one seed gives the same tokens on every device whose logits agree.
A prompt longer than sequence_len keeps its last sequence_len tokens. Past sequence_len generation goes on: positions count on, and
each layer sees as many tokens back as its window did in training.
"""

# S samples, V vocab_size

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.model.gpt import GPT
from paceline.model.kv_cache import KVCache


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
) -> Iterator[list[int | None]]:
    """At each step the next token of every sample, None for one that has ended; ends when all have.

    temperature 0 takes the likeliest token. A sample ends at stop_token, which is not yielded.
    """
    check_request(model, prompt_tokens, num_samples=num_samples, temperature=temperature, top_k=top_k)
    generator = torch.Generator().manual_seed(seed)
    ended = [False] * num_samples
    logits, cache = prefill(model, prompt_tokens, num_samples)
    for step in range(1, max_new_tokens + 1):
        newest = next_tokens(logits, temperature=temperature, top_k=top_k, generator=generator)
        ended = [done or token == stop_token for done, token in zip(ended, newest, strict=True)]
        if all(ended):
            return
        yield [None if done else token for done, token in zip(ended, newest, strict=True)]
        if step < max_new_tokens:
            logits = decode(model, newest, cache)


def check_request(
    model: GPT, prompt_tokens: list[int], *, num_samples: int, temperature: float, top_k: int | None
) -> None:
    vocab_size = model.config.vocab_size
    if not prompt_tokens:
        raise PacelineError(
            "the prompt has no tokens", fix="begin with the tokenizer's document mark, or with some text"
        )
    outside = [token for token in prompt_tokens if not 0 <= token < vocab_size]
    if outside:
        raise PacelineError(
            f"token {outside[0]} of the prompt is outside the model's vocabulary of {vocab_size:,}",
            fix="encode it with the run's own tokenizer",
        )
    if num_samples < 1:
        raise PacelineError(f"num_samples is {num_samples}", fix="at least 1")
    if not 0 <= temperature < float("inf"):
        raise PacelineError(f"temperature is {temperature}", fix="0 for the likeliest token, or up to about 1.5")
    if top_k is not None and top_k < 1:
        raise PacelineError(f"top_k is {top_k}", fix="at least 1, or leave it out for the whole vocabulary")


@torch.inference_mode()
def prefill(model: GPT, prompt_tokens: list[int], num_samples: int) -> tuple[Tensor, KVCache]:
    """(S, V) logits of the first new token; the prompt is read once, whatever num_samples is."""
    device = model.lm_head.weight.device
    cache = KVCache(model.config, num_rows=1, dtype=model.compute_dtype, device=device)
    idx = torch.tensor([prompt_tokens[-model.config.sequence_len :]], device=device)  # (1, T)
    logits = model.logits(idx, cache=cache, newest_only=True)  # (1, 1, V)
    cache.repeat(num_samples)
    return logits[:, -1].repeat(num_samples, 1), cache


@torch.inference_mode()
def decode(model: GPT, newest: list[int], cache: KVCache) -> Tensor:
    """(S, V) logits after one more token of each sample."""
    idx = torch.tensor(newest, device=model.lm_head.weight.device).unsqueeze(1)  # (S, 1)
    return model.logits(idx, cache=cache)[:, -1]


@torch.inference_mode()
def next_tokens(logits: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator) -> list[int]:
    """One of each row of (S, V). The host waits here for the device: the caller shows the token."""
    logits = logits.cpu()
    if temperature == 0:
        return logits.argmax(-1).tolist()
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # a tiny temperature is as good as greedy, and must not divide to infinity
    shares = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    return torch.multinomial(shares, 1, generator=generator).flatten().tolist()
