"""The reader: logs of any launcher become records of ranks, with steps and whole exceptions, without what a terminal needs."""

import pytest

from paceline.explain.reader import read_log
from paceline.explain.reader_prefix import split_prefix

TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 31, in main
    loss = model(x)
ValueError: sample 1841 has 3 fields
"""


def read(text, **options):
    return read_log([text.encode() if isinstance(text, str) else text], **options)


def exceptions(log):
    return [record for record in log.records if record.kind == "exception"]


def prefixed(prefix, text=TRACEBACK):
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("prefix", "rank", "host"),
    [
        ("[rank1]: ", 1, None),
        ("[default3]:", 3, None),
        ("[default0]:[rank8]: ", 8, None),
        ("worker-1: ", None, "worker-1"),
        ("gpu-node-07: [rank9]: ", 9, "gpu-node-07"),
        ("2: ", 2, None),
        (" 13: ", 13, None),
        ("[1,5]<stderr>:", 5, None),
        ("[4]<stderr>:", 4, None),
        ("(RayTrainWorker pid=4711, ip=10.0.0.7) ", None, "10.0.0.7"),
        ("(pid=4711) ", None, None),
        ("[1]  ", 1, None),
        ("trainer/0 [default1]:[rank1]: ", 1, None),
        ("2026-01-02 03:04:05,123 ", None, None),
        ("[2026-01-02 03:04:05,123] [rank2]: ", 2, None),
    ],
)
def test_a_traceback_behind_any_launchers_prefix_is_whole(prefix, rank, host):
    (record,) = exceptions(read(prefixed(prefix)))
    assert record.text == "ValueError: sample 1841 has 3 fields"
    assert record.frames == ('File "train.py", line 31, in main',)
    assert (record.rank, record.host, record.line) == (rank, host, 1)


def test_an_nccl_line_tells_its_host_and_a_device_that_is_no_rank():
    line = split_prefix("gpu-7:4711:4802 [3] socket.c:123 NCCL WARN connection refused")
    assert (line.host, line.rank, line.text) == ("gpu-7", None, "socket.c:123 NCCL WARN connection refused")


@pytest.mark.parametrize(
    "text",
    ["12: x", "key: value", "see main.py: it fails", "[12/30] done", "10% 3/30", "Warning: careful", "std::bad_alloc"],
)
def test_what_only_looks_like_a_prefix_stays(text):
    assert split_prefix(text).text == ("x" if text == "12: x" else text)


def test_two_interleaved_tracebacks_are_put_together_again():
    ones = prefixed("[rank0]: ", TRACEBACK.replace("1841", "7")).splitlines()
    others = prefixed("[rank1]: ").splitlines()
    log = read("\n".join(line for pair in zip(ones, others, strict=True) for line in pair))
    assert [(each.rank, each.text) for each in exceptions(log)] == [
        (0, "ValueError: sample 7 has 3 fields"),
        (1, "ValueError: sample 1841 has 3 fields"),
    ]


def test_a_chained_exception_knows_what_it_came_from():
    text = (
        TRACEBACK
        + "\nThe above exception was the direct cause of the following exception:\n\n"
        + TRACEBACK.replace("Value", "Runtime")
    )
    first, second = exceptions(read(text))
    assert first.chained_from is None
    assert second.text.startswith("RuntimeError") and second.chained_from == first


def test_a_message_of_several_lines_is_kept_and_ends_where_the_log_goes_on():
    text = TRACEBACK + "expected one of:\n  label\n  text\n[INFO] shutting down\nstep 4 | loss 1.0\n"
    (record,) = exceptions(read(text))
    assert record.text == "ValueError: sample 1841 has 3 fields\nexpected one of:\n  label\n  text"


def test_a_traceback_that_lost_its_head_still_tells():
    (record,) = exceptions(read("\n".join(TRACEBACK.splitlines()[1:])))
    assert record.text == "ValueError: sample 1841 has 3 fields"


def test_a_launchers_wrapper_is_only_a_banner():
    log = read(
        TRACEBACK.replace(
            "ValueError: sample 1841 has 3 fields", "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
        )
    )
    assert [record.kind for record in log.records if "ChildFailed" in record.text] == ["banner"]


def test_a_stack_that_is_printed_is_no_exception():
    text = 'Fatal Python error: Aborted\n\nThread 0x00007f28 (most recent call first):\n  File "a.py", line 3 in f\n'
    text += "Aborted (core dumped)\n"
    log = read(text)
    assert not exceptions(log)
    assert log.records[-1].kind == "signal"


def test_the_banner_of_torchrun_says_which_rank_ended_how():
    text = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_10:00:00
  host      : node-3
  rank      : 5 (local_rank: 1)
  exitcode  : -9 (pid: 4711)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4711
"""
    ended = [record for record in read(text).records if record.kind in ("exit", "signal")]
    assert [(record.rank, record.host) for record in ended] == [(5, "node-3"), (5, "node-3")]


