"""
Runs on a real NFS mount: two hosts in network namespaces, each with its own client, and a server in a third.

Most containers' kernels have no NFS. Debian's kernel (apt: linux-image-amd64, qemu-system-x86, nfs-kernel-server) has it,
and virtme-ng (pip) boots it on this file system: `vng -r KERNEL --disable-kvm --cpus 2 --memory 4G --user root
--empty-passwords --disk IMAGE -- COMMAND`. IMAGE is an ext4 file system with Python and `.venv`, which COMMAND mounts in
their places: over 9p alone an import of torch takes minutes. Emulated, these tests take 18 minutes.
"""

import json
import subprocess
import sys
import time

import namespaces
import nfs
import pytest
from hosts_run import LAUNCH, MODEL, set_cable
from namespaces import namespaced_hosts

from paceline.rundir import RunDir, read_json_lines

WHY_NOT = namespaces.WHY_NOT or nfs.why_not()
DEADLINE_S = 900.0  # an emulated machine is thirty times slower
HOLD = """
import os, sys, time
from pathlib import Path
from paceline.rundir import RunDir, lock_run
lock_run(RunDir(Path(sys.argv[1])))
if child := os.fork():
    print(child, flush=True)
time.sleep(10_000)
"""
TRY = """
import json, sys
from pathlib import Path
from paceline.rundir import RunDir, RunInUse, holder_of, is_locked, lock_run
run = RunDir(Path(sys.argv[1]))
seen = {"is_locked": is_locked(run), "holder": holder_of(run)}
try:
    lock_run(run)
except RunInUse as error:
    seen["error"] = error.message
print(json.dumps(seen))
"""
pytestmark = [
    pytest.mark.dist,
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]


@pytest.fixture(scope="module", params=["vers=4.2", "vers=3"])
def options(request):
    return request.param


@pytest.fixture(scope="module")
def hosts(options, tmp_path_factory):
    with namespaced_hosts(2, tmp_path_factory.mktemp("nfs")) as made, nfs.nfs_on(made, options):
        yield made


def hold(hosts, host, run):
    """Locks a run on a host. Returns the process and the pid of a child that has inherited the lock."""
    process = hosts.start(host, sys.executable, "-c", HOLD, str(run.path), stdout=subprocess.PIPE)
    return process, int(process.stdout.readline())


def attempt(hosts, host, run):
    done = hosts.run(host, sys.executable, "-c", TRY, str(run.path), timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"stderr": done.stderr}


def new_run(hosts, name):
    """A run folder on the mount, as a host sees it."""
    run = RunDir(hosts.private / name)
    hosts.run("h1", "mkdir", str(run.path))
    return run


def test_a_mount_that_keeps_its_locks_to_one_host_is_told_before_the_run(tmp_path):
    with namespaced_hosts(2, tmp_path) as hosts, nfs.nfs_on(hosts, "vers=3,nolock"):
        seen = attempt(hosts, "h1", new_run(hosts, "alone"))
    assert "other hosts do not see locks of" in seen["stderr"]


def test_a_run_is_locked_for_the_other_host_until_the_last_process_that_inherited_the_lock_has_ended(hosts):
    run = new_run(hosts, "held")
    assert attempt(hosts, "h2", run) == {"is_locked": False, "holder": None, "stderr": ""}
    process, child = hold(hosts, "h1", run)
    holder = f"{process.pid} h1"
    refused = {"is_locked": True, "holder": holder, "error": f"run held is in use by process {process.pid} on h1"}
    assert attempt(hosts, "h2", run) == {**refused, "stderr": ""}
    process.kill()
    process.wait()
    assert attempt(hosts, "h2", run)["is_locked"]
    subprocess.run(["kill", "-KILL", str(child)], check=True)
    wait_until(lambda: "error" not in attempt(hosts, "h2", run))


def test_the_run_of_a_host_that_is_cut_off_is_free_once_its_lease_has_ended(hosts, options):
    if options == "vers=3":
        pytest.skip("NFS 3 keeps the locks of a silent client until it has started again")
    run = new_run(hosts, "cut")
    process, child = hold(hosts, "h1", run)
    set_cable(hosts, "h1", "down")
    try:
        assert attempt(hosts, "h2", run)["is_locked"]
        wait_until(lambda: "error" not in attempt(hosts, "h2", run))
    finally:
        set_cable(hosts, "h1", "up")
        process.kill()
        subprocess.run(["kill", "-KILL", str(child)], check=False)
        process.wait()


def test_a_training_on_the_mount_is_refused_to_the_other_host_seen_by_it_and_continued_there(hosts):
    hosts.run("h1", "sh", "-c", f"seq 20000 > {hosts.private}/numbers.txt")
    runs = hosts.private / "runs"
    words = [
        "--runs-dir", str(runs), "--name", "shared", "--data", str(hosts.private / "numbers.txt"), "--save-every", "2",
        "--device", "cpu", "--num-steps", "1000000", "--eval-every", "0", "--cache-dir", str(hosts.private / "cache"),
    ]  # fmt: skip
    train = ["train", *MODEL, *LAUNCH, *words]
    log = hosts.folder / "train.log"
    with log.open("w") as file:
        training = hosts.start("h1", sys.executable, "-m", "paceline.cli", *train, stdout=file, stderr=file)
    run = RunDir(hosts.on("h1", runs / "shared"))
    there = RunDir(hosts.on("h2", runs / "shared"))

    def has_saved() -> bool:
        assert training.poll() is None, log.read_text()
        return any(event["event"] == "checkpoint" for event in read_json_lines(run.events))

    wait_until(has_saved)
    refused = hosts.paceline("h2", *train)
    assert "shared already exists" in refused.stderr and refused.returncode, refused.stdout + refused.stderr
    resumed = hosts.paceline("h2", "resume", str(runs / "shared"))
    assert f"in use by process {training.pid} on h1" in resumed.stderr, resumed.stdout + resumed.stderr
    listed = hosts.paceline("h2", "runs", str(runs), "--json")
    assert [run["state"] for run in json.loads(listed.stdout)] == ["training"], listed.stderr
    training.terminate()
    training.wait(DEADLINE_S)
    step = max(event["step"] for event in read_json_lines(there.events) if event["event"] == "checkpoint")
    continued = hosts.paceline("h2", "resume", str(runs / "shared"), "--num-steps", str(step + 4), *LAUNCH)
    assert continued.returncode == 0, continued.stdout + continued.stderr
    assert [event["attempt"] for event in read_json_lines(run.events) if event["event"] == "attempt"] == [1, 2]


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)
