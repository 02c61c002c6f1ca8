"""
A run folder to one Snapshot, again and again, each time reading only what is new. The folder is all it knows.

Files may be missing, half written, cut or written anew at any moment; what cannot be read leaves its fields empty.
"""

import json
import math
import statistics
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeGuard

from paceline.errors import PacelineError
from paceline.explain.run import explain_run
from paceline.marks import Mark, read_mark
from paceline.rundir import RunDir, is_locked
from paceline.watch.attempts import attempts_of, end_of
from paceline.watch.goodput import Goodput, StepLines, energy_of, goodput
from paceline.watch.growing import GrowingFile
from paceline.watch.hosts import Host
from paceline.watch.lines import parse_lines, unix_time
from paceline.watch.log_reading import LogCurves
from paceline.watch.metrics import RECENT_LINES, Metrics
from paceline.watch.snapshot import EventView, LogView, RankView, Series, Snapshot, State
from paceline.watch.telling import tell

Record = dict[str, Any]

EVENTS_SHOWN = 500
SLOW = 1.15  # times the median of all ranks
SLOW_LINES = 10  # logged steps over which a rank's time is compared
SCRIPT_RANKS = 8  # of a script's, whose logs are read for steps and losses
GOODPUT_EVERY_S = 5.0
EXPLAINED_BYTES = (
    64 << 20
)  # logs of an attempt beyond this are not read again: the verdict in events.jsonl stands alone
TELLING = (
    "attempt",
    "rank_failed",
    "stopping",
    "hang",
    "attempt_ended",
    "verdict",
)  # events that an explanation goes by
DAMAGED = (KeyError, TypeError, ValueError, AttributeError)  # what reading a damaged file may end in
NEEDED = {"attempt": ("attempt",), "resumed": ("step",), "checkpoint": ("step",), "sample": ("step",)}
PHASE_STATES: dict[str, State] = {"eval": "evaluating", "sample": "evaluating", "save": "saving"}


