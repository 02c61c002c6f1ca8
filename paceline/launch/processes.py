"""
What /proc tells of a rank's process and its children: state, where it waits in the kernel, processor time. Linux, no torch.
"""

from contextlib import suppress
from pathlib import Path

import psutil

from paceline.rundir import RunDir

FIELDS = (
    "State",
    "VmRSS",
    "Threads",
    "SigBlk",
    "SigCgt",
    "voluntary_ctxt_switches",
    "nonvoluntary_ctxt_switches",
    "TracerPid",
)


def rank_pids(run: RunDir, attempt: int, nproc: int) -> dict[int, int]:
    """Of those ranks that have been started, as launch/rank.py has noted them."""
    pids = {}
    for rank in range(nproc):
        with suppress(OSError, ValueError):
            pids[rank] = int((run.logs(attempt) / f"{rank}.pid").read_text())
    return pids


def cpu_seconds(pid: int) -> float:
    """Processor time of the process, its children and those that it has seen to their end; 0 when it is gone."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return sum(sum(times(each)) for each in [process, *process.children(recursive=True)])
    return 0.0


def times(process: psutil.Process) -> tuple[float, ...]:
    with suppress(psutil.Error):
        used = process.cpu_times()
        return used.user, used.system, used.children_user, used.children_system
    return (0.0,)


def describe_process(pid: int) -> str:
    """What /proc/PID says, for a person to read."""
    folder = Path("/proc") / str(pid)
    lines = []
    with suppress(OSError):
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        lines += [f"{name}: {status[name].strip()}" for name in FIELDS if name in status]
    for task in sorted(folder.glob("task/*"), key=lambda path: int(path.name)):
        with suppress(OSError):
            name, wchan = (task / "comm").read_text().strip(), (task / "wchan").read_text().strip()
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            lines.append(
                f"thread {task.name} {name}: state {state}, waits in {wchan if wchan not in ('', '0') else 'n/a'}"
            )
    return "\n".join(lines)
