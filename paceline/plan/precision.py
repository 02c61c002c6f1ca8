"""
Precisions: what a device computes natively, and products in 8 and 4 bits: for which layers, in which memory, with which gain.

A format is native where the hardware has units for it and PyTorch's scaled product calls them with both operands contiguous along
the dim of the sum, which is how model/linear.py calls it; the worker compares each one with its emulation before the first step.
Everywhere else it is emulated, on request: right, and slower than 16 bits. All that is no product of a block stays in 16 bits.

Units: NVIDIA's data sheets; torch's at::_scaled_mm (capability 8.9 for fp8, 10.0 for blocks of 32 and 16). Gains: docs/precision.md
has each with its source. The layers that stay in 16 bits: arXiv 2509.25149, section 4.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config import LOW_PRECISIONS, Config, ModelConfig
from paceline.errors import Change, PlanError
from paceline.plan.machine import Gpu, Machine
from paceline.plan.shapes import FP32, NARROW, layer_weights
from paceline.plan.speeds import Speeds
from paceline.units import format_percent

NATIVE_FROM = {"fp8": (8, 9), "mxfp8": (10, 0), "nvfp4": (10, 0)}  # compute capability
NO_UNITS = {
    "fp8": "fp8 products need compute capability 8.9",
    "mxfp8": "products of MX blocks need compute capability 10.0",
    "mxfp4": "PyTorch has no MXFP4 product for any card",
    "nvfp4": "NVFP4 products need compute capability 10.0",
}
# elements that share a scale or a rotation, so that every dim of a product is a multiple
MULTIPLE = {"fp8": 16, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
BITS = {"fp8": 8.0, "mxfp8": 8.25, "mxfp4": 4.25, "nvfp4": 4.5}  # of a value with its share of the scale
HALF_COPIES = ("fp8", "nvfp4")  # a weight and its transpose have the same values
FOUR_BITS = ("mxfp4", "nvfp4")
RANDOM_BYTES = 42  # at work for each element that is rounded at random, eagerly; as traced (train/exact.py)
LAST_BLOCKS = 0.15  # the share of blocks that stay in 16 bits, the last ones
MIN_LAST_BLOCKS = 2
# time of a step with bf16 products over that with fp8's, from a width on: least, expected, most
FP8_GAINS = ((0, (0.60, 0.70, 1.0)), (1024, (1.0, 1.10, 1.30)), (1536, (1.05, 1.12, 1.59)))
GAIN_WIDTH = 1024  # below it fp8 loses
MIN_GAIN = 1.02  # that a trial of a matrix must show: less is noise


@dataclass(frozen=True)
class LowPrecision:
    """Products in a low precision. name: the config's precision. num_layers: the first ones, whose products it is for."""

    name: str
    emulated: bool
    num_layers: int

    @property
    def text(self) -> str:
        return f"{'emulated ' if self.emulated else ''}{self.name} products"


def choose_precision(config: Config, machine: Machine, *, device: str) -> str:
    """Returns the config's precision, or bf16 where the hardware multiplies it natively, else fp32.

    For a low one, which is of the blocks' products alone, it is that of all else.
    """
    if device == "cpu":
        native = machine.cpu_bf16
    else:
        capability = machine.gpus[0].capability
        native = capability is None or capability >= (8, 0)
        if config.precision == "bf16" and not native:
            raise PlanError(
                f"precision is bf16, but {machine.gpus[0].name} has no bf16 units (capability {capability})",
                fix="--precision fp16",
                changes=({"precision": "fp16"},),
            )
    if config.precision is None or config.precision in LOW_PRECISIONS:
        return "bf16" if native else "fp32"
    return config.precision


def native_problem(name: str, gpu: Gpu | None) -> str | None:
    """Returns why a device does not compute a format; None where it does, or where its capability is not known."""
    if gpu is None:
        return f"a CPU has no units for {name}"
    needed = NATIVE_FROM.get(name)
    if needed is None:
        return NO_UNITS[name]
    if gpu.capability is not None and gpu.capability < needed:
        return f"{NO_UNITS[name]}, it has {'.'.join(map(str, gpu.capability))}"
    return None


