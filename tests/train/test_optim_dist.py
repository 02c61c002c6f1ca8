"""Both optimizers on 1 to 4 real ranks over gloo."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from optim_ranks import LR, MICRO_BATCHES, Tensors, make_optimizer, random_grads, run_rank, weights
from torch import Tensor
from torch.distributed import TCPStore

from paceline.errors import PacelineError
from paceline.train.process import init_distributed

pytestmark = pytest.mark.dist

WORLD_SIZES = (1, 2, 3, pytest.param(4, marks=pytest.mark.soak))
RESHARDED = ((2, 3), (3, 1), (3, 2), pytest.param(4, 1, marks=pytest.mark.soak))  # saved by, loaded by
CONTEXT = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of the results of all ranks."""
    # torch and its compiler, which DDP and checkpointing bring in, are imported once, not by every rank
    CONTEXT.set_forkserver_preload(["paceline.train.optim", "torch._dynamo"])
    return tmp_path_factory.mktemp("ranks")


def start(context, world_size: int, *args: object, run=run_rank) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [context.Process(target=run, args=(rank, world_size, store.port, *args)) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=300)
    for rank in ranks:
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0] * world_size


def facts_of_ranks(
    folder: Path, world_sizes: tuple[int, ...], run: Callable[..., None], *args: object
) -> dict[int, list[dict]]:
    """What each rank of each world size has written into `all-WORLD_SIZE-RANK.pt`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.train.setup", "torch._dynamo"])
    for world_size in world_sizes:
        start(context, world_size, folder, *args, run=run)
    return {n: [torch.load(folder / f"all-{n}-{rank}.pt") for rank in range(n)] for n in world_sizes}


def results(folder: Path, world_size: int, key: str, *, saved_by: int | None = None) -> list:
    """Each rank's."""
    return [torch.load(path)[key] for path in result_files(folder, world_size, saved_by)]


def result_files(folder: Path, world_size: int, saved_by: int | None) -> list[Path]:
    """Starts the processes of a world size, or of a change from one that saved, unless another test has."""
    stem = "first" if saved_by is None else f"resumed-{saved_by}"
    paths = [folder / f"{stem}-{world_size}-{rank}.pt" for rank in range(world_size)]
    if not paths[0].exists():
        if saved_by is not None:
            result_files(folder, saved_by, None)
        start(CONTEXT, world_size, folder, saved_by)
    return paths


def gathered(ranks: list) -> dict[str, Tensor]:
    """Whole tensors from every rank's rows; NaN where no rank had a row."""
    tensors: dict[str, Tensor] = {}
    for pieces in ranks:
        for key, shape, lo, tensor in pieces:
            whole = tensors.setdefault(key, torch.full(shape, torch.nan))
            assert whole[lo : lo + len(tensor)].isnan().all(), f"two ranks own rows of {key}"
            whole[lo : lo + len(tensor)] = tensor
    return tensors


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
@pytest.mark.parametrize("run", ["exact", "exact adamw", "exact bf16"])
@pytest.mark.parametrize("shard", ["", " full"])
def test_weights_and_states_are_those_of_one_rank_to_the_last_bit(folder, run, shard, world_size):
    assert same_bits(gathered(results(folder, world_size, run + shard)), gathered(results(folder, 1, run)))


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
@pytest.mark.parametrize("run", ["exact", "exact adamw", "exact bf16"])
def test_sharded_weights_have_no_memory_between_two_steps(folder, run, world_size):
    assert results(folder, world_size, f"{run} full memory") == [0] * world_size


def test_a_compiled_model_sums_the_same_gradients(folder):
    assert same_bits(*(gathered(results(folder, 2, run)) for run in ("compiled", "exact")))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_rank_computes_with_the_same_weights(folder, world_size):
    masters = gathered(results(folder, 1, "exact"))
    for found in results(folder, world_size, "exact weights"):
        assert all(torch.equal(tensor, masters[f"model.{name}"]) for name, tensor in found.items())


