"""One function renders an event: the views and the launching terminal use the same words."""

from rows import with_rows

from paceline.heartbeat import Heartbeat
from paceline.watch.events import attempt_views, event_line, event_text, event_view, live_state, unsaved_texts
from paceline.watch.snapshot import Snapshot
from paceline.watch.summary import attempt_outcome

START = "2026-01-01T00:00:00Z"
ROLLBACK = {"event": "rollback", "step": 7, "to_step": 4, "cause": "loss-nan", "number": 1, "at_most": 3}
TEXTS = [
    (
        {"event": "checkpoint", "step": 1200, "bytes": 2 << 30, "seconds": 1.5},
        "checkpoint saved at step 1,200, 2.0 GiB, 1.5 s",
    ),
    ({"event": "resumed", "step": 4}, "resumed from step 4"),
    ({"event": "resumed", "step": 0}, "restarting from the first step"),
    (ROLLBACK, "loss-nan at step 7: rollback 1 of at most 3, back to step 4, skipping the batch of step 7"),
    ({"event": "trouble", "step": 7, "message": "the loss is NaN or infinite"}, "step 7: the loss is NaN or infinite"),
    (
        {"event": "save_failed", "step": 7, "needed_bytes": 2 << 30, "free_bytes": 1 << 30, "effect": "the run stops"},
        "checkpoint not saved at step 7: 2.0 GiB needed, 1.0 GiB free; the run stops",
    ),
    (
        {"event": "decision", "action": "fewer-ranks", "why": "lost a GPU: continuing on 1"},
        "lost a GPU: continuing on 1",
    ),
    (
        {"event": "decision", "action": "stop", "why": "--no-recover was given"},
        "no further attempt: --no-recover was given",
    ),
    (
        {"event": "decision", "action": "retry", "why": "this is usually transient"},
        "retrying: this is usually transient",
    ),
    ({"event": "rank_failed", "rank": 1, "message": "boom", "consequence": True}, "rank 1 ended after it: boom"),
    ({"event": "rank_failed", "rank": 0, "message": "\x1b[31mboom\x1b[0m"}, "rank 0 failed: boom"),
    (
        {"event": "verdict", "cause": "hang", "rank": 1, "step": 7, "summary": "no progress"},
        "hang: no progress (rank 1, last step 7)",
    ),
    ({"event": "verdict", "cause": "hang", "rank": 1, "step": None, "summary": "no step"}, "hang: no step (rank 1)"),
    ({"event": "stopping", "signal": "SIGTERM"}, "stopping on SIGTERM"),
    ({"event": "stopping", "signal": "SIGINT", "sent": "SIGTERM"}, "stopping on SIGINT, sending SIGTERM"),
    ({"event": "stopping", "reason": "the notice file x"}, "stopping on the notice file x"),
    (
        {"event": "stopping", "reason": "the notice file x", "seconds_left": 25},
        "stopping on the notice file x, 25 s left",
    ),
    ({"event": "finished", "step": 20, "val_bpb": 1.23456}, "finished at step 20, val_bpb 1.2346"),
    ({"event": "damaged", "message": "checkpoint step_000060 is damaged"}, "checkpoint step_000060 is damaged"),
    ({"event": "note", "text": "two\nlines\x1b[2J"}, "two lines"),
    ({"event": "checkpoint", "step": "new format"}, "checkpoint"),
    ({"event": "of_tomorrow"}, "of tomorrow"),
]


@with_rows(("event", "text"), TEXTS)
def test_an_event_becomes_one_line_of_text(event, text):
    assert event_text(event) == text


UNSAVED = {"event": "save_failed", "step": 30, "needed_bytes": 2 << 20, "free_bytes": None, "host": "bob", "last": True}


def test_a_resume_after_a_killed_supervisor_starts_before_its_attempt_has_begun():
    events = [
        {"event": "attempt", "attempt": 1, "time": START},
        {"event": "launch", "time": START},
        {"event": "verdict", "attempt": 1, "cause": "supervisor-lost", "summary": "its supervisor was killed"},
    ]
    assert live_state(events[:1], Heartbeat(30, 0, "forward", 0.0), {}) == "training"
    assert live_state(events, Heartbeat(30, 0, "forward", 0.0), {}) == "starting"
    for count, outcome in ((1, "running"), (2, "no end recorded"), (3, "no end recorded")):
        snapshot = Snapshot("a", "runs/a", "training", "starting", attempts=attempt_views(events[:count]))
        assert attempt_outcome(snapshot, snapshot.attempts[0]) == outcome


def test_a_damaged_step_of_a_resume_is_ignored():
    for step in ({}, {"step": None}, {"step": "4"}):
        events = [
            {"event": "attempt", "attempt": 1, "time": START},
            {"event": "set_aside", **step},
            {"event": "resumed", **step},
        ]
        assert [attempt.changes for attempt in attempt_views(events)] == [None]


def test_an_attempt_has_its_number_of_ranks():
    events = [
        {"event": "attempt", "attempt": 1, "time": START, "world_size": 2},
        {"event": "attempt", "attempt": 2, "time": START},
    ]
    assert [attempt.world_size for attempt in attempt_views(events)] == [2, None]


def test_a_save_without_room_counts_until_a_checkpoint_or_the_next_attempt():
    text = (
        "checkpoint not saved at step 30: 2.0 MiB needed on bob, whose disk is full; it is saved as soon as there is room"
        "; the newest checkpoint is of step 20"
    )
    begun, saved = (
        {"event": "attempt", "attempt": 1, "world_size": 2, "time": START},
        {"event": "checkpoint", "step": 20},
    )
    events = [begun, saved, UNSAVED, {"event": "note", "text": "x"}]
    assert list(unsaved_texts(events)) == [text]
    assert list(unsaved_texts([event_view(event) for event in events])) == [text]
    assert live_state(events, Heartbeat(30, 0, "ending", 0.0), {}) == "saving"
    for event in ({**saved, "step": 30}, {**begun, "attempt": 2}):
        assert list(unsaved_texts([*events, event])) == []


def test_the_launching_terminal_prints_the_same_words_behind_the_label_of_the_step():
    assert event_line(ROLLBACK, num_steps=10) == (
        "step 00007/00010 | loss-nan: rollback 1 of at most 3, back to step 4, skipping the batch of step 7"
    )
    saved = {"event": "checkpoint", "step": 2, "bytes": 1 << 30, "seconds": 3.4}
    assert event_line(saved, num_steps=2500) == "step 00002/02500 | checkpoint saved | 1.0 GiB | 3.4 s"
    assert event_line({"event": "resumed", "step": 4}, num_steps=10) == "step 00004/00010 | resumed"


def test_the_launching_terminal_prints_no_events_that_other_lines_of_it_report():
    assert event_line({"event": "attempt", "attempt": 1, "world_size": 2}, num_steps=10) is None


def test_events_for_programs_have_no_view_and_a_failure_that_follows_another_is_no_error():
    assert event_view({"event": "memory", "step": 1}) is None
    assert event_view({"event": "rank_failed", "rank": 0, "message": ""}).level == "error"
    assert event_view({"event": "rank_failed", "rank": 1, "message": "", "consequence": True}).level == "info"
    assert event_view({"event": "attempt_ended", "attempt": 1, "state": "interrupted"}).level == "warning"
