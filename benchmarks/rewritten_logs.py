"""Logs in other forms that say the same: what a launcher, a log collector, a terminal or a person makes of them on their way."""

import csv
import html
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# what stands around each line. number: of the line; second: of its time
PREFIXES = {
    "kubectl": "2026-11-20T10:00:{second:02d}.{number:06d}123Z {line}",
    "compose": "trainer-1  | {line}",
    "swarm": "trainer.1.x7sd8f@node1    | {line}",
    "pm2": "0|train  | {line}",
    "foreman": "10:00:{second:02d} trainer.1 | {line}",
    "journal": "Nov 20 10:00:{second:02d} gpu01 python3[4711]: {line}",
    "syslog": "2026-11-20T10:00:00.{number:06d}+00:00 gpu01 python3[4711]: {line}",
    "containerd": "2026-11-20T10:00:00.{number:09d}Z stderr F {line}",
    "stern": "trainer-worker-0 pytorch {line}",
    "pod": "[pod/trainer-0/pytorch] {line}",
    "rank": "[rank0]: {line}",
    "two ranks": "[rank0]: {line}\n[rank1]: {line}",
    "torchrun's tee": "[default0]:{line}",
    "torchrun's role": "[trainer0]:{line}",
    "srun": "0: {line}",
    "mpirun": "[1,0]<stderr>:{line}",
    "pdsh": "node1: {line}",
    "Ray": "(RayTrainWorker pid=4711, ip=10.0.0.7) {line}",
    "Ray in colors": "\x1b[36m(WorkerDict pid=4711)\x1b[0m {line}",
    "SkyPilot": "(worker1, rank=1, pid=4711, ip=10.0.0.2) {line}",
    "SkyPilot task": "(task, pid=4711) {line}",
    "Determined": "[2026-11-20T10:00:00.{number:06d}Z] 1c33a [rank=0] || {line}",
    "SageMaker's mpirun": "[1,mpirank:0,algo-1]<stderr>:{line}",
    "SageMaker": "2026-11-20 10:00:{second:02d},123 sagemaker-training-toolkit INFO     {line}",
    "CloudWatch": "17636328{number:05d}\t{line}",
    "CloudWatch stream": "2026-11-20T10:00:{second:02d}.123000+00:00 algo-1 {line}",
    "Airflow": "[2026-11-20, 10:00:{second:02d} UTC] {{subprocess.py:93}} INFO - {line}",
    "Jenkins": "[2026-11-20T10:00:{second:02d}.123Z] {line}",
    "GitLab": "2026-11-20T10:00:00.{number:06d}Z 01E {line}",
    "GitHub": "2026-11-20T10:00:{second:02d}.1234567Z {line}",
    "Spark": "26/11/20 10:00:{second:02d} INFO TorchDistributor: {line}",
    "logging": "2026-11-20 10:00:{second:02d},123 - trainer - INFO - {line}",
    "logging of a module": "11/20/2026 10:00:{second:02d} - INFO - __main__ -   {line}",
    "DeepSpeed's logger": "[2026-11-20 10:00:{second:02d},123] [INFO] [launch.py:12:main] {line}",
    "Hydra": "[2026-11-20 10:00:{second:02d},123][__main__][INFO] - {line}",
    "Hydra, errors": "[2026-11-20 10:00:{second:02d},123][__main__][ERROR] - {line}",
    "loguru": "2026-11-20 10:00:{second:02d}.123 | INFO     | __main__:run:12 - {line}",
    "AutoTrain": "INFO     | 2026-11-20 10:00:{second:02d} | autotrain.trainers.common:__init__:180 - {line}",
    "Composer": "2026-11-20 10:00:{second:02d},123: rank0[123][MainThread]: INFO: composer.cli.launcher: {line}",
    "NeMo": "[NeMo I 2026-11-20 10:00:{second:02d} nemo_logging:349] {line}",
    "fairseq": "2026-11-20 10:00:{second:02d} | INFO | fairseq_cli.train | {line}",
    "structlog": "2026-11-20 10:00:{second:02d} [info     ] {line}",
    "absl": "I1120 10:00:{second:02d}.123456 140234 launch.py:12] {line}",
    "ts": "Nov 20 10:00:{second:02d} {line}",
    "clock": "10:00:{second:02d} {line}",
    "clock in brackets": "[10:00:{second:02d}] {line}",
    "seconds": "[{number:10d}.137s] {line}",
    "Unix time": "17636328{second:02d}.123 {line}",
    "Windows": "11/20/2026 10:00:{second:02d} AM {line}",
    "process id": "[4711] {line}",
    "name": "[trainer] {line}",
    "stream": "[stderr] {line}",
    "stream and colon": "stderr: {line}",
    "level": "ERROR: {line}",
    "numbers": "{number:6d}\t{line}",
    "numbers and bar": "{number:4d} | {line}",
    "grep -n": "{number}:{line}",
    "quote": "> {line}",
    "quote in a block": "    > {line}",
    "block": "    {line}",
    "diff": "+{line}",
    "padded": "{line:<140s}",
    "double spacing": "{line}\n",
    "CRLF": "{line}\r",
    "ANSI": "\x1b[36m\x1b[1m{line}\x1b[0m",
}
# a line as the value of an object of JSON
OBJECTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "docker": lambda line: {"log": f"{line}\n", "stream": "stderr", "time": "2026-11-20T10:00:00.000001Z"},
    "JSON lines": lambda line: {"timestamp": "2026-11-20T10:00:00Z", "level": "info", "message": line},
    "journal -o json": lambda line: {"MESSAGE": line, "_PID": "4711", "PRIORITY": "6"},
    "Google Cloud": lambda line: {"insertId": "a1", "textPayload": line, "severity": "ERROR"},
    "Google Cloud, structured": lambda line: {
        "jsonPayload": {"message": line, "levelname": "INFO"},
        "severity": "INFO",
    },
}
STEPS = "".join(
    f"step {step:5d}/10000 | loss {3 + 5 / step:.4f} | lr 3.00e-04 | norm 0.5{step % 7} | 421.12 ms | 123,456 tok/s\n"
    for step in range(1, 201)
)
BAR = "".join(
    f"\r {share}%|{'#' * (share // 10):10s}| {share}/100 [00:{share}<01:00,  1.00it/s]" for share in range(10, 48)
)
WARNINGS = """\
/usr/lib/python3/dist-packages/torch/utils/data/dataloader.py:557: UserWarning: This DataLoader will create 8 worker processes
  warnings.warn(_create_warning_msg(
2026-11-20 10:00:00.123456: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:477] Unable to register cuFFT factory
Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded
Failed to detect number of TPU cores
[W1120 10:00:00.0 socket.cpp:755] [c10d] The client socket cannot be initialized to connect to [localhost]:29500 (errno: 97)
"""
TORCHRUN = """
W1120 10:00:00.0 4711 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 4712 closing signal SIGTERM
E1120 10:00:01.0 4711 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 0 (pid: 4713)
Traceback (most recent call last):
  File "/usr/local/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_10:00:01
  host      : gpu01
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 4713)
  error_file: <N/A>
============================================================
"""
ENDS = {
    "prompt after it": "\n(base) user@gpu01:~/project$ \n",
    "W&B after it": "\nwandb: \nwandb: You can sync this run by running:\nwandb: wandb sync wandb/offline-run-1\n",
    "torchrun after it": TORCHRUN,
    "srun after it": "\nsrun: error: gpu01: task 0: Exited with exit code 1\nsrun: Terminating StepId=1234.0\n",
    "Slurm after it": "\nslurmstepd: error: *** STEP 1234.0 ON gpu01 CANCELLED AT 2026-11-20T10:00:00 ***\n",
    "accelerate after it": "\nTraceback (most recent call last):\n"
    '  File "/usr/lib/python3/dist-packages/accelerate/commands/launch.py", line 643, in simple_launcher\n'
    "    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)\n"
    "subprocess.CalledProcessError: Command '['/usr/bin/python3', 'train.py']' returned non-zero exit status 1.\n",
    "DeepSpeed after it": "\n[2026-11-20 10:00:01,123] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 4712\n"
    "[2026-11-20 10:00:01,123] [ERROR] [launch.py:325:sigkill_handler] ['python3', 'train.py'] exits with return code = 1\n",
    "Ray after it": "\n(raylet) A worker died or was killed while executing a task by an unexpected system error.\n",
    "failed in W&B": "\nwandb: Waiting for W&B process to finish... (failed 1). Press Control-C to abort syncing.\n",
}


