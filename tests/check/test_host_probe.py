import ast
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from probing import NAMESPACES, ask, in_mounts

from paceline.check.probes.host_probe import (
    describe,
    probe_container,
    probe_host,
    probe_packages,
    probe_python,
    probe_shm,
    probe_tools,
)

GIB = 1 << 30


def test_the_host_is_described_as_the_system_does():
    host = probe_host({})["host"]
    assert (host["name"], host["kernel"], host["arch"]) == (platform.node(), platform.release(), platform.machine())
    assert host["root"] == (os.geteuid() == 0)
    assert host["limits"]["nofile"] == list(resource.getrlimit(resource.RLIMIT_NOFILE))
    assert 1 <= host["cpu"]["cores"] <= host["cpu"]["logical"]
    assert abs(host["clock"]["unix"] - time.time()) < 5


def test_the_largest_processes_are_none_of_the_command_that_asks():
    probe = "from paceline.check.probes.host_probe import largest_processes; print(largest_processes(own_cgroup=False))"
    command = f"import subprocess, sys; held = bytearray(1 << 30); subprocess.run([sys.executable, '-c', {probe!r}])"
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True) as process:
        largest = ast.literal_eval(process.stdout.read())
    assert largest and process.pid not in [user["pid"] for user in largest]


def test_memory_agrees_with_psutil():
    memory = probe_host({})["host"]["memory"]
    assert memory["total_bytes"] == psutil.virtual_memory().total
    assert memory["available_bytes"] == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_a_host_without_shared_memory_has_none(tmp_path):
    assert probe_shm(str(tmp_path / "shm")) is None


