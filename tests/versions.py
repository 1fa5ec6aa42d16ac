"""What Keras did not have from the start: marks that skip a test on an older one, and say why."""

import keras
import pytest
from packaging.version import Version

SINCE = {
    "Muon": "3.10",
    "a word from Keras's LossScaleOptimizer to the optimizer that it wraps": "3.10",
    "MultiOptimizer": "3.15",
    "a function as a constraint": "3.15",
}


def needs_keras(name):
    """A mark for tests of what Keras has since a later version than the oldest that is claimed."""
    older = Version(keras.__version__) < Version(SINCE[name])
    return pytest.mark.skipif(older, reason=f"{name} is new in Keras {SINCE[name]}, and this is {keras.__version__}")


def parameters(names):
    """The names as parameters of a test; those that this Keras lacks are skipped."""
    return [pytest.param(name, marks=[needs_keras(name)] if name in SINCE else []) for name in names]
