"""paceline trains GPT-style language models on the GPUs a person has."""

__version__ = "0.1.0"
