"""
Prepared text: token shards on disk, made once, then mapped into memory by every worker.

    <cache_dir>/data/<fingerprint>/
      train_00000.bin ...  val_00000.bin ...   token ids, little-endian uint16, or uint32 when the vocabulary needs it
      train.docs.npy  val.docs.npy             int64: where each document starts, in tokens of its split
      train.best_fit_2048.npy ...              int64: row, first token and length of each document in packed rows of 2,048 tokens
      tokenizer.json                           the one the ids are of
      meta.json                                sizes, source, and the SHA-256 of every file but packed rows, which follow from docs

A document is the separator token, then its text. The fingerprint is of the source files' paths, sizes and times, the
tokenizer and the settings, so the file system alone shows whether a prepared folder is still valid. That check is on the
way to the first step, so this module imports neither numpy nor the tokenizers: writer.py and dataset.py, which write and
map the shards, are imported when they are needed.
"""

import hashlib
import json
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from paceline.config import Config, cache_dir
from paceline.data.corpus import META, Progress, list_files
from paceline.data.readers import SourceFile
from paceline.data.tokenizer import TOKENIZER_FILE, Tokenizer, read_tokenizer_file, tokenizer_vocab_size
from paceline.errors import PacelineError, expand_home
from paceline.rundir import RunDir, write_atomic
from paceline.typed_fields import find_training_run, read_run_file
from paceline.units import BYTES_PER_TOKEN, format_bytes, format_duration, format_list, format_number_of, format_percent

if TYPE_CHECKING:
    from paceline.data.dataset import TokenSplit

FORMAT_VERSION = 1  # of the folder, and of how text becomes tokens: another version prepares everything again
SHARD_TOKENS = 1 << 27
HELD_OUT_NAMES = re.compile(  # of files and folders, but not of sources, where those are tests
    r"(?i)(?!.*\.py$)(.*[-_./])?(val|valid|validation|test)([-_.]?\d[^/]*|[-_.]raw)?(/.*|\.\w+(\.gz)?)"
)
WITHOUT_TOKENIZER = ", or leave --tokenizer out to train one on the text"


@dataclass(frozen=True)
class TokenDataset:
    """A prepared folder, with the content of its meta.json."""

    path: Path
    meta: dict[str, Any]
    reused: bool = True  # False where this call of `prepare` wrote it

    @property
    def tokenizer_json(self) -> Path:
        """Returns the path of the tokenizer that the token ids are of."""
        return self.path / TOKENIZER_FILE

    def split(self, name: Literal["train", "val"], packing: str) -> "TokenSplit":
        """Maps the tokens of a split. packing: the config's, how its documents become rows."""
        from paceline.data.dataset import TokenSplit

        return TokenSplit(self.path, name, self.meta, packing=packing)


def prepare(
    source: str,
    *,
    val_source: str | None = None,
    text_field: str | None = None,
    tokenizer: Path | None,
    vocab_size: int,
    cache_dir: Path,
    num_workers: int | None = None,
    progress: Progress | None = None,
    is_for_training: bool = True,
) -> TokenDataset:
    """Returns the dataset of this source, after making it where it does not exist or the source has changed.

    Without a tokenizer one of vocab_size is trained on the training split. The folder appears whole or not at all; of
    several processes that call this at once, one makes it and the others wait. Raises PacelineError for a source that
    cannot be read, is too small, or changes meanwhile.
    """
    list_again = partial(list_files, source, val_source=val_source, text_field=text_field)
    files = list_again(print_note=True)
    if is_for_training:
        print_held_out_note(source, files)
    content = None if tokenizer is None else read_tokenizer_file(tokenizer, otherwise=WITHOUT_TOKENIZER)
    tokenizer_hash = None if content is None else hashlib.sha256(content).hexdigest()
    find_path = partial(dataset_path, tokenizer_hash=tokenizer_hash, vocab_size=vocab_size, cache_dir=cache_dir)
    path = find_path(files)
    if (path / META).exists():
        return open_dataset(path)

    from paceline.data.writer import new_folder, print_notes, write_dataset

    custom_tokenizer = None if content is None else Tokenizer(content, name=str(tokenizer))
    with new_folder(path, progress=progress) as folder:
        if folder is None:  # another process made it while this one waited
            return open_dataset(path)
        meta = write_dataset(
            folder,
            files=files,
            tokenizer=custom_tokenizer,
            vocab_size=vocab_size,
            num_workers=num_workers,
            shard_tokens=SHARD_TOKENS,
            progress=progress,
        )
        if path != find_path(list_again()):
            raise PacelineError(
                f"the files of {source} changed while they were read",
                fix="wait until what writes them is done, then run the same command again",
            )
        print_notes(source, meta)
        request = {
            "source": source,
            "val_source": val_source,
            "requested_vocab_size": None if tokenizer else vocab_size,
        }
        meta = {"format_version": FORMAT_VERSION, "fingerprint": path.name} | request | meta
        write_atomic(folder / META, json.dumps(meta, indent=1) + "\n")
    return replace(open_dataset(path), reused=False)


