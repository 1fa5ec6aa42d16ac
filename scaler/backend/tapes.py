"""Whether a gradient tape records now.

could_possibly_record    absent: nothing seems to record: a `loss_scale` that is multiplied in by hand counts as read
for a log, which a graph recognises, and which eager mode refuses once the scale has moved
"""

from __future__ import annotations


def tape_records() -> bool:
    """Whether a `tf.GradientTape` around this call records what it computes; False where TensorFlow does not tell."""
    try:
        from tensorflow.python.eager import record

        return bool(record.could_possibly_record())
    except (ImportError, AttributeError):
        return False
