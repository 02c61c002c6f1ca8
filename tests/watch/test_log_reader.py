"""Logs of any training: what a line shows, and what the whole log shows."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from rows import with_rows

from paceline.launch.health import live_samples
from paceline.watch.log_lines import framework_of, read_line
from paceline.watch.log_reader import LogAndMachine, TrainingLogReader
from paceline.watch.status import open_reader

LINES = {
    "step 00010/21400 (0.05%) | loss: 10.123456 | lrm: 1.00 | dt: 1234.56ms | tok/sec: 424,123 | mfu: 45.20 | total time: 0.10m": (
        "nanochat", 10, 21400, {"loss": 10.123456, "step_ms": 1234.56, "tok_per_sec": 424123.0, "mfu": 0.452},
    ),
    "Step 00250 | Validation bpb: 1.0123": ("nanochat", 250, None, {"val_bpb": 1.0123}),
    "{'loss': 2.3456, 'grad_norm': 1.25, 'learning_rate': 4.9e-05, 'epoch': 0.1}": (
        "Hugging Face Trainer", None, None, {"loss": 2.3456, "grad_norm": 1.25, "lr": 4.9e-05},
    ),
    "  5%|▌         | 500/10000 [01:23<26:00,  5.00it/s]": (None, 500, 10000, {"step_ms": 200.0}),
    "  5%|▌         | 500/10000 [01:23<26:00,  ...it/s]": (None, 500, 10000, {}),
    "Epoch 2:  10%|█         | 100/1000 [00:10<01:30, 10.00it/s, v_num=0, train_loss=2.300]": (
        "Lightning", 2100, None, {"loss": 2.3, "step_ms": 100.0},
    ),
    "Epoch 1 | iter 100 step 25 | loss train: 3.456, val: 3.500 | iter time: 123.45 ms (step)": (
        "litgpt", 100, None, {"loss": 3.456, "val_loss": 3.5, "step_ms": 123.45},
    ),
    "steps: 10 loss: 2.3456 iter time (s): 0.125 samples/sec: 123.456": (
        "DeepSpeed", 10, None, {"loss": 2.3456, "step_ms": 125.0},
    ),
    " iteration      100/  500000 | consumed samples:  51200 | elapsed time per iteration (ms): 1234.5 | lm loss: 6.5E+00 |": (
        "Megatron", 100, 500000, {"loss": 6.5, "step_ms": 1234.5},
    ),
    "[titan] 2026-01-02 03:04:05,678 - root - INFO - step: 10  loss:  8.1234  tps: 12,345  tflops: 12.34  mfu: 12.30%": (
        "torchtitan", 10, None, {"loss": 8.1234, "tok_per_sec": 12345.0, "mfu": 0.123},
    ),
    "iter 100: loss 3.4567, time 123.45ms, mfu 12.34%": (
        "nanoGPT", 100, None, {"loss": 3.4567, "step_ms": 123.45, "mfu": 0.1234},
    ),
    "[0] step 00120/02500 | loss 4.1203 | val_bpb 1.2034 | 612 ms | 856,679 tok/s | mfu 41.2% | 38.1 GiB | eta 24m17s": (
        "paceline", 120, 2500, {"loss": 4.1203, "val_bpb": 1.2034, "step_ms": 612.0, "tok_per_sec": 856679.0, "mfu": 0.412},
    ),
    "step 10 | loss 4.1 | 61.8 ms | 8283 tok/s": (None, 10, None, {"loss": 4.1, "step_ms": 61.8, "tok_per_sec": 8283.0}),
    "step 10 loss: 4.1 tok/s: 8,283": (None, 10, None, {"loss": 4.1, "tok_per_sec": 8283.0}),
    "step 10 loss 4.1 tokens/s 8283": (None, 10, None, {"loss": 4.1, "tok_per_sec": 8283.0}),
    "step 10 loss 4.1, 8,283.5 tokens/sec, 0.25 s/step": (None, 10, None, {"loss": 4.1, "step_ms": 250.0, "tok_per_sec": 8283.5}),
}  # fmt: skip


@with_rows(
    ("line", "values"),
    {
        "step 3: loss 2.1 | tok/sec: 100,000 | 12,500 tok/s/gpu": {"loss": 2.1, "tok_per_sec": 100000.0},
        "step 5 loss 2.0 (peak 900 tok/s, avg 800 tok/s)": {"loss": 2.0},
        "step 3 loss 2 batch_size 8 tokens/s: nan": {"loss": 2.0},
        "step 3 | fwd | 4 ms | bwd | 8 ms | loss 3.0": {"loss": 3.0},
        "step 5 loss 2 eval 3 s/step": {"loss": 2.0},
    }.items(),
)
def test_of_several_speeds_without_a_name_none_is_that_of_the_step(line, values):
    assert read_line(line).values == values


@with_rows(
    "line",
    [
        "Generated 128 tokens in 3.2 s (40.1 tok/s)",
        "| optimizer.step | 4.2 ms | 3% |",
        "prompt: 12 tokens at 350 tok/s",
    ],
)
def test_a_speed_without_a_step_is_no_progress(line):
    shown = read_line(line)
    assert shown is None or not shown.values


@with_rows(("line", "expected"), LINES.items())
def test_a_line_of_each_trainer_is_understood(line, expected):
    result = read_line(line)
    assert (framework_of(line), result.step, result.num_steps, result.values) == expected


@pytest.mark.parametrize(
    "line",
    [
        "Loading checkpoint shards:  50%|█████     | 2/4 [00:01<00:01, 1.2it/s]",
        "Validation DataLoader 0:  50%|█████     | 5/10 [00:00<00:00, 50.0it/s]",
        "Saved to step_100/model.pt",
        "total steps = 1000",
        "This takes 3 steps 2 at a time",
        "loss function: cross entropy",
        "loss information: none",
        "time: 12:04:05",
        "Epoch 1:   0%|          | 0/50 [00:00<?, ?it/s, train_loss=0.395, val_loss=0.487]",
        "{'train_runtime': 83.1, 'train_samples_per_second': 12.0, 'train_loss': 2.1, 'epoch': 1.0}",
    ],
)
def test_prose_and_bars_of_other_work_are_no_progress(line):
    assert read_line(line) is None


def write(path, text, *, ago=0.0):
    path.write_text(text)
    os.utime(path, (time.time() - ago,) * 2)
    return open_reader(path)


def test_a_training_bar_gives_lines_their_steps_and_an_evaluation_bar_does_not(tmp_path):
    text = (
        "  1%|  | 10/1000 [00:01<01:30, 10.00it/s]\r  2%|  | 20/1000 [00:02<01:30, 10.00it/s]\n{'loss': 3.0, 'epoch': 0.1}\n"
        "100%|██| 13/13 [00:01<00:00, 10.00it/s]\n"
        "  3%|  | 30/1000 [00:03<01:30, 10.00it/s]\n{'loss': 2.5, 'epoch': 0.2}\n"
    )
    snapshot = write(tmp_path / "out.log", text).update()
    assert (snapshot.kind, snapshot.state, snapshot.framework) == ("log", "running", "Hugging Face Trainer")
    assert (snapshot.step, snapshot.num_steps, snapshot.eta_s) == (30, 1000, 97.0)
    assert (snapshot.series["loss"].steps, snapshot.series["loss"].values) == ([20, 30], [3.0, 2.5])


def lightning_state(step):
    return f"\rEpoch 0:  50%|█████     | {step}/100000 [00:10<01:30, 10.00it/s, v_num=0, train_loss={10 - step / 20_000:.3f}]"


def test_a_bar_is_read_while_it_moves(tmp_path):
    path = tmp_path / "out.log"
    reader = write(path, "".join(map(lightning_state, range(1, 500))))
    assert (reader.update().step, reader.update().loss) == (498, 9.975)  # of the last one nothing says that it is whole
    with path.open("a") as file:
        file.write(lightning_state(500) + "\r")
    assert reader.update().step == 500


def test_a_bar_of_many_megabytes_is_sampled(tmp_path):
    snapshot = write(tmp_path / "out.log", "".join(map(lightning_state, range(1, 20_001))) + "\r").update()
    loss = snapshot.series["loss"]
    assert (snapshot.step, loss.steps[0], loss.steps[-1]) == (20_000, 1, 20_000)
    assert max(following - step for step, following in zip(loss.steps, loss.steps[1:], strict=False)) < 500


def test_a_bar_that_is_reset_under_the_title_of_the_last_epoch_is_no_restart(tmp_path):
    """Lightning resets its bar after a validation, before it gives it the title of the next epoch."""
    epochs = "".join(
        f"\rEpoch {epoch}:  50%|██   | 1/2 [00:01<00:01,  1.00it/s, train_loss={5 - epoch}.5]"
        f"\rEpoch {epoch}: 100%|█████| 2/2 [00:02<00:00,  1.00it/s, train_loss={5 - epoch}.0, val_loss={6 - epoch}.0]"
        f"\rEpoch {epoch}:   0%|     | 0/2 [00:00<?, ?it/s, train_loss={5 - epoch}.0, val_loss={6 - epoch}.0]"
        for epoch in range(3)
    )
    snapshot = write(tmp_path / "out.log", epochs + "\r").update()
    assert (snapshot.step, snapshot.series["loss"].steps) == (6, [1, 2, 3, 4, 5, 6])
    assert snapshot.series["loss"].values == [5.5, 5.0, 4.5, 4.0, 3.5, 3.0]
    assert (snapshot.series["val_loss"].steps, snapshot.series["val_loss"].values) == ([2, 4, 6], [6.0, 5.0, 4.0])


def test_a_bar_at_0_of_the_whole_training_shows_its_first_loss():
    line = read_line("train:   0%|          | 0/100 [00:00<?, ?it/s, loss=9.1]")
    assert (line.step, line.num_steps, line.values["loss"]) == (0, 100, 9.1)


def test_what_is_printed_behind_a_bar_that_was_reset_is_read():
    line = read_line("Epoch 1:   0%|          | 0/50 [00:00<?, ?it/s, loss=9.000]step 50 loss 2.5")
    assert (line.step, line.values) == (50, {"loss": 2.5})


def test_lines_without_a_step_are_points_of_the_curves_and_no_steps(tmp_path):
    snapshot = write(tmp_path / "out.log", "{'loss': 3.0, 'epoch': 0.1}\n{'loss': 2.5, 'epoch': 0.2}\n").update()
    assert (snapshot.step, snapshot.series["loss"].steps) == (None, [1, 2])
    assert snapshot.notes == ["no line shows a step: the curves count lines"]


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ('{"mode": "eval", "step": 19, "loss": 5.5}', {"part_loss": 5.5}),
        ('{"step": 19, "split": "train", "loss": 2.5}', {"loss": 2.5}),
        ("phase=val step=19 loss=5.5", {"part_loss": 5.5}),
        ("stage=dev step=19 train_loss=5.5", {"loss": 5.5}),
        ("step 19 val loss 5.5", {"val_loss": 5.5}),
        ("Test:  [ 9/10]  eta: 0:00:01  loss: 5.5 (5.2)", {"val_loss": 5.5}),
    ],
)
def test_a_loss_of_an_evaluation_is_none_of_training(line, values):
    assert read_line(line).values == values


def test_a_part_that_lines_name_is_one_of_an_evaluation_where_other_lines_are_of_training(tmp_path):
    lines = ["mode=test step 1 loss 5.0\n", "mode=train step 1 loss 3.0\n", "mode=test step 2 loss 4.0\n"]
    series = write(tmp_path / "both.log", "".join(lines)).update().series
    assert (series["loss"].values, series["val_loss"].values) == ([3.0], [5.0, 4.0])
    series = write(tmp_path / "one.log", "".join(lines[::2])).update().series
    assert (series["loss"].values, "val_loss" in series) == ([5.0, 4.0], False)


def test_a_batch_of_an_evaluation_is_no_progress():
    assert read_line("Test:  [ 3/10]  eta: 0:00:01  loss: 5.5 (5.2)") is None


def epoch_lines(form, *, first, last, step_of=lambda epoch, step: step):
    epochs = range(first, last[0] + 1)
    places = [(epoch, step) for epoch in epochs for step in range(0, 250, 10) if (epoch, step) <= last]
    return "".join(form.format(epoch=epoch, step=step_of(epoch, step)) + "\n" for epoch, step in places)


@pytest.mark.parametrize(
    ("form", "first", "last", "expected"),
    [
        ("Epoch [{epoch}/10], Step [{step}/250], Loss: 2.5", 1, (6, 80), (1330, 2500)),
        (
            "Epoch [{epoch}/10], Step [{step}/250], Loss: 2.5",
            1,
            (6, 130),
            (1380, 2500),
        ),  # as 130 of all 250 steps would be
        ("Epoch [{epoch}/10], Step [{step}/250], Loss: 2.5", 1, (1, 10), (10, None)),  # of 250 or of 2500
        (
            "Epoch [{epoch}/10], Step [{step}/250], Loss: 2.5",
            1,
            (1, 80),
            (80, 2500),
        ),  # ten epochs are not a third done in the first
        ("Epoch: 00{epoch}/010 | Batch 0{step}/0250 | Cost: 2.5", 1, (6, 80), (1330, 2500)),
        ("Epoch {epoch}/10, step {step}/250, loss: 2.5", 0, (6, 80), (1580, 2500)),  # epochs 0 to 9
        ("Epoch {epoch}/9, step {step}/250, loss: 2.5", 0, (9, 240), (2490, 2500)),
        ("Epoch {epoch}/10:  32%|███  | {step}/250 [00:10<00:20, 8.00it/s, loss=2.5]", 1, (6, 80), (1330, 2500)),
        ("Epoch {epoch}/10 [Train]:  32%|███  | {step}/250 [00:10<00:20, 8.00it/s]", 1, (6, 80), (1330, 2500)),
        ("Epoch {epoch}, step {step}/250, loss: 2.5", 1, (6, 80), (80, 250)),  # how many epochs is not known
        ("Epoch {epoch}/10, global_step {step}/250, loss: 2.5", 1, (6, 80), (80, 250)),
        ("Epoch {epoch}/10:  60%|███  | {epoch}/10 [00:10<00:20, 8.00it/s, loss=2.5]", 1, (6, 80), (6, 10)),
    ],
)
def test_steps_of_an_epoch_are_counted_over_all_epochs(tmp_path, form, first, last, expected):
    snapshot = write(tmp_path / "out.log", epoch_lines(form, first=first, last=last)).update()
    assert (snapshot.step, snapshot.num_steps) == expected


@pytest.mark.parametrize(
    "form", ["Epoch {epoch}/10, step {step}/2500, loss: 2.5", "Epoch {epoch}/10:  5%|█ | {step}/2500 [00:10]"]
)
def test_steps_that_a_log_counts_over_all_epochs_itself_are_not_counted_twice(tmp_path, form):
    text = epoch_lines(form, first=1, last=(6, 80), step_of=lambda epoch, step: 250 * (epoch - 1) + step)
    snapshot = write(tmp_path / "out.log", text).update()
    assert (snapshot.step, snapshot.num_steps) == (1330, 2500)


@pytest.mark.parametrize(("done", "num_steps"), [(200, None), (400, None), (440, 1000), (600, 1000), (1000, 1000)])
def test_steps_over_all_epochs_may_end_within_the_last_epoch(tmp_path, done, num_steps):
    text = "".join(f"Epoch {(n - 1) // 400 + 1}/3 | step {n}/1000 | loss 2.5\n" for n in range(20, done + 1, 20))
    snapshot = write(tmp_path / "out.log", text).update()
    assert (snapshot.step, snapshot.num_steps) == (done, num_steps)


def test_the_curve_of_a_log_with_epochs_has_all_of_them(tmp_path):
    text = "".join(f"Epoch [{epoch}/2], Step [{step}/20], Loss: 2.5\n" for epoch in (1, 2) for step in (10, 20))
    assert write(tmp_path / "out.log", text).update().series["loss"].steps == [10, 20, 30, 40]


def test_a_growing_log_is_followed_and_a_truncated_one_is_read_from_its_start(tmp_path):
    path = tmp_path / "out.log"
    reader = write(path, "step 1 loss: 3.0\nstep 2 loss: 2")
    assert reader.update().step == 1
    with path.open("a") as file:
        file.write(".5\n")
    assert reader.update().loss == 2.5
    path.write_text("step 1 loss: 9.0\n")
    assert reader.update().series["loss"].values == [9.0]
    path.unlink()
    assert (reader.update().state, reader.update().notes) == ("gone", [f"{path} does not exist"])


@pytest.mark.parametrize(
    ("text", "ago", "state"),
    [
        ("step 1/2 loss: 3.0\nstep 2/2 loss: 2.0\nTraining complete\n", 0.0, "finished"),
        ("step 1/2 loss: 3.0 dt: 100ms\n", 130.0, "broken"),
        ("step 1/2 loss: 3.0\n", 130.0, "running"),  # how often it writes is not known
        ("step 1/2 loss: 3.0\n", 700.0, "broken"),
        ("".join(f"step {n}/90 loss: {9 / n}\n" for n in range(1, 60)), 700.0, "broken"),
        (
            "".join(f"step {n} loss: {9 / n}\n" for n in range(1, 60)),
            700.0,
            "unknown",
        ),  # most scripts print no last word
        ("nothing of interest\n", 0.0, "unknown"),
        ("step 1/9 loss: 3.0\nstopping on SIGINT: saving a checkpoint\ninterrupted after 9s\n", 0.0, "stopped"),
        ("step 1/9 loss: 3.0\nKeyboardInterrupt\n", 0.0, "stopped"),
        (
            "step 1/9 loss: 3.0\nslurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2026-11-28T14:00:00 ***\n",
            0.0,
            "stopped",
        ),
    ],
)
def test_the_state_of_a_log(tmp_path, text, ago, state):
    assert write(tmp_path / "out.log", text, ago=ago).update().state == state


def test_a_log_that_came_back_from_a_silence_may_be_silent_twice_as_long(tmp_path):
    path = tmp_path / "out.log"
    reader = write(path, "step 1/9 loss: 3.0 dt: 100ms\n", ago=250.0)
    assert reader.update().state == "broken"
    with path.open("a") as file:
        file.write("step 2/9 loss: 3.0 dt: 100ms\n")
    for ago, state in ((0.0, "running"), (990.0, "running"), (1010.0, "broken")):
        os.utime(path, (time.time() - ago,) * 2)
        assert reader.update().state == state


def test_a_log_that_ends_in_an_error_is_explained(tmp_path):
    text = (
        "step 1/9 loss: 3.0\nTraceback (most recent call last):\n"
        "  File \"t.py\", line 3, in <module>\nModuleNotFoundError: No module named 'flash_attn'\n"
    )
    snapshot = write(tmp_path / "out.log", text).update()
    assert (snapshot.state, snapshot.explanation["line"]) == ("failed", 2)


NEVER_MOVES = "the loss stands still from step 1 on: loss is 3 there and 3 at step 1999"


@pytest.mark.parametrize(
    ("end", "state"),
    [("ModuleNotFoundError: No module named 'flash_attn'\n", "failed"), ("Training complete\n", "finished")],
)
def test_a_log_too_long_to_explain_whole_is_explained_by_its_end(tmp_path, monkeypatch, end, state):
    monkeypatch.setattr("paceline.watch.log_reader.EXPLAINED_BYTES", 4 << 20)
    monkeypatch.setattr("paceline.watch.log_reader.FIRST_BYTES", 1 << 19)
    path = tmp_path / "out.log"
    with path.open("w") as file:
        file.writelines(f"step {step}/99999 loss: 3.0 {'-' * 4000}\n" for step in range(1, 2_000))
        file.write(end)
    assert path.stat().st_size > 4 << 20
    snapshot = open_reader(path).update()
    assert (snapshot.state, NEVER_MOVES in snapshot.notes) == (state, state == "finished")


def test_a_log_whose_memory_grows_is_running_with_a_note(tmp_path):
    lines = "".join(
        f"step {step}/99 loss: {3 - step / 50:.3f} memory: {2 + step / 5:.2f} GiB\n" for step in range(1, 10)
    )
    snapshot = write(tmp_path / "out.log", lines).update()
    assert (snapshot.state, snapshot.explanation) == ("running", None)
    assert snapshot.notes[0].startswith("memory grows step by step")


def test_a_log_of_many_megabytes_is_sampled(tmp_path):
    path = tmp_path / "long.log"
    with path.open("w") as file:
        file.writelines(f"step {step}/20000 loss: {10 - step / 2000:.5f} {'-' * 200}\n" for step in range(1, 15_001))
    assert path.stat().st_size > 3 << 20
    snapshot = open_reader(path).update()
    loss = snapshot.series["loss"]
    assert (snapshot.step, loss.steps[0], loss.steps[-1]) == (15_000, 1, 15_000)
    assert loss.values == sorted(loss.values, reverse=True)
    assert snapshot.notes == [
        "64 pieces of the first 3.1 MiB of the log are read: the curves do not show what is between them, such as a NaN"
    ]
    assert max(following - step for step, following in zip(loss.steps, loss.steps[1:], strict=False)) < 500


def test_a_log_of_a_running_training_has_this_machine_beside_it_and_an_ended_one_has_not(tmp_path):
    path = tmp_path / "out.log"
    write(path, "step 1/99 loss: 3.0\nstep 2/99 loss: 2.9\n")
    reader = LogAndMachine(path, live_samples(tmp_path))
    [host] = reader.update().hosts
    assert host.name == socket.gethostname().replace("/", "_")
    assert 0 < host.ram_used <= host.ram_total and 0 < host.disk_free <= host.disk_total and 0 <= host.cpu <= 1
    write(path, "step 99/99 loss: 3.0\ntraining finished\n", ago=9999)
    assert LogAndMachine(path, live_samples(tmp_path)).update().hosts == []
    assert list(tmp_path.iterdir()) == [path]


def test_the_samples_of_this_machine_become_curves_and_a_driver_that_hangs_delays_nobody(tmp_path):
    path = tmp_path / "out.log"
    write(path, "step 1/99 loss: 3.0\n")
    gpu = {"index": 0, "name": "NVIDIA GeForce RTX 5090", "use": 0.5, "used_bytes": 1, "temperature_c": 60}
    enough = threading.Event()

    def samples():
        for second in (1, 2):
            yield {"time": f"2026-11-22T12:00:0{second}.000Z", "cpu": 0.25, "gpus": [{**gpu, "use": second / 4}]}
        enough.wait()

    reader = LogAndMachine(path, samples())
    try:
        [host] = reader.update().hosts
        assert (host.gpus[0].use, host.gpus[0].processes) == (0.5, [])
        snapshot = reader.update()
        assert snapshot.gpu_series[f"{host.name}/0 use"].values == [0.25, 0.5]
        assert snapshot.host_series[f"{host.name} cpu"].values == [0.25, 0.25]
    finally:
        enough.set()


def test_a_driver_that_does_not_answer_is_said_beside_the_log(tmp_path):
    path = tmp_path / "out.log"
    write(path, "step 1/99 loss: 3.0\n")
    line = {"time": "2026-11-22T12:00:01.000Z", "cpu": 0.25, "gpus": [], "note": "health samples have no GPUs"}
    reader = LogAndMachine(path, iter([line, {**line, "time": "2026-11-22T12:00:02.000Z"}]))
    assert "health samples have no GPUs" in reader.update().notes


UNREADABLE = """
import os, sys
from pathlib import Path

