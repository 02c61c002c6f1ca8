"""The progress lines of the usual trainers: healthy ones, and those with NaN in losses or gradients."""

import tomllib
from pathlib import Path

import pytest
from log_samples import read

from paceline.explain.run_folder import explain

TABLE = Path(__file__).parent / "trainers.toml"
TRAINERS = tomllib.loads(TABLE.read_text(encoding="utf-8"))["trainer"]
by_name = pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer["name"])


def progress_lines(trainer, steps, values):
    loss, norm = trainer[values]
    return "".join(trainer["line"].format(n=n, loss=loss, norm=norm) + "\n" for n in steps)


def explained(*texts):
    return explain(["".join(texts).encode()])


@by_name
def test_steps_with_finite_values_are_healthy(trainer):
    explanation = explained(progress_lines(trainer, range(1, 8), "finite"))
    assert (explanation.cause, explanation.progress.steps) == ("healthy", 7)


@by_name
def test_nan_to_the_end_is_a_failure_from_its_first_line(trainer):
    explanation = explained(
        progress_lines(trainer, range(1, 4), "finite"), progress_lines(trainer, range(4, 9), "broken")
    )
    assert (explanation.cause, explanation.line) == ("loss-nan", 4)
    assert explanation.step in (4, None)  # some print an epoch, but no step


@by_name
def test_values_that_become_finite_again_are_healthy(trainer):
    explanation = explained(
        progress_lines(trainer, range(1, 4), "broken"), progress_lines(trainer, range(4, 9), "finite")
    )
    assert explanation.cause == "healthy"


def test_two_steps_that_a_loss_scaler_skips_at_the_end_are_no_failure():
    lines = [f"{{'loss': 2.31, 'grad_norm': {norm}, 'epoch': 0.1}}\n" for norm in ("0.5", "0.4", "inf", "nan")]
    assert explained(*lines).cause == "healthy"
    assert explained(*lines, lines[-1]).cause == "loss-nan"


def test_a_gradient_norm_of_nan_is_no_failure_of_grpo_while_rewards_and_kl_are_finite():
    line = "{{'loss': -0.0, 'grad_norm': nan, 'reward': 1.2, 'kl': {kl}, 'epoch': 0.1}}\n"
    assert explained(line.format(kl=0.1) * 5).cause == "healthy"
    assert explained(line.format(kl="nan") * 5).cause == "loss-nan"


def test_a_loss_of_validation_does_not_hide_that_of_training():
    progress = read("step 5: val_loss: 2.0 train_loss: nan\nstep 6: best_val_loss: inf train_loss: 2.5\n").progress
    assert (progress.last_loss, progress.nan_line) == (2.5, None)


@pytest.mark.parametrize("value", ["NaN", "nan.0", "'nan'", "tensor(nan, device='cuda:0')", "np.float32(nan)", "inf"])
def test_a_loss_that_is_not_finite_is_read_in_any_spelling(value):
    progress = read(f"step 4 loss: 2.0\nstep 5 loss: {value}\n").progress
    assert (progress.nan_line, progress.nan_step, progress.nan_measure) == (2, 5, "loss")
