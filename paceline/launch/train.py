"""
`train` and `resume`: prepare, check, attempts, close.

What arithmetic can refuse is refused before the text is prepared, and the text is prepared once, before any worker starts. The
attempts and the closing lines are those of every job (launch/attempts.py); what is special about a training is in launch/job.py.
"""

import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from paceline.check.ready import CheckResult, save_check
from paceline.config import Config, cache_dir, check_config
from paceline.config_file import format_toml, load_config, override
from paceline.data.corpus import Progress
from paceline.data.prepare import TokenDataset, format_held_out, prepared_meta, vocab_size_of
from paceline.errors import PacelineError, UsageError
from paceline.launch.attempts import records_early_stop, run_job
from paceline.launch.background import (
    adopt_copy,
    check_unused,
    continuing_fix,
    create_folder,
    detach,
    go_back,
    neighbour_notes,
    wait_for_lock,
)
from paceline.launch.cluster import Cluster
from paceline.launch.env import check_host_options, format_env, harm_lines
from paceline.launch.host_facts import start_check
from paceline.launch.hosts import HostEntry, hosts_of
from paceline.launch.job import TrainingJob, plan_env
from paceline.launch.losses import cluster_session
from paceline.launch.member import Reach, reach_early
from paceline.launch.notify import checked_services
from paceline.launch.requeue import announce_job, check_free, current_job, find_start, job_of, record_job
from paceline.launch.run_text import (
    FIXED_KEYS,
    absolute_texts,
    changed_keys,
    check_changes,
    check_edits,
    check_text,
    file_hashes,
    first_weights,
    format_weights,
    planner,
    prepare_data,
    record_data,
    reopen_data,
    take_weights,
)
from paceline.launch.sbatch import check_options, job_note, submit_resume, submit_run
from paceline.launch.sync import send_text
from paceline.launch.trial import try_plan
from paceline.model.manifest import find_checkpoint, last_good_step, step_of
from paceline.options import Services, TrainOptions
from paceline.plan.forecast import format_plan, measured_here
from paceline.plan.machine import Machine, probe_machine
from paceline.plan.planner import Plan, choose_device, choose_world_size, make_plan, memory_setup
from paceline.plan.replan import changes_on_resume, replan
from paceline.plan.shapes import choose_eval_tokens
from paceline.run_options import ResumeOptions
from paceline.rundir import (
    RunDir,
    RunInUse,
    append_event,
    holder_of,
    is_script_run,
    lock_run,
    read_json_lines,
    resume_command,
    unwritable_run,
    utc_now,
    write_atomic,
)
from paceline.terminal import show_progress
from paceline.typed_fields import read_run_file
from paceline.units import format_count, format_percent
from paceline.watch.about import label_new_run
from paceline.watch.events import end_state

PUBLISH_S = 1.0


def start_run(config: Config, options: TrainOptions, nodes: Sequence[HostEntry] = ()) -> int:
    """Starts a new run and returns the exit code; nodes: that have joined. Raises PacelineError for what the user can fix."""
    started, services = time.monotonic(), checked_services(options)
    check_config(Config(**absolute_texts(asdict(config))))
    run = RunDir(Path(config.runs_dir) / (config.name or f"d{config.depth}-{datetime.now():%Y%m%d-%H%M%S}"))
    place, start = check_free(run), find_start(run)
    if start == "continues":  # Slurm has requeued the job that began this run
        shared = {field.name for field in fields(ResumeOptions)} & vars(options).keys() - {"keys"}
        return resume_run(run, ResumeOptions(run=str(run.path), **{name: getattr(options, name) for name in shared}))
    check_options(options, has_place=place is not None)
    if options.slurm and place is None:
        if options.check:
            check_text(config)
        return submit_run(config, run, options)
    announce_job(place)
    entries, config = hosts_of(config, nodes)
    check_host_options(os.environ, options, num_hosts=len(entries), rejoin=options.rejoin)
    weights = first_weights(config)
    if not entries:  # refuses what cannot run before any text is read
        measured = measured_here(cache_dir(config))
        vocab_size = vocab_size_of(config, prepared_meta(config))
        make_plan(config, probe_machine(), vocab_size=vocab_size, num_rows=0, measured=measured)
    is_named = config.name is not None or start == "submitted"
    with new_folder(run, is_named=is_named, is_submitted=start == "submitted") as (run, lock, publish):
        label_new_run(run, options)
        reaches = reach_early(entries, config.python, options)
        with start_check(config, run, options, command="train", trackers=services.track, entries=entries) as check:
            dataset = prepare_data(config, check.with_refusal(publish), set_keys=options.keys)
            publish("plan and checks", 0, 0)
            make, machine = planner(dataset), check.machine()
            plan = make(config, machine)
            checked = check.judge(plan)
        if options.show_env:
            print(format_env(plan_env(plan, libuv=checked.libuv)[1]))
            return 0
        publish("trial of the plan", 0, 0)
        cluster = partial(cluster_of, entries, config, machine)
        config, plan, notes = try_plan(config, plan, machine, make=make, libuv=checked.libuv, cluster=cluster)
        config = Config(**absolute_texts(asdict(config_of_plan(config, plan, dataset))))
        if weights:
            publish("copy of the first weights", 0, 0)
            config = take_weights(run, weights, config, plan)
        record_data(run, dataset, config)
        write_atomic(run.plan_json, plan.to_json())
        if place:
            record_job(run, place.job_id)
        write_atomic(run.config_toml, format_toml(config))  # last: a folder without it is not a run
    for text in notes:
        append_event(run, "note", text=text)
    hosts = cluster(rejoin=options.rejoin, reaches=reaches)
    job = TrainingJob(run, lock, checked.libuv, options, config, make, cluster=hosts)
    job.resumes_itself = config.name is not None  # without one, the command of a requeued job starts a new run
    return run_training(job, plan, checked, dataset, services, started=started, is_new=True)


