"""
Tells somebody elsewhere that a run has failed, recovered, finished or been stopped; `python -m paceline.launch.notify`, beside it.

A process for each receiver, so that one that is slow or dead holds nothing up. It reads the run folder, and hears of the end of
the command that holds the run by the end of its stdin; so it tells of a command that was killed too. The address is a secret: it
comes through stdin, and nothing that is written or shown has more of it than the host.
"""

import http.client
import json
import os
import platform
import select
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from paceline.errors import PacelineError, UsageError
from paceline.launch.digest import Follow
from paceline.rundir import RunDir, append_event, holder_of, utc_now
from paceline.units import format_duration

POLL_S = 1.0
TIMEOUT_S = 10  # of one try, the name's look-up included
WAITS_S = (0.0, 1.0, 4.0, 15.0, 30.0)  # before each try
TRY_AGAIN = {408, 425, 429}  # beside the server's own faults
SCRIPT_RECOVERED_S = 60.0  # a script's steps are not known: its next attempt has lasted as long
TAGS = {
    "failed": "rotating_light",
    "recovered": "arrows_counterclockwise",
    "finished": "white_check_mark",
    "stopped": "octagonal_sign",
}  # of ntfy

Form = Literal["json", "ntfy", "slack"]
Happening = Literal["failed", "recovered", "finished", "stopped"]


@dataclass(frozen=True)
class Receiver:
    """url: complete, a secret. shown: what may be told of it."""

    url: str
    form: Form
    shown: str


def receiver_of(word: str) -> Receiver:
    """https://ntfy.sh/TOPIC, https://hooks.slack.com/..., any other URL for plain JSON; ntfy+ or slack+ before it says the form.

    @FILE: the file holds the address, which then is in no list of processes.
    """
    if word.startswith("@"):
        try:
            word = Path(word[1:]).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--notify {word}: {error}", fix="a file that holds one address") from None
    asked, plus, url = word.partition("+")
    if asked not in ("ntfy", "slack", "json") or not plus:
        asked, url = "", word
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https") or any(ord(each) < 33 for each in url):
        raise UsageError(
            "--notify: not an address", fix="--notify https://ntfy.sh/TOPIC, or any http:// or https:// URL"
        )
    form: Form = "ntfy" if host.startswith("ntfy.") else "slack" if host == "hooks.slack.com" else "json"
    return Receiver(url, asked or form, host + (f":{port}" if port else ""))  # type: ignore[arg-type]


def main() -> int:
    """The first line of stdin is {"run", "to", "events_bytes", "metrics_bytes"}: folder, address, where new lines begin."""
    job = json.loads(sys.stdin.buffer.readline())  # nothing follows but the end
    run, receiver = RunDir(Path(job["run"])), receiver_of(job["to"])
    os.nice(10)
    # a batch system sends them to all alike, and the run has yet to end
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, lambda *_: None)
    holder = holder_of(run)
    story = Story(run)
    story.events.offset, story.metrics.offset = job["events_bytes"], job["metrics_bytes"]
    held = True
    while held:
        held = is_held(sys.stdin.fileno()) or (holder is not None and holder_of(run) == holder)
        for happening in story.read(ended=not held):
            if problem := send(receiver, message_of(happening, story)):
                text = f"notify: {receiver.shown} could not be told that the run has {happening}: {problem}"
                with suppress(PacelineError):  # the folder is gone too
                    append_event(run, "note", text=text)
    return 0


def is_held(link: int) -> bool:
    """Waits until the next look is due, or the other end is closed."""
    ready, _, _ = select.select([link], [], [], POLL_S)
    if not ready or os.read(link, 4096):
        return True
    time.sleep(0.1)  # a closed pipe is always ready, and the workers may still be saving
    return False


