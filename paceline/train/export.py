"""
A run's model as a folder of Hugging Face files: config, weights, tokenizer, and the model's code (model/modeling_paceline.py).

No architecture of transformers is equal to ours, so the folder has its code. Weights stay in fp32, as in the checkpoint, and no
option rounds them: fine-tuning continues from the same numbers, and `from_pretrained(DIR, dtype=torch.bfloat16)` rounds them as a
bf16 run does in its products. The rows that pad the vocabulary are cut: no id without a token can be generated.

The folder is written under a hidden name, checked where transformers is installed, and renamed.
"""

import glob
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import paceline
from paceline.config import ModelConfig
from paceline.data.prepare import run_tokenizer
from paceline.data.tokenizer import SAMPLE_TEXT, Tokenizer
from paceline.errors import PacelineError
from paceline.file_systems import free_space
from paceline.model.attention import CHECKED_TOKENS
from paceline.model.checkpoint import DTYPE_CODES
from paceline.model.gpt import GPT, ROTARY_BASE, VE_GATE_MAX
from paceline.model.layers import QK_GAIN, RMS_EPS, SOFTCAP
from paceline.model.manifest import step_folder_name
from paceline.model.publish import RawTensor, write_shard
from paceline.plan.shapes import HEAD, has_value_embed, param_shapes, smear_gate_width, ve_gate_width, window_sizes
from paceline.run_options import ExportOptions
from paceline.rundir import NO_SPACE, RunDir, write_atomic
from paceline.train.evaluate import load_model
from paceline.units import format_bytes, format_count

CODE = Path(__file__).parents[1] / "model" / "modeling_paceline.py"
EXPORT_FILE = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config)\.json|modeling_paceline\.py"
    r"|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
)
SHARD_BYTES = 5 * 10**9  # of one file of weights, at most: the limit of the Hugging Face hub's tools
SMALL_BYTES = 1 << 20  # of all files but weights and tokenizer, at most
# of a logit, between -15 and 15. At depth 12 sums in another order gave 9e-6; weights rounded to bf16 0.07, a wrong window 0.1
LARGEST_DIFFERENCE = 1e-3
LOAD = """\
load    from transformers import AutoModelForCausalLM, AutoTokenizer
        model = AutoModelForCausalLM.from_pretrained({path!r}, trust_remote_code=True)
        tokenizer = AutoTokenizer.from_pretrained({path!r}, trust_remote_code=True)"""


def export_run(run: RunDir, options: ExportOptions, *, report: Callable[[str], None]) -> dict[str, Any]:
    """Writes the folder and returns what was written; `report` gets a line for each thing that is done.

    Raises PacelineError where there is no good checkpoint, where the folder cannot be written, and where the check fails.
    """
    if options.out is not None:
        check_replaceable(options.out)
    model, reader = load_model(run, step=options.step, device="cpu")
    model.compute_dtype = torch.float32  # that of the files
    out = options.out or run.exports / f"{run.name}_{step_folder_name(reader.step)}"
    check_replaceable(out)
    tokenizer = Tokenizer.load(run_tokenizer(run))
    weights = export_weights(model)
    num_params, num_bytes = sum(p.numel() for p in weights.values()), sum(p.nbytes for p in weights.values())
    report(f"model   {run.name} at step {reader.step:,}: {format_count(num_params)} parameters in fp32")
    configs = export_configs(model.config, tokenizer, origin={"run": run.name, "step": reader.step})
    with new_folder(out, num_bytes=num_bytes + len(tokenizer.json_bytes) + SMALL_BYTES) as folder:
        write_files(folder, weights, tokenizer, configs)
        files = sorted(path.name for path in folder.iterdir())
        checked = check_export(model, tokenizer, folder)
    report(format_check(checked))
    report(f"wrote   {out}: {format_bytes(num_bytes)} of weights; {', '.join(files)}")
    report(LOAD.format(path=str(out)))
    facts = {"run": run.name, "step": reader.step, "parameters": num_params, "bytes": num_bytes}
    return {"path": str(out), **facts, "files": files, **checked}


