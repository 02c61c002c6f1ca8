"""
`train` and `resume` from the first word to the last: text, plan, run folder, attempt, closing lines.

The order matters: what can be refused by arithmetic is refused before the text is prepared, and the text is prepared once,
before any worker starts.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.check.ask import Ask
from paceline.check.ready import Checked, Gathering, ask_for_training, files_of, gathering, judge, keep, refuse
from paceline.config import Config, check_config, format_toml, load_config, override
from paceline.data.shards import TokenDataset, open_dataset, prepare
from paceline.errors import PacelineError
from paceline.launch.attempts import Recovery, recovery_of, run_attempts
from paceline.launch.beside import Beside, beside, take_beside
from paceline.launch.closing import closing_lines
from paceline.launch.confirm import confirm, wants_probe
from paceline.launch.env import EnvRow, format_env, harm_lines, worker_env
from paceline.launch.sampler import check_every
from paceline.launch.script import Cleared, Script
from paceline.launch.training import TrainingJob
from paceline.model.manifest import newest_good, read_manifest
from paceline.options import cache_dir, take_flag, take_option
from paceline.plan.again import MakePlan, plan_again
from paceline.plan.forecast import Asked, forecast
from paceline.plan.kept import kept_calibration
from paceline.plan.machine import Machine, probe_cpu_cores, probe_machine
from paceline.plan.planner import Plan, format_plan, make_plan, memory_setup
from paceline.rundir import RunDir, RunInUse, append_event, lock_run, write_atomic
from paceline.terminal import lasting_screen, show_progress
from paceline.units import format_count
from paceline.watch.goodput import format_line, goodput_of
from paceline.watch.status import run_status

ENDING_S = 60.0  # workers without a supervisor save and end, or are killed, within this

# keys that shape weights or choose rows: a run cannot change them and still be the same run
FIXED = (
    "name", "runs_dir", "seed", "data", "tokenizer", "vocab_size", "depth", "n_embd", "head_dim", "n_kv_head", "sequence_len",
    "total_batch_size", "optimizer", "shard",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What the command line says beside the config."""

    check: bool = True
    show_env: bool = False
    set_keys: frozenset[str] = frozenset()
    recovery: Recovery = field(default_factory=Recovery)
    health_every_s: float = 0.0
    beside: Beside = field(default_factory=Beside)


def take_options(args: list[str]) -> tuple[list[str], Options]:
    """What `train` and `resume` take beside config keys, and the words that are left."""
    args, no_check = take_flag(args, "--no-check")
    args, show_env = take_flag(args, "--show-env")
    args, no_recover = take_flag(args, "--no-recover")
    args, max_attempts = take_option(args, "max-attempts", int)
    args, hang_after_s = take_option(args, "hang-after", float)
    args, health_every_s = take_option(args, "health-every", float)
    args, wanted = take_beside(args)
    recovery = recovery_of(max_attempts=max_attempts, no_recover=no_recover, hang_after_s=hang_after_s)
    every_s = check_every(health_every_s)
    return args, Options(not no_check, show_env, recovery=recovery, health_every_s=every_s, beside=wanted)


def start_run(config: Config, options: Options) -> int:
    """A new run; returns the exit code."""
    began = time.monotonic()
    machine = probe_machine()
    check_config(config)
    make_plan(
        config, machine, vocab_size=config.vocab_size, num_rows=0, calibrate=kept_calibration(cache_dir(config))
    )  # refuse what cannot be before reading any text
    run = RunDir(Path(config.runs_dir) / (config.name or default_name(config)))
    with check_beside(config, run, options) as gathered:
        check_new(run)
        dataset = prepare_data(config)
        plan = plan_run(config, machine, dataset)
        checked = pass_checks(gathered, config, plan, run, options, command="train")
    if options.show_env:
        print(format_env(environment(plan, checked)[1]))
        return 0
    try:
        plan, tried = confirmed(config, plan, machine, dataset, checked)
        check_new(run)  # the trial takes long enough for another run of this name to begin
    except BaseException:
        with suppress(OSError):
            run.path.rmdir()
        raise
    config = resolved(config, plan)
    create_run(run, config, plan, dataset)
    note_trial(run, tried)
    return supervise(run, config, plan, checked, dataset, options, began=began)


