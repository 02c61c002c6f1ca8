"""
The place of this process among several nodes, as whoever started it has written it into the environment: one table of contracts.

Pure: variables in, a Place or an error with its fix out. Where the names come from: srun(1); torch/distributed/run.py, which reads
every option from PET_*, as Kubeflow's trainer sets them (pkg/constants); SkyPilot's skylet/constants.py; dstack's reference of
environment variables; mpirun(1) of Open MPI 4 and 5; the plain ones are those that LLaMA-Factory and many scripts use.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import PacelineError

PORT = 29_400
PORTS_BY_JOB = 1000  # several jobs of a scheduler may share node 0
NO_JOIN = "--no-join ignores them"
URI_HOSTS = re.compile(r"tcp6?://([^;]+):\d+")
TASKS = re.compile(r"(\d+)(?:\(x\d+\))?")


@dataclass(frozen=True)
class Contract:
    """The variables by which one launcher says which node this is. Those that it may leave out are None."""

    source: str  # as messages call them
    node_rank: str
    num_nodes: str
    # each has the address of node 0, or a list that begins with it; the first that is set counts
    addresses: tuple[str, ...]
    port: str | None = None
    nproc: str | None = None  # ranks on each node, or its GPUs
    tasks_per_node: str | None = None  # processes that the launcher has started there
    one_task_fix: str = ""
    job_id: str | None = None
    outer: tuple[str, ...] = ()  # sources inside of which it is started: their variables stay set and may differ
    is_rank_common: bool = False  # the node rank is set elsewhere too: without the number of nodes it means nothing


CONTRACTS = (
    Contract(
        "Open MPI's variables", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        # mpirun runs on the first host of its list, where rank 0 is too; Open MPI 5 has none of the two
        ("MASTER_ADDR", "OMPI_MCA_orte_hnp_uri", "PRTE_MCA_prte_hnp_uri"), "MASTER_PORT",
        tasks_per_node="OMPI_COMM_WORLD_LOCAL_SIZE", one_task_fix="mpirun --map-by ppr:1:node --bind-to none",
        outer=("Slurm's variables", "SkyPilot's variables", "dstack's variables", "PET_*, torchrun's variables"),
    ),
    Contract(
        "PET_*, torchrun's variables", "PET_NODE_RANK", "PET_NNODES", ("PET_MASTER_ADDR",), "PET_MASTER_PORT",
        nproc="PET_NPROC_PER_NODE",
    ),
    Contract(
        "SkyPilot's variables", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", ("SKYPILOT_NODE_IPS",),
        nproc="SKYPILOT_NUM_GPUS_PER_NODE", outer=("Slurm's variables",),
    ),
    Contract(
        "dstack's variables", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", ("DSTACK_MASTER_NODE_IP", "DSTACK_NODES_IPS"),
        nproc="DSTACK_GPUS_PER_NODE",
    ),
    Contract(
        "NODE_RANK and NNODES", "NODE_RANK", "NNODES", ("MASTER_ADDR",), "MASTER_PORT", nproc="NPROC_PER_NODE",
    ),
    # of the step that srun started: a batch script has SLURM_PROCID and SLURM_NTASKS too, and is one process
    Contract(
        "Slurm's variables", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("MASTER_ADDR", "SLURM_STEP_NODELIST"), "MASTER_PORT",
        tasks_per_node="SLURM_STEP_TASKS_PER_NODE", one_task_fix="srun --ntasks-per-node=1", job_id="SLURM_JOB_ID",
        is_rank_common=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Which of several nodes this is, and where node 0 is."""

    source: str  # of the contract
    node_rank: int
    num_nodes: int
    addresses: tuple[str, ...]  # of node 0: names or addresses, to be tried in this order
    port: int  # on which node 0 listens
    nproc: int | None = None

    @property
    def text(self) -> str:
        """Returns 'node 1 of 4 by SkyPilot's variables'."""
        return f"node {self.node_rank} of {self.num_nodes} by {self.source}"


def find_place(env: Mapping[str, str], *, port: int | None = None) -> Place | None:
    """Returns the place that the environment gives; None for one node. port: that of the user, which wins.

    Raises PacelineError where variables contradict each other, are incomplete, or name the place of a rank.
    """
    env = {name: value.strip() for name, value in env.items() if value.strip()}
    places = [place for contract in CONTRACTS if (place := place_of(contract, env, port=port))]
    present = {place.source for place in places}
    outer = {source for contract in CONTRACTS for source in contract.outer if contract.source in present}
    places = [place for place in places if place.source not in outer]
    refuse_ranks(env, has_place=bool(places))
    if not places:
        refuse_incomplete(env)
        return None
    for other in places[1:]:
        if (other.node_rank, other.num_nodes) != (places[0].node_rank, places[0].num_nodes):
            what = f"this is {places[0].text}, and {other.text.removeprefix('node ')}"
            raise PacelineError(what, fix=f"unset those that are not meant; {NO_JOIN}")
    return places[0]


