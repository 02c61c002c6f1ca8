"""
What a run folder's files hold, which anybody may have written.

For views a field of a wrong type counts as absent. A command that uses a run again needs its files whole: one that is missing,
empty or cut ends it with an error that names the file.
"""

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from paceline.errors import PacelineError, expand_home
from paceline.rundir import (
    RunDir,
    find_run,
    is_queued,
    is_script_run,
    read_end,
    read_json_lines,
    read_text,
    resume_command,
    unreadable_file,
    write_atomic,
)

T = TypeVar("T")

LAST_BYTES = 64 << 10  # of a file of records, of which a half-written line is none
MAX_LINE = 80  # characters of a line in an error


def well_typed(value: Any, kind: Any) -> Any:
    """Returns a value that was read from a file as its annotation has it: what has another type is absent, None or left out.

    A dataclass that says `is_typed` is not looked into.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        typed = [well_typed(value, argument) for argument in arguments if argument is not NoneType]
        return next((item for item in typed if item is not None), None)
    if origin is list and isinstance(value, list):
        items = [well_typed(item, arguments[0]) for item in value]
        return items if None not in items else [item for item in items if item is not None]
    if origin is dict and isinstance(value, dict) and arguments[1] is not Any:
        return {key: typed for key, item in value.items() if (typed := well_typed(item, arguments[1])) is not None}
    if origin is Literal:
        return value if value in arguments else None
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, kind) and not hasattr(kind, "is_typed"):
        checked = {name: well_typed(getattr(value, name), hint) for name, (hint, _) in hints_of(kind).items()}
        absent = {name: default() for name, (_, default) in hints_of(kind).items() if checked[name] is None}
        return replace(value, **checked | absent)
    if kind is Any or (kind is float and type(value) is int):
        return value
    return value if isinstance(value, origin or kind) and (type(value) is not bool or kind is bool) else None


@cache
def hints_of(kind: Any) -> dict[str, tuple[Any, Callable[[], Any]]]:
    """Returns the annotation of each field of a dataclass, and what makes the value of a field that is absent."""
    hints = get_type_hints(kind)

    def default_of(name: str, default: Any, factory: Any) -> Callable[[], Any]:
        if factory is not MISSING:
            return factory  # type: ignore[no-any-return]
        zero = hints[name] if isinstance(hints[name], type) else lambda: None
        return zero if default is MISSING else lambda: default

    return {
        item.name: (hints[item.name], default_of(item.name, item.default, item.default_factory))
        for item in fields(kind)
    }


@contextmanager
def typed_content(run: RunDir) -> Iterator[None]:
    """Raises PacelineError where a record of the run has a field of a type that its reader cannot use."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        problem = f"{run.path} has a value of another type than paceline writes: {type(error).__name__}: {error}"
        raise PacelineError(problem, fix="restore its files; paceline explain LOG reads a log alone") from error


def find_training_run(name: str, *, runs_dir: str, script_fix: str = "") -> RunDir:
    """find_run, but for a script's run, which has neither our config nor a checkpoint that we can read.

    Raises PacelineError where config.toml is empty or damaged too. script_fix: instead of the command that resumes the script.
    """
    try:
        run = find_recorded_run(name, runs_dir=runs_dir)
    except PacelineError as error:
        if (origin := export_origin(expand_home(name))) is None:
            raise
        exported = RunDir(Path(runs_dir) / origin[0])
        checkpoint = shlex.quote(str(exported.checkpoints / f"step_{origin[1]:06d}"))
        raise PacelineError(
            f"{name} is an export of {origin[0]} at step {origin[1]:,}, for transformers, and no run",
            fix=f"give the run: {exported.quoted}, if it is there; --init-from takes {checkpoint} too",
        ) from error
    if is_queued(run):
        raise PacelineError(
            f"{run.name} was submitted to Slurm and has not begun",
            fix=f"paceline watch {run.quoted} shows where it is; where its job has ended, repeat the `paceline train`",
        )
    if is_script_run(run):
        raise PacelineError(
            f"{run.name} is the run of a script, not a training run of paceline's own",
            fix=script_fix
            or f"{resume_command(run)} starts it again in its folder; its checkpoints are the script's own",
        )
    if not read_run_file(run.config_toml, tomllib.loads):
        raise damaged(run.config_toml, "is empty")
    return run


def find_recorded_run(name: str, *, runs_dir: str) -> RunDir:
    """find_run; where the folder has the config of a training run in its events alone, the error has the command that writes it."""
    try:
        return find_run(name, runs_dir=runs_dir)
    except PacelineError as error:
        for run in map(RunDir, (Path(name), Path(runs_dir) / name)):
            if launched_config(run):
                raise damaged(run.config_toml, "is missing") from error
        raise


