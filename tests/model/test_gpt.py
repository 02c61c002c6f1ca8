"""The model against its definition in plain PyTorch, and what must hold whatever the weights are."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from paceline.config import ModelConfig
from paceline.errors import PlanError
from paceline.model.attention import causal_attention, sliding_block_mask
from paceline.model.gpt import GPT
from paceline.plan.shapes import param_shapes

CONFIG = ModelConfig(
    n_layer=4, n_embd=32, n_head=4, n_kv_head=2, head_dim=8, sequence_len=300, vocab_size=100, window_pattern="SL"
)
STREAM_SCALARS = {"resid_lambdas", "x0_lambdas", "backout_lambda"}


def make_gpt(config=CONFIG, *, compute_dtype=torch.float32, lively=True, **options):
    """lively: no parameter is zero, so every path carries something."""
    model = GPT(config, compute_dtype=compute_dtype, **options)
    model.init_weights(seed=1)
    if lively:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in model.parameters():
                p += 0.3 / math.sqrt(p.shape[-1]) * torch.randn(p.shape, generator=generator)
    return model


def rows(config=CONFIG, *, num_rows=2, num_tokens=None):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(config.vocab_size, (num_rows, (num_tokens or config.sequence_len) + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, :5] = -1
    return tokens[:, :-1], targets


def gradients(model, idx, targets, *, forward=None):
    model.zero_grad()
    loss = (model if forward is None else forward)(idx, targets)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def defined_loss(p, config, idx, targets):
    """The recipe, op by op; p: parameters by name."""
    n_layer, head_dim, num_tokens = config.n_layer, config.head_dim, idx.shape[1]

    def norm(x):
        return F.rms_norm(x, (x.shape[-1],), eps=1e-6)

    def turn(x):  # (B, T, heads, D)
        speeds = 100_000 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angle = (torch.arange(num_tokens).unsqueeze(1) * speeds).view(1, num_tokens, 1, -1)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * angle.cos() + high * angle.sin(), high * angle.cos() - low * angle.sin()), dim=-1)

    x = norm(p["wte.weight"][idx])
    gate = p["smear_lambda"] * torch.sigmoid(x[:, 1:, :24] @ p["smear_gate.weight"].t())
    x = torch.cat((x[:, :1], x[:, 1:] + gate * x[:, :-1]), dim=1)
    x0 = x
    back = torch.arange(num_tokens).unsqueeze(1) - torch.arange(num_tokens)
    for i in range(n_layer):
        x = p["resid_lambdas"][i] * x + p["x0_lambdas"][i] * x0
        y = norm(x)
        q, k, v = ((y @ p[f"h.{i}.attn.{c}.weight"].t()).unflatten(-1, (-1, head_dim)) for c in ("c_q", "c_k", "c_v"))
        if i in (1, 3):
            gate = 3 * torch.sigmoid(y[..., :12] @ p[f"h.{i}.attn.ve_gate.weight"].t()).unsqueeze(-1)
            v = v + gate * p[f"value_embeds.{i}.weight"][idx].view_as(v)
        q, k = 1.2 * norm(turn(q)), 1.2 * norm(turn(k))
        seen = (back >= 0) & (back < (128 if i in (0, 2) else num_tokens))
        q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        x = x + y @ p[f"h.{i}.attn.c_proj.weight"].t()
        x = x + F.relu(norm(x) @ p[f"h.{i}.mlp.c_fc.weight"].t()).square() @ p[f"h.{i}.mlp.c_proj.weight"].t()
        if i == n_layer // 2:
            middle = x
    x = norm(x - p["backout_lambda"] * middle)
    logits = 15 * torch.tanh((x @ p["lm_head.weight"].t())[..., : config.vocab_size] / 15)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")


@pytest.mark.parametrize("activation_checkpointing", [False, "relu", "mlp", True])
@pytest.mark.parametrize("logits_budget_bytes", [1 << 28, 40_000])
def test_loss_and_every_gradient_equal_the_definition(activation_checkpointing, logits_budget_bytes):
    model = make_gpt(activation_checkpointing=activation_checkpointing, logits_budget_bytes=logits_budget_bytes)
    idx, targets = rows()
    loss, mine = gradients(model, idx, targets)
    p = {name: t.detach().double().requires_grad_() for name, t in model.named_parameters()}
    exact = defined_loss(p, CONFIG, idx, targets)
    exact.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
    for name, t in p.items():
        assert (mine[name] - t.grad).norm() < 1e-4 * t.grad.norm(), name


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, n_layer=1, n_embd=8, n_head=1, n_kv_head=1),  # gates have all 8 channels
        replace(CONFIG, n_layer=5, n_embd=40),  # heads together are narrower than the stream
    ],
)
def test_parameters_are_those_of_the_plan_in_name_shape_and_order(config):
    model = GPT(config, compute_dtype=torch.float32)
    assert [(name, tuple(p.shape)) for name, p in model.named_parameters()] == [
        (shape.name, shape.shape) for shape in param_shapes(config)
    ]
    idx, targets = rows(config, num_tokens=7)
    make_gpt(config)(idx, targets).backward()


def test_loss_at_the_start_is_that_of_guessing():
    model = make_gpt(lively=False)
    idx, targets = rows()
    assert model(idx, targets).item() / (targets >= 0).sum().item() == pytest.approx(math.log(100), abs=1e-3)


def test_each_token_s_nats_add_up_to_the_sum():
    model = make_gpt()
    idx, targets = rows()
    nats = model(idx, targets, reduction="none")
    assert nats.shape == targets.shape
    assert torch.count_nonzero(nats[targets == -1]) == 0
    assert nats.sum().item() == pytest.approx(model(idx, targets).item(), rel=1e-6)
    logits = model.logits(idx)
    assert logits.shape == (2, 300, 100)
    exact = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
    torch.testing.assert_close(nats.flatten(), exact, rtol=1e-5, atol=1e-5)


def test_a_small_batch_is_learned_by_heart():
    config = replace(CONFIG, n_layer=2, sequence_len=16)
    model = make_gpt(config, lively=False)
    idx, targets = rows(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(80):
        optimizer.zero_grad()
        loss = model(idx, targets) / idx.numel()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


@pytest.mark.parametrize("changed", [1, 127, 128, 299])
def test_no_logit_depends_on_a_later_token(changed):
    model = make_gpt()
    idx, _ = rows()
    other = idx.clone()
    other[:, changed] = (other[:, changed] + 1) % 100
    before, after = model.logits(idx), model.logits(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed], after[:, changed])


def test_bf16_gives_nearly_the_loss_and_gradient_of_fp32():
    """Scalars of the stream are left out: norms make it orthogonal to its gradient, so theirs is a small rest of a large sum."""
    idx, targets = rows()
    exact_loss, exact = gradients(make_gpt(), idx, targets)
    loss, mine = gradients(make_gpt(compute_dtype=torch.bfloat16), idx, targets)
    assert loss.item() == pytest.approx(exact_loss.item(), rel=5e-3)
    assert {grad.dtype for grad in mine.values()} == {torch.float32}
    for name in exact.keys() - STREAM_SCALARS:
        assert (mine[name] - exact[name]).norm() < 0.04 * exact[name].norm(), name


def test_bf16_weights_take_gradients_into_flat_buffers_in_fp32():
    """As the optimizer lays them: weights in bf16, gradients as views of one fp32 buffer."""
    model = make_gpt(compute_dtype=torch.bfloat16)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    at = 0
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16) if p.dim() > 1 else p.data
        p.grad_dtype = torch.float32
        p.grad, at = flat[at : at + p.numel()].view_as(p), at + p.numel()
    idx, targets = rows()
    model(idx, targets).backward()
    once = flat.clone()
    model(idx, targets).backward()
    assert all(p.grad.untyped_storage().data_ptr() == flat.data_ptr() for p in model.parameters())
    assert torch.count_nonzero(once) > 0
    torch.testing.assert_close(flat, 2 * once)


def test_initial_bits_do_not_depend_on_dtype_device_or_other_parameters():
    plain = dict(make_gpt(lively=False).named_parameters())
    with torch.device("meta"):
        model = GPT(replace(CONFIG, n_layer=6), compute_dtype=torch.bfloat16)
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    model.init_weights(seed=1)
    for name, p in model.named_parameters():
        if name in plain and name.startswith(("wte", "h.", "lm_head", "smear")):
            assert torch.equal(p, plain[name].bfloat16()), name


def test_initial_values_are_those_of_the_recipe():
    config = ModelConfig(4, 256, 2, 2, 128, sequence_len=64, vocab_size=1024)
    p = {name: t.detach() for name, t in make_gpt(config, lively=False).named_parameters()}
    bound = math.sqrt(3 / 256)
    assert p["wte.weight"].std().item() == pytest.approx(0.8, rel=0.01)
    assert p["lm_head.weight"].std().item() == pytest.approx(0.001, rel=0.01)
    for name, largest in {"attn.c_q": bound, "attn.c_v": bound, "mlp.c_fc": 0.4 * bound}.items():
        w = p[f"h.0.{name}.weight"]
        assert 0.99 * largest < w.abs().max() <= largest
        assert w.std().item() == pytest.approx(largest / math.sqrt(3), rel=0.02)
    assert not p["h.2.attn.c_proj.weight"].any() and not p["h.2.mlp.c_proj.weight"].any()
    assert p["value_embeds.3.weight"].abs().max() <= bound
    assert p["h.1.attn.ve_gate.weight"].min() >= 0 and p["h.1.attn.ve_gate.weight"].max() < 0.02
    torch.testing.assert_close(p["resid_lambdas"], torch.tensor([1.15, 1.15 - 0.1 / 3, 1.15 - 0.2 / 3, 1.05]))
    torch.testing.assert_close(p["x0_lambdas"], torch.tensor([0.20, 0.15, 0.10, 0.05]))
    assert (p["smear_lambda"].item(), p["backout_lambda"].item()) == (0, pytest.approx(0.2))


def test_another_seed_draws_other_weights():
    one, two = (GPT(CONFIG, compute_dtype=torch.float32) for _ in range(2))
    one.init_weights(seed=1)
    two.init_weights(seed=2)
    assert not torch.equal(one.wte.weight, two.wte.weight)


def test_flex_attention_is_refused_on_the_cpu():
    idx, targets = rows()
    with pytest.raises(PlanError) as error:
        make_gpt(attention="flex")(idx, targets)
    assert error.value.fix == "attention sdpa"


def test_flex_s_block_mask_shows_what_a_window_shows():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 300, 16, generator=generator) for _ in range(3))
    seen = flex_attention(q, k, v, block_mask=sliding_block_mask(300, 128, q.device))
    torch.testing.assert_close(seen.transpose(1, 2), causal_attention(q, k, v, window=128))


def test_a_row_longer_than_the_model_takes_is_refused():
    with pytest.raises(ValueError, match="301 tokens in a row, the model takes 300"):
        make_gpt().logits(torch.zeros(1, 301, dtype=torch.int64))


def test_a_step_that_is_not_compiled_does_not_import_the_compiler():
    """It takes longer to import than all else that a small run waits for at its start."""
    code = """
