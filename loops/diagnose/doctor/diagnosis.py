"""Diagnoses a program's step: its time, its dtypes, its memory, and what makes it faster."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

import scaler
from loops.diagnose.doctor import timing
from loops.diagnose.graph.census import Census, Row, census
from loops.diagnose.graph.changes import loss_in_float32, own_policy, restored
from loops.diagnose.graph.models import Traced
from loops.diagnose.graph.operations import CONVOLUTIONS, MATRICES, needed
from loops.diagnose.memory import Footprint, footprints, saved_tensors
from loops.support.errors import LoopError

SECONDS = 2.0
"""The seconds for which each comparison is measured."""
_MULTIPLE = 8
_OF_INPUTS = ("Conv2DBackpropInput", "Conv3DBackpropInputV2")
_OF_FILTERS = ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2")


@dataclasses.dataclass(frozen=True)
class Casts:
    """The casts of a step.

    Attributes:
        count: The number of casts.
        bytes: The bytes that they write.
        milliseconds: The time for casts of as many bytes on this machine, one after the other with nothing else
            running, without the time of as many calls that cast a single value.
    """

    count: int
    bytes: int
    milliseconds: timing.Spread


@dataclasses.dataclass(frozen=True)
class Product:
    """One operation that multiplies.

    Attributes:
        layer: The name of its layer, or None.
        op: The type, such as "MatMul".
        dtype: The dtype in which it multiplies.
        multiplications: The number of multiplications.
        sides: For a `MatMul` the rows of the left matrix, the inner side, and the columns of the right; else ().
    """

    layer: str | None
    op: str
    dtype: str
    multiplications: int
    sides: tuple[int, ...]

    @property
    def odd(self) -> list[int]:
        """The sides of the right matrix that are not multiples of 8."""
        return [side for side in self.sides[1:] if side % _MULTIPLE]


@dataclasses.dataclass(frozen=True)
class Padded:
    """The largest product with a side that is not a multiple of 8, timed as it is and with its sides rounded up.

    Attributes:
        layer: The name of its layer, or None.
        dtype: The dtype in which it multiplies.
        sides: The sides as they are.
        rounded: The sides rounded up.
        turns: The times of both.
    """

    layer: str | None
    dtype: str
    sides: tuple[int, ...]
    rounded: tuple[int, ...]
    turns: timing.PairedTiming


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Where a step's time and memory go.

    Attributes:
        model: The name of the model.
        policy: The dtype policy of the model.
        device: The device on which it ran, "GPU" or "CPU".
        step: The milliseconds of the step on a batch in memory.
        pipeline: The times of the step with its input pipeline; None if the program gives a single batch.
        products: The share of the multiplications in matrix products and convolutions, by dtype.
        different: The operations whose dtype is not the one that their layer's policy promises.
        casts: The casts of the step; None without any.
        padded: The largest product with a side that is not a multiple of 8; None without any.
        trials: The changes that were tried.
        footprints: The memory under each policy, the model's own first.
    """

    model: str
    policy: str
    device: str
    step: timing.Spread
    pipeline: timing.Pipeline | None
    products: Mapping[str, float]
    different: list[Row]
    casts: Casts | None
    padded: Padded | None
    trials: list[timing.Trial]
    footprints: list[Footprint]

    def as_dict(self) -> dict:
        """The diagnosis as values for JSON."""
        plain = dataclasses.asdict(dataclasses.replace(self, trials=[], footprints=[]))
        if self.pipeline:
            plain["pipeline"]["share"] = self.pipeline.share
        trials, memory = [one.as_dict() for one in self.trials], [one.as_dict() for one in self.footprints]
        return {**plain, "trials": trials, "footprints": memory}


def diagnose_built(
    built: Any, name: str, *, seconds: float = SECONDS, progress: Callable[[str], object] = lambda text: None
) -> Diagnosis:
    """Times the step of a program, and changes that may make it faster, and counts its bytes under each policy.

    Weights and random generators are restored. The timed steps are the program's own, with new optimizers and loss
    scalers.

    Args:
        built: A `loops.Loop` of a `loops.TrainStep`; or a tuple or dict of model, optimizer, loss and sample.
        name: The name of the function that returned it, for errors.
        seconds: The seconds for which each comparison is measured, without tracing.
        progress: Called now and then with a text that says what is done.

    Raises:
        scaler.InvalidArgument: If the return value cannot be trained.
        LoopError: If the data or the step fails.
    """
    try:
        program = timing.program_of(built, name)
        with restored(program.model):
            return _diagnosis(program, seconds, progress)
    except scaler.ScalerError:
        raise
    except Exception as error:
        raise LoopError(f"{name}: its training step fails: {timing.error_line(error)}") from error


