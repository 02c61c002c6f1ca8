"""
One way to configure: defaults here, a file over them, flags over the file; checked once, frozen.

A file is TOML with flat keys, or a `.py` file of plain `key = literal` lines as nanoGPT and nanochat forks keep them; the latter
is parsed, never executed. What follows from config and machine is `Plan` (plan/planner.py), not `Config`. `None` is "auto".
"""

import difflib
import types
import typing
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError

VOCAB_MULTIPLE = 64  # embedding and lm_head rows are padded to this: tensor cores want it, no token maps there


@dataclass(frozen=True)
class ModelConfig:
    """The network's dimensions; everything that shapes a parameter."""

    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int
    head_dim: int
    sequence_len: int
    vocab_size: int
    window_pattern: str = "L"  # repeated over the layers; L sees all tokens, S a quarter; the last layer is always L

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def key(
    default: Any,
    about: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    group: str,
) -> Any:
    return field(
        default=default, metadata={"about": about, "low": low, "high": high, "choices": choices, "group": group}
    )


@dataclass(frozen=True)
class Config:
    """Every key there is. Flags are the same names with dashes."""

    name: str | None = key(None, "the run's folder under runs_dir; auto: depth and time", group="run")
    runs_dir: str = key("runs", "where run folders are made", group="run")
    seed: int = key(42, "initial weights and order of rows", low=0, high=2**63 - 1, group="run")

    data: str = key("builtin", "text: builtin, a file or folder, or hf:NAME[:CONFIG]", group="text")
    tokenizer: str | None = key(None, "a tokenizer.json to use; auto: train one on the text", group="text")
    vocab_size: int = key(32_768, "tokens of the tokenizer that is trained", low=257, high=2**31 - 1, group="text")
    cache_dir: str | None = key(None, "prepared token shards; auto: ~/.cache/paceline", group="text")

    depth: int = key(
        4, "layers; the dial that sets width, batch, learning rates and length", low=1, high=512, group="model"
    )
    n_embd: int | None = key(None, "width; auto: 64 x depth rounded up to head_dim", low=8, high=1 << 17, group="model")
    head_dim: int = key(128, "width of one attention head", low=8, high=256, group="model")
    n_kv_head: int | None = key(None, "key/value heads (GQA); auto: as many as heads", low=1, group="model")
    sequence_len: int = key(2048, "tokens in a row", low=2, high=1 << 20, group="model")
    window_pattern: str | None = key(
        None, "attention per layer: L full, S a quarter; auto: SSSL on CUDA, L on CPU", group="model"
    )

    device_batch_size: int | None = key(
        None, "rows in one micro-step of one device; auto: the largest", low=1, group="batch"
    )
    total_batch_size: int | None = key(None, "tokens in one optimizer step, over all devices", low=1, group="batch")
    num_steps: int | None = key(None, "optimizer steps; auto: from tokens_per_param", low=1, high=10**9, group="batch")
    epochs: float | None = key(None, "passes over the text, instead of num_steps", low=1e-9, high=1e6, group="batch")
    tokens_per_param: float = key(
        12.0, "length when neither num_steps nor epochs is set", low=1e-6, high=1e6, group="batch"
    )

    optimizer: str = key("muon", "muon: Muon + AdamW; adamw: AdamW alone", choices=("muon", "adamw"), group="optimizer")
    shard: str = key(
        "optimizer",
        "optimizer: states and their update split over devices; none: replicated DDP",
        choices=("optimizer", "none"),
        group="optimizer",
    )
    matrix_lr: float | None = key(
        None, "matrices; auto: 0.02 for muon, 0.002 for adamw", low=0, high=100, group="optimizer"
    )
    embedding_lr: float = key(0.3, "token embedding (value embeddings take half)", low=0, high=100, group="optimizer")
    unembedding_lr: float = key(0.008, "lm_head", low=0, high=100, group="optimizer")
    weight_decay: float = key(
        0.28, "of matrices at depth 12; scaled to this run's length", low=0, high=100, group="optimizer"
    )
    warmup_steps: int = key(40, "steps of linear warm-up", low=0, high=10**9, group="optimizer")
    warmdown_ratio: float = key(
        0.65, "share of the run in which the learning rate falls", low=0, high=1, group="optimizer"
    )
    final_lr_frac: float = key(0.05, "learning rate at the end, of its peak", low=0, high=1, group="optimizer")
    grad_clip: float | None = key(
        None, "largest gradient norm; auto: no clipping", low=1e-9, high=1e9, group="optimizer"
    )

    nproc: int | None = key(None, "processes; auto: one per GPU, else two on the CPU", low=1, high=1024, group="device")
    device: str | None = key(None, "auto: cuda where there is one", choices=("cuda", "cpu"), group="device")
    precision: str | None = key(
        None, "auto: bf16 where the hardware has it", choices=("fp32", "bf16", "fp16"), group="device"
    )
    compile: bool | None = key(None, "torch.compile; auto: measured, where the run is long enough", group="device")
    profile: str = key(
        "balanced",
        "share of each device's memory to fill: 48, 65 or 90 %",
        choices=("conservative", "balanced", "aggressive"),
        group="device",
    )
    memory_share: float | None = key(
        None, "the same as a number; auto: the profile's", low=0.01, high=1.0, group="device"
    )
    activation_checkpointing: bool | None = key(
        None, "recompute blocks in backward, less memory, 4/3 of the time; auto: where needed", group="device"
    )
    logits_mib: int | None = key(
        None,
        "memory that logits may take at once, in MiB; auto: 512, less where needed",
        low=1,
        high=1 << 20,
        group="device",
    )

    log_every: int = key(10, "steps between lines of metrics", low=1, high=10**9, group="watch")
    eval_every: int = key(250, "steps between evaluations; 0: only at the end", low=0, high=10**9, group="watch")
    eval_tokens: int = key(1 << 20, "held-out tokens of one evaluation, at most", low=1, high=10**12, group="watch")
    save_every: int = key(250, "steps between checkpoints; 0: only at the end", low=0, high=10**9, group="watch")
    sample_every: int = key(0, "steps between samples; 0: only at the end", low=0, high=10**9, group="watch")
    keep_last: int = key(2, "checkpoints kept, beside the best", low=1, high=10**6, group="watch")

    max_loss_spike: float | None = key(
        None,
        "nats by which a step's loss may exceed its recent mean; auto: any, while it is a number",
        low=1e-3,
        high=1e6,
        group="trouble",
    )
    on_nan: str = key(
        "stop",
        "loss no number, or a spike; rollback: to the last checkpoint, past the rows",
        choices=("stop", "rollback"),
        group="trouble",
    )


