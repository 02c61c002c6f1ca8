"""The terminal view in a real terminal: its colours, how it is left and stopped, and that it writes into no run folder."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_folders import write_run

from paceline.rundir import lock_run

MOST_S = 120.0  # for what takes a second
WHOLE = ("1,240/2,500", "q quit", " events ")  # stand at the beginning, at the end and between
SHOW = """
import sys
sys.path[:0] = [{tests!r}]
from snapshots import training
from paceline.watch.terminal.app import WatchApp
class Told:
    def update(self): return training()
WatchApp(Told(), interval_s=3600, ascii_only={ascii}).run()
"""

pytestmark = [pytest.mark.dist, pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here")]


class Tmux:
    """A terminal of 80 by 24 with a shell in it."""

    def __init__(self, folder: Path):
        self.words = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        self.env = {name: value for name, value in os.environ.items() if name not in ("TMUX", "NO_COLOR")}
        self.env |= {"LC_ALL": "C.UTF-8", "TERM": "screen-256color"}
        self.ask("new-session", "-d", "-s", "a", "-x", "80", "-y", "24", "bash --norc --noprofile -i")

    def ask(self, *args: str) -> str:
        return subprocess.run([*self.words, *args], env=self.env, capture_output=True, text=True, check=True).stdout

    def pane(self, *options: str) -> str:
        return self.ask("capture-pane", "-p", *options, "-t", "a")

    def press(self, *keys: str) -> None:
        self.ask("send-keys", "-t", "a", *keys)

    def run(self, *args: str) -> None:
        """The shell says how it ended."""
        self.press("-l", f"{shlex.join(args)}; echo left: $?")
        self.press("Enter")

    def wait_for(self, *args: str) -> str:
        until = time.monotonic() + MOST_S
        while not all(word in (screen := self.pane()) for word in args):
            assert time.monotonic() < until, screen
            time.sleep(0.1)  # each look is a process
        return screen


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    started = Tmux(tmp_path)
    yield started
    started.ask("kill-server")


def show(folder: Path, *, ascii: bool = False) -> list[str]:
    script = folder / "show.py"
    script.write_text(SHOW.format(tests=str(Path(__file__).parent), ascii=ascii))
    return [sys.executable, str(script)]


def check_screen(tmux: Tmux, *, ascii: bool, is_coloured: bool) -> None:
    lines = (screen := tmux.wait_for(*WHOLE)).splitlines()
    assert len(lines) == 24 and max(map(len, lines)) <= 80
    assert lines[0].startswith(" books  * training" if ascii else " books  ● training")
    assert screen.isascii() == ascii
    assert bool(re.search(r"\x1b\[[\d;]*(3[0-7]|38)[;m]", tmux.pane("-e"))) == is_coloured


def test_it_works_in_a_tmux_of_80_by_24_without_colour_and_in_plain_characters(tmux, tmp_path):
    """Ctrl-C leaves the terminal as it was."""
    tmux.run("env", "NO_COLOR=1", *show(tmp_path, ascii=True))
    check_screen(tmux, ascii=True, is_coloured=False)
    tmux.press("C-c")
    tmux.wait_for("left: 0")


def test_it_works_in_colour_and_ctrl_z_returns_the_terminal_and_fg_and_ctrl_l_repaint(tmux, tmp_path):
    tmux.run(*show(tmp_path))
    check_screen(tmux, ascii=False, is_coloured=True)
    tmux.press("C-z")
    assert "1,240/2,500" not in tmux.wait_for("Stopped")
    tmux.press("f", "g", "Enter")
    tmux.wait_for(*WHOLE)
    tty = Path(tmux.ask("display-message", "-p", "-t", "a", "#{pane_tty}").strip())
    tty.write_text("\x1b[2J\x1b[Hsomething else")
    assert "1,240/2,500" not in tmux.wait_for("something else")
    tmux.press("C-l")
    assert "something else" not in tmux.wait_for(*WHOLE)


@pytest.mark.parametrize("leave", ["q", pytest.param("C-c", marks=pytest.mark.soak)])
def test_watching_does_not_change_a_run(tmux, tmp_path, leave):
    """After every page, a text found and a picture held."""
    run = write_run(tmp_path / "runs", "a", end="failed", log="step 1\nRuntimeError: boom\n")
    before = state(run.path)
    args = ["watch", "a", "--interval", "0.2", "--runs-dir", str(tmp_path / "runs")]
    tmux.run(sys.executable, "-m", "paceline.cli", *args)
    tmux.wait_for("failed")
    for page in "234":
        tmux.press(page)
    tmux.press("5")
    tmux.wait_for("log of rank 0")
    tmux.press("/", "b", "o", "o", "Enter")
    tmux.wait_for("1 line with boo")
    tmux.press("6", "c", "Space", "r", "r", "Space", "1")
    tmux.wait_for("1 overview")
    tmux.press(leave)
    tmux.wait_for("left: 0")
    assert state(run.path) == before


def test_without_a_name_and_with_several_running_runs_it_opens_with_their_list(tmux, tmp_path):
    locks = [lock_run(write_run(tmp_path / "runs", name, end=None)) for name in ("first", "second")]
    tmux.run(sys.executable, "-m", "paceline.cli", "watch", "--runs-dir", str(tmp_path / "runs"))
    screen = tmux.wait_for("── runs: 2", "first ", "second ", "Enter open")
    assert len(re.findall(r"(?:first|second) .*● (?:running|training) .*100/200", screen)) == 2
    tmux.press("Down", "Enter")
    tmux.wait_for("1 overview", "── loss")
    tmux.press("q")
    tmux.wait_for("left: 0")
    for lock in locks:
        os.close(lock)


def state(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in folder.rglob("*")}
