"""paceline trains GPT-style language models on the GPUs a person has."""

import atexit
import gc
import sys

__version__ = "0.1.0"


def main() -> None:
    """Runs the command. Ctrl-C while its modules are imported ends it without a traceback, as it does later."""
    try:
        from paceline.cli import main as run_command_line
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    atexit.register(gc.freeze)  # the interpreter's exit then need not visit torch's objects
    run_command_line()
