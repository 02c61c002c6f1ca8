"""Prints what the next attempt of a training is, by the cards that this host has now: `decide.py RUN NUM_CARDS`.

It began on NUM_CARDS cards and failed as one of them left the bus.
"""

import sys
from dataclasses import replace
from pathlib import Path

from paceline.config import Config
from paceline.launch.job import TrainingJob
from paceline.launch.policy import AttemptEnd, Situation, decide
from paceline.options import LaunchOptions, Recovery
from paceline.plan.gpu_table import find_gpu
from paceline.plan.machine import Machine, imagined_machine
from paceline.plan.planner import Plan, make_plan
from paceline.rundir import RunDir


def make(config: Config, machine: Machine) -> Plan:
    return make_plan(config, machine, vocab_size=32_768, num_rows=1000)


run = RunDir(Path(sys.argv[1]))
config = Config(depth=12, num_steps=50, total_batch_size=524_288, cache_dir=str(run.path / "cache"))
before = replace(imagined_machine(find_gpu("RTX 5090"), gpus=int(sys.argv[2]), hosts=1), memory_bytes=64 << 30)
run.path.mkdir()
run.plan_json.write_text(make(config, before).to_json())
job = TrainingJob(run, lock=0, libuv=True, options=LaunchOptions(), config=config, make=make)
end = AttemptEnd("gpu-hardware-error", "same", rank=1, step=7, new_checkpoint=True, error="fell off the bus")
decision = decide(Situation([end], Recovery(), job.abilities(end)))
print(decision.action, decision.why, sep=": ")
