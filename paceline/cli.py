"""
The command line: one short function for each command, and from an error to two lines and an exit code.

What a command takes, and its help, is a dataclass of options.py or run_options.py. Torch is not imported; a function imports what
its command needs. Exit codes: 0 done; 1 a user's error, with its fix; 2 wrong usage; 3 the training failed; 130 interrupted.
"""

import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline import __version__, options, run_options
from paceline.command_line import HELP_FLAGS, complete, format_commands, parse
from paceline.config import cache_dir
from paceline.config_file import resolve_config
from paceline.errors import INTERRUPTED, PacelineError, TrainingFailed, UsageError, check_new_file
from paceline.other_names import unknown_command
from paceline.rundir import RunDir, find_run
from paceline.terminal import format_facts, plain_output, problem_of, show_progress, shows_colours, tolerant_output
from paceline.typed_fields import find_training_run


@tolerant_output()
def train(args: options.TrainOptions) -> int:
    from paceline.launch import connect, train

    config = resolve_config(args.config, args.keys)
    return connect.run_at_place(args, partial(train.start_run, config, args), ports=config.ports)


@tolerant_output()
def resume(args: run_options.ResumeOptions) -> int:
    from paceline.launch import connect, script

    return connect.run_at_place(args, partial(script.resume, args), ports=args.keys.get("ports"))


@tolerant_output()
def run(args: options.ScriptOptions) -> int:
    from paceline.launch import connect, script

    return connect.run_at_place(args, partial(script.run_script, args), ports=args.keys.get("ports"))


def stop(args: run_options.StopOptions) -> int:
    return int(import_module("paceline.launch.background").answer_stop(args))


def plan(args: options.PlanOptions | options.ConfigsOptions) -> None:
    from paceline.data.prepare import known_sizes
    from paceline.plan.query import answer, answer_configs

    if isinstance(args, options.ConfigsOptions):
        print(answer_configs(args))
    else:  # what reaches other hosts is imported where hosts are named
        if args.slurm:
            from paceline.launch.sbatch import add_jobs as answer
        sizes_of = partial(known_sizes, set_keys=args.keys)
        print(answer(args, lambda config: import_module("paceline.launch.host_facts").ask_machine(config), sizes_of))


def check(args: options.CheckOptions) -> int:
    from paceline.check.format import is_ready
    from paceline.check.ready import check_config, format_check
    from paceline.launch import host_facts, hosts
    from paceline.plan.machine import probe_machine
    from paceline.terminal import progress_line

    entries, config = hosts.hosts_of(resolve_config(args.config, args.keys))
    with progress_line("checking") as on_probe:
        ask = host_facts.hosts_asker(entries, config, port=args.port, is_whole=True, on_answer=on_probe)
        check_all = partial(check_config, on_probe=on_probe, ask_hosts=ask if entries else None)
        checked = check_all(config, probe_machine(), set_keys=frozenset(args.keys), port=args.port)
    text = format_check(checked, verbose=args.verbose, coloured=shows_colours(sys.stdout))
    print(json.dumps(checked.to_json(), indent=1) if args.json else text)
    return 0 if is_ready(checked.findings) else 1


def comm(args: options.CommOptions) -> int:
    from paceline.comm.analysis import format_comm
    from paceline.comm.session import check_request, measure_comm
    from paceline.launch import host_facts, hosts

    entries, config = hosts.hosts_of(resolve_config(args.config, args.keys, default={"depth": 12}))
    check_request(config, out=args.out, entries=entries)
    facts = host_facts.facts_of_ranks(entries, config)
    with show_progress() as progress:
        results = measure_comm(
            config,
            cache_dir=cache_dir(config),
            max_bytes=args.max_bytes,
            deadline_s=args.deadline_s,
            tok_per_sec=args.tok_per_sec,
            out=args.out,
            progress=progress,
            entries=entries,
            facts=facts,
        )
    print(json.dumps(results, indent=1) if args.json else format_comm(results))
    return 0 if results["right"] else TrainingFailed.exit_code


def profile(args: options.ProfileOptions) -> None:
    from paceline.launch.profile import format_profile, profile_steps

    results, plan = profile_steps(args)
    text = format_profile(results, plan, width=shutil.get_terminal_size((120, 24)).columns)
    print(json.dumps(results, indent=1) if args.json else text)


