"""The parts of the loop that stand alone: which rows a rank takes, loss scale."""

import gc
import json
import math
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.config import Config
from paceline.data.dataset import rows_of_step
from paceline.explain.run_folder import explain_run
from paceline.heartbeat import HeartbeatWriter
from paceline.model.publish import NoSpace
from paceline.plan.machine import Machine
from paceline.plan.planner import make_plan
from paceline.rundir import RunDir, append_event, append_json_line, read_json_lines
from paceline.train import loop, worker
from paceline.train.loop import MAX_SKIPPED_STEPS, SCALE_GROWTH_STEPS, LossScale, TrainLoader
from paceline.train.optim import make_optimizer
from paceline.train.probe import made_up_tokens
from paceline.train.process import StopRequest, write_error
from paceline.train.setup import make_model
from paceline.train.trouble import LossTrouble
from paceline.train.worker import finish


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


def test_a_scale_of_one_resumes_its_count_and_that_of_another_precision_is_left():
    resumed = LossScale(32.0, dynamic=True)
    resumed.load_state_dict(LossScale(1.0, good_steps=1999, dynamic=True).state_dict())
    assert (resumed.value, resumed.good_steps) == (1.0, 1999)
    other = LossScale(32.0, dynamic=True)
    other.load_state_dict(LossScale().state_dict())  # of bf16
    assert other == LossScale(32.0, dynamic=True)


def test_twenty_steps_in_a_row_may_be_skipped_and_a_good_one_begins_the_count_again():
    scale = LossScale(1.0, dynamic=True)
    for _ in range(MAX_SKIPPED_STEPS - 1):
        scale.update(overflow=True)
    assert scale.may_skip
    scale.update(overflow=False)
    for _ in range(MAX_SKIPPED_STEPS):
        assert scale.may_skip
        scale.update(overflow=True)
    assert not scale.may_skip
    assert not LossScale(1.0).may_skip  # not fp16: no gradient may overflow


def fp16_loop(folder):
    machine = Machine(gpus=(), cpu_cores=1, cpu_bf16=False, memory_bytes=8 << 30)
    config = Config(
        depth=1, n_embd=32, head_dim=32, sequence_len=16, total_batch_size=32, num_steps=60, device_batch_size=2,
        precision="fp16", compile=False,
    )  # fmt: skip
    plan, device = make_plan(config, machine, vocab_size=64, num_rows=0), torch.device("cpu")
    model = make_model(plan, seed=0, device=device)
    optimizer, run = make_optimizer(model, plan, plan.groups, rank=0), RunDir(folder)
    tokens, progress = made_up_tokens(plan, device), HeartbeatWriter(run, 0)
    return loop.Loop(run, config, plan, optimizer, tokens, 0, device, progress, StopRequest())


def test_a_gradient_that_overflows_at_every_scale_ends_the_run_after_twenty_skipped_steps(tmp_path):
    fp16 = fp16_loop(tmp_path)
    fp16.scale.value = 2.0**80  # 20 halvings leave 2**60, far beyond fp16
    before = [piece.tensor.clone() for piece in fp16.optimizer.pieces()]
    for step in range(20):
        assert fp16.one_step(step)[0]["grad_norm"] == math.inf
    with pytest.raises(LossTrouble, match="at step 21, the loss still is; 20 steps before it were skipped") as error:
        fp16.one_step(20)
    assert error.value.trouble.cause == "gradient-nan"
    assert all(torch.equal(a, b.tensor) for a, b in zip(before, fp16.optimizer.pieces(), strict=True))


def test_a_scale_that_is_too_large_for_lm_head_s_gradient_is_found_in_a_few_steps(tmp_path):
    fp16 = fp16_loop(tmp_path)
    fp16.scale.value = 2.0**17
    finite = [math.isfinite(fp16.one_step(step)[0]["grad_norm"]) for step in range(8)]
    assert not finite[0] and finite[-1] and finite == sorted(finite)
    assert fp16.scale.skipped_steps == 0


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


class NotedSplit:
    """Rows of two tokens that show their own numbers; notes what is read, and cannot read the rows of `damaged`."""

    def __init__(self, damaged=()):
        self.damaged, self.read, self.thread_has_read = damaged, [], threading.Event()

    def num_rows(self, sequence_len):
        return 1000

    def rows(self, rows, sequence_len):
        self.read.append(rows.tolist())
        if threading.current_thread() is not threading.main_thread():
            self.thread_has_read.set()
        if set(rows.tolist()) & set(self.damaged):
            raise OSError("cannot read")
        return np.stack([rows, rows], 1), np.stack([rows + 1, rows + 1], 1)


def loader_of(split, *, num_steps=3, grad_accum_steps=2):
    plan = SimpleNamespace(
        model=SimpleNamespace(sequence_len=2),
        world_size=1,
        device_batch_size=4,
        rows_per_step=4 * grad_accum_steps,
        grad_accum_steps=grad_accum_steps,
        num_steps=num_steps,
    )
    return TrainLoader(split, plan, seed=0, rank=0, device=torch.device("cpu"), skipped_batches=())


