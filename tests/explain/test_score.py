"""The score on real labelled logs, which are outside the repository."""

import io
import json
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from paceline.explain.catalogue import load_catalogue

ROOT = Path(__file__).parents[2]
CASES = ROOT.parent / "shared" / "data" / "failure-logs" / "cases.jsonl"
SCORE = ROOT / "benchmarks" / "explain.py"
BAR = 92
OOM = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has 23.56 GiB\n"
TIME_LIMIT = "slurmstepd: error: *** JOB 4711 ON gpu-7 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***\n"
LIBUV = "RuntimeError: use_libuv was requested but PyTorch was build without libuv support\n"
STEPS = "".join(f"step {step:05d}/00100 | loss {3 - step / 50:.3f}\n" for step in range(10))


def benchmark(*args):
    """Runs the benchmark with these arguments, in this process, which has read the catalogue."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(ROOT)
        patch.syspath_prepend(str(SCORE.parent))
        patch.setattr(sys, "argv", [str(SCORE), *map(str, args)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCORE), run_name="__main__")
    return subprocess.CompletedProcess(sys.argv, end.value.code, out.getvalue(), err.getvalue())


def scored(*args):
    return benchmark("--cases", *args)


def write_cases(path, rows):
    path.write_text("".join(json.dumps({"also": [], **row}) + "\n" for row in rows))
    return path


def read_cases(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def cases(tmp_path):
    """Two plain cases and one with a wrong label."""
    rows = [
        {"id": "a", "log": OOM, "cause": "cuda-oom", "rank": 1},
        {"id": "b", "log": OOM, "cause": "sigsegv", "also": ["cuda-oom"], "rank": 0},
        {"id": "c", "log": OOM, "cause": "healthy"},
    ]
    return write_cases(tmp_path / "cases.jsonl", rows)


@pytest.fixture
def gpualert(tmp_path):
    """A corpus of three logs in the form of GPUAlert's; the last one has a label of its own."""
    rows = [
        ("cuda_oom-injected-0001", "cuda_oom", "injected", OOM),
        ("nan_loss-injected-0001", "nan_loss", "injected", OOM),
        (
            "missing_module-wild-02",
            "missing_module",
            "wild",
            "ImportError: libcudart.so.11.0: cannot open shared object file\n",
        ),
    ]
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for id, _, _, log in rows:
        (corpus / f"{id}.log").write_text(log)
    labels = [
        {"id": id, "mode": mode, "source": source, "log_path": f"corpus/{id}.log"} for id, mode, source, _ in rows
    ]
    (corpus / "labels.jsonl").write_text("".join(json.dumps(label) + "\n" for label in labels))
    return tmp_path


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


def test_sources_are_scored_one_by_one_with_repositories_that_have_few_logs_together(tmp_path):
    rows = [
        *({"id": f"a{n}", "source": f"team/trainer#{n}", "log": OOM, "cause": "cuda-oom", "rank": n} for n in range(5)),
        {"id": "b", "source": "team/other:logs/x.log", "log": STEPS, "cause": "healthy"},
        {"id": "c", "source": "team/third#7", "log": OOM, "cause": "healthy"},
    ]
    done = scored(write_cases(tmp_path / "new.jsonl", rows), write_cases(tmp_path / "more.jsonl", rows[5:6]))
    rows = done.stdout.split("\n\n")[1].splitlines()[1:]
    # logs, right, false alarms, failures called healthy, unknown, ranks right; without the mean confidence
    assert [re.sub(r" +", " ", re.sub(r" \d+% ", " ", row)) for row in rows] == [
        "new.jsonl 7 85.7% 1 of 2 0 of 5 0 1 of 5",
        " team/trainer 5 100.0% 0 of 0 0 of 5 0 1 of 5",
        " 2 others 2 50.0% 1 of 2 0 of 0 0 n/a",
        "more.jsonl 1 100.0% 0 of 1 0 of 0 0 n/a",
    ]


def test_a_failure_called_healthy_is_listed_and_fails_the_bar(tmp_path):
    path = write_cases(tmp_path / "cases.jsonl", [{"id": "a", "log": STEPS, "cause": "loss-nan"}])
    sums = json.loads(scored(path, "--json").stdout)
    assert (sums["called_healthy"], sums["right"]) == (["a"], 0)
    right = [{"id": f"b{n}", "log": OOM, "cause": "cuda-oom"} for n in range(99)]
    write_cases(path, [*right, {"id": "a", "log": STEPS, "cause": "loss-nan"}])
    assert scored(path, "--bar", 92).returncode == 1


