"""A process waits for others at a socket in the temporary folder, whose path is long."""

import tempfile
from multiprocessing.connection import Listener
from pathlib import Path

from job import start, train

rank, _ = start()
for step in train():
    if rank == 1 and step == 3:
        folder = Path(tempfile.gettempdir(), "scratch" * 12, "job" * 12)
        folder.mkdir(parents=True)
        tempfile.tempdir = str(folder)
        Listener(family="AF_UNIX")
