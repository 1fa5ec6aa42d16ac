"""Runs one layer alone at rising magnitudes, in its own dtype and in float32 on the same float16 values.

If only float16 fails, and the float32 result fits into float16, the fault is the layer's and not the input's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.graph.calls import LayerCall, rounding_is_no_warning
from loops.diagnose.graph.changes import restored
from loops.diagnose.graph.models import layers_in_float32

MAGNITUDES = (0.0, 1e-4, 1e-2, 1.0, 10.0, 30.0, 100.0, 300.0, 1e3, 5e3)
"""The largest magnitude of the input. Failures above the last one are not reported: see docs/lint.md."""
_FEW = (0.0, 1e-4, 10.0, 100.0, 300.0, 5e3)
_LARGE = 2**15
"""A layer with more input values is stressed only at the magnitudes in `_FEW`."""
_EXAMPLES = 4
"""The number of examples of the batch on which such a layer is stressed first."""
_HALF = scaler.float_format("float16")
_FITS = 0.98 * _HALF.max
"""The largest float32 result that counts as within float16's range; the margin is for rounding."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A failure at one magnitude.

    Attributes:
        magnitude: The largest magnitude of the input.
        one_signed: Whether all input values had one sign.
        backward: Whether the gradient of the input failed, not the output.
        kind: "nan" or "inf"; "zero" if the whole output is zero; "large" if the true output is too large for float16.
        reference: The largest magnitude of the same tensor in float32.
    """

    magnitude: float
    one_signed: bool
    backward: bool
    kind: str
    reference: float


class CannotStress(Exception):
    """The layer cannot be run alone; the message gives the reason."""


def float_inputs(call: LayerCall) -> int:
    """The number of floating-point tensors among a layer's inputs."""
    return len(_floats(call))


def stress(call: LayerCall, limit: float) -> list[Failure]:
    """Runs a layer forward and backward at every magnitude up to `limit`, with values of both signs and of one.

    The gradient of its output has magnitude 1, since a lower loss scale fixes failures of larger ones. The layer's
    state is restored.

    Raises:
        CannotStress: If the layer does not run alone.
    """
    few = _of_few_examples(call)
    if few is not call:
        with contextlib.suppress(CannotStress):  # The layer may accept only the whole batch.
            return _stressed(few, limit)
    return _stressed(call, limit)


def _stressed(call: LayerCall, limit: float) -> list[Failure]:
    specs = _floats(call)
    try:
        with restored(call.layer), rounding_is_no_warning():
            run = tf.function(lambda *inputs: _both(call, inputs))
            return [
                failure
                for magnitude in (_FEW if _size(call) > _LARGE else MAGNITUDES)
                if magnitude <= limit
                for one_signed in (False, True)
                for failure in _failures(magnitude, one_signed, run(*_inputs(specs, magnitude, one_signed)).numpy())
            ]
    except Exception as error:
        raise CannotStress(_first_line(error)) from error


