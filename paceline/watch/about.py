"""
What a run's folder says about the run beside its course: config, plan, machine, samples, results of `paceline eval`, tags and note.

Large files are read in part, and links that lead out of the run folder are skipped.
"""

import csv
import hashlib
import json
import os
import shlex
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import Any

from paceline.config import KEYS, MATRIX_LR
from paceline.errors import PacelineError, expand_home
from paceline.hub import is_local
from paceline.options import LabelOptions, check_tags
from paceline.run_options import EvalOptions, RunsNoteOptions, RunsTagOptions
from paceline.rundir import (
    RunDir,
    append_sample,
    find_run,
    open_file,
    read_json_lines,
    unwritable_run,
    utc_now,
    write_atomic,
)
from paceline.typed_fields import well_typed
from paceline.units import format_bytes, unix_time
from paceline.watch.events import AUTO, format_setting, is_complete, setting_changes
from paceline.watch.growing_file import GrowingFile, parse_lines
from paceline.watch.measures import format_figure, format_time
from paceline.watch.snapshot import Evaluation

MAX_FILE_BYTES = 1 << 20  # read of a config, of facts, of a sample
MAX_SAMPLES = 50
COMPARED_FACTS = ("GPUs", "driver", "torch", "CUDA", "NCCL", "Python", "paceline", "commit")
OWN_KEYS = ("name", "seed", "runs_dir", "cache_dir")  # in which runs of a group may differ
COMPARED_CHOICES = (
    "num_steps", "total_batch_size", "device_batch_size", "grad_accum_steps", "precision", "shard", "offload",
    "optimizer_states", "attention", "attention_kernel",
)  # fmt: skip


def read_about(run: RunDir) -> dict[str, Any]:
    """Returns {config: {key: value}, group, setup, facts: [{host, rows: [[name, value]]}], samples: [{name, prompt, text}]}.

    group: the same text for runs that differ only in their seed.
    setup: what the run ran on, and what its plan chose, by name: a comparison shows where two runs differ in it.
    samples: the latest first. prompt: with which the text begins, empty where it is not known.
    """
    samples = islice(files_in(run, "samples/*.txt", str, reverse=True), MAX_SAMPLES)
    machines: list[tuple[str, list[tuple[str, str]]]] = []
    for path, facts in files_in(run, "facts/*.json", json.loads):
        with suppress(AttributeError, KeyError, TypeError, ValueError):  # damaged
            machines.append((path.stem, fact_rows(facts)))
    plan = next((plan for _, plan in files_in(run, run.plan_json.name, json.loads) if isinstance(plan, dict)), {})
    config, events = config_in(run), list(filter(is_complete, read_json_lines(run.events)))
    prompts = {
        run.sample(event["step"]): str(event.get("prompt") or "") for event in events if event.get("event") == "sample"
    }
    return {
        "config": config,
        "group": group_key(config),
        "setup": setup_of(config, events, [dict(rows) for _, rows in machines], plan),
        "facts": [{"host": host, "rows": rows} for host, rows in machines],
        "samples": [
            {"name": path.stem.replace("_", " "), "prompt": prompts.get(path, ""), "text": text}
            for path, text in samples
        ],
    }


