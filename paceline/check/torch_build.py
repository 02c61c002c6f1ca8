"""
`paceline torch check` and `recipe`: is this PyTorch right, by its facts and by trying it; which one would be right here.

Trials run in a process of their own (torch_proof.py), since a broken build may crash it or never return. No torch here.
"""

import json
import os
import platform
import re
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.check import torch_verdicts
from paceline.check.ask import Ask
from paceline.check.facts import PROBES, OnProbe, ask_probes, gather_facts
from paceline.check.format import format_findings
from paceline.check.torch_archs import AUTO, Capability, parse_archs, split_archs
from paceline.check.torch_owner import fix_at, versions_in
from paceline.check.torch_recipe import Recipe, Tools, make_recipe
from paceline.check.verdict import Facts, at, visible_gpus
from paceline.check.verdicts import find
from paceline.errors import Finding, PacelineError, UsageError

PROOF = (sys.executable, "-m", "paceline.check.torch_proof")  # without -P, as a worker is started
DEADLINE_S = 60.0  # for one trial: a first import from a slow disk, the first kernel on a card
ENDING_S = 2.0
SHOWN_CHARS = 160
TORCH_VERDICTS = frozenset(verdict.id for verdict in torch_verdicts.VERDICTS)
SOURCE_MARK = "CMakeLists.txt"
PYTHON_FOLDER = re.compile(r"python(\d+)\.(\d+)")
CUDNN_HEADER = "cudnn.h"

OnTrial = Callable[[str], None]


@dataclass(frozen=True)
class Proof:
    """A trial and how it ended. seconds: None where it did not come to an end."""

    name: str
    ok: bool
    seconds: float | None
    said: str | None


@dataclass(frozen=True)
class TorchCheck:
    facts: Facts
    findings: tuple[Finding, ...]
    proofs: tuple[Proof, ...]

    @property
    def is_right(self) -> bool:
        return all(proof.ok for proof in self.proofs) and not any(each.severity == "stop" for each in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "right": self.is_right,
            "torch": self.facts["torch"],
            "proofs": [asdict(proof) for proof in self.proofs],
            "findings": [finding.to_json() for finding in self.findings],
        }


def check_torch(
    path: Path | None = None,
    *,
    deadline_s: float = DEADLINE_S,
    on_probe: OnProbe | None = None,
    on_trial: OnTrial | None = None,
) -> TorchCheck:
    """path: another install (site-packages, a venv, the torch folder) or a source tree; None for the torch of this Python."""
    torch_path = None if path is None else locate_torch(path)
    facts = gather_facts(torch_path=torch_path, measure_disk=False, on_probe=on_probe)
    if at(facts, "probes.torch.ok") and facts["torch"] is None:
        raise PacelineError(f"no torch in {sys.executable}", fix="paceline torch recipe")
    if torch_path is not None:  # the packages beside that torch, not those of this Python
        facts["packages"] = dict.fromkeys(facts["packages"] or ()) | versions_in(torch_path)
    findings = [finding for finding in find([facts], Ask(command="torch")) if finding.id in TORCH_VERDICTS]
    if torch_path is not None:
        findings = [replace(finding, fix=fix_at(finding.fix, torch_path)) for finding in findings]
    error = at(facts, "torch.error") or at(facts, "probes.torch.error")
    if error and error.startswith("no answer"):  # the probe has waited for long already
        proofs = [Proof("import", False, None, error)]
    else:
        proofs = list(prove_torch(torch_path, deadline_s=deadline_s, on_trial=on_trial))
    return TorchCheck(facts, tuple(findings), tuple(proofs))


