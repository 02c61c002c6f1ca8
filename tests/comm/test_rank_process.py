"""The numbers that collectives are tested with, how a wrong one is reported, and the order of the operations."""

import pytest
import torch

from paceline.comm.rank_process import Check, Ranks, all_checks, all_reduce, compare
from paceline.comm.sweep import block_seconds, measures, spread

CPU = torch.device("cpu")


def ranks_of(world_size: int) -> list[Ranks]:
    return [Ranks(rank, world_size, CPU) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_every_number_and_every_sum_is_exact_in_bf16_and_fp16(world_size):
    ranks = Ranks(0, world_size, CPU)
    for dtype in (torch.bfloat16, torch.float16):
        exact = ranks.total(4097, torch.int64)
        assert torch.equal(ranks.total(4097, dtype).to(torch.int64), exact)
        assert exact.max() > 100


def test_every_rank_computes_what_the_others_send():
    one, other = ranks_of(2)
    for rank in range(2):
        assert torch.equal(one.numbers(rank, 1000, torch.float32), other.numbers(rank, 1000, torch.float32))


def test_ranks_parts_and_places_have_different_numbers():
    ranks = Ranks(0, 3, CPU)
    x = ranks.numbers(0, 64, torch.int64)
    assert not torch.equal(x, ranks.numbers(1, 64, torch.int64))
    assert not torch.equal(x, ranks.numbers(0, 64, torch.int64, part=1))
    assert not torch.equal(x[:32], x[32:])


def test_the_numbers_are_copies():
    ranks = Ranks(0, 2, CPU)
    ranks.numbers(0, 8, torch.uint8).zero_()
    assert ranks.numbers(0, 8, torch.uint8).any()


def test_every_rank_runs_the_same_checks_and_measures_in_the_same_order():
    operations = [[check.operation for check in all_checks(ranks)] for ranks in ranks_of(3)]
    assert operations[0] == operations[1] == operations[2]
    orders = [
        [(m.number, m.collective, m.num_bytes, m.ranks) for m in measures(rank, 3, CPU, sizes=[1024, 4096])]
        for rank in range(3)
    ]
    assert orders[0] == orders[1] == orders[2]


def test_checks_cover_every_dtype_that_the_trainer_sends_and_odd_sizes():
    checks = all_checks(Ranks(0, 2, CPU))
    kinds = {(check.collective, check.dtype_name) for check in checks}
    for name in ("all_reduce", "reduce_scatter", "all_gather", "p2p"):
        assert {(name, "fp32"), (name, "bf16"), (name, "fp16")} <= kinds
    assert {("all_reduce", "fp64"), ("broadcast", "int64"), ("broadcast", "uint8")} <= kinds
    assert {1, 3, 4_097, 1_048_583} <= {check.numel for check in checks}
    assert {check.ranks for check in checks if check.collective == "p2p"} == {(0, 1), (1, 0)}


def test_a_wrong_result_is_reported_with_its_first_place_and_both_numbers():
    check = Check("all_reduce", torch.bfloat16, 4, all_reduce, (0, 1))
    expected = torch.tensor([1, 2, 3, 4], dtype=torch.bfloat16)
    result = torch.tensor([1, 7, 3, float("nan")], dtype=torch.bfloat16)
    assert compare(check, expected.clone(), expected, rank=1) is None
    assert compare(check, result, expected, rank=1) == {
        "collective": "all_reduce", "dtype": "bf16", "numel": 4, "ranks": [0, 1], "sender": None, "rank": 1,
        "index": 1, "expected": "2", "got": "7", "num_wrong": 2,
    }  # fmt: skip


def test_pairs_are_measured_at_a_few_sizes_from_the_smallest_to_the_largest():
    assert spread([1, 2, 3], 4) == [1, 2, 3]
    assert spread([1, 2, 3, 4, 5, 6, 7, 8], 4) == [1, 3, 5, 8]


def test_a_block_runs_its_operation_that_many_times():
    calls: list[int] = []
    assert block_seconds(lambda: calls.append(1), 7, CPU) > 0
    assert len(calls) == 7
