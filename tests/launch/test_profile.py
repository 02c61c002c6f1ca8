"""`paceline profile`: the table beside the plan, what is found and how to fix it, what is refused, and real ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli import run_command
from paceline.config import Config
from paceline.launch.profile import format_profile, make_profile
from paceline.plan.machine import Machine
from paceline.plan.planner import Plan, make_plan
from paceline.rundir import RunDir, lock_run

CPU = Machine(gpus=(), cpu_cores=2, cpu_bf16=False, memory_bytes=8 << 30)
SMALL = Config(
    depth=2, n_embd=64, head_dim=32, sequence_len=128, total_batch_size=2048, num_steps=9, device_batch_size=2, nproc=2
)
EAGER = {"device": "cuda", "compile": False}
MEMORY = {phase: {"activations": 100, "gradients": 0, "rest": 10} for phase in ("forward", "backward", "update")}


def planned(**fields: object) -> Plan:
    return make_plan(replace(SMALL, **fields), CPU, vocab_size=512, num_rows=0)


def rank(**parts: float) -> dict:
    """One rank's summary; gradients_sent=3.0 is the part `gradients sent`."""
    named = {name.replace("_", " "): ms for name, ms in parts.items()}
    step_ms = sum(named.values())
    facts = {"hidden_ms": 1.0, "launches": 900, "waits": 0, "memory": MEMORY}
    facts |= {"unprofiled": {"ms": 0.9 * step_ms, "cpu_ms": 60.0}, "profiled": {"ms": 0.99 * step_ms, "cpu_ms": 75.0}}
    return {"step_ms": step_ms, "parts": named, **facts}


def profiled(*ranks: dict, plan: Plan | None = None, rows: int | None = 16) -> dict:
    results = make_profile(ranks, plan or planned(), rows=lambda: rows)
    return {**results, "steps": 5, "traces": ["p/trace_0.json.gz", "p/trace_1.json.gz"]}


def test_shares_are_of_the_step_and_stand_beside_the_plans_own():
    cost = {"seconds": {"expected": 0.2}, "parts": {"matmuls": 0.1, "Muon": 0.06, "AdamW": 0.02, "host": 0.02}}
    plan = replace(planned(), cost=cost)
    results = profiled(rank(matmuls=90, optimizer=10), rank(matmuls=80, optimizer=20), plan=plan)
    assert {name: (part["ms"], part["share"], part["planned_ms"]) for name, part in results["parts"].items()} == {
        "matmuls": (85, 0.85, 100), "optimizer": (15, 0.15, 80), "host": (0, 0, 20),
    }  # fmt: skip
    assert results["use"] == 1 and results["overhead"] == pytest.approx({"ms": 0.1, "cpu_ms": 0.25})
    text = format_profile(results, plan, width=120)
    assert "matmuls                  85.0 ms    85.0 %        100 ms    50.0 %     80.0 ms to 90.0 ms" in text
    assert "optimizer                15.0 ms    15.0 %       80.0 ms    40.0 %     10.0 ms to 20.0 ms" in text
    assert "compute takes 100.0 % of a step; mean of 5 steps on 2 ranks" in text
    assert "without the profiler 90.0 ms by the clock, +10 % with it: medians" in text
    assert "without the profiler 60.0 ms of processor time, +25 % with it: medians" in text
    assert max(map(len, format_profile(results, plan, width=80).splitlines()[4:])) <= 80


def test_memory_is_what_the_plan_says_is_held_and_what_was_traced():
    memory = profiled(rank(matmuls=1), rank(matmuls=1))["memory"]
    assert memory["forward"]["weights"] > 0 and memory["forward"]["states"] > 0
    assert memory["forward"]["total"] == sum(
        size for kind, size in memory["forward"].items() if kind not in ("total", "planned")
    )
    assert memory["update"]["planned"] == planned().memory["phases"]["optimizer"]


def test_a_step_that_computes_most_of_the_time_has_no_finding():
    assert profiled(rank(matmuls=80, host=20))["finding"] is None
    assert profiled(rank(matmuls=79, host=21))["finding"]["what"].startswith("compute takes 79 % of a step")


