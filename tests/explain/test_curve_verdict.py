"""The curves of healthy runs show no finding, whatever their noise; each fault is found within a stated number of points."""

import json
import math
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
from curve_shapes import NOISE_LEVELS, Noise, falling, healthy_run, series
from rows import with_rows

from paceline.explain.catalogue import load_catalogue
from paceline.explain.curve_verdict import add_findings, explain_curves, judge_curves
from paceline.explain.explanation import Explanation, format_explanation
from paceline.explain.line_measures import read_step_and_loss
from paceline.explain.line_rows import read_columns
from paceline.explain.log_curves import rise_since
from paceline.explain.reader import read_log
from paceline.explain.run_folder import explain
from paceline.explain.series import GRADIENT, LOSS, MEMORY, RATE, REWARD, SCORE, STEP_TIME, THROUGHPUT, VALIDATION

RUNS = 40  # of each noise level
SEEDS = 60
QUIET = NOISE_LEVELS[:4]  # up to 10 %
GIB = 2**30


@pytest.mark.parametrize("level", NOISE_LEVELS)
def test_healthy_runs_of_five_noise_levels_show_nothing(level):
    findings = [finding for seed in range(RUNS) for finding in judge_curves(healthy_run(seed, level))]
    assert [(finding.cause, finding.series.name, finding.at) for finding in findings] == []


@pytest.mark.parametrize("level", QUIET)
def test_short_curves_of_healthy_runs_show_nothing(level):
    curves = [falling(Noise(seed, level), 7 + seed % 13, scale=1 + seed % 40) for seed in range(1000)]
    assert [finding for curve in curves for finding in judge_curves([series(LOSS, curve)])] == []


FALLS = [4.3, 2.6, 2.1, 1.8, 1.62, 1.54]
JUMPS = [2.0, 1.9, 1.82, 1.76, 1.71, 1.67]
LEAPS = [0.1, 0.04, *[0.02] * 10, 0.9, 0.7, 0.8, 0.6, 0.9]
MANY_RUNS = [*[0.02] * 20, *(3e6 * 0.9**n for n in range(72))]
VANISHED = [2.1, 1.5, 0.9, 0.5, 0.3, 0.2, 0.12, 0.08, 0.06, *[0.025] * 15, *[0.06, 0.07] * 10]
LEVEL, LONG = [2.6 * Noise(seed, 0.003).factor() for seed in range(200)], falling(Noise(1, 0.01), 400)
JUMPED, BELOW_ZERO = [1.7, 1.3, 2.0, 2.6, 2.3], [-0.1 * number for number in range(1, 31)]
RISING, GRADIENTS = [0.001 * number + 0.001 for number in range(200)], [1.0] * 30 + [0.0] * 70
OF_LOSSES = [  # the values of a loss, what they show, and from which point on
    ([1.5, 0.6, 0.4, 0.2, -1.2, -40.0, -2e3, -6e5, *[-5e8 - 1e7 * step for step in range(12)]], "loss-diverged", None),
    ([-14.0 * 1.25**step for step in range(70)], "loss-diverged", None),
    ([-3e4 - 100.0 * step for step in range(40)], None, None),  # a sum of log-likelihoods
    ([1.6, 1.4, 3.3, 6.4, 5.5, 4.9, 4.9, 4.6], "loss-diverged", 1),  # it left its level for twice its height
    ([1.6, 1.4, 3.3, 6.4, 5.5, 4.9, 4.9, 1.5], None, None),
    ([*LONG[:150], *(2.6 + 6 * 0.9**number for number in range(20))], None, None),  # a spike came down by half
    ([1.2, 1.25, 1.2, *(8 * Noise(seed, 0.01).factor() for seed in range(60))], "loss-diverged", 0),
    (RISING, "loss-diverged", None),
    ([2.3 * (1 + 0.22 * chance) for chance in map(random.Random(190).gauss, [0] * 50, [1] * 50)], None, None),
    ([0.03] * 10 + LEAPS, "loss-diverged", 22),  # to several times any value before, in five points
    ([*LEAPS, 0.02], None, None),
    (MANY_RUNS, None, None),
    ([*MANY_RUNS[:20], *[3e6, 2e6] * 30], "loss-diverged", None),
    ([1.6, 11.8, 11.6, 10.38, *[10.37] * 6], "loss-diverged", 0),  # it never changes again
    ([1.6, 11.8, 11.6, 10.38, 9.3, 8.1, 7.2, 6.8], None, None),
    (VANISHED, None, None),  # it may double
    ([8 * loss for loss in VANISHED[3:]], "loss-diverged", None),
    (LEVEL, "loss-stands-still", 0),
    *(([*LONG[:50], ending], "loss-nan", 50) for ending in (math.nan, math.inf)),
    *(([*LONG[:50], ending, 2.9], None, None) for ending in (math.nan, math.inf)),
]
OF_SEVERAL = [
    # fp16 overflows now and then, but not five times in a row
    ([series(GRADIENT, [math.inf] * 4 + [1.0] * 50 + [math.inf] * 4)], None, None),
    ([series(GRADIENT, [1.0] * 50 + [math.nan] * 5)], "loss-nan", 50),
    # a loss that has come down to 0 needs no gradients; one that is 0 at once may be NaN
    ([series(LOSS, [max(0.0, 3 - step / 10) for step in range(100)]), series(GRADIENT, GRADIENTS)], None, None),
    (
        [series(LOSS, [2 - step / 100 for step in range(30)] + [0.0] * 70), series(GRADIENT, GRADIENTS)],
        "loss-stands-still",
        None,
    ),
    ([series(LOSS, RISING), series(REWARD, [0.1] * 200)], None, None),  # of a policy
    # a rate that is printed as 0 while the loss falls, and one of two rates
    ([series(LOSS, LONG[:200]), series(RATE, [0.0] * 200)], None, None),
    ([series(LOSS, LONG), series(RATE, [0.0] * 400), series(RATE, [1e-3] * 400, name="lr/2")], None, None),
    ([replace(series(LOSS, LEVEL), steps=[*range(50_000, 50_200)])], None, None),  # the end of a long run
    ([series(VALIDATION, [*FALLS, *JUMPS])], None, None),
    ([series(VALIDATION, [*FALLS, *JUMPS[::-1]])], "validation-turns-up", None),
    # few evaluations, by their score
    ([series(VALIDATION, JUMPED), series(SCORE, [0.47, 0.59, 0.5, 0.49, 0.54])], "validation-turns-up", 1),
    ([series(VALIDATION, JUMPED), series(SCORE, [0.47, 0.59, 0.6, 0.61, 0.61])], None, None),
    ([series(LOSS, BELOW_ZERO, name="cross_attention_loss")], None, None),
    ([series(LOSS, BELOW_ZERO, name="cross_entropy_loss")], "loss-diverged", None),
]


@with_rows("curves, cause, at", [*(([series(LOSS, losses)], *found) for losses, *found in OF_LOSSES), *OF_SEVERAL])
def test_what_the_curves_of_metrics_show(curves, cause, at):
    findings = judge_curves(curves)
    assert [finding.cause for finding in findings] == ([cause] if cause else [])
    assert at is None or findings[0].at == at


def jump(noise, before, after, *, factor):
    values = falling(noise, before + after)
    return [series(LOSS, values[:before] + [factor * value for value in values[before:]])]


def ramp(noise, before, after):
    values = enumerate(falling(noise, before + after))
    return [series(LOSS, [value * (1 + 0.02 * max(0, number - before)) for number, value in values])]


def no_learning(noise, _, after):
    return [series(LOSS, [10.8 * noise.factor() for _ in range(after)])]


def no_rate(noise, before, after):
    loss = falling(noise, before) + [2.6 * noise.factor() for _ in range(after)]
    return [series(LOSS, loss), series(RATE, [1e-3] * before + [0.0] * after)]


def no_gradient(noise, before, after):
    loss = falling(noise, before) + [2.6 * noise.factor() for _ in range(after)]
    return [series(LOSS, loss), series(GRADIENT, [1.0] * before + [0.0] * after)]


def frozen(noise, before, after):
    return [series(LOSS, [*falling(noise, before), *[2.713] * after])]


def leak(noise, before, after):
    points = range(before + after)
    return [series(MEMORY, [20 * GIB * (1 + 0.005 * max(0, n - before)) * noise.factor(0.1) for n in points])]


def slower(noise, before, after, *, share):
    return [series(THROUGHPUT, [1e5 * (share if n >= before else 1) * noise.factor() for n in range(before + after)])]


def ever_slower(noise, before, after):
    return [series(STEP_TIME, [600 * (1 + 0.01 * max(0, n - before)) * noise.factor() for n in range(before + after)])]


def overfitting(noise, before, after):
    points = range(before + after)
    turn = [(3 + 3 * math.exp(-n / 3)) * (1 + 0.03 * max(0, n - before)) * noise.factor() for n in points]
    return [series(VALIDATION, turn)]


FAULTS = [  # what happens, the cause, healthy points before it, points by which it is found, up to which noise level
    pytest.param(
        make,
        cause,
        before,
        after,
        level,
        id=f"{name}, noise {level}",
        marks=[] if level == levels[-1] else pytest.mark.soak,
    )
    for name, make, cause, before, after, levels in (
        ("loss jumps by half", lambda *a: jump(*a, factor=1.5), "loss-diverged", 150, 15, QUIET),
        ("loss triples", lambda *a: jump(*a, factor=3), "loss-diverged", 150, 20, NOISE_LEVELS),
        ("loss rises by 2 % a point", ramp, "loss-diverged", 150, 40, QUIET),
        ("no learning", no_learning, "loss-stands-still", 0, 40, (0.001, 0.003)),
        ("no learning", no_learning, "loss-stands-still", 0, 400, (0.01,)),
        ("learning rate 0", no_rate, "loss-stands-still", 200, 30, NOISE_LEVELS),
        ("gradient 0", no_gradient, "loss-stands-still", 200, 30, NOISE_LEVELS),
        ("loss frozen", frozen, "loss-stands-still", 200, 20, NOISE_LEVELS),
        ("memory leaks late", leak, "memory-grows", 100, 60, NOISE_LEVELS),
        ("memory leaks from the start", leak, "memory-grows", 0, 100, NOISE_LEVELS),
        ("speed falls by 40 %", lambda *a: slower(*a, share=0.6), "throughput-decays", 100, 10, QUIET),
        ("speed falls by 80 %", lambda *a: slower(*a, share=0.2), "throughput-decays", 100, 20, NOISE_LEVELS),
        ("each step is 1 % longer", ever_slower, "throughput-decays", 100, 60, QUIET),
        ("validation turns up by 3 %", overfitting, "validation-turns-up", 10, 8, NOISE_LEVELS[:2]),
        ("validation turns up by 3 %", overfitting, "validation-turns-up", 10, 12, NOISE_LEVELS[:3]),
    )
    for level in levels
]


@pytest.mark.parametrize(("make", "cause", "before", "after", "level"), FAULTS)
def test_a_fault_is_found_and_placed_in_95_of_100_runs(make, cause, before, after, level):
    places = []
    for seed in range(SEEDS):
        findings = judge_curves(make(Noise(seed, level), before, after))
        places += [finding.at for finding in findings if finding.cause == cause]
    assert len(places) >= 0.95 * SEEDS
    near = sum(abs(place - before) <= 10 for place in places)
    assert near >= 0.9 * len(places)


def test_a_loss_that_rises_before_it_is_nan_shows_both():
    [loss] = jump(Noise(1, 0.01), 150, 30, factor=3)
    explanation = explain_curves([series(LOSS, loss.values + [math.nan] * 30)], [], names="x")
    assert [curve.cause for curve in explanation.curves] == ["loss-nan", "loss-diverged"]
    assert explanation.curves[1].step == 1510 and "and 8.08 at step 1800" in explanation.curves[1].summary


LINES = (  # a loss on the lines of a log, as trainers print it
    "step {step}/100000 | loss {loss:.4f} | lr 3.0e-4\n",
    "[2026-01-02 03:04:05] [rank1]: iter={step}, train_loss={loss:.3f}, grad_norm=0.71\n",
    "{{'loss': {loss:.4f}, 'grad_norm': 0.7, 'epoch': 0.1}}\n",
)


def log_of(points, line):
    return ["".join(line.format(step=step, loss=loss) for step, loss in points).encode()]


