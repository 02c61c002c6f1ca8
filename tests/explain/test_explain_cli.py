"""`paceline explain` on the command line: two lines first, any input, every output format."""

import bz2
import gzip
import io
import json
import lzma
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from log_samples import OOM

from paceline.cli import run_command
from paceline.explain.catalogue import load_catalogue
from paceline.explain.explanation import with_commands
from paceline.explain.several_runs import newest_job
from paceline.heartbeat import HeartbeatWriter
from paceline.rundir import RunDir, append_event, lock_run, write_atomic

LOG = """\
step 00001/00100 | loss 3.100
step 00002/00100 | loss 3.000
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 31, in main
[rank1]:     loss = model(x)
[rank1]: OSError: [Errno 28] No space left on device
[rank0]: RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12455
"""
TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
KeyError: 'x'
"""
TWO_RUNS = "these are the logs of 2 runs, and"
KEYS = {"cause", "also", "confidence", "rank", "step", "host", "line", "summary", "fix", "evidence", "consequences"}


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(LOG)
    return path


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of two ranks: one was killed, the other lost its connection."""
    # tests beside this one make real kills
    monkeypatch.setattr("paceline.explain.run_folder.has_oom_kill", lambda start, end: False)
    run = RunDir(tmp_path / "runs" / "books")
    run.logs(1).mkdir(parents=True)
    write_atomic(run.config_toml, 'name = "books"\ndevice_batch_size = 16\n')
    append_event(run, "attempt", attempt=1, nproc=2, world_size=2, pids=[4711, 4712])
    run.rank_log(1, 0).write_text(
        "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12455\n"
    )
    run.rank_log(1, 1).write_text("")
    lost = {"attempt": 1, "exit_code": None, "message": "x"}
    append_event(run, "rank_failed", rank=1, signal="SIGKILL", consequence=False, **lost)
    append_event(run, "rank_failed", rank=0, signal="SIGTERM", consequence=True, **lost)
    for rank in (0, 1):
        HeartbeatWriter(run, rank).beat(40, "train")
    return run


def explained(capsys, *args):
    """The output of the command with these arguments."""
    assert run_command(["explain", *map(str, args)]) == 0
    return capsys.readouterr().out


def test_the_first_two_lines_have_the_cause_the_place_and_the_fix(log, capsys):
    first, second, *others = explained(capsys, log).splitlines()
    assert first.startswith("disk-full: ") and "rank 1" in first and "step 2" in first
    assert second.startswith("  fix: ")
    assert others[1:3] == ["evidence", "  line 3  rank 1  OSError: [Errno 28] No space left on device"]
    assert "consequences" in others and "rank 0 failed only as a consequence" in others


def test_piped_text_has_no_colours(log, capsys):
    assert "\x1b" not in explained(capsys, log)


def test_json_has_every_field_that_programs_depend_on(log, capsys):
    fields = json.loads(explained(capsys, log, "--json"))
    assert set(fields) >= KEYS
    assert (fields["cause"], fields["rank"], fields["step"], fields["line"], fields["victims"]) == (
        "disk-full",
        1,
        2,
        3,
        [0],
    )


def test_markdown_can_be_pasted_into_an_issue(log, capsys):
    text = explained(capsys, log, "--markdown")
    assert text.startswith("**disk-full**: ") and "\n**Fix:** " in text and text.count("```") == 4


@pytest.mark.parametrize("fix, expected", [
    ("run `df -h /a_b` and `rm -r *.tmp`, then *wait*", r"run `df -h /a_b` and `rm -r *.tmp`, then \*wait\*"),
    ("a tick ` alone [x](y)", r"a tick \` alone \[x\](y)"),
])  # fmt: skip
def test_commands_of_a_fix_stay_code_in_markdown_and_the_rest_is_escaped(fix, expected):
    assert with_commands(fix) == expected


STEERING = (
    "\u009b31m\u009b\u202e\u2066\x07\u200f\x1b]0;x\x07"  # 8-bit CSI, direction of text, bell, the title of the window
)


