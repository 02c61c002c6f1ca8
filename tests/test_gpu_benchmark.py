"""benchmarks/gpu.py: what it keeps, skips and repeats; its rows themselves need minutes, and most of them a GPU."""

import json
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
try:
    import gpu
    import gpu_runs
    from gpu_runs import Result, Row, RowFailed, Setup, TimeOver
finally:
    sys.path.pop(0)

MACHINE = {"name": "H100", "torch": "2.13", "device": "cuda", "sequence_len": 2048}


def measure(tmp_path, *rows, budget_s=60.0):
    out = tmp_path / "gpu.json"
    results = gpu.load_results(out, MACHINE)
    setup = Setup(tmp_path, time.monotonic() + budget_s, "cpu", 128, 10)
    left = gpu.measure_rows(rows, setup, results, out=out)
    return left, json.loads(out.read_text())["rows"]


def row(name, calls, *, right=True, error=None, seconds=1.0):
    def once(setup):
        calls.append(name)
        if error:
            raise error
        return Result(right, f"{name} has figures", {"tokens/s": "5"})

    return Row(name, "fast", seconds, once)


def test_a_failed_row_is_recorded_with_its_error_and_the_next_one_is_measured(tmp_path):
    calls = []
    rows = measure(tmp_path, row("a", calls, error=RowFailed("out of memory")), row("b", calls))[1]
    assert calls == ["a", "b"]
    assert (rows["a"]["verdict"], rows["a"]["figures"]) == ("failed", "out of memory")
    assert rows["b"]["verdict"] == "right"


def test_a_second_call_takes_rows_that_are_missing_failed_or_wrong_and_no_others(tmp_path):
    calls = []
    measure(tmp_path, row("a", calls), row("b", calls, right=False), row("c", calls, error=OSError("disk")))
    rows = measure(tmp_path, *(row(name, calls) for name in "abcd"))[1]
    assert calls == ["a", "b", "c", "b", "c", "d"]
    assert {name: row["verdict"] for name, row in rows.items()} == dict.fromkeys("abcd", "right")


def test_an_interrupted_call_has_kept_what_was_measured_before(tmp_path):
    calls = []
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, row("a", calls), row("b", calls, error=KeyboardInterrupt()))
    assert list(measure(tmp_path, row("a", calls), row("b", calls))[1]) == ["a", "b"]
    assert calls == ["a", "b", "b"]


def test_no_row_begins_that_would_not_end_in_time_but_the_first(tmp_path):
    calls = []
    rows = [row(name, calls, seconds=100) for name in "ab"]
    assert measure(tmp_path, *rows)[0] == 1
    assert measure(tmp_path, *rows)[0] == 0
    assert calls == ["a", "b"]


def test_rows_of_another_machine_are_refused(tmp_path):
    measure(tmp_path, row("a", []))
    with pytest.raises(SystemExit) as end:
        gpu.load_results(tmp_path / "gpu.json", MACHINE | {"name": "H200"})
    assert str(end.value).endswith("has rows with name H100, here it is H200\n  fix: --out another.json")


def test_the_table_has_every_row_with_its_verdict(tmp_path):
    calls = []
    measure(tmp_path, row("a", calls), row("b", calls, error=RowFailed("exit 1\nTraceback a | b")))
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    assert "| row | verdict | tokens/s | figures |" in lines
    assert "| a | ok | 5 | a has figures |" in lines
    assert "| b | FAILED |  | exit 1 |" in lines


def test_a_row_that_the_time_did_not_suffice_for_is_left_and_a_first_one_has_failed(tmp_path):
    calls = []
    left, rows = measure(tmp_path, row("a", calls), row("b", calls, error=TimeOver("ended after 5 s")))
    assert left == 1 and list(rows) == ["a"]
    left, rows = measure(tmp_path, row("b", calls, error=TimeOver("ended after 480 s")))
    assert left == 0 and rows["b"]["verdict"] == "failed"


def test_a_command_that_does_not_end_in_time_or_well_fails_its_row(tmp_path):
    with pytest.raises(TimeOver, match="ended after 1 s at 'no output'"):
        gpu_runs.command(Setup(tmp_path, time.monotonic(), "cpu", 128, 10), ["-c", "import time; time.sleep(60)"])
    setup = Setup(tmp_path, time.monotonic() + 60, "cpu", 128, 10)
    with pytest.raises(RowFailed, match="^error: no memory: exit code 3 of "):
        gpu_runs.command(setup, ["-c", "import sys; print('error: no memory', file=sys.stderr); sys.exit(3)"])


def test_every_row_has_a_name_of_its_own_and_those_of_correctness_come_first():
    rows = list(gpu_runs.all_rows([8, 12, 20], "cuda"))
    assert len({row.name for row in rows}) == len(rows)
    parts = list(dict.fromkeys(row.part for row in rows))
    assert parts[0] == "right" and set(parts) == set(gpu.PARTS)
    assert max(row.seconds for row in rows) < 480
