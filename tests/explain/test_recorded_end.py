"""The explanation of ends that a run's events show better than its logs."""

import os

import pytest

from paceline.explain.run_folder import explain_run
from paceline.rundir import RunDir, append_event, lock_run


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "books")
    run.logs(1).mkdir(parents=True)
    run.config_toml.write_text("device_batch_size = 8\n")
    append_event(run, "attempt", attempt=1, world_size=2, pids=[101, 102])
    for rank in range(2):
        run.rank_log(1, rank).write_text("".join(f"step {step} | loss 3.{9 - step}\n" for step in range(1, 9)))
    return run


def test_an_attempt_without_an_end_lost_its_supervisor_unless_it_goes_on(run):
    append_event(run, "stopped", step=8)
    lock = lock_run(run)
    assert explain_run(run).cause == "healthy"
    os.close(lock)
    explanation = explain_run(run)
    assert explanation.cause == "supervisor-lost"
    assert explanation.fix.endswith(f"`paceline resume {run.path}` goes on from the last checkpoint")


def test_a_run_whose_last_save_had_no_room_and_that_recorded_no_end_filled_the_disk(run):
    os.close(lock_run(run))
    append_event(run, "save_failed", step=8, needed_bytes=1 << 20, free_bytes=0)
    explanation = explain_run(run)
    assert (explanation.cause, explanation.summary) == (
        "disk-full", "the disk of the run folder had no room for the checkpoint of step 8",
    )  # fmt: skip


def test_a_rank_that_ended_itself_without_an_error_is_looked_up_in_its_own_log(run):
    append_event(run, "rank_failed", attempt=1, rank=1, exit_code=3, signal=None, message="", consequence=False)
    append_event(run, "attempt_ended", attempt=1, state="failed", exit_code=3)
    explanation = explain_run(run)
    assert (explanation.cause, explanation.rank) == ("unknown", 1)
    assert str(run.rank_log(1, 1)) in explanation.fix and "exits with 3" in explanation.fix
