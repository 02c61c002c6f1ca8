"""Every kind of file, whole and broken."""

import gzip
import json
import re
import shutil
import subprocess
import sys

import pytest

from paceline.data.corpus import list_files, read_corpus
from paceline.data.readers import cut_at_line_ends, read_documents
from paceline.errors import PacelineError


def texts(source, part_bytes=256 << 10, **options):
    files = list_files(str(source), **options)
    return [document.text for file in files for document in read_documents(file, part_bytes=part_bytes)]


def refused(source, **options):
    with pytest.raises(PacelineError) as error:
        texts(source, **options)
    assert error.value.fix
    return error.value


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def jsonl(*records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def test_text_is_read_as_it_is_but_for_the_byte_order_mark(tmp_path):
    assert texts(write(tmp_path / "a.txt", b"\xef\xbb\xbfna\xc3\xafve\r\n\ttwo \x00\n")) == ["naïve\r\n\ttwo \x00\n"]


def test_white_space_alone_is_no_document(tmp_path):
    assert texts(write(tmp_path / "a.txt", " \n\t\n")) == []


@pytest.mark.parametrize("part_bytes", [64, 65, 66, 4096])
def test_a_long_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path, part_bytes):
    content = "".join(f"{'é' * (number % 13)} {number}\n" for number in range(500)) + "日本語" * 50
    parts = texts(write(tmp_path / "a.txt", content), part_bytes)
    assert "".join(parts) == content
    assert max(len(part.encode()) for part in parts) <= part_bytes
    assert texts(write(tmp_path / "a.txt.gz", gzip.compress(content.encode())), part_bytes) == parts
    assert texts(write(tmp_path / "a.jsonl", jsonl({"text": content})), part_bytes) == parts


@pytest.mark.parametrize("part_bytes", [16, 17, 18, 19, 29, 64, 4096])
@pytest.mark.parametrize("between", ["\n<|endoftext|>\n", "<|endoftext|>", "\r\n\r\n<|endoftext|>\r\n"])
def test_a_text_file_has_a_document_between_two_marks(tmp_path, part_bytes, between):
    stories = [f"tale {number} " + "é" * (number % 4) + "<|end" * (number % 2) for number in range(60)]
    content = between.join(stories) + between
    path = write(tmp_path / "a.txt", content)
    assert texts(path, max(part_bytes, 64)) == stories
    assert re.sub(r"[\r\n]", "", "".join(texts(path, part_bytes))) == "".join(stories)
    assert texts(write(tmp_path / "a.txt.gz", gzip.compress(content.encode())), 64) == stories
    for name in ("a.py", "a.txt.md"):
        assert texts(write(tmp_path / name, content), 1 << 20) == [content]
    broken = write(tmp_path / "b.txt", content.encode() + b"ab\xff")
    assert f"byte 0xff at offset {len(content.encode()) + 2:,}" in refused(broken).message


def test_a_part_ends_with_a_line_where_there_is_one():
    assert list(cut_at_line_ends(b"aaa\nbb\ncccccc\n", 8)) == [b"aaa\nbb\n", b"cccccc\n"]
    assert list(cut_at_line_ends(b"a\n" + "é".encode() * 3, 5)) == [b"a\n", "éé".encode(), "é".encode()]
    assert list(cut_at_line_ends(b"", 8)) == []


@pytest.mark.parametrize("part_bytes", [4, 16, 256 << 10])
def test_the_offset_of_a_byte_that_is_not_utf8_is_named(tmp_path, part_bytes):
    path = write(tmp_path / "ü.txt", b"\xef\xbb\xbf" + b"0123456\n" * 4 + b"caf\xe9 au lait\n")
    with pytest.raises(PacelineError) as error:
        list(read_documents(list_files(str(path))[0], part_bytes=part_bytes))
    assert error.value.message == f"{path} is not UTF-8: byte 0xe9 at offset 38"
    assert error.value.fix == (
        f"iconv -f ISO-8859-1 -t utf-8 '{path}' > '{path}.utf8' && mv '{path}.utf8' '{path}',"
        " with the encoding it is in in place of ISO-8859-1"
    )


def test_text_cut_inside_a_character_is_named_at_its_end(tmp_path):
    path = write(tmp_path / "a.txt", "abc€".encode()[:-1])
    assert refused(path).message == f"{path} is not UTF-8: byte 0xe2 at offset 3"


def test_utf16_is_recognised(tmp_path):
    assert "iconv -f utf-16" in refused(write(tmp_path / "a.txt", "hello".encode("utf-16"))).fix


