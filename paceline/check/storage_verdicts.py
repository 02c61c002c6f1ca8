"""
Verdicts on disks and on what lies there: the run folder, the cache, the text, the tokenizer.
"""

from collections.abc import Iterator
from typing import Any

from paceline.check.ask import Ask
from paceline.check.verdict import Facts, Seen, Verdict, at
from paceline.units import MIB, format_bytes

SLOW_BYTES_PER_S = 50e6
FEW_INODES = 1000
NO_ROOM = MIB  # not even for logs
SMALL_TMP = 256 * MIB
PLACES = (("run_dir", "the run folder", "--runs-dir ~/runs"), ("cache", "the cache", "--cache-dir ~/.cache/paceline"))


def is_unwritable(facts: Facts, ask: Ask) -> Iterator[Seen]:
    for key, name, fix in (*PLACES, ("tmp", "the folder for temporary files", "export TMPDIR=~")):
        place = at(facts, f"storage.{key}")
        full = key == "run_dir" and has_no_room(place)  # disk-full says it better
        readable = key == "cache" and at(facts, "text.prepared")  # what is prepared is only read
        if place and place.get("writable") is False and not full:
            yield Seen(
                f"{name} {place['path']} cannot be written: {place.get('error') or 'no permission'}",
                fix,
                (f"storage.{key}",),
                "warn" if key == "tmp" or readable or (ask.command == "check" and ask.run_dir is None) else None,
            )


def has_no_room(place: Any) -> bool:
    free = at(place, "free_bytes")
    return free is not None and free < NO_ROOM


def is_full(facts: Facts, ask: Ask) -> Iterator[Seen]:
    place = at(facts, "storage.run_dir")
    if not place or place.get("free_bytes") is None:
        return
    free, each = place["free_bytes"], ask.checkpoint_bytes or 0
    number = checkpoints_at_once(ask, ask.num_checkpoints or 1)
    if has_no_room(place) and place.get("writable") is False:
        yield Seen(f"{place['path']} has {format_bytes(free)} free", "--runs-dir ~/runs", ("storage.run_dir",))
        return
    if free >= each * number:
        return
    kept = (ask.config or {}).get("keep_last") or 1
    least = checkpoints_at_once(ask, (ask.num_checkpoints or 1) - kept + 1)  # with keep_last 1
    fix = "--keep-last 1" if free >= each * least and least < number else "--runs-dir ~/runs"
    yield Seen(
        f"{place['path']} has {format_bytes(free)} free, {number} checkpoints of {format_bytes(each)} need"
        f" {format_bytes(each * number)}",
        fix,
        ("storage.run_dir",),
    )


