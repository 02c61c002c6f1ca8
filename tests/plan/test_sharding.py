"""Who owns what, for many world sizes and depths."""

from itertools import pairwise, product

from rows import with_rows

from paceline.config import ModelConfig
from paceline.plan.algorithms import ALGORITHMS, newton_schulz_flops
from paceline.plan.shapes import ParamShape, param_shapes
from paceline.plan.sharding import (
    ALIGNMENT,
    BATCH_NUMEL,
    Moment,
    ShardPlan,
    backward_order,
    compiles_by_block,
    gather_schedule,
    matrix_batches,
    parts_of,
    row_size,
    shard_plan,
)

WORLD_SIZES = range(1, 17)
DEPTHS = (2, 3, 4, 5, 7, 8, 12, 13, 24)


def shapes_of(depth: int) -> tuple[ParamShape, ...]:
    model = ModelConfig(n_layer=depth, n_embd=128, n_head=4, n_kv_head=4, head_dim=32, sequence_len=64, vocab_size=1000)
    return param_shapes(model)


def padding(plan: ShardPlan) -> int:
    """The elements of all buckets that belong to no tensor."""
    tensors = sum(placement.param.numel for bucket in plan.buckets for placement in bucket.placements)
    return sum(bucket.segment for bucket in plan.buckets) * plan.world_size - tensors


def owners(plan: ShardPlan) -> dict[str, list[tuple[int, int, int]]]:
    """Tensor -> (rank, lo, hi) of each share, in rank order."""
    shards: dict[str, list[tuple[int, int, int]]] = {}
    for bucket in plan.buckets:
        for rank in range(plan.world_size):
            for share in bucket.shares(rank):
                shards.setdefault(share.param.name, []).append((rank, share.lo, share.hi))
    return shards


@with_rows(("world_size", "optimizer"), product(WORLD_SIZES, ALGORITHMS))
def test_every_row_of_every_tensor_is_owned_once_or_replicated(world_size, optimizer):
    for depth in DEPTHS:
        shapes = shapes_of(depth)
        plan = shard_plan(shapes, world_size=world_size, optimizer=optimizer)
        owned = owners(plan)
        assert sorted([*owned, *(shape.name for shape in plan.replicated)]) == sorted(shape.name for shape in shapes)
        for shape in shapes:
            if shape.name in owned:
                parts = owned[shape.name]
                assert parts[0][1] == 0
                assert parts[-1][2] == shape.shape[0]
                assert all(before[2] == after[1] for before, after in pairwise(parts))


@with_rows("world_size", WORLD_SIZES)
def test_muon_never_splits_a_matrix_and_loads_differ_by_one_matrix_at_most(world_size):
    for depth in DEPTHS:
        shapes = {shape.name: shape for shape in shapes_of(depth)}
        owned = owners(shard_plan(tuple(shapes.values()), world_size=world_size, optimizer="muon"))
        loads = [0] * world_size
        for name, parts in owned.items():
            if shapes[name].group == "matrix":
                assert len(parts) == 1
                loads[parts[0][0]] += newton_schulz_flops(shapes[name].shape)
        largest = max(newton_schulz_flops(shape.shape) for shape in shapes.values() if shape.group == "matrix")
        assert max(loads) - min(loads) <= largest


@with_rows("world_size", WORLD_SIZES)
def test_tensors_lie_in_their_bucket_without_overlap_and_aligned(world_size):
    for optimizer in ("muon", "adamw"):
        plan = shard_plan(shapes_of(5), world_size=world_size, optimizer=optimizer)
        for bucket in plan.buckets:
            assert bucket.segment % ALIGNMENT == 0
            ends = [0]
            for placement in sorted(bucket.placements, key=lambda member: member.offset):
                assert placement.offset % ALIGNMENT == 0
                assert placement.offset >= ends[-1]
                ends.append(placement.offset + placement.param.numel)
            assert ends[-1] <= bucket.segment * world_size


@with_rows("world_size", WORLD_SIZES)
def test_a_split_tensor_is_cut_at_aligned_row_borders(world_size):
    shapes = (ParamShape("embedding", (1003, 24), "wte"), ParamShape("odd", (301, 57), "wte"))
    plan = shard_plan(shapes, world_size=world_size, optimizer="muon")
    for bucket in plan.buckets:
        for rank in range(world_size):
            for share in bucket.shares(rank):
                assert share.lo * row_size(share.param) % ALIGNMENT == 0