def choose_low_precision(config: Config, model: ModelConfig, *, gpu: Gpu | None) -> LowPrecision | None:
    """Returns what the config's precision is for the products, None for 16 or 32 bits; raises PlanError where it cannot be.

    gpu: None for a CPU.
    """
    name = config.precision
    if name not in MULTIPLE:
        return None
    device_name = gpu.name if gpu else "the CPU"
    problem = native_problem(name, gpu)
    if problem and not config.emulate:
        ways: list[Change] = [{"emulate": True}, {"precision": None}]
        if name != "fp8" and native_problem("fp8", gpu) is None:
            ways = [{"precision": "fp8"}, *ways]
        raise PlanError(
            f"precision is {name}, but {device_name} cannot compute it: {problem}",
            fix=", or ".join(_flags(way) for way in ways),
            changes=ways,
        )
    check_multiples(name, model)
    num_layers = model.n_layer - (num_last_blocks(model.n_layer) if name in FOUR_BITS else 0)
    if num_layers < 1:
        raise PlanError(
            f"precision is {name}, whose last {MIN_LAST_BLOCKS} blocks stay in 16 bits, and depth is {model.n_layer}",
            fix=f"--depth {MIN_LAST_BLOCKS + 1} or --precision fp8",
            changes=({"depth": MIN_LAST_BLOCKS + 1}, {"precision": "fp8"}),
        )
    return LowPrecision(name, config.emulate, num_layers)


def _flags(change: Change) -> str:
    [(key, value)] = change.items()
    return (
        f"--{key} (right, but slower than 16 bits)"
        if value is True
        else f"--{key} {'auto' if value is None else value}"
    )


def num_last_blocks(n_layer: int) -> int:
    """Returns how many of the last blocks stay in 16 bits where products have four."""
    return max(MIN_LAST_BLOCKS, math.ceil(LAST_BLOCKS * n_layer))


