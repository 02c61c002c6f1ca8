"""
The parts of the terminal view about machines: GPUs as bars, hosts, ranks with the time of their own work.

Pure: a Snapshot and a size in, lines out. Few lines for many GPUs are a line for each host; for many ranks, a block for each.
"""

import re
from collections.abc import Sequence
from statistics import median

from paceline.units import GIB, format_bytes, format_duration
from paceline.watch.concerns import AT_ITS_POWER_LIMIT, LONG_PHASES, SILENT_S, in_words
from paceline.watch.snapshot import GpuView, HostView, RankView, Snapshot
from paceline.watch.terminal.chart import sparkline
from paceline.watch.terminal.head import format_ms
from paceline.watch.terminal.line import Line, Piece, bar, beside, cells, clean, cut, fit, split_width, width_of

WARM_C, HOT_C = 83, 90  # where cards of the last years begin to slow down, and where they do
FULL = 0.97
ERRORS = {"xid": "xid", "ecc_uncorrected": "ecc"}  # of GpuView.errors, those that a person must know
CELL = 24  # least columns of a rank in the grid


def short_name(name: str | None) -> str:
    """NVIDIA GeForce RTX 5090 -> RTX 5090; NVIDIA H100 80GB HBM3 -> H100"""
    shown = re.sub(r"\b(NVIDIA|GeForce|Generation|\d+GB|HBM\w*|PCIe|SXM\d?)\b", "", clean(name or "GPU"))
    return " ".join(shown.replace("-", " ").split()) or "GPU"


def reasons_of(gpu: GpuView) -> str:
    """Why it runs slower than it could, and its errors, in a word each; "" where nothing is out of the ordinary."""
    words = [in_words(reason) for reason in gpu.throttle if reason != AT_ITS_POWER_LIMIT]
    words += [f"{called} {gpu.errors[name]}" for name, called in ERRORS.items() if gpu.errors.get(name)]
    return ", ".join(words)


def memory_of(gpu: GpuView) -> tuple[float | None, str]:
    if gpu.used_bytes is None or not gpu.total_bytes:
        return None, "n/a"
    return gpu.used_bytes / gpu.total_bytes, f"{gpu.used_bytes / GIB:.1f}/{gpu.total_bytes / GIB:.1f} GiB"


def temperature_style(gpu: GpuView) -> str:
    if gpu.temperature_c is None:
        return "faint"
    return "error" if gpu.temperature_c >= HOT_C else "warning" if gpu.temperature_c >= WARM_C else ""


def percent(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.0f} %"


def watts(gpu: GpuView) -> str:
    if gpu.power_w is None:
        return "n/a"
    return f"{gpu.power_w:.0f}/{gpu.power_limit_w:.0f} W" if gpu.power_limit_w else f"{gpu.power_w:.0f} W"


def degrees(gpu: GpuView) -> str:
    if gpu.temperature_c is None:
        return "n/a"
    return f"{gpu.temperature_c:.0f} °C"


