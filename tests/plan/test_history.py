"""What this machine learnt about memory: records kept by several processes at once, sizes that failed, and the next plan."""

import json
import multiprocessing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from setups import DEPTH_12, RTX_5090, TWO, planner, rows

from paceline.config import Config, ModelConfig
from paceline.plan.activations import MemorySetup
from paceline.plan.estimate import CPU_HEAP_GROWTH, CPU_PROCESS_BYTES, estimate_memory
from paceline.plan.forecast import measured_here
from paceline.plan.history import (
    FAILURES_FILE,
    FILE_NAME,
    KEEP_RECORDS,
    MemoryRecord,
    calibration_of,
    copies_bytes,
    fit_line,
    keep_attempt,
    keep_record,
    keep_too_large,
    read_records,
    record_of,
)
from paceline.plan.machine import Machine
from paceline.plan.memory import peak_phase
from paceline.plan.planner import make_plan, memory_setup
from paceline.rundir import RunDir, append_event
from paceline.units import MIB

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


def planned_of(setup: MemorySetup) -> int:
    return peak_phase(setup).bytes


LARGE = replace(SETUP, model=replace(SETUP.model, n_layer=12, n_embd=2048, n_head=64, n_kv_head=64, sequence_len=1024))
ON_CPU = replace(SETUP, device="cpu", attention="cpu", compiled=False, precision="fp32")
CPU_RECORD = replace(
    RECORD, device_name="CPU", device="cpu", attention="cpu", compiled=False, precision="fp32", allocated_bytes=None
)


def test_what_was_allocated_beyond_the_plan_and_what_the_driver_counts_besides_are_expected_again():
    planned = planned_of(LARGE)
    records = [
        of_day(
            day,
            planned_bytes=planned,
            allocated_bytes=round(share * planned),
            driver_bytes=round(share * planned) + GIB,
        )
        for day, share in enumerate((1.12, 1.1, 1.11, 1.11, 1.1), start=1)
    ]
    calibration = calibration_of(records, CARD, LARGE)
    assert calibration.allocated.expected == pytest.approx(1.11 * planned, rel=0.01)
    assert calibration.process.expected == pytest.approx(1.11 * planned + GIB, rel=0.02)
    assert calibration.source == "measured in 5 runs here, the last on 2026-11-05"


def test_one_toy_run_shifts_a_large_plan_by_what_it_took_and_no_more():
    toy = replace(CPU_RECORD, planned_bytes=10 * MIB, driver_bytes=10 * MIB + 400 * MIB)
    large = replace(LARGE, device="cpu", attention="cpu", compiled=False, precision="fp32")
    assumed = make_process(large)
    after = calibration_of([toy], "CPU", large)
    assert after.process.expected - assumed < 125 * MIB + 0.02 * assumed  # 125 more than assumed were measured
    assert after.source.endswith("; none was planned larger than 10.0 MiB")
    assert after.process.high - after.process.low > 0.4 * planned_of(large)  # nothing is known about the share


def make_process(setup: MemorySetup) -> float:
    return estimate_memory(setup, card_bytes=None, consumer=None, calibration=None).process.expected


def test_an_outlier_does_not_turn_the_line():
    sizes = [200 * MIB, 400 * MIB, 800 * MIB, 1200 * MIB, 1600 * MIB, 2400 * MIB]
    points = [(size, 300 * MIB + round(1.7 * size)) for size in sizes]
    line = fit_line((*points, (800 * MIB, 6000 * MIB)), CPU_PROCESS_BYTES, CPU_HEAP_GROWTH)
    for size, measured in points:
        assert line.at(size).expected == pytest.approx(measured, rel=0.04)


def histories(outliers: list[float], largest_mib: int):
    """Runs on one machine: (planned, measured) bytes."""
    runs = st.tuples(st.floats(5, largest_mib), st.floats(0.98, 1.02), st.sampled_from(outliers))
    return st.builds(
        lambda constant, slope, runs: tuple(
            (round(size * MIB), round((constant + slope * size) * noise * outlier * MIB))
            for size, noise, outlier in runs
        ),
        st.floats(200, 420),
        st.floats(1.0, 1.8),
        st.lists(runs, min_size=1, max_size=20),
    )


@given(histories([1.0] * 6 + [0.5, 3.0], 8000))
def test_no_history_makes_the_plans_of_its_own_runs_worse(points):
    line, assumed = (fit_line(some, CPU_PROCESS_BYTES, CPU_HEAP_GROWTH) for some in (points, ()))
    in_mib = [(planned / MIB, measured / MIB) for planned, measured in points]
    assert line.error(in_mib) <= assumed.error(in_mib)


@given(histories([1.0], 40), st.floats(5, 50_000))
def test_small_runs_change_the_plan_of_a_large_one_by_less_than_half_of_it_beyond_what_they_took(points, size):
    line, assumed = (fit_line(some, CPU_PROCESS_BYTES, CPU_HEAP_GROWTH) for some in (points, ()))
    shift = abs(line.at(size * MIB).expected - assumed.at(size * MIB).expected)
    seen = max(abs(measured - assumed.at(planned).expected) for planned, measured in points)
    assert shift <= seen + 0.5 * size * MIB  # scaled by the ratio of the sizes it was up to a thousand times as much


