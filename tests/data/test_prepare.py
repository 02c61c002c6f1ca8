"""Preparing text, using it again, and noticing when it is damaged or out of date."""

import io
import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from paceline.config import Config
from paceline.data import prepare as prepare_module
from paceline.data.corpus import list_files
from paceline.data.prepare import data_info, known_sizes, open_dataset, prepare, prepared_meta, print_texts_note, verify
from paceline.data.tokenizer import Tokenizer, train_tokenizer_on
from paceline.errors import PacelineError


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "tëxt"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(
            f"Document {number}: naïve café, {number * number}.\n" * (1 + number % 5)
        )
    return folder


def prepared(source, tmp_path, **kwargs):
    settings = {"tokenizer": None, "vocab_size": 300, "cache_dir": tmp_path / "cache"} | kwargs
    return prepare(str(source), **settings)


def documents_of(dataset, name):
    """The texts of one split, decoded from its tokens."""
    tokenizer = Tokenizer.load(dataset.tokenizer_json)
    split = dataset.split(name, "stream")
    tokens = split.tokens(0, split.num_tokens)
    documents = np.split(tokens, np.load(dataset.path / f"{name}.docs.npy")[1:])
    assert all(document[0] == tokenizer.bos_id for document in documents)
    return [tokenizer.decode(document[1:].tolist()) for document in documents]


def test_the_shards_hold_every_document_once_in_order_each_after_bos(source, tmp_path):
    dataset = prepared(source, tmp_path)
    train, val = documents_of(dataset, "train"), documents_of(dataset, "val")
    texts = [path.read_text() for path in sorted(source.iterdir())]
    assert train == [text for text in texts if text not in val]
    assert val == [text for text in texts if text in val]
    assert 0 < len(val) < 20


def test_rows_without_text_are_left_out_with_a_note(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    rows = [f'{{"text": "row {n} has text"}}\n{{"text": null}}\n{{"text": ""}}\n' for n in range(40)]
    path.write_text("".join(rows))
    dataset = prepared(path, tmp_path)
    assert len(documents_of(dataset, "train")) + len(documents_of(dataset, "val")) == 40
    assert capsys.readouterr().err == f"note    {path}: left out 80 rows whose text is null or empty\n"
    assert dataset.meta["empty_rows"] == 80


def test_the_field_of_the_text_is_reported_at_each_start_and_recorded(tmp_path, monkeypatch, capsys):
    from paceline.cli import run_command

    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(f'{{"id": {n}, "content": "row {n} has text"}}\n' for n in range(40)))
    note = "note    a.jsonl: the text is taken from the field 'content'\n"
    for command in (["data", "prepare"], ["data", "info"], ["tokenizer", "train", "--out", "t.json"]):
        flags = [] if command[0] == "tokenizer" else ["--cache-dir", "cache"]
        assert run_command([*command, "--data", "a.jsonl", "--vocab-size", "260", *flags]) == 0
        assert note in capsys.readouterr().err
    assert prepared("a.jsonl", tmp_path, vocab_size=260).meta["text_fields"] == ["content"]


def test_a_text_under_a_field_that_is_named_is_prepared_and_found_again(tmp_path, monkeypatch, capsys):
    from paceline.cli import run_command

    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(f'{{"title": "{n}", "body": "row {n} has text"}}\n' for n in range(40)))
    flags = {
        "prepare": ["--cache-dir", "cache"],
        "info": ["--cache-dir", "cache", "--verify"],
        "train": ["--out", "t.json"],
    }
    for command in (["data", "prepare"], ["data", "info"], ["tokenizer", "train"]):
        words = [*command, "--data", "a.jsonl", "--vocab-size", "300", *flags[command[1]]]
        assert run_command(words) == 1
        assert "fix: --text-field body, or jq " in capsys.readouterr().err
        assert run_command([*words, "--text-field", "body"]) == 0
        out, err = capsys.readouterr()
        assert "is taken from the field" not in err and ("--text-field=body" in out) == (command[1] != "info")
    config = Config(data="a.jsonl", text_field="body", vocab_size=300, cache_dir="cache")
    assert prepared_meta(config)["text_fields"] == ["body"]
    assert known_sizes(replace(config, sequence_len=16))[0] > 0
    assert prepared_meta(replace(config, text_field="title")) is None


