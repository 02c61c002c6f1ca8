"""examples/ray_run.py on a real Ray cluster of one node, on CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed: it is heavy")
EXAMPLE = Path(__file__).parents[1] / "examples" / "ray_run.py"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(2400)  # Ray takes minutes to start on a busy machine
def test_a_script_runs_in_a_placement_group_and_its_exit_code_comes_back(tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, sys; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE']); sys.exit(int(sys.argv[1]))"
    )
    env = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(EXAMPLE.parents[1]), "RAY_USAGE_STATS_ENABLED": "0"}
    for code in (0, 7):
        words = [
            "run",
            "--no-check",
            "--nproc=2",
            "--device=cpu",
            "--max-attempts=1",
            "--runs-dir",
            str(tmp_path / "runs"),
        ]
        command = [sys.executable, str(EXAMPLE), "1", "--", *words, "--", str(tmp_path / "script.py"), str(code)]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        assert "rank 0 of 2" in done.stdout and "rank 1 of 2" in done.stdout
