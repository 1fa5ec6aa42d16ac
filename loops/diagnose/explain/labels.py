"""Labels that a model has no class for: on a GPU and under XLA TensorFlow makes a NaN of them, in place of an error.

The CPU's kernel refuses them, so that a step that XLA compiled may raise where it is repeated without XLA.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from loops.diagnose.graph.origin import Frame
from loops.diagnose.graph.scan import Scan
from loops.support.batches import label_in

_KERNEL = "SparseSoftmaxCrossEntropyWithLogits"


class Label(NamedTuple):
    """A label outside of the classes, the first of a batch, and the number of classes that the model has."""

    value: int
    classes: int


def label_behind(seen: Scan, frame: Frame) -> Label | None:
    """The label for which a tensor became NaN, or None if that has another reason.

    Args:
        seen: The measured step.
        frame: The tensor in which the failure began.
    """
    operation = seen.operations[frame.name]
    if operation.type != _KERNEL:
        return None
    logits, labels = (seen.values.get(tensor.name) for tensor in operation.inputs)
    if logits is None or labels is None:
        return None
    classes, given = int(logits.shape[-1]), np.asarray(labels)
    outside = np.flatnonzero((given < 0) | (given >= classes))
    if not len(outside):
        return None
    return Label(int(given.reshape(-1)[outside[0]]), classes)


def label_refused(error: tf.errors.OpError) -> Label | None:
    """The label that an error of TensorFlow's kernel is about, or None if it is about something else."""
    found = label_in(error)
    return None if found is None else Label(*found)


def example_with(value: int, batch: Any) -> int | None:
    """The first example with a label; None unless one part of the batch alone has a whole number for each example."""
    parts = [one for one in tf.nest.flatten(batch) if isinstance(one, tf.Tensor) and one.dtype.is_integer]
    parts = [np.asarray(one) for one in parts]
    flat = [one.reshape(-1) for one in parts if one.ndim and one.size == len(one)]
    places = [np.flatnonzero(one == value) for one in flat]
    return int(places[0][0]) if len(places) == 1 and len(places[0]) else None
