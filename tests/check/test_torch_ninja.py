"""What is said of a failed build, from what cmake, ninja and compilers really print."""

from pathlib import Path

from paceline.check.torch_ninja import (
    Ended,
    PlainProgress,
    cmake_error,
    compile_failed,
    configure_failed,
    find_failures,
    run_step,
)

LOG = Path("/b/paceline-build.log")
NVCC_KILLED = """\
[314/423] Building CUDA object caffe2/CMakeFiles/torch_cuda.dir/__/aten/src/ATen/native/cuda/TensorModeKernel.cu.o
FAILED: caffe2/CMakeFiles/torch_cuda.dir/__/aten/src/ATen/native/cuda/TensorModeKernel.cu.o
/usr/local/cuda/bin/nvcc -DUSE_CUDA -c /src/pytorch/aten/src/ATen/native/cuda/TensorModeKernel.cu -o TensorModeKernel.cu.o
nvcc error   : 'cicc' died due to signal 9 (Kill signal)
[315/423] Building CXX object x.o
ninja: build stopped: subcommand failed.
"""
TWO_ERRORS = """\
[3/9] Building CXX object a.o
FAILED: a.o
/usr/bin/c++ -O2 -o a.o -c /src/a.cpp
/src/a.cpp: In function 'int a()':
/src/a.cpp:3:10: error: 'uv_tcp_t' was not declared in this scope
[4/9] Building CXX object b.o
FAILED: [code=1] b.o
/usr/bin/c++ -o b.o -c /src/b.cpp
/src/b.cpp:1:10: fatal error: uv.h: No such file or directory
ninja: build stopped: subcommand failed.
"""
CMAKE_OUTPUT = """\
-- Found Python
CMake Warning at CMakeLists.txt:3 (message):
  PyTorch: CUDA cannot be found.

CMake Error at third_party/tensorpipe/cmake/Finduv.cmake:30 (find_library):
  Could not find UV using the following names: uv
Call Stack (most recent call first):
  CMakeLists.txt:12 (find_package)

-- Configuring incomplete, errors occurred!
"""


def ended(text, exit_code=1):
    return Ended(exit_code, tuple(text.splitlines()))


def test_a_compiler_that_was_killed_asks_for_fewer_jobs():
    error = compile_failed(ended(NVCC_KILLED), jobs=16, log=LOG)
    assert error.message == (
        "killed while it compiled /src/pytorch/aten/src/ATen/native/cuda/TensorModeKernel.cu:"
        " memory for 16 compilers at once was not there"
    )
    assert error.fix == "the same command with --jobs 8 goes on where it stopped"


def test_ninja_itself_killed_with_one_job_asks_for_memory():
    assert compile_failed(ended("", -9), jobs=1, log=LOG).fix == "more memory or swap, then the same command goes on"


def test_the_first_file_that_does_not_compile_is_named_with_the_compilers_words():
    error = compile_failed(ended(TWO_ERRORS), jobs=2, log=LOG)
    assert error.message == (
        "/src/a.cpp (and 1 more) does not compile: /src/a.cpp:3:10: error: 'uv_tcp_t' was not declared in this scope"
    )
    assert error.fix == f"the log has all of it: {LOG}; then the same command goes on"


def test_each_failed_step_has_its_own_lines():
    assert list(find_failures(TWO_ERRORS.splitlines())) == [
        ("/src/a.cpp", ["/src/a.cpp: In function 'int a()':",
                        "/src/a.cpp:3:10: error: 'uv_tcp_t' was not declared in this scope"]),
        ("/src/b.cpp", ["/src/b.cpp:1:10: fatal error: uv.h: No such file or directory"]),
    ]  # fmt: skip


def test_a_full_disk_is_named():
    text = "FAILED: a.o\nc++ -c /a.cpp\n/a.cpp: fatal error: error writing to a.o: No space left on device\n"
    assert compile_failed(ended(text), jobs=2, log=LOG).message == "the disk is full"


def test_cmakes_error_is_quoted_without_its_stack_and_has_a_fix():
    assert cmake_error(CMAKE_OUTPUT.splitlines()) == [
        "CMake Error at third_party/tensorpipe/cmake/Finduv.cmake:30 (find_library):",
        "Could not find UV using the following names: uv",
    ]
    error = configure_failed(ended(CMAKE_OUTPUT), source=Path("/src"), log=LOG)
    assert error.fix == "git -C /src submodule update --init --recursive"


def test_a_cmake_that_says_nothing_known_points_to_the_log():
    assert configure_failed(ended("killed"), source=Path("/src"), log=LOG).fix == f"the log tells more: {LOG}"


def test_plain_progress_is_a_line_each_tenth():
    lines = []
    progress = PlainProgress(lines.append, "compiled")
    for done in range(1, 1001):
        progress(done, 1000)
    assert [line.split(" | ")[0] for line in lines] == [f"compiled {100 * i:,}/1,000" for i in range(1, 11)]
    assert lines[-1].endswith("eta 0s")


def test_a_step_keeps_its_whole_output_in_the_log(tmp_path):
    log = tmp_path / "log"
    seen = []
    script = 'echo "[1/2] one"; echo more; echo "[2/2] two" >&2; exit 3'
    step = run_step(["sh", "-c", script], env={}, log=log, on_progress=lambda *numbers: seen.append(numbers))
    assert step == Ended(3, ("[1/2] one", "more", "[2/2] two"))
    assert seen == [(1, 2), (2, 2)]
    assert log.read_text().endswith("exit 3'\n[1/2] one\nmore\n[2/2] two\n")