def test_a_text_that_is_not_prepared_has_an_estimate_of_its_rows_for_the_reader(source, tmp_path):
    config = Config(data=str(source), vocab_size=32_768, cache_dir=str(tmp_path / "cache"), sequence_len=16)
    num_bytes = sum(path.stat().st_size for path in source.iterdir())
    by_bytes = -(-(num_bytes // 4 - 1) // 16)
    assert known_sizes(config) == (0, 32_768, by_bytes)
    (source / "packed.txt.gz").write_bytes(bytes(1600))
    assert known_sizes(config).about_rows == -(-((num_bytes + 4800) // 4 - 1) // 16)
    (source / "packed.txt.gz").unlink()
    assert known_sizes(replace(config, data="hf:someone/books")) == (0, 32_768, 0)
    assert known_sizes(Config(cache_dir=config.cache_dir)) == (0, 32_768, 0)
    assert known_sizes(Config(cache_dir=config.cache_dir), set_keys={"data"}).about_rows > 100


def test_a_text_for_validation_is_measured_on_and_no_document_of_the_source_is_held_out(source, tmp_path, capsys):
    other = tmp_path / "valid.txt"
    other.write_text("another text\n" * 9)
    dataset = prepared(source, tmp_path, val_source=str(other))
    train = [path.read_text() for path in sorted(source.iterdir())]
    assert (documents_of(dataset, "train"), documents_of(dataset, "val")) == (train, [other.read_text()])
    assert capsys.readouterr().err == ""
    assert prepared(source, tmp_path, val_source=str(other)).reused
    without = prepared(source, tmp_path)
    assert not without.reused
    print_texts_note([dataset, dataset])
    assert capsys.readouterr().err == ""
    print_texts_note([dataset, without])
    assert capsys.readouterr().err.endswith("--data SOURCE measures all of them on one text\n")
    other.write_text("another text again\n" * 9)
    assert not prepared(source, tmp_path, val_source=str(other)).reused


def test_the_tokenizer_learns_nothing_from_a_text_for_validation(source, tmp_path):
    other = tmp_path / "valid.txt"
    other.write_text("zqzqzqzq " * 999)
    words = Inner.from_file(str(prepared(source, tmp_path, val_source=str(other)).tokenizer_json)).get_vocab()
    assert not [word for word in words if "zq" in word]


def test_files_of_the_source_that_are_for_validation_are_not_trained_on(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(source)
    Path("../link.txt").symlink_to(source / "07.txt")
    for val_source in ("07.txt", "../tëxt/07.txt", "../link.txt"):
        dataset = prepared(source, tmp_path, val_source=val_source)
        assert documents_of(dataset, "val") == [Path("07.txt").read_text()]
        assert len(documents_of(dataset, "train")) == 59
        assert (
            capsys.readouterr().err == f"note    {source}: 1 file of --val-data {val_source} will not be trained on\n"
        )
    for whole in (str(source), ".."):
        with pytest.raises(PacelineError, match="no text is left to train on") as error:
            prepared(source, tmp_path, val_source=whole)
        assert "leave --val-data out" in error.value.fix


def test_documents_that_are_on_both_sides_are_counted(source, tmp_path, capsys):
    copy = tmp_path / "valid.txt"
    shutil.copyfile(source / "07.txt", copy)
    (source / "again.txt").write_bytes(copy.read_bytes())
    prepared(source, tmp_path, val_source=str(copy))
    what = "val_bpb comes out too low, as --val-data has 2 documents of it too"
    assert capsys.readouterr().err == f"note    {source}: {what}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "val_data: no such file or folder"), ("", "val_data: .* is empty"), (" \n", "no text to validate on in")],
)
def test_a_text_for_validation_that_holds_none_is_refused(source, tmp_path, content, message):
    other = tmp_path / "valid.txt"
    if content is not None:
        other.write_text(content)
    with pytest.raises(PacelineError, match=message) as error:
        prepared(source, tmp_path, val_source=str(other))
    assert error.value.fix


def test_only_of_files_that_have_fields_the_fingerprint_has_the_field(source, tmp_path):
    before = prepared(source, tmp_path)
    assert prepared(source, tmp_path, text_field="body").path == before.path
    (source / "a.ndjson").write_text('{"title": "one", "body": "two"}\n')
    texts = {}
    for name in ("title", "body"):
        dataset = prepared(source, tmp_path, text_field=name)
        texts[dataset.path] = {*documents_of(dataset, "train"), *documents_of(dataset, "val")}
    (title, of_title), (body, of_body) = texts.items()
    assert (of_title - of_body, of_body - of_title) == ({"one"}, {"two"})
    assert len({before.path, title, body}) == 3


def test_the_split_at_marks_is_reported_and_so_are_a_good_hash_and_the_name_that_was_given(
    tmp_path, monkeypatch, capsys
):
    from paceline.cli import run_command

    monkeypatch.chdir(tmp_path)
    Path("text").mkdir()
    Path("text/a.txt").write_text("<|endoftext|>".join(f"tale {number} has an end" for number in range(40)))
    flags = ["--vocab-size", "260", "--cache-dir", "cache"]
    assert run_command(["data", "prepare", "--data", "text", *flags]) == 0
    shown = capsys.readouterr()
    assert "note    text: 1 .txt file split into documents at each <|endoftext|>; .md keeps it\n" in shown.err
    assert shown.out.startswith("text    text: 1 file, 40 documents, ")
    assert run_command(["data", "prepare", "--data", "text/a.txt", *flags]) == 0
    assert capsys.readouterr().out.startswith("text    text/a.txt: 1 file, ")
    assert run_command(["data", "info", "--data", "text", "--packing", "best-fit", *flags]) == 0
    assert not list(Path("cache").rglob("*best_fit*"))
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == ["text", "tokens", "size", "shards", "share", "ids", "made"]
    assert lines["text"].startswith("text: 1 file, 40 documents, ") and lines["ids"].startswith("uint16, of tokenizer ")
    assert re.fullmatch(r"\d documents? held out, [\d.]+ % of the text", lines["share"])
    assert run_command(["data", "info", "--verify", "--json", "--data", "text", *flags]) == 0
    assert "verify  5 files: every hash agrees\n" in capsys.readouterr().err


def test_the_shards_are_the_same_bytes_for_any_number_of_workers(source, tmp_path):
    hashes = [
        prepared(source, tmp_path, cache_dir=tmp_path / f"cache{n}", num_workers=n).meta["files"] for n in (1, 2, 5)
    ]
    assert hashes[0] == hashes[1] == hashes[2]


def test_many_small_shards_hold_the_same_tokens_as_one(source, tmp_path, monkeypatch):
    one = prepared(source, tmp_path)
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 100)
    many = prepared(source, tmp_path)
    assert len(many.meta["splits"]["train"]["shards"]) > 10
    assert documents_of(many, "train") == documents_of(one, "train")
    assert all(facts["bytes"] <= 200 for name, facts in many.meta["files"].items() if name.endswith(".bin"))
    rows = np.arange(one.split("train", "stream").num_rows(64))
    for ours, theirs in zip(
        one.split("train", "stream").rows(rows, 64), many.split("train", "stream").rows(rows, 64), strict=True
    ):
        assert (ours == theirs).all()


def test_prepared_text_is_reused_and_marked_so(source, tmp_path):
    first, second = prepared(source, tmp_path), prepared(source, tmp_path)
    assert (first.reused, second.reused) == (False, True)
    assert (first.path, first.meta) == (second.path, second.meta)


def test_another_setting_prepares_again(source, tmp_path, monkeypatch):
    paths = {prepared(source, tmp_path).path, prepared(source, tmp_path, vocab_size=310).path}
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 64)
    assert len({*paths, prepared(source, tmp_path).path}) == 3


@pytest.mark.parametrize("change", ["edit", "touch", "add", "remove", "rename"])
def test_a_source_that_changed_is_prepared_again(source, tmp_path, change):
    before = prepared(source, tmp_path)
    file = source / "07.txt"
    if change == "edit":
        file.write_text(file.read_text().replace("7", "8"))
    elif change == "touch":
        os.utime(file, ns=(0, 1))
    elif change == "add":
        (source / "new.md").write_text("new")
    elif change == "remove":
        file.unlink()
    else:
        file.rename(source / "seven.txt")
    after = prepared(source, tmp_path)
    assert not after.reused and after.path != before.path


def test_looking_whether_files_are_prepared_opens_none_of_them(source, tmp_path, monkeypatch):
    first = prepared(source, tmp_path)
    opened, original = [], io.open
    monkeypatch.setattr(
        io, "open", lambda path, *args, **options: opened.append(path) or original(path, *args, **options)
    )
    assert prepared(source, tmp_path).path == first.path
    assert {Path(path).parent for path in opened} == {first.path}


def test_a_custom_tokenizer_is_used_and_saved_with_the_tokens(source, tmp_path):
    train_tokenizer_on(list_files(str(source)), vocab_size=290).save(tmp_path / "mine.json")
    dataset = prepared(source, tmp_path, tokenizer=tmp_path / "mine.json")
    assert dataset.meta["vocab_size"] == 290
    assert dataset.tokenizer_json.read_bytes() == (tmp_path / "mine.json").read_bytes()
    assert prepared(source, tmp_path, tokenizer=tmp_path / "mine.json", vocab_size=9999).reused
    train_tokenizer_on(list_files(str(source)), vocab_size=280).save(tmp_path / "mine.json")
    assert not prepared(source, tmp_path, tokenizer=tmp_path / "mine.json").reused


def test_a_tokenizer_that_does_not_give_the_text_back_is_noted_at_each_start(source, tmp_path, monkeypatch, capsys):
    from paceline.cli import run_command

    monkeypatch.chdir(tmp_path)
    inner = Inner(models.WordLevel({"<unk>": 0, "<s>": 1, "Document": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save("words.json")
    for _ in range(2):
        assert (
            run_command(["data", "prepare", "--data", "tëxt", "--cache-dir", "cache", "--tokenizer", "words.json"]) == 0
        )
        assert "note    words.json loses text: decoding its tokens, " in capsys.readouterr().err
    assert prepared(source, tmp_path).meta["lossless"] is True


def test_the_tokenizer_trained_here_is_the_one_that_tokenizer_train_makes(source, tmp_path):
    assert (
        prepared(source, tmp_path).meta["tokenizer_hash"]
        == train_tokenizer_on(list_files(str(source)), vocab_size=300).hash
    )


def test_a_vocabulary_over_65536_is_stored_in_uint32(source, tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<s>", *alphabet, *(f"~{n}" for n in range(66_000))])}
    vocab["a"], vocab["~65999"] = vocab["~65999"], vocab["a"]
    inner = Inner(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.save(str(tmp_path / "large.json"))
    dataset = prepared(source, tmp_path, tokenizer=tmp_path / "large.json")
    assert dataset.meta["dtype"] == "uint32"
    assert dataset.split("train", "stream").tokens(0, 10_000).max() == 66_256
    assert documents_of(dataset, "train")[0] == (source / "00.txt").read_text()


def test_progress_goes_from_label_to_label_and_ends_at_the_total(source, tmp_path):
    seen = []
    prepared(source, tmp_path, progress=lambda *call: seen.append(call))
    labels = [label for label, _, _ in seen]
    assert list(dict.fromkeys(labels)) == ["train tokenizer", "merge pairs of tokens", "tokenize"]
    total = sum(path.stat().st_size for path in source.iterdir())
    assert seen[-1] == ("tokenize", total, total)


def test_info_adds_up(source, tmp_path):
    facts = data_info(prepared(source, tmp_path))
    assert facts["num_bytes"] == sum(path.stat().st_size for path in source.iterdir())
    assert facts["num_documents"] == 60
    assert facts["bytes_per_token"] == facts["num_bytes"] / facts["num_tokens"]
    assert facts["held_out_share"] == facts["splits"]["val"]["num_bytes"] / facts["num_bytes"]
    assert (facts["num_files"], facts["dtype"], facts["source"]) == (60, "uint16", str(source))
    assert json.loads(json.dumps(facts)) == facts


def test_a_flipped_byte_is_detected_and_its_file_named(source, tmp_path):
    dataset = prepared(source, tmp_path)
    verify(dataset)
    for name in dataset.meta["files"]:
        path = dataset.path / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(PacelineError) as error:
            verify(open_dataset(dataset.path))
        assert error.value.message.startswith(f"{path} is damaged: its SHA-256 is ")
        assert error.value.fix.endswith(f"rm -r {shlex.quote(str(dataset.path))}")
        path.write_bytes(whole)


def test_of_chosen_files_only_those_are_read(source, tmp_path):
    dataset = prepared(source, tmp_path)
    path = dataset.path / "train_00000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    verify(dataset, files=["val_00000.bin"])
    with pytest.raises(PacelineError, match="train_00000.bin is damaged"):
        verify(dataset, files=["train_00000.bin"])


def test_a_file_that_is_cut_short_or_gone_is_named_at_once(source, tmp_path):
    dataset = prepared(source, tmp_path)
    shard = dataset.path / "train_00000.bin"
    size = shard.stat().st_size
    os.truncate(shard, 10)
    with pytest.raises(PacelineError) as error:
        prepared(source, tmp_path)
    assert error.value.message == f"{shard} is damaged: 10 bytes long instead of {size:,}"
    shard.unlink()
    with pytest.raises(PacelineError, match=r"train_00000\.bin is missing"):
        open_dataset(dataset.path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"format_version": 1, "files": 3}', b"\xff"])
def test_a_damaged_meta_is_named(source, tmp_path, content):
    dataset = prepared(source, tmp_path)
    (dataset.path / "meta.json").write_bytes(content)
    with pytest.raises(PacelineError, match=r"meta\.json is damaged"):
        open_dataset(dataset.path)


def test_another_format_and_a_folder_that_is_no_dataset_are_named(source, tmp_path):
    dataset = prepared(source, tmp_path)
    (dataset.path / "meta.json").write_text(json.dumps(dataset.meta | {"format_version": 99}))
    with pytest.raises(PacelineError, match="was prepared in format 99"):
        open_dataset(dataset.path)
    with pytest.raises(PacelineError, match="is not prepared text"):
        open_dataset(source)


def test_a_folder_without_meta_is_prepared_again(source, tmp_path):
    dataset = prepared(source, tmp_path)
    (dataset.path / "meta.json").unlink()
    assert not prepared(source, tmp_path).reused
    verify(open_dataset(dataset.path))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_two_users_share_a_cache_that_both_may_write_to(source, tmp_path):
    data = prepared(source, tmp_path).path.parent
    mine = next(data.glob(".*.lock"))
    shutil.rmtree(data / mine.stem.removeprefix("."))  # the lock stays, and only its owner may write to it
    (data / ".0123456789abcdef.making").mkdir()  # the owner prepares another text, with umask 077
    (data / ".0123456789abcdef.lock").touch(0o600)
    for folder in (data, *[parent for parent in data.parents if "pytest-of" in str(parent)]):
        folder.chmod(0o777)
    os.seteuid(65534)
    try:
        assert not prepared(source, tmp_path, num_workers=1).reused
    finally:
        os.seteuid(0)
    assert (data / ".0123456789abcdef.making").is_dir()


def test_a_broken_source_leaves_nothing_behind(source, tmp_path):
    (source / "59.txt").write_bytes(b"caf\xe9")
    with pytest.raises(PacelineError, match=r"59\.txt is not UTF-8"):
        prepared(source, tmp_path)
    assert [path.name for path in (tmp_path / "cache" / "data").iterdir() if not path.name.endswith(".lock")] == []


def test_a_source_that_changes_while_it_is_read_is_refused(source, tmp_path):
    def append(label, done, total):
        if label == "tokenize":
            with (source / "00.txt").open("a") as file:
                file.write("more")

    with pytest.raises(PacelineError, match="changed while they were read"):
        prepared(source, tmp_path, progress=append)
    assert not prepared(source, tmp_path).reused


def test_prepare_prints_what_a_user_wants_and_the_command_that_uses_it(source, tmp_path, monkeypatch, capsys):
    from paceline.cli import run_command

    monkeypatch.chdir(tmp_path)
    args = ["--data", "tëxt", "--cache-dir", "cache", "--vocab-size", "300"]
    for is_repeated in (False, True):
        assert run_command(["data", "prepare", *args]) == 0
        lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        assert list(lines) == ["text", "tokens", "rows", "size", "time", "shards", "next"]
        assert lines["text"].startswith("tëxt: 60 files, 60 documents, ")
        assert lines["tokens"].endswith(" held out; vocabulary 300") and "bytes per token" in lines["size"]
        assert (lines["time"] == "none: it was there already") == is_repeated
    assert prepare("tëxt", tokenizer=None, vocab_size=300, cache_dir=Path("cache")).path == Path(lines["shards"])
    assert lines["next"] == "paceline train '--data=tëxt' --vocab-size=300 --cache-dir=cache"


def test_tokenizer_train_prints_where_it_wrote(source, tmp_path, monkeypatch, capsys):
    from paceline.cli import run_command

    monkeypatch.chdir(tmp_path)
    assert run_command(["tokenizer", "train", "--data", "tëxt", "--vocab-size", "300", "--out", "t.json"]) == 0
    wrote, following = capsys.readouterr().out.splitlines()
    assert wrote == "wrote   t.json: vocabulary 300" and (tmp_path / "t.json").is_file()
    assert following == "next    paceline train '--data=tëxt' --tokenizer=t.json"
    words = ["--data", "tëxt", "--tokenizer", "t.json", "--cache-dir", "cache"]
    for flags in ([], ["--vocab-size", "300"], ["--vocab-size", "512"]):
        capsys.readouterr()
        assert run_command(["data", "prepare", *words, *flags]) == 0
        note = "note    --vocab-size 512 has no effect: t.json has a vocabulary of 300"
        assert (note in capsys.readouterr().err) == ("512" in flags)
    words = ["--data", "tëxt", "--vocab-size", "5000", "--out", "new/t.json", "--json"]
    assert run_command(["tokenizer", "train", *words]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert (facts["name"], facts["requested_vocab_size"]) == ("new/t.json", 5000)
    assert f"note    the text gives a vocabulary of {facts['vocab_size']:,}, not of 5,000\n" in err
    assert "note    made the folder new\n" in err