def test_the_test_of_a_damaged_file_is_a_command_for_any_name(tmp_path):
    path = write(tmp_path / "x's.jsonl.gz", b"plain text")
    command = refused(path).fix.split("`")[1]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "not in gzip format" in done.stderr


def test_a_compressed_file_that_is_cut_short_or_no_gzip_is_named(tmp_path):
    whole = gzip.compress(jsonl(*({"text": f"document {n} " * 20} for n in range(500))).encode())
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for content in (whole[:-20], b"plain text", bytes(flipped)):
        path = write(tmp_path / "a.jsonl.gz", content)
        error = refused(path)
        assert error.message.startswith(f"{path} is damaged, or not gzip") or ".jsonl.gz:" in error.message
    assert refused(write(tmp_path / "a.jsonl.gz", whole[:-20])).fix.startswith("download or write it again")


def test_jsonl_gives_a_document_for_each_line_of_the_text_field(tmp_path):
    content = b"\xef\xbb\xbf" + jsonl({"id": "1", "text": "one"}, {"text": "zwei\u2028ß"}).encode() + b"\n"
    content += jsonl({"text": None}, {"text": ""}).encode() + b'{"text": "last"}'
    assert texts(write(tmp_path / "a.jsonl", content)) == ["one", "zwei\u2028ß", "last"]
    assert texts(write(tmp_path / "b.jsonl.gz", gzip.compress(content))) == ["one", "zwei\u2028ß", "last"]


@pytest.mark.parametrize("name", ["body", "content", "Text", "raw_content", "source_code"])
def test_jsonl_takes_the_only_field_of_strings_under_a_name_of_texts_when_there_is_no_text(tmp_path, name):
    assert texts(write(tmp_path / "a.jsonl", jsonl({"n": 1, name: "one"}, {"n": 2, name: "two"}))) == ["one", "two"]


@pytest.mark.parametrize(
    "name", ["id", "uuid", "sha256", "doc_id", "content_hash", "url", "label", "code", "title", "haiku"]
)
def test_an_only_field_of_strings_under_another_name_is_not_taken_for_the_text(tmp_path, name):
    error = refused(write(tmp_path / "a.jsonl", jsonl({name: "d41d8cd9", "tokens": [1, 2]})))
    assert error.message == (
        f"{tmp_path}/a.jsonl:1 has no field 'text' of strings, and {name!r} may be no text; it has {name}, tokens"
    )
    if name in ("id", "uuid", "sha256", "doc_id", "content_hash", "url"):
        assert error.fix == "write the text of each record as a string into a field 'text'"


RECORDS = {
    "sharegpt": {
        "id": "identity_0",
        "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}],
    },
    "chat": {"system": None, "messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]},
    "instructions": {"url": "u", "instruction": "one", "input": "", "out put": "two"},
    "unknown name": {"haiku": "one\n\ntwo"},
    "nested": {"id": "7", "data": {"author": "me", "part 1": {"text": "one\n\ntwo"}}},
    "nested under another name": {"data": {"url": "u", "a b": "one\n\ntwo"}},
}
jq_only = pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")


@jq_only
@pytest.mark.parametrize(
    ("ending", "record"),
    [
        *(("jsonl", name) for name in RECORDS),
        ("jsonl.gz", "chat"),
        ("parquet", "sharegpt"),
        pytest.param("parquet", "instructions", marks=pytest.mark.soak),
    ],
)
def test_records_without_text_come_with_the_command_that_makes_text_of_all_files(pyarrow, tmp_path, record, ending):
    for name in ("a b", "c"):
        path, content = tmp_path / f"{name}.{ending}", jsonl(RECORDS[record], RECORDS[record]).encode()
        if ending == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([RECORDS[record]] * 2), path)
        else:
            write(path, gzip.compress(content) if ending.endswith("gz") else content)
    with pytest.raises(PacelineError) as error:
        list(read_corpus(list_files(str(tmp_path)), part_bytes=4096))
    assert ("is of a chat set" in error.value.message) == (record in ("sharegpt", "chat"))
    option, _, command = error.value.fix.removesuffix(", which writes FILE.jsonl and keeps FILE.orig").rpartition(
        ", or "
    )
    options = {"instructions": "--text-field instruction", "unknown name": "--text-field haiku"}
    assert option == options.get(record, "")
    subprocess.run(command, shell=True, check=True)
    assert texts(tmp_path) == ["one\n\ntwo"] * 4
    assert len(list(tmp_path.glob("*.orig"))) == 2


STORIES = [{"id": "a7", "title": "one", "story": "two", "text": "three"}, {"id": "a8", "title": "", "story": None}]