def _diagnosis(program: timing.Program, seconds: float, progress: Callable[[str], object]) -> Diagnosis:
    model = program.model
    progress("tracing the step")
    step = timing.Running(program, program.step())
    masters = not program.settings.get("allow_16bit_updates", False)
    memory = footprints(model, program.loss, program.batch, program.optimizer, masters=masters)
    _, traced = saved_tensors(model, loss_in_float32(program.loss), program.batch)
    products = products_of(traced)
    counted = census(program.step(), program.batch)
    progress("timing the step")
    alone = timing.time_interleaved(step, step, seconds / 2).before
    pipeline = timing.pipeline_of(program, step, seconds)
    casts, odd = casts_of(counted, seconds / 4), padded(products, seconds / 4)
    trials = []
    for trial in timing.try_all(program, step, seconds):
        progress(f"tried {trial.name}")
        trials.append(trial)
    return Diagnosis(
        model=model.name,
        policy=own_policy(model),
        device="GPU" if tf.config.list_physical_devices("GPU") else "CPU",
        step=alone,
        pipeline=pipeline,
        products=shares(products),
        different=counted.different,
        casts=casts,
        padded=odd,
        trials=trials,
        footprints=memory,
    )


def products_of(traced: Traced) -> list[Product]:
    """The products of a step, also of its backward pass, but not those inside loops and called functions."""
    found = []
    used = needed({one.op for one in traced.graph.outputs})
    for operation in (one for one in traced.graph.get_operations() if one in used):
        multiplications = _multiplications(operation)
        if multiplications:
            place = traced.place_of_node(operation.name)
            dtype, sides = operation.outputs[0].dtype.name, _sides(operation)
            found.append(Product(place, operation.type, dtype, multiplications, sides))
    return found


def shares(products: list[Product]) -> Mapping[str, float]:
    """The share of the multiplications, by dtype."""
    counted: collections.Counter[str] = collections.Counter()
    for product in products:
        counted[product.dtype] += product.multiplications
    return {dtype: count / counted.total() for dtype, count in counted.most_common()}


def padded(products: list[Product], seconds: float) -> Padded | None:
    """Times the largest product with a side that is not a multiple of 8; None if there is none."""
    odd = [product for product in products if product.odd]
    if not odd:
        return None
    largest = max(odd, key=lambda product: product.multiplications)
    rows, *sides = largest.sides
    rounded = (rows, *(-(-side // _MULTIPLE) * _MULTIPLE for side in sides))
    turns = timing.time_interleaved(_product(largest.sides, largest.dtype), _product(rounded, largest.dtype), seconds)
    return Padded(largest.layer, largest.dtype, largest.sides, rounded, turns)


def _product(sides: tuple[int, ...], dtype: str) -> Callable[[], None]:
    rows, inner, columns = sides
    left = tf.cast(tf.random.stateless_normal((rows, inner), (0, 1)), dtype)
    right = tf.cast(tf.random.stateless_normal((inner, columns), (0, 2)), dtype)

    def multiply() -> None:
        tf.matmul(left, right)
        tf.test.experimental.sync_devices()

    return multiply


def _multiplications(operation: tf.Operation) -> int:
    if operation.type in MATRICES:
        left, out = operation.inputs[0].shape, operation.outputs[0].shape
        turned = operation.get_attr("transpose_a" if operation.type == "MatMul" else "adj_x")
        return _size(out) * ((left[-2] if turned else left[-1]) or 0) if left.rank else 0
    if operation.type in CONVOLUTIONS or operation.type in _OF_INPUTS:
        # Each value of the convolution's output is a sum over all sides of the filter but the last.
        result = operation.outputs[0] if operation.type in CONVOLUTIONS else operation.inputs[2]
        filters = operation.inputs[1].shape
        return _size(result.shape) * _size(filters[:-1])
    if operation.type in _OF_FILTERS:
        return _size(operation.inputs[2].shape) * _size(operation.outputs[0].shape[:-1])
    return 0


def _sides(operation: tf.Operation) -> tuple[int, ...]:
    if operation.type != "MatMul" or not _size(operation.outputs[0].shape):
        return ()
    left, (rows, columns) = operation.inputs[0].shape, operation.outputs[0].shape
    inner = left[-2] if operation.get_attr("transpose_a") else left[-1]
    return (rows, inner, columns) if inner else ()


def _size(shape: tf.TensorShape) -> int:
    return math.prod(shape) if shape.is_fully_defined() else 0


def casts_of(census: Census, seconds: float) -> Casts | None:
    """Times the casts between float formats; None for a step without any.

    In the step they may take less time: the graph optimizer fuses some, and others run in parallel.
    """
    rows = [row for row in census.rows if row.cast_bytes]
    if not rows:
        return None
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.dtype] = sizes.get(row.dtype, 0) + (row.cast_bytes or 0)
    turns = timing.time_interleaved(_casting(dict.fromkeys(sizes, 1)), _casting(sizes), seconds)
    calls, whole = turns.before.median, turns.after
    spread = timing.Spread(*(max(0.0, value - calls) for value in (whole.median, whole.low, whole.high)))
    return Casts(sum(row.count for row in rows), sum(sizes.values()), spread)


def _casting(sizes: dict[str, int]) -> Callable[[], None]:
    """A function that casts, with so many bytes of output for each pair of dtypes, such as "float32 to float16"."""
    given = []
    for pair, size in sizes.items():
        source, target = (tf.as_dtype(name) for name in pair.split(" to "))
        given.append((tf.zeros([max(1, size // target.size)], source), target))

    def cast() -> None:
        for values, target in given:
            tf.cast(values, target)
        tf.test.experimental.sync_devices()

    return cast
