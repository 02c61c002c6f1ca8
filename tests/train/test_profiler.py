"""Real ranks under the profiler: parts that add up to the step, a trace for Perfetto, and a run that stays as it was."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest
from runs import SMALL, Workshop

from paceline.plan.breakdown import COMPUTE


def hashes(run: Path) -> dict[str, str]:
    files = [path for path in run.rglob("*") if path.is_file() and path.relative_to(run).parts[0] != "profile"]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def profile(workshop: Workshop, *words: str) -> dict:
    output = workshop.finish(workshop.command("profile", *words, "--steps", "2", "--json"))
    return json.loads(output[output.index("{") : output.rindex("}") + 1])


def check(results: dict, *, ranks: int) -> None:
    parts = results["parts"]
    assert sum(part["ms"] for part in parts.values()) == pytest.approx(results["step_ms"])
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
    assert set(COMPUTE) <= set(parts)
    assert all(len(part["rank_ms"]) == ranks for part in parts.values())
    # what is held by arithmetic and what was traced are the plan's own phases, but for some tensors of a few bytes
    memory = results["memory"]
    assert {phase: kinds["total"] for phase, kinds in memory.items()} == pytest.approx(
        {phase: kinds["planned"] for phase, kinds in memory.items()}, rel=0.05
    )


@pytest.mark.soak
@pytest.mark.dist
def test_two_ranks_of_a_run_are_profiled_and_the_run_stays_as_it_was(unbroken, tmp_path):
    workshop = Workshop(tmp_path)
    run = workshop.copy(unbroken, "profiled")
    before = hashes(run)
    results = profile(workshop, str(run))
    assert hashes(run) == before
    check(results, ranks=2)
    assert results["parts"]["gradients sent"]["ms"] > 0 and results["parts"]["weights sent"]["ms"] > 0
    assert [Path(path).name for path in results["traces"]] == ["trace_0.json.gz", "trace_1.json.gz"]
    assert Path(results["folder"]).parent == run / "profile"
    for path in results["traces"]:
        events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
        phases = [event for event in events if event["name"] == "paceline.backward"]
        assert len(phases) == 2 * 3  # two steps of three micro-steps
        assert {event["ph"] for event in events if event.get("cat") == "cpu_op"} == {"X"}


@pytest.mark.soak
@pytest.mark.dist
def test_one_rank_of_a_config_is_profiled_in_the_cache_folder(tmp_path):
    keys = {**SMALL, "cache-dir": tmp_path / "cache", "data": tmp_path / "text", "nproc": 1}
    keys.pop("health-every")
    flags = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    results = profile(Workshop(tmp_path), *flags)
    check(results, ranks=1)
    assert not {"gradients sent", "weights sent"} & set(results["parts"])
    assert Path(results["folder"]).parent == tmp_path / "cache" / "profile"
    assert list(tmp_path.glob("runs/*")) == []
