"""
`paceline torch`: whether a PyTorch is right, by its facts and by trials of it, and which one fits this host.

The trials run in a separate process (torch_install.py), since a broken build may crash it or never return. No torch here. A finding
about a torch in another folder (`--path`) needs another fix, because `pip install` changes the torch of the Python that runs it:
the pip of that venv, the --prefix or --target of that install, or a new venv where no pip installed it.
"""

import importlib.metadata
import json
import os
import platform
import re
import select
import shlex
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.check.format import format_findings
from paceline.check.probes.facts import PROBES, ask_probes, gather_facts
from paceline.check.ready import find_findings, load_verdicts
from paceline.check.torch_recipe import (
    AUTO,
    Capability,
    Recipe,
    Tools,
    make_recipe,
    parse_archs,
    split_archs,
    write_script,
)
from paceline.check.verdicts.rules import Facts, Intent, at, version_of, visible_gpus
from paceline.errors import Finding, PacelineError, UsageError, expand_home
from paceline.plan.host import names_in
from paceline.units import format_exit

PROOF = (sys.executable, "-m", "paceline.check.torch_install")  # without -P, as a worker is started
DEADLINE_S = 60.0  # for one trial: a first import from a slow disk, the first kernel on a card
ENDING_S = 2.0
BUILD = "paceline torch recipe --script build.sh && "
PIP, RECIPE, TIMING = "pip install ", "paceline torch recipe", "time python "  # how the fixes of findings begin
PROBES_OF_TORCH = ("torch", "gpu", "host", "python")  # what the verdicts on torch are about
INSTALLED = "lib*/python*.*/*-packages/torch/__init__.py"  # below a prefix
LAYOUT = re.compile(r"(?P<prefix>.*)/lib\w*/python(?P<version>\d(?:\.\d+)?)/(?P<kind>site|dist)-packages")
MODULE = re.compile(r"_C\.cpython-(\d)(\d+)-.*")
REPLACING = re.compile(r"--(?:force-reinstall|upgrade) ")
OURS = f"{sys.version_info[0]}.{sys.version_info[1]}"


@dataclass(frozen=True)
class Proof:
    """A trial and its result. seconds: None where it did not finish. message: what it returned, or how it failed."""

    name: str
    ok: bool
    seconds: float | None
    message: str | None


@dataclass(frozen=True)
class TorchCheck:
    """The facts of a torch, the findings that follow from them and the results of its trials."""

    facts: Facts
    findings: tuple[Finding, ...]
    proofs: tuple[Proof, ...]

    @property
    def problems(self) -> list[str]:
        """The trials that failed, and the findings with which a run would fail; none where the torch is right."""
        stops = [finding.id for finding in self.findings if finding.severity == "stop"]
        return [proof.name for proof in self.proofs if not proof.ok] + stops

    def to_json(self) -> dict[str, Any]:
        return {
            "right": not self.problems,
            "torch": self.facts["torch"],
            "proofs": [
                {"name": proof.name, "ok": proof.ok, "seconds": proof.seconds, "said": proof.message}
                for proof in self.proofs
            ],
            "findings": [finding.to_json() for finding in self.findings],
        }


def check_torch(path: Path | None = None, *, on_trial: Callable[[str], None] | None = None) -> TorchCheck:
    """Checks the torch of this Python, or at `path`: site-packages, a venv, the torch folder or a source tree."""
    torch_path = None if path is None else locate_torch(path)
    facts = gather_facts(torch_path=torch_path, probes=PROBES_OF_TORCH)
    if at(facts, "probes.torch.ok") and facts["torch"] is None:
        raise PacelineError(f"no torch in {sys.executable}", fix="paceline torch recipe")
    if torch_path is not None:  # the packages next to that torch, not those of this Python
        facts["packages"] = dict.fromkeys(facts["packages"] or ()) | versions_in(torch_path)
    ids = {verdict.id for verdict in load_verdicts() if verdict.subject == "torch"}
    findings = [finding for finding in find_findings([facts], Intent(command="torch")) if finding.id in ids]
    if torch_path is not None:
        findings = [replace(finding, fix=fix_at(finding.fix, torch_path)) for finding in findings]
    error = at(facts, "torch.error") or at(facts, "probes.torch.error")
    if error and error.startswith("no answer"):  # the probe has already waited
        proofs = [Proof("import", False, None, error)]
    else:
        proofs = list(prove_torch(torch_path, deadline_s=DEADLINE_S, on_trial=on_trial))
    return TorchCheck(facts, tuple(findings), tuple(proofs))


