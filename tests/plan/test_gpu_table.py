"""The table of GPUs, and which of its rows a name means."""

import json
from pathlib import Path

import pytest
from rows import with_rows

from paceline.errors import PlanError
from paceline.plan.gpu_table import find_gpu, gpu_table, spec_of
from paceline.units import MIB

HOSTS = Path(__file__).parents[1] / "check" / "hosts"
GPUS = gpu_table()
BY_NAME = {gpu.name: gpu for gpu in GPUS}
FIGURES = (
    "memory_mib",
    "bytes_per_s",
    "capability",
    "pcie_gen",
    "pcie_lanes",
    "nvlink_bytes_per_s",
    "peer_bytes_per_s",
    "watts",
)

DRIVER = {  # (name, MiB) as drivers printed them, old ones too -> row
    ("NVIDIA GeForce RTX 5090", 32607): "RTX 5090",
    ("NVIDIA GeForce RTX 5090 D", 32607): "RTX 5090 D",
    ("NVIDIA GeForce RTX 4090", 24564): "RTX 4090",
    ("NVIDIA GeForce RTX 3090", 24268): "RTX 3090",
    ("GeForce RTX 3090", 24265): "RTX 3090",
    ("NVIDIA GeForce RTX 3060", 12053): "RTX 3060",
    ("NVIDIA GeForce RTX 3060", 8192): "RTX 3060 8GB",
    ("NVIDIA GeForce RTX 3080", 10018): "RTX 3080",
    ("NVIDIA GeForce RTX 3080", 12288): "RTX 3080 12GB",
    ("NVIDIA GeForce RTX 4060 Ti", 8188): "RTX 4060 Ti 8GB",
    ("NVIDIA GeForce RTX 4060 Ti", 16380): "RTX 4060 Ti 16GB",
    ("NVIDIA GeForce RTX 5060 Ti", 16311): "RTX 5060 Ti 16GB",
    ("NVIDIA GeForce RTX 4070 SUPER", 12282): "RTX 4070 SUPER",
    ("NVIDIA TITAN V", 12066): "TITAN V",
    ("NVIDIA RTX A2000 12GB", 12282): "RTX A2000 12GB",
    ("NVIDIA RTX A6000", 49140): "RTX A6000",
    ("NVIDIA RTX A6000", 46068): "RTX A6000",  # ECC switched on
    ("NVIDIA RTX 6000 Ada Generation", 49140): "RTX 6000 Ada",
    ("NVIDIA RTX 4000 SFF Ada Generation", 20475): "RTX 4000 SFF Ada",
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887): "RTX PRO 6000 Blackwell Workstation",
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887): "RTX PRO 6000 Blackwell Max-Q",
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887): "RTX PRO 6000 Blackwell Server",
    ("Tesla T4", 15109): "T4",
    ("Tesla V100-SXM2-16GB", 16160): "V100 SXM2 16GB",
    ("NVIDIA A10", 23028): "A10",
    ("NVIDIA A10G", 22731): "A10G",
    ("NVIDIA A40", 48685): "A40",
    ("NVIDIA A100-SXM4-40GB", 40960): "A100 SXM 40GB",
    ("NVIDIA A100-PCIE-40GB", 40536): "A100 PCIe 40GB",
    ("NVIDIA A100 80GB PCIe", 81920): "A100 PCIe 80GB",
    ("NVIDIA A100-SXM4-80GB", 81251): "A100 SXM 80GB",
    ("NVIDIA L40S", 46068): "L40S",
    ("NVIDIA H100 80GB HBM3", 81559): "H100 SXM",
    ("NVIDIA H100 PCIe", 81559): "H100 PCIe",
    ("NVIDIA H100 NVL", 95830): "H100 NVL",
    ("NVIDIA H200", 143771): "H200 SXM",
    ("NVIDIA GH200 480GB", 97871): "GH200 96GB",
    ("NVIDIA B200", 183359): "B200",
    ("NVIDIA GB10", 0): "GB10",  # reports no memory
}
STRANGERS = (
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376),
    ("NVIDIA RTX 4000 Ada Generation Laptop GPU", 12282),
    ("NVIDIA GeForce RTX 4090", 49140),  # rebuilt with twice the memory
    ("NVIDIA GeForce RTX 4060 Ti", 0),  # one of two
    ("NVIDIA A10-24Q", 23028),  # a share of one, given out by a hypervisor
    ("NVIDIA GeForce RTX 5090 D v2", 24463),
    ("Some Card", 24564),
)
# TFLOP/s that NVIDIA prints: fp4 with sparsity for the 50 series, fp8 with sparsity and fp16 accumulation for the 40 series
AI_TOPS = {
    "RTX 5060": 614, "RTX 5060 Ti 16GB": 759, "RTX 5070": 988, "RTX 5070 Ti": 1406, "RTX 5080": 1801, "RTX 5090": 3352,
    "RTX 4060": 242, "RTX 4060 Ti 8GB": 353, "RTX 4070": 466, "RTX 4070 SUPER": 568, "RTX 4070 Ti": 641,
    "RTX 4070 Ti SUPER": 706, "RTX 4080": 780, "RTX 4080 SUPER": 836, "RTX 4090": 1321, "RTX 4090 D": 1177,
}  # fmt: skip
# fp32 TFLOP/s of NVIDIA's data sheets, for boards whose peaks are derived from their clocks
FP32 = {
    "RTX 3070": 20.3, "RTX 3080": 29.8, "RTX 3090": 35.6, "RTX 3090 Ti": 40.0, "RTX A2000": 8.0, "RTX A4000": 19.2,
    "RTX A4500": 23.7, "RTX A5000": 27.8, "RTX A5500": 34.1, "RTX A6000": 38.7, "RTX 2000 Ada": 12.0,
    "RTX 4000 SFF Ada": 19.2, "RTX 4000 Ada": 26.7, "RTX 4500 Ada": 39.6, "RTX 5000 Ada": 65.3, "RTX 6000 Ada": 91.1,
    "RTX PRO 5000 Blackwell": 65.0, "RTX PRO 6000 Blackwell Workstation": 125.0, "RTX PRO 6000 Blackwell Max-Q": 110.0,
    "RTX PRO 6000 Blackwell Server": 120.0,
}  # fmt: skip
# bf16 (V100: fp16) matmuls in TFLOP/s from the tables of mamf-finder and torch-performance-test-data: a peak at the wrong rate
# is half or twice what it should be
MEASURED = {
    "GB10": 97,  # fp16, github.com/GuigsEvt/dgx_spark_config issue 1
    "RTX 3090": 78.0, "RTX 3090 Ti": 86.0, "RTX 3080 Ti": 76.5, "RTX 4070 SUPER": 76.8, "RTX 4090": 178.8, "RTX 5090": 242.2,
    "RTX 4000 Ada": 82.7, "RTX 6000 Ada": 278.5, "RTX A5000": 93.9, "RTX A6000": 131.2, "A10G": 69.7, "L4": 91.4, "L40": 170.3,
    "L40S": 269.2, "A100 SXM 80GB": 267.9, "H100 PCIe": 499.5, "H100 SXM": 821.2, "GH200 96GB": 852.5, "B200": 1696.0,
    "RTX PRO 6000 Blackwell Workstation": 418.0, "RTX PRO 6000 Blackwell Server": 409.4, "V100 SXM2 16GB": 96.1,
}  # fmt: skip


