"""What each precision is on each card, what is refused with a way that works, and what low products cost in the plan."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from rows import with_rows

from paceline.config import Config, ModelConfig, check_config
from paceline.errors import PacelineError, PlanError
from paceline.plan.forecast import forecast
from paceline.plan.gpu_table import find_gpu
from paceline.plan.machine import Gpu, Machine, imagined_machine
from paceline.plan.memory import peak_phase
from paceline.plan.planner import Plan, make_plan, memory_setup
from paceline.plan.precision import (
    LowPrecision,
    code_bytes,
    gain_of,
    gain_text,
    loses,
    native_problem,
    num_last_blocks,
    precision_name,
)
from paceline.plan.speeds import Speeds

CPU = Machine(gpus=(), cpu_cores=2, cpu_bf16=True, memory_bytes=24 << 30)
SMALL = {"depth": 4, "num_steps": 100, "sequence_len": 1024}


def machine_of(name, gpus=1):
    return CPU if name == "CPU" else imagined_machine(find_gpu(name), gpus=gpus, hosts=1)


def plan_of(name, **keys) -> Plan:
    return make_plan(Config(**{**SMALL, **keys}), machine_of(name), vocab_size=4096, num_rows=0)


AUTO = "--emulate (right, but slower than 16 bits), or --precision auto"
FP8_FIRST = f"--precision fp8, or {AUTO}"

# card, keys, what the error says, the fix
REFUSALS = [
    ("CPU", {"precision": "fp8"}, "a CPU has no units for fp8", AUTO),
    ("CPU", {"precision": "mxfp4"}, "a CPU has no units for mxfp4", AUTO),
    ("RTX 3090", {"precision": "fp8"}, "fp8 products need compute capability 8.9", AUTO),
    ("RTX 4090", {"precision": "mxfp8"}, "MX blocks need", FP8_FIRST),
    ("H100", {"precision": "mxfp4"}, "no MXFP4 product", FP8_FIRST),
    ("H200", {"precision": "nvfp4"}, "NVFP4 products need compute capability 10.0, it has 9.0", FP8_FIRST),
    ("RTX 5090", {"precision": "mxfp4"}, "no MXFP4 product", FP8_FIRST),
    ("RTX 5090", {"precision": "nvfp4", "depth": 2}, "last 2 blocks stay", "--depth 3 or --precision fp8"),
    ("CPU", {"precision": "mxfp4", "emulate": True, "depth": 2}, "last 2 blocks stay", "--depth 3 or --precision fp8"),
    ("H100", {"precision": "fp8", "sequence_len": 1000}, "sequence_len is 1000, and fp8 takes", "--sequence-len 1008"),
    ("B200", {"precision": "mxfp8", "sequence_len": 1040}, "mxfp8 takes multiples of 32", "--sequence-len 1056"),
    ("CPU", {"precision": "nvfp4", "emulate": True, "sequence_len": 100}, "multiples of 16", "--sequence-len 112"),
    ("CPU", {"precision": "fp8", "emulate": True, "n_embd": 24, "head_dim": 8}, "n_embd is 24", "--n-embd 32"),
    ("CPU", {"precision": "mxfp8", "emulate": True, "n_embd": 48, "head_dim": 16}, "n_embd is 48", "--n-embd 64"),
    ("H100", {"precision": "fp8", "head_dim": 8, "n_kv_head": 1}, "keys are 8 wide (1 heads of 8)", "--n-kv-head 32"),
    ("B200", {"precision": "mxfp8", "head_dim": 16, "n_kv_head": 1}, "keys are 16 wide", "--n-kv-head 16"),
]  # fmt: skip


@with_rows("card, keys, says, fix", REFUSALS)
def test_what_a_card_cannot_compute_is_refused_with_ways_that_give_a_plan(card, keys, says, fix):
    with pytest.raises(PlanError) as error:
        plan_of(card, **keys)
    assert says in error.value.message
    assert error.value.fix == fix
    for way in re.split(r",? or ", re.sub(r" \(.*\)", "", fix)):
        flag, *value = shlex.split(way)
        key = flag.removeprefix("--").replace("-", "_")
        text = value[0] if value else None
        changed = True if text is None else None if text == "auto" else int(text) if text.isdigit() else text
        assert plan_of(card, **{**keys, key: changed}).num_steps == 100


@pytest.mark.parametrize("keys, says", [
    ({"emulate": True}, "emulate is set, but precision is auto"),
    ({"emulate": True, "precision": "bf16"}, "emulate is set, but precision is bf16"),
    ({"bf16_finish": 0.1, "precision": "fp32"}, "bf16_finish is set, but precision is fp32"),
    ({"bf16_finish": 0.1}, "bf16_finish is set, but precision is auto"),
    ({"emulate": True, "bf16_finish": 0.1, "precision": "bf16"}, "emulate and bf16_finish are set, but precision is bf16"),
])  # fmt: skip
def test_keys_about_low_precision_need_one(keys, says):
    with pytest.raises(PacelineError, match=says) as error:
        check_config(Config(**keys))
    first, off = error.value.fix.split(", or ")
    off_keys = {"--no-emulate": {"emulate": False}, "--bf16-finish 0": {"bf16_finish": 0.0}}
    check_config(Config(**keys | {"precision": first.split()[1]}))
    check_config(
        Config(**keys | {key: value for flag, way in off_keys.items() if flag in off for key, value in way.items()})
    )


@pytest.mark.parametrize("card, native", [
    ("RTX 3090", ()), ("A100 80GB", ()), ("RTX 4090", ("fp8",)), ("L40S", ("fp8",)), ("H100", ("fp8",)), ("H200", ("fp8",)),
    ("B200", ("fp8", "mxfp8", "nvfp4")), ("RTX 5090", ("fp8", "mxfp8", "nvfp4")),
])  # fmt: skip
def test_cards_have_the_formats_of_their_generation(card, native):
    gpu = machine_of(card).gpus[0]
    assert tuple(name for name in ("fp8", "mxfp8", "mxfp4", "nvfp4") if native_problem(name, gpu) is None) == native
    for name in native:
        plan = plan_of(card, precision=name)
        assert plan.low_precision == LowPrecision(name, False, 2 if name == "nvfp4" else 4)
        assert plan.precision == "bf16"
        assert Plan.from_json(plan.to_json()) == plan


def test_a_card_that_the_driver_does_not_describe_is_left_to_the_trial_at_the_start():
    unknown = replace(CPU, gpus=(Gpu(0, "new card", 80 << 30, None),))
    assert make_plan(Config(**SMALL, precision="fp8"), unknown, vocab_size=4096, num_rows=0).low_precision


def test_the_last_blocks_of_four_bit_runs_stay_in_16_bits():
    assert [num_last_blocks(depth) for depth in (3, 12, 13, 14, 20, 40)] == [2, 2, 2, 3, 3, 6]
    plan = plan_of("CPU", precision="nvfp4", emulate=True, depth=6)
    assert plan.low_precision == LowPrecision("nvfp4", True, 4)
    assert precision_name(plan.precision, plan.low_precision) == "bf16 with emulated nvfp4 products"
    assert plan.notes == (
        "nvfp4 is emulated: right, and slower than 16 bits",
        "nvfp4 in the first 4 of 6 blocks, the others stay in 16 bits",
    )
    finished = plan_of("B200", precision="mxfp8", bf16_finish=0.1)
    assert finished.notes[1:] == ("the last 10 % of the steps are without mxfp8",)


def test_what_a_plan_would_gain_without_fp8_is_one_of_its_levers(tmp_path):
    def helps(depth):
        config = Config(depth=depth, num_steps=100, precision="fp8")
        facts = forecast(config, machine_of("RTX 5090"), cache=tmp_path, vocab_size=32_768, num_rows=0)
        return {lever.what: lever.gain for lever in facts.levers}

    assert helps(12)["--precision auto"] == pytest.approx(1 / 0.70 - 1, abs=0.02)
    assert "--precision auto" not in helps(20)


def test_a_cpu_without_bf16_units_computes_all_else_in_fp32():
    config = Config(**SMALL, precision="fp8", emulate=True)
    assert make_plan(config, replace(CPU, cpu_bf16=False), vocab_size=4096, num_rows=0).precision == "fp32"


def test_codes_of_weights_are_kept_both_ways_where_a_transpose_has_other_codes():
    model = ModelConfig(4, 256, 2, 2, 128, 1024, 4096)
    values = 4 * 12 * 256 * 256
    for name, emulated, device, bytes_a_value in (
        ("fp8", False, "cuda", 2), ("mxfp8", False, "cuda", 2 * 8.25 / 8), ("nvfp4", False, "cuda", 2 * 4.5 / 8),
        ("fp8", True, "cuda", 2), ("mxfp8", True, "cuda", 4), ("mxfp4", True, "cpu", 8), ("nvfp4", True, "cpu", 4),
    ):  # fmt: skip
        assert code_bytes(LowPrecision(name, emulated, 4), model, device=device) == int(bytes_a_value * values)


def test_low_products_take_memory_that_the_plan_counts():
    setup = memory_setup(plan_of("H100", precision="bf16", device_batch_size=8))
    low = replace(setup, low_precision=LowPrecision("fp8", False, 4))
    codes = code_bytes(low.low_precision, setup.model, device="cuda")
    assert peak_phase(low).parts["weights"] - peak_phase(setup).parts["weights"] == codes
    sharded = replace(low, shard="full", world_size=2)
    assert peak_phase(sharded).parts["weights"] == peak_phase(replace(sharded, low_precision=None)).parts["weights"]


def gain(width, name="fp8", *, emulated=False, speeds=None):
    model = ModelConfig(4, width, width // 128, width // 128, 128, 1024, 4096)
    return gain_of(LowPrecision(name, emulated, 3), model, precision="bf16", speeds=speeds)


def test_only_measured_gains_are_expected():
    assert [gain(width).step[1] for width in (512, 1024, 2048)] == [0.70, 1.10, 1.12]
    assert not gain(2048, emulated=True).is_known and not gain(2048, "nvfp4").is_known
    assert plan_of("H100", precision="fp8").notes == ("fp8 gains nothing below 1,024 wide, and the model is 256 wide",)
    assert "experiment" in plan_of("B200", precision="nvfp4").notes[0]


def test_what_this_card_showed_replaces_what_others_measured():
    rates = {"linear bf16": ((1024.0, 100e12), (2048.0, 120e12)), "linear fp8": ((1024.0, 90e12), (2048.0, 180e12))}
    speeds = Speeds("RTX 5090", 1, 1, rates, {}, "measured")
    assert [gain(width, speeds=speeds).products for width in (1024, 2048)] == [0.9, 1.5]
    assert gain(2048, "nvfp4", speeds=speeds).products is None
    faster = gain(2048, speeds=speeds)
    assert (
        faster.spread == 0 and faster.note == "fp8 products: 1.50 times as fast as bf16 at 2,048 wide, as measured here"
    )
    # three of four layers
    assert faster.applied({"matmuls": 12.0, "attention": 5.0}) == {"matmuls": pytest.approx(9.0), "attention": 5.0}


def test_matrices_that_fp8_does_not_make_faster_stay_in_16_bits():
    gains = {"attn.c_q": 1.019, "attn.c_k": 0.8, "mlp.c_fc": 1.02}
    fp8, nvfp4 = LowPrecision("fp8", False, 4), LowPrecision("nvfp4", False, 4)
    assert loses(fp8, gains) == ("attn.c_q", "attn.c_k")
    assert loses(fp8, None) == loses(nvfp4, gains) == loses(None, gains) == ()
    assert gain_text(gains) == "1.02 attn.c_q, mlp.c_fc; 0.80 attn.c_k".replace(
        "attn.c_q, mlp.c_fc", "mlp.c_fc, attn.c_q"
    )


def test_the_page_s_table_is_what_the_plan_decides():
    page = (Path(__file__).parents[2] / "docs" / "precision.md").read_text().partition("## What it gains")[0]
    cards = {"8.0, 8.6": "RTX 3090", "8.9": "RTX 4090", "9.0": "H100", "10.0": "B200", "12.0": "RTX 5090", "CPU": "CPU"}
    rows = {
        cells[0]: cells[1:] for line in page.splitlines() if (cells := [c.strip() for c in line.strip("|").split("|")])
    }
    header = rows["precision"]
    assert [re.sub(r"^.*\((.*)\)$", r"\1", text) for text in header] == list(cards)
    for name in ("fp8", "mxfp8", "mxfp4", "nvfp4"):
        gpus = [machine_of(card).gpus[0] if card != "CPU" else None for card in cards.values()]
        assert rows[name] == ["emulated" if native_problem(name, gpu) else "native" for gpu in gpus]
