"""Notebooks: the cells that ran last decide, whatever their place; an error that later cells survived is history."""

import json

import pytest
from log_samples import STEPS

from paceline.explain.log_text import printed_outputs
from paceline.explain.run_folder import explain

BUG = "KeyError: 'sample 17'"


def cell(count, text="", *, error=None, source="", **metadata):
    outputs = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
    if error:
        name, _, value = error.partition(": ")
        trace = [f"{name:<30}Traceback (most recent call last)", "Cell In[3], line 2\n----> 2 run()", error]
        outputs.append({"output_type": "error", "ename": name, "evalue": value, "traceback": trace})
    return {
        "cell_type": "code", "execution_count": count, "source": source, "outputs": outputs, "metadata": metadata,
    }  # fmt: skip


def verdict(*cells):
    return explain([json.dumps({"nbformat": 4, "cells": [{"cell_type": "markdown"}, *cells]}).encode()])


def test_a_cell_that_failed_before_another_one_worked_is_history():
    explanation = verdict(cell(1, STEPS), cell(2, error=BUG), cell(3, "12 rows\n"))
    assert explanation.cause == "healthy"
    assert explanation.notes == ("1 cell failed before later ones worked: KeyError",)
    assert verdict(cell(1, "12 rows\n"), cell(2, error=BUG), cell(3)).cause == "healthy"  # although it shows no step
    explanation = verdict(cell(1, STEPS), cell(2, "12 rows\n"), cell(3, error=BUG))
    assert (explanation.cause, explanation.notes) == ("user-code-exception", ())


def test_the_error_that_no_cell_survived_is_explained():
    explanation = verdict(cell(1, error="RuntimeError: CUDA out of memory."), cell(2, STEPS), cell(3, error=BUG))
    assert explanation.cause == "user-code-exception" and BUG in explanation.summary
    assert explanation.notes == ("1 cell failed before later ones worked: RuntimeError",)


def test_cells_that_ran_out_of_order_count_in_the_order_of_their_counts():
    assert verdict(cell(4, "12 rows\n"), cell(1), cell(3, error=BUG)).cause == "healthy"
    assert verdict(cell(4, error=BUG), cell(3, STEPS)).cause == "user-code-exception"


def test_counts_of_an_earlier_kernel_do_not_make_an_error_history():
    assert verdict(cell(90, STEPS), cell(1), cell(2, error=BUG)).cause == "user-code-exception"
    assert verdict(cell(1), cell(2), cell(3, STEPS), cell(2, error=BUG)).cause == "user-code-exception"


def test_without_counts_the_place_decides():
    assert verdict(cell(None, error=BUG), cell(None, "12 rows\n")).cause == "healthy"
    assert verdict(cell(None, STEPS), cell(None, error=BUG)).cause == "user-code-exception"
    # a cell that was never run has neither a count nor an output
    assert verdict(cell(None, STEPS), cell(None, error=BUG), cell(None)).cause == "user-code-exception"


def test_a_cell_without_a_count_among_others_failed_last_if_nothing_below_ran():
    explanation = verdict(cell(1, STEPS), cell(None, error="KeyboardInterrupt: "), cell(None))
    assert explanation.cause == "keyboard-interrupt"
    assert verdict(cell(1, STEPS), cell(2, error=BUG), cell(None, "old\n")).cause == "user-code-exception"
    assert verdict(cell(None, error=BUG), cell(1, STEPS)).cause == "healthy"


@pytest.mark.parametrize(
    "time",
    [
        lambda minute: {"execution": {"iopub.execute_input": f"2026-08-01T10:{minute}:00Z"}},
        lambda minute: {"papermill": {"start_time": f"2026-08-01T10:{minute}:00.1", "status": "completed"}},
        lambda minute: {"executionInfo": {"timestamp": 1785578400000 + minute * 60_000}, "collapsed": True},
        lambda minute: {"ExecuteTime": {"start_time": f"2026-08-01T10:{minute}:00.1Z"}},
    ],
    ids=["JupyterLab", "papermill", "Colab", "ExecuteTime"],
)
@pytest.mark.parametrize("counts", [(7, 8, 1), (None, None, None)])
def test_the_times_of_the_cells_say_more_than_their_counts(time, counts):
    first, second, third = counts
    cells = cell(first, error=BUG, **time(10)), cell(second, "a\n", **time(11)), cell(third, STEPS, **time(50))
    assert verdict(*cells).cause == "healthy"
    cells = cell(first, STEPS, **time(10)), cell(second, STEPS, **time(11)), cell(third, error=BUG, **time(50))
    assert verdict(*cells).cause == "user-code-exception"
    assert verdict(*cells[::-1]).cause == "user-code-exception"


PIP = "ERROR: Could not find a version that satisfies the requirement chart==9\n"
PIP += "\x1b[31mERROR: No matching distribution found for chart==9\x1b[0m\n"


def test_what_pip_could_not_install_is_history_if_later_cells_did_without():
    install = cell(1, "Collecting chart\n" + PIP, source=["%%time\n", "!pip install chart==9"])
    assert verdict(install).cause == "package-not-found"
    assert verdict(install, cell(2, "12 rows\n"), cell(3, error=BUG)).cause == "user-code-exception"
    missing = cell(3, error="ModuleNotFoundError: No module named 'chart'")
    assert verdict(install, cell(2, "12 rows\n"), missing).cause == "package-not-found"


