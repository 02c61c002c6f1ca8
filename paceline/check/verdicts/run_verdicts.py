"""
Verdicts on the run: its config, the folders that it writes to, its text and its tokenizer.
"""

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.check.verdicts.rules import Case, Cases, Facts, Host, Intent, Rule, Severity, at
from paceline.config import Config
from paceline.errors import PlanError
from paceline.hub import reach_fix
from paceline.plan.algorithms import ALGORITHMS
from paceline.plan.planner import grad_accum_steps
from paceline.units import BYTES_PER_TOKEN, MIB, format_bytes, format_list, format_number_of

SLOW_BYTES_PER_S = 50e6
FEW_INODES = 1000
NO_ROOM = MIB  # not even for logs
SMALL_TMP = 256 * MIB
TEXTS = (  # facts, and what to give where no path is like the one that was given
    ("text", "--data", "--data PATH, a file or folder of text; --data builtin for a first try"),
    ("text.val", "--val-data", "--val-data auto"),
)
PLACES = (("run_dir", "the run folder", "--runs-dir ~/runs"), ("cache", "the cache", "--cache-dir ~/.cache/paceline"))
TMP = ("tmp", "the folder for temporary files", "export TMPDIR=~")


def batch_indivisible(host: Host) -> Cases:
    intent = host.intent
    total, rows, length = intent.total_batch_size, intent.device_batch_size, intent.sequence_len
    if not total or not rows or not length or not intent.nproc:
        return
    try:
        grad_accum_steps(total, device_batch_size=rows, sequence_len=length, world_size=intent.nproc * intent.num_hosts)
    except PlanError as error:
        yield Case(error.message, error.fix)


def plan_refused(host: Host) -> Cases:
    refused = host.intent.refused
    if refused and not any(case.what == refused[0] for case in batch_indivisible(host)):
        yield Case(*refused)


def flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def longer_than_the_run(*keys: str, times: int) -> Rule:
    """Returns the rule about intervals that are longer than the run. times: how often the proposed interval fits into it."""

    def rule(host: Host) -> Cases:
        for key in keys:
            every, num_steps = host.intent.set_value(key), host.intent.num_steps
            if every and num_steps and every > num_steps:
                what = f"{key} is {every:,}, the run has {format_number_of(num_steps, 'step')}"
                yield Case(what, f"{flag(key)} {max(1, num_steps // times)}")

    return rule


interval_long = longer_than_the_run("eval_every", "save_every", "sample_every", times=4)
log_rare = longer_than_the_run("log_every", times=10)


def save_never(host: Host) -> Cases:
    num_steps = host.intent.num_steps
    if host.intent.set_value("save_every") == 0 and num_steps and num_steps >= 1000:
        yield Case(f"save_every is 0, the run has {num_steps:,} steps", "--save-every 250")


def warmup_long(host: Host) -> Cases:
    warmup, num_steps = host.intent.set_value("warmup_steps"), host.intent.num_steps
    if warmup and num_steps and 3 * warmup > num_steps:
        what = f"warmup_steps is {warmup:,}, a run of {num_steps:,} steps warms up for at most a third of it"
        yield Case(what, f"--warmup-steps {num_steps // 3}")


def length_twice(host: Host) -> Cases:
    tokens_per_param = host.intent.set_value("tokens_per_param")
    others = {key: host.intent.set_value(key) for key in ("num_steps", "epochs", "time")}
    other = next((key for key, value in others.items() if value is not None), None)
    if tokens_per_param is not None and other:
        yield Case(f"tokens_per_param is {tokens_per_param} and {other} is {others[other]}", f"{flag(other)} auto")


def warmdown_none(host: Host) -> Cases:
    final = host.intent.set_value("final_lr_frac")
    if final is not None and host.intent.config.get("warmdown_ratio") == 0:
        yield Case(f"final_lr_frac is {final}, and warmdown_ratio is 0", "--warmdown-ratio 0.65")


def key_idle(host: Host) -> Cases:
    """Yields keys that have no effect, by how plan/algorithms.py, train/updates.py and train/loop.py read them."""
    config = host.intent.config
    optimizer = config.get("optimizer", "")
    row = ALGORITHMS.get(optimizer)
    has_own_decay = row is not None and row.matrix_weight_decay is not None
    decaying = next(row.name for row in ALGORITHMS.values() if row.matrix_weight_decay is None)
    last_layer = "depth is 1, and the last layer attends to everything"
    for key, idle, because, fix in (
        ("weight_decay", has_own_decay, f"optimizer is {optimizer}, with its own", f"--optimizer {decaying}"),
        ("warmdown_ratio", config.get("final_lr_frac") == 1, "final_lr_frac is 1", "--final-lr-frac 0.05"),
        (
            "keep_last",
            config.get("save_every") == 0,
            "save_every is 0: there is only one checkpoint",
            "--save-every 250",
        ),
        ("window_pattern", config.get("depth") == 1, last_layer, "--depth 2"),
    ):
        value = host.intent.set_value(key)
        if value is not None and idle:
            yield Case(f"{key} is {value}, and {because}", fix)


