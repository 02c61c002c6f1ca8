"""
Put on PYTHONPATH, makes every python's torch one that was built without libuv: right after `import torch`, the function
that says whether libuv is there is overwritten in memory to say no, so torch's own check raises its own error.

x86-64 Linux only. NO_LIBUV_OFFSET: where that function lies in libtorch_cpu.so.
"""

import ctypes
import importlib.abc
import importlib.util
import mmap
import os
import sys

RETURN_FALSE = b"\x31\xc0\xc3"  # xor eax, eax; ret


class AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        sys.meta_path.insert(0, self)  # this may have been a question, not the import
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            say_no_libuv()

        spec.loader.exec_module = execute_and_patch
        return spec


def say_no_libuv():
    with open("/proc/self/maps") as maps:
        start = min(int(line.split("-")[0], 16) for line in maps if line.rstrip().endswith("libtorch_cpu.so"))
    address = start + int(os.environ["NO_LIBUV_OFFSET"])
    page = ctypes.c_void_p(address & ~(mmap.PAGESIZE - 1))
    size = ctypes.c_size_t(2 * mmap.PAGESIZE)
    libc = ctypes.CDLL(None)
    assert libc.mprotect(page, size, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) == 0
    ctypes.memmove(address, RETURN_FALSE, len(RETURN_FALSE))
    libc.mprotect(page, size, mmap.PROT_READ | mmap.PROT_EXEC)


sys.meta_path.insert(0, AfterTorch())
