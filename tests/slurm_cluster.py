"""
A real Slurm on one machine: slurmctld on `login`, a slurmd on each of n1, n2, ..., in network namespaces (tests/namespaces.py).

All hosts see the same files but for the `private` folder, as a cluster with a shared file system does. Each node has two GPUs that
Slurm counts and nobody has: CUDA_VISIBLE_DEVICES is set, and the ranks run on the CPU.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import namespaces
import psutil
from hosts_run import all_processes, set_cable
from namespaces import Hosts, namespaced_hosts

from paceline.rundir import RunDir, read_json_lines

SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"
MISSING = [name for name in ("slurmctld", "slurmd", "munged", "sbatch", "srun") if not shutil.which(name, path=SBIN)]
WHY_NOT = namespaces.WHY_NOT or (f"{', '.join(MISSING)} missing (apt install slurm-wlm munge)" if MISSING else "")
LOGIN = "login"
DEADLINE_S = 600.0  # guards against hanging alone

# cred_expire: a requeued job waits as long, 120 s by default, and a busy machine may take seconds to start a step. KillWait: for a
# save there. Without NO_CONF_HASH each node's own socket is reported as an error.
CONF = """
ClusterName=test
SlurmctldHost={login}(10.77.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/{host}/munge.sock,cred_expire=15
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,batch_sched_delay=0,sched_min_interval=100000
MpiDefault=none
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout={slurmd_timeout_s}
KillWait=60
MinJobAge=600
DebugFlags=NO_CONF_HASH
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=120 State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
PartitionName=physics Nodes=ALL MaxTime=INFINITE State=UP AllowAccounts=physics
PartitionName=closed Nodes=ALL MaxTime=INFINITE State=DOWN
"""
NODE = "NodeName={name} NodeAddr=10.77.0.{number} CPUs=2 RealMemory=4000 Gres=gpu:2 State=UNKNOWN\n"


@dataclass(frozen=True)
class SlurmCluster:
    """The hosts, with Slurm's commands on each."""

    hosts: Hosts
    daemons: dict[str, subprocess.Popen[bytes]]

    @property
    def runs(self) -> Path:
        """The folder of the runs, which every host sees."""
        return self.hosts.folder / "runs"

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.hosts.names[1:]

    def settings(self, host: str) -> dict[str, str]:
        """Returns the environment of commands on a host, without what a job of the machine itself would have."""
        outer = {name: value for name, value in self.hosts.env(host).items() if not name.startswith("SLURM_")}
        return {
            **outer,
            "SLURM_CONF": str(self.hosts.folder / host / "slurm.conf"),
            "PATH": f"{outer['PATH']}:/usr/sbin",
        }

    def start(self, host: str, *command: str, **options) -> subprocess.Popen[str]:
        inside = self.hosts.command(host, command, cores="all")
        return subprocess.Popen(inside, text=True, env=self.settings(host), cwd=self.hosts.folder, **options)

    def run(self, *command: str, host: str = LOGIN, timeout_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
        process = self.start(host, *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        stdout, stderr = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    def paceline(
        self, *arguments: str, host: str = LOGIN, timeout_s: float = DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "paceline.cli", *arguments, host=host, timeout_s=timeout_s)

    def slurm(self, *command: str) -> str:
        """Returns what a command of Slurm prints; it must succeed."""
        done = self.run(*command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def state(self, job_id: int) -> str:
        text = self.slurm("scontrol", "show", "job", str(job_id))
        return next(word.removeprefix("JobState=") for word in text.split() if word.startswith("JobState="))

    def wait_for(self, condition: Callable[[], object], *, timeout_s: float = DEADLINE_S, every_s: float = 0.1) -> None:
        """every_s: longer for a condition that asks Slurm, which takes four processes."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(every_s)

    def logs(self) -> str:
        """Returns the ends of all logs, for a test that fails."""
        paths = [*self.runs.glob("*/slurm-*.log"), self.hosts.folder / "slurmctld.log"]
        paths += [self.hosts.folder / node / "slurmd.log" for node in self.nodes]
        return "\n".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in paths if path.exists())

    def start_daemon(self, host: str, *command: str) -> None:
        log = (self.hosts.folder / f"{command[0]}-{host}.out").open("ab")
        inside = self.hosts.command(
            host, command
        )  # a core for each node: as many threads as a rank of two on one host has
        self.daemons[f"{command[0]}-{host}"] = subprocess.Popen(inside, env=self.settings(host), stdout=log, stderr=log)
        log.close()

    def start_munge(self, host: str) -> None:
        home = self.hosts.folder / host
        files = {"socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "seed"}
        words = [f"--{name}={home / file}" for name, file in files.items()]
        self.start_daemon(host, "munged", "-F", "--force", f"--key-file={self.hosts.folder / 'munge.key'}", *words)

    def kill_node(self, node: str) -> None:
        """Takes a node away as a loss of power does: no packet leaves it any more."""
        set_cable(self.hosts, node, "down")
        for process in all_processes(self.hosts, node):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def start_node(self, node: str) -> None:
        """Starts a node again after kill_node."""
        set_cable(self.hosts, node, "up")
        self.start_munge(node)
        self.start_daemon(node, "slurmd", "-D")


def events_of(run: RunDir, kind: str) -> list[dict]:
    return [event for event in read_json_lines(run.events) if event["event"] == kind]


def write_settings(hosts: Hosts, *, slurmd_timeout_s: int) -> None:
    """Writes slurm.conf and what belongs to it, for each host: only the socket of its munged differs."""
    folder = hosts.folder
    (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge.key").chmod(0o400)
    (folder / "state").mkdir()
    nodes = "".join(NODE.format(name=name, number=number) for number, name in enumerate(hosts.names[1:], 2))
    for host in hosts.names:
        (folder / host / "spool").mkdir()
        text = CONF.format(login=LOGIN, folder=folder, host=host, nodes=nodes, slurmd_timeout_s=slurmd_timeout_s)
        (folder / host / "slurm.conf").write_text(text)
        (folder / host / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # else slurmd looks for a mounted one
        for number in range(2):
            (folder / host / f"gpu{number}").touch()  # stands for the device
        (folder / host / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder / host}/gpu[0-1]\n")


@contextmanager
def slurm_cluster(folder: Path, *, nodes: int = 2, slurmd_timeout_s: int = 20) -> Iterator[SlurmCluster]:
    """Starts Slurm, and ends everything that it has started. folder: an empty one, whose path has no space."""
    names = (LOGIN, *(f"n{number}" for number in range(1, nodes + 1)))
    with namespaced_hosts(1 + nodes, folder, names=names) as hosts:
        write_settings(hosts, slurmd_timeout_s=slurmd_timeout_s)
        cluster = SlurmCluster(hosts, {})
        cluster.runs.mkdir()

        try:
            for host in hosts.names:
                cluster.start_munge(host)
            cluster.wait_for(lambda: all((folder / host / "munge.sock").exists() for host in hosts.names))
            cluster.start_daemon(LOGIN, "slurmctld", "-D")
            for node in cluster.nodes:
                cluster.start_daemon(node, "slurmd", "-D")
            ask = ("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T")
            cluster.wait_for(lambda: cluster.run(*ask).stdout.split() == ["idle"] * nodes, every_s=0.5)
            yield cluster
        finally:
            with suppress(Exception):
                cluster.run("scancel", "--user=root", timeout_s=5)
            for daemon in cluster.daemons.values():
                with suppress(ProcessLookupError):
                    daemon.send_signal(signal.SIGKILL)
                daemon.wait()
