"""The rows of the optimizers: each is complete, and the settings of a run follow from it."""

import ast
from pathlib import Path

import pytest
from setups import gpt

import paceline
from paceline.config import KEYS, RATES_OF_DEPTH, Config, format_flags
from paceline.config_file import find_config, load_config
from paceline.plan.algorithms import (
    ALGORITHMS,
    OTHERS,
    SMALL_BATCH_RATES,
    Algorithm,
    algorithm_of,
    group_settings,
    rate_notes,
)
from paceline.plan.shapes import MATRIX, REFERENCE_BATCH, param_shapes
from paceline.plan.speeds import RATES
from paceline.plan.states import stored_states
from paceline.plan.step_time import LIMITS

UPDATES = Path(paceline.__file__).parent / "train" / "updates.py"
MODEL = gpt(12)  # the reference
BASE = {
    "total_batch_size": REFERENCE_BATCH,
    "num_steps": 1000,
    "tokens_per_param": 12.0,
    "matrix_lr": None,
    "embedding_lr": 0.3,
    "unembedding_lr": 0.008,
    "weight_decay": 0.28,
}
rows = pytest.mark.parametrize("row", ALGORITHMS.values(), ids=ALGORITHMS)


def test_every_optimizer_of_the_config_has_its_row():
    assert set(KEYS["optimizer"].choices) == set(ALGORITHMS)


@rows
def test_a_row_names_an_update_function(row: Algorithm):
    functions = {node.name for node in ast.parse(UPDATES.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert row.update in functions


@rows
def test_a_row_has_rates_a_limit_and_a_cost(row: Algorithm):
    assert set(row.rates) <= set(RATES)
    assert row.title in LIMITS["compute" if row.whole else "memory bandwidth"]
    assert (row.flops((64, 256)) > 0, row.peak_share > 0, row.moved_bytes > 0) == (row.whole, row.whole, not row.whole)


def test_states_of_a_matrix_are_counted_by_their_shapes():
    muon, adamw = ALGORITHMS["muon"], ALGORITHMS["adamw"]
    assert {name: shape((8, 3)) for name, shape in muon.states.items()} == {
        "momentum_buffer": (8, 3),
        "second_momentum_buffer": (8, 1),
    }
    sizes = [
        sum(state.num_bytes for state in stored_states(row, shape, rows=shape[0]))
        for row, shape in ((muon, (8, 3)), (muon, (3, 8)), (adamw, (8, 3)))
    ]
    assert sizes == [4 * 32, 4 * 32, 4 * 48]


@pytest.mark.parametrize(
    "shape, name", [((64, 64), "muon"), ((128, 64), "muon"), ((192, 64), "muon_long"), ((64, 256), "muon_long")]
)
def test_a_matrix_takes_the_rate_that_was_measured_on_its_form(shape, name):
    assert ALGORITHMS["muon"].rate_name(shape) == name


@pytest.mark.parametrize("optimizer", ALGORITHMS)
def test_the_optimizer_updates_the_matrices_and_adamw_all_else(optimizer):
    settings = group_settings(MODEL, optimizer=optimizer, **BASE)
    assert set(settings) == {param.group for param in param_shapes(MODEL)}
    for group, setting in settings.items():
        assert setting.algorithm == algorithm_of(optimizer, group).name == (optimizer if group == MATRIX else OTHERS)


@rows
def test_at_the_reference_a_matrix_gets_the_rates_of_its_row(row: Algorithm):
    matrix = group_settings(MODEL, optimizer=row.name, **BASE)[MATRIX]
    assert (matrix.lr, matrix.betas) == (row.matrix_lr, row.matrix_betas)
    assert group_settings(MODEL, optimizer=row.name, **{**BASE, "matrix_lr": 0.5})[MATRIX].lr == 0.5


def test_a_small_batch_lowers_every_learning_rate_and_a_large_one_leaves_the_smear_s():
    at, small, large = (
        group_settings(MODEL, optimizer="muon", **{**BASE, "total_batch_size": tokens})
        for tokens in (REFERENCE_BATCH, REFERENCE_BATCH // 16, 4 * REFERENCE_BATCH)
    )
    for group in at:
        assert small[group].lr == pytest.approx(at[group].lr / 4)
        assert large[group].lr == pytest.approx(at[group].lr * (1 if group == "smear" else 2))


@rows
def test_only_some_learning_rates_fall_with_the_width(row: Algorithm):
    wide = group_settings(gpt(48), optimizer=row.name, **BASE)[MATRIX]
    assert wide.lr == pytest.approx(row.matrix_lr / (2 if row.lr_falls_with_width else 1))


@pytest.mark.parametrize("num_steps", [1, 3, 9, 30, 1000])
def test_a_step_never_takes_more_than_half_of_a_weight(num_steps):
    of_run = {**BASE, "num_steps": num_steps, "total_batch_size": 12_288}
    matrix = group_settings(MODEL, optimizer="muon", **of_run)[MATRIX]
    longer = group_settings(MODEL, optimizer="muon", **{**of_run, "num_steps": 100_000})[MATRIX]
    by_length = longer.weight_decay * 100_000 / num_steps
    assert matrix.weight_decay * matrix.lr <= 0.5 + 1e-9
    assert matrix.weight_decay == pytest.approx(min(by_length, 0.5 / matrix.lr))


def test_rates_of_large_batches_are_noted_for_few_steps_of_small_ones():
    few = {"total_batch_size": 2048, "num_steps": 80}
    [note] = rate_notes(Config(), **few)
    assert "2,048" in note and format_flags(SMALL_BATCH_RATES) in note
    tiny, _ = load_config(find_config("tiny"), {})
    assert {key: getattr(tiny, key) for key in RATES_OF_DEPTH} == SMALL_BATCH_RATES
    for config, sizes in (
        (Config(matrix_lr=0.1), few),
        (Config(optimizer="adamw"), few),
        (Config(), {**few, "num_steps": 5000}),
        (Config(), {**few, "total_batch_size": 2**19}),
    ):
        assert rate_notes(config, **sizes) == []
