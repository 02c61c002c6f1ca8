"""What happens after an attempt: each rule of the table by an example, their order, the waits, the page in the docs."""

import runpy
from dataclasses import replace
from pathlib import Path

from rows import with_rows

from paceline.explain.catalogue import RETRIES, load_catalogue
from paceline.launch import policy
from paceline.launch.policy import RULES, TRAINER_CRASHES, Abilities, AttemptEnd, Decision, Situation, decide
from paceline.options import Recovery

ROOT = Path(__file__).parents[2]
KILLED = AttemptEnd("killed-from-outside", "same", rank=1, step=7, new_checkpoint=False, error="")
SAVED = replace(KILLED, new_checkpoint=True)
CRASHED = replace(KILLED, cause="sigsegv", retry="never", error="ended by SIGSEGV")
BROKEN = replace(CRASHED, cause="user-code-exception", error="ValueError: boom")
TYPO = replace(KILLED, cause="import-error", retry="never", step=None, error="No module named 'nmupy'")
NO_MEMORY = replace(KILLED, cause="cuda-oom", retry="smaller", error="CUDA out of memory")
DAMAGED = replace(KILLED, cause="checkpoint-corrupt", retry="other-checkpoint", error="hash differs")
LOST_HOST = replace(KILLED, cause="host-lost", rank=None)
OURS, SCRIPT = Abilities(own_trainer=True, smaller="device_batch_size 4 instead of 8"), Abilities()


def after(*history: AttemptEnd, abilities: Abilities = OURS, **options: object) -> Decision:
    return decide(Situation(history, Recovery(**options), abilities))


def test_one_attempt_is_no_attempts():
    assert after(SAVED, max_attempts=1).why == "1 attempt was made, --max-attempts allows no more"


EXAMPLES = {
    "no-recover": ([KILLED], OURS, {"recover": False}, Decision("stop", 0, "--no-recover was given")),
    "mistake": ([TYPO], OURS, {}, Decision("stop", 0, "another attempt would fail the same way")),
    "max-attempts": (
        [SAVED, SAVED], OURS, {"max_attempts": 2},
        Decision("stop", 0, "2 attempts were made, --max-attempts allows no more"),
    ),
    "rollback": (
        [KILLED, KILLED, replace(KILLED, cause="loss-nan", error="nan", rolled_back=True)], OURS, {},
        Decision("retry", 0, "skipping the batch of step 7"),
    ),
    "host-awaited": (
        [LOST_HOST], replace(OURS, lost_hosts=("ada", "bob"), awaited_hosts=("ada", "bob"), ranks_left=0), {},
        Decision("await-hosts", 0, "lost ada, bob"),
    ),
    "no-host": (
        [LOST_HOST], replace(OURS, lost_hosts=("bob",), ranks_left=0), {},
        Decision("stop", 0, "lost bob, and the remaining hosts cannot go on"),
    ),
    "host-gone": (
        [LOST_HOST], replace(OURS, lost_hosts=("bob",), ranks_left=1, hosts_left=("ada",)), {},
        Decision("fewer-ranks", 0, "lost bob: continuing on ada"),
    ),
    "no-device": (
        [CRASHED], replace(OURS, ranks_left=0), {},
        Decision("stop", 0, "lost a GPU, and the remaining ones cannot hold the model or divide the batch"),
    ),
    "device-gone": ([TYPO], replace(OURS, ranks_left=1), {}, Decision("fewer-ranks", 1, "lost a GPU: continuing on 1")),
    "out-of-memory": ([NO_MEMORY], OURS, {}, Decision("smaller", 0, "memory ran out: device_batch_size 4 instead of 8")),
    "nothing-smaller": (
        [NO_MEMORY], replace(OURS, smaller=None), {}, Decision("stop", 0, "memory ran out, and no smaller configuration exists"),
    ),
    "job-over": (
        [KILLED], replace(OURS, is_job_over=True, lost_hosts=("bob",), hosts_left=("ada",), ranks_left=1), {},
        Decision("stop", 0, "the Slurm job that gave the nodes is over"),
    ),
    "folder-moved": (
        [TYPO], replace(SCRIPT, is_folder_moved=True), {}, Decision("retry", 0, "continuing in the renamed folder"),
    ),
    "same-error": (
        [CRASHED, SAVED, CRASHED], OURS, {},
        Decision("stop", 0, "the same error at step 7 as in an earlier attempt: it is not transient"),
    ),
    "no-progress": ([SAVED, KILLED, KILLED, KILLED], OURS, {}, Decision("stop", 0, "3 attempts in a row made no progress")),
    "port-taken": (
        [replace(KILLED, cause="port-in-use", retry="other-port", error="EADDRINUSE")], SCRIPT, {},
        Decision("other-port", 1, "port in use: retrying on another port"),
    ),
    "checkpoint-damaged": (
        [DAMAGED], OURS, {}, Decision("older-checkpoint", 1, "using the newest intact checkpoint"),
    ),
    "disk-full": (
        [replace(KILLED, cause="disk-full", retry="other-checkpoint", error="No space left on device")], OURS, {},
        Decision("retry", 30, "the disk was full and may have room by then"),
    ),
    "away": (
        [replace(KILLED, cause="hub-offline", retry="later", error="offline")], SCRIPT, {},
        Decision("retry", 30, "what was unavailable may be back by then"),
    ),
    "transient": ([KILLED], SCRIPT, {}, Decision("retry", 1, "this is usually transient")),
}  # fmt: skip