@pytest.mark.parametrize("name", ["title", "story"])
def test_the_field_that_is_named_is_read_from_every_kind_of_file_that_has_fields(pyarrow, datasets, tmp_path, name):
    lines, rows = jsonl(*STORIES), pyarrow.Table.from_pylist(STORIES)
    for path in (tmp_path / "a.jsonl", tmp_path / "b.NDJSON"):
        write(path, lines)
    for path in (tmp_path / "c.jsonl.gz", tmp_path / "d.ndjson.gz"):
        write(path, gzip.compress(lines.encode()))
    pyarrow.parquet.write_table(rows, tmp_path / "e.parquet")
    write(tmp_path / "f.txt", "plain")
    datasets.Dataset(rows).save_to_disk(tmp_path.with_name("saved"))
    text = STORIES[0][name]
    assert texts(tmp_path, text_field=name) == [text] * 5 + ["plain"]
    assert texts(f"hf:{tmp_path.with_name('saved')}", text_field=name) == [text]


@pytest.mark.parametrize("first", [{"id": "a7", "n": 1}, {"id": None, "n": None}])
def test_a_file_and_a_row_without_the_field_that_is_named_are_refused_with_the_fields_that_are_there(
    pyarrow, tmp_path, first
):
    path = write(tmp_path / "a.jsonl", jsonl(first))
    assert refused(path, text_field="story").message == f"{path}:1 has no field 'story'; it has id, n"
    path = write(tmp_path / "b.jsonl", jsonl({"story": "one"}, first))
    assert "b.jsonl:2 has no field 'story'" in (message := refused(path, text_field="story").message)
    assert message.endswith("; it has id, n")
    table = tmp_path / "c.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([first]), table)
    assert refused(table, text_field="story").message == f"{table} has no field 'story'; it has id, n"
    assert refused(path, text_field="id").message.endswith(":1 has no field 'id'; it has story")


def test_a_field_that_is_named_and_holds_no_text_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl({"n": 1, "story": "one"}))
    assert refused(path, text_field="n").message == f"{path}:1: its field 'n' holds no strings; it has n, story"
    path = write(tmp_path / "b.jsonl", jsonl(RECORDS["chat"]))
    for name in ("messages", "story"):
        error = refused(path, text_field=name)
        assert "is of a chat set" in error.message and error.fix.startswith("jq ")


@jq_only
@pytest.mark.parametrize(
    ("first", "field", "option", "text"),
    [
        ({"text": "one", "id": "a7"}, "body", "--text-field text, or ", "one"),
        ({"data": {"text": "one"}}, "data.text", "", "one"),
        ({"body": 5, "title": "one"}, "body", "--text-field title, or ", "one"),
        (RECORDS["chat"] | {"summary": "s"}, "sumary", "--text-field summary, or ", "one\n\ntwo"),
    ],
)
def test_a_missing_field_that_is_named_comes_with_the_command_that_writes_it(tmp_path, first, field, option, text):
    write(tmp_path / "a.jsonl", jsonl({field: "zero"}))
    error = refused(path := write(tmp_path / "b.jsonl", jsonl(first)), text_field=field)
    problem = ": its field {!r} holds no strings" if field in first else ":1 has no field {!r}"
    assert problem.format(field) in error.message
    assert error.fix.startswith(f"{option}jq ")
    subprocess.run(error.fix.removeprefix(option), shell=True, check=True)
    assert texts(path, text_field=field) == [text]
    assert texts(tmp_path, text_field=field) == ["zero", text]


@pytest.mark.parametrize(
    ("record", "option"),
    [
        ({"content": "", "id": "a7", "url": "u"}, "--text-field content"),
        ({"id": "a7", "haiku": "a longer text", "title": "one"}, "--text-field haiku"),
        ({"ha iku": "one"}, "--text-field 'ha iku'"),
    ],
)
def test_several_fields_of_strings_are_refused_with_the_option_that_names_one_of_them(tmp_path, record, option):
    path = write(tmp_path / "a.jsonl", jsonl(record))
    assert refused(path).fix.startswith(f"{option}, or jq ")


@pytest.mark.parametrize(
    "records",
    [
        ({"text": None, "id": "17"}, {"text": "one", "id": "18"}),
        ({"text": None}, {"text": "one"}),
        ({"n": 1, "body": None}, {"n": 2, "body": "one"}),
    ],
)
def test_a_null_in_the_first_record_of_jsonl_does_not_decide_against_its_field(tmp_path, records):
    assert texts(write(tmp_path / "a.jsonl", jsonl(*records))) == ["one"]


