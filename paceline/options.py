"""
What each command takes: one frozen dataclass for each, with defaults, limits and help. command_line.py parses them.

They are apart from the functions that take them: those import much, and `--help` and completion need only these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any, dataclass_transform

from paceline.command_line import keys_of, option, positional
from paceline.config import Config
from paceline.errors import UsageError
from paceline.other_names import with_our_flags

RUN = "the run's folder, or its name under --runs-dir"
CONFIG_FILE = "a name of `paceline configs`, a .toml file, or a .py file of plain `key = literal` lines"
CONFIG = f"{CONFIG_FILE}; auto: tiny"
ANY_RUN = "a run's folder or name, or a log file of any training"
DATA_KEYS = ("data", "val_data", "text_field", "tokenizer", "vocab_size", "sequence_len", "packing", "cache_dir")
TRACKERS = ("tensorboard", "wandb", "trackio")
TRACKER_NAMES = f"these trackers, separated by commas: {', '.join(TRACKERS)}"


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Options:
    """Each subclass is a frozen dataclass, whose docstring is the help of its command.

    All have the methods of this class: dataclass would compile each class its own, a fifth of the start of every command.
    """

    def __init_subclass__(cls) -> None:
        dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)

    def __init__(self, **values: Any) -> None:
        for name, field in getattr(self, "__dataclass_fields__", {}).items():
            if name not in values and field.default_factory is not MISSING:
                values[name] = field.default_factory()
            vars(self)[name] = values.pop(name, field.default)
        missing = [name for name, value in vars(self).items() if value is MISSING]
        if values or missing:
            raise TypeError(f"{type(self).__name__}: unknown {[*values]}, missing {missing}")
        self.check_values()

    def check_values(self) -> None:
        """Raises UsageError for values of which no limit says that they are wrong."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class ConfigOptions(Options):
    """A config file and any key of it."""

    config: str | None = positional("CONFIG", CONFIG, default=None, has_flag=True)
    keys: Mapping[str, Any] = keys_of(Config, foreign=with_our_flags)


class JsonOption(Options):
    """Output for programs."""

    json: bool = option(False, "print JSON")


class RunsOption(Options):
    """Where runs are."""

    runs_dir: str = option("runs", "the folder that holds the runs", value="DIR")


class Recovery(Options):
    """How attempts are repeated."""

    max_attempts: int = option(10, "attempts in all, the first included", low=1, high=10**6, group="recovery")
    recover: bool = option(True, "stop at the first failure")
    hang_after_s: float | None = option(
        None,
        "seconds without progress after which a rank counts as hung; auto: 60 or 6 usual steps within a step,"
        " 600 of a script's silence",
        low=0.1,
        high=1e6,
    )


class Services(Options):
    """Processes that follow a run: trackers and notifications."""

    track: tuple[str, ...] = option(
        (), f"send metrics to {TRACKER_NAMES}", group="services", value="TRACKERS", names=TRACKERS
    )
    notify: tuple[str, ...] = option(
        (),
        "report failed, recovered and finished to this address (ntfy, Slack, any JSON receiver), or @FILE with the"
        " address in it; may be repeated",
        value="URL",
    )


class HostOptions(Options):
    """What happens to a run of several hosts."""

    min_hosts: int = option(1, "go on while as many hosts remain", low=1, high=1024, group="hosts")
    env: tuple[str, ...] = option(
        (), "send these variables to the other hosts too: HF_TOKEN,WANDB_API_KEY; else only paceline's", value="NAMES"
    )
    join: bool = option(True, "ignore the place among several nodes that the environment gives (docs/clusters.md)")
    join_timeout_s: float = option(600.0, "seconds to wait for the other nodes of that place", low=1, high=1e6)