def by_line(template: Callable[[int, str], str]) -> Callable[[str], str]:
    """Returns the rewriting of every line."""
    return lambda log: "".join(f"{template(number, line)}\n" for number, line in enumerate(log.split("\n"), start=1))


def wrapped(width: int) -> Callable[[str], str]:
    """Returns the rewriting that breaks lines as a terminal does."""
    return lambda log: "\n".join(
        line[start : start + width] for line in log.split("\n") for start in range(0, len(line) or 1, width)
    )


def as_csv(log: str) -> str:
    """The export of a log viewer."""
    file = io.StringIO()
    csv.writer(file).writerows(
        [("timestamp", "message"), *((f"17636328{n:05d}", line) for n, line in enumerate(log.split("\n")))]
    )
    return file.getvalue()


WHOLE: dict[str, Callable[[str], str | bytes]] = {
    "UTF-16": lambda log: log.encode("utf-16"),
    "HTML": html.escape,
    "one line": lambda log: log.replace("\n", "\\n"),
    "CSV": as_csv,
    "fence": lambda log: f"```\n{log}\n```\n",
    "tabs": lambda log: log.replace("    ", "\t"),
    "no indentation": lambda log: "\n".join(line.strip() for line in log.split("\n")),
    "single spaces": lambda log: re.sub(r"[ \t]+", " ", log),
    "no blank lines": lambda log: "\n".join(line for line in log.split("\n") if line.strip()),
    "Windows paths": lambda log: re.sub(
        'File "(/[^"]+)"', lambda match: f'File "C:{match[1]}"'.replace("/", "\\"), log
    ),
    "twice": lambda log: f"{log}\n{log}",
    "four ranks, one after the other": lambda log: "".join(
        f"[rank{rank}]: {line}\n" for rank in range(4) for line in log.split("\n")
    ),
    "steps before it": lambda log: STEPS + log,
    "bar before it": lambda log: BAR + log,
    "warnings before it": lambda log: WARNINGS + log,
    **{f"{width} columns": wrapped(width) for width in (80, 120, 200)},
    **{name: (lambda log, end=end: log.rstrip("\n") + end) for name, end in ENDS.items()},  # type: ignore[misc]
}


def rewrite_cases(cases: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields each labelled log in every form, which is its file then. A failure that ENDS report is of failures only."""
    for name, rewrite in rewritings():
        for case in cases:
            if name not in ENDS or case["cause"] != "healthy":
                yield {**case, "log": rewrite(case["log"]), "file": name}


def rewritings() -> Iterator[tuple[str, Callable[[str], str | bytes]]]:
    """Yields each form's name, and the function that brings a log into it."""
    for name, template in PREFIXES.items():
        yield (
            name,
            by_line(lambda number, line, form=template: form.format(number=number, second=number % 60, line=line)),
        )  # type: ignore[misc]
    for name, wrap in OBJECTS.items():
        yield name, by_line(lambda _, line, wrap=wrap: json.dumps(wrap(line)))  # type: ignore[misc]
    yield from WHOLE.items()
