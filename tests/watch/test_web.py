"""The server of `paceline watch --web`: who may look, what can be asked, and that nothing else is answered."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from contextlib import ExitStack
from email.message import Message
from http.cookiejar import CookieJar
from types import SimpleNamespace
from typing import Any
from urllib.request import Request as URLRequest

import pytest
from run_folders import DEADLINE_S, FOLDER, TOKEN, append_step, asked, serving, write_run

from paceline.errors import PacelineError, UsageError
from paceline.rundir import RunDir
from paceline.watch import connections
from paceline.watch.connections import MAX_IDLE, listen
from paceline.watch.status import FRESH_S, Shelf
from paceline.watch.web import EVERY_S, HEADERS, folder_of, name_in, serve

SECRET = "nobody may read this"
ADDRESSES = (
    "/",
    "/static/app.js",
    "/api/runs",
    "/api/stream",
    "/api/runs/a",
    "/api/runs/a/about",
    "/api/runs/a/metrics.csv",
    "/api/settings",
    "/api/runs/a/log?attempt=1&rank=0",
)
OUT = (
    "..",
    "../secret.txt",
    "..%2fsecret.txt",
    "%2e%2e",
    "%2e%2e%2fsecret.txt",
    "%252e%252e%252f",
    "....//",
    "/etc/passwd",
    "a%00",
    "C:%5c",
)
EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """runs/ with two runs, and a secret beside it."""
    home = tmp_path_factory.mktemp("home")
    (home / "secret.txt").write_text(SECRET)
    (home / "runs").mkdir()
    write_run(home / "runs", "a", log=f"step 1 {EVIL}\nstep 2\n")
    write_run(home / "runs", EVIL.replace("/", "|"))
    return home / "runs"


@pytest.fixture(scope="module")
def port(folder):
    with serving(Shelf(folder)) as number:
        yield number


@pytest.mark.parametrize("path", ADDRESSES)
def test_without_the_token_nothing_is_answered(port, path):
    assert asked(port, path, token=False)[0] == 403
    assert asked(port, path + ("&" if "?" in path else "?") + "token=wrong", token=False)[0] == 403
    assert asked(port, path, token=False, cookie="paceline_00000000=wrong; token=x")[0] == 403


def test_what_is_not_there_is_told_to_nobody_without_the_token(port):
    assert asked(port, "/nothing", token=False)[0] == 403
    assert asked(port, "/nothing")[0] == 404


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(port):
    status, headers, _ = asked(port, "/")
    name, _, rest = headers["set-cookie"].partition("=")
    assert (status, rest) == (200, f"{TOKEN}; HttpOnly; SameSite=Strict")
    assert asked(port, "/api/runs", token=False, cookie=f"other=1; {name}={TOKEN}")[0] == 200


def test_the_cookie_belongs_to_the_folder_of_the_page_also_below_the_path_of_a_proxy(port):
    status, headers, _ = asked(port, "/")
    answer = Message()
    answer["Set-Cookie"] = headers["set-cookie"]
    jar = CookieJar()
    jar.extract_cookies(SimpleNamespace(info=lambda: answer), URLRequest(f"http://lab.example/proxy{FOLDER}"))
    assert (status, [cookie.path + "/" for cookie in jar]) == (200, [f"/proxy{FOLDER}"])


@pytest.mark.parametrize("foreign", ['s={"theme":"dark"}', "a b=c", "=", "x", "n\u00e4me=1", 'q="a;b"', "paceline_x=1"])
def test_the_cookies_of_other_servers_on_this_host_do_not_hide_its_own(port, foreign):
    own = asked(port, "/")[1]["set-cookie"].partition(";")[0]
    for cookie in (f"{foreign}; {own}", f"{own}; {foreign}"):
        assert asked(port, "/api/runs", token=False, cookie=cookie)[0] == 200
    assert asked(port, "/api/runs", token=False, cookie=foreign)[0] == 403


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8765",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "",
        "192.168.1.7:8765",
    ],
)
def test_a_foreign_host_is_refused_even_with_the_token(port, host):
    assert asked(port, "/api/runs", host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:80", "LOCALHOST", "[::1]:8765"])
def test_any_port_of_loopback_is_its_own_for_it_may_be_a_tunnel(port, host):
    assert asked(port, "/api/runs", host=host)[0] == 200


def test_a_page_of_another_site_cannot_ask_even_with_the_token(port):
    assert asked(port, "/api/runs", sec_fetch_site="cross-site", sec_fetch_mode="no-cors")[0] == 403
    assert asked(port, "/", sec_fetch_site="cross-site", sec_fetch_mode="navigate")[0] == 200  # a link that was clicked


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_there_is_no_verb_that_writes(port, method):
    for path in ("/", "/api/runs", "/api/runs/a", "/api/runs/a/log?attempt=1&rank=0"):
        status, headers, _ = asked(port, path, method=method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("out", OUT)
def test_no_parameter_leads_out_of_the_run_folders(port, out):
    paths = [
        f"/{out}",
        f"/static/{out}",
        f"/api/runs/{out}",
        f"/api/runs/{out}/about",
        f"/api/runs/{out}/log?attempt=1&rank=0",
    ]
    for path in paths:
        status, _, text = asked(port, path)
        assert status == 404 and SECRET not in text, path
    for query in (f"attempt={out}&rank=0", f"attempt=1&rank={out}"):
        assert asked(port, f"/api/runs/a/log?{query}")[0] == 400
    assert json.loads(first_event(port, f"run={out}"))["gone"] is True


@pytest.mark.parametrize(
    "name",
    [
        "config.toml",
        "plan.json",
        "findings.json",
        "events.jsonl",
        "metrics.jsonl",
        "health/host.jsonl",
        "progress/0",
        "logs/1/0.log",
        "logs/1/0.error.json",
        "samples/step_000001.txt",
        "facts/host.json",
        "hangs",
    ],
)
def test_a_run_with_a_link_that_leads_out_of_its_folder_is_not_shown(name, tmp_path):
    """In no answer, also where the link comes later than the view."""
    outside = write_run(tmp_path / "elsewhere", "b", log=SECRET, matrix_lr=SECRET, end="failed")
    runs = tmp_path / "runs"
    run = write_run(runs, "a", end="failed")
    with serving(Shelf(runs)) as port:
        assert asked(port, "/api/runs/a")[0] == 200
        link = run.path / name
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(outside.path / name)
        assert Shelf(runs).refused() == [link]
        assert asked(port, "/api/runs/a")[0] == asked(port, "/api/runs/a/log?attempt=1&rank=0")[0] == 404
        message = json.loads(first_event(port, "run=a"))
        assert message["gone"] is True and message["why"].startswith(f"{link} is a link that leads out")
        assert set(message) == {"run", "gone", "why"} and SECRET not in message["why"]
        assert json.loads(asked(port, "/api/runs")[2]) == []
        assert asked(port, "/api/runs/a/about")[0] == 404
    with pytest.raises(PacelineError, match="is a link that leads out of the run folder"):
        serve(Shelf(runs, run.path), run.path, port=0, open_browser=False)


def test_a_run_folder_that_is_a_link_is_shown_and_so_is_one_with_links_within_itself(tmp_path):
    run = write_run(tmp_path / "disk", "a", log="step 1\n")
    run.rank_log(1, 1).symlink_to("0.log")
    (run.path / "checkpoints").symlink_to(tmp_path)  # is not read
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(run.path)
    with serving(Shelf(tmp_path / "runs")) as port:
        assert [each["name"] for each in json.loads(asked(port, "/api/runs")[2])] == ["linked"]
        assert json.loads(asked(port, "/api/runs/linked/log?attempt=1&rank=1")[2])["text"] == "step 1\n"


def test_a_run_whose_folder_is_gone_is_shown_as_gone_until_it_is_back(tmp_path):
    shelf, run = Shelf(tmp_path), write_run(tmp_path, "a")
    assert shelf.snapshot("a").state == "finished"
    away = run.path.rename(tmp_path.parent / "away")
    time.sleep(FRESH_S)
    with serving(shelf) as port:
        event = json.loads(first_event(port, "run=a"))
        assert (event["head"]["state"], event["panels"]["head"]["badge"]["state"]) == ("gone", "gone")
        assert event["summary"]["text"].startswith("Its files are gone")
        assert json.loads(asked(port, "/api/runs")[2]) == []
        away.rename(run.path)
        time.sleep(FRESH_S)
        assert json.loads(first_event(port, "run=a"))["head"]["state"] == "finished"


def test_a_link_in_the_place_of_a_run_that_was_shown_is_not_followed(tmp_path):
    outside = write_run(tmp_path / "elsewhere", "b", log=SECRET)
    shelf, run = Shelf(tmp_path / "runs"), write_run(tmp_path / "runs", "a")
    assert shelf.snapshot("a").state == "finished"
    run.config_toml.unlink()
    run.events.unlink()
    run.events.symlink_to(outside.events)
    with pytest.raises(PacelineError, match="leads out of the run folder"):
        shelf.snapshot("a")


def test_every_answer_forbids_the_browser_to_load_or_guess_anything_else(port):
    for path in (*ADDRESSES[:3], "/nothing"):
        headers = asked(port, path)[1]
        assert headers.items() >= HEADERS.items()
    assert "script-src 'self'" in HEADERS["content-security-policy"] and "unsafe" not in str(HEADERS)


def test_markup_goes_out_as_json_that_no_browser_takes_for_a_page(port):
    _, headers, text = asked(port, "/api/runs/a/log?attempt=1&rank=0")
    assert (headers["content-type"], json.loads(text)["text"].splitlines()[0]) == ("application/json", f"step 1 {EVIL}")


def test_a_log_is_searched(port):
    assert json.loads(asked(port, "/api/runs/a/log?attempt=1&rank=0&find=STEP%202")[2]) == {
        "hits": [[2, "step 2"]],
        "all": True,
        "levels": {},
        "note": "1 line with this text",
    }


def test_a_log_is_read_from_a_byte_up_to_a_byte_and_around_a_line(port):
    def part(place: str) -> dict[str, Any]:
        return json.loads(asked(port, f"/api/runs/a/log?attempt=1&rank=0&{place}")[2])

    second = len(f"step 1 {EVIL}\n")
    assert part(f"from={second}")["text"] == "step 2\n" and part(f"to={second}")["text"] == f"step 1 {EVIL}\n"
    assert (part("line=2")["line"], part("line=2")["index"]) == (2, 1)
    assert asked(port, "/api/runs/a/log?attempt=1&rank=0&line=x")[0] == 400


def test_all_lines_of_metrics_come_as_csv_with_a_column_for_each_rank(port, folder):
    status, headers, text = asked(port, "/api/runs/a/metrics.csv")
    lines = text.splitlines()
    assert status == 200 and headers["content-disposition"].endswith("a-metrics.csv")
    assert lines[0] == "step,loss,step_ms,tok_per_sec,rank_ms_0,rank_ms_1,time"
    assert len(lines) == 101 and lines[100].startswith("100,3.0,600.0,20000.0,590.0,610.0,2026-")
    assert asked(port, "/api/runs/nothing/metrics.csv")[0] == 404


def test_answers_are_compressed_and_a_stream_keeps_no_message_back(port):
    status, headers, _ = asked(port, "/api/runs/a", accept_encoding="gzip")
    assert (status, headers["content-encoding"]) == (200, "gzip")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    connection.request("GET", f"{FOLDER}api/stream?run=a&token={TOKEN}", headers={"accept-encoding": "gzip"})
    answer = connection.getresponse()
    assert answer.getheader("content-encoding") == "gzip"
    unpacker, text, size = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), "", 0
    while '"whole":true' not in text or not text.endswith("\n\n"):
        block = answer.read1(1 << 16)
        assert block
        size, text = size + len(block), text + unpacker.decompress(block).decode()
    assert size < len(text) / 2
    connection.close()


def test_a_stream_of_several_runs_has_what_a_comparison_shows(port, folder):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    connection.request("GET", f"{FOLDER}api/stream?run=a&run=a&token={TOKEN}")
    answer = connection.getresponse()
    while '"whole":true' not in (line := answer.readline().decode()):
        assert line
    message = json.loads(line.removeprefix("data: "))
    assert message["curves"].keys() == {"series"} and "parts" not in message
    assert message["panels"].keys() == {"head", "fields", "figures"}
    connection.close()


def test_the_page_loads_nothing_from_elsewhere(port):
    page = asked(port, "/")[2]
    assert "http://www.w3.org/2000/svg" in page  # the name of the icon's language, not an address
    assert page.count("//") == 1
    assert {asked(port, f"/{name}")[0] for name in page.split('"') if name.startswith("static/")} == {200}


def first_event(port: int, query: str, *, after: int = 0) -> str:
    """The message of a stream that comes after so many others."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    connection.request("GET", f"{FOLDER}api/stream?{query}&token={TOKEN}")
    answer = connection.getresponse()
    messages = [next_line(answer) for _ in range(after + 1)]
    connection.close()
    return messages[-1]