def export_weights(model: GPT) -> dict[str, Tensor]:
    """Returns the parameters by their names, fp32, without the rows that pad the vocabulary."""
    padded = {shape.name for shape in param_shapes(model.config) if shape.group in ("wte", "value_embeds", HEAD)}
    state = model.state_dict()
    return {name: p[: model.config.vocab_size] if name in padded else p for name, p in state.items()}


def export_configs(model: ModelConfig, tokenizer: Tokenizer, *, origin: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the JSON files by name. origin: where the weights are from. Documents end where the next one begins: at one token."""
    token_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.bos_id)
    tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token"), tokenizer.bos_token)
    classes = {"AutoConfig": "PacelineConfig", "AutoModelForCausalLM": "PacelineForCausalLM"}
    config = {
        "architectures": [classes["AutoModelForCausalLM"]],
        "auto_map": {auto: f"{CODE.stem}.{name}" for auto, name in classes.items()},
        "model_type": "paceline",
        "dtype": "float32",
        "vocab_size": model.vocab_size,
        "hidden_size": model.n_embd,
        "num_hidden_layers": model.n_layer,
        "num_attention_heads": model.n_head,
        "num_key_value_heads": model.n_kv_head,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.sequence_len,
        "windows": window_sizes(model),
        "value_embed_layers": [layer for layer in range(model.n_layer) if has_value_embed(layer, model.n_layer)],
        "ve_gate_channels": ve_gate_width(model),
        "ve_gate_max": VE_GATE_MAX,
        "smear_gate_channels": smear_gate_width(model),
        "backout_layer": model.n_layer // 2,
        "rotary_base": ROTARY_BASE,
        "qk_gain": QK_GAIN,
        "rms_norm_eps": RMS_EPS,
        "final_logit_softcapping": SOFTCAP,
        "tie_word_embeddings": False,
        **token_ids,
        "paceline": {"version": paceline.__version__, **origin},
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokens,
        "padding_side": "left",
        "model_max_length": model.sequence_len,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return {"config.json": config, "generation_config.json": token_ids, "tokenizer_config.json": tokenizer_config}


def write_files(
    folder: Path, weights: Mapping[str, Tensor], tokenizer: Tokenizer, configs: Mapping[str, dict[str, Any]]
) -> None:
    """Writes everything; more than SHARD_BYTES of weights as several files, with the index that transformers reads."""
    shards: list[list[RawTensor]] = [[]]
    for name, p in weights.items():
        if shards[-1] and sum(len(tensor.data) for tensor in shards[-1]) + p.nbytes > SHARD_BYTES:
            shards.append([])
        raw = p.contiguous().reshape(-1).view(torch.uint8).numpy().data
        shards[-1].append(RawTensor(name, DTYPE_CODES[p.dtype], tuple(p.shape), raw))
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        part = "" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}"
        write_shard(folder / f"model{part}.safetensors", tensors)
        weight_map |= {tensor.name: f"model{part}.safetensors" for tensor in tensors}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(p.nbytes for p in weights.values())}, "weight_map": weight_map}
        configs = {**configs, "model.safetensors.index.json": index}
    for name, values in configs.items():
        write_atomic(folder / name, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
    write_atomic(folder / "tokenizer.json", tokenizer_json(tokenizer))
    write_atomic(folder / CODE.name, CODE.read_text("utf-8"))


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """Returns the tokenizer's file, changed so that a text begins with the token between documents, as in training and `sample`."""
    from tokenizers import Tokenizer as Library
    from tokenizers.processors import TemplateProcessing

    inner, bos = Library.from_buffer(tokenizer.json_bytes), tokenizer.bos_token
    inner.no_truncation()
    inner.no_padding()
    special = [(bos, tokenizer.bos_id)]
    inner.post_processor = TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=special)
    text: str = inner.to_str(pretty=True)
    return text


def check_replaceable(out: Path) -> None:
    """Raises PacelineError where there is something, unless it is an earlier export and nothing else."""
    if not out.exists():
        return
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else [out.name]
    others, config = [name for name in names if not EXPORT_FILE.fullmatch(name)], ""
    with suppress(OSError, ValueError):
        config = (out / "config.json").read_text("utf-8")
    # transformers writes its version where it saves: those weights may be the only copy of a fine-tuned model
    is_ours = '"paceline": {' in config and "transformers_version" not in config
    if names and (others or not is_ours):
        holds = f", with {others[0]}" if others and out.is_dir() else ""
        problem = f"{out} already exists{holds} and is not as `paceline export` writes it"
        raise PacelineError(problem, fix="--out DIR in another place, or remove it first")