def test_progress_is_first_and_last_step_and_loss():
    log = read("".join(f"step {step:05d}/01000 | loss {4 - step / 1000:.4f}\n" for step in range(0, 500, 10)))
    progress = log.progress
    assert (progress.first_step, progress.last_step, progress.last_loss) == (0, 490, 3.51)
    assert progress.silent_end and not progress.finished


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 120/2500 | loss 4.1", 120),
        ("{'loss': 2.31, 'step': 40}", 40),
        (" iteration     1200/ 5000 | lm loss: 2.1E+00 |", 1200),
        ("[2026-01-02 03:04:05,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=70, skipped=0, lr=[0.1]", 70),
        ("Epoch 1:  12%|█▏        | 60/500 [00:10<01:10,  6.2it/s, loss=3.2]", 60),
        ("INFO:train:global_step 3,500: loss=1.25", 3500),
    ],
)
def test_the_steps_of_the_usual_trainers_are_read(line, step):
    assert read(line + "\n").progress.last_step == step


def test_an_exception_knows_the_step_before_it():
    (record,) = exceptions(read("step 7 | loss 1.0\nstep 8 | loss 0.9\n" + TRACEBACK))
    assert record.step == 8


def test_what_is_behind_an_open_progress_bar_is_read_and_the_bar_is_gone():
    (record,) = exceptions(read(" 12%|█▏        | 60/500 [00:10<01:10,  6.2it/s]" + TRACEBACK))
    assert (record.text, record.step) == ("ValueError: sample 1841 has 3 fields", 60)


def test_carriage_returns_make_lines_and_numbers_stay_those_of_the_file():
    log = read("x\r1%|  | 1/9\r2%|  | 2/9\r\n" + TRACEBACK)
    assert exceptions(log)[0].line == 2


def test_colours_and_control_bytes_are_gone():
    (record,) = exceptions(read(TRACEBACK.replace("ValueError", "\x1b[1;31mValueError\x1b[0m")))
    assert record.text == "ValueError: sample 1841 has 3 fields"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "latin-1"])
def test_any_encoding_is_read(encoding):
    (record,) = exceptions(read(TRACEBACK.replace("sample", "Übung").encode(encoding)))
    assert record.text.startswith("ValueError: ") and record.text.endswith("bung 1841 has 3 fields")


def test_an_error_without_end_keeps_the_first_and_the_last_and_little_memory():
    log = read("".join(f"ERROR {'x' * (n % 977)} failed\n" for n in range(100_000)))
    assert len(log.records) < 10_000
    assert log.records[0].line == 1


def test_chunks_cut_anywhere_read_the_same():
    data = (prefixed("[rank1]: ") + "step 3 | loss 1.0\n").encode()
    whole = read(data)
    for size in (1, 7, 64):
        cut = read_log([data[at : at + size] for at in range(0, len(data), size)])
        assert (cut.records, cut.progress) == (whole.records, whole.progress)


def test_a_line_shape_that_was_dull_before_is_passed_over_and_a_new_one_is_not():
    text = "".join(f"step {n} | loss 1.{n:03d}\n" for n in range(20_000)) + TRACEBACK
    (record,) = exceptions(read(text))
    assert record.line == 20_001


def test_a_traceback_within_torchruns_banner_is_that_of_the_rank_named_above_it():
    head = "  host      : node-3\n  rank      : 5 (local_rank: 1)\n  exitcode  : 1 (pid: 4711)\n  error_file: /tmp/error.json\n"
    first, *rest = TRACEBACK.splitlines()
    text = head + f"  traceback : {first}\n" + "".join(f"  {line}\n" for line in rest)
    (record,) = exceptions(read(text))
    assert (record.text, record.rank, record.host) == ("ValueError: sample 1841 has 3 fields", 5, "node-3")
