"""One snapshot after another of a run folder whose files grow, shrink, break off and vanish."""

import json
import math
import os
import random
import shutil
import time
import zlib
from dataclasses import asdict, replace

import pytest
from run_folders import START, utc, write_run
from snapshots import NOW

from paceline.errors import PacelineError
from paceline.rundir import append_json_line, append_sample, utc_now
from paceline.watch import growing_file
from paceline.watch import status as status_module
from paceline.watch.growing_file import MetricFinder
from paceline.watch.panels import run_row
from paceline.watch.status import RunList, format_run, format_steps, open_reader, run_status
from paceline.watch.summary import Summary, summarize


def test_a_failed_run_is_explained_from_its_logs(folder):
    folder.begin()
    folder.run.logs(1).mkdir(parents=True)
    folder.run.rank_log(1, 0).write_text(
        "Traceback (most recent call last):\n"
        '  File "x.py", line 1, in <module>\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of 7.79 GiB of"
        " which 612.25 MiB is free.\n"
    )
    folder.event("attempt_ended", attempt=1, state="failed")
    folder.event("failed", rank=0)
    snapshot = folder.look()
    assert (snapshot.state, snapshot.explanation["cause"]) == ("failed", "cuda-oom")
    assert snapshot.explanation["evidence"][0]["line"] == 1
    folder.event("note", text="wandb: all of it has arrived")
    assert folder.look().explanation is snapshot.explanation  # nothing that it goes by is new
    assert "--device-batch-size 4" not in snapshot.explanation["fix"]
    folder.run.config_toml.write_text("device_batch_size = 8\n")  # it was away, and has come back
    assert "--device-batch-size 4" in folder.look().explanation["fix"]


def test_only_new_lines_are_read_and_a_half_line_waits_until_it_is_whole(folder):
    folder.begin()
    folder.log(1)
    assert folder.look().series["loss"].steps == [1]
    with folder.run.metrics.open("a") as file:
        file.write('{"step": 2, "lo')
    assert folder.look().step == 1
    with folder.run.metrics.open("a") as file:
        file.write('ss": 2.5, "time": "2026-01-01T00:00:02.000Z"}\n')
    snapshot = folder.look()
    assert (snapshot.step, snapshot.loss, snapshot.series["loss"].values) == (2, 2.5, [3.0, 2.5])


def test_a_rewritten_metrics_file_replaces_what_was_read(folder):
    folder.begin()
    for step in range(1, 9):
        folder.log(step, loss=float(step))
    assert folder.look().series["loss"].steps[-1] == 8
    first_lines = folder.run.metrics.read_text().splitlines(keepends=True)[:4]
    folder.run.metrics.write_text("".join(first_lines))
    folder.log(5, loss=50.0)
    for step in range(6, 12):
        folder.log(step, loss=float(step))
    assert folder.look().series["loss"].values == [1.0, 2.0, 3.0, 4.0, 50.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0]


def test_files_that_vanish_leave_their_fields_empty(folder):
    folder.begin()
    folder.log(1)
    folder.look()
    for path in (folder.run.metrics, folder.run.events, folder.run.plan_json, folder.run.config_toml):
        path.unlink()
    snapshot = folder.look()
    assert (snapshot.step, snapshot.loss, snapshot.series, snapshot.events, snapshot.num_steps) == (
        None,
        None,
        {},
        [],
        None,
    )


def test_damaged_lines_are_skipped(folder):
    folder.run.metrics.write_bytes(
        b'{"step": 1, "loss": 2}\n\x00\x00{broken\n[1]\n"x"\n{"loss": 1}\n{"step": 2, "loss": "no"}\n'
    )
    folder.run.events.write_text('{"event": "attempt"}\nx\n{"time": "x", "event": "checkpoint", "step": 3}\n')
    snapshot = folder.look()
    assert (snapshot.step, snapshot.series["loss"].values) == (2, [2.0])
    assert [event.text for event in snapshot.events] == ["attempt", "checkpoint saved at step 3"]


@pytest.mark.parametrize("end", ["finished", None])
def test_a_copy_of_a_run_shows_the_same_times(tmp_path, end):
    run = write_run(tmp_path, "a", end=end)
    append_sample(run.health("one"), {"time": utc(110), "cpu": 0.5})
    shutil.copytree(run.path, tmp_path / "b", copy_function=shutil.copyfile)  # without the times of the files
    for path in (run.path, tmp_path / "b"):
        snapshot = open_reader(path).update()
        assert (snapshot.updated, snapshot.elapsed_s) == (START + 110, 110.0)