def rate_zero(host: Host) -> Cases:
    for key, usual in {"matrix_lr": "auto", "embedding_lr": "0.3", "unembedding_lr": "0.008"}.items():
        if host.intent.config.get(key) == 0:
            yield Case(f"{key} is 0", f"{flag(key)} {usual}")


def checkpointing_on_cpu(host: Host) -> Cases:
    if host.intent.set_value("activation_checkpointing") and host.intent.device == "cpu":
        yield Case("activation_checkpointing on a CPU", "--activation-checkpointing false")


def epochs_many(host: Host) -> Cases:
    intent, num_tokens, about = host.intent, host.at("text.num_tokens"), ""
    epochs = intent.epochs
    if not num_tokens and host.at("text.bytes"):  # the text is not read yet
        num_tokens, about = host.at("text.bytes") / BYTES_PER_TOKEN, "about "
    if epochs is None and num_tokens and intent.num_steps and intent.total_batch_size:
        epochs = intent.num_steps * intent.total_batch_size / num_tokens
    if epochs and epochs > 10:
        about = "" if intent.epochs else about
        yield Case(f"{about}{epochs:,.0f} passes over the same text", "--epochs 4")


def folder_unwritable(host: Host) -> Cases:
    for key, name, usual_fix in (*PLACES, TMP):
        place, fix = host.at(f"storage.{key}"), usual_fix
        if not place or place.get("writable") is not False:
            continue
        if is_without_space(place) and (key == "run_dir" or (key == "cache" and host.is_other)):
            continue  # disk-full and cache-full say it better
        readable = key == "cache" and host.at("text.prepared")  # what is prepared is only read
        harmless = key == "tmp" or readable or (host.intent.command == "check" and host.intent.run_dir is None)
        what = f"{name} {place['path']} cannot be written: {place.get('error') or 'no permission'}"
        if key == "cache" and host.is_other:  # it may hold all that is needed
            yield Case(what, other_cache(host), "warn", ("storage.cache",))
            continue
        if key == "run_dir" and host.intent.resumes:
            fix = resume_of_copy(place["path"])
        elif is_home_unwritable(host):
            fix = f"{usual_fix.partition('~')[0]}DIR in a place you can write"
        yield Case(what, fix, "warn" if harmless else "stop", (f"storage.{key}",))


def resume_of_copy(run_path: str) -> str:
    """Returns the command that continues a run in the home folder: another --runs-dir would not have it."""
    copy = f"~/runs/{shlex.quote(Path(run_path).name)}"
    return f"mkdir -p ~/runs && cp -r {shlex.quote(run_path)} {copy} && paceline resume {copy}"


def is_home_unwritable(host: Host) -> bool:
    """Whether nothing can be written to the home folder, by the cache that lies there unless another place was set."""
    cache = host.at("storage.cache") or {}
    return cache.get("writable") is False and cache["path"].endswith("/.cache/paceline")


def is_without_space(place: Any) -> bool:
    free = at(place, "free_bytes")
    return free is not None and free < NO_ROOM


def disk_full(host: Host) -> Cases:
    place, intent = host.at("storage.run_dir"), host.intent
    if not place or place.get("free_bytes") is None:
        return
    free, one = place["free_bytes"], intent.checkpoint_bytes or 0
    limit = intent.num_checkpoints or 1
    number = checkpoints_to_come(intent, limit)
    what = f"{place['path']} has {format_bytes(free)} free"
    fix = resume_of_copy(place["path"]) if intent.resumes else "--runs-dir ~/runs"
    if is_without_space(place) and place.get("writable") is False:
        yield Case(what, fix)
    elif free < one * number:
        needed_at_home = one * (number + intent.saved_checkpoints)
        if (at_home := host.at("storage.cache.free_bytes")) is not None and at_home < needed_at_home:
            fix = "df -h"  # the home folder, where the cache is, has no more room
        least = checkpoints_to_come(intent, limit - (intent.config.get("keep_last") or 1) + 1)  # with keep_last 1
        if free >= one * least:
            fix = "--keep-last 1"
        more = "more " if intent.saved_checkpoints else ""
        count = format_number_of(number, f"{more}checkpoint")
        need = "needs" if number == 1 else "need"
        yield Case(f"{what}, {count} of {format_bytes(one)} {need} {format_bytes(one * number)}", fix)


