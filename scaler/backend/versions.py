"""Messages about a release of TensorFlow or Keras that lacks what this package needs."""

from __future__ import annotations

import functools
import warnings

import keras
import tensorflow as tf

from scaler.errors import UnsupportedVersion

_REMEDY = "Install a version that this package names in its metadata."


def versions() -> str:
    """The installed versions, in words."""
    return f"Keras {keras.__version__} on TensorFlow {tf.__version__}"


@functools.cache
def say_once(what: str) -> None:
    """Warns once that something works differently with these versions; `what` follows their names."""
    warnings.warn(f"{versions()} {what}", UserWarning, stacklevel=3)


def unsupported(where: str, what: str) -> UnsupportedVersion:
    """Makes the error for versions that cannot be used here; `what` follows their names."""
    return UnsupportedVersion(f"{where}: {versions()} {what} {_REMEDY}")
