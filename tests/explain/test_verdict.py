"""The verdict: what came first, on which rank, what only followed, and when nothing is known or nothing broke."""

import pytest

from paceline.explain.catalogue import load_catalogue
from paceline.explain.explain import explain
from paceline.explain.reader import read_log
from paceline.explain.verdict import reach_verdict

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    " GPU 0 has a total capacity of 23.56 GiB of which 1.88 GiB is free."
)
BUG = "ValueError: sample 1841 has 3 fields, expected 4"
PEER = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12455."
    " This is typically caused by a remote worker crashing"
)
WAIT = (
    "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"
)
STEPS = "".join(f"step {step:05d}/00100 | loss {3 - step / 50:.3f}\n" for step in range(10))


def raised(rank, error, *, file="train.py", prefix="[rank{}]: "):
    head = "" if rank is None else prefix.format(rank)
    lines = ["Traceback (most recent call last):", f'  File "{file}", line 31, in main', "    loss = model(x)", error]
    return "".join(f"{head}{line}\n" for line in lines)


def banner(first, exitcode, *others):
    """torchrun's last words; others: (rank, exit code)."""

    def one(number, rank, code):
        return (
            f"[{number}]:\n  time      : 2026-11-21_10:00:00\n  host      : node-0\n  rank      : {rank} (local_rank: {rank})\n"
            f"  exitcode  : {code} (pid: {4700 + rank})\n  error_file: <N/A>\n  traceback : To enable traceback see: https://x\n"
        )

    rest = "".join(one(number, *other) for number, other in enumerate(others, 1))
    return (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        + "=" * 60 + "\ntrain.py FAILED\n" + "-" * 60 + "\nFailures:\n" + (rest or "  <NO_OTHER_FAILURES>\n") + "-" * 60
        + "\nRoot Cause (first observed failure):\n" + one(0, first, exitcode) + "=" * 60 + "\n"
    )  # fmt: skip


def said(*texts):
    catalogue = load_catalogue()
    return reach_verdict([read_log([text.encode()], literals=catalogue.literals) for text in texts], catalogue)


def test_the_error_that_came_first_is_the_culprit_and_who_lost_its_peer_a_victim():
    found = said(STEPS + raised(1, BUG) + raised(0, PEER) + raised(2, PEER))
    assert (found.cause, found.rank, found.step, found.line) == ("user-code-exception", 1, 9, 11)
    assert found.victims == (0, 2)
    assert [each.rank for each in found.evidence] == [1]
    assert {each.rank for each in found.consequences} == {0, 2}


def test_a_victim_that_writes_first_is_not_blamed():
    found = said(STEPS + raised(0, PEER) + raised(1, OOM))
    assert (found.cause, found.rank) == ("cuda-oom", 1)


def test_the_earlier_of_two_like_errors_is_the_culprit():
    found = said(raised(2, BUG) + raised(0, "KeyError: 'learning_rate'"))
    assert (found.cause, found.rank) == ("user-code-exception", 2)


def test_a_wordless_kill_is_placed_by_the_launchers_banner():
    found = said(STEPS + raised(0, PEER) + banner(1, -9, (0, -15)))
    assert (found.cause, found.rank, found.host) == ("host-oom-killed", 1, "node-0")
    assert found.victims == (0,)


def test_an_exception_without_a_rank_takes_the_one_that_the_launcher_blames():
    found = said(STEPS + raised(None, BUG) + banner(3, 1, (0, -15), (1, -15)))
    assert (found.cause, found.rank) == ("user-code-exception", 3)


def test_who_is_waited_for_is_the_culprit_not_who_waits():
    found = said(STEPS + raised(0, WAIT) + raised(2, WAIT) + banner(0, 1, (1, -15), (2, 1)))
    assert (found.cause, found.rank, found.victims) == ("collective-timeout-desync", 1, (0, 2))


def test_two_that_wait_for_unknown_others_name_nobody():
    found = said(STEPS + raised(0, WAIT) + raised(2, WAIT) + "world_size: 8\n" + "ERROR: job failed\n")
    assert (found.cause, found.rank) == ("collective-timeout-desync", None)


def test_the_rank_that_runs_another_collective_than_the_rest_is_named():
    mismatch = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank {} is running collective:"
        " CollectiveFingerPrint(SequenceNumber=8, OpType={}, TensorShape=[4], TensorDtypes=Float), but Rank 0 is running"
        " collective:"
        " CollectiveFingerPrint(SequenceNumber=8, OpType=ALLREDUCE, TensorShape=[4], TensorDtypes=Float)."
    )
    found = said(
        "".join(
            raised(rank, mismatch.format(rank, op))
            for rank, op in ((2, "BROADCAST"), (1, "ALLREDUCE"), (3, "ALLREDUCE"))
        )
    )
    assert (found.cause, found.rank) == ("collective-timeout-desync", 2)