def check_multiples(name: str, model: ModelConfig) -> None:
    """Raises PlanError where a dim of a product does not divide into the format's blocks."""
    block = MULTIPLE[name]
    dims = {"sequence_len": model.sequence_len, "n_embd": model.n_embd}
    for key, size in dims.items():
        if size % block:
            upper = -(-size // block) * block
            raise PlanError(
                f"{key} is {size}, and {name} takes multiples of {block}",
                fix=f"--{key.replace('_', '-')} {upper}",
                changes=({key: upper},),
            )
    kv_width = model.n_kv_head * model.head_dim
    if kv_width % block:
        raise PlanError(
            f"keys are {kv_width} wide ({model.n_kv_head} heads of {model.head_dim}), and {name} takes multiples of {block}",
            fix=f"--n-kv-head {model.n_head}",
            changes=({"n_kv_head": model.n_head}, {"n_kv_head": None}),
        )


def code_bytes(low: LowPrecision | None, model: ModelConfig, *, device: str) -> int:
    """Returns the quantized weights that are kept from step to step: each as an operand of two products."""
    if low is None:
        return 0
    values = low.num_layers * layer_weights(model)
    if low.emulated:  # as exact 16-bit values, on a CPU fp32 ones; a transpose is a view
        return values * (FP32 if device == "cpu" else NARROW) * (1 if low.name in HALF_COPIES else 2)
    return int(2 * values * BITS[low.name] / 8)


def working_bytes(low: LowPrecision | None, model: ModelConfig, *, tokens: int, device: str, compiled: bool) -> int:
    """Returns what the largest product has besides its operands in 16 bits, in the backward of an MLP's matrix.

    Native: codes of the gradient, both ways, and of the input, and one fp32 copy. Emulated: values of both, and three copies.
    Random bits are 64-bit integers while they are made, which a compiler keeps in registers.
    """
    if low is None:
        return 0
    wide, narrow = 4 * tokens * model.n_embd, tokens * model.n_embd
    if low.name in FOUR_BITS and not compiled:
        return RANDOM_BYTES * wide
    if not low.emulated:
        return int((2 * wide + narrow) * BITS[low.name] / 8) + FP32 * wide
    return (FP32 if device == "cpu" else NARROW) * (2 * wide + narrow) + 3 * FP32 * wide


@dataclass(frozen=True)
class Gain:
    """How many times as fast low products make things. products: of a layer's, as measured here. step: of a step, least,
    expected and most as others measured it. Neither is known of most formats.
    """

    low: LowPrecision
    model: ModelConfig
    products: float | None
    step: tuple[float, float, float] | None

    @property
    def is_known(self) -> bool:
        """Whether a step's time can be told."""
        return self.products is not None or self.step is not None

    @property
    def spread(self) -> float:
        """By which fraction a step may be off its expected time, because others measured different gains."""
        if self.products is not None or self.step is None:
            return 0.0
        least, expected, most = self.step
        return max(expected / least, most / expected) - 1

    @property
    def note(self) -> str:
        """What the expected time stands on."""
        if self.products is not None:
            width = f"{self.model.n_embd:,} wide"
            return f"{self.low.text}: {self.products:.2f} times as fast as bf16 at {width}, as measured here"
        least, expected, most = self.step or (1.0, 1.0, 1.0)
        return f"{self.low.text}: {expected:g} times as fast as bf16 ({least:g} to {most:g}), as others measured"

    def applied(self, parts: dict[str, float]) -> dict[str, float]:
        """Returns the seconds of a micro-step's parts with low products. Gains of whole steps are put down to the products."""
        if self.products is not None:
            share = self.low.num_layers / self.model.n_layer
            return {**parts, "matmuls": parts["matmuls"] * (1 - share + share / self.products)}
        expected = self.step[1] if self.step else 1.0
        saved_s = (1 - 1 / expected) * sum(parts.values())
        return {**parts, "matmuls": max(0.0, parts["matmuls"] - saved_s)}


def gain_of(low: LowPrecision | None, model: ModelConfig, *, precision: str, speeds: Speeds | None) -> Gain | None:
    """Returns what is known of a low precision's gain, None without one. speeds: what was measured of this device."""
    if low is None:
        return None
    if low.emulated:
        return Gain(low, model, None, None)
    fast, slow = (speeds.rate("linear", name, size=model.n_embd) if speeds else None for name in (low.name, precision))
    products = fast / slow if fast and slow else None
    published = [gain for width, gain in FP8_GAINS if model.n_embd >= width][-1]
    return Gain(low, model, products, published if low.name == "fp8" else None)


def loses(low: LowPrecision | None, gains: Mapping[str, float] | None) -> tuple[str, ...]:
    """Returns the matrices whose products stay in 16 bits, as a trial of this card has shown that fp8 gains nothing there."""
    if low is None or low.name != "fp8" or gains is None:
        return ()
    return tuple(name for name, gain in gains.items() if gain < MIN_GAIN)


def gain_text(gains: Mapping[str, float]) -> str:
    """Returns `1.31 mlp.c_fc, mlp.c_proj; 0.94 attn.c_q, attn.c_k`."""
    names: dict[str, list[str]] = {}
    for name, gain in sorted(gains.items(), key=lambda item: -item[1]):
        names.setdefault(f"{gain:.2f}", []).append(name)
    return "; ".join(f"{gain} {', '.join(named)}" for gain, named in names.items())


def precision_notes(low: LowPrecision | None, model: ModelConfig, *, bf16_finish: float) -> tuple[str, ...]:
    """Returns lines for the plan about what a low precision costs here, and for which blocks and steps it is."""
    if low is None:
        return ()
    notes = []
    if low.emulated:
        notes.append(f"{low.name} is emulated: right, and slower than 16 bits")
    elif low.name != "fp8":
        notes.append(f"{low.name} is an experiment: no gain in speed over fp8 has been measured with these products")
    elif model.n_embd < GAIN_WIDTH:
        notes.append(f"fp8 gains nothing below {GAIN_WIDTH:,} wide, and the model is {model.n_embd:,} wide")
    if low.num_layers < model.n_layer:
        notes.append(f"{low.name} in the first {low.num_layers} of {model.n_layer} blocks, the others stay in 16 bits")
    if bf16_finish:
        notes.append(f"the last {format_percent(bf16_finish)} of the steps are without {low.name}")
    return tuple(notes)


def precision_name(precision: str, low: LowPrecision | None) -> str:
    """Returns `bf16`, or `bf16 with fp8 products`: what tells measurements of one from those of the other."""
    return f"{precision} with {low.text}" if low else precision
