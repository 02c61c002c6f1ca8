"""The progress lines of the usual trainers: healthy ones, and those with NaN in losses or gradients."""

import math
import random
import tomllib
from pathlib import Path

import pytest
from log_samples import read
from rows import with_rows

from paceline.explain.line_measures import StepLoss
from paceline.explain.line_rows import read_columns, read_row
from paceline.explain.run_folder import explain

TABLE = Path(__file__).parent / "trainers.toml"
TABLES = tomllib.loads(TABLE.read_text(encoding="utf-8"))
by_name = with_rows("trainer", TABLES["trainer"])
by_report = with_rows("report", TABLES["report"])
NUM_REPORTS = 20


def progress_lines(trainer, steps, values):
    loss, norm = trainer[values]
    losses = {n: loss.replace("2.31", f"2.{31 - n}") for n in steps}  # a finite one falls
    return "".join(trainer["line"].format(n=n, loss=losses[n], norm=norm) + "\n" for n in steps)


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


def test_a_log_that_stops_at_a_gradient_norm_of_nan_is_no_healthy_one():
    lines = [f"{{'loss': 2.31, 'grad_norm': {norm}, 'epoch': 0.1}}\n" for norm in ("6.1", "nan")]
    assert explained(*lines).cause == "loss-nan"
    assert explained(*lines, "{'train_runtime': 61.2, 'epoch': 0.1}\n").cause == "healthy"


def reports(report, loss_at, val_at=None):
    """The log of a training: loss_at and val_at give the losses of training and validation at a report."""
    chance = random.Random(1)
    log = report.get("header", "")
    for n in range(1, NUM_REPORTS + 1):
        loss, val = (f"{at(n) + chance.gauss(0, 0.0005):.4f}" for at in (loss_at, val_at or loss_at))
        log += report["text"].format(n=n, loss=loss, val=val, score=0.6 + 0.02 * (n % 3))
    return log


def falling_loss(n):
    return 0.5 + 2.5 * math.exp(-n / 5)


@by_report
def test_a_loss_that_falls_is_healthy_whatever_its_name(report):
    assert explained(reports(report, falling_loss)).cause == "healthy"


@by_report
def test_a_loss_of_nan_to_the_end_is_a_failure_whatever_its_name(report):
    assert explained(reports(report, lambda n: falling_loss(n) if n < 9 else math.nan)).cause == "loss-nan"


@by_report
def test_a_loss_that_multiplies_diverges_whatever_its_name(report):
    assert explained(reports(report, lambda n: falling_loss(n) * 3 ** min(max(0, n - 8), 7))).cause == "loss-diverged"


@by_report
def test_a_loss_that_never_moves_stands_still_whatever_its_name(report):
    assert explained(reports(report, lambda n: 2.3026)).cause == "loss-stands-still"


@pytest.mark.parametrize(("steps", "cause"), [(40, "healthy"), (60, "loss-stands-still")])
def test_the_loss_that_lightning_s_bar_repeats_until_it_logs_the_next_does_not_stand_still(steps, cause):
    bar = "Epoch 0:   1%|          | {0}/9000 [00:{0:02d}<22:10:01,  0.13it/s, v_num=tc97, train_loss=0.817]\n"
    assert explained("".join(map(bar.format, range(1, steps)))).cause == cause
    assert explained("".join(map(bar.format, range(10, 10 * steps, 10)))).cause == "loss-stands-still"
    epochs = (f"Epoch {n}: 100%|███| 40/40 [00:09<00:00, 4.1it/s, v_num=3, train_loss=2.303]\n" for n in range(steps))
    assert explained("".join(epochs)).cause == "loss-stands-still"


@with_rows("report", [item for item in TABLES["report"] if "{val}" in item["text"]])
def test_a_validation_loss_that_turns_up_is_overfitting_whatever_its_name(report):
    log = reports(report, lambda n: 3 * math.exp(-n / 4), lambda n: 0.9 + 2.5 * math.exp(-n / 2) + 0.12 * max(0, n - 5))
    assert explained(log).cause == "validation-turns-up"


def test_a_measure_of_any_name_that_becomes_nan_for_good_is_a_failure():
    line = "step {n}: loss 0.{n} - entropy {entropy} - step time nan ms - accuracy nan\n"
    finite = [line.format(n=n, entropy=0.3) for n in range(10, 14)]
    lost = [line.format(n=n, entropy="nan") for n in range(14, 18)]
    explanation = explained(*finite, *lost)
    assert (explanation.cause, explanation.step) == ("loss-nan", 14)
    assert "entropy" in explanation.evidence[0].text
    assert explained(*finite, *lost[:2]).cause == "healthy"
    assert explained(*finite, *lost, *finite).cause == "healthy"
    assert explained(*lost).cause == "healthy"


