"""Pure functions on a list of gradients, and checks of it. An entry is a tensor, a `tf.IndexedSlices` or None."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from scaler.backend import graphs
from scaler.backend.autograph import no_autograph
from scaler.backend.graphs import has_gpu, in_xla
from scaler.backend.variables import overwrites as overwrites
from scaler.checks import is_symbolic
from scaler.errors import InvalidArgument

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None
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


@no_autograph
def unscale(grads: Sequence[Gradient], loss_scale: tf.Tensor) -> list[Gradient]:
    """Gradients of the loss from gradients of the scaled loss.

    They are cast to float32 and then divided by the scale: exact for powers of two, correctly rounded for others.
    Float64 gradients stay in float64.
    Duplicate indices of a `tf.IndexedSlices` are summed.

    Args:
        grads: Gradients of any floating dtype and shape.
        loss_scale: Scalar float32, the scale their loss was multiplied by.

    Returns:
        The same structure in float32, or in float64 where a gradient is.
    """
    return divide(sum_duplicates(grads), loss_scale)


def divide(grads: Sequence[Gradient], loss_scale: tf.Tensor) -> list[Gradient]:
    """The gradients, as `widened` gives them, divided by a scalar."""
    if is_one(loss_scale):
        return widened(grads)
    # Not a product with 1 / loss_scale: in a loop inside the graph, TensorFlow's optimizer regroups
    # (g * S) * (1 / S) to (g * (1 / S)) * S, which underflows and overflows where this does not.
    return _map(lambda values: _wide(values) / tf.cast(loss_scale, wide_dtype(values)), grads)


def is_one(loss_scale: tf.Tensor) -> bool:
    """Whether a scale is known to be 1 while the step is traced, so that nothing needs to be divided by it."""
    known = None if tf.executing_eagerly() else tf.get_static_value(loss_scale)
    return known is not None and bool(known == 1.0)


def multiply(grads: Sequence[Gradient], factor: tf.Tensor) -> list[Gradient]:
    """The gradients, as `widened` gives them, times a scalar."""
    return _map(lambda values: _wide(values) * tf.cast(factor, wide_dtype(values)), grads)


def limit(grad: Gradient, limiter: Callable[..., tf.Tensor], position: int | None = None) -> Gradient:
    """The gradient with `limiter(values, position)` as its values."""
    return _map_one(lambda values: limiter(values, position), grad)


def joined(grads: Sequence[Gradient]) -> list[tf.Tensor]:
    """The values of all gradients, in one vector for each dtype."""
    values = [values_of(grad) for grad in grads if grad is not None]
    dtypes = list(dict.fromkeys(value.dtype for value in values))
    return [tf.concat([tf.reshape(value, [-1]) for value in values if value.dtype == dtype], 0) for dtype in dtypes]


def opaque(grads: Sequence[Gradient]) -> list[Gradient]:
    """The same gradients, which TensorFlow's optimizer does not look through: see `graphs.opaque`."""
    return _map(graphs.opaque, grads)


def widened(grads: Sequence[Gradient]) -> list[Gradient]:
    """The gradients in float32, where sums of 16-bit values do not overflow; those in float64 as they are."""
    return _map(_wide, grads)


def matching(grads: Sequence[Gradient], variables: Sequence) -> list[Gradient]:
    """The gradients of float64 variables in float64, and no others."""

    def one(grad: Gradient, variable: Any) -> Gradient:
        wanted = tf.as_dtype(variable.dtype) == tf.float64
        if grad is None or wanted == (grad.dtype == tf.float64):
            return grad
        return _map_one(lambda values: tf.cast(values, tf.float64 if wanted else tf.float32), grad)

    return list(map(one, grads, variables))


