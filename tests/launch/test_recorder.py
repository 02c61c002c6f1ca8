"""What ranks are told of their flight recorders, and how they are asked."""

import os
from pathlib import Path

from paceline.launch.recorder import DUMP, OLDER_DUMP, PIPE, ask_recorders, recorder_env, remove_pipes, wait_for_dumps
from paceline.rundir import RunDir, read_json_lines


def test_each_attempt_has_its_own_pipes_and_dumps(tmp_path):
    found = recorder_env({}, RunDir(tmp_path), tmp_path)
    assert {name: Path(stem).parent for name, stem in found.items()} == {PIPE: tmp_path, DUMP: tmp_path}
    assert not list(tmp_path.iterdir())


def test_what_the_user_has_set_stays_as_it_is(tmp_path):
    for name in (PIPE, DUMP, OLDER_DUMP):
        assert recorder_env({name: "/elsewhere/trace_"}, RunDir(tmp_path), tmp_path) == {}


def test_where_no_pipe_can_be_torch_is_told_of_none_and_the_run_says_so(tmp_path):
    run = RunDir(tmp_path)
    assert recorder_env({}, run, tmp_path / "absent") == {}
    [note] = read_json_lines(run.events)
    assert "holds no named pipes" in note["text"]


def test_only_ranks_that_listen_are_asked_and_an_answer_that_never_comes_is_not_waited_for_long(tmp_path):
    run = RunDir(tmp_path)
    stem = run.logs(1)
    stem.mkdir(parents=True)
    for rank in (0, 1):
        os.mkfifo(stem / f"collectives_{rank}.pipe")
    reader = os.open(stem / "collectives_1.pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        asked = ask_recorders(run, 1, [0, 1, 2])
        assert [path.name for path in asked] == ["comm_lib_trace_rank_1"]
        assert os.read(reader, 8) == b"1"
        wait_for_dumps(asked)
    finally:
        os.close(reader)
    remove_pipes(stem)
    assert list(stem.iterdir()) == []
