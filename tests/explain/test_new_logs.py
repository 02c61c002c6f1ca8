"""The form of the labelled logs that measure `paceline explain` on failures of 2025 and 2026 (new_logs_*.jsonl)."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("new_logs_*.jsonl"))
USED = HERE.parents[2] / "shared" / "data" / "failure-logs" / "cases.jsonl"
NEEDED = {"id", "source", "year", "cause", "also", "fix", "evidence", "log"}
# completed: the source quotes only parts, and some lines around them were filled in
OPTIONAL = {"rank", "completed", "trainer"}
SECRETS = re.compile(r"[\w.+-]+@[\w-]+\.[a-z]{2,}|\b(hf_|sk-|ghp_|AKIA)[A-Za-z0-9]{12,}")


def read(path):
    """The cases of a file, one of each line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def twice(values):
    """The values that occur more than once."""
    return [value for value, count in Counter(values).items() if count > 1]


CASES = [pytest.param(case, id=f"{path.stem}-{case['id']}") for path in FILES for case in read(path)]


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_the_fields_and_a_condensed_log(case):
    assert set(case) - OPTIONAL == NEEDED
    assert case["year"] in (2025, 2026)
    assert case["evidence"] in ("thread says so", "obvious from the log")
    labels = [case["cause"], *case["also"]]
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", label) for label in labels)
    assert not twice(labels)
    assert isinstance(case.get("rank", 0), int)
    assert case.get("completed", True) is True
    assert case["fix"].endswith(".")
    lines = case["log"].split("\n")
    assert 2 <= len(lines) <= 60
    assert max(map(len, lines)) <= 1200
    assert not SECRETS.search(case["log"])


def test_no_id_and_no_source_occurs_twice():
    cases = [case.values[0] for case in CASES]
    assert not twice(case["id"] for case in cases)
    assert not twice(case["source"].lower() for case in cases)


def test_no_kind_of_failure_outweighs_the_others():
    causes = Counter(case.values[0]["cause"] for case in CASES)
    del causes["healthy"]
    assert causes.most_common(1)[0][1] <= sum(causes.values()) // 10


def test_no_source_was_used_to_build_the_answers():
    if not USED.is_file():
        pytest.skip(f"no {USED}")
    used = {case["source"].lower() for case in read(USED)}
    assert not used & {case.values[0]["source"].lower() for case in CASES}
