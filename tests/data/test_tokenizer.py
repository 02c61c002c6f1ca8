"""Tokenizers trained here and made elsewhere."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from paceline.cli import run_command
from paceline.data.corpus import held_out_below, list_files, read_corpus
from paceline.data.tokenizer import (
    LONG_RUN,
    DecodeStream,
    Tokenizer,
    tokenizer_info,
    train_tokenizer,
    train_tokenizer_on,
)
from paceline.errors import PacelineError

TEXT = "The quick brown fox jumps over the lazy dog in 2024.\n  def f(x):\n\treturn 'naïve café' # 日本語 😀\n"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter([TEXT] * 20), vocab_size=320)


def gpt2_like(path, *, separator="<|endoftext|>", special=True):
    """A byte-level tokenizer as others save it: GPT-2's split, another separator, truncation and padding asked for."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([TEXT] * 5, trainer)
    (inner.add_special_tokens if special else inner.add_tokens)([separator])
    inner.enable_truncation(max_length=4)
    inner.enable_padding(length=64)
    inner.save(str(path))
    return path


@pytest.mark.parametrize("text", [TEXT, "", " ", "\r\n\t\x00", "👩‍👩‍👧", "a" * 5000, "1234567890", "I'LL we've"])
def test_decoding_what_was_encoded_gives_the_same_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_vocabulary_has_the_requested_size_and_begins_documents_with_bos(tokenizer):
    assert tokenizer.vocab_size == 320
    assert tokenizer.bos_token == "<|bos|>"
    assert tokenizer_info(tokenizer, sample="")["special_tokens"] == {"<|bos|>": tokenizer.bos_id}


def test_digits_come_in_groups_of_at_most_two(tokenizer):
    trained = train_tokenizer(iter(["2024 2024 2024 "] * 50), vocab_size=300)
    assert max(len(trained.decode([token])) for token in trained.encode("20242024")) == 2


def test_a_separator_written_in_a_text_is_text(tokenizer, tmp_path):
    for one in (tokenizer, Tokenizer.load(gpt2_like(tmp_path / "t.json"))):
        ids = one.encode(f"a{one.bos_token}b")
        assert one.bos_id not in ids
        assert one.decode(ids) == f"a{one.bos_token}b"


