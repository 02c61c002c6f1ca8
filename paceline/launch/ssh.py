"""
A module of this package as a process on another host, over the system's OpenSSH, with JSON lines on its stdin and stdout.

The connection uses the user's own config, keys and agent; host keys are always checked, and no question is ever asked. Nothing of
paceline has to be installed there: the package travels, by content hash, into ~/.cache/paceline/code. What runs first at the far
end is one line of Python (BOOTSTRAP) that comes through stdin, so no shell of another host has to quote anything.
"""

import hashlib
import io
import json
import os
import re
import select
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from paceline.config import CACHE_SPACE
from paceline.errors import PacelineError
from paceline.launch.channel import Lines
from paceline.units import format_list

CONNECT_S = 5
ANSWER_S = 140.0  # the slowest probe has 30, four times that on a busy host, and the code may have to be sent first
END_S = 1.0
SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", f"ConnectTimeout={CONNECT_S}",
       "-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3", "-o", "ClearAllForwardings=yes")  # fmt: skip
PACKAGE = Path(__file__).resolve().parents[1]
NO_PYTHON = 127
SSH_FAILED = 255
MAX_STDERR_BYTES = 1 << 16
# the socket of sshd: since OpenSSH 10.1 in the home folder, before that with the same name as that of ssh-agent
FORWARDED_AGENT = re.compile(r"/ssh-\w+/agent\.\d+$|/\.ssh/agent/s\.\w+\.sshd\.\w+$")

# Runs at the far end: takes the code's hash and size, asks for what it lacks, and runs a module with the remaining input.
# OSError and a Python that is too old are answers like any other.
BOOTSTRAP = """
import hashlib, io, json, os, pathlib, runpy, shutil, sys, tarfile, tempfile
def say(**line): print("\\n" + json.dumps(line), flush=True)  # a login may have printed half a line
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
            try:
                safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 and later
                tarfile.open(fileobj=io.BytesIO(data)).extractall(part, **safely)
                os.rename(part, code)
            except OSError:
                shutil.rmtree(part, ignore_errors=True)
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
    (r"Timeout, server .* not responding", "the connection stood still: the host was lost, or large packets are",
     "ping {name}, then ping -M do -s 1472 {name}: where it fails alone, set a smaller MTU on both"),
    (r"timed out|No route to host|Network is unreachable|Host is down", "it cannot be reached",
     "see that it is on and in this network: ping {name}; if it answers, ping -M do -s 1472 {name} tries the MTU"),
    (r"[Bb]ad configuration option|bad configuration", "ssh's own configuration is wrong", "ssh {to} true shows where"),
)  # fmt: skip


class ModuleProcess:
    """A process that reads and writes JSON lines; it ends when its stdin does."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str] | None = None):
        self.deadline = time.monotonic() + ANSWER_S
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed with this object
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            bufsize=0,
            env=env,
            start_new_session=True,  # Ctrl-C reaches this process, which ends that one
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.lines, self.waiting = Lines(self.stdout.fileno()), list[dict[str, Any]]()

    def send(self, line: Mapping[str, Any]) -> None:
        self.write(json.dumps(line, default=str).encode() + b"\n")

    def write(self, chunk: bytes) -> None:
        with suppress(BrokenPipeError):  # the reason stands on stderr
            self.stdin.write(chunk)

    def next_line(self) -> dict[str, Any]:
        """Returns the next JSON line; raises PacelineError if the process ends or says nothing until the deadline."""
        while not self.waiting:
            seconds = self.deadline - time.monotonic()
            if seconds <= 0 or not select.select([self.lines.fd], [], [], seconds)[0]:
                raise PacelineError(f"no answer in {ANSWER_S:.0f} s", fix="see how busy it is: uptime")
            self.waiting += self.lines.read()
            if self.lines.ended and not self.waiting:
                raise self.failure()
        return self.waiting.pop(0)

    def failure(self) -> PacelineError:
        """Returns the error of a process that ended without an answer."""
        self.close()
        return PacelineError(self.last_error() or f"exit code {self.process.returncode}", fix="repeat the command")

    def all_errors(self) -> str:
        self.stderr.seek(0)
        return self.stderr.read(MAX_STDERR_BYTES).decode(errors="replace")

    def last_error(self) -> str:
        lines = self.all_errors().strip().splitlines()
        return lines[-1].strip() if lines else ""

    def close(self) -> None:
        """Ends the process, at the far end too: it loses its stdin and stdout."""
        self.stdin.close()
        self.stdout.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        """Ends the link at once; what runs at the far end notices that its stdin has ended."""
        self.process.kill()
        self.__exit__()

    def __enter__(self) -> "ModuleProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.stderr.close()


