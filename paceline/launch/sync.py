"""
The folder of a script on its way to other hosts, and the command that runs there.

A host where the same files are at the same place runs them there. Any other keeps a copy of the folder in its cache
(launch/script_copy.py), of which only what has changed travels. What git ignores stays here; without git so do environments, caches
and large checkpoints. A line on the screen names what is left out by its kind.
"""

import hashlib
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from paceline.errors import PacelineError, expand_home
from paceline.launch.channel import Line
from paceline.launch.cluster import SEND_S, Cluster
from paceline.launch.gather import folder_frames, sha256_of
from paceline.launch.member import Member
from paceline.launch.script_copy import PREFIX
from paceline.rundir import RunDir
from paceline.units import format_bytes, format_duration, format_number_of

COMPILED = "__pycache__"
MAX_BYTES = 100 << 20
MAX_FILES = 20_000
CHECKPOINT_BYTES = 10 << 20  # a larger one is not sent without git, which would have it in .gitignore
CHECKPOINTS = (".pt", ".pth", ".ckpt", ".safetensors")  # .bin may be text as tokens
NOT_SENT = {
    ".git", ".hg", ".svn", COMPILED, ".venv", "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache",
    ".ipynb_checkpoints",
}  # fmt: skip
INTERPRETER = re.compile(r"python[\d.]*|bash|sh")
SOURCES = (".py", ".sh", ".c", ".cc", ".cpp", ".cu", ".h", ".cuh")
NO_SYNC = "--no-sync where the files are already there"


@dataclass(frozen=True)
class ScriptFiles:
    """Where a script and its folder are on this host, and what a rank executes on a host that has a copy."""

    argv: tuple[str, ...]  # what a rank executes here
    cwd: Path
    script: Path | None  # the file that runs; None for a program or an installed module
    folder: Path | None  # None: there is nothing to send
    is_requested: bool  # --sync names the folder

    def in_copy(self) -> tuple[str, list[str]]:
        """Returns the working directory within a copy of the folder, and what a rank executes there.

        The directory is the same as here, or the folder itself where that one is outside.
        """
        assert self.folder
        cwd = self.cwd if self.cwd.is_relative_to(self.folder) else self.folder
        argv = list(self.argv)
        for i, word in enumerate(argv):
            if self.script and "-m" not in argv[:2] and place_of(word, self.cwd) == self.script:
                name = os.path.relpath(self.script, cwd)
                argv[i] = f"./{name}" if i == 0 and "/" not in name else name
                break
        return str(cwd.relative_to(self.folder)), argv


def find_script_files(argv: Sequence[str], *, cwd: Path, sync: str | None) -> ScriptFiles:
    """Returns what belongs to a command that runs in cwd. sync: the folder that the user names. Raises PacelineError."""
    cwd = cwd.resolve()
    is_module = "-m" in argv[:2]
    script = module_file(argv[argv.index("-m") + 1], cwd) if is_module else script_file(argv, cwd)
    if sync is None:
        folder = (cwd if is_module else script.parent) if script else None
        if folder in (home := expand_home("~").resolve(), Path("/")):
            place = "the home folder" if folder == home else "/"
            fix = f"a folder of its own for the script, or {NO_SYNC}"
            raise PacelineError(f"{script} is in {place}, which is not sent to other hosts", fix=fix)
        return ScriptFiles(tuple(argv), cwd, script, folder, is_requested=False)
    folder = expand_home(sync).resolve()
    if not folder.is_dir():
        raise PacelineError(f"--sync {sync}: there is no such folder", fix="the folder that holds the script")
    if script and not script.is_relative_to(folder):
        holder = cwd if script.is_relative_to(cwd) else script.parent
        raise PacelineError(f"{script} is not in {folder}", fix=f"--sync {shlex.quote(str(holder))}")
    return ScriptFiles(tuple(argv), cwd, script, folder, is_requested=True)


def place_of(word: str, cwd: Path) -> Path:
    """Returns the path that a word means in a folder; a link in its last part stays."""
    path = cwd / word
    return path.parent.resolve() / path.name


def script_file(argv: Sequence[str], cwd: Path) -> Path | None:
    """Returns the file that a command runs, by itself or by an interpreter; None for a program."""
    word = argv[0] if "/" in argv[0] else ""
    if INTERPRETER.fullmatch(Path(argv[0]).name):
        word = next((word for word in argv[1:] if not word.startswith("-")), "")
    return place_of(word, cwd) if word and (cwd / word).is_file() else None


def module_file(module: str, cwd: Path) -> Path | None:
    """Returns the file or the folder of a module's package where cwd has it; None where it is installed elsewhere."""
    spec = PathFinder.find_spec(module.partition(".")[0], [str(cwd)])
    if spec is None:
        return None
    return Path(spec.origin) if spec.origin else cwd / module.partition(".")[0]


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
            what = f"{lacks[0]}{f' and {len(lacks) - 1} more' if lacks[1:] else ''} on {member.name}"
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


def format_names(members: Sequence[Member]) -> str:
    return ", ".join(member.name for member in members)


