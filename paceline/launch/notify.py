"""
Trackers and notifications: processes beside a run that follow its folder and send what happens elsewhere.

Each receiver has its own process, so one that is slow or dead delays nothing. Whether they work, hang or die, the run goes on; it
waits a moment for them at its end and leaves behind what takes longer. They learn that the command has ended from the end of their
stdin, which the command holds open, so a command that is killed is reported too. Trackers are paceline.track's; the process that
sends notifications is `python -m paceline.launch.notify`. Its address is a secret: it arrives through stdin, and only its host is
ever written or printed.
"""

import base64
import http.client
import json
import math
import os
import platform
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote, urlsplit

from paceline.errors import PacelineError, UsageError, expand_home
from paceline.launch.digest import NewRecords
from paceline.options import TRACKERS, Services
from paceline.redaction import redact
from paceline.rundir import RunDir, append_event, holder_of, read_json_lines, resume_command, utc_now
from paceline.slurm import JobId
from paceline.units import format_duration
from paceline.watch.log_lines import ScriptValues

ANNOUNCE_AFTER_S = 2.0  # of waiting at the end of a run
LEAVE_AFTER_S = 30.0
END_POLL_S = 0.05

POLL_S = 1.0
TIMEOUT_S = 10  # of one request, with the lookup of the name
WAITS_S = (0.0, 1.0, 4.0, 15.0, 30.0)  # before each request
RETRIED_CODES = {408, 425, 429}  # besides the server's own faults
SCRIPT_RECOVERED_S = 60.0  # a script's steps are unknown: its next attempt has run this long
FIGURES = ("step", "loss", "val_bpb")
NTFY_TAGS = {
    "failed": "rotating_light", "recovered": "arrows_counterclockwise", "finished": "white_check_mark", "stopped": "octagonal_sign",
}  # fmt: skip

Form = Literal["json", "ntfy", "slack"]
Notice = Literal["failed", "recovered", "finished", "stopped"]


@dataclass(frozen=True)
class Receiver:
    """Where notifications go. url: a secret. host: what may be printed of it."""

    url: str
    form: Form
    host: str


def checked_services(options: Services) -> Services:
    """Returns the services with their trackers split. Raises PacelineError for one that cannot be used."""
    for address in options.notify:
        parse_receiver(address)
    return Services(track=tracker_names(",".join(options.track)), notify=options.notify)


def tracker_names(text: str, *, flag: str = "--track") -> tuple[str, ...]:
    """Returns the trackers of 'wandb,tensorboard'. Raises PacelineError for one that is unknown or not installed."""
    names = tuple(dict.fromkeys(name for name in text.split(",") if name))
    for name in names:
        if name not in TRACKERS:
            raise UsageError(f"{flag} {name}: no such tracker", fix=f"one of {', '.join(TRACKERS)}")
        if (spec := find_spec(name)) is None or spec.origin is None:  # a folder called wandb/ is not the package
            raise PacelineError(f"{name} is not installed", fix=f"pip install {name}")
    return names


