"""Runs in a real Slurm: slurmctld and two slurmd in network namespaces (tests/slurm_cluster.py)."""

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import slurm_cluster
from hosts_run import last_files
from slurm_cluster import LOGIN, SlurmCluster, events_of

from paceline.rundir import RunDir, read_json_lines
from paceline.slurm import JobId

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(2400),  # a busy machine takes minutes for what takes seconds alone
    pytest.mark.skipif(bool(slurm_cluster.WHY_NOT), reason=slurm_cluster.WHY_NOT),
]
SIZES = (
    "--nproc=1", "--depth=2", "--n-embd=64", "--head-dim=32", "--sequence-len=64", "--vocab-size=512", "--device=cpu",
    "--total-batch-size=1536", "--device-batch-size=4", "--sample-every=0", "--eval-every=0", "--eval-tokens=1024",
    "--data=text.txt", "--precision=fp32", "--health-every=0", "--no-check",
)  # fmt: skip
SHORTEST = 5  # minutes: a job in which paceline has time to start, to be warned and to save


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster.slurm_cluster(folder) as cluster:
        lines = (f"the {number} quick brown foxes jump over {number * number} lazy dogs\n" for number in range(3000))
        (folder / "text.txt").write_text("".join(lines))
        yield cluster


def submit(cluster: SlurmCluster, name: str, num_steps: int, *arguments: str, slurm_args: str = "--time=30") -> RunDir:
    """Submits a run of two nodes, without following it."""
    words = (*SIZES, f"--name={name}", f"--num-steps={num_steps}", "--slurm", "--hosts=2", f"--slurm-args={slurm_args}")
    done = cluster.paceline("train", *words, "--detach", *arguments)
    assert done.returncode == 0, done.stderr
    return RunDir(cluster.runs / name)


def job_id(run: RunDir) -> JobId:
    return json.loads(run.slurm_json.read_text())["job_id"]


def step_of(run: RunDir) -> int:
    return max((line["step"] for line in read_json_lines(run.metrics)), default=-1)


def wait_for_end(cluster: SlurmCluster, run: RunDir, *, timeout_s: float = slurm_cluster.DEADLINE_S) -> str:
    """Returns the state in which the job of a run has ended."""
    ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    cluster.wait_for(lambda: cluster.state(job_id(run)) in ends, timeout_s=timeout_s, every_s=1.0)
    return cluster.state(job_id(run))


