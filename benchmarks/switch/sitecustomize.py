"""
On PYTHONPATH of a run that benchmarks/overhead.py measures: what the ranks do in one block of steps and leave out in the next.

OVERHEAD_SWITCH is "marks 10" or "saves 50": what, and the steps of a block. Blocks with an even number have it.
"""

import os
import sys
import time


def has_it(step, block):
    return step // block % 2 == 0


def switch_marks(block):
    from paceline.heartbeat import HeartbeatWriter

    mark = HeartbeatWriter.beat

    def mark_or_not(self, step, phase, micro_step=0):
        if has_it(step, block):
            mark(self, step, phase, micro_step)

    HeartbeatWriter.beat = mark_or_not


def switch_saves(block):
    from paceline.model.checkpoint import CheckpointWriter

    save, run = CheckpointWriter.save, CheckpointWriter._run

    def save_or_not(self, step, *args, **kwargs):
        if has_it(step, block):
            before = time.perf_counter()
            save(self, step, *args, **kwargs)
            print(f"save: {1000 * (time.perf_counter() - before):.2f} ms in the loop", flush=True)

    def run_measured(self, *args):
        run(self, *args)
        print(f"save: {1000 * time.thread_time():.2f} ms of CPU beside it", flush=True)

    CheckpointWriter.save, CheckpointWriter._run = save_or_not, run_measured


if "paceline.train.worker" in sys.orig_argv and "OVERHEAD_SWITCH" in os.environ:
    what, words = os.environ["OVERHEAD_SWITCH"].split()
    {"marks": switch_marks, "saves": switch_saves}.get(what, lambda block: None)(int(words))
