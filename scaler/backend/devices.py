"""What kind of device computes, for what is fast on one kind and slow on the other."""

from __future__ import annotations

import tensorflow as tf


def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU. What is traced then is for one, wherever it is placed."""
    return bool(tf.config.list_physical_devices("GPU"))
