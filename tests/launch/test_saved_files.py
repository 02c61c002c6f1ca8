"""What a script saves below PACELINE_RUN on hosts without a shared disk: sets of files over real pipes, and what is reported."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from rows import with_rows
from test_gather import arrive, connected

from paceline.launch.gather import Arrivals
from paceline.launch.hosts import HostEntry
from paceline.launch.member import Member
from paceline.launch.script_copy import REPLACED, SavedFiles, is_newer, saved_files, saved_path, take_saved
from paceline.launch.sync import ScriptHosts
from paceline.rundir import RunDir, read_json_lines

ORDER = {"files": {}, "clock_s": 0.0, "room": 1 << 20, "follows": False}


def write(run: RunDir, name: str, text: str, at: float = 1000.0) -> None:
    path = run.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at, at))


def texts(run: RunDir) -> dict[str, str]:
    return {name: (run.path / name).read_text() for name in sorted(saved_files(run))}


class Pair:
    """A supervisor's run folder, and a host's copy of it."""

    def __init__(self, folder: Path, near, far):
        self.here, self.there = RunDir(folder / "here"), RunDir(folder / "there")
        self.here.path.mkdir()
        self.there.path.mkdir()
        self.near, self.far = near, far
        self.saved, self.arrivals = (
            SavedFiles(self.there, far),
            Arrivals(self.here, on_no_space=pytest.fail, take_saved=take_saved),
        )

    def send(self, frames) -> None:
        self.far.send_behind(frames)
        assert list(arrive(self.near, self.far, self.arrivals)) is not None

    def exchange(self, **order) -> None:
        self.saved.exchange({**ORDER, "files": saved_files(self.here), **order})
        self.send(self.saved.frames)


@pytest.fixture
def pair(tmp_path):
    with connected() as (near, far):
        yield Pair(tmp_path, near, far)


@with_rows("version, other, expected", [
    ((3, 1000.0), None, True),
    ((3, 1010.0), (3, 1000.0), True),
    ((3, 1001.0), (3, 1000.0), False),  # clocks may differ by a second
    ((4, 1001.0), (3, 1000.0), True),
    ((4, 999.0), (3, 1000.0), False),
    ((3, 990.0), (3, 1000.0), False),
])  # fmt: skip
def test_which_version_of_a_file_is_newer(version, other, expected):
    assert is_newer(version, other) == expected


def test_the_newest_version_of_each_file_arrives_by_the_supervisors_clock_and_the_one_before_is_kept(pair):
    write(pair.here, "ck.pt", "step 20")
    write(pair.here, "best.pt", "of this host", at=2000.0)
    write(pair.there, "ck.pt", "step 177", at=1260.0)
    write(pair.there, "best.pt", "of the other", at=1060.0)
    write(pair.there, "out/model.pt", "new", at=1060.0)
    write(pair.there, "logs/1/0.log", "of the run itself")
    (pair.there.path / "link.pt").symlink_to(pair.there.path / "ck.pt")
    pair.exchange(clock_s=60.0)
    assert texts(pair.here) == {"best.pt": "of this host", "ck.pt": "step 177", "out/model.pt": "new"}
    assert saved_files(pair.here)["ck.pt"] == (8, 1200.0)
    assert (pair.here.path / REPLACED / "ck.pt").read_text() == "step 20"
    assert list(pair.saved.new_frames()) == [] and not list(pair.here.path.glob(".saved-*"))


def test_a_set_appears_when_it_is_whole_and_without_a_file_that_has_changed_meanwhile(pair):
    write(pair.there, "a.pt", "old a")
    write(pair.there, "b.pt", "old b", at=1001.0)
    pair.saved.exchange(ORDER)
    first, *others = pair.saved.new_frames()
    pair.send([first])
    assert texts(pair.here) == {}
    write(pair.there, "b.pt", "new b", at=1100.0)
    pair.send(others)
    assert texts(pair.here)["a.pt"] == "old a"
    pair.send(pair.saved.new_frames())
    assert texts(pair.here) == {"a.pt": "old a", "b.pt": "new b"}


def test_while_the_script_runs_a_folder_that_is_being_written_waits(pair):
    write(pair.there, "step-20/model.pt", "whole")
    write(pair.there, "step-30/model.pt", "whole")
    (pair.there.path / "step-30" / "optimizer.pt").write_text("ha")
    pair.saved.exchange(ORDER)
    pair.send(pair.saved.new_frames(is_running=True))
    assert texts(pair.here) == {"step-20/model.pt": "whole"}


def test_what_the_script_removes_goes_when_what_follows_it_has_arrived_and_not_before(pair):
    write(pair.there, "step-20.pt", "weights")
    pair.exchange()
    (pair.there.path / "step-20.pt").unlink()
    write(pair.there, "log.txt", "", at=1100.0)
    pair.send(pair.saved.new_frames())
    assert "step-20.pt" in texts(pair.here)
    write(pair.there, "step-30.pt", "weights", at=1200.0)
    pair.send(pair.saved.new_frames())
    assert texts(pair.here) == {"log.txt": "", "step-30.pt": "weights"}


def test_a_folder_that_cannot_be_read_is_not_one_that_was_removed(pair, monkeypatch):
    write(pair.there, "old/model.pt", "weights")
    pair.exchange()
    write(pair.there, "new/model.pt", "weights", at=1100.0)
    whole_walk = os.walk

    def walk(path, onerror=None):
        if onerror:
            onerror(OSError(errno.EIO, "Input/output error"))
        return [step for step in whole_walk(path) if Path(step[0]).name != "old"]

    monkeypatch.setattr(os, "walk", walk)
    frames = list(pair.saved.new_frames())
    monkeypatch.undo()
    pair.send(frames)
    assert list(texts(pair.here)) == ["new/model.pt", "old/model.pt"]


def test_a_run_folder_that_is_gone_removes_nothing_and_more_than_the_room_stays(pair):
    write(pair.there, "large.pt", "x" * 100)
    pair.exchange(room=99)
    assert texts(pair.here) == {}
    pair.exchange()
    pair.there.path.rename(pair.there.path.with_name("gone"))
    pair.saved.frames = pair.saved.new_frames()
    pair.saved.push()
    assert list(texts(pair.here)) == ["large.pt"]


@with_rows("name", [
    "../evil", "/etc/passwd", "config.toml", "logs/1/0.log", ".lock", "a/../../b", "", "a//b", "events.jsonl", "a\0b",
])  # fmt: skip
def test_a_host_cannot_replace_what_is_not_the_scripts(name):
    run = RunDir(Path("/nowhere/run"))
    assert saved_path(run, "out/model.pt") == run.path / "out/model.pt"
    with pytest.raises(ValueError, match="not a"):
        saved_path(run, name)


def differences(tmp_path, *, sync: bool, free: int = 1 << 40) -> list[str]:
    """Returns what is shown before an attempt, where bob has an old checkpoint and cem none."""
    run, lines = RunDir(tmp_path), []
    write(run, "ck.pt", "step 177", at=2000.0)
    bob, cem = (Member(HostEntry(name), 1) for name in ("bob", "cem"))
    cluster = SimpleNamespace(send_all=lambda members, is_over: None)
    hosts = ScriptHosts(cluster, None, {}, run, sync=sync, show=lines.extend)
    hosts.give({bob: {"files": {"ck.pt": [7, 1000.0]}, "free": free}, cem: {"files": {}, "free": free}}, lambda: False)
    notes = [f"note    {event['text']}" for event in read_json_lines(run.events)]
    assert notes == [line for line in lines if line.startswith("note")]
    return lines


def test_copies_that_differ_are_made_the_same_or_reported_with_hosts_and_files(tmp_path):
    assert differences(tmp_path, sync=True) == ["files   ck.pt sent to bob, 8 B", "files   ck.pt sent to cem, 8 B"]


@pytest.mark.parametrize("options, why", [
    ({"sync": False}, "--no-sync sends nothing"),
    ({"sync": True, "free": 10}, "8 B are too much to be sent"),
])  # fmt: skip
def test_copies_that_stay_different_are_reported(tmp_path, options, why):
    lines = differences(tmp_path, **options)
    assert lines == [f"note    ck.pt on {name} is not the newest, which is here: {why}" for name in ("bob", "cem")]