def print_held_out_note(source: str, files: list[SourceFile]) -> None:
    """Says which files in the folder that is the source are called validation text and will be trained on."""
    root = f"{expand_home(source).absolute()}/"
    paths = [file.path for file in files if file.path.startswith(root) and not file.is_held_out]
    names = [path.removeprefix(root) for path in paths]
    if called := [name for name in names if HELD_OUT_NAMES.fullmatch(name)]:
        effect = "to keep such files out, move them to another folder"
        if not any(file.is_held_out for file in files):
            flag = f"--val-data {shlex.quote(str(Path(source, called[0])))}"
            effect = f"a share of all documents is held out; {flag} measures on that in its place"
        print(f"note    {source}: {format_list(called, limit=3)} will be trained on: {effect}", file=sys.stderr)


def print_texts_note(datasets: Sequence[TokenDataset]) -> None:
    """Says that val_bpb of several runs is measured on different texts, to stderr."""
    texts = {dataset.meta.get("val_source") or f"{dataset.meta['source']} (held out)" for dataset in datasets}
    if len(texts) > 1:
        what = "each run is measured on its own text, so that their val_bpb cannot be compared"
        print(f"note    {what}: --data SOURCE measures all of them on one text", file=sys.stderr)


def vocab_size_of(config: Config, meta: Mapping[str, Any] | None) -> int:
    """Returns the vocabulary that a run of this config has: of its prepared text, else of its tokenizer file.

    Else it is vocab_size, of which a small text may give less. meta: what `prepared_meta` returns. Raises PacelineError where
    the file is no readable tokenizer.
    """
    if meta is not None or config.tokenizer is None:
        return int(meta["vocab_size"]) if meta else config.vocab_size
    content = read_tokenizer_file(Path(config.tokenizer), otherwise=WITHOUT_TOKENIZER)
    with suppress(ValueError):
        if vocab_size := tokenizer_vocab_size(json.loads(content)):
            return vocab_size
    return Tokenizer(content, name=config.tokenizer).vocab_size  # its error says what is wrong with the file


def print_vocab_size_note(config: Config, actual: int, *, set_keys: Collection[str]) -> None:
    """Prints a note where the command line sets a vocab_size that the tokenizer file overrides."""
    if config.tokenizer and "vocab_size" in set_keys and actual != config.vocab_size:
        text = f"--vocab-size {config.vocab_size} has no effect: {config.tokenizer} has a vocabulary of {actual:,}"
        print(f"note    {text}", file=sys.stderr)


class TextSizes(NamedTuple):
    """The rows of one epoch, 0 where the text is not prepared on this host; then about_rows is an estimate, 0 without one."""

    num_rows: int
    vocab_size: int
    about_rows: int = 0


