"""Finds a loss scale, and a format for each layer, from a few batches."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.record.trace.tensors import tensors_of
from loops.step.train_step import TrainStep
from loops.support.checks import check_count
from loops.support.errors import LoopError, OutOfData

STATIC_MARGIN, START_MARGIN = 3, 1
"""The distance below the first overflow, in powers of two, of a static scale and of a dynamic scale's start."""
FLUSHED = 0.01
"""The largest share of a layer's non-zero gradients that may become zero."""
_TRIES = 8
_HALF = scaler.float_format("float16")


@dataclasses.dataclass(frozen=True)
class LayerFormat:
    """The format that a layer needs.

    Attributes:
        layer: The layer's path in the model.
        format: "float16", "bfloat16" or "float32": the first that holds twice its largest activation and its gradients
            at the static scale, and flushes at most 1% of its non-zero gradients to zero.
        activation: The largest magnitude of its outputs; infinity if one was not finite.
        gradient: The largest magnitude of its gradients, unscaled.
        flushed: The share of its non-zero gradients that float16 flushes to zero at the static scale.
    """

    layer: str
    format: str
    activation: float
    gradient: float
    flushed: float


@dataclasses.dataclass(frozen=True)
class FoundScale:
    """The loss scales and formats that `find_scale` found.

    Attributes:
        critical: The largest power of two as a loss scale at which no gradient of these batches overflows in float16.
        static: A static loss scale, an eighth of `critical`.
        start: A first loss scale for a dynamic strategy, half of `critical`.
        batches: The number of batches that were measured.
        layers: The formats of all layers that have outputs or weights.
    """

    critical: float
    static: float
    start: float
    batches: int
    layers: tuple[LayerFormat, ...]

    @property
    def formats(self) -> dict[str, str]:
        """The format of each layer, by the layer's path."""
        return {one.layer: one.format for one in self.layers}

    def __str__(self) -> str:
        width = max([5, *(len(one.layer) for one in self.layers)])
        lines = [
            f"static {self.static:g}, start {self.start:g}, overflow above {self.critical:g} ({self.batches} batches)",
            f"{'layer':{width}}  {'format':8}  {'activation':>10}  {'gradient':>10}  flushed",
        ]
        lines += [
            f"{one.layer:{width}}  {one.format:8}  {one.activation:10.3g}  {one.gradient:10.3g}  {one.flushed:.2%}"
            for one in self.layers
        ]
        return "\n".join(lines)


class _Measured(NamedTuple):
    """A measured batch: counts int64 [rows, 280] and largest magnitudes float64 [rows], both at this loss scale."""

    counts: np.ndarray
    amax: np.ndarray
    scale: float


def find_scale(model: keras.Model, data: Iterable[Any], loss_fn: Callable[..., Any], *, batches: int = 8) -> FoundScale:
    """Measures a few batches, and finds a loss scale and a format for each layer that suit them.

    The model runs in its own formats. A float32 model shows most, since float16 hides the values that it flushes to
    zero. No weight moves, and every variable of the model is restored at the end. Gradients change in training, so
    measure again later, or use a strategy that moves the scale.

    Args:
        model: Any Keras model that is built.
        data: Batches `(x, y)` or `(x, y, sample_weight)`, such as a `tf.data.Dataset`.
        loss_fn: A function of (y, prediction), or of (y, prediction, sample_weight), as `TrainStep` takes it.
        batches: The largest number of batches to measure.

    Raises:
        OutOfData: If the data has no batch.
        LoopError: If no batch has finite gradients, or all gradients are zero.
        scaler.InvalidArgument: For an argument that cannot work.
    """
    if not isinstance(model, keras.Model):
        raise scaler.InvalidArgument(f"find_scale(model={model!r}): expected a keras.Model.")
    if not model.built:
        raise scaler.InvalidArgument(
            f"find_scale: model {model.name!r} has no variables yet. Give it an Input, or call it once."
        )
    check_count(f"find_scale(batches={batches!r})", batches)
    step = TrainStep(
        model,
        loss_fn,
        keras.optimizers.SGD(0.0),
        # It starts where neither float32 nor float16 overflows often, and backs off fast.
        loss_scaler=scaler.LossScaler(scaler.Dynamic(2.0**10, growth_interval=2**30, backoff_factor=2.0**-4)),
        probes=scaler.observe.watch(model),
    )
    seen, spoilt = _measure(step, itertools.islice(data, batches))
    return _found(step, seen, spoilt)


