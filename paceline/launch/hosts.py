"""
The hosts of a launch: the list that `--hosts` gives, and the facts of each, over ssh.

Nothing needs to be installed on the other hosts but Python, torch and an ssh server that takes a key: the package itself travels,
by content hash, into ~/.cache/paceline/code there. The connection is the system's OpenSSH with the user's own config, keys and
agent; host keys are always checked, and no question is ever asked. One line of Python at the far end (BOOTSTRAP) answers with JSON
lines, so no shell of another host has to quote anything.
"""

import getpass
import hashlib
import io
import json
import re
import select
import shlex
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any

import psutil

from paceline.check.verdicts.rules import Facts
from paceline.errors import PacelineError, UsageError
from paceline.launch.agent import Lines
from paceline.rundir import utc_now

EXAMPLE = (
    "--hosts ada,bob, user@ada, ada:2 for two ranks there, node[1-4], [fe80::1], or a file with one host on each line"
)
MAX_HOSTS = 1024
ENTRY = re.compile(
    r"(?:(?P<user>[^@\s:]+)@)?(?:\[(?P<ipv6>[0-9A-Fa-f:.%\w]*:[^\]]*)\]|(?P<host>[^:@]+))(?::(?P<nproc>\d+))?"
)
FILE_LINE = re.compile(r"(?P<entry>\S+)(?:\s+slots\s*=\s*(?P<slots>\d+))?")
UNSAFE = re.compile(r"^-|[\s'\"`$&|;<>(){}\\!*?\[\]]|[^ -~\w]")  # in a host's or a user's name
RANGE = re.compile(r"\[([\d,-]+)\]")

CONNECT_S = 5
ANSWER_S = 60.0  # the slowest probe has 30, and the code may have to be sent first
SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", f"ConnectTimeout={CONNECT_S}",
       "-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3", "-o", "ClearAllForwardings=yes")  # fmt: skip
PACKAGE = Path(__file__).resolve().parents[1]
NO_PYTHON = 127
SSH_FAILED = 255
MAX_STDERR_BYTES = 1 << 16

# Runs at the far end: takes the code's hash and size, asks for what it lacks, and runs a module with the remaining input.
# OSError and a Python that is too old are answers like any other.
BOOTSTRAP = """
import hashlib, io, json, os, pathlib, runpy, sys, tarfile, tempfile
def say(**line): print(json.dumps(line), flush=True)
def main(digest, size, module):
    if sys.version_info < (3, 11): return say(error="Python %d.%d" % sys.version_info[:2], kind="python")
    root = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "paceline", "code")
    code = root / digest
    try:
        here = code.is_dir()
        say(have=here)
        if not here:
            data = sys.stdin.buffer.read(size)
            if hashlib.sha256(data).hexdigest() != digest: return say(error="the code was not received whole", kind="lost")
            root.mkdir(parents=True, exist_ok=True)
            part = tempfile.mkdtemp(dir=root)
            tarfile.open(fileobj=io.BytesIO(data)).extractall(part, filter="data")
            try: os.rename(part, code)
            except OSError:
                if not code.is_dir(): raise
    except OSError as error: return say(error="%s: %s" % (error.strerror, error.filename or root), kind="disk")
    sys.path.insert(0, str(code)); os.environ["PYTHONPATH"] = str(code)
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__")
"""