@pytest.mark.parametrize("level", NOISE_LEVELS)
def test_the_lines_of_healthy_runs_show_nothing(level):
    for seed in range(RUNS // 5):
        loss = healthy_run(seed, level)[0]
        points = list(zip(loss.steps, loss.values, strict=True))
        assert explain(log_of(points, LINES[seed % len(LINES)])).cause in ("healthy", "unknown")


STUCK = [2.3026 + 0.0004 * (n % 3) for n in range(60)]
SETTLED = [0.09, 0.095, 0.1, 0.08] + [0.1063 + 0.0001 * (n % 4) for n in range(150)]
CLIMBS = [3.3, 4.9, 5.4, 5.2] + [(5 + 0.06 * n) * Noise(n, 0.05).factor() for n in range(60)]
NOISY_END = LONG[:60] + [0.14] * 12 + [0.21 * Noise(n, 0.05).factor() for n in range(12)]
NEAR_LN_2 = [0.6958, 0.6938, 0.6935, *(0.6932 + 0.0001 * (n % 2) for n in range(13))]
STEEP = [110576.0, 9000.0, 800.0, 90.0, 30.0, *(27.5 + 0.001 * (n % 3) for n in range(60))]
HALVED = [0.545 / (n + 1) for n in range(40)]
FROZEN = [2.3041, 1.9077, 1.6012, 1.4203, 1.2011, 1.1034, 1.0023, *[0.8123] * 52]
POLICY = [0.1, 0.12, 0.08, 0.11, *(0.2 + 0.004 * n for n in range(30))]
EPOCH, ITERATION, OTHER = "Epoch {step}: Train Loss {loss:.4f}\n", "iter {step}: loss {loss:.4f}\n", "step {step}\n"
PERFECT = "Epoch: [{step}/50] Loss: {loss:.4f}, Top1 Acc: 100.000\n"
ACCURATE, SAVED = (
    "Epoch {step} | Loss: {loss:.4f} | Acc: 0.531\n",
    "Epoch {step} val loss: {loss:.6f}\nSaved a checkpoint\n",
)
SKIPPED = "Epoch {step}/50 | Train Loss: 0.{step}\nValidation Loss: {loss}\nskipped (keeping last val_loss=1.4113)\n"
VALIDATED = "Epoch {step}/50 | Train Loss: 0.5 | Val Loss: {loss}\n"
GREEDY = "Validation result (greedy) at epoch {step}, step {step}000: token_accuracy: 6.2, loss: {loss}, ppl: 22.9\n"
SAMPLED = "EPOCH[{step}/100] loss{loss:.3f}-|Sample:9.03|\n"
BESIDE = "step {step}\nloss {loss:.4f} policy_loss {loss:.4f} value_loss {loss:.4f}\n"
RISES = [2.0 - 0.01 * n for n in range(50)] + [2.0 * n - 99 for n in range(51, 99)]
FITTED = "Epoch {step}/50 | Train Loss: 2e-{step} | Val Loss: {loss}\n"
TRAINED = "Epoch {step}/50 | Train Loss: 0.7{step:02} | Val Loss: {loss}\n"  # it rises a little
UP = [0.62, 0.62, 0.62, *[0.71] * 10]
SPIKES = [
    10.4,
    28.2,
    1.1,
    1.2,
    1.1,
    1.0,
    1.0,
    1.9,
    1.4,
    1.1,
    13.3,
    1.3,
    1.2,
    126.0,
    2.4,
    116.0,
    1.1,
    1.0,
    4.7,
    146.0,
    8.4,
]
OF_LINES = [  # the form of a line, its losses, what they show
    *((line, [3.0, 2.9, 2.8, 2.7] * 10 + [9.0, 9.2, 8.9, 9.1] * 10, "loss-diverged") for line in LINES),
    *((line, [2.5, 2.4, 2.3, 2.2, 900.0, 5e4, 7e4, 8e4], "loss-diverged") for line in LINES),  # of few points
    *((line, [2e8, 6e8, 4e8, 3e8, 5e8, 4e8, 2e8, 6e8, 3e8], "loss-diverged") for line in LINES),  # from the start
    (LINES[0], [2.5, 2.4, 2.3, 2.2, 900.0, 5e4, 2.3, 2.2], "healthy"),  # a spike
    (LINES[0], [2.5, 2.4, 2.3, 2.2, 2.3, 2.2, 900.0, 800.0], "healthy"),  # two points
    (LINES[0], [5e8 / (1 + n) for n in range(12)], "healthy"),
    (LINES[0], [0.0001, 0.0001, 0.0001, 0.4, 0.5, 0.4, 0.3, 0.5], "healthy"),  # of a policy
    (LINES[0], [2.0 + 0.01 * n for n in range(60)], "healthy"),  # by a third
    # sums over the batches of each epoch, which grow in the second row; with dips
    (LINES[0], [batch * (3.0 - epoch / 4) for epoch in range(8) for batch in range(1, 31)], "healthy"),
    (LINES[0], [batch * 0.08 * 1.5**epoch for epoch in range(8) for batch in range(1, 31)], "loss-diverged"),
    (LINES[0], [1.2**step * (0.5 if step % 9 == 0 else 1) for step in range(80)], "loss-diverged"),
    # losses that are not judged
    *(
        (LINES[0].replace(*words), [1.0] * 40 + [9.0] * 40, "healthy")
        for words in (("loss {", "policy_loss {"), ("lr", "reward 0.3 | lr"))
    ),
    (LINES[0], STUCK, "loss-stands-still"),
    (LINES[1], [0.693] * 40, "loss-stands-still"),
    (LINES[0].replace("{step}", "1000{step:02}"), STUCK, "healthy"),  # a part of a long run
    (LINES[0], LONG[:60] + [0.05] * 30, "healthy"),  # converged
    # it settles above its first points, or below
    (EPOCH, SETTLED, "loss-stands-still"),
    (EPOCH, [-loss for loss in SETTLED], "healthy"),
    (LINES[0], [0.0, 0.0, 0.0], "loss-stands-still"),
    (LINES[0], [0.0, 0.0], "healthy"),
    (LINES[0], [0.0, 0.4, 0.3], "healthy"),
    # far above the first points, and a noisy later part
    (LINES[0], CLIMBS, "loss-diverged"),
    (LINES[0], NOISY_END, "healthy"),
    # it hardly moves over a few reports; with one digit it may have halved
    (SAVED, [12.2471, 12.2451, 12.2431, 12.2415, 12.2395], "unknown"),
    (SAVED, [0.0001] * 5, "healthy"),
    (SAVED, [1.71, 1.702, 1.698, 1.697, 1.697], "healthy"),
    (EPOCH, NEAR_LN_2[:11], "unknown"),
    (EPOCH, NEAR_LN_2, "loss-stands-still"),
    (EPOCH, [0.75, 0.72, *NEAR_LN_2], "healthy"),
    (ACCURATE, NEAR_LN_2[:11], "loss-stands-still"),  # beside an accuracy of a half
    # few points, far from one to the next
    (SKIPPED, [1.4113, 1.7492, 2.1625], "validation-turns-up"),
    (SKIPPED, [1.4113, 1.7492, 1.6], "healthy"),
    (SKIPPED, [1.4113, 1.45, 1.5], "healthy"),
    (VALIDATED, [6.857, 6.857, 1.517, 1.517, 2.59, 2.933, 3.635, 3.189, 3.394, 3.565], "validation-turns-up"),
    (GREEDY, [38782.66, 49468.65, 52000.5], "validation-turns-up"),
    # it fell at once and is level since
    (ITERATION, STEEP, "healthy"),
    (ITERATION, STEEP[5:], "loss-stands-still"),
    ("step={step} ep={step} LR=4.4e-04 L={loss} top=1.26 acc=0.5\n", [1.5] * 5 + [math.nan] * 5, "loss-nan"),
    # a few units of its last digit
    (SAMPLED, [*HALVED, *[0.011] * 60], "healthy"),
    (SAMPLED, [*HALVED, *[0.511] * 60], "loss-diverged"),
    (SAMPLED.replace("{loss:.3f}", "={loss:.4f}"), FROZEN, "loss-stands-still"),
    (SAMPLED.replace("{loss:.3f}", "={loss:.9f}"), [*HALVED, *[0.010912345] * 60], "loss-stands-still"),
    # the loss of a policy by its own name
    (OTHER + "TD Loss: {loss:.4f}\n", POLICY, "healthy"),
    (OTHER + "Loss: {loss:.4f}\n", POLICY, "loss-diverged"),
    (BESIDE, POLICY, "loss-diverged"),
    (OTHER + "TD Loss: {loss}\n", [*POLICY, *[math.nan] * 9], "loss-nan"),
    # it leaps and comes down again
    (ITERATION, [0.22, 0.3, 0.31, *(8 * 0.93**n for n in range(40))], "healthy"),
    # it was 0 for long
    (EPOCH, [1.4 * 0.9**n for n in range(120)] + [0.6 + 0.01 * n for n in range(30)], "loss-diverged"),
    (EPOCH, [0.0] * 10 + [0.4] * 40, "loss-stands-still"),
    # batches about what guessing between two classes gives, as of one network that competes with another
    (ITERATION, [0.693 + 0.06 * math.sin(9 * n) for n in range(1200)], "healthy"),
    # lines that look like a download or settings
    ("{step}%|##| {step}0000/1000000 [00:01<00:01, 2500000.00it/s, loss={loss}]\n", RISES, "loss-diverged"),
    ("step={step} loss={loss} ({{'a': True, 'b': False, 'c': True, 'd': True, 'e': False}})\n", RISES, "loss-diverged"),
    # few units of its last digit, beside an accuracy that is perfect or not
    (PERFECT, [0.0004, 0.0004, *[0.0005] * 10, *[0.0006] * 60], "healthy"),
    (PERFECT.replace("100", "52"), [0.0004, 0.0004, *[0.0005] * 10, *[0.0006] * 60], "loss-stands-still"),
    (PERFECT, [2.0] * 60, "loss-stands-still"),
    # evaluations that do not move any more, beside a loss of training that never has or has fallen
    (TRAINED, UP, "loss-stands-still"),
    (FITTED, UP, "validation-turns-up"),
    # evaluations that leave their level again and again, and end far above it or come back
    (FITTED, [*SPIKES, 306.0, 7.4, 119.0, 49.5, 12.1, 7.0], "validation-turns-up"),
    (FITTED, [*SPIKES, 306.0, 7.4, 1.5, 1.3, 1.2, 1.1, 1.0], "healthy"),
]


@with_rows("line, losses, cause", OF_LINES)
def test_what_the_losses_on_the_lines_of_a_log_show(line, losses, cause):
    assert explain(log_of(enumerate(losses, 1), line)).cause == cause


EVALUATED = "Validation loss: {loss}\n"


def test_evaluations_that_each_rank_reports_count_once():
    reported = [(0, loss) for loss in (2.295305573940277, 2.283445429801941) for _ in range(8)]
    steps = log_of(enumerate([2.5, 2.4, 2.3, 2.31]), LINES[0])
    assert explain([*steps, *log_of(reported, EVALUATED)]).cause == "healthy"
    assert explain(log_of([*reported[:1] * 3, *reported[-1:] * 8], EVALUATED)).cause == "healthy"
    assert explain(log_of(reported[:1] * 16, EVALUATED)).cause == "loss-stands-still"
    stuck = [(step, loss) for step, loss in enumerate([9.9, 8.8, 7.7, *[7.6931472] * 60]) for _ in range(4)]
    assert explain(log_of(stuck, "step {step} loss {loss}\n")).cause == "loss-stands-still"


def test_measures_of_an_epoch_as_dictionaries_are_read():
    line = "cross_entropy: {{'epoch': {step}, 'value': {loss}}} ({{'split': '{split}'}})\n"
    lines = [line.format(step=step, loss=math.nan, split=split) for step in range(9) for split in ("train", "test")]
    assert explain(["".join(lines).encode()]).cause == "loss-nan"
    losses = [(step, 2 / (1 + step)) for step in range(20)]
    assert explain(log_of(losses, line.replace("{split}", "train"))).cause == "healthy"


def test_a_second_stage_of_a_log_is_a_curve_of_its_own():
    stages = [[2 * math.exp(-n / 50) + 0.1 for n in range(200)], [6 * math.exp(-n / 80) + 2 for n in range(200)]]
    assert explain([b"".join(text for loss in stages for text in log_of(enumerate(loss), LINES[0]))]).cause == "healthy"


def test_a_huge_loss_is_told_to_normalize_and_a_rising_one_is_not():
    huge, rising = (
        explain(log_of(enumerate(losses), LINES[0])) for losses in ([4e8, 5e8] * 6, [2.0] * 6 + [9e4, 8e4, 9e4])
    )
    assert "normalize" in huge.fix and "does not fall" in huge.summary
    assert "normalize" not in rising.fix and "resume from a checkpoint" in rising.fix


def test_a_failure_of_the_log_is_not_replaced_by_its_loss():
    text = b"".join(log_of(enumerate([1.0] * 40 + [9.0] * 40), LINES[0]))
    assert explain([text + b"ValueError: sample 1841 has 3 fields\n"]).cause == "user-code-exception"


def test_a_slow_minute_is_no_decay_and_two_are():
    for seconds, causes in ((2, []), (8, ["throughput-decays"])):
        times = [1.8e9 + seconds * number for number in range(120)]
        speeds = series(THROUGHPUT, [1e5] * 105 + [4e4] * 15, times=times)
        assert [finding.cause for finding in judge_curves([speeds])] == causes


def test_without_a_curve_of_the_speed_the_times_of_the_losses_show_it():
    times = [1.8e9 + 5 * number + 10 * max(0, number - 100) for number in range(140)]
    [finding] = judge_curves([series(LOSS, falling(Noise(1, 0.01), 140), times=times)])
    assert (finding.cause, finding.series.name) == ("throughput-decays", "steps per second")
    assert abs(finding.at - 100) <= 2


def test_the_gravest_comes_first_and_each_cause_once():
    noise = Noise(1, 0.01)
    curves = [*leak(noise, 0, 200), *leak(noise, 0, 200), *jump(noise, 150, 50, factor=3), *overfitting(noise, 10, 20)]
    assert [finding.cause for finding in judge_curves(curves)] == ["loss-diverged", "memory-grows"]


def test_a_curve_of_200_000_points_is_judged_within_seconds():
    values = jump(Noise(1, 0.03), 180_000, 20_000, factor=1.5)
    began = time.process_time()
    [finding] = judge_curves(values)
    assert abs(finding.at - 180_000) < 400
    assert time.process_time() - began < 6


def test_a_cause_from_the_log_stays_first_and_a_healthy_log_gives_way():
    findings = judge_curves(leak(Noise(1, 0.01), 100, 100))
    killed = add_findings(Explanation("host-oom-killed", summary="killed", fix="more memory"), findings)
    assert (killed.cause, killed.summary, killed.fix) == ("host-oom-killed", "killed", "more memory")
    assert [(curve.cause, curve.step) for curve in killed.curves] == [
        ("memory-grows", findings[0].series.steps[findings[0].at])
    ]
    assert ": memory-grows, memory grows step by step from step " in format_explanation(killed)
    leaking = add_findings(Explanation("healthy"), findings)
    assert leaking.cause == "memory-grows" and leaking.fix == load_catalogue().causes["memory-grows"].fix
    assert add_findings(Explanation("healthy", summary="fine"), []) == Explanation("healthy", summary="fine")


def test_a_curve_is_drawn_on_one_line_with_the_place_marked():
    values = [8.0] * 12 + [1.0] * 24 + [6.0] * 12
    explanation = explain_curves([series(LOSS, values)], [], names="x")
    text = format_explanation(explanation)
    assert explanation.cause == "loss-diverged"
    assert "    " + "█" * 12 + "▁" * 24 + "│" + "▇" * 12 + "  step 10 to 480, │ step 370\n" in text
    assert (
        "\n    step   10  80  160  240  320  370  400  480\n    value   8   8    1    1    1    6    6    6\n" in text
    )
    assert "\x1b" not in text and "\x1b[1;31m│\x1b[0m" in format_explanation(explanation, coloured=True)


def test_values_that_are_not_finite_are_crosses_in_the_picture_and_null_in_json():
    explanation = explain_curves([series(LOSS, [*falling(Noise(1, 0.01), 24), *[math.nan] * 12])], [], names="x")
    [curve] = explanation.curves
    assert curve.values[23] is not None and curve.values[24:] == (None,) * 12
    assert "│" + "×" * 12 in format_explanation(explanation)


def test_metrics_that_are_healthy_or_too_few_say_how_much_was_judged():
    healthy = explain_curves([series(LOSS, falling(Noise(1, 0.01), 100))], [], names="x.csv")
    assert healthy.cause == "healthy" and "step 10 to 1,000, 100 points" in healthy.summary
    few = explain_curves([series(LOSS, [3.0, 2.0])], [], names="x.csv")
    assert (few.cause, few.summary) == ("unknown", "x.csv: loss has 2 points, too few to judge")
    assert explain_curves([], [], names="x.csv").cause == "unknown"


def test_every_cause_of_the_curves_is_found_by_a_test():
    found = Counter(param.values[1] for param in FAULTS)
    assert set(found) == {cause.id for cause in load_catalogue().causes.values() if cause.group == "Curves"}


def test_a_loss_beyond_all_measure_diverged_even_if_it_falls():
    lines = "".join(f"Epoch [1][{step}/9000] lr: 0.02, loss: {9e26 - step * 1e22:.4f}\n" for step in (50, 100, 150))
    assert explain([lines.encode()]).cause == "loss-diverged"


def test_validation_that_turns_up_is_found_in_a_log():
    falls = [6.2, 3.0, 2.5, 2.3, 2.2, 2.15, 2.12, 2.1]
    losses = [*falls, *(2.1 + 0.03 * number for number in range(1, 13))]
    steps = [
        f"step {at * 250}: train loss {loss / (1 + at / 10):.4f}, val loss {loss:.4f}\n"
        + "".join(f"iter {at * 250 + i}: loss {loss / (1 + at / 10):.4f}, time 61ms\n" for i in range(0, 250, 10))
        for at, loss in enumerate(losses)
    ]
    assert explain(["".join(steps).encode()]).cause == "validation-turns-up"
    assert explain(["".join(steps[:8]).encode()]).cause == "healthy"


def test_a_loss_that_is_zero_in_every_line_is_no_healthy_log():
    lines = "".join(f"steps:  2{i}%|###  | {176 + 16 * i}/800 [00:46<02:44,  3.79it/s, avr_loss=0]\n" for i in range(6))
    assert explain([lines.encode()]).cause == "loss-stands-still"
    assert explain([("step 1 | reward 0.1\n" + lines).encode()]).cause == "healthy"  # a policy's loss may be


MEMORY_LINES = (  # memory in use on the lines of a log, in GiB
    "epoch 1/50 - it {step}/1000 - loss: {loss:.3f}\nMemory info of GPU /device:GPU:0: current: {memory:.3f}, peak: 30.55\n",
    "iteration {step}: rss {mib:.0f} MB, loss {loss:.3f}\n",
    "{{'loss': {loss:.3f}, 'step': {step}, 'memory/device_mem_allocated(GiB)': {memory:.3f}}}\n",
    "Iteration {step}/500\nstart Current memory usage: {mib:.2f} MB\nTraining model: sequential\n",
    "[rank1]: step: {step} loss: {loss:.3f} memory: {memory:.3f}GiB(40.1%) tps: 7,000\n",
    "step {step}: loss {loss:.3f}\npeak memory = {num_bytes:,} (+49,152)\n",
    "[{step:04}/2000] loss={loss:.3f} lr=3.0e-04 mem={memory:.2f}GB 0.31s/it\n",
)


def memory_log(memories, line):
    lines = [
        line.format(step=step, loss=2 + 3 / step, memory=memory, mib=1024 * memory, num_bytes=round(GIB * memory))
        for step, memory in enumerate(memories, 1)
    ]
    return ["".join(lines).encode()]


def test_end_of_training_is_the_end_of_a_log():
    lines = "".join(f"iter {n}: loss {3 / n:.4f}\n" for n in range(1, 40))
    explanation = explain([f"{lines}| End of training | test loss 0.12 | test ppl 1.13\n".encode()])
    assert explanation.cause == "healthy" and explanation.progress.finished


def test_the_name_of_a_memory_has_no_other_values_of_its_line():
    explanation = explain(memory_log([2 + 0.2 * n for n in range(9)], MEMORY_LINES[-1]))
    assert explanation.curves[0].name == "mem (bytes)"


def test_a_return_below_0_that_never_changes_is_no_healthy_log():
    def explain_returns(values):
        lines = (
            f"{{'update': {n}, 'return': {value}, 'v_loss': {1 / (n + 1):.3f}}}\n" for n, value in enumerate(values)
        )
        return explain(["".join(lines).encode()])

    still = explain_returns([-200.0] * 60)
    assert still.cause == "loss-stands-still" and "every reward is the same" in still.summary
    for values in ([-200.0] * 30, [500.0] * 60, [-200.0] * 59 + [-199.0]):
        assert explain_returns(values).cause == "healthy"


@with_rows("fall, cause", [(0.005, "healthy"), (0.0, "loss-stands-still")])
def test_scores_of_episodes_that_are_all_one_are_no_failure_while_a_loss_falls(fall, cause):
    lines = (f"ep {n} score: -1.0 loss {1 - fall * n + 0.001 * (n % 3):.4f}\n" for n in range(60))
    assert explain(["".join(lines).encode()]).cause == cause


def test_a_validation_loss_that_rises_behind_end_of_epoch_is_found():
    line = (
        "| end of epoch {n:3} | time: 0.1s | train ppl {train:8.2f} | valid loss {loss:5.2f} | valid ppl {ppl:8.2f}\n"
    )
    losses = [1.43 + 0.08 * n for n in range(20)]
    lines = [line.format(n=n, train=3 / n, loss=loss, ppl=math.exp(loss)) for n, loss in enumerate(losses, 1)]
    assert explain(["".join(lines).encode()]).cause == "validation-turns-up"


@pytest.mark.parametrize("line", MEMORY_LINES)
@pytest.mark.parametrize(
    "memories", [[2 + 0.2 * n for n in range(9)], [6 + 0.03 * n + 0.1 * (n % 3) for n in range(90)]]
)
def test_memory_that_grows_on_the_lines_of_a_log_is_found(memories, line):
    explanation = explain(memory_log(memories, line))
    assert explanation.cause == "memory-grows"
    assert "mem" in explanation.summary.lower() or "rss" in explanation.summary


@pytest.mark.parametrize("line", MEMORY_LINES)
def test_memory_that_settles_or_varies_is_healthy(line):
    for seed in range(RUNS // 10):
        noise = Noise(seed, 0.05)
        settles = [8 - 4 * math.exp(-number / 3) for number in range(12)]
        peaks = [max(8 * noise.factor() for _ in range(number + 1)) for number in range(60)]
        for memories in (settles, peaks, [8 * noise.factor() for _ in range(60)], [2, 2.5, 3, 3.5, 4], [9.0] * 40):
            assert explain(memory_log(memories, line)).cause in ("healthy", "unknown")


def test_a_rate_behind_the_memory_is_no_memory():
    line = "step: {step} loss: {loss:.3f} memory: 30.55GiB(40%) tps: {memory:.1f} tflops: {memory:.1f}\n"
    assert explain(memory_log([7000 + 100 * number for number in range(60)], line)).cause == "healthy"


def test_free_memory_is_not_memory_in_use():
    line = "step {step} loss {loss:.3f} free mem: {memory:.3f} GB, total mem: {memory:.3f} GB, cached memory {memory:.1f}\n"
    assert explain(memory_log([2 + 0.2 * number for number in range(9)], line)).cause == "healthy"


def test_losses_among_many_lines_of_other_kinds_are_read():
    losses = [*(0.01 + 0.001 * (n % 5) for n in range(120)), *(0.8 + 0.01 * (n % 5) for n in range(16))]
    skipped = "".join(f"[warn] item {n} is unhealthy, it is left out\n" for n in range(90))
    text = "".join(f"[step {n * 50:>5}] L={loss:.4f}\n{skipped if n >= 120 else ''}" for n, loss in enumerate(losses))
    late = [point for point in read_log([text.encode()]).losses if point.step >= 6000]
    assert len(late) > 9


def test_curves_begin_again_with_the_epochs_of_another_training():
    first = "".join(f"[epoch {n:03}] train_loss={0.2 - n / 1000:.4f} val_loss=0.2\n" for n in range(1, 41))
    second = "".join(f"[epoch {n:03}] train_loss={0.9 - n / 1000:.4f} val_loss=0.9\n" for n in range(1, 41))
    assert explain([(first + second).encode()]).cause == "healthy"
    assert explain([(first + second.replace("[epoch 0", "[part 0")).encode()]).cause == "loss-diverged"


def test_curves_begin_again_with_epochs_that_are_counted_in_fifties():
    def epochs(losses):
        return "".join(f"epoch {50 * n}, content loss {loss}\n" for n, loss in enumerate(losses, 1))

    low = epochs(0.3 - n / 1000 for n in range(30))
    high = epochs(2.4 - n / 50 for n in range(30))
    assert explain([(low + high).encode()]).cause == "healthy"
    assert explain([(low + high.replace("epoch ", "part ")).encode()]).cause == "loss-diverged"


def test_the_loss_beside_the_bar_of_an_evaluation_is_none_of_training():
    def bar(name, at, of, loss):
        return f"{name}: {100 * at // of}%|███▊      | {at}/{of} [00:01<00:01, 74.07it/s, loss={loss:.4f}]\n"

    epochs = [[bar(f"Epoch {n} [Train]", 10 * at, 80, 3 - n / 20) for at in range(1, 9)] for n in range(20)]
    train = "".join("".join(epoch) for epoch in epochs)
    last = "".join(bar("{}", at, 37, 4.5) for at in range(1, 38))
    for name in ("Test", "Val", "Test (Best)", "Validation"):
        assert explain([(train + last.format(*[name] * 37)).encode()]).cause == "healthy", name
    assert explain([(train + last.format(*["Epoch 20 [Train]"] * 37)).encode()]).cause == "loss-diverged"
    assert explain([(train + bar("Val", 37, 37, math.nan)).encode()]).cause == "loss-nan"


def test_the_number_of_a_loss_is_not_its_value():
    text = "".join(f"[Epoch:{n}/50]: loss1:{0.9 / n:.4f} loss2:{1.7 / n:.4f}| AUC:0.8\n" for n in range(1, 40))
    explanation = explain([text.encode()])
    assert explanation.cause == "healthy"
    assert explanation.progress.last_loss == pytest.approx(0.0231)


def test_losses_on_lines_of_an_evaluation_are_no_rise_of_the_training():
    lines = [f"Epoch: [13]  [ {n}/99]  eta: 1:18:18  loss: {90 - n / 2:.4f} (80.1)" for n in range(90)]
    lines += [f"Test:  [ {n}/99]  eta: 0:05:10  loss: {98 + n / 9:.4f} (64.9)" for n in range(12)]
    assert explain(["\n".join(lines).encode()]).cause == "healthy"
    assert explain(["\n".join(lines).replace("Test:", "Step:").encode()]).cause == "loss-diverged"


@with_rows("gain, cause", [(0, "validation-turns-up"), (0.00003, "healthy")])
def test_a_rare_evaluation_whose_title_stands_above_it_is_found_in_a_long_log(gain, cause):
    lines = []
    for step in range(1, 6001):
        lines.append(f"2018-03-12T23:12:00.69: step {step}, loss {0.7 / (1 + step / 50):.4f}, acc 0.9")
        if step % 100 == 0:
            lines += [
                "",
                "Evaluation:",
                f"2018-03-12T23:12:02.90: step {step}, loss {0.6 + abs(step - 1500) / 3000:.4f}, acc: {0.7 + gain * step:.4f}",
            ]
    explanation = explain(["\n".join(lines).encode()])
    assert explanation.cause == cause
    assert [curve.name for curve in explanation.curves] == ([] if gain else ["eval_loss"])


def test_losses_of_the_batches_of_an_evaluation_are_no_curve():
    def epoch(number: int) -> str:
        line = "Epoch: [{}]  [ {}/20]  eta: 0:00:10  loss: {:.3f} (7.1)\n"
        text = "".join(line.format(number, batch, 8 - number) for batch in range(20))
        losses = [9 - number / 10] * 8 + [6 - number / 10 + batch / 3 for batch in range(8)]
        text += "".join(f"Test:  [ {n}/16]  eta: 0:00:10  loss: {loss:.3f} (8.4)\n" for n, loss in enumerate(losses))
        return text + f"Test: Total time: 0:00:19 (0.2 s / it)\nAveraged stats: loss: 8.{9 - number} (8.4)\n"

    text = "".join(map(epoch, range(5)))
    assert explain([text.encode()]).cause == "healthy"
    assert explain([text.replace("/16]  eta", "/16]  left").encode()]).cause == "validation-turns-up"


def test_curves_of_several_trainings_whose_lines_have_a_logger_s_prefix_are_told_apart():
    first = [
        f"2026-10-09 15:11:1{n} - root - INFO - Epoch [{n}/9], Train Loss: {3 / n:.3f} Validation Loss: 0.04"
        for n in range(1, 10)
    ]
    second = [line.replace("Loss: 0.04", f"Loss: {0.08 + 0.1 / n:.3f}") for n, line in enumerate(first, 1)]
    assert explain(["\n".join(first + second).encode()]).cause == "healthy"
    assert explain(["\n".join(first + second).replace("Epoch [", "Part [").encode()]).cause == "validation-turns-up"


def test_noisy_losses_of_training_and_evaluation_of_which_none_falls_have_learned_nothing():
    line = "Epoch number: {step}\nTraining loss average: tensor({loss}, device='cuda:0')\nDev loss average: tensor({dev})\n"
    noise = [((n * 37) % 23 - 11) / 23 for n in range(60)]

    def log(slope):
        rows = (
            line.format(step=n, loss=9 + noise[n] - slope * n, dev=6700 + 300 * noise[-n] - 100 * slope * n)
            for n in range(60)
        )
        return ["".join(rows).encode()]

    assert explain(log(0)).cause == "loss-stands-still"
    assert explain(log(0.02)).cause == "healthy"


def test_evaluations_of_a_long_log_are_read_over_its_whole_length():
    step = "TRAINING - Epoch: [{epoch}][{batch}/200]\tLoss {loss:.4f}\n"
    lines = []
    for epoch in range(1, 601):
        lines += [step.format(epoch=epoch, batch=batch, loss=2 / epoch) for batch in range(20)]
        lines.append(f"EVALUATING - Epoch: [{epoch}][0/79]\tLoss {abs(epoch - 400) / 400 + 1:.4f}\n")
    assert explain(["".join(lines).encode()]).cause == "validation-turns-up"


@pytest.mark.parametrize("line", [
    "stdout: [2026-12-20 08:26:26,101] [INFO] [timer.py:197:stop] 0/{step}, RunningAvgSamplesPerSec=158.3, MemAllocated=1.75GB\n",
    "|    total_timesteps | {step}    |\n",
    "{step}it [00:07,  1.39it/s]\n",
    "{step} 2.6496577\n",
])  # fmt: skip
def test_steps_in_forms_of_their_own_show_that_a_run_works(line):
    explanation = explain(["".join(line.format(step=step) for step in range(1, 9)).encode()])
    assert (explanation.cause, explanation.progress.last_step) == ("healthy", 8)


def test_a_step_and_nan_alone_on_a_line_are_a_loss_that_is_nan():
    assert explain([b"76960 2.735384\n76970 2.6265104\n76980 nan\n76990 nan\n77000 nan\n"]).cause == "loss-nan"


def test_a_loss_that_reaches_zero_in_lines_that_are_not_transformers_own_is_no_nan():
    dicts = "".join(f"{{'loss': {loss}, 'epoch': {n}}}\n" for n, loss in enumerate([2.4, 0.9, 0.0, 0.0]))
    assert explain([dicts.encode()]).cause == "loss-nan"
    assert explain([dicts.replace("'", "").encode()]).cause == "healthy"


def test_a_loss_of_evaluations_that_rises_beside_an_accuracy_that_does_too_is_no_failure():
    line = "Epoch {epoch}: val loss: {loss:.3f}, val accuracy: {accuracy:.2f}\n"

    def log(accuracy):
        rows = ((epoch, 1.0 + 0.1 * abs(epoch - 4), accuracy(epoch)) for epoch in range(1, 15))
        return ["".join(line.format(epoch=epoch, loss=loss, accuracy=score) for epoch, loss, score in rows).encode()]

    assert explain(log(lambda epoch: 80 - 30 / epoch)).cause == "healthy"
    assert explain(log(lambda epoch: 80 - abs(epoch - 4))).cause == "validation-turns-up"
    assert explain(log(lambda epoch: 50.0)).cause == "validation-turns-up"


def test_a_loss_of_training_that_rises_while_that_of_evaluations_falls_is_no_failure():
    def log(last):
        rows = [f"step {step}: loss {0.01 + step / 1000:.4f}\n" for step in range(1, 61)]
        for at, value in ((20, 0.5), (40, 0.4), (59, last)):
            rows[at] += f"step {at}: val loss: {value}\n"
        return ["".join(rows).encode()]

    assert explain(log(0.3)).cause == "healthy"
    assert explain(log(0.9)).cause == "loss-diverged"


def test_a_loss_of_training_that_rises_with_that_of_evaluations_is_no_overfitting():
    def log(train):
        rows = (
            f"Iter {n}: train loss : {train(n):.3f}. valid loss : {4 + abs(n - 40) / 40:.3f}\n" for n in range(1, 81)
        )
        return ["".join(rows).encode()]

    assert explain(log(lambda n: 4 + abs(n - 40) / 40)).cause == "loss-diverged"
    assert explain(log(lambda n: 6 - n / 40)).cause == "validation-turns-up"


@pytest.mark.parametrize("classes", [2, 8])
def test_a_loss_that_comes_down_to_that_of_a_guess_is_no_healthy_log(classes):
    chance, noise = math.log(classes), Noise(3, 0.002)
    falls = [chance + 1.5 * math.exp(-n / 10) for n in range(200)]
    lines = "".join(f"step {n} | loss {loss * noise.factor():.4f}\n" for n, loss in enumerate(falls, 1))
    explanation = explain([lines.encode()])
    assert explanation.cause == "loss-stands-still"
    assert explanation.summary.endswith(f"ln {classes}, as of a guess between {classes} classes")


def test_a_few_rounded_losses_of_a_guess_between_two_classes_are_no_healthy_log():
    epochs = "".join(
        f"Epoch {n}\n  Average training loss: {loss}\n  Validation Loss: 0.69\n"
        for n, loss in enumerate((0.7, 0.7, 0.69, 0.69), 1)
    )
    assert explain([epochs.encode()]).cause == "loss-stands-still"
    learned = epochs.replace("0.7\n", "0.71\n", 1).replace("loss: 0.69", "loss: 0.61")
    assert explain([learned.encode()]).cause != "loss-stands-still"


def test_a_few_losses_that_are_exactly_those_of_a_guess_are_no_healthy_log():
    def log(*losses):
        return ["".join(f"(Iteration {10 * n + 1} / 40) loss: {loss}\n" for n, loss in enumerate(losses)).encode()]

    assert explain(log(2.302585, 2.302570, 2.302535, 2.302557)).cause == "loss-stands-still"
    assert explain(log(2.302585, 2.301570, 2.298535, 2.290557)).cause == "healthy"
    assert explain(log(0.693147, 0.693140, 0.693110, 0.693080)).cause != "loss-stands-still"  # DPO's first steps


def test_a_loss_that_has_vanished_varies_by_factors():
    losses = [2 * math.exp(-n / 5) + 0.0006 + 0.0008 * (n > 60) for n in range(100)]
    lines = "".join(f"step {n} | loss {loss:.6f}\n" for n, loss in enumerate(losses, 1))
    assert explain([lines.encode()]).cause == "healthy"


def test_epochs_that_begin_again_among_many_lines_begin_a_new_curve():
    epochs = [*range(1, 31), *range(1, 4)]
    lines = [
        f"[INFO] Epoch {epoch}/30 started\n"
        + "".join(f"[INFO] step={step}/144 loss={5 / (epoch + step / 144):.4f}\n" for step in range(2, 144, 2))
        for epoch in epochs
    ]
    assert explain(["".join(lines).encode()]).cause == "healthy"


def test_losses_that_recur_in_every_epoch_show_that_no_weight_changes():
    losses = [0.9741, 1.3742, 1.239, 0.967, 1.0386, 1.1681, 1.224, 0.961]
    lines = [f"Epoch {n // 8 + 1}, step {n}, loss: {losses[n % 8]}\n" for n in range(22)]
    explanation = explain(["".join(lines).encode()])
    assert explanation.cause == "loss-stands-still" and "repeats" in explanation.summary
    assert explain(["".join([*lines[:21], "Epoch 3, step 21, loss: 0.8\n"]).encode()]).cause == "healthy"


def test_the_first_point_of_an_epoch_that_comes_again_begins_another_run_with_the_same_seed():
    losses = [3.142, 3.173, 3.041, 2.97, 3.293, 3.291, 2.88, 2.874, 3.185, 3.055]

    def runs(epochs):
        lines = "epoch 00{epoch}: {step} / 999 loss={loss}, num_updates={step}\n"
        points = [(epoch, 100 * n, loss) for epoch in epochs for n, loss in enumerate(losses, 1)]
        return "".join(lines.format(epoch=epoch, step=step, loss=loss) for epoch, step, loss in points)

    assert explain([runs([1, 1, 1]).encode()]).cause == "healthy"
    assert explain([runs([1, 2, 3]).encode()]).cause == "loss-stands-still"


def test_the_epoch_of_the_best_score_so_far_begins_no_new_curve():
    best = 'INFO best so far: {"val_acc": 0.5, "epoch": 1}\n'
    lines = [f"step {n} loss {1 + max(0, n - 60) ** 2 / 40:.4f}\n{best if n % 20 == 0 else ''}" for n in range(120)]
    assert explain(["".join(lines).encode()]).cause == "loss-diverged"


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl"])
def test_epochs_of_records_that_begin_again_are_another_run(tmp_path, name):
    first = [{"train_loss": 0.9 - n / 100, "val_loss": 0.9, "epoch": n, "n_parameters": 55} for n in range(40)]
    others = [{**record, "train_loss": 2.4 - n / 50} for _ in range(3) for n, record in enumerate(first[:30])]
    path = tmp_path / name
    path.write_text("".join(json.dumps(record) + "\n" for record in [*first, *others]))
    assert explain(path).cause == "healthy"


def test_losses_of_zero_beside_an_evaluation_that_is_nan_are_nan():
    zeros = "{'loss': 0.0, 'learning_rate': 1e-07, 'epoch': 0.01}\n" * 6
    assert explain([zeros.encode()]).cause == "loss-stands-still"
    assert (
        explain([f"{zeros}{{'eval_loss': nan, 'eval_runtime': 23.1, 'epoch': 0.01}}\n{zeros}".encode()]).cause
        == "loss-nan"
    )


def test_throughput_that_falls_to_a_fraction_on_the_lines_of_a_log_is_told():
    line = "step {step}/400 loss {loss:.3f} samples/s {speed:.1f}\n"

    def log(speed_at):
        return "".join(line.format(step=n, loss=3 - n / 50, speed=speed_at(n)) for n in range(1, 41))

    assert explain([log(lambda n: 9000 / (1 + max(0, n - 10) / 3)).encode()]).cause == "throughput-decays"
    assert explain([log(lambda n: 9000 - 20 * n).encode()]).cause == "healthy"
    assert explain([log(lambda n: 200 if n < 3 else 9000 + 900 * (n % 2)).encode()]).cause == "healthy"


def test_a_loss_that_leaps_from_its_first_value_says_so_and_one_that_comes_down_again_does_not():
    line = "iter {step}: loss {loss:.4f}\n"
    leaps = [3.5, *(4000 + 900 * (n % 3) for n in range(20))]
    explanation = explain(log_of(enumerate(leaps, 1), line))
    assert explanation.cause == "loss-diverged" and "from its first value on" in explanation.summary
    comes_down = [0.22, 0.3, 0.31, *(8 * 0.93**n for n in range(40))]
    assert explain(log_of(enumerate(comes_down, 1), line)).cause != "loss-diverged"


def test_a_score_that_is_the_same_in_each_of_many_evaluations_is_told():
    lines = "Epoch {n} - Average loss: {loss:.4f}\nValidation AUROC: {score}\n"
    same = "".join(lines.format(n=n, loss=0.75 + 0.03 * (n % 3), score=0.29167) for n in range(1, 31))
    explanation = explain([same.encode()])
    assert explanation.cause == "loss-stands-still" and "every evaluation" in explanation.summary
    falling_loss = "".join(lines.format(n=n, loss=3 - n / 20, score=0.29167) for n in range(1, 31))
    assert explain([falling_loss.encode()]).cause == "healthy"
    other = "".join(lines.format(n=n, loss=0.75 + 0.03 * (n % 3), score=0.29 + n / 999) for n in range(1, 31))
    assert explain([other.encode()]).cause == "healthy"


def test_memory_that_grows_evenly_over_twenty_reports_is_told():
    line = "step {step} loss {loss:.3f} rss {memory} MiB\n"
    grown = "".join(line.format(step=50 * n, loss=3 - n / 50, memory=310 + 38 * n) for n in range(1, 25))
    assert explain([grown.encode()]).cause == "memory-grows"


def test_an_evaluation_that_gives_the_same_loss_each_time_shows_that_nothing_is_learned():
    lines = "".join(f"STEP {n * 10} training loss: -0.0{31 + n % 7} - eval loss: {{}}\n" for n in range(30))
    assert explain([lines.format(*["-0.035561230"] * 30).encode()]).cause == "loss-stands-still"
    assert explain([lines.format(*[f"-0.0355612{n}" for n in range(30)]).encode()]).cause == "healthy"


def test_the_values_of_a_sentence_are_those_of_its_steps():
    losses = [0.5, *[0.011, 0.012, 0.01] * 10, *[0.8, 0.9, 0.7] * 10, 0.644]
    explanation = explain_curves([series(LOSS, losses)], [], names="x")
    assert "loss is 0.011 at step 290 and 0.7 at step 610" in explanation.summary


def test_a_short_curve_that_has_fallen_is_healthy():
    explanation = explain_curves([series(LOSS, [8.3, 1.2, 0.5, 0.4])], [], names="x")
    assert (explanation.cause, explanation.confidence) == ("healthy", 0.6)


PAIRS = (
    "{{'loss': {loss}, 'rewards/chosen': 0.05, 'rewards/rejected': 0.04, 'rewards/accuracies': 0.5, 'epoch': 0.5}}\n"
)
CLASSES = "Epoch [{step}/40], Train Loss: {loss}, Train Accuracy: 51.0%, Val Loss: {loss}, Val Accuracy: {score}%\n"


@pytest.mark.parametrize("line", [PAIRS, CLASSES])
def test_a_loss_of_two_classes_that_ends_where_it_began_stands_still(line):
    def log(losses, score):
        return [line.format(step=step, loss=loss, score=score).encode() for step, loss in enumerate(losses, 1)]

    dip = [0.69, 0.66, 0.65, 0.66] if line == CLASSES else [0.71, 0.72, 0.74, 0.73]
    explanation = explain(log([0.695, 0.694, 0.693, *dip * 9, 0.692, 0.696, 0.694], 50.6))
    assert explanation.cause == "loss-stands-still" and "2 classes" in explanation.summary
    assert explain(log([0.695, 0.694, *(0.69 - 0.004 * n for n in range(40))], 58.2)).cause == "healthy"


def test_a_curve_without_steps_is_told_by_its_epochs():
    losses = [0.9, 0.5, 0.4, 0.45, 0.5, 0.56, 0.63, 0.7, 0.78, 0.86]
    lines = (f"Epoch {n}/10, loss: {1 / n:.3f}, val loss: {loss}\n" for n, loss in enumerate(losses, 1))
    explanation = explain(["".join(lines).encode()])
    assert (explanation.cause, explanation.step) == ("validation-turns-up", 3)
    assert "0.86 at step 10" in explanation.summary


def test_results_without_a_step_or_an_epoch_are_no_curve():
    losses = [0.03, 0.02, 0.01, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6]
    assert explain([b"".join(b"eval_loss = %.3f\neval_f1 = 0.8\n" % loss for loss in losses)]).cause == "healthy"


def test_a_mean_loss_of_exactly_zero_over_a_long_run_stands_still():
    end = "{{'train_runtime': {seconds}, 'train_steps_per_second': 0.2, 'train_loss': {loss}, 'epoch': 3.0}}\n"
    bars = "".join(f"{n:3}%|###       | {n}/100 [00:10<00:10,  1.00it/s]\n" for n in range(0, 101, 10))
    explanation = explain([(bars + end.format(seconds=2823.2, loss=0.0)).encode()])
    assert (explanation.cause, explanation.step) == ("loss-stands-still", 100)
    for seconds, loss in ((0.0153, 0.0), (2823.2, 0.4)):  # of a run that was resumed at its end
        assert explain([(bars + end.format(seconds=seconds, loss=loss)).encode()]).cause == "healthy"
    losses = "".join(LINES[2].format(loss=1 / n) for n in range(1, 9))
    assert explain([(losses + bars + end.format(seconds=2823.2, loss=0.0)).encode()]).cause == "healthy"


def test_a_copy_of_a_trainer_state_is_read_as_metrics(tmp_path):
    path = tmp_path / "run7_trainer_state.json"
    records = [{"step": 20 * n, "eval_loss": loss} for n, loss in enumerate([1.7, 1.4, 2.0, 2.2, 2.8], 1)]
    path.write_text(json.dumps({"log_history": records}, indent=2))
    explanation = explain(path)
    assert (explanation.cause, explanation.step) == ("validation-turns-up", 40)


def test_a_file_of_metrics_has_no_final_message():
    records = "".join(f'{{"step": {n}, "loss": {2 - 0.1 * n:.1f}}}\n' for n in range(12))
    assert explain([records.encode()]).summary == "no failure found: 12 progress lines, step 0 to 11, loss 0.9"


def test_a_validation_loss_alone_that_ends_higher_is_no_sign_of_health(tmp_path):
    rows = "".join(f"{n},{value}\n" for n, value in enumerate((0.34, 0.50, 0.36, 0.47, 0.39, 0.48)))
    (tmp_path / "metrics.csv").write_text("epoch,val_loss\n" + rows)
    explanation = explain(tmp_path / "metrics.csv")
    assert explanation.cause == "unknown" and "ends above its first value: 0.34 to 0.48" in explanation.summary


def test_a_loss_and_evaluations_that_stay_within_their_noise_have_learned_nothing(tmp_path):
    def cause(slope, accuracy=None):
        chance = random.Random(7)
        noise = [chance.gauss(0, 0.07) for _ in range(300)]
        rows = [f"{n},{1 - slope * n + noise[n]:.4f},,{accuracy(n) if accuracy else ''}" for n in range(300)]
        for n in range(9, 300, 30) if accuracy is None else ():
            rows.append(f"{n},,{0.99 - slope * n + noise[n] / 99:.5f},")
        (tmp_path / "metrics.csv").write_text("\n".join(["step,loss,eval_loss,train_acc", *rows, ""]))
        return explain(tmp_path / "metrics.csv").cause

    assert (cause(0), cause(0.0002)) == ("loss-stands-still", "healthy")
    assert cause(0, lambda n: 0.05 + n % 7 / 50) == "loss-stands-still"
    assert cause(0, lambda n: 0.05 + n % 7 / 50 + n / 900) == "healthy"  # it rises
    assert cause(0, lambda n: 0.85 + n % 7 / 50) == "healthy"  # of a model that was trained before


@pytest.mark.parametrize("first", [2.4, 0.4])
def test_a_sentence_does_not_say_that_a_loss_stands_still_between_values_that_differ_by_half(first):
    losses = [first, *[1.0 + 0.001 * (n % 3) for n in range(60)]]
    (finding,) = judge_curves([series(LOSS, losses), series(RATE, [0.0] * 61)])
    explanation = add_findings(Explanation("healthy"), [finding])
    assert explanation.summary.startswith("the loss stands still") and str(first) not in explanation.summary


def test_a_loss_that_fell_to_a_fraction_at_once_has_learned_beside_evaluations_that_do_not_fall():
    line = "step {step} loss {loss:.3f}\nTest: [{step}/99] Loss {test:.3f}\n"
    losses = [5.2, 1.9, *(0.5 + (n * 7 % 11) / 50 for n in range(60))]
    lines = (line.format(step=n, loss=loss, test=1 + (n * 5 % 9) / 20) for n, loss in enumerate(losses))
    assert explain(["".join(lines).encode()]).cause == "healthy"


def test_a_cross_entropy_below_zero_has_labels_out_of_range():
    line = "2048/2048 - 1s - loss: {loss} - accuracy: 0.0000e+00 - binary_crossentropy: {loss}\n"
    explanation = explain(["".join(line.format(loss=loss) for loss in (3.1, -8.25, -19.5, -30.125)).encode()])
    assert explanation.cause == "loss-diverged" and "below 0" in explanation.summary
    assert "label" in explanation.fix
    elbo = line.replace("binary_crossentropy: {loss}", "kl: 0.2")
    assert explain(["".join(elbo.format(loss=loss) for loss in (3.1, -8.25, -19.5)).encode()]).cause == "healthy"


@pytest.mark.parametrize("line", [
    "exp_3| val: [{n}][600/1000]|Tot: 0:00:21 |loss {loss} |hm_loss 0.5\n",
    "Val Step[{n}/9], Avg Loss: {loss}\n", "TEST in epoch{n}, loss = {loss}, acc = 49.3\n", "[Test] Loss: {loss}, Accuracy: 67\n",
    "Validate:             Loss: {loss},        Top1 Acc: 49.340\n",
    " 40%|####      | 4/10 [00:09<00:14,  2.35s/it, loss_test={loss}]\n",
])  # fmt: skip
def test_lines_of_an_evaluation_are_no_losses_of_training(line):
    training = "Epoch [{n}/30] train loss: {loss:.4f}\n"
    losses = "".join(training.format(n=n, loss=2 / n) for n in range(1, 31))
    evaluations = "".join(line.format(n=n, loss=loss) for n, loss in enumerate((1.91, 1.93, 1.92, 1.9, 1.9)))
    assert explain([(losses + evaluations).encode()]).cause == "healthy"
    log = "".join(training.format(n=n, loss=2 / n) + line.format(n=n, loss=1 + n / 20) for n in range(1, 31))
    assert explain([log.encode()]).cause == "validation-turns-up"


def test_a_loss_at_the_start_and_one_in_the_name_of_a_file_are_no_losses():
    bar = " {n}%|###       | {n}/100 [00:01<00:03, 29.7it/s, init loss: {loss}, avg. loss [1-9]: 0.5]\n"
    bars = "".join(bar.format(n=n, loss=4e6 if n < 50 else 4e7) for n in range(10, 90))
    assert explain([bars.encode()]).cause == "healthy"
    assert read_step_and_loss("Save model: out/cait-Epoch-30-Loss-0.471.pth") is None


def test_epochs_that_a_line_starts_begin_a_new_curve():
    log = ""
    for trial in (0.3, 0.5, 0.9):
        for epoch in range(1, 11):
            log += f"| INFO | Start epoch {epoch}:\n| INFO | Train Loss: {trial + 1 / (9 + epoch):.3f}\n"
    assert explain([log.encode()]).cause == "healthy"


def test_a_loss_that_begins_higher_in_each_stage_of_a_curriculum_and_falls_there_does_not_diverge():
    def stage(number, losses):
        lines = (f"step {30 * number + at} stage {number} loss {loss:.3f}\n" for at, loss in enumerate(losses))
        return f"=== curriculum stage {number} ===\n" + "".join(lines)

    def fall(first, last):
        return [last + (first - last) * 0.8**at + (0.02, -0.03, 0.01)[at % 3] for at in range(30)]

    before = stage(0, fall(2.4, 1.2)) + stage(1, fall(3.9, 2.4))
    assert explain([(before + stage(2, fall(5.2, 3.6))).encode()]).cause == "healthy"
    for losses in (
        [5.2 + at % 3 / 50 for at in range(30)],
        fall(5.2, 8.0),
        [*fall(5.2, 3.6)[:15], *fall(3.6, 6.5)[:15]],
    ):
        assert explain([(before + stage(2, losses)).encode()]).cause == "loss-diverged"
    in_stage = stage(0, [*fall(2.4, 1.2), *fall(1.2, 3.6), *fall(3.6, 3.5)])  # none begins there
    assert explain([in_stage.encode()]).cause == "loss-diverged"


def test_code_that_returns_losses_is_no_head_of_a_table():
    assert read_columns("    val_loss, val_bpb") == ("val_loss", "val_bpb")
    assert read_columns("    return val_loss, val_bpb") == ()
    assert read_columns("Epoch\tAvg Loss\tTime (s)") == ("Epoch", "Avg Loss", "Time")
    assert read_columns("Epoch\tLoss (train)\tLoss (val)") == ()


def test_empty_cells_of_a_printed_data_frame_are_no_nan():
    header = "     train_loss  epoch   step  val_loss\n"
    rows = [f"{n}      0.0{90 - n}      {n // 5}    {n}49       NaN\n" for n in range(20)]
    rows += ["20          NaN      5    2049  0.000358\n"]
    assert explain([(header + "".join(rows)).encode()]).cause == "healthy"
    assert explain(
        [header[5:].encode() + b"".join(b"nan      %d    %d49       nan\n" % (n, n) for n in range(9))]
    ).cause == ("loss-nan")


def test_a_unit_behind_the_last_cell_of_a_row_is_no_column():
    rows = "".join(f"{n}      {2 / n:.4f}     0.{20 + n}     {0.5 + n}    s\n" for n in range(1, 30))
    explanation = explain([("Epoch    Train Loss   Train Acc    Time\n" + rows).encode()])
    assert (explanation.cause, explanation.progress.last_loss) == ("healthy", 0.069)


def test_an_accuracy_on_a_memory_is_no_memory():
    lines = (f"step {n} loss {3 - n / 20:.3f}, mem acc: {0.17 + 0.004 * n:.3f}\n" for n in range(50))
    assert explain(["".join(lines).encode()]).cause == "healthy"


@pytest.mark.parametrize(
    ("behind", "last_step"),
    [
        ("{bar}100%|##| 4/4 [00:01<00:00, 3.00it/s]\n{{'eval_loss': 2.8}}\n", 134),
        ("{bar}100%|##| 4/4 [00:01<00:00, 3.00it/s]\nValueError: x\n", 134),
        ("{bar}{{'loss': 2.5, 'epoch': 0.1}}\n 75%|##| 3/4 [00:01<00:00, 3.00it/s]\n", 3),  # the next stage
    ],
)
def test_a_shorter_bar_behind_that_of_a_training_with_losses_is_of_an_evaluation(behind, last_step):
    training = "".join(f"{at:3}%|##| {at}/134 [00:{at % 60:02}<00:09, 9.00it/s]\n" for at in (1, 100, 134))
    shorter = "".join(f"{25 * at:3}%|##| {at}/4 [00:01<00:00, 3.00it/s]\n" for at in (0, 2))
    log = training + "{'loss': 2.9, 'epoch': 2.0}\n" + behind.format(bar=shorter)
    progress = read_log([log.encode()]).progress
    assert (progress.first_step, progress.last_step) == (1, last_step)


def test_the_bar_of_another_work_counts_no_steps():
    bar = "{label}: {n}%|###       | {n}/100 [00:01<00:03, 29.7it/s]\n"
    for label, step in (("Training", 60), ("Calculating vectors", None)):
        log = "".join(bar.format(label=label, n=n) for n in (20, 40, 60))
        assert explain([log.encode()]).progress.last_step == step
    shards = bar.format(label="INFO 08-22 03:02:18 worker.py: Loading checkpoint shards", n=8)
    assert explain([shards.encode()]).progress.last_step is None


def test_a_summary_names_no_range_of_a_single_step():
    assert explain([b"Batch: 3, loss: 0.5\n" * 4]).summary.startswith("no failure found: 4 progress lines, loss 0.5")


def test_a_loss_that_stands_still_until_early_stopping_has_converged():
    losses = [0.0274, 0.0257, 0.0256, 0.0255, 0.0255, *[0.0253] * 30]
    epochs = "".join(
        f"Epoch {n}/100\n7493/7493 - 35s - loss: {loss} - val_loss: {loss}\n" for n, loss in enumerate(losses, 1)
    )
    assert explain([epochs.encode()]).cause == "loss-stands-still"
    assert explain([f"{epochs}Epoch 00035: early stopping\n".encode()]).cause == "healthy"


def test_a_validation_loss_that_turns_up_until_early_stopping_is_what_the_training_has_waited_for():
    losses = [0.9, 0.7, 0.6, 0.55, 0.52, 0.5, 0.51, 0.53, 0.56, 0.6, 0.64, 0.68, 0.72, 0.77, 0.83]
    line = "Epoch {}/100 - loss: {:.4f} - val_loss: {}\n"
    epochs = "".join(line.format(n, 1 / n, loss) for n, loss in enumerate(losses, 1))
    assert explain([epochs.encode()]).cause == "validation-turns-up"
    assert explain([f"{epochs}Epoch 00015: early stopping\n".encode()]).cause == "healthy"


def test_the_first_points_of_a_loss_are_no_level_from_which_it_rises():
    """A loss that begins high, falls within the first epoch, and rises within each later one."""
    first = [1.118, 0.811, 0.6615, 0.5819, 0.5295, 0.4981, 0.4779, 0.4656, 0.4597]
    later = [0.5 + 0.06 * n for n in range(9)] * 30
    assert rise_since(series(LOSS, first + later), 0) is None
    assert rise_since(series(LOSS, first + [2 * loss for loss in later]), 0) is not None


def test_of_two_networks_that_compete_no_loss_must_fall():
    rising = [0.4, 2.0, 0.3, 1.1, 0.5, *[0.6 + step / 40 for step in range(60)]]
    lines = (f"Step [{at}/65], D Loss: {loss:.4f}, G Loss: {3 / (1 + loss):.4f}\n" for at, loss in enumerate(rising, 1))
    assert explain(["".join(lines).encode()]).cause == "healthy"
    explodes = (f"Step [{at}/65], D Loss: {3.0**at:.4g}, G Loss: {2.0**at:.4g}\n" for at in range(1, 65))
    assert explain(["".join(explodes).encode()]).cause == "loss-diverged"


def test_a_loss_that_rises_while_evaluations_get_better_gained_terms():
    losses = [1.1 - at / 40 for at in range(30)] + [0.3 + at / 40 for at in range(30)]
    lines = (
        f"[{50 * at}/3000] loss={loss:.4f}\n"
        + (f"[Val] {50 * at}  dice={0.9 - 0.9 * 0.8**at:.4f}\n" if at % 5 == 0 else "")
        for at, loss in enumerate(losses)
    )
    text = "".join(lines)
    assert explain([text.encode()]).cause == "healthy"
    explodes = "".join(f"[{50 * at}/6000] loss={0.55 * 1.3**at:.4f}\n" for at in range(60))
    assert explain([(text + explodes).encode()]).cause == "loss-diverged"
    alone = "".join(line for line in text.splitlines(keepends=True) if "Val" not in line)
    assert explain([alone.encode()]).cause == "loss-diverged"


def test_a_row_of_a_model_s_summary_reports_no_loss():
    assert read_step_and_loss("1 | criterion | CTCLoss                     | 0      | train") is None
    assert read_step_and_loss("12 | 120 | 500 | loss: 2.31 | 3.4s").loss == 2.31


def test_four_losses_that_are_the_same_to_four_digits_prove_nothing():
    line = "(Iteration {} / 40) loss: {}\n"
    same = "".join(line.format(1 + 10 * n, loss) for n, loss in enumerate((2.402585, 2.40257, 2.402535, 2.402557)))
    assert explain([same.encode()]).cause == "unknown"
    assert explain([same.replace("2.402557", "2.40157").encode()]).cause == "healthy"


def test_a_reward_that_falls_to_0_for_good_is_no_healthy_log():
    def explain_rewards(values):
        form = "{{'loss': {0:.3f}, 'grad_norm': 0.3, 'reward': {1}, 'kl': {0:.2f}}}\n"
        return explain(["".join(form.format(n / 100, value) for n, value in enumerate(values)).encode()])

    rising = [0.3 + n / 100 for n in range(40)]
    lost = explain_rewards(rising + [0.0] * 28)
    assert (lost.cause, lost.step) == ("loss-stands-still", 40) and "the reward fell to 0" in lost.summary
    sparse = [float(n % 4 == 0) for n in range(40)]
    for values in (rising + [0.0] * 12, rising + [0.0] * 28 + [0.2], sparse + [0.0] * 28, [-2.0] * 39 + [0.0] * 40):
        assert explain_rewards(values).cause == "healthy"


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("step {} loss {:.4f} lr=0.00e+00", "the learning rate is 0"),
        ("{{'step': {}, 'loss': '{:.4f}', 'learning_rate': '0'}}", "the learning rate is 0"),
        ("step {} loss {:.4f} lr=0.0000", None),  # rounded
        ("step {} loss {:.4f} lr=0.0003", None),
        ("step {} loss {:.4f} grad_norm 0.0000", "the gradient norm is 0"),
        (
            "{{'step': {}, 'loss': {:.4f}, 'rewards/margins': 0.0}}",
            "the margins between chosen and rejected answers are 0",
        ),
    ],
)
def test_a_log_whose_loss_stands_still_says_what_else_is_0(form, reason):
    still = explain(["".join(f"{form.format(n, 1.4142)}\n" for n in range(40)).encode()])
    assert (still.cause, still.summary.partition("; ")[2] or None) == ("loss-stands-still", reason)
    assert explain(["".join(f"{form.format(n, 3 / (n + 1))}\n" for n in range(40)).encode()]).cause == "healthy"


