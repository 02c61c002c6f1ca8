"""
A training run of paceline's own, found by its name, and the files that a command needs to use it again.

A file that is missing, empty or cut ends the command with an error that names it. Views skip such a file instead.
"""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from paceline.errors import PacelineError
from paceline.rundir import RunDir, find_run, is_queued, is_script_run, read_text

T = TypeVar("T")


def find_training_run(name: str, *, runs_dir: str) -> RunDir:
    """find_run, but for a script's run, which has neither our config nor a checkpoint that we can read.

    Raises PacelineError where config.toml is empty or damaged too.
    """
    run = find_run(name, runs_dir=runs_dir)
    if is_queued(run):
        raise PacelineError(
            f"{run.name} was submitted to Slurm and has not begun",
            fix=f"paceline watch {run.path} shows where it is; where its job has ended, the same command submits it again",
        )
    if is_script_run(run):
        raise PacelineError(
            f"{run.name} is the run of a script, not a training run of paceline's own",
            fix=f"paceline run {run.config_toml} runs it again",
        )
    if not read_run_file(run.config_toml, tomllib.loads):
        raise damaged(run.config_toml, "is empty")
    return run


def read_run_file(path: Path, parse: Callable[[str], T]) -> T:
    """Returns what `parse` makes of a file of a run folder; raises PacelineError where it is missing, empty or damaged."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise damaged(path, "is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        problem = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else f"cannot be read: {error.strerror}"
        raise damaged(path, problem) from error
    if not text.strip():
        raise damaged(path, "is empty")
    try:
        return parse(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, "is damaged") from error


def damaged(path: Path, problem: str) -> PacelineError:
    """Returns the error for a file of a run folder that is of no use. problem: what is wrong with it, a verb first."""
    config = path.with_name("config.toml")
    other = "start a new run" if path == config else f"start a new run with paceline train {config} --name NEW"
    return PacelineError(f"{path} {problem}", fix=f"restore it, such as from a copy of the run, or {other}")
