"""The torch that is installed, and broken ones made for real: shadowed, without libuv, crashing, hanging, absent."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from probing import NAMESPACES, NEEDS_RUNPATH, ask

from paceline.check.probes.torch_probe import cudnn_version, is_expected

VERSION_PY = "__version__ = '9.9.9'\ncuda: str = '12.8'\ngit_version = 'abc'\nhip = None\ndebug = False\n"
NO_LIBUV = "use_libuv was requested but PyTorch was built without libuv support, run with USE_LIBUV=0 to disable it."
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def write_torch(folder: Path, init: str) -> Path:
    """A package of the name torch whose import does `init`."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text(init)
    (folder / "torch/version.py").write_text(VERSION_PY)
    return folder


def build_library(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-o", path, "-"], input=source, text=True, check=True)


@pytest.mark.parametrize(("number", "version"), [(None, None), (91002, "9.10.2"), (8907, "8.9.7"), (90100, "9.1.0")])
def test_the_number_of_cudnn_is_a_version(number, version):
    assert cudnn_version(number) == version


def test_a_library_is_expected_under_torch_an_nvidia_wheel_or_the_prefix():
    torch_folder = Path("/opt/env/lib/python3.11/site-packages/torch")
    site = torch_folder.parent
    assert is_expected(f"{torch_folder}/lib/libc10.so", torch_folder=torch_folder)
    assert is_expected(f"{site}/nvidia/nccl/lib/libnccl.so.2", torch_folder=torch_folder)
    assert is_expected(f"{sys.prefix}/lib/libuv.so.1", torch_folder=torch_folder)
    assert not is_expected("/usr/lib/x86_64-linux-gnu/libnccl.so.2", torch_folder=torch_folder)
    assert is_expected(
        "/usr/lib/x86_64-linux-gnu/libtorch.so", torch_folder=Path("/usr/lib/python3/dist-packages/torch")
    )


def test_a_library_behind_a_link_of_torch_is_its_own(tmp_path):
    for name in ("torch/lib/libc10.so", "nvidia/nccl/lib/libnccl.so.2"):
        stored, link = tmp_path / "cache" / name, tmp_path / "site" / name
        for path in (stored, link):
            path.parent.mkdir(parents=True)
        stored.write_text(name)
        link.symlink_to(stored)
        assert is_expected(str(stored), torch_folder=tmp_path / "site/torch")  # as /proc/self/maps has it
        copy = tmp_path / link.name
        copy.write_text(name)
        assert not is_expected(str(copy), torch_folder=tmp_path / "site/torch")


PLAIN = {"OMP_NUM_THREADS": "1", "USE_LIBUV": "1"}


@pytest.fixture(scope="module")
def cached_torch(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("torch") / "deep/torch.json")


@pytest.fixture(scope="module")
def described(cached_torch) -> dict:
    return ask("torch_probe", env=PLAIN, cached_torch=cached_torch)


@pytest.mark.dist
def test_the_installed_torch_is_described_as_it_describes_itself(described):
    import torch

    section = described["torch"]
    assert (section["error"], section["version"], section["num_threads"]) == (None, torch.__version__, 1)
    assert (section["libuv"], section["libuv_error"]) == (True, None)
    assert (section["gloo"], section["mpi"]) == (
        torch.distributed.is_gloo_available(),
        torch.distributed.is_mpi_available(),
    )
    assert section["cuda_available"] == torch.cuda.is_available()
    libraries = {each["name"]: each for each in section["libraries"]}
    assert libraries["libtorch_cpu.so"]["path"] == str(Path(torch.__file__).parent / "lib/libtorch_cpu.so")
    assert libraries["libc10.so"]["expected"] is True


@pytest.mark.dist
def test_an_answer_is_cached_until_something_changes(described, cached_torch, tmp_path):
    request = {"env": PLAIN, "cached_torch": cached_torch}
    second = ask("torch_probe", **request)
    assert (second["torch"], "cached" in described, second["cached"]) == (described["torch"], False, True)
    other = write_torch(tmp_path / "other", "raise ImportError('other')")
    assert ask("torch_probe", **request, torch_path=str(other))["torch"]["error"] == "ImportError: other"
    assert "cached" not in ask("torch_probe", **request, torch_path=str(other))  # an error is not kept
    assert ask("torch_probe", **request)["cached"] is True


@pytest.mark.dist
def test_a_damaged_cached_answer_is_replaced(tmp_path):
    (tmp_path / "torch.json").write_text('{"key": ')
    fake = write_torch(tmp_path / "fake", "raise ImportError('x')")
    assert (
        ask("torch_probe", cached_torch=str(tmp_path / "torch.json"), torch_path=str(fake))["torch"]["error"]
        == "ImportError: x"
    )


@pytest.mark.dist
@needs_gcc
@NEEDS_RUNPATH
def test_a_foreign_library_before_the_one_of_torch_is_reported_although_it_never_loads(tmp_path):
    build_library(tmp_path / "old/libc10.so", "int nothing_of_c10(void) { return 1; }")
    section = ask("torch_probe", env={"LD_LIBRARY_PATH": str(tmp_path / "old")})["torch"]
    assert "undefined symbol" in section["error"]
    assert section["version"] is not None
    assert section["shadowing"] == [str(tmp_path / "old/libc10.so")]
    assert [each["path"] for each in section["libraries"] if not each["expected"]] == section["shadowing"]


@pytest.mark.dist
@needs_gcc
def test_a_loaded_libuv_reports_its_own_version(tmp_path):
    build_library(tmp_path / "libuv.so.1", 'const char *uv_version_string(void) { return "1.44.2"; }')
    section = ask("torch_probe", env={"LD_PRELOAD": str(tmp_path / "libuv.so.1")})["torch"]
    assert section["libuv_library"] == "1.44.2"
    assert {each["name"]: each["expected"] for each in section["libraries"]}["libuv.so.1"] is False


@pytest.mark.soak
@pytest.mark.dist
@pytest.mark.skipif(shutil.which("nm") is None or os.uname().machine != "x86_64", reason="needs nm and x86-64")
def test_a_torch_without_libuv_is_reported_with_its_own_error(without_libuv):
    section = ask("torch_probe", env=without_libuv)["torch"]
    assert (section["error"], section["libuv"], section["libuv_error"], section["gloo"]) == (
        None,
        False,
        NO_LIBUV,
        True,
    )


@NAMESPACES
@pytest.mark.soak
@pytest.mark.dist
def test_a_host_without_a_loopback_does_not_make_it_a_torch_without_libuv():
    section = ask("torch_probe", before=["unshare", "-n"])["torch"]
    assert (section["error"], section["libuv"]) == (None, None)
    assert "127.0.0.1" in section["libuv_error"]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("init", "error", "ended"),
    [
        ("import ctypes; ctypes.string_at(0)", "ended by SIGSEGV", True),
        ("import os; os.abort()", "ended by SIGABRT", True),
        ("raise SystemExit(3)", "SystemExit: 3", False),
        ("import os; open(os.path.join(os.path.dirname(__file__), 'pipe'))", "no answer in 1 s", True),
        ("import nothing_of_the_name", "ModuleNotFoundError: No module named 'nothing_of_the_name'", False),
    ],
)
def test_a_torch_that_cannot_be_imported_is_described_by_its_files(tmp_path, init, error, ended):
    folder = write_torch(tmp_path, init)
    os.mkfifo(folder / "torch/pipe")  # nobody ever writes: to open it hangs
    answer = ask("torch_probe", torch_path=str(folder / "torch"), deadline_s=2)
    section = answer["torch"]
    assert (section["error"], section["version"], section["cuda"], section["libuv"]) == (error, "9.9.9", "12.8", None)
    assert (section["path"], section["build"]) == (str(folder / "torch"), "source")
    assert answer.get("error") == (error if ended else None)
