"""paceline comm on real processes: right results and figures; a rank that is wrong, stops or dies; Ctrl-C."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from paceline.cli import run_command
from paceline.comm.analysis import LinkRate, format_comm, make_results
from paceline.comm.session import check_ranks, largest_bytes, links_between, measure_comm, save_results
from paceline.command_line import parse
from paceline.config import Config
from paceline.errors import PacelineError, TrainingFailed, UsageError
from paceline.heartbeat import read_heartbeat
from paceline.options import CommOptions
from paceline.plan.machine import Gpu, Machine, with_spec
from paceline.plan.planner import Plan, make_plan

WRONG_RANK = str(Path(__file__).with_name("wrong_rank.py"))
CPU_BOX = Path(__file__).parents[1] / "check" / "hosts" / "cpu_box.json"
SMALL = {"max_bytes": 16_384, "sweep_s": 0.05}
GIB = 1 << 30


def plan_of(config: Config, *, gpus: int = 0) -> Plan:
    cards = tuple(with_spec(Gpu(i, "NVIDIA GeForce RTX 4090", 24 * GIB, (8, 9))) for i in range(gpus))
    return make_plan(config, Machine(cards, 4, False, 64 * GIB), vocab_size=config.vocab_size, num_rows=0)


def cpu(nproc: int) -> Config:
    return Config(device="cpu", nproc=nproc, depth=12)


def faulty(fault: str, rank: str) -> list[str]:
    return [sys.executable, WRONG_RANK, fault, rank]


def point(size: int, seconds: float, factor: float) -> dict:
    return {
        "bytes": size, "seconds": seconds, "algorithm_bytes_per_s": size / seconds,
        "bus_bytes_per_s": factor * size / seconds,
    }  # fmt: skip


def workers_left(folder: Path) -> list[str]:
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [
        line for line in lines if str(folder) in line and ("paceline.comm.rank_process" in line or "wrong_rank" in line)
    ]


def during_checks(folder: Path, act: Callable[[Path], None]) -> threading.Thread:
    """Calls act(run folder) once rank 1 is past init_process_group, from a thread: the launch needs the main one."""

    def follow() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for path in folder.glob("comm/*/progress/1"):
                if (heartbeat := read_heartbeat(path)) is not None and heartbeat.step > 1:
                    return act(path.parents[1])
            time.sleep(0.02)
        return None

    thread = threading.Thread(target=follow)
    thread.start()
    return thread


@pytest.mark.dist
@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_ranks_have_right_results_and_figures_of_every_collective_and_pair(nproc, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "paceline.comm.session.measure_comm", lambda config, **keys: measure_comm(config, **keys | SMALL)
    )
    # tests/nvidia/test_cards.py has a check of the real facts before it
    monkeypatch.setattr("paceline.launch.host_facts.gather_facts", lambda **_: json.loads(CPU_BOX.read_text()))
    assert run_command(["comm", "--json", "--device=cpu", f"--nproc={nproc}", f"--cache-dir={tmp_path}"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert (results["right"], results["world_size"], results["backend"], results["wrong"]) == (True, nproc, "gloo", [])
    assert results["dtypes"] == ["fp32", "bf16", "fp16", "fp64", "int64", "uint8"]
    assert list(results["collectives"]) == ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
    for curve in results["collectives"].values():
        sizes = [point["bytes"] for point in curve["points"]]
        assert sizes == sorted(sizes) and 16_000 < sizes[-1] <= 16_384
        assert curve["bytes_per_s"] > 0 and curve["latency_s"] >= 0
    assert [pair["ranks"] for pair in results["pairs"]] == ([[0, 1]] if nproc == 2 else [[0, 1], [0, 2], [1, 2]])
    assert results["training"]["depth"] == 12 and results["training"]["computing_s"] is None
    saved = json.loads((tmp_path / "comm.json").read_text())
    assert saved == {key: value for key, value in results.items() if key != "file"}
    assert results["replaced_bytes"] is None
    assert f"{results['checks']} checks of 10 operations" in format_comm(results)
    assert sorted(path.name for path in Path(results["folder"]).glob("logs/1/*.log")) == [
        *(f"{rank}.log" for rank in range(nproc)), "launch.log",
    ]  # fmt: skip


@pytest.mark.dist
@pytest.mark.soak
@pytest.mark.parametrize(
    ("fault", "rank", "nproc", "where"),
    [
        ("message", "1", 2, "rank 1 -> rank 0 gives wrong results"),
        ("share", "1", 3, "rank 1 is in every pair with wrong results: 0-1 and 1-2"),
        ("barrier", "all", 2, "rank 0 passes the barrier before all ranks have reached it"),
    ],
)
def test_a_rank_that_gives_wrong_results_is_named(fault, rank, nproc, where, tmp_path):
    results = measure_comm(cpu(nproc), cache_dir=tmp_path, worker=faulty(fault, rank), **SMALL)
    assert (results["right"], results["where"]) == (False, where)
    assert f"where   {where}\n" in format_comm(results)
    assert not (tmp_path / "comm.json").exists()  # no plan may rely on it


@pytest.mark.dist
@pytest.mark.soak
def test_a_wrong_result_has_its_rank_operation_size_dtype_place_and_both_numbers(tmp_path):
    results = measure_comm(cpu(2), cache_dir=tmp_path, worker=faulty("result", "1"), **SMALL)
    assert (results["right"], results["where"]) == (
        False, "rank 1 alone gets wrong results; what it sends arrives right",
    )  # fmt: skip
    assert f"where   {results['where']}\n" in format_comm(results)
    assert not (tmp_path / "comm.json").exists()  # no plan may rely on it
    last = next(error for error in results["wrong"] if (error["numel"], error["collective"]) == (1000, "all_reduce"))
    assert (last["dtype"], last["ranks"], last["rank"], last["index"], last["num_wrong"]) == ("fp32", [0, 1], 1, 999, 1)
    assert int(last["got"]) == int(last["expected"]) + 1


@pytest.mark.dist
@pytest.mark.soak
def test_a_rank_stopped_from_outside_is_named_and_every_process_ends_by_itself(tmp_path):
    def stop(run: Path) -> None:
        os.kill(int((run / "logs" / "1" / "1.pid").read_text()), signal.SIGSTOP)

    thread = during_checks(tmp_path, stop)
    with pytest.raises(TrainingFailed) as error:
        measure_comm(cpu(2), cache_dir=tmp_path, deadline_s=4, **SMALL)
    thread.join()
    assert error.value.exit_code == 3
    message = error.value.message
    assert re.match(r"no rank made progress for \d+ s: rank 1 is stopped \(state T\) in \w+ .* of [\d,]+ \w+", message)
    assert re.search(r"; rank 0 waits in \w+ .*of [\d,]+ \w+", message)
    assert str(next(tmp_path.glob("comm/*/logs/1"))) in error.value.fix
    assert workers_left(tmp_path) == []


# a rank without torch: tests/launch/test_supervisor.py has one that dies among others in a process group
DIES = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('boom')\ntime.sleep(600)"


@pytest.mark.dist
@pytest.mark.parametrize(
    "worker",
    [
        pytest.param([sys.executable, "-c", DIES], id="at once"),
        pytest.param(faulty("fail", "1"), id="in a collective", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_dies_is_named_with_its_error(worker, tmp_path):
    with pytest.raises(TrainingFailed) as error:
        measure_comm(cpu(2), cache_dir=tmp_path, worker=worker, **SMALL)
    assert (error.value.message, error.value.exit_code) == ("rank 1 failed: ValueError: boom", 3)
    assert error.value.fix == f"read the logs: {next(tmp_path.glob('comm/*/logs/1'))}"


@pytest.mark.soak
@pytest.mark.dist
def test_ctrl_c_ends_every_rank(tmp_path):
    def interrupt(run: Path) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    thread = during_checks(tmp_path, interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure_comm(cpu(2), cache_dir=tmp_path, **SMALL)
    thread.join()
    assert workers_left(tmp_path) == []


def test_one_rank_is_refused_with_a_fix():
    with pytest.raises(PacelineError) as error:
        check_ranks(plan_of(Config(device="cpu", nproc=1)))
    assert error.value.fix == "--nproc 2"
    with pytest.raises(PacelineError) as error:
        check_ranks(plan_of(Config(), gpus=1))
    assert error.value.message == "comm tests messages between ranks, and there is one GPU (NVIDIA GeForce RTX 4090)"


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(PacelineError) as error:
        plan_of(Config(nproc=3), gpus=2)
    assert error.value.fix == "--nproc 2"


def test_sizes_too_small_for_a_bandwidth_are_refused_before_anything_starts():
    with pytest.raises(UsageError) as error:
        parse(["--max-bytes", "65536"], command="comm", options=CommOptions)
    assert error.value.fix.startswith("an integer from 1,048,576")


def test_links_of_gpus_come_from_the_facts_of_the_visible_gpus():
    pcie = {"generation": 4, "generation_max": 4, "width": 16, "width_max": 16}
    cards = [{"visible": visible, "nvlinks": 0, "capability": [8, 9], "pcie": pcie} for visible in (False, True, True)]
    plan = plan_of(Config(), gpus=2)
    assert links_between(plan, cards) == {(0, 1): LinkRate("PCIe 4.0 x16", 16 * 1.969e9)}
    assert links_between(plan, []) == {(0, 1): LinkRate("link unknown", None)}
    assert links_between(plan_of(cpu(2)), []) == {(0, 1): LinkRate("loopback", None)}


def reports() -> list[dict]:
    """Two GPUs on PCIe 4.0 x16 without P2P: 8 GB/s, rank 1 a little slower."""
    common = {
        "device": "NVIDIA GeForce RTX 4090", "torch": "2.13.0+cu130", "backend": "nccl", "checks": 225,
        "collectives": ["all_reduce", "p2p"], "dtypes": ["fp32", "bf16"], "wrong": [],
    }  # fmt: skip
    speed = [
        {"collective": name, "ranks": [0, 1], "bytes": size, "seconds": 20e-6 + size / 8e9}
        for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "p2p")
        for size in (1 << 10, 1 << 18, 1 << 26)
    ]
    slower = [{**point, "seconds": 25e-6 + point["bytes"] / 8e9} for point in speed]
    return [{**common, "speed": speed}, {**common, "speed": slower}]


def test_the_time_of_the_slowest_rank_is_reported():
    config = Config(depth=12, total_batch_size=65_536, device_batch_size=16)
    links = {(0, 1): LinkRate("PCIe 4.0 x16", 31.5e9)}
    results = make_results(reports(), plan_of(config, gpus=2), links, tok_per_sec=None)
    largest = results["collectives"]["all_reduce"]["points"][-1]
    assert largest == point(1 << 26, 25e-6 + (1 << 26) / 8e9, 1.0)
    assert results["collectives"]["all_reduce"]["latency_s"] == pytest.approx(25e-6)
    report = format_comm({**results, "host": "ada", "file": "comm.json", "seconds": 12.3})
    assert report == (
        "ranks   2 x NVIDIA GeForce RTX 4090 on ada, nccl, torch 2.13.0+cu130\n"
        "right   225 checks of 2 operations in fp32, bf16: every rank has the right results\n"
        "\n"
        "                  latency    algorithm          bus\n"
        "all_reduce          25 us    7.98 GB/s    7.98 GB/s\n"
        "reduce_scatter      25 us    7.98 GB/s    3.99 GB/s\n"
        "all_gather          25 us    7.98 GB/s    3.99 GB/s\n"
        "broadcast           25 us    7.98 GB/s    7.98 GB/s\n"
        "p2p 0-1             25 us    7.98 GB/s    7.98 GB/s\n"
        "                latency at 1.0 KiB, bandwidth at 64.0 MiB\n"
        "\n"
        "bus GB/s       all_reduce   reduce_scatter       all_gather        broadcast\n"
        "1.0 KiB     25 us   0.041    25 us   0.020    25 us   0.020    25 us   0.041\n"
        "256 KiB     58 us   4.538    58 us   2.269    58 us   2.269    58 us   4.538\n"
        "64.0 MiB  8.41 ms   7.976  8.41 ms   3.988  8.41 ms   3.988  8.41 ms   7.976\n"
        "\n"
        "link    0-1 PCIe 4.0 x16, 7.98 GB/s, 25 % of 31.5 GB/s: poor: paceline check searches for a narrow slot, an IOMMU"
        " or a slow interface\n"
        "train   at 3.98 GB/s a depth-12 step of 65,536 tokens spends up to 30 % waiting: 144 ms of sending, partly hidden behind"
        " 335 ms of compute (at 45 % of peak, assumed)\n"
        "saved   comm.json, 12 s"
    )


def test_a_measurement_that_replaces_one_with_larger_messages_says_so(tmp_path):
    results = make_results(reports(), plan_of(Config(), gpus=2), {}, tok_per_sec=None)
    assert largest_bytes(tmp_path / "comm.json") is None
    save_results(results, tmp_path / "comm.json")
    assert largest_bytes(tmp_path / "comm.json") == 1 << 26
    results |= {"host": "ada", "file": "comm.json", "seconds": 12.3}
    assert format_comm({**results, "replaced_bytes": 1 << 26}).endswith("saved   comm.json, 12 s")
    note = "\nnote    it replaces a measurement up to 256 MiB, which is better for plans; --out FILE replaces none"
    assert format_comm({**results, "replaced_bytes": 1 << 28}).endswith(note)
