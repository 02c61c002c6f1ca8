"""
A byte-level BPE tokenizer: trained here, or any tokenizer.json made elsewhere.

The library is Hugging Face `tokenizers`, imported where it is used. Batches are encoded by tiktoken, several times as fast,
where it is certain to give the same ids. The split pattern is GPT-4's, with digits in groups of at most two instead of three:
better at small vocabularies (the nanochat log measured 0.965 bpb against 0.972).
"""

import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import MIN_VOCAB_SIZE
from paceline.data.corpus import Progress, held_out_below, part_bytes_of, read_corpus
from paceline.data.readers import ReadNotes, SourceFile
from paceline.errors import PacelineError, expand_home
from paceline.terminal import write_output

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import tiktoken

TOKENIZER_FILE = "tokenizer.json"  # in a prepared folder
# shows how a tokenizer cuts
SAMPLE_TEXT = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n"
BOS = "<|bos|>"
# the token between documents, by its names in tokenizers made elsewhere; the first that exists is taken
SEPARATORS = (BOS, "<|endoftext|>", "<|begin_of_text|>", "<s>", "<bos>", "</s>", "<eos>", "<|end_of_text|>", "[CLS]")

SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)"  # English contractions
    r"|[^\r\n\p{L}\p{N}]?+\p{L}+"  # a word, with the one space or sign before it
    r"|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*"  # signs, with the line end after them
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
# a word of a hundred thousand letters (a gene, a file of zeros) takes the trainer a minute; cut, it teaches the same
LONG_RUN = re.compile(r"(\S{1000})|(\s{1000})\s+")
# a letter that came with Unicode 15, 15.1, 16 and 17 each: engines of another version do not cut words at them alike
NEW_LETTERS = "\U00031350\U0002ebf0\u1c89\U000323b0"
LONG_SPACE = 100_000  # tiktoken's regular expressions give up in a million spaces in a row, and it then panics
MAX_TRAINING_BYTES = 32 << 20  # more text hardly changes the merges and costs seconds