IN_ORDER = [(step, micro_step) for step in range(3) for micro_step in range(2)]


@pytest.mark.parametrize("order", [IN_ORDER, [(0, 0), (0, 0), (2, 1), (1, 0), (1, 1), (1, 0), (2, 0)]])
def test_a_micro_batch_is_the_same_whatever_was_read_ahead(order):
    loader = loader_of(NotedSplit())
    for step, micro_step in order:
        idx, targets = loader.micro_batch(step, micro_step)
        assert idx[:, 0].tolist() == loader.rows_of(step, micro_step).tolist()
        assert torch.equal(targets, idx + 1)


def test_the_next_micro_batch_is_read_before_it_is_wanted_and_only_once():
    split = NotedSplit()
    loader = loader_of(split)
    loader.micro_batch(0, 0)
    assert split.thread_has_read.wait(timeout=120)
    for step, micro_step in IN_ORDER[1:]:
        loader.micro_batch(step, micro_step)
    # none beyond the run's last
    assert split.read == [loader.rows_of(step, micro_step).tolist() for step, micro_step in IN_ORDER]


def test_an_error_while_reading_ahead_is_raised_by_the_micro_batch_that_needs_those_rows():
    probe = loader_of(NotedSplit())
    split = NotedSplit(damaged=probe.rows_of(1, 0).tolist())
    loader = loader_of(split)
    loader.micro_batch(0, 0)
    split.thread_has_read.clear()
    loader.micro_batch(0, 1)
    assert split.thread_has_read.wait(timeout=120)  # the thread has met the damage, the step does not need it
    with pytest.raises(OSError, match="cannot read"):
        loader.micro_batch(1, 0)


WAITING = """
import signal
import torch.distributed as dist
from paceline.train.process import StopRequest
StopRequest().listen((signal.SIGTERM,))
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print("ready", flush=True)
store.get("what another rank writes")
"""


def test_a_signal_before_the_first_step_ends_a_rank_that_waits_for_another_one():
    with subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout.readline() == "ready\n"
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(timeout=60) == 0  # the store itself waits for 300 s


class MadeUpLoop(loop.Loop):
    """Steps without a model."""

    def one_step(self, step):
        return {"loss": 2.0, "grad_norm": 1.0, "lr_mult": 1.0, "rank_ms": [1.0]}, False, False


def run_made_up(kind, folder, evaluate, *, num_steps, every, stop=None):
    """The lines of metrics.jsonl of such a loop."""
    plan = SimpleNamespace(
        num_steps=num_steps, total_batch_size=6000, world_size=1, flops_per_token=1, peak_flops=None, precision="fp32"
    )
    config = SimpleNamespace(max_loss_spike=None, eval_every=every, log_every=every, save_every=0, sample_every=0)
    stop, progress = stop or StopRequest(), SimpleNamespace(beat=lambda *_: None)
    optimizer, device = SimpleNamespace(waits_in_backward=False), torch.device("cpu")
    run = RunDir(folder)
    try:
        kind(run, config, plan, optimizer, None, 0, device, progress, stop, evaluate=evaluate).train(0)
    finally:
        gc.unfreeze()
        gc.enable()
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def test_an_evaluation_that_is_not_finite_is_reported_and_does_not_end_the_run(tmp_path):
    values = iter([math.inf, 1.5, math.nan, 1.25])
    lines = run_made_up(MadeUpLoop, tmp_path, lambda: next(values), num_steps=3, every=1)
    assert [(line["step"], line.get("val_bpb")) for line in lines] == [(1, 1.5), (2, None), (3, 1.25)]
    events = [json.loads(line) for line in RunDir(tmp_path).events.read_text().splitlines()]
    assert [event["text"] for event in events] == [
        "the evaluation at step 0 gave inf as val_bpb, which is left out",
        "the evaluation at step 2 gave nan as val_bpb, which is left out",
    ]


@pytest.mark.parametrize("requested_by", ["this rank", "another rank"])
def test_a_stop_that_any_rank_requests_in_an_evaluation_ends_the_run_without_another_step(
    tmp_path, monkeypatch, requested_by
):
    stop = StopRequest()

    def evaluate():
        stop.is_set = stop.training and requested_by == "this rank"
        return 1.5

    monkeypatch.setattr(loop, "any_rank", lambda is_true, device: is_true or requested_by == "another rank")
    lines = run_made_up(MadeUpLoop, tmp_path, evaluate, num_steps=6, every=2, stop=stop)
    assert [(line["step"], line.get("val_bpb")) for line in lines] == [(0, 1.5), (1, None), (2, 1.5)]


