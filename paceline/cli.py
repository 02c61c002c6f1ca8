"""
The command line: one short function per command. It loads, calls, prints, and returns an exit code.

Exit codes: 0 done; 1 an error of the user's, with its fix; 2 wrong usage; 3 the training failed; 130 interrupted.
Nothing here imports torch; a command that needs it imports it inside its own function.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.errors import PacelineError, UsageError
from paceline.options import TINY, config_of, find_run, one_action, one_word, parse_options, take_flag, take_option
from paceline.terminal import format_facts, waiting, write_now

HELP = """\
paceline trains GPT-style language models on the GPUs you have.

  paceline train [CONFIG] [--key value ...]     train; with no arguments, a small GPT on text that is always at hand
  paceline resume RUN [--key value ...]         go on from the last good checkpoint, on any number of devices
  paceline run [--nproc N] -- SCRIPT [args]     the same launch, checks and logs around any script that torchrun can start
  paceline plan [CONFIG] [--gpu NAME --gpus N]  what fits, how fast, how long, what it costs; on GPUs here or imagined
  paceline check [CONFIG] [--key value ...]     is everything ready: findings, each with its fix
  paceline explain LOG... | RUN | -             what broke in any training log, on which rank, and what mends it
  paceline comm [CONFIG]                        do collectives give right results, how fast, what it means for training
  paceline torch check|recipe|build             is this PyTorch right; how to get one that is
  paceline accelerate-config                    write an accelerate config that fits this machine
  paceline eval RUN                             bits per byte on held-out text
  paceline sample RUN --prompt TEXT             text from the model
  paceline report RUN [--markdown]              one run in one file to keep or send: HTML that needs no server, or Markdown
  paceline track RUN --to TRACKER               its numbers to TensorBoard, W&B or trackio, now or later; nothing twice
  paceline watch [RUN | --log FILE]             how a run is, live in the terminal; --once as text, --web in the browser
  paceline runs [DIR] | show RUN                all runs: state, steps, val_bpb, tok/s; one run: attempts, where its time went
  paceline data prepare|info [CONFIG]           text to token shards; what is in them
  paceline tokenizer train|info                 train a BPE tokenizer; look at one

paceline COMMAND --help tells more, with an example.  --version prints the version.
"""


def main() -> None:
    sys.exit(run_command(sys.argv[1:]))


def run_command(args: list[str]) -> int:
    """Dispatches, and turns errors into two lines on stderr and an exit code."""
    try:
        if not args or args[0] in ("-h", "--help", "help"):
            print(HELP, end="")
            return 0
        if args[0] == "--version":
            print(f"paceline {__version__}")
            return 0
        command = COMMANDS.get(args[0])
        if command is None:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            raise UsageError(
                f"unknown command {args[0]}", fix=f"paceline {near[0]}" if near else "paceline --help lists them"
            )
        if asks_help(args[0], args[1:]):
            print(command_help(args[0]), end="")
            return 0
        return command(args[1:])
    except PacelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe went away: `paceline runs | head`
        return 0


def asks_help(name: str, args: list[str]) -> bool:
    """A script's own words, its --help among them, are not ours."""
    if name == "run":
        from paceline.launch.command import split_command

        args = split_command(args)[0]
    return any(arg in ("-h", "--help") for arg in args)


def train(args: list[str]) -> int:
    """paceline train [CONFIG] [--key value ...] [--max-attempts N] [--no-recover] [--hang-after SECONDS]
                   [--health-every SECONDS] [--track TRACKERS] [--notify URL] [--show-env] [--no-check]

    Plans, prepares the text, starts one process per device, trains, and leaves everything in runs/NAME. Without CONFIG
    it takes configs/tiny.toml. CONFIG is a .toml file, or a .py file of plain `key = literal` lines. What breaks on the way
    and may pass is tried again from the last good checkpoint, N times in all (10); docs/recovery.md tells what, and how. A rank
    that makes no progress for so many seconds within a step (60, or 6 usual steps) is ended and tried again. --track
    tensorboard,wandb,trackio sends its numbers on; --notify tells a URL that it failed, recovered, finished: docs/trackers.md.

      paceline train configs/balanced.toml --data ~/books --name books
    """
    from paceline.start import start_run, take_options

    args, options = take_options(args)
    config, flags = config_of(args, command="train")
    return start_run(config, replace(options, set_keys=frozenset(flags)))


