"""The texts of the web page: written in Python, and the same as in the terminal."""

import json
import math
from dataclasses import asdict, replace

from rows import with_rows
from snapshots import GIB, NOW, STATES, broken, failed, finished, gpu, recovered, script, starting, training, two_hosts

from paceline.watch.device_panels import marks
from paceline.watch.panels import compared_figures, figures, log_levels, log_of, run_panels, run_row, seed_groups
from paceline.watch.snapshot import TIME_KINDS, Goodput, LogView, Series, to_text
from paceline.watch.status import RunStatus
from paceline.watch.summary import attempt_outcome
from paceline.watch.terminal.head import measures, why_page
from paceline.watch.terminal.line import plain
from paceline.watch.terminal.pages import format_once
from paceline.watch.terminal.runs import RunChoice, runs_page


def test_a_loss_that_is_nan_is_a_tile_with_a_warning():
    snapshot = replace(training(NOW), loss=math.nan)
    tile = next(tile for tile in run_panels(snapshot, now=NOW)["tiles"] if tile["name"] == "loss")
    assert tile == {"name": "loss", "value": "nan", "difference": "NaN or infinite", "worse": True}


@with_rows("name", STATES)
def test_every_state_has_its_panels_as_json(name):
    panels = json.loads(to_text(run_panels(STATES[name](NOW), now=NOW)))
    assert panels["head"]["badge"]["state"] == STATES[name](NOW).state


def test_the_figures_of_the_page_are_those_of_the_terminal():
    panels = run_panels(training(NOW), now=NOW)
    terminal = format_once(training(NOW), now=NOW, width=160)
    tiles = {tile["name"]: tile["value"] for tile in panels["tiles"]}
    assert tiles == {
        "loss": "2.9216",
        "val_bpb": "0.9527",
        "tok_per_sec": "858,425",
        "step_ms": "612 ms",
        "mfu": "41.2 %",
        "peak_bytes": "25.8 GiB",
        "goodput": "88 %",
    }
    assert [value for value in tiles.values() if value not in terminal] == []
    assert panels["head"]["summary"]["text"] in terminal
    assert panels["hosts"][0]["gpus"][0]["gauges"][1]["text"] in terminal


def test_a_figure_is_compared_with_the_plan_and_is_worse_past_a_tenth():
    slow = replace(training(NOW), step_ms=700.0, tok_per_sec=1e6)
    tiles = {tile["name"]: tile for tile in run_panels(slow, now=NOW)["tiles"]}
    assert (tiles["step_ms"]["difference"], tiles["step_ms"]["worse"]) == ("+25 %", True)
    assert (tiles["tok_per_sec"]["difference"], tiles["tok_per_sec"]["worse"]) == ("+7 %", False)
    near = replace(training(NOW), step_ms=0.999 * training(NOW).plan["step_ms"])
    assert {figure.name: figure.difference for figure in figures(near)}["step_ms"] == "0 %"
    assert "difference" not in tiles["loss"] and tiles["val_bpb"]["note"] == "best 0.9380"


def test_the_head_says_how_far_and_how_long_and_leaves_the_clock_to_the_reader():
    facts = run_panels(training(NOW), now=NOW)["head"]["facts"]
    assert facts[0] == [{"text": "step 1,240"}, " of 2,500, 50 %"]
    assert facts[1:3] == [["650M tokens"], ["14m28s so far"]]
    assert facts[3] == [{"text": "12m51s to go"}, ", until ", {"time": 1_795_250_760, "seconds": False}]
    assert run_panels(training(NOW), now=NOW + 32)["head"]["facts"][-1] == ["silent for 30s"]


def test_a_run_that_failed_explains_itself_in_place_of_a_summary():
    panels = run_panels(failed(NOW), now=NOW)
    assert panels["head"]["summary"] is None
    why = panels["why"]
    assert (why["cause"], why["place"], why["sure"]) == ("cuda-oom", "rank 1, step 1,241, host tower", "97 % sure")
    assert why["is_command"] and [block["title"] for block in why["blocks"]] == ["Evidence", "Only followed"]
    assert panels["logs"]["first"] == "1/1"


def test_marks_and_bands_stand_on_every_axis():
    marks = run_panels(recovered(NOW), now=NOW)["marks"]
    assert marks["steps"] == {
        "marks": [{"x": 1241, "kind": "verdict"}, {"x": 1000, "kind": "resumed"}],
        "bands": [[1000, 1241]],
    }
    assert marks["tokens"]["bands"] == [[1000 * 524_288, 1241 * 524_288]]
    [(begin, end)], [(first, last)] = marks["hours"]["bands"], marks["clock"]["bands"]
    assert [round(3600 * (end - begin)), round(last - first)] == [18, 18]