def resume_run(run: RunDir, options: ResumeOptions, nodes: Sequence[HostEntry] = ()) -> int:
    """Resumes a run from its last good checkpoint, or from options.step, and returns the exit code. options.keys: keys to change.

    Raises PacelineError for what the user can fix.
    """
    started, services = time.monotonic(), checked_services(options)
    adopt_copy(run)
    holder = holder_of(run)
    if holder is not None and not os.access(run.lock, os.W_OK):  # another user's
        raise RunInUse(run, holder)
    place = check_free(run)
    check_options(options, has_place=place is not None)
    new_run = f"start a new run with it: paceline train {shlex.quote(str(run.config_toml))} --name NEW"
    config, plan_before = changed_run(
        run, options.keys, otherwise=new_run, takes_count=options.slurm or place is not None
    )
    # a requeued job has the same command, and went back when it began
    is_requeued = place is not None and place.restarts > 0 and job_of(run) == place.job_id
    step = None if options.step is None or is_requeued else step_of(find_checkpoint(run, options.step))
    if options.slurm and place is None:
        prepare_submission(run, config, plan_before, options, step)
        return submit_resume(run, config, plan_before, options)
    announce_job(place, last_job=job_of(run))
    entries, config = hosts_of(config, nodes)
    check_host_options(os.environ, options, num_hosts=len(entries), rejoin=options.rejoin)
    reaches = reach_early(entries, config.python, options)
    with start_check(config, run, options, command="resume", trackers=services.track, entries=entries) as check:
        dataset = reopen_data(run, config, is_elsewhere=not {"data", "val_data"}.isdisjoint(options.keys))
        make, machine = planner(dataset), check.machine()
        plan = replan(plan_before, config, machine, make=make, set_keys=frozenset(options.keys))
        checked = check.judge(plan)
    if options.show_env:
        print(format_env(plan_env(plan, libuv=checked.libuv)[1]))
        return 0
    check_unfinished(run, plan.num_steps, planned=plan_before.num_steps, step=step)
    lock, notes, cluster = wait_for_lock(run), list[str](), partial(cluster_of, entries, config, machine)
    if memory_setup(plan) != memory_setup(plan_before):
        config, plan, notes = try_plan(config, plan, machine, make=make, libuv=checked.libuv, cluster=cluster)
    config = config_of_plan(config, plan, dataset)
    changes = [*changes_on_resume(plan_before, plan), *changed_keys(run, config)]
    if step is not None:
        go_back(run, step)
    for text in changes:
        print(text)
    for text in (*notes, *changes):
        append_event(run, "note", text=text)
    record_data(run, dataset, config)
    write_atomic(run.config_toml, format_toml(config))
    write_atomic(run.plan_json, plan.to_json())
    if place:
        record_job(run, place.job_id)
    hosts = cluster(rejoin=options.rejoin, reaches=reaches)
    job = TrainingJob(run, lock, checked.libuv, options, config, make, cluster=hosts)
    job.resumes_itself = True
    return run_training(job, plan, checked, dataset, services, started=started, is_new=False)


