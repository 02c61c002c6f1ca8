"""
The terminal view's hosts, GPUs and ranks: blocks for the overview, and the page `machines`.

Pure: a Snapshot and a size in, lines out. Where lines are scarce, two GPUs share a line, then all GPUs of a host share one, and
many ranks become a row of blocks.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from paceline.units import GIB, format_bytes, format_duration, format_list, format_ms, format_number_of
from paceline.watch.snapshot import LIVE, GpuView, HostView, RankView, Snapshot
from paceline.watch.summary import (
    format_memory,
    format_percent,
    format_power,
    format_temperature,
    gpu_model,
    gpu_problems,
    is_disk_low,
    is_full,
    is_silent,
    memory_share,
)
from paceline.watch.terminal.chart import even_values, pulse, sparkline
from paceline.watch.terminal.line import (
    EMPTY,
    Line,
    Piece,
    bar,
    cells,
    clean,
    cut,
    fit,
    heading,
    in_columns,
    side_by_side,
    split_width,
    width_of,
)

WARM_C, HOT_C = 83, 90  # where recent GPUs begin to slow down, and where they do
FULL_MEMORY = 0.97  # of a GPU
MIN_CELL = 24  # columns of a rank in the grid
MIN_PROCESS_WIDTH = 60
MAX_RANKS_NAMED = 12


def gpu_rows(gpus: Sequence[GpuView], *, width: int, among: Sequence[GpuView] = ()) -> list[Line]:
    """A line for each GPU: memory and use as bars, power, temperature, clock and bus where there is room.

    among: all GPUs above and below, so that their columns line up.
    """
    names, problems = [model(gpu) for gpu in among or gpus], [gpu_problems(gpu) for gpu in among or gpus]
    name_width = min(max(map(cells, names), default=0), 16 if width < 100 else 24)
    problem_width = min(max(map(cells, problems), default=0), 9 if width < 100 else 24)
    wide = width >= 110
    fixed = 4 + name_width + 2 + 16 + 6 + 11 + 7 + (4 + problem_width if problem_width else 0) + (24 if wide else 0)
    room = max(4, (width - fixed) // 2)
    lines: list[Line] = []
    for gpu in gpus:
        share, problem = memory_share(gpu), gpu_problems(gpu)
        line: list[Piece] = [
            (f" {gpu.index:>2} ", "strong"),
            (f"{cut(model(gpu), name_width):<{name_width}}  ", "faint"),
            *bar(share, room, style="orange" if share and share > FULL_MEMORY else "violet"),
            (f" {format_memory(gpu):>13}  ", ""),
            *bar(gpu.use, room, style="green"),
            (f"{format_percent(gpu.use):>6}", ""),
            (f"{format_power(gpu):>11}", ""),
            (f"{format_temperature(gpu):>7}", temperature_style(gpu)),
        ]
        if wide:
            line.append((f"{f'{gpu.sm_mhz} MHz' if gpu.sm_mhz else '':>10}  {gpu.pcie or '':<12}", "faint"))
        if problem:
            line.append((f"  ! {cut(problem, problem_width)}", "warning"))
        lines.append(fit(tuple(line), width))
    return lines


def model(gpu: GpuView) -> str:
    return gpu_model(clean(gpu.name or ""))


def temperature_style(gpu: GpuView) -> str:
    if gpu.temperature_c is None:
        return "faint"
    return "error" if gpu.temperature_c >= HOT_C else "warning" if gpu.temperature_c >= WARM_C else ""


def gpu_cells(gpus: Sequence[GpuView], *, width: int) -> list[Line]:
    """Two GPUs in a line: memory as a bar, everything else as numbers."""
    half = split_width(width, (1, 1))[0]
    lines: list[Line] = []
    for gpu in gpus:
        share = memory_share(gpu)
        power = "n/a" if gpu.power_w is None else f"{gpu.power_w:.0f} W"
        tail = f" {format_percent(share):>5} {format_percent(gpu.use):>5} {power:>6} "
        room = half - 5 - cells(tail) - 8
        lines.append(
            (
                (f" {gpu.index:>2} ", "strong"),
                *bar(share, max(2, room), style="violet"),
                (tail, ""),
                (f"{format_temperature(gpu):>6}", temperature_style(gpu)),
                (" !" if gpu_problems(gpu) else "  ", "warning"),
            )
        )
    return in_columns(lines, 2, width=width)


def host_summary(host: HostView, *, width: int) -> Line:
    """All GPUs of a host in one line."""

    def span(values: list[float], unit: str) -> str:
        if not values:
            return "n/a"
        low, high = round(min(values)), round(max(values))
        return f"{low}{unit}" if low == high else f"{low}–{high}{unit}"

    gpus = host.gpus
    num_slowed = sum(bool(gpu_problems(gpu)) for gpu in gpus)
    shares = [share for share in map(memory_share, gpus) if share is not None]
    line: list[Piece] = [
        (f" {cut(clean(host.name), 18):<18} ", "strong"),
        (f"{len(gpus)} GPUs  ", "faint"),
        ("mem ", "faint"), (f"{span([100 * share for share in shares], ' %'):<10}", ""),
        ("use ", "faint"), (f"{span([100 * gpu.use for gpu in gpus if gpu.use is not None], ' %'):<10}", ""),
        (f"{span([gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None], ' °C'):<10}", ""),
        (f"! {num_slowed} slowed" if num_slowed else "", "warning"),
    ]  # fmt: skip
    return fit(tuple(line), width)


def host_facts(host: HostView, *, width: int, long: bool = False) -> Line:
    """cpu 23 %  ram 41/128 GiB  disk 812 GiB free, as many as there is room for. long: also cgroup and network."""
    parts: list[tuple[str, str, str]] = []
    if host.cpu is not None:
        parts.append(("cpu", format_percent(host.cpu) + (f" of {host.cores}" if host.cores and long else ""), ""))
    if host.ram_used is not None and host.ram_total:
        full = is_full(host.ram_used, host.ram_total)
        parts.append(("ram", f"{host.ram_used / GIB:.0f}/{host.ram_total / GIB:.0f} GiB", "warning" if full else ""))
    if host.cgroup_limit and host.cgroup_used is not None and (long or host.cgroup_used > 0.9 * host.cgroup_limit):
        full = is_full(host.cgroup_used, host.cgroup_limit)
        text = f"{host.cgroup_used / GIB:.0f}/{host.cgroup_limit / GIB:.0f} GiB"
        parts.append(("cgroup", text, "warning" if full else ""))
    if host.disk_free is not None:
        parts.append(("disk", f"{format_bytes(host.disk_free)} free", "warning" if is_disk_low(host) else ""))
    if long and host.net_in_bps is not None and host.net_out_bps is not None:
        parts.append(("net", f"↓ {format_bytes(host.net_in_bps)}/s ↑ {format_bytes(host.net_out_bps)}/s", ""))
    line: list[Piece] = []
    for name, text, style in parts:
        pieces = [("  " if line else "", ""), (f"{name} ", "faint"), (text + (" !" if style else ""), style)]
        if width_of((*line, *pieces)) <= width:
            line += pieces
    return tuple(line)


def known_ranks(ranks: Sequence[RankView]) -> Sequence[RankView]:
    """All ranks, or none where only their numbers are known, as of a script."""
    return ranks if any(rank.step is not None or rank.phase or rank.busy_ms is not None for rank in ranks) else ()


def longest_ms(ranks: Sequence[RankView]) -> float:
    return max((rank.busy_ms for rank in ranks if rank.busy_ms is not None), default=0.0)


def rank_cell(rank: RankView, *, width: int, longest: float) -> Line:
    """3 train  571 ms ━━━━━━──, with a sign before a slow and a silent rank."""
    silent = is_silent(rank)
    sign, style = ("!", "warning") if rank.slow or silent else (" ", "")
    line: list[Piece] = [(f" {sign}", style), (f"{rank.rank:>3} ", "strong"), (f"{rank.phase or '':<8}", "faint")]
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
    """As many ranks side by side as there is room for; where height does not suffice, a row of blocks and a sentence."""
    columns = max(1, min((width + 2) // (MIN_CELL + 2), len(ranks)))
    rows = -(-len(ranks) // columns) if ranks else 0
    if rows > height:
        return rank_blocks(ranks, width=width)[:height]
    columns = -(-len(ranks) // max(1, rows)) if ranks else 1
    widths = split_width(width, [1] * columns)
    longest = longest_ms(ranks)
    blocks = [
        ([rank_cell(rank, width=column, longest=longest) for rank in ranks[i * rows : (i + 1) * rows]], column)
        for i, column in enumerate(widths)
    ]
    return side_by_side(blocks)


def ranks_heading(ranks: Sequence[RankView]) -> str:
    return "ranks, own work per step" if any(rank.busy_ms is not None for rank in ranks) else "ranks"


def rank_blocks(ranks: Sequence[RankView], *, width: int) -> list[Line]:
    times = [rank.busy_ms for rank in ranks if rank.busy_ms is not None]
    if not times:
        return [((f" {len(ranks)} ranks, no step times yet", "faint"),)]
    slow = [rank.rank for rank in ranks if rank.slow]
    text: list[Piece] = [
        (f" {len(ranks)} ranks ", "strong"),
        (f" {format_ms(median(times))} median, {format_ms(min(times))} to {format_ms(max(times))}", ""),
    ]
    if slow:
        text.append((f"  ! slow: {format_list(slow, limit=MAX_RANKS_NAMED)}", "warning"))
    low = min(times) - 0.2 * (max(times) - min(times)) - 1
    blocks: Line = ((" " + sparkline([rank.busy_ms or 0.0 for rank in ranks], width - 2, low=low), "blue"),)
    return [fit(tuple(text), width), blocks]


def machine_lines(snapshot: Snapshot, *, width: int, height: int) -> list[Line]:
    """All hosts and GPUs in at most `height` lines: a line for each GPU, else two GPUs in a line, else a line for each host."""
    hosts = snapshot.hosts
    all_gpus = [gpu for host in hosts for gpu in host.gpus]

    def caption(host: HostView) -> list[Line]:
        name = (f" {cut(clean(host.name), 20)}  ", "strong")
        return [(name, *host_facts(host, width=width - 24))] if len(hosts) > 1 else []

    layouts = (
        [line for host in hosts for line in (*caption(host), *gpu_rows(host.gpus, width=width, among=all_gpus))],
        [line for host in hosts for line in (*caption(host), *gpu_cells(host.gpus, width=width))],
        [host_summary(host, width=width) for host in hosts],
    )
    return next((lines for lines in layouts if len(lines) <= height), layouts[-1])[:height]


def machines_block(snapshot: Snapshot, block: list[Line], *, width: int) -> list[Line]:
    """The block of machine_lines under its heading."""
    if not snapshot.hosts:
        return []
    first = snapshot.hosts[0]
    num_gpus = sum(len(host.gpus) for host in snapshot.hosts)
    name = format_number_of(num_gpus, "GPU") if num_gpus else "no GPU"
    name = name if snapshot.state in LIVE else f"last sample: {name}"
    facts = (
        host_facts(first, width=width - 20)
        if len(snapshot.hosts) == 1
        else (("memory, use, power, temperature", "faint"),)
    )
    return [heading(name, width, right=facts), *block]


def gpus_over_time(snapshot: Snapshot, *, width: int, height: int) -> list[Line]:
    """The use of each GPU since the run began; no line where there is no room for all."""
    curves = [(name, series) for name, series in snapshot.gpu_series.items() if name.endswith(" use") and series.values]
    columns = 1 if len(curves) <= height else 2
    if not curves or len(curves) > columns * height:
        return []
    names = [clean(name.removesuffix(" use")) for name, _ in curves]
    names = names if len(snapshot.hosts) > 1 else [name.rpartition("/")[2] for name in names]
    margin = min(24, max(map(cells, names)))
    column = split_width(width, [1] * columns)[0]
    lines: list[Line] = []
    for name, (_, series) in zip(names, curves, strict=True):
        by_time = replace(series, steps=[int(time) for time in series.times])
        line = pulse(even_values(by_time, column - margin - 9))
        lines.append(
            ((f" {cut(name, margin):>{margin}} ", "strong"), (line, "green"), (f" {series.values[-1]:>5.0%}", ""))
        )
    return [EMPTY, heading("GPU use, over time", width), *in_columns(lines, columns, width=width)]


def machines_page(snapshot: Snapshot, *, width: int) -> list[Line]:
    """Everything about hosts, GPUs and ranks, on as many lines as it takes."""
    lines: list[Line] = []
    all_gpus = [gpu for host in snapshot.hosts for gpu in host.gpus]
    for host in snapshot.hosts:
        lines += [heading(clean(host.name), width), (*((" ", ""),), *host_facts(host, width=width - 2, long=True))]
        lines += gpu_rows(host.gpus, width=width, among=all_gpus)
        lines += process_lines(host.gpus, width=width)
    if known_ranks(snapshot.ranks):
        lines += [heading("ranks: own work per step, over time", width), *rank_lines(snapshot, width=width)]
    if not snapshot.hosts and not known_ranks(snapshot.ranks):
        lines += [EMPTY, ((" this run folder has no health samples", "faint"),)]
    return [fit(line, width) for line in lines]


def process_lines(gpus: Sequence[GpuView], *, width: int) -> list[Line]:
    """The processes on each GPU and their memory, several in a line, with a sign before those of other runs."""
    process_cells: list[Line] = []
    for gpu in gpus:
        for process in gpu.processes:
            size = process.get("bytes")
            memory = f"{size / GIB:.1f} GiB" if isinstance(size, int | float) else ""
            process_cells.append(
                (
                    (f"    GPU {gpu.index}  ", "faint"),
                    (f"{process.get('pid')} {cut(clean(str(process.get('name') or '')), 14):<15}", ""),
                    (f"{memory:>9}", "faint"),
                    ("  ! not of this run" if process.get("ours") is False else "", "warning"),
                )
            )
    columns = max(1, min((width + 2) // MIN_PROCESS_WIDTH, len(process_cells)))
    return in_columns(process_cells, columns, width=width)


def rank_lines(snapshot: Snapshot, *, width: int) -> list[Line]:
    """Each rank, and its own work over the run as blocks between the least and the greatest value of all."""
    longest = longest_ms(known_ranks(snapshot.ranks))
    values = [value for series in snapshot.rank_series for value in series.values]
    low = 0.9 * min(values, default=0.0)
    high = max(1.6 * low, max(values, default=1.0))  # keeps the noise of equal ranks low
    cell = min(width, 42)
    lines: list[Line] = []
    for rank in known_ranks(snapshot.ranks):
        where = f"{cut(clean(rank.host or ''), 12):<13}" if width >= 100 else ""
        line: list[Piece] = [*rank_cell(rank, width=cell, longest=longest), (f"  {where}", "faint")]
        room = width - cell - 2 - len(where) - 1
        if rank.rank < len(snapshot.rank_series) and room > 4:
            curve = snapshot.rank_series[rank.rank].values
            line.append((sparkline(curve, room, low=low, high=high), "orange" if rank.slow else "blue"))
        lines.append(tuple(line))
    return lines
