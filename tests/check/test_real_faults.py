"""Faults made for real on this machine: each is found before any launch, and its printed fix, done literally, makes it go away."""

import json
import os
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from probing import NAMESPACES, in_mounts, made_host

pytestmark = [pytest.mark.soak, pytest.mark.dist]
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "check.schema.json").read_text())
APPLY_FIX = Path(__file__).parent / "apply_fix.py"
DEADLINE_S = 240.0  # against hanging


def check_and_fix(
    severities: dict[str, str],
    *flags: str,
    folder: Path,
    before: list[str] | None = None,
    env: dict[str, str] | None = None,
    is_ready: bool = False,
) -> dict[str, dict[str, Any]]:
    """
    Returns the findings with these ids and severities, after their fixes were seen to work.

    before: words that the check runs after; env: on top of this one's; is_ready: nothing else stops a run then. The tests share
    what is cached of torch.
    """
    home = folder / "home"
    home.mkdir(exist_ok=True)
    places = [] if "--runs-dir" in flags else ["--runs-dir", str(folder / "runs")]
    words = [*(before or []), sys.executable, str(APPLY_FIX), ",".join(severities)]
    done = subprocess.run(
        [*words, *flags, *places, "--cache-dir", str(folder.parent / "cache-of-checks")],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(home), **(env or {})},
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    findings = {finding["id"]: finding for finding in result["before"]}
    assert {id: finding["severity"] for id, finding in findings.items()} == severities
    assert not set(severities) & {finding["id"] for finding in result["answer"]["findings"]}, result
    Draft202012Validator(SCHEMA).validate(result["answer"])
    assert result["answer"]["ready"] or not is_ready
    return findings


def torch_lib() -> Path:
    spec = find_spec("torch")
    assert spec and spec.origin
    return Path(spec.origin).parent / "lib"


def test_faults_of_the_environment_are_reported_together_and_the_answer_follows_its_schema(without_libuv, tmp_path):
    """
    A used port, an interface that does not exist, few open files, a library before torch's own, no text, a torch without libuv, and
    a batch that does not divide.
    """
    foreign = tmp_path / "old"
    foreign.mkdir()
    shutil.copy(torch_lib() / "libc10.so", foreign)
    instead = {"torch-no-libuv": "unset PYTHONPATH"}  # as after installing another build
    env = {
        "GLOO_SOCKET_IFNAME": "eth9",
        "LD_LIBRARY_PATH": str(foreign),
        **without_libuv,
        "INSTEAD": json.dumps(instead),
    }
    few_files = ["bash", "-c", 'ulimit -Sn 64; exec "$@"', "bash"]
    severities = {
        "port-taken": "stop", "interface-missing": "stop", "nofile-low": "warn", "library-foreign": "warn", "text-missing": "stop",
        "torch-no-libuv": "warn", "batch-indivisible": "stop",
    }  # fmt: skip
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        flags = ("--port", str(taken.getsockname()[1]), "--data", str(tmp_path / "books"))
        batch = ("--total-batch-size", "1000", "--device-batch-size", "3")
        findings = check_and_fix(severities, *flags, *batch, folder=tmp_path, before=few_files, env=env, is_ready=True)
    assert f"pid {os.getpid()}" in findings["port-taken"]["what"]
    assert findings["nofile-low"]["what"].startswith("64 open files")
    assert str(foreign / "libc10.so") in findings["library-foreign"]["what"]
    assert findings["torch-no-libuv"]["fix"] == "paceline torch recipe"
    assert findings["batch-indivisible"]["fix"] == "set total_batch_size to 1,536"


def unresolved(hosts: str) -> dict[str, str]:
    return {"hosts": hosts, "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n"}


