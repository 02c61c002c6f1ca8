"""
Verdicts on the run: its config, the folders that it writes to, its text and its tokenizer.
"""

from collections.abc import Iterator
from typing import Any

from paceline.check.verdicts.rules import Case, Facts, Intent, Rule, Verdict, at
from paceline.errors import PlanError
from paceline.plan.algorithms import ALGORITHMS
from paceline.plan.planner import grad_accum_steps
from paceline.units import MIB, format_bytes


def batch_is_indivisible(facts: Facts, intent: Intent) -> Iterator[Case]:
    total, rows, length = intent.total_batch_size, intent.device_batch_size, intent.sequence_len
    if not total or not rows or not length or not intent.nproc:
        return
    try:
        grad_accum_steps(total, device_batch_size=rows, sequence_len=length, world_size=intent.nproc * intent.num_hosts)
    except PlanError as error:
        yield Case(error.message, error.fix)


def plan_is_impossible(facts: Facts, intent: Intent) -> Iterator[Case]:
    if intent.refused and not any(case.what == intent.refused[0] for case in batch_is_indivisible(facts, intent)):
        yield Case(*intent.refused)


def longer_than_the_run(*keys: str, times: int) -> Rule:
    """Returns the rule about intervals that are longer than the run. times: how often the proposed interval fits into it."""

    def rule(facts: Facts, intent: Intent) -> Iterator[Case]:
        for key in keys:
            every = (intent.config or {}).get(key)
            if key in intent.set_keys and every and intent.num_steps and every > intent.num_steps:
                what = f"{key} is {every:,}, the run has {intent.num_steps:,} steps"
                yield Case(what, f"--{key.replace('_', '-')} {max(1, intent.num_steps // times)}")

    return rule


def saves_too_rarely(facts: Facts, intent: Intent) -> Iterator[Case]:
    never = "save_every" in intent.set_keys and (intent.config or {}).get("save_every") == 0
    if never and intent.num_steps and intent.num_steps >= 1000:
        yield Case(f"save_every is 0, the run has {intent.num_steps:,} steps", "--save-every 250")


def warms_up_too_long(facts: Facts, intent: Intent) -> Iterator[Case]:
    config = intent.config or {}
    warmup = config.get("warmup_steps")
    if "warmup_steps" in intent.set_keys and warmup and intent.num_steps and 3 * warmup > intent.num_steps:
        yield Case(
            f"warmup_steps is {warmup:,}, a run of {intent.num_steps:,} steps warms up for at most a third of it",
            f"--warmup-steps {intent.num_steps // 3}",
        )


def length_is_set_twice(facts: Facts, intent: Intent) -> Iterator[Case]:
    config = intent.config or {}
    other = next(
        (key for key in ("num_steps", "epochs", "time") if key in intent.set_keys and config.get(key) is not None), None
    )
    if "tokens_per_param" in intent.set_keys and other:
        yield Case(
            f"tokens_per_param is {config.get('tokens_per_param')} and {other} is {config[other]}",
            f"--{other.replace('_', '-')} auto",
        )


def never_warms_down(facts: Facts, intent: Intent) -> Iterator[Case]:
    config = intent.config or {}
    if "final_lr_frac" in intent.set_keys and config.get("warmdown_ratio") == 0:
        yield Case(f"final_lr_frac is {config.get('final_lr_frac')}, and warmdown_ratio is 0", "--warmdown-ratio 0.65")


def keys_are_idle(facts: Facts, intent: Intent) -> Iterator[Case]:
    """Yields keys that have no effect, by how plan/algorithms.py, train/updates.py and train/loop.py read them."""
    config = intent.config or {}
    optimizer = config.get("optimizer", "")
    row = ALGORITHMS.get(optimizer)
    has_own_decay = row is not None and row.matrix_weight_decay is not None
    decaying = next(row.name for row in ALGORITHMS.values() if row.matrix_weight_decay is None)
    for key, idle, because, fix in (
        ("weight_decay", has_own_decay, f"optimizer is {optimizer}, with its own", f"--optimizer {decaying}"),
        ("warmdown_ratio", config.get("final_lr_frac") == 1, "final_lr_frac is 1", "--final-lr-frac 0.05"),
        (
            "keep_last",
            config.get("save_every") == 0,
            "save_every is 0: there is only one checkpoint",
            "--save-every 250",
        ),
        (
            "window_pattern",
            config.get("depth") == 1,
            "depth is 1, and the last layer attends to everything",
            "--depth 2",
        ),
    ):
        if key in intent.set_keys and idle and config.get(key) is not None:
            yield Case(f"{key} is {config[key]}, and {because}", fix)


