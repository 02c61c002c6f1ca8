"""The list of runs, and one run at length, from what stands in the run folders."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from run_folders import START, append_step, utc, write_run

from paceline.cli import run_command
from paceline.command_line import parse
from paceline.errors import PacelineError
from paceline.explain.lines import strip_escapes
from paceline.run_options import RunsNoteOptions, RunsOptions, RunsTagOptions
from paceline.rundir import RunDir, append_event, append_json_line, find_run, lock_run, utc_now
from paceline.terminal import cells
from paceline.track.follower import LogRows
from paceline.watch import log_lines
from paceline.watch.about import edit_note, edit_tags, read_about, read_evaluations, read_notes, write_notes
from paceline.watch.events import event_text
from paceline.watch.log_lines import printed_values
from paceline.watch.log_reader import LogAndMachine
from paceline.watch.panels import compared_figures, head_panel, run_row
from paceline.watch.panels import fields as chart_fields
from paceline.watch.report import markdown_report
from paceline.watch.status import (
    MAX_END_BYTES,
    RunList,
    Shelf,
    format_run,
    last_values,
    open_reader,
    run_json,
    run_status,
)
from paceline.watch.summary import summarize
from paceline.watch.terminal.pages import format_once
from paceline.watch.terminal.runs import compared_evaluations, differing_settings, format_runs, list_runs


def make_run(folder, name="a"):
    run = RunDir(folder / name)
    run.path.mkdir()
    run.config_toml.write_text("depth = 4\n")
    run.plan_json.write_text('{"num_steps": 100}')
    append_event(run, "attempt", attempt=1)
    append_json_line(run.metrics, {"step": 50, "loss": 2.5, "tok_per_sec": 1000.0})
    append_json_line(run.metrics, {"step": 60, "loss": 2.25, "val_bpb": 1.25, "tok_per_sec": 2000.0})
    return run


def test_a_run_that_ended_without_reporting_why_is_broken(tmp_path):
    status = run_status(make_run(tmp_path))
    assert (status.state, status.step, status.num_steps, status.val_bpb) == ("broken", 60, 100, 1.25)


def test_the_speed_of_a_run_that_has_ended_is_a_mean_over_the_steps_of_its_last_lines(tmp_path):
    run = write_run(tmp_path, "a", steps=0, end=None)
    for step, step_ms in ((1, 9000.0), (10, 500.0), (20, 600.0), (21, 1050.0)):  # the last line is of one step
        append_step(run, step, step_ms=step_ms, tok_per_sec=12_000_000 / step_ms, mfu=60 / step_ms)
    fd = lock_run(run)
    live = (run_status(run).tok_per_sec, open_reader(run.path).update().step_ms)
    os.close(fd)
    append_event(run, "finished", step=21)
    snapshot = open_reader(run.path).update()
    mean_ms = (9 * 500 + 10 * 600 + 1050) / 20
    assert live == (pytest.approx(12_000_000 / 1050), 1050.0)
    assert (snapshot.step_ms, snapshot.mfu) == (mean_ms, pytest.approx(60 / mean_ms, abs=1e-4))
    assert snapshot.tok_per_sec == run_status(run).tok_per_sec == pytest.approx(12_000_000 / mean_ms)


def test_the_speed_of_a_resumed_run_is_that_of_its_last_attempt(tmp_path):
    run = write_run(tmp_path, "a", steps=0, end=None)
    for step, second in ((10, 10), (20, 20), (30, 110), (40, 120)):
        append_json_line(
            run.metrics, {"step": step, "step_ms": 10.0 * step, "tok_per_sec": 1000.0, "time": utc(second)}
        )
    append_json_line(run.events, {"time": utc(100), "event": "attempt", "attempt": 2, "world_size": 2})
    append_json_line(run.events, {"time": utc(130), "event": "finished", "step": 40})
    assert (open_reader(run.path).update().step_ms, run_status(run).tok_per_sec) == (400.0, 1000.0)


def test_the_loss_of_a_script_is_of_another_kind_than_that_of_a_training(tmp_path):
    for name, loss in (("good", 2.0), ("bad", 3.0)):
        append_step(write_run(tmp_path, name, steps=0), 1, loss=loss)
    script = RunDir(tmp_path / "script")
    script.logs(1).mkdir(parents=True)
    script.config_toml.write_text('command = ["x.py"]\n')
    script.events.write_text(SCRIPT_EVENTS)
    script.rank_log(2, 0).parent.mkdir()
    script.rank_log(2, 0).write_text("step 1 loss 0.5\nstep 2 loss 0.25\n")
    runs = json.loads(list_runs(RunList(tmp_path).read(), RunsOptions(sort="loss", json=True), width=None))
    assert [(run["name"], run["loss"]) for run in runs] == [("good", 2.0), ("bad", 3.0), ("script", 0.25)]
    abouts = [chart_fields(open_reader(path).update())["loss"]["about"] for path in (script.path, tmp_path / "good")]
    assert abouts == [None, "nats per token"]


def test_a_long_run_is_read_from_its_end_back_to_the_last_value_of_each_field(tmp_path):
    run = make_run(tmp_path)
    with run.metrics.open("a") as file:
        file.writelines(f'{{"step": {step}, "loss": 2.0, "tok_per_sec": 5.0}}\n' for step in range(61, 10_000))
        file.write('{"step": 10000, "lo')
    status = run_status(run)
    assert (status.step, status.loss, status.val_bpb, status.tok_per_sec) == (9999, 2.0, 1.25, 5.0)


def test_a_run_whose_lock_is_held_has_the_state_of_its_page_and_the_time_of_its_last_step(tmp_path):
    run = make_run(tmp_path)
    fd = lock_run(run)
    assert run_status(run).state == "starting"
    now = utc_now()
    append_json_line(run.metrics, {"step": 70, "time": now})
    assert (run_status(run).state, run_status(run).time) == (open_reader(run.path).update().state, now)
    assert run_status(run).state == "training"
    os.close(fd)


def test_a_run_whose_text_is_being_prepared_is_the_latest(tmp_path):
    make_run(tmp_path, "old")
    run = RunDir(tmp_path / "new")
    run.path.mkdir()
    fd = lock_run(run)
    run.preparing_json.write_text("{}")
    first, _ = RunList(tmp_path).read()
    assert (first.name, first.state) == ("new", "preparing")
    os.close(fd)


def test_the_last_event_decides_the_state(tmp_path):
    run = make_run(tmp_path)
    append_event(run, "finished", step=100)
    append_event(run, "attempt_ended", state="finished")
    assert run_status(run).state == "finished"
    append_event(run, "attempt", attempt=2)
    append_event(run, "stopped", step=110)
    assert run_status(run).state == "broken"  # its supervisor was killed, so nobody recorded the end of the attempt
    append_event(run, "attempt_ended", attempt=2, state="interrupted")
    assert (run_status(run).state, run_status(run).attempts) == ("stopped", 2)


def test_damaged_lines_change_neither_the_state_nor_the_step_in_the_list(tmp_path):
    run = make_run(tmp_path)
    append_event(run, "finished", step=60)
    with run.events.open("a") as events, run.metrics.open("a") as metrics:
        events.write('{"event": "attempt"}\n{"event": 5, "time": 7}\n')
        metrics.write('{"step": "x", "loss": [1], "val_bpb": true, "tok_per_sec": "fast", "time": 7}\n')
    status = run_status(run)
    assert (status.state, status.step, status.loss, status.val_bpb) == ("finished", 60, 2.25, 1.25)
    assert open_reader(run.path).update().state == "finished"


def test_a_run_that_is_stopped_after_its_last_step_is_finished(tmp_path):
    run = make_run(tmp_path)
    append_event(run, "attempt", attempt=1)
    append_event(run, "finished", step=100)
    append_event(run, "stopping", attempt=1, signal="SIGINT")
    append_event(run, "attempt_ended", attempt=1, state="finished")
    assert (run_status(run).state, open_reader(run.path).update().state) == ("finished", "finished")


def test_a_run_interrupted_before_its_first_step_is_stopped(tmp_path):
    run = make_run(tmp_path)
    append_event(run, "stopping", attempt=1, signal="SIGINT")
    assert run_status(run).state == "broken"
    append_event(run, "attempt_ended", attempt=1, state="interrupted", exit_code=130)
    append_event(run, "note", text="wandb: ...")
    assert (run_status(run).state, open_reader(run.path).update().state) == ("stopped", "stopped")
    append_event(run, "attempt", attempt=2)
    assert run_status(run).state == "broken"


def test_ranks_that_a_stop_killed_are_reported_wherever_the_run_is_shown(tmp_path):
    run = make_run(tmp_path)
    text = "killed rank 1, which did not end in 60 s: what was being saved is incomplete"
    append_event(run, "attempt", attempt=1)
    append_event(run, "attempt_ended", attempt=1, state="interrupted", exit_code=130, message=text)
    snapshot = open_reader(run.path).update()
    assert f": interrupted\n  {text}" in format_run(snapshot)
    assert text in summarize(snapshot, now=0.0).text


def test_the_table_is_aligned_and_shows_unknown_values(tmp_path):
    make_run(tmp_path)
    empty = RunDir(tmp_path / "long-name")
    empty.path.mkdir()
    empty.config_toml.write_text("")
    os.utime(empty.config_toml, (1e9, 1e9))
    lines = format_runs(RunList(tmp_path).read()).splitlines()
    assert [len(line) for line in lines[:2]] == [len(lines[0])] * 2
    assert lines[2].split() == ["long-name", "broken", "0", "n/a", "n/a", "n/a", "2001-09-09", "01:46:40"]


@pytest.mark.parametrize(
    "width, long",
    [(None, "depth=1," * 12), (99, "depth=1,depth=1,de…=1,depth=1,depth=1,"), (40, "depth=1,d…1,depth=1,")],
)
def test_a_long_name_is_whole_in_a_pipe_and_loses_its_middle_on_a_terminal(tmp_path, width, long):
    make_run(tmp_path, "short")
    make_run(tmp_path, "depth=1," * 12)
    head, *lines = format_runs(RunList(tmp_path).read(), width=width).splitlines()
    assert {line.split()[0] for line in lines} == {"short", long}
    assert {line.index("broken") for line in lines} == {head.index("state")} == {len(long) + 2}
    assert width != 99 or max(map(len, lines)) == 99


def test_a_narrow_list_leaves_columns_out_before_its_rows_wrap(tmp_path):
    for name, tokens in (("books-small", 2048), ("books-large", 4096)):
        make_run(tmp_path, name).config_toml.write_text(f"eval_tokens = {tokens}\n")
    runs = RunList(tmp_path).read()
    wide, *heads = (format_runs(runs, width=width).splitlines() for width in (None, 80, 60, 48))
    assert wide[0].split()[4:] == ["val_bpb", "eval_tokens", "tok/s", "last", "activity", "(UTC)"]
    assert [lines[0].split()[4:] for lines in heads] == [
        ["val_bpb", "eval_tokens", "tok/s"],
        ["val_bpb", "eval_tokens"],
        ["val_bpb"],
    ]
    assert [max(map(len, lines)) <= width for lines, width in zip(heads, (80, 60, 48), strict=True)] == [True] * 3
    assert {line.split()[0] for line in heads[-1][1:]} == {"books-small", "books-large"}


def test_a_narrow_list_leaves_out_no_column_that_fits(tmp_path):
    for name in ("books", "papers"):
        write_notes(make_run(tmp_path, name), tags=["long-tag" * 8], note="")
    head = format_runs(RunList(tmp_path).read(), width=100).splitlines()[0]
    assert head.split()[4:] == ["val_bpb", "tok/s", "last", "activity", "(UTC)"]


def test_long_names_that_differ_in_their_middle_stay_whole_on_a_terminal(tmp_path):
    names = {f"sweep-depth12-lr0.000{digit}-batch524288-wd0.1-seed1" for digit in (3, 6)}
    for name in names:
        make_run(tmp_path, name)
    _, *lines = format_runs(RunList(tmp_path).read(), width=80).splitlines()
    assert {line.split()[0] for line in lines} == names


def test_runs_that_are_measured_on_different_texts_are_marked(tmp_path):
    for name, keys in (("a", 'data = "/d/books"\n'), ("b", 'data = "/d/books"\nval_data = "/d/books/valid.txt"\n')):
        make_run(tmp_path, name).config_toml.write_text(f"eval_tokens = 2048\n{keys}")
    head, *lines = format_runs(RunList(tmp_path).read()).splitlines()
    assert head.split()[3:6] == ["loss", "val_bpb", "eval_text"]
    shown = {"a": "books (held out)", "b": "valid.txt"}
    assert all(f"  {shown[line.split()[0]]} " in line for line in lines)
    (tmp_path / "a" / "config.toml").write_text('eval_tokens = 2048\nval_data = "/e/books/valid.txt"\n')
    _, *lines = format_runs(RunList(tmp_path).read()).splitlines()
    assert {line.split()[0]: line.split()[5] for line in lines} == {"a": "e/books/valid.txt", "b": "d/books/valid.txt"}
    shutil.rmtree(tmp_path / "b")
    assert "eval_text" not in format_runs(RunList(tmp_path).read())


def test_runs_that_score_different_numbers_of_tokens_are_marked(tmp_path):
    runs = {name: make_run(tmp_path, name) for name in "abc"}
    for name, tokens in (("a", 2048), ("b", 2048), ("c", 4096)):
        runs[name].config_toml.write_text(f"eval_tokens = {tokens}\n")
    head, *lines = format_runs(RunList(tmp_path).read()).splitlines()
    assert head.split()[3:6] == ["loss", "val_bpb", "eval_tokens"]
    assert {line.split()[0]: line.split()[4:6] for line in lines} == {
        "a": ["1.2500", "2,048"], "b": ["1.2500", "2,048"], "c": ["1.2500", "4,096"]
    }  # fmt: skip
    assert format_run(open_reader(runs["c"].path).update()).startswith(
        "c: broken, step 60/100, val_bpb 1.2500 on 4,096 tokens\n"
    )
    shutil.rmtree(runs["c"].path)
    assert "eval_tokens" not in format_runs(RunList(tmp_path).read())


def test_a_checkpoint_that_was_damaged_is_reported_with_its_attempt_and_in_the_summary(tmp_path):
    run = write_run(tmp_path, "cor")
    damage = "checkpoint step_000060 is damaged (sha256 differs): going on from step_000040, 20 steps are done again"
    append_event(run, "attempt", attempt=2, world_size=2)
    append_event(run, "damaged", message=damage)
    append_event(run, "finished", step=200)
    append_event(run, "attempt_ended", attempt=2, state="finished", exit_code=0)
    snapshot = open_reader(run.path).update()
    assert f": finished\n  {damage}\n" in format_run(snapshot)
    assert summarize(snapshot, now=START).text.startswith(f"All steps are done; {damage}")
    assert not run_status(run).notes  # it was overcome


def test_the_table_shows_tags_where_a_run_has_some(tmp_path):
    make_run(tmp_path)
    tagged = make_run(tmp_path, "b")
    write_notes(tagged, tags=["good", "基线"], note="")
    head, *lines = format_runs(RunList(tmp_path).read()).splitlines()
    assert head.endswith("last activity (UTC)  tags")
    assert {line.split()[0]: line.endswith("  good 基线") for line in lines} == {"a": False, "b": True}


def test_notes_stand_in_the_table_as_far_as_there_is_room(tmp_path):
    write_notes(make_run(tmp_path), tags=["good"], note="wider\nand deeper")
    make_run(tmp_path, "b")
    lines = format_runs(RunList(tmp_path).read()).splitlines()
    assert [line.rpartition("  ")[2] for line in lines if line[0] != "b"] == ["note", "wider and deeper"]
    start = lines[0].index("note")
    assert any(
        line.endswith("  wider and d…") for line in format_runs(RunList(tmp_path).read(), width=start + 12).splitlines()
    )
    assert "note" not in format_runs(RunList(tmp_path).read(), width=start + 11)


def test_runs_are_sorted_by_a_figure_with_the_best_first_and_chosen_by_their_tags(tmp_path):
    for name, step, loss in (("run-10", 7, 2.0), ("run-9", 5, 1.0), ("odd", 6, float("nan"))):
        run = make_run(tmp_path, name)
        append_event(run, "script", command=["train.py"])
        run.logs(1).mkdir(parents=True)
        run.rank_log(1, 0).write_text(f"step {step} loss {loss}\n")
        write_notes(run, tags=["base", "wide"] if "run" in name else ["base"], note="")

    def names(*words: str) -> list[str]:
        options = parse([*words, "--json"], command="runs", options=RunsOptions)
        return [run["name"] for run in json.loads(list_runs(RunList(tmp_path).read(), options, width=None))]

    assert names("--sort", "loss") == ["run-9", "run-10", "odd"]
    assert names("--sort", "step") == ["run-10", "odd", "run-9"]
    assert names("--sort", "name", "--tag", "wide", "--tag", "base") == ["run-9", "run-10"]
    fd = lock_run(RunDir(tmp_path / "odd"))
    assert names("--state", "RUNNING") == ["odd"]
    os.close(fd)
    assert names("--sort", "name", "--state", "broken", "--state", "failed") == ["odd", "run-9", "run-10"]
    assert names("--state", "failed") == []
    with pytest.raises(PacelineError, match="no state is called runing"):
        names("--tag", "nosuch", "--state", "runing")
    assert names("--tag", "wid") == []
    with pytest.raises(PacelineError, match="no run in runs has the tag base and wid") as error:
        list_runs(RunList(tmp_path).read(), RunsOptions(runs_dir="runs", tag=("base", "wid")), width=None)
    assert error.value.fix == "--tag wide"


LISTED_BY_NOBODY = """
import os, sys
from pathlib import Path

