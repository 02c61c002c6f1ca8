"""`paceline run`: any script as under torchrun, its lines as they come, its own exit code, a run folder that repeats it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from paceline.check.ready import CheckResult
from paceline.cli import run_command
from paceline.errors import Finding, PacelineError
from paceline.explain.explanation import Evidence, Explanation
from paceline.explain.recorded_end import went_on
from paceline.explain.run_folder import explain_run
from paceline.launch.script import Script, format_config, make_script, read_request, run_script
from paceline.options import ScriptOptions
from paceline.plan.machine import Machine
from paceline.rundir import RunDir, append_event, read_json_lines
from paceline.watch.report import markdown_report
from paceline.watch.snapshot import LIVE
from paceline.watch.status import run_status

pytestmark = pytest.mark.dist
SCRIPTS = Path(__file__).with_name("scripts")
COMMAND = [sys.executable, "-m", "paceline.cli", "run"]
DEADLINE_S = 120.0  # against hanging
ONE_RANK = ScriptOptions(command=("train.py",), keys={"nproc": 1, "name": "r"})
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Bench:
    """A folder with scripts; `run` is the command with --name r, and without the checks unless they are wanted."""

    def __init__(self, folder):
        self.folder = folder
        self.run_dir = RunDir(folder / "runs" / "r")

    def script(self, text, name="train.py"):
        (self.folder / name).write_text(dedent(text))
        return name

    def start(self, *args, name="r", checked=False, **kwargs):
        ours = [*(["--name", name] if name else []), *([] if checked else ["--no-check"])]
        command = [*COMMAND, *ours, *map(str, args)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=self.folder, text=True, env=ENV, **{**pipes, **kwargs})

    def run(self, *args, timeout_s=DEADLINE_S, **kwargs):
        process = self.start(*args, **kwargs)
        process.out, process.err = process.communicate(timeout=timeout_s)
        return process

    def log(self, rank):
        return self.run_dir.rank_log(1, rank).read_text()

    def events(self):
        return [event["event"] for event in read_json_lines(self.run_dir.events)]


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.fixture
def here(bench, monkeypatch, capfd):
    """`paceline run --no-check` in this process, for what starts no rank: (exit code, stdout, stderr)."""

    def run(*args):
        monkeypatch.chdir(bench.folder)
        code = run_command(["run", "--no-check", *args])
        return code, *capfd.readouterr()

    return run


def weights(done):
    """The last word of the last line of each rank."""
    last = {line.split()[0]: line.split()[-1] for line in done.out.splitlines()}
    return list(last.values())


@pytest.mark.soak
def test_a_ddp_script_trains_from_its_snapshot_after_a_check(bench):
    model = {"weight": torch.ones(1, 4), "bias": torch.zeros(1)}
    torch.save({"MODEL_STATE": model, "EPOCHS_RUN": 1}, bench.folder / "snapshot.pt")
    done = bench.run("--nproc", 2, SCRIPTS / "ddp.py", 2, checked=True)
    assert done.returncode == 0, done.err
    of_rank_0 = [line for line in done.out.splitlines() if line.startswith("[0] ")]
    assert of_rank_0[0] == "[0] Resuming training from snapshot at epoch 1"
    assert of_rank_0[1].startswith("[0] [rank 0] Epoch 1 | Steps: 4 | Loss ")
    assert "Epoch 0" not in done.out
    assert len(set(weights(done))) == 1
    assert torch.load(bench.folder / "snapshot.pt")["EPOCHS_RUN"] == 2
    assert "no rank joined" not in done.err


@pytest.mark.soak
def test_a_recorded_error_is_shown_with_its_traceback_and_explained_last(bench):
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


@pytest.mark.parametrize("script, package, output", [
    pytest.param("lightning_fit.py", "lightning", "4 steps", marks=pytest.mark.soak),
    pytest.param("hf_trainer.py", "transformers", "3 steps", marks=pytest.mark.soak),
    pytest.param("accelerated.py", "accelerate", "sum 2.0, 4 steps", marks=pytest.mark.soak),
])  # fmt: skip
def test_a_script_of_another_trainer_runs_as_it_is_on_two_processes(bench, script, package, output):
    pytest.importorskip(package, reason=f"{package} is not installed")
    done = bench.run("--nproc", 2, "--", SCRIPTS / script, bench.folder / "out", timeout_s=240)
    assert done.returncode == 0, done.out + done.err
    last = {
        rank: next(line for line in done.out.splitlines() if f"rank {rank} of 2, {output}" in line) for rank in (0, 1)
    }
    assert last[0].split()[-1] == last[1].split()[-1]  # one weight, trained together


def test_ranks_get_the_variables_of_torchrun_and_their_own_arguments_and_the_run_folder_repeats_the_run(bench):
    (bench.folder / "pkg").mkdir()
    (bench.folder / "pkg" / "__init__.py").write_text("")
    bench.script("""
        import os, sys
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        print(*[os.environ[name] for name in names], int(os.environ["MASTER_PORT"]) > 0, repr(sys.stdin.read()), sys.argv[1:])
    """, name="pkg/train.py")  # fmt: skip
    (bench.folder / "answers.txt").write_text("yes\n")
    arguments = ["--nproc", "7", "-m", 'a "b"', "--help", "größe\n模\x7f"]
    with (bench.folder / "answers.txt").open() as answers:
        ours = ["--nproc", 2, "--device", "cpu", "--tag", "wide", "--tag", "first", "--note", "a test"]
        done = bench.run(*ours, "-m", "pkg.train", *arguments, stdin=answers)
    assert "note    the script gets no standard input: what is piped in stays unread\n" in done.err
    output = f"True '' {arguments}"
    assert sorted(done.out.splitlines()) == [f"[0] 0 0 2 2 127.0.0.1 {output}", f"[1] 1 1 2 2 127.0.0.1 {output}"]
    assert "note    no rank joined a process group: each of the 2 ranks worked alone\n" in done.err
    assert (done.returncode, bench.events()) == (0, ["script", "attempt", "attempt_ended", "finished"])
    assert tomllib.loads(bench.run_dir.config_toml.read_text()) == {
        "command": ["-m", "pkg.train", *arguments], "nproc": 2, "device": "cpu", "cwd": str(bench.folder),
    }  # fmt: skip
    assert not bench.run_dir.metrics.exists()
    status = run_status(bench.run_dir)
    assert (status.state, status.command[:2]) == ("finished", ["-m", "pkg.train"])
    assert (status.tags, status.note) == (["wide", "first"], "a test")
    second = bench.run("--runs-dir", "more", bench.run_dir.config_toml, name="r2")
    assert sorted(second.out.splitlines()) == sorted(done.out.splitlines())
    assert (bench.folder / "more" / "r2" / "config.toml").read_text() == bench.run_dir.config_toml.read_text()


def test_resume_starts_a_script_again_in_its_folder_and_a_good_end_does_not_hide_what_its_output_shows(
    bench, capfd, monkeypatch
):
    bench.script("""
        import os, signal, sys, traceback
        from pathlib import Path
        saved = Path(os.environ["PACELINE_RUN"]) / "step"
        print("step", saved.read_text() if saved.exists() else 0, "attempt", os.environ["PACELINE_ATTEMPT"], flush=True)
        if os.environ["PACELINE_ATTEMPT"] == "1":
            saved.write_text("20")
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        except RuntimeError:
            traceback.print_exc()
    """)
    assert bench.run("--nproc", 1, "--no-recover", "--", "train.py").returncode == 128 + signal.SIGKILL
    monkeypatch.chdir(bench.folder)
    explanation = explain_run(RunDir(Path("runs/r")))
    assert explanation.cause == "killed-from-outside"  # as the kernel's counter showed the supervisor
    assert "`paceline resume runs/r` starts the script again in its folder" in explanation.fix
    resume = [*COMMAND[:-1], "resume", "r", "--no-check", "--quiet-ranks"]
    done = subprocess.run(resume, cwd=bench.folder, env=ENV, text=True, capture_output=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "step 20 attempt 2")
    assert "note    exit code 0, and yet a rank requested more memory than its GPU had: 2.00 GiB" in done.stderr
    assert any("ended with exit code 0" in note for note in explain_run(RunDir(Path("runs/r"))).notes)
    shown = "its output shows a failure: a rank requested more memory than its GPU had: 2.00 GiB"
    assert any(shown in note for note in run_status(bench.run_dir).notes)
    report = markdown_report(bench.run_dir.path, now=time.time())
    assert "# r: finished" in report and shown in report and "**cuda-oom**" in report
    for args, message in (
        ([], "r has finished: its script ended with exit code 0"),
        (["--num-steps", "4"], "--num-steps is not for the run of a script"),
        (["--step", "4"], "--step is not for the run of a script"),
    ):
        assert run_command(["resume", "r", *args]) != 0
        assert message in capfd.readouterr().err


@pytest.mark.soak
def test_a_failure_that_a_script_only_logs_is_a_note_behind_its_good_end(bench):
    bench.script("import logging; logging.error('training failed: no reason is known')")
    done = bench.run("--nproc", 1, "train.py")
    assert (done.returncode, "note    exit code 0, and yet the failure is not in the catalogue" in done.err) == (
        0,
        True,
    )


@pytest.mark.parametrize(("lines_behind", "is_noted"), [(3, True), (60, False)])
def test_an_error_that_a_script_went_on_behind_is_no_doubt_about_its_good_end(tmp_path, lines_behind, is_noted):
    log = tmp_path / "0.log"
    error = "FileNotFoundError: [Errno 2] No such file: 'a.csv'\n"
    log.write_text(error + "sample 17 is left out\n" * lines_behind)
    found = Explanation("dataset-missing", evidence=(Evidence(1, error, 0, str(log)),))
    assert went_on(found) is not is_noted
    assert not went_on(replace(found, cause="loss-nan"))  # whose first line may be far from the end


@pytest.mark.soak
def test_a_good_end_stays_good_whatever_lies_beside_the_logs_and_what_is_left_running_is_ended_and_named(bench):
    name = bench.script("""
        import os, subprocess, sys
        from pathlib import Path
        Path(os.environ["PACELINE_RUN"], "logs", "1", "other.log").symlink_to("nowhere")
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # upload"]).pid)
    """)
    done = bench.run("--nproc", 1, name)
    assert (done.returncode, "standard input" in done.err) == (0, False)
    assert "ended what the ranks had left running: " in done.err and "# upload" in done.err
    assert "done    in " in done.err
    assert "note    its output could not be explained (FileNotFoundError: " in done.err
    command = Path(f"/proc/{done.out.split()[-1]}/cmdline")
    with suppress(ProcessLookupError):  # it ends meanwhile
        assert not command.exists() or not command.read_bytes()  # nobody has asked for its exit code


@pytest.mark.soak
def test_a_full_disk_behind_stdout_ends_no_run_and_is_reported_with_the_place_of_the_logs(bench):
    bench.script("print('a result'); raise SystemExit(7)")
    with open("/dev/full", "w") as full:
        done = bench.run("--nproc", 1, "--max-attempts", 1, "--", "train.py", stdout=full)
    assert (done.returncode, bench.log(0)) == (7, "a result\n")
    note = "note    a part of the output could not be written (No space left on device): that of the ranks is in "
    assert done.err.splitlines()[-1] == f"{note}runs/r/logs/1"


@pytest.mark.soak
def test_a_run_that_is_renamed_while_its_ranks_start_has_their_logs_and_files_in_the_new_place(bench):
    bench.script("""
        import os
        print(os.environ["PACELINE_RUN"])
    """)
    process, deadline = bench.start("--nproc", 1, "train.py"), time.monotonic() + DEADLINE_S
    while not bench.run_dir.logs(1).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    folder = bench.run_dir.path.rename(bench.run_dir.path.with_name("r-lr3"))
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert RunDir(folder).rank_log(1, 0).read_text() == f"{folder}\n"
    assert not bench.run_dir.path.exists()


@pytest.mark.soak
def test_a_script_that_saves_into_its_renamed_run_folder_is_started_again_in_the_new_one_and_fails_there(bench):
    bench.script("""
        import os
        from pathlib import Path
        run = Path(os.environ["PACELINE_RUN"])
        print("before", flush=True)
        if run.name == "r":
            run.rename(run.with_name("r-lr3"))
        (run / "last.pt").write_text("weights")
        print("after")
        raise SystemExit(7)
    """)
    done = bench.run("--nproc", 1, "train.py")
    assert (done.returncode, done.out.count("before\n"), done.out.splitlines()[-1]) == (7, 2, "after")
    assert "\nthe run folder was renamed: it is runs/r-lr3 now\n" in done.err
    assert "attempt 2 now: continuing in the renamed folder\n" in done.err
    assert "\nlog: runs/r-lr3/logs/2/0.log\n" in done.err
    assert not bench.run_dir.path.exists()
    bench.run_dir = RunDir(bench.folder / "runs" / "r-lr3")
    assert (bench.run_dir.path / "last.pt").exists()
    assert bench.events()[-1] == "failed" and run_status(bench.run_dir).state == "failed"


@pytest.mark.soak
def test_a_run_without_a_name_is_called_after_its_script_and_paceline_itself_writes_to_stderr_only(bench):
    bench.script("print('a result')", name="my exp.v2.py")
    done = bench.run("--nproc", 1, "--", "./my exp.v2.py", "--lr", "0.1", name=None)
    [name] = [path.name for path in (bench.folder / "runs").iterdir()]
    assert name.startswith("my-exp-20")
    assert done.out == "a result\n"
    assert done.err.splitlines()[0] == "script  './my exp.v2.py' --lr 0.1"
    assert done.err.splitlines()[1].startswith("device  1 CPU process x ")
    assert done.err.splitlines()[-1] == f"logs    runs/{name}/logs/1"


@pytest.mark.soak
@pytest.mark.parametrize("end, code", [
    ("sys.exit(137)", 137),  # a signal only if a shell says it: below
    ("sys.exit(7)", 7), ("os._exit(3)", 3), ("raise ValueError('no')", 1), ("os.kill(os.getpid(), 9)", 128 + 9),
    ("os.kill(os.getpid(), 11)", 128 + 11), ("os.kill(os.getpid(), 15)", 128 + 15),
])  # fmt: skip
def test_the_exit_code_is_that_of_the_root_cause_as_a_shell_reports_it(bench, end, code):
    bench.script(f"import os, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(600)")
    done = bench.run("--nproc", 2, "--no-recover", "--", "train.py")
    assert done.returncode == code
    lines = list(read_json_lines(bench.run_dir.events))
    events = {event["event"]: event for event in lines}
    assert (events["failed"]["rank"], events["failed"]["exit_code"]) == (1, code)
    (root,) = [event for event in lines if event["event"] == "rank_failed" and event["rank"] == 1]
    assert (root["signal"] is None) == ("kill" not in end)
    assert (events["attempt_ended"]["exit_code"], run_status(bench.run_dir).state) == (code, "failed")


@pytest.mark.soak
@pytest.mark.parametrize("message, code", [
    ("dataset shard 12 has a wrong magic number", 1),
    ("failed to download the dataset", 7),
])  # fmt: skip
def test_a_script_whose_data_is_damaged_ends_as_after_a_mistake(bench, message, code):
    bench.script(f"import sys\nprint('ERROR: {message}')\nsys.exit(7)")
    assert bench.run("--nproc", 1, "--no-recover", "--", "train.py").returncode == code
    assert [event["cause"] for event in read_json_lines(bench.run_dir.events) if event["event"] == "verdict"] == [
        "dataset-download"
    ]


SAVES_AT_CTRL_C = """
    import sys, time
    try:
        print("ready", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        if "--raise" in sys.argv:
            raise
        print("saved", flush=True)
"""


def test_lines_come_while_the_script_runs_and_ctrl_c_reaches_the_program_below_shells_and_lets_it_end(bench):
    """It does not reach the filter of the program, and the program's traceback is no failure."""
    bench.script(SAVES_AT_CTRL_C)
    bench.script("#!/bin/bash\nbash inner.sh\nexit $?\n", "train.sh")
    inner = f"{sys.executable} train.py ${{raises[$RANK]}} | tee $RANK.txt\n"
    bench.script(f"raises=('' --raise)\n{inner}", "inner.sh")
    (bench.folder / "train.sh").chmod(0o755)
    process = bench.start("--nproc", 2, "--", "./train.sh")
    assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    append_event(bench.run_dir, "verdict", attempt=0, cause="hang", rank=1, step=7, summary="no rank made progress")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "\nnote    attempt 0 failed: hang: no rank made progress (rank 1, last step 7)\ninterrupted after " in err
    assert "stopping: SIGINT sent, the script has 60 s to end; Ctrl-C again to end now\n" in err
    assert "[0] saved\n" in out and "[1] KeyboardInterrupt\n" in out
    assert (bench.events()[-2:], run_status(bench.run_dir).state) == (["attempt_ended", "interrupted"], "stopped")
    assert explain_run(bench.run_dir).cause == "keyboard-interrupt"
    assert "\nsaved\n" in (bench.folder / "0.txt").read_text()


@pytest.mark.soak
def test_paceline_stop_lets_a_script_save_that_does_so_at_sigterm_alone(bench):
    bench.script("""
        import signal, sys, time
        def save(*_):
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        time.sleep(600)
    """)
    process = bench.start("--nproc", 1, "--", "train.py")
    assert process.stdout.readline() == "ready\n"
    stop = [sys.executable, "-m", "paceline.cli", "stop", "r"]
    stopped = subprocess.run(stop, cwd=bench.folder, env=ENV, capture_output=True, text=True, timeout=DEADLINE_S)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (130, "saved\n")
    assert "stopping: SIGTERM sent, the script has 60 s to end; Ctrl-C again to end now\n" in err
    assert (stopped.stdout.startswith("stopped: runs/r\n"), explain_run(bench.run_dir).cause) == (
        True,
        "keyboard-interrupt",
    )


@pytest.mark.soak
def test_a_reader_that_leaves_before_the_first_line_prevents_no_script(bench):
    bench.script("print('line'); open('ended', 'w').close()")
    reader, writer = os.pipe()
    os.close(reader)
    process = bench.start("--nproc", 1, "--", "train.py", stdout=writer, stderr=writer)
    os.close(writer)
    assert process.wait(DEADLINE_S) == 0
    assert ((bench.folder / "ended").exists(), run_status(bench.run_dir).state) == (True, "finished")


@pytest.mark.soak
def test_a_reader_that_has_seen_enough_does_not_end_the_run(bench):
    bench.script("""
        import time
        for i in range(20):
            print("line", i)
            time.sleep(0.02)
        open("ended", "w").close()
    """)
    command = shlex.join([*COMMAND, "--no-check", "--nproc", "1", "--name", "r", "--", "train.py"])
    subprocess.run(
        f"{command} | head -1", shell=True, cwd=bench.folder, env=ENV, capture_output=True, timeout=DEADLINE_S
    )
    deadline = time.monotonic() + DEADLINE_S
    while run_status(bench.run_dir).state in LIVE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ((bench.folder / "ended").exists(), run_status(bench.run_dir).state) == (True, "finished")


@pytest.mark.soak
def test_one_rank_shown_alone_is_the_first_and_a_flood_of_lines_is_shown_whole(bench):
    bench.script("import os; print(f\"rank {os.environ['RANK']}{'x' * 50}\\n\" * 100_000, end='')")
    done = bench.run("--nproc", 2, "--quiet-ranks", "--", "train.py")
    assert done.out == ("rank 0" + "x" * 50 + "\n") * 100_000
    assert bench.log(1) == ("rank 1" + "x" * 50 + "\n") * 100_000


def test_show_env_prints_what_the_ranks_get_and_starts_nothing(bench, here):
    bench.script("print('started')")
    code, out, _ = here("--nproc", "2", "--device", "cpu", "--show-env", "--", "train.py")
    assert code == 0
    assert "ACCELERATE_USE_CPU=true" in out
    assert "started" not in out
    assert not (bench.folder / "runs").exists()


def test_a_name_that_is_taken_is_refused_before_anything_starts(bench, here):
    bench.script("print('started')")
    bench.run_dir.path.mkdir(parents=True)
    bench.run_dir.config_toml.touch()
    code, out, err = here("--name", "r", "--nproc", "1", "--", "train.py")
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        "error: runs/r already exists",
        "  fix: another --name; without --name, script and time make the name",
    ]  # fmt: skip


