"""Who keeps the copy of a checkpoint, and what happens when a host cannot."""

import hashlib
import os
import shutil
from contextlib import contextmanager

import pytest

from paceline.errors import PacelineError
from paceline.launch.background import adopt_copy
from paceline.launch.channel import Channel, wait
from paceline.launch.cluster import Cluster
from paceline.launch.copies import Copies
from paceline.launch.hosts import HostEntry
from paceline.launch.member import Member
from paceline.launch.remote import FarEnd
from paceline.model.manifest import FileEntry, Manifest, UnreadableCheckpoint, encode_manifest
from paceline.rundir import RunDir, RunInUse, append_event, lock_run

SHARDS = {f"shard_{rank:05d}_of_00002.safetensors": os.urandom(200_000) for rank in range(2)}  # more than a pipe holds


@contextmanager
def linked(name: str, *, first_rank: int):
    """A host without a shared disk, and the other end of its link."""
    (in_a, out_b), (in_b, out_a) = os.pipe(), os.pipe()
    member = Member(HostEntry(name), 1, first_rank=first_rank, channel=Channel(in_a, out_a), shared=False)
    try:
        yield member, Channel(in_b, out_b)
    finally:
        for fd in (in_a, out_b, in_b, out_a):
            os.close(fd)


def checkpoint(run: RunDir, step: int) -> None:
    folder = run.checkpoints / f"step_{step:06d}"
    folder.mkdir(parents=True)
    for name, content in SHARDS.items():
        (folder / name).write_bytes(content)
    entries = {name: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for name, data in SHARDS.items()}
    manifest = Manifest(step, 2, "2026-11-23T00:00:00.000Z", "0", "0", None, entries, {}, {})
    (folder / "manifest.json").write_text(encode_manifest(manifest))


@pytest.fixture
def far(tmp_path):
    """A run here, a real far end, the member that leads to it, and a function that lets both ends read and write once."""
    run, copy = RunDir(tmp_path / "here"), RunDir(tmp_path / "there")
    run.path.mkdir()
    append_event(run, "launch")
    with linked("bob", first_rank=1) as (member, channel):
        end = FarEnd(channel)
        end.run = copy

        def turn() -> list[dict]:
            wait([member.channel, channel], 0.05)
            for line, content in channel.read():
                end.obey(line, content)
            while end.pending and end.pending[0][0].done():
                future, then = end.pending.pop(0)
                then(future.result())
            return [line for line, _ in member.channel.read()]

        yield run, end, member, turn
        end.pool.shutdown()


def orders(end: Channel) -> list[dict]:
    return [line for line, _ in end.read() if line.get("do") == "saved"]


def files(end: Channel) -> list[str]:
    return [line["file"] for line, _ in end.read() if "file" in line]


def test_the_host_of_the_copy_has_the_history_before_the_first_checkpoint_too(tmp_path):
    run = RunDir(tmp_path)
    append_event(run, "launch")
    here = Member(HostEntry("localhost"), 1, "ada")
    with linked("bob", first_rank=1) as (bob, bob_end), linked("cem", first_rank=2) as (cem, cem_end):
        copies, members = Copies(run), [here, bob, cem]
        for _ in range(2):
            append_event(run, "attempt", attempt=1)
            copies.follow(members, keep_last=1)
            copies.follow(members, keep_last=1)
            assert files(bob_end) == ["history/events.jsonl"]
        assert files(cem_end) == []


def test_no_copy_is_given_up_where_the_checkpoints_here_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.launch.cluster.SEND_S", 0.1)  # for an answer, if it asks
    run = RunDir(tmp_path)
    checkpoint(run, 4)
    shard = run.checkpoints / "step_000004" / "shard_00000_of_00002.safetensors"
    with linked("bob", first_rank=1) as (member, far):
        cluster = Cluster([], None, nproc=1)
        cluster.run, cluster.members = run, [member]
        shard.unlink()
        with pytest.raises(PacelineError, match="no good checkpoint"):
            cluster.settle()
        shard.symlink_to(shard)
        with pytest.raises(UnreadableCheckpoint):
            cluster.settle()
        assert not member.channel.has_more and not list(far.read())


