"""The trial that decides which products are in fp8: what it measures, what plan.json keeps of it, and what it refuses."""

import traceback
from dataclasses import replace

import pytest
import torch

from paceline.config import Config
from paceline.errors import PacelineError
from paceline.explain.catalogue import load_catalogue
from paceline.explain.run_folder import explain, explain_run
from paceline.plan.gpu_table import find_gpu
from paceline.plan.machine import imagined_machine
from paceline.plan.planner import Plan, make_plan
from paceline.plan.replan import replan
from paceline.plan.shapes import layer_matrices
from paceline.rundir import RunDir
from paceline.train import product_trial, setup
from paceline.train.process import write_error
from paceline.train.product_trial import choose_products, low_linear_rate, measure_gains, product_piece, seconds_of

CPU = torch.device("cpu")
KEYS = {
    "depth": 2,
    "n_embd": 64,
    "head_dim": 32,
    "sequence_len": 64,
    "device_batch_size": 2,
    "num_steps": 4,
    "n_kv_head": 1,
}
MACHINE = imagined_machine(find_gpu("RTX 5090"), gpus=1, hosts=1)
FASTER_MLP = {"attn.c_q": 0.9, "attn.c_k": 0.7, "attn.c_v": 0.7, "attn.c_proj": 0.9, "mlp.c_fc": 1.3, "mlp.c_proj": 1.2}


def plan_of(config: Config, machine=MACHINE) -> Plan:
    return make_plan(config, machine, vocab_size=512, num_rows=100)


def config_of(precision="fp8", **keys):
    return Config(**KEYS | keys, precision=precision, vocab_size=512)


@pytest.fixture
def tried(monkeypatch):
    """A card whose products are right, and as fast as FASTER_MLP says."""
    monkeypatch.setattr(product_trial, "product_problem", lambda name, device: None)
    monkeypatch.setattr(product_trial, "forget_peaks", lambda device: None)
    monkeypatch.setattr(product_trial, "measure_gains", lambda plan, device: dict(FASTER_MLP))


def test_every_matrix_is_measured_in_both_precisions():
    """A CPU's own product of fp8 is one that can be timed."""
    plan = plan_of(config_of())
    gains = measure_gains(plan, CPU)
    assert list(gains) == list(layer_matrices(plan.model)) and all(0.001 < gain < 100 for gain in gains.values())
    assert gains["attn.c_k"] == gains["attn.c_v"]  # of one shape
    assert low_linear_rate(64, 128, "fp8", device=CPU) > 0


def test_a_piece_multiplies_forward_and_backward_with_weights_that_are_quantized_already(monkeypatch):
    calls = []
    product = product_trial.Linear.quantize
    monkeypatch.setattr(product_trial.Linear, "quantize", lambda layer: calls.append(layer) or product(layer))
    piece = product_piece((32, 64), 96, "fp8", dtype=torch.bfloat16, device=CPU)
    assert len(calls) == 1
    assert seconds_of(piece, CPU) > 0 and len(calls) == 1


def test_matrices_that_lose_stay_in_16_bits_and_the_answer_holds_for_the_run(tried):
    plan, notes = choose_products(plan_of(config_of()), CPU)
    assert notes == [
        "fp8 products, times as fast as in bf16: 1.30 mlp.c_fc; 1.20 mlp.c_proj; 0.90 attn.c_q, attn.c_proj;"
        " 0.70 attn.c_k, attn.c_v; in 16 bits: attn.c_q, attn.c_k, attn.c_v, attn.c_proj"
    ]
    kept = Plan.from_json(plan.to_json())
    assert kept.product_gains == FASTER_MLP and choose_products(kept, CPU) == (kept, [])
    model = setup.make_model(replace(kept, device="cpu", attention="sdpa"), seed=1, device=CPU)
    assert [layer for layer, part in model.named_modules() if getattr(part, "recipe", None)] == [
        f"h.{layer}.mlp.{name}" for layer in (0, 1) for name in ("c_fc", "c_proj")
    ]
    again = replan(kept, config_of(), MACHINE, make=plan_of)
    assert again.product_gains == FASTER_MLP
    other = replan(kept, config_of("mxfp8"), MACHINE, make=plan_of, set_keys=frozenset({"precision"}))
    assert other.product_gains is None


def test_fp8_that_makes_nothing_faster_is_refused_with_its_figures(tried, monkeypatch):
    monkeypatch.setattr(product_trial, "measure_gains", lambda plan, device: dict.fromkeys(FASTER_MLP, 0.8))
    with pytest.raises(
        PacelineError, match="fp8 is slower than bf16 on NVIDIA GeForce RTX 5090 in every product.*0.80 attn.c_q"
    ) as refused:
        choose_products(plan_of(config_of()), CPU)
    assert refused.value.fix == "--precision auto, or a wider model"


def test_formats_that_are_experiments_are_measured_and_kept_whatever_they_cost(tried):
    plan, notes = choose_products(plan_of(config_of("mxfp8")), CPU)
    assert notes[0].startswith("mxfp8 products, times as fast as in bf16: 1.30") and "in 16 bits" not in notes[0]
    assert plan.product_gains == FASTER_MLP


def test_products_that_are_wrong_on_the_card_end_the_run(monkeypatch):
    monkeypatch.setattr(
        product_trial, "product_problem", lambda name, device: "its dW is 1 off the emulation's, all zeros"
    )
    with pytest.raises(
        PacelineError, match="fp8 products do not work on NVIDIA GeForce RTX 5090 with PyTorch .*all zeros"
    ):
        choose_products(plan_of(config_of()), CPU)


def test_emulated_products_are_not_tried():
    plan = plan_of(Config(**KEYS | {"depth": 4}, precision="nvfp4", emulate=True, vocab_size=512))
    assert choose_products(plan, CPU) == (plan, [])


def refused_here(monkeypatch, gains, precision) -> PacelineError:
    """The error of the trial: with gains, that fp8 is too slow; else that this CPU's torch has no product of blocks."""
    if gains:
        monkeypatch.setattr(product_trial, "product_problem", lambda name, device: None)
        monkeypatch.setattr(product_trial, "forget_peaks", lambda device: None)
        monkeypatch.setattr(product_trial, "measure_gains", lambda plan, device: gains)
    with pytest.raises(PacelineError) as refused:
        choose_products(plan_of(config_of(precision, **({"depth": 4} if precision == "nvfp4" else {}))), CPU)
    return refused.value


@pytest.mark.parametrize(
    ("precision", "gains", "fix"),
    [
        ("fp8", dict.fromkeys(FASTER_MLP, 0.8), "use `--precision auto`, or a wider model"),
        ("mxfp8", None, "use `--precision auto`, or --emulate for an experiment"),
        ("nvfp4", None, "use `--precision auto`, or --emulate for an experiment"),
    ],
)
def test_what_the_trial_refuses_is_explained_and_not_retried(precision, gains, fix, monkeypatch, tmp_path):
    error, run = refused_here(monkeypatch, gains, precision), RunDir(tmp_path / "run")
    log = run.rank_log(1, 0)
    log.parent.mkdir(parents=True)
    run.config_toml.write_text("depth = 4\n")
    log.write_text("".join(traceback.format_exception(error)))
    alone = explain(log)
    assert alone.cause == "low-precision-unsupported" and alone.fix.startswith(fix)
    assert load_catalogue().causes[alone.cause].retry == "never"
    write_error(run, error, attempt=1, rank=0)
    explanation = explain_run(run)
    assert (explanation.cause, explanation.summary, explanation.fix) == (alone.cause, error.message, error.fix)
