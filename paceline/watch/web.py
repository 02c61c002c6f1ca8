"""
Serves `paceline watch --web`: Starlette and uvicorn on loopback, one page, and a stream of what is new.

Access needs the token in the address, a request from a page of this server, and a host name of loopback. Every address lies below
a folder that nobody can guess, so that the browser sends the cookie to no other port. A request can read the page, lists and
numbers of runs, and the end of a log. Nothing writes, and only status.py turns names into files. The page loads nothing from
elsewhere, and its content policy enforces that in the browser.
"""

import asyncio
import hashlib
import hmac
import secrets
import signal
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import PacelineError
from paceline.units import format_number_of
from paceline.watch.about import check_links, format_evaluation, short_texts
from paceline.watch.connections import TimedConnection, listen, opened_browser
from paceline.watch.panels import log_levels, run_panels, run_row, seed_groups
from paceline.watch.snapshot import Evaluation, Snapshot, changes, to_text
from paceline.watch.status import Shelf, open_reader
from paceline.watch.summary import summarize

Messages = AsyncIterator[dict[str, Any] | None]  # None: nothing new

STATIC = Path(__file__).parent / "static"
OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")  # under which a browser reaches loopback, directly or through a tunnel
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
BACKLOG = 32  # connections that are accepted at once
EVERY_S = 1.0  # between two reads of a stream
LIST_EVERY = 3  # reads of the list of runs, in multiples of EVERY_S
SILENCE_S = 15.0  # without news, after which a stream sends a comment
MAX_COMPARED = 16
COMPARED_PANELS = ("head", "fields", "figures")  # what a comparison shows of a run, beside its curves
MISSING = (KeyError, OSError, PacelineError)  # raised by reading a run that does not exist, or no longer does


