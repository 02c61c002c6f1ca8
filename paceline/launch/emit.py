"""
`paceline emit`: what a run needs of a cluster, from its plan. launch/manifests.py writes it in the words of each scheduler.

Nothing is submitted and no network is asked. Several nodes find each other by the environment that the scheduler gives them. Paths
are those of the container: everything that must last is on one volume, WORKSPACE.
"""

import math
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path

import paceline
from paceline.check.ready import training_intent
from paceline.config import Config, cache_dir
from paceline.config_file import find_config, load_config, resolve_config
from paceline.data.prepare import known_sizes
from paceline.errors import PacelineError, UsageError, check_new_file, expand_home
from paceline.hub import is_local
from paceline.launch.job import stop_grace_s
from paceline.plan.forecast import forecast
from paceline.plan.machine import Machine, machine_of, num_hosts
from paceline.plan.planner import Plan
from paceline.run_options import EmitOptions
from paceline.terminal import write_output
from paceline.typed_fields import find_training_run, toml_text
from paceline.units import GIB, MIB, format_bytes, format_number_of

WORKSPACE = "/workspace"  # in the container: runs, prepared text and the text itself
RUNS, CACHE, DATA = (f"{WORKSPACE}/{name}" for name in ("runs", "cache", "data"))
CORES_PER_GPU = 4  # a rank, what feeds it, and the agent with its samples
SHM_PER_RANK = 512 * MIB  # more than check asks for: NCCL's buffers and the batches of data loaders
MEMORY_MARGIN = 1.5  # of what the processes need at least: pages of the text that is read, and compilers
CUDA_HOST_BYTES = 4 * GIB  # of a rank: CUDA's and NCCL's libraries with their pinned buffers
PREPARE_BYTES = 4 * GIB  # while the text becomes tokens
BYTES_PER_TOKEN = 8  # text, and its tokens as shards
SMALL_TEXT_BYTES = 256 * MIB  # builtin
MAX_NAME = 40  # schedulers append to names, and a label has 63 characters
# which the command line sets, or the scheduler
OWN_KEYS = ("name", "runs_dir", "cache_dir", "data", "val_data", "tokenizer", "hosts")
HERE_KEYS = ("python", "interface")  # which describe other machines than the container


@dataclass(frozen=True)
class ClusterJob:
    """A run for a scheduler. Sizes are in bytes and for each node."""

    name: str
    config_toml: str
    train: str  # the command, as a shell reads it; the config is at the path {config}
    resume: str
    image: str
    nodes: int
    ranks: int
    gpus: int  # one for each rank; 0: it runs on CPUs
    gpu: str  # H100, RTX 4090
    gpu_bytes: int
    cores: int
    memory_bytes: int
    shm_bytes: int
    disk_bytes: int
    grace_s: int  # from the order to stop to the end: a step, a save, and a minute
    texts: tuple[tuple[Path, str], ...]  # files and folders of this machine, and where the run expects them
    notes: tuple[str, ...]

    def script(self, config: str, *, node_rank: str | None = None) -> str:
        """Returns the shell script of a node: it resumes the run where there is one. node_rank: the scheduler's variable."""
        first = f'[ "${{{node_rank}:-0}}" = 0 ] && ' if node_rank and self.nodes > 1 else ""
        run = shlex.quote(f"{RUNS}/{self.name}/config.toml")
        return (
            f"set -eu\nif {first}[ -f {run} ]; then\n  exec {self.resume}\nfi\n"
            f"exec {self.train.replace('{config}', config)}\n"
        )