@given(histories([1.0], 8000).filter(lambda points: len(points) >= 5))
def test_five_runs_tell_what_each_of_them_takes(points):
    line = fit_line(points, CPU_PROCESS_BYTES, CPU_HEAP_GROWTH)
    for planned, measured in points:
        assert line.at(planned).expected == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize(
    "other",
    [{"device_name": "NVIDIA H100 80GB HBM3"}, {"compiled": False}, {"attention": "efficient"}, {"family": "other"}],
    ids=str,
)
def test_nothing_is_taken_from_another_device_mode_or_kernel(other):
    assert calibration_of([replace(RECORD, **other)], CARD, SETUP) is None


def test_where_the_driver_reports_nothing_the_rest_of_the_process_stays_an_estimate():
    assert calibration_of([replace(RECORD, driver_bytes=None)], CARD, SETUP).process is None


def test_one_rank_shows_nothing_about_the_rest_of_the_process_of_several():
    assert calibration_of([replace(RECORD, world_size=1)], CARD, SETUP).process is None


def test_a_probe_counts_only_as_long_as_no_run_was_measured():
    probe = of_day(2, source="probe", allocated_bytes=12 * GIB)
    only, beside = (calibration_of(records, CARD, LARGE) for records in ([probe], [of_day(1), probe]))
    assert beside == calibration_of([of_day(1)], CARD, LARGE)
    assert only.allocated.expected > beside.allocated.expected


def test_what_another_pytorch_took_does_not_count():
    old = [of_day(day, torch="2.11.0", allocated_bytes=13 * GIB) for day in (1, 2)]
    assert calibration_of([*old, of_day(3)], CARD, LARGE) == calibration_of([of_day(3)], CARD, LARGE)


MEASURED = {  # by one rank, on a CPU
    "copies_bytes": 0, "compile_tried": False, "torch": "2.13.0", "allocated_bytes": None, "reserved_bytes": None,
}  # fmt: skip


def test_on_a_cpu_the_overhead_beyond_plan_and_copies_is_added_to_the_next_plan():
    plan = make_plan(SMALL, LAPTOP, vocab_size=512, num_rows=0)
    peak = plan.memory["allocated_bytes"]["expected"]
    measured = {**MEASURED, "time": RECORD.time, "copies_bytes": 500}
    ranks = [{**measured, "driver_bytes": peak + 500 + extra} for extra in (290 * MIB, 300 * MIB)]
    record = record_of(plan, ranks, source="books")
    assert (record.planned_bytes, record.driver_bytes) == (peak, peak + 500 + 300 * MIB)
    calibration = calibration_of([record], "CPU", ON_CPU)
    assert calibration.allocated is None  # counted to the byte
    assert calibration.process.expected == pytest.approx(peak + copies_bytes(ON_CPU) + 300 * MIB, rel=0.06)


def test_a_cpu_process_that_tried_compiling_is_not_kept():
    plan = make_plan(SMALL, LAPTOP, vocab_size=512, num_rows=0)
    assert record_of(plan, [{"compile_tried": True, "driver_bytes": 1}], source="books") is None


def test_a_rank_without_a_figure_leaves_the_figure_unknown():
    plan = make_plan(SMALL, LAPTOP, vocab_size=512, num_rows=0)
    ranks = [{**MEASURED, "time": RECORD.time, "driver_bytes": size} for size in (7, None)]
    assert record_of(plan, ranks, source="books").driver_bytes is None