import paceline.watch.log_reader
import paceline.watch.run_reader
from paceline.watch.status import open_reader
if os.geteuid() == 0:
    os.seteuid(65534)
sys.path.clear()  # the other user may be unable to read Python's own files
snapshot = open_reader(Path(sys.argv[1])).update()
print(snapshot.state, snapshot.notes)
"""


def test_a_log_that_cannot_be_read_is_unknown():
    with tempfile.TemporaryDirectory() as name:  # not pytest's, which are its user's alone
        Path(name).chmod(0o755)
        path = Path(name) / "out.log"
        path.write_text("step 1 loss: 3.0\n")
        path.chmod(0)
        done = subprocess.run([sys.executable, "-c", UNREADABLE, str(path)], capture_output=True, text=True)
    assert done.stdout == f"unknown ['{path} cannot be read: Permission denied']\n", done.stderr


def test_a_log_that_waits_for_its_first_collective_has_not_failed_while_it_grows(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("host:471:48 [0] NCCL INFO comm 0x5 rank 0 nranks 2 - Init COMPLETE\n")
    assert open_reader(path).update().state == "unknown"
    os.utime(path, (time.time() - 86_400,) * 2)
    snapshot = open_reader(path).update()
    assert (snapshot.state, snapshot.explanation["cause"]) == ("failed", "nccl-p2p-hang")


def test_a_file_of_metrics_shows_the_curves_that_it_has(tmp_path):
    lines = [f"{10 * n},{4 - n / 40},{4.1 - n / 40 if n % 10 == 0 else ''}" for n in range(100)]
    snapshot = write(tmp_path / "metrics.csv", "\n".join(["step,train_loss,val_loss", *lines, ""])).update()
    assert (snapshot.state, snapshot.step, snapshot.loss, snapshot.logs) == ("running", 990, 4 - 99 / 40, [])
    assert snapshot.series["loss"].steps == list(range(0, 1000, 10))
    assert snapshot.series["val_loss"].values == [4.1 - n / 40 for n in range(0, 100, 10)]


def test_a_curve_called_loss_replaces_none_of_the_other_losses(tmp_path):
    lines = [f"{n},{9 - n},{4 - n}" for n in range(3)]
    snapshot = write(tmp_path / "metrics.csv", "\n".join(["step,train_loss_epoch,loss", *lines, ""])).update()
    assert {name: item.values for name, item in snapshot.series.items()} == {
        "train_loss_epoch": [9, 8, 7],
        "loss": [4, 3, 2],
    }


def test_a_file_of_metrics_is_read_again_when_it_has_changed(tmp_path):
    path, records = tmp_path / "trainer_state.json", [{"step": n, "loss": 4 - n / 40} for n in range(1, 101)]
    reader = write(path, json.dumps({"max_steps": 100, "global_step": 50, "log_history": records[:50]}))
    assert (reader.update().state, reader.update().step) == ("running", 50)
    path.write_text(json.dumps({"max_steps": 100, "global_step": 100, "log_history": records}))
    assert (reader.update().state, reader.update().step) == ("finished", 100)


def test_the_bytes_of_an_event_file_are_no_lines_of_a_log(tmp_path):
    writer = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard").SummaryWriter(tmp_path)
    for n in range(300):
        writer.add_scalar("train/loss", 4 - n / 100, 10 * n)
    writer.close()
    [path] = tmp_path.iterdir()
    snapshot = TrainingLogReader(path).update()
    assert (snapshot.step, snapshot.series["loss"].steps) == (2990, list(range(0, 3000, 10)))
    assert snapshot.series["loss"].values == pytest.approx([4 - n / 100 for n in range(300)])
    assert list(snapshot.series) == ["loss"]


def test_a_loss_that_becomes_nan_stays_in_its_curve(tmp_path):
    text = "".join(f"step {n}/20 | loss {'nan' if n > 7 else 5 - n / 10}\n" for n in range(1, 21))
    snapshot = write(tmp_path / "out.log", text).update()
    assert snapshot.series["loss"].steps == list(range(1, 21))
    assert snapshot.to_json()["series"]["loss"]["values"][6:] == [4.3, *[None] * 13]
