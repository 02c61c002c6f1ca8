"""Bytes, counts, durations and FLOPs as people read them. Units live here and nowhere else in the code."""

GIB = 1 << 30
MIB = 1 << 20


def format_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'; three significant digits at most."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def format_count(count: float) -> str:
    """2_516_000 -> '2.5M'; for parameters and tokens on a screen."""
    size = float(count)
    for unit in ("", "K", "M", "B", "T"):
        if abs(size) < 1000 or unit == "T":
            break
        size /= 1000
    return f"{size:.0f}{unit}" if unit == "" or size >= 100 else f"{size:.1f}{unit}"


def format_duration(seconds: float | None) -> str:
    """1457 -> '24m17s'; 'n/a' for None."""
    if seconds is None:
        return "n/a"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def format_energy(joules: float) -> str:
    """4_500_000 -> '1.25 kWh'; '31.2 Wh', as electricity is paid for; three significant digits."""
    hours = joules / 3600
    value, unit = (hours / 1000, "kWh") if hours >= 1000 else (hours, "Wh")
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} {unit}"


def format_mfu(mfu: float | None) -> str:
    return "n/a" if mfu is None else f"{100 * mfu:.1f}%"