def add(one: Gradient, other: Gradient) -> Gradient:
    """The sum of two gradients of one variable, in float32 or float64; None counts as nothing.

    Two `tf.IndexedSlices` stay one, with the indices of both.
    """
    if one is None or other is None:
        return other if one is None else one
    wide = tf.float64 if tf.float64 in (one.dtype, other.dtype) else tf.float32
    one, other = tf.cast(one, wide), tf.cast(other, wide)
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        indices = tf.concat([tf.cast(grad.indices, tf.int64) for grad in (one, other)], 0)
        shape = one.dense_shape if other.dense_shape is None else other.dense_shape
        return tf.IndexedSlices(tf.concat([one.values, other.values], 0), indices, shape)
    dense, sparse = (other, one) if isinstance(one, tf.IndexedSlices) else (one, other)
    if isinstance(sparse, tf.IndexedSlices):
        if has_gpu():
            # Where operations have to be deterministic, a scatter copies all to the host and back.
            return dense + tf.math.unsorted_segment_sum(sparse.values, sparse.indices, tf.shape(dense)[0])
        return tf.tensor_scatter_nd_add(dense, sparse.indices[:, tf.newaxis], sparse.values)
    return one + other


def sum_duplicates(grads: Sequence[Gradient]) -> list[Gradient]:
    """The gradients, with duplicate indices of each `tf.IndexedSlices` summed in float32, or float64 where it is.

    The shapes stay as they are, which XLA needs: the first occurrence of an index holds the sum and the others zeros.
    So squares and norms of the values are those of the dense gradient.
    """
    return [_sum_duplicates(grad) if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]


def squared_norm(grads: Sequence[Gradient]) -> tf.Tensor:
    """The squared global norm, a scalar. Not finite if any value is not finite, or if the sum overflows.

    It is float32, and float64 if any gradient is. Other gradients are squared and summed in float32 even then.

    Args:
        grads: Gradients of any floating dtype and shape; `tf.IndexedSlices` without duplicate indices.
    """
    squares = squared_norm_of_each([grad for grad in grads if grad is not None])
    return tf.add_n([tf.zeros([], squares[0].dtype if squares else tf.float32), *squares])


def squared_norm_of_each(grads: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor]:
    """As `squared_norm`, of each gradient by itself."""
    squares = [tf.square(_wide(values_of(grad))) for grad in grads]
    # XLA adds the values of a tensor one after another on a CPU, as it was told. Columns it adds side by side, two to
    # three times as fast.
    if in_xla() and not has_gpu():
        squares = list(map(_sums_of_columns, squares))
    sums = _reduced(tf.reduce_sum, squares)
    alike = len({one.dtype for one in sums}) < 2
    return sums if alike else [tf.cast(one, tf.float64) for one in sums]


@no_autograph
def all_finite(grads: Sequence[Gradient]) -> tf.Tensor:
    """Whether a step may be applied: every value is finite, and so is the squared global norm in float32.

    Squares of float64 gradients are summed in float64, and the global norm is float64 then. Each other gradient still
    has a squared norm that is finite in float32.

    The norm counts because optimizers square: Adam turns a finite gradient of 1e20 into NaN by itself. Duplicate
    indices of a `tf.IndexedSlices` count with their sum.

    Args:
        grads: *Unscaled* gradients of any floating dtype and shape, with None and `tf.IndexedSlices` among them.

    Returns:
        Scalar bool tensor; True for an empty list.

    Raises:
        InvalidArgument: For anything but a list, such as a dict or None.
    """
    return tf.math.is_finite(squared_norm(sum_duplicates(as_list("all_finite", grads))))


def clip_factor(norm: tf.Tensor, clip_norm: float | tf.Tensor) -> tf.Tensor:
    """What gradients of the norm `norm` are multiplied by, so that it is at most `clip_norm`.

    Args:
        norm: Float32 or float64 of any shape.
        clip_norm: Positive scalar.

    Returns:
        Of that dtype and shape; exactly 1 where the norm is not larger.
    """
    clip_norm = number_as(clip_norm, norm.dtype)
    return tf.where(norm > clip_norm, clip_norm / norm, 1.0)