@pytest.mark.parametrize("option", [(), ("--json",), ("--markdown",)])
def test_no_character_of_the_log_steers_the_terminal_or_turns_the_text(tmp_path, capsys, option):
    path = tmp_path / f"a{STEERING[0]}b.log"
    path.write_text(
        f"step 1 loss: 2\nRuntimeError: cannot open the fi{STEERING}le /data/{STEERING}x.bin\n", encoding="utf-8"
    )
    error = tmp_path / "error.json"
    error.write_text(json.dumps({"message": f"OSError: No space left on device {STEERING}", "step": 4}))
    text = explained(capsys, path, error, *option)
    assert "file /data/x.bin" in text and "No space left on device" in text
    assert not set(STEERING) - set("31m]0;x") & set(text)


def test_text_of_the_log_is_no_markdown_in_the_headline(tmp_path, capsys):
    path = tmp_path / "x.log"
    path.write_text("ValueError: [click](http://x) <img src=x> **bold** `code` #1 | a\n")
    headline = explained(capsys, path, "--markdown").splitlines()[0]
    assert r"\[click\](http://x) \<img src=x\> \*\*bold\*\* \`code\` \#1 \| a" in headline


def test_json_marks_the_fields_that_can_quote_the_log(log, capsys):
    fields = json.loads(explained(capsys, log, "--json"))
    texts = ["evidence.text", "evidence.source", "consequences.text", "consequences.source"]
    assert fields["untrusted"][:7] == ["summary", "fix", "host", *texts]


def test_standard_input_is_read(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LOG.encode())))
    assert explained(capsys, "-").startswith("disk-full: ")


@pytest.mark.parametrize("module", [gzip, bz2, lzma])
def test_a_compressed_log_is_read_directly_whatever_its_name_is(module, tmp_path, capsys, monkeypatch):
    path = tmp_path / "train.log.1"
    path.write_bytes(module.compress(LOG.encode()))
    assert explained(capsys, path).startswith("disk-full: ")
    with path.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert explained(capsys, "-").startswith("disk-full: ")


