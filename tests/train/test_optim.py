"""Both optimizers in one process: buffers, precision, gradients, checkpoints."""

import pytest
import torch
from torch import Tensor, nn

from paceline.plan.algorithms import GroupSettings
from paceline.plan.shapes import ParamShape
from paceline.train.optim import ReplicatedOptimizer, ShardedOptimizer
from paceline.train.update_batches import make_batches

SHAPES = (
    ParamShape("scale", (7,), "scalars"),
    ParamShape("wte", (1003, 24), "wte"),
    ParamShape("square", (64, 64), "matrix"),
    ParamShape("wide", (64, 256), "matrix"),
    ParamShape("tall", (256, 64), "matrix"),
    ParamShape("odd", (33, 57), "matrix"),
)
ADAMW = GroupSettings("adamw", 0.01, (0.8, 0.95), 1e-10, 0.1)
MUON = GroupSettings("muon", 0.02, (0.0, 0.9), 1e-10, 0.1)
STEP = {"lr_mult": 0.5, "momentum": 0.9, "weight_decay_mult": 0.7, "grad_scale": 1 / 16}


class Tensors(nn.Module):
    """Just parameters; forward multiplies each by a given tensor, so that tensor becomes its gradient."""

    def __init__(self, shapes=SHAPES):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for shape in shapes:
            self.register_parameter(shape.name, nn.Parameter(torch.randn(shape.shape, generator=generator)))

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        return sum((param.float() * grads[name]).sum() for name, param in self.named_parameters() if name in grads)


def make_grads(step: int, micro_step: int = 0, *, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + micro_step + 1)
    return {shape.name: scale * torch.randn(shape.shape, generator=generator) for shape in SHAPES}


def make_optimizer(kind=ShardedOptimizer, *, matrix=MUON, compute_dtype=torch.float32, grad_accum_steps=1):
    groups = {"matrix": matrix, "wte": ADAMW, "scalars": ADAMW}
    return kind(
        Tensors(), SHAPES, groups, rank=0, world_size=1, compute_dtype=compute_dtype, grad_accum_steps=grad_accum_steps
    )


def one_step(optimizer, *micro_grads: dict[str, Tensor], **changes: float) -> Tensor:
    optimizer.zero_grad()
    for i, grads in enumerate(micro_grads):
        with optimizer.micro_step(last=i == len(micro_grads) - 1):
            optimizer.module(grads).backward()
    reduced = optimizer.reduce(torch.tensor([3.0, 4.0]))
    optimizer.step(**{**STEP, **changes})
    return reduced


def saved(optimizer) -> dict[str, Tensor]:
    return {piece.key: piece.tensor.clone() for piece in optimizer.pieces()}


def test_adamw_on_everything_equals_torch_adamw():
    for kind in (ShardedOptimizer, ReplicatedOptimizer):
        optimizer, reference = make_optimizer(kind, matrix=ADAMW), Tensors()
        torch_adamw = torch.optim.AdamW(
            reference.parameters(), lr=0.005, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1
        )
        for step in range(4):
            one_step(optimizer, make_grads(step))
            torch_adamw.zero_grad()
            (reference(make_grads(step)) / 16).backward()
            torch_adamw.step()
        for name, param in optimizer.module.named_parameters():
            torch.testing.assert_close(param, reference.get_parameter(name), atol=1e-6, rtol=0)


