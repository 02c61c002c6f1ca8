"""What ran out of memory here is not chosen again, of itself and while the device has no more."""

from dataclasses import replace

import pytest

from paceline.config import Config
from paceline.plan.again import fewer_ranks, plan_again, smaller_plan, words_of_change
from paceline.plan.gpus import find_gpu
from paceline.plan.machine import Gpu, Machine
from paceline.plan.planner import Plan, make_plan
from paceline.plan.too_large import FILE_NAME, keep_too_large, kept_too_large

CARD = Gpu(0, "NVIDIA GeForce RTX 5090", 32_607 << 20, (12, 0), find_gpu("RTX 5090"))
TWO = Machine((CARD, replace(CARD, index=1)), 16, False, 64 << 30)
CONFIG = Config(depth=12, num_steps=50, total_batch_size=524_288)


def keep(folder, plan, card_bytes=CARD.memory_bytes):
    keep_too_large(folder, plan, card_bytes=card_bytes, source="books")


def planner(folder):
    def make(config: Config, machine: Machine) -> Plan:
        return make_plan(config, machine, vocab_size=32_768, num_rows=1000, too_large=kept_too_large(folder))

    return make


def rows(plan: Plan) -> tuple[int, bool]:
    return plan.device_batch_size, plan.activation_checkpointing


def test_the_next_plan_takes_the_next_fewer_rows(tmp_path):
    first = planner(tmp_path)(CONFIG, TWO)
    keep(tmp_path, first)
    second = planner(tmp_path)(CONFIG, TWO)
    assert rows(second) == (first.device_batch_size // 2, False)
    assert second.total_batch_size == first.total_batch_size
    keep(tmp_path, second)
    assert rows(planner(tmp_path)(CONFIG, TWO)) == (first.device_batch_size // 4, False)


def test_a_size_that_failed_while_others_held_the_memory_is_free_again_when_they_do_not(tmp_path):
    first = planner(tmp_path)(CONFIG, TWO)
    keep(tmp_path, first, card_bytes=CARD.memory_bytes // 2)
    assert planner(tmp_path)(CONFIG, TWO) == first


@pytest.mark.parametrize("other", [
    replace(TWO, gpus=tuple(replace(gpu, memory_bytes=48 << 30) for gpu in TWO.gpus)),
    replace(TWO, gpus=tuple(replace(gpu, name="NVIDIA RTX PRO 6000") for gpu in TWO.gpus)),
], ids=["more memory", "another card"])  # fmt: skip
def test_another_device_is_not_held_to_it(other, tmp_path):
    before = planner(tmp_path)(CONFIG, other)
    keep(tmp_path, planner(tmp_path)(CONFIG, TWO))
    assert planner(tmp_path)(CONFIG, other) == before


@pytest.mark.parametrize("keys", [{"depth": 11}, {"precision": "fp32"}, {"optimizer": "adamw"}], ids=str)
def test_another_model_is_not_held_to_it(keys, tmp_path):
    other = replace(CONFIG, **keys)
    before = planner(tmp_path)(other, TWO)
    keep(tmp_path, replace(planner(tmp_path)(CONFIG, TWO), device_batch_size=1))
    assert planner(tmp_path)(other, TWO) == before


def test_rows_that_the_user_sets_are_the_users(tmp_path):
    first = planner(tmp_path)(CONFIG, TWO)
    keep(tmp_path, first)
    asked = replace(CONFIG, device_batch_size=first.device_batch_size)
    assert planner(tmp_path)(asked, TWO).device_batch_size == first.device_batch_size


def test_lines_that_cannot_be_read_are_passed_over(tmp_path):
    (tmp_path / FILE_NAME).write_text('{"device_name": "x"}\nhalf a li')
    first = planner(tmp_path)(CONFIG, TWO)
    keep(tmp_path, first)
    assert planner(tmp_path)(CONFIG, TWO).device_batch_size < first.device_batch_size


def test_after_the_last_row_comes_checkpointing_and_after_that_nothing(tmp_path):
    make = planner(tmp_path)
    plan, seen = replace(make(CONFIG, TWO), device_batch_size=4, grad_accum_steps=32), []
    while smaller := smaller_plan(plan, CONFIG, TWO, make=make):
        seen.append(words_of_change(plan, smaller))
        assert smaller.total_batch_size == plan.total_batch_size
        plan = smaller
    assert seen == [
        "2 rows at once instead of 4, 64 micro-steps instead of 32",
        "1 row at once instead of 2, 128 micro-steps instead of 64",
        "activation checkpointing",
    ]


def test_checkpointing_that_the_user_has_switched_off_stays_off(tmp_path):
    asked = replace(CONFIG, activation_checkpointing=False)
    plan = replace(planner(tmp_path)(asked, TWO), device_batch_size=1, grad_accum_steps=128)
    assert smaller_plan(plan, asked, TWO, make=planner(tmp_path)) is None


def test_a_run_that_was_made_smaller_stays_so_when_it_is_resumed(tmp_path):
    make = planner(tmp_path)
    smaller = smaller_plan(make(CONFIG, TWO), CONFIG, TWO, make=make)
    assert smaller is not None
    assert rows(plan_again(smaller, CONFIG, TWO, make=make)) == rows(smaller)


@pytest.mark.parametrize("devices, ranks", [(3, 2), (2, 2), (1, 1), (0, 0)])
def test_as_many_devices_go_on_as_can_share_the_rows(devices, ranks, tmp_path):
    plan = replace(planner(tmp_path)(CONFIG, TWO), world_size=4, total_batch_size=16 * CONFIG.sequence_len)
    assert fewer_ranks(plan, devices=devices) == ranks
