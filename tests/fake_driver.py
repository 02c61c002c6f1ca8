"""
An NVIDIA driver that is not there: NVML as a small library in C and an nvidia-smi, which answer from one file (tests/nvidia/).

Commands run as processes with the environment of a FakeDriver, through the real binding. What needs CUDA cannot be shown: torch
here sees no card. The values are those that nvml.h and real machines give.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

HERE = Path(__file__).parent / "nvidia"
CHECK_SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "check.schema.json").read_text())
GIB, MIB = 1 << 30, 1 << 20
DEADLINE_S = 300.0  # against hanging
NOT_SUPPORTED, NOT_LOADED, FUNCTION_NOT_FOUND, LOST, LIBRARY_MISMATCH, UNKNOWN_ERROR = (
    f"error {code}" for code in (3, 9, 13, 15, 18, 999)
)
THERMAL, POWER_BRAKE = 0x40, 0x80  # nvmlClocksEventReason*
Answers = dict[str, str]


def card(name: str, *, memory_mib: int, capability: str, watts: int, used_bytes: int = 0, **answers: str) -> Answers:
    """What an idle card answers; `answers` are further ones, by NVML's name of the call without nvmlDeviceGet."""
    return {
        "Name": f"NVIDIA {name}",
        "CudaComputeCapability": capability,
        "MemoryInfo": f"{memory_mib * MIB} {used_bytes}",
        "UtilizationRates": "0 0",
        "PowerUsage": "61500",
        "EnforcedPowerLimit": f"{watts}000",
        "PowerManagementDefaultLimit": f"{watts}000",
        "Temperature": "41",
        "ClockInfo": "2460",
        "ComputeMode": "0",
        "DisplayActive": "0",
        "CurrentClocksEventReasons": "1",
        "CurrPcieLinkGeneration": "4",
        "MaxPcieLinkGeneration": "4",
        "CurrPcieLinkWidth": "16",
        "MaxPcieLinkWidth": "16",
        "TotalEnergyConsumption": "7000000",
        "PcieReplayCounter": "0",
        "P2PStatus": "5",
        "ComputeRunningProcesses_v3": "",
        "GraphicsRunningProcesses_v3": "",
        **answers,
    }


RTX_5090 = card("GeForce RTX 5090", memory_mib=32_607, capability="12 0", watts=575)
RTX_4090 = card("GeForce RTX 4090", memory_mib=24_564, capability="8 9", watts=450)
RTX_4090_48GB = card("GeForce RTX 4090", memory_mib=49_140, capability="8 9", watts=450)
H100 = card(
    "H100 80GB HBM3", memory_mib=81_559, capability="9 0", watts=700, EccMode="1 1", TotalEccErrors="0", CorrectedEccErrors="0",
    MigMode="0 0", NvLinkState="1", P2PStatus="0",
)  # fmt: skip
GB10 = card("GB10", memory_mib=0, capability="12 1", watts=140, MemoryInfo=NOT_SUPPORTED)


def split_by_mig(whole: Answers, *parts: Answers) -> Answers:
    """What a card in MIG mode answers; it has the parts as its MIG devices, and up to seven are possible."""
    numbered = {f"/{index}.{name}": answer for index, part in enumerate(parts) for name, answer in part.items()}
    return {**whole, "MigMode": "1 1", "MaxMigDeviceCount": "7", **numbered}


def mig_part(profile: str, uuid: str, *, memory_mib: int) -> Answers:
    return {"Name": f"NVIDIA H100 80GB HBM3 MIG {profile}", "UUID": uuid, "MemoryInfo": f"{memory_mib * MIB} 0"}


class FakeDriver:
    """A driver with these cards. `cards` may be changed; write() makes the next call see it."""

    def __init__(self, programs: Path, folder: Path, *cards: Answers, version: str = "580.95.05", cuda: int = 13000):
        """programs: what build_driver returned. folder: where the description is written and commands run."""
        self.programs, self.folder, self.file = programs, folder, folder / "cards"
        self.cards: list[Answers | str] = [
            {"UUID": f"GPU-{index:08d}-0000", **answers} for index, answers in enumerate(cards)
        ]
        self.answers = {"DriverVersion": version, "CudaDriverVersion": str(cuda)}
        self.write()

    def write(self) -> None:
        """Writes the description as a whole, so that no reader sees half of it."""
        lines = [f"{name} = {answer}" for name, answer in {**self.answers, "Count": len(self.cards)}.items()]
        for index, answers in enumerate(self.cards):
            if isinstance(answers, str):
                lines.append(f"{index} = {answers}")
            else:
                dotted = {name if name.startswith("/") else f".{name}": answer for name, answer in answers.items()}
                lines += [f"{index}{name} = {answer}" for name, answer in dotted.items()]
        draft = self.file.with_suffix(".new")
        draft.write_text("\n".join(lines) + "\n")
        draft.replace(self.file)

    def lose(self, index: int, error: str = LOST) -> None:
        """Takes a card off the bus: from now on every call about it is answered with the error."""
        self.cards[index] = error
        self.write()

    def xid(self, *pairs: int) -> None:
        """Sets the Xid errors since the driver was loaded: card and number of each."""
        self.answers["Xids"] = " ".join(map(str, pairs))
        self.write()

    @property
    def env(self) -> dict[str, str]:
        """The environment of a process that finds this driver and no other."""
        env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        return {
            **env,
            "FAKE_CARDS": str(self.file),
            "LD_LIBRARY_PATH": str(self.programs),
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "COLUMNS": "200",
        }

    def python(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs this Python to its end."""
        return subprocess.run(
            [sys.executable, *arguments],
            env={**self.env, **env},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def paceline(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of paceline to its end."""
        return self.python("-m", "paceline.cli", *arguments, **env)

    def findings(self, *flags: str, **env: str) -> dict[str, tuple[str, str, str]]:
        """Returns severity, text and fix of what `paceline check` finds, by id; of several with one id the first.

        The whole answer follows its schema.
        """
        done = self.paceline("check", "--json", *flags, **env)
        assert done.returncode in (0, 1) and done.stdout, done.stderr
        answer = json.loads(done.stdout)
        Draft202012Validator(CHECK_SCHEMA).validate(answer)
        findings = reversed(answer["findings"])
        return {finding["id"]: (finding["severity"], finding["what"], finding["fix"]) for finding in findings}


def build_driver(folder: Path) -> Path:
    """Compiles the library into the folder and puts nvidia-smi beside it; skips the test where there is no C compiler."""
    if sys.platform != "linux":
        pytest.skip("the stand-in for NVML is a library for Linux")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc) here to build the stand-in for NVML")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-Wall", "-shared", "-fPIC", "-o", str(library), str(HERE / "nvml.c")], check=True)
    smi = folder / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\nexec {sys.executable} -S {HERE / "nvidia_smi.py"} "$@"\n')
    smi.chmod(0o755)
    return folder