class FarModule(ModuleProcess):
    """A module of this package on another host, by a command that starts a process there and passes its stdin and stdout on.

    command_of: the command for interpreters, of which it takes the first that exists there. destination: what the host is called in
    a fix. python: the interpreter there; None: as here, else python3.
    """

    def __init__(
        self,
        command_of: Callable[[list[str]], Sequence[str]],
        destination: str,
        module: str,
        *,
        python: str | None,
        env: Mapping[str, str] | None = None,
    ):
        self.destination, self.interpreters = destination, [python] if python else [sys.executable, "python3"]
        self.has_answered = False
        super().__init__(command_of(self.interpreters), env=env)
        digest, archive = code_archive()
        source = f"{BOOTSTRAP}\nmain({digest!r}, {len(archive)}, {module!r})"
        try:
            self.write(f"exec({source!r})\n".encode())
            if not self.next_line()["have"]:
                self.write(archive)
            self.has_answered = True
        except BaseException:
            self.__exit__()
            raise

    def next_line(self) -> dict[str, Any]:
        line = super().next_line()
        if line.keys() != {"error", "kind"}:
            return line
        text = line["error"]
        if line["kind"] == "python":
            raise PacelineError(f"{text} there, 3.11 or later is needed", fix="--python PATH of a later one there")
        if line["kind"] == "disk":
            raise PacelineError(f"it could not keep the code: {text}", fix=disk_fix(self.destination, text))
        raise PacelineError(text, fix="repeat the command")

    def no_interpreter(self) -> PacelineError:
        """Returns the error for NO_PYTHON."""
        names, fix = " or ".join(self.interpreters), "--python PATH of an interpreter with torch there"
        if len(self.interpreters) == 1:
            fix = "--python is one path for all hosts: a link of that name there, to its interpreter with torch"
        return PacelineError(f"no {names} there", fix=fix)


class SshModule(FarModule):
    """A module of this package on another host, over ssh."""

    def __init__(self, destination: str, module: str, *, python: str | None):
        ssh = [*SSH, "--", destination]
        try:
            super().__init__(lambda names: [*ssh, remote_command(names)], destination, module, python=python)
        except FileNotFoundError as error:
            raise PacelineError("ssh is not installed here", fix="sudo apt install openssh-client") from error

    def failure(self) -> PacelineError:
        self.close()
        last, to, exit_code = self.last_error(), shlex.quote(self.destination), self.process.returncode
        if exit_code == NO_PYTHON:
            return self.no_interpreter()
        if not self.has_answered and exit_code != SSH_FAILED:  # no Python, or a login that runs no command
            path = shlex.quote(self.interpreters[-1])
            fix = f"ssh {to} {path} --version must print one; --python PATH of an interpreter with torch there"
            return PacelineError(f"{path} cannot be run there: {last or f'exit code {exit_code}'}", fix=fix)
        stderr = self.all_errors()
        for pattern, what, fix in SSH_ERRORS if exit_code == SSH_FAILED else ():
            if re.search(pattern, stderr):
                return PacelineError(what, fix=fix.format(to=to, name=ssh_name(self.destination)))
        return PacelineError(last or f"ssh ended with exit code {exit_code}", fix=f"ssh {to} true")


def disk_fix(destination: str, error: str) -> str:
    """Returns what helps where a file cannot be written in the cache of another host."""
    to, path = shlex.quote(destination), re.search(r": '?(/[^']*)", error)
    if re.search("No space|quota", error):
        return f"ssh {to} df -h {shlex.quote(str(Path(path[1]).parent))}" if path else f"ssh {to} {CACHE_SPACE}"
    return (
        f"see ssh {to} ls -ld ~ ~/.cache; another cache: export XDG_CACHE_HOME=DIR as the first line of ~/.bashrc there"
    )


def agent_note(destinations: Sequence[str]) -> str | None:
    """Returns a line about the hosts that only the agent of another machine's login opens; None where there are none.

    That agent ends with the login. A supervisor that outlives it cannot connect again.
    """
    if "SSH_AGENT_PID" in os.environ or not FORWARDED_AGENT.search(os.environ.get("SSH_AUTH_SOCK", "")):
        return None
    alone = [*SSH, "-o", "IdentityAgent=none", "-o", "ControlPath=none", "--"]
    tries = [
        subprocess.Popen([*alone, to, "true"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for to in destinations
    ]
    refused = [to for to, process in zip(destinations, tries, strict=True) if process.wait() == SSH_FAILED]
    if not refused:
        return None
    fix = f"a key file here needs no agent: ssh-keygen, then ssh-copy-id {shlex.quote(refused[0])}"
    return f"note    only your forwarded ssh agent opens {format_list(refused)}, until you log out: {fix}"


@cache
def ssh_name(destination: str) -> str:
    """Returns the name or address that ssh looks up for user@host: HostName of ~/.ssh/config, or the host itself."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["ssh", "-G", "--", destination]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=CONNECT_S, check=True).stdout
        return (
            dict(line.partition(" ")[::2] for line in answer.splitlines()).get("hostname")
            or destination.rpartition("@")[2]
        )
    return destination.rpartition("@")[2]


def remote_command(interpreters: Sequence[str]) -> str:
    """Returns the command for the login shell there, whichever it is."""
    return f"exec sh -c {shlex.quote(far_command(interpreters))}"


def far_command(interpreters: Sequence[str]) -> str:
    """Returns the command for sh there: it runs the first interpreter that exists, on a line of Python from stdin."""
    run = "exec(__import__('sys').stdin.buffer.readline())"
    tries = [
        f"command -v {shlex.quote(path)} >/dev/null 2>&1 && exec {shlex.quote(path)} -c {shlex.quote(run)}"
        for path in interpreters
    ]
    return "; ".join([*tries, f"exit {NO_PYTHON}"])


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