import pytest
from paceline.watch.status import Shelf
if os.geteuid() == 0:
    os.seteuid(65534)
print([each["name"] for each in Shelf(Path(sys.argv[1])).runs()], sorted(Shelf(Path(sys.argv[1])).paths()))
"""


def test_an_unreadable_folder_hides_no_other():
    with tempfile.TemporaryDirectory() as name:  # not pytest's, which are its user's alone
        folder = Path(name)
        folder.chmod(0o755)
        make_run(folder)
        make_run(folder, "half").events.chmod(0)
        make_run(folder, "secret").path.chmod(0)
        listed = subprocess.run([sys.executable, "-c", LISTED_BY_NOBODY, name], capture_output=True, text=True)
        (folder / "secret").chmod(0o700)
    assert listed.stdout == "['a'] ['a', 'half']\n", listed.stderr


def test_runs_of_the_same_time_are_listed_by_their_names(tmp_path):
    names = [f"sweep-{number}" for number in range(1, 13)]
    for name in (*names, "late"):
        year = 2027 if name == "late" else 2026
        make_run(tmp_path, name).events.write_text(f'{{"time": "{year}-11-28T14:00:00.000Z", "event": "finished"}}\n')
    assert [status.name for status in RunList(tmp_path).read()] == ["late", *names]


def test_each_listing_shows_the_current_state(tmp_path):
    runs, run = RunList(tmp_path), make_run(tmp_path)
    (first,) = runs.read()
    assert runs.read() == [first]
    assert runs.read()[0] is first  # nothing was read
    append_json_line(run.metrics, {"step": 70})
    assert [status.step for status in runs.read()] == [70]
    fd = lock_run(run)
    assert [status.state for status in runs.read()] == ["starting"]
    os.close(fd)
    append_event(run, "finished", step=100)
    assert [status.state for status in runs.read()] == ["finished"]
    shutil.rmtree(run.path)
    assert runs.read() == []


def test_an_absent_field_is_not_searched_for_in_the_whole_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"val_bpb": 1.5}\n' + '{"step": 1, "loss": 2.0}\n' * (MAX_END_BYTES // 25 + 2))
    assert last_values(path, ("step", "val_bpb")) == {"step": 1}


def test_a_script_has_a_state_and_a_command_and_what_its_first_rank_printed(tmp_path):
    run = RunDir(tmp_path / "train-1")
    run.path.mkdir()
    run.config_toml.write_text('command = ["train.py"]\n')
    append_event(run, "script", command=["train.py"], nproc=2, device="cpu")
    append_event(run, "attempt", attempt=1)
    append_event(run, "attempt_ended", attempt=1, state="finished")
    append_event(run, "finished")
    status = run_status(run)
    assert (status.state, status.command, status.attempts) == ("finished", ["train.py"], 1)
    assert format_runs([status]).splitlines()[1].split()[:6] == ["train-1", "finished", *["n/a"] * 4]
    run.logs(1).mkdir(parents=True)
    run.rank_log(1, 0).write_text("".join(f"step {n}/30 loss {3 - n / 30:.3f}\n" for n in range(1, 31)))
    assert format_runs([run_status(run)]).splitlines()[1].split()[2:6] == ["30/30", "2.0000", "n/a", "n/a"]


def test_a_script_s_log_is_read_from_its_end_back_to_the_last_value_of_each_field(tmp_path, monkeypatch):
    read, read_line = [], log_lines.read_line
    monkeypatch.setattr(log_lines, "read_line", lambda line: (read.append(line), read_line(line))[1])
    lines = [
        "step 0/9 loss 4.0 val_bpb 1.5",
        "tok/s: 850",
        *(f"step {step} loss 2.0" for step in range(1, 200)),
        "saved",
    ]
    (tmp_path / "0.log").write_text("\n".join([*lines, ""]))
    values = printed_values(tmp_path / "0.log", ("step", "loss", "val_bpb", "tok_per_sec"), to_end=True)
    assert values == {"step": 199, "loss": 2.0, "val_bpb": 1.5, "tok_per_sec": 850}
    assert read == [lines[-1], lines[-2], lines[1], lines[0]]


@pytest.mark.parametrize(("first", "expected"), [(1, (1370, 2500)), (0, (1620, 2500))])
def test_the_list_of_runs_counts_the_steps_of_all_epochs_though_it_reads_only_the_end(
    tmp_path, monkeypatch, first, expected
):
    monkeypatch.setattr("paceline.watch.status.END_BYTES", 1000)
    lines = [
        f"Epoch [{epoch}/10], Step [{step}/250], Loss: 2.5" for epoch in range(first, 7) for step in range(0, 250, 10)
    ]
    lines[:0] = ["Epoch 0/10: validation loss 9.1"]  # before the training, which may begin with epoch 1
    (tmp_path / "0.log").write_text("\n".join([*lines[:-12], ""]))
    values = printed_values(tmp_path / "0.log", ("step", "loss"), to_end=True)
    assert (values["step"], values["num_steps"]) == expected


def test_the_list_of_runs_has_the_loss_of_a_script_whose_lines_all_name_one_part(tmp_path):
    (tmp_path / "0.log").write_text("stage=dev step 1 loss 3.0\nstage=dev step 2 loss 2.5\n")
    names = ("step", "loss", "val_bpb")
    assert printed_values(tmp_path / "0.log", names, to_end=True) == {"step": 2, "loss": 2.5}
    (tmp_path / "0.log").write_text("stage=train step 1 loss 3.0\nstage=dev step 2 loss 2.5\n")
    assert printed_values(tmp_path / "0.log", names, to_end=True) == {"step": 2, "loss": 3.0}


def test_the_bar_of_an_evaluation_at_the_end_does_not_hide_how_far_the_training_came(tmp_path, monkeypatch):
    training = "".join(f"\r{at:3}%|##| {at}/134 [00:{at % 60:02}<00:09, 9.00it/s]" for at in (100, 134))
    evaluation = "".join(f"\r{25 * at:3}%|##| {at}/4 [00:01<00:00, 3.00it/s]" for at in range(1, 5))
    (tmp_path / "0.log").write_text(f"{training}\n{{'loss': 2.9, 'epoch': 2.0}}\n{evaluation}\n{{'eval_loss': 2.8}}\n")
    values = printed_values(tmp_path / "0.log", ("step", "loss"), to_end=True)
    assert values == {"step": 134, "num_steps": 134, "loss": 2.9}
    (tmp_path / "1.log").write_text(training)  # which is read from its end alone
    with monkeypatch.context() as patched:
        patched.setattr(log_lines, "LogLines", None)
        assert printed_values(tmp_path / "1.log", ("step",), to_end=True) == {"step": 134, "num_steps": 134}
    *_, (step, _, row) = LogRows(tmp_path / "0.log").read(last=True)
    assert (step, row["loss"]) == (134, 2.9)


def test_a_shorter_bar_with_losses_behind_it_is_of_another_training(tmp_path):
    def bars(total, *, loss):
        line = f"{{'loss': {loss}, 'epoch': 0.1}}\n" if loss else ""
        return "".join(
            f"\r 10%|#| {total * at // 5}/{total} [00:01<00:09, 9.00it/s]{line and chr(10) + line}"
            for at in range(1, 5)
        )

    path = tmp_path / "0.log"
    for before, values in ((None, [4.0]), (5.0, [5.0, 4.0])):  # rows that are tokenized, an earlier stage
        path.write_text(bars(50_000, loss=before) + "\n" + bars(500, loss=4.0))
        shown = printed_values(path, ("step", "loss"), to_end=True)
        assert shown == {"step": 400, "num_steps": 500, "loss": 4.0}
        rows = [(step, row["loss"]) for step, _, row in LogRows(path).read(last=True) if "loss" in row]
        assert rows[-4:] == [(step, 4.0) for step in (100, 200, 300, 400)]
        assert sorted({loss for _, loss in rows}, reverse=True) == values
    path.write_text(bars(5000, loss=5.0))
    reader = LogRows(path)
    assert len(list(reader.read(last=False))) == 3
    path.unlink()
    path.write_text(bars(500, loss=None))  # the script opens its log again
    assert [step for step, _, _ in reader.read(last=True)][-4:] == [100, 200, 300, 400]


def test_progress_in_one_line_is_read_to_its_last_state_once_the_script_has_ended(tmp_path):
    run = RunDir(tmp_path / "a")
    run.logs(1).mkdir(parents=True)
    run.config_toml.write_text('command = ["train.py"]\nnproc = 1\n')
    append_event(run, "script", command=["train.py"], nproc=1, device="cpu")
    append_event(run, "attempt", attempt=1)
    run.rank_log(1, 0).write_text("".join(f"\rstep {n} loss {3 - n / 10:.3f}" for n in range(20)))
    fd, reader = lock_run(run), open_reader(run.path)
    assert run_status(run).step == reader.update().step == 18  # the last state may be half-written
    os.close(fd)
    append_event(run, "finished")
    for _ in range(2):
        snapshot = reader.update()
        assert (snapshot.step, snapshot.loss, len(snapshot.series["loss"].values)) == (19, 1.1, 20)
    assert (run_status(run).step, run_status(run).loss) == (19, 1.1)


def test_a_loss_that_is_nan_is_shown_as_nan_and_is_null_in_json(tmp_path, capsys):
    run = make_run(tmp_path)
    append_event(run, "script", command=["my train.py", "--note", "a b", ""])
    run.logs(1).mkdir(parents=True)
    run.rank_log(1, 0).write_text("step 1 loss 2.5\nstep 2 loss nan\n")
    assert "nan" in format_runs([run_status(run)]).splitlines()[1].split()
    assert run_row(asdict(run_status(run)))["command"] == "'my train.py' --note 'a b' ''"
    assert event_text({"event": "script", "command": ["a b"]}) == "launched: 'a b'"
    assert run_command(["runs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)[0]["loss"] is None


def test_the_list_of_runs_follows_the_log_of_a_live_script(tmp_path):
    run = RunDir(tmp_path / "a")
    run.logs(1).mkdir(parents=True)
    run.config_toml.write_text('command = ["train.py"]\n')
    append_event(run, "script", command=["train.py"], nproc=1, device="cpu")
    append_event(run, "attempt", attempt=1)
    fd = lock_run(run)
    runs = RunList(tmp_path)
    for step in (1, 2, 3):
        seconds = 1e9 + step
        with run.rank_log(1, 0).open("a") as file:
            file.write(f"step {step} loss 2.0\n")
        os.utime(run.rank_log(1, 0), (START + seconds,) * 2)
        status = runs.read()[0]
        assert (status.step, status.time) == (step, utc(seconds))
    os.close(fd)


SCRIPT_EVENTS = """\
{"time": "2026-11-21T13:00:00.000Z", "event": "script", "command": ["x.py"]}
{"time": "2026-11-21T13:00:01.000Z", "event": "attempt", "attempt": 1}
{"time": "2026-11-21T13:00:11.000Z", "event": "attempt_ended", "attempt": 1, "state": "failed"}
{"time": "2026-11-21T13:00:11.100Z", "event": "verdict", "attempt": 1, "cause": "hang", "summary": "rank 1 hung"}
{"time": "2026-11-21T13:00:11.200Z", "event": "decision", "attempt": 1, "action": "retry", "why": "another port"}
{"time": "2026-11-21T13:00:13.000Z", "event": "attempt", "attempt": 2}
{"time": "2026-11-21T13:00:23.000Z", "event": "attempt_ended", "attempt": 2, "state": "finished"}
{"time": "2026-11-21T13:00:23.000Z", "event": "finished"}
"""


@pytest.fixture
def script_run(tmp_path):
    run = RunDir(tmp_path / "r")
    run.path.mkdir()
    run.config_toml.write_text('command = ["x.py"]\n')
    run.events.write_text(SCRIPT_EVENTS)
    return run


def test_a_run_at_length_shows_each_attempt_with_cause_and_decision(script_run):
    assert (
        format_run(open_reader(script_run.path).update())
        == f"""\
