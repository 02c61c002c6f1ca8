"""Log files: streams, one file per rank, and the folder that torchrun writes."""

from log_samples import OOM, PEER, STEPS, raised

from paceline.explain.run_folder import explain


def test_a_stream_of_chunks_is_explained_like_a_file(tmp_path):
    text = (STEPS + raised(1, OOM)).encode()
    (tmp_path / "x.log").write_bytes(text)
    assert explain(tmp_path / "x.log") == explain([text[at : at + 50] for at in range(0, len(text), 50)])


def test_the_rank_is_read_from_the_file_name(tmp_path):
    (tmp_path / "rank_0.log").write_text(STEPS + raised(None, PEER))
    (tmp_path / "rank_1.log").write_text(raised(None, OOM))
    explanation = explain(tmp_path)
    assert (explanation.cause, explanation.rank, explanation.victims) == ("cuda-oom", 1, (0,))
    assert explanation.evidence[0].source == str(tmp_path / "rank_1.log")


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