def test_a_new_point_comes_alone_and_is_looked_for_often_enough_to_be_seen_within_three_seconds(folder):
    assert EVERY_S + FRESH_S < 2
    run = write_run(folder, "growing", end=None)
    with serving(Shelf(folder)) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        connection.request("GET", f"{FOLDER}api/stream?run=growing&token={TOKEN}")
        answer = connection.getresponse()
        while "whole" not in (whole := next_message(answer)):
            assert set(whole) == {"run", "now", "panels"}
        assert (whole["whole"], len(whole["curves"]["series"]["loss"]["steps"])) == (True, 100)
        append_step(run, 101, loss=2.5)
        while "series" not in (message := next_message(answer)).get("curves", {}):
            pass
        loss = message["curves"]["series"]["loss"]
        assert (loss["from"], loss["steps"], loss["values"], message["whole"]) == (100, [101], [2.5], False)


def test_the_last_figures_of_a_run_come_before_its_curves_are_read(folder):
    write_run(folder, "long")
    shelf = Shelf(folder)
    with serving(shelf) as port:
        first = json.loads(first_event(port, "run=long"))
        assert set(first["panels"]) == {"head", "tiles"}
        assert (first["panels"]["head"]["badge"]["state"], first["panels"]["head"]["summary"]) == ("finished", None)
        assert {tile["name"]: tile["value"] for tile in first["panels"]["tiles"]} == {
            "loss": "3.0000",
            "tok_per_sec": "20,000",
        }
        assert shelf.snapshot("long").step == 100 and shelf.glimpse("long") is None


