"""The installed versions, for messages about private names."""

from __future__ import annotations

import keras
import tensorflow as tf


def versions() -> str:
    """The installed versions of Keras and TensorFlow, in words."""
    return f"Keras {keras.__version__} on TensorFlow {tf.__version__}"
