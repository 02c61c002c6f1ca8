"""Run folders by hand, for tests of who reads them; and a web server over them, in a thread of the test."""

import http.client
import json
import os
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvicorn

from paceline.heartbeat import LINE, QUOTED, SUM
from paceline.rundir import RunDir, append_event, append_json_line
from paceline.watch.snapshot import Snapshot
from paceline.watch.status import open_reader
from paceline.watch.web import listen, make_app

TOKEN = "the-token-of-a-test"
START = 1_795_250_000.0


def utc(seconds: float) -> str:
    return datetime.fromtimestamp(START + seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def append_step(run: RunDir, step: int, **fields: Any) -> None:
    loss = 2 + 6 / (1 + step / 20)
    line = {"step": step, "loss": loss, "step_ms": 600.0, "tok_per_sec": 20_000.0, "rank_ms": [590.0, 610.0]}
    append_json_line(run.metrics, {**line, **fields, "time": utc(step * 0.6)})


def write_run(
    folder: Path, name: str, *, steps: int = 100, log: str = "step 1\n", end: str | None = "finished", **keys: Any
) -> RunDir:
    """A training run of two ranks that logged every step. keys: of its config."""
    run = RunDir(folder / name)
    run.logs(1).mkdir(parents=True)
    config = {"name": name, "depth": 4, "num_steps": 200, **keys}
    run.config_toml.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items()))
    run.plan_json.write_text(json.dumps({"num_steps": 200, "total_batch_size": 12_288}))
    run.rank_log(1, 0).write_text(log)
    os.utime(run.rank_log(1, 0), (START, START))
    events = [{"event": "launch", "prepared_s": 2.0}, {"event": "attempt", "attempt": 1, "world_size": 2}]
    for event in events:
        append_json_line(run.events, {"time": utc(0), **event})
    for step in range(1, steps + 1):
        append_step(run, step)
    if end is not None:
        append_json_line(run.events, {"time": utc(steps), "event": end, "step": steps})
        append_json_line(run.events, {"time": utc(steps), "event": "attempt_ended", "attempt": 1, "state": end})
    return run


DEADLINE_S = 120  # against hanging; nothing depends on how fast the server is


@contextmanager
def serving(shelf: Any) -> Iterator[int]:
    """The port on which the shelf's runs are shown."""
    listening = listen(0)
    config = uvicorn.Config("", log_level="error", lifespan="off", timeout_graceful_shutdown=10)
    server = uvicorn.Server(config)
    config.app = make_app(shelf, TOKEN, is_ending=lambda: server.should_exit)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()


def asked(
    port: int, path: str, *, method: str = "GET", token: bool = True, **headers: str
) -> tuple[int, dict[str, str], str]:
    """The status, the headers and the text of the answer; the path goes out as it stands here."""
    if token:
        path += ("&" if "?" in path else "?") + f"token={TOKEN}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = (
        answer.status,
        {name.lower(): value for name, value in answer.getheaders()},
        answer.read().decode(errors="replace"),
    )
    connection.close()
    return found


class Folder:
    """A run folder written by hand."""

    def __init__(self, path):
        self.run = RunDir(path / "r")
        self.run.path.mkdir()
        self.run.config_toml.write_text("depth = 4\n")
        self.run.plan_json.write_text('{"num_steps": 100, "total_batch_size": 10}')
        self.reader = open_reader(self.run.path)

    def look(self) -> Snapshot:
        return self.reader.update()

    def event(self, kind, **fields):
        append_event(self.run, kind, **fields)

    def begin(self, *, world_size=2, attempt=1):
        self.event("launch", prepared_s=1.0)
        self.event("attempt", attempt=attempt, world_size=world_size)

    def begin_script(self, *, attempt=1, ago=0.0):
        start = {"time": utc(time.time() - START - ago), "event": "attempt", "attempt": attempt, "world_size": 1}
        append_json_line(self.run.events, start)
        self.run.logs(attempt).mkdir(parents=True)

    def print(self, text, *, attempt=1, ago=0.0):
        with self.run.rank_log(attempt, 0).open("a") as file:
            file.write(text)
        os.utime(self.run.rank_log(attempt, 0), (time.time() - ago,) * 2)

    def log(self, step, *, second=0, **fields):
        line = {"step": step, "loss": 3.0, "step_ms": 100.0, "time": f"2026-01-01T00:00:{second:02d}.000Z", **fields}
        append_json_line(self.run.metrics, line)

    def beat(self, rank, step, phase="forward", *, ago=0.0):
        self.run.progress(rank).parent.mkdir(exist_ok=True)
        line = (LINE % (step, 0, QUOTED[phase], time.time() - ago, 1.0)).encode()
        self.run.progress(rank).write_bytes(line + SUM % zlib.crc32(line))
