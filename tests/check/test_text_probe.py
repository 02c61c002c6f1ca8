import argparse
import inspect
import json
import os
import shutil
import typing
from pathlib import Path

import pytest

from paceline.check.text_probe import measure_folder, probe_text, tokenizer_vocab_size
from paceline.data.corpus import FORMATS, list_files
from paceline.data.shards import prepare
from paceline.data.tokenizer import Tokenizer


def ask(
    data: str | None = None, *, tokenizer: Path | None = None, cache_dir: Path | None = None, vocab_size: int = 300
):
    request = {"data": data, "tokenizer": tokenizer and str(tokenizer), "vocab_size": vocab_size}
    return probe_text(request | {"cache_dir": cache_dir and str(cache_dir)})["text"]


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, module in enumerate((argparse, inspect, typing)):
        shutil.copyfile(module.__file__, folder / f"{number}.txt")
    return folder


def test_no_text_asked_for_is_no_text():
    assert probe_text({"data": None, "tokenizer": None}) == {"text": None}


def test_the_builtin_text_has_the_size_that_the_data_layer_counts():
    text = ask("builtin")
    assert (text["exists"], text["bytes"]) == (True, sum(file.num_bytes for file in list_files("builtin")))


def test_a_folder_has_the_size_that_the_data_layer_counts(corpus):
    (corpus / "picture.png").write_bytes(b"1234")
    (corpus / ".hidden.txt").write_text("x")
    text = ask(str(corpus))
    assert (text["exists"], text["bytes"], text["error"]) == (
        True,
        sum(file.num_bytes for file in list_files(str(corpus))),
        None,
    )


def test_the_file_types_are_those_of_the_data_layer(tmp_path):
    for kind in FORMATS:
        (tmp_path / f"a{kind}").write_text("x")
    assert ask(str(tmp_path))["bytes"] == len(FORMATS)


@pytest.mark.parametrize(
    ("name", "exists", "error"),
    [
        ("missing", False, None),
        ("empty", True, "no text in it: no file of .txt .md .py .txt.gz .jsonl .jsonl.gz .parquet"),
        ("broken", False, "a link to /nowhere, which leads nowhere"),
        ("pipe", True, "not a regular file"),
    ],
)
def test_text_that_cannot_be_read_says_why(tmp_path, name, exists, error):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").symlink_to("/nowhere")
    os.mkfifo(tmp_path / "pipe")
    text = ask(str(tmp_path / name))
    assert (text["exists"], text["error"]) == (exists, error)


def test_a_dataset_of_the_hub_is_unknown_until_it_was_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    assert ask("hf:owner/name")["exists"] is None
    (tmp_path / "hub/datasets--owner--name/snapshots/abc").mkdir(parents=True)
    assert ask("hf:owner/name")["exists"] is True


def test_a_folder_too_large_to_count_has_no_size(corpus, monkeypatch):
    monkeypatch.setattr("paceline.check.text_probe.LOOK_S", -1.0)
    assert measure_folder(corpus, types=(".txt",), skip=set()) == ({"exists": True}, None)


def test_text_is_prepared_once_it_was_and_until_it_changes(corpus, tmp_path):
    cache = tmp_path / "cache"
    assert ask(str(corpus), cache_dir=cache)["prepared"] is False
    prepare(str(corpus), tokenizer=None, vocab_size=300, cache_dir=cache)
    assert ask(str(corpus), cache_dir=cache)["prepared"] is True
    assert ask(str(corpus), cache_dir=cache, vocab_size=290)["prepared"] is False
    assert ask(str(corpus), cache_dir=cache, vocab_size=400)["prepared"] is None  # the text may have had no more in it
    os.utime(corpus / "0.txt", (4e9, 4e9))
    assert ask(str(corpus), cache_dir=cache)["prepared"] is False


def test_a_damaged_folder_is_not_prepared(corpus, tmp_path):
    dataset = prepare(str(corpus), tokenizer=None, vocab_size=300, cache_dir=tmp_path / "cache")
    (dataset.path / "train_00000.bin").write_bytes(b"short")
    assert ask(str(corpus), cache_dir=tmp_path / "cache")["prepared"] is False


def test_a_tokenizer_has_the_vocabulary_that_the_data_layer_counts(corpus, tmp_path):
    dataset = prepare(str(corpus), tokenizer=None, vocab_size=300, cache_dir=tmp_path / "cache")
    text = ask(str(corpus), tokenizer=dataset.tokenizer_json, cache_dir=tmp_path / "cache")
    vocab_size = Tokenizer.load(dataset.tokenizer_json).vocab_size
    assert text["tokenizer"] == {
        "path": str(dataset.tokenizer_json), "exists": True, "vocab_size": vocab_size, "error": None,
    }  # fmt: skip
    assert (text["vocab_size"], text["prepared"]) == (vocab_size, True)


@pytest.mark.parametrize(
    ("content", "error"),
    [("not json", "not JSON"), ("{}", "not a tokenizer.json"), ("[1]", "not a tokenizer.json"), (None, None)],
)
def test_what_is_no_tokenizer_says_so(tmp_path, content, error):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    facts = ask("builtin", tokenizer=tmp_path / "tokenizer.json")["tokenizer"]
    assert (facts["exists"], facts["vocab_size"], facts["error"]) == (content is not None, None, error)


def test_a_unigram_vocabulary_is_a_list():
    content = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"id": 7}]}
    assert tokenizer_vocab_size(json.loads(json.dumps(content))) == 8