def next_message(answer: http.client.HTTPResponse) -> dict:
    return json.loads(next_line(answer))


def next_line(answer: http.client.HTTPResponse) -> str:
    while not (line := answer.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    return line[6:].decode()


def test_the_list_has_every_run_and_a_log_file_that_was_named(folder, tmp_path):
    log = tmp_path / "train.log"
    log.write_text("step 10/20 | loss 3.0\nstep 11/20 | loss 2.9\n")
    shelf = Shelf(folder, log)
    assert next(iter(shelf.runs()))["name"] == "train.log"
    assert {"a", "train.log"} <= set(shelf.paths())
    assert shelf.log_part("train.log", attempt=1, rank=None)["text"].startswith("step 10/20")


def test_a_taken_port_is_named_and_the_next_free_one_is_taken_where_none_is_asked_for():
    with listen(None) as first, listen(None) as second:
        taken = first.getsockname()[1]
        assert second.getsockname()[1] > taken
        with pytest.raises(PacelineError, match=f"cannot listen on port {taken}"):
            listen(taken)
    with pytest.raises(UsageError):
        listen(70_000)


@pytest.mark.parametrize(
    ("host", "name"),
    [("localhost", "localhost"), ("a:1:2", "a:1"), ("[::1]", "[::1]"), ("[::1]:80", "[::1]"), ("", "")],
)
def test_the_name_in_a_host_header(host, name):
    assert name_in(host) == name


def test_no_other_port_of_this_host_gets_the_cookie_and_without_its_folder_nothing_answers(port):
    """A browser sends a cookie to the addresses below its path alone, and the path cannot be guessed or derived from the page."""
    assert len(FOLDER) == 26 and TOKEN not in FOLDER and folder_of("another") != FOLDER
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    for path, status in ((f"/?token={TOKEN}", 404), (f"/api/runs?token={TOKEN}", 404), ("/", 403), (FOLDER, 403)):
        connection.request("GET", path)
        answer = connection.getresponse()
        assert (answer.status, SECRET in answer.read().decode()) == (status, False)


def test_connections_that_ask_for_nothing_keep_nobody_out(folder, monkeypatch):
    """At most MAX_IDLE stay open, each for HEADERS_S; a slow request counts too, and a stream is not closed."""
    monkeypatch.setattr(connections, "HEADERS_S", 2.0)
    with serving(Shelf(folder)) as port, ExitStack() as stack:
        stream = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        stream.request("GET", f"{FOLDER}api/stream?run=a&token={TOKEN}")
        answer = stream.getresponse()
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(MAX_IDLE + 20)]
        silent[-1].sendall(b"GET / HTTP/1.1\r\nHost: local")
        assert silent[0].recv(1) == b""  # the oldest is closed at once
        assert asked(port, "/api/runs")[0] == 200
        assert {connection.recv(1) for connection in silent} == {b""}  # the others in time
        while "whole" not in next_message(answer):
            pass
        append_step(RunDir(folder / "a"), 200)
        assert next_message(answer)
        stream.close()