def test_a_source_is_scored_without_the_patterns_that_only_its_own_logs_show(tmp_path):
    rows = [
        {"id": "a", "source": "x/one#1", "log": OOM, "cause": "cuda-oom"},
        {"id": "b", "source": "x/two#1", "log": OOM, "cause": "cuda-oom"},
        {"id": "c", "source": "x/two#2", "log": LIBUV, "cause": "libuv-missing"},
    ]
    path = write_cases(tmp_path / "cases.jsonl", rows)
    report = json.loads(scored(path, "--leave-one-source-out", "--json").stdout)
    assert (report["right"], report["unseen"]["right"]) == (3, 2)
    text = scored(path, "--leave-one-source-out").stdout
    assert "leave one source out: 2 of 3 right, 66.7%" in text
    assert "causes that another source shows too: 2 of 2 right, 100.0%" in text


def test_leaving_patterns_out_takes_nothing_from_the_plain_score(tmp_path):
    """The catalogue is complete again: the second source's libuv log is scored after the first source's turn."""
    rows = [{"id": id, "source": f"x/{id}#1", "log": LIBUV, "cause": "libuv-missing"} for id in "ab"]
    rows.append({"id": "c", "source": "x/c#1", "log": TIME_LIMIT, "cause": "slurm-time-limit"})
    report = json.loads(scored(write_cases(tmp_path / "cases.jsonl", rows), "--leave-one-source-out", "--json").stdout)
    assert (report["right"], report["unseen"]["right"]) == (3, 2)


def test_classes_of_gpualert_are_mapped_to_causes_and_single_logs_have_their_own(gpualert):
    report = json.loads(benchmark("--gpualert", gpualert, "--json").stdout)
    assert [(case["label"], case["right"]) for case in report["scored"]] == [
        ("cuda-oom", True),
        ("loss-nan", False),
        ("shared-library-missing", True),
    ]
    assert {name: sums["cases"] for name, sums in report["by_file"].items()} == {
        "gpualert injected": 2,
        "gpualert wild": 1,
    }


def test_every_class_and_log_of_gpualert_is_mapped_to_causes_of_the_catalogue():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from gpualert import CLASSES, WILD
    finally:
        sys.path.pop(0)
    assert len(CLASSES) == 15
    assert {
        cause for causes in (*CLASSES.values(), *WILD.values()) for cause in causes
    } <= load_catalogue().causes.keys()
    assert {id.split("-")[0] for id in WILD} <= CLASSES.keys()


def test_a_folder_without_the_corpus_is_refused_with_the_command_that_fetches_it(tmp_path):
    done = benchmark("--gpualert", tmp_path)
    assert done.returncode == 2
    assert f"no corpus/labels.jsonl in {tmp_path}: git clone https://github.com/Parv-01/gpualert-eval" in done.stderr


def test_fixes_are_drawn_from_failures_by_a_seed(tmp_path):
    rows = [
        {"id": f"a{n}", "source": f"x/one#{n}", "log": OOM, "cause": "cuda-oom", "fix": f"smaller {n}"}
        for n in range(9)
    ]
    rows.append({"id": "h", "source": "x/one#h", "log": STEPS, "cause": "healthy"})
    path = write_cases(tmp_path / "cases.jsonl", rows)
    draws = [scored(path, "--sample-fixes", 4, "--seed", seed).stdout.split("\n\n1. ")[1] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert draws[0].count("   fix: ") == draws[0].count("   what solved it: smaller ") == 4
    assert "x/one#h" not in scored(path, "--sample-fixes", 40).stdout


def test_pairs_of_logs_are_joined_in_both_orders_and_scored(tmp_path):
    rows = [
        {"id": "a", "source": "x/one#a", "log": OOM, "cause": "cuda-oom"},
        {"id": "b", "source": "x/two#b", "log": STEPS, "cause": "healthy"},
        {"id": "c", "source": "x/two#c", "log": OOM, "cause": "sigsegv"},  # wrong alone, so in no pair
    ]
    output = scored(write_cases(tmp_path / "cases.jsonl", rows), "--pairs", 2).stdout
    assert "8 of 8 files of two runs right" in output
    assert "earlier failures that are told: 4 of 4" in output