@with_rows("rule", RULES)
def test_each_rule_decides_its_example(rule):
    history, abilities, options, decision = EXAMPLES[rule.id]
    state = Situation(history, Recovery(**options), abilities)
    assert next(rule.id for rule in RULES if rule.applies(state)) == rule.id
    assert after(*history, abilities=abilities, **options) == decision


def test_the_waits_grow_until_a_checkpoint_is_saved():
    assert [after(*[SAVED] * n).wait_s for n in (1, 2, 3)] == [0, 0, 0]
    assert [after(SAVED, *[KILLED] * n).wait_s for n in (1, 2)] == [1, 5]
    unavailable = replace(KILLED, retry="later")
    assert [after(unavailable).wait_s, after(SAVED, unavailable).wait_s] == [30, 30]


def test_a_script_that_renames_its_folder_in_each_attempt_is_not_started_for_ever():
    renamed = replace(SCRIPT, is_folder_moved=True)
    assert [after(*[TYPO] * n, abilities=renamed).action for n in (1, 2, 3)] == ["retry", "retry", "stop"]
    assert after(TYPO, TYPO, abilities=renamed, max_attempts=2).action == "stop"
    assert (
        after(LOST_HOST, abilities=replace(OURS, lost_hosts=("bob",), ranks_left=1, is_folder_moved=True)).action
        == "fewer-ranks"
    )


HANG = replace(KILLED, cause="hang", error="rank 1: barrier, called at w/ddp.py:79")
NO_STEPS = replace(HANG, step=None)
TAKEN = replace(KILLED, cause="port-in-use", retry="other-port", error="EADDRINUSE")


@with_rows(("history", "abilities", "action"), [
    # a script is not retried for what its author must fix
    *(([end], SCRIPT, "stop") for end in (BROKEN, TYPO, DAMAGED, NO_MEMORY)),
    # a crash below Python is retried once, in trainer and script
    *(([CRASHED], abilities, "retry") for abilities in (OURS, SCRIPT)),
    *(([CRASHED, CRASHED], abilities, "stop") for abilities in (OURS, SCRIPT)),
    # memory may run out as long as a smaller configuration exists
    ([NO_MEMORY] * 5, OURS, "smaller"),
    # a kill from outside at the same step is not the same error, nor is the same message at another step
    ([KILLED, SAVED, KILLED], OURS, "retry"),
    ([CRASHED, replace(CRASHED, step=9)], OURS, "retry"),
    # a hang in the same place at the same step is not transient; of a script without steps only if it made no progress
    ([HANG, HANG], SCRIPT, "stop"),
    ([HANG, replace(HANG, error="rank 1: forward at w/ddp.py:12")], SCRIPT, "retry"),
    ([HANG, replace(HANG, step=9)], SCRIPT, "retry"),
    ([replace(HANG, error="")] * 2, SCRIPT, "retry"),
    ([NO_STEPS, NO_STEPS], SCRIPT, "stop"),
    ([NO_STEPS, replace(NO_STEPS, new_checkpoint=True)], SCRIPT, "retry"),
    # a port in use twice is not a repeated error
    ([TAKEN, TAKEN], SCRIPT, "other-port"),
])  # fmt: skip
def test_what_happened_before_decides_too(history, abilities, action):
    assert after(*history, abilities=abilities).action == action


def test_a_repeated_hang_is_called_one():
    assert after(HANG, HANG, abilities=SCRIPT).why == (
        "the same hang at step 7 as in an earlier attempt: it is not transient"
    )


def test_a_smaller_micro_batch_on_gpus_does_not_save_host_memory():
    on_gpus = replace(OURS, rows_on_host=False)
    killed = replace(NO_MEMORY, cause="host-oom-killed", error="")
    assert (after(killed).action, after(killed, abilities=on_gpus).action) == ("smaller", "retry")
    assert after(*[killed] * 3, abilities=on_gpus).action == "stop"
    assert after(NO_MEMORY, abilities=on_gpus).action == "smaller"


def test_the_policy_has_the_retry_classes_and_causes_of_the_catalogue():
    causes = load_catalogue().causes
    assert set(policy.Retry.__args__) == set(RETRIES)
    assert set(causes) >= TRAINER_CRASHES - {"unknown"}
    assert {causes[name].retry for name in TRAINER_CRASHES - {"unknown"}} == {"never"}


def test_the_page_in_the_docs_is_up_to_date():
    page = runpy.run_path(str(ROOT / "dev" / "recovery_page.py"))["format_docs"]()
    assert (ROOT / "docs" / "recovery.md").read_text() == page, "python dev/recovery_page.py > docs/recovery.md"
