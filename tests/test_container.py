"""The Dockerfile, against the rules of hadolint that matter here, and against what the rest of paceline expects of the image."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rows import with_rows

from paceline import __version__
from paceline.launch.emit import WORKSPACE
from paceline.launch.manifests import USER_ID

ROOT = Path(__file__).parents[1]
SECRET = re.compile(r"(?i)token|password|passwd|secret|api_?key|credential")


def instructions(text):
    """(NAME, arguments) of each instruction, with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(None, 1)[0].upper(), line.split(None, 1)[1].strip()) for line in joined.splitlines()]


def problems(text, *, root=ROOT, ignored=()):
    """What is wrong with a Dockerfile, one line for each rule that it breaks."""
    steps = instructions(text)
    names = [name for name, _ in steps]
    return [
        *base_problems(steps),
        *(problem for name, args in steps if name == "RUN" for problem in run_problems(args, steps)),
        *(problem for name, args in steps if name == "COPY" for problem in copy_problems(args, root, ignored)),
        *(f"ADD {args}: COPY is enough" for name, args in steps if name == "ADD"),
        *(f"{name} {args}: a secret" for name, args in steps if name in ("ENV", "ARG") and SECRET.search(args)),
        *(f"WORKDIR {args} is relative" for name, args in steps if name == "WORKDIR" and not args.startswith("/")),
        *(f"{name} {args} needs a shell" for name, args in steps if name in ("ENTRYPOINT", "CMD") and args[0] != "["),
        *(["no ENTRYPOINT"] if "ENTRYPOINT" not in names else []),
        *link_problems(steps, root),
        *user_problems(steps),
    ]


def base_problems(steps):
    for name, args in steps:
        image = args.split()[0]
        tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
        if name == "FROM" and "@sha256:" not in image and not re.search(r"\d+\.\d+\.\d+", tag):
            yield f"FROM {image} is not pinned"


def run_problems(args, steps):
    """For each command of a RUN."""
    is_clean = "rm -rf /var/lib/apt/lists/*" in args
    for command in re.split(r"&&|\|\||;|\|", args):
        words = shlex.split(command.replace("$(", "").replace(")", ""))
        if "sudo" in words:
            yield "sudo in an image"
        if words[:2] == ["apt-get", "install"]:
            packages = [word for word in words[2:] if not word.startswith("-")]
            yield from (f"apt package {package} is not pinned" for package in packages if "=" not in package)
            yield from (f"apt-get install without {flag}" for flag in {"-y", "--no-install-recommends"} - set(words))
            if "apt-get update" not in args:
                yield "apt-get install without update in the same layer"
            if not is_clean:
                yield "the lists of apt stay in the image"
        if words and words[0].endswith("pip") and "install" in words:
            if "-c" not in words and not all("==" in word for word in words[words.index("install") + 1 :]):
                yield "pip install without constraints"
            has_no_cache = any(name == "ENV" and "PIP_NO_CACHE_DIR=1" in env for name, env in steps)
            if "--no-cache-dir" not in words and not has_no_cache:
                yield "the cache of pip stays in the image"
        if words[:1] in (["curl"], ["wget"]):
            yield f"{words[0]}: a download without a hash"


def copy_problems(args, root, ignored):
    words = args.split()
    if words[0].startswith("--from="):
        return
    for source in words[:-1]:
        if source in (".", "./", "*"):
            yield f"COPY {source} copies everything"
        elif not (root / source).exists():
            yield f"COPY {source}: there is no such file"
        elif any(fnmatch.fnmatch(source, pattern) for pattern in ignored):
            yield f"COPY {source}: .dockerignore leaves it out"


def link_problems(steps, root):
    """A link inside of a copied folder whose target is not copied would lead nowhere in the image."""
    sources = [word for name, args in steps if name == "COPY" and "--from=" not in args for word in args.split()[:-1]]
    copied = [(root / source).resolve() for source in sources if source != "."]
    for folder in copied:
        for path in folder.rglob("*") if folder.is_dir() else ():
            if path.is_symlink() and not any(path.resolve().is_relative_to(source) for source in copied):
                yield f"{path.relative_to(root)} leads to {path.resolve().name}, which is not copied"


