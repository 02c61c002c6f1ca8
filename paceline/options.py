"""
What the words of a command line mean: a run, a config with its flags, the options of commands that take no config keys.
"""

import difflib
import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, UsageError
from paceline.rundir import RunDir

if TYPE_CHECKING:
    from paceline.config import Config


TINY = Path(__file__).parent / "configs" / "tiny.toml"


def config_of(
    args: list[str], *, command: str, default: dict[str, Any] | None = None
) -> tuple["Config", dict[str, Any]]:
    """The config that the words mean, and the keys that flags have set; notes about a .py file are printed.

    Without a file: configs/tiny.toml, or the defaults of all keys with those of `default`.
    """
    from paceline.config import load_config, parse_flags

    words, flags = parse_flags(args)
    file = flags.pop("config", None)
    if (words and file) or len(words) > 1:
        raise UsageError(
            f"one config file is taken, {len(words) + bool(file)} are given",
            fix=f"paceline {command} CONFIG --key value",
        )
    file = words[0] if words else file
    if file is None and default is not None:
        return load_config(None, {**default, **flags})[0], flags
    config, notes = load_config(file or TINY, flags)
    for note in notes:
        print(note, file=sys.stderr)
    return config, flags


def parse_options(args: list[str], known: Mapping[str, Callable[[str], Any]]) -> tuple[list[str], dict[str, Any]]:
    """Words and options of the commands that take no config keys."""
    words: list[str] = []
    options: dict[str, Any] = {}
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            words.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        name = name.replace("_", "-")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UsageError(
                f"unknown flag --{name}", fix=f"--{near[0]}" if near else "one of " + ", ".join(f"--{k}" for k in known)
            )
        if known[name] is bool:
            options[name] = True
            continue
        if not equals:
            if not rest:
                raise UsageError(f"--{name} has no value", fix=f"--{name} VALUE")
            text = rest.pop(0)
        try:
            options[name] = known[name](text)
        except ValueError:
            kind = "an integer" if known[name] is int else "a number"
            raise UsageError(f"--{name} {text}: not {kind}", fix=f"--{name} 8") from None
    return words, options


def find_run(words: list[str], *, runs_dir: str | None) -> RunDir:
    """The run folder that a path, or a name under runs/, means."""
    if len(words) != 1:
        raise UsageError(
            f"one RUN is needed, {len(words)} are given", fix="a run's folder or name; paceline runs lists them"
        )
    folder = Path(runs_dir or "runs")
    for path in (Path(words[0]), folder / words[0]):
        if (path / "config.toml").is_file():
            return run_of_ours(RunDir(path))
    names = sorted(path.parent.name for path in folder.glob("*/config.toml"))
    known = (
        f"one of {', '.join(names[-5:])}" if names else "paceline train makes one; give the folder if it is elsewhere"
    )
    raise PacelineError(f"no run {words[0]}: neither it nor {folder / words[0]} holds a config.toml", fix=known)


def run_of_ours(run: RunDir) -> RunDir:
    """The run, unless a script's: that has no config of ours and no checkpoint that we can read."""
    with suppress(OSError, ValueError):
        if "command" in tomllib.loads(run.config_toml.read_text(encoding="utf-8")):
            raise PacelineError(
                f"{run.name} is the run of a script, not a training run of paceline's own",
                fix=f"paceline run {run.config_toml} runs it again",
            )
    return run


def one_word(words: list[str], what: str, *, default: str) -> str:
    if len(words) > 1:
        raise UsageError(f"one {what} is taken, {len(words)} are given", fix=f"leave {' '.join(words[1:])} out")
    return words[0] if words else default


def one_action(args: list[str], actions: tuple[str, ...], *, command: str) -> tuple[str, list[str]]:
    if not args or args[0] not in actions:
        given = f"not {args[0]}" if args else "none is given"
        raise UsageError(f"{command} takes {' or '.join(actions)}, {given}", fix=f"paceline {command} {actions[0]}")
    return args[0], args[1:]


def take_option(args: list[str], name: str, kind: Callable[[str], Any]) -> tuple[list[str], Any]:
    """One option out of words that are config keys else; its value, or None."""
    rest, values = take_values(args, name, kind)
    return rest, values[-1] if values else None


def take_values(args: list[str], name: str, kind: Callable[[str], Any] = str) -> tuple[list[str], list[Any]]:
    """The values of an option that may be given several times."""
    rest: list[str] = []
    values = []
    words = iter(args)
    for word in words:
        if word.partition("=")[0].replace("_", "-") == f"--{name}":
            given = [word] if "=" in word else [word, *([text] if (text := next(words, None)) is not None else [])]
            values.append(parse_options(given, {name: kind})[1][name])
        else:
            rest.append(word)
    return rest, values


def take_flag(args: list[str], flag: str) -> tuple[list[str], bool]:
    return [arg for arg in args if arg != flag], flag in args


def cache_dir(config: "Config") -> Path:
    """Where prepared text and what was measured of this machine are kept."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")  # the desktop standard, not a setting of ours
    return (Path(base) if base else Path.home() / ".cache") / "paceline"
