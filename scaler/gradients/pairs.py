"""Checks that gradients belong to their variables, while a step is traced: it costs nothing when the step runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from scaler.errors import InvalidArgument

if TYPE_CHECKING:
    from scaler.gradients.lists import Gradient

_UPDATED_SAFELY = (tf.float32, tf.float64)
_REFUSED_16BIT = (tf.float16, tf.bfloat16)


def as_list(method: str, grads: object) -> list:
    """The gradients as a list of tensors, slices and None.

    Raises:
        InvalidArgument: For one tensor, or anything else that holds none; for pairs.
    """
    single = tf.is_tensor(grads) or isinstance(grads, (dict, str, tf.IndexedSlices))
    if single or not isinstance(grads, Iterable):
        raise InvalidArgument(
            f"{method}: the gradients are of type {type(grads).__name__}: expected a list with one for each variable, "
            "as tape.gradient(scaled, variables) returns for a list of variables."
            f"{' Pass list(grads.values()).' if isinstance(grads, dict) else ''}"
        )
    return [None if grad is None else _as_tensors(grad) for grad in grads]


def _as_tensors(grad: tf.types.experimental.TensorLike | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """One entry of a list of gradients as tensors; raises `InvalidArgument` for a pair."""
    if isinstance(grad, tuple) and not isinstance(grad, tf.IndexedSlices):
        raise InvalidArgument(
            "apply: the gradients are pairs, as for optimizer.apply_gradients: expected two lists, "
            "apply(optimizer, grads, variables)."
        )
    if not isinstance(grad, tf.IndexedSlices):
        return tf.convert_to_tensor(grad)
    # Slices made by hand may hold tuples or arrays.
    parts = (grad.values, grad.indices, grad.dense_shape)
    if all(part is None or tf.is_tensor(part) for part in parts):
        return grad
    return tf.IndexedSlices(*(None if part is None else tf.convert_to_tensor(part) for part in parts))


def check_pairs(grads: Sequence[Gradient], variables: Sequence, allow_16bit_updates: bool | None) -> None:
    """Raises `InvalidArgument` unless every gradient fits its variable, and the variables can be updated safely.

    Args:
        grads: Tensors, slices or None.
        variables: One for each.
        allow_16bit_updates: Whether they may be 16-bit variables. None if the user cannot ask for it.
    """
    if grads and all(grad is None for grad in grads):
        raise InvalidArgument(
            "apply: every gradient is None: the scaled loss does not depend on these variables. Compute the loss and "
            "loss_scaler.scale(loss) inside the tape, and pass the tape the scaled loss. If this loss is not meant to "
            "reach them, leave out this apply, share or loss of a PerLoss: zeros in place of None would let an "
            "optimizer such as Adam move them."
        )
    for variable in variables:
        _check_variable(variable, allow_16bit_updates)
    check_gradients(grads, variables)


def check_gradients(grads: Sequence[Gradient], variables: Sequence, method: str = "apply") -> None:
    """Raises `InvalidArgument` unless every gradient fits its variable."""
    if not grads:
        raise InvalidArgument(f"{method}: the list of gradients is empty: expected one gradient for each variable.")
    if len(grads) != len(variables):
        raise InvalidArgument(
            f"{method}: {len(grads)} gradients for {len(variables)} variables: expected one for each. Pass the list "
            "that tape.gradient was called with. Where layers were frozen or unfrozen since MasterWeights were made, "
            "make new ones, and a new optimizer: both belong to the list of variables they were made for."
        )
    for grad, variable in zip(grads, variables, strict=True):
        if grad is not None:
            _check_gradient(grad, variable, method)


def _check_variable(variable: keras.Variable | tf.Variable, allow_16bit_updates: bool | None) -> None:
    dtype = tf.as_dtype(variable.dtype)
    if dtype in _UPDATED_SAFELY or (dtype in _REFUSED_16BIT and allow_16bit_updates):
        return
    if dtype in _REFUSED_16BIT:
        raise InvalidArgument(
            f"apply: variable {variable.name!r} has dtype {dtype.name}, in which an optimizer loses small updates "
            "and makes infinities by itself. Pass hs.MasterWeights(variables) instead of the list"
            f"{'.' if allow_16bit_updates is None else ', or ask for it with allow_16bit_updates=True.'}"
        )
    raise InvalidArgument(
        f"apply: variable {variable.name!r} has dtype {dtype.name}: expected float32 or float64, or float16 or "
        "bfloat16 under hs.MasterWeights."
    )


def _check_gradient(grad: tf.Tensor | tf.IndexedSlices, variable: keras.Variable | tf.Variable, method: str) -> None:
    if not grad.dtype.is_floating:
        raise InvalidArgument(
            f"{method}: the gradient of {variable.name!r} has dtype {grad.dtype.name}: expected a floating-point one."
        )
    if not grad.shape.is_compatible_with(variable.shape):
        raise InvalidArgument(
            f"{method}: the gradient of {variable.name!r} has shape {grad.shape}: expected {variable.shape}, the "
            "variable's. Are the two lists in the same order?"
        )