@pytest.mark.parametrize("args, code, message", [
    (["--", "nowhere.py"], 1, "script nowhere.py does not exist in "),
    (["--nproc-per-node=4", "--", "train.py"], 2, "--nproc-per-node is not an option of paceline run"),
    (["--nproc", "99999", "--", "train.py"], 2, "--nproc 99999 is out of range"),
    (["--device", "tpu", "--", "train.py"], 2, "--device tpu is not known"),
    (["--tag", "two words", "--", "train.py"], 2, "'two words' is not a tag"),
    (["--name", "a/b", "--", "train.py"], 1, "name 'a/b' cannot be a folder"),
    ([], 2, "run needs a script"),
])  # fmt: skip
def test_what_cannot_run_is_refused_in_two_lines_and_leaves_nothing(bench, here, args, code, message):
    bench.script("print('started')")
    exit_code, out, err = here(*args)
    assert (exit_code, out) == (code, "")
    assert err.startswith(f"error: {message}")
    assert len(err.splitlines()) == 2
    assert not (bench.folder / "runs").exists()


def test_a_folder_that_cannot_be_written_is_reported(bench, here):
    bench.script("print('started')")
    (bench.folder / "file").write_text("")
    _, _, err = here("--name", "r", "--runs-dir", "file", "--nproc", "1", "--", "train.py")
    assert err.splitlines()[0] == "error: run folder file/r cannot be written: Not a directory"


