"""
What other trainers and launchers call their settings, options and commands: under which name of ours, or why under none.

nanoGPT, nanochat, their forks, transformers. nanochat: scripts/base_train.py of commit 92d63d4 and earlier ones. nanoGPT: train.py.
"""

import contextlib
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from paceline.errors import PacelineError, UsageError, nearest

OTHER_COMMANDS = {  # of nanochat and other trainers -> ours
    "chat": "sample",
    "generate": "sample",
    "compare": "runs show A B",
    "list": "runs",
    "ls": "runs",
    "finetune": "train --init-from RUN --data OTHER",
    "mid": "train --init-from RUN --data OTHER",
    "sft": "train --init-from RUN --data OTHER",
}
OTHER_OPTIONS = {  # command -> our own option -> those of other tools that it replaces; for `run` those of launchers
    "run": {
        "paceline run --nproc {value}": "nproc-per-node num-processes num-gpus",
        "paceline run --runs-dir {value}": "log-dir",
        "paceline run --device cpu": "cpu use-cpu",
        "paceline run -m MODULE, as for python": "module",
        "paceline run --max-attempts, which counts the first attempt too": "max-restarts",
        "leave it out: any executable works": "no-python",
        "leave it out: --nproc 2, or the default of one process for each GPU": "multi-gpu",
        "leave it out: --nproc and --device replace it": "config-file",
        "leave it out: every rank's output is shown and kept": "tee redirects",
        "leave it out: paceline run starts the processes of all --hosts": "nnodes node-rank num-machines machine-rank",
        "start it inside a job, whose nodes it takes: after salloc, or as the last line of a script for sbatch": "slurm slurm-args",
        "leave it out: a script's lost host does not come back": "rejoin no-rejoin",
        "paceline finds a free port on this host by itself: leave it out": "standalone rdzv-backend rdzv-endpoint rdzv-id"
        " master-addr master-port main-process-ip main-process-port",
    },
    "train": {
        "paceline resume RUN": "resume resume-from-checkpoint", "--track wandb": "wandb use-wandb", "--track {value}": "report-to",
    },
    "resume": {"paceline runs tag RUN TAG": "tag tags", "paceline runs note RUN TEXT": "note notes"},
    "sample": {
        "--tokens {value}": "max-new-tokens max-tokens max-length", "--prompt {value}": "start",
        "--num {value}": "num-samples num-return-sequences",
    },
}  # fmt: skip
# key -> its other names
NAMES = {
    "sequence_len": "max_seq_len block_size context_length seq_len max_position_embeddings n_positions",
    "num_steps": "num_iterations max_iters max_steps",
    "depth": "n_layer num_layers num_hidden_layers",
    "n_embd": "hidden_size",
    "n_kv_head": "num_key_value_heads",
    "device_batch_size": "batch_size",
    "epochs": "num_epochs",
    "tokens_per_param": "target_param_data_ratio",
    "eval_every": "eval_interval eval_steps",
    "save_every": "save_interval save_steps checkpoint_every checkpoint_interval",
    "log_every": "log_interval logging_steps",
    "grad_clip": "grad_clip_norm",
    "warmup_steps": "warmup_iters",
    "matrix_lr": "learning_rate lr",
    "device": "device_type",
    "precision": "dtype mixed_precision",
    "compile": "use_compile torch_compile",
    "activation_checkpointing": "gradient_checkpointing",
    "name": "run run_name model_tag",
    "runs_dir": "out_dir output_dir checkpoint_dir",
    "data": "dataset",
    "val_data": "eval_dataset val_dataset validation_file val_file eval_data",
    "text_field": "dataset_text_field text_column text_key",
    "nproc": "nproc_per_node num_gpus n_gpus num_processes",
}
KEY_OF = {other: key for key, names in NAMES.items() for other in names.split()}
VALUES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "no": "fp32"}  # of precision
DUMMY = "dummy"  # nanochat's name of a run without W&B
ADAMW_RATE = ("learning_rate", "lr")
KEY_REMARKS = dict.fromkeys(  # what a name is, and when its value fits our key
    ADAMW_RATE,
    (", a rate of AdamW", ' beside optimizer = "adamw"; for Muon leave it out, its rates are of another size'),
)
SWITCH_KEYS = ("compile", "activation_checkpointing")
SWITCHES = ("use_dummy_wandb", "always_save_checkpoint", "wandb_log")  # and those of HARMLESS that are true or false

# names that change nothing here at these values; with any other value they ask for what paceline does not have
HARMLESS: dict[str, tuple[Any, ...]] = {
    "dropout": (0,),
    "bias": (False,),
    "decay_lr": (True,),
    "eval_only": (False,),
    "backend": ("nccl", "gloo"),
    "fp8": (False,),
    "aspect_ratio": (64,),
    "scalar_lr": (0.5,),
    "warmup_ratio": (0,),
    "target_flops": (-1, None),
    "resume_from_step": (-1, None),
}
INSTEAD = {
    "warmup_ratio": "warmup_steps, a number of steps, takes its place",
    "resume_from_step": "paceline resume RUN goes on with a run",
    "aspect_ratio": "set n_embd, the width itself",
    "target_flops": "set num_steps, or time, such as 8h",
}
DERIVED_FLAGS = {  # in a .py file they are translated, as the others stand beside them
    "gradient_accumulation_steps": "--total-batch-size N, in tokens: these steps x batch_size x block_size",
    "n_head": "--head-dim N: n_embd / n_head",
}
# names that change nothing here at any value
UNUSED = (
    "wandb_", "use_dummy_wandb", "core_metric_", "eval_iters", "lr_decay_iters", "min_lr", "beta1", "beta2", "betas",
    "fp8_recipe", "total_training_time", "always_save_checkpoint", "config_keys", "user_config",
)  # fmt: skip


