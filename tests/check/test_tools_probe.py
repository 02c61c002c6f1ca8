import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from paceline.check.tools_probe import describe, probe_tools

SECRET = "0123456789abcdef0123456789abcdef01234567"


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def git(folder: Path, *words: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *settings, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize(
    ("printed", "version"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022", "12.2.0"),
        ("c++ (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0", "13.3.0"),
        ("Ubuntu clang version 18.1.3 (1ubuntu1)", "18.1.3"),
        ("cmake version 3.25.1", "3.25.1"),
        ("1.11.1", "1.11.1"),
        (
            "nvcc: NVIDIA (R) Cuda compiler driver\nBuilt on Fri_Feb_21\nCuda compilation tools, release 12.8, V12.8.93",
            "12.8",
        ),
        (None, None),
    ],
)
def test_versions_are_read_from_what_programs_print(printed, version):
    assert describe("/usr/bin/x", printed) == {"path": "/usr/bin/x", "version": version}


def test_without_any_program_every_tool_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))  # not the usual place, which may hold one
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.chdir(tmp_path)
    tools = probe_tools({})["tools"]
    names = ("cxx", "nvcc", "cmake", "ninja", "git", "ccache", "nvidia_smi")
    assert [tools[name] for name in names] == [None] * len(names)
    assert tools["code"] == {"path": str(tmp_path), "commit": None, "dirty": None}


def test_a_compiler_that_hangs_has_no_version_and_the_rest_is_known(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    write_program(tmp_path / "g++", f"read line < {tmp_path}/pipe")  # nobody ever writes
    write_program(tmp_path / "cmake", "echo cmake version 3.30.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("paceline.check.tools_probe.DEADLINE_S", 0.5)
    started = time.monotonic()
    tools = probe_tools({})["tools"]
    assert tools["cxx"] == {"path": str(tmp_path / "g++"), "version": None}
    assert tools["cmake"]["version"] == "3.30.0"
    assert time.monotonic() - started < 2


def test_the_compiler_is_the_one_that_cxx_names(tmp_path, monkeypatch):
    write_program(tmp_path / "mycxx", "echo mycxx 9.9.9")
    monkeypatch.setenv("CXX", str(tmp_path / "mycxx"))
    assert probe_tools({})["tools"]["cxx"] == {"path": str(tmp_path / "mycxx"), "version": "9.9.9"}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_code_is_the_repository_that_one_stands_in(tmp_path, monkeypatch):
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("1")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-qm", "one")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert probe_tools({})["tools"]["code"] == {"path": str(tmp_path), "commit": commit, "dirty": False}
    (tmp_path / "train.py").write_text("2")
    assert probe_tools({})["tools"]["code"]["dirty"] is True


def test_a_login_is_found_in_the_environment_and_in_netrc_and_never_shown(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert probe_tools({})["tools"]["wandb"]["logged_in"] is False
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {SECRET}\n")
    (tmp_path / "netrc").chmod(0o600)
    tools = probe_tools({})["tools"]
    assert tools["wandb"]["logged_in"] is True
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    assert probe_tools({})["tools"]["wandb"]["logged_in"] is True
    assert SECRET not in json.dumps(tools) + json.dumps(probe_tools({}))