def resume_run(run: RunDir, changes: dict[str, Any], options: Options) -> int:
    """Goes on from the run's last good checkpoint, with some keys changed; returns the exit code."""
    began = time.monotonic()
    before, _ = load_config(run.config_toml, {})
    fixed = [key for key in FIXED if key in changes and changes[key] != getattr(before, key)]
    if fixed:
        raise PacelineError(
            f"{fixed[0]} is {getattr(before, fixed[0])} in {run.name} and cannot change within a run",
            fix="start a new run with it: paceline train "
            + str(run.config_toml)
            + f" --{fixed[0].replace('_', '-')} ... --name NEW",
        )
    old, asked = Plan.from_json(run.plan_json.read_text()), frozenset(changes)
    if changes.get("nproc", old.world_size) != old.world_size and "device_batch_size" not in changes:
        changes = {
            **changes,
            "device_batch_size": None,
        }  # the same rows on other devices: how many at once is worked out anew
    values = override({key: getattr(before, key) for key in before.__dataclass_fields__}, changes)
    config = Config(**values)
    check_config(config)
    with check_beside(config, run, options) as gathered:
        dataset = reopen_data(run, config)
        machine = probe_machine()
        plan = plan_again(old, config, machine, make=planner(dataset), changed=asked)
        checked = pass_checks(gathered, config, plan, run, options, command="resume")
    if options.show_env:
        print(format_env(environment(plan, checked)[1]))
        return 0
    if run_status(run).state == "finished" and last_good_step(run) >= plan.num_steps:
        raise PacelineError(
            f"{run.name} is finished at step {last_good_step(run):,} of {plan.num_steps:,}",
            fix=f"paceline resume {run.path} --num-steps {2 * plan.num_steps} goes on from there",
        )
    lock = lock_when_free(run)
    if memory_setup(plan) != memory_setup(old):
        plan, tried = confirmed(config, plan, machine, dataset, checked)
        note_trial(run, tried)
    config = resolved(config, plan)
    if plan.num_steps != old.num_steps:
        text = (
            f"length changed from {old.num_steps:,} to {plan.num_steps:,} steps:"
            " learning rates are worked out anew for the whole of it"
        )
        append_event(run, "note", text=text)
        print(text)
    write_atomic(run.config_toml, format_toml(config))
    write_atomic(run.plan_json, plan.to_json())
    return supervise(run, config, plan, checked, dataset, options, began=began, lock=lock)


@contextmanager
def check_beside(config: Config, run: RunDir, options: Options) -> Iterator[Gathering | None]:
    """Gathers the facts of this host while the block prepares the run."""
    if not options.check:
        yield None
        return
    request = {"run_dir": run.path, "cache_dir": cache_dir(config), "cached_torch": cache_dir(config) / "torch.json"}
    text = {"data": config.data, "tokenizer": config.tokenizer, "vocab_size": config.vocab_size}
    with gathering(**request, **text, measure_disk=False) as gathered:
        yield gathered


def pass_checks(
    gathered: Gathering | None, config: Config, plan: Plan, run: RunDir, options: Options, *, command: str
) -> Checked | None:
    """Raises where the run would surely fail."""
    if gathered is None:
        return None
    ask = ask_for_training(config, plan, command=command, set_keys=options.set_keys, run_path=run.path)
    checked = judge([gathered.facts()], ask)
    refuse(checked.findings, stopped="this run")
    return checked


