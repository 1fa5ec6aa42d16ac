"""Finds a loss scale, and a format for each layer, from a few batches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.explain.examples import example_of
from loops.diagnose.graph.changes import restored
from loops.record.trace.tensors import tensors_of
from loops.replay.recording import Source, recording_of, tables_of
from loops.replay.replay import static_scale
from loops.step.train_step import TrainStep
from loops.support.errors import LoopError, OutOfData, check_count
from loops.support.text import agreeing, amount

STATIC_MARGIN, START_MARGIN = 2, 1
"""How many octaves a static scale and a dynamic scale's start lie below the largest scale without an overflow."""
FLUSHED = 0.01
"""The largest share of a layer's non-zero gradients that may become zero."""
_LOWEST, _HIGHEST = 2.0**-14, 2.0**126
"""The loss scales to measure at. A batch that is finite at none of them is finite at none that helps."""
_DOWN, _UP = 2.0**-4, 2.0**16
_WANTED, _ENOUGH = 2.0**12, 2.0**8
"""The largest scaled gradient is raised to the first if it is below the second, so that float16 hides few others."""
_FORMATS_AT = 2.0**-3
"""Where layers are looked at without a static scale, as a share of the critical one."""
_HALF = scaler.float_format("float16")


@dataclasses.dataclass(frozen=True)
class LayerFormat:
    """The format that a layer needs.

    Attributes:
        layer: The layer's path in the model.
        format: "float16", "bfloat16" or "float32": the first that holds twice its largest activation and its gradients
            at the static scale, and flushes at most 1% of its non-zero gradients to zero. Without a static scale, an
            eighth of the critical one.
        activation: The largest magnitude of its outputs; infinity if one was not finite.
        gradient: The largest magnitude of its gradients, unscaled.
        flushed: The share of its non-zero gradients that float16 flushes to zero at that scale.
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
        critical: The largest power of two as a loss scale at which no gradient of these batches overflows in float16,
            with the weights as they are. It is a measurement: gradients that grow in training overflow at it.
        static: A static loss scale, two octaves below the largest at which none of the recorded `runs` can skip more
            than 1% of its steps; None without such runs, or if there is no such scale.
        start: A first loss scale for a strategy that lowers it at a skip, half of `critical`. It may lie beyond the
            default bounds of `Dynamic`; `dynamic` moves them.
        batches: The number of batches that were measured.
        layers: The formats of all layers that have outputs or weights.
        left_out: The numbers of the batches, counted from 1, that were left out since they hold a value that is not
            finite.
        runs: The number of recorded runs.
    """

    critical: float
    static: float | None
    start: float
    batches: int
    layers: tuple[LayerFormat, ...]
    left_out: tuple[int, ...] = ()
    runs: int = 0

    @property
    def formats(self) -> dict[str, str]:
        """The format of each layer, by the layer's path."""
        return {one.layer: one.format for one in self.layers}

    @property
    def dynamic(self) -> scaler.Dynamic:
        """A `Dynamic` that begins at `start`. Where the default bounds leave it no room, they are moved."""
        usual, moved = scaler.Dynamic(), self._moved_bounds()
        low, high = moved.get("min_scale", usual.min_scale), moved.get("max_scale", usual.max_scale)
        return scaler.Dynamic(self.start, min_scale=low, max_scale=high)

    def __str__(self) -> str:
        width = max([5, *(len(one.layer) for one in self.layers)])
        lines = [
            f"start {self.start:g}, for a strategy that moves; overflow above {self.critical:g} in these batches "
            f"({_batches(self.batches)})",
            self._static(),
            *self._remarks(),
            f"{'layer':{width}}  {'format':8}  {'activation':>10}  {'gradient':>10}  flushed",
        ]
        lines += [
            f"{one.layer:{width}}  {one.format:8}  {one.activation:10.3g}  {one.gradient:10.3g}  {one.flushed:.2%}"
            for one in self.layers
        ]
        return "\n".join(lines)

    def _static(self) -> str:
        if self.static is not None:
            return (
                f"static {self.static:g}, at which {amount(self.runs, 'recorded run')} would skip at most 1% of steps"
            )
        if self.runs:
            return (
                f"no static scale: at each, one of {amount(self.runs, 'recorded run')} may skip more than 1% of its "
                "steps. Record at a scale that skips nothing"
            )
        return "no static scale: a few batches do not say how large gradients become in training. Give runs="

    def _remarks(self) -> list[str]:
        found = []
        if self.left_out:
            which = f"{agreeing(len(self.left_out), 'batch', 'batches')} {', '.join(map(str, self.left_out))}"
            found.append(f"left out: {which}, with values that are not finite, which no scale or format changes")
        moved = self._moved_bounds()
        for name, value in moved.items():
            usual = getattr(scaler.Dynamic(), name)
            instead = f"hs.Dynamic({self.start!r}, {name}={value!r})"
            found.append(f"start has no room within the default {name} of {usual:g}: {instead}")
        return found

    def _moved_bounds(self) -> dict[str, float]:
        """The bound of a `Dynamic` that the start reaches or passes, with as much room as the default leaves."""
        usual = scaler.Dynamic()
        if self.start >= usual.max_scale:
            return {"max_scale": min(self.start * usual.max_scale / usual.initial_scale, _HIGHEST)}
        if self.start <= usual.min_scale:
            return {"min_scale": max(self.start * usual.min_scale / usual.initial_scale, 2.0**-126)}
        return {}


