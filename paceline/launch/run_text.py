"""
What a run keeps as long as it is the same run: its text, its first weights, and the keys that shape them or choose rows. No torch.

The text is prepared or found again, and recorded for the workers. Neither a flag of `resume` nor an edit of config.toml may change
the keys: plan.json and dataset.json have what the run began with.
"""

import hashlib
import json
import shlex
import shutil
import sys
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from paceline.config import LENGTH_KEYS, Config, cache_dir, parse_time
from paceline.config_file import load_config, source_of
from paceline.data.corpus import META, Progress, list_files
from paceline.data.prepare import (
    TokenDataset,
    data_info,
    dataset_path,
    open_dataset,
    prepare,
    print_held_out_note,
    print_texts_note,
    print_vocab_size_note,
    run_tokenizer,
)
from paceline.data.readers import TEXT_FIELD, ReadNotes
from paceline.data.tokenizer import TOKENIZER_FILE, Tokenizer, read_tokenizer_file, train_tokenizer_on
from paceline.errors import PacelineError, expand_home
from paceline.hub import PREFIX, is_local
from paceline.model.manifest import (
    better_checkpoint,
    check_shapes,
    newest_good,
    read_manifest,
    step_folder_name,
    step_of,
    verify,
)
from paceline.model.publish import copy_weights
from paceline.plan.forecast import forecast
from paceline.plan.host import probe_cpu_cores
from paceline.plan.machine import Machine
from paceline.plan.planner import Plan
from paceline.plan.replan import MakePlan
from paceline.plan.shapes import param_shapes
from paceline.rundir import RunDir, read_json_lines, resume_command, unwritable_run, write_atomic
from paceline.terminal import show_progress
from paceline.typed_fields import format_toml_value, read_run_file
from paceline.units import format_duration, format_list, format_ms, format_number_of

# `resume` takes no other value of these
FIXED_KEYS = (
    "name", "seed", "text_field", "tokenizer", "vocab_size", "depth", "n_embd", "head_dim", "n_kv_head", "sequence_len",
    "total_batch_size", "optimizer", "packing", "init_from",
)  # fmt: skip
LAST_LINES = 20  # of metrics.jsonl
# they decide the rows of a step, and the first weights; the same text may be at another place
ROW_KEYS = ("data", "val_data", "text_field", "tokenizer", "packing", "seed", "init_from")


def check_text(config: Config) -> None:
    """Raises PacelineError where the text of a job that is to be submitted is not here: the job would wait and then fail."""
    try:
        list_files(config.data, val_source=config.val_data)
    except PacelineError as error:
        raise PacelineError(error.message, fix=f"{error.fix}; --no-check, if only the nodes have it") from error


