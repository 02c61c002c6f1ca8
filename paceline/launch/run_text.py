"""The text of a run: prepared or found again, recorded for the workers, and what a plan needs to know of it. No torch."""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import Config, cache_dir
from paceline.config_file import load_config
from paceline.data.corpus import Progress, list_files
from paceline.data.prepare import META, TokenDataset, data_info, open_dataset, prepare
from paceline.errors import PacelineError, expand_home
from paceline.plan.forecast import forecast
from paceline.plan.host import probe_cpu_cores
from paceline.plan.machine import Machine
from paceline.plan.planner import Plan
from paceline.plan.replan import MakePlan
from paceline.rundir import RunDir, write_atomic
from paceline.terminal import show_progress
from paceline.typed_fields import read_run_file


def check_text(config: Config) -> None:
    """Raises PacelineError where the text of a job that is to be submitted is not here: the job would wait and then fail."""
    try:
        list_files(config.data)
    except PacelineError as error:
        raise PacelineError(error.message, fix=f"{error.fix}; --no-check, if only the nodes have it") from error


def absolute_texts(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a config with absolute paths of a local text and tokenizer: a run may be resumed from any folder."""
    local = {name: keys[name] for name in ("data", "tokenizer") if keys.get(name)}
    if local.get("data") == "builtin" or str(local.get("data")).startswith("hf:"):
        del local["data"]
    return {**keys, **{name: str(expand_home(value).absolute()) for name, value in local.items()}}


def planner(dataset: TokenDataset) -> MakePlan:
    """Returns the function that plans a config for a machine and this text. It raises PlanError where nothing fits."""

    def make(config: Config, machine: Machine) -> Plan:
        num_rows, cache = dataset.split("train", config.packing).num_rows(config.sequence_len), cache_dir(config)
        vocab_size: int = dataset.meta["vocab_size"]
        return forecast(config, machine, cache=cache, vocab_size=vocab_size, num_rows=num_rows).plan

    return make


def prepare_data(config: Config, publish: Progress = lambda *_: None) -> TokenDataset:
    """Returns the text of `config` as token shards: from the cache, or prepared now with a progress bar."""
    with show_progress() as show:

        def progress(label: str, done: float, total: float) -> None:
            show(label, done, total)
            publish(label, done, total)

        dataset = prepare(
            config.data,
            tokenizer=Path(config.tokenizer) if config.tokenizer else None,
            vocab_size=config.vocab_size,
            cache_dir=cache_dir(config),
            num_workers=probe_cpu_cores(),
            progress=progress,
        )
    actual, requested = dataset.meta["vocab_size"], dataset.meta.get("requested_vocab_size")
    if requested and actual < requested:
        print(f"note    the text gives a vocabulary of {actual:,}, not of {requested:,}", file=sys.stderr)
    if dataset.meta.get("lossless") is False:
        size = f"{data_info(dataset)['bytes_per_token']:.1f} bytes each"
        print(
            f"note    {config.tokenizer} loses text: decoding its tokens, {size}, gives another text", file=sys.stderr
        )
    return dataset


def reopen_data(run: RunDir, config: Config) -> TokenDataset:
    """Returns the shards that the run began with, prepared again if they are gone. Raises PacelineError if the text has changed."""
    path, fingerprint, vocab_size = read_run_file(run.dataset_json, parse_record)
    if (path / "meta.json").is_file():
        return open_dataset(path)
    if config.tokenizer is None:
        config = replace(config, vocab_size=vocab_size or config.vocab_size)
    elif run.tokenizer_json.is_file():
        config = replace(config, tokenizer=str(run.tokenizer_json))  # the other may be gone, or be another one now
    try:
        dataset = prepare_data(config)
    except PacelineError as error:
        raise PacelineError(
            f"the token shards of {run.name} are gone and its text cannot be prepared: {error.message}",
            fix=f"restore {path} or the text, or start a new run",
        ) from error
    if dataset.meta["fingerprint"] != fingerprint:
        raise PacelineError(
            f"the token shards of {run.name} are gone and its text has changed since",
            fix="restore the text, or start a new run",
        )
    return dataset


def parse_record(text: str) -> tuple[Path, str, int | None]:
    """Returns the folder of the shards, their fingerprint and the requested vocab_size, as dataset.json has them."""
    record = json.loads(text)
    return Path(record["path"]), str(record["fingerprint"]), record.get("vocab_size")


def record_data(run: RunDir, dataset: TokenDataset) -> None:
    """Writes where the shards are, for the workers."""
    # a small text gives fewer tokens than were requested, and config.toml has what it gave
    requested = dataset.meta.get("requested_vocab_size")
    record = {"path": str(dataset.path.resolve()), "fingerprint": dataset.meta["fingerprint"], "vocab_size": requested}
    write_atomic(run.dataset_json, json.dumps(record) + "\n")


def run_data(run: RunDir, *, other: str | None) -> TokenDataset:
    """Returns the run's own text, or another one tokenized by the run's tokenizer."""
    config, _ = load_config(run.config_toml, {})
    if other is None:
        return reopen_data(run, config)
    return prepare_data(replace(config, data=other, tokenizer=str(run.tokenizer_json)))


def file_hashes(dataset: TokenDataset) -> dict[str, str]:
    """Returns the hash of every file of the prepared text, by its name."""
    hashes = {name: str(facts["sha256"]) for name, facts in dataset.meta["files"].items()}
    return {**hashes, META: hashlib.sha256((dataset.path / META).read_bytes()).hexdigest()}
