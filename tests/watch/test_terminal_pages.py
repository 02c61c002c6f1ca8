"""The pages of the terminal view: what they show of each state, at each size."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rows import with_rows
from snapshots import NOW, STATES, failed, hostile, recovered, script, training, two_hosts, unknown_log

from paceline.terminal import cells, cut
from paceline.watch.measures import gpu_model, gpu_problems
from paceline.watch.snapshot import GpuView, LogView, RankView, Series
from paceline.watch.terminal.chart import CurveChoice, curves_page
from paceline.watch.terminal.head import header, why_page
from paceline.watch.terminal.line import (
    PAGES,
    changed_columns,
    clean,
    coloured,
    facts_line,
    key_line,
    page_keys,
    plain,
    to_ascii,
    width_of,
    wrap,
)
from paceline.watch.terminal.machines import gpu_rows, machine_lines, machines_block, rank_grid
from paceline.watch.terminal.pages import NO_LOG, LogChoice, LogText, format_once, page_lines

MANUAL = Path(__file__).parents[2] / "docs" / "watch.md"
SIZES = [(80, 24), (200, 60), (40, 12), (131, 30), (100, 40)]


def page(name, snapshot, width=80, height=24, log=NO_LOG):
    options = {"choice": CurveChoice(), "log": log, "wrapped": False}
    return page_lines(name, snapshot, now=NOW, width=width, height=height, **options)


def screen(snapshot, width=80, height=24) -> str:
    lines = [*header(snapshot, now=NOW, width=width)]
    lines += page("overview", snapshot, width, height - 1 - len(lines))
    return "\n".join(map(plain, lines))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_each_state_fills_the_screen_exactly(state, width, height):
    snapshot = STATES[state](NOW)
    log = LogText(LogView(1, 0, "0.log", 10), LogChoice(), [(None, f"line {i}") for i in range(50)])
    for shown in (NO_LOG, log):
        lines = page("overview", snapshot, width, height, shown)
        assert len(lines) == height
        assert {width_of(line) for line in [*lines, *header(snapshot, now=NOW, width=width)]} == {width}
    for name in PAGES[1:]:
        lines = page(name, snapshot, width, height, log)
        assert {width_of(line) for line in lines} == {width if name == "curves" else width - 1}


def test_the_header_shows_progress_and_remaining_time():
    assert [plain(line) for line in header(training(), now=NOW, width=80)] == [
        " books  ● training                               2 ranks on tower  08:33:20 UTC",
        " 49.6 %  ━━━━━━━━━━━━━━╸──────────────  1,240/2,500  12m51s left  14m28s so far",
        " loss 2.9216  val_bpb 0.9527  tok/s 858,425  step 612 ms  mfu 41.2 %",
        " ✓ All well: the loss is falling, 2 GPUs are busy 97 % of the time.",
    ]


@with_rows(
    ("state", "texts"),
    [
        ("starting", ["◐ starting", "· No step is finished yet: compile."]),
        ("evaluating", ["◐ evaluating"]),
        ("saving", ["◐ saving"]),
        ("recovering", ["↻ recovering", "cuda-oom"]),
        ("recovered", ["● training  attempt 2", "went on from step 1,000"]),
        (
            "failed",
            ["✗ failed  4h00m ago", "✗ cuda-oom: rank 1", "→ fix: paceline resume books --device-batch-size 16"],
        ),
        ("finished", ["✓ finished  2h00m ago", "100.0 %"]),
        ("stopped", ["■ stopped  40s ago"]),
        ("broken", ["✗ broken", "ended without reporting why"]),
        ("no_gpu", ["no GPU", "cpu 94 %"]),
        ("two_hosts", ["8 ranks on 2 hosts", "2 hosts, 8 GPUs", "node-1", "67–91 °C", "! 1 slowed", "5 node-1"]),
        (
            "lost_host",
            ["2 ranks on 2 hosts", "2 hosts, no GPU", "ada  rank 0  cpu", "cem  lost", "0 ada", "1 bob", "net ↓"],
        ),
        ("script", ["● running", "train.py --lr 3e-4", "in the script 100 %"]),
        ("trainer_log", ["Hugging Face Trainer", "400/1,500"]),
        ("unknown_log", ["? unknown", "no line of output.txt tells"]),
    ],
)
def test_each_state_shows_its_own_text(state, texts):
    page = screen(STATES[state](NOW))
    assert all(re.search(word if "|" in word else re.escape(word), page) for word in texts), page


def test_a_silent_run_is_a_warning():
    assert " ! No output or heartbeat for 2m00s." in screen(replace(training(), updated=NOW - 120), width=100)


def test_control_characters_in_names_and_logs_are_shown_not_executed():
    for width, height in SIZES:
        page = screen(hostile(), width, height)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", page)
    assert "[bold red]x[/] <script>" in screen(hostile(), 200, 60)
    assert clean("a\x1b[31m\tb\u202ec\x9b") == "a␛[31m  bc�"


def test_slow_and_silent_ranks_are_marked():
    page = "\n".join(map(plain, rank_grid(two_hosts().ranks, width=200, height=4)))
    assert re.search(r"!\s+5 node-1 train\s+761 ms .* slow", page)
    assert page.count("!") == 1
    silent = [RankView(0, "a", 4, "reduce", 95.0, 10.0), RankView(1, "a", 4, "compile", 95.0, 10.0)]
    assert "! " in plain(rank_grid(silent, width=80, height=4)[0])
    assert "silent 1m35s" in plain(rank_grid(silent, width=80, height=4)[0])


def test_many_ranks_become_a_sentence_and_a_row_of_blocks():
    ranks = [RankView(rank, "a", 9, "train", 0.1, 500.0 + 300 * (rank == 70), rank == 70) for rank in range(128)]
    sentence, blocks = map(plain, rank_grid(ranks, width=140, height=4))
    assert sentence == " 128 ranks  500 ms median, 500 ms to 800 ms  ! slow: 70"
    assert len(blocks.strip()) == 128 and blocks.strip().index("█") == 70


def test_many_gpus_on_few_lines_share_a_line_then_their_host_has_one():
    eight = two_hosts()
    assert [len(machine_lines(eight, width=80, height=height)) for height in (10, 6, 4, 2)] == [10, 6, 2, 2]
    assert "2 GPUs" not in plain(machine_lines(eight, width=80, height=6)[0])
    assert (
        plain(machine_lines(eight, width=80, height=2)[1])
        == " node-1             4 GPUs  mem 77–81 %   use 97 %      67–91 °C  ! 1 slowed"
    )


def test_values_that_a_gpu_does_not_report_are_absent_not_zero():
    assert plain(gpu_rows([GpuView(0)], width=80)[0]).split() == ["0", "GPU", "─" * 15, "n/a", "─" * 15, *["n/a"] * 3]


def test_names_of_gpus_and_reasons_are_short():
    names = ("NVIDIA GeForce RTX 5090", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", None)
    assert [gpu_model(name) for name in names] == ["RTX 5090", "H100", "A100", "GPU"]
    gpu = GpuView(0, throttle=["power", "power_brake", "thermal"], errors={"xid": 79, "ecc_corrected": 3})
    assert gpu_problems(gpu) == "power brake, thermal, xid 79"


def test_why_shows_cause_fix_evidence_attempts_and_findings():
    page = "\n".join(map(plain, why_page(failed(), width=100)))
    for word in (
        "✗ cuda-oom: rank 1 asked for 2.00 GiB", "→ paceline resume books --device-batch-size 16", "97 % sure",
        "logs/1/1.log:1288  rank 1",
        "only followed", "then stop: no progress over three attempts", "! pcie-width: GPU 1 runs at PCIe",
    ):  # fmt: skip
        assert word in page
    assert "nothing has ended this run" in plain(why_page(training(), width=80)[1])
    assert "cuda-oom" in "\n".join(map(plain, why_page(recovered(), width=80)))


def test_curves_can_be_chosen_zoomed_and_drawn_on_a_logarithmic_axis():
    lines = [plain(line) for line in curves_page(training(), CurveChoice("grad_norm", True, 0.5), width=80, height=20)]
    assert lines[0].startswith("── grad_norm")
    assert "── last 50 % of the steps, logarithmic" in lines[12]
    assert any(line.startswith(" > grad_norm") for line in lines)
    assert plain(curves_page(script(), CurveChoice(), width=80, height=20)[1]) == " no numbers yet"


def test_every_page_can_be_drawn_in_ascii():
    for make in (two_hosts, failed, unknown_log):
        assert "?" not in to_ascii(screen(make(), 200, 60)).replace("? unknown", "")


def test_changed_columns_of_two_lines_are_found():
    old = (("loss 2.50  ", "faint"), ("─" * 20, ""), (" ok", ""))
    new = (("loss 2.47  ", "faint"), ("─" * 20, ""), (" no", ""))
    assert changed_columns(old, new) == (7, 34)
    assert changed_columns((("日本", ""),), (("日x ", ""),)) == (2, 4)
    assert changed_columns((), (("ab", ""),)) == (0, 2)
    assert changed_columns(old, old) is None


def test_lines_are_cut_and_wrapped_by_columns():
    assert (cells("日本"), cells("e\u0301"), cut("日本語", 5), cut("abc", 3)) == (4, 1, "日本…", "abc")
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("x" * 12, 5) == ["xxxxx", "xxxxx", "xx"]
    assert wrap("", 5) == [""]
    assert wrap("日本", 1) == ["日", "本"]
    assert coloured((("a", "error"), ("b", ""))) == "\x1b[31ma\x1b[0mb"


def test_the_manual_shows_the_real_screen():
    lines = screen(training()).splitlines()
    lines.append(plain(key_line(page_keys("overview", width=80, held=False, snapshot=training()))))
    assert "\n".join(f"    {line}" for line in lines) in MANUAL.read_text(encoding="utf-8")


def test_other_runs_that_go_on_leave_room_for_help_and_quit():
    name = "sweep-of-learning-rates-0.05"
    for width, active, text in (
        (80, [name], "o sweep-of-learning-rat… is running"),
        (120, [name], "o sweep-of-learning-rates… is running"),
        (80, ["a", "b"], "o 2 others are running"),
        (60, [name], "o 1 running"),
        (60, ["a", "b"], "o 2 running"),
        (50, [name], None),
    ):
        line = plain(key_line(page_keys("overview", width=width, held=False, snapshot=None, active=active)))
        assert (text in line if text else "running" not in line) and line.endswith("? help  q quit")
        assert len(line) < width


def test_a_fact_that_is_too_long_leaves_room_for_those_after_it():
    facts = [("cpu", "100 %", ""), ("cgroup", "1000/1008 GiB !", "warning"), ("disk", "2 GiB !", "warning")]
    assert plain(facts_line(facts, 26)) == "cpu 100 %  disk 2 GiB !"


def test_wide_names_keep_the_columns_of_gpus_processes_and_ranks_straight():
    """Every line of a block puts what follows a name in the same column, in Latin letters and in Chinese ones."""
    snapshot = training()
    [host] = snapshot.hosts
    process = {"pid": 4711, "bytes": 1 << 30, "ours": False}
    gpus = [
        replace(gpu, name=name, processes=[{**process, "name": name}])
        for gpu, name in zip(host.gpus, ("显卡甲", "RTX 5090"), strict=True)
    ]
    wide = replace(snapshot, hosts=[replace(host, gpus=gpus)])
    for word in ("GiB", "W", "not of this run"):
        lines = [plain(line) for line in page("machines", wide, 100) if re.search(rf"(?<!\w){word}", plain(line))]
        assert len({cells(line[: re.search(rf"(?<!\w){word}", line).start()]) for line in lines[-2:]}) == 1, lines


def test_the_machines_page_shows_history_and_its_columns_have_headings():
    lines = [plain(line) for line in page("machines", training(), 80)]
    titles = lines[2]
    for title, value in (("memory", "━"), ("power", "521/575 W"), ("temp", "67 °C")):
        end = max if title in ("power", "temp") else min
        assert end(titles.index(title), titles.index(title) + len(title)) == end(
            lines[3].index(value), lines[3].index(value) + len(value)
        )
    text = "\n".join(lines)
    for title in ("GPU use over time", "GPU memory over time", "GPU power over time", "GPU temperature over time"):
        assert title in text
    assert re.search(r"GPU 1 +█{40,} +93 %", text)


def test_no_heading_and_no_curve_has_the_name_of_a_field():
    names = ("ram_used", "net_in_bps", "disk_free", "disk_write_bps", "cpu")
    host_series = {f"tower {name}": Series([1, 2], [0.5, 0.5], [NOW - 1, NOW]) for name in names}
    text = "\n".join(plain(line) for line in page("machines", replace(training(), host_series=host_series), 80))
    for title in ("CPU over time", "RAM over time", "network in over time", "disk free over time: of the run's disk"):
        assert f"── {title}" in text
    assert plain(page("machines", training(), 80)[0]).endswith("─" * 40)  # nothing at the right end, and no gap there
    text += format_once(training(), now=NOW, width=80)
    assert not [name for name in (*names[:-1], "tok_per_sec", "step_ms") if name in text]


def test_two_gpus_in_a_line_have_a_heading_that_names_their_numbers():
    [host] = training().hosts
    eight = replace(training(), hosts=[replace(host, gpus=[replace(host.gpus[0], index=i) for i in range(8)])])
    block = machines_block(eight, width=80, height=5)
    assert plain(block[0]).startswith("── 8 GPUs: memory, use, power, temperature ──") and len(block) == 5
