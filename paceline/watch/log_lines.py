"""
What one line of a training log tells: step, steps in all, loss, speed, as the usual trainers print them. Pure.

Of nanochat, nanoGPT, Hugging Face Trainer, Lightning, litgpt, DeepSpeed, Megatron, torchtitan and paceline; which of them it is,
only where a line cannot be another's. Steps and losses are found as paceline.explain finds them.
"""

import math
import re
from dataclasses import dataclass, field

from paceline.explain.reader_prefix import plain, split_prefix
from paceline.explain.reader_progress import BAR, find_mark, take_bars

WORTH_A_LOOK = re.compile(
    rb"(?i)loss|step|iter|it/s|s/it|bpb|tok|epoch|\d\s*/\s*\d|%\|"
)  # a line without any of these tells nothing here
NUMBER = r"(?P<value>[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|(?:nan|inf)\b)"
BETWEEN = r"['\"]?\s*[:=|]?\s*['\"]?"
OF = re.compile(
    r"(?i)(?<![a-z])(?:global[_ ]?steps?|steps?|iter(?:ation)?s?|it|batch)['\"]?\s*[:=# \[(]{0,3}\s*\d[\d,]*\s*/\s*(?P<of>\d[\d,]*)"
)
BAR_SPEED = re.compile(r"(?P<value>[\d.]+)\s*(?P<unit>it/s|s/it|steps?/s)")
TRAINING_BAR = re.compile(r"(?i)\b(?:epoch|train|step|iter)|^\W*$")
EPOCH_BAR = re.compile(r"(?i)\bepoch:? (?P<epoch>\d+)(?:/\d+)?$")
BEGINS_WITH_STEP = re.compile(r"(?i)^\W*(?:global[_ ]?)?(?:step|iter(?:ation)?)\b")
SUMMARY = re.compile(r"train_runtime")  # its loss is the mean of all
MEASURES = (  # name, what such a line has in lower case, how it is written
    ("loss", "loss", rf"(?<![a-z_])(?:train[_ /]?|lm[_ ]|running[_ ])?loss(?:[_ ](?:train|step))?{BETWEEN}{NUMBER}"),
    (
        "val_loss",
        "val",
        rf"(?:(?<![a-z])(?:val(?:idation)?|eval)[_ /]?loss|loss train: \S+ val){BETWEEN}{NUMBER}",
    ),
    ("val_bpb", "bpb", rf"(?:val(?:idation)?[_ ]?)?bpb{BETWEEN}{NUMBER}"),
    ("tok_per_sec", "tok", rf"(?<![a-z])tok(?:ens)?[/_ ](?:per_)?s(?:ec(?:ond)?)?{BETWEEN}{NUMBER}"),
    ("tok_per_sec", "tps", rf"(?<![a-z])tps{BETWEEN}{NUMBER}"),
    ("grad_norm", "norm", rf"(?<![a-z])(?:grad(?:ient)?[_ ]norm|gnorm){BETWEEN}{NUMBER}"),
    ("lr", "lr", rf"(?<![a-z])lr{BETWEEN}\[?{NUMBER}"),
    ("lr", "learning", rf"learning[_ ]rate{BETWEEN}{NUMBER}"),
    ("mfu_percent", "mfu", rf"(?<![a-z])mfu{BETWEEN}{NUMBER}\s*%?"),
    ("step_ms", "dt", rf"(?<![a-z])dt{BETWEEN}{NUMBER}\s?(?P<unit>ms|s)\b"),
    ("step_ms", "time", rf"(?:(?:iter|step|batch)[ _]time|, time){BETWEEN}{NUMBER}\s?(?P<unit>ms|s)\b"),
    ("step_ms", "(ms)", rf"elapsed time per iteration \((?P<unit>ms)\){BETWEEN}{NUMBER}"),
    ("step_ms", "(s)", rf"(?<![a-z])(?:iter|step) time \((?P<unit>s)\){BETWEEN}{NUMBER}"),
)
PATTERNS = tuple((name, needle, re.compile(pattern, re.IGNORECASE)) for name, needle, pattern in MEASURES)
OURS = re.compile(r"\| (?P<ms>[\d,]+) ms \| (?P<speed>[\d,]+) tok/s")
FRAMEWORKS = (
    ("paceline", OURS),
    ("nanochat", re.compile(r"\blrm: |Validation bpb:")),
    ("litgpt", re.compile(r"Epoch \d+ \| iter \d+ step \d+ \|")),
    ("Megatron", re.compile(r"iteration +\d+/ *\d+ \| consumed samples:")),
    (
        "DeepSpeed",
        re.compile(r"\[DeepSpeed\]|\[deepspeed\]|steps: \d+ loss: .*iter time \(s\)|micro_step=\d+/global_step="),
    ),
    ("torchtitan", re.compile(r"\btps: [\d,]+ +tflops:")),
    ("nanoGPT", re.compile(r"iter \d+: loss [\d.]+, time [\d.]+ms")),
    ("Hugging Face Trainer", re.compile(r"\{'loss': .*'epoch': |'train_runtime': ")),
    ("Lightning", re.compile(r"Epoch \d+: +\d+%\|.*(?:v_num=|_step=)|LightningModule|`Trainer\.fit` stopped")),
)