def test_a_note_of_a_tracker_after_the_end_does_not_move_the_end(tmp_path):
    run = write_run(tmp_path, "a", end="finished")
    end = open_reader(run.path).update()
    append_json_line(run.events, {"time": utc(900), "event": "note", "text": "notify: no answer"})
    snapshot = open_reader(run.path).update()
    assert (snapshot.updated, snapshot.elapsed_s) == (end.updated, end.elapsed_s)
    assert run_status(run).time == utc(end.updated - START)


def test_the_speed_of_the_last_lines_gives_the_remaining_time(held):
    held.event("launch", prepared_s=0.0)
    held.run.events.open("a").write(
        '{"time": "2026-01-01T00:00:00Z", "event": "attempt", "attempt": 1, "world_size": 1}\n'
    )
    for step in (10, 20, 30):
        held.log(step, second=step // 2)
    held.beat(0, 31)
    assert held.look().eta_s == pytest.approx(69 * 0.5)


def test_each_rank_has_its_own_time_and_the_slow_one_is_marked(held):
    held.begin(world_size=3)
    for step in range(1, 11):
        held.log(step, rank_ms=[100.0, 101.0, 160.0], time=utc_now())
    for rank in range(3):
        held.beat(rank, 5, "reduce", ago=4.0)
    ranks = held.look().ranks
    assert [(rank.busy_ms, rank.slow, rank.phase) for rank in ranks] == [
        (100.0, False, "reduce"), (101.0, False, "reduce"), (160.0, True, "reduce"),
    ]  # fmt: skip
    assert 4.0 <= ranks[0].silent_s < 60.0
    assert [len(series.steps) for series in held.look().rank_series] == [10, 10, 10]


@pytest.mark.parametrize(("second", "slow"), [(565.0, []), (600.0, []), (725.0, [1])])
def test_of_two_ranks_each_is_compared_with_the_other(held, second, slow):
    held.begin()
    for step in range(1, 41):
        held.log(step, rank_ms=[565.0 + step % 3, second - step % 5], time=utc_now())
    ranks = held.look().ranks
    assert [rank.rank for rank in ranks if rank.slow] == slow
    assert [rank.slow_share for rank in ranks] == [0.0, float(bool(slow))]


def test_ranks_are_compared_within_an_attempt(held):
    held.begin()
    for step in range(1, 31):
        held.log(step, rank_ms=[100.0, 200.0])
    held.event("attempt", attempt=2, world_size=2)
    assert [rank.slow for rank in held.look().ranks] == [False, False]
    assert held.look().ranks[1].slow_share == 1.0


def test_a_field_of_a_sample_holds_until_a_line_has_it_again(folder):
    path = folder.run.health("node7")
    gpu = {"index": 0, "name": "RTX 5090", "total_bytes": 32, "used_bytes": 8, "use": 0.5, "throttle": ["power"]}
    append_sample(path, {"time": "2026-01-01T00:00:00.000Z", "cpu": 0.5, "ram_total": 64, "gpus": [gpu]})
    append_sample(path, {"time": "2026-01-01T00:00:02.000Z", "cpu": 0.7, "gpus": [{"index": 0, "used_bytes": 9}]})
    snapshot = folder.look()
    (host,) = snapshot.hosts
    assert (host.name, host.cpu, host.ram_total) == ("node7", 0.7, 64)
    assert (host.gpus[0].name, host.gpus[0].used_bytes, host.gpus[0].throttle) == ("RTX 5090", 9, [])
    assert snapshot.gpu_series["node7/0 used_bytes"].values == [8.0, 9.0]
    assert snapshot.host_series["node7 cpu"].values == [0.5, 0.7]


def test_a_host_of_an_earlier_attempt_is_not_shown(folder):
    def sampled(host, second):
        append_sample(folder.run.health(host), {"time": utc(second), "cpu": 0.5})
        return [(item.name, item.every_s) for item in folder.look().hosts]

    append_json_line(folder.run.events, {"time": utc(0), "event": "attempt", "attempt": 1, "world_size": 1})
    sampled("box-1", 2)
    assert sampled("box-1", 4) == [("box-1", 2.0)]
    append_json_line(folder.run.events, {"time": utc(60), "event": "attempt", "attempt": 2, "world_size": 1})
    assert sampled("box-1", 5) == [("box-1", 1.5)]  # the last that is known, until there is a newer one
    assert sampled("box-2", 61) == [("box-2", None)]
    assert (folder.look().ranks[0].host, sorted(folder.look().host_series)) == ("box-2", ["box-1 cpu", "box-2 cpu"])


def test_a_long_health_file_is_sampled_and_its_end_is_read_whole(folder):
    path = folder.run.health("node7")
    path.parent.mkdir()
    with path.open("w") as file:
        for number in range(30_000):
            minute, second = divmod(2 * number, 60)
            stamp = f"2026-01-{1 + minute // 1440:02d}T{minute // 60 % 24:02d}:{minute % 60:02d}:{second:02d}.000Z"
            file.write(
                json.dumps({"time": stamp, "cpu": number / 30_000, "ram_used": 10**10 + number, "pad": "x" * 40}) + "\n"
            )
    assert path.stat().st_size > 2 << 20
    folder.look()
    append_sample(path, {"time": "2026-01-31T00:00:00.000Z", "cpu": 1.0})
    series = folder.look().host_series["node7 cpu"]
    assert 500 <= len(series.values) <= 2000
    assert series.values == sorted(series.values)
    assert series.values[0] == 0.0
    assert series.values[-1] == 1.0


def test_the_measures_of_a_script_come_from_its_output(script):
    script.begin_script()
    script.print("step 3/10 loss: 2.5 tok/s: 1,000\n")
    snapshot = script.look()
    assert (snapshot.kind, snapshot.state, snapshot.command) == ("script", "running", ["train.py"])
    assert (snapshot.step, snapshot.num_steps, snapshot.loss, snapshot.tok_per_sec) == (3, 10, 2.5, 1000.0)
    assert [(log.attempt, log.rank) for log in snapshot.logs] == [(1, 0)]


def test_the_remaining_time_of_a_script_follows_from_its_last_attempt(script):
    script.begin_script(attempt=1, ago=50_000.0)
    script.print("step 9000/10000 loss: 2.5\n")
    script.begin_script(attempt=2, ago=60.0)
    script.print("step 9000/10000 loss: 2.5\n", attempt=2)
    assert script.look().eta_s is None
    script.print("step 9010/10000 loss: 2.5\n", attempt=2)
    assert script.look().eta_s == pytest.approx(990 * 60 / 10, rel=0.05)


def test_the_curves_of_a_script_without_a_speed_are_spread_over_its_attempt_read_then_or_later(folder):
    folder.run.config_toml.write_text('command = ["train.py"]\n')
    append_json_line(folder.run.events, {"time": utc(0), "event": "script", "command": ["train.py"]})
    append_json_line(folder.run.events, {"time": utc(0), "event": "attempt", "attempt": 1, "world_size": 1})
    folder.run.logs(1).mkdir(parents=True)
    folder.print("".join(f"step {step}/10 loss: 2.5\n" for step in range(1, 5)))
    os.utime(folder.run.rank_log(1, 0), (START + 40,) * 2)
    assert folder.look().series["loss"].times == [START + 10 * step for step in range(1, 5)]
    folder.print("step 5/10 loss: 2.5\nstep 6/10 loss: 2.5\n")  # their time is that of a copy, after the end
    append_json_line(folder.run.events, {"time": utc(80), "event": "finished"})
    assert folder.look().series["loss"].times == [START + second for second in (10, 20, 30, 40, 60, 80)]


def test_the_curves_of_a_script_join_those_of_its_attempts_each_from_its_first_step_on(script):
    for attempt, steps in ((1, range(1, 7)), (2, range(5, 8)), (3, ())):
        script.begin_script(attempt=attempt)
        lines = "".join(f"step {step}/9 loss: {10 * attempt + step}.0\n" for step in steps)
        script.print(lines + ("step 6/9 val_loss: 1.0\n" if attempt == 1 else ""), attempt=attempt)
    series = script.look().series
    assert (series["loss"].steps, series["loss"].values) == ([1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14, 25, 26, 27])
    assert series["val_loss"].steps == []  # step 6 was taken again
    script.print("learning rate: 0.1\n", attempt=3)
    assert script.look().series == series
    script.print("step 1/9 loss: 9.0\n", attempt=3)
    snapshot = script.look()
    assert (snapshot.step, snapshot.series["loss"].values) == (1, [9.0])


def test_a_script_without_a_step_on_its_lines_has_none_anywhere(script):
    for attempt in (1, 2):
        script.begin_script(attempt=attempt)
        assert script.look().step is None
        script.print("{'loss': 3.0, 'epoch': 0.1}\n{'loss': 2.5, 'epoch': 0.2}\n", attempt=attempt)
    snapshot, status = script.look(), run_status(script.run)
    assert (snapshot.step, snapshot.loss, snapshot.series["loss"].values) == (None, 2.5, [3.0, 2.5])
    assert snapshot.notes == ["no line shows a step: the curves count lines"]
    assert format_run(snapshot).startswith("r: running, step n/a, loss 2.5000\n")
    assert (status.step, format_steps(status), run_row(asdict(status))["steps"]) == (None, "n/a", "n/a")


def test_a_script_without_a_step_and_a_loss_on_its_lines_has_those_of_the_metrics_that_it_wrote_into_its_run_folder(
    script,
):
    def write(path, steps, *, ago):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("step,train_loss,val_loss\n" + "".join(f"{step},{5 - step / 10},\n" for step in steps))
        os.utime(path, (time.time() - ago,) * 2)

    folder = script.run.path
    write(folder / "lightning_logs/version_0/metrics.csv", [9], ago=500)  # older than the run
    write(folder / "track/tensorboard/metrics.csv", [9], ago=1)  # of a tracker
    for attempt, steps, ago in ((1, [1, 2, 3], 150), (2, [3, 4], 10)):
        script.begin_script(attempt=attempt, ago=ago + 30)
        script.print("", attempt=attempt, ago=ago)
        assert (script.look().step, run_status(script.run).step) == ((None, None) if attempt == 1 else (3, 3))
        write(folder / f"lightning_logs/version_{attempt}/metrics.csv", steps, ago=ago)
    snapshot, status = open_reader(folder).update(), run_status(script.run)
    assert (snapshot.step, snapshot.loss, status.step, status.loss) == (4, 4.6, 4, 4.6)
    assert (snapshot.series["loss"].steps, snapshot.series["loss"].values) == ([1, 2, 3, 4], [4.9, 4.8, 4.7, 4.6])
    assert snapshot.notes == ["steps and curves are those of lightning_logs/version_2/metrics.csv"]
    script.print("step 7/9 loss: 2.0\n", attempt=2)
    snapshot, status = open_reader(folder).update(), run_status(script.run)
    assert (snapshot.step, snapshot.series["loss"].steps, snapshot.notes, status.step) == (7, [7], [], 7)


@pytest.fixture
def shown(script):
    """Returns step, loss and curves of a script whose lines show no step, after a check that the list has the same."""

    def look():
        snapshot, status = open_reader(script.run.path).update(), run_status(script.run)
        assert (snapshot.step, snapshot.loss) == (status.step, status.loss)
        return snapshot.step, snapshot.loss, set(snapshot.series)

    script.begin_script(ago=30)
    script.print("loading\n")
    return look


NOTHING = (None, None, set())
METRICS = "step,train_loss\n1,2.0\n9,1.0\n"


def test_files_of_metrics_without_points_or_steps_show_nothing(script, shown, tmp_path):
    event = b"\x18" + 7 * b"\0" + b"\xa3\x7f\x4b\x22" + 28 * b"\0"
    for name, content in [
        ("metrics.csv", b""),
        ("metrics.csv", b"step,loss\n"),
        ("metrics.csv", b"step,note\n1,a\n"),
        ("metrics.csv", b"accuracy,f1\n0.9,0.8\n"),  # a table of results
        ("run-a.wandb", b""),
        ("run-b.wandb", b"damaged"),
        ("events.out.tfevents.1", event),
        ("events.out.tfevents.1", b"\xff" * 100_000),
        ("events.out.tfevents.1", b"\0" * (9 << 20)),
        ("metrics.csv", b"accuracy,f1\n" + b"0.9,0.8\n" * 50_000),
    ]:
        (script.run.path / name).write_bytes(content)
        assert shown() == NOTHING and len(RunList(script.run.path.parent).read()) == 1, (name, content[:20])
        (script.run.path / name).unlink()


def test_a_link_to_metrics_outside_the_run_folder_is_not_followed(script, shown, tmp_path):
    (tmp_path / "elsewhere.csv").write_text(METRICS)
    (script.run.path / "metrics.csv").symlink_to(tmp_path / "elsewhere.csv")
    assert shown() == NOTHING
    (script.run.path / "metrics.csv").unlink()
    (script.run.path / "metrics.csv").write_text(METRICS)
    assert shown() == (9, 1.0, {"loss"})


def test_the_longest_file_of_the_last_training_of_an_attempt_is_shown(script, shown):
    def write(folder, header, *, steps, loss, began=70.0, ago=15.0):
        path = script.run.path / folder / "metrics.csv"
        path.parent.mkdir(parents=True)
        path.write_text(f"step,{header}\n" + "".join(f"{step},{loss}\n" for step in range(steps)))
        os.utime(path, (time.time() - ago,) * 2)
        os.utime(path.parent, (time.time() - began,) * 2)

    write("b/rank0", "train_loss", steps=99, loss=2.0)
    write("b/rank1", "train_loss", steps=100, loss=9.0)  # ahead by a step
    assert shown() == (98, 2.0, {"loss"})
    write("a/validation", "val_loss", steps=120, loss=3.0)
    write("c/test", "test_loss", steps=1, loss=1.5)
    assert shown() == (98, 2.0, {"loss"})
    write("d", "train_loss", steps=200, loss=1.0, ago=60)  # the file server's clock is behind
    assert shown() == (199, 1.0, {"loss"})
    (script.run.path / "a/validation/metrics.csv").write_text("step,val_loss\n-1,3.0\n")
    write("e", "train_loss", steps=300, loss=0.5, ago=500)  # older than the run
    assert shown() == (199, 1.0, {"loss"})
    write("f", "val_loss", steps=2, loss=0.75, began=10, ago=5)  # of a test behind the training
    assert shown() == (199, 1.0, {"loss"})
    write("g", "train_loss", steps=5, loss=0.25, began=10, ago=5)  # the next fold
    assert shown() == (4, 0.25, {"loss"})


def test_curves_of_a_script_s_lines_are_not_replaced_by_those_of_its_files(script, shown):
    (script.run.path / "metrics.csv").write_text("step,loss\n-1,2.0\n")
    assert shown() == (-1, 2.0, {"loss"})
    (script.run.path / "metrics.csv").write_text(METRICS)
    script.print("tok/s: 500\n")
    assert shown() == (9, 1.0, {"loss", "tok_per_sec"})
    script.print("loss 2.5\n")
    assert shown() == (None, 2.5, {"loss", "tok_per_sec"})


def test_a_bar_without_a_loss_keeps_its_step_and_has_the_loss_of_the_file_beside_it(script, shown):
    (script.run.path / "metrics.csv").write_text("step,accuracy\n9,0.5\n")
    script.print("100%|##| 12/12 [00:01<00:00, 9.0it/s]\n")
    assert shown() == (12, None, {"step_ms"})
    (script.run.path / "metrics.csv").write_text(METRICS)
    assert shown() == (12, 1.0, {"loss", "step_ms"})
    (script.run.path / "metrics.csv").write_text(METRICS + "19,0.5\n")  # the bar counts those of an epoch
    snapshot = open_reader(script.run.path).update()
    assert shown() == (19, 0.5, {"loss", "step_ms"}) and snapshot.num_steps is None


def test_the_list_reads_the_end_of_long_files_of_metrics(script, shown, tmp_path):
    rows = "".join(f"{step},{5 - step / 10_000:.4f}\n" for step in range(20_001))
    (script.run.path / "metrics.csv").write_text(f"step,loss\n{rows}")
    assert shown() == (20_000, 3.0, {"loss"})
    (script.run.path / "metrics.csv").unlink()
    writer_of = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard").SummaryWriter
    writer = writer_of(script.run.path / "tb")
    assert shown() == NOTHING
    for step in range(1001):
        writer.add_scalar("loss", 3.5, step)
    writer.close()
    assert shown() == (1000, 3.5, {"loss"})


def test_the_list_reads_the_last_blocks_of_a_long_file_of_wandb(script, shown):
    def field(number, content):
        return varint(number << 3 | 2) + varint(len(content)) + content

    def varint(value):
        return (bytes([value & 0x7F | 0x80]) + varint(value >> 7)) if value > 0x7F else bytes([value])

    def item(name, value):
        return field(1, field(1, name.encode()) + field(16, json.dumps(value).encode()))

    data = bytearray(b":W&B\xe1\xbe\x00")
    for step in range(1001):
        row = field(2, b"".join(map(item, ("_step", "loss", "word"), (step, 5 - step / 1000, "x" * 900))))
        kind = 0
        while kind not in (1, 4):  # as LevelDB's log: no piece crosses a block of 32 KiB
            room = 32768 - len(data) % 32768
            if room < 7:
                data += bytes(room)
                continue
            piece, row = row[: room - 7], row[room - 7 :]
            kind = (3 if row else 4) if kind else (2 if row else 1)
            body = bytes([kind]) + piece
            data += zlib.crc32(body).to_bytes(4, "little") + len(piece).to_bytes(2, "little") + body
    (script.run.path / "run-a.wandb").write_bytes(data)
    assert len(data) > 900_000 and shown() == (1000, 4.0, {"loss"})
    (script.run.path / "run-a.wandb").write_bytes(data[:-1])  # its last record is half-written
    assert shown() == (999, 4.001, {"loss"})


def test_a_list_reads_a_script_again_when_its_log_or_its_metrics_have_changed(script, monkeypatch):
    """Also where the run cannot be locked; and searches its folder for new files only now and then."""
    runs, searches, statuses = RunList(script.run.path.parent), [], []
    written, read = growing_file.written_metrics, status_module.run_status
    monkeypatch.setattr(growing_file, "written_metrics", lambda *args: (searches.append(args), written(*args))[1])
    monkeypatch.setattr(status_module, "run_status", lambda *args: (statuses.append(args), read(*args))[1])
    monkeypatch.setattr(growing_file, "FIND_EVERY_S", 3600.0)

    def steps(text=""):
        with (script.run.path / "metrics.csv").open("a") as file:
            file.write(text)
        return runs.read()[0].step, runs.read()[0].step, len(statuses), len(searches)

    (script.run.path / "metrics.csv").write_text("step,loss\n")
    script.begin_script(ago=30)
    script.print("loading\n")
    assert steps() == (None, None, 1, 1)
    assert steps("1,2.0\n") == (1, 1, 2, 1)
    assert steps("2,2.0\n") == (2, 2, 3, 1)
    monkeypatch.setattr(MetricFinder, "is_due", True)
    assert steps() == (2, 2, 5, 3)  # while the run is locked, for new files
    for step in (20, 30):
        script.print(f"step {step}/90 loss: 2.5\n")
        assert steps()[:2] == (step, step)
    assert steps()[2:] == (7, 3)
    monkeypatch.setattr(status_module, "is_locked", lambda run: False)
    assert steps() == (30, 30, 8, 3)
    script.print("step 40/90 loss: 2.5\n")
    assert steps() == (40, 40, 9, 3)


def test_a_script_has_the_step_of_its_last_attempt_until_the_next_one_shows_one(script):
    script.begin_script(attempt=1)
    script.print("step 20/90 loss: 2.5 tok/s: 1000\n", attempt=1)
    script.begin_script(attempt=2)
    script.print("loading\n", attempt=2)
    snapshot, status = script.look(), run_status(script.run)
    assert (snapshot.step, snapshot.num_steps, snapshot.loss, snapshot.tok_per_sec) == (20, 90, 2.5, None)
    assert (status.step, status.loss) == (20, 2.5)
    script.print("step 19/90 loss: 2.75\n", attempt=2)
    assert (script.look().step, run_status(script.run).step, run_status(script.run).loss) == (19, 19, 2.75)


@pytest.mark.parametrize(
    ("epochs", "losses"),
    [
        ([0.4, 0.5], [1.1, 1.2, 1.3, 2.1, 2.2]),
        ([0.3, 0.4], [1.1, 1.2, 2.1, 2.2]),  # its checkpoint is older than the last line
        ([0.1, 0.2], [2.1, 2.2]),
    ],
)
def test_the_curves_of_a_script_without_steps_go_on_at_the_epoch_of_the_next_attempt(script, epochs, losses):
    for attempt, values in ((1, [0.1, 0.2, 0.3]), (2, epochs)):
        script.begin_script(attempt=attempt)
        if attempt == 2:
            assert script.look().series["loss"].values == [1.1, 1.2, 1.3]
        for number, epoch in enumerate(values, 1):
            script.print(f"{{'loss': '{attempt}.{number}', 'epoch': '{epoch}'}}\n", attempt=attempt)
    series = script.look().series
    assert (series["loss"].steps, series["loss"].values) == (list(range(1, len(losses) + 1)), losses)
    assert series["epoch"].values[-2:] == epochs


UNJUDGED = Summary("info", "Nothing unusual so far, and too little is reported to say more.")


def test_a_script_that_prints_every_few_minutes_is_not_silent(script):
    script.begin_script(ago=1000.0)
    script.print("step 1/10 loss: 2.5\nstep 2/10 loss: 2.4\nstep 3/10 loss: 2.3\n", ago=400.0)
    snapshot = script.look()
    assert snapshot.silence_s == pytest.approx(200.0, abs=5)
    assert summarize(replace(snapshot, updated=NOW - 390), now=NOW) == UNJUDGED
    assert summarize(replace(snapshot, updated=NOW - 450), now=NOW) == Summary(
        "warning", "No output or heartbeat for 7m30s."
    )


@pytest.mark.parametrize("job, text", [
    ("job 10 PENDING (Priority)", "Slurm has not started it yet: job 10 PENDING (Priority)."),
    ("job 10 RUNNING on n[1-2]", "Its job has started, and its attempt has not: job 10 RUNNING on n[1-2]."),
    (None, "Slurm has not started it yet: its queue is not known here."),
])  # fmt: skip
def test_a_requeued_run_whose_job_runs_again_is_not_waiting_for_slurm(script, job, text):
    script.begin_script()
    assert summarize(replace(script.look(), state="queued", slurm=job), now=NOW) == Summary("info", text)


def test_a_non_finite_loss_is_a_warning_and_null_in_json(script):
    script.begin_script()
    script.print("step 1/10 loss: 2.5\nstep 2/10 loss: nan\nstep 3/10 loss: nan\n")
    snapshot = script.look()
    values = snapshot.series["loss"].values
    assert (snapshot.step, math.isnan(snapshot.loss), values[0], list(map(math.isnan, values))) == (
        3,
        True,
        2.5,
        [False, True, True],
    )
    assert summarize(snapshot, now=time.time()) == Summary("warning", "The loss is NaN or infinite.")
    assert json.loads(json.dumps(snapshot.to_json(), allow_nan=False))["loss"] is None
    script.print("step 4/10 loss: 2.25\n")
    assert script.look().loss == 2.25


def test_a_path_that_is_neither_a_run_nor_a_file_is_refused_with_a_fix(tmp_path):
    with pytest.raises(PacelineError) as error:
        open_reader(tmp_path / "nowhere")
    assert error.value.fix
    with pytest.raises(PacelineError):
        open_reader(tmp_path)


def test_a_snapshot_is_plain_json(held):
    held.begin()
    held.log(1, rank_ms=[1.0, 2.0])
    assert json.loads(json.dumps(held.look().to_json(), allow_nan=False))["state"] == "starting"


def test_a_snapshot_comes_whatever_happens_to_the_files(held):
    """Bytes are lost, changed and swapped, lines shuffled, files taken away, a few at a time."""
    held.begin()
    for step in range(1, 30):
        held.log(step, val_bpb=1.5, rank_ms=[10.0, 11.0])
        held.beat(step % 2, step)
    held.event("checkpoint", step=10, bytes=100, seconds=0.1)
    held.event("attempt_ended", attempt=1, state="failed")
    append_sample(
        held.run.health("a"), {"time": "2026-01-01T00:00:02.000Z", "cpu": 0.7, "gpus": [{"index": 0, "use": 1}]}
    )
    original = {
        path: path.read_bytes() for path in held.run.path.rglob("*") if path.is_file() and path != held.run.lock
    }
    chance = random.Random(7)
    for _ in range(60):
        for path in chance.sample(sorted(original), 3):
            damaged = bytearray(original[path])
            match chance.randrange(4):
                case 0:
                    del damaged[chance.randrange(len(damaged)) :]
                case 1:
                    for _ in range(4):
                        damaged[chance.randrange(len(damaged))] = chance.choice(b'{}[]",:0a-\n\x00\xff')
                case 2:
                    damaged = bytearray(b"\n".join(chance.sample(lines := bytes(damaged).split(b"\n"), len(lines))))
                case 3:
                    path.unlink(missing_ok=True)
                    continue
            path.write_bytes(damaged)
        json.dumps(held.look().to_json(), allow_nan=False)
    for path, content in original.items():
        path.unlink(missing_ok=True)
        held.look()
        path.write_bytes(content)
    snapshot = held.look()
    assert (snapshot.state, snapshot.loss, len(snapshot.series["loss"].steps)) == ("recovering", 3.0, 29)
