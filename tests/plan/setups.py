"""Setups, machines and plans that several tests of plan/ use."""

from dataclasses import replace
from pathlib import Path

from paceline.config import Config, ModelConfig
from paceline.plan.gpu_table import find_gpu
from paceline.plan.history import load_too_large
from paceline.plan.links import Link, link_of
from paceline.plan.machine import Gpu, Machine, imagined_machine
from paceline.plan.planner import Plan, make_plan
from paceline.plan.replan import MakePlan
from paceline.plan.sizing import Measured
from paceline.plan.speeds import Speeds
from paceline.plan.step_time import StepSetup

RTX_5090 = Gpu(0, "NVIDIA GeForce RTX 5090", 32_607 << 20, (12, 0), find_gpu("RTX 5090"))
ONE, TWO = (Machine(tuple(replace(RTX_5090, index=i) for i in range(n)), 16, False, 64 << 30) for n in (1, 2))
DEPTH_12 = Config(depth=12, num_steps=50, total_batch_size=524_288)
SLOW = Link("10GbE", 1.1e9, 1e-4, "assumed")


def gpt(depth: int, *, vocab: int = 32_768, pattern: str = "SSSL") -> ModelConfig:
    width = -(-64 * depth // 128) * 128
    heads = width // 128
    return ModelConfig(depth, width, heads, heads, 128, 2048, vocab, pattern)


def on(gpu: str, model: ModelConfig, *, gpus: int = 1, rows: int = 32, total: int = 2**19, hosts: int = 1) -> StepSetup:
    spec, world_size = find_gpu(gpu), gpus * hosts
    machine = imagined_machine(spec, gpus=gpus, hosts=hosts)
    return StepSetup(
        model=model,
        device="cuda",
        world_size=world_size,
        precision="bf16",
        optimizer="muon",
        shard="optimizer",
        device_batch_size=rows,
        grad_accum_steps=max(1, total // (rows * model.sequence_len * world_size)),
        spec=spec,
        link=link_of(None, machine, world_size=world_size, device="cuda", comm=None),
        hosts=hosts,
    )


MEASURED_CPU = Speeds(
    "CPU",
    threads=1,
    processes=2,
    rates={
        "linear fp32": ((128, 1e11), (512, 2e11)),
        "attention_dots fp32": ((256, 1e11),),
        "attention_pairs fp32": ((256, 4e8),),
        "pointwise fp32": ((262_144, 1e8),),
        "head fp32": ((128, 1e11),),
        "logits fp32": ((4096, 1e9),),
        "muon": ((64, 1e10), (512, 1e11)),
        "muon_long": ((64, 2e10), (512, 2e11)),
        "adamw": ((1, 1e9),),
        "table": ((1, 1e9),),
        "copy": ((1, 1e10),),
        "send": ((1, 1e9),),
    },
    host={"layer": 1e-3, "micro_step": 1e-3, "update": 2e-4, "send": 1e-4},
    source="measured 2026-11-21",
)


def on_cpu(*, world_size: int = 2, speeds: Speeds | None = MEASURED_CPU, **changes: object) -> StepSetup:
    model = ModelConfig(4, 128, 2, 2, 64, 256, 4096)
    setup = StepSetup(model, "cpu", world_size, "fp32", "muon", "optimizer", 8, 1, speeds=speeds)
    return replace(setup, **changes)  # type: ignore[arg-type]


def planner(folder: Path) -> MakePlan:
    """make_plan with the sizes that ran out of memory, as the cache folder has them."""

    def make(config: Config, machine: Machine) -> Plan:
        return make_plan(
            config, machine, vocab_size=32_768, num_rows=1000, measured=Measured(too_large=load_too_large(folder))
        )

    return make


def rows(plan: Plan) -> tuple[int, bool]:
    return plan.device_batch_size, plan.activation_checkpointing