def check_script(script: Script, run: RunDir) -> Cleared:
    """The checks of `paceline run`: what would hurt goes to stderr, the script has stdout."""
    places = {"run_dir": run.path, "cache_dir": None, "cached_torch": cache_dir(Config()) / "torch.json"}
    with gathering(**places, measure_disk=False) as gathered:
        ask = Ask(command="run", device=script.device, nproc=script.nproc, run_dir=str(run.path))
        checked = judge([gathered.facts()], ask)
    try:
        refuse(checked.findings, stopped="this script", stream=sys.stderr)
    except PacelineError as error:
        return Cleared(libuv=checked.libuv, stop=error)
    return Cleared(libuv=checked.libuv, files=files_of(run, checked))


def environment(plan: Plan, checked: Checked | None) -> tuple[dict[str, str], list[EnvRow]]:
    return worker_env(
        dict(os.environ),
        nproc=plan.world_size,
        device=plan.device,
        cpu_cores=plan.threads * plan.world_size,
        libuv=checked is None or checked.libuv,
    )


def lock_when_free(run: RunDir) -> int:
    """As lock_run; but where the supervisor is dead and only its workers are still saving, waits for them."""
    deadline, said = time.monotonic() + ENDING_S, False
    while True:
        try:
            return lock_run(run)
        except RunInUse as error:
            if error.pid is None or Path(f"/proc/{error.pid}").exists() or time.monotonic() > deadline:
                raise
        if not said:
            print(f"waiting for the workers of {run.name}'s last attempt to end", flush=True)
            said = True
        time.sleep(0.2)


def last_good_step(run: RunDir) -> int:
    """Of its newest checkpoint whose hashes are right; 0 if there is none."""
    try:
        path, _ = newest_good(run.checkpoints, set_aside=False)
    except PacelineError:
        return 0
    return read_manifest(path).step


@lasting_screen()
def supervise(
    run: RunDir,
    config: Config,
    plan: Plan,
    checked: Checked | None,
    dataset: TokenDataset,
    options: Options,
    *,
    began: float,
    lock: int | None = None,
) -> int:
    """All attempts, shown as they go; then where things are and what to type next. began: when the command did."""
    lock = lock_run(run) if lock is None else lock
    started = time.monotonic()
    if checked is not None:
        keep(run, checked)
    lines = [*format_plan(plan, source=describe(dataset)), f"run     {run.path}"]
    print("\n".join([*lines, *harm_lines(environment(plan, checked)[1]), ""]), flush=True)
    append_event(run, "launch", prepared_s=round(started - began, 3))
    job = TrainingJob(
        run,
        config,
        make=planner(dataset),
        env_of=lambda plan: environment(plan, checked)[0],
        cache=cache_dir(config),
        lock=lock,
        libuv=checked is None or checked.libuv,
        hang_after_s=options.recovery.hang_after_s,
        health_every_s=options.health_every_s,
    )
    with beside(run, options.beside):
        try:
            ending = run_attempts(job, options.recovery)
        finally:
            os.close(lock)
        outcome = ending.outcome
        if outcome.state == "failed":
            append_event(run, "failed", rank=outcome.root.rank if outcome.root else None, exit_code=outcome.exit_code)
        elif ending.waiting:
            append_event(run, "interrupted")
        status, spent = run_status(run), format_line(goodput_of(run))
        seconds = time.monotonic() - started
        text = closing_lines(run, ending, plan, step=status.step, val_bpb=status.val_bpb, seconds=seconds, spent=spent)
        print(text, file=sys.stderr if outcome.exit_code else sys.stdout, flush=True)
    return outcome.exit_code


def plan_run(config: Config, machine: Machine, dataset: TokenDataset) -> Plan:
    num_rows = dataset.split("train").num_rows(config.sequence_len)
    return forecast(
        config, machine, asked=Asked(), cache=cache_dir(config), vocab_size=dataset.vocab_size, num_rows=num_rows
    ).plan


def confirmed(
    config: Config, plan: Plan, machine: Machine, dataset: TokenDataset, checked: Checked | None
) -> tuple[Plan, str | None]:
    """A plan that fills most of its devices is tried on them first, and takes fewer rows where it must; and what came of it."""
    if not wants_probe(plan):
        return plan, None
    libuv = checked is None or checked.libuv
    found = confirm(plan, folder=cache_dir(config), env=environment(plan, checked)[0], libuv=libuv)
    return plan_again(found.plan, config, machine, make=planner(dataset)), found.text


