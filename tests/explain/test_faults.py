"""
Real failures of real ranks under real launchers: the explanation must have their cause and the rank where they began.

Each script of tests/explain/faults/ fails in one way. Its log is written during the test by the installed torch and launchers.
"""

import signal

import pytest
from failing import EVERY, NO_NETWORK, Fault, fail, small_disk

from paceline.explain.run_folder import explain

pytestmark = [pytest.mark.soak, pytest.mark.dist]
BAD_SAMPLE = "ValueError: sample 1841 has 3 fields"
CLOSED = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "RANK": "1", "WORLD_SIZE": "2"}  # nothing listens on port 9
BAD_NAME = CLOSED | {"MASTER_ADDR": "node-7.invalid"}
DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
LITTLE_MEMORY = ("memory", "memory.limit_in_bytes", "67108864")
FEW_PROCESSES = ("pids", "pids.max", "8")
DISK = "disk"

FAULTS = [
    Fault("exception_on_one", "user-code-exception", 1, BAD_SAMPLE),  # a traceback among the ranks
    Fault("exception_on_one", "user-code-exception", 1, BAD_SAMPLE, nproc=3),
    Fault("sigkill", "host-oom-killed", 1, "Signal 9"),
    Fault("healthy", "healthy", None, "training finished"),
    Fault("disk_full", "disk-full", 0, "unexpected pos", around=small_disk(DISK, "256k"), args=(DISK,)),
    Fault("ddp_unused", "ddp-unused-parameters", EVERY, "find_unused_parameters"),
    Fault("sigsegv", "sigsegv", 1, "Signal 11"),
    Fault("slow_rank", "collective-timeout-desync", 1, "Timed out waiting"),
    Fault("waits_for_a_signal", "preempted-sigterm", None, "got signal: 15", signal=signal.SIGTERM),
    Fault("exception_on_one", "user-code-exception", 1, BAD_SAMPLE, launcher="paceline"),
    Fault("unknown_flag", "config-error", EVERY, "unrecognized arguments"),
    Fault("joins", "master-unreachable", None, "timed out after", launcher="python", env=CLOSED),
    Fault("port_taken", "port-in-use", None, "EADDRINUSE", launcher="python"),
    Fault("module_missing", "import-error", EVERY, "No module named"),
    Fault("wrong_state_dict", "state-dict-mismatch", EVERY, "Missing key(s) in state_dict"),
    Fault("exceptions_on_two", "user-code-exception", 1, "KeyError"),
    Fault("collective_order", "collective-timeout-desync", 1, "Detected mismatch", env=DETAIL, nproc=3),
    Fault("accelerate_fit", "user-code-exception", 1, BAD_SAMPLE, launcher="accelerate", args=("raise",)),
    Fault("exception_on_one", "user-code-exception", 1, BAD_SAMPLE, nproc=3, launcher="torchrun static"),
    Fault("exception_on_one", "user-code-exception", 1, BAD_SAMPLE, launcher="torchrun tee"),
    Fault("sigkill", "host-oom-killed", 1, "Signal 9", nproc=3, launcher="torchrun tee"),
    Fault("exception_in_worker", "user-code-exception", 1, "KeyError: 'label'"),
    Fault("exception_while_handling", "dataset-missing", 1, "The above exception was the direct cause"),
    Fault("exit_without_a_word", "unknown", 1, "exitcode  : 3"),
    Fault("one_step_less", "collective-timeout-desync", EVERY, "by peer", also=("peer-died",)),
    Fault("double_free", "native-abort", 1, "Signal 6"),
    Fault("cgroup_out_of_memory", "host-oom-killed", 1, "Signal 9", limits=LITTLE_MEMORY),
    Fault("cannot_allocate", "host-oom-killed", 1, "can't allocate memory"),
    Fault("waits_for_a_signal", "keyboard-interrupt", None, "got signal: 2", signal=signal.SIGINT),
    Fault("waits_for_a_signal", "terminal-hangup", None, "got signal: 1", signal=signal.SIGHUP),
    Fault("stopped", "collective-timeout-desync", 1, "Timed out waiting", nproc=3),
    Fault("never_arrives", "collective-timeout-desync", 1, "wait timeout", nproc=3),
    Fault("monitored_barrier", "collective-timeout-desync", 1, "monitoredBarrier"),
    Fault("collective_order", "collective-timeout-desync", EVERY, "Timed out waiting"),
    Fault("collective_shapes", "collective-timeout-desync", EVERY, "mismatch in your code", also=("shape-mismatch",)),
    Fault(
        "collective_shapes",
        "collective-timeout-desync",
        1,
        "Detected mismatch",
        env=DETAIL,
        nproc=3,
        also=("shape-mismatch",),
    ),
    Fault("collective_sparse", "collective-bad-tensor", 1, "c10d::broadcast_"),
    Fault("no_process_group", "process-group-not-initialized", EVERY, "Default process group has not been initialized"),
    Fault("joins", "master-unreachable", None, "not known", launcher="python", env=BAD_NAME),
    Fault(
        "joins", "master-unreachable", None, "Network is unreachable", launcher="python", env=CLOSED, around=NO_NETWORK
    ),
    Fault("joins", "gloo-connect-failure", EVERY, "nosuch0", env={"GLOO_SOCKET_IFNAME": "nosuch0"}),
    Fault("joins", "libuv-missing", None, "built without libuv", package="libuv"),
    Fault(
        "hub_offline",
        "hub-offline",
        0,
        "offline mode is enabled",
        env={"HF_HUB_OFFLINE": "1"},
        package="huggingface_hub",
    ),
    Fault("disk_full_text", "disk-full", 1, "No space left", around=small_disk(DISK, "256k"), args=(DISK,)),
    Fault("truncated_checkpoint", "checkpoint-corrupt", 0, "PytorchStreamReader failed"),
    Fault("checkpoint_missing", "checkpoint-missing-or-perm", 0, "No such file or directory"),
    Fault("dataset_missing", "dataset-missing", EVERY, "No such file or directory"),
    Fault("dataset_empty", "dataset-empty", 1, "num_samples=0"),
    Fault("refused_pickle", "weights-only-unpickle", 0, "weights_only"),
    Fault("permission_denied", "permission-denied", 1, "Permission denied"),
    Fault("folder_race", "rank-file-race", EVERY, "File exists"),
    Fault("bad_encoding", "text-encoding", 1, "can't decode byte"),
    Fault("too_many_files", "too-many-open-files", 1, "Too many open files"),
    Fault("process_limit", "process-limit", 1, "Resource temporarily unavailable", limits=FEW_PROCESSES),
    Fault("thread_limit", "process-limit", 1, "can't start new thread", limits=FEW_PROCESSES),
    Fault("small_shm", "shm-too-small", 1, "shared memory", around=small_disk("/dev/shm", "1m")),
    Fault("worker_killed", "dataloader-worker-killed", 1, "is killed by signal"),
    Fault("loss_nan", "loss-nan", 1, "loss is nan"),
    Fault("nan_in_backward", "loss-nan", 1, "returned nan values"),
    Fault("shapes_do_not_fit", "shape-mismatch", 1, "shapes cannot be multiplied"),
    Fault("dtypes_do_not_fit", "dtype-mismatch", 1, "dtype"),
    Fault("index_out_of_range", "device-side-assert-index", 1, "index out of range"),
    Fault("meta_weights", "meta-tensor", EVERY, "meta tensor"),
    Fault("batch_not_divisible", "batch-divisibility", EVERY, "not divisible", nproc=3),
    Fault("no_gpu", "cuda-not-available", EVERY, "cuda", env={"CUDA_VISIBLE_DEVICES": ""}),
    Fault("ddp_ready_twice", "ddp-marked-ready-twice", EVERY, "mark a variable ready only once"),
    Fault("ddp_other_model", "shape-mismatch", EVERY, "DDP expects same model"),
    Fault("recomputed_differently", "activation-checkpoint-mismatch", 1, "recomputation"),
    Fault("sharded_state_mismatch", "fsdp-state-mismatch", EVERY, "Missing key in checkpoint"),
    Fault("removed_attribute", "version-mismatch", EVERY, "has no attribute 'float'"),
    Fault("library_missing", "shared-library-missing", EVERY, "cannot open shared object file"),
    Fault("program_missing", "system-tool-missing", 0, "'ffmpeg'", fix="`sudo apt-get install -y ffmpeg`"),
    Fault("lambda_to_worker", "pickle-spawn-error", 1, "pickle"),
    Fault("no_main_guard", "missing-main-guard", None, "bootstrapping phase", launcher="python"),
    Fault("spawned_exception", "user-code-exception", 1, BAD_SAMPLE, launcher="python"),
    Fault("accelerate_fit", "host-oom-killed", 1, "Signal 9", launcher="accelerate", args=("kill",)),
    Fault("accelerate_fit", "batch-divisibility", EVERY, "round multiple", launcher="accelerate", args=("split",)),
    Fault(
        "lightning_fit", "user-code-exception", 1, BAD_SAMPLE, launcher="python", args=("raise",), package="lightning"
    ),
    Fault("lightning_fit", "peer-died", 1, "by peer", launcher="python", args=("kill",), package="lightning"),
    Fault("server_refuses", "rate-limited", 1, "429", args=("429", "urllib"), fix="hf auth login"),
    Fault("server_refuses", "rate-limited", 1, "429 Client Error", args=("429", "requests"), package="requests"),
    Fault("server_refuses", "http-access-denied", 1, "HTTP Error 403", args=("403", "urllib"), package="requests"),
    Fault(
        "server_refuses",
        "http-access-denied",
        1,
        "401 Client Error",
        args=("401", "requests"),
        package="requests",
        fix="`curl -I http://127.0.0.1:",
    ),
    Fault("no_launcher", "launcher-environment-missing", None, "RANK expected", launcher="python", fix="torchrun"),
    Fault("no_launcher", "launcher-environment-missing", None, "KeyError", launcher="python", args=("local",)),
    Fault("sends_to_itself", "nccl-invalid-usage", 1, "should not be the same", fix="neighbours"),
    Fault("not_built", "extension-not-built", EVERY, "No module named 'fastops._C'", args=("module",)),
    Fault("not_built", "extension-not-built", EVERY, "cannot import name '_C'", args=("name",)),
    Fault("lambda_target", "pickle-spawn-error", None, "pickle", launcher="python", fix="top level of a module"),
    Fault("recompiles", "recompile-limit", 1, "FailOnRecompileLimitHit", fix="dynamic=True"),
    Fault(
        "weights_not_fetched",
        "checkpoint-corrupt",
        0,
        "deserializing header",
        package="safetensors",
        fix="git lfs pull",
    ),
    Fault(
        "no_compiler",
        "compile-failure",
        1,
        "compiler",
        also=("system-tool-missing",),
        fix="`sudo apt-get install -y build-essential`",
    ),
    Fault("no_such_release", "package-not-found", 0, "No matching distribution", package="pip", fix="--index-url"),
    Fault("long_socket_path", "socket-path-too-long", 1, "AF_UNIX path too long", fix="`export TMPDIR=/tmp`"),
    Fault(
        "no_pad_token",
        "tokenizer-mismatch",
        1,
        "does not have a padding token",
        package="transformers",
        fix="tokenizer.pad_token = tokenizer.eos_token",
    ),
    Fault("exception_on_one", "user-code-exception", 1, BAD_SAMPLE, launcher="deepspeed"),
    Fault("sigkill", "host-oom-killed", 1, "return code = -9", launcher="deepspeed"),
    Fault("deepspeed_config", "batch-divisibility", EVERY, "Check batch related parameters", launcher="deepspeed"),
    Fault("sigkill", "host-oom-killed", 1, "SIGKILL", launcher="paceline"),
    Fault("sigsegv", "sigsegv", 1, "Segmentation fault", launcher="paceline"),
    Fault("slow_rank", "collective-timeout-desync", 1, "Timed out waiting", launcher="paceline"),
    Fault("module_missing", "import-error", EVERY, "No module named", launcher="paceline"),
    Fault("waits_for_a_signal", "keyboard-interrupt", None, "interrupted", signal=signal.SIGINT, launcher="paceline"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_real_failure_is_explained(fault, tmp_path, request):
    env = request.getfixturevalue("without_libuv") if fault.package == "libuv" else {}
    ended = fail(fault, tmp_path / "log.txt", env=env)
    assert (ended.exit_code == 0) == (fault.cause == "healthy")
    assert fault.shows in ended.log.read_text(errors="replace")
    explanation = explain(ended.log)
    assert explanation.cause in (fault.cause, *fault.also), explanation
    assert fault.rank == EVERY or explanation.rank == fault.rank, explanation
    assert fault.fix in explanation.fix
