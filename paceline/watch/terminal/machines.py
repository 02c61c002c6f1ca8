"""
The terminal view's hosts, GPUs and ranks: blocks for the overview, and the page `machines`.

Pure: a Snapshot and a size in, lines out. Where lines are scarce, two GPUs share a line, then all GPUs of a host share one, and
many ranks become a row of blocks.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from statistics import median

from paceline.terminal import cells, cut, pad
from paceline.units import GIB, format_bytes, format_duration, format_list, format_ms, format_number_of, format_percent
from paceline.watch.device_panels import map_panels
from paceline.watch.measures import (
    format_memory,
    format_power,
    format_temperature,
    gpu_model,
    gpu_problems,
    is_disk_low,
    is_full,
    memory_share,
)
from paceline.watch.snapshot import LIVE, GpuView, HostView, RankView, Snapshot
from paceline.watch.summary import host_place, is_silent
from paceline.watch.terminal.chart import even_values, pulse, sparkline
from paceline.watch.terminal.line import (
    EMPTY,
    Line,
    Piece,
    bar,
    clean,
    facts_line,
    fit,
    heading,
    in_columns,
    section,
    side_by_side,
    split_width,
    width_of,
)

WARM_C, HOT_C = 83, 90  # where recent GPUs begin to slow down, and where they do
FULL_MEMORY = 0.97  # of a GPU
MIN_CELL = 24  # columns of a rank in the grid
MAX_HOST_WIDTH = 10  # of a host's name beside a rank
MIN_PROCESS_WIDTH = 60
MAX_RANKS_NAMED = 12
HISTORY_STYLES = {"use": "green", "used_bytes": "violet", "temperature_c": "orange"}


def gpu_rows(gpus: Sequence[GpuView], *, width: int) -> list[Line]:
    """A line for each GPU: memory and use as bars, power, temperature, clock and bus where there is room."""
    names, problems = [gpu_model(clean(gpu.name or "")) for gpu in gpus], [gpu_problems(gpu) for gpu in gpus]
    name_width = min(max(map(cells, names), default=0), 16 if width < 100 else 24)
    problem_width = min(max(map(cells, problems), default=0), 9 if width < 100 else 24)
    wide = width >= 110
    fixed = 4 + name_width + 2 + 16 + 6 + 11 + 7 + (4 + problem_width if problem_width else 0) + (24 if wide else 0)
    room = max(4, (width - fixed) // 2)
    lines: list[Line] = []
    for gpu, name, problem in zip(gpus, names, problems, strict=True):
        share = memory_share(gpu)
        line: list[Piece] = [
            (f" {gpu.index:>2} ", "strong"),
            (f"{pad(cut(name, name_width), name_width)}  ", "faint"),
            *bar(share, room, style="orange" if share and share > FULL_MEMORY else "violet"),
            (f" {format_memory(gpu):>13}  ", ""),
            *bar(gpu.use, room, style="green"),
            (f"{format_percent(gpu.use):>6}{format_power(gpu):>11}", ""),
            (f"{format_temperature(gpu):>7}", temperature_style(gpu)),
        ]
        if wide:
            line.append((f"{f'{gpu.sm_mhz} MHz' if gpu.sm_mhz else '':>10}  {gpu.pcie or '':<12}", "faint"))
        if problem:
            line.append((f"  ! {cut(problem, problem_width)}", "warning"))
        lines.append(tuple(line))
    return lines


def gpu_titles(row: Line) -> Line:
    """The headings of the columns of a row of gpu_rows: each begins or ends where its column does."""
    ends = list(accumulate(cells(text) for text, _ in row))
    line = pad("", ends[1]) + pad("memory", ends[4] - ends[1]) + pad("use", ends[6] - ends[4])
    line += pad("power", ends[7] - ends[6], right=True) + pad("temp", ends[8] - ends[7], right=True)
    return ((line + ("     clock  PCIe" if len(row) > 9 and "MHz" in row[9][0] else ""), "faint"),)


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
        memory = bar(share, max(2, half - 13 - cells(tail)), style="violet")
        temperature = (f"{format_temperature(gpu):>6}", temperature_style(gpu))
        mark = (" !" if gpu_problems(gpu) else "  ", "warning")
        lines.append(((f" {gpu.index:>2} ", "strong"), *memory, (tail, ""), temperature, mark))
    return in_columns(lines, 2, width=width)


def host_summary(host: HostView) -> Line:
    """All GPUs of a host in one line."""

    def span(values: Sequence[float | None], unit: str) -> str:
        known = [round(value) for value in values if value is not None]
        if not known:
            return "n/a"
        return f"{min(known)}–{max(known)}{unit}" if min(known) < max(known) else f"{known[0]}{unit}"

    num_slowed = sum(bool(gpu_problems(gpu)) for gpu in host.gpus)
    memory = [None if share is None else 100 * share for share in map(memory_share, host.gpus)]
    use = [None if gpu.use is None else 100 * gpu.use for gpu in host.gpus]
    title = (f" {pad(cut(clean(host.name), 18), 19)}", "strong")
    if host.lost:
        return title, ("lost", "error")
    line: list[Piece] = [title, (f"{len(host.gpus)} GPUs  ", "faint")]
    line += [("mem ", "faint"), (f"{span(memory, ' %'):<10}", ""), ("use ", "faint"), (f"{span(use, ' %'):<10}", "")]
    line.append((f"{span([gpu.temperature_c for gpu in host.gpus], ' °C'):<10}", ""))
    return (*line, (f"! {num_slowed} slowed" if num_slowed else "", "warning"))


def host_facts(host: HostView, *, long: bool = False, net: bool = False) -> Iterator[tuple[str, str, str]]:
    """Yields names, values and styles: cpu 23 %  ram 41/128 GiB  disk 812 GiB free. long: also cgroup and network. net: always."""
    has_net = host.net_in_bps is not None and host.net_out_bps is not None
    traffic = f"↓ {format_bytes(host.net_in_bps or 0)}/s ↑ {format_bytes(host.net_out_bps or 0)}/s"

    def memory(name: str, used: int, total: int) -> tuple[str, str, str]:
        mark, style = (" !", "warning") if is_full(used, total) else ("", "")
        return name, f"{used / GIB:.0f}/{total / GIB:.0f} GiB{mark}", style

    if host.cpu is not None:
        yield "cpu", format_percent(host.cpu) + (f" of {host.cores}" if host.cores and long else ""), ""
    if net and has_net:
        yield "net", traffic, ""
    if host.ram_used is not None and host.ram_total:
        yield memory("ram", host.ram_used, host.ram_total)
    if host.cgroup_limit and host.cgroup_used is not None and (long or host.cgroup_used > 0.9 * host.cgroup_limit):
        yield memory("cgroup", host.cgroup_used, host.cgroup_limit)
    if host.disk_free is not None:
        mark, style = (" !", "warning") if is_disk_low(host) else ("", "")
        yield "disk", f"{format_bytes(host.disk_free)} free{mark}", style
    if long and has_net and not net:
        yield "net", traffic, ""


def known_ranks(ranks: Sequence[RankView]) -> Sequence[RankView]:
    """All ranks, or none where only their numbers are known, as of a script."""
    return ranks if any(rank.step is not None or rank.phase or rank.busy_ms is not None for rank in ranks) else ()


def longest_ms(ranks: Sequence[RankView]) -> float:
    return max((rank.busy_ms or 0.0 for rank in ranks), default=0.0)


def rank_cell(rank: RankView, *, width: int, longest: float, host_width: int) -> Line:
    """3 bob train  571 ms ━━━━━━──, with a sign before a slow and a silent rank; with its host where there are several."""
    silent = is_silent(rank)
    sign, style = ("!", "warning") if rank.slow or silent else (" ", "")
    host = pad(cut(clean(rank.host or ""), host_width), host_width + 1) if host_width else ""
    number, phase = (f"{rank.rank:>3} ", "strong"), (f"{rank.phase or '':<8}", "faint")
    line: Line = ((f" {sign}", style), number, (host, ""), phase)
    if silent or rank.busy_ms is None:
        step = " n/a" if rank.step is None else f" step {rank.step:,}"
        return fit((*line, (f" silent {format_duration(rank.silent_s)}" if silent else step, style)), width)
    line, tail = (*line, (f"{format_ms(rank.busy_ms):>9}", style)), " slow" if rank.slow else ""
    room = width - width_of(line) - cells(tail) - 1
    work = bar(rank.busy_ms / (longest or 1.0), room, style="orange" if rank.slow else "blue")
    return fit((*line, *(((" ", ""), *work) if room >= 3 else ()), (tail, style)), width)


def ranks_title(ranks: Sequence[RankView]) -> str:
    return "ranks, own work per step" if any(rank.busy_ms is not None for rank in ranks) else "ranks"


def rank_grid(ranks: Sequence[RankView], *, width: int, height: int) -> list[Line]:
    """As many ranks side by side as there is room for; where height does not suffice, a row of blocks and a sentence."""
    if not ranks:
        return []
    host_width = host_column(ranks)
    cell = MIN_CELL + 2 + (host_width + 1 if host_width else 0)
    rows = -(-len(ranks) // max(1, min((width + 2) // cell, len(ranks))))
    if rows > height:
        return rank_blocks(ranks, width=width)[:height]
    longest = longest_ms(ranks)
    blocks = [
        (
            [
                rank_cell(rank, width=column, longest=longest, host_width=host_width)
                for rank in ranks[i * rows : (i + 1) * rows]
            ],
            column,
        )
        for i, column in enumerate(split_width(width, [1] * -(-len(ranks) // rows)))
    ]
    return side_by_side(blocks)


def host_column(ranks: Sequence[RankView]) -> int:
    """The width of the hosts' names; 0 where all ranks are on one."""
    hosts = {clean(rank.host) for rank in ranks if rank.host}
    return min(MAX_HOST_WIDTH, max(map(cells, hosts))) if len(hosts) > 1 else 0


