"""Run folders that cannot be read, or hold what paceline never writes: one line, never a traceback, never a wait without end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_folders import asked, serving, utc, write_run

from paceline.cli import run_command
from paceline.errors import PacelineError
from paceline.explain.explanation import format_explanation
from paceline.explain.run_folder import explain_run
from paceline.rundir import append_event, append_json_line
from paceline.terminal import write_output
from paceline.watch.panels import run_panels
from paceline.watch.report import html_report, markdown_report
from paceline.watch.status import RunList, Shelf, format_run, open_reader
from paceline.watch.terminal.chart import CurveChoice
from paceline.watch.terminal.pages import NO_LOG, format_once, page_lines
from paceline.watch.terminal.runs import format_runs

NOW = 1_795_250_500.0
OTHER_USER = 65534
VIEWS = (["runs", "show", "kept"], ["watch", "kept", "--once"], ["report", "kept"], ["report", "kept", "--markdown"])


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path, "kept", end="failed", log="step 1\nTraceback (most recent call last):\nValueError: x\n")


def as_other_user(commands: list[list[str]], folder: Path) -> list[tuple[int, str]]:
    """Exit code and output of each command, run by a user who owns nothing, in processes forked from this one."""
    results = []
    for command in commands:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:  # a real process: the permissions of a user are not simulated
            with open(writing, "w") as pipe:
                os.chdir(folder)
                os.setgroups([])
                os.setgid(OTHER_USER)
                os.setuid(OTHER_USER)
                sys.stdout = sys.stderr = pipe
                code = 99
                try:
                    code = run_command(command)
                finally:
                    pipe.flush()
                    os._exit(code)
        os.close(writing)
        with open(reading) as pipe:
            text = pipe.read()
        results.append((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text))
    return results


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("closed", ["events.jsonl", "."])
def test_a_file_or_folder_of_another_user_is_one_line(run, closed):
    for folder in (run.path.parent, *run.path.parent.parents):
        if folder.stat().st_uid == 0 and not folder.stat().st_mode & 1 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o755)
    (run.path / closed).chmod(0o700 if closed == "." else 0o600)
    commands = [[*view, "--runs-dir", "."] for view in VIEWS]
    for (code, text), command in zip(as_other_user(commands, run.path.parent), commands, strict=True):
        lines = [line for line in text.splitlines() if not line.startswith("standard output is not a terminal")]
        assert (code, len(lines)) == (1, 2), (command, text)
        assert lines[0].startswith("error: ") and lines[0].endswith("cannot be read: Permission denied"), text
        assert lines[1].startswith("  fix: ask its owner")


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "events.jsonl", "plan.json", "health/host.jsonl", "progress/0", "logs/1/0.log", ".lock"]
)
def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(run, name, monkeypatch, capsys):
    """Without a writer, a reader that opens it would wait for ever."""
    path = run.path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    monkeypatch.chdir(run.path.parent)
    stops = name in ("metrics.jsonl", "events.jsonl", "plan.json")
    for view in VIEWS:
        assert run_command([*view, "--runs-dir", "."]) == stops
        assert ("kept/" + name + " cannot be read: not a regular file" in capsys.readouterr().err) is stops
    assert run_command(["runs", "."]) in (0, 1)
    run_command(["explain", "kept", "--runs-dir", "."])
    with serving(Shelf(run.path.parent)) as port:
        assert asked(port, "/api/runs")[0] == 200
        assert asked(port, "/api/runs/kept")[0] == (404 if stops else 200)
        assert asked(port, "/api/runs/kept/log?attempt=1&rank=0")[0] in (200, 404)


def test_a_config_that_cannot_be_parsed_is_a_note_in_every_view_and_a_script_stays_one(run, monkeypatch, capsys):
    run.config_toml.write_text("command = [oops")
    append_event(run, "script", command=["x.py"], nproc=2)
    append_event(run, "finished")
    monkeypatch.chdir(run.path.parent)
    for view in VIEWS[:2] + VIEWS[3:]:
        assert run_command([*view, "--runs-dir", "."]) == 0
        assert "config.toml cannot be read: " in capsys.readouterr().out, view
    snapshot = open_reader(run.path).update()
    assert (snapshot.kind, snapshot.command) == ("script", ["x.py"])
    overview = page_lines(
        "overview", snapshot, now=NOW, width=80, height=20, choice=CurveChoice(), log=NO_LOG, wrapped=False
    )
    assert any("config.toml cannot be" in text for line in overview for text, _ in line)
    assert run_panels(snapshot, now=NOW)["head"]["notes"] == snapshot.notes


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        (
            "events.jsonl",
            b"\x93\n\x00\xff" * 1000,
            "events.jsonl is damaged, none of its lines can be read: how the run ended is not known",
        ),
        ("events.jsonl", None, "events.jsonl is missing: how the run ended is not known"),
        (
            "metrics.jsonl",
            b"\x93\n\x00\xff" * 1000,
            "metrics.jsonl is damaged, none of its lines can be read: its curves are lost",
        ),
    ],
)
def test_a_damaged_file_of_records_is_one_line_in_every_view(run, name, content, note, monkeypatch, capsys):
    (run.path / name).unlink() if content is None else (run.path / name).write_bytes(content)
    monkeypatch.chdir(run.path.parent)
    for view in [["runs", "."], *([*view, "--runs-dir", "."] for view in (*VIEWS[:2], VIEWS[3], ["explain", "kept"]))]:
        run_command(view)
        assert note in " ".join(capsys.readouterr().out.split()), view  # a narrow terminal wraps it


def test_a_line_that_is_still_written_is_no_damage(run, capsys):
    run.metrics.write_text('{"step": 1, "lo')
    assert run_command(["runs", str(run.path.parent)]) == 0
    assert "damaged" not in capsys.readouterr().out


def test_the_browser_is_told_why_a_run_cannot_be_read(run):
    run.metrics.unlink()
    os.mkfifo(run.metrics)
    shelf = Shelf(run.path.parent)
    with pytest.raises(PacelineError, match=r"metrics\.jsonl cannot be read: not a regular file"):
        shelf.snapshot("kept")


def test_a_run_whose_name_is_not_utf8_is_listed_shown_and_reported(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path, os.fsdecode(b"caf\xe9"))
    monkeypatch.chdir(tmp_path)
    assert run_command(["runs", "."]) == run_command(["runs", "show", run.name, "--runs-dir", "."]) == 0
    assert run_command(["report", run.name, "--runs-dir", "."]) == 0
    assert "caf?" in capsys.readouterr().out and len(Path(f"{run.name}.html").read_text()) > 10_000
    with serving(Shelf(tmp_path)) as port:
        name = json.loads(asked(port, "/api/runs")[2])[0]["name"]
        assert asked(port, f"/api/runs/{name.replace('?', '%3F')}")[0] == 200


def test_a_report_that_cannot_be_written_leaves_the_one_before(tmp_path):
    target = tmp_path / "kept.html"
    target.write_text("good")
    script = "import resource, sys; from pathlib import Path; from paceline.terminal import write_output;"
    script += "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
    script += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    script += "write_output(Path(sys.argv[1]), 'x' * 100_000)"
    done = subprocess.run([sys.executable, "-c", script, target], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert (target.read_text(), [path.name for path in tmp_path.iterdir()]) == ("good", ["kept.html"])
    write_output(Path("/dev/null"), "x")  # a device is written as it is


GPU = {
    "index": 0,
    "name": "RTX 5090",
    "used_bytes": 5,
    "total_bytes": 9,
    "use": 0.5,
    "power_w": 3.0,
    "temperature_c": 50,
    "throttle": ["power"],
    "pcie": "gen 4 x16",
    "processes": [{"pid": 1, "name": "p", "bytes": 1, "ours": True}],
    "errors": {"xid": 3},
    "energy_j": 5,
}
RECORDS = {  # one record of each file, whose values are replaced one at a time
    "plan.json": {
        "num_steps": 200,
        "total_batch_size": 12_288,
        "device": "cpu",
        "memory": {"process_bytes": {"expected": 5}},
        "cost": {"seconds": {"expected": 2.0}, "tok_per_sec": 3.0, "mfu": 0.4, "run": {"hours": {"expected": 3}}},
    },
    "findings.json": [
        {"id": "x", "severity": "warn", "what": "w", "why": "y", "fix": "f", "evidence": {}, "host": None}
    ],
    "metrics.jsonl": {
        "time": utc(70),
        "step": 101,
        "loss": 2.0,
        "step_ms": 600.0,
        "tok_per_sec": 5.0,
        "val_bpb": 1.0,
        "rank_ms": [1.0, 2.0],
    },
    "health/host.jsonl": {
        "time": utc(5),
        "cpu": 0.5,
        "cores": 4,
        "ram_used": 5,
        "ram_total": 9,
        "disk_free": 3,
        "net_in_bps": 1.0,
        "gpus": [GPU],
    },
    "facts/host.json": {
        "time": utc(0),
        "gpus": [{"name": "x"}],
        "torch": {"version": "2"},
        "host": {"cpu": {"model": "m"}, "memory": {"total_bytes": 5}, "os": "l"},
        "python": {"version": "3"},
        "packages": {"paceline": "0"},
        "tools": {"code": {"commit": "c"}},
    },
    "logs/1/0.error.json": {
        "time": utc(9),
        "type": "ValueError",
        "message": "x",
        "fix": "f",
        "traceback": "t",
        "step": 3,
        "exit_code": 1,
    },
}
EVENTS = (
    {"event": "attempt", "attempt": 1, "world_size": 2},
    {"event": "attempt_ended", "attempt": 1, "state": "failed"},
    {
        "event": "verdict",
        "attempt": 1,
        "cause": "hang",
        "summary": "s",
        "fix": "f",
        "rank": 0,
        "step": 3,
        "confidence": 0.9,
    },
    {"event": "decision", "attempt": 1, "action": "retry", "why": "w"},
    {"event": "checkpoint", "step": 5, "bytes": 5, "seconds": 1.0},
    {"event": "rank_failed", "attempt": 1, "rank": 0, "exit_code": 1, "message": "m"},
    {"event": "script", "command": ["a"]},
    {"event": "rollback", "step": 3, "to_step": 2, "cause": "c", "number": 1, "at_most": 3},
    {"event": "resumed", "step": 4},
)
WRONG = ("many", -1, 1e400, None, True, [], {}, [1], {"a": 1}, "", 2**80, [None], float("nan"))


def places(value, path=()):
    """The path of every value within a record."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inside for place in places(item, (*path, key)))]


