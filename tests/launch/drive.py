"""
A supervisor of its own, for tests that signal or kill it: `drive.py RUN_PATH NPROC STOP_GRACE_S SCRIPT [ARGS]`.

HANG_AFTER_S is that of its watchdog; RANKS_ARE=script says that the ranks mark nothing.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from paceline.launch.attempts import format_failure
from paceline.launch.digest import Digest
from paceline.launch.env import Launch, worker_env
from paceline.launch.supervisor import run_attempt
from paceline.rundir import RunDir, lock_run

run = RunDir(Path(sys.argv[1]))
nproc, stop_grace_s, script = int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
run.path.mkdir(parents=True, exist_ok=True)
env, _ = worker_env(os.environ, Launch(nproc, "cpu", cpu_cores=nproc))
hang_after_s = os.environ.get("HANG_AFTER_S")
digest = Digest(run, num_steps=100, total_batch_size=1024, stream=sys.stdout)
outcome = run_attempt(
    run,
    command=[sys.executable, *script],
    nproc=nproc,
    attempt=1,
    env=env,
    lock_fd=lock_run(run),
    on_tick=digest.poll,
    hang_after_s=float(hang_after_s) if hang_after_s else None,
    script=os.environ.get("RANKS_ARE") == "script",
    stop_grace_s=stop_grace_s,
    health_every_s=float(os.environ.get("HEALTH_EVERY_S", "0")),
)
digest.close()
print(format_failure(outcome, run) if outcome.failures else "")
print(json.dumps(dataclasses.asdict(outcome)))
sys.exit(outcome.exit_code)
