"""The Triton kernel of the loss against the same loss by PyTorch, op by op; by Triton's interpreter, so on the CPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from paceline.model.layers import fused_loss_problem

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install -e '.[gpu-proof]'"
)

# rows, columns of the logits and tokens of the vocabulary: within a block, several, and one that is padded
SIZES = [(9, 512, 500), (9, 8192, 8192), (9, 8256, 8197)]
PROGRAM = """
import json, torch
from paceline.model import layers
from paceline.model.kernels import capped_nats_fused_

def differences(rows, width, vocab, dtype, scale, with_grad):
    generator = torch.Generator().manual_seed(0)
    z = (4 * torch.randn(rows, width, generator=generator)).to(dtype)
    z[1, 3] = 60  # at the cap
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[1], targets[2], targets[4] = 3, -1, vocab - 1
    grad_scale = None if scale is None else torch.tensor(scale)
    exact, fused = z.clone(), z.clone()
    exact_nats = layers.capped_nats_(exact, targets, vocab, with_grad, grad_scale)
    nats = capped_nats_fused_(fused, targets, vocab, with_grad, grad_scale, cap=layers.SOFTCAP)
    error = (fused.double() - exact.double()).abs()
    return {
        "nats": float((nats - exact_nats).abs().max() / exact_nats.max()),
        "gradient": float(error.max() / (scale or 1)),
        "roundings": float((error / torch.finfo(dtype).eps / exact.double().abs().clamp_min(torch.finfo(dtype).tiny)).max()),
        "ignored": [float(nats[2]), float(fused[2].abs().max())],
        "padding": float(fused[:, vocab:].abs().sum()),
    }

print(json.dumps([differences(*size, getattr(torch, dtype), scale, with_grad) for *size, dtype, scale, with_grad in CASES]))
"""
CASES = [(*size, dtype, None, True) for size in SIZES for dtype in ("float32", "bfloat16")]
CASES += [
    (9, 640, 600, "float16", 8.0, True),
    (9, 640, 600, "float32", 0.125, True),
    (9, 640, 600, "bfloat16", None, False),
]


@pytest.fixture(scope="module")
def differences():
    program = PROGRAM.replace("CASES", repr(CASES))
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_s_nats_and_gradients_are_those_of_pytorch(differences, case):
    *_, dtype, _, with_grad = case
    errors = differences[case]
    assert errors["nats"] < 1e-6
    if not with_grad:
        assert errors["gradient"] == 0  # the logits stay as they are
        return
    assert errors["ignored"] == [0, 0] and errors["padding"] == 0
    if dtype == "float32":
        assert errors["gradient"] < 1e-6
    else:
        assert errors["roundings"] <= 1


def test_where_the_kernel_cannot_run_the_reason_is_reported(monkeypatch):
    assert fused_loss_problem(torch.device("cpu")) == "it is for CUDA devices"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert fused_loss_problem(torch.device("cuda")) == "Triton is not installed"