def locate_torch(path: Path) -> Path:
    """The folder to put on sys.path so that `import torch` takes the one at `path`."""
    path = path.expanduser().absolute()
    if not path.exists():
        raise PacelineError(f"--path {path}: there is no such folder", fix="a folder with a torch/ in it")
    if path.name == "torch" and (path / "__init__.py").is_file():
        path = path.parent
    if (path / "torch/__init__.py").is_file():
        if (path / SOURCE_MARK).is_file() and not list((path / "torch").glob("_C*.so")):
            raise PacelineError(f"{path} is a source tree that is not built here: torch/_C*.so is missing",
                                fix=f"paceline torch build --source {path}")  # fmt: skip
        return path
    ours = sys.version_info[:2]
    found = {}
    for init in [
        *path.glob("lib*/python*/*-packages/torch/__init__.py"),
        *path.glob("local/lib*/python*/*-packages/torch/__init__.py"),
    ]:
        version = PYTHON_FOLDER.search(str(init.relative_to(path)))
        if version is not None:
            found[int(version[1]), int(version[2])] = init.parents[1]
    if ours in found:
        return found[ours]
    if found:
        other = ".".join(map(str, max(found)))
        raise PacelineError(
            f"{path} has a torch for Python {other}, this is Python {ours[0]}.{ours[1]}",
            fix=f"{path}/bin/python -m pip install paceline, then {path}/bin/paceline torch check",
        )
    raise PacelineError(
        f"no torch in {path}", fix="a site-packages folder, a venv, or a source tree: it has torch/__init__.py"
    )


def prove_torch(torch_path: Path | None, *, deadline_s: float, on_trial: OnTrial | None = None) -> Iterator[Proof]:
    """Each trial as it ends; the one that was under way when the process crashed or came to no end is the last."""
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            PROOF, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, start_new_session=True
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(json.dumps({"torch_path": torch_path and str(torch_path)}).encode())
            under_way: str | None = "start"
            for event in read_events(process.stdout.fileno(), deadline_s=deadline_s):
                if "begin" in event:
                    under_way = event["begin"]
                    if on_trial is not None:
                        on_trial(under_way)
                elif event:
                    under_way = None
                    yield Proof(**event)
                else:
                    yield Proof(under_way or "end", False, None, f"no answer in {deadline_s:g} s")
                    return
            exit_code = process.wait(ENDING_S)
            if exit_code != 0:
                complaints.seek(0)
                yield Proof(
                    under_way or "end", False, None, describe_end(exit_code, complaints.read().decode(errors="replace"))
                )
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


def read_events(pipe: int, *, deadline_s: float) -> Iterator[dict[str, Any]]:
    """The lines of JSON; an empty event when none came for `deadline_s`."""
    pending = b""
    deadline = time.monotonic() + deadline_s
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            return
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            yield json.loads(line)
        deadline = time.monotonic() + deadline_s
    yield {}


def describe_end(exit_code: int, complaint: str) -> str:
    """`ended by SIGSEGV; its last line: ...`"""
    end = f"ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"
    lines = complaint.strip().splitlines()
    return f"{end}; its last line: {lines[-1][:SHOWN_CHARS]}" if lines else end


def format_check(check: TorchCheck) -> str:
    torch: Mapping[str, Any] = check.facts.get("torch") or {}
    lines = [
        f"torch   {torch.get('version') or 'n/a'}, {torch.get('build') or 'n/a'}, {torch.get('path') or 'n/a'}",
        f"built   {', '.join(describe_parts(torch))}",
        *describe_libraries(torch),
        "",
    ]
    width = max(len(proof.name) for proof in check.proofs)
    for proof in check.proofs:
        took = "" if proof.seconds is None else f"{proof.seconds:.2f} s"
        word = "right" if proof.ok else "WRONG"
        lines.append(f"{word}   {proof.name:<{width}}  {took:>8}  {proof.said or ''}".rstrip())
    if check.findings:
        lines += ["", format_findings(check.findings)]
    failed = [proof.name for proof in check.proofs if not proof.ok]
    stops = [finding.id for finding in check.findings if finding.severity == "stop"]
    end = f"this torch is not right: {', '.join([*failed, *stops])}" if failed or stops else "this torch is right"
    return "\n".join([*lines, "", end])