KEYS: dict[str, Field[Any]] = {f.name: f for f in fields(Config)}
HINTS: dict[str, Any] = typing.get_type_hints(Config)

# names of nanoGPT, nanochat and their forks -> ours; read in .py files, an error as flags or in TOML
FOREIGN = {
    "max_seq_len": "sequence_len",
    "block_size": "sequence_len",
    "context_length": "sequence_len",
    "num_iterations": "num_steps",
    "max_iters": "num_steps",
    "max_steps": "num_steps",
    "n_layer": "depth",
    "num_layers": "depth",
    "batch_size": "device_batch_size",
    "num_epochs": "epochs",
    "target_param_data_ratio": "tokens_per_param",
    "eval_interval": "eval_every",
    "save_interval": "save_every",
    "log_interval": "log_every",
    "grad_clip_norm": "grad_clip",
    "warmup_iters": "warmup_steps",
    "learning_rate": "matrix_lr",
    "lr": "matrix_lr",
    "device_type": "device",
    "dtype": "precision",
    "run": "name",
    "model_tag": "name",
    "out_dir": "runs_dir",
    "dataset": "data",
    "nproc_per_node": "nproc",
}
FOREIGN_VALUES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "": None, -1: None}


def load_config(file: str | Path | None, flags: dict[str, Any]) -> tuple[Config, list[str]]:
    """Defaults < file < flags, checked. Second value: lines to tell the user about what a .py file held."""
    from_file, notes = read_config_file(Path(file)) if file is not None else ({}, [])
    values = override(from_file, flags)
    config = Config(**values)
    check_config(config)
    return config, notes


