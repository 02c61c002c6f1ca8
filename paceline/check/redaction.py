"""
What may be written down of an environment, and what must not: no key, token or password leaves the host it is on.
"""

import re
from collections.abc import Mapping
from typing import Any

SET = "set"  # stands for a value that is there and is not shown

MATTERS = re.compile(
    r"(CUDA|NVIDIA|NCCL|GLOO|OMP|MKL|LD|MASTER|SLURM|WANDB|HF|TOKENIZERS|KMP|OPENBLAS|TORCH|PYTORCH|TRITON|UCX|TP)_"
    r"|TORCH|PYTHON|USE_LIBUV$|RANK$|LOCAL_RANK$|WORLD_SIZE$|TMPDIR$|XDG_CACHE_HOME$|CXX$|CC$|CONDA_PREFIX$|VIRTUAL_ENV$"
)
SECRET_NAME = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|COOKIE|(^|_)AUTH(_|$)|JWT", re.IGNORECASE)
HF_SHOWN = {"HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ENDPOINT"}

URL_LOGIN = re.compile(r"(?<=://)[^\s/@]+@")  # user:password@, or a token alone
SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|wandb_v\d_\w{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
NAMED_SECRET = re.compile(r"(?i)\b((?:api[_-]?key|token|secret|passw(?:or)?d)\s*[=:]\s*)[^\s&,;'\"]+")
BARE_KEY = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[0-9A-Fa-f]{32,}|(?=.*\d)(?=.*[a-z])(?=.*[A-Z])[\w+=-]{32,}")


def shown_env(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter to a run, sorted; `set` in place of a value that is or may be secret."""
    return {name: _shown(name, env[name]) for name in sorted(env) if MATTERS.match(name)}


def _shown(name: str, value: str) -> str:
    hidden = SECRET_NAME.search(name) or (name.startswith("HF_") and name not in HF_SHOWN)
    if value and (hidden or BARE_KEY.fullmatch(value)):
        return SET
    return str(redact(value))


def redact(value: Any) -> Any:
    """The same JSON with logins taken out of URLs, and everything that has the form of a known key."""
    if isinstance(value, str):
        value = URL_LOGIN.sub(f"{SET}@", value)
        value = NAMED_SECRET.sub(rf"\g<1>{SET}", value)
        return SECRET_VALUE.sub(SET, value)
    if isinstance(value, dict):
        return {key: redact(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [redact(each) for each in value]
    return value