def known_sizes(config: Config, *, set_keys: Collection[str] = ()) -> TextSizes:
    """Returns for a plan what is known of this config's text. set_keys: those of the command line.

    Both numbers of rows are 0 for paceline's own text that nobody asked for: the plan may be for any. The vocabulary is vocab_size,
    and a note says so, where the tokenizer file cannot be read here.
    """
    meta = prepared_meta(config)
    try:
        vocab_size = vocab_size_of(config, meta)
    except PacelineError as error:
        print(f"note    a vocabulary of {config.vocab_size:,} is assumed: {error.message}", file=sys.stderr)
        vocab_size = config.vocab_size
    print_vocab_size_note(config, vocab_size, set_keys=set_keys)
    if config.data == Config.data and "data" not in set_keys:
        return TextSizes(0, vocab_size)
    num_tokens = about_tokens(config) if meta is None else meta["splits"]["train"]["num_tokens"]
    rows = -(-max(0, num_tokens - 1) // config.sequence_len)
    is_exact = meta is not None and config.packing == "stream"
    return TextSizes(rows, vocab_size) if is_exact else TextSizes(0, vocab_size, rows)


def about_tokens(config: Config) -> int:
    """Estimates the tokens to train on by the sizes of the text's files."""
    with suppress(PacelineError):
        files = list_files(config.data, val_source=config.val_data, text_field=config.text_field)
        return int(sum(file.text_bytes for file in files if not file.is_held_out) / BYTES_PER_TOKEN)
    return 0


def prepared_meta(config: Config) -> dict[str, Any] | None:
    """Returns the meta.json of this config's text; None where it is not prepared on this host."""
    with suppress(PacelineError):
        content = None if config.tokenizer is None else read_tokenizer_file(Path(config.tokenizer))
        digest, cache = None if content is None else hashlib.sha256(content).hexdigest(), cache_dir(config)
        files = list_files(config.data, val_source=config.val_data, text_field=config.text_field)
        path = dataset_path(files, tokenizer_hash=digest, vocab_size=config.vocab_size, cache_dir=cache)
        return open_dataset(path).meta
    return None


def dataset_path(
    files: list[SourceFile], *, tokenizer_hash: str | None, vocab_size: int | None, cache_dir: Path
) -> Path:
    """Returns where the prepared text of these files is, or would be. tokenizer_hash None: one of vocab_size is trained on them."""
    settings = {"tokenizer": tokenizer_hash or f"trained {vocab_size}", "shard_tokens": SHARD_TOKENS}
    return expand_home(cache_dir) / "data" / make_fingerprint(files, settings)


def make_fingerprint(files: list[SourceFile], settings: dict[str, Any]) -> str:
    """Returns 16 hex digits that change when the prepared folder would; it opens no file."""
    listed = []
    for file in files:  # what most files do not have is left out: earlier versions did not have it
        more = {"split": file.split, "is_held_out": file.is_held_out}
        more = {name: value for name, value in more.items() if value and value != "train"}
        listed.append([file.path, file.config, file.stamp, *filter(None, (file.text_field, more))])
    content = json.dumps([FORMAT_VERSION, settings, listed], ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def dataset_of(run: RunDir) -> TokenDataset:
    """Opens the prepared folder of a run."""
    return open_dataset(Path(json.loads(run.dataset_json.read_text())["path"]))


def open_dataset(path: Path) -> TokenDataset:
    """Opens a prepared folder, in any process; it checks the files' sizes alone, `verify` reads their contents."""
    try:
        meta = json.loads((path / META).read_bytes())
        version, files = meta["format_version"], meta["files"]
        if version != FORMAT_VERSION:
            raise PacelineError(
                f"{path} was prepared in format {version}, this paceline reads {FORMAT_VERSION}", fix=_repeat_fix(path)
            )
        for name, facts in files.items():
            size = (path / name).stat().st_size
            if size != facts["bytes"]:
                raise PacelineError(
                    f"{path / name} is damaged: {size:,} bytes long instead of {facts['bytes']:,}",
                    fix=_repeat_fix(path),
                )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PacelineError(f"{path / META} is damaged", fix=_repeat_fix(path)) from error
    except FileNotFoundError as error:
        if not (path / META).exists():
            raise PacelineError(
                f"{path} is not prepared text: it has no {META}", fix="prepare it: paceline data prepare SOURCE"
            ) from error
        raise PacelineError(f"{error.filename} is missing", fix=_repeat_fix(path)) from error
    except OSError as error:
        raise PacelineError(
            f"cannot read {path}: {error.strerror}", fix="check its permissions and the disk"
        ) from error
    return TokenDataset(path=path, meta=meta)


def run_tokenizer(run: RunDir) -> Path:
    """Returns the run's tokenizer: its own file, or where that is missing the same one beside its token shards.

    Raises PacelineError where there is another file. A run of an earlier version, which recorded no hash, is not checked.
    """
    record = read_run_file(run.dataset_json, lambda text: {"path": "", "tokenizer_sha256": None, **json.loads(text)})
    own, source, expected = run.tokenizer_json, Path(str(record["path"])) / TOKENIZER_FILE, record["tokenizer_sha256"]
    if expected is None or (own.exists() and hashlib.sha256(read_tokenizer_file(own)).hexdigest() == expected):
        return own
    fix = "copy the file there from a backup of the run"
    with suppress(OSError):
        if hashlib.sha256(source.read_bytes()).hexdigest() == expected:
            if not own.exists():
                return source
            fix = shlex.join(["cp", str(source), str(own)])
    problem = "is not the tokenizer that the run was trained with" if own.exists() else "is missing"
    raise PacelineError(f"{own} {problem}", fix=fix)


def find_tokenizer(path: Path) -> Path:
    """Returns the tokenizer that a path means: the file itself, or that of a run, by its name in runs/ too."""
    if (path / "config.toml").is_file() or (path.suffix != ".json" and not path.exists()):
        return run_tokenizer(find_training_run(str(path), runs_dir="runs"))
    return path


def verify(dataset: TokenDataset, *, files: Collection[str] | None = None, progress: Progress | None = None) -> None:
    """Compares every file, or those in `files`, with its hash in meta.json; raises PacelineError at the first that differs."""
    chosen = {name: facts for name, facts in dataset.meta["files"].items() if files is None or name in files}
    total = sum(facts["bytes"] for facts in chosen.values())
    done = 0
    for name, facts in chosen.items():
        try:
            with (dataset.path / name).open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise PacelineError(
                f"cannot read {dataset.path / name}: {error.strerror}", fix=_repeat_fix(dataset.path)
            ) from error
        if sha256 != facts["sha256"]:
            raise PacelineError(
                f"{dataset.path / name} is damaged: its SHA-256 is {sha256[:12]}..., not {facts['sha256'][:12]}...",
                fix=_repeat_fix(dataset.path),
            )
        done += facts["bytes"]
        if progress is not None:
            progress("verify", done, total)


def data_info(dataset: TokenDataset) -> dict[str, Any]:
    """Returns what `paceline data info` prints: meta.json with ratios."""
    meta = dataset.meta
    splits = {
        name: facts | {"bytes_per_token": facts["num_bytes"] / facts["num_tokens"]}
        for name, facts in meta["splits"].items()
    }
    total = {
        name: sum(facts[name] for facts in splits.values()) for name in ("num_tokens", "num_bytes", "num_documents")
    }
    return meta | {
        "path": str(dataset.path),
        "splits": splits,
        **total,
        "bytes_per_token": total["num_bytes"] / total["num_tokens"],
        "held_out_share": splits["val"]["num_bytes"] / total["num_bytes"],
        "disk_bytes": sum(facts["bytes"] for facts in meta["files"].values()),
    }


def format_prepared(dataset: TokenDataset, config: Config, *, file: str | None, keys: Mapping[str, Any] | None) -> str:
    """Returns what `paceline data prepare` prints: the shards, their text, the time, and the command that uses them.

    file, keys: of the command. keys None: of `data info`, with how the shards were made and without their rows.
    """
    facts = data_info(dataset)
    train, val = (facts["splits"][name]["num_tokens"] for name in ("train", "val"))
    files, documents = (format_number_of(facts[f"num_{name}s"], name) for name in ("file", "document"))
    seconds = (facts.get("train_tokenizer_s") or 0.0) + facts["tokenize_s"]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (keys or {}).items()]
    took = f"{seconds:.1f}s" if seconds < 60 else format_duration(seconds)
    where = format_held_out(facts)
    held_out = f"{format_number_of(facts['splits']['val']['num_documents'], 'document')} {where}"
    lines = {
        "text": f"{config.data}: {files}, {documents}, {format_bytes(facts['num_bytes'])}",
        "tokens": f"{facts['num_tokens']:,}: {train:,} to train on, {val:,} {where}; vocabulary {facts['vocab_size']:,}",
        "rows": "" if keys is None else format_rows(dataset, config),
        "size": f"{facts['bytes_per_token']:.2f} bytes per token, {format_bytes(facts['disk_bytes'])} on disk",
        "time": "none: it was there already" if dataset.reused else took,
        "shards": str(dataset.path),
        "next": shlex.join(["paceline", "train", *([file] if file else []), *flags]),
        "share": f"{held_out}, {format_percent(facts['held_out_share'], digits=1)} of the text",
        "ids": f"{facts['dtype']}, of tokenizer {facts['tokenizer_hash'][:12]}",
        "made": f"{facts['created']} in {took}",
    }
    for name in ("rows", "time", "next") if keys is None else ("share", "ids", "made"):
        del lines[name]
    return "\n".join(f"{name:<8}{text}" for name, text in lines.items())


def format_held_out(meta: Mapping[str, Any]) -> str:
    """Returns what follows the tokens to measure on: that they are held out, or of which text they are."""
    return f"of {meta['val_source']} to measure on" if meta.get("val_source") else "held out"


def format_rows(dataset: TokenDataset, config: Config) -> str:
    """Returns how many rows the text to train on gives. Rows that are packed are made here."""
    rows = dataset.split("train", config.packing)
    text = f"{rows.num_rows(config.sequence_len):,} of {config.sequence_len:,} tokens to train on"
    if left_out := rows.left_out(config.sequence_len):
        text += f"; best-fit packing leaves out {format_percent(left_out)} of the text"
    return text


def _repeat_fix(path: Path) -> str:
    return f"delete it and run the same command again, which prepares it again: rm -r {shlex.quote(str(path))}"
