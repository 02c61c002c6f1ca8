"""Setups whose step times the tests of plan/ reckon."""

from dataclasses import replace

from paceline.config import ModelConfig
from paceline.plan.gpus import find_gpu
from paceline.plan.links import Link, link_of
from paceline.plan.machine import imagined_machine
from paceline.plan.speeds import Speeds
from paceline.plan.step_time import StepSetup

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
        attention="flex",
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
