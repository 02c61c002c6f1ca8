"""What the kernel log says of a run's own processes, with their ranks."""

from paceline.explain.kernel_log import kernel_lines

KILLED = "Nov 21 10:00:00 node-3 kernel: Out of memory: Killed process 4712 (python) total-vm:68719476kB"
ANOTHER = "Nov 21 10:00:00 node-3 kernel: Out of memory: Killed process 99 (java) total-vm:1kB"


def test_lines_about_the_runs_processes_have_their_ranks(tmp_path):
    path = tmp_path / "kern.log"
    path.write_text(f"{ANOTHER}\n{KILLED}\nNov 21 kernel: 4712 packets\n")
    assert kernel_lines({4711: 0, 4712: 1}, kmsg=tmp_path / "none", kept=(path,)) == [(1, KILLED)]


def test_a_log_that_cannot_be_read_says_nothing(tmp_path):
    assert kernel_lines({4711: 0}, kmsg=tmp_path / "none", kept=(tmp_path / "none",)) == []
