"""
Preemption: the notice that this machine is taken away soon, from a file or from the metadata service of a cloud.

A thread beside the attempts looks every few seconds. The first notice is an order to stop (launch/stop_signals.py), with its reason
and its deadline. Nothing here may disturb the run: a service that is silent or slow or answers nonsense is reported once, and asked
again.

Protocols: AWS, spot instance interruption notices by IMDSv2, two minutes before; Google Cloud, instance/preempted, 30 s before;
Azure, scheduled events, 30 s before an eviction. Each address can be set by the variable that the cloud's own libraries read.
"""

import http.client
import json
import math
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import psutil

from paceline.errors import PacelineError, UsageError
from paceline.launch.notify import NoRedirect
from paceline.options import PreemptOptions
from paceline.units import format_duration

TIMEOUT_S = 5.0  # of one request
FILE_POLL_S = 1.0
MAX_BYTES = 1 << 16  # of an answer
MARGIN_S = 5.0  # before the machine goes, processes that still save are killed, so that the run records its end
MAX_MARGIN = 0.5  # of a short notice, the share that the margin may take
TOKEN_TTL_S = 21_600
LOSING_EVENTS = {"Preempt", "Terminate", "Reboot", "Redeploy"}  # of Azure; a Freeze passes
LINK_LOCAL = "http://169.254.169.254"


@dataclass(frozen=True)
class Preemption:
    """A notice. source: a noun phrase. seconds_left: until the machine goes; None where the notice does not say."""

    source: str
    seconds_left: float | None


@dataclass(frozen=True)
class Cloud:
    """A metadata service. seconds: what the cloud promises between notice and end. variable: the environment's, for `address`."""

    title: str
    seconds: float
    poll_s: float
    variable: str
    address: str
    ask: Callable[["Service"], "Preemption | None"]


class NoAnswer(Exception):
    """The service did not answer as its protocol says; the text is the reason."""


class Service:
    """The metadata service of a cloud, asked again and again."""

    def __init__(self, cloud: Cloud):
        self.cloud = cloud
        address = os.environ.get(cloud.variable) or cloud.address
        self.address = (address if "://" in address else f"http://{address}").rstrip("/")
        self.token: str | None = None  # of AWS
        self.vm: str | None = None  # of Azure: the name of this machine
        # a proxy of the environment cannot reach a link-local address
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect)

    def poll(self) -> Preemption | None:
        """Returns the notice, if there is one. Raises NoAnswer."""
        return self.cloud.ask(self)

    def request(self, path: str, headers: dict[str, str], *, method: str = "GET") -> tuple[int, str]:
        """Returns status and text of an answer. Raises NoAnswer where none comes within TIMEOUT_S."""
        request = urllib.request.Request(self.address + path, headers=headers, method=method)
        deadline = time.monotonic() + TIMEOUT_S
        try:
            with self.opener.open(request, timeout=TIMEOUT_S) as response:
                content = b""
                while chunk := response.read1(MAX_BYTES):
                    content += chunk
                    if len(content) > MAX_BYTES or time.monotonic() > deadline:
                        raise NoAnswer("it sends an answer that does not end")
                return response.status, content.decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            error.close()
            return error.code, ""
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            is_late = isinstance(reason, TimeoutError)
            raise NoAnswer(f"no answer within {TIMEOUT_S:.0f} s" if is_late else f"no answer: {reason}") from error

    def answer(self, path: str, headers: dict[str, str], *, method: str = "GET") -> str:
        """Returns the text of an answer with status 200. Raises NoAnswer for any other."""
        status, text = self.request(path, headers, method=method)
        if status != 200:
            raise NoAnswer(f"it answers {status}")
        return text


def ask_aws(service: Service) -> Preemption | None:
    if service.token is None:
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
        service.token = service.answer("/latest/api/token", ttl, method="PUT").strip()
    headers = {"X-aws-ec2-metadata-token": service.token}
    status, text = service.request("/latest/meta-data/spot/instance-action", headers)
    if status == 404:  # the documented answer of a machine that stays
        return None
    if status == 401:  # the token has expired
        service.token = None
        return None
    if status != 200:
        raise NoAnswer(f"it answers {status}")
    action = fields_of(text)
    if not isinstance(action.get("action"), str):
        raise NoAnswer("it answers without an action")
    return Preemption("a preemption notice from AWS", seconds_until(action.get("time")))


