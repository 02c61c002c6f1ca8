"""The fault loops: what a seed chooses, and a short form of the first with real runs. `make soak` also runs both loops whole."""

import itertools
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from hosts_run import FAULTS
from soak.faults import INTERVAL, KINDS, PHASES, RANKS, Fault, Run, fits, num_steps, pack, sample
from soak.hosts import read_results
from soak.hosts import sample as sample_hosts
from soak.loop import soak
from soak.table import HOSTS_TITLE, HostResult, Place, format_hosts, format_page, write_page


@pytest.mark.parametrize("seed", range(3))
def test_a_hundred_faults_have_every_kind_at_every_rank_and_phase(seed):
    faults = sample(seed, 100)
    struck = {(fault.kind, fault.phase) for fault in faults}
    assert struck == {(kind, phase) for kind in KINDS for phase in KINDS[kind].phases}
    assert {(fault.kind, fault.rank) for fault in faults} == set(itertools.product(KINDS, RANKS))


def test_a_seed_chooses_the_same_faults_in_the_same_runs_every_time():
    assert sample(7, 30) == sample(7, 30) != sample(8, 30)
    assert pack(sample(7, 30), seed=7, most=5) == pack(sample(7, 30), seed=7, most=5)


@pytest.mark.parametrize("seed", range(3))
def test_all_faults_find_a_run_in_which_they_can_strike(seed):
    runs = pack(sample(seed, 100), seed=seed, most=5)
    assert sum(len(run.faults) for run in runs) == 100
    for run in runs:
        assert fits(run.faults)
        assert run.nproc == 3 or all(fault.rank != "middle" for fault in run.faults)
        steps = [step for number in range(len(run.faults)) if (step := run.step(number)) is not None]
        assert steps == sorted(steps)
        assert all(after > before for before, after in itertools.pairwise(steps))
        assert not steps or steps[-1] <= num_steps(5) - INTERVAL


def test_a_step_is_struck_after_a_checkpoint_of_its_own_window():
    fault = Fault("sigkill", "last", "step", 0, "reduce", 0, INTERVAL + 1)
    run = Run(2, (fault, fault))
    assert [run.step(0), run.step(1)] == [13, 21]
    assert run.rank(0) == 1


@pytest.mark.dist
@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_every_kind_of_fault_once_and_the_run_ends_as_if_nothing_had_happened(tmp_path: Path):
    result = soak(tmp_path, seed=1, count=len(KINDS), ranks=("first", "last"), nprocs=(2,), most=6, hang_after_s=4)
    assert result.problems == (), "\n".join(result.problems)
    assert result.recovered == len(result.results) >= len(KINDS) - 1  # without root no disk can be mounted
    assert {item.fault.phase for item in result.results} == set(PHASES)
    assert f"{len(result.results)} faults in 2 runs" in format_page(result)


def result_of(place: Place, *problems: str) -> HostResult:
    return HostResult(place, "host-lost", not problems, 5.5, 7, 12.0, 30.0, problems)


def test_faults_of_several_hosts_have_every_kind_in_every_phase_before_one_is_repeated():
    count = len(FAULTS) * len(PHASES)
    assert count >= 60
    places = sample_hosts(1, count)
    assert Counter((place.kind, place.phase) for place in places) == Counter(itertools.product(FAULTS, PHASES))
    assert sample_hosts(1, count) == places != sample_hosts(2, count)
    assert {place.kind for place in sample_hosts(1, 10, kinds=["mtu", "disk"])} == {"mtu", "disk"}


def test_a_loop_of_several_hosts_continues_from_its_file_and_refuses_that_of_another(tmp_path: Path):
    places, path = sample_hosts(1, 6), tmp_path / "out"
    assert read_results(path, places) == []
    results = [result_of(place) for place in places[:2]]
    path.write_text("".join(json.dumps(asdict(result)) + "\n" for result in results))
    assert read_results(path, places) == results
    with pytest.raises(SystemExit, match="from another loop"):
        read_results(path, sample_hosts(1, 6, kinds=["disk"]))


def test_each_loop_replaces_its_own_part_of_the_page(tmp_path: Path):
    page, results = (
        tmp_path / "page.md",
        [result_of(Place("mtu", "eval", 15)), result_of(Place("mtu", "step", 15), "left: ssh")],
    )
    section = format_hosts(results, FAULTS, seed=1, interval=10, notes=["No netem."])
    assert "2 faults in as many runs, seed 1, 1 minutes: 1 recovered, cause right in 1.\n" in section
    row = f"| {FAULTS['mtu'].what} | 2 | 1 | 5.5 | 5.5 | 7 | 12.0 | 12.0 | hangs to its timeout | never |\n"
    assert row in section and "- mtu at step: left: ssh\n" in section
    write_page(page, one_host="# One host\n")
    write_page(page, several=section)
    write_page(page, one_host="# One host again\n")
    assert page.read_text() == "# One host again\n\n" + section
    write_page(page, several=f"{HOSTS_TITLE}\n")
    assert page.read_text() == f"# One host again\n\n{HOSTS_TITLE}\n"
