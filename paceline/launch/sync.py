"""
The folder of a script on its way to other hosts, and the command that runs there.

A host where the same files are at the same place runs them there. Any other keeps a copy of the folder in its cache
(launch/script_copy.py), of which only what has changed travels. What git ignores stays here; without git so do environments, caches
and large checkpoints. A line on the screen names what is left out by its kind.
"""

import hashlib
import os
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain
from pathlib import Path

from paceline.errors import PacelineError
from paceline.file_systems import free_space
from paceline.launch.channel import Line, frame
from paceline.launch.cluster import SEND_S, Cluster
from paceline.launch.gather import SAVED, file_frames, folder_frames, sha256_of
from paceline.launch.losses import readmit, ready_hosts, record_joined
from paceline.launch.member import Member
from paceline.launch.script_command import Listing, ScriptFiles, hash_files, list_files
from paceline.launch.script_copy import PREFIX, is_newer, saved_files
from paceline.rundir import RunDir, append_event, resume_command
from paceline.units import format_bytes, format_duration, format_number_of

MAX_SAVED_BYTES = 8 << 30  # of files that a script saved, for one host
SOURCES = (".py", ".sh", ".c", ".cc", ".cpp", ".cu", ".h", ".cuh")


def send_script(
    cluster: Cluster, files: ScriptFiles, run: RunDir, *, sync: bool
) -> tuple[list[str], Mapping[str, str]]:
    """Gives every other host the script, and sets what its ranks execute; returns what was done, in lines, and the files' hashes.

    sync: False where the user says that the files are there. Raises PacelineError.
    """
    others = [member for member in cluster.present if not member.is_here]
    members = others if files.is_requested else lacking_script(cluster, others, files, sync=sync)
    if not members:
        return [], {}
    if files.folder is None or not sync:
        missing = files.script or files.cwd
        fix = f"--sync {shlex.quote(str(files.cwd))}" if sync else "leave --no-sync out: then the folder is sent"
        raise PacelineError(f"{missing} is not on {format_names(members)}", fix=fix)
    listing = list_files(files.folder, script=files.script, run=run)
    hashes = hash_files(files.folder, listing.sizes)
    if not files.is_requested:
        order = {"do": "script", "at": str(files.folder), "cwd": str(files.cwd), "files": hashes}
        answers = cluster.ask(members, order, timeout_s=SEND_S)
        members = [member for member, answer in answers.items() if answer["cwd"] is None or answer["lacks"]]
    if not members:
        line = f"sync    {format_names(others)}: the same {format_number_of(len(hashes), 'file')} in {files.folder}"
        return [line], hashes
    num_files, num_bytes = send_folder(cluster, members, files, listing, hashes)
    sizes = f"{num_files:,} of {format_number_of(len(hashes), 'file')}"
    sizes += f", {format_bytes(num_bytes)} of {format_bytes(listing.total)}"
    notes = list(listing.notes)
    if not files.cwd.is_relative_to(files.folder):
        there = f"their copy of {files.folder}" if len(members) > 1 else f"its copy of {files.folder}"
        notes.append(f"note    on {format_names(members)} the working directory is {there}, not {files.cwd}")
    return [f"sync    {files.folder} to {format_names(members)}: {sizes}", *notes], hashes


def lacking_script(cluster: Cluster, members: Sequence[Member], files: ScriptFiles, *, sync: bool) -> list[Member]:
    """Returns the hosts that lack the script or may lack another file: of those that share the run folder, the script decides."""
    names = [str(files.script)] if files.script and files.script.is_file() else []
    order = {"do": "script", "at": "/", "cwd": str(files.cwd), "files": {name: sha256_of(Path(name)) for name in names}}
    lacking = []
    for member, answer in cluster.ask(members, order, timeout_s=SEND_S).items():
        is_there = answer["exists"] if not sync else not answer["lacks"] and (member.shared or files.folder is None)
        if answer["cwd"] is None or not is_there:
            lacking.append(member)
    return lacking


def send_folder(
    cluster: Cluster, members: Sequence[Member], files: ScriptFiles, listing: "Listing", hashes: Mapping[str, str]
) -> tuple[int, int]:
    """Sends these hosts what they lack of the folder; returns how many files that were, and their bytes."""
    assert files.folder
    _, argv = files.in_copy()
    order = copy_order(files, hashes) | {"folders": listing.folders}
    sent = set[str]()
    for member, answer in cluster.ask(members, order, timeout_s=SEND_S).items():
        member.own_job = {"cwd": answer["cwd"], "command": argv}
        if member.channel:
            sent |= set(answer["lacks"])
            member.channel.send_behind(folder_frames(files.folder, answer["lacks"], PREFIX))
    cluster.send_all(members)
    for member, answer in cluster.ask(members, order, timeout_s=SEND_S).items():
        if answer["lacks"]:
            what = f"{answer['lacks'][0]} did not arrive whole on {member.name}"
            raise PacelineError(what, fix="repeat the command: the file may have changed meanwhile")
    return len(sent), sum(listing.sizes[name] for name in sent)


