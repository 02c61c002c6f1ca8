"""The parts of the loop that stand alone: which rows a rank takes, loss scale."""

import gc
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.data.dataset import rows_of_step
from paceline.rundir import RunDir
from paceline.train import loop
from paceline.train.loop import SCALE_GROWTH_STEPS, LossScale, TrainLoader


def test_an_overflow_halves_the_scale_and_many_good_steps_double_it():
    scale = LossScale(8.0, dynamic=True)
    scale.update(overflow=True)
    assert scale.value == 4.0
    for _ in range(SCALE_GROWTH_STEPS):
        scale.update(overflow=False)
    assert scale.value == 8.0


def test_a_loss_scale_survives_its_state():
    scale = LossScale(4.0, good_steps=7, dynamic=True)
    other = LossScale(1.0, dynamic=True)
    other.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    assert other == scale


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_and_micro_steps_together_take_exactly_the_rows_of_the_step(world_size):
    grad_accum_steps = 12 // world_size // 2 * 2
    plan = SimpleNamespace(
        model=SimpleNamespace(sequence_len=8),
        world_size=world_size,
        device_batch_size=2,
        rows_per_step=2 * grad_accum_steps * world_size,
    )
    split = SimpleNamespace(num_rows=lambda sequence_len: 1000)
    loaders = [
        TrainLoader(split, plan, seed=0, rank=rank, device=torch.device("cpu"), skipped_batches=())
        for rank in range(world_size)
    ]
    taken = [loader.rows_of(7, micro_step) for micro_step in range(grad_accum_steps) for loader in loaders]
    rows = rows_of_step(7, rows_per_step=plan.rows_per_step, num_rows=1000, seed=0)
    assert np.concatenate(taken).tolist() == rows.tolist()


def test_step_ms_is_the_mean_of_the_steps_since_the_last_line_without_evaluations(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class TimedLoop(loop.Loop):
        def one_step(self, step):
            now[0] += step + 1  # seconds
            return {"loss": 2.0, "grad_norm": 1.0, "lr_mult": 1.0, "rank_ms": [1.0]}, False, False

    def evaluate():
        now[0] += 100
        return 1.5

    plan = SimpleNamespace(
        num_steps=6, total_batch_size=6000, world_size=1, flops_per_token=1, peak_flops=None, precision="fp32"
    )
    config = SimpleNamespace(max_loss_spike=None, eval_every=3, log_every=3, save_every=0, sample_every=0)
    stop, progress = SimpleNamespace(training=False), SimpleNamespace(beat=lambda *_: None)
    optimizer, device = SimpleNamespace(waits_in_backward=False), torch.device("cpu")
    run = RunDir(tmp_path)
    try:
        TimedLoop(run, config, plan, optimizer, None, 0, device, progress, stop, evaluate=evaluate).train(0)
    finally:
        gc.unfreeze()
        gc.enable()
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    first = lines.pop(0)  # evaluated before the first step
    assert (first["step"], first["val_bpb"]) == (0, 1.5) and "step_ms" not in first
    shown = [(line["step"], line["step_ms"], line["tok_per_sec"]) for line in lines]
    # of steps 1; 2 and 3; 4, 5 and 6 seconds
    assert shown == [(1, 1000, 6000), (3, 2500, 2400), (6, 5000, 1200)]