class Story:
    """The run as its files tell it, from now on; `read` again and again."""

    def __init__(self, run: RunDir):
        self.run = run
        self.events, self.metrics = Follow(run.events), Follow(run.metrics)
        self.began = time.monotonic()
        self.verdict: dict[str, Any] = {}  # of the last attempt that failed
        self.attempt: int | None = None
        self.again: tuple[str, float] | None = None  # when the attempt after a failure began, UTC and monotonic
        self.ended: Happening | None = None
        self.stopped_by = "SIGINT"  # which somebody at a terminal has sent
        self.latest: dict[str, Any] = {}  # step, loss, val_bpb
        self.stepped = ""  # time of the last logged step

    def read(self, *, ended: bool) -> Iterator[Happening]:
        """What is worth a message. ended: nothing more will come."""
        for event in self.events.read():
            self.note(event)
        for record in self.metrics.read():
            self.latest |= {name: record[name] for name in ("step", "loss", "val_bpb") if record.get(name) is not None}
            self.stepped = str(record.get("time", ""))
        if self.again and not self.ended:
            began, monotonic = self.again
            if self.stepped > began or time.monotonic() - monotonic > SCRIPT_RECOVERED_S:
                self.again = None
                yield "recovered"
        if ended and (self.ended != "stopped" or self.stopped_by != "SIGINT"):
            yield self.ended or "failed"

    def note(self, event: dict[str, Any]) -> None:
        kind = str(event.get("event"))
        if kind in ("failed", "finished"):
            self.ended = "failed" if kind == "failed" else "finished"
        elif kind in ("stopping", "interrupted"):
            self.ended, self.stopped_by = "stopped", str(event.get("signal", "SIGINT"))
        elif kind == "verdict":
            self.verdict = event
        elif kind == "attempt":
            self.attempt, self.ended = event.get("attempt"), None
            self.again = (str(event["time"]), time.monotonic()) if self.verdict else None
        elif kind == "attempt_ended":
            self.again = None
            if event.get("state") == "interrupted" and self.ended is None:
                self.ended, self.stopped_by = "stopped", "a signal to its workers"


def message_of(happening: Happening, story: Story) -> dict[str, Any]:
    """As plain JSON has it; title and text are for people."""
    verdict, latest = story.verdict, story.latest
    step = f"step {latest['step']:,}, " if "step" in latest else ""
    after = f"after {format_duration(time.monotonic() - story.began)}"
    match happening:
        case "finished":
            bpb = f", val_bpb {latest['val_bpb']:.4f}" if "val_bpb" in latest else ""
            text = f"{step}{after}{bpb}"
        case "recovered":
            text = f"{step}attempt {story.attempt}; before it: {verdict.get('summary')}"
        case "failed" if story.ended == "failed":
            fix = f"\nfix: {verdict['fix']}" if verdict.get("fix") else ""
            text = f"{verdict.get('summary', 'no cause is known')} ({step}{after}){fix}"
        case "stopped":
            then = f"; paceline resume {story.run.path} goes on" if story.run.plan_json.exists() else ""
            text = f"by {story.stopped_by}, {step}{after}{then}"
        case "failed":
            text = f"it ended without a word, {step}{after}: the command that held it was killed"
    explained = {name: verdict.get(name) for name in ("cause", "summary", "rank", "fix")} if verdict else {}
    name, host = story.run.name, platform.node()
    title = f"{name} {happening} on {host}"
    facts = {"event": happening, "run": name, "host": host, "time": utc_now(), "attempt": story.attempt}
    return {**facts, **latest, **({} if happening == "finished" else explained), "title": title, "text": text}


def send(receiver: Receiver, message: dict[str, Any]) -> str | None:
    """What was wrong with the last try, where none has gone well."""
    problem = None
    for wait_s in WAITS_S:
        time.sleep(wait_s)
        try:
            post(request_of(receiver, message))
        except urllib.error.HTTPError as error:
            problem = f"it answers {error.code}"
            if error.code < 500 and error.code not in TRY_AGAIN:
                return problem
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            problem = str(reason) if isinstance(reason, OSError) else type(error).__name__
        else:
            return None
    return problem


def request_of(receiver: Receiver, message: dict[str, Any]) -> urllib.request.Request:
    headers = {"User-Agent": "paceline", "Content-Type": "application/json"}
    if receiver.form == "ntfy":
        headers |= {"Title": message["title"].encode("ascii", "replace").decode(), "Tags": TAGS[message["event"]]}
        headers |= {"Priority": "high" if message["event"] == "failed" else "default", "Content-Type": "text/plain"}
        body = message["text"].encode()
    elif receiver.form == "slack":
        text = (
            f"*{message['title']}*\n{message['text']}".replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        )
        body = json.dumps({"text": text}).encode()
    else:
        body = json.dumps(message).encode()
    return urllib.request.Request(receiver.url, data=body, headers=headers, method="POST")


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would come as a GET, without the message."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post(request: urllib.request.Request) -> None:
    """Within TIMEOUT_S, whatever it is that takes so long; for the main thread."""

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"no answer within {TIMEOUT_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TIMEOUT_S)
    try:
        urllib.request.build_opener(NoRedirect).open(request, timeout=TIMEOUT_S).close()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
