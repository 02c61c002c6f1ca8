from dataclasses import replace

import pytest

from paceline.errors import PlanError
from paceline.plan.gpu_table import find_gpu
from paceline.plan.links import faster_links, inner_link, link_of, read_link
from paceline.plan.machine import HostLink, Machine, imagined_machine

CPUS = Machine(gpus=(), cpu_cores=2, cpu_bf16=True, memory_bytes=0)
COMM = {
    "time": "2026-11-21T06:17:43Z",
    "device": "cuda",
    "device_names": ["NVIDIA GeForce RTX 5090"] * 2,
    "world_size": 2,
    "right": True,
    "collectives": {
        "reduce_scatter": {"latency_s": 2e-5, "bytes_per_s": 40e9},
        "all_gather": {"latency_s": 4e-5, "bytes_per_s": 40e9},
    },
}


def scenario(
    gpu: str = "RTX 5090", text: str | None = None, *, gpus: int = 2, hosts: int = 1, comm: dict | None = None
):
    machine = imagined_machine(find_gpu(gpu), gpus=gpus, hosts=hosts)
    return link_of(text, machine, world_size=gpus * hosts, device="cuda", comm=comm)


def test_two_cards_on_a_desktop_board_share_sixteen_lanes():
    link = scenario()
    assert link.name == "PCIe 5 x8" and link.bytes_per_s == pytest.approx(15e9, rel=0.1)
    assert link.source.startswith("assumed: a desktop board's two slots, eight lanes each")


def test_four_cards_have_sixteen_lanes_each():
    assert scenario(gpus=4).bytes_per_s == pytest.approx(28e9, rel=0.1)  # nccl issue 1639: 28 to 35


def test_cards_with_nvlink_use_it():
    assert scenario("H100", gpus=8).name == "NVLink"
    assert scenario("H100", gpus=8).bytes_per_s == pytest.approx(360e9, rel=0.05)


def test_gpus_that_are_linked_to_each_other_one_send_over_as_many_links_as_there_are_others():
    assert scenario("MI300X", gpus=2).name == "Infinity Fabric"
    assert [scenario("MI300X", gpus=gpus).bytes_per_s for gpus in (2, 4, 8)] == [48e9, 144e9, 336e9]


def test_a_link_that_comm_measured_with_these_devices_replaces_the_assumed_one():
    link = scenario(comm=COMM)
    assert link.bytes_per_s == pytest.approx(20e9)  # half of the bytes cross the link between two ranks
    assert link.source == "measured by paceline comm 2026-11-21"


@pytest.mark.parametrize(
    "other",
    [{"device_names": ["NVIDIA GeForce RTX 4090"] * 2}, {"world_size": 4}, {"right": False}, {"device": "cpu"}],
    ids=lambda other: next(iter(other)),
)
def test_a_link_that_comm_measured_with_other_devices_is_not_used(other):
    assert scenario(comm={**COMM, **other}).source.startswith("assumed")


def test_a_link_that_the_user_names_comes_first():
    assert scenario(text="pcie 5.0 x16 p2p", comm=COMM).bytes_per_s == pytest.approx(54e9, rel=0.03)


def test_between_hosts_10gbe_is_assumed_and_reported():
    link = scenario(hosts=2)
    assert link.name == "10GbE" and link.bytes_per_s == pytest.approx(1.125e9)
    assert link.source == "assumed: 10GbE between hosts; --link names another"


def hosts_of(*names: str, link: HostLink | None = None) -> Machine:
    return replace(imagined_machine(find_gpu("RTX 5090"), gpus=1, hosts=len(names)), names=names, link=link)


def test_between_hosts_what_the_check_measured_comes_before_an_assumption_and_after_what_the_user_names():
    machine = hosts_of("ada", "bob", link=HostLink(("ada", "bob"), 0.117e9, 110e-6))
    link = link_of(None, machine, world_size=2, device="cuda", comm=None)
    assert (link.name, link.bytes_per_s, link.latency_s) == ("ada to bob", 0.117e9, 110e-6)
    assert link.source == "measured by the check, one TCP connection"
    assert link_of("10GbE", machine, world_size=2, device="cuda", comm=None).name == "10GbE"