def prepare_submission(run: RunDir, config: Config, plan: Plan, options: ResumeOptions, step: int | None) -> None:
    """Goes back to the step before the job begins, which it may do several times. Raises PacelineError where all steps are done."""
    if config.num_steps and config.epochs is None:  # else the job counts them
        check_unfinished(run, config.num_steps, planned=plan.num_steps, step=step)
    if step is None:
        return
    if options.print:
        raise UsageError("--print shows a script, and --step changes the run", fix="leave one of them out")
    lock = wait_for_lock(run)
    try:
        go_back(run, step)
    finally:
        os.close(lock)


def cluster_of(
    entries: Sequence[HostEntry], config: Config, machine: Machine, *,
    rejoin: bool = False, reaches: Mapping[HostEntry, Reach] | None = None,
) -> Cluster | None:  # fmt: skip
    """Returns the hosts of a run; None for this one alone. reaches: links that were begun before."""
    if not entries:
        return None
    device = choose_device(config, machine)
    nproc = choose_world_size(config, machine, device=device) // machine.hosts
    return Cluster(entries, machine, config, nproc=nproc, rejoin=rejoin, reaches=reaches)


def changed_run(
    run: RunDir, changes: Mapping[str, Any], *, otherwise: str, takes_count: bool = False
) -> tuple[Config, Plan]:
    """Returns the run's config with the changes, and its plan so far. takes_count: --hosts may be a number of nodes of Slurm.

    Raises PacelineError for a key that a run cannot change. otherwise: the command that can, to which the key is added.
    """
    config, _ = load_config(run.config_toml, {})
    check_changes(run, config, changes, otherwise=otherwise)
    plan = read_run_file(run.plan_json, Plan.from_json)
    check_edits(run, config, plan, otherwise=otherwise)
    changes = {key: value for key, value in changes.items() if key not in (*FIXED_KEYS, "runs_dir")}  # where the run is
    per_host = plan.world_size // plan.hosts
    hosts = None if takes_count and str(changes.get("hosts")).isdecimal() else changes.get("hosts")
    if "nproc" not in changes and (nproc := hosts_of(Config(hosts=hosts))[1].nproc):
        changes = {**changes, "nproc": nproc}  # the new list of hosts has it
    if changes.get("nproc", per_host) != per_host:
        changes = {"device_batch_size": None, **changes}  # the micro-batch of other devices is chosen again
    config = Config(**absolute_texts(override(asdict(config), changes)))
    check_config(config)
    return config, plan


def check_unfinished(run: RunDir, num_steps: int, *, planned: int, step: int | None = None) -> None:
    """Raises PacelineError where the run has done all these steps. planned: its steps so far. step: to go on from, if not last."""
    events = (event for event in read_json_lines(run.events) if event.get("event") != "submitted")
    is_finished = end_state(events) == "finished"
    if step is not None:
        if step >= num_steps:
            fix = f"{resume_command(run)} --step {step} --num-steps {2 * step}"
            raise PacelineError(f"step {step:,} of {run.name} is not before the end, num_steps {num_steps:,}", fix=fix)
        return
    if not is_finished and num_steps >= planned:  # one that broke at its last step still has to end
        return
    if (step := last_good_step(run.checkpoints)) >= num_steps:
        longer, text = (
            (f" --num-steps {2 * step}", "extends it") if is_finished else ("", f"trains to step {planned:,}")
        )
        requested = f", past num_steps {num_steps:,}" if num_steps < step else ""
        raise PacelineError(
            f"{run.name} is {'finished' if is_finished else 'already'} at step {step:,} of {planned:,}{requested}",
            fix=f"{resume_command(run)}{longer} {text}",
        )


