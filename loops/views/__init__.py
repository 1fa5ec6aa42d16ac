"""Readers of recorded runs."""

import importlib
import types


def __getattr__(name: str) -> types.ModuleType:
    """Imports `plots`, which needs matplotlib, when it is asked for."""
    if name == "plots":
        return importlib.import_module("loops.views.plots")
    raise AttributeError(f"module 'loops.views' has no attribute {name!r}")
