"""
The hosts of a run: a link to each, what its ranks need before an attempt, and what they write afterwards.

The supervisor decides which hosts take part and which ranks each has. A host on which the run folder itself can be seen shares it;
any other has a copy, which launch/gather.py keeps. A whole checkpoint lies with the supervisor, with the host of rank 0, and with
one other host, so that the loss of any one machine costs no more than one save interval. A host is lost when its link ends or
nothing was heard of it for SILENT_S; the time in which this process itself stood still does not count.
"""

import hashlib
import math
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.check.probes.network_probe import interface_here, route_to
from paceline.errors import PacelineError
from paceline.launch.agent import prepare_attempt, start_agent_process
from paceline.launch.channel import Channel, Line, frame, wait
from paceline.launch.copies import Copies
from paceline.launch.gather import Receiver, folder_frames
from paceline.launch.hosts import HostEntry, is_this_host
from paceline.launch.member import Member
from paceline.launch.remote import interface_env
from paceline.launch.ssh import SshModule
from paceline.model.manifest import MANIFEST, newest_good, read_manifest
from paceline.plan.machine import Machine
from paceline.rundir import RunDir, append_event
from paceline.units import format_bytes, format_duration

REMOTE = "paceline.launch.remote"
SILENT_S = 5.5  # a host that says nothing for so long is lost; it sends a line every second
ALIVE_S = 1.0
LONGEST_TICK_S = 1.0  # of a tick that took longer, this process itself was stopped
OPEN_S = 150.0
SEND_S = 3600.0  # for a host to take the text or a checkpoint
STORE_S = 20.0
SENT_FILES = ("config.toml", "plan.json", "dataset.json", "skipped.json", "tokenizer/tokenizer.json")


