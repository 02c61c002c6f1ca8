"""
Config files: TOML with flat keys, and the `.py` files of plain `key = literal` lines that nanoGPT and nanochat forks keep.

A `.py` file is parsed with ast, never executed. The names of other trainers become ours by the table in config.py. Arithmetic
on literals (5 * 8, 2**19) is computed, anything else is an error that names its line.
"""

import ast
import json
import operator
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.command_line import nearest
from paceline.config import FOREIGN, FOREIGN_VALUES, KEYS, LENGTH_KEYS, Config, check_config
from paceline.errors import PacelineError

TINY = Path(__file__).parent / "configs" / "tiny.toml"


def load_config(file: str | Path | None, flags: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """The checked config of defaults < file < flags, and notes for the user about a .py file's unused names."""
    from_file, notes = read_config_file(Path(file)) if file is not None else ({}, [])
    values = override(from_file, flags)
    config = Config(**values)
    check_config(config)
    return config, notes


def resolve_config(file: str | None, keys: Mapping[str, Any], *, default: Mapping[str, Any] | None = None) -> Config:
    """The config of a command line; notes about a .py file go to stderr.

    Without a file: configs/tiny.toml, or the defaults of all keys with those of `default`.
    """
    if file is None and default is not None:
        return load_config(None, {**default, **keys})[0]
    config, notes = load_config(file or TINY, keys)
    for note in notes:
        print(note, file=sys.stderr)
    return config


def override(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """`upper` wins key by key; num_steps, epochs and time all set the length, so each of them replaces the others."""
    if any(upper.get(name) is not None for name in LENGTH_KEYS):
        lower = {name: value for name, value in lower.items() if name not in LENGTH_KEYS}
    return {**lower, **upper}


def read_config_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The checked values of a .toml or .py file, and notes about names that are not used."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise PacelineError(f"config file {path} does not exist", fix=f"give one that does{_nearby(path)}") from None
    except IsADirectoryError:
        raise PacelineError(f"config {path} is a folder", fix=f"give a .toml file{_nearby(path / 'x')}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PacelineError(f"config file {path} cannot be read: {error}", fix="a readable UTF-8 .toml file") from error
    if path.suffix == ".py":
        return read_python_config(text, path=path)
    if path.suffix != ".toml":
        raise PacelineError(
            f"config file {path} is neither .toml nor .py", fix="name it with its kind, such as my.toml"
        )
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PacelineError(
            f"config file {path} is not valid TOML: {error}", fix="flat lines such as depth = 12"
        ) from error
    return {name: checked_value(name, value, where=str(path)) for name, value in table.items()}, []


def _nearby(path: Path) -> str:
    folder = path.parent
    files = sorted(str(folder / p.name) for p in folder.glob("*.toml") if p.name != "pyproject.toml")
    return ": " + ", ".join(files[:5]) if files else ", such as configs/tiny.toml"


def checked_value(name: str, value: Any, *, where: str) -> Any:
    """The value of key `name`, or an error that names the allowed ones. where: the file or flag that it came from."""
    if name not in KEYS:
        raise unknown_key(name, where=where, value=value)
    key, shown = KEYS[name], f"{where}: {name} is"
    if value is None and key.is_optional:
        return None
    if float in key.kinds and type(value) is int:
        value = float(value)
    if not isinstance(value, key.kinds) or (isinstance(value, bool) and not key.is_switch):
        fix = f"{name} = {format_toml_value(key.example)}"
        raise PacelineError(f"{shown} {value!r}, not {key.expected}", fix=fix)
    if value == "":
        raise PacelineError(f"{shown} empty", fix=f"leave {name} out, or give it a value")
    if problem := key.problem(value):
        raise PacelineError(f"{shown} {value!r}, {problem}", fix=key.expected)
    return value


def unknown_key(name: str, *, where: str, value: Any = "") -> PacelineError:
    """Names our key for one of another trainer, else the nearest key."""
    if isinstance(value, dict):
        return PacelineError(
            f"{where}: [{name}] is a table, keys are flat", fix="write its keys without the [section] line"
        )
    ours = FOREIGN.get(name)
    if ours:
        fix = f"{ours} = {format_toml_value(value)}"
        return PacelineError(f"{where}: unknown key {name}; paceline calls it {ours}", fix=fix)
    near = nearest(name, KEYS)
    fix = f"did you mean {near}?" if near else "paceline train --help lists all keys"
    return PacelineError(f"{where}: unknown key {name}", fix=fix)


def format_toml(config: Config) -> str:
    """The file that gives this Config back; keys at auto are left out."""
    lines = [f"{name} = {format_toml_value(value)}" for name, value in asdict(config).items() if value is not None]
    return "\n".join(lines) + "\n"


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


def with_values(config: Config, **values: Any) -> Config:
    """A checked copy."""
    changed = replace(config, **values)
    check_config(changed)
    return changed


OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}

# names that change nothing here at these values; with any other value they are an error
HARMLESS: dict[str, tuple[Any, ...]] = {
    "dropout": (0, 0.0),
    "bias": (False,),
    "init_from": ("scratch",),
    "decay_lr": (True,),
    "eval_only": (False,),
    "always_save_checkpoint": (True, False),
    "backend": ("nccl", "gloo"),
}
UNUSED_PREFIXES = (
    "wandb_",
    "eval_iters",
    "lr_decay_iters",
    "min_lr",
    "beta1",
    "beta2",
    "core_metric_",
    "total_training_time",
)


def read_python_config(text: str, *, path: Path) -> tuple[dict[str, Any], list[str]]:
    """The checked values under our names, and a note about the names that paceline does not use."""
    literals = _literals(text, path=path)
    values: dict[str, Any] = {}
    unused: list[str] = []
    accumulation = literals.pop("gradient_accumulation_steps", None)
    n_head = literals.pop("n_head", None)
    for name, value in literals.items():
        if name in KEYS:
            values[name] = checked_value(name, value, where=str(path))
        elif name in FOREIGN:
            value = FOREIGN_VALUES.get(value, value) if isinstance(value, str | int | float) else value
            if value is not None:
                values[FOREIGN[name]] = checked_value(FOREIGN[name], value, where=f"{path} ({name})")
        elif value in HARMLESS.get(name, ()) or name.startswith(UNUSED_PREFIXES):
            unused.append(name)
        elif name in HARMLESS:
            raise PacelineError(
                f"{path}: paceline has no {name}, and {value!r} asks for it", fix=f"delete the line {name}"
            )
        else:
            checked_value(name, value, where=str(path))  # raises: unknown, with the nearest
    if n_head is not None:
        if not isinstance(n_head, int) or n_head < 1 or values.get("n_embd") is None or values["n_embd"] % n_head:
            raise PacelineError(f"{path}: n_head {n_head!r} does not divide n_embd", fix="set n_embd and head_dim")
        values["head_dim"] = checked_value("head_dim", values["n_embd"] // n_head, where=f"{path} (n_head)")
    if accumulation is not None and "total_batch_size" not in values:
        rows, length = values.get("device_batch_size"), values.get("sequence_len")
        if not rows or not length or not isinstance(accumulation, int):
            raise PacelineError(
                f"{path}: gradient_accumulation_steps needs batch_size and block_size in the same file",
                fix="set total_batch_size in tokens",
            )
        values["total_batch_size"] = checked_value("total_batch_size", accumulation * rows * length, where=str(path))
    notes = [f"{path.name}: not used by paceline: {', '.join(unused)}"] if unused else []
    return values, notes


def _literals(text: str, *, path: Path) -> dict[str, Any]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise PacelineError(
            f"config file {path} is not valid Python: {error}", fix="plain lines: depth = 12"
        ) from error
    values: dict[str, Any] = {}
    for node in tree.body:
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                continue  # a docstring
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                values[name] = _evaluate(value, values, path=path)
            case _:
                raise PacelineError(
                    f"{path}:{node.lineno}: only `key = literal` lines are read, nothing is executed",
                    fix="delete that line",
                )
    return values


def _evaluate(node: ast.expr, names: dict[str, Any], *, path: Path) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _evaluate(operand, names, path=path)
            if isinstance(inner, int | float):
                return -inner
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = _evaluate(left, names, path=path), _evaluate(right, names, path=path)
            if all(isinstance(number, int | float) and abs(number) < 2**63 for number in (a, b)):
                too_large = isinstance(op, ast.Pow) and abs(b) > 64
                if not too_large and not (b == 0 and isinstance(op, ast.Div | ast.FloorDiv)):
                    return OPERATORS[type(op)](a, b)
    raise PacelineError(
        f"{path}:{node.lineno}: {ast.unparse(node)} is not a plain value", fix="write the number or the text itself"
    )
