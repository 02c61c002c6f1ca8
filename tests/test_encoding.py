"""Text in another encoding than UTF-8 is named, and the fix that is printed makes it readable when it is run as it stands."""

import gzip
import json
import random
import subprocess
from functools import partial

import pytest

from paceline.config_file import read_config_file
from paceline.data.corpus import list_files, read_corpus
from paceline.data.readers import read_documents
from paceline.encoding import guess_encoding
from paceline.errors import PacelineError

TEXTS = {
    "zh": "我们在两张显卡上训练这个模型，学习率按余弦衰减。训练数据来自网页文本，已经去重。\n" * 3,
    "tw": "我們在兩張顯示卡上訓練這個模型，學習率依餘弦衰減。訓練資料來自網頁文字，已經去除重複。\n" * 3,
    "ja": "二枚のGPUでこのモデルを学習します。学習率は余弦で減衰させます。重複を除いた文章です。\n" * 3,
    "ko": "두 장의 그래픽 카드에서 이 모델을 학습합니다. 학습률은 코사인으로 줄어듭니다.\n" * 3,
    "fr": "Il était une fois un modèle entraîné à Paris, où l'élève avait déjà réussi.\n" * 3,
}
ENCODINGS = [
    *(("zh", "gbk", "GB18030"), ("zh", "gb18030", "GB18030"), ("tw", "big5", "Big5"), ("ja", "shift_jis", "Shift-JIS")),
    *(("ja", "euc-jp", "EUC-JP"), ("ko", "euc-kr", "EUC-KR"), ("zh", "utf-16", "UTF-16"), ("fr", "utf-16", "UTF-16")),
]
READ_CONFIG = partial(read_config_file, flags={})
CONFIG = "depth = 8  # 层数\nsequence_len = 256  # 上下文长度\nname = {name!r}\n"


def read(path):
    return "".join(
        document.text for file in list_files(str(path)) for document in read_documents(file, part_bytes=1 << 18)
    )


def refused(function, path):
    with pytest.raises(PacelineError) as error:
        function(path)
    return error.value


@pytest.mark.parametrize(("language", "encoding", "title"), ENCODINGS)
@pytest.mark.parametrize("ending", ["txt", "txt.gz", "jsonl"])
def test_the_fix_for_a_text_run_as_it_stands_makes_it_readable(tmp_path, language, encoding, title, ending):
    text = TEXTS[language]
    path = tmp_path / f"a book.{ending}"
    content = json.dumps({"text": text}, ensure_ascii=False) + "\n" if ending == "jsonl" else text
    if encoding == "utf-16" and ending == "jsonl":
        pytest.skip("json.loads reads UTF-16 itself, line by line it is no text")
    raw = content.encode(encoding)
    path.write_bytes(gzip.compress(raw) if ending.endswith("gz") else raw)
    error = refused(read, path)
    assert f"not UTF-8: byte 0x{raw[0] if encoding == 'utf-16' else raw[raw_start(raw)]:02x} at offset" in error.message
    assert f"looks like {title}" in error.message
    subprocess.run(error.fix, shell=True, check=True)
    assert read(path) == text


def raw_start(raw):
    """Where the first byte is that is not UTF-8."""
    with pytest.raises(UnicodeDecodeError) as error:
        raw.decode()
    return error.value.start


@pytest.mark.parametrize("encoding", ["gbk", "utf-16"])
@pytest.mark.parametrize("ending", ["toml", "py"])
def test_the_fix_for_a_config_run_as_it_stands_makes_it_readable(tmp_path, encoding, ending):
    path = tmp_path / f"配置.{ending}"
    path.write_bytes(CONFIG.format(name="中文实验").encode(encoding))
    error = refused(READ_CONFIG, path)
    assert error.message.startswith(f"config file {path} is not UTF-8")
    assert f".{ending}.utf8' && mv " in error.fix and "latin" not in error.fix
    subprocess.run(error.fix, shell=True, check=True)
    assert READ_CONFIG(path)[0] == {"depth": 8, "sequence_len": 256, "name": "中文实验"}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(("name", "function"), [("a.txt", read), ("b.txt.gz", read), ("c.toml", READ_CONFIG)])
def test_ascii_in_utf16_without_a_mark_is_valid_utf8_and_is_refused_with_a_fix_that_works(
    tmp_path, encoding, name, function
):
    path, text = tmp_path / name, "depth = 8\n" * (1 if name.endswith("toml") else 50)
    raw = text.encode(encoding)
    assert raw.decode()  # no decoder complains
    path.write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    error = refused(function, path)
    assert "looks like UTF-16, not UTF-8: every second byte is zero" in error.message
    subprocess.run(error.fix, shell=True, check=True)
    assert function(path)[0]["depth"] == 8 if name.endswith("toml") else function(path) == text


