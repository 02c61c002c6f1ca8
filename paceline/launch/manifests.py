"""
One run in the words of each scheduler: a Kubeflow TrainJob v2, a SkyPilot task, a dstack task, a docker compose file.

Pure functions of launch/emit.py's ClusterJob. The token of several nodes is only referred to: no secret is ever in a file. Each is
tested against the scheduler's published schema or models, and none has run on a cluster.

YAML is written here without a library: mappings with text keys, lists, strings, whole numbers, booleans, null. Every string comes
back as the same string from any reader of YAML 1.1 or 1.2. A key that begins with `#` is a comment line of its mapping.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from paceline.errors import INTERRUPTED, UsageError
from paceline.launch.emit import WORKSPACE, ClusterJob
from paceline.launch.node import TOKEN
from paceline.units import GIB, format_bytes

Document = dict[str, Any]

TRAINER = "trainer.kubeflow.org/v1alpha1"
CONFIG_DIR, CONFIG_FILE = "/etc/paceline", "run.toml"
USER_ID = 1000  # of the Dockerfile; the volume belongs to its group
MAX_RESTARTS = 100  # preemptions, and lost nodes
# exit codes after which the same command would end the same way: a mistake, wrong usage, a training that failed for good
FINAL_CODES = [1, 2, 3]
NOFILE = 65_536
NODE_DISK_GIB = 64  # of a machine: the image, and what compilers write
# a letter first, so that it is neither a number nor a date; a colon or a hash would need more care than quotes cost
PLAIN = re.compile(r"/?[A-Za-z][A-Za-z0-9_./-]*")
WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}  # YAML 1.1 reads them as values
# what JSON writes as it is, and a reader of YAML refuses or changes
UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")


def format_file(target: str, job: ClusterJob) -> str:
    """Returns the whole file for one of FORMS, with its comments on top."""
    lines, documents = FORMS[target](job)
    return "".join(f"# {line}\n" for line in (*job.notes, *lines)) + format_documents(documents)


def kubernetes(job: ClusterJob) -> tuple[list[str], list[Document]]:
    """A TrainJob with a TrainingRuntime of its own, its config and its volume.

    The names `node` are Kubeflow's: its torch plugin gives the nodes PET_NNODES, PET_NODE_RANK and PET_MASTER_ADDR by them.
    """
    metadata, token, claim = {"name": job.name}, f"{job.name}-token", f"{job.name}-workspace"
    lines = ["needs: Kubeflow Trainer v2, and the image in a registry that the nodes reach"]
    if job.nodes > 1:
        literal = '--from-literal=token="$(openssl rand -hex 32)"'
        lines.append(f"before: kubectl create secret generic {token} {literal}")
    lines += list(texts_to_copy(job, "the volume"))
    lines += ["start: kubectl apply -f FILE", f"follow: kubectl logs -f -l jobset.sigs.k8s.io/jobset-name={job.name}"]
    modes = ["ReadWriteMany" if job.nodes > 1 else "ReadWriteOnce"]
    sizes = {"requests": {"storage": gib(job.disk_bytes, "Gi")}}
    volume = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": claim}}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{job.name}-config"}}
    environment: list[Document] = [{"name": "HOME", "value": WORKSPACE}]
    if job.nodes > 1:
        environment.append({"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": token, "key": "token"}}})
    trainer = {
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks,
        "image": job.image,
        "command": ["/bin/sh", "-c"],
        # Kubernetes replaces $(NAME) in a command, but not $$(NAME)
        "args": [job.script(f"{CONFIG_DIR}/{CONFIG_FILE}", node_rank="PET_NODE_RANK").replace("$(", "$$(")],
        "env": environment,
        "resourcesPerNode": {"requests": kubernetes_resources(job), "limits": kubernetes_resources(job)},
    }
    labelled = {**metadata, "labels": {"trainer.kubeflow.org/framework": "torch"}}
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    return lines, [
        {**volume, "spec": {"accessModes": modes, "resources": sizes}},
        {**config, "data": {CONFIG_FILE: job.config_toml}},
        {"apiVersion": TRAINER, "kind": "TrainingRuntime", "metadata": labelled, "spec": training_runtime(job, claim)},
        {
            "apiVersion": TRAINER,
            "kind": "TrainJob",
            "metadata": metadata,
            "spec": {"runtimeRef": runtime, "trainer": trainer},
        },
    ]


def kubernetes_resources(job: ClusterJob) -> dict[str, str]:
    """Returns what a pod asks for; requests are limits, so that a node under pressure does not evict it first."""
    gpus = {"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}
    return {"cpu": str(job.cores), "memory": gib(job.memory_bytes, "Gi"), **gpus}


def training_runtime(job: ClusterJob, claim: str) -> Document:
    """Returns the runtime: the pods with their volumes, and which failures start all of them again."""
    mounts = {"workspace": WORKSPACE, "shm": "/dev/shm", "config": CONFIG_DIR}
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    pod = {
        "restartPolicy": "Never",
        "# a step, a save and a minute, after a node is drained or the pod preempted": None,
        "terminationGracePeriodSeconds": job.grace_s,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER_ID, "fsGroup": USER_ID},
        "containers": [
            {
                "name": "node",
                "image": job.image,
                "securityContext": security,
                "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
            }
        ],
        "volumes": [
            {"name": "workspace", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": gib(job.shm_bytes, "Gi")}},
            {"name": "config", "configMap": {"name": f"{job.name}-config"}},
        ],
    }
    final = {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": FINAL_CODES}}
    job_spec = {"backoffLimit": 0, "podFailurePolicy": {"rules": [final]}, "template": {"spec": pod}}
    template = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}, "spec": job_spec}
    rule = {"name": "noRetry", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    job_set = {
        "# a lost or preempted node starts all again, which resume; a mistake ends the job": None,
        "failurePolicy": {"maxRestarts": MAX_RESTARTS, "rules": [rule]},
        "replicatedJobs": [{"name": "node", "template": template}],
    }
    return {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": {"spec": job_set}}


def skypilot(job: ClusterJob) -> tuple[list[str], list[Document]]:
    """A task for `sky jobs launch`, whose managed jobs come back after a preemption."""
    lines = ["needs: SkyPilot with a cloud; workdir is a checkout of paceline, which it copies to the nodes"]
    secret = f" --secret {TOKEN}" if job.nodes > 1 else ""
    if job.nodes > 1:
        lines.append(f'before: export {TOKEN}="$(openssl rand -hex 32)"')
    lines.append(f"start: sky jobs launch FILE{secret}")
    resources: Document = {"cpus": f"{job.cores}+", "memory": f"{gib(job.memory_bytes)}+"}
    if job.gpus:
        resources["# the name of the card is that of `sky gpus list`"] = None
        resources["accelerators"] = {sky_name(job): job.gpus}
    resources |= {
        "disk_size": max(NODE_DISK_GIB, gib_number(job.disk_bytes)),
        "job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [INTERRUPTED]},
    }
    # MOUNT_CACHED keeps the renames by which a checkpoint becomes complete
    mounts: Document = {WORKSPACE: {"name": f"paceline-{job.name}", "mode": "MOUNT_CACHED"}}
    mounts |= {target: str(path) for path, target in job.texts}
    task: Document = {"name": job.name, "num_nodes": job.nodes, "resources": resources}
    setup = "set -eu\npython3 -m venv ~/paceline\n~/paceline/bin/pip install -q -c constraints.txt '.[datasets]'\n"
    if job.image.startswith("paceline:"):  # no registry has it
        task |= {"workdir": ".", "setup": setup}
    else:
        resources["image_id"] = f"docker:{job.image}"
    task["file_mounts"] = mounts
    if job.nodes > 1:
        task["secrets"] = {TOKEN: None}
    path = 'export PATH="$HOME/paceline/bin:$PATH"\n' if "setup" in task else ""
    task["run"] = path + with_config(job, "SKYPILOT_NODE_RANK")
    return lines, [task]


def dstack(job: ClusterJob) -> tuple[list[str], list[Document]]:
    """A task for `dstack apply`."""
    volume = f"paceline-{job.name}"
    lines = ["needs: a dstack project, and the image in a registry that its machines reach"]
    if job.nodes > 1:
        lines.append('before: dstack secret set paceline_token "$(openssl rand -hex 32)"')
        volume += "-${{ dstack.node_rank }}"
    sizes = f"of {gib_number(job.disk_bytes)} GB or more"
    lines.append(f"before: network volumes {volume} {sizes}; the checkpoints are on that of node 0")
    lines += list(texts_to_copy(job, "each volume"))
    lines.append("start: dstack apply -f FILE")
    resources: Document = {
        "cpu": f"{job.cores}..",
        "memory": f"{gib_number(job.memory_bytes)}GB..",
        "shm_size": f"{gib_number(job.shm_bytes)}GB",
        "disk": f"{NODE_DISK_GIB}GB..",
    }
    if job.gpus:
        memory = f"{int(0.95 * job.gpu_bytes / GIB)}GB.."
        resources["gpu"] = {"name": job.gpu.replace(" ", ""), "count": job.gpus, "memory": memory}
    task: Document = {"type": "task", "name": job.name, "nodes": job.nodes, "image": job.image}
    if job.nodes > 1:
        task["env"] = {TOKEN: "${{ secrets.paceline_token }}"}
    return lines, [
        {
            **task,
            "commands": [with_config(job, "DSTACK_NODE_RANK")],
            "resources": resources,
            "volumes": [{"name": volume, "path": WORKSPACE}],
            "# a step, a save and a minute": None,
            "stop_duration": f"{job.grace_s}s",
            "retry": {"on_events": ["no-capacity", "interruption"], "duration": "2d"},
        }
    ]


def compose(job: ClusterJob) -> tuple[list[str], list[Document]]:
    """A compose file for one machine. Texts are mounted from where they are."""
    if job.nodes > 1:
        fix = f"paceline emit k8s, skypilot or dstack with --hosts {job.nodes}; or leave --hosts out"
        raise UsageError(f"docker compose runs on one machine, not on {job.nodes}", fix=fix)
    volumes: list[Document] = [{"type": "volume", "source": "workspace", "target": WORKSPACE}]
    volumes += [
        {"type": "bind", "source": dollars(str(path)), "target": dollars(target), "read_only": True}
        for path, target in job.texts
    ]
    limits: Document = {"cpus": str(job.cores), "memory": f"{gib_number(job.memory_bytes)}g"}
    resources: Document = {"limits": limits}
    if job.gpus:
        device = {"driver": "nvidia", "count": job.gpus, "capabilities": ["gpu"]}
        resources["reservations"] = {"devices": [device]}
    service = {
        "image": job.image,
        "entrypoint": ["/bin/sh", "-c"],
        "command": [dollars(job.script(f"{CONFIG_DIR}/{CONFIG_FILE}"))],
        "init": True,
        "shm_size": f"{gib_number(job.shm_bytes)}g",
        "ulimits": {"memlock": -1, "nofile": NOFILE},
        "# a step, a save and a minute": None,
        "stop_grace_period": f"{job.grace_s}s",
        "# what starts again resumes": None,
        "restart": "on-failure:3",
        "volumes": volumes,
        "configs": [{"source": "run", "target": f"{CONFIG_DIR}/{CONFIG_FILE}"}],
        "deploy": {"resources": resources},
    }
    lines = [f"needs: the image: docker build -t {job.image} ."]
    lines += ["needs: the NVIDIA Container Toolkit, for GPUs in containers"] if job.gpus else []
    lines += [f"the volume takes up to {format_bytes(job.disk_bytes)}"]
    lines += ["start: docker compose -f FILE up -d; after a restart of the machine too"]
    lines += ["stop, with a save: docker compose -f FILE stop"]
    document = {
        "name": job.name,
        "services": {"train": service},
        "volumes": {"workspace": {}},
        "configs": {"run": {"content": dollars(job.config_toml)}},
    }
    return lines, [document]


def dollars(text: str) -> str:
    """Returns the text with its dollars doubled: compose replaces $NAME everywhere."""
    return text.replace("$", "$$")


def with_config(job: ClusterJob, node_rank: str) -> str:
    """Returns the script of a node, which first writes the config beside the data."""
    path = f"/tmp/{job.name}.toml"
    return f"cat > {path} <<'END_OF_CONFIG'\n{job.config_toml}END_OF_CONFIG\n{job.script(path, node_rank=node_rank)}"


def texts_to_copy(job: ClusterJob, volume: str) -> Iterator[str]:
    """Yields what has to be on a volume before the start."""
    for path, target in job.texts:
        yield f"before: copy {shlex.quote(str(path))} to {PurePosixPath(target).relative_to(WORKSPACE)} on {volume}"


def sky_name(job: ClusterJob) -> str:
    """Returns SkyPilot's name of the card: H100, RTX4090, A100-80GB."""
    is_large = job.gpu == "A100" and job.gpu_bytes > 60 * GIB
    return "A100-80GB" if is_large else job.gpu.replace(" ", "")


