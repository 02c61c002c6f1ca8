"""What "auto" becomes, and what is refused before anything starts."""

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.command_line import parse
from paceline.config import Config
from paceline.errors import PlanError
from paceline.options import TrainOptions
from paceline.plan.forecast import format_plan
from paceline.plan.gpu_table import find_gpu
from paceline.plan.machine import Gpu, Machine, imagined_machine
from paceline.plan.planner import Plan, grad_accum_steps, make_plan
from paceline.plan.sizing import DoesNotFit

LAPTOP = Machine(gpus=(), cpu_cores=2, cpu_bf16=True, memory_bytes=24 << 30)
TWO_5090 = Machine(
    gpus=tuple(Gpu(i, "NVIDIA GeForce RTX 5090", 32_607 << 20, (12, 0), find_gpu("RTX 5090")) for i in range(2)),
    cpu_cores=32,
    cpu_bf16=False,
    memory_bytes=128 << 30,
)
TINY = Config(depth=4, n_embd=256, head_dim=64, sequence_len=256, total_batch_size=12_288, num_steps=10)


def plan(config: Config, machine: Machine = LAPTOP, *, num_rows: int = 1000) -> Plan:
    return make_plan(config, machine, vocab_size=4096, num_rows=num_rows)


def test_a_batch_that_does_not_divide_names_the_nearest_that_do():
    with pytest.raises(PlanError) as error:
        grad_accum_steps(500_000, device_batch_size=16, sequence_len=2048, world_size=8)
    assert error.value.fix == "set total_batch_size to 524,288 or 262,144"


def test_a_batch_that_does_not_divide_first_names_what_keeps_its_steps():
    with pytest.raises(PlanError) as error:
        grad_accum_steps(16_384, device_batch_size=64, sequence_len=256, world_size=2)
    assert error.value.fix == (
        "--device-batch-size 32, same total_batch_size; or set total_batch_size to 32,768; or --nproc 1, one process in place of 2"
    )


def test_a_batch_smaller_than_one_row_a_device_names_the_smallest_that_works():
    with pytest.raises(PlanError) as error:
        plan(replace(TINY, total_batch_size=100))
    assert error.value.fix == "set total_batch_size to 512"


@pytest.mark.parametrize("nproc", [1, 2, 3, 4, 6])
def test_the_tiny_batch_divides_over_any_small_number_of_processes(nproc):
    planned = plan(replace(TINY, nproc=nproc))
    assert planned.device_batch_size * planned.grad_accum_steps * nproc * 256 == 12_288
    assert planned.device_batch_size * 256 <= 2048


@pytest.mark.parametrize("card", ["RTX 4090", "H100"])
def test_the_automatic_batch_fills_more_than_half_of_what_fits_on_any_number_of_gpus(card):
    for depth, gpus in itertools.product((4, 8, 12, 16, 20, 24), range(1, 17)):
        planned = plan(Config(depth=depth), imagined_machine(find_gpu(card), gpus=gpus, hosts=1))
        rows = planned.device_batch_size * planned.grad_accum_steps
        micro_batches = [count for count in range(1, rows + 1) if rows % count == 0]
        assert all(larger <= 2 * smaller for smaller, larger in itertools.pairwise(micro_batches)), (gpus, depth, rows)
        if gpus == 1:
            all_rows = rows  # a power of two
        assert abs(rows - all_rows / gpus) < 1.5 + all_rows / gpus / 10, (gpus, depth, rows)


def test_without_a_gpu_two_processes_run_on_the_cpu_in_bf16_where_it_has_it():
    cpu = plan(TINY)
    assert (cpu.device, cpu.world_size, cpu.threads, cpu.precision, cpu.peak_flops) == ("cpu", 2, 1, "bf16", None)
    assert plan(TINY, replace(LAPTOP, cpu_bf16=False)).precision == "fp32"


def test_with_gpus_every_one_is_used_with_windows_and_a_known_peak():
    planned = plan(Config(depth=12, num_steps=5), TWO_5090)
    assert (planned.device, planned.world_size, planned.precision) == ("cuda", 2, "bf16")
    assert (planned.model.window_pattern, planned.peak_flops) == ("SSSL", 209.5e12)


WIDE = {"head_dim": 256, "n_embd": 768}