def learning_rate_is_zero(facts: Facts, intent: Intent) -> Iterator[Case]:
    usual = {"matrix_lr": "auto", "embedding_lr": "0.3", "unembedding_lr": "0.008"}
    for key, value in usual.items():
        if (intent.config or {}).get(key) == 0:
            yield Case(f"{key} is 0", f"--{key.replace('_', '-')} {value}")


def checkpointing_on_a_cpu(facts: Facts, intent: Intent) -> Iterator[Case]:
    key = "activation_checkpointing"
    if key in intent.set_keys and (intent.config or {}).get(key) and intent.device == "cpu":
        yield Case("activation_checkpointing on a CPU", "--activation-checkpointing false")


def epochs_are_many(facts: Facts, intent: Intent) -> Iterator[Case]:
    epochs = (intent.config or {}).get("epochs")
    if epochs and epochs > 10:
        yield Case(f"{epochs:g} passes over the same text", "--epochs 4")


CONFIG_VERDICTS = (
    Verdict("plan-refused", "stop", rule=plan_is_impossible,
            cause="The config cannot be run on this machine.",
            why="the model or device does not exist, or the model does not fit on the device", fix="Follow the message."),
    Verdict("batch-indivisible", "stop", rule=batch_is_indivisible,
            cause="total_batch_size is not a multiple of the tokens in one micro-step of all processes.",
            why="a step cannot be divided into whole micro-steps", fix="Use one of the nearest multiples."),
    Verdict("interval-long", "note", rule=longer_than_the_run("eval_every", "save_every", "sample_every", times=4),
            cause="eval_every, save_every or sample_every is longer than the run.",
            why="it happens only once, at the end", fix="Use a shorter interval."),
    Verdict("log-rare", "warn", rule=longer_than_the_run("log_every", times=10),
            cause="log_every is longer than the run.",
            why="metrics.jsonl gets its first line at the end", fix="Use a shorter interval."),
    Verdict("save-never", "warn", rule=saves_too_rarely,
            cause="save_every is 0 in a long run.",
            why="a crash loses everything", fix="Save at an interval."),
    Verdict("warmup-long", "note", rule=warms_up_too_long,
            cause="warmup_steps is more than a third of the run.",
            why="it is shortened to a third", fix="Use a shorter warm-up."),
    Verdict("length-twice", "note", rule=length_is_set_twice,
            cause="tokens_per_param is set together with num_steps, epochs or time.",
            why="tokens_per_param then does not set the length, only the automatic batch size and the weight decay",
            fix="Remove one of them."),
    Verdict("warmdown-none", "note", rule=never_warms_down,
            cause="final_lr_frac is set, and there is no warm-down.",
            why="final_lr_frac has no effect", fix="Set a warm-down."),
    Verdict("key-idle", "note", rule=keys_are_idle,
            cause="A key has no effect because of another key.",
            why="it does not change any step", fix="Remove it, or change the other key."),
    Verdict("rate-zero", "warn", rule=learning_rate_is_zero,
            cause="A learning rate is 0.",
            why="those weights keep their initial values", fix="Set a rate above 0."),
    Verdict("checkpointing-on-cpu", "note", rule=checkpointing_on_a_cpu,
            cause="Activation checkpointing is on, and the device is a CPU.",
            why="it costs a third of the speed and saves memory that is not scarce", fix="Switch it off."),
    Verdict("epochs-many", "note", rule=epochs_are_many,
            cause="The run makes more than ten passes over the same text.",
            why="after about four passes, repeated tokens improve the model little (arXiv 2305.16264)",
            fix="Make fewer passes, or use more text."),
)  # fmt: skip


SLOW_BYTES_PER_S = 50e6
FEW_INODES = 1000
NO_ROOM = MIB  # not even for logs
SMALL_TMP = 256 * MIB
PLACES = (("run_dir", "the run folder", "--runs-dir ~/runs"), ("cache", "the cache", "--cache-dir ~/.cache/paceline"))


