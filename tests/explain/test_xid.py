"""What the samples of health tell of a run that failed."""

from paceline.explain.run import explain_run
from paceline.rundir import RunDir, append_event, append_sample, utc_now

FAILED = """step 5 loss: 3.0
Traceback (most recent call last):
  File "x.py", line 1, in <module>
RuntimeError: CUDA error: unspecified launch failure
"""


def test_an_xid_in_the_samples_of_the_attempt_names_the_card_and_its_rank(tmp_path):
    run = RunDir(tmp_path)
    run.config_toml.write_text("depth = 4\n")
    old = {"index": 2, "errors": {"xid": 48, "xid_count": 1}}
    append_sample(run.health("node7"), {"time": "2026-01-01T00:00:00.000Z", "gpus": [old]})
    append_event(run, "attempt", attempt=1, world_size=2, pids=[111, 222])
    run.logs(1).mkdir(parents=True)
    for rank in (0, 1):
        run.rank_log(1, rank).write_text(FAILED)
    gpu = {"index": 3, "processes": [{"pid": 222, "ours": True}], "errors": {"xid": 79, "xid_count": 1}}
    append_sample(run.health("node7"), {"time": utc_now(), "gpus": [gpu]})
    found = explain_run(run)
    assert (found.cause, found.rank) == ("gpu-hardware-error", 1)
    assert "Xid 79" in found.summary
    assert found.evidence[0].text.endswith("79, GPU 3 of node7")