def run_training(
    job: TrainingJob,
    plan: Plan,
    checked: CheckResult,
    dataset: TokenDataset,
    services: Services,
    *,
    started: float,
    is_new: bool,
) -> int:
    """Prints the plan, runs all attempts and returns the exit code. started: when the command did, by the monotonic clock."""
    with records_early_stop(job):
        prepared_s = time.monotonic() - started
        if checked.facts:
            save_check(job.run, checked)
        num_tokens = {name: format_count(facts["num_tokens"]) for name, facts in dataset.meta["splits"].items()}
        cached = ", prepared before" if dataset.reused else ""
        left_out = dataset.split("train", job.config.packing).left_out(plan.model.sequence_len)
        packed = f" ({format_percent(left_out)} of them left out by best-fit packing)" if left_out else ""
        assert job.config.eval_tokens is not None  # config_of_plan sets it
        scores_all = job.config.eval_tokens >= dataset.meta["splits"]["val"]["num_tokens"] - 1
        scored = f"{'all' if scores_all else f'{job.config.eval_tokens:,}'} of them in each evaluation"
        held_out = f"{num_tokens['val']} {format_held_out(dataset.meta)}"
        sizes = f"{num_tokens['train']} tokens to train on{packed}, {held_out}, {scored}{cached}"
        plan_lines = format_plan(plan, source=f"{dataset.meta['source']}: {sizes}")
        harms = harm_lines(plan_env(plan, libuv=job.libuv)[1])
        notes = [*job_note(current_job(), plan, resumes_itself=job.resumes_itself), *neighbour_notes(job.run, plan)]
        weights = [format_weights(Path(job.config.init_from))] if is_new and job.config.init_from else []
        job.show([*plan_lines, *weights, f"run     {job.run.path}", *notes, *harms, ""])
        members = job.cluster.members if job.cluster else ()
        others = [member.entry.destination for member in members if not member.is_here and member.entry.way == "ssh"]
        if job.options.detach and detach(job.run, job.lock, destinations=others):
            return 0
        chosen = {"device_batch_size": plan.device_batch_size}  # which the config may leave out
        append_event(job.run, "launch", prepared_s=round(prepared_s, 3), config=asdict(job.config), **chosen)
        if job.cluster:
            try:
                job.cluster.connect(job.run, text=dataset.path)
                with show_progress() as progress:
                    text = send_text(job.cluster, dataset.path, file_hashes(dataset), progress=progress)
            except BaseException:
                job.cluster.close()
                if is_new and not job.options.detach:  # a log in the folder has the error
                    remove_unstarted(job.run)
                    job.show([f"note    {job.run.path} is removed: nothing was started"])
                raise
            if text:
                job.show([text])
        with cluster_session(job.cluster, job.run):
            return run_job(job, services)


def config_of_plan(config: Config, plan: Plan, dataset: TokenDataset) -> Config:
    """Returns the config with every value that decides the result; what only fits this machine stays as requested."""
    eval_tokens = choose_eval_tokens(config, num_steps=plan.num_steps, total_batch_size=plan.total_batch_size)
    held_out = dataset.split("val", config.packing)
    packed_tokens = plan.model.sequence_len * held_out.num_rows(plan.model.sequence_len)
    return replace(
        config,
        vocab_size=plan.model.vocab_size,
        n_embd=plan.model.n_embd,
        n_kv_head=plan.model.n_kv_head,
        window_pattern=plan.model.window_pattern,
        total_batch_size=plan.total_batch_size,
        num_steps=plan.num_steps,
        epochs=None,
        # no more than there are, so that runs that score all of them have the same number
        eval_tokens=min(eval_tokens, held_out.num_tokens - 1 if config.packing == "stream" else packed_tokens),
        precision=plan.low_precision.name if plan.low_precision else plan.precision,
    )


@contextmanager
def new_folder(run: RunDir, *, is_named: bool, is_submitted: bool = False) -> Iterator[tuple[RunDir, int, Progress]]:
    """Creates the folder of a new run, or of one beside it where another command took a name that the user did not choose.

    Yields the run, the lock that holds it, and what publishes the work before the launch.
    A folder that has not become a run at the end is removed. Raises PacelineError where it holds something or cannot be written.
    is_submitted: it may hold what the submission to Slurm has left.
    """
    if is_named:
        fix = "another --name" if is_script_run(run) else f"{continuing_fix(run)}, or another --name"
        check_unused(run, fix=fix, is_submitted=is_submitted)
    try:
        run = create_folder(run, is_named=is_named)
        lock = lock_run(run)
    except OSError as error:
        raise unwritable_run(run, error) from error
    record: dict[str, Any] = {"started": utc_now(), "label": None}
    published = 0.0

    def publish(label: str, done: float, total: float) -> None:
        """Writes preparing.json, at most every PUBLISH_S for the same work: viewers read it."""
        nonlocal published
        if label == record["label"] and time.monotonic() - published < PUBLISH_S:
            return
        if label != record["label"]:
            record.update(label=label, since=utc_now())
        record.update(time=utc_now(), share=min(1.0, done / total) if total else None)
        with suppress(OSError):  # a full disk stops what needs the room, not its report
            write_atomic(run.preparing_json, json.dumps(record) + "\n")
        published = time.monotonic()

    publish("read the text", 0, 0)
    try:
        yield run, lock, publish
    finally:
        run.preparing_json.unlink(missing_ok=True)
        if not run.config_toml.is_file():
            remove_unstarted(run)
            os.close(lock)


def remove_unstarted(run: RunDir) -> None:
    """Removes the folder of a run in which nothing has run, unless the log of its Slurm job is there: that has the error."""
    if run.submitted_toml.is_file():
        run.lock.unlink(missing_ok=True)
    else:
        shutil.rmtree(run.path, ignore_errors=True)
