import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import namespaces
import pytest
from namespaces import add_cable, namespaced_hosts

from paceline.check.ready import machine_of
from paceline.config import Config
from paceline.errors import PacelineError, UsageError
from paceline.launch import host_facts
from paceline.launch.hosts import HostEntry, is_this_host, parse_hosts, ranks_of
from paceline.launch.ssh import code_archive
from paceline.options import TrainOptions
from paceline.plan.machine import Machine
from paceline.plan.planner import make_plan
from paceline.rundir import RunDir

needs_namespaces = pytest.mark.skipif(bool(namespaces.WHY_NOT), reason=namespaces.WHY_NOT)


@pytest.mark.parametrize("text, expected", [
    ("ada,bob", ["ada", "bob"]),
    (" ada , bob ,", ["ada", "bob"]),
    ("me@ada,root@bob.lan", ["me@ada", "root@bob.lan"]),
    ("node[1-3]", ["node1", "node2", "node3"]),
    ("node[08-10,2].lan,ada", ["node08", "node09", "node10", "node2", "ada"]),
    ("[fe80::1%eth0],[::1]:2", ["fe80::1%eth0", "::1"]),
    ("10.0.0.1,10.0.0.2", ["10.0.0.1", "10.0.0.2"]),
    ("müller", ["müller"]),
    ("ada.example.org,bob.list", ["ada.example.org", "bob.list"]),  # names in a list are no files
])  # fmt: skip
def test_a_list_names_hosts_users_ranges_and_addresses(text, expected):
    names = [entry.destination for entry in parse_hosts(text)]
    assert names == [name + (".lan" if name.startswith("node") and ".lan" in text else "") for name in expected]


def test_the_ranks_of_a_host_stand_behind_a_colon():
    assert parse_hosts("me@ada:2,[::1]:4") == [HostEntry("ada", "me", 2), HostEntry("::1", None, 4)]
    assert ranks_of(parse_hosts("ada:2,bob:2")) == 2
    assert ranks_of(parse_hosts("ada,bob")) is None


def test_a_file_lists_hosts_as_mpi_and_deepspeed_do(tmp_path):
    path = tmp_path / "主机"
    path.write_text("# two desktops\nada slots=2 max_slots=4\n\nme@bob:2  # below the desk\nnode[1-2]\n")
    assert parse_hosts(str(path)) == [
        HostEntry("ada", None, 2), HostEntry("bob", "me", 2), HostEntry("node1"), HostEntry("node2")
    ]  # fmt: skip


def test_a_file_of_hosts_from_windows_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_bytes(b"\xef\xbb\xbfada\r\nbob\r\n")
    assert [entry.host for entry in parse_hosts(str(path))] == ["ada", "bob"]


def test_a_pipe_in_place_of_a_file_of_hosts_is_refused_with_or_without_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("hosts")
    for text in ("hosts", "./hosts"):
        with pytest.raises(UsageError, match=f"error: {text} is a pipe") as error:
            parse_hosts(text)
        assert error.value.fix == "write the hosts into a file, and --hosts FILE"


def test_this_host_is_known_by_its_names_and_addresses():
    assert all(is_this_host(HostEntry(name)) for name in ("localhost", "127.0.0.1", "::1", socket.gethostname()))
    assert not is_this_host(HostEntry("localhost", user="somebody-else"))
    assert not is_this_host(HostEntry("198.51.100.7"))


def test_a_driver_that_is_not_in_the_list_is_asked_for_its_folders_alone_and_its_disk_may_refuse_a_run(
    tmp_path, monkeypatch, capsys
):
    host = json.loads((Path(__file__).parents[1] / "check/hosts/cpu_box.json").read_text())
    (tmp_path / "file").write_text("")
    config, run = Config(depth=2, hosts="ada.invalid"), RunDir(tmp_path / "file" / "run")

    def ask(entries, config):
        return lambda gather_here: [{**host, "connection": {"destination": "ada", "here": False}}]

    monkeypatch.setattr(host_facts, "hosts_asker", ask)
    plan = make_plan(config, machine_of(host), vocab_size=512, num_rows=0)
    entries = parse_hosts(config.hosts)
    with host_facts.start_check(config, run, TrainOptions(), command="train", trackers=(), entries=entries) as check:
        [facts], driver = check.facts.result()
        assert (facts["host"]["name"], driver["probes"].keys()) == (host["host"]["name"], {"storage", "text"})
        with pytest.raises(PacelineError, match="this run would fail: folder-unwritable"):
            check.judge(plan)
    assert f"{socket.gethostname()}: the run folder {run.path}" in capsys.readouterr().out


