"""Tracebacks: exceptions are put together from their lines, whoever wrote between them."""

import pytest
from log_samples import TRACEBACK, exceptions, prefixed, raised, read
from rows import with_rows

from paceline.explain.run_folder import explain


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


def test_a_part_of_a_traceback_may_be_indented_as_a_whole():
    lines = [
        '    File "t.py", line 3, in main',
        "        raise ValueError(",
        "    ValueError: no model",
        "    [rank0]: bye",
    ]
    assert [record.text for record in exceptions(read("\n".join(lines)))] == ["ValueError: no model"]


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


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("    assert total % world_size == 0\n", "total % world_size == 0"),
        ("    assert total % world_size == 0\n           ^^^^^^^^^^^^^^^^^^^^^^^\n", "total % world_size == 0"),
        ("    assert (\n        total % world_size == 0\n    )\n", "( total % world_size == 0 )"),
        ("    total = 7\n", None),
    ],
)
def test_a_bare_assertion_has_the_asserted_expression_as_its_message(source, message):
    text = f'Traceback (most recent call last):\n  File "train.py", line 31, in main\n{source}AssertionError\n'
    [record] = exceptions(read(text))
    assert record.text == (f"AssertionError: {message}" if message else "AssertionError")


def test_an_assertion_whose_traceback_lacks_its_first_lines_has_its_expression():
    text = "loading\n    assert total % world_size == 0\n           ^^^^^^^^^^^^^^^^^^^^^^^\nAssertionError\n"
    assert [record.text for record in exceptions(read(text))] == ["AssertionError: total % world_size == 0"]


def test_an_assertion_with_a_message_keeps_it():
    text = TRACEBACK.replace("loss = model(x)", 'assert x, "empty"').replace(
        "ValueError: sample 1841 has 3 fields", "AssertionError: empty"
    )
    assert [record.text for record in exceptions(read(text))] == ["AssertionError: empty"]


def test_the_assertion_that_rich_marks_is_read():
    text = """\
╭────────── Traceback (most recent call last) ──────────╮
│ /home/me/train.py:31 in main                          │
│                                                       │
│   30 │   total = 7                                    │
│ ❱ 31 │   assert total % world_size == 0               │
│   32 │   train()                                      │
╰───────────────────────────────────────────────────────╯
AssertionError
"""
    assert [record.text for record in exceptions(read(text))] == ["AssertionError: total % world_size == 0"]


@with_rows(
    ("expression", "cause"),
    [
        ("total_batch_size % world_tokens == 0", "batch-divisibility"),
        ("grad_accum % ddp_world_size == 0", "batch-divisibility"),
        ("n_embd % n_head == 0", "config-error"),
        ("world_size == 8", "config-error"),
        ("torch.cuda.is_available()", "cuda-not-available"),
        ("torch.cuda.device_count() >= world_size", "invalid-device-ordinal"),
        ("torch.cuda.is_bf16_supported()", "bf16-unsupported"),
        ("dist.is_initialized()", "process-group-not-initialized"),
        ("not torch.isnan(loss).any()", "loss-nan"),
        ("x.shape == y.shape", "shape-mismatch"),
        ("x.dtype == torch.bfloat16", "dtype-mismatch"),
        ("x.device == y.device", "device-mismatch"),
        ("len(shards) > 0", "dataset-empty"),
        ("os.path.exists(ckpt_path)", "checkpoint-missing-or-perm"),
        ("data_dir.exists()", "dataset-missing"),
        ("torch.__version__ >= '2.5'", "version-mismatch"),
        ("tokenizer.vocab_size == config.vocab_size", "tokenizer-mismatch"),
        ("isinstance(x, int)", "user-code-exception"),
    ],
)
def test_the_asserted_expression_shows_the_cause(expression, cause):
    source = f'  File "train.py", line 31, in main\n    assert {expression}\n'
    assert explain([f"Traceback (most recent call last):\n{source}AssertionError\n".encode()]).cause == cause


def test_a_message_that_lost_its_prefix_belongs_to_the_only_open_traceback():
    text = prefixed("[rank2]: ", TRACEBACK)
    [record] = exceptions(read(text.replace("[rank2]: ValueError", "ValueError")))
    assert (record.rank, record.text, len(record.frames)) == (2, "ValueError: sample 1841 has 3 fields", 1)


def test_a_message_in_front_of_a_traceback_is_read():
    before = "ERROR worker.py:9] Exception in worker: Cannot re-initialize CUDA in forked subprocess"
    log = read(f"{before}, Traceback (most recent call last):\n")
    assert any("Cannot re-initialize CUDA" in record.text for record in log.records)


def test_a_division_by_zero_shows_its_source_line():
    text = 'Traceback (most recent call last):\n  File "t.py", line 3, in fit\n    e = step // self.steps_per_epoch\n'
    [record] = exceptions(read(f"{text}ZeroDivisionError: integer division or modulo by zero\n"))
    assert record.text == "ZeroDivisionError: integer division or modulo by zero: e = step // self.steps_per_epoch"


def test_a_message_ends_where_a_logger_writes_a_line_with_a_time():
    text = TRACEBACK + "2026-03-04 10:00:00,123\tlogger.py:34 -- no tracker: No module named 'aim'\n"
    (record,) = exceptions(read(text))
    assert record.text == "ValueError: sample 1841 has 3 fields"


