"""Whether a gradient tape records now.

could_possibly_record    absent: no tape seems to record: a `loss_scale` that multiplies the loss by hand counts as
read for logging; a graph still recognises it, and eager mode refuses it once the scale has moved
"""

from __future__ import annotations


def tape_records() -> bool:
    """Whether a `tf.GradientTape` records the computations of this call. False if TensorFlow does not tell."""
    try:
        from tensorflow.python.eager import record

        return bool(record.could_possibly_record())
    except (ImportError, AttributeError):
        return False
