"""The explanation of a run on several hosts: the host in the cause, and what other hosts have written."""

import json

import pytest

from paceline.explain.explanation import Explanation, format_explanation, format_summary, name_host
from paceline.explain.run_folder import explain_run
from paceline.rundir import RunDir, append_event, append_sample, utc_now

HOSTS = {"ada": [0, 1], "bob": [2, 3]}
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.56 GiB\n"
)


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "books")
    run.logs(1).mkdir(parents=True)
    run.config_toml.write_text("device_batch_size = 8\n")
    pids = [101, 102, 101, 104]  # ranks of two hosts may have the same one
    append_event(run, "attempt", attempt=1, world_size=4, pids=pids, hosts=HOSTS, head="ada", clock_s={})
    for rank in range(4):
        run.rank_log(1, rank).write_text("step 40 | loss 3.0\n")
    run.launch_log(1).touch()
    return run


def test_the_rank_in_a_cause_has_its_host(run):
    with run.rank_log(1, 3).open("a") as log:
        log.write(OUT_OF_MEMORY)
    explanation = explain_run(run)
    assert (explanation.cause, explanation.rank, explanation.host) == ("cuda-oom", 3, "bob")
    assert explanation.summary.startswith("rank 3 on bob ")
    assert "host bob" not in format_explanation(explanation)  # it is said once


def test_the_launch_log_of_another_host_is_evidence(run):
    run.launch_log(1, "bob").write_text(
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address."
        " port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n"
    )
    explanation = explain_run(run)
    assert (explanation.cause, explanation.host) == ("port-in-use", "bob")
    assert explanation.evidence[0].source.endswith("logs/1/launch-bob.log")


def test_the_kernel_log_of_another_host_shows_that_its_memory_ran_out(run):
    run.kernel_log(1, "bob").write_text("[rank2]: Out of memory: Killed process 101 (python) total-vm:68719476kB\n")
    append_event(run, "rank_failed", attempt=1, rank=2, exit_code=None, signal="SIGKILL", message="", host="bob")
    explanation = explain_run(run)
    assert (explanation.cause, explanation.rank, explanation.host) == ("host-oom-killed", 2, "bob")
    assert "kernel log of bob" in {evidence.source for evidence in explanation.evidence}


def test_an_xid_error_belongs_to_the_process_on_its_own_host(run):
    gpu = {"index": 0, "processes": [{"pid": 101, "ours": True}], "errors": {"xid": 79}}
    run.health_dir.mkdir()
    append_sample(run.health("bob"), {"time": utc_now(), "gpus": [gpu]})
    explanation = explain_run(run)
    assert (explanation.cause, explanation.rank, explanation.host) == ("gpu-hardware-error", 2, "bob")


def test_a_lost_host_is_explained_by_what_the_supervisor_recorded(run):
    facts = {"cause": "host-lost", "rank": None, "step": None, "confidence": 1.0, "host": "bob"}
    append_event(run, "verdict", attempt=1, **facts, summary="nothing was heard of bob for 6 s", fix="ssh bob true")
    explanation = explain_run(run)
    assert (explanation.cause, explanation.host, explanation.rank) == ("host-lost", "bob", None)
    text = format_explanation(explanation).splitlines()
    assert text[:2] == ["host-lost: nothing was heard of bob for 6 s", "  fix: ssh bob true"]
    assert not any("--cause host-lost" in line for line in text)  # the catalogue does not have it


def test_only_the_rank_itself_gets_the_host():
    explanation = Explanation("hang", rank=1, summary="rank 12 waits for rank 1 in all_reduce")
    assert name_host(explanation, {"ada": [0], "bob": [1]}).summary == "rank 12 waits for rank 1 on bob in all_reduce"
    assert name_host(explanation, {}) == explanation
    named = name_host(explanation, {"bob": [1]})
    assert name_host(named, {"bob": [1]}) == named and json.dumps(named.host) == '"bob"'


def test_a_message_that_has_the_name_of_a_host_does_not_stand_for_the_host_of_the_rank():
    explanation = Explanation("user-code-exception", rank=1, step=5, host="bob", summary="ValueError: boom on bob")
    assert format_summary(explanation) == "ValueError: boom on bob (rank 1 on bob, last step 5)"
    waits = Explanation("hang", rank=1, host="bob", summary="rank 1 waits")
    assert format_summary(waits) == "rank 1 waits (host bob)"
