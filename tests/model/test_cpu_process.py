"""Settings of the whole process, so each is tried in a process of its own."""

import subprocess
import sys

import pytest

ONEDNN = """
import torch
from paceline.model.cpu_process import fp32_matmul_through_onednn
used = fp32_matmul_through_onednn()
a, b = torch.randn(300, 400), torch.randn(400, 500)
error = ((a @ b).double() - a.double() @ b.double()).norm() / (a @ b).norm()
print(used, error.item() < 1e-5, torch.backends.mkldnn.matmul.fp32_precision == ("bf16" if used else "none"))
"""

MEMORY = """
import resource, sys
import torch
from paceline.model.cpu_process import keep_freed_memory
kept = keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(), faults()
print(kept, faults() < 1000)  # 64 MiB taken five times; given back each time, that is 80,000 pages
"""


def output_of(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_matmuls_stay_fp32_whether_onednn_takes_them_or_not():
    used, exact, setting = output_of(ONEDNN)
    assert used in ("True", "False")
    assert (exact, setting) == ("True", "True")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_memory_that_was_freed_is_not_faulted_in_again():
    assert output_of(MEMORY) == ["True", "True"]