def _measure(step: TrainStep, data: Iterable[Any]) -> tuple[list[_Measured], list[_Measured]]:
    """The batches that were finite at some scale, and the others."""
    graph, seen, spoilt = tf.function(step), [], []
    before = [(variable, variable.numpy()) for variable in step.model.variables]
    try:
        for batch in data:
            for _ in range(_TRIES):
                outputs = {name: value.numpy() for name, value in graph(batch).items()}
                one = _Measured(outputs["counts"], outputs["amax"].astype(np.float64), float(outputs["loss_scale"]))
                if outputs["applied"]:
                    seen.append(one)
                    break
            else:
                spoilt.append(one)
    finally:
        for variable, value in before:
            variable.assign(value)
    if not seen and not spoilt:
        raise OutOfData("find_scale: the data gave no batch.")
    if not seen:
        raise LoopError(
            f"find_scale: none of {len(spoilt)} batches had finite gradients, not even at a loss scale of "
            f"{spoilt[-1].scale:g}: no scale helps. Look at the data, or at a float32 model."
        )
    return seen, spoilt


def _found(step: TrainStep, seen: list[_Measured], spoilt: list[_Measured]) -> FoundScale:
    tensors = tensors_of(step)
    carries = np.array([tensor.carries_scale for tensor in tensors], bool)
    scales = np.where(carries[:, np.newaxis], [one.scale for one in seen], 1.0)
    largest = (np.stack([one.amax for one in seen], axis=1) / scales).max(axis=1)
    gradient = float(largest[carries].max(initial=0.0))
    if gradient == 0:
        raise LoopError("find_scale: all gradients are zero. Look at the loss, or try other batches.")
    # The largest power of two below threshold / gradient; at the threshold itself float16 is infinite.
    critical = 2.0 ** (math.ceil(math.log2(_HALF.overflow_threshold / gradient)) - 1)
    critical = min(max(critical, 2.0**-126), 2.0**126)
    static = max(critical * 2.0**-STATIC_MARGIN, 2.0**-126)
    names = [tensor.name for tensor in tensors]
    infinite = {name for one in spoilt for name, value in zip(names, one.amax, strict=True) if not np.isfinite(value)}
    layers = []
    for path in scaler.observe.layers_by_path(step.model):
        rows = [place for place, name in enumerate(names) if _of_layer(name, path)]
        if rows:
            layers.append(_layer(path, rows, names, carries, largest, infinite, seen, static))
    return FoundScale(
        critical, static, max(critical * 2.0**-START_MARGIN, 2.0**-126), len(seen) + len(spoilt), tuple(layers)
    )


def _of_layer(name: str, path: str) -> bool:
    kind, _, rest = name.partition("/")
    return rest == path or (kind == "weight_gradients" and rest.rpartition("/")[0] == path)


def _layer(
    path: str,
    rows: list[int],
    names: list[str],
    carries: np.ndarray,
    largest: np.ndarray,
    infinite: set[str],
    seen: list[_Measured],
    static: float,
) -> LayerFormat:
    activations, gradients = [row for row in rows if not carries[row]], [row for row in rows if carries[row]]
    activation = float(largest[activations].max(initial=0.0))
    if any(names[row] in infinite for row in activations):
        activation = math.inf
    gradient = float(largest[gradients].max(initial=0.0))
    shares = {name: _flushed(gradients, seen, static, scaler.float_format(name)) for name in ("float16", "bfloat16")}

    def holds(name: str) -> bool:
        most = scaler.float_format(name).max
        # An activation that was infinite in float16 is assumed to fit into bfloat16.
        fits = math.isinf(activation) if name == "bfloat16" and math.isinf(activation) else 2 * activation <= most
        return fits and gradient * static <= most and shares[name] <= FLUSHED

    found = next((name for name in ("float16", "bfloat16") if holds(name)), "float32")
    return LayerFormat(path, found, activation, gradient, shares["float16"])


def _flushed(rows: list[int], seen: list[_Measured], static: float, to: scaler.FloatFormat) -> float:
    """The share of these non-zero gradients that a format flushes to zero at the static scale."""
    lost = whole = 0.0
    for one in seen:
        counts = one.counts[rows].sum(axis=0)
        kept = int(counts.sum() - counts[scaler.observe.ZERO])
        if kept:
            cast = scaler.observe.cast(counts, to, static, scaler.observe.Source(scale=one.scale))
            lost += cast.underflow.low * counts.sum()
            whole += kept
    return lost / whole if whole else 0.0
