"""A script for torchrun that is started with python alone."""

import os
import sys

import torch.distributed as dist

if "local" in sys.argv:
    print("device", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("gloo")
