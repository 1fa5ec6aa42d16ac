"""Where values are: in a variable, in a layer, on the output of a model, and what a checkpoint would write of them.

_value             the TensorFlow variable in a Keras variable    absent: scaler.UnsupportedVersion
_dtype             the dtype that the Keras variable reports      absent: scaler.UnsupportedVersion
_flatten_layers    Keras's own list of the layers in a layer      absent: they are looked for, seventy times slower
_layers            those that a layer holds itself                absent: as `_flatten_layers`
_keras_mask        which steps of an output are no padding, as    absent: the output has none, and neither has its cast
                     losses and metrics have it
_saver             what a `tf.train.Checkpoint` writes with       absent: saved at the visit, with one UserWarning
_gather_serialized_tensors  the names and values it writes        absent, or other: the same
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import scaler
from loops.backend import versions


def native(variable: Any) -> tf.Variable:
    """The TensorFlow variable, which on several replicas has a component for each."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def components(variable: tf.Variable | keras.Variable) -> list[tf.Variable]:
    """The components of a variable on the local replicas; the variable itself if it has none."""
    own = native(variable)
    return list(own.values) if isinstance(own, tf.distribute.DistributedValues) else [own]


@contextlib.contextmanager
def variables_in_float32(variables: Iterable[Any]) -> Iterator[None]:
    """Within this context, replaces variables by float32 copies, also in regularizers and in their gradients.

    Assignments in the context are lost.

    Args:
        variables: Floating-point Keras variables on one device.

    Raises:
        scaler.UnsupportedVersion: If Keras keeps their values in another place than the tested versions.
    """
    variables = list(variables)
    if not all(isinstance(vars(one).get("_value"), tf.Variable) and "_dtype" in vars(one) for one in variables):
        raise scaler.UnsupportedVersion(
            f"A variable of {versions()} cannot be made float32 temporarily: it keeps its value in another place than "
            "the tested versions. Install a version that this package names in its metadata."
        )
    before = [(one, one._value, one._dtype) for one in variables]
    try:
        for one, value, _ in before:
            one._value = tf.Variable(tf.cast(value, tf.float32), trainable=value.trainable)
            one._dtype = "float32"
        yield
    finally:
        for one, value, dtype in before:
            one._value, one._dtype = value, dtype


def layers_now(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """A model and the layers in it, also those in its layers, without what Keras adds by itself to name an input."""
    flattened = getattr(model, "_flatten_layers", lambda: scaler.observe.layers_of(model))
    return [layer for layer in flattened() if not isinstance(layer, keras.layers.InputLayer)]


_held = operator.attrgetter("_layers")


def held_by(layers: Sequence[keras.layers.Layer]) -> tuple:
    """The layers that each of these holds itself: quicker to ask for than all that are in them, before each call."""
    try:
        return tuple(map(tuple, map(_held, layers)))
    except AttributeError:
        return tuple(map(tuple, map(layers_now, layers)))


def cast_with_mask(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """A tensor in another dtype, with the mask that it had: `tf.cast` leaves it behind."""
    cast = tf.cast(tensor, dtype)
    if hasattr(tensor, "_keras_mask"):
        cast._keras_mask = tensor._keras_mask
    return cast


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


def is_checkpoint_readable() -> bool:
    """Whether the installed TensorFlow tells what a checkpoint writes."""
    try:
        return {value.name for value in checkpoint_values(tf.train.Checkpoint(one=tf.Variable(1.0)))} == _KEYS
    except (AttributeError, TypeError, ValueError):
        return False


def checkpoint_values(checkpoint: tf.train.Checkpoint) -> Iterator[Value]:
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
