"""
`paceline watch --web`: the runs in a browser. Starlette and uvicorn on loopback; one page, and a stream of what is new.

Who may look: whoever has the address with its token, from a page of this server, under a name of loopback. What can be asked:
the page, lists and numbers of runs, the end of a log; nothing writes, and shelf.py alone turns names into files. The page
loads nothing from elsewhere, and its content policy says so to the browser.
"""

import asyncio
import hashlib
import hmac
import mimetypes
import secrets
import socket
import tempfile
import threading
import time
import webbrowser
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request, cookie_parser
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import PacelineError, UsageError
from paceline.watch.concerns import Summary, summary
from paceline.watch.feed import changes, to_text
from paceline.watch.shelf import Shelf, check_links
from paceline.watch.snapshot import Snapshot
from paceline.watch.status import open_reader

STATIC = Path(__file__).parent / "static"
PORT = 8765  # the first that is tried
PORTS_TRIED = 20
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
EVERY_S = 1.0  # how often a stream looks for something new
LIST_EVERY = 3  # so many times EVERY_S
SILENCE_S = 15.0  # after which a stream says that it lives
MAX_COMPARED = 5


def serve(runs_dir: Path, run: Path | None, *, port: int | None, open_browser: bool) -> int:
    """Until Ctrl-C. run: a run folder or a log file to begin with. Returns the exit code."""
    if run is not None:
        open_reader(run)  # says now what is wrong with it, not in the browser
        check_links(run)
    shelf, token, listening = Shelf(runs_dir, run), secrets.token_urlsafe(24), listen(port)
    if run is not None:  # read by the time the browser asks for it
        threading.Thread(target=shelf.read_ahead, args=[run.absolute().name], daemon=True).start()
    number = listening.getsockname()[1]
    address = f"http://127.0.0.1:{number}/?token={token}" + (f"#/run/{quote(run.absolute().name)}" if run else "")
    for link in shelf.refused():
        print(f"not shown: {link} leads out of its run folder")
    print(f"{run or runs_dir} in the browser, until Ctrl-C:\n\n  {address}\n")
    print(f"from another computer: ssh -L {number}:127.0.0.1:{number} THIS_HOST, then the same address", flush=True)
    config = uvicorn.Config(
        app="", log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=2, server_header=False
    )
    server = uvicorn.Server(config)
    config.app = make_app(shelf, token, is_ending=lambda: server.should_exit)
    try:
        with opened(address) if open_browser else nullcontext():
            server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass  # uvicorn has ended well, and passes the signal on
    finally:
        listening.close()
    return 0


@contextmanager
def opened(address: str) -> Iterator[None]:
    """The browser is given a file that leads to the address: every user of this host can read the words of a command.

    The file is this user's alone, and lies in the home folder: a browser in a sandbox reads no other.
    """
    try:
        fd, name = tempfile.mkstemp(prefix="paceline-", suffix=".html", dir=Path.home())
    except OSError as error:
        raise PacelineError(
            f"--open: no file can be made in {Path.home()}: {error.strerror}",
            fix="leave --open out, and open the address that is printed",
        ) from error
    try:
        with open(fd, "w") as file:
            file.write(f'<meta http-equiv="refresh" content="0; url={address}">\n')
        # in a thread: a browser of the terminal returns when it is left, and waits for the server until then
        threading.Thread(target=webbrowser.open, args=[Path(name).as_uri()], daemon=True).start()
        yield
    finally:
        Path(name).unlink(missing_ok=True)


def listen(port: int | None) -> socket.socket:
    """A socket on loopback. port None: the first free one from PORT on."""
    if port is not None and not 0 <= port < 1 << 16:
        raise UsageError(f"--port {port}: not a port", fix="--port 8765, or 0 for any free one")
    for number in range(PORT, PORT + PORTS_TRIED) if port is None else [port]:
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", number))
            listening.listen(64)  # from now on a browser waits, and no other can take the port
            return listening
        except OSError as error:
            listening.close()
            reason = error.strerror
    tried = f"port {port}" if port is not None else f"ports {PORT} to {PORT + PORTS_TRIED - 1}"
    raise PacelineError(
        f"{tried} cannot be listened on: {reason}", fix="paceline watch --web --port 0 takes any free one"
    )