def test_jsonl_of_a_byte_order_mark_alone_has_no_documents(tmp_path):
    assert texts(write(tmp_path / "a.jsonl", b"\xef\xbb\xbf")) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (jsonl({"title": "a", "body": "b"}), ":1 has no field 'text' of strings, and 2 other fields are"),
        (jsonl({"n": 1}), ":1 has no field 'text' of strings, and 0 other fields are strings; it has n"),
        (jsonl({"text": 5, "title": "a"}), ":1: its field 'text' holds no strings"),
        (jsonl({"text": "a"}, {"body": "b"}), ":2 has no field 'text', which the lines before it have; it has body"),
        (jsonl({"text": "a"}, {"text": ["b"]}), ":2 holds list, not text"),
        ('{"text": "a"}\n["b"]\n', ":2 is a JSON list, not an object"),
        ('{"text": "a"}\n\n{"text": b}\n{}\n', ":3 is not JSON"),
        ('{"text": "a"}\n{"text": ' + "[" * 100_000, ":2 is not JSON: maximum recursion depth"),
        ('{"text": "a"}\n{"text": "cut of', "and the file ends within the line: it may be cut short"),
        ('{"text": "a"}\n{"text": "\\ud83d"}\n', ":2 holds half a character: \\ud83d at character 0"),
    ],
)
def test_a_broken_line_of_jsonl_is_named_by_its_number(tmp_path, content, message):
    path = write(tmp_path / "a.jsonl", content)
    error = refused(path)
    assert error.message.startswith(f"{path}:")
    assert message in error.message


@jq_only
def test_a_first_line_with_its_text_in_another_field_is_the_one_to_change(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl({"content": "odd"}, {"text": "one"}, {"text": "two"}))
    error = refused(path)
    assert error.message == f"{path}:2 has the field 'text', and the lines before it have their text in 'content'"
    subprocess.run(error.fix, shell=True, check=True)
    assert texts(path) == ["odd", "one", "two"]


@jq_only
@pytest.mark.parametrize(
    ("value", "indent"), [([{"text": "a"}, {"text": "b"}], None), ([{"text": "a"}], 1), ({"text": "a"}, 1)]
)
def test_json_in_an_array_or_over_several_lines_comes_with_the_command_that_makes_lines_of_it(tmp_path, value, indent):
    path = write(tmp_path / "a b.jsonl", json.dumps(value, indent=indent))
    subprocess.run(["bash", "-c", refused(path).fix.partition(", which")[0]], check=True)
    assert len(texts(tmp_path / "a b.jsonl.jsonl")) == len(value)
    assert not path.exists()  # in a folder it would be refused again


@pytest.fixture
def pyarrow():
    import pyarrow.parquet

    return pyarrow


def test_parquet_gives_a_document_for_each_row_of_the_text_column(pyarrow, tmp_path):
    rows = [f"row {number}" for number in range(3000)]
    table = pyarrow.table({"id": [str(n) for n in range(3000)], "text": rows})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    assert texts(tmp_path) == rows
    other = pyarrow.table({"n": [1, 2, 3], "content": pyarrow.array(["a", None, "b"], type=pyarrow.large_string())})
    pyarrow.parquet.write_table(other, tmp_path / "a.parquet")
    assert texts(tmp_path) == ["a", "b"]


def test_a_category_of_strings_in_parquet_is_text(pyarrow, tmp_path):
    rows = pyarrow.array(["a", None, "b", "a"]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2, 3, 4], "text": rows}), tmp_path / "a.parquet")
    assert texts(tmp_path) == ["a", "b", "a"]
    numbers = pyarrow.array([1, 2]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": numbers}), tmp_path / "a.parquet")
    assert "holds no strings" in refused(tmp_path / "a.parquet").message


def test_broken_parquet_and_parquet_without_text_are_named(pyarrow, tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 50] * 1000, "b": ["y"] * 1000}), path)
    whole = path.read_bytes()
    for content in (whole[:-30], b"PAR1 nothing", whole[:40] + b"\xff" * 60 + whole[100:]):
        assert refused(write(path, content)).message.startswith(f"{path} cannot be read as parquet: ")
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x"], "b": ["y"], "n": [1]}), path)
    assert refused(path).message.endswith("and 2 other fields are strings; it has a, b, n")


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The library, with a cache of its own; imported here, since every test process imports this file."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    return datasets


def test_a_dataset_saved_to_disk_is_read(datasets, tmp_path):
    dataset = datasets.Dataset.from_dict({"id": [1, 2, 3], "text": ["one", "", "thrée"]})
    dataset.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "dict")
    assert texts(f"hf:{tmp_path}/plain") == texts(f"hf:{tmp_path}/dict") == ["one", "thrée"]


