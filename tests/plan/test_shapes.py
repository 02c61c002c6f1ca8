"""Names, shapes and groups of the parameters; the length that a time allows, and what of it evaluations take."""

import pytest

from paceline.config import Config, ModelConfig
from paceline.plan.shapes import (
    EVAL_SHARE,
    MAX_EVAL_TOKENS,
    MIN_STEPS,
    choose_eval_tokens,
    has_value_embed,
    matmul_params,
    num_params,
    param_shapes,
    steps_of_time,
)


def model(**changes: int) -> ModelConfig:
    sizes = {
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "n_kv_head": 2,
        "head_dim": 16,
        "sequence_len": 32,
        "vocab_size": 100,
    }
    return ModelConfig(**{**sizes, **changes})


def test_every_parameter_of_a_small_model_is_listed_once_with_its_shape_and_group():
    listed = {shape.name: (shape.shape, shape.group) for shape in param_shapes(model(n_layer=1))}
    assert listed == {
        "wte.weight": ((128, 64), "wte"),
        "h.0.attn.c_q.weight": ((64, 64), "matrix"),
        "h.0.attn.c_k.weight": ((32, 64), "matrix"),
        "h.0.attn.c_v.weight": ((32, 64), "matrix"),
        "h.0.attn.c_proj.weight": ((64, 64), "matrix"),
        "h.0.attn.ve_gate.weight": ((2, 12), "matrix"),
        "h.0.mlp.c_fc.weight": ((256, 64), "matrix"),
        "h.0.mlp.c_proj.weight": ((64, 256), "matrix"),
        "value_embeds.0.weight": ((128, 32), "value_embeds"),
        "lm_head.weight": ((128, 64), "lm_head"),
        "resid_lambdas": ((1,), "resid_lambdas"),
        "x0_lambdas": ((1,), "x0_lambdas"),
        "smear_gate.weight": ((1, 24), "smear"),
        "smear_lambda": ((1,), "smear"),
        "backout_lambda": ((1,), "smear"),
    }


@pytest.mark.parametrize(("n_layer", "layers"), [(1, [0]), (2, [1]), (5, [0, 2, 4]), (12, [1, 3, 5, 7, 9, 11])])
def test_every_second_layer_has_a_value_embedding_and_the_last_one_always(n_layer, layers):
    assert [layer for layer in range(n_layer) if has_value_embed(layer, n_layer)] == layers


def test_gates_are_no_wider_than_the_model():
    shapes = {shape.name: shape.shape for shape in param_shapes(model(n_embd=8, n_head=1, n_kv_head=1, head_dim=8))}
    assert (shapes["h.1.attn.ve_gate.weight"], shapes["smear_gate.weight"]) == ((1, 8), (1, 8))


def test_counts_are_those_of_nanochat_at_depth_12():
    """286M parameters, 110M of them in matrix products: 12 matrices of 768 x 768 a layer, 6 gates of 6 x 12, lm_head."""
    d12 = ModelConfig(n_layer=12, n_embd=768, n_head=6, n_kv_head=6, head_dim=128, sequence_len=2048, vocab_size=32_768)
    assert (num_params(d12), matmul_params(d12)) == (286_261_730, 12 * 12 * 768 * 768 + 6 * 6 * 12 + 32_768 * 768)


def test_a_tenth_of_the_time_is_left_to_evaluations():
    assert steps_of_time(120, step_s=0.5) == 216


def test_a_run_of_a_given_time_takes_at_least_sixty_steps():
    assert steps_of_time(120, step_s=9.0) == steps_of_time(-5, step_s=0.1) == MIN_STEPS == 60


@pytest.mark.parametrize(("eval_every", "num_steps"), [(0, 200), (1000, 200), (50, 200)])
def test_evaluations_of_a_given_size_take_what_they_take(eval_every, num_steps):
    evaluations = 1 + -(-num_steps // eval_every) if eval_every else 1
    time_s = num_steps * 0.5 + evaluations * 10.0
    assert steps_of_time(time_s, step_s=0.5, eval_s=10.0, eval_every=eval_every) == num_steps


@pytest.mark.parametrize("eval_every", [0, 10, 100, 250])
@pytest.mark.parametrize("num_steps", [60, 300, 5000])
def test_all_evaluations_take_at_most_a_tenth_of_the_run(num_steps, eval_every):
    config = Config(eval_every=eval_every)
    tokens = choose_eval_tokens(config, num_steps=num_steps, total_batch_size=1000, cost=0.5)
    num_evals = 1 + -(-num_steps // eval_every) if eval_every else 1
    evaluating, training = num_evals * tokens * 0.5, num_steps * 1000
    assert evaluating / (evaluating + training) <= EVAL_SHARE


def test_an_evaluation_has_at_least_the_tokens_of_half_a_step_and_at_most_a_million():
    assert choose_eval_tokens(Config(), num_steps=2, total_batch_size=1000) == 512
    assert choose_eval_tokens(Config(), num_steps=10**6, total_batch_size=1 << 19) == MAX_EVAL_TOKENS == 1 << 20


def test_runs_of_about_the_same_length_score_the_same_text():
    config = Config(eval_every=20)
    assert {choose_eval_tokens(config, num_steps=steps, total_batch_size=1024) for steps in (20, 60, 80)} == {2048}


def test_tokens_that_the_user_has_set_are_not_changed():
    assert choose_eval_tokens(Config(eval_tokens=7), num_steps=2, total_batch_size=1000) == 7