def test_ranks_with_logs_of_their_own_are_ordered_by_the_clock():
    late, early = (raised(0, BUG, prefix=f"2026-01-02 03:04:{second:02d},000 ") for second in (9, 5))
    catalogue = load_catalogue()
    logs = [
        read_log([text.encode()], literals=catalogue.literals, rank=rank) for rank, text in enumerate((late, early))
    ]
    assert reach_verdict(logs, catalogue).rank == 1


def test_an_error_after_which_the_work_went_on_broke_nothing():
    found = said(STEPS + raised(None, OOM) + STEPS.replace("step 0000", "step 0001"))
    assert found.cause == "healthy"
    assert found.progress.last_step == 19


def test_an_error_before_a_restart_that_failed_for_good_is_not_the_cause():
    found = said(raised(0, OOM) + STEPS + raised(1, BUG) + banner(1, 1))
    assert (found.cause, found.rank) == ("user-code-exception", 1)


def test_the_cause_of_a_chain_goes_before_what_it_led_to():
    disk = "OSError: [Errno 28] No space left on device"
    chain = "\nThe above exception was the direct cause of the following exception:\n\n"
    found = said(raised(None, disk) + chain + raised(None, "RuntimeError: cannot save the checkpoint"))
    assert found.cause == "disk-full"


def test_a_healthy_log_is_called_so_with_its_progress():
    found = said(STEPS + "training finished\n")
    assert (found.cause, found.rank, found.evidence, found.fix) == ("healthy", None, (), "")
    assert found.summary == "no failure found: 10 progress marks, step 0 to 9, loss 2.82"


def test_a_log_that_stops_in_the_middle_says_so():
    found = said(STEPS)
    assert found.cause == "healthy"
    assert "without a word of an end" in found.summary and "py-spy" in found.fix


@pytest.mark.parametrize("text", ["", "\n\n", "hello\n", "WARNING: this is slow\n"])
def test_a_log_without_any_failure_is_healthy(text):
    assert said(text).cause == "healthy"


def test_a_loss_that_is_no_number_any_more_is_a_failure():
    found = said(STEPS + "".join(f"step {step:05d}/00100 | loss nan\n" for step in range(10, 20)))
    assert (found.cause, found.step, found.line) == ("loss-nan", 10, 11)


def test_an_end_that_is_not_in_the_catalogue_is_unknown_with_what_to_collect():
    found = said(STEPS + raised(0, PEER) + banner(1, 3, (0, -15)))
    assert (found.cause, found.rank, found.confidence) == ("unknown", 1, 0.0)
    assert found.fix
    assert {each.rank for each in found.consequences} >= {0}


def test_a_verdict_with_a_near_rival_is_less_sure_and_names_it():
    alone, beside = (
        said(raised(0, OOM)),
        said(raised(0, OOM) + raised(1, "OSError: [Errno 28] No space left on device")),
    )
    assert beside.cause == "cuda-oom" and beside.also == ("disk-full",)
    assert beside.confidence < alone.confidence


def test_a_stream_of_chunks_is_explained_like_a_file(tmp_path):
    text = (STEPS + raised(1, OOM)).encode()
    (tmp_path / "x.log").write_bytes(text)
    assert explain(tmp_path / "x.log") == explain([text[at : at + 50] for at in range(0, len(text), 50)])


def test_a_file_for_each_rank_says_whose_it_is(tmp_path):
    (tmp_path / "rank_0.log").write_text(STEPS + raised(None, PEER))
    (tmp_path / "rank_1.log").write_text(raised(None, OOM))
    found = explain(tmp_path)
    assert (found.cause, found.rank, found.victims) == ("cuda-oom", 1, (0,))
    assert found.evidence[0].source == str(tmp_path / "rank_1.log")


def test_the_folder_that_torchrun_writes_is_read_with_its_error_files(tmp_path):
    for rank, text in ((0, PEER), (1, "")):
        folder = tmp_path / "none_x" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(raised(None, text) if text else "")
        (folder / "stdout.log").write_text("")
    (folder / "error.json").write_text(
        '{"message": {"message": "OSError: [Errno 28] No space left on device",'
        ' "extraInfo": {"py_callstack": "", "timestamp": "1700000000"}}}'
    )
    found = explain(tmp_path)
    assert (found.cause, found.rank) == ("disk-full", 1)