def cluster_job(options: EmitOptions) -> ClusterJob:
    """Returns what a run needs. Raises PacelineError for one that could not work there."""
    config, name = config_of(options)
    if config.hosts is not None and not config.hosts.isdecimal():
        raise UsageError(f"--hosts {config.hosts}: the scheduler chooses the hosts", fix="--hosts 2, their number")
    for key in HERE_KEYS:
        if getattr(config, key) is not None:
            raise UsageError(f"{key} describes hosts that are reached by ssh", fix=f"leave --{key} out")
    if config.epochs is not None:
        fix = "--num-steps N; train prints how many steps the epochs are"
        raise UsageError("the length is given in epochs, and a plan does not read the text", fix=fix)
    machine = machine_of(options.gpu, options.gpus, num_hosts(config))
    texts, flags = place_texts(config)
    cache, vocab_size = cache_dir(config), known_sizes(config).vocab_size
    config_there = replace(config, hosts=None)
    plan = forecast(config_there, machine, cache=cache, vocab_size=vocab_size, num_rows=0, is_whole=False).plan
    preempt = [f"--preempt-from={options.preempt_from}"] if options.preempt_from else []
    place = [f"--name={name}", f"--runs-dir={RUNS}", f"--cache-dir={CACHE}"]
    ranks = plan.world_size // plan.hosts
    on_gpu = plan.device == "cuda"
    return ClusterJob(
        name=name,
        config_toml=config_text(config),
        train=f"paceline train {{config}} {shlex.join([*place, *flags, *preempt])}",
        resume=f"paceline resume {shlex.join([f'{RUNS}/{name}', *preempt])}",
        image=options.image or f"paceline:{paceline.__version__}",
        nodes=plan.hosts,
        ranks=ranks,
        gpus=ranks if on_gpu else 0,
        gpu=gpu_name(machine, plan),
        gpu_bytes=machine.gpus[0].memory_bytes if on_gpu else 0,
        cores=ranks * CORES_PER_GPU if on_gpu else max(ranks, plan.threads * ranks),
        shm_bytes=round_up(ranks * SHM_PER_RANK),
        memory_bytes=memory_needed(config, plan) + round_up(ranks * SHM_PER_RANK),
        disk_bytes=disk_needed(config, plan, texts),
        grace_s=math.ceil(stop_grace_s(plan)),
        texts=texts,
        notes=tuple(summary(config, plan)),
    )


def config_of(options: EmitOptions) -> tuple[Config, str]:
    """Returns the config of a file, or of a run, and the name that the run will have."""
    source = options.config
    if source and Path(source).suffix not in (".toml", ".py") and not find_config(source).is_file():
        run = find_training_run(source, runs_dir=str(options.keys.get("runs_dir", "runs")))
        config, name = load_config(run.config_toml, options.keys)[0], run.name
    else:
        config = resolve_config(source, options.keys)
        name = Path(source).stem if source else "paceline"
    name = re.sub(r"[^a-z0-9]+", "-", (options.keys.get("name") or name).lower()).strip("-")[:MAX_NAME].strip("-")
    if not name or not name[0].isalpha():
        name = f"run-{name}".strip("-")
    return config, name


def place_texts(config: Config) -> tuple[tuple[tuple[Path, str], ...], list[str]]:
    """Returns which files of this machine the run needs, and where; and the flags that name them there.

    Raises PacelineError for a path that is neither here nor on the volume.
    """
    if config.init_from:
        fix = f"copy it to {DATA} and start there: paceline train --init-from {DATA}/RUN"
        raise PacelineError(f"the weights of {config.init_from} are on this machine", fix=fix)
    texts, flags = list[tuple[Path, str]](), list[str]()
    for key, value in (("data", config.data), ("val-data", config.val_data), ("tokenizer", config.tokenizer)):
        if value is None:
            continue
        if key != "tokenizer" and not is_local(value):
            flags += [f"--{key}={value}"] if (key, value) != ("data", Config.data) else []
            continue
        path = expand_home(value)
        target = value if value.startswith(f"{WORKSPACE}/") else f"{DATA}/{path.resolve().name}"
        if target != value:
            if not path.exists():
                fix = f"a path that exists, or one under {DATA}, where the volume will have it"
                raise PacelineError(f"{key} {value} is not here", fix=fix)
            if folder := next((text for text in texts if text[0] in path.resolve().parents), None):
                target = f"{folder[1]}/{path.resolve().relative_to(folder[0])}"
            else:
                texts.append((path.resolve(), target))
        flags.append(f"--{key}={target}")
    if len({target for _, target in texts}) < len(texts):
        raise PacelineError("two of text, validation text and tokenizer have the same name", fix="rename one of them")
    return tuple(texts), flags