def test_a_split_of_a_dataset_is_named_and_is_validation_for_a_text_for_validation(datasets, tmp_path):
    splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "validation", "test")}
    datasets.DatasetDict(splits).save_to_disk(source := tmp_path / "a:b")
    splits["test"].save_to_disk(plain := tmp_path / "plain")
    assert texts(f"hf:{source}::test") == texts(f"hf:{source}:test") == ["test"]
    assert refused(f"hf:{source}:raw:test").fix == f"give hf:{source}::test"
    for val_source, text in ((source, "validation"), (f"{source}::test", "test"), (plain, "test")):
        files = list_files(f"hf:{source}", val_source=f"hf:{val_source}")
        documents = [document for file in files for document in read_documents(file, part_bytes=99)]
        assert [(document.text, document.is_held_out) for document in documents] == [(text, True), ("train", False)]
    for whole in (plain, f"{source}::train"):
        with pytest.raises(PacelineError, match="no text is left to train on"):
            list_files(f"hf:{whole}", val_source=f"hf:{whole}")
    assert refused(f"hf:{plain}::test").fix == refused(f"hf:{plain}:test").fix == f"give hf:{plain}"
    assert refused(f"hf:{source}::tset").fix == (
        f"name a split that is there: hf:{source}::train, hf:{source}::validation and hf:{source}::test"
    )


def test_a_dataset_folder_of_parquet_files_gives_its_train_split(datasets, tmp_path):
    folder = tmp_path / "my data" / "data"
    folder.mkdir(parents=True)
    for split, word in (("train", "seen"), ("test", "unseen")):
        datasets.Dataset.from_dict({"text": [word] * 3}).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    assert texts(f"hf:{tmp_path}/my data") == ["seen"] * 3
    assert refused(f"hf:{tmp_path}/my data:test").fix == f"if `test` is a split, give 'hf:{tmp_path}/my data::test'"


def test_a_dataset_that_cannot_be_used_is_named(datasets, tmp_path):
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(tmp_path / "no-train")
    assert refused(f"hf:{tmp_path}/no-train").message.endswith("has no split `train`; it has test")
    datasets.Dataset.from_dict({"q": ["a"], "a": ["b"]}).save_to_disk(tmp_path / "no-text")
    assert "it has q, a" in refused(f"hf:{tmp_path}/no-text").message
    (tmp_path / "broken").mkdir()
    write(tmp_path / "broken" / "state.json", "{")
    assert refused(f"hf:{tmp_path}/broken").message.startswith(f"dataset {tmp_path}/broken cannot be loaded: ")
    (tmp_path / "nothing").mkdir()
    assert refused(f"hf:{tmp_path}/nothing").message == f"{tmp_path}/nothing is an empty folder"


@jq_only
@pytest.mark.parametrize("kind", ["dict", pytest.param("parquet", marks=pytest.mark.soak)])
def test_a_chat_set_of_the_hub_comes_with_the_command_that_makes_text_of_it(datasets, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    dataset = datasets.Dataset.from_list([RECORDS["chat"]] * 3)
    if kind == "parquet":
        (tmp_path / "d").mkdir()
        dataset.to_parquet(tmp_path / "d" / "train.parquet")
    else:
        datasets.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "d")
    command, _, following = refused(f"hf:{tmp_path}/d").fix.rpartition(", then --data ")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf-cache"))
    subprocess.run(command, shell=True, check=True)
    assert texts(following) == ["one\n\ntwo"] * 3


def test_a_local_dataset_that_changes_has_another_stamp(datasets, tmp_path):
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "d")
    before = list_files(f"hf:{tmp_path}/d")
    assert list_files(f"hf:{tmp_path}/d") == before
    (tmp_path / "d" / "state.json").touch()
    assert list_files(f"hf:{tmp_path}/d") != before


@pytest.mark.dist
def test_a_hub_dataset_without_a_network_says_so_in_two_lines():
    code = "from paceline.data.corpus import *; list(read_corpus(list_files('hf:no-one/nothing:x'), part_bytes=4096))"
    env = {"HF_HUB_OFFLINE": "1", "PATH": ""}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "UnreadableFile: error: dataset no-one/nothing is not in the cache, and " in ended.stderr
    assert "is out of reach: HF_HUB_OFFLINE is set\n  fix: unset HF_HUB_OFFLINE" in ended.stderr


@pytest.mark.parametrize(("library", "source"), [("pyarrow", "a.parquet"), ("datasets", "hf:someone/something")])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(tmp_path, monkeypatch, library, source):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.chdir(write(tmp_path / "a.parquet", b"PAR1").parent)
    assert refused(source).fix == "pip install datasets pyarrow"
