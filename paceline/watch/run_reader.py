"""
Snapshots of a run folder; each update reads only what is new. It depends on nothing but the folder.

Files may be missing, half written, cut or replaced at any moment; what cannot be read leaves its fields empty.
"""

import json
import math
import os
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from paceline.errors import PacelineError
from paceline.explain.explanation import HEALTHY, UNKNOWN
from paceline.explain.run_folder import explain_run
from paceline.heartbeat import Heartbeat, read_heartbeats
from paceline.noise import seconds_per_step
from paceline.rundir import RunDir, check_readable, is_locked, is_queued, read_text
from paceline.slurm import JobId, JobReader, format_job, parse_job_id
from paceline.typed_fields import damaged_files, typed_content, well_typed
from paceline.units import unix_time
from paceline.watch.about import expected, measured_on, read_evaluations, read_notes
from paceline.watch.curves import RECENT_LINES, SLOW_LINES, HostHealth, Metrics, slow_ranks
from paceline.watch.events import (
    attempt_views,
    end_state,
    event_view,
    is_complete,
    last_event_time,
    live_state,
    lost_hosts,
    unstarted_notes,
)
from paceline.watch.goodput import LINE_FIELDS, goodput, last_writes, step_lines
from paceline.watch.growing_file import GrowingFile, JsonRecord, file_stamp, parse_lines
from paceline.watch.log_reader import ScriptCurves
from paceline.watch.snapshot import BROKEN, LIVE, EventView, Goodput, HostView, LogView, RankView, Snapshot, State
from paceline.watch.trend import mean_speed

MAX_EVENTS = 500
LIVE_LOGS = 16  # logs whose last write counts as a sign that the run is alive
GOODPUT_EVERY_S = 5.0
MAX_EXPLAINED_BYTES = 64 << 20  # of an attempt with longer logs only the verdict in events.jsonl is shown
# those explain_run reads
EXPLAINED_EVENTS = ("attempt", "rank_failed", "stopping", "silence", "hang", "attempt_ended", "verdict")
READ_ERRORS = (KeyError, TypeError, ValueError, AttributeError)  # that a damaged file may cause