def absolute_texts(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a config with absolute paths of a local text and tokenizer: a run may be resumed from any folder."""
    paths = {name: keys[name] for name in ("data", "val_data", "tokenizer") if keys.get(name)}
    local = {name: path for name, path in paths.items() if name == "tokenizer" or is_local(path)}
    return {**keys, **{name: str(expand_home(path).absolute()) for name, path in local.items()}}


def check_changes(run: RunDir, config: Config, changes: Mapping[str, Any], *, otherwise: str) -> None:
    """Raises PacelineError for a key that a run cannot change. otherwise: the command that can, to which the key is added."""
    before = {**absolute_texts(asdict(config)), "name": run.name}  # a run is called by the name of its folder
    after = absolute_texts(changes)
    if after.get("tokenizer") and is_own_tokenizer(run, Path(after["tokenizer"])):
        del after["tokenizer"]
    if config.init_from and after.get("init_from"):
        with suppress(PacelineError):  # the config has the checkpoint, also where a run was named
            place = source_of(after["init_from"], runs_dir=str(run.path.parent))[1]
            after["init_from"] = config.init_from if Path(config.init_from).is_relative_to(place) else str(place)
    if key := next((key for key in FIXED_KEYS if key in after and after[key] != before[key]), None):
        own, value = "auto" if before[key] is None else before[key], str(changes[key])
        fix = f"{otherwise} --{key.replace('_', '-')} {shlex.quote(value)}"
        if key == "name":
            fix = f"mv {run.quoted} {shlex.quote(str(run.path.parent / value))} renames it"
        raise PacelineError(f"{key} is {own} in {run.name} and cannot change within a run", fix=fix)
    if changes.get("time") is not None:
        raise PacelineError(
            f"time sets the length of a new run; {run.name} keeps its {format_number_of(config.num_steps or 0, 'step')}",
            fix=longer_fix(run, config, parse_time(str(changes["time"]))),
        )


def longer_fix(run: RunDir, config: Config, time_s: float) -> str:
    """Returns the length with which a run goes on for this time, as fast as its last logged steps; twice its own without them."""
    lines = deque((line for line in read_json_lines(run.metrics) if line.get("tok_per_sec")), maxlen=LAST_LINES)
    if not lines or not config.total_batch_size:
        return f"--num-steps {2 * (config.num_steps or 0)} makes it longer"
    step_s = config.total_batch_size / median(line["tok_per_sec"] for line in lines)
    num_steps, done = max(1, round(time_s / step_s)), lines[-1]["step"]
    about = f"{format_duration(time_s)} are about {format_number_of(num_steps, 'step')} of {format_ms(1000 * step_s)}"
    return f"--num-steps {done + num_steps}: {about}, from step {done:,} on"


def is_own_tokenizer(run: RunDir, path: Path) -> bool:
    """Whether a file is a copy of the run's tokenizer."""
    with suppress(OSError):
        return path.read_bytes() == run.tokenizer_json.read_bytes()
    return False


def check_edits(run: RunDir, config: Config, plan: Plan, *, otherwise: str) -> None:
    """Raises PacelineError where config.toml was edited in a key that a run cannot change. otherwise: as above."""
    model = plan.model
    before: dict[str, Any] = {
        "depth": model.n_layer,
        "n_embd": model.n_embd,
        "head_dim": model.head_dim,
        "n_kv_head": model.n_kv_head,
        "vocab_size": model.vocab_size,
        "sequence_len": model.sequence_len,
        "total_batch_size": plan.total_batch_size,
        "optimizer": plan.optimizer,
    }
    before |= read_run_file(run.dataset_json, json.loads).get("keys", {})  # an earlier version did not record them
    for key, value in before.items():
        edited = getattr(config, key)
        if edited == value or (edited is None and key not in ROW_KEYS):  # without the line it follows from other keys
            continue
        own = "" if value is None else f"{key} = {json.dumps(value, ensure_ascii=False)}"
        moved = f"; {resume_command(run)} --data NEW after it, if the text was moved" if key == "data" else ""
        raise PacelineError(
            f"{key} was edited in {run.config_toml}, and cannot change within a run",
            fix=f"{f'write {own} there' if own else f'take {key} out of it'} again{moved}, or {otherwise}",
        )


def changed_keys(run: RunDir, config: Config) -> list[str]:
    """Returns a sentence for each key whose value was another one at the run's last launch, whether by a flag or by an edit.

    The precision and the length have sentences of their own (plan/replan.py).
    """
    launches = [event["config"] for event in read_json_lines(run.events) if "config" in event]
    before, now = launches[-1] if launches else {}, asdict(config)
    keys = [key for key in before if key in now and key not in (*LENGTH_KEYS, "precision", "name", "runs_dir")]
    return [
        f"{key} changed from {format_key(before[key])} to {format_key(now[key])}"
        for key in keys
        if now[key] != before[key]
    ]


def format_key(value: Any) -> str:
    """Returns a key's value as config.toml has it."""
    return "auto" if value is None else format_toml_value(value)


def planner(dataset: TokenDataset) -> MakePlan:
    """Returns the function that plans a config for a machine and this text. It raises PlanError where nothing fits."""

    def make(config: Config, machine: Machine) -> Plan:
        num_rows, cache = dataset.split("train", config.packing).num_rows(config.sequence_len), cache_dir(config)
        vocab_size: int = dataset.meta["vocab_size"]
        return forecast(config, machine, cache=cache, vocab_size=vocab_size, num_rows=num_rows).plan

    return make


def first_weights(config: Config) -> Path | None:
    """Returns the whole checkpoint whose weights the run starts with: of a run the newest; None for random weights.

    Raises PacelineError where there is none, or where the run has another tokenizer.
    """
    if config.init_from is None:
        return None
    source, path = source_of(config.init_from, runs_dir=config.runs_dir)
    if read_tokenizer_file(Path(config.tokenizer or "")) != read_tokenizer_file(run_tokenizer(source)):
        raise PacelineError(
            f"tokenizer {config.tokenizer} is another one than that of {source.name}, whose weights it is to start with",
            fix="leave --tokenizer out: the weights are of their own tokens",
        )
    if path != source.path.absolute():
        verify(path)
        return path
    path, notes = newest_good(source.checkpoints.absolute(), set_aside=False)
    if best := better_checkpoint(source.checkpoints, step_of(path)):
        notes.append(
            f"val_bpb of {source.name} is lowest at step {best.step:,}, {best.val_bpb:.4f}:"
            f" --init-from {shlex.quote(str(path.with_name(step_folder_name(best.step))))} starts with that"
        )
    for note in notes:
        print(f"note    {note}", file=sys.stderr)
    return path


def take_weights(run: RunDir, source: Path, config: Config, plan: Plan) -> Config:
    """Copies the weights of a checkpoint, as step 0 of a new run; returns the config that names it. Raises PacelineError."""
    fix = "leave the keys of the model out: --init-from sets them"
    check_shapes(source, read_manifest(source), param_shapes(plan.model), fix=fix)
    try:
        copy_weights(source, run.checkpoints)
    except OSError as error:
        raise unwritable_run(run, error) from error
    return replace(config, init_from=str(source))


def format_weights(source: Path) -> str:
    """Returns the line that names the checkpoint whose weights a run starts with."""
    name = RunDir(source.parent.parent).name
    return f"weights {name} at step {step_of(source):,}, with new optimizer states and learning rates"


def prepare_data(
    config: Config, publish: Progress = lambda *_: None, *, set_keys: Collection[str] = (), is_for_training: bool = True
) -> TokenDataset:
    """Returns the text of `config` as token shards: from the cache, or prepared now with a progress bar.

    set_keys: those of the command line. is_for_training: whether to say that files called test text will be trained on.
    """
    with show_progress() as show:

        def progress(label: str, done: float, total: float) -> None:
            show(label, done, total)
            publish(label, done, total)

        dataset = prepare(
            config.data,
            val_source=config.val_data,
            text_field=config.text_field,
            tokenizer=Path(config.tokenizer) if config.tokenizer else None,
            vocab_size=config.vocab_size,
            cache_dir=cache_dir(config),
            num_workers=probe_cpu_cores(),
            progress=progress,
            is_for_training=is_for_training,
        )
    actual = dataset.meta["vocab_size"]
    if config.text_field is None:
        print_field_note(config.data, dataset.meta.get("text_fields", ()))
    print_vocab_note(actual, dataset.meta.get("requested_vocab_size"))
    print_vocab_size_note(config, actual, set_keys=set_keys)
    if dataset.meta.get("lossless") is False:
        size = f"{data_info(dataset)['bytes_per_token']:.1f} bytes each"
        print(
            f"note    {config.tokenizer} loses text: decoding its tokens, {size}, gives another text", file=sys.stderr
        )
    return dataset


def train_new_tokenizer(source: str, *, text_field: str | None, vocab_size: int) -> Tokenizer:
    """Returns a tokenizer of this text, trained with a progress bar."""
    with show_progress() as progress:
        files = list_files(source, text_field=text_field, print_note=True)
        print_held_out_note(source, files)
        tokenizer = train_tokenizer_on(files, vocab_size=vocab_size, progress=progress, notes=(notes := ReadNotes()))
    if text_field is None:
        print_field_note(source, notes.text_fields)
    print_vocab_note(tokenizer.vocab_size, vocab_size)
    return tokenizer


def print_field_note(source: str, text_fields: Collection[str]) -> None:
    """Prints which fields of records the text is taken from, where that is not `text` alone."""
    if set(text_fields) - {TEXT_FIELD}:
        names = format_list(map(repr, sorted(text_fields)))
        word = "field" if len(text_fields) == 1 else "fields"
        print(f"note    {source}: the text is taken from the {word} {names}", file=sys.stderr)


def print_vocab_note(actual: int, requested: int | None) -> None:
    """Prints that a text is too small for the vocabulary that was requested."""
    if requested and actual < requested:
        print(f"note    the text gives a vocabulary of {actual:,}, not of {requested:,}", file=sys.stderr)


def reopen_data(run: RunDir, config: Config, *, is_elsewhere: bool = False) -> TokenDataset:
    """Returns the shards that the run began with, prepared again if they are gone. is_elsewhere: its text may be another one.

    Raises PacelineError if the text or its tokens have changed.
    """
    path, fingerprint, vocab_size, content = read_run_file(run.dataset_json, parse_record)
    if run.tokenizer_json.exists():
        run_tokenizer(run)  # refuses another one
    if (path / META).is_file():
        if not is_elsewhere:
            dataset = open_dataset(path)
            print_change_note(run, config, dataset.meta)
            return dataset
        content = content_hash(open_dataset(path))
    if config.tokenizer is None:
        config = replace(config, vocab_size=vocab_size or config.vocab_size)
    elif run.tokenizer_json.is_file():
        config = replace(config, tokenizer=str(run.tokenizer_json))  # the other may be gone, or be another one now
    gone = f"the token shards of {run.name} are gone"
    flag = "--data or --val-data" if config.val_data else "--data"
    try:
        dataset = prepare_data(config)
    except PacelineError as error:
        if is_elsewhere:
            raise
        raise PacelineError(
            f"{gone} and its text cannot be prepared: {error.message}",
            fix=f"restore {path} or the text, {flag} NEW if the text was moved, or start a new run",
        ) from error
    is_same_text = dataset.meta["fingerprint"] == fingerprint
    # the same text gives other tokens where another version of paceline or of its libraries reads it
    is_same = is_same_text if content is None else content_hash(dataset) == content
    if not is_same:
        sources = {"data": config.data} | ({"val-data": config.val_data} if config.val_data else {})
        flags = "".join(f" --{key} {shlex.quote(value)}" for key, value in sources.items())
        what = f"{gone} and its text has changed since"
        if is_same_text:
            what = f"{gone}, and this version of paceline makes other tokens of its text"
        raise PacelineError(
            f"{' with '.join(sources.values())} is another text than that of {run.name}" if is_elsewhere else what,
            fix=f"{flag} with a copy of its text; a new run that starts with its weights:"
            f" paceline train --init-from {run.quoted}{flags}"
            if is_elsewhere
            else f"restore {path if is_same_text else 'the text'}, or start a new run",
        )
    return dataset


def print_change_note(run: RunDir, config: Config, meta: Mapping[str, Any]) -> None:
    """Prints that the files of the run's text are not those that its shards, whose meta.json is `meta`, were made of."""
    if config.data.startswith(PREFIX) or "requested_vocab_size" not in meta:  # an earlier version did not record it
        return
    vocab_size = meta["requested_vocab_size"]
    tokenizer_hash = meta["tokenizer_hash"] if vocab_size is None else None
    with suppress(PacelineError):  # the text may be gone
        files = list_files(config.data, val_source=config.val_data, text_field=config.text_field)
        cache = cache_dir(config)
        path = dataset_path(files, tokenizer_hash=tokenizer_hash, vocab_size=vocab_size, cache_dir=cache)
        if path.name != meta["fingerprint"]:
            what = "has changed since it was prepared (its files, their sizes or times, or which of them are read)"
            print(f"note    {config.data} {what}: {run.name} keeps the text that it began with", file=sys.stderr)


def content_hash(dataset: TokenDataset) -> str:
    """Returns a hash of the tokens and the tokenizer, wherever the text was read."""
    return hashlib.sha256(json.dumps(dataset.meta["files"], sort_keys=True).encode()).hexdigest()


def parse_record(text: str) -> tuple[Path, str, int | None, str | None]:
    """Returns the folder of the shards, their fingerprint, the requested vocab_size and the content, as dataset.json has them."""
    record = json.loads(text)
    return Path(record["path"]), str(record["fingerprint"]), record.get("vocab_size"), record.get("content")


def record_data(run: RunDir, dataset: TokenDataset, config: Config) -> None:
    """Records the shards for the workers, with what they and their order follow from; copies their tokenizer. config: the run's."""
    # a small text gives fewer tokens than were requested, and config.toml has what it gave
    requested = dataset.meta.get("requested_vocab_size")
    record = {"path": str(dataset.path.resolve()), "fingerprint": dataset.meta["fingerprint"], "vocab_size": requested}
    record |= {"content": content_hash(dataset), "keys": {key: getattr(config, key) for key in ROW_KEYS}}
    record["tokenizer_sha256"] = dataset.meta["files"][TOKENIZER_FILE]["sha256"]
    if not run.tokenizer_json.exists():
        run.tokenizer_json.parent.mkdir(exist_ok=True)
        shutil.copyfile(dataset.tokenizer_json, run.tokenizer_json)
    write_atomic(run.dataset_json, json.dumps(record) + "\n")


def data_of_runs(runs: list[RunDir], *, other: str | None, text_field: str | None) -> list[tuple[RunDir, TokenDataset]]:
    """Returns each run with what run_data returns for it; prints a note where that is not the same text for all."""
    datasets = [run_data(run, other=other, text_field=text_field) for run in runs]
    print_texts_note(datasets)
    return list(zip(runs, datasets, strict=True))


def run_data(run: RunDir, *, other: str | None, text_field: str | None = None) -> TokenDataset:
    """Returns the run's own text, or another one tokenized by the run's tokenizer. text_field: of the other one."""
    config, _ = load_config(run.config_toml, {})
    if other is None:
        return reopen_data(run, config)
    config = replace(config, data=other, val_data=None, text_field=text_field, tokenizer=str(run_tokenizer(run)))
    return prepare_data(config, is_for_training=False)


def file_hashes(dataset: TokenDataset) -> dict[str, str]:
    """Returns the hash of every file of the prepared text, by its name."""
    hashes = {name: str(facts["sha256"]) for name, facts in dataset.meta["files"].items()}
    return {**hashes, META: hashlib.sha256((dataset.path / META).read_bytes()).hexdigest()}
