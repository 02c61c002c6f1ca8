"""Batches that tiktoken encodes have the ids of the library; where that is not certain, the library encodes them."""

import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers

from paceline.data.tokenizer import BOS, LONG_SPACE, SPLIT_PATTERN, Tokenizer, _cuts_alike, _untrained, train_tokenizer

SOURCE = "".join(Path(module.__file__).read_text() for module in (json, random, pytest))
ODD = [
    "", " ", "  ", "\n", "\r\n\t\x00\x1c\x85\x7f", "a\u2028b\u3000c\u200b", "\ufeff\ufffd\uffff", "\U0010ffff\U000e0001\ue000",
    "👩‍👩‍👧 🇩🇪 e\u0301 ﬁ ſ 'ſ 'S 'LL 'Ve", "日本語のテキスト、中文没有空格。한국어", "ਪੰਜਾਬੀ العربية עברית ไทย",
    "1234567890 ١٢٣ Ⅷ ½ x²", f"a{BOS}b {BOS}", "a" * 5000, "GATTACA" * 3000, "=" * 5000, " " * 5000 + "x",
    "x" + "\n" * 5000, " \n" * 3000, "😀" * 2000,
]  # fmt: skip
CONTEXTS = ("a{0}b", " {0}", "{0}{0}", "1{0}2")
BLOCK = 512  # characters that are compared at once


def library_ids(tokenizer, texts):
    return [encoding.ids for encoding in tokenizer.inner.encode_batch_fast(texts, add_special_tokens=False)]


def with_merges(merges, *, change=None):
    """A tokenizer of all bytes and these merges, as training here writes it but for a change of its JSON."""
    inner = _untrained()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    inner.model = models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    inner.add_special_tokens([BOS])
    content = json.loads(inner.to_str())
    if change is not None:
        change(content)
    return Tokenizer(json.dumps(content).encode(), name="made")


@pytest.fixture(scope="module", params=[257, 258, 300, 700, 3000])
def trained(request):
    return train_tokenizer(iter([SOURCE, *ODD]), vocab_size=request.param)


def test_a_tokenizer_that_is_trained_here_has_the_same_ids_by_tiktoken(trained):
    texts = [*ODD, SOURCE, SOURCE.replace(" ", ""), SOURCE.swapcase(), SOURCE[::-1], "".join(ODD)]
    assert trained._tiktoken is not None
    assert trained.encode_batch(texts) == library_ids(trained, texts)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\r'aelrtvſ1=_\x1c\u3000😀語")),
        max_size=20,
    )
)
def test_any_text_has_the_same_ids(trained, texts):
    assert trained.encode_batch(texts) == library_ids(trained, texts)


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.soak)])
def test_both_engines_cut_at_every_character_alike(step):
    """What a text's cuts depend on is the class of each character; a token of two bytes shows whether there is a cut between."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    hidden = [byte for byte in range(256) if chr(byte) not in alphabet]
    letters = [chr(256 + hidden.index(byte)) if byte in hidden else chr(byte) for byte in range(256)]
    ascii_letters, within, first = letters[:128], letters[0x80:0xC0], letters[0xC2:0xF5]  # in UTF-8
    places = ((within, first), (ascii_letters, first), (within, ascii_letters), (ascii_letters, ascii_letters))
    tokenizer = with_merges([(left, right) for lefts, rights in places for left in lefts for right in rights])
    assert tokenizer._tiktoken is not None
    characters = [chr(point) for point in range(0, 0x110000, step) if not 0xD800 <= point < 0xE000]
    for start in range(0, len(characters), BLOCK):
        block = characters[start : start + BLOCK]
        text = "\n".join(context.format(character) for character in block for context in CONTEXTS)
        same = tokenizer.encode_batch([text]) == library_ids(tokenizer, [text])
        assert same, f"U+{ord(block[0]):04X} to U+{ord(block[-1]):04X}"


def test_engines_of_different_versions_of_unicode_keep_the_library(monkeypatch):
    inner = _untrained()
    assert _cuts_alike(inner)
    older = SPLIT_PATTERN.replace(r"\p{L}]", r"\p{L}\x{1C89}]").replace(r"\p{L}+", r"(?:(?!\x{1C89})\p{L})+")
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(older), "isolated")
    assert not _cuts_alike(inner)
    monkeypatch.setattr("paceline.data.tokenizer._cuts_alike", lambda library: False)
    assert with_merges([("a", "b")])._tiktoken is None


def unordered(content):
    vocab = content["model"]["vocab"]
    vocab["ab"], vocab["cd"] = vocab["cd"], vocab["ab"]


CHANGES = {
    "ids in another order than the merges": unordered,
    "a token without a merge": lambda content: content["model"]["vocab"].update(abcd=300),
    "whole words first": lambda content: content["model"].update(ignore_merges=True),
    "merges left out at random": lambda content: content["model"].update(dropout=0.5),
    "another normalizer": lambda content: content.update(normalizer={"type": "NFKC"}),
    "another pattern": lambda content: content["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": r"\w+"}),
    "a word of its own": lambda content: content["added_tokens"].append(
        content["added_tokens"][0] | {"id": 300, "content": "abc", "special": False}
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tokenizer_made_elsewhere_keeps_the_library(change):
    merges = [("a", "b"), ("c", "d")]
    assert with_merges(merges)._tiktoken is not None
    changed = with_merges(merges, change=change)
    assert changed._tiktoken is None
    if change is not CHANGES["merges left out at random"]:
        assert changed.encode_batch(["abcd ﬁ", BOS]) == library_ids(changed, ["abcd ﬁ", BOS])


def test_words_and_other_models_keep_the_library():
    def words(content):
        content["model"] = {"type": "WordLevel", "vocab": {"a": 0, BOS: 256}, "unk_token": "a"}

    assert with_merges([], change=words)._tiktoken is None


def test_a_token_that_does_not_encode_to_itself_keeps_the_library():
    """`ab` comes first, so no text gives `abc`; by its bytes alone tiktoken would."""
    tokenizer = with_merges([("a", "b"), ("b", "c"), ("a", "bc")])
    assert tokenizer._tiktoken is None
    assert tokenizer.encode_batch(["abc"]) == [tokenizer.encode("abc")]


def test_spaces_that_tiktoken_panics_at_are_encoded_by_the_library():
    tokenizer, text = with_merges([("Ġ", "Ġ")]), "a" + " " * (10 * LONG_SPACE) + "b"
    assert tokenizer._tiktoken is not None
    assert len(tokenizer.encode_batch(["x", text])[1]) == 5 * LONG_SPACE + 3


def test_without_tiktoken_the_library_encodes_and_a_line_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    tokenizer = with_merges([("a", "b")])
    assert tokenizer._tiktoken is None
    assert tokenizer.encode_batch(["ab", ""]) == library_ids(tokenizer, ["ab", ""])
    assert capsys.readouterr().err == "note    tiktoken is not installed: text is encoded several times slower\n"
