"""
The command of `run` as the user typed it: what a rank executes for it, the files of its folder, and its run's name.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.machinery import PathFinder
from pathlib import Path

from paceline.config import Config, check_config
from paceline.errors import PacelineError, UsageError, expand_home, nearest
from paceline.launch.background import check_unused
from paceline.launch.gather import sha256_of
from paceline.rundir import RunDir, is_script_run, read_json_lines, resume_command
from paceline.slurm import allocation
from paceline.units import format_bytes, format_number_of
from paceline.watch.events import end_state

LAUNCHER_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
LAUNCHERS = {"torchrun", "deepspeed", "mpirun", "mpiexec", "horovodrun"}
INTERPRETER = re.compile(r"python[\d.]*|bash|sh")
NO_SYNC = "--no-sync where the files are already there"
COMPILED = "__pycache__"
MAX_BYTES = 100 << 20
MAX_FILES = 20_000
CHECKPOINT_BYTES = 10 << 20  # a larger one is not sent without git, which would have it in .gitignore
CHECKPOINTS = (".pt", ".pth", ".ckpt", ".safetensors")  # .bin may be text as tokens
NOT_SENT = {
    ".git", ".hg", ".svn", COMPILED, ".venv", "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache",
    ".ipynb_checkpoints",
}  # fmt: skip


def make_argv(command: Sequence[str], *, cwd: Path) -> list[str]:
    """Returns what a rank executes: python for a .py file or -m, otherwise the program. Raises PacelineError if it cannot run."""
    if not command:
        raise UsageError("run needs a script", fix="paceline run -- train.py --lr 0.1")
    refuse_launchers(command)
    first, *arguments = command
    if first == "-m":
        if not arguments:
            raise UsageError("-m needs a module", fix="paceline run -- -m package.train --lr 0.1")
        if arguments[0].endswith(".py"):
            raise UsageError(
                f"-m {arguments[0]} is a file, not a module", fix=f"leave -m out: -- {shlex.join(arguments)}"
            )
        top = arguments[0].partition(".")[0]
        if PathFinder.find_spec(top, [str(cwd), *sys.path]) is None:
            fix = f"install it, or start in the folder that holds {top}"
            raise PacelineError(f"there is no module {arguments[0]}", fix=fix)
        return [sys.executable, "-m", *arguments]
    if first.startswith("-"):
        raise UsageError(f"{first} comes before the script", fix=f"paceline run -- SCRIPT.py {first} ...")
    path = cwd / first
    if first.endswith((".py", ".pyw")):
        check_file(path, first)
        return [sys.executable, first, *arguments]
    if "/" in first or (path.is_file() and not shutil.which(first)):
        check_file(path, first)
        if not os.access(path, os.X_OK):
            name, shell = shlex.quote(first), "bash" if first.endswith(".sh") else "python"
            raise PacelineError(f"{first} is not executable", fix=f"chmod +x {name}, or -- {shell} {name} ...")
        return [first if "/" in first else f"./{first}", *arguments]
    if shutil.which(first) is None:
        raise PacelineError(f"there is no script and no program {first}", fix="check its name, or give its path")
    return [first, *arguments]


def check_file(path: Path, name: str) -> None:
    """Raises PacelineError where the script is not a file that can be read."""
    if path.is_dir():
        raise PacelineError(f"{name} is a folder", fix="the script in it, or -m for a package")
    if not path.is_file():
        near = nearest(path.name, (file.name for file in path.parent.glob("*.py")))
        fix = f"did you mean {shlex.quote(str(Path(name).parent / near))}?" if near else "check its name and its path"
        raise PacelineError(f"script {name} does not exist in {path.parent}", fix=fix)
    if not os.access(path, os.R_OK):
        raise PacelineError(f"script {name} cannot be read", fix=f"chmod +r {shlex.quote(name)}")


def refuse_launchers(command: Sequence[str]) -> None:
    """Raises UsageError for another launcher: it would start all ranks once for each rank."""
    args = list(command)
    if Path(args[0]).name.startswith("python") and len(args) > 1:
        args = args[1:]
    if args[0] == "-m" and len(args) > 1:
        args = args[1:]
    name = Path(args[0]).name
    is_accelerate = name == "accelerate" and args[1:2] == ["launch"]
    if not is_accelerate and name not in LAUNCHERS and args[0] not in LAUNCHER_MODULES:
        return
    launcher = "accelerate launch" if is_accelerate else name
    script = next((i for i, arg in enumerate(args) if arg.endswith(".py")), None)
    script_text = "SCRIPT.py ..." if script is None else shlex.join(args[script:])
    raise UsageError(
        f"{launcher} starts ranks itself: each rank of paceline run would start them all again",
        fix=f"the script alone: paceline run --nproc N -- {script_text}",
    )


def command_name(command: Sequence[str]) -> str:
    """Returns the start of a run's default name: train.py -> train, -m package.train -> train, ./run.sh -> run."""
    args = [arg for arg in command if arg != "-m"] if command[0] == "-m" else list(command)
    if Path(args[0]).name.startswith("python") and not args[0].endswith(".py"):
        args = [arg for arg in args[1:] if not arg.startswith("-")] or args
    file = Path(args[0]).name
    stem = file.rpartition(".")[2] if command[0] == "-m" else file.partition(".")[0]
    return "".join(char if char.isalnum() or char in "-_" else "-" for char in stem).strip("-") or "script"


def choose_run(name: str | None, runs_dir: str, command: Sequence[str]) -> tuple[RunDir, bool]:
    """Returns the folder that the run will have, and whether it is new; creates nothing. Raises PacelineError where it is in use.

    A job that Slurm has requeued starts its batch script again, with the same name: it continues its run.
    """
    if name is None:
        return RunDir(Path(runs_dir) / f"{command_name(command)}-{datetime.now():%Y%m%d-%H%M%S}"), True
    check_config(Config(name=name))
    run, place = RunDir(Path(runs_dir) / name), allocation()
    if place and place.restarts and is_script_run(run):
        events = list(read_json_lines(run.events))
        jobs = [event.get("job_id") for event in events if event.get("event") in ("script", "attempt")]
        if jobs[-1:] == [place.job_id] and end_state(events) != "finished":
            return run, False
    other = "another --name; without --name, script and time make the name"
    check_unused(run, fix=f"{resume_command(run)} continues it; or {other}" if is_script_run(run) else other)
    return run, True


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
