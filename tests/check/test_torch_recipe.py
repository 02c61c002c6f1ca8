"""Which wheel, which build, which driver: for cards and drivers that this host does not have."""

import importlib.util
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from rows import with_rows

from paceline.check.torch_recipe import (
    NAMED,
    WHEELS,
    Tools,
    build_options,
    format_recipe,
    make_recipe,
    parse_archs,
    split_archs,
)
from paceline.check.verdicts.torch_verdicts import WHEELS as INDEX
from paceline.check.verdicts.torch_verdicts import wheel_for
from paceline.errors import PacelineError, UsageError


def recipe(*capabilities, driver=None, machine="x86_64", tools=Tools(), build=False):  # noqa: B008
    return make_recipe(capabilities, driver=driver, machine=machine, tools=tools, build=build)


SCRIPT, DRIVER = "paceline torch recipe --script build.sh", "a driver {} or later: https://www.nvidia.com/drivers"


@with_rows(("cards", "options", "kind", "command"), [
    # the wheel has kernels for all cards and runs on the driver
    *((cards, {"driver": driver}, "wheel", f"pip install --force-reinstall torch -i {INDEX}/{tag}") for cards, driver, tag in [
        ([(12, 0), (12, 0)], "580.95.05", "cu130"),  # two RTX 5090
        ([(12, 0)], "570.133.07", "cu128"),
        ([(8, 9)], "550.54", "cu126"),  # RTX 4090: sm_86 runs on it
        ([(7, 0)], "580.95", "cu126"),  # V100
        ([(6, 1)], "535.1", "cu126"),  # GTX 1080
        ([(5, 2)], None, "cu126"),
        ([(7, 5)], None, "cu130"),
        ([(8, 9), (12, 0)], "570.1", "cu128"),
        ([], None, "cpu"),
    ]),
    # a driver too old for every wheel, or for the CUDA of a build
    ([(12, 0)], {"driver": "470.82"}, "driver", DRIVER.format(580)),
    ([(12, 0)], {"driver": "560.35"}, "driver", DRIVER.format(580)),  # older than the cards
    ([(7, 0), (12, 0)], {"driver": "470.1"}, "driver", DRIVER.format(570)),
    # a machine without wheels for its card, and one with them
    ([(7, 5)], {"driver": "580.1", "machine": "aarch64"}, "build", f"{SCRIPT} --arch '7.5'"),
    ([(9, 0)], {"driver": "580.1", "machine": "aarch64"}, "wheel", f"pip install --force-reinstall torch -i {INDEX}/cu130"),
    # a build that is requested where a wheel fits
    ([(8, 9)], {"driver": "580.1", "build": True}, "build", f"{SCRIPT} --arch '8.9'"),
    ([], {"build": True}, "build", SCRIPT),
])  # fmt: skip
def test_cards_driver_and_machine_decide_what_to_install_or_build(cards, options, kind, command):
    made = recipe(*cards, **options)
    assert (made.kind, made.command) == (kind, command)
    assert (made.why == "a build was requested") == ("build" in options)


def test_a_card_newer_than_every_kernel_runs_on_ptx():
    assert (
        recipe((13, 0)).why == "CUDA 13.0 has PTX, from which the driver compiles kernels for 13.0 at the first start"
    )
    assert "PTX" not in recipe((12, 1)).why


def test_the_last_torch_of_a_cuda_version_is_noted():
    assert recipe((12, 0), driver="570.1").notes == (
        "torch 2.11 is the last with CUDA 12.8; with driver 580 or later cu130 fits, up to torch 2.14",
    )


def test_cards_that_no_wheel_supports_together_need_a_build():
    made = recipe((12, 0), (7, 0), driver="570.1", tools=Tools(nvcc="13.0"))
    assert (made.kind, made.command) == ("build", "paceline torch recipe --script build.sh --arch '7.0;12.0'")
    assert made.why == "no wheel for x86_64 has kernels for 7.0, 12.0 together"
    assert made.notes[0] == "it needs nvcc of CUDA 12.9, which compiles for 7.0, 12.0; this host has 13.0"
    assert [option.value for option in made.options if option.name == "TORCH_CUDA_ARCH_LIST"] == ["7.0;12.0"]


def test_a_build_keeps_the_architectures_as_the_user_wrote_them():
    made = make_recipe([(9, 0)], driver="580.1", machine="x86_64", tools=Tools(), build=True, archs=["9.0a", "9.0+PTX"])
    assert made.command == "paceline torch recipe --script build.sh --arch '9.0a;9.0+PTX'"
    assert [option.value for option in made.options if option.name == "TORCH_CUDA_ARCH_LIST"] == ["9.0a;9.0+PTX"]


def test_a_card_that_no_current_cuda_compiles_for_is_refused():
    with pytest.raises(PacelineError) as error:
        recipe((3, 5), driver="470.1")
    assert error.value.message == "neither CUDA 12 nor 13 compiles for 3.5, and PyTorch 2.11 and later need one of them"


def test_verdicts_and_recipe_recommend_the_same_wheel():
    cards = [(7, 0), (7, 5), (8, 6), (8, 9), (9, 0), (12, 0)]
    for card, driver in itertools.product(cards, ("570.1", "580.1")):
        facts = {"gpus": [{"capability": list(card), "visible": True}], "driver": {"version": driver}}
        assert recipe(card, driver=driver).command.endswith(f"/{wheel_for(facts)}"), (card, driver)


