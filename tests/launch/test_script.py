"""`paceline run`: any script as under torchrun, its lines as they come, its own exit code, a run folder that repeats it."""

import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from textwrap import dedent

import pytest

from paceline.errors import PacelineError
from paceline.launch.script import Cleared, Script, format_config, make_script, run_words
from paceline.plan.machine import Machine
from paceline.rundir import RunDir, read_json_lines
from paceline.watch.status import run_status

pytestmark = pytest.mark.dist
SCRIPTS = Path(__file__).with_name("scripts")
COMMAND = [sys.executable, "-m", "paceline.cli", "run"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Bench:
    """A folder with scripts; `run` is the command with --name r, and without the checks unless they are wanted."""

    def __init__(self, folder):
        self.folder = folder
        self.run_dir = RunDir(folder / "runs" / "r")

    def script(self, text, name="train.py"):
        (self.folder / name).write_text(dedent(text))
        return name

    def start(self, *words, name="r", checked=False, **kwargs):
        ours = [*(["--name", name] if name else []), *([] if checked else ["--no-check"])]
        command = [*COMMAND, *ours, *map(str, words)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=self.folder, text=True, env=ENV, **{**pipes, **kwargs})

    def run(self, *words, timeout_s=60, **kwargs):
        process = self.start(*words, **kwargs)
        process.out, process.err = process.communicate(timeout=timeout_s)
        return process

    def log(self, rank):
        return self.run_dir.rank_log(1, rank).read_text()

    def events(self):
        return [event["event"] for event in read_json_lines(self.run_dir.events)]

    def wait_for(self, text, rank=0):
        deadline = time.monotonic() + 30
        path = self.run_dir.rank_log(1, rank)
        while not path.exists() or text not in path.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def weights(done):
    """The last word of the last line of each rank."""
    last = {line.split()[0]: line.split()[-1] for line in done.out.splitlines()}
    return list(last.values())


def test_a_ddp_script_trains_and_goes_on_from_its_snapshot(bench):
    done = bench.run("--nproc", 2, SCRIPTS / "ddp.py", 1, checked=True)
    assert done.returncode == 0, done.err
    assert "[0] [rank 0] Epoch 0 | Steps: 4 | Loss " in done.out
    assert len(set(weights(done))) == 1
    again = bench.run("--nproc", 2, "--name", "again", "--", SCRIPTS / "ddp.py", 2, name=None)
    of_rank_0 = [line for line in again.out.splitlines() if line.startswith("[0] ")]
    assert of_rank_0[0] == "[0] Resuming training from snapshot at epoch 1"
    assert of_rank_0[1].startswith("[0] [rank 0] Epoch 1 | Steps: 4")
    assert "Epoch 0" not in again.out


@pytest.mark.soak
def test_a_recorded_error_is_shown_with_its_own_traceback_and_explained_last(bench):
    done = bench.run("--nproc", 2, "--", SCRIPTS / "recorded.py")
    assert done.returncode in (
        1,
        134,
    )  # gloo aborts now and then when python ends with an error; the error is the cause
    end = done.err[done.err.index("rank 1 failed") :].splitlines()
    assert end[0] == "rank 1 failed: RuntimeError: the batch of rank 1 is empty"
    log = end.index("log: runs/r/logs/1/1.log")
    assert end[log - 3 : log] == [
        '    raise RuntimeError("the batch of rank 1 is empty")', "RuntimeError: the batch of rank 1 is empty", "",
    ]  # fmt: skip
    assert end[log + 2].startswith("dataset-empty: ") and end[log + 2].endswith("(rank 1)")
    assert end[log + 3].startswith("  fix: ")


@pytest.mark.parametrize("script, package, said", [
    pytest.param("lightning_fit.py", "lightning", "4 steps", marks=pytest.mark.soak),
    pytest.param("hf_trainer.py", "transformers", "3 steps", marks=pytest.mark.soak),
    ("accelerated.py", "accelerate", "sum 2.0, 4 steps"),
])  # fmt: skip
def test_a_script_of_another_trainer_runs_as_it_is_on_two_processes(bench, script, package, said):
    pytest.importorskip(package, reason=f"{package} is not installed")
    done = bench.run("--nproc", 2, "--", SCRIPTS / script, bench.folder / "out", timeout_s=100, checked=True)
    assert done.returncode == 0, done.out + done.err
    last = {
        rank: next(line for line in done.out.splitlines() if f"rank {rank} of 2, {said}" in line) for rank in (0, 1)
    }
    assert last[0].split()[-1] == last[1].split()[-1]  # one weight, trained together


def test_the_ranks_are_told_what_torchrun_would_tell_them_and_stdin_is_empty(bench):
    bench.script("""
        import os, sys
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        print(*[os.environ[name] for name in names], int(os.environ["MASTER_PORT"]) > 0, repr(sys.stdin.read()), sys.argv[1:])
    """)
    done = bench.run("--nproc", 2, "--", "train.py", "--nproc", "7", "-m", "a b", stdin=subprocess.PIPE)
    words = "True '' ['--nproc', '7', '-m', 'a b']"
    assert sorted(done.out.splitlines()) == [f"[0] 0 0 2 2 127.0.0.1 {words}", f"[1] 1 1 2 2 127.0.0.1 {words}"]


def test_the_run_folder_has_what_happened_and_repeats_the_run(bench):
    bench.script("import sys; print('hello', sys.argv[1:])")
    done = bench.run("--nproc", 2, "--device", "cpu", "--", "train.py", 'a "b"', "größe\n模\x7f")
    assert (done.returncode, bench.events()) == (0, ["script", "attempt", "attempt_ended", "finished"])
    assert tomllib.loads(bench.run_dir.config_toml.read_text()) == {
        "command": ["train.py", 'a "b"', "größe\n模\x7f"], "nproc": 2, "device": "cpu", "cwd": str(bench.folder),
    }  # fmt: skip
    assert not bench.run_dir.metrics.exists()
    status = run_status(bench.run_dir)
    assert (status.state, status.command[0]) == ("finished", "train.py")
    elsewhere = bench.folder / "elsewhere"
    elsewhere.mkdir()
    again = bench.run("--runs-dir", "more", bench.run_dir.config_toml, name="r2")
    assert sorted(again.out.splitlines()) == sorted(done.out.splitlines())
    assert (bench.folder / "more" / "r2" / "config.toml").read_text() == bench.run_dir.config_toml.read_text()


def test_a_run_without_a_name_is_called_after_its_script(bench):
    bench.script("pass", name="my exp.v2.py")
    bench.run("--nproc", 1, "--", "./my exp.v2.py", name=None)
    [name] = [path.name for path in (bench.folder / "runs").iterdir()]
    assert name.startswith("my-exp-20")


def test_paceline_itself_speaks_on_stderr_alone(bench):
    bench.script("print('a result')")
    done = bench.run("--nproc", 1, "--", "train.py", "--lr", "0.1")
    assert done.out == "a result\n"
    assert done.err.splitlines()[0] == "script  train.py --lr 0.1"
    assert done.err.splitlines()[1].startswith("device  1 CPU process x ")
    assert done.err.splitlines()[-1] == "logs    runs/r/logs/1"


def test_ranks_that_never_joined_each_other_are_named(bench):
    bench.script("print('alone')")
    done = bench.run("--nproc", 2, "--", "train.py")
    assert "note    no rank joined the others in a process group: each of 2 has worked by itself\n" in done.err
    done = bench.run("--nproc", 2, "--", SCRIPTS / "ddp.py", 1, name="joined")
    assert "no rank joined" not in done.err


@pytest.mark.parametrize("end, code", [
    ("sys.exit(7)", 7), ("os._exit(3)", 3), ("raise ValueError('no')", 1), ("os.kill(os.getpid(), 9)", 128 + 9),
    ("os.kill(os.getpid(), 11)", 128 + 11), ("os.kill(os.getpid(), 15)", 128 + 15),
])  # fmt: skip
def test_the_exit_code_is_that_of_the_first_cause_as_a_shell_says_it(bench, end, code):
    bench.script(f"import os, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(60)")
    done = bench.run("--nproc", 2, "--no-recover", "--", "train.py")
    assert done.returncode == code
    events = {event["event"]: event for event in read_json_lines(bench.run_dir.events)}
    assert (events["failed"]["rank"], events["failed"]["exit_code"]) == (1, code)
    assert (events["attempt_ended"]["exit_code"], run_status(bench.run_dir).state) == (code, "failed")


def test_ctrl_c_lets_the_script_end_and_says_so(bench):
    bench.script("""
        import signal, sys, time
        def save(*_):
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        time.sleep(60)
    """)
    process = bench.start("--nproc", 2, "--", "train.py")
    bench.wait_for("ready", rank=0)
    bench.wait_for("ready", rank=1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert sorted(out.splitlines()) == ["[0] ready", "[0] saved", "[1] ready", "[1] saved"]
    assert "stopping: the script has 60 s to end; Ctrl-C again to end now\n" in err
    assert "\ninterrupted after " in err
    assert (bench.events()[-2:], run_status(bench.run_dir).state) == (["attempt_ended", "interrupted"], "stopped")


def test_a_module_is_run_from_the_folder_it_is_in(bench):
    (bench.folder / "pkg").mkdir()
    (bench.folder / "pkg" / "__init__.py").write_text("")
    bench.script("import sys; print('module', sys.argv[1:])", name="pkg/train.py")
    done = bench.run("--nproc", 1, "--", "-m", "pkg.train", "--lr", "1")
    assert done.out == "module ['--lr', '1']\n"
    assert bench.run("--nproc", 1, "-m", "pkg.train", name="bare").out == "module []\n"


def test_any_executable_is_run_as_it_is(bench):
    bench.script('#!/bin/sh\necho rank $RANK: "$1"\n', name="go.sh")
    (bench.folder / "go.sh").chmod(0o755)
    assert bench.run("--nproc", 1, "--", "./go.sh", "a  b").out == "rank 0: a  b\n"
    assert bench.run("--nproc", 1, "--", "sh", "-c", "exit 5", name="b").returncode == 5


def test_one_rank_shown_alone_is_the_first(bench):
    bench.script("import os; print('rank', os.environ['RANK'])")
    done = bench.run("--nproc", 2, "--quiet-ranks", "--", "train.py")
    assert (done.out, bench.log(1)) == ("rank 0\n", "rank 1\n")


def test_lines_come_while_the_script_runs(bench):
    bench.script("import time; print('first'); time.sleep(60)")
    process = bench.start("--nproc", 1, "--", "train.py")
    assert process.stdout.readline() == "first\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)


def test_a_reader_that_has_seen_enough_does_not_end_the_run(bench):
    bench.script("""
        import time
        for i in range(20):
            print("line", i)
            time.sleep(0.05)
        open("ended", "w").close()
    """)
    words = shlex.join([*COMMAND, "--no-check", "--nproc", "1", "--name", "r", "--", "train.py"])
    subprocess.run(f"{words} | head -1", shell=True, cwd=bench.folder, env=ENV, capture_output=True, timeout=60)
    deadline = time.monotonic() + 20
    while run_status(bench.run_dir).state == "running" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ((bench.folder / "ended").exists(), run_status(bench.run_dir).state) == (True, "finished")


def test_a_flood_of_lines_is_shown_whole(bench):
    bench.script("import sys; [sys.stdout.write('x' * 50 + '\\n') for _ in range(300_000)]")
    done = bench.run("--nproc", 1, "--", "train.py")
    assert done.out == ("x" * 50 + "\n") * 300_000


def test_the_words_of_the_script_are_its_own_its_help_included(bench):
    bench.script("import sys; print(sys.argv[1:])")
    done = bench.run("--nproc", 1, "--", "train.py", "--help")
    assert done.out == "['--help']\n"


def test_show_env_prints_what_the_ranks_get_and_starts_nothing(bench):
    bench.script("print('started')")
    done = bench.run("--nproc", 2, "--device", "cpu", "--show-env", "--", "train.py")
    assert done.returncode == 0
    assert "ACCELERATE_USE_CPU=true" in done.out
    assert "started" not in done.out
    assert not (bench.folder / "runs").exists()


def test_a_name_that_is_taken_is_refused_before_anything_starts(bench):
    bench.script("print('started')")
    bench.run("--nproc", 1, "--", "train.py")
    done = bench.run("--nproc", 1, "--", "train.py")
    assert (done.returncode, done.out) == (1, "")
    assert done.err.splitlines() == [
        "error: runs/r is already there", "  fix: another --name; without one, script and time make it",
    ]  # fmt: skip


@pytest.mark.parametrize("words, code, message", [
    (["--", "nowhere.py"], 1, "script nowhere.py does not exist in "),
    (["--nproc-per-node=4", "--", "train.py"], 2, "--nproc-per-node is not an option of paceline run"),
    (["--nproc", "99999", "--", "train.py"], 1, "--nproc: nproc is 99,999, out of range"),
    (["--device", "tpu", "--", "train.py"], 1, "--device: device is 'tpu'"),
    (["--name", "a/b", "--", "train.py"], 1, "name 'a/b' cannot be a folder"),
    ([], 2, "run needs a script"),
])  # fmt: skip
def test_what_cannot_run_is_refused_in_two_lines_and_leaves_nothing(bench, words, code, message):
    bench.script("print('started')")
    done = bench.run(*words, name=None)
    assert (done.returncode, done.out) == (code, "")
    assert done.err.startswith(f"error: {message}")
    assert len(done.err.splitlines()) == 2
    assert not (bench.folder / "runs").exists()


def test_a_folder_that_cannot_be_written_is_named(bench):
    bench.script("print('started')")
    (bench.folder / "file").write_text("")
    done = bench.run("--runs-dir", "file", "--nproc", 1, "--", "train.py")
    assert done.err.splitlines()[0] == "error: run folder file/r cannot be written: Not a directory"


def test_what_the_checks_say_stops_the_run_before_it_has_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('started')")
    asked = []

    def check(script, run):
        asked.append((script.command, run.path))
        return Cleared(stop=PacelineError("no room", fix="make room"))

    with pytest.raises(PacelineError, match="no room"):
        run_words(["--nproc", "1", "--name", "r", "--", "train.py"], check=check)
    assert asked == [(("train.py",), Path("runs/r"))]
    assert not Path("runs").exists()


def test_what_the_checks_found_is_in_the_run_folder(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import os; print(os.environ['USE_LIBUV'])")
    checked = Cleared(libuv=False, files={Path("runs/r/findings.json"): "[]\n", Path("runs/r/facts/ada.json"): "{}\n"})
    assert run_words(["--nproc", "1", "--name", "r", "--", "train.py"], check=lambda *_: checked) == 0
    assert capfd.readouterr().out == "0\n"
    assert (Path("runs/r/findings.json").read_text(), Path("runs/r/facts/ada.json").read_text()) == ("[]\n", "{}\n")


def test_no_check_asks_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("pass")
    assert run_words(["--no-check", "--nproc", "1", "--name", "r", "--", "train.py"], check=lambda *_: 1 / 0) == 0


def test_a_config_that_is_not_of_a_script_is_refused(tmp_path):
    (tmp_path / "c.toml").write_text("depth = 4\n")
    machine = Machine(gpus=(), cpu_cores=2, cpu_bf16=False, memory_bytes=1 << 33)
    with pytest.raises(PacelineError) as error:
        make_script([str(tmp_path / "c.toml")], {}, machine)
    assert error.value.message.endswith("is not the config of a script: command, cwd, device, nproc not in it")


def test_a_flag_wins_over_the_config_of_an_earlier_run(tmp_path):
    script = Script(("train.py",), 2, "cpu", tmp_path)
    (tmp_path / "c.toml").write_text(format_config(script))
    machine = Machine(gpus=(), cpu_cores=2, cpu_bf16=False, memory_bytes=1 << 33)
    assert make_script([str(tmp_path / "c.toml")], {}, machine) == script
    assert make_script([str(tmp_path / "c.toml")], {"nproc": 1}, machine).nproc == 1