@with_rows("world_size", [2, 4, 6, 8])
def test_segments_have_no_padding_when_the_ranks_divide_twice_the_layers(world_size):
    for depth in (depth for depth in DEPTHS if 2 * depth % world_size == 0):
        matrices = tuple(s for s in shapes_of(depth) if s.group == "matrix" and "ve_gate" not in s.name)
        assert padding(shard_plan(matrices, world_size=world_size, optimizer="muon")) == 0


@with_rows("world_size", [3, 5, 7])
def test_an_odd_number_of_ranks_pads_little(world_size):
    shapes = shapes_of(16)
    plan = shard_plan(shapes, world_size=world_size, optimizer="muon")
    assert padding(plan) < 0.1 * sum(shape.numel for shape in shapes)


def test_one_rank_owns_everything_and_pads_nothing_but_alignment():
    plan = shard_plan(shapes_of(4), world_size=1, optimizer="muon")
    assert padding(plan) < ALIGNMENT * len(shapes_of(4))


def test_small_tensors_are_replicated_but_small_matrices_of_muon_are_not():
    muon, adamw = (shard_plan(shapes_of(2), world_size=2, optimizer=name) for name in ("muon", "adamw"))
    scalars = ["resid_lambdas", "x0_lambdas", "smear_lambda", "backout_lambda", "smear_gate.weight"]
    assert [shape.name for shape in muon.replicated] == scalars
    assert sorted(shape.name for shape in adamw.replicated) == sorted([*scalars, "h.1.attn.ve_gate.weight"])


def test_buckets_are_sent_in_the_order_in_which_backward_completes_them():
    shapes = shapes_of(12)
    ready = {shape.name: position for position, shape in enumerate(backward_order(shapes))}
    for world_size in (1, 2, 3, 8):
        plan = shard_plan(shapes, world_size=world_size, optimizer="muon")
        complete = [max(ready[placement.param.name] for placement in bucket.placements) for bucket in plan.buckets]
        assert complete == sorted(complete)
        assert [placement.param.name for placement in plan.buckets[0].placements] == ["lm_head.weight"]
        assert plan.buckets[-1].placements[-1].param.name == "wte.weight"


@with_rows("optimizer", ALGORITHMS)
def test_lm_head_s_gradient_waits_for_no_other(optimizer):
    """The loss makes it: it is sent under the whole backward."""
    for depth in DEPTHS:
        first = shard_plan(shapes_of(depth), world_size=2, optimizer=optimizer).buckets[0]
        assert [placement.param.name for placement in first.placements] == ["lm_head.weight"]


def test_one_graph_is_compiled_only_where_no_gradient_is_sent_by_us():
    assert not compiles_by_block(world_size=1, shard="optimizer")
    assert compiles_by_block(world_size=2, shard="optimizer")
    assert not compiles_by_block(world_size=2, shard="none")  # DDP splits the graph at its buckets


@with_rows(("world_size", "most"), [(1, 4), (2, 18), (8, 7)])
def test_a_gpu_updates_the_matrices_of_depth_12_in_few_calls(world_size, most):
    """On one card all of a shape at once; on several the large ones bucket by bucket, and the gates of all layers at once."""
    model = ModelConfig(12, 768, 6, 6, 128, sequence_len=2048, vocab_size=32_768)
    plan = shard_plan(param_shapes(model), world_size=world_size, optimizer="muon")
    for rank in range(world_size):
        owned = [[share.param.shape for share in bucket.shares(rank)] for bucket in plan.buckets if bucket.whole]
        assert sum(len(list(matrix_batches(shapes, together=True))) for shapes in owned) <= most
        assert sum((6, 12) in shapes for shapes in owned) <= 1


def test_a_batch_of_matrices_is_bounded_and_a_cpu_takes_each_by_itself():
    shapes = [(1536, 1536)] * 96 + [(6144, 1536)] * 2
    batches = list(matrix_batches(shapes, together=True))
    assert [number for batch in batches for number in batch] == list(range(len(shapes)))
    sizes = list(map(len, batches))
    assert max(sizes) * 1536**2 <= BATCH_NUMEL
    assert sizes[-1] == 2
    assert list(map(len, matrix_batches([(3, 4)] * 3, together=False))) == [1, 1, 1]
    beyond = [(1 << 14, 1 << 14)] * 2
    assert list(map(len, matrix_batches(beyond, together=True))) == [1, 1]  # a matrix beyond the bound is a batch


