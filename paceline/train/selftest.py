"""
Do collectives give right results, and how fast: `python -m paceline.train.selftest RUN ...`, one process per rank.

Every collective of the trainer, on every dtype it uses there, with numbers whose right answer is known: integers that stay
exact in bf16, other ones for each rank and place, so that a shard in the wrong place is seen. Each rank checks by itself and
writes comm/<rank>.json; what ranks must agree on goes through the store, never through what is under test. Before and after
each operation a rank notes it in progress/<rank>: launch/hang.py sees there who did not come. Speed: sweep.py.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.rundir import RunDir, write_atomic
from paceline.train.dist import SegmentSum, broadcast_object, init_distributed, shutdown, start_all_gather
from paceline.train.sweep import measures

NUMELS = (1, 3, 64, 1_000, 4_097, 65_537, 1_048_583)  # of each rank's part: odd ones, and those where algorithms change
BARRIER_LATE_S = 0.05
SAME_TIME_S = 0.001
DTYPE_NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.int64: "int64",
    torch.uint8: "uint8",
}  # fmt: skip

Answer = tuple[Tensor, Tensor] | None  # got, expected; None: this rank has no part in it


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--sizes", type=lambda text: [int(word) for word in text.split(",")], required=True)
    parser.add_argument("--sweep-s", type=float, required=True)
    args = parser.parse_args()
    try:
        work(RunDir(args.run), device=args.device, sizes=args.sizes, sweep_s=args.sweep_s)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # interpreter shutdown would wait for collectives whose peers are gone
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort in the interpreter's own exit, now and then (torch 2.13)


def work(run: RunDir, *, device: str, sizes: list[int], sweep_s: float) -> None:
    notes = Notes(run, int(os.environ["RANK"]))
    with notes.inside("starting", "init_process_group"):
        rank, world_size, local_rank = init_distributed(device)
    ranks = Ranks(rank, world_size, torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu"))
    checks, speeds = all_checks(ranks), measures(rank, world_size, ranks.device, sizes=sizes)
    notes.total = notes.step + len(checks) + len(speeds) + 3  # barrier, verdicts, ending
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(local_rank) if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "backend": dist.get_backend(),
        "checks": len(checks) + 1,
        "dtypes": list(dict.fromkeys(check.dtype_name for check in checks)),
        "collectives": [*dict.fromkeys(check.collective for check in checks), "barrier"],
    }
    wrong = [found for check in checks if (found := run_check(check, ranks, notes))]
    wrong += check_barrier(ranks, notes)
    with notes.inside("right results", "verdicts of all ranks"):
        first = first_of_all(wrong, ranks)
    if first:
        wrong += locate_by_pairs(first, ranks, notes)
    write_report(run, rank, {**report, "wrong": wrong, "speed": []})
    if not first:  # how fast wrong results come is of no interest
        budget_s = sweep_s / len(speeds)
        speed = [measure.run(notes.inside, notes.mark, dist_store(), budget_s=budget_s) for measure in speeds]
        write_report(run, rank, {**report, "wrong": [], "speed": [each for each in speed if each]})
    with notes.inside("ending", "barrier"):
        shutdown()
    notes.write("done", "done", inside=False)


def write_report(run: RunDir, rank: int, report: dict[str, Any]) -> None:
    path = run.path / "comm" / f"{rank}.json"
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, json.dumps(report))


class Notes:
    """progress/<rank>: which operation this rank is at, overwritten in place. `step` counts alike on all ranks."""

    WIDTH = 256

    def __init__(self, run: RunDir, rank: int):
        run.progress(rank).parent.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(run.progress(rank), os.O_WRONLY | os.O_CREAT, 0o644)
        self.step = self.part = self.total = 0
        self.stage = self.phase = "starting"

    @contextmanager
    def inside(self, stage: str, phase: str) -> Iterator[None]:
        self.step, self.part = self.step + 1, 0
        self.write(stage, phase, inside=True)
        yield
        self.write(stage, phase, inside=False)

    def mark(self) -> None:
        """One more part of a long operation is done."""
        self.part += 1
        self.write(self.stage, self.phase, inside=True)

    def write(self, stage: str, phase: str, *, inside: bool) -> None:
        self.stage, self.phase = stage, phase
        record = {"step": self.step, "of": self.total, "part": self.part, "stage": stage, "phase": phase}
        line = json.dumps({**record, "inside": inside, "time": round(time.time(), 3)})
        os.pwrite(self.fd, line.ljust(self.WIDTH - 1).encode() + b"\n", 0)


@dataclass
class Ranks:
    """This rank among all, and the numbers that each of them sends."""

    rank: int
    world_size: int
    device: torch.device

    def __post_init__(self) -> None:
        largest = max(2, 256 // self.world_size)  # a sum over ranks stays under 256: exact in bf16
        num = max(NUMELS) + 64 * self.world_size
        self._numbers = []
        for rank in range(self.world_size):
            generator = torch.Generator().manual_seed(rank)
            numbers = torch.randint(largest, (num,), generator=generator, dtype=torch.uint8)
            self._numbers.append(numbers.to(self.device))

    def numbers(self, rank: int, numel: int, dtype: torch.dtype, *, part: int = 0) -> Tensor:
        """(numel,) what `rank` sends as its part `part`, the same on whichever rank it is asked for; a copy."""
        return self._numbers[rank][37 * part : 37 * part + numel].to(dtype, copy=True)

    def total(self, numel: int, dtype: torch.dtype, *, part: int = 0) -> Tensor:
        """(numel,) the sum over ranks."""
        return torch.stack([self.numbers(r, numel, dtype, part=part) for r in range(self.world_size)]).sum(
            0, dtype=dtype
        )


@dataclass(frozen=True)
class Check:
    """One operation with a known answer. ranks: those between which it goes. sender: of what must arrive, if it is one rank."""

    collective: str
    dtype: torch.dtype
    numel: int
    run: Callable[["Ranks", "Check"], Answer]
    ranks: tuple[int, ...]
    sender: int | None = None

    @property
    def dtype_name(self) -> str:
        return DTYPE_NAMES[self.dtype]

    @property
    def phase(self) -> str:
        way = "" if self.sender is None else f" from rank {self.sender}"
        if self.collective == "p2p":
            way += f" to rank {next(r for r in self.ranks if r != self.sender)}"
        return f"{self.collective} of {self.numel:,} {self.dtype_name}{way}"


def all_checks(ranks: Ranks) -> list[Check]:
    """The same list on every rank. fp16 and bf16 are gradients and weights, fp64 evaluation, int64 and uint8 what DDP says."""
    everyone = tuple(range(ranks.world_size))
    halves = (torch.float32, torch.bfloat16, torch.float16)
    table: list[tuple[str, tuple[torch.dtype, ...], Callable[[Ranks, Check], Answer]]] = [
        ("all_reduce", (*halves, torch.float64, torch.int64), all_reduce),
        ("all_reduce max", (torch.float32, torch.int64), all_reduce_max),
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


def run_check(check: Check, ranks: Ranks, notes: Notes) -> dict[str, Any] | None:
    """None if right: else what was wrong where, as check/links.py reads it."""
    with notes.inside("right results", check.phase):
        answer = check.run(ranks, check) if ranks.rank in check.ranks else None
        return None if answer is None else compare(check, *answer, rank=ranks.rank)


def compare(check: Check, got: Tensor, expected: Tensor, *, rank: int) -> dict[str, Any] | None:
    if torch.equal(got, expected):
        return None
    places = (got != expected).nonzero().flatten()
    first = int(places[0])
    return {
        **describe(check, rank),
        "index": first,
        "expected": f"{expected[first].item():.10g}",
        "got": f"{got[first].item():.10g}",  # text: nan and inf are no JSON
        "num_wrong": len(places),
    }


def describe(check: Check, rank: int) -> dict[str, Any]:
    return {
        "collective": check.collective,
        "dtype": check.dtype_name,
        "numel": check.numel,
        "ranks": list(check.ranks),
        "sender": check.sender,
        "rank": rank,  # that saw it
    }


def all_reduce(ranks: Ranks, check: Check) -> Answer:
    x = ranks.numbers(ranks.rank, check.numel, check.dtype)
    dist.all_reduce(x)
    return x, ranks.total(check.numel, check.dtype)


def all_reduce_max(ranks: Ranks, check: Check) -> Answer:
    x = ranks.numbers(ranks.rank, check.numel, check.dtype)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    each = [ranks.numbers(rank, check.numel, check.dtype) for rank in check.ranks]
    return x, torch.stack(each).amax(0)


def two_all_reduces(ranks: Ranks, check: Check) -> Answer:
    """As DDP's buckets."""
    parts = [ranks.numbers(ranks.rank, check.numel, check.dtype, part=part) for part in range(2)]
    for work in [dist.all_reduce(x, async_op=True) for x in parts]:
        work.wait()
    return torch.cat(parts), torch.cat([ranks.total(check.numel, check.dtype, part=part) for part in range(2)])


