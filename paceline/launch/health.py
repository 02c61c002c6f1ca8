"""
Samples of a host's health while an attempt runs: `python -m paceline.launch.health`, which launch/sampler.py starts.

A process of its own: a wedged driver or a dead disk stops the samples and nothing else. A line of health/<host>.jsonl every few
seconds; a field that this machine does not tell is absent, and one that seldom changes (SLOW) stands in the lines where it
has, and in every WHOLE_EVERY-th. A line that finds no room is left out.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from paceline.launch.gpu_health import GpuSampler
from paceline.launch.host_health import HostSampler
from paceline.rundir import RunDir, append_event, append_sample, utc_now

WHOLE_EVERY = 30  # lines
EARLIEST = 0.25  # of the time between two lines: no line comes sooner, however many Xid errors do
NICENESS = 10
SLOW = {
    "cores", "ram_total", "cgroup_limit", "disk_total", "name", "total_bytes", "power_limit_w", "pcie", "processes", "errors",
}  # fmt: skip


def main() -> None:
    run_path, every_s, run_id = sys.argv[1:]
    os.nice(NICENESS)
    run = RunDir(Path(run_path))
    gpus = GpuSampler.open(run_id)
    if gpus.silent:
        append_event(
            run, "note", text=f"samples of health are without the GPUs: the driver does not answer ({gpus.silent})"
        )
    Sampler(run, HostSampler(run.path), gpus).follow(float(every_s))


class Sampler:
    """One host's lines."""

    def __init__(self, run: RunDir, host: HostSampler, gpus: GpuSampler):
        self.host, self.gpus = host, gpus
        self.path = run.health(socket.gethostname().replace("/", "_"))
        self._lines = 0
        self._told: dict[Any, Any] = {}  # the SLOW values that were written last, by where they stand

    def follow(self, every_s: float) -> None:
        """Until it is killed."""
        due = time.monotonic()
        while True:
            self.write()
            due, earliest = max(due + every_s, time.monotonic()), time.monotonic() + EARLIEST * every_s
            while (left := due - time.monotonic()) > 0:
                if self.gpus.wait(left):
                    due = min(due, max(earliest, time.monotonic()))

    def write(self) -> None:
        gpus = self.gpus.sample()
        line = {"time": utc_now(), **self._brief(None, self.host.sample())}
        if gpus:
            line["gpus"] = [{"index": gpu["index"], **self._brief(gpu["index"], gpu)} for gpu in gpus]
        if append_sample(self.path, line):
            self._lines += 1
        else:
            self._lines, self._told = 0, {}

    def _brief(self, place: int | None, values: dict[str, Any]) -> dict[str, Any]:
        """Without what is as it was."""
        kept = {}
        for name, value in values.items():
            if value is None or (name not in SLOW and value in ([], {})):  # of those that hold, an empty one is told
                continue
            if name in SLOW:
                known = json.dumps([each["pid"] for each in value] if name == "processes" else value)
                if self._told.get((place, name)) == known and self._lines % WHOLE_EVERY:
                    continue
                self._told[place, name] = known
            kept[name] = value
        return kept


if __name__ == "__main__":
    main()
