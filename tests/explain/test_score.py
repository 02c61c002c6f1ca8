"""The score on real labelled logs, which are outside the repository."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = ROOT.parent / "shared" / "data" / "failure-logs" / "cases.jsonl"
SCORE = [sys.executable, str(ROOT / "benchmarks" / "explain.py"), "--cases"]
BAR = 92


def scored(*args):
    """Runs the benchmark with these arguments."""
    return subprocess.run([*SCORE, *map(str, args)], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.fixture
def cases(tmp_path):
    """Two plain cases and one with a wrong label."""
    path = tmp_path / "cases.jsonl"
    oom = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has 23.56 GiB\n"
    rows = [
        {"id": "a", "log": oom, "cause": "cuda-oom", "also": [], "rank": 1},
        {"id": "b", "log": oom, "cause": "sigsegv", "also": ["cuda-oom"], "rank": 0},
        {"id": "c", "log": oom, "cause": "healthy", "also": []},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_real_logs_are_explained_above_the_bar_without_a_false_alarm():
    if not CASES.is_file():
        pytest.skip(f"no {CASES}")
    done = scored(CASES, "--bar", BAR, "--wrong")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_score_accepts_also_and_lists_false_alarms_and_wrong_ranks(cases):
    sums = json.loads(scored(cases, "--json").stdout)
    assert (sums["right"], sums["false_alarms"], sums["wrong_ranks"], sums["right_ranks"]) == (2, ["c"], ["b"], 1)


def test_the_exit_code_is_1_below_the_bar_and_disputed_labels_are_counted_separately(cases):
    assert scored(cases, "--bar", 92).returncode == 1
    done = scored(cases, "--bar", 92, "--disputed", "c")
    assert done.returncode == 0
    assert "disputed labels: 0 of 1 as labelled" in done.stdout


def test_half_of_the_cases_can_be_reserved_for_measuring(cases):
    assert [case["id"] for case in json.loads(scored(cases, "--json", "--only", "even").stdout)["scored"]] == ["a", "c"]