def test_a_batch_gives_the_ids_of_each_text(tokenizer):
    texts = [TEXT, "", "x"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_token_bytes_add_up_to_the_length_of_any_text(tokenizer):
    lengths = tokenizer.token_bytes()
    assert lengths.shape == (320,) and lengths.dtype == np.int64
    assert lengths[tokenizer.bos_id] == 0
    assert (np.delete(lengths, tokenizer.bos_id) > 0).all()
    for text in (TEXT, "😀", "ÿ\x00\n", "ਪੰਜਾਬੀ"):
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_training_twice_gives_the_same_file_in_another_process_too(tokenizer):
    code = (
        "import sys; from paceline.data.tokenizer import train_tokenizer;"
        "print(train_tokenizer(iter([sys.stdin.buffer.read().decode()] * 20), vocab_size=320).hash)"
    )
    other = subprocess.run([sys.executable, "-c", code], input=TEXT.encode(), capture_output=True, check=True)
    assert other.stdout.decode().strip() == tokenizer.hash
    assert train_tokenizer(iter([TEXT] * 20), vocab_size=320).hash == tokenizer.hash


def test_a_saved_tokenizer_loads_as_the_same(tokenizer, tmp_path):
    path = tmp_path / "ünï" / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert (loaded.hash, loaded.encode(TEXT)) == (tokenizer.hash, tokenizer.encode(TEXT))


def test_a_tokenizer_that_finds_no_room_leaves_what_was_there(tokenizer, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "old.json").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    for name in ("new.json", "old.json"):
        with pytest.raises(PacelineError, match=f"{name} cannot be written: No space left on device"):
            tokenizer.save(tmp_path / name)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.json", "old")]


def test_a_tokenizer_is_written_into_a_pipe(tokenizer, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDWR)
    tokenizer.save(tmp_path / "pipe")
    assert os.read(end, 1 << 16) == tokenizer.json_bytes
    os.close(end)


def test_a_small_text_gives_fewer_tokens_than_requested():
    assert train_tokenizer(iter(["ab ab ab"]), vocab_size=5000).vocab_size == 259  # bytes, bos, `ab` and ` ab`


@pytest.mark.parametrize("run", ["a", " ", "\0", "GATTACA"])
def test_a_run_without_an_end_does_not_stall_the_training(run):
    """The trainer takes a minute for a word of 200,000 letters, so it gets none of more than 1001."""
    text = run * (200_000 // len(run))
    assert re.search(r"\S{1001}|\s{1002}", text)
    assert not re.search(r"\S{1001}|\s{1002}", LONG_RUN.sub(r"\1\n\2", text))
    tokenizer = train_tokenizer(iter([TEXT, text]), vocab_size=400)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ctrl_c_ends_the_training_while_the_library_is_busy(monkeypatch):
    done = threading.Event()

    class Busy(SimpleNamespace):
        def train_from_iterator(self, documents, trainer):
            with contextlib.suppress(KeyboardInterrupt):  # the library sees none
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                done.wait(60)

    monkeypatch.setattr(tokenizers, "Tokenizer", lambda model: Busy(model=model))
    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(iter(["a text"]), vocab_size=300)
    assert not done.is_set()
    done.set()


def test_an_error_of_the_library_while_it_is_trained_is_raised(monkeypatch):
    class Broken(SimpleNamespace):
        def train_from_iterator(self, documents, trainer):
            raise ValueError("the library's error")

    monkeypatch.setattr(tokenizers, "Tokenizer", lambda model: Broken(model=model))
    with pytest.raises(ValueError, match="the library's error"):
        train_tokenizer(iter(["a text"]), vocab_size=300)


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(PacelineError, match="vocab_size 256 is too small") as error:
        train_tokenizer(iter([TEXT]), vocab_size=256)
    assert error.value.fix.startswith("--vocab-size 257 or more")


def test_a_tokenizer_trained_on_a_source_does_not_see_what_is_held_out(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"unique{number}word " * 100)
    files = list_files(str(tmp_path))
    below = held_out_below(files, part_bytes=4096)
    documents = [document for document, _ in read_corpus(files, part_bytes=4096)]
    seen = [document.text for document in documents if document.digest >= below]
    assert 0 < len(seen) < 40
    assert train_tokenizer_on(files, vocab_size=700).hash == train_tokenizer(iter(seen), vocab_size=700).hash


@pytest.mark.parametrize("separator", ["<|endoftext|>", "<|begin_of_text|>", "<s>", "</s>", "<eos>"])
def test_tokenizers_made_elsewhere_separate_documents_by_their_own_token(tmp_path, separator):
    tokenizer = Tokenizer.load(gpt2_like(tmp_path / "tokenizer.json", separator=separator, special=False))
    assert tokenizer.bos_token == separator
    assert tokenizer.token_bytes()[tokenizer.bos_id] == 0


def test_truncation_and_padding_in_a_file_are_not_applied(tmp_path):
    tokenizer = Tokenizer.load(gpt2_like(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode("x")) == 1
    assert tokenizer.token_bytes()[tokenizer.encode(TEXT)].sum() == len(TEXT.encode())


def test_token_bytes_of_a_sentencepiece_like_vocabulary_count_the_space_mark_as_a_space(tmp_path):
    vocab = {"<unk>": 0, "<s>": 1, "<0xC3>": 2, "▁": 3, "é": 4, "▁é": 5, "a": 6}
    inner = Inner(models.BPE(vocab=vocab, merges=[("▁", "é")], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(["<unk>", "<s>"])
    inner.save(str(tmp_path / "t.json"))
    loaded = Tokenizer.load(tmp_path / "t.json")
    assert loaded.token_bytes().tolist() == [0, 0, 1, 1, 2, 3, 1]
    assert loaded.token_texts([0, 1, 2, 6]) == ["<unk>", "<s>", "<0xC3>", "a"]


def test_a_stream_returns_a_character_only_when_its_last_byte_has_come(tokenizer):
    stream = DecodeStream(tokenizer)
    ids = tokenizer.encode("aÿ€😀b")
    given = [stream.push(token) for token in ids]
    assert "".join(given) + stream.end() == "aÿ€😀b"
    assert all("\ufffd" not in text for text in given)
    assert "" in given


def test_a_stream_of_bytes_that_are_no_text_gives_what_decode_gives(tokenizer):
    rng = np.random.default_rng(0)
    for _ in range(200):
        ids = rng.integers(0, tokenizer.vocab_size, size=30).tolist()
        stream = DecodeStream(tokenizer)
        assert "".join(stream.push(token) for token in ids) + stream.end() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"\x80\x81 not json", "is not a tokenizer.json"),
        (b'{"vocab": {"a": 0}}', "is not a tokenizer.json"),
        (b"[]", "is not a tokenizer.json"),
        (b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}', "is not a tokenizer.json"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', "has no token to put between documents"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_named_with_what_to_do(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(PacelineError, match=message) as error:
        Tokenizer.load(tmp_path / "tokenizer.json")
    assert "tokenizer.json" in error.value.message
    assert error.value.fix


def test_a_missing_tokenizer_and_a_folder_are_named(tmp_path):
    with pytest.raises(PacelineError, match="no such tokenizer file"):
        Tokenizer.load(tmp_path / "none.json")
    with pytest.raises(PacelineError, match="is a folder") as error:
        Tokenizer.load(tmp_path)
    assert error.value.fix == f"give the file in it: {tmp_path}/tokenizer.json"


def test_a_prompt_that_is_not_text_is_refused(tokenizer):
    with pytest.raises(PacelineError, match="not UTF-8"):
        tokenizer.encode("caf\udce9")


def test_info_shows_size_separator_and_bytes_per_token_on_a_sample(tokenizer):
    facts = tokenizer_info(tokenizer, sample=TEXT)
    assert facts["vocab_size"] == 320
    assert facts["bytes_per_token"] == len(TEXT.encode()) / len(tokenizer.encode(TEXT))
    assert facts["lossless"] is True
    assert json.loads(json.dumps(facts)) == facts
    assert tokenizer_info(tokenizer, sample="")["bytes_per_token"] is None


def test_info_of_a_text_shows_its_tokens_as_text(tokenizer, tmp_path, capsys):
    tokenizer.save(tmp_path / "a.json")
    words = ["tokenizer", "info", str(tmp_path / "a.json"), "--text", "def a\n€"]
    assert run_command([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["tokens"]) == facts["sample_tokens"]
    assert "".join(facts["tokens"][:-3]) == "def a\n"
    assert facts["tokens"][-3:] == ["<0xE2>", "<0x82>", "<0xAC>"]
    assert run_command(words) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("tokens "))
    assert line.split(maxsplit=1)[1] == " ".join(map(repr, facts["tokens"]))
    assert run_command(words[:3]) == 0
    assert "tokens  " not in capsys.readouterr().out.replace("sample_tokens", "")


def test_a_vocabulary_far_larger_than_the_text_reserves_no_memory_for_it():
    small = train_tokenizer(iter([TEXT] * 20), vocab_size=2000)
    assert train_tokenizer(iter([TEXT] * 20), vocab_size=2**31 - 1).hash == small.hash
