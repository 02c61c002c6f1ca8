"""
Tests whether collectives give right results: `python -m paceline.comm.rank_process RUN DEVICE SIZES SWEEP_S` for each rank.

It runs every collective of the trainer with every dtype that the trainer uses, on numbers whose result is known: integers that
stay exact in bf16 and differ by rank and place, so that a shard in the wrong place is noticed. Each rank compares its own results
and writes comm/<rank>.json. The ranks agree through the store, never through the collectives under test. A heartbeat names the
current operation, by which launch/watchdog.py finds a rank that is stuck. comm/sweep.py measures the speed.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.sweep import measures, wait_all
from paceline.heartbeat import OperationHeartbeat
from paceline.rundir import RunDir, write_atomic
from paceline.train.buckets import SegmentSum, start_all_gather
from paceline.train.process import answer_with_stacks, broadcast_object, finish_work, init_distributed, shutdown

# of each rank's part: odd sizes, and sizes at which algorithms change
NUMELS = (1, 3, 64, 1_000, 4_097, 65_537, 1_048_583)
BARRIER_LATE_S = 0.05
DTYPE_NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.int64: "int64",
    torch.uint8: "uint8",
}  # fmt: skip

Comparison = tuple[Tensor, Tensor] | None  # result, expected; None: this rank takes no part


def main() -> None:
    folder, device, sizes, sweep_s = sys.argv[1:]
    try:
        work(
            RunDir(Path(folder)), device=device, sizes=[int(size) for size in sizes.split(",")], sweep_s=float(sweep_s)
        )
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # interpreter shutdown would wait for collectives whose peers are gone
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort in the interpreter's own exit, now and then (torch 2.13)


def work(run: RunDir, *, device: str, sizes: list[int], sweep_s: float) -> None:
    rank = int(os.environ["RANK"])
    heartbeat = OperationHeartbeat(run, rank)
    answer_with_stacks(run, attempt=1, rank=rank)
    heartbeat.begin("init_process_group")
    rank, world_size, local_rank = init_distributed(device)
    ranks = Ranks(rank, world_size, torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu"))
    checks, speeds = all_checks(ranks), measures(rank, world_size, ranks.device, sizes=sizes)
    (run.path / "comm").mkdir(exist_ok=True)
    if rank == 0:  # the operations in all: these, init_process_group, two barriers, the comparison
        (run.path / "comm" / "num_operations").write_text(str(len(checks) + len(speeds) + 4))
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(local_rank) if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "backend": dist.get_backend(),
        "checks": len(checks) + 1,
        "dtypes": list(dict.fromkeys(check.dtype_name for check in checks)),
        "collectives": [*dict.fromkeys(check.collective for check in checks), "barrier"],
    }
    wrong = [error for check in checks if (error := run_check(check, ranks, heartbeat))]
    wrong += check_barrier(ranks, heartbeat)
    heartbeat.begin("comparison of all ranks' results")
    speed: list[dict[str, Any]] = []
    if first := first_of_all(wrong, ranks):
        wrong += locate_by_pairs(first, ranks, heartbeat)
    else:  # the speed of wrong results does not matter
        budget_s = sweep_s / len(speeds)
        results = [measure.run(heartbeat, dist_store(), budget_s=budget_s) for measure in speeds]
        speed = [result for result in results if result]
    write_atomic(run.path / "comm" / f"{rank}.json", json.dumps({**report, "wrong": wrong, "speed": speed}))
    heartbeat.begin("final barrier")
    shutdown()
    heartbeat.end()


@dataclass
class Ranks:
    """This rank and the world size, and the numbers that each rank sends."""

    rank: int
    world_size: int
    device: torch.device

    def __post_init__(self) -> None:
        largest = max(2, 256 // self.world_size)  # a sum over ranks stays under 256: exact in bf16
        num = max(NUMELS) + 64 * self.world_size
        generators = [torch.Generator().manual_seed(rank) for rank in range(self.world_size)]
        numbers = [torch.randint(largest, (num,), generator=one, dtype=torch.uint8) for one in generators]
        self._numbers = [x.to(self.device) for x in numbers]

    def numbers(self, rank: int, numel: int, dtype: torch.dtype, *, part: int = 0) -> Tensor:
        """(numel,) a copy of what `rank` sends as part `part`; every rank computes the same numbers."""
        return self._numbers[rank][37 * part : 37 * part + numel].to(dtype, copy=True)

    def total(self, numel: int, dtype: torch.dtype, *, part: int = 0) -> Tensor:
        """(numel,) the sum of all ranks' numbers."""
        numbers = [self.numbers(rank, numel, dtype, part=part) for rank in range(self.world_size)]
        return torch.stack(numbers).sum(0, dtype=dtype)