def resume(args: list[str]) -> int:
    """paceline resume RUN [--key value ...] [--max-attempts N] [--no-recover] [--hang-after SECONDS]
                   [--health-every SECONDS] [--track TRACKERS] [--notify URL] [--show-env] [--no-check]

    Goes on from the last good checkpoint of a run folder (or a run's name under runs/), on any number of devices. A larger
    --num-steps extends a finished run; its learning rates are then worked out anew for the whole length.

      paceline resume books --nproc 1
    """
    from paceline.config import parse_flags
    from paceline.start import resume_run, take_options

    args, options = take_options(args)
    words, flags = parse_flags(args)
    if flags.pop("config", None):
        raise UsageError("a run has its own config", fix="paceline resume RUN --key value")
    options = replace(options, set_keys=frozenset(flags))
    return resume_run(find_run(words, runs_dir=flags.get("runs_dir")), flags, options)


def run(args: list[str]) -> int:
    """paceline run [--nproc N] [--name X] [--device cpu|cuda] [--runs-dir DIR] [--quiet-ranks] [--show-env] [--no-check]
                    [--max-attempts N] [--no-recover] [--hang-after SECONDS] [--health-every SECONDS] [--track TRACKERS]
                    [--notify URL] -- SCRIPT.py [args]   or   -m MODULE [args]

    Starts a script once per device, as torchrun would, with paceline's checks, environment, logs and clean ending. Each
    rank's output is kept whole in runs/X/logs and shown as it comes, rank before line; --quiet-ranks shows rank 0 alone.
    --show-env prints what the script would find in its environment, and why. What breaks from outside is tried again, N times
    in all (10), with the same words; the script finds PACELINE_ATTEMPT (1, 2, ...) and PACELINE_RUN, a folder for its
    checkpoints. Ends with the exit code of the rank that failed first.

      paceline run --nproc 2 -- train.py --lr 3e-4
    """
    from paceline.launch.script import run_words
    from paceline.start import check_script

    return run_words(args, check=check_script)


def plan(args: list[str]) -> int:
    """paceline plan [CONFIG] [--key value ...] [--gpu NAME] [--gpus N] [--hosts N] [--link NAME] [--price P] [--watts W]
                     [--time 12h] [--budget 50] [--compare NAMES] [--sweep KEY[=A,B]] [--exact] [--measure] [--json]

    What a run would need and take: memory by part, the rows at once that fit, seconds of a step, hours, energy and money, each
    with its range and what it stands on; for the GPUs here, or for any that it knows. Without CONFIG: configs/tiny.toml, as
    train takes; where GPUs are named or a time is given, depth 12 and the defaults of all keys.

      --link      10GbE, "PCIe 5 x8", NVLink ...: between the devices; `paceline comm` measures it
      --price     0.30/kWh or 2.50/gpu-hour
      --time, --budget   the deepest model that the scaling rules make of so much time or money
      --compare   "RTX 4090,RTX 5090,H100": side by side
      --sweep     device_batch_size, depth=8,12,16 ...: one line for each value
      --exact     two real steps traced without a GPU (needs torch, some seconds)
      --measure   a short measurement of the device here, kept for every later plan

      paceline plan configs/balanced.toml --gpu "RTX 5090" --gpus 2
    """
    from paceline.options import cache_dir
    from paceline.planning import DEFAULTS_OF_A_PLAN, answer, take_wanted

    args, wanted = take_wanted(args)
    config, flags = config_of(args, command="plan", default=DEFAULTS_OF_A_PLAN if wanted.is_imagined else None)
    print(answer(config, wanted, set_keys=frozenset(flags), cache=cache_dir(config)))
    return 0


def check(args: list[str]) -> int:
    """paceline check [CONFIG] [--key value ...] [--port N] [--verbose] [--json]

    Is this machine ready to train that config (configs/tiny.toml)? Findings, each with what comes of it and what mends it;
    exit code 1 if one would stop the run. --port: a port that you mean to use. docs/checks.md lists what is looked for.

      paceline check configs/balanced.toml --nproc 2
    """
    from paceline.check.format import colour, format_findings, format_host, format_summary, to_json
    from paceline.check.ready import check_config_here
    from paceline.plan.machine import probe_machine

    args, as_json = take_flag(args, "--json")
    args, verbose = take_flag(args, "--verbose")
    args, port = take_option(args, "port", int)
    if port is not None and not 0 < port < 1 << 16:
        raise UsageError(f"--port {port}: not a port", fix="--port 29500")
    config, flags = config_of(args, command="check")
    with waiting("checking") as on_probe:
        checked = check_config_here(
            config, probe_machine(), set_keys=frozenset(flags), port=port, on_probe=lambda name, _: on_probe(name)
        )
    findings = checked.findings
    if as_json:
        print(json.dumps(to_json(findings, checked.facts), indent=1))
    else:
        found = format_findings(findings, verbose=verbose)
        blocks = [*map(format_host, checked.facts), colour(found) if sys.stdout.isatty() else found]
        print("\n\n".join(block for block in (*blocks, format_summary(findings)) if block))
    return 1 if any(finding.severity == "stop" for finding in findings) else 0


