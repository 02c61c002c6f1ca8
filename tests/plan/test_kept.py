"""What this machine measured of memory: kept by several processes at once, and what the next plan makes of it."""

import json
import multiprocessing
from dataclasses import replace

import pytest

from paceline.config import Config, ModelConfig
from paceline.plan.activations import MemorySetup
from paceline.plan.kept import (
    FILE_NAME,
    KEEP_RECORDS,
    MemoryRecord,
    calibration_of,
    copies_bytes,
    keep_attempt,
    keep_record,
    kept_calibration,
    read_records,
    record_of,
)
from paceline.plan.machine import Machine
from paceline.plan.memory import peak_phase
from paceline.plan.planner import make_plan
from paceline.rundir import RunDir, append_event

GIB = 1 << 30
CARD = "NVIDIA GeForce RTX 5090"
SETUP = MemorySetup(
    model=ModelConfig(n_layer=2, n_embd=64, n_head=2, n_kv_head=2, head_dim=32, sequence_len=64, vocab_size=512),
    device="cuda",
    world_size=2,
    optimizer="muon",
    shard="optimizer",
    precision="bf16",
    device_batch_size=4,
    grad_accum_steps=2,
    logits_budget_bytes=512 << 20,
    activation_checkpointing=False,
    attention="flash",
    compiled=True,
)
RECORD = MemoryRecord(
    device_name=CARD,
    device="cuda",
    torch="2.13.0+cu130",
    compiled=True,
    attention="flash",
    precision="bf16",
    family="gpt",
    world_size=2,
    planned_bytes=10 * GIB,
    allocated_bytes=11 * GIB,
    reserved_bytes=12 * GIB,
    driver_bytes=13 * GIB,
    copies_bytes=0,
    time="2026-11-21T10:00:00.000Z",
    source="books",
)
LAPTOP = Machine(gpus=(), cpu_cores=2, cpu_bf16=False, memory_bytes=24 * GIB)
SMALL = Config(depth=2, n_embd=64, head_dim=32, sequence_len=64, total_batch_size=1536, num_steps=3, device="cpu")


def of_day(day: int, **fields) -> MemoryRecord:
    return replace(RECORD, time=f"2026-11-{day:02d}T10:00:00.000Z", **fields)


def test_the_ratio_is_the_median_of_the_newest_and_the_rest_is_what_the_driver_counts_beside():
    records = [of_day(day, allocated_bytes=(10 + share) * GIB) for day, share in enumerate((9, 1, 2, 3, 2, 1), start=1)]
    found = calibration_of(records, CARD, SETUP)
    assert (found.ratio, found.beside_bytes) == (1.2, 1 * GIB)
    assert found.source == "measured in 5 runs here, the last on 2026-11-06"


@pytest.mark.parametrize(
    "other",
    [{"device_name": "NVIDIA H100 80GB HBM3"}, {"compiled": False}, {"attention": "efficient"}, {"family": "other"}],
    ids=str,
)
def test_nothing_is_taken_from_another_device_mode_or_kernel(other):
    assert calibration_of([replace(RECORD, **other)], CARD, SETUP) is None


def test_where_the_driver_told_nothing_the_rest_stays_an_estimate():
    assert calibration_of([replace(RECORD, driver_bytes=None)], CARD, SETUP).beside_bytes is None


def test_one_rank_tells_nothing_of_what_several_hold_beside():
    assert calibration_of([replace(RECORD, world_size=1)], CARD, SETUP).beside_bytes is None


def test_a_probe_counts_only_as_long_as_no_run_was_measured():
    probe = of_day(2, source="probe", allocated_bytes=20 * GIB)
    assert calibration_of([probe], CARD, SETUP).ratio == 2.0
    assert calibration_of([of_day(1), probe], CARD, SETUP).ratio == 1.1


def test_on_a_cpu_what_the_process_took_beyond_plan_and_copies_is_added_to_the_next():
    plan = make_plan(SMALL, LAPTOP, vocab_size=512, num_rows=0)
    peak = plan.memory["allocated_bytes"]["expected"]
    measured = {"allocated_bytes": None, "reserved_bytes": None, "torch": "2.13.0", "time": RECORD.time}
    ranks = [
        {**measured, "compile_tried": False, "copies_bytes": 500, "driver_bytes": peak + 500 + extra}
        for extra in (10, 777)
    ]
    record = record_of(plan, ranks, source="books")
    assert (record.planned_bytes, record.driver_bytes) == (peak, peak + 1277)
    setup = replace(SETUP, device="cpu", attention="cpu", compiled=False, precision="fp32")
    found = calibration_of([record], "CPU", setup)
    assert (found.ratio, found.beside_bytes) == (1.0, 777 + copies_bytes(setup))