REWARD_LINES = (
    "{{'loss': 0.0, 'grad_norm': 0.0, 'reward': {reward}, 'reward_std': 0.0, 'kl': 0.001, 'epoch': 0.{n}}}\n",
    "step:{n} - critic/rewards/mean:{reward} - actor/pg_loss:0.0 - critic/score/max:0.0\n",
    "{n}\t0.000000\t{reward}\t0.000000\t192.000000\n",
)


@pytest.mark.parametrize("line", REWARD_LINES)
def test_a_policy_whose_every_reward_is_zero_learns_nothing(line):
    header = "Step\tTraining Loss\treward\treward_std\tcompletion_length\n"
    zeros = [line.format(n=n, reward="0.000000") for n in range(1, 13)]
    explanation = explained(header, *zeros)
    assert explanation.cause == "loss-stands-still"
    assert "reward" in explanation.summary and "reward function" in explanation.fix
    assert explained(header, *zeros[:5]).cause != "loss-stands-still"
    assert explained(header, *zeros, line.format(n=13, reward="0.125000")).cause != "loss-stands-still"


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


def test_a_perplexity_may_have_commas_between_its_thousands():
    step = "[step={}/400]\n    train/CrossEntropyLoss={:.3f}\n    train/Perplexity={:,.4g}\n"
    losses = [9.1 * 0.97**n for n in range(60)]
    assert explained("".join(step.format(n, loss, math.exp(loss)) for n, loss in enumerate(losses))).cause == "healthy"


def test_losses_in_a_tuple_as_python_2_prints_it_are_read():
    row = "('Epoch ', {}, ' Training Accuracy: ', 0.5, ' Training Loss: ', {}, ' Validation Loss: ', {})\n"
    assert explained("".join(row.format(n, "nan", "nan") for n in range(9))).cause == "loss-nan"
    assert explained("".join(row.format(n, 2 - n / 9, 2 - n / 10) for n in range(9))).cause == "healthy"


def test_a_loss_that_is_nan_in_evaluations_alone_has_a_fix_for_the_evaluation():
    lines = "".join(f"Epoch {n}/9  train_loss: {{}}  val_loss: nan\n" for n in range(1, 9))
    explanation = explained(lines.replace("{}", "0.2"))
    assert (explanation.cause, "only the loss of the evaluation" in explanation.summary) == ("loss-nan", True)
    assert "the code of the evaluation" in explanation.fix
    assert "learning rate" in explained(lines.replace("{}", "nan")).fix
    evaluation = "{'eval_loss': nan, 'eval_runtime': 2.0, 'epoch': 1}\n"
    for training, part in (("1.7, 'grad_norm': 1.2", True), ("0.0, 'grad_norm': nan", False), ("0.0", False)):
        text = f"{{'loss': {training}, 'epoch': 1}}\n{evaluation}" * 6
        assert ("only the loss of the evaluation" in explained(text).summary) == part
    assert "only the loss" not in explained(evaluation * 6).summary
    assert "only the loss" not in explained("step 10 loss 2.0\nstep 20 loss 1.9\n" + "val_loss nan\n" * 6).summary


@pytest.mark.parametrize(("first", "is_of_inputs"), [("nan", True), ("2.1", False)])
def test_losses_that_are_nan_from_the_first_one_on_are_sought_in_the_inputs(first, is_of_inputs):
    fix = explained(f"step 1 loss {first}\nstep 2 loss nan\nstep 3 loss nan\n").fix
    assert fix.startswith("look at the inputs") == is_of_inputs


def test_what_samples_from_a_training_that_diverged_has_the_fix_of_the_training():
    error = "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0\n"
    assert "generation" in explained("step 1 loss 2.1\nstep 2 loss 2.0\n", error).fix
    assert "learning rate" in explained("step 1 loss 2.1\nstep 2 loss nan\nstep 3 loss nan\n", error).fix


YOLO = "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
YOLO_ROW = "       {n}/30      4.41G     {a}     {b}     1.291         13        640: 100% ━━━━ 90/90 6.5it/s 14.2s\n"
NOTEBOOK = "Step\tTraining Loss\tValidation Loss\n"
CARD = "| Training Loss | Epoch | Step | Validation Loss |\n|:---:|:---:|:---:|:---:|\n"


