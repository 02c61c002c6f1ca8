"""Completion: what bash, zsh and fish offer while a command is typed, each driven by its own script."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from paceline.cli import COMMANDS, run_command

# $1: the script of `paceline completion`, $2: what is typed; prints one offer in a line
ASK = {
    "bash": """
source "$1"; COMP_LINE=$2; COMP_POINT=${#2}
_python_argcomplete paceline
printf '%s\\n' "${COMPREPLY[@]}"
""",
    "zsh": """
compdef() { }
_describe() { print -l -- ${${(P)2}%%:*} }
source $1; words=(paceline); BUFFER=$2; CURSOR=${#2}
_python_argcomplete
""",
    "fish": "source $argv[1]; complete -C $argv[2]",
}


def soaked(line: str, expected: list[str]) -> ParameterSet:
    """A line of a kind that another one has too."""
    return pytest.param(line, expected, marks=pytest.mark.soak)


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


@pytest.fixture
def folder(tmp_path):
    """Two runs, a script, and this paceline as the first on PATH."""
    for name in ("books", "code"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    (tmp_path / "other" / "elsewhere").mkdir(parents=True)
    (tmp_path / "other" / "elsewhere" / "config.toml").touch()
    for step in ("step_000040", "step_000500"):
        (tmp_path / "runs" / "books" / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "runs" / "books" / "checkpoints" / step / "manifest.json").touch()
    (tmp_path / "runs" / "books" / "checkpoints" / "step_000600").mkdir()  # damaged
    (tmp_path / "runs" / "books" / "notes.json").write_text('{"tags": ["wide", "baseline"], "note": ""}')
    (tmp_path / "runs" / "code" / "notes.json").write_text("[")  # damaged
    (tmp_path / "train.py").touch()
    (tmp_path / "bin").mkdir()
    paceline = tmp_path / "bin" / "paceline"
    paceline.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m paceline.cli "$@"\n')
    paceline.chmod(0o755)
    return tmp_path


def write(folder: Path, shell: str, capsys) -> Path:
    assert run_command(["completion", shell]) == 0
    path = folder / "bin" / f"completion.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def offered(line: str, *, shell: str, folder: Path, capsys) -> list[str]:
    needs(shell)
    flags = {"bash": ["--norc", "-c", ASK[shell], "bash"], "zsh": ["-f", "-c", ASK[shell], "zsh"]}
    args = flags.get(shell, ["--no-config", "-c", ASK[shell]])
    done = subprocess.run(
        [shell, *args, str(write(folder, shell, capsys)), line],
        cwd=folder,
        env={**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return sorted(text.split("\t")[0].strip() for text in done.stdout.splitlines() if text)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("paceline res", ["resume"]),
        ("paceline run", ["run", "runs"]),
        soaked("paceline torch re", ["recipe"]),
        ("paceline torch recipe --dr", ["--driver"]),
        ("paceline train --device", ["--device", "--device-batch-size"]),
        soaked("paceline train --device c", ["cpu", "cuda"]),
        ("paceline train --device=cu", ["cuda"]),
        soaked("paceline train --no-ch", ["--no-check"]),
        ("paceline train --no-check --dep", ["--depth"]),
        ("paceline train t", ["tiny", "train.py"]),
        soaked("paceline resume bo", ["books"]),
        soaked("paceline explain tr", ["train.py"]),
        ("paceline explain ", ["bin/", "books", "code", "other/", "runs/", "train.py"]),
        soaked("paceline profile bo", ["books"]),
        ("paceline profile --runs-dir other e", ["elsewhere"]),
        soaked("paceline profile t", ["tiny", "train.py"]),
        ("paceline sample books --step ", ["40", "500", "best"]),
        ("paceline eval runs/books --step 5", ["500"]),
        soaked("paceline eval code --step ", ["best"]),
        ("paceline runs show ", ["books", "code"]),
        ("paceline runs --sort lo", ["loss"]),
        ("paceline runs --tag ", ["baseline", "wide"]),
        soaked("paceline watch --runs-dir other ", ["elsewhere"]),
        ("paceline track books --to ", ["tensorboard", "trackio", "wandb"]),
        ("paceline train --track wandb,tr", ["wandb,trackio"]),
        soaked("paceline completion ", ["bash", "fish", "zsh"]),
        ("paceline plan --gpu H10", ["H100\\ NVL", "H100\\ PCIe", "H100\\ SXM"]),
        ("paceline plan --compare L4,H20", ["L4,H200\\ NVL", "L4,H200\\ SXM"]),
        soaked("paceline run --nproc 2 -- tr", ["train.py"]),
        ("paceline run -- train.py --no-ch", []),
    ],
)
def test_bash_completes(line, expected, folder, capsys):
    assert offered(line, shell="bash", folder=folder, capsys=capsys) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("paceline tok", ["tokenizer"]),
        ("paceline torch recipe --dr", ["--driver"]),
        ("paceline resume bo", ["books"]),
        soaked("paceline completion ", ["bash", "fish", "zsh"]),
        soaked("paceline train --sequence-len ", []),
        ("paceline plan --price ", []),
        ("paceline train --data tr", ["train.py"]),
        soaked("paceline track books --to t", ["tensorboard", "trackio"]),
        soaked("paceline run -- tr", ["train.py"]),
    ],
)
def test_zsh_and_fish_complete(shell, line, expected, folder, capsys):
    assert offered(line, shell=shell, folder=folder, capsys=capsys) == expected


def test_every_command_is_offered(folder, capsys):
    words: dict[str, set[str]] = {"": {"help"}}
    for name in COMMANDS:
        head, _, word = name.rpartition(" ")
        words.setdefault(head, set()).add(word)
        words[""].add(name.split()[0])
    for head, expected in words.items():  # a line for each word that has a list behind it
        line = f"paceline {head} ".replace("  ", " ")
        assert expected <= set(offered(line, shell="bash", folder=folder, capsys=capsys))
    assert set(offered("paceline ", shell="bash", folder=folder, capsys=capsys)) == words[""]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_valid_and_says_how_to_install_it(shell, folder, capsys):
    needs(shell)
    script = write(folder, shell, capsys)
    subprocess.run([shell, "-n", str(script)], check=True)
    assert f"paceline completion {shell}" in script.read_text()


def test_completion_imports_neither_torch_nor_rich():
    code = """
import sys
from paceline.cli import COMMANDS
from paceline.command_line import complete
complete({name: takes for name, (_, takes) in COMMANDS.items()}, gpus=())
print(*{"torch", "rich", "numpy"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
