"""Many small cases in one test: as tests of their own, each costs pytest and xdist about five milliseconds."""

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def with_rows(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """As pytest.mark.parametrize for a test without fixtures, which runs with every row and then fails with the errors of all."""
    is_single = isinstance(names, str) and "," not in names
    cases = [(row,) if is_single else tuple(row) for row in rows]
    assert cases

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        @functools.wraps(test)
        def test_all() -> None:
            errors = []
            for case in cases:
                try:
                    test(*case)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"with {', '.join(map(repr, case))}")
                    errors.append(error)
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} of {len(cases)} rows", errors)

        del test_all.__wrapped__  # pytest would take its parameters for fixtures
        return test_all

    return decorate


def mostly_soak(names: Iterable[str], *, short: Collection[str]) -> list[Any]:
    """Parameters of a test, of which all but the short ones belong to `make soak`."""
    return [name if name in short else pytest.param(name, marks=pytest.mark.soak) for name in names]
