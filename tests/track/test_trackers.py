"""Trackers get every row of a run once, whatever happens in between: with the real libraries, and a W&B server on loopback."""

import fcntl
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module

import pytest
from wandb_server import WandbServer

from paceline.cli import run_command
from paceline.explain.series import read_events, read_series, read_wandb
from paceline.rundir import RunDir, append_json_line, is_locked, read_json_lines, write_atomic
from paceline.track.follower import RunRows, read_position, track, track_now
from paceline.track.trackers import Position
from paceline.watch.growing_file import MetricSteps

START = 1_795_000_000.0
KEY = "0" * 40
STEPS = {10: 5.0, 20: 4.0, 30: 3.5}  # step -> loss


def utc(elapsed_s):
    time = datetime.fromtimestamp(START + elapsed_s, UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def metrics_line(step, loss, *, at):
    return json.dumps({"step": step, "loss": loss, "grad_norm": None, "rank_ms": [5.0, 7.0], "time": utc(at)}) + "\n"


def health_line(use, *, at):
    gpu = {"index": 0, "name": "RTX 5090", "use": use, "throttle": ["power"], "processes": [{"pid": 7, "bytes": 1}]}
    return json.dumps({"time": utc(at), "cpu": 0.5, "cores": 8, "gpus": [gpu]}) + "\n"


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "books")
    run.health_dir.mkdir(parents=True)
    run.config_toml.write_text("depth = 2\nseed = 42\n")
    run.plan_json.write_text('{"world_size": 2, "device_batch_size": 4, "grad_accum_steps": 1}')
    run.events.write_text(json.dumps({"time": utc(0), "event": "launch"}) + "\n")
    run.metrics.write_text("".join(metrics_line(step, loss, at=step) for step, loss in STEPS.items()))
    run.health("one").write_text("".join(health_line(use, at=at) for at, use in ((2, 0.2), (4, 0.4), (21, 1.0))))
    return run


def rows_of(run, position, *, redone=True, last=True):
    return [(row.step, row.elapsed_s, row.values) for row in RunRows(run, position, redone=redone).read(last=last)]


def track_all(run, name):
    """Sends a run that has ended; returns what was reported."""
    reports = []
    track(run, name, continues=lambda: False, report=reports.append)
    return reports


def test_health_becomes_means_and_each_step_has_all_its_numbers(run):
    assert rows_of(run, Position()) == [
        (None, 4.0, {"health/one/cpu": 0.5, "health/one/gpus/0/use": pytest.approx(0.3)}),
        (None, 21.0, {"health/one/cpu": 0.5, "health/one/gpus/0/use": 1.0}),
        (10, 10.0, {"loss": 5.0, "rank_ms/0": 5.0, "rank_ms/1": 7.0}),
        (20, 20.0, {"loss": 4.0, "rank_ms/0": 5.0, "rank_ms/1": 7.0}),
        (30, 30.0, {"loss": 3.5, "rank_ms/0": 5.0, "rank_ms/1": 7.0}),
    ]


def test_a_mean_waits_for_the_end_of_its_window_and_a_half_written_line_until_it_is_whole(run):
    rows, line = RunRows(run, Position(), redone=False), metrics_line(40, 3.0, at=40)
    assert [row.elapsed_s for row in rows.read() if row.step is None] == [4.0]
    with run.metrics.open("a") as file:
        file.write(line[:20])
        file.flush()
        assert list(rows.read()) == []
        file.write(line[20:])
    assert [row.step for row in rows.read()] == [40]


@pytest.mark.parametrize("redone, expected", [(True, [20, 30]), (False, [])])
def test_steps_that_a_resume_repeats_are_rows_only_for_trackers_that_accept_them(run, redone, expected):
    position = Position()
    rows = RunRows(run, position, redone=redone)
    assert len(list(rows.read(last=True))) == 5
    first_lines = run.metrics.read_text().splitlines(keepends=True)[:1]
    write_atomic(run.metrics, "".join([*first_lines, metrics_line(20, 4.5, at=50), metrics_line(30, 3.0, at=60)]))
    assert [row.step for row in rows.read()] == expected
    assert rows_of(run, position, redone=redone) == []


def write_log(run, text):
    """Makes the run one of a script that has printed this."""
    run.metrics.unlink()
    run.rank_log(1, 0).parent.mkdir(parents=True)
    run.rank_log(1, 0).write_text(text)


