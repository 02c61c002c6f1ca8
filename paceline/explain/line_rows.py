"""
What a line reports without a name before each value: rows of tables, speeds, and counters and values in forms of their own.
"""

import math
import re
from collections.abc import Sequence

from paceline.explain.line_measures import ERROR_NAME, ERROR_WORDS, NUMBER_CELL, OTHER_LOSS, StepLoss, parse_count
from paceline.explain.lines import has_word

UNIT = re.compile(r" \((?:s|sec|ms|min|h|%|nats|bits|[KMG]i?B|(?:it|tok)?/s)\)")  # behind the name of a column
COLUMN_GAP = re.compile(r"\s*[|│┃]\s*|\t+|\s{2,}")
TABLE_EDGES = " \t|│┃#"
LOSS_COLUMN = re.compile(rf"(?i)(?:^|[\s_/-])(?:loss|{ERROR_NAME})(?:_(?:tra?i?n|total|mean|avg)| [A-Z0-9]+)?$")
# of XGBoost and LightGBM: [5] train-rmse:0.25 eval-rmse:0.68, and [5] training's l2: 0.25 valid's l2: 0.68
BOOSTING = re.compile(r"\[(?P<step>\d{1,9})\](?=\s{1,8}[\w ]{1,40}?(?:-|'s )[\w@.]{1,40}: ?[-\d.ni])")
BOOSTING_VALUE = re.compile(
    r"(?P<part>[\w ]{1,40}?)(?:-|'s )(?P<name>[\w@.]{1,40}): ?(?P<value>[-+]?(?:\d\S{,30}|nan|inf))(?=\s|$)"
)
# measures that are losses; a rate of errors is none: it may stay the same, or 0, while the model learns
BOOSTING_LOSS = re.compile(
    r"(?:\w*logloss|l[12]|rmse|rmsle|mae|mape|mphe|cross_entropy|\w*nloglik|huber|quantile|poisson|tweedie)$"
)
COUNTED = re.compile(  # stable-baselines3's table, DeepSpeed's timer, CatBoost, MLPerf, mmcv's bar, a step and a value
    r"\| +total_timesteps +\| +(?P<step>\d+) +\||.{0,80}\[timer\.py:\d+:stop\] \d+/(?P<at>\d+), "
    r"|(?P<iteration>\d{1,9}):\s+learn: (?P<learn>\S+)(?:\s+test: (?P<test>\S+))?\s"
    r"|.{0,60}?\b(?:Test|Valid(?:ation)?|Val|Eval|Train): ?\[ *(?P<place>\d{1,9})/\d+\]"
    r"|:{0,3}MLLOG .{0,400}?\"epoch_num\": (?P<epoch>\d{1,9})\b"
    r"|.{0,60}?\b[Pp]rogress: (?P<done>\d{1,9})/\d+ steps\b"
    r"|.*\[[> ]*\] \d+/\d+, \d+\.\d task/s, elapsed: "  # of an evaluation, whose count is no step of training
    r"|(?:s:)?(?P<row>\d{1,9}) (?P<part>train |val |hella |trl:|tel:|eval:)"  # build-nanogpt, llm.c
    r"(?P<number>\d+\.\d+(?:e[-+]?\d+)?|nan|inf)(?: lr:\S+ norm:\S+)?$"
    r"|(?P<n>\d{1,9})[ \t]+(?P<value>-?\d+\.\d+(?:e[-+]?\d+)?|nan)$"
)
# names of columns that end at the same place as their values
FIRST_NAMES = re.compile(r"(?i)^(?P<step>\W*(?:step|iter|epoch)) (?=\w+_\w+ )")
SCORE_COLUMN = re.compile(r"(?i)(?:val\w*|test|dev|eval)[_ /.-]acc(?:uracy)?")
STEP_COLUMN = re.compile(r"(?i)(?:global[_ ])?(?:step|iter(?:ation)?|epoch)s?")
RATE = r"(?<![a-z])(?:tok(?:en)?s?|samples?|imgs?|images|seqs?|frames) ?(?:/|_per_| per )s(?:ec(?:ond)?)?(?![a-z])"
COUNT = r"(?P<value>\d[\d,]*(?:\.\d+)?)"
SPEEDS = (re.compile(rf"(?i){RATE}['\"]?\s*[:=]?\s*{COUNT}"), re.compile(rf"(?i){COUNT} ?{RATE}"))
STEP_TIME = re.compile(
    r"(?i)(?<![\w.])(?P<value>\d+\.\d+) ?s/(?:it|step)\b|(?<![a-z_])step(?:[_ ]time)?[=:] ?(?P<time>\d+\.\d+) ?s\b"
)
ROW_STARTS = frozenset("0123456789-nNi")  # 3/30, nan, NaN, No log, inf