def number_as(value: float | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """A number in a dtype, rounded once: TensorFlow's `cast` would round a Python number to float32 first."""
    return tf.cast(value, dtype) if is_symbolic(value) else tf.constant(float(value), dtype)


def wide_dtype(values: Any) -> tf.DType:
    """The dtype in which gradients like a tensor or variable are added up and divided."""
    return tf.float64 if tf.as_dtype(values.dtype) == tf.float64 else tf.float32


def _wide(values: tf.Tensor) -> tf.Tensor:
    return tf.cast(values, wide_dtype(values))


def _sum_duplicates(grad: tf.IndexedSlices) -> tf.IndexedSlices:
    values = _wide(grad.values)
    count = tf.shape(grad.indices)[0]
    # Of no indices the maximum is the least integer.
    rows = tf.maximum(tf.reduce_max(grad.indices), -1) + 1 if grad.dense_shape is None else grad.dense_shape[0]
    if has_gpu() and not graphs.in_xla():
        # A range would be copied from the host. GPUs have no minimum of int64 here, and float64 holds any count.
        places = tf.cumsum(tf.ones_like(grad.indices, tf.float64), exclusive=True)
    else:
        places = tf.range(count)
    first = tf.math.unsorted_segment_min(places, grad.indices, rows)
    summed = tf.math.unsorted_segment_sum(values, tf.cast(tf.gather(first, grad.indices), tf.int32), count)
    return tf.IndexedSlices(summed, grad.indices, grad.dense_shape)


def _map(function: Callable[[tf.Tensor], tf.Tensor], grads: Sequence[Gradient]) -> list[Gradient]:
    return [_map_one(function, grad) for grad in grads]


def _map_one(function: Callable[[tf.Tensor], tf.Tensor], grad: Gradient) -> Gradient:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
    return None if grad is None else function(grad)


def values_of(grad: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """The numbers in a gradient."""
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


@no_autograph
def derivatives(grads: Sequence[Gradient], variables: Sequence) -> list[Gradient]:
    """The gradients, with None in the place of those that are their variable's new value: what a norm may count.

    Args:
        grads: Tensors, `tf.IndexedSlices` or None.
        variables: The variable of each.
    """
    return [None if overwrites(own) else grad for grad, own in zip(grads, variables, strict=True)]


@no_autograph
def largest(values: tf.Tensor) -> tf.Tensor:
    """The largest of several new values of one variable, element by element.

    The variables that take their gradient as their value hold magnitudes: the scales of Keras's float8 layers and the
    largest values of their last steps. What holds for a whole batch is the largest of its parts. Keras takes it, too,
    over the micro-batches of a window: `_overwrite_variables_directly_with_gradients` in its `base_optimizer.py`.

    Args:
        values: Of a floating dtype, [n, ...].

    Returns:
        Of that dtype, [...]. An element that is infinite or NaN in one of the parts is not finite.
    """
    # A maximum would lose a NaN, or a negative infinity.
    finite = tf.reduce_all(tf.math.is_finite(values), axis=0)
    return tf.where(finite, tf.reduce_max(values, axis=0), tf.reduce_sum(values, axis=0))


_COLUMNS = 128
"""Sums that XLA adds up side by side."""
_WORTH_COLUMNS = 2**12
"""Elements of a tensor. Below, the second sum takes as long as the first saves."""


def _reduced(reduce: Callable[..., tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """`reduce`, such as `tf.reduce_sum`, over all axes of each tensor.

    Tensors of one rank share the constant that names their axes, of which TensorFlow makes one for each call.
    """
    axes: dict[int, tf.Tensor] = {}

    def one(tensor: tf.Tensor) -> tf.Tensor:
        rank = tensor.shape.rank
        if rank is None:
            return reduce(tensor)
        if rank not in axes:
            axes[rank] = tf.constant(list(range(rank)), tf.int32)
        return reduce(tensor, axis=axes[rank])

    return [one(tensor) for tensor in tensors]


def _sums_of_columns(squares: tf.Tensor) -> tf.Tensor:
    size = squares.shape.num_elements()
    if size is None or size < _WORTH_COLUMNS or size % _COLUMNS:
        return squares
    # No sum is negative. Without `abs` XLA would join both sums into one over all values.
    return tf.abs(tf.reduce_sum(tf.reshape(squares, [-1, _COLUMNS]), 0))


def not_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """For each floating tensor whether some value is infinite or NaN: bool [len(tensors)]."""
    return tf.logical_not(tf.stack(_reduced(tf.reduce_all, list(map(tf.math.is_finite, tensors)))))
