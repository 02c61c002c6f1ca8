"""The reader: logs of any launcher, encoding and size become records with rank, host and step."""

import gzip
import random

import pytest
from log_samples import TRACEBACK, exceptions, prefixed, read
from rows import with_rows

from paceline.explain import reader
from paceline.explain.line_filter import LineFilter, Shapes
from paceline.explain.log_text import CHUNK_BYTES, equal_chunks
from paceline.explain.reader import INCOMPLETE, NOT_TEXT, read_log
from paceline.explain.run_folder import explain


@with_rows(
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
def test_a_traceback_behind_the_prefix_of_any_launcher_is_complete(prefix, rank, host):
    (record,) = exceptions(read(prefixed(prefix)))
    assert record.text == "ValueError: sample 1841 has 3 fields"
    assert record.frames == ('File "train.py", line 31, in main',)
    assert (record.rank, record.host, record.line) == (rank, host, 1)


def test_the_banner_of_torchrun_gives_exits_their_rank_and_host():
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


def test_an_exception_has_the_step_before_it():
    (record,) = exceptions(read("step 7 | loss 1.0\nstep 8 | loss 0.9\n" + TRACEBACK))
    assert record.step == 8


def test_text_behind_an_open_progress_bar_is_read_without_the_bar():
    (record,) = exceptions(read(" 12%|█▏        | 60/500 [00:10<01:10,  6.2it/s]" + TRACEBACK))
    assert (record.text, record.step) == ("ValueError: sample 1841 has 3 fields", 60)


def test_what_fish_says_of_a_process_behind_an_open_progress_bar_is_a_signal():
    bar = "Stepping through batches:   0%|          | 0/1 [00:00<?, ?it/s]"
    [record] = read(
        bar + "fish: Job 1, 'python train.py' terminated by signal SIGSEGV (Address boundary error)\n"
    ).records
    assert (record.kind, record.text[:11]) == ("signal", "fish: Job 1")


def test_carriage_returns_separate_lines_but_line_numbers_count_newlines():
    log = read("x\r1%|  | 1/9\r2%|  | 2/9\r\n" + TRACEBACK)
    assert exceptions(log)[0].line == 2


def test_colours_and_control_characters_are_removed():
    (record,) = exceptions(read(TRACEBACK.replace("ValueError", "\x1b[1;31mValueError\x1b[0m")))
    assert record.text == "ValueError: sample 1841 has 3 fields"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "latin-1"])
def test_any_encoding_is_read(encoding):
    (record,) = exceptions(read(TRACEBACK.replace("sample", "Übung").encode(encoding)))
    assert record.text.startswith("ValueError: ") and record.text.endswith("bung 1841 has 3 fields")


def test_of_a_log_full_of_errors_only_the_first_and_last_are_stored():
    log = read("".join(f"ERROR {'x' * (n % 331)} failed\n" for n in range(12_000)))
    assert len(log.records) < 10_000
    assert log.records[0].line == 1


def test_chunks_of_any_size_give_the_same_records():
    data = (prefixed("[rank1]: ") + "step 3 | loss 1.0\n").encode()
    whole = read(data)
    for size in (1, 7, 64):
        cut = read_log([data[at : at + size] for at in range(0, len(data), size)])
        assert (cut.records, cut.progress) == (whole.records, whole.progress)


def test_a_new_line_shape_after_many_equal_ones_is_parsed():
    text = "".join(f"step {n} | loss 1.{n:03d}\n" for n in range(20_000)) + TRACEBACK
    (record,) = exceptions(read(text))
    assert record.line == 20_001


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("Rank 11: found NaN in local grad norm", 11),
        ("[Rank 16] fatal error", 16),
        ("rank2 (local rank: 2): error: lost", 2),
        ("error on rank 3", 3),
        ("ERROR [train.py:1047] (7/8) the scale is lost", 7),
        ("lora rank: 16, error", None),
    ],
)
def test_the_rank_in_a_text_is_read(line, rank):
    assert [record.rank for record in read(line).records] == [rank]


