"""
Speeds of a GPU that nobody has measured, from its data sheet and from what such cards were seen to reach.

Products: what is left of published runs once the other parts are taken off. On an H100 nanochat reaches 39.8 % (d8), 41.9 % (d12
SSSL), 46 % (d12 L), 46 % (d18) and 50 % (d24) of the dense bf16 peak. Cards with fewer FLOPs for each byte of bandwidth come
closer to theirs: d20 80 % on a 4090, 74 % on an A100, d12 84 % on a 4070 (GeForce cards also clock above the data sheet).
tests/plan/test_step_time.py holds the model against each of these.
"""

from dataclasses import replace

from paceline.plan.gpus import GpuSpec
from paceline.plan.speeds import Speeds

MANY_FLOPS_PER_BYTE = 200  # dense bf16: H100 295, H200 206, L40S 419; A100 153, 4090 164, 5090 117
PEAK_SHARE = {  # of the dense peak, by the layer's width
    "many FLOPs per byte": ((256, 0.50), (512, 0.68), (768, 0.70), (1280, 0.71), (2048, 0.72)),
    "few FLOPs per byte": ((256, 0.75), (512, 0.88), (768, 0.93), (1280, 0.95), (2048, 0.95)),
}
ATTENTION_SHARE = {
    "many FLOPs per byte": 0.35,
    "few FLOPs per byte": 0.75,
}  # of the peak, on the pairs that are computed
NEWTON_SCHULZ_SHARE = 0.4
BANDWIDTH_SHARE = 0.8
LAYER_BYTES = {"compiled": 60, "eager": 157}  # passes over the residual stream, times its element's bytes
LOGIT_BYTES = {"compiled": 16, "eager": 80}
ADAMW_BYTES = 34  # weight, gradient, two moments in fp32, each read and written; and the bf16 weight
TABLE_BYTES = 12
HOST_S = {"compiled": 150e-6, "eager": 1200e-6}  # of a layer, forward and backward
MICRO_STEP_HOST_S = 2e-3
SPREAD = {"compiled": 0.15, "eager": 0.25}
FEW_RUNS_SPREAD = 0.05  # more, for cards of which few runs are published, and those by other trainers


def assumed_speeds(spec: GpuSpec, *, precision: str, compiled: bool) -> Speeds | None:
    """None where the table has no peak for this precision."""
    peak = spec.peak_flops.get(precision)
    if peak is None:
        return None
    how = "compiled" if compiled else "eager"
    many = spec.peak_flops.get("bf16", peak) / spec.bytes_per_s > MANY_FLOPS_PER_BYTE
    kind = "many FLOPs per byte" if many else "few FLOPs per byte"
    bandwidth, element = BANDWIDTH_SHARE * spec.bytes_per_s, 4 if precision == "fp32" else 2
    shares = PEAK_SHARE[kind]
    linear = tuple((float(width), share * peak) for width, share in shares)
    muon_peak = spec.peak_flops.get("bf16", spec.peak_flops.get("fp32", peak))

    def flat(rate: float) -> tuple[tuple[float, float], ...]:
        return ((1.0, rate),)

    rates = {
        f"linear {precision}": linear,
        f"attention_dots {precision}": flat(ATTENTION_SHARE[kind] * peak),
        f"pointwise {precision}": flat(bandwidth / (LAYER_BYTES[how] * element)),
        f"head {precision}": linear,
        f"logits {precision}": flat(bandwidth / LOGIT_BYTES[how]),
        "muon": flat(NEWTON_SCHULZ_SHARE * muon_peak),
        "muon_long": flat(NEWTON_SCHULZ_SHARE * muon_peak),
        "adamw": flat(bandwidth / ADAMW_BYTES),
        "table": flat(bandwidth / TABLE_BYTES),
        "copy": flat(bandwidth),
    }
    reached = f"{shares[0][1]:.0%} to {shares[-1][1]:.0%}"
    source = (
        f"products at {reached} of {spec.name}'s {peak / 1e12:.4g} TFLOPS by width, the rest at {BANDWIDTH_SHARE:.0%}"
        f" of {spec.bytes_per_s / 1e9:,.0f} GB/s: as published runs on cards with {kind}"
    )
    host = {"layer": HOST_S[how], "micro_step": MICRO_STEP_HOST_S, "update": 0.0}
    spread = SPREAD[how] + (0.0 if many else FEW_RUNS_SPREAD)
    return Speeds(spec.name, 1, 1, rates, host, source, spread=spread)


def with_fused_ops(measured: Speeds, *, precision: str) -> Speeds:
    """What was measured of a GPU's single ops, for a compiled model: fused ones wait for memory alone."""
    copy, element = measured.rate("copy"), 4 if precision == "fp32" else 2
    if copy is None:
        return measured
    rates = {
        **measured.rates,
        f"pointwise {precision}": ((1.0, copy / (LAYER_BYTES["compiled"] * element)),),
        f"logits {precision}": ((1.0, copy / LOGIT_BYTES["compiled"]),),
    }
    return replace(measured, rates=rates, host={**measured.host, "layer": HOST_S["compiled"]})