def test_the_rows_of_a_script_come_from_its_output(run):
    write_log(run, "loading\nstep 1/9 | loss 3.25\nstep 2/9 | loss 3.00\nval_loss 2.5\rstep 3/9 | loss 2.50")
    position = Position()
    steps = [(step, values) for step, _, values in rows_of(run, position) if step is not None]
    assert steps == [(1, {"loss": 3.25}), (2, {"loss": 3.0, "val_loss": 2.5}), (3, {"loss": 2.5})]
    assert rows_of(run, position) == []


def test_a_script_s_loss_that_is_nan_is_a_point_of_its_curve_and_its_last_step_has_the_time_of_its_log(run):
    write_log(run, "step 1/3 | loss 3.25\nstep 2/3 | loss inf\nstep 3/3 | loss nan\n")
    os.utime(run.rank_log(1, 0), (START - 1e8, START - 1e8))
    track_all(run, "tensorboard")
    folder = run.path / "track" / "tensorboard"
    assert (
        repr(read_scalars(folder, "loss"))
        == "[(1, 3.25, -100000000.0), (2, inf, -100000000.0), (3, nan, -100000000.0)]"
    )


def test_the_steps_of_a_script_with_epochs_are_counted_over_all_of_them(run):
    lines = (f"Epoch [{epoch}/2], Step [{step}/20], Loss: 2.5\n" for epoch in (1, 2) for step in (10, 20))
    write_log(run, "".join(lines))
    assert [step for step, _, _ in rows_of(run, Position()) if step is not None] == [10, 20, 30, 40]


def test_the_validation_loss_of_hugging_face_s_trainer_belongs_to_the_step_of_its_training(run):
    bars = "{'loss': 2.5}\n%s| 5/9 [00:01]\r%s| 1/4 [00:01]\r%s| 4/4 [00:01]\r{'eval_loss': 2.0, 'epoch': 0.5}\n%s| 6/9 [00:01]\n"
    write_log(run, bars % (" 55%|#", " 25%|#", "100%|#", " 66%|#") + "{'eval_loss': 1.5}\n")
    steps = [(step, values) for step, _, values in rows_of(run, Position()) if step is not None]
    assert steps == [(5, {"val_loss": 2.0}), (6, {"val_loss": 1.5})]


LIGHTNING = "epoch,step,train_loss,val_dice\n0,4,2.5,\n0,9,2.0,\n0,9,,0.75\n1,14,1.5,\n"
BARS = (
    "Epoch 0:  50%|##| 5/10 [00:01<00:01, 9.0it/s, v_num=0]\rEpoch 0: 100%|##| 10/10 [00:01<00:00, 9.0it/s, v_num=0]\n"
)


def file_rows(run, *, own=None, log="loading\n", last=True):
    """Returns steps with their values, and what is reported, of a script that has printed this."""
    if not run.rank_log(1, 0).exists():
        write_log(run, log)
        append_json_line(run.events, {"time": utc(1), "event": "attempt", "attempt": 1})
    reports = []
    rows = RunRows(run, Position(), redone=True, files=MetricSteps(run, own=own, report=reports.append))
    return {row.step: row.values for row in rows.read(last=last) if row.step is not None}, reports


@pytest.mark.parametrize("log", ["loading\n", BARS])
def test_the_rows_of_a_script_that_prints_no_loss_are_those_of_its_files_of_metrics(run, log):
    (run.path / "metrics.csv").write_text(LIGHTNING)
    rows, reports = file_rows(run, log=log)
    last = {"epoch": 1.0, "train_loss": 1.5}
    assert rows == {
        4: {"epoch": 0.0, "train_loss": 2.5},
        9: {"epoch": 0.0, "train_loss": 2.0, "val_dice": 0.75},
        14: last,
    }
    assert reports == ["steps are those of metrics.csv"]
    assert 14 not in file_rows(run, last=False)[0]  # further numbers may follow


def test_the_rows_of_a_script_without_any_loss_are_live_unless_a_file_of_metrics_may_still_come(run, monkeypatch):
    assert file_rows(run, log="step: 5/36 lr: 1e-3\nstep: 6/36 lr: 1e-3\n", last=False)[0] == {}
    monkeypatch.setattr("paceline.track.follower.HOLD_S", 0.0)
    assert file_rows(run, last=False)[0] == {5: {"lr": 1e-3}}
    (run.path / "metrics.csv").write_text(LIGHTNING)
    assert set(file_rows(run, last=False)[0]) == {4, 9}


def test_the_rows_of_a_script_that_prints_its_loss_are_those_of_its_log(run):
    (run.path / "metrics.csv").write_text(LIGHTNING)
    assert file_rows(run, log="step 3/9 | loss 2.50\n") == ({3: {"loss": 2.5}}, [])


