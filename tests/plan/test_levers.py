"""What would help, and what a step that is far from the plan is taken for."""

from dataclasses import replace

from setups import SLOW, gpt, on, on_cpu

from paceline.plan.levers import levers, step_gap
from paceline.plan.step_time import step_time


def test_levers_are_sorted_and_each_is_worth_a_percent():
    setup = replace(on("RTX 5090", gpt(12), gpus=2, rows=4, total=65_536), compile=False, activation_checkpointing=True)
    found = levers(setup, largest_device_batch_size=16, fits_without_checkpointing=True)
    assert [each.gain for each in found] == sorted((each.gain for each in found), reverse=True)
    assert all(each.gain >= 0.01 for each in found)
    assert {"--compile", "--no-activation-checkpointing", "a x16 slot for each card"} <= {each.what for each in found}


def test_a_larger_batch_as_a_lever_divides_the_share_of_a_device():
    found = levers(on("RTX 5090", gpt(12), rows=2), largest_device_batch_size=100)
    assert [each.what for each in found if "device-batch" in each.what] in ([], ["--device-batch-size 64"])


def test_one_host_instead_of_two_is_a_lever():
    found = levers(on("H100", gpt(12), rows=8, gpus=4, hosts=2, total=2**19))
    assert "all 8 GPUs in one host" in {each.what for each in found}


def test_no_time_no_levers():
    assert levers(on_cpu(speeds=None)) == ()


def test_a_step_near_the_plan_is_no_finding():
    setup = on("RTX 5090", gpt(12))
    planned = step_time(setup)
    assert step_gap(setup, planned, 1.15 * planned.seconds.expected) is None
    assert step_gap(setup, step_time(replace(setup, spec=None)), 1.0) is None


def test_a_step_over_a_slow_link_names_the_link():
    setup = replace(on("RTX 5090", gpt(12), rows=8, total=32_768, hosts=2), link=SLOW)
    planned = step_time(setup)
    finding = step_gap(setup, planned, 1.5 * planned.seconds.expected)
    assert (finding.id, finding.severity) == ("step-slower-than-planned", "warn")
    assert "likely the link: 10GbE" in finding.why and finding.fix == "paceline comm --nproc 2 measures it"


def test_a_slow_step_on_one_card_names_its_clock():
    setup = replace(on("RTX 5090", gpt(12)), compile=True)
    finding = step_gap(setup, step_time(setup), 2 * step_time(setup).seconds.expected)
    assert finding.why.startswith("likely the cards run below their clock") and "(+100%)" in finding.what


def test_a_faster_step_is_a_note():
    setup = on_cpu()
    finding = step_gap(setup, step_time(setup), 0.5 * step_time(setup).seconds.expected)
    assert (finding.id, finding.severity) == ("step-faster-than-planned", "note")
