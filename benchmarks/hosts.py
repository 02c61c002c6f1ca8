"""
Two hosts beside one: the same two ranks on two network namespaces with a real sshd each, and on this host.

    python benchmarks/hosts.py [--rounds 5] [--steps 60]

Prints the median seconds from the command to the end of the first step, and the median tokens/s, of both and their ratio. Rounds
alternate. The text is prepared before. Needs root, openssh-server and iproute2, as tests/namespaces.py does. The link between the
namespaces is this machine's memory: what a real link costs, `paceline plan --hosts` says.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.rundir import RunDir, read_json_lines
from paceline.units import parse_time

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from namespaces import WHY_NOT, Hosts, namespaced_hosts

SIZES = [
    "--depth=4", "--n-embd=128", "--head-dim=64", "--sequence-len=256", "--vocab-size=4096", "--total-batch-size=8192",
    "--device-batch-size=4", "--precision=fp32", "--no-compile", "--log-every=1", "--eval-every=0", "--eval-tokens=256",
    "--save-every=0",
]  # fmt: skip
SETTLED_AFTER = 10  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    if WHY_NOT:
        sys.exit(f"cannot run: {WHY_NOT}")
    results: dict[str, list[tuple[float, float]]] = {"one host": [], "two hosts": []}
    with tempfile.TemporaryDirectory() as name, namespaced_hosts(2, Path(name)) as hosts:
        train(hosts, ["--nproc=2"], name="warm", steps=2)
        train(hosts, ["--nproc=1", "--hosts=h1,h2"], name="warm2", steps=2)  # the code is there then
        for number in range(args.rounds):
            results["one host"].append(train(hosts, ["--nproc=2"], name=f"one{number}", steps=args.steps))
            options = ["--nproc=1", "--hosts=h1,h2"]
            results["two hosts"].append(train(hosts, options, name=f"two{number}", steps=args.steps))
            print({where: values[-1] for where, values in results.items()}, file=sys.stderr, flush=True)
    print("| | command to first step, s | tokens/s |\n|---|---|---|")
    medians = {
        where: [statistics.median(column) for column in zip(*rows, strict=True)] for where, rows in results.items()
    }
    for where, (start_s, speed) in medians.items():
        print(f"| {where} | {start_s:.2f} | {speed:,.0f} |")
    (one_s, one_speed), (two_s, two_speed) = medians.values()
    print(f"| two hosts beside one | {two_s - one_s:+.2f} s | {two_speed / one_speed:.3f} |")


def train(hosts: Hosts, options: Sequence[str], *, name: str, steps: int) -> tuple[float, float]:
    """Returns seconds from the command to the end of the first step, and tokens/s of the settled steps."""
    runs = hosts.private / "runs"
    command = [sys.executable, "-m", "paceline.cli", "train", *SIZES, *options, f"--num-steps={steps}"]
    began = time.time()
    command = hosts.command("h1", [*command, f"--runs-dir={runs}", f"--name={name}"], cores="all")
    subprocess.run(
        command, env=hosts.env("h1"), cwd=hosts.folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    lines = list(read_json_lines(RunDir(hosts.on("h1", runs) / name).metrics))
    speeds = [line["tok_per_sec"] for line in lines[SETTLED_AFTER:]] or [0.0]
    return parse_time(lines[0]["time"]) - began, statistics.median(speeds)


if __name__ == "__main__":
    main()
