"""`paceline torch build`, for real, on a stand-in for PyTorch (torch_stand_in/): its option names, three small files to compile."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.check.torch_build import check_torch, format_check
from paceline.check.torch_ninja import StepInterrupted, run_step
from paceline.check.torch_source import archs_asked, build_torch, switches_taken
from paceline.errors import PacelineError, UsageError

STAND_IN = Path(__file__).parent / "torch_stand_in"
NOT_OURS = ("USE_", "BUILD_", "CMAKE_", "TORCH_CUDA", "MAX_JOBS", "CPATH", "CFLAGS", "CXXFLAGS", "CPPFLAGS")
SLOW_FILES, SLOW_S = 6, 0.5

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("cmake", "ninja", "g++"))), reason="needs cmake, ninja and g++"
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith(NOT_OURS)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def source(tmp_path):
    return Path(shutil.copytree(STAND_IN, tmp_path / "pytorch"))


def build(source, told=None, **settings):
    lines = [] if told is None else told
    check = build_torch(source, prefix=source.parent / "prefix", jobs=1, tell=lines.append, **settings)
    assert check is not None
    return check


def failure(source, **settings):
    with pytest.raises(PacelineError) as error:
        build(source, **settings)
    return error.value


def slow_down(source):
    """Files that each take a while to make."""
    with (source / "CMakeLists.txt").open("a") as cmake:
        for i in range(SLOW_FILES):
            cmake.write(
                f"add_custom_command(OUTPUT slow{i}.txt COMMAND sleep {SLOW_S}"
                f" COMMAND cmake -E touch slow{i}.txt)\nlist(APPEND SLOW slow{i}.txt)\n"
            )
        cmake.write("add_custom_target(slow ALL DEPENDS ${SLOW})\n")


@pytest.mark.dist
def test_what_is_built_is_installed_and_tried(source):
    told = []
    check = build(source, told)
    assert check.is_right, format_check(check)
    torch = check.facts["torch"]
    assert (torch["version"], torch["build"]) == ("2.99.0+git0123456", "source")
    assert Path(torch["path"]).is_relative_to(source.parent / "prefix")
    assert [line.split()[0] for line in told] == [
        "configuring",
        "compiling,",
        *["compiled"] * 4,
        "installing",
        "installed",
    ]
    assert "TORCH_USE_LIBUV" in (source / "build/build.ninja").read_text()


@pytest.mark.dist
@pytest.mark.soak
def test_a_second_build_goes_on_and_a_changed_option_is_said(source, monkeypatch):
    build(source)
    told = []
    build(source, told)
    assert told[0] == "configured before with the same options: goes on"
    assert not [line for line in told if line.startswith("compiled")]
    monkeypatch.setenv("USE_TENSORPIPE", "0")
    told = []
    check = build(source, told)
    assert told[0] == "configuring again: USE_TENSORPIPE ON -> OFF"
    assert [proof.name for proof in check.proofs if not proof.ok] == ["store with libuv"]


@pytest.mark.dist
def test_an_option_that_cmake_switches_off_silently_stops_the_build(source, monkeypatch):
    monkeypatch.setenv("USE_DISTRIBUTED", "0")
    error = failure(source)
    assert (
        error.message.splitlines()[0] == "USE_TENSORPIPE=ON did not take: it depends on USE_DISTRIBUTED, which is OFF"
    )
    assert "unset USE_DISTRIBUTED (set in your environment)" in error.fix
    assert not (source / "build/libstand_in.so").exists()
    monkeypatch.delenv("USE_DISTRIBUTED")  # the printed fix
    assert build(source).is_right


@pytest.mark.dist
def test_a_switch_that_cmake_turns_off_with_a_warning_quotes_it(source, monkeypatch):
    cmake = (source / "CMakeLists.txt").read_text().replace("find_program(NVCC nvcc NO_CACHE)", "")
    (source / "CMakeLists.txt").write_text(cmake)
    nvcc = source.parent / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{nvcc.parent}:{os.environ['PATH']}")
    error = failure(source, arch="12.0")
    lines = [line.strip() for line in error.message.splitlines()]
    assert (lines[0], lines[2:]) == ("USE_CUDA=ON did not take", ["PyTorch: CUDA cannot be found."])
    assert error.fix.startswith("mend what CMake says, or USE_CUDA=0 before the command")


def test_a_source_that_lost_its_macro_is_found_before_the_build(source):
    cmake = (source / "CMakeLists.txt").read_text().replace("add_compile_options(-DTORCH_USE_LIBUV)", "")
    (source / "CMakeLists.txt").write_text(cmake)
    assert failure(source).message == (
        "USE_TENSORPIPE is on, and no file is compiled with TORCH_USE_LIBUV: this torch would have no libuv"
    )


def test_a_missing_libuv_quotes_cmake_and_says_how_to_get_it(source):
    (source / "third_party/tensorpipe/third_party/libuv/include/uv.h").unlink()
    error = failure(source)
    assert "Could not find UV using the following names: uv" in error.message
    assert error.fix == f"git -C {source} submodule update --init --recursive"


def test_a_file_that_does_not_compile_is_named_and_mended_it_goes_on(source):
    (source / "csrc/two.cpp").write_text("int two() { return missing; }\n")
    told = []
    error = failure(source, told=told)
    assert error.message.startswith(f"{source}/csrc/two.cpp does not compile: {source}/csrc/two.cpp:1:20: error:")
    assert str(source / "build/paceline-build.log") in error.fix
    assert "missing" in (source / "build/paceline-build.log").read_text()


def test_a_compiler_that_is_killed_asks_for_fewer_jobs(source):
    with (source / "CMakeLists.txt").open("a") as cmake:
        cmake.write(
            "set_source_files_properties(csrc/one.cpp PROPERTIES COMPILE_FLAGS \"-wrapper sh,-c,'kill -9 $$$$'\")\n"
        )
    with pytest.raises(PacelineError) as error:
        build_torch(source, prefix=source.parent / "prefix", jobs=4, tell=lambda line: None)
    assert error.value.message == (
        f"killed while it compiled {source}/csrc/one.cpp: memory for 4 compilers at once was not there"
    )
    assert error.value.fix == "the same command with --jobs 2 goes on where it stopped"


@pytest.mark.dist
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(each, marks=pytest.mark.soak) for each in (signal.SIGTERM, signal.SIGKILL))],
)
def test_an_interrupted_build_leaves_no_process_and_goes_on(source, number):
    slow_down(source)
    code = (
        "import sys; from pathlib import Path\n"
        "from paceline.check.torch_source import PacelineError, build_torch\n"
        "try: build_torch(Path(sys.argv[1]), prefix=Path(sys.argv[2]), jobs=1)\n"
        "except PacelineError as error: print(error, file=sys.stderr); sys.exit(error.exit_code)"
    )
    words = [sys.executable, "-c", code, str(source), str(source.parent / "prefix")]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("compiled 2/"):
            break
    process.send_signal(number)
    assert process.wait(10) == (130 if number != signal.SIGKILL else -signal.SIGKILL)
    process.stderr.close()
    assert left_in(source / "build") == []
    told = []
    assert build(source, told).is_right
    assert told[0] == "configured before with the same options: goes on"
    total = int(next(line for line in told if line.startswith("compiled")).split()[1].split("/")[1])
    assert 1 <= total < SLOW_FILES + 4


@pytest.mark.dist
@pytest.mark.parametrize(
    ("after", "said"),
    [
        ("configuring", "interrupted while configuring: all that was compiled is kept in {build}"),
        ("compiled 2/", "interrupted while compiling, 2 of 10 steps done: all that was compiled is kept in {build}"),
        (
            "installing",
            "interrupted while installing: all that was compiled is kept in {build}; the torch in {prefix} may be half there",
        ),
    ],
)
def test_ctrl_c_in_the_command_says_what_is_kept_and_how_to_go_on(source, after, said):
    slow_down(source)
    prefix = source.parent / "prefix"
    process = start_command(source, prefix)
    for line in process.stderr:
        if line.startswith(after):
            break
    ended, lines = press_ctrl_c(process)
    assert (process.returncode, ended < 2) == (130, True)
    assert lines[-2:] == [
        "error: " + said.format(build=source / "build", prefix=prefix),
        "  fix: the same command goes on from there",
    ]
    assert all(line.startswith("compiled") for line in lines[:-2])
    assert left_in(source / "build") + left_in(source) == []


@pytest.mark.dist
def test_ctrl_c_once_it_is_installed_says_how_to_try_it(source):
    prefix = source.parent / "prefix"
    process = start_command(source, prefix)
    for line in process.stderr:
        if line.startswith("installed"):
            break
    ended, lines = press_ctrl_c(process)
    assert (process.returncode, ended < 2) == (130, True)
    assert lines == [
        "error: interrupted while it was tried; it is installed",
        f"  fix: paceline torch check --path {prefix}",
    ]
    assert check_torch(prefix).is_right


def start_command(source, prefix):
    words = ["-m", "paceline.cli", "torch", "build", "--source", str(source), "--prefix", str(prefix), "--jobs", "1"]
    return subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True, start_new_session=True)


def press_ctrl_c(process):
    """To the whole foreground group, as a terminal does. Seconds to the end, and what was said."""
    started = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    lines = process.stderr.read().splitlines()
    process.wait(10)
    process.stderr.close()
    return time.monotonic() - started, lines


def left_in(folder):
    """Processes that work in it, after those that are dying had time to."""
    deadline = time.monotonic() + 5
    while True:
        found = [path.parent.name for path in Path("/proc").glob("[0-9]*/cwd") if works_in(path, folder)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def works_in(path, folder):
    try:
        return path.readlink() == folder
    except OSError:
        return False  # it is gone


@pytest.mark.dist
def test_a_build_folder_elsewhere_takes_the_place_of_the_usual_one(source):
    other = source.parent / "fast disk" / "build"
    assert build(source, build_dir=other).is_right
    assert (source / "build").resolve() == other
    error = failure(source, build_dir=source.parent / "third")
    assert error.message.startswith(f"{source}/build is there")


def test_two_builds_in_one_folder_are_refused(source):
    slow_down(source)
    code = (
        "import sys; from pathlib import Path; from paceline.check.torch_source import build_torch\n"
        "build_torch(Path(sys.argv[1]), prefix=Path(sys.argv[2]), jobs=1)"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(source), str(source.parent / "p")], stderr=subprocess.PIPE, text=True
    )
    try:
        for line in first.stderr:
            if line.startswith("compiling"):
                break
        assert failure(source).message == f"another build runs in {source}/build (pid {first.pid})"
    finally:
        first.terminate()
        first.wait()
        first.stderr.close()


def test_a_build_folder_of_another_source_is_refused(source):
    (source / "build").mkdir()
    (source / "build/CMakeCache.txt").write_text("CMAKE_HOME_DIRECTORY:INTERNAL=/elsewhere\n")
    assert failure(source).message == f"{source}/build belongs to the source /elsewhere"


def test_a_dry_run_prints_the_commands_and_touches_nothing(source, capsys):
    assert build_torch(source, prefix=source.parent / "p", jobs=3, dry_run=True) is None
    printed = capsys.readouterr().out
    assert f"$ cmake -S {source} -B {source}/build -G Ninja -DCMAKE_BUILD_TYPE=Release" in printed
    assert f"$ ninja -C {source}/build -j 3" in printed
    assert "-DUSE_TENSORPIPE=ON" in printed
    assert not (source / "build").exists()


def test_cuda_without_a_known_card_asks_for_the_architecture(source, monkeypatch):
    monkeypatch.setenv("USE_CUDA", "1")
    with pytest.raises(UsageError) as error:
        build(source)
    assert error.value.fix == "--arch 12.0"


@pytest.mark.parametrize(
    ("arch", "listed", "archs"),
    [
        (None, "9.0a, 10.0f 8.9+PTX", ["9.0a", "10.0f", "8.9+PTX"]),
        (None, "Ampere Hopper", ["Ampere", "Hopper"]),
        ("12.0a", "9.0", ["12.0a"]),
        (None, "All", ["All"]),
        (None, "Auto", ["8.6", "12.0"]),
        ("Auto", "9.0", ["8.6", "12.0"]),
        (None, None, ["8.6", "12.0"]),
    ],
)
def test_the_flag_wins_over_the_variable_and_that_over_the_cards_here(arch, listed, archs):
    cards = [{"capability": capability, "visible": True} for capability in ([12, 0], [8, 6], [12, 0])]
    here = {"gpus": cards, "nvidia_cards": 3, "nvml_error": None}
    assert archs_asked(arch, here, {"TORCH_CUDA_ARCH_LIST": listed} if listed else {}) == archs


def test_an_architecture_from_the_environment_is_not_blamed_on_a_flag(source, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "sm_90")
    error = failure(source)
    assert error.message == "TORCH_CUDA_ARCH_LIST=sm_90, set in your environment: sm_90 is no architecture"
    assert error.fix.startswith("export TORCH_CUDA_ARCH_LIST=9.0, or unset it")


def test_auto_without_a_card_is_no_build_for_the_cpu(source):
    assert failure(source, arch="Auto").message == (
        "--arch is Auto, and there is no GPU here to know the architecture of"
    )


def test_no_compiler_at_all_is_refused(source):
    with pytest.raises(UsageError):
        build_torch(source, jobs=0)


def test_a_dependent_option_that_the_cache_still_shows_on_is_off():
    cache = {"USE_TENSORPIPE": ("INTERNAL", "ON"), "USE_GLOO": ("BOOL", "ON"), "USE_MPI": ("BOOL", "OFF")}
    assert switches_taken(cache, ["--   USE_GLOO              : OFF"]) == {
        "USE_TENSORPIPE": "OFF",
        "USE_GLOO": "OFF",
        "USE_MPI": "OFF",
    }


def test_a_failed_install_quotes_pip(source):
    (source / "setup.py").write_text("raise SystemExit('error: no such thing')\n")
    error = failure(source)
    assert error.message.startswith("the install step failed: ")
    assert "no such thing" in error.message


def test_an_interrupt_while_a_step_starts_waits_until_it_can_be_ended(tmp_path, monkeypatch):
    start = subprocess.Popen

    def start_interrupted(*words, **settings):
        before_exec = settings.pop("preexec_fn")

        def interrupted_before_exec():
            os.kill(os.getpid(), signal.SIGINT)
            before_exec()

        process = start(*words, preexec_fn=interrupted_before_exec, **settings)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", start_interrupted)
    with pytest.raises(StepInterrupted):
        run_step(["sleep", "600"], env=dict(os.environ), log=tmp_path / "log", cwd=tmp_path)
    assert left_in(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_under_nohup_outlives_the_terminal(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ended = run_step(
            ["sh", "-c", "echo '[1/1] x'"],
            env=dict(os.environ),
            log=tmp_path / "log",
            on_progress=lambda done, total: os.kill(os.getpid(), signal.SIGHUP),
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended.exit_code == 0


def test_a_second_ctrl_c_does_not_wait_for_a_step_that_ignores_the_first(tmp_path):
    def press_twice(done, total):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        raise KeyboardInterrupt

    words = ["sh", "-c", "trap '' INT; echo '[1/2] x'; sleep 600"]
    started = time.monotonic()
    with pytest.raises(StepInterrupted) as stop:
        run_step(words, env=dict(os.environ), log=tmp_path / "log", cwd=tmp_path, on_progress=press_twice)
    assert (stop.value.done, stop.value.total, time.monotonic() - started < 3) == (1, 2, True)
    assert left_in(tmp_path) == []


def test_a_step_that_ignores_the_interrupt_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.check.torch_ninja.ENDING_S", 0.3)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_step(
            ["sh", "-c", "trap '' INT; echo '[1/2] x'; sleep 600"],
            env=dict(os.environ),
            log=tmp_path / "log",
            cwd=tmp_path,
            on_progress=interrupt,
        )
    assert left_in(tmp_path) == []
