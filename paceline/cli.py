"""
The command line: from the first word to its command (paceline/commands), from an error to two lines and an exit code.

Exit codes: 0 done; 1 an error of the user's, with its fix; 2 wrong usage; 3 the training failed; 130 interrupted.
Nothing here imports torch; a command that needs it imports it inside its own function.
"""

import sys
from collections.abc import Callable

from paceline import __version__
from paceline.commands.looking import explain, report, runs, track, watch
from paceline.commands.readiness import accelerate_config, check, comm, plan, torch
from paceline.commands.starting import resume, run, train
from paceline.commands.using import data, evaluate, sample, tokenizer
from paceline.errors import PacelineError, UsageError

HELP = """\
paceline trains GPT-style language models on the GPUs you have.

  paceline train [CONFIG] [--key value ...]     train; with no arguments, a small GPT on text that is always at hand
  paceline resume RUN [--key value ...]         go on from the last good checkpoint, on any number of devices
  paceline run [--nproc N] -- SCRIPT [args]     the same launch, checks and logs around any script that torchrun can start
  paceline plan [CONFIG] [--gpu NAME --gpus N]  what fits, how fast, how long, what it costs; on GPUs here or imagined
  paceline check [CONFIG] [--key value ...]     is everything ready: findings, each with its fix
  paceline comm [CONFIG]                        do collectives give right results, how fast, what it means for training
  paceline watch [RUN | --log FILE]             how a run is, live in the terminal; --once as text, --web in the browser
  paceline explain LOG... | RUN | -             what broke in any training log, on which rank, and what mends it
  paceline runs [DIR] | show RUN                all runs: state, steps, val_bpb, tok/s; one run: attempts, where its time went
  paceline report RUN [--markdown]              one run in one file to keep or send: HTML that needs no server, or Markdown
  paceline track RUN --to TRACKER               its numbers to TensorBoard, W&B or trackio, now or later; nothing twice
  paceline torch check|recipe|build             is this PyTorch right; how to get one that is
  paceline accelerate-config                    write an accelerate config that fits this machine
  paceline eval RUN                             bits per byte on held-out text
  paceline sample RUN --prompt TEXT             text from the model
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


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "resume": resume,
    "run": run,
    "plan": plan,
    "check": check,
    "comm": comm,
    "watch": watch,
    "explain": explain,
    "runs": runs,
    "report": report,
    "track": track,
    "torch": torch,
    "accelerate-config": accelerate_config,
    "eval": evaluate,
    "sample": sample,
    "data": data,
    "tokenizer": tokenizer,
}


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
