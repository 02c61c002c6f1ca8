"""Which rank holds up the others, from what is known about each rank."""

from dataclasses import replace

import pytest

from paceline.heartbeat import Heartbeat
from paceline.launch.stacks import Frame
from paceline.launch.watchdog import RankState, describe_hang, find_culprits, record_hang, shows_wait
from paceline.rundir import RunDir

MODULE = Frame("<module>", "/home/me/train.py", 60)
IN_ALL_REDUCE = (
    Frame("all_reduce", "/v/site-packages/torch/distributed/distributed_c10d.py", 3252),
    Frame("wrapper", "/v/site-packages/torch/distributed/c10d_logger.py", 83),
    Frame("one_step", "/src/paceline/train/loop.py", 190),
    MODULE,
)
IN_BACKWARD = (
    Frame("_engine_run_backward", "/v/site-packages/torch/autograd/graph.py", 979),
    Frame("backward", "/v/site-packages/torch/autograd/__init__.py", 395),
    Frame("Tensor.backward", "/v/site-packages/torch/_tensor.py", 623),
    Frame("<module>", "/home/me/ddp.py", 34),
)
IN_LOADER = (Frame("tokenize", "/home/me/data.py", 12), Frame("one_step", "/src/paceline/train/loop.py", 170), MODULE)


def rank(number, phase="reduce", *, step=11, state="S", frames=(), cores=0.0):
    mark = None if phase is None else Heartbeat(step, 0, phase, 0.0)
    return RankState(number, 100 + number, state, mark, frames, cores)


@pytest.mark.parametrize("state", ["T", "Z", None])
def test_a_process_that_cannot_run_is_named_wherever_it_is(state):
    ranks = [rank(0, "reduce", step=10), rank(1, state=state)]
    assert find_culprits(ranks) == [ranks[1]]


def test_a_rank_whose_program_ended_with_an_exception_is_named_with_it(tmp_path):
    ranks = [rank(0, None, state="T"), replace(rank(1, None, frames=IN_LOADER), error="ValueError: boom")]
    hang = record_hang(RunDir(tmp_path), 1, ranks, {}, silent_s=60, missing="made progress")
    assert (hang.rank, hang.error, hang.places) == (1, "ValueError: boom", ("rank 1: tokenize at me/data.py:12",))
    assert "rank 1 is waiting (state S) in tokenize at me/data.py:12 after ValueError: boom; rank 0 waits" in hang.text


def test_a_rank_that_has_finished_may_be_gone():
    ranks = [rank(0, "ending"), rank(1, "done", state=None)]
    assert find_culprits(ranks) == [ranks[0]]


def test_the_rank_behind_the_others_is_named():
    ranks = [rank(0), rank(1, "load"), rank(2)]
    assert find_culprits(ranks) == [ranks[1]]


def test_of_several_that_are_behind_the_last_is_named():
    ranks = [rank(0), rank(1, "load", step=11), rank(2, "reduce", step=10)]
    assert find_culprits(ranks) == [ranks[2]]


def test_a_rank_that_has_not_started_is_behind_all():
    ranks = [rank(0, "start", step=0), rank(1, None)]
    assert find_culprits(ranks) == [ranks[1]]


def test_at_equal_heartbeats_the_rank_with_a_stack_outside_the_collective_is_named():
    ranks = [rank(0, frames=IN_ALL_REDUCE), rank(1, frames=IN_LOADER)]
    assert find_culprits(ranks) == [ranks[1]]


@pytest.mark.parametrize(
    "frame",
    [
        IN_BACKWARD[0],
        Frame("_verify_param_shape_across_processes", "/v/site-packages/torch/distributed/utils.py", 286),
        Frame("_distributed_broadcast_coalesced", "/v/site-packages/torch/nn/parallel/distributed.py", 2363),
    ],
)
def test_a_rank_inside_ddp_waits_for_the_rank_that_is_elsewhere(frame):
    ranks = [rank(0, None, frames=(frame, *IN_BACKWARD[1:])), rank(1, None, frames=IN_LOADER)]
    assert find_culprits(ranks) == [ranks[1]]


def test_code_of_the_script_that_backward_calls_is_no_wait_for_others():
    ranks = [rank(0, None, frames=(*IN_LOADER, *IN_BACKWARD)), rank(1, None, frames=IN_ALL_REDUCE)]
    assert find_culprits(ranks) == [ranks[0]]


def test_the_sentence_says_where_the_sleeping_rank_is_and_that_the_other_waits_in_backward():
    ranks = [rank(0, None, frames=IN_BACKWARD), rank(1, None, frames=IN_LOADER)]
    assert describe_hang(ranks, find_culprits(ranks), silent_s=15) == (
        "no rank made progress for 15 s: rank 1 is waiting (state S) in tokenize at me/data.py:12;"
        " rank 0 waits in backward, called at me/ddp.py:34"
    )


def test_ranks_that_wait_for_each_other_at_different_places_are_listed_and_none_is_blamed():
    ranks = [rank(0, None, frames=IN_ALL_REDUCE), *(rank(number, None, frames=IN_BACKWARD) for number in (1, 2))]
    assert describe_hang(ranks, find_culprits(ranks), silent_s=15) == (
        "no rank made progress for 15 s: nothing shows which rank is to blame: rank 0 is waiting (state S) in all_reduce, called at"
        " train/loop.py:190 and ranks 1 and 2 are waiting (state S) in backward, called at me/ddp.py:34"
    )