def test_a_tracker_gets_no_steps_that_the_script_sends_to_it_by_itself(run):
    (run.path / "lightning_logs").mkdir()
    (run.path / "lightning_logs/metrics.csv").write_text(LIGHTNING)
    write_log(run, "loading\n")
    append_json_line(run.events, {"time": utc(1), "event": "attempt", "attempt": 1})
    writer = import_module("torch.utils.tensorboard").SummaryWriter(str(run.path / "lightning_logs"))
    writer.add_scalar("train_loss", 2.5, 4)
    writer.close()
    rows, (report,) = file_rows(run, own=read_events)
    assert rows == {} and report.endswith(" is the script's own: only health is sent")
    assert set(file_rows(run, own=read_wandb)[0]) == {4, 9, 14}


def test_a_file_of_metrics_that_grows_gives_each_step_once(run):
    (run.path / "metrics.csv").write_text(LIGHTNING)
    write_log(run, "loading\n")
    append_json_line(run.events, {"time": utc(1), "event": "attempt", "attempt": 1})
    rows = RunRows(run, Position(), redone=True, files=MetricSteps(run, own=None, report=lambda text: None))
    steps = [[row.step for row in rows.read() if row.step is not None]]
    for text in ("1,19,1.25,\n", "", "1,19,,0.9\n1,24,1.0,\n"):
        with (run.path / "metrics.csv").open("a") as file:
            file.write(text)
        steps.append([row.step for row in rows.read() if row.step is not None])
    assert steps == [[4, 9], [14], [], [19]]
    (row,) = [row for row in rows.read(last=True) if row.step is not None]
    assert (row.step, row.values) == (24, {"epoch": 1.0, "train_loss": 1.0})


@pytest.fixture(autouse=True)
def first_files(monkeypatch):
    """TensorBoard numbers the files of a process, and of one second it reads the tenth before the ninth."""
    with suppress(ImportError):
        from tensorboard.summary.writer import event_file_writer

        monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def read_scalars(folder, tag):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    scalars = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(event.step, round(event.value, 3), event.wall_time - START) for event in scalars.Scalars(tag)]


def test_tensorboard_shows_the_logged_steps_and_repeated_steps_in_their_place(run):
    pytest.importorskip("tensorboard")
    folder = run.path / "track" / "tensorboard"
    assert track_all(run, "tensorboard") == [f"tensorboard: tensorboard --logdir {folder}"]
    assert read_scalars(folder, "loss") == [(10, 5.0, 10.0), (20, 4.0, 20.0), (30, 3.5, 30.0)]
    assert read_scalars(folder / "health", "health/one/gpus/0/use") == [(4, 0.3, 4.0), (21, 1.0, 21.0)]
    first_lines = run.metrics.read_text().splitlines(keepends=True)[:1]
    write_atomic(run.metrics, "".join([*first_lines, metrics_line(20, 4.5, at=50)]))
    track_all(run, "tensorboard")
    assert read_scalars(folder, "loss") == [(10, 5.0, 10.0), (20, 4.5, 50.0)]


def test_tensorboard_shows_no_step_twice_after_a_tracker_was_killed_before_saving_its_position(run):
    pytest.importorskip("tensorboard")
    track_all(run, "tensorboard")
    run.track("tensorboard").unlink()
    track_all(run, "tensorboard")
    folder = run.path / "track" / "tensorboard"
    assert [step for step, _, _ in read_scalars(folder, "loss")] == [10, 20, 30]
    assert [step for step, _, _ in read_scalars(folder / "health", "health/one/cpu")] == [4, 21]


def test_a_run_without_new_rows_adds_no_file_to_tensorboard_and_one_row_is_one_row(run, capsys):
    pytest.importorskip("tensorboard")
    track_all(run, "tensorboard")
    files = sorted(run.track("tensorboard").with_suffix("").rglob("*"))
    assert len(files) == 3  # the steps, and the folder of health with its file
    track_now(run, "tensorboard")
    assert sorted(run.track("tensorboard").with_suffix("").rglob("*")) == files
    append_json_line(run.metrics, {"step": 40, "loss": 3.0, "time": utc(40)})
    track_now(run, "tensorboard")
    lines = capsys.readouterr().out.splitlines()
    assert (lines[1], lines[3]) == ("tensorboard: no new rows", "tensorboard: 1 row sent")


