"""Nodes that somebody else has started: real commands on hosts in network namespaces (tests/namespaces.py), without ssh to them."""

import os
import re
import shutil
import signal
import sys
import time
from textwrap import dedent

import namespaces
import pytest
from hosts_run import all_processes, cmdline, last_files, set_cable
from namespaces import namespaced_hosts

from paceline.launch.places import CONTRACTS
from paceline.rundir import RunDir, read_json_lines

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(2400),  # a busy machine takes minutes for what takes seconds alone
    pytest.mark.skipif(bool(namespaces.WHY_NOT), reason=namespaces.WHY_NOT),
]
TOKEN = "f3b1c6d09a7e4452"
DEADLINE_S = 300.0  # guards against hanging alone
SIZES = [
    "--depth=2", "--n-embd=64", "--head-dim=32", "--sequence-len=64", "--vocab-size=512",
    "--device-batch-size=4", "--eval-every=0", "--eval-tokens=1024", "--data=text.txt", "--health-every=0",
]  # fmt: skip
LISTS = "10.77.0.1\n10.77.0.2"
CONTRACT_ENV = {
    "Slurm's variables": {
        "SLURM_PROCID": "{rank}", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "h[1-2]", "SLURM_JOB_ID": "17",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2", "SLURM_LAUNCH_NODE_IPADDR": "10.77.0.9",
    },
    "PET_*, torchrun's variables": {
        "PET_NNODES": "2", "PET_NODE_RANK": "{rank}", "PET_MASTER_ADDR": "h1", "PET_MASTER_PORT": "29500",
        "PET_NPROC_PER_NODE": "3",
    },
    "SkyPilot's variables": {
        "SKYPILOT_NODE_RANK": "{rank}", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": LISTS,
        "SKYPILOT_NUM_GPUS_PER_NODE": "3",
    },
    "dstack's variables": {
        "DSTACK_NODE_RANK": "{rank}", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.77.0.1",
        "DSTACK_NODES_IPS": LISTS, "DSTACK_GPUS_PER_NODE": "3",
    },
    "NODE_RANK and NNODES": {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29501", "NODE_RANK": "{rank}", "NNODES": "2"},
}  # fmt: skip
SCRIPT = ["run", "--nproc=1", "--no-check", "--device=cpu", "--health-every=0", "--", "wait.py"]
PLAIN = CONTRACT_ENV["NODE_RANK and NNODES"]
WAIT = """
    import os, signal, time
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    print("token", os.environ.get("PACELINE_TOKEN"), "rank", os.environ["RANK"], flush=True)
    while not stopped:
        time.sleep(0.05)
    open(os.environ["PACELINE_RUN"] + "/saved." + os.environ["RANK"], "w").close()
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("join")
    with namespaced_hosts(2, folder) as made:
        lines = (f"the {number} quick brown foxes jump over {number * number} lazy dogs\n" for number in range(3000))
        (folder / "text.txt").write_text("".join(lines))
        (folder / "wait.py").write_text(dedent(WAIT))
        yield made


class Job:
    """The same command on every node, each with the variables of its place."""

    def __init__(self, hosts, name):
        self.hosts, self.name = hosts, name
        self.processes, self.logs = {}, {}
        runs = hosts.private / "runs"
        self.flags = ["--runs-dir", str(runs), "--name", name]
        self.run = RunDir(hosts.on("h1", runs) / name)

    def start(self, rank, *words, env=PLAIN, token=TOKEN, flags=None, host=None):
        """Starts the command on a node; its output goes to a file."""
        variables = {name: text.format(rank=rank) for name, text in env.items()}
        variables |= {"PACELINE_TOKEN": token} if token else {}
        words = [words[0], *(self.flags if flags is None else flags), *words[1:]]
        command = ["env", *(f"{name}={text}" for name, text in variables.items())]
        self.launch(rank, [*command, sys.executable, "-m", "paceline.cli", *words], host=host)

    def launch(self, rank, command, *, host=None):
        self.logs.setdefault(rank, self.hosts.folder / f"{self.name}-{rank}.log")
        with self.logs[rank].open("w") as log:
            self.processes[rank] = self.hosts.start(host or f"h{rank + 1}", *command, stdout=log, stderr=log)

    def start_all(self, *words, **options):
        for rank in (1, 0):
            self.start(rank, *words, **options)

    def output(self, rank):
        return self.logs[rank].read_text()

    def refused(self, **options):
        """Returns the output of one more node 1, which must end with an error."""
        first, log = self.processes.pop(1), self.logs[1]
        self.logs[1] = log.with_suffix(".refused")
        self.start(1, *SCRIPT, **options)
        assert self.processes[1].wait(DEADLINE_S) == 1
        output, self.processes[1], self.logs[1] = self.output(1), first, log
        return output

    def end(self):
        """Waits for all nodes and returns their exit codes."""
        return [self.processes[rank].wait(DEADLINE_S) for rank in sorted(self.processes)]

    def wait_for(self, condition):
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, [self.output(rank) for rank in self.logs]
            time.sleep(0.05)

    def wait_for_ranks(self):
        self.wait_for(lambda: "token None rank 0" in self.output(0) and "token None rank 1" in self.output(0))

    def events(self, kind):
        return [event for event in read_json_lines(self.run.events) if event["event"] == kind]

    def kill(self):
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def job(hosts, request):
    made = Job(hosts, re.sub(r"\W+", "-", request.node.name)[-40:].strip("-"))
    yield made
    made.kill()


def left(hosts, host):
    """Returns what runs on a host but for its ssh server, once it has had time to end."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        running = [words for process in all_processes(hosts, host) if "-D" not in (words := cmdline(process)) and words]
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.1)


