"""Preemption notices: files, and the metadata services of clouds as their documentation describes them, on loopback."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product

import pytest
from waiting import wait_for

from paceline.errors import PacelineError
from paceline.launch import preemption
from paceline.launch.emit import cluster_job
from paceline.launch.preemption import CLOUDS, NoAnswer, NoticeFile, Service, short_notice, watch_preemption
from paceline.launch.stop_signals import StopSignals, catch_signals
from paceline.options import PreemptOptions
from paceline.run_options import EmitComposeOptions
from paceline.rundir import RunDir, read_json_lines

AWS_TOKEN = "stand-in-token-1"
ANSWER_PATHS = {  # what a cloud answers in, behind which headers
    "aws": ("/latest/meta-data/spot/instance-action", "X-aws-ec2-metadata-token", AWS_TOKEN),
    "gcp": ("/computeMetadata/v1/instance/preempted", "Metadata-Flavor", "Google"),
    "azure": ("/metadata/scheduledevents?api-version=2020-07-01", "Metadata", "true"),
}


class Metadata(BaseHTTPRequestHandler):
    """One address with all three services; each refuses a request without its header, as the real ones do."""

    def do_PUT(self):
        is_right = self.path == "/latest/api/token" and self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        self.answer(200, self.server.token) if is_right else self.answer(400)

    def do_GET(self):
        self.server.requests += 1
        if self.path.startswith("/metadata/instance/compute/name"):
            return self.answer(*self.server.vm)
        for path, header, value in ANSWER_PATHS.values():
            if self.path == path:
                value = self.server.token if value == AWS_TOKEN else value
                if self.headers.get(header) != value:
                    return self.answer(401)
                return self.server.behave(self)
        return self.answer(404)

    def answer(self, status, text=""):
        self.send_response(status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata(monkeypatch):
    """The service; `behave` is what it answers to a request for a notice."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        server.daemon_threads, server.handle_error = True, lambda *_: None  # a client that gives up is no error
        server.token, server.requests, server.vm = AWS_TOKEN, 0, (200, "worker_3")
        server.ended = threading.Event()
        server.behave = lambda request: request.answer(404)
        for cloud in CLOUDS.values():
            address = f"127.0.0.1:{server.server_port}"
            monkeypatch.setenv(cloud.variable, address if "GCE" in cloud.variable else f"http://{address}/")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nothing may go there
        monkeypatch.setattr(preemption, "TIMEOUT_S", 60.0)  # a busy machine is no silent service
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.ended.set()
        server.shutdown()


def answers(*texts):
    """Answers these texts, one for each request, and the last one from then on."""
    remaining = list(texts)
    return lambda request: request.answer(200, remaining.pop(0) if len(remaining) > 1 else remaining[0])


