"""
What a worker's process is before it becomes the worker: `python -I -S rank.py ENGINE_PID LOGS_DIR COMMAND...`.

It ties the process to the engine's life, points stdout and stderr at the rank's own log and becomes COMMAND. So any
program, ours or not, has its output whole from the first byte, a crash while importing included. Standard library
only and no site-packages: it costs every start some 15 ms. Knows nothing of torch but the RANK it sets.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; kept by exec, so the worker has it too


def main(argv: list[str]) -> int:
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
