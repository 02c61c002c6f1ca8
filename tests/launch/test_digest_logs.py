"""Rank logs on the terminal as they grow: whole lines, bars, unfinished lines, floods and bytes that are no text."""

import io
import os
import time
import tracemalloc

import pytest

from paceline.launch.digest import LogTail
from paceline.terminal import TolerantStream


class Screen:
    """Logs that a test writes to, the text shown for them, and a clock that the test turns."""

    def __init__(self, folder, num_ranks, *, colour=False, encoding="utf-8"):
        self.paths = {rank: folder / f"{rank}.log" for rank in range(num_ranks)}
        self.bytes = io.BytesIO()
        stream = io.TextIOWrapper(self.bytes, encoding=encoding, write_through=True)
        self.now = 100.0
        self.tail = LogTail(self.paths, stream=stream, colour=colour, clock=lambda: self.now)

    def write(self, text, rank=0):
        with self.paths[rank].open("ab") as file:
            file.write(text if isinstance(text, bytes) else text.encode())

    def shown(self, *, after_s=0.0):
        """What is shown from here on, `after_s` later."""
        self.now += after_s
        start = len(self.bytes.getvalue())
        self.tail.poll()
        return self.bytes.getvalue()[start:].decode(errors="surrogateescape")

    def closed(self):
        start = len(self.bytes.getvalue())
        self.tail.close()
        return self.bytes.getvalue()[start:].decode()


@pytest.fixture
def screen(tmp_path):
    return Screen(tmp_path, 2)


@pytest.fixture
def lone(tmp_path):
    return Screen(tmp_path, 1)


def test_each_line_has_its_rank_before_it(screen):
    screen.write("a\nb\n", rank=0)
    screen.write("c\n", rank=1)
    assert screen.shown() == "[0] a\n[0] b\n[1] c\n"
    assert screen.shown() == ""


@pytest.mark.parametrize("pieces", [
    # what is written, how much later it is looked at, and what is shown then
    pytest.param([("a\nb\n", 0, "a\nb\n")], id="a rank alone has no prefix"),
    pytest.param([("to", 0, ""), ("ge", 0.9, ""), ("ther\n", 0.9, "together\n")], id="pieces of a line are one line"),
    pytest.param([("\r100%", 0, "100%\n"), ("\n", 0, "")], id="the last state of a bar is not repeated"),
    pytest.param([("\r50%", 0, "50%\n"), ("\r   \rafter\n", 60, "after\n")], id="a bar that erases itself leaves nothing"),
    pytest.param([("a\r\nb\r", 0, "a\nb\n"), ("\n", 0, "")], id="line ends of Windows"),
    pytest.param([(b"caf\xe9 \x00\x07ok\xff\n\xe6\xa8\xa1\n", 0, "caf\ufffd ok\ufffd\n\u6a21\n")], id="bytes that are no text"),
    pytest.param([(b"\xe6\xa8", 0, ""), (b"\xa1\n", 0, "\u6a21\n")], id="a character cut in two"),
])  # fmt: skip
def test_lines_are_shown_once_they_are_whole_and_bytes_of_no_use_left_out(lone, pieces):
    assert lone.shown() == ""  # a log that is not there yet is waited for
    for text, after_s, shown in pieces:
        lone.write(text)
        assert lone.shown(after_s=after_s) == shown


def test_prefixes_of_ten_and_more_ranks_line_up(tmp_path):
    screen = Screen(tmp_path, 11)
    screen.write("a\n", rank=9)
    screen.write("b\n", rank=10)
    assert screen.shown() == "[9]  a\n[10] b\n"


def test_half_a_line_is_shown_after_a_moment_and_its_rest_when_it_comes(screen):
    screen.write("loading ...")
    assert screen.shown() == ""
    assert screen.shown(after_s=0.5) == ""
    assert screen.shown(after_s=0.6) == "[0] loading ...\n"
    assert screen.shown(after_s=9) == ""
    screen.write(" done\nnext\n")
    assert screen.shown() == "[0]  done\n[0] next\n"


def test_half_a_line_at_the_end_is_shown(lone):
    lone.write("no newline")
    assert lone.closed() == "no newline\n"


def test_of_a_progress_bar_its_first_and_last_state_are_shown_and_one_every_ten_seconds(lone):
    shown = ""
    for percent in range(101):
        lone.write(f"\r{percent:3}%|bar| {percent}/100")
        shown += lone.shown(after_s=0.25)
    lone.write("\n")
    shown += lone.shown()
    assert shown == "  0%|bar| 0/100\n 40%|bar| 40/100\n 80%|bar| 80/100\n100%|bar| 100/100\n"


def test_a_bar_that_writes_its_return_last_is_a_bar_as_well(lone):
    shown = ""
    for percent in range(4):
        lone.write(f"{percent}%\r")
        shown += lone.shown(after_s=1)
    lone.write("done\n")
    assert shown + lone.shown() == "0%\ndone\n"


def test_a_terminal_that_cannot_show_a_character_shows_another(tmp_path):
    screen = Screen(tmp_path, 1, encoding="ascii")
    screen.write("größe\n")
    assert screen.shown() == "gr??e\n"


def test_colours_of_a_script_are_kept_on_a_terminal_and_what_moves_the_cursor_nowhere(tmp_path):
    line = "\x1b[31mred\x1b[0m\x1b[2K\x1b[1A\x1b]0;title\x07 text\n"
    for colour, expected in [(False, "red text\n"), (True, "\x1b[31mred\x1b[0m text\x1b[0m\n")]:
        (tmp_path / str(colour)).mkdir()
        screen = Screen(tmp_path / str(colour), 1, colour=colour)
        screen.write(line)
        assert screen.shown() == expected


def test_ranks_have_colours_of_their_own_on_a_terminal(tmp_path):
    screen = Screen(tmp_path, 2, colour=True)
    screen.write("a\n", rank=0)
    screen.write("b\n", rank=1)
    assert screen.shown() == "\x1b[36m[0]\x1b[0m a\n\x1b[33m[1]\x1b[0m b\n"


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_very_long_line_is_cut_and_says_where_the_rest_is(lone, pieces):
    for _ in range(pieces):
        lone.write("x" * (7_000_000 // pieces))
        assert lone.shown() == ""
    lone.write("\nnext\n")
    assert lone.shown() == f"{'x' * 4096} … 6,995,904 more bytes: {lone.paths[0]}\nnext\n"


def test_a_long_line_among_others_is_cut_too(lone):
    lone.write("a\n" + "x" * 5000 + "\nb\n")
    assert lone.shown() == f"a\n{'x' * 4096} … 904 more bytes: {lone.paths[0]}\nb\n"


def test_100_mb_at_once_are_shown_quickly_and_in_little_memory(tmp_path):
    path = tmp_path / "0.log"
    path.write_bytes(b"step 000123 | loss 3.1416 | some more text here\n" * 2_200_000)
    with open(os.devnull, "w") as stream:
        tail = LogTail({0: path, 1: tmp_path / "1.log"}, stream=stream, colour=False)
        tracemalloc.start()
        tail.poll()
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        started = time.process_time()
        tail.close()
        assert time.process_time() - started < 10  # seconds of the processor; about 0.5
    assert peak_bytes < 8_000_000
    assert tail.logs[0].offset == path.stat().st_size


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        tail = LogTail({0: tmp_path / "0.log"}, stream=TolerantStream(stream), colour=False)
        (tmp_path / "0.log").write_text("a\n")
        tail.poll()
        (tmp_path / "0.log").write_text("a\nb\n")
        tail.close()
    assert tail.logs[0].offset == 4
