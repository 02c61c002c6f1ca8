"""The end of a growing file, and the lines in it with a text."""

from paceline.watch.growing_file import line_offset, read_part, read_tail, search


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


def test_the_parts_of_a_log_put_together_are_the_log_from_either_end(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {number}\n" for number in range(1, 100)))
    size = path.stat().st_size
    forth, back, at = "", "", 0
    while at < size:
        part = read_part(path, start=at, max_bytes=100)
        forth, at = forth + part["text"], part["to"]
    while at > 0:
        part = read_part(path, stop=at, max_bytes=100)
        back, at = part["text"] + back, part["from"]
    assert forth == back == path.read_text()


def test_a_log_is_read_around_a_line(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {number}\n" for number in range(1, 100)))
    for line in (1, 50, 99):
        part = read_part(path, line=line, max_bytes=60)
        assert part["text"].split("\n")[part["index"]] == f"line {line}" and part["line"] == line
    assert line_offset(path, 3) == len("line 1\nline 2\n") and line_offset(path, 200) is None
    assert read_part(path, line=200, max_bytes=60)["text"] == read_tail(path, max_bytes=60)


def test_a_line_longer_than_a_part_can_be_paged(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("x" * 250 + "\nend\n" + "y" * 99 + "\n")
    at, text = 0, ""
    while at < path.stat().st_size:
        part = read_part(path, start=at, max_bytes=100)
        assert part["to"] > at
        at, text = part["to"], text + part["text"]
    assert text == path.read_text()