def gpu_rows(gpus: Sequence[GpuView], *, width: int, among: Sequence[GpuView] = ()) -> list[Line]:
    """A line for each: memory and use as bars, power, temperature, clock and bus where there is room.

    among: all that stand above and below, so that their columns line up.
    """
    names, reasons = [short_name(gpu.name) for gpu in among or gpus], [reasons_of(gpu) for gpu in among or gpus]
    name_width = min(max(map(cells, names), default=0), 16 if width < 100 else 24)
    reason_width = min(max(map(cells, reasons), default=0), 9 if width < 100 else 24)
    wide = width >= 110
    fixed = 4 + name_width + 2 + 16 + 6 + 11 + 7 + (2 + 2 + reason_width if reason_width else 0) + (24 if wide else 0)
    room = max(4, (width - fixed) // 2)
    lines: list[Line] = []
    for gpu in gpus:
        (share, memory), name, reason = memory_of(gpu), short_name(gpu.name), reasons_of(gpu)
        line: list[Piece] = [
            (f" {gpu.index:>2} ", "strong"),
            (f"{cut(name, name_width):<{name_width}}  ", "faint"),
            *bar(share, room, style="orange" if share and share > FULL else "violet"),
            (f" {memory:>13}  ", ""),
            *bar(gpu.use, room, style="green"),
            (f"{percent(gpu.use):>6}", ""),
            (f"{watts(gpu):>11}", ""),
            (f"{degrees(gpu):>7}", temperature_style(gpu)),
        ]
        if wide:
            line.append((f"{f'{gpu.sm_mhz} MHz' if gpu.sm_mhz else '':>10}  {gpu.pcie or '':<12}", "faint"))
        if reason:
            line.append((f"  ! {cut(reason, reason_width)}", "warning"))
        lines.append(fit(tuple(line), width))
    return lines


def gpu_cells(gpus: Sequence[GpuView], *, width: int) -> list[Line]:
    """Two in a line, for many of them: memory as a bar, the rest as numbers."""
    half, other = split_width(width, (1, 1))
    lines: list[Line] = []
    for gpu in gpus:
        share, _ = memory_of(gpu)
        reason = reasons_of(gpu)
        power = "n/a" if gpu.power_w is None else f"{gpu.power_w:.0f} W"
        tail = f" {percent(share):>5} {percent(gpu.use):>5} {power:>6} "
        room = half - 5 - cells(tail) - 8
        lines.append(
            (
                (f" {gpu.index:>2} ", "strong"),
                *bar(share, max(2, room), style="violet"),
                (tail, ""),
                (f"{degrees(gpu):>6}", temperature_style(gpu)),
                (" !" if reason else "  ", "warning"),
            )
        )
    middle = (len(lines) + 1) // 2
    return beside([(lines[:middle], half), (lines[middle:], other)])


def host_summary(host: HostView, *, width: int) -> Line:
    """One line for all GPUs of a host."""

    def span(values: list[float], unit: str) -> str:
        if not values:
            return "n/a"
        low, high = round(min(values)), round(max(values))
        return f"{low}{unit}" if low == high else f"{low}–{high}{unit}"

    gpus = host.gpus
    bad = sum(bool(reasons_of(gpu)) for gpu in gpus)
    shares = [share for share, _ in map(memory_of, gpus) if share is not None]
    line: list[Piece] = [
        (f" {cut(clean(host.name), 18):<18} ", "strong"),
        (f"{len(gpus)} GPUs  ", "faint"),
        ("mem ", "faint"), (f"{span([100 * share for share in shares], ' %'):<10}", ""),
        ("use ", "faint"), (f"{span([100 * gpu.use for gpu in gpus if gpu.use is not None], ' %'):<10}", ""),
        (f"{span([gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None], ' °C'):<10}", ""),
        (f"! {bad} slowed" if bad else "", "warning"),
    ]  # fmt: skip
    return fit(tuple(line), width)


def host_facts(host: HostView, *, width: int, long: bool = False) -> Line:
    """cpu 23 %  ram 41/128 GiB  disk 812 GiB free, as many as there is room for; long: cgroup and network too."""
    parts: list[tuple[str, str, str]] = []
    if host.cpu is not None:
        parts.append(("cpu", percent(host.cpu) + (f" of {host.cores}" if host.cores and long else ""), ""))
    if host.ram_used is not None and host.ram_total:
        full = host.ram_used > FULL * host.ram_total
        parts.append(("ram", f"{host.ram_used / GIB:.0f}/{host.ram_total / GIB:.0f} GiB", "warning" if full else ""))
    if host.cgroup_limit and host.cgroup_used is not None and (long or host.cgroup_used > 0.9 * host.cgroup_limit):
        full = host.cgroup_used > 0.95 * host.cgroup_limit
        text = f"{host.cgroup_used / GIB:.0f}/{host.cgroup_limit / GIB:.0f} GiB"
        parts.append(("cgroup", text, "warning" if full else ""))
    if host.disk_free is not None:
        low = host.disk_free < (host.disk_total or 0) * 0.03 or host.disk_free < 5 * GIB
        parts.append(("disk", f"{format_bytes(host.disk_free)} free", "warning" if low else ""))
    if long and host.net_in_bps is not None and host.net_out_bps is not None:
        parts.append(("net", f"↓ {format_bytes(host.net_in_bps)}/s ↑ {format_bytes(host.net_out_bps)}/s", ""))
    line: list[Piece] = []
    for name, text, style in parts:
        pieces = [("  " if line else "", ""), (f"{name} ", "faint"), (text + (" !" if style else ""), style)]
        if width_of((*line, *pieces)) <= width:
            line += pieces
    return tuple(line)


def known(ranks: Sequence[RankView]) -> Sequence[RankView]:
    """All, or none where nothing but their number is known: a script's."""
    return ranks if any(rank.step is not None or rank.phase or rank.busy_ms is not None for rank in ranks) else ()


def slowest(ranks: Sequence[RankView]) -> float:
    return max((rank.busy_ms for rank in ranks if rank.busy_ms is not None), default=0.0)


def rank_cell(rank: RankView, *, width: int, longest: float) -> Line:
    """3 train  571 ms ━━━━━━──; a slow one is marked, so is one that is silent."""
    allowed_s = SILENT_S * (10 if rank.phase in LONG_PHASES else 1)
    silent = rank.phase not in ("done", "stopped") and (rank.silent_s or 0) > allowed_s
    mark, style = ("!", "warning") if rank.slow or silent else (" ", "")
    line: list[Piece] = [(f" {mark}", style), (f"{rank.rank:>3} ", "strong"), (f"{rank.phase or '':<8}", "faint")]
    if silent:
        return fit((*line, (f" silent {format_duration(rank.silent_s)}", style)), width)
    if rank.busy_ms is None:
        return fit((*line, (f" step {rank.step:,}" if rank.step is not None else " n/a", "")), width)
    text = f"{format_ms(rank.busy_ms):>9}"
    tail = " slow" if rank.slow else ""
    room = width - width_of(tuple(line)) - cells(text) - cells(tail) - 1
    share = rank.busy_ms / longest if longest else None
    middle: Line = ((" ", ""), *bar(share, room, style="orange" if rank.slow else "blue")) if room >= 3 else ()
    return fit((*line, (text, style), *middle, (tail, style)), width)


def rank_grid(ranks: Sequence[RankView], *, width: int, height: int) -> list[Line]:
    """As many beside each other as there is room for; more ranks than that are a row of blocks and a sentence."""
    columns = max(1, min((width + 2) // (CELL + 2), len(ranks)))
    rows = -(-len(ranks) // columns) if ranks else 0
    if rows > height:
        return rank_blocks(ranks, width=width)[:height]
    columns = -(-len(ranks) // max(1, rows)) if ranks else 1
    widths = split_width(width, [1] * columns)
    longest = slowest(ranks)
    placed = [
        ([rank_cell(rank, width=each, longest=longest) for rank in ranks[i * rows : (i + 1) * rows]], each)
        for i, each in enumerate(widths)
    ]
    return beside(placed)


def ranks_heading(ranks: Sequence[RankView]) -> str:
    return "ranks, own work a step" if any(rank.busy_ms is not None for rank in ranks) else "ranks"


def rank_blocks(ranks: Sequence[RankView], *, width: int) -> list[Line]:
    times = [rank.busy_ms for rank in ranks if rank.busy_ms is not None]
    if not times:
        return [((f" {len(ranks)} ranks, no step times yet", "faint"),)]
    slow = [str(rank.rank) for rank in ranks if rank.slow]
    words: list[Piece] = [
        (f" {len(ranks)} ranks ", "strong"),
        (f" {format_ms(median(times))} median, {format_ms(min(times))} to {format_ms(max(times))}", ""),
    ]
    if slow:
        words.append((f"  ! slow: {', '.join(slow[:12])}{' ...' if len(slow) > 12 else ''}", "warning"))
    low = min(times) - 0.2 * (max(times) - min(times)) - 1
    blocks: Line = ((" " + sparkline([rank.busy_ms or 0.0 for rank in ranks], width - 2, low=low), "blue"),)
    return [fit(tuple(words), width), blocks]


def machines(snapshot: Snapshot, *, width: int, height: int) -> list[Line]:
    """All hosts and GPUs in at most `height` lines: a line each, else two GPUs in a line, else a line for each host."""
    hosts = snapshot.hosts
    captions, every = len(hosts) > 1, [gpu for host in hosts for gpu in host.gpus]
    caption: list[list[Line]] = [
        [(((f" {cut(clean(host.name), 20)}  ", "strong"), *host_facts(host, width=width - 24)))] if captions else []
        for host in hosts
    ]
    ways = (
        [[*caption[i], *gpu_rows(host.gpus, width=width, among=every)] for i, host in enumerate(hosts)],
        [[*caption[i], *gpu_cells(host.gpus, width=width)] for i, host in enumerate(hosts)],
        [[host_summary(host, width=width)] for host in hosts],
    )
    for way in ways:
        if sum(map(len, way)) <= height:
            break
    return [line for lines in way for line in lines][:height]