def explain(args: list[str]) -> int:
    """paceline explain LOG... | RUN | - [--json] [--markdown]
       paceline explain --list [--json]
       paceline explain --cause ID [--json]

    Names the root cause in any training log, on which rank and step, and what mends it; then the evidence, then what only
    followed. LOG: a file, one for each rank, or a folder; of any launcher, of any size, packed or not. RUN: a run folder, or a
    run's name under runs/. -: standard input. --markdown: for pasting into an issue. --list: all causes that are known.
    --cause: everything known about one.

      paceline explain slurm-4711.out
    """
    from paceline.explain.format import format_explanation, format_markdown, to_json
    from paceline.explain.listing import cause_json, causes_json, format_cause, format_causes
    from paceline.explain.run import explain_words

    known = {"json": bool, "markdown": bool, "list": bool, "cause": str, "runs-dir": str}
    words, options = parse_options(args, known)
    as_json = options.get("json")
    if options.get("list"):
        print(causes_json() if as_json else format_causes())
        return 0
    if "cause" in options:
        print(cause_json(options["cause"]) if as_json else format_cause(options["cause"]))
        return 0
    said = explain_words(words, runs_dir=options.get("runs-dir"), stdin=sys.stdin.buffer)
    if as_json:
        print(to_json(said))
    elif options.get("markdown"):
        print(format_markdown(said))
    else:
        print(format_explanation(said, coloured=sys.stdout.isatty()))
    return 0


def comm(args: list[str]) -> int:
    """paceline comm [CONFIG] [--key value ...] [--max-bytes N] [--deadline S] [--tok-per-sec N] [--out FILE] [--json]

    Tests that what ranks send each other arrives right, measures how fast, and says what that means for a training step of
    the config (depth 12 without one). A rank that does not come is named after the deadline. The figures go to FILE
    (~/.cache/paceline/comm.json), where a plan finds them. --tok-per-sec: of one process alone, if you know it.

      paceline comm --nproc 2 --device cpu
    """
    from paceline.check.facts import gather_facts
    from paceline.launch.comm import DEADLINE_S, format_comm, measure_comm
    from paceline.options import cache_dir
    from paceline.terminal import show_progress

    args, as_json = take_flag(args, "--json")
    args, max_bytes = take_option(args, "max-bytes", int)
    args, deadline_s = take_option(args, "deadline", float)
    args, tok_per_sec = take_option(args, "tok-per-sec", float)
    args, out = take_option(args, "out", Path)
    config, _ = config_of(args, command="comm", default={"depth": 12})
    cache = cache_dir(config)
    facts = gather_facts(measure_disk=False, cached_torch=cache / "torch.json")
    with show_progress() as progress:
        results = measure_comm(
            config,
            cache_dir=cache,
            gpus=facts["gpus"] or (),
            max_bytes=max_bytes,
            deadline_s=DEADLINE_S if deadline_s is None else deadline_s,
            tok_per_sec=tok_per_sec,
            out=out,
            libuv=(facts["torch"] or {}).get("libuv") is not False,
            progress=progress,
        )
    print(json.dumps(results, indent=1) if as_json else format_comm(results))
    return 0 if results["right"] else 3