def copy_order(files: ScriptFiles, hashes: Mapping[str, str]) -> Line:
    """Returns the order by which a host says which of these files its copy of the folder lacks.

    keeps: whether files stay there that are not among these.
    """
    assert files.folder
    key = hashlib.sha256(os.fsencode(f"{socket.gethostname()}:{files.folder}")).hexdigest()[:12]
    executable = [name for name in hashes if os.access(files.folder / name, os.X_OK)]
    order = {"do": "script", "key": key, "name": files.folder.name, "cwd": files.in_copy()[0], "files": hashes}
    return order | {"folders": [], "executable": executable, "keeps": False}


def renew_code(cluster: Cluster, files: ScriptFiles, hashes: Mapping[str, str], run: RunDir) -> list[str]:
    """Before another attempt: sends the copies the code that differs from what is here now, and returns what differed, in lines.

    hashes: of the files at the start. Other files stay as the ranks have left them. Where a host has the folder itself, it is only
    compared. A host that is lost meanwhile is one that the attempt has lost.
    """
    assert files.folder
    present = dict.fromkeys(hashes)
    with suppress(PacelineError):  # the folder has become too large to be sent whole
        listing = list_files(files.folder, script=files.script, run=run)  # also what was added since
        present |= dict.fromkeys(listing.sizes)
    names = [name for name in present if name.endswith(SOURCES) or files.folder / name == files.script]
    code = {name: sha256 for name in names if (sha256 := sha256_of(files.folder / name))}
    order = copy_order(files, code) | {"keeps": True}
    own = {"do": "script", "at": str(files.folder), "cwd": str(files.cwd), "files": code}
    others = [member for member in cluster.started if not member.is_here]
    lines, renewed = [], []
    for member in others:
        member.send(order if member.own_job else own)
    for member, answer in cluster.answers(others, "script", timeout_s=SEND_S).items():
        if lacks := answer["lacks"]:
            what = f"{format_files(lacks)} on {member.name}"
            lines.append(f"note    {what} differed from {files.folder} here{': sent again' if member.own_job else ''}")
            if member.own_job:
                member.send_behind(folder_frames(files.folder, lacks, PREFIX))
                renewed.append(member)
    cluster.send_all(renewed)
    for member in renewed:
        member.send(order)
    for member, answer in cluster.answers(renewed, "script", timeout_s=SEND_S).items():
        if answer["lacks"]:
            member.lose(f"{answer['lacks'][0]} did not arrive whole")
    return lines