def checkpoints_to_come(intent: Intent, limit: int) -> int:
    """Returns how many checkpoints there will be besides those that are there: at least the one that is being written."""
    return max(1, checkpoints_at_once(intent, limit) - intent.saved_checkpoints)


def checkpoints_at_once(intent: Intent, limit: int) -> int:
    """Returns `limit`, or the number of checkpoints that the run makes if that is smaller."""
    every = intent.config.get("save_every")
    if every is None or not intent.num_steps:
        return limit
    return min(limit, -(-intent.num_steps // every) if every else 1)


def disk_slow(host: Host) -> Cases:
    speed, size = host.at("storage.run_dir.write_bytes_per_s"), host.intent.checkpoint_bytes
    if speed and speed < SLOW_BYTES_PER_S:
        seconds = f", a checkpoint takes {size / speed:.0f} s" if size else ""
        what = f"the disk of {host.at('storage.run_dir.path')} writes {speed / 1e6:.0f} MB/s{seconds}"
        yield Case(what, "--runs-dir ~/runs")


def disk_no_inodes(host: Host) -> Cases:
    for key, name, fix in PLACES:
        place = host.at(f"storage.{key}") or {}
        free = place.get("free_inodes")
        if free is not None and 0 <= free < FEW_INODES and place.get("filesystem") not in ("btrfs", "overlay"):
            fix = other_cache(host) if host.is_other else fix
            yield Case(f"{name} {place['path']} has {free} free inodes", fix, evidence=(f"storage.{key}",))


def cache_on_network(host: Host) -> Cases:
    place = host.at("storage.cache") or {}
    if place.get("network") and not host.is_other:
        what = f"token shards are on a network file system ({place.get('filesystem')}): {place['path']}"
        yield Case(what, "--cache-dir /tmp/paceline")


def cache_full(host: Host) -> Cases:
    """Room for half of what the text needs is too little for any usual tokenizer."""
    free, need = host.at("storage.cache.free_bytes"), shard_bytes(host.facts)
    if free is not None and host.is_other:
        yield from other_cache_cases(host, free)
    elif free is not None and need and free < need:
        sizes = f"{format_bytes(host.at('text.bytes'))} of text need about {format_bytes(need)}"
        elsewhere = "--cache-dir ~/.cache/paceline" if host.intent.config.get("cache_dir") else "df -h"
        what = f"the cache {host.at('storage.cache.path')} has {format_bytes(free)} free, {sizes}"
        yield Case(what, elsewhere, "stop" if free < need // 2 else "warn")


def shard_bytes(facts: Facts) -> int | None:
    """Returns what a text that is not prepared needs, at 4 bytes of text for a token; None for any other."""
    num_bytes = at(facts, "text.bytes")
    if not num_bytes or at(facts, "text.prepared") is not False:
        return None
    return int(num_bytes // BYTES_PER_TOKEN * (2 if (at(facts, "text.vocab_size") or 0) <= 1 << 16 else 4))


def other_cache_cases(host: Host, free: int) -> Iterable[Case]:
    """Another host gets the text, and keeps checkpoints or its part of one unless the run folder is shared."""
    intent, texts = host.intent, host.at("storage.texts")
    is_there = intent.text_folder is not None and (texts is None or intent.text_folder in texts)
    text, one = 0 if is_there else intent.shard_bytes or 0, intent.checkpoint_bytes or 0
    number = checkpoints_at_once(intent, intent.num_checkpoints or 1)
    part = number * one if host.keeps_checkpoints else one // intent.num_hosts
    if free < max(NO_ROOM, text + part):
        checkpoints = "whole checkpoints need" if host.keeps_checkpoints else "its part of a checkpoint needs"
        needs = [("the text needs", text), (checkpoints, part)]
        sizes = [f"{name} about {format_bytes(size)}" for name, size in needs if size]
        what = ", ".join([f"the cache {host.at('storage.cache.path')} has {format_bytes(free)} free", *sizes])
        severity: Severity = "stop" if free < max(NO_ROOM, text // 2) else "warn"
        yield Case(what, other_cache(host), severity, ("storage.cache",))


def other_cache(host: Host) -> str:
    """Returns how room is made in the cache of another host: no key of the config moves it."""
    to, usage = host.at("connection.destination"), f"du -sh {shlex.quote(host.at('storage.cache.path'))}/*"
    is_ssh = host.at("connection.way") is None
    show = f"ssh {shlex.quote(to)} {shlex.quote(usage)}" if is_ssh else f"on {to}: {usage}"
    return f"{show} shows what may go; another cache: export XDG_CACHE_HOME=DIR as the first line of ~/.bashrc there"


def tmp_small(host: Host) -> Cases:
    free = host.at("storage.tmp.free_bytes")
    if free is not None and free < SMALL_TMP:
        yield Case(f"{host.at('storage.tmp.path')} has {format_bytes(free)} free", "export TMPDIR=~")


def text_missing(host: Host) -> Cases:
    for text, flag, otherwise in TEXTS:
        if host.at(f"{text}.exists") is False:
            data, near = host.at(f"{text}.data"), host.at(f"{text}.near")
            more = f", but at {near}" if near else ""
            evidence = (f"{text}.data", f"{text}.exists")
            yield Case(f"there is no text at {data}{more}", f"{flag} {near}" if near else otherwise, evidence=evidence)


def text_package_missing(host: Host) -> Cases:
    if missing := host.at("text.hub.missing_packages"):
        what = f"{host.at('text.data')} needs {format_list(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed"
        yield Case(what, f"pip install {' '.join(missing)}")


def text_hub_silent(host: Host) -> Cases:
    hub = host.at("text.hub") or {}
    if hub.get("error") and not hub.get("cached"):
        what = f"{hub['name']} is not in the cache, and {hub['endpoint']} is out of reach: {hub['error']}"
        yield Case(what, reach_fix(hub["error"], server=hub["endpoint"]))


def text_hub_unknown(host: Host) -> Cases:
    hub = host.at("text.hub") or {}
    if hub.get("status") in (401, 403, 404) and not hub.get("cached"):
        what = f"{hub['endpoint']} answers {hub['status']} for {hub['name']}: no public dataset of this name"
        yield Case(what, "hf auth login")


def text_unreadable(host: Host) -> Cases:
    for text, flag, otherwise in TEXTS:
        error = host.at(f"{text}.error")
        if error and host.at(f"{text}.exists") is not False:
            near = host.at(f"{text}.near")
            fix, evidence = f"{flag} {near}" if near else otherwise, (f"{text}.data", f"{text}.error")
            yield Case(f"{host.at(f'{text}.data')}: {error}", fix, evidence=evidence)


def text_empty(host: Host) -> Cases:
    for text, _, otherwise in TEXTS:
        if host.at(f"{text}.exists") and host.at(f"{text}.bytes") == 0 and not host.at(f"{text}.error"):
            evidence = (f"{text}.data", f"{text}.bytes")
            yield Case(f"{host.at(f'{text}.data')} holds 0 bytes of text", otherwise, evidence=evidence)


def text_of_other_types(host: Host) -> Cases:
    """For `check` alone: other commands say so while they read the folder."""
    data, count, others = (host.at(f"text.{name}") for name in ("data", "num_others", "others"))
    if count and host.at("text.bytes") and data != Config.data and host.intent.command == "check":
        shown = format_list(others) + (", ..." if count > len(others) else "")
        what = f"{data}: left out {format_number_of(count, 'file')} of other types: {shown}"
        yield Case(what, "rename plain text to *.txt")


def tokenizer_missing(host: Host) -> Cases:
    tokenizer = host.at("text.tokenizer") or {}
    missing, error = tokenizer.get("exists") is False, tokenizer.get("error")
    if missing or error:
        problem = "does not exist" if missing else f"cannot be used: {error}"
        yield Case(f"the tokenizer {tokenizer['path']} {problem}", "--tokenizer auto")


def vocabulary_differs(host: Host) -> Cases:
    own, requested = host.at("text.tokenizer.vocab_size"), host.intent.set_value("vocab_size")
    if own and requested and own != requested:
        path = host.at("text.tokenizer.path")
        yield Case(f"vocab_size is {requested:,}, the tokenizer {path} has {own:,}", f"--vocab-size {own}")


def text_not_prepared(host: Host) -> Cases:
    is_of_user = host.at("text.data") != Config.data  # the builtin text takes a moment
    obstacles = (text_missing, text_unreadable, text_empty, tokenizer_missing, cache_full, folder_unwritable)
    if any(case.severity in (None, "stop") for rule in obstacles for case in rule(host)):
        return  # the command would fail
    if is_of_user and host.at("text.prepared") is False and host.at("text.exists") and host.intent.command == "check":
        data, size = host.at("text.data"), format_bytes(host.at("text.bytes") or 0)
        what = f"{data} ({size}) is not prepared, or has changed since then"
        tokenizer, cache_dir = host.at("text.tokenizer.path"), host.intent.config.get("cache_dir")
        words = ["--val-data", val_data] if (val_data := host.at("text.val.data")) else []
        words += ["--text-field", field] if (field := host.intent.config.get("text_field")) else []
        words += ["--tokenizer", tokenizer] if tokenizer else ["--vocab-size", host.at("text.vocab_size")]
        words += ["--cache-dir", cache_dir] if cache_dir else []
        yield Case(what, f"paceline data prepare --data {shlex.join([str(data), *map(str, words)])}")
