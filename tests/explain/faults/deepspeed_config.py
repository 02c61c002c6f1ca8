"""DeepSpeed is given batch sizes that do not multiply up."""

from deepspeed.runtime.config import DeepSpeedConfig
from job import start

start()
DeepSpeedConfig({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2})
