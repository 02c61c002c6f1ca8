"""Trains until a signal from outside ends it: Ctrl-C, a scheduler's SIGTERM, a closed terminal."""

import time

from job import start, train

start()
for _ in train(num_steps=10_000):
    time.sleep(0.05)
