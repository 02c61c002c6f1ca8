"""JSON logs: what a program logged is read as it would stand in a plain log."""

import csv
import html
import io
import json

import pytest
from log_samples import OOM, TRACEBACK, exceptions, raised, read

from paceline.explain.lines import unwrap_json
from paceline.explain.run_folder import explain
from paceline.explain.series import is_metric_file

BUG = "ValueError: sample 1841 has 3 fields"
STRUCTLOG_ERROR = [
    {
        "exc_type": "ValueError",
        "exc_value": "sample 1841 has 3 fields",
        "frames": [{"filename": "train.py", "lineno": 31, "name": "main", "line": "loss = model(x)"}],
    }
]
FORMS = {  # of one exception, as each logger writes it
    "python-json-logger": {
        "asctime": "2026-01-02 03:04:05,123", "levelname": "ERROR", "message": "step failed", "exc_info": TRACEBACK,
    },
    "structlog": {"event": "step failed", "level": "error", "timestamp": "2026-01-02T03:04:05.123Z", "exception": TRACEBACK},
    "structlog, dict_tracebacks": {"event": "step failed", "level": "error", "exception": STRUCTLOG_ERROR},
    "loguru": {
        "text": f"2026-01-02 03:04:05.123 | ERROR    | __main__:main:12 - step failed\n{TRACEBACK}",
        "record": {"exception": {"type": "ValueError", "value": BUG, "traceback": True}, "message": "step failed"},
    },
    "ECS": {
        "@timestamp": "2026-01-02T03:04:05.123Z", "log.level": "error", "message": "step failed",
        "error": {"stack_trace": TRACEBACK},
    },
    "Google Cloud": {"severity": "ERROR", "jsonPayload": {"message": f"step failed\n{TRACEBACK}"}},
    "lines of a traceback": {"msg": "step failed", "stack_trace": TRACEBACK.splitlines(keepends=True)},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_traceback_in_a_json_line_is_read(form):
    [record] = exceptions(read("step 1 loss: 2\n" + json.dumps(FORMS[form]) + "\n"))
    assert (record.text, record.line) == (BUG, 2)
    assert record.frames == ('File "train.py", line 31, in main',)


def test_a_json_line_has_the_rank_and_the_time_of_its_fields():
    [record] = exceptions(read(json.dumps({**FORMS["structlog"], "rank": 3})))
    assert record.rank == 3 and record.time is not None
    [record] = exceptions(read(json.dumps({"msg": "x", "exc_info": TRACEBACK, "extra": {"global_rank": 5}})))
    assert record.rank == 5


def test_an_exception_in_two_fields_is_one_of_an_errors_line_alone():
    fields = {"msg": "upload failed", "exc_type": "TimeoutError", "exc_value": "x"}
    [record] = exceptions(read(json.dumps({**fields, "level": "error"})))
    assert record.text == "TimeoutError: x"
    for others in ({"level": "warning"}, {"level": "error", "exc_type": "n"}):
        assert not exceptions(read(json.dumps({**fields, **others})))


def docker(text):
    """The file that docker keeps of a container's output."""
    lines = [
        {"log": f"{line}\n", "stream": "stderr", "time": "2026-01-02T03:04:05.123456789Z"} for line in text.splitlines()
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_the_output_of_a_container_is_read_line_by_line():
    explanation = explain([docker("step 1 loss: 2.0\nstep 2 loss: 1.9\n" + raised(1, OOM)).encode()])
    assert (explanation.cause, explanation.rank, explanation.step, explanation.line) == ("cuda-oom", 1, 2, 3)
    assert explanation.evidence[0].text.startswith("torch.OutOfMemoryError: CUDA out of memory")


def test_a_log_of_kubernetes_is_read_without_its_prefix():
    text = "".join(f"2026-01-02T03:04:05.123456789Z stderr F {line}\n" for line in raised(1, OOM).splitlines())
    explanation = explain([text.encode()])
    assert (explanation.cause, explanation.rank) == ("cuda-oom", 1)


def test_the_level_is_kept_so_that_a_warning_is_no_failure():
    lines = [{"message": f"step {n} loss: 2.0", "level": "INFO"} for n in range(4)]
    lines.insert(2, {"message": "CUDA out of memory, using a smaller batch", "level": "WARNING"})
    assert explain(["".join(json.dumps(line) + "\n" for line in lines).encode()]).cause == "healthy"


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 4, "loss": 2.5, "message": null}',
        b'{"message": "cut',
        b"{'loss': 2.5}",
        b'{"a": {"message": 4}}',
        b"[1, 2]",
        b"",
        b'{"log": "' + b'{"' * 9000 + b'"}',
    ],
)  # fmt: skip
def test_a_line_without_a_message_stays_as_it_is(line):
    assert unwrap_json(line) == [line]


def test_steps_and_losses_in_messages_are_progress():
    text = "".join(json.dumps({"level": "info", "message": f"step {n} loss: 2.{n}"}) + "\n" for n in range(5))
    assert (read(text).progress.steps, read(text).progress.last_loss) == (5, 2.4)


def test_a_line_in_a_field_data_beside_the_name_of_its_pipe_is_read():
    lines = [
        json.dumps({"event": "line", "data": f"[rank1]: {line}\n", "pipe": "stderr"}) for line in TRACEBACK.splitlines()
    ]
    explanation = explain(["\n".join(lines).encode()])
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 1)


