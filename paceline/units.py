"""
Bytes, counts, times, lists, ranks and signals as people read and write them. Units live here and nowhere else in the code.
"""

import math
import re
import signal
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

GIB = 1 << 30
MIB = 1 << 20
BYTES_PER_TOKEN = 4  # of text, as a rule
REPORTED_BY_SHELLS = {4, 6, 7, 8, 9, 11, 15}  # signals, as 128 + number; programs themselves return 129 and 130 too


def format_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'; three significant digits at most."""
    return scaled(num_bytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def format_count(count: float) -> str:
    """2_516_000 -> '2.5M'; for parameters and tokens on a screen."""
    return scaled(count, 1000, ("", "K", "M", "B", "T"))


def scaled(value: float, factor: int, units: Sequence[str]) -> str:
    number = 0
    while abs(value) >= factor and number < len(units) - 1:
        value, number = value / factor, number + 1
    return f"{value:.{0 if number == 0 or value >= 100 else 1}f}{units[number]}"


def format_duration(seconds: float | None) -> str:
    """1457 -> '24m17s'; 'n/a' for None."""
    if seconds is None:
        return "n/a"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, whole = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{whole:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def parse_duration(text: str) -> float:
    """'90m', '12h', '1d12h', '2m30s' -> seconds; raises ValueError for any other text and for a duration of zero."""
    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(rf"(?:{number}d)?(?:{number}h)?(?:{number}m)?(?:{number}s)?", text.strip().lower(), re.ASCII)
    parts = match.groups() if match else ()
    seconds = sum(float(part or 0) * unit for part, unit in zip(parts, (86_400, 3600, 60, 1), strict=False))
    if not seconds:
        raise ValueError(f"{text} is not a duration such as 90m, 12h or 1d12h")
    return seconds


def format_ms(ms: float) -> str:
    """612.3 -> '612 ms', 12.34 -> '12.3 ms', 1.234 -> '1.23 ms'."""
    digits = 0 if ms >= 100 else 1 if ms >= 10 else 2
    return f"{ms:,.{digits}f} ms"


def parse_time(text: str) -> float:
    """'2026-07-25T14:31:02.120Z' -> Unix seconds; raises ValueError for any other text."""
    return datetime.fromisoformat(text).timestamp()


def unix_time(value: Any) -> float:
    """Parses a time of a record that may be damaged; NaN for anything that is not a time."""
    try:
        return parse_time(value)
    except (ValueError, TypeError):
        return math.nan


def format_energy(joules: float) -> str:
    """4_500_000 -> '1.25 kWh'; '31.2 Wh', as electricity is paid for; three significant digits."""
    hours = joules / 3600
    value, unit = (hours / 1000, "kWh") if hours >= 1000 else (hours, "Wh")
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} {unit}"


def format_percent(share: float | None, *, digits: int = 0) -> str:
    """0.72 -> '72 %'; 'n/a' for None."""
    return "n/a" if share is None else f"{100 * share:.{digits}f} %"


def format_mfu(mfu: float | None) -> str:
    """Returns '41.2%', as a step's line has it."""
    return "n/a" if mfu is None else f"{100 * mfu:.1f}%"


def format_list(items: Iterable[object], *, limit: int | None = None) -> str:
    """(0, 1, 2) -> '0, 1 and 2'; past `limit` items it counts the others: '0, 1 and 6 more'."""
    texts = [str(item) for item in items]
    if limit is not None and len(texts) > limit:
        texts[limit:] = [f"{len(texts) - limit} more"]
    *first, last = texts or ["none"]
    return f"{', '.join(first)} and {last}" if first else last


def format_ranks(ranks: Iterable[int], *, limit: int | None = None) -> str:
    """(1,) -> 'rank 1'; (0, 1, 2) -> 'ranks 0, 1 and 2'."""
    numbers = list(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {format_list(numbers, limit=limit)}"


def format_number_of(count: int, singular: str, plural: str | None = None) -> str:
    """(1, 'row') -> '1 row'; (2, 'row') -> '2 rows'; (2, 'process', 'processes') -> '2 processes'."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def whole_number(text: str) -> int:
    """The whole number that a text means: 5000, 5,000, 5_000 or 5e3. Raises ValueError."""
    text = text.replace(",", "")
    try:
        return int(text)
    except ValueError:
        if not (number := float(text)).is_integer():  # nor is NaN or an infinity
            raise
        return int(number)


def likely_number(text: str, kind: type, *, is_time: bool, usual: object = None) -> float | None:
    """What a text that is refused as a number of this kind probably means: 5k 5000, 65% 0.65, 30.5 30, 10m of a time 600.

    None if it could mean two: 1.500 of a whole number, 0,002. Beside a usual value that is a multiple of 256, k is 1024.
    """
    thousand = 1024 if isinstance(usual, int) and usual and usual % 256 == 0 else 1000
    units = {"": 1.0} | ({"s": 1, "m": 60, "h": 3600} if is_time else {"k": thousand, "m": thousand**2})
    units |= {"%": 0.01} if kind is float else {}
    number = r"([1-9]\d{0,2}(?:,\d{3})+|\d{1,15}(?:\.(?!\d{3}(?!\d))\d+)?)" if kind is int else r"(\d{1,15}(?:\.\d+)?)"
    match = re.fullmatch(rf"{number} ?([a-z%]?)", text.strip().lower(), re.ASCII)
    if not match or match[2] not in units or kind not in (int, float):
        return None
    value = round(float(match[1].replace(",", "")) * units[match[2]], 9)
    return round(value) if kind is int or value.is_integer() else value


def signal_name(number: int) -> str:
    """9 -> 'SIGKILL', 40 -> 'SIGRTMIN+6'."""
    try:
        return signal.Signals(number).name
    except ValueError:  # of the real-time signals Python knows the first and the last
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def format_exit(exit_code: int) -> str:
    """-11 -> 'ended by SIGSEGV', 3 -> 'ended with exit code 3'."""
    return f"ended by {signal_name(-exit_code)}" if exit_code < 0 else f"ended with exit code {exit_code}"


def exit_signal(exit_code: int, *, is_shell: bool) -> str | None:
    """Returns the signal that ended a program: SIGKILL for -9, and for a shell's 137, which reports it; None for an own exit."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    return signal_name(number) if exit_code < 0 or (is_shell and number in REPORTED_BY_SHELLS) else None


def signal_number(name: str) -> int:
    """Returns the number of signal_name."""
    base, _, offset = name.partition("+")
    return signal.Signals[base] + int(offset or 0)