class ScriptHosts:
    """Before an attempt of a script: its code, and the files that it saved on any host, for hosts without a shared disk."""

    def __init__(
        self, cluster: Cluster, files: ScriptFiles, hashes: Mapping[str, str], run: RunDir, *,
        sync: bool, show: Callable[[Sequence[str]], None],
    ):  # fmt: skip
        self.cluster, self.files, self.hashes, self.run, self.sync, self.show = cluster, files, hashes, run, sync, show
        self.is_retry = False
        self.answering = set[Member]()  # lost before, and reported as back

    def first_line(self) -> list[str]:
        """Returns a line about PACELINE_RUN where it is a folder of its own on a host."""
        if not (members := [member for member in self.cluster.present if not member.is_here and not member.shared]):
            return []
        text = f"PACELINE_RUN is a folder of its own on {format_names(members)}: "
        if not self.sync:
            return [f"note    {text}--no-sync leaves what the script saves where it is, and ranks may read other files"]
        home = "" if self.cluster.present[0].is_here else f"; what is saved on {members[0].name} comes here meanwhile"
        return [f"files   {text}before an attempt all get the newest version of each file{home}"]

    def report(self) -> None:
        """Writes an event when a host that was lost in an earlier attempt answers again."""
        for member in set(ready_hosts(self.cluster)) - self.answering - set(self.cluster.started):
            self.answering.add(member)
            now = f"paceline stop {self.run.quoted}, then {resume_command(self.run)}, begin one now"
            text = f"host {member.name} answers again: it takes part in the next attempt ({now})"
            append_event(self.run, "note", text=text)

    def begin(self, is_over: Callable[[], bool]) -> None:
        """Chooses the hosts of an attempt, and makes code and saved files the same on them."""
        saved_at = self.cluster.arrivals.saved_at if self.cluster.arrivals else {}
        for member in (m for m in self.cluster.started if m.lost and not m.shared and not m.is_open):
            name = member.name
            after = f" after {datetime.fromtimestamp(saved_at[name]):%H:%M:%S}" if name in saved_at else ""
            self.show([f"note    what the script saved on {name}{after} stays there until it answers"])
        if back := readmit(self.cluster, len(self.cluster.members)):
            self.show([record_joined(self.cluster, back)])
            self.answering -= set(back)
        self.cluster.begin()
        if self.is_retry and self.hashes and (lines := renew_code(self.cluster, self.files, self.hashes, self.run)):
            self.show(lines)
        self.is_retry = True
        if answers := self.collect(is_over, follows=self.sync):
            self.give(answers, is_over)

    def collect(self, is_over: Callable[[], bool], *, follows: bool = False) -> dict[Member, Line]:
        """Brings here the newest version of each file that the script saved; returns what each host has, by its answer.

        follows: the host of rank 0 also sends what is saved from now on.
        """
        others = [m for m in self.cluster.started if not m.is_here and not m.shared and m.lost is None]
        if not others:
            return {}
        for folder in self.run.path.glob(".saved-*"):  # of a link that broke
            shutil.rmtree(folder, ignore_errors=True)
        before, answers = saved_files(self.run), dict[Member, Line]()
        room = min(MAX_SAVED_BYTES, (free_space(self.run.path) or 0) // 2) if self.sync else 0
        order = {"do": "exchange", "files": before, "room": room}
        for member in others:
            is_first = member is self.cluster.started[0]
            member.send({**order, "clock_s": member.clock_s, "follows": follows and is_first})
        while (late := [m for m in others if m not in answers and m.lost is None]) and not is_over():
            answers |= self.cluster.answers(late, "exchanged", timeout_s=0.2, is_required=False)
        if new := [name for name, version in saved_files(self.run).items() if version != before.get(name)]:
            self.show([f"files   {format_files(new)} came here"])
        return answers

    def give(self, answers: Mapping[Member, Line], is_over: Callable[[], bool]) -> None:
        """Gives all hosts the newest version of each file, and reports what differs and cannot be sent."""
        here = saved_files(self.run)
        holders, newest = dict.fromkeys(here, "here"), dict[str, Sequence[float]](here)
        for member, answer in answers.items():
            for name, version in answer["files"].items():
                if is_newer(version, newest.get(name)):
                    holders[name], newest[name] = f"on {member.name}", version
        for member, answer in answers.items():
            lacks = [name for name in newest if is_newer(newest[name], answer["files"].get(name))]
            size, places = sum(newest[name][0] for name in lacks), sorted({holders[name] for name in lacks})
            fits = size <= min(MAX_SAVED_BYTES, answer["free"] // 2) and self.sync
            if fits and places == ["here"]:
                frames = (file_frames(self.run.path / n, SAVED + n, saved_at=here[n][1]) for n in lacks)
                self.show([f"files   {format_files(lacks)} sent to {member.name}, {format_bytes(int(size))}"])
                member.send_behind(chain(*frames, [frame({"file": SAVED, "last": True, "gone": []})]))
            elif lacks:
                why = f"{format_bytes(int(size))} are too much to be sent" if self.sync else "--no-sync sends nothing"
                text = f"{format_files(lacks)} on {member.name} is not the newest, which is {', '.join(places)}: {why}"
                append_event(self.run, "note", text=text)
                self.show([f"note    {text}"])
        self.cluster.send_all(list(answers), is_over)


def format_files(names: Sequence[str]) -> str:
    """Returns the first of these names, and how many more there are."""
    return f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}"


def format_names(members: Sequence[Member]) -> str:
    return ", ".join(member.name for member in members)


def send_text(
    cluster: Cluster, folder: Path, files: Mapping[str, str], *, progress: Callable[[str, float, float], None]
) -> str | None:
    """Sends the prepared text to the hosts that lack it; returns a line about it. Raises PacelineError where that fails.

    files: name -> hash.
    """
    began, others, num_sent = time.monotonic(), [m for m in cluster.present if not m.is_here], 0

    def counted(frames: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal num_sent
        for piece in frames:
            yield piece
            num_sent += len(piece)

    lacking = {m: names for m, names in cluster.lacking(others, "text", files).items() if names}
    total = sum((folder / name).stat().st_size for names in lacking.values() for name in names)
    for member, names in lacking.items():
        member.send_behind(counted(folder_frames(folder, names, "text/")))
    cluster.send_all(list(lacking), lambda: progress("send the text", min(num_sent, total), total))
    bad = [m.name for m, names in cluster.lacking(list(lacking), "text", files).items() if names]
    cluster.stop_for_lost(others)
    if bad:
        fix = "see the disk there: df -h ~/.cache"
        raise PacelineError(f"the text did not arrive whole on {', '.join(bad)}", fix=fix)
    hosts = ", ".join(member.name for member in lacking)
    seconds = format_duration(time.monotonic() - began)
    return f"text    {format_bytes(total)} sent to {hosts} in {seconds}" if lacking else None
