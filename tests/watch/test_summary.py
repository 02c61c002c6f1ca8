"""One sentence says whether a run is well."""

import math
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from rows import with_rows
from snapshots import (
    GIB,
    NOW,
    STATES,
    curve,
    finished,
    gpu,
    host,
    rank_view,
    starting,
    trainer_log,
    training,
    two_hosts,
    unknown_log,
)

from paceline.watch.snapshot import AttemptView, Series, Snapshot
from paceline.watch.summary import Summary, summarize

SUMMARIES = {
    "starting": ("info", "No step is finished yet: compile."),
    "training": ("good", "All well: the loss is falling, 2 GPUs are busy 97 % of the time, no rank is slow."),
    "recovering": (
        "warning",
        "The next attempt is starting by itself. Attempt 1 ended: rank 1 asked for 2.0 GiB more than its GPU had.",
    ),
    "failed": ("error", "Rank 1 asked for 2.00 GiB more than its GPU had (31.4 GiB, 29.9 in use by this process)."),
    "broken": ("error", "The run ended without reporting why."),
    "gone": ("error", "Its files are gone: deleted, moved, or on a disk that is not mounted any more."),
    "preparing": ("info", "No step is taken yet: tokenize, 42 %, 3m10s left."),
    "finished": ("good", "All steps are done."),
    "troubled": (
        "warning",
        "All steps are done, after 1 recovery (cuda-oom); rank 5 on node-1 was slower than the others for 90 % of the steps; GPU 1"
        " of node-1 was throttled for 40 % of the time (thermal, at up to 91 °C); a step took 39 % longer than planned; 8 % of the"
        " time was lost work.",
    ),
    "stopped": ("info", "Stopped on request; it can be resumed."),
    "two_hosts": ("warning", "Rank 5 on node-1 is slower than the others; GPU 1 of node-1 is throttled: thermal."),
    "lost_host": ("warning", "Lost cem: continuing on ada and bob."),
    "script": ("good", "All well: 2 GPUs are busy 97 % of the time."),
    "unknown_log": None,
}


@with_rows("name", SUMMARIES)
def test_each_state_has_one_sentence(name):
    expected = SUMMARIES[name]
    assert summarize(STATES[name](NOW), now=NOW) == (expected and Summary(*expected))


def attempts(*states):
    return [
        AttemptView(number, "2026-11-21T08:18:54.000Z", state, action="retry" if state == "failed" else None)
        for number, state in enumerate(states, 1)
    ]


def test_a_log_in_which_nothing_is_known_says_so():
    expected = Summary("info", "This log shows no known step, no known loss and no known error.")
    assert summarize(replace(unknown_log(), notes=[]), now=NOW) == expected
    ended = Summary("info", "This log stopped growing without an error or a last word.")
    assert summarize(replace(unknown_log(), notes=[], step=59), now=NOW) == ended


def test_a_loss_that_was_small_before_may_end_at_0():
    """A policy's objective begins at 0 and stays near it."""
    series = {"loss": curve(lambda step: 0.0 if step % 20 else 0.0003, now=NOW)}
    snapshot = Snapshot("a", "a", "script", "finished", step=9, num_steps=9, loss=0.0, series=series)
    assert summarize(snapshot, now=NOW) == Summary("good", "All steps are done.")
    filtered = replace(
        snapshot, framework="Hugging Face Trainer", series={}
    )  # which prints NaN as 0 from the first step on
    assert summarize(filtered, now=NOW) == Summary("warning", "All steps are done; the last loss is 0.")
    assert (
        "the last loss is 0"
        in summarize(replace(snapshot, series={"loss": curve(lambda step: 2.5, now=NOW)}), now=NOW).text
    )