def read_columns(text: str) -> tuple[str, ...]:
    """The names of a table's columns; none if no column is a loss."""
    lowered = text.lower()
    has_loss = "loss" in lowered or has_word(lowered, ERROR_WORDS)
    text = UNIT.sub("", text) if has_loss and "(" in text else text
    text = FIRST_NAMES.sub(r"\g<step>  ", text) if has_loss else text
    names = split_cells(text) if has_loss and not has_word(text, ":={(*") else ()
    # in a run's own code, which some trainers print: return loss, accuracy
    is_header = len(names) > 1 and all(
        name.strip("_")[:1].isalpha() and not name.startswith("return ") for name in names
    )
    return names if is_header and any(map(LOSS_COLUMN.search, names)) else ()


def split_cells(text: str) -> tuple[str, ...]:
    """The cells of a table's row, between bars, tabs, spaces or, where there are none of them, commas; or semicolons."""
    if ";" in text:  # with decimal commas
        return tuple(cell.strip() for cell in text.replace(",", ".").split(";"))
    cells = tuple(filter(None, COLUMN_GAP.split(text.strip(TABLE_EDGES))))
    return tuple(map(str.strip, text.split(","))) if len(cells) == 1 and "," in text else cells


def read_row(text: str, columns: Sequence[str]) -> StepLoss | None:
    """The step and a loss in a row of a table: the first loss that is not finite, of training if there is one."""
    if not columns or text.strip(TABLE_EDGES)[:1] not in ROW_STARTS:
        return None
    cells = split_cells(text)
    # a row of pandas, whose index has no name and whose NaN is an empty cell; a last cell that is a word is a unit
    is_frame = len(cells) == len(columns) + 1 and NUMBER_CELL.fullmatch(cells[-1]) is not None
    row = {name: cell for name, cell in zip(columns, cells[is_frame:], strict=False) if cell != "NaN" or not is_frame}
    losses = {name: float(row[name]) for name in row if LOSS_COLUMN.search(name) and NUMBER_CELL.fullmatch(row[name])}
    if len(cells) < len(columns) or not losses:
        return None
    training = {name: loss for name, loss in losses.items() if not OTHER_LOSS.search(name[:-4])} or losses
    name = next((name for name, loss in training.items() if not math.isfinite(loss)), next(iter(training)))
    counters = sorted(filter(STEP_COLUMN.fullmatch, row), key=lambda name: name.lower().startswith("epoch"))
    counts = [parse_count(row[name].partition("/")[0]) for name in counters]
    names = ("reward", "grad_norm", next(filter(SCORE_COLUMN.fullmatch, row), ""))
    others = (row.get(name, "") for name in names)
    reward, norm, score = (
        float(cell) if NUMBER_CELL.fullmatch(cell) and "n" not in cell.lower() else None for cell in others
    )
    step = next((count for count in counts if count is not None), None)
    held_out = next((loss for other, loss in losses.items() if other not in training and math.isfinite(loss)), None)
    return StepLoss(step, training[name], grad_norm=norm, name=name, held_out=held_out, reward=reward, score=score)


def read_counter(text: str) -> StepLoss | None:
    """The step on a line that reports one in a form of its own, and NaN where the value beside it is NaN."""
    if (match := COUNTED.match(text)) is None:
        return None
    counts = match.group("step", "at", "n", "iteration", "place", "epoch", "done", "row")
    step = parse_count(next(filter(None, counts), ""))
    if match["part"]:
        value, name = float(match["number"]), "loss" if match["part"].startswith("tr") else "eval_loss"
        if (is_score := match["part"] in ("hella ", "eval:")) or value <= 1:  # which may be an accuracy
            return StepLoss(step, None, score=value if is_score else None)
        return StepLoss(step, value, name=name)
    if match["learn"]:
        values = match.group("learn", "test")
        learn, test = (float(value) if value and NUMBER_CELL.fullmatch(value) else None for value in values)
        return StepLoss(step, learn, held_out=test)
    return StepLoss(step, math.nan if match["value"] == "nan" else None)


def read_boosting(text: str) -> StepLoss | None:
    """The iteration of a line of XGBoost or LightGBM, with the error on what is trained on and on the last other set."""
    if (match := BOOSTING.match(text)) is None:
        return None
    values = [item for item in BOOSTING_VALUE.finditer(text, match.end()) if NUMBER_CELL.fullmatch(item["value"])]
    named = sorted(
        (item for item in values if BOOSTING_LOSS.match(item["name"])),
        key=lambda item: math.isfinite(float(item["value"])),
    )
    name = named[0]["name"] if named else None  # of one that is not finite, or the first one
    losses = {item["part"].strip(): float(item["value"]) for item in values if item["name"] == name}
    trained = next((part for part in losses if part.startswith(("train", "learn"))), None)
    held_out = next((losses[part] for part in reversed(losses) if part != trained), None)
    step = parse_count(match["step"])
    if trained is None or (held_out is not None and not math.isfinite(held_out) and math.isfinite(losses[trained])):
        return StepLoss(step, held_out, name="eval_loss")
    return StepLoss(step, losses[trained], held_out=held_out)


def read_speed(text: str) -> float | None:
    """The throughput that a line reports, or else its steps per second."""
    match = next(filter(None, (pattern.search(text) for pattern in SPEEDS)), None)
    if match is None and (time := STEP_TIME.search(text)) and (seconds := float(time["value"] or time["time"])):
        return 1 / seconds
    return float(match["value"].replace(",", "")) if match else None
