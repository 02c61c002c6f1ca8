"""A supervisor with a watchdog, for tests that signal it: `hang_drive.py RUN_PATH NPROC HANG_AFTER_S own|script SCRIPT [ARGS]`."""

import os
import sys
from pathlib import Path

from paceline.launch.env import worker_env
from paceline.launch.supervisor import run_attempt
from paceline.launch.watchdog import Watchdog
from paceline.rundir import RunDir, lock_run

run = RunDir(Path(sys.argv[1]))
nproc, hang_after_s, kind, script = int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], sys.argv[5:]
run.path.mkdir(parents=True, exist_ok=True)
env, _ = worker_env(os.environ, nproc=nproc, device="cpu", cpu_cores=nproc)
outcome = run_attempt(
    run,
    command=[sys.executable, *script],
    nproc=nproc,
    attempt=1,
    env=env,
    lock_fd=lock_run(run),
    on_tick=lambda: None,
    watchdog=Watchdog(run, 1, nproc, hang_after_s=hang_after_s, script=kind == "script"),
)
sys.exit(outcome.exit_code)
