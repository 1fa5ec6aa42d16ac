"""Accumulation windows of a Keras optimizer: it takes the mean of a whole window where Keras would sum by itself.

_backend_apply_gradients            what is replaced, and
_overwrite_variables_directly_...     must then be called    absent: gradient_accumulation_steps is refused
_clip_gradients, _apply_weight_decay, _backend_update_step,
_update_model_variables_moving_average,
_overwrite_model_variables_with_average_value,
_iterations, _trainable_variables   what it does             absent: as above
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from scaler.backend.apply_steps import GIVEN, WINDOW, require
from scaler.backend.replicas import replica_count
from scaler.backend.variables import overwrites
from scaler.backend.versions import unsupported

_METHODS = (
    "_clip_gradients",
    "_apply_weight_decay",
    "_backend_update_step",
    "_update_model_variables_moving_average",
    "_overwrite_model_variables_with_average_value",
)
_VALUES = ("_iterations", "_trainable_variables")
_KERAS_COUNTS_ITSELF = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 10)
"""Whether Keras's `apply` counts the step. Before 3.10 the replaced method counted it."""


def take_windows_over(inner: Any) -> None:
    """Makes `inner.apply` take the mean of a whole window instead of summing micro-batches itself.

    Raises:
        UnsupportedVersion: If these versions lack the steps to replace. At the first `apply`, before anything moves, if
            they do not call them.
    """
    require(inner, WINDOW, GIVEN, *_METHODS)
    calls: Counter[str] = Counter()

    def window(grads: Sequence, variables: Sequence) -> None:
        calls[WINDOW] += 1
        _apply_window(inner, grads, variables)

    def checked_apply(grads: Sequence, trainable_variables: Sequence | None = None) -> None:
        missing = [name for name in _VALUES if not hasattr(inner, name)]
        if missing:
            raise unsupported("apply", f"has no {', '.join(missing)}, which gradient_accumulation_steps needs here.")
        own = functools.partial(type(inner).apply, inner, grads, trainable_variables)
        if tf.executing_eagerly() and replica_count() == 1 and not calls:
            # Tracing moves nothing.
            tf.function(own, autograph=False).get_concrete_function()
            check()
        calls.clear()
        own()
        if not all(map(overwrites, trainable_variables or ())):
            check()

    def check() -> None:
        if calls[WINDOW] != 1:
            raise unsupported("apply", f"calls {WINDOW} {calls[WINDOW]} times a step: gradients would add up.")

    vars(inner).update({WINDOW: window, GIVEN: _overwrite, "apply": checked_apply})


def are_taken_over(inner: Any) -> bool:
    """Whether `take_windows_over` has changed this optimizer."""
    return WINDOW in vars(inner)


def _apply_window(inner: Any, grads: Sequence, variables: Sequence) -> None:
    # Keras counts the last micro-batch itself.
    inner._iterations.assign_add(inner.gradient_accumulation_steps - 1)
    grads = inner._clip_gradients(grads)
    inner._apply_weight_decay(variables)
    inner._backend_update_step(grads, variables, inner.learning_rate)
    if inner.use_ema:
        inner._update_model_variables_moving_average(inner._trainable_variables)
        if inner.ema_overwrite_frequency:
            tf.cond(
                tf.equal((inner.iterations + 1) % inner.ema_overwrite_frequency, 0),
                lambda: inner._overwrite_model_variables_with_average_value(inner._trainable_variables),
                lambda: None,
            )
    if not _KERAS_COUNTS_ITSELF:
        inner._iterations.assign_add(1)


def _overwrite(grads: Sequence, variables: Sequence) -> tuple[list, list]:
    rest = []
    for grad, variable in zip(grads, variables, strict=True):
        if overwrites(variable):
            variable.assign(grad)
        else:
            rest.append((grad, variable))
    return [grad for grad, _ in rest], [variable for _, variable in rest]
