"""
The first program of a worker's process: `python -I -S rank.py ENGINE_PID LOGS_DIR COMMAND...`.

It ties the process to the engine's life, redirects stdout and stderr to the rank's own log and executes COMMAND. So the output of
any program, paceline's or not, is whole from the first byte, even if it crashes while importing. It uses the standard library
without site-packages: each start costs about 15 ms. Of torch it only uses the variable RANK.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; kept by exec, so the worker has it too


def main(argv: list[str]) -> int:
    """Becomes the worker; returns an exit code only where that is impossible."""
    engine_pid, logs_dir, *command = argv
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(engine_pid):
        return 1  # the engine ended before the line above took effect

    rank_log = os.path.join(logs_dir, os.environ["RANK"])  # noqa: PTH118  pathlib would double the start-up time
    fd = os.open(rank_log + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)  # one open file for both: lines keep the order in which they were written
    os.close(fd)
    with open(rank_log + ".pid", "w") as file:
        file.write(f"{os.getpid()}\n")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
