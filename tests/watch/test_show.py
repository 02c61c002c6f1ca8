"""One run at length."""

import pytest

from paceline.errors import PacelineError
from paceline.rundir import RunDir
from paceline.watch.show import find_any_run, format_story, story_json
from paceline.watch.status import open_reader

EVENTS = """\
{"time": "2026-11-21T13:00:00.000Z", "event": "script", "command": ["x.py"]}
{"time": "2026-11-21T13:00:01.000Z", "event": "attempt", "attempt": 1}
{"time": "2026-11-21T13:00:11.000Z", "event": "attempt_ended", "attempt": 1, "state": "failed"}
{"time": "2026-11-21T13:00:11.100Z", "event": "verdict", "attempt": 1, "cause": "hang", "summary": "rank 1 hung"}
{"time": "2026-11-21T13:00:11.200Z", "event": "decision", "attempt": 1, "action": "retry", "why": "it may pass"}
{"time": "2026-11-21T13:00:13.000Z", "event": "attempt", "attempt": 2}
{"time": "2026-11-21T13:00:23.000Z", "event": "attempt_ended", "attempt": 2, "state": "finished"}
{"time": "2026-11-21T13:00:23.000Z", "event": "finished"}
"""


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "r")
    run.path.mkdir()
    run.config_toml.write_text('command = ["x.py"]\n')
    run.events.write_text(EVENTS)
    return run


def test_each_attempt_with_its_cause_and_what_was_decided(run):
    assert (
        format_story(open_reader(run.path).update())
        == f"""\
r: finished
run     {run.path}

attempt 1, 2026-11-21 13:00:01 UTC: failed
  hang: rank 1 hung
  retry: it may pass
attempt 2, 2026-11-21 13:00:13 UTC: finished

  steps that counted              20s   87.0 %
  start-up                         1s    4.3 %
  recovery                         2s    8.7 %

time    87 % of 23s in steps that counted, 9 % recovery"""
    )


def test_programs_get_the_same(run):
    told = story_json(open_reader(run.path).update())
    assert (told["state"], told["attempts"], told["goodput"]["seconds"]["recovery"]) == ("finished", 2, 2.0)
    assert told["each_attempt"][0]["action"] == "retry"


@pytest.mark.parametrize(("word", "inside"), [(".", "."), ("./", "."), ("..", "logs")])
def test_a_run_in_whose_folder_one_stands_has_its_name(word, inside, run, monkeypatch):
    (run.path / "logs").mkdir()
    monkeypatch.chdir(run.path / inside)
    assert find_any_run(word) == run
    assert open_reader(find_any_run(word).path).update().name == "r"


def test_a_run_is_found_by_its_folder_or_its_name(run):
    assert find_any_run(str(run.path)) == run
    assert find_any_run("r", runs_dir=str(run.path.parent)) == run
    with pytest.raises(PacelineError):
        find_any_run("nowhere")
