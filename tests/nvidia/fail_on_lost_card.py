"""A script whose rank 1 fails as CUDA does when its card leaves the bus: once the file CARD_IS_LOST exists."""

import os
import time
from pathlib import Path

print("ready", flush=True)
while not Path(os.environ["CARD_IS_LOST"]).exists():
    time.sleep(0.05)
if os.environ["RANK"] == "1":
    raise RuntimeError("CUDA error: unspecified launch failure")
time.sleep(600)
