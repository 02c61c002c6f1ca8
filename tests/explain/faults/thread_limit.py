"""Rank 1 enters the control group of argument 1, which allows few processes, and starts threads."""

import os
import sys
import threading
import time
from pathlib import Path

from job import start, train

rank, _ = start()
for step in train():
    if rank == 1 and step == 3:
        Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
        for _ in range(64):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
