"""Flight recorder dumps: the rank that is behind the others is named, and a dump runs nothing."""

import pickle

from paceline.explain.flight import late_rank
from paceline.explain.run import late_of
from paceline.rundir import RECORDED, RunDir


def dump(folder, rank, sequence, name="nccl:all_reduce"):
    entries = [
        {"pg_id": 0, "collective_seq_id": n, "profiling_name": name, "is_p2p": False} for n in range(1, sequence + 1)
    ]
    path = folder / f"nccl_trace_rank_{rank}"
    path.write_bytes(pickle.dumps({"version": "2.5", "entries": entries}))
    return path


def test_the_one_rank_that_did_not_come_is_named(tmp_path):
    log = late_rank([dump(tmp_path, rank, 40 if rank == 2 else 41) for rank in range(4)])
    (record,) = log.records
    assert record.rank == 2
    assert record.text.startswith(
        "flight recorder: Rank 2 is at collective 40 (nccl:all_reduce), the others wait in 41"
    )


def test_ranks_that_are_all_at_the_same_place_name_nobody(tmp_path):
    assert late_rank([dump(tmp_path, rank, 41) for rank in range(4)]) is None


def test_several_that_are_behind_name_nobody(tmp_path):
    assert late_rank([dump(tmp_path, rank, 40 if rank < 2 else 41) for rank in range(4)]) is None


def test_a_pickle_that_would_run_something_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").touch, ())

    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(Evil()))
    assert late_rank([path, dump(tmp_path, 1, 3)]) is None
    assert not (tmp_path / "ran").exists()


def test_a_run_folder_names_a_rank_only_where_all_have_told(tmp_path):
    run = RunDir(tmp_path)
    run.logs(1).mkdir(parents=True)
    paths = [dump(tmp_path, rank, 40 if rank == 2 else 41) for rank in range(3)]
    for rank, path in enumerate(paths):
        path.rename(run.logs(1) / f"{RECORDED}{rank}")
    assert [log.records[0].rank for log in late_of(run, 1, [{"event": "attempt", "world_size": 3}])] == [2]
    assert late_of(run, 1, [{"event": "attempt", "world_size": 4}]) == []
