"""The Triton kernels that cast to fp8 against the codecs, op by op; by Triton's interpreter, so on the CPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="needs Triton: pip install -e '.[gpu-proof]'"
    ),
]

# within a tile, several, edges that no tile meets, one row, more than one program looks for the largest
SHAPES = [(16, 48), (256, 128), (130, 208), (1, 16), (300, 144)]
PROGRAM = """
import json, torch
from paceline.model import linear
from paceline.model.kernels import cast_fused, largest_fused
from paceline.model.formats import DTYPES, SMALLEST_AMAX, quantize_tensorwise
from paceline.model.linear import RECIPES, _LowProduct, weight_operands

def cast(x, element, *, rows=True, columns=True):
    return cast_fused(x, largest_fused(x), DTYPES[element], smallest=SMALLEST_AMAX, rows=rows, columns=columns)

def codes(x):
    return x.view(torch.uint8)

def case(rows, columns, dtype, element):
    made = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=made) * torch.randn(rows, columns, generator=made).exp()
    x[-1, ::5] = 0
    x = x.to(dtype)
    quantized = quantize_tensorwise(x, element).elements
    by_rows, by_columns = cast(x, element)
    only = cast(x, element, rows=False)
    return {
        "largest": bool(largest_fused(x) == x.abs().amax()),
        "rows": torch.equal(codes(by_rows), codes(quantized)),
        "columns": torch.equal(codes(by_columns), codes(quantized.t().contiguous())),
        "only": only[0].numel() == 0 and torch.equal(codes(only[1]), codes(by_columns)),
    }

def every_value(element):
    # all codes, all midpoints between them, and their neighbours in fp32
    values = torch.arange(256, dtype=torch.uint8).view(DTYPES[element]).float()
    values = values[values.isfinite()].sort().values
    middles = (values[1:] + values[:-1]) / 2
    near = [torch.nextafter(middles, middles + way) for way in (1, -1)]
    x = torch.cat([values, middles, *near, torch.tensor([-0.0, 1e-9, -1e-9])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 16)).view(-1, 16)
    return torch.equal(codes(cast(x, element)[0]), codes(quantize_tensorwise(x, element).elements))

def special():
    nothing, broken = torch.zeros(40, 32), torch.ones(40, 32)
    broken[39, 31] = float("nan")
    return {
        "zeros": not cast(nothing, "e4m3")[0].float().any(),
        "nan": bool(largest_fused(broken).isnan()),
        "values": [every_value(element) for element in ("e4m3", "e5m2")],
    }

def layer():
    # whole numbers that both formats hold: a native product has the same bits whoever cast its operands
    made = torch.Generator().manual_seed(1)
    x, weight, dy = (torch.randint(-2, 3, shape, generator=made).float() for shape in ((32, 64), (48, 64), (32, 48)))
    x[0, 0], weight[0, 0], dy[0, 0] = 448, 448, 57_344
    results = []
    for fused in (False, True):
        linear.is_cast_at_once = lambda x, recipe, *, native: fused
        inputs = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        operands = (part for operand in weight_operands(weight, "fp8", native=True) for part in operand)
        y = _LowProduct.apply(*inputs, torch.zeros((), dtype=torch.int64), "fp8", True, *operands)
        y.backward(dy)
        results.append([y.detach(), *(tensor.grad for tensor in inputs)])
    return all(torch.equal(a, b) and a.any() for a, b in zip(*results, strict=True))

cases = [case(*shape, getattr(torch, dtype), element) for *shape, dtype, element in CASES]
print(json.dumps({"cases": cases, "special": special(), "layer": layer()}))
"""
CASES = [
    (*shape, dtype, element) for shape in SHAPES for dtype in ("float32", "bfloat16") for element in ("e4m3", "e5m2")
]


@pytest.fixture(scope="module")
def facts():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = PROGRAM.replace("CASES", repr(CASES))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_numbers_are_those_of_the_codec_in_both_layouts(facts, case):
    assert facts["cases"][CASES.index(case)] == dict.fromkeys(("largest", "rows", "columns", "only"), True)


def test_each_value_each_midpoint_and_their_neighbours_are_rounded_as_pytorch_rounds_them(facts):
    assert facts["special"] == {"zeros": True, "nan": True, "values": [True, True]}


def test_a_layer_has_the_same_results_whoever_casts_its_operands(facts):
    assert facts["layer"]
