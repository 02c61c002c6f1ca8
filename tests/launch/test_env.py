"""What is added to the workers' environment, and what never is."""

from paceline.launch.env import worker_env


def test_cpu_processes_share_the_cores_and_meet_on_the_loopback():
    env, reasons = worker_env({"PATH": "/bin"}, nproc=3, device="cpu", cpu_cores=8)
    assert env == {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    assert reasons[0] == "OMP_NUM_THREADS=2: 8 CPU cores for 3 processes"
    assert len(reasons) == 5


def test_more_processes_than_cores_have_one_thread_each():
    assert worker_env({}, nproc=4, device="cpu", cpu_cores=2)[0]["OMP_NUM_THREADS"] == "1"


def test_what_the_user_has_set_stays():
    user = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONUNBUFFERED": "", "CUDA_VISIBLE_DEVICES": "1"}
    env, reasons = worker_env(user, nproc=2, device="cuda", cpu_cores=8)
    assert {name: env[name] for name in user} == user
    assert not [line for line in reasons if line.split("=")[0] in user]


def test_cuda_workers_get_expandable_segments():
    env, _ = worker_env({}, nproc=2, device="cuda", cpu_cores=8)
    assert env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "CUDA_VISIBLE_DEVICES" not in env


def test_an_allocator_setting_under_its_older_name_stands():
    env, _ = worker_env({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, nproc=1, device="cuda", cpu_cores=8)
    assert "PYTORCH_ALLOC_CONF" not in env
