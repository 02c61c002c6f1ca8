"""Who holds up the others, from what is known of each rank."""

import pytest

from paceline.launch.culprit import Rank, find_culprits, tell
from paceline.launch.stacks import Frame
from paceline.marks import Mark

IN_ALL_REDUCE = (
    Frame("all_reduce", "/v/site-packages/torch/distributed/distributed_c10d.py", 3252),
    Frame("wrapper", "/v/site-packages/torch/distributed/c10d_logger.py", 83),
    Frame("one_step", "/src/paceline/train/loop.py", 190),
)
IN_LOADER = (Frame("tokenize", "/home/me/data.py", 12), Frame("one_step", "/src/paceline/train/loop.py", 170))


def rank(number, phase="reduce", *, step=11, state="S", frames=(), cores=0.0):
    mark = None if phase is None else Mark(step, 0, phase, 0.0)
    return Rank(number, 100 + number, state, mark, frames, cores)


@pytest.mark.parametrize("state", ["T", "Z", None])
def test_a_process_that_cannot_run_is_named_wherever_it_is(state):
    ranks = [rank(0, "reduce", step=10), rank(1, state=state)]
    assert find_culprits(ranks) == [ranks[1]]


def test_a_rank_that_has_ended_its_work_may_be_gone():
    ranks = [rank(0, "ending"), rank(1, "done", state=None)]
    assert find_culprits(ranks) == [ranks[0]]


def test_the_rank_behind_the_others_is_named():
    ranks = [rank(0), rank(1, "load"), rank(2)]
    assert find_culprits(ranks) == [ranks[1]]


def test_of_several_that_are_behind_the_last_is_named():
    ranks = [rank(0), rank(1, "load", step=11), rank(2, "reduce", step=10)]
    assert find_culprits(ranks) == [ranks[2]]


def test_a_rank_that_has_not_begun_is_behind_all():
    ranks = [rank(0, "start", step=0), rank(1, None)]
    assert find_culprits(ranks) == [ranks[1]]


def test_at_the_same_mark_the_stack_outside_the_collective_tells():
    ranks = [rank(0, frames=IN_ALL_REDUCE), rank(1, frames=IN_LOADER)]
    assert find_culprits(ranks) == [ranks[1]]


def test_a_stack_that_nobody_could_take_blames_no_one():
    ranks = [rank(0, frames=IN_ALL_REDUCE), rank(1, frames=())]
    assert find_culprits(ranks) == ranks


def test_without_marks_and_stacks_the_one_at_work_is_named():
    ranks = [rank(0, None), rank(1, None, cores=1.0, state="R"), rank(2, None)]
    assert find_culprits(ranks) == [ranks[1]]


def test_where_nothing_tells_them_apart_all_are_named():
    ranks = [rank(0, frames=IN_ALL_REDUCE), rank(1, frames=IN_ALL_REDUCE)]
    assert find_culprits(ranks) == ranks
    assert tell(ranks, ranks, silent_s=60) == (
        "no rank got on for 60 s: nothing tells the ranks apart: all are waiting (state S) in reduce of step 12,"
        " all_reduce, called at train/loop.py:190"
    )


def test_the_sentence_says_who_what_and_who_waits_where():
    ranks = [rank(0, frames=IN_ALL_REDUCE), rank(1, "load", state="T"), rank(2, frames=IN_ALL_REDUCE)]
    assert tell(ranks, [ranks[1]], silent_s=8.1) == (
        "no rank got on for 8 s: rank 1 is stopped (state T) in load of step 12 and did not come to reduce of step 12;"
        " ranks 0 and 2 wait in reduce of step 12, all_reduce, called at train/loop.py:190"
    )


def test_a_loop_in_the_data_loader_is_said_with_its_place():
    ranks = [rank(0, frames=IN_ALL_REDUCE), rank(1, "load", state="R", frames=IN_LOADER, cores=0.98)]
    assert tell(ranks, [ranks[1]], silent_s=60) == (
        "no rank got on for 60 s: rank 1 is at work (1.0 cores) in load of step 12, tokenize at me/data.py:12 and did not come to"
        " reduce of step 12; rank 0 waits in reduce of step 12, all_reduce, called at train/loop.py:190"
    )


def test_a_script_without_marks_is_told_from_states_and_stacks():
    ranks = [rank(0, None, frames=IN_ALL_REDUCE), rank(1, None, state="T")]
    assert tell(ranks, [ranks[1]], silent_s=600) == (
        "no rank got on for 600 s: rank 1 is stopped (state T); rank 0 waits in all_reduce, called at train/loop.py:190"
    )


def test_a_lone_rank_is_the_only_one():
    ranks = [rank(0, "forward")]
    assert find_culprits(ranks) == ranks
    assert tell(ranks, ranks, silent_s=60) == (
        "no rank got on for 60 s: the only rank is waiting (state S) in forward of step 12"
    )