def test_a_value_embedding_is_ready_with_its_layer():
    order = [shape.name for shape in backward_order(shapes_of(4))]
    places = [order.index(name) for name in ("h.3.mlp.c_fc.weight", "value_embeds.3.weight", "h.2.mlp.c_fc.weight")]
    assert sorted(places[:2]) < [places[2]]
    assert order.index("value_embeds.1.weight") > places[2]


def test_there_are_several_buckets_so_that_sending_overlaps_with_backward():
    for world_size in (2, 4, 8):
        assert 8 <= len(shard_plan(shapes_of(16), world_size=world_size, optimizer="muon").buckets) <= 20
        assert 4 <= len(shard_plan(shapes_of(16), world_size=world_size, optimizer="adamw").buckets) <= 10


def schedule_of(depth: int, world_size: int, **keys: object) -> tuple[ShardPlan, tuple[Moment, ...]]:
    shapes = shapes_of(depth)
    plan = shard_plan(shapes, world_size=world_size, optimizer=keys.pop("optimizer", "muon"), shard="full")
    return plan, gather_schedule(plan, shapes, **{"checkpointing": False} | keys)


@with_rows(("world_size", "optimizer", "rung"), product([2, 3, 4, 8], ALGORITHMS, [False, "mlp", True]))
def test_weights_are_there_where_they_are_needed_and_freed_after_it(world_size, optimizer, rung):
    for depth in DEPTHS:
        plan, schedule = schedule_of(depth, world_size, optimizer=optimizer, checkpointing=rung)
        parts = parts_of(shapes_of(depth))
        live, waited = set(), set()
        for at, moment in enumerate(schedule):
            assert set(moment.free) <= waited  # none that is still being sent
            live, waited = live - set(moment.free), waited - set(moment.free)
            assert not live & set(moment.gather)
            live |= set(moment.gather)
            assert set(moment.need) <= live
            waited |= set(moment.need)
            for number, bucket in enumerate(plan.buckets):
                for param in (placement.param for placement in bucket.placements):
                    in_forward = at == parts[param.name]
                    in_backward = at == len(schedule) - 2 - parts[param.name]
                    again = 0 < parts[param.name] <= depth and rung is True
                    if in_forward or (in_backward and (param.group == "matrix" or again)):
                        assert number in moment.need
        assert not live


@with_rows("world_size", [2, 3, 4, 8])
def test_gradients_are_sent_once_in_the_plans_order_when_the_first_of_their_layers_is_left(world_size):
    for depth in DEPTHS:
        plan, schedule = schedule_of(depth, world_size)
        assert [number for moment in schedule for number in moment.complete] == list(range(len(plan.buckets)))
        parts = parts_of(shapes_of(depth))
        for at, moment in enumerate(schedule):
            for number in moment.complete:
                first = min(parts[placement.param.name] for placement in plan.buckets[number].placements)
                assert at == len(schedule) - 1 - first


def test_one_layer_is_gathered_ahead_of_another():
    plan, schedule = schedule_of(12, 2)
    matrices = [number for number, bucket in enumerate(plan.buckets) if bucket.whole]
    assert len(matrices) == 12  # two ranks own half of a layer's matrices each
    live, most = set(), 0
    for moment in schedule:
        live = live - set(moment.free) | set(moment.gather)
        most = max(most, len(live & set(matrices)))
    assert most == 2


def test_a_forward_alone_leaves_nothing_behind():
    _, schedule = schedule_of(5, 3, backward=False)
    gathered, freed = ([n for moment in schedule for n in getattr(moment, name)] for name in ("gather", "free"))
    assert sorted(gathered) == sorted(freed)
    assert not any(moment.complete for moment in schedule)


@with_rows(("world_size", "optimizer"), product(WORLD_SIZES[1:], ALGORITHMS))
def test_buckets_of_sharded_weights_have_whole_layers_and_a_table_each(world_size, optimizer):
    for depth in DEPTHS:
        shapes = shapes_of(depth)
        plan = shard_plan(shapes, world_size=world_size, optimizer=optimizer, shard="full")
        parts = parts_of(shapes)
        for bucket in plan.buckets:
            names = {placement.param.name for placement in bucket.placements}
            if any(placement.param.group == "matrix" for placement in bucket.placements):
                layers = {parts[name] for name in names}
                whole = {shape.name for shape in shapes if shape.group == "matrix" and parts[shape.name] in layers}
                assert names == whole - {shape.name for shape in plan.replicated}
            else:
                assert len(names) == 1
