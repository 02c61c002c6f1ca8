"""Messages of a run to whoever waits elsewhere: when, in which form, and that a receiver of any kind never hurts."""

import json
import os
import subprocess
import sys
import threading
import time
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rows import with_rows

from paceline.config import Config
from paceline.errors import UsageError
from paceline.launch import notify
from paceline.launch.host_facts import start_check
from paceline.launch.notify import Receiver, RunNews, make_message, parse_receiver, run_services, send
from paceline.launch.script import Script, check_script
from paceline.options import Services, TrainOptions
from paceline.plan.machine import Machine
from paceline.plan.planner import make_plan
from paceline.rundir import RunDir, append_event, append_json_line, lock_run, read_json_lines, utc_now

MESSAGE = {"event": "failed", "run": "books", "title": "books failed on one", "text": "rank 1: <boom> & more"}
VERDICT = {"cause": "hang", "rank": 1, "summary": "rank 1 hung", "fix": "look at it"}


class Receiving(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        self.server.came.append((self.path, dict(self.headers), body))
        self.send_response(self.server.answers.pop(0) if self.server.answers else 200)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiving) as server:
        server.came, server.answers = [], []
        server.url = f"http://127.0.0.1:{server.server_port}/s3cret"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """On a busy machine a helper needs longer than a user waits without a word."""
    monkeypatch.setattr(notify, "LEAVE_AFTER_S", 120.0)
    monkeypatch.setattr(notify, "ANNOUNCE_AFTER_S", 120.0)


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "books")
    run.path.mkdir()
    run.plan_json.write_text("{}")
    return run


@with_rows(("word", "receiver"), [
    ("https://ntfy.sh/books", Receiver("https://ntfy.sh/books", "ntfy", "ntfy.sh")),
    ("ntfy+http://box:8080/books", Receiver("http://box:8080/books", "ntfy", "box:8080")),
    ("https://hooks.slack.com/services/T/B/X", Receiver("https://hooks.slack.com/services/T/B/X", "slack", "hooks.slack.com")),
    ("slack+https://chat.me/hooks/x", Receiver("https://chat.me/hooks/x", "slack", "chat.me")),
    ("https://me:pass@chat.me/hooks/a+b", Receiver("https://me:pass@chat.me/hooks/a+b", "json", "chat.me")),
    # a topic in other letters is sent as a browser sends it
    ("https://ntfy.sh/训练?a=é%20b", Receiver("https://ntfy.sh/%E8%AE%AD%E7%BB%83?a=%C3%A9%20b", "ntfy", "ntfy.sh")),
])  # fmt: skip
def test_the_address_tells_the_form_and_only_its_host_is_shown(word, receiver):
    assert parse_receiver(word) == receiver


@with_rows(("address", "message"), [
    *((address, "not an address") for address in ["s3cret", "ftp://s3cret", "http://", "http://[s3cret", "http://a/s3 cret"]),
    *((address, "no topic") for address in ["https://ntfy.sh", "https://ntfy.sh/", "ntfy+http://box:8080"]),
    ("@/s3cret", "No such file"),
])  # fmt: skip
def test_what_is_no_address_or_has_no_topic_is_refused_without_telling_it(address, message):
    with pytest.raises(UsageError, match=message) as error:
        parse_receiver(address)
    assert "s3cret" not in str(error.value) or address.startswith("@")


def test_an_address_may_stand_in_a_file(tmp_path):
    (tmp_path / "hook").write_text("https://ntfy.sh/books\n")
    assert parse_receiver(f"@{tmp_path / 'hook'}").url == "https://ntfy.sh/books"


def test_plain_json_has_all_facts(server):
    assert send(parse_receiver(server.url), MESSAGE) is None
    assert [(path, json.loads(body)) for path, _, body in server.came] == [("/s3cret", MESSAGE)]


def test_a_name_and_a_password_in_the_address_log_in(server):
    assert send(parse_receiver(server.url.replace("://", "://me:p%40ss@")), MESSAGE) is None
    [(path, headers, _)] = server.came
    assert (path, headers["Authorization"]) == ("/s3cret", "Basic " + b64encode(b"me:p@ss").decode())


