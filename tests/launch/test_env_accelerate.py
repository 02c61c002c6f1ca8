"""The accelerate config: what is written for which machine, and that accelerate loads and launches with it."""

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rows import with_rows

from paceline.errors import PacelineError, UsageError
from paceline.launch.env import accelerate_config, format_yaml, make_accelerate_config
from paceline.options import AccelerateOptions
from paceline.plan.machine import Gpu, Machine

SCRIPT = Path(__file__).with_name("scripts") / "accelerated.py"
CPU = Machine(gpus=(), cpu_cores=8, cpu_bf16=False, memory_bytes=1 << 34)


def machine(num_gpus, *, name="NVIDIA GeForce RTX 5090", capability=(12, 0)):
    gpus = tuple(Gpu(i, name, 32 << 30, capability) for i in range(num_gpus))
    return Machine(gpus=gpus, cpu_cores=16, cpu_bf16=False, memory_bytes=1 << 36)


TWO = machine(2)


def values_of(where, **options):
    """The config's values; keys are in `keys`, as the command line has them."""
    return make_accelerate_config(AccelerateOptions(**options), where)


def test_one_process_for_each_gpu_there_is():
    assert [values_of(machine(n))["num_processes"] for n in (1, 2, 8)] == [1, 2, 8]
    assert [values_of(machine(n))["distributed_type"] for n in (1, 2, 8)] == ["NO", "MULTI_GPU", "MULTI_GPU"]


def test_two_gpus_make_a_ddp_config():
    assert values_of(TWO) == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "use_cpu": False,
        "mixed_precision": "bf16",
        "num_processes": 2,
        "num_machines": 1,
        "machine_rank": 0,
        "main_process_port": 0,
    }


def test_the_processes_of_all_hosts_are_counted_together():
    values = values_of(TWO, nnodes=3, node_rank=1, main_address="10.0.0.1")
    assert (values["num_processes"], values["num_machines"], values["machine_rank"]) == (6, 3, 1)
    assert (values["main_process_ip"], values["main_process_port"]) == ("10.0.0.1", 29500)


def test_a_card_without_bf16_is_not_told_to_use_it():
    old = machine(1, name="Tesla T4", capability=(7, 5))
    assert values_of(old)["mixed_precision"] == "no"
    with pytest.raises(PacelineError, match="has no bf16 units"):
        values_of(old, keys={"precision": "bf16"})


@with_rows(("where", "arguments", "message"), [
    (TWO, {"nnodes": 2}, "--node-rank must be 0 to 1 on 2 hosts, it is not set"),
    (TWO, {"nnodes": 2, "node_rank": 2}, "--node-rank must be 0 to 1 on 2 hosts, it is 2"),
    (TWO, {"nnodes": 2, "node_rank": 0}, "2 hosts need --main-address"),
    (TWO, {"node_rank": 1}, "--node-rank and --main-address need several hosts"),
    (TWO, {"nnodes": 2, "node_rank": 0, "main_address": "a", "main_port": 0},
     "--main-port 0: several hosts must use the same port"),
    (TWO, {"keys": {"nproc": 3}}, "nproc is 3, but 2 GPUs are visible"),
    (CPU, {"keys": {"device": "cuda"}}, "device is cuda, but no GPU is visible here"),
    (CPU, {"fsdp": True}, "accelerate supports FSDP on GPUs only, and device is cpu"),
    (machine(1), {"fsdp": True}, "FSDP shards a model over GPUs, and there is one process"),
])  # fmt: skip
def test_hosts_that_cannot_be_and_what_the_machine_does_not_have_are_refused(where, arguments, message):
    with pytest.raises(UsageError if "node" in message or "hosts" in message else PacelineError) as error:
        values_of(where, **arguments)
    assert error.value.message == message


def test_the_file_is_written_once_and_over_another_only_by_force(tmp_path):
    out = str(tmp_path / "a.yaml")
    assert accelerate_config(AccelerateOptions(out=out), TWO) == (
        f"wrote   {out}: 2 processes, GPU, DDP, mixed precision bf16\n"
        f"next    accelerate launch --config_file {out} script.py"
    )
    with pytest.raises(PacelineError, match="already exists"):
        accelerate_config(AccelerateOptions(out=out), TWO)
    accelerate_config(AccelerateOptions(out=out, force=True, fsdp=True), TWO)
    assert '"FSDP"' in Path(out).read_text()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(PacelineError, match="cannot be written: No such file or directory"):
        accelerate_config(AccelerateOptions(out=str(tmp_path / "none" / "a.yaml")), TWO)


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.yaml").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PacelineError, match="a.yaml cannot be written: No space left on device"):
        accelerate_config(AccelerateOptions(out=str(tmp_path / "a.yaml"), force=True), TWO)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.yaml", "old")]


def test_the_same_values_as_json_and_on_standard_output():
    assert json.loads(accelerate_config(AccelerateOptions(json=True), TWO)) == values_of(TWO)
    assert accelerate_config(AccelerateOptions(out="-"), TWO) + "\n" == format_yaml(values_of(TWO))