def ask_gcp(service: Service) -> Preemption | None:
    text = service.answer("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}).strip()
    if text not in ("TRUE", "FALSE"):
        raise NoAnswer("it answers neither TRUE nor FALSE")
    return Preemption("a preemption notice from Google Cloud", None) if text == "TRUE" else None


def ask_azure(service: Service) -> Preemption | None:
    headers = {"Metadata": "true"}
    events = fields_of(service.answer("/metadata/scheduledevents?api-version=2020-07-01", headers)).get("Events")
    if not isinstance(events, list):
        raise NoAnswer("it answers without a list of events")
    events = [event for event in events if isinstance(event, dict) and event.get("EventType") in LOSING_EVENTS]
    if events and service.vm is None:  # the machines of an availability set get each other's events
        with suppress(NoAnswer):  # an event counts then: a save too many is the smaller loss
            service.vm = service.answer("/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
    for event in events:
        if service.vm is None or service.vm in (event.get("Resources") or [service.vm]):
            kind = str(event["EventType"]).lower()
            return Preemption(f"a notice from Azure ({kind})", seconds_until(event.get("NotBefore")))
    return None


CLOUDS = {
    "aws": Cloud("AWS", 120.0, 5.0, "AWS_EC2_METADATA_SERVICE_ENDPOINT", LINK_LOCAL, ask_aws),
    "gcp": Cloud("Google Cloud", 30.0, 1.0, "GCE_METADATA_HOST", "http://metadata.google.internal", ask_gcp),
    "azure": Cloud("Azure", 30.0, 1.0, "AZURE_POD_IDENTITY_AUTHORITY_HOST", LINK_LOCAL, ask_azure),
}


class NoticeFile:
    """A file whose appearance is a notice. It may hold the seconds that are left; one from before this command does not count."""

    def __init__(self, path: Path):
        self.path = path
        self.started = psutil.Process().create_time()
        self.is_old = self.modified() is not None and not self.is_new()

    def modified(self) -> float | None:
        """Returns the file's time of modification; None while there is no file."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return None

    def is_new(self) -> bool:
        """Whether the file has appeared or changed since this command began."""
        modified = self.modified()
        return modified is not None and modified >= self.started

    def poll(self) -> Preemption | None:
        """Returns the notice, if there is one."""
        if not self.is_new():
            return None
        seconds = None
        with suppress(OSError, ValueError):  # empty, or text for people
            seconds = float(self.path.read_text(encoding="utf-8")[:64])
        is_time = seconds is not None and math.isfinite(seconds) and seconds >= 0
        return Preemption(f"the notice file {self.path}", seconds if is_time else None)


def fields_of(text: str) -> dict[str, object]:
    """Returns a JSON object. Raises NoAnswer for any other text."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise NoAnswer("its answer is not JSON")
    return values


def seconds_until(text: object) -> float | None:
    """Returns the seconds until a time such as 2026-11-23T21:00:00Z or `Mon, 23 Nov 2026 21:00:00 GMT`; None for other text."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        try:
            moment = parsedate_to_datetime(str(text))
        except ValueError:
            return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, moment.timestamp() - time.time())


def check_preempt_options(options: PreemptOptions) -> None:
    """Raises PacelineError for a notice file that could never be seen, and for a time without a notice."""
    if options.preempt_grace_s is not None and not (options.preempt_file or options.preempt_from):
        fix = "--preempt-file PATH or --preempt-from aws"
        raise UsageError("--preempt-grace is the time after a notice, and none is watched for", fix=fix)
    path = options.preempt_file
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        problem = "is a folder" if path.is_dir() else f"cannot appear: {path.absolute().parent} is not a folder"
        raise PacelineError(f"--preempt-file {path} {problem}", fix="the path of a file in a folder that exists")


def notice_seconds(options: PreemptOptions) -> float | None:
    """Returns the seconds between a notice and the end of the machine, as far as they are known before; None if they are not."""
    if options.preempt_grace_s is not None:
        return options.preempt_grace_s
    return CLOUDS[options.preempt_from].seconds if options.preempt_from else None


def seconds_to_save(notice_s: float) -> float:
    """Returns how much of the time of a notice the processes have before they are killed."""
    return max(0.0, notice_s - min(MARGIN_S, MAX_MARGIN * notice_s))


def short_notice(options: PreemptOptions, *, needed_s: float | None) -> str | None:
    """Returns the line that warns of a notice which leaves less time than a checkpoint is expected to need."""
    seconds = notice_seconds(options)
    if seconds is None or needed_s is None or needed_s <= seconds_to_save(seconds):
        return None
    return (
        f"note    a preemption notice leaves {format_duration(seconds)}, a checkpoint is planned to take up to"
        f" {format_duration(needed_s)}: a smaller --save-every loses less where the save is cut off"
    )


@contextmanager
def watch_preemption(
    options: PreemptOptions, on_notice: Callable[[str, float | None], None], on_problem: Callable[[str], None]
) -> Iterator[None]:
    """Watches for notices during the block, from threads that end with it.

    on_notice gets the source of the first notice and the seconds that are left to end in. on_problem gets one line at most for
    each source, where it does not work.
    """
    sources: list[tuple[NoticeFile | Service, float]] = []
    if options.preempt_file:
        sources.append((NoticeFile(options.preempt_file), FILE_POLL_S))
    if options.preempt_from:
        cloud = CLOUDS[options.preempt_from]
        sources.append((Service(cloud), cloud.poll_s))
    ended = threading.Event()

    def take(notice: Preemption) -> None:
        seconds = notice_seconds(options) if notice.seconds_left is None else notice.seconds_left
        on_notice(notice.source, None if seconds is None else seconds_to_save(seconds))

    for source, poll_s in sources:
        arguments = (source, poll_s, ended, take, on_problem)
        threading.Thread(target=follow, args=arguments, name="preemption", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def follow(
    source: NoticeFile | Service,
    poll_s: float,
    ended: threading.Event,
    on_notice: Callable[[Preemption], None],
    on_problem: Callable[[str], None],
) -> None:
    """Asks one source until it has a notice or the block has ended."""
    is_reported = False
    if isinstance(source, NoticeFile) and source.is_old:
        on_problem(f"{source.path} is older than this command: it is no notice until it changes")
    while not ended.is_set():
        try:
            notice = source.poll()
        except NoAnswer as error:
            notice = None
            if not is_reported and isinstance(source, Service):
                is_reported = True
                title, address = source.cloud.title, source.address
                on_problem(f"no preemption notices from {title} at {address} ({error}); it is asked again")
        if notice is not None and not ended.is_set():
            on_notice(notice)
            return
        ended.wait(poll_s)