def _batches(count: int) -> str:
    return f"{count} {agreeing(count, 'batch', 'batches')}"


class _Measured(NamedTuple):
    """A measured batch: counts int64 [rows, 280] and largest magnitudes float64 [rows], both at this loss scale."""

    counts: np.ndarray
    amax: np.ndarray
    scale: float


def find_scale(
    model: keras.Model,
    data: Iterable[Any],
    loss_fn: Callable[..., Any],
    *,
    batches: int = 8,
    runs: Source | Sequence[Source] = (),
) -> FoundScale:
    """Measures a few batches, and finds a loss scale and a format for each layer that suit them.

    The model runs in its own formats. A float32 model shows most, since float16 hides the values that it flushes to
    zero. No weight moves, and every variable of the model is restored at the end. Batches that hold a NaN or an
    infinity are left out. A few batches do not say what training makes of the gradients: a static scale is found from
    the traces of whole runs alone.

    Args:
        model: Any Keras model that is built.
        data: Batches `(x, y)` or `(x, y, sample_weight)`, such as a `tf.data.Dataset`.
        loss_fn: A function of (y, prediction), or of (y, prediction, sample_weight), as `TrainStep` takes it.
        batches: The largest number of batches to measure.
        runs: Traces of whole runs of this model, as `replay` takes them, recorded at a scale that skips little.

    Raises:
        OutOfData: If the data has no batch.
        LoopError: If no batch has finite values and finite gradients, if all gradients are zero, or if a trace cannot
            be read.
        scaler.InvalidArgument: For an argument that cannot work.
    """
    if not isinstance(model, keras.Model):
        raise scaler.InvalidArgument(f"find_scale(model={model!r}): expected a keras.Model.")
    if not model.built:
        raise scaler.InvalidArgument(
            f"find_scale: model {model.name!r} has no variables yet. Give it an Input, or call it once."
        )
    check_count(f"find_scale(batches={batches!r})", batches)
    none = isinstance(runs, (list, tuple)) and not runs
    recordings = [] if none else [recording_of(tables, name) for name, tables in tables_of(runs)]
    held = tf.Variable(2.0**10, trainable=False)
    step = TrainStep(
        model,
        loss_fn,
        keras.optimizers.SGD(0.0),
        # Both bounds are the scale to measure at, which begins where neither float32 nor float16 overflows often.
        loss_scaler=scaler.LossScaler(scaler.Dynamic(held, min_scale=held, max_scale=held)),
        probes=scaler.observe.watch(model),
    )
    seen, spoilt, left_out = _measure(step, held, itertools.islice(data, batches))
    largest = static_scale(recordings)
    static = None if largest is None else max(largest * 2.0**-STATIC_MARGIN, 2.0**-126)
    return dataclasses.replace(_found(step, seen, spoilt, static), left_out=tuple(left_out), runs=len(recordings))


