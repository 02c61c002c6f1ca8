"""The command that changes the torch in a folder, and not the torch of the Python that looks at it."""

import shlex
import site
import sys

import pytest

from paceline.check.torch_owner import fix_at

INDEX = "https://download.pytorch.org/whl/cu130"
WHEEL = f"pip install --force-reinstall torch -i {INDEX}"
NEWER = "pip install --upgrade 'torch>=2.11'"
OURS = shlex.quote(sys.executable)


def write_site(folder, *, record=True, compiled_for="311"):
    """A folder with a torch in it."""
    (folder / "torch").mkdir(parents=True)
    (folder / f"torch/_C.cpython-{compiled_for}-x86_64-linux-gnu.so").touch()
    if record:
        (folder / "torch-2.10.0.dist-info").mkdir()
        (folder / "torch-2.10.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.0\n")
    return folder


def write_venv(folder, *, version="3.12", pip=True):
    packages = write_site(folder / f"lib/python{version}/site-packages")
    (folder / "bin").mkdir()
    (folder / "bin/python3").touch()
    (folder / "pyvenv.cfg").touch()
    if pip:
        (packages / "pip").mkdir()
    return packages


def test_in_a_venv_its_own_python_installs(tmp_path):
    packages = write_venv(tmp_path / "other env")
    python = f"'{tmp_path}/other env/bin/python3'"
    assert fix_at(WHEEL, packages) == f"{python} -m pip install --force-reinstall torch -i {INDEX}"
    assert fix_at("pip install nvidia-nccl-cu12==2.27.3", packages) == (
        f"{python} -m pip install nvidia-nccl-cu12==2.27.3"
    )
    assert fix_at("paceline torch recipe", packages) == (
        f"paceline torch recipe, with {python} -m pip install for its pip install"
    )


def test_into_a_venv_without_pip_another_pip_installs(tmp_path):
    packages = write_venv(tmp_path, pip=False)
    assert fix_at(NEWER, packages) == f"pip --python {tmp_path}/bin/python3 install --upgrade 'torch>=2.11'"


def test_a_prefix_without_a_python_keeps_its_prefix_and_leaves_our_torch_alone(tmp_path):
    packages = write_site(tmp_path / "lib/python3.12/site-packages")
    assert fix_at(WHEEL, packages) == (
        f"python3.12 -m pip install --prefix {tmp_path} --ignore-installed torch -i {INDEX}"
    )


def test_a_target_folder_keeps_its_target_and_the_python_that_it_was_compiled_for(tmp_path):
    packages = write_site(tmp_path / "libs", compiled_for="39")
    assert fix_at(NEWER, packages) == f"python3.9 -m pip install --upgrade --target {packages} 'torch>=2.11'"


def test_the_users_own_packages_are_installed_for_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "getuserbase", lambda: str(tmp_path))
    packages = write_site(tmp_path / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages")
    assert fix_at(WHEEL, packages) == f"{OURS} -m pip install --user --force-reinstall torch -i {INDEX}"


def test_a_folder_that_no_pip_wrote_gets_a_venv_instead(tmp_path):
    folder = write_site(tmp_path / "libs", record=False, compiled_for="39")
    assert fix_at(WHEEL, folder) == (
        f"no pip put it into {folder}; instead: python3.9 -m venv {folder}-venv &&"
        f" {folder}-venv/bin/python -m pip install torch -i {INDEX}"
    )


def test_a_source_tree_is_built_again_beside_our_torch(tmp_path):
    (tmp_path / "CMakeLists.txt").touch()
    build = f"paceline torch build --source {tmp_path} --prefix {tmp_path}-installed"
    assert fix_at(WHEEL, tmp_path) == build
    assert fix_at(NEWER, tmp_path) == f"git -C {tmp_path} pull --recurse-submodules && {build}"


@pytest.mark.parametrize("fix", ["unset LD_LIBRARY_PATH LD_PRELOAD", "nvidia-smi", "mv /a /a.old", "--nproc 1"])
def test_a_fix_that_installs_nothing_stays_as_it_is(tmp_path, fix):
    assert fix_at(fix, tmp_path) == fix


def test_an_import_is_timed_where_it_was_slow(tmp_path):
    assert fix_at("time python -c 'import torch'", tmp_path) == (
        f"time env PYTHONPATH={tmp_path} {OURS} -c 'import torch'"
    )