import sys, torch, paceline.train.worker
from paceline.config import ModelConfig
from paceline.model.gpt import GPT
config = ModelConfig(
    n_layer=2, n_embd=32, n_head=4, n_kv_head=2, head_dim=8, sequence_len=32, vocab_size=64, window_pattern="L"
)
model = GPT(config, compute_dtype=torch.float32)
model.init_weights(seed=1)
idx = torch.zeros(1, 32, dtype=torch.int64)
model(idx, idx).backward()
print("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


WITH_KERNELS = (pytest.mark.compiler, pytest.mark.soak)  # every layer is up to a minute of C++


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, compute_dtype, n_layer, sequence_len",
    [
        # the graphs that inductor makes kernels of; test_send_order.py has those of ten layers, test_walk.py counts them
        pytest.param("aot_eager", torch.float32, 1, 140, marks=pytest.mark.soak),
        pytest.param("inductor", torch.float32, 1, 140, marks=WITH_KERNELS),  # attention in two blocks
        pytest.param("inductor", torch.float32, 2, 300, marks=WITH_KERNELS),
        pytest.param("inductor", torch.bfloat16, 2, 300, marks=WITH_KERNELS),
    ],
)
def test_compiled_and_eager_agree_and_only_the_loss_is_outside_the_graph(backend, compute_dtype, n_layer, sequence_len):
    from torch._dynamo.utils import counters

    narrow = compute_dtype == torch.bfloat16
    config = replace(CONFIG, n_layer=n_layer, sequence_len=sequence_len)
    model = make_gpt(config, compute_dtype=compute_dtype, activation_checkpointing=narrow)
    idx, targets = rows(config)
    eager_loss, eager = gradients(model, idx, targets)
    counters.clear()
    model.compile(dynamic=False, backend=backend)
    loss, compiled = gradients(model, idx, targets)
    assert [reason.splitlines()[0] for reason in counters["graph_break"]] == [
        "Skip calling `torch.compiler.disable()`d function"
    ]
    assert loss.item() == pytest.approx(eager_loss.item(), rel=2e-3 if narrow else 1e-5)
    for name in eager.keys() - (
        STREAM_SCALARS if narrow else {"backout_lambda"}
    ):  # up to two layers it changes nothing
        assert (compiled[name] - eager[name]).norm() < (0.04 if narrow else 1e-3) * eager[name].norm(), name
