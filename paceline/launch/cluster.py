"""
The hosts of a run: a link to each, what its ranks need before an attempt, and what they write afterwards.

The supervisor decides which hosts take part and which ranks each has. A host on which the run folder itself can be seen shares it;
any other has a copy, which launch/gather.py keeps. A whole checkpoint lies with the supervisor, with the host of rank 0, and with
one other host, so that the loss of any one machine costs no more than one save interval. A host is lost when its link ends or
nothing was heard of it for SILENT_S; the time in which this process itself stood still does not count. A lost host is tried again
beside the attempt (launch/member.py); once its link is open it is `ready` to take part in the next one.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.check.probes.network_probe import interface_env, interface_here, route_to
from paceline.config import Config
from paceline.errors import PacelineError
from paceline.launch.agent import prepare_attempt, start_agent_process
from paceline.launch.channel import ALIVE_S, Channel, Line, frame, wait
from paceline.launch.copies import Copies
from paceline.launch.gather import RUN_FILES, Arrivals, folder_frames
from paceline.launch.hosts import HostEntry, parse_ports
from paceline.launch.member import QUICK_FOR_S, Member, Reach
from paceline.model.manifest import MANIFEST, NoCheckpoint, newest_good, read_manifest
from paceline.plan.machine import Machine
from paceline.rundir import RunDir, append_event

SILENT_S = 5.5  # a host that says nothing for so long is lost; it sends a line every second
LONGEST_TICK_S = 1.0  # of a tick that took longer, this process itself was stopped
OPEN_S = 150.0
SEND_S = 3600.0  # for a host to take the text or a checkpoint
STORE_S = 20.0


class Cluster:
    """The hosts of a run and what passes between them and this process."""

    def __init__(
        self,
        entries: Sequence[HostEntry],
        machine: Machine | None,
        config: Config | None = None,
        *,
        nproc: int,
        rejoin: bool = False,
        reaches: Mapping[HostEntry, Reach] | None = None,
    ):
        """machine: what each of them is like, to plan again. config: its interpreter, interface and ports. nproc: ranks on each.

        rejoin: whether a lost host is tried again for as long as the run lasts. reaches: links that were begun before.
        """
        self._machine = machine
        self.members = [Member(entry, nproc, reach=(reaches or {}).get(entry)) for entry in entries]
        config = config or Config()
        self.python, self.interface, self.ports = config.python, config.interface, parse_ports(config.ports)
        self.run: RunDir | None = None
        self.started: list[Member] = []  # those of the last attempt, or of the one that begins
        self._is_begun = False
        self.rejoin, self._text, self._is_kept = rejoin, "", True
        self.is_leaving = False  # the attempt is to be saved and ended, since the next one has more hosts
        self.copies: Copies | None = None
        self.arrivals: Arrivals | None = None
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
                    member.lose("it did not end its ranks")
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
        return sorted((m for m in self.members if m.lost is None), key=lambda member: not member.is_here)

    def pump(self, timeout_s: float) -> None:
        """Reads what has come from all hosts, writes what waits for them, and notices who is lost."""
        for member in self.members:
            is_due = self.rejoin or time.monotonic() - member.lost_at < QUICK_FOR_S or member.lost is None
            if member.channel is None and not member.is_here and is_due:
                member.connect(self.python, open_s=OPEN_S)
        linked = [m for m in self.members if m.channel is not None]
        wait([m.channel for m in linked if m.channel], timeout_s)
        now = time.monotonic()
        passed_s, self._seen_at = min(now - self._seen_at, LONGEST_TICK_S), now
        is_due = now - self._told_at > ALIVE_S
        if is_due:
            self._told_at = now
        for member in linked:
            channel = member.channel
            assert channel
            heard_at = channel.heard_at
            for line, data in channel.read():
                self._take(member, line, data)
            if member.channel is None:
                continue
            if member.is_here:
                if channel.ended:
                    assert member.agent
                    member.exit_code, member.agent_ended, member.channel = member.agent.wait(), True, None
                continue
            member.silent_s = 0.0 if channel.heard_at != heard_at else member.silent_s + passed_s
            if channel.ended:
                why = member.link.failure().message if member.link else ""
                member.lose(f"the connection to it ended: {why.rstrip('.')}", link_ended=True)
            elif member.is_open and member.silent_s > SILENT_S:
                member.lose(f"nothing was heard of it for {member.silent_s:.0f} s")
            elif not member.is_open and now > member.open_by:
                member.lose(f"it did not answer for {OPEN_S:.0f} s")
            elif is_due and member.is_greeted:
                channel.send_alive({"do": "alive"})

    def _take(self, member: Member, line: Line, data: bytes) -> None:
        """Takes a frame: files go into the run folder, lines wait for whoever reads them."""
        if "file" in line:
            if self.arrivals:
                self.arrivals.take(line, data, host=member.name)
        elif line.get("event") == "agent_ended":
            member.agent_ended, member.exit_code, member.free_bytes = True, line["exit_code"], line.get("free_bytes")
        elif line.get("event") == "published" and self.copies:
            self.copies.published[Path(line["folder"]).name] = line["manifest"]
        elif line.get("event") == "copied" and self.copies:
            self.copies.confirm(line["folder"])
        elif line.get("event") == "lacks" and self.copies and self.copies.unfinished:  # of the copy that it keeps
            self.copies.send(member, line)
        elif line.get("event") == "alive":
            member.take_state(line)
        elif line.get("event") == "hello":
            assert self.run
            member.greet(line, self.run, text=self._text, interface=self.interface, is_kept=self._is_kept)
        elif line.get("event") == "opened":
            member.open(line)
        elif line.get("event") == "refused" and (not member.is_open or line.get("do") == "attempt"):
            member.refuse(line)
        elif line.get("event") == "refused" and self.copies and self.copies.give_up(member):
            append_event(
                self.copies.run, "note", text=f"host {member.name} keeps no copy of the checkpoint: {line['why']}"
            )
        elif line.get("event") == "refused" and line.get("do") == "copy":
            pass  # its checkpoint was given up before
        elif line.get("event") == "left":  # this process was stopped for long
            member.lose(line["why"], link_ended=True)
        else:
            member.waiting.append(line)

    def answers(
        self, members: Sequence[Member], event: str, *, timeout_s: float, is_required: bool = True
    ) -> dict[Member, Line]:
        """Returns each host's next line of this kind. is_required: a host that does not send it in time is lost."""
        answers: dict[Member, Line] = {}
        deadline = time.monotonic() + timeout_s
        while missing := [m for m in members if m not in answers and m.lost is None]:
            self.pump(0.1)
            for member in missing:
                line = next((line for line in member.waiting if line.get("event") in (event, "refused")), None)
                if line:
                    member.waiting.remove(line)
                    if line["event"] == "refused":
                        member.refuse(line)
                    answers[member] = line
                elif time.monotonic() > deadline and is_required:
                    member.lose(f"it did not answer for {timeout_s:.0f} s")
            if time.monotonic() > deadline:
                break
        return {member: line for member, line in answers.items() if line["event"] == event}

    def ask(self, members: Sequence[Member], order: Line, *, timeout_s: float) -> dict[Member, Line]:
        """Sends an order whose answers have its name, and returns them. Raises PacelineError where a host is lost."""
        for member in members:
            member.send(order)
        answers = self.answers(members, order["do"], timeout_s=timeout_s)
        self.stop_for_lost(members)
        return answers

    def connect(self, run: RunDir, *, text: Path | None, is_kept: bool = True) -> None:
        """Opens the links and the copies of the run folder. Raises PacelineError for a host that cannot be reached.

        is_kept: whether the copies remain when the links end.
        """
        self.run, self.copies, self._text, self._is_kept = run, Copies(run), text.name if text else "", is_kept
        self.arrivals = Arrivals(
            run, on_no_space=lambda name: append_event(run, "note", text=f"no space left for {name} of another host")
        )
        others = [m for m in self.members if not m.is_here]
        for member in others:
            member.retry_at = 0.0
        while any(not member.is_open and member.lost is None for member in others):
            self.pump(0.05)
        self.stop_for_lost(others)
        for member in self.members:
            if member.is_here:
                by_route = next((route_to(other.address) for other in others if other.address), None)
                chosen = interface_here(self.interface)[1] if self.interface else None
                member.address = chosen or by_route or "127.0.0.1"

    def stop_for_lost(self, members: Iterable[Member]) -> None:
        """Raises PacelineError where one of these hosts was lost."""
        lost = next((member for member in members if member.lost), None)
        if lost:
            self.close()
            check = f"paceline check --hosts {','.join(m.entry.text for m in self.members)}"
            check += f" --python {self.python}" if self.python else ""
            check = f"see the output of paceline on {lost.name}" if lost.entry.way == "joined" else check
            raise PacelineError(f"host {lost.name}: {lost.lost}", fix=lost.error.fix if lost.error else check)

    def lacking(self, members: Sequence[Member], what: str, files: Mapping[str, str]) -> dict[Member, list[str]]:
        """Returns which files each host lacks, of the text or of a checkpoint. files: name -> hash."""
        for member in members:
            member.send({"do": "lack", "of": what, "files": files})
        return {member: line["files"] for member, line in self.answers(members, "lacks", timeout_s=SEND_S).items()}

    def send_all(self, members: Sequence[Member], show: Callable[[], None] = lambda: None) -> None:
        """Waits until everything that waits for these hosts has left."""
        while any(m.channel is not None and m.channel.has_more for m in members):
            show()
            self.pump(0.1)
            for member in (m for m in members if m.lost is None):
                if refusal := next((line for line in member.waiting if line.get("event") == "refused"), None):
                    member.refuse(refusal)

    def settle(self) -> None:
        """Before an attempt: gives every host the run's files and the checkpoint that it goes on from."""
        assert self.run
        run, others = self.run, [m for m in self.begin() if not m.is_here and not m.shared]
        newest: Path | None = None
        with suppress(NoCheckpoint):  # not where one cannot be used: then the others' copies may be the last ones
            newest, _ = newest_good(run.checkpoints, set_aside=False)
        step = read_manifest(newest).step if newest else 0
        for member in others:
            member.waiting.clear()
            member.send({"do": "settle", "step": step})
            names = [*RUN_FILES, *(["metrics.jsonl"] if member.first_rank == 0 else [])]
            member.send_behind(folder_frames(run.path, [n for n in names if (run.path / n).exists()], ""))
        if newest:
            files = {name: entry.sha256 for name, entry in read_manifest(newest).files.items()}
            files[MANIFEST] = hashlib.sha256((newest / MANIFEST).read_bytes()).hexdigest()
            for member, names in self.lacking(others, newest.name, files).items():
                if names:
                    member.send_behind(folder_frames(newest, names, f"checkpoints/{newest.name}/"))
        self.send_all(others)
        for member in others:
            member.send({"do": "settled"})
        self.answers(others, "settled", timeout_s=SEND_S)  # or a refusal: a file did not fit

    def begin(self) -> list[Member]:
        """Returns the hosts of the next attempt, which stay the same until it has ended: if one is lost, the attempt fails."""
        if not self._is_begun:
            self.started, self._is_begun, self.is_leaving = self.present, True, False
            first = 0
            for index, member in enumerate(self.started):
                member.fault, member.finding, member.index = None, None, index
                member.first_rank, first = first, first + member.nproc
        return self.started

    def start(self, run: RunDir, attempt: int, job: dict[str, Any], *, settings: Mapping[str, str]) -> None:
        """Starts the agents: that of rank 0 first, which listens for the others. settings: of the environment, for other hosts."""
        self.run = run
        first, *others = self.begin()
        if not others:
            self._start_one(first, attempt, job, None, settings, reach=None)
            return
        if any(member.lost for member in self.started):
            return
        hosts = {"hosts": 1 + len(others), "ports": self.ports, "host": first.address}
        self._start_one(first, attempt, job, {**hosts, "index": 0, "port": 0}, settings, reach=others[0].address)
        line = self._store_of(first)
        for index, member in enumerate(others, 1):
            if line:
                place = {**hosts, "index": index, "port": line["port"]}
                self._start_one(member, attempt, job, place, settings, reach=first.address)

    def _store_of(self, first: Member) -> Line | None:
        """Returns where the ranks meet; None if the first host's agent ends or is lost before it says so."""
        deadline = time.monotonic() + STORE_S
        while not first.agent_ended:
            self.pump(0.05)
            for line in [line for line in first.waiting if line.get("event") == "store"]:
                first.waiting.remove(line)
                return line
            if time.monotonic() > deadline:
                first.kill_at = 0.0
                return None
        return None

    def _start_one(
        self, member: Member, attempt: int, job: Mapping[str, Any], rendezvous: Mapping[str, Any] | None,
        settings: Mapping[str, str], *, reach: str | None,
    ) -> None:  # fmt: skip
        assert self.run
        own = {**job, "nproc": member.nproc, "first_rank": member.first_rank, "rendezvous": rendezvous}
        own["host"] = member.name if len(self.members) > 1 else None
        if member.lost:
            return
        member.agent_ended, member.exit_code, member.kill_at, member.waiting = False, None, float("inf"), []
        member.run_id, member.processes = job["run_id"], {}
        if member.is_here:
            own["env"] = {**job["env"], **(interface_env(reach, self.interface) if rendezvous else {})}
            prepare_attempt(self.run, attempt, own)
            member.agent = start_agent_process(self.run.launch_log(attempt), lock_fd=own["lock_fd"])
            assert member.agent.stdin and member.agent.stdout
            member.channel = Channel(member.agent.stdout.fileno(), member.agent.stdin.fileno())
            member.channel.send(own)
        else:
            theirs = {"python": sys.executable, "path": str(self.run.path)}
            order = {"do": "attempt", "attempt": attempt, "theirs": theirs}
            env = {name: value for name, value in settings.items() if not name.endswith("_SOCKET_IFNAME")}
            own |= {"env": env, "lock_fd": None, "reach": reach, **member.own_job}
            member.send_behind([frame({**order, "job": own})])

    @property
    def lost_in_attempt(self) -> tuple[str, ...]:
        """The hosts that were lost since the attempt began."""
        return tuple(member.name for member in self.started if member.lost)

    def limit(self, count: int) -> None:
        """Leaves out the last hosts: what remains does not divide the batch."""
        for member in self.present[count:]:
            member.lost = "it is not needed"

    def keep_copies(self, *, keep_last: int) -> None:
        """Moves what is new of the checkpoints of the attempt."""
        if self.copies and any(member.lost is None for member in self.started):
            self.copies.follow(self.started, keep_last=keep_last)

    def finish_copies(self, *, keep_last: int, is_over: Callable[[], bool]) -> None:
        """Waits until the checkpoints of the attempt are here and at the host of the copy. is_over: the user waits no longer."""
        deadline = time.monotonic() + SEND_S
        self.keep_copies(keep_last=keep_last)
        while (
            self.copies
            and self.copies.unfinished
            and not is_over()
            and time.monotonic() < deadline
            and any(m.channel for m in self.started)
        ):
            self.pump(0.1)
            self.keep_copies(keep_last=keep_last)

    def stop_agents(self) -> None:
        """Ends what still runs of an attempt."""
        self._is_begun = False
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
            member.give_up()
            if member.link:
                member.link.close()  # it may still save
                member.drop()
