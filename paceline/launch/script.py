"""
`run`: prepare, check, attempts, close, around any script that works under torchrun.

The run folder is a training run's without metrics: config.toml repeats the run. The ranks' output goes to stdout, paceline's own to
stderr. The script finds in its environment what torchrun would have set; what it does with its ranks is its own business.
"""

import os
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.check.ready import CheckResult, find_findings, report_and_refuse, save_check
from paceline.check.verdicts.rules import Intent
from paceline.config import Config, cache_dir, check_config, check_utf8
from paceline.config_file import checked_value
from paceline.errors import PacelineError, UsageError
from paceline.explain.catalogue import load_catalogue
from paceline.explain.explanation import Explanation, format_summary
from paceline.explain.recorded_end import went_on
from paceline.explain.run_folder import explain_run
from paceline.launch.attempts import Job, records_early_stop, run_job
from paceline.launch.background import check_unused, create_folder, detach
from paceline.launch.cluster import Cluster
from paceline.launch.digest import LogTail, NewRecords
from paceline.launch.env import Launch, check_host_options, env_elsewhere, format_env, harm_lines, worker_env
from paceline.launch.host_facts import HostFacts, StartCheck, start_asking
from paceline.launch.hosts import HOST_KEYS, HostEntry, hosts_of, is_this_host
from paceline.launch.member import reach_early
from paceline.launch.notify import checked_services
from paceline.launch.policy import CRASHES, Abilities, AttemptEnd
from paceline.launch.script_command import command_name, make_argv
from paceline.launch.stop_signals import StopSignals
from paceline.launch.supervisor import Outcome, run_attempt
from paceline.launch.sync import find_script_files, renew_code, send_script
from paceline.options import LabelOptions, LaunchOptions, RanksOptions, ScriptOptions
from paceline.plan.machine import Machine
from paceline.plan.planner import choose_device, choose_world_size
from paceline.run_options import ResumeOptions
from paceline.rundir import (
    RunDir,
    append_event,
    is_script_run,
    lock_run,
    read_json_lines,
    resume_command,
    unwritable_run,
    write_atomic,
)
from paceline.terminal import has_input, shows_colours
from paceline.typed_fields import find_recorded_run, find_training_run, toml_text
from paceline.units import format_duration, format_number_of
from paceline.watch.about import label_new_run
from paceline.watch.events import end_state, event_text

PROGRESS_S = 600.0  # what a script saves is unknown: an attempt that lasted this long has made progress
STOP_GRACE_S = 60.0
DOUBTED_BYTES = 4 << 20  # of output that is read behind a good end, which takes a second or two
CONFIG_KEYS = {"command", "nproc", "device", "cwd"}


@dataclass(frozen=True)
class Request:
    """A command and the keys that are set for it, by flags or by the config.toml of an earlier run."""

    command: tuple[str, ...]  # as the user typed it: train.py --lr 0.1
    cwd: Path
    config: Config


@dataclass(frozen=True)
class Script:
    """A command and the processes that run it."""

    command: tuple[str, ...]
    nproc: int  # on each host
    device: str
    cwd: Path
    hosts: Mapping[str, str] = field(default_factory=dict)  # those of HOST_KEYS that are set


def resume(options: ResumeOptions, nodes: Sequence[HostEntry] = ()) -> int:
    """Resumes a training run or a script's, and returns the exit code; nodes: that have joined."""
    runs_dir = options.keys.get("runs_dir", Config.runs_dir)
    run = find_recorded_run(options.run, runs_dir=runs_dir)
    if is_script_run(run):
        return resume_script(run, options, nodes)
    if options.quiet_ranks or options.sync or options.no_sync:
        raise UsageError("--quiet-ranks, --sync and --no-sync are for the run of a script", fix="leave them out")
    run = find_training_run(options.run, runs_dir=runs_dir)
    return int(import_module("paceline.launch.train").resume_run(run, options, nodes))  # a script needs none of it


