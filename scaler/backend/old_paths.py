"""Modules that have moved, which are found at their old paths, too: by the table `_MOVED` of their package."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence


class Finder(importlib.abc.MetaPathFinder):
    """Finds what stands in the table `_MOVED` of its package: the new names of modules by their old ones."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As the import system asks for it."""
        package, _, name = fullname.partition(".")
        if package not in ("scaler", "loops"):
            return None
        for old, new in getattr(sys.modules.get(package), "_MOVED", {}).items():
            if name == old or name.startswith(f"{old}."):
                return importlib.machinery.ModuleSpec(fullname, _Loader(new + name[len(old) :], warns=name == old))
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, new: str, warns: bool):
        self._new, self._warns = new, warns

    def exec_module(self, module: types.ModuleType) -> None:
        """Puts the moved module in the place of the empty one, so that there is one of it under both names."""
        if self._warns:
            text = f"{module.__name__} has moved: import {self._new}."
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(self._new)
