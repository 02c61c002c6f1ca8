"""Who keeps the copy of a checkpoint, and what happens when a host cannot."""

import os
from contextlib import contextmanager

import pytest

from paceline.launch.channel import Channel
from paceline.launch.copies import Copies
from paceline.launch.hosts import HostEntry
from paceline.launch.member import Member
from paceline.launch.train import adopt_copy
from paceline.model.manifest import FileEntry, Manifest, encode_manifest
from paceline.rundir import RunDir, RunInUse, append_event, lock_run


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
    manifest = Manifest(step, 2, "2026-11-23T00:00:00.000Z", "0", "0", None, {"shard": FileEntry(1, "0")}, {}, {})
    (folder / "manifest.json").write_text(encode_manifest(manifest))


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
