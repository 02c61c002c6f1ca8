"""
`--slurm`: a run as a job of Slurm. One batch script in the run folder, what Slurm would refuse told before it is submitted.

The batch process is the supervisor itself, so Slurm's warning reaches it; started again after a requeue, the same command continues
the run (launch/requeue.py). The config is frozen in submitted.toml: a later edit of the user's file changes nothing. What follows
the job is launch/queue.py. Options of sbatch: man sbatch, 22.05.
"""

import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from paceline.command_line import parameters_of
from paceline.config import Config, cache_dir
from paceline.config_file import format_toml, resolve_config
from paceline.data.prepare import known_sizes
from paceline.errors import PacelineError, PlanError, UsageError, nearest
from paceline.launch.background import check_unused
from paceline.launch.job import planned_step, stop_grace_s
from paceline.launch.queue import follow_job, format_next_commands
from paceline.launch.requeue import record_job
from paceline.options import PlanOptions, SubmitOptions, TrainOptions
from paceline.plan.forecast import Forecast, forecast
from paceline.plan.gpu_table import find_gpu
from paceline.plan.machine import Machine, imagined_machine, probe_machine
from paceline.plan.planner import Plan
from paceline.plan.query import SizesOf, answer
from paceline.run_options import ResumeOptions
from paceline.rundir import RunDir, append_event, is_queued, job_facts, unwritable_run, write_atomic
from paceline.slurm import Partition, SlurmError, SlurmJob, ask, parse_limit, read_partitions, submit_script
from paceline.units import format_duration, format_list, format_number_of
from paceline.watch.about import label_new_run

START_S = 60.0  # of a job until its first step: imports, links, checks, a checkpoint to load
WARN_S = 120  # before the limit, or longer where the plan says that a save takes longer
ROUND_S = 30
SHORT = {
    "p": "partition", "t": "time", "A": "account", "N": "nodes", "n": "ntasks", "a": "array", "G": "gpus", "c": "cpus-per-task",
    "o": "output", "e": "error", "W": "wait",
}  # fmt: skip
# of sbatch, with what says the same here
OURS = {
    "nodes": "--hosts N is the number of nodes", "ntasks": "one task a node is right: paceline starts the ranks",
    "ntasks-per-node": "one task a node is right: paceline starts the ranks", "array": "a run is one job",
    "wrap": "paceline writes the script", "signal": "paceline chooses it", "test-only": "--print shows the script",
    "parsable": "leave it out", "output": "paceline follows slurm-%j.log in the run folder", "error": "it is with the output",
    "wait": "paceline follows the job; --detach does not",
}  # fmt: skip
GPU_OPTIONS = {"gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"}
CPU_OPTIONS = {"exclusive", "cpus-per-task", "oversubscribe", "mincpus", "cpus-per-gpu"}
LOCAL_OPTIONS = {"slurm", "slurm_args", "print", "detach", "show_env", "tag", "note", "step"}  # for this process
SCRIPT = "slurm.sh"


@dataclass(frozen=True)
class Submission:
    """What is asked of Slurm. args: the user's, as sbatch takes them."""

    nodes: int
    partition: Partition
    args: tuple[str, ...] = ()
    limit_s: float = math.inf
    gpus: int | None = None  # on each node
    warn_s: int = WARN_S


@dataclass(frozen=True)
class JobLength:
    """How much of a run fits into one job. None: not known."""

    run_s: float | None
    limit_s: float
    lost_s: float  # of each job: its start, and what is left when it is warned

    @property
    def num_jobs(self) -> int | None:
        if self.run_s is None:
            return None
        return 1 if self.limit_s == math.inf else math.ceil(self.run_s / max(1.0, self.limit_s - self.lost_s))

    @property
    def text(self) -> str:
        limit = "without a time limit" if self.limit_s == math.inf else f"of {format_duration(self.limit_s)}"
        if self.run_s is None or self.num_jobs is None:
            return f"jobs {limit}, as many as it needs: the time of a step is not known"
        return f"{format_number_of(self.num_jobs, 'job')} {limit}: the run needs {format_duration(self.run_s)}"


