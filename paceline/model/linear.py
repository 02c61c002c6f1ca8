"""
The model's matrix products: in the dtype of the activations, or with operands of 8 or 4 bits by one of four recipes.

A layer multiplies three times: y = x @ W.T, dx = dy @ W, dW = dy.T @ x. In a low precision each operand is quantized along the dim
that its product sums over (formats.py), and a scale that covers a whole tensor is applied to the product. Native products are the
hardware's; emulated ones multiply the exact values of the codes and sum in fp32, so that the two differ by the order of their sums
alone. Both operands of a native product are contiguous along that dim, the one layout that every card takes.

A weight is quantized once a step and not in every micro-step; a sharded one, which comes and goes, in each forward. Without
gradients the product is in 16 bits: evaluation, samples and export compute with the weights that are saved.

Recipes: fp8, nanochat's of July 2026; MXFP8, arXiv 2506.08027; NVFP4, arXiv 2509.25149; MXFP4, arXiv 2502.20586.
"""

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from paceline.model.formats import (
    DTYPES,
    LARGEST,
    SMALLEST_AMAX,
    Quantized,
    dequantize,
    e2m1_codes,
    exact,
    pack_e2m1,
    quantize_mx,
    quantize_nvfp4,
    quantize_tensorwise,
    rotate,
    swizzle_scales,
    transposed,
    uniform,
)
from paceline.model.layers import define_op

# N tokens of a micro-batch; I in_features, O out_features; M rows and K columns of any operand, which is summed over K

TRIAL_SIZE = 256  # rows and columns of the operands that product_problem compares
# relative: Hopper's tensor cores keep 14 bits while they add (DeepSeek-V3, arXiv 2412.19437), and results are rounded to bf16
NATIVE_ERROR = 1e-2
GRADIENT_NOISE, WEIGHT_NOISE = 1, 2  # the two operands that dy becomes have random bits of their own
BLOCKS = ("mx", "nvfp4")  # codecs with a scale for some elements of a row
HAS_TRITON = importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class LowRecipe:
    """How the operands of a layer's three products are quantized. forward, gradient: elements of x and W, and of dy."""

    codec: str  # tensorwise, mx or nvfp4
    forward: str
    gradient: str
    stochastic: bool = False  # dy is rounded up or down at random, so that its rounding errors average out
    rotation: int = 0  # block of the random Hadamard transform of both operands of dW: it spreads outliers
    square: bool = False  # weights have a scale for 16 x 16 values: W and W.T are quantized to the same ones


RECIPES = {
    "fp8": LowRecipe("tensorwise", "e4m3", "e5m2"),
    "mxfp8": LowRecipe("mx", "e4m3", "e4m3"),
    "mxfp4": LowRecipe("mx", "e2m1", "e2m1", stochastic=True, rotation=32),
    "nvfp4": LowRecipe("nvfp4", "e2m1", "e2m1", stochastic=True, rotation=16, square=True),
}


class Operand(NamedTuple):
    """One operand of a product. values: (M, K), exact values where emulated, else codes as the hardware takes them."""

    values: Tensor
    scales: Tensor | None = None  # of the codes, as the hardware takes them; None where emulated
    factor: Tensor | None = None  # () fp32, by which the product is multiplied


def quantize(
    x: Tensor, recipe: LowRecipe, element: str, *, noise: Tensor | None = None, square: bool = False
) -> Quantized:
    """Returns the operand's codes. x: (M, K), summed over K; noise: as formats.py wants it."""
    if recipe.codec == "tensorwise":
        return quantize_tensorwise(x, element)
    if recipe.codec == "mx":
        return quantize_mx(x, element, noise=noise)
    return quantize_nvfp4(x, square=square, noise=noise)


def make_operand(q: Quantized, *, native: bool) -> Operand:
    """Returns a quantized matrix as one operand of a product."""
    if not native and q.elements.device.type == "cpu":  # as PyTorch's own product of fp8 does it there
        return Operand(dequantize(q))
    if not native:
        values, factor = exact(q, torch.bfloat16)
        return Operand(values, None, factor)
    if not q.block:
        return Operand(q.elements.contiguous(), q.scales)
    codes = q.elements.contiguous()
    if q.is_packed:
        codes = pack_e2m1(e2m1_codes(codes))
    return Operand(codes, swizzle_scales(q.scales).view(q.scales.dtype), q.tensor_scale)


