"""What the engine of a host leaves unimported, and which processes are shells; real launches are in test_supervisor.py."""

import os
import subprocess
import sys

from paceline.launch.elastic import Postponed, is_shell


def test_a_postponed_module_is_imported_once_something_asks_for_an_attribute_of_it(monkeypatch):
    postponed = Postponed("colorsys")
    monkeypatch.setitem(sys.modules, "colorsys", postponed)
    import colorsys

    assert colorsys is postponed and not hasattr(colorsys, "__file__")
    assert colorsys.ONE_THIRD == 1 / 3
    assert sys.modules["colorsys"] is not postponed


def test_a_shell_is_known_by_its_executable_until_it_becomes_its_program(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/bash\necho ready\nread line\nexec cat\n")
    script.chmod(0o755)
    with subprocess.Popen([script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert (process.stdout.readline(), is_shell(process.pid)) == ("ready\n", True)
        process.stdin.write("\nprogram\n")
        assert (process.stdout.readline(), is_shell(process.pid)) == ("program\n", False)
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_shell(process.pid, before=True) and not is_shell(process.pid, before=False)
