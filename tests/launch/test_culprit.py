"""Which rank holds up the others, from what is known about each rank."""

from dataclasses import replace

from rows import with_rows

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


IN_DDP = (
    IN_BACKWARD[0],
    Frame("_verify_param_shape_across_processes", "/v/site-packages/torch/distributed/utils.py", 286),
    Frame("_distributed_broadcast_coalesced", "/v/site-packages/torch/nn/parallel/distributed.py", 2363),
)


def in_operation(number, part):
    return RankState(number, 100 + number, "S", Heartbeat(7, part, "all_reduce of 256 MiB", 0.0))


@with_rows(("ranks", "late"), [
    # a process that cannot run, wherever it is
    *(([rank(0, "reduce", step=10), rank(1, state=state)], [1]) for state in ("T", "Z", None)),
    # a rank that has finished may be gone
    ([rank(0, "ending"), rank(1, "done", state=None)], [0]),
    # the rank behind the others, of several the last
    ([rank(0), rank(1, "load"), rank(2)], [1]),
    ([rank(0), rank(1, "load", step=11), rank(2, "reduce", step=10)], [2]),
    ([rank(0, "start", step=0), rank(1, None)], [1]),
    # within a long operation that with fewer parts
    ([in_operation(0, 9), in_operation(1, 8)], [1]),
    # at equal heartbeats that with a stack outside the collective, or outside DDP
    ([rank(0, frames=IN_ALL_REDUCE), rank(1, frames=IN_LOADER)], [1]),
    *(([rank(0, None, frames=(frame, *IN_BACKWARD[1:])), rank(1, None, frames=IN_LOADER)], [1]) for frame in IN_DDP),
    # code of the script that backward calls is no wait for others
    ([rank(0, None, frames=(*IN_LOADER, *IN_BACKWARD)), rank(1, None, frames=IN_ALL_REDUCE)], [0]),
    # a missing stack blames no rank
    ([rank(0, frames=IN_ALL_REDUCE), rank(1, frames=())], [0, 1]),
    # without heartbeats and stacks the working rank
    ([rank(0, None), rank(1, None, cores=1.0, state="R"), rank(2, None)], [1]),
])  # fmt: skip
def test_the_rank_that_holds_up_the_others_is_named(ranks, late):
    assert find_culprits(ranks) == [ranks[number] for number in late]


def test_a_rank_whose_program_ended_with_an_exception_is_named_with_it(tmp_path):
    ranks = [rank(0, None, state="T"), replace(rank(1, None, frames=IN_LOADER), error="ValueError: boom")]
    hang = record_hang(RunDir(tmp_path), 1, ranks, {}, silent_s=60, missing="made progress")
    assert (hang.rank, hang.error, hang.places) == (1, "ValueError: boom", ("rank 1: tokenize at me/data.py:12",))
    assert "rank 1 is waiting (state S) in tokenize at me/data.py:12 after ValueError: boom; rank 0 waits" in hang.text


@with_rows(("ranks", "late", "text"), [
    ([rank(0, None, frames=IN_BACKWARD), rank(1, None, frames=IN_LOADER)], [1],
     "rank 1 is waiting (state S) in tokenize at me/data.py:12; rank 0 waits in backward, called at me/ddp.py:34"),
    # ranks that wait for each other at different places are listed, and none is blamed
    ([rank(0, None, frames=IN_ALL_REDUCE), rank(1, None, frames=IN_BACKWARD), rank(2, None, frames=IN_BACKWARD)], [0, 1, 2],
     "nothing shows which rank is to blame: rank 0 is waiting (state S) in all_reduce, called at train/loop.py:190 and ranks 1 and"
     " 2 are waiting (state S) in backward, called at me/ddp.py:34"),
    ([rank(0, frames=IN_ALL_REDUCE), rank(1, frames=IN_ALL_REDUCE)], [0, 1],
     "nothing distinguishes the ranks: all are waiting (state S) in reduce of step 12, all_reduce, called at train/loop.py:190"),
    ([rank(0, frames=IN_ALL_REDUCE), rank(1, "load", state="T"), rank(2, frames=IN_ALL_REDUCE)], [1],
     "rank 1 is stopped (state T) in load of step 12 and did not reach reduce of step 12; ranks 0 and 2 wait in reduce of step 12,"
     " all_reduce, called at train/loop.py:190"),
    # a loop in the data loader
    ([rank(0, frames=IN_ALL_REDUCE), rank(1, "load", state="R", frames=IN_LOADER, cores=0.98)], [1],
     "rank 1 is working (1.0 cores) in load of step 12, tokenize at me/data.py:12 and did not reach reduce of step 12;"
     " rank 0 waits in reduce of step 12, all_reduce, called at train/loop.py:190"),
    # a script without heartbeats is judged by states and stacks
    ([rank(0, None, frames=IN_ALL_REDUCE), rank(1, None, state="T")], [1],
     "rank 1 is stopped (state T); rank 0 waits in all_reduce, called at train/loop.py:190"),
    # a rank of comm is reported with its operation
    ([rank(0, "all_reduce of 1,000 fp32", step=7), rank(1, "barrier", step=6, state="T")], [1],
     "rank 1 is stopped (state T) in barrier and did not reach all_reduce of 1,000 fp32; rank 0 waits in all_reduce of 1,000 fp32"),
    ([rank(0, "forward")], [0], "the only rank is waiting (state S) in forward of step 12"),
])  # fmt: skip
def test_the_sentence_says_which_rank_is_stuck_where_and_which_wait_for_it(ranks, late, text):
    culprits = find_culprits(ranks)
    assert culprits == [ranks[number] for number in late]
    assert describe_hang(ranks, culprits, silent_s=8.1) == f"no rank made progress for 8 s: {text}"


@with_rows(("ranks", "late", "shown"), [
    ([rank(0, None, frames=IN_ALL_REDUCE), rank(1, None, frames=IN_LOADER)], 1, True),
    ([rank(0, None, frames=IN_ALL_REDUCE, cores=1.0), rank(1, None, frames=IN_LOADER)], 1, True),  # NCCL spins
    ([rank(0, None, frames=IN_ALL_REDUCE, cores=1.0), rank(1, None, frames=IN_BACKWARD)], None, True),
    ([rank(0, None, frames=IN_BACKWARD)], 0, False),  # one alone
    ([rank(0, None, frames=IN_BACKWARD, cores=1.0), rank(1, None, frames=IN_BACKWARD, cores=1.0)], None, False),  # both compute
    ([rank(0, None, frames=IN_LOADER, cores=1.0), rank(1, None, state=None)], 1, False),  # its part is done, the other still works
    ([rank(0, None, frames=IN_ALL_REDUCE), rank(1, None, frames=IN_LOADER, cores=1.0)], 1, False),  # rank 1 may evaluate
])  # fmt: skip
def test_a_stop_is_the_answer_to_a_hang_only_where_ranks_are_seen_waiting(ranks, late, shown):
    assert shows_wait(ranks, late=late) == shown