def test_a_line_that_two_ranks_have_written_is_read_as_two():
    text = (
        "[rank1]: loading failed[rank0]: Traceback (most recent call last):\n" + prefixed("[rank0]: ").split("\n", 1)[1]
    )
    assert [(record.kind, record.rank) for record in read(text).records] == [("line", 1), ("exception", 0)]


@pytest.mark.parametrize("size", [200, 5000, 1 << 17])
def test_random_bytes_are_no_text(size):
    explanation = explain([random.Random(size).randbytes(size)])
    assert (explanation.cause, explanation.summary) == ("unknown", NOT_TEXT)


def test_of_a_file_that_is_no_text_only_the_start_is_read():
    def chunks():
        yield random.Random(5).randbytes(1 << 16)
        raise AssertionError("read on")

    assert read_log(chunks()).problem == NOT_TEXT


def test_words_of_progress_are_looked_for_at_the_beginning_of_a_line_of_megabytes(monkeypatch):
    looked_at = []

    class Pattern:
        def search(self, raw, start=0, end=1 << 40):
            looked_at.append(len(raw[start:end]))

    monkeypatch.setattr(reader, "PROGRESS_WORD", Pattern())
    read_log([b"a" * (4 << 20)])
    assert looked_at == [reader.MAX_LINE_BYTES]


def test_a_hole_of_zeros_in_a_log_does_not_hide_its_text():
    [record] = exceptions(read_log([b"\0" * 8192, TRACEBACK.encode()]))
    assert record.text == "ValueError: sample 1841 has 3 fields"


def test_the_size_of_the_chunks_changes_no_answer():
    log = "".join(f"Epoch: {n} | Train Loss: {9 / (n + 1):.4f} | Val Loss: {9 / (n + 2):.4f}\n" for n in range(3000))
    whole, parts = log.encode(), [log[at : at + 512].encode() for at in range(0, len(log), 512)]
    assert read_log([whole]) == read_log(parts)
    assert [len(chunk) for chunk in equal_chunks([bytes(CHUNK_BYTES - 1), b"abc", bytes(CHUNK_BYTES)])] == [
        CHUNK_BYTES,
        CHUNK_BYTES,
        2,
    ]


def test_half_a_compressed_log_is_read_as_far_as_possible_and_never_healthy(tmp_path):
    text = "".join(f"step {n} loss: {random.Random(n).random()}\n" for n in range(5000)).encode()
    packed = gzip.compress(text)
    path = tmp_path / "train.log.gz"
    path.write_bytes(packed[: len(packed) // 2])
    explanation = explain(path)
    assert explanation.cause == "unknown" and explanation.summary.startswith(INCOMPLETE)
    assert explanation.progress.steps > 100
    path.write_bytes(packed)
    assert explain(path).cause == "healthy"


def test_what_is_known_of_line_shapes_is_shared_by_the_logs_of_a_run():
    lines = [b"step 1 loss: 2", b"loading shard 7", b"error: x"]
    shapes, searched = Shapes(), []
    assert LineFilter(shapes).select(lines, b"\n".join(lines)) == [0, 1, 2]
    shapes.find_errors({b"steploss", b"loadingshard", b"errorx"}, lambda new: searched.extend(new) or {})
    assert searched == []
    assert LineFilter(shapes).select([b"step 2 loss: 3"], b"step 2 loss: 3") == []


@with_rows("text", [
    "Training completed", "tuning is done", "finished training", "{'train_runtime': 31.2}", "saved the final model",
    "`max_steps=60` reached", "job completed successfully", "all 12 checks passed", "all stages complete", "run finished",
    "done.", "terminated of its own accord with exit-code 0", "treinamento concluído",
    "Training abgeschlossen", "Training beendet", "entraînement terminé", "обучение завершено",
    "обучение закончено", "训练完成", "训练结束", "学習が完了", "学習終了", "학습 완료", "학습 종료",
])  # fmt: skip
def test_every_wording_of_the_end_is_seen(text):
    assert read_log([f"step 1 loss 2.0\n{text}\n".encode()]).progress.done_line == 2
