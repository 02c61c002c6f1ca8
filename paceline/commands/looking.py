"""
What looks at runs and logs: views, lists, reports, explanations, trackers.

One short function per command, whose docstring is its help; paceline.cli calls it with the words after its name.
"""

import json
import sys
import time
from pathlib import Path

from paceline.errors import PacelineError, UsageError
from paceline.options import one_word, parse_options


def watch(args: list[str]) -> int:
    """paceline watch [RUN | --log FILE] [--interval S] [--once [--json]] [--ascii] [--runs-dir DIR]
       paceline watch [RUN | --log FILE] --web [--port N] [--open] [--runs-dir DIR]

    A run, or any training's log, live in the terminal: how far, how fast, curves, GPUs, ranks, events, logs, and why it failed.
    Without RUN, the one that runs, else the latest. Keys are in the last line; leaving changes nothing. --once: as text, once.
    --interval: seconds between two looks (3). --ascii: for terminals without UTF-8. --web: in the browser, on this machine
    alone; --open opens it. --runs-dir: where the runs are (runs). docs/watch.md and docs/web.md.

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
