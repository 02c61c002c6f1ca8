"""
Config files: TOML with flat keys, and the `.py` files of plain `key = literal` lines that nanoGPT and nanochat forks keep.

A `.py` file is parsed with ast, never executed. The names of other trainers become ours by other_names.py. Arithmetic on literals
(5 * 8, 2**19) is computed; other lines are passed over, with a note, where they set nothing of ours. All lines that are wrong are
told at once.
"""

import ast
import operator
import re
import shlex
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from paceline.config import KEYS, LENGTH_KEYS, LOW_PRECISIONS, Config, check_config, format_flags, keys_of_depth
from paceline.encoding import not_utf8, utf16_as_utf8
from paceline.errors import PacelineError, expand_home, nearest, nearest_choice
from paceline.other_names import KEY_OF, KEY_REMARKS, translate
from paceline.rundir import RunDir
from paceline.typed_fields import find_training_run, format_toml_value, toml_line, toml_text
from paceline.units import format_list

PACKAGED = Path(__file__).parent / "configs"
TINY = PACKAGED / "tiny.toml"
OPTIMIZER = KEYS["optimizer"].default
OF_ONE_RUN = {
    key: KEYS[key].default
    for key in ("name", "tokenizer", "runs_dir", "cache_dir", "hosts", "python", "interface", "ports")
}
MODEL_KEYS = ("depth", "n_embd", "head_dim", "n_kv_head", "vocab_size")  # they shape the weights


