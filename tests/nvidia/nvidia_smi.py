"""
Stands in for nvidia-smi, by the same file as nvml.c: `nvidia-smi`, and the two queries that paceline makes.

Values that the driver does not report are [N/A]; a card that does not answer ends the program, as NVIDIA's does.
"""

import os
import sys
from pathlib import Path

MIB = 1 << 20
DEAD_CARD = "Unable to determine the device handle for GPU{index}: 0000:{index:02X}:00.0: {message}"
MESSAGES = {
    "9": "Driver Not Loaded",
    "15": "GPU is lost.  Reboot the system to recover this GPU",
    "999": "Unknown Error",
}


def main() -> None:
    lines = Path(os.environ["FAKE_CARDS"]).read_text().splitlines()
    answers = dict(line.split(" = ", 1) for line in lines)
    if answers.get("Init") == "error 18":
        fail("Failed to initialize NVML: Driver/library version mismatch", 18)
    if "Init" in answers:
        fail("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9)
    options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    indices = range(int(answers["Count"]))
    for index in indices:
        if (state := answers.get(str(index), "")).startswith("error"):
            fail(DEAD_CARD.format(index=index, message=MESSAGES[state.split()[1]]), int(state.split()[1]) % 256)
    if "--query-gpu" in options:
        for index in indices:
            print(", ".join(field(answers, index, name) for name in options["--query-gpu"].split(",")))
    elif "--query-compute-apps" in options:
        uuid = sys.argv[sys.argv.index("-i") + 1]
        for index in (index for index in indices if answers[f"{index}.UUID"] == uuid):
            numbers = [int(word) for word in answers.get(f"{index}.ComputeRunningProcesses_v3", "").split()]
            for pid, used_bytes in zip(numbers[::2], numbers[1::2], strict=True):
                print(f"{pid}, {used_bytes // MIB}")
    else:
        print(f"NVIDIA-SMI    Driver Version: {answers['DriverVersion']}")


def field(answers: dict[str, str], index: int, name: str) -> str:
    function = {"uuid": "UUID", "name": "Name", "memory.total": "MemoryInfo", "compute_cap": "CudaComputeCapability"}[
        name
    ]
    value = answers.get(f"{index}.{function}", "error 3")
    if value.startswith("error"):
        return "[N/A]"
    if name == "memory.total":
        return str(int(value.split()[0]) // MIB)
    return value.replace(" ", ".") if name == "compute_cap" else value


def fail(message: str, exit_code: int) -> None:
    print(message)
    sys.exit(exit_code)


main()