@pytest.mark.soak
@pytest.mark.parametrize("source", CONTRACT_ENV)
def test_nodes_of_every_contract_meet_and_node_0_plans_for_all_of_them(job, source):
    has_nproc = any(contract.source == source and contract.nproc in CONTRACT_ENV[source] for contract in CONTRACTS)
    keys = ["--total-batch-size=512", "--no-check", *([] if has_nproc else ["--nproc=3"])]
    job.start_all("train", *SIZES, *keys, env=CONTRACT_ENV[source])
    assert job.end() == [1, 1]
    assert f"joined  as node 0 of 2 by {source}; the others come to " in job.output(0)
    assert re.search(r"joined  h2 at 10.77.0.2 as node 1\n", job.output(0))
    assert "1,536 tokens that 6 processes take at once" in job.output(0)
    assert f"joined  as node 1 of 2 by {source}; node 0 is at " in job.output(1)
    assert "ended   with exit code 1: node 0 ended with an error: total_batch_size" in job.output(1)


def test_every_contract_has_a_start_for_real():
    assert {*CONTRACT_ENV, "Open MPI's variables"} == {contract.source for contract in CONTRACTS}


@pytest.mark.soak
@pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed (openmpi-bin)")
def test_mpirun_trains_on_two_hosts(job):
    mpirun = ["mpirun", "--allow-run-as-root", "-H", "h1,h2", "--bind-to", "none", "--tag-output"]
    variables = [f"PACELINE_TOKEN={TOKEN}", f"XDG_CACHE_HOME={job.hosts.folder / 'h1' / 'cache'}"]
    names = ("PACELINE_TOKEN", "PATH", *(["PYTHONPATH"] if "PYTHONPATH" in os.environ else []))  # the same code there
    exports = [word for name in names for word in ("-x", name)]
    command = ["env", *variables, *mpirun, *exports, sys.executable, "-m", "paceline.cli"]
    keys = ["--total-batch-size=1536", "--nproc=1", "--num-steps=4", "--log-every=1"]
    job.launch(0, [*command, "train", *job.flags, *SIZES, *keys])
    assert job.end() == [0], job.output(0)
    output = job.output(0)
    assert "joined  as node 1 of 2 by Open MPI's variables; node 0 is at 10.77.0.1, port 29400" in output
    assert "step 00004/00004" in output and "ended   with exit code 0: node 0 has ended" in output
    [attempt] = job.events("attempt")
    assert attempt["hosts"] == {"h1": [0], "h2": [1]}
    assert "joined  h2 at 10.77.0.2 as node 1" in [event["text"] for event in job.events("note")]
    assert TOKEN not in "".join(path.read_text(errors="replace") for path in job.run.path.rglob("*") if path.is_file())
    assert not left(job.hosts, "h2")


@pytest.mark.soak
def test_others_are_refused_while_a_run_goes_on_and_sigterm_on_a_node_saves_and_ends_it_on_all(job):
    job.start_all(*SCRIPT)
    job.wait_for_ranks()
    stranger = "import socket; socket.create_connection(('10.77.0.1', 29501)).sendall(b'hello\\n')"
    assert job.hosts.run("h2", sys.executable, "-c", stranger).returncode == 0
    assert "error: node 0 refused node 1 of 2 by NODE_RANK and NNODES: node 1 is there already: h2" in job.refused()
    assert "its token is another one than this node's\n  fix: the same PACELINE_TOKEN" in job.refused(token=TOKEN[::-1])
    assert "error: there is no token: by it the nodes of a run know each other" in job.refused(token=None)
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.end() == [130, 130], job.output(1)
    assert "stopping: SIGTERM goes to node 0, which saves and ends the run" in job.output(1)
    [stop] = job.events("stopping")
    assert stop["signal"] == "SIGTERM"
    saved = {path.name for path in job.hosts.folder.glob(f"h*/**/{job.name}/saved.*")}
    assert saved == {"saved.0", "saved.1"}
    notes = [event["text"] for event in job.events("note")]
    assert "refused a connection from 10.77.0.2: it does not speak paceline's protocol" in notes
    assert "refused node 1, h2 at 10.77.0.2: node 1 is there already: h2 at 10.77.0.2" in notes
    assert "refused a connection from 10.77.0.2: its token is another one" in notes
    assert not left(job.hosts, "h1") and not left(job.hosts, "h2")