def test_reduce_returns_the_extras_and_the_square_of_the_gradient_norm():
    for kind, matrix in ((ShardedOptimizer, MUON), (ReplicatedOptimizer, ADAMW)):
        grads = make_grads(0)
        expected = sum(grad.double().square().sum() for grad in grads.values())
        reduced = one_step(make_optimizer(kind, matrix=matrix), grads)
        assert reduced[:2].tolist() == [3.0, 4.0]
        torch.testing.assert_close(reduced[2].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_micro_steps_add_up_in_fp32(compute_dtype):
    grads = [make_grads(0, i) for i in range(4)]
    many = make_optimizer(compute_dtype=compute_dtype, grad_accum_steps=4)
    reduced = one_step(many, *grads)
    expected = sum(sum(each[name] for each in grads).double().square().sum() for name in grads[0])
    torch.testing.assert_close(
        reduced[2].double(), expected, rtol=2e-3 if compute_dtype == torch.bfloat16 else 1e-5, atol=0
    )
    if compute_dtype == torch.bfloat16:
        assert {param.grad.dtype for param in many.module.parameters()} == {torch.float32}


def test_bf16_weights_are_the_rounded_fp32_masters_and_scalars_stay_fp32():
    optimizer = make_optimizer(compute_dtype=torch.bfloat16)
    for step in range(3):
        one_step(optimizer, make_grads(step), lr_mult=0.001)  # too small for bf16 weights to move in every step
    masters = saved(optimizer)
    for name, param in optimizer.module.named_parameters():
        master = masters[f"model.{name}"]
        assert master.dtype == torch.float32
        assert torch.equal(param, master.to(param.dtype))
        assert param.dtype == (torch.float32 if name == "scale" else torch.bfloat16)
    assert not torch.equal(masters["model.wte"], masters["model.wte"].bfloat16().float())


def test_fp16_gradients_are_kept_in_fp32_and_an_overflow_shows_in_reduce_before_any_weight_moves():
    optimizer = make_optimizer(compute_dtype=torch.float16)
    before = saved(optimizer)
    grads = make_grads(0)
    grads["wide"][3, 3] = torch.inf
    optimizer.zero_grad()
    with optimizer.micro_step(last=True):
        optimizer.module(grads).backward()
    assert not optimizer.reduce(torch.zeros(1))[-1].isfinite()
    assert optimizer.module.wide.grad.dtype == torch.float32
    assert all(torch.equal(tensor, before[key]) for key, tensor in saved(optimizer).items())


def test_a_skipped_step_leaves_no_trace():
    plain, skipping = make_optimizer(), make_optimizer()
    skipping.zero_grad()
    with skipping.micro_step(last=True):
        skipping.module(make_grads(9)).backward()
    skipping.reduce(torch.zeros(1))
    for optimizer in (plain, skipping):
        one_step(optimizer, make_grads(0))
    assert all(torch.equal(tensor, saved(plain)[key]) for key, tensor in saved(skipping).items())


def test_a_parameter_without_gradient_is_updated_as_with_a_gradient_of_zero():
    without, zeros = make_optimizer(), make_optimizer()
    for step in range(2):
        grads = make_grads(step)
        one_step(without, {name: grad for name, grad in grads.items() if name not in ("odd", "wte", "scale")})
        one_step(zeros, {**grads, **{name: torch.zeros_like(grads[name]) for name in ("odd", "wte", "scale")}})
    assert all(torch.equal(tensor, saved(zeros)[key]) for key, tensor in saved(without).items())


def test_grad_scale_makes_the_sum_a_mean():
    one, other = make_optimizer(), make_optimizer()
    one_step(one, make_grads(0), grad_scale=0.25)
    one_step(other, make_grads(0, scale=4), grad_scale=0.0625)
    assert all(torch.equal(tensor, saved(other)[key]) for key, tensor in saved(one).items())


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "matrix"), [(ShardedOptimizer, MUON), (ShardedOptimizer, ADAMW), (ReplicatedOptimizer, ADAMW)]
)
def test_a_loaded_optimizer_continues_with_the_same_bits(kind, matrix, compute_dtype):
    if kind is ReplicatedOptimizer and compute_dtype != torch.float32:
        return  # its weights are fp32 whatever the model computes in
    unbroken = make_optimizer(kind, matrix=matrix, compute_dtype=compute_dtype)
    for step in range(2):
        one_step(unbroken, make_grads(step))
    tensors, state = saved(unbroken), unbroken.state_dict()
    resumed = make_optimizer(kind, matrix=matrix, compute_dtype=compute_dtype)
    one_step(resumed, make_grads(7))
    resumed.load(lambda key, lo, hi: tensors[key][lo:hi])
    resumed.load_state_dict(state)
    for optimizer in (unbroken, resumed):
        one_step(optimizer, make_grads(2))
    assert all(torch.equal(tensor, saved(unbroken)[key]) for key, tensor in saved(resumed).items())
    for name, param in resumed.module.named_parameters():
        assert torch.equal(param, unbroken.module.get_parameter(name))