class RunReader:
    """Makes snapshots of one run folder, a training run's or a script's."""

    def __init__(self, run: RunDir):
        self.run = run
        self.metrics = Metrics(run.metrics)
        self.hosts: dict[str, HostHealth] = {}
        self._events_file = GrowingFile(run.events)
        self._script = ScriptCurves(run)
        self._cache: dict[str, tuple[Any, Any]] = {}  # by name: what the value follows from, and the value
        self._job = JobReader()
        self._preparing: JsonRecord | None = None  # the work before the launch, when it was last read
        self._forget()

    def _forget(self) -> None:
        self.events: list[JsonRecord] = []
        self.attempts: list[JsonRecord] = []  # those of the events that begin an attempt
        self.event_views: list[EventView] = []

    def update(self) -> Snapshot:
        check_readable(self.run)
        with typed_content(self.run):
            snapshot: Snapshot = well_typed(self._read(), Snapshot)
        return snapshot

    def _read(self) -> Snapshot:
        if not any(os.access(path, os.F_OK) for path in (self.run.config_toml, self.run.events)):
            return self._folder_snapshot()
        spent = self.goodput()
        config, notes = self._config()
        sizes = self._events_file.offset, self.metrics.file.offset
        notes += self._cached("damage", sizes, lambda: damaged_files(self.run))
        self.heartbeats, self.logs = self._read_heartbeats(), self._logs()
        fields = self._shared_fields(spent) | measured_on(config)
        fields["notes"] = [*notes, *unstarted_notes(self.run, fields["state"], self.events)]
        return self._script_snapshot(config, fields) if "command" in config else self._training_snapshot(fields)

    def _config(self) -> tuple[JsonRecord, list[str]]:
        """Returns config.toml, or the command that the events have of a script, and a note where the file cannot be read."""
        try:
            return tomllib.loads(read_text(self.run.config_toml)), []
        except (OSError, ValueError) as error:
            commands = [event["command"] for event in self.events if "command" in event and event["event"] == "script"]
            note = f"{self.run.config_toml.name} cannot be read: {getattr(error, 'strerror', error)}"
            return {"command": commands[-1]} if commands else {}, [note]

    def _folder_snapshot(self) -> Snapshot:
        """Returns the snapshot of a folder that is not a run yet, or no longer is."""
        now, record = time.time(), self._content(self.run.preparing_json, json.loads, {})
        started, since, updated = (unix_time(record.get(name)) for name in ("started", "since", "time"))
        work = {"label": str(record.get("label")), "share": (share := record.get("share")), "eta_s": None}
        if isinstance(share, float) and 0 < share <= 1 and updated > since:
            work["eta_s"] = max(0.0, (updated - since) * (1 - share) / share - (now - updated))
        gone = Snapshot(self.run.name, str(self.run.path), "training", "gone")
        if is_queued(self.run) and not is_locked(self.run):
            job = self._job.read(self._job_id())
            return replace(gone, state="stopped" if job and job.is_over else "queued", slurm=format_job(job))
        if math.isnan(started + updated) or not is_locked(self.run):
            self._preparing = work if record else self._preparing
            return replace(gone, preparing=self._preparing, notes=[f"{self.run.config_toml} does not exist"])
        self._preparing = work
        elapsed_s = max(0.0, now - started)
        return replace(gone, state="preparing", preparing=work, started=started, updated=updated, elapsed_s=elapsed_s)

    def goodput(self) -> Goodput:
        """Reads what is new and returns where the time went, computed at most every GOODPUT_EVERY_S while a long run goes on."""
        self.running = is_locked(self.run)
        self.plan: JsonRecord = self._content(self.run.plan_json, json.loads, {})
        self._read_events()
        self.metrics.read()
        for path in sorted(self.run.health_dir.glob("*.jsonl")):
            self.hosts.setdefault(path.stem, HostHealth(path)).read()

        def compute() -> Goodput:
            lines = step_lines(map(self.metrics.column, LINE_FIELDS))
            joules = [joules for host in self.hosts.values() for joules in host.energy_j()]
            now, tokens_per_step = time.time() if self.running else None, self.plan.get("total_batch_size")
            written = last_writes(self.run, self.events)
            if tokens_per_step is None and len(self.attempts) > 1:
                self._script.read(self._logs(), self.attempts, self.events)
            spent = goodput(
                self.events, lines, tokens_per_step=tokens_per_step, now=now, written=written, spans=self._script.spans
            )
            return replace(spent, energy_j=sum(joules) if joules else None)

        is_short = len(self.metrics.recent) < RECENT_LINES
        offset = self.metrics.file.offset if is_short or not self.running else 0
        key = (len(self.events), self.running, offset, time.monotonic() // GOODPUT_EVERY_S)
        spent: Goodput = self._cached("goodput", key, compute)
        return spent

    def _shared_fields(self, spent: Goodput) -> JsonRecord:
        """Returns the fields that a training run and a script's run have in common."""
        now, updated, state, attempts = time.time(), self._updated(), self._state(), attempt_views(self.events)
        job = self._job.read(self._job_id()) if state in LIVE else None
        if state == "queued" and job and job.is_over:
            state = "stopped"
        is_hidden = state == "finished" and any(attempt.summary for attempt in attempts[-1:])
        started = unix_time(self.events[0]["time"]) if self.events else None
        until = now if self.running else updated or now
        steps, times = self.metrics.column("step"), self.metrics.column("time")
        device_curves = {
            group: {
                key: curve.series(steps, times)
                for host in self.hosts.values()
                for key, curve in host.curves[group].items()
            }
            for group in ("host_series", "gpu_series")
        }
        return {
            "name": self.run.name,
            "path": str(self.run.path),
            "state": state,
            "num_steps": self.plan.get("num_steps"),
            "tokens_per_step": self.plan.get("total_batch_size"),
            "started": started,
            "updated": updated,
            "elapsed_s": None if started is None else max(0.0, until - started - spent.seconds["idle"]),
            "ranks": self._ranks(),
            "hosts": self._hosts(),
            **device_curves,
            "events": self.event_views[-MAX_EVENTS:],
            "attempts": attempts,
            "logs": self.logs,
            "goodput": spent,
            "findings": self._content(self.run.findings, json.loads, []),
            "slurm": format_job(job),
            "explanation": self._explanation(state) if is_hidden or state in BROKEN else None,
            **dict(zip(("tags", "note"), read_notes(self.run), strict=True)),
        }

    def _training_snapshot(self, fields: JsonRecord) -> Snapshot:
        latest = self.metrics.latest
        step, peak = int(latest.get("step", 0)), latest.get("peak_bytes")
        if fields["state"] in ("starting", "training", "evaluating", "saving"):
            step = max([step, *(heartbeat.step for heartbeat in self.heartbeats.values())])
        measures: JsonRecord = {name: latest.get(name) for name in ("loss", "val_bpb", "tok_per_sec", "step_ms", "mfu")}
        if fields["state"] in ("starting", "recovering"):
            measures |= dict.fromkeys(("tok_per_sec", "step_ms", "mfu"))  # nothing has a speed now
        elif fields["state"] not in LIVE:
            measures |= mean_speed(self._attempt_lines())
        return Snapshot(
            kind="training",
            step=step,
            eta_s=self._eta_s(step, fields["num_steps"], fields["state"]),
            peak_bytes=None if peak is None else int(peak),
            series={name: curve.series() for name, curve in self.metrics.curves.items()},
            rank_series=[curve.series() for curve in self.metrics.rank_curves],
            plan=expected(self.plan),
            evaluations=self._evaluations(),
            **measures,
            **fields,
        )

    def _script_snapshot(self, config: JsonRecord, fields: JsonRecord) -> Snapshot:
        shown = self._script.read(self.logs, self.attempts, self.events)
        num_lines, written = shown.pop("num_lines"), shown.pop("written")
        ranks = fields["ranks"] or [RankView(rank) for rank in shown.pop("ranks")]
        fields |= {**shown, "notes": [*fields["notes"], *shown["notes"]], "ranks": ranks}
        if self.running and written:
            fields["updated"] = max(fields["updated"] or written, written)
        fields |= {} if fields["state"] == "running" else {"eta_s": None}
        if num_lines and fields["silence_s"] is None and fields["updated"] and self.attempts:
            start = unix_time(self.attempts[-1]["time"])
            fields["silence_s"] = max(0.0, fields["updated"] - start) / num_lines
        return Snapshot(kind="script", command=config["command"], **fields)

    def _read_events(self) -> None:
        if self._events_file.restarted():
            self._forget()
        for block in self._events_file.blocks():
            for event in parse_lines(block):
                if (view := event_view(event)) is not None:
                    self.event_views.append(view)
                if is_complete(event):
                    self.events.append({name: value for name, value in event.items() if name not in ("prompt", "text")})
                    self.attempts += [event] if event.get("event") == "attempt" else []
        del self.event_views[:-MAX_EVENTS]

    def _ranks_by_host(self) -> dict[str, list[int]]:
        """The ranks of the last attempt on each of several hosts; empty where there is one."""
        return (self.attempts[-1].get("hosts") if self.attempts else None) or {}

    def _clock_s(self, host: str | None) -> float:
        """How far a host's clock was ahead of the supervisor's when the last attempt began."""
        clocks = (self.attempts[-1].get("clock_s") if self.attempts else None) or {}
        return float(clocks.get(host, 0.0))

    def _hosts(self) -> list[HostView]:
        """The hosts of the last attempt, then those that this command has lost."""
        places = self._ranks_by_host()
        if not places:
            return [host.view() for host in self._current_hosts()]
        lost = dict.fromkeys(lost_hosts(self.events))
        views = []
        for name in dict.fromkeys([*places, *lost]):
            health = self.hosts.get(name)
            view = health.view() if health else HostView(name)
            time = None if view.time is None else view.time - self._clock_s(name)
            views.append(replace(view, time=time, ranks=places.get(name, []), lost=name in lost))
        return views

    def _current_hosts(self) -> list[HostHealth]:
        """The hosts of the last attempt with samples: a resume in another container has a host of another name."""
        last = max((host.time or 0.0 for host in self.hosts.values()), default=0.0)
        since = max((start for e in self.attempts if (start := unix_time(e["time"])) <= last), default=0.0)
        return [host for host in self.hosts.values() if (host.time or 0.0) >= since]

    def _read_heartbeats(self) -> dict[int, Heartbeat]:
        """The last heartbeat of each rank, by rank, with its time by the supervisor's clock."""
        hosts = {rank: host for host, ranks in self._ranks_by_host().items() for rank in ranks}
        return {
            rank: replace(heartbeat, time=heartbeat.time - self._clock_s(hosts.get(rank)))
            for rank, heartbeat in read_heartbeats(self.run).items()
        }

    def _logs(self) -> list[LogView]:
        logs = []
        places = {attempt["attempt"]: attempt.get("hosts") or {} for attempt in self.attempts}
        for path in self.run.logs(0).parent.glob("*/*.log"):
            rank = int(path.stem) if path.stem.isdecimal() else None
            name = path.stem if path.stem.startswith(("launch-", "kernel-")) else None
            with suppress(OSError, ValueError):
                attempt = int(path.parent.name)
                hosts = (host for host, ranks in places.get(attempt, {}).items() if rank in ranks)
                host = name.partition("-")[2] if name else next(hosts, None)
                logs.append(LogView(attempt, rank, str(path), path.stat().st_size, host, name))
        return sorted(logs, key=lambda log: (log.attempt, log.rank is None, log.rank or 0, log.name or ""))

    def _updated(self) -> float | None:
        """The time of the last activity; of an ended run by the content of its files, since copies have other times."""
        times = [heartbeat.time for heartbeat in self.heartbeats.values()]
        times += [unix_time(line.get("time")) for line in list(self.metrics.recent)[-1:]]
        times.append(unix_time(last_event_time(self.events)))
        if not self.running:
            times += [host.time or math.nan for host in self.hosts.values()]
        logs = [Path(log.path) for log in self.logs[-LIVE_LOGS:] if log.bytes] if self.running else []
        for path in logs if self.events else [*logs, self.run.config_toml]:
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max((value for value in times if value > 0), default=None)

    def _job_id(self) -> JobId | None:
        """The Slurm job that has the run."""
        return parse_job_id(self._content(self.run.slurm_json, json.loads, {}).get("job_id"))

    def _state(self) -> State:
        if not self.running:
            return end_state(self.events, is_queued=is_queued(self.run))
        return live_state(self.events, self.heartbeats.get(0), self.metrics.recent[-1] if self.metrics.recent else {})

    def _attempt_lines(self) -> list[JsonRecord]:
        """The last lines of metrics.jsonl that report steps, without those of earlier attempts."""
        start = self.attempts[-1]["time"] if self.attempts else ""
        return [line for line in self.metrics.recent if str(line.get("time")) >= start and "step_ms" in line]

    def _ranks(self) -> list[RankView]:
        """The ranks of the last attempt."""
        hosts = self._current_hosts()
        only = hosts[0].name if len(hosts) == 1 and not self._ranks_by_host() else None
        places = {rank: host for host, ranks in self._ranks_by_host().items() for rank in ranks}
        last = next((ms for line in reversed(self.metrics.recent) if is_times(ms := line.get("rank_ms"))), [])
        lines = [ms for line in self._attempt_lines() if is_times(ms := line.get("rank_ms")) and len(ms) == len(last)]
        times = lines[-SLOW_LINES:]
        slow = slow_ranks(np.array(times).reshape(len(times), len(last)))
        size = self.attempts[-1].get("world_size") if self.attempts else 0
        count = max([size if isinstance(size, int) else 0, *(rank + 1 for rank in self.heartbeats)])
        views = [RankView(rank, places.get(rank, only)) for rank in range(count)]
        for rank, heartbeat in self.heartbeats.items():
            silent_s = max(0.0, time.time() - heartbeat.time) if self.running else None
            views[rank] = replace(views[rank], step=heartbeat.step, phase=heartbeat.phase, silent_s=silent_s)
        for rank, busy_ms in enumerate(last[: len(views)]):
            share = self.metrics.slow_shares.get(rank)
            views[rank] = replace(views[rank], busy_ms=busy_ms, slow=bool(slow[rank]), slow_share=share)
        return views

    def _eta_s(self, step: int, num_steps: int | None, state: State) -> float | None:
        """The time left at the speed of the last logged steps, evaluations and checkpoints included."""
        if num_steps is None or state not in ("training", "evaluating", "saving"):
            return None
        recent = self._attempt_lines()
        step_s = seconds_per_step([line["step"] for line in recent], [unix_time(line.get("time")) for line in recent])
        step_s = self.metrics.latest.get("step_ms", math.nan) / 1000 if step_s is None else step_s
        return max(0.0, num_steps - step) * step_s if 0 <= step_s < math.inf else None

    def _explanation(self, state: State) -> dict[str, Any] | None:
        """Explains the last attempt that ended; reads its logs only when they, or the events that matter, have changed.

        The next attempt has logs before it has begun. What looks healthy is no explanation of a failure, and while the
        supervisor retries by itself, there is nothing to fix.
        """
        explained = [event for event in self.events if event.get("event") in EXPLAINED_EVENTS]
        attempts = [event["attempt"] for event in explained if "attempt" in event]
        attempt = attempts[-1] if attempts else max((log.attempt for log in self.logs), default=None)
        if attempt is None:
            return None
        size = sum(log.bytes for log in self.logs if log.attempt == attempt)
        key = (attempt, size, len(explained), file_stamp(self.run.config_toml))

        def compute() -> dict[str, Any] | None:
            if size <= MAX_EXPLAINED_BYTES:
                with suppress(PacelineError, *READ_ERRORS):  # the verdict in events.jsonl remains
                    explanation = asdict(explain_run(self.run, attempt=attempt))
                    shows_nothing = explanation["cause"] == UNKNOWN and explanation["line"] is None
                    if explanation["cause"] != HEALTHY and not shows_nothing:
                        return explanation
            verdicts = [e for e in self.events if e.get("event") == "verdict" and e.get("attempt") == attempt]
            return dict(verdicts[-1]) if verdicts else None

        explanation: dict[str, Any] | None = self._cached("explanation", key, compute)
        return {**explanation, "fix": None} if explanation and state == "recovering" else explanation

    def _evaluations(self) -> list[Any]:
        """Returns the results of `paceline eval`; reads them only when their file has changed, or checkpoints were set aside."""
        if (stamp := file_stamp(self.run.evaluations)) is None:
            return []
        backs = sum(event.get("event") == "set_aside" for event in self.events)
        return list(self._cached("evaluations", (stamp, backs), lambda: read_evaluations(self.run, self.events)))

    def _content(self, path: Path, parse: Callable[[str], Any], absent: Any) -> Any:
        """Returns what a small file holds; reads it only when it has changed. absent: for a missing or damaged file."""
        try:
            stat = path.stat()
            key = (stat.st_mtime_ns, stat.st_size)
            content = self._cached(path.name, key, lambda: parse(read_text(path)))
        except (OSError, ValueError):
            return absent
        return content if isinstance(content, type(absent)) else absent

    def _cached(self, name: str, key: Any, compute: Callable[[], Any]) -> Any:
        """Returns a value; computes it only when what it follows from has changed."""
        if self._cache.get(name, (None,))[0] != key:
            self._cache[name] = (key, compute())
        return self._cache[name][1]


def is_times(value: Any) -> TypeGuard[list[float]]:
    return isinstance(value, list) and all(type(item) in (int, float) for item in value)