def resume_script(run: RunDir, options: ResumeOptions, nodes: Sequence[HostEntry]) -> int:
    """Starts the script of a run again in the run's own folder, as its next attempt, and returns the exit code.

    The script finds what it saved in PACELINE_RUN. Raises PacelineError for what the user can fix.
    """
    known = {item.name: item for item in fields(ScriptOptions)}
    allowed = set(known["keys"].metadata["names"]) - {"name"}
    unused = [f"--{name.replace('_', '-')}" for name in options.keys if name not in allowed]
    unused += [f"--{name.replace('_', '-')}" for name in ("slurm", "slurm_args", "print") if getattr(options, name)]
    if unused := [*unused, *["--no-rejoin"] * (not options.rejoin), *["--step"] * (options.step is not None)]:
        own = f"paceline run --name NEW -- {shlex.join(load_script_config(run.config_toml)['command'])}"
        raise UsageError(f"{unused[0]} is not for the run of a script", fix=f"options of its own in a new run: {own}")
    if end_state(read_json_lines(run.events)) == "finished":
        fix = f"paceline run {shlex.quote(str(run.config_toml))} runs it again in a new folder"
        raise PacelineError(f"{run.name} has finished: its script ended with exit code 0", fix=fix)
    shared = {item.name: getattr(options, item.name) for kind in (LaunchOptions, RanksOptions) for item in fields(kind)}
    return run_script(ScriptOptions(**shared, command=(str(run.config_toml),), keys=options.keys), nodes, run=run)


def run_script(options: ScriptOptions, nodes: Sequence[HostEntry] = (), *, run: RunDir | None = None) -> int:
    """Runs a script and returns its exit code; nodes: that have joined; run: one that goes on in its folder.

    Raises PacelineError for what the user can fix.
    """
    services = checked_services(options)
    request = read_request(options.command, options.keys)
    entries, config = hosts_of(request.config, nodes)
    request = replace(request, config=config)
    check_host_options(os.environ, options, num_hosts=len(entries))
    if (options.sync or options.no_sync) and not entries:
        raise UsageError("--sync and --no-sync are about several hosts", fix="--hosts ada,bob, or leave it out")
    if options.sync and options.no_sync:
        raise UsageError("--sync and --no-sync contradict each other", fix="leave one of them out")
    argv = make_argv(request.command, cwd=request.cwd)
    files = find_script_files(argv, cwd=request.cwd, sync=options.sync) if entries else None
    is_new = run is None
    run = run or choose_run(options.keys.get("name"), options.keys.get("runs_dir", Config.runs_dir), request)
    reaches = reach_early(entries, config.python, options)
    facts = script_facts(entries, config, run) if entries or options.check else None
    machine = StartCheck(facts, entries, lambda _: Intent(), is_on=options.check, stream=sys.stderr).machine()
    script = make_script(request, machine)
    checked = CheckResult((), ())
    if options.check and facts:
        checked = check_script(script, run, facts.result(), config=config, trackers=services.track, resumes=not is_new)
    launch = Launch(script.nproc, script.device, machine.cpu_cores, libuv=checked.libuv, for_script=True)
    env, rows = worker_env(os.environ, launch)
    with suppress(PacelineError) if options.show_env else nullcontext():
        report_and_refuse(checked.findings, stopped="this script", stream=sys.stderr, several=bool(entries))
    if options.show_env:
        print(format_env(rows))
        return 0
    run, lock = open_run(run, script, checked, options, is_new=is_new, is_named=options.keys.get("name") is not None)
    job, lines = ScriptJob(run, lock, checked.libuv, options, script, argv, env), list[str]()
    if options.detach and detach(run, lock, destinations=[e.destination for e in entries if not is_this_host(e)]):
        return 0
    if files:
        cluster = job.cluster = Cluster(entries, machine, config, nproc=script.nproc, reaches=reaches)
        job.env_elsewhere = env_elsewhere(os.environ, launch, options.env)
        try:
            cluster.connect(run, text=None)
            lines, hashes = send_script(cluster, files, run, sync=not options.no_sync)
            job.renew_code = partial(renew_code, cluster, files, hashes, run) if hashes else list
        except BaseException:
            cluster.close()
            if is_new and not options.detach:  # nothing has run; a log in the folder has the error
                shutil.rmtree(run.path)
            raise
    device = f"device  {format_devices(script, machine, num_hosts=len(entries))}"
    if has_input():
        lines = [*lines, "note    the script gets no standard input: what is piped in stays unread"]
    with records_early_stop(job), closing(job.cluster) if job.cluster else nullcontext():
        job.show(
            [f"script  {shlex.join(script.command)}", device, *lines, f"run     {run.path}", *harm_lines(rows), ""]
        )
        return run_job(job, services)


