"""Control groups: version 2 and containers from files as their kernels show them; for real in tests/check/test_host_probe.py."""

from pathlib import Path

from paceline.plan.host import MemoryLimit, cpu_quota, memory_limit, oom_kills

GIB = 1 << 30
NO_LIMIT = "9223372036854771712"


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def v2(root: Path, files: dict[str, str]) -> Path:
    """A user's session on a systemd machine."""
    mountinfo = "25 30 0:23 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
    group = "0::/user.slice/user-1000.slice/session-2.scope"
    tree = {f"sys/fs/cgroup/user.slice/{name}": text for name, text in files.items()}
    return write_tree(root, {"proc/self/mountinfo": mountinfo, "proc/self/cgroup": group, **tree})


def test_the_smallest_limit_on_the_way_up_counts(tmp_path):
    root = v2(
        tmp_path,
        {
            "memory.max": str(32 * GIB),
            "user-1000.slice/memory.max": str(8 * GIB),
            "user-1000.slice/memory.current": str(3 * GIB),
            "user-1000.slice/memory.stat": f"anon {GIB}\ninactive_file {GIB}",
            "user-1000.slice/session-2.scope/memory.max": "max",
        },
    )
    assert memory_limit(root) == MemoryLimit(limit_bytes=8 * GIB, used_bytes=2 * GIB)


def test_max_everywhere_is_no_limit(tmp_path):
    root = v2(tmp_path, {"memory.max": "max", "cpu.max": "max 100000"})
    assert (memory_limit(root), cpu_quota(root)) == (None, None)


def test_the_smallest_cpu_quota_counts(tmp_path):
    root = v2(tmp_path, {"cpu.max": "800000 100000", "user-1000.slice/cpu.max": "250000 100000"})
    assert cpu_quota(root) == 2.5


def test_a_version_1_container_that_sees_the_hosts_names(tmp_path):
    root = write_tree(
        tmp_path,
        {
            "proc/self/mountinfo": "31 30 0:27 /docker/ab12 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
            "32 30 0:28 /docker/ab12 /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct",
            "proc/self/cgroup": "5:memory:/docker/ab12\n3:cpu,cpuacct:/docker/ab12",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 1024",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    )
    assert memory_limit(root) == MemoryLimit(limit_bytes=4 * GIB, used_bytes=GIB - 1024)
    assert cpu_quota(root) == 1.5


def test_a_host_without_control_groups_has_no_limit(tmp_path):
    assert (memory_limit(tmp_path), cpu_quota(tmp_path)) == (None, None)


def test_processes_killed_because_memory_ran_out_are_counted_in_the_own_group(tmp_path):
    events = "low 0\nmax 12\noom 3\noom_kill {}"
    files = {"memory.events": events.format(7), "user-1000.slice/session-2.scope/memory.events": events.format(2)}
    assert oom_kills(v2(tmp_path / "v2", files)) == 2
    first = {
        "proc/self/mountinfo": "31 30 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
        "proc/self/cgroup": "4:memory:/job",
        "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1",
    }
    assert oom_kills(write_tree(tmp_path / "v1", first)) == 1
    assert oom_kills(tmp_path / "nothing") is None
