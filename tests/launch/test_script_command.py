"""The command line of `paceline run`: where the options end, what each rank executes, and what is refused."""

import shlex
import sys

import pytest

from paceline.command_line import parse
from paceline.errors import PacelineError, UsageError
from paceline.launch.script_command import choose_run, command_name, make_argv
from paceline.options import ScriptOptions
from paceline.rundir import RunDir, append_event


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    (tmp_path / "my run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "go").write_text("#!/bin/sh\n")
    (tmp_path / "go").chmod(0o755)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("raise SystemExit('imported')")
    return tmp_path


@pytest.mark.parametrize("args, own, command", [
    ("--nproc 2 -- train.py --lr 1", {"keys": {"nproc": 2}}, "train.py --lr 1"),
    ("--nproc 2 train.py --nproc 9", {"keys": {"nproc": 2}}, "train.py --nproc 9"),
    ("--nproc=2 --quiet-ranks train.py", {"keys": {"nproc": 2}, "quiet_ranks": True}, "train.py"),
    ("--no-check train.py --no-check --show_env", {"check": False}, "train.py --no-check --show_env"),
    ("--runs_dir r -m pkg.train -x", {"keys": {"runs_dir": "r"}}, "-m pkg.train -x"),
    ("-- -m pkg.train", {}, "-m pkg.train"),
    ("train.py -- -x", {}, "train.py -- -x"),
    ("train.py --help", {}, "train.py --help"),
    ("--show-env", {"show_env": True}, ""),
])  # fmt: skip
def test_our_options_end_where_the_command_begins(args, own, command):
    options = parse(args.split(), command="run", options=ScriptOptions)
    assert options == ScriptOptions(**own, command=tuple(command.split()))


@pytest.mark.parametrize("args, fix", [
    ("--nproc-per-node=4 train.py", "paceline run --nproc 4"),
    ("--nproc_per_node 4 train.py", "paceline run --nproc 4"),
    ("--num_processes 2 train.py", "paceline run --nproc 2"),
    ("--cpu train.py", "paceline run --device cpu"),
    ("--standalone train.py", "paceline finds a free port on this host by itself: leave it out"),
    ("--slurm train.py", "start it inside a job, whose nodes it takes: after salloc, or as the last line of a script for sbatch"),
    ("--master-port 29500 train.py", "paceline finds a free port on this host by itself: leave it out"),
])  # fmt: skip
def test_an_option_of_another_launcher_is_answered_with_ours(args, fix):
    with pytest.raises(UsageError) as error:
        parse(args.split(), command="run", options=ScriptOptions)
    assert error.value.message == f"{args.split()[0].partition('=')[0]} is not an option of paceline run"
    assert error.value.fix == fix


@pytest.mark.parametrize("command, expected", [
    ("train.py --lr 1", [sys.executable, "train.py", "--lr", "1"]),
    ("./train.py", [sys.executable, "./train.py"]),
    ("-m pkg.train x", [sys.executable, "-m", "pkg.train", "x"]),
    ("-m json.tool", [sys.executable, "-m", "json.tool"]),
    ("python3 -u train.py", ["python3", "-u", "train.py"]),
    ("./go a", ["./go", "a"]),
    ("go a", ["./go", "a"]),
])  # fmt: skip
def test_what_a_rank_executes(folder, command, expected):
    assert make_argv(command.split(), cwd=folder) == expected


@pytest.mark.parametrize("command, message, fix", [
    ("nowhere.py", "script nowhere.py does not exist in {folder}", "check its name and its path"),
    ("sub/nowhere.py", "script sub/nowhere.py does not exist in {folder}/sub", "check its name and its path"),
    ("./pkg", "./pkg is a folder", "the script in it, or -m for a package"),
    ("plain", "plain is not executable", "chmod +x plain, or -- python plain ..."),
    ("'./my run.sh'", "./my run.sh is not executable", "chmod +x './my run.sh', or -- bash './my run.sh' ..."),
    ("no-such-program", "there is no script and no program no-such-program", "check its name, or give its path"),
    ("-m nowhere.train", "there is no module nowhere.train", "install it, or start in the folder that holds nowhere"),
    ("-m train.py a", "-m train.py is a file, not a module", "leave -m out: -- train.py a"),
    ("-m", "-m needs a module", "paceline run -- -m package.train --lr 0.1"),
    ("", "run needs a script", "paceline run -- train.py --lr 0.1"),
    ("--lr 1", "--lr comes before the script", "paceline run -- SCRIPT.py --lr ..."),
])  # fmt: skip
def test_what_cannot_be_executed_is_refused_before_anything_starts(folder, command, message, fix):
    with pytest.raises(PacelineError) as error:
        make_argv(shlex.split(command), cwd=folder)
    assert (error.value.message, error.value.fix) == (message.format(folder=folder), fix)


@pytest.mark.parametrize("command, launcher, script", [
    ("torchrun --nproc-per-node 2 train.py --lr 1", "torchrun", "train.py --lr 1"),
    ("accelerate launch --multi_gpu train.py", "accelerate launch", "train.py"),
    ("-m torch.distributed.run --standalone train.py", "torch.distributed.run", "train.py"),
    ("python -m torch.distributed.launch train.py", "torch.distributed.launch", "train.py"),
    ("deepspeed 'my train.py' --note 'a b' ''", "deepspeed", "'my train.py' --note 'a b' ''"),
    ("mpirun -n 2 ./go", "mpirun", "SCRIPT.py ..."),
])  # fmt: skip
def test_a_launcher_within_the_launch_is_refused(folder, command, launcher, script):
    with pytest.raises(UsageError) as error:
        make_argv(shlex.split(command), cwd=folder)
    assert (
        error.value.message == f"{launcher} starts ranks itself: each rank of paceline run would start them all again"
    )
    assert error.value.fix == f"the script alone: paceline run --nproc N -- {script}"


@pytest.mark.parametrize("command, name", [
    ("train.py", "train"), ("a/b/my_exp.v2.py --x", "my_exp"), ("-m pkg.train", "train"), ("./go.sh", "go"),
    ("python -u train.py", "train"), ("python", "python"), ("größe.py", "größe"), ("....py", "script"),
])  # fmt: skip
def test_a_run_is_called_after_its_script(command, name):
    assert command_name(command.split()) == name


@pytest.mark.parametrize("last, restarts, state, is_continued", [
    (17, "1", "interrupted", True),
    (17, "1", "script", True),  # before its first attempt
    (17, "0", "interrupted", False),  # another run of the same batch script's job
    (16, "1", "interrupted", False),
    (17, "1", "finished", False),
])  # fmt: skip
def test_a_requeued_job_continues_its_run_and_no_other_command_does(
    folder, monkeypatch, last, restarts, state, is_continued
):
    job = {"JOB_ID": "17", "JOB_NODELIST": "n1", "RESTART_COUNT": restarts}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    run = RunDir(folder / "runs" / "rj")
    run.path.mkdir(parents=True)
    run.config_toml.write_text('command = ["train.py"]')
    append_event(run, "script" if state == "script" else "attempt", attempt=1, job_id=last)
    append_event(run, state, job_id=last)
    if is_continued:
        assert choose_run("rj", str(folder / "runs"), ["train.py"]) == (run, False)
        return
    with pytest.raises(PacelineError, match="already exists") as error:
        choose_run("rj", str(folder / "runs"), ["train.py"])
    assert error.value.fix.startswith(f"paceline resume {run.path} continues it; or another --name")
