"""The state of a run while its attempts begin, break, and follow each other, and while its folder is gone."""

import time

import pytest

from paceline.rundir import utc_now
from paceline.watch.panels import run_panels
from paceline.watch.status import run_status
from paceline.watch.summary import Summary, summarize


def test_before_the_first_step_a_run_is_starting(held):
    assert held.look().state == "starting"
    held.begin()
    held.beat(0, 0, "compile")
    assert held.look().state == "starting"


@pytest.mark.parametrize(
    ("phase", "state"), [("backward", "training"), ("eval", "evaluating"), ("save", "saving"), ("sample", "evaluating")]
)
def test_the_phase_of_rank_0_is_the_state_of_the_run(held, phase, state):
    held.begin()
    held.beat(0, 7, phase)
    assert (held.look().state, held.look().step) == (state, 7)


def test_between_two_attempts_a_run_is_recovering_and_explains_why(held):
    held.begin()
    held.log(5)
    held.beat(0, 9)
    held.event("attempt_ended", attempt=1, state="failed")
    assert held.look().state == "recovering"
    held.event("verdict", attempt=1, cause="hang", summary="rank 1 hung", fix="")
    held.event("decision", attempt=1, action="retry", why="it may pass")
    snapshot = held.look()
    assert (snapshot.state, snapshot.step, snapshot.attempts[0].action) == ("recovering", 5, "retry")
    held.event("attempt", attempt=2, world_size=2)
    held.event("resumed", step=4)
    held.beat(0, 4, "compile")
    assert held.look().state == "starting"
    held.beat(0, 5, "forward")
    assert held.look().state == "training"


OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of 7.79 GiB.\n"
)


def test_while_a_run_recovers_the_attempt_that_ended_is_explained_and_needs_no_fix(held):
    held.begin()
    held.run.logs(1).mkdir(parents=True)
    held.run.rank_log(1, 0).write_text(OUT_OF_MEMORY)
    held.event("attempt_ended", attempt=1, state="failed")
    assert "All well" not in summarize(held.look(), now=time.time()).text
    held.event("verdict", attempt=1, cause="cuda-oom", summary="rank 0 ran out of memory", fix="paceline resume r")
    held.event("decision", attempt=1, action="retry", why="half the rows")
    held.run.logs(2).mkdir()
    (held.run.logs(2) / "launch.log").touch()  # the next attempt has a log before it has begun
    snapshot = held.look()
    assert (snapshot.state, snapshot.explanation["cause"], snapshot.explanation["fix"]) == (
        "recovering",
        "cuda-oom",
        None,
    )
    text = "The next attempt is starting by itself. Attempt 1 ended: rank 0 ran out of memory."
    assert summarize(snapshot, now=time.time()) == Summary("warning", text)
    assert run_panels(snapshot, now=time.time())["head"]["summary"]["text"] == text


def test_a_run_that_waits_for_room_says_so_first(held):
    held.begin()
    held.log(46, step_ms=100.0)
    held.event("checkpoint", step=20)
    held.event("save_failed", step=100, needed_bytes=2 << 20, host="bob", last=True, effect="the run waits")
    unsaved = "checkpoint not saved at step 100: 2.0 MiB needed on bob, whose disk is full; the run waits"
    text = f"{unsaved}; the newest checkpoint is of step 20"
    snapshot, status = held.look(), run_status(held.run)
    assert (snapshot.state, status.state, status.notes) == ("saving", "saving", [text])
    assert text in summarize(snapshot, now=time.time()).text.replace("Checkpoint", "checkpoint")


def test_a_script_whose_last_output_is_still_printed_is_running_until_its_end_is_recorded(held):
    held.event("script", command=["train.py"])
    held.begin()
    held.event("attempt_ended", attempt=1, state="finished")
    assert (held.look().state, run_status(held.run).state) == ("running", "running")
    held.event("finished")
    assert (held.look().state, run_status(held.run).state) == ("finished", "finished")


def test_a_failure_that_left_no_word_is_not_explained_as_healthy(held):
    held.begin()
    held.run.logs(1).mkdir(parents=True)
    held.run.rank_log(1, 0).write_text("step 00001/00100 | loss 3.5\n")
    held.event("attempt_ended", attempt=1, state="failed")
    snapshot = held.look()
    assert (snapshot.state, snapshot.explanation) == ("recovering", None)
    text = "The supervisor decides what to do next. Attempt 1 ended: its cause is being looked for."
    assert summarize(snapshot, now=time.time()).text == text


def test_an_attempt_that_starts_again_says_why_and_has_no_speed_yet(held):
    held.begin()
    held.log(46, tok_per_sec=1000.0)
    held.event("attempt_ended", attempt=1, state="failed")
    held.event("verdict", attempt=1, cause="hang", summary="rank 1 hung")
    held.event("decision", attempt=1, action="retry", why="usually transient")
    held.event("attempt", attempt=2, world_size=2)
    held.beat(0, 0, "load")
    snapshot = held.look()
    assert (snapshot.state, snapshot.step, snapshot.tok_per_sec, snapshot.step_ms) == ("starting", 46, None, None)
    text = "No step of attempt 2 is finished yet: load. Attempt 1 ended: rank 1 hung."
    assert summarize(snapshot, now=time.time()) == Summary("warning", text)


def test_a_damaged_heartbeat_of_rank_0_does_not_hide_the_steps(held):
    held.begin()
    held.log(7, time=utc_now())
    held.beat(0, 7)
    held.run.progress(0).write_bytes(held.run.progress(0).read_bytes()[:20])
    assert (held.look().state, held.look().step) == ("training", 7)


def test_a_folder_that_is_gone_is_shown_as_gone_until_it_is_back(held):
    held.begin()
    held.log(7, time=utc_now())
    held.beat(0, 7)
    assert held.look().state == "training"
    away = held.run.path.rename(held.run.path.with_name("away"))
    for _ in range(2):
        snapshot = held.look()
        text = "Its files are gone: deleted, moved, or on a disk that is not mounted any more."
        assert (snapshot.state, snapshot.step, snapshot.name) == ("gone", None, "r")
        assert summarize(snapshot, now=time.time()) == Summary("error", text)
    held.run.path.mkdir()  # as an unmounted disk leaves it
    assert held.look().state == "gone"
    held.run.path.rmdir()
    away.rename(held.run.path)
    assert (held.look().state, held.look().step, held.look().series["loss"].steps) == ("training", 7, [7])


def test_the_events_say_how_a_run_ended_that_no_process_holds(folder):
    folder.begin()
    assert folder.look().state == "broken"
    folder.event("finished", step=100)
    assert folder.look().state == "finished"
