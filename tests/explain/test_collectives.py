"""Hangs: what the ranks wait in decides between a broken path, ranks that are out of step, and a rank that is missing."""

import pytest
from log_samples import STEPS, raised
from rows import with_rows

from paceline.explain.explanation import Record
from paceline.explain.log import Log
from paceline.explain.reader import read_log
from paceline.explain.run_folder import explain
from paceline.explain.several_runs import reach_verdict

FIRST, DESYNC = "nccl-p2p-hang", "collective-timeout-desync"
DDP_CHECK = (
    "RuntimeError: DDP expects same model across all ranks, but Rank {} has 62 params, while rank {} has inconsistent 0"
    " params."
)
FINGERPRINT = (
    "Rank {} is running collective: CollectiveFingerPrint(SequenceNumber=8, OpType={}, TensorShape=[{}],"
    " TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda))"
)


def timeout(rank, number, operation="ALLREDUCE", *, size=4, completed=None, group="0 PG GUID 0(default_pg)"):
    """What the watchdog of a rank prints: the collective that timed out, and the numbers of the process group."""
    completed = (number - 1 or -1) if completed is None else completed
    work = f"WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000)"
    return (
        f"[rank{rank}]:[E1123 10:00:00.123456789 ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught collective operation"
        f" timeout: {work} ran for 600029 milliseconds before timing out.\n"
        f"[rank{rank}]:[E1123 10:00:00.234567890 ProcessGroupNCCL.cpp:1785] [PG ID {group} Rank {rank}] Exception (either an"
        f" error or timeout) detected by watchdog at work: {number}, last enqueued NCCL work: {number}, last completed NCCL"
        f" work: {completed}.\n"
    )


def explained(*texts):
    return explain(["".join(texts).encode()])


def test_ranks_in_the_same_first_collective_are_in_step_and_the_path_is_broken():
    explanation = explained(timeout(0, 1), timeout(1, 1))
    assert (explanation.cause, explanation.rank) == (FIRST, None)
    assert (
        "ranks 0 and 1 wait in the same first collective (ALLREDUCE) and none has completed one" in explanation.summary
    )
    assert "NCCL_P2P_DISABLE=1" in explanation.fix and "paceline comm" in explanation.fix


def test_the_check_of_ddps_constructor_is_a_consequence_of_the_first_collective():
    ends = [raised(rank, DDP_CHECK.format(rank, 1 - rank)) for rank in (0, 1)]
    explanation = explained(timeout(0, 1, "ALLGATHER"), timeout(1, 1, "ALLGATHER"), *ends)
    assert explanation.cause == FIRST
    assert any("DDP expects" in item.text for item in explanation.consequences)


def test_different_operations_under_one_number_prove_that_ranks_are_out_of_step():
    explanation = explained(timeout(0, 8), timeout(1, 8, "BROADCAST"), timeout(2, 8))
    assert (explanation.cause, explanation.rank) == (DESYNC, 1)
    assert (
        "under number 8 the ranks wait in different operations (ranks 0 and 2 in ALLREDUCE, rank 1 in BROADCAST):"
        " that proves that they do not call the same collectives"
    ) in explanation.summary


def test_different_operations_in_the_first_collective_are_no_broken_path():
    explanation = explained(timeout(0, 1), timeout(1, 1, "BROADCAST"))
    assert (explanation.cause, explanation.rank) == (DESYNC, None)  # of two ranks either may be wrong


def test_one_operation_with_different_sizes_is_out_of_step():
    explanation = explained(timeout(0, 8), timeout(1, 8, size=5))
    assert explanation.cause == DESYNC
    assert "in ALLREDUCE of different sizes (rank 0 in NumelIn=4, rank 1 in NumelIn=5)" in explanation.summary


