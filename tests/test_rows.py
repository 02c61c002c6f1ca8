"""Tests with rows run with all of them, and name each with which they fail."""

import pytest
from rows import with_rows


def test_every_row_with_which_a_test_fails_is_an_error_with_its_values():
    @with_rows(("number", "name"), [(1, "one"), (0, "none"), (2, "two"), (3, "three")])
    def check(number, name):
        with pytest.raises(ZeroDivisionError):
            assert name != "two"
            1 / number

    with pytest.raises(BaseExceptionGroup, match="3 of 4 rows") as group:
        check()
    notes = [(type(error), error.__notes__) for error in group.value.exceptions]
    failed, wrong = pytest.fail.Exception, AssertionError
    assert notes == [(failed, ["with 1, 'one'"]), (wrong, ["with 2, 'two'"]), (failed, ["with 3, 'three'"])]


def test_a_row_of_a_single_name_is_its_value():
    seen = []
    with_rows("pair", [(1, 2), (3, 4)])(seen.append)()
    assert seen == [(1, 2), (3, 4)]
