"""A run without its terminal: started with --detach, found again and ended by `paceline stop`."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import wait_for

from paceline.errors import PacelineError
from paceline.launch.background import check_saves, format_stop, neighbour_notes, stop_run
from paceline.model.manifest import Manifest, encode_manifest
from paceline.rundir import RunDir, RunInUse, append_event, holder_of, lock_run, read_json_lines

DEADLINE_S = 120.0
TRAIN = (
    "train", "--nproc", "1", "--depth", "2", "--n-embd", "64", "--head-dim", "32", "--sequence-len", "64", "--vocab-size", "512",
    "--total-batch-size", "512", "--device-batch-size", "4", "--num-steps", "100000", "--eval-every", "0", "--sample-every", "0",
    "--log-every", "1", "--health-every", "0", "--no-check", "--name", "far", "--detach",
)  # fmt: skip
SCRIPT = ("run", "--nproc", "1", "--health-every", "0", "--no-check", "--name", "far", "--detach", "--", "wait.py")


def paceline(folder, *arguments, code=0):
    command = [sys.executable, "-m", "paceline.cli", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_a_run_on_the_same_cores_is_reported_and_no_other(tmp_path, monkeypatch):
    held, devices = {}, {"on-gpu": "cuda", "half": "{"}
    for name in ("new", "b", "a", "ended", "on-gpu", "far", "half"):
        device = devices.get(name, "cpu")
        run = RunDir(tmp_path / name)
        run.path.mkdir()
        run.config_toml.write_text("depth = 2\n")
        run.plan_json.write_text(device if device == "{" else json.dumps({"device": device}))
        if name == "b":  # a script's run has no plan
            run.plan_json.unlink()
            run.config_toml.write_text(f'command = ["x.py"]\ndevice = "{device}"\n')
        if name != "ended":
            held[name] = lock_run(run, host="elsewhere" if name == "far" else None)
    for name in ("new", "a"):
        (tmp_path / f"latest-{name}").symlink_to(name)
    on_cpu, on_gpu = SimpleNamespace(device="cpu"), SimpleNamespace(device="cuda")
    new = RunDir(tmp_path / "new")
    note = "note    a and b run on the cores of this host too: all of them are slower than planned"
    assert neighbour_notes(new, on_cpu) == neighbour_notes(RunDir(tmp_path / "latest-new"), on_cpu) == [note]
    assert neighbour_notes(new, on_gpu) == []
    for name, hosts in (("new", "ada,bob"), ("a", "me@bob,cy")):
        (tmp_path / name / "config.toml").write_text(f'depth = 2\nhosts = "{hosts}"\n')
    other = "note    a runs on the cores of bob too: all of them are slower than planned"
    assert neighbour_notes(new, on_cpu) == [other]  # this host only drives
    (tmp_path / "new" / "config.toml").write_text("depth = 2\n")
    assert neighbour_notes(new, on_cpu) == [note.replace("a and b run", "b runs")]
    os.close(held["a"])
    os.close(held["b"])
    assert neighbour_notes(new, on_cpu) == []
    for name in ("new", "on-gpu", "far", "half"):
        os.close(held[name])


@pytest.mark.dist
@pytest.mark.parametrize("command", [SCRIPT, pytest.param(TRAIN, marks=pytest.mark.soak)])
def test_a_detached_run_goes_on_without_its_terminal_until_it_is_stopped(tmp_path, command):
    (tmp_path / "wait.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    output = paceline(tmp_path, *command)
    run = RunDir(tmp_path / "runs" / "far")
    log = run.path / "logs" / "supervisor.log"
    pid = int(str(holder_of(run)).split()[0])
    assert f"detached: process {pid}, output in runs/far/logs/supervisor.log" in output
    assert "paceline watch runs/far" in output and "paceline stop runs/far" in output
    assert os.getsid(pid) == pid and Path(f"/proc/{pid}/fd/1").readlink() == log
    if command is SCRIPT:
        wait_for(lambda: run.rank_log(1, 0).exists() and run.rank_log(1, 0).read_text() == "ready\n")
        manifest = Manifest(7, 1, "2026-11-23T00:00:00.000Z", "0", "0", None, {}, {}, {})
        (folder := run.checkpoints / "step_000007").mkdir(parents=True)
        (folder / "manifest.json").write_text(encode_manifest(manifest))
    else:
        wait_for(lambda: run.metrics.exists() and len(list(read_json_lines(run.metrics))) > 3)
    answer, _, said = paceline(tmp_path, "stop", "far", "--json").rpartition("stopping: ")
    assert said.endswith("; paceline stop runs/far --now ends it at once\n")
    result = json.loads(answer)
    last = max((line["step"] for line in read_json_lines(run.metrics)), default=7)
    assert result == {"run": "runs/far", "pid": pid, "state": "stopped", "checkpoint_step": last}
    assert "interrupted after" in log.read_text() and holder_of(run) is None
    assert log.read_text().rstrip().endswith("next    paceline resume runs/far")
    assert "far is not running" in paceline(tmp_path, "stop", "far", code=1)


@pytest.mark.soak
@pytest.mark.dist
def test_stop_now_ends_a_run_without_a_checkpoint(tmp_path):
    paceline(tmp_path, *TRAIN)
    run = RunDir(tmp_path / "runs" / "far")
    pid_file = run.logs(1) / "0.pid"
    wait_for(lambda: pid_file.exists() and pid_file.read_text().strip())
    wait_for(lambda: any(event["event"] == "attempt" for event in read_json_lines(run.events)))
    os.kill(int(pid_file.read_text()), signal.SIGSTOP)  # so that it does not save between the two signals
    assert "stopped: runs/far, no checkpoint" in paceline(tmp_path, "stop", "far", "--now")


def test_a_run_of_another_host_is_stopped_there(tmp_path):
    run = RunDir(tmp_path)
    fd = lock_run(run, host="ada")
    try:
        with pytest.raises(PacelineError, match=f"is run by process {os.getpid()} on ada") as error:
            stop_run(run, now=False)
        assert error.value.fix == f"on ada: paceline stop {run.name}"
        with pytest.raises(RunInUse, match="in use by process .* on ada") as in_use:
            lock_run(run)
        assert in_use.value.pid is None  # not a process of this host
    finally:
        os.close(fd)


def test_a_process_that_does_not_hold_the_run_gets_no_signal(tmp_path):
    run = RunDir(tmp_path)
    fd = lock_run(run)
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{sleeper.pid} {socket.gethostname()}".encode(), 0)
        with pytest.raises(PacelineError, match="has ended; its ranks save and end"):
            stop_run(run, now=True)
        assert sleeper.poll() is None
    finally:
        os.close(fd)
        sleeper.kill()
        sleeper.wait()


@pytest.fixture
def script_run(tmp_path):
    run = RunDir(tmp_path / "my runs" / "det")
    run.path.mkdir(parents=True)
    run.config_toml.write_text('command = ["train.py"]\nnproc = 2\ndevice = "cpu"\ncwd = "/home/me"\n')
    append_event(run, "attempt", attempt=1, nproc=2, world_size=2, pids=[])
    return run


def test_a_run_that_cannot_save_is_not_stopped(tmp_path):
    run = RunDir(tmp_path)
    append_event(run, "attempt", attempt=1, nproc=2, world_size=2, pids=[])
    check_saves(run)
    append_event(run, "save_failed", step=90, needed_bytes=1 << 20, host="bob", message="no space for step 90")
    with pytest.raises(PacelineError, match="cannot save: no space for step 90") as error:
        check_saves(run)
    assert error.value.fix == (
        "free some space on bob: it then saves within seconds, and the same command ends it;"
        f" paceline stop {run.quoted} --now ends it without its work: it has no checkpoint"
    )
    append_event(run, "checkpoint", step=95)
    check_saves(run)


def test_a_stopped_script_is_started_again_by_resume(script_run):
    result = {"run": str(script_run.path), "pid": 7, "state": "stopped", "checkpoint_step": None}
    resume = f"next    paceline resume '{script_run.path}'"
    assert format_stop(result) == f"stopped: {script_run.path}\n{resume}"
    text = format_stop({**result, "message": "killed rank 0"})
    assert text == f"stopped: {script_run.path}\nnote    killed rank 0\n{resume}"
    with pytest.raises(PacelineError, match=r"(?m)det is not running$") as error:
        stop_run(script_run, now=False)
    assert error.value.fix == f"paceline resume '{script_run.path}' starts it again"


def test_a_finished_run_is_not_to_be_continued(script_run):
    append_event(script_run, "finished", attempt=1)
    with pytest.raises(PacelineError, match="det is not running: it has finished") as error:
        stop_run(script_run, now=False)
    assert error.value.fix == f"paceline runs '{script_run.path.parent}' shows which runs are running"