@pytest.mark.parametrize(("number", "place"), [(40, "number 40"), (1, "the first one")])
def test_one_operation_under_different_numbers_shows_the_rank_that_is_behind(number, place):
    explanation = explained(timeout(0, 41), timeout(1, number))
    assert (explanation.cause, explanation.rank) == (DESYNC, 1)
    assert f"rank 1 did not get past {place}" in explanation.summary


def test_ranks_in_the_same_later_collective_are_reported_as_in_step():
    explanation = explained(timeout(0, 41), timeout(1, 41))
    assert (explanation.cause, explanation.rank) == (DESYNC, None)
    assert "wait in the same collective (ALLREDUCE, number 41) after others that completed" in explanation.summary


def test_a_rank_that_reports_nothing_is_the_late_one():
    explanation = explained("[rank2]: loading\n", timeout(0, 1), timeout(1, 1))
    assert (explanation.cause, explanation.rank) == (DESYNC, 2)
    assert "rank 2 did not report any" in explanation.summary


def test_the_first_of_a_few_ranks_that_are_behind_is_blamed():
    idle = "[rank{0}]: [PG ID 0 PG GUID 0(default_pg) Rank {0}] Last enqueued NCCL work: 40, last completed NCCL work: 40.\n"
    waiting = [timeout(rank, 41) for rank in (1, 2, 3, 5, 6, 7)]
    assert explained(*waiting, *map(idle.format, (0, 4))).rank == 0
    assert explained(*waiting[:2], *map(idle.format, (0, 4))).rank is None  # as many are behind as wait


def test_the_lost_store_of_a_launcher_is_a_consequence_of_the_wait_of_its_ranks():
    wait = raised(2, "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete")
    lost = "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed.\n"
    assert explained(wait, lost).cause == DESYNC
    assert explained(lost).cause == "master-unreachable"


def test_the_first_collective_of_a_new_group_is_not_the_first_transfer_of_a_run_that_made_steps():
    assert explained(STEPS, timeout(0, 1), timeout(1, 1)).cause == DESYNC


def test_waits_in_different_process_groups_are_reported():
    explanation = explained(timeout(0, 5, group="1 PG GUID 3(tp)"), timeout(1, 9, group="2 PG GUID 4(dp)"))
    assert "different process groups: rank 0 in 3(tp), rank 1 in 4(dp)" in explanation.summary


def test_fingerprints_of_the_debug_mode_are_compared():
    texts = [FINGERPRINT.format(rank, *call) for rank, call in enumerate([("BROADCAST", 4), ("ALLREDUCE", 4)])]
    mismatch = f"RuntimeError: Detected mismatch between collectives on ranks. {texts[0]}, but {texts[1]}."
    explanation = explained(raised(0, mismatch), raised(1, mismatch))
    assert explanation.cause == DESYNC
    assert (
        "under number 8 the ranks wait in different operations (rank 0 in BROADCAST, rank 1 in ALLREDUCE)"
        in explanation.summary
    )
    texts = [FINGERPRINT.format(rank, "ALLREDUCE", size) for rank, size in enumerate((4, 5))]
    mismatch = f"RuntimeError: Detected mismatch between collectives on ranks. {texts[0]}, but {texts[1]}."
    sizes = "(rank 0 in TensorShape=[4], TensorDtypes=Float, rank 1 in TensorShape=[5], TensorDtypes=Float)"
    assert sizes in explained(raised(0, mismatch), raised(1, mismatch)).summary


@pytest.mark.parametrize(
    "line",
    ["Last enqueued NCCL work: 1, last completed NCCL work: -1", "last enqueued work: 1, last completed work: 0"],
)
def test_the_watchdogs_numbers_alone_are_a_failure(line):
    explanation = explained(f"[rank0]: {line}\n")
    assert (explanation.cause, explanation.confidence > 0.5) == (FIRST, True)
    assert "rank 0 completed no collective" in explanation.summary


