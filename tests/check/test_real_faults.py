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
from probing import NAMESPACES, in_mounts, made_host

pytestmark = pytest.mark.dist
MEND = Path(__file__).parent / "mend.py"
DEADLINE_S = 20.0


def mended(
    id: str,
    *flags: str,
    folder: Path,
    severity: str,
    before: list[str] | None = None,
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The finding, after its fix was seen to work. before: words that the check runs after; env: on top of this one's."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    places = [] if "--runs-dir" in flags else ["--runs-dir", str(folder / "runs")]
    done = subprocess.run(
        [*(before or []), sys.executable, str(MEND), id, *flags, *places, "--cache-dir", str(folder / "cache")],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(home), **(env or {})},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["seconds"] < DEADLINE_S
    assert result["before"]["severity"] == severity
    assert id not in [finding["id"] for finding in result["after"]], result
    return result["before"]


def test_a_taken_port_names_its_holder_and_a_free_one(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = mended("port-taken", "--port", str(port), folder=tmp_path, severity="stop")
    assert f"pid {os.getpid()}" in finding["what"]


@NAMESPACES
@pytest.mark.parametrize(
    "id, hosts",
    [("name-unknown", "127.0.0.1 localhost\n"), ("name-loopback", "127.0.0.1 localhost\n127.0.1.1 plf{}\n")],
)
def test_an_own_name_that_leads_nowhere_is_found(id, hosts, tmp_path):
    number = os.getpid()
    files = {"hosts": hosts.format(number), "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n"}
    with made_host(f"plf{number}", files=files) as words:
        finding = mended(id, folder=tmp_path, severity="warn", before=words)
    assert f"plf{number}" in finding["what"]


def test_an_interface_that_does_not_exist_is_found(tmp_path):
    mended("interface-missing", folder=tmp_path, severity="stop", env={"GLOO_SOCKET_IFNAME": "eth9"})


@NAMESPACES
def test_a_small_shm_is_found(tmp_path):
    before = in_mounts("mount -t tmpfs -o size=1m t /dev/shm")
    mended("shm-small", folder=tmp_path, severity="warn", before=before)


@NAMESPACES
def test_a_read_only_run_folder_is_found(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    before = in_mounts(f"mount -t tmpfs -o ro t {runs}")
    finding = mended("folder-unwritable", folder=tmp_path, severity="stop", before=before)
    assert "Read-only file system" in finding["what"]


@NAMESPACES
@pytest.mark.parametrize("size, fix", [("20m", "--runs-dir ~/runs"), ("100m", "--keep-last 1")])
def test_a_disk_without_room_for_the_checkpoints_is_found(size, fix, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    before = in_mounts(f"mount -t tmpfs -o size={size} t {runs}")
    finding = mended("disk-full", "--save-every", "50", folder=tmp_path, severity="stop", before=before)
    assert finding["fix"] == fix


def test_too_few_open_files_are_found(tmp_path):
    before = ["bash", "-c", 'ulimit -Sn 64; exec "$@"', "bash"]
    finding = mended("nofile-low", folder=tmp_path, severity="warn", before=before)
    assert finding["what"].startswith("64 open files")


def within(cgroup: Path, *, limit_bytes: int) -> list[str]:
    (cgroup / "memory.limit_in_bytes").write_text(str(limit_bytes))
    return ["bash", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "bash"]


def test_a_memory_limit_under_the_need_is_found(cgroup, tmp_path):
    before = within(cgroup, limit_bytes=800 << 20)
    finding = mended("plan-refused", folder=tmp_path, severity="stop", before=before)
    assert finding["fix"] == "--nproc 1"
    assert "65 % of its 400 MiB may be used" in finding["what"]


def test_memory_that_another_process_holds_is_found(cgroup, tmp_path):
    before = within(cgroup, limit_bytes=1600 << 20)
    hold = "import time; held = b'x' * (1100 << 20); print(len(held), flush=True); time.sleep(300)"
    holder = subprocess.Popen([*before, sys.executable, "-c", hold], stdout=subprocess.PIPE)
    try:
        assert holder.stdout and holder.stdout.readline()
        finding = mended("memory-held", folder=tmp_path, severity="stop", before=before)
    finally:
        holder.kill()
        holder.wait()
    assert finding["fix"] == f"kill {holder.pid}"


def test_a_torch_without_libuv_is_found(without_libuv, tmp_path):
    env = {**without_libuv, "INSTEAD": "unset PYTHONPATH"}  # as after installing another build
    assert mended("torch-no-libuv", folder=tmp_path, severity="warn", env=env)["fix"] == "paceline torch recipe"


def torch_lib() -> Path:
    spec = find_spec("torch")
    assert spec and spec.origin
    return Path(spec.origin).parent / "lib"


def test_a_library_in_front_of_torchs_own_is_found(tmp_path):
    foreign = tmp_path / "old"
    foreign.mkdir()
    shutil.copy(torch_lib() / "libc10.so", foreign)
    finding = mended("library-foreign", folder=tmp_path, severity="warn", env={"LD_LIBRARY_PATH": str(foreign)})
    assert str(foreign / "libc10.so") in finding["what"]


def test_a_text_that_is_not_there_is_found(tmp_path):
    mended("text-missing", "--data", str(tmp_path / "books"), folder=tmp_path, severity="stop")


def test_a_batch_that_does_not_divide_is_found(tmp_path):
    flags = ("--total-batch-size", "1000", "--device-batch-size", "3")
    assert (
        mended("batch-indivisible", *flags, folder=tmp_path, severity="stop")["fix"] == "set total_batch_size to 1,536"
    )


def test_an_absent_compiler_is_found(tmp_path):
    env = {"PATH": "/nowhere", "CXX": "", "INSTEAD": f"export PATH={os.environ['PATH']}"}  # as after installing it
    if shutil.which("g++") is None:
        pytest.skip("no compiler here")
    finding = mended("compiler-missing", "--compile", "true", folder=tmp_path, severity="stop", env=env)
    assert finding["fix"] == "sudo apt-get install -y g++ python3-dev"


@pytest.mark.soak
def test_a_stop_ends_train_before_any_worker_unless_no_check_is_given(tmp_path):
    train = [sys.executable, "-m", "paceline.cli", "train", "--runs-dir", str(tmp_path / "runs"), "--cache-dir"]
    train += [
        str(tmp_path / "cache"),
        "--num-steps",
        "2",
        "--total-batch-size",
        "512",
        "--n-embd",
        "64",
        "--depth",
        "2",
    ]
    train += ["--device", "cpu", "--eval-tokens", "4096"]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth9"}
    done = subprocess.run([*train, "--name", "a"], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 1
    assert "stop  interface-missing  GLOO_SOCKET_IFNAME=eth9 is not here" in done.stdout
    assert done.stderr.endswith("fix: as said above; --no-check starts it all the same\n")
    assert not (tmp_path / "runs" / "a" / "logs").exists()
    done = subprocess.run([*train, "--name", "b", "--no-check"], capture_output=True, text=True, env=env, timeout=120)
    assert (done.returncode, (tmp_path / "runs" / "b" / "logs" / "1" / "0.log").exists()) == (3, True)
    done = subprocess.run([*train, "--name", "a"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "runs" / "a" / "findings.json").read_text()) == []


def test_a_check_of_this_machine_takes_seconds_and_is_as_its_schema_says(tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(__file__).parents[2] / "docs" / "check.schema.json").read_text())
    check = [sys.executable, "-m", "paceline.cli", "check", "--json", "--runs-dir", str(tmp_path)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=DEADLINE_S)
    answer = json.loads(done.stdout)
    jsonschema.Draft202012Validator(schema).validate(answer)
    assert answer["ready"] and done.returncode == 0