def test_a_pod_is_a_kubernetes_container(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert probe_container() == "kubernetes"


@pytest.mark.dist
@NAMESPACES
def test_a_small_shared_memory_has_its_size():
    host = ask("host_probe", before=in_mounts("mount -t tmpfs -o size=64M tmpfs /dev/shm"))["host"]
    assert host["shm"] == {"path": "/dev/shm", "total_bytes": 64 << 20, "free_bytes": 64 << 20, "writable": True}


@pytest.mark.dist
@NAMESPACES
def test_a_read_only_shared_memory_is_not_writable():
    host = ask("host_probe", before=in_mounts("mount -t tmpfs -o ro tmpfs /dev/shm"))["host"]
    assert host["shm"]["writable"] is False


@pytest.mark.dist
@NAMESPACES
def test_what_the_kernel_hides_is_unknown():
    """/proc and /sys under an empty folder, but for what the interpreter itself needs."""
    script = "mount -t tmpfs none /sys; for f in meminfo cpuinfo version; do mount --bind /dev/null /proc/$f; done"
    host = ask("host_probe", before=in_mounts(script))["host"]
    assert host["memory"]["total_bytes"] == psutil.virtual_memory().total
    assert (host["memory"]["available_bytes"], host["cpu"]["model"], host["wsl"]) == (None, None, False)


@pytest.mark.dist
def test_limits_are_those_of_the_process():
    host = ask("host_probe", before=["bash", "-c", 'ulimit -n 64; exec "$@"', "bash"])["host"]
    assert host["limits"]["nofile"] == [64, 64]


@pytest.mark.dist
def test_only_the_pinned_cores_count():
    done = subprocess.run(["taskset", "--version"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("needs taskset")
    core = str(min(os.sched_getaffinity(0)))
    assert ask("host_probe", before=["taskset", "-c", core])["host"]["cpu"]["cores"] == 1


@pytest.mark.dist
@pytest.mark.parametrize("nested", [False, True])
def test_a_cgroup_limit_is_read_in_the_group_and_in_a_group_below(nested):
    """Version 1, as mounted here."""
    memory = Path("/sys/fs/cgroup/memory")
    if os.geteuid() != 0 or not (memory / "memory.limit_in_bytes").exists() or not os.access(memory, os.W_OK):
        pytest.skip("needs root and control groups of version 1")
    group = memory / f"paceline-facts-{os.getpid()}"
    inner = group / "inner" if nested else group
    inner.mkdir(parents=True)
    try:
        (group / "memory.limit_in_bytes").write_text(str(GIB))
        host = ask("host_probe", before=["bash", "-c", f'echo $$ > {inner}/cgroup.procs; exec "$@"', "bash"])["host"]
        assert host["memory"]["cgroup_limit_bytes"] == GIB
        assert 0 <= host["memory"]["cgroup_used_bytes"] < GIB
    finally:
        inner.rmdir()
        if nested:
            group.rmdir()


def test_the_python_is_the_one_that_runs():
    python = probe_python({})["python"]
    assert (python["version"], python["executable"]) == (platform.python_version(), sys.executable)
    assert python["venv"] == (sys.prefix != sys.base_prefix)


def test_versions_come_from_the_metadata_and_missing_packages_have_none():
    packages = probe_packages()
    assert packages["numpy"] == importlib.metadata.version("numpy")
    assert packages["nvidia-ml-py"] == importlib.metadata.version("nvidia-ml-py")
    assert packages["deepspeed"] is None
    assert "nvidia-nccl-cu13" in packages


def test_the_first_package_on_the_path_counts_and_cuda_wheels_are_listed(tmp_path, monkeypatch):
    for name, version in (("numpy", "0.1"), ("nvidia_cublas_cu12", "12.8.4.1")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    packages = probe_packages()
    assert (packages["numpy"], packages["nvidia-cublas-cu12"]) == ("0.1", "12.8.4.1")


SECRET = "0123456789abcdef0123456789abcdef01234567"


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def git(folder: Path, *words: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *settings, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize(
    ("printed", "version"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022", "12.2.0"),
        ("c++ (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0", "13.3.0"),
        ("Ubuntu clang version 18.1.3 (1ubuntu1)", "18.1.3"),
        ("cmake version 3.25.1", "3.25.1"),
        ("1.11.1", "1.11.1"),
        (
            "nvcc: NVIDIA (R) Cuda compiler driver\nBuilt on Fri_Feb_21\nCuda compilation tools, release 12.8, V12.8.93",
            "12.8",
        ),
        (None, None),
    ],
)
def test_versions_are_read_from_what_programs_print(printed, version):
    assert describe("/usr/bin/x", printed) == {"path": "/usr/bin/x", "version": version}


def test_without_any_program_every_tool_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))  # not the usual place, which may hold one
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.chdir(tmp_path)
    tools = probe_tools({})["tools"]
    names = ("cxx", "nvcc", "cmake", "ninja", "git", "ccache", "nvidia_smi")
    assert [tools[name] for name in names] == [None] * len(names)
    assert tools["code"] == {"path": str(tmp_path), "commit": None, "dirty": None}


def test_a_compiler_that_hangs_has_no_version_and_other_tools_have_theirs(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    write_program(tmp_path / "g++", f"read line < {tmp_path}/pipe")  # nobody ever writes
    write_program(tmp_path / "cmake", "echo cmake version 3.30.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("paceline.check.probes.host_probe.DEADLINE_S", 2.0)
    tools = probe_tools({})["tools"]
    assert tools["cxx"] == {"path": str(tmp_path / "g++"), "version": None}
    assert tools["cmake"]["version"] == "3.30.0"


def test_the_compiler_is_the_one_that_cxx_names(tmp_path, monkeypatch):
    write_program(tmp_path / "mycxx", "echo mycxx 9.9.9")
    monkeypatch.setenv("CXX", str(tmp_path / "mycxx"))
    assert probe_tools({})["tools"]["cxx"] == {"path": str(tmp_path / "mycxx"), "version": "9.9.9"}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_code_is_the_repository_of_the_current_folder(tmp_path, monkeypatch):
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("1")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-qm", "one")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert probe_tools({})["tools"]["code"] == {"path": str(tmp_path), "commit": commit, "dirty": False}
    (tmp_path / "train.py").write_text("2")
    assert probe_tools({})["tools"]["code"]["dirty"] is True


def test_a_login_in_the_environment_or_in_netrc_is_reported_and_never_shown(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert probe_tools({})["tools"]["wandb"]["logged_in"] is False
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {SECRET}\n")
    (tmp_path / "netrc").chmod(0o600)
    tools = probe_tools({})["tools"]
    assert tools["wandb"]["logged_in"] is True
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    assert probe_tools({})["tools"]["wandb"]["logged_in"] is True
    assert SECRET not in json.dumps(tools) + json.dumps(probe_tools({}))


def test_slurm_says_which_partitions_have_gpus_and_in_a_job_how_long_it_lasts(tmp_path, monkeypatch):
    job = "JobId=4711 JobState=RUNNING TimeLimit=08:00:00 EndTime=2099-01-01T00:00:00 Requeue=1 BatchFlag=1"
    states = {"cpu": "UP", "gpu": "UP", "old": "DOWN"}
    partitions = "\n".join(f"PartitionName={name} State={state} TotalNodes=2" for name, state in states.items())
    # as the site's own settings would have it: a time that is no time
    show = f'if [ "$2" = job ]; then echo "{job}"; else echo "{partitions}"; fi; [ "$SLURM_TIME_FORMAT" = standard ]'
    gres = "cpu 2 idle (null)\ngpu 1 mixed gpu:a100:8(S:0-1)\ngpu 1 drained gpu:a100:4\nold 2 idle gpu:2"
    for name, text in (("sinfo", f"cat <<'END'\n{gres}\nEND"), ("scontrol", show)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    outside = {"job_id": None, "seconds_left": None, "gpu_partitions": [{"name": "gpu", "nodes": 2, "nodes_up": 1}]}
    assert probe_tools({})["tools"]["slurm"] == outside
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    inside = probe_tools({})["tools"]["slurm"]
    assert inside["job_id"] == 4711
    assert inside["seconds_left"] > 1e9
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")  # Slurm does not answer
    assert probe_tools({})["tools"]["slurm"] is None