def test_only_attempts_that_tell_more_than_the_page_are_listed():
    assert run_panels(training(NOW), now=NOW)["attempts"] is None
    badges = [attempt["badge"]["state"] for attempt in run_panels(recovered(NOW), now=NOW)["attempts"]]
    assert badges == ["failed", "running"]


def test_an_attempt_that_was_stopped_has_the_sign_of_a_stopped_run():
    snapshot = recovered(NOW)
    attempts = [replace(attempt, state="interrupted") for attempt in snapshot.attempts]
    panels = run_panels(replace(snapshot, state="stopped", attempts=attempts), now=NOW)
    assert (
        {attempt["badge"]["sign"] for attempt in panels["attempts"]}
        == {span["sign"] for span in panels["spans"]}
        == {"■"}
    )


def test_a_slow_rank_and_a_throttled_gpu_are_marked():
    panels = run_panels(two_hosts(NOW), now=NOW)
    assert panels["ranks"]["labels"]["5"] == {"sub": "node-1", "value": "761 ms", "mark": "▲ slow"}
    rows = panels["maps"]["use"]["rows"]
    assert [row["key"] for row in rows if row["mark"]] == ["node-1/1 use"]
    assert panels["hosts"][1]["gpus"][1]["marks"] == [{"level": "", "text": "▲ throttled: thermal"}]


def test_time_is_listed_by_kind_the_most_first():
    rows = run_panels(training(NOW), now=NOW)["goodput"]["rows"]
    assert (rows[0]["name"], rows[0]["duration"], rows[0]["percent"]) == ("steps that counted", "12m39s", "87.9 %")
    assert [row["kind"] for row in rows[1:3]] == ["compile", "evaluation"]


def test_charts_come_in_one_order_and_a_curve_without_a_number_has_none():
    series = {**training(NOW).series, "zeta": Series([1], [1.0], [NOW]), "empty": Series([1], [float("nan")], [NOW])}
    fields = run_panels(replace(training(NOW), series=series), now=NOW)["fields"]
    assert list(fields)[:3] == ["loss", "val_bpb", "tok_per_sec"] and list(fields)[-1] == "zeta"
    assert "empty" not in fields


def test_a_run_whose_number_of_steps_is_not_known_shows_its_step():
    head = run_panels(replace(training(NOW), num_steps=None), now=NOW)["head"]
    assert (head["facts"][0], head["progress"]) == ([{"text": "step 1,240"}], None)


def test_what_is_not_known_has_no_panel():
    panels = run_panels(script(NOW), now=NOW)
    assert (panels["why"], panels["plan"], panels["findings"], panels["fields"]) == (None, None, None, {})
    assert panels["head"]["progress"] is None and panels["head"]["command"] == "train.py --lr 3e-4 --epochs 12"
    assert run_panels(broken(NOW), now=NOW)["head"]["summary"]["level"] == "error"


def test_lines_of_a_log_have_the_levels_of_the_terminal_view():
    lines = ["step 1", "warning: slow", "RuntimeError: no", "Traceback (most recent call last):"]
    assert log_levels(lines) == {"1": "warning", "2": "error", "3": "error"}


def test_a_row_of_the_list_of_runs():
    run = {
        "state": "finished",
        "step": 100,
        "num_steps": 200,
        "loss": 3.0,
        "val_bpb": None,
        "tok_per_sec": 2e4,
        "notes": [],
    }
    row = run_row({**run, "command": None, "time": "2026-11-21T08:33:20.000Z"})
    assert (row["steps"], row["share"], row["loss"], row["val_bpb"]) == ("100 of 200", 0.5, "3.0000", "n/a")
    assert (row["tok_per_sec"], row["time"], row["badge"]["state"]) == ("20,000", NOW, "finished")
    script_row = {**run, "command": ["train.py"], "time": None}
    assert [run_row({**script_row, "step": step})["steps"] for step in (None, 0, 100)] == [
        "n/a", "0 of 200", "100 of 200",
    ]  # fmt: skip


def test_a_good_end_with_a_note_has_another_sign():
    notes = ["its output shows a failure: rank 1 could not allocate memory"]
    runs = [RunStatus("x", "runs/x", state, *[None] * 7, 1, None, notes=notes) for state in ("finished", "failed")]
    badges = [run_row(asdict(run))["badge"] for run in runs]
    assert [(badge["sign"], badge["level"]) for badge in badges] == [("!", "warning"), ("✗", "error")]
    lines = [plain(line) for line in runs_page(RunChoice(runs), opened="", width=100)]
    assert "! finished" in lines[2] and "✗ failed" in lines[3]