class Tokenizer:
    """Encodes text to token ids and back. Special tokens written out in a text are text, never special."""

    def __init__(self, json_bytes: bytes, *, name: str):
        from tokenizers import Tokenizer as Library

        self.json_bytes = json_bytes
        self.hash = hashlib.sha256(json_bytes).hexdigest()
        self.name = name  # of the file, for errors
        try:
            self.inner = Library.from_buffer(json_bytes)
        except Exception as error:  # the library raises bare Exception for all that is wrong with a file
            raise PacelineError(
                f"{name} is not a tokenizer.json of Hugging Face tokenizers: {str(error).splitlines()[0]}",
                fix="give a tokenizer.json (vocab.json and others are not one), or train one: paceline tokenizer train",
            ) from error
        self.inner.no_truncation()  # files made for inference may ask for either, which would cut or fill documents
        self.inner.no_padding()
        self.inner.encode_special_tokens = True
        self.vocab_size = 1 + max(self.inner.get_vocab(with_added_tokens=True).values(), default=-1)
        known = {token: token_id for token in SEPARATORS if (token_id := self.inner.token_to_id(token)) is not None}
        if not known:
            raise PacelineError(
                f"{name} has no token to put between documents; known ones: {' '.join(SEPARATORS)}",
                fix=f"add {BOS} to its added_tokens (special: true) with the next free id, or train a tokenizer here",
            )
        self.bos_token, self.bos_id = next(iter(known.items()))
        self._lock = threading.Lock()

    @staticmethod
    def load(path: Path) -> "Tokenizer":
        """Reads a tokenizer.json; raises PacelineError where that is not one."""
        return Tokenizer(read_tokenizer_file(path), name=str(path))

    def save(self, path: Path) -> None:
        """Writes the tokenizer.json as it was read, whole or not at all; raises PacelineError where it cannot be written."""
        try:
            if not path.parent.exists():
                path.parent.mkdir(parents=True)
                print(f"note    made the folder {path.parent}", file=sys.stderr)
        except OSError as error:
            fix = "--out FILE in a place you can write"
            raise PacelineError(f"{path} cannot be written: {error.strerror}", fix=fix) from error
        write_output(path, self.json_bytes.decode())
        self.name = str(path)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without a separator; raises PacelineError for text that is not UTF-8."""
        try:
            ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # the library raises this for half of a surrogate pair
            raise PacelineError(
                "the text holds bytes that are not UTF-8", fix="check the terminal's encoding (LANG), or the file's"
            ) from error
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text; it releases the interpreter, so several threads may call it."""
        with self._lock:  # one thread makes the encoding, for all
            encoding = self._tiktoken
        if encoding is None:
            return [one.ids for one in self.inner.encode_batch_fast(texts, add_special_tokens=False)]
        return [self.encode(text) if _has_long_space(text) else encoding.encode_ordinary(text) for text in texts]

    @cached_property
    def _tiktoken(self) -> "tiktoken.Encoding | None":
        """tiktoken's encoding where it is certain to give the library's ids, else None; takes 0.5 s for 32,768 tokens.

        The library merges the pair that is first in its list, tiktoken the pair whose bytes are the token of the lowest id. Inside
        the bytes of two neighbours, all merges so far were those of a text of these bytes alone. Where a token has these bytes
        and that text encodes to it, the merge of the two must come next there: it is in the list, for this token.
        """
        try:
            import tiktoken
        except ImportError:  # on a machine that has only what training needs
            print("note    tiktoken is not installed: text is encoded several times slower", file=sys.stderr)
            return None

        settings, ours = json.loads(self.inner.to_str()), json.loads(_untrained().to_str())
        vocab, merges, added = _pop_tokens(settings)
        _pop_tokens(ours)
        if settings != ours or not all(token["special"] for token in added) or not _cuts_alike(self.inner):
            return None
        products = ["".join(pair) for pair in merges]
        byte_of = _byte_alphabet()
        alphabet = list(byte_of)
        if {*alphabet, *products} != vocab.keys() - {token["content"] for token in added}:
            return None  # one of two tokens with one id may be missing, too
        ids = [vocab[token] for token in products]
        if ids != sorted(set(ids)):
            return None
        if any(len(self.inner.model.tokenize(token)) > 1 for token in products):
            return None
        ranks = {bytes(byte_of[letter] for letter in token): vocab[token] for token in (*alphabet, *products)}
        return tiktoken.Encoding(self.name, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids: special tokens give none, bytes that are not UTF-8 give U+FFFD."""
        text: str = self.inner.decode(ids, skip_special_tokens=True)
        return text

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Returns the text of each token; of one that is only a part of a character, its bytes, as <0xC3>."""
        texts = []
        for i in ids:
            text, token = self.decode([i]), self.inner.id_to_token(i) or ""
            is_part = text and not text.strip("\ufffd")
            texts.append(_byte_names(token) if is_part else text or token)  # a special token has a name alone
        return texts

    def token_bytes(self) -> "npt.NDArray[np.int64]":
        """Returns the UTF-8 length of each token, (vocab_size,) int64: 0 for special tokens and unused ids.

        It is exact for byte-level BPE, where a token may be part of a character. In others a word's mark counts as the space
        it stands for, so a text's sum may be off by the one at its start.
        """
        import numpy as np

        settings = json.loads(self.json_bytes)
        steps = [settings.get(key) or {} for key in ("pre_tokenizer", "decoder")]
        for step in list(steps):
            steps += [*step.get("pretokenizers", []), *step.get("decoders", [])]
        # each character of a token then stands for one byte (GPT-2's alphabet); added tokens are written as they are
        byte_level = any(step.get("type") == "ByteLevel" for step in steps)
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, token_id in self.inner.get_vocab(with_added_tokens=False).items():
            lengths[token_id] = len(token) if byte_level else _marked_bytes(token)
        for token_id, added in self.inner.get_added_tokens_decoder().items():
            lengths[token_id] = 0 if added.special else len(added.content.encode())
        lengths[self.bos_id] = 0
        return lengths


class DecodeStream:
    """Decodes tokens that come one by one: a character is returned when its last byte has come."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._before: list[int] = []  # returned, ending with a whole character; a token's text may depend on them
        self._waiting: list[int] = []  # after that
        self._num_returned = 0  # characters of the waiting tokens that are returned already

    def push(self, token_id: int) -> str:
        """Returns the text that became complete with this token, often none."""
        self._waiting.append(token_id)
        text = self._text()
        complete = text.rstrip("\ufffd")  # a last character that lacks bytes decodes to this
        new = complete[self._num_returned :]
        self._num_returned = max(self._num_returned, len(complete))
        if text and complete == text:
            self._before, self._waiting, self._num_returned = self._waiting, [], 0
        return new

    def end(self) -> str:
        """Returns the remaining text when no more tokens come."""
        return self._text()[self._num_returned :]

    def _text(self) -> str:
        decode = self._tokenizer.decode
        return decode(self._before + self._waiting)[len(decode(self._before)) :]


def train_tokenizer_on(
    files: list[SourceFile],
    *,
    vocab_size: int,
    below: int | None = None,
    progress: Progress | None = None,
    notes: ReadNotes | None = None,
) -> Tokenizer:
    """Trains a tokenizer on what is not held out, up to MAX_TRAINING_BYTES taken from all files alike.

    below: what held_out_below has returned for these files, where the caller has it. notes: as read_documents has it.
    """
    part_bytes = part_bytes_of(files)
    held_out = held_out_below(files, part_bytes=part_bytes) if below is None else below
    files = [file for file in files if not file.is_held_out]
    total = sum(file.num_bytes for file in files)

    def texts() -> Iterator[str]:
        next_report = 0.0
        for document, done in read_corpus(files, part_bytes=part_bytes, max_bytes=MAX_TRAINING_BYTES, notes=notes):
            if progress is not None and done >= next_report:
                progress("train tokenizer", done, total)
                next_report = done + total / 100
            if document.digest >= held_out:
                yield document.text
        if progress is not None:
            progress("merge pairs of tokens", 0, 0)  # takes longer than reading, and nothing shows how far it is

    return train_tokenizer(texts(), vocab_size=vocab_size)


def train_tokenizer(texts: Iterator[str], *, vocab_size: int) -> Tokenizer:
    """Trains byte-level BPE; the same texts give the same tokenizer, and a small text may give fewer tokens than vocab_size."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise PacelineError(
            f"vocab_size {vocab_size:,} is too small: 256 bytes and the token {BOS} are {MIN_VOCAB_SIZE}",
            fix=f"--vocab-size {MIN_VOCAB_SIZE} or more; 4096 suits a small corpus, 32768 a large one",
        )
    from tokenizers import pre_tokenizers, trainers

    inner = _untrained()
    # a list, read before training: the library's own thread does not see Ctrl-C
    documents = [LONG_RUN.sub(r"\1\n\2", text) for text in texts]
    trainer = trainers.BpeTrainer(
        # the library reserves memory for each token that is requested; a merge joins at least two bytes of the text
        vocab_size=min(vocab_size, MIN_VOCAB_SIZE + sum(len(text.encode()) for text in documents)),
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _wait_for(lambda: inner.train_from_iterator(documents, trainer))
    return Tokenizer(inner.to_str(pretty=True).encode(), name="the tokenizer trained here")


def _untrained() -> Any:
    """Returns the library's tokenizer before it is trained: all settings, no tokens."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    inner = Library(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    return inner


def _pop_tokens(settings: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Takes the tokens out of a tokenizer.json: vocabulary, merges and added tokens."""
    model = settings["model"]
    return model.pop("vocab"), model.pop("merges", None), settings.pop("added_tokens")


def _cuts_alike(library: Any) -> bool:
    """Returns whether tiktoken's regular expressions know the same letters as the library's; all older letters are alike."""
    import tiktoken

    # each byte behind an "a" joins it unless there is a cut
    ranks = {prefix + bytes([byte]): len(prefix) << 8 | byte for prefix in (b"", b"a") for byte in range(256)}
    words = tiktoken.Encoding("words", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
    return all(
        (len(words.encode_ordinary("a" + letter)) == len(letter.encode()))
        == (len(library.pre_tokenizer.pre_tokenize_str("a" + letter)) == 1)
        for letter in NEW_LETTERS
    )


def _has_long_space(text: str) -> bool:
    return any(text[start : start + LONG_SPACE].isspace() for start in range(0, len(text), LONG_SPACE))


def _wait_for(work: Callable[[], None]) -> None:
    """Does the work in a thread that a Ctrl-C leaves behind: the library does not see one while it merges, for minutes."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if errors:
        raise errors[0]


def tokenizer_info(tokenizer: Tokenizer, *, sample: str) -> dict[str, Any]:
    """Returns what `paceline tokenizer info` prints: sizes, special tokens, and the result on a sample text."""
    ids = tokenizer.encode(sample)
    sample_bytes = len(sample.encode())
    added = sorted(tokenizer.inner.get_added_tokens_decoder().items())
    special_tokens = {token.content: token_id for token_id, token in added if token.special}
    return {
        "name": tokenizer.name,
        "hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "bos_token": tokenizer.bos_token,
        "bos_id": tokenizer.bos_id,
        "special_tokens": special_tokens | {tokenizer.bos_token: tokenizer.bos_id},
        "sample_bytes": sample_bytes,
        "sample_tokens": len(ids),
        "bytes_per_token": sample_bytes / len(ids) if ids else None,
        "lossless": tokenizer.decode(ids) == sample,
    }


def read_tokenizer_file(path: Path, *, otherwise: str = "") -> bytes:
    """Returns the file's content without parsing it; raises PacelineError where it cannot be read. otherwise: another fix."""
    try:
        content = expand_home(path).read_bytes()
    except FileNotFoundError as error:
        raise PacelineError(
            f"no such tokenizer file: {path}", fix=f"check the path, or copy the file there from a backup{otherwise}"
        ) from error
    except IsADirectoryError as error:
        raise PacelineError(
            f"tokenizer {path} is a folder", fix=f"give the file in it: {path}/tokenizer.json"
        ) from error
    except OSError as error:
        raise PacelineError(
            f"cannot read tokenizer {path}: {error.strerror}", fix="check its permissions and the disk"
        ) from error
    if not content.strip():
        raise PacelineError(f"tokenizer {path} is empty", fix="copy or train it again: paceline tokenizer train")
    return content


def tokenizer_vocab_size(settings: Any) -> int | None:
    """Returns what Tokenizer.vocab_size is of a parsed tokenizer.json, without the library; None if it is not one."""
    try:
        vocab = settings["model"]["vocab"]
        # unigram models list their tokens
        ids = list(vocab.values() if isinstance(vocab, dict) else range(len(vocab) if isinstance(vocab, list) else 0))
        ids += [token["id"] for token in settings.get("added_tokens") or []]
        return max(ids) + 1 if all(isinstance(number, int) for number in ids) else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each letter of GPT-2's alphabet: printable ones their own, those from U+0100 on the others in order."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_of = {letter: ord(letter) for letter in alphabet if ord(letter) < 256}
    return byte_of | dict(zip(alphabet[len(byte_of) :], sorted(set(range(256)) - {*byte_of.values()}), strict=True))


def _byte_names(token: str) -> str:
    """Returns <0xC3> for each letter of a token that stands for a byte in GPT-2's alphabet."""
    names = {ord(letter): f"<0x{byte:02X}>" for letter, byte in _byte_alphabet().items()}
    return token if token.startswith("<0x") else token.translate(names)


def _marked_bytes(token: str) -> int:
    """Returns the bytes of a token written as text: SentencePiece marks a space, WordPiece the lack of one."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1  # a byte of its own
    return len(token.replace("▁", " ").removeprefix("##").encode())
