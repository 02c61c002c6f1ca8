"""Which wheel, which build, which driver: for cards and drivers that are not here."""

import itertools

import pytest

from paceline.check.torch_recipe import (
    WHEELS,
    Tools,
    build_options,
    format_recipe,
    make_recipe,
    num_jobs,
)
from paceline.check.torch_verdicts import WHEELS as INDEX
from paceline.check.torch_verdicts import wheel_for
from paceline.errors import PacelineError
from paceline.units import GIB


def recipe(*capabilities, driver=None, machine="x86_64", tools=Tools(), build=False):  # noqa: B008
    return make_recipe(capabilities, driver=driver, machine=machine, tools=tools, build=build)


@pytest.mark.parametrize(
    ("capabilities", "driver", "tag"),
    [
        ([(12, 0), (12, 0)], "580.95.05", "cu130"),  # two RTX 5090
        ([(12, 0)], "570.133.07", "cu128"),
        ([(8, 9)], "550.54", "cu126"),  # RTX 4090: sm_86 runs on it
        ([(7, 0)], "580.95", "cu126"),  # V100
        ([(6, 1)], "535.1", "cu126"),  # GTX 1080
        ([(5, 2)], None, "cu126"),
        ([(7, 5)], None, "cu130"),
        ([(8, 9), (12, 0)], "570.1", "cu128"),
    ],
)
def test_the_wheel_has_kernels_for_all_cards_and_runs_on_the_driver(capabilities, driver, tag):
    made = recipe(*capabilities, driver=driver)
    assert (made.kind, made.command) == ("wheel", f"pip install --force-reinstall torch -i {INDEX}/{tag}")


def test_without_a_card_the_cpu_wheel_is_right():
    assert recipe().command == f"pip install --force-reinstall torch -i {INDEX}/cpu"


def test_the_last_torch_of_a_cuda_is_said():
    assert recipe((12, 0), driver="570.1").notes == (
        "torch 2.11 is the last with CUDA 12.8; driver 580 or later takes cu130, up to torch 2.14",
    )


def test_a_driver_too_old_for_every_wheel_is_named_with_the_one_to_get():
    made = recipe((12, 0), driver="470.82")
    assert (made.kind, made.command) == ("driver", "a driver 580 or later: https://www.nvidia.com/drivers")


def test_cards_that_no_wheel_has_together_are_built_for():
    made = recipe((12, 0), (7, 0), driver="570.1", tools=Tools(nvcc="13.0"))
    assert (made.kind, made.command) == ("build", "paceline torch build --source DIR --arch '7.0;12.0'")
    assert made.why == "no wheel for x86_64 has kernels for 7.0, 12.0 together"
    assert made.notes[0] == "CUDA 12.9 compiles for 7.0, 12.0; of nvcc here is 13.0"
    assert [each.value for each in made.options if each.name == "TORCH_CUDA_ARCH_LIST"] == ["7.0;12.0"]


def test_a_build_keeps_the_architectures_as_they_were_asked():
    made = make_recipe([(9, 0)], driver="580.1", machine="x86_64", tools=Tools(), build=True, archs=["9.0a", "9.0+PTX"])
    assert made.command == "paceline torch build --source DIR --arch '9.0a;9.0+PTX'"
    assert [each.value for each in made.options if each.name == "TORCH_CUDA_ARCH_LIST"] == ["9.0a;9.0+PTX"]


def test_a_build_whose_cuda_the_driver_cannot_run_asks_for_the_driver():
    made = recipe((7, 0), (12, 0), driver="470.1")
    assert (made.kind, made.command) == ("driver", "a driver 525 or later: https://www.nvidia.com/drivers")


def test_a_machine_without_wheels_for_its_card_builds():
    assert recipe((7, 5), driver="580.1", machine="aarch64").kind == "build"
    assert recipe((9, 0), driver="580.1", machine="aarch64").kind == "wheel"


def test_a_card_that_no_cuda_compiles_for_any_more_is_refused():
    with pytest.raises(PacelineError) as error:
        recipe((3, 5), driver="470.1")
    assert error.value.message == "neither CUDA 12 nor 13 compiles for 3.5, and PyTorch 2.11 and later need one of them"


def test_a_build_can_be_asked_for_where_a_wheel_fits():
    made = recipe((8, 9), driver="580.1", build=True)
    assert (made.kind, made.why) == ("build", "a build was asked for")
    assert recipe(build=True).command == "paceline torch build --source DIR"


def test_verdicts_and_recipe_name_the_same_wheel():
    cards = [(7, 0), (7, 5), (8, 6), (8, 9), (9, 0), (12, 0)]
    for card, driver in itertools.product(cards, ("570.1", "580.1")):
        facts = {"gpus": [{"capability": list(card), "visible": True}], "driver": {"version": driver}}
        assert recipe(card, driver=driver).command.endswith(f"/{wheel_for(facts)}"), (card, driver)


def test_every_wheel_is_in_the_table_with_why_it_does_not_fit():
    text = format_recipe(recipe((12, 0), driver="570.133"))
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("cu1")}
    assert set(rows) == {wheel.tag for wheel in WHEELS}
    assert rows["cu126"].endswith("no kernels for 12.0")
    assert rows["cu130"].endswith("needs driver 580")
    assert rows["cu128"].endswith("fits")
    assert "RELEASE.md" in text


def test_the_json_has_every_wheel_and_the_source():
    made = recipe((12, 0), driver="570.133").to_json()
    assert {each["tag"]: each["why_not"] for each in made["wheels"]}["cu128"] is None
    assert made["kind"] == "wheel"
    assert "RELEASE.md" in made["source"]


def test_libuv_comes_with_tensorpipe_and_every_option_has_a_reason():
    options = {each.name: each for each in build_options(["12.0"], Tools(cudnn=True, ccache=True))}
    assert "libuv" in options["USE_TENSORPIPE"].why
    assert "USE_LIBUV" not in options
    assert all(each.why for each in options.values())
    assert (options["USE_CUDNN"].value, options["CMAKE_CUDA_COMPILER_LAUNCHER"].value) == ("ON", "ccache")


def test_a_build_for_the_cpu_names_nothing_of_cuda_but_that_it_is_off():
    options = {each.name: each.value for each in build_options([], Tools(ccache=True))}
    assert options["USE_CUDA"] == "OFF"
    assert not {"USE_NCCL", "USE_CUDNN", "TORCH_CUDA_ARCH_LIST", "CMAKE_CUDA_COMPILER_LAUNCHER"} & set(options)


@pytest.mark.parametrize(
    ("memory_bytes", "cores", "cuda", "jobs"),
    [
        (64 * GIB, 32, True, 16),
        (64 * GIB, 32, False, 32),
        (64 * GIB, 8, True, 8),
        (GIB, 8, True, 1),
        (None, 4, True, 4),
    ],
)
def test_jobs_fit_into_memory(memory_bytes, cores, cuda, jobs):
    assert num_jobs(memory_bytes=memory_bytes, cores=cores, cuda=cuda) == jobs
