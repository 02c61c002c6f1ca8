"""The command line: help for every command, quick, and the README's own commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import COMMANDS, HELP, run_command
from paceline.config import KEYS

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_help_lists_every_command(capsys):
    assert run_command(["--help"]) == 0
    assert capsys.readouterr().out == HELP
    assert all(f"paceline {name} " in HELP for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_help_with_an_example_and_stands_in_the_readme(name, capsys):
    assert run_command([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^  paceline {name}", text, re.M), text
    assert f"paceline {name}" in README


def test_the_help_of_train_shows_every_key_with_its_default(capsys):
    run_command(["train", "--help"])
    text = capsys.readouterr().out
    for key in KEYS:
        assert f"--{key.replace('_', '-')} " in text


def test_the_version_is_printed(capsys):
    assert run_command(["--version"]) == 0
    assert re.fullmatch(r"paceline \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_reader_that_goes_away_is_no_error():
    code = "from paceline.cli import main; import sys; sys.argv = ['paceline', 'train', '--help']; main()"
    done = subprocess.run(
        f'{sys.executable} -c "{code}" | head -1', shell=True, capture_output=True, text=True, check=True
    )
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


def test_the_readme_names_every_exit_code():
    assert (
        "Exit codes: 0 done, 1 your error with its fix, 2 wrong\nusage, 3 the training failed, 130 interrupted"
        in README
    )
