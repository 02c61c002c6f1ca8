"""What a script saves below PACELINE_RUN on hosts without a shared disk: how it is listed, and what is said where it differs."""

import os
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from paceline.launch import script_copy
from paceline.launch.hosts import HostEntry
from paceline.launch.member import Member
from paceline.launch.script_copy import saved_files
from paceline.launch.sync import ScriptHosts
from paceline.rundir import RunDir, append_event

STEP_20, STEP_177 = (7, 1000.0), (8, 1204.0)


def write(run: RunDir, name: str, text: str = "", at: float = 1000.0) -> None:
    path = run.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at, at))


def test_only_what_the_script_saved_is_listed(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    for name in ("config.toml", "logs/1/0.log", ".lock", "ck.pt", "out/logs/a.txt", "out/half.part"):
        write(run, name, "x")
    (tmp_path / "link.pt").symlink_to("ck.pt")
    assert saved_files(run) == {"ck.pt": (1, 1000.0), "out/logs/a.txt": (1, 1000.0)}
    monkeypatch.setattr(script_copy, "MAX_SAVED", 1)
    assert len(saved_files(run)) == 1
    assert saved_files(RunDir(tmp_path / "gone")) == {}


def differences(tmp_path, ada: dict, bob: dict, *, first: str = "ada", clock_s: float = 0.0) -> list[str]:
    """Returns what is said before an attempt of two hosts that have saved these files."""
    members = [Member(HostEntry(name), 1) for name in sorted(("ada", "bob"), key=lambda name: name != first)]
    files = {"ada": ada, "bob": bob}
    for member in members:
        member.shared, member.folder, member.clock_s = False, f"/cache/{member.name}", clock_s * (member.name == "bob")

    def answers(asked: Sequence[Member], event: str, **_: object) -> dict[Member, dict]:
        return {member: {"files": files[member.name]} for member in asked}

    cluster = SimpleNamespace(answers=answers, members=members)
    return list(ScriptHosts(cluster, None, {}, RunDir(tmp_path), show=list).differences(members))


def test_a_file_that_differs_between_hosts_is_named_with_the_command_that_copies_the_newest(tmp_path):
    [text] = differences(tmp_path, {"ck.pt": STEP_20}, {"ck.pt": STEP_177})
    assert text.startswith("ck.pt on ada is of ") and ", and on bob of " in text
    assert text.endswith("each rank reads that of its own host (scp -3p bob:/cache/bob/ck.pt ada:/cache/ada/ck.pt)")
    [text] = differences(tmp_path, {"a": STEP_177, "b": STEP_20}, {"a": STEP_20, "b": STEP_177})
    assert " and 1 more on " in text


@pytest.mark.parametrize(("bob", "clock_s"), [
    ({"ck.pt": (7, 1050.0)}, 0.0),  # ranks that saved together
    ({"ck.pt": (7, 4600.0)}, 3600.0),  # by a clock that is an hour ahead
    ({"ck.pt": STEP_20, "rank1.log": (99, 5000.0)}, 0.0),
])  # fmt: skip
def test_files_that_ranks_saved_together_or_for_themselves_are_no_difference(tmp_path, bob, clock_s):
    assert differences(tmp_path, {"ck.pt": STEP_20}, bob, clock_s=clock_s) == []


def test_a_file_of_rank_0s_host_alone_is_named(tmp_path):
    [text] = differences(tmp_path, {"ck.pt": STEP_20, "last": STEP_20}, {"rank1.log": STEP_20})
    assert text == "ck.pt and 1 more of ada alone: a rank on another host that reads it finds none"


def test_a_line_says_that_rank_0_is_on_another_host_than_before(tmp_path):
    append_event(RunDir(tmp_path), "attempt", attempt=1, nproc=1, world_size=2, pids=[], hosts={"ada": [0], "bob": [1]})
    assert differences(tmp_path, {}, {}) == []
    text = "rank 0 is on bob and was on ada: what it saved there stays there"
    assert differences(tmp_path, {}, {}, first="bob") == [text]
