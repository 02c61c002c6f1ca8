"""The table of contracts: from the variables of each launcher to a place, or to an error with its fix."""

import pytest
from rows import with_rows

from paceline.errors import PacelineError
from paceline.launch.places import CONTRACTS, Place, find_place, hosts_in

SLURM = {
    "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu[07-09,12]", "SLURM_JOB_ID": "4711",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_NTASKS": "4", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99",
}  # fmt: skip
PET = {
    "PET_NNODES": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500",
    "PET_NPROC_PER_NODE": "8",
}  # fmt: skip
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}  # fmt: skip
DSTACK = {
    "DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "4", "DSTACK_MASTER_NODE_IP": "10.0.0.1", "DSTACK_GPUS_PER_NODE": "8",
    "DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "976748544.0;tcp://192.0.2.2,10.0.0.1:60187;tcp6://[fd00::2]:52587",
}  # fmt: skip
PLAIN = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501", "NODE_RANK": "1", "NNODES": "4"}


@pytest.mark.parametrize("env, expected", [
    (SLURM, Place("Slurm's variables", 1, 4, ("gpu07",), 29_400 + 711)),
    ({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "1234"}, Place("Slurm's variables", 1, 4, ("head",), 1234)),
    (PET, Place("PET_*, torchrun's variables", 1, 4, ("job-node-0-0.job",), 29500, 8)),
    ({**PET, "PET_NPROC_PER_NODE": "auto"}, Place("PET_*, torchrun's variables", 1, 4, ("job-node-0-0.job",), 29500)),
    (SKYPILOT, Place("SkyPilot's variables", 1, 4, ("10.0.0.1",), 29_400, 8)),
    ({**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}, Place("SkyPilot's variables", 1, 4, ("10.0.0.1",), 29_400)),
    (DSTACK, Place("dstack's variables", 1, 4, ("10.0.0.1",), 29_400, 8)),
    (OPEN_MPI, Place("Open MPI's variables", 1, 4, ("192.0.2.2", "10.0.0.1", "fd00::2"), 29_400)),
    ({**OPEN_MPI, "MASTER_ADDR": "10.1.0.1"}, Place("Open MPI's variables", 1, 4, ("10.1.0.1",), 29_400)),
    (PLAIN, Place("NODE_RANK and NNODES", 1, 4, ("10.0.0.1",), 29501)),
])  # fmt: skip
def test_each_contract_gives_a_place(env, expected):
    assert find_place(env) == expected
    assert find_place(env, port=20_000) == Place(*[*list(vars(expected).values())[:4], 20_000, expected.nproc])


def test_every_row_of_the_table_is_among_these():
    sources = {find_place(env).source for env in (SLURM, PET, SKYPILOT, DSTACK, OPEN_MPI, PLAIN)}
    assert sources == {contract.source for contract in CONTRACTS}


@pytest.mark.parametrize("env", [
    {},
    {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},  # many scripts export them
    {"NNODES": "1"},
    {**PLAIN, "NNODES": "1", "NODE_RANK": "0"},
    {**PLAIN, "NNODES": "", "NODE_RANK": " "},  # set to nothing
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[07-10]"},  # a batch script
    {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
    {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
])  # fmt: skip
def test_one_node_and_a_batch_script_have_no_place(env):
    assert find_place(env) is None


def test_the_innermost_launcher_counts():
    inside = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
    assert find_place({**inside, **OPEN_MPI}).source == "Open MPI's variables"  # srun has started its daemons
    assert find_place({**inside, **SKYPILOT}).source == "SkyPilot's variables"
    assert find_place({**SLURM, **PLAIN}).source == "NODE_RANK and NNODES"  # they agree


@with_rows("env, message, fix", [
    ({**SLURM, **PLAIN, "NODE_RANK": "0"},
     "this is node 0 of 4 by NODE_RANK and NNODES, and 1 of 4 by Slurm's variables", "unset those that are not meant"),
    ({"NODE_RANK": "1", "MASTER_ADDR": "a"}, "NODE_RANK is 1, and NNODES is not set", "set NNODES too"),
    ({"NNODES": "4"}, "NNODES is 4, and NODE_RANK is not set", "set NODE_RANK too"),
    ({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "a:1"}, "PET_NODE_RANK is not set", "set PET_NODE_RANK too"),
    ({**PET, "PET_NNODES": "1:4"}, "PET_NNODES is '1:4', not a number", "set it"),
    ({**PLAIN, "NODE_RANK": "4"}, "NODE_RANK is 4, and NNODES is 4", "ranks of nodes are 0 to 3"),
    ({"NODE_RANK": "1", "NNODES": "2"}, "the address of node 0 is not set", "set MASTER_ADDR on every node"),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, "SLURM_STEP_TASKS_PER_NODE is 8(x4)", "srun --ntasks-per-node=1"),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1,2"}, "started once on each node", "srun --ntasks-per-node=1"),
    ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "OMPI_COMM_WORLD_LOCAL_SIZE is 2", "mpirun --map-by ppr:1:node"),
    ({"RANK": "3", "WORLD_SIZE": "8"}, "RANK 3 and WORLD_SIZE 8 are the place of a rank", "NODE_RANK=$RANK NNODES=$WORLD_SIZE"),
    ({**PET, "RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}, "the place of a rank", "not by torchrun"),
])  # fmt: skip
def test_what_contradicts_itself_or_is_incomplete_is_refused(env, message, fix):
    with pytest.raises(PacelineError) as error:
        find_place(env)
    assert message in error.value.message
    assert fix in error.value.fix and error.value.fix.endswith("; --no-join ignores them")


@pytest.mark.parametrize("text, expected", [
    ("10.0.0.1 10.0.0.2", ("10.0.0.1",)),
    ("node[1-2],x", ("node1",)),
    ("x,node[1-2]", ("x",)),
    ("rack1-node[001,005-007]", ("rack1-node001",)),
    ("fd00::1", ("fd00::1",)),
])  # fmt: skip
def test_a_list_of_nodes_begins_with_node_0(text, expected):
    assert hosts_in(text) == expected
