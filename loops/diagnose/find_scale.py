"""A loss scale, and a format for each layer, from what a few batches show."""

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
"""Octaves below the first overflow: of a scale that stays, and of one that moves by itself."""
FLUSHED = 0.01
"""The largest share of a layer's gradients that may become zero, of those that are not zero."""
_TRIES = 8
_HALF = scaler.float_format("float16")


@dataclasses.dataclass(frozen=True)
class LayerFormat:
    """What a layer needs.

    Attributes:
        layer: Its path in the model.
        format: "float16", "bfloat16" or "float32": the first that holds its activations with an octave to spare, and
            its gradients at the static scale, of which it makes at most a hundredth zero.
        activation: The largest magnitude of its outputs; infinity if one was not finite.
        gradient: The largest of its gradients, without a loss scale.
        flushed: The share of its gradients that float16 makes zero at the static scale, of those that are not zero.
    """

    layer: str
    format: str
    activation: float
    gradient: float
    flushed: float


@dataclasses.dataclass(frozen=True)
class FoundScale:
    """What `find_scale` found.

    Attributes:
        critical: The largest power of two at which no gradient of these batches is infinite in float16.
        static: A scale that stays, three octaves below.
        start: Where a scale that moves by itself may begin, an octave below.
        batches: How many were looked at.
        layers: Every layer that has outputs or weights.
    """

    critical: float
    static: float
    start: float
    batches: int
    layers: tuple[LayerFormat, ...]

    @property
    def formats(self) -> dict[str, str]:
        """The format of each layer, by its path."""
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


class _Seen(NamedTuple):
    """A batch: counts int64 [rows, 280] and largest magnitudes float64 [rows], both at this loss scale."""

    counts: np.ndarray
    amax: np.ndarray
    scale: float


def find_scale(model: keras.Model, data: Iterable[Any], loss_fn: Callable[..., Any], *, batches: int = 8) -> FoundScale:
    """Looks at a few batches, and says which loss scale and which formats suit them.

    The model is run as it is, in its own formats: one in float32 shows most, since float16 hides what it makes zero.
    No weight moves, and every variable of the model has its value again at the end. Gradients change as a model is
    trained, so look again later, or use a strategy that moves the scale.

    Args:
        model: Any Keras model.
        data: Batches `(x, y)` or `(x, y, sample_weight)`, such as a `tf.data.Dataset`.
        loss_fn: As for `TrainStep`.
        batches: How many to look at, at most.

    Raises:
        OutOfData: If there is no batch.
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
        # It begins where float32 and float16 both overflow rarely, and comes down fast.
        loss_scaler=scaler.LossScaler(scaler.Dynamic(2.0**10, growth_interval=2**30, backoff_factor=2.0**-4)),
        probes=scaler.observe.watch(model),
    )
    seen, spoilt = _look(step, itertools.islice(data, batches))
    return _found(step, seen, spoilt)


def _look(step: TrainStep, data: Iterable[Any]) -> tuple[list[_Seen], list[_Seen]]:
    """What batches showed that were finite at some scale, and what the others did."""
    graph, seen, spoilt = tf.function(step), [], []
    before = [(variable, variable.numpy()) for variable in step.model.variables]
    try:
        for batch in data:
            for _ in range(_TRIES):
                outputs = {name: value.numpy() for name, value in graph(batch).items()}
                one = _Seen(outputs["counts"], outputs["amax"].astype(np.float64), float(outputs["loss_scale"]))
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
            f"find_scale: none of {len(spoilt)} batches had finite gradients, at a loss scale of {spoilt[-1].scale:g} "
            "neither: no scale helps. Look at the data, or at a float32 model."
        )
    return seen, spoilt


def _found(step: TrainStep, seen: list[_Seen], spoilt: list[_Seen]) -> FoundScale:
    tensors = tensors_of(step)
    carries = np.array([tensor.carries_scale for tensor in tensors], bool)
    scales = np.where(carries[:, np.newaxis], [one.scale for one in seen], 1.0)
    largest = (np.stack([one.amax for one in seen], axis=1) / scales).max(axis=1)
    gradient = float(largest[carries].max(initial=0.0))
    if gradient == 0:
        raise LoopError("find_scale: all gradients are zero. Look at the loss, or give batches that differ.")
    # A power of two below the limit divided by the largest; at the limit itself float16 is infinite.
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
    seen: list[_Seen],
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
        # What was infinite in a narrow format is taken to fit into a wide one.
        fits = math.isinf(activation) if name == "bfloat16" and math.isinf(activation) else 2 * activation <= most
        return fits and gradient * static <= most and shares[name] <= FLUSHED

    found = next((name for name in ("float16", "bfloat16") if holds(name)), "float32")
    return LayerFormat(path, found, activation, gradient, shares["float16"])


def _flushed(rows: list[int], seen: list[_Seen], static: float, to: scaler.FloatFormat) -> float:
    """The share of these gradients, of those that are not zero, that a format makes zero at the static scale."""
    lost = whole = 0.0
    for one in seen:
        counts = one.counts[rows].sum(axis=0)
        kept = int(counts.sum() - counts[scaler.observe.ZERO])
        if kept:
            cast = scaler.observe.cast(counts, to, static, scaler.observe.Source(scale=one.scale))
            lost += cast.underflow.low * counts.sum()
            whole += kept
    return lost / whole if whole else 0.0