def _of_few_examples(call: LayerCall) -> LayerCall:
    """The same call on the first examples of a batch, if the whole batch has many values."""
    shape = next((spec.shape for spec in _floats(call)), tf.TensorShape([]))
    if _size(call) <= _LARGE or not shape.rank or shape[0] <= _EXAMPLES:
        return call

    def first(spec: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank or spec.shape[0] != shape[0]:
            return spec
        return tf.TensorSpec([_EXAMPLES, *spec.shape[1:]], spec.dtype)

    return dataclasses.replace(call, given=tf.nest.map_structure(first, call.signature))


def _size(call: LayerCall) -> int:
    return sum(int(np.prod(spec.shape)) for spec in _floats(call))


def _inputs(specs: list[tf.TensorSpec], magnitude: float, one_signed: bool) -> list[tf.Tensor]:
    random = np.random.default_rng(0)
    found = []
    for spec in specs:
        values = random.uniform(0.9, 1.0, spec.shape) if one_signed else random.normal(size=spec.shape)
        values *= magnitude / max(np.abs(values).max(initial=0.0), 1e-30)
        found.append(tf.constant(values, tf.float16))
    return found


def _failures(magnitude: float, one_signed: bool, flags: np.ndarray) -> list[Failure]:
    """The failure in the rows of `_both`, forward then backward; a later one inherited from it is left out."""
    for backward, (nan, inf, large, reference, fitting, size) in enumerate(flags):
        if nan or inf:
            return [Failure(magnitude, one_signed, bool(backward), "nan" if nan else "inf", float(reference))]
        if not backward and size == 0 and fitting > _HALF.smallest_normal:
            return [Failure(magnitude, one_signed, False, "zero", float(reference))]
        if large and not backward:
            return [Failure(magnitude, one_signed, False, "large", float(reference))]
    return []


def _both(call: LayerCall, inputs: tuple) -> tf.Tensor:
    """Shape [2, 6]: forward and backward, each with the columns of `_compared`."""
    outputs, gradients = _run(call, inputs)
    with layers_in_float32(scaler.observe.layers_of(call.layer)):
        expected, expected_gradients = _run(call, inputs)
    return tf.stack([_compared(outputs, expected), _compared(gradients, expected_gradients)])


def _run(call: LayerCall, inputs: tuple) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The floating-point outputs, and the gradients of the floating-point inputs."""
    values = iter(inputs)
    given = [_given(spec, values) for spec in call.specs]
    watched = [one for one in given if one.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(watched)
        outputs = call.again(given)
    ones = [tf.cast(_signs(output), output.dtype) for output in outputs]
    zero = tf.UnconnectedGradients.ZERO
    return outputs, tape.gradient(outputs, watched, output_gradients=ones, unconnected_gradients=zero)


def _given(spec: tf.TensorSpec, floats: Iterator[tf.Tensor]) -> tf.Tensor:
    if spec.dtype.is_floating:
        return tf.cast(next(floats), spec.dtype)
    return tf.ones(_known(spec), spec.dtype) if spec.dtype == tf.bool else tf.zeros(_known(spec), spec.dtype)


def _signs(like: tf.Tensor) -> tf.Tensor:
    """Values in [-1, 1] in the shape of a tensor, the same every time."""
    return tf.random.stateless_uniform(tf.shape(like), seed=(1, 2), minval=-1.0, maxval=1.0)


def _compared(values: list[tf.Tensor], expected: list[tf.Tensor]) -> tf.Tensor:
    """Shape [6]: has NaN, has infinity, is too large; the largest magnitude in float32, among what fits, in float16."""
    rows = []
    for value, reference in zip(values, expected, strict=True):
        value, size = tf.cast(value, tf.float32), tf.abs(tf.cast(reference, tf.float32))
        fits = size <= _FITS
        rows.append(
            [
                tf.reduce_any(tf.logical_and(tf.math.is_nan(value), fits)),
                tf.reduce_any(tf.logical_and(tf.math.is_inf(value), fits)),
                tf.reduce_any(size > _FITS),
                tf.reduce_max(tf.where(tf.math.is_finite(size), size, 0.0)),
                tf.reduce_max(tf.where(fits, size, 0.0)),
                tf.reduce_max(tf.abs(value)),
            ]
        )
    table = tf.stack([tf.stack([tf.cast(cell, tf.float32) for cell in row]) for row in [*rows, [0.0] * 6]])
    return tf.reduce_max(table, axis=0)


def _floats(call: LayerCall) -> list[tf.TensorSpec]:
    floats = [spec for spec in call.specs if spec.dtype.is_floating]
    if any(spec.shape.rank is None for spec in call.specs):
        return []
    return [tf.TensorSpec(_known(spec), spec.dtype) for spec in floats]


def _known(spec: tf.TensorSpec) -> list[int]:
    return [2 if size is None else size for size in spec.shape]


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