def note_trial(run: RunDir, text: str | None) -> None:
    if text is not None:
        append_event(run, "note", text=text)


def planner(dataset: TokenDataset) -> MakePlan:
    return lambda config, machine: plan_run(config, machine, dataset)


def resolved(config: Config, plan: Plan) -> Config:
    """What decides the result is written down; what only fits this machine (nproc, rows at once, compile) stays as asked."""
    return replace(
        config,
        vocab_size=plan.model.vocab_size,
        n_embd=plan.model.n_embd,
        n_kv_head=plan.model.n_kv_head,
        window_pattern=plan.model.window_pattern,
        total_batch_size=plan.total_batch_size,
        num_steps=plan.num_steps,
        epochs=None,
        precision=plan.precision,
    )


def default_name(config: Config) -> str:
    return f"d{config.depth}-{datetime.now():%Y%m%d-%H%M%S}"


def check_new(run: RunDir) -> None:
    """Refuses a folder that holds something; makes sure that it can be written."""
    if run.path.exists() and (not run.path.is_dir() or any(run.path.iterdir())):
        is_run = run.config_toml.is_file()
        raise PacelineError(
            f"{run.path} is already there" + ("" if is_run else ", and is not a run"),
            fix=f"paceline resume {run.path}, or another --name" if is_run else "another --name",
        )
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        probe = run.path / ".probe"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise PacelineError(
            f"run folder {run.path} cannot be written: {error.strerror}", fix="--runs-dir DIR in a place you can write"
        ) from error


def create_run(run: RunDir, config: Config, plan: Plan, dataset: TokenDataset) -> None:
    """config.toml comes last: a folder without it is not a run."""
    run.tokenizer_json.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(dataset.tokenizer_json, run.tokenizer_json)
    write_atomic(
        run.dataset_json,
        json.dumps({"path": str(dataset.path.resolve()), "fingerprint": dataset.meta["fingerprint"]}) + "\n",
    )
    write_atomic(run.plan_json, plan.to_json())
    write_atomic(run.config_toml, format_toml(config))


def prepare_data(config: Config) -> TokenDataset:
    """The text of `config` as token shards: made now, or found as they were made before."""
    with show_progress() as progress:
        return prepare(
            config.data,
            tokenizer=Path(config.tokenizer) if config.tokenizer else None,
            vocab_size=config.vocab_size,
            cache_dir=cache_dir(config),
            num_workers=probe_cpu_cores(),
            progress=progress,
        )


def reopen_data(run: RunDir, config: Config) -> TokenDataset:
    """The shards that the run began with; prepared anew where they are gone, and refused if the text has changed since."""
    record = json.loads(run.dataset_json.read_text())
    if (Path(record["path"]) / "meta.json").is_file():
        return open_dataset(Path(record["path"]))
    dataset = prepare_data(config)
    if dataset.meta["fingerprint"] != record["fingerprint"]:
        raise PacelineError(
            f"the token shards of {run.name} are gone and its text has changed since",
            fix="bring the text back, or start a new run",
        )
    write_atomic(run.dataset_json, json.dumps({**record, "path": str(dataset.path.resolve())}) + "\n")
    return dataset


def run_data(run: RunDir, *, other: str | None) -> TokenDataset:
    """The run's own text, or another one cut by the run's tokenizer."""
    config, _ = load_config(run.config_toml, {})
    if other is None:
        return reopen_data(run, config)
    return prepare_data(replace(config, data=other, tokenizer=str(run.tokenizer_json)))


def describe(dataset: TokenDataset) -> str:
    num_tokens = {name: format_count(facts["num_tokens"]) for name, facts in dataset.meta["splits"].items()}
    return f"{dataset.meta['source']}: {num_tokens['train']} tokens to train on, {num_tokens['val']} held out" + (
        ", prepared before" if dataset.reused else ""
    )
