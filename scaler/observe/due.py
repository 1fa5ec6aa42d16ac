"""What is measured at some steps alone, so that the others execute nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from scaler.backend.autograph import no_autograph
from scaler.backend.graphs import in_xla, traced_once


@no_autograph
def if_due(due: tf.Tensor | None, measure: Callable[[], Any], fill: float | Mapping[str, float] | None = 0.0) -> Any:
    """What a function measures at a step that is to be measured, and a number in its place at others.

    Operations that the function adds run only at a step that is due, in a graph: in eager mode it is always called.

    Args:
        due: Scalar bool, whether the step is to be measured; None for always.
        measure: Returns tensors in any structure.
        fill: All values at other steps. For a dict of tensors also a dict, and NaN for what it lacks. With None there
            are no values: the tensors are empty. XLA, which needs their shapes, has zeros in their place.
    """
    if due is None:
        return measure()

    def others(like: Any) -> Any:
        if isinstance(fill, Mapping):
            return {name: _filled(one, fill.get(name, float("nan"))) for name, one in like.items()}
        return tf.nest.map_structure(lambda one: _filled(one, fill), like)

    if tf.executing_eagerly():
        found = measure()
        return found if due else others(found)
    seen: list[Any] = []

    def measured() -> Any:
        # TensorFlow visits the operations of a branch that is not taken, unless they stand in a function of their own.
        found = traced_once(measure)()
        # Traced first: what it is like is known once the other branch is traced.
        seen.append(tf.nest.map_structure(lambda one: tf.TensorSpec(one.shape, one.dtype), found))
        return found

    return tf.cond(due, measured, lambda: others(seen[-1]))


def _filled(like: Any, fill: float | None) -> tf.Tensor:
    if fill is None:
        return tf.zeros(like.shape if in_xla() else [0], like.dtype)
    return tf.fill(like.shape, tf.constant(like.dtype.as_numpy_dtype(fill)))
