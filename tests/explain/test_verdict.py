"""The verdict: the first event, its rank, its consequences, and logs that are healthy or have an unknown failure."""

import pytest
from log_samples import OOM, PEER, STEPS, raised

from paceline.explain.reader import read_log
from paceline.explain.verdict import clean_values, fill_template, reach_verdict

ALLOCATION_FAILED = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory:"
    " you tried to allocate {}."
)
BUG = "ValueError: sample 1841 has 3 fields, expected 4"
WAIT = (
    "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"
)


def banner(first, exitcode, *others):
    """The report that torchrun prints last; others: (rank, exit code)."""

    def one(number, rank, code):
        return (
            f"[{number}]:\n  time      : 2026-11-21_10:00:00\n  host      : node-0\n  rank      : {rank} (local_rank: {rank})\n"
            f"  exitcode  : {code} (pid: {4700 + rank})\n  error_file: <N/A>\n  traceback : To enable traceback see: https://x\n"
        )

    failures = "".join(one(number, *other) for number, other in enumerate(others, 1))
    return (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        + "=" * 60 + "\ntrain.py FAILED\n" + "-" * 60 + "\nFailures:\n" + (failures or "  <NO_OTHER_FAILURES>\n") + "-" * 60
        + "\nRoot Cause (first observed failure):\n" + one(0, first, exitcode) + "=" * 60 + "\n"
    )  # fmt: skip


def verdict(*texts):
    logs = [read_log([text.encode()]) for text in texts]
    return reach_verdict(logs)


def test_the_first_error_is_the_culprit_and_ranks_that_lost_their_peer_are_victims():
    explanation = verdict(STEPS + raised(1, BUG) + raised(0, PEER) + raised(2, PEER))
    assert (explanation.cause, explanation.rank, explanation.step, explanation.line) == (
        "user-code-exception",
        1,
        9,
        11,
    )
    assert explanation.victims == (0, 2)
    assert [item.rank for item in explanation.evidence] == [1]
    assert {item.rank for item in explanation.consequences} == {0, 2}


def test_a_victim_that_writes_first_is_not_blamed():
    explanation = verdict(STEPS + raised(0, PEER) + raised(1, OOM))
    assert (explanation.cause, explanation.rank) == ("cuda-oom", 1)


def test_the_earlier_of_two_similar_errors_is_the_culprit():
    explanation = verdict(raised(2, BUG) + raised(0, "KeyError: 'learning_rate'"))
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 2)


def test_a_kill_without_a_message_gets_its_rank_from_the_banner_of_the_launcher():
    explanation = verdict(STEPS + raised(0, PEER) + banner(1, -9, (0, -15)))
    assert (explanation.cause, explanation.rank, explanation.host) == ("host-oom-killed", 1, "node-0")
    assert explanation.victims == (0,)


def test_an_exception_without_a_rank_gets_the_one_that_the_launcher_blames():
    explanation = verdict(STEPS + raised(None, BUG) + banner(3, 1, (0, -15), (1, -15)))
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 3)


def test_the_rank_that_others_wait_for_is_the_culprit():
    explanation = verdict(STEPS + raised(0, WAIT) + raised(2, WAIT) + banner(0, 1, (1, -15), (2, 1)))
    assert (explanation.cause, explanation.rank, explanation.victims) == ("collective-timeout-desync", 1, (0, 2))


def test_without_a_single_silent_rank_no_rank_is_blamed_for_a_wait():
    explanation = verdict(STEPS + raised(0, WAIT) + raised(2, WAIT) + "world_size: 8\n" + "ERROR: job failed\n")
    assert (explanation.cause, explanation.rank) == ("collective-timeout-desync", None)


def test_the_one_rank_in_another_collective_is_the_culprit():
    mismatch = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank {} is running collective:"
        " CollectiveFingerPrint(SequenceNumber=8, OpType={}, TensorShape=[4], TensorDtypes=Float), but Rank 0 is running"
        " collective:"
        " CollectiveFingerPrint(SequenceNumber=8, OpType=ALLREDUCE, TensorShape=[4], TensorDtypes=Float)."
    )
    explanation = verdict(
        "".join(
            raised(rank, mismatch.format(rank, op))
            for rank, op in ((2, "BROADCAST"), (1, "ALLREDUCE"), (3, "ALLREDUCE"))
        )
    )
    assert (explanation.cause, explanation.rank) == ("collective-timeout-desync", 2)