@NAMESPACES
def test_an_unknown_host_name_a_small_shm_and_a_read_only_run_folder_are_reported(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    mounts = in_mounts(f"mount -t tmpfs -o size=1m t /dev/shm; mount -t tmpfs -o ro t {runs}")
    severities = {"name-unknown": "warn", "shm-small": "warn", "folder-unwritable": "stop"}
    name = f"plf{os.getpid()}"
    with made_host(name, files=unresolved("127.0.0.1 localhost\n")) as host:
        findings = check_and_fix(severities, folder=tmp_path, before=[*host, *mounts])
    assert name in findings["name-unknown"]["what"]
    assert "Read-only file system" in findings["folder-unwritable"]["what"]


@NAMESPACES
def test_a_host_name_of_the_loopback_and_a_disk_without_room_for_the_run_are_reported(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    mounts = in_mounts(f"mount -t tmpfs -o size=20m t {runs}")
    severities = {"name-loopback": "warn", "disk-full": "stop"}
    name = f"plg{os.getpid()}"
    with made_host(name, files=unresolved(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")) as host:
        findings = check_and_fix(severities, "--save-every", "50", folder=tmp_path, before=[*host, *mounts])
    assert name in findings["name-loopback"]["what"]
    assert findings["disk-full"]["fix"] == "--runs-dir ~/runs"


@NAMESPACES
def test_a_disk_with_room_for_fewer_checkpoints_and_an_absent_compiler_are_reported(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("no compiler here")
    runs = tmp_path / "runs"
    runs.mkdir()
    before = [*in_mounts(f"mount -t tmpfs -o size=100m t {runs}"), "env", "PATH=/nowhere", "CXX="]
    instead = {"compiler-missing": f"export PATH={os.environ['PATH']}"}  # as after installing it
    severities, flags = {"disk-full": "stop", "compiler-missing": "stop"}, ("--save-every", "50", "--compile", "true")
    env = {"INSTEAD": json.dumps(instead)}
    findings = check_and_fix(severities, *flags, folder=tmp_path, before=before, env=env)
    assert findings["disk-full"]["fix"] == "--keep-last 1"
    assert findings["compiler-missing"]["fix"] == "sudo apt-get install -y g++ python3-dev"


def within(cgroup: Path, *, limit_bytes: int) -> list[str]:
    (cgroup / "memory.limit_in_bytes").write_text(str(limit_bytes))
    return ["bash", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "bash"]


def test_a_memory_limit_under_the_need_is_reported(cgroup, tmp_path):
    before = within(cgroup, limit_bytes=800 << 20)
    finding = check_and_fix({"plan-refused": "stop"}, folder=tmp_path, before=before)["plan-refused"]
    assert finding["fix"].startswith("--nproc 1 needs ")
    assert "65 % of its 400 MiB may be used" in finding["what"]


def test_memory_that_another_process_uses_is_reported(cgroup, tmp_path):
    before = within(cgroup, limit_bytes=1600 << 20)
    hold = "import time; held = b'x' * (1100 << 20); print(len(held), flush=True); time.sleep(600)"
    holder = subprocess.Popen([*before, sys.executable, "-c", hold], stdout=subprocess.PIPE)
    try:
        assert holder.stdout and holder.stdout.readline()
        findings = check_and_fix({"memory-held": "stop"}, folder=tmp_path, before=before)
    finally:
        holder.kill()
        holder.wait()
    assert findings["memory-held"]["fix"] == f"kill {holder.pid}"


def test_a_stop_ends_train_before_any_worker_unless_no_check_is_given(tmp_path):
    folders = [f"--runs-dir={tmp_path / 'runs'}", f"--cache-dir={tmp_path / 'cache'}"]
    sizes = ["--num-steps=2", "--total-batch-size=512", "--n-embd=64", "--depth=2", "--eval-tokens=4096"]
    train = [sys.executable, "-m", "paceline.cli", "train", "--device=cpu", *folders, *sizes]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth9"}
    done = subprocess.run([*train, "--name", "a"], capture_output=True, text=True, env=env, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert "stop  interface-missing  GLOO_SOCKET_IFNAME=eth9 does not exist" in done.stdout
    assert done.stderr.endswith("fix: apply the fixes above, or start anyway with --no-check\n")
    assert not (tmp_path / "runs" / "a" / "logs").exists()
    done = subprocess.run(
        [*train, "--name", "b", "--no-check"], capture_output=True, text=True, env=env, timeout=DEADLINE_S
    )
    assert (done.returncode, (tmp_path / "runs" / "b" / "logs" / "1" / "0.log").exists()) == (3, True)
    done = subprocess.run([*train, "--name", "a"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "runs" / "a" / "findings.json").read_text()) == []
