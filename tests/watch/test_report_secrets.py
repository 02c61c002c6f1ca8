"""No secret of a run leaves the host."""

import json
from pathlib import Path
from random import Random

import pytest
from made_secrets import NAMES, SHAPES, filled, leaks
from run_folders import utc, write_run

from paceline.cli import run_command
from paceline.launch.notify import RunNews, make_message
from paceline.rundir import append_json_line
from paceline.track.trackers import config_of


@pytest.fixture
def run_of_secrets(tmp_path):
    """A failed run that has one secret of each shape in its config, its events, its log and its sample; and all these secrets."""
    random, secrets, texts, words = Random(15), [], [], {}
    for number, (make, form) in enumerate(SHAPES.values()):
        secrets.append(secret := make(random))
        text = filled(form, random.choice(NAMES), secret)
        words |= {f"key_{number}": text} if isinstance(text, str) else {f"args_{number}": json.dumps(text)}
        texts += [text if isinstance(text, str) else json.dumps(text)]
    log = "step 1\nTraceback (most recent call last):\nValueError: " + " | ".join(texts).replace("\n", " ") + "\n"
    run = write_run(
        tmp_path, "kept", end=None, log=log, **words, password=secrets[0], AUTH=secrets[1], wandb_api_key=secrets[2]
    )
    append_json_line(run.events, {"time": utc(1), "event": "script", "command": ["train.py", "--token", secrets[9]]})
    for text in texts:
        append_json_line(run.events, {"time": utc(2), "event": "note", "text": text})
        append_json_line(run.events, {"time": utc(3), "event": "rank_failed", "rank": 0, "message": f"{text[:290]}"})
    summary = {"cause": "script-error", "summary": "; ".join(texts), "fix": f"export HF_TOKEN={secrets[0]}"}
    append_json_line(run.events, {"time": utc(4), "event": "attempt_ended", "attempt": 1, "state": "failed"})
    append_json_line(run.events, {"time": utc(5), "event": "verdict", "attempt": 1, **summary})
    run.samples.mkdir()
    run.sample(1).write_text("\n".join(texts))
    return run, secrets, summary


def test_no_secret_of_a_run_leaves_the_host(run_of_secrets, tmp_path, monkeypatch, capsys):
    """Not in a report, not in an explanation to be pasted, not in a message, not in the config that trackers get."""
    run, secrets, summary = run_of_secrets
    monkeypatch.chdir(tmp_path)
    for command in (["report", "kept", "--runs-dir", "."], ["report", "kept", "--runs-dir", ".", "--markdown"]):
        assert run_command(command) == 0
    assert run_command(["explain", str(run.path), "--markdown"]) == 0
    news = RunNews(run)
    list(news.read(ended=False))
    news.end = "failed"
    sent = [json.dumps(make_message("failed", news)), json.dumps(config_of(run))]
    assert summary["cause"] in sent[0] and "depth" in sent[1]
    for text in (Path("kept.html").read_text(), capsys.readouterr().out, *sent):
        plain = text.replace("\\n", "").replace("\\", "")
        shown = [
            (piece, plain[plain.find(piece) - 120 :][:160]) for secret in secrets for piece in leaks(secret, plain)[:1]
        ]
        assert shown == []