@contextmanager
def standing_still(cluster: SlurmCluster, run: RunDir, *, attempt: int = 1) -> Iterator[None]:
    """Stops a rank after the first steps of an attempt until the run is warned: its steps are not done before."""
    cluster.wait_for(lambda: len(events_of(run, "attempt")) == attempt)
    before = step_of(run)
    cluster.wait_for(lambda: step_of(run) > before)
    pid = int((run.logs(attempt) / "0.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    yield
    cluster.wait_for(lambda: len(events_of(run, "stopping")) == attempt)
    os.kill(pid, signal.SIGCONT)


def unbroken(cluster: SlurmCluster, name: str, *arguments: str) -> dict[str, str]:
    """Returns the files of the last checkpoint of the same training on one host, without Slurm."""
    done = cluster.paceline("train", *arguments, *SIZES[1:], "--nproc=2", "--name", name, timeout_s=3600)
    assert done.returncode == 0, done.stderr
    return last_files(RunDir(cluster.runs / name))


@pytest.mark.parametrize("arguments, what", [
    (("--slurm-args", "--partition=man"), "Slurm has no partition man; there are main, urgent"),
    (("--slurm-args", "--partition=physics"), "partition physics is for physics, not for account n/a"),
    (("--slurm-args", "--time=1"), "a job of 1m00s has no time for a checkpoint"),
    (("--slurm-args", "--qos"), "Slurm:"),
], ids=lambda value: value[-1] if isinstance(value, tuple) else None)  # fmt: skip
def test_what_slurm_would_refuse_or_never_start_is_refused_before_it_is_submitted(cluster, arguments, what):
    sizes = [word for word in SIZES if word.partition("=")[0] not in arguments]
    done = cluster.paceline("train", *sizes, "--name", "refused", "--num-steps", "10", "--slurm", *arguments)
    assert done.returncode in (1, 2)
    assert "\nerror: " in f"\n{done.stderr}" and what in done.stderr and "\n  fix: " in done.stderr
    assert not (cluster.runs / "refused").exists()


def test_a_job_for_more_nodes_than_are_up_is_submitted_and_told_what_it_waits_for(cluster):
    cluster.slurm("scontrol", "update", "nodename=n2", "state=drain", "reason=disk")
    try:
        words = (*SIZES, "--name", "drained", "--num-steps", "10", "--slurm", "--hosts", "2", "--detach")
        done = cluster.paceline("train", *words, "--slurm-args=--time=30")
        note = "slurm   1 of the 2 nodes of partition main is up, the job waits for 2; sinfo -R says why\n"
        assert note in done.stdout and done.returncode == 0, done
        assert cluster.paceline("stop", "drained").stdout.startswith("cancelled: job ")
    finally:
        cluster.slurm("scontrol", "update", "nodename=n2", "state=resume")


def test_a_run_on_two_nodes_is_submitted_and_done(cluster):
    run = submit(cluster, "short", 5)
    assert wait_for_end(cluster, run) == "COMPLETED", cluster.logs()
    [attempt] = events_of(run, "attempt")
    assert (attempt["job_restarts"], attempt["hosts"]) == (0, {"n1": [0], "n2": [1]}) and step_of(run) == 5


@pytest.mark.soak
def test_a_run_is_submitted_followed_warned_requeued_and_done(cluster):
    """The name has a space and a letter that is not ASCII; the config is edited after the submission."""
    (cluster.hosts.folder / "mine.toml").write_text("num_steps = 150\nsave_every = 1000\nlog_every = 1\n")
    words = ("train", "mine.toml", *SIZES, "--name=große läufe", "--slurm", "--hosts=2", "--slurm-args=--time=30")
    process = cluster.start(
        LOGIN, sys.executable, "-m", "paceline.cli", *words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    run = RunDir(cluster.runs / "große läufe")
    cluster.wait_for(run.slurm_json.exists)
    (cluster.hosts.folder / "mine.toml").write_text("num_steps = 7\n")
    with standing_still(cluster, run):
        for _ in range(2):  # a second warning must not hurt
            cluster.slurm("scancel", "--signal=USR1", "--batch", str(job_id(run)))
        refused = cluster.paceline("resume", str(run.path))
    output, _ = process.communicate(timeout=slurm_cluster.DEADLINE_S)
    assert process.returncode == 0, output + cluster.logs()
    assert "is in Slurm's job" in refused.stderr
    assert f"slurm   job {job_id(run)} PENDING" in output and "2 nodes: n1 and n2, until" in output
    assert "requeued: job" in output and "requeued 1 time" in output and "done    150 steps" in output
    attempts = events_of(run, "attempt")
    assert [(event["attempt"], event["job_restarts"]) for event in attempts] == [(1, 0), (2, 1)]
    assert [event["hosts"] for event in attempts] == [{"n1": [0], "n2": [1]}] * 2
    assert events_of(run, "requeued")[0]["why"] == "its time was nearly over"
    assert events_of(run, "slurm_job")[0]["state"] == "COMPLETED"
    finished = cluster.paceline("resume", str(run.path), "--slurm")
    assert "is finished at step 150 of 150\n" in finished.stderr and not events_of(run, "submitted")


@pytest.mark.soak
def test_a_run_that_waits_is_watched_and_cancelled(cluster):
    cluster.slurm("sbatch", "--exclusive", "--nodes=2", "--job-name=first", "--output=/dev/null", "--wrap", "sleep 600")
    waiting = submit(cluster, "waiting", 20)
    number = job_id(waiting)
    assert number in {int(line) for line in cluster.slurm("squeue", "--noheader", "--format=%A").split()}
    cluster.wait_for(lambda: f"slurm   job {number} PENDING (" in cluster.paceline("runs", "show", "waiting").stdout)
    assert "waiting: queued" in cluster.paceline("runs", "show", "waiting").stdout
    listed = json.loads(cluster.paceline("runs", "--json").stdout)
    assert next(status["state"] for status in listed if status["name"] == "waiting") == "queued"
    explained = cluster.paceline("explain", "waiting")
    assert f"healthy: waiting waits, Slurm has not started it yet: job {number} PENDING (" in explained.stdout, (
        explained
    )
    assert explained.returncode == 0
    stopped = cluster.paceline("stop", "waiting")
    assert (
        stopped.stdout == f"cancelled: job {number}, before {waiting.path.relative_to(cluster.hosts.folder)} began\n"
    ), stopped
    assert cluster.state(number) == "CANCELLED" and not waiting.path.exists()
    cluster.slurm("scancel", "--name=first")


@pytest.mark.soak
def test_ctrl_c_ends_the_following_alone_and_stop_ends_the_run_with_a_checkpoint(cluster):
    words = ("train", *SIZES, "--name=stopped", "--num-steps=3000", "--slurm", "--hosts=2", "--slurm-args=--time=30")
    run = RunDir(cluster.runs / "stopped")
    printed = cluster.paceline(*words, "--print").stdout
    assert printed.startswith("#!/bin/bash\n#SBATCH --job-name=stopped\n#SBATCH --nodes=2\n") and not run.path.exists()
    process = cluster.start(LOGIN, sys.executable, "-m", "paceline.cli", *words, stdout=subprocess.PIPE)
    cluster.wait_for(lambda: step_of(run) > 0)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=slurm_cluster.DEADLINE_S)
    assert process.returncode == 130
    next_lines = "next    paceline watch runs/stopped\n        paceline stop runs/stopped\n"
    assert output.endswith(f"\ndetached: job {job_id(run)} continues\n{next_lines}"), output
    assert (run.path / "slurm.sh").read_text() == printed

    def shown():
        return cluster.paceline("runs", "show", "stopped").stdout

    cluster.wait_for(lambda: "RUNNING on n[1-2], " in (text := shown()) and " of 30m00s left" in text)
    stopped = cluster.paceline("stop", "stopped")
    assert stopped.stdout.startswith("stopped: runs/stopped, checkpoint at step "), stopped
    assert not events_of(run, "requeued") and cluster.state(job_id(run)) not in ("PENDING", "RUNNING")

    resume = ("resume", "stopped", "--slurm", "--no-check")
    resubmitted = cluster.paceline(*resume, "--detach")
    assert resubmitted.stdout.startswith("slurm   as submitted before: --slurm-args --time=30\n"), resubmitted
    refused = cluster.paceline(*resume)
    assert f"error: stopped is in Slurm's job {job_id(run)}, " in refused.stderr
    assert cluster.paceline("stop", "stopped").returncode == 0
    assert [event["job_id"] for event in events_of(run, "submitted")] == [job_id(run)]


@pytest.mark.soak
def test_a_task_of_an_array_is_stopped_and_requeued_alone(cluster):
    """Slurm gives the task that starts last the number of the array."""
    command = (sys.executable, "-m", "paceline.cli", "train", *SIZES, "--num-steps=3000")
    script = cluster.hosts.folder / "array.sh"
    script.write_text(
        f"#!/bin/bash\nexec {shlex.join(command)} --seed=$SLURM_ARRAY_TASK_ID --name=task$SLURM_ARRAY_TASK_ID\n"
    )
    options = ("--array=1-2", "--nodes=1", "--exclusive", "--time=30", "--requeue", "--open-mode=append")
    array = int(cluster.slurm("sbatch", "--parsable", *options, "--output=array-%a.log", str(script)).strip())
    first, last = (RunDir(cluster.runs / f"task{number}") for number in (1, 2))
    cluster.wait_for(lambda: step_of(first) > 0 and step_of(last) > 0)
    assert job_id(last) == f"{array}_2" and isinstance(job_id(first), int)
    cluster.slurm("scancel", "--signal=USR1", "--batch", job_id(last))
    cluster.wait_for(lambda: len(events_of(last, "attempt")) == 2)
    stopped = cluster.paceline("stop", "task2")
    assert stopped.stdout.startswith("stopped: runs/task2, checkpoint at step "), stopped
    assert cluster.state(job_id(first)) == "RUNNING" and len(events_of(first, "attempt")) == 1
    assert cluster.paceline("stop", "task1").returncode == 0


@pytest.mark.soak
def test_a_batch_script_with_a_script_continues_its_run_when_slurm_requeues_the_job(cluster):
    (cluster.hosts.folder / "again.py").write_text(
        "import os, time\nprint('attempt', os.environ['PACELINE_ATTEMPT'], flush=True)\n"
        "time.sleep(600 if os.environ['PACELINE_ATTEMPT'] == '1' else 0)\n"
    )
    command = (sys.executable, "-m", "paceline.cli", "run", "--nproc=1", "--device=cpu", "--no-check", "--name=rj")
    script = cluster.hosts.folder / "rj.sh"
    script.write_text(f"#!/bin/bash\nexec {shlex.join(command)} -- again.py\n")
    options = ("--nodes=2", "--exclusive", "--time=30", "--requeue", "--open-mode=append", "--output=rj.log")
    number = cluster.slurm("sbatch", "--parsable", *options, str(script)).strip()
    run = RunDir(cluster.runs / "rj")
    cluster.wait_for(lambda: len(events_of(run, "attempt")) == 1)
    cluster.slurm("scontrol", "requeue", number)
    cluster.wait_for(lambda: events_of(run, "finished"), timeout_s=400)
    assert [event["job_restarts"] for event in events_of(run, "attempt")] == [0, 1]
    assert run.rank_log(2, 0).read_text() == "attempt 2\n"


@pytest.mark.soak
def test_the_tasks_of_srun_join_as_nodes(cluster):
    words = ("train", *SIZES, "--name=joined", "--num-steps=3")
    srun = ("srun", "--nodes=2", "--ntasks-per-node=1", "--mpi=none", "--time=10", "--label")
    token = f"PACELINE_TOKEN={secrets.token_hex(16)}"
    done = cluster.run("env", token, *srun, sys.executable, "-m", "paceline.cli", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0: joined  as node 0 of 2 by Slurm's variables; the others come to n1, port 29" in done.stdout
    assert "1: ended   with exit code 0: node 0 has ended" in done.stdout
    run = RunDir(cluster.runs / "joined")
    assert [event["hosts"] for event in events_of(run, "attempt")] == [{"n1": [0], "n2": [1]}]
    assert token.partition("=")[2] not in done.stdout + done.stderr


@pytest.mark.soak
def test_inside_an_allocation_the_same_command_just_runs_and_its_nodes_are_checked_over_srun(cluster):
    words = [*SIZES[:-1], "--name", "inside", "--num-steps", "3", "--slurm", "--hosts", "2"]
    done = cluster.run("salloc", "--nodes=2", "--time=10", sys.executable, "-m", "paceline.cli", "train", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes: n1 and n2, until" in done.stdout and "done    3 steps" in done.stdout
    [attempt] = events_of(RunDir(cluster.runs / "inside"), "attempt")
    assert attempt["hosts"] == {"n1": [0], "n2": [1]}
    assert attempt["head"] is None  # salloc's shell is on the login node


@pytest.mark.soak
def test_a_job_that_is_preempted_saves_and_continues_when_its_nodes_are_free_again(cluster):
    run = submit(cluster, "preempted", 100)
    urgent = ("--partition=urgent", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap", "sleep 5")
    with standing_still(cluster, run):
        started = time.monotonic()
        cluster.slurm("sbatch", *urgent)
    cluster.wait_for(lambda: events_of(run, "requeued"))
    print(f"requeued {time.monotonic() - started:.1f} s after the job that preempts was submitted")
    assert events_of(run, "requeued")[0]["why"] == "preempted by another job"
    assert wait_for_end(cluster, run) == "COMPLETED", cluster.logs()
    assert step_of(run) == 100 and len(events_of(run, "attempt")) == 2


@pytest.mark.soak
def test_scancel_saves_and_is_not_undone_by_a_requeue(cluster):
    run = submit(cluster, "cancelled", 3000)
    cluster.wait_for(lambda: step_of(run) > 5)
    cluster.slurm("scancel", str(job_id(run)))
    cluster.wait_for(lambda: events_of(run, "stopped"))
    assert wait_for_end(cluster, run) == "CANCELLED"
    assert not events_of(run, "requeued") and events_of(run, "checkpoint")
    explained = cluster.paceline("explain", "cancelled").stdout
    assert events_of(run, "slurm_job")[0]["state"] == "CANCELLED" and "slurm-cancelled" in explained
    longer = str(events_of(run, "checkpoint")[-1]["step"] + 5)
    resumed = cluster.paceline(
        "resume", "cancelled", "--num-steps", longer, "--slurm", "--slurm-args=--time=30", "--no-check"
    )
    assert resumed.returncode == 0 and step_of(run) == int(longer), resumed
    assert [event["world_size"] for event in events_of(run, "attempt")] == [2, 2]


@pytest.mark.soak
@pytest.mark.parametrize("min_hosts", [1, 2])
def test_a_node_that_dies_under_the_run_is_left_out_or_the_job_is_requeued_until_it_is_back(cluster, min_hosts):
    options = (f"--min-hosts={min_hosts}", "--save-every=20")
    run = submit(cluster, f"lost{min_hosts}", 240, *options, slurm_args="--time=30 --no-kill")
    cluster.wait_for(lambda: step_of(run) > 20)
    started = time.monotonic()
    cluster.kill_node("n2")
    cluster.wait_for(lambda: events_of(run, "verdict"))
    print(f"noticed {time.monotonic() - started:.1f} s after the node died")
    assert events_of(run, "verdict")[0]["cause"] == "host-lost"
    if min_hosts == 2:
        cluster.wait_for(lambda: events_of(run, "requeued"))
        cluster.start_node("n2")
    assert wait_for_end(cluster, run) == "COMPLETED", cluster.logs()
    print(f"done {time.monotonic() - started:.1f} s after the node died")
    assert step_of(run) == 240
    assert [event["world_size"] for event in events_of(run, "attempt")] == [2, min_hosts]
    if min_hosts == 1:
        cluster.start_node("n2")
    cluster.wait_for(lambda: cluster.slurm("sinfo", "-h", "-N", "-pmain", "-o%T").split() == ["idle"] * 2)


@pytest.mark.soak
def test_a_limit_that_is_reached_twice_leaves_the_same_bits_as_an_unbroken_run(cluster):
    """Slurm itself warns: USR1 may come up to a minute early, as it looks every 30 s."""
    keys = ("--save-every=100000", "--hang-after=1200")
    run = submit(cluster, "limited", 150, *keys, slurm_args=f"--time={SHORTEST}")
    for attempt in (1, 2):
        with standing_still(cluster, run, attempt=attempt):
            pass  # Slurm warns
    assert wait_for_end(cluster, run) == "COMPLETED", cluster.logs()
    assert len(events_of(run, "requeued")) == 2
    assert [event["job_restarts"] for event in events_of(run, "attempt")] == [0, 1, 2]
    assert last_files(run) == unbroken(cluster, "limitless", "--num-steps=150")
