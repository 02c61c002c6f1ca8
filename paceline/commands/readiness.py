"""
What is asked before a start: does it fit, is all ready, is this PyTorch right.

One short function per command, whose docstring is its help; paceline.cli calls it with the words after its name.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.options import config_of, one_action, parse_options, take_flag, take_option
from paceline.terminal import waiting


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