class PreemptOptions(Options):
    """How the run learns that its machine is taken away."""

    preempt_file: Path | None = option(
        None, "save and end when this file appears; it may hold the seconds that are left", group="preemption"
    )
    preempt_from: str | None = option(
        None, "ask this cloud's metadata service for preemption notices; save and end when one comes",
        choices=("aws", "gcp", "azure"),
    )  # fmt: skip
    preempt_grace_s: float | None = option(
        None,
        "seconds from a notice to the end of the machine; auto: as the notice or the cloud says",
        low=1,
        high=86_400,
    )


class LaunchOptions(Recovery, Services, HostOptions, PreemptOptions):
    """What `train`, `resume` and `run` share."""

    check: bool = option(True, "start even if a check says that the run would fail", group="launch")
    show_env: bool = option(False, "print the environment of the ranks, and why each variable is set, and stop")
    detach: bool = option(False, "go on in the background when the run is ready to start; the terminal may then close")
    health_every_s: float = option(2.0, "seconds between health samples of the host; 0: no samples", low=0, high=86_400)


class SlurmOptions(Options):
    """How a run becomes a job of Slurm."""

    slurm: bool = option(
        False,
        "submit it to Slurm and follow it; --hosts N is the number of nodes. In a job of Slurm it just runs",
        group="Slurm",
    )
    slurm_args: str = option(
        "", 'options of sbatch: "--partition=gpu --time=8:00:00"', value="OPTIONS", takes_options=True
    )


class SubmitOptions(SlurmOptions):
    """How a run is submitted."""

    print: bool = option(False, "with --slurm: show the batch script and stop", group="Slurm")


class LabelOptions(Options):
    """What a new run is found by."""

    tag: tuple[str, ...] = option(
        (), "a tag, a word without spaces; may be repeated. paceline runs --tag finds it", value="TAG", group="labels"
    )
    note: str = option("", "a note about the run, which stands in the list of runs")

    def check_values(self) -> None:
        check_tags(self.tag)


def check_tags(tags: Sequence[str]) -> None:
    if bad := next((tag for tag in tags if len(tag.split()) != 1), None):
        raise UsageError(f"{bad!r} is not a tag: tags have no spaces", fix="join its words, or write a note")


class RejoinOption(Options):
    """Whether a lost host comes back. A script's does not: nobody knows where it could begin again."""

    rejoin: bool = option(True, "leave out a host that was lost, even if it answers again", group="hosts")


class TrainOptions(LabelOptions, LaunchOptions, RejoinOption, SubmitOptions, ConfigOptions):
    """Train a GPT; without CONFIG, a small one on text that is always at hand.

    Plans, prepares the text, starts one process for each device, trains, and leaves everything in runs/NAME. A failure that is
    usually transient is retried from the last good checkpoint (docs/recovery.md). A rank that hangs is stopped and the attempt
    repeated. Every config key is an option; options override CONFIG.

    $ paceline train balanced --data ~/books --name books
    """


class RanksOptions(Options):
    """What `run` and the `resume` of its runs show of the ranks, and send to their hosts."""

    quiet_ranks: bool = option(False, "show the output of rank 0 only; logs keep every rank's", group="launch")
    sync: str | None = option(
        None, "send this folder to the other hosts and run there; auto: the script's, where a host lacks it", value="DIR",
        group="hosts",
    )  # fmt: skip
    no_sync: bool = option(False, "send no files: they are already there")


class ScriptOptions(LabelOptions, LaunchOptions, RanksOptions):
    """Start any script that torchrun can start, with paceline's checks, logs and recovery.

    Starts SCRIPT.py, or -m MODULE, once for each device. Each rank's output is kept whole in runs/NAME/logs and shown as it
    comes, with the rank before each line. A failure from outside the script is retried with the same command; the script finds
    PACELINE_ATTEMPT (1, 2, ...) and PACELINE_RUN, a folder for its checkpoints. The exit code is that of the rank that failed
    first, or 1 if the cause is a known mistake in the script or its arguments.

    With --hosts it runs on all of them. A host that does not have the script's folder gets a copy, of which only what has
    changed travels; what git ignores is not sent (docs/script.md).

    $ paceline run --nproc 2 -- train.py --lr 3e-4
    $ paceline run -- -m package.train --lr 3e-4
    $ paceline run --hosts ada,bob -- train.py
    """

    command: tuple[str, ...] = positional(
        "SCRIPT.py [args]", "the script and its own arguments; or -m MODULE [args]", default=(), is_script=True
    )
    keys: Mapping[str, Any] = keys_of(
        Config, names=("nproc", "device", "name", "runs_dir", "hosts", "python", "interface", "ports")
    )


