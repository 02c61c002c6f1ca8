"""
Config files of other trainers: `.py` files of plain `key = literal` lines, as nanoGPT and nanochat forks keep in `configs/`.

Parsed with ast, never executed. Their names become ours by the table in config.py; arithmetic on literals (5 * 8, 2**19) is
worked out, anything else is an error that names its line.
"""

import ast
import operator
from pathlib import Path
from typing import Any

from paceline.config import FOREIGN, FOREIGN_VALUES, KEYS, checked_value
from paceline.errors import PacelineError

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
TRACKERS = ("wandb_", "eval_iters", "lr_decay_iters", "min_lr", "beta1", "beta2", "core_metric_", "total_training_time")


def read_python_config(text: str, *, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Our keys and checked values; second: one line for the names that paceline has no use for."""
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
        elif value in HARMLESS.get(name, ()) or name.startswith(TRACKERS):
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
                f"{path}: gradient_accumulation_steps needs batch_size and block_size beside it",
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
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue  # a docstring
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ) if value:
                values[name] = _evaluate(value, values, path=path)
            case _:
                raise PacelineError(
                    f"{path}:{node.lineno}: only `key = literal` lines are read, nothing is executed",
                    fix="delete that line",
                )
    return values


def _evaluate(node: ast.expr, known: dict[str, Any], *, path: Path) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _evaluate(operand, known, path=path)
            if isinstance(inner, int | float):
                return -inner
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = _evaluate(left, known, path=path), _evaluate(right, known, path=path)
            sane = all(isinstance(v, int | float) and abs(v) < 2**63 for v in (a, b))
            if (
                sane
                and not (isinstance(op, ast.Pow) and abs(b) > 64)
                and not (b == 0 and isinstance(op, ast.Div | ast.FloorDiv))
            ):
                return OPERATORS[type(op)](a, b)
    raise PacelineError(
        f"{path}:{node.lineno}: {ast.unparse(node)} is not a plain value", fix="write the number or the text itself"
    )
