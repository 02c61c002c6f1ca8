"""
What the arithmetic says of runs that other people published: whether they fit, and how much they allocate.

Points with their sources lie beside the repository. The figures below are from traces of the same models and from what the
trainers' scripts and issues say: nanochat's run1000.sh, issue 443, pull request 237 (depth 20 in rows of 4 on 24 GB).
"""

import json
from pathlib import Path

import pytest
from nanochat import UNSURE, allocated_of, card_of, peak_bytes, runs_of, verdict_of
from rows import with_rows

from paceline.units import GIB

POINTS = Path(__file__).parents[3] / "shared" / "data" / "memory-points" / "points.json"
TRUTH = {"ok": "fits", "oom": "does not fit"}


def published(*, qualities="AB"):
    if not POINTS.exists():
        pytest.skip(f"no {POINTS.relative_to(POINTS.parents[3])} beside the repository")
    return [point for point in json.loads(POINTS.read_text())["points"] if point["quality"] in qualities]


def point(depth, batch, seq=2048, **changes):
    """nanochat as of October 2025, compiled, on eight H100 unless changed."""
    family = changes.pop("family", "nanochat-2025-10")
    dims = {"family": family, "depth": depth, "dim": 64 * depth, "heads": max(1, depth // 2)}
    facts = {"gpu": "H100 80GB SXM", "world_size": 8, "vocab": 65_536, "compile": True, "checkpointing": False}
    return facts | {"model_dims": dims, "batch": batch, "seq": seq} | changes


FORK = {"gpu": "RTX 5090 D 32GB", "world_size": 2, "compile": False}  # the math kernel, as that software's logs say


def test_no_verdict_on_a_published_run_is_wrong_and_few_are_left_open():
    verdicts = {run["id"]: (verdict_of(run)[1], TRUTH[run["status"]]) for run in published()}
    assert {name: pair for name, pair in verdicts.items() if pair[0] not in (pair[1], "undecidable")} == {}
    assert 6 * sum(verdict_count == "undecidable" for verdict_count, _ in verdicts.values()) <= len(verdicts)


def test_no_verdict_is_wrong_where_part_of_a_point_is_assumed_either():
    for run in published(qualities="ABC"):
        assert verdict_of(run)[1] in (TRUTH[run["status"]], "undecidable"), run["id"]


def test_measured_allocations_lie_in_the_range():
    measured = [run for run in published(qualities="ABC") if "max_memory_allocated" in run["metric"]]
    assert len(measured) >= 2
    for run in measured:
        allocated = allocated_of(run)
        assert allocated.low <= run["measured_gib"] * GIB <= allocated.high, run["id"]


def test_a_run_that_died_asking_for_memory_would_have_needed_at_least_that():
    """Allocated and asked for, at that moment: the peak is no less, so a range must not end below it."""
    for run in published():
        if "oom" in run:
            assert allocated_of(run).high >= (run["oom"]["allocated_gib"] + run["oom"]["tried_gib"]) * GIB, run["id"]


@with_rows(
    ("run", "truth"),
    [
        (point(20, 4, gpu="RTX 3090 24GB", world_size=1), "fits"),
        (point(20, 4, gpu="RTX 4090 24GB", world_size=1), "fits"),
        (point(20, 16), "fits"),
        (point(20, 16, family="nanochat-2026-01"), "fits"),
        (point(26, 16), "fits"),
        (point(26, 32), "does not fit"),
        (point(32, 8), "fits"),
        (point(32, 16), "does not fit"),
        (
            point(12, 8, family="nanochat-2026-06", gpu="RTX 4070 12GB", world_size=1, vocab=32_768, grad_accum=4),
            "fits",
        ),
        (point(12, 8, 1536, **FORK), "fits"),
        (point(16, 10, 1536, **FORK | {"checkpointing": True}), "fits"),
        (point(8, 4, 3072, **FORK), "fits"),
        (point(20, 14, 3072, **FORK), "does not fit"),
        (point(24, 16, 3072, **FORK), "does not fit"),
        (point(16, 20, 3072, **FORK | {"checkpointing": True}), "does not fit"),
    ],
)
def test_runs_that_people_reported_fit_or_do_not_as_they_did(run, truth):
    assert verdict_of(run)[1] == truth


def test_depth_20_in_rows_of_32_is_left_open_on_80_gb_as_some_could_run_it_and_some_could_not():
    assert verdict_of(point(20, 32, family="nanochat-2026-01"))[1] == "undecidable"


def traced(run, **choices):
    """GiB of the one figure that a trace of this model gives: what the trace assumed in place of what a range leaves open."""
    assumed = {
        "eager units": 18,
        "compiled units": 19,
        "temporaries": 0,
        "gradients before": 0,
        "copies kept": 0,
    } | choices
    (only,) = runs_of(run)
    return peak_bytes(only, lambda row: assumed.get(row, 0 if row.startswith("units of") else UNSURE[row][1])) / GIB


@pytest.mark.parametrize(
    ("run", "flash", "math"),
    [
        (point(12, 8, 1536, **FORK), 15.7, 21.4),
        (point(16, 10, 1536, **FORK | {"checkpointing": True}), 15.7, 15.7),
        (point(8, 4, 3072, **FORK), 12.9, 17.7),
        (point(12, 8, 3072, **FORK), 30.0, 51.5),
        (point(10, 6, 3072, **FORK), 20.7, 31.9),
        (point(20, 14, 3072, **FORK), 78.1, None),
        (point(24, 16, 3072, **FORK), 110, None),
    ],
)
def test_the_closed_form_gives_what_traces_of_eager_steps_gave(run, flash, math):
    assert traced(run | {"sdpa": "flash"}) == pytest.approx(flash, rel=0.01)
    assert math is None or traced(run | {"sdpa": "math"}) == pytest.approx(math, rel=0.01)


def test_the_composite_norm_keeps_four_units_more_as_traced():
    run = point(20, 14, 3072, **FORK, sdpa="flash")
    assert traced(run, **{"eager units": 22}) == pytest.approx(86.5, rel=0.01)


@pytest.mark.parametrize(
    ("run", "units", "extra", "in_place"),
    [
        (point(12, 8, family="nanochat-2026-06", gpu="RTX 4070 12GB", world_size=1, vocab=32_768), 20, 10.42, 9.46),
        (point(12, 32), 19, 39.2, 31.3),
        (point(20, 32), 19, 80.9, 73.1),
        (point(32, 8), 19, 59.9, 58.2),
    ],
)
def test_the_closed_form_gives_what_partitioned_graphs_of_compiled_steps_gave(run, units, extra, in_place):
    choices = {"compiled units": units, "gradients before": 1}
    assert traced(run, **choices, **{"compiled loss": 4}) == pytest.approx(extra, rel=0.03)
    assert traced(run, **choices, **{"compiled loss": 2}) == pytest.approx(in_place, rel=0.03)


@pytest.mark.parametrize("batch", [4, 8, 16, 32])
def test_only_what_a_point_leaves_open_widens_the_range(batch):
    facts = point(12, batch, 1024, gpu="RTX 5090 32GB", world_size=2, sdpa="flash", grad_accum=4)
    sure = allocated_of(facts)
    assert sure.high - sure.low < 0.3 * sure.expected
    for unknown in ({"vocab": None}, {"compile": None}, {"checkpointing": None}, {"sdpa": None}, {"grad_accum": None}):
        vague = allocated_of(facts | unknown)
        assert (vague.low, vague.high) != (sure.low, sure.high)
        assert vague.low <= sure.low
        assert vague.high >= sure.high * (1 - 1e-9)


def test_a_month_between_two_known_ones_may_be_either():
    known = [allocated_of(point(12, 8, family=f"nanochat-{month}")) for month in ("2026-01", "2026-06")]
    between = allocated_of(point(12, 8, family="nanochat-2026-03"))
    assert between.low == min(run.low for run in known)
    assert between.high == max(run.high for run in known)


@pytest.mark.parametrize(
    ("gpu_name", "card"),
    [
        ("H100 80GB SXM", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("L40S 45GB", "L40S"),
        ("RTX 5090 D 32GB (assumed from the repo)", "RTX 5090 D"),
        ("RTX 5090 32 GB", "RTX 5090"),
        ("A100 40GB SXM", "A100 SXM 40GB"),
        ("A100 80GB", "A100 SXM 80GB"),
        ("RTX 3090 24GB", "RTX 3090"),
    ],
)
def test_cards_are_identified_by_name_and_memory(gpu_name, card):
    assert card_of({"gpu": gpu_name}).name == card
