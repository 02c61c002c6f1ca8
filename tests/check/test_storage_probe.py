import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from probing import NAMESPACES, ask, in_mounts

from paceline.check.storage_probe import filesystem_of, local_path, probe_place, probe_storage

FIELDS = {
    "path", "exists", "writable", "error", "total_bytes", "free_bytes", "free_inodes", "filesystem", "network",
    "write_bytes_per_s", "read_bytes_per_s",
}  # fmt: skip


def test_a_place_has_every_field_and_nothing_is_left_in_it(tmp_path):
    storage = probe_storage({"run_dir": str(tmp_path), "cache_dir": None, "data": "builtin", "measure_disk": False})[
        "storage"
    ]
    place = storage["run_dir"]
    assert place.keys() == FIELDS
    assert (place["exists"], place["writable"], place["error"]) == (True, True, None)
    assert (storage["data"], storage["cache"]) == (None, None)
    assert list(tmp_path.iterdir()) == []


def test_sizes_agree_with_df(tmp_path):
    place = probe_place(tmp_path, write=True)
    lines = subprocess.run(
        ["df", "-B1", "--output=size,avail,fstype", tmp_path], capture_output=True, text=True, check=True
    )
    size, _, kind = lines.stdout.splitlines()[1].split()
    assert (place["total_bytes"], place["filesystem"]) == (int(size), {"ext2/ext3": "ext4"}.get(kind, kind))


def test_a_missing_folder_is_judged_by_its_nearest_parent_and_not_made(tmp_path):
    place = probe_place(tmp_path / "a" / "b", write=True)
    assert (place["exists"], place["writable"], place["free_bytes"] > 0) == (False, True, True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        place = probe_place(path, write=True)
        assert (place["writable"], place["error"]) == (False, "Not a directory")


def test_a_file_of_text_is_a_good_place_for_data(tmp_path):
    (tmp_path / "text.txt").write_text("x")
    place = probe_place(tmp_path / "text.txt", write=False)
    assert (place["exists"], place["error"]) == (True, None)


def test_a_broken_link_says_where_it_leads(tmp_path):
    (tmp_path / "runs").symlink_to("/nowhere/at/all")
    place = probe_place(tmp_path / "runs", write=True)
    assert (place["writable"], place["error"]) == (False, "a link to /nowhere/at/all, which leads nowhere")


def test_the_speed_is_measured_and_nothing_is_left(tmp_path):
    storage = probe_storage({"run_dir": str(tmp_path / "new"), "measure_disk": True})["storage"]
    if storage["run_dir"]["free_bytes"] < 1 << 30:
        pytest.skip("needs a GiB of space")
    assert storage["run_dir"]["write_bytes_per_s"] > 0
    assert storage["run_dir"]["read_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_is_a_tmpfs():
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    assert filesystem_of(Path("/dev/shm")) == "tmpfs"


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (None, None),
        ("builtin", None),
        ("hf:roneneldan/TinyStories", None),
        ("hf:/data/set", "/data/set"),
        ("a.txt", "a.txt"),
    ],
)
def test_only_text_on_a_disk_has_a_place(data, path):
    assert local_path(data) == path


@pytest.mark.dist
@NAMESPACES
def test_a_read_only_run_folder_is_found_by_writing(tmp_path):
    before = in_mounts(f"mount -t tmpfs -o ro tmpfs {tmp_path}")
    place = ask("storage_probe", before=before, run_dir=str(tmp_path / "runs"), measure_disk=True)["storage"]["run_dir"]
    assert (place["exists"], place["writable"], place["error"]) == (False, False, "Read-only file system")
    assert (place["filesystem"], place["write_bytes_per_s"]) == ("tmpfs", None)


@pytest.mark.dist
@NAMESPACES
def test_a_full_disk_is_found_by_writing(tmp_path):
    script = f"mount -t tmpfs -o size=1M tmpfs {tmp_path}; head -c 2M /dev/zero > {tmp_path}/fill || true"
    place = ask("storage_probe", before=in_mounts(f"{{ {script}; }} 2>/dev/null"), run_dir=str(tmp_path))["storage"][
        "run_dir"
    ]
    assert (place["writable"], place["error"], place["free_bytes"]) == (False, "No space left on device", 0)


@pytest.mark.dist
@NAMESPACES
def test_no_inodes_left_is_found(tmp_path):
    script = f"mount -t tmpfs -o size=8M,nr_inodes=2 tmpfs {tmp_path}; touch {tmp_path}/last"
    place = ask("storage_probe", before=in_mounts(script), run_dir=str(tmp_path))["storage"]["run_dir"]
    assert (place["free_inodes"], place["free_bytes"]) == (0, 8 << 20)


@pytest.mark.dist
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_folder_of_another_user_is_not_writable():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is closed to others
        Path(folder).chmod(0o755)
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                error = probe_place(Path(folder), write=True)["error"]
                os._exit(0 if error == "Permission denied" else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