@pytest.mark.parametrize(
    ("kind", "step", "num_steps", "loss", "summary"),
    [
        ("script", 100, 100, 2.5, Summary("good", "All steps are done.")),
        ("script", 5, 100, 2.5, Summary("good", "The script ended with exit code 0 at step 5 of 100.")),
        ("script", None, None, None, Summary("good", "The script ended with exit code 0.")),
        ("log", 7, None, 2.5, Summary("good", "The training ended without an error.")),
        ("script", 9, 9, math.nan, Summary("warning", "All steps are done; the last loss is NaN or infinite.")),
        ("script", 9, 9, 0.0, Summary("good", "All steps are done.")),  # printed as 0.000
        ("training", 9, 9, 0.0, Summary("warning", "All steps are done; the last loss is 0.")),
    ],
)
def test_what_has_finished_claims_no_more_steps_than_it_shows(kind, step, num_steps, loss, summary):
    snapshot = Snapshot("a", "a", kind, "finished", step=step, num_steps=num_steps, loss=loss)
    assert summarize(snapshot, now=NOW) == summary


def test_a_stop_says_why_attempts_had_failed():
    failed, stopped = (
        replace(attempt, cause="hang", summary="rank 1 hung") for attempt in attempts("failed", "failed")
    )
    snapshot = Snapshot("a", "a", "script", "stopped", attempts=[failed, stopped])
    text = "Stopped on request, after 1 recovery (hang); attempts 1 and 2 failed: hang: rank 1 hung."
    assert summarize(snapshot, now=NOW) == Summary("warning", text)


@pytest.mark.parametrize(
    ("states", "text"),
    [
        (("finished", "finished"), "All steps are done."),
        (("interrupted", "finished"), "All steps are done."),
        (("failed", "failed", "finished"), "All steps are done, after 2 recoveries."),
        ((None, "interrupted", "finished"), "All steps are done, after 1 failed attempt."),  # resumed by hand
    ],
)
def test_only_what_broke_is_a_recovery(states, text):
    assert summarize(replace(finished(), attempts=attempts(*states)), now=NOW) == Summary("good", text)


@pytest.mark.parametrize(
    ("states", "text"),
    [
        (("finished",), "The next attempt is starting."),
        (("interrupted",), "The next attempt is starting."),
        (("interrupted", None), "No step of attempt 2 is finished yet: compile."),
        (("failed", "interrupted"), "The next attempt is starting."),
        ((), "No step is finished yet: compile."),
    ],
)
def test_a_resume_after_a_clean_end_is_a_start(states, text):
    assert summarize(replace(starting(), attempts=attempts(*states)), now=NOW) == Summary("info", text)


NOTHING_KNOWN = "Nothing is known: neither a step nor a loss nor a heartbeat is reported."
TOO_LITTLE = "Nothing unusual so far, and too little is reported to say more."


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"series": {}, "step": 0, "loss": None}, NOTHING_KNOWN),
        ({"series": {}, "step": 1, "loss": None}, TOO_LITTLE),
        ({"series": {"loss": Series([1, 2], [3.0, 2.9], [])}, "step": 2, "loss": 2.9}, TOO_LITTLE),
    ],
)
def test_what_reports_nothing_is_not_well(changed, text):
    snapshot = replace(trainer_log(), hosts=[], **changed)
    assert summarize(snapshot, now=NOW) == Summary("info", text)


def loss(value):
    return {"series": {"loss": curve(value, now=NOW)}}


def pace(value):
    return {"plan": None, "series": {"step_ms": curve(value, now=NOW)}}


