"""Any strategy, and a limit for what the norm and the loss of a step may be."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend.autograph import no_autograph, with_user_autograph
from scaler.backend.variables import choose
from scaler.checks import as_float, check_constant, check_count, check_flag, check_number, is_symbolic
from scaler.errors import InvalidArgument
from scaler.strategies import exact
from scaler.strategies.base import Event, Needs, Strategy, bounded_state, require_inner, statistic, together
from scaler.strategies.nested import AroundWithBounds, count_up, inner_of, join, own_of

TENSOR_FIELDS = ("tensor_norms", "tensor_usual", "tensor_limits")
"""The fields of a state with the `Window` of each gradient's norm."""
_SIGMA = 1.4826
"""A normal distribution has this many times its median distance from the median as its standard deviation."""
_LEAST = 0.1
"""The least spread, as a share of the median."""


class Window(NamedTuple):
    """The last values of a number, or of several.

    Attributes:
        values: Float32 [size, ...], the newest last; infinity where nothing was seen yet.
        usual: Float32 [...], their medians.
        limit: Float32 [...], the most that the next step allows.
    """

    values: tf.Tensor
    usual: tf.Tensor
    limit: tf.Tensor

    @classmethod
    def unknown(cls, size: int, *shape: int) -> Window:
        """Before the first step."""
        none = tf.fill(tf.constant(shape, tf.int32), math.inf)
        return cls(tf.fill([size, *shape], math.inf), none, none)

    def after(self, value: tf.Tensor, applied: tf.Tensor, factor: Any) -> Window:
        """After a step. What is not finite does not enter: the norm of a gradient that a step did not have is NaN.

        The limit is infinite while half of the window is empty, which counts as infinite, and where all of it is 0.

        Args:
            value: Float32 [...].
            applied: Scalar bool.
            factor: How many spreads above the median the limit lies, a number or a scalar tensor.
        """
        enters = tf.logical_and(applied, tf.math.is_finite(value))
        values = tf.where(enters, tf.concat([self.values[1:], value[tf.newaxis]], axis=0), self.values)
        usual = _median(values)
        distance = exact.narrow(exact.wide(_SIGMA) * exact.wide(_median(tf.abs(values - usual))))
        spread = tf.maximum(distance, exact.narrow(exact.wide(_LEAST) * exact.wide(tf.abs(usual))))
        limit = exact.narrow(exact.wide(usual) + exact.wide(as_float(factor)) * exact.wide(spread))
        has_limit = tf.logical_and(tf.math.is_finite(usual), spread > 0.0)
        return Window(values, usual, tf.where(has_limit, limit, math.inf))


def flushed(value: Any) -> tf.Tensor:
    """In float32, with 0 for a subnormal number, on which kernels disagree."""
    return exact.narrow(exact.wide(value))