def test_a_short_comment_in_gbk_is_enough_and_a_cut_character_does_no_harm():
    raw = "# 学习率\nlr = 1\n".encode("gbk")
    assert guess_encoding(raw) == guess_encoding(raw[:5]) == "gb18030"


def test_a_utf8_text_with_a_damaged_byte_is_not_taken_for_another_encoding(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXTS["zh"].encode() + b"\xff\n" + TEXTS["zh"].encode())
    error = refused(read, path)
    assert error.message.endswith("; a few bytes are damaged")
    subprocess.run(error.fix, shell=True, check=True)
    assert read(path) == TEXTS["zh"] + "\n" + TEXTS["zh"]


def test_the_command_for_a_text_of_one_byte_a_character_makes_it_readable(tmp_path):
    path = tmp_path / "é.txt"
    path.write_bytes(TEXTS["fr"].encode("latin-1"))
    fix, _, hint = refused(read, path).fix.partition(", ")
    assert hint == "with the encoding it is in in place of ISO-8859-1"
    subprocess.run(fix, shell=True, check=True)
    assert read(path) == TEXTS["fr"]


def test_the_quotes_of_windows_make_a_text_one_of_windows(tmp_path):
    path, text = tmp_path / "a.txt", "l’été – “chaud”\n"
    path.write_bytes(text.encode("cp1252"))
    fix, _, hint = refused(read, path).fix.partition(", ")
    assert hint == "with the encoding it is in in place of WINDOWS-1252"
    subprocess.run(fix, shell=True, check=True)
    assert read(path) == text


@pytest.mark.parametrize("name", ["a.txt", "b.txt.gz"])
@pytest.mark.parametrize("place", [0, 7, 400])
def test_a_block_of_zeros_is_a_damaged_text_and_the_command_removes_it(tmp_path, name, place):
    path, text = tmp_path / name, TEXTS["fr"] * 20
    raw = text.encode()
    raw = raw[:place] + bytes(5000) + raw[place:]
    path.write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    error = refused(read, path)
    assert error.message == f"{path} has zeros in place of text at offset {place}: it is damaged"
    fix, _, hint = error.fix.partition(", ")
    assert hint == "or get the file again"
    subprocess.run(fix, shell=True, check=True)
    assert read(path) == text


def test_a_file_of_zeros_alone_comes_without_a_command_that_would_empty_it(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(5000))
    error = refused(read, path)
    assert (error.message, error.fix) == (f"{path} begins with 5,000 zeros: it was not written", "get the file again")


def test_zeros_that_cut_a_character_are_removed_before_it_is(tmp_path):
    path, raw = tmp_path / "a.txt", (TEXTS["zh"] * 20).encode()
    path.write_bytes(raw[:100] + bytes(4096) + raw[101:])
    for part in ("zeros in place of text at offset 100", "a few bytes are damaged"):
        error = refused(read, path)
        assert part in error.message
        subprocess.run(error.fix.partition(", or")[0], shell=True, check=True)
    assert read(path)[-50:] == TEXTS["zh"][-50:]


def test_zeros_in_utf16_are_not_removed_before_it_is_converted(tmp_path):
    path, raw = tmp_path / "a.txt", ("Привет мир это текст\n" * 60).encode("utf-16-le")
    path.write_bytes(raw[:300] + bytes(4096) + raw[300:])
    assert "iconv -f utf-16le" in refused(read, path).fix


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
@pytest.mark.parametrize("ending", ["txt", "txt.gz"])
def test_the_fix_for_many_files_repairs_all_of_them_and_leaves_the_others_alone(tmp_path, encoding, ending):
    folder = tmp_path / "my books"
    (folder / "more").mkdir(parents=True)
    text = TEXTS["fr"] if encoding == "latin-1" else "depth = 8\n" * 50
    for n, name in enumerate(["0", "1", "2", "more/3", "more/4"]):
        raw = (text if n else TEXTS["zh"]).encode(encoding if n else "utf-8")
        (folder / f"{name}.{ending}").write_bytes(gzip.compress(raw) if ending.endswith("gz") else raw)
    with pytest.raises(PacelineError, match=r"and 3 more of the 5 files cannot be read either") as error:
        list(read_corpus(list_files(str(folder)), part_bytes=1 << 18))
    command = error.value.fix.removesuffix(", with the encoding it is in in place of ISO-8859-1")
    subprocess.run(command, shell=True, check=True)
    assert read(folder) == TEXTS["zh"] + text * 4


def test_a_file_of_bytes_is_not_text_and_gets_no_command(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(random.Random(1).randbytes(100_000))
    error = refused(read, path)
    assert error.message.endswith("; it is not text") and error.fix == "move it out of the folder, or give another file"


def test_a_text_of_one_byte_a_character_is_not_guessed():
    assert guess_encoding(TEXTS["fr"].encode("latin-1")) is None
    assert guess_encoding("Мы обучаем эту модель на двух видеокартах.\n".encode("cp1251")) is None
