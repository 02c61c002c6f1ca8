import os
import platform
import resource
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from probing import NAMESPACES, ask, in_mounts

from paceline.check.host_probe import probe_container, probe_host, probe_shm

GIB = 1 << 30


def test_the_host_is_as_the_system_says():
    host = probe_host({})["host"]
    assert (host["name"], host["kernel"], host["arch"]) == (platform.node(), platform.release(), platform.machine())
    assert host["root"] == (os.geteuid() == 0)
    assert host["limits"]["nofile"] == list(resource.getrlimit(resource.RLIMIT_NOFILE))
    assert 1 <= host["cpu"]["cores"] <= host["cpu"]["logical"]
    assert abs(host["clock"]["unix"] - time.time()) < 5


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
def test_a_small_shared_memory_is_seen_with_its_size():
    host = ask("host_probe", before=in_mounts("mount -t tmpfs -o size=64M tmpfs /dev/shm"))["host"]
    assert host["shm"] == {"path": "/dev/shm", "total_bytes": 64 << 20, "free_bytes": 64 << 20, "writable": True}


@pytest.mark.dist
@NAMESPACES
def test_a_read_only_shared_memory_is_not_writable():
    host = ask("host_probe", before=in_mounts("mount -t tmpfs -o ro tmpfs /dev/shm"))["host"]
    assert host["shm"]["writable"] is False


@pytest.mark.dist
@NAMESPACES
def test_a_kernel_that_hides_its_files_leaves_unknowns():
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
def test_pinned_cores_are_the_ones_that_count():
    done = subprocess.run(["taskset", "--version"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("needs taskset")
    core = str(min(os.sched_getaffinity(0)))
    assert ask("host_probe", before=["taskset", "-c", core])["host"]["cpu"]["cores"] == 1


@pytest.mark.dist
@pytest.mark.parametrize("nested", [False, True])
def test_a_real_limit_is_found_by_a_process_in_the_group_and_in_one_below(nested):
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
