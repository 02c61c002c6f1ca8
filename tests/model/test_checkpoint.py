import itertools
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.model.checkpoint import CheckpointReader, CheckpointWriter, Piece
from paceline.model.manifest import verify
from paceline.model.publish import copy_weights
from paceline.plan.shapes import ParamShape

DOCS = Path(__file__).parents[2] / "docs" / "checkpoint.md"


def make_writer(directory: Path, rank: int = 0, world_size: int = 1, **changes: object) -> CheckpointWriter:
    settings: dict[str, object] = {"attempt": "1", "keep_last": 3, "on_saved": lambda *saved: None, "deadline_s": 300.0}
    return CheckpointWriter(directory, rank=rank, world_size=world_size, **{**settings, **changes})  # type: ignore[arg-type]


def whole(key: str, tensor: Tensor) -> Piece:
    return Piece(key, tuple(tensor.shape), (0, tensor.shape[0] if tensor.dim() else 1), tensor)


def split(key: str, tensor: Tensor, cuts: list[int]) -> list[Piece]:
    """One piece per range between cuts."""
    return [Piece(key, tuple(tensor.shape), (lo, hi), tensor[lo:hi]) for lo, hi in itertools.pairwise(cuts)]


def save_once(directory: Path, pieces: list[Piece]) -> CheckpointReader:
    writer = make_writer(directory)
    writer.save(40, pieces, {})
    writer.wait()
    return CheckpointReader(directory / "step_000040")


def save_as_ranks(directory: Path, pieces_of: list[list[Piece]]) -> None:
    """Every rank's writer in this process; each has its own thread."""
    writers = [make_writer(directory, rank, len(pieces_of)) for rank in range(len(pieces_of))]
    for rank, writer in enumerate(writers):
        writer.save(40, pieces_of[rank], {"rank": rank})
    for writer in writers:
        writer.wait()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype):
    tensor = torch.arange(-30, 30).reshape(6, 10).to(dtype)
    reader = save_once(tmp_path, [whole("x", tensor), whole("flag", torch.tensor([True, False]))])
    assert reader.read("x").dtype == dtype
    assert torch.equal(reader.read("x"), tensor)
    assert torch.equal(reader.read("x", 2, 5), tensor[2:5])
    assert reader.read("flag").tolist() == [True, False]


def test_odd_shapes_come_back(tmp_path: Path):
    tensors = {
        "scalar": torch.tensor(0.1),
        "one": torch.tensor([3.0]),
        "no_rows": torch.empty(0, 4),
        "no_columns": torch.empty(4, 0),
        "deep": torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)),
        "größe.λ": torch.ones(2, dtype=torch.uint8),
    }
    reader = save_once(tmp_path, [whole(key, tensor) for key, tensor in tensors.items()])
    assert sorted(reader.keys()) == sorted(tensors)
    for key, tensor in tensors.items():
        assert reader.read(key).shape == tensor.shape
        assert torch.equal(reader.read(key), tensor)
    assert torch.equal(reader.read("scalar", 0, 1), tensors["scalar"])
    assert reader.read("deep", 1, 1).shape == (0, 2, 4)


def test_tensors_that_are_not_contiguous_or_need_grad_come_back(tmp_path: Path):
    base = torch.arange(24.0).reshape(4, 6)
    pieces = [
        whole("t", base.t()),
        whole("strided", base[::2, 1::2]),
        whole("parameter", torch.nn.Parameter(base)),
        whole("expanded", torch.ones(1, 3).expand(5, 3)),
    ]
    reader = save_once(tmp_path, pieces)
    for piece in pieces:
        assert torch.equal(reader.read(piece.key), piece.tensor)


def test_what_is_saved_is_the_moment_of_the_call(tmp_path: Path):
    tensor, state = torch.zeros(1_000_000), {"step_count": 40, "scaler": {"scale": 65536.0}}
    writer = make_writer(tmp_path)
    writer.save(40, [whole("x", tensor)], state, val_bpb=1.5)
    tensor.fill_(7.0)
    state["step_count"] = 41
    writer.wait()
    reader = CheckpointReader(tmp_path / "step_000040")
    assert reader.read("x").abs().max() == 0
    assert reader.state == {"step_count": 40, "scaler": {"scale": 65536.0}}
    assert (reader.step, reader.world_size, reader.val_bpb) == (40, 1, 1.5)


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_some_ranks_saved_any_split_reads(tmp_path: Path, world_size: int):
    table = torch.randn(37, 5, generator=torch.Generator().manual_seed(1))
    cuts = [0, 3, 20, 37] if world_size == 2 else [0, 0, 9, 10, 37]  # rank 0 of 4 holds no row
    rows = split("model.wte.weight", table, cuts)
    pieces_of = [rows[:2], rows[2:]] if world_size == 2 else [[piece] for piece in rows]
    pieces_of[-1].append(whole("model.h.0.weight", table[:4]))
    save_as_ranks(tmp_path, pieces_of)
    reader = CheckpointReader(tmp_path / "step_000040")
    for lo in range(38):
        for hi in range(lo, 38):
            assert torch.equal(reader.read("model.wte.weight", lo, hi), table[lo:hi])
    assert torch.equal(reader.read("model.h.0.weight"), table[:4])
    assert (reader.world_size, reader.state) == (world_size, {"rank": 0})


