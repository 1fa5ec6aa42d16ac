"""What a train step may return, and what a call of many steps returns to the host: one array of bytes, copied once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import scaler
from loops.loop.counters import Counters, CounterVariables
from loops.support.errors import BadOutputs

Outputs = dict[str, np.ndarray]
"""The values of each output over the steps of a call: arrays [steps, ...]."""


def scalars_and_vectors(outputs: Outputs) -> tuple[Outputs, Outputs]:
    """The outputs of shape [steps], and those of more dimensions."""
    scalars = {name: value for name, value in outputs.items() if value.ndim == 1}
    return scalars, {name: value for name, value in outputs.items() if name not in scalars}


def check_outputs(outputs: Any) -> None:
    """Refuses anything but a dict of numbers and bools with at least one scalar.

    Raises:
        BadOutputs: Names the output, and says what is expected.
    """
    if not isinstance(outputs, dict) or not outputs:
        raise BadOutputs(f"the train step returned {outputs!r}: expected a dict of scalar tensors, such as its loss.")
    any_scalar = False
    for name, value in outputs.items():
        shape, dtype = _shape_and_dtype(name, value)
        numbers = dtype.is_floating or dtype.is_integer or dtype.is_bool
        if not isinstance(name, str) or not shape.is_fully_defined() or not numbers:
            raise BadOutputs(
                f"the train step returned {name!r} with shape {shape} and dtype {dtype.name}: expected names of "
                "numbers or bools, scalars or arrays of a shape that is known when the step is traced. Reduce it "
                "first, such as with tf.reduce_mean, or set its shape with tf.ensure_shape."
            )
        if name in ("attempted", "applied") and shape.rank != 0:
            raise BadOutputs(
                f"the train step returned {name!r} with shape {shape}: expected a scalar bool, which the loop counts. "
                "Return outcome.finite of the step's own apply as 'applied', or choose another name."
            )
        any_scalar = any_scalar or shape.rank == 0
    if not any_scalar:
        raise BadOutputs(
            f"the train step returned {name!r} with shape {shape} and no scalar: expected at least one, such as its "
            "loss. Reduce it first, such as with tf.reduce_mean."
        )


def _shape_and_dtype(name: object, value: Any) -> tuple[tf.TensorShape, tf.DType]:
    try:
        value = value if isinstance(value, tf.TensorSpec) else tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise BadOutputs(f"the train step returned {name!r}: {value!r}: expected a tensor.") from error
    return value.shape, value.dtype


Layout = Sequence[tuple[tf.DType, Sequence[int]]]
"""The dtype and the shape of each tensor."""


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates the bytes of all tensors: uint8 [total].

    Args:
        tensors: Numbers and bools of any shape.
    """
    return tf.concat([tf.reshape(_bytes(tensor), [-1]) for tensor in tensors], axis=0)


def unpack(data: np.ndarray, layout: Layout) -> list[np.ndarray]:
    """The inverse of `pack`, on the host. The arrays do not share memory with `data`.

    Args:
        data: What `pack` returned.
        layout: The dtype and the shape of each tensor, in their order.
    """
    found, start = [], 0
    for dtype, shape in layout:
        kind = np.dtype(dtype.as_numpy_dtype)
        end = start + kind.itemsize * math.prod(shape)
        found.append(data[start:end].view(kind).reshape(shape).copy())
        start = end
    return found


