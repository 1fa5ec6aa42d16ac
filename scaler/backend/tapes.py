"""Whether a gradient tape records now."""

from __future__ import annotations


def tape_records() -> bool:
    """Whether a `tf.GradientTape` around this call records what it computes; False where TensorFlow does not tell.

    TensorFlow has no public name for it.
    """
    try:
        from tensorflow.python.eager import record

        return bool(record.could_possibly_record())
    except (ImportError, AttributeError):
        return False