def checkpoints_at_once(ask: Ask, wanted: int) -> int:
    """At most as many as the run makes."""
    every = (ask.config or {}).get("save_every")
    if every is None or not ask.num_steps:
        return wanted
    return min(wanted, -(-ask.num_steps // every) if every else 1)


def is_slow(facts: Facts, ask: Ask) -> Iterator[Seen]:
    place = at(facts, "storage.run_dir")
    speed = (place or {}).get("write_bytes_per_s")
    if place and speed and speed < SLOW_BYTES_PER_S:
        seconds = f", a checkpoint takes {ask.checkpoint_bytes / speed:.0f} s" if ask.checkpoint_bytes else ""
        yield Seen(
            f"{place['path']} is written at {speed / 1e6:.0f} MB/s{seconds}", "--runs-dir ~/runs", ("storage.run_dir",)
        )


def lacks_inodes(facts: Facts, ask: Ask) -> Iterator[Seen]:
    for key, name, fix in PLACES:
        place = at(facts, f"storage.{key}")
        free = (place or {}).get("free_inodes")
        if (
            place
            and free is not None
            and 0 <= free < FEW_INODES
            and place.get("filesystem") not in ("btrfs", "overlay")
        ):
            yield Seen(f"{name} {place['path']} has {free} free inodes", fix, (f"storage.{key}",))


def is_on_network(facts: Facts, ask: Ask) -> Iterator[Seen]:
    place = at(facts, "storage.cache")
    if place and place.get("network"):
        yield Seen(
            f"token shards are on a network file system ({place.get('filesystem')}): {place['path']}",
            "--cache-dir /tmp/paceline",
            ("storage.cache",),
        )


def tmp_is_small(facts: Facts, ask: Ask) -> Iterator[Seen]:
    place = at(facts, "storage.tmp")
    free = (place or {}).get("free_bytes")
    if place and free is not None and free < SMALL_TMP:
        yield Seen(f"{place['path']} has {format_bytes(free)} free", "export TMPDIR=~", ("storage.tmp",))


def text_is_missing(facts: Facts, ask: Ask) -> Iterator[Seen]:
    if at(facts, "text.exists") is False:
        yield Seen(f"there is no text {at(facts, 'text.data')}", "--data builtin", ("text.data", "text.exists"))


def text_is_unreadable(facts: Facts, ask: Ask) -> Iterator[Seen]:
    error = at(facts, "text.error")
    if error and at(facts, "text.exists") is not False:
        yield Seen(f"{at(facts, 'text.data')}: {error}", "--data builtin", ("text.data", "text.error"))


def text_is_empty(facts: Facts, ask: Ask) -> Iterator[Seen]:
    if at(facts, "text.exists") and at(facts, "text.bytes") == 0 and not at(facts, "text.error"):
        yield Seen(f"{at(facts, 'text.data')} holds 0 bytes of text", "--data builtin", ("text.data", "text.bytes"))


def tokenizer_is_missing(facts: Facts, ask: Ask) -> Iterator[Seen]:
    tokenizer = at(facts, "text.tokenizer")
    if tokenizer and (tokenizer.get("exists") is False or tokenizer.get("error")):
        why = "is not there" if tokenizer.get("exists") is False else f"cannot be used: {tokenizer['error']}"
        yield Seen(f"the tokenizer {tokenizer['path']} {why}", "--tokenizer auto", ("text.tokenizer",))


def vocabulary_differs(facts: Facts, ask: Ask) -> Iterator[Seen]:
    own = at(facts, "text.tokenizer.vocab_size")
    asked = (ask.config or {}).get("vocab_size") if "vocab_size" in ask.set_keys else None
    if own and asked and own != asked:
        yield Seen(
            f"vocab_size is {asked:,}, the tokenizer {at(facts, 'text.tokenizer.path')} has {own:,}",
            f"--vocab-size {own}",
            ("text.tokenizer",),
        )


def shards_are_stale(facts: Facts, ask: Ask) -> Iterator[Seen]:
    if at(facts, "text.prepared") is False and at(facts, "text.exists") and ask.command == "check":
        data = at(facts, "text.data")
        yield Seen(
            f"{data} ({format_bytes(at(facts, 'text.bytes') or 0)}) is not prepared, or has changed since",
            f"paceline data prepare --data {data}",
            ("text.prepared",),
        )


VERDICTS = (
    Verdict("folder-unwritable", "stop", look=is_unwritable,
            cause="The run folder or the cache cannot be written.",
            why="nothing could be kept",
            fix="Another place."),
    Verdict("disk-full", "stop", look=is_full,
            cause="The disk has no room for the checkpoints that are kept at one time: keep_last, the best, and the one "
                  "being written.",
            why="a checkpoint fails in mid-run",
            fix="Another place, or fewer checkpoints."),
    Verdict("disk-slow", "warn", look=is_slow,
            cause="The disk is written at under 50 MB/s.",
            why="checkpoints take long; while one is written the next has to wait",
            fix="Another place."),
    Verdict("disk-no-inodes", "warn", look=lacks_inodes,
            cause="The file system is running out of inodes.",
            why="files cannot be made, whatever space is free",
            fix="Another place."),
    Verdict("cache-on-network", "note", look=is_on_network,
            cause="Token shards lie on a network file system.",
            why="rows are read from it at random at every step",
            fix="A local disk."),
    Verdict("tmp-small", "warn", look=tmp_is_small,
            cause="The folder for temporary files is nearly full.",
            why="compilers and launchers write there",
            fix="Another TMPDIR."),
    Verdict("text-missing", "stop", look=text_is_missing,
            cause="The text to train on is not there.",
            why="there is nothing to train on",
            fix="Give a file or folder that is there, or the built-in text."),
    Verdict("text-unreadable", "stop", look=text_is_unreadable,
            cause="The text is there and cannot be read.",
            why="there is nothing to train on",
            fix="Mend it, or another text."),
    Verdict("text-empty", "stop", look=text_is_empty,
            cause="The text is there and empty.",
            why="there is nothing to train on",
            fix="Another text."),
    Verdict("tokenizer-missing", "stop", look=tokenizer_is_missing,
            cause="The tokenizer is not there, or is no tokenizer.json.",
            why="the text cannot be cut into tokens",
            fix="Give one that is, or leave it out: one is trained on the text."),
    Verdict("vocabulary-differs", "warn", look=vocabulary_differs,
            cause="vocab_size is set, and the tokenizer has another one.",
            why="the tokenizer's counts, the key does nothing",
            fix="Leave vocab_size out."),
    Verdict("text-not-prepared", "note", look=shards_are_stale,
            cause="There are no token shards of this text yet, or it has changed since.",
            why="the first launch prepares it before the workers start",
            fix="Prepare it now."),
)  # fmt: skip
