"""Computes the columns of a trace from a visit: the critical scale of each step, and what ready probes measured.

The gradient noise scale follows from the latter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

import scaler
from loops.loop.visit import Visit
from loops.record.steps import cause_name
from loops.record.trace.tensors import Tensor
from loops.step.parts import OwnStep, parts_in
from loops.step.probing import Watched, watched_by

_FLOAT32 = scaler.float_format("float32")
_ABOVE = 1.0 + 2.0**-52
"""Just above 1, so that the largest power of two below a scale times this can be the scale itself."""


def headroom_of(amax: np.ndarray, tensors: Sequence[Tensor]) -> np.ndarray:
    """Float64 [steps]: octaves from the largest value that does not carry the scale to its format's largest number.

    Minus infinity if a value is infinite or NaN, NaN if none was measured or all are 0.

    Args:
        amax: Float [steps, tensors], the largest measured magnitudes.
        tensors: The measured tensors.
    """
    unscaled, largest = _unscaled(tuple(tensors))
    values = np.asarray(amax, np.float64)[:, unscaled]
    with np.errstate(divide="ignore"):
        octaves = largest - np.log2(np.where(np.isnan(values), np.inf, values))
    nearest = octaves.min(axis=1, initial=np.inf)
    return np.where(np.isposinf(nearest), np.nan, nearest)


class Seen(NamedTuple):
    """What the probes of all parts measured at the steps of a visit, in the order of the tensors.

    Attributes:
        amax: Float32 [steps, tensors], the largest magnitudes.
        known: Bool [steps, tensors]: whether the probes looked. They leave steps out by `every`, and those of a part
            where it is not its turn.
    """

    amax: np.ndarray
    known: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """Bool [steps]: whether any probes looked at the step."""
        return np.logical_or.reduce(self.known, axis=1)


def seen_in(visit: Visit, train_step: Any) -> Seen:
    """What the probes of a step measured at a visit."""
    watches = watched_by(train_step)
    amax = [visit.vectors[one.output("amax")] for one in watches]
    known = [
        np.broadcast_to(measured(visit.vectors, one)[:, np.newaxis], values.shape)
        for one, values in zip(watches, amax, strict=True)
    ]
    return Seen(np.concatenate(amax, axis=1), np.concatenate(known, axis=1))


def measured(vectors: Mapping[str, np.ndarray], watched: Watched) -> np.ndarray:
    """Bool [steps]: whether the probes of one watch looked at the step."""
    found: np.ndarray = (vectors[watched.output("amax")] != 0).any(axis=1)
    if (counts := watched.output("counts")) in vectors:
        # Where all values are 0, they are counted; at a step that is left out all counts are 0, too.
        found |= (vectors[counts][:, :, scaler.observe.ZERO] != 0).any(axis=1)
    return found


def columns_of(visit: Visit, tensors: Sequence[Tensor], train_step: Any, seen: Seen | None) -> dict[str, np.ndarray]:
    """The numbers of each step, by the names of the trace's columns; NaN where it was not measured.

    Of a `ComposedStep` with a scaler for each part there is no loss scale and so no critical one of the step. With one
    scaler there is none unless every part is measured, since any of them may overflow.

    Args:
        visit: A visit of the step.
        tensors: Those that its probes measure.
        train_step: The step.
        seen: What they measured; None without probes.
    """
    columns = dict(visit.outputs)
    parts = [part.name for part in parts_in(train_step)]
    if parts and train_step.loss_scaler is not None:
        columns["loss_scale"] = visit.outputs[f"{parts[0]}/loss_scale"]
    if seen is None:
        return columns
    amax = seen.amax[seen.rows]
    found = {"headroom": headroom_of(amax, tensors)}
    if not parts or ("loss_scale" in columns and set(parts) == {one.part for one in watched_by(train_step)}):
        scale = columns.get("loss_scale", np.ones(len(seen.amax)))
        found["critical_low"], found["critical_high"] = critical_scales(amax, scale[seen.rows], tensors)
    for name, values in found.items():
        columns[name] = np.full(len(seen.amax), np.nan)
        columns[name][seen.rows] = values
    return columns


@functools.lru_cache(maxsize=8)
def _unscaled(tensors: tuple[Tensor, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Which tensors do not carry the loss scale, and log2 of the largest number of the format of each of these."""
    chosen = np.array([not tensor.carries_scale for tensor in tensors], bool)
    return chosen, np.log2([tensor.limits.max for tensor in tensors if not tensor.carries_scale])


def skip_names(visit: Visit, train_step: Any) -> dict[str, list[str | None]]:
    """The columns `cause` and `variable` of a visit as texts, None at each step that was not skipped.

    Args:
        visit: The steps.
        train_step: The loop's. The variables of a `TrainStep` and of a `ComposedStep` are known, there with the name of
            the part; of another step there is no column.
    """
    if not isinstance(train_step, OwnStep):
        return {}
    paths = train_step.names_of_weights()
    variables = [paths[value] if value >= 0 else None for value in visit.outputs["variable"].tolist()]
    causes = [cause_name(value) or None for value in visit.outputs["cause"].tolist()]
    return {"cause": causes, "variable": variables}


