"""The versions that a sentence about a private name is about."""

from __future__ import annotations

import keras
import tensorflow as tf


def versions() -> str:
    """The versions that are installed, in words."""
    return f"Keras {keras.__version__} on TensorFlow {tf.__version__}"
