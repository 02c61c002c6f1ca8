"""
The config: every key with its default, its limits and its help; frozen and checked once.

A file overrides the defaults and flags override the file (config_file.py). What follows from config and machine is `Plan`
(plan/planner.py), not `Config`. `None` is "auto".
"""

import os
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.command_line import option, parameters_of
from paceline.errors import Change, PacelineError, expand_home
from paceline.units import parse_duration

MIN_VOCAB_SIZE = 257  # of a tokenizer that is trained: every byte and the separator, so that any text can be encoded
MAX_NAME_BYTES = 255  # of a folder's name, on nearly every file system
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


# how a GPU computes attention, the fastest first as a rule; plan/machine.py tells which of them a card can take
FLASH = ("fa3", "cudnn", "flash")
ATTENTION = (*FLASH, "flex", "sdpa")
LOW_PRECISIONS = ("fp8", "mxfp8", "mxfp4", "nvfp4")  # of products alone: all else is in 16 bits
PRECISIONS = ("fp32", "bf16", "fp16", *LOW_PRECISIONS)
MAX_HOSTS = 1024
MATRIX_LR = {"muon": 0.02, "adamw": 0.002}  # by optimizer, where the config leaves it out
OPEN = {-1: None}  # nanochat's way to leave a setting open


@dataclass(frozen=True)
class Config:
    """Every key. Flags have the same names with dashes."""

    name: str | None = option(None, "the run's folder under runs_dir; auto: depth and time", group="run", value="NAME")
    runs_dir: str = option("runs", "where run folders are made", value="DIR")
    seed: int = option(42, "seed of the initial weights and of the order of rows", low=0, high=2**63 - 1)

    data: str = option(
        "builtin", "text: builtin, a file or folder, or hf:NAME[:CONFIG[:SPLIT]]", group="text", value="SOURCE"
    )
    val_data: str | None = option(
        None, "text to measure val_bpb on, as data; of hf: the split validation; auto: a share of data", value="SOURCE"
    )
    text_field: str | None = option(
        None,
        "field of the text in JSON lines, column in tables; auto: text, or an only one such as content",
        value="NAME",
    )
    tokenizer: str | None = option(None, "a tokenizer.json to use; auto: train one on the text", value="FILE")
    vocab_size: int = option(32_768, "tokens of the tokenizer that is trained", low=2, high=2**31 - 1)
    packing: str = option(
        "stream",
        "rows of the text: stream, cut from all of it; best-fit, each begins with a document, and what fits nowhere is left out",
        choices=("stream", "best-fit"),
    )
    cache_dir: str | None = option(None, "folder of prepared token shards; auto: ~/.cache/paceline", value="DIR")

    init_from: str | None = option(
        None,
        "a run, or the folder of one of its checkpoints, whose weights this one starts with, with its model, tokenizer and,"
        " without CONFIG, its other keys; auto: random weights",
        group="model",
        value="RUN",
        also={"scratch": None},
    )
    depth: int = option(
        4, "layers; they set width, batch, learning rates and length where CONFIG (or tiny) does not", low=1, high=512
    )
    n_embd: int | None = option(None, "width; auto: 64 x depth rounded up to head_dim", low=8, high=1 << 17)
    head_dim: int = option(128, "width of one attention head", low=8, high=256)
    n_kv_head: int | None = option(None, "key/value heads (GQA); auto: as many as heads", low=1)
    sequence_len: int = option(2048, "tokens in a row", low=2, high=1 << 20)
    window_pattern: str | None = option(None, "attention per layer: L full, S a quarter; auto: SSSL on CUDA, L on CPU")

    device_batch_size: int | None = option(
        None, "rows in one micro-step of one device; auto: the most that fit", low=1, also=OPEN, group="batch"
    )
    total_batch_size: int | None = option(
        None, "tokens in one optimizer step, over all devices", low=1, also=OPEN, usual=524_288
    )
    num_steps: int | None = option(None, "optimizer steps; auto: from tokens_per_param", low=1, high=10**9, also=OPEN)
    epochs: float | None = option(None, "passes over the text, in place of num_steps", low=1e-9, high=1e6, also=OPEN)
    time: str | None = option(
        None, "length as a time, such as 2m or 8h, by the speed that is measured first; at least 60 steps", usual="8h"
    )
    tokens_per_param: float = option(
        12.0,
        "training tokens per parameter, where none of num_steps, epochs and time is set",
        low=1e-6,
        high=1e6,
        also={-1: 12.0},
    )

    optimizer: str = option("muon", "muon: Muon and AdamW; adamw: AdamW", choices=("muon", "adamw"), group="optimizer")
    shard: str | None = option(
        None,
        "optimizer: states and updates are sharded; full: weights and gradients too; none: plain DDP; auto: full where"
        " replicated weights do not fit",
        choices=("optimizer", "full", "none"),
    )
    offload: str = option(
        "none",
        "optimizer: fp32 masters and optimizer states stay in the host's memory, and are on the GPU only while they are updated;"
        " the same bits in less memory and more time",
        choices=("none", "optimizer"),
    )
    optimizer_states: str = option(
        "fp32",
        "8bit: the optimizer's moments and momentum take a byte in place of four: less memory, smaller checkpoints, other rounding",
        choices=("fp32", "8bit"),
    )
    matrix_lr: float | None = option(
        None,
        f"learning rate of matrices; auto: {', '.join(f'{name} {lr}' for name, lr in MATRIX_LR.items())}",
        low=0,
        high=100,
        usual=0.02,
    )
    embedding_lr: float = option(0.3, "learning rate of token embeddings; value embeddings use half", low=0, high=100)
    unembedding_lr: float = option(0.008, "learning rate of lm_head", low=0, high=100)
    weight_decay: float = option(0.28, "weight decay of matrices at depth 12; scaled by run length", low=0, high=100)
    warmup_steps: int = option(40, "steps of linear warm-up", low=0, high=10**9)
    warmdown_ratio: float = option(0.65, "fraction of the run in which the learning rate falls", low=0, high=1)
    final_lr_frac: float = option(0.05, "learning rate at the end, as a fraction of its peak", low=0, high=1)
    grad_clip: float | None = option(
        None, "largest gradient norm; auto: no clipping", low=1e-9, high=1e9, also={0: None}
    )

    nproc: int | None = option(None, "processes; auto: one per GPU, two on the CPU", low=1, high=1024, group="device")
    device: str | None = option(None, "device of the ranks; auto: cuda where there is one", choices=("cuda", "cpu"))
    precision: str | None = option(
        None, "precision of matrix products; auto: bf16 where the hardware has it", choices=PRECISIONS
    )
    emulate: bool = option(
        False,
        "compute fp8, mxfp8, mxfp4 or nvfp4 where the hardware cannot, slowly: for experiments, and to test what can",
    )
    bf16_finish: float = option(0.0, "the last fraction of the steps without low precision", low=0, high=0.99)
    attention: str | None = option(
        None,
        "attention on GPUs: flash kernels (cudnn: of cuDNN for full layers), FlexAttention, or masks; auto: the fastest here",
        choices=ATTENTION,
    )
    compile: bool | None = option(None, "use torch.compile; auto: measured, where the run is long enough")
    deterministic: bool = option(False, "on GPUs, kernels that repeat the same bits; on the CPU they always do")
    profile: str = option(
        "balanced", "the most device memory to use: 48, 65 or 90 %", choices=("conservative", "balanced", "aggressive")
    )
    memory_share: float | None = option(None, "the same as a fraction; auto: the profile's", low=0.01, high=1.0)
    activation_checkpointing: bool | str | None = option(
        None,
        "recompute blocks in the backward pass: less memory, 4/3 of the time; or only their mlp, or its relu, for less of"
        " both; auto: where needed",
        choices=("relu", "mlp"),
    )
    logits_mib: int | None = option(None, "MiB of logits at a time; auto: 512, less where needed", low=1, high=1 << 20)

    hosts: str | None = option(
        None, "train on these hosts: ada,bob, node[1-4], or a file; nproc ranks on each", group="hosts", value="HOSTS"
    )
    python: str | None = option(None, "the interpreter on the other hosts; auto: as here, else python3", value="PATH")
    interface: str | None = option(None, "network interface between the hosts; auto: that of the route", value="NAME")
    ports: str | None = option(None, "ports the hosts may listen on, such as 29400-29500; auto: any free", value="A-B")

    log_every: int = option(10, "steps between lines of metrics", low=1, high=10**9, group="watch")
    eval_every: int = option(
        250, "steps between evaluations, from step 0 on; 0: only at the end", low=0, high=10**9, also={-1: 0}
    )
    eval_tokens: int | None = option(
        None,
        "held-out tokens of one evaluation; auto: a tenth of the run's time for all of them, a power of two up to 1,048,576",
        low=1,
        high=10**12,
        also=OPEN,
    )
    save_every: int = option(250, "steps between checkpoints; 0: only at the end", low=0, high=10**9, also={-1: 0})
    sample_every: int = option(0, "steps between samples; 0: only at the end", low=0, high=10**9, also={-1: 0})
    keep_last: int = option(2, "checkpoints to keep besides the best one", low=1, high=10**6)

    max_loss_spike: float | None = option(
        None, "nats above the recent mean at which a loss is a spike; auto: never", low=1e-3, high=1e6, group="trouble"
    )
    on_nan: str = option(
        "stop",
        "after a non-finite or spiking loss: stop, or roll back and skip the batch",
        choices=("stop", "rollback"),
    )