def describe_parts(torch: Mapping[str, Any]) -> list[str]:
    """CUDA and its libraries, the architectures, what ranks talk by."""
    cuda = torch.get("cuda")
    parts = [f"CUDA {cuda}" if cuda else f"ROCm {torch['hip']}" if torch.get("hip") else "no CUDA"]
    parts += [f"{name} {torch[key]}" for name, key in (("cuDNN", "cudnn"), ("NCCL", "nccl")) if torch.get(key)]
    if torch.get("archs"):
        parts.append(" ".join(torch["archs"]))
    libuv = f"libuv {torch['libuv_library']}" if torch.get("libuv_library") else "libuv"
    wanted = [(libuv, "libuv"), ("gloo", "gloo"), *([("nccl", "nccl_backend")] if cuda else [])]
    parts += [name for name, key in wanted if torch.get(key)]
    return parts + [f"without {name}" for name, key in wanted if torch.get(key) is False]


def describe_libraries(torch: Mapping[str, Any]) -> list[str]:
    """How many are loaded from each folder; the foreign ones by name."""
    libraries = torch.get("libraries") or []
    folders: dict[str, int] = {}
    for library in libraries:
        folder = str(Path(library["path"]).parent)
        folders[folder] = folders.get(folder, 0) + 1
    lines = [
        f"loaded  {count} {'library' if count == 1 else 'libraries'} from {folder}" for folder, count in folders.items()
    ]
    lines += [f"loaded  {each['path']} is not torch's own" for each in libraries if not each["expected"]]
    if torch.get("libuv_header") and torch.get("libuv_library"):
        lines.append(f"libuv   header {torch['libuv_header']}, library {torch['libuv_library']}")
    return lines


def recipe_here(*, arch: str | None = None, driver: str | None = None, build: bool = False) -> Recipe:
    """`paceline torch recipe`: for the cards and the driver here, or for those that are given."""
    here = probe_builder()
    arch = None if arch == AUTO else arch
    capabilities = parse_archs(arch) if arch else capabilities_of(here)
    if arch and not capabilities:
        raise UsageError(f"--arch {arch} names no card to find a wheel for", fix="--arch 12.0, your card's capability")
    if driver is not None and not driver.replace(".", "").isdigit():
        raise PacelineError(f"--driver {driver}: no driver version", fix="--driver 570.133, as nvidia-smi shows it")
    driver = driver or at(here, "driver.version")
    return make_recipe(
        capabilities,
        driver=driver,
        machine=platform.machine(),
        tools=tools_of(here),
        build=build,
        archs=split_archs(arch or ""),
    )


def probe_builder() -> Facts:
    """What a recipe or a build must know of this host."""
    wanted = [probe for probe in PROBES if probe.name in ("gpu", "host", "tools")]
    return ask_probes(wanted, {})


def capabilities_of(facts: Facts) -> tuple[Capability, ...]:
    """Of the visible cards. Cards that are there and cannot be asked are no reason to leave CUDA out."""
    if not facts["gpus"] and (facts["nvidia_cards"] or facts["nvml_error"]):
        raise PacelineError(
            f"{facts['nvidia_cards'] or 'some'} NVIDIA cards are here and the driver does not tell which:"
            f" {facts['nvml_error'] or 'it is not loaded'}",
            fix="--arch 12.0 with your card's capability, or mend the driver (nvidia-smi)",
        )
    cards = (gpu.get("capability") for gpu in visible_gpus(facts))
    return tuple((int(card[0]), int(card[1])) for card in cards if card)


def tools_of(facts: Facts) -> Tools:
    home = at(facts, "tools.cuda_home")
    folders = [*([Path(home, "include")] if home else []), Path("/usr/include"), *nvidia_wheels("cudnn")]
    return Tools(
        nvcc=at(facts, "tools.nvcc.version"),
        cudnn=any((folder / CUDNN_HEADER).is_file() for folder in folders),
        ccache=at(facts, "tools.ccache") is not None,
    )


def nvidia_wheels(name: str) -> Sequence[Path]:
    return list(Path(sysconfig.get_path("purelib")).glob(f"nvidia/{name}/include"))
