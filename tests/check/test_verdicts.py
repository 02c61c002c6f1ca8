"""Every verdict on recorded facts: it fires on its fault, with its severity and a fix to paste, and is silent without it."""

import copy
import json
import runpy
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rows import with_rows

from paceline.check import ready
from paceline.check.ready import (
    SUBJECTS,
    CheckResult,
    Verdict,
    find_findings,
    format_host,
    format_passed,
    load_verdicts,
    machine_of,
    machine_of_hosts,
)
from paceline.check.verdicts.host_verdicts import NUM_NODES_NAMES
from paceline.check.verdicts.rules import Case, Intent, at
from paceline.config import Config
from paceline.errors import Finding
from paceline.launch.places import CONTRACTS
from paceline.plan.machine import HostLink

ROOT = Path(__file__).parents[2]
HOSTS = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "hosts").glob("*.json")}
GIB = 1 << 30
TRAIN = {"command": "train", "nproc": 2, "config": {"depth": 4, "keep_last": 2, "log_every": 10}, "num_steps": 300}
CUDA = {**TRAIN, "device": "cuda", "precision": "bf16", "need_gpu_bytes": 8 * GIB, "need_host_bytes": 4 * GIB}
CPU = {**TRAIN, "device": "cpu", "precision": "bf16", "need_host_bytes": 2 * GIB}
DISK = {**CPU, "checkpoint_bytes": 2 * GIB, "num_checkpoints": 4}
TWO_HOSTS = {**CUDA, "num_hosts": 2}
LOGIN = {"job_id": None, "seconds_left": None, "gpu_partitions": [{"name": "gpu", "nodes": 4, "nodes_up": 3}]}
ETH0 = "network.interfaces.1"
P2P = {"gpus.0.p2p": {"1": True}, "gpus.1.p2p": {"0": True}}
FULL = {"storage.run_dir.free_bytes": 0, "storage.run_dir.writable": False,
        "storage.run_dir.error": "No space left on device"}  # fmt: skip
TOKENIZER = {"path": "books.json", "exists": True, "vocab_size": 32_768, "error": None}
FOREIGN_LIBRARY = [{"name": "libc10.so", "path": "/opt/old/lib/libc10.so", "expected": False, "version": None}]
ADA = {"gpus.0.capability": [8, 9], "gpus.1.capability": [8, 9]}
PASCAL = {"gpus.0.capability": [6, 1], "gpus.1.capability": [6, 1]}
STARVED = {"ok": False, "seconds": 20.0, "error": "still computing after 20 s"}
SMALL_CACHE = {"text.prepared": False, "text.bytes": 100 << 20, "text.vocab_size": 32_768}
PREPARED = {"text.prepared": True, "text.data": "a.txt", "text.folder": "made", "text.prepared_bytes": 2 * GIB}
HUB = {"name": "owner/name", "endpoint": "https://huggingface.co", "missing_packages": [], "cached": False, "status": 200,
       "seconds": 0.1, "error": None}  # fmt: skip
DESKTOP = {"pid": 900, "name": "Xorg", "used_bytes": 11 * GIB}
CLASH = "expandable_segments:True,max_split_size_mb:128"
OUTSIDE = {"pid": 900, "name": None, "used_bytes": 11 * GIB}  # in a container: the pid is one of the host
HELD = [{"pid": 4711, "name": "python train.py", "used_bytes": 30 * GIB}]