def place_of(contract: Contract, env: Mapping[str, str], *, port: int | None) -> Place | None:
    """Returns the place by one contract; None where it is not set, or for one node."""
    if contract.node_rank not in env or contract.num_nodes not in env:
        return None
    num_nodes = number_in(env, contract.num_nodes)
    if num_nodes == 1:
        return None
    node_rank = number_in(env, contract.node_rank)
    if not node_rank < num_nodes:
        what = f"{contract.node_rank} is {node_rank}, and {contract.num_nodes} is {num_nodes}"
        raise PacelineError(what, fix=f"ranks of nodes are 0 to {max(0, num_nodes - 1)}; {NO_JOIN}")
    tasks = env.get(contract.tasks_per_node or "", "1")
    if any(int(count) > 1 for count in TASKS.findall(tasks)):
        what = (
            f"{contract.tasks_per_node} is {tasks}: paceline is started once on each node, and starts the ranks itself"
        )
        raise PacelineError(what, fix=f"{contract.one_task_fix} paceline ...; {NO_JOIN}")
    listed = next((env[name] for name in contract.addresses if name in env), None)
    addresses = hosts_in(listed) if listed else ()
    if not addresses:
        what = f"this is node {node_rank} of {num_nodes} by {contract.source}, and the address of node 0 is not set"
        raise PacelineError(what, fix=f"set {contract.addresses[0]} on every node; {NO_JOIN}")
    if port is None and contract.port and contract.port in env:
        port = number_in(env, contract.port, high=65_535)
    elif port is None:
        job_id = contract.job_id if contract.job_id in env else None
        port = PORT + (number_in(env, job_id) % PORTS_BY_JOB if job_id else 0)
    nproc = env.get(contract.nproc or "", "")  # torchrun takes auto, gpu and cpu too
    return Place(
        contract.source, node_rank, num_nodes, addresses, port, int(nproc) or None if nproc.isdigit() else None
    )


def number_in(env: Mapping[str, str], name: str, *, high: int = 2**31) -> int:
    """Returns the number that a variable has; raises PacelineError where it has none."""
    if not env[name].isdigit() or not int(env[name]) <= high:
        raise PacelineError(f"{name} is {env[name]!r}, not a number that can be used", fix=f"set it; {NO_JOIN}")
    return int(env[name])


def hosts_in(text: str) -> tuple[str, ...]:
    """Returns node 0's address of a list, or all those of a URI of mpirun: 7.0;tcp://10.0.0.1,10.1.0.1:99;tcp6://[fd00::1]:99."""
    if uris := URI_HOSTS.findall(text):
        return tuple(host.strip("[]") for hosts in uris for host in hosts.split(","))
    first = re.split(r",(?![^\[]*\])|\s+", text)[0]
    return (re.sub(r"\[(\d+)[\d,-]*\]", r"\1", first),)  # node[01-04] begins with node01


def refuse_incomplete(env: Mapping[str, str]) -> None:
    """Raises PacelineError where one half of a contract is set."""
    for contract in CONTRACTS:
        names = (contract.node_rank, contract.num_nodes)
        present = [name for name in names if name in env]
        is_one_node = present == [contract.num_nodes] and env[contract.num_nodes] == "1"
        if len(present) == 1 and not is_one_node and not (contract.is_rank_common and present == [contract.node_rank]):
            missing = next(name for name in names if name not in env)
            what = f"{present[0]} is {env[present[0]]}, and {missing} is not set: the place of this node is unknown"
            raise PacelineError(what, fix=f"set {missing} too, or unset {present[0]}; {NO_JOIN}")


def refuse_ranks(env: Mapping[str, str], *, has_place: bool) -> None:
    """Raises PacelineError for a process that is one of several ranks: each would start the whole run."""
    rank, world_size = env.get("RANK", ""), env.get("WORLD_SIZE", "")
    if world_size in ("", "1") or not rank or (has_place and "TORCHELASTIC_RUN_ID" not in env):
        return
    what = f"RANK {rank} and WORLD_SIZE {world_size} are the place of a rank, and paceline is started once on each node"
    fix = "start paceline itself, not by torchrun; where they count nodes: export NODE_RANK=$RANK NNODES=$WORLD_SIZE"
    raise PacelineError(what, fix=f"{fix}; {NO_JOIN}")
