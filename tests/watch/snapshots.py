"""
Snapshots by hand, one for each state that a view can meet: what the terminal, the browser and the report are tested with.

All are functions of `now` alone, so two calls give the same.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from snapshot_parts import (
    GIB,
    LOG_TEXT,
    NOW,
    NUM_STEPS,
    STEP,
    STEP_MS,
    TOKENS_PER_STEP,
    curve,
    event,
    goodput,
    gpu,
    host,
    loss_at,
    noise,
    rank_curves,
    rank_view,
    training_series,
)

from paceline.watch.snapshot import TIME_KINDS, AttemptView, EventView, Goodput, LogView, Snapshot

__all__ = ["GIB", "LOG_TEXT", "NOW", "STATES", "curve", "gpu", "host", "rank_view"]  # for tests, beside the states


def first_events(now: float) -> list[EventView]:
    return [
        event(now, 868, "launch", "launched: data, plan and checks took 12 s"),
        event(now, 866, "attempt", "attempt 1: 2 ranks"),
        event(now, 845, "resumed", "step 0: fresh weights"),
        event(now, 606, "checkpoint", "checkpoint saved at step 250, 2.1 GiB, 1.8 s", level="good", step=250),
        event(now, 453, "checkpoint", "checkpoint saved at step 500, 2.1 GiB, 1.7 s", level="good", step=500),
        event(now, 300, "checkpoint", "checkpoint saved at step 750, 2.1 GiB, 1.8 s", level="good", step=750),
        event(now, 231, "finding", "steps take 612 ms, 9 % over the plan's 561 ms", level="warning", step=860),
        event(now, 147, "checkpoint", "checkpoint saved at step 1,000, 2.1 GiB, 1.9 s", level="good", step=1000),
        event(now, 146, "sample", 'sample: "The old house at the end of the lane was"', step=1000),
    ]


def training(now: float = NOW) -> Snapshot:
    """Two cards in a workstation, half way."""
    return Snapshot(
        name="books",
        path="runs/books",
        kind="training",
        state="training",
        step=STEP,
        num_steps=NUM_STEPS,
        loss=loss_at(STEP),
        val_bpb=loss_at(1000) / 3.1,
        tok_per_sec=858_425.0,
        step_ms=STEP_MS,
        mfu=0.412,
        peak_bytes=int(25.8 * GIB),
        eta_s=(NUM_STEPS - STEP) * STEP_MS / 1000,
        elapsed_s=868.0,
        tokens_per_step=TOKENS_PER_STEP,
        started=now - 868,
        updated=now - 0.6,
        series=training_series(now),
        rank_series=rank_curves(now, num_ranks=2),
        gpu_series={
            f"tower/{index} {name}": curve(value, now=now, every=4)
            for index in range(2)
            for name, value in {
                "use": lambda step: 0.96 + 0.03 * noise(step, seed=3),
                "used_bytes": lambda step: 26.3 * GIB,
                "power_w": lambda step: 521 + 30 * noise(step, seed=4),
                "temperature_c": lambda step: 60 + 8 * (1 - math.exp(-step / 200)),
            }.items()
        },
        ranks=[rank_view(0), rank_view(1)],
        hosts=[host("tower", [gpu(0), gpu(1)], now=now)],
        events=first_events(now),
        attempts=[AttemptView(1, "2026-11-21T08:18:54.000Z")],
        logs=[LogView(1, None, "logs/1/launch.log", 4_210), *(LogView(1, r, f"logs/1/{r}.log", 90_211) for r in (0, 1))],
        goodput=goodput(),
        plan={"step_ms": 561.0, "tok_per_sec": 934_000.0, "peak_bytes": int(25.1 * GIB), "mfu": 0.449, "total_s": 1460.0},
        findings=[
            {
                "id": "pcie-width", "severity": "warn", "what": "GPU 1 runs at PCIe gen 5 x8, its slot could do x16",
                "why": "gradients take twice as long between the cards", "fix": "move it to the first slot, or live with 4 %",
                "evidence": {}, "host": "tower",
            },
        ],
    )  # fmt: skip


def starting(now: float = NOW) -> Snapshot:
    """The attempt has begun; both ranks compile, and there is no number yet."""
    return Snapshot(
        name="books",
        path="runs/books",
        kind="training",
        state="starting",
        num_steps=NUM_STEPS,
        elapsed_s=19.0,
        tokens_per_step=TOKENS_PER_STEP,
        started=now - 19,
        updated=now - 0.3,
        ranks=[rank_view(rank, step=0, phase="compile", silent_s=6.1, busy_ms=None) for rank in range(2)],
        hosts=[host("tower", [gpu(i, use=0.04, power_w=71.0, temperature_c=38.0) for i in range(2)], now=now)],
        events=[
            event(now, 19, "launch", "launched: data, plan and checks took 12 s"),
            event(now, 17, "attempt", "attempt 1: 2 ranks"),
        ],
        attempts=[AttemptView(1, "2026-11-21T08:33:03.000Z")],
        logs=[LogView(1, None, "logs/1/launch.log", 812), *(LogView(1, rank, f"logs/1/{rank}.log", 1_400) for rank in (0, 1))],
        plan={"step_ms": 561.0, "tok_per_sec": 934_000.0, "peak_bytes": int(25.1 * GIB), "mfu": 0.449, "total_s": 1460.0},
    )  # fmt: skip


def evaluating(now: float = NOW) -> Snapshot:
    ranks = [rank_view(rank, phase="eval", silent_s=2.2) for rank in range(2)]
    return replace(training(now), state="evaluating", ranks=ranks)


def saving(now: float = NOW) -> Snapshot:
    return replace(training(now), state="saving", ranks=[rank_view(rank, phase="save") for rank in range(2)])


def recovering(now: float = NOW) -> Snapshot:
    """The first attempt died of memory; the second has not begun."""
    before = training(now)
    return replace(
        before,
        state="recovering",
        tok_per_sec=None,
        ranks=[],
        events=[
            *before.events,
            event(now, 9, "attempt_ended", "attempt 1 ended: failed, exit code 1", level="error"),
            event(now, 9, "verdict", "cuda-oom: rank 1 asked for 2.0 GiB more than its GPU had", level="error", step=1241),
            event(now, 8, "decision", "resume from step 1,000 with device_batch_size 16: half of it fits", level="warning"),
        ],
        attempts=[
            AttemptView(
                1, "2026-11-21T08:18:54.000Z", "failed", "cuda-oom", "rank 1 asked for 2.0 GiB more than its GPU had",
                "retry_smaller", "half the rows at once fit, with the same total batch",
            )
        ],
        goodput=goodput(lost=147.0),
    )  # fmt: skip


def recovered(now: float = NOW) -> Snapshot:
    """As `recovering`, some minutes on: the second attempt trains."""
    before = recovering(now)
    return replace(
        training(now),
        events=[
            *before.events[:-3],
            *(replace(event_kind, time=(event_kind.time or now) - 60) for event_kind in before.events[-3:]),
            event(now, 66, "attempt", "attempt 2: 2 ranks"),
            event(now, 51, "resumed", "went on from step 1,000", step=1000),
        ],
        attempts=[*before.attempts, AttemptView(2, "2026-11-21T08:32:14.000Z")],
        logs=[LogView(a, r, f"logs/{a}/{r}.log", 90_211) for a in (1, 2) for r in (0, 1)],
        goodput=goodput(lost=147.0, recovery=24.0),
    )


EXPLANATION = {
    "cause": "cuda-oom",
    "also": [],
    "confidence": 0.97,
    "rank": 1,
    "step": 1241,
    "host": "tower",
    "line": 1288,
    "summary": "rank 1 asked for 2.00 GiB more than its GPU had (31.4 GiB, 29.9 in use by this process)",
    "fix": "paceline resume books --device-batch-size 16",
    "evidence": [
        {"line": 1288, "rank": 1, "source": "logs/1/1.log",
         "text": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 31.40 GiB"},
        {"line": 1271, "rank": 1, "source": "logs/1/1.log", "text": '  File "train/loop.py", line 141, in one_step'},
    ],
    "consequences": [
        {"line": 1290, "rank": 0, "source": "logs/1/0.log", "text": "NCCL error: unhandled system error, peer is gone"},
    ],
    "progress": {"steps": 1241, "first_step": 1, "last_step": 1241, "last_loss": 2.9, "nan_line": None, "nan_step": None,
                 "done_line": None, "finished": False, "silent_end": False},
    "victims": [0],
}  # fmt: skip


def failed(now: float = NOW) -> Snapshot:
    """Some hours ago."""
    now -= 4 * 3600
    before = recovering(now)
    return replace(
        before,
        state="failed",
        updated=now,
        eta_s=None,
        explanation=EXPLANATION,
        events=[
            *before.events[:-1],
            event(now, 8, "decision", "stop: no progress over three attempts", level="error"),
            event(now, 8, "failed", "failed: rank 1, exit code 1", level="error"),
        ],
        attempts=[replace(before.attempts[0], action="stop", why="no progress over three attempts")],
    )


def finished(now: float = NOW) -> Snapshot:
    """Two hours ago."""
    now -= 7200
    last = event(now, 3, "finished", "finished at step 2,500, val_bpb 0.9021", level="good", step=2500)
    return replace(
        training(now),
        state="finished",
        step=NUM_STEPS,
        loss=2.8127,
        val_bpb=0.9021,
        eta_s=0.0,
        elapsed_s=1712.0,
        updated=now,
        series=training_series(now, last=NUM_STEPS),
        ranks=[rank_view(rank, step=NUM_STEPS, phase="done", silent_s=7200.0) for rank in range(2)],
        hosts=[],
        gpu_series={},
        events=[*first_events(now), last],
        attempts=[AttemptView(1, "2026-11-21T08:18:54.000Z", "finished")],
    )


def troubled(now: float = NOW) -> Snapshot:
    """Eight ranks of two hosts that finished, with a slow and warm card, a recovery and longer steps than planned."""
    before, ended = two_hosts(now), recovered(now)
    ranks = [
        replace(rank, phase="done", slow=False, slow_share=0.9 if rank.rank == 5 else 0.0) for rank in before.ranks
    ]
    hosts = [before.hosts[0], replace(before.hosts[1], gpus=list(before.hosts[1].gpus))]
    hosts[1].gpus[1] = replace(hosts[1].gpus[1], throttle=[], throttled={"thermal": 0.4, "power": 0.9})
    return replace(
        before,
        name="rack8",
        state="finished",
        step=NUM_STEPS,
        eta_s=0.0,
        ranks=ranks,
        hosts=hosts,
        gpu_series={"node-1/1 temperature_c": curve(lambda step: 60 + 31 * min(1, step / 600), now=now)},
        plan={**(before.plan or {}), "step_ms": 440.0},
        attempts=[*ended.attempts[:1], replace(ended.attempts[1], state="finished")],
        goodput=goodput(lost=75.0),
    )


def preparing(now: float = NOW) -> Snapshot:
    work = {"label": "tokenize", "share": 0.42, "eta_s": 190.0}
    return Snapshot(
        "books",
        "runs/books",
        "training",
        "preparing",
        elapsed_s=140.0,
        started=now - 140,
        updated=now - 0.7,
        preparing=work,
    )


def gone(now: float = NOW) -> Snapshot:
    return Snapshot("books", "runs/books", "training", "gone", notes=["runs/books/config.toml does not exist"])


def stopped(now: float = NOW) -> Snapshot:
    last = event(now, 40, "stopped", "stopped by Ctrl-C at step 1,240; checkpoint saved", level="warning", step=STEP)
    return replace(training(now), state="stopped", eta_s=None, updated=now - 40, events=[*first_events(now), last])


def broken(now: float = NOW) -> Snapshot:
    return replace(training(now), state="broken", eta_s=None, updated=now - 90_000, hosts=[], ranks=[])


def no_gpu(now: float = NOW) -> Snapshot:
    """A laptop: one rank on the CPU."""
    laptop = host(
        "laptop",
        [],
        now=now,
        cpu=0.94,
        cores=8,
        ram_used=6 * GIB,
        ram_total=16 * GIB,
        cgroup_used=None,
        cgroup_limit=None,
    )
    return replace(
        training(now),
        name="tiny",
        path="runs/tiny",
        tok_per_sec=4_127.0,
        mfu=None,
        peak_bytes=None,
        rank_series=[],
        gpu_series={},
        ranks=[rank_view(0, host_name="laptop")],
        hosts=[laptop],
        logs=[LogView(1, 0, "logs/1/0.log", 90_211)],
        findings=[],
        plan=None,
    )


def two_hosts(now: float = NOW) -> Snapshot:
    """Two hosts of four cards; rank 5 is slow, for its card is too warm."""
    name = "NVIDIA H100 80GB HBM3"
    size = {"total_bytes": int(79.6 * GIB), "power_limit_w": 700.0, "sm_mhz": 1980, "name": name}
    first = [gpu(i, **size, used_bytes=int((61.2 + i) * GIB), power_w=655.0 + 9 * i) for i in range(4)]
    second = [gpu(i, **size, used_bytes=int((61.2 + i) * GIB), power_w=648.0 + 9 * i) for i in range(4)]
    second[1] = replace(second[1], temperature_c=91.0, sm_mhz=1215, power_w=402.0, throttle=["thermal"])
    ranks = [rank_view(rank, host_name="node-0" if rank < 4 else "node-1") for rank in range(8)]
    ranks[5] = replace(ranks[5], busy_ms=761.0, slow=True)
    return replace(
        training(now),
        name="balanced-8",
        path="runs/balanced-8",
        rank_series=rank_curves(now, num_ranks=8, slow=5),
        ranks=ranks,
        hosts=[
            replace(host("node-0", first, now=now, cores=96), ranks=[0, 1, 2, 3]),
            replace(host("node-1", second, now=now, cores=96, cpu=0.19), ranks=[4, 5, 6, 7]),
        ],
        gpu_series={
            f"node-{node}/{index} use": curve(lambda step: 0.96 + 0.03 * noise(step), now=now, every=4)
            for node in range(2)
            for index in range(4)
        },
        logs=[LogView(1, rank, f"logs/1/{rank}.log", 90_211) for rank in range(8)],
    )


def lost_host(now: float = NOW) -> Snapshot:
    """Two desktops without GPUs go on after a third one was lost."""
    hosts = [replace(host(name, [], now=now), ranks=[rank]) for rank, name in enumerate(("ada", "bob"))]
    text = "nothing was heard of cem for 6 s"
    before = training(now)
    return replace(
        before,
        ranks=[rank_view(rank, host_name=hosts[rank].name) for rank in range(2)],
        hosts=[*hosts, replace(host("cem", [], now=now - 300), lost=True)],
        gpu_series={},
        attempts=[
            AttemptView(
                1, "2026-11-21T08:18:54.000Z", "failed", "host-lost", text,
                "fewer-ranks", "lost cem: continuing on ada, bob",
            ),
            AttemptView(2, "2026-11-21T08:28:54.000Z"),
        ],
        logs=[
            *(LogView(2, rank, f"logs/2/{rank}.log", 90_211, host) for rank, host in enumerate(("ada", "bob"))),
            LogView(2, None, "logs/2/launch.log", 812),
            LogView(2, None, "logs/2/launch-bob.log", 812, "bob", "launch-bob"),
        ],
    )  # fmt: skip


def script(now: float = NOW) -> Snapshot:
    """`paceline run -- train.py`: no steps and no loss of ours."""
    return Snapshot(
        name="train-3",
        path="runs/train-3",
        kind="script",
        state="running",
        command=["train.py", "--lr", "3e-4", "--epochs", "12"],
        elapsed_s=4_211.0,
        started=now - 4_211,
        updated=now - 1.1,
        hosts=[host("tower", [gpu(0), gpu(1)], now=now)],
        events=[
            event(now, 4_211, "script", "train.py --lr 3e-4 --epochs 12 on 2 ranks"),
            event(now, 4_209, "attempt", "attempt 1: 2 ranks"),
        ],
        attempts=[AttemptView(1, "2026-11-21T07:23:11.000Z")],
        logs=[LogView(1, rank, f"logs/1/{rank}.log", 90_211) for rank in range(2)],
        goodput=Goodput({**dict.fromkeys(TIME_KINDS, 0.0), "steps": 4_209.0, "start_up": 2.0}, 0, None),
    )


def trainer_log(now: float = NOW) -> Snapshot:
    """A log of somebody else's training whose lines are known."""
    return Snapshot(
        name="slurm-4711.out",
        path="slurm-4711.out",
        kind="log",
        state="running",
        framework="Hugging Face Trainer",
        step=400,
        num_steps=1500,
        loss=1.8421,
        tok_per_sec=None,
        step_ms=1_204.0,
        eta_s=1_324.0,
        updated=now - 12,
        series={"loss": curve(lambda step: 1.8 + 4 * math.exp(-step / 60) + 0.04 * noise(step), now=now, last=400)},
        logs=[LogView(1, None, "slurm-4711.out", 412_000)],
    )


