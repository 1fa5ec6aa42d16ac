"""Integers of int64 in place of int32.

TensorFlow has no int32 variables on GPUs. One on the CPU is read and assigned through the host at each step, and what
XLA compiles for a GPU cannot read it at all.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def on_any_device(value: Any) -> tf.Tensor:
    """The value with a dtype of which a GPU can have a variable: int64 in place of int32."""
    value = tf.convert_to_tensor(value)
    return tf.cast(value, tf.int64) if value.dtype == tf.int32 else value