def test_a_rank_that_owns_nothing_writes_no_file(tmp_path: Path):
    save_as_ranks(tmp_path, [[whole("x", torch.ones(2))], []])
    names = sorted(path.name for path in (tmp_path / "step_000040").iterdir())
    assert names == ["manifest.json", "shard_00000_of_00002.safetensors"]


def test_a_row_that_no_rank_passes_is_refused(tmp_path: Path):
    writer = make_writer(tmp_path)
    writer.save(40, [Piece("x", (4,), (0, 3), torch.ones(3))], {})
    with pytest.raises(ValueError, match="3 of 4 rows"):
        writer.wait()
    assert list(tmp_path.iterdir()) == []


def test_the_model_loads_in_fp32_under_its_own_names(tmp_path: Path):
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(2)).bfloat16()
    pieces = [whole("model.wte.weight", weight), whole("optim.wte.weight.exp_avg", weight)]
    state = save_once(tmp_path, pieces).load_model_state()
    assert list(state) == ["wte.weight"]
    assert torch.equal(state["wte.weight"], weight.float())


def test_a_missing_tensor_is_an_error_with_the_nearest_name(tmp_path: Path):
    reader = save_once(tmp_path, [whole("model.wte.weight", torch.ones(2))])
    with pytest.raises(PacelineError) as error:
        reader.read("model.wte.wieght", 0, 1)
    assert error.value.message == (
        f"checkpoint {tmp_path}/step_000040 has no tensor model.wte.wieght; the nearest is model.wte.weight"
    )


