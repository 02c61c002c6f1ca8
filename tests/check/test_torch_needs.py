"""What is missing for a build, each with what mends it: on source trees made of a few files and on hosts that are data."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from paceline.check.torch_needs import (
    Need,
    build_backend,
    check_source,
    find_needs,
    folder_bytes,
    needs_disk,
    needs_nvcc,
    needs_one_libuv,
    needs_programs,
    needs_python,
    needs_submodules,
)
from paceline.check.torch_recipe import Option, Tools, build_options
from paceline.errors import PacelineError
from paceline.units import GIB

STAND_IN = Path(__file__).parent / "torch_stand_in"
TOOLS = {"tools": {name: {"path": f"/usr/bin/{name}", "version": "99.0"} for name in ("cmake", "ninja", "cxx", "nvcc")}}


@pytest.fixture
def source(tmp_path):
    return Path(shutil.copytree(STAND_IN, tmp_path / "pytorch"))


def without(name):
    return {"tools": {**TOOLS["tools"], name: None}}


def write_uv_header(folder, minor):
    (folder / "uv").mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), (1, minor, 0), strict=True)
    (folder / "uv/version.h").write_text("".join(f"#define UV_VERSION_{name} {number}\n" for name, number in parts))
    return folder


def test_a_whole_source_tree_with_all_tools_needs_nothing(source):
    options = build_options([], Tools())
    assert find_needs(source, source / "build", options, TOOLS, {}) == []


@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("cmake", Need("no cmake", "pip install cmake")),
        ("ninja", Need("no ninja", "pip install ninja")),
        ("cxx", Need("no C++ compiler", "apt install g++, or set CXX")),
    ],
)
def test_a_missing_program_is_named(source, name, need):
    assert list(needs_programs(source, without(name))) == [need]


def test_an_old_cmake_is_named_with_the_version_that_the_source_wants(source):
    here = {"tools": {**TOOLS["tools"], "cmake": {"path": "/usr/bin/cmake", "version": "3.16.3"}}}
    assert list(needs_programs(source, here)) == [
        Need("cmake 3.16.3, this source needs 3.18", "pip install 'cmake>=3.18'")
    ]


def test_python_packages_of_the_build_that_are_not_installed_are_named(source):
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools>=77,<99", "nothing-of-the-name>=1", "ninja"]\n'
    )
    assert list(needs_python(source, headers=Path(sysconfig.get_path("include")))) == [
        Need("Python packages that the build needs: nothing-of-the-name", "pip install nothing-of-the-name")
    ]


def test_missing_python_headers_are_named(source):
    assert next(needs_python(source, headers=Path("/nowhere"))).what == "no Python.h in /nowhere"


def test_a_build_for_gpus_needs_an_nvcc_that_compiles_for_them():
    assert [need.what for need in needs_nvcc(without("nvcc"), archs="12.0")] == [
        "no nvcc, and a build for GPUs is asked for"
    ]
    here = {"tools": {"nvcc": {"path": "/usr/bin/nvcc", "version": "13.0"}}}
    assert list(needs_nvcc(here, archs="12.0")) == []
    assert list(needs_nvcc(here, archs="9.0a;10.0f;8.9+PTX;Blackwell")) == []
    assert [need.what for need in needs_nvcc(here, archs="Volta")] == ["nvcc 13.0 does not compile for 7.0"]
    assert list(needs_nvcc(here, archs="7.0;12.0")) == [Need("nvcc 13.0 does not compile for 7.0", "CUDA 12.9")]


def test_submodules_that_are_not_checked_out_are_named(source):
    shutil.rmtree(source / "third_party/tensorpipe")
    assert list(needs_submodules(source)) == [
        Need(
            "submodules that are not checked out: third_party/tensorpipe",
            f"git -C {source} submodule update --init --recursive",
        )
    ]


def test_a_submodule_of_a_submodule_counts_too(source):
    shutil.rmtree(source / "third_party/tensorpipe/third_party/libuv")
    assert [need.what for need in needs_submodules(source)] == [
        "submodules that are not checked out: third_party/tensorpipe/third_party/libuv"
    ]


def test_nccls_source_must_be_there_before_cmake(source):
    (source / "tools").mkdir()
    (source / "tools/optional_submodules.py").touch()
    options = build_options(["12.0"], Tools())
    here = {"tools": {**TOOLS["tools"], "nvcc": {"path": "/n", "version": "13.0"}}}
    assert [need.fix for need in find_needs(source, source, options, here, {}) if "NCCL" in need.what] == [
        f"cd {source} && python tools/optional_submodules.py checkout_nccl"
    ]


@pytest.mark.parametrize("name", ["CPATH", "CXXFLAGS"])
def test_another_libuv_in_front_of_pytorchs_own_is_named(source, tmp_path, name):
    other = write_uv_header(tmp_path / "other", 48)
    env = {name: str(other) if name == "CPATH" else f"-O2 -I {other}"}
    assert list(needs_one_libuv(source, env)) == [
        Need(f"{name} puts the header of libuv 1.48.0 ({other}) before PyTorch's own 1.41.0", f"unset {name}")
    ]


def test_a_libuv_of_the_same_version_is_not_in_the_way(source, tmp_path):
    assert list(needs_one_libuv(source, {"CPATH": str(write_uv_header(tmp_path / "other", 41))})) == []


def test_a_disk_too_small_is_named_and_what_was_built_counts(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    assert [need.fix for need in needs_disk(tmp_path / "not/yet", free + GIB)] == ["--build-dir on a larger disk"]
    (tmp_path / "objects").write_bytes(bytes(32 << 20))
    assert list(needs_disk(tmp_path, shutil.disk_usage(tmp_path).free + (16 << 20))) == []


def test_what_was_built_is_counted_without_du(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/objects").write_bytes(bytes(1 << 20))
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path.parent / "link").symlink_to(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert 1 << 20 <= folder_bytes(tmp_path) < 2 << 20
    assert folder_bytes(tmp_path.parent / "link") == folder_bytes(tmp_path)


def test_a_folder_that_is_no_source_tree_is_refused(tmp_path):
    with pytest.raises(PacelineError) as error:
        check_source(tmp_path)
    assert error.value.fix == "git clone --recursive https://github.com/pytorch/pytorch"


def test_the_build_backend_is_read_from_the_tree(source):
    assert build_backend(source) == "setuptools.build_meta"
    (source / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "scikit_build_core.build"\n')
    assert build_backend(source) == "scikit_build_core.build"


def test_all_that_is_missing_is_named_at_once(source):
    shutil.rmtree(source / "third_party/tensorpipe")
    options = (Option("USE_CUDA", "OFF", ""), Option("USE_TENSORPIPE", "ON", ""))
    here = {"tools": {**TOOLS["tools"], "cmake": None, "ninja": None}}
    assert len(find_needs(source, source, options, here, {})) == 3
