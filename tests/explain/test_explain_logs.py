"""Log files: streams, one file per rank, and the folder that torchrun writes."""

import io
import os

from log_samples import OOM, PEER, STEPS, raised

from paceline.explain.run_folder import explain, explain_logs


def test_a_stream_of_chunks_is_explained_like_a_file(tmp_path):
    text = (STEPS + raised(1, OOM)).encode()
    (tmp_path / "x.log").write_bytes(text)
    assert explain(tmp_path / "x.log") == explain([text[at : at + 50] for at in range(0, len(text), 50)])


def test_a_name_is_not_that_of_a_rank_if_the_file_has_the_errors_of_another(tmp_path):
    report = "E1130 12:14:30.4 13 torch/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1 (pid: 1)"
    path = tmp_path / "stop_rank0.log"
    path.write_text(f"{STEPS}{raised(1, PEER)}{report}\n")
    assert explain(path).cause == "peer-died"


def test_the_rank_is_read_from_the_file_name(tmp_path):
    (tmp_path / "rank_0.log").write_text(STEPS + raised(None, PEER))
    (tmp_path / "rank_1.log").write_text(raised(None, OOM))
    explanation = explain(tmp_path)
    assert (explanation.cause, explanation.rank, explanation.victims) == ("cuda-oom", 1, (0,))
    assert explanation.evidence[0].source == str(tmp_path / "rank_1.log")


def test_a_log_that_cannot_be_read_is_noted_beside_others_that_can(tmp_path):
    os.mkfifo(tmp_path / "rank_0.log")
    (tmp_path / "rank_1.log").write_text(raised(None, OOM))
    explanation = explain_logs([str(tmp_path / f"rank_{rank}.log") for rank in (0, 1)], runs_dir="", stdin=io.BytesIO())
    assert (explanation.cause, explanation.rank) == ("cuda-oom", 1)
    assert explanation.notes == (f"{tmp_path}/rank_0.log cannot be read: not a regular file",)


def test_a_log_folder_of_torchrun_is_read_with_its_error_files(tmp_path):
    for rank, text in ((0, PEER), (1, "")):
        folder = tmp_path / "none_x" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(raised(None, text) if text else "")
        (folder / "stdout.log").write_text("")
    (folder / "error.json").write_text(
        '{"message": {"message": "OSError: [Errno 28] No space left on device",'
        ' "extraInfo": {"py_callstack": "", "timestamp": "1700000000"}}}'
    )
    explanation = explain(tmp_path)
    assert (explanation.cause, explanation.rank) == ("disk-full", 1)


def test_a_number_is_a_rank_only_among_several_files_and_paddle_s_workerlog_has_one(tmp_path):
    for name, rank in (("17.log", None), ("workerlog.3", 3)):
        (tmp_path / name).write_text(raised(None, OOM))
        assert explain(tmp_path / name).rank == rank