class Cluster:
    """The hosts of a run and what passes between them and this process."""

    def __init__(
        self,
        entries: Sequence[HostEntry],
        machine: Machine | None,
        *,
        nproc: int,
        python: str | None = None,
        interface: str | None = None,
        ports: tuple[int, int] | None = None,
    ):
        """machine: what each of them is like, to plan again. nproc: ranks on each. ports: the first and the last to listen on."""
        self._machine = machine
        self.members = [Member(entry, nproc, entry.host) for entry in entries]
        self.python, self.interface, self.ports = python, interface, ports
        self.run: RunDir | None = None
        self._started: list[Member] = []  # those of the last attempt
        self.copies: Copies | None = None
        self.receiver: Receiver | None = None
        self._told_at = 0.0
        self._seen_at = time.monotonic()

    @property
    def machine(self) -> Machine:
        """Returns the remaining hosts as the planner takes them."""
        assert self._machine
        names = tuple(member.name for member in self.present)
        return replace(self._machine, hosts=len(names), names=names)

    @classmethod
    def here(cls, nproc: int) -> "Cluster":
        """Returns this host alone."""
        return cls([HostEntry("localhost")], None, nproc=nproc)

    @property
    def runs(self) -> bool:
        """Whether an agent of the attempt still runs."""
        return any(not member.agent_ended for member in self.members)

    def read(self, timeout_s: float) -> list[tuple[Member, Line]]:
        """Returns the lines that agents have sent, after at most timeout_s; signals are noticed as late as that."""
        now = time.monotonic()
        for member in self.members:
            if now > member.kill_at and not member.agent_ended:
                if member.agent:
                    member.agent.kill()  # the engine and the workers follow by PDEATHSIG
                else:
                    member.lose(f"{member.name} did not end its ranks")
        self.pump(timeout_s)
        lines = [(member, line) for member in self.members for line in member.waiting]
        for member in self.members:
            member.waiting = []
        return lines

    def order(self, do: str, *, give_up_s: float, **fields: int | None) -> None:
        """Sends an order to all agents. One that has not ended give_up_s later is killed."""
        for member in self.members:
            if not member.agent_ended:
                member.kill_at = min(member.kill_at, time.monotonic() + give_up_s)
                member.send({"do": do, **fields})

    @property
    def present(self) -> list[Member]:
        """The hosts that take part: this one first, if it is among them, so that rank 0 writes into the run folder itself."""
        members = sorted((m for m in self.members if m.lost is None), key=lambda member: not is_this_host(member.entry))
        first = 0
        for member in members:
            member.first_rank, first = first, first + member.nproc
        return members

    def pump(self, timeout_s: float) -> None:
        """Reads what has come from all hosts, writes what waits for them, and notices who is lost."""
        present = [m for m in self.members if m.channel is not None]
        wait([m.channel for m in present if m.channel], timeout_s)
        now = time.monotonic()
        passed_s, self._seen_at = min(now - self._seen_at, LONGEST_TICK_S), now
        is_due = now - self._told_at > ALIVE_S
        if is_due:
            self._told_at = now
        for member in present:
            channel = member.channel
            assert channel
            heard_at = channel.heard_at
            for line, data in channel.read():
                self._take(member, line, data)
            if member.is_here:
                if channel.ended:
                    assert member.agent
                    member.exit_code, member.agent_ended, member.channel = member.agent.wait(), True, None
                continue
            member.silent_s = 0.0 if channel.heard_at != heard_at else member.silent_s + passed_s
            if channel.ended:
                why = str(member.ssh.failure().message) if member.ssh else ""
                member.lose(f"the connection to {member.name} ended: {why}")
            elif member.silent_s > SILENT_S:
                member.lose(f"nothing was heard of {member.name} for {member.silent_s:.0f} s")
            elif is_due and member.is_greeted:
                channel.send({"do": "alive"})

    def _take(self, member: Member, line: Line, data: bytes) -> None:
        """Takes a frame: files go into the run folder, lines wait for whoever reads them."""
        if "file" in line:
            if self.receiver:
                self.receiver.take(line, data)
        elif line.get("event") == "agent_ended":
            member.agent_ended, member.exit_code = True, line["exit_code"]
        elif line.get("event") == "published":
            if self.copies:
                self.copies.published[Path(line["folder"]).name] = line["manifest"]
        elif line.get("event") == "kept":
            if self.copies:
                self.copies.is_kept(line["folder"])
        elif line.get("event") == "lacks" and self.copies and self.copies.unfinished:  # of the copy that it keeps
            self.copies.send(member, line)
        elif line.get("event") == "alive":  # a delay on the way makes the difference smaller, never larger
            member.clock_s = max(member.clock_s, line.get("time", -math.inf) - time.time())
        else:
            member.waiting.append(line)

    def answers(self, members: Sequence[Member], event: str, *, timeout_s: float) -> dict[Member, Line]:
        """Returns each host's next line of this kind; a host that does not send it in time is lost."""
        got: dict[Member, Line] = {}
        deadline = time.monotonic() + timeout_s
        while missing := [m for m in members if m not in got and m.lost is None]:
            self.pump(0.1)
            for member in missing:
                for line in [line for line in member.waiting if line.get("event") in (event, "refused")]:
                    member.waiting.remove(line)
                    if line["event"] == "refused":
                        member.lose(f"{member.name}: {line['why']}")
                        break
                    got[member] = line
                    break
            if time.monotonic() > deadline:
                for member in missing:
                    if member not in got:
                        member.lose(f"{member.name} did not answer for {timeout_s:.0f} s")
        return got

    def ask(self, members: Sequence[Member], order: Line, *, timeout_s: float) -> dict[Member, Line]:
        """Sends an order whose answers have its name, and returns them. Raises PacelineError where a host is lost."""
        for member in members:
            member.send(order)
        answers = self.answers(members, order["do"], timeout_s=timeout_s)
        self.stop_for_lost(members)
        return answers

    def connect(self, run: RunDir, *, text: Path | None) -> None:
        """Opens the links and the copies of the run folder. Raises PacelineError for a host that cannot be reached."""
        self.run, self.copies = run, Copies(run)
        self.receiver = Receiver(
            run, on_no_space=lambda name: append_event(run, "note", text=f"no space left for {name} of another host")
        )
        others = [m for m in self.members if not is_this_host(m.entry) and m.channel is None]
        with ThreadPoolExecutor(max_workers=min(32, max(1, len(others)))) as pool:
            for member, result in zip(others, pool.map(self._reach, others), strict=True):
                if isinstance(result, PacelineError):
                    self.close()
                    raise PacelineError(f"{member.name}: {result.message}", fix=result.fix)
                member.ssh, member.channel, member.silent_s = (
                    result,
                    Channel(result.stdout.fileno(), result.stdin.fileno()),
                    0.0,
                )
        for member, line in self.answers(others, "hello", timeout_s=OPEN_S).items():
            member.clock_s, member.is_greeted = line["time"] - time.time(), True
        token = f".shared-{secrets.token_hex(8)}"
        (run.path / token).touch()
        try:
            key = hashlib.sha256(f"{socket.gethostname()}:{run.path.resolve()}".encode()).hexdigest()[:12]
            growing = [*run.path.glob("logs/*/*"), *run.path.glob("health/*"), run.metrics]
            sizes = {str(path.relative_to(run.path)): path.stat().st_size for path in growing if path.is_file()}
            order = {"do": "open", "path": str(run.path.resolve()), "token": token, "key": key, "sizes": sizes}
            for member in others:
                names = {"text": text.name if text else None, "host": member.name, "interface": self.interface}
                member.send({**order, **names})
            for member, line in self.answers(others, "opened", timeout_s=OPEN_S).items():
                member.path, member.shared, member.address = line["path"], line["shared"], line["address"]
        finally:
            (run.path / token).unlink()
        self.stop_for_lost(others)
        here = [m for m in self.members if is_this_host(m.entry)]
        for member in here:
            member.path = str(run.path.resolve())
            by_route = next((route_to(other.address) for other in others if other.address), None)
            member.address = self._chosen_address() or by_route or "127.0.0.1"

    def _chosen_address(self) -> str | None:
        """Returns the address of --interface on this host; raises PacelineError where it has none."""
        try:
            return interface_here(self.interface)[1] if self.interface else None
        except ValueError as error:
            self.close()
            raise PacelineError(
                str(error), fix="--interface NAME of one of them, or a network such as 10.0.0.0/24"
            ) from None

    def _reach(self, member: Member) -> SshModule | PacelineError:
        try:
            return SshModule(member.entry.destination, REMOTE, python=self.python)
        except PacelineError as error:
            return error

    def stop_for_lost(self, members: Iterable[Member]) -> None:
        """Raises PacelineError where one of these hosts was lost."""
        lost = [member for member in members if member.lost]
        if lost:
            self.close()
            raise PacelineError(
                f"{lost[0].lost}", fix=f"paceline check --hosts {','.join(m.name for m in self.members)}"
            )

    def send_text(
        self, folder: Path, files: Mapping[str, str], *, progress: Callable[[str, float, float], None]
    ) -> str | None:
        """Sends the prepared text to the hosts that lack it; returns a line about it. Raises PacelineError where that fails.

        files: name -> hash.
        """
        began, others, num_sent = time.monotonic(), [m for m in self.present if not m.is_here], 0

        def counted(frames: Iterator[bytes]) -> Iterator[bytes]:
            nonlocal num_sent
            for piece in frames:
                yield piece
                num_sent += len(piece)

        lacking = {m: names for m, names in self._lacking(others, "text", files).items() if names}
        total = sum((folder / name).stat().st_size for names in lacking.values() for name in names)
        for member, names in lacking.items():
            if member.channel:
                member.channel.send_behind(counted(folder_frames(folder, names, "text/")))
        self.send_all(list(lacking), lambda: progress("send the text", min(num_sent, total), total))
        bad = [m.name for m, names in self._lacking(list(lacking), "text", files).items() if names]
        self.stop_for_lost(others)
        if bad:
            fix = "see the disk there: df -h ~/.cache"
            raise PacelineError(f"the text did not arrive whole on {', '.join(bad)}", fix=fix)
        hosts = ", ".join(member.name for member in lacking)
        seconds = format_duration(time.monotonic() - began)
        return f"text    {format_bytes(total)} sent to {hosts} in {seconds}" if lacking else None

    def _lacking(self, members: Sequence[Member], what: str, files: Mapping[str, str]) -> dict[Member, list[str]]:
        for member in members:
            member.send({"do": "lack", "of": what, "files": files})
        return {member: line["files"] for member, line in self.answers(members, "lacks", timeout_s=SEND_S).items()}

    def send_all(self, members: Sequence[Member], show: Callable[[], None] = lambda: None) -> None:
        """Waits until everything that waits for these hosts has left."""
        while any(m.channel is not None and m.channel.has_more for m in members):
            show()
            self.pump(0.1)

    def settle(self) -> None:
        """Before an attempt: gives every host the run's files and the checkpoint that it goes on from."""
        assert self.run
        run, others = self.run, [m for m in self.present if not m.is_here and not m.shared]
        newest: Path | None = None
        with suppress(PacelineError):
            newest, _ = newest_good(run.checkpoints, set_aside=False)
        step = read_manifest(newest).step if newest else 0
        for member in others:
            assert member.channel
            member.waiting.clear()
            member.send({"do": "settle", "step": step})
            names = [*SENT_FILES, *(["metrics.jsonl"] if member.first_rank == 0 else [])]
            member.channel.send_behind(folder_frames(run.path, [n for n in names if (run.path / n).exists()], ""))
        if newest:
            files = {name: entry.sha256 for name, entry in read_manifest(newest).files.items()}
            files[MANIFEST] = hashlib.sha256((newest / MANIFEST).read_bytes()).hexdigest()
            for member, names in self._lacking(others, newest.name, files).items():
                if names and member.channel:
                    member.channel.send_behind(folder_frames(newest, names, f"checkpoints/{newest.name}/"))
        self.send_all(others)

    def start(self, run: RunDir, attempt: int, job: dict[str, Any], *, settings: Mapping[str, str]) -> None:
        """Starts the agents: that of rank 0 first, which listens for the others. settings: of the environment, for other hosts."""
        self.run, self._started = run, self.present
        first, *others = self._started
        if not others:
            self._start_one(first, attempt, job, None, settings, reach=None)
            return
        hosts = {"hosts": 1 + len(others), "ports": self.ports, "host": first.address}
        self._start_one(
            first, attempt, job, {**hosts, "index": 0, "port": 0}, settings, reach=others[0].address if others else None
        )
        line = self.answers([first], "store", timeout_s=STORE_S).get(first)
        for index, member in enumerate(others, 1):
            if line:
                self._start_one(
                    member, attempt, job, {**hosts, "index": index, "port": line["port"]}, settings, reach=first.address
                )

    def _start_one(
        self, member: Member, attempt: int, job: Mapping[str, Any], rendezvous: Mapping[str, Any] | None,
        settings: Mapping[str, str], *, reach: str | None,
    ) -> None:  # fmt: skip
        assert self.run
        own = {**job, "nproc": member.nproc, "first_rank": member.first_rank, "rendezvous": rendezvous}
        own["host"] = member.name if len(self.members) > 1 else None
        member.agent_ended, member.exit_code, member.kill_at, member.waiting = False, None, float("inf"), []
        if member.is_here:
            own["env"] = {**job["env"], **(interface_env(reach, self.interface) if rendezvous else {})}
            prepare_attempt(self.run, attempt, own)
            member.agent = start_agent_process(self.run.launch_log(attempt), lock_fd=own["lock_fd"])
            assert member.agent.stdin and member.agent.stdout
            member.channel = Channel(member.agent.stdout.fileno(), member.agent.stdin.fileno())
            member.channel.send(own)
        elif member.channel:
            theirs = {"python": sys.executable, "path": str(self.run.path)}
            order = {"do": "attempt", "attempt": attempt, "theirs": theirs}
            env = {name: value for name, value in settings.items() if not name.endswith("_SOCKET_IFNAME")}
            own |= {"env": env, "lock_fd": None, "reach": reach, **member.own_job}
            member.channel.send_behind([frame({**order, "job": own})])

    @property
    def lost_in_attempt(self) -> tuple[str, ...]:
        """The hosts that were lost since the attempt began."""
        return tuple(member.name for member in self._started if member.lost)

    def limit(self, count: int) -> None:
        """Leaves out the last hosts: what remains does not divide the batch."""
        for member in self.present[count:]:
            member.lost = f"{member.name} is not needed"

    def keep_copies(self, *, keep_last: int) -> None:
        """Moves what is new of the checkpoints of the attempt."""
        if self.copies and any(member.lost is None for member in self._started):
            self.copies.follow(self._started, keep_last=keep_last)

    def finish_copies(self, *, keep_last: int) -> None:
        """Waits until the checkpoints of the attempt have arrived here and at the host that keeps the copy."""
        deadline = time.monotonic() + SEND_S
        self.keep_copies(keep_last=keep_last)
        while (
            self.copies
            and self.copies.unfinished
            and time.monotonic() < deadline
            and any(m.channel for m in self._started)
        ):
            self.pump(0.1)
            self.keep_copies(keep_last=keep_last)

    def stop_agents(self) -> None:
        """Ends what still runs of an attempt."""
        for member in self.members:
            if member.agent is not None:
                member.agent.kill()
                with suppress(BrokenPipeError):
                    member.agent.__exit__(None, None, None)
                member.agent, member.channel = None, None
            elif not member.agent_ended and member.channel:
                member.send({"do": "kill"})
                member.agent_ended = True

    def close(self) -> None:
        """Ends the links; what a host still runs ends by itself."""
        self.stop_agents()
        for member in self.members:
            if member.ssh:
                member.ssh.__exit__()
                member.ssh, member.channel = None, None