def submit_run(config: Config, run: RunDir, options: TrainOptions) -> int:
    """Submits a new run to Slurm, and follows it unless it is detached; returns the exit code. Raises PacelineError."""
    fix = f"paceline resume {run.quoted} --slurm continues a training, or another --name"
    check_unused(run, fix=fix, is_submitted=is_queued(run))  # by a job that has ended before it began
    nodes, config = nodes_of(replace(config, name=run.name))
    command = ["train", str(run.submitted_toml.resolve()), *option_flags(options)]
    return submit(run, command, options, make_submission(config, nodes, options.slurm_args), config=config)


def submit_resume(run: RunDir, config: Config, plan: Plan, options: ResumeOptions) -> int:
    """Submits the continuation of a run to Slurm, on as many nodes as before or as --hosts says; so with --slurm-args."""
    slurm_args = options.slurm_args or str(job_facts(run).get("args", ""))
    if slurm_args and not (options.slurm_args or options.print):
        print(f"slurm   as submitted before: --slurm-args {shlex.quote(slurm_args)}", flush=True)
    nodes, config = nodes_of(replace(config, hosts=options.keys.get("hosts", str(plan.hosts))))
    changed = {name: value for name, value in options.keys.items() if name not in ("hosts", "runs_dir")}
    keys = [f"--{name.replace('_', '-')}={'auto' if value is None else value}" for name, value in changed.items()]
    command = ["resume", str(run.path.resolve()), *keys, *option_flags(options)]
    return submit(run, command, options, make_submission(config, nodes, slurm_args), config=None)


def submit(
    run: RunDir, command: Sequence[str], options: TrainOptions | ResumeOptions, made: tuple[Submission, JobLength], *,
    config: Config | None,
) -> int:  # fmt: skip
    """Writes the script and gives it to sbatch. config: of a new run; its folder is removed where Slurm refuses."""
    submission, length = made
    script = batch_script(run, command, submission)
    if options.print:
        print(script, end="")
        return 0
    notes = node_notes(submission.partition, nodes=submission.nodes)
    for note in notes:
        print(note, flush=True)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        write_atomic(run.path / SCRIPT, script)
        (run.path / SCRIPT).chmod(0o700)
        if config and isinstance(options, TrainOptions):
            write_atomic(run.submitted_toml, format_toml(config))
            label_new_run(run, options)
    except OSError as error:
        raise unwritable_run(run, error) from error
    try:
        if not notes:  # it refuses what cannot start now, although sbatch takes a job that waits for nodes
            ask("sbatch", "--test-only", str(run.path / SCRIPT))
        job_id = submit_script(run.path / SCRIPT)
    except SlurmError as error:
        if config:
            shutil.rmtree(run.path)
        fix = "see --slurm-args, and what there is: sinfo -o '%P %l %D %G'"
        raise PacelineError(f"{error.message.rstrip('.')}: Slurm does not take this job", fix=fix) from error
    record_job(run, job_id, nodes=submission.nodes, args=shlex.join(submission.args))
    if not config:  # a new run has no events yet
        append_event(run, "submitted", job_id=job_id)
    where = f"{format_number_of(submission.nodes, 'node')} of partition {submission.partition.name}"
    print(f"slurm   job {job_id}, {where}; {length.text}")
    print(f"script  {run.path / SCRIPT}", flush=True)
    if options.detach:
        print(format_next_commands(run))
        return 0
    return follow_job(run, job_id)


def nodes_of(config: Config) -> tuple[int, Config]:
    """Returns the number of nodes that --hosts gives, and the config without it: the job says which they are."""
    text = config.hosts or "1"
    if not text.isdecimal() or not int(text):
        raise UsageError(f"--slurm takes a number of nodes, not --hosts {text}", fix="--slurm --hosts 4")
    return int(text), replace(config, hosts=None)


