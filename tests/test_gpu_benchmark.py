"""benchmarks/gpu.py: what it keeps, skips and repeats; its rows themselves need minutes, and most of them a GPU."""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
try:
    import gpu
    import gpu_runs
    from gpu_runs import Result, Row, RowFailed, Setup, TimeOver
finally:
    sys.path.pop(0)

ROOT = Path(__file__).parents[1]
# what the machine with a card has; Triton comes with PyTorch's CUDA build
BARE = {"torch", "numpy", "tokenizers", "safetensors", "rich", "psutil", "triton", "setuptools"}
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


@pytest.fixture
def bare_machine() -> dict[str, str]:
    """The environment of a machine on which nothing of paceline's dependencies is installed but BARE."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[\[>=;]", requirement)[0].strip() for requirement in wanted} - BARE
    blocked = [module for module, owners in packages_distributions().items() if names & set(owners)]
    assert {"orjson", "argcomplete", "textual", "starlette", "pynvml"} <= set(blocked)
    return {**os.environ, "BLOCKED_IMPORTS": ",".join(blocked), "PYTHONPATH": str(ROOT / "tests" / "bare_machine")}


def call(bare_machine, out, *words):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu"]
    command += ["--depths", "2", "--sequence-len", "64", "--steps", "5", "--out", str(out), *words]
    done = subprocess.run(command, env=bare_machine, capture_output=True, text=True, cwd=out.parent)
    return done.returncode, json.loads(out.read_text())["rows"], done.stdout + done.stderr


@pytest.mark.slow
def test_the_planner_and_the_trainer_import_nothing_that_a_bare_machine_lacks(bare_machine):
    files = [file for name in ("plan", "data", "model", "train") for file in (ROOT / "paceline" / name).glob("*.py")]
    files = [
        file for file in files if "kernel" not in file.stem and file.stem != "modeling_paceline"
    ]  # for transformers
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    script = (
        f"import importlib, sys; sys.path.insert(0, {str(ROOT)!r}); [importlib.import_module(m) for m in {modules!r}]"
    )
    done = subprocess.run([sys.executable, "-c", script], env=bare_machine, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # the fixture can fail: what reads run folders needs a package that is not there
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import paceline.watch.snapshot"
    done = subprocess.run([sys.executable, "-c", script], env=bare_machine, capture_output=True, text=True)
    assert "No module named 'orjson'" in done.stderr


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_every_part_runs_to_its_end_on_a_bare_machine_and_a_second_call_measures_nothing(bare_machine, tmp_path):
    status, rows, output = call(bare_machine, tmp_path / "gpu.json", "--budget-s", "5000")
    assert {row["part"] for row in rows.values()} == set(gpu.PARTS)
    wrong = {name for name, row in rows.items() if row["verdict"] != "right"}
    # what a CPU's process takes besides what is planned, a compiler and freed blocks, is more than a small model
    assert wrong <= {"memory of depth 2 compiled", "memory of depth 2 checkpointed"}, output
    assert status == (1 if wrong else 0), output
    again = call(bare_machine, tmp_path / "gpu.json", "--parts", "right,kernels,low,fast,start,profile")
    assert again[1] == rows, again[2]


@pytest.mark.dist
@pytest.mark.soak
def test_a_run_and_a_resumed_one_end_well_on_a_bare_machine(bare_machine, tmp_path):
    status, rows, output = call(bare_machine, tmp_path / "gpu.json", "--parts", "start")
    assert status == 0, output
    assert rows["start at depth 2"]["verdict"] == "right"