def test_pieces_cover_weights_and_states_with_keys_that_do_not_depend_on_ranks():
    muon, adamw = ("momentum_buffer", "second_momentum_buffer"), ("exp_avg", "exp_avg_sq")
    states = {shape.name: muon if shape.group == "matrix" else adamw for shape in SHAPES}
    expected = {f"model.{name}" for name in states} | {
        f"optim.{name}.{state}" for name in states for state in states[name]
    }
    pieces = {piece.key: piece for piece in make_optimizer().pieces()}
    assert set(pieces) == expected
    assert pieces["optim.odd.second_momentum_buffer"].shape == (1, 57)
    assert (pieces["model.wte"].shape, pieces["model.wte"].rows) == ((1003, 24), (0, 1003))


def test_weights_keep_their_values_when_they_move_into_the_buffers():
    for dtype in (torch.float32, torch.bfloat16):
        optimizer, fresh = make_optimizer(compute_dtype=dtype), Tensors()
        for name, param in optimizer.module.named_parameters():
            assert torch.equal(param, fresh.get_parameter(name).to(param.dtype))


def test_decay_of_muon_follows_its_schedule_and_that_of_adamw_is_constant():
    strong, none = make_optimizer(), make_optimizer()
    one_step(strong, make_grads(0), weight_decay_mult=1.0)
    one_step(none, make_grads(0), weight_decay_mult=0.0)
    differ = {key for key, tensor in saved(strong).items() if not torch.equal(tensor, saved(none)[key])}
    assert differ == {"model.square", "model.wide", "model.tall", "model.odd"}


def test_matrices_updated_together_move_as_each_by_itself():
    shapes = tuple(ParamShape(f"p{i}", (64, 96), "matrix") for i in range(12))
    optimizers = [
        ShardedOptimizer(
            Tensors(shapes),
            shapes,
            {"matrix": MUON},
            rank=0,
            world_size=1,
            compute_dtype=torch.bfloat16,
            grad_accum_steps=1,
        )
        for _ in range(2)
    ]
    buckets = optimizers[1]._buckets
    as_on_a_gpu = {b.tag: list(make_batches(b.owned, whole=True, together=True)) for b in buckets}
    optimizers[1]._batches = as_on_a_gpu
    assert [len(batch.shares) for batches in as_on_a_gpu.values() for batch in batches] == [12]
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        grads = {shape.name: torch.randn(shape.shape, generator=generator) for shape in shapes}
        for optimizer in optimizers:
            one_step(optimizer, grads)
    alone, together = (saved(optimizer) for optimizer in optimizers)
    for key in alone:
        assert (alone[key] - together[key]).norm() < 0.01 * alone[key].norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_takes_the_steps_of_a_cpu(compute_dtype):
    on_cpu, model = make_optimizer(compute_dtype=compute_dtype), Tensors().cuda()
    groups = {"matrix": MUON, "wte": ADAMW, "scalars": ADAMW}
    on_gpu = ShardedOptimizer(
        model, SHAPES, groups, rank=0, world_size=1, compute_dtype=compute_dtype, grad_accum_steps=1
    )
    for step in range(3):
        grads = make_grads(step)
        one_step(on_cpu, grads)
        on_gpu.zero_grad()
        with on_gpu.micro_step(last=True):
            on_gpu.module({name: grad.cuda() for name, grad in grads.items()}).backward()
        on_gpu.reduce(torch.zeros(1, device="cuda"))
        on_gpu.step(**STEP)
    found, expected, start = saved(on_gpu), saved(on_cpu), Tensors()
    for name, param in start.named_parameters():
        moved = (expected[f"model.{name}"] - param.detach()).norm()
        assert (found[f"model.{name}"].cpu() - expected[f"model.{name}"]).norm() < 0.05 * moved


def test_a_model_that_differs_from_the_planned_shapes_is_refused():
    with pytest.raises(AssertionError, match="differ in .*'odd'"):
        ShardedOptimizer(
            Tensors(), SHAPES[:-1], {}, rank=0, world_size=1, compute_dtype=torch.float32, grad_accum_steps=1
        )


def test_a_compiled_model_trains_as_an_eager_one():
    eager, compiled = make_optimizer(), make_optimizer()
    compiled.module.compile(backend="aot_eager")
    for step in range(2):
        for optimizer in (eager, compiled):
            one_step(optimizer, make_grads(step))
    assert all(torch.equal(tensor, saved(eager)[key]) for key, tensor in saved(compiled).items())
