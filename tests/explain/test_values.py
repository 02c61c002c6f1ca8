"""Values as people read them."""

import pytest

from paceline.explain.catalogue import load_catalogue
from paceline.explain.reader import read_log
from paceline.explain.verdict import reach_verdict

ASKED = "RuntimeError: [enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate {}."


@pytest.mark.parametrize("said", ["67108864 bytes", "67108864"])
def test_bytes_that_an_allocator_could_not_get_are_told_in_units(said):
    log = read_log([ASKED.format(said).encode()], literals=load_catalogue().literals)
    found = reach_verdict([log], load_catalogue())
    assert found.cause == "host-oom-killed"
    assert "(64.0 MiB asked for)" in found.summary
