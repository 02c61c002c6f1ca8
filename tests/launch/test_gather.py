"""Frames, and the files that travel in them, over real pipes."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.heartbeat import HeartbeatWriter, read_heartbeat
from paceline.launch.channel import PIECE_BYTES, Channel, frame, wait
from paceline.launch.gather import (
    FROM_HOST,
    SENT,
    Arrivals,
    Follower,
    file_frames,
    missing_files,
    receive,
    sha256_of,
    write_piece,
)
from paceline.launch.ssh import disk_fix
from paceline.rundir import RunDir, append_event, append_json_line, read_json_lines, write_atomic


@contextmanager
def connected():
    """Two channels, each the other end of the other."""
    (in_a, out_b), (in_b, out_a) = os.pipe(), os.pipe()
    try:
        yield Channel(in_a, out_a), Channel(in_b, out_b)
    finally:
        for fd in (in_a, out_b, in_b, out_a):
            with_no_error(fd)


def with_no_error(fd: int) -> None:
    try:
        os.close(fd)
    except OSError as error:
        assert error.errno == errno.EBADF  # the test has closed it


def received(*channels, until) -> list:
    """Returns the frames that arrive at the first channel until one of them ends it; the others only send."""
    frames = []
    while not frames or not until(frames[-1][0]):
        wait(channels, 5.0)
        frames += channels[0].read()
        assert not channels[0].ended
    return frames


def arrive(near, far, arrivals) -> Iterator[tuple[str, bool]]:
    """What the far end has ready arrives at the near one; yields the file of each piece, and whether it is the last one."""
    far.send_behind([frame({"event": "end"})])
    for line, data in received(near, far, until=lambda line: line.get("event") == "end"):
        if "file" in line:
            arrivals.take(line, data, host="bob")
            yield line["file"], line["last"]


def run_folder(path) -> RunDir:
    (path / "logs" / "1").mkdir(parents=True)
    return RunDir(path)


def test_known_hashes_hold_until_a_file_changes(tmp_path):
    known, path = tmp_path / ".hashes.json", tmp_path / "a.bin"
    path.write_bytes(b"first")
    files = {"a.bin": sha256_of(path)}
    assert missing_files(tmp_path, files, known) == [] and list(json.loads(known.read_text())) == ["a.bin"]
    made = path.stat().st_mtime_ns
    path.write_bytes(b"other")
    os.utime(path, ns=(made, made))
    assert missing_files(tmp_path, files, known) == []  # the file was not read
    os.utime(path, ns=(made, made + 1))
    assert missing_files(tmp_path, files, known) == ["a.bin"]
    path.write_bytes(b"first")
    known.write_text("no json")
    assert missing_files(tmp_path, files, known) == []
    path.unlink()
    assert missing_files(tmp_path, files, known) == ["a.bin"]


def test_a_line_overtakes_a_large_file(tmp_path):
    (tmp_path / "large").write_bytes(os.urandom(40 * PIECE_BYTES))
    with connected() as (here, there):
        there.send_behind(file_frames(tmp_path / "large", "samples/large"))
        there.send({"event": "alive"})
        frames = received(here, there, until=lambda line: line.get("last"))
    kinds = ["line" if "event" in line else "piece" for line, _ in frames]
    assert kinds.count("piece") == 40 and kinds.index("line") < 5  # what was in the pipe before it goes first
    assert b"".join(data for line, data in frames if "file" in line) == (tmp_path / "large").read_bytes()


def test_frames_survive_any_cut_and_what_is_no_frame_is_passed_over():
    sent = [({"event": "a"}, b""), ({"file": "progress/1", "last": True}, b'{"x": 1}\n{'), ({"event": "b"}, b"")]
    text = b"torch prints this\n" + b"".join(frame(line, data) for line, data in sent)
    for size in (1, 2, 7, 50, len(text)):
        fd_in, fd_out = os.pipe()
        channel, frames = Channel(fd_in, os.dup(fd_out)), []
        for start in range(0, len(text), size):
            os.write(fd_out, text[start : start + size])
            frames += channel.read()
        os.close(fd_out)
        assert [({k: v for k, v in line.items() if k != "bytes"}, data) for line, data in frames] == sent


def test_the_end_of_the_other_end_is_noticed_and_nothing_waits_for_it():
    with connected() as (here, there):
        os.close(there.fd_in)
        here.send({"event": "lost"})
        assert not here.has_more
        os.close(there.fd_out)
        here.read()
        assert here.ended


def test_what_ranks_write_arrives_under_the_same_names(tmp_path):
    there, here = run_folder(tmp_path / "there"), run_folder(tmp_path / "here")
    with connected() as (near, far):
        follower, arrivals = Follower(there, far), Arrivals(here, on_no_space=pytest.fail)
        append_event(here, "launch")
        beat = HeartbeatWriter(there, 3)

        def pass_on():
            follower.hurry(1)
            follower.scan(1)
            list(arrive(near, far, arrivals))

        there.rank_log(1, 3).write_text("first\n")
        append_event(there, "memory", rank=3)
        beat.beat(4, "forward")
        pass_on()
        assert here.rank_log(1, 3).read_text() == "first\n"
        assert [event["event"] for event in read_json_lines(here.events)] == ["launch", "memory"]
        assert read_heartbeat(here.progress(3)).position == "forward of step 5"

        with there.rank_log(1, 3).open("a") as log:
            log.write("second\n")
        there.launch_log(1, "bob").write_text("of the agent\n")
        there.logs(1).joinpath("3.pid").write_text("4711\n")  # of another host: it would be taken for one of this
        beat.beat(5, "reduce")
        append_json_line(there.metrics, {"step": 1, "loss": 2.0})
        append_json_line(there.metrics, {"step": 2, "loss": 1.5})
        pass_on()
        there.events.unlink()  # as before each attempt
        follower.skip()
        write_atomic(there.metrics, json.dumps({"step": 1, "loss": 2.0}) + "\n")  # the attempt begins before step 2
        append_event(there, "checkpoint", step=1)
        pass_on()
        assert here.rank_log(1, 3).read_text() == "first\nsecond\n"
        assert here.launch_log(1, "bob").read_text() == "of the agent\n"
        assert not here.logs(1).joinpath("3.pid").exists()
        assert [line["step"] for line in read_json_lines(here.metrics)] == [1]
        assert [event["event"] for event in read_json_lines(here.events)] == ["launch", "memory", "checkpoint"]
        assert read_heartbeat(here.progress(3)).position == "reduce of step 6"


def test_a_broken_link_catches_up_from_where_it_was(tmp_path):
    there, here = run_folder(tmp_path / "there"), run_folder(tmp_path / "here")
    there.rank_log(1, 0).write_text("what arrived\nwhat did not\n")
    here.rank_log(1, 0).write_text("what arrived\n")
    with connected() as (near, far):
        size = here.rank_log(1, 0).stat().st_size
        Follower(there, far).catch_up({"logs/1/0.log": size, "logs/1/9.log": 5})
        list(arrive(near, far, Arrivals(here, on_no_space=pytest.fail)))
    assert here.rank_log(1, 0).read_text() == there.rank_log(1, 0).read_text()


def test_the_copy_of_an_earlier_attempt_changes_neither_plan_nor_steps_and_repeats_no_event(tmp_path):
    there, here = run_folder(tmp_path / "there"), run_folder(tmp_path / "here")
    for run, text in ((there, "of the plan before"), (here, "of the plan that follows")):
        run.plan_json.write_text(text)
    append_event(here, "launch")
    append_event(there, "memory", rank=1)
    here.events.write_text(here.events.read_text() + there.events.read_text())
    append_event(there, "checkpoint", step=9)  # was not received
    append_json_line(there.metrics, {"step": 9, "loss": 2.0})
    with connected() as (near, far):
        Follower(there, far).catch_up({})
        list(arrive(near, far, Arrivals(here, on_no_space=pytest.fail)))
    assert here.plan_json.read_text() == "of the plan that follows" and not here.metrics.exists()
    assert [event["event"] for event in read_json_lines(here.events)] == ["launch", "memory", "checkpoint"]


def test_a_file_of_which_a_piece_did_not_fit_does_not_appear(tmp_path):
    path = tmp_path / "text"
    write_piece(path, {"file": "text", "first": True, "last": False}, b"one ")
    path.with_name("text.part").unlink()  # as where the disk was full for the second piece
    write_piece(path, {"file": "text", "first": False, "last": True}, b"three")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named_with_the_disk_to_look_at(tmp_path):
    path = tmp_path / "data" / "train.bin"
    with pytest.raises(OSError) as error:
        write_piece(path, {"file": "text/train.bin", "first": True, "last": True}, b"one")
    assert error.value.filename == str(path)
    assert disk_fix("me@bob", f"No space left on device: {path}") == f"ssh me@bob df -h {tmp_path}/data"
    assert disk_fix("bob", "No space left on device") == "ssh bob 'df -h ${XDG_CACHE_HOME:-~/.cache}'"


def test_a_checkpoint_part_comes_whole_and_before_the_json_that_says_so(tmp_path):
    there, here = run_folder(tmp_path / "there"), run_folder(tmp_path / "here")
    folder = there.checkpoints / ".step_000010.1-1.tmp"
    folder.mkdir(parents=True)
    tensors = folder / "shard_00001_of_00002.safetensors"
    tensors.write_bytes(os.urandom(3 * PIECE_BYTES + 17))
    with connected() as (near, far):
        follower, arrivals = Follower(there, far), Arrivals(here, on_no_space=pytest.fail)
        follower.scan(1)
        assert not far.has_more  # it is still being written
        write_atomic(tensors.with_suffix(".json"), "{}")
        follower.scan(1)
        names = []
        for name, is_last in arrive(near, far, arrivals):
            names.append(name)
            assert (here.path / name).exists() == is_last  # never under its name before it is whole
    assert [name.rsplit(".", 1)[1] for name in names] == 4 * ["safetensors"] + ["json"]
    files = {tensors.name: sha256_of(tensors)}
    copy = here.checkpoints / folder.name
    assert missing_files(copy, files) == [] and missing_files(copy, {"other": "0"}) == ["other"]


def test_what_a_broken_link_has_left_of_a_file_is_replaced(tmp_path):
    run, name = RunDir(tmp_path / "run"), "samples/text"
    pieces = [(b"half of ", False), (b"the text", True)]
    receive(run, {"file": name, "last": False, "first": True}, b"half of an older one", allowed=FROM_HOST)
    for number, (data, is_last) in enumerate(pieces):
        receive(run, {"file": name, "last": is_last, "first": number == 0}, data, allowed=FROM_HOST)
    assert (run.path / name).read_text() == "half of the text"


@pytest.mark.parametrize("name", [
    "../evil", "/etc/passwd", "config.toml", "logs/1/../../evil.log", "logs/x/0.log", "progress/../x", "checkpoints/x", "lock",
    "checkpoints/step_000010/manifest.json", "events.jsonl/x", "", "logs/1/0.log\n", "health/..",
])  # fmt: skip
def test_a_host_cannot_write_what_no_rank_writes(tmp_path, name):
    with pytest.raises(ValueError, match="a file that no run has"):
        receive(RunDir(tmp_path / "run"), {"file": name, "last": True}, b"x", allowed=FROM_HOST)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["events.jsonl", "logs/1/0.log", "../config.toml", "tokenizer/../../x", "history/x.jsonl"]
)
def test_a_supervisor_cannot_write_elsewhere_on_a_host(tmp_path, name):
    with pytest.raises(ValueError, match="a file that no run has"):
        receive(RunDir(tmp_path / "run"), {"file": name, "last": True}, b"x", allowed=SENT)


def test_a_part_that_a_host_has_no_room_for_arrives_with_the_name_of_the_host(tmp_path):
    arrivals = Arrivals(run_folder(tmp_path), on_no_space=pytest.fail)
    name = "checkpoints/.step_000010.1-1.tmp/shard_00001_of_00002"
    arrivals.take({"file": f"{name}.full", "last": True}, b"", host="bob")
    assert (tmp_path / f"{name}.full").read_text() == "bob"


def test_a_line_of_an_alive_host_is_longer_than_a_packet():
    with connected() as (here, there):
        there.send_alive({"event": "alive"})
        [(line, data)] = received(here, there, until=lambda line: line["event"] == "alive")
    assert line["event"] == "alive" and len(data) >= 9000


def test_events_that_are_sent_again_in_several_pieces_stand_once(tmp_path):
    run = run_folder(tmp_path)
    for number in range(40):
        append_event(run, "note", text=str(number))
    records = run.events.read_bytes().splitlines(keepends=True)
    arrivals = Arrivals(run, on_no_space=pytest.fail)
    new = b'{"event": "note", "text": "new"}\n'
    for number, piece in enumerate((records[:20], [*records[20:], new])):
        line = {"file": "events.jsonl", "first": number == 0, "last": number == 1, "grows": True, "new": False}
        arrivals.take(line, b"".join(piece), host="bob")
    assert run.events.read_bytes() == b"".join(records) + new


def test_a_run_folder_that_has_vanished_is_not_made_again(tmp_path):
    arrivals = Arrivals(RunDir(tmp_path / "run"), on_no_space=pytest.fail)
    arrivals.take({"file": "progress/1", "last": True}, b"beat", host="bob")
    assert list(tmp_path.iterdir()) == []


FULL_DISK = """
import os, sys
from pathlib import Path
from paceline.launch.gather import Arrivals
from paceline.rundir import RunDir
notes = []
run = RunDir(Path(sys.argv[1]))
run.path.mkdir()
arrivals = Arrivals(run, on_no_space=notes.append)
name = "checkpoints/.step_000010.1-1.tmp/shard_00001_of_00002.safetensors"
for number in range(3):
    arrivals.take({"file": name, "first": number == 0, "last": number == 2}, os.urandom(100_000), host="bob")
arrivals.take({"file": "progress/1", "last": True}, b"beat", host="bob")
assert notes == [name], notes
assert sorted(path.name for path in (run.path / name).parent.iterdir()) == ["shard_00001_of_00002.full"]
assert (run.path / "progress/1").read_bytes() == b"beat"
print("went on")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="a small file system needs root")
def test_a_full_disk_gives_a_checkpoint_up_and_not_the_run(tmp_path):
    script = f"mount -t tmpfs -o size=256k tmpfs {tmp_path} && exec {sys.executable} -c '{FULL_DISK}' {tmp_path}/run"
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "went on\n", done.stderr
