"""Sources become files, files become documents, and some of them are held out."""

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from paceline.data.corpus import held_out_below, list_files, part_bytes_of, read_corpus
from paceline.data.prepare import print_held_out_note
from paceline.errors import PacelineError

jq_only = pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")


def texts(source, part_bytes=256 << 10):
    return [document.text for document, _ in read_corpus(list_files(str(source)), part_bytes=part_bytes)]


def held_out(source, **options):
    files = list_files(str(source), **options)
    part_bytes = part_bytes_of(files)
    below = held_out_below(files, part_bytes=part_bytes)
    return {document.text for document, _ in read_corpus(files, part_bytes=part_bytes) if document.digest < below}


def write_many(folder, numbers):
    folder.mkdir(exist_ok=True)
    for number in numbers:
        (folder / f"{number}.txt").write_text(f"document {number}")
    return folder


def refused(source):
    with pytest.raises(PacelineError) as error:
        texts(source)
    assert error.value.fix
    return error.value


def test_the_builtin_corpus_is_the_standard_library_without_tests():
    files = list_files("builtin")
    names = [file.path for file in files]
    assert any(name.endswith("/argparse.py") for name in names)
    assert not any("/site-packages/" in name or "/test/" in name or "/tests/" in name for name in names)
    assert sum(file.num_bytes for file in files) > 8_000_000
    assert files == list_files("builtin")


def test_every_file_of_the_builtin_corpus_can_be_read():
    files = list_files("builtin")
    assert sum(document.num_bytes for document, _ in read_corpus(files, part_bytes=256 << 10)) == pytest.approx(
        sum(file.num_bytes for file in files), rel=1e-3
    )


def test_listing_the_builtin_corpus_opens_no_file(monkeypatch):
    opened = []
    monkeypatch.setattr(io, "open", lambda path, *args, **options: opened.append(path))
    monkeypatch.setattr(os, "open", lambda path, *args, **options: opened.append(path))
    assert len(list_files("builtin")) > 100
    assert opened == []