def _bytes(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype in (tf.bool, tf.uint8):
        return tf.cast(tensor, tf.uint8)
    return tf.bitcast(tensor, tf.uint8)


Arrays = dict[str, tf.TensorArray]


class Stacked:
    """Which array holds each output of a step.

    Args:
        specs: The outputs of one step, by name: scalars and arrays of a known shape.
    """

    def __init__(self, specs: Mapping[str, tf.TensorSpec]):
        self._specs = dict(specs)
        self._columns: dict[str, list[str]] = {}
        for name, spec in specs.items():
            # Both keys have a prefix, so that no name of an output can equal another output's key.
            key = f"scalars of {spec.dtype.name}" if spec.shape.rank == 0 else f"array {name}"
            self._columns.setdefault(key, []).append(name)

    def arrays(self, size: tf.Tensor) -> Arrays:
        """Empty arrays.

        Args:
            size: The most steps that they hold, a scalar int32.
        """
        made = {}
        for key, names in self._columns.items():
            first = self._specs[names[0]]
            shape = [len(names)] if first.shape.rank == 0 else first.shape
            made[key] = tf.TensorArray(first.dtype, size=size, element_shape=shape)
        return made

    def write(self, arrays: Arrays, step: tf.Tensor, outputs: Mapping[str, tf.Tensor]) -> Arrays:
        """The arrays with the outputs of one step added.

        Args:
            arrays: From `arrays`.
            step: The index of the step within the call, a scalar int32.
            outputs: What the step returned.
        """
        return {key: array.write(step, self._row(key, outputs)) for key, array in arrays.items()}

    def rows(self, outputs: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
        """The outputs of a single step as one row of each array, in the order of the arrays."""
        return [self._row(key, outputs) for key in self._columns]

    def stack(self, arrays: Arrays) -> list[tf.Tensor]:
        """The arrays as tensors [size, ...], in their order."""
        return [arrays[key].stack() for key in self._columns]

    def layout(self, size: int) -> Layout:
        """The dtype and the shape of each array for `size` steps, in their order."""
        shapes = []
        for names in self._columns.values():
            first = self._specs[names[0]]
            shapes.append((first.dtype, [size, *(first.shape if first.shape.rank else [len(names)])]))
        return shapes

    def split(self, arrays: Sequence[np.ndarray], taken: int) -> dict[str, np.ndarray]:
        """Splits the stacked arrays on the host into one array [taken, ...] for each output."""
        found = {}
        for array, names in zip(arrays, self._columns.values(), strict=True):
            whole = array[:taken]
            scalars = self._specs[names[0]].shape.rank == 0
            found.update({name: whole[:, place].copy() if scalars else whole for place, name in enumerate(names)})
        return {name: found[name] for name in self._specs}

    def _row(self, key: str, outputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
        names = self._columns[key]
        return outputs[names[0]] if self._specs[names[0]].shape.rank else tf.stack([outputs[name] for name in names])


_COUNTS, _READING = 5, 7
"""How many numbers the counters have, and each scaler's `reading`."""


class CallResult(NamedTuple):
    """What a call did.

    Attributes:
        steps: Number of steps that the call took.
        outputs: For each output of the step an array [steps, ...].
        counters: The counts after the call.
        contradiction: A sentence if what the step returned contradicts its loss scalers, else None.
        readings: For each loss scaler the argument of its `check`.
    """

    steps: int
    outputs: Outputs
    counters: Counters
    contradiction: str | None
    readings: list[tuple[scaler.LossScaler, list[float]]]


def status(steps: tf.Tensor | int, counters: CounterVariables, scalers: Iterable[scaler.LossScaler]) -> tf.Tensor:
    """Everything but the outputs, computed in the graph of the call: float64 [1 + 5 + 7 for each scaler]."""
    counts = tf.cast(counters.numbers(), tf.float64)
    return tf.concat([[tf.cast(steps, tf.float64)], counts, *map(scaler.authoring.reading, scalers)], axis=0)


def status_size(scalers: Sequence[scaler.LossScaler]) -> int:
    """The length of `status`."""
    return 1 + _COUNTS + _READING * len(scalers)


def call_result(
    status: np.ndarray, outputs: Outputs, counters: CounterVariables, scalers: Sequence[scaler.LossScaler]
) -> CallResult:
    """Reads `status` on the host.

    Args:
        status: The value of `status`.
        outputs: The outputs of the call, arrays [steps, ...].
        counters: The variables that were read into `status`.
        scalers: The scalers that were read into `status`, in this order.
    """
    counts, contradiction = counters.read_from(status[1 : 1 + _COUNTS].astype(int).tolist())
    readings = list(zip(scalers, status[1 + _COUNTS :].reshape(-1, _READING).tolist(), strict=False))
    return CallResult(int(status[0]), outputs, counts, contradiction, readings)


def joined(parts: Sequence[CallResult]) -> CallResult:
    """Calls that follow each other as one.

    Args:
        parts: At least one.

    Raises:
        BadOutputs: If an output has another shape in one than in another.
    """
    last = parts[-1]
    for name, value in last.outputs.items():
        shapes = [part.outputs[name].shape[1:] if name in part.outputs else None for part in parts]
        if others := [shape for shape in shapes if shape != value.shape[1:]]:
            raise BadOutputs(
                f"the train step returned {name!r} with shape {others[0]} for one batch and {value.shape[1:]} for "
                "another: expected one shape for all. Reduce it first, such as with tf.reduce_mean."
            )
    outputs = {name: np.concatenate([part.outputs[name] for part in parts]) for name in last.outputs}
    contradiction = next((part.contradiction for part in parts if part.contradiction), None)
    return CallResult(sum(part.steps for part in parts), outputs, last.counters, contradiction, last.readings)
