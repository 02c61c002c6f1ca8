"""One unbroken run for all files of this folder, whichever process of the test session needs it first."""

from pathlib import Path

import pytest
from filelock import FileLock
from runs import STEPS, Workshop


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, STEPS steps, checkpoints at step 30 and at the end; to be read and copied, never changed."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "unbroken"
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "runs" / "unbroken" / "checkpoints" / f"step_{STEPS:06d}").exists():
            Workshop(folder).train("unbroken", nproc=2, num_steps=STEPS, save_every=30)
    return folder / "runs" / "unbroken"
