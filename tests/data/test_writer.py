"""A prepared folder is whole or not there: disks that fail, processes that are killed or meet."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.data.prepare import open_dataset, prepare, verify
from paceline.errors import PacelineError

PREPARE = """
import json, resource, sys
from pathlib import Path
from paceline.data.prepare import prepare

source, cache_dir, stop_at, max_file_bytes = sys.argv[1:]
if int(max_file_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(max_file_bytes), -1))

def progress(label, done, total):
    print(label, flush=True)
    if label == stop_at:
        sys.stdin.readline()  # until the test closes it

dataset = prepare(source, tokenizer=None, vocab_size=300, cache_dir=Path(cache_dir), progress=progress)
print(json.dumps({"reused": dataset.reused, "path": str(dataset.path)}), flush=True)
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {number} of the text\n" for number in range(20_000)))
    return tmp_path / "a.txt"


def start(source, cache_dir, *, stop_at="", max_file_bytes=0):
    arguments = [str(source), str(cache_dir), stop_at, str(max_file_bytes)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", PREPARE, *arguments], **pipes, text=True)


def wait_for(process, line):
    for printed in process.stdout:
        if printed.strip() == line:
            return
    raise AssertionError(f"{line} never came: {process.stderr.read()}")


def left_in(cache_dir):
    return sorted(path.name for path in (cache_dir / "data").iterdir() if not path.name.endswith(".lock"))


@pytest.mark.dist
@pytest.mark.parametrize("stop_at", ["train tokenizer", "tokenize"])
def test_ctrl_c_ends_at_once_and_leaves_nothing(source, tmp_path, stop_at):
    process = start(source, tmp_path / "cache", stop_at=stop_at)
    wait_for(process, stop_at)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert left_in(tmp_path / "cache") == []


@pytest.mark.dist
@pytest.mark.parametrize("stop_at", ["train tokenizer", "tokenize"])
def test_after_a_kill_the_next_one_starts_over_and_cleans_up(source, tmp_path, stop_at):
    process = start(source, tmp_path / "cache", stop_at=stop_at)
    wait_for(process, stop_at)
    process.kill()
    process.communicate(timeout=300)
    assert [name[0] for name in left_in(tmp_path / "cache")] == ["."]  # only the hidden folder in the making
    dataset = prepare(str(source), tokenizer=None, vocab_size=300, cache_dir=tmp_path / "cache")
    verify(dataset)
    assert not dataset.reused
    assert left_in(tmp_path / "cache") == [dataset.path.name]


@pytest.mark.dist
def test_what_a_killed_process_left_of_another_text_is_removed_but_not_what_is_being_made(source, tmp_path):
    def copy(name):
        (tmp_path / name).write_text(source.read_text()[:9000])
        return tmp_path / name

    def kill(process):
        process.kill()
        process.communicate(timeout=300)

    running = start(source, tmp_path / "cache", stop_at="tokenize")
    wait_for(running, "tokenize")
    killed = start(copy("b.txt"), tmp_path / "cache", stop_at="tokenize")
    wait_for(killed, "tokenize")
    kill(killed)
    assert len(left_in(tmp_path / "cache")) == 2
    first = prepare(str(copy("c.txt")), tokenizer=None, vocab_size=300, cache_dir=tmp_path / "cache")
    assert [name[0] for name in left_in(tmp_path / "cache")] == [".", first.path.name[0]]
    kill(running)
    second = prepare(str(copy("d.txt")), tokenizer=None, vocab_size=300, cache_dir=tmp_path / "cache")
    assert left_in(tmp_path / "cache") == sorted([first.path.name, second.path.name])


@pytest.mark.dist
def test_of_two_processes_one_prepares_and_the_other_waits_and_uses_it(source, tmp_path):
    first = start(source, tmp_path / "cache", stop_at="tokenize")
    wait_for(first, "tokenize")
    second = start(source, tmp_path / "cache")
    wait_for(second, "wait for another process that prepares the same text")
    results = [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in (first, second)]
    assert [result["reused"] for result in results] == [False, True]
    assert results[0]["path"] == results[1]["path"]
    assert left_in(tmp_path / "cache") == [Path(results[0]["path"]).name]


@pytest.mark.dist
def test_many_processes_at_once_all_end_with_the_same_whole_folder(source, tmp_path):
    processes = [start(source, tmp_path / "cache") for _ in range(4)]
    results = [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in processes]
    assert sorted(result["reused"] for result in results) == [False, True, True, True]
    verify(open_dataset(tmp_path / "cache" / "data" / left_in(tmp_path / "cache")[0]))


@pytest.mark.dist
@pytest.mark.parametrize("max_file_bytes", [100_000, 5_000])  # for the shards, for the tokenizer
def test_a_disk_without_room_is_an_error_with_numbers_and_leaves_nothing(source, tmp_path, max_file_bytes):
    process = start(source, tmp_path / "cache", max_file_bytes=max_file_bytes)
    _, stderr = process.communicate(timeout=300)
    assert (
        f"PacelineError: error: no room to write prepared text into {tmp_path}/cache/data: File too large (" in stderr
    )
    assert left_in(tmp_path / "cache") == []


def test_a_cache_folder_that_cannot_be_made_is_named(source, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PacelineError) as error:
        prepare(str(source), tokenizer=None, vocab_size=300, cache_dir=tmp_path / "file")
    assert error.value.message == f"cannot write prepared text into {tmp_path}/file/data: Not a directory"
    assert (
        error.value.fix == f"--cache-dir DIR in another place, or make {tmp_path}/file/data a folder you may write to"
    )


def test_a_cache_on_a_disk_that_takes_no_files_is_named(source):
    with pytest.raises(PacelineError, match="cannot write prepared text into /proc/1/data"):
        prepare(str(source), tokenizer=None, vocab_size=300, cache_dir=Path("/proc/1"))
