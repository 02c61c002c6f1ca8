"""
The command of `run` as the user typed it: what a rank executes for it, and the name that it gives its run.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from paceline.errors import PacelineError, UsageError

LAUNCHER_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
LAUNCHERS = {"torchrun", "deepspeed", "mpirun", "mpiexec", "horovodrun"}


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
        raise PacelineError(f"script {name} does not exist in {path.parent}", fix="check its name and its path")
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
