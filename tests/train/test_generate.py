"""Cached generation against reading everything again, and how it ends."""

from dataclasses import replace

import pytest
import torch

from paceline.config import ModelConfig
from paceline.errors import PacelineError
from paceline.model.gpt import GPT
from paceline.train.evaluate import decode, generate, prefill

CONFIG = ModelConfig(
    n_layer=3, n_embd=32, n_head=4, n_kv_head=2, head_dim=8, sequence_len=160, vocab_size=50, window_pattern="SL"
)
PROMPT = [3, 14, 15, 9, 2, 6]


@pytest.fixture(scope="module")
def model():
    return make_gpt(CONFIG)


def make_gpt(config):
    model = GPT(config, compute_dtype=torch.float32)
    model.init_weights(seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape, generator=generator)
    return model


def run(model, prompt=PROMPT, **options):
    defaults = {"num_samples": 1, "max_new_tokens": 8, "temperature": 0.0, "top_k": None, "seed": 0, "stop_token": None}
    return list(generate(model, prompt, **{**defaults, **options}))


def greedy_without_cache(model, prompt, num_tokens):
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(model.logits(torch.tensor([tokens]))[0, -1].argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1], PROMPT * 25])  # the last fills more than a short window
def test_greedy_tokens_are_those_found_without_a_cache(model, prompt):
    assert [step[0] for step in run(model, prompt)] == greedy_without_cache(model, prompt, 8)


def test_cached_logits_equal_uncached_ones_across_the_short_window(model):
    tokens = torch.randint(50, (150,), generator=torch.Generator().manual_seed(5)).tolist()
    logits, cache = prefill(model, tokens[:120], 1)
    with torch.no_grad():
        exact = model.logits(torch.tensor([tokens]))[0]
    for i, token in enumerate(tokens[120:]):  # the short window is 128
        torch.testing.assert_close(logits[0], exact[119 + i], rtol=1e-4, atol=1e-4)
        logits = decode(model, [token], cache)


def test_samples_of_one_prompt_differ(model):
    steps = run(model, num_samples=3, temperature=1.0)
    samples = list(zip(*steps, strict=True))
    assert len(set(samples)) == 3
    for sample in samples:  # each goes on from its own tokens, not from another's
        logits, cache = prefill(model, PROMPT, 1)
        for token in sample:
            logits = decode(model, [token], cache)
        with torch.no_grad():
            exact = model.logits(torch.tensor([[*PROMPT, *sample]]))[:, -1]
        torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-4)


def test_a_seed_gives_the_same_tokens_and_another_gives_others(model):
    assert run(model, temperature=1.0, seed=1) == run(model, temperature=1.0, seed=1)
    assert run(model, temperature=1.0, seed=1) != run(model, temperature=1.0, seed=2)


def test_top_1_and_a_tiny_temperature_are_greedy(model):
    assert run(model, temperature=1.0, top_k=1) == run(model)
    assert run(model, temperature=1e-30) == run(model)


def test_top_k_draws_from_the_k_likeliest_alone(model):
    likeliest = set(model.logits(torch.tensor([PROMPT]))[0, -1].topk(5).indices.tolist())
    first = run(model, num_samples=200, max_new_tokens=1, temperature=5.0, top_k=5)[0]
    assert set(first) == likeliest


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.8])
def test_top_p_draws_from_the_likeliest_that_have_this_share_of_the_probability(model, top_p):
    shares = model.logits(torch.tensor([PROMPT]))[0, -1].softmax(-1)
    nucleus, total = set(), 0.0
    for token in shares.argsort(descending=True).tolist():
        nucleus.add(token)
        total += shares[token].item()
        if total > top_p:
            break
    first = run(model, num_samples=2000, max_new_tokens=1, temperature=1.0, top_p=top_p)[0]
    assert set(first) == nucleus
    assert run(model, temperature=1.0, top_p=1.0) == run(model, temperature=1.0)


def test_a_sample_ends_at_the_stop_token_and_the_others_go_on(model):
    free = run(model, num_samples=2, temperature=1.0, max_new_tokens=6)
    stop = free[2][0]
    stopped = run(model, num_samples=2, temperature=1.0, max_new_tokens=6, stop_token=stop)
    assert [step[0] for step in stopped[:2]] == [step[0] for step in free[:2]]
    assert [step[0] for step in stopped[2:]] == [None] * len(stopped[2:])
    assert stop not in [token for step in stopped for token in step]


def test_generation_ends_when_all_samples_have(model):
    assert run(model, stop_token=run(model)[0][0]) == []


def test_no_new_tokens_are_none(model):
    assert run(model, max_new_tokens=0) == []


def test_generation_goes_on_past_sequence_len_and_sees_no_further_back_than_trained():
    """One layer: what lies further back than its window cannot matter."""
    model = make_gpt(replace(CONFIG, n_layer=1, sequence_len=16))
    tokens = torch.randint(50, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    logits, cache = prefill(model, tokens[:10], 1)
    for token in tokens[10:]:
        logits = decode(model, [token], cache)
    assert cache.k[0].shape[2] == 16
    late, _ = prefill(model, tokens[-16:], 1)  # the first of these smears in nothing, and is the last to be seen
    others, _ = prefill(model, tokens[-12:], 1)
    assert (logits - late).abs().max() < (logits - others).abs().max()
    assert len(run(model, max_new_tokens=50)) == 50


def test_a_prompt_longer_than_sequence_len_keeps_its_end(model):
    assert run(model, [1] * 7 + PROMPT * 30) == run(model, (PROMPT * 30)[-160:])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt has no tokens"),
        ([50], "token 50 of the prompt is outside the model's vocabulary of 50"),
        ([-1], "token -1 of the prompt is outside the model's vocabulary of 50"),
    ],
)
def test_a_prompt_that_the_model_cannot_read_is_named(model, prompt, message):
    with pytest.raises(PacelineError) as error:
        run(model, prompt)
    assert error.value.message == message