def rank_blocks(ranks: Sequence[RankView], *, width: int) -> list[Line]:
    times = [rank.busy_ms for rank in ranks if rank.busy_ms is not None]
    if not times:
        return [((f" {len(ranks)} ranks, no step times yet", "faint"),)]
    low, high = min(times), max(times)
    slow = [rank.rank for rank in ranks if rank.slow]
    text: Line = (
        (f" {len(ranks)} ranks ", "strong"),
        (f" {format_ms(median(times))} median, {format_ms(low)} to {format_ms(high)}", ""),
        (f"  ! slow: {format_list(slow, limit=MAX_RANKS_NAMED)}" if slow else "", "warning"),
    )
    blocks = sparkline([rank.busy_ms or 0.0 for rank in ranks], width - 2, low=low - 0.2 * (high - low) - 1)
    return [text, ((f" {blocks}", "blue"),)]


def machine_lines(snapshot: Snapshot, *, width: int, height: int | None = None) -> list[Line]:
    """All hosts and GPUs in at most `height` lines: a line for each GPU, else two GPUs in a line, else a line for each host.

    height None: a line for each host and each GPU.
    """
    hosts = snapshot.hosts
    gpus = {host.name: [] if host.lost else host.gpus for host in hosts}
    rows = iter(gpu_rows([gpu for own in gpus.values() for gpu in own], width=width))

    def caption(host: HostView) -> list[Line]:
        if len(hosts) == 1 and height is not None:
            return []
        name = cut(clean(host.name), 24)
        place = (f"{host_place(host)}  ", "error" if host.lost else "faint") if host_place(host) else ("", "")
        shown = host_facts(host, long=height is None and width >= 100, net=len(hosts) > 1)
        facts = () if host.lost else facts_line(shown, width - cells(name + place[0]) - 3)
        return [((f" {name}  ", "strong"), place, *facts)]

    whole = [line for host in hosts for line in (*caption(host), *islice(rows, len(gpus[host.name])))]
    if height is None or len(whole) <= height:
        return whole
    pairs = [line for host in hosts for line in (*caption(host), *gpu_cells(gpus[host.name], width=width))]
    return pairs if len(pairs) <= height else [host_summary(host) for host in hosts[:height]]