def torch(args: list[str]) -> int:
    """paceline torch check [--path DIR] [--json]
       paceline torch recipe [--arch 12.0] [--driver 570.133] [--build] [--json]
       paceline torch build --source DIR [--build-dir DIR] [--prefix DIR] [--arch 12.0] [--jobs N] [--dry-run] [--json]

    check: what this PyTorch is, then tried: a store with libuv, process groups, products on every device; exit code 1 if
    not right. --path: another install, a venv or a source tree. recipe: the wheel for these cards and this driver, or the
    build that fits; --build: the build in any case. build: configures, compiles and installs a source tree, then checks it;
    the same command goes on after an interruption. Without --prefix it replaces the torch of this Python. docs/torch.md.

      paceline torch recipe --arch 12.0 --driver 570.133
    """
    from paceline.check.torch_build import check_torch, format_check, recipe_here
    from paceline.check.torch_recipe import format_recipe
    from paceline.check.torch_source import build_torch

    action, rest = one_action(args, ("check", "recipe", "build"), command="torch")
    known: dict[str, dict[str, Callable[[str], Any]]] = {
        "check": {"path": Path, "json": bool},
        "recipe": {"arch": str, "driver": str, "build": bool, "json": bool},
        "build": {"source": Path, "build-dir": Path, "prefix": Path, "arch": str, "jobs": int, "dry-run": bool, "json": bool},
    }  # fmt: skip
    words, options = parse_options(rest, known[action])
    if words:
        raise UsageError(f"torch {action} takes options alone, not {words[0]}", fix="paceline torch --help")
    if action == "build" and "source" not in options:
        raise UsageError("torch build needs --source DIR", fix="paceline torch build --source ~/pytorch")
    as_json = options.pop("json", False)
    if action == "recipe":
        recipe = recipe_here(**options)
        print(json.dumps(recipe.to_json(), indent=1) if as_json else format_recipe(recipe))
        return 0
    if action == "build":
        checked = build_torch(options.pop("source"), **{k.replace("-", "_"): v for k, v in options.items()})
        if checked is None:  # a dry run
            return 0
    else:
        with waiting("trying") as on_trial:
            checked = check_torch(options.get("path"), on_trial=on_trial)
    print(json.dumps(checked.to_json(), indent=1) if as_json else format_check(checked))
    return 0 if checked.is_right else 1


def accelerate_config(args: list[str]) -> int:
    """paceline accelerate-config [--out FILE] [--nproc N] [--device cpu|cuda] [--precision fp32|bf16|fp16] [--fsdp] [--force]
                                  [--nnodes N --node-rank R --main-address A [--main-port P]] [--json]

    Writes an accelerate config that fits this machine: its devices, its precision, DDP or FSDP2. FILE is accelerate.yaml, or -
    for standard output. With several hosts, one file on each.

      paceline accelerate-config --out two-cards.yaml
    """
    from paceline.launch.accelerate import OPTIONS
    from paceline.launch.accelerate import accelerate_config as write
    from paceline.plan.machine import probe_machine

    words, options = parse_options(args, OPTIONS)
    if words:
        raise UsageError(f"accelerate-config takes options alone, not {words[0]}", fix=f"--out {words[0]}")
    print(write(options, probe_machine()))
    return 0


def evaluate(args: list[str]) -> int:
    """paceline eval RUN [--data SOURCE] [--tokens N] [--step N] [--device cpu|cuda] [--json]

    Bits per byte of the newest good checkpoint (or of --step) on the run's held-out text, or on all of another SOURCE.

      paceline eval books --data builtin
    """
    words, options = parse_options(
        args, {"data": str, "tokens": int, "step": int, "device": str, "runs-dir": str, "json": bool}
    )
    run = find_run(words, runs_dir=options.get("runs-dir"))
    from paceline.start import run_data
    from paceline.train.offline import evaluate_run

    dataset = run_data(run, other=options.get("data"))
    result = evaluate_run(
        run, dataset=dataset, max_tokens=options.get("tokens"), step=options.get("step"), device=options.get("device")
    )
    if options.get("json"):
        print(json.dumps(result))
    else:
        print(
            f"{run.name} at step {result['step']:,}: val_bpb {result['val_bpb']:.4f}"
            f" on {result['tokens']:,} tokens of {result['data']}"
        )
    return 0