def locate_torch(path: Path) -> Path:
    """Returns the folder that must be on sys.path for `import torch` to load the one at `path`."""
    path = expand_home(path).absolute()
    if not path.exists():
        raise PacelineError(f"--path {path}: there is no such folder", fix="a folder with a torch/ in it")
    if path.name == "torch" and (path / "__init__.py").is_file():
        path = path.parent
    if (path / "torch/__init__.py").is_file():
        if (path / "CMakeLists.txt").is_file() and not list((path / "torch").glob("_C*.so")):
            raise PacelineError(
                f"{path} is a source tree that is not built: torch/_C*.so is missing",
                fix=f"{BUILD}SOURCE={shlex.quote(str(path))} bash build.sh",
            )
        return path
    inits = [*path.glob(INSTALLED), *(path / "local").glob(INSTALLED)]
    folders = {init.parents[2].name.removeprefix("python").rstrip("t"): init.parents[1] for init in inits}  # 3.13t too
    if OURS in folders:
        return folders[OURS]
    if folders:
        raise PacelineError(
            f"{path} has a torch for Python {max(folders, key=lambda version: version_of(version) or ())}, this is Python {OURS}",
            fix=f"install paceline there as you did here, then {path}/bin/paceline torch check",
        )
    raise PacelineError(
        f"no torch in {path}", fix="a site-packages folder, a venv, or a source tree: it has torch/__init__.py"
    )


def prove_torch(
    torch_path: Path | None, *, deadline_s: float, on_trial: Callable[[str], None] | None = None
) -> Iterator[Proof]:
    """Yields each trial as it ends; the last is the one during which the process crashed or hung."""
    command = (*PROOF, str(torch_path)) if torch_path else PROOF
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with (
        tempfile.TemporaryFile() as stderr,
        subprocess.Popen(command, 0, stdin=null, stdout=pipe, stderr=stderr, start_new_session=True) as process,
    ):
        assert process.stdout is not None
        current: str | None = "start"
        try:
            while select.select([process.stdout], [], [], deadline_s)[0]:
                line = process.stdout.readline()
                if not line.endswith(b"\n"):
                    break
                event = json.loads(line)
                current = event.get("begin")
                if current is None:
                    yield Proof(**event)
                elif on_trial is not None:
                    on_trial(current)
            else:
                yield Proof(current or "end", False, None, f"no answer in {deadline_s:g} s")
                return
            exit_code = process.wait(ENDING_S)
            if exit_code != 0:
                stderr.seek(0)
                message = describe_end(exit_code, stderr.read().decode(errors="replace"))
                yield Proof(current or "end", False, None, message)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def describe_end(exit_code: int, stderr: str) -> str:
    """Returns `ended by SIGSEGV; its last line: ...`."""
    end, lines = format_exit(exit_code), stderr.strip().splitlines()
    return f"{end}; its last line: {lines[-1][:160]}" if lines else end


def format_check(check: TorchCheck) -> str:
    """Returns the check as text."""
    torch: Mapping[str, Any] = check.facts.get("torch") or {}
    lines = [
        f"torch   {torch.get('version') or 'n/a'}, {torch.get('build') or 'n/a'}, {torch.get('path') or 'n/a'}",
        f"built   {', '.join(describe_parts(torch))}",
        *describe_libraries(torch),
        "",
    ]
    width = max(len(proof.name) for proof in check.proofs)
    for proof in check.proofs:
        duration = "" if proof.seconds is None else f"{proof.seconds:.2f} s"
        result = "right" if proof.ok else "WRONG"
        lines.append(f"{result}   {proof.name:<{width}}  {duration:>8}  {proof.message or ''}".rstrip())
    if check.findings:
        lines += ["", format_findings(check.findings)]
    end = f"this torch is not right: {', '.join(check.problems)}" if check.problems else "this torch is right"
    return "\n".join([*lines, "", end])