def test_ntfy_gets_a_text_with_title_and_priority(server):
    send(parse_receiver("ntfy+" + server.url), MESSAGE)
    ((_, headers, body),) = server.came
    assert body == "rank 1: <boom> & more"
    assert (headers["Title"], headers["Priority"], headers["Tags"]) == ("books failed on one", "high", "rotating_light")


def test_slack_gets_a_text_in_which_nothing_is_markup(server):
    send(parse_receiver("slack+" + server.url), MESSAGE)
    assert json.loads(server.came[0][2]) == {"text": "*books failed on one*\nrank 1: &lt;boom&gt; &amp; more"}


@pytest.mark.parametrize(
    "answers, tries, problem",
    [
        ([503, 429], 3, None),
        ([404], 1, "it answers 404"),
        ([302], 1, "it answers 302, a redirect: --notify takes the address to which it leads"),
        ([500] * 9, 5, "it answers 500"),
    ],
)
def test_faults_that_may_pass_are_tried_again(server, monkeypatch, answers, tries, problem):
    monkeypatch.setattr(notify, "WAITS_S", (0.0,) * 5)
    server.answers = answers
    assert send(parse_receiver(server.url), MESSAGE) == problem
    assert len(server.came) == tries


def test_a_receiver_that_is_not_there_or_says_nothing_is_left_in_time(server, monkeypatch):
    monkeypatch.setattr(notify, "WAITS_S", (0.0,))
    monkeypatch.setattr(notify, "TIMEOUT_S", 1)
    assert send(Receiver("http://127.0.0.1:9/s3cret", "json", "here"), MESSAGE) == "[Errno 111] Connection refused"
    test_end = threading.Event()
    monkeypatch.setattr(Receiving, "do_POST", lambda self: test_end.wait())
    assert send(parse_receiver(server.url), MESSAGE) == "no answer within 1 s"
    test_end.set()


def received(server, count):
    """Returns the messages as soon as there are so many."""
    deadline = time.monotonic() + 120
    while len(server.came) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    return [json.loads(body) for _, _, body in server.came]


def step(run, number):
    append_json_line(run.metrics, {"step": number, "loss": 3.5, "val_bpb": 1.25, "time": utc_now()})


def test_a_run_that_recovers_and_finishes_says_both(run, server):
    append_event(run, "failed")  # of the command before
    with run_services(run, Services(notify=(server.url,))):
        append_event(run, "attempt", attempt=2)
        step(run, 10)
        append_event(run, "attempt_ended", attempt=2, state="failed")
        append_event(run, "verdict", attempt=2, **VERDICT)
        append_event(run, "attempt", attempt=3)
        time.sleep(0.01)  # lines of one time are in no order
        step(run, 20)
        (recovered,) = received(server, 1)
        append_event(run, "finished")
    _, finished = received(server, 2)
    assert (recovered["event"], recovered["text"]) == ("recovered", "step 20, attempt 3; before it: rank 1 hung")
    assert (recovered["cause"], recovered["step"], recovered["attempt"]) == ("hang", 20, 3)
    assert (finished["event"], finished["val_bpb"], "cause" in finished) == ("finished", 1.25, False)
    assert not [path for path in run.path.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]


def test_a_run_whose_folder_is_renamed_has_finished_under_its_new_name(run, server):
    with run_services(run, Services(notify=(server.url,))):
        append_event(run, "verdict", attempt=1, **VERDICT)
        append_event(run, "attempt", attempt=2)
        time.sleep(0.01)  # lines of one time are in no order
        step(run, 20)
        received(server, 1)  # so the helper has begun
        append_event(RunDir(run.path.rename(run.path.with_name("renamed"))), "finished")
    _, finished = received(server, 2)
    assert (finished["event"], finished["run"], finished["step"]) == ("finished", "renamed", 20)


def test_a_run_that_fails_says_the_cause_and_the_fix(run, server):
    with run_services(run, Services(notify=(server.url,))):
        append_event(run, "attempt", attempt=1)
        append_event(run, "verdict", attempt=1, **VERDICT)
        append_event(run, "failed", rank=1)
    (failed,) = received(server, 1)
    assert (failed["event"], failed["fix"]) == ("failed", "look at it")
    assert failed["text"].startswith("rank 1 hung (after ")


def stopping(signal):
    return {"event": "stopping", "attempt": 1, "signal": signal}


