"""Completion: what bash, zsh and fish offer while a command is typed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.cli import COMMANDS
from paceline.help import completion_script

TAKES = {name: takes for name, (_, takes) in COMMANDS.items()}
COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_paceline
printf '%s\\n' "${COMPREPLY[@]}"
"""


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


def write(folder: Path, shell: str) -> Path:
    path = folder / f"_paceline.{shell}"
    path.write_text(completion_script(shell, TAKES))
    return path


def completed(folder: Path, *words: str) -> list[str]:
    needs("bash")
    script = write(folder, "bash")
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", str(script), *words], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["paceline", "res"], ["resume"]),
        (["paceline", "run"], ["run", "runs"]),
        (["paceline", "torch", "re"], ["recipe"]),
        (["paceline", "torch", "recipe", "--dr"], ["--driver"]),
        (["paceline", "train", "--device"], ["--device", "--device-batch-size"]),
        (["paceline", "train", "--device", "c"], ["cuda", "cpu"]),
        (["paceline", "train", "--device", "=", "cu"], ["cuda"]),
        (["paceline", "train", "--no-ch"], ["--no-check"]),
        (["paceline", "train", "--name", ""], []),
        (["paceline", "resume", "bo"], ["books"]),
        (["paceline", "runs", "show", ""], ["books", "code"]),
        (["paceline", "completion", ""], ["bash", "zsh", "fish"]),
        (["paceline", "run", "--", "train.py", "--no-ch"], []),
    ],
    ids=str,
)
def test_bash_completes(words, offered, tmp_path):
    for name in ("books", "code"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    assert sorted(completed(tmp_path, *words)) == sorted(offered)


def test_fish_completes(tmp_path):
    needs("fish")
    line = f"source {write(tmp_path, 'fish')}; complete -C 'paceline torch recipe --dr'; complete -C 'paceline tok'"
    done = subprocess.run(["fish", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [each.split("\t")[0] for each in done.stdout.splitlines()] == ["--driver", "tokenizer"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_valid_and_has_every_command(shell, tmp_path):
    needs(shell)
    script = write(tmp_path, shell)
    subprocess.run([shell, "-n", str(script)], check=True)
    assert all(word in script.read_text() for name in COMMANDS for word in name.split())