def machines_block(snapshot: Snapshot, *, width: int, height: int) -> list[Line]:
    """All hosts and GPUs in at most `height` lines under a heading."""
    hosts = snapshot.hosts
    num_gpus = sum(len(host.gpus) for host in hosts if not host.lost)
    name = format_number_of(num_gpus, "GPU") if num_gpus else "no GPU"
    name = f"{format_number_of(sum(not host.lost for host in hosts), 'host')}, {name}" if len(hosts) > 1 else name
    name = name if snapshot.state in LIVE else f"last sample: {name}"
    lines, titles = machine_lines(snapshot, width=width, height=height), "memory, use, power, temperature"
    if len(hosts) == 1 and len(lines) < num_gpus:
        name += f": {titles}"
    facts: Line = ((titles, "faint"),) if num_gpus else ()
    facts = facts_line(host_facts(hosts[0]), width - 14 - cells(name)) if len(hosts) == 1 else facts
    return [heading(name, width, right=facts), *lines] if hosts else []


def gpus_over_time(snapshot: Snapshot, *, width: int, height: int) -> list[Line]:
    """The use of each GPU since the run began; no line where there is no room for all."""
    curves = {name: series for name, series in snapshot.gpu_series.items() if name.endswith(" use") and series.values}
    columns = 1 if len(curves) <= height else 2
    if not curves or len(curves) > columns * height:
        return []
    labels = [clean(name.removesuffix(" use")) for name in curves]
    labels = labels if len(snapshot.hosts) > 1 else [label.rpartition("/")[2] for label in labels]
    margin = min(24, max(map(cells, labels)))
    column = split_width(width, [1] * columns)[0]
    lines: list[Line] = []
    for label, series in zip(labels, curves.values(), strict=True):
        line = (pulse(even_values(series.times, series.values, column - margin - 9)), "green")
        use = format_percent(series.values[-1])
        lines.append(((f" {pad(cut(label, margin), margin, right=True)} ", "strong"), line, (f" {use:>5}", "")))
    return section("GPU use, over time", in_columns(lines, columns, width=width), width)