def _median(values: tf.Tensor) -> tf.Tensor:
    """The median along the first axis."""
    size, rank = values.shape[0], values.shape.rank
    last = values if rank == 1 else tf.transpose(values, [*range(1, rank), 0])
    # `tf.sort` asks for the shape, which takes int32 arithmetic.
    ordered = tf.math.top_k(last, k=size).values
    middle = exact.wide(ordered[..., size // 2]) + exact.wide(ordered[..., (size - 1) // 2])
    return exact.narrow(middle * 0.5)


class Verdict(NamedTuple):
    """What a guard says of a step with finite gradients, scalar tensors.

    Attributes:
        spike: Bool, whether the step is to be skipped.
        of_norm: Bool, whether a norm is why, and not its loss.
        value: Float32, the norm or the loss.
        usual: Float32, the median of the window; NaN if `largest_norm` is the limit.
        limit: Float32, the most that is allowed.
        tensor: Int64, the position of the variable whose gradient's own norm is why, else -1. None unless each is
            watched and none is clipped.
        beyond: Int64, how many gradients lie beyond their own limits, if one of them is why, else 0. None as `tensor`.
    """

    spike: tf.Tensor
    of_norm: tf.Tensor
    value: tf.Tensor
    usual: tf.Tensor
    limit: tf.Tensor
    tensor: tf.Tensor | None = None
    beyond: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class SpikeGuard(AroundWithBounds):
    """Skip a step whose gradient norm or loss is finite and far beyond that of the last steps, or above a fixed limit.

        of the norms, of the losses, and by tensor of the norms of each gradient, of the last `window` applied steps:
            usual:   the median
            spread:  1.4826 * the median of |value - usual|, and at least |usual| / 10
            limit:   usual + factor * spread; of the norms at most `largest_norm`
        finite, and the norm or the loss is above its limit:   a spike. The step is skipped, the scale stays
        by_tensor="skip", and a gradient's norm is:            likewise
        by_tensor="clip", and a gradient's norm is:            gradient *= limit / its norm, before all else here
        otherwise:                                             the strategy sees the step

    The norm is the global one of the unscaled gradients, before clipping. The loss is what `scale` was given, summed
    over the micro-batches and the replicas of a step, each of which gives its share of a mean; in `fit` with
    `gradient_accumulation_steps` it is the mean over the micro-batches. All replicas decide alike. A spike leaves every
    variable as an overflow does. The strategy does not see it, so that the loss scale, and what leads to its growth, do
    not move. What retries of its backward pass did to them is put back.

    Only applied steps enter the window. No step is a spike until more than half of the window is filled, nor while all
    of its values are 0, unless its norm is above `largest_norm`, which holds from the first step on. Until the window
    is full, the limit is higher than the formula's, since empty places count as infinite.
    More than `share * window` spikes in a row are no spikes but another level: `LossScaler.check` then finds the scaler
    stuck.

    With `by_tensor` each gradient also has a window of its own norms. With "clip" the global norm is judged after that,
    and enters its window so: a spike of one gradient costs no step, and one of all gradients still does where the
    clipped ones are too large together. Gradients that all grow by one factor are clipped to norms that make the global
    limit, but for rounding: up to 1 + 2^-10 of it is no spike. A gradient's own norm enters as it was before, so that
    another level is learnt once it fills half of the window. `Outcome.clipped_tensors` counts the clipped ones. What
    `apply` is asked to clip comes after.

    A `LossScaler` makes these windows for the variables of its first step. A later step may have some of them, and a
    gradient that a step does not have leaves its window alone. Other variables are refused. Variables are known by
    name and shape, and of several that share both by their order: name them where the order may change. In the long
    form give `Event.norms` in the same order, ask `is_spike`, and multiply by `factors`.

    The state is the strategy's, with these fields. The first three are also there as `losses`, `loss_usual` and
    `loss_limit`, if the loss is watched.

        norms           float32 [window], the newest last
        norm_usual      float32, their median
        norm_limit      float32, the limit for the next step
        tensor_norms    float32 [window, variables], by tensor: with `tensor_usual` and `tensor_limits`, [variables]
        spikes          int32, so far
        spikes_in_a_row int32, since the last applied step
        last_spike      float32 [3], of the last spike its value, the median and the limit

    Args:
        strategy: Any strategy. A guard goes around all others.
        factor: How many spreads above the median a step may lie, greater than 0. With 20 no limit is below three times
            the median.
        window: Applied steps that are remembered, in [3, 10000].
        share: The largest share of the window that may be spikes in a row, in (0, 1].
        norm: Whether the norm is watched.
        loss: Whether the loss is watched.
        by_tensor: What happens to a step with one gradient beyond its own limit: "skip" it, or "clip" that gradient.
            None watches no gradient by itself.
        largest_norm: The most that the global norm may be, however large it usually is; greater than 0. With
            `norm=False` it is the only limit of the norm. optax calls such a guard `skip_large_updates`.

    `factor` may also be a scalar tensor or variable, which is not checked.

    Raises:
        InvalidArgument: For a value outside these ranges, an object that is not a strategy, or a guard of nothing; in
            `update` for an event without the norm, the loss or the norms.

    References:
        The median and the scaled median distance are Hampel's identifier: Hampel 1974, The Influence Curve and Its Role
        in Robust Estimation; Pearson 2002, Outliers in Process Modeling and Identification. A spike moves neither, as
        it would a mean and a standard deviation. The least limit is that of Lightning's `SpikeDetection`, lightning
        2.4, fabric/utilities/spike.py: a loss of mean + rtol * mean, with rtol=2. Spikes of gradients are ten to a
        thousand times the usual norm: Huang et al. 2025, SPAM (https://arxiv.org/abs/2501.06842). Clipping each tensor
        by its own last norms, there their moving average, is AdaGC's: Wang et al. 2025 (https://arxiv.org/abs/2502.11034).
    """

    strategy: Strategy
    _: dataclasses.KW_ONLY
    factor: float = 20.0
    window: int = 100
    share: float = 0.1
    norm: bool = True
    loss: bool = True
    by_tensor: str | None = None
    largest_norm: float | None = None

    def __post_init__(self) -> None:
        require_inner(self.strategy, "SpikeGuard")
        check_number("factor", self.factor, "a finite number greater than 0", lambda v: 0 < v < math.inf)
        if any(map(is_symbolic, (self.window, self.norm, self.loss, self.by_tensor, self.largest_norm))):
            raise InvalidArgument(
                "SpikeGuard(window=..., norm=..., loss=..., by_tensor=..., largest_norm=...): expected Python values, "
                "not tensors."
            )
        check_count("window", self.window, 100)
        check_constant("window", self.window, "an integer in [3, 10000]", lambda v: 3 <= v <= 10000)
        check_constant("share", self.share, "a share in (0, 1]", lambda v: 0 < v <= 1)
        check_flag("norm", self.norm)
        check_flag("loss", self.loss)
        if self.by_tensor not in (None, "skip", "clip"):
            raise InvalidArgument(
                f'SpikeGuard(by_tensor={self.by_tensor!r}): expected "skip" or "clip", which is what happens to a step '
                "with one gradient beyond its own limit, or None, which looks at no gradient by itself."
            )
        if self.largest_norm is not None:
            check_number(
                "largest_norm", self.largest_norm, "a finite number greater than 0", lambda v: 0 < v < math.inf
            )
        if not (self.watched or self.by_tensor):
            raise InvalidArgument(
                "SpikeGuard(norm=False, loss=False): expected at least one of them to watch, by_tensor or largest_norm."
            )

    @property
    def needs(self) -> Needs:
        """What the strategy needs, and what is watched."""
        return together(super().needs, Needs(norm="norm" in self.watched, loss=self.loss))

    @property
    def most_in_a_row(self) -> int:
        """How many spikes in a row are allowed: at least one."""
        return max(int(self.share * self.window), 1)

    @property
    def watched(self) -> tuple[str, ...]:
        """Which numbers of a whole step are watched: "norm", "loss" or both."""
        watches = {"norm": self.norm or self.largest_norm is not None, "loss": self.loss}
        return tuple(name for name, watched in watches.items() if watched)

    def init(self, variables: int = 0) -> Any:
        """The state before the first step.

        Args:
            variables: How many variables a step updates, if each gradient's norm is watched. A `LossScaler` finds it
                out at its first step.
        """
        own: dict[str, tf.Tensor] = {}
        for name in self._windows:
            shape = (variables,) if name == "norms" else ()
            own |= self._fields(name, Window.unknown(self.window, *shape))
        none = tf.constant(0)
        own |= zip(_COUNTS, (none, none, tf.zeros([3])), strict=True)
        return join("SpikeGuardState", bounded_state(self.strategy, self.strategy.init()), **own)

    def verdict(
        self, state: Any, norm: tf.Tensor | None, loss: tf.Tensor | None, norms: tf.Tensor | None = None
    ) -> Verdict:
        """Whether a step with finite gradients is a spike, before `update` has seen it.

        Args:
            state: The guard's.
            norm: Float32, the global norm of the unscaled gradients, once those beyond their own limits are clipped;
                None if it is not watched.
            loss: Float32; None if it is not watched.
            norms: Float32 [variables], the norm of each unscaled gradient; None if they are not watched.
        """
        windows, given = self._own(state)[0], {"norm": norm, "loss": loss}
        by_tensor = self.by_tensor == "skip" and norms is not None
        found = [_of_tensors(windows["norms"], flushed(norms))] if by_tensor else []
        for name in self.watched:
            value, (_, usual, limit) = flushed(given[name]), windows[name]
            of_norm = (tf.ones_like if name == "norm" else tf.zeros_like)(value, tf.bool)
            usual = tf.where(limit < self._fixed(name), usual, math.nan) if self._fixed(name) < math.inf else usual
            most = limit * _BY_ROUNDING if name == "norm" and self.by_tensor == "clip" else limit
            none = tf.zeros_like(value, tf.int64) if by_tensor else None
            found.append(Verdict(value > most, of_norm, value, usual, limit, none if none is None else none - 1, none))
        first, *rest = found or [_never(state)]
        for second in rest:
            spike, pairs = first.spike, zip(first, second, strict=True)
            chosen = Verdict(*(None if a is None else choose(spike, a, b) for a, b in pairs))
            first = chosen._replace(spike=tf.logical_or(spike, second.spike))
        return first

    def factors(self, state: Any, norms: tf.Tensor) -> tf.Tensor:
        """What `by_tensor="clip"` multiplies each gradient by, [variables]: for a step in the long form.

        Args:
            state: The guard's, such as `loss_scaler.state`, before `update`.
            norms: Float32 or float64 [variables], the norm of each unscaled gradient.

        Returns:
            Of the dtype of the norms.
        """
        limits = self._own(state)[0]["norms"].limit
        if not limits.shape[0]:  # A scaler that has seen no step knows of no variable.
            return tf.ones_like(norms)
        norms = tf.convert_to_tensor(norms)
        narrow = flushed(norms)
        # Float32 may hold neither the norm of a float64 gradient nor its factor.
        norms = norms if norms.dtype == tf.float64 else narrow
        return tf.where(narrow > limits, tf.cast(limits, norms.dtype) / norms, tf.ones_like(norms))

    def is_spike(self, state: Any, event: Event) -> tf.Tensor:
        """Whether a step is to be skipped as a spike, scalar bool: for a step written in the long form.

        Args:
            state: The guard's, such as `loss_scaler.state`, before `update`.
            event: The result of the step, with `norm`, `loss` and `norms` if they are watched.
        """
        return tf.logical_and(event.finite, self._verdict_of(state, event).spike)

    @no_autograph
    def update(self, state: Any, event: Event) -> Any:
        """The state after a step that was attempted with `state` and showed `event`."""
        (windows, counts), before = self._own(state), inner_of(state)
        verdict = self._verdict_of(state, event)
        spike = tf.logical_and(event.finite, verdict.spike)
        applied = tf.logical_and(event.finite, tf.logical_not(spike))
        after = bounded_state(self.strategy, with_user_autograph(self.strategy.update)(before, event))
        inner = type(before)(*(choose(spike, old, new) for old, new in zip(before, after, strict=True)))
        own: dict[str, tf.Tensor] = {}
        given = {name: flushed(statistic(self, event, name)) for name in self.watched}
        given["norms"] = self._norms_of(state, event)
        for name, window in windows.items():
            if given[name] is not None:
                window = window.after(given[name], applied, self.factor)
            own |= self._fields(name, window)
        own["spikes"] = choose(spike, count_up(counts["spikes"]), counts["spikes"])
        in_a_row = choose(spike, count_up(counts["spikes_in_a_row"]), counts["spikes_in_a_row"])
        own["spikes_in_a_row"] = choose(applied, tf.zeros_like(in_a_row), in_a_row)
        seen = tf.stack([verdict.value, verdict.usual, verdict.limit])
        own["last_spike"] = choose(spike, seen, counts["last_spike"])
        return join("SpikeGuardState", inner, **own)

    def _verdict_of(self, state: Any, event: Event) -> Verdict:
        """The verdict on the step that an event shows."""
        given = {name: statistic(self, event, name) for name in self.watched}
        return self.verdict(state, given.get("norm"), given.get("loss"), self._norms_of(state, event))

    def _norms_of(self, state: Any, event: Event) -> tf.Tensor | None:
        """The norm of each gradient; None if none is watched, and while the state is that of no variable."""
        if not self.by_tensor or not state.tensor_limits.shape[0]:
            return None
        return flushed(statistic(self, event, "norms"))

    def _fixed(self, name: str) -> float:
        """The limit that does not depend on earlier steps."""
        return float(self.largest_norm) if name == "norm" and self.largest_norm is not None else math.inf

    @property
    def _windows(self) -> tuple[str, ...]:
        """What has a window, by the names of an `Event`."""
        return (*self.watched, "norms") if self.by_tensor else self.watched

    def _fields(self, name: str, window: Window) -> dict[str, tf.Tensor]:
        """A window as fields of a state, with a limit that is no higher than the fixed one."""
        fixed, limit = self._fixed(name), window.limit
        if name == "norm" and not self.norm:
            limit = tf.fill(tf.shape(limit), math.inf)
        limit = limit if fixed == math.inf else tf.minimum(limit, fixed)
        return dict(zip(_FIELDS[name], window._replace(limit=limit), strict=True))

    def _own(self, state: Any) -> tuple[dict[str, Window], dict[str, tf.Tensor]]:
        """The windows and the counts of a state."""
        fields = iter(own_of(state))
        windows = {name: Window(*itertools.islice(fields, 3)) for name in self._windows}
        return windows, dict(zip(_COUNTS, fields, strict=True))


def guard_of(strategy: object) -> SpikeGuard | None:
    """The strategy if it is a guard, else None."""
    return strategy if isinstance(strategy, SpikeGuard) else None


def unguarded(strategy: Any) -> Any:
    """The strategy that chooses the scale: the one inside a guard, or the strategy itself."""
    return strategy.strategy if isinstance(strategy, SpikeGuard) else strategy


_BY_ROUNDING = 1.0 + 2.0**-10
"""What clipped gradients may be of a limit that they meet exactly: far more than their rounding, and no spike."""
_FIELDS = {
    "norm": ("norms", "norm_usual", "norm_limit"),
    "loss": ("losses", "loss_usual", "loss_limit"),
    "norms": TENSOR_FIELDS,
}
_COUNTS = ("spikes", "spikes_in_a_row", "last_spike")


def _of_tensors(known: Window, norms: tf.Tensor) -> Verdict:
    """What the gradients' own norms say: the one that is the most times its limit is why."""
    beyond = norms > known.limit
    excess = tf.where(beyond, exact.wide(norms) / exact.wide(known.limit), tf.zeros([], tf.float64))
    place = tf.argmax(excess, axis=0)
    here = tf.one_hot(place, norms.shape[0], True, False, axis=0)
    value, usual, limit = (
        tf.reduce_sum(tf.where(here, each, 0.0), axis=0) for each in (norms, known.usual, known.limit)
    )
    spike, count = tf.reduce_any(beyond, axis=0), tf.math.count_nonzero(beyond, axis=0)
    return Verdict(spike, tf.ones_like(spike), value, usual, limit, place, count)


def _never(state: Any) -> Verdict:
    """That of a guard that only clips."""
    no, zero = tf.zeros_like(state.loss_scale, tf.bool), tf.zeros_like(state.loss_scale)
    return Verdict(no, no, zero, zero, zero)
