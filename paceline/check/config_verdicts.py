"""
Verdicts on the config: what cannot be, and keys that do nothing together.
"""

from collections.abc import Iterator

from paceline.check.ask import Ask
from paceline.check.verdict import Facts, Seen, Verdict
from paceline.errors import PlanError
from paceline.plan.planner import grad_accum_steps


def batch_is_indivisible(facts: Facts, ask: Ask) -> Iterator[Seen]:
    total, rows, length = ask.total_batch_size, ask.device_batch_size, ask.sequence_len
    if not total or not rows or not length or not ask.nproc:
        return
    try:
        grad_accum_steps(total, device_batch_size=rows, sequence_len=length, world_size=ask.nproc * ask.num_hosts)
    except PlanError as error:
        yield Seen(error.message, error.fix)


def plan_is_refused(facts: Facts, ask: Ask) -> Iterator[Seen]:
    if ask.refused and not any(seen.what == ask.refused[0] for seen in batch_is_indivisible(facts, ask)):
        yield Seen(*ask.refused)


def interval_is_long(facts: Facts, ask: Ask) -> Iterator[Seen]:
    config = ask.config or {}
    for key in ("eval_every", "save_every", "sample_every"):
        every = config.get(key)
        if key in ask.set_keys and every and ask.num_steps and every > ask.num_steps:
            yield Seen(
                f"{key} is {every:,}, the run has {ask.num_steps:,} steps",
                f"--{key.replace('_', '-')} {max(1, ask.num_steps // 4)}",
            )


def logs_too_rarely(facts: Facts, ask: Ask) -> Iterator[Seen]:
    every = (ask.config or {}).get("log_every")
    if "log_every" in ask.set_keys and every and ask.num_steps and every > ask.num_steps:
        yield Seen(
            f"log_every is {every:,}, the run has {ask.num_steps:,} steps", f"--log-every {max(1, ask.num_steps // 10)}"
        )


def saves_too_rarely(facts: Facts, ask: Ask) -> Iterator[Seen]:
    config = ask.config or {}
    if config.get("save_every") == 0 and "save_every" in ask.set_keys and ask.num_steps and ask.num_steps >= 1000:
        yield Seen(f"save_every is 0, the run has {ask.num_steps:,} steps", "--save-every 250")


def warms_up_too_long(facts: Facts, ask: Ask) -> Iterator[Seen]:
    config = ask.config or {}
    warmup = config.get("warmup_steps")
    if "warmup_steps" in ask.set_keys and warmup and ask.num_steps and 3 * warmup > ask.num_steps:
        yield Seen(
            f"warmup_steps is {warmup:,}, a run of {ask.num_steps:,} steps warms up for a third of it at most",
            f"--warmup-steps {ask.num_steps // 3}",
        )


def length_is_said_twice(facts: Facts, ask: Ask) -> Iterator[Seen]:
    config = ask.config or {}
    other = next((key for key in ("num_steps", "epochs") if key in ask.set_keys and config.get(key) is not None), None)
    if "tokens_per_param" in ask.set_keys and other:
        yield Seen(
            f"tokens_per_param is {config.get('tokens_per_param')} and {other} is {config[other]}",
            f"--{other.replace('_', '-')} auto",
        )


def never_warms_down(facts: Facts, ask: Ask) -> Iterator[Seen]:
    config = ask.config or {}
    if "final_lr_frac" in ask.set_keys and config.get("warmdown_ratio") == 0:
        yield Seen(f"final_lr_frac is {config.get('final_lr_frac')}, and warmdown_ratio is 0", "--warmdown-ratio 0.65")


