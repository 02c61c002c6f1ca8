"""The commands of README and of the docs pages, typed as they stand there, on a small model and a small text."""

import os
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest

from paceline import cli
from paceline.cli import run_command
from paceline.command_line import parse
from paceline.explain.catalogue import load_catalogue

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^\$ ((?:[A-Z_]+=\w+ )*paceline .*)$", re.MULTILINE)
COMMANDS = {
    page.name: [line.split("#")[0].strip() for line in COMMAND.findall(page.read_text())]
    for page in PAGES
    if COMMAND.search(page.read_text())
}
TRIED = {  # of each page, what no page before it has
    page: [line for line in lines if not any(line in COMMANDS[before] for before in list(COMMANDS)[:number])]
    for number, (page, lines) in enumerate(COMMANDS.items())
}
ELSEWHERE = (
    "paceline comm --nproc 2 --device cpu",  # tests/comm/test_comm.py has it with a shorter measurement
    *("paceline watch", "paceline watch --web"),  # until somebody leaves: tests/watch has them
    'paceline plan --depth 8 --gpu "RTX 4070" --exact',  # tests/test_planning.py has a smaller one in make soak
    "paceline resume books",  # the page resumes it with more steps, tests/train as it is
    "paceline train --init-from books --data ~/letters",  # tests/train/test_trouble.py starts one so
    "paceline export books",  # tests/train/test_export.py; make soak with transformers
    "paceline torch check",  # tests/check/test_torch_check.py
)
EXIT_CODES = {  # of those that do not end with 0
    "paceline train --total-batch-size 1000": 1,
    "paceline run --nproc 2 -- train.py": 1,
    "GLOO_SOCKET_IFNAME=eth9 OMP_NUM_THREADS=16 paceline check --data ~/boks --port 29500": 1,
}
SCRIPT = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1: raise ValueError("boom")
dist.all_reduce(torch.ones(1))
"""
LOG = """\
5: step 1840/20000 | loss 2.913
5: [rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.56 GiB
srun: error: node-1: task 5: Exited with exit code 1
"""
NO_LIBUV = """\
step 1840/20000 | loss 2.913
RuntimeError: use_libuv was requested but PyTorch was built without libuv support, run with USE_LIBUV=0 to disable it.
"""
METRICS = "epoch,step,train_loss_step\n" + "".join(f"0,{step},{3 - step / 2000}\n" for step in range(49, 2000, 50))
NANOCHAT = """\
\"""两张显卡上的预训练\"""
run = "dummy"
depth = 8
max_seq_len = 1024
total_batch_size = 8 * 1024 * 2
num_iterations = 500  # 步数
use_dummy_wandb = True
"""
SMALLER = {  # what a test has time for, instead of what a person would type: the first command has the checks of the machine
    "paceline train --data ~/books --name books": "paceline train --data ~/books --name books --depth 2 --n-embd 64"
    " --head-dim 32 --num-steps 4 --vocab-size 300 --sequence-len 64 --total-batch-size 768 --nproc 1",
    "paceline resume books --num-steps 5000": "paceline resume books --num-steps 8 --no-check",
    "paceline run --nproc 2 --quiet-ranks -- -m package.train --lr 3e-4": "paceline run --nproc 2 --quiet-ranks --no-check"
    " -- -m package.train --lr 3e-4",
}


IN_A_SHELL = re.compile(
    r"[A-Z_]+=|paceline (train --data|resume|run) "
)  # the others run in this process, which has imported torch

LONG = dict.fromkeys(("profile.md", "script.md"), pytest.mark.soak)  # tests/launch has shorter ones


@pytest.mark.dist
@pytest.mark.parametrize("page", [pytest.param(page, marks=LONG.get(page, ())) for page in COMMANDS])
def test_the_commands_of_a_page_work_in_their_order(page, tmp_path, monkeypatch, capsys):
    books = tmp_path / "books"
    books.mkdir()
    for name in ("ast.py", "argparse.py"):
        (books / name).write_bytes((Path(sysconfig.get_path("stdlib")) / name).read_bytes())
    variables = {"HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    variables["PATH"] = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "slurm-4711.out").write_text(LOG)
    (tmp_path / "libuv.log").write_text(NO_LIBUV)
    (tmp_path / "lightning_logs" / "version_0").mkdir(parents=True)
    (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").write_text(METRICS)
    (tmp_path / "base_train.py").write_text(NANOCHAT)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("print('hello')")
    for line in TRIED[page]:
        if "hf:" in line or line in ELSEWHERE:
            continue
        if "ada,bob" in line or "--slurm" in line:  # tests/launch has real hosts and a real Slurm
            command, *arguments = shlex.split(line.removeprefix("paceline "))
            parse(arguments, command=command, options=cli.COMMANDS[command][1])
            continue
        exit_code = EXIT_CODES.get(line, 0)
        line = SMALLER.get(line, line)
        if IN_A_SHELL.match(line):
            done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=600)
            assert done.returncode == exit_code, f"{line}\n{done.stdout}\n{done.stderr}"
        else:
            words = map(os.path.expanduser, shlex.split(line.removeprefix("paceline ")))
            assert run_command(list(words)) == exit_code, f"{line}\n{capsys.readouterr()}"


def test_the_error_shown_in_the_readme_is_the_one_that_comes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    run_command(["train", "--total-batch-size", "1000", "--nproc", "2"])
    assert capsys.readouterr().err in README


def test_the_plan_shown_in_the_docs_is_the_one_that_comes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(ROOT)
    run_command(["plan", "configs/balanced.toml", "--gpu", "RTX 5090", "--gpus", "2", "--price", "0.30/kWh"])
    assert capsys.readouterr().out in (ROOT / "docs" / "plan.md").read_text()


def test_the_readme_counts_the_causes_of_the_catalogue():
    assert f"{len(load_catalogue().causes)} causes are in [docs/causes.md]" in README


def test_the_readme_and_the_pages_that_people_start_with_stay_short():
    assert len(README.splitlines()) <= 220
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 130


def test_the_architecture_page_shows_every_folder():
    shown = set(re.findall(r"`(?:paceline/)?(\w+)/", (ROOT / "docs" / "architecture.md").read_text()))
    folders = {path.name for path in (ROOT / "paceline").iterdir() if (path / "__init__.py").is_file()}
    assert folders <= shown


def test_every_file_that_the_architecture_page_names_exists():
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = set(re.findall(r"`(paceline/[\w/]+\.\w+)`", text))
    assert len(names) > 20
    assert [name for name in sorted(names) if not (ROOT / name).is_file()] == []


def test_every_command_stands_in_the_readme():
    from paceline.cli import COMMANDS as commands

    assert [name for name in {name.split()[0] for name in commands} if f"paceline {name}" not in README] == []


def test_the_chinese_readme_has_the_names_and_the_messages_that_the_code_has(tmp_path, capsys):
    from paceline.other_names import KEY_OF

    text = (ROOT / "README.zh-CN.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+` )+)\| `(\w+)`", text, re.MULTILINE)
    assert len(rows) > 8
    assert [(names, key) for names, key in rows for name in re.findall(r"\w+", names) if KEY_OF[name] != key] == []
    (tmp_path / "libuv.log").write_text(NO_LIBUV)
    run_command(["explain", str(tmp_path / "libuv.log")])
    shown = re.search(r"^libuv-missing: .*\n  fix: .*(?= \[\.\.\.\]$)", text, re.MULTILINE)
    assert shown and shown[0] in capsys.readouterr().out
    assert "(README.zh-CN.md)" in README and "(README.md)" in text
