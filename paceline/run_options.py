"""
What the commands take that resume, list, watch, explain, stop, mark, track and use runs, or train tokenizers; as options.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.command_line import keys_of, option, positional
from paceline.config import Config
from paceline.options import (
    ANY_RUN,
    CONFIG,
    RUN,
    TRACKERS,
    ConfigOptions,
    JsonOption,
    LaunchOptions,
    Options,
    RanksOptions,
    RejoinOption,
    RunsOption,
    SubmitOptions,
)
from paceline.other_names import with_our_flags


class RunsOptions(JsonOption):
    """List the runs, the latest first: state, steps, val_bpb, tok/s, tags, and notes where there is room.

    A column has the held-out tokens of an evaluation where runs differ in them: `paceline eval` compares such runs on all, and the
    column `eval` has its newest result, with its step where the run has gone on.

    $ paceline runs --sort val_bpb --tag baseline
    $ paceline runs --state failed
    $ paceline runs --json | jq .[0].val_bpb
    """

    runs_dir: str = positional("DIR", "the folder that holds the runs", default="runs", has_flag=True)
    sort: str = option(
        "time", "time, name, state, step, loss, val_bpb, eval (the newest result of paceline eval) or tok_per_sec: the lowest loss,"
        " val_bpb and eval, most steps and tok/s first",
        value="KEY", choices=("time", "name", "state", "step", "loss", "val_bpb", "eval", "tok_per_sec"),
    )  # fmt: skip
    tag: tuple[str, ...] = option((), "only runs with this tag; may be repeated, for runs with all of them")
    state: tuple[str, ...] = option(
        (), "only runs in this state, such as failed; may be repeated. running: whatever a live run does"
    )


class RunsShowOptions(JsonOption, RunsOption):
    """Show one run: why each attempt ended, what was done next, and where the time went; of several runs, the settings that differ.

    $ paceline runs show books
    $ paceline runs show runs/sweep-*
    """

    runs: tuple[str, ...] = positional("RUN", f"{RUN}; or several")


class RunsTagOptions(JsonOption, RunsOption):
    """Add tags to a run, or remove them; without tags, print those that it has.

    They stand in the list of runs; `paceline runs --tag` and the browser find runs by them. The file is notes.json of the run.

    $ paceline runs tag books baseline wide
    """

    run_and_tags: tuple[str, ...] = positional("RUN TAG", f"{RUN}; then its tags, words without spaces")
    remove: bool = option(False, "remove these tags")


class RunsNoteOptions(JsonOption, RunsOption):
    """Write a note about a run, which stands in the list of runs; without a text, print the one it has.

    $ paceline runs note books "the first run with the new text"
    """

    run_and_text: tuple[str, ...] = positional(
        "RUN TEXT", f"{RUN}; then the note, where an empty one removes it", may_be_empty=True
    )


class ReportOptions(RunsOption):
    """Write one run, or the log of any training, to one file: HTML or Markdown.

    Curves, explanation, plan against measurement, where the time went, events, config, machine and samples. The HTML file
    needs no server and no network. docs/web.md.

    $ paceline report books --markdown
    """

    run: str = positional("RUN", ANY_RUN)
    markdown: bool = option(False, "write Markdown, for an issue, to standard output")
    out: str | None = option(
        None,
        "the file to write, as Markdown if it ends in .md, or - for standard output; auto: NAME.html here",
        value="FILE",
    )


class TrackOptions(RunsOption):
    """Send the metrics and health of a run to TensorBoard, W&B or trackio.

    Each step is sent once: what was sent before is skipped. A run that is still active is followed until it ends. docs/trackers.md.

    $ paceline track books --to tensorboard
    """

    run: str = positional("RUN", RUN)
    to: str = option("", f"the trackers, separated by commas: {', '.join(TRACKERS)}", value="TRACKERS", names=TRACKERS)


class StopOptions(JsonOption, RunsOption):
    """Save a checkpoint of a run that goes on somewhere on this host, and end it; as Ctrl-C does in its own terminal.

    A run whose last save failed is left alone: it saves when there is room. The exit code is 3 if the run fails while it stops.

    $ paceline train balanced --name books --detach
    $ paceline stop books
    """

    run: str = positional("RUN", RUN)
    now: bool = option(False, "end at once, without a checkpoint")


class WatchOptions(JsonOption, RunsOption):
    """Show a run, or the log of any training, live: in the terminal, as text, or in the browser.

    Shows progress, speed, curves, GPUs, ranks, events and logs, and the cause if it failed. The last line lists the keys.
    Watching changes nothing in the run. docs/watch.md and docs/web.md.

    $ paceline watch --log slurm-4711.out
    $ paceline watch --web --open
    """

    run: str | None = positional("RUN", ANY_RUN + "; auto: the run that is active, else the latest", default=None)
    log: Path | None = option(None, "watch this log file of any training", value="FILE")
    once: bool = option(False, "print one view as text and stop")
    interval_s: float | None = option(None, "seconds between refreshes; auto: 3", low=0.2, high=3600)
    ascii: bool = option(False, "draw with ASCII characters only")
    web: bool = option(False, "serve a page to this machine's browser")
    port: int | None = option(None, "the port of --web; auto: a free one", low=0, high=65_535)
    open: bool = option(False, "open the browser on the page of --web")


class ExplainOptions(JsonOption, RunsOption):
    """Name the root cause of a failure in any training log, on which rank and step, and the fix.

    Then the evidence, and what was only a consequence. Logs may come from any launcher, be of any size, and be compressed.
    Metrics are judged by their curves: TensorBoard, W&B offline, trainer_state.json, Lightning's metrics.csv.

    $ paceline explain slurm-4711.out
    $ paceline explain books
    $ paceline explain lightning_logs/version_0
    """

    logs: tuple[str, ...] = positional(
        "LOG|RUN|-",
        "a log, one for each rank, a folder of them, metrics, a run's folder or name; -: standard input",
        default=(),
    )
    markdown: bool = option(False, "print Markdown, for an issue")
    list: bool = option(False, "list every cause that can be recognized")
    cause: str | None = option(None, "describe one cause of --list", value="ID")


class StepOption(Options):
    """Which checkpoint."""

    step: int | str | None = option(
        None, "the checkpoint's step; best: the one with the lowest val_bpb; auto: the newest good one", low=0, high=10**12,
        value="N|best", choices=("best",),
    )  # fmt: skip


class ResumeOptions(StepOption, LaunchOptions, RejoinOption, SubmitOptions, RanksOptions):
    """Continue a run from its last good checkpoint, on any number of devices that divides the rows of a step.

    A larger --num-steps extends a finished run; its learning rates are then computed for the whole new length. Keys that
    shape weights or choose rows cannot change, by a flag or in its config.toml; --data says where its text is now.

    --step goes back to an older checkpoint that is kept. Those after it are set aside, not deleted.

    A script's run starts again in its folder, PACELINE_RUN, as the next attempt; --quiet-ranks, --sync and --no-sync are for it.

    $ paceline resume books --nproc 1
    $ paceline resume books --step 4500 --matrix-lr 0.01
    """

    run: str = positional("RUN", RUN)
    keys: Mapping[str, Any] = keys_of(Config, foreign=with_our_flags)


class DeviceOption(Options):
    """Where the checkpoint is loaded."""

    device: str | None = option(None, "auto: cuda where there is one", choices=("cuda", "cpu"))


class EvalOptions(JsonOption, RunsOption, StepOption, DeviceOption):
    """Measure bits per byte of a run's model on all held-out text, or on all of another text; of several runs one after the other.

    The result is added to evals.jsonl in the run's folder: `paceline runs show` has it, and so have the pages of `watch`.

    $ paceline eval books letters --data builtin
    """

    runs: tuple[str, ...] = positional("RUN", f"{RUN}; or several")
    data: str | None = option(
        None, "builtin, a file or folder, or hf:NAME[:CONFIG[:SPLIT]]; auto: the held-out text", value="SOURCE"
    )
    text_field: str | None = option(None, "of the text of --data, as for `train`", value="NAME")
    tokens: int | None = option(
        None, "evaluate at most this many in whole rows, but at least one row; auto: all", low=1, high=10**15
    )


class SampleOptions(JsonOption, RunsOption, StepOption, DeviceOption):
    """Write text with a run's model, as it comes.

    $ paceline sample books --prompt "Once upon" --num 3
    """

    run: str = positional("RUN", RUN)
    prompt: str = option("", "how the text begins; -: read it from standard input")
    num: int = option(1, "texts; one where --temperature is 0, since all would be equal", low=1, high=10**6)
    tokens: int = option(200, "tokens of each text, at most", low=1, high=10**6)
    temperature: float = option(0.8, "0 always takes the likeliest token", low=0, high=1e3)
    top_k: int = option(50, "choose among this many of the likeliest tokens; 0: among all", low=0, high=10**6)
    top_p: float = option(1.0, "and among the likeliest that have this share of the probability; 1: all", low=0, high=1)
    seed: int = option(42, "seed of the random choices", low=0, high=2**63 - 1)


class ExportOptions(JsonOption, RunsOption, StepOption):
    """Write a run's model as a folder that Hugging Face transformers loads without paceline.

    It holds the weights in fp32, the tokenizer, and the model's code as one file. Where transformers is installed, its logits are
    compared with those of paceline first. docs/checkpoint.md.

    $ paceline export books --out books-hf
    """

    run: str = positional("RUN", RUN)
    out: Path | None = option(None, "the folder to write; auto: export/NAME_STEP in the run's folder", value="DIR")


class EmitOptions(ConfigOptions):
    """What every file for a scheduler depends on. target: which it is."""

    target = ""
    config: str | None = positional("CONFIG|RUN", f"{CONFIG}; or {RUN}", default=None, has_flag=True)
    gpu: str | None = option(None, 'the GPU of the nodes, such as H100 or "RTX 4090"; auto: those here', value="NAME")
    gpus: int | None = option(None, "GPUs of each node; auto: those here, or 1 of --gpu", low=1, high=1024)
    image: str | None = option(
        None, "the container image; auto: paceline:VERSION, which the Dockerfile makes", value="IMAGE"
    )
    preempt_from: str | None = option(
        None, "on spot machines: ask this cloud's metadata service for notices", choices=("aws", "gcp", "azure")
    )
    out: Path | None = option(None, "the file to write; auto: standard output", value="FILE")
    force: bool = option(False, "write over a file that exists")


class EmitK8sOptions(EmitOptions):
    """Write a Kubeflow TrainJob that runs this training on Kubernetes, with its volume and its restarts.

    Resources are those of the plan. What starts again after an interruption resumes the run. Nothing is submitted.
    docs/clusters.md.

    $ paceline emit k8s balanced --gpu H100 --gpus 4 --hosts 2 --image me/paceline
    """

    target = "k8s"


class EmitSkypilotOptions(EmitOptions):
    """Write a SkyPilot task that runs this training as a managed job, with its bucket and its recovery.

    Resources are those of the plan. What starts again after an interruption resumes the run. Nothing is submitted.
    docs/clusters.md.

    $ paceline emit skypilot balanced --gpu H100 --gpus 8 --out task.yaml
    """

    target = "skypilot"


class EmitDstackOptions(EmitOptions):
    """Write a dstack task that runs this training, with its volumes and its retries.

    Resources are those of the plan. What starts again after an interruption resumes the run. Nothing is submitted.
    docs/clusters.md.

    $ paceline emit dstack balanced --gpu H100 --gpus 4 --hosts 2 --out .dstack.yml
    """

    target = "dstack"


class EmitComposeOptions(EmitOptions):
    """Write a docker compose file that runs this training on one machine, with its volume and its restarts.

    Resources are those of the plan. What starts again after an interruption resumes the run. Nothing is started.
    docs/clusters.md.

    $ paceline emit compose runs/books --out compose.yaml
    """

    target = "compose"


class TokenizerTrainOptions(JsonOption):
    """Train a byte-level BPE tokenizer on the training part of a text.

    $ paceline tokenizer train --data ~/books --vocab-size 32768 --out books.json
    """

    out: Path | None = option(None, "the tokenizer.json to write (required)", value="FILE")
    force: bool = option(False, "write over a file that exists")
    data: str = option("builtin", "text: builtin, a file or folder, or hf:NAME[:CONFIG[:SPLIT]]", value="SOURCE")
    text_field: str | None = option(None, "as for `train`", value="NAME")
    vocab_size: int = option(32_768, "tokens of the tokenizer", low=257, high=2**31 - 1)


class TokenizerInfoOptions(JsonOption):
    """Show a tokenizer's size, its special tokens, and how it cuts a text.

    $ paceline tokenizer info books.json --text "Once upon a time"
    """

    file: Path = positional("FILE|RUN", "a tokenizer.json, or a run's name in runs/ or its folder")
    text: str | None = option(None, "the text to cut into tokens; auto: a few lines of Python")