LENGTH_KEYS = ("num_steps", "epochs", "time")  # ways to set one thing: a flag for one replaces a file's other
RATES_OF_DEPTH = ("matrix_lr", "embedding_lr", "unembedding_lr", "weight_decay")
# the depth sets them where they are left out, and the rates
KEYS_OF_DEPTH = ("n_embd", "total_batch_size", *LENGTH_KEYS)
KEYS = parameters_of(Config)


def keys_of_depth(flags: Collection[str]) -> list[str]:
    """Returns what the depth sets where it is left out; a batch that a flag sets wants other rates than the depth's."""
    rates = () if "total_batch_size" in flags else RATES_OF_DEPTH
    return [key for key in (*KEYS_OF_DEPTH, *rates) if key not in flags]


def check_config(config: Config) -> None:
    """Raises a PacelineError where keys contradict each other, or a text has a form that no limit describes."""
    for name, value in vars(config).items():
        if isinstance(value, str):
            check_utf8(name, value)
    lengths = [name for name in LENGTH_KEYS if getattr(config, name) is not None]
    if len(lengths) > 1:
        raise PacelineError(f"{lengths[0]} and {lengths[1]} are both set", fix="give one of them")
    if config.time is not None:
        parse_time(config.time)
    if config.tokenizer is None and config.vocab_size < MIN_VOCAB_SIZE:
        raise PacelineError(
            f"vocab_size {config.vocab_size:,} is too small to train a tokenizer: 256 bytes and a separator are {MIN_VOCAB_SIZE}",
            fix=f"--vocab-size {MIN_VOCAB_SIZE} or more, or --tokenizer FILE, which may have fewer",
        )
    if config.shard == "none" and config.optimizer == "muon":
        raise PacelineError(
            "shard = none is plain DDP with AdamW, but optimizer is muon",
            fix="--optimizer adamw, or leave shard at optimizer (Muon's states are always split)",
        )
    if config.shard == "none" and config.offload != "none":
        raise PacelineError(
            f"offload is {config.offload}, but shard = none is plain DDP, whose states stay on every GPU",
            fix="--shard optimizer, or --offload none",
        )
    off = {"emulate": "--no-emulate"} if config.emulate else {}
    off |= {"bf16_finish": "--bf16-finish 0"} if config.bf16_finish else {}
    if off and config.precision not in LOW_PRECISIONS:
        raise PacelineError(
            f"{' and '.join(off)} {'is' if len(off) == 1 else 'are'} set, but precision is {config.precision or 'auto'}:"
            f" for {', '.join(LOW_PRECISIONS)} alone",
            fix=f"--precision fp8, or {' '.join(off.values())}",
        )
    if config.window_pattern is not None and (not config.window_pattern or set(config.window_pattern) - set("SL")):
        raise PacelineError(
            f"window_pattern {config.window_pattern!r} has letters other than S and L", fix="for example SSSL, or L"
        )
    folder = config.name
    if folder is not None and (
        not folder.strip(". ") or {"/", "\0"} & set(folder) or len(os.fsencode(folder)) > MAX_NAME_BYTES
    ):
        raise PacelineError(
            f"name {folder!r} cannot be a folder",
            fix=f"letters and digits, without /, at most {MAX_NAME_BYTES} bytes; runs_dir sets the place",
        )


