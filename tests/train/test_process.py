"""Settings of the whole process, so they are tried in a process of their own."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import resource
import torch
from paceline.train.process import keep_freed_memory, onednn_gain, use_onednn
setting = torch.backends.mkldnn.matmul
before, gain = setting.fp32_precision, onednn_gain()
unchanged = setting.fp32_precision == before
if gain:
    use_onednn()
a, b = torch.randn(300, 400), torch.randn(400, 500)
error = ((a @ b).double() - a.double() @ b.double()).norm() / (a @ b).norm()
print(unchanged, error.item() < 1e-5, setting.fp32_precision == ("bf16" if gain else before), gain == 0 or 0.1 < gain < 10)
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
    assert (
        printed[0] == ["True"] * 4
    )  # the trial changes nothing; fp32 stays exact; the setting is made; a credible ratio


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_memory_that_was_freed_is_not_faulted_in_again(printed):
    assert printed[1] == ["True", "True"]