def make_submission(
    config: Config, nodes: int, slurm_args: str, *, gpu: str | None = None
) -> tuple[Submission, JobLength]:
    """Returns what is asked of Slurm, and how many jobs the run needs. gpu: what the GPUs of the partition are, if not as it says.

    Raises PacelineError for what would be refused.
    """
    args = tuple(split_args(slurm_args))
    values = read_args(args)
    partition = choose_partition(read_partitions(), values.get("partition") or os.environ.get("SBATCH_PARTITION"))
    partition = replace(partition, gpu_kind=gpu or partition.gpu_kind)
    limit_s = read_limit(values.get("time") or os.environ.get("SBATCH_TIMELIMIT"), partition)
    gpus = None
    if partition.gpus and config.device != "cpu":
        gpus = config.nproc or partition.gpus
    check_size(partition, nodes=nodes, gpus=gpus, account=values.get("account") or os.environ.get("SBATCH_ACCOUNT"))
    estimate = plan_job(config, partition, nodes=nodes, gpus=gpus)
    warn_s = WARN_S if estimate is None else max(WARN_S, math.ceil(stop_grace_s(estimate.plan) / ROUND_S) * ROUND_S)
    gpus = None if GPU_OPTIONS & values.keys() else gpus
    run_s = 3600 * estimate.run.hours.expected if estimate and estimate.run else None
    length = JobLength(run_s, limit_s, START_S + warn_s)
    check_length(length, estimate)
    return Submission(nodes, partition, args, limit_s, gpus, warn_s), length


def split_args(text: str) -> list[str]:
    """Returns the words of --slurm-args; raises UsageError for what is no list of options."""
    fix = '--slurm-args "--partition=gpu --time=8:00:00"'
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--slurm-args {text}: {error}", fix=fix) from None
    if "\n" in text or (words and not words[0].startswith("-")):
        raise UsageError(f"--slurm-args {text}: not options of sbatch", fix=fix)
    return words


def read_args(words: Sequence[str]) -> dict[str, str]:
    """Returns the options of sbatch by their long names; raises UsageError for one that paceline itself sets."""
    values: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
        elif word.startswith("-") and len(word) > 1:
            name, value = SHORT.get(word[1], word[1]), word[2:].removeprefix("=")
        else:
            value = word
        values[name] = value
        if name in OURS:
            raise UsageError(f"--slurm-args has --{name}: {OURS[name]}", fix=f"leave --{name} out")
    return values


def choose_partition(partitions: Sequence[Partition], requested: str | None) -> Partition:
    """Returns the requested partition, the first of several, or the default; raises PacelineError where it takes no jobs."""
    by_name = {partition.name: partition for partition in partitions}
    names = [name for name in (requested or "").split(",") if name]
    if not names:
        default = next((partition for partition in partitions if partition.is_default), None)
        if default is None:
            fix = f'--slurm-args "--partition={next(iter(by_name), "NAME")}"'
            raise PacelineError(f"Slurm has no default partition; there are {format_list(by_name)}", fix=fix)
        names = [default.name]
    for name in names:
        if name not in by_name:
            near = nearest(name, by_name) or next(iter(by_name), "NAME")
            raise PacelineError(
                f"Slurm has no partition {name}; there are {format_list(by_name)}",
                fix=f'--slurm-args "--partition={near}"',
            )
        if by_name[name].state != "UP":
            up = [p.name for p in partitions if p.state == "UP"]
            fix = f'--slurm-args "--partition={up[0]}"' if up else "ask the administrators of the cluster"
            raise PacelineError(f"partition {name} is {by_name[name].state}: a job there would not start", fix=fix)
    return by_name[names[0]]


def read_limit(text: str | None, partition: Partition) -> float:
    """Returns the time limit of the job in seconds; raises PacelineError for one above the partition's, or that is no time."""
    if not text:
        return min(partition.max_s, partition.default_s or partition.max_s)
    try:
        limit_s = parse_limit(text)
    except ValueError:
        fix = "--time=8:00:00, or --time=1-12 for 36 hours"
        raise UsageError(f"--time={text} is not a time of Slurm", fix=fix) from None
    if limit_s > partition.max_s:
        most = format_duration(partition.max_s)
        raise PacelineError(
            f"--time={text} is more than the {most} that partition {partition.name} allows: the job would wait for ever",
            fix=f"a shorter --time: the run takes as many jobs as it needs, up to {most} each",
        )
    return limit_s