class RunReader:
    """One run folder of ours, a training run's or a script's."""

    def __init__(self, run: RunDir):
        self.run = run
        self.metrics = Metrics(run.metrics)
        self.hosts: dict[str, Host] = {}
        self.events: list[Record] = []
        self.told: list[EventView] = []
        self._events_file = GrowingFile(run.events)
        self._script_logs: dict[str, LogCurves] = {}
        self._kept: dict[Path, tuple[tuple[int, int], Any]] = {}  # small files by what they were like when read
        self._goodput: tuple[tuple[int, bool, int], float, Goodput] | None = None
        self._explained: tuple[tuple[int, int, int], dict[str, Any] | None] | None = None

    def update(self) -> Snapshot:
        running = is_locked(self.run)
        self._read_events()
        self.metrics.read()
        self._read_hosts()
        config, plan = self._kept_toml(self.run.config_toml), self._kept_json(self.run.plan_json)
        logs = self._logs()
        marks = self._marks()
        common = self._common(running, plan, marks, logs)
        if "command" in config:
            return self._script(config, common, logs)
        return self._training(common, plan, marks)

    def _common(self, running: bool, plan: Record, marks: dict[int, Mark], logs: list[LogView]) -> dict[str, Any]:
        """What a training run and a script's have alike."""
        now = time.time()
        tokens = plan.get("total_batch_size")
        spent = self._spent(running, tokens)
        started = unix_time(self.events[0].get("time")) if self.events else math.nan
        updated = self._updated(marks, logs, running=running)
        state = self._state(running, marks)
        until = now if running else updated or now
        return {
            "name": self.run.name,
            "path": str(self.run.path),
            "state": state,
            "num_steps": plan.get("num_steps"),
            "tokens_per_step": tokens,
            "started": None if math.isnan(started) else started,
            "updated": updated,
            "elapsed_s": None if math.isnan(started) else max(0.0, until - started - spent.seconds["idle"]),
            "ranks": self._ranks(marks, running=running),
            "hosts": [host.view() for host in self._hosts_now()],
            "host_series": {
                f"{host.name} {name}": self._by_time(curve)
                for host in self.hosts.values()
                for name, curve in host.host_curves.items()
            },
            "gpu_series": {
                f"{host.name}/{index} {name}": self._by_time(curve)
                for host in self.hosts.values()
                for (index, name), curve in host.gpu_curves.items()
            },
            "events": self.told[-EVENTS_SHOWN:],
            "attempts": attempts_of(self.events),
            "logs": logs,
            "goodput": spent,
            "findings": self._findings(),
            "explanation": self._explanation(logs) if state in ("failed", "broken", "recovering") else None,
        }

    def _training(self, common: dict[str, Any], plan: Record, marks: dict[int, Mark]) -> Snapshot:
        latest, num_steps = self.metrics.latest, common["num_steps"]
        step = max([int(latest.get("step", 0)), *(mark.step for mark in marks.values())])
        if common["state"] not in ("starting", "training", "evaluating", "saving"):
            step = int(latest.get("step", 0))
        peak = latest.get("peak_bytes")
        return Snapshot(
            kind="training",
            step=step,
            eta_s=self._eta_s(step, num_steps, common["state"]),
            loss=latest.get("loss"),
            val_bpb=latest.get("val_bpb"),
            tok_per_sec=latest.get("tok_per_sec"),
            step_ms=latest.get("step_ms"),
            mfu=latest.get("mfu"),
            peak_bytes=None if peak is None else int(peak),
            series={name: curve.series() for name, curve in self.metrics.curves.items()},
            rank_series=[curve.series() for curve in self.metrics.rank_curves],
            plan=expected(plan),
            **common,
        )

    def _script(self, config: Record, common: dict[str, Any], logs: Sequence[LogView]) -> Snapshot:
        """What its ranks print, as far as it is of a known form: of the rank that tells most."""
        last = [log for log in logs if log.rank is not None and log.attempt == logs[-1].attempt]
        told = [self._script_logs.setdefault(log.path, LogCurves(Path(log.path))) for log in last[:SCRIPT_RANKS]]
        for each in told:
            each.read()
        most = max(told, key=lambda each: len(each.curves), default=None)
        fields = {**common, **(most.fields() if most else {})}
        fields["ranks"] = common["ranks"] or [RankView(log.rank) for log in last if log.rank is not None]
        began = max((unix_time(e["time"]) for e in self.events if e.get("event") == "attempt"), default=math.nan)
        if fields["state"] != "running":
            fields["eta_s"] = None
        elif most and fields["eta_s"] is None:
            fields["eta_s"] = most.eta_s(since=began)
        if most and most.num_lines and fields["silence_s"] is None and common["updated"]:
            fields["silence_s"] = max(0.0, common["updated"] - began) / most.num_lines
        return Snapshot(kind="script", command=config["command"], **fields)

    def _read_events(self) -> None:
        if self._events_file.is_other():
            self.events, self.told = [], []
        for block in self._events_file.blocks():
            for event in parse_lines(block):
                if (told := tell(event)) is not None:
                    self.told.append(told)
                if is_sound(event):
                    self.events.append({name: value for name, value in event.items() if name not in ("prompt", "text")})
        del self.told[:-EVENTS_SHOWN]

    def _read_hosts(self) -> None:
        for path in sorted(self.run.health_dir.glob("*.jsonl")):
            self.hosts.setdefault(path.stem, Host(path)).read()

    def _hosts_now(self) -> list[Host]:
        """Those of the last attempt that has samples: a resume in another container is on a host of another name."""
        last = max((host.time or 0.0 for host in self.hosts.values()), default=0.0)
        began = (unix_time(event["time"]) for event in self.events if event.get("event") == "attempt")
        since = max((time for time in began if time <= last), default=0.0)
        return [host for host in self.hosts.values() if (host.time or 0.0) >= since]

    def _marks(self) -> dict[int, Mark]:
        found = {}
        for path in self.run.progress(0).parent.glob("*"):
            if path.name.isdecimal() and (mark := read_mark(path)) is not None:
                found[int(path.name)] = mark
        return dict(sorted(found.items()))

    def _logs(self) -> list[LogView]:
        found = []
        for path in self.run.logs(0).parent.glob("*/*.log"):
            rank = int(path.stem) if path.stem.isdecimal() else None
            with suppress(OSError, ValueError):
                found.append(LogView(int(path.parent.name), rank, str(path), path.stat().st_size))
        return sorted(found, key=lambda log: (log.attempt, log.rank is None, log.rank))

    def _updated(self, marks: dict[int, Mark], logs: Sequence[LogView], *, running: bool) -> float | None:
        """Of a run that has ended by what stands in its files alone: a copy of them has other times."""
        times = [mark.time for mark in marks.values()]
        times += [unix_time(line.get("time")) for line in (*list(self.metrics.recent)[-1:], *self.events[-1:])]
        if not running:
            times += [host.time or math.nan for host in self.hosts.values()]
        for log in logs[-16:] if running else ():
            with suppress(OSError):
                times.append(Path(log.path).stat().st_mtime if log.bytes else math.nan)
        return max((each for each in times if each > 0), default=None)

    def _state(self, running: bool, marks: dict[int, Mark]) -> State:
        end = end_of(self.events)
        if not running:
            return end
        kinds = [event.get("event") for event in self.events]
        began = max((index for index, kind in enumerate(kinds) if kind == "attempt"), default=-1)
        since = self.events[began + 1 :]
        ended = next((event.get("state") for event in since if event.get("event") == "attempt_ended"), None)
        if ended is not None:
            if {"launch", "script"} & set(kinds[began + 1 :]):
                return "starting"
            last = any(event.get("action") == "stop" for event in since)
            return "failed" if last else "recovering" if ended == "failed" else end
        if "script" in kinds:
            return "running" if began >= 0 else "starting"
        first = next((event["step"] for event in since if event.get("event") == "resumed"), 0)
        mark = marks.get(0)
        if began < 0 or mark is None or mark.step <= first:
            return "starting"
        return PHASE_STATES.get(mark.phase, "training")

    def _ranks(self, marks: dict[int, Mark], *, running: bool) -> list[RankView]:
        """The ranks of the last attempt."""
        hosts = self._hosts_now()
        host = hosts[0].name if len(hosts) == 1 else None
        recent = [ms for line in self.metrics.recent if is_times(ms := line.get("rank_ms"))][-SLOW_LINES:]
        now = recent[-1] if recent else []
        usual = [statistics.median(ms[rank] for ms in recent if len(ms) == len(now)) for rank in range(len(now))]
        sizes = [event.get("world_size") for event in self.events if event.get("event") == "attempt"]
        count = max([size if sizes and isinstance(size := sizes[-1], int) else 0, *(rank + 1 for rank in marks)])
        middle = statistics.median(usual) if usual else math.inf
        views = []
        for rank in range(count):
            mark = marks.get(rank)
            views.append(
                RankView(
                    rank,
                    host,
                    step=mark.step if mark else None,
                    phase=mark.phase if mark else None,
                    silent_s=max(0.0, time.time() - mark.time) if mark and running else None,
                    busy_ms=now[rank] if rank < len(now) else None,
                    slow=rank < len(now) and usual[rank] > SLOW * middle,
                )
            )
        return views

    def _spent(self, running: bool, tokens: int | None) -> Goodput:
        """Of a long run that goes on it is not worked out at every look."""
        key = (
            len(self.events),
            running,
            self.metrics.file.offset * (len(self.metrics.recent) < RECENT_LINES or not running),
        )
        if self._goodput is None or self._goodput[0] != key or time.monotonic() > self._goodput[1]:
            lines = StepLines(*map(self.metrics.column, ("step", "time", "step_ms", "val_bpb")))
            energy_j = energy_of(host.energy_j for host in self.hosts.values())
            found = goodput(self.events, lines, tokens_per_step=tokens, running=running, energy_j=energy_j)
            self._goodput = (key, time.monotonic() + GOODPUT_EVERY_S, found)
        return self._goodput[2]

    def _eta_s(self, step: int, num_steps: int | None, state: State) -> float | None:
        """At the pace of the last logged steps, evaluations and checkpoints included."""
        if num_steps is None or state not in ("training", "evaluating", "saving"):
            return None
        began = [event["time"] for event in self.events if event.get("event") == "attempt"]
        recent = [line for line in self.metrics.recent if not began or str(line.get("time")) > began[-1]]
        if len(recent) >= 2 and recent[-1]["step"] > recent[0]["step"]:
            seconds = unix_time(recent[-1].get("time")) - unix_time(recent[0].get("time"))
            pace = seconds / (recent[-1]["step"] - recent[0]["step"])
        else:
            pace = self.metrics.latest.get("step_ms", math.nan) / 1000
        return max(0.0, num_steps - step) * pace if 0 <= pace < math.inf else None

    def _by_time(self, curve: Any) -> Series:
        return curve.series_by_time(self.metrics.column("step"), self.metrics.column("time"))  # type: ignore[no-any-return]

    def _findings(self) -> list[Record]:
        found = self._kept_file(self.run.findings, lambda text: json.loads(text), [])
        return found if isinstance(found, list) else []

    def _explanation(self, logs: Sequence[LogView]) -> dict[str, Any] | None:
        """Of the last attempt that has logs; read once for each state of its logs and of the events that count."""
        if not logs:
            return None
        attempt = max(log.attempt for log in logs)
        size = sum(log.bytes for log in logs if log.attempt == attempt)
        key = (attempt, size, sum(event.get("event") in TELLING for event in self.events))
        if self._explained is None or self._explained[0] != key:
            said = [e for e in self.events if e.get("event") == "verdict" and e.get("attempt") == attempt]
            found = dict(said[-1]) if said else None
            if size <= EXPLAINED_BYTES:
                with suppress(PacelineError, *DAMAGED):  # the verdict in events.jsonl stands
                    found = asdict(explain_run(self.run, attempt=attempt))
            self._explained = (key, found)
        return self._explained[1]

    def _kept_json(self, path: Path) -> Record:
        found = self._kept_file(path, lambda text: json.loads(text), {})
        return found if isinstance(found, dict) else {}

    def _kept_toml(self, path: Path) -> Record:
        return dict(self._kept_file(path, tomllib.loads, {}))

    def _kept_file(self, path: Path, parse: Any, absent: Any) -> Any:
        """Read again only when it is another."""
        try:
            stat = path.stat()
            key = (stat.st_mtime_ns, stat.st_size)
            if self._kept.get(path, (None,))[0] != key:
                self._kept[path] = (key, parse(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return absent
        return self._kept[path][1]


def is_times(value: Any) -> TypeGuard[list[float]]:
    return isinstance(value, list) and all(type(each) in (int, float) for each in value)


def is_sound(event: Record) -> bool:
    """Whether it has what its kind is read for; a crash may have cut it, or another version have written it."""
    numbers = {*NEEDED.get(str(event.get("event")), ()), *({"attempt"} & event.keys())}
    return not math.isnan(unix_time(event.get("time"))) and all(type(event.get(name)) is int for name in numbers)


def expected(plan: Record) -> dict[str, Any] | None:
    """What the planner expected of a step and of the run; None where there is no plan."""
    if not plan:
        return None
    cost, memory = plan.get("cost") or {}, plan.get("memory") or {}
    seconds, speed, run = cost.get("seconds"), cost.get("tok_per_sec"), cost.get("run") or {}
    counted = "process_bytes" if plan.get("device") == "cpu" else "allocated_bytes"  # as peak_bytes of metrics.jsonl
    return {
        "step_ms": 1000 * middle_of(seconds) if seconds else None,
        "tok_per_sec": middle_of(speed) if speed else None,
        "peak_bytes": middle_of(memory.get(counted)),
        "process_bytes": middle_of(memory.get("process_bytes")),
        "mfu": middle_of(cost.get("mfu")),
        "total_s": 3600 * hours if (hours := middle_of(run.get("hours"))) else None,
    }


def middle_of(value: Any) -> Any:
    """The planner's figures are ranges, {low, expected, high}."""
    return value.get("expected") if isinstance(value, dict) else value
