"""`paceline run --hosts`: scripts on two hosts that share no disk, over real sshd in network namespaces (tests/namespaces.py)."""

import hashlib
import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import namespaces
import psutil
import pytest
from hosts_run import set_cable
from namespaces import namespaced_hosts

from paceline.rundir import RunDir, read_json_lines

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(bool(namespaces.WHY_NOT), reason=namespaces.WHY_NOT),
]
DEADLINE_S = 120.0
FLAGS = ["--no-check", "--device", "cpu", "--health-every", "0"]
SECRET = "zS9tokenQ"
TRAIN = """
    import os, pathlib, sys, time
    import torch, torch.distributed as dist
    import größe

    dist.init_process_group("gloo")
    rank, world_size, x = dist.get_rank(), dist.get_world_size(), torch.ones(1)
    dist.all_reduce(x)
    print(f"rank {rank} of {world_size}, sum {x.item()}, {größe.text}, {sys.argv[1:]}")
    print("ignored", pathlib.Path("big.bin").exists(), "shell", oct(os.stat("go.sh").st_mode), "run", os.environ["PACELINE_RUN"])
    print("token", os.environ.get("TOKEN"), "other", os.environ.get("OTHER"), "local", os.environ["LOCAL_RANK"])
    if "flood" in sys.argv:
        sys.stdout.write("".join(f"{i:07}\\n" for i in range(10_000)))
    if "fail" in sys.argv and rank == 1:
        sys.exit(7)
    print("done", flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""
# ranks that only read their variables: a process group of two hosts is in test_slurm_jobs.py and the soak tests below
ALONE = (
    TRAIN.replace("    import torch, torch.distributed as dist\n", "")
    .replace('    dist.init_process_group("gloo")\n', "")
    .replace(
        "dist.get_rank(), dist.get_world_size(), torch.ones(1)",
        "*(int(os.environ[n]) for n in ('RANK', 'WORLD_SIZE')), 0",
    )
    .replace("    dist.all_reduce(x)\n", "")
    .replace("sum {x.item()}", "{os.environ['MASTER_ADDR']}")
    .partition("    dist.barrier")[0]
)
WAIT = """
    import os, signal, sys, time
    stopped = []
    signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
    print("ready", flush=True)
    while not stopped or "deaf" in sys.argv:
        time.sleep(0.2)
    open(os.environ["PACELINE_RUN"] + "/saved." + os.environ["RANK"], "w").close()
    print("saved")
    sys.exit(0)
"""
SAVE = """
    import os, signal, sys, time
    import torch, torch.distributed as dist

    def save(signum, frame):
        time.sleep(5)
        open(os.environ["PACELINE_RUN"] + "/saved." + os.environ["RANK"], "w").close()
        os._exit(0)

    signal.signal(signal.SIGTERM, save)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    sys.exit(7) if dist.get_rank() == 1 else time.sleep(600)
"""
TWICE = """
    import os, signal, time
    print("the same code" if os.environ["PACELINE_ATTEMPT"] == "2" else "ready", flush=True)
    while os.environ["PACELINE_ATTEMPT"] == "1":
        time.sleep(0.2)
        if os.path.exists("go"):
            os.kill(os.getpid(), signal.SIGKILL)
