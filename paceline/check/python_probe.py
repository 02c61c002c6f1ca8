"""
The Python that runs paceline and the packages in it, by their metadata alone. `python -m paceline.check.python_probe`.
"""

import importlib.metadata
import importlib.util
import platform
import re
import sys

from paceline.check.probe import Json, answer

PACKAGES = (
    "torch", "numpy", "tokenizers", "safetensors", "triton", "accelerate", "transformers", "lightning", "pytorch-lightning",
    "datasets", "wandb", "flash-attn", "torchao", "deepspeed", "xformers", "psutil", "nvidia-ml-py", "rich", "paceline",
)  # fmt: skip
FAMILIES = re.compile(
    r"nvidia-(nccl|cudnn|cublas|cuda-runtime|cuda-nvrtc|nvshmem)(-cu\d+)?|pytorch-triton.*", re.IGNORECASE
)
ALWAYS = ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


def probe_python(request: Json) -> Json:
    return {
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "prefix": sys.prefix,
            "venv": sys.prefix != sys.base_prefix,
            "pip": importlib.util.find_spec("pip") is not None,
        },
        "packages": probe_packages(),
    }


def probe_packages() -> dict[str, str | None]:
    """Version of each package that a run may use, None where it is not installed."""
    versions: dict[str, str | None] = dict.fromkeys((*PACKAGES, *ALWAYS))
    for distribution in importlib.metadata.distributions():
        path = getattr(distribution, "_path", None)  # a folder's name tells; reading every METADATA takes a second
        name = path.name.rpartition(".")[0].partition("-")[0] if path is not None else distribution.metadata["Name"]
        name = re.sub(r"[-_.]+", "-", name).lower()
        if (name in versions and versions[name] is None) or (name not in versions and FAMILIES.fullmatch(name)):
            versions[name] = distribution.version
    return versions


if __name__ == "__main__":
    answer(probe_python)