@pytest.mark.parametrize(
    ("shapes", "difference"),
    [
        ({"wte.weight": (3, 2)}, "model.wte.weight is 4 x 2 in it and 3 x 2 in the run"),
        ({"wte.weight": (4, 2), "h.1.weight": (2,)}, "model.h.1.weight is missing in it and 2 in the run"),
        ({}, "model.wte.weight is 4 x 2 in it and missing in the run"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, shapes: dict[str, tuple[int, ...]], difference: str):
    reader = save_once(tmp_path, [whole("model.wte.weight", torch.ones(4, 2)), whole("optim.x", torch.ones(1))])
    reader.check_model([ParamShape("wte.weight", (4, 2), "wte")])
    with pytest.raises(PacelineError) as error:
        reader.check_model([ParamShape(name, shape, "wte") for name, shape in shapes.items()])
    assert error.value.message == f"checkpoint {reader.path} is of another model: {difference}"


def test_a_file_that_cannot_be_opened_is_an_error_of_the_users(tmp_path: Path):
    reader = save_once(tmp_path, [whole("x", torch.ones(2))])
    (reader.path / "shard_00000_of_00001.safetensors").write_bytes(b"short")
    with pytest.raises(PacelineError, match=r"shard_00000_of_00001\.safetensors"):
        reader.read("x")


def test_a_second_save_waits_for_the_first(tmp_path: Path):
    second_begins, first_is_saved = threading.Event(), threading.Event()

    def on_saved(step: int, seconds: float, num_bytes: int) -> None:
        if step == 20:
            second_begins.wait()
            first_is_saved.set()

    writer = make_writer(tmp_path, on_saved=on_saved)
    writer.save(20, [whole("x", torch.ones(2))], {})
    threading.Timer(0.3, second_begins.set).start()
    writer.save(40, [whole("x", torch.ones(2))], {})
    assert first_is_saved.is_set()
    writer.wait()
    assert CheckpointReader(tmp_path / "step_000040").step == 40


def test_saving_a_step_again_replaces_it(tmp_path: Path):
    writer = make_writer(tmp_path)
    for value in (1.0, 2.0):
        writer.save(40, [whole("x", torch.full((3,), value))], {"value": value}, val_bpb=value)
    writer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000040"]
    reader = CheckpointReader(tmp_path / "step_000040")
    assert (reader.read("x").tolist(), reader.state, reader.val_bpb) == ([2.0] * 3, {"value": 2.0}, 2.0)


def test_on_saved_gets_step_seconds_and_bytes_once_all_is_on_disk(tmp_path: Path):
    seen: list[tuple[int, float, int, int]] = []

    def on_saved(step: int, seconds: float, num_bytes: int) -> None:
        on_disk = sum(path.stat().st_size for path in (tmp_path / "step_000040").glob("*.safetensors"))
        seen.append((step, seconds, num_bytes, on_disk))

    writer = make_writer(tmp_path, on_saved=on_saved)
    writer.save(40, [whole("x", torch.ones(1000))], {})
    writer.wait()
    [(step, seconds, num_bytes, on_disk)] = seen
    assert (step, num_bytes) == (40, on_disk)
    assert num_bytes > 4000
    assert seconds > 0


def test_a_state_that_is_not_json_is_refused_at_once(tmp_path: Path):
    writer = make_writer(tmp_path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        writer.save(40, [], {"scale": float("nan")})
    with pytest.raises(TypeError):
        writer.save(40, [], {"tensor": torch.ones(2)})


def test_a_process_that_ends_without_waiting_ends_at_once_and_leaves_no_half_checkpoint(tmp_path: Path):
    code = """if True:
        import sys, torch
        from pathlib import Path
        from paceline.model.checkpoint import CheckpointWriter, Piece
        writer = CheckpointWriter(Path(sys.argv[1]), rank=0, world_size=2, attempt="1", keep_last=1, on_saved=print)
        writer.save(40, [Piece("x", (2_000_000,), (0, 2_000_000), torch.ones(2_000_000))], {})
        print("end")
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert list(tmp_path.glob("step_*")) == []


def test_the_example_in_the_docs_reads_a_tensor_without_paceline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table = torch.randn(10, 4, generator=torch.Generator().manual_seed(3))
    pieces_of = [[piece] for piece in split("model.wte.weight", table, [0, 7, 10])]
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    save_as_ranks(tmp_path / "runs" / "tiny" / "checkpoints", pieces_of)
    example, _ = re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(example, names)
    assert torch.equal(torch.from_numpy(names["weight"]), table)  # type: ignore[arg-type]


def test_every_field_of_the_manifest_stands_in_the_docs(tmp_path: Path):
    reader = save_once(tmp_path, [whole("x", torch.ones(2))])
    text = DOCS.read_text("utf-8")
    missing = [key for key in json.loads((reader.path / "manifest.json").read_text()) if f"`{key}`" not in text]
    assert missing == []


@pytest.mark.gpu
def test_a_copy_from_the_gpu_is_of_the_moment_of_the_call(tmp_path: Path):
    tensor = torch.zeros(50_000_000, device="cuda")
    writer = make_writer(tmp_path)
    writer.save(40, [whole("x", tensor)], {})
    tensor.fill_(7.0)
    writer.wait()
    assert CheckpointReader(tmp_path / "step_000040").read("x").abs().max() == 0


def test_a_copy_of_the_weights_has_no_states_and_is_step_0(tmp_path: Path):
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    others = [whole("optim.a.momentum_buffer", weight), whole("rng.cpu.0", torch.arange(9, dtype=torch.uint8))]
    saved = [[*split("model.a", weight, [0, 2]), *others], split("model.a", weight, [2, 6])]
    save_as_ranks(tmp_path / "from", saved)
    copy_weights(tmp_path / "from" / "step_000040", tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["step_000000"]
    verify(tmp_path / "to" / "step_000000")
    copy = CheckpointReader(tmp_path / "to" / "step_000000")
    assert (copy.step, copy.keys(), dict(copy.state)) == (0, ["model.a"], {})
    assert torch.equal(copy.read("model.a"), weight)


def test_optimizer_states_that_hold_nan_are_not_read(tmp_path: Path):
    weight, state = torch.ones(2), torch.tensor([1.0, torch.nan])
    save_once(tmp_path, [whole("model.a", weight), whole("optim.a.exp_avg", state)])
    reader = CheckpointReader(tmp_path / "step_000040")
    assert torch.equal(reader.read("model.a"), weight)
    with pytest.raises(PacelineError, match="the optimizer states of .* hold NaN or infinity, first in a.exp_avg"):
        reader.read("optim.a.exp_avg")


def test_weights_that_hold_nan_are_not_copied(tmp_path: Path):
    save_once(tmp_path, [whole("model.a", torch.tensor([1.0, torch.nan])), whole("model.b", torch.ones(2))])
    with pytest.raises(PacelineError, match="hold NaN or infinity, first in a"):
        copy_weights(tmp_path / "step_000040", tmp_path / "to")
    assert not (tmp_path / "to" / "step_000000").exists()