def test_a_stop_waits_for_no_first_step_as_nothing_is_to_be_saved(tmp_path):
    stop, seen = StopRequest(), []

    class Watched(MadeUpLoop):
        def one_step(self, step):
            seen.append(stop.training)
            return super().one_step(step)

    run_made_up(Watched, tmp_path, lambda: 1.5, num_steps=3, every=3, stop=stop)
    assert seen == [False, True, True]


def end_of_run(run, *, stops=False):
    """What the end of a run needs of its loop."""
    progress, stop = SimpleNamespace(beat=lambda step, phase: None), SimpleNamespace(is_set=stops)
    return SimpleNamespace(run=run, rank=0, progress=progress, stop=stop, device="cpu", can_save_again=lambda: False)


@pytest.mark.parametrize(("step", "val_bpb"), [(20, 2.5), (30, None)])
def test_the_val_bpb_of_the_end_is_that_of_the_last_weights(tmp_path, step, val_bpb):
    run = RunDir(tmp_path)
    for line in ({"step": 0, "val_bpb": 5.8}, {"step": 20, "loss": 4.0, "val_bpb": 2.5}, {"step": 30, "loss": 3.9}):
        append_json_line(run.metrics, line)
    finish(end_of_run(run), SimpleNamespace(wait=lambda: None, no_space=None), step=step, bpb=None, stopped=False)
    [event] = read_json_lines(run.events)
    assert (event["event"], event["step"], event["val_bpb"]) == ("finished", step, val_bpb)


@pytest.mark.parametrize(
    ("stops", "stopped", "wait_s"), [(True, False, 3600.0), (False, True, 3600.0), (False, False, 0.0)]
)
def test_a_stop_and_the_deadline_end_the_wait_for_room_and_the_run_is_not_finished(
    tmp_path, monkeypatch, stops, stopped, wait_s
):
    monkeypatch.setattr(worker, "LAST_SAVE_WAIT_S", wait_s)
    full = NoSpace("no space", fix="make room", step=30, needed_bytes=2, free_bytes=1)
    loop, writer = end_of_run(RunDir(tmp_path), stops=stops), SimpleNamespace(wait=lambda: None, no_space=full)
    with pytest.raises(NoSpace):
        finish(loop, writer, step=30, bpb=None, stopped=stopped)
    assert not loop.run.events.exists()


@pytest.mark.parametrize(
    ("stops", "step", "effect"),
    [
        (True, 20, "the run stops without it"),
        (False, 20, "training continues and saves as soon as there is room"),
        (
            False,
            30,
            "the run waits and saves as soon as there is room; a stop before that loses the steps that are not saved",
        ),
    ],
)
def test_a_save_without_room_says_whether_the_run_continues_waits_or_stops(
    tmp_path, monkeypatch, caplog, stops, step, effect
):
    monkeypatch.setattr(worker, "checkpoint_bytes", lambda plan: 2)
    plan, config, run = SimpleNamespace(world_size=1, num_steps=30), SimpleNamespace(keep_last=1), RunDir(tmp_path)
    writer = worker.make_writer(run, config, plan, attempt=1, rank=0, stop=SimpleNamespace(is_set=stops))
    writer.on_no_space(NoSpace("no space", fix="make room", step=step, needed_bytes=2, free_bytes=1))
    [event] = read_json_lines(run.events)
    assert (event["effect"], event.get("last"), caplog.messages) == (
        effect,
        step == 30 or None,
        [f"no space; {effect}"],
    )


def test_a_stop_while_a_run_waits_for_room_is_an_end_by_the_disk(tmp_path):
    run = RunDir(tmp_path)
    run.logs(1).mkdir(parents=True)
    run.config_toml.touch()
    append_event(run, "attempt", attempt=1, world_size=1)
    error = NoSpace("no space for the checkpoint of step 8", fix="free some", step=8, needed_bytes=2, free_bytes=1)
    write_error(run, error, attempt=1, rank=0)
    append_event(run, "stopping", attempt=1, signal="SIGINT")
    append_event(run, "rank_failed", attempt=1, rank=0, exit_code=1, message=error.message)
    append_event(run, "attempt_ended", attempt=1, state="failed", exit_code=1)
    explanation = explain_run(run)
    assert (explanation.cause, explanation.summary, explanation.fix) == ("disk-full", error.message, "free some")


def test_step_ms_is_the_mean_of_the_steps_since_the_last_line_without_evaluations(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class TimedLoop(MadeUpLoop):
        def one_step(self, step):
            now[0] += step + 1  # seconds
            return super().one_step(step)

    def evaluate():
        now[0] += 100
        return 1.5

    lines = run_made_up(TimedLoop, tmp_path, evaluate, num_steps=6, every=3)
    first = lines.pop(0)  # evaluated before the first step
    assert (first["step"], first["val_bpb"]) == (0, 1.5) and "step_ms" not in first
    shown = [(line["step"], line["step_ms"], line["tok_per_sec"]) for line in lines]
    # of steps 1; 2 and 3; 4, 5 and 6 seconds
    assert shown == [(1, 1000, 6000), (3, 2500, 2400), (6, 5000, 1200)]