@dataclass(frozen=True)
class Translation:
    """What a setting of another trainer means: a value of a key of ours, or nothing here (key None)."""

    key: str | None
    value: Any = None
    unused: bool = False  # it says something, but not to paceline
    note: str = ""  # why it is not used, where that may surprise


def translate(name: str, value: Any, *, optimizer: str) -> Translation | None:
    """Returns what another trainer's setting means; None for an unknown name. optimizer: that of the run.

    Raises PacelineError where it asks for what paceline does not have.
    """
    if name == "fp8" and value is True:  # nanochat's switch for what is a precision here
        return Translation("precision", name)
    key = KEY_OF.get(name)
    if key is None:
        return _without_key(name, value)
    if name in ADAMW_RATE and optimizer != "adamw":
        note = f"{name} is a rate of AdamW and is not used: Muon trains the matrices, at matrix_lr (--optimizer adamw uses it)"
        return Translation(None, note=note)
    if key == "name" and value == DUMMY:
        return Translation(None, note=f'{name} = "{DUMMY}": the run gets a name by itself, and no tracker')
    if value in ("", None):
        return Translation(None)  # it leaves the setting open; numbers that do so are the key's own (config.py, also)
    return Translation(key, VALUES.get(value, value) if key == "precision" and isinstance(value, str) else value)


def with_our_flags(args: Sequence[str], known: Collection[str]) -> list[str]:
    """Returns the arguments with other trainers' flags under our names, or without them; one note says so. known: our options."""
    words, remaining, notes = list[str](), list(args), list[str]()
    is_adamw = "--optimizer=adamw" in args or ("--optimizer", "adamw") in pairwise(args)
    while remaining:
        argument = remaining.pop(0)
        flag, equals, text = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in DERIVED_FLAGS:
            raise UsageError(f"{flag} is nanoGPT's, and depends on other settings", fix=DERIVED_FLAGS[name])
        is_ours = not flag.startswith("--") or f"--{name.replace('_', '-')}" in known
        if is_ours or not (name in KEY_OF or name in HARMLESS or name.startswith(UNUSED)):
            words.append(argument)
            continue
        if name in ADAMW_RATE and not is_adamw:  # a config file may have either optimizer
            rate = text if equals else remaining[0] if remaining and _is_value(remaining[0], of=name) else "3e-4"
            fix = f"--optimizer adamw {flag} {rate}; or --matrix-lr for Muon's rate, which is of another size"
            raise UsageError(f"{flag} is a rate of AdamW", fix=fix)
        if not equals and remaining and _is_value(remaining[0], of=name):
            equals, text = "=", remaining.pop(0)
        try:
            value = _plain(text) if equals else True
            meaning = translate(name, value, optimizer="adamw" if is_adamw else "muon") or Translation(None)
        except PacelineError as error:
            raise UsageError(error.message, fix=error.fix) from None
        if meaning.key:
            option = f"--{meaning.key.replace('_', '-')}"
            words.append(f"{option}={meaning.value if isinstance(meaning.value, str) else text or 'true'}")
            switched = f" {meaning.value}" if not equals and isinstance(meaning.value, str) else ""
            notes.append(f"{flag} is {option}{switched}")
        elif meaning.note or meaning.unused:
            notes.append(meaning.note or f"{flag} is not used")
    if notes:
        print(f"note    names of another trainer: {'; '.join(notes)}", file=sys.stderr)
    return words


def _is_value(word: str, *, of: str) -> bool:
    """Returns whether the word after a flag is its value; after a switch only true or false is."""
    if KEY_OF.get(of) in SWITCH_KEYS or of in SWITCHES or isinstance(HARMLESS.get(of, (0,))[0], bool):
        return word.lower() in ("true", "false")
    return not word.startswith("-") or word[1:2].isdigit()


def _plain(text: str) -> Any:
    """Returns the value that a flag's text stands for."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _without_key(name: str, value: Any) -> Translation | None:
    allowed = HARMLESS.get(name)
    if name.startswith(UNUSED) or (allowed is not None and value in allowed):
        return Translation(None, unused=True)
    if allowed is None:
        return None
    fix = INSTEAD.get(name, f"leave {name} out")
    raise PacelineError(f"paceline has no {name}, and {value!r} asks for it", fix=fix)


def unknown_command(args: Sequence[str], names: Collection[str]) -> UsageError:
    """Names the command of ours that does the same, or the nearest one, or action of `torch`, `data` and `tokenizer`."""
    head, word = [*args, ""][:2]
    if actions := [name.split()[1] for name in names if name.startswith(f"{head} ")]:
        problem = f"{head} takes {' or '.join(actions)}, {f'not {word}' if word else 'none is given'}"
        return UsageError(problem, fix=f"paceline {head} {nearest(word, actions) or actions[0]}")
    near = OTHER_COMMANDS.get(head) or nearest(head, [name.split()[0] for name in names])
    whole = f"{near} {word}" if f"{near} {word}" in names else near
    return UsageError(f"unknown command {head}", fix=f"paceline {whole}" if near else "paceline --help lists them")
