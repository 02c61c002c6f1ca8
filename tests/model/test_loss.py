"""The chunked loss against torch's cross entropy of soft-capped logits, and its memory."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.model import layers as loss_module
from paceline.model.layers import nats_per_token, softcap, sum_of_nats

N, C, V, VOCAB = 70, 16, 128, 100
AMPLE = 1 << 30


def case(*, dtype=torch.float32, scale=2.0):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, C, generator=generator).to(dtype).requires_grad_()
    weight = (scale * torch.randn(V, C, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (N,), generator=generator)
    targets[::7] = -1
    return x, weight, targets


def reference(x, weight, targets, *, reduction="sum"):
    """In fp64, straight from the definition."""
    x, weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    nats = F.cross_entropy(softcap((x @ weight.t())[:, :VOCAB]), targets, ignore_index=-1, reduction=reduction)
    return nats, *torch.autograd.grad(nats.sum(), (x, weight))


def ours(x, weight, targets, *, budget_bytes=AMPLE, compiled=False):
    nats = sum_of_nats(x, weight, targets, vocab_size=VOCAB, budget_bytes=budget_bytes, compiled=compiled)
    return nats, *torch.autograd.grad(nats, (x, weight))


@pytest.mark.parametrize("scale", [0.01, 2.0, 20.0])  # 20: most logits are at the cap
def test_loss_and_gradients_equal_cross_entropy_of_softcapped_logits(scale):
    tensors = case(scale=scale)
    for mine, exact in zip(ours(*tensors), reference(*tensors), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=3e-6, atol=2e-5)


def test_bf16_inputs_give_an_fp32_loss_and_gradients_to_bf16_precision():
    tensors = case(dtype=torch.bfloat16, scale=0.5)
    nats, dx, dw = ours(*tensors)
    exact_nats, exact_dx, exact_dw = reference(*tensors)
    assert nats.dtype == torch.float32
    assert nats.item() == pytest.approx(exact_nats.item(), rel=1e-3)
    assert (dx - exact_dx).norm() < 0.01 * exact_dx.norm()
    assert (dw - exact_dw).norm() < 0.01 * exact_dw.norm()


@pytest.mark.parametrize("budget_bytes", [1, 10_000, 50_000])
def test_any_chunking_gives_the_same_loss_and_gradients(budget_bytes):
    tensors = case()
    for chunked, whole in zip(ours(*tensors, budget_bytes=budget_bytes), ours(*tensors), strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=1e-5)


def test_the_gradient_is_multiplied_by_what_comes_from_above():
    x, weight, targets = case()
    _, dx, dw = ours(x, weight, targets)
    (sum_of_nats(x, weight, targets, vocab_size=VOCAB, budget_bytes=AMPLE, compiled=False) / 4).backward()
    torch.testing.assert_close(x.grad, dx / 4)
    torch.testing.assert_close(weight.grad, dw / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_gradients_and_not_the_loss_are_multiplied_by_the_scale(dtype):
    x, weight, targets = case(dtype=dtype, scale=0.5)
    nats, dx, dw = ours(x, weight, targets)
    scaled = sum_of_nats(
        x, weight, targets, vocab_size=VOCAB, budget_bytes=AMPLE, compiled=False, grad_scale=torch.tensor(8.0)
    )
    assert torch.equal(scaled, nats)
    for ours_, exact in zip(torch.autograd.grad(scaled, (x, weight)), (dx, dw), strict=True):
        torch.testing.assert_close(ours_, 8 * exact, rtol=2e-3, atol=1e-3)


def test_a_small_scale_brings_an_overflow_in_lm_head_s_fp16_gradient_back():
    """200 rows of 600 with one target: the sum of 119,000 is beyond fp16, which the first product would round to infinity."""
    x = torch.full((200, C), 600.0, dtype=torch.float16).requires_grad_()
    weight = torch.zeros(V, C, dtype=torch.float16).requires_grad_()
    targets = torch.zeros(200, dtype=torch.int64)
    sizes = {"vocab_size": VOCAB, "budget_bytes": AMPLE, "compiled": False}
    plain = torch.autograd.grad(sum_of_nats(x, weight, targets, **sizes), weight)[0]
    small = torch.autograd.grad(sum_of_nats(x, weight, targets, **sizes, grad_scale=torch.tensor(1 / 8)), weight)[0]
    assert plain.isinf().any()
    assert small.float()[0, 0].item() == pytest.approx(-200 * 600 * 0.99 / 8, rel=2e-3)


def test_rows_past_the_vocabulary_get_no_probability_and_no_gradient():
    x, weight, targets = case()
    with torch.no_grad():
        weight[VOCAB:] = 100 * x[0]
    nats, _, dw = ours(x, weight, targets)
    assert nats.item() == pytest.approx(reference(x, weight, targets)[0].item(), rel=1e-5)
    assert torch.count_nonzero(dw[VOCAB:]) == 0


def test_ignored_targets_give_no_loss_and_no_gradient():
    x, weight, targets = case()
    _, dx, _ = ours(x, weight, targets)
    assert torch.count_nonzero(dx[targets == -1]) == 0
    nats, dx, dw = ours(x, weight, torch.full_like(targets, -1))
    assert (nats.item(), dx.abs().max().item(), dw.abs().max().item()) == (0, 0, 0)


@pytest.mark.parametrize("budget_bytes", [10_000, AMPLE])
def test_nats_per_token_equal_cross_entropy_without_reduction(budget_bytes):
    x, weight, targets = case()
    nats = nats_per_token(x, weight, targets, vocab_size=VOCAB, budget_bytes=budget_bytes, compiled=False)
    exact = reference(x, weight, targets, reduction="none")[0]
    torch.testing.assert_close(nats.double(), exact, rtol=1e-6, atol=2e-5)
    assert not nats.requires_grad


class LiveBytes(TorchDispatchMode):
    """The most bytes that matrices with a column for every token held at once, each storage counted once, the weight not."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.live, self.peak = weight.untyped_storage()._cdata, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in [out] if isinstance(out, torch.Tensor) else []:
            storage = tensor.untyped_storage()
            if tensor.dim() == 2 and tensor.shape[-1] >= VOCAB and storage._cdata != self.weight:
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {at: (ref, size) for at, (ref, size) in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget_bytes", [20_000, 60_000, 200_000])
def test_logits_and_all_that_is_as_large_stay_within_the_budget(dtype, budget_bytes):
    x, weight, targets = case(dtype=dtype)
    with LiveBytes(weight) as seen:
        sum_of_nats(x, weight, targets, vocab_size=VOCAB, budget_bytes=budget_bytes, compiled=False)
    assert budget_bytes / 8 < seen.peak <= budget_bytes


def test_evaluation_stays_within_the_budget_too():
    x, weight, targets = case()
    with LiveBytes(weight) as seen, torch.no_grad():
        nats_per_token(x, weight, targets, vocab_size=VOCAB, budget_bytes=20_000, compiled=False)
    assert 2_500 < seen.peak <= 20_000


def test_a_bf16_weight_can_take_its_gradient_in_fp32_into_a_flat_buffer():
    x, weight, targets = case(dtype=torch.bfloat16)
    weight = torch.nn.Parameter(weight.detach())
    flat = torch.ones(V * C)
    weight.grad_dtype = torch.float32
    weight.grad = flat.view(V, C)
    nats = sum_of_nats(x, weight, targets, vocab_size=VOCAB, budget_bytes=40_000, compiled=False)
    nats.backward()
    assert weight.grad.data_ptr() == flat.data_ptr()
    exact = reference(x, weight, targets)[2]
    assert (flat.view(V, C) - 1 - exact).norm() < 0.01 * exact.norm()
    assert not torch.equal(flat, flat.bfloat16().float())  # never rounded to bf16 on its way


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",  # the graph that inductor makes kernels of
        pytest.param("inductor", marks=(pytest.mark.compiler, pytest.mark.soak)),  # a quarter of a minute of C++
    ],
)
def test_the_compiled_loss_equals_the_eager_one(backend, monkeypatch):
    tensors = case()
    monkeypatch.setattr(loss_module, "compile_once", functools.partial(loss_module.compile_once, backend=backend))
    for compiled, eager in zip(ours(*tensors, compiled=True), ours(*tensors), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
