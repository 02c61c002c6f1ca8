"""
`--offload optimizer` on a card that is not there: which bytes are copied when, on which stream, and that no two of them race.

Every claim is shown to be one that can fail: the walk of a version with that fault is refused by the same check.
"""

import functools
from itertools import accumulate
from typing import Any

import pytest
from gpu_proof.cases import NEEDS_CARD
from gpu_proof.fake_card import on_card
from gpu_proof.streams import DEFAULT

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.compiler, NEEDS_CARD]

SOUND: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, fp32": {"precision": "fp32"},
    "two ranks": {"gpus": 2},
    "two ranks, weights sharded": {"gpus": 2, "shard": "full"},
    "two ranks, AdamW": {"gpus": 2, "optimizer": "adamw"},
}
COPY_FAULTS = ("a blocking copy", "memory that is not locked", "all on one stream")
ORDER_FAULTS = ("fetched behind the update",)
BYTE_FAULTS = ("states that stay on the card",)
RACES = (
    "a buffer used again too early",
    "an update before its tensors are there",
    "sent back before the update",
    "buffers that others still use",
    "buffers freed too early",
    "a checkpoint that waits for nothing",
)
WALKS = SOUND | {name: {"fault": name} for name in (*COPY_FAULTS, *ORDER_FAULTS, *BYTE_FAULTS, *RACES)}
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def walks(tmp_path_factory) -> dict[str, Facts]:
    made = on_card(120, "gpu_proof.offload_walk", *WALKS.values(), folder=tmp_path_factory.mktemp("card"))
    return dict(zip(WALKS, made, strict=True))


@pytest.fixture
def facts(walks, name) -> Facts:
    return walks[name]


def check_copies(facts: Facts) -> None:
    """The CPU goes on meanwhile, the memory is locked, and each direction has a stream beside the update's."""
    assert facts["error"] is None
    assert all(no_wait and locked for _, _, no_wait, locked, _ in facts["moves"])
    ways = {(direction, stream) for direction, *_, stream in facts["moves"]}
    assert {direction for direction, _ in ways} == {"in", "out"} and len(ways) == 2
    assert len({DEFAULT, *(stream for _, stream in ways)}) == 3


def check_order(facts: Facts) -> None:
    """When a batch is updated, the next one is on its way, and none further: its buffer is not free."""
    assert facts["error"] is None
    count, order = facts["num_batches"], facts["order"]
    assert [number for number, *_ in order] == facts["steps"] * list(range(count))
    fetched = list(accumulate(size for _, size, _ in order))
    for at, (number, _, on_their_way) in enumerate(order):
        assert on_their_way == fetched[at if number == count - 1 else at + 1]


def check_bytes(facts: Facts) -> None:
    """In each step all masters and states come and go once: as many bytes as the planner counts."""
    assert facts["error"] is None
    for direction in ("in", "out"):
        moved = sum(size for way, size, *_ in facts["moves"] if way == direction)
        assert moved == facts["steps"] * facts["planned_bytes"]


def check_races(facts: Facts) -> None:
    assert facts["error"] is None
    assert facts["races"] == []


CHECKS = functools.partial(pytest.mark.parametrize, "check", [check_copies, check_order, check_bytes, check_races])


@CHECKS()
@pytest.mark.parametrize("name", SOUND)
def test_masters_and_states_come_and_go_beside_the_updates(facts, check):
    assert facts["num_batches"] > 3  # buffers are used again
    check(facts)


FAULTS = [
    (check, name)
    for check, names in (
        (check_copies, COPY_FAULTS),
        (check_order, ORDER_FAULTS),
        (check_bytes, BYTE_FAULTS),
        (check_races, RACES),
    )
    for name in names
]


@pytest.mark.parametrize("check, name", FAULTS)
def test_faults_are_noticed(facts, check):
    assert facts["error"] is None
    with pytest.raises(AssertionError):
        check(facts)