def notebook(*outputs, **cell):
    cells = [{"cell_type": "markdown", "source": ["RuntimeError: CUDA out of memory"]}]
    cells += [{"cell_type": "code", "source": ["raise MemoryError"], "outputs": [output], **cell} for output in outputs]
    return json.dumps({"nbformat": 4, "metadata": {}, "cells": cells}, indent=1).encode()


def test_of_a_notebook_what_its_cells_printed_counts():
    stream = {
        "output_type": "stream",
        "name": "stdout",
        "text": [f"step {n} loss {3 - n / 50:.2f}\n" for n in range(40)],
    }
    assert explain([notebook(stream)]).cause == "healthy"
    frames = ["\x1b[0;31m-----\x1b[0m", "\x1b[0;31mValueError\x1b[0m  Traceback (most recent call last)", BUG]
    error = {"output_type": "error", "ename": "ValueError", "evalue": "sample", "traceback": frames}
    explanation = explain([notebook(stream, error)])
    assert (explanation.cause, explanation.step) == ("user-code-exception", 39) and BUG in explanation.summary
    error |= {"ename": "OutOfMemoryError", "evalue": OOM, "traceback": []}
    assert explain([notebook(stream, error)]).cause == "cuda-oom"
    assert explain([notebook(stream, error)[:-40]]).cause == "cuda-oom"  # cut: its lines are read as they are


def test_a_table_of_losses_in_a_notebook_is_progress():
    rows = "".join(f"<tr>\n <td>{n}</td>\n <td>{3 - n / 500:.3f}</td>\n</tr>" for n in range(100, 900, 100))
    table = ["<div>[800/800 01:10]</div><table>", f"<tr><th>Step</th><th>Training Loss</th></tr>{rows}</table>"]
    output = {
        "output_type": "display_data",
        "data": {"text/plain": ["<IPython.core.display.HTML object>"], "text/html": table},
    }
    progress = explain([notebook(output)]).progress
    assert (progress.first_step, progress.last_step, progress.last_loss) == (100, 800, 1.4)


@pytest.mark.parametrize("rewrite", [json.dumps, html.escape], ids=["a string", "HTML"])
def test_a_log_in_one_string_or_in_html_is_read_as_it_was(rewrite):
    explanation = explain([rewrite(f"step 1 loss 2.0\n{TRACEBACK}\n").encode()])
    assert (explanation.cause, explanation.step) == ("user-code-exception", 1) and BUG in explanation.summary


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("header", ["timestamp,message", '"Time","host","Line"', "_time,_raw,source"])
def test_a_log_that_a_viewer_exported_as_csv_is_a_log(tmp_path, header, newest_first):
    lines = ["step 1 loss 3.5", *OOM.splitlines()]
    columns = header.replace('"', "").lower().split(",")
    rows = []
    for second, line in enumerate(lines):
        row = {"timestamp": f"2026-11-20T10:00:{second:02d}Z", "host": "n1", "source": "train"}
        row |= {"time": row["timestamp"], "_time": row["timestamp"], "message": line, "line": line, "_raw": line}
        rows.append([row[column] for column in columns])
    file = io.StringIO()
    csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows[::-1] if newest_first else rows)
    path = tmp_path / "export.csv"
    path.write_text(f"{header}\n{file.getvalue()}")
    explanation = explain(path)
    assert explanation.cause == "cuda-oom" and explanation.progress.steps


def test_a_table_of_metrics_with_a_time_is_no_exported_log(tmp_path):
    path = tmp_path / "losses.csv"
    path.write_text("time,step,loss\n" + "".join(f"{step},{step},{5 / (step + 1)}\n" for step in range(30)))
    assert is_metric_file(path)


def test_a_message_longer_than_the_csv_module_takes_loses_nothing(tmp_path):
    path = tmp_path / "export.csv"
    path.write_text(f'time,message\n1,"{"x" * 300_000}"\n2,"{OOM}"\n')
    assert explain(path).cause == "cuda-oom"


def test_an_array_of_output_with_one_object_a_line_is_read_as_its_text():
    lines = ["step 1 loss 2.3", "step 2 loss 2.1", "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"]
    objects = [json.dumps({"stream_name": "stderr", "time": 1.5, "data": f"{line}\n"}) for line in lines]
    text = "[" + "\n,".join(objects) + "\n]\n"
    assert explain([text.encode()]).cause == "cuda-oom"


@pytest.mark.parametrize(
    "fields",
    [
        {
            "task_id": "sort/7",
            "step": 7,
            "answer": {"err": "Traceback (most recent call last):\n  File 'a.py'\n" + OOM},
        },
        {"type": "user", "step": 7, "message": {"role": "user", "content": f"the log says:\n{OOM}\n"}},
    ],
)
def test_the_texts_of_samples_and_transcripts_are_data(fields):
    assert unwrap_json(json.dumps(fields).encode()) == [json.dumps({"step": 7} if "step" in fields else {}).encode()]
    assert (
        explain([b"".join(json.dumps({**fields, "step": step}).encode() + b"\n" for step in range(9))]).cause
        != "cuda-oom"
    )
    logged = {**fields, "message": OOM}  # of a scheduler whose tasks have ids
    assert explain([json.dumps(logged).encode() + b"\n"]).cause == "cuda-oom"
