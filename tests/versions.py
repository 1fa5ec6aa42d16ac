"""What older versions of Keras lack: marks that skip a test on an older one, and say why."""

import keras
import pytest
from packaging.version import Version

SINCE = {
    "a word from Keras's LossScaleOptimizer to the optimizer that it wraps": "3.10",
    "Muon": "3.13",  # From 3.10 to 3.12 it is there, and its first step on TensorFlow raises an AttributeError.
    "MultiOptimizer": "3.15",
    "a function as a constraint": "3.15",
    "ScheduleFreeAdamW": "3.15",
}


def needs_keras(name):
    """A mark for tests of what Keras has since a later version than the oldest that is claimed."""
    older = Version(keras.__version__) < Version(SINCE[name])
    return pytest.mark.skipif(older, reason=f"{name} needs Keras {SINCE[name]} or newer; this is {keras.__version__}")


def parameters(names):
    """The names as parameters of a test; those that this Keras lacks are skipped."""
    return [pytest.param(name, marks=[needs_keras(name)] if name in SINCE else []) for name in names]
