"""Real runs for the tests of this folder: the command, a small text, a small model, and what a run left behind."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

MODULES = ("argparse.py", "ast.py", "datetime.py", "decimal.py", "difflib.py", "inspect.py", "pathlib.py", "typing.py")
SMALL = {
    "depth": 2, "n-embd": 64, "head-dim": 32, "sequence-len": 64, "vocab-size": 512, "total-batch-size": 768,
    "device-batch-size": 2, "num-steps": 12, "precision": "fp32", "device": "cpu", "eval-tokens": 4096, "log-every": 1,
    "eval-every": 0, "save-every": 0, "health-every": 0,
}  # fmt: skip
STEPS = 40  # of the run that all files of this folder compare theirs with


class Workshop:
    """A folder with a text, a cache and runs in it.

    Runs start without the checks of the machine, which take a second of processor time for each; tests/check and the commands
    of the README have them, and the fault loop with check=True.
    """

    def __init__(self, folder: Path, *, check: bool = False):
        self.folder = folder
        self.flags = () if check else ("--no-check",)
        self.text = folder / "text"
        self.text.mkdir(parents=True)
        for name in MODULES:
            (self.text / name).write_bytes((Path(sysconfig.get_path("stdlib")) / name).read_bytes()[:60_000])

    def command(self, *words: str, **keys: object) -> list[str]:
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in keys.items()]
        return [sys.executable, "-m", "paceline.cli", *words, *flags]

    def train_command(self, name: str, **keys: object) -> list[str]:
        merged = {**SMALL, **{key.replace("_", "-"): value for key, value in keys.items()}}
        places = {"name": name, "runs-dir": self.folder / "runs", "cache-dir": self.folder / "cache", "data": self.text}
        return [*self.command("train", **{**places, **merged}), *self.flags]

    def train(self, name: str, **keys: object) -> Path:
        self.finish(self.train_command(name, **keys))
        return self.folder / "runs" / name

    def copy(self, run: Path, name: str) -> Path:
        """Another run folder with the same content, to resume or to damage."""
        return Path(shutil.copytree(run, self.folder / "runs" / name))

    def resume(self, run: Path, **keys: object) -> str:
        return self.finish(self.resume_command(run, **keys))

    def resume_command(self, run: Path, **keys: object) -> list[str]:
        return [*self.command("resume", str(run), **keys), *self.flags]

    def finish(self, command: list[str], *, code: int = 0) -> str:
        """Output of a command that must end with `code`."""
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def events(run: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in lines if event["event"] == kind]


def final_bits(run: Path) -> dict[str, str]:
    """Hash of every tensor of the newest checkpoint, weights and optimizer states, however they are split over files."""
    from paceline.model.checkpoint import CheckpointReader
    from paceline.model.manifest import newest_good

    path, notes = newest_good(run / "checkpoints", set_aside=False)
    assert notes == []
    reader = CheckpointReader(path)
    keys = [key for key in reader.keys() if not key.startswith("rng.")]
    bits = {key: hashlib.sha256(reader.read(key).contiguous().numpy().tobytes()).hexdigest() for key in keys}
    return {"step": str(reader.step), **bits}


def poison(run: Path, key: str, row: int, value: float) -> None:
    """Sets one row of a tensor of the newest checkpoint to a value; it is then saved again with right hashes."""
    from paceline.model.checkpoint import CheckpointReader, CheckpointWriter, Piece
    from paceline.model.manifest import newest_good

    reader = CheckpointReader(newest_good(run / "checkpoints", set_aside=False)[0])
    tensors = {name: reader.read(name) for name in reader.keys()}
    tensors[key][row] = value
    pieces = [Piece(name, tuple(t.shape), (0, t.shape[0]), t) for name, t in tensors.items()]
    writer = CheckpointWriter(
        run / "checkpoints", rank=0, world_size=1, attempt="poison", keep_last=2, on_saved=lambda *saved: None
    )
    writer.save(reader.step, pieces, dict(reader.state))
    writer.wait()
