"""What a `tf.train.Checkpoint` would write, read without writing it.

_saver                      what the checkpoint writes with    absent: saved at the visit, with one UserWarning
_gather_serialized_tensors  the names and values it writes     absent, or other: the same
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

_KEYS = {"one/.ATTRIBUTES/VARIABLE_VALUE", "_CHECKPOINTABLE_OBJECT_GRAPH"}


class Value(NamedTuple):
    """A tensor that a checkpoint writes.

    Attributes:
        name: Its name in the file.
        slices: Which part of the name's value it is, as `tf.raw_ops.SaveV2` takes it.
        tensor: On the host. It may share its memory with a variable.
        fetched: Whether it came from another device, and so shares its memory with nothing.
    """

    name: str
    slices: str
    tensor: tf.Tensor
    fetched: bool


def readable() -> bool:
    """Whether the installed TensorFlow tells what a checkpoint writes."""
    try:
        return {value.name for value in values(tf.train.Checkpoint(one=tf.Variable(1.0)))} == _KEYS
    except (AttributeError, TypeError, ValueError):
        return False


def values(checkpoint: tf.train.Checkpoint) -> Iterator[Value]:
    """All that the checkpoint writes, as it is now. Each variable is read when its turn comes."""
    gathered, _, registered, _ = checkpoint._saver._gather_serialized_tensors()
    assert not registered  # Such objects write files of their own, and a run's state has none.
    for tensors in gathered.values():
        for name, found in tensors.items():
            for slices, one in (found if isinstance(found, dict) else {"": found}).items():
                tensor = _read(one)
                if tensor is not None:  # As of a variable without a value.
                    yield Value(name, slices, tensor, fetched="CPU" not in one.device)


def _read(found: Any) -> tf.Tensor | None:
    """The tensor, read where it is; None for a variable without a value."""
    if tf.is_tensor(found):
        return found
    with tf.device(found.device):
        return found.tensor
