"""What all tests share: gpu tests are skipped without a CUDA GPU, those that compile C++ without a compiler."""

import gc
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import setuptools  # noqa: F401  before anything takes the standard library's distutils: wandb does, inductor then cannot

CGROUPS = Path("/sys/fs/cgroup/memory")
LIBUV_CHECK = "_ZN4c10d6detail35is_libuv_tcpstore_backend_availableEv"


os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # threads that spin while they wait take the cores of the other worker


hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


def pytest_configure() -> None:
    """Lets tests send SIGINT, which a shell's background jobs inherit as ignored, and keeps inductor to ATen's vector width."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        # inductor looks at the CPU alone: with AVX-512 its kernels crash beside ATen's of 256 bits
        from torch._inductor import config

        config.cpp.simdlen = 256


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves files of which all tests are of the soak tier unread: some import the compiler."""
    if config.option.markexpr != "not soak" or not collection_path.name.startswith("test_"):
        return None
    return True if "\npytestmark = [\n    pytest.mark.soak,\n" in collection_path.read_text() else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects without the garbage collector: importing torch makes nothing but objects that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files with most real processes first: two workers then end at about the same time."""
    heavy = Counter(item.path for item in items if item.get_closest_marker("dist"))
    items.sort(key=lambda item: -heavy[item.path])
    if shutil.which("g++") is None and shutil.which("c++") is None:
        for item in items:
            if item.get_closest_marker("compiler"):
                item.add_marker(pytest.mark.skip(reason="no C++ compiler here"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU here"))


def pytest_collection_finish() -> None:
    """As many test processes run as there are cores: more threads in each only wait for each other.

    What was imported stays: without it collections take less, the last ones 2 of 5 seconds of a process that imports torch.
    """
    gc.freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def without_libuv() -> dict[str, str]:
    """Variables that make every Python's torch one that was built without libuv (tests/no_libuv)."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or shutil.which("nm") is None:
        pytest.skip("the patch needs x86-64 Linux and nm")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    symbols = subprocess.run(["nm", library], capture_output=True, text=True).stdout.splitlines()
    offset = next((line.split()[0] for line in symbols if line.endswith(LIBUV_CHECK)), None)
    if offset is None:
        pytest.skip("this torch does not name its check for libuv")
    return {"PYTHONPATH": str(Path(__file__).parent / "no_libuv"), "NO_LIBUV_OFFSET": str(int(offset, 16))}


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of version 1, empty; the end of the test is the end of whatever is in it."""
    if os.geteuid() != 0 or not CGROUPS.is_dir() or not os.access(CGROUPS, os.W_OK):
        pytest.skip("needs root and a memory cgroup of version 1")
    folder = CGROUPS / f"paceline-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    yield folder
    for pid in (folder / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    for _ in range(100):
        try:
            folder.rmdir()
            break
        except OSError:
            time.sleep(0.05)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mounted)], capture_output=True).returncode:
        pytest.skip("may not mount here")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)