def test_a_log_that_only_another_program_can_unpack_is_refused_with_its_command(tmp_path, capsys):
    path = tmp_path / "train log.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd rest")
    assert run_command(["explain", str(path)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"error: '{path}' is compressed",
        f"  fix: zstd -dc '{path}' | paceline explain -",
    ]


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_an_archive_is_refused_with_the_commands_that_unpack_and_explain_it(mode, log, tmp_path, capsys):
    with tarfile.open(path := tmp_path / "logs.tgz", mode) as archive:
        archive.add(log)
    assert run_command(["explain", str(path)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"error: {path} is an archive of files",
        f"  fix: mkdir logs && tar -xf {path} -C logs && paceline explain logs",
    ]


def test_an_incomplete_compressed_log_is_read_as_far_as_possible(tmp_path, capsys):
    path = tmp_path / "train.log.gz"
    path.write_bytes(gzip.compress(LOG.encode())[:-9])
    assert explained(capsys, path)


def test_a_script_in_place_of_its_output_is_refused(tmp_path, capsys):
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --output=logs/%j.out\nsrun python train.py\necho 'Training complete'\n")
    assert run_command(["explain", str(script)]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: {script} is a script, not its output\n  fix: pass what it printed"
    )
    log = tmp_path / "train.py.sh"  # a name that says little
    log.write_text("step 1 loss 2.0\nstep 2 loss 1.9\nstep 3 loss 1.8\nTraining complete\n")
    assert explained(capsys, log)


def test_a_healthy_log_is_reported_as_healthy(tmp_path, capsys):
    path = tmp_path / "x.log"
    path.write_text("step 1/2 | loss 3.0\nstep 2/2 | loss 2.5\n")
    assert explained(capsys, path) == "healthy: no failure found: 2 progress lines, step 1 to 2, loss 2.5\n"


def test_a_run_is_explained_by_its_folder_and_by_its_name(run, capsys, monkeypatch):
    monkeypatch.chdir(run.path.parents[1])
    fields = json.loads(explained(capsys, "books", "--json"))
    assert (fields["rank"], fields["step"], fields["victims"]) == (1, 40, [0])
    assert fields["cause"] == "killed-from-outside"
    assert json.loads(explained(capsys, "runs/books", "--json")) == fields


def test_a_folder_of_one_run_means_that_run(run, capsys):
    assert run_command(["explain", str(run.path.parent), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cause"] == "killed-from-outside"


@pytest.mark.parametrize(
    "names", [["runs"], ["."], ["books", "newer"], ["runs/books", "runs/newer"], ["newer", "train.log"]]
)
def test_two_runs_are_not_read_as_the_ranks_of_one(names, run, log, capsys, monkeypatch):
    monkeypatch.chdir(log.parent)
    newer = RunDir(run.path.parent / "newer")
    shutil.copytree(run.path, newer.path)
    os.utime(run.events, (0, 0))
    assert run_command(["explain", *names]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: explain takes one run at a time, without further logs: ")
    assert "fix: paceline explain runs/newer explains the newest; `paceline runs runs` lists them" in error


@pytest.mark.parametrize(
    "out, err", [("train.out", "train.err"), ("stdout.log", "stderr.log"), ("train.o103", "train.e103")]
)
def test_the_errors_that_a_job_writes_beside_its_output_are_read_too(tmp_path, capsys, monkeypatch, out, err):
    monkeypatch.chdir(tmp_path)
    (tmp_path / out).write_text("".join(f"step {step}/900 loss {9 / step:.3f}\n" for step in range(1, 40)))
    assert explained(capsys, out).startswith("healthy: ")
    (tmp_path / err).write_text(OOM)
    explanation = json.loads(explained(capsys, out, "--json"))
    assert explanation["cause"] == "cuda-oom"
    assert explanation["notes"][0] == f"{err}, which lies beside it, is read too"
    assert json.loads(explained(capsys, err, "--json"))["notes"] == []  # it shows the failure by itself


def test_settings_alone_are_no_log(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("data:\n  truncation: error\n" * 9)
    assert run_command(["explain", "."]) == 1
    assert "error: no log in ." in capsys.readouterr().err


def test_what_wandb_says_of_itself_is_no_log_of_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = (
        "2023-02-21 18:10:53,980 ERROR StreamThr :7864 [internal.py:wandb_internal():152] Internal process shutdown\n"
        * 20
    )
    files = {
        "logs/debug.log": own,
        "logs/debug-internal.log": own,
        "files/requirements.txt": "exceptiongroup==1.2.2\n" * 9,
    }
    output = "".join(f"step {step}/40 loss {9 / step:.3f}\n" for step in range(1, 40))
    for name, text in (files | {"files/output.log": output}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert explained(capsys, ".").startswith("healthy: ")
    (tmp_path / "files/output.log").write_text(output + OOM)
    assert explained(capsys, ".").startswith("cuda-oom: ")
    (tmp_path / "files/output.log").unlink()
    assert json.loads(explained(capsys, ".", "--json"))["cause"] == "unknown"  # nothing else is there


def test_the_logs_of_several_jobs_are_several_runs_and_the_newest_is_explained(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cancelled = "slurmstepd: error: *** JOB 99 ON node-3 CANCELLED AT 2026-08-21T02:33:05 DUE TO TIME LIMIT ***\n"
    for name, text in {
        "slurm-98.out": OOM,
        "slurm-99.out": cancelled,
        "train-103.err": LOG,
        "train-103.out": "",
    }.items():
        (tmp_path / name).write_text(text)
    explanation = json.loads(explained(capsys, ".", "--json"))
    assert (explanation["cause"], explanation["consequences"][0]["source"]) == ("disk-full", "train-103.err")
    assert explanation["notes"] == [
        "these are the logs of 3 jobs, and 103, the newest, is explained;"
        " the others: `paceline explain slurm-99.out`, `paceline explain slurm-98.out`"
    ]


@pytest.mark.parametrize(
    ("names", "num_jobs"),
    [
        ("train.o4711 train.e4711 train.o4712", 2),
        ("gpt2_100.log gpt2_101_0.log.gz", 2),
        ("slurm-1.out slurm-2.out slurm-3.out slurm-4.out slurm-5.out", 5),
        ("5001.out 5002.out 5002.err run.log", 2),
        ("100_0_log.out 100_1_log.out", 1),
        ("log-99.txt log-100.txt log-101.txt", 1),
        ("nccl.node7.4711.log nccl.node7.4712.log", 1),
        ("rank-100.log rank-101.log", 1),
        ("train-2026-11-27.log train-2026-11-28.log", 1),
        ("train-20261127-101500.log train-20261127-101600.log", 1),
    ],
)
def test_numbers_in_names_are_those_of_jobs_unless_they_are_ranks_processes_or_dates(names, num_jobs):
    files = [Path(name) for name in names.split()]
    newest, note = newest_job(files)
    assert note.startswith(f"these are the logs of {num_jobs} jobs") if num_jobs > 1 else newest == files


@pytest.mark.parametrize(
    ("names", "hours", "note"),
    [
        ("1.log 2.log", 1.5, f"{TWO_RUNS} 2.log, written last, is explained; the others: `paceline explain 1.log`"),
        ("monday.log tuesday.log", 0.2, f"{TWO_RUNS} tuesday.log, written last, is explained;"),
        ("monday.log tuesday.log", 0.1, "these files are read as the logs of one run"),
        ("0.log 1.log", 1.5, ""),
        ("monday.log tuesday.log", 0.01, ""),
        ("run1/train.log run2/train.log", 1.5, f"{TWO_RUNS} run2/train.log, written last, is explained;"),
        ("train.err train.out", 0.1, ""),
        ("train.err train.out", 1.5, ""),
        ("rank1.log rank2.log", 1.5, ""),
    ],
)  # fmt: skip
def test_of_logs_of_which_one_ends_long_after_the_others_the_last_is_explained(
    names, hours, note, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    first, last = map(Path, names.split())
    for path in (first, last):
        path.parent.mkdir(exist_ok=True)
    first.write_text(f"step 1 loss 4.0\nstep 2 loss 3.9\n{TRACEBACK}")
    last.write_text("".join(f"step {step} loss {4 - step / 50}\n" for step in range(100)) + "training finished\n")
    os.utime(first, (0, 0))
    os.utime(last, (0, 3600 * hours))
    explanation = json.loads(explained(capsys, ".", "--json"))
    assert explanation["cause"] == ("healthy" if "written last" in note else "user-code-exception")
    assert [text[: len(note)] for text in explanation["notes"]] == [note] * bool(note)


@pytest.mark.parametrize(
    "end", ["KeyboardInterrupt", "Killed", "slurmstepd: error: *** JOB 1 ON a CANCELLED AT 10:00 ***"]
)
def test_a_log_that_ends_from_outside_long_after_another_failed_is_of_the_same_run(end, tmp_path, capsys):
    steps = "".join(f"step {step} loss {4 - step / 50}\n" for step in range(100))
    (tmp_path / "ada.log").write_text(
        f"{steps}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    )
    (tmp_path / "bob.log").write_text(f"{steps}{end}\n")
    os.utime(tmp_path / "ada.log", (0, 0))
    assert json.loads(explained(capsys, tmp_path, "--json"))["cause"] == "cuda-oom"


def test_the_streams_of_an_older_run_are_left_out_together_and_a_good_end_is_no_other_run(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    steps = "".join(f"step {step} loss {4 - step / 50}\n" for step in range(100))
    for name, text in {"a.out": steps, "a.err": TRACEBACK, "b.log": f"{steps}training finished\n"}.items():
        Path(name).write_text(text)
        os.utime(name, (0, 0))
    os.utime("b.log")
    explanation = json.loads(explained(capsys, ".", "--json"))
    assert explanation["notes"] == [
        f"{TWO_RUNS} b.log, written last, is explained; the others: `paceline explain a.err a.out`"
    ]
    assert explanation["progress"]["steps"] == 100
    Path("a.err").unlink()
    Path("a.out").write_text(f"{steps}training finished\n")
    os.utime("a.out", (0, 0))
    assert json.loads(explained(capsys, ".", "--json"))["notes"] == []


def test_an_earlier_run_that_failed_is_named_with_its_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = "".join(f"step {step} loss {4 - step / 50}\n" for step in range(100))
    Path("a.log").write_text(f"{TRACEBACK}+ python train.py\n{steps}")
    Path("b.log").write_text(steps)
    assert "1 earlier run in a.log failed: user-code-exception (line 1)\n" in explained(capsys, "a.log", "b.log")


def test_the_errors_that_a_run_survived_are_named_with_the_file_where_several_are_read(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = "".join(f"step {step} loss {4 - step / 50}\n" for step in range(100))
    lost = "Error processing image {}: CUDA out of memory. Tried to allocate 122.00 MiB. GPU 0 has a total capacity of 79 GiB\n"
    Path("a.log").write_text(steps + "Training complete\n")
    Path("b.log").write_text("".join(lost.format(n) for n in range(5)) + steps + "Training complete\n")
    assert "the run continued after errors: cuda-oom (line 1 of b.log)\n" in explained(capsys, "a.log", "b.log")
    assert "the run continued after errors: cuda-oom (line 1)\n" in explained(capsys, "b.log")


def test_a_timeout_that_follows_from_a_rank_that_ended_long_before_is_explained_with_it(tmp_path, capsys):
    (tmp_path / "ada.log").write_text(TRACEBACK)
    message = "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, "
    watchdog = "[rank0]:[E1 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL("
    (tmp_path / "bob.log").write_text(f"step 1 loss 4.0\nstep 2 loss 3.9\n{watchdog}SeqNum=9)\n{message}\n")
    os.utime(tmp_path / "ada.log", (0, 0))
    assert explained(capsys, tmp_path).startswith("user-code-exception: KeyError")


def test_an_error_with_a_fix_that_a_rank_reported_itself_replaces_the_catalogues(run, capsys):
    error = {
        "time": "2026-11-20T10:00:00.000Z",
        "type": "PlanError",
        "message": "no room",
        "fix": "make room",
        "exit_code": 1,
    }
    run.rank_error(1, 0).write_text(json.dumps(error))
    first, second = explained(capsys, run.path).splitlines()[:2]
    assert "no room" in first and second == "  fix: make room"
    run.rank_error(1, 0).write_text(json.dumps({**error, "cause": "loss-nan"}))
    assert explained(capsys, run.path).startswith("loss-nan: no room")


def test_an_error_that_a_rank_reports_is_at_its_own_step_and_is_quoted_once(run, capsys):
    run.events.unlink()
    append_event(run, "attempt", attempt=1, nproc=1, world_size=1, pids=[4711])
    message = "the loss leaps to 19.9994 at step 2, 13.7608 above its recent mean (--max-loss-spike 3)"
    trace = f"""Traceback (most recent call last):
  File "/opt/paceline/train/worker.py", line 136, in train_rank
    done, bpb, stopped = loop.train(start)
paceline.train.trouble.LossTrouble: error: {message}
"""
    chain = "\nThe above exception was the direct cause of the following exception:\n\n"
    run.rank_log(1, 0).write_text(f"step 01/30 | loss 6.2386 | 235 ms\n{trace}{chain}{trace}")
    error = {"message": message, "fix": "lower --matrix-lr", "exit_code": 3, "cause": "loss-spike", "step": 2}
    run.rank_error(1, 0).write_text(json.dumps(error))
    output = json.loads(explained(capsys, run.path, "--json"))
    assert (output["summary"], output["step"]) == (message, 2)
    assert [message in item["text"] for item in output["evidence"]].count(True) == 1 and output["consequences"] == []
    append_event(
        run, "verdict", attempt=1, cause="loss-spike", step=2, rank=0, summary=message, fix="lower --matrix-lr"
    )
    output = explained(capsys, run.path)
    assert output.startswith(f"loss-spike: {message} (rank 0)\n") and "--cause" not in output


def test_half_the_batch_size_is_computed_from_the_runs_config(run, capsys):
    run.rank_log(1, 1).write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.56 GiB\n"
    )
    output = explained(capsys, run.path)
    assert output.startswith("cuda-oom: ") and "--device-batch-size 8" in output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "nothing to explain"),
        (["nowhere.log"], "no such file: nowhere.log"),
        (["-", "a.log"], "- is given with other logs"),
        (["--cause", "cuda-om"], "no cause cuda-om\n  fix: --cause cuda-oom\n"),
        (["--cause", "OOM"], "no cause OOM\n  fix: one of cuda-oom, host-oom-killed\n"),
    ],
)
def test_wrong_arguments_end_in_an_error_and_a_fix(args, message, capsys):
    assert run_command(["explain", *args]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and "\n  fix: " in error


def test_every_cause_is_listed_and_can_be_shown(capsys):
    lines = explained(capsys, "--list").splitlines()
    causes = load_catalogue().causes
    assert [line.split()[0] for line in lines] == sorted(causes)
    for name in causes:
        assert explained(capsys, "--cause", name).startswith(f"{name}: ")
    assert "\nfix if another process holds much of the GPU's memory:\n" in explained(capsys, "--cause", "cuda-oom")
    assert json.loads(explained(capsys, "--cause", "cuda-oom", "--json"))["id"] == "cuda-oom"


def test_a_log_of_a_megabyte_is_explained_in_limited_cpu_time_without_torch(tmp_path):
    path = tmp_path / "x.log"
    path.write_text(
        "".join(f"step {n:06d}/900000 | loss 1.{n:06d} | 612 ms | 856,679 tok/s\n" for n in range(18_000)) + LOG
    )
    reference = "import time; x = sorted(str(n) for n in range(200_000)); print(time.process_time())"
    code = (
        "import sys, time\n"
        "from paceline.cli import run_command; run_command(sys.argv[1:])\n"
        "print(time.process_time(), {'torch', 'numpy', 'rich'} & set(sys.modules))"
    )
    limits, seconds = [], []
    for _ in range(10):  # the minimum of both: other work on the machine makes single processes slow
        limits.append(30 * float(last_line(reference)))  # about 1.4 s, where 0.5 are usual
        output = last_line(code, "explain", str(path)).split()
        assert output[1] == "set()"
        seconds.append(float(output[0]))  # start-up included
        if min(seconds) < min(limits):
            break
    assert min(seconds) < min(limits)


def last_line(code, *args):
    """The last line that a new interpreter prints when it runs this code."""
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


def test_a_hang_is_explained_by_what_the_supervisor_recorded(run, capsys):
    run.hang(1).mkdir(parents=True)
    (run.hang(1) / "1.txt").write_text(
        'rank 1, process 4712\nmark: {"step": 40, "phase": "load"}\n\nState: S (sleeping)\n\nstacks, by faulthandler\n'
        'Current thread 0x7f (most recent call first):\n  File "loader.py", line 80 in micro_batch\n  File "loop.py", line 9\n'
    )
    verdict = {
        "cause": "hang",
        "rank": 1,
        "step": 40,
        "summary": "no rank got on for 60 s: rank 1 is in load",
        "fix": "x",
    }
    append_event(run, "verdict", attempt=1, confidence=1.0, **verdict)
    lines = explained(capsys, run.path).splitlines()
    assert lines[:2] == ["hang: no rank got on for 60 s: rank 1 is in load (last step 40)", "  fix: x"]
    assert lines[4:7] == [
        '  hangs/1/1.txt:2  rank 1  mark: {"step": 40, "phase": "load"}',
        "  hangs/1/1.txt:4  rank 1  State: S (sleeping)",
        '  hangs/1/1.txt:8  rank 1  File "loader.py", line 80 in micro_batch',
    ]
    assert "100 % sure" in lines


@pytest.fixture
def works(tmp_path):
    """A run whose ranks have trained, and that was stopped then."""
    run = RunDir(tmp_path / "runs" / "it's on")
    run.logs(1).mkdir(parents=True)
    write_atomic(run.config_toml, "device_batch_size = 16\n")
    append_event(run, "attempt", attempt=1, nproc=1, world_size=1, pids=[4711])
    run.rank_log(1, 0).write_text("".join(f"step {n:05d}/00100 | loss {3 - n / 50:.3f}\n" for n in range(30)))
    return run


@pytest.mark.parametrize(
    "sent, how", [("SIGINT", "Ctrl-C (SIGINT)"), ("SIGTERM", "paceline stop (SIGTERM to its ranks)")]
)
def test_the_stop_of_a_script_is_named_by_the_signal_that_its_ranks_got(works, capsys, sent, how):
    append_event(works, "script", command=["own.py"])
    append_event(works, "stopping", attempt=1, signal="SIGINT", sent=sent)
    append_event(works, "attempt_ended", attempt=1, state="interrupted", exit_code=130)
    first, *_ = explained(capsys, works.path).splitlines()
    assert first.startswith(f"keyboard-interrupt: the run was stopped on request, with {how}")


def test_a_run_that_was_stopped_with_ctrl_c_is_not_broken(works, capsys):
    append_event(works, "stopping", attempt=1, signal="SIGINT")
    append_event(works, "attempt_ended", attempt=1, state="interrupted", exit_code=130)
    first, second, *_ = explained(capsys, works.path).splitlines()
    assert first.startswith("keyboard-interrupt: the run was stopped on request, with Ctrl-C or paceline stop (SIGINT)")
    resume = f"`paceline resume {shlex.quote(str(works.path))}` goes on from the last checkpoint"
    assert second == f"  fix: nothing is broken: {resume}"
    write_atomic(works.config_toml, 'command = ["own.py"]\ncwd = "/"\n')  # resume refuses a script
    _, second, *_ = explained(capsys, works.path).splitlines()
    again = f"`paceline resume {shlex.quote(str(works.path))}` starts the script again in its folder"
    assert second == f"  fix: nothing is broken: {again}"


def test_what_the_supervisor_recorded_counts_where_the_logs_show_no_failure(works, capsys):
    append_event(works, "finished", step=30)
    append_event(
        works, "verdict", attempt=1, cause="disk-full", summary="the disk is full", fix="make room", confidence=0.8
    )
    append_event(works, "attempt_ended", attempt=1, state="failed", exit_code=3)
    assert explained(capsys, works.path).startswith("disk-full: the disk is full\n  fix: make room\n")


def test_an_attempt_without_an_end_that_no_process_holds_has_lost_its_command(works, capsys):
    lock = lock_run(works)
    assert explained(capsys, works.path).startswith("healthy: ")
    os.close(lock)
    first, second, *_ = explained(capsys, works.path).splitlines()
    assert first.startswith(
        "supervisor-lost: the command that ran attempt 1 was itself killed, or its machine went down"
    )
    assert second.endswith(f"`paceline resume {shlex.quote(str(works.path))}` goes on from the last checkpoint")
    write_atomic(works.config_toml, 'command = ["own.py"]\ncwd = "/"\n')
    _, second, *_ = explained(capsys, works.path).splitlines()
    assert second.endswith(f"`paceline resume {shlex.quote(str(works.path))}` starts the script again in its folder")
    append_event(works, "attempt_ended", attempt=1, state="succeeded", exit_code=0)
    assert explained(capsys, works.path).startswith("healthy: ")
