"""Run folders by hand, for tests of who reads them; and a web server over them, in a thread of the test."""

import http.client
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.rundir import RunDir, append_json_line
from paceline.watch.connections import listen
from paceline.watch.web import folder_of, make_server

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


FOLDER = folder_of(TOKEN)  # of every address of the server
DEADLINE_S = 120  # against hanging; nothing depends on how fast the server is


@contextmanager
def serving(shelf: Any) -> Iterator[int]:
    """The port on which the shelf's runs are shown."""
    listening = listen(0)
    server = make_server(shelf, TOKEN)
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
    """The status, the headers and the text of the answer; the path, below the server's folder, goes out as it stands here."""
    path = FOLDER + path.removeprefix("/")
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
