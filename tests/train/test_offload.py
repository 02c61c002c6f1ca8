"""`--offload optimizer` on 1 and 2 real ranks over gloo: the bits of weights and states, checkpoints, and what is on the host."""

import itertools

import pytest
import torch
from offload_ranks import OFFLOADS, WAYS, run_rank
from optim_ranks import LR, SHAPES, Tensors, make_optimizer, random_grads
from state_ranks import whole
from test_optim_dist import facts_of_ranks, same_bits

from paceline.config import Config, check_config
from paceline.errors import PacelineError
from paceline.plan import offloading
from paceline.plan.algorithms import GroupSettings
from paceline.plan.sharding import ALIGNMENT
from paceline.train import offload
from paceline.train.optim import ReplicatedOptimizer, ShardedOptimizer

pytestmark = pytest.mark.dist

WORLD_SIZES = (1, 2)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, list[dict]]:
    """What each rank of each world size found."""
    return facts_of_ranks(tmp_path_factory.mktemp("ranks"), WORLD_SIZES, run_rank)


def check_same(ranks: list[dict], one: tuple, other: tuple) -> None:
    assert same_bits(*(whole_of(ranks, key) for key in (one, other)))
    for rank in ranks:
        for fact in ("losses", "norms"):
            assert rank[one][fact] == rank[other][fact]
        assert torch.equal(rank[one]["nats"], rank[other]["nats"])
        assert same_bits(rank[one]["weights"], rank[other]["weights"])


def whole_of(ranks: list[dict], key: tuple) -> dict[str, torch.Tensor]:
    return whole([rank[key]["rows"] for rank in ranks])


@pytest.mark.soak
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", WAYS)
def test_three_steps_end_in_the_bits_of_steps_without_offloading(found, name, world_size):
    check_same(found[world_size], (name, "none"), (name, "optimizer"))
    assert not any(tensor.isnan().any() for tensor in whole_of(found[world_size], (name, "none")).values())