def parse_receiver(address: str) -> Receiver:
    """Returns the receiver of an address. Raises UsageError, which does not repeat it.

    The address is https://ntfy.sh/TOPIC, https://hooks.slack.com/... or any other URL, which receives plain JSON; ntfy+ or slack+
    before it sets the form. @FILE: the file holds the address, which then is in no list of processes.
    """
    if address.startswith("@"):
        try:
            address = expand_home(address[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--notify {address}: {error}", fix="a file that holds one address") from None
    prefix, plus, url = address.partition("+")
    if prefix not in ("ntfy", "slack", "json") or not plus:
        prefix, url = "", address
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https") or any(ord(char) < 33 for char in url):
        fix = "--notify https://ntfy.sh/TOPIC, or any http:// or https:// URL"
        raise UsageError("--notify: not an address", fix=fix)
    # a request has ASCII alone: a topic in other letters is sent as a browser sends it
    path, query = (
        "".join(char if char.isascii() else quote(char) for char in part) for part in (parts.path, parts.query)
    )
    url = parts._replace(path=path, query=query).geturl()
    form: Form = "ntfy" if host.startswith("ntfy.") else "slack" if host == "hooks.slack.com" else "json"
    if (prefix or form) == "ntfy" and not path.strip("/"):
        raise UsageError("--notify: the address of ntfy has no topic", fix="--notify https://ntfy.sh/TOPIC")
    return Receiver(url, prefix or form, host + (f":{port}" if port else ""))  # type: ignore[arg-type]


@contextmanager
def run_services(run: RunDir, services: Services) -> Iterator[None]:
    """Runs trackers and notifications during the block and for some seconds after it.

    At the end it waits while they send their last lines, then prints what they report. Ctrl-C leaves them running.
    """
    helpers = start_services(run, services)
    try:
        yield
    finally:
        events = NewRecords(run.events)
        for helper in helpers.values():
            assert helper.stdin is not None
            helper.stdin.close()
        started, announced = time.monotonic(), False
        with suppress(KeyboardInterrupt):
            while (names := names_of_running(helpers)) and time.monotonic() - started < LEAVE_AFTER_S:
                if not announced and time.monotonic() - started > ANNOUNCE_AFTER_S:
                    announced = True
                    wait = f"waiting for {names}, at most {LEAVE_AFTER_S:.0f} s; Ctrl-C leaves it running"
                    print(wait, file=sys.stderr, flush=True)
                time.sleep(END_POLL_S)
        lines = [str(event["text"]) for event in events.read() if event.get("event") == "note"]
        lines += [f"{name} was killed" for name, helper in helpers.items() if (helper.poll() or 0) < 0]
        if names := names_of_running(helpers):
            lines.append(f"still sending: {names}; it ends by itself")
        for line in lines:
            print(line, file=sys.stderr, flush=True)


def start_services(run: RunDir, services: Services) -> dict[str, subprocess.Popen[bytes]]:
    """Returns the processes by name. One that cannot be started is reported on stderr: the run does not need it."""
    sizes = {f"{path.stem}_bytes": path.stat().st_size if path.exists() else 0 for path in (run.events, run.metrics)}
    starts: list[tuple[str, list[str], Path, object]] = [
        (f"notify {number}", ["paceline.launch.notify"], Path(os.devnull), {"run": str(run.path), "to": to, **sizes})
        for number, to in enumerate(services.notify)
    ]
    for name in services.track:
        log = run.track(name).with_suffix(".log")
        starts.append((name, ["paceline.track.follower", str(run.path), name], log, None))
    helpers = {}
    for name, command, log, job in starts:
        try:
            log.parent.mkdir(exist_ok=True)
            with log.open("ab") as output:
                helper = subprocess.Popen(
                    [sys.executable, "-P", "-m", *command],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # a terminal's Ctrl-C does not reach it
                )
        except OSError as error:  # a full disk, or no more processes allowed
            print(f"{name.split()[0]} could not be started: {error}", file=sys.stderr, flush=True)
            continue
        helpers[name] = helper
        if job is not None:
            assert helper.stdin is not None
            with suppress(BrokenPipeError):
                helper.stdin.write(json.dumps(job).encode() + b"\n")
                helper.stdin.flush()
    return helpers


def names_of_running(helpers: dict[str, subprocess.Popen[bytes]]) -> str:
    """Returns the names of the services that still run, each once."""
    return ", ".join(dict.fromkeys(name.split()[0] for name, helper in helpers.items() if helper.poll() is None))


def main() -> int:
    """Sends notifications. The first line of stdin is {"run", "to", "events_bytes", "metrics_bytes"}: new lines start there."""
    job = json.loads(sys.stdin.buffer.readline())  # only the end of stdin follows
    receiver = parse_receiver(job["to"])
    os.chdir(job["run"])
    run = RunDir(Path())  # wherever it is renamed to
    os.nice(10)
    # a batch system sends these to all processes of a job, and the run has yet to end
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, lambda *_: None)
    holder = holder_of(run)
    news = RunNews(run, events_bytes=job["events_bytes"], metrics_bytes=job["metrics_bytes"])
    active = True
    while active:
        if select.select([sys.stdin], [], [], POLL_S)[0]:  # it is closed: the command has ended
            time.sleep(0.1)  # a closed pipe is always ready, and the workers may still be saving
            active = holder is not None and holder_of(run) == holder
        for notice in news.read(ended=not active):
            if problem := send(receiver, make_message(notice, news)):
                text = f"notify: {receiver.host} did not receive that the run has {notice}: {problem}"
                with suppress(PacelineError):  # the folder is gone too
                    append_event(run, "note", text=text)
    return 0


class RunNews:
    """What happened in a run since its files had these sizes."""

    def __init__(self, run: RunDir, *, events_bytes: int = 0, metrics_bytes: int = 0):
        self.run = run
        self.events = NewRecords(run.events, offset=events_bytes)
        self.metrics = NewRecords(run.metrics, offset=metrics_bytes)
        self.started = time.monotonic()
        self.verdict: dict[str, Any] = {}  # on the last attempt that failed
        self.attempt: int | None = None
        self.retry_start: tuple[str, float] | None = None  # of the attempt after a failure, UTC and monotonic
        self.end: Notice | None = None
        self.stop_signal = "SIGINT"  # which a person at a terminal sends
        self.next_job: JobId | None = None  # of Slurm, which continues the run
        self.latest: dict[str, Any] = {}  # step, loss, val_bpb
        self.last_step_time = ""

    def read(self, *, ended: bool) -> Iterator[Notice]:
        """Yields what is worth a message. ended: nothing more will happen."""
        for event in self.events.read():
            self.add_event(event)
        for record in self.metrics.read():
            self.latest |= {name: record[name] for name in FIGURES if record.get(name) is not None}
            self.last_step_time = str(record.get("time", ""))
        if self.retry_start and not self.end:
            start_time, start_s = self.retry_start
            if self.last_step_time > start_time or time.monotonic() - start_s > SCRIPT_RECOVERED_S:
                self.retry_start = None
                yield "recovered"
        if ended and (self.end != "stopped" or self.stop_signal != "SIGINT"):
            yield self.end or "failed"

    def figures(self) -> dict[str, Any]:
        """Returns the last step, loss and val_bpb: those of metrics.jsonl, or what a script has printed or wrote as metrics."""
        if self.latest:
            return self.latest
        events = list(read_json_lines(self.run.events))
        values = ScriptValues(self.run).read(events, FIGURES, is_over=self.end is not None)
        return {name: values[name] if math.isfinite(values[name]) else None for name in FIGURES if name in values}

    def add_event(self, event: dict[str, Any]) -> None:
        """Takes a line of events.jsonl."""
        kind = str(event.get("event"))
        if kind in ("failed", "finished"):
            self.end = "failed" if kind == "failed" else "finished"
        elif kind in ("stopping", "interrupted") and self.end != "finished":  # else the stop came after the last step
            if kind == "stopping" or self.end != "stopped":
                self.stop_signal = str(event.get("signal") or event.get("reason") or "SIGINT")
            self.end = "stopped"
        elif kind == "requeued":
            self.next_job = event.get("job_id")
        elif kind == "verdict":
            self.verdict = event
        elif kind == "attempt":
            self.attempt, self.end = event.get("attempt"), None
            self.retry_start = (str(event["time"]), time.monotonic()) if self.verdict else None
        elif kind == "attempt_ended":
            self.retry_start = None
            if event.get("state") == "interrupted" and self.end is None:
                self.end, self.stop_signal = "stopped", "a signal to its workers"


def make_message(notice: Notice, news: RunNews) -> dict[str, Any]:
    """Returns the message as plain JSON; its title and text are for people."""
    run, verdict, latest = RunDir(news.run.path.resolve()), news.verdict, news.figures()
    step = f"step {latest['step']:,}, " if "step" in latest else ""
    after = f"after {format_duration(time.monotonic() - news.started)}"
    match notice:
        case "finished":
            bpb = f", val_bpb {latest['val_bpb']:.4f}" if "val_bpb" in latest else ""
            text = f"{step}{after}{bpb}"
            if verdict.get("attempt", 0) == news.attempt:
                text += f"; its output shows a failure: {verdict.get('summary')}"
        case "recovered":
            text = f"{step}attempt {news.attempt}; before it: {verdict.get('summary')}"
        case "failed" if news.end == "failed":
            fix = f"\nfix: {verdict['fix']}" if verdict.get("fix") else ""
            text = f"{verdict.get('summary', 'the cause is unknown')} ({step}{after}){fix}"
        case "stopped":
            if news.next_job is not None:
                then = f"; Slurm's job {news.next_job} continues it"
            else:
                then = f"; resume it with: {resume_command(run)}" if run.plan_json.exists() else ""
            text = f"by {news.stop_signal}, {step}{after}{then}"
        case "failed":
            text = f"it ended without a message, {step}{after}: the command that ran it was killed"
    explained = {name: verdict.get(name) for name in ("cause", "summary", "rank", "fix")} if verdict else {}
    explained |= {"failed_host": verdict["host"]} if verdict.get("host") else {}
    name, host = run.name, platform.node()
    facts = {"event": notice, "run": name, "host": host, "time": utc_now(), "attempt": news.attempt}
    title = f"{name} {notice} on {host}"
    message = {**facts, **latest, **({} if notice == "finished" else explained), "title": title, "text": text}
    return dict(redact(message))  # topics of ntfy are public, and a summary quotes the run's output


def send(receiver: Receiver, message: dict[str, Any]) -> str | None:
    """Sends a message, with retries. Returns what was wrong with the last request; None where one succeeded."""
    problem = None
    for wait_s in WAITS_S:
        time.sleep(wait_s)
        try:
            post(make_request(receiver, message))
            return None
        except urllib.error.HTTPError as error:
            hint = ", a redirect: --notify takes the address to which it leads" if 300 <= error.code < 400 else ""
            problem = f"it answers {error.code}{hint}"
            if error.code < 500 and error.code not in RETRIED_CODES:
                return problem
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            problem = str(reason) if isinstance(reason, OSError) else type(error).__name__
    return problem


def make_request(receiver: Receiver, message: dict[str, Any]) -> urllib.request.Request:
    """Returns the request in the receiver's own form."""
    headers = {"User-Agent": "paceline", "Content-Type": "application/json"}
    if receiver.form == "ntfy":
        headers |= {"Title": message["title"].encode("ascii", "replace").decode(), "Tags": NTFY_TAGS[message["event"]]}
        headers |= {"Priority": "high" if message["event"] == "failed" else "default", "Content-Type": "text/plain"}
        body = message["text"].encode()
    elif receiver.form == "slack":
        text = f"*{message['title']}*\n{message['text']}"
        body = json.dumps({"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}).encode()
    else:
        body = json.dumps(message).encode()
    login, _, place = (parts := urlsplit(receiver.url)).netloc.rpartition("@")
    if login:  # urllib would take it for a part of the host's name
        headers["Authorization"] = f"Basic {base64.b64encode(unquote(login).encode()).decode()}"
    url = parts._replace(netloc=place).geturl()
    return urllib.request.Request(url, data=body, headers=headers, method="POST")


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a redirected POST would arrive as a GET, without the message."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post(request: urllib.request.Request) -> None:
    """Sends a request within TIMEOUT_S, whatever takes so long. Call it from the main thread."""

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"no answer within {TIMEOUT_S} s")

    handler = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TIMEOUT_S)
    try:
        urllib.request.build_opener(NoRedirect).open(request, timeout=TIMEOUT_S).close()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


if __name__ == "__main__":
    sys.exit(main())