def keys_are_idle(facts: Facts, ask: Ask) -> Iterator[Seen]:
    """As plan/scaling.py, train/schedule.py and train/loop.py read them."""
    config = ask.config or {}
    for key, idle, because, fix in (
        ("weight_decay", config.get("optimizer") == "adamw", "optimizer is adamw, with its own", "--optimizer muon"),
        ("warmdown_ratio", config.get("final_lr_frac") == 1, "final_lr_frac is 1", "--final-lr-frac 0.05"),
        ("keep_last", config.get("save_every") == 0, "save_every is 0: there is one checkpoint", "--save-every 250"),
        ("window_pattern", config.get("depth") == 1, "depth is 1, and the last layer sees all", "--depth 2"),
    ):
        if key in ask.set_keys and idle and config.get(key) is not None:
            yield Seen(f"{key} is {config[key]}, and {because}", fix)


def rate_is_zero(facts: Facts, ask: Ask) -> Iterator[Seen]:
    usual = {"matrix_lr": "auto", "embedding_lr": "0.3", "unembedding_lr": "0.008"}
    for key, value in usual.items():
        if (ask.config or {}).get(key) == 0:
            yield Seen(f"{key} is 0", f"--{key.replace('_', '-')} {value}")


def recomputes_on_a_cpu(facts: Facts, ask: Ask) -> Iterator[Seen]:
    config = ask.config or {}
    if config.get("activation_checkpointing") and ask.device == "cpu" and "activation_checkpointing" in ask.set_keys:
        yield Seen("activation_checkpointing on a CPU", "--activation-checkpointing false")


def epochs_are_many(facts: Facts, ask: Ask) -> Iterator[Seen]:
    epochs = (ask.config or {}).get("epochs")
    if epochs and epochs > 10:
        yield Seen(f"{epochs:g} passes over the same text", "--epochs 4")


VERDICTS = (
    Verdict("plan-refused", "stop", look=plan_is_refused,
            cause="The config cannot be laid out on this machine.",
            why="there is no such model or device, or the device does not hold it",
            fix="What the message says."),
    Verdict("batch-indivisible", "stop", look=batch_is_indivisible,
            cause="total_batch_size is not a multiple of what all processes take at once.",
            why="a step cannot be cut into whole micro-steps",
            fix="One of the nearest that are."),
    Verdict("interval-long", "note", look=interval_is_long,
            cause="eval_every, save_every or sample_every is longer than the run.",
            why="it happens once, at the end",
            fix="A shorter interval."),
    Verdict("log-rare", "warn", look=logs_too_rarely,
            cause="log_every is longer than the run.",
            why="metrics.jsonl gets its first line at the end",
            fix="A shorter interval."),
    Verdict("save-never", "warn", look=saves_too_rarely,
            cause="save_every is 0 in a long run.",
            why="a crash loses everything",
            fix="Save now and then."),
    Verdict("warmup-long", "note", look=warms_up_too_long,
            cause="warmup_steps is more than a third of the run.",
            why="it is cut to a third",
            fix="A shorter warm-up."),
    Verdict("length-twice", "note", look=length_is_said_twice,
            cause="tokens_per_param is set beside num_steps or epochs.",
            why="tokens_per_param does not set the length then, only the automatic batch size and the weight decay",
            fix="Leave one out."),
    Verdict("warmdown-none", "note", look=never_warms_down,
            cause="final_lr_frac is set and there is no warm-down.",
            why="final_lr_frac does nothing",
            fix="A warm-down."),
    Verdict("key-idle", "note", look=keys_are_idle,
            cause="A key is set that does nothing beside another one.",
            why="it changes no step",
            fix="Leave it out, or change the other."),
    Verdict("rate-zero", "warn", look=rate_is_zero,
            cause="A learning rate is 0.",
            why="those weights stay as they were drawn",
            fix="A rate above 0."),
    Verdict("checkpointing-on-cpu", "note", look=recomputes_on_a_cpu,
            cause="Activation checkpointing on a CPU.",
            why="it costs a third of the speed and saves memory that is not short",
            fix="Turn it off."),
    Verdict("epochs-many", "note", look=epochs_are_many,
            cause="Over ten passes over the same text.",
            why="after about four, repeated tokens teach little (arXiv 2305.16264)",
            fix="Fewer passes, or more text."),
)  # fmt: skip