def override(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """`upper` wins key by key; num_steps and epochs are two ways to say one thing, so either replaces both."""
    if {"num_steps", "epochs"} & {name for name, value in upper.items() if value is not None}:
        lower = {name: value for name, value in lower.items() if name not in ("num_steps", "epochs")}
    return {**lower, **upper}


def check_config(config: Config) -> None:
    """What no single key can know."""
    if config.num_steps is not None and config.epochs is not None:
        raise PacelineError("num_steps and epochs are both set", fix="give one of them")
    if config.shard == "none" and config.optimizer == "muon":
        raise PacelineError(
            "shard = none is plain DDP with AdamW, but optimizer is muon",
            fix="--optimizer adamw, or leave shard at optimizer (Muon's states are always split)",
        )
    if config.window_pattern is not None and (not config.window_pattern or set(config.window_pattern) - set("SL")):
        raise PacelineError(
            f"window_pattern {config.window_pattern!r} has letters other than S and L", fix="for example SSSL, or L"
        )
    if config.name is not None and (not config.name.strip(". ") or "/" in config.name or "\0" in config.name):
        raise PacelineError(
            f"name {config.name!r} cannot be a folder", fix="letters, digits, - and _; runs_dir sets the place"
        )


def read_config_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Checked values of a .toml or .py file, and notes about what was passed over."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise PacelineError(f"config file {path} does not exist", fix=f"give one that does{_nearby(path)}") from None
    except IsADirectoryError:
        raise PacelineError(f"config {path} is a folder", fix=f"give a .toml file{_nearby(path / 'x')}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PacelineError(f"config file {path} cannot be read: {error}", fix="a readable UTF-8 .toml file") from error
    if path.suffix == ".py":
        from paceline.foreign import read_python_config  # only here: most runs never need ast

        return read_python_config(text, path=path)
    if path.suffix != ".toml":
        raise PacelineError(
            f"config file {path} is neither .toml nor .py", fix="name it with its kind, such as my.toml"
        )
    import tomllib

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PacelineError(
            f"config file {path} is not valid TOML: {error}", fix="flat lines such as depth = 12"
        ) from error
    return {name: checked_value(name, value, where=str(path)) for name, value in table.items()}, []


def _nearby(path: Path) -> str:
    folder = path.parent
    found = sorted(str(folder / p.name) for p in folder.glob("*.toml") if p.name != "pyproject.toml")
    return ": " + ", ".join(found[:5]) if found else ", such as configs/tiny.toml"


def parse_flags(args: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Positional words and config keys of a command line: --key value, --key=value, --bool-key, --no-bool-key."""
    words: list[str] = []
    values: dict[str, Any] = {}
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            if word.startswith("-") and len(word) > 1:
                raise UsageError(
                    f"unknown flag {word}", fix="flags have two dashes: --depth 12; see paceline train --help"
                )
            words.append(word)
            continue
        flag, equals, text = word[2:].partition("=")
        name = flag.replace("-", "_")
        if name.startswith("no_") and name not in KEYS and bool in _kinds(name[3:]) and not equals:
            name, equals, text = name[3:], "=", "false"
        if name != "config" and name not in KEYS:
            raise unknown_key(name, where="flag", value=text or (rest[0] if rest else ""))
        if not equals:
            if bool in _kinds(name) and (not rest or rest[0].lower() not in _BOOLS | {"auto": None}):
                text = "true"
            elif not rest or rest[0].startswith("--"):
                raise UsageError(f"--{flag} has no value", fix=f"--{flag} {_example(name)}")
            else:
                text = rest.pop(0)
        if name in values:
            raise UsageError(f"--{flag} is given twice", fix="give it once")
        values[name] = text if name == "config" else parsed_value(name, text)
    return words, values


_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _kinds(name: str) -> tuple[type, ...]:
    """(int,), (float, NoneType) ... of a key; () for an unknown one."""
    hint = HINTS.get(name)
    if hint is None:
        return ()
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _example(name: str) -> str:
    if name not in KEYS:
        return "FILE"
    default = KEYS[name].default
    choices = KEYS[name].metadata["choices"]
    return str(default if default is not None else choices[0] if choices else "8")


def parsed_value(name: str, text: str) -> Any:
    """A flag's text as the key's type."""
    kinds = _kinds(name)
    flag = "--" + name.replace("_", "-")
    if type(None) in kinds and text.lower() == "auto":
        return None
    value: Any = text
    try:
        if bool in kinds:
            value = _BOOLS[text.lower()]
        elif int in kinds:
            value = int(text.replace(",", ""))
        elif float in kinds:
            value = float(text)
    except (ValueError, KeyError):
        raise UsageError(f"{flag} {text}: not {_wanted(name)}", fix=f"{flag} {_example(name)}") from None
    try:
        return checked_value(name, value, where=flag)
    except UsageError:
        raise
    except PacelineError as error:
        raise UsageError(error.message, fix=error.fix) from None


def checked_value(name: str, value: Any, *, where: str) -> Any:
    """The value of key `name`, or an error that tells the allowed ones. `where`: the file or flag it came from."""
    if name not in KEYS:
        raise unknown_key(name, where=where, value=value)
    kinds, limits = _kinds(name), KEYS[name].metadata
    if value is None and type(None) in kinds:
        return None
    if float in kinds and type(value) is int:
        value = float(value)
    if type(value) not in kinds:
        raise PacelineError(f"{where}: {name} is {value!r}, not {_wanted(name)}", fix=f"{name} = {_toml(_typed(name))}")
    if limits["choices"] and value not in limits["choices"]:
        raise PacelineError(f"{where}: {name} is {value!r}", fix=f"one of {', '.join(limits['choices'])}")
    low, high = limits["low"], limits["high"]
    if isinstance(value, int | float) and not isinstance(value, bool):
        below, above = low is not None and value < low, high is not None and value > high
        if below or above or value != value:
            raise PacelineError(f"{where}: {name} is {value:,}, out of range", fix=_wanted(name))
    if isinstance(value, str) and (not value or "\0" in value):
        raise PacelineError(f"{where}: {name} is empty", fix=f"leave {name} out, or give it a value")
    return value


def _typed(name: str) -> Any:
    """A value of the right type to show in a fix."""
    if KEYS[name].default is not None:
        return KEYS[name].default
    kinds = _kinds(name)
    return True if bool in kinds else 8 if int in kinds else 1.0 if float in kinds else _example(name)


def _wanted(name: str) -> str:
    """'an integer from 1 to 512', 'one of fp32, bf16, fp16', 'true or false' ..."""
    kinds, limits = _kinds(name), KEYS[name].metadata
    if limits["choices"]:
        text = "one of " + ", ".join(limits["choices"])
    elif bool in kinds:
        text = "true or false"
    elif int in kinds or float in kinds:
        text = "an integer" if int in kinds else "a number"
        show = "{:,}" if int in kinds else "{:g}"
        text += f" from {show.format(limits['low'])}" if limits["low"] is not None else ""
        text += f" to {show.format(limits['high'])}" if limits["high"] is not None else ""
    else:
        text = "text"
    return text + (", or auto" if type(None) in kinds else "")


def unknown_key(name: str, *, where: str, value: Any = "") -> PacelineError:
    """Names ours for a name of another trainer, else the nearest key."""
    kind = UsageError if where == "flag" else PacelineError
    what = f"unknown flag --{name.replace('_', '-')}" if where == "flag" else f"{where}: unknown key {name}"
    if isinstance(value, dict):
        return kind(f"{where}: [{name}] is a table, keys are flat", fix="write its keys without the [section] line")
    ours = FOREIGN.get(name)
    if ours:
        shown = f" {value}" if value != "" else ""
        fix = f"--{ours.replace('_', '-')}{shown}" if where == "flag" else f"{ours} = {_toml(value)}"
        return kind(f"{what}; paceline calls it {ours}", fix=fix)
    near = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.5)
    if not near:
        return kind(what, fix="paceline train --help lists all keys")
    return kind(what, fix=f"did you mean {'--' + near[0].replace('_', '-') if where == 'flag' else near[0]}?")


def format_toml(config: Config) -> str:
    """The file that gives this Config back; keys at auto are left out."""
    lines = [f"{name} = {_toml(value)}" for name, value in asdict(config).items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = (
            value.replace("\\", "\\\\")
            .replace('"', '\\"')
            .replace("\n", "\\n")
            .replace("\t", "\\t")
            .replace("\r", "\\r")
        )
        return f'"{escaped}"'
    return str(value)


def with_values(config: Config, **values: Any) -> Config:
    """A checked copy."""
    changed = replace(config, **values)
    check_config(changed)
    return changed