def test_the_table_has_every_wheel_with_the_reason_why_it_does_not_fit():
    text = format_recipe(recipe((12, 0), driver="570.133"))
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("cu1")}
    assert set(rows) == {wheel.tag for wheel in WHEELS}
    assert rows["cu126"].endswith("no kernels for 12.0")
    assert rows["cu130"].endswith("needs driver 580")
    assert rows["cu128"].endswith("fits")
    assert "RELEASE.md" in text


def test_the_json_has_every_wheel_and_the_source():
    made = recipe((12, 0), driver="570.133").to_json()
    assert {wheel["tag"]: wheel["why_not"] for wheel in made["wheels"]}["cu128"] is None
    assert made["kind"] == "wheel"
    assert "RELEASE.md" in made["source"]


def test_libuv_comes_with_tensorpipe_and_every_option_has_a_reason():
    options = {option.name: option for option in build_options(["12.0"], Tools(cudnn=True, ccache=True))}
    assert "libuv" in options["USE_TENSORPIPE"].why
    assert "USE_LIBUV" not in options
    assert all(each.why for each in options.values())
    assert (options["USE_CUDNN"].value, options["CMAKE_CUDA_COMPILER_LAUNCHER"].value) == ("ON", "ccache")


def test_a_build_for_the_cpu_has_no_cuda_options_except_use_cuda_off():
    options = {option.name: option.value for option in build_options([], Tools(ccache=True))}
    assert options["USE_CUDA"] == "OFF"
    assert not {"USE_NCCL", "USE_CUDNN", "TORCH_CUDA_ARCH_LIST", "CMAKE_CUDA_COMPILER_LAUNCHER"} & set(options)


def test_a_build_uses_a_cuda_that_the_driver_runs():
    assert recipe((12, 0), driver="570.133", build=True).toolkit == "12.9"
    assert recipe((12, 0), driver="580.1", build=True).toolkit == "13.0"


SELECT = "share/cmake/Caffe2/Modules_CUDA_fix/upstream/FindCUDA/select_compute_arch.cmake"
ACCEPTED = [
    "7.0;12.0+PTX", "8.6 9.0", "9.0a", "12.0a", "10.0f", "8.9+PTX", "10.0f+PTX", "8.9(8.6)", "Ampere+PTX;Hopper", *NAMED,
]  # fmt: skip
REFUSED = ["sm_120", "12", "9.0b", "8.10", "hopper", "Zen", "9.0+ptx", "All;8.9", "Auto 8.9"]


@pytest.fixture
def cmake_capabilities(tmp_path):
    """Returns a function: the capabilities that PyTorch's own file reads from a list, None where it refuses it."""
    spec = importlib.util.find_spec("torch")
    select = Path(spec.origin).parent / SELECT if spec else Path()
    if shutil.which("cmake") is None or not select.is_file():
        pytest.skip("needs cmake, and a torch that ships its CMake files")
    script = tmp_path / "select.cmake"
    script.write_text(
        f'include("{select}")\ncuda_select_nvcc_arch_flags(made ${{LIST}})\nmessage("made ${{made_readable}}")\n'
    )

    def read(text):
        command = ["cmake", f"-DLIST={text}", "-P", str(script)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            return None
        return {(int(major), int(minor)) for major, minor in re.findall(r"sm_(\d+)(\d)", result.stderr)}

    return read


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_the_cmake_of_pytorch_accepts_means_the_same_cards(cmake_capabilities, text):
    assert set(parse_archs(text)) == cmake_capabilities(";".join(split_archs(text)))


@pytest.mark.parametrize("text", REFUSED)
def test_what_the_cmake_of_pytorch_refuses_is_refused(cmake_capabilities, text):
    assert cmake_capabilities(";".join(split_archs(text))) is None
    with pytest.raises(UsageError):
        parse_archs(text)


@with_rows(("text", "capabilities"), [
    ("8.6, 9.0a;12.0+PTX  8.6", ((8, 6), (9, 0), (12, 0))),
    *((name, ()) for name in ("Auto", "Common", "All")),
    ("10.3 12.1;13.0", ((10, 3), (12, 1), (13, 0))),  # a card of the next generation
])  # fmt: skip
def test_a_list_may_have_semicolons_commas_and_spaces_and_a_set_has_no_capabilities(text, capabilities):
    assert parse_archs(text) == capabilities


@with_rows(("text", "wrong", "fix"), [
    ("sm_120", "sm_120", "--arch 12.0"),
    ("90a", "90a", "--arch 9.0a"),
    ("compute_89+ptx", "compute_89+ptx", "--arch 8.9+PTX"),
    ("hopper", "hopper", "--arch Hopper"),
    ("8.6;sm_90;Ada", "sm_90", "--arch '8.6;9.0;Ada'"),
    ("fast", "fast", "--arch 12.0"),
    ("12", "12", "--arch 12.0"),
])  # fmt: skip
def test_the_fix_is_the_architecture_that_was_probably_meant(text, wrong, fix):
    with pytest.raises(UsageError) as error:
        parse_archs(text)
    assert str(error.value) == f"error: --arch {text}: {wrong} is not an architecture\n  fix: {fix}"


@with_rows("text", ["9.9", "8.6;8.1", "9.9a+PTX"])
def test_an_architecture_that_no_gpu_has_is_refused_with_those_that_exist(text):
    with pytest.raises(UsageError, match=r"no GPU has compute capability (9\.9|8\.1)\n") as error:
        parse_archs(text)
    assert error.value.fix.endswith("8.6, 8.7, 8.8, 8.9, 9.0, 10.0, 10.1, 10.3, 11.0, 12.0, 12.1")