@with_rows(
    ("changed", "text"),
    [
        ({"updated": NOW - 125}, "No output or heartbeat for 2m05s."),
        ({"ranks": [rank_view(0), rank_view(1, silent_s=75.0, phase="reduce")]}, "Rank 1 is silent for 1m15s in reduce."),
        ({"loss": math.nan}, "The loss is NaN or infinite."),
        ({"loss": 0.0, "series": {}}, "The loss is 0."),
        ({"series": {"lr": curve(lambda step: 0.0, now=NOW)}}, "The learning rate is 0."),
        (loss(lambda step: 3.0 if step < 1050 else 3.3), "The loss is 10 % higher since step 1,050 than before."),
        ({**loss(lambda step: 3.0 if step < 1050 else 3.3), "step": None}, "The loss is 10 % higher than before."),
        (
            {"series": {"val_bpb": curve(lambda step: abs(1.0 - step / 500) + 1, now=NOW, every=100)}},
            "The val_bpb rises since step 500, from 1.0000 to 2.4000.",
        ),
        ({"step_ms": 700.0}, "A step takes 25 % longer than planned."),
        (pace(lambda step: 300.0 if step < 700 else 500.0), "A step takes 500 ms now and took 300 ms at its best."),
        ({"hosts": [host("tower", [gpu(0, use=0.12)])]}, "GPU 0 of tower is busy 12 % of the time."),
        ({"hosts": [host("tower", [gpu(0, errors={"xid": 79, "ecc_corrected": 3})])]}, "GPU 0 of tower has errors: xid 79."),
        ({"hosts": [host("tower", [gpu(0, use=0.12)], time=NOW - 125, every_s=2.0)]}, "No health sample of tower for 2m05s."),
        ({"hosts": [host("tower", [], cgroup_used=95 * GIB)]}, "1.0 GiB of 96.0 GiB RAM are left on tower."),
        ({"hosts": [host("tower", [], disk_free=2 * GIB)]}, "2.0 GiB of disk are left on tower."),
    ],
)  # fmt: skip
def test_each_warning_names_its_number(changed, text):
    assert summarize(replace(training(), **changed), now=NOW) == Summary("warning", text)


@pytest.mark.parametrize(
    ("state", "ranks", "text"),
    [
        ("training", [2, 2], "A step takes 500 ms now and took 300 ms at its best."),
        ("training", [2, 1, 1], "All well: the loss is falling, 2 GPUs are busy 97 % of the time, no rank is slow."),
        (
            "stopped",
            [2, 2],
            "Stopped on request; it can be resumed; a step took 500 ms at the end and 300 ms at its best.",
        ),
        ("stopped", [2, 1, 1], "Stopped on request; it can be resumed."),
        ("finished", [2, 2], "All steps are done."),
    ],
)
def test_the_times_of_steps_are_compared_with_those_of_as_many_ranks(state, ranks, text):
    times = curve(lambda step: 300.0 if step < 700 else 500.0, now=NOW)
    begins = [0.0, *(time for step, time in zip(times.steps, times.times, strict=True) if step in (700, 900))]
    begins = [datetime.fromtimestamp(time, UTC).isoformat() for time in begins[: len(ranks)]]
    attempts = [AttemptView(1, time, "interrupted", world_size=size) for time, size in zip(begins, ranks, strict=True)]
    series = {**training().series, "step_ms": times}
    snapshot = replace(training(), state=state, hosts=[] if state != "training" else training().hosts, plan=None)
    result = summarize(replace(snapshot, series=series, attempts=attempts), now=NOW)
    assert result is not None and result.text == text


def test_a_start_that_hangs_is_a_warning():
    ranks = [rank_view(0, phase="compile"), rank_view(1, phase="start", silent_s=700.0)]
    text = "No step is finished yet: compile, start. Rank 1 is silent for 11m40s in start."
    assert summarize(replace(starting(), ranks=ranks), now=NOW) == Summary("warning", text)


def test_a_power_limit_a_long_evaluation_and_ended_ranks_cause_no_warning():
    usual = host("tower", [gpu(0, throttle=["power"], errors={"ecc_corrected": 2})], time=NOW - 125, every_s=60.0)
    ranks = [rank_view(0, phase="eval", silent_s=200.0), rank_view(1, phase="ending", silent_s=200.0)]
    ranks += [rank_view(2, phase="stopped", silent_s=2000.0), rank_view(3, phase="done", silent_s=2000.0)]
    result = summarize(replace(training(), hosts=[usual], ranks=ranks), now=NOW)
    assert result is not None and result.level == "good"


def test_of_many_slow_ranks_only_the_first_are_named():
    ranks = [rank_view(rank, slow=True) for rank in range(9)]
    result = summarize(replace(two_hosts(), ranks=ranks, hosts=[]), now=NOW)
    assert result == Summary("warning", "Ranks 0, 1, 2, 3, 4, 5 and 3 more are slower than the others.")
