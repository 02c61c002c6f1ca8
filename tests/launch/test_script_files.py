"""A script's folder on its way to another host: what is sent, what is refused, and what the other end takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import PacelineError, UsageError
from paceline.launch import script_command
from paceline.launch.env import Launch, env_elsewhere, listed_env
from paceline.launch.gather import folder_frames, sha256_of
from paceline.launch.remote import own_path
from paceline.launch.script_command import find_script_files, list_files
from paceline.launch.script_copy import PREFIX, ScriptCopy
from paceline.rundir import RunDir

SECRET = {"TOKEN": "s3cret", "OTHER": "x", "OMP_NUM_THREADS": "7"}


def write(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def git(folder: Path, *words: str) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(folder), *author, *words], check=True, capture_output=True)


def sent(folder: Path, *, script: str = "train.py", runs: str = "runs") -> tuple[list[str], list[str]]:
    listing = list_files(folder, script=folder / script, run=RunDir(folder / runs / "a"))
    return sorted(listing.sizes), sorted(listing.folders)


def test_what_git_tracks_and_what_it_does_not_ignore_is_sent(tmp_path):
    folder = write(
        tmp_path, "train.py", "データ/größe.txt", "gone.py", "new file.py", "cache/big.bin", "runs/b/log", "sub/x.py"
    )
    git(folder, "init", "-q")
    (folder / ".gitignore").write_text("cache/\n*.pt\n")
    git(folder, "add", "train.py", "gone.py", "データ", ".gitignore")
    git(folder, "commit", "-qm", "first")
    (folder / "gone.py").unlink()
    (folder / "out/empty").mkdir(parents=True)
    write(folder, "nested/in.py", "sub/model.pt")
    git(folder / "nested", "init", "-q")
    names, folders = sent(folder)
    assert names == [".gitignore", "nested/in.py", "new file.py", "sub/x.py", "train.py", "データ/größe.txt"]
    assert {"out", "out/empty"} <= set(folders) and not any(name.startswith(("cache", "runs")) for name in folders)
    assert sent(folder / "sub", script="x.py", runs="../runs") == (["x.py"], [])  # a part of the repository


def test_a_script_that_git_ignores_is_sent_anyway_and_an_ignored_folder_is_one_without_git(tmp_path):
    folder = write(tmp_path, "train.py", "a.py", "scratch/train.py", "scratch/b.txt")
    git(folder, "init", "-q")
    (folder / ".gitignore").write_text("train.py\nscratch/\n")
    assert sent(folder) == ([".gitignore", "a.py", "train.py"], [])
    assert sent(folder / "scratch") == (["b.txt", "train.py"], [])


def test_without_git_environments_caches_and_large_checkpoints_stay(tmp_path):
    folder = write(
        tmp_path, "train.py", "__pycache__/train.pyc", "node_modules/a.js", "my env/pyvenv.cfg", "my env/bin/python"
    )
    write(folder, ".venv/x", "pkg/__init__.py", "runs/a/log", "small.pt")
    (folder / "empty").mkdir()
    with (folder / "large.pt").open("wb") as file:
        file.truncate(script_command.CHECKPOINT_BYTES + 1)
    assert sent(folder) == (["pkg/__init__.py", "small.pt", "train.py"], ["empty", "pkg", "runs"][:2])
    listing = list_files(folder, script=folder / "train.py", run=RunDir(folder / "runs" / "a"))
    assert listing.notes == ["note    not sent: 1 checkpoint, 10.0 MiB: large.pt"]


def test_a_link_within_the_folder_is_sent_as_a_file_and_one_that_leads_out_is_not(tmp_path):
    folder = write(tmp_path / "proj", "train.py", "a.py")
    write(tmp_path, "secret.txt")
    (folder / "b.py").symlink_to("a.py")
    (folder / "out.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "all").symlink_to(tmp_path)
    listing = list_files(folder, script=folder / "train.py", run=RunDir(folder / "runs" / "a"))
    assert sorted(listing.sizes) == ["a.py", "b.py", "train.py"]
    assert listing.notes == [f"note    not sent: all, out.txt, a link to what is not a file of {folder}"]


@pytest.mark.parametrize("limit, value, message", [
    ("MAX_BYTES", 10, r"has 19 B, and at most 10 B are sent; the largest in it is data, 11 B"),
    ("MAX_FILES", 1, r"has more than 1 files"),
])  # fmt: skip
def test_too_much_is_refused_with_what_is_largest(tmp_path, monkeypatch, limit, value, message):
    monkeypatch.setattr(script_command, limit, value)
    with pytest.raises(PacelineError, match=message) as error:
        sent(write(tmp_path, "train.py", "data/ab.txt"))
    assert "--sync DIR of a smaller folder" in error.value.fix and "--no-sync" in error.value.fix


def test_a_broken_repository_is_not_taken_for_a_folder_without_git(tmp_path):
    folder = write(tmp_path, "train.py", "secret.env")
    (folder / ".git").write_text("gitdir: nowhere\n")
    with pytest.raises(PacelineError, match="git cannot list"):
        sent(folder)


PYTHON = "/usr/bin/python3"


@pytest.mark.parametrize("argv, cwd, sync_dir, folder, expected", [
    ([PYTHON, "train.py", "a"], ".", None, ".", (".", [PYTHON, "train.py", "a"])),
    ([PYTHON, "src/train.py", "train.py"], ".", None, "src", (".", [PYTHON, "train.py", "train.py"])),
    ([PYTHON, "src/train.py"], ".", ".", ".", (".", [PYTHON, "src/train.py"])),
    ([PYTHON, "train.py"], "src", "..", ".", ("src", [PYTHON, "train.py"])),
    ([PYTHON, "../src/train.py"], "データ", None, "src", (".", [PYTHON, "train.py"])),
    ([PYTHON, "{root}/src/train.py"], "データ", "{root}", ".", ("データ", [PYTHON, "../src/train.py"])),
    (["./go.sh", "1"], ".", None, ".", (".", ["./go.sh", "1"])),
    (["src/go.sh"], ".", None, "src", (".", ["./go.sh"])),
    (["bash", "-x", "go.sh"], ".", None, ".", (".", ["bash", "-x", "go.sh"])),
    (["python3", "-u", "src/train.py"], ".", None, "src", (".", ["python3", "-u", "train.py"])),
    ([PYTHON, "-m", "src.train", "a"], ".", None, ".", (".", [PYTHON, "-m", "src.train", "a"])),
    ([PYTHON, "-m", "json.tool"], ".", None, None, None),
    (["hostname"], ".", None, None, None),
])  # fmt: skip
def test_the_command_in_the_copy_means_the_same_file(tmp_path, monkeypatch, argv, cwd, sync_dir, folder, expected):
    root = write(tmp_path, "train.py", "go.sh", "src/train.py", "src/go.sh", "データ/x")
    monkeypatch.chdir(root / cwd)
    argv = [word.format(root=root) for word in argv]
    files = find_script_files(argv, cwd=Path.cwd(), sync=sync_dir and sync_dir.format(root=root))
    assert files.folder == (None if folder is None else (root / folder).resolve())
    if expected:
        assert files.in_copy() == expected


@pytest.mark.parametrize("sync_dir, message, fix", [
    ("nowhere", "--sync nowhere: there is no such folder", "the folder that holds the script"),
    ("other", "train.py is not in .*/other", "--sync {root}"),
])  # fmt: skip
def test_a_folder_without_the_script_is_refused(tmp_path, sync_dir, message, fix):
    write(tmp_path, "train.py", "other/x")
    monkey = os.path.relpath(tmp_path / sync_dir) if sync_dir == "other" else sync_dir
    with pytest.raises(PacelineError, match=message) as error:
        find_script_files([PYTHON, "train.py"], cwd=tmp_path, sync=monkey)
    assert error.value.fix == fix.format(root=tmp_path)


def test_a_script_in_the_home_folder_is_not_a_reason_to_send_all_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(PacelineError, match="is in the home folder, which is not sent"):
        find_script_files([PYTHON, "train.py"], cwd=write(tmp_path, "train.py"), sync=None)


class Pair:
    """A folder here and its copy there, with nothing between them but the orders and frames of a link."""

    def __init__(self, folder, cache, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        self.folder, self.copy = folder, ScriptCopy()

    def order(self, **changes):
        files = {name: sha256_of(self.folder / name) for name in sent(self.folder)[0]}
        order = {"key": "0123456789ab", "name": "proj", "cwd": ".", "files": files, "folders": [], "executable": []}
        return {**order, "keeps": False, **changes}

    def send(self, **changes):
        """Returns what travelled."""
        lacks = self.copy.answer(self.order(**changes))["lacks"]
        for piece in folder_frames(self.folder, lacks, PREFIX):
            self.take(piece)
        assert self.copy.answer(self.order(**changes))["lacks"] == []
        return sorted(lacks)

    def take(self, piece):
        import json

        head, _, data = piece.partition(b"\n")
        line = json.loads(head)
        self.copy.take(line["file"].removeprefix(PREFIX), line, data)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    return Pair(
        write(tmp_path / "proj", "train.py", "größe/データ.txt", "old/a.py", "b"), tmp_path / "cache", monkeypatch
    )


def test_a_second_time_only_what_has_changed_travels(pair):
    assert pair.send(executable=["b"], folders=["empty"]) == ["b", "größe/データ.txt", "old/a.py", "train.py"]
    assert (pair.copy.root / "b").stat().st_mode & 0o777 == 0o755 and (pair.copy.root / "empty").is_dir()
    (pair.copy.root / "snapshot.pt").write_text("of the script itself")
    (pair.folder / "old/a.py").unlink()
    (pair.folder / "old").rmdir()
    write(pair.folder, "old")  # a file where a folder was
    assert pair.send() == ["old"]
    assert (pair.copy.root / "old").read_text() == "old"
    assert (pair.copy.root / "snapshot.pt").exists() and pair.send() == []


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "a//b", "./x", "a\0b"])
def test_a_name_that_leads_out_of_the_copy_is_refused(pair, name):
    with pytest.raises(ValueError, match="not a name below the folder"):
        pair.copy.answer(pair.order(files={name: "0"}))
    with pytest.raises(ValueError, match="not a name"):
        pair.copy.answer(pair.order(cwd=name or ".."))
    with pytest.raises(ValueError, match="not a key"):
        pair.copy.answer(pair.order(key="../../0123456"))


def test_a_link_out_of_the_copy_and_a_file_that_was_not_asked_for_are_refused(pair, tmp_path):
    pair.send()
    (pair.copy.root / "data").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="a link leads out of"):
        pair.copy.answer(pair.order(files={"data/x": "0"}))
    with pytest.raises(ValueError, match="a file that was not asked for: 'other.py'"):
        pair.copy.take("other.py", {"last": True}, b"x")
    assert not (tmp_path / "x").exists()


def test_other_hosts_get_what_paceline_sets_and_what_is_listed():
    env = env_elsewhere(SECRET, Launch(1, "cpu", 4, for_script=True), ["TOKEN"])
    assert env["TOKEN"] == "s3cret" and "OTHER" not in env
    assert env["OMP_NUM_THREADS"] == "4"  # paceline's, since the user's is not listed
    assert env_elsewhere(SECRET, Launch(1, "cpu", 4), ["TOKEN,OMP_NUM_THREADS"])["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize("names, several, message, fix", [
    (["NOT_SET"], True, "NOT_SET of --env is not set here", "export NOT_SET=..., or leave it out"),
    (["TOKEN=s3cret"], True, "--env takes names: a value in a command is seen by everyone", "export TOKEN=..., then --env TOKEN"),
    (["TOKEN"], False, "--env is about several hosts", "--hosts ada,bob, or leave --env out"),
])  # fmt: skip
def test_a_variable_that_cannot_be_sent_is_refused(names, several, message, fix):
    with pytest.raises((PacelineError, UsageError), match=message) as error:
        listed_env(SECRET, names, several=several)
    assert error.value.fix == fix and "s3cret" not in str(error.value)


@pytest.mark.parametrize("path, expected", [
    ("/usr/bin:/bin", "/opt/env/bin:/usr/bin:/bin"),
    ("/home/me/bin:/opt/env/bin", "/home/me/bin:/opt/env/bin"),
])  # fmt: skip
def test_a_rank_on_another_host_finds_the_programs_beside_its_interpreter(monkeypatch, path, expected):
    monkeypatch.setattr(sys, "executable", "/opt/env/bin/python")
    monkeypatch.setenv("PATH", path)
    assert own_path()["PATH"] == expected