def test_one_other_host_is_asked_for_a_copy_of_each_new_checkpoint_and_may_be_unable(tmp_path):
    run = RunDir(tmp_path)
    append_event(run, "launch")
    here = Member(HostEntry("localhost"), 1)
    with linked("bob", first_rank=1) as (bob, bob_end), linked("cem", first_rank=2) as (cem, cem_end):
        copies, members = Copies(run), [here, bob, cem]
        for step in (999_990, 1_000_000):  # the names of steps sort by their number, not as text
            checkpoint(run, step)
            copies.follow(members, keep_last=1)
            copies.follow(members, keep_last=1)
            [order], [other] = orders(bob_end), orders(cem_end)
            assert order["folder"] == f"step_{step}" and order["manifest"] and other["manifest"] is None
            assert copies.unfinished and not copies.give_up(cem)
            if step == 999_990:
                copies.confirm(order["folder"])
        assert copies.give_up(bob) and not copies.unfinished  # nobody waits for a copy that does not come


def test_the_history_of_a_copy_is_adopted_only_once_its_run_has_ended(tmp_path):
    run = RunDir(tmp_path / "copy")
    (run.path / "history").mkdir(parents=True)
    (run.path / "history" / "metrics.jsonl").write_text('{"step": 2}\n')
    run.metrics.write_text('{"step": 4}\n')
    lock = lock_run(run)  # as the host of the copy does while the run goes on
    with pytest.raises(RunInUse):
        adopt_copy(run)
    assert run.metrics.read_text() == '{"step": 4}\n'
    os.close(lock)
    adopt_copy(run)
    assert run.metrics.read_text() == '{"step": 2}\n' and not (run.path / "history").exists()


def test_a_copy_is_ordered_when_the_one_before_it_is_complete_and_of_the_newest_checkpoint_alone(tmp_path):
    run = RunDir(tmp_path)
    append_event(run, "launch")
    with linked("bob", first_rank=1) as (bob, bob_end), linked("cem", first_rank=2) as (cem, cem_end):
        copies, members = Copies(run), [Member(HostEntry("localhost"), 1), bob, cem]
        for step in (10, 20, 30):
            checkpoint(run, step)
            copies.follow(members, keep_last=1)
        # bob removes its part of the superseded checkpoint, cem those of all three
        assert [(order["folder"], order["manifest"] is None) for order in orders(bob_end)] == [
            ("step_000010", False),
            ("step_000020", True),
        ]
        assert [order["folder"] for order in orders(cem_end)] == ["step_000010", "step_000020", "step_000030"]
        copies.confirm("step_000010")
        copies.follow(members, keep_last=1)
        assert [order["folder"] for order in orders(bob_end)] == ["step_000030"]
        copies.confirm("step_000030")
        assert not copies.unfinished


def order_copy(run, member, turn):
    """Orders the copy of a checkpoint of step 10; also returns the answer, which lists the files that the other host lacks."""
    copies = Copies(run)
    checkpoint(run, 10)
    copies.follow([Member(HostEntry("localhost"), 1), member], keep_last=1)
    while not (lacks := [line for line in turn() if line["event"] == "lacks"]):
        pass
    return copies, lacks[0]


def test_a_copy_is_completed_although_its_checkpoint_is_removed_here_meanwhile(far):
    run, end, member, turn = far
    copies, lacks = order_copy(run, member, turn)
    copies.send(member, lacks)
    shutil.rmtree(run.checkpoints / "step_000010")
    while "copied" not in [line["event"] for line in turn()]:
        pass
    assert {path.name for path in (end.run.checkpoints / "step_000010").iterdir()} == {*SHARDS, "manifest.json"}


def test_a_copy_whose_checkpoint_was_removed_before_it_was_sent_is_not_expected(far):
    run, _, member, turn = far
    copies, lacks = order_copy(run, member, turn)
    shutil.rmtree(run.checkpoints / "step_000010")
    copies.send(member, lacks)
    assert not copies.unfinished


def test_a_copy_that_is_given_up_leaves_nothing_and_its_late_files_are_ignored(far):
    run, end, member, turn = far
    lacking, copied = [], []
    for step in (10, 20):  # the files of the first are on their way when the second is ordered
        checkpoint(run, step)
        copies = Copies(run)
        copies.follow([Member(HostEntry("localhost"), 1), member], keep_last=1)
        while f"step_{step:06d}" not in lacking:
            for line in turn():
                if line["event"] == "lacks":
                    lacking.append(line["of"])
                    copies.send(member, line)
    while not copied:
        copied += [line["folder"] for line in turn() if line["event"] == "copied"]
    assert (lacking, copied) == (["step_000010", "step_000020"], ["step_000020"])
    assert [path.name for path in end.run.checkpoints.iterdir()] == ["step_000020"]
