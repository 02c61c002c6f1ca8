"""
What starts processes: a training, a resumed one, a script.

One short function per command, whose docstring is its help; paceline.cli calls it with the words after its name.
"""

from dataclasses import replace

from paceline.errors import UsageError
from paceline.options import config_of, find_run


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
    checkpoints. Ranks that say nothing and do nothing for 600 s hang; --hang-after SECONDS is another time. Ends with the exit
    code of the rank that failed first, and with 1 where that was a known mistake of the script or its flags.

      paceline run --nproc 2 -- train.py --lr 3e-4
    """
    from paceline.launch.script import run_words
    from paceline.start import check_script
    from paceline.watch.goodput import format_line, goodput_of

    return run_words(args, check=check_script, spent=lambda run: format_line(goodput_of(run)))
