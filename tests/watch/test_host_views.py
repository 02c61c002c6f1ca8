"""What views show of a run on several hosts: ranks and their hosts, samples, logs, a host that was lost; and a real run on two."""

import json
import shutil
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from namespaces import WHY_NOT, namespaced_hosts
from run_folders import asked, serving

from paceline.errors import PacelineError
from paceline.rundir import append_sample, utc_now
from paceline.watch.panels import logs_panel, run_panels
from paceline.watch.report import html_report, markdown_report
from paceline.watch.status import Shelf, format_run, open_reader
from paceline.watch.summary import log_title, ranks_and_hosts, warnings

BOTH = {"ada": [0, 1], "bob": [2, 3]}
MODEL = "--depth 2 --n-embd 64 --head-dim 32 --sequence-len 64 --vocab-size 512 --total-batch-size 1024 --device-batch-size 8"
LENGTH = "--precision fp32 --num-steps 4 --eval-every 4 --eval-tokens 512 --health-every 0.5"


def begin(folder, hosts=BOTH, *, attempt=1, clock_s=None):
    ranks = [rank for ranks in hosts.values() for rank in ranks]
    if attempt == 1:
        folder.event("launch", prepared_s=1.0)
    clock_s = clock_s or dict.fromkeys(BOTH, 0.0)
    folder.event("attempt", attempt=attempt, world_size=len(ranks), hosts=hosts, head="ada", clock_s=clock_s)
    folder.run.logs(attempt).mkdir(parents=True)


def sample(folder, host, **fields):
    folder.run.health_dir.mkdir(exist_ok=True)
    append_sample(
        folder.run.health(host), {"time": utc_now(), "cpu": 0.5, "net_in_bps": 1e6, "net_out_bps": 2e6, **fields}
    )


def lose(folder, host, *, attempt=1):
    folder.event("rank_failed", attempt=attempt, rank=None, host=host, message=f"nothing was heard of {host} for 6 s")
    folder.event("attempt_ended", attempt=attempt, state="failed")


def test_each_rank_has_its_host_and_each_host_its_samples(folder):
    begin(folder)
    for host in ("ada", "bob", "elsewhere"):
        sample(folder, host)
    snapshot = folder.look()
    assert [rank.host for rank in snapshot.ranks] == ["ada", "ada", "bob", "bob"]
    assert [(host.name, host.ranks, host.net_out_bps, host.lost) for host in snapshot.hosts] == [
        ("ada", [0, 1], 2e6, False),
        ("bob", [2, 3], 2e6, False),
    ]
    assert ranks_and_hosts(snapshot) == "4 ranks on 2 hosts"
    assert "hosts   ada: ranks 0 and 1; bob: ranks 2 and 3" in format_run(snapshot)
    assert snapshot.events[-1].text == "attempt 1 on 4 ranks (ada: 0 and 1; bob: 2 and 3)"


def test_a_lost_host_is_shown_as_lost_until_it_is_back(folder):
    begin(folder)
    for host in BOTH:
        sample(folder, host)
    lose(folder, "bob")
    assert [(host.name, host.lost) for host in folder.look().hosts] == [("ada", False), ("bob", True)]
    begin(folder, {"ada": [0, 1]}, attempt=2)
    snapshot = folder.look()
    assert [(host.name, host.ranks, host.lost) for host in snapshot.hosts] == [
        ("ada", [0, 1], False),
        ("bob", [], True),
    ]
    assert [rank.host for rank in snapshot.ranks] == ["ada", "ada"]
    assert "lost bob: continuing on ada" in list(warnings(snapshot, now=time.time()))
    assert "lost host bob: nothing was heard of bob for 6 s" in [event.text for event in snapshot.events]
    assert [panel["place"] for panel in run_panels(snapshot, now=time.time())["hosts"]] == ["ranks 0 and 1", "lost"]
    folder.event("attempt_ended", attempt=2, state="interrupted")
    begin(folder, attempt=3)
    assert [(host.name, host.lost) for host in folder.look().hosts] == [("ada", False), ("bob", False)]


def test_the_silence_of_a_rank_does_not_depend_on_its_hosts_clock(folder, monkeypatch):
    monkeypatch.setattr("paceline.watch.run_reader.is_locked", lambda run: True)
    begin(folder, clock_s={"ada": 0.0, "bob": 600.0})
    folder.beat(1, 5, ago=100.0)
    folder.beat(3, 5, ago=100.0 - 600.0)  # as a clock that is ten minutes ahead writes it
    snapshot = folder.look()
    assert 99 < snapshot.ranks[1].silent_s < 220 and 99 < snapshot.ranks[3].silent_s < 220
    assert snapshot.updated <= time.time()
    assert any(
        text.startswith("ranks 1 and 3 on ada and bob are silent") for text in warnings(snapshot, now=time.time())
    )


