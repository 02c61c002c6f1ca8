"""Sentences of the catalogue with a log's values in them."""

import pytest

from paceline.explain.fill import fill, known


@pytest.mark.parametrize(
    ("template", "values", "said"),
    [
        ("rank {rank} asked for {wanted}", {"rank": "3", "wanted": "2 GiB"}, "rank 3 asked for 2 GiB"),
        ("rank {rank} asked for {wanted}", {}, "a rank asked for n/a"),
        ("half the batch[: --device-batch-size {half_batch}]", {}, "half the batch"),
        (
            "half the batch[: --device-batch-size {half_batch}]",
            {"half_batch": "8"},
            "half the batch: --device-batch-size 8",
        ),
        ("no room[ ({free} of {total})]", {"free": "1 GiB"}, "no room"),
        ("data[0] is {message}", {"message": "a {rank} [b]"}, "data[0] is a {rank} [b]"),
    ],
)
def test_a_sentence_is_filled_and_what_is_unknown_vanishes(template, values, said):
    assert fill(template, values) == said


def test_values_are_short_and_on_one_line():
    assert known({"a": "x\n  y", "b": None, "c": "", "d": 7, "e": "z" * 1000}) == {"a": "x y", "d": "7", "e": "z" * 300}