def test_errors_in_separate_logs_are_ordered_by_time():
    late, early = (raised(0, BUG, prefix=f"2026-01-02 03:04:{second:02d},000 ") for second in (9, 5))
    logs = [read_log([text.encode()], rank=rank) for rank, text in enumerate((late, early))]
    assert reach_verdict(logs).rank == 1


def test_an_error_after_which_the_run_continued_is_not_a_failure():
    explanation = verdict(STEPS + raised(None, OOM) + STEPS.replace("step 0000", "step 0001"))
    assert explanation.cause == "healthy"
    assert explanation.progress.last_step == 19


def test_an_error_before_a_successful_restart_is_not_the_cause():
    explanation = verdict(raised(0, OOM) + STEPS + raised(1, BUG) + banner(1, 1))
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 1)


def test_the_first_exception_of_a_chain_is_the_cause():
    disk = "OSError: [Errno 28] No space left on device"
    chain = "\nThe above exception was the direct cause of the following exception:\n\n"
    explanation = verdict(raised(None, disk) + chain + raised(None, "RuntimeError: cannot save the checkpoint"))
    assert explanation.cause == "disk-full"


def test_a_healthy_log_is_reported_with_its_progress():
    explanation = verdict(STEPS + "training finished\n")
    assert (explanation.cause, explanation.rank, explanation.evidence, explanation.fix) == ("healthy", None, (), "")
    assert explanation.summary == "no failure found: 10 progress lines, step 0 to 9, loss 2.82"


def test_a_log_that_stops_at_a_step_is_reported_as_possibly_cut_off():
    explanation = verdict(STEPS)
    assert explanation.cause == "healthy"
    assert (
        "the log stops there without an error or a final message" in explanation.summary and "py-spy" in explanation.fix
    )


@pytest.mark.parametrize("text", ["", "\n\n", "hello\n", "WARNING: this is slow\n"])
def test_a_log_without_any_failure_is_healthy(text):
    assert verdict(text).cause == "healthy"


def test_a_loss_that_stays_nan_is_a_failure():
    explanation = verdict(STEPS + "".join(f"step {step:05d}/00100 | loss nan\n" for step in range(10, 20)))
    assert (explanation.cause, explanation.step, explanation.line) == ("loss-nan", 10, 11)


def test_a_failure_that_is_not_in_the_catalogue_is_unknown_and_lists_what_to_collect():
    explanation = verdict(STEPS + raised(0, PEER) + banner(1, 3, (0, -15)))
    assert (explanation.cause, explanation.rank, explanation.confidence) == ("unknown", 1, 0.0)
    assert explanation.fix
    assert {item.rank for item in explanation.consequences} >= {0}


def test_a_second_likely_cause_is_reported_and_lowers_the_confidence():
    alone, both = (
        verdict(raised(0, OOM)),
        verdict(raised(0, OOM) + raised(1, "OSError: [Errno 28] No space left on device")),
    )
    assert both.cause == "cuda-oom" and both.also == ("disk-full",)
    assert both.confidence < alone.confidence


@pytest.mark.parametrize(
    ("template", "values", "sentence"),
    [
        ("rank {rank} requested {size}", {"rank": "3", "size": "2 GiB"}, "rank 3 requested 2 GiB"),
        ("rank {rank} requested {size}", {}, "a rank requested n/a"),
        ("half the batch[: --device-batch-size {half_batch}]", {}, "half the batch"),
        (
            "half the batch[: --device-batch-size {half_batch}]",
            {"half_batch": "8"},
            "half the batch: --device-batch-size 8",
        ),
        ("no room[ ({free} of {total})]", {"free": "1 GiB"}, "no room"),
        ("data[0] is {message}", {"message": "a {rank} [b]"}, "data[0] is a {rank} [b]"),
    ],
)
def test_a_template_is_filled_and_parts_with_unknown_values_are_left_out(template, values, sentence):
    assert fill_template(template, values) == sentence


def test_values_are_short_and_on_one_line():
    assert clean_values({"a": "x\n  y", "b": None, "c": "", "d": 7, "e": "z" * 1000}) == {
        "a": "x y",
        "d": "7",
        "e": "z" * 300,
    }


@pytest.mark.parametrize("size", ["67108864 bytes", "67108864"])
def test_bytes_that_could_not_be_allocated_are_shown_with_a_unit(size):
    log = read_log([ALLOCATION_FAILED.format(size).encode()])
    explanation = reach_verdict([log])
    assert explanation.cause == "host-oom-killed"
    assert "(64.0 MiB requested)" in explanation.summary
