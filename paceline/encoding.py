"""
Which encoding a text is in that is not UTF-8, and the command that makes it UTF-8.

A text is decoded strictly under each encoding of Chinese, Japanese and Korean. Those tables have most characters in two parts,
frequent ones first, and in a text nearly all characters are of the first part only under its own encoding. There is no sure
answer for short texts, and none for the encodings of one byte.
"""

import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

from paceline.errors import FileFix, UnreadableFile

SAMPLE_BYTES = 64 << 10
MIN_SHARE = 0.8  # of the characters beyond ASCII that must be frequent ones
MIN_HANGUL = 6  # fewer are taken for Chinese: both have the same bytes
CONTROLS = {*range(9), *range(14, 32)} - {27}  # bytes that a text hardly has; 27 begins a colour of a terminal
MAX_CONTROLS = 0.01  # of the bytes of a text
ZEROS = bytes(64)  # in a row: no text in any encoding has them, a file that was not written to its end does
ZERO_BLOCK = re.compile(rb"\0{%d,}" % len(ZEROS))
HIGH_CONTROLS = {*range(0x80, 0xA0)}  # of ISO-8859-1: in a text these bytes are the quotes and dashes of Windows
MARKS = {b"\xff\xfe\0\0": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
TITLES = {  # by the name that Python and iconv have for it
    "gb18030": "GB18030 (GBK)",
    "cp950": "Big5",
    "cp932": "Shift-JIS",
    "cp949": "EUC-KR",
    "euc-jp": "EUC-JP",
    "utf-16": "UTF-16",
    "utf-16le": "UTF-16",
    "utf-16be": "UTF-16",
    "utf-32": "UTF-32",
}


def check_utf8(path: str, part: bytes, *, offset: int) -> None:
    """Raises UnreadableFile for a part of a file, at `offset`, that is not UTF-8, or has a block of zeros."""
    problem = zeros_in_text(path, part, offset=offset)
    try:
        part.decode()
    except UnicodeDecodeError as error:
        problem = problem or not_utf8(path, part, error, offset=offset)
    if problem := problem or (utf16_as_utf8(path, part) if offset == 0 else None):
        raise UnreadableFile(problem[0], fix=problem[1].for_file(path), file_fix=problem[1])


def not_utf8(path: str | Path, content: bytes, error: UnicodeDecodeError, *, offset: int = 0) -> tuple[str, FileFix]:
    """Returns what is wrong with a text file, and the command that makes it UTF-8, in its place.

    content: the part at `offset` of the file that does not decode.
    """
    message = f"{path} is not UTF-8: byte 0x{content[error.start]:02x} at offset {offset + error.start:,}"
    encoding = guess_encoding(content)
    if encoding is None and is_damaged_utf8(content):
        return f"{message}; a few bytes are damaged", conversion(path, "utf-8 -c", end=";")
    if encoding is None and is_binary(content):
        return f"{message}; it is not text", FileFix("", "move it out of the folder, or give another file")
    if encoding is None:
        likely = "ISO-8859-1" if HIGH_CONTROLS.isdisjoint(content) else "WINDOWS-1252"
        return message, conversion(path, likely, note=f", with the encoding it is in in place of {likely}")
    return f"{message}; it looks like {TITLES[encoding]}", conversion(path, encoding)


def zeros_in_text(path: str | Path, content: bytes, *, offset: int) -> tuple[str, FileFix] | None:
    """Returns what is wrong with a text that has a block of zeros, and the command that removes them; else None.

    content: the part at `offset` of the file. None also for UTF-16, which needs its other zeros: it is converted first.
    """
    if (at := content.find(ZEROS)) < 0:
        return None
    others = ZERO_BLOCK.sub(b"", content)
    if not others.strip(b"\0") and offset == 0:
        return f"{path} begins with {len(content):,} zeros: it was not written", FileFix("", "get the file again")
    if others.startswith(tuple(MARKS)) or others.count(0) > MAX_CONTROLS * len(others):
        return None
    read, pack = ("gzip -dc", " | gzip") if str(path).endswith(".gz") else ("cat", "")
    command = f"""{read} "$f" | tr -d '\\0'{pack} > "$f.utf8" && mv "$f.utf8" "$f\""""
    message = f"{path} has zeros in place of text at offset {offset + at:,}: it is damaged"
    guard = f"! {read} \"$f\" | grep -qaP '\\0{{{len(ZEROS)}}}'"
    return message, FileFix(command, ", or get the file again", guard)


def utf16_as_utf8(path: str | Path, content: bytes) -> tuple[str, FileFix] | None:
    """Returns what is wrong with a text of ASCII in UTF-16 without a mark, which is valid UTF-8 too, and the command; else None.

    content: the beginning of the file.
    """
    if (encoding := wide_encoding(content)) is None:
        return None
    message = f"{path} looks like {TITLES[encoding]}, not UTF-8: every second byte is zero"
    return message, conversion(path, encoding, is_wide=True)


def conversion(path: str | Path, encoding: str, *, is_wide: bool = False, end: str = " &&", note: str = "") -> FileFix:
    """Returns the command that makes a text UTF-8, and compressed where the file is. is_wide: it is known by its zeros."""
    read, file, pack = ('gzip -dc "$f" | ', "", " | gzip") if str(path).endswith(".gz") else ("", ' "$f"', "")
    guard = f"! {read}grep -qaP '\\0'{file}" if is_wide else f"{read}iconv -f utf-8 -t utf-8{file} > /dev/null 2>&1"
    command = f'{read}iconv -f {encoding} -t utf-8{file}{pack} > "$f.utf8"{end} mv "$f.utf8" "$f"'
    return FileFix(command, note, guard)


def wide_encoding(content: bytes) -> str | None:
    """Returns the encoding of Latin text with two bytes a character, which is valid UTF-8 with zeros; None for other content."""
    sample = content[:SAMPLE_BYTES]
    if 5 * sample.count(0) <= len(sample):
        return None
    return "utf-16be" if sample[::2].count(0) > sample[1::2].count(0) else "utf-16le"


def is_damaged_utf8(content: bytes) -> bool:
    """Returns whether most characters beyond ASCII are those of UTF-8."""
    foreign = [char for char in content.decode(errors="replace") if not char.isascii()]
    return len(foreign) > 5 * foreign.count("\ufffd")


def is_binary(content: bytes) -> bool:
    """Returns whether a part of a file has more control bytes than any text."""
    sample = content[:SAMPLE_BYTES]
    return sum(byte in CONTROLS for byte in sample) > MAX_CONTROLS * len(sample)


def guess_encoding(content: bytes) -> str | None:
    """Returns the encoding of a part of a text that begins and ends anywhere, by its name for iconv; None where none fits."""
    if mark := next((mark for mark in MARKS if content.startswith(mark)), None):
        return MARKS[mark]
    if wide := wide_encoding(content):
        return wide
    sample = content[:SAMPLE_BYTES]
    scores = {name: share_of_frequent(sample, name, is_frequent) for name, is_frequent in FREQUENT.items()}
    best = max(scores, key=lambda name: scores[name])  # of equal ones the first
    return best if scores[best] >= MIN_SHARE else None


def share_of_frequent(sample: bytes, name: str, is_frequent: Callable[[str, bytes], bool]) -> float:
    """Returns the share of frequent characters among those beyond ASCII; 0 where the sample is not of this encoding."""
    for cut in range(4):  # the sample may end inside a character
        try:
            text = sample[: len(sample) - cut].decode(name)
            break
        except UnicodeDecodeError as error:
            if error.start < len(sample) - 4:
                return 0.0
    else:
        return 0.0
    foreign = [char for char in text if not char.isascii()]
    frequent = sum(is_frequent(char, char.encode(name)) for char in foreign)
    if name == "cp949" and frequent < MIN_HANGUL:
        return 0.0
    return frequent / len(foreign) if foreign else 0.0


def is_gb2312(char: str, _: bytes) -> bool:
    """Whether the character is in the first part of GB2312, or one of its punctuation marks."""
    code = char.encode("gb2312", "ignore")
    return len(code) == 2 and (0xB0 <= code[0] <= 0xD7 or code[0] in (0xA1, 0xA3))


def is_kana(char: str) -> bool:
    return "\u3040" <= char <= "\u30ff"


def is_mark(char: str) -> bool:
    return unicodedata.category(char)[0] in "PS" and "\u2000" <= char < "\uff61"


# the first rows of each table hold the frequent characters
FREQUENT: dict[str, Callable[[str, bytes], bool]] = {
    "cp949": lambda char, _: "\uac00" <= char <= "\ud7a3" or is_mark(char),
    "gb18030": is_gb2312,
    "cp950": lambda char, code: 0xA4 <= code[0] <= 0xC6 or is_mark(char),
    "cp932": lambda char, code: is_kana(char) or (len(code) == 2 and 0x88 <= code[0] <= 0x98) or is_mark(char),
    "euc-jp": lambda char, code: is_kana(char) or (len(code) == 2 and 0xB0 <= code[0] <= 0xCF) or is_mark(char),
    "utf-16le": is_gb2312,
    "utf-16be": is_gb2312,
}
