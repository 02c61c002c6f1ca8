"""
The words after `paceline run`: which are ours, which are the script's, and what each rank executes.

Whoever comes from torchrun or accelerate is told what paceline calls the same thing. Looks at files, starts nothing.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from paceline.errors import PacelineError, UsageError

VALUED = {
    "nproc",
    "name",
    "runs-dir",
    "device",
    "max-attempts",
    "hang-after",
    "health-every",
    "track",
    "notify",
}  # our options that take a value; the others are switches
HERE = "paceline finds a free port on this host by itself: leave it out"

# options of torchrun, accelerate launch and deepspeed -> what to write instead
FOREIGN = {
    "nproc-per-node": "--nproc {value}",
    "num-processes": "--nproc {value}",
    "num-gpus": "--nproc {value}",
    "log-dir": "--runs-dir {value}",
    "cpu": "--device cpu",
    "use-cpu": "--device cpu",
    "module": "-m MODULE, as for python",
    "standalone": HERE,
    "rdzv-backend": HERE,
    "rdzv-endpoint": HERE,
    "rdzv-id": HERE,
    "master-addr": HERE,
    "master-port": HERE,
    "main-process-ip": HERE,
    "main-process-port": HERE,
    "max-restarts": "--max-attempts, which counts the first one too",
    "tee": "leave it out: every rank's output is shown and kept",
    "redirects": "leave it out: every rank's output is shown and kept",
    "no-python": "leave it out: any executable will do",
    "multi-gpu": "leave it out: --nproc 2, or one process for each GPU by itself",
    "config-file": "leave it out: --nproc and --device say it",
}
LAUNCHER_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
LAUNCHERS = {"torchrun", "deepspeed", "mpirun", "mpiexec", "horovodrun"}


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the command: what follows `--`, or all from the first word that is no option of ours."""
    own: list[str] = []
    rest = list(words)
    while rest:
        if rest[0] == "--":
            return own, rest[1:]
        if rest[0] == "-m" or not rest[0].startswith("-"):
            return own, rest
        option = rest.pop(0)
        name, equals, value = option.lstrip("-").replace("_", "-").partition("=")
        if name in FOREIGN:
            told = FOREIGN[name].format(value=value or (rest[0] if rest and not rest[0].startswith("-") else "2"))
            ours = told if not told.startswith("-") else f"paceline run {told}"
            raise UsageError(f"{option.partition('=')[0]} is not an option of paceline run", fix=ours)
        own.append(option)
        if name in VALUED and not equals and rest:
            own.append(rest.pop(0))
    return own, []


def executed(command: Sequence[str], *, cwd: Path) -> list[str]:
    """What a rank executes for `command`: python for a .py file or -m, else the program itself."""
    if not command:
        raise UsageError("run needs a script", fix="paceline run -- train.py --lr 0.1")
    refuse_launchers(command)
    first, *arguments = command
    if first == "-m":
        return [sys.executable, "-m", *checked_module(arguments, cwd=cwd)]
    if first.startswith("-"):
        raise UsageError(f"{first} comes before the script", fix=f"paceline run -- SCRIPT.py {first} ...")
    path = cwd / first
    if first.endswith((".py", ".pyw")):
        check_file(path, first)
        return [sys.executable, first, *arguments]
    if "/" in first or (path.is_file() and not shutil.which(first)):
        check_file(path, first)
        if not os.access(path, os.X_OK):
            raise PacelineError(f"{first} is not executable", fix=f"chmod +x {first}, or -- python {first} ...")
        return [first if "/" in first else f"./{first}", *arguments]
    if shutil.which(first) is None:
        raise PacelineError(f"there is no script and no program {first}", fix="give the path of one that is there")
    return [first, *arguments]


def checked_module(words: Sequence[str], *, cwd: Path) -> Sequence[str]:
    if not words:
        raise UsageError("-m needs a module", fix="paceline run -- -m package.train --lr 0.1")
    top = words[0].partition(".")[0]
    if PathFinder.find_spec(top, [str(cwd), *sys.path]) is None:
        raise PacelineError(
            f"there is no module {words[0]}", fix=f"install it, or start in the folder that holds {top}"
        )
    return words


def check_file(path: Path, name: str) -> None:
    if path.is_dir():
        raise PacelineError(f"{name} is a folder", fix="give the script in it, or -m for a package")
    if not path.is_file():
        raise PacelineError(f"script {name} does not exist in {path.parent}", fix="give the path of one that does")
    if not os.access(path, os.R_OK):
        raise PacelineError(f"script {name} cannot be read", fix=f"chmod +r {name}")


def refuse_launchers(command: Sequence[str]) -> None:
    """A launcher within the launch would start all ranks once for each rank."""
    words = list(command)
    if Path(words[0]).name.startswith("python") and len(words) > 1:
        words = words[1:]
    if words[0] == "-m" and len(words) > 1:
        words = words[1:]
    name = Path(words[0]).name
    accelerate = name == "accelerate" and words[1:2] == ["launch"]
    if not accelerate and name not in LAUNCHERS and words[0] not in LAUNCHER_MODULES:
        return
    said = "accelerate launch" if accelerate else name
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    shown = "SCRIPT.py ..." if script is None else " ".join(words[script:])
    raise UsageError(
        f"{said} starts ranks itself: each rank of paceline run would start them all again",
        fix=f"the script alone: paceline run --nproc N -- {shown}",
    )


def name_of_command(command: Sequence[str]) -> str:
    """train.py -> train, -m package.train -> train, ./run.sh -> run: the beginning of a run's default name."""
    words = [word for word in command if word != "-m"] if command[0] == "-m" else list(command)
    if Path(words[0]).name.startswith("python") and not words[0].endswith(".py"):
        words = [word for word in words[1:] if not word.startswith("-")] or words
    last = Path(words[0]).name
    stem = last.rpartition(".")[2] if command[0] == "-m" else last.partition(".")[0]
    return "".join(each if each.isalnum() or each in "-_" else "-" for each in stem).strip("-") or "script"
