"""What a run records and says while the cards of a stand-in for the driver get hot, are shared, report Xid errors and get lost."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_driver import GB10, GIB, LIBRARY_MISMATCH, LOST, MIB, RTX_5090, THERMAL, UNKNOWN_ERROR, FakeDriver

from paceline.rundir import RunDir, read_json_lines

pytestmark = pytest.mark.dist
DEADLINE_S = 120.0  # against hanging
SCRIPT, DECIDE = (Path(__file__).with_name(name) for name in ("fail_on_lost_card.py", "decide.py"))


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


@contextmanager
def sampler(computer: FakeDriver, *, every_s: float = 0.2) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The process that takes samples of a run; yields what reads its lines."""
    run = RunDir(computer.folder / "run")
    run.path.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "paceline.launch.health", str(run.path), str(every_s), "run-id", "tower"]
    process = subprocess.Popen(command, env=computer.env)
    try:
        yield lambda: [*read_json_lines(run.health("tower"))] if run.health("tower").exists() else []
    finally:
        process.kill()
        process.wait()


def test_samples_have_the_heat_and_the_foreign_processes_of_a_card(host):
    shared = {
        **RTX_5090,
        "CurrentClocksEventReasons": str(THERMAL), "Temperature": "91",
        "MemoryInfo": f"{32_607 * MIB} {20 * GIB}", "ComputeRunningProcesses_v3": f"{os.getpid()} {20 * GIB}",
    }  # fmt: skip
    with sampler(host(shared, GB10)) as lines:
        (first, unified) = wait_for(lines)[0]["gpus"]
    assert (first["throttle"], first["temperature_c"], first["used_bytes"]) == (["thermal"], 91, 20 * GIB)
    (process,) = first["processes"]
    assert (process["pid"], process["bytes"], process["ours"]) == (os.getpid(), 20 * GIB, False)
    assert unified["name"] == "NVIDIA GB10"
    assert not {"used_bytes", "total_bytes"} & unified.keys()


def test_a_lost_card_has_its_xid_error_and_no_values(host):
    computer = host(RTX_5090, RTX_5090)
    computer.xid(0, 31)  # before the run
    with sampler(computer) as lines:
        wait_for(lines)
        computer.lose(1)
        computer.xid(0, 31, 1, 79)
        (well, lost) = wait_for(lambda: [line for line in lines() if "xid" in line["gpus"][1].get("errors", ())])[0][
            "gpus"
        ]
    assert lines()[0]["gpus"][0]["errors"] == {"pcie_replays": 0}
    assert lost == {"index": 1, "errors": {"xid": 79, "xid_count": 1}}
    assert well["power_w"] == 61.5


def test_a_driver_of_another_version_is_noted_and_the_host_is_sampled(host):
    computer = host(RTX_5090)
    computer.answers["Init"] = LIBRARY_MISMATCH
    computer.write()
    with sampler(computer) as lines:
        assert "gpus" not in wait_for(lines)[0]
    (note,) = read_json_lines(RunDir(computer.folder / "run").events)
    assert note["text"].startswith("health samples have no GPUs: the NVIDIA driver does not answer (NVMLError_LibRm")


@pytest.mark.soak
def test_a_card_lost_under_a_script_is_the_cause_and_shows_in_the_view(host):
    computer = host(RTX_5090, RTX_5090)
    run, lost = RunDir(computer.folder / "runs" / "lost"), computer.folder / "lost"
    flags = ["--nproc", "2", "--name", "lost", "--max-attempts", "1", "--health-every", "0.2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", "run", *flags, "--", str(SCRIPT)],
        env={**computer.env, "CARD_IS_LOST": str(lost)},
        cwd=computer.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(lambda: all("ready" in read(run.rank_log(1, rank)) for rank in range(2)))
        samples = next(iter(wait_for(lambda: [*run.path.glob("health/*.jsonl")])))
        wait_for(lambda: "RTX 5090" in read(samples))
        computer.lose(1)
        computer.xid(1, 79)
        wait_for(lambda: '"xid":79' in read(samples))
        lost.touch()
        output = process.communicate(timeout=DEADLINE_S)[0]
    finally:
        process.kill()
        process.wait()
    assert "device  2 x NVIDIA GeForce RTX 5090" in output
    assert "gpu-hardware-error: the GPU of rank 1 failed: GPU has fallen off the bus (Xid 79)" in output
    view = computer.paceline("watch", str(run.path), "--once").stdout
    well, dead = [line.replace("─", "").split() for line in view.splitlines() if " RTX 5090 " in line]
    assert well == [
        "0",
        "RTX",
        "5090",
        "0.0/31.8",
        "GiB",
        "0",
        "%",
        "62/575",
        "W",
        "41",
        "°C",
        "2460",
        "MHz",
        "gen",
        "4",
        "x16",
    ]
    assert dead == ["1", "RTX", "5090", "n/a", "n/a", "n/a", "n/a", "gen", "4", "x16", "!", "xid", "79"]


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(
    ("num_lost", "error", "decision"),
    [
        (0, LOST, "retry: this is usually transient"),
        (1, LOST, "fewer-ranks: lost a GPU: continuing on 1"),
        pytest.param(1, UNKNOWN_ERROR, "fewer-ranks: lost a GPU: continuing on 1", marks=pytest.mark.soak),
        (2, LOST, "stop: lost a GPU, and the remaining ones cannot hold the model or divide the batch"),
        (2, LIBRARY_MISMATCH, "retry: this is usually transient"),  # how many cards remain is not known
    ],
)
def test_a_training_continues_on_the_cards_that_answer(num_lost, error, decision, host):
    computer = host(RTX_5090, RTX_5090)
    if error == LIBRARY_MISMATCH:
        computer.answers["Init"] = error
    else:
        computer.cards[:num_lost] = [error] * num_lost
    computer.write()
    done = computer.python(str(DECIDE), str(computer.folder / "run"), "2")
    assert done.stdout.strip() == decision, done.stderr
