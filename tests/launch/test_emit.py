"""Files for other schedulers: against what their makers publish, and against what the run needs."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import run_command
from paceline.errors import PacelineError
from paceline.launch.emit import cluster_job
from paceline.launch.manifests import format_file
from paceline.run_options import EmitComposeOptions, EmitDstackOptions, EmitK8sOptions, EmitSkypilotOptions

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install -e '.[clusters]'")

FORMS = {form.target: form for form in (EmitK8sOptions, EmitSkypilotOptions, EmitDstackOptions, EmitComposeOptions)}
TWO_NODES = {"gpu": "H100", "gpus": 8, "config": "balanced", "keys": {"hosts": "2", "total_batch_size": 65_536}}
ONE_NODE = {"gpu": "RTX 4090", "config": "tiny", "keys": {}}
ON_CPU = {"config": "tiny", "keys": {"device": "cpu", "nproc": 2, "depth": 2}}
CASES = [
    pytest.param(form, case, id=f"{form}-{name}")
    for form in FORMS
    for name, case in (("two", TWO_NODES), ("one", ONE_NODE), ("cpu", ON_CPU))
    if (form, name) != ("compose", "two")
]
SECRET = "0123456789abcdef-secret"


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PACELINE_TOKEN", SECRET)


def emitted(form, case=None, **options):
    case = {**(case or ONE_NODE), **options}
    return format_file(form, cluster_job(FORMS[form](**case)))


def documents(form, case=None, **options):
    return list(yaml.safe_load_all(emitted(form, case, **options)))


def by_kind(case=None, **options):
    return {document["kind"]: document for document in documents("k8s", case, **options)}


def pod_of(runtime):
    [job] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


def script_of(form, document):
    if form == "compose":
        return document["services"]["train"]["command"][0].replace("$$", "$")
    return document["run"] if form == "skypilot" else document["commands"][0]


@pytest.mark.parametrize("case", [TWO_NODES, ONE_NODE, ON_CPU])
def test_kubernetes_objects_keep_the_models_of_kubeflow_and_the_schemas_of_kubernetes(case):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install -e '.[clusters]'")
    kubernetes = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[clusters]'")
    objects = by_kind(case)
    assert list(objects) == ["PersistentVolumeClaim", "ConfigMap", "TrainingRuntime", "TrainJob"]
    for kind, model in (
        ("TrainingRuntime", models.TrainerV1alpha1TrainingRuntime),
        ("TrainJob", models.TrainerV1alpha1TrainJob),
    ):
        # what a model does not know it drops, so nothing may be lost on the way through it
        assert model.from_dict(objects[kind]).to_dict() == objects[kind]
    pod, trainer = pod_of(objects["TrainingRuntime"]), objects["TrainJob"]["spec"]["trainer"]
    [container] = pod["containers"]
    container |= {key: trainer[key] for key in ("image", "command", "args", "env")}
    container["resources"] = trainer["resourcesPerNode"]
    job = objects["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    plain_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job}
    for document in (objects["PersistentVolumeClaim"], objects["ConfigMap"], plain_job):
        kubernetes.validate(document, "1.31", strict=True)


@pytest.mark.parametrize("case", [ONE_NODE, ON_CPU])
def test_a_compose_file_keeps_the_schema_of_the_compose_specification(case):
    jsonschema = pytest.importorskip("jsonschema")
    package = importlib.util.find_spec("check_jsonschema")
    if package is None:
        pytest.skip("check-jsonschema, which has the schema, is not installed: pip install -e '.[clusters]'")
    path = Path(package.origin).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    [document] = documents("compose", case)
    jsonschema.validate(document, json.loads(path.read_text()))


@pytest.mark.parametrize("case", [TWO_NODES, ONE_NODE, ON_CPU])
def test_dstack_reads_its_task(case):
    pytest.importorskip("dstack", reason="dstack is not installed: it is heavy")
    from dstack._internal.core.models.configurations import parse_run_configuration

    [document] = documents("dstack", case)
    assert parse_run_configuration(document).nodes == document["nodes"]


@pytest.mark.parametrize("case", [TWO_NODES, ONE_NODE, ON_CPU])
def test_skypilot_reads_its_task(case, tmp_path, monkeypatch):
    sky = pytest.importorskip("sky", reason="skypilot is not installed: it is heavy")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "task.yaml").write_text(emitted("skypilot", case))
    assert sky.Task.from_yaml("task.yaml").num_nodes == (2 if case is TWO_NODES else 1)


@pytest.mark.parametrize(("form", "case"), CASES)
def test_each_file_asks_for_what_the_plan_needs_and_holds_no_secret(form, case):
    job, text = cluster_job(FORMS[form](**case)), emitted(form, case)
    assert SECRET not in text
    assert ("PACELINE_TOKEN" in text) == (job.nodes > 1)
    assert f"{job.shm_bytes >> 30}G" in text.replace("g", "G") or form == "skypilot"
    if job.gpus:
        assert re.search(rf"\b(count|H100|RTX4090|nvidia.com/gpu): \"?{job.gpus}\b", text)
    else:
        assert not re.search("nvidia|H100|accelerators", text)
    if form != "skypilot":  # it has no such setting
        assert re.search(rf"(GracePeriodSeconds|grace_period|stop_duration): \"?{job.grace_s}s?\b", text)


def test_two_nodes_have_a_shared_volume_a_token_by_reference_and_one_that_resumes():
    objects = by_kind(TWO_NODES)
    assert objects["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    trainer = objects["TrainJob"]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    reference = {"secretKeyRef": {"name": "balanced-token", "key": "token"}}
    assert {"name": "PACELINE_TOKEN", "valueFrom": reference} in trainer["env"]
    assert 'if [ "${PET_NODE_RANK:-0}" = 0 ] && [ -f /workspace/runs/balanced/config.toml ]' in trainer["args"][0]
    assert objects["TrainJob"]["spec"]["runtimeRef"]["name"] == objects["TrainingRuntime"]["metadata"]["name"]


def test_a_mistake_ends_the_job_and_an_interruption_starts_it_again():
    job_set = by_kind()["TrainingRuntime"]["spec"]["template"]["spec"]
    [job] = job_set["replicatedJobs"]
    [rule] = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [1, 2, 3]  # of paceline: 130 is an interruption
    assert job_set["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert job_set["failurePolicy"]["maxRestarts"] > 0


@pytest.mark.parametrize("form", ["skypilot", "dstack", "compose"])
def test_the_script_trains_first_and_resumes_later(form, tmp_path):
    [document] = documents(form)
    script = script_of(form, document).replace("/workspace", str(tmp_path)).replace("/tmp/tiny", str(tmp_path / "tiny"))
    (tmp_path / "paceline").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "paceline").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}

    def shell():
        return subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, check=True).stdout

    first = shell()
    assert first.startswith("train ")
    assert f"--name=tiny --runs-dir={tmp_path}/runs" in first
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "config.toml").touch()
    assert shell() == f"resume {tmp_path}/runs/tiny\n"


def test_the_config_that_the_file_holds_is_the_run():
    keys = {**TWO_NODES["keys"], "weight_decay": 0.1, "window_pattern": "L"}
    config = by_kind({**TWO_NODES, "keys": keys})["ConfigMap"]["data"]["run.toml"]
    Path("run.toml").write_text(config)
    assert cluster_job(EmitK8sOptions(gpu="H100", gpus=8, config="run.toml", keys={"hosts": "2"})).config_toml == config
    assert "weight_decay = 0.1" in config


def test_a_run_is_emitted_by_its_own_config_and_name(tmp_path):
    run = tmp_path / "runs" / "My Books"
    run.mkdir(parents=True)
    (run / "config.toml").write_text('name = "My Books"\ndepth = 6\ndata = "builtin"\n')
    job = cluster_job(EmitComposeOptions(gpu="H100", config="My Books", keys={}))
    assert (job.name, job.config_toml) == ("my-books", "depth = 6\n")


def test_text_of_this_machine_is_mounted_uploaded_or_has_to_be_copied(tmp_path):
    text = tmp_path / "my $books"
    text.mkdir()
    (text / "a.txt").write_bytes(b"x" * 10**6)
    case = {**ONE_NODE, "keys": {"data": str(text)}}
    [composed] = documents("compose", case)
    bind = {"type": "bind", "source": str(text).replace("$", "$$"), "target": "/workspace/data/my $$books"}
    assert {**bind, "read_only": True} in composed["services"]["train"]["volumes"]
    [task] = documents("skypilot", case)
    assert task["file_mounts"]["/workspace/data/my $books"] == str(text)
    assert f"# before: copy '{text}' to data/my $books on the volume\n" in emitted("k8s", case)
    assert "'--data=/workspace/data/my $books'" in by_kind(case)["TrainJob"]["spec"]["trainer"]["args"][0]


def test_kubernetes_replaces_no_variable_in_the_name_of_a_text():
    Path("a $(HOME)").touch()
    [command] = by_kind({**ONE_NODE, "keys": {"data": "a $(HOME)"}})["TrainJob"]["spec"]["trainer"]["args"]
    assert "'--data=/workspace/data/a $$(HOME)'" in command  # $$( is how Kubernetes writes $(


def test_a_text_for_validation_within_the_text_is_named_there_and_another_one_is_copied_too(tmp_path):
    Path("books").mkdir()
    for path in ("books/valid.txt", "other.txt"):
        Path(path).touch()
    for val_data, path, num_texts in (("books/valid.txt", "books/valid.txt", 1), ("other.txt", "other.txt", 2)):
        job = cluster_job(EmitK8sOptions(**{**ONE_NODE, "keys": {"data": "books", "val_data": val_data}}))
        assert f"--data=/workspace/data/books --val-data=/workspace/data/{path}" in job.train
        assert len(job.texts) == num_texts and "val_data" not in job.config_toml
    job = cluster_job(EmitK8sOptions(**{**ONE_NODE, "keys": {"data": "books", "val_data": "hf:letters"}}))
    assert "--val-data=hf:letters" in job.train
    for key, flag in (("val_data", "val-data"), ("tokenizer", "tokenizer")):
        with pytest.raises(PacelineError, match=f"{flag} books/missing is not here"):
            cluster_job(EmitK8sOptions(**{**ONE_NODE, "keys": {"data": "books", key: "books/missing"}}))


def test_text_on_the_volume_is_named_as_it_is_there():
    job = cluster_job(EmitK8sOptions(**{**ONE_NODE, "keys": {"data": "/workspace/data/books"}}))
    assert "--data=/workspace/data/books" in job.train and job.texts == ()


@pytest.mark.parametrize(
    ("form", "options", "message", "fix"),
    [
        ("k8s", {"keys": {"data": "missing.txt"}}, "data missing.txt is not here", "a path that exists, or one under"),
        ("k8s", {"keys": {"hosts": "ada,bob"}}, "--hosts ada,bob: the scheduler chooses", "--hosts 2"),
        ("k8s", {"keys": {"python": "/usr/bin/python3"}}, "python describes hosts", "leave --python out"),
        ("k8s", {"keys": {"epochs": 2.0}}, "the length is given in epochs", "--num-steps N"),
        ("k8s", {"config": "missing", "keys": {}}, "no run missing", ""),
        ("k8s", {"config": "missing.toml", "keys": {}}, "", ""),
        ("compose", TWO_NODES, "docker compose runs on one machine, not on 2", "paceline emit k8s"),
    ],
)
def test_what_cannot_work_is_refused(form, options, message, fix):
    with pytest.raises(PacelineError) as error:
        emitted(form, options)
    assert error.value.message.startswith(message)
    assert error.value.fix.startswith(fix)


def test_a_file_is_written_once_and_says_what_to_do(capsys):
    words = ["emit", "compose", "tiny", "--gpu", "RTX 4090", "--out", "compose.yaml"]
    assert run_command(words) == 0
    output = capsys.readouterr().out
    assert output.startswith("wrote   compose.yaml\n        paceline ")
    assert "        start: docker compose -f FILE up -d" in output
    assert yaml.safe_load(Path("compose.yaml").read_text())["name"] == "tiny"
    assert run_command(words) == 1
    assert "fix: --force overwrites it" in capsys.readouterr().err
    assert run_command([*words, "--force"]) == 0


def test_no_library_for_yaml_is_needed():
    code = "import sys; sys.modules['yaml'] = None; from paceline.cli import main; main()"
    words = ["emit", "k8s", "tiny", "--gpu", "H100"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout == emitted("k8s", {**ONE_NODE, "gpu": "H100"})


def test_the_first_line_says_how_long_the_run_is():
    assert ": depth 4, 2m of training, on " in emitted(
        "compose", ON_CPU | {"config": "tiny", "keys": {"device": "cpu"}}
    )
    assert ": depth 16, 57,344 steps, on " in emitted("compose", {**ONE_NODE, "config": "balanced"})
