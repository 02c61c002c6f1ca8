"""What is added to the workers' environment and why, what never is, and which of the user's values are reported."""

import pytest
from rows import with_rows

from paceline.launch.env import EnvRow, Launch, env_elsewhere, format_env, harm_lines, worker_env


def row_of(rows, name):
    return next(row for row in rows if row.name == name)


def test_cpu_processes_share_the_cores_and_meet_on_the_loopback():
    env, rows = worker_env({"PATH": "/bin"}, Launch(nproc=3, device="cpu", cpu_cores=8))
    assert env == {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_FR_BUFFER_SIZE": "2000",
    }
    assert rows[0] == EnvRow("OMP_NUM_THREADS", "2", "8 CPU cores for 3 processes", "added")
    assert len(rows) == 7


@with_rows(("user", "settings", "expected"), [
    # more processes than cores have one thread each
    ({}, {"nproc": 4, "cpu_cores": 2}, {"OMP_NUM_THREADS": "1", "USE_LIBUV": None}),
    ({}, {"libuv": False}, {"USE_LIBUV": "0"}),
    # workers on GPUs number them as nvidia-smi does and meet on the loopback
    ({}, {"device": "cuda"}, {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": None,
    }),
    # a script on the CPU sees no GPU, and accelerate joins its processes
    ({}, {"for_script": True}, {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}),
    # a setting under its older name stays
    ({"PYTORCH_CUDA_ALLOC_CONF": "5"}, {"device": "cuda"}, {"PYTORCH_ALLOC_CONF": None}),
    ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "5"}, {"device": "cuda"}, {"TORCH_FR_BUFFER_SIZE": None}),
])  # fmt: skip
def test_what_is_added_depends_on_the_launch(user, settings, expected):
    env, _ = worker_env(user, Launch(**{"nproc": 2, "device": "cpu", "cpu_cores": 8, **settings}))
    assert {name: env.get(name) for name in expected} == expected


@pytest.mark.parametrize("nproc, threads, policy", [
    (2, "4", "PASSIVE"), (2, "many", "PASSIVE"), (2, None, None), (1, None, "PASSIVE"), (1, "1", None), (1, "1,2", None),
])  # fmt: skip
def test_threads_sleep_while_they_wait_where_a_rank_has_several(nproc, threads, policy):
    user, launch = {"OMP_NUM_THREADS": threads} if threads else {}, Launch(nproc=nproc, device="cpu", cpu_cores=2)
    assert worker_env(user, launch)[0].get("OMP_WAIT_POLICY") == policy
    assert env_elsewhere(user, launch, list(user)).get("OMP_WAIT_POLICY") == policy


def test_what_the_user_has_set_stays():
    user = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONUNBUFFERED": "", "CUDA_VISIBLE_DEVICES": "1"}
    env, rows = worker_env(user, Launch(nproc=2, device="cuda", cpu_cores=8))
    assert {name: env[name] for name in user} == user
    assert not [row for row in rows if row.name in user and row.origin == "added"]


def test_a_row_for_the_users_value_shows_what_paceline_would_have_set():
    _, rows = worker_env({"GLOO_SOCKET_IFNAME": "eth0"}, Launch(nproc=2, device="cpu", cpu_cores=8))
    assert row_of(rows, "GLOO_SOCKET_IFNAME") == (
        "GLOO_SOCKET_IFNAME",
        "eth0",
        "set by you; paceline would set lo",
        "yours",
    )


FOR_SCRIPT = {"device": "cuda", "for_script": True}


@with_rows(("name", "value", "settings", "harm"), [
    ("OMP_NUM_THREADS", "32", FOR_SCRIPT, "2 processes x 32 threads wait for each other on 8 cores"),
    ("PYTHONUNBUFFERED", "", FOR_SCRIPT, "output is buffered, and lost when a rank is killed"),
    ("TOKENIZERS_PARALLELISM", "true", FOR_SCRIPT, "each of 2 processes starts a thread per core"),
    ("TORCH_FR_BUFFER_SIZE", "0", FOR_SCRIPT, "no rank remembers its collectives: a hang cannot be traced"),
    ("CUDA_DEVICE_ORDER", "FASTEST_FIRST", FOR_SCRIPT,
     "GPU numbers may not be those of nvidia-smi and of the plan, where cards differ"),
    ("PYTORCH_ALLOC_CONF", "expandable_segments:False", FOR_SCRIPT, "GPU memory is lost to fragmentation"),
    ("CUDA_LAUNCH_BLOCKING", "1", FOR_SCRIPT, "the host waits for every kernel: good for debugging, slow for training"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", FOR_SCRIPT,
     "every collective is checked by another one: good for debugging, slow for training"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", FOR_SCRIPT, "a rank whose peer has failed waits forever"),
    ("ACCELERATE_USE_CPU", "true", FOR_SCRIPT, "accelerate stays on the CPU"),
    ("USE_LIBUV", "1", {"libuv": False}, "this torch was built without libuv and cannot create a store with it: set it to 0"),
    ("CUDA_VISIBLE_DEVICES", "0", {"for_script": True}, "the device is cpu, and the script sees these GPUs"),
    ("OMP_NUM_THREADS", "many", {}, "not a number of threads: each process uses every core"),
    ("OMP_NUM_THREADS", "32,2", {}, "2 processes x 32 threads wait for each other on 8 cores"),
    *((name, value, {"device": "cuda"}, None) for name, value in [
        ("OMP_NUM_THREADS", "1"), ("OMP_NUM_THREADS", "4"), ("OMP_NUM_THREADS", "4,2"), ("USE_LIBUV", "0"), ("USE_LIBUV", "1"),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO"), ("CUDA_LAUNCH_BLOCKING", "0"), ("GLOO_SOCKET_IFNAME", "lo"), ("PATH", ""),
    ]),
])  # fmt: skip
def test_a_value_of_the_users_stays_and_one_that_hurts_in_this_launch_is_reported_in_one_line(
    name, value, settings, harm
):
    env, rows = worker_env({name: value}, Launch(**{"nproc": 2, "device": "cpu", "cpu_cores": 8, **settings}))
    assert env[name] == value
    assert harm_lines(rows) == ([f"note    {name}={value} is yours: {harm}"] if harm else [])


def test_the_table_shows_each_variable_with_its_origin_and_reason():
    _, rows = worker_env({"OMP_NUM_THREADS": "32"}, Launch(nproc=2, device="cpu", cpu_cores=8))
    assert format_env(rows).splitlines() == [
        "OMP_WAIT_POLICY=PASSIVE       added         threads that wait leave their core to others",
        "PYTHONUNBUFFERED=1            added         a log is whole up to the moment of a crash",
        "PYTHONFAULTHANDLER=1          added         a crash in native code leaves a traceback",
        "TOKENIZERS_PARALLELISM=false  added         tokenizers must not start a thread per core in every process",
        "GLOO_SOCKET_IFNAME=lo         added         all processes are on this host, whatever its name resolves to",
        "TORCH_FR_BUFFER_SIZE=2000     added         each rank remembers its last collectives, so that a hang can be traced",
        "OMP_NUM_THREADS=32            yours, hurts  2 processes x 32 threads wait for each other on 8 cores",
    ]


def test_nothing_secret_of_the_users_environment_is_in_the_table():
    _, rows = worker_env({"WANDB_API_KEY": "abc", "HF_TOKEN": "def"}, Launch(nproc=2, device="cpu", cpu_cores=8))
    assert "abc" not in format_env(rows)
    assert "HF_TOKEN" not in format_env(rows)