@dataclass(frozen=True)
class Listing:
    """The files of a folder that are sent, with their sizes, its empty folders, and what is left out."""

    sizes: Mapping[str, int]
    folders: Sequence[str]
    notes: Sequence[str]

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def list_files(folder: Path, *, script: Path | None, run: RunDir) -> Listing:
    """Returns what of a folder is sent. Raises PacelineError where that is too much."""
    in_git = is_in_git(folder)
    own = [str(script.relative_to(folder))] if script and script.is_file() else []  # even if git ignores it
    runs = run.path.resolve().parent
    runs = runs if runs != folder and runs.is_relative_to(folder) else run.path.resolve()
    sizes, folders, links, checkpoints = dict[str, int](), list[str](), list[str](), dict[str, int]()
    for name in [*own, *(git_names(folder) if in_git else walk_names(folder))]:
        path = folder / name
        if path.is_relative_to(runs) or COMPILED in path.parts:  # git lists it where .gitignore has no line about it
            continue
        if name.endswith("/"):
            folders.append(name.rstrip("/"))
        elif path.is_symlink() and name not in own and not (path.is_file() and path.resolve().is_relative_to(folder)):
            links.append(name)
        elif path.is_file():
            size = path.stat().st_size
            is_checkpoint = not in_git and name.endswith(CHECKPOINTS) and size > CHECKPOINT_BYTES
            (checkpoints if is_checkpoint else sizes)[name] = size
            if len(sizes) > MAX_FILES:
                raise too_large(folder, f"more than {MAX_FILES:,} files", sizes)
    if sum(sizes.values()) > MAX_BYTES:
        what = f"{format_bytes(sum(sizes.values()))}, and at most {format_bytes(MAX_BYTES)} are sent"
        raise too_large(folder, what, sizes)
    notes = [f"note    not sent: {', '.join(links)}, a link to what is not a file of {folder}"] if links else []
    if checkpoints:
        total = format_bytes(sum(checkpoints.values()))
        notes.append(
            f"note    not sent: {format_number_of(len(checkpoints), 'checkpoint')}, {total}: {min(checkpoints)}"
        )
    return Listing(sizes, folders, notes)


def git_names(folder: Path) -> Iterator[str]:
    """Yields what git tracks, and what it neither tracks nor ignores; folders have a slash behind."""
    for name in git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"):
        path = folder / name
        if path.is_dir() and not path.is_symlink():  # a repository in this one
            yield from (f"{name.rstrip('/')}/{inner}" for inner in git_names(path))
        else:
            yield name
    for name in git(folder, "ls-files", "-z", "--others", "--exclude-standard", "--directory"):
        if name.endswith("/") and name != "./":
            yield name
            yield from (name + inner for inner in walk_names(folder / name) if inner.endswith("/"))


def walk_names(folder: Path) -> Iterator[str]:
    """Yields every file and folder but what NOT_SENT has and virtual environments; folders have a slash behind."""
    for place, names, files in os.walk(folder):
        below = "" if Path(place) == folder else f"{Path(place).relative_to(folder)}/"
        links = [name for name in names if Path(place, name).is_symlink()]
        names[:] = [name for name in names if name not in NOT_SENT and not Path(place, name, "pyvenv.cfg").exists()]
        yield from (f"{below}{name}/" for name in names if name not in links)
        yield from (below + name for name in sorted([*files, *links]))


def is_in_git(folder: Path) -> bool:
    """Whether git says which files of the folder count. A folder that git ignores as a whole is one without git."""
    if not any((place / ".git").exists() for place in (folder, *folder.parents)):
        return False
    return not git(folder, "check-ignore", "--", ".", negative=1)


def git(folder: Path, *words: str, negative: int = 0) -> list[str]:
    """Returns the names that git prints. negative: an exit code that is an answer. Raises PacelineError where it fails."""
    try:
        answer = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False)
    except FileNotFoundError as error:
        what = f"{folder} is in a git repository, and git is not installed here"
        raise PacelineError(what, fix=f"sudo apt install git, or {NO_SYNC}") from error
    if answer.returncode not in (0, negative):
        lines = answer.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {answer.returncode}"]
        fix = f"git -C {shlex.quote(str(folder))} status says more; or {NO_SYNC}"
        raise PacelineError(f"git cannot list {folder}: {lines[0].removeprefix('fatal: ')}", fix=fix)
    return [os.fsdecode(name) for name in answer.stdout.split(b"\0") if name]


def too_large(folder: Path, what: str, sizes: Mapping[str, int]) -> PacelineError:
    """Returns the error of a folder with too much in it, which names what is largest."""
    parts: dict[str, int] = {}
    for name, size in sizes.items():
        top = name.partition("/")[0]
        parts[top] = parts.get(top, 0) + size
    largest = max(parts, key=lambda name: parts[name])
    return PacelineError(
        f"{folder} has {what}; the largest in it is {largest}, {format_bytes(parts[largest])}",
        fix=f"--sync DIR of a smaller folder, {largest} in .gitignore, or {NO_SYNC}",
    )


def hash_files(folder: Path, sizes: Mapping[str, int]) -> dict[str, str]:
    """Returns the hash of every file by name. Raises PacelineError for one that cannot be read."""
    hashes = {name: sha256_of(folder / name) for name in sizes}
    for name, sha256 in hashes.items():
        if sha256 is None:
            raise PacelineError(f"{folder / name} cannot be read", fix="chmod +r, or list it in .gitignore")
    return {name: sha256 for name, sha256 in hashes.items() if sha256 is not None}


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
