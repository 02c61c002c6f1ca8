"""One run in one file."""

import json
import re

import pytest
from run_folders import utc, write_run
from snapshots import NOW

from paceline.cli import run_command
from paceline.rundir import append_json_line
from paceline.watch.report import SPARKLINE_WIDTH, STATIC, curves, hash_of, html_report, markdown_report
from paceline.watch.snapshot import Series
from paceline.watch.terminal.chart import sparkline

SECRET = "hf_abcdefghijklmnopqrstuvwx"
EVIL = "</script><script>alert(1)</script> *x* <!-- |"


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path, "kept")


def test_the_html_holds_all_that_it_shows_and_asks_for_nothing(run):
    page = html_report(run.path, now=NOW)
    assert not re.search(
        r"""(?:src|href)=["'](?!data:|#)|@import|url\(|\bfetch\(["']http""", page.partition("<body>")[0]
    )
    assert not re.search(r"https?://(?!www\.w3\.org/)[\w.]+", page)
    assert page.count("<script") == 2 and page.count("</script>") == 2
    held = json.loads(re.search(r'id="report">(.*?)</script>', page)[1])
    assert (held["head"]["name"], held["curves"]["series"]["loss"]["steps"][-1], held["about"]["config"]["depth"]) == (
        "kept",
        100,
        4,
    )


def test_the_policy_of_the_html_allows_its_own_script_alone(run):
    page = html_report(run.path, now=NOW)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', page)[1]
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    assert f"script-src '{hash_of(script)}'" in policy and policy.startswith("default-src 'none'")


def test_markup_in_the_run_stays_text(tmp_path):
    run = write_run(tmp_path, "kept", note=EVIL)
    append_json_line(run.events, {"time": utc(50), "event": "note", "text": EVIL})
    page = html_report(run.path, now=NOW)
    assert EVIL not in page and page.count("</script>") == 2
    text = markdown_report(run.path, now=NOW)
    assert r"\<script\>alert(1)\</script\> \*x\*" in text


def test_what_is_secret_is_taken_out(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path, "kept", data="https://me:hunter2@host/x")
    monkeypatch.chdir(tmp_path)
    assert run_command(["report", str(run.path)]) == 0
    assert run_command(["report", str(run.path), "--markdown"]) == 0
    assert "hunter2" not in (tmp_path / "kept.html").read_text() + capsys.readouterr().out


def test_what_is_secret_in_the_log_of_a_rank_that_failed_is_taken_out(tmp_path, monkeypatch, capsys):
    line = f"OSError: 401 Client Error: https://me:hunter2@host/x with {SECRET}"
    run = write_run(tmp_path, "kept", end="failed", log=f"step 1\nTraceback (most recent call last):\n{line}\n")
    monkeypatch.chdir(tmp_path)
    assert run_command(["report", str(run.path)]) == 0
    assert run_command(["report", str(run.path), "--markdown"]) == 0
    told = (tmp_path / "kept.html").read_text() + capsys.readouterr().out
    assert told.count("OSError: 401 Client Error: https://set@host/x with set") >= 2
    assert "hunter2" not in told and SECRET not in told


def test_a_file_named_md_gets_markdown(run, tmp_path):
    output = tmp_path / "told.md"
    assert run_command(["report", str(run.path), "--out", str(output)]) == 0
    assert output.read_text().splitlines()[0] == markdown_report(run.path, now=NOW).splitlines()[0]


def test_the_markdown_tells_the_run(run):
    assert markdown_report(run.path, now=NOW).splitlines()[:12] == [
        "# kept: finished",
        "",
        "All steps are done.",
        "",
        "step 100 of 200, 1.2M tokens, 1m40s in all, started 2026-11-21 08:33 UTC",
        "",
        "| | measured | plan | |",
        "|---|---:|---:|---:|",
        "| loss | 3.0000 |  |  |",
        "| tok_per_sec | 20,000 |  |  |",
        "| step_ms | 600 ms |  |  |",
        "| total_s | 1m40s |  |  |",
    ]


@pytest.mark.parametrize(("prompt", "is_apart"), [("The old", True), ("Another", False), (None, False)])
def test_a_sample_has_its_prompt_apart_from_what_the_model_wrote(run, prompt, is_apart):
    run.samples.mkdir()
    run.sample(100).write_text("The old house")
    append_json_line(run.events, {"time": utc(99), "event": "sample", "step": 100, "prompt": prompt, "text": " house"})
    shown = markdown_report(run.path, now=NOW).partition("## Sample\n\n")[2].partition("\n\n## ")[0]
    parts = "Held-out text, at step 000100:\n\n```text\nThe old\n```\n\nContinued by the model:\n\n```text\n house\n```"
    assert shown == (parts if is_apart else "```text\nThe old house\n```")