def test_a_log_that_ends_when_nccls_communicators_are_ready_is_a_likely_hang():
    ready = "".join(
        f"host:47{rank}:48 [{rank}] NCCL INFO ncclCommInitRank comm 0x5 rank {rank} nranks 2 cudaDev {rank} - Init COMPLETE\n"
        for rank in (0, 1)
    )
    explanation = explained(*[f"host:471:48 [0] NCCL INFO Channel 0{n}/02 : 0 1\n" for n in range(8)], ready)
    assert (explanation.cause, explanation.also) == (FIRST, (DESYNC,))
    assert explanation.confidence < 0.5 and "the log ends when NCCL's communicators are ready" in explanation.summary
    assert explained(ready, STEPS).cause == "healthy"


def test_a_size_that_differs_between_ranks_is_the_cause_of_gloos_abort_and_of_the_lost_connection():
    """Gloo throws where nobody catches it: the message stands behind the line about the abort."""
    ranks = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes."
        " 1000000 vs 4. Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?\n"
        "Fatal Python error: Aborted\n",
        raised(
            1, "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:702: Connection reset by peer."
        ),
    )
    logs = [read_log([text.encode()], rank=rank) for rank, text in enumerate(ranks)]
    explanation = reach_verdict([*logs, Log(records=(Record("signal", "terminated by signal SIGABRT", 3, rank=0),))])
    assert (explanation.cause, explanation.rank, explanation.victims) == ("collective-timeout-desync", 0, (1,))
    assert explanation.evidence[0].line == 2 and "the same shapes" in explanation.fix


@pytest.mark.parametrize("peer", ["[127.0.0.1]:21900", "[fe80::1]:21900", "node-2<51234>", "10.0.0.3"])
def test_the_address_of_a_lost_peer_is_whole(peer):
    text = raised(
        0, f"RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer {peer}. This is typically"
    )
    summary = reach_verdict([read_log([text.encode()])]).summary
    assert f"only lost the connection to {peer}; rank 0 waited at " in summary


WAIT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete"
)


@pytest.mark.parametrize("report", ["early stopping at epoch 4", "loss is not finite at step 5, skipping batch"])
def test_a_rank_that_alone_stops_or_skips_a_step_is_why_the_others_wait(report):
    steps = "".join(f"[rank {rank}] step {step} loss {9 - step}\n" for step in range(5) for rank in (0, 1))
    log = f"{steps}[rank 0] {report}\n{raised(1, WAIT)}{raised(0, WAIT)}"
    explanation = explain([log.encode()])
    assert f"only rank 0 reports: {report}" in explanation.summary
    assert "let all ranks stop or skip together" in explanation.fix
    both = explain([log.replace(f"[rank 0] {report}", f"[rank 0] {report}\n[rank 1] {report}").encode()])
    assert (both.cause, "reports" in both.summary) == (DESYNC, False)
    # a script whose rank 0 alone prints reports what all ranks do
    quiet = explain([log.replace("[rank 1] step", "rows seen").encode()])
    assert (quiet.cause, "reports" in quiet.summary) == (DESYNC, False)
    survived = log.replace("[rank 0] step 3", f"[rank 0] {report}\n[rank 0] step 3").replace(
        f"loss 5\n[rank 0] {report}", "loss 5"
    )
    assert "reports" not in explain([survived.encode()]).summary
    for setting in (
        "Early stopping: patience=5, min_delta=0.0",
        "OVERFLOW! Skipping step. Attempted loss scale: 65536",
    ):
        other = explain([log.replace(report, setting).encode()])
        assert "reports" not in other.summary and "stop or skip together" not in other.fix