@pytest.mark.parametrize(
    "events, messages",
    [
        ([{"event": "finished"}], ["finished"]),
        ([stopping("SIGINT"), {"event": "stopped"}], []),  # by somebody who sits there
        ([stopping("SIGTERM"), {"event": "stopped"}], ["stopped"]),
        ([stopping("SIGTERM"), {"event": "interrupted"}], ["stopped"]),  # of a script
        ([{"event": "stopping", "attempt": 1, "reason": "the notice file x"}, {"event": "stopped"}], ["stopped"]),
        ([stopping("SIGINT"), {"event": "finished"}], ["finished"]),
        ([{"event": "finished"}, stopping("SIGTERM")], ["finished"]),  # it came after the last step
        ([{"event": "stopped"}, {"event": "attempt_ended", "attempt": 1, "state": "interrupted"}], ["stopped"]),
        ([{"event": "stopped"}], ["failed"]),  # the workers have saved: what held them was killed
        ([], ["failed"]),
    ],
)  # fmt: skip
def test_what_is_told_at_the_end(run, events, messages):
    news = RunNews(run)
    for event in ({"event": "attempt", "attempt": 1}, *events):
        append_event(run, **event)
    assert list(news.read(ended=True)) == messages


def test_a_good_end_tells_what_failure_the_output_shows(run):
    news = RunNews(run)
    append_event(run, "attempt", attempt=1)
    append_event(run, "finished")
    append_event(run, "verdict", attempt=1, cause="disk-full", summary="rank 0 could not write")
    [notice] = news.read(ended=True)
    text = make_message(notice, news)["text"]
    assert notice == "finished" and text.endswith("; its output shows a failure: rank 0 could not write")


def test_a_requeued_run_is_not_to_be_resumed(run):
    run.plan_json.write_text("{}")
    news = RunNews(run)
    stop = [stopping("SIGUSR1"), {"event": "stopped"}]
    for event in ({"event": "attempt", "attempt": 1}, *stop):
        append_event(run, **event)
    assert list(news.read(ended=True)) == ["stopped"]
    assert f"; resume it with: paceline resume {run.quoted}" in make_message("stopped", news)["text"]
    append_event(run, "requeued", job_id="13_3", why="its time was nearly over")
    assert list(news.read(ended=True)) == ["stopped"]
    assert make_message("stopped", news)["text"].endswith("; Slurm's job 13_3 continues it")


def test_a_command_that_was_killed_has_failed_but_not_before_its_workers_have_saved(run, server):
    lock = lock_run(run)
    append_event(run, "verdict", attempt=1, **VERDICT)
    append_event(run, "attempt", attempt=2)
    time.sleep(0.01)  # lines of one time are in no order
    command = [sys.executable, "-m", "paceline.launch.notify"]
    helper = subprocess.Popen(command, stdin=subprocess.PIPE)
    job = {"run": str(run.path), "to": server.url, "events_bytes": 0, "metrics_bytes": 0}
    helper.stdin.write(json.dumps(job).encode() + b"\n")
    helper.stdin.close()  # the command is gone, and its workers still train
    step(run, 20)
    (recovered,) = received(server, 1)
    assert (recovered["event"], helper.poll()) == ("recovered", None)
    os.close(lock)
    assert helper.wait(timeout=120) == 0
    _, failed = received(server, 2)
    assert failed["event"] == "failed"
    assert failed["text"].startswith("it ended without a message, step 20, after ")


def test_a_receiver_that_refuses_is_a_line_of_the_run_without_its_address(run, server):
    server.answers = [403]
    with run_services(run, Services(notify=(server.url,))):
        append_event(run, "finished")
    last = list(read_json_lines(run.events))[-1]
    shown = server.url.split("/")[2]
    assert (last["event"], last["text"]) == (
        "note",
        f"notify: {shown} did not receive that the run has finished: it answers 403",
    )


def test_a_helper_that_takes_long_is_left_behind(run, server, monkeypatch, capsys):
    monkeypatch.setattr("paceline.launch.notify.LEAVE_AFTER_S", 0.5)
    monkeypatch.setattr("paceline.launch.notify.ANNOUNCE_AFTER_S", 0.1)
    test_end = threading.Event()
    monkeypatch.setattr(Receiving, "do_POST", lambda self: test_end.wait())
    with run_services(run, Services(notify=(server.url,))):
        append_event(run, "finished")
    test_end.set()
    assert capsys.readouterr().err.splitlines() == [
        "waiting for notify, at most 0 s; Ctrl-C leaves it running",
        "still sending: notify; it ends by itself",
    ]


