"""`paceline run` as the terminal has it: its words, its exit code, its errors in two lines."""

import sys

from paceline.cli import COMMANDS, run_command
from paceline.launch.script import run_words

COMMANDS.setdefault("run", run_words)
sys.exit(run_command(["run", *sys.argv[1:]]))