def make_app(shelf: Shelf, token: str, *, is_ending: Callable[[], bool] = lambda: False) -> ASGIApp:
    """Everything under a guard: nothing is answered, not even that something is not there, to who has no token."""
    files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.is_file()}
    routes = [
        Route("/", partial(answer_file, files=files, name="index.html")),
        Route("/static/{name}", partial(answer_file, files=files)),
        Route("/api/runs", partial(answer_runs, shelf=shelf)),
        Route("/api/stream", partial(answer_stream, shelf=shelf, is_ending=is_ending)),
        Route("/api/runs/{run}", partial(answer_run, shelf=shelf)),
        Route("/api/runs/{run}/about", partial(answer_about, shelf=shelf)),
        Route("/api/runs/{run}/log", partial(answer_log, shelf=shelf)),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    return Guard(app, token)


class Guard:
    """Lets nothing through but reading, under an own name, with the token in the address or in the cookie it was changed for."""

    def __init__(self, app: ASGIApp, token: str):
        self.app = app
        self.token = token
        self.cookie = f"paceline_{hashlib.sha256(token.encode()).hexdigest()[:8]}"  # servers on other ports have others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # a websocket; it is closed unanswered
        headers = Headers(scope=scope)
        said = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = MutableHeaders(scope=message)
                added.update(HEADERS)
                if is_same(said, self.token):
                    added["set-cookie"] = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
            await send(message)

        refused = self.refusal(scope["method"], headers, said)
        await (refused or self.app)(scope, receive, send_guarded)

    def refusal(self, method: str, headers: Headers, said: str) -> Response | None:
        """None: let it through."""
        if name_in(headers.get("host", "")) not in OWN_NAMES:
            return PlainTextResponse("This server answers under names of loopback alone.\n", status_code=403)
        if not (is_same(said, self.token) or is_same(self.kept(headers), self.token)):
            words = "The token is missing. Open the whole address that paceline watch has printed.\n"
            return PlainTextResponse(words, status_code=403)
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            return PlainTextResponse("This was asked by a page of another site.\n", status_code=403)
        if method not in ("GET", "HEAD"):
            return PlainTextResponse(
                "There is nothing to write here.\n", status_code=405, headers={"allow": "GET, HEAD"}
            )
        return None

    def kept(self, headers: Headers) -> str:
        """A browser sends the cookies of all ports of 127.0.0.1, in whatever form their servers gave them."""
        return cookie_parser(headers.get("cookie", "")).get(self.cookie, "")


def is_same(said: str, token: str) -> bool:
    return hmac.compare_digest(said.encode(), token.encode())


def name_in(host: str) -> str:
    """localhost:8765 -> localhost; [::1]:80 -> [::1]."""
    return (host if host.endswith("]") else host.rpartition(":")[0] or host).lower()


async def answer_file(request: Request, *, files: dict[str, bytes], name: str | None = None) -> Response:
    name = name or request.path_params["name"]
    if name not in files:
        raise HTTPException(404)
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    return Response(files[name], media_type=kind)


async def answer_runs(request: Request, *, shelf: Shelf) -> Response:
    return as_json(await run_in_threadpool(shelf.runs))


async def answer_run(request: Request, *, shelf: Shelf) -> Response:
    """The whole snapshot, as a stream would begin: for scripts, and for a comparison of runs that have ended."""
    snapshot = await found(shelf.snapshot, request.path_params["run"])
    says = summary(snapshot, now=time.time())
    return as_json({**changes(None, snapshot), "summary": says and asdict(says)})


async def answer_about(request: Request, *, shelf: Shelf) -> Response:
    return as_json(await found(shelf.about, request.path_params["run"]))


async def answer_log(request: Request, *, shelf: Shelf) -> Response:
    """?attempt=1&rank=0, without rank for the launch's own log; &find=TEXT: its lines with that text instead of its end."""
    said, name = request.query_params, request.path_params["run"]
    try:
        attempt, rank = int(said.get("attempt", "")), int(said["rank"]) if "rank" in said else None
    except ValueError:
        raise HTTPException(400, "attempt and rank are numbers") from None
    if text := said.get("find"):
        return as_json(await found(partial(shelf.log_hits, attempt=attempt, rank=rank), name, text[:1000]))
    return as_json(await found(partial(shelf.log_tail, attempt=attempt, rank=rank), name))


async def found(ask: Callable[..., Any], *words: str) -> Any:
    """What the shelf answers; 404 where it has no such run or log, or where its files have just gone."""
    try:
        return await run_in_threadpool(ask, *words)
    except (KeyError, OSError, PacelineError):
        raise HTTPException(404) from None


def as_json(value: Any) -> Response:
    return Response(to_text(value), media_type="application/json")


async def answer_stream(request: Request, *, shelf: Shelf, is_ending: Callable[[], bool]) -> Response:
    """?run=A&run=B: what is new of each; without a run: the list of runs."""
    names = request.query_params.getlist("run")[:MAX_COMPARED]
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    told = stream_runs(shelf, names) if names else stream_list(shelf)
    return StreamingResponse(as_events(told, is_ending), media_type="text/event-stream")


async def as_events(told: AsyncIterator[dict[str, Any] | None], is_ending: Callable[[], bool]) -> AsyncIterator[str]:
    """Server-sent events: a message for what is new, and now and then a comment, by which a closed page is noticed."""
    last = time.monotonic()
    async for message in told:
        if is_ending():
            return
        if message is not None:
            yield f"data: {to_text(message)}\n\n"
            last = time.monotonic()
        elif time.monotonic() - last > SILENCE_S:
            yield ": nothing new\n\n"
            last = time.monotonic()


async def stream_runs(shelf: Shelf, names: list[str]) -> AsyncIterator[dict[str, Any] | None]:
    """Messages {run, now, head?, parts?, curves?}, the first of each run whole; {run, gone} where it is not there."""
    sent: dict[str, tuple[Snapshot, Summary | None]] = {}
    gone: set[str] = set()
    while True:
        for name in names:
            try:
                snapshot = await run_in_threadpool(shelf.snapshot, name)
            except (KeyError, OSError, PacelineError):
                if name not in gone:
                    yield {"run": name, "gone": True}
                gone.add(name)
                sent.pop(name, None)
                continue
            now = time.time()
            before, said = sent.get(name, (None, None))
            told, says = changes(before, snapshot), summary(snapshot, now=now)
            if says != said:
                told["summary"] = says and asdict(says)
            if told:
                yield {"run": name, "now": now, "whole": before is None, **told}
            sent[name] = snapshot, says
            gone.discard(name)
        yield None
        await asyncio.sleep(EVERY_S)


async def stream_list(shelf: Shelf) -> AsyncIterator[dict[str, Any] | None]:
    """Messages {runs, now} as the list changes."""
    sent: list[dict[str, Any]] | None = None
    while True:
        runs = await run_in_threadpool(shelf.runs)
        if runs != sent:
            yield {"runs": runs, "now": time.time()}
        sent = runs
        for _ in range(LIST_EVERY):  # an end is noticed meanwhile
            yield None
            await asyncio.sleep(EVERY_S)