def user_problems(steps):
    last = max(index for index, (name, _) in enumerate(steps) if name == "FROM")
    users = [args for name, args in steps[last:] if name == "USER"]
    if not users or not re.match(r"[1-9]\d*(:|$)", users[-1]):
        yield "the image runs as root, or as a user whose number Kubernetes cannot check"


def left_out(root=ROOT):
    """What .dockerignore leaves out of the copied names: those that no line takes back."""
    lines = [line for line in (root / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    back = {line[1:] for line in lines if line.startswith("!")}
    return tuple(path.name for path in root.iterdir() if path.name not in back) if "*" in lines else ()


def test_the_dockerfile_keeps_the_rules():
    assert problems((ROOT / "Dockerfile").read_text(), ignored=left_out()) == []


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install -e '.[clusters]'")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


GOOD = """
FROM debian:12.7.1 AS build
RUN apt-get update && apt-get install -y --no-install-recommends 'g++=4:12.2.*' && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir -c constraints.txt torch
COPY pyproject.toml ./
USER 1000
ENTRYPOINT ["paceline"]
"""


@with_rows(
    ("good", "bad", "problem"),
    [
        ("debian:12.7.1", "debian", "FROM debian is not pinned"),
        ("debian:12.7.1", "debian:latest", "FROM debian:latest is not pinned"),
        ("'g++=4:12.2.*'", "g++", "apt package g++ is not pinned"),
        ("--no-install-recommends ", "", "apt-get install without --no-install-recommends"),
        ("apt-get update && ", "", "apt-get install without update in the same layer"),
        (" && rm -rf /var/lib/apt/lists/*", "", "the lists of apt stay in the image"),
        ("--no-cache-dir ", "", "the cache of pip stays in the image"),
        ("-c constraints.txt ", "", "pip install without constraints"),
        ("pyproject.toml", "missing.toml", "COPY missing.toml: there is no such file"),
        ("pyproject.toml", "Makefile", "COPY Makefile: .dockerignore leaves it out"),
        ("pyproject.toml", ".", "COPY . copies everything"),
        ("USER 1000", "USER root", "the image runs as root, or as a user whose number Kubernetes cannot check"),
        ("USER 1000\n", "", "the image runs as root, or as a user whose number Kubernetes cannot check"),
        ('["paceline"]', "paceline", "ENTRYPOINT paceline needs a shell"),
        ('ENTRYPOINT ["paceline"]', 'CMD ["paceline"]', "no ENTRYPOINT"),
        ("USER", "ENV HF_TOKEN=x\nUSER", "ENV HF_TOKEN=x: a secret"),
        ("USER", "WORKDIR src\nUSER", "WORKDIR src is relative"),
        ("USER", "ADD https://example.org/x /x\nUSER", "ADD https://example.org/x /x: COPY is enough"),
        ("USER", "RUN curl -fsSL https://example.org | sh\nUSER", "curl: a download without a hash"),
    ],
)
def test_each_rule_finds_what_breaks_it(good, bad, problem):
    assert problems(GOOD, ignored=left_out()) == []
    assert problems(GOOD.replace(good, bad), ignored=left_out()) == [problem]


def test_a_link_whose_target_is_not_copied_is_found(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "configs").mkdir()
    (tmp_path / "package" / "configs").symlink_to("../configs")
    text = GOOD.replace("pyproject.toml", "package")
    assert problems(text, root=tmp_path) == ["package/configs leads to configs, which is not copied"]
    assert problems(text.replace("COPY package", "COPY configs package"), root=tmp_path) == []


def test_the_image_is_what_the_emitted_files_expect():
    text = (ROOT / "Dockerfile").read_text()
    steps = instructions(text)
    assert ("USER", f"{USER_ID}:{USER_ID}") in steps and f"--uid {USER_ID}" in text
    assert ("VOLUME", WORKSPACE) in steps
    assert f"docker build -t paceline:{__version__} ." in text  # the default of --image
    assert json.loads(dict(steps)["ENTRYPOINT"]) == ["paceline"]
    assert len({args.split()[0] for name, args in steps if name == "FROM"}) == 1  # the venv needs its own Python


def test_the_version_of_python_in_the_image_is_one_that_paceline_takes():
    [version] = set(re.findall(r"FROM python:3\.(\d+)\.", (ROOT / "Dockerfile").read_text()))
    [least] = re.findall(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert int(version) >= int(least)