def sample(args: list[str]) -> int:
    """paceline sample RUN [--prompt TEXT] [--num N] [--tokens N] [--temperature T] [--top-k K] [--seed S] [--step N]
                       [--device cpu|cuda] [--json]

    Writes text from the newest good checkpoint (or of --step), as it comes. --temperature 0 always takes the likeliest token.
    --prompt - reads the prompt from standard input.

      paceline sample books --prompt "Once upon" --num 3
    """
    known = {
        "prompt": str, "num": int, "tokens": int, "temperature": float, "top-k": int, "seed": int, "step": int,
        "device": str, "runs-dir": str, "json": bool,
    }  # fmt: skip
    words, options = parse_options(args, known)
    run = find_run(words, runs_dir=options.get("runs-dir"))
    from paceline.train.offline import sample_run

    prompt = options.get("prompt", "")
    as_json = bool(options.get("json"))
    texts = sample_run(
        run,
        prompt=sys.stdin.read() if prompt == "-" else prompt,
        num_samples=options.get("num", 1),
        max_new_tokens=options.get("tokens", 200),
        temperature=options.get("temperature", 0.8),
        top_k=options.get("top-k", 50),
        seed=options.get("seed", 42),
        step=options.get("step"),
        device=options.get("device"),
        write=(lambda _: None) if as_json else write_now,
    )
    if as_json:
        print(json.dumps({"prompt": prompt, "samples": texts}, ensure_ascii=False))
    return 0


def watch(args: list[str]) -> int:
    """paceline watch [RUN | --log FILE] [--interval S] [--once [--json]] [--ascii]
       paceline watch [RUN | --log FILE] --web [--port N] [--open]

    A run, or any training's log, live in the terminal: how far, how fast, curves, GPUs, ranks, events, logs, and why it failed.
    Without RUN, the one that runs, else the latest. Keys are in the last line; leaving changes nothing. --once: as text, once.
    --interval: seconds between two looks (3). --ascii: for terminals without UTF-8. --web: in the browser, on this machine
    alone; --open opens it. docs/watch.md and docs/web.md.

      paceline watch --log slurm-4711.out
    """
    from paceline.watch.look import watch_words

    return watch_words(args)


def runs(args: list[str]) -> int:
    """paceline runs [DIR] [--json]
       paceline runs show RUN [--json]

    The runs under DIR (runs), the latest first. show: one run's attempts, what each ended of and what was decided then, and
    where its time went.

      paceline runs --json | jq .[0].val_bpb
    """
    from paceline.watch.status import format_runs, list_runs, open_reader

    words, options = parse_options(args, {"json": bool})
    if words[:1] == ["show"]:
        from paceline.watch.show import find_any_run, format_story, story_json

        if len(words) != 2:
            raise UsageError("runs show takes one RUN", fix="paceline runs lists them")
        story = open_reader(find_any_run(words[1]).path).update()
        print(json.dumps(story_json(story), indent=1) if options.get("json") else format_story(story))
        return 0
    folder = Path(one_word(words, "DIR", default="runs"))
    found = list_runs(folder)
    if options.get("json"):
        print(json.dumps([status.to_json() for status in found], indent=1))
    elif found:
        print(format_runs(found))
    else:
        raise PacelineError(f"no runs in {folder}", fix="paceline train makes one")
    return 0


def report(args: list[str]) -> int:
    """paceline report RUN [--markdown] [--output FILE] [--runs-dir DIR]

    A run, or any training's log, in one file: curves, explanation, plan against measured, where the time went, events, config,
    machine, samples. HTML goes to NAME.html here and needs no server and no network; Markdown, for an issue, to standard
    output. --output - is standard output. docs/web.md.

      paceline report books --markdown
    """
    from paceline.check.redaction import redact
    from paceline.watch.report import find_reported, html_report, markdown_report, write_report

    words, options = parse_options(args, {"markdown": bool, "output": str, "runs-dir": str})
    if len(words) != 1:
        raise UsageError(f"report takes one RUN, {len(words)} are given", fix="paceline runs lists them")
    path = find_reported(words[0], runs_dir=options.get("runs-dir"))
    make = markdown_report if options.get("markdown") else html_report
    output = options.get("output", "-" if options.get("markdown") else f"{path.name}.html")
    text = make(path, now=time.time(), redact=redact)
    if output == "-":
        print(text, end="")
    else:
        write_report(Path(output), text)
        print(f"report  {output}")
    return 0


def track(args: list[str]) -> int:
    """paceline track RUN --to tensorboard|wandb|trackio [--runs-dir DIR]

    Sends the logged steps and the health of a run to a tracker, once each: what an earlier time has sent, beside the run or
    after it, is passed over. A run that goes on is followed until its end. --track of `train`, `resume` and `run` does the
    same beside the run. docs/trackers.md.

      paceline track books --to tensorboard
    """
    from paceline.launch.beside import tracker_names
    from paceline.watch.show import find_any_run
    from paceline.watch.track import track_now

    words, options = parse_options(args, {"to": str, "runs-dir": str})
    names = tracker_names(options.get("to", ""), flag="--to")
    if len(words) != 1 or not names:
        raise UsageError("track takes one RUN and --to", fix="paceline track RUN --to tensorboard")
    run = find_any_run(words[0], runs_dir=options.get("runs-dir", "runs"))
    for name in names:
        track_now(run, name)
    return 0