# what ssh prints -> what is wrong, and the fix; {to} is the destination, {name} the host as ssh looks it up
SSH_ERRORS = (
    (r"Could not resolve hostname", "no host of this name is known",
     "check the name; ~/.ssh/config can give it an address: Host {name}, HostName ADDRESS"),
    (r"HOST IDENTIFICATION HAS CHANGED|[Hh]ost key for \S+ has changed",
     "its host key is not the one that was accepted before: another machine answers, or it was installed again",
     "if it was installed again: ssh-keygen -R {name} && ssh {to} true"),
    (r"Host key verification failed|No \w+ host key is known", "its host key is not known here",
     "ssh {to} true, and compare the fingerprint that it shows"),
    (r"Permission denied", "it refuses this user's keys", "ssh-copy-id {to}"),
    (r"Too many authentication failures", "the ssh agent offers too many keys",
     "name the key in ~/.ssh/config: Host {name}, IdentityFile FILE, IdentitiesOnly yes"),
    (r"Connection refused", "no ssh server answers there", "on {name}: sudo apt install openssh-server"),
    (r"timed out|No route to host|Network is unreachable|Host is down|not responding", "it cannot be reached",
     "see that it is on and in this network: ping {name}"),
    (r"[Bb]ad configuration option|bad configuration", "ssh's own configuration is wrong", "ssh {to} true shows where"),
)  # fmt: skip


@dataclass(frozen=True)
class HostEntry:
    """One host of the list."""

    host: str  # a name, an alias of ~/.ssh/config, or an address
    user: str | None = None
    nproc: int | None = None  # ranks there

    @property
    def destination(self) -> str:
        return self.host if self.user is None else f"{self.user}@{self.host}"


def parse_hosts(text: str) -> list[HostEntry]:
    """Returns the hosts that --hosts names, or that the file names which it gives; raises UsageError, also for duplicates."""
    path = Path(text)
    if path.is_file():
        entries = [entry for number, line in host_lines(path) for entry in parse_line(line, f"{path}:{number}")]
        empty = f"{path} names no host"
    elif "/" in text:
        raise UsageError(f"{text}: no such file", fix=EXAMPLE)
    else:
        words = [word.strip() for word in re.split(r",(?![^\[]*\])", text)]
        entries = [entry for word in words if word for entry in parse_entry(word, "--hosts")]
        empty = "--hosts names no host"
    if not entries:
        raise UsageError(empty, fix=EXAMPLE)
    for entry in entries:
        if sum(other.host == entry.host for other in entries) > 1:
            raise UsageError(f"{entry.host} is listed twice", fix=f"once, with its ranks: {entry.destination}:2")
    return entries


def ranks_of(entries: Sequence[HostEntry]) -> int | None:
    """Returns the ranks on each host, None where the list names none; raises UsageError where hosts have different numbers."""
    first = entries[0]
    for entry in entries:
        if entry.nproc != first.nproc:
            words = [f"{name.host} has {name.nproc or 'no number of'} ranks" for name in (first, entry)]
            raise UsageError(", ".join(words), fix="the same number on every host, or --nproc N for all")
    return first.nproc


def host_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields number and text of each line of a host file that is not empty or a comment."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", fix="a text file with one host on each line") from error
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].strip():
            yield number, words


def parse_line(line: str, place: str) -> list[HostEntry]:
    match = FILE_LINE.fullmatch(line)
    if match is None:
        raise UsageError(f"{place}: {line!r} is not a host", fix="HOST, HOST:2 or HOST slots=2 on each line")
    suffix = f":{match['slots']}" if match["slots"] else ""
    return parse_entry(match["entry"] + suffix, place)


def parse_entry(word: str, place: str) -> list[HostEntry]:
    """Returns the hosts of one word; a range stands for several."""
    entries = []
    for name in expand_range(word, place):
        match = ENTRY.fullmatch(name)
        host = match and (match["ipv6"] or match["host"])
        if not match or not host or UNSAFE.search(host) or UNSAFE.search(match["user"] or ""):
            ipv6 = f"an IPv6 address stands in brackets: [{word}]; " if word.count(":") > 1 and "[" not in word else ""
            raise UsageError(f"{place}: {word!r} is not a host", fix=ipv6 + EXAMPLE)
        nproc = int(match["nproc"]) if match["nproc"] else None
        if nproc is not None and not 1 <= nproc <= 64:
            raise UsageError(f"{place}: {nproc} ranks on {host}", fix="1 to 64 ranks on a host")
        entries.append(HostEntry(host, match["user"], nproc))
    return entries