def folder_is_unwritable(facts: Facts, intent: Intent) -> Iterator[Case]:
    for key, name, fix in (*PLACES, ("tmp", "the folder for temporary files", "export TMPDIR=~")):
        place = at(facts, f"storage.{key}")
        full = key == "run_dir" and is_without_space(place)  # disk-full says it better
        readable = key == "cache" and at(facts, "text.prepared")  # what is prepared is only read
        if place and place.get("writable") is False and not full:
            yield Case(
                f"{name} {place['path']} cannot be written: {place.get('error') or 'no permission'}",
                fix,
                (f"storage.{key}",),
                "warn" if key == "tmp" or readable or (intent.command == "check" and intent.run_dir is None) else None,
            )


def is_without_space(place: Any) -> bool:
    free = at(place, "free_bytes")
    return free is not None and free < NO_ROOM


def disk_is_full(facts: Facts, intent: Intent) -> Iterator[Case]:
    place = at(facts, "storage.run_dir")
    if not place or place.get("free_bytes") is None:
        return
    free, one = place["free_bytes"], intent.checkpoint_bytes or 0
    number = checkpoints_at_once(intent, intent.num_checkpoints or 1)
    if is_without_space(place) and place.get("writable") is False:
        yield Case(f"{place['path']} has {format_bytes(free)} free", "--runs-dir ~/runs", ("storage.run_dir",))
        return
    if free >= one * number:
        return
    keep_last = (intent.config or {}).get("keep_last") or 1
    least = checkpoints_at_once(intent, (intent.num_checkpoints or 1) - keep_last + 1)  # with keep_last 1
    fix = "--keep-last 1" if free >= one * least and least < number else "--runs-dir ~/runs"
    yield Case(
        f"{place['path']} has {format_bytes(free)} free, {number} checkpoints of {format_bytes(one)} need"
        f" {format_bytes(one * number)}",
        fix,
        ("storage.run_dir",),
    )