@pytest.mark.parametrize("command, saved", [("train", 0), ("resume", 3)])
def test_a_resume_is_checked_for_the_checkpoints_that_are_still_to_come(tmp_path, command, saved):
    config, run = Config(depth=2), RunDir(tmp_path / "run")
    for step in (2, 4, 6):
        (run.checkpoints / f"step_{step:06d}").mkdir(parents=True)
    machine = Machine(gpus=(), cpu_cores=2, cpu_bf16=False, memory_bytes=1 << 33)
    plan = make_plan(config, machine, vocab_size=512, num_rows=0)
    with host_facts.start_check(config, run, TrainOptions(check=False), command=command, trackers=()) as check:
        assert check.intent(plan).saved_checkpoints == saved


def test_a_host_that_does_not_answer_refuses_a_run_while_its_text_is_prepared(tmp_path, monkeypatch, capsys):
    connection = {"destination": "ada", "here": False, "error": "no such name", "fix": "check the name"}
    monkeypatch.setattr(host_facts, "hosts_asker", lambda *_: lambda gather_here: [{"connection": connection}])
    config, reports, entries = Config(hosts="ada.invalid"), [], parse_hosts("ada.invalid")
    options, run = TrainOptions(), RunDir(tmp_path / "run")
    with host_facts.start_check(config, run, options, command="train", trackers=(), entries=entries) as check:
        report = check.with_refusal(lambda label, done, total: reports.append(label))
        check.facts.result()
        with pytest.raises(PacelineError, match="this run would fail: host-unreachable") as refused:
            report("tokenize", 1, 10)
    assert refused.value.fix == "apply the fixes above, or leave ada out of --hosts"
    assert reports == [] and "ada: no such name" in capsys.readouterr().out


