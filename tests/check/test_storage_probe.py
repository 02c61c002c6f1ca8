import argparse
import inspect
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import typing
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from probing import NAMESPACES, ask, in_mounts

from paceline.check.probes.storage_probe import (
    filesystem_of,
    local_path,
    measure_folder,
    probe_place,
    probe_storage,
    probe_text,
)
from paceline.config import Config
from paceline.data.corpus import FORMATS, list_files
from paceline.data.prepare import known_sizes, prepare
from paceline.data.tokenizer import Tokenizer, tokenizer_vocab_size

FIELDS = {
    "path", "exists", "writable", "error", "total_bytes", "free_bytes", "free_inodes", "filesystem", "network",
    "write_bytes_per_s", "read_bytes_per_s",
}  # fmt: skip


def test_a_probed_folder_has_every_field_and_stays_empty(tmp_path):
    storage = probe_storage({"run_dir": str(tmp_path), "cache_dir": None, "data": "builtin", "measure_disk": False})[
        "storage"
    ]
    place = storage["run_dir"]
    assert place.keys() == FIELDS
    assert (place["exists"], place["writable"], place["error"]) == (True, True, None)
    assert (storage["data"], storage["cache"]) == (None, None)
    assert list(tmp_path.iterdir()) == []


def test_sizes_agree_with_df(tmp_path):
    place = probe_place(tmp_path, write=True)
    lines = subprocess.run(
        ["df", "-B1", "--output=size,avail,fstype", tmp_path], capture_output=True, text=True, check=True
    )
    size, _, kind = lines.stdout.splitlines()[1].split()
    assert (place["total_bytes"], place["filesystem"]) == (int(size), {"ext2/ext3": "ext4"}.get(kind, kind))


@pytest.mark.parametrize(("name", "write", "exists", "error"), [
    ("a/b", True, False, None),  # judged by its nearest parent, and not created
    ("file", True, True, "Not a directory"),
    ("file/below", True, False, "Not a directory"),
    ("file", False, True, None),  # data may be a text file
    ("link", True, True, "a link to /nowhere/at/all, which does not exist"),
])  # fmt: skip
def test_a_place_is_missing_in_the_way_or_a_broken_link(tmp_path, name, write, exists, error):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("/nowhere/at/all")
    place = probe_place(tmp_path / name, write=write)
    assert (place["exists"], place["writable"], place["error"]) == (exists, error is None, error)
    assert place["free_bytes"] > 0
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


def test_the_speed_is_measured_and_nothing_is_left(tmp_path):
    storage = probe_storage({"run_dir": str(tmp_path / "new"), "measure_disk": True})["storage"]
    if storage["run_dir"]["free_bytes"] < 1 << 30:
        pytest.skip("needs a GiB of space")
    assert storage["run_dir"]["write_bytes_per_s"] > 0
    assert storage["run_dir"]["read_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_is_a_tmpfs():
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    assert filesystem_of(Path("/dev/shm")) == "tmpfs"


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (None, None),
        ("builtin", None),
        ("hf:roneneldan/TinyStories", None),
        ("hf:/data/set", "/data/set"),
        ("hf:/data/set::test", "/data/set"),
        ("a.txt", "a.txt"),
    ],
)
def test_only_text_on_a_disk_has_a_path(data, path):
    assert local_path(data) == path


@pytest.mark.dist
@NAMESPACES
@pytest.mark.parametrize("name", ["disk", "große läufe", "a\\b"])
def test_a_read_only_run_folder_is_detected_by_writing(tmp_path, name):
    disk = tmp_path / name
    disk.mkdir()
    before = in_mounts(f"mount -t tmpfs -o ro tmpfs {shlex.quote(str(disk))}")
    place = ask("storage_probe", before=before, run_dir=str(disk / "runs"), measure_disk=True)["storage"]["run_dir"]
    assert (place["exists"], place["writable"], place["error"]) == (False, False, "Read-only file system")
    assert (place["filesystem"], place["write_bytes_per_s"]) == ("tmpfs", None)


