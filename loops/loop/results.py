"""What a loop counts, what a train step may return, and what a call of many steps returns to the host.

That is one array of bytes, copied once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import scaler
from loops.step.user_steps import Found
from loops.support.errors import BadOutputs


@dataclasses.dataclass(frozen=True)
class Counters:
    """Counts since the loop was made, as Python integers. `scaler.Counters` are those of one loss scaler, as tensors.

    If a train step returns `attempted` and `applied`, the loop counts them. If it returns neither, the loop reads the
    loss scalers in its graph: a step in which one of them decided was attempted, and it was applied if none of them
    skipped. A step without a loss scaler is attempted and applied every time.

    Attributes:
        data: Batches taken from the dataset: calls of the train step. `Loop.run` counts in these.
        attempted: Steps on which a decision was taken: fewer than `data` if gradients are accumulated.
        applied: Attempted steps that moved the weights.
        known: False if `attempted` and `applied` cannot be determined and are not counted: the step returns neither,
            and multiplies by the loss scale of a scaler that it never updates.
    """

    data: int = 0
    attempted: int = 0
    applied: int = 0
    known: bool = True

    @property
    def skipped(self) -> int:
        """Attempted steps that changed nothing, because a gradient was not finite."""
        return self.attempted - self.applied


class CounterVariables(tf.Module):
    """The counts on the device: if a call of many steps fails, the steps that it finished are counted.

    Attributes:
        known: Whether the most recently traced step can be counted.
        compared: Whether its output `applied` is compared with what its loss scalers did.
    """

    def __init__(self) -> None:
        super().__init__(name="counters")
        self.data = _count("data")
        self.attempted = _count("attempted")
        self.applied = _count("applied")
        self.claimed = _count("claimed")
        self.denied = _count("denied")
        self.known = True
        self.compared = False

    def add(self, outputs: dict[str, tf.Tensor], found: Found, before: list) -> None:
        """Counts one call of a train step, once its outputs are computed.

        Args:
            outputs: What the step returned.
            found: The loss scalers in its graph.
            before: What `found.read()` returned before the step.
        """
        with tf.control_dependencies(list(outputs.values())):
            self.data.assign_add(1)
            self.known = found.known or "applied" in outputs
            if not self.known:
                return
            decided, moved = found.decided(before)
            here = decided > 0 if found.any else tf.constant(True)
            names = (name for name in ("attempted", "applied") if name in outputs)
            returned = {name: tf.cast(outputs[name], tf.bool) for name in names}
            attempted = tf.cast(
                returned.get("attempted", tf.logical_or(here, returned.get("applied", False))), tf.int64
            )
            whole = tf.cast(tf.equal(decided, moved), tf.int64)
            applied = tf.cast(returned.get("applied", attempted * whole), tf.int64)
            self.attempted.assign_add(attempted)
            self.applied.assign_add(applied)
            self.compared = "applied" in outputs and found.any
            if self.compared:
                all_skipped, all_applied = (decided > 0) & tf.equal(moved, 0), (moved > 0) & tf.equal(moved, decided)
                self.claimed.assign_add(tf.cast((applied > 0) & all_skipped, tf.int64))
                self.denied.assign_add(tf.cast((applied < attempted) & all_applied, tf.int64))

    def reset(self) -> None:
        """Counts from zero."""
        for variable in self.variables:
            variable.assign(0)

    def read(self) -> Counters:
        """The counts, on the host."""
        return Counters(int(self.data), int(self.attempted), int(self.applied), self.known)

    def numbers(self) -> tf.Tensor:
        """All counts as one tensor, int64 [5], for `read_from`."""
        compared = [self.claimed, self.denied] if self.compared else [0, 0]
        return tf.stack([self.data, self.attempted, self.applied, *compared])

    def read_from(self, numbers: Sequence[int]) -> tuple[Counters, str | None]:
        """Reads the value of `numbers` on the host.

        Returns:
            The counts; and a sentence if what the step returned as `applied` contradicts its loss scalers, else None.
        """
        data, attempted, applied, claimed, denied = (int(number) for number in numbers)
        says = None
        if self.compared and claimed:
            says = _CONTRADICTS.format(says="was applied", did="skipped it")
        elif self.compared and denied:
            says = _CONTRADICTS.format(says="was not applied", did="applied it")
        return Counters(data, attempted, applied, self.known), says


_CONTRADICTS = (
    "a train step returned an 'applied' that says that it {says}, but the loss scaler in it {did}: the loop counts "
    "what the step returns. Return outcome.finite of the step's own apply as 'applied', or leave it out, and the loop "
    "counts what the loss scalers do."
)


def _count(name: str) -> tf.Variable:
    return tf.Variable(0, dtype=tf.int64, trainable=False, name=name)


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
        raise BadOutputs(f"the train step returned {name!r}: {value!r:.100}: expected a tensor.") from error
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
    """The inverse of `pack`, on the host. The arrays share memory with `data`, at any of its bytes.

    Args:
        data: What `pack` returned.
        layout: The dtype and the shape of each tensor, in their order.
    """
    found, start = [], 0
    for dtype, shape in layout:
        kind = np.dtype(dtype.as_numpy_dtype)
        end = start + kind.itemsize * math.prod(shape)
        found.append(data[start:end].view(kind).reshape(shape))
        start = end
    return found


def _bytes(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype in (tf.bool, tf.uint8):
        return tf.cast(tensor, tf.uint8)
    return tf.bitcast(tensor, tf.uint8)


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


Arrays = dict[str, tf.TensorArray]


class Stacked:
    """How a call returns the outputs of its steps, and what else the host wants to know of it, as one array.

    Args:
        specs: The outputs of one step, by name: scalars and arrays of a known shape.
        counters: The variables that count.
    """

    def __init__(self, specs: Mapping[str, tf.TensorSpec], counters: CounterVariables):
        self._specs, self._counters = dict(specs), counters
        self._scalers: list[scaler.LossScaler] = []
        self._columns: dict[str, list[str]] = {}
        for name, spec in specs.items():
            # Both keys have a prefix, so that no name of an output can equal another output's key.
            key = f"scalars of {spec.dtype.name}" if spec.shape.rank == 0 else f"array {name}"
            self._columns.setdefault(key, []).append(name)
        # The dtype and the shape of what a step adds to each: one number for each of the scalars.
        self._rows: dict[str, tuple[tf.DType, Sequence[int]]] = {}
        for key, names in self._columns.items():
            first = self._specs[names[0]]
            self._rows[key] = first.dtype, first.shape if first.shape.rank else [len(names)]

    def arrays(self, size: tf.Tensor) -> Arrays:
        """Empty arrays.

        Args:
            size: The most steps that they hold, a scalar int32.
        """
        return {
            key: tf.TensorArray(dtype, size=size, element_shape=shape) for key, (dtype, shape) in self._rows.items()
        }

    def write(self, arrays: Arrays, step: tf.Tensor, outputs: Mapping[str, tf.Tensor]) -> Arrays:
        """The arrays with the outputs of one step added.

        Args:
            arrays: From `arrays`.
            step: The index of the step within the call, a scalar int32.
            outputs: What the step returned.
        """
        return {key: array.write(step, self._row(key, outputs)) for key, array in arrays.items()}

    def single(self, outputs: Mapping[str, tf.Tensor], scalers: Iterable[scaler.LossScaler]) -> tf.Tensor:
        """What a call of one step returns: uint8 [total]."""
        return self._packed(1, [self._row(key, outputs) for key in self._columns], scalers)

    def whole(self, steps: tf.Tensor, arrays: Arrays, scalers: Iterable[scaler.LossScaler]) -> tf.Tensor:
        """What a call returns that took so many steps: uint8 [total]."""
        return self._packed(steps, [arrays[key].stack() for key in self._columns], scalers)

    def _packed(
        self, steps: tf.Tensor | int, tensors: Sequence[tf.Tensor], scalers: Iterable[scaler.LossScaler]
    ) -> tf.Tensor:
        self._scalers = list(scalers)
        counts = tf.cast(self._counters.numbers(), tf.float64)
        readings = map(scaler.authoring.reading, self._scalers)
        return pack([tf.concat([[tf.cast(steps, tf.float64)], counts, *readings], axis=0), *tensors])

    def read(self, data: np.ndarray, limit: int) -> CallResult:
        """Reads on the host what a call returned that could take so many steps."""
        layout: list = [(tf.dtypes.float64, [1 + _COUNTS + _READING * len(self._scalers)])]
        layout += [(dtype, [limit, *shape]) for dtype, shape in self._rows.values()]
        status, *arrays = unpack(data, layout)
        taken = int(status[0])
        found: Outputs = {}
        for array, names in zip(arrays, self._columns.values(), strict=True):
            # Scalars of one dtype are copied together: outputs that are kept must not keep all of `data`.
            scalars = self._specs[names[0]].shape.rank == 0
            found.update(zip(names, array[:taken].T.copy() if scalars else [array[:taken].copy()], strict=True))
        counts, contradiction = self._counters.read_from(status[1 : 1 + _COUNTS].astype(int).tolist())
        readings = list(zip(self._scalers, status[1 + _COUNTS :].reshape(-1, _READING).tolist(), strict=True))
        return CallResult(taken, {name: found[name] for name in self._specs}, counts, contradiction, readings)

    def _row(self, key: str, outputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
        names = self._columns[key]
        return outputs[names[0]] if self._specs[names[0]].shape.rank else tf.stack([outputs[name] for name in names])


def joined(parts: Sequence[CallResult], counters: CounterVariables) -> CallResult:
    """Calls that follow each other as one; without any, what the counters say.

    Raises:
        BadOutputs: If an output has another shape in one than in another.
    """
    if not parts:
        return CallResult(0, {}, counters.read(), None, [])
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