"""


class Desk:
    """A folder with scripts that h1 alone has, and `paceline run` there."""

    def __init__(self, hosts):
        self.hosts = hosts
        self.path = hosts.private / "ordner ü"  # as h1 calls it
        self.folder = hosts.on("h1", self.path)  # as this test does
        self.folder.mkdir(exist_ok=True)
        self.count = 0

    def write(self, name, text):
        (self.folder / name).write_text(dedent(text))

    def start(self, *words, hosts="h1,h2", flags=FLAGS, **env):
        """Starts a run; its output goes to a file."""
        self.count += 1
        self.run = RunDir(self.folder / "runs" / f"r{self.count}")
        names = [f"--hosts={hosts}", "--nproc=1", f"--name={self.run.name}"]
        return self.begin("run", *names, *flags, *words, **env)

    def resume(self):
        """Starts the last run again."""
        return self.begin("resume", self.run.name, "--no-check", "--health-every=0")

    def begin(self, *words, **env):
        words = [*(f"{name}={value}" for name, value in env.items()), sys.executable, "-m", "paceline.cli", *words]
        self.output = self.folder.parent / f"{self.run.name}.txt"
        shell = ["bash", "-c", 'cd "$0" && exec env "$@"', str(self.path), *words]
        with self.output.open("w") as log:
            return self.hosts.start("h1", *shell, stdout=log, stderr=log)

    def end(self, process):
        code = process.wait(DEADLINE_S)
        self.text = self.output.read_text()
        return code

    def __call__(self, *words, **options):
        return self.end(self.start(*words, **options))

    def wait_for(self, condition, process):
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert process.poll() is None and time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.02)

    def log(self, rank, attempt=1):
        path = self.run.rank_log(attempt, rank)
        return path.read_text() if path.exists() else ""

    def copy(self, name="ordner ü"):
        """The copy of the folder on h2."""
        (copy,) = (self.hosts.folder / "h2" / "cache" / "paceline" / "scripts").glob(f"*/{name}")
        return copy

    def left(self):
        """Processes of any run on any host that have not ended within the deadline."""
        deadline = time.monotonic() + 20
        while (found := processes(self.hosts.folder)) and time.monotonic() < deadline:
            time.sleep(0.5)
        return found


def processes(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in process.environ().get("XDG_CACHE_HOME", "") and "paceline" in str(process.environ()):
                command = " ".join(process.cmdline())
                if process.status() != psutil.STATUS_ZOMBIE and "sshd" not in command:
                    found.append(command)
        except psutil.Error:
            pass
    return found


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    with namespaced_hosts(3, tmp_path_factory.mktemp("hosts")) as hosts:
        desk = Desk(hosts)
        desk.write("train.py", TRAIN)
        desk.write("alone.py", ALONE)
        desk.write("größe.py", "text = 'größe 1'")
        desk.write(".gitignore", "big.bin\nruns/\nlarge/\n")
        desk.write("go.sh", "#!/bin/sh\n")
        (desk.folder / "go.sh").chmod(0o755)
        desk.write("big.bin", "x" * 1000)
        subprocess.run(["git", "init", "-q", desk.folder], check=True)
        yield desk


@pytest.fixture(scope="module")
def words_seen(desk):
    """A first run, and every word of a command line that any process had meanwhile."""
    process = desk.start("--env", "TOKEN", "--", "alone.py", "flood", "größe", TOKEN=SECRET, OTHER="none of theirs")
    words = set()
    while process.poll() is None:
        words.update(word for other in psutil.process_iter(["cmdline"]) for word in other.info["cmdline"] or ())
        time.sleep(1.0)
    assert desk.end(process) == 0, desk.text
    return words


def test_a_script_runs_on_two_hosts_with_its_folder_and_the_listed_variables(desk, words_seen):
    lines = [f"rank {rank} of 2, 10.77.0.1, größe 1, ['flood', 'größe']" for rank in range(2)]
    assert [desk.log(rank).splitlines()[0] for rank in range(2)] == lines
    assert f"h1[0] {lines[0]}\n" in desk.text and f"h2[1] {lines[1]}\n" in desk.text
    assert "ignored True shell 0o100755" in desk.log(0) and "ignored False shell 0o100755" in desk.log(1)
    assert f"token {SECRET} other none of theirs local 0" in desk.log(0)
    assert f"token {SECRET} other None local 0" in desk.log(1)
    assert f"run {desk.hosts.folder / 'h2'}" in desk.log(1)  # its copy of the run folder
    flood = hashlib.sha256("".join(f"{i:07}\n" for i in range(10_000)).encode()).digest()
    for rank in range(2):  # whole on the head
        text = desk.log(rank)
        start = text.index("0000000\n")
        assert hashlib.sha256(text[start : start + 80_000].encode()).digest() == flood
    assert "sync    " in desk.text and "to h2: 5 of 5 files" in desk.text
    assert "paceline.launch.agent" in words_seen
    assert not any(
        SECRET in word for word in words_seen if word != f"TOKEN={SECRET}"
    )  # that one is this test's own `env`
    assert all(
        SECRET not in path.read_text()
        for path in desk.run.path.rglob("*")
        if path.suffix in (".json", ".toml", ".jsonl")
    )
    assert desk.left() == []


@pytest.mark.soak
def test_a_failing_rank_of_another_host_is_named_and_only_what_has_changed_is_sent(desk, words_seen):
    desk.write("größe.py", "text = 'größe 2'")
    (desk.copy() / "snapshot.pt").write_text("of the script")
    assert desk("--", "train.py", "fail") == 7, desk.text
    assert "to h2: 1 of 5 files, 18 B of " in desk.text
    assert "rank 1 on h2 failed: exit code 7" in desk.text
    assert "größe 2" in desk.log(1) and (desk.copy() / "snapshot.pt").exists()
    failed = [event for event in read_json_lines(desk.run.events) if event["event"] == "rank_failed"]
    assert (failed[0]["rank"], failed[0]["host"], failed[0]["consequence"]) == (1, "h2", False)
    assert desk.left() == []


@pytest.mark.soak
def test_the_ranks_of_other_hosts_have_time_to_save_when_a_rank_fails(desk):
    desk.write("save.py", SAVE)
    assert desk("--", "save.py") == 7, desk.text
    assert (desk.run.path / "saved.0").exists() and desk.left() == []


@pytest.mark.soak
@pytest.mark.parametrize("words, message, fix", [
    (["--no-sync", "--", "only.py"], "only.py is not on h2", "leave --no-sync out"),
    (["--sync", "nowhere", "--", "only.py"], "there is no such folder", "the folder that holds the script"),
    (["--", "large/only.py"], "at most 100 MiB are sent; the largest in it is data.bin, 120 MiB", "--sync DIR"),
    (["--env", "NOT_SET", "--", "only.py"], "NOT_SET of --env is not set here", "export NOT_SET"),
    (["--", "hostname"], "ordner ü is not on h2", "--sync "),
])  # fmt: skip
def test_what_cannot_run_there_is_refused_in_two_lines_and_leaves_nothing(desk, words, message, fix):
    desk.write("only.py", "print('started')")
    (desk.folder / "large").mkdir(exist_ok=True)
    desk.write("large/only.py", "print('started')")
    with (desk.folder / "large" / "data.bin").open("wb") as file:
        file.truncate(120 << 20)
    assert desk(*words) == 1, desk.text
    error, hint = desk.text.splitlines()[-2:]
    assert message in error and fix in hint and "started" not in desk.text
    assert not desk.run.path.exists() and desk.left() == []


@pytest.mark.soak
def test_code_that_has_changed_in_a_copy_is_sent_again_before_the_next_attempt(desk):
    (desk.folder / "inner").mkdir(exist_ok=True)
    desk.write("inner/twice.py", TWICE)
    process = desk.start("--", "inner/twice.py")
    desk.wait_for(lambda: all("ready" in desk.log(rank) for rank in range(2)), process)
    copy = desk.copy("inner")
    (copy / "twice.py").write_text("print('changed')")
    (copy / "go").write_text("of the test")
    assert desk.end(process) == 0, desk.text
    assert all(desk.log(rank, attempt=2) == "the same code\n" for rank in range(2))
    assert f"note    twice.py on h2 differed from {desk.path}/inner here: sent again\n" in desk.text
    where = f"note    on h2 the working directory is its copy of {desk.path}/inner, not {desk.path}\n"
    assert where in desk.text and (copy / "go").exists() and desk.left() == []


@pytest.mark.soak
def test_ctrl_c_once_lets_every_rank_save_and_twice_ends_now(desk):
    desk.write("wait.py", WAIT)
    process = desk.start("--", "wait.py")
    desk.wait_for(lambda: all("ready" in desk.log(rank) for rank in range(2)), process)
    process.send_signal(signal.SIGINT)
    assert desk.end(process) == 130, desk.text
    assert all("saved" in desk.log(rank) for rank in range(2))
    assert (desk.run.path / "saved.0").exists() and desk.left() == []
    assert list((desk.hosts.folder / "h2" / "cache" / "paceline" / "runs").glob(f"*/{desk.run.name}/saved.1"))

    process = desk.start("--", "wait.py", "deaf")
    desk.wait_for(lambda: all("ready" in desk.log(rank) for rank in range(2)), process)
    process.send_signal(signal.SIGINT)
    desk.wait_for(lambda: "stopping: " in desk.output.read_text(), process)
    time.sleep(0.5)  # a wrapper may repeat the first one
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    assert desk.end(process) == 130, desk.text
    assert time.monotonic() - started < 30 and desk.left() == []


@pytest.mark.soak
def test_a_third_machine_starts_a_module_on_two_others(desk):
    (desk.folder / "pkg").mkdir(exist_ok=True)
    desk.write("pkg/__init__.py", "")
    desk.write("pkg/train.py", TRAIN.replace("import größe", "from pkg import size as größe"))
    desk.write("pkg/size.py", "text = 'of a package'")
    assert desk("--quiet-ranks", "--", "-m", "pkg.train", hosts="h2,h3") == 0, desk.text
    assert "of a package" in desk.log(0) and "of a package" in desk.log(1)
    assert "h2[0] rank 0 of 2" in desk.text and "h3[1]" not in desk.text
    again = desk.start(hosts="h3,h2", flags=[*FLAGS, str(desk.path / "runs" / desk.run.name / "config.toml")])
    assert desk.end(again) == 0, desk.text
    assert "h3[0] rank 0 of 2" in desk.text and desk.left() == []


@pytest.mark.soak
def test_the_script_goes_on_where_a_host_was_lost(desk):
    desk.write(
        "last.py",
        """
        import os, time
        print("attempt", os.environ["PACELINE_ATTEMPT"], "world", os.environ["WORLD_SIZE"], flush=True)
        time.sleep(3600 if os.environ["PACELINE_ATTEMPT"] == "1" else 0)
    """,
    )
    process = desk.start("--", "last.py")
    desk.wait_for(lambda: all("attempt 1 world 2" in desk.log(rank) for rank in range(2)), process)
    set_cable(desk.hosts, "h2", "down")
    try:
        assert desk.end(process) == 0, desk.text
    finally:
        set_cable(desk.hosts, "h2", "up")
    assert "attempt 2 world 1" in desk.log(0, attempt=2) and "starting the command again on h1" in desk.text
    assert desk.left() == []


COUNT = """
    import os, pathlib, signal, sys, time
    rank, file = int(os.environ["RANK"]), pathlib.Path(os.environ["PACELINE_RUN"], "ck.pt")
    step = int(file.read_text()) if file.exists() else 0
    print("from", step, flush=True)
    stopped = []
    signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
    while not stopped:
        step += 1
        if rank == 0 and step % 30 == 0:
            file.write_text(str(step))
        time.sleep(0.1)