@pytest.mark.dist
@NAMESPACES
def test_a_full_disk_is_detected_by_writing(tmp_path):
    script = f"mount -t tmpfs -o size=1M tmpfs {tmp_path}; head -c 2M /dev/zero > {tmp_path}/fill || true"
    place = ask("storage_probe", before=in_mounts(f"{{ {script}; }} 2>/dev/null"), run_dir=str(tmp_path))["storage"][
        "run_dir"
    ]
    assert (place["writable"], place["error"], place["free_bytes"]) == (False, "No space left on device", 0)


@pytest.mark.dist
@NAMESPACES
def test_missing_inodes_are_reported(tmp_path):
    script = f"mount -t tmpfs -o size=8M,nr_inodes=2 tmpfs {tmp_path}; touch {tmp_path}/last"
    place = ask("storage_probe", before=in_mounts(script), run_dir=str(tmp_path))["storage"]["run_dir"]
    assert (place["free_inodes"], place["free_bytes"]) == (0, 8 << 20)


@pytest.mark.dist
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_folder_of_another_user_is_not_writable():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is closed to others
        Path(folder).chmod(0o755)
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                error = probe_place(Path(folder), write=True)["error"]
                os._exit(0 if error == "Permission denied" else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "facts.schema.json").read_text())


def text_facts(
    data: str | None = None,
    *,
    tokenizer: Path | None = None,
    cache_dir: Path | None = None,
    vocab_size: int = 300,
    **keys,
):
    request = {"data": data, "tokenizer": tokenizer and str(tokenizer), "vocab_size": vocab_size}
    return probe_text(request | keys | {"cache_dir": cache_dir and str(cache_dir)})["text"]


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, module in enumerate((argparse, inspect, typing)):
        shutil.copyfile(module.__file__, folder / f"{number}.txt")
    return folder


def test_without_a_request_for_text_there_are_no_facts_of_text():
    assert probe_text({"data": None, "tokenizer": None}) == {"text": None}


def test_the_builtin_text_has_the_size_that_the_data_layer_counts():
    text = text_facts("builtin")
    assert (text["exists"], text["bytes"]) == (True, sum(file.num_bytes for file in list_files("builtin")))


def test_a_text_for_validation_has_facts_of_its_own_and_makes_another_prepared_text(corpus, tmp_path):
    val_data, cache = str(corpus / "0.txt"), tmp_path / "cache"
    validator = jsonschema.Draft202012Validator(SCHEMA["$defs"]["text"] | {"$defs": SCHEMA["$defs"]})
    for source, exists in ((val_data, True), (str(corpus / "9.txt"), False)):
        facts = text_facts(str(corpus), val_data=source, cache_dir=cache)
        validator.validate(facts)
        assert (facts["val"]["exists"], facts["val"]["data"], facts["prepared"]) == (exists, source, False)
    prepare(str(corpus), val_source=val_data, tokenizer=None, vocab_size=300, cache_dir=cache)
    assert text_facts(str(corpus), val_data=val_data, cache_dir=cache)["prepared"]
    assert not text_facts(str(corpus), cache_dir=cache)["prepared"]


def test_a_folder_has_the_size_that_the_data_layer_counts(corpus):
    (corpus / "picture.png").write_bytes(b"1234")
    (corpus / ".hidden.txt").write_text("x")
    text = text_facts(str(corpus))
    assert (text["exists"], text["bytes"], text["error"]) == (
        True,
        sum(file.num_bytes for file in list_files(str(corpus))),
        None,
    )
    assert (text["num_others"], text["others"]) == (1, ["picture.png"])


def test_the_file_types_are_those_of_the_data_layer(tmp_path):
    for kind in FORMATS:
        (tmp_path / f"a{kind}").write_text("x")
    assert text_facts(str(tmp_path))["bytes"] == len(FORMATS)


