"""
Train on a Ray cluster: one `paceline` process on each node of a placement group.

    python examples/ray_run.py 2 -- train balanced --name books --runs-dir /shared/runs

Ray chooses the nodes and reserves their GPUs; each process finds its place by MASTER_ADDR, NODE_RANK and NNODES. paceline itself
starts, watches and restarts the ranks. PYTHONPATH, or an installation on every node, must have paceline.
"""

import os
import secrets
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(max_retries=0)
def run_node(words: list[str], variables: dict[str, str]) -> int:
    """Runs paceline on this node and returns its exit code; Ray shows its output on the driver's terminal."""
    command = [sys.executable, "-m", "paceline.cli", *words]
    return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode


def main() -> int:
    """Runs the command after `--` on as many nodes as the first argument says; returns the largest exit code."""
    num_nodes, words = int(sys.argv[1]), sys.argv[sys.argv.index("--") + 1 :]
    ray.init()
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    bundle = {name: least for name in ("CPU", "GPU") if (least := min(node.get(name, 0) for node in alive))}
    group = placement_group([bundle] * num_nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=600)
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank) for rank in range(num_nodes)]
    address = ray.remote(num_cpus=0)(ray.util.get_node_ip_address).options(scheduling_strategy=places[0]).remote()
    shared = {"MASTER_ADDR": ray.get(address), "NNODES": str(num_nodes), "PACELINE_TOKEN": secrets.token_hex(16)}
    own = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
    tasks = [
        run_node.options(**own, scheduling_strategy=place).remote(words, {**shared, "NODE_RANK": str(rank)})
        for rank, place in enumerate(places)
    ]
    return max(ray.get(tasks))


if __name__ == "__main__":
    sys.exit(main())