"""


def first_step(desk, rank, attempt):
    return int(desk.log(rank, attempt).split()[1])


@pytest.mark.soak
def test_hosts_that_have_saved_different_files_are_named_before_the_next_attempt(desk):
    desk.write("count.py", COUNT)
    process = desk.start("--", "count.py", hosts="h2,h3")
    saved = "ck.pt"
    desk.wait_for(lambda: "from 0" in desk.log(1), process)
    time.sleep(5)  # h2 saves
    try:
        set_cable(desk.hosts, "h2", "down")
        desk.wait_for(lambda: "from" in desk.log(0, 2), process)
        assert first_step(desk, 0, 2) == 0
    finally:
        set_cable(desk.hosts, "h2", "up")
    text = "host h2 answers again: it takes part in the next attempt"
    desk.wait_for(lambda: text in desk.output.read_text(), process)
    time.sleep(65)  # h3 saves
    process.send_signal(signal.SIGINT)
    assert desk.end(process) == 130, desk.text
    assert "PACELINE_RUN is a folder of its own on h2, h3" in desk.text
    assert "lost h2: starting the command again on h3" in desk.text and "continuing" not in desk.text
    assert "rank 0 is on h3 and was on h2: what it saved there stays there" in desk.text

    process = desk.resume()
    desk.wait_for(lambda: all("from" in desk.log(rank, 3) for rank in range(2)), process)
    assert first_step(desk, 0, 3) < first_step(desk, 1, 3)
    process.send_signal(signal.SIGINT)
    assert desk.end(process) == 130 and f"{saved} on h2 is of " in desk.text and "(scp -3p h3:" in desk.text, desk.text
    assert desk.left() == []


ACCELERATED = (Path(__file__).with_name("scripts") / "accelerated.py").read_text()
LIGHTNING = (Path(__file__).with_name("scripts") / "lightning_fit.py").read_text()


@pytest.mark.soak
@pytest.mark.parametrize("package, text, expected", [
    ("accelerate", ACCELERATED, "rank {rank} of 2, sum 2.0, 4 steps"),
    ("lightning", LIGHTNING.replace("devices=2", "devices=1, num_nodes=2"), "rank {rank} of 2, 4 steps"),
])  # fmt: skip
def test_scripts_of_libraries_run_as_under_torchrun(desk, package, text, expected):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    desk.write(f"{package}_script.py", text)
    assert desk("--", f"{package}_script.py", "out") == 0, desk.text
    lines = [next(line for line in desk.log(rank).splitlines() if "of 2," in line) for rank in range(2)]
    assert all(expected.format(rank=rank) in line for rank, line in enumerate(lines))
    assert len({line.rpartition("weight ")[2] for line in lines}) == 1  # they trained together
    assert desk.left() == []
