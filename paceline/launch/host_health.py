"""
A host's processors, memory, disk and network as they are now, for launch/health.py.
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from paceline.plan.cgroup import memory_limit

NETWORK = Path("/sys/class/net")


class HostSampler:
    """sample() gives rates over the time since the sample before."""

    def __init__(self, folder: Path):
        """folder: whose disk is looked at."""
        self.folder = folder
        self._counted: dict[str, int] = {}
        self._at = 0.0

    def sample(self) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        limit = memory_limit()
        cpu = psutil.cpu_percent()  # the first call only begins the count
        values: dict[str, Any] = {
            "cpu": round(cpu / 100, 3) if self._at else None,
            "cores": psutil.cpu_count(),
            "ram_used": memory.total - memory.available,
            "ram_total": memory.total,
            "cgroup_used": limit.used_bytes if limit else None,
            "cgroup_limit": limit.limit_bytes if limit else None,
        }
        with suppress(OSError):
            disk = psutil.disk_usage(str(self.folder))
            values |= {"disk_free": disk.free, "disk_total": disk.total}
        return values | self._rates()

    def _rates(self) -> dict[str, int]:
        """Bytes per second, by the counters that this host has."""
        now, counted = time.monotonic(), self._counters()
        seconds, before = now - self._at, self._counted
        self._at, self._counted = now, counted
        return {name: round((counted[name] - before[name]) / seconds) for name in counted if name in before}

    def _counters(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with suppress(OSError, RuntimeError):
            cards = psutil.net_io_counters(pernic=True)
            wired = {name for name in cards if (NETWORK / name / "device").exists()}
            counted = [
                cards[name] for name in wired or cards.keys() - {"lo"}
            ]  # bridges count again what a card has sent
            found["net_in_bps"] = sum(card.bytes_recv for card in counted)
            found["net_out_bps"] = sum(card.bytes_sent for card in counted)
        with suppress(OSError, RuntimeError):
            disks = psutil.disk_io_counters()
            if disks is not None:
                found |= {"disk_read_bps": disks.read_bytes, "disk_write_bps": disks.write_bytes}
        return found