def skipped(outputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Bool [steps]: attempted, and not applied."""
    steps = len(next(iter(outputs.values())))
    everything = np.ones(steps, bool)
    applied, attempted = outputs.get("applied", everything), outputs.get("attempted", everything)
    return np.asarray(attempted).astype(bool) & ~np.asarray(applied).astype(bool)


class _Critical(NamedTuple):
    """Bounds of each step's critical scale: float64 [steps], equal if it is known exactly.

    Attributes:
        low: The lower bound; 0 if a tensor was not finite, infinity if every scale is finite.
        high: The upper bound; 0 if an activation or a weight was not finite, so that no scale helps.
    """

    low: np.ndarray
    high: np.ndarray


def critical_scales(amax: np.ndarray, loss_scale: np.ndarray, tensors: Sequence[Tensor]) -> _Critical:
    """The critical scale: the largest power of two at which all that a step measured would still have been finite.

    It follows from the largest magnitude of each tensor. A gradient x of the unscaled loss is x S at the loss scale S,
    rounded, and would be x P at another scale P. It stays finite as long as x P is below the format's overflow
    threshold, 65520 in float16. A tensor that does not carry the scale, such as an activation or a weight, is finite at
    every scale or at none.

    The result is an interval. For a normal gradient, seen at a power of two, both ends are equal: it is rounded at the
    same bit at any scale. For an infinite or NaN gradient, the scale was too high by an unknown factor: the interval is
    from 0 to the next lower power of two. For a subnormal or zero gradient, rounding has hidden the value that a higher
    scale would show.

    If a gradient's format is uncertain, the lower end is that of its narrow format, and the upper end that of float32.
    If all gradients of a step were finite, the step's own scale is a lower bound, too.

    Args:
        amax: Float [steps, tensors], the largest measured magnitudes; NaN if a value was NaN.
        loss_scale: Float [steps], the scales at which they were measured: finite and above 0.
        tensors: The measured tensors.
    """
    seen = np.asarray(amax, np.float64)
    scales = np.asarray(loss_scale, np.float64)[:, np.newaxis]
    low, high = np.full(len(seen), np.inf), np.full(len(seen), np.inf)
    carries, groups = _groups(tuple(tensors))
    # All tensors of a format at once: vectorized over tensors, because a visit may have a single step.
    for limits, certain, chosen in groups:
        least, most = _scaled(seen[:, chosen], scales, limits) if certain else _unsure(seen[:, chosen], scales, limits)
        low, high = (
            np.minimum(low, least.min(axis=1, initial=np.inf)),
            np.minimum(high, most.min(axis=1, initial=np.inf)),
        )
    # If everything was finite at this scale, the scale is a lower bound, whatever an uncertain format suggests.
    proven = _largest_power(scales[:, 0] * _ABOVE, np.ones(len(seen)), np.zeros(len(seen), bool))
    low = np.where(np.isfinite(seen[:, carries]).all(axis=1), np.maximum(low, proven), low)
    high = np.maximum(high, low)
    finite = np.isfinite(seen[:, ~carries]).all(axis=1)
    return _Critical(np.where(finite, low, 0.0), np.where(finite, high, 0.0))


@functools.lru_cache(maxsize=8)
def _groups(tensors: tuple[Tensor, ...]) -> tuple[np.ndarray, list[tuple[scaler.FloatFormat, bool, np.ndarray]]]:
    """Which tensors carry the scale, and of these those of each format, known or not."""
    carries = np.array([tensor.carries_scale for tensor in tensors], bool)
    kinds = [(tensor.limits, tensor.certain) for tensor in tensors]
    groups = [(*kind, carries & np.array([own == kind for own in kinds], bool)) for kind in dict.fromkeys(kinds)]
    return carries, [group for group in groups if group[2].any()]


def _unsure(amax: np.ndarray, scale: np.ndarray, limits: scaler.FloatFormat) -> tuple[np.ndarray, np.ndarray]:
    """The lower bound of a narrow format, and the upper bound of float32.

    A value above the narrow format's limit may be a float32 sum of parts that the narrow format can hold.
    """
    return _scaled(amax, scale, limits)[0], _scaled(amax, scale, _FLOAT32)[1]


def _scaled(amax: np.ndarray, scale: np.ndarray, limits: scaler.FloatFormat) -> tuple[np.ndarray, np.ndarray]:
    finite = np.isfinite(amax)
    value = np.where(finite, amax, 0.0)
    _, exponent = np.frexp(value)
    step = np.maximum(np.ldexp(limits.epsilon, exponent - 1), limits.smallest_subnormal)
    step = np.where(value == 0, limits.smallest_subnormal, step)
    # Below a power of two, the spacing is half as large.
    is_power = (np.frexp(value)[0] == 0.5) & (step > limits.smallest_subnormal)
    least, most = np.maximum(value - np.where(is_power, step / 4, step / 2), 0.0), value + step / 2
    # Ties round to even, so the end points of an odd value's interval do not round to it.
    odd = np.remainder(value / step, 2) == 1
    reached = limits.overflow_threshold * scale
    low = _largest_power(reached, most, inclusive=odd)
    high = np.where(least > 0, _largest_power(reached, least, inclusive=np.zeros_like(odd)), np.inf)
    below = _largest_power(scale, np.ones_like(scale), inclusive=np.zeros_like(odd))
    return np.where(finite, low, 0.0), np.where(finite, high, below)


def _largest_power(limit: np.ndarray, value: np.ndarray, inclusive: np.ndarray) -> np.ndarray:
    """The largest power of two by which a value stays below the limit; at most the limit where `inclusive`."""
    limit_part, limit_exponent = np.frexp(limit)
    part, exponent = np.frexp(np.where(value > 0, value, 1.0))
    fits = (part < limit_part) | (inclusive & (part == limit_part))
    return np.ldexp(1.0, limit_exponent - exponent - np.where(fits, 0, 1))


def gauges_of(train_step: Any) -> list[str]:
    """The names of what a train step's ready probes measure, such as "update_rms/dense"; empty without them.

    Those of a part have its name before the layer's: "update_rms/critic/dense".

    Args:
        train_step: A loop's train step, after its first trace.
    """
    return [
        one.row(f"{output}/{name}")
        for one in watched_by(train_step)
        for output, names in getattr(one.watch, "gauges", {}).items()
        for name in names
    ]


def gauge_values(vectors: Mapping[str, np.ndarray], train_step: Any) -> np.ndarray:
    """Float32 [steps, gauges] in the order of `gauges_of`; NaN where a step was not measured.

    Args:
        vectors: Those of a visit.
        train_step: The visit's step, with ready probes.
    """
    watches = watched_by(train_step)
    return np.concatenate([vectors[one.output(output)] for one in watches for output in one.watch.gauges], axis=1)


def noise_pairs(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """For each step or part whose noise scale is measured its curve's name and those of its noise and its signal.

    Args:
        names: Of gauges.
    """
    noises = [name for name in names if name.startswith("noise_scale/") and name.endswith("/noise")]
    pairs = [(name.removesuffix("/noise"), name, f"{name.removesuffix('noise')}signal") for name in noises]
    return [pair for pair in pairs if pair[2] in names]


_KEPT = 0.99
"""How much of an average each further step keeps: it spans about a hundred measured steps."""


class Averages:
    """Averages of noise and signal over the last steps.

    The ratio of two estimates is biased and may be negative, so each is averaged by itself: McCandlish et al. 2018,
    arXiv:1812.06162, appendix A.1.
    """

    def __init__(self) -> None:
        self._sums, self._weight = (0.0, 0.0), 0.0

    def save_state(self) -> list[float]:
        """The averages, as JSON."""
        return [*self._sums, self._weight]

    def load_state(self, value: list[float]) -> None:
        """Restores what `save_state` returned."""
        noise, signal, self._weight = value
        self._sums = noise, signal

    def add(self, noise: float, signal: float) -> float:
        """The noise scale after a further step, see `noise_scale`. A step that is not finite is passed over."""
        if math.isfinite(noise) and math.isfinite(signal):
            old = self._sums
            self._sums = _KEPT * old[0] + noise, _KEPT * old[1] + signal
            self._weight = _KEPT * self._weight + 1.0
        noise, signal = self._sums
        return max(noise, 0.0) / signal if signal > 0 else math.nan


def noise_scale(noise: ArrayLike, signal: ArrayLike) -> np.ndarray:
    """The simple noise scale `B = tr(S) / |G|^2` of McCandlish et al. 2018, arXiv:1812.06162, in examples.

    Batches much smaller than it gain nearly the whole of each further example, larger ones little. It is the ratio of
    two averages with a decay of 0.99 a step.

    Args:
        noise: [steps], the column `noise_scale/noise` of a trace, an estimate of the trace of the covariance of one
            example's gradient; NaN or None where it was not measured.
        signal: [steps], the column `noise_scale/signal`, an estimate of the squared norm of the true gradient.

    Returns:
        Float64 [steps]. NaN where nothing was measured yet, and where the average signal is not above 0: then it takes
        more steps to tell.
    """
    averages = Averages()
    pairs = zip(np.asarray(noise, np.float64).tolist(), np.asarray(signal, np.float64).tolist(), strict=True)
    return np.array([averages.add(*pair) for pair in pairs], np.float64)
