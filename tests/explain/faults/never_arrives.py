"""Rank 1 never joins the process group: it is still busy with its data when the others give up."""

import os
import time

from job import start, train

if os.environ["RANK"] == "1":
    time.sleep(60)
start(timeout_s=3)
for _ in train():
    pass
