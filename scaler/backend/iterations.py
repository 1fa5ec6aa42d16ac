"""An optimizer's count of steps, read once for all variables of an update.

Adam and others ask for it at each variable and compute from it how they correct their moments, with ten operations.
TensorFlow sees that these are the same for all variables only where the count was read once.

_iterations  the count, which `update_step` reads   absent: it is read for each variable: slower, the same numbers
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from scaler.backend import apply_steps, replicas


@contextlib.contextmanager
def read_once(optimizer: Any) -> Iterator[None]:
    """Has the optimizer, and twins that are made of it, take the count as it is now; for variables on one device."""
    if not _can_be_read_once(optimizer):
        yield
        return
    with _reading(optimizer, tf.convert_to_tensor(optimizer._iterations)):
        yield


@contextlib.contextmanager
def read_once_a_device(optimizer: Any) -> Iterator[None]:
    """Has each `update_step` take the count as it is at the first variable of the same device."""
    if not _can_be_read_once(optimizer):
        yield
        return
    counts: dict[tuple, tf.Tensor] = {}

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        # A tensor of one branch is not known in another.
        place = id(tf.compat.v1.get_default_graph()), replicas.native(variable).device
        if place not in counts:
            counts[place] = tf.convert_to_tensor(optimizer._iterations)
        with _reading(optimizer, counts[place]):
            type(optimizer).update_step(optimizer, gradient, variable, learning_rate)

    with apply_steps.taken_over(optimizer, update_step=update_step):
        yield


def _can_be_read_once(optimizer: Any) -> bool:
    """Whether this is a graph and one of Keras's own optimizers, none of which moves the count in `update_step`."""
    return (
        not tf.executing_eagerly()
        and isinstance(optimizer, keras.optimizers.Optimizer)
        and type(optimizer).__module__.startswith("keras.")
        and isinstance(vars(optimizer).get("_iterations"), keras.Variable)
        and "update_step" not in vars(optimizer)
    )


@contextlib.contextmanager
def _reading(optimizer: Any, count: tf.Tensor) -> Iterator[None]:
    attributes = vars(optimizer)
    before, attributes["_iterations"] = attributes["_iterations"], count
    try:
        yield
    finally:
        attributes["_iterations"] = before
