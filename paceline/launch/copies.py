"""
Checkpoints of a run on several hosts without a shared disk: where their parts go, and who keeps a copy.

Each host writes its ranks' parts. They reach the supervisor in the background (launch/gather.py). Where rank 0 is on another host
than the supervisor, the parts go on to it; it completes the checkpoint, which then comes back. One other host keeps a copy of what
is complete, so that the loss of any one machine costs no more than one save interval. Where the link takes longer than that for a
copy, checkpoints that are superseded meanwhile have none.
"""

import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from paceline.launch.channel import Line
from paceline.launch.gather import PART, file_frames, folder_frames, missing_files, open_frames, stamp
from paceline.launch.member import Member
from paceline.model.manifest import MANIFEST, newest_folder, read_manifest
from paceline.model.publish import prune
from paceline.rundir import RunDir, write_atomic

HISTORY = "history/"


class Copies:
    """Moves the checkpoints of one run between the supervisor and its hosts. Call follow() several times a second."""

    def __init__(self, run: RunDir):
        self.run = run
        self.published: dict[str, str] = {}  # whole at the host of rank 0, not yet here: folder -> manifest
        self._history = (0, 0, 0)  # the version of the events that was sent
        self._newest = ""  # the last checkpoint that the hosts know to be complete
        self._copied = ""  # the last checkpoint whose copy was ordered
        self._owed: dict[str, Member] = {}  # copies under way: folder -> the host that makes it
        self._relayed, self._fetched = set[str](), set[str]()
        self._pool, self._checks = ThreadPoolExecutor(1), dict[str, Future[list[str]]]()

    @property
    def unfinished(self) -> bool:
        """Whether a checkpoint is still on its way here, or its copy to another host."""
        return bool(self.published) or self._is_copying

    @property
    def _is_copying(self) -> bool:
        return any(member.lost is None for member in self._owed.values())

    def confirm(self, folder: str) -> None:
        """Takes the report that the copy of a checkpoint is whole."""
        self._owed.pop(folder, None)

    def forget(self, member: Member) -> None:
        """The link to a host was lost: what it has not sent yet, and the copy that it was making, do not come."""
        self.give_up(member)
        if member.first_rank == 0:
            self.published.clear()
            self._fetched.clear()

    def give_up(self, member: Member) -> bool:
        """Expects no copy of a host that cannot keep it; returns whether one was under way there."""
        before, self._owed = (
            len(self._owed),
            {name: keeper for name, keeper in self._owed.items() if keeper is not member},
        )
        return len(self._owed) < before

    def follow(self, members: Sequence[Member], *, keep_last: int) -> None:
        """Sends and completes what is due. members: the hosts of the attempt, that of rank 0 first."""
        first, *others = [member for member in members if member.lost is None]
        if not first.shared:
            self._relay_parts(first)
            self._complete(first, keep_last)
        # the hosts with whole checkpoints have the run's history too, so that it can go on there
        keepers = [member for member in (first, *[m for m in others if not m.shared][:1]) if not member.shared]
        if (version := stamp(self.run.events)) != self._history:
            self._history = version
            for keeper in keepers:
                keeper.send_behind(folder_frames(self.run.path, [self.run.events.name], HISTORY))
        folder = newest_folder(self.run.checkpoints)
        if folder is None:
            return
        others = [member for member in others if not member.shared]
        if folder.name != self._newest:
            self._announce(folder.name, others)
            for keeper in keepers if self.run.metrics.exists() else ():
                keeper.send_behind(folder_frames(self.run.path, [self.run.metrics.name], HISTORY))
        if folder.name != self._copied and not self._is_copying:
            self._order_copy(folder, others[:1], keep_last=keep_last)

    def _announce(self, name: str, others: Sequence[Member]) -> None:
        """Lets the hosts remove their parts of a complete checkpoint. The first, which keeps the copies, still needs its own."""
        for member in others[1:]:
            member.send({"do": "saved", "folder": name, "manifest": None})
        if self._newest != self._copied:  # it waited for the copy before it, and is superseded now
            for member in others[:1]:
                member.send({"do": "saved", "folder": self._newest, "manifest": None})
        self._newest = name

    def _order_copy(self, folder: Path, keepers: Sequence[Member], *, keep_last: int) -> None:
        """Orders the copy of a checkpoint. Only one is under way at a time: otherwise a slow link would complete none."""
        files = {name: entry.sha256 for name, entry in read_manifest(folder).files.items()}
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        self._copied, self._owed = folder.name, {}
        for keeper in keepers:
            self._owed[folder.name] = keeper
            keeper.send(
                {"do": "saved", "folder": folder.name, "keep_last": keep_last, "files": files, "manifest": text}
            )

    def send(self, member: Member, line: Line) -> None:
        """Sends the files of a checkpoint that the host of the copy lacks. A copy that lost its source is no longer expected."""
        folder = self.run.checkpoints / Path(line["of"]).name
        if self._owed.get(folder.name) is not member:
            return
        frames = open_frames(folder, [Path(name).name for name in line["files"]], f"checkpoints/{folder.name}/")
        if frames is None:
            self.confirm(folder.name)
        else:
            member.send_behind(frames)

    def _relay_parts(self, first: Member) -> None:
        """Sends what other hosts have written of a checkpoint to the host of rank 0, which completes it."""
        for path in sorted(self.run.checkpoints.glob(".step_*.tmp/shard_*"), key=lambda path: path.suffix == ".json"):
            name = str(path.relative_to(self.run.path))
            rank = int(path.name.split("_")[1])
            if rank in first.ranks or name in self._relayed or path.suffix == PART or first.channel is None:
                continue
            if path.suffix == ".safetensors" and not path.with_suffix(".json").exists():
                continue
            self._relayed.add(name)
            first.channel.send_behind(file_frames(path, name))

    def _complete(self, first: Member, keep_last: int) -> None:
        """Gives a checkpoint that is whole at the host of rank 0 its name here too, when every file has come and is right."""
        for folder, text in list(self.published.items()):
            fetched = self.run.checkpoints / f".{folder}.fetched.tmp"
            if folder in self._checks and not self._checks[folder].done():
                continue
            lacking = self._checks.pop(folder).result() if folder in self._checks else None
            if lacking == []:
                final = self.run.checkpoints / folder
                shutil.rmtree(final, ignore_errors=True)
                fetched.rename(final)
                for pending in self.run.checkpoints.glob(f".{folder}.*.tmp"):
                    shutil.rmtree(pending, ignore_errors=True)
                prune(self.run.checkpoints, step=read_manifest(final).step, keep_last=keep_last)
                del self.published[folder]
                continue
            if lacking and folder not in self._fetched:
                self._fetched.add(folder)
                first.send({"do": "fetch", "folder": folder, "files": lacking})
            fetched.mkdir(parents=True, exist_ok=True)
            write_atomic(fetched / MANIFEST, text)
            for path in self.run.checkpoints.glob(f".{folder}.*.tmp/*.safetensors"):
                if path.parent != fetched:
                    path.rename(fetched / path.name)
            files = {name: entry.sha256 for name, entry in read_manifest(fetched).files.items()}
            if lacking is None or all((fetched / name).exists() for name in files):
                self._checks[folder] = self._pool.submit(missing_files, fetched, files)
