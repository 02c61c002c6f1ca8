"""The end of a growing file, and the lines in it with a text."""

from paceline.watch.growing_file import read_tail, search


def test_the_end_of_a_log_is_whole_lines_as_a_terminal_shows_them(tmp_path):
    path = tmp_path / "x.log"
    path.write_bytes(b"first line\n 1%|\r 2%|\r 3%|\n\x1b[31mred\x1b[0m\x07\nlast \xff")
    assert read_tail(path).splitlines() == ["first line", " 3%|", "red", "last �"]
    assert read_tail(path, max_bytes=38).splitlines()[0] == " 3%|"
    assert read_tail(tmp_path / "none.log") == ""


def test_a_search_returns_the_last_matching_lines_with_their_numbers(tmp_path):
    path = tmp_path / "x.log"
    path.write_text(
        "".join(f"line {number} {'ERROR' if number % 1000 == 0 else 'ok'}\n" for number in range(1, 100_001))
    )
    hits = search(path, "error", limit=3)
    assert hits == [(98000, "line 98000 ERROR"), (99000, "line 99000 ERROR"), (100000, "line 100000 ERROR")]
    assert search(path, "nothing like it") == []
    assert search(path, "") == []