def machines_page(snapshot: Snapshot, *, width: int) -> list[Line]:
    """Everything about hosts, GPUs and ranks, on as many lines as it takes."""
    lines: list[Line] = []
    table = gpu_rows([gpu for host in snapshot.hosts for gpu in host.gpus], width=width)
    rows = iter(table)
    for host in snapshot.hosts:
        facts = facts_line(host_facts(host, long=True), width - (16 if host.lost else 2))
        place: Line = ((host_place(host), "error" if host.lost else "faint"),) if host_place(host) else ()
        since: Piece = (" last sample:  " if host.lost else " ", "faint")
        lines += [heading(clean(host.name), width, right=place), (since, *facts)]
        lines += [gpu_titles(table[0]), *islice(rows, len(host.gpus))] if host.gpus else []
        lines += process_lines(host.gpus, width=width)
    if ranks := rank_lines(snapshot, width=width):
        lines += [heading("ranks: own work per step, over time", width), *ranks]
    lines += history_lines(snapshot, width=width)
    return lines or [EMPTY, ((" this run folder has no health samples", "faint"),)]


def history_lines(snapshot: Snapshot, *, width: int) -> list[Line]:
    """Memory, use, power and temperature of each GPU, and each host's processors and memory, since the run began."""
    lines: list[Line] = []
    columns = 2 if width >= 110 else 1
    for field, panel in map_panels(snapshot).items():
        rows: list[Line] = []
        for row in panel["rows"]:
            series = getattr(snapshot, row["group"])[row["key"]]
            label = pad(cut(clean(" ".join(filter(None, (row["sub"], row["label"])))), 16), 17)
            room = split_width(width, [1] * columns)[0] - 29
            curve = sparkline(even_values(series.times, series.values, room), room, low=row["low"], high=row["high"])
            rows.append(
                (
                    (f" {label}", "strong"),
                    (pad(curve, room), HISTORY_STYLES.get(field, "blue")),
                    (f" {row['value']:>10}", ""),
                )
            )
        title = f"{panel['label']} over time: {panel['about']}"
        lines += [heading(title, width), *in_columns(rows, min(columns, len(rows)), width=width)]
    return lines


def process_lines(gpus: Sequence[GpuView], *, width: int) -> list[Line]:
    """The processes on each GPU and their memory, several in a line, with a sign before those of other runs."""
    lines: list[Line] = []
    for gpu in gpus:
        for process in gpu.processes:
            size = process.get("bytes")
            memory = f"{size / GIB:.1f} GiB" if isinstance(size, int | float) else ""
            name = f"{process.get('pid')} {pad(cut(clean(str(process.get('name') or '')), 14), 15)}"
            mark = "  ! not of this run" if process.get("ours") is False else ""
            lines.append(
                ((f"    GPU {gpu.index}  ", "faint"), (name, ""), (f"{memory:>9}", "faint"), (mark, "warning"))
            )
    return in_columns(lines, max(1, min((width + 2) // MIN_PROCESS_WIDTH, len(lines))), width=width)


def rank_lines(snapshot: Snapshot, *, width: int) -> list[Line]:
    """Each rank, and its own work over the run as blocks between the least and the greatest value of all."""
    ranks = known_ranks(snapshot.ranks)
    longest = longest_ms(ranks)
    values = [value for series in snapshot.rank_series for value in series.values]
    low = 0.9 * min(values, default=0.0)
    high = max(1.6 * low, max(values, default=1.0))  # keeps the noise of equal ranks low
    host_width = host_column(ranks)
    cell = min(width, 42 + host_width)
    lines: list[Line] = []
    for rank in ranks:
        line: list[Piece] = [*rank_cell(rank, width=cell, longest=longest, host_width=host_width), ("  ", "")]
        room = width - cell - 3
        if rank.rank < len(snapshot.rank_series) and room > 4:
            curve = snapshot.rank_series[rank.rank].values
            line.append((sparkline(curve, room, low=low, high=high), "orange" if rank.slow else "blue"))
        lines.append(tuple(line))
    return lines
