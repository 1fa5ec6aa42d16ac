"""The rule of stress: each layer alone at rising magnitudes, in its own dtype and in float32 on the same values.

If only float16 fails, and the float32 result fits into float16, the fault is the layer's and not the input's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.graph.calls import LayerCall
from loops.diagnose.graph.changes import layers_in_float32, restored, rounding_is_no_warning
from loops.diagnose.lint.graph_rules import constructor_of
from loops.diagnose.lint.subject import Finding, Inputs, Kind, Severity, Subject, Texts, last_line, note

_FAILS = Texts(
    Kind.FAILS_UNDER_STRESS,
    "{kind} fails in float16{where}: {spoilt} where the float32 result is finite and within float16's range.",
    "Run alone, it failed {passes}; in float32 it did not.",
    "Give this layer dtype='float32': {constructor}(..., dtype='float32').",
)
_ENLARGES = Texts(
    Kind.ENLARGES,
    "{kind} enlarges its input {ratio:.3g} times, so it overflows early in float16.",
    "At inputs of {magnitude:g} the output is {reference:.3g} in float32; float16 ends at 65504. Layers with Glorot, "
    "He or orthogonal kernels stay below 7 times.",
    "Use a mean instead of a sum, use smaller weights, or give this layer dtype='float32'.",
)
_NOT_STRESSED = Texts(
    Kind.NOT_STRESSED,
    "this layer could not be stressed, so its behaviour in float16 is unknown.",
    "Run alone, it raised {error}.",
    "Check its limits in float16 yourself, or give it dtype='float32'.",
    Severity.NOTE,
)
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
_ALONE, _SEVERAL, _MANY = 5e3, 1e3, 10.0
"""The largest input for a layer without inner weighted layers, for one with some, and for one with many."""
_FEW_LAYERS = 8
_WORDS = (("nan", "NaN"), ("inf", "infinite"), ("zero", "all zeros"))
_CONTAINERS = (keras.layers.Bidirectional, keras.layers.TimeDistributed, keras.layers.Embedding)


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


def fails_under_stress(subject: Subject) -> Iterator[Finding]:
    """Stresses inner layers before those that call them, and reports a failure once, where it begins."""
    traced = subject.traced
    known: dict[object, list[Failure] | CannotStress] = {}
    faulty: set[int] = set()
    noted: set[int] = set()
    for call in traced.calls:
        layer = call.layer
        if layer.compute_dtype != "float16" or not _floats(call) or _is_container(call) or id(layer) in faulty:
            continue
        weighted = len({id(one) for one in traced.inside(layer) if one.weights})
        key = _shared_key(call)
        if key not in known:
            try:
                known[key] = stress(call, _limit(weighted))
            except CannotStress as error:
                known[key] = error
        failed = known[key]
        if isinstance(failed, CannotStress):
            yield _NOT_STRESSED.at(traced.place(layer), error=failed)
            continue
        found = _finding(traced.place(layer), call, failed, weighted, subject.seen.inputs(layer))
        if found is None or (found.is_note and id(layer) in noted):
            continue
        around = {id(one) for one in (layer, *call.inside)}
        noted |= around
        faulty |= set() if found.is_note else around
        yield found


def _limit(weighted_inside: int) -> float:
    """The largest magnitude at which a layer is stressed that calls so many layers with weights.

    An ordinary layer's output is at most 7 times its input, so inputs above 5e3 may overflow without a fault of the
    layer. In a layer that calls others these factors multiply.
    """
    if not weighted_inside:
        return _ALONE
    return _SEVERAL if weighted_inside <= _FEW_LAYERS else _MANY


def _finding(
    place: str, call: LayerCall, failures: list[Failure], weighted_inside: int, seen: Inputs | None
) -> Finding | None:
    """The finding for a layer's failures under stress; a note if they need far larger inputs than the sample's."""
    faults = [failure for failure in failures if failure.kind != "large"]
    # With several inputs the true output may be their product, and an overflow is then not the layer's fault.
    if not failures or (not faults and (weighted_inside or len(_floats(call)) != 1)):
        return None
    reached = [one for one in faults or failures if seen is None or seen.reach(one.magnitude, one.one_signed)]
    if faults:
        finding = _fault(place, call.layer, faults, "" if reached else " on inputs larger than your sample's")
    else:
        first = (reached or failures)[0]
        finding = _ENLARGES.at(
            place,
            kind=type(call.layer).__name__,
            ratio=first.reference / first.magnitude if first.magnitude else float("inf"),
            magnitude=first.magnitude,
            reference=first.reference,
        )
    if reached or seen is None:
        return finding
    return note(
        place,
        finding.finding,
        f"{finding.measured} On your sample its inputs reach {seen.amax:.3g}.",
        "Nothing, as long as its inputs stay in this range. Otherwise "
        f"{finding.instead[0].lower()}{finding.instead[1:]}",
        finding.kind,
    )


def _fault(place: str, layer: keras.layers.Layer, faults: list[Failure], where: str) -> Finding:
    kinds = {failure.kind for failure in faults}
    spoilt = " or ".join(text for kind, text in _WORDS if kind in kinds)
    passes = []
    for backward, name in ((False, "forward"), (True, "backward")):
        at = sorted({failure.magnitude for failure in faults if failure.backward == backward})
        if at:
            passes.append(f"{name} with inputs of magnitude {', '.join(f'{one:g}' for one in at)}")
    return _FAILS.at(
        place,
        kind=type(layer).__name__,
        where=where,
        spoilt=f"{'its output' if passes[0].startswith('forward') else 'its gradient'} is {spoilt}",
        passes=" and ".join(passes),
        constructor=constructor_of(layer),
    )


def _is_container(call: LayerCall) -> bool:
    """Whether a layer only calls others or looks up rows, or belongs to a recurrent layer that is stressed itself."""
    functional = isinstance(call.layer, keras.Model) and type(call.layer).__module__.startswith("keras.")
    plain = functional or isinstance(call.layer, _CONTAINERS)
    return plain or any(isinstance(one, keras.layers.RNN) for one in call.inside)


def _shared_key(call: LayerCall) -> object:
    """A key that is equal for calls that fail in the same way: class, configuration, shapes, sizes of the weights."""
    try:
        config = {name: value for name, value in call.layer.get_config().items() if name != "name"}
        text = json.dumps(config, sort_keys=True, default=repr)
    except (NotImplementedError, TypeError, ValueError):
        text = str(id(call.layer))
    sizes = tuple(_octaves(variable) for variable in call.layer.weights)
    return type(call.layer), text, repr(call.signature), sizes


def _octaves(variable: keras.Variable) -> tuple:
    values = np.abs(np.asarray(variable.numpy(), np.float64))
    sizes = [values.max(initial=0.0), np.sqrt(np.mean(np.square(values))) if values.size else 0.0]
    # For layer widths of powers of two, Glorot's and He's deviations are at whole and half powers of two.
    # The offset keeps them away from the rounding boundaries.
    return tuple(round(float(np.log2(max(size, 1e-30))) + 0.25) if np.isfinite(size) else size for size in sizes)


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
        raise CannotStress(last_line(error)) from error


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
    return call.differentiated([_given(spec, values) for spec in call.specs], seeds=_signs)


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