def test_nothing_of_a_run_that_has_ended_changes_with_the_clock():
    for ended in (finished(NOW), failed(NOW)):
        assert run_panels(ended, now=NOW) == run_panels(ended, now=NOW + 3600)


def test_a_loss_compares_with_that_of_the_same_step_and_a_speed_with_any():
    steps = {figure["name"]: figure.get("step") for figure in compared_figures(training())}
    assert (steps["loss"], steps["val_bpb"], steps["tok_per_sec"]) == (1240, 1240, None)


def test_the_share_of_a_scripts_time_is_not_called_time_in_steps():
    in_script = Goodput({**dict.fromkeys(TIME_KINDS, 0.0), "steps": 8.0, "start_up": 2.0}, 0, None)
    [tile] = [
        tile
        for tile in run_panels(replace(script(NOW), goodput=in_script), now=NOW)["tiles"]
        if tile["name"] == "goodput"
    ]
    assert (tile["value"], tile["note"]) == ("80 %", "of the time in the script")
    assert ("in the script", "80 %", "strong") in list(measures(replace(script(NOW), goodput=in_script)))


def test_goodput_is_not_shown_before_the_first_step():
    early = replace(starting(), goodput=Goodput({**dict.fromkeys(TIME_KINDS, 0.0), "start_up": 9.0}, 0, None))
    assert "goodput" not in {tile["name"] for tile in run_panels(early, now=NOW)["tiles"]}
    assert "goodput" not in {name for name, *_ in measures(early)}


def test_an_attempt_that_goes_on_is_running():
    snapshot = recovered()
    assert [attempt_outcome(snapshot, attempt) for attempt in snapshot.attempts] == ["failed", "running"]
    assert "running" in "".join(text for line in why_page(snapshot, width=80) for text, _ in line)


def test_a_group_of_seeds_has_a_mean_where_all_are_at_one_step():
    runs = [
        {"name": name, "step": step, "loss": loss, "val_bpb": None}
        for name, step, loss in (("a", 9, 2.0), ("b", 9, 3.0))
    ]
    configs = {"a": {"depth": 4, "seed": 1}, "b": {"depth": 4, "seed": 2}, "c": {"depth": 6, "seed": 1}}
    group = seed_groups([*runs, {**runs[0], "name": "c"}], configs)
    assert group.keys() == {"a", "b"}
    assert (group["a"]["loss"], group["a"]["val_bpb"], group["a"]["step"]) == ("2.5000 ± 0.7071", "n/a", "9")
    uneven = seed_groups([runs[0], {**runs[1], "step": 4}], configs)
    assert (uneven["a"]["loss"], uneven["a"]["step"]) == ("n/a", "unequal steps")


def test_groups_of_seeds_are_called_by_the_settings_in_which_they_differ():
    runs = [{"name": name, "step": 9, "loss": 2.0, "val_bpb": 1.0} for name in "abcd"]
    configs = {
        name: {"name": name, "depth": 4, "seed": seed, "matrix_lr": lr}
        for name, seed, lr in (("a", 1, 0.1), ("b", 2, 0.1), ("c", 1, 0.01), ("d", 2, 0.01))
    }
    configs["d"]["tokenizer"] = configs["c"]["tokenizer"] = "t.json"
    groups = seed_groups(runs, configs)
    assert groups["a"]["settings"] == {"matrix_lr": 0.1, "tokenizer": None}
    assert groups["d"]["settings"] == {"matrix_lr": 0.01, "tokenizer": "t.json"}
    assert seed_groups(runs[:2], configs)["a"]["settings"] == {}


def test_a_line_of_evidence_leads_to_the_log_that_it_stands_in():
    logs = [LogView(attempt, rank, f"runs/a/logs/{attempt}/{rank}.log", 9) for attempt in (1, 2) for rank in (0, 1)]
    lines = [
        {"source": "logs/1/1.log", "line": 7},
        {"source": None, "rank": 1, "line": 8},
        {"source": "events.jsonl", "line": 1},
    ]
    assert [log and log.path for log in (log_of(line, logs) for line in lines)] == [logs[1].path, logs[3].path, None]


def test_a_desktop_on_a_gpu_is_no_warning_and_a_large_foreign_process_is():
    processes = [
        {"pid": 1, "name": "Xorg", "bytes": GIB // 4, "ours": False},
        {"pid": 2, "name": "python", "bytes": 9 * GIB, "ours": False},
    ]
    small, large = marks(replace(gpu(0), processes=processes))
    assert (small["level"], small["text"]) == ("calm", "also Xorg 1, 256 MiB") and large["text"].startswith(
        "▲ also python 2"
    )