def describe_parts(torch: Mapping[str, Any]) -> list[str]:
    """Returns CUDA and its libraries, the architectures, and the parts of torch.distributed."""
    cuda = torch.get("cuda")
    parts = [f"CUDA {cuda}" if cuda else f"ROCm {torch['hip']}" if torch.get("hip") else "no CUDA"]
    parts += [f"{name} {torch[key]}" for name, key in (("cuDNN", "cudnn"), ("NCCL", "nccl")) if torch.get(key)]
    if torch.get("archs"):
        parts.append(" ".join(torch["archs"]))
    libuv = f"libuv {torch['libuv_library']}" if torch.get("libuv_library") else "libuv"
    parts_of_distributed = [(libuv, "libuv"), ("gloo", "gloo"), *([("nccl", "nccl_backend")] if cuda else [])]
    parts += [name for name, key in parts_of_distributed if torch.get(key)]
    return parts + [f"without {name}" for name, key in parts_of_distributed if torch.get(key) is False]


def describe_libraries(torch: Mapping[str, Any]) -> list[str]:
    """Returns how many libraries are loaded from each folder, and the foreign ones by name."""
    libraries = torch.get("libraries") or []
    folders = Counter(str(Path(library["path"]).parent) for library in libraries)
    lines = [
        f"loaded  {count} {'library' if count == 1 else 'libraries'} from {folder}" for folder, count in folders.items()
    ]
    lines += [f"loaded  {library['path']} is not torch's own" for library in libraries if not library["expected"]]
    if torch.get("libuv_header") and torch.get("libuv_library"):
        lines.append(f"libuv   header {torch['libuv_header']}, library {torch['libuv_library']}")
    return lines


def recipe_here(
    *, arch: str | None = None, driver: str | None = None, build: bool = False, script: Path | None = None
) -> Recipe:
    """Returns the recipe for the cards and the driver of this host, or for those in the arguments.

    script: a file that the bash script of a build is written to.
    """
    here = ask_probes([probe for probe in PROBES if probe.name in ("gpu", "host", "tools")], {})
    arch = None if arch == AUTO else arch
    capabilities = parse_archs(arch) if arch else capabilities_of(here)
    if arch and not capabilities:
        raise UsageError(f"--arch {arch} names no card", fix="--arch 12.0, the capability of your card")
    if driver is not None and not driver.replace(".", "").isdigit():
        raise PacelineError(f"--driver {driver}: not a driver version", fix="--driver 570.133, as nvidia-smi shows it")
    recipe = make_recipe(
        capabilities,
        driver=driver or at(here, "driver.version"),
        machine=platform.machine(),
        tools=tools_of(here),
        build=build or script is not None,
        archs=split_archs(arch or ""),
    )
    if script is not None:
        write_script(script, recipe, system=at(here, "host.os") or platform.system())
    return recipe


def capabilities_of(facts: Facts) -> tuple[Capability, ...]:
    """Returns the capabilities of the visible cards. Raises PacelineError where there are cards that the driver does not report."""
    if not facts["gpus"] and (facts["nvidia_cards"] or facts["nvml_error"]):
        raise PacelineError(
            f"{facts['nvidia_cards'] or 'some'} NVIDIA cards are in this host, and the driver does not report which:"
            f" {facts['nvml_error'] or 'it is not loaded'}",
            fix="--arch 12.0 with your card's capability, or repair the driver (nvidia-smi)",
        )
    cards = (gpu.get("capability") for gpu in visible_gpus(facts))
    return tuple((int(card[0]), int(card[1])) for card in cards if card)


