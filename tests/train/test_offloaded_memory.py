"""plan/memory.py against a trace of two steps of a GPU's rank with `--offload optimizer`."""

import pytest
from real_steps import setup_of
from rows import mostly_soak

from paceline.plan.memory import fullest_state, peak_phase, phases, staging_bytes
from paceline.train import offload
from paceline.train.exact import trace_steps

GPU = {"device": "cuda", "sequence_len": 256, "device_batch_size": 1, "window_pattern": "L", "offload": "optimizer"}
SETUPS = {
    "muon, bf16": setup_of(depth=6, **GPU, precision="bf16"),
    "muon, fp32": setup_of(depth=4, **GPU),
    "AdamW, bf16, two micro-steps": setup_of(depth=6, **GPU, precision="bf16", optimizer="adamw", grad_accum_steps=2),
    "AdamW, fp16": setup_of(depth=3, **GPU, precision="fp16", optimizer="adamw", vocab_size=32_768),
    "two ranks": setup_of(depth=6, **GPU, precision="bf16", world_size=2),
    "two ranks, weights sharded": setup_of(depth=4, **GPU, precision="bf16", world_size=2, shard="full"),
    "four ranks, weights sharded, fp32": setup_of(depth=4, **GPU, world_size=4, shard="full", vocab_size=8192),
}
LONG = {"muon, bf16", "two ranks", "four ranks, weights sharded, fp32"}
# at their peaks; the trace sees no more of a forward than of the loss
PLANNED = ("backward", "optimizer", "evaluation")


@pytest.mark.parametrize("name", mostly_soak(SETUPS, short={*SETUPS} - LONG))
def test_traced_bytes_are_those_of_the_closed_form(name):
    setup = SETUPS[name]
    traced, planned = trace_steps(setup).peaks, {phase.name: phase.bytes for phase in phases(setup)}
    assert max(traced.values()) == pytest.approx(peak_phase(setup).bytes, rel=0.03)
    assert {phase: traced[phase] for phase in PLANNED} == pytest.approx(
        {phase: planned[phase] for phase in PLANNED}, rel=0.03
    )
    assert traced["setup"] < max(traced.values())  # masters and states are made on the host


@pytest.mark.parametrize("fault", ["another buffer", "masters and states counted"])
def test_other_bytes_are_noticed(fault, monkeypatch):
    setup = SETUPS["AdamW, fp16"]
    planned = next(phase.bytes for phase in phases(setup) if phase.name == "optimizer")
    if fault == "another buffer":
        monkeypatch.setattr(offload, "NUM_BUFFERS", offload.NUM_BUFFERS + 1)
        more = staging_bytes(setup) // 3
    else:
        monkeypatch.setattr("paceline.train.exact.LiveBytes.leave_out", lambda live, tensor: tensor)
        more = fullest_state(setup).on_host
    traced = trace_steps(setup).peaks["optimizer"]
    assert traced != pytest.approx(planned, rel=0.03)
    assert traced == pytest.approx(planned + more, rel=0.03)