def test_a_record_narrows_the_range_of_the_next_plan(tmp_path):
    before = make_plan(SMALL, LAPTOP, vocab_size=512, num_rows=0)
    peak = before.memory["allocated_bytes"]["expected"]
    keep_record(tmp_path, replace(CPU_RECORD, planned_bytes=peak, driver_bytes=peak + GIB // 4))
    after = make_plan(SMALL, LAPTOP, vocab_size=512, num_rows=0, measured=measured_here(tmp_path))
    low, high = (after.memory["process_bytes"][end] for end in ("low", "high"))
    assert low < peak + GIB // 4 < high
    assert high - low < before.memory["process_bytes"]["high"] - before.memory["process_bytes"]["low"]
    assert after.memory["source"] == "measured in a run here on 2026-11-21"


def test_the_oldest_records_of_a_kind_are_dropped(tmp_path):
    for number in range(KEEP_RECORDS + 3):
        keep_record(tmp_path, replace(RECORD, planned_bytes=1 + number))
    keep_record(tmp_path, replace(RECORD, compiled=False))
    attempt_record = read_records(tmp_path)
    assert [record.planned_bytes for record in attempt_record if record.compiled] == list(range(4, KEEP_RECORDS + 4))
    assert len(attempt_record) == KEEP_RECORDS + 1


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
def test_a_damaged_file_is_reported_once_ignored_and_replaced(tmp_path, capsys, text):
    path = tmp_path / FILE_NAME
    path.write_text(text, encoding="latin-1")
    assert read_records(tmp_path) == read_records(tmp_path) == []
    assert capsys.readouterr().err == f"note    {path} is damaged and ignored; the next run measures again\n"
    keep_record(tmp_path, RECORD)
    assert read_records(tmp_path) == [RECORD]


def test_a_key_of_a_newer_version_is_ignored(tmp_path):
    keep_record(tmp_path, RECORD)
    table = json.loads((tmp_path / FILE_NAME).read_text())
    table["records"][RECORD.kind][0]["colour"] = "green"
    (tmp_path / FILE_NAME).write_text(json.dumps(table))
    assert read_records(tmp_path) == [RECORD]


def test_a_folder_that_cannot_be_written_is_reported_and_ends_nothing(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    keep_record(tmp_path / "file", RECORD)
    assert "what was measured is not kept" in capsys.readouterr().err


def test_the_last_figures_of_an_attempt_are_kept_and_none_of_one_whose_ranks_did_not_all_measure(tmp_path):
    run, plan = RunDir(tmp_path / "books"), make_plan(SMALL, LAPTOP, vocab_size=512, num_rows=0)
    run.path.mkdir()
    run.plan_json.write_text(plan.to_json())
    for attempt, rank, size in [(1, 0, 9 * GIB), (2, 0, 1 * GIB), (2, 1, 2 * GIB), (2, 0, 3 * GIB), (3, 1, 5 * GIB)]:
        append_event(run, "memory", attempt=attempt, rank=rank, step=20, driver_bytes=size, **MEASURED)
    for attempt in (1, 2, 3):
        keep_attempt(tmp_path, run, attempt)
    [attempt_record] = read_records(tmp_path)
    assert (attempt_record.driver_bytes, attempt_record.source, attempt_record.world_size) == (3 * GIB, "books", 2)
    assert attempt_record.planned_bytes == peak_phase(memory_setup(plan)).bytes


def keep_failure(folder, plan, card_bytes=RTX_5090.memory_bytes):
    keep_too_large(folder, plan, card_bytes=card_bytes, source="books")


def test_the_next_plan_takes_the_next_fewer_rows(tmp_path):
    first = planner(tmp_path)(DEPTH_12, TWO)
    keep_failure(tmp_path, first)
    second = planner(tmp_path)(DEPTH_12, TWO)
    assert rows(second) == (first.device_batch_size // 2, False)
    assert second.total_batch_size == first.total_batch_size
    keep_failure(tmp_path, second)
    assert rows(planner(tmp_path)(DEPTH_12, TWO)) == (first.device_batch_size // 4, False)


def test_a_failure_that_cannot_be_written_is_reported_and_ends_nothing(tmp_path, capsys):
    (tmp_path / FAILURES_FILE).mkdir()
    keep_failure(tmp_path, planner(tmp_path / "other")(DEPTH_12, TWO))
    assert "too_large.jsonl cannot be written: Is a directory: the size is not kept" in capsys.readouterr().err


def test_a_size_that_failed_on_a_partly_used_device_is_allowed_when_the_device_is_empty(tmp_path):
    first = planner(tmp_path)(DEPTH_12, TWO)
    keep_failure(tmp_path, first, card_bytes=RTX_5090.memory_bytes // 2)
    assert planner(tmp_path)(DEPTH_12, TWO) == first


@pytest.mark.parametrize("other", [
    replace(TWO, gpus=tuple(replace(gpu, memory_bytes=48 << 30) for gpu in TWO.gpus)),
    replace(TWO, gpus=tuple(replace(gpu, name="NVIDIA RTX PRO 6000") for gpu in TWO.gpus)),
], ids=["more memory", "another card"])  # fmt: skip
def test_a_failure_says_nothing_about_another_device(other, tmp_path):
    before = planner(tmp_path)(DEPTH_12, other)
    keep_failure(tmp_path, planner(tmp_path)(DEPTH_12, TWO))
    assert planner(tmp_path)(DEPTH_12, other) == before


@pytest.mark.parametrize("keys", [{"depth": 11}, {"precision": "fp32"}, {"optimizer": "adamw"}], ids=str)
def test_a_failure_says_nothing_about_another_model(keys, tmp_path):
    other = replace(DEPTH_12, **keys)
    before = planner(tmp_path)(other, TWO)
    keep_failure(tmp_path, replace(planner(tmp_path)(DEPTH_12, TWO), device_batch_size=1))
    assert planner(tmp_path)(other, TWO) == before


def test_rows_that_the_user_sets_are_the_users(tmp_path):
    first = planner(tmp_path)(DEPTH_12, TWO)
    keep_failure(tmp_path, first)
    user_config = replace(DEPTH_12, device_batch_size=first.device_batch_size)
    assert planner(tmp_path)(user_config, TWO).device_batch_size == first.device_batch_size


def test_lines_that_cannot_be_read_are_ignored(tmp_path):
    (tmp_path / FAILURES_FILE).write_text('{"device_name": "x"}\nhalf a li')
    first = planner(tmp_path)(DEPTH_12, TWO)
    keep_failure(tmp_path, first)
    assert planner(tmp_path)(DEPTH_12, TWO).device_batch_size < first.device_batch_size
