"""
The folder of a script on its way to other hosts, the command that runs there, and what its hosts need before an attempt.

A host where the same files are at the same place runs them there. Any other keeps a copy of the folder in its cache
(launch/script_copy.py), of which only what has changed travels. What git ignores stays here; without git so do environments, caches
and large checkpoints. A line on the screen names what is left out by its kind.
"""

import hashlib
import os
import shlex
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from paceline.errors import PacelineError
from paceline.launch.channel import Line
from paceline.launch.cluster import SEND_S, Cluster
from paceline.launch.gather import folder_frames, sha256_of
from paceline.launch.losses import readmit, ready_hosts, record_joined
from paceline.launch.member import Member
from paceline.launch.script_command import Listing, ScriptFiles, hash_files, list_files
from paceline.launch.script_copy import PREFIX, saved_files
from paceline.rundir import RunDir, append_event, read_json_lines, resume_command
from paceline.units import format_bytes, format_duration, format_number_of

SAME_S = 60.0  # ranks that save together are done within this
LIST_S = 30.0  # for a host to list what a script has saved there
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
    """What a script's hosts need before an attempt: who takes part, the code, and a word where they have saved different files."""

    def __init__(
        self, cluster: Cluster, files: ScriptFiles, hashes: Mapping[str, str], run: RunDir, *,
        show: Callable[[Sequence[str]], None],
    ):  # fmt: skip
        self.cluster, self.files, self.hashes, self.run, self.show = cluster, files, hashes, run, show
        self.is_retry = False
        self.answering = set[Member]()  # lost before, and reported as back

    def first_line(self) -> list[str]:
        """Returns a line about PACELINE_RUN where it is a folder of its own on a host."""
        if not (members := [member for member in self.cluster.present if not member.is_here and not member.shared]):
            return []
        text = f"PACELINE_RUN is a folder of its own on {format_names(members)}: what the script saves stays there"
        return [f"note    {text}, and is lost with the host; a folder that all share keeps it"]

    def report(self) -> None:
        """Writes an event when a host that was lost in an earlier attempt answers again."""
        for member in set(ready_hosts(self.cluster)) - self.answering - set(self.cluster.started):
            self.answering.add(member)
            now = f"paceline stop {self.run.quoted}, then {resume_command(self.run)}, begin one now"
            text = f"host {member.name} answers again: it takes part in the next attempt ({now})"
            append_event(self.run, "note", text=text)

    def begin(self) -> None:
        """Chooses the hosts of an attempt, makes the code the same on them, and reports where saved files differ."""
        if back := readmit(self.cluster, len(self.cluster.members)):
            self.show([record_joined(self.cluster, back)])
            self.answering -= set(back)
        members = self.cluster.begin()
        if self.is_retry and self.hashes and (lines := renew_code(self.cluster, self.files, self.hashes, self.run)):
            self.show(lines)
        self.is_retry = True
        for text in self.differences(members):
            append_event(self.run, "note", text=text)
            self.show([f"note    {text}"])

    def differences(self, members: Sequence[Member]) -> Iterator[str]:
        """Yields what the hosts of an attempt have saved differently: its ranks would read other files."""
        others = [member for member in members if not member.is_here and not member.shared and member.lost is None]
        for member in others:
            member.send({"do": "list_saved"})
        answers = self.cluster.answers(others, "list_saved", timeout_s=LIST_S, is_required=False)
        versions = defaultdict[str, list[tuple[float, int, str, str]]](list)  # by name: time here, size, host, path
        if any(member.is_here or member.shared for member in members):
            for name, (size, at) in saved_files(self.run).items():
                versions[name].append((at, size, "this host", str(self.run.path.resolve() / name)))
        for member, answer in answers.items():
            for name, (size, at) in answer["files"].items():
                place = f"{member.entry.text}:{member.folder}/{name}"
                versions[name].append((at - member.clock_s, size, member.name, place))
        differ = {name: sorted(of_name) for name, of_name in versions.items() if is_different(of_name)}
        if differ:
            name = max(differ, key=lambda name: differ[name][-1])
            (at, _, host, place), (newest, _, newest_host, newest_place) = differ[name][0], differ[name][-1]
            files = format_files([name, *(other for other in differ if other != name)])
            copy = shlex.join(["scp", "-3p", newest_place, place])
            times = f"on {host} is of {clock(at)}, and on {newest_host} of {clock(newest)}"
            yield f"{files} {times}: each rank reads that of its own host ({copy})"
        first = "this host" if members[0].is_here or members[0].shared else members[0].name
        if answers and (
            alone := [name for name, of_name in versions.items() if [place[2] for place in of_name] == [first]]
        ):
            yield f"{format_files(sorted(alone))} of {first} alone: a rank on another host that reads it finds none"
        placed = [
            event["hosts"] for event in read_json_lines(self.run.events) if event.get("hosts") and "attempt" in event
        ]
        before = [host for hosts in placed[-1:] for host, ranks in hosts.items() if 0 in ranks]
        is_far = any(not member.is_here and not member.shared for member in self.cluster.members)
        if is_far and before and before != [members[0].name]:
            yield f"rank 0 is on {members[0].name} and was on {before[0]}: what it saved there stays there"


def is_different(versions: Sequence[tuple[float, int, str, str]]) -> bool:
    """Whether versions of a file differ: in size, or so much in time that ranks have not saved them together."""
    times, sizes = [version[0] for version in versions], {version[1] for version in versions}
    return len(sizes) > 1 or max(times) - min(times) > SAME_S


def clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%H:%M:%S}"


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
