"""Marks that skip a test, and say why: on a Keras that lacks something, or on other versions than the newest pinned."""

import pathlib
import re

import keras
import pytest
import tensorflow as tf
from packaging.version import Version

SINCE = {
    "a word from Keras's LossScaleOptimizer to the optimizer that it wraps": "3.10",
    "Muon": "3.13",  # From 3.10 to 3.12 it is there, and its first step on TensorFlow raises an AttributeError.
    "MultiOptimizer": "3.15",
    "a function as a constraint": "3.15",
    "ScheduleFreeAdamW": "3.15",
}
ROOT = pathlib.Path(__file__).parents[1]


def pinned(name):
    """The versions of a constraints file, by package; several where they depend on Python's."""
    found = {}
    for package, version in re.findall(r"^([a-z0-9_-]+)==([^;\s]+)", (ROOT / name).read_text(), flags=re.MULTILINE):
        found.setdefault(package, set()).add(Version(version))
    return found


_NEWEST = {name: max(pinned("constraints.txt")[name]) for name in ("tensorflow", "keras")}
newest_pinned = pytest.mark.skipif(
    {"tensorflow": Version(tf.__version__), "keras": Version(keras.__version__)} != _NEWEST,
    reason=f"exact numbers are those of TensorFlow {_NEWEST['tensorflow']} with Keras {_NEWEST['keras']}",
)


def needs_keras(name):
    """A mark for tests of what Keras has since a later version than the oldest that is claimed."""
    older = Version(keras.__version__) < Version(SINCE[name])
    return pytest.mark.skipif(older, reason=f"{name} needs Keras {SINCE[name]} or newer; this is {keras.__version__}")


def parameters(names):
    """The names as parameters of a test; those that this Keras lacks are skipped."""
    return [pytest.param(name, marks=[needs_keras(name)] if name in SINCE else []) for name in names]