@pytest.fixture
def facts_at_once(monkeypatch):
    """The checks start no probe. README's commands test the checks with their probes."""
    facts: Future = Future()
    facts.set_result(([{}], None))
    monkeypatch.setattr("paceline.launch.script.script_facts", lambda *_: facts)


def test_a_failed_check_stops_the_run_before_it_has_a_folder(tmp_path, monkeypatch, facts_at_once):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('started')")
    calls = []

    def check(script, run, facts, *, config, trackers, resumes):
        calls.append((script.command, run.path))
        return CheckResult([{}], [Finding("no-room", "stop", "no room", "it would fail", "make room")])

    monkeypatch.setattr("paceline.launch.script.check_script", check)
    with pytest.raises(PacelineError, match="this script would fail: no-room"):
        run_script(ONE_RANK)
    assert calls == [(("train.py",), Path("runs/r"))]
    assert not Path("runs").exists()


@pytest.mark.soak
def test_the_findings_of_the_checks_are_in_the_run_folder(tmp_path, monkeypatch, capfd, facts_at_once):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import os; print(os.environ['USE_LIBUV'])")
    checked = CheckResult([{"host": {"name": "ada"}, "torch": {"libuv": False}}], [])
    monkeypatch.setattr("paceline.launch.script.check_script", lambda *_, **__: checked)
    assert run_script(ONE_RANK) == 0
    assert capfd.readouterr().out == "0\n"
    assert Path("runs/r/findings.json").read_text() == "[]\n"
    assert json.loads(Path("runs/r/facts/ada.json").read_text()) == checked.facts[0]