def expand_range(word: str, place: str) -> list[str]:
    """Returns node1 to node4 for node[1-4]; leading zeros stay: node[08-10]."""
    match = RANGE.search(word)
    if match is None:
        return [word]
    numbers: list[str] = []
    for part in match[1].split(","):
        low, _, high = part.partition("-")
        if not low.isdecimal() or not (high or low).isdecimal() or int(high or low) < int(low):
            raise UsageError(f"{place}: {match[0]} in {word!r} is not a range", fix="node[1-4], node[01-04,7]")
        if int(high or low) - int(low) + len(numbers) >= MAX_HOSTS:
            raise UsageError(f"{place}: {word!r} stands for more than {MAX_HOSTS:,} hosts", fix="node[1-4]")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return [word[: match.start()] + number + word[match.end() :] for number in numbers]


def is_this_host(entry: HostEntry) -> bool:
    """Whether the entry is the host that this process runs on, as the same user: it needs no ssh."""
    if entry.user is not None and entry.user != getpass.getuser():
        return False
    name = socket.gethostname()
    if entry.host in ("localhost", "127.0.0.1", "::1", name, name.partition(".")[0]):
        return True
    own = {address.address.partition("%")[0] for nics in psutil.net_if_addrs().values() for address in nics}
    with suppress(OSError):
        addresses = socket.getaddrinfo(ssh_name(entry), None, type=socket.SOCK_STREAM)
        return any(address[0] in own for *_, address in addresses)
    return False