def unknown_log(now: float = NOW) -> Snapshot:
    return Snapshot(
        name="output.txt",
        path="output.txt",
        kind="log",
        state="unknown",
        updated=now - 300,
        logs=[LogView(1, None, "output.txt", 5_120)],
        notes=["no line of output.txt tells a step, a loss or an error"],
    )


def hostile(now: float = NOW) -> Snapshot:
    """Names and lines that a view must show as they stand: markup, colours of a terminal, very long."""
    evil = "[bold red]x[/] <script>alert(1)</script> \x1b[31mred\x1b[0m"
    long = event(now, 2, "note", f"{evil} " + "very long " * 60, level="warning")
    return replace(
        training(now),
        name=evil,
        events=[*first_events(now), long],
        hosts=[host("a-host-with-a-rather-long-name.example.internal", [gpu(0), gpu(1)], now=now)],
        ranks=[rank_view(0, host_name="a-host-with-a-rather-long-name.example.internal"), rank_view(1)],
    )


STATES: dict[str, Callable[[float], Snapshot]] = {
    "starting": starting,
    "training": training,
    "evaluating": evaluating,
    "saving": saving,
    "recovering": recovering,
    "recovered": recovered,
    "failed": failed,
    "finished": finished,
    "troubled": troubled,
    "preparing": preparing,
    "gone": gone,
    "stopped": stopped,
    "broken": broken,
    "no_gpu": no_gpu,
    "two_hosts": two_hosts,
    "lost_host": lost_host,
    "script": script,
    "trainer_log": trainer_log,
    "unknown_log": unknown_log,
    "hostile": hostile,
}