@dataclass(frozen=True)
class Check:
    """One operation with a known result. ranks: those that take part. sender: whose numbers must arrive, if it is one.

    group: of these ranks, None for all.
    """

    collective: str
    dtype: torch.dtype
    numel: int
    run: Callable[["Ranks", "Check"], Comparison]
    ranks: tuple[int, ...]
    sender: int | None = None
    group: dist.ProcessGroup | None = None

    @property
    def dtype_name(self) -> str:
        return DTYPE_NAMES[self.dtype]

    @property
    def operation(self) -> str:
        way = "" if self.sender is None else f" from rank {self.sender}"
        if self.collective == "p2p":
            way += f" to rank {next(r for r in self.ranks if r != self.sender)}"
        return f"{self.collective} of {self.numel:,} {self.dtype_name}{way}"


def all_checks(ranks: Ranks) -> list[Check]:
    """The same list on every rank. 16 bits carry gradients and weights, fp64 evaluation, int64 and uint8 DDP's messages."""
    everyone = tuple(range(ranks.world_size))
    halves = (torch.float32, torch.bfloat16, torch.float16)
    table: list[tuple[str, tuple[torch.dtype, ...], Callable[[Ranks, Check], Comparison]]] = [
        ("all_reduce", (*halves, torch.float64, torch.int64), all_reduce),
        ("all_reduce max", (torch.float32, torch.int64), all_reduce),
        ("two all_reduce at once", halves, two_all_reduces),
        ("reduce_scatter", halves, reduce_scatter),
        ("all_gather", halves, all_gather),
        ("all_gather of a list", (torch.int64,), all_gather_list),
        ("object broadcast", (torch.uint8,), object_broadcast),
    ]
    checks = [
        Check(name, dtype, numel, run, everyone) for name, dtypes, run in table for dtype in dtypes for numel in NUMELS
    ]
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        checks += [Check("broadcast", dtype, n, broadcast, everyone, sender=r) for r in everyone for n in NUMELS]
    for pair in permutations(everyone, 2):
        checks += [Check("p2p", dtype, n, send_receive, pair, sender=pair[0]) for dtype in halves for n in NUMELS]
    return checks


def run_check(check: Check, ranks: Ranks, heartbeat: OperationHeartbeat) -> dict[str, Any] | None:
    """Returns None if the result is right, else what is wrong where, as comm/analysis.py reads it."""
    heartbeat.begin(check.operation)
    comparison = check.run(ranks, check) if ranks.rank in check.ranks else None
    return None if comparison is None else compare(check, *comparison, rank=ranks.rank)


def compare(check: Check, result: Tensor, expected: Tensor, *, rank: int) -> dict[str, Any] | None:
    if torch.equal(result, expected):
        return None
    places = (result != expected).nonzero().flatten()
    first = int(places[0])
    return {
        **describe(check, rank),
        "index": first,
        "expected": f"{expected[first].item():.10g}",
        "got": f"{result[first].item():.10g}",  # text: JSON has no nan and inf
        "num_wrong": len(places),
    }


def describe(check: Check, rank: int) -> dict[str, Any]:
    return {
        "collective": check.collective,
        "dtype": check.dtype_name,
        "numel": check.numel,
        "ranks": list(check.ranks),
        "sender": check.sender,
        "rank": rank,  # the one that received it
    }


def all_reduce(ranks: Ranks, check: Check) -> Comparison:
    """Sums, or takes the largest numbers."""
    x, is_max = ranks.numbers(ranks.rank, check.numel, check.dtype), check.collective == "all_reduce max"
    dist.all_reduce(x, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=check.group)
    sent = torch.stack([ranks.numbers(rank, check.numel, check.dtype) for rank in check.ranks])
    return x, sent.amax(0) if is_max else sent.sum(0, dtype=check.dtype)


def two_all_reduces(ranks: Ranks, check: Check) -> Comparison:
    """Sums two tensors at once, as DDP sends its buckets."""
    parts = [ranks.numbers(ranks.rank, check.numel, check.dtype, part=part) for part in range(2)]
    wait_all([dist.all_reduce(x, async_op=True) for x in parts])
    return torch.cat(parts), torch.cat([ranks.total(check.numel, check.dtype, part=part) for part in range(2)])


def reduce_scatter(ranks: Ranks, check: Check) -> Comparison:
    """Sums two buckets at once, as the trainer sums gradients: each rank keeps the fp32 sum of its own segment."""
    segments = list(check.ranks)
    flats = [
        torch.cat([ranks.numbers(ranks.rank, check.numel, check.dtype, part=bucket + s) for s in segments])
        for bucket in range(2)
    ]
    sums = [SegmentSum(flat, rank=ranks.rank, world_size=ranks.world_size, tag=tag) for tag, flat in enumerate(flats)]
    for segment_sum in sums:
        segment_sum.start()
    result = torch.cat([segment_sum.wait() for segment_sum in sums])
    expected = [ranks.total(check.numel, torch.float32, part=bucket + ranks.rank) for bucket in range(2)]
    return result, torch.cat(expected)