def _measure(
    step: TrainStep, held: tf.Variable, data: Iterable[Any]
) -> tuple[list[_Measured], list[_Measured], list[int]]:
    """The batches that were finite at some scale, the others, and the numbers of those whose own values are not."""
    graph = tf.function(step)
    seen: list[_Measured] = []
    spoilt: list[_Measured] = []
    left_out: list[int] = []

    def take(batch: Any) -> tuple[_Measured, bool]:
        outputs = {name: value.numpy() for name, value in graph(batch).items()}
        one = _Measured(outputs["counts"], outputs["amax"].astype(np.float64), float(outputs["loss_scale"]))
        return one, bool(outputs["applied"])

    with restored(step.model):
        for number, batch in enumerate(data, 1):
            if example_of(tf.nest.map_structure(_as_tensor, batch)) is not None:
                left_out.append(number)
                continue
            one, finite = _at_a_scale(step, functools.partial(take, batch), held)
            (seen if finite else spoilt).append(one)
    if not seen and not spoilt and not left_out:
        raise OutOfData("find_scale: the data gave no batch.")
    if not seen and not spoilt:
        raise LoopError(
            f"find_scale: all batches that it looked at, {len(left_out)}, hold values that are not finite. Look at the "
            "data."
        )
    if not seen:
        raise LoopError(
            f"find_scale: none of {_batches(len(spoilt))} had finite gradients, not even at a loss scale of "
            f"{spoilt[-1].scale:g}: no scale helps. Look at the data, or at a float32 model."
        )
    return seen, spoilt, left_out


def _at_a_scale(
    step: TrainStep, take: Callable[[], tuple[_Measured, bool]], held: tf.Variable
) -> tuple[_Measured, bool]:
    """Measures a batch at a loss scale at which it is finite, if there is one, and its gradients are not hidden.

    Args:
        step: The step that is measured.
        take: Measures the batch at the scale held, and says whether it was finite.
        held: The scale, which is left where the next batch begins.
    """
    began = float(held)
    best = None
    while True:
        one, finite = take()
        if not finite and best is None and one.scale > _LOWEST:
            held.assign(max(one.scale * _DOWN, _LOWEST))
            continue
        if not finite:
            held.assign(began if best is None else best.scale)
            return best or one, best is not None
        best = one
        largest = max([0.0, *one.amax[[tensor.carries_scale for tensor in tensors_of(step)]]])
        if largest >= _ENOUGH or one.scale >= _HIGHEST:
            # Nothing is known of the scale if all gradients are zero.
            held.assign(one.scale if largest else began)
            return best, True
        up = 2.0 ** math.floor(math.log2(_WANTED / largest)) if largest else _UP
        held.assign(min(one.scale * up, _HIGHEST))


def _as_tensor(part: Any) -> Any:
    return tf.constant(part) if isinstance(part, np.ndarray) else part


def _found(step: TrainStep, seen: list[_Measured], spoilt: list[_Measured], static: float | None) -> FoundScale:
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
    at = max(critical * _FORMATS_AT, 2.0**-126) if static is None else static
    for one in spoilt:
        largest[~np.isfinite(one.amax) & ~carries] = math.inf
    layers = []
    for path in scaler.observe.layers_by_path(step.model):
        own = np.array([_of_layer(tensor.name, path) for tensor in tensors], bool)
        if own.any():
            activation, gradient = (float(largest[rows].max(initial=0.0)) for rows in (own & ~carries, own & carries))
            flushed = {name: _flushed(own & carries, seen, at, name) for name in ("float16", "bfloat16")}
            name = _format(activation, gradient * at, flushed)
            layers.append(LayerFormat(path, name, activation, gradient, flushed["float16"]))
    return FoundScale(
        critical, static, max(critical * 2.0**-START_MARGIN, 2.0**-126), len(seen) + len(spoilt), tuple(layers)
    )


def _of_layer(name: str, path: str) -> bool:
    kind, _, rest = name.partition("/")
    return rest == path or (kind == "weight_gradients" and rest.rpartition("/")[0] == path)


def _format(activation: float, gradient: float, flushed: Mapping[str, float]) -> str:
    """The first format that holds a layer's largest activation and scaled gradient, and flushes few gradients."""
    for name, share in flushed.items():
        most = scaler.float_format(name).max
        # An activation that was infinite in float16 is assumed to fit into bfloat16.
        fits = 2 * activation <= most or (math.isinf(activation) and name == "bfloat16")
        if fits and gradient <= most and share <= FLUSHED:
            return name
    return "float32"


def _flushed(rows: np.ndarray, seen: list[_Measured], static: float, name: str) -> float:
    """The share of these non-zero gradients that a format flushes to zero at the static scale."""
    lost = whole = 0.0
    for one in seen:
        counts = one.counts[rows].sum(axis=0)
        kept = int(counts.sum() - counts[scaler.observe.ZERO])
        if kept:
            cast = scaler.observe.cast(
                counts, scaler.float_format(name), static, scaler.observe.Source(scale=one.scale)
            )
            lost += cast.underflow.low * counts.sum()
            whole += kept
    return lost / whole if whole else 0.0