@pytest.mark.parametrize(("saved_by", "world_size"), RESHARDED)
def test_other_numbers_of_ranks_load_a_checkpoint_and_continue_to_the_same_bits(folder, saved_by, world_size):
    expected = gathered(results(folder, 1, "six steps"))
    for name in ("six steps", "six steps full") if world_size > 1 else ("six steps",):
        resumed = results(folder, world_size, name, saved_by=saved_by)
        assert same_bits(gathered(resumed), expected)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_a_repeat_has_the_same_bits(folder, world_size):
    assert same_bits(*(gathered(results(folder, world_size, run)) for run in ("random", "random again")))


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_real_gradients_differ_by_rounding_alone(folder, world_size):
    found, expected = (gathered(results(folder, n, "random")) for n in (world_size, 1))
    for name, start in Tensors().named_parameters():
        moved = expected[f"model.{name}"] - start.detach()
        # bf16 orthogonalization carries an input's last bit to some per cent of the update
        assert (found[f"model.{name}"] - expected[f"model.{name}"]).norm() < 0.05 * moved.norm()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_extras_are_summed_once_and_every_rank_gets_them(folder, world_size):
    reduced = results(folder, world_size, "reduced")
    expected = [world_size * (world_size + 1) / 2, world_size]
    assert [each[:2].tolist() for each in reduced] == [expected] * world_size
    torch.testing.assert_close(
        reduced[0], torch.cat([reduced[0][:2], results(folder, 1, "reduced")[0][2:]]), rtol=1e-5, atol=0
    )
    assert all(torch.equal(each, reduced[0]) for each in reduced)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_micro_steps_before_the_last_send_nothing(folder, world_size):
    for traffic in results(folder, world_size, "traffic"):
        assert sum(traffic["early"].values()) == 0


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_sums_start_under_the_last_backward_and_a_step_sends_the_fewest_elements(folder, world_size):
    for traffic in results(folder, world_size, "traffic"):
        elements = traffic["segments"] * (world_size - 1)  # each rank's part of the others' segments
        assert traffic["during"]["sent"] == traffic["backward"]["sent"] == elements
        assert traffic["after"]["sent"] == elements
        assert (traffic["backward"]["all_reduce"], traffic["after"]["all_reduce"]) == (0, 1)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
@pytest.mark.parametrize("run", ["missing", "missing full"])
def test_missing_gradients_count_as_zero_and_block_no_rank(folder, run, world_size):
    for without, zeros in results(folder, world_size, run):
        assert same_bits(without, zeros)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_bf16_gradients_of_one_micro_step_are_added_over_ranks_in_fp32(folder, world_size):
    for sent, alone in results(folder, world_size, "narrow"):
        assert same_bits(sent, alone)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_replicated_adamw_equals_torch_adamw_in_one_process(folder, world_size):
    reference = Tensors()
    torch_adamw = torch.optim.AdamW(reference.parameters(), lr=LR, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1)
    for step in range(3):
        torch_adamw.zero_grad()
        for i in range(MICRO_BATCHES):
            (reference(random_grads(step, i)) / MICRO_BATCHES).backward()
        torch_adamw.step()
    squares = sum((p.grad.double() * MICRO_BATCHES).square().sum() for p in reference.parameters())
    for rank, found in enumerate(results(folder, world_size, "replicated")):
        for name, param in reference.named_parameters():
            torch.testing.assert_close(found[name], param.detach(), atol=2e-6, rtol=0)
        reduced = results(folder, world_size, "replicated reduced")[rank]
        assert reduced[:2].tolist() == [world_size * (world_size + 1) / 2, world_size]
        torch.testing.assert_close(reduced[2].double(), squares, rtol=1e-5, atol=0)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rank_0_alone_saves_replicated_states(folder, world_size):
    num_tensors = len(weights(make_optimizer(0, 1)))
    assert results(folder, world_size, "replicated pieces") == [3 * num_tensors] + [0] * (world_size - 1)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sums_and_broadcasts_reach_every_rank(folder, world_size):
    assert results(folder, world_size, "sum") == [world_size * (world_size + 1) / 2] * world_size
    assert results(folder, world_size, "broadcast") == ["from 0"] * world_size
    assert results(folder, world_size, "any rank") == [[True, False]] * world_size


def test_a_world_size_without_a_rendezvous_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PacelineError, match="WORLD_SIZE is 2, but RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT") as error:
        init_distributed("cpu")
    assert error.value.fix == "start it through paceline train or torchrun, or unset WORLD_SIZE"


def test_one_process_without_a_launcher_needs_no_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert init_distributed("cpu") == (0, 1, 0)
    assert not torch.distributed.is_initialized()