@with_rows("gpu", GPUS)
def test_every_figure_has_a_source_and_none_is_named_for_a_figure_that_is_missing(gpu):
    known = {figure for figure in FIGURES if getattr(gpu, figure) is not None}
    assert set(gpu.sources) == known | {"peak_flops"}
    assert all(gpu.sources.values())
    assert gpu.memory_mib > 4096 and gpu.bytes_per_s > 1e11 and 50 <= gpu.watts <= 1400


@with_rows("gpu", GPUS)
def test_every_name_and_alias_finds_its_own_row(gpu):
    assert all(find_gpu(name) is gpu for name in (gpu.name, *gpu.aliases))
    assert all(spec_of(name, gpu.memory_mib * MIB) is gpu for name in gpu.driver_names)


@with_rows(("driver", "name"), DRIVER.items())
def test_a_drivers_name_and_memory_give_the_row(driver, name):
    typed_name, mib = driver
    assert spec_of(typed_name, mib * MIB) is BY_NAME[name]


@pytest.mark.parametrize(("typed_name", "mib"), STRANGERS)
def test_a_laptop_gpu_a_share_and_a_rebuilt_card_are_no_row_of_the_table(typed_name, mib):
    assert spec_of(typed_name, mib * MIB) is None


@pytest.mark.parametrize("host", ["workstation", "server"])
def test_the_gpus_of_recorded_hosts_are_known_with_capability_and_slot(host):
    for card in json.loads((HOSTS / f"{host}.json").read_text())["gpus"]:
        spec = spec_of(card["name"], card["memory_total_bytes"])
        assert spec.capability == tuple(card["capability"])
        assert (spec.pcie_gen, spec.pcie_lanes) == (card["pcie"]["generation_max"], card["pcie"]["width_max"])
        assert spec.watts == card["power_limit_default_w"]