# id, host, changes of its facts, intent, severity
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    ("torch-missing", "workstation", {"torch": None}, CUDA, "stop"),
    ("torch-broken", "workstation", {"torch.error": "ImportError: libcudart.so.12: cannot open"}, CUDA, "stop"),
    ("torch-broken", "cpu_box", {"torch.error": "no answer in 28 s"}, CPU, "warn"),
    ("torch-broken", "cpu_box", {"torch.error": "compile: ImportError: no triton"}, CPU, "warn"),
    ("torch-broken", "cpu_box", {"torch.error": "OSError: undefined symbol", "torch.shadowing": ["/old/libc10.so"]}, CPU, "stop"),
    ("torch-old", "workstation", {"torch.version": "2.6.0+cu124"}, CUDA, "stop"),
    ("torch-old", "workstation", {"torch.version": "2.6.0+cu124"}, {"command": "run"}, "warn"),
    ("torch-cpu-build", "workstation", {"torch.cuda": None, "torch.archs": []}, CUDA, "stop"),
    ("torch-cpu-build", "workstation", {"torch.cuda": None, "torch.archs": []}, CPU, "note"),
    ("torch-cpu-build", "workstation", {"torch.cuda": None, "torch.archs": []}, {"command": "run", "device": "cuda"}, "warn"),
    ("torch-no-kernels", "workstation", {"torch.archs": ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]}, CUDA, "stop"),
    ("driver-old", "workstation", {"driver.version": "470.256.02", "torch.cuda_available": False}, CUDA, "stop"),
    ("driver-old", "workstation", {"torch.cuda": "13.0", "torch.cuda_available": False}, CUDA, "stop"),
    ("torch-no-cuda", "workstation", {"torch.cuda_available": False, "torch.cuda_error": "CUDA unknown error"}, CUDA, "stop"),
    ("torch-no-libuv", "cpu_box", {"torch.libuv": False}, CPU, "warn"),
    ("torch-no-libuv", "cpu_box", {"torch.libuv": False}, {**CPU, "num_hosts": 2}, "stop"),
    ("torch-no-backend", "workstation", {"torch.nccl_backend": False}, CUDA, "stop"),
    ("torch-no-backend", "cpu_box", {"torch.gloo": False}, CPU, "stop"),
    ("torch-no-backend", "cpu_box", {"torch.distributed": False}, CPU, "stop"),
    ("library-foreign", "cpu_box", {"torch.libraries": FOREIGN_LIBRARY, "env.LD_LIBRARY_PATH": "/opt/old/lib"}, CPU, "warn"),
    ("library-foreign", "cpu_box", {"torch.shadowing": ["/opt/old/lib/libc10.so"], "env.LD_LIBRARY_PATH": "/opt/old/lib"}, CPU,
     "warn"),
    ("libuv-mismatch", "cpu_box", {"torch.libuv_header": "1.48.0", "torch.libuv_library": "1.44.2"}, CPU, "warn"),
    ("torch-build-left", "cpu_box", {"torch.build_tree": {"path": "/src/build", "libraries_newer": ["libc10.so"]}}, CPU, "warn"),
    ("torch-debug", "cpu_box", {"torch.debug": True}, CPU, "warn"),
    ("nccl-mixed", "workstation", {"packages.nvidia-nccl-cu12": "2.21.5"}, CUDA, "warn"),
    ("torch-from-pythonpath", "cpu_box", {"torch.path": "/src/torch", "env.PYTHONPATH": "/src"}, CPU, "note"),
    ("gpu-missing", "cpu_box", {}, {"device": "cuda"}, "stop"),
    ("gpu-missing", "workstation",
     {"gpus.0.visible": False, "gpus.1.visible": False, "env.CUDA_VISIBLE_DEVICES": ""}, CUDA, "stop"),
    ("gpu-driver-silent", "workstation", {"nvml_error": "Driver/library version mismatch", "gpus": None}, CUDA, "stop"),
    ("gpu-driver-silent", "workstation", {"nvml_error": "GPU 1 does not answer", "gpus.1.name": None}, CUDA, "warn"),
    ("gpu-fewer", "workstation", {"gpus.1.visible": False, "env.CUDA_VISIBLE_DEVICES": "0"}, CUDA, "stop"),
    ("gpu-hidden", "workstation", {"gpus.1.visible": False, "env.CUDA_VISIBLE_DEVICES": "0"}, {"nproc": 1}, "note"),
    ("gpu-name-wrong", "workstation", {"env.CUDA_VISIBLE_DEVICES": "0,1,2"}, CUDA, "warn"),
    ("gpu-memory-held", "workstation", {"gpus.1.memory_free_bytes": 20 * GIB, "gpus.1.processes": HELD}, CUDA, "warn"),
    ("gpu-memory-held", "workstation", {"gpus.1.memory_free_bytes": 2 * GIB, "gpus.1.processes": HELD}, CUDA, "stop"),
    ("gpu-memory-held", "workstation", {"gpus.1.memory_free_bytes": 2 * GIB, "gpus.1.processes": []}, CUDA, "stop"),
    ("gpu-memory-short", "workstation", {"gpus.0.memory_total_bytes": 6 * GIB}, CUDA, "stop"),
    ("gpu-link-narrow", "workstation", {"gpus.1.pcie.width": 4}, CUDA, "warn"),
    ("gpu-p2p-lies", "workstation", {**P2P, "driver.version": "565.57"}, CUDA, "warn"),
    ("gpu-p2p-lies", "workstation", {**P2P, "network.iommu": True}, CUDA, "warn"),
    ("gpu-p2p-off", "server", {"env.NCCL_P2P_DISABLE": "1"}, CUDA, "warn"),
    ("gpu-mixed", "workstation", {"gpus.1.name": "NVIDIA GeForce RTX 3060"}, CUDA, "warn"),
    ("gpu-refuses-work", "workstation", {"gpus.0.compute_mode": "prohibited"}, CUDA, "stop"),
    ("gpu-mig", "server", {"gpus.3.mig": True}, CUDA, "warn"),
    ("gpu-ecc-errors", "server", {"gpus.3.ecc_errors": 2}, CUDA, "warn"),
    ("gpu-hot", "workstation", {"gpus.0.temperature_c": 91, "gpus.0.throttle": ["thermal"]}, CUDA, "warn"),
    ("gpu-power-limited", "workstation", {"gpus.0.power_limit_w": 400.0}, CUDA, "note"),
    ("precision-unsupported", "workstation", {"gpus.0.capability": [7, 5]}, CUDA, "stop"),
    ("precision-unsupported", "workstation", {"gpus.0.capability": [5, 2]}, {**CUDA, "precision": "fp16"}, "stop"),
    ("precision-unsupported", "workstation", {"gpus.1.capability": [8, 6]}, {**CUDA, "low_precision": "fp8"}, "stop"),
    ("precision-library-old", "workstation", {"torch.version": "2.13.0+cu126", "torch.cuda": "12.6"},
     {**CUDA, "low_precision": "nvfp4"}, "stop"),
    ("fp4-false-support", "workstation", {"packages.transformer-engine": "2.17.0"}, {"command": "run"}, "warn"),
    ("mxfp8-not-on-sm120", "workstation", {"packages.transformer-engine": "2.20.2"}, {"command": "run"}, "warn"),
    ("probe-failed", "cpu_box", {"probes.gpu": {"ok": False, "seconds": 5.0, "error": "no answer in 5 s"}}, CPU, "warn"),
    ("probe-failed", "cpu_box", {"probes.host": STARVED, "probes.python": STARVED, "probes.text": STARVED}, CPU, "warn"),
    ("memory-short", "cpu_box", {"host.memory.cgroup_limit_bytes": GIB, "host.memory.cgroup_used_bytes": 0}, CPU, "stop"),
    ("memory-held", "cpu_box", {"host.memory.available_bytes": GIB}, CPU, "stop"),
    ("memory-short", "cpu_box", {"host.memory.total_bytes": GIB, "host.memory.swap_total_bytes": 8 * GIB}, CPU, "warn"),
    ("memory-held", "cpu_box", {"host.memory.available_bytes": GIB, "host.memory.swap_total_bytes": 8 * GIB}, CPU, "warn"),
    ("memory-low", "cpu_box", {"host.memory.available_bytes": GIB}, {}, "note"),
    ("shm-small", "workstation", {"host.shm.free_bytes": 64 << 20}, CUDA, "warn"),
    ("shm-small", "workstation", {"host.shm.free_bytes": 1000}, CUDA, "stop"),
    ("shm-small", "workstation", {"host.shm.writable": False}, CUDA, "stop"),
    ("slurm-outside", "cpu_box", {"tools.slurm": LOGIN}, {}, "warn"),
    ("slurm-ends-soon", "workstation", {"tools.slurm": {**LOGIN, "job_id": 4711, "seconds_left": 300.0}}, CUDA, "warn"),
    ("nofile-low", "cpu_box", {"host.limits.nofile": [256, 4096]}, CPU, "warn"),
    ("nproc-low", "cpu_box", {"host.limits.nproc": [100, 4096]}, CPU, "warn"),
    ("memlock-low", "server", {"host.limits.memlock": [65536, 65536]}, TWO_HOSTS, "warn"),
    ("wsl", "workstation", {"host.wsl": True}, CUDA, "note"),
    ("container-no-gpus", "cpu_box", {"nvidia_cards": 2, "host.container": "docker"}, {}, "note"),
    ("cores-few", "cpu_box", {}, {**CPU, "nproc": 3}, "warn"),
    ("cpu-precision-emulated", "cpu_box", {"host.cpu.bf16": False}, CPU, "warn"),
    ("omp-threads", "cpu_box", {"env.OMP_NUM_THREADS": "16"}, CPU, "warn"),
    ("omp-threads", "cpu_box", {"env.OMP_NUM_THREADS": "16,2"}, CPU, "warn"),
    ("omp-threads-few", "cpu_box", {"env.OMP_NUM_THREADS": "1", "host.cpu.cores": 16}, CPU, "warn"),
    ("package-missing", "cpu_box", {"packages.psutil": None}, {"command": "run"}, "stop"),
    ("package-missing", "cpu_box", {"packages.safetensors": None, "packages.numpy": None}, CPU, "stop"),
    ("package-missing", "server", {"packages.nvidia-ml-py": None}, CUDA, "stop"),
    ("launcher-left", "cpu_box", {"env.RANK": "0", "env.WORLD_SIZE": "8"}, CPU, "warn"),
    ("debug-left", "workstation", {"env.CUDA_LAUNCH_BLOCKING": "1"}, CUDA, "warn"),
    ("async-errors-off", "workstation", {"env.TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, CUDA, "warn"),
    ("nccl-shm-off", "workstation", {"env.NCCL_SHM_DISABLE": "1"}, CUDA, "warn"),
    ("allocator-twice", "workstation", {"env.PYTORCH_ALLOC_CONF": "a:1", "env.PYTORCH_CUDA_ALLOC_CONF": "a:2"}, CUDA, "warn"),
    ("allocator-old-name", "workstation", {"env.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, CUDA, "note"),
    ("allocator-clash", "workstation",
     {"env.PYTORCH_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"}, CUDA, "warn"),
    ("compiler-missing", "cpu_box", {"tools.cxx": None}, {**CPU, "compile": True}, "stop"),
    ("compiler-missing", "workstation", {"packages.triton": None, "torch.compile_backend": None},
     {**CUDA, "compile": True}, "stop"),
    ("compiler-missing", "workstation", {"tools.cxx": None}, CUDA, "stop"),
    ("compiler-missing", "workstation", {"tools.python_headers": False}, {**CUDA, "compile": False}, "stop"),
    ("wandb-silent", "cpu_box", {"env.WANDB_PROJECT": "books"}, CPU, "warn"),
    ("wandb-silent", "cpu_box", {}, {**CPU, "trackers": ("tensorboard", "wandb")}, "warn"),
    ("folder-unwritable", "cpu_box",
     {"storage.run_dir.writable": False, "storage.run_dir.error": "Read-only file system"}, DISK, "stop"),
    ("disk-full", "cpu_box", {"storage.run_dir.free_bytes": 3 * GIB}, DISK, "stop"),
    ("disk-full", "cpu_box", FULL, {"command": "run"}, "stop"),
    ("disk-slow", "cpu_box", {"storage.run_dir.write_bytes_per_s": 8e6}, DISK, "warn"),
    ("disk-no-inodes", "cpu_box", {"storage.run_dir.free_inodes": 12}, DISK, "warn"),
    ("cache-on-network", "cpu_box", {"storage.cache.network": True, "storage.cache.filesystem": "nfs4"}, CPU, "note"),
    ("cache-full", "cpu_box", {**SMALL_CACHE, "storage.cache.free_bytes": 20 << 20}, CPU, "stop"),
    ("tmp-small", "cpu_box", {"storage.tmp.free_bytes": 1 << 20}, CPU, "warn"),
    ("text-missing", "cpu_box", {"text.data": "books", "text.exists": False}, CPU, "stop"),
    ("text-package-missing", "cpu_box", {"text.hub": {**HUB, "missing_packages": ["datasets"]}}, CPU, "stop"),
    ("text-hub-silent", "cpu_box", {"text.hub": {**HUB, "status": None, "error": "HF_HUB_OFFLINE is set"}}, CPU, "stop"),
    ("text-hub-unknown", "cpu_box", {"text.hub": {**HUB, "status": 404}}, CPU, "warn"),
    ("text-unreadable", "cpu_box", {"text.data": "books", "text.error": "Permission denied"}, CPU, "stop"),
    ("text-unreadable", "cpu_box", {"text.exists": None, "text.error": "Permission denied"}, CPU, "stop"),
    ("text-empty", "cpu_box", {"text.data": "books", "text.bytes": 0}, CPU, "stop"),
    ("tokenizer-missing", "cpu_box", {"text.tokenizer": {**TOKENIZER, "exists": False}}, CPU, "stop"),
    ("vocabulary-differs", "cpu_box", {"text.tokenizer": TOKENIZER},
     {**CPU, "config": {"vocab_size": 4096}, "set_keys": frozenset({"vocab_size"})}, "warn"),
    ("text-not-prepared", "cpu_box", {"text.prepared": False, "text.data": "books"}, {"command": "check"}, "note"),
    ("text-of-other-types", "cpu_box",
     {"text.data": "books", "text.bytes": 9, "text.num_others": 1, "text.others": ["a.log"]}, {"command": "check"}, "note"),
    ("host-unreachable", "cpu_box", {"connection": {"destination": "ada", "error": "no key", "fix": "ssh ada"}}, CPU, "stop"),
    ("name-unknown", "cpu_box", {"network.resolve_error": "Name or service not known"}, {"command": "run"}, "warn"),
    ("name-unknown", "server", {"network.resolve_error": "Name or service not known"}, TWO_HOSTS, "note"),
    ("name-loopback", "cpu_box", {"network.addresses": ["127.0.1.1"]}, {"command": "run"}, "warn"),
    ("name-loopback", "server", {"network.addresses": ["127.0.1.1"]}, TWO_HOSTS, "note"),
    ("name-slow", "cpu_box", {"network.resolve_s": 4.0}, CPU, "warn"),
    ("interface-missing", "cpu_box", {"env.GLOO_SOCKET_IFNAME": "eth9"}, CPU, "stop"),
    ("interface-missing", "workstation", {"env.NCCL_SOCKET_IFNAME": "=eth"}, CUDA, "stop"),
    ("interface-missing", "workstation", {"env.NCCL_SOCKET_IFNAME": "eth", f"{ETH0}.up": False}, CUDA, "stop"),
    ("interface-missing", "cpu_box", {"env.NCCL_SOCKET_IFNAME": "ib0"}, CPU, "warn"),
    ("interface-missing", "workstation", {"env.GLOO_SOCKET_IFNAME": "eth9"}, {"command": "run"}, "warn"),
    ("interface-wrong", "server", {"env.NCCL_SOCKET_IFNAME": "lo"}, TWO_HOSTS, "stop"),
    ("interface-absent", "server", {f"{ETH0}.up": False}, {**TWO_HOSTS, "config": {"interface": "eth0"}}, "stop"),
    ("interface-absent", "server", {f"{ETH0}.addresses": ["192.168.1.4"]},
     {**TWO_HOSTS, "config": {"interface": "10.0.0.0/24"}}, "stop"),
    ("infiniband-off", "server", {"env.NCCL_IB_DISABLE": "1"}, TWO_HOSTS, "warn"),
    ("infiniband-down", "server", {"network.ib_devices.0.state": "DOWN"}, TWO_HOSTS, "note"),
    ("port-taken", "cpu_box",
     {"network.ports": [{"port": 29500, "free": False, "error": "Address already in use", "holder": {"pid": 7, "name": "x"}}],
      "network.free_port": 29501}, {"port": 29500}, "stop"),
    ("port-ephemeral", "cpu_box", {}, {"port": 40000}, "note"),
    ("plan-refused", "cpu_box", {}, {"refused": ("n_kv_head 3 does not divide 2 heads", "one of 1, 2")}, "stop"),
    ("batch-indivisible", "cpu_box", {},
     {**CPU, "total_batch_size": 1000, "device_batch_size": 3, "sequence_len": 256}, "stop"),
    ("interval-long", "cpu_box", {}, {**CPU, "config": {"eval_every": 500}, "set_keys": frozenset({"eval_every"})}, "note"),
    ("log-rare", "cpu_box", {}, {**CPU, "config": {"log_every": 500}, "set_keys": frozenset({"log_every"})}, "warn"),
    ("save-never", "cpu_box", {},
     {**CPU, "num_steps": 5000, "config": {"save_every": 0}, "set_keys": frozenset({"save_every"})}, "warn"),
    ("warmup-long", "cpu_box", {}, {**CPU, "config": {"warmup_steps": 200}, "set_keys": frozenset({"warmup_steps"})}, "note"),
    ("length-twice", "cpu_box", {},
     {**CPU, "config": {"num_steps": 300, "tokens_per_param": 8.0}, "set_keys": frozenset({"num_steps", "tokens_per_param"})},
     "note"),
    ("warmdown-none", "cpu_box", {},
     {**CPU, "config": {"final_lr_frac": 0.1, "warmdown_ratio": 0}, "set_keys": frozenset({"final_lr_frac"})}, "note"),
    ("checkpointing-on-cpu", "cpu_box", {},
     {**CPU, "config": {"activation_checkpointing": True}, "set_keys": frozenset({"activation_checkpointing"})}, "note"),
    ("key-idle", "cpu_box", {},
     {**CPU, "config": {"optimizer": "adamw", "weight_decay": 0.1}, "set_keys": frozenset({"weight_decay"})}, "note"),
    ("rate-zero", "cpu_box", {}, {**CPU, "config": {"matrix_lr": 0.0}}, "warn"),
    ("epochs-many", "cpu_box", {}, {**CPU, "epochs": 40.0}, "note"),
    ("epochs-many", "cpu_box", {"text.bytes": 117_000 * 4}, {**CPU, "total_batch_size": 12_288}, "note"),
    ("epochs-many", "cpu_box", {"text.bytes": 1e9, "text.num_tokens": 117_000}, {**CPU, "total_batch_size": 12_288}, "note"),
]  # fmt: skip

# id, what is changed on the second host
LINK = {
    "to": "node1", "address": "10.0.0.11", "local": "10.0.0.2", "port": 40001, "rtt_us": 90.0, "bits_per_s": 9e10,
    "back_bits_per_s": 9e10, "mtu": 1500, "tried": [], "error": None,
}  # fmt: skip
FAST_ETH0 = {f"{ETH0}.speed_mbps": 10_000, f"{ETH0}.addresses": ["10.0.0.2"]}
PAIRS: list[tuple[str, dict[str, Any]]] = [
    ("hosts-unconnected", {"links": [{**LINK, "bits_per_s": None, "error": "connect", "reason": "timed out"}]}),
    ("hosts-path-mtu", {"links": [{**LINK, "bits_per_s": None, "error": "large"}]}),
    ("hosts-link-slow", {"links": [{**LINK, "bits_per_s": 9e8}], **FAST_ETH0}),
    ("hosts-link-slow", {"links": [{**LINK, "bits_per_s": 9.4e9, "back_bits_per_s": 1e9}], **FAST_ETH0}),
    ("hosts-link-slow", {"links": [{**LINK, "bits_per_s": 1.04e10, "back_bits_per_s": 1e7}]}),
    ("hosts-link-slow", {"links": [{**LINK, "bits_per_s": 9.4e7, "back_bits_per_s": 9.4e7}]}),
    ("hosts-link-indirect", {"links": [LINK], f"{ETH0}.kind": "wifi", f"{ETH0}.addresses": ["10.0.0.2"]}),
    ("hosts-link-far", {"links": [{**LINK, "rtt_us": 9000.0}]}),
    ("hosts-address", {"links": [{**LINK, "tried": ["100.64.0.1"]}]}),
    ("hosts-store-port", {"links": [{**LINK, "store_port": 29400, "store_error": "timed out"}]}),
    ("hosts-memory", {"gpus.1.memory_total_bytes": 80 << 30}),
    ("hosts-mtu", {"links": [LINK], f"{ETH0}.mtu": 9000, f"{ETH0}.addresses": ["10.0.0.2"]}),
    ("hosts-gpus", {"gpus": []}),
    ("hosts-same", {"host.name": "node1"}),
    ("hosts-torch", {"torch.version": "2.12.1+cu128"}),
    ("hosts-nccl", {"torch.nccl": "2.26.2"}),
    ("hosts-cuda", {"torch.cuda": "13.0"}),
    ("hosts-driver", {"driver.version": "570.86.10"}),
    ("hosts-python", {"python.version": "3.12.3"}),
    ("hosts-packages", {"packages.tokenizers": "0.20.0"}),
    ("hosts-settings", {"env.NCCL_P2P_DISABLE": "1"}),
    ("hosts-gpus", {"gpus.1.name": "NVIDIA H100 80GB HBM3"}),
    ("hosts-clock", {"links": [{**LINK, "clock_s": -4.2}]}),
    ("clock-free", {"host.clock.synchronized": False}),
    ("hosts-mtu", {f"{ETH0}.mtu": 9000}),
]


def changed(facts: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The facts with other values at some paths; a list's member by its number."""
    facts = copy.deepcopy(facts)
    for path, value in changes.items():
        *way, last = path.split(".") if not path.startswith("packages.") else ["packages", path[len("packages.") :]]
        place: Any = facts
        for name in way:
            place = place[int(name)] if isinstance(place, list) else place[name]
        place[int(last) if isinstance(place, list) else last] = value
    return facts


def two_servers(changes: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Two equal servers, but for these changes of the second."""
    return [HOSTS["server"], changed(HOSTS["server"], {"host.name": "node2", **(changes or {})})]


def findings_of(id: str, hosts: list[dict[str, Any]], intent: dict[str, Any]) -> list[Finding]:
    return [finding for finding in find_findings(hosts, Intent(**intent)) if finding.id == id]


def test_too_few_threads_cost_as_many_times_as_cores_stay_idle():
    for cores, times in ((2, 2), (16, 16)):
        host = changed(HOSTS["cpu_box"], {"env.OMP_NUM_THREADS": "1", "host.cpu.cores": cores})
        [finding] = findings_of("omp-threads-few", [host], {**CPU, "nproc": 1})
        assert (
            finding.what
            == f"OMP_NUM_THREADS=1 for one process, on {cores} cores: a step may take up to {times} times as long"
        )


@with_rows("case", CASES)
def test_a_verdict_fires_on_its_fault_and_is_silent_without_it(case):
    id, host, changes, intent, severity = case
    [first, *_] = findings_of(id, [changed(HOSTS[host], changes)], intent)
    assert first.severity == severity
    assert first.what and first.why and first.fix
    assert first.host == HOSTS[host]["host"]["name"]
    healthy_ask = intent if changes else {"device": "cpu", "nproc": 2}  # where the fault lies in what was asked
    assert findings_of(id, [HOSTS[host]], healthy_ask) == []


@with_rows("case", PAIRS)
def test_a_difference_between_hosts_is_reported_with_both(case):
    id, changes = case
    [finding] = findings_of(id, two_servers(changes), TWO_HOSTS)
    assert finding.host is None
    assert "node1" in finding.what or "node2" in finding.what
    assert findings_of(id, two_servers(), TWO_HOSTS) == []


def test_clocks_that_nothing_keeps_are_one_finding_and_none_where_they_were_compared():
    hosts = [
        changed(HOSTS["server"], {"host.name": name, "host.clock.synchronized": False}) for name in ("node1", "node2")
    ]
    [finding] = findings_of("clock-free", hosts, TWO_HOSTS)
    assert finding.what == "no time service keeps the clocks of node1 and node2"
    assert finding.fix == "sudo timedatectl set-ntp true, on node1 and node2"
    hosts[1]["links"] = [{**LINK, "clock_s": 0.001}]
    assert findings_of("clock-free", hosts, TWO_HOSTS) == []


@pytest.mark.parametrize("number, free, text, severity, needs", [
    (3, 0, {}, "stop", ", its part of a checkpoint needs about 1.0 GiB"),
    (3, 20 << 20, SMALL_CACHE, "stop", ", the text needs about 50.0 MiB, its part of a checkpoint needs about 1.0 GiB"),
    (3, GIB, PREPARED, "warn", ", the text needs about 2.0 GiB, its part of a checkpoint needs about 1.0 GiB"),
    (3, GIB, {**PREPARED, "text.folder": "there"}, None, ""),
    (3, GIB // 2, {}, "warn", ", its part of a checkpoint needs about 1.0 GiB"),
    (3, GIB, {}, None, ""),
    (2, 8 * GIB, {}, "warn", ", whole checkpoints need about 9.0 GiB"),
    (2, 9 * GIB, {}, None, ""),
])  # fmt: skip
def test_the_cache_of_another_host_has_room_for_the_text_and_its_checkpoints(number, free, text, severity, needs):
    path = "/data/my cache/paceline"
    place = {**HOSTS["server"]["storage"]["cache"], "path": path, "free_bytes": free, "writable": free > 0}
    there = {"storage.cache": place, "storage.run_dir": None, "text": None, "host.name": "node2",
             "storage.texts": ["there"], "connection": {"destination": "ann@bob", "here": False}}  # fmt: skip
    hosts = [changed(HOSTS["server"], text)] * (number - 1) + [changed(HOSTS["server"], there)]
    intent = {**TWO_HOSTS, "num_hosts": number, "checkpoint_bytes": 3 * GIB, "num_checkpoints": 3}
    findings = [*findings_of("cache-full", hosts, intent), *findings_of("folder-unwritable", hosts, intent)]
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    for finding in findings:
        assert finding.host == "node2" and finding.what.startswith(f"the cache {path} has ")
        assert finding.what.endswith(f" free{needs}")
        assert finding.fix.startswith("""ssh ann@bob 'du -sh '"'"'/data/my cache/paceline'"'"'/*' shows what may go""")


@pytest.mark.parametrize(
    "there, back, what",
    [
        (1.04e10, 1e7, "node1 sends 10 Mb/s to node2, which sends 10.40 Gb/s back"),
        (1e7, 1.04e10, "node2 sends 10 Mb/s to node1, which sends 10.40 Gb/s back"),
        (9.4e7, 9.3e7, "node2 sends 94 Mb/s to node1"),
    ],
)
def test_a_link_that_is_slow_or_uneven_needs_no_speed_of_interfaces(there, back, what):
    link = {**LINK, "bits_per_s": there, "back_bits_per_s": back}
    pair = two_servers({"links": [link], f"{ETH0}.addresses": ["10.0.0.2"], f"{ETH0}.kind": "veth"})
    [finding] = findings_of("hosts-link-slow", pair, TWO_HOSTS)
    assert finding.what == what
    assert finding.fix.startswith("ethtool eth0 and tc qdisc show dev eth0, on both")


@with_rows("host, intent", [
    ("cpu_box", {}), ("cpu_box", CPU), ("cpu_box", DISK), ("cpu_box", {"command": "run"}), ("cpu_box", {"port": 29500}),
    ("workstation", {}), ("workstation", CUDA), ("workstation", CPU), ("workstation", {"command": "run"}),
    ("server", {}), ("server", {**CUDA, "nproc": 8}), ("server", TWO_HOSTS),
])  # fmt: skip
def test_a_healthy_machine_has_no_findings(host, intent):
    assert find_findings([HOSTS[host]], Intent(**intent)) == []


# what was once reported wrongly or with a harmful fix: id, host, changes, intent, severity and fix or None
HEALTHY: list[tuple[str, str, dict[str, Any], dict[str, Any], tuple[str, str] | None]] = [
    # NVIDIA's forward compatibility package runs a newer CUDA on an older driver
    ("driver-old", "server", {"driver.version": "535.161.08", "torch.cuda": "13.0"}, CUDA, None),
    ("torch-no-kernels", "workstation", {"torch.archs": ["sm_90", "compute_90"]}, CUDA, None),
    ("torch-no-kernels", "workstation", {"torch.archs": ["sm_86"], **ADA}, CUDA, None),
    ("precision-unsupported", "workstation", {**PASCAL}, {**CUDA, "precision": "fp16"}, None),
    ("compiler-missing", "workstation", {"packages.triton": None}, {**CUDA, "compile": True}, None),
    ("compiler-missing", "workstation", {"tools.cxx": None},
     {**CUDA, "compile": False, "config": {"depth": 4, "window_pattern": "L"}}, None),
    ("disk-full", "cpu_box", {"storage.run_dir.free_bytes": 3 * GIB},
     {**DISK, "config": {"keep_last": 2, "save_every": 0}}, None),
    ("disk-full", "cpu_box", {"storage.run_dir.free_bytes": 3 * GIB}, {**DISK, "saved_checkpoints": 3}, None),
    ("disk-full", "cpu_box", {"storage.run_dir.free_bytes": 3 * GIB}, {**DISK, "saved_checkpoints": 9}, None),
    ("disk-full", "cpu_box", FULL, {"command": "run", "resumes": True},
     ("stop", "mkdir -p ~/runs && cp -r /home/ada/runs ~/runs/runs && paceline resume ~/runs/runs")),
    ("disk-full", "cpu_box", {"storage.run_dir.free_bytes": 3 * GIB},
     {**DISK, "saved_checkpoints": 1, "config": {"keep_last": 3}}, ("stop", "--keep-last 1")),
    *(("disk-full", "cpu_box", {"storage.run_dir.free_bytes": GIB, "storage.cache.free_bytes": room * GIB},
       {**DISK, "resumes": True, "saved_checkpoints": 3}, ("stop", fix))
      for room, fix in ((8, "mkdir -p ~/runs && cp -r /home/ada/runs ~/runs/runs && paceline resume ~/runs/runs"), (7, "df -h"))),
    ("folder-unwritable", "cpu_box", FULL, {"command": "run"}, None),
    ("shm-small", "workstation", {"host.shm.writable": False, "host.shm.free_bytes": 0}, CUDA,
     ("stop", "mount -o remount,size=8G /dev/shm")),
    ("folder-unwritable", "cpu_box", {"storage.run_dir.writable": False}, DISK, ("stop", "--runs-dir ~/runs")),
    ("folder-unwritable", "cpu_box", {"storage.run_dir.writable": False}, {**DISK, "resumes": True},
     ("stop", "mkdir -p ~/runs && cp -r /home/ada/runs ~/runs/runs && paceline resume ~/runs/runs")),  # another user's
    ("folder-unwritable", "cpu_box", {"storage.cache.writable": False, "storage.cache.path": "/data/cache"}, CPU,
     ("warn", "--cache-dir ~/.cache/paceline")),
    ("folder-unwritable", "cpu_box", {"storage.cache.writable": False}, CPU, ("warn", "--cache-dir DIR in a place you can write")),
    ("omp-threads-few", "workstation", {"env.OMP_NUM_THREADS": "1"}, CUDA, None),
    ("debug-left", "cpu_box", {"env.TORCH_SHOW_CPP_STACKTRACES": "1"}, CPU, None),
    ("driver-old", "workstation", {"driver.version": "570.133.07", "torch.cuda": "13.0", "torch.cuda_available": False}, CUDA,
     ("stop", "pip install --force-reinstall torch -i https://download.pytorch.org/whl/cu128")),
    ("torch-broken", "cpu_box", {"torch.error": "OSError: undefined symbol", "torch.shadowing": ["/old/libc10.so"]}, CPU,
     ("stop", "unset LD_LIBRARY_PATH LD_PRELOAD")),
    ("torch-broken", "cpu_box", {"torch.error": "ValueError: Invalid log settings: zzz, must be a comma separated list"}, CPU,
     ("stop", "unset TORCH_LOGS")),
    ("gpu-memory-held", "workstation", {"gpus.1.memory_free_bytes": 20 * GIB, "gpus.1.processes": HELD}, CUDA,
     ("warn", "kill 4711")),
    ("gpu-memory-held", "workstation", {"gpus.1.memory_free_bytes": 20 * GIB, "gpus.1.processes": [DESKTOP]}, CUDA,
     ("warn", "export CUDA_VISIBLE_DEVICES=0")),
    ("gpu-memory-held", "workstation", {"gpus.1.memory_free_bytes": 20 * GIB, "gpus.1.processes": [OUTSIDE]}, CUDA,
     ("warn", "export CUDA_VISIBLE_DEVICES=0")),
    ("cache-full", "cpu_box", {**SMALL_CACHE, "storage.cache.free_bytes": 40 << 20}, {**CPU, "config": {"cache_dir": "c"}},
     ("warn", "--cache-dir ~/.cache/paceline")),
    ("cache-full", "cpu_box", {**SMALL_CACHE, "storage.cache.free_bytes": 50 << 20}, CPU, None),
    ("cache-full", "cpu_box", {**SMALL_CACHE, "storage.cache.free_bytes": 0, "text.prepared": True}, CPU, None),
    ("text-unreadable", "cpu_box", {"text.error": "no text in it", "text.near": "hf:d"}, CPU, ("stop", "--data hf:d")),
    ("text-missing", "cpu_box", {"text.val": {"data": "held", "exists": False}}, CPU, ("stop", "--val-data auto")),
    ("text-unreadable", "cpu_box", {"text.val": {"data": "held", "error": "?", "near": "h"}}, CPU, ("stop", "--val-data h")),
    ("text-empty", "cpu_box", {"text.val": {"data": "held", "exists": True, "bytes": 0}}, CPU, ("stop", "--val-data auto")),
    ("text-not-prepared", "cpu_box", {"text.prepared": False, "text.data": "books", "text.error": "all its text files are empty"},
     {"command": "check"}, None),
    ("text-not-prepared", "cpu_box", {**SMALL_CACHE, "storage.cache.free_bytes": 0}, {"command": "check"}, None),
    ("text-missing", "cpu_box", {"text.exists": False, "text.near": "~/books"}, CPU, ("stop", "--data ~/books")),
    ("text-hub-silent", "cpu_box", {"text.hub": {**HUB, "cached": True, "status": None, "error": "no answer"}}, CPU, None),
    ("text-hub-unknown", "cpu_box", {"text.hub": HUB}, CPU, None),
    ("text-hub-silent", "cpu_box", {"text.hub": {**HUB, "status": None, "error": "HF_HUB_OFFLINE is set"}}, CPU,
     ("stop", "unset HF_HUB_OFFLINE")),
    ("allocator-old-name", "workstation", {"env.PYTORCH_CUDA_ALLOC_CONF": CLASH}, CUDA, None),
    ("allocator-clash", "workstation", {"env.PYTORCH_CUDA_ALLOC_CONF": CLASH}, CUDA,
     ("warn", "export PYTORCH_ALLOC_CONF=expandable_segments:True; unset PYTORCH_CUDA_ALLOC_CONF")),
    *((id, "cpu_box", {"env.PYTORCH_CUDA_ALLOC_CONF": CLASH, "env.PYTORCH_ALLOC_CONF": "backend:native"}, CPU, None)
      for id in ("allocator-twice", "allocator-old-name", "allocator-clash")),
    *(("launcher-left", "cpu_box", {f"env.{name}": "2", "env.MASTER_ADDR": "ada", "env.MASTER_PORT": "29400"}, CPU, None)
      for name in ("NNODES", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")),
    ("launcher-left", "cpu_box", {"env.NNODES": "1", "env.MASTER_ADDR": "ada"}, CPU, ("warn", "unset MASTER_ADDR")),
    ("wandb-silent", "cpu_box", {"connection": {"here": False, "error": None}}, {**CPU, "trackers": ("wandb",)}, None),
    # Slurm starts the job again
    ("slurm-ends-soon", "workstation",
     {"tools.slurm": {**LOGIN, "job_id": 4711, "seconds_left": 300.0, "requeues": True}}, CUDA, None),
    ("memory-held", "cpu_box", {"host.memory.available_bytes": GIB}, CPU,
     ("stop", "ps -eo pid,rss,args --sort=-rss | head")),  # a browser holds it
]  # fmt: skip


@with_rows("case", HEALTHY)
def test_a_fix_does_no_harm_and_a_healthy_variant_has_no_finding(case):
    id, host, changes, intent, expected = case
    findings = findings_of(id, [changed(HOSTS[host], changes)], intent)
    assert [(finding.severity, finding.fix) for finding in findings] == ([expected] if expected else [])


def test_checkpoints_that_are_there_need_no_more_room():
    hosts = [changed(HOSTS["cpu_box"], {"storage.run_dir.free_bytes": 3 * GIB})]
    for saved, needs in (
        (0, "4 checkpoints of 2.0 GiB need 8.0 GiB"),
        (2, "2 more checkpoints of 2.0 GiB need 4.0 GiB"),
    ):
        [finding] = findings_of("disk-full", hosts, {**DISK, "saved_checkpoints": saved})
        assert finding.what.endswith(f" has 3.0 GiB free, {needs}")


@pytest.mark.parametrize("id, changes, severity, fix", [
    ("hosts-torch", {"torch.version": "2.9.0+cu126"}, "stop",
     "pip install torch==2.13.0 -i https://download.pytorch.org/whl/cu128"),
    ("hosts-torch", {"torch.version": "2.13.0+cu126"}, "warn",
     "pip install torch==2.13.0 -i https://download.pytorch.org/whl/cu128"),
    ("hosts-packages", {"packages.tokenizers": "0.9.4"}, "warn", "pip install tokenizers==0.23.3"),
    ("hosts-python", {"python.version": "3.9.1"}, "warn", "python3.11 -m venv .venv"),
])  # fmt: skip
def test_the_fix_brings_hosts_to_the_newest_version(id, changes, severity, fix):
    [finding] = findings_of(id, two_servers(changes), TWO_HOSTS)
    assert (finding.severity, finding.fix) == (severity, fix)


BOB = {"host.name": "bob", "connection": {"destination": "me@bob", "here": False, "error": None, "fix": None}}
ON_BOB = "ssh me@bob /home/ada/venv/bin/python -m pip install"


@pytest.mark.parametrize("id, changes, fix", [
    ("package-missing", {"packages.numpy": None, "packages.psutil": None}, f"{ON_BOB} psutil numpy"),
    ("torch-missing", {"torch": None}, f"{ON_BOB} torch -i https://download.pytorch.org/whl/cu126"),
    ("hosts-torch", {"torch.version": "2.12.1+cu128"}, f"{ON_BOB} torch==2.13.0 -i https://download.pytorch.org/whl/cu128"),
    ("hosts-nccl", {"torch.nccl": "2.26.2"}, f"{ON_BOB} --force-reinstall torch"),
    ("hosts-packages", {"packages.tokenizers": "0.9.4"}, f"{ON_BOB} tokenizers==0.23.3"),
])  # fmt: skip
def test_what_another_host_lacks_is_installed_by_ssh_for_its_interpreter(id, changes, fix):
    second = changed(HOSTS["server"], {**BOB, **changes})
    assert [finding.fix for finding in findings_of(id, [HOSTS["server"], second], TWO_HOSTS)] == [fix]


def test_the_variables_by_which_nodes_join_are_those_of_the_contracts():
    by_master = {contract.num_nodes for contract in CONTRACTS if "MASTER_ADDR" in contract.addresses}
    assert by_master == set(NUM_NODES_NAMES)


def test_hosts_with_and_without_gpus_are_refused_unless_the_cpu_is_asked_for():
    pair = two_servers({"gpus": []})
    [finding] = findings_of("hosts-gpus", pair, TWO_HOSTS)
    assert finding.severity == "stop" and "no GPU on node2" in finding.what
    assert findings_of("hosts-gpus", pair, {**CPU, "num_hosts": 2, "config": {"device": "cpu"}}) == []


def test_a_firewall_that_opens_the_range_alone_is_told_from_one_that_opens_nothing():
    closed = {**LINK, "bits_per_s": None, "error": "connect", "reason": "timed out", "store_port": 29400}
    pair = two_servers({"links": [{**closed, "store_error": None}]})
    [finding] = findings_of("hosts-unconnected", pair, {**TWO_HOSTS, "config": {"ports": "29400-29500"}})
    assert finding.fix == "on each host: sudo sysctl -w net.ipv4.ip_local_port_range='29400 29500'"
    assert "gloo and NCCL listen on ports that the kernel chooses, from 32768 to 60999" in finding.what


def test_a_link_over_an_interface_that_is_absent_is_not_to_be_measured_again():
    unmeasured = {**LINK, "bits_per_s": None, "error": "probe", "reason": "no interface eth9"}
    pair = two_servers({"links": [unmeasured]})
    [finding] = findings_of("hosts-unconnected", pair, TWO_HOSTS)
    assert finding.fix == "repeat the check"
    absent = {**TWO_HOSTS, "config": {"interface": "eth9"}}
    assert findings_of("hosts-unconnected", pair, absent) == []
    assert [finding.host for finding in findings_of("interface-absent", pair, absent)] == ["node1", "node2"]


def test_what_the_config_of_several_hosts_lacks_is_said_once():
    pair = two_servers()
    rare = {**TWO_HOSTS, "config": {"log_every": 500}, "set_keys": frozenset({"log_every"})}
    assert [finding.host for finding in findings_of("log-rare", pair, rare)] == [None]
    assert [finding.host for finding in findings_of("log-rare", pair[:1], rare)] == ["node1"]


def test_the_port_of_the_store_must_be_free_on_the_host_of_rank_0():
    pair = two_servers()
    pair[0] = changed(pair[0], {"links": [{**LINK, "own_store_port": None, "to": "node2"}]})
    [finding] = findings_of("hosts-store-port", pair, {**TWO_HOSTS, "config": {"ports": "29400"}})
    assert finding.what.startswith("none of the ports 29400 is free on ")
    pair[1] = changed(pair[1], {"connection": {"here": True, "destination": "node2", "error": None, "fix": None}})
    assert findings_of("hosts-store-port", pair, {**TWO_HOSTS, "config": {"ports": "29400"}}) == []


def test_the_least_of_several_hosts_is_what_a_plan_is_made_for():
    links = [{**LINK, "to": "bob", "bits_per_s": 2.35e9, "back_bits_per_s": 0.94e9, "rtt_us": 110.0}]
    first = changed(HOSTS["workstation"], {"connection": {**BOB["connection"], "destination": "ada"}, "links": links})
    second = changed(HOSTS["workstation"], {**BOB, "gpus.1.visible": False, "host.cpu.cores": 4})
    machine = machine_of_hosts([first, second])
    assert (len(machine.gpus), machine.cpu_cores, machine.hosts, machine.names) == (1, 4, 2, ("ada", "bob"))
    assert machine.link == HostLink(("ada", "bob"), 0.94e9 / 8, 110e-6)
    assert machine_of_hosts([{"connection": {"error": "no ssh"}}]) is None


def test_the_fix_of_a_loopback_name_does_not_change_localhost(tmp_path):
    before = "127.0.0.1 localhost node1\n127.0.1.1 node1.lan node1\n"
    (tmp_path / "hosts").write_text(before)
    facts = changed(HOSTS["server"], {"network.addresses": ["127.0.0.1"]})
    [finding] = findings_of("name-loopback", [facts], TWO_HOSTS)
    fix = finding.fix.replace("/etc/hosts", str(tmp_path / "hosts"))
    subprocess.run(["bash", "-c", f'sudo() {{ "$@"; }}; {fix}'], check=True, stdout=subprocess.DEVNULL)
    lines = [line.split() for line in (tmp_path / "hosts").read_text().splitlines()]
    assert [line for line in lines if "node1" in line] == [["10.0.0.11", "node1"]]
    assert ["127.0.0.1", "localhost"] in lines


def test_unknown_facts_never_fire():
    blank = dict.fromkeys(HOSTS["cpu_box"])
    for intent in ({}, CPU, CUDA, DISK, TWO_HOSTS, {"command": "run", "port": 29500}):
        assert [f for f in find_findings([blank, blank], Intent(**intent)) if f.id not in ("cores-few",)] == []


def test_no_single_unknown_fact_breaks_a_verdict():
    for facts in HOSTS.values():
        for section, value in facts.items():
            find_findings([{**facts, section: None}], Intent(**TWO_HOSTS))
            for key in value if isinstance(value, dict) else ():
                find_findings([{**facts, section: {**value, key: None}}], Intent(**TWO_HOSTS))


def test_every_verdict_has_a_case_here():
    assert {verdict.id for verdict in load_verdicts()} == {case[0] for case in (*CASES, *PAIRS)}
    assert len(load_verdicts()) >= 40
    of_several = sum(verdict.subject == "hosts" for verdict in load_verdicts())
    assert (
        f"all {len(load_verdicts())} findings, {of_several} of them about several hosts"
        in (ROOT / "README.md").read_text()
    )


def test_every_rule_has_its_texts():
    rules = {
        name.replace("_", "-")
        for module in SUBJECTS.values()
        for name, member in vars(module).items()
        if getattr(member, "__annotations__", {}).get("return") == Iterator[Case]
    }
    assert rules == {verdict.id for verdict in load_verdicts()}


@with_rows("verdict", load_verdicts())
def test_the_texts_of_a_verdict_have_their_form(verdict: Verdict):
    assert verdict.cause.endswith(".") and verdict.fix.endswith((".", "!"))
    assert (not verdict.why.endswith(".") and verdict.why[0].islower()) or verdict.why.startswith(("NCCL", "CUDA"))


def test_stop_comes_before_warn_and_warn_before_note():
    facts = changed(HOSTS["cpu_box"], {"host.wsl": True, "torch.debug": True, "text.exists": False})
    assert [finding.severity for finding in find_findings([facts], Intent(**CPU))] == ["stop", "warn", "note"]


def test_evidence_holds_the_facts_it_follows_from():
    facts = changed(HOSTS["cpu_box"], {"host.limits.nofile": [256, 4096]})
    [finding] = findings_of("nofile-low", [facts], CPU)
    assert finding.evidence == {"host.limits.nofile": at(facts, "host.limits.nofile")}
    assert finding.fix == "ulimit -n 4096"


@pytest.mark.parametrize(
    ("id", "changes", "intent", "outside", "docker", "kubernetes"),
    [
        ("shm-small", {"host.shm.free_bytes": 1000}, CUDA, "mount -o remount", "--shm-size 8g", "emptyDir"),
        ("shm-small", {"host.shm.writable": False}, CUDA, "mount -o remount", "--shm-size 8g", "emptyDir"),
        ("nofile-low", {"host.limits.nofile": [256, 256]}, CUDA, "limits.conf", "--ulimit nofile", "LimitNOFILE"),
        ("memlock-low", {"host.limits.memlock": [65536] * 2}, TWO_HOSTS, "ulimit -l", "--ulimit memlock", "LimitMEMLOCK"),
    ],
)  # fmt: skip
def test_a_fix_inside_of_a_container_is_one_that_can_be_done_there(id, changes, intent, outside, docker, kubernetes):
    for container, part in ((None, outside), ("docker", docker), ("podman", docker), ("kubernetes", kubernetes)):
        facts = changed(HOSTS["server"], {**changes, "host.container": container})
        hosts = [facts, HOSTS["server"]] if intent is TWO_HOSTS else [facts]
        assert part in findings_of(id, hosts, intent)[0].fix


def test_the_page_of_checks_is_up_to_date():
    page = runpy.run_path(str(ROOT / "dev" / "checks_page.py"))["format_docs"]()
    assert (ROOT / "docs" / "checks.md").read_text() == page, "python dev/checks_page.py > docs/checks.md"


def test_the_line_of_a_host_has_the_versions_by_which_hosts_are_compared():
    line = format_host(HOSTS["workstation"])
    torch, driver = HOSTS["workstation"]["torch"], HOSTS["workstation"]["driver"]
    assert f"torch {torch['version']} (CUDA {torch['cuda']}, NCCL {torch['nccl']})" in line
    assert f"driver {driver['version']} (CUDA {driver['cuda']})" in line
    assert "CUDA" not in format_host(HOSTS["cpu_box"])


def test_the_checks_that_found_nothing_are_shown_with_the_facts_that_they_looked_at():
    facts = changed(HOSTS["cpu_box"], {"host.limits.nofile": [256, 4096]})
    lines = format_passed(CheckResult([facts], find_findings([facts], Intent(**CPU)))).splitlines()
    passed = {line.split()[1]: line for line in lines}
    assert "nofile-low" not in passed and "hosts-torch" not in passed
    assert passed["torch-no-libuv"].endswith("torch.libuv true, torch.libuv_error n/a")


def test_probes_that_a_busy_machine_keeps_waiting_are_one_finding():
    late = {f"probes.{name}": STARVED for name in ("gpu", "host", "text")}
    [finding] = findings_of("probe-failed", [changed(HOSTS["cpu_box"], late)], CPU)
    assert finding.what == "the gpu, host and text probes: still computing after 20 s, the machine is busy"


def test_a_host_of_which_no_probe_gave_an_answer_is_not_ready():
    failed = {f"probes.{name}": {"ok": False, "error": "Permission denied"} for name in HOSTS["cpu_box"]["probes"]}
    [finding] = findings_of("probe-failed", [changed(HOSTS["cpu_box"], failed) | {"torch": None}], CPU)
    assert (finding.severity, finding.what) == ("stop", "no probe gave an answer: Permission denied")


def check_of(monkeypatch, tmp_path, changes: dict[str, Any], **options: Any) -> CheckResult:
    def gather(probes=None, **request):
        facts = changed(HOSTS["cpu_box"], changes)
        return facts if probes is None else {name: facts[name] for name in ("version", *probes)}

    monkeypatch.setattr(ready, "gather_facts", gather)
    config = Config(device="cpu", runs_dir=str(tmp_path), text_field="body", vocab_size=300, cache_dir="my cache")
    machine = machine_of(HOSTS["cpu_box"])
    fixed: dict[str, Any] = {"set_keys": frozenset(), "port": None, "on_probe": lambda name: None}
    return ready.check_config(config, machine, **fixed, **options)


def test_a_driver_that_is_not_in_the_list_of_hosts_is_checked_for_text_and_folders(monkeypatch, tmp_path):
    changes = {"text.data": "books", "text.exists": False, "host.shm.total_bytes": 1}
    hosts = [changed(HOSTS["server"], {"connection": {"destination": name, "here": False}}) for name in ("ada", "bob")]
    findings = check_of(monkeypatch, tmp_path, changes, ask_hosts=lambda gather_here: hosts).findings
    assert [finding.id for finding in findings if finding.host == socket.gethostname()] == ["text-missing"]
    hosts[0] = changed(hosts[0], {"connection.here": True})
    findings = check_of(monkeypatch, tmp_path, changes, ask_hosts=lambda gather_here: hosts).findings
    assert "text-missing" not in [finding.id for finding in findings]


def test_a_finding_about_the_driver_has_its_name_beside_one_listed_host_too(monkeypatch, tmp_path):
    changes = {"text.data": "books", "text.exists": False}
    hosts = [changed(HOSTS["server"], {"connection": {"destination": "ada", "here": False}})]
    checked = check_of(monkeypatch, tmp_path, changes, ask_hosts=lambda gather_here: hosts)
    shown = ready.format_check(checked, verbose=False, coloured=False)
    assert f"{socket.gethostname()}: there is no text at books" in shown


def test_the_cache_is_checked_where_it_is_by_default_too(monkeypatch, tmp_path):
    requests: list[dict[str, Any]] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ready, "gather_facts", lambda **request: requests.append(request) or HOSTS["cpu_box"])
    fixed: dict[str, Any] = {"set_keys": frozenset(), "port": None, "on_probe": lambda name: None}
    ready.check_config(Config(device="cpu", text_field="body"), machine_of(HOSTS["cpu_box"]), **fixed)
    assert requests[0]["cache_dir"] == tmp_path / "paceline"
    assert requests[0]["text_field"] == "body"


def test_the_command_that_prepares_a_text_has_the_vocabulary_and_the_cache_of_the_config(monkeypatch, tmp_path):
    changes = {"text.data": "my books", "text.exists": True, "text.prepared": False, "text.vocab_size": 300}
    findings = check_of(monkeypatch, tmp_path, changes).findings
    fixes = [finding.fix for finding in findings if finding.id == "text-not-prepared"]
    assert fixes == [
        "paceline data prepare --data 'my books' --text-field body --vocab-size 300 --cache-dir 'my cache'"
    ]