def format_devices(script: Script, machine: Machine, *, num_hosts: int) -> str:
    """Returns what the script runs on; num_hosts 0: on this host alone."""
    threads = format_number_of(max(1, machine.cpu_cores // script.nproc), "thread")
    processes = f"{format_number_of(script.nproc, 'CPU process', 'CPU processes')} x {threads}"
    devices = f"{script.nproc} x {machine.gpus[0].name}" if script.device == "cuda" else processes
    return f"{format_number_of(num_hosts, 'host')} x {devices}" if num_hosts else devices


@dataclass
class ScriptJob(Job):
    """A script as a job of launch/attempts.py: the same command each time, with the number of the attempt in its environment."""

    options: ScriptOptions
    script: Script
    argv: list[str]
    env: Mapping[str, str]
    env_elsewhere: Mapping[str, str] = field(default_factory=dict)  # on other hosts
    renew_code: Callable[[], list[str]] = list  # sends other hosts what has changed of the code; returns lines about it
    is_retry: bool = False

    def attempt(self, number: int, signals: StopSignals) -> Outcome:
        """Runs the script on every rank and shows its lines as they come."""
        members = self.cluster.begin() if self.cluster else ()
        host_of = {rank: member.name for member in members for rank in member.ranks}
        if self.is_retry and (lines := self.renew_code()):
            self.show(lines)
        self.is_retry = True
        world_size = len(host_of) or self.script.nproc
        ranks = range(1 if self.options.quiet_ranks else world_size)
        logs = {rank: self.run.rank_log(number, rank) for rank in ranks}
        tail = LogTail(logs, stream=sys.stdout, colour=shows_colours(sys.stdout), hosts=host_of)
        events = NewRecords(self.run.events)

        def show_new() -> None:
            tail.poll()
            for event in events.read():
                if event.get("event") == "stopping":
                    seconds = min(STOP_GRACE_S, event.get("seconds_left", STOP_GRACE_S))
                    text = f"stopping: {event['sent']} sent, the script has {seconds:.0f} s to end"
                    self.show([f"{text}; Ctrl-C again to end now"])
                elif event.get("event") in ("note", "silence"):
                    self.show([event_text(event, max_chars=None)])

        def follow(run: RunDir) -> None:
            nonlocal events
            events = NewRecords(run.events)
            for rank, log in zip(ranks, tail.logs, strict=True):
                log.path = run.rank_log(number, rank)
            self.move(run)

        variables = {"PACELINE_ATTEMPT": str(number), "PACELINE_RUN": str(self.run.path.resolve())}
        try:
            return run_attempt(
                self.run, command=self.argv, nproc=world_size, attempt=number, env={**self.env, **variables},
                settings={**self.env_elsewhere, **variables}, cluster=self.cluster, lock_fd=self.lock, signals=signals,
                on_tick=show_new, on_move=follow, hang_after_s=self.options.hang_after_s, stop_grace_s=STOP_GRACE_S,
                libuv=self.libuv, cwd=self.script.cwd, script=True, health_every_s=self.options.health_every_s,
            )  # fmt: skip
        finally:
            tail.close()

    def abilities(self, end: AttemptEnd) -> Abilities:
        """Returns which hosts remain: the script runs on them with as many ranks."""
        if not self.cluster or not self.cluster.lost_in_attempt:
            return Abilities()
        left = tuple(member.name for member in self.cluster.present)
        num_ranks = len(left) * self.script.nproc if len(left) >= self.options.min_hosts else 0
        return Abilities(lost_hosts=self.cluster.lost_in_attempt, hosts_left=left, ranks_left=num_ranks)

    def made_progress(self, outcome: Outcome, *, seconds: float) -> bool:
        """Whether the attempt lasted long enough, without the silence of a hang."""
        return seconds - (outcome.hang.silent_s if outcome.hang else 0.0) >= PROGRESS_S

    def show(self, lines: Sequence[str], *, exit_code: int = 0) -> None:
        """Prints to stderr, after what the script has written so far: stdout is the script's."""
        sys.stdout.flush()
        print("\n".join(lines), file=sys.stderr, flush=True)

    def exit_code(self, outcome: Outcome) -> int:
        """Returns the script's exit code; 1 for a known mistake of its author, which argparse, for one, ends with 2."""
        cause = load_catalogue().causes.get(outcome.explanation.cause) if outcome.explanation else None
        text = "\n".join(item.text for item in outcome.explanation.evidence) if outcome.explanation else ""
        is_rank = bool(outcome.failures) and outcome.failures[0].rank is not None
        is_mistake = is_rank and cause is not None and cause.choose_retry(text) == "never" and cause.id not in CRASHES
        return PacelineError.exit_code if is_mistake else outcome.exit_code

    def closing_lines(self, outcome: Outcome, *, seconds: float, time_line: str) -> list[str]:
        """Returns how the script ended and where its logs are."""
        logs = f"logs    {self.run.logs(outcome.attempt)}"
        if outcome.state == "interrupted":
            next_line = f"next    {resume_command(self.run)}"
            return ["", f"interrupted after {format_duration(seconds)}", time_line, logs, next_line]
        notes = []
        if shown := outcome.explanation:
            notes.append(f"note    exit code 0, and yet {format_summary(shown)}: paceline explain {self.run.quoted}")
        if outcome.joined is False and self.script.nproc > 1:
            notes.append(f"note    no rank joined a process group: each of the {self.script.nproc} ranks worked alone")
        return ["", *notes, f"done    in {format_duration(seconds)}", time_line, logs]

    def shown_failure(self, outcome: Outcome) -> Explanation | None:
        """Returns the failure that the output shows; None where it is too long to be read here, or the script went on."""
        try:
            logs = self.run.logs(outcome.attempt).glob("*.log")
            if sum(path.stat().st_size for path in logs) > DOUBTED_BYTES:
                return None
            explanation = explain_run(self.run, attempt=outcome.attempt)
        except KeyboardInterrupt:  # the run itself is over
            return None
        except Exception as error:  # whatever stands in the folder, the script has ended well
            self.show([f"note    its output could not be explained ({type(error).__name__}: {error})"])
            return None
        return explanation if explanation.shows_failure and not went_on(explanation) else None


def script_facts(entries: Sequence[HostEntry], config: Config, run: RunDir) -> Future[HostFacts]:
    """Returns the facts of all hosts, or of this one where the list is empty."""
    folders = {"run_dir": run.path, "cache_dir": None, "cached_torch": cache_dir(Config()) / "torch.json"}
    with start_asking(entries, config, **folders) as facts:
        facts.result()
    return facts


def check_script(
    script: Script, run: RunDir, facts: HostFacts, *, config: Config, trackers: tuple[str, ...], resumes: bool
) -> CheckResult:
    """Checks whether the script would fail, and what would hurt it."""
    keys = {key: getattr(config, key) for key in ("device", *HOST_KEYS)}
    intent = Intent(command="run", device=script.device, nproc=script.nproc, run_dir=str(run.path), config=keys)
    intent = replace(intent, num_hosts=len(facts[0]), trackers=trackers, resumes=resumes)
    return CheckResult(facts[0], find_findings(facts[0], intent, facts[1]))


def read_request(command: Sequence[str], keys: Mapping[str, Any]) -> Request:
    """Returns a command, or that of the config.toml of an earlier run. keys: those that are set, which win.

    Raises PacelineError for a config that is not a script's.
    """
    values, cwd = {name: keys[name] for name in ("nproc", "device", *HOST_KEYS) if name in keys}, Path.cwd()
    if command and command[0].endswith(".toml"):
        if command[1:]:
            raise UsageError(f"{command[0]} has its own command", fix=f"paceline run {command[0]}")
        config_toml = load_script_config(Path(command[0]))
        command, cwd = list(config_toml.pop("command")), Path(config_toml.pop("cwd"))
        if "nproc" not in values and hosts_of(Config(hosts=values.get("hosts")))[1].nproc:
            del config_toml["nproc"]  # the new list of hosts has it
        values = {**config_toml, **values}
        if not cwd.is_dir():
            raise PacelineError(f"{cwd}, where the command runs, does not exist", fix="restore it, or change cwd")
    config = Config(**{name: checked_value(name, value, where=f"--{name}") for name, value in values.items()})
    return Request(tuple(command), cwd, config)


def make_script(request: Request, machine: Machine) -> Script:
    """Returns the script of a request; what is not set follows from the machine."""
    config, device = request.config, choose_device(request.config, machine)
    nproc = choose_world_size(config, machine, device=device) // machine.hosts
    hosts = {name: value for name in HOST_KEYS if (value := getattr(config, name)) is not None}
    return Script(request.command, nproc, device, request.cwd, hosts)


def load_script_config(path: Path) -> dict[str, Any]:
    """Returns the values of a script's config.toml. Raises PacelineError for any other file."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PacelineError(f"config file {path} cannot be read: {error}", fix="config.toml of a run folder") from error
    if missing := sorted(CONFIG_KEYS - set(values)):
        raise PacelineError(
            f"{path} is not the config of a script: {', '.join(missing)} not in it",
            fix=f"paceline train {shlex.quote(str(path))}, if it is that of a training run",
        )
    texts = [*values["command"], values["cwd"]] if isinstance(values["command"], list) else [None]
    if set(values) - CONFIG_KEYS - set(HOST_KEYS) or not all(isinstance(text, str) for text in texts):
        raise PacelineError(
            f"{path}: it takes command, a list of strings, and cwd, a string, with nproc, device and hosts",
            fix='command = ["x.py"] and cwd = "/home/me/code"',
        )
    return values


def format_config(script: Script) -> str:
    """Returns the config.toml that gives this script back."""
    values = {"command": script.command, "nproc": script.nproc, "device": script.device, "cwd": str(script.cwd)}
    values |= script.hosts
    return toml_text(values)


def choose_run(name: str | None, runs_dir: str, request: Request) -> RunDir:
    """Returns the folder that the run will have, and creates nothing. Raises PacelineError where it is in use."""
    if name is None:
        return RunDir(Path(runs_dir) / f"{command_name(request.command)}-{datetime.now():%Y%m%d-%H%M%S}")
    check_config(Config(name=name))
    run = RunDir(Path(runs_dir) / name)
    check_unused(run, fix="another --name; without --name, script and time make the name")
    return run


def open_run(
    run: RunDir, script: Script, checked: CheckResult, labels: LabelOptions, *, is_new: bool, is_named: bool
) -> tuple[RunDir, int]:
    """Writes what is known before the start to the run's folder, which it creates for a new one; returns run and lock.

    config.toml comes last and makes it a run.
    """
    config = format_config(script)
    check_utf8("the working directory", str(script.cwd))
    check_utf8("the command", " ".join(script.command))
    try:
        run = create_folder(run, is_named=is_named) if is_new else run
        lock = lock_run(run)
        if checked.facts:
            save_check(run, checked)
        label_new_run(run, labels)
        append_event(run, "script", command=list(script.command), nproc=script.nproc, device=script.device)
        write_atomic(run.config_toml, config)
    except OSError as error:
        raise unwritable_run(run, error) from error
    return run, lock