def watch(args: run_options.WatchOptions) -> int:
    from paceline.launch.health import live_samples
    from paceline.watch.view import show_run

    return show_run(args, live_samples)


def explain(args: run_options.ExplainOptions) -> None:
    from paceline.explain.catalogue import causes_json, format_cause, format_causes
    from paceline.explain.explanation import format_explanation, format_markdown, to_json
    from paceline.explain.run_folder import explain_logs
    from paceline.launch.queue import record_job_ends
    from paceline.redaction import redact

    if args.list:
        print(causes_json() if args.json else format_causes())
    elif args.cause is not None:
        print(causes_json(args.cause) if args.json else format_cause(args.cause))
    else:
        record_job_ends(args.logs, runs_dir=args.runs_dir)
        explanation = explain_logs(args.logs, runs_dir=args.runs_dir, stdin=sys.stdin.buffer)
        if args.json:
            print(to_json(explanation))
        elif args.markdown:
            print(format_markdown(redact(explanation)))  # it is made to be pasted elsewhere
        else:
            print(format_explanation(explanation, coloured=shows_colours(sys.stdout)))


def runs(args: run_options.RunsOptions) -> None:
    from paceline.terminal import terminal_width
    from paceline.watch.status import RunList, no_runs
    from paceline.watch.terminal.runs import list_runs

    statuses = (run_list := RunList(Path(args.runs_dir))).read()
    if queued := [status.path for status in statuses if status.state == "queued"]:  # a job may have ended in the queue
        import_module("paceline.launch.queue").record_job_ends(queued, runs_dir=args.runs_dir)
        statuses = run_list.read()
    if not statuses and not (args.json and (args.runs_dir == "runs" or Path(args.runs_dir).is_dir())):
        if run := next((p for p in (args.runs_dir, f"runs/{args.runs_dir}") if Path(p, "config.toml").is_file()), None):
            raise PacelineError(f"{run} is a run, not a folder of runs", fix=f"paceline runs show {shlex.quote(run)}")
        raise no_runs(Path(args.runs_dir), fix="paceline train makes one")
    print(list_runs(statuses, args, width=terminal_width()))


def runs_show(args: run_options.RunsShowOptions) -> None:
    from paceline.watch.terminal.runs import show_runs

    print(show_runs([find_run(name, runs_dir=args.runs_dir).path for name in args.runs], as_json=args.json))


def label_run(args: run_options.RunsTagOptions | run_options.RunsNoteOptions) -> None:
    about = import_module("paceline.watch.about")
    print(about.edit_tags(args) if isinstance(args, run_options.RunsTagOptions) else about.edit_note(args))


def report(args: run_options.ReportOptions) -> None:
    from paceline.watch.report import answer_report

    print(answer_report(args, now=time.time()), end="")


def track(args: run_options.TrackOptions) -> None:
    from paceline.launch.notify import tracker_names
    from paceline.track.follower import track_all

    if not (names := tracker_names(args.to, flag="--to")):
        raise UsageError("track needs --to", fix="add --to tensorboard")
    track_all(find_run(args.run, runs_dir=args.runs_dir), names)


def emit(args: run_options.EmitOptions) -> None:
    from paceline.launch.emit import cluster_job, write_file
    from paceline.launch.manifests import format_file

    print(write_file(args, format_file(args.target, cluster_job(args))), end="")


def torch_check(args: options.TorchCheckOptions) -> int:
    from paceline.check.torch_check import check_torch, format_check
    from paceline.terminal import progress_line

    with progress_line("trying") as on_trial:
        checked = check_torch(args.path, on_trial=on_trial)
    print(json.dumps(checked.to_json(), indent=1) if args.json else format_check(checked))
    return int(bool(checked.problems))


def torch_recipe(args: options.TorchRecipeOptions) -> None:
    from paceline.check.torch_check import recipe_here
    from paceline.check.torch_recipe import format_recipe

    recipe = recipe_here(arch=args.arch, driver=args.driver, build=args.build, script=args.script)
    print(json.dumps(recipe.to_json(), indent=1) if args.json else format_recipe(recipe, script=args.script))


