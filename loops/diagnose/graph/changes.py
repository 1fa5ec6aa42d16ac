"""What an attempt changes, and puts back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.backend.steps import schedule as made_with
from loops.backend.variables import variables_in_float32
from loops.diagnose.graph.listening import replaced

APART = 1e-3
"""How far a value is moved away from such a point: float16 holds 1 - 1e-3 and 1e-3."""


@contextlib.contextmanager
def in_policy(layers: Iterable[keras.layers.Layer], policy: str) -> Iterator[None]:
    """Has layers compute under another dtype policy; their 16-bit variables are float32 where the policy's are."""
    before = [(layer, layer.dtype_policy) for layer in layers]
    try:
        for layer, _ in before:
            layer.dtype_policy = policy
        wide = [layer for layer, _ in before if layer.variable_dtype == "float32"]
        with variables_in_float32({id(one): one for layer in wide for one in _narrow_variables(layer)}.values()):
            yield
    finally:
        for layer, own in before:
            layer.dtype_policy = own


def _narrow_variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The 16-bit variables that are the layer's own and trained. Others are moved by the step, not read."""
    of_parts = {id(one) for part in scaler.observe.layers_of(layer)[1:] for one in part.variables}
    trained = [one for one in layer.trainable_variables if id(one) not in of_parts]
    return [one for one in trained if one.dtype in ("float16", "bfloat16")]


@contextlib.contextmanager
def with_value(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Has an attribute another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def given(layer: keras.layers.Layer, change: Callable) -> Iterator[None]:
    """Has a layer see its inputs changed."""
    call = layer.call

    @functools.wraps(call)  # Keras reads its arguments.
    def changed(*arguments: Any, **options: Any) -> Any:
        return call(*tf.nest.map_structure(change, arguments), **options)

    with replaced(layer, "call", changed):
        yield


def kept_away(value: Any) -> Any:
    """A tensor moved by `APART`, away from a point at which an operation has no value."""
    return value + tf.cast(APART, value.dtype) if tf.is_tensor(value) and value.dtype.is_floating else value


def with_finite_gradient(value: Any) -> Any:
    """The same tensor, with 0 in the place of what is not finite in its gradient."""
    return _finite_gradient(value) if tf.is_tensor(value) and value.dtype.is_floating else value


@tf.custom_gradient
def _finite_gradient(value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    return tf.identity(value), lambda grad: tf.where(tf.math.is_finite(grad), grad, tf.zeros_like(grad))


@contextlib.contextmanager
def zeroed(variables: list[tf.Variable]) -> Iterator[None]:
    """Has variables be 0."""
    before = [np.array(one.numpy()) for one in variables]
    for one in variables:
        one.assign(tf.zeros_like(one))
    try:
        yield
    finally:
        for one, value in zip(variables, before, strict=True):
            one.assign(value)


@contextlib.contextmanager
def slower(optimizer: keras.optimizers.Optimizer, part: float) -> Iterator[None]:
    """Has an optimizer learn at a part of its rate. A rate that is a variable is for others to put back.

    Args:
        optimizer: Of the step.
        part: Between 0 and 1.
    """
    schedule = made_with(optimizer)
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        # On several replicas it is a variable of each, which float() does not take.
        optimizer.learning_rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate)) * part
        yield
        return
    with scheduled(optimizer, _Part(schedule, part)):
        yield


@contextlib.contextmanager
def scheduled(optimizer: keras.optimizers.Optimizer, schedule: Any) -> Iterator[None]:
    """Has an optimizer with a schedule learn by another one."""
    before = made_with(optimizer)
    optimizer.learning_rate = schedule
    try:
        yield
    finally:
        optimizer.learning_rate = before


class _Part(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule's rate times a number.

    Args:
        schedule: Of the optimizer.
        part: The number.
    """

    def __init__(self, schedule: keras.optimizers.schedules.LearningRateSchedule, part: float):
        self._schedule, self._part = schedule, part

    def __call__(self, step: Any) -> Any:
        """The rate at a step."""
        return self._schedule(step) * self._part