def gib_number(size: int) -> int:
    """Returns a size in whole GiB."""
    return size // GIB


def gib(size: int, unit: str = "") -> str:
    """Returns a size in whole GiB as text, with the unit of the scheduler."""
    return f"{gib_number(size)}{unit}"


FORMS: Mapping[str, Callable[[ClusterJob], tuple[list[str], list[Document]]]] = {
    "k8s": kubernetes,
    "skypilot": skypilot,
    "dstack": dstack,
    "compose": compose,
}


def format_documents(documents: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of a file with these documents."""
    return "---\n".join("".join(f"{line}\n" for line in mapping_lines(document)) for document in documents)


def mapping_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a mapping, without its margin."""
    for key, value in values.items():
        if key.startswith("#"):
            yield key
        elif is_nested(value):
            yield f"{yaml_string(key)}:"
            yield from map(indented, nested_lines(value))
        else:
            first, *others = scalar_lines(value)
            yield f"{yaml_string(key)}: {first}"
            yield from map(indented, others)


def nested_lines(value: Any) -> Iterator[str]:
    """Yields the lines of a mapping or a list that is not empty."""
    if isinstance(value, Mapping):
        yield from mapping_lines(value)
        return
    for item in value:
        first, *others = nested_lines(item) if is_nested(item) else scalar_lines(item)
        yield f"- {first}"
        yield from map(indented, others)


def indented(line: str) -> str:
    """Returns the line with one more margin; an empty line of a block stays empty."""
    return f"  {line}" if line else ""


def is_nested(value: Any) -> bool:
    """Whether the value takes lines of its own."""
    return isinstance(value, Mapping | list | tuple) and bool(value)


def scalar_lines(value: Any) -> list[str]:
    """Returns a value that is not nested: its first line stands behind the key, the others have a margin."""
    if isinstance(value, str) and is_block(value):
        mark = "|" if value.endswith("\n") else "|-"
        return [mark, *value.removesuffix("\n").split("\n")]
    if isinstance(value, str):
        return [yaml_string(value)]
    if value is None or isinstance(value, bool | int):
        return [json.dumps(value)]
    if isinstance(value, Mapping | list | tuple):
        return ["{}" if isinstance(value, Mapping) else "[]"]
    raise TypeError(f"no YAML for {type(value).__name__}")


def is_block(text: str) -> bool:
    """Whether a text of several lines can stand as it is: readers strip what blocks cannot show."""
    lines = text.removesuffix("\n").split("\n")
    has_plain_ends = bool(lines[0]) and not lines[0].startswith(" ") and bool(lines[-1].strip())
    return len(lines) > 1 and has_plain_ends and all(line.isprintable() and line == line.rstrip() for line in lines)


def yaml_string(text: str) -> str:
    """Returns one string as YAML, quoted unless it is a plain word."""
    if PLAIN.fullmatch(text) and text.lower() not in WORDS:
        return text
    # a JSON string is a YAML string, except for these characters
    return UNPRINTABLE.sub(lambda match: f"\\u{ord(match.group()):04x}", json.dumps(text, ensure_ascii=False))