def test_a_missing_stack_blames_no_rank():
    ranks = [rank(0, frames=IN_ALL_REDUCE), rank(1, frames=())]
    assert find_culprits(ranks) == ranks


def test_without_heartbeats_and_stacks_the_working_rank_is_named():
    ranks = [rank(0, None), rank(1, None, cores=1.0, state="R"), rank(2, None)]
    assert find_culprits(ranks) == [ranks[1]]


def test_where_nothing_distinguishes_the_ranks_all_are_named():
    ranks = [rank(0, frames=IN_ALL_REDUCE), rank(1, frames=IN_ALL_REDUCE)]
    assert find_culprits(ranks) == ranks
    assert describe_hang(ranks, ranks, silent_s=60) == (
        "no rank made progress for 60 s: nothing distinguishes the ranks: all are waiting (state S) in reduce of step 12,"
        " all_reduce, called at train/loop.py:190"
    )


def test_the_sentence_names_the_stuck_rank_its_place_and_the_waiting_ranks():
    ranks = [rank(0, frames=IN_ALL_REDUCE), rank(1, "load", state="T"), rank(2, frames=IN_ALL_REDUCE)]
    assert describe_hang(ranks, [ranks[1]], silent_s=8.1) == (
        "no rank made progress for 8 s: rank 1 is stopped (state T) in load of step 12 and did not reach reduce of step 12;"
        " ranks 0 and 2 wait in reduce of step 12, all_reduce, called at train/loop.py:190"
    )


def test_a_loop_in_the_data_loader_is_reported_with_its_place():
    ranks = [rank(0, frames=IN_ALL_REDUCE), rank(1, "load", state="R", frames=IN_LOADER, cores=0.98)]
    assert describe_hang(ranks, [ranks[1]], silent_s=60) == (
        "no rank made progress for 60 s: rank 1 is working (1.0 cores) in load of step 12, tokenize at me/data.py:12 and did not"
        " reach reduce of step 12; rank 0 waits in reduce of step 12, all_reduce, called at train/loop.py:190"
    )


def test_a_script_without_heartbeats_is_judged_by_states_and_stacks():
    ranks = [rank(0, None, frames=IN_ALL_REDUCE), rank(1, None, state="T")]
    assert describe_hang(ranks, [ranks[1]], silent_s=600) == (
        "no rank made progress for 600 s: rank 1 is stopped (state T); rank 0 waits in all_reduce, called at train/loop.py:190"
    )


def test_a_rank_of_comm_is_reported_with_its_operation():
    ranks = [rank(0, "all_reduce of 1,000 fp32", step=7), rank(1, "barrier", step=6, state="T")]
    assert find_culprits(ranks) == [ranks[1]]
    assert describe_hang(ranks, [ranks[1]], silent_s=10) == (
        "no rank made progress for 10 s: rank 1 is stopped (state T) in barrier and did not reach all_reduce of 1,000 fp32;"
        " rank 0 waits in all_reduce of 1,000 fp32"
    )


def test_within_a_long_operation_the_rank_with_fewer_parts_is_behind():
    parts = [Heartbeat(7, part, "all_reduce of 256 MiB", 0.0) for part in (9, 8)]
    ranks = [RankState(number, 100 + number, "S", heartbeat) for number, heartbeat in enumerate(parts)]
    assert find_culprits(ranks) == [ranks[1]]


def test_a_lone_rank_is_the_only_one():
    ranks = [rank(0, "forward")]
    assert find_culprits(ranks) == ranks
    assert describe_hang(ranks, ranks, silent_s=60) == (
        "no rank made progress for 60 s: the only rank is waiting (state S) in forward of step 12"
    )


def test_a_stop_is_the_answer_to_a_hang_where_ranks_are_seen_waiting():
    assert shows_wait([rank(0, None, frames=IN_ALL_REDUCE), rank(1, None, frames=IN_LOADER)], late=1)
    assert shows_wait(
        [rank(0, None, frames=IN_ALL_REDUCE, cores=1.0), rank(1, None, frames=IN_LOADER)], late=1
    )  # NCCL spins
    assert shows_wait([rank(0, None, frames=IN_ALL_REDUCE, cores=1.0), rank(1, None, frames=IN_BACKWARD)], late=None)


@pytest.mark.parametrize("ranks, late", [
    ([rank(0, None, frames=IN_BACKWARD)], 0),  # one alone
    ([rank(0, None, frames=IN_BACKWARD, cores=1.0), rank(1, None, frames=IN_BACKWARD, cores=1.0)], None),  # both compute
    ([rank(0, None, frames=IN_LOADER, cores=1.0), rank(1, None, state=None)], 1),  # its part is done, the other still works
    ([rank(0, None, frames=IN_ALL_REDUCE), rank(1, None, frames=IN_LOADER, cores=1.0)], 1),  # rank 1 may evaluate
])  # fmt: skip
def test_a_rank_that_works_is_alone_or_has_ended_shows_no_hang(ranks, late):
    assert not shows_wait(ranks, late=late)
