"""Settings of the whole process, so they are tried in a process of their own."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import resource
import torch
from paceline.train.process import fp32_matmul_through_onednn, keep_freed_memory
used = fp32_matmul_through_onednn()
a, b = torch.randn(300, 400), torch.randn(400, 500)
error = ((a @ b).double() - a.double() @ b.double()).norm() / (a @ b).norm()
print(used, error.item() < 1e-5, torch.backends.mkldnn.matmul.fp32_precision == ("bf16" if used else "none"))
kept = keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(), faults()
print(kept, faults() < 1000)  # 64 MiB taken five times; given back each time, that is 80,000 pages
"""


@pytest.fixture(scope="module")
def printed() -> list[list[str]]:
    """The words of each line, from one process with both settings."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=True)
    return [line.split() for line in done.stdout.splitlines()]


def test_matmuls_stay_fp32_whether_onednn_takes_them_or_not(printed):
    used, exact, setting = printed[0]
    assert used in ("True", "False")
    assert (exact, setting) == ("True", "True")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_memory_that_was_freed_is_not_faulted_in_again(printed):
    assert printed[1] == ["True", "True"]
