"""A torch that was built without libuv launches all the same: agent, workers, any script, the trainer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist
HERE = Path(__file__).parent
RUN = """
import sys
from paceline.check.ready import CheckResult
from paceline.command_line import parse
from paceline.launch import script
from paceline.options import ScriptOptions
script.check_script = lambda *_, **__: CheckResult([{"torch": {"libuv": sys.argv[1] == "yes"}}], [])
sys.exit(script.run_script(parse(sys.argv[2:], command="run", options=ScriptOptions)))
"""
LAUNCH = """
import os, sys
from pathlib import Path
from paceline.launch.env import Launch, worker_env
from paceline.launch.supervisor import run_attempt
from paceline.rundir import RunDir
env, _ = worker_env(os.environ, Launch(2, "cpu", cpu_cores=2, libuv=False))
outcome = run_attempt(
    RunDir(Path("run")), command=[sys.executable, "-c", sys.argv[1]], nproc=2, env=env, libuv=False,
)
sys.exit(outcome.exit_code)
"""
ERROR = "use_libuv was requested but PyTorch was built without libuv support"
JOINS = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", total.item(), flush=True)
dist.destroy_process_group()
os._exit(0)  # gloo aborts now and then in torch 2.13's interpreter exit, under torchrun as well
"""
WORKER = """
import torch
from paceline.train.process import all_reduce_sum, init_distributed, shutdown
rank, world_size, _ = init_distributed("cpu")
total = torch.ones(1)
all_reduce_sum(total)
print("rank", rank, "of", world_size, "sum", total.item())
shutdown()
"""


@pytest.fixture(scope="module")
def env(without_libuv):
    return {**os.environ, **without_libuv, "OMP_NUM_THREADS": "1"}


def run(code, *args, cwd, env):
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.soak
def test_a_script_for_torchrun_joins_on_it(tmp_path, env):
    (tmp_path / "train.py").write_text(JOINS)
    done = run(RUN, "no", "--nproc", "2", "--", "train.py", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] sum 2.0", "[1] sum 2.0"]


@pytest.mark.soak
def test_a_failing_rank_is_still_the_one_named(tmp_path, env):
    done = run(RUN, "no", "--nproc", "2", "--", str(HERE / "scripts" / "recorded.py"), cwd=tmp_path, env=env)
    assert done.returncode in (
        1,
        134,
    )  # gloo aborts now and then when python ends with an error; the error is the cause
    assert "rank 1 failed: RuntimeError: the batch of rank 1 is empty\n" in done.stderr


@pytest.mark.soak
def test_the_workers_of_the_trainer_join_on_it(tmp_path, env):
    done = run(LAUNCH, WORKER, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    logs = [(tmp_path / "run" / "logs" / "1" / f"{rank}.log").read_text() for rank in range(2)]
    assert logs == ["rank 0 of 2 sum 2.0\n", "rank 1 of 2 sum 2.0\n"]


@pytest.mark.soak
def test_the_patch_makes_torch_one_without_libuv_and_a_launch_that_does_not_know_it_fails_with_its_error(tmp_path, env):
    (tmp_path / "train.py").write_text("print('started')")
    done = run(RUN, "yes", "--nproc", "2", "--", "train.py", cwd=tmp_path, env=env)
    assert done.returncode == 3
    assert ERROR in done.stderr