class SameObject:
    """A snapshot as the key of a cache: equal to itself alone, without a look at what it holds."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and other.value is self.value


def serve(shelf: Shelf, run: Path | None, *, port: int | None, open_browser: bool) -> int:
    """Serves the page until Ctrl-C and returns the exit code. run: a run folder or a log file to open with."""
    if run is not None:
        open_reader(run)  # reports a wrong path here, not in the browser
        check_links(run)
    token, listening = secrets.token_urlsafe(24), listen(port)
    if run is not None:  # the run is read while the browser opens the page
        threading.Thread(target=shelf.read_ahead, args=[run.absolute().name], daemon=True).start()
    number = listening.getsockname()[1]
    address = f"http://127.0.0.1:{number}{folder_of(token)}?token={token}" + (
        f"#/run/{quote(run.absolute().name)}" if run else ""
    )
    for link in shelf.refused():
        print(f"not shown: {link} leads out of its run folder")
    print(f"{run or shelf.runs_dir} in the browser, until Ctrl-C:\n\n  {address}\n")
    print(f"from another computer: ssh -L {number}:127.0.0.1:{number} THIS_HOST, then the same address", flush=True)
    server = make_server(shelf, token)
    # uvicorn handles the signal and raises it again once it has shut down
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with opened_browser(address) if open_browser else nullcontext():
            server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass  # uvicorn has shut down and re-raises the signal
    finally:
        listening.close()
    return 0


def make_server(shelf: Shelf, token: str) -> uvicorn.Server:
    """Returns the server, which is yet to run on a listening socket."""
    config = uvicorn.Config(
        app="", http=TimedConnection, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=2,
        server_header=False, backlog=BACKLOG,
    )  # fmt: skip
    server = uvicorn.Server(config)
    config.app = make_app(shelf, token, is_ending=lambda: server.should_exit)
    return server


def make_app(shelf: Shelf, token: str, *, is_ending: Callable[[], bool]) -> ASGIApp:
    """Returns the server behind its guard: without the token, nobody learns even what does not exist."""

    def whole_run(name: str) -> dict[str, Any]:
        """Returns the whole snapshot, as a stream begins: for scripts, and to compare runs that have ended."""
        snapshot = shelf.snapshot(name)
        return {**changes(None, snapshot), **readings_of(SameObject(snapshot))}

    routes = [  # what is no coroutine is answered in a thread
        Route("/", lambda _: FileResponse(STATIC / "index.html")),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/api/runs", lambda _: as_json(listed(shelf))),
        Route("/api/settings", lambda _: as_json(shelf.settings())),
        Route("/api/stream", partial(answer_stream, shelf=shelf, is_ending=is_ending)),
        Route("/api/runs/{run}", lambda request: as_json(whole_run(request.path_params["run"]))),
        Route("/api/runs/{run}/about", lambda request: as_json(shelf.about(request.path_params["run"]))),
        Route("/api/runs/{run}/metrics.csv", lambda request: as_table(shelf, request.path_params["run"])),
        Route("/api/runs/{run}/log", lambda request: as_json(log_answer(request, shelf))),
    ]
    # the shelf has no such run or log, or its files were just deleted
    not_found = dict.fromkeys(MISSING, lambda *_: PlainTextResponse("Not Found", status_code=404))
    app = Starlette(
        routes=[Mount(folder_of(token).rstrip("/"), Router(routes, redirect_slashes=False))],
        exception_handlers=not_found,
    )
    app.router.redirect_slashes = False
    return guard(GZipMiddleware(app, compresslevel=1), token)


def folder_of(token: str) -> str:
    """Returns the folder of all addresses, which does not reveal the token. A page of another port cannot guess it."""
    return f"/{hashlib.sha256(b'folder ' + token.encode()).hexdigest()[:24]}/"


def guard(app: ASGIApp, token: str) -> ASGIApp:
    """Passes on only reading requests to a name of loopback that have the token, in the address or in the cookie."""
    cookie = f"paceline_{hashlib.sha256(token.encode()).hexdigest()[:8]}"  # servers on other ports use other names

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # a websocket: closed without an answer
        request = Request(scope)
        # a browser sends the cookies of all ports of 127.0.0.1, some malformed
        candidates = request.query_params.get("token", ""), request.cookies.get(cookie, "")
        # in constant time, so that the time of an answer reveals nothing of the token
        in_address, in_cookie = (hmac.compare_digest(text.encode(), token.encode()) for text in candidates)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if in_address:  # without a path it is that of the page's folder, also where a proxy puts one before it
                    headers["set-cookie"] = f"{cookie}={token}; HttpOnly; SameSite=Strict"
            await send(message)

        refusal = refused(request, has_token=in_address or in_cookie)
        await (refusal or app)(scope, receive, send_guarded)

    return guarded


def refused(request: Request, *, has_token: bool) -> Response | None:
    """Returns why a request is refused; None lets it through."""
    headers = request.headers
    if name_in(headers.get("host", "")) not in OWN_NAMES:
        return PlainTextResponse("This server answers only to localhost, 127.0.0.1 and [::1].\n", status_code=403)
    if not has_token:
        text = "The token is missing. Open the whole address that paceline watch printed.\n"
        return PlainTextResponse(text, status_code=403)
    if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
        return PlainTextResponse("This request came from a page of another site.\n", status_code=403)
    if request.method not in ("GET", "HEAD"):
        return PlainTextResponse("This server only reads.\n", status_code=405, headers={"allow": "GET, HEAD"})
    return None


def name_in(host: str) -> str:
    """Returns the name in a host header: localhost:8765 -> localhost; [::1]:80 -> [::1]."""
    return (host if host.endswith("]") else host.rpartition(":")[0] or host).lower()


def log_answer(request: Request, shelf: Shelf) -> dict[str, Any]:
    """Returns a part of a log, or with &find=TEXT its lines with that text. Without &rank: the launch's, or a host's &name.

    The part is the end of the log, or it begins at the byte &from, ends at the byte &to, or is around the line &line.
    """
    query, name = request.query_params, request.path_params["run"]
    try:
        rank = int(query["rank"]) if "rank" in query else None
        log: dict[str, Any] = {"attempt": int(query.get("attempt", "")), "rank": rank, "log_name": query.get("name")}
        places = {"from": "start", "to": "stop", "line": "line"}
        place = {places[key]: max(0, int(query[key])) for key in places if key in query}
    except ValueError:
        raise HTTPException(400, "attempt, rank, from, to and line are numbers") from None
    if text := query.get("find"):
        answer = shelf.log_hits(name, text[:1000], **log)
        lines, part = [line for _, line in answer["hits"]], "" if answer["all"] else "the last "
        note = f"{part}{format_number_of(len(lines), 'line')} with this text" if lines else "No line has this text."
        return {**answer, "levels": log_levels(lines), "note": note}
    answer = shelf.log_part(name, **log | place)
    return {**answer, "levels": log_levels(answer["text"].split("\n"))}


def as_table(shelf: Shelf, name: str) -> Response:
    """Returns metrics.jsonl whole, as CSV to save."""
    headers = {"content-disposition": f"attachment; filename*=utf-8''{quote(name)}-metrics.csv"}
    return StreamingResponse(shelf.metrics_table(name), media_type="text/csv", headers=headers)


def as_json(value: Any) -> Response:
    return Response(to_text(value), media_type="application/json")


async def answer_stream(request: Request, *, shelf: Shelf, is_ending: Callable[[], bool]) -> Response:
    """Streams what is new of the runs in the query (?run=A&run=B); without a run, the list of runs."""
    names = request.query_params.getlist("run")[:MAX_COMPARED]
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    events = as_events(stream_runs(shelf, names) if names else stream_list(shelf), is_ending)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return StreamingResponse(events, media_type="text/event-stream")
    headers = {"content-encoding": "gzip", "vary": "accept-encoding"}
    return StreamingResponse(compressed(events), media_type="text/event-stream", headers=headers)


async def compressed(events: AsyncIterator[str]) -> AsyncIterator[bytes]:
    """Yields the events as gzip, each of them whole at once; starlette's middleware would hold them back."""
    packer = zlib.compressobj(level=1, wbits=16 + zlib.MAX_WBITS)
    async for event in events:
        yield packer.compress(event.encode()) + packer.flush(zlib.Z_SYNC_FLUSH)