@dataclass(frozen=True)
class LineValues:
    """step and num_steps are None where the line does not say; by_bar: a progress bar says it. The loss may be no number."""

    step: int | None = None
    num_steps: int | None = None
    values: dict[str, float] = field(default_factory=dict)
    by_bar: bool = False


def read_line(raw: str) -> LineValues | None:
    """None for a line that tells of no progress."""
    line = split_prefix(plain(raw)).text
    if SUMMARY.search(line):
        return None
    text, _ = take_bars(line)
    mark, values = find_mark(text), measures_of(line)
    if mark is not None and mark.loss is not None and "val_loss" not in values:
        values.setdefault("loss", mark.loss)
    bar = bar_of(line)
    step, num_steps = (mark.step if mark else None), None
    if bar is not None:
        step, num_steps = bar.step, bar.num_steps
        values = {**bar.values, **values}
    elif (of := OF.search(text)) is not None:
        num_steps = whole(of["of"])
    elif not values and not BEGINS_WITH_STEP.search(text):
        return None  # "total steps: 1000"
    values = {name: value for name, value in values.items() if math.isfinite(value) or name == "loss"}
    return LineValues(step, num_steps, values, bar is not None) if values or step is not None else None


def bar_of(text: str) -> LineValues | None:
    """The last progress bar on the line, if it may be that of a training."""
    bars = list(BAR.finditer(text)) if "%|" in text else []
    if not bars or (at := whole(bars[-1]["at"])) is None or not (of := whole(bars[-1]["of"])):
        return None
    before = text[: bars[-1].start("percent")].strip(" :")
    if before and not TRAINING_BAR.search(before):
        return None
    values = {}
    if (speed := BAR_SPEED.search(bars[-1][0])) is not None and float(speed["value"]) > 0:
        rate = float(speed["value"])
        values["step_ms"] = 1000 * rate if speed["unit"] == "s/it" else 1000 / rate
    if (epoch := EPOCH_BAR.search(before)) is not None:  # counts anew in each epoch
        return LineValues(int(epoch["epoch"]) * of + at, None, values, True)
    return LineValues(at, of, values, True)


def measures_of(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    lowered = text.lower()
    for name, needle, pattern in PATTERNS:
        if needle in lowered and (match := pattern.search(text)) is not None:
            value = float(match["value"].replace(",", ""))
            found[name] = value * 1000 if match.groupdict().get("unit") == "s" else value
    if (ours := OURS.search(text)) is not None:
        found |= {"step_ms": float(ours["ms"].replace(",", "")), "tok_per_sec": float(ours["speed"].replace(",", ""))}
    if "mfu_percent" in found:
        found["mfu"] = round(found.pop("mfu_percent") / 100, 6)
    return found


def framework_of(text: str) -> str | None:
    return next((name for name, pattern in FRAMEWORKS if pattern.search(text)), None)


def whole(text: str) -> int | None:
    digits = text.replace(",", "")
    return int(digits) if digits.isdigit() and len(digits) <= 15 else None