def azure_event(kind="Preempt", name="worker_3", not_before=""):
    event = {"EventId": "1", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": [name]}
    return json.dumps({"DocumentIncarnation": 1, "Events": [{**event, "NotBefore": not_before}]})


def in_100_s(form):
    return (datetime.now(UTC) + timedelta(seconds=100)).strftime(form)


def test_aws_answers_404_until_the_machine_goes_and_then_says_when(metadata):
    service = Service(CLOUDS["aws"])
    assert service.poll() is None
    metadata.behave = answers(json.dumps({"action": "terminate", "time": in_100_s("%Y-%m-%dT%H:%M:%SZ")}))
    notice = service.poll()
    assert notice.source == "a preemption notice from AWS"
    assert 60 < notice.seconds_left <= 100


def test_a_token_of_aws_that_has_expired_is_replaced(metadata):
    service = Service(CLOUDS["aws"])
    assert service.poll() is None
    metadata.token, metadata.behave = "stand-in-token-2", answers('{"action": "stop", "time": "unreadable"}')
    assert service.poll() is None  # 401: the old token
    assert service.poll().seconds_left is None


def test_google_cloud_says_true_or_false(metadata):
    metadata.behave = answers("FALSE", "TRUE\n")
    service = Service(CLOUDS["gcp"])
    assert service.poll() is None
    assert service.poll().source == "a preemption notice from Google Cloud"


def test_azure_counts_the_events_that_take_this_machine_away(metadata):
    due = in_100_s("%a, %d %b %Y %H:%M:%S GMT")
    metadata.behave = answers(
        '{"DocumentIncarnation": 1, "Events": []}',
        azure_event(kind="Freeze"),
        azure_event(name="worker_4"),
        azure_event(not_before=due),
    )
    service = Service(CLOUDS["azure"])
    assert [service.poll() for _ in range(3)] == [None, None, None]
    notice = service.poll()
    assert notice.source == "a notice from Azure (preempt)"
    assert 60 < notice.seconds_left <= 100


def test_an_event_of_azure_counts_where_the_name_of_this_machine_is_not_known(metadata):
    metadata.vm, metadata.behave = (404, ""), answers(azure_event(name="worker_4"))
    assert Service(CLOUDS["azure"]).poll().source == "a notice from Azure (preempt)"


def be_silent(request):
    request.server.ended.wait()


def drip(request):
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(b"x" * 20_000)


FAULTS = {
    "404": (lambda request: request.answer(404), "it answers 404"),
    "500": (lambda request: request.answer(500), "it answers 500"),
    "redirect": (lambda request: request.answer(302), "it answers 302"),
    "garbage": (lambda request: request.answer(200, "\ufffd<html>"), "it"),
    "wrong JSON": (lambda request: request.answer(200, "[1, 2]"), "it"),
    "empty": (lambda request: request.answer(200), "it"),
    "slow": (be_silent, "no answer within 0 s"),
    "endless": (drip, "it sends an answer that does not end"),
    "no HTTP": (lambda request: request.wfile.write(b"SSH-2.0\r\n\r\n"), "no answer: "),
}


# a 404 of AWS is its answer for a machine that stays
@pytest.mark.parametrize(("cloud", "fault"), sorted(set(product(CLOUDS, FAULTS)) - {("aws", "404")}))
def test_a_service_that_does_not_keep_its_protocol_has_no_answer(metadata, monkeypatch, cloud, fault):
    if fault == "slow":
        monkeypatch.setattr(preemption, "TIMEOUT_S", 0.2)
    metadata.behave, reason = FAULTS[fault]
    with pytest.raises(NoAnswer) as error:
        Service(CLOUDS[cloud]).poll()
    assert str(error.value).startswith(reason)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_service_that_is_not_there_has_no_answer(monkeypatch, cloud):
    monkeypatch.setenv(CLOUDS[cloud].variable, "http://127.0.0.1:1")
    with pytest.raises(NoAnswer, match="no answer: .*refused"):
        Service(CLOUDS[cloud]).poll()


def test_a_service_that_fails_is_reported_once_and_asked_until_it_has_a_notice(metadata, monkeypatch):
    monkeypatch.setitem(CLOUDS, "gcp", replace(CLOUDS["gcp"], poll_s=0.01))
    metadata.behave = answers("?", "", "nonsense", "FALSE", "?", "TRUE")
    notices, problems = [], []
    options = PreemptOptions(preempt_from="gcp", preempt_grace_s=None)
    with watch_preemption(options, lambda *notice: notices.append(notice), problems.append):
        wait_for(lambda: notices)
        time.sleep(0.1)
    address = os.environ["GCE_METADATA_HOST"]
    assert problems == [
        f"no preemption notices from Google Cloud at http://{address} (it answers neither TRUE nor FALSE); it is asked again"
    ]
    assert notices == [("a preemption notice from Google Cloud", 25.0)]  # 30 s, less those in which the run ends
    assert metadata.requests == 6  # nothing is asked after the notice


@pytest.mark.parametrize(
    ("text", "seconds"), [("", None), ("90\n", 90.0), ("soon", None), ("-1", None), ("nan", None), ("inf", None)]
)
def test_a_notice_file_may_hold_the_seconds_that_are_left(tmp_path, text, seconds):
    source = NoticeFile(tmp_path / "notice")
    assert source.poll() is None
    (tmp_path / "notice").write_text(text)
    notice = source.poll()
    assert (notice.source, notice.seconds_left) == (f"the notice file {tmp_path / 'notice'}", seconds)


def test_a_notice_file_from_before_counts_when_it_changes(tmp_path):
    path = tmp_path / "notice"
    path.touch()
    os.utime(path, (1e9, 1e9))
    problems = []
    with watch_preemption(PreemptOptions(preempt_file=path), pytest.fail, problems.append):
        wait_for(lambda: problems)
    assert problems == [f"{path} is older than this command: it is no notice until it changes"]
    source = NoticeFile(path)
    assert source.poll() is None
    path.touch()
    assert source.poll() is not None


def test_what_can_never_be_seen_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    for options, fix in (
        (PreemptOptions(preempt_file=tmp_path / "folder"), "the path of a file"),
        (PreemptOptions(preempt_file=tmp_path / "missing" / "notice"), "the path of a file"),
        (PreemptOptions(preempt_grace_s=30.0), "--preempt-file PATH or"),
    ):
        with pytest.raises(PacelineError) as error:
            preemption.check_preempt_options(options)
        assert error.value.fix.startswith(fix)


def test_a_notice_that_is_too_short_for_a_save_is_reported_before_the_start():
    gcp = PreemptOptions(preempt_from="gcp")
    assert short_notice(gcp, needed_s=90.0) == (
        "note    a preemption notice leaves 30s, a checkpoint is planned to take up to 1m30s:"
        " a smaller --save-every loses less where the save is cut off"
    )
    assert short_notice(gcp, needed_s=20.0) is None
    assert short_notice(PreemptOptions(preempt_from="gcp", preempt_grace_s=120.0), needed_s=90.0) is None
    assert short_notice(PreemptOptions(), needed_s=90.0) is None


def test_a_notice_is_an_order_to_stop_with_a_deadline_and_a_signal_before_it_stays_the_reason():
    signals = StopSignals()
    signals.preempt("the notice file x", 50.0)
    assert (bool(signals.first), signals.is_over) == (True, False)
    assert signals.facts() == {"reason": "the notice file x", "seconds_left": 50}
    signals.preempt("the notice file x", 0.0)
    assert signals.is_over
    signals = StopSignals(first="SIGTERM")
    signals.preempt("the notice file x", None)
    assert (signals.facts(), signals.is_over) == ({"signal": "SIGTERM"}, False)


@pytest.mark.parametrize(("before", "first"), [(signal.SIG_DFL, "SIGHUP"), (signal.SIG_IGN, None)])
def test_a_closed_terminal_is_an_order_to_stop_but_under_nohup(before, first):
    outside = signal.signal(signal.SIGHUP, before)
    try:
        with catch_signals(StopSignals()) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.first == first
    finally:
        signal.signal(signal.SIGHUP, outside)


@pytest.mark.parametrize(("notice_s", "seconds"), [(120.0, 115.0), (10.0, 5.0), (5.0, 2.5), (1.0, 0.5), (0.0, 0.0)])
def test_a_short_notice_leaves_half_of_its_time_to_save(notice_s, seconds):
    assert preemption.seconds_to_save(notice_s) == seconds


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"


@pytest.mark.dist
def test_what_does_not_end_within_the_time_of_the_notice_is_killed_before_it_is_over(tmp_path):
    (tmp_path / "script.py").write_text(DEAF)
    words = ["run", "--no-check", "--name=x", "--nproc=1", "--device=cpu", "--health-every=0", "--preempt-file=notice"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", *words, "--", "script.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    run = RunDir(tmp_path / "runs" / "x")
    wait_for(lambda: run.rank_log(1, 0).exists() and "ready" in run.rank_log(1, 0).read_text())
    (tmp_path / "part").write_text("4")  # without it, a script that takes no signal has a minute
    (tmp_path / "part").rename(tmp_path / "notice")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    events = list(read_json_lines(run.events))
    stopping = next(event for event in events if event["event"] == "stopping")
    assert (stopping["reason"], stopping["seconds_left"]) == ("the notice file notice", 2)
    assert "stopping: SIGTERM sent, the script has 2 s to end; Ctrl-C again to end now\n" in errors
    assert "the time of the notice is over: ending without the rest of the save" in errors
    assert events[-1]["event"] == "interrupted"
    assert "note    killed rank 0, which did not end in 2 s: what was being saved is incomplete\n" in errors


SMALL = {
    "depth": 2, "n_embd": 64, "head_dim": 32, "sequence_len": 64, "vocab_size": 300, "total_batch_size": 1024, "num_steps": 100,
    "device_batch_size": 2, "precision": "fp32", "device": "cpu", "nproc": 1, "eval_tokens": 4096, "log_every": 1, "eval_every": 0,
    "save_every": 0, "compile": False,
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.dist
def test_an_emitted_script_saves_on_a_notice_and_what_starts_again_resumes(metadata, tmp_path, monkeypatch):
    """The script of a compose file as a shell runs it, with the metadata service of a cloud in place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 3000)
    job = cluster_job(EmitComposeOptions(preempt_from="gcp", keys={**SMALL, "data": "text.txt"}))
    (tmp_path / "run.toml").write_text(job.config_toml)
    script = job.script("run.toml").replace("/workspace/data/", "").replace("/workspace", str(tmp_path))
    (tmp_path / "paceline").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m paceline.cli "$@" --no-check --health-every=0\n'
    )
    (tmp_path / "paceline").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    run = RunDir(tmp_path / "runs" / job.name)

    def steps():
        return [line["step"] for line in read_json_lines(run.metrics) if "loss" in line]

    metadata.behave = lambda request: request.answer(
        200, "TRUE" if run.metrics.exists() and len(steps()) > 1 else "FALSE"
    )
    shell = ["sh", "-c", script]
    first = subprocess.run(shell, env=env, capture_output=True, text=True, timeout=800, check=False)
    assert first.returncode == 130, first.stdout + first.stderr
    saved = steps()[-1]
    assert 1 < saved < SMALL["num_steps"] and f"checkpoint at step {saved}" in first.stderr
    notice = "a preemption notice from Google Cloud, 25 s left, sending SIGTERM"
    assert f"stopping on {notice}: saving a checkpoint" in first.stdout
    assert first.stderr.rstrip().endswith(f"next    paceline resume {run.path}")
    metadata.behave = answers("FALSE")  # on the next machine
    second = subprocess.run(shell, env=env, capture_output=True, text=True, timeout=800, check=False)
    assert second.returncode == 0, second.stdout + second.stderr
    assert steps() == list(range(1, SMALL["num_steps"] + 1))