@pytest.fixture
def failed(tmp_path):
    """A run with something in every section."""
    log = "step 1\nTraceback (most recent call last):\nModuleNotFoundError: No module named 'flash_attn'\n"
    run = write_run(tmp_path, "kept", end=None, log=log)
    append_json_line(run.events, {"time": utc(30), "event": "checkpoint", "step": 50, "bytes": 2 << 30, "seconds": 1.5})
    append_json_line(run.events, {"time": utc(100), "event": "attempt_ended", "attempt": 1, "state": "failed"})
    facts = {"time": utc(0), "gpus": [{"name": "RTX 5090"}] * 2, "driver": "570.1", "torch": {"version": "2.9.1"}}
    files = {
        "facts/tower.json": json.dumps(facts),
        "findings.json": json.dumps([{"what": "GPU 1 has a link of 4 lanes"}]),
        "samples/step_000050.txt": "an older one",
        "samples/step_000100.txt": "The old house",
    }
    for name, text in files.items():
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text(text)
    return run


def test_the_markdown_tells_why_where_the_time_went_what_happened_and_on_which_machine(failed):
    sections = dict(part.split("\n\n", 1) for part in markdown_report(failed.path, now=NOW).split("\n## ")[1:])
    assert list(sections) == [
        "What happened",
        "Curves",
        "Where the time went",
        "Events",
        "Findings of the checks",
        "Machine",
        "Sample",
        "Config",
    ]
    why = sections["What happened"]
    assert why.startswith(
        "**import-error**: Python does not find the module flash_attn in the environment of the run (last step 1)\n\n**Fix:** `"
    )
    assert "ModuleNotFoundError: No module named 'flash_attn'" in why.partition("```text")[2]
    assert sections["Where the time went"].splitlines()[2:4] == [
        "| work lost | 1m10s | 68.6 % |",
        "| steps that counted | 30s | 29.4 % |",
    ]
    assert sections["Events"].splitlines() == [
        "- 11-21 08:33:20  launched: data, plan and checks took 2 s",
        "- 11-21 08:33:20  attempt 1 on 2 ranks",
        "- 11-21 08:33:50  checkpoint saved at step 50, 2.0 GiB, 1.5 s",
        "- 11-21 08:35:00  attempt 1 failed",
    ]
    assert sections["Findings of the checks"].strip() == "- GPU 1 has a link of 4 lanes"
    machine = "- tower: GPUs 2 x RTX 5090, driver 570.1, torch 2.9.1, read 2026-11-21 08:33:20 UTC"
    assert sections["Machine"].strip() == machine
    assert sections["Sample"].strip() == "```text\nThe old house\n```"
    assert "depth = 4" in sections["Config"]


def test_the_html_holds_the_same(failed):
    held = json.loads(re.search(r'id="report">(.*?)</script>', html_report(failed.path, now=NOW))[1])
    parts, about = held["parts"], held["about"]
    assert (parts["explanation"]["cause"], parts["events"][-1]["text"]) == ("import-error", "attempt 1 failed")
    assert parts["goodput"]["seconds"]["lost"] == 70
    assert parts["findings"] == [{"what": "GPU 1 has a link of 4 lanes"}]
    assert (about["facts"][0]["rows"][0], about["samples"][0]["text"]) == (["GPUs", "2 x RTX 5090"], "The old house")


def test_a_log_of_any_training_has_a_report_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.log").write_text("step 10/20 | loss 3.0\nstep 11/20 | loss 2.9\n")
    assert run_command(["report", "train.log", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("# train.log: ")


def test_the_report_of_the_run_in_whose_folder_one_stands_has_its_name(run, monkeypatch, capsys):
    monkeypatch.chdir(run.path)
    assert run_command(["report", "."]) == 0
    assert capsys.readouterr().out == "report  kept.html\n"
    assert "<title>kept · paceline</title>" in (run.path / "kept.html").read_text()


def test_a_run_that_is_not_there_is_an_error_with_a_fix(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command(["report", "nowhere"]) == 1
    assert capsys.readouterr().err.startswith("error: no run nowhere")


def test_a_curve_in_a_line_of_text():
    lines = [sparkline(values, SPARKLINE_WIDTH) for values in ([0, 1, 2, 3, 4, 5, 6, 7], [1.0, 1.0])]
    assert lines == ["▁▂▃▄▅▆▇█", "▁▁"]


def test_a_steady_curve_of_the_report_is_level_and_has_units():
    line = curves({"peak_bytes": Series(list(range(48)), [298e6 + 1e4 * step for step in range(48)])})
    assert line.endswith("  284 MiB to 285 MiB") and len(set(line[12:60])) <= 2


def test_every_file_of_the_page_is_in_its_list():
    page = (STATIC / "index.html").read_text()
    assert {path.name for path in STATIC.iterdir() if path.name not in page} == {"index.html"}


def test_the_page_is_our_own_and_short():
    """No file of another project lies among ours: whoever changes the page can read all of it."""
    lines = {path.name: len(path.read_text().splitlines()) for path in STATIC.iterdir()}
    assert {name: count for name, count in lines.items() if count > 400} == {}
    assert {path.suffix for path in STATIC.iterdir()} == {".js", ".css", ".html"}
    longest = {path.name: max(map(len, path.read_text().splitlines())) for path in STATIC.glob("*.js")}
    assert max(longest.values()) <= 140 and not any("licen" in path.read_text().lower() for path in STATIC.iterdir())