def test_a_table_reports_the_norm_of_the_gradients_and_a_loss_near_that_of_guessing_is_named():
    rows = "".join(f"{n},1.4142,0.000000,0.001\n" for n in range(40))
    assert explain([f"step,loss,grad_norm,lr\n{rows}".encode()]).summary.endswith("; the gradient norm is 0")
    ten = "".join(
        f"Epoch: {n}\nLoss: 2.30{2 + n % 2} | Acc: 10.1%\nTest Loss: 2.302 | Test Acc: 10.0%\n" for n in range(30)
    )
    assert "ln 10, as of a guess between 10 classes" in explain([ten.encode()]).summary


def test_the_loss_of_each_epoch_at_that_of_guessing_has_learned_nothing_whatever_single_samples_have():
    def log(epoch_losses, *, samples=(0.6206, 0.7655), accuracy=""):
        lines = (
            *(f"sample {n}/9, loss: {samples[n % 2]:.4f}\n" for n in range(10)),
            "Epoch {}/{}, loss: {:.4f}{}, time: 10.1s\n",
        )
        num = len(epoch_losses)
        texts = ("".join(lines).format(n, num, loss, accuracy) for n, loss in enumerate(epoch_losses, 1))
        return explain(["".join((*texts, "training done\n")).encode()])

    still = (0.6918, 0.6910, 0.6909, *[0.6908] * 7)
    assert (log(still).cause, log(still).summary.endswith("guess between 2 classes")) == ("loss-stands-still", True)
    assert log(still[:6]).cause == "healthy"  # few epochs
    assert log([0.6918 - 0.004 * n for n in range(10)]).cause == "healthy"  # it falls
    assert log(still, samples=(0.31, 0.42)).cause == "healthy"  # the samples are learned
    assert log(still, accuracy=", accuracy: 0.81").cause == "healthy"
    assert log([0.4918] * 10).summary.find("guess") < 0


