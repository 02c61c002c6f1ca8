"""The manifest of a checkpoint and its files: written, listed, verified, set aside."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from paceline.errors import PacelineError
from paceline.launch.background import go_back
from paceline.model.checkpoint import CheckpointWriter, Piece
from paceline.model.manifest import (
    DamagedCheckpoint,
    NoCheckpoint,
    UnreadableCheckpoint,
    clean_leftovers,
    list_checkpoints,
    newest_good,
    read_manifest,
    step_folders,
    tensor_entry,
    verify,
)
from paceline.model.publish import RawTensor, prune, shard_bytes, write_shard
from paceline.rundir import RunDir, read_json_lines

SHARD = "shard_00000_of_00001.safetensors"


def save_steps(directory: Path, *steps: int) -> None:
    writer = CheckpointWriter(directory, rank=0, world_size=1, attempt="1", keep_last=9, on_saved=lambda *saved: None)
    for step in steps:
        piece = Piece("model.w", (4, 8), (0, 4), torch.full((4, 8), float(step)))
        writer.save(step, [piece], {"step_count": step}, val_bpb=1.0 + step)
    writer.wait()


def flip_byte(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def test_the_list_is_newest_first_and_says_what_each_is(tmp_path: Path):
    save_steps(tmp_path, 20, 40, 1_000_000)
    listed = list_checkpoints(tmp_path)
    assert [path.name for path, _ in listed] == ["step_1000000", "step_000040", "step_000020"]
    path, middle = listed[1]
    assert (middle.step, middle.val_bpb, middle.world_size) == (40, 41.0, 1)
    assert [entry.bytes for entry in middle.files.values()] == [(path / SHARD).stat().st_size]


def test_a_folder_that_is_not_there_holds_no_checkpoints(tmp_path: Path):
    assert list_checkpoints(tmp_path / "none") == []


def test_extra_files_harm_nothing(tmp_path: Path):
    save_steps(tmp_path, 20)
    (tmp_path / "step_000020" / ".DS_Store").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "step_old").mkdir()
    verify(tmp_path / "step_000020")
    assert len(list_checkpoints(tmp_path)) == 1


@pytest.mark.parametrize("offset", [0, 60, -200, -1])
def test_a_flipped_byte_in_a_shard_is_named(tmp_path: Path, offset: int):
    save_steps(tmp_path, 20)
    flip_byte(tmp_path / "step_000020" / SHARD, offset)
    with pytest.raises(DamagedCheckpoint) as error:
        verify(tmp_path / "step_000020")
    assert error.value.message == f"checkpoint step_000020 is damaged ({SHARD}: sha256 differs)"


def test_no_flipped_byte_in_the_manifest_passes(tmp_path: Path):
    save_steps(tmp_path, 20)
    path = tmp_path / "step_000020" / "manifest.json"
    for offset in range(path.stat().st_size):
        flip_byte(path, offset)
        with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: its own sha256 differs"):
            verify(path.parent)
        flip_byte(path, offset)
    verify(path.parent)


def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path):
    save_steps(tmp_path, 20)
    path = tmp_path / "step_000020" / SHARD
    size = path.stat().st_size
    os.truncate(path, 100)
    with pytest.raises(DamagedCheckpoint, match=rf"{SHARD}: 100 bytes instead of {size}"):
        verify(path.parent)


@pytest.mark.parametrize("name", [SHARD, "manifest.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str):
    save_steps(tmp_path, 20)
    (tmp_path / "step_000020" / name).unlink()
    with pytest.raises(DamagedCheckpoint, match=rf"step_000020 is damaged \({name}: No such file or directory\)"):
        verify(tmp_path / "step_000020")


@pytest.mark.parametrize("raw", [b"", b"{}", b"\x00" * 300, b"[1,\n2]"])
def test_a_manifest_that_is_empty_or_not_json_is_damaged_and_not_listed(tmp_path: Path, raw: bytes):
    save_steps(tmp_path, 20, 40)
    (tmp_path / "step_000040" / "manifest.json").write_bytes(raw)
    with pytest.raises(DamagedCheckpoint):
        verify(tmp_path / "step_000040")
    assert [manifest.step for _, manifest in list_checkpoints(tmp_path)] == [20]


def test_a_damaged_newest_is_skipped_with_one_line(tmp_path: Path):
    save_steps(tmp_path, 20, 40, 60)
    flip_byte(tmp_path / "step_000060" / SHARD, -1)
    path, notes = newest_good(tmp_path, set_aside=False)
    assert path == tmp_path / "step_000040"
    damage = f"checkpoint step_000060 is damaged ({SHARD}: sha256 differs)"
    assert notes == [f"{damage}: using step_000040 instead"]
    assert (tmp_path / "step_000060").is_dir()


def test_each_damaged_checkpoint_gets_a_line(tmp_path: Path):
    save_steps(tmp_path, 20, 40, 60)
    (tmp_path / "step_000060" / "manifest.json").write_text("")
    (tmp_path / "step_000040" / SHARD).unlink()
    path, notes = newest_good(tmp_path, set_aside=True)
    assert path.name == "step_000020"
    assert [note.rpartition(", ")[2] for note in notes] == ["40 steps are done again", "20 steps are done again"]


@pytest.mark.parametrize("name", ["manifest.json", SHARD])
def test_a_checkpoint_without_the_right_to_read_it_is_refused_and_stays(tmp_path: Path, name: str):
    save_steps(tmp_path, 20, 40)
    (tmp_path / "step_000040" / name).chmod(0)
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from paceline.model.manifest import UnreadableCheckpoint, last_good_step, newest_good\n"
        "for find in (lambda path: newest_good(path, set_aside=True), last_good_step):\n"
        "    try: find(Path(sys.argv[1]))\n    except UnreadableCheckpoint as error: print(error.message, error.fix, sep='\\n')\n"
    )
    rights = "-dac_override,-dac_read_search"
    drop = ["setpriv", "--bounding-set", rights, "--inh-caps", rights] if os.geteuid() == 0 else []
    done = subprocess.run([*drop, sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    path, fix = tmp_path / "step_000040" / name, "ask its owner for the right to read it (chmod -R a+rX)"
    assert done.stdout == 2 * f"{path} cannot be read: Permission denied\n{fix}\n"
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step_000020", "step_000040"]


def test_a_file_behind_links_that_lead_to_each_other_is_not_called_damaged(tmp_path: Path):
    save_steps(tmp_path, 20)
    path = tmp_path / "step_000020" / SHARD
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(UnreadableCheckpoint, match="cannot be read: Too many levels") as error:
        verify(tmp_path / "step_000020")
    folder = tmp_path / "step_000020"
    assert error.value.fix == (
        "restore the file, or look at its disk or mount; where it is lost for good,"
        f" mv {folder} {folder}.lost leaves the one before"
    )
    manifest = tmp_path / "step_000020" / "manifest.json"
    manifest.unlink()
    manifest.symlink_to(manifest)
    with pytest.raises(UnreadableCheckpoint):  # it may be the best one
        list_checkpoints(tmp_path)
    assert list_checkpoints(tmp_path, skip_unreadable=True) == []


def test_set_aside_renames_damaged_checkpoints(tmp_path: Path):
    for _ in range(2):
        save_steps(tmp_path, 20, 40)
        flip_byte(tmp_path / "step_000040" / SHARD, -1)
        newest_good(tmp_path, set_aside=True)
    save_steps(tmp_path, 40)
    assert newest_good(tmp_path, set_aside=True) == (tmp_path / "step_000040", [])
    assert sorted(path.name for path in tmp_path.glob("*.damaged*")) == ["step_000040.damaged", "step_000040.damaged-2"]


def test_going_back_sets_aside_what_comes_after_a_step_and_a_damaged_one_changes_nothing(tmp_path: Path, capsys):
    run = RunDir(tmp_path)
    for _ in range(2):
        save_steps(run.checkpoints, 20, 40, 60)
        (run.checkpoints / "step_000060").rename(run.checkpoints / "step_000060.replaced")  # its replacement was killed
        go_back(run, 20)
    go_back(run, 20)  # nothing is left to be set aside
    asides = [f"step_0000{name}" for name in ("40.aside", "40.aside-2", "60.aside", "60.aside-2")]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_000020", *asides]
    assert [path.name for path in step_folders(run.checkpoints)] == ["step_000020"]
    line = f"going back to step 20, as --step asks; set aside in {run.checkpoints}: step_000040.aside and step_000060.aside"
    assert capsys.readouterr().out.splitlines()[0] == f"{line} (to delete: rm -r {run.checkpoints}/*.aside*)"
    prune(run.checkpoints, step=80, keep_last=1)
    assert len(list(run.checkpoints.iterdir())) == 5
    save_steps(run.checkpoints, 40)
    flip_byte(run.checkpoints / "step_000020" / SHARD, -1)
    for step, problem in ((20, f"checkpoint step_000020 is damaged ({SHARD}: sha256 differs)"), (30, "no checkpoint")):
        with pytest.raises(PacelineError) as error:
            go_back(run, step)
        assert problem in error.value.message
        assert error.value.fix == ("--step 40" if step == 20 else "--step 20 or 40")
    assert (run.checkpoints / "step_000040").is_dir()


def test_going_back_that_was_killed_between_two_renames_is_finished_by_a_second_call(
    tmp_path: Path, monkeypatch, capsys
):
    run = RunDir(tmp_path)
    save_steps(run.checkpoints, 20, 40, 60)
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda path, to: sys.exit() if "60" in path.name else rename(path, to))
    with pytest.raises(SystemExit):
        go_back(run, 20)
    assert [path.name for path in step_folders(run.checkpoints)] == ["step_000060", "step_000020"]
    monkeypatch.undo()
    go_back(run, 20)
    assert [path.name for path in step_folders(run.checkpoints)] == ["step_000020"]
    asides = [event["checkpoints"] for event in read_json_lines(run.events) if event["event"] == "set_aside"]
    assert asides == [["step_000040.aside", "step_000060.aside"], ["step_000060.aside"]]
    assert "set aside in " in capsys.readouterr().out


def test_going_back_on_a_full_disk_changes_nothing_and_works_when_there_is_room(tiny_disk: Path, capsys):
    run = RunDir(tiny_disk)
    save_steps(run.checkpoints, 20, 40)
    with (tiny_disk / "fill").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(PacelineError) as error:
        go_back(run, 20)
    assert error.value.fix == "make room in its file system (df -h), then repeat the command"
    assert len(step_folders(run.checkpoints)) == 2 and not list(read_json_lines(run.events))
    (tiny_disk / "fill").unlink()
    go_back(run, 20)
    assert [event["checkpoints"] for event in read_json_lines(run.events)] == [["step_000040.aside"]]
    assert capsys.readouterr().out.startswith("going back to step 20")


def test_when_all_are_damaged_all_are_reported_and_none_is_moved(tmp_path: Path):
    save_steps(tmp_path, 20, 40)
    for step in (20, 40):
        flip_byte(tmp_path / f"step_0000{step}" / SHARD, -1)
    with pytest.raises(PacelineError) as error:
        newest_good(tmp_path, set_aside=True)
    damaged = f"is damaged ({SHARD}: sha256 differs)"
    assert error.value.message == (
        f"no good checkpoint in {tmp_path}: checkpoint step_000040 {damaged}; checkpoint step_000020 {damaged}"
    )
    assert "backup" in error.value.fix
    assert not isinstance(error.value, NoCheckpoint)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000020", "step_000040"]


def test_no_checkpoint_at_all_is_another_error(tmp_path: Path):
    with pytest.raises(NoCheckpoint, match="no checkpoint in"):
        newest_good(tmp_path, set_aside=True)


def test_a_newer_format_is_refused_not_called_damaged(tmp_path: Path):
    save_steps(tmp_path, 20)
    path = tmp_path / "step_000020" / "manifest.json"
    text = path.read_text().replace('"format": 1', '"format": 2')
    digest = hashlib.sha256(text.rpartition(",\n")[0].encode()).hexdigest()
    path.write_text(text.replace(json.loads(text)["manifest_sha256"], digest))
    with pytest.raises(PacelineError) as error:
        newest_good(tmp_path, set_aside=False)
    assert error.value.message == f"checkpoint {path.parent} has format 2, this paceline reads 1"


def test_a_replacement_that_was_killed_between_its_renames_is_put_back(tmp_path: Path):
    save_steps(tmp_path, 20, 40)
    (tmp_path / "step_000040").rename(tmp_path / "step_000040.replaced")
    clean_leftovers(tmp_path)
    assert [manifest.step for _, manifest in list_checkpoints(tmp_path)] == [40, 20]


def test_leftovers_of_killed_saves_are_removed_and_nothing_else(tmp_path: Path):
    save_steps(tmp_path, 20)
    (tmp_path / ".step_000040.1-2.tmp").mkdir()
    (tmp_path / ".step_000040.1-2.tmp" / SHARD).write_bytes(b"x")
    (tmp_path / "step_000020.replaced").mkdir()
    (tmp_path / "step_000030.damaged").mkdir()
    clean_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000020", "step_000030.damaged"]


def test_a_row_that_no_rank_or_two_ranks_hold_is_refused():
    def part(lo: int, hi: int) -> dict[str, object]:
        return {"file": "f", "name": "w", "rows": [lo, hi]}

    assert [p.rows for p in tensor_entry([5, 2], "float32", [part(3, 5), part(0, 3)]).parts] == [(0, 3), (3, 5)]
    with pytest.raises(ValueError, match="rows 4 to 5 follow row 3"):
        tensor_entry([5, 2], "float32", [part(0, 3), part(4, 5)])
    with pytest.raises(ValueError, match="rows 2 to 5 follow row 3"):
        tensor_entry([5, 2], "float32", [part(0, 3), part(2, 5)])
    with pytest.raises(ValueError, match="3 of 5 rows"):
        tensor_entry([5, 2], "float32", [part(0, 3)])


def test_listing_and_verifying_need_no_torch(tmp_path: Path):
    save_steps(tmp_path, 20)
    code = (
        "import sys, pathlib; from paceline.model.manifest import list_checkpoints, newest_good;"
        "print(newest_good(pathlib.Path(sys.argv[1]), set_aside=False)[0].name, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "step_000020 False\n", done.stderr


def test_a_manifest_survives_encoding_and_reading(tmp_path: Path):
    save_steps(tmp_path / "läufe mit leerzeichen", 20)
    manifest = read_manifest(tmp_path / "läufe mit leerzeichen" / "step_000020")
    assert (manifest.step, manifest.world_size, manifest.val_bpb) == (20, 1, 21.0)
    assert manifest.state == {"step_count": 20}
    assert manifest.tensors["model.w"].shape == (4, 8)
    assert manifest.tensors["model.w"].dtype == "float32"
    assert list(manifest.files) == [SHARD]


def test_the_returned_size_and_hash_are_those_of_the_file(tmp_path: Path):
    tensors = [RawTensor("a", "U8", (9_000_000,), memoryview(bytes(range(250)) * 36_000))]
    entry = write_shard(tmp_path / "shard", tensors)
    raw = (tmp_path / "shard").read_bytes()
    assert (entry.bytes, entry.sha256) == (len(raw), hashlib.sha256(raw).hexdigest())
    assert shard_bytes(tensors) == len(raw)


def test_safetensors_reads_what_was_written(tmp_path: Path):
    rows = torch.arange(6, dtype=torch.int64)
    tensors = [
        RawTensor("pos[0:6]", "I64", (2, 3), memoryview(rows.numpy().tobytes())),
        RawTensor("größe", "F32", (), memoryview(torch.tensor(1.5).numpy().tobytes())),
        RawTensor("none", "F32", (4, 0), memoryview(b"")),
    ]
    write_shard(tmp_path / "shard", tensors)
    with safe_open(tmp_path / "shard", framework="pt") as file:
        assert torch.equal(file.get_tensor("pos[0:6]"), rows.view(2, 3))
        assert torch.equal(file.get_tensor("größe"), torch.tensor(1.5))
        assert file.get_tensor("none").shape == (4, 0)


def test_the_first_tensor_starts_on_eight_bytes(tmp_path: Path):
    write_shard(tmp_path / "shard", [RawTensor("x", "U8", (1,), memoryview(b"!"))])
    length = int.from_bytes((tmp_path / "shard").read_bytes()[:8], "little")
    assert length % 8 == 0