@pytest.mark.parametrize(
    ("gpu", "keys", "choices", "kernel"),
    [
        ("RTX 5090", {}, ("cudnn", "flash", "flex", "sdpa"), "flash"),
        ("H100", {}, ("fa3", "cudnn", "flash", "flex", "sdpa"), "flash"),
        ("H100", {"window_pattern": "L"}, ("fa3", "cudnn", "flash", "sdpa"), "flash"),
        ("H100", {"deterministic": True}, ("fa3", "flash", "flex", "sdpa"), "flash"),
        ("H100", {"sequence_len": 1000}, ("fa3", "flash", "flex", "sdpa"), "flash"),
        ("RTX 5090", WIDE, ("flash", "sdpa"), "flash"),  # FlexAttention's backward does not fit
        ("A100", WIDE, ("flash", "flex", "sdpa"), "flash"),
        ("RTX 4090", {"head_dim": 200, "n_embd": 800}, ("flex", "sdpa"), "flash"),
        ("RTX 5090", {"precision": "fp32"}, ("flex", "sdpa"), "flash"),
        ("RTX 5090", {"precision": "fp32", **WIDE}, ("sdpa",), "efficient"),
        ("T4", {"precision": "fp16", "window_pattern": "L", "n_kv_head": 1}, ("sdpa",), "math"),
    ],
)
def test_the_ways_of_attention_are_those_that_the_card_can_take(gpu, keys, choices, kernel):
    planned = plan(Config(depth=12, num_steps=5, **keys), imagined_machine(find_gpu(gpu), gpus=1, hosts=1))
    assert planned.attention_choices == choices
    # flash kernels are tried where the run is; what is left to choose without them is not
    assert planned.attention == (None if "flash" in choices else choices[0])
    assert planned.attention_kernel == kernel
    assert Plan.from_json(planned.to_json()) == planned


@pytest.mark.parametrize(
    ("gpu", "keys", "message"),
    [
        ("RTX 5090", {"attention": "flex", **WIDE}, "does not fit the shared memory of compute capability 12"),
        ("RTX 5090", {"attention": "fa3"}, "FlashAttention 3 is for compute capability 9.0"),
        ("H100", {"attention": "cudnn", "deterministic": True}, "cuDNN's backward adds in any order"),
        ("H100", {"attention": "flash", "precision": "fp32"}, "flash kernels are for bf16 and fp16"),
    ],
)
def test_a_way_of_attention_that_cannot_be_taken_is_refused(gpu, keys, message):
    with pytest.raises(PlanError) as error:
        plan(Config(depth=12, num_steps=5, **keys), imagined_machine(find_gpu(gpu), gpus=1, hosts=1))
    assert message in error.value.message
    assert error.value.fix.startswith("--attention ")


def test_a_way_of_attention_that_is_set_is_taken():
    masks = plan(Config(depth=12, num_steps=5, attention="sdpa"), TWO_5090)
    assert (masks.attention, masks.attention_choices, masks.attention_kernel) == ("sdpa", ("sdpa",), "efficient")
    assert plan(TINY).attention == "sdpa"
    with pytest.raises(PlanError, match="it is for GPUs"):
        plan(replace(TINY, attention="flash"))


def test_the_depth_dial_sets_width_heads_batch_and_length():
    planned = plan(Config(depth=12), TWO_5090)
    assert (planned.model.n_embd, planned.model.n_head, planned.total_batch_size) == (768, 6, 524_288)
    assert planned.num_steps == round(12 * (12 * 12 * 768**2 + 4096 * 768 + 6 * 6 * 12) / 524_288)