def accelerate_config(args: options.AccelerateOptions) -> None:
    from paceline.launch.env import accelerate_config as make
    from paceline.plan.machine import probe_machine

    print(make(args, probe_machine()))


def evaluate(args: run_options.EvalOptions) -> None:
    if args.text_field and args.data is None:
        raise UsageError("--text-field is of the text of --data", fix="add --data SOURCE, or leave --text-field out")
    folders = [open_model(run, runs_dir=args.runs_dir) for run in args.runs]
    from paceline.launch.run_text import data_of_runs
    from paceline.train.evaluate import evaluate_run, format_evaluation

    for folder, dataset in data_of_runs(folders, other=args.data, text_field=args.text_field):
        result = evaluate_run(folder, args, dataset=dataset)
        print(json.dumps(result) if args.json else format_evaluation(result), flush=True)
        import_module("paceline.watch.about").record_evaluation(folder, result, args)


def sample(args: run_options.SampleOptions) -> None:
    folder = open_model(args.run, runs_dir=args.runs_dir)
    from paceline.train.evaluate import sample_run

    write = (lambda _: None) if args.json else partial(print, end="", flush=True)
    result = sample_run(folder, args, prompt=sys.stdin.read() if args.prompt == "-" else args.prompt, write=write)
    if args.json:
        print(json.dumps(result, ensure_ascii=False))


