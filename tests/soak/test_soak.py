"""The fault loop: what a seed chooses, and a short form of it with real runs. `make soak` runs both, and then 100 faults."""

import itertools
from pathlib import Path

import pytest
from soak.faults import INTERVAL, KINDS, PHASES, RANKS, Fault, Run, fits, num_steps, pack, sample
from soak.loop import soak
from soak.table import format_page


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