@contextmanager
def new_folder(out: Path, *, num_bytes: int) -> Iterator[Path]:
    """Yields a hidden folder beside `out` that takes its place if nothing was raised, and otherwise is removed.

    Raises PacelineError where there is no space for num_bytes, and where the disk refuses.
    """
    target = out.resolve()
    hidden = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    replaced = target.with_name(f".{target.name}.{os.getpid()}.old.tmp")
    another_disk = "free some space, or --out DIR on another disk"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):  # of exports that were killed
            shutil.rmtree(leftover, ignore_errors=True)
        if (free_bytes := free_space(target.parent)) is not None and free_bytes < num_bytes:
            problem = f"{out} needs {format_bytes(num_bytes)}, {format_bytes(free_bytes)} are free"
            raise PacelineError(problem, fix=another_disk)
        hidden.mkdir()
        yield hidden
        if target.exists():
            target.rename(replaced)
        hidden.rename(target)
    except OSError as error:
        fix = another_disk if error.errno in NO_SPACE else "--out DIR in a place you can write"
        raise PacelineError(f"{out} cannot be written: {error.strerror}", fix=fix) from error
    finally:
        if replaced.exists() and not target.exists():  # interrupted between the two renames
            replaced.rename(target)
        for path in (hidden, replaced):
            shutil.rmtree(path, ignore_errors=True)


def check_export(model: GPT, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Loads the folder by transformers and compares logits and token ids with the run's; raises PacelineError where they differ.

    Returns the largest difference of a logit, or why transformers could not load the folder here.
    """
    result = dict.fromkeys(("transformers", "checked_tokens", "largest_difference", "not_checked"))
    logging.disable(logging.WARNING)  # of what transformers imports
    try:
        with redirect_stderr(io.StringIO()):  # its progress bars
            import transformers

            from paceline.model.modeling_paceline import PacelineForCausalLM

            exported = PacelineForCausalLM.from_pretrained(folder).eval()
            token_ids = transformers.PreTrainedTokenizerFast.from_pretrained(folder)(SAMPLE_TEXT)["input_ids"]
    except Exception as error:  # a version that is too old, or that does not fit another package, shows in many ways
        missing = isinstance(error, ModuleNotFoundError) and error.name == "transformers"
        problem = f"it cannot load the files: {type(error).__name__}: {error}".splitlines()[0]
        return {**result, "not_checked": "transformers is not installed" if missing else f"transformers: {problem}"}
    finally:
        logging.disable(logging.NOTSET)
    num_tokens = min(model.config.sequence_len, min(model.windows) + 8, CHECKED_TOKENS)  # more than a short window
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(model.config.vocab_size, (1, num_tokens), generator=generator)  # (1, T)
    with torch.inference_mode():
        difference = float((exported(idx).logits - model.logits(idx)).abs().max())
    problems = [] if difference <= LARGEST_DIFFERENCE else [f"logits differ by {difference:.1e}"]  # or are NaN
    if token_ids != [tokenizer.bos_id, *tokenizer.encode(SAMPLE_TEXT)]:
        problems.append("a text becomes other tokens")
    version = transformers.__version__
    if problems:
        raise PacelineError(
            f"transformers {version} does not compute the run's numbers from the exported files: {' and '.join(problems)}",
            fix="install another version of transformers; nothing was written",
        )
    return {**result, "transformers": version, "checked_tokens": num_tokens, "largest_difference": difference}


def format_check(checked: Mapping[str, Any]) -> str:
    """Returns the line of check_export's result."""
    if checked["not_checked"]:
        return f"check   not done: {checked['not_checked']}"
    difference = f"logits of {checked['checked_tokens']} tokens differ by at most {checked['largest_difference']:.1e}"
    return f"check   {difference} from the run's own, by transformers {checked['transformers']}"
