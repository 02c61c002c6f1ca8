"""
Hides packages from every Python that has this folder on its path: those that BLOCKED_IMPORTS names, as if they were not installed.

A folder on PYTHONPATH that has a module of the name is still found.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

BLOCKED = set(os.environ.get("BLOCKED_IMPORTS", "").split(","))


class BareFinder(PathFinder):
    """Finds what PathFinder does, but for the hidden packages in site-packages."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns where a module is; None where it is not, or hidden."""
        if fullname in BLOCKED:
            path = [folder for folder in sys.path if "-packages" not in folder]
        return PathFinder.find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = BareFinder