def test_the_files_for_the_browser_of_killed_servers_are_removed_and_no_others(tmp_path):
    dead, alive = tmp_path / "paceline-4194305-x.html", tmp_path / f"paceline-{os.getpid()}-x.html"
    report = tmp_path / "paceline-4194305-report.html"
    for path in (dead, alive):
        path.write_text(f'{connections.OPENING}http://127.0.0.1/">')
    report.write_text("<!doctype html>")
    connections.remove_dead_pages(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive, report])


@pytest.mark.dist
def test_sigterm_ends_the_view_and_removes_the_file_for_the_browser(folder, tmp_path):
    command = [
        sys.executable,
        "-m",
        "paceline.cli",
        "watch",
        "--web",
        "--open",
        "--port",
        "0",
        "--runs-dir",
        str(folder),
    ]
    env = {**os.environ, "HOME": str(tmp_path), "BROWSER": "true", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + DEADLINE_S
        while not list(tmp_path.glob("paceline-*.html")) and time.monotonic() < deadline:
            time.sleep(0.05)
        port = int([process.stdout.readline() for _ in range(3)][2].split(":")[2].split("/")[0])
        asked(port, "/")  # it is up
        process.terminate()
        assert (process.wait(DEADLINE_S), process.stderr.read()) == (128 + signal.SIGTERM, "")
    assert list(tmp_path.glob("paceline-*")) == []


@pytest.mark.dist
@pytest.mark.parametrize("query", ["run=a&", pytest.param("", marks=pytest.mark.soak)])
def test_ctrl_c_ends_the_view_without_a_word_and_leaves_the_run_as_it_was(query, folder):
    before = {path: path.stat().st_mtime_ns for path in (folder / "a").rglob("*")}
    command = [sys.executable, "-m", "paceline.cli", "watch", "a", "--web", "--port", "0", "--runs-dir", str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        address = lines[2].strip()
        assert address.startswith("http://127.0.0.1:") and address.endswith("#/run/a")
        port, folder_name = address.split(":")[2].split("/")[:2]
        stream = http.client.HTTPConnection("127.0.0.1", int(port), timeout=DEADLINE_S)
        stream.request("GET", f"/{folder_name}/api/stream?{query}{address.partition('?')[2].partition('#')[0]}")
        assert stream.getresponse().readline().startswith(b"data: ")
        process.send_signal(signal.SIGINT)
        assert (process.wait(120), process.stderr.read()) == (0, "")
    assert {path: path.stat().st_mtime_ns for path in (folder / "a").rglob("*")} == before