# where nobody types
IN_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def paceline(*args, before=(), **env):
    """In a process of its own: these libraries read their variables when they are imported."""
    done = subprocess.run(
        [*before, sys.executable, "-m", "paceline.cli", *map(str, args)],
        env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.soak
@pytest.mark.dist
def test_trackio_has_every_step_once_however_often_it_is_sent(run, tmp_path):
    pytest.importorskip("trackio")
    env = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    code, out, _ = paceline("track", run.path, "--to", "trackio", **env)
    position = json.loads(run.track("trackio").read_text())
    name = f"books-{position['id'][:6]}"
    prefix = f"trackio: trackio show --project paceline, run {name}\ntrackio: "
    assert (code, out) == (0, f"{prefix}5 rows sent\n")
    run.track("trackio").write_text(json.dumps({"id": position["id"]}))  # a tracker that was killed noted nothing
    assert (
        paceline("track", run.path, "--to", "trackio", **env)[1] == f"{prefix}2 rows sent\n"
    )  # of health, with no step
    code = "import json, sys; from trackio.sqlite_storage import SQLiteStorage as s; print(json.dumps(s.get_logs(*sys.argv[1:])))"
    logged = subprocess.run(
        [sys.executable, "-c", code, "paceline", name], env={**os.environ, **env}, capture_output=True, text=True
    )
    rows = json.loads(logged.stdout)
    assert [(row["step"], row["loss"]) for row in rows] == list(STEPS.items())
    assert rows[0]["health/one/gpus/0/use"] == 1.0


@pytest.mark.dist
def test_wandb_never_asks_for_a_key_and_continues_offline_and_its_server_later_gets_every_row_once(run, tmp_path):
    pytest.importorskip("wandb")
    offline = f"; saved offline, paceline track {run.path} --to wandb sends it later\n"
    env = {"HOME": str(tmp_path), "WANDB_PROJECT": "paceline", "WANDB_API_KEY": ""}
    with WandbServer() as server:
        env["WANDB_BASE_URL"] = server.url
        in_a_terminal = [sys.executable, "-c", IN_A_TERMINAL]
        code, out, err = paceline("track", run.path, "--to", "wandb", before=in_a_terminal, **env)
        error, fix = out.splitlines()[2:]
        assert (code, err, error) == (1, "", "error: wandb: 5 rows saved offline, nothing sent")
        assert fix.startswith(f"  fix: paceline track {run.path} --to wandb, once its server answers")
        assert out.startswith("wandb: not logged in, run `wandb login`" + offline)
        (first_lines,) = run.path.glob("track/wandb/offline-run-*/run-*.wandb")
        assert [row["loss"] for row in offline_rows(first_lines)] == list(STEPS.values())
        (loss,) = (item for item in read_series([first_lines])[0] if item.name == "loss")
        assert loss.values == list(STEPS.values())  # what `paceline explain` reads
        assert server.lines == []

        env["WANDB_API_KEY"] = KEY
        with run.metrics.open("a") as file:
            file.write(metrics_line(40, 3.0, at=40))
        name = json.loads(run.track("wandb").read_text())["id"]
        code, out, err = paceline("track", run.path, "--to", "wandb", **env)
        assert (code, out, err) == (0, f"wandb: {server.url}/me/paceline/runs/{name}\nwandb: 6 rows sent\n", "")
        assert server.steps == [10, 20, 30, 40]
        assert (server.lines[0]["health/one/gpus/0/use"], server.lines[1]["_timestamp"]) == (1.0, START + 20)
        assert first_lines.with_name(first_lines.name + ".synced").exists()
        assert rows_of(run, read_position(run, "wandb")) == []  # a third command has nothing to send


@pytest.mark.soak
def test_wandb_without_its_server_saves_offline(run, tmp_path):
    pytest.importorskip("wandb")
    env = {"HOME": str(tmp_path), "WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    for _ in range(2):
        code, out, err = paceline("track", run.path, "--to", "wandb", **env)
        assert (code, err.splitlines()[0]) == (1, "error: wandb: 5 rows saved offline, nothing sent")
    code, out, _ = paceline("track", run.path, "--to", "wandb", **env, WANDB_MODE="offline")
    assert (code, out.splitlines()[-1]) == (0, "wandb: 5 rows saved offline")
    code, out, _ = paceline("track", run.path, "--to", "wandb", **env)
    assert out.startswith("wandb: no answer from 127.0.0.1:9 ([Errno 111] Connection refused); saved offline, ")


def offline_rows(path):
    """The history in W&B's own file: records in blocks of 32 KiB, each chunk with checksum, length and kind before it."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, at, record, rows = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := -at % (1 << 15)) and left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record, at = record + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            items = pb.Record.FromString(record).history.item
            rows += [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}] if items else []
            record = b""
    return rows


@pytest.mark.soak
def test_wandb_whose_server_accepts_no_rows_gets_them_later(run, tmp_path):
    pytest.importorskip("wandb")
    env = {"HOME": str(tmp_path), "WANDB_API_KEY": KEY}
    code = (
        "import sys; from paceline.track import trackers; trackers.ARRIVAL_S = 4.0;"
        "from paceline.cli import run_command; sys.exit(run_command(sys.argv[1:]))"
    )
    with WandbServer() as server:
        env["WANDB_BASE_URL"], server.is_stuck = server.url, True
        args = [sys.executable, "-c", code, "track", str(run.path), "--to", "wandb"]
        done = subprocess.run(args, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)
        assert (done.returncode, server.lines) == (1, [])
        assert f"error: wandb: not all rows have arrived\n  fix: paceline track {run.path} --to wandb" in done.stderr
        server.is_stuck = False
        assert paceline("track", run.path, "--to", "wandb", **env)[1].endswith("5 rows sent\n")
        assert server.steps == [10, 20, 30]
        assert paceline("track", run.path, "--to", "wandb", **env)[1].endswith("wandb: no new rows\n")
        assert server.steps == [10, 20, 30]


@pytest.mark.dist
def test_a_tracker_follows_a_run_to_its_end(run):
    pytest.importorskip("tensorboard")
    lock = run.lock.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    helper = subprocess.Popen(
        [sys.executable, "-m", "paceline.track.follower", run.path, "tensorboard"], stdin=subprocess.PIPE
    )
    helper.stdin.close()  # the command that held the run was killed
    with run.metrics.open("a") as file:
        file.write(metrics_line(40, 3.0, at=40))
    assert is_locked(run)
    lock.close()  # and now its workers have saved and ended
    assert helper.wait(timeout=120) == 0
    assert [step for step, _, _ in read_scalars(run.path / "track" / "tensorboard", "loss")] == [10, 20, 30, 40]
    assert list(read_json_lines(run.events))[-1]["text"].startswith("tensorboard: tensorboard --logdir ")


@pytest.mark.dist
def test_a_tracker_ends_when_another_command_holds_the_run(run):
    pytest.importorskip("tensorboard")
    with run.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run.lock.write_text("1")
        args = [sys.executable, "-m", "paceline.track.follower", run.path, "tensorboard"]
        helper = subprocess.Popen(args, stdin=subprocess.PIPE)
        while len(list(read_json_lines(run.events))) < 2:
            assert helper.poll() is None
            time.sleep(0.02)
        run.lock.write_text("2")
        helper.stdin.close()
        assert helper.wait(timeout=120) == 0


@pytest.mark.dist
def test_an_error_of_a_tracker_is_one_note_of_the_run(run):
    run.track("tensorboard").parent.mkdir()
    (run.path / "track" / "tensorboard").write_text("no folder")
    args = [sys.executable, "-m", "paceline.track.follower", run.path, "tensorboard"]
    done = subprocess.run(args, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    message = list(read_json_lines(run.events))[-1]["text"]
    assert message.startswith("tensorboard: ")
    assert message.endswith(f"; paceline track {run.path} --to tensorboard sends what is missing")


def test_two_processes_do_not_send_the_same_run(run, capsys):
    pytest.importorskip("tensorboard")
    run.track("tensorboard").parent.mkdir()
    with run.track("tensorboard").with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_command(["track", str(run.path), "--to", "tensorboard"]) == 1
    assert "error: tensorboard: another process is sending books to it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args, message",
    [
        (["r", "--to", "wand"], "error: --to wand: no such tracker\n  fix: one of tensorboard, wandb, trackio\n"),
        (["r"], "error: track needs --to\n  fix: add --to tensorboard\n"),
    ],
)
def test_a_run_that_cannot_be_sent_is_refused(args, message, capsys):
    assert run_command(["track", *args]) == 2
    assert capsys.readouterr().err == message


def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(capsys, monkeypatch):
    monkeypatch.setattr("paceline.launch.notify.find_spec", lambda name: None)
    assert run_command(["train", "--track", "trackio"]) == 1
    assert capsys.readouterr().err == "error: trackio is not installed\n  fix: pip install trackio\n"


def test_the_times_of_ranks_on_several_hosts_have_the_host_in_their_names(run):
    with run.events.open("a") as file:
        for at, hosts in ((5, {"ada": [0], "bob": [1]}), (25, None)):
            file.write(json.dumps({"time": utc(at), "event": "attempt", "attempt": 1, "hosts": hosts}) + "\n")
    names = [
        {name for name in values if name.startswith("rank_ms")} for step, _, values in rows_of(run, Position()) if step
    ]
    of_hosts = {"rank_ms/ada/0", "rank_ms/bob/1"}
    assert names == [of_hosts, of_hosts, {"rank_ms/0", "rank_ms/1"}]
