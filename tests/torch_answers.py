"""
What a probe has found out about torch, for the caches of hosts that are made later in the same session of tests.

Finding it out takes an import of seconds. The answer lies in a host's cache beside the variables and files that it holds for, so a
host where these differ asks again.
"""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.check.probes.facts import gather_facts
from paceline.rundir import write_atomic


def answers_of_session(folder: Path) -> Path:
    """Returns where the answers lie: in pytest's folder of the session, which all its processes share, or in this one alone."""
    session = next((path for path in folder.parents if path.parent.name.startswith("pytest-of-")), folder)
    return session / "torch-answers"


@contextmanager
def shared_answers(caches: Mapping[str, Path], *, answers: Path) -> Iterator[None]:
    """Gives each host's cache the newest answer of a host of its name, else of any, and keeps the one that is there at the end.

    By the name of the host: a shell of ssh may have other variables than this process, whose answer is there from the first on.
    """
    answers.mkdir(exist_ok=True)
    with answers.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(answers.iterdir()):
            gather_facts(probes=["torch"], cached_torch=answers / "here")
    files = {name: cache / "paceline" / "torch.json" for name, cache in caches.items()}
    for name, file in files.items():
        if answer := next((path for path in (answers / name, *sorted(answers.iterdir())) if path.exists()), None):
            file.parent.mkdir(parents=True)
            file.write_bytes(answer.read_bytes())
    yield
    for name, file in files.items():
        if file.exists():
            write_atomic(answers / name, file.read_text())
