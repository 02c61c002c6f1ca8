"""`paceline torch check` on the installed torch and on really broken ones; the fix for a torch in another folder."""

import os
import shlex
import shutil
import signal
import site
import subprocess
import sys
from pathlib import Path

import pytest
from probing import NEEDS_RUNPATH

from paceline.check.probes.facts import PROBES, ask_probes
from paceline.check.torch_check import (
    Proof,
    TorchCheck,
    capabilities_of,
    check_torch,
    describe_end,
    fix_at,
    format_check,
    locate_torch,
    prove_torch,
    recipe_here,
)
from paceline.errors import Finding, PacelineError

ON_CPU = ["import", "store with libuv", "gloo all_reduce", "matmul fp32 cpu", "matmul bf16 cpu"]
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture(autouse=True)
def one_thread_and_no_card(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def write_torch(folder: Path, init: str) -> Path:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text(init)
    return folder


def on_pythonpath(monkeypatch, folder: Path, text: str) -> None:
    """Installs Python code that every process runs at its start."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def prove(path=None, deadline_s=120.0):
    return list(prove_torch(path, deadline_s=deadline_s))


@pytest.mark.dist
def test_the_installed_torch_is_right():
    import torch

    begun = []
    check = check_torch(on_trial=begun.append)
    assert not check.problems, format_check(check)
    assert begun == [proof.name for proof in check.proofs] == ON_CPU
    lines = format_check(check).splitlines()
    assert lines[0] == f"torch   {torch.__version__}, wheel, {Path(torch.__file__).parent}"
    assert "libuv" in lines[1] and "without" not in lines[1]
    assert lines[-1] == "this torch is right"
    assert check.to_json()["right"] is True


@pytest.mark.soak
@pytest.mark.dist
def test_of_a_torch_without_libuv_only_the_store_is_wrong(without_libuv, monkeypatch):
    for name, value in without_libuv.items():
        monkeypatch.setenv(name, value)
    check = check_torch()
    wrong = [proof for proof in check.proofs if not proof.ok]
    assert [proof.name for proof in wrong] == ["store with libuv"]
    assert "was built without libuv support" in wrong[0].message
    assert "torch-no-libuv" in [finding.id for finding in check.findings]
    text = format_check(check)
    assert "without libuv" in text.splitlines()[1]
    assert text.splitlines()[-1] == "this torch is not right: store with libuv"


@pytest.mark.dist
@needs_gcc
@NEEDS_RUNPATH
def test_a_stale_library_before_the_one_of_torch_is_reported(tmp_path, monkeypatch):
    source = "int nothing_of_c10(void) { return 1; }"
    stale = tmp_path / "libc10.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-o", stale, "-"], input=source, text=True, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    check = check_torch()
    assert [(proof.name, proof.ok) for proof in check.proofs] == [("import", False)]
    assert {"torch-broken", "library-foreign"} <= {finding.id for finding in check.findings}
    assert f"loaded  {stale} is not torch's own" in format_check(check)


@pytest.mark.dist
@pytest.mark.soak
def test_the_torch_at_the_path_is_the_one_that_is_tried(tmp_path):
    import torch

    (tmp_path / "torch").symlink_to(Path(torch.__file__).parent)
    check = check_torch(tmp_path)
    assert (check.problems, check.facts["torch"]["path"]) == ([], str(tmp_path / "torch"))


@pytest.mark.dist
def test_an_empty_package_is_not_a_torch(tmp_path):
    check = check_torch(write_torch(tmp_path, ""))
    assert check.problems
    assert "torch-broken" in [finding.id for finding in check.findings]
    assert check.proofs[0] == Proof("import", False, check.proofs[0].seconds, check.proofs[0].message)


@pytest.mark.dist
def test_a_wrong_product_and_a_trial_that_crashes_the_process_are_reported(tmp_path, monkeypatch):
    on_pythonpath(
        monkeypatch,
        tmp_path / "site",
        "import ctypes, sys, torch\n"
        "right = torch.Tensor.__matmul__\n"
        "def wrong(a, b):\n"
        "    if a.dtype == torch.bfloat16:\n"
        "        print('about to fall', file=sys.stderr, flush=True)\n"
        "        ctypes.string_at(0)\n"
        "    return right(a, b).index_fill(0, torch.tensor([3]), 9)\n"
        "torch.Tensor.__matmul__ = wrong\n",
    )
    proofs = {proof.name: proof for proof in prove()}
    assert proofs["gloo all_reduce"].ok
    assert proofs["matmul fp32 cpu"].message == "ArithmeticError: 128 of 32,768 elements are wrong"
    crash = Proof("matmul bf16 cpu", False, None, "ended by SIGSEGV; its last line: about to fall")
    assert list(proofs.values())[-1] == crash


@pytest.mark.dist
def test_a_trial_that_hangs_is_killed_after_its_deadline(tmp_path):
    pid_file = tmp_path / "pid"
    folder = write_torch(
        tmp_path / "t", f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    assert prove(folder, deadline_s=2.0) == [Proof("import", False, None, "no answer in 2 s")]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("import os; os.abort()", "ended by SIGABRT"),
        ("import nothing_of_the_name", "ModuleNotFoundError: No module named 'nothing_of_the_name'"),
    ],
)
@pytest.mark.dist
def test_an_import_that_breaks_is_the_only_trial(tmp_path, init, message):
    proof = prove(write_torch(tmp_path, init))[-1]
    assert (proof.name, proof.ok, proof.message) == ("import", False, message)


def test_the_last_line_is_reported_with_the_signal():
    assert describe_end(-signal.SIGKILL, "") == "ended by SIGKILL"
    assert describe_end(-signal.SIGSEGV, "one\ntwo\n") == "ended by SIGSEGV; its last line: two"


@pytest.mark.dist
def test_of_a_torch_at_another_path_the_packages_next_to_it_are_read_and_the_fix_changes_it(tmp_path):
    site = tmp_path / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    write_torch(site, "raise ImportError('broken')")
    (site / "pip").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    (site / "nvidia_nccl_cu12-2.27.3.dist-info").mkdir()
    (site / "nvidia_nccl_cu12-2.27.3.dist-info/METADATA").write_text("Name: nvidia-nccl-cu12\nVersion: 2.27.3\n")
    check = check_torch(tmp_path)
    fixes = {finding.id: finding.fix for finding in check.findings}
    assert fixes["torch-broken"].startswith(f"{tmp_path}/bin/python -m pip install --force-reinstall torch -i ")
    packages = check.facts["packages"]
    assert (packages["nvidia-nccl-cu12"], packages["numpy"]) == ("2.27.3", None)


def test_a_missing_folder_and_one_without_torch_are_refused(tmp_path):
    with pytest.raises(PacelineError) as error:
        locate_torch(tmp_path / "nowhere")
    assert error.value.message == f"--path {tmp_path}/nowhere: there is no such folder"
    (tmp_path / "torch").mkdir()
    with pytest.raises(PacelineError) as error:
        locate_torch(tmp_path)
    assert error.value.message == f"no torch in {tmp_path}"


def test_site_packages_a_venv_and_the_torch_folder_mean_the_same(tmp_path):
    site = tmp_path / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    write_torch(site, "")
    assert [locate_torch(path) for path in (tmp_path, site, site / "torch")] == [site] * 3


def test_a_venv_of_another_python_is_refused(tmp_path):
    write_torch(tmp_path / "lib/python3.99/site-packages", "")
    with pytest.raises(PacelineError) as error:
        locate_torch(tmp_path)
    assert f"has a torch for Python 3.99, this is Python {sys.version_info[0]}.{sys.version_info[1]}" in str(
        error.value
    )


def test_a_source_tree_that_is_not_built_is_refused_with_the_build_command(tmp_path):
    write_torch(tmp_path, "")
    (tmp_path / "CMakeLists.txt").touch()
    with pytest.raises(PacelineError) as error:
        locate_torch(tmp_path)
    assert error.value.fix == f"paceline torch recipe --script build.sh && SOURCE={tmp_path} bash build.sh"
    (tmp_path / "torch/_C.cpython-311-x86_64-linux-gnu.so").touch()
    assert locate_torch(tmp_path) == tmp_path


def test_a_build_for_cards_is_shown_with_its_parts():
    torch = {
        "version": "2.11.0+cu128", "build": "wheel", "path": "/p/torch", "cuda": "12.8", "cudnn": "9.17.1", "nccl": "2.28.9",
        "archs": ["sm_90", "sm_120"], "libuv": True, "libuv_library": "1.41.0", "libuv_header": "1.48.0", "gloo": True,
        "nccl_backend": False,
        "libraries": [{"path": "/p/torch/lib/libc10.so", "expected": True}, {"path": "/old/libnccl.so.2", "expected": False}],
    }  # fmt: skip
    stop = Finding("torch-no-kernels", "stop", "what", "why", "fix")
    check = TorchCheck({"torch": torch}, (stop,), (Proof("import", True, 1.5, "2.11.0+cu128"),))
    assert format_check(check).splitlines() == [
        "torch   2.11.0+cu128, wheel, /p/torch",
        "built   CUDA 12.8, cuDNN 9.17.1, NCCL 2.28.9, sm_90 sm_120, libuv 1.41.0, gloo, without nccl",
        "loaded  1 library from /p/torch/lib",
        "loaded  1 library from /old",
        "loaded  /old/libnccl.so.2 is not torch's own",
        "libuv   header 1.48.0, library 1.41.0",
        "",
        "right   import    1.50 s  2.11.0+cu128",
        "",
        "stop  torch-no-kernels  what",
        "  why                   why",
        "  fix                   fix",
        "",
        "this torch is not right: torch-no-kernels",
    ]


def test_cards_that_the_driver_does_not_report_are_not_taken_for_none():
    gpus = [{"capability": [8, 6], "visible": True}, {"capability": [12, 0], "visible": False}]
    assert capabilities_of({"gpus": gpus, "nvidia_cards": 2, "nvml_error": None}) == ((8, 6),)
    assert capabilities_of({"gpus": [], "nvidia_cards": 0, "nvml_error": None}) == ()
    with pytest.raises(PacelineError) as error:
        capabilities_of({"gpus": None, "nvidia_cards": 2, "nvml_error": "Driver/library version mismatch"})
    assert error.value.message == (
        "2 NVIDIA cards are in this host, and the driver does not report which: Driver/library version mismatch"
    )


def test_a_recipe_for_cards_of_another_host(monkeypatch):
    here = ask_probes([probe for probe in PROBES if probe.name in ("gpu", "host", "tools")], {})
    monkeypatch.setattr("paceline.check.torch_check.ask_probes", lambda *_: here)
    assert recipe_here(arch="12.0", driver="570.133").command.endswith("/cu128")
    assert recipe_here(arch="9.0a 8.9+PTX", driver="580.1", build=True).command.endswith("--arch '9.0a;8.9+PTX'")
    with pytest.raises(PacelineError) as error:
        recipe_here(arch="All")
    assert error.value.message == "--arch All names no card"
    with pytest.raises(PacelineError) as error:
        recipe_here(driver="new")
    assert error.value.message == "--driver new: not a driver version"


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


def test_a_venv_is_changed_by_its_own_python(tmp_path):
    packages = write_venv(tmp_path / "other env")
    python = f"'{tmp_path}/other env/bin/python3'"
    assert fix_at(WHEEL, packages) == f"{python} -m pip install --force-reinstall torch -i {INDEX}"
    assert fix_at("pip install nvidia-nccl-cu12==2.27.3", packages) == (
        f"{python} -m pip install nvidia-nccl-cu12==2.27.3"
    )
    assert fix_at("paceline torch recipe", packages) == (
        f"paceline torch recipe, with {python} -m pip install for its pip install"
    )


def test_a_venv_without_pip_is_changed_by_another_pip(tmp_path):
    packages = write_venv(tmp_path, pip=False)
    assert fix_at(NEWER, packages) == f"pip --python {tmp_path}/bin/python3 install --upgrade 'torch>=2.11'"


def test_a_prefix_without_a_python_is_installed_to_and_the_own_torch_stays(tmp_path):
    packages = write_site(tmp_path / "lib/python3.12/site-packages")
    assert fix_at(WHEEL, packages) == (
        f"python3.12 -m pip install --prefix {tmp_path} --ignore-installed torch -i {INDEX}"
    )


def test_a_target_folder_is_installed_to_by_the_python_that_it_was_compiled_for(tmp_path):
    packages = write_site(tmp_path / "libs", compiled_for="39")
    assert fix_at(NEWER, packages) == f"python3.9 -m pip install --upgrade --target {packages} 'torch>=2.11'"


def test_the_users_own_packages_are_installed_for_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "getuserbase", lambda: str(tmp_path))
    packages = write_site(tmp_path / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages")
    assert fix_at(WHEEL, packages) == f"{OURS} -m pip install --user --force-reinstall torch -i {INDEX}"


def test_for_a_folder_that_no_pip_wrote_a_venv_is_proposed(tmp_path):
    folder = write_site(tmp_path / "libs", record=False, compiled_for="39")
    assert fix_at(WHEEL, folder) == (
        f"no pip installed it into {folder}; instead: python3.9 -m venv {folder}-venv &&"
        f" {folder}-venv/bin/python -m pip install torch -i {INDEX}"
    )


def test_a_source_tree_is_rebuilt_into_another_folder(tmp_path):
    (tmp_path / "CMakeLists.txt").touch()
    build = f"paceline torch recipe --script build.sh && SOURCE={tmp_path} PREFIX={tmp_path}-installed bash build.sh"
    assert fix_at(WHEEL, tmp_path) == build
    assert fix_at(NEWER, tmp_path) == f"git -C {tmp_path} pull --recurse-submodules && {build}"


@pytest.mark.parametrize("fix", ["unset LD_LIBRARY_PATH LD_PRELOAD", "nvidia-smi", "mv /a /a.old", "--nproc 1"])
def test_a_fix_that_installs_nothing_stays_as_it_is(tmp_path, fix):
    assert fix_at(fix, tmp_path) == fix


def test_a_slow_import_is_timed_in_that_folder(tmp_path):
    assert fix_at("time python -c 'import torch'", tmp_path) == (
        f"time env PYTHONPATH={tmp_path} {OURS} -c 'import torch'"
    )