def export_origin(folder: Path) -> tuple[str, int] | None:
    """Returns the run and the step of a folder that `paceline export` wrote; None for any other."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        origin = json.loads(read_text(folder / "config.json"))["paceline"]
        return str(origin["run"]), int(origin["step"])
    return None


def read_run_file(path: Path, parse: Callable[[str], T]) -> T:
    """Returns what `parse` makes of a file of a run folder; raises PacelineError where it is missing, empty or damaged."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise damaged(path, "is missing") from None
    except OSError as error:
        raise unreadable_file(path, error) from error
    except UnicodeDecodeError as error:
        raise damaged(path, "is not UTF-8") from error
    if not text.strip():
        raise damaged(path, "is empty")
    try:
        return parse(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, tomllib.TOMLDecodeError) and (line := toml_line(text, error)):
            fix = f"correct that line in {shlex.quote(str(path))}, or {restore_fix(path)}"
            raise PacelineError(f"{path} is not valid TOML: {line}", fix=fix) from error
        tells_line = isinstance(error, (json.JSONDecodeError, tomllib.TOMLDecodeError))
        raise damaged(path, f"is damaged: {error}" if tells_line else "is damaged") from error


def toml_line(text: str, error: tomllib.TOMLDecodeError) -> str:
    """Returns the line that is not TOML, the last one of a cut file, and what is wrong; empty where the error has no place."""
    place = re.search(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)$", str(error), re.DOTALL)
    if place is None:
        return ""
    lines = text.rstrip().split("\n")
    number = int(place[2] or len(lines))
    where = f"line {number}, `{lines[number - 1].strip()[:MAX_LINE]}`" if number <= len(lines) else f"line {number}"
    return f"{where}: {place[1]}" + ("" if place[2] else ", and the file ends there")


def damaged(path: Path, problem: str) -> PacelineError:
    """Returns the error for a file of a run folder that is of no use. problem: what is wrong with it, a verb first."""
    run, other = RunDir(path.parent), "start a new run"
    if path == run.plan_json and any(run.checkpoints.glob("step_*")):
        other += f" with its weights: paceline train --init-from {run.quoted} --name NEW"
    elif path != run.config_toml:
        other += f" with paceline train {shlex.quote(str(run.config_toml))} --name NEW"
    return PacelineError(f"{path} {problem}", fix=f"{restore_fix(path)}, or {other}")


def restore_fix(path: Path) -> str:
    """Returns how a file of a run folder comes back: config.toml from the events of the run's attempts."""
    run = RunDir(path.parent)
    if path != run.config_toml or not launched_config(run):
        return "restore it, such as from a copy of the run"
    code = "import sys; from paceline.typed_fields import restore_config; restore_config(sys.argv[1])"
    return f"write it as the last attempt had it: {shlex.join([sys.executable, '-c', code, str(run.path)])}"


def launched_config(run: RunDir) -> dict[str, Any]:
    """Returns the config of the last attempt of paceline's own trainer that an event has; empty without one."""
    with suppress(OSError):
        configs = [event.get("config") for event in read_json_lines(run.events) if event.get("event") == "launch"]
        return next((config for config in reversed(configs) if isinstance(config, dict) and "depth" in config), {})
    return {}


def restore_config(folder: str) -> None:
    """Writes the config.toml of a run from its events; a damaged one is kept as config.toml.damaged."""
    run = RunDir(Path(folder))
    with suppress(FileNotFoundError):
        run.config_toml.replace(f"{run.config_toml}.damaged")
    write_atomic(run.config_toml, toml_text(launched_config(run)))


def toml_text(values: Mapping[str, Any]) -> str:
    """Returns TOML with a line for each value; those that are None are left out."""
    return "".join(f"{key} = {format_toml_value(value)}\n" for key, value in values.items() if value is not None)


def format_toml_value(value: Any) -> str:
    """A bool, number, text or list of these as TOML writes it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_toml_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return str(value)
    # a JSON string is a basic string of TOML, except for the one character that JSON does not escape
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def damaged_files(run: RunDir) -> list[str]:
    """Returns a sentence for each file of records of whose lines none can be read, and for missing events beside metrics."""
    notes = []
    for path, effect in ((run.events, "how the run ended is not known"), (run.metrics, "its curves are lost")):
        with suppress(OSError):
            if read_end(path, LAST_BYTES)[0] and next(read_json_lines(path), None) is None:
                notes.append(f"{path.name} is damaged, none of its lines can be read: {effect}")
    if run.metrics.exists() and not run.events.exists():
        notes.append(f"{run.events.name} is missing: how the run ended is not known")
    return notes