def test_a_table_of_pandas_is_read_as_its_text_which_the_page_only_repeats():
    text = "     run  test_loss\n0  net-a      0.352"
    page = (
        "<table><tr><th></th><th>run</th><th>test_loss</th></tr><tr><th>0</th><td>net-a</td><td>0.352</td></tr></table>"
    )
    output = {"output_type": "execute_result", "data": {"text/html": page, "text/plain": text}}
    content = json.dumps({"cells": [{**cell(1), "outputs": [output]}]}).encode()
    assert printed_outputs(content) == ([text.encode() + b"\n"], "")


def test_a_notebook_on_one_line_with_html_in_it_is_read():
    text = STEPS + "&quot;\n" * 9
    assert verdict(cell(1, text), cell(2, error=BUG), cell(3, "ok\n")).cause == "healthy"


def test_the_advice_for_a_notebook_names_no_ranks_and_no_job():
    unknown = verdict(cell(1, "6\n"))
    assert (unknown.cause, unknown.fix) == (
        "unknown",
        "run its cells to the end, save the notebook, and pass it: paceline explain NOTEBOOK",
    )
    assert verdict(cell(1, "".join(f"row {n} of table\n" for n in range(20)))).fix == ""
    assert verdict(cell(1, STEPS)).fix == ""


def test_the_advice_for_one_process_names_no_ranks():
    assert explain([b"reading the table\n"]).fix == (
        "pass all that the run printed: COMMAND > run.log 2>&1, then paceline explain run.log"
    )
    trouble = explain([b"reading the table\nthe cache is invalid\nreading it all\n" + b"row\n" * 5])
    assert trouble.fix.startswith("read what stands around line 2, and look for its text")
    ranks = b"[rank0]: reading the table\n[rank1]: reading the table\n"
    assert explain([ranks]).fix.startswith("pass the whole log of every rank: torchrun")


def test_commands_of_the_shell_show_nothing_about_an_error_in_python():
    def behind_an_error(source):
        return verdict(cell(1, STEPS), cell(2, error=BUG), cell(3, "32 GB\n", source=source)).cause

    assert behind_an_error("# space?\n!df -h\n!ls") == "user-code-exception"
    assert behind_an_error("!df -h\nrows()") == behind_an_error("!python train.py") == "healthy"


def test_what_argparse_wrote_in_a_cell_that_later_ones_survived_is_history():
    error = "ipykernel_launcher.py: error: unrecognized arguments: -f kernel.json\n"
    failed = cell(1, f"usage: ipykernel_launcher.py [-h]\n{error}", error="SystemExit: 2")
    assert verdict(failed, cell(2, "12 rows\n")).cause == "healthy"
    assert verdict(failed).cause == "config-error"


def test_a_viewer_of_a_log_that_was_left_is_no_stopped_run():
    seen = "rows 12\n^C\n"
    assert verdict(cell(1, "12 rows\n"), cell(2, STEPS + seen, source="!kubectl logs -f trainer")).cause == "healthy"
    stopped = verdict(cell(1, "12 rows\n"), cell(2, STEPS + seen, source="!python train.py --dir logs"))
    assert stopped.cause == "keyboard-interrupt"


def test_a_traceback_that_a_cell_logged_before_it_worked_is_history_but_not_that_of_a_command():
    trace = 'could not write the index\nTraceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\n'
    denied = trace + "PermissionError: [Errno 13] Permission denied: '/data/a.idx'\n"
    for source, is_history in (("open_index()", True), ("!python a.py", False)):
        cells = [cell(1, denied, source=source), cell(2, "12 rows\n")]
        texts, _ = printed_outputs(json.dumps({"cells": cells}).encode())
        assert (b"PermissionError" not in b"".join(texts)) == is_history


def test_the_exit_code_of_a_job_that_has_none_yet_is_no_failure():
    table = "Name         State      Exit code\n-----------  ---------  -----------\ntrainer      running\n"
    assert verdict(cell(1, STEPS), cell(2, table + '"exitCode": null,\n')).cause == "healthy"


def test_a_notebook_that_printed_nothing_is_to_be_run_and_no_job_to_be_checked():
    explanation = verdict(cell(None), cell(None))
    assert (explanation.cause, explanation.summary) == ("unknown", "no cell of the notebook printed anything")
    assert explanation.fix.startswith("run its cells")


def test_what_git_and_colab_say_of_what_is_there_or_optional_and_the_end_of_other_output_are_no_failure():
    clone = "fatal: destination path 'slime' already exists and is not an empty directory.\n"
    secret = "The secret `HF_TOKEN` does not exist in your Colab secrets.\n"
    assert verdict(cell(1, clone + secret + "12 rows\n" * 9)).cause == "healthy"
    closed = (
        'Traceback (most recent call last):\n  File "connection.py", line 361, in _close\n    _close(self._handle)\n'
    )
    assert "Complete" not in verdict(cell(1, closed + "Complete\n")).summary