def tools_of(facts: Facts) -> Tools:
    home = at(facts, "tools.cuda_home")
    wheels = Path(sysconfig.get_path("purelib")).glob("nvidia/cudnn/include")
    folders = [*([Path(home, "include")] if home else []), Path("/usr/include"), *wheels]
    return Tools(
        nvcc=at(facts, "tools.nvcc.version"),
        cudnn=any((folder / "cudnn.h").is_file() for folder in folders),
        ccache=at(facts, "tools.ccache") is not None,
    )


def fix_at(fix: str, folder: Path) -> str:
    """Returns a finding's fix for the torch in `folder`, which is a site-packages folder or a source tree."""
    quoted = shlex.quote(str(folder))
    if fix.startswith(TIMING):
        return f"time env PYTHONPATH={quoted} {shlex.quote(sys.executable)} {fix.removeprefix(TIMING)}"
    if not fix.startswith((PIP, RECIPE)):
        return fix
    if (folder / "CMakeLists.txt").is_file():
        newer = f"git -C {quoted} pull --recurse-submodules && " if "--upgrade" in fix else ""
        prefix = shlex.quote(f"{folder}-installed")
        return f"{newer}{BUILD}SOURCE={quoted} PREFIX={prefix} bash build.sh"
    args, installer = fix.removeprefix(PIP), installer_of(folder)
    if installer is None:
        venv = shlex.quote(f"{folder}-venv")
        begin = f"no pip installed it into {folder}; instead: {python_of(version_in(folder))} -m venv {venv} && {venv}/bin/python"
        return f"{begin} -m pip install {'torch' if fix.startswith(RECIPE) else REPLACING.sub('', args)}"
    command, separate = installer
    if fix.startswith(RECIPE):
        return f"{RECIPE}, with {command} for its pip install"
    return f"{command} {REPLACING.sub('', args) if separate else args}"


def installer_of(folder: Path) -> tuple[str, bool] | None:
    """Returns the pip command that changes this folder, without packages; None where no pip installed the torch.

    Also returns whether it installs into another folder than its Python's, whose own packages must stay.
    """
    layout = LAYOUT.fullmatch(str(folder))
    if layout is None:
        to = f"--upgrade --target {shlex.quote(str(folder))}"
        ours = python_of(version_in(folder))
        return (f"{ours} -m pip install {to}", True) if "torch" in versions_in(folder) else None
    prefix, version = Path(layout["prefix"]), layout["version"]
    if str(prefix) == site.getuserbase():
        return f"{python_of(version)} -m pip install --user", False
    root = prefix.parent if layout["kind"] == "dist" and prefix.name == "local" else prefix  # Debian's /usr/local
    named = (root / "bin" / name for name in (f"python{version}", "python3", "python"))
    python = next((shlex.quote(str(path)) for path in named if path.exists()), None)
    if python is None:
        to = f"--prefix {shlex.quote(str(prefix))} --ignore-installed"
        return f"{python_of(version)} -m pip install {to}", True
    has_pip = (folder / "pip").is_dir() or not (root / "pyvenv.cfg").is_file()
    return f"{python} -m pip install" if has_pip else f"pip --python {python} install", False


def python_of(version: str) -> str:
    return shlex.quote(sys.executable) if version in (OURS, OURS[0]) else f"python{version}"


def version_in(folder: Path) -> str:
    """Returns the Python version that the torch was compiled for; this Python's where its files do not show it."""
    module = next((match for name in names_in(folder / "torch") if (match := MODULE.fullmatch(name))), None)
    return f"{module[1]}.{module[2]}" if module else OURS


def versions_in(folder: Path) -> dict[str, str]:
    """Returns the packages that an installer recorded in this folder."""
    packages = importlib.metadata.distributions(path=[str(folder)])
    return {re.sub(r"[-_.]+", "-", package.metadata["Name"] or "").lower(): package.version for package in packages}