class PlanOptions(JsonOption, SlurmOptions, ConfigOptions):
    """Show what fits, how fast, how long and at what cost, on the GPUs here or on others.

    Shows memory by part, the largest micro-batch, the time of a step and of the run, energy and money, each with its range
    and what it is based on. Without CONFIG it plans tiny, as train would; where GPUs are named or a time is given,
    depth 12 and the defaults of all keys. --time without CONFIG and --depth, and --budget, choose the depth by scaling rules.

    $ paceline plan balanced --gpu "RTX 5090" --gpus 2
    """

    gpu: str | None = option(None, 'plan for this GPU, such as "RTX 5090"; auto: the GPUs here', value="NAME")
    gpus: int | None = option(None, "GPUs of each host; auto: those here, or 1 of --gpu", low=1, high=1024)
    link: str | None = option(None, 'link: 10GbE, "PCIe 5 x8", NVLink; auto: as `paceline comm` measured', value="NAME")
    price: str | None = option(None, "0.30/kWh or 2.50/gpu-hour: adds what the run costs", value="PRICE")
    watts: float | None = option(None, "power of one GPU under load; auto: the GPU's limit", low=1e-3, high=1e6)
    time: str | None = option(
        None,
        "with CONFIG or --depth the length, as for train; else the deepest model that 12h or 90m allow",
        value="TIME",
    )
    budget: float | None = option(None, "the deepest model that costs at most this; needs --price", low=1e-3, high=1e9)
    compare: str | None = option(None, '"RTX 4090,RTX 5090,H100": a table with one line for each GPU', value="NAMES")
    sweep: str | None = option(None, "device_batch_size, depth=8,12 ...: a line for each value", value="KEY[=A,B]")
    follow_rows: bool = option(False, "with --sweep device_batch_size: the total batch follows the rows")
    exact: bool = option(False, "trace two real steps without a GPU (needs torch, takes seconds)")
    measure: bool = option(False, "measure the device here first, under a minute; later plans use the result")
    slurm: bool = option(
        False, "plan for the GPUs of Slurm's partition, and say how many jobs the run needs", group="Slurm"
    )


class ConfigsOptions(JsonOption):
    """List the configs that come with paceline, whose names stand for files, or print one to begin your own.

    $ paceline configs balanced > mine.toml
    """

    name: str | None = positional("NAME", "the config to print; auto: list all", default=None)


class CheckOptions(JsonOption, ConfigOptions):
    """Check whether this machine, or several hosts, are ready to train a config: findings, each with its fix.

    The exit code is 1 if a finding would stop the run. docs/checks.md lists what is checked, docs/hosts.md how hosts are reached.

    $ paceline check balanced --nproc 2
    $ paceline check --hosts ada,bob
    """

    port: int | None = option(None, "check this port too", low=1, high=65_535)
    verbose: bool = option(False, "show the facts of each finding, and the checks that found nothing")


class CommOptions(JsonOption, ConfigOptions):
    """Test and measure the collectives between the ranks.

    Checks that every result is right, measures how fast the links are, and shows what that means for a training step of
    the config. A rank that does not respond is reported after the deadline.

    $ paceline comm --nproc 2 --device cpu
    $ paceline comm --hosts ada,bob
    """

    config: str | None = positional(
        "CONFIG", f"{CONFIG_FILE}; auto: depth 12 and the defaults of all keys", default=None, has_flag=True
    )

    max_bytes: int | None = option(
        None,
        "bytes of the largest message, from 1 MiB on, since less shows no bandwidth; auto: by the device",
        low=1 << 20,
        high=1 << 40,
    )
    deadline_s: float = option(10.0, "seconds of silence after which a rank is reported as stuck", low=1, high=1e6)
    tok_per_sec: float | None = option(None, "tokens per second of one process; auto: as planned", low=1e-3, high=1e12)
    out: Path | None = option(None, "where the results go; auto: under ~/.cache/paceline, for plans", value="FILE")