def check_size(partition: Partition, *, nodes: int, gpus: int | None, account: str | None) -> None:
    """Raises PacelineError where the partition has fewer nodes or GPUs, or is not for this account."""
    most = int(min(partition.num_nodes, partition.max_nodes))
    if nodes > most:
        what = f"{nodes} nodes, and partition {partition.name} gives a job {most}"
        raise PacelineError(what, fix=f"--hosts {most}, or another --partition")
    if gpus and partition.gpus and gpus > partition.gpus:
        what = f"{gpus} GPUs on each node, and those of partition {partition.name} have {partition.gpus}"
        raise PacelineError(what, fix=f"--nproc {partition.gpus}, or another --partition")
    if partition.accounts and account not in partition.accounts:
        what = (
            f"partition {partition.name} is for {format_list(partition.accounts)}, not for account {account or 'n/a'}"
        )
        raise PacelineError(what, fix=f'--slurm-args "--account={partition.accounts[0]} ...", or another --partition')


def node_notes(partition: Partition, *, nodes: int) -> list[str]:
    """Returns a line where fewer nodes are up than the job needs, so that it waits for them."""
    if partition.num_up >= nodes:
        return []
    up = f"{partition.num_up} of the {format_number_of(partition.num_nodes, 'node')} of partition {partition.name}"
    return [f"slurm   {up} {'is' if partition.num_up == 1 else 'are'} up, the job waits for {nodes}; sinfo -R says why"]


def plan_job(config: Config, partition: Partition, *, nodes: int, gpus: int | None) -> Forecast | None:
    """Returns the forecast for the nodes of a partition; None where its GPUs are not known, or the text decides the length.

    Raises PlanError where the run does not fit. The CPUs are taken to be like those here.
    """
    machine: Machine | None = replace(probe_machine(), gpus=(), hosts=nodes)
    if gpus:
        machine = None
        with suppress(PlanError):  # a name of the site's own
            machine = imagined_machine(find_gpu(partition.gpu_kind or ""), gpus=gpus, hosts=nodes)
    if machine is None or config.epochs is not None:
        return None
    return forecast(config, machine, cache=cache_dir(config), vocab_size=known_sizes(config).vocab_size, num_rows=0)


def check_length(length: JobLength, estimate: Forecast | None) -> None:
    """Raises PacelineError for a limit in which a job could not start, take some steps and save."""
    step = planned_step(estimate.plan.cost) if estimate else None
    steps_s = 2 * step.seconds.high if step and step.seconds else 0.0
    needed_s = length.lost_s + steps_s
    if length.limit_s <= needed_s:
        raise PacelineError(
            f"a job of {format_duration(length.limit_s)} has no time for a checkpoint: start, save and warning take"
            f" {format_duration(needed_s)}",
            fix=f'--slurm-args "--time={math.ceil(needed_s / 60) + 5}" or more',
        )


def batch_script(run: RunDir, command: Sequence[str], submission: Submission, *, python: str = sys.executable) -> str:
    """Returns the batch script. command: what `paceline` runs in the job."""
    whole_nodes = not submission.gpus and not (CPU_OPTIONS | GPU_OPTIONS) & read_args(submission.args).keys()
    lines = [
        f"--job-name={quote(run.name)}",
        f"--nodes={submission.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={submission.gpus}"] if submission.gpus else []),
        *(["--exclusive"] if whole_nodes else []),
        f"--signal=B:USR1@{submission.warn_s}",
        "--requeue",
        "--open-mode=append",
        f"--output={quote(str(run.path.resolve()).replace('%', '%%') + '/slurm-%j.log')}",
        *([" ".join(map(quote, submission.args))] if submission.args else []),
    ]
    words = [python, "-m", "paceline.cli", *command]
    return "\n".join([
        "#!/bin/bash",
        *(f"#SBATCH {line}" for line in lines),
        "# exec: the warning before the time limit reaches paceline. After a requeue the same command continues the run.",
        f"cd {shlex.quote(os.getcwd())} || exit",  # noqa: PTH109
        f"exec {shlex.join(words)}",
        "",
    ])  # fmt: skip