def test_every_line_of_a_message_may_have_a_time():
    (record,) = exceptions(read(prefixed("2026-03-04 10:00:00,123 ", TRACEBACK + "expected one of:\n")))
    assert record.text == "ValueError: sample 1841 has 3 fields\nexpected one of:"


@pytest.mark.parametrize("message", ["KeyError: 'large'", "FileNotFoundError: [Errno 2] No such file: 'a.txt'"])
def test_a_message_that_ends_with_a_quoted_value_is_one_line(message):
    text = TRACEBACK.replace("ValueError: sample 1841 has 3 fields", message)
    assert [record.text for record in exceptions(read(text + "Using device: cuda\n"))] == [message]


def test_what_torch_load_found_stands_behind_a_blank_line():
    head = "_pickle.UnpicklingError: Weights only load failed.\nPlease file: WeightsUnpickler error: \n\nUnsupported operand "
    answers = [explain([raised(None, f"{head}{byte}\n\nCheck the documentation").encode()]) for byte in (118, 149)]
    assert [answer.cause for answer in answers] == ["checkpoint-corrupt", "weights-only-unpickle"]
    assert "git lfs pull" in answers[0].fix


@pytest.mark.parametrize(("head", "is_whole"), [
    ("ValueError: Exception encountered when calling Sequential.call().", True),
    ("ValueError: A total of 2 objects could not be loaded. Example error message for object <Dense name=d>:", True),
    ("ValueError: a call failed.", False),
])  # fmt: skip
def test_what_keras_found_stands_behind_a_blank_line(head, is_whole):
    reason = "Input 0 with name 'None' of layer 'dense' is incompatible with the layer: expected axis -1"
    (record,) = exceptions(read(TRACEBACK.replace("ValueError: sample 1841 has 3 fields", f"{head}\n\n{reason}")))
    assert (reason in record.text) == is_whole


def test_what_nltk_does_not_find_stands_in_a_frame_of_asterisks():
    message = f"LookupError: \n{'*' * 70}\n  Resource punkt not found.\n\n  >>> import nltk\n{'*' * 70}\n"
    (record,) = exceptions(read(TRACEBACK.replace("ValueError: sample 1841 has 3 fields", message)))
    assert record.text.endswith("Resource punkt not found.")


def test_a_warning_is_no_part_of_the_message_before_it():
    text = TRACEBACK + "/opt/xgb/compat.py:36: FutureWarning: pandas.Int64Index is deprecated\n"
    assert [record.text for record in exceptions(read(text))] == ["ValueError: sample 1841 has 3 fields"]


@pytest.mark.parametrize(("statement", "shown"), [
    ("with open(path, 'wb') as file:", True),
    ("file = path.open(mode='a')", True),
    ("with open(path, encoding='utf-8') as file:", False),
    ("rows = open('data/words.txt').readlines()", False),
])  # fmt: skip
def test_a_statement_that_writes_a_file_is_shown_with_the_error_that_its_folder_is_missing(statement, shown):
    error = "FileNotFoundError: [Errno 2] No such file or directory: 'out/a'"
    text = TRACEBACK.replace("loss = model(x)", statement).replace("ValueError: sample 1841 has 3 fields", error)
    (record,) = exceptions(read(text))
    assert record.text == (f"{error}\n{statement}" if shown else error)


def test_the_statement_of_ipython_is_the_one_with_the_arrow():
    text = (
        "UnboundLocalError                         Traceback (most recent call last)\n"
        "Cell In[4], line 2\n      1 for x in rows:\n----> 2     loss += x\n      3 print(loss)\n\n"
        "UnboundLocalError: local variable 'loss' referenced before assignment\n"
    )
    (record,) = exceptions(read(text))
    assert record.text.endswith("before assignment: loss += x")


def test_the_message_of_ipython_may_stand_far_below_its_header():
    header = "TypeError                                 Traceback (most recent call last)\n"
    source = "".join(f"   {number} x = {'a' * number}\n" for number in range(10, 70))
    (record,) = exceptions(read(f"{header}Cell In[4], line 2\n{source}\nTypeError: Invalid shape (16, 64, 64)\n"))
    assert record.text == "TypeError: Invalid shape (16, 64, 64)"
    assert record.frames


def test_a_parent_that_reports_the_exit_code_of_its_child_does_not_say_what_failed():
    parent = TRACEBACK.replace(
        "ValueError: sample 1841 has 3 fields", "Exception: process 2 terminated with exit code 1"
    )
    assert explain([parent.encode()]).cause == "unknown"


def test_a_process_that_torch_s_spawn_reports_as_killed_is_the_rank():
    spawn = (
        'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    spawn(work, nprocs=2)\n'
        '  File "torch/multiprocessing/spawn.py", line 140, in join\n    raise ProcessExitedException(\n{}'
        "process 1 terminated with signal SIGKILL\n"
    )
    for name in ("torch.multiprocessing.spawn.ProcessExitedException: ", "Exception: "):
        [record] = read(spawn.format(name)).records
        assert record.rank == 1
