"""What is done after an attempt: each rule of the table by an example, their order, the waits, the page in the docs."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.explain.catalogue import RETRIES, load_catalogue
from paceline.launch import policy
from paceline.launch.policy import OURS_ONCE_MORE, RULES, Abilities, Decision, Ended, Situation, decide, rule_for

DOCS = Path(__file__).parents[2] / "docs" / "recovery.md"
KILLED = Ended("killed-from-outside", "same", rank=1, step=7, new_checkpoint=False, seconds=60, error="")
SAVED = replace(KILLED, new_checkpoint=True)
CRASHED = replace(KILLED, cause="sigsegv", retry="never", error="ended by SIGSEGV")
BROKEN = replace(CRASHED, cause="user-code-exception", error="ValueError: boom")
TYPO = replace(KILLED, cause="import-error", retry="never", step=None, error="No module named 'nmupy'")
NO_MEMORY = replace(KILLED, cause="cuda-oom", retry="smaller", error="CUDA out of memory")
DAMAGED = replace(KILLED, cause="checkpoint-corrupt", retry="other-checkpoint", error="hash differs")
OURS, SCRIPT = Abilities(own_trainer=True, smaller="4 rows at once instead of 8"), Abilities()


def after(*history: Ended, can: Abilities = OURS, max_attempts: int = 10, recover: bool = True) -> Decision:
    return decide(history, max_attempts=max_attempts, recover=recover, can=can)


EXAMPLES = {
    "no-recover": ([KILLED], OURS, {"recover": False}, Decision("stop", 0, "--no-recover was given")),
    "mistake": ([TYPO], OURS, {}, Decision("stop", 0, "another attempt would end the same")),
    "max-attempts": (
        [SAVED, SAVED], OURS, {"max_attempts": 2},
        Decision("stop", 0, "2 attempts were made, --max-attempts allows no more"),
    ),
    "rollback": (
        [KILLED, KILLED, replace(KILLED, cause="loss-nan", error="nan", rolled_back=True)], OURS, {},
        Decision("retry", 0, "past the rows at step 7"),
    ),
    "no-device": (
        [CRASHED], replace(OURS, ranks_left=0), {},
        Decision("stop", 0, "a GPU is gone, and those left cannot hold or share the run's steps"),
    ),
    "device-gone": ([TYPO], replace(OURS, ranks_left=1), {}, Decision("fewer-ranks", 1, "a GPU is gone: on with 1")),
    "out-of-memory": ([NO_MEMORY], OURS, {}, Decision("smaller", 0, "memory ran out: 4 rows at once instead of 8")),
    "nothing-smaller": (
        [NO_MEMORY], replace(OURS, smaller=None), {}, Decision("stop", 0, "memory ran out, and nothing smaller is left"),
    ),
    "same-error": (
        [CRASHED, SAVED, CRASHED], OURS, {},
        Decision("stop", 0, "the same error at step 7 as before: it does not come from outside"),
    ),
    "no-progress": ([SAVED, KILLED, KILLED, KILLED], OURS, {}, Decision("stop", 0, "3 attempts in a row came no further")),
    "port-taken": (
        [replace(KILLED, cause="port-in-use", retry="other-port", error="EADDRINUSE")], SCRIPT, {},
        Decision("other-port", 1, "the port is taken: with another one"),
    ),
    "checkpoint-damaged": (
        [DAMAGED], OURS, {}, Decision("older-checkpoint", 1, "from the newest checkpoint that is whole"),
    ),
    "disk-full": (
        [replace(KILLED, cause="disk-full", retry="other-checkpoint", error="No space left on device")], OURS, {},
        Decision("retry", 30, "there may be room by then"),
    ),
    "away": (
        [replace(KILLED, cause="hub-offline", retry="later", error="offline")], SCRIPT, {},
        Decision("retry", 30, "what is away may be back by then"),
    ),
    "transient": ([KILLED], SCRIPT, {}, Decision("retry", 1, "it may pass")),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_each_rule_decides_its_example(rule):
    history, can, options, decision = EXAMPLES[rule.id]
    now = Situation(history, **{"max_attempts": 10, "recover": True, **options}, can=can)
    assert rule_for(now).id == rule.id
    assert after(*history, can=can, **options) == decision


def test_the_waits_grow_while_nothing_is_saved_and_begin_again_when_something_is():
    assert [after(*[SAVED] * n).wait_s for n in (1, 2, 3)] == [0, 0, 0]
    assert [after(SAVED, *[KILLED] * n).wait_s for n in (1, 2)] == [1, 5]
    away = replace(KILLED, retry="later")
    assert [after(away).wait_s, after(SAVED, away).wait_s] == [30, 30]


@pytest.mark.parametrize("ended", [BROKEN, TYPO, DAMAGED, NO_MEMORY], ids=lambda ended: ended.cause)
def test_a_script_is_not_tried_again_for_what_its_author_must_mend(ended):
    assert after(ended, can=SCRIPT).action == "stop"


def test_a_crash_below_python_is_tried_once_more_whosever_the_code_is():
    for can in (OURS, SCRIPT):
        assert after(CRASHED, can=can).action == "retry"
        assert after(CRASHED, CRASHED, can=can).action == "stop"


def test_fewer_rows_on_gpus_leave_the_host_no_more_memory():
    on_gpus = replace(OURS, rows_on_host=False)
    killed = replace(NO_MEMORY, cause="host-oom-killed", error="")
    assert (after(killed).action, after(killed, can=on_gpus).action) == ("smaller", "retry")
    assert after(*[killed] * 3, can=on_gpus).action == "stop"
    assert after(NO_MEMORY, can=on_gpus).action == "smaller"


def test_memory_may_run_out_as_often_as_something_smaller_is_left():
    assert after(*[NO_MEMORY] * 5).action == "smaller"


def test_a_kill_from_outside_at_the_same_step_is_not_the_same_error():
    assert after(KILLED, SAVED, KILLED).action == "retry"


def test_the_same_words_at_another_step_are_another_error():
    assert after(CRASHED, replace(CRASHED, step=9)).action == "retry"


def test_a_taken_port_in_the_same_words_is_not_held_against_the_program():
    taken = replace(KILLED, cause="port-in-use", retry="other-port", error="EADDRINUSE")
    assert after(taken, taken, can=SCRIPT).action == "other-port"


def test_the_policy_knows_the_words_of_the_catalogue():
    causes = load_catalogue().causes
    assert set(policy.Retry.__args__) == set(RETRIES)
    assert set(causes) >= OURS_ONCE_MORE - {"unknown"}
    assert {causes[name].retry for name in OURS_ONCE_MORE - {"unknown"}} == {"never"}


def test_the_page_in_the_docs_is_up_to_date():
    assert DOCS.read_text() == policy.format_docs(), "python -m paceline.launch.policy > docs/recovery.md"
