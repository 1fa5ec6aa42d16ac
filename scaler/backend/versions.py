"""What to say of a release of TensorFlow or Keras that lacks what this package needs."""

from __future__ import annotations

import functools
import warnings

import keras
import tensorflow as tf

from scaler.errors import UnsupportedVersion

_REMEDY = "Install a version that this package names in its metadata."


def versions() -> str:
    """The versions that are installed, in words."""
    return f"Keras {keras.__version__} on TensorFlow {tf.__version__}"


@functools.cache
def say_once(what: str) -> None:
    """Warns, the first time, that something works otherwise with these versions; `what` follows their names."""
    warnings.warn(f"{versions()} {what}", UserWarning, stacklevel=3)


def unsupported(where: str, what: str) -> UnsupportedVersion:
    """The error to raise where these versions cannot be used; `what` follows their names."""
    return UnsupportedVersion(f"{where}: {versions()} {what} {_REMEDY}")