def test_a_folder_of_save_to_disk_is_offered_as_a_dataset(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    assert text_facts(str(tmp_path))["near"] == f"hf:{tmp_path}"


@pytest.mark.parametrize(
    ("name", "exists", "error"),
    [
        ("missing", False, None),
        ("empty", True, "no text in it: no file of .txt .md .py .txt.gz .jsonl .jsonl.gz .ndjson .ndjson.gz .parquet"),
        ("blank", True, "all its text files are empty"),
        ("broken", False, "a link to /nowhere, which does not exist"),
        ("pipe", True, "not a regular file"),
    ],
)
def test_unreadable_text_is_reported_with_the_reason(tmp_path, name, exists, error):
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.txt").touch()
    (tmp_path / "broken").symlink_to("/nowhere")
    os.mkfifo(tmp_path / "pipe")
    text = text_facts(str(tmp_path / name))
    assert (text["exists"], text["error"]) == (exists, error)


def test_a_hub_dataset_without_a_name_is_no_text_and_the_hub_is_not_asked(tmp_path):
    for data in ("hf:", "hf::config"):
        text = text_facts(data, cache_dir=tmp_path)
        assert (text["exists"], text["prepared"], "hub" in text) == (False, False, False)


def test_a_dataset_of_the_hub_is_unknown_until_it_was_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    assert text_facts("hf:owner/name")["exists"] is None
    (tmp_path / "hub/datasets--owner--name/snapshots/abc").mkdir(parents=True)
    assert text_facts("hf:owner/name")["exists"] is True


def test_a_folder_too_large_to_count_has_no_size(corpus, monkeypatch):
    monkeypatch.setattr("paceline.check.probes.storage_probe.LISTING_S", -1.0)
    assert measure_folder(corpus, types=(".txt",), skip=set()) == {"exists": True}


def test_text_counts_as_prepared_until_it_changes(corpus, tmp_path):
    cache = tmp_path / "cache"
    assert text_facts(str(corpus), cache_dir=cache)["prepared"] is False
    dataset = prepare(str(corpus), tokenizer=None, vocab_size=300, cache_dir=cache)
    facts, num_tokens = text_facts(str(corpus), cache_dir=cache), dataset.meta["splits"]["train"]["num_tokens"]
    assert (facts["prepared"], facts["num_tokens"]) == (True, num_tokens)
    assert facts["vocab_size"] == dataset.meta["vocab_size"]
    sizes = [path.stat().st_size for path in dataset.path.iterdir() if path.name != "meta.json"]
    assert (facts["folder"], facts["prepared_bytes"]) == (dataset.path.name, sum(sizes))
    assert facts["folder"] in probe_storage({"cache_dir": str(cache)})["storage"]["texts"]
    config = Config(data=str(corpus), vocab_size=300, cache_dir=str(cache), sequence_len=8)
    num_rows = dataset.split("train", "stream").num_rows(8)
    assert known_sizes(config) == (num_rows, dataset.meta["vocab_size"], 0)
    assert known_sizes(replace(config, vocab_size=290))[:2] == (0, 290)
    assert text_facts(str(corpus), cache_dir=cache, vocab_size=290)["prepared"] is False
    assert text_facts(str(corpus), cache_dir=cache, tokenizer=tmp_path / "missing.json")["prepared"] is False


@pytest.mark.parametrize("change", ["newer", "removed", "added with an old time"])
def test_changed_text_counts_as_prepared_only_where_a_run_would_reuse_it(corpus, tmp_path, change):
    cache = tmp_path / "cache"
    prepare(str(corpus), tokenizer=None, vocab_size=300, cache_dir=cache)
    if change == "newer":
        os.utime(corpus / "0.txt", (4e9, 4e9))
    elif change == "removed":
        (corpus / "0.txt").unlink()
    else:
        shutil.copyfile(corpus / "0.txt", corpus / "3.txt")
        os.utime(corpus / "3.txt", (1e9, 1e9))  # as `cp -p` and `rsync -a` do
    assert text_facts(str(corpus), cache_dir=cache)["prepared"] is False
    prepare(str(corpus), tokenizer=None, vocab_size=300, cache_dir=cache)
    assert text_facts(str(corpus), cache_dir=cache)["prepared"] is True


def test_whether_text_on_a_dead_disk_is_prepared_is_unknown(corpus, tmp_path, monkeypatch):
    is_over = threading.Event()
    monkeypatch.setattr("paceline.check.probes.storage_probe.list_files", lambda *_, **__: is_over.wait() and [])
    monkeypatch.setattr("paceline.check.probes.storage_probe.LISTING_S", 0.1)
    assert text_facts(str(corpus), cache_dir=tmp_path)["prepared"] is None
    is_over.set()


def test_the_probe_of_the_text_imports_what_is_light_alone():
    code = "import sys, paceline.check.probes.storage_probe; print({'torch', 'numpy', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_text_is_prepared_only_as_it_is_under_the_field_that_is_named(tmp_path):
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_text("".join(f'{{"title": "{n}", "body": "row {n} has text"}}\n' for n in range(40)))
    prepare(str(path), text_field="body", tokenizer=None, vocab_size=300, cache_dir=cache)
    for name, is_prepared in (("body", True), ("title", False), (None, False)):
        assert text_facts(str(path), text_field=name, cache_dir=cache)["prepared"] is is_prepared


def test_a_damaged_folder_is_not_prepared(corpus, tmp_path):
    dataset = prepare(str(corpus), tokenizer=None, vocab_size=300, cache_dir=tmp_path / "cache")
    (dataset.path / "train_00000.bin").write_bytes(b"short")
    assert text_facts(str(corpus), cache_dir=tmp_path / "cache")["prepared"] is False


def test_a_tokenizer_has_the_vocabulary_that_the_data_layer_counts(corpus, tmp_path):
    dataset = prepare(str(corpus), tokenizer=None, vocab_size=300, cache_dir=tmp_path / "cache")
    text = text_facts(str(corpus), tokenizer=dataset.tokenizer_json, cache_dir=tmp_path / "cache")
    vocab_size = Tokenizer.load(dataset.tokenizer_json).vocab_size
    assert text["tokenizer"] == {
        "path": str(dataset.tokenizer_json), "exists": True, "vocab_size": vocab_size, "error": None,
    }  # fmt: skip
    # the same tokenizer, but the run would prepare the text for a tokenizer from a file
    assert (text["vocab_size"], text["prepared"]) == (vocab_size, False)
    prepare(str(corpus), tokenizer=dataset.tokenizer_json, vocab_size=1, cache_dir=tmp_path / "cache")
    assert text_facts(str(corpus), tokenizer=dataset.tokenizer_json, cache_dir=tmp_path / "cache")["prepared"] is True


@pytest.mark.parametrize(
    ("content", "error"),
    [("not json", "not JSON"), ("{}", "not a tokenizer.json"), ("[1]", "not a tokenizer.json"), (None, None)],
)
def test_a_file_that_is_not_a_tokenizer_is_reported(tmp_path, content, error):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    facts = text_facts("builtin", tokenizer=tmp_path / "tokenizer.json")["tokenizer"]
    assert (facts["exists"], facts["vocab_size"], facts["error"]) == (content is not None, None, error)
    folder = text_facts("builtin", tokenizer=tmp_path)["tokenizer"]
    assert (folder["exists"], folder["error"]) == (True, "it is a folder, not the file in it")


@pytest.mark.parametrize(
    ("vocab", "added", "error"),
    [
        ({"a": 0, "b": 1}, [], "it has no token to put between documents"),
        ({"a": 0, "<s>": 1}, [], None),
        ([["a", -1.0], ["</s>", -2.0]], [], None),
        ({"a": 0}, [{"id": 1, "content": "<|endoftext|>"}], None),
    ],
)
def test_a_tokenizer_without_a_separator_is_reported(tmp_path, vocab, added, error):
    (tmp_path / "t.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    assert text_facts("builtin", tokenizer=tmp_path / "t.json")["tokenizer"]["error"] == error


def test_a_unigram_vocabulary_is_a_list():
    content = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"id": 7}]}
    assert tokenizer_vocab_size(json.loads(json.dumps(content))) == 8
    others = ("abc", {"a": 0.5, "b": 1e12}, {}, 7)
    assert [tokenizer_vocab_size({"model": {"vocab": vocab}}) for vocab in others] == [None] * len(others)