@pytest.mark.parametrize(
    ("ranks", "fields", "rows", "what", "fix"),
    [
        (
            [rank(matmuls=60, host=40)] * 2, {}, 8, "host, 40.0 ms or 40 %",
            "--device-batch-size 8: it fits, 1 instead of 4 micro-steps, about 43 % more tok/s",
        ),
        (
            [rank(matmuls=60, host=40)] * 2, {}, 5, "host, 40.0 ms or 40 %",
            "--device-batch-size 4: it fits, 2 instead of 4 micro-steps, about 25 % more tok/s",
        ),
        (
            [rank(matmuls=60, host=40)] * 2, {}, None, "host",
            "--total-batch-size 4096: half as many steps for as many tokens; or a wider model",
        ),
        ([rank(matmuls=60, host=40)] * 2, EAGER, 8, "host", "--compile true: fewer and larger kernels"),
        ([rank(matmuls=60, host=15, synchronizing=25)] * 2, EAGER, 8, "host, 40.0 ms", "--compile true"),
        (
            [{**rank(matmuls=60, synchronizing=40), "waits": 3}] * 2, {"device": "cuda"}, 8, "synchronizing, 40.0 ms",
            "look for cudaStreamSynchronize in the trace",
        ),
        ([rank(matmuls=60, data=30, host=10)] * 2, {}, 8, "data, 30.0 ms", "--cache-dir DIR on a local disk"),
        (
            [rank(matmuls=60, gradients_sent=30, weights_sent=10)] * 2, {}, 8, "communication, 40.0 ms",
            "--total-batch-size 4096: half as many steps for as many tokens; paceline comm --nproc 2",
        ),
        (
            [rank(matmuls=40, gradients_sent=60), rank(matmuls=98, gradients_sent=2)], {}, 8, "imbalance, 29.0 ms",
            "look at top",
        ),
        (
            [rank(matmuls=40, gradients_sent=60), rank(matmuls=98, gradients_sent=2)], {"device": "cuda"}, 8, "imbalance",
            "nvidia-smi -i 1 -q -d PERFORMANCE,POWER",
        ),
    ],
    ids=["more rows", "rows that fit", "no more rows", "eager", "own wait", "waits", "data", "link", "slow core", "slow GPU"],
)  # fmt: skip
def test_the_largest_loss_decides_on_the_fix(ranks, fields, rows, what, fix):
    finding = profiled(*ranks, plan=replace(planned(), **fields), rows=rows)["finding"]
    assert what in finding["what"]
    assert finding["fix"].startswith(fix)


def test_the_rank_that_the_others_wait_for_is_named_with_what_it_computes():
    finding = profiled(rank(matmuls=40, gradients_sent=60), rank(matmuls=98, gradients_sent=2))["finding"]
    assert finding["why"] == "the other ranks wait for rank 1: it computes 98.0 ms of a step, they 40.0 ms"


@pytest.mark.parametrize(
    ("args", "code", "problem", "fix"),
    [
        (["books"], 1, "no run books", "paceline train makes one"),
        (["books.toml"], 1, "config file books.toml does not exist", "give one that does"),
        (["--steps", "0"], 2, "--steps 0 is out of range", "an integer from 1 to 1,000"),
        (["script"], 1, "script is the run of a script", "use torch.profiler in the script; py-spy record --pid PID"),
        (["active"], 1, "active is training", "wait for it to end"),
        (["ended", "--depth", "3"], 1, "depth is 4 in ended", "paceline profile runs/ended/config.toml --depth 3"),
    ],
    ids=["no such run", "no such config", "no steps", "a script's run", "a run that trains", "a key that a run cannot change"],
)  # fmt: skip
def test_what_cannot_be_profiled_is_refused_with_a_fix(args, code, problem, fix, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if args[0] in ("script", "active", "ended"):
        run = RunDir(Path("runs") / args[0])
        run.path.mkdir(parents=True)
        run.config_toml.write_text('command = ["train.py"]\n' if args[0] == "script" else "num_steps = 9\n")
        lock = lock_run(run) if args[0] == "active" else None  # noqa: F841  held to the end
    assert run_command(["profile", *args]) == code
    error, advice = capsys.readouterr().err.splitlines()
    assert problem in error and fix in advice