@with_rows(
    ("typed_name", "name"),
    [
        ("rtx5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("5090", "RTX 5090"),
        ("4070ti super", "RTX 4070 Ti SUPER"),
        ("rtx 4060 ti 16 gb", "RTX 4060 Ti 16GB"),
        ("a6000", "RTX A6000"),
        ("RTX PRO 4500", "RTX PRO 4500 Blackwell"),
        ("pro 6000 max-q", "RTX PRO 6000 Blackwell Max-Q"),
        ("Tesla V100-SXM2-32GB", "V100 SXM2 32GB"),
        ("h100", "H100 SXM"),  # people mean this one
        ("A100", "A100 SXM 80GB"),
        ("RTX 3060", "RTX 3060"),
        ("mi300x", "MI300X"),
        ("A100 40GB", "A100 SXM 40GB"),
        ("RTX 5090 32 GB", "RTX 5090"),
        ("T4 16GiB", "T4"),
    ],
)
def test_a_typed_name_finds_the_card(typed_name, name):
    assert find_gpu(typed_name).name == name


@with_rows(
    ("typed_name", "message", "fix"),
    [
        (
            "RTX 4060 Ti",
            "RTX 4060 Ti is the name of 2 cards: RTX 4060 Ti 8GB, RTX 4060 Ti 16GB",
            'name one of them, such as "RTX 4060 Ti 8GB"',
        ),
        (
            "pro 6000",
            "pro 6000 is the name of 3 cards: RTX PRO 6000 Blackwell Workstation, RTX PRO 6000 Blackwell Max-Q,"
            " RTX PRO 6000 Blackwell Server",
            'name one of them, such as "RTX PRO 6000 Blackwell Workstation"',
        ),
        ("RTX 5095", "no GPU called RTX 5095 is known", "the nearest known: RTX 5090"),
        ("RTX 5090 24GB", "no GPU called RTX 5090 24GB is known", "the nearest known: RTX 5090"),
        ("V100 32GB", "no GPU called V100 32GB is known", "the nearest known: V100 PCIe 32GB, V100 SXM2 32GB"),
        ("2x RTX 5090", "2x RTX 5090 is not the name of one GPU", '--gpu "RTX 5090" --gpus 2'),
        ("8xh100", "8xh100 is not the name of one GPU", '--gpu "H100 SXM" --gpus 8'),
        ("2x potato", "no GPU called potato is known", "a known card, such as RTX 4090, RTX 5090 or H100 SXM"),
        ("M3 Max", "no GPU called M3 Max is known", "a known card, such as RTX 4090, RTX 5090 or H100 SXM"),
        ("gtx 1080", "no GPU called gtx 1080 is known", "a known card, such as RTX 4090, RTX 5090 or H100 SXM"),
        (
            "RTX 4090, RTX 3090",
            "RTX 4090, RTX 3090 is not the name of one GPU",
            '--gpu "RTX 3090" --gpus 2: the ranks have equal shares, so the smallest and slowest card decides',
        ),
        ("RTX 4090 + potato", "no GPU called potato is known", "a known card, such as RTX 4090, RTX 5090 or H100 SXM"),
    ],
)
def test_an_ambiguous_or_unknown_name_is_refused_with_names_that_work(typed_name, message, fix):
    with pytest.raises(PlanError) as error:
        find_gpu(typed_name)
    assert error.value.message == message
    assert error.value.fix.startswith(fix)


def test_many_cards_of_one_name_are_counted_and_not_all_listed():
    with pytest.raises(PlanError, match=r"V100 is the name of 4 cards"):
        find_gpu("V100")
    with pytest.raises(PlanError, match=r"no GPU called +is known\n  fix: the nearest known: RTX 3060, .* and 70 more"):
        find_gpu(" ")
    with pytest.raises(PlanError, match=r"RTX is the name of 48 cards: .*, RTX 3080 Ti and 40 more"):
        find_gpu("RTX")


@with_rows(("name", "tops"), AI_TOPS.items())
def test_derived_peaks_agree_with_the_ai_tops_nvidia_prints(name, tops):
    peaks = BY_NAME[name].peak_flops
    printed = 2 * peaks["fp4"] if "fp4" in peaks else 4 * peaks["fp8"]
    assert printed == pytest.approx(tops * 1e12, rel=0.003)


@with_rows(("name", "tflops"), FP32.items())
def test_derived_peaks_agree_with_the_fp32_figures_of_the_data_sheets(name, tflops):
    assert BY_NAME[name].peak_flops["fp32"] == pytest.approx(tflops * 1e12, rel=0.025)


@with_rows(("name", "tflops"), MEASURED.items())
def test_a_peak_is_neither_far_under_nor_far_over_what_was_measured(name, tflops):
    peaks = BY_NAME[name].peak_flops
    assert 0.6 < tflops * 1e12 / peaks.get("bf16", peaks["fp16"]) < 1.2


@with_rows("gpu", [gpu for gpu in GPUS if gpu.capability])
def test_a_card_has_the_precisions_of_its_generation(gpu):
    first = {"fp8": (8, 9), "fp4": (10, 0), "bf16": (8, 0), "tf32": (8, 0)}
    assert all(gpu.capability >= first[precision] for precision in gpu.peak_flops if precision in first)
    if {"bf16", "fp8"} <= set(gpu.peak_flops):
        assert gpu.peak_flops["fp8"] == pytest.approx(2 * gpu.peak_flops["bf16"], rel=0.02)
    assert gpu.consumer == any("GeForce" in name or "TITAN" in name for name in gpu.driver_names)


def test_a_peak_that_has_no_source_is_absent():
    assert find_gpu("RTX 5090").peak_flops["bf16"] == 209.5e12
    assert "bf16" not in find_gpu("T4").peak_flops
    assert "bf16" not in find_gpu("RTX PRO 4000").peak_flops


def test_the_docs_list_every_card():
    text = " ".join((Path(__file__).parents[2] / "docs/plan.md").read_text().split())
    assert f"The cards that `--gpu` knows: {', '.join(gpu.name for gpu in gpu_table())}. " in text
