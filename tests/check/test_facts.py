"""All probes at once: the whole facts against their schema, and probes that hang, crash or babble."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jsonschema
import psutil
import pytest
from probing import ask
from rows import with_rows

from paceline.check.probes.facts import DEFAULTS, PROBES, Probe, ask_probes, gather_facts, relevant_env

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs/facts.schema.json").read_text())
SECRET = "0123456789abcdef0123456789abcdef01234567"
SECRETS = {
    "WANDB_API_KEY": SECRET,
    "HF_TOKEN": "hf_" + SECRET,
    "HF_ENDPOINT": f"https://ada:{SECRET}@example.org",
    "NCCL_CONF_FILE": f"https://{SECRET}@example.org/conf",
    "SLURM_JWT": SECRET,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "TORCH_ENDPOINT_PASSWORD": SECRET,
}
pytestmark = pytest.mark.dist


def ask_one(*command: str, deadline_s: float = 120.0) -> dict:
    """The facts of one probe that is this command."""
    return ask_probes([Probe("host", ("host",), command, deadline_s)], {})


@pytest.fixture(scope="module")
def cached_torch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("facts") / "torch.json"


@pytest.fixture(scope="module")
def facts(cached_torch) -> dict:
    folder = cached_torch.parent
    places = {"run_dir": str(folder / "runs/a"), "cache_dir": str(folder), "cached_torch": str(cached_torch)}
    return ask("facts", env=SECRETS, **places, data="builtin", port=29500, vocab_size=512)


def check_schema(facts: dict) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(facts)


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_the_facts_of_this_machine_are_as_the_schema_says(facts):
    check_schema(facts)
    assert list(facts["probes"]) == [probe.name for probe in PROBES]
    assert {name: probe["error"] for name, probe in facts["probes"].items()} == dict.fromkeys(facts["probes"])
    assert facts["torch"]["error"] is None
    assert facts["host"]["name"] == facts["network"]["hostname"]


def test_every_part_that_the_schema_has_is_filled_by_a_probe():
    filled = {part for probe in PROBES for part in probe.fills}
    of_other_hosts = {"connection", "links"}
    assert filled | {"version", "time", "probes", "env"} | of_other_hosts == set(SCHEMA["properties"])


def test_without_torch_psutil_and_pynvml_the_other_facts_are_gathered(tmp_path):
    """A Python of its own with nothing installed."""
    venv.create(tmp_path / "bare", symlinks=True)
    done = subprocess.run(
        [tmp_path / "bare/bin/python", "-m", "paceline.check.probes.facts"],
        input=json.dumps({"run_dir": str(tmp_path / "runs"), "data": "builtin", "cache_dir": str(tmp_path)}),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    facts = json.loads(done.stdout)
    check_schema(facts)
    assert (facts["torch"], facts["packages"]["numpy"], facts["probes"]["torch"]["ok"]) == (None, None, True)
    assert all(probe["ok"] for probe in facts["probes"].values())


def test_a_cached_answer_about_torch_needs_no_import(facts, cached_torch):
    second = gather_facts(cached_torch=cached_torch, probes=["torch", "host"])
    assert second["probes"]["torch"] == {"ok": True, "seconds": 0.0, "error": None, "cached": True}
    assert second["torch"] == facts["torch"] and second["probes"]["host"]["ok"]
    check_schema({**facts, **second, "probes": facts["probes"] | second["probes"]})


def test_nothing_secret_is_in_the_facts(facts):
    assert SECRET not in json.dumps(facts)
    assert (facts["env"]["WANDB_API_KEY"], facts["env"]["HF_TOKEN"]) == ("set", "set")
    assert facts["env"]["HF_ENDPOINT"] == "https://set@example.org"
    assert "AWS_SECRET_ACCESS_KEY" not in facts["env"]
    assert facts["tools"]["wandb"]["logged_in"] is True


def test_all_probes_run_at_the_same_time_and_each_is_reported_when_it_is_done(tmp_path):
    seen = []

    def on_probe(name):
        seen.append(name)
        (tmp_path / name).touch()

    after_fast = ("bash", "-c", f"until [ -e {tmp_path}/fast ]; do sleep 0.02; done")
    probes = [Probe("slow", (), after_fast, 120.0), Probe("fast", (), ("true",), 120.0)]
    facts = ask_probes(probes, {}, on_probe=on_probe)
    assert seen == ["fast", "slow"]
    assert {probe["error"] for probe in facts["probes"].values()} == {"ended with exit code 0 and no answer"}


ANSWER = "from paceline.check.probes.facts import answer\n"


@with_rows(("command", "error"), [
    *((("bash", "-c", script), error) for script, error in [
        ("kill -SEGV $$", "ended by SIGSEGV"),
        ("kill -KILL $$", "ended by SIGKILL"),
        ("echo hello", "answered no JSON: 'hello'"),
        ("echo '{\"half\": '", "answered no JSON: '{\"half\":'"),
        ("echo oh dear >&2; exit 3", "oh dear"),
        ("exit 3", "ended with exit code 3 and no answer"),
    ]),
    (("/no/such/python",), "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/python'"),
    ((sys.executable, "-c", f"{ANSWER}answer(lambda request: 1 / 0)"), "ZeroDivisionError: division by zero"),
])  # fmt: skip
def test_a_probe_that_is_missing_crashes_or_prints_no_json_is_a_fact(command, error):
    facts = ask_one(*command)
    assert facts["host"] is None
    assert (facts["probes"]["host"]["ok"], facts["probes"]["host"]["error"]) == (False, error)


def test_other_output_of_a_probe_is_not_part_of_its_answer():
    code = f"print('hello'); {ANSWER}answer(lambda request: print('more') or {{'host': 1}})"
    assert ask_one(sys.executable, "-c", code)["host"] == 1


def test_an_answer_counts_although_its_process_hangs_at_exit():
    facts = ask_one("bash", "-c", "echo '{\"host\": 1}'; sleep 600")
    assert (facts["host"], facts["probes"]["host"]["ok"]) == (1, True)
    assert facts["probes"]["host"]["seconds"] < 100.0  # neither the deadline nor the end of the process


def is_gone(pid: int) -> bool:
    """The kernel takes a moment to end a process that was killed, on a busy machine a long one."""
    for _ in range(1200):
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.1)
                continue
        return True
    return False


def test_a_probe_that_still_computes_at_its_deadline_gets_more_time():
    code = 'for ((i = 0; i < 400000; i++)); do :; done; echo \'{"host": {"a": 1}}\''
    facts = ask_one("bash", "-c", code, deadline_s=0.3)  # a shell reads little from a disk that may be slow
    assert facts["host"] == {"a": 1} or facts["probes"]["host"]["error"].startswith("still computing after")


def test_a_probe_that_computes_forever_is_ended_and_says_so():
    facts = ask_one("bash", "-c", "while :; do :; done", deadline_s=0.3)
    assert re.fullmatch(r"still computing after [\d.]+ s", facts["probes"]["host"]["error"])


def test_a_probe_that_hangs_is_killed_at_its_deadline_with_its_children(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # nobody ever writes: to open it hangs
    facts = ask_one("bash", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid; read line < {tmp_path}/pipe", deadline_s=1.0)
    assert re.fullmatch(r"no answer in [\d.]+ s", facts["probes"]["host"]["error"])
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_torch_that_hangs_does_not_affect_the_other_facts(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(f"open({str(tmp_path / 'pipe')!r})")
    (tmp_path / "torch/version.py").write_text("__version__ = '9.9.9'")
    os.mkfifo(tmp_path / "pipe")
    probes = [replace(probe, deadline_s=2.0 if probe.name == "torch" else 120.0) for probe in PROBES]
    answers = ask_probes(probes, {**DEFAULTS, "torch_path": str(tmp_path), "measure_disk": False})
    check_schema(answers)
    # by the probe, or its process late
    assert re.fullmatch(r"no answer in [\d.]+ s", answers["probes"]["torch"]["error"])
    assert {name for name, probe in answers["probes"].items() if not probe["ok"]} == {"torch"}


def test_ctrl_c_ends_every_probe(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(f"open({str(tmp_path / 'pipe')!r}).read()")
    os.mkfifo(tmp_path / "pipe")
    asker = subprocess.Popen(
        [sys.executable, "-m", "paceline.check.probes.facts"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    asker.stdin.write(json.dumps({"torch_path": str(tmp_path), "probes": ["torch", "host", "storage"]}).encode())
    asker.stdin.close()
    with (tmp_path / "pipe").open("w"):  # as soon as torch is imported
        started = psutil.Process(asker.pid).children(recursive=True)
        assert started
        asker.send_signal(signal.SIGINT)
        assert (asker.wait(120), asker.stderr.read()) == (130, b"")
    _, alive = psutil.wait_procs(started, timeout=120)
    assert alive == []
    asker.stdout.close()
    asker.stderr.close()


@pytest.mark.parametrize("request_text", ["[", '{"hosts": []}', "[]"])
def test_an_invalid_request_is_refused_with_the_valid_keys(request_text):
    done = subprocess.run(
        [sys.executable, "-m", "paceline.check.probes.facts"],
        input=request_text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no request for facts")
    assert "fix: send a JSON object with run_dir, " in done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root to give it up, and setpriv")
def test_it_works_without_root(tmp_path):
    """By the system's Python, since another user may not be able to read this one."""
    python = "/usr/bin/python3"
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": "/nonexistent"}
    look = "import sys; assert sys.version_info >= (3, 11); import paceline.check.probes.facts"
    if subprocess.run([*user, "-c", look], env=environment, cwd="/", capture_output=True, check=False).returncode:
        pytest.skip("needs a system Python of 3.11 or later that may read this folder")
    request = json.dumps({"run_dir": str(tmp_path / "runs"), "port": 80, "measure_disk": False})
    command = [*user, "-m", "paceline.check.probes.facts"]
    done = subprocess.run(command, input=request, env=environment, cwd="/", capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    check_schema(facts)
    assert all(probe["ok"] for probe in facts["probes"].values()), facts["probes"]
    assert (facts["host"]["root"], facts["storage"]["run_dir"]["error"]) == (False, "Permission denied")


def test_relevant_variables_are_shown_sorted_and_others_are_not():
    shown = {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO", "RANK": "3", "TOKENIZERS_PARALLELISM": "false"}
    others = {"HOME": "/home/ada", "RANKING": "7", "LS_COLORS": "x"}
    assert list(relevant_env({**others, **dict(reversed(shown.items()))}).items()) == list(shown.items())


def test_of_a_secret_only_that_it_is_set_is_shown_even_of_a_bare_key_under_a_harmless_name():
    names = ("HF_SOMETHING", "HF_TOKEN", "NCCL_SECRET", "SLURM_JWT", "CUDA_PASSWORD", "WANDB_API_KEY", "WANDB_NOTES")
    assert relevant_env(dict.fromkeys((*names, "HUGGING_FACE_HUB_TOKEN"), SECRET)) == dict.fromkeys(names, "set")
    assert relevant_env({"HF_TOKEN": "x"}) == {"HF_TOKEN": "set"}