def operands_of(
    x: Tensor, recipe: LowRecipe, element: str, *, native: bool, key: Tensor | None = None, square: bool = False
) -> tuple[Operand, Operand]:
    """Returns x and x.T as operands, summed over the columns and over the rows of x. key: of the noise, for a gradient."""
    if is_cast_at_once(x, recipe, native=native):
        return cast_at_once(x, element, largest_of(x), rows=True, columns=True)
    if recipe.codec == "tensorwise" or square:
        q = quantize(x, recipe, element, square=square)
        along_rows = make_operand(q, native=native)
        if native:
            return along_rows, make_operand(transposed(q), native=True)
        return along_rows, along_rows._replace(values=along_rows.values.t())
    noise = uniform(x.shape, key, GRADIENT_NOISE) if key is not None else None
    return make_operand(quantize(x, recipe, element, noise=noise), native=native), columns_of(
        x, recipe, element, native=native, key=key
    )


def columns_of(
    x: Tensor, recipe: LowRecipe, element: str, *, native: bool, key: Tensor | None = None, amax: Tensor | None = None
) -> Operand:
    """Returns x.T as an operand of dW, which sums over tokens, the rows of x. amax: of input_rows."""
    if amax is not None:
        return cast_at_once(x, element, amax, rows=False, columns=True)[1]
    columns = x.t()
    if recipe.rotation:
        columns = rotate(columns, recipe.rotation)
    noise = uniform(columns.shape, key, WEIGHT_NOISE) if key is not None else None
    return make_operand(quantize(columns, recipe, element, noise=noise), native=native)


def input_rows(x: Tensor, recipe: LowRecipe, *, native: bool) -> tuple[Operand, Tensor | None]:
    """Returns a layer's input as an operand, and its largest absolute value where backward will want it, () fp32."""
    if not is_cast_at_once(x, recipe, native=native):
        return make_operand(quantize(x, recipe, recipe.forward), native=native), None
    amax = largest_of(x)
    return cast_at_once(x, recipe.forward, amax, rows=True, columns=False)[0], amax


def is_cast_at_once(x: Tensor, recipe: LowRecipe, *, native: bool) -> bool:
    """Returns whether the Triton kernels make the operand."""
    return native and recipe.codec == "tensorwise" and x.is_cuda and HAS_TRITON


def largest_of(x: Tensor) -> Tensor:
    """Returns the largest absolute value, () fp32."""
    return cast(Tensor, torch.ops.paceline.largest(x.contiguous()))


def cast_at_once(x: Tensor, element: str, amax: Tensor, *, rows: bool, columns: bool) -> tuple[Operand, Operand]:
    """Returns x and x.T as operands of one scale; one that is not wanted has no elements."""
    codes = torch.ops.paceline.cast(x.contiguous(), amax, DTYPES[element], rows, columns)
    scale = amax.clamp_min(SMALLEST_AMAX) * (1 / LARGEST[element])
    return Operand(codes[0], scale), Operand(codes[1], scale)


def run_largest(x: Tensor) -> Tensor:
    """Computes largest_of by the Triton kernel."""
    from paceline.model.kernels import largest_fused

    return largest_fused(x)