def replaced(value, path, other):
    """The record with another value at a place."""
    if not path:
        return other
    value = dict(value) if isinstance(value, dict) else list(value)
    value[path[0]] = replaced(value[path[0]], path[1:], other)
    return value


ALL = [(f"events.jsonl {number}", event) for number, event in enumerate(EVENTS)] + list(RECORDS.items())
CHANGES = st.sampled_from([(name, record, place) for name, record in ALL for place in places(record)])


@settings(max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
@given(change=CHANGES, wrong=st.sampled_from(WRONG))
def test_a_value_of_a_wrong_type_is_at_most_one_line(change, wrong, tmp_path_factory):
    (name, record, place), folder = change, tmp_path_factory.mktemp("runs")
    run = write_run(folder, "kept", steps=5, end=None)
    for other, value in ALL:
        value = replaced(record, place, wrong) if other == name else value
        path = run.path / other.split()[0]
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".json":
            path.write_text(json.dumps(value))
        else:
            with path.open("a") as file:
                file.write(json.dumps({"time": utc(20), **value} if isinstance(value, dict) else value) + "\n")
    for view in (
        lambda: html_report(run.path, now=NOW),
        lambda: markdown_report(run.path, now=NOW),
        lambda: format_once(open_reader(run.path).update(), now=NOW, width=100, colour=False, ascii_only=False),
        lambda: format_run(open_reader(run.path).update()),
        lambda: format_runs(RunList(folder).read()),
        lambda: format_explanation(explain_run(run), coloured=False),
    ):
        try:
            assert view()
        except PacelineError as error:
            assert str(error).count("\n") == 1


def test_a_wrong_value_of_a_sample_leaves_the_others_shown(run):
    run.health_dir.mkdir()
    append_json_line(run.health("host"), {"time": utc(90), "cpu": 0.5, "ram_used": "many"})
    host = open_reader(run.path).update().hosts[0]
    assert (host.cpu, host.ram_used) == (0.5, None)
