"""
Hosts on one machine, each with its own network, host name and ssh server: network and UTS namespaces on a bridge.

Root alone may make them. What a test sends between them goes through real sockets, real routing and the system's OpenSSH.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_answers import answers_of_session, shared_answers

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
NEEDED = [
    name
    for name in ("ip", "unshare", "taskset", "ssh", "ssh-keygen", "sshd")
    if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
]
WHY_NOT = "network namespaces need root" if os.getuid() else f"{', '.join(NEEDED)} missing" if NEEDED else ""
PORT = 2222
SSHD_CONFIG = """
Port {port}
ListenAddress 10.77.0.{number}
ListenAddress fd77::{number}
HostKey {folder}/hostkey
AuthorizedKeysFile {keys}
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
PidFile none
SetEnv XDG_CACHE_HOME={folder}/cache
"""
SSH_CONFIG = """
Host {pattern}
  Port {port}
  User root
  IdentityFile {folder}/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
"""


@dataclass(frozen=True)
class Hosts:
    """The hosts and how to run commands on them."""

    prefix: str
    folder: Path
    names: tuple[str, ...]

    @property
    def private(self) -> Path:
        """A folder that is another one on each host; everything else they share."""
        return self.folder / "private"

    def on(self, host: str, path: Path) -> Path:
        """Returns where a path in `private` of a host lies for all others."""
        return self.folder / host / path.relative_to(self.folder)

    def command(self, host: str, command: Sequence[str], *, cores: str = "one") -> list[str]:
        """Returns what runs a command on a host, which has one core of this machine, or all."""
        private = f"mount --bind {self.folder / host / 'private'} {self.private}"
        name = ["bash", "-c", f'hostname "$0" && {private} && exec "$@"', host]
        numbers = sorted(os.sched_getaffinity(0))
        chosen = numbers if cores == "all" else [numbers[(self.names.index(host) + 1) % len(numbers)]]
        inside = ["ip", "netns", "exec", self.prefix + host, "unshare", "--uts", *name, *command]
        return ["taskset", "--cpu-list", ",".join(map(str, chosen)), *inside]

    def run(self, host: str, *command: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host; its `ssh` uses the test's keys."""
        return subprocess.run(
            self.command(host, command),
            capture_output=True,
            text=True,
            env=self.env(host),
            timeout=timeout_s,
            cwd=self.folder,
            check=False,
        )

    def env(self, host: str) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "COLUMNS": "200", "XDG_CACHE_HOME": str(self.folder / host / "cache")}

    def start(self, host: str, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Starts a command on a host. Its pid is that of the command itself."""
        return subprocess.Popen(self.command(host, command), text=True, env=self.env(host), cwd=self.folder, **options)

    def paceline(self, host: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(host, sys.executable, "-m", "paceline.cli", *arguments, timeout_s=300.0)

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"


@contextmanager
def namespaced_hosts(count: int, folder: Path, *, names: Sequence[str] = ()) -> Iterator[Hosts]:
    """Makes the hosts h1, h2, ... with an ssh server on each, and removes everything at the end.

    folder: an empty one for keys and settings. names: other names for the hosts.
    """
    hosts = Hosts(f"pl{os.getpid()}", folder, tuple(names or (f"h{number}" for number in range(1, count + 1))))
    servers: list[subprocess.Popen[bytes]] = []
    hub = hosts.prefix + "hub"
    hosts.private.mkdir()
    namespaces = [hub, *(hosts.prefix + name for name in hosts.names)]
    try:
        make_network(hosts, hub)
        make_keys(hosts)
        Path("/run/sshd").mkdir(exist_ok=True)
        for number, host in enumerate(hosts.names, 1):
            home = folder / host
            config = SSHD_CONFIG.format(port=PORT, number=number, folder=home, keys=folder / "id.pub")
            (home / "sshd_config").write_text(config)
            command = [SSHD, "-D", "-f", str(home / "sshd_config"), "-E", str(home / "sshd.log")]
            servers.append(subprocess.Popen(hosts.command(host, command)))
        wait_until_served(hosts)
        caches = {name: folder / name / "cache" for name in hosts.names}
        with shared_answers(caches, answers=answers_of_session(folder)):
            yield hosts
    finally:
        for server in servers:
            server.kill()
            server.wait()
        for name in namespaces:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
            for pid in pids.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


def make_network(hosts: Hosts, hub: str) -> None:
    """A bridge in a namespace of its own, and a cable from it to each host: 10.77.0.N and fd77::N."""
    hosts.ip("netns", "add", hub)
    hosts.ip("-n", hub, "link", "add", "br0", "type", "bridge")
    hosts.ip("-n", hub, "link", "set", "br0", "up")
    names = "".join(f"10.77.0.{number} {host}\n" for number, host in enumerate(hosts.names, 1))
    for number, host in enumerate(hosts.names, 1):
        name = hosts.prefix + host
        etc = Path("/etc/netns", name)
        etc.mkdir(parents=True)
        (etc / "hosts").write_text("127.0.0.1 localhost\n" + names)
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        hosts.ip("netns", "add", name)
        hosts.ip("-n", name, "link", "set", "lo", "up")
        hosts.ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"v{number}", "netns", hub)
        hosts.ip("-n", hub, "link", "set", f"v{number}", "master", "br0", "up")
        hosts.ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        hosts.ip("-n", name, "addr", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")
        hosts.ip("-n", name, "link", "set", "eth0", "up")


def add_cable(hosts: Hosts) -> None:
    """A second network between h1 and h2: eth1 with 10.88.0.N."""
    first, second = f"{hosts.prefix}h1", f"{hosts.prefix}h2"
    hosts.ip("link", "add", "eth1", "netns", first, "type", "veth", "peer", "name", "eth1", "netns", second)
    for number, name in enumerate((first, second), 1):
        hosts.ip("-n", name, "addr", "add", f"10.88.0.{number}/24", "dev", "eth1")
        hosts.ip("-n", name, "link", "set", "eth1", "up")


def make_keys(hosts: Hosts) -> None:
    """A key of the user, a key of each host, and an `ssh` that uses them and nothing of the user's own."""
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
    subprocess.run([*keygen, hosts.folder / "id"], check=True)
    lines = []
    for number, host in enumerate(hosts.names, 1):
        home = hosts.folder / host
        (home / "private").mkdir(parents=True)
        subprocess.run([*keygen, home / "hostkey"], check=True)
        key = " ".join((home / "hostkey.pub").read_text().split()[:2])
        lines.append(f"[10.77.0.{number}]:{PORT},[fd77::{number}]:{PORT},[{host}]:{PORT} {key}\n")
    hosts.known_hosts().write_text("".join(lines))
    pattern = " ".join([*hosts.names, "10.77.*", "fd77::*"])
    (hosts.folder / "config").write_text(SSH_CONFIG.format(pattern=pattern, port=PORT, folder=hosts.folder))
    wrapper = hosts.folder / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {hosts.folder}/config "$@"\n')
    wrapper.chmod(0o755)


def wait_until_served(hosts: Hosts) -> None:
    deadline = time.monotonic() + 300
    for host in hosts.names:
        while hosts.run(hosts.names[0], "ssh", host, "true").returncode:
            assert time.monotonic() < deadline, (hosts.folder / host / "sshd.log").read_text()
            time.sleep(0.1)
