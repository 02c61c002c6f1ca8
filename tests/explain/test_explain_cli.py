"""`paceline explain` as it is typed: two lines first, any input, every form of output."""

import gzip
import io
import json
import subprocess
import sys

import pytest

from paceline.cli import run_command
from paceline.explain.catalogue import load_catalogue
from paceline.rundir import RunDir, append_event, write_atomic
from paceline.train.progress import Progress

LOG = """\
step 00001/00100 | loss 3.100
step 00002/00100 | loss 3.000
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 31, in main
[rank1]:     loss = model(x)
[rank1]: OSError: [Errno 28] No space left on device
[rank0]: RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12455
"""
KEYS = {"cause", "also", "confidence", "rank", "step", "host", "line", "summary", "fix", "evidence", "consequences"}


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(LOG)
    return path


@pytest.fixture
def run(tmp_path):
    """A run of two ranks of which one was killed and the other lost it."""
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
        Progress(run, rank).mark(40, "train")
    return run


def explained(capsys, *words):
    assert run_command(["explain", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_first_two_lines_say_what_broke_where_and_what_mends_it(log, capsys):
    first, second, *rest = explained(capsys, log).splitlines()
    assert first.startswith("disk-full: ") and "rank 1" in first and "step 2" in first
    assert second.startswith("  fix: ")
    assert rest[1:3] == ["evidence", "  line 3  rank 1  OSError: [Errno 28] No space left on device"]
    assert "only followed" in rest and "rank 0 only followed" in rest


def test_piped_text_has_no_colours(log, capsys):
    assert "\x1b" not in explained(capsys, log)


def test_json_has_every_field_that_programs_rely_on(log, capsys):
    said = json.loads(explained(capsys, log, "--json"))
    assert set(said) >= KEYS
    assert (said["cause"], said["rank"], said["step"], said["line"], said["victims"]) == ("disk-full", 1, 2, 3, [0])


def test_markdown_can_be_pasted_into_an_issue(log, capsys):
    text = explained(capsys, log, "--markdown")
    assert text.startswith("**disk-full**: ") and "\n**Fix:** " in text and text.count("```") == 4


def test_standard_input_is_read(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LOG.encode())))
    assert explained(capsys, "-").startswith("disk-full: ")


def test_a_packed_log_is_read_as_it_is(tmp_path, capsys):
    path = tmp_path / "train.log.gz"
    path.write_bytes(gzip.compress(LOG.encode()))
    assert explained(capsys, path).startswith("disk-full: ")


def test_a_packed_log_that_was_cut_is_read_as_far_as_it_goes(tmp_path, capsys):
    path = tmp_path / "train.log.gz"
    path.write_bytes(gzip.compress(LOG.encode())[:-9])
    assert explained(capsys, path)


def test_a_healthy_log_is_called_healthy(tmp_path, capsys):
    path = tmp_path / "x.log"
    path.write_text("step 1/2 | loss 3.0\nstep 2/2 | loss 2.5\n")
    assert explained(capsys, path) == "healthy: no failure found: 2 progress marks, step 1 to 2, loss 2.5\n"


def test_a_run_is_explained_by_its_folder_and_by_its_name(run, capsys, monkeypatch):
    monkeypatch.chdir(run.path.parents[1])
    said = json.loads(explained(capsys, "books", "--json"))
    assert (said["rank"], said["step"], said["victims"]) == (1, 40, [0])
    assert said["cause"] in (
        "host-oom-killed",
        "killed-from-outside",
    )  # where the kernel log may be read, it tells which
    assert json.loads(explained(capsys, "runs/books", "--json")) == said


def test_the_mistake_that_a_rank_has_named_itself_stands_with_its_fix(run, capsys):
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


def test_half_the_batch_is_worked_out_from_the_runs_own_config(run, capsys):
    run.rank_log(1, 1).write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.56 GiB\n"
    )
    said = explained(capsys, run.path)
    assert said.startswith("cuda-oom: ") and "--device-batch-size 8" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to explain"),
        (["nowhere.log"], "no such file: nowhere.log"),
        (["--cause", "cuda-om"], "no cause cuda-om"),
    ],
)
def test_what_cannot_be_explained_ends_in_two_lines(words, message, capsys):
    assert run_command(["explain", *words]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and "\n  fix: " in error


def test_the_list_names_every_cause_and_each_can_be_asked_for(capsys):
    lines = explained(capsys, "--list").splitlines()
    causes = load_catalogue().causes
    assert [line.split()[0] for line in lines] == sorted(causes)
    for name in causes:
        assert explained(capsys, "--cause", name).startswith(f"{name}: ")
    assert json.loads(explained(capsys, "--cause", "cuda-oom", "--json"))["id"] == "cuda-oom"


def test_a_log_of_a_megabyte_takes_less_than_a_third_of_a_second_of_cpu_time_and_no_torch(tmp_path):
    path = tmp_path / "x.log"
    path.write_text(
        "".join(f"step {n:06d}/900000 | loss 1.{n:06d} | 612 ms | 856,679 tok/s\n" for n in range(18_000)) + LOG
    )
    code = (
        "import sys, time\n"
        "from paceline.cli import run_command; run_command(sys.argv[1:])\n"
        "print(time.process_time(), {'torch', 'numpy', 'rich'} & set(sys.modules))"
    )
    words = [sys.executable, "-c", code, "explain", str(path)]
    last = [subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1] for _ in range(3)]
    assert all(line.endswith(" set()") for line in last)
    assert min(float(line.split()[0]) for line in last) < 0.3  # start-up included


def test_a_hang_is_told_by_what_the_supervisor_kept_of_it(run, capsys):
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
    assert lines[:2] == ["hang: no rank got on for 60 s: rank 1 is in load (step 40)", "  fix: x"]
    assert lines[4:7] == [
        '  hangs/1/1.txt:2  rank 1  mark: {"step": 40, "phase": "load"}',
        "  hangs/1/1.txt:4  rank 1  State: S (sleeping)",
        '  hangs/1/1.txt:8  rank 1  File "loader.py", line 80 in micro_batch',
    ]
    assert "100% sure" in lines
