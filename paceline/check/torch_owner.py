"""
Which Python a folder with a torch belongs to, and so the command that changes that torch and no other.

`pip install` changes the torch of the Python that runs it. A finding about a torch elsewhere (`paceline torch check --path`)
needs the pip of its venv, the --prefix or --target that it was installed to, or, where no pip put it there, another way.
"""

import importlib.metadata
import re
import shlex
import site
import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.kernel_files import names_in

PIP, RECIPE, TIMING = "pip install ", "paceline torch recipe", "time python "  # how the fixes of findings begin
LAYOUT = re.compile(r"(?P<prefix>.*)/lib\w*/python(?P<version>\d(?:\.\d+)?)/(?P<kind>site|dist)-packages")
MODULE = re.compile(r"_C\.cpython-(\d)(\d+)-.*")
REPLACING = re.compile(r"--(?:force-reinstall|upgrade) ")
OURS = f"{sys.version_info[0]}.{sys.version_info[1]}"


@dataclass(frozen=True)
class Installer:
    """command: up to what is installed. apart: into a folder beside the Python, whose own packages must stay."""

    command: str
    apart: bool = False

    def install(self, words: str) -> str:
        return f"{self.command} {REPLACING.sub('', words) if self.apart else words}"


def fix_at(fix: str, folder: Path) -> str:
    """A finding's fix, for the torch in `folder`. folder: what is put on sys.path, a site-packages or a source tree."""
    quoted = shlex.quote(str(folder))
    if fix.startswith(TIMING):
        return f"time env PYTHONPATH={quoted} {shlex.quote(sys.executable)} {fix.removeprefix(TIMING)}"
    if not fix.startswith((PIP, RECIPE)):
        return fix
    if (folder / "CMakeLists.txt").is_file():
        newer = f"git -C {quoted} pull --recurse-submodules && " if "--upgrade" in fix else ""
        return f"{newer}paceline torch build --source {quoted} --prefix {shlex.quote(f'{folder}-installed')}"
    installer = installer_of(folder)
    words = fix.removeprefix(PIP) if fix.startswith(PIP) else None
    if installer is None:
        venv = shlex.quote(f"{folder}-venv")
        begin = (
            f"no pip put it into {folder}; instead: {python_of(version_in(folder))} -m venv {venv} && {venv}/bin/python"
        )
        return f"{begin} -m pip install {REPLACING.sub('', words or 'torch')}"
    return f"{RECIPE}, with {installer.command} for its pip install" if words is None else installer.install(words)


def installer_of(folder: Path) -> Installer | None:
    """The pip that changes this folder; None where no pip put the torch there."""
    layout = LAYOUT.fullmatch(str(folder))
    if layout is None:
        to = f"--upgrade --target {shlex.quote(str(folder))}"
        ours = python_of(version_in(folder))
        return Installer(f"{ours} -m pip install {to}", apart=True) if "torch" in versions_in(folder) else None
    prefix, version = Path(layout["prefix"]), layout["version"]
    if str(prefix) == site.getuserbase():
        return Installer(f"{python_of(version)} -m pip install --user")
    root = prefix.parent if layout["kind"] == "dist" and prefix.name == "local" else prefix  # Debian's /usr/local
    named = (root / "bin" / name for name in (f"python{version}", "python3", "python"))
    python = next((shlex.quote(str(path)) for path in named if path.exists()), None)
    if python is None:
        to = f"--prefix {shlex.quote(str(prefix))} --ignore-installed"
        return Installer(f"{python_of(version)} -m pip install {to}", apart=True)
    has_pip = (folder / "pip").is_dir() or not (root / "pyvenv.cfg").is_file()
    return Installer(f"{python} -m pip install" if has_pip else f"pip --python {python} install")


def python_of(version: str) -> str:
    return shlex.quote(sys.executable) if version in (OURS, OURS[0]) else f"python{version}"


def version_in(folder: Path) -> str:
    """Python's version that the torch was compiled for; this one's where its files do not tell."""
    found = next((match for name in names_in(folder / "torch") if (match := MODULE.fullmatch(name))), None)
    return f"{found[1]}.{found[2]}" if found else OURS


def versions_in(folder: Path) -> dict[str, str]:
    """Packages that an installer recorded in this folder."""
    found = importlib.metadata.distributions(path=[str(folder)])
    return {re.sub(r"[-_.]+", "-", each.metadata["Name"] or "").lower(): each.version for each in found}