def take(file):
    """What accelerate itself makes of a config, up to the point where it would start processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    names = (
        "num_processes", "nproc_per_node", "nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "master_port", "use_fsdp",
        "mixed_precision",
    )  # fmt: skip
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(file), "script.py"]))
    env = prepare_multi_gpu_env(args) if args.multi_gpu or args.use_fsdp else {}
    ours = {key: env.get(key) for key in ("FSDP_VERSION", "FSDP_AUTO_WRAP_POLICY", "ACCELERATE_MIXED_PRECISION")}
    return {**{name: getattr(args, name, None) for name in names}, **ours}


@pytest.fixture(scope="module")
def taken_by_accelerate(tmp_path_factory):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    hosts = {"nnodes": 2, "node_rank": 1, "main_address": "10.0.0.1", "main_port": 29600}
    configs = {
        "one GPU": values_of(machine(1)),
        "two GPUs": values_of(TWO),
        "two hosts": values_of(TWO, **hosts, fsdp=True),
    }
    folder = tmp_path_factory.mktemp("configs")
    for name, values in configs.items():
        (folder / name).write_text(format_yaml(values))
    return {name: take(folder / name) for name in configs}


@pytest.mark.dist
def test_accelerate_takes_several_hosts_and_fsdp2_from_it(taken_by_accelerate):
    taken = taken_by_accelerate["two hosts"]
    assert (taken["nproc_per_node"], taken["nnodes"], taken["node_rank"]) == ("2", "2", 1)
    assert (taken["rdzv_backend"], taken["rdzv_endpoint"]) == ("static", "10.0.0.1:29600")
    assert (taken["use_fsdp"], taken["FSDP_VERSION"], taken["FSDP_AUTO_WRAP_POLICY"]) == (
        True, "2", "TRANSFORMER_BASED_WRAP",
    )  # fmt: skip
    assert taken["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.dist
def test_accelerate_finds_a_free_port_for_two_gpus_and_takes_one_gpu(taken_by_accelerate):
    two, one = taken_by_accelerate["two GPUs"], taken_by_accelerate["one GPU"]
    assert two["nproc_per_node"] == "2" and int(two["master_port"]) > 0
    assert (one["num_processes"], one["nproc_per_node"], one["mixed_precision"]) == (1, None, "bf16")


def start_accelerate(tmp_path, keys, **options):
    """The command that `paceline accelerate-config` prints, carried out."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    out = str(tmp_path / f"{options.get('node_rank', 0)}.yaml")
    text = accelerate_config(AccelerateOptions(out=out, keys={"device": "cpu", **keys}, **options), CPU)
    command = text.splitlines()[1].removeprefix("next    ").replace("script.py", str(SCRIPT))
    command = command.replace("accelerate launch", f"{sys.executable} -m accelerate.commands.launch")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def output_of(launch):
    """What its ranks printed, in the order of ranks."""
    out, err = launch.communicate(timeout=240)
    assert launch.returncode == 0, err
    return sorted(out.splitlines())


@pytest.mark.dist
@pytest.mark.soak
def test_accelerate_launches_two_cpu_processes_that_train_together(tmp_path):
    lines = output_of(start_accelerate(tmp_path, {"nproc": 2, "precision": "bf16"}))
    assert [line.split(", weight")[0] for line in lines] == [
        "rank 0 of 2, sum 2.0, 4 steps, bf16",
        "rank 1 of 2, sum 2.0, 4 steps, bf16",
    ]
    assert lines[0].split("weight")[1] == lines[1].split("weight")[1]


@pytest.mark.dist
@pytest.mark.soak
def test_accelerate_launches_one_cpu_process(tmp_path):
    [line] = output_of(start_accelerate(tmp_path, {"nproc": 1}))
    assert line.split(", weight")[0] == "rank 0 of 1, sum 1.0, 8 steps, no"


@pytest.mark.dist
@pytest.mark.soak
def test_two_hosts_with_a_file_each_train_together(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    both = {"nnodes": 2, "main_address": "127.0.0.1", "main_port": port}
    launches = [start_accelerate(tmp_path, {"nproc": 1}, **both, node_rank=rank) for rank in range(2)]
    lines = [line for launch in launches for line in output_of(launch)]
    assert [line.split(", weight")[0] for line in lines] == [
        "rank 0 of 2, sum 2.0, 4 steps, no",
        "rank 1 of 2, sum 2.0, 4 steps, no",
    ]


def test_a_list_of_hosts_gets_a_file_each_with_the_address_of_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = accelerate_config(AccelerateOptions(hosts="localhost,bob", main_address="10.0.0.1", out="two.yaml"), TWO)
    own, other = (Path(f"two-{host}.yaml").read_text() for host in ("localhost", "bob"))
    assert own.replace("machine_rank: 0", "machine_rank: 1") == other
    assert "num_processes: 4" in own and "num_machines: 2" in own and 'main_process_ip: "10.0.0.1"' in own
    what = "4 processes on 2 hosts, GPU, DDP, mixed precision bf16"
    assert text.splitlines() == [
        f"wrote   two-localhost.yaml: {what}",
        "on localhost: accelerate launch --config_file two-localhost.yaml script.py",
        f"wrote   two-bob.yaml: {what}",
        "on bob: accelerate launch --config_file two-bob.yaml script.py",
        "copy    scp two-bob.yaml bob:",
    ]
    values = json.loads(
        accelerate_config(AccelerateOptions(hosts="localhost:1,bob:1", main_address="a", json=True), TWO)
    )
    assert [values[host]["machine_rank"] for host in ("localhost", "bob")] == [0, 1]
    assert values["bob"]["num_processes"] == 2