def parse_time(time: str) -> float:
    """Returns the seconds of the key `time`. Raises PacelineError for what is not a duration."""
    try:
        return parse_duration(time)
    except ValueError:
        raise PacelineError(f"time is {time!r}, not a duration", fix="for example 2m, 8h or 1d12h") from None


def format_flags(change: Change) -> str:
    """Returns the flags that set these keys: `--device-batch-size 8 --activation-checkpointing`."""
    return " ".join(_format_flag(f"--{key.replace('_', '-')}", value) for key, value in change.items())


def _format_flag(flag: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return flag + {None: " auto", True: "", False: " false"}[value]
    text = str(value)
    return f"{flag}{'=' if text.startswith('-') else ' '}{shlex.quote(text)}"


def check_utf8(name: str, value: str) -> None:
    """Raises PacelineError for a value that no file of a run can hold: a path or an argument whose bytes are not UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(value).decode(errors="backslashreplace")
        raise PacelineError(
            f"{name} {shown} is not UTF-8: the run could not be repeated", fix="rename the file or the folder"
        ) from None


CACHE_SPACE = "'df -h ${XDG_CACHE_HOME:-~/.cache}'"  # a shell command for another host, whose cache it means


def cache_dir(config: Config) -> Path:
    """Returns the folder of prepared text and of what was measured on this machine."""
    if config.cache_dir:
        return expand_home(config.cache_dir)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # the desktop standard, which ignores a relative path
    return (base if base.is_absolute() else expand_home("~/.cache")) / "paceline"