def quote(text: str) -> str:
    """Returns a word as sbatch reads it in a script: in double quotes, where it has more than letters and the like."""
    if text and all(char.isalnum() or char in "-_=./:,+@%" for char in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def option_flags(options: TrainOptions | ResumeOptions) -> list[str]:
    """Returns the options of a command that are not at their defaults, as flags for the job; not those that were meant for here."""
    flags: list[str] = []
    for name, parameter in parameters_of(TrainOptions if isinstance(options, TrainOptions) else ResumeOptions).items():
        value = getattr(options, name, parameter.default)  # not of keys
        if name in LOCAL_OPTIONS or parameter.positional or value == parameter.default:
            continue
        text = str(value).removesuffix(".0") if isinstance(value, float) else value
        values = text if isinstance(text, tuple) else (text,)
        flags += [parameter.flags[0]] if parameter.is_switch else [f"{parameter.option}={item}" for item in values]
    return flags


def add_jobs(options: PlanOptions, ask_hosts: Callable[[Config], Machine], sizes_of: SizesOf) -> str:
    """Returns the answer of `paceline plan --slurm`: for the GPUs of the partition, with the number of jobs that the run needs."""
    nodes, config = nodes_of(resolve_config(options.config, options.keys))
    submission, length = make_submission(config, nodes, options.slurm_args, gpu=options.gpu)
    partition, note = submission.partition, ""
    if partition.gpus and config.device != "cpu":
        try:
            named = find_gpu(partition.gpu_kind or "").name
            # without a config, what the job would train, not the default of plans for other machines
            options = replace(options, config=options.config or "tiny", gpu=named, gpus=options.gpus or partition.gpus)
        except PlanError:  # a name of the site's own
            kind = f"the GPUs of partition {partition.name} ({partition.gpu_kind or 'no name'})"
            note = f"\nnote    the plan does not know {kind}: it is for the devices here; --gpu NAME says what they are"
    text = answer(options, ask_hosts, sizes_of)
    if options.json:
        limit_s = None if length.limit_s == math.inf else length.limit_s
        facts = {"nodes": nodes, "partition": partition.name, "limit_s": limit_s, "jobs": length.num_jobs}
        return json.dumps({**json.loads(text), "slurm": facts}, indent=1)
    return f"{text}\nslurm   {format_number_of(nodes, 'node')} of partition {partition.name}; {length.text}{note}"


def job_note(job: SlurmJob | None, plan: Plan, *, resumes_itself: bool) -> list[str]:
    """Returns a line where the run does not end within the job that it is in; it says whether it continues by itself."""
    run_s = 3600 * plan.cost["run"]["hours"]["expected"] if plan.cost.get("run") else None
    if job is None or job.end is None or run_s is None or run_s < (left_s := job.end - time.time()):
        return []
    text = f"slurm   the run needs {format_duration(run_s)}, and the job ends in {format_duration(left_s)}"
    if not job.is_batch:
        return [f"{text}: it is saved before; paceline resume continues it"]
    if job.can_requeue and resumes_itself:
        return [f"{text}: it is requeued until the run is done"]
    return [f"{text}, and is not requeued: that needs {'--name' if job.can_requeue else 'sbatch --requeue'}"]


def check_options(options: SubmitOptions, *, has_place: bool) -> None:
    """Raises UsageError for options that are about --slurm, without it. has_place: this process is in a job already."""
    flag = "--slurm-args" if options.slurm_args else "--print" if options.print else None
    if flag and not options.slurm and not has_place:
        raise UsageError(f"{flag} is about --slurm", fix="--slurm, or leave it out")