def csv_lines(path: Path) -> Iterator[str]:
    """Yields a file of JSON lines as CSV, in blocks: a column for each field; a list has one for each of its places."""

    def flat(record: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in record.items():
            yield from (
                ((f"{name}_{i}", item) for i, item in enumerate(value)) if isinstance(value, list) else [(name, value)]
            )

    names = list(
        dict.fromkeys(name for block in GrowingFile(path).blocks() for r in parse_lines(block) for name, _ in flat(r))
    )
    text = StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for block in GrowingFile(path).blocks():
        writer.writerows(dict(flat(record)) for record in parse_lines(block))
        yield text.getvalue()
        text.seek(0)
        text.truncate()


def edit_tags(options: RunsTagOptions) -> str:
    """Adds tags to a run or removes them; returns a line with those that it has, or JSON."""
    name, *changed = options.run_and_tags
    run = find_run(name, runs_dir=options.runs_dir)
    tags, note = read_notes(run)
    if changed:
        check_tags(changed)
        others = [tag for tag in tags if tag not in changed]
        tags = others if options.remove else list(dict.fromkeys([*tags, *changed]))
        write_notes(run, tags=tags, note=note)
    return notes_json(run) if options.json else f"{run.name}: {' '.join(tags) or 'no tags'}"


def edit_note(options: RunsNoteOptions) -> str:
    """Writes the note of a run; returns a line with the one that it has, or JSON."""
    name, *words = options.run_and_text
    run = find_run(name, runs_dir=options.runs_dir)
    tags, note = read_notes(run)
    if words:
        note = one_line(" ".join(words))
        write_notes(run, tags=tags, note=note)
    return notes_json(run) if options.json else f"{run.name}: {note or 'no note'}"


def label_new_run(run: RunDir, options: LabelOptions) -> None:
    """Writes the tags and the note that the command of a new run has, beside those that the run got in Slurm's queue."""
    if options.tag or options.note:
        tags, note = read_notes(run)
        write_notes(run, tags=list(dict.fromkeys([*tags, *options.tag])), note=one_line(options.note) or note)


def one_line(text: str) -> str:
    return " ".join(text.split())


def notes_json(run: RunDir) -> str:
    tags, note = read_notes(run)
    return json.dumps({"name": run.name, "tags": tags, "note": note}, ensure_ascii=False)


def config_in(run: RunDir) -> dict[str, Any]:
    return next((config for _, config in files_in(run, run.config_toml.name, tomllib.loads)), {})


def measured_on(config: dict[str, Any]) -> dict[str, Any]:
    """Returns on how many tokens val_bpb is measured, and of which text."""
    data = config.get("data")
    text = config.get("val_data") or (f"{data} (held out)" if data else None)
    return {"eval_tokens": config.get("eval_tokens"), "eval_text": text}


def short_texts(texts: Iterable[str]) -> dict[str, str]:
    """Returns for each text its last words between slashes, as many as tell the texts apart."""
    names = set(texts)
    for count in range(1, 1 + max((name.count("/") for name in names), default=0)):
        short = {name: "/".join(name.split("/")[-count:]) for name in names}
        if len(set(short.values())) == len(names):
            return short
    return {name: name for name in names}


def group_key(config: dict[str, Any]) -> str | None:
    """Returns the same text for runs whose configs differ only in seed and name; None without a config."""
    if not config:
        return None
    settings = sorted((key, repr(value)) for key, value in config.items() if key not in OWN_KEYS)
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:12]


def setup_of(
    config: dict[str, Any], events: Sequence[dict[str, Any]], hosts: list[dict[str, str]], plan: dict[str, Any]
) -> dict[str, Any]:
    """Returns ranks and hosts, GPUs, versions and commit of all hosts, the choices of the plan, and what the config leaves out.

    A setting that a resume changed has all its values: "0.1, 0.05 from step 320".
    """
    automatic = auto_values(config, events, plan)
    facts = {name: ", ".join(dict.fromkeys(host[name] for host in hosts if name in host)) for name in COMPARED_FACTS}
    choices = {name: plan[name] for name in COMPARED_CHOICES if plan.get(name) is not None and name not in automatic}
    attempts = [event for event in events if event.get("event") == "attempt"]
    setup = automatic | ({"ranks": str(attempts[-1].get("world_size"))} if attempts else {})
    setup |= (
        ({"hosts": str(len(hosts))} if hosts else {}) | {name: text for name, text in facts.items() if text} | choices
    )
    values: dict[str, str] = {}
    resumes = list(setting_changes(events))
    for index, (_, step, changes, _) in enumerate(resumes):
        if all(step < other for _, other, *_ in resumes[index + 1 :]):  # else its steps were done again
            for key, (before, now) in changes.items():
                chosen = setup.get(key, now) if now == AUTO else now
                values[key] = f"{values.get(key, before)}, {chosen} from step {step:,}"
    return setup | values