def test_silent_and_slow_ranks_are_named_with_their_hosts(folder, monkeypatch):
    monkeypatch.setattr("paceline.watch.run_reader.is_locked", lambda run: True)
    begin(folder)
    for rank in range(4):
        folder.beat(rank, 5, ago=300.0 * (rank > 1))
    for step in range(40):
        folder.log(step, time=utc_now(), rank_ms=[100.0, 100.0, 100.0, 180.0])
    texts = list(warnings(folder.look(), now=time.time()))
    assert "ranks 2 and 3 on bob are silent for 5m00s in forward" in texts
    assert "rank 3 on bob is slower than the others" in texts


def test_the_logs_of_every_host_can_be_opened(folder):
    begin(folder)
    for name in ("0.log", "2.log", "launch.log", "launch-bob.log", "kernel-bob.log"):
        (folder.run.logs(1) / name).write_text(f"this is {name}\n")
    snapshot = folder.look()
    titles = ["rank 0 on ada", "rank 2 on bob", "launch", "kernel log of bob", "launch on bob"]
    assert [log_title(log) for log in snapshot.logs] == titles
    rows = {row["label"]: row for row in logs_panel(snapshot)["rows"]}
    assert len({row["key"] for row in rows.values()}) == 5
    shelf = Shelf(folder.run.path.parent)
    row = rows["launch on bob"]
    part = shelf.log_part("r", attempt=row["attempt"], rank=row["rank"], log_name=row["name"])
    assert part["text"] == "this is launch-bob.log\n"
    with pytest.raises(KeyError):
        shelf.log_part("r", attempt=1, rank=None, log_name="../../config")
    with serving(shelf) as port:
        status, _, answer = asked(port, "/api/runs/r/log?attempt=1&name=kernel-bob")
        assert status == 200 and json.loads(answer)["text"] == "this is kernel-bob.log\n"
        assert asked(port, "/api/runs/r/log?attempt=1&name=../config")[0] == 404


@pytest.mark.parametrize(
    "damage", [{"hosts": 7}, {"hosts": ["ada"]}, {"hosts": {"ada": 3}}, {"clock_s": 4}, {"clock_s": {"ada": "late"}}]
)
def test_damaged_places_are_refused(folder, damage):
    folder.event("launch", prepared_s=1.0)
    folder.event("attempt", **({"attempt": 1, "world_size": 2, "hosts": BOTH, "clock_s": {}} | damage))
    folder.log(3)
    folder.beat(0, 3)
    with pytest.raises(PacelineError, match="a value of another type"):
        folder.look()


@pytest.mark.soak
@pytest.mark.dist
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_real_run_on_two_hosts_without_a_shared_disk_is_seen_whole(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for module in ("argparse", "ast", "json/decoder"):
        shutil.copy(Path(sysconfig.get_path("stdlib"), f"{module}.py"), text)
    with namespaced_hosts(2, tmp_path, names=["ada", "bob"]) as hosts:
        runs = hosts.on("ada", hosts.private) / "runs"
        place = ["--runs-dir", str(hosts.private / "runs"), "--name", "pair"]
        train = ["train", "--hosts", "ada,bob", "--nproc", "1", *place, "--no-check", "--data", str(text)]
        command = [sys.executable, "-m", "paceline.cli", *train, *MODEL.split(), *LENGTH.split()]
        done = hosts.run("ada", *command, timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    snapshot = open_reader(runs / "pair").update()
    assert (snapshot.state, snapshot.step, len(snapshot.attempts)) == ("finished", 4, 1)
    assert [(rank.host, rank.step, rank.phase) for rank in snapshot.ranks] == [("ada", 4, "done"), ("bob", 4, "done")]
    assert [(host.name, host.ranks, host.lost) for host in snapshot.hosts] == [("ada", [0], False), ("bob", [1], False)]
    assert all(host.time and host.cores for host in snapshot.hosts)
    assert {f"{host} net_in_bps" for host in ("ada", "bob")} <= snapshot.host_series.keys()
    assert {"rank 0 on ada", "rank 1 on bob"} <= {log_title(log) for log in snapshot.logs}
    assert "2 ranks on 2 hosts" in markdown_report(runs / "pair", now=time.time())
    assert "2 ranks on 2 hosts" in html_report(runs / "pair", now=time.time())
    [attempt] = [e for e in map(json.loads, (runs / "pair" / "events.jsonl").open()) if e["event"] == "attempt"]
    assert attempt["head"] == "ada" and abs(attempt["clock_s"]["bob"]) < 5