def test_epochs_become_steps_that_cover_every_row():
    planned = plan(replace(TINY, num_steps=None, epochs=3.0), num_rows=1000)
    assert planned.num_steps == -(-3000 // 48)


@pytest.mark.parametrize(
    ("changes", "machine", "message", "fix"),
    [
        ({"device": "cuda"}, LAPTOP, "no GPU is visible here", "--device cpu"),
        ({"nproc": 3}, TWO_5090, "nproc is 3, but 2 GPUs are visible", "--nproc 2"),
        ({"nproc": 100}, LAPTOP, "this machine has 2 cores", "--nproc 2"),
        ({"n_embd": 200}, LAPTOP, "n_embd 200 is not a multiple of head_dim 64", "--n-embd 256 or 192"),
        ({"n_kv_head": 3}, LAPTOP, "n_kv_head 3 does not divide 4 heads", "one of 1, 2, 4"),
        ({"head_dim": 65, "n_embd": 260}, LAPTOP, "head_dim 65 is odd", "--head-dim 66"),
    ],
)
def test_an_impossible_plan_is_refused_with_a_possible_one(changes, machine, message, fix):
    with pytest.raises(PlanError) as error:
        plan(replace(TINY, **changes), machine)
    assert message in error.value.message
    assert fix in error.value.fix


CONFIGS = st.fixed_dictionaries(
    {"depth": st.integers(1, 48)},
    optional={
        "n_embd": st.sampled_from([192, 512, 1000, 4096]),
        "head_dim": st.sampled_from([64, 65, 128]),
        "n_kv_head": st.integers(1, 5),
        "sequence_len": st.sampled_from([256, 1000, 2048, 16_384]),
        "total_batch_size": st.sampled_from([1000, 12_288, 2**17, 2**19, 2**21]),
        "device_batch_size": st.sampled_from([1, 3, 8, 64, 512]),
        "memory_share": st.floats(0.05, 1.0),
        "profile": st.sampled_from(["conservative", "aggressive"]),
        "activation_checkpointing": st.booleans(),
        "logits_mib": st.sampled_from([64, 4096]),
        "nproc": st.integers(1, 20),
        "device": st.sampled_from(["cuda", "cpu"]),
        "precision": st.sampled_from(["bf16", "fp32"]),
    },
)
MACHINES = st.one_of(
    st.builds(Machine, st.just(()), st.integers(1, 16), st.booleans(), st.sampled_from([2 << 30, 8 << 30, 24 << 30])),
    st.builds(
        lambda card, gpus: imagined_machine(find_gpu(card), gpus=gpus, hosts=1),
        st.sampled_from(["RTX 3060", "RTX 4090", "RTX 5090", "H100", "V100 PCIe 16GB"]),
        st.integers(1, 4),
    ),
)


@settings(max_examples=10)
@given(keys=CONFIGS, machine=MACHINES)
def test_the_flags_of_a_fix_applied_as_they_are_written_give_a_plan(keys, machine):
    config = Config(**{"num_steps": 5, **keys})
    try:
        make_plan(config, machine, vocab_size=config.vocab_size, num_rows=0)
    except PlanError as error:
        fix = error.fix
    else:
        return
    if fix.startswith("--"):
        flags = re.match(r"(--[a-z-]+( \w*[\d.]*\b)? ?)+?(?= needs| or |,|$)", fix)
        assert flags, fix
        changed = parse(flags[0].split(), command="train", options=TrainOptions).keys
    else:
        options = re.fullmatch(r"set (\w+) to ([\d,]+).*|one of (\d+).*", fix)
        assert options or fix == "a device with more memory, or a smaller model", fix
        name, number = (options[1] or "n_kv_head", options[2] or options[3]) if options else ("", "0")
        changed = {name: int(number.replace(",", ""))} if options else None
    if changed is not None:
        config = replace(config, **changed)
        make_plan(config, machine, vocab_size=config.vocab_size, num_rows=0)


def test_a_refusal_shows_parts_that_add_up_to_what_is_needed():
    with pytest.raises(DoesNotFit) as error:
        make_plan(Config(depth=16, num_steps=5), LAPTOP, vocab_size=32_768, num_rows=0)
    need, *parts = (
        float(number) * {"MiB": 1 / 1024, "GiB": 1}[unit]
        for number, unit in re.findall(r"([\d.]+) (MiB|GiB)(?! to|\) needed| may be used)", error.value.message)
    )
    assert parts and sum(parts) == pytest.approx(error.value.estimate.process.expected / 2**30, rel=0.03)
    assert need == pytest.approx(error.value.estimate.process.expected / 2**30, rel=0.03)


def test_bf16_on_a_card_without_it_is_refused():
    volta = replace(TWO_5090, gpus=(Gpu(0, "Tesla V100", 16 << 30, (7, 0)),))
    with pytest.raises(PlanError) as error:
        plan(replace(TINY, precision="bf16"), volta)
    assert error.value.fix == "--precision fp16"
    fp32 = plan(TINY, volta)
    assert (fp32.precision, fp32.peak_flops) == ("fp32", None)  # its name is in no table


def test_the_screen_shows_the_batch_arithmetic():
    lines = format_plan(plan(TINY), source="builtin")
    assert lines[2] == "step    12,288 tokens = 8 rows x 256 tokens x 2 processes x 3 micro-steps"


@pytest.mark.parametrize(
    ("num_rows", "epochs"), [(4800, "1 epochs"), (1920, "2.5 epochs"), (3, "1,600 epochs: more than about")]
)
def test_the_length_says_how_often_the_text_is_repeated(num_rows, epochs):
    lines = format_plan(replace(plan(TINY), num_steps=100, num_rows=num_rows), source="x")
    assert f" tokens, {epochs}" in lines[3]


def test_a_length_that_is_a_time_is_measured_at_the_start():
    made = plan(replace(TINY, num_steps=None, time="2m"))
    assert (made.num_steps, made.time) == (60, "2m")  # the fewest, as long as no speed is known
    assert "length  as many steps as 2m allows, measured at the start" in format_plan(made, source="x")
    assert (plan(TINY).time, plan(TINY).num_steps) == (None, 10)


@pytest.mark.parametrize(("time", "machine", "compiled"), [
    ("2m", LAPTOP, False), ("2m", TWO_5090, False), ("8h", LAPTOP, None), ("8h", TWO_5090, None),
])  # fmt: skip
def test_a_short_run_is_not_compiled(time, machine, compiled):
    assert plan(Config(depth=12, time=time), machine).compile is compiled