def ssh_name(entry: HostEntry) -> str:
    """Returns the name or address that ssh looks up for the entry: HostName of ~/.ssh/config, or the entry itself."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["ssh", "-G", "--", entry.destination]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=CONNECT_S, check=True).stdout
        return dict(line.partition(" ")[::2] for line in answer.splitlines()).get("hostname") or entry.host
    return entry.host


def hosts_asker(
    entries: Sequence[HostEntry], *, python: str | None, port: int | None
) -> Callable[[Callable[[], Facts]], list[Facts]]:
    """Returns a function that gathers the facts of all these hosts at once; it takes one for the host that it runs on.

    A host that does not answer has facts that say why. python: the interpreter on the other hosts; None: the path of this process's
    one, else python3.
    """

    def gather(entry: HostEntry, gather_here: Callable[[], Facts]) -> Facts:
        connection = {"destination": entry.destination, "error": None, "fix": None}
        try:
            facts = gather_here() if is_this_host(entry) else ask_host(entry, {"port": port}, python=python)
        except PacelineError as error:
            return {"connection": {**connection, "error": error.message, "fix": error.fix}}
        return {**facts, "connection": connection, "received": utc_now()}

    def gather_all(gather_here: Callable[[], Facts]) -> list[Facts]:
        with ThreadPoolExecutor(max_workers=min(32, len(entries))) as pool:
            return list(pool.map(gather, entries, repeat(gather_here)))

    return gather_all


def ask_host(entry: HostEntry, request: Mapping[str, Any], *, python: str | None) -> Facts:
    """Returns the facts that another host answers; raises PacelineError with a fix where it does not."""
    with RemoteModule(entry, "paceline.check.probes.facts", python=python) as remote:
        return remote.run(json.dumps(request, default=str).encode())


class RemoteModule:
    """A module of this package that runs on another host, with pipes to its stdin and stdout."""

    def __init__(self, entry: HostEntry, module: str, *, python: str | None):
        self.entry, self.module = entry, module
        self.deadline = time.monotonic() + ANSWER_S
        self.python = [python] if python else [sys.executable, "python3"]
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed with this object
        try:
            self.process = subprocess.Popen(
                [*SSH, "--", entry.destination, remote_command(self.python)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.stderr,
                bufsize=0,
                start_new_session=True,  # Ctrl-C reaches this process, which ends the connection
            )
        except FileNotFoundError as error:
            raise PacelineError("ssh is not installed here", fix="sudo apt install openssh-client") from error
        assert self.process.stdout is not None
        self.lines, self.waiting = Lines(self.process.stdout.fileno()), list[dict[str, Any]]()

    def run(self, request: bytes) -> dict[str, Any]:
        """Sends the code where it is absent, then the module's whole input; returns the JSON line that the module prints."""
        digest, archive = code_archive()
        source = f"{BOOTSTRAP}\nmain({digest!r}, {len(archive)}, {self.module!r})"
        self.send(f"exec({source!r})\n".encode())
        if not self.next_line()["have"]:
            self.send(archive)
        self.send(request)
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.next_line()

    def send(self, chunk: bytes) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the reason stands on stderr
            self.process.stdin.write(chunk)

    def next_line(self) -> dict[str, Any]:
        """Returns the next JSON line from the other host; raises PacelineError if it reports an error, ends or says nothing."""
        while not self.waiting:
            seconds = self.deadline - time.monotonic()
            if seconds <= 0 or not select.select([self.lines.fd], [], [], seconds)[0]:
                fix = f"ssh {shlex.quote(self.entry.destination)} uptime shows how busy it is"
                raise PacelineError(f"no answer in {ANSWER_S:.0f} s", fix=fix)
            self.waiting += self.lines.read()
            if self.lines.ended and not self.waiting:
                raise self.failure()
        line = self.waiting.pop(0)
        if "kind" in line:
            raise self.refusal(line)
        return line

    def refusal(self, answer: Mapping[str, Any]) -> PacelineError:
        """The error that BOOTSTRAP has reported."""
        text = answer.get("error")
        if answer.get("kind") == "python":
            return PacelineError(f"{text} there, 3.11 or later is needed", fix="--python PATH of a later one there")
        if answer.get("kind") == "disk":
            return PacelineError(
                f"it could not keep the code: {text}", fix=f"ssh {self.entry.destination} df -h ~/.cache"
            )
        return PacelineError(str(text), fix="repeat the command")

    def failure(self) -> PacelineError:
        """The error of a connection or an interpreter that ended without an answer."""
        self.close()
        self.stderr.seek(0)
        stderr = self.stderr.read(MAX_STDERR_BYTES).decode(errors="replace").strip()
        to = shlex.quote(self.entry.destination)
        if self.process.returncode == NO_PYTHON:
            names = " or ".join(self.python)
            return PacelineError(f"no {names} there", fix="--python PATH of an interpreter with torch there")
        for pattern, what, fix in SSH_ERRORS if self.process.returncode == SSH_FAILED else ():
            if re.search(pattern, stderr):
                return PacelineError(what, fix=fix.format(to=to, name=ssh_name(self.entry)))
        last = stderr.splitlines()[-1:] or [f"ssh ended with exit code {self.process.returncode}"]
        return PacelineError(last[0].strip(), fix=f"ssh {to} true")

    def close(self) -> None:
        """Ends the connection; the module at the far end loses its stdin and stdout."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> "RemoteModule":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.stderr.close()


def remote_command(interpreters: Sequence[str]) -> str:
    """Returns the command for the login shell there, whichever it is: sh runs the first interpreter that exists."""
    run = "exec(__import__('sys').stdin.buffer.readline())"
    tries = [
        f"command -v {shlex.quote(path)} >/dev/null 2>&1 && exec {shlex.quote(path)} -c {shlex.quote(run)}"
        for path in interpreters
    ]
    return f"exec sh -c {shlex.quote('; '.join([*tries, f'exit {NO_PYTHON}']))}"


@cache
def code_archive() -> tuple[str, bytes]:
    """Returns the package as a tar file, and its SHA-256. The same files give the same bytes."""
    paths = sorted(path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in paths:
            member = tarfile.TarInfo(str(Path(PACKAGE.name, path.relative_to(PACKAGE))))
            member.size, member.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                archive.addfile(member, file)
    data = buffer.getvalue()
    return hashlib.sha256(data).hexdigest(), data
