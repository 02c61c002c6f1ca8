"""
Starts and ends the process that samples a host's health, launch/health.py. Light: the agent imports it.
"""

import ctypes
import signal
import subprocess
import sys
from contextlib import suppress

from paceline.errors import UsageError

EVERY_S = 2.0
END_S = 2.0  # one in a system call that does not return is left behind
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def start_sampler(run_path: str, *, every_s: float, run_id: str) -> subprocess.Popen[bytes] | None:
    """By the agent. run_id: in the environment of the attempt's processes. None where nothing is to be sampled."""
    if not every_s:
        return None
    prctl = ctypes.CDLL(None).prctl
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.launch.health", run_path, str(every_s), run_id],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # safe here: the agent has one thread
        )
    except OSError as error:  # no more processes, or no memory: the training may still begin
        print(f"no samples of health: {error}", file=sys.stderr)
        return None


def end_sampler(sampler: subprocess.Popen[bytes] | None) -> None:
    if sampler is not None:
        sampler.kill()
        with suppress(subprocess.TimeoutExpired):
            sampler.wait(END_S)


def check_every(every_s: float | None) -> float:
    """Of --health-every; None: not given."""
    if every_s is None:
        return EVERY_S
    if every_s and not 0.1 <= every_s < 86400:
        raise UsageError(
            f"--health-every {every_s:g}: seconds from 0.1, or 0 for no samples", fix=f"--health-every {EVERY_S:g}"
        )
    return every_s