def test_the_code_that_is_sent_is_the_same_bytes_each_time():
    first = code_archive()
    code_archive.cache_clear()
    assert code_archive() == first


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with namespaced_hosts(2, tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@needs_namespaces
def test_hosts_are_checked_together_and_the_code_is_sent_once(hosts):
    answer = hosts.paceline("h1", "check", "--hosts", "h1,h2", "--json")
    facts = json.loads(answer.stdout)["facts"]
    assert [facts[name]["host"]["name"] for name in ("h1", "h2")] == ["h1", "h2"]
    assert facts["h2"]["connection"] == {"destination": "h2", "here": False, "error": None, "fix": None}
    [code] = (hosts.folder / "h2" / "cache" / "paceline" / "code").iterdir()
    assert code.name == code_archive()[0] and (code / "paceline" / "cli.py").is_file()
    assert facts["h2"]["env"]["PYTHONPATH"] == str(code)
    assert not (hosts.folder / "h1" / "cache" / "paceline" / "code").exists()  # h1 is this host: it needs no ssh
    [link] = facts["h1"]["links"]
    assert (link["to"], link["address"], link["error"]) == ("h2", "10.77.0.2", None)
    assert link["rtt_us"] > 0 and min(link["bits_per_s"], link["back_bits_per_s"]) > 1e6 and link["mtu"] == 1500
    assert abs(link["clock_s"]) < 60  # one clock; a busy machine answers late
    assert facts["h2"]["links"] == []
    sent = code.stat()
    assert link_of(hosts)["error"] is None  # again on both
    assert list(code.parent.iterdir()) == [code] and code.stat() == sent


LINK_OF = """
import json, sys
from paceline.launch.host_facts import link_probes, measure_links
from paceline.launch.hosts import parse_hosts
entries, options = parse_hosts("h1,h2"), json.loads(sys.argv[1])
with link_probes(entries, python=None, **options) as probes:
    print(json.dumps(measure_links(entries, probes, interface=options.get("interface"))["h1"][0]))
"""
TABLE = "add table inet f; add chain inet f i { type filter hook input priority 0; };"
REJECT = TABLE + "add rule inet f i iif eth0 tcp dport != 2222 ct state new reject with tcp reset"
DROP_LARGE = TABLE + "add rule inet f i iif eth0 tcp dport != 2222 meta length > 1000 drop"


@needs_namespaces
@pytest.mark.skipif(shutil.which("nft") is None, reason="nft is missing")
@pytest.mark.parametrize("rule, error", [(REJECT, "connect"), (DROP_LARGE, "large")], ids=["firewall", "large packets"])
def test_a_link_is_tried_on_other_ports_than_ssh_and_with_large_messages(hosts, rule, error):
    assert hosts.run("h2", "nft", rule).returncode == 0
    link = link_of(hosts)
    hosts.run("h2", "nft", "flush", "ruleset")
    assert link["error"] == error


def link_of(hosts, **options):
    """The link from h1 to h2. options: of link_probes."""
    answer = hosts.run("h1", sys.executable, "-c", LINK_OF, json.dumps(options))
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


ONLY_RANGE = TABLE + "add rule inet f i iif eth0 tcp dport != { 2222, 29400-29420 } ct state new reject with tcp reset"


@needs_namespaces
@pytest.mark.skipif(shutil.which("nft") is None, reason="nft is missing")
def test_a_firewall_that_opens_the_range_needs_the_kernel_to_choose_ports_in_it(hosts):
    assert hosts.run("h2", "nft", ONLY_RANGE).returncode == 0
    closed = link_of(hosts, ports=[29400, 29420])
    hosts.run("h2", "sysctl", "-w", "net.ipv4.ip_local_port_range=29400 29420")
    opened = link_of(hosts, ports=[29400, 29420])
    hosts.run("h2", "nft", "flush", "ruleset")
    hosts.run("h2", "sysctl", "-w", "net.ipv4.ip_local_port_range=32768 60999")
    assert (closed["error"], closed["store_error"]) == ("connect", None)
    assert (opened["error"], opened["store_error"]) == (None, None)
    assert 29400 <= opened["port"] <= 29420 and 29400 <= opened["store_port"] <= 29420


@pytest.fixture(scope="module")
def cable(hosts):
    add_cable(hosts)
    return hosts


@needs_namespaces
@pytest.mark.parametrize("choice", [pytest.param("eth1", marks=pytest.mark.soak), "10.88.0.0/24"])
def test_the_link_of_a_chosen_interface_is_measured(cable, choice):
    link = link_of(cable, interface=choice)
    assert (link["address"], link["local"], link["error"]) == ("10.88.0.2", "10.88.0.1", None)


@pytest.mark.soak
@needs_namespaces
def test_an_interpreter_without_torch_and_packages_is_refused_with_the_commands_that_install_them(hosts):
    venv = hosts.folder / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    answer = hosts.paceline(
        "h1", "check", "--hosts", "h1,h2", "--device", "cpu", "--nproc", "1", "--python", str(python)
    )
    assert answer.returncode == 1, answer.stderr
    assert f"ssh h2 {python} -m pip install torch -i https://download.pytorch.org/whl/cpu" in answer.stdout
    assert f"ssh h2 {python} -m pip install psutil numpy safetensors tokenizers" in answer.stdout
    assert "h1 to h2: " in answer.stdout  # the link is measured by the standard library alone


@pytest.mark.soak
@needs_namespaces
def test_a_plan_for_hosts_uses_their_facts_and_their_measured_link(hosts):
    words = ["plan", "--device", "cpu", "--nproc", "1", "--json"]
    answer = hosts.paceline("h1", *words, "--hosts", "h1,h2")
    assert answer.returncode == 0, answer.stderr
    plan = json.loads(answer.stdout)
    assert (plan["hosts"], plan["world_size"]) == (2, 2)
    assert plan["cost"]["hosts"]["link"] == "h1 to h2" and plan["cost"]["hosts"]["sending_s"] > 0
    (hosts.folder / "two.toml").write_text('hosts = "h1,h9"\ndevice = "cpu"\n')
    refused = hosts.paceline("h1", "plan", "two.toml")
    assert refused.stderr.splitlines()[0] == "error: h9: no host of this name is known"


@pytest.mark.soak
@needs_namespaces
@pytest.mark.skipif(shutil.which("ping") is None, reason="ping is missing")
def test_a_path_that_loses_large_packets_breaks_ssh_and_the_fix_tries_it(hosts):
    for host, port in (("h1", "v1"), ("h2", "v2")):
        hosts.ip("-n", hosts.prefix + host, "link", "set", "eth0", "mtu", "9000")
        hosts.ip("-n", f"{hosts.prefix}hub", "link", "set", port, "mtu", "9000" if port == "v1" else "1300")
    answer = hosts.paceline("h1", "check", "--hosts", "h2")
    assert "h2: it cannot be reached" in answer.stdout and "ping -M do -s 1472 h2" in answer.stdout
    assert hosts.run("h1", "ping", "-c1", "-W1", "h2").returncode == 0
    assert hosts.run("h1", "ping", "-c1", "-W1", "-M", "do", "-s", "1472", "h2").returncode == 1