def open_model(run: str, *, runs_dir: str) -> RunDir:
    """The run whose model this process computes with. The variable is read when torch is imported: see launch/env.py."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return find_training_run(run, runs_dir=runs_dir)


def export(args: run_options.ExportOptions) -> None:
    folder = find_training_run(args.run, runs_dir=args.runs_dir)
    from paceline.train.export import export_run

    result = export_run(folder, args, report=(lambda _: None) if args.json else print)
    if args.json:
        print(json.dumps(result))


def data(args: options.DataOptions) -> None:
    from paceline.data.prepare import data_info, format_prepared, verify
    from paceline.launch.run_text import prepare_data

    dataset = prepare_data(config := resolve_config(args.config, args.keys), set_keys=args.keys)
    if args.verify:
        with show_progress() as progress:
            verify(dataset, progress=progress)
        print(f"verify  {len(dataset.meta['files'])} files: every hash agrees", file=sys.stderr)
    keys = None if isinstance(args, options.DataInfoOptions) else args.keys
    text = format_prepared(dataset, config, file=args.config, keys=keys) if not args.json else ""
    print(json.dumps(data_info(dataset), ensure_ascii=False) if args.json else text)


def tokenizer_train(args: run_options.TokenizerTrainOptions) -> None:
    from paceline.data.tokenizer import SAMPLE_TEXT, tokenizer_info
    from paceline.launch.run_text import train_new_tokenizer

    if args.out is None:
        raise UsageError("tokenizer train needs --out FILE", fix="add --out tokenizer.json")
    check_new_file(args.out, force=args.force)
    tokenizer = train_new_tokenizer(args.data, text_field=args.text_field, vocab_size=args.vocab_size)
    tokenizer.save(args.out)
    if args.json:
        facts = tokenizer_info(tokenizer, sample=SAMPLE_TEXT) | {"requested_vocab_size": args.vocab_size}
        print(json.dumps(facts, ensure_ascii=False))
        return
    field = [f"--text-field={args.text_field}"] if args.text_field else []
    train = shlex.join(["paceline", "train", f"--data={args.data}", *field, f"--tokenizer={args.out}"])
    print(f"wrote   {args.out}: vocabulary {tokenizer.vocab_size:,}\nnext    {train}")


def tokenizer_info(args: run_options.TokenizerInfoOptions) -> None:
    from paceline.data import prepare
    from paceline.data import tokenizer as bpe

    tokenizer = bpe.Tokenizer.load(prepare.find_tokenizer(args.file))
    facts = bpe.tokenizer_info(tokenizer, sample=args.text or bpe.SAMPLE_TEXT)
    if tokens := tokenizer.token_texts(tokenizer.encode(args.text or "")):
        facts["tokens"] = tokens if args.json else [*map(repr, tokens)]
    print(json.dumps(facts, ensure_ascii=False) if args.json else format_facts(facts))


def completion(args: options.CompletionOptions) -> None:
    from argcomplete.shell_integration import shellcode

    install = next(line for line in (args.__doc__ or "").splitlines() if f"completion {args.shell}" in line)
    print(f"{shellcode(['paceline'], shell=args.shell).strip()}\n# install: {install.strip(' $')}")


# name -> what it does and what it takes; the dataclass's docstring is the help
COMMANDS: dict[str, tuple[Callable[..., int | None], type]] = {
    "train": (train, options.TrainOptions),
    "resume": (resume, run_options.ResumeOptions),
    "run": (run, options.ScriptOptions),
    "stop": (stop, run_options.StopOptions),
    "plan": (plan, options.PlanOptions),
    "configs": (plan, options.ConfigsOptions),
    "check": (check, options.CheckOptions),
    "comm": (comm, options.CommOptions),
    "profile": (profile, options.ProfileOptions),
    "watch": (watch, run_options.WatchOptions),
    "explain": (explain, run_options.ExplainOptions),
    "runs": (runs, run_options.RunsOptions),
    "runs show": (runs_show, run_options.RunsShowOptions),
    "runs tag": (label_run, run_options.RunsTagOptions),
    "runs note": (label_run, run_options.RunsNoteOptions),
    "report": (report, run_options.ReportOptions),
    "track": (track, run_options.TrackOptions),
    "emit k8s": (emit, run_options.EmitK8sOptions),
    "emit skypilot": (emit, run_options.EmitSkypilotOptions),
    "emit dstack": (emit, run_options.EmitDstackOptions),
    "emit compose": (emit, run_options.EmitComposeOptions),
    "torch check": (torch_check, options.TorchCheckOptions),
    "torch recipe": (torch_recipe, options.TorchRecipeOptions),
    "accelerate-config": (accelerate_config, options.AccelerateOptions),
    "eval": (evaluate, run_options.EvalOptions),
    "sample": (sample, run_options.SampleOptions),
    "export": (export, run_options.ExportOptions),
    "data prepare": (data, options.DataOptions),
    "data info": (data, options.DataInfoOptions),
    "tokenizer train": (tokenizer_train, run_options.TokenizerTrainOptions),
    "tokenizer info": (tokenizer_info, run_options.TokenizerInfoOptions),
    "completion": (completion, options.CompletionOptions),
}


def main() -> None:
    if "_ARGCOMPLETE" in os.environ:  # a shell that asks for completions
        cards = lambda: [card.name for card in import_module("paceline.plan.gpu_table").gpu_table()]  # noqa: E731
        complete({name: takes for name, (_, takes) in COMMANDS.items()}, gpus=cards)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what a command has begun is removed
    sys.exit(run_command(sys.argv[1:]))


def run_command(args: list[str]) -> int:
    """Runs the command and returns its exit code; an error becomes two lines on stderr."""
    try:
        with plain_output():
            return dispatch(args) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe went away: `paceline runs | head`
        return 0
    except (PacelineError, OSError) as error:
        problem = error if isinstance(error, PacelineError) else problem_of(error)
        with plain_output():
            print(problem, file=sys.stderr)
        return problem.exit_code


def dispatch(args: list[str]) -> int | None:
    commands = {name: takes for name, (_, takes) in COMMANDS.items()}
    if not args or (args[0] == "help" and args[1:2] != ["--version"]):
        args = [*args[1:], "--help"]
    name = " ".join(args[:2]) if " ".join(args[:2]) in commands else args[0]
    group = {action: takes for action, takes in commands.items() if action.startswith(f"{name} ")}
    takes_action = bool(group) and len(args) > 2 and not any(word.startswith("-") for word in args[1:3])
    if name in commands and not takes_action:
        function, takes = COMMANDS[name]
        try:
            values: Any = parse(args[len(name.split()) :], command=name, options=takes)
        except SystemExit:  # after it has printed help
            print(*(f"\nalso: paceline {action}" for action in group), sep="", end="\n" if group else "")
            return None
        return function(values)
    if name == "--version":
        print(f"paceline {__version__}")
    elif name in HELP_FLAGS or (group and HELP_FLAGS & set(args)):
        print(format_commands(group or commands), end="")
    else:
        raise unknown_command(args, commands)
    return None


if __name__ == "__main__":
    main()
