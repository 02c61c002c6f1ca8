"""Figures of links: their expected rate, the line through measurements, the rank at fault, the cost of a step."""

import pytest

from paceline.comm.analysis import (
    LinkRate,
    bus_factor,
    compute_seconds,
    fit_line,
    link_of_gpus,
    link_verdict,
    locate,
    step_traffic,
    sweep_sizes,
    training_cost,
)
from paceline.config import Config
from paceline.plan.gpu_table import spec_of
from paceline.plan.machine import Gpu, Machine
from paceline.plan.planner import Plan, make_plan
from paceline.plan.shapes import num_params

GB = 1e9


def gpu(
    generation: int | None = 4, width: int | None = 16, nvlinks: int = 0, capability: tuple[int, int] = (8, 9)
) -> dict:
    pcie = {"generation": 1, "generation_max": generation, "width": width, "width_max": 16}
    return {"nvlinks": nvlinks, "capability": list(capability), "pcie": pcie}


def wrong(collective: str, ranks: tuple[int, ...], rank: int, sender: int | None = None) -> dict:
    return {"collective": collective, "ranks": list(ranks), "rank": rank, "sender": sender}


def plan_of(name: str | None = "NVIDIA GeForce RTX 5090", count: int = 2, **keys: object) -> Plan:
    gpus = tuple(Gpu(i, name, 32 << 30, (12, 0), spec_of(name, 32 << 30)) for i in range(count)) if name else ()
    machine = Machine(gpus=gpus, cpu_cores=16, cpu_bf16=False, memory_bytes=64 << 30)
    config = Config(**{"depth": 12, "nproc": count, **keys})
    return make_plan(config, machine, vocab_size=config.vocab_size, num_rows=0)


def test_bus_bandwidth_counts_what_crosses_the_slowest_link_as_nccl_tests_do():
    assert [bus_factor("all_reduce", n) for n in (2, 3, 8)] == [1.0, 4 / 3, 1.75]
    assert (
        [bus_factor("reduce_scatter", n) for n in (2, 4)]
        == [bus_factor("all_gather", n) for n in (2, 4)]
        == [0.5, 0.75]
    )
    assert bus_factor("broadcast", 8) == bus_factor("p2p", 2) == 1.0


def test_a_line_through_exact_measurements_gives_their_latency_and_bandwidth():
    points = [(size, 20e-6 + size / (4 * GB)) for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24)]
    fit = fit_line(points)
    assert fit["latency_s"] == pytest.approx(20e-6)
    assert fit["bytes_per_s"] == pytest.approx(4 * GB)


def test_small_messages_count_in_the_line_as_much_as_large_ones():
    fit = fit_line([(1 << 10, 20e-6), (1 << 12, 21e-6), (1 << 24, 0.0042), (1 << 26, 0.018)])
    assert fit["latency_s"] == pytest.approx(20e-6, rel=0.1)


def test_one_size_alone_or_times_that_do_not_grow_give_a_bandwidth_without_latency():
    assert fit_line([(1000, 0.5)]) == {"latency_s": 0.0, "bytes_per_s": 2000}
    assert fit_line([(1000, 0.5), (2000, 0.25)]) == {"latency_s": 0.0, "bytes_per_s": 8000}


def test_a_pcie_link_is_as_fast_as_the_narrower_of_the_two_slots():
    assert link_of_gpus(gpu(5, 16), gpu(5, 16)) == LinkRate("PCIe 5.0 x16", 16 * 3.938e9)
    assert link_of_gpus(gpu(4, 16), gpu(4, 4)) == LinkRate("PCIe 4.0 x4", 4 * 1.969e9)
    assert link_of_gpus(gpu(3, 16), gpu(5, 4)) == LinkRate("PCIe 5.0 x4", 4 * 3.938e9)


def test_an_idle_card_is_judged_by_its_highest_pcie_generation():
    assert link_of_gpus(gpu(4, 16), gpu(4, 16)).name == "PCIe 4.0 x16"


def test_the_rate_of_an_nvlink_depends_on_its_generation():
    assert link_of_gpus(gpu(nvlinks=18, capability=(9, 0)), gpu(nvlinks=18, capability=(9, 0))) == LinkRate(
        "18 NVLinks", 450e9
    )
    assert link_of_gpus(gpu(nvlinks=12, capability=(8, 0)), gpu(nvlinks=12, capability=(8, 0))) == LinkRate(
        "12 NVLinks", 300e9
    )
    assert link_of_gpus(gpu(nvlinks=4, capability=(8, 6)), gpu(nvlinks=4, capability=(8, 6))) == LinkRate(
        "4 NVLinks", 56.24e9
    )
    assert link_of_gpus(gpu(nvlinks=2, capability=(6, 0)), gpu(nvlinks=2, capability=(6, 0))) == LinkRate(
        "2 NVLinks", None
    )


def test_a_link_that_the_driver_does_not_report_is_unknown():
    unknown = {"nvlinks": None, "capability": [8, 9], "pcie": None}
    assert link_of_gpus(unknown, gpu()).bytes_per_s is None
    assert link_of_gpus(gpu(None, 16), gpu()).bytes_per_s is None


def test_a_link_is_good_fair_or_poor_by_its_share():
    link = LinkRate("PCIe 4.0 x16", 31.5 * GB)
    assert link_verdict(link, 24.7 * GB) == (pytest.approx(0.784, abs=1e-3), "good")
    assert link_verdict(link, 15 * GB)[1].startswith("fair, as through host memory")
    assert link_verdict(link, 4.1 * GB)[1].startswith("poor")
    assert link_verdict(LinkRate("loopback", None), 2 * GB) == (None, "no reference rate is known")