def test_a_link_that_comm_measured_counts_for_the_same_hosts_alone():
    record = {**COMM, "hosts": {"ada": [0], "bob": [1]}}
    checked = HostLink(("ada", "bob"), 0.117e9, 110e-6)
    same, other = hosts_of("bob", "ada", link=checked), hosts_of("ada", "eve", link=checked)
    assert link_of(None, same, world_size=2, device="cuda", comm=record).bytes_per_s == pytest.approx(20e9)
    assert link_of(None, other, world_size=2, device="cuda", comm=record).bytes_per_s == 0.117e9
    assert link_of(None, same, world_size=2, device="cuda", comm=COMM).bytes_per_s == 0.117e9  # of one host


@pytest.mark.parametrize(("now", "expected"), [(0.6e9, 20e9), (1.25e6, 1.25e6), (12e9, 12e9)])
def test_a_link_that_is_another_one_than_at_the_time_of_comm_is_planned_by_the_check(now, expected):
    record = {**COMM, "hosts": {"ada": [0], "bob": [1]}, "tcp_bytes_per_s": 1.2e9}
    machine = hosts_of("ada", "bob", link=HostLink(("ada", "bob"), now, 110e-6))
    link = link_of(None, machine, world_size=2, device="cuda", comm=record)
    assert link.bytes_per_s == pytest.approx(expected)
    assert ("that had 1.2 GB/s when paceline comm measured it" in link.source) == (now == expected)


def test_over_hosts_the_slower_link_counts():
    assert scenario(text="NDR", hosts=2).name == "PCIe 5 x8"
    assert scenario(text="NDR", hosts=2, gpus=1).name == "InfiniBand NDR"


@pytest.mark.parametrize(
    ("text", "name", "rate"),
    [
        ("1GbE", "1GbE", 0.1125e9),
        ("25 gbe", "25GbE", 2.8125e9),
        ("2.5GbE", "2.5GbE", 0.28125e9),
        ("2.5 gigabit ethernet", "2.5GbE", 0.28125e9),
        ("10.0 GbE", "10GbE", 1.125e9),
        ("100GbE", "100GbE", 11.25e9),
        ("PCIe 4 x16", "PCIe 4 x16", 14.2e9),
        ("PCIE5.0x8", "PCIe 5 x8", 14.2e9),
        ("IB HDR", "InfiniBand HDR", 23e9),
        ("ib-ndr", "InfiniBand NDR", 46e9),
    ],
)
def test_names_of_links_are_read_in_any_spelling(text, name, rate):
    link = read_link(text, None)
    assert link.name == name and link.bytes_per_s == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize("text", ["", "fast", "PCIe 9 x16", "PCIe 4 x3", "10", "9999GbE"])
def test_an_unknown_link_is_refused_with_those_that_are_known(text):
    with pytest.raises(PlanError) as error:
        read_link(text, None)
    assert "10GbE" in error.value.fix and "IB NDR" in error.value.fix


def test_nvlink_of_a_card_without_it_is_refused():
    with pytest.raises(PlanError) as error:
        read_link("NVLink", find_gpu("RTX 5090"))
    assert error.value.message == "--link NVLink, but no NVLink of RTX 5090 is known"
    assert "NVLink" not in error.value.fix


def test_one_device_has_no_link():
    assert scenario(gpus=1) is None


def test_a_link_named_for_one_device_is_refused():
    with pytest.raises(PlanError) as error:
        scenario(text="10GbE", gpus=1)
    assert (error.value.message, error.value.fix) == (
        "--link 10GbE, but one device alone sends nothing",
        "--gpus 2 or --hosts 2",
    )


def test_cpus_and_unknown_cards_have_none_until_they_are_measured():
    assert link_of(None, CPUS, world_size=2, device="cpu", comm=None) is None
    assert inner_link(None, num_gpus=2, device="cuda") is None


def test_a_narrow_slot_and_a_slow_network_have_a_faster_link():
    spec = find_gpu("RTX 5090")
    assert list(faster_links(scenario(), spec, hosts=1)) == [("a x16 slot for each card", "PCIe 5 x16")]
    assert list(faster_links(read_link("10GbE", spec), spec, hosts=1)) == [("25GbE between the GPUs", "25GbE")]
    assert list(faster_links(scenario(text="10GbE", hosts=2), spec, hosts=2)) == [("25GbE between the hosts", "25GbE")]
    assert list(faster_links(scenario(gpus=1), spec, hosts=1)) == []
