"""
The way to the other hosts of a run: what starts a module of this package there, whose stdin and stdout are the link.

It is ssh for hosts that are listed, or srun where they are nodes of the Slurm job that this process runs in: then Slurm starts the
process, in the job's cgroup there and with its GPUs, and ends it with the job. Or they are nodes on which somebody else has started
the same command: each of those finds its place in the environment (launch/places.py), and they join node 0 (launch/meeting.py,
launch/node.py).
"""

import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import INTERRUPTED, PacelineError, UsageError, expand_home
from paceline.launch.hosts import HostEntry, parse_ports
from paceline.launch.meeting import Meeting
from paceline.launch.node import TOKEN, Node, read_token
from paceline.launch.places import Place, find_place
from paceline.launch.preemption import watch_preemption
from paceline.launch.ssh import NO_PYTHON, FarModule, ModuleProcess, SshModule, far_command
from paceline.options import HostOptions, LaunchOptions, ScriptOptions
from paceline.terminal import stop_signals

# --overlap: the step shares what the job has on the node with all others. The two `none` hold for sites whose defaults are an MPI
# that is not there, or one core for the one task that then starts the ranks.
SRUN = ("srun", "--quiet", "--overlap", "--mpi=none", "--cpu-bind=none", "--nodes=1", "--ntasks=1", "--unbuffered",
        "--kill-on-bad-exit=1", "--job-name=paceline")  # fmt: skip
# what a job asked for in all or for each task would be asked of the one node of the step
OF_THE_JOB = (
    "SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_NODE", "SLURM_TRES_PER_TASK", "SLURM_EXACT", "SLURM_IMMEDIATE",
)  # fmt: skip
SRUN_ERRORS = (
    (r"not in this job's allocation|node configuration is not available|Invalid node name",
     "it is not a node of this job", "leave --hosts out: all nodes of the job are taken"),
    (r"not available \(down|Node failure|nodes? (?:is|are) (?:DOWN|NOT_RESPONDING)|Unable to contact",
     "Slurm cannot reach it", "scontrol show node {to}"),
    (r"Invalid job id|Expired or invalid job|already completing", "the job has ended", "submit it again"),
)  # fmt: skip


class SrunModule(FarModule):
    """A module of this package on another node of this job, as a step of its own."""

    def __init__(self, node: str, module: str, *, python: str | None):
        step = [*SRUN, f"--nodelist={node}", "sh", "-c"]
        env = {name: value for name, value in os.environ.items() if name not in OF_THE_JOB}
        try:
            super().__init__(lambda names: [*step, far_command(names)], node, module, python=python, env=env)
        except FileNotFoundError as error:
            raise PacelineError("srun is not installed here", fix="load Slurm's module, or --hosts for ssh") from error

    def failure(self) -> PacelineError:
        self.close()
        if self.process.returncode == NO_PYTHON:
            return self.no_interpreter()
        stderr = self.all_errors()
        for pattern, what, fix in SRUN_ERRORS:
            if re.search(pattern, stderr):
                return PacelineError(what, fix=fix.format(to=self.destination))
        last = self.last_error() or f"srun ended with exit code {self.process.returncode}"
        return PacelineError(last, fix=f"srun --overlap --nodelist={self.destination} true")


def open_module(entry: HostEntry, module: str, *, python: str | None) -> ModuleProcess:
    """Starts a module of this package on another host, by the way that the entry names; raises PacelineError where it cannot.

    python: the interpreter there; None: as here, else python3. May take seconds.
    """
    if entry.way == "joined":
        assert entry.node
        return entry.node.open(module)
    if entry.way == "srun":
        return SrunModule(entry.host, module, python=python)
    return SshModule(entry.destination, module, python=python)


def run_at_place(options: LaunchOptions, lead: Callable[[Sequence[HostEntry]], int], *, ports: str | None) -> int:
    """Runs a command where the environment places it among several nodes, and returns its exit code.

    Node 0 calls `lead` with all nodes once they have joined; any other one serves node 0 until it ends. Without a place, or with
    --no-join, `lead` gets no nodes. ports: --ports. Call it from the main thread, as it handles signals.
    """
    variable = os.environ.pop(TOKEN, None)  # nothing that starts from here on gets it
    port_range = parse_ports(ports)
    place = find_place(os.environ, port=port_range and port_range[0]) if options.join else None
    if place is None:
        return lead(())
    if options.detach:
        fix = "leave --detach out; --no-join ignores the variables"
        raise UsageError(f"this is {place.text}, and --detach ends the process that its launcher watches", fix=fix)
    config = os.environ.get("XDG_CONFIG_HOME")
    token = read_token(variable, (Path(config) if config else expand_home("~/.config")) / "paceline")

    def show(text: str) -> None:
        print(text, file=sys.stderr if isinstance(options, ScriptOptions) else sys.stdout, flush=True)

    if place.node_rank > 0:
        # as SIGTERM of a scheduler: node 0 saves and ends the run
        with watch_preemption(options, lambda *_: os.kill(os.getpid(), signal.SIGTERM), show):
            return Node(place, token, show).run(join_timeout_s=options.join_timeout_s)
    return lead_nodes(place, token, show, options, lead)


def lead_nodes(
    place: Place,
    token: bytes,
    show: Callable[[str], None],
    options: HostOptions,
    lead: Callable[[Sequence[HostEntry]], int],
) -> int:
    """Runs a command on node 0: waits for the others, and tells them at the end how it ended."""
    exit_code, why = 1, "node 0 ended with an error that is shown there"
    signals = stop_signals()
    for signum in signals:  # before and between attempts, as for Ctrl-C: the others are told
        signal.signal(signum, signal.default_int_handler)
    meeting = Meeting(place, token, show)
    try:
        show(f"joined  as {place.text}; the others come to {place.addresses[0]}, port {place.port}")
        links = meeting.gather(timeout_s=options.join_timeout_s, min_nodes=options.min_hosts)
        others = [HostEntry(link.name, nproc=place.nproc, way="joined", node=link) for link in links]
        exit_code = lead([HostEntry(socket.gethostname(), nproc=place.nproc), *others])
        why = "node 0 has ended"
    except PacelineError as error:
        exit_code, why = error.exit_code, f"node 0 ended with an error: {error.message}"
        raise
    except KeyboardInterrupt:
        exit_code, why = INTERRUPTED, "node 0 was interrupted"
        raise
    finally:
        for signum in signals:
            signal.signal(signum, signal.SIG_IGN)
        meeting.close(exit_code, why)
    return exit_code
