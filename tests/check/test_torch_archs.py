"""Architectures as PyTorch's CMake takes them: against the very file that the installed torch ships."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.check.torch_archs import NAMED, parse_archs, split_archs
from paceline.errors import UsageError

SELECT = "share/cmake/Caffe2/Modules_CUDA_fix/upstream/FindCUDA/select_compute_arch.cmake"
TAKEN = [
    "7.0;12.0+PTX",
    "8.6 9.0",
    "9.0a",
    "12.0a",
    "10.0f",
    "8.9+PTX",
    "10.0f+PTX",
    "8.9(8.6)",
    *NAMED,
    "Ampere+PTX;Hopper",
]
REFUSED = ["sm_120", "12", "9.0b", "8.10", "hopper", "Zen", "9.0+ptx", "All;8.9", "Auto 8.9"]


@pytest.fixture
def cmake_capabilities(tmp_path):
    """What PyTorch's own file makes of a list, None where it refuses it."""
    found = importlib.util.find_spec("torch")
    select = Path(found.origin).parent / SELECT if found else Path()
    if shutil.which("cmake") is None or not select.is_file():
        pytest.skip("needs cmake, and a torch that ships its CMake files")
    script = tmp_path / "select.cmake"
    script.write_text(
        f'include("{select}")\ncuda_select_nvcc_arch_flags(made ${{LIST}})\nmessage("made ${{made_readable}}")\n'
    )

    def ask(listed):
        words = ["cmake", f"-DLIST={listed}", "-P", str(script)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            return None
        return {(int(major), int(minor)) for major, minor in re.findall(r"sm_(\d+)(\d)", done.stderr)}

    return ask


@pytest.mark.parametrize("listed", TAKEN)
def test_what_pytorchs_cmake_takes_is_taken_for_the_same_cards(cmake_capabilities, listed):
    assert set(parse_archs(listed)) == cmake_capabilities(";".join(split_archs(listed)))


@pytest.mark.parametrize("listed", REFUSED)
def test_what_pytorchs_cmake_refuses_is_refused(cmake_capabilities, listed):
    assert cmake_capabilities(";".join(split_archs(listed))) is None
    with pytest.raises(UsageError):
        parse_archs(listed)


def test_a_list_may_have_semicolons_commas_and_spaces():
    assert parse_archs("8.6, 9.0a;12.0+PTX  8.6") == ((8, 6), (9, 0), (12, 0))


@pytest.mark.parametrize("listed", ["Auto", "Common", "All"])
def test_a_set_names_no_capability(listed):
    assert parse_archs(listed) == ()


@pytest.mark.parametrize(
    ("listed", "fix"),
    [
        ("sm_120", "--arch 12.0"),
        ("90a", "--arch 9.0a"),
        ("compute_89+ptx", "--arch 8.9+PTX"),
        ("hopper", "--arch Hopper"),
        ("8.6;sm_90;Ada", "--arch '8.6;9.0;Ada'"),
        ("fast", "--arch 12.0"),
        ("12", "--arch 12.0"),
    ],
)
def test_the_fix_is_what_was_probably_meant(listed, fix):
    with pytest.raises(UsageError) as error:
        parse_archs(listed)
    assert error.value.fix == fix


def test_the_error_names_the_flag_or_the_variable_that_it_came_from():
    with pytest.raises(UsageError) as error:
        parse_archs("sm_120")
    assert str(error.value) == "error: --arch sm_120: sm_120 is no architecture\n  fix: --arch 12.0"
    with pytest.raises(UsageError) as error:
        parse_archs("8.9 sm_120", given="TORCH_CUDA_ARCH_LIST")
    assert str(error.value) == (
        "error: TORCH_CUDA_ARCH_LIST=8.9 sm_120, set in your environment: sm_120 is no architecture\n"
        "  fix: export TORCH_CUDA_ARCH_LIST='8.9;12.0', or unset it: then the build is for the cards here"
    )