@pytest.mark.parametrize(
    ("header", "row", "first"),
    [
        (YOLO, YOLO_ROW.replace("{b}", "0.981"), 5),
        (YOLO, YOLO_ROW.replace("{a}", "0.981").replace("{b}", "{a}"), 5),
        (NOTEBOOK, "{n}\t{a}\t1.9\n", 5),
        (CARD, "| {a} | 1.0 | {n} | 1.9 |\n", 6),
    ],
)
def test_a_column_of_losses_that_stays_nan_is_a_failure(header, row, first):
    rows = [
        "".join(row.format(n=n, a=value) for n in steps) for steps, value in ((range(1, 4), 1.21), (range(4, 9), "nan"))
    ]
    explanation = explained(header, *rows)
    assert (explanation.cause, explanation.line, explanation.step) == ("loss-nan", first, 4)
    assert explained(header, *reversed(rows)).cause == "healthy"


BOOSTING = {
    "XGBoost": "[{n}]\ttrain-rmse:{a:.5f}\teval-rmse:{b:.5f}\n",
    "LightGBM": "[{n}]\ttraining's l2: {a:g}\tvalid_0's l2: {b:g}\n",
    "build-nanogpt": "{n} train {a:.6f}\n{n} val {b:.4f}\n",
    "fastai": "{n}         {a:.6f}    {b:.6f}    0.512000  00:01     \n",
    "skorch": "     {n}        \x1b[36m{a:.4f}\x1b[0m       0.5000        \x1b[35m{b:.4f}\x1b[0m  0.0841\n",
}
HEADERS = {
    "fastai": "epoch     train_loss  valid_loss  _rmse     time    \n",
    "skorch": "  epoch    train_loss    valid_acc    valid_loss     dur\n-------  ------------  -----------  ------\n",
}


@with_rows("trainer", BOOSTING)
def test_rows_without_a_word_for_the_step_are_curves(trainer):
    header, row = HEADERS.get(trainer, ""), BOOSTING[trainer]
    steps = range(0, 300, 5)

    def rows(train, held_out):
        return header + "".join(row.format(n=n, a=train(n / 300), b=held_out(n / 300)) for n in steps)

    healthy = explained(rows(lambda at: 2 - at, lambda at: 2.1 - at))
    assert (healthy.cause, healthy.progress.last_step) == ("healthy", 295)
    assert explained(rows(lambda at: 2 - 1.9 * at, lambda at: 1.5 + 3 * (at - 0.2) ** 2)).cause == "validation-turns-up"
    assert explained(rows(lambda at: 10 ** (8 * at), lambda at: 10 ** (8 * at))).cause == "loss-diverged"
    half = explained(rows(*[lambda at: 2 - at if at < 0.5 else math.nan] * 2))
    assert (half.cause, half.step) == ("loss-nan", 150)


@with_rows(
    ("row", "cause"),
    {
        "[{n}]\ttrain-map:{rise:.4f}\teval-map:{rise:.4f}\n": "healthy",  # a mean average precision
        "[{n}]\ttrain-error:0.00000\teval-error:0.00000\n": "healthy",
        "[{n}]\ttrain-error:0.03000\ttrain-logloss:{fall:.5f}\teval-error:0.03\teval-logloss:{fall:.5f}\n": "healthy",
        "{n} train {rise:.4f}\n{n} val {rise:.4f}\n": "healthy",  # accuracies
        "[{n}]\ttrain-rmse:{fall:.5f}\teval-rmse:nan\n": "loss-nan",
        "[{n}]\ttrain-rmse:0.61000\teval-rmse:0.62000\n": "loss-stands-still",
    }.items(),
)
def test_a_measure_of_boosting_that_rises_or_stays_is_judged_by_what_it_is(row, cause):
    steps = [row.format(n=n, rise=0.2 + 0.005 * n, fall=0.7 * 0.97**n) for n in range(100)]
    assert explained("".join(steps)).cause == cause


def test_counts_of_iterations_in_brackets_are_no_prefix_of_a_launcher():
    line = "[{n}]\tvalid's auc: 0.{n}\n"
    assert explained("".join(line.format(n=n) for n in range(10, 40))).progress.last_step == 39
    ranks = "".join(f"[{n % 2}] step {n} loss 2.{n}\n" for n in range(10, 40))
    assert explained(ranks, "[1] RuntimeError: CUDA error: out of memory\n").rank == 1