def data(args: list[str]) -> int:
    """paceline data prepare|info [CONFIG] [--data SOURCE] [--tokenizer FILE] [--vocab-size N] [--cache-dir DIR] [--json] [--verify]

    prepare: text to token shards, as `train` would do it before it starts. info: what is in them; --verify hashes them all.

      paceline data prepare --data ~/books --vocab-size 32768
    """
    from paceline.config import load_config, parse_flags

    _, rest = one_action(args, ("prepare", "info"), command="data")
    rest, as_json = take_flag(rest, "--json")
    rest, verified = take_flag(rest, "--verify")
    words, flags = parse_flags(rest)
    file = flags.pop("config", None) or one_word(words, "CONFIG", default=str(TINY))
    config, _ = load_config(file, flags)
    from paceline.data.shards import data_info, verify
    from paceline.start import prepare_data

    dataset = prepare_data(config)
    if verified:
        verify(dataset)
    facts = data_info(dataset)
    if not as_json:
        facts = {**facts.pop("splits"), **facts, "files": len(facts["files"])}
    print(json.dumps(facts) if as_json else format_facts(facts))
    return 0


def tokenizer(args: list[str]) -> int:
    """paceline tokenizer train --out FILE [--data SOURCE] [--vocab-size N] | tokenizer info FILE [--text TEXT] [--json]

    train: a byte-level BPE on the training part of the text. info: its size, special tokens, and how it cuts a text.

      paceline tokenizer train --data ~/books --vocab-size 32768 --out books.json
    """
    action, rest = one_action(args, ("train", "info"), command="tokenizer")
    known: dict[str, Callable[[str], Any]] = (
        {"out": str, "data": str, "vocab-size": int, "json": bool} if action == "train" else {"text": str, "json": bool}
    )
    words, options = parse_options(rest, known)
    from paceline.data.tokenizer import Tokenizer, tokenizer_info, train_tokenizer_on
    from paceline.terminal import show_progress

    if action == "train":
        if "out" not in options or words:
            raise UsageError(
                "tokenizer train needs --out FILE and no other word",
                fix="paceline tokenizer train --out tokenizer.json",
            )
        with show_progress() as progress:
            made = train_tokenizer_on(
                options.get("data", "builtin"), vocab_size=options.get("vocab-size", 32_768), progress=progress
            )
        made.save(Path(options["out"]))
        facts = tokenizer_info(made, sample=SAMPLE_TEXT)
    else:
        if len(words) != 1:
            raise UsageError("tokenizer info needs one FILE", fix="paceline tokenizer info tokenizer.json")
        facts = tokenizer_info(Tokenizer.load(Path(words[0])), sample=options.get("text", SAMPLE_TEXT))
    print(json.dumps(facts, ensure_ascii=False) if options.get("json") else format_facts(facts))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "sample": sample,
    "run": run,
    "plan": plan,
    "check": check,
    "explain": explain,
    "comm": comm,
    "torch": torch,
    "accelerate-config": accelerate_config,
    "watch": watch,
    "runs": runs,
    "report": report,
    "track": track,
    "data": data,
    "tokenizer": tokenizer,
}
SAMPLE_TEXT = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n"


def command_help(name: str) -> str:
    """The command's own text; for those that take config keys, the table of keys after it."""
    import inspect

    text = inspect.cleandoc(COMMANDS[name].__doc__ or "") + "\n"
    if name not in ("train", "resume"):
        return text
    from paceline.config import KEYS

    group = ""
    for key, field in KEYS.items():
        if field.metadata["group"] != group:
            group = field.metadata["group"]
            text += f"\n{group}\n"
        default = (
            "auto" if field.default is None else str(field.default).lower() if field.type is bool else field.default
        )
        choices = f" ({', '.join(field.metadata['choices'])})" if field.metadata["choices"] else ""
        text += f"  --{key.replace('_', '-'):<26}{field.metadata['about']}{choices} [{default}]\n"
    return text


if __name__ == "__main__":
    main()