class ProfileOptions(JsonOption, ConfigOptions):
    """Show where the time and memory of real steps go, on all ranks, beside the plan; with a trace (docs/profile.md).

    $ paceline profile configs/tiny.toml --nproc 1
    """

    config: str | None = positional("RUN|CONFIG", f"{RUN}; or {CONFIG}", default=None)
    steps: int = option(5, "steps under the profiler; as many are timed without it", low=1, high=1000)


class TorchCheckOptions(JsonOption):
    """Check this PyTorch: libuv, NCCL, process groups, and products on every device.

    The exit code is 1 if something is not right. docs/torch.md.

    $ paceline torch check
    """

    path: Path | None = option(None, "another install: a venv or a source tree; auto: this Python's", value="DIR")


class TorchRecipeOptions(JsonOption):
    """Show the PyTorch wheel for these GPUs and this driver, or the build that fits.

    $ paceline torch recipe --arch 12.0 --driver 570.133
    """

    arch: str | None = option(None, "compute capability such as 12.0; auto: the GPUs here", value="CAPABILITY")
    driver: str | None = option(None, "version of the driver, such as 570.133; auto: the one here", value="VERSION")
    build: bool = option(False, "show the build even if a wheel fits")
    script: Path | None = option(None, "write a bash script that builds PyTorch, to read and run", value="FILE")


class AccelerateOptions(JsonOption):
    """Write an accelerate config that fits this machine: its devices, its precision, DDP or FSDP2.

    With several hosts, --hosts writes a file for each; or write one on each, with --nnodes, --node-rank and --main-address.

    $ paceline accelerate-config --out two-cards.yaml
    """

    out: str = option("accelerate.yaml", "the file to write, or - for standard output", value="FILE")
    force: bool = option(False, "write over a file that exists")
    fsdp: bool = option(False, "FSDP2 in place of DDP")
    hosts: str | None = option(None, "hosts like this one, which is among them: a file for each", value="ada,bob")
    nnodes: int = option(1, "hosts", low=1, high=10**6)
    node_rank: int | None = option(None, "the rank of this host, of several", low=0, high=10**6)
    main_address: str | None = option(None, "the address of the host with --node-rank 0", value="ADDRESS")
    main_port: int | None = option(None, "rendezvous port; auto: a free one, or 29500 for hosts", low=0, high=65_535)
    keys: Mapping[str, Any] = keys_of(Config, names=("nproc", "device", "precision"))


class DataOptions(JsonOption, ConfigOptions):
    """Turn text into token shards, as `train` does before it starts.

    JSON lines, Parquet and datasets have their text in the field that --text-field names; without it in `text`, or in an only field
    of strings named `content`, `body` ... Any other key of `train` may stand here too, for the command that is printed at the end.

    $ paceline data prepare --data ~/books --vocab-size 32768
    """

    keys: Mapping[str, Any] = keys_of(Config, shown=DATA_KEYS, foreign=with_our_flags)
    verify: bool = option(False, "hash every shard and compare")


class DataInfoOptions(DataOptions):
    """Show what is in the token shards of a text, which are prepared if they are not there.

    $ paceline data info --data ~/books --verify
    """


class CompletionOptions(Options):
    """Print a script that completes commands, options, files and runs in your shell.

    $ source <(paceline completion bash)
    $ paceline completion zsh > ~/.zfunc/_paceline
    $ paceline completion fish > ~/.config/fish/completions/paceline.fish
    """

    shell: str = positional("SHELL", "bash, zsh or fish", choices=("bash", "zsh", "fish"))
