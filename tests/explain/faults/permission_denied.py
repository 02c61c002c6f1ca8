"""Rank 1 runs as another user and cannot write into the run's folder."""

import os
from pathlib import Path

from job import start, train

folder = Path("logs")
rank, _ = start()
if rank == 1:
    folder.mkdir(mode=0o500)
    if os.geteuid() == 0:
        os.setuid(65534)
    (folder / "rank1.log").write_text("step 0")
for _ in train():
    pass
