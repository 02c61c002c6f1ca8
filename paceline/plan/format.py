"""
A forecast on one screen: memory by part with a bar against the device, time and cost with their ranges, what they stand on.
"""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from paceline.plan.forecast import Forecast
from paceline.plan.planner import Plan, plan_lines
from paceline.plan.range import Range
from paceline.plan.run_cost import RunCost
from paceline.plan.step_time import StepTime
from paceline.units import format_bytes, format_count, format_duration, format_mfu

BAR_WIDTH = 44
BEFORE_BAR = 50  # columns
EIGHTHS = " ▏▎▍▌▋▊▉█"
NAMES = {
    "weights": "weights",
    "masters": "fp32 masters",
    "states": "optimizer states",
    "communication": "communication buffers",
    "gradients": "gradients",
    "activations": "activations",
    "loss": "loss and logits",
    "working": "temporaries",
}
FULLEST = {
    "forward": "in the last layer's forward",
    "loss": "in the loss",
    "backward": "in a layer's backward",
    "optimizer": "in the optimizer's update",
    "evaluation": "in an evaluation",
}


def format_forecast(forecast: Forecast, *, width: int) -> str:
    """width: columns; longer lines are broken and go on under their first word."""
    blocks = [
        plan_lines(forecast.plan),
        memory_lines(forecast.plan, bar_width=max(10, min(BAR_WIDTH, width - BEFORE_BAR))),
        time_lines(forecast),
        [f"assumed {line}" if not i else f"        {line}" for i, line in enumerate(assumed_lines(forecast))],
    ]
    return "\n\n".join("\n".join(broken(line, width) for line in block) for block in blocks)


def broken(line: str, width: int) -> str:
    return line if len(line) <= width else textwrap.fill(line, width, subsequent_indent=" " * 10)


def memory_lines(plan: Plan, *, bar_width: int) -> Iterator[str]:
    """One line for each part, its bar beginning where the one above ends: together they are the device."""
    memory = plan.memory
    need, card = memory["process_bytes"]["expected"], memory["card_bytes"]
    device = "GPU" if plan.device == "cuda" else "process"
    yield f"memory  of each {device} at its fullest: {FULLEST[memory['peak_phase']]}"
    scale = card or need
    start = 0.0
    for name, size in (*named_parts(plan), *([("free", card - need)] if card and card > need else [])):
        bar = waterfall(start / scale, (start + size) / scale, width=bar_width, filled=name != "free")
        yield f"        {name:<25}{format_bytes(size):>8}  {100 * size / scale:3.0f} %  {bar}".rstrip()
        start += size
    yield f"        {'needed':<25}{format_bytes(need):>8}  {needed_words(plan)}"


def named_parts(plan: Plan) -> Iterator[tuple[str, float]]:
    memory = plan.memory
    for name, size in memory["parts"].items():
        if size >= 0.001 * memory["process_bytes"]["expected"]:
            yield NAMES[name], size
    beside = memory["process_bytes"]["expected"] - sum(memory["parts"].values())
    yield "CUDA, kernels, fragments" if plan.device == "cuda" else "Python, PyTorch, copies", beside


def waterfall(start: float, end: float, *, width: int, filled: bool) -> str:
    """From start to end, shares of width, in eighths of a character."""
    first, last = (round(8 * width * min(1.0, share)) for share in (start, end))
    if not filled:
        return " " * -(-first // 8) + "·" * (width - -(-first // 8))
    whole = " " * (first // 8)
    left = first // 8 * 8
    return whole + "█" * ((last - left) // 8) + (EIGHTHS[(last - left) % 8] if (last - left) % 8 else "")


def needed_words(plan: Plan) -> str:
    memory = plan.memory
    bounds = f"({format_bytes(memory['process_bytes']['low'])} to {format_bytes(memory['process_bytes']['high'])})"
    if not memory["card_bytes"]:
        return f"{bounds}; how much the device has is not known"
    share = f"{100 * memory['share']:.0f} % of {format_bytes(memory['card_bytes'])}"
    aim = f", aimed at {100 * plan.memory_share:.0f} %" if plan.memory_share else ""
    return f"{bounds}, {share}{aim}: {memory['verdict']}"


def time_lines(forecast: Forecast) -> Iterator[str]:
    step = forecast.step
    if step.seconds is None or step.tok_per_sec is None:
        yield f"time    n/a, {step.assumptions[0].removeprefix('no time: ')}"
        return
    speed = f"{step.tok_per_sec.expected:,.0f} tok/s"
    yield (
        f"time    {seconds_words(step.seconds)} a step, {speed}, mfu {format_mfu(step.mfu)}, limited by {step.limit}"
    )
    yield f"        {shares_words(step)}"
    if forecast.run is not None:
        yield f"run     {run_words(forecast.run, forecast.plan)}"
    if forecast.levers:
        gains = ", ".join(f"{lever.what} +{100 * lever.gain:.0f} %" for lever in forecast.levers[:4])
        yield f"helps   {gains}"


def seconds_words(seconds: Range) -> str:
    if seconds.expected < 10:
        low, expected, high = (f"{1000 * value:,.0f}" for value in (seconds.low, seconds.expected, seconds.high))
        return f"{expected} ms ({low} to {high})"
    return f"{seconds.expected:.1f} s ({seconds.low:.1f} to {seconds.high:.1f})"


def hours_words(hours: Range) -> str:
    return format_duration(3600 * hours.expected)


def shares_words(step: StepTime) -> str:
    total = sum(step.parts.values())
    largest = sorted(step.parts.items(), key=lambda part: -part[1])
    shown = [f"{name} {100 * seconds / total:.0f}%" for name, seconds in largest if seconds >= 0.01 * total]
    return ", ".join(shown)


def run_words(run: RunCost, plan: Plan) -> str:
    tokens = format_count(plan.num_steps * plan.total_batch_size)
    hours = (
        f"{format_duration(3600 * run.hours.expected)}"
        f" ({format_duration(3600 * run.hours.low)} to {format_duration(3600 * run.hours.high)})"
    )
    words = [f"{hours} for {plan.num_steps:,} steps, {tokens} tokens"]
    if run.kwh is not None:
        words.append(f"{kwh_words(run.kwh)} kWh")
    if run.money is not None:
        words.append(f"costs {run.money.expected:,.2f} ({run.money.low:,.2f} to {run.money.high:,.2f})")
    return ", ".join(words)


def kwh_words(kwh: Range) -> str:
    """Three digits."""
    return f"{kwh.expected:,.{max(0, 2 - math.floor(math.log10(max(1e-3, kwh.expected))))}f}"


def assumed_lines(forecast: Forecast) -> Iterator[str]:
    yield f"memory: {forecast.plan.memory['source']}"
    if forecast.plan.device == "cuda":
        yield f"attention by the {forecast.plan.attention_kernel} kernel"
    yield from forecast.plan.notes
    if forecast.step.seconds is not None:
        yield from forecast.step.assumptions
    if forecast.run is not None:
        yield from forecast.run.assumptions


def format_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Columns aligned, numbers to the right; the first column is the name."""
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = [names, *([row[name] for name in names] for row in rows)]
    return "\n".join(
        "  ".join(
            text.ljust(widths[name]) if i == 0 else text.rjust(widths[name])
            for i, (name, text) in enumerate(zip(names, line, strict=True))
        ).rstrip()
        for line in lines
    )
