"""Three steps, an evaluation and a checkpoint, shown on whatever stdout is: `show_digest.py RUN_PATH`."""

import sys
import time
from pathlib import Path

from paceline.launch.digest import Digest
from paceline.rundir import RunDir, append_event, append_json_line, utc_now

run = RunDir(Path(sys.argv[1]))
digest = Digest(run, num_steps=3, total_batch_size=1024, stream=sys.stdout)
digest.poll()
for step in (1, 2, 3):
    record = {"step": step, "loss": 4.1203, "step_ms": 100.0, "tok_per_sec": 1e4, "mfu": None, "peak_bytes": None}
    append_json_line(run.metrics, {**record, "val_bpb": 1.7 if step == 2 else None, "time": utc_now()})
    time.sleep(0.3)
    digest.poll()
append_event(run, "checkpoint", step=3, seconds=0.5, bytes=1 << 20)
digest.close()