def reduce_scatter(ranks: Ranks, check: Check) -> Answer:
    """As the trainer's gradients: two buckets under way at once, each rank keeps its own segment's sum in fp32."""
    segments = list(check.ranks)
    flats = [
        torch.cat([ranks.numbers(ranks.rank, check.numel, check.dtype, part=bucket + s) for s in segments])
        for bucket in range(2)
    ]  # (world_size * numel,) each
    sums = [SegmentSum(flat, rank=ranks.rank, world_size=ranks.world_size, tag=tag) for tag, flat in enumerate(flats)]
    for each in sums:
        each.start()
    got = torch.cat([each.wait() for each in sums])
    expected = [ranks.total(check.numel, torch.float32, part=bucket + ranks.rank) for bucket in range(2)]
    return got, torch.cat(expected)


def all_gather(ranks: Ranks, check: Check) -> Answer:
    """As the trainer's new weights: two buckets under way at once, in place."""
    flats = []
    for bucket in range(2):
        flat = torch.full((ranks.world_size, check.numel), 255, dtype=check.dtype, device=ranks.device)
        flat[ranks.rank] = ranks.numbers(ranks.rank, check.numel, check.dtype, part=bucket)
        flats.append(flat.flatten())
    works = []
    for tag, flat in enumerate(flats):
        works += start_all_gather(flat, rank=ranks.rank, world_size=ranks.world_size, tag=tag)
    for work in works:
        work.wait()
    expected = [ranks.numbers(r, check.numel, check.dtype, part=bucket) for bucket in range(2) for r in check.ranks]
    return torch.cat(flats), torch.cat(expected)