def load_config(file: str | Path | None, flags: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """The checked config of defaults < file < flags, and notes for the user about what of the file is not used."""
    from_file, notes = read_config_file(Path(file), flags) if file is not None else ({}, [])
    config = Config(**override(from_file, flags))
    check_config(config)
    if file is not None and flags.get("depth", from_file.get("depth")) != from_file.get("depth"):
        own = {key: getattr(config, key) for key in keys_of_depth(flags) if key in from_file}
        own = {key: value for key, value in own.items() if value != KEYS[key].default}
        texts, auto = [f"{key} {own[key]}" for key in own], format_flags({key: KEYS[key].default for key in own})
        remark = f"stay as they are at depth {config.depth}; to derive them from the depth: {auto}"
        notes += [f"{Path(file).name}: {', '.join(texts)} {remark}"] if own else []
    return config, notes


def resolve_config(
    file: str | None, keys: Mapping[str, Any], *, default: Mapping[str, Any] | None = None, print_notes: bool = True
) -> Config:
    """The config of a command line; notes go to stderr. file: a path, or the name of a config of the package.

    Without a file: that of the run whose weights this one starts with, else the config tiny, or the defaults of all keys with those
    of `default`.
    """
    if file is None and (init_from := keys.get("init_from")):
        source, _ = source_of(init_from, runs_dir=keys.get("runs_dir", Config.runs_dir))
        of_text = {"val_data": None, "text_field": None} if "data" in keys else {}
        config = load_config(source.config_toml, {**OF_ONE_RUN, **of_text, **keys})[0]
        return with_source(config, set_keys=keys, flags=keys)
    if file is None and default is not None:
        return load_config(None, {**default, **keys})[0]
    path = TINY if file is None else find_config(file)
    config, notes = load_config(path, keys)
    if config.init_from:
        config = with_source(config, set_keys={**read_config_file(path, keys)[0], **keys}, flags=keys)
    if file is not None and path.parent == PACKAGED and file != path.stem:
        notes = [f"note    {file} is not here: this is the config {path.stem} of paceline", *notes]
    for note in notes if print_notes else ():
        print(note, file=sys.stderr)
    return config


def source_of(init_from: str, *, runs_dir: str) -> tuple[RunDir, Path]:
    """Returns the training run that init_from names, and what it names: the run's folder, or that of a checkpoint."""
    path = expand_home(init_from)
    is_checkpoint = path.parent.name == "checkpoints" and path.is_dir()
    try:
        run = find_training_run(str(path.parent.parent if is_checkpoint else path), runs_dir=runs_dir)
    except PacelineError as error:
        fix = "paceline resume RUN goes on with a run" if init_from == "resume" else error.fix  # nanoGPT's values
        fix = "give a run of paceline: other weights cannot be loaded" if init_from.startswith("gpt2") else fix
        raise PacelineError(f"init_from: {error.message}", fix=fix) from error
    return run, (path if is_checkpoint else run.path).absolute()


def with_source(config: Config, *, set_keys: Collection[str], flags: Collection[str]) -> Config:
    """Returns the config with the model and the tokenizer of the run whose weights it starts with.

    set_keys: which are set, by the file or by flags. Raises PacelineError where they ask for another model.
    """
    source, place = source_of(str(config.init_from), runs_dir=config.runs_dir)
    own, _ = load_config(source.config_toml, {})
    shape = {key: getattr(own, key) for key in MODEL_KEYS}
    for key, value in shape.items():
        other = getattr(config, key)
        if key not in (flags if key == "vocab_size" else set_keys) or other in (None, value):
            continue  # a file's vocab_size is of a tokenizer to train
        raise PacelineError(
            f"{key} is {other:,}, and {source.name}, whose weights it is to start with, has {value:,}",
            fix=f"--{key.replace('_', '-')} {value}, or leave --init-from out",
        )
    tokenizer = config.tokenizer or str(source.tokenizer_json.absolute())
    return with_values(config, **shape, tokenizer=tokenizer, init_from=str(place))


def find_config(file: str) -> Path:
    """Returns the file where it exists, else the packaged config that NAME, NAME.toml or configs/NAME.toml means."""
    path, packaged = Path(file), PACKAGED / f"{Path(file).stem}.toml"
    is_short = path.suffix in ("", ".toml") and str(path.parent) in (".", PACKAGED.name)
    return packaged if is_short and packaged.is_file() and not path.exists() else path


def packaged_configs() -> dict[str, Path]:
    """Returns the configs of the package by name, from the smallest model to the largest."""
    paths = {path.stem: path for path in PACKAGED.glob("*.toml")}
    return dict(sorted(paths.items(), key=lambda item: tomllib.loads(item[1].read_text(encoding="utf-8"))["depth"]))


def override(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """`upper` wins key by key; num_steps, epochs, time and tokens_per_param all set the length: each replaces the others."""
    if any(upper.get(name) is not None for name in (*LENGTH_KEYS, "tokens_per_param")):
        lower = {name: value for name, value in lower.items() if name not in LENGTH_KEYS}
    return {**lower, **upper}


def read_config_file(path: Path, flags: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The checked values of a .toml or .py file, and notes about what is not used. flags: what overrides them."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise PacelineError(f"config file {path} does not exist", fix=f"give one that does{_nearby(path)}") from None
    except IsADirectoryError:
        raise PacelineError(f"config {path} is a folder", fix=f"give a .toml file{_nearby(path / 'x')}") from None
    except UnicodeDecodeError as error:
        message, file_fix = not_utf8(path, path.read_bytes(), error)
        raise PacelineError(f"config file {message}", fix=file_fix.for_file(path)) from error
    except OSError as error:
        fix = "check that you may read it, and the disk"
        raise PacelineError(f"config file {path} cannot be read: {error.strerror}", fix=fix) from error
    if problem := utf16_as_utf8(path, text.encode()):
        raise PacelineError(f"config file {problem[0]}", fix=problem[1].for_file(path))
    if path.suffix == ".py":
        return read_python_config(text, path=path, flags=flags)
    other_kind = "" if path.suffix == ".toml" else f"config file {path} is neither .toml nor .py"
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = other_kind or f"config file {path} is not valid TOML: {toml_line(text, error) or error}"
        raise PacelineError(message, fix=_fix_for(text)) from error
    if other_kind:
        raise PacelineError(other_kind, fix=shlex.join(["mv", str(path), str(path.with_suffix(".toml"))]))
    values, problems = dict[str, Any](), list[tuple[int, PacelineError]]()
    for name, value in table.items():
        try:
            values[name] = checked_value(name, value, where="")
        except PacelineError as error:
            problems.append((_line_of(name, text), error))
    if problems:
        raise _joined(problems, path=path)
    return values, drop_rate(values, flags, own=values.get("optimizer", OPTIMIZER), file=path.name)


def _line_of(name: str, text: str) -> int:
    """Returns the number of the line that sets a key of a TOML file."""
    start = re.compile(rf"[\s\[\"']*{re.escape(name)}\b")
    return next((number for number, line in enumerate(text.splitlines(), 1) if start.match(line)), 1)


def _fix_for(text: str) -> str:
    """Returns how to write what is no TOML; of JSON and YAML with the integers that set keys of ours."""
    pairs = re.findall(r'(\w+)"?: *(\d+)(?![\w.])', text)
    keys = {key: number for name, number in pairs if (key := KEY_OF.get(name, name)) in KEYS}
    lines = ", ".join(f"{key} = {number}" for key, number in keys.items())
    return f"write flat lines in a .toml file, such as {lines or 'depth = 12'}; to begin one: paceline configs balanced > mine.toml"


def drop_rate(values: dict[str, Any], flags: Mapping[str, Any], *, own: Any, file: str) -> list[str]:
    """Removes a file's matrix_lr where flags choose another optimizer, whose rates are of another size; returns a note of it."""
    optimizer = flags.get("optimizer", own)
    if optimizer == own or (rate := values.pop("matrix_lr", None)) is None or "matrix_lr" in flags:
        return []
    return [f"{file}: matrix_lr {rate} is for {own} and is not used: {optimizer} trains at its default rate"]


def _nearby(path: Path) -> str:
    folder = path.parent
    files = sorted(str(folder / p.name) for p in folder.glob("*.toml") if p.name != "pyproject.toml")
    near = nearest(str(path), [*files, *packaged_configs()])
    return f": {near or ', '.join([*files[:5], *packaged_configs()])}"


def checked_value(name: str, value: Any, *, where: str) -> Any:
    """The value of key `name`, or an error that names the allowed ones. where: what the message begins with, or nothing."""
    if name not in KEYS:
        raise unknown_key(name, where=where, value=value)
    key, shown = KEYS[name], f"{_prefix(where)}{name} is"
    if value is None and key.is_optional:
        return None
    if float in key.kinds and type(value) is int:
        value = float(value)
    elif int in key.kinds and type(value) is float and value.is_integer():  # 1e9, as a flag may have it
        value = int(value)
    if isinstance(value, int | float | str) and not isinstance(value, bool) and value in key.also:
        value = key.also[value]
        if value is None:
            return None
    if not isinstance(value, key.kinds) or (isinstance(value, bool) and not key.is_switch):
        meant = key.example(str(value))
        with suppress(PacelineError):  # a number in quotes is probably the right one
            meant = key.parse(value) if isinstance(value, str) else meant
        fix = f"leave {name} out" if meant is None else f"{name} = {format_toml_value(meant)}"
        raise PacelineError(f"{shown} {value!r}, not {key.expected}", fix=fix)
    if value == "":
        raise PacelineError(f"{shown} empty", fix=f"leave {name} out, or give it a value")
    if problem := key.problem(value):
        raise PacelineError(f"{shown} {value!r}, {problem}", fix=nearest_choice(value, key.choices, key.expected))
    return value


def unknown_key(name: str, *, where: str, value: Any = "") -> PacelineError:
    """Names our key for one of another trainer, else the nearest key."""
    if isinstance(value, dict):
        return PacelineError(
            f"{_prefix(where)}[{name}] is a table, keys are flat", fix="write its keys without the [section] line"
        )
    if ours := KEY_OF.get(name):
        kind, remark = KEY_REMARKS.get(name, ("", ""))
        fix = f"{ours} = {format_toml_value(value)}{remark}"
        return PacelineError(f"{_prefix(where)}unknown key {name}{kind}; paceline calls it {ours}", fix=fix)
    near = nearest(name, [*KEYS, *KEY_OF])
    near = KEY_OF.get(near or "", near)
    fix = f"did you mean {near}?" if near else "paceline train --help lists all keys"
    return PacelineError(f"{_prefix(where)}unknown key {name}", fix=fix)


def _prefix(where: str) -> str:
    return f"{where}: " if where else ""


def format_toml(config: Config) -> str:
    """The file that gives this Config back; keys at auto are left out."""
    return toml_text(asdict(config))


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


class PythonLine(NamedTuple):
    """One `name = value` of a .py file, or a statement that is passed over (name empty)."""

    number: int
    name: str
    value: Any  # NOT_PLAIN where it is no literal


NOT_PLAIN = object()
DERIVED = ("n_head", "gradient_accumulation_steps")  # nanoGPT's: keys of ours follow from them and others


def read_python_config(text: str, *, path: Path, flags: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the checked values under our names, and notes on what is not used; one PacelineError tells of all wrong lines."""
    lines = list(_python_lines(text, path=path))
    last = {line.name: line for line in lines if line.name}
    settings = {name: line.value for name, line in last.items()}
    own = settings.get("optimizer", OPTIMIZER)
    optimizer = str(flags.get("optimizer", own))
    dropped = drop_rate(settings, flags, own=own, file=path.name)
    values: dict[str, Any] = {}
    notes: list[str] = []
    unused: list[str] = []
    problems: list[tuple[int, PacelineError]] = []
    for number, name, value in sorted((last[name] for name in settings), key=lambda line: line.name in DERIVED):
        try:
            if value is NOT_PLAIN:
                raise PacelineError(f"{name} is not a plain value", fix="write the number or the text itself")
            if name in DERIVED:
                values |= _derived(name, value, values)
            elif name in KEYS:
                values[name] = checked_value(name, value, where="")
            elif (meaning := translate(name, value, optimizer=optimizer)) is None:
                raise unknown_key(name, where="", value=value)
            elif meaning.key == "precision" and values.get("precision") in LOW_PRECISIONS:
                unused += [name]  # beside fp8 = True, another trainer's dtype is that of all else
            elif meaning.key:
                values[meaning.key] = checked_value(meaning.key, meaning.value, where=f"({name})")
            else:
                notes += [meaning.note] if meaning.note else []
                unused += [name] if meaning.unused else []
        except PacelineError as error:
            problems.append((number, error))
    if problems:
        raise _joined(problems, path=path)
    notes += [f"not used by paceline: {', '.join(unused)}"] if unused else []
    passed = [line.number for line in lines if not line.name]
    if passed and not settings:
        fix = f"write lines such as `depth = 12`; a script starts with: paceline run -- {shlex.quote(str(path))}"
        raise PacelineError(f"{path} sets no key, and paceline executes no code of a config file", fix=fix)
    notes += [f"not executed: {'lines' if len(passed) > 1 else 'line'} {format_list(passed)}"] if passed else []
    return values, [*dropped, *(f"{path.name}: {note}" for note in notes)]


def _joined(problems: Sequence[tuple[int, PacelineError]], *, path: Path) -> PacelineError:
    """Returns one error of all wrong lines, by their numbers."""
    if len(problems) == 1:
        [(number, error)] = problems
        return PacelineError(f"{path}:{number}: {error.message}", fix=error.fix)
    ordered = sorted(problems, key=lambda problem: problem[0])
    listed = [f"\n  line {number}: {error.message} ({error.fix})" for number, error in ordered]
    return PacelineError(
        f"{path} has {len(problems)} lines that paceline cannot use:{''.join(listed)}", fix="change these lines"
    )


def _derived(name: str, value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the key that follows from a number of nanoGPT's and the file's other values."""
    if name == "n_head":
        width = values.get("n_embd")
        if not isinstance(value, int) or value < 1 or not width or width % value:
            raise PacelineError(f"n_head {value!r} does not divide n_embd", fix="set n_embd and head_dim")
        return {"head_dim": checked_value("head_dim", width // value, where="(n_head)")}
    if "total_batch_size" in values:
        return {}
    rows, length = values.get("device_batch_size"), values.get("sequence_len")
    if not rows or not length or not isinstance(value, int):
        raise PacelineError(
            f"{name} needs batch_size and block_size in the same file", fix="set total_batch_size in tokens"
        )
    return {"total_batch_size": checked_value("total_batch_size", value * rows * length, where=f"({name})")}


def _python_lines(text: str, *, path: Path) -> Iterator[PythonLine]:
    """Yields the settings of the file, and the statements that set nothing of ours; nothing is executed."""
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
            ) if (result := _evaluate(value, values)) is not NOT_PLAIN or _is_setting(name):
                values[name] = result
                yield PythonLine(node.lineno, name, result)
            case ast.FunctionDef() | ast.ClassDef():
                yield PythonLine(node.lineno, "", NOT_PLAIN)
            case _:
                names = [
                    part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
                ]
                ours = [name for name in names if _is_setting(name)]
                yield PythonLine(node.lineno, ours[0] if ours else "", NOT_PLAIN)


def _is_setting(name: str) -> bool:
    return name in KEYS or name in KEY_OF or name in DERIVED


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Returns the value of a literal, or of arithmetic on literals and on the names before it; NOT_PLAIN for anything else."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names.get(name, NOT_PLAIN)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _evaluate(operand, names)
            return -inner if isinstance(inner, int | float) else NOT_PLAIN
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = _evaluate(left, names), _evaluate(right, names)
            if all(isinstance(number, int | float) and abs(number) < 2**63 for number in (a, b)):
                too_large = isinstance(op, ast.Pow) and abs(b) > 64
                with suppress(ArithmeticError):  # a division by zero, a float that overflows
                    return NOT_PLAIN if too_large else OPERATORS[type(op)](a, b)
    return NOT_PLAIN
