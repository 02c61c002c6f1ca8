"""What the engine of a host leaves unimported; real launches are in test_supervisor.py."""

import sys

from paceline.launch.elastic import Postponed


def test_a_postponed_module_is_imported_once_something_asks_for_an_attribute_of_it(monkeypatch):
    postponed = Postponed("colorsys")
    monkeypatch.setitem(sys.modules, "colorsys", postponed)
    import colorsys

    assert colorsys is postponed and not hasattr(colorsys, "__file__")
    assert colorsys.ONE_THIRD == 1 / 3
    assert sys.modules["colorsys"] is not postponed