def all_gather_list(ranks: Ranks, check: Check) -> Answer:
    """As DDP compares shapes."""
    own = ranks.numbers(ranks.rank, check.numel, check.dtype)
    got = [torch.full_like(own, 255) for _ in check.ranks]
    dist.all_gather(got, own)
    return torch.cat(got), torch.cat([ranks.numbers(rank, check.numel, check.dtype) for rank in check.ranks])


def object_broadcast(ranks: Ranks, check: Check) -> Answer:
    """As the trainer agrees on a checkpoint."""
    expected = ranks.numbers(0, check.numel, check.dtype).cpu()
    got = broadcast_object(bytes(expected.tolist()) if ranks.rank == 0 else None)
    return torch.frombuffer(bytearray(got), dtype=torch.uint8), expected


def broadcast(ranks: Ranks, check: Check, group: dist.ProcessGroup | None = None) -> Answer:
    assert check.sender is not None
    expected = ranks.numbers(check.sender, check.numel, check.dtype)
    x = expected.clone() if ranks.rank == check.sender else torch.full_like(expected, 255)
    dist.broadcast(x, check.sender, group=group)
    return x, expected


def send_receive(ranks: Ranks, check: Check) -> Answer:
    """As the trainer's segments on gloo."""
    sender, receiver = check.ranks
    if ranks.rank == sender:
        wait(dist.isend(ranks.numbers(sender, check.numel, check.dtype), receiver))
    if ranks.rank != receiver:
        return None
    expected = ranks.numbers(sender, check.numel, check.dtype)
    x = torch.full_like(expected, 255)
    wait(dist.irecv(x, sender))
    return x, expected


def wait(work: dist.Work | None) -> None:
    assert work is not None, "this process is not in the process group"
    work.wait()


def check_barrier(ranks: Ranks, notes: Notes) -> list[dict[str, Any]]:
    """The last rank comes late: no other may be through before it came. Clocks are one, the ranks are on one host."""
    late = ranks.world_size - 1
    with notes.inside("right results", "barrier"):
        if ranks.rank == late:
            time.sleep(BARRIER_LATE_S)
            dist_store().set("comm/late", str(time.monotonic()))
        dist.barrier()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        left, came = time.monotonic(), float(dist_store().get("comm/late"))
    if left >= came - SAME_TIME_S:
        return []
    check = Check("barrier", torch.float32, 1, all_reduce, tuple(range(ranks.world_size)))
    text = f"through {1000 * (came - left):.0f} ms before rank {late} came"
    return [{**describe(check, ranks.rank), "index": None, "expected": None, "got": text, "num_wrong": 1}]


def first_of_all(wrong: list[dict[str, Any]], ranks: Ranks) -> dict[str, Any] | None:
    """The first wrong result of the lowest rank that has one, the same answer on every rank."""
    store = dist_store()
    store.set(f"comm/wrong/{ranks.rank}", json.dumps(wrong[:1]))
    found = [json.loads(store.get(f"comm/wrong/{rank}")) for rank in range(ranks.world_size)]
    return next((each[0] for each in found if each), None)


def locate_by_pairs(first: dict[str, Any], ranks: Ranks, notes: Notes) -> list[dict[str, Any]]:
    """The two basic collectives between each two ranks alone, on the dtype and size that went wrong."""
    dtype = next(dtype for dtype, name in DTYPE_NAMES.items() if name == first["dtype"])
    found = []
    for pair in combinations(range(ranks.world_size), 2):
        group = dist.new_group(list(pair))  # every rank must call it

        def sum_of_two(ranks: Ranks, check: Check, group: Any = group) -> Answer:
            x = ranks.numbers(ranks.rank, check.numel, check.dtype)
            dist.all_reduce(x, group=group)
            return x, torch.stack([ranks.numbers(r, check.numel, check.dtype) for r in check.ranks]).sum(0, dtype=dtype)

        def broadcast_of_two(ranks: Ranks, check: Check, group: Any = group) -> Answer:
            return broadcast(ranks, check, group)

        checks = [Check("all_reduce", dtype, first["numel"], sum_of_two, pair)]
        checks += [Check("broadcast", dtype, first["numel"], broadcast_of_two, pair, sender=r) for r in pair]
        found += [wrong for check in checks if (wrong := run_check(check, ranks, notes))]
    return found


def dist_store() -> Store:
    """What the ranks found each other through: their way to agree without a collective."""
    return dist.distributed_c10d._get_default_store()


if __name__ == "__main__":
    main()
