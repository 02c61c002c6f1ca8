"""Bad input about several hosts: each case ends with an error and a fix, without a traceback, and leaves nothing on any host."""

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import namespaces
import psutil
import pytest
from hosts_run import all_processes, cmdline
from namespaces import PORT, Hosts, namespaced_hosts

from paceline.cli import run_command

needs_namespaces = pytest.mark.skipif(bool(namespaces.WHY_NOT), reason=namespaces.WHY_NOT)

# the file that --hosts names, and what is typed: exit code, words of the error, words of the fix
TYPED = [
    ("a host twice", "", "train --hosts ada,ada", 2, "ada is listed twice", "ada:2"),
    ("two users of one host", "", "train --hosts ada,me@ada", 2, "ada is listed twice", "once, with its ranks"),
    ("a host in a range and by itself", "", "plan --hosts node[1-2],node2", 2, "node2 is listed twice", "node2:2"),
    ("an IPv6 address twice", "", "check --hosts [::1],[::1]", 2, "::1 is listed twice", "[::1]:2"),
    ("an option of ssh", "", "check --hosts=-oProxyCommand=x", 2, "'-oProxyCommand=x' is not a host", "--hosts ada,bob"),
    ("a command in a name", "", "check --hosts 'ada;reboot'", 2, "is not a host", "--hosts ada,bob"),
    ("an expansion in a name", "", "check --hosts '$(reboot)'", 2, "is not a host", "--hosts ada,bob"),
    ("a terminal's control characters", "", "check --hosts 'ada\x1b[2J'", 2, "is not a host", "--hosts ada,bob"),
    ("a name with a space", "", "run --hosts 'a da' -- x.py", 2, "'a da' is not a host", "--hosts ada,bob"),
    ("no name before a user's sign", "", "run --hosts me@ -- x.py", 2, "'me@' is not a host", "user@ada"),
    ("no user", "", "run --hosts @ada -- x.py", 2, "'@ada' is not a host", "user@ada"),
    ("two users", "", "run --hosts me@@ada -- x.py", 2, "'me@@ada' is not a host", "user@ada"),
    ("a port of ssh", "", "comm --hosts ada,bob:2222", 2, "2222 ranks on bob",
     "1 to 64 ranks on a host; a port of ssh is in ~/.ssh/config: Host bob, Port 2222"),
    ("an address of ssh", "", "comm --hosts ada,ssh://bob:2222", 2, "--hosts: 'ssh://bob:2222' is not a host",
     "fix: --hosts ada,bob"),
    ("ranks that are no number", "", "comm --hosts ada:x", 2, "'ada:x' is not a host", "ada:2 for two ranks"),
    ("no ranks behind the colon", "", "comm --hosts ada:", 2, "'ada:' is not a host", "ada:2 for two ranks"),
    ("no rank on a host", "", "comm --hosts ada:0", 2, "0 ranks on ada", "1 to 64"),
    ("too many ranks on a host", "", "comm --hosts ada:999", 2, "999 ranks on ada", "1 to 64"),
    ("unequal ranks", "", "train --hosts ada:2,bob:1", 2, "ada has 2 ranks, bob has 1", "--nproc N for all"),
    ("ranks of one host alone", "", "train --hosts ada:1,bob", 2, "ada has 1 rank, bob has no number of ranks",
     "the same number on every host of the list, or none there and --nproc N for all"),
    ("ranks twice", "", "train --hosts ada:2 --nproc 1", 2, "--hosts gives 2 ranks to a host, --nproc 1", "leave one"),
    ("an IPv6 address without brackets", "", "check --hosts fe80::1", 2, "'fe80::1' is not a host", "[fe80::1]"),
    ("a range without its end", "", "check --hosts node[1-", 2, "'node[1-' is not a host", "node[1-4]"),
    ("an empty range", "", "check --hosts node[]", 2, "'node[]' is not a host", "node[1-4]"),
    ("a range backwards", "", "check --hosts node[4-1]", 2, "[4-1] in 'node[4-1]' is not a range", "node[1-4]"),
    ("a range of thousands", "", "check --hosts node[1-9999]", 2, "more than 1,024 hosts", "node[1-4]"),
    ("a number of hosts", "", "train --hosts 2", 2, "2 is a number, not a host", "--hosts ada,bob"),
    ("no host", "", "train --hosts ,,", 2, "--hosts names no host", "--hosts ada,bob"),
    ("nothing", "", "train --hosts ''", 2, "--hosts is empty", "leave it out"),
    ("a file that is not there", "", "train --hosts ./hosts", 2, "./hosts: no such file", "a file with a host"),
    *((f"no file {name}", "", f"train --hosts {name}", 2, f"--hosts: no file {name} in ", "a file with a host")
      for name in ("hosts.txt", "my.hosts", "hostfile")),
    ("a folder", "", "train --hosts ../", 2, "../: not a regular file", "a file with a host"),
    ("a file of another encoding", b"\xff\xfea", "train --hosts hosts", 2, "hosts cannot be read", "a text file"),
    ("a file of comments", b"# none\n", "train --hosts hosts", 2, "hosts names no host", "a host on each line"),
    ("slots that are no number", b"ada\nbob slots=two\n", "train --hosts hosts", 2, "hosts:2: 'bob slots=two' is not a host",
     "HOST slots=2"),
    ("a list in a file", b"ada,bob\n", "train --hosts hosts", 2, "hosts:1: 'ada,bob' is not a host", "fix: --hosts ada,bob"),
    ("ranks twice in a file", b"ada:2 slots=3\n", "train --hosts hosts", 2,
     "hosts:1: 'ada:2 slots=3' gives the number of ranks twice", "HOST:2 or HOST slots=2"),
    ("an unknown word in a file", b"ada\nbob max_slots=2\n", "train --hosts hosts", 2, "hosts:2: ", "HOST slots=2"),
    ("a host twice in a file", b"ada\nada\n", "train --hosts hosts", 2, "ada is listed twice", "ada:2"),
    ("an interpreter without hosts", "", "check --python python3.12", 2, "--python is about several hosts", "--hosts ada,bob"),
    ("an interface without hosts", "", "train --interface eth0", 2, "--interface is about several hosts", "--hosts ada,bob"),
    ("ports without hosts", "", "comm --ports 29400", 2, "--ports is about several hosts", "--hosts ada,bob"),
    ("variables without hosts", "", "train --env HOME", 2, "--env is about several hosts", "--hosts ada,bob"),
    ("a number of hosts to keep, without hosts", "", "train --min-hosts 2", 2, "--min-hosts 2 is about several hosts",
     "--hosts ada,bob"),
    ("no way back for scripts", "", "run --no-rejoin -- x.py", 2, "--no-rejoin is not an option of paceline run",
     "a script's lost host does not come back"),
    ("no way back without hosts", "", "train --no-rejoin", 2, "--no-rejoin is about several hosts", "--hosts ada,bob"),
    ("a sent folder without hosts", "", "run --sync . -- x.py", 2, "--sync and --no-sync are about several", "--hosts ada,bob"),
    ("sent and not sent", "", "run --hosts ada --sync . --no-sync -- x.py", 2, "contradict each other", "leave one"),
    ("more hosts to keep than hosts", "", "train --hosts ada,bob --min-hosts 3", 2, "--min-hosts 3, and --hosts names 2",
     "--min-hosts 2"),
    ("a port of the system", "", "train --hosts ada --ports 80-90", 2, "--ports 80-90 is not a range", "--ports 29400-29500"),
    ("ports backwards", "", "train --hosts ada --ports 30000-29000", 2, "is not a range of ports", "--ports 29400-29500"),
    ("a port by name", "", "train --hosts ada --ports http", 2, "--ports http is not a range", "--ports 29400-29500"),
    ("a network that is none", "", "train --hosts ada --interface 10.0.0.0/40", 2, "is not a network", "10.0.0.0/24"),
    ("a value in --env", "", "train --hosts ada --env TOKEN=secret", 2, "--env takes names", "export TOKEN=..."),
    ("a variable that is not set", "", "train --hosts ada --env NOT_SET_HERE", 1, "NOT_SET_HERE of --env is not set here",
     "export NOT_SET_HERE=..."),
    ("a profile of hosts", "", "profile --hosts ada,bob", 2, "profile runs on this host alone", "leave --hosts out"),
    ("accelerate on one host", "", "accelerate-config --hosts ada", 2, "--hosts names ada alone", "name two hosts"),
    ("accelerate on other hosts", "", "accelerate-config --hosts ada.invalid,bob.invalid", 2, "this host is not among --hosts",
     "ssh ada.invalid paceline accelerate-config"),
    ("accelerate on an unknown host", "", "accelerate-config --hosts no-such-host.invalid,localhost", 2,
     "no-such-host.invalid has no address here", "--main-address"),
    ("accelerate with hosts counted twice", "", "accelerate-config --hosts ada,bob --nnodes 2", 2, "counts the hosts itself",
     "leave --nnodes and --node-rank out"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "typed", "code", "said", "fix"), [case[1:] for case in TYPED], ids=[c[0] for c in TYPED]
)
def test_what_is_typed_about_hosts_is_refused_before_any_is_asked(
    file, typed, code, said, fix, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if file:
        Path("hosts").write_bytes(file)
    before = sorted(tmp_path.iterdir())
    assert run_command(shlex.split(typed)) == code
    error, help_line = capsys.readouterr().err.strip().splitlines()[-2:]
    assert error.startswith("error: ") and said in error
    assert help_line.startswith("  fix: ") and fix in help_line
    assert sorted(tmp_path.iterdir()) == before


ALIASES = """
Host stranger
  HostName 10.77.0.2
  HostKeyAlias stranger
Host changed
  HostName 10.77.0.2
  HostKeyAlias h1.changed
Host closed
  HostName 10.77.0.2
  Port 1
Host silent
  HostName 10.77.0.2
  Port 2299
Host locked
  HostName 10.77.0.2
  HostKeyAlias [h2]:{port}
  Port {port}
  User root
  IdentitiesOnly yes
  IdentityFile {folder}/other
  UserKnownHostsFile {folder}/known_hosts
Host dark
  HostName 10.77.0.77
Host closed silent dark
  HostKeyAlias [h2]:{port}
Host {names}
"""
TRAIN = (
    "train --device cpu --nproc 1 --num-steps 2 --depth 2 --n-embd 64 --head-dim 32 --sequence-len 64 --vocab-size 300"
    " --total-batch-size 512 --device-batch-size 4 --eval-every 0 --sample-every 0 --health-every 0 --data {folder}/text.txt"
    " --runs-dir {private}/runs --name bad"
)
RUN = "run --nproc 1 --runs-dir {private}/runs --name bad"
PLAN = "plan --device cpu --nproc 1"
OLD_PYTHON = """\
#!/bin/sh
exec {python} -c 'import sys; sys.version_info = (3, 9, 2, "final", 0); exec(sys.argv[1])' "$2"
"""
LISTEN = "import socket, time; s = socket.create_server(('', {port})); print('ready', flush=True); time.sleep(3600)"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    with namespaced_hosts(2, tmp_path_factory.mktemp("bad")) as made:
        lines = (f"the {number} quick brown foxes jump over {number * number} lazy dogs\n" for number in range(900))
        (made.folder / "text.txt").write_text("".join(lines))
        (made.folder / "script.py").write_text("print('started')\n")
        desk = made.on("h1", made.private) / "desk"  # h1 alone has it
        desk.mkdir()
        (desk / "x.py").write_text("print('started')\n" + "#" * 100_000)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", made.folder / "other"], check=True)
        with made.known_hosts().open("a") as file:
            key = " ".join((made.folder / "h1" / "hostkey.pub").read_text().split()[:2])
            file.write(f"h1.changed {key}\n")
        config = made.folder / "config"
        general = config.read_text().split("\n", 2)[2]
        names = "h1 h2 stranger changed"
        config.write_text(
            ALIASES.format(folder=made.folder, port=PORT, names=names) + general + "Host * !locked\n" + general
        )
        yield made


def words(hosts: Hosts, text: str, **values: object) -> list[str]:
    places = {"folder": hosts.folder, "private": hosts.private, "python": sys.executable, **values}
    return [word.format(**places) for word in shlex.split(text)]


def server_of(hosts: Hosts, host: str) -> psutil.Process:
    """Returns the ssh server of a host, whose mounts are what a login there finds."""
    return next(process for process in all_processes(hosts, host) if "-D" in process.cmdline())


def running(hosts: Hosts) -> list[str]:
    """Returns what still runs on any host some seconds later, but for the ssh servers."""
    deadline = time.monotonic() + 20
    while True:
        commands = [" ".join(cmdline(process)) for host in hosts.names for process in all_processes(hosts, host)]
        left = [command for command in commands if command and " -D -f " not in command]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def remains(hosts: Hosts) -> list[str]:
    """Returns what lies in any folder of runs, here or as a copy."""
    patterns = ("h*/private/runs/*", "h*/cache/paceline/runs/*/*", "h*/cache/paceline/data/**/*.part")
    return [str(path.relative_to(hosts.folder)) for pattern in patterns for path in hosts.folder.glob(pattern)]


@contextmanager
def as_it_is(hosts: Hosts) -> Iterator[None]:
    yield


@contextmanager
def mounted(hosts: Hosts, place: Path, *options: str) -> Iterator[None]:
    """Mounts something at a place of h2's logins; everything else sees what was there before."""
    inside = ["nsenter", "-t", str(server_of(hosts, "h2").pid), "-m"]
    if not place.exists():
        place.mkdir(parents=True)
    subprocess.run([*inside, "mount", *options, str(place)], check=True, capture_output=True)
    try:
        yield
    finally:
        running(hosts)
        subprocess.run([*inside, "umount", str(place)], check=True, capture_output=True)


def cache_of(hosts: Hosts) -> Path:
    return hosts.folder / "h2" / "cache"


@contextmanager
def cache_is_a_file(hosts: Hosts) -> Iterator[None]:
    cache = cache_of(hosts)
    cache.mkdir(exist_ok=True)
    before = cache.rename(cache.with_name("before"))
    cache.write_text("a file, not a folder")
    try:
        yield
    finally:
        cache.unlink()
        before.rename(cache)


def cache_mount(options: str, folder: str = "") -> Callable[[Hosts], AbstractContextManager[None]]:
    """An empty file system in place of h2's cache, or of a folder in it."""
    return lambda hosts: mounted(hosts, cache_of(hosts) / folder, "-t", "tmpfs", "-o", options, "tmpfs")


@contextmanager
def listening(hosts: Hosts, host: str, port: int) -> Iterator[None]:
    """A program that listens on a port and answers nothing."""
    process = hosts.start(host, sys.executable, "-c", LISTEN.format(port=port), stdout=subprocess.PIPE)
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.communicate()


@contextmanager
def no_login(hosts: Hosts) -> Iterator[None]:
    text = Path("/etc/passwd").read_text()
    users = [user.rpartition(":")[0] + ":/usr/sbin/nologin" if ":0:0:" in user else user for user in text.splitlines()]
    (hosts.folder / "passwd").write_text("\n".join(users) + "\n")
    with mounted(hosts, Path("/etc/passwd"), "--bind", str(hosts.folder / "passwd")):
        yield


@contextmanager
def a_firewall(hosts: Hosts) -> Iterator[None]:
    if shutil.which("nft") is None:
        pytest.skip("nft is missing")
    table = "add table inet f; add chain inet f i { type filter hook input priority 0; };"
    rule = f"add rule inet f i iif eth0 tcp dport != {PORT} ct state new reject with tcp reset"
    assert hosts.run("h2", "nft", table + rule).returncode == 0
    try:
        yield
    finally:
        hosts.run("h2", "nft", "flush", "ruleset")


@contextmanager
def an_old_python(hosts: Hosts) -> Iterator[None]:
    path = hosts.folder / "python3.9"
    path.write_text(OLD_PYTHON.format(python=sys.executable))
    path.chmod(0o755)
    yield


@contextmanager
def no_ssh_here(hosts: Hosts) -> Iterator[dict[str, str]]:
    yield {"PATH": str(hosts.private)}


def site_packages(venv: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    return next(venv.glob("lib/python*/site-packages"))


@contextmanager
def no_torch(hosts: Hosts) -> Iterator[None]:
    if not (venv := hosts.folder / "empty").exists():
        site_packages(venv)
    yield


@contextmanager
def another_torch(hosts: Hosts) -> Iterator[None]:
    """An interpreter with this one's packages, and a torch of the same files whose version is another."""
    import torch

    real, packages = Path(torch.__file__).parent, site_packages(hosts.folder / "other-torch")
    (packages / "here.pth").write_text(f"{real.parent}\n")
    (packages / "torch").mkdir()
    for path in real.iterdir():
        if path.name not in ("version.py", "__pycache__"):
            (packages / "torch" / path.name).symlink_to(path)
    version = (real / "version.py").read_text().replace(torch.__version__, "2.9.1+cpu")
    (packages / "torch" / "version.py").write_text(version)
    yield


# what is wrong on a host, and what is typed on h1: exit code, words of the output, words of the fix
ON_HOSTS = [
    ("an unknown name", as_it_is, f"{PLAN} --hosts h9", 1, "h9: no host of this name is known", "~/.ssh/config"),
    ("a host without a known key", as_it_is, f"{PLAN} --hosts stranger", 1, "its host key is not known here",
     "ssh stranger true, and compare the fingerprint"),
    ("a host with another key", as_it_is, f"{PLAN} --hosts changed", 1, "its host key is not the one", "ssh-keygen -R"),
    ("a user's key that is refused", as_it_is, f"{PLAN} --hosts locked", 1, "it refuses this user's keys", "ssh-copy-id locked"),
    ("no ssh here", no_ssh_here, f"{PLAN} --hosts h2", 1, "ssh is not installed here", "apt install openssh-client"),
    ("an old interpreter", an_old_python, f"{PLAN} --hosts h2 --python {{folder}}/python3.9", 1, "Python 3.9 there, 3.11 or",
     "--python PATH"),
    ("a read-only home", cache_mount("ro"), f"{PLAN} --hosts h2", 1, "could not keep the code: Read-only file system",
     "export XDG_CACHE_HOME=DIR"),
    ("a login that runs nothing", no_login, f"{PLAN} --hosts h2", 1, "python3 cannot be run there", "ssh h2 python3 --version"),
    ("this host by two names", as_it_is, f"{RUN} --hosts h1,localhost -- {{folder}}/script.py", 2,
     "h1 and localhost are both this host", "h1:2"),
    ("two hosts that do not answer", as_it_is, "check --hosts h9,closed", 1, "closed: no ssh server answers",
     "apt install openssh-server"),
    ("an unknown host, unchecked", as_it_is, f"{RUN} --hosts h1,h9 --no-check -- {{folder}}/script.py", 1,
     "host h9: no host of this name is known", "~/.ssh/config"),
]  # fmt: skip

# more of them, which take longer or are of the kind of one above
LONGER = [
    ("a name that is not ASCII", as_it_is, f"{PLAN} --hosts müller", 1, "müller: no host of this name", "~/.ssh/config"),
    ("no such interpreter", as_it_is, f"{PLAN} --hosts h2 --python /no/python", 1, "no /no/python there",
     "--python is one path for all hosts"),
    ("an interpreter that is none", as_it_is, f"{PLAN} --hosts h2 --python /bin/ls", 1, "/bin/ls cannot be run there",
     "--python PATH"),
    ("a cache that is a file", cache_is_a_file, f"{PLAN} --hosts h2", 1, "could not keep the code: Not a directory",
     "ls -ld ~ ~/.cache"),
    ("a full cache", cache_mount("size=100k"), f"{PLAN} --hosts h2", 1, "could not keep the code: No space left",
     "ssh h2 df -h {folder}/h2/cache"),
    ("a server that hangs", partial(listening, host="h2", port=2299),
     f"{PLAN} --hosts silent", 1, "it cannot be reached", "ping 10.77.0.2"),
    ("the only port in use", partial(listening, host="h1", port=29400), f"{TRAIN} --hosts h1,h2 --ports 29400", 1,
     "none of the ports 29400 is free on h1", "other --ports"),
    ("a rank without a peer", as_it_is, "comm --device cpu --nproc 1 --hosts h2", 1, "one process has no peer", "--nproc 2"),
    ("no room for the text", cache_mount("size=16k", "paceline/data"), f"{TRAIN} --hosts h1,h2", 1,
     "host h2: No space left on device: {folder}/h2/cache/paceline/data/", "ssh h2 df -h {folder}/h2/cache/paceline/data/"),
    ("an unknown host of a training", as_it_is, f"{TRAIN} --hosts h1,h9", 1, "host-unreachable  h9: no host of this name",
     "~/.ssh/config"),
    ("a host that is off", as_it_is, f"{PLAN} --hosts dark", 1, "it cannot be reached", "ping 10.77.0.77"),
    ("another host by two names", as_it_is, f"{RUN} --hosts h2,10.77.0.2 -- {{folder}}/script.py", 1,
     "hosts-same  h2 and 10.77.0.2 are one host", "--hosts h2:2"),
    ("a GPU that is nowhere", as_it_is, f"{RUN} --device cuda --hosts h2 -- {{folder}}/script.py", 1, "no GPU", "--device cpu"),
    ("no torch there", no_torch, f"{RUN} --hosts h1,h2 --python {{folder}}/empty/bin/python -- {{folder}}/script.py", 1,
     "torch-missing    h2: no torch in", "/empty/bin/python -m pip install torch"),
    ("another torch there", another_torch,
     f"{RUN} --hosts h1,h2 --python {{folder}}/other-torch/bin/python -- {{folder}}/script.py", 1,
     "2.9.1+cpu on h2", "-m pip install torch=="),
    ("a firewall", a_firewall, f"{TRAIN} --hosts h1,h2", 1, "hosts-unconnected  h1 cannot connect to h2", "sudo ufw allow"),
    ("a disk for copies that is read-only", cache_mount("ro", "paceline/runs"),
     f"{TRAIN} --hosts h1,h2", 1, "host h2: Read-only file system",
     "ls -ld ~ ~/.cache"),
    ("an interface of none", as_it_is, f"{TRAIN} --hosts h1,h2 --interface eth9", 1, "h1: --interface eth9 is not up here",
     "--interface 10.77.0.0/24"),
    ("an interface of none, unchecked", as_it_is, f"{TRAIN} --hosts h1,h2 --interface eth9 --no-check", 1,
     "host h2: no interface eth9 with an address; there are lo 127.0.0.1, eth0 10.77.0.2", "--interface NAME"),
    ("an interface of none for a script", as_it_is, f"{RUN} --hosts h1,h2 --interface eth9 -- {{folder}}/script.py", 1,
     "h2: --interface eth9 is not up here", "--interface 10.77.0.0/24"),
    ("a firewall and one port", a_firewall, f"{RUN} --hosts h1,h2 --ports 29400 -- {{folder}}/script.py", 1,
     "h1 cannot use port 29400 of h2 for the store", "sudo ufw allow 29400/tcp"),
    ("a port in use by a run, for a measurement", partial(listening, host="h1", port=29400),
     "comm --device cpu --nproc 1 --hosts h1,h2 --ports 29400", 1,
     "none of the ports 29400 is free on h1", "other --ports"),
    ("a batch that does not divide", as_it_is, f"{TRAIN.replace('size 512', 'size 256')} --hosts h1,h2", 1,
     "not a multiple of the 512 tokens that 2 processes take", "total_batch_size to 512"),
    ("a host of another user", as_it_is, f"{TRAIN} --hosts h1,nobody@h2 --no-check", 1, "host h2: it refuses this user's keys",
     "ssh-copy-id nobody@h2"),
    ("no packages there, unchecked", no_torch, f"{TRAIN} --hosts h1,h2 --no-check --python {{folder}}/empty/bin/python", 1,
     "No module named 'psutil'", "paceline check --hosts h1,h2 --python"),
    ("no room for a script", cache_mount("size=8k", "paceline/scripts"),
     f"{RUN} --hosts h1,h2 --no-check -- {{private}}/desk/x.py", 1,
     "host h2: No space left on device: {folder}/h2/cache/paceline/scripts/", "ssh h2 df -h {folder}/h2/cache/paceline/scripts/"),
]  # fmt: skip


def check_case(hosts: Hosts, case: Sequence) -> None:
    """Types a command on h1, and checks what it prints and what it leaves."""
    prepare, typed, code, *texts = case
    said, fix = (text.replace("{folder}", str(hosts.folder)) for text in texts)
    with prepare(hosts) as variables:
        env = [f"{name}={value}" for name, value in (variables or {}).items()]
        command = ["/usr/bin/env", *env, sys.executable, "-m", "paceline.cli", *words(hosts, typed)]
        answer = hosts.run("h1", *command, timeout_s=120.0)
        text = answer.stdout + answer.stderr
        assert answer.returncode == code, text
        assert "Traceback" not in text
        assert said in text, text
        if typed.startswith("train") and "\nrun     " in text:
            assert "is removed: nothing was started" in text
        assert text.count("error: ") == (0 if typed.startswith("check") else 1), text
        lines = text.splitlines()
        at = next(i for i, line in enumerate(lines) if said in line and line.startswith(("error: ", "stop ")))
        following = " ".join(lines[at : at + 4])
        assert fix in following, text
        assert "fix" in following, text
    assert running(hosts) == []
    left = remains(hosts)
    for path in left:
        shutil.rmtree(hosts.folder / path)  # the next case begins without it
    assert left == []


@needs_namespaces
@pytest.mark.parametrize("case", [case[1:] for case in ON_HOSTS], ids=[case[0] for case in ON_HOSTS])
def test_what_is_wrong_on_a_host_is_reported_with_its_fix_and_leaves_nothing(hosts, case):
    check_case(hosts, case)


@pytest.mark.soak
@needs_namespaces
@pytest.mark.parametrize("case", [case[1:] for case in LONGER], ids=[case[0] for case in LONGER])
def test_what_is_wrong_later_is_reported_with_its_fix_and_leaves_nothing(hosts, case):
    check_case(hosts, case)