def test_a_loss_rises_less_where_that_of_evaluations_rises_too():
    def log(train, held_out):
        return "".join(
            f"{n} train {train(n):.4f}\n" + (f"{n} val {held_out(n):.4f}\n" if n % 5 == 0 else "") for n in range(300)
        )

    def falling(n):
        return 8 * 0.97**n + 3 + 0.01 * (n % 3)

    def rising(n):
        return falling(n) + (2.2 if n > 240 else 0)

    assert explained(log(rising, rising)).cause == "loss-diverged"
    assert explained(log(rising, falling)).cause == "healthy"


def test_a_validation_loss_alone_that_is_nan_in_a_table_is_no_failure():
    assert explained(NOTEBOOK, "".join(f"{n}\t{3 - n / 9}\tnan\n" for n in range(8))).cause == "healthy"


@pytest.mark.parametrize(
    "line", ["the loss of 3 runs  is below 2", "loss: 2.5  step: 4  lr: 1e-3", "loss", "return val_loss, val_acc"]
)
def test_text_about_a_loss_is_no_header_of_a_table(line):
    assert read_columns(line) == ()


def test_a_row_without_all_its_cells_or_without_numbers_is_no_row():
    columns = read_columns("Step  Training Loss  Validation Loss")
    assert read_row("10  2.5  nan", columns) == StepLoss(10, 2.5, name="Training Loss")
    assert read_row("10  2.5  2.6", columns) == StepLoss(10, 2.5, name="Training Loss", held_out=2.6)
    commas = read_columns("epoch,acc,loss,val_loss")
    assert read_row("3,0.61,1.48, 2.01", commas) == StepLoss(3, 1.48, held_out=2.01)
    for text in ("10  2.5", "10  no log  none", "all  2.5  2.4"):
        assert read_row(text, columns) is None


def test_the_bar_of_keras_evaluate_behind_the_training_is_an_evaluation():
    def bar(n, of, loss):
        return f"{n:>3}/{of} [{'=' * 20 if n == of else '=' * 10 + '>.........'}] - ETA: 3s - loss: {loss:.4f}\n"

    epochs = "".join(
        f"Epoch {n}/3\n" + "".join(bar(at, 60, 3 / (n + at / 60)) for at in range(1, 61)) for n in range(1, 4)
    )
    evaluation = "Epoch 3: early stopping\n" + "".join(bar(at, 40, 2.9) for at in range(1, 41))
    log = read(epochs + evaluation)
    assert (len(log.losses), log.losses[-1].name) == (181, "eval_loss")
    assert explained(epochs + evaluation).cause == "healthy"
    assert {point.name for point in read(epochs).losses} == {"loss"}
    alone = "".join(bar(at, 60, math.nan if at > 20 else 3 / at) for at in range(1, 61))  # `fit` of one epoch
    assert (explained(alone).cause, explained(epochs + alone).cause) == ("loss-nan", "loss-nan")


def test_losses_that_begin_again_at_the_first_step_as_high_as_at_first_are_another_training():
    def training(lowest):
        losses = ((n, lowest + (4.2 - lowest) / (1 + n / 20)) for n in range(0, 500, 25))
        return "".join(f"Step {n:5d} | Train loss: {loss:.4f}\n" for n, loss in losses)

    text = training(0.01) + training(1.9)
    assert (explained(text).cause, len(read(text).losses)) == ("healthy", 20)


@pytest.mark.parametrize(
    "line",
    ["{n} tensor({value}, grad_fn=<NegBackward0>)", "epoch {n}, tensor({value})", "({n}, tensor({value}), 0.001)"],
)
def test_nan_without_the_name_of_a_loss_before_it_is_a_failure(line):
    def printed(value_at):
        return "".join(line.format(n=n, value=value_at(n)) + "\n" for n in range(40)) + "done\n"

    assert explained(printed(lambda n: "nan" if n >= 12 else 1.5 - n / 20)).cause == "loss-nan"
    assert explained(printed(lambda n: f"{1.5 - n / 40:.4f}")).cause == "healthy"


def test_nan_in_a_few_lines_or_behind_a_name_is_no_loss():
    steps = "".join(f"step {n} of 40\n" for n in range(40))
    assert explained(steps, "class 1  nan\nclass 2  nan\n", "Training finished\n").cause == "healthy"
    assert explained(steps, "".join(f"step {n} of 45 iou=nan\n" for n in range(40, 46))).cause == "healthy"


def test_a_loss_scale_that_every_step_halves_is_an_overflow():
    steps = "".join(
        f"[step {n}] OVERFLOW! Skipping step. Attempted loss scale: {65536 / 2**n}, reducing to {32768 / 2**n}\n"
        for n in range(60)
    )
    assert explained(steps, "Finished training loop\n").cause == "fp16-overflow"