def checkpoints_at_once(intent: Intent, limit: int) -> int:
    """Returns `limit`, or the number of checkpoints that the run makes if that is smaller."""
    every = (intent.config or {}).get("save_every")
    if every is None or not intent.num_steps:
        return limit
    return min(limit, -(-intent.num_steps // every) if every else 1)


def disk_is_slow(facts: Facts, intent: Intent) -> Iterator[Case]:
    place = at(facts, "storage.run_dir")
    speed = (place or {}).get("write_bytes_per_s")
    if place and speed and speed < SLOW_BYTES_PER_S:
        seconds = f", a checkpoint takes {intent.checkpoint_bytes / speed:.0f} s" if intent.checkpoint_bytes else ""
        yield Case(
            f"the disk of {place['path']} writes {speed / 1e6:.0f} MB/s{seconds}",
            "--runs-dir ~/runs",
            ("storage.run_dir",),
        )


def inodes_are_few(facts: Facts, intent: Intent) -> Iterator[Case]:
    for key, name, fix in PLACES:
        place = at(facts, f"storage.{key}")
        free = (place or {}).get("free_inodes")
        counts = place and place.get("filesystem") not in ("btrfs", "overlay")
        if counts and free is not None and 0 <= free < FEW_INODES:
            yield Case(f"{name} {place['path']} has {free} free inodes", fix, (f"storage.{key}",))


def cache_is_on_network(facts: Facts, intent: Intent) -> Iterator[Case]:
    place = at(facts, "storage.cache")
    if place and place.get("network"):
        yield Case(
            f"token shards are on a network file system ({place.get('filesystem')}): {place['path']}",
            "--cache-dir /tmp/paceline",
            ("storage.cache",),
        )


def tmp_is_small(facts: Facts, intent: Intent) -> Iterator[Case]:
    place = at(facts, "storage.tmp")
    free = (place or {}).get("free_bytes")
    if place and free is not None and free < SMALL_TMP:
        yield Case(f"{place['path']} has {format_bytes(free)} free", "export TMPDIR=~", ("storage.tmp",))


def text_is_missing(facts: Facts, intent: Intent) -> Iterator[Case]:
    if at(facts, "text.exists") is False:
        yield Case(f"there is no text at {at(facts, 'text.data')}", "--data builtin", ("text.data", "text.exists"))


def text_is_unreadable(facts: Facts, intent: Intent) -> Iterator[Case]:
    error = at(facts, "text.error")
    if error and at(facts, "text.exists") is not False:
        yield Case(f"{at(facts, 'text.data')}: {error}", "--data builtin", ("text.data", "text.error"))


def text_is_empty(facts: Facts, intent: Intent) -> Iterator[Case]:
    if at(facts, "text.exists") and at(facts, "text.bytes") == 0 and not at(facts, "text.error"):
        yield Case(f"{at(facts, 'text.data')} holds 0 bytes of text", "--data builtin", ("text.data", "text.bytes"))


def tokenizer_is_missing(facts: Facts, intent: Intent) -> Iterator[Case]:
    tokenizer = at(facts, "text.tokenizer")
    if tokenizer and (tokenizer.get("exists") is False or tokenizer.get("error")):
        problem = "does not exist" if tokenizer.get("exists") is False else f"cannot be used: {tokenizer['error']}"
        yield Case(f"the tokenizer {tokenizer['path']} {problem}", "--tokenizer auto", ("text.tokenizer",))


def vocabulary_differs(facts: Facts, intent: Intent) -> Iterator[Case]:
    own = at(facts, "text.tokenizer.vocab_size")
    requested = (intent.config or {}).get("vocab_size") if "vocab_size" in intent.set_keys else None
    if own and requested and own != requested:
        yield Case(
            f"vocab_size is {requested:,}, the tokenizer {at(facts, 'text.tokenizer.path')} has {own:,}",
            f"--vocab-size {own}",
            ("text.tokenizer",),
        )


def shards_are_stale(facts: Facts, intent: Intent) -> Iterator[Case]:
    if at(facts, "text.prepared") is False and at(facts, "text.exists") and intent.command == "check":
        data = at(facts, "text.data")
        yield Case(
            f"{data} ({format_bytes(at(facts, 'text.bytes') or 0)}) is not prepared, or has changed since then",
            f"paceline data prepare --data {data}",
            ("text.prepared",),
        )


STORAGE_VERDICTS = (
    Verdict("folder-unwritable", "stop", rule=folder_is_unwritable,
            cause="The run folder or the cache is not writable.",
            why="nothing could be saved", fix="Use another folder."),
    Verdict("disk-full", "stop", rule=disk_is_full,
            cause="The disk has too little space for the checkpoints that exist at one time: keep_last, the best, and "
                  "the one that is being written.",
            why="a checkpoint fails during the run", fix="Use another folder, or keep fewer checkpoints."),
    Verdict("disk-slow", "warn", rule=disk_is_slow,
            cause="The disk writes less than 50 MB/s.",
            why="a checkpoint takes long, and the next one waits for it", fix="Use another folder."),
    Verdict("disk-no-inodes", "warn", rule=inodes_are_few,
            cause="The file system is running out of inodes.",
            why="no file can be created, even with free space", fix="Use another folder."),
    Verdict("cache-on-network", "note", rule=cache_is_on_network,
            cause="Token shards are on a network file system.",
            why="every step reads random rows from it", fix="Use a local disk."),
    Verdict("tmp-small", "warn", rule=tmp_is_small,
            cause="The folder for temporary files is nearly full.",
            why="compilers and launchers write there", fix="Set another TMPDIR."),
    Verdict("text-missing", "stop", rule=text_is_missing,
            cause="The text to train on does not exist.",
            why="there is nothing to train on", fix="Name an existing file or folder, or the built-in text."),
    Verdict("text-unreadable", "stop", rule=text_is_unreadable,
            cause="The text exists and cannot be read.",
            why="there is nothing to train on", fix="Repair it, or use another text."),
    Verdict("text-empty", "stop", rule=text_is_empty,
            cause="The text is empty.",
            why="there is nothing to train on", fix="Use another text."),
    Verdict("tokenizer-missing", "stop", rule=tokenizer_is_missing,
            cause="The tokenizer does not exist, or is not a tokenizer.json.",
            why="the text cannot be tokenized",
            fix="Name an existing one, or remove the key: paceline then trains one on the text."),
    Verdict("vocabulary-differs", "warn", rule=vocabulary_differs,
            cause="vocab_size is set, and the tokenizer has another size.",
            why="the size of the tokenizer is used, and the key has no effect", fix="Remove vocab_size."),
    Verdict("text-not-prepared", "note", rule=shards_are_stale,
            cause="There are no token shards of this text yet, or the text has changed since.",
            why="the first launch prepares it before the workers start", fix="Prepare it now."),
)  # fmt: skip