def config_text(config: Config) -> str:
    """Returns the TOML of the keys that are not at their defaults, without those that the command line sets."""
    defaults = asdict(Config())
    values = {key: value for key, value in asdict(config).items() if value != defaults[key] and key not in OWN_KEYS}
    return toml_text(values)


def gpu_name(machine: Machine, plan: Plan) -> str:
    """Returns the name of the card without maker and form: H100, RTX 4090; empty for a CPU."""
    if plan.device != "cuda":
        return ""
    card = machine.gpus[0]
    name = card.spec.name if card.spec else re.sub(r"^NVIDIA |^GeForce ", "", card.name)
    return re.sub(r" (SXM\w*|PCIe|NVL|\d+ ?GB)\b.*", "", name)


def memory_needed(config: Config, plan: Plan) -> int:
    """Returns the bytes of memory of one node that its processes, a save and the preparation of the text need."""
    intent = training_intent(config, plan, command="train", set_keys=frozenset(), run_path=Path(RUNS))
    libraries = CUDA_HOST_BYTES * plan.world_size // plan.hosts if plan.device == "cuda" else 0
    processes = int((intent.need_host_bytes or 0) / plan.hosts * MEMORY_MARGIN) + libraries
    return round_up(processes + (intent.checkpoint_bytes or 0) + PREPARE_BYTES)


def disk_needed(config: Config, plan: Plan, texts: tuple[tuple[Path, str], ...]) -> int:
    """Returns the bytes of the volume: the checkpoints that are kept and the one being written, text and tokens."""
    intent = training_intent(config, plan, command="train", set_keys=frozenset(), run_path=Path(RUNS))
    checkpoints = (intent.checkpoint_bytes or 0) * (intent.num_checkpoints or 0)
    text = 2 * sum(size_of(path) for path, _ in texts)
    if not texts:
        is_builtin = config.data == "builtin"
        text = SMALL_TEXT_BYTES if is_builtin else plan.num_steps * plan.total_batch_size * BYTES_PER_TOKEN
    return round_up(int(1.2 * (checkpoints + text)) + GIB)


def write_file(options: EmitOptions, text: str) -> str:
    """Writes the file of --out, if there is one, and returns what to print. Raises PacelineError for a file that exists."""
    if options.out is None:
        return text
    check_new_file(options.out, force=options.force)
    write_output(options.out, text)
    comments = [line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("#"), text.splitlines())]
    return "\n".join([f"wrote   {options.out}", *(f"        {line}" for line in comments)]) + "\n"


def size_of(path: Path) -> int:
    """Returns the bytes of a file or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    files = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(file.stat().st_size for file in files if file.is_file())


def round_up(size: int) -> int:
    """Returns the size in whole GiB, at least one."""
    return max(1, -(-size // GIB)) * GIB


def summary(config: Config, plan: Plan) -> Iterator[str]:
    """Yields what the file is for, as comment lines."""
    per_node = plan.world_size // plan.hosts
    devices = f"{per_node} x {plan.device_name}"
    if plan.device == "cpu":
        devices = format_number_of(per_node, "CPU process", "CPU processes")
    nodes = f"{plan.hosts} nodes, each " if plan.hosts > 1 else ""
    length = f"{config.time} of training" if config.time else format_number_of(plan.num_steps, "step")
    yield f"paceline {paceline.__version__}: depth {plan.model.n_layer}, {length}, on {nodes}{devices}"
    if config.data == Config.data:
        yield f"text: {config.data}, a small one for a first try; --data SOURCE names yours"
    card = plan.memory.get("process_bytes", {}).get("expected")
    if plan.device == "cuda" and card:
        yield f"planned: {format_bytes(card)} of each GPU"