def run_cast(x: Tensor, amax: Tensor, dtype: torch.dtype, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """Computes the codes of cast_at_once by the Triton kernel."""
    from paceline.model.kernels import cast_fused

    return cast_fused(x, amax, dtype, smallest=SMALLEST_AMAX, rows=rows, columns=columns)


def no_codes(x: Tensor, amax: Tensor, dtype: torch.dtype, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """Returns the shapes of cast_at_once without values, for tracing."""
    height, width = x.shape
    shapes = ((height, width) if rows else (0,), (width, height) if columns else (0,))
    by_rows, by_columns = (x.new_empty(shape, dtype=dtype) for shape in shapes)
    return by_rows, by_columns


define_op("largest(Tensor x) -> Tensor", run_largest, lambda x: x.new_empty((), dtype=torch.float32))
CAST = "cast(Tensor x, Tensor amax, ScalarType dtype, bool rows, bool columns) -> (Tensor, Tensor)"
define_op(CAST, run_cast, no_codes)


def weight_operands(weight: Tensor, name: str, *, native: bool) -> tuple[Operand, Operand]:
    """Returns the weight (O, I) as operands: (O, I) for y, and (I, O) for dx. They share no tensor, as the compiler wants it."""
    recipe = RECIPES[name]
    plain = LowRecipe(recipe.codec, recipe.forward, recipe.gradient)
    for_output, for_input = operands_of(weight, plain, recipe.forward, native=native, square=recipe.square)
    values, *others = for_input
    return for_output, Operand(values, *(x.clone() if x is not None and x.dim() == 0 else x for x in others))


def product(a: Operand, b: Operand, recipe: LowRecipe, *, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Returns a @ b.T in dtype. a: (M, K); b: (N, K). fast: fp8 sums of some bits less, on Hopper."""
    if a.scales is not None:
        y = scaled_product(a, b, recipe, dtype=dtype if a.factor is None else torch.float32, fast=fast)
    elif a.values.device.type == "cpu":
        y = a.values @ b.values.t()
    else:
        y = torch.mm(a.values, b.values.t(), out_dtype=torch.float32)
    if a.factor is not None and b.factor is not None:
        y = y * (a.factor * b.factor)
    return y.to(dtype)


def scaled_product(a: Operand, b: Operand, recipe: LowRecipe, *, dtype: torch.dtype, fast: bool) -> Tensor:
    """Returns the hardware's product of codes and their scales."""
    assert a.scales is not None and b.scales is not None
    if recipe.codec in BLOCKS:
        return cast(Tensor, torch.ops.paceline.block_product(a.values, a.scales, b.values, b.scales, dtype))
    kind = F.ScalingType.TensorWise
    scales = (a.scales, kind, b.scales, kind)
    return F.scaled_mm(a.values, b.values.t(), *scales, output_dtype=dtype, use_fast_accum=fast)


def run_block_product(a: Tensor, scales_a: Tensor, b: Tensor, scales_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplies blocks of 32 with scales in E8M0, or of 16 with scales in E4M3; bytes are pairs of E2M1.

    An op of its own, since the compiler has no lowering of ordered scales, and no fake tensors of E2M1 (torch 2.13).
    """
    kind = F.ScalingType.BlockWise1x32 if scales_a.dtype == torch.uint8 else F.ScalingType.BlockWise1x16
    if scales_a.dtype == torch.uint8:
        scales_a, scales_b = (scales.view(torch.float8_e8m0fnu) for scales in (scales_a, scales_b))
    if a.dtype == torch.uint8:
        a, b = (codes.view(torch.float4_e2m1fn_x2) for codes in (a, b))
    order = F.SwizzleType.SWIZZLE_32_4_4
    return F.scaled_mm(a, b.t(), scales_a, kind, scales_b, kind, order, order, output_dtype=dtype)


def no_product(a: Tensor, scales_a: Tensor, b: Tensor, scales_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the shape of run_block_product without values, for tracing."""
    return a.new_empty(len(a), len(b), dtype=dtype)


ARGUMENTS = "Tensor a, Tensor scales_a, Tensor b, Tensor scales_b, ScalarType dtype"
define_op(f"block_product({ARGUMENTS}) -> Tensor", run_block_product, no_product)


class _LowProduct(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, key: Tensor, name: str, native: bool, *quantized: Tensor
    ) -> Tensor:
        recipe = RECIPES[name]
        ctx.name, ctx.native, ctx.weight_dtype = name, native, weight.dtype
        rows, amax = input_rows(x, recipe, native=native)
        ctx.save_for_backward(x, amax, key, *quantized[3:])
        return product(rows, Operand(*quantized[:3]), recipe, dtype=x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, amax, key, *weight) = grads, ctx.saved_tensors
        recipe, native = RECIPES[ctx.name], ctx.native
        dy_rows, dy_columns = operands_of(
            dy, recipe, recipe.gradient, native=native, key=key if recipe.stochastic else None
        )
        dx = product(dy_rows, Operand(*weight), recipe, dtype=x.dtype)
        x_columns = columns_of(x, recipe, recipe.forward, native=native, amax=amax)
        return dx, product(dy_columns, x_columns, recipe, dtype=ctx.weight_dtype), *[None] * (3 + 6)


class Linear(nn.Linear):
    """A product without bias; the weight is cast to the input's dtype, so fp32 and bf16 weights run alike."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)
        self.recipe: str | None = None  # of RECIPES; None: in the input's dtype
        self.native = False
        self.key: Tensor | None = None  # of this micro-step's random bits, () int64
        self.quantized: tuple[Tensor | None, ...] | None = None  # of weight_operands; None: quantize in each forward

    def reset_parameters(self) -> None:
        """Does nothing: GPT.init_weights draws all weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns x @ weight.T in x.dtype. x: (..., I)."""
        weight = self.weight.to(x.dtype)
        if self.recipe is None or not torch.is_grad_enabled():
            return F.linear(x, weight)
        quantized = self.quantized or self.quantize()
        settings = (self.key, self.recipe, self.native, *quantized)
        y: Tensor = _LowProduct.apply(x.flatten(0, -2), weight, *settings)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], self.out_features)

    def quantize(self) -> tuple[Tensor | None, ...]:
        """Returns the weight's two operands, one behind the other."""
        assert self.recipe is not None
        for_output, for_input = weight_operands(self.weight.detach(), self.recipe, native=self.native)
        return *for_output, *for_input


def product_problem(recipe: str, device: torch.device) -> str | None:
    """Returns why the device's own products of a recipe cannot be used; None where all three agree with the emulation.

    A library may have no kernel for a card, or one that returns zeros: TransformerEngine's NVFP4 gradients did so on capability 12.
    """
    made = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(TRIAL_SIZE, TRIAL_SIZE, generator=made).to(device, torch.bfloat16) for _ in range(3))
    key = torch.zeros((), dtype=torch.int64, device=device)
    results = []
    for native in (True, False):
        x_in, w_in = (tensor.clone().requires_grad_() for tensor in (x, weight))
        operands = (part for operand in weight_operands(weight, recipe, native=native) for part in operand)
        try:
            y: Tensor = _LowProduct.apply(x_in, w_in, key, recipe, native, *operands)  # type: ignore[no-untyped-call]
            y.backward(dy)  # type: ignore[no-untyped-call]
            results.append([part.float().cpu() for part in (y.detach(), x_in.grad, w_in.grad) if part is not None])
        except Exception as error:  # a library may refuse in many ways
            return f"{type(error).__name__}: {error}".splitlines()[0]
    for name, got, expected in zip(("y", "dx", "dW"), *results, strict=True):
        off = ((got - expected).norm() / expected.norm()).item()
        if not off < NATIVE_ERROR:
            zeros = ", all zeros" if not got.any() else ""
            return f"its {name} is {off:.2g} off the emulation's{zeros}"
    return None


class LowProducts:
    """The layers of a model that multiply in a low precision, from step to step."""

    def __init__(self, layers: Sequence[Linear], recipe: str, *, native: bool, keeps_codes: bool, device: torch.device):
        """keeps_codes: the weights change only in an update, so their codes hold for a step."""
        self._layers, self._keeps_codes = layers, keeps_codes
        self._numbers = torch.arange(len(layers), device=device)
        self._keys = self._numbers.clone()
        for layer, key in zip(layers, self._keys.unbind(), strict=True):
            layer.recipe, layer.native, layer.key = recipe, native, key

    @torch.no_grad()
    def begin(self, *, seed: int, step: int, micro_step: int, micro_batch: int) -> None:
        """Prepares a micro-step. micro_batch: its number in the step over all ranks, so that bits do not depend on world_size."""
        if micro_step == 0 and self._keeps_codes:
            for layer in self._layers:
                layer.quantized = layer.quantize()
        digest = hashlib.sha256(f"{seed}:{step}:{micro_batch}".encode()).digest()
        torch.add(self._numbers, int.from_bytes(digest[:8], "big") >> 2, out=self._keys)

    def end(self) -> None:
        """Goes back to 16 bits for the rest of the run."""
        for layer in self._layers:
            layer.recipe, layer.quantized = None, None