def test_any_executable_is_run_as_it_is_without_a_check_and_the_exit_code_of_a_shell_may_be_a_signal(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    Path("go.sh").write_text('#!/bin/sh\necho rank $RANK: "$1"\nsleep 0.5\nexit 137\n')
    Path("go.sh").chmod(0o755)
    monkeypatch.setattr("paceline.launch.script.check_script", lambda *_, **__: 1 / 0)
    assert run_script(replace(ONE_RANK, command=("./go.sh", "a  b"), check=False, recover=False)) == 137
    assert capfd.readouterr().out == "rank 0: a  b\n"
    (failed,) = [event for event in read_json_lines(RunDir(Path("runs/r")).events) if event["event"] == "rank_failed"]
    assert (failed["signal"], failed["exit_code"]) == ("SIGKILL", None)


@pytest.mark.parametrize("changed", [{"cwd": "5"}, {"command": "[1]"}, {"command": '"x.py"'}, None])
def test_a_config_that_is_not_of_a_script_or_has_a_wrong_type_is_refused(tmp_path, changed):
    lines = (
        {"command": '["x.py"]', "nproc": "1", "device": '"cpu"', "cwd": '"/"', **changed} if changed else {"depth": "4"}
    )
    (tmp_path / "c.toml").write_text("".join(f"{name} = {value}\n" for name, value in lines.items()))
    with pytest.raises(PacelineError) as error:
        read_request([str(tmp_path / "c.toml")], {})
    if changed:
        assert error.value.fix == 'command = ["x.py"] and cwd = "/home/me/code"'
    else:
        assert error.value.message.endswith("is not the config of a script: command, cwd, device, nproc not in it")


def test_a_flag_wins_over_the_config_of_an_earlier_run(tmp_path):
    script = Script(("train.py",), 2, "cpu", tmp_path, {"hosts": "ada,bob", "ports": "29400-29500"})
    (tmp_path / "c.toml").write_text(format_config(script))
    machine = Machine(gpus=(), cpu_cores=2, cpu_bf16=False, memory_bytes=1 << 33, hosts=2)
    assert make_script(read_request([str(tmp_path / "c.toml")], {}), machine) == script
    changed = make_script(read_request([str(tmp_path / "c.toml")], {"nproc": 1, "hosts": "eve,ada"}), machine)
    assert (changed.nproc, changed.hosts["hosts"]) == (1, "eve,ada")