def test_a_wrong_message_names_its_sender_and_receiver():
    errors = [wrong("reduce_scatter", (0, 1), 0), wrong("p2p", (1, 0), 0, 1), wrong("all_gather", (0, 1), 0)]
    assert locate(errors) == "rank 1 -> rank 0 gives wrong results"


def test_messages_wrong_in_both_directions_name_both():
    errors = [wrong("p2p", (1, 0), 0, 1), wrong("p2p", (0, 1), 1, 0)]
    assert locate(errors) == "rank 0 -> rank 1 and rank 1 -> rank 0 give wrong results"


def test_one_sender_or_one_receiver_of_all_wrong_messages_is_named_alone():
    sent = [wrong("p2p", (1, 0), 0, 1), wrong("p2p", (1, 2), 2, 1)]
    assert locate(sent) == "rank 1 sends wrong results to ranks 0 and 2"
    received = [wrong("p2p", (0, 1), 1, 0), wrong("p2p", (2, 1), 1, 2)]
    assert locate(received) == "rank 1 receives wrong results from ranks 0 and 2"


def test_a_rank_that_alone_gets_wrong_sums_is_named():
    errors = [wrong("all_reduce", (0, 1), 1), wrong("all_reduce", (0, 1), 1)]
    assert locate(errors) == "rank 1 alone gets wrong results; what it sends arrives right"


def test_a_rank_with_a_wrong_contribution_is_in_every_wrong_pair():
    everyone = [wrong("all_reduce", (0, 1, 2), rank) for rank in range(3)]
    pairs = [wrong("all_reduce", pair, rank) for pair in ((0, 1), (1, 2)) for rank in pair]
    assert locate(everyone + pairs) == "rank 1 is in every pair with wrong results: 0-1 and 1-2"


def test_two_ranks_with_wrong_sums_are_named_as_a_pair():
    errors = [wrong("all_reduce", (0, 1), rank) for rank in (0, 1)]
    assert locate(errors).startswith("wrong results between ranks 0-1;")


def test_a_barrier_that_does_not_hold_is_named_as_such():
    assert locate([wrong("barrier", (0, 1), 0)]) == "rank 0 passes the barrier before all ranks have reached it"


def test_sums_wrong_only_among_all_ranks_are_not_blamed_on_a_pair():
    errors = [wrong("all_reduce", (0, 1, 2), rank) for rank in range(3)]
    assert locate(errors) == "only ranks 0, 1 and 2 together get wrong results; every pair by itself is right"


def test_a_step_sends_gradients_and_weights_of_every_bucket_and_small_tensors_to_all():
    plan = plan_of()
    messages = step_traffic(plan)
    numel = num_params(plan.model)
    assert plan.precision == "bf16" and plan.grad_accum_steps == 8
    assert sum(messages["reduce_scatter"]) == pytest.approx(4 * numel, rel=0.01)  # fp32: summed over micro-steps
    assert sum(messages["all_gather"]) == sum(messages["reduce_scatter"]) // 2
    assert sum(messages["all_reduce"]) < 10_000


def test_gradients_of_a_single_bf16_micro_step_are_sent_in_bf16():
    messages = step_traffic(plan_of(total_batch_size=65_536, device_batch_size=16))
    assert messages["reduce_scatter"] == messages["all_gather"]


def test_replicated_states_all_reduce_every_gradient():
    plan = plan_of(shard="none", optimizer="adamw")
    traffic = step_traffic(plan)
    assert (traffic["reduce_scatter"], traffic["all_gather"]) == ((), ())
    assert sum(traffic["all_reduce"]) == 4 * num_params(plan.model)
    assert len(traffic["all_reduce"]) > 1  # DDP's buckets


def test_compute_time_comes_from_a_measured_speed_or_the_known_peak_or_is_unknown():
    plan = plan_of(total_batch_size=65_536, device_batch_size=16)
    assert compute_seconds(plan, 32_768.0) == (1.0, "at 32,768 tok/s in each process")
    seconds, source = compute_seconds(plan, None)
    assert seconds == pytest.approx(32_768 * plan.flops_per_token / (0.45 * 209.5e12))
    assert source == "at 45 % of peak, assumed"
    assert compute_seconds(plan_of(None), None) == (None, "no peak FLOPS is known for CPU in fp32")


def test_the_share_of_waiting_is_sending_over_sending_and_computing():
    plan = plan_of(total_batch_size=65_536, device_batch_size=16)
    fit = {"latency_s": 0.0, "bytes_per_s": 8.2 * GB}  # bus: half of it
    fits = {"reduce_scatter": fit, "all_gather": fit, "all_reduce": fit}
    cost = training_cost(plan, fits, tok_per_sec=32_768.0)
    assert cost["bus_bytes_per_s"] == pytest.approx(4.1 * GB, rel=1e-4)
    assert cost["sending_s"] == pytest.approx(cost["bytes"] / (8.2 * GB))
    assert cost["waiting_share"] == pytest.approx(cost["sending_s"] / (cost["sending_s"] + 1.0))
    assert training_cost(plan_of(None), fits, tok_per_sec=None)["waiting_share"] is None


def test_sizes_grow_by_four_and_end_with_the_largest_requested():
    assert sweep_sizes(65_536) == [1024, 4096, 16_384, 65_536]
    assert sweep_sizes(100_000) == [1024, 4096, 16_384, 65_536, 100_000]
