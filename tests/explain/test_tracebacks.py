"""Tracebacks: exceptions are put together from their lines, whoever wrote between them."""

from log_samples import TRACEBACK, exceptions, prefixed, read


def test_two_interleaved_tracebacks_are_separated():
    ones = prefixed("[rank0]: ", TRACEBACK.replace("1841", "7")).splitlines()
    others = prefixed("[rank1]: ").splitlines()
    log = read("\n".join(line for pair in zip(ones, others, strict=True) for line in pair))
    assert [(record.rank, record.text) for record in exceptions(log)] == [
        (0, "ValueError: sample 7 has 3 fields"),
        (1, "ValueError: sample 1841 has 3 fields"),
    ]


def test_a_chained_exception_and_its_cause_are_two_records():
    text = (
        TRACEBACK
        + "\nThe above exception was the direct cause of the following exception:\n\n"
        + TRACEBACK.replace("Value", "Runtime")
    )
    assert [record.text.split(":")[0] for record in exceptions(read(text))] == ["ValueError", "RuntimeError"]


def test_a_message_of_several_lines_ends_at_the_next_log_line():
    text = TRACEBACK + "expected one of:\n  label\n  text\n[INFO] shutting down\nstep 4 | loss 1.0\n"
    (record,) = exceptions(read(text))
    assert record.text == "ValueError: sample 1841 has 3 fields\nexpected one of:\n  label\n  text"


def test_a_traceback_without_its_first_line_is_read():
    (record,) = exceptions(read("\n".join(TRACEBACK.splitlines()[1:])))
    assert record.text == "ValueError: sample 1841 has 3 fields"


def test_the_exception_of_a_launcher_is_only_a_banner():
    log = read(
        TRACEBACK.replace(
            "ValueError: sample 1841 has 3 fields", "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
        )
    )
    assert [record.kind for record in log.records if "ChildFailed" in record.text] == ["banner"]


def test_a_stack_dump_is_not_an_exception():
    text = 'Fatal Python error: Aborted\n\nThread 0x00007f28 (most recent call first):\n  File "a.py", line 3 in f\n'
    text += "Aborted (core dumped)\n"
    log = read(text)
    assert not exceptions(log)
    assert log.records[-1].kind == "signal"


def test_a_traceback_in_the_banner_of_torchrun_belongs_to_the_rank_above_it():
    head = "  host      : node-3\n  rank      : 5 (local_rank: 1)\n  exitcode  : 1 (pid: 4711)\n  error_file: /tmp/error.json\n"
    first, *others = TRACEBACK.splitlines()
    text = head + f"  traceback : {first}\n" + "".join(f"  {line}\n" for line in others)
    (record,) = exceptions(read(text))
    assert (record.text, record.rank, record.host) == ("ValueError: sample 1841 has 3 fields", 5, "node-3")
