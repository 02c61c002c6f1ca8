import json
import os
from pathlib import Path

import pytest

import paceline
from paceline.check.torch_install import cache_key, describe_build, find_shadowing, find_torch, read_version_file


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def site_packages(root: Path, *, version: str = "2.13.0", **record: str) -> Path:
    """An installed torch, as an installer leaves it; record: files of its dist-info. Returns the torch folder."""
    info = f"torch-{version}.dist-info"
    files = {f"{info}/{name.replace('__', '.')}": text for name, text in record.items()}
    write_files(root, {"torch/__init__.py": "", f"{info}/METADATA": f"Name: torch\nVersion: {version}\n", **files})
    return root / "torch"


def source_tree(root: Path) -> Path:
    header = "#define UV_VERSION_MAJOR 1\n#define UV_VERSION_MINOR 48\n#define UV_VERSION_PATCH 0\n"
    uv = "third_party/tensorpipe/third_party/libuv/include/uv/version.h"
    empty = dict.fromkeys(("CMakeLists.txt", "aten/x", "c10/x", "torch/__init__.py"), "")
    return write_files(root, {**empty, "torch/lib/libc10.so": "old", uv: header})


def test_the_installed_torch_and_its_version_are_read_without_an_import():
    torch = pytest.importorskip("torch")
    path = find_torch()
    assert path == Path(torch.__file__).parent
    facts = read_version_file(path)
    assert (facts["version"], facts["git_version"]) == (torch.__version__, torch.version.git_version)
    assert (facts["cuda"], facts["hip"], facts["debug"]) == (torch.version.cuda, torch.version.hip, torch.version.debug)


@pytest.mark.parametrize("text", ["", "this is not python (", "__version__ = compute()"])
def test_an_empty_version_file_leaves_unknown_facts(tmp_path, text):
    (tmp_path / "version.py").write_text(text)
    assert set(read_version_file(tmp_path).values()) == {None}


def test_what_pip_installed_is_a_wheel(tmp_path):
    path = site_packages(tmp_path, INSTALLER="pip\n")
    assert describe_build(path, version="2.13.0+cu128") == {
        "build": "wheel",
        "source_dir": None,
        "build_tree": None,
        "libuv_header": None,
    }


@pytest.mark.parametrize(
    ("installer", "version", "build"), [("conda", "2.13.0", "conda"), ("pip", "2.14.0a0+gitcf30153", "source")]
)
def test_what_conda_installed_is_conda_and_a_wheel_made_of_a_checkout_a_source_build(
    tmp_path, installer, version, build
):
    path = site_packages(tmp_path, INSTALLER=f"{installer}\n")
    assert describe_build(path, version=version)["build"] == build


def test_pip_install_of_a_folder_is_a_source_build_and_names_the_folder(tmp_path):
    tree = source_tree(tmp_path / "py torch")
    direct = json.dumps({"url": tree.as_uri(), "dir_info": {}})
    path = site_packages(tmp_path / "site", INSTALLER="pip\n", direct_url__json=direct)
    facts = describe_build(path, version="2.14.0a0")
    assert (facts["build"], facts["source_dir"], facts["libuv_header"]) == ("source", str(tree), "1.48.0")


def test_a_torch_in_its_own_source_tree_is_editable(tmp_path):
    tree = source_tree(tmp_path)
    assert describe_build(tree / "torch", version="2.14.0a0")["build"] == "editable"


@pytest.mark.parametrize(("built", "newer"), [("old", []), ("changed", ["libc10.so"])])
def test_libraries_that_were_built_and_not_copied_are_reported(tmp_path, built, newer):
    tree = source_tree(tmp_path)
    write_files(tree, {"build/lib/libc10.so": built, "build/lib/libother.so": "x"})
    for library in (tree / "torch/lib/libc10.so", tree / "build/lib/libc10.so"):
        os.utime(library, (1e9, 1e9))
    facts = describe_build(tree / "torch", version="2.14.0a0")
    assert facts["build_tree"] == {"path": str(tree / "build"), "libraries_newer": newer}


def test_a_rebuilt_library_of_the_same_size_is_newer(tmp_path):
    tree = source_tree(tmp_path)
    write_files(tree, {"build/lib/libc10.so": "new"})
    os.utime(tree / "torch/lib/libc10.so", (1e9, 1e9))
    assert describe_build(tree / "torch", version=None)["build_tree"]["libraries_newer"] == ["libc10.so"]


def test_libraries_on_the_loaders_path_before_those_of_torch_are_reported(tmp_path, monkeypatch):
    write_files(tmp_path, {"torch/lib/libc10.so": "", "nvidia/nccl/lib/libnccl.so.2": "", "old/libc10.so": ""})
    write_files(tmp_path, {"old/libnccl.so.2": "", "older/libc10.so": "", "old/libz.so": ""})
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/torch/lib:{tmp_path}/old:{tmp_path}/older")
    assert find_shadowing(tmp_path / "torch") == [f"{tmp_path}/old/libc10.so", f"{tmp_path}/old/libnccl.so.2"]
    (tmp_path / "links").mkdir()
    (tmp_path / "links/libc10.so").symlink_to(tmp_path / "torch/lib/libc10.so")
    for searched in ("", f"{tmp_path}/links"):
        monkeypatch.setenv("LD_LIBRARY_PATH", searched)
        assert find_shadowing(tmp_path / "torch") == []


@pytest.mark.parametrize("name", ["LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "USE_LIBUV"])
def test_variables_of_the_loader_are_part_of_the_cache_key(tmp_path, monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    before = cache_key(tmp_path, torch_path=None, shadowing=[])
    assert before == cache_key(tmp_path, torch_path=None, shadowing=[])
    monkeypatch.setenv(name, "0")
    assert cache_key(tmp_path, torch_path=None, shadowing=[]) != before


def test_the_folder_of_paceline_itself_is_no_part_of_the_cache_key_and_another_one_beside_it_is(tmp_path, monkeypatch):
    ours = str(Path(paceline.__file__).parents[1])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    before = cache_key(tmp_path, torch_path=None, shadowing=[])
    monkeypatch.setenv("PYTHONPATH", ours)
    assert cache_key(tmp_path, torch_path=None, shadowing=[]) == before
    monkeypatch.setenv("PYTHONPATH", f"{ours}{os.pathsep}/other")
    assert cache_key(tmp_path, torch_path=None, shadowing=[]) != before


@pytest.mark.parametrize("name", ["version.py", "lib/libtorch_cpu.so", "lib/libc10.so"])
def test_a_changed_file_changes_the_key(tmp_path, name):
    before = cache_key(tmp_path, torch_path=None, shadowing=[])
    write_files(tmp_path, {name: "x"})
    assert cache_key(tmp_path, torch_path=None, shadowing=[]) != before
