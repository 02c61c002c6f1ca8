"""
Two settings of a process that trains on a CPU, each worth more than any change of code.

Both hold for the whole process, so the worker makes them, once, before its first large tensor; a library must not.
"""

import ctypes
import sys

import torch

FP32_ERROR = 1e-5  # relative, of a matmul over 512 terms: fp32 makes 3e-7, bf16 or tf32 inside make over 1e-4
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # from glibc's malloc.h


def fp32_matmul_through_onednn() -> bool:
    """fp32 matmuls by oneDNN instead of MKL, where that keeps them fp32; says whether it is so.

    MKL leaves half of an AMD CPU unused: 110 against 250 GFLOP/s on one core of an EPYC 9005. PyTorch sends fp32 to oneDNN
    only when bf16 inside is allowed. A CPU without matrix units has no use for that and computes in fp32; a trial tells.
    """
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    try:
        setting.fp32_precision = "bf16"
        batched = torch.bmm(a.view(4, 128, 512), b.expand(4, -1, -1)).view(512, 512)
        errors = [(y - exact).norm() / exact.norm() for y in (a @ b, a @ b.t().contiguous().t(), batched)]
    except RuntimeError:  # a build without oneDNN refuses the setting
        return False
    if max(errors) < FP32_ERROR:
        return True
    setting.fp32_precision = before
    return False


def keep_freed_memory() -> bool:
    """malloc keeps what is freed instead of giving it back to Linux; says whether it does.

    A training step frees and takes the same gigabyte again and again. Each page given back costs a fault when it is next touched:
    a quarter of the step's time was seen. Memory in use stays what it was at its highest.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    settings = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 64 << 20}
    return all(mallopt(name, value) == 1 for name, value in settings.items())