@pytest.mark.soak
@pytest.mark.parametrize("world_size, saved_by", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", ["muon bf16 optimizer", "muon bf16 full"])
def test_either_resumes_the_others_checkpoint_to_the_same_bits(found, name, world_size, saved_by):
    resumed = [(name, saved_by, *modes) for modes in itertools.product(OFFLOADS, OFFLOADS)]
    for key in resumed[1:]:
        check_same(found[world_size], resumed[0], key)
    if saved_by == world_size:  # and an unbroken run does
        assert same_bits(whole_of(found[world_size], resumed[0]), whole_of(found[world_size], (name, "none")))


@pytest.mark.soak
def test_a_checkpoint_has_the_same_tensors(found):
    for name in WAYS:
        one, other = (whole([found[1][0][name, offload]["checkpoint"]]) for offload in OFFLOADS)
        assert same_bits(one, other)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(offloading, "ROW_BATCH_BYTES", 3 * 4 * 64 * 24 * 2)


def offloaded(dtype: torch.dtype, **options):
    return make_optimizer(0, 1, dtype=dtype, offload=True, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_states_and_in_16_bits_all_masters_are_in_one_allocation(dtype, monkeypatch):
    made = []
    host_zeros = offload.host_zeros
    monkeypatch.setattr(offload, "host_zeros", lambda *args: made.append(host_zeros(*args)) or made[-1])
    optimizer = offloaded(dtype)
    [flat] = made
    tensors = [tensor for share in optimizer._sharded for tensor in share.movable()]
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} == {flat.untyped_storage().data_ptr()}
    assert sum(tensor.nbytes for tensor in tensors) == flat.nbytes
    masters = [share.master for share in optimizer._sharded]
    inside = [master.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for master in masters]
    assert set(inside) == {dtype == torch.bfloat16}
    weights = {param.untyped_storage().data_ptr() for param in optimizer._params}
    assert flat.untyped_storage().data_ptr() not in weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_batches_of_an_update_are_what_the_planner_counts(dtype, small_batches):
    optimizer = offloaded(dtype)
    for bucket in optimizer._buckets:
        covered = {share.shape.name: 0 for share in bucket.owned}
        for batch in optimizer._batches[bucket.tag]:
            if bucket.whole:
                for share in batch.shares:
                    covered[share.shape.name] += share.hi - share.lo
                continue
            for share, lo, hi in batch._parts:
                assert lo == covered[share.shape.name] and lo * 24 % ALIGNMENT == 0
                covered[share.shape.name] = hi
        assert covered == {share.shape.name: share.hi - share.lo for share in bucket.owned}
    rows = [batch for bucket in optimizer._buckets if not bucket.whole for batch in optimizer._batches[bucket.tag]]
    assert len(rows) > offloading.NUM_BUFFERS  # a buffer is used again
    numel = sum(tensor.numel() for batch in optimizer._staging._batches for tensor in batch.tensors)
    assert numel == sum(tensor.numel() for share in optimizer._sharded for tensor in share.movable())


def test_a_batch_out_of_its_turn_is_an_error():
    optimizer = offloaded(torch.bfloat16)
    with pytest.raises(AssertionError, match="turn"), optimizer._staging.on_device(optimizer._staging._batches[1]):
        pass


@pytest.mark.parametrize("answer, pinned, refused", [(0, True, False), (2, True, True), (0, False, True)])
def test_memory_that_cuda_does_not_lock_is_an_error_with_a_fix(answer, pinned, refused, monkeypatch):
    calls = []

    class Runtime:
        def cudaHostRegister(self, *args: int) -> int:
            calls.append(args)
            return answer

    tensor = torch.zeros(1000)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: pinned)
    if refused:
        with pytest.raises(PacelineError, match=f"cudaHostRegister: error {answer}") as error:
            offload.page_lock(tensor)
        assert "ulimit -l" in error.value.fix
    else:
        offload.page_lock(tensor)
    assert calls == [(tensor.data_ptr(), 4000, 1)]


def test_ddp_has_nothing_to_offload():
    with pytest.raises(AssertionError, match="nothing to offload"):
        offloaded(torch.float32, kind=ReplicatedOptimizer, muon=False)
    with pytest.raises(PacelineError) as error:
        check_config(Config(shard="none", optimizer="adamw", offload="optimizer"))
    assert error.value.message == "offload is optimizer, but shard = none is plain DDP, whose states stay on every GPU"
    assert error.value.fix == "--shard optimizer, or --offload none"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("muon", [True, False])
def test_a_gpu_ends_in_the_same_bits_with_offloading(dtype, muon, small_batches):
    adamw = GroupSettings("adamw", LR, (0.8, 0.95), 1e-10, 0.1)
    matrix = GroupSettings("muon", LR, (0.0, 0.9), 1e-10, 0.1) if muon else adamw
    groups = {"matrix": matrix, "wte": adamw, "scalars": adamw}
    results = []
    for offloading_on in (False, True):
        optimizer = ShardedOptimizer(
            Tensors().cuda(),
            SHAPES,
            groups,
            rank=0,
            world_size=1,
            compute_dtype=dtype,
            grad_accum_steps=1,
            offload=offloading_on,
        )
        for step in range(5):
            optimizer.zero_grad()
            with optimizer.micro_step(last=True):
                optimizer.module({name: grad.cuda() for name, grad in random_grads(step, 0).items()}).backward()
            optimizer.reduce(torch.zeros(1, device="cuda"))
            optimizer.step(lr_mult=1.0, momentum=0.9, weight_decay_mult=1.0, grad_scale=1.0)
        tensors = {piece.key: piece.tensor.cpu() for piece in optimizer.pieces()}
        results.append(tensors | {name: param.detach().cpu() for name, param in optimizer.module.named_parameters()})
    assert same_bits(*results)
