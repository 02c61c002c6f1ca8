"""
Programs beside paceline: compilers, build tools, git, the tracker's login. `python -m paceline.check.tools_probe`.

Every program is really run for its version, all at once, each with a deadline.
"""

import importlib.util
import netrc
import os
import re
import shutil
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.check.probe import Json, answer

DEADLINE_S, LAST_LOOK_S = 2.5, 0.05  # the second for one that is done by the deadline, and was not yet read
VERSION = re.compile(r"\d+\.\d+[\w.]*")
COMPILERS = ("g++", "clang++", "c++")  # in the order in which torch.compile looks for them
WANDB_HOST = "api.wandb.ai"


def probe_tools(request: Json) -> Json:
    """The folder that the code of the run is in is the current one."""
    cuda_home = find_cuda_home()
    nvcc = shutil.which("nvcc") or (shutil.which("nvcc", path=str(cuda_home / "bin")) if cuda_home else None)
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), None)
    programs = {
        "cxx": shutil.which(compiler) if compiler else None,
        "nvcc": nvcc,
        **{name: shutil.which(name) for name in ("cmake", "ninja", "git", "ccache")},
    }
    commands = {name: [path, "--version"] for name, path in programs.items() if path}
    if programs["git"]:
        git = [programs["git"], "--no-optional-locks"]  # a look changes nothing in the repository
        commands |= {
            "top": [*git, "rev-parse", "--show-toplevel"],
            "commit": [*git, "rev-parse", "HEAD"],
            "dirty": [*git, "status", "--porcelain", "--untracked-files=no"],
        }
    printed = outputs(commands)
    nvidia_smi = shutil.which("nvidia-smi")
    return {
        "tools": {
            **{name: describe(path, printed.get(name)) for name, path in programs.items()},
            "cuda_home": str(cuda_home) if cuda_home else None,
            "python_headers": Path(sysconfig.get_path("include"), "Python.h").is_file(),
            "nvidia_smi": {"path": nvidia_smi, "version": None} if nvidia_smi else None,  # a wedged driver hangs it
            "wandb": probe_wandb(),
            "code": describe_code(printed),
        }
    }


def describe(path: str | None, printed: str | None) -> dict[str, str | None] | None:
    """None where there is no such program; version None where it does not run or does not say."""
    if path is None:
        return None
    lines = (printed or "").splitlines()
    release = next((line for line in lines if "release" in line), "")  # nvcc's version is not on its first line
    found = VERSION.search(release) or VERSION.search(re.sub(r"\([^)]*\)", "", lines[0] if lines else ""))
    return {"path": path, "version": found.group() if found else None}


def describe_code(printed: dict[str, str | None]) -> dict[str, Any]:
    top, commit, dirty = (printed.get(name) for name in ("top", "commit", "dirty"))
    return {
        "path": top or str(Path.cwd()),
        "commit": commit or None,
        "dirty": None if not commit or dirty is None else bool(dirty),
    }


def outputs(commands: dict[str, list[str]]) -> dict[str, str | None]:
    """What each prints; None for one that fails, or is not done by the deadline and is ended."""
    started: dict[str, subprocess.Popen[str]] = {}
    for name, command in commands.items():
        try:
            started[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            continue  # not for this machine, or not executable
    deadline = time.monotonic() + DEADLINE_S
    printed: dict[str, str | None] = {}
    for name, process in started.items():
        try:
            text, _ = process.communicate(timeout=max(LAST_LOOK_S, deadline - time.monotonic()))
            printed[name] = text.strip() if process.returncode == 0 else None
        except (subprocess.TimeoutExpired, UnicodeDecodeError):
            process.kill()
            printed[name] = None
    return printed


def find_cuda_home() -> Path | None:
    """Where extensions are built against: as torch.utils.cpp_extension looks for it."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            return Path(os.environ[name])
    nvcc = shutil.which("nvcc")
    if nvcc:
        return Path(nvcc).resolve().parent.parent
    usual = Path("/usr/local/cuda")
    return usual if usual.is_dir() else None


def probe_wandb() -> dict[str, Any]:
    """Whether a key is there, never which."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname or WANDB_HOST
    return {
        "installed": importlib.util.find_spec("wandb") is not None,
        "logged_in": bool(os.environ.get("WANDB_API_KEY")) or netrc_has(host),
        "mode": os.environ.get("WANDB_MODE"),
    }


def netrc_has(host: str) -> bool | None:
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        if not path.is_file():
            return False
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError, RuntimeError):
        return None  # there, and not readable


if __name__ == "__main__":
    answer(probe_tools)