def all_gather(ranks: Ranks, check: Check) -> Comparison:
    """Gathers two buckets at once and in place, as the trainer gathers new weights."""
    flats, works = [], []
    for bucket in range(2):
        rows = torch.full((ranks.world_size, check.numel), 255, dtype=check.dtype, device=ranks.device)
        rows[ranks.rank] = ranks.numbers(ranks.rank, check.numel, check.dtype, part=bucket)
        flats.append(rows.flatten())
        works += start_all_gather(flats[-1], rank=ranks.rank, world_size=ranks.world_size, tag=bucket)
    wait_all(works)
    expected = [ranks.numbers(r, check.numel, check.dtype, part=bucket) for bucket in range(2) for r in check.ranks]
    return torch.cat(flats), torch.cat(expected)


def all_gather_list(ranks: Ranks, check: Check) -> Comparison:
    """Gathers into a list, as DDP compares shapes."""
    own = ranks.numbers(ranks.rank, check.numel, check.dtype)
    result = [torch.full_like(own, 255) for _ in check.ranks]
    dist.all_gather(result, own)
    return torch.cat(result), torch.cat([ranks.numbers(rank, check.numel, check.dtype) for rank in check.ranks])


def object_broadcast(ranks: Ranks, check: Check) -> Comparison:
    """Sends an object, as the trainer agrees on a checkpoint."""
    expected = ranks.numbers(0, check.numel, check.dtype).cpu()
    received = broadcast_object(bytes(expected.tolist()) if ranks.rank == 0 else None)
    return torch.frombuffer(bytearray(received), dtype=torch.uint8), expected


def broadcast(ranks: Ranks, check: Check) -> Comparison:
    assert check.sender is not None
    expected = ranks.numbers(check.sender, check.numel, check.dtype)
    x = expected.clone() if ranks.rank == check.sender else torch.full_like(expected, 255)
    dist.broadcast(x, check.sender, group=check.group)
    return x, expected


def send_receive(ranks: Ranks, check: Check) -> Comparison:
    """Sends a single message, as the trainer sends segments on gloo."""
    sender, receiver = check.ranks
    if ranks.rank == sender:
        wait_all([dist.isend(ranks.numbers(sender, check.numel, check.dtype), receiver)])
    if ranks.rank != receiver:
        return None
    expected = ranks.numbers(sender, check.numel, check.dtype)
    x = torch.full_like(expected, 255)
    wait_all([dist.irecv(x, sender)])
    return x, expected


def check_barrier(ranks: Ranks, heartbeat: OperationHeartbeat) -> list[dict[str, Any]]:
    """The last rank is late, and no other may pass before it has said in the store that it comes: hosts share no clock."""
    last, store = ranks.world_size - 1, dist_store()
    heartbeat.begin("barrier")
    if ranks.rank == last:
        time.sleep(BARRIER_LATE_S)
        store.set("comm/late", "")
        store.get("comm/late")  # only the answer shows that the store has it
    dist.barrier()
    finish_work(ranks.device)
    if store.check(["comm/late"]):
        return []
    check = Check("barrier", torch.float32, 1, all_reduce, tuple(range(ranks.world_size)))
    text = f"passed before rank {last} arrived"
    return [{**describe(check, ranks.rank), "index": None, "expected": None, "got": text, "num_wrong": 1}]


def first_of_all(wrong: list[dict[str, Any]], ranks: Ranks) -> dict[str, Any] | None:
    """Returns the first wrong result of the lowest rank that has one; every rank gets the same one."""
    store = dist_store()
    store.set(f"comm/wrong/{ranks.rank}", json.dumps(wrong[:1]))
    reported = [json.loads(store.get(f"comm/wrong/{rank}")) for rank in range(ranks.world_size)]
    return next((errors[0] for errors in reported if errors), None)


def locate_by_pairs(first: dict[str, Any], ranks: Ranks, heartbeat: OperationHeartbeat) -> list[dict[str, Any]]:
    """Runs all_reduce and broadcast between every two ranks, with the dtype and size of the wrong result."""
    dtype = next(dtype for dtype, name in DTYPE_NAMES.items() if name == first["dtype"])
    errors = []
    for pair in combinations(range(ranks.world_size), 2):
        group = dist.new_group(list(pair))  # every rank must call it
        checks = [Check("all_reduce", dtype, first["numel"], all_reduce, pair, group=group)]
        checks += [Check("broadcast", dtype, first["numel"], broadcast, pair, rank, group) for rank in pair]
        errors += [error for check in checks if (error := run_check(check, ranks, heartbeat))]
    return errors


def dist_store() -> Store:
    """Returns the store of the rendezvous, through which the ranks agree without a collective."""
    return dist.distributed_c10d._get_default_store()


if __name__ == "__main__":
    main()