def test_a_cpu_process_that_tried_compiling_is_not_kept():
    plan = make_plan(SMALL, LAPTOP, vocab_size=512, num_rows=0)
    assert record_of(plan, [{"compile_tried": True, "driver_bytes": 1}], source="books") is None


def test_a_rank_that_does_not_know_leaves_the_figure_unknown():
    plan = make_plan(SMALL, LAPTOP, vocab_size=512, num_rows=0)
    known = {"allocated_bytes": 5, "reserved_bytes": 6, "driver_bytes": 7, "copies_bytes": 0, "compile_tried": False}
    ranks = [{**known, "torch": "2.13.0", "time": RECORD.time, "driver_bytes": size} for size in (7, None)]
    assert record_of(plan, ranks, source="books").driver_bytes is None


def test_a_kept_record_narrows_the_next_plan(tmp_path):
    before = make_plan(SMALL, LAPTOP, vocab_size=512, num_rows=0)
    peak = before.memory["allocated_bytes"]["expected"]
    values = {"device_name": "CPU", "device": "cpu", "attention": "cpu", "compiled": False, "precision": "fp32"}
    took = {"planned_bytes": peak, "allocated_bytes": None, "reserved_bytes": None, "driver_bytes": peak + GIB // 4}
    keep_record(tmp_path, replace(RECORD, **values, **took))
    after = make_plan(SMALL, LAPTOP, vocab_size=512, num_rows=0, calibrate=kept_calibration(tmp_path))
    low, high = (after.memory["process_bytes"][end] for end in ("low", "high"))
    assert low < peak + GIB // 4 < high
    assert high - low < before.memory["process_bytes"]["high"] - before.memory["process_bytes"]["low"]
    assert after.memory["source"] == "measured in a run here on 2026-11-21"


def test_the_oldest_of_a_kind_go(tmp_path):
    for number in range(KEEP_RECORDS + 3):
        keep_record(tmp_path, replace(RECORD, planned_bytes=1 + number))
    keep_record(tmp_path, replace(RECORD, compiled=False))
    kept = read_records(tmp_path)
    assert [record.planned_bytes for record in kept if record.compiled] == list(range(4, KEEP_RECORDS + 4))
    assert len(kept) == KEEP_RECORDS + 1


def keep_some(folder, first):
    for number in range(5):
        keep_record(folder, replace(RECORD, device_name=f"card {first}", planned_bytes=1 + number))


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=keep_some, args=(tmp_path, first)) for first in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(read_records(tmp_path)) == 20


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"records": {"x": [{}]}}', '{"records": {"x": [3]}}', "\x00\xff"], ids=repr
)
def test_a_damaged_file_is_named_once_passed_over_and_replaced(tmp_path, capsys, text):
    path = tmp_path / FILE_NAME
    path.write_text(text, encoding="latin-1")
    assert read_records(tmp_path) == read_records(tmp_path) == []
    assert capsys.readouterr().err == f"note    {path} is damaged and passed over; the next run measures anew\n"
    keep_record(tmp_path, RECORD)
    assert read_records(tmp_path) == [RECORD]


def test_a_key_of_a_newer_version_is_passed_over(tmp_path):
    keep_record(tmp_path, RECORD)
    table = json.loads((tmp_path / FILE_NAME).read_text())
    table["records"][RECORD.kind][0]["colour"] = "green"
    (tmp_path / FILE_NAME).write_text(json.dumps(table))
    assert read_records(tmp_path) == [RECORD]


def test_a_folder_that_cannot_be_written_costs_a_line_not_the_run(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    keep_record(tmp_path / "file", RECORD)
    assert "what was measured is not kept" in capsys.readouterr().err


def test_the_last_figures_of_an_attempt_are_kept_and_none_of_one_whose_ranks_did_not_all_measure(tmp_path):
    run, plan = RunDir(tmp_path / "books"), make_plan(SMALL, LAPTOP, vocab_size=512, num_rows=0)
    run.path.mkdir()
    run.plan_json.write_text(plan.to_json())
    figures = {
        "copies_bytes": 0,
        "compile_tried": False,
        "torch": "2.13.0",
        "allocated_bytes": None,
        "reserved_bytes": None,
    }
    for attempt, rank, size in [(1, 0, 9 * GIB), (2, 0, 1 * GIB), (2, 1, 2 * GIB), (2, 0, 3 * GIB), (3, 1, 5 * GIB)]:
        append_event(run, "memory", attempt=attempt, rank=rank, step=20, driver_bytes=size, **figures)
    for attempt in (1, 2, 3):
        keep_attempt(tmp_path, run, attempt)
    [kept] = read_records(tmp_path)
    assert (kept.driver_bytes, kept.source, kept.world_size) == (3 * GIB, "books", 2)
    assert kept.planned_bytes == peak_phase(replace_setup(plan)).bytes


def replace_setup(plan):
    from paceline.plan.planner import memory_setup

    return memory_setup(plan)