@pytest.mark.soak
def test_a_node_that_comes_late_is_refused_and_the_run_goes_on_without_it(job):
    env = {**PLAIN, "NNODES": "3"}
    words = [SCRIPT[0], "--min-hosts=2", "--join-timeout=30", *SCRIPT[1:]]
    job.start_all(*words, env=env)
    job.wait_for_ranks()
    assert "node 2 of 3 did not join in 30 s: the run begins without" in job.output(0)
    job.start(2, *words, env=env, host="h2")
    assert job.processes.pop(2).wait(DEADLINE_S) == 1
    assert "error: node 0 refused node 2 of 3 by NODE_RANK and NNODES: it is late: the run began" in job.output(2)
    assert "  fix: --join-timeout waits longer for it\n" in job.output(2)
    assert any(event["text"].startswith("refused node 2, h2 at 10.77.0.2: it is late") for event in job.events("note"))
    job.processes[0].send_signal(signal.SIGTERM)
    assert job.end() == [130, 130]


@pytest.mark.soak
def test_the_loss_of_node_0_ends_what_the_others_have_started(job):
    job.start_all(*SCRIPT)
    job.wait_for_ranks()
    job.processes[0].kill()
    assert job.processes[1].wait(DEADLINE_S) == 3
    assert "ended   with exit code 3: the connection to node 0 was lost; see the output there" in job.output(1)
    assert not left(job.hosts, "h2") and not left(job.hosts, "h1")


@pytest.mark.soak
def test_the_loss_of_a_node_is_named_and_the_others_end(job):
    job.start_all(*SCRIPT[:1], "--no-recover", *SCRIPT[1:])
    job.wait_for_ranks()
    job.processes[1].kill()
    assert job.processes[0].wait(DEADLINE_S) == 3
    lines = (
        "error: the connection to it ended: its paceline did not report why\n  fix: see the output of paceline on h2"
    )
    assert f"{lines}, and who ended it" in job.output(0)
    assert job.events("rank_failed")[0]["host"] == "h2"
    assert not left(job.hosts, "h2") and not left(job.hosts, "h1")


LONG = ["--total-batch-size=1536", "--nproc=1", "--save-every=20", "--log-every=1", "--no-check"]


@pytest.mark.soak
def test_a_node_that_its_launcher_starts_again_takes_part_again(job):
    keys = [*LONG, "--num-steps=4000"]
    job.start_all("train", *SIZES, *keys)
    job.wait_for(lambda: job.events("checkpoint"))
    job.processes[1].kill()
    job.wait_for(lambda: len(job.events("attempt")) == 2)
    job.start(1, "train", *SIZES, *keys)
    job.wait_for(lambda: len(job.events("attempt")) == 3)
    job.processes[0].send_signal(signal.SIGINT)
    assert job.end() == [130, 130]
    assert [list(event["hosts"]) for event in job.events("attempt")] == [["h1", "h2"], ["h1"], ["h1", "h2"]]


@pytest.mark.soak
def test_a_node_whose_network_was_away_takes_part_again(job):
    keys = [*LONG, "--num-steps=9000"]
    job.start_all("train", *SIZES, *keys)
    job.wait_for(lambda: job.events("checkpoint"))
    set_cable(job.hosts, "h2", "down")
    job.wait_for(lambda: len(job.events("attempt")) == 2)
    time.sleep(20.0)  # longer than both sides believe in a silent connection
    set_cable(job.hosts, "h2", "up")
    job.wait_for(lambda: len(job.events("attempt")) == 3)
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.end() == [130, 130]
    assert [list(event["hosts"]) for event in job.events("attempt")] == [["h1", "h2"], ["h1"], ["h1", "h2"]]
    assert not left(job.hosts, "h2")


@pytest.mark.soak
def test_joined_nodes_train_to_the_bits_of_one_host_and_a_run_is_resumed_on_them(job):
    keys = ["--total-batch-size=1536", "--num-steps=20", "--no-check", "--precision=fp32"]
    one = job.hosts.folder / "one"
    done = job.hosts.paceline("h1", "train", *SIZES, *keys, "--nproc=2", "--runs-dir", str(one), "--name", "a")
    assert done.returncode == 0, done.stderr
    job.start_all("train", *SIZES, *keys, "--nproc=1")
    assert job.end() == [0, 0]
    assert last_files(job.run) == last_files(RunDir(one / "a"))
    path = str(job.hosts.private / "runs" / job.name)
    job.start_all("resume", path, "--num-steps=30", "--no-check", "--health-every=0", flags=[])
    assert job.end() == [0, 0]
    assert [line["step"] for line in read_json_lines(job.run.metrics)][-1] == 30
