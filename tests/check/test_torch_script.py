"""The script of `paceline torch recipe --script`: its text, and really run on a stand-in for PyTorch (torch_stand_in/)."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from paceline.check import torch_recipe
from paceline.check.torch_check import recipe_here
from paceline.check.torch_recipe import Tools, install_command, make_recipe, make_script, write_script
from paceline.errors import PacelineError

STAND_IN = Path(__file__).parent / "torch_stand_in"
STAGES = ["get_sources", "get_dependencies", "configure", "compile", "install_torch"]
SKIPPED = ": skipped, it was completed before"
PLAIN = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PIP_CONFIG_FILE": "/dev/null"}
SLOW_FILES, SLOW_S = 8, 0.5
needs_tools = pytest.mark.skipif(
    not all(map(shutil.which, ("cmake", "ninja", "g++", "git"))), reason="needs cmake, ninja, g++ and git"
)
needs_shellcheck = pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")


def recipe(*capabilities, driver=None, archs=(), machine="x86_64", tools=Tools()):  # noqa: B008
    return make_recipe(capabilities, driver=driver, machine=machine, tools=tools, build=True, archs=archs)


RECIPES = {
    "cpu": recipe(),
    "one card": recipe((12, 0), driver="570.133"),
    "two cards and tools": recipe((7, 0), (12, 0), driver="580.1", tools=Tools("12.9", cudnn=True, ccache=True)),
    "special architectures": recipe((9, 0), (8, 9), archs=["9.0a", "8.9+PTX"]),
}


@needs_shellcheck
def test_the_script_without_its_settings_is_clean_for_shellcheck():
    script = Path(torch_recipe.__file__).with_name("torch_build.sh")
    result = subprocess.run(["shellcheck", script], text=True, capture_output=True)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


@needs_shellcheck
@pytest.mark.parametrize("name", RECIPES)
def test_every_script_is_valid_and_clean_for_shellcheck(name):
    script = make_script(RECIPES[name], system="Ubuntu 22.04")
    for command in (["bash", "-n"], ["shellcheck", "-"]):
        result = subprocess.run(command, input=script, text=True, capture_output=True)
        assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_the_script_is_for_these_cards_this_driver_and_this_system():
    script = make_script(RECIPES["two cards and tools"], system="Ubuntu 22.04")
    assert "for GPUs of capability 7.0, 12.0 (driver 580.1), on Ubuntu 22.04 x86_64" in script
    assert "'TORCH_CUDA_ARCH_LIST=7.0;12.0'" in script
    assert "ARCHS='70 120'" in script and "TOOLKIT='CUDA 12.9: https://" in script
    assert "CMAKE_CUDA_COMPILER_LAUNCHER=ccache" in script


def test_a_script_for_the_cpu_needs_nothing_of_cuda():
    script = make_script(RECIPES["cpu"], system="Debian 12")
    assert "for the CPU alone" in script and "USE_CUDA=OFF" in script
    assert "ARCHS='' " in script and "TORCH_CUDA_ARCH_LIST" not in script  # nvcc and NCCL are for each of ARCHS
    assert "JOB_GIB=2 " in script and "DISK_GIB=15 " in script


@pytest.mark.parametrize(
    ("system", "command"),
    [
        ("Ubuntu 22.04", "apt-get install -y git g++ python3.11-dev"),
        ("Linux Mint 22", "apt-get install -y git g++ python3.11-dev"),
        ("Fedora Linux 41", "dnf install -y git gcc-c++ python3-devel"),
        ("Arch Linux", "pacman -S --needed git gcc python"),
        ("Linux", "install g++ and the headers of Python 3.11"),
    ],
)
def test_missing_packages_are_named_with_the_installer_of_the_system(system, command):
    assert install_command(system, "3.11").removeprefix("sudo ") == command


def test_a_driver_too_old_for_the_build_is_refused(tmp_path):
    with pytest.raises(PacelineError) as error:
        write_script(tmp_path / "build.sh", recipe((12, 0), driver="470.82"), system="Debian 12")
    assert error.value.message.startswith("the build needs a driver 570 or later")
    assert not (tmp_path / "build.sh").exists()


def test_a_script_of_paceline_is_replaced_and_a_file_of_the_user_is_not(tmp_path):
    path = tmp_path / "build.sh"
    for _ in range(2):
        write_script(path, RECIPES["cpu"], system="Debian 12")
    assert os.access(path, os.X_OK)
    path.write_text("echo mine\n")
    with pytest.raises(PacelineError) as error:
        write_script(path, RECIPES["cpu"], system="Debian 12")
    assert error.value.message == f"{path} exists, and paceline did not write it"
    assert path.read_text() == "echo mine\n"


class Build:
    """A script for the CPU, a copy of the stand-in and a folder to install to."""

    def __init__(self, folder):
        self.folder, self.source = folder, folder / "pytorch"
        shutil.copytree(STAND_IN, self.source)
        (self.source / "build").mkdir()  # a build that has begun needs no free disk
        self.script = folder / "build.sh"
        write_script(self.script, RECIPES["cpu"], system="Debian 12")
        self.env = {"SOURCE": str(self.source), "PREFIX": str(folder / "prefix"), "JOBS": "1"}

    def start(self, **env):
        return subprocess.Popen(
            ["bash", str(self.script)],
            env={**os.environ, **PLAIN, **self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, **env):
        """Returns the exit code and the output."""
        process = self.start(**env)
        output, _ = process.communicate(timeout=250)
        return process.returncode, output

    def log(self, stage):
        return self.folder / f"pytorch-stages/{stage}.log"


@pytest.fixture
def build(tmp_path):
    return Build(tmp_path)


def stages_in(output):
    return [line.removeprefix("== ") for line in output.splitlines() if line.startswith("== ")]


@pytest.mark.soak
@needs_tools
@pytest.mark.dist
def test_the_script_builds_installs_and_checks_and_a_second_start_skips_what_is_done(build):
    exit_code, output = build.run()
    assert exit_code == 0, output
    assert stages_in(output) == [f"{stage}: log {build.log(stage)}" for stage in STAGES]
    assert output.splitlines()[-1] == "this torch is right"
    assert f"torch   2.99.0+git0123456, source, {build.folder}/prefix/" in output
    assert "TORCH_USE_LIBUV" in (build.source / "build/build.ninja").read_text()
    exit_code, output = build.run()
    assert (exit_code, stages_in(output)) == (0, [stage + SKIPPED for stage in STAGES])
    assert output.splitlines()[-1] == "this torch is right"


@needs_tools
@pytest.mark.dist
def test_the_sources_are_cloned_where_there_are_none(build):
    git = ["git", "-C", str(build.source), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "sources"], ["tag", "v1"]):
        subprocess.run([*git, *command], check=True)
    source = build.folder / "clone"
    (build.source / "CMakeLists.txt").rename(build.source / "gone")  # configure fails in the copy: it is not used
    build.env["SOURCE"] = str(source)
    process = build.start(REPOSITORY=f"file://{build.source}", VERSION="v1")
    while (line := process.stdout.readline()) and "get_dependencies" not in line:
        pass
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert (source / "CMakeLists.txt").is_file()
    assert (build.folder / "clone-stages/get_sources.done").read_text() == "v1"


@needs_tools
@pytest.mark.dist
@pytest.mark.soak
def test_a_failing_stage_names_its_log_and_the_next_start_continues_with_it(build):
    two = build.source / "csrc/two.cpp"
    code = two.read_text()
    two.write_text("int two() { return missing; }\n")
    exit_code, output = build.run()
    assert exit_code != 0
    assert output.splitlines()[-2:] == [
        f"== compile failed with exit code 1; its log: {build.log('compile')}",
        "   start this script again to continue with this stage",
    ]
    assert "csrc/two.cpp:1:20: error:" in build.log("compile").read_text()
    two.write_text(code)
    process = build.start()
    while (line := process.stdout.readline()) and "install_torch" not in line:
        output += line
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert stages_in(output)[-4:] == [
        *(stage + SKIPPED for stage in STAGES[:3]),
        f"compile: log {build.log('compile')}",
    ]


@needs_tools
@pytest.mark.dist
def test_an_interrupted_build_ends_its_processes_and_continues_where_it_stopped(build):
    slow_down(build.source)
    process = build.start()
    wait_for_slow_files(build.source, 1)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert f"its log: {build.log('compile')}" in output
    made = {path: path.stat().st_mtime_ns for path in slow_files(build.source)}
    assert 0 < len(made) < SLOW_FILES
    process = build.start()
    while (line := process.stdout.readline()) and "install_torch" not in line:
        pass
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert len(slow_files(build.source)) == SLOW_FILES
    assert {path: path.stat().st_mtime_ns for path in made} == made


def slow_down(source):
    """Adds files that take a while to make."""
    with (source / "CMakeLists.txt").open("a") as cmake:
        for i in range(SLOW_FILES):
            cmake.write(
                f"add_custom_command(OUTPUT slow{i}.txt COMMAND sleep {SLOW_S}"
                f" COMMAND cmake -E touch slow{i}.txt)\nlist(APPEND SLOW slow{i}.txt)\n"
            )
        cmake.write("add_custom_target(slow ALL DEPENDS ${SLOW})\n")


def slow_files(source):
    """Those whose rule has ended: ninja makes again a file that is there but not yet in its log."""
    log = source / "build/.ninja_log"
    names = {line.split("\t")[3] for line in log.read_text().splitlines()[1:]} if log.exists() else set()
    return [source / "build" / name for name in names if name.startswith("slow")]


def wait_for_slow_files(source, number):
    deadline = time.monotonic() + 240
    while len(slow_files(source)) < number:
        assert time.monotonic() < deadline, "the build did not get so far"
        time.sleep(0.05)


@needs_tools
@pytest.mark.dist
@pytest.mark.soak
def test_two_builds_of_one_source_exclude_each_other(build):
    slow_down(build.source)
    process = build.start()
    wait_for_slow_files(build.source, 1)
    exit_code, output = build.run()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert exit_code == 1
    assert f"error: another build runs in {build.source}" in output


@pytest.mark.soak
@needs_tools
@pytest.mark.dist
def test_an_option_that_cmake_switches_off_silently_stops_the_build(build):
    cmake = build.source / "CMakeLists.txt"
    text = 'option(USE_DISTRIBUTED "Use distributed" ON)'
    cmake.write_text(cmake.read_text().replace(text, "set(USE_DISTRIBUTED OFF CACHE BOOL distributed FORCE)"))
    exit_code, output = build.run()
    assert exit_code != 0
    assert "error: CMake did not accept USE_DISTRIBUTED=ON" in output


@needs_tools
@pytest.mark.dist
@pytest.mark.soak
def test_a_source_without_the_libuv_macro_stops_the_build(build):
    cmake = build.source / "CMakeLists.txt"
    cmake.write_text(cmake.read_text().replace("add_compile_options(-DTORCH_USE_LIBUV)", ""))
    assert "no file is compiled with TORCH_USE_LIBUV: this torch would have no libuv" in build.run()[1]


@pytest.mark.soak
@needs_tools
@pytest.mark.dist
def test_a_compiler_that_is_killed_asks_for_fewer_jobs(build):
    compiler = build.folder / "bin/c++"
    compiler.parent.mkdir()
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *csrc/one.cpp*) echo "c++: fatal error: Killed signal terminated program cc1plus" >&2; exit 1;;'
        f'esac\nexec {shutil.which("c++")} "$@"\n'
    )
    compiler.chmod(0o755)
    _, output = build.run(JOBS="8", CXX=str(compiler))
    assert "the memory for 8 compilers at once was missing: start again with JOBS=4" in output


def test_a_folder_that_is_not_a_source_tree_is_refused(build):
    (build.source / "CMakeLists.txt").unlink()
    exit_code, output = build.run()
    assert exit_code != 0
    assert f"error: {build.source} is not a PyTorch source tree" in output


def test_the_script_for_other_cards_than_those_here(tmp_path):
    made = recipe_here(script=tmp_path / "build.sh", arch="9.0a 8.9+PTX", driver="580.1")
    assert made.command == "paceline torch recipe --script build.sh --arch '9.0a;8.9+PTX'"
    assert "'TORCH_CUDA_ARCH_LIST=9.0a;8.9+PTX'" in (tmp_path / "build.sh").read_text()