r: finished
run     {script_run.path}

attempt 1, 2026-11-21 13:00:01 UTC: failed
  hang: rank 1 hung
  retry: another port
attempt 2, 2026-11-21 13:00:13 UTC: finished

  the script                      20s   87.0 %
  start-up                         1s    4.3 %
  recovery                         2s    8.7 %

time    87 % of 23s in the script, 9 % recovery"""
    )


def test_an_attempt_whose_end_nobody_recorded_has_the_cause_that_watch_shows(script_run):
    script_run.events.write_text("".join(SCRIPT_EVENTS.splitlines(keepends=True)[:2]))
    script_run.logs(1).mkdir(parents=True)
    script_run.rank_log(1, 0).write_text("".join(f"step {step} | loss 3.{9 - step}\n" for step in range(1, 9)))
    os.close(lock_run(script_run))
    lines = format_run(open_reader(script_run.path).update()).splitlines()
    assert lines[3] == "attempt 1, 2026-11-21 13:00:01 UTC: no end recorded"
    assert lines[4].startswith("  supervisor-lost: the command that ran attempt 1 was itself killed")


def test_several_runs_are_shown_as_in_the_list_with_the_settings_that_differ(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, keys in {"a": {"lr": 0.1}, "b": {"lr": 0.25}, "c": {"lr": 0.25, "nproc": 2}}.items():
        write_run(tmp_path, name, **keys)
    assert run_command(["runs", "show", "a", "b", "c"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert (head.split()[0], [row.split()[0] for row in rows[:3]]) == ("run", ["a", "b", "c"])
    assert rows[3:] == ["", "setting  a     b     c", "lr       0.1   0.25  0.25", "nproc    auto  auto  2"]
    assert run_command(["runs", "show", "a", "b", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert ([run["name"] for run in shown["runs"]], shown["settings"]) == (["a", "b"], {"lr": ["0.1", "0.25"]})
    assert run_command(["runs", "show", "b", "b"]) == 0
    assert capsys.readouterr().out.endswith("\n\nno settings differ\n")


def test_results_of_eval_are_shown_with_the_run_and_compared_by_their_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = {name: write_run(tmp_path, name, lr=lr) for name, lr in {"a": 0.1, "b": 0.2}.items()}
    for name, step, bpb, text in (
        ("a", 100, 1.5, "/t"), ("a", 50, 1.7, "/t"), ("a", 100, 1.25, "/t"), ("b", 100, 1.3, "/t"), ("b", 80, 1.1, "/u"),
    ):  # fmt: skip
        line = {"time": f"{utc(bpb * -60 + step)}", "step": step, "val_bpb": bpb, "eval_tokens": 640, "eval_text": text}
        append_json_line(runs[name].evaluations, {**line, "max_tokens": 700 if text == "/u" else None})
    field = {"time": utc(900), "step": 100, "val_bpb": 1.2, "eval_tokens": 99, "eval_text": "/t", "text_field": "body"}
    append_json_line(runs["b"].evaluations, {**field, "max_tokens": 100})
    with runs["a"].evaluations.open("a") as file:
        file.write('7\n{"step": 3}\n{"time": null, "val_bpb": 1.0}\n')
        file.write('{"step": "x", "val_bpb": true}\n{"step": 100, "val_bpb": 0.1, "ev')
    assert run_command(["runs", "show", "a"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval")]
    assert "| /t | 50 | 1.7000 | 640 |\n| /t | 100 | 1.2500 | 640 |\n" in markdown_report(runs["a"].path, now=START)
    assert [line.partition(", ")[2] for line in lines] == [
        "step 50: val_bpb 1.7000 on 640 tokens of /t", "step 100: val_bpb 1.2500 on 640 tokens of /t"
    ]  # fmt: skip
    assert run_command(["runs", "show", "b"]) == 0
    assert "val_bpb 1.2000 on 99 tokens of /t, field body, at most 100 tokens\n" in capsys.readouterr().out
    assert run_command(["runs", "show", "a", "b"]) == 0
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert [" ".join(line.split()) for line in table] == [
        "eval of a b",
        "/t at step 100 1.2500 1.3000",
        "/t, field body, at most 100 tokens at step 100 n/a 1.2000",
        "/u, at most 700 tokens at step 80 n/a 1.1000",
    ]
    assert run_command(["runs", "show", "a", "b", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["evaluations"]
    assert [[result["step"] for result in of_run] for of_run in results] == [[50, 100], [100, 100, 80]]
    figures = {row["name"]: row for row in compared_figures(open_reader(runs["a"].path).update())}
    assert figures["eval of /t"] == {
        "name": "eval of /t", "text": "1.2500", "value": 1.25, "better": "less", "at": "100"
    }  # fmt: skip
    newer = {"time": utc(999), "step": 80, "val_bpb": 1.4, "eval_tokens": 640, "eval_text": "/t"}
    append_json_line(runs["b"].evaluations, newer)
    rows = compared_evaluations(*(read_evaluations(run, []) for run in runs.values()))
    assert rows[0] == ("/t", "1.2500 at step 100", "1.4000 at step 80")
    reader = open_reader(runs["b"].path)
    assert [result.val_bpb for result in reader.update().evaluations] == [1.4, 1.3, 1.2, 1.1]
    append_json_line(runs["b"].events, {"time": utc(30), "event": "set_aside", "step": 80})
    append_json_line(runs["b"].events, {"time": utc(9999), "event": "set_aside", "step": None})  # damaged
    # of step 100 only what was measured after it was done again
    assert [result.val_bpb for result in reader.update().evaluations] == [1.4, 1.2, 1.1]


def test_the_list_has_the_newest_result_of_eval_and_sorts_by_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs_dir = tmp_path / "runs"
    listed = RunList(runs_dir)
    results = {"a": [(100, 1.5, "/t")], "b": [(100, 1.1, "/t"), (80, 1.2, "/t")], "c": [(100, 1.3, "/t")], "d": []}
    for name in results:
        write_run(runs_dir, name)
    assert "eval" not in format_runs(listed.read())
    for name, lines in results.items():
        for number, (step, bpb, text) in enumerate(lines):
            line = {"time": utc(number), "step": step, "val_bpb": bpb, "eval_tokens": 640, "eval_text": text}
            append_json_line(RunDir(runs_dir / name).evaluations, line)
    head, *lines = format_runs(listed.read()).splitlines()
    assert head.split()[4:6] == ["val_bpb", "eval"] and "eval of" not in head
    assert run_command(["runs", "--sort", "eval"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[0], row[5]) for row in rows] == [("b", "1.2000"), ("c", "1.3000"), ("a", "1.5000"), ("d", "n/a")]
    assert rows[0][6:8] == ["at", "80"]
    assert run_command(["runs", "--json", "--sort", "eval"]) == 0
    (first, *_, last) = json.loads(capsys.readouterr().out)
    assert (first["eval"]["val_bpb"], first["eval"]["eval_tokens"], first["eval"]["step"]) == (1.2, 640, 80)
    assert last["eval"] is None
    append_json_line(RunDir(runs_dir / "c").evaluations, {**line, "time": utc(9), "eval_text": "/u"})
    assert "eval of" in format_runs(listed.read()).splitlines()[0]


def test_runs_of_a_run_names_the_command_that_shows_it(script_run, monkeypatch, capsys):
    for folder, word in (
        (script_run.path.parent, "r"),
        (script_run.path.parent.parent, script_run.path.parent.name + "/r"),
    ):
        monkeypatch.chdir(folder)
        assert run_command(["runs", word]) == 1
        message = f"error: {word} is a run, not a folder of runs\n  fix: paceline runs show {word}\n"
        assert capsys.readouterr().err == message


def test_the_json_of_a_run_has_the_same(script_run):
    fields = run_json(open_reader(script_run.path).update())
    assert (fields["state"], fields["attempts"], fields["goodput"]["seconds"]["recovery"]) == ("finished", 2, 2.0)
    assert fields["each_attempt"][0]["action"] == "retry"


@pytest.mark.parametrize(("word", "inside"), [(".", "."), ("./", "."), ("..", "logs")])
def test_the_run_in_the_working_directory_has_its_own_name(word, inside, script_run, monkeypatch):
    (script_run.path / "logs").mkdir()
    monkeypatch.chdir(script_run.path / inside)
    assert find_run(word) == script_run
    assert open_reader(find_run(word).path).update().name == "r"


def test_a_run_is_found_by_its_folder_or_its_name(script_run):
    assert find_run(str(script_run.path)) == script_run
    assert find_run("r", runs_dir=str(script_run.path.parent)) == script_run
    with pytest.raises(PacelineError):
        find_run("nowhere")


def test_a_run_that_is_not_there_names_each_place_once(tmp_path):
    for name, places in ((str(tmp_path / "a"), f"{tmp_path}/a"), ("a", f"a or {tmp_path}/a")):
        with pytest.raises(PacelineError) as error:
            find_run(name, runs_dir=str(tmp_path))
        assert error.value.message == f"no run {name}: no config.toml in {places}"


def test_a_path_inside_a_run_is_answered_with_the_run_and_the_step(script_run):
    option = ", with --step 10 for resume, sample, eval or export"
    places = ("config.toml", "logs/1", "checkpoints/step_000099")
    for inside, ending in (("checkpoints/step_000010", option), *((place, "") for place in places)):
        if ending or "logs" in inside:
            (script_run.path / inside).mkdir(parents=True, exist_ok=True)
        with pytest.raises(PacelineError) as error:
            find_run(str(script_run.path / inside))
        assert error.value.fix == f"give the folder of the run: {script_run.path}{ending}"


def test_the_list_of_runs_has_straight_columns_behind_wide_names(tmp_path):
    for name in ("中文实验", "\x1b[31mbooks", "日本語モデル"):
        write_run(tmp_path, name, steps=3)
    lines = [strip_escapes(line) for line in format_runs(RunList(tmp_path).read()).splitlines()]  # as printed
    starts = [cells(line[: line.index(word)]) for line, word in zip(lines, ["state", *["finished"] * 3], strict=True)]
    assert len(set(starts)) == 1
    assert len({cells(line) for line in lines}) == 1


def test_the_browser_shows_a_named_log_as_the_command_opens_it(tmp_path):
    log = tmp_path / "out.log"
    log.write_text("step 1/99 loss: 3.0\n")
    samples = [{"time": f"2026-11-22T12:00:0{second}.000Z", "cpu": 0.5} for second in (1, 2)]
    shelf = Shelf(tmp_path, log, open_named=lambda path: LogAndMachine(path, iter(samples)))
    assert [host.cpu for host in shelf.snapshot("out.log").hosts] == [0.5]


def test_the_setup_of_a_run_is_that_of_its_hosts_and_its_last_attempt(script_run):
    gpus = [{"name": "RTX 5090"}] * 2
    for host, version in {"a": "2.9.0", "b": "2.8.0"}.items():
        path = script_run.facts(host)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"gpus": gpus, "torch": {"version": version}}))
    append_event(script_run, "attempt", attempt=3, world_size=4)
    setup = {"ranks": "4", "hosts": "2", "GPUs": "2 x RTX 5090", "torch": "2.9.0, 2.8.0"}
    assert read_about(script_run)["setup"] == setup


def test_the_setup_of_a_run_has_the_choices_of_its_plan_and_local_changes(tmp_path):
    run = write_run(tmp_path, "a")
    run.plan_json.write_text(json.dumps({"num_steps": 200, "precision": "bf16"}))
    run.facts("one").parent.mkdir()
    run.facts("one").write_text(json.dumps({"tools": {"code": {"commit": "abc", "dirty": True}}}))
    setup = {
        "ranks": "2",
        "hosts": "1",
        "GPUs": "none",
        "commit": "abc with changes",
        "num_steps": 200,
        "precision": "bf16 (auto)",
    }
    shown = read_about(run)["setup"]
    assert setup.items() <= shown.items() and {*shown.values()} - {*setup.values()} == {"auto", "0.02 (auto)"}


def test_a_setting_that_one_run_sets_and_paceline_chooses_in_another_has_the_value_in_both(tmp_path):
    plan = {"device_batch_size": 8, "shard": "optimizer", "compile": False, "logits_budget_bytes": 256 << 20}
    keys = {
        "a": {"optimizer": "adamw"},
        "b": {"optimizer": "adamw", "matrix_lr": 0.1, "shard": "optimizer", "grad_clip": 1},
    }
    runs = [write_run(tmp_path, name, **config) for name, config in keys.items()]
    runs[0].plan_json.write_text(json.dumps(plan))
    runs[1].plan_json.write_text(json.dumps({**plan, "device_batch_size": 4, "logits_budget_bytes": 512 << 20}))
    rows = {name: values for name, *values in differing_settings(*(run.path for run in runs))}
    assert rows == {
        "matrix_lr": ["0.002 (auto)", "0.1"],
        "grad_clip": ["auto", "1"],
        "device_batch_size": ["8 (auto)", "4 (auto)"],
        "logits_mib": ["256 (auto)", "512 (auto)"],
    }


@pytest.mark.parametrize(
    ("launches", "ranks", "rows"),
    [
        ([(2, None, 0), (1, None, 200)], "2, 1 from step 200", "8 (auto)"),
        ([(2, None, 0), (2, None, 200)], "2", "8 (auto)"),
        ([(2, 4, 0), (1, None, 200)], "2, 1 from step 200", "4, 8 (auto) from step 200"),
        ([(2, 4, 0), (1, None, 100), (2, None, 50)], "2", "4, 8 (auto) from step 50"),
    ],
)
def test_ranks_and_micro_batches_that_a_resume_changed_have_all_their_values(tmp_path, launches, ranks, rows):
    run = write_run(tmp_path, "a")
    run.plan_json.write_text(json.dumps({"device_batch_size": 8, "grad_accum_steps": 1}))
    run.events.unlink()
    for number, (world_size, device_batch_size, step) in enumerate(launches, start=1):
        append_event(run, "launch", config={"name": "a", "device_batch_size": device_batch_size})
        append_event(run, "attempt", attempt=number, world_size=world_size)
        if step:
            append_event(run, "resumed", step=step)
    setup = read_about(run)["setup"]
    assert (setup["ranks"], setup["device_batch_size"], setup["grad_accum_steps"]) == (ranks, rows, 1)


def test_the_micro_batches_that_the_plans_of_two_commands_chose_are_both_shown(tmp_path):
    run = write_run(tmp_path, "a")
    run.events.unlink()
    for number, rows in enumerate((8, 4), start=1):
        append_event(run, "launch", config={"name": "a", "device_batch_size": None}, device_batch_size=rows)
        append_event(run, "attempt", attempt=number, world_size=2)
    append_event(run, "resumed", step=30)
    assert read_about(run)["setup"]["device_batch_size"] == "8, 4 from step 30"
    assert "from step 30 on: device_batch_size 4 in place of 8" in format_run(open_reader(run.path).update())


def test_a_micro_batch_that_was_made_smaller_after_an_error_has_both_values(tmp_path):
    run = write_run(tmp_path, "a", device_batch_size=8)
    run.plan_json.write_text(json.dumps({"device_batch_size": 4, "grad_accum_steps": 2}))
    run.events.unlink()
    append_event(run, "launch", config={"name": "a", "device_batch_size": 8})
    append_event(run, "attempt", attempt=1, world_size=2)
    append_event(run, "plan_changed", world_size=2, device_batch_size=4, grad_accum_steps=2)
    append_event(run, "attempt", attempt=2, world_size=2)
    append_event(run, "resumed", step=30)
    setup = read_about(run)["setup"]
    assert (setup["ranks"], setup["device_batch_size"]) == ("2", "8, 4 from step 30")


def test_a_setting_that_a_resume_changed_is_reported_with_all_its_values(tmp_path):
    first = {"name": "a", "matrix_lr": 0.1, "num_steps": 100, "time": "4m", "compile": None, "data": "builtin"}
    second = {**first, "name": "c", "matrix_lr": 0.05, "num_steps": 200, "time": None, "compile": False}
    runs = [write_run(tmp_path, name, matrix_lr=config["matrix_lr"]) for name, config in (("a", second), ("b", first))]
    for run, config in zip(runs, (second, first), strict=True):
        run.events.unlink()
        for attempt, resumed, launched in ((1, [], first), (2, [100], config)):
            append_event(run, "launch", config=launched)
            append_event(run, "attempt", attempt=attempt, world_size=2)
            for step in resumed:
                append_event(run, "resumed", step=step)
            append_event(run, "attempt_ended", attempt=attempt, state="finished")
    changes = "from step 100 on: matrix_lr 0.05 in place of 0.1, num_steps 200 in place of 100, compile false in place of auto"
    shown = [format_run(open_reader(run.path).update()) for run in runs]
    assert f"UTC: finished\n  {changes}" in shown[0] and " on: " not in shown[1]
    assert "UTC: finished; from step 100 on: " in markdown_report(runs[0].path, now=START)
    rows = {name: values for name, *values in differing_settings(*(run.path for run in runs))}
    assert rows == {
        "matrix_lr": ["0.1, 0.05 from step 100", "0.1"],
        "num_steps": ["100, 200 from step 100", "200"],
        "compile": ["auto, false from step 100", "auto"],
    }
    run, third = runs[0], {**second, "matrix_lr": 0.02}
    append_event(run, "set_aside", step=80, checkpoints=["step_000100.aside"], text="going back to step 80")
    assert run_status(run).state == "broken"  # its last steps are set aside
    for attempt, step, num_steps in ((3, 80, 200), (4, 80, 300), (5, 90, 300)):
        append_event(run, "launch", config={**third, "num_steps": num_steps})
        append_event(run, "attempt", attempt=attempt, world_size=2)
        shown = format_run(open_reader(run.path).update())
        assert ("\n  to resume from step 80, as --step asked" in shown) is (attempt == 3)
        append_event(run, "resumed", step=step)
    for step in (None, "90", True):
        append_event(run, "resumed", step=step)
    shown = format_run(open_reader(run.path).update())
    assert "\n  from step 80, as --step asked: matrix_lr 0.02 in place of 0.1, num_steps 200 in place of 100" in shown
    assert "\n  from step 80 on: num_steps 300 in place of 200\n" in shown  # matrix_lr is attempt 3's change
    assert "\n  resumed from step 90\n" in f"{shown}\n" and "80: going" not in shown
    rows = {name: values for name, *values in differing_settings(*(run.path for run in runs))}
    assert rows["matrix_lr"] == ["0.1, 0.02 from step 80", "0.1"]  # the steps with 0.05 were done again


def test_of_scripts_the_arguments_that_differ_are_compared_and_of_a_training_what_a_script_has_too(tmp_path):
    def compare(*commands):
        for number, command in enumerate(commands):
            text = f"command = {json.dumps(command.split())}" if command else "depth = 4"
            (tmp_path / str(number)).mkdir(exist_ok=True)
            (tmp_path / str(number) / "config.toml").write_text(f"nproc = {1 + (not command)}\n{text}\n")
        return {name: values for name, *values in differing_settings(tmp_path / "0", tmp_path / "1")}

    assert compare("x.py --lr 1 --n 2 -v", "x.py --lr 3 --n 2") == {"command": ["x.py --lr 1 -v", "x.py --lr 3"]}
    assert compare("-m x --n 2", "-m x --n 2 --lr 1") == {"command": ["-m x", "-m x --lr 1"]}
    assert compare("x.py -a -b", "x.py -b -a") == {"command": ["x.py -a -b", "x.py -b -a"]}
    assert compare("x.py 1", "") == {"nproc": ["1", "2"], "command": ["x.py 1", "n/a"]}


def test_tags_and_a_note_are_in_the_run_folder_and_damaged_ones_are_none(tmp_path):
    run, runs_dir, lines = write_run(tmp_path, "a"), str(tmp_path), list[str]()
    lines.append(edit_tags(RunsTagOptions(run_and_tags=("a", "good", "wide"), runs_dir=runs_dir)))
    lines.append(edit_tags(RunsTagOptions(run_and_tags=("a", "wide"), remove=True, runs_dir=runs_dir)))
    lines.append(edit_note(RunsNoteOptions(run_and_text=("a", "the", "first  one"), runs_dir=runs_dir)))
    removal = parse(["a", "", "--runs-dir", runs_dir], command="runs note", options=RunsNoteOptions)
    assert (edit_note(removal), read_notes(run)[1]) == ("a: no note", "")
    edit_note(RunsNoteOptions(run_and_text=("a", "the first one"), runs_dir=runs_dir))
    lines.append(edit_tags(RunsTagOptions(run_and_tags=("a",), runs_dir=runs_dir)))
    assert lines == ["a: good wide", "a: good", "a: the first one", "a: good"]
    for command, options, edit in (("runs tag", RunsTagOptions, edit_tags), ("runs note", RunsNoteOptions, edit_note)):
        request = parse(["a", "--json", "--runs-dir", runs_dir], command=command, options=options)
        assert json.loads(edit(request)) == {"name": "a", "tags": ["good"], "note": "the first one"}
    with pytest.raises(PacelineError, match="'two words' is not a tag"):
        edit_tags(RunsTagOptions(run_and_tags=("a", "two words"), runs_dir=runs_dir))
    status, snapshot = run_status(run), open_reader(run.path).update()
    assert (status.tags, status.note) == (snapshot.tags, snapshot.note) == (["good"], "the first one")
    assert {"tags    good", "note    the first one"} < {*format_run(snapshot).splitlines()}
    assert "\n #good  the first one\n" in format_once(snapshot, now=START, width=80)
    assert "\n\nTags: good\n\nthe first one\n\n" in markdown_report(run.path, now=START)
    write_notes(run, tags=[], note="\x1b[31mred")
    assert "\n\nred\n\n" in markdown_report(run.path, now=START)
    assert (head := head_panel(snapshot, now=START))["tags"] == ["good"] and head["note"] == "the first one"
    for damaged in ("", "[]", '{"tags": 3}', '{"tags": [1], "note": null}'):
        run.notes.write_text(damaged)
        assert read_notes(run) == ([], "")


def test_a_folder_with_checkpoints_and_no_config_is_reported_below_the_list(tmp_path):
    make_run(tmp_path)
    (tmp_path / "lost" / "checkpoints" / "step_000060").mkdir(parents=True)
    (tmp_path / "of-another-trainer" / "checkpoints").mkdir(parents=True)
    runs, options = RunList(tmp_path).read(), RunsOptions(runs_dir=str(tmp_path))
    assert list_runs(runs, options, width=None).splitlines()[2:] == ["lost: not listed: no config.toml"]
    assert len(list_runs(runs, replace(options, state=("broken",)), width=None).splitlines()) == 2


def test_a_folder_of_which_all_runs_have_lost_their_config_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("runs/x/checkpoints/step_000001").mkdir(parents=True)
    for command in (["runs"], ["watch", "--once"]):
        assert run_command(command) == 1
        assert "no runs in runs: x has checkpoints and no config.toml" in capsys.readouterr().err
