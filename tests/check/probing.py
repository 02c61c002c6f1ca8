"""Real probes for the tests here: as processes, on this host or on one made of namespaces with a name and a network of its own."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMESPACES = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"), reason="needs root, ip and unshare"
)


def torch_can_be_shadowed() -> bool:
    """Whether LD_LIBRARY_PATH comes before torch's own folders: its CUDA builds have an RPATH since 2.14, which comes first."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    library = Path(spec.origin).with_name("lib") / "libtorch_python.so"
    tool = shutil.which("readelf")
    return tool is not None and b"(RUNPATH)" in subprocess.run([tool, "-d", library], capture_output=True).stdout


NEEDS_RUNPATH = pytest.mark.skipif(not torch_can_be_shadowed(), reason="this torch does not read LD_LIBRARY_PATH first")


def ask(probe: str, *, before: Sequence[str] = (), env: dict[str, str] | None = None, **request: Any) -> Any:
    """What one probe answers, or all of them as `facts`. before: words such as `unshare -m` that the command goes after."""
    done = subprocess.run(
        [*before, sys.executable, "-m", *f"paceline.check.probes.{probe}".split()],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_mounts(script: str) -> list[str]:
    """The words before a command that make it run after `script`, in a mount namespace of its own."""
    return ["unshare", "-m", "bash", "-e", "-c", f'{script}; exec "$@"', "bash"]


@contextmanager
def made_host(name: str, *, files: dict[str, str]) -> Iterator[list[str]]:
    """A host `name` with only a loopback interface and an eth0 on which nobody answers; yields the words before a command there.

    files: those of /etc that it sees. Names must be unique: whoever else uses one takes it away.
    """
    etc = Path("/etc/netns", name)
    etc.mkdir(parents=True)
    for file, text in files.items():
        (etc / file).write_text(text)
    try:
        subprocess.run(["ip", "netns", "add", name], check=True)
        wires = ("link add eth0 type veth peer name far0", "addr add 10.77.9.1/24 dev eth0")
        for words in ("link set lo up", *wires, "link set eth0 up", "link set far0 up"):
            subprocess.run(["ip", "-n", name, *words.split()], check=True)
        yield ["ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c", 'hostname "$0"; exec "$@"', name]
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)
        shutil.rmtree(etc)