def test_a_tracker_that_dies_is_one_line(run, capsys):
    with run_services(run, Services(track=("other",))):
        append_event(run, "finished")
    sends = f"paceline track {run.path} --to other sends what is missing"
    assert capsys.readouterr().err == f"other: KeyError: 'other'; {sends}\n"


@pytest.mark.dist
@pytest.mark.soak
def test_a_script_is_tracked_and_its_end_told_and_the_address_stands_nowhere(tmp_path, server):
    pytest.importorskip("tensorboard")
    (tmp_path / "train.py").write_text(
        "for step in range(1, 4): print(f'step {step}/3 | loss {4 - step}.5', flush=True)"
    )
    (tmp_path / "hook").write_text(server.url)
    ours = ["--name", "r", "--nproc", "1", "--device", "cpu", "--no-check"]
    told = ["--track", "tensorboard", "--notify", f"@{tmp_path}/hook"]
    command = [sys.executable, "-m", "paceline.cli", "run", *ours, *told]
    done = subprocess.run([*command, "--", "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "tensorboard: tensorboard --logdir runs/r/track/tensorboard" in done.stderr
    assert [message["event"] for message in received(server, 1)] == ["finished"]
    run = RunDir(tmp_path / "runs" / "r")
    assert json.loads(run.track("tensorboard").read_text())["step"] == 3
    texts = [path.read_bytes() for path in run.path.rglob("*") if path.is_file()]
    assert not [text for text in texts if b"s3cret" in text]


@pytest.mark.parametrize("log, loss", [("| loss 1.5", 1.5), ("| loss nan", None), ("", 2.0)])
def test_a_message_about_a_script_has_the_step_and_the_loss_that_its_first_rank_printed(run, log, loss):
    """Without a loss there those of its files of metrics."""
    news = RunNews(run)
    append_event(run, "attempt", attempt=1)
    append_event(run, "attempt", attempt=2)
    (run.path / "metrics.csv").write_text("step,loss\n3,2.0\n")
    run.logs(2).mkdir(parents=True)
    run.rank_log(2, 0).write_text(f"step 1/3\nstep 3/3 {log}\n")
    append_event(run, "finished")
    assert list(news.read(ended=True)) == ["finished"]
    message = make_message("finished", news)
    assert (message["step"], message["loss"]) == (3, loss)
    assert message["text"].startswith("step 3, after ")


def test_a_message_names_the_host_that_failed(run):
    news = RunNews(run)
    append_event(run, "attempt", attempt=1)
    append_event(
        run, "verdict", attempt=1, cause="host-lost", rank=None, host="bob", summary="bob is silent", fix="ssh bob"
    )
    append_event(run, "failed")
    assert list(news.read(ended=True)) == ["failed"]
    message = notify.make_message("failed", news)
    assert (message["failed_host"], message["rank"]) == ("bob", None)
    assert message["text"].startswith("bob is silent (after ")


def test_what_a_training_is_checked_for_has_the_trackers_that_follow_it(run):
    config, machine = Config(depth=2), Machine(gpus=(), cpu_cores=2, cpu_bf16=False, memory_bytes=1 << 33)
    plan = make_plan(config, machine, vocab_size=512, num_rows=0)
    options = TrainOptions(check=False)
    with start_check(config, run, options, command="train", trackers=("wandb",)) as check:
        assert check.intent(plan).trackers == ("wandb",)


LOGIN = "wandb login; what was saved offline is sent later by paceline track RUN --to wandb"


@pytest.mark.parametrize(("trackers", "fixes"), [(("wandb",), [LOGIN]), (("tensorboard",), [])])
def test_a_script_that_wandb_follows_is_checked_for_its_login(run, trackers, fixes):
    facts = {"host": {"name": "ada"}, "tools": {"wandb": {"installed": True, "logged_in": False, "mode": None}}}
    script = Script(("x.py",), 1, "cpu", run.path)
    findings = check_script(script, run, ([facts], None), config=Config(), trackers=trackers, resumes=False).findings
    assert [finding.fix for finding in findings if finding.id == "wandb-silent"] == fixes