def test_importing_the_corpus_loads_no_library():
    code = (
        "import sys, paceline.data.prepare; print([m for m in ('numpy', 'tokenizers', 'pyarrow') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"


def test_a_folder_gives_its_files_in_sorted_order_with_those_below_it(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "ö 1.md").write_text("three")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.PY").write_text("two")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("hidden")
    (tmp_path / "empty.txt").touch()
    assert texts(tmp_path) == ["one", "two", "three"]


@pytest.mark.parametrize("name", ["config.toml", "preparing.json"])
def test_what_runs_in_the_folder_wrote_is_no_text(tmp_path, name, capsys):
    write_many(tmp_path, [1])
    run = write_many(tmp_path / "one", [2])
    (run / name).touch()
    (run / ".lock").touch()
    assert [Path(file.path).name for file in list_files(str(tmp_path), print_note=True)] == ["1.txt"]
    assert capsys.readouterr().err == ""
    assert texts(run) == ["document 2"]  # on request


def test_linked_folders_are_entered_once_even_in_a_loop(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("one")
    source = tmp_path / "source"
    source.mkdir()
    (source / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "loop").symlink_to(source)
    assert texts(source) == ["one"]


def test_a_file_may_be_given_relative_to_the_home_folder_and_the_current_one(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert texts("~/a.txt") == texts("a.txt") == ["one"]


def test_progress_counts_source_bytes_up_to_all_of_them(tmp_path):
    write_many(tmp_path, range(5))
    files = list_files(str(tmp_path))
    done = [read for _, read in read_corpus(files, part_bytes=4096)]
    assert done == sorted(done)
    assert done[-1] == sum(file.num_bytes for file in files)


def test_a_byte_budget_is_shared_by_all_files_alike(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(f"{name * 99}\n" * 1000)
    read = [d.text[0] for d, _ in read_corpus(list_files(str(tmp_path)), part_bytes=4096, max_bytes=40_000)]
    assert {name: read.count(name) for name in "abcd"} == dict.fromkeys("abcd", 3)  # 3 parts of 4 KB pass 10 KB


def test_one_small_file_has_both_sides(tmp_path):
    (tmp_path / "play.txt").write_text("\n".join(f"line {number}" for number in range(5000)))
    files = list_files(str(tmp_path / "play.txt"))
    assert part_bytes_of(files) == 4096
    assert 0 < len(held_out(tmp_path / "play.txt")) < len(texts(tmp_path / "play.txt", 4096))


def test_parts_are_large_where_there_is_much_text(tmp_path):
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate(100 << 20)
    assert part_bytes_of(list_files(str(tmp_path / "large.txt"))) == 256 << 10


def test_about_one_document_in_ten_of_a_small_corpus_is_held_out(tmp_path):
    assert 70 <= len(held_out(write_many(tmp_path / "c", range(1000)))) <= 130


def test_what_is_held_out_stays_so_when_the_corpus_grows_or_is_renamed(tmp_path):
    before = held_out(write_many(tmp_path / "c", range(100)))
    for number in range(50):
        (tmp_path / "c" / f"{number}.txt").rename(tmp_path / "c" / f"renamed_{number}.md")
    after = held_out(write_many(tmp_path / "c", range(100, 200)))
    assert {text for text in after if int(text.split()[1]) < 100} == before


@pytest.mark.parametrize("num_documents", [2, 3, 4])
def test_few_documents_still_have_both_sides_the_same_ones_each_time(tmp_path, num_documents):
    for start in range(0, 100, 10):
        folder = write_many(tmp_path / f"{start}", range(start, start + num_documents))
        assert 1 <= len(held_out(folder)) < num_documents
        assert held_out(folder) == held_out(folder)


@pytest.mark.parametrize("contents", [["only one"], ["same", "same"], [" \n", "one"]])
def test_a_corpus_of_one_distinct_document_is_too_small(tmp_path, contents):
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.txt").write_text(content)
    with pytest.raises(PacelineError, match=r"is too small: .* in 1 distinct document,"):
        held_out(tmp_path)


def test_a_corpus_whose_rows_have_no_text_is_refused_with_their_number(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null, "content": "one"}\n{"text": "", "content": "two"}\n')
    with pytest.raises(PacelineError) as error:
        held_out(path)
    assert error.value.message.endswith(f"; the text of 2 rows is null or empty, first in {path}")
    assert error.value.fix == "--text-field NAME, where another field holds the text"
    assert held_out(path, text_field="content")


def test_a_missing_path_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refused("no/such/café")
    assert error.message == f"no such file or folder: no/such/café (looked in {tmp_path})"


@pytest.mark.parametrize("source", ["a\0b", "x" * 5000, "file.txt/below"])
def test_a_path_that_cannot_be_one_is_an_error_of_two_lines(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("a")
    assert refused(source).message.startswith("cannot read ")


def test_a_link_in_a_loop_is_named(tmp_path):
    (tmp_path / "a.txt").symlink_to("b.txt")
    (tmp_path / "b.txt").symlink_to("a.txt")
    assert refused(tmp_path / "a.txt").message.startswith(f"cannot read {tmp_path}/a.txt: ")


def test_an_empty_file_and_an_empty_folder_are_named(tmp_path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "none").mkdir()
    assert refused(tmp_path / "a.txt").message == f"{tmp_path}/a.txt is empty"
    assert refused(tmp_path).message == f"nothing to read in {tmp_path}: all its text files are empty (1 of them)"
    assert refused(tmp_path / "none").message == f"{tmp_path}/none is an empty folder"


def test_the_tokens_of_nanogpt_are_refused_with_the_text_to_give(tmp_path):
    for name in ("train.bin", "val.bin", "meta.pkl"):
        (tmp_path / name).write_bytes(b"1")
    assert refused(tmp_path).fix.endswith("give the text that they were made from, such as nanoGPT's input.txt")


def test_a_folder_without_text_says_what_it_holds(tmp_path):
    for number in range(7):
        (tmp_path / f"{number}.doc").write_text("a,b")
    error = refused(tmp_path)
    assert error.message == f"no text file in {tmp_path}: it holds 0.doc, 1.doc, 2.doc, 3.doc, 4.doc and 2 more"
    assert ".jsonl" in error.fix


@pytest.mark.parametrize(
    ("ending", "content"),
    [
        ("csv", '\ufeffid,text\n1,"a, ""quoted""\nline"\n2,b\n'),
        ("TSV", 'id\ttext\n1\t"a, ""quoted""\nline"\n2\tb\n'),
        pytest.param("json", '[{"text": "a, \\"quoted\\"\\nline"},\n{"text": "b"}]', marks=jq_only),
        pytest.param("json", '{"text": "a, \\"quoted\\"\\nline"} {"text": "b"}', marks=jq_only),
    ],
)
@pytest.mark.parametrize("names", [["a b"], ["c", "d/e"]], ids=["one", "two"])
def test_a_table_and_json_come_with_the_command_that_makes_lines_of_all_files(tmp_path, ending, content, names):
    for path in (tmp_path / f"{name}.{ending}" for name in names):
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    assert len(names) > 1 or refused(path).fix == f"{refused(tmp_path).fix}; then --data '{path}.jsonl'"
    subprocess.run(refused(tmp_path).fix.partition(", which")[0], shell=True, check=True)
    assert texts(tmp_path) == ['a, "quoted"\nline', "b"] * len(names)


def test_a_folder_of_hidden_files_is_not_called_empty(tmp_path):
    (tmp_path / ".a.txt").write_text("a")
    assert refused(tmp_path).message == f"{tmp_path} has only hidden files or empty folders"


def test_a_folder_that_save_to_disk_wrote_is_named_as_a_dataset(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    assert refused(tmp_path).fix == f"--data hf:{tmp_path}, as it was written by save_to_disk"


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("text/*.txt", "give one file, or one folder"),
        ("a,b", "give one file"),
        ("https://a.org/b.txt", "download it first"),
    ],
)
def test_a_pattern_a_list_and_an_address_are_answered_with_what_to_give(source, fix):
    assert refused(source).fix.startswith(fix)


def test_files_of_other_types_beside_the_text_are_noted_where_that_is_requested(tmp_path, capsys):
    for name in ("a.txt", "b.jsonl.zst", "c/d.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a")
    assert [file.path for file in list_files(str(tmp_path))] == [f"{tmp_path}/a.txt"]
    assert capsys.readouterr().err == ""
    list_files(str(tmp_path), print_note=True)
    note = f"note    {tmp_path}: left out 2 files of other types: b.jsonl.zst and c/d.json"
    assert capsys.readouterr().err == f"{note}; zstd -d {tmp_path}/b.jsonl.zst unpacks it\n"


@pytest.mark.parametrize(
    ("names", "noted"),
    [
        (["test.txt", "valid.txt"], "test.txt and valid.txt"),
        (["a.txt", "TinyStoriesV2-GPT4-valid.txt"], "TinyStoriesV2-GPT4-valid.txt"),
        (["train.parquet", "validation-00000-of-00001.parquet"], "validation-00000-of-00001.parquet"),
        (["wiki.test.raw.txt.gz", "val/0.jsonl", "val_1.md"], "val_1.md, wiki.test.raw.txt.gz and val/0.jsonl"),
        (
            ["test.py", "tests/test_a.py", "contest.txt", "latest.md", "value.txt", "test_drive.txt", "train-1.txt"],
            None,
        ),
    ],
)
def test_files_that_are_called_validation_or_test_text_are_noted(tmp_path, capsys, names, noted):
    folder = tmp_path / "test"
    for path in (folder / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a")
    files = list_files(str(folder), print_note=True)
    assert len(files) == len(names)
    assert capsys.readouterr().err == ""
    print_held_out_note(str(folder), files)
    err = capsys.readouterr().err
    assert err.startswith(f"note    {folder}: {noted} will be trained on: ") if noted else err == ""
    assert err.count("\n") == bool(noted)
    if noted and (val_data := re.search("--val-data (.*) measures", err)[1]) != str(folder / names[-1]):
        print_held_out_note(str(folder), list_files(str(folder), val_source=val_data))
        rest = capsys.readouterr().err
        assert val_data not in rest and (not rest or rest.endswith("move them to another folder\n"))


def test_a_text_field_of_plain_text_alone_is_noted(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a")
    list_files(str(tmp_path), text_field="body", print_note=True)
    assert capsys.readouterr().err == f"note    --text-field body has no effect: {tmp_path} is plain text\n"
    (tmp_path / "b.jsonl").write_text("{}")
    list_files(str(tmp_path), text_field="body", print_note=True)
    assert capsys.readouterr().err == ""


def test_a_file_of_another_type_says_which_can_be_read(tmp_path):
    (tmp_path / "a.docx").write_bytes(b"PK")
    assert refused(tmp_path / "a.docx").message == f"{tmp_path}/a.docx is not of a type that can be read"
    (tmp_path / "x's.jsonl.zst").write_bytes(b"")
    command, _, ending = refused(tmp_path / "x's.jsonl.zst").fix.rpartition(" unpacks it; then ")
    assert shlex.split(command) == ["zstd", "-d", f"{tmp_path}/x's.jsonl.zst"]
    assert shlex.split(ending) == ["--data", f"{tmp_path}/x's.jsonl"]


@pytest.mark.skipif(shutil.which("unzip") is None, reason="no unzip here")
def test_the_command_for_an_archive_unpacks_it_where_the_text_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "text"
    folder.mkdir()
    with zipfile.ZipFile(folder / "b.zip", "w") as archive:
        archive.writestr("b.txt", "a text")
    command, _, source = refused(folder / "b.zip").fix.partition(" unpacks it; then --data ")
    subprocess.run(refused(folder).fix.removesuffix(" unpacks it"), shell=True, check=True, stdout=subprocess.DEVNULL)
    assert refused(tmp_path / "text" / "b.zip").fix.startswith(command)
    assert texts(folder) == texts(source) == ["a text"]


def test_a_broken_link_is_named_with_where_it_points(tmp_path):
    (tmp_path / "a.txt").symlink_to("gone.txt")
    for source in (tmp_path, tmp_path / "a.txt"):
        assert refused(source).message == f"{tmp_path}/a.txt is a link to gone.txt, which leads nowhere"


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    assert refused(tmp_path / "a.txt").message == f"{tmp_path}/a.txt is not a regular file"


@pytest.fixture
def as_nobody(tmp_path):
    """Root may read everything, so these tests ask as someone else. Yields a folder that anyone may enter."""
    for folder in (tmp_path, *tmp_path.parents):
        if "pytest-of" in str(folder):
            folder.chmod(0o755)
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 0)
    yield tmp_path
    if os.getresuid()[2] == 0:
        os.setresuid(0, 0, 0)


def test_a_file_and_a_folder_without_permission_are_named(as_nobody):
    os.seteuid(os.getresuid()[2])
    (as_nobody / "a.txt").write_text("one")
    (as_nobody / "closed").mkdir()
    (as_nobody / "a.txt").chmod(0)
    (as_nobody / "closed").chmod(0)
    os.seteuid(os.getresuid()[0])
    assert refused(as_nobody / "a.txt").message == f"no permission to read {as_nobody}/a.txt"
    assert refused(as_nobody / "closed").message == f"no permission to read {as_nobody}/closed"
    assert refused(as_nobody).message == f"no permission to read {as_nobody}/a.txt (and 1 more)"
    os.seteuid(os.getresuid()[2])
    (as_nobody / "closed").chmod(0o755)


def test_all_broken_files_are_named_up_to_ten_each_with_its_reason(tmp_path):
    write_many(tmp_path, range(5))
    for name in ("1.txt", "2.txt", "4.txt"):
        (tmp_path / name).write_bytes(b"caf\xe9")
    (tmp_path / "5.jsonl").write_text("{")
    first, *lines = refused(tmp_path).message.splitlines()
    assert first.startswith(f"{tmp_path}/1.txt is not UTF-8")
    assert first.endswith("(and 3 more of the 6 files cannot be read either)")
    reasons = ("2.txt is not UTF-8", "4.txt is not UTF-8", "5.jsonl:1 is not JSON")
    assert [line.strip().startswith(f"{tmp_path}/{reason}") for line, reason in zip(lines, reasons, strict=True)] == [
        True
    ] * 3
    for number in range(10, 30):
        (tmp_path / f"{number}.txt").write_bytes(b"caf\xe9")
    _, *lines = refused(tmp_path).message.splitlines()
    assert len(lines) == 11 and lines[-1].strip() == "..."


@pytest.mark.parametrize("source", ["hf:", "hf:/no/such/folder", "hf:./no"])
def test_a_dataset_source_that_names_nothing_is_refused(source):
    assert refused(source).fix


def test_a_dataset_of_the_hub_counts_as_large_and_is_known_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (file,) = list_files("hf:wikitext:wikitext-2-raw-v1")
    assert (file.path, file.config, file.format) == ("wikitext", "wikitext-2-raw-v1", "hf")
    assert part_bytes_of([file]) == 256 << 10