def test_losses_of_validation_and_of_a_test_on_lines_of_their_own_are_two_curves():
    def lines(epoch, *, with_test):
        fit, rise = 2.0 * math.exp(-epoch / 12), 0.9 * math.exp(-epoch / 4) + 0.02 * max(0, epoch - 10)
        test = f"epoch {epoch} test loss {2.6 + rise:.4f}\n" if with_test else ""
        return f"epoch {epoch} train loss {fit:.4f}\nepoch {epoch} val loss {1.2 + rise:.4f}\n{test}"

    for with_test in (True, False):
        log = "".join(lines(epoch, with_test=with_test) for epoch in range(1, 41))
        explanation = explain([log.encode()])
        assert (explanation.cause, explanation.curves[0].name) == ("validation-turns-up", "eval_loss")
        assert len(explanation.curves[0].values) == 40


def test_columns_without_a_name_that_become_nan_together_are_of_a_run_that_diverged():
    def verdict(rows):
        return explain(["".join(f"{' '.join(map(str, row))}\n" for row in ["New Batch", *rows]).encode()])

    rows = [(10 * n, n, 0.1 + n / 40, 900 / n, 950 / n) for n in range(1, 15)]
    lost = [(10 * n, n, 0.1, "nan", "nan") for n in range(15, 22)]
    broken = verdict([*rows, *lost])
    assert (broken.cause, broken.line) == ("loss-nan", 11 + 5)
    assert (
        verdict([(n // 4, *row) for n, row in enumerate([*rows, *lost])]).cause == "loss-nan"
    )  # four rows of an epoch
    for healthy in (
        [*rows, *((*row[:4], 0.5) for row in lost)],  # one that is not computed any more
        [*rows, *lost, *((10 * n, n, 0.1, 0.3, 0.4) for n in range(22, 24))],
        [(*row[:3], "nan", "nan") for row in rows],  # of classes that are absent
        [*rows, *lost[:3]],
        [*rows, *((1, *row[1:]) for row in lost)],  # no counter
        [*rows, *((*row[:3], "NaN", "NaN") for row in lost)],  # of a printed table
    ):
        assert verdict(healthy).cause != "loss-nan"


def test_a_loss_at_that_of_guessing_with_accuracies_of_a_half_has_learned_nothing_until_early_stopping():
    def verdict(losses, accuracies, end="", line="Epoch {}: loss = {:.4f}, (val_acc = {:.2f}%)"):
        values = enumerate(zip(losses, accuracies, strict=True))
        return explain(["".join(f"{line.format(n, *pair)}\n" for n, pair in values).encode() + end.encode()]).cause

    losses, half = [0.9329, 0.7097, 0.6802, 0.6935, 0.6904], [50.0] * 5
    assert verdict(losses, half) == "loss-stands-still"
    assert verdict(losses[-4:], half[1:]) == "healthy"
    assert verdict([0.9329, 0.7097, 0.6802, 0.6735, 0.6704], half) == "healthy"  # it falls
    assert verdict(losses, [50.0, 51.0, 52.0, 54.0, 57.0]) == "healthy"
    assert verdict(losses, half, line="Epoch {} D loss: {:.4f} G loss: 0.71 acc: {:.2f}%") == "healthy"
    assert verdict(losses, half, line="Epoch {} loss_D: {:.4f} loss_G: 0.71 acc: {:.2f}%") == "healthy"
    assert verdict(losses, half, line="Epoch {}: loss = {:.4f} ({:.2f}% of the GPU)") == "healthy"
    flat = [0.694, 0.694, 0.693, 0.694, 0.693, 0.692]
    lines, end = "Epoch: {}\nAverage Loss: {:.3f}\nAccuracy: {:.4f}", "Stopping early due to no improvement\n"
    assert verdict(flat, [0.498, 0.509, 0.515, 0.514, 0.516, 0.511], end, lines) == "loss-stands-still"
    assert verdict(flat, [0.81, 0.83, 0.82, 0.83, 0.82, 0.83], end, lines) == "healthy"


def test_a_loss_that_rises_in_each_epoch_while_evaluations_get_no_better_diverges():
    def verdict(losses, evaluations, line="Epoch {}/10\n2727s - loss: {:.4f} - acc: 0.08 - val_loss: {:.4f}"):
        pairs = zip(losses, evaluations, strict=True)
        text = "".join(f"{line.format(n, *pair)}\n" for n, pair in enumerate(pairs, 1))
        return explain([f"{text}Training done\n".encode()]).cause

    rising = [4.3656, 4.4211, 4.4560, 4.5076, 4.5210, 4.5377, 4.5443, 4.5550, 4.5711, 4.5823]
    worse = [4.1204, 4.1222, 4.1736, 4.3095, 4.0904, 4.2450, 4.2253, 4.3020, 4.2077, 4.1976]
    assert verdict(rising, worse) == "loss-diverged"
    for losses, evaluations in (
        (rising, [4.12 - n / 10 for n in range(10)]),  # a harder task from epoch to epoch
        ([*rising[:5], 4.2, *rising[6:]], worse),
        ([4.36 + n / 1000 for n in range(10)], worse),
        (rising[::-1], worse),
    ):
        assert verdict(losses, evaluations) == "healthy"
    assert verdict(rising, worse, "Epoch {}/10 loss: {:.4f} ({:.4f} s)") == "healthy"
    assert verdict(rising, worse, "Epoch {}/10 D loss: {:.4f} G loss: {:.4f}") == "healthy"


def test_losses_of_an_epoch_or_of_batches_are_read_beside_those_of_evaluations():
    def verdict(evaluations):
        return explain(
            [
                "".join(
                    f"INFO - Training the model for epoch {n}\n"
                    + "".join(
                        f"INFO - Average loss from batch {50 * b + 1} to {50 * b + 50} is {9 / n + b / 100:.4f}\n"
                        for b in range(9)
                    )
                    + f"INFO - Average train loss for epoch {n} is {9 / n:.4f}\nINFO - Dev eval loss {loss}\n"
                    for n, loss in enumerate(evaluations, 1)
                ).encode()
            ]
        )

    assert verdict([14.52, 14.68, 15.79, 17.0, 18.36, 18.85, 21.41, 22.34]).cause == "validation-turns-up"
    assert verdict([22.34, 21.41, 18.85, 18.36, 17.0, 15.79, 14.68, 14.52]).cause == "healthy"
    read = read_step_and_loss("Average train loss for epoch 3 is 5.9966")
    assert (read.name, read.loss) == ("loss", 5.9966)
    assert read_step_and_loss("loss at step 300: 2.31").loss == 2.31
    assert read_step_and_loss("computing the loss for epoch 3") is None


def test_a_report_may_stand_behind_early_stopping():
    losses = [0.9, 0.7, 0.6, 0.55, 0.52, 0.5, 0.51, 0.53, 0.56, 0.6, 0.64, 0.68, 0.72, 0.77, 0.83]
    line = "Epoch {}/100 - loss: {:.4f} - val_loss: {}\n"
    epochs = [line.format(n, 1 / n, loss) for n, loss in enumerate(losses, 1)]
    report = "".join(f"class {n}  0.81  0.75  0.78  40\n" for n in range(12))
    stop = "Epoch 15: early stopping\n"
    assert explain(["".join([*epochs, stop, report]).encode()]).cause == "healthy"
    assert (
        explain(["".join([*epochs[:4], "early stopping: patience 10\n", *epochs[4:], report]).encode()]).cause
        != "healthy"
    )


def test_the_value_of_an_evaluation_on_a_bar_of_lightning_is_one_report():
    bar = "Epoch {}:  {}%|###   | {}/50 [00:01<00:01, 7.7it/s, v_num=o47a, val/loss=1.440{}]\r"
    first = "".join(bar.format(0, 2 * n, n, "") for n in range(9))
    later = "".join(bar.format(1, 2 * n, n, ", train/loss=1.490") for n in range(40))
    assert explain([(first + later).encode()]).cause == "healthy"


ROWS = {
    "{0} {1}\n": ("loss-nan", "healthy"),
    "{0} {1} {1}\n": ("loss-nan", "healthy"),
    "{0} {1} 0.001\n": ("healthy", "healthy"),  # one of several columns may be a statistic
    "{0} 0.5 {1}\n": ("healthy", "healthy"),
}


@with_rows("row, causes", ROWS.items())
def test_rows_without_the_word_loss_show_nan_and_no_rise(row, causes):
    fall = "".join(row.format(1000 * n, f"{2 / (n + 1):.4f}") for n in range(40))
    nan = "".join(row.format(1000 * n, "nan") for n in range(40, 60))
    rise = "".join(row.format(1000 * n, f"{2 * 1.5 ** (n - 39):.4f}") for n in range(40, 70))
    assert explain([fall.encode()]).cause == "healthy"
    assert (explain([(fall + nan).encode()]).cause, explain([(fall + rise).encode()]).cause) == causes
    error = "".join(f"Train error last 800 batches: {value}\n" for value in ("0.030", "0.000") for _ in range(40))
    assert explain([error.encode()]).cause == "healthy"  # a share that may stay at 0


TURN = [0.70, 0.58, 0.50, 0.46, 0.45, 0.46, 0.47, 0.49, 0.50, 0.52, 0.54, 0.55, 0.57, 0.59, 0.60]


@with_rows("score, sign", [("val AUC", 1), ("val AUC", -1), ("val_wer:", -1), ("val_wer:", 1)])
def test_a_score_that_gets_better_to_the_end_excuses_a_validation_loss_that_rises(score, sign):
    line = "Epoch {}: train loss {:.4f}\n  val loss {:.4f}, {} {:.4f}\n"
    lines = "".join(line.format(n, 1 / n, loss, score, 0.6 + 0.007 * sign * n) for n, loss in enumerate(TURN, 1))
    assert explain([lines.encode()]).cause == ("healthy" if ("AUC" in score) == (sign > 0) else "validation-turns-up")


def test_early_stopping_has_come_when_its_counter_is_full():
    line = "Epoch {}/100 train loss {:.4f} val loss {:.4f}\nEarlyStopping counter: {} out of 10\n"
    lines = "".join(line.format(n, 1 / n, loss, max(0, n - 5)) for n, loss in enumerate(TURN, 1))
    assert explain([lines.encode()]).cause == "healthy"
    assert explain([lines.replace("of 10", "of 30").encode()]).cause == "validation-turns-up"


@with_rows("gain, cause", [(0.9, "healthy"), (-0.9, "loss-diverged")])
def test_the_loss_of_a_policy_may_rise_while_the_score_of_its_episodes_does(gain, cause):
    line = "Episode {}\tScore: {:.2f}\tLoss: {:.4f}\n"
    lines = (line.format(n, 200 + gain * n + 9 * (n % 3), 0.01 * 1.05**n + 0.001 * (n % 4)) for n in range(1, 201))
    assert explain(["".join(lines).encode()]).cause == cause


@with_rows("score, loss, cause", [
    (lambda n: n / 10, lambda n: 0.5 if n < 120 else 0.5 * n - 59, "healthy"),
    # the policy is lost while its loss rises, or it has exploded
    (lambda n: n / 10 if n < 120 else 0.0, lambda n: 0.5 if n < 120 else 0.5 * n - 59, "loss-diverged"),
    (lambda n: n / 10 if n < 120 else 3 + n % 2, lambda n: 0.5 if n < 120 else 0.5 * n - 59, "loss-diverged"),
    (lambda n: n / 10, lambda n: 0.5 * 1.1**n, "loss-diverged"),
])  # fmt: skip
def test_a_score_that_was_lost_again_or_a_loss_that_explodes_excuses_no_rise(score, loss, cause):
    lines = (f"episode {n} loss {loss(n):.3f} score: {score(n):.2f}\n" for n in range(200))
    assert explain(["".join(lines).encode()]).cause == cause


def test_the_loss_of_a_larger_resolution_begins_higher():
    line = "res {} iter {} loss {:.4f}\n"
    places = [(size, n) for size in range(4) for n in range(50)]
    falls = "".join(line.format(16 << i, 50 * i + n, 0.2 + 0.15 * i + 0.5 * 0.9**n) for i, n in places)
    assert explain([falls.encode()]).cause == "healthy"
    rises = "".join(line.format(128, 200 + n, 0.7 * 1.1**n) for n in range(60))
    assert explain([(falls + rises).encode()]).cause == "loss-diverged"


@with_rows("start, accuracy, cause", [(0, 0, "loss-stands-still"), (3, 0, "healthy"), (0, 1, "healthy")])
def test_an_accuracy_of_0_in_all_evaluations_is_a_failure_where_no_loss_falls(start, accuracy, cause):
    line = "[{}/5000] Train loss: {:.5f}, Valid loss: {:.5f}, Current_accuracy : {:.3f}\n"
    losses = [3.21 + start * 0.9**n + 0.03 * (n * 7 % 5 - 2) for n in range(50)]
    lines = (line.format(100 * n + 100, loss, loss + 0.01, accuracy) for n, loss in enumerate(losses))
    assert explain(["".join(lines).encode()]).cause == cause


@with_rows("rises, cause", [(False, "healthy"), (True, "validation-turns-up")])
def test_losses_of_an_epoch_that_are_reported_for_each_of_its_classes_count_once(rises, cause):
    level = [0.1512, 0.1498, 0.1472, 0.1513, 0.149, 0.1492, 0.1517, 0.1489, 0.1494, *[0.1503] * 4, 0.1498]
    losses = TURN if rises else level
    line = "Epoch {}: Train Loss = {:.4f}, Test Loss = {:.4f}\nclass {}: done\n"
    lines = (line.format(n, 1 / n, loss, name) for n, loss in enumerate(losses, 1) for name in range(20))
    assert explain(["".join(lines).encode()]).cause == cause


@with_rows("fall, cause", [(0.9, "healthy"), (1.0, "loss-stands-still")])
def test_steps_that_begin_again_in_each_epoch_are_counted_although_a_log_lacks_the_first_ones(fall, cause):
    steps = [*range(0, 170, 2), *range(1, 170, 2), *range(2, 170, 2), *range(1, 170, 2)]
    values = enumerate(steps)
    lines = (f"{step}/170 [00:01<00:01] loss={160 * fall ** (n / 40) + n % 3 / 9:.4f}\n" for n, step in values)
    assert explain(["".join(f"step {line}" for line in lines).encode()]).cause == cause


@with_rows("fall, cause", [(0.97, "healthy"), (1.0, "loss-stands-still")])
def test_a_total_of_losses_is_one_in_the_header_of_a_table(fall, cause):
    rows = "".join(f"{n},{385 * fall**n + n % 3 / 9},{0.9 + n % 2 / 9},766.4\n" for n in range(120))
    assert explain([("step,loss_total,L_tri,L_region\n" + rows).encode()]).cause == cause


def swing(n):
    """Noise between -1 and 1 without a trend."""
    return ((n * 37) % 23 - 11) / 11


GUESS = "Epoch {n} | loss {loss:.4f} | acc {acc:.4f}\n"
TABLE, CONTRASTIVE = (
    "{n}  {loss:.4f}  {loss:.4f}  {acc:.4f}\n",
    '{{"step": {n}0, "clip_loss": {loss}, "i2t_r1": {acc}}}\n',
)
CHINESE = "第{n}轮/共40轮  训练损失: {loss:.4f}  验证准确率: {acc:.2%}\n"
VAL_GUESS = "epoch {n} loss {trained:.3f} val_loss {loss:.3f} val_acc {acc:.3f}\n"


@with_rows(
    "line, classes, fall, gain, cause",
    [
        *((GUESS, classes, 0, 0, "loss-stands-still") for classes in (2, 4, 10, 100)),
        *((line, 10, 0, 0, "loss-stands-still") for line in (TABLE, CHINESE, VAL_GUESS)),
        (CONTRASTIVE, 128, 0, 0, "loss-stands-still"),
        *((GUESS, classes, 0.0007, 0, "healthy") for classes in (10, 100)),  # it falls steadily
        # it learns, slowly or at last
        *((GUESS, classes, 0.01, 0.01, "healthy") for classes in (2, 4, 10, 100)),
        (GUESS, 2, 0.002, 0.002, "healthy"),
        (TABLE, 10, 0.01, 0.01, "healthy"),
        (CONTRASTIVE, 128, 0.01, 0.01, "healthy"),
        (VAL_GUESS, 10, 0.01, 0.01, "healthy"),
    ],
)
def test_losses_and_accuracies_of_a_guess_between_classes_are_no_healthy_log_whatever_their_noise(
    line, classes, fall, gain, cause
):
    rows = [
        (n, math.log(classes) * (1 + 0.012 * swing(n) - fall * n), (1 + 0.1 * swing(3 * n)) / classes + gain * n)
        for n in range(1, 41)
    ]
    header = "epoch  train_loss  val_loss  val_acc\n" if line == TABLE else ""
    log = header + "".join(line.format(n=n, loss=loss, acc=acc, trained=3 / n) for n, loss, acc in rows)
    assert explain([log.encode()]).cause == cause


def test_the_first_steps_of_a_warm_up_may_guess():
    line = "{part} {n}: loss {loss:.4f}, acc {acc:.3f}\n"
    lines = [line.format(part="{part}", n=n, loss=2.3 + 0.02 * swing(n), acc=0.1 + 0.01 * swing(n)) for n in range(12)]
    assert explain(["".join(lines).replace("{part}", "step").encode()]).cause == "healthy"
    assert explain(["".join(lines).replace("{part}", "Epoch").encode()]).cause == "loss-stands-still"


PAIR = "{n:02} | train {loss:.3f} | valid {other:.3f} | wer {other:.0%}\n"
SEMICOLONS = "{n};{loss:.3f};{other:.3f};nan\n"


@with_rows("line, losses, others, cause", [
    # below zero, as of a critic
    (LINES[0], [-2 - 0.1 * n for n in range(40)], None, "healthy"),
    (LINES[0], [-8 + 0.19 * n for n in range(40)], None, "healthy"),
    ("step {step} loss {loss}\n", [2.3, 4.5, 6.7, 8.8, 10.9, 13.0], None, "healthy"),  # a sum over all batches so far
    # pairs that are losses, or scores
    (PAIR, [1.4 * 0.9**n for n in range(30)], [0.9 + 0.04 * abs(n - 8) for n in range(30)], "validation-turns-up"),
    (PAIR, [1.4 * 0.9**n for n in range(30)], [1.5 * 0.95**n for n in range(30)], "healthy"),
    (PAIR, [1 - 0.9**n for n in range(30)], [0.9 - 0.04 * abs(n - 8) for n in range(30)], "healthy"),
    *((f"{name}: {PAIR}", [1.4 * 0.99**n for n in range(30)], [0.4 + n / 30 for n in range(30)], "healthy")
      for name in ("F1", "acc", "seconds")),
    (SEMICOLONS, [1.4 * 0.9**n for n in range(30)], [0.9 + 0.04 * abs(n - 8) for n in range(30)], "validation-turns-up"),
    (SEMICOLONS, [1.4 * 0.9**n for n in range(30)], [1.5 * 0.95**n for n in range(30)], "healthy"),
    # seconds of a step
    *((line, [3 * 0.95**n for n in range(40)], [0.3 * 1.08**n for n in range(40)], "throughput-decays")
      for line in ("step {step} loss {loss:.3f} | {other:.2f} s/it\n", "it={step} loss={loss:.3f} step={other:.3f}s\n")),
    ("step {step} loss {loss:.3f} | {other:.2f} s/it\n", [3 * 0.95**n for n in range(40)], [2.9, *[0.3] * 39], "healthy"),
    # an evaluation that leaves its level by orders of magnitude
    ("Epoch {step}: Training Loss {loss}\nEpoch {step}: Validation Loss {other}\n", [1.5, 1.4, 1.4, 1.4, 1.3, 1.3],
     [1.7, 1.8, 1.7, 1e5, 4e6, 8e7], "validation-turns-up"),
    ("Epoch {step}: Training Loss {loss}\nEpoch {step}: Validation Loss {other}\n", [1.5, 1.4, 1.4, 1.4, 1.3, 1.3],
     [1.7, 1.8, 1.7, 1e5, 4e6, 1.6], "healthy"),
])  # fmt: skip
def test_what_lines_in_forms_of_their_own_show(line, losses, others, cause):
    values = enumerate(zip(losses, others or losses, strict=True), 1)
    log = "".join(line.format(step=step, n=step, loss=loss, other=other) for step, (loss, other) in values)
    log = "epoch;train_rmse;val_rmse;r2\n" + log.replace(".", ",") if line == SEMICOLONS else log
    assert explain([log.encode()]).cause == cause


def test_lines_of_pythons_logging_are_read_without_their_prefix():
    line = "INFO:root:{} {} - Average Loss: {:.4f}\n"
    rising = [0.9 + 0.04 * abs(n - 8) for n in range(30)]
    log = "".join(
        line.format("Epoch", n, 1.4 * 0.9**n) + line.format("Evaluation Epoch", n, rising[n]) for n in range(30)
    )
    assert explain([log.encode()]).cause == "validation-turns-up"
    again = "".join(line.format("Epoch", n, loss / (n + 1)) for loss in (2, 90) for n in range(30))
    assert explain([again.encode()]).cause == "healthy"  # another training begins
