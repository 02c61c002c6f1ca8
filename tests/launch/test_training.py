"""What of a training run gives way between two attempts: which plan is written, and what it tells."""

import json
from dataclasses import replace

import pytest

from paceline.config import Config
from paceline.errors import PlanError
from paceline.launch.policy import Abilities, Decision, Ended
from paceline.launch.training import TrainingJob, stop_grace_s
from paceline.plan.gpus import find_gpu
from paceline.plan.machine import Gpu, Machine
from paceline.plan.planner import Plan, make_plan
from paceline.rundir import RunDir, append_sample, read_json_lines, utc_now

CARD = Gpu(0, "NVIDIA GeForce RTX 5090", 32_607 << 20, (12, 0), find_gpu("RTX 5090"))
ONE, TWO, NONE = (Machine(tuple(replace(CARD, index=i) for i in range(n)), 16, False, 64 << 30) for n in (1, 2, 0))
CONFIG = Config(depth=12, num_steps=50, total_batch_size=524_288)
LOST = Ended("gpu-hardware-error", "same", rank=1, step=7, new_checkpoint=False, seconds=60, error="fell off the bus")
ON_GPUS = Abilities(own_trainer=True, rows_on_host=False)
NO_MEMORY = replace(LOST, cause="cuda-oom", retry="smaller")


def make(config: Config, machine: Machine) -> Plan:
    return make_plan(config, machine, vocab_size=32_768, num_rows=1000)


@pytest.fixture
def job_on(tmp_path):
    """A run that began on two cards, and what is found at its attempt's end."""

    def started(probe):
        run = RunDir(tmp_path / "run")
        run.path.mkdir()
        run.plan_json.write_text(make(CONFIG, TWO).to_json())
        return TrainingJob(
            run, CONFIG, make=make, env_of=lambda plan: {}, cache=tmp_path / "cache", lock=0, libuv=True, probe=probe
        )

    return started


def changed(job, action):
    job.change(Decision(action, 0, "x"))
    [event] = [e for e in read_json_lines(job.run.events) if e["event"] == "plan_changed"]
    return event


def test_a_card_that_is_gone_leaves_the_same_steps_to_the_others(job_on):
    job = job_on(lambda: ONE)
    before = job.plan
    assert job.abilities(LOST) == replace(ON_GPUS, ranks_left=1)
    assert changed(job, "fewer-ranks")["world_size"] == 1
    after = job.plan
    assert (after.world_size, after.total_batch_size, after.num_steps) == (1, before.total_batch_size, 50)
    assert after.device_batch_size * after.grad_accum_steps == before.total_batch_size // CONFIG.sequence_len
    assert not (job.cache / "too_large.jsonl").exists()


def test_where_the_steps_do_not_fit_the_cards_that_are_left_there_is_nothing_to_go_on_with(job_on):
    small = Machine((replace(CARD, memory_bytes=2 << 30),), 16, False, 64 << 30)
    job = job_on(lambda: small)
    assert job.abilities(LOST).ranks_left == 0


def test_a_size_that_failed_beside_another_process_is_not_held_against_the_whole_card(job_on):
    job = job_on(lambda: TWO)
    others = [{"pid": 1, "bytes": 9 << 30, "ours": False}, {"pid": 2, "bytes": 20 << 30, "ours": True}]
    append_sample(
        job.run.health("tower"), {"time": utc_now(), "gpus": [{"index": 0}, {"index": 1, "processes": others}]}
    )
    assert job.abilities(NO_MEMORY).smaller
    job.change(Decision("smaller", 0, "x"))
    [kept] = read_json_lines(job.cache / "too_large.jsonl")
    assert kept["card_bytes"] == job.plan.memory["card_bytes"] - (9 << 30)


def test_ranks_that_stop_may_take_as_long_as_a_large_checkpoint(job_on):
    assert 60 < stop_grace_s(make(replace(CONFIG, depth=4), TWO)) < stop_grace_s(job_on(lambda: TWO).plan) < 600


def test_where_no_card_is_left_there_is_nothing_to_go_on_with(job_on):
    assert job_on(lambda: NONE).abilities(LOST) == replace(ON_GPUS, ranks_left=0)


def test_memory_that_ran_out_makes_the_next_attempt_smaller_and_is_kept(job_on):
    job = job_on(lambda: TWO)
    before = job.plan
    rows = before.device_batch_size
    words = f"{rows // 2} rows at once instead of {rows}, {2 * before.grad_accum_steps} micro-steps instead of"
    assert job.abilities(NO_MEMORY).smaller.startswith(words)
    assert changed(job, "smaller")["device_batch_size"] == rows // 2
    kept = json.loads((job.cache / "too_large.jsonl").read_text())
    assert (kept["setup"]["device_batch_size"], kept["source"]) == (rows, "run")


def test_any_other_end_changes_nothing(job_on):
    job = job_on(lambda: TWO)
    before = job.run.plan_json.read_text()
    assert job.abilities(LOST) == ON_GPUS
    job.change(Decision("retry", 1, "it may pass"))
    assert job.run.plan_json.read_text() == before
    assert not job.run.events.exists()


def test_a_driver_that_is_silent_tells_of_no_card(job_on):
    def silent():
        raise PlanError("the driver does not answer", fix="nvidia-smi")

    assert job_on(silent).abilities(LOST) == ON_GPUS
