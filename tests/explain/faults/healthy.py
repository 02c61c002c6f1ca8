"""Nothing fails; a warning and words like error stand in the log all the same."""

import warnings

import torch.distributed as dist
from job import say, start, train

rank, _ = start()
warnings.warn("lr_scheduler.step() was called before optimizer.step()", stacklevel=1)
for step in train():
    if rank == 0 and step == 3:
        say("eval | error rate 0.31 | 0 failed samples")
if rank == 0:
    say("training finished")
dist.destroy_process_group()