async def as_events(messages: Messages, is_ending: Callable[[], bool]) -> AsyncIterator[str]:
    """Yields server-sent events: the messages, and a comment now and then, which fails once the page is closed."""
    last = time.monotonic()
    async for message in messages:
        if is_ending():
            return
        if message is not None or time.monotonic() - last > SILENCE_S:
            yield ": nothing new\n\n" if message is None else f"data: {to_text(message)}\n\n"
            last = time.monotonic()


async def stream_runs(shelf: Shelf, names: list[str]) -> Messages:
    """Yields {run, now, head?, parts?, curves?, summary?, panels?} as a run changes; {run, gone, why?} without one.

    The first message of a run is marked `whole`. Before it, a run that takes long to read sends the panels of its last figures.
    """
    sent: dict[str, tuple[Snapshot, dict[str, Any]] | None] = {}  # None: a run that is gone
    for name in names:
        with suppress(*MISSING):  # reported below
            if glimpse := await run_in_threadpool(shelf.glimpse, name):
                panels = run_panels(glimpse, now=time.time())  # nothing is judged before the whole is read
                first = {"head": {**panels["head"], "summary": None}, "tiles": panels["tiles"]}
                yield {"run": name, "now": time.time(), "panels": first}
    while True:
        for name in names:
            try:
                snapshot = await run_in_threadpool(shelf.snapshot, name)
            except MISSING as error:
                if sent.get(name, True):
                    why = error.message if isinstance(error, PacelineError) else None
                    yield {"run": name, "gone": True, **({"why": why} if why else {})}
                sent[name] = None
                continue
            now = time.time()
            before, shown = sent.get(name) or (None, {})
            current = readings_of(SameObject(snapshot))
            news = dict(changes_between(SameObject(before), SameObject(snapshot)))
            if before is None or shown["summary"] != current["summary"]:
                news["summary"] = current["summary"]
            panels = current["panels"]
            if len(names) > 1:
                news, panels = lean(news), {key: current["panels"][key] for key in COMPARED_PANELS}
            if new_panels := {
                key: panel for key, panel in panels.items() if before is None or shown["panels"][key] != panel
            }:
                news["panels"] = new_panels
            if news:
                yield {"run": name, "now": now, "whole": before is None, **news}
            sent[name] = snapshot, current
        yield None
        await asyncio.sleep(EVERY_S)


@lru_cache(maxsize=8)
def readings_of(snapshot: SameObject) -> dict[str, Any]:
    """Returns the texts of a page: the summary and the panels. Streams that show the same snapshot share them."""
    now, verdict = time.time(), summarize(snapshot.value, now=time.time())
    return {"summary": verdict and asdict(verdict), "panels": run_panels(snapshot.value, now=now)}


@lru_cache(maxsize=8)
def changes_between(before: SameObject, after: SameObject) -> dict[str, Any]:
    """Returns what is new of a snapshot; most streams have the same one before it."""
    return changes(before.value, after.value)


def lean(news: dict[str, Any]) -> dict[str, Any]:
    """Returns what a comparison needs of the changes: no curves of ranks and devices, no events, no logs."""
    curves = {group: points for group, points in news.get("curves", {}).items() if group == "series"}
    return {key: value for key, value in {**news, "parts": {}, "curves": curves}.items() if value}


def listed(shelf: Shelf) -> list[dict[str, Any]]:
    """Returns the runs with the texts of their rows, and of their group where others differ only in their seed."""
    runs = shelf.runs()
    groups = seed_groups(runs, shelf.settings())
    texts = short_texts(run["eval_text"] for run in runs if run["eval_text"])
    results = {run["name"]: Evaluation(**run["eval"]) for run in runs if run.get("eval")}
    titles = short_texts(result.title for result in results.values())
    rows = {}
    for run in runs:
        result = results.get(run["name"])
        rows[run["name"]] = {
            **run_row({**run, "eval_text": texts.get(run["eval_text"])}),
            "eval": format_evaluation(result, step=run["step"]),
            "eval_of": titles[result.title] if result else "n/a",
        }
    return [{**run, "texts": rows[run["name"]], "group": groups.get(run["name"])} for run in runs]


async def stream_list(shelf: Shelf) -> Messages:
    """Yields {runs, now} when the list changes."""
    sent: list[dict[str, Any]] | None = None
    while True:
        if (runs := await run_in_threadpool(listed, shelf)) != sent:
            yield {"runs": runs, "now": time.time()}
        sent = runs
        for _ in range(LIST_EVERY):  # in short sleeps, so that the end of the server is noticed
            yield None
            await asyncio.sleep(EVERY_S)