def auto_values(config: dict[str, Any], events: Sequence[dict[str, Any]], plan: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys that a training's config leaves out: `0.02 (auto)` where paceline chose a value, else `auto`."""
    if not config or "command" in config:
        return {}
    logits_bytes = plan.get("logits_budget_bytes")
    attempts = [event for event in events if event.get("event") == "attempt"]
    chosen = plan | {
        "matrix_lr": MATRIX_LR.get(str(config.get("optimizer", KEYS["optimizer"].default))),
        "nproc": attempts[-1].get("nproc") if attempts else None,
        "logits_mib": logits_bytes >> 20 if isinstance(logits_bytes, int) else None,
    }
    keys = [key for key, owner in KEYS.items() if owner.default is None and key not in (*OWN_KEYS, *config)]
    return {key: AUTO if chosen.get(key) is None else f"{format_setting(chosen[key])} ({AUTO})" for key in keys}


def expected(plan: dict[str, Any]) -> dict[str, Any] | None:
    """What the planner expects of a step and of the run, the middle of each of its ranges; None without a plan."""
    if not plan:
        return None
    cost, memory = plan.get("cost") or {}, plan.get("memory") or {}
    peak = "process_bytes" if plan.get("device") == "cpu" else "allocated_bytes"  # as peak_bytes of metrics.jsonl
    ranges = {  # or single values, each with its factor
        "step_ms": (cost.get("seconds"), 1000),
        "tok_per_sec": (cost.get("tok_per_sec"), 1),
        "peak_bytes": (memory.get(peak), 1),
        "process_bytes": (memory.get("process_bytes"), 1),
        "mfu": (cost.get("mfu"), 1),
        "total_s": ((cost.get("run") or {}).get("hours"), 3600),
    }
    values = {
        name: (value.get("expected") if isinstance(value, dict) else value) for name, (value, _) in ranges.items()
    }
    return {name: value and value * ranges[name][1] for name, value in values.items()}


def files_in(
    run: RunDir, pattern: str, parse: Callable[[str], Any], *, reverse: bool = False
) -> Iterator[tuple[Path, Any]]:
    """Yields the files in the folder that can be read and parsed, by name, and what the first MAX_FILE_BYTES of each hold."""
    folder = run.path.resolve()
    for path in sorted(run.path.glob(pattern), reverse=reverse):
        with suppress(OSError, ValueError):
            if path.is_file() and path.resolve().is_relative_to(folder):
                with open_file(path) as file:
                    content = parse(file.read(MAX_FILE_BYTES).decode(errors="replace"))
                yield path, content


def fact_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the facts that readers ask for first, as text; what is not known is left out."""
    host, torch = facts.get("host") or {}, facts.get("torch") or {}
    cpu, memory = host.get("cpu") or {}, host.get("memory") or {}
    code = (facts.get("tools") or {}).get("code") or {}
    gpus = Counter(str(gpu.get("name")) for gpu in facts.get("gpus") or ())
    rows = {
        "GPUs": ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "none",
        "driver": facts.get("driver"),
        "CPU": f"{cpu['model']}, {cpu.get('logical')} threads" if cpu.get("model") else None,
        "RAM": format_bytes(memory["total_bytes"]) if memory.get("total_bytes") else None,
        "system": " ".join(filter(None, (host.get("os"), host.get("arch"), host.get("kernel")))),
        "container": host.get("container"),
        "torch": torch.get("version"),
        "CUDA": torch.get("cuda"),
        "NCCL": torch.get("nccl"),
        "Python": (facts.get("python") or {}).get("version"),
        "paceline": (facts.get("packages") or {}).get("paceline"),
        "commit": f"{code['commit']}{' with changes' if code.get('dirty') else ''}" if code.get("commit") else None,
        "read": f"{format_time(facts.get('time', ''))} UTC",
    }
    return [(name, str(value)) for name, value in rows.items() if value]


def read_notes(run: RunDir) -> tuple[list[str], str]:
    """Returns the tags of a run and its note; none where its user wrote none or the file is damaged."""
    try:
        table = json.loads(run.notes.read_text(encoding="utf-8"))
        return [tag for tag in table.get("tags", ()) if isinstance(tag, str)], str(table.get("note") or "")
    except (OSError, ValueError, AttributeError, TypeError):
        return [], ""


def write_notes(run: RunDir, *, tags: list[str], note: str) -> None:
    try:
        write_atomic(run.notes, json.dumps({"tags": tags, "note": note}, ensure_ascii=False) + "\n")
    except OSError as error:
        raise unwritable_run(run, error) from error


def record_evaluation(run: RunDir, result: Mapping[str, Any], options: EvalOptions) -> None:
    """Adds a result of `paceline eval` to those in the run's folder; where that cannot be written, prints a line about it."""
    text = options.data or measured_on(config_in(run))["eval_text"]
    if options.data and is_local(options.data):  # another command is in another folder
        text = str(expand_home(options.data).absolute())
    record = {"time": utc_now(), "step": result["step"], "val_bpb": result["val_bpb"], "eval_tokens": result["tokens"]}
    record |= {"eval_text": text, "text_field": options.text_field, "max_tokens": options.tokens}
    if not append_sample(run.evaluations, record):
        print(f"note    {run.evaluations} cannot be written: the result is not in the run's folder", file=sys.stderr)


def read_evaluations(run: RunDir, events: Iterable[dict[str, Any]]) -> list[Evaluation]:
    """Returns the results in evals.jsonl by what was measured and by step; of those of the same step the last.

    Results of checkpoints that were set aside afterwards are not the run's. events: the run's.
    """
    latest: dict[tuple[str, int], Evaluation] = {}
    backs = [(unix_time(e["time"]), e["step"]) for e in events if e.get("event") == "set_aside" and is_complete(e)]
    with suppress(OSError):
        for record in read_json_lines(run.evaluations):
            values: dict[str, Any] = {name: record.get(name) for name in Evaluation.__dataclass_fields__}
            if type(values["val_bpb"]) is float and type(values["time"]) is str:
                result = well_typed(Evaluation(**values), Evaluation)
                measured = unix_time(result.time)
                if not any(measured <= time and result.step > step for time, step in backs):
                    latest[result.title, result.step] = result
    return [latest[key] for key in sorted(latest)]


def evaluations_by_title(results: Iterable[Evaluation]) -> dict[str, Evaluation]:
    """Returns the last result of each text of a run."""
    return {result.title: result for result in sorted(results, key=lambda result: result.time)}


def format_evaluation(result: Evaluation | None, *, step: int | None) -> str:
    """2.3689, or 2.3726 at 180 where the run has gone on from there. step: the run's."""
    if result is None:
        return "n/a"
    return format_figure("val_bpb", result.val_bpb) + ("" if result.step == step else f" at {result.step:,}")


def evaluation_rows(results: Iterable[Evaluation]) -> list[list[Any]]:
    """Returns the results as the page shows them: text, step, val_bpb, tokens, and Unix seconds."""
    return [
        [r.title, f"{r.step:,}", format_figure("val_bpb", r.val_bpb), f"{r.eval_tokens:,}", unix_time(r.time)]
        for r in results
    ]


def check_links(path: Path) -> None:
    if link := link_out_of(path):
        raise PacelineError(
            f"{link} is a link that leads out of the run folder, so the browser may not show this run",
            fix=f"paceline watch {shlex.quote(str(path))} shows it in the terminal",
        )


def link_out_of(path: Path) -> Path | None:
    """Returns a link that leads out of the run folder, among the files that are read. The folder may be a link itself."""
    run, inside = RunDir(path), os.path.realpath(path)
    files = (run.config_toml, run.plan_json, run.findings, run.events, run.metrics, run.evaluations)
    folders = [path / "facts", run.health_dir, run.samples]
    folders += [place(0).parent for place in (run.progress, run.logs, run.hang)]
    walks = (walk for folder in folders for walk in os.walk(folder))
    children = (Path(parent, name) for parent, *names in walks for name in chain(*names))
    for path in chain(files, folders, children):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
            return path
    return None