@with_rows("line, rank", (
    ("waiting for rank 1", 1), ("waiting for all ranks", 1), ("waits for the other ranks", 1), ("step 4 loss 2.1", None),
    ("waiting for worker 3 of the data loader (60 s)", None),
    ("waiting for processed shards", None), ("waits for nodes file x", None),
))  # fmt: skip
def test_a_rank_that_waits_for_others_is_not_the_one_that_they_wait_for(line, rank):
    steps = "".join(f"[rank{rank}]: step {step} loss 2.1\n" for rank, last in ((0, 9), (1, 5)) for step in range(last))
    three = steps + "[rank2]: step 4 loss 2.1\n"
    assert explain([f"{three}[rank2]: {line}\n{raised(0, WAIT)}".encode()]).rank == rank
    only = explain([f"{three}[rank2]: {line}\n{raised(0, WAIT)}{raised(1, WAIT)}".encode()])
    assert only.rank == (2 if rank is None else None)  # the only one that reports nothing else


def test_a_rank_that_is_behind_is_the_late_one_although_its_own_wait_timed_out():
    steps = "".join(
        f"[rank{rank}]: step {step} loss 2.1\n" for rank, last in ((0, 9), (1, 3), (2, 9)) for step in range(last)
    )
    assert explain([(steps + raised(1, WAIT) + raised(0, WAIT)).encode()]).rank == 1
    assert explain([(steps + raised(2, WAIT) + raised(0, WAIT)).encode()]).rank == 1


def torchrun_report(rank, code):
    """What torchrun's agent prints when one of two workers, pids 40 and 41, has ended with this code, and it stops the other."""
    torch, pid, other = "torch/distributed/elastic/multiprocessing/api.py", 40 + rank, 41 - rank
    return (
        f"W1130 18:21:10.279000 19 {torch}:1028] Sending process {other} closing signal SIGTERM\n"
        f"E1130 18:21:10.457000 19 {torch}:1002] failed (exitcode: {code}) local_rank: {rank} (pid: {pid}) of binary: python\n"
        f"Failures:\n[1]:\n  rank      : {1 - rank} (local_rank: {1 - rank})\n  exitcode  : -15 (pid: {other})  (SIGTERM)\n"
        "Root Cause (first observed failure):\n"
        f"[0]:\n  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: {pid})\n"
    )


RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:29071: Connection reset by peer."


def test_a_worker_that_got_sigterm_before_torchrun_stopped_others_was_ended_from_outside():
    outside = explain([(STEPS + raised(0, RESET) + torchrun_report(1, -15)).encode()])
    assert (outside.cause, outside.rank) == ("preempted-sigterm", 1)
    own = explain([(STEPS + raised(0, RESET) + torchrun_report(1, 3)).encode()])
    assert (own.cause, own.rank) == ("unknown", 1) and "sys.exit" in own.fix


def test_an_error_without_a_rank_is_of_the_rank_that_the_others_wait_for():
    thread = 'Exception in thread feed:\nTraceback (most recent call last):\n  File "train.py", line 42, in feed\n'
    log = STEPS + thread + "KeyError: 'caption'\n" + raised(0, WAIT) + torchrun_report(0, 1)
    explanation = explain([log.encode()])
    assert (explanation.cause, explanation.rank, explanation.victims) == ("user-code-exception", 1, (0,))


def test_an_error_that_each_rank_has_is_of_none():
    usage = "train.py: error: unrecognized arguments: --local-rank={}\n"
    log = usage.format(1) + usage.format(0) + torchrun_report(1, 2)
    explanation = explain([log.encode()])
    assert (explanation.cause, explanation.rank, explanation.victims) == ("config-error", None, ())
    assert not any("unrecognized" in item.text for item in explanation.consequences)
    alone = explain([(usage.format(1) + torchrun_report(1, 2)).encode()])
    assert alone.rank == 1


def test_the_rank_that_calls_mpi_abort_is_the_one_that_raised():
    trace = 'Traceback (most recent call last):\n  File "train.py", line 11, in <module>\n    comm.Recv(buf)\n'
    log = STEPS + trace + "mpi4py.MPI.Exception: MPI_ERR_TRUNCATE: message truncated\n"
    log += "MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD\nwith errorcode 1.\n"
    explanation = explain([log.encode()])
    assert (explanation.rank, explanation.victims) == (0, ())
