"""What a strategy is: a pure state machine over scalar tensors."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from scaler.backend.autograph import with_user_autograph
from scaler.backend.variables import choose
from scaler.checks import LARGEST_SCALE, SMALLEST_SCALE, as_float, check_number, is_symbolic, within
from scaler.errors import InvalidArgument


class Event(NamedTuple):
    """What one attempted step showed. A strategy sees nothing else of it.

    Attributes:
        finite: Scalar bool. True when every unscaled gradient and the squared global norm of all of them are finite
            in float32, which is when the step is applied, unless a `SpikeGuard` refuses it.
        amax: Scalar float32, the largest magnitude among the *unscaled* float32 gradients, summed over replicas and
            before clipping: infinity if any value is not finite (also for a NaN), 0 if all are zero. Since it
            is unscaled, it does not depend on the loss scale of the step. None unless the strategy needs it.
        histogram: Int64 [edges + 1], how many values of the *scaled* gradients, as the backward pass left them in its
            compute dtype, lie at or below the first edge in magnitude, between the edges, and above the last; summed
            over replicas. Values that are not finite lie above the last. None unless the strategy needs it.
        norm: Scalar float32, the global norm of the *unscaled* gradients, summed over replicas and before clipping.
            None unless the strategy needs it.
        loss: Scalar float32, the loss that `LossScaler.scale` was given, summed over the micro-batches and replicas of
            the step. NaN if it was not given one. None unless the strategy needs it.
        norms: Float32 [variables], the norm of each *unscaled* gradient, summed over replicas and before clipping, in
            the order of the variables: NaN for one that the step does not have. None unless a
            `SpikeGuard(by_tensor=...)` asks for them. With "clip" `norm` is then that of the gradients it has clipped.
    """

    finite: tf.Tensor
    amax: tf.Tensor | None = None
    histogram: tf.Tensor | None = None
    norm: tf.Tensor | None = None
    loss: tf.Tensor | None = None
    norms: tf.Tensor | None = None


class Needs(NamedTuple):
    """The statistics a strategy wants in its events beside `finite`. Nothing else is computed.

    Attributes:
        amax: Whether `Event.amax` is needed.
        edges: Ascending positive magnitudes, the edges of `Event.histogram`; empty for no histogram.
        norm: Whether `Event.norm` is needed.
        loss: Whether `Event.loss` is needed.
    """

    amax: bool = False
    edges: tuple[float, ...] = ()
    norm: bool = False
    loss: bool = False

    @property
    def of_each_replica(self) -> bool:
        """Whether a replica cannot tell these statistics by itself."""
        return self.amax or bool(self.edges)


@runtime_checkable
class Strategy(Protocol):
    """Chooses the loss scale. Any frozen dataclass with these two methods is one.

    A state is a NamedTuple of scalar tensors with at least `loss_scale` (float32, in [2^-126, 2^126]). Both methods
    are pure: they create no variables and read nothing but their arguments, so that they give the same values in
    eager mode, in a `tf.function`, in a `tf.range` loop and under XLA, also elementwise on states of any one shape.
    A state may also hold vectors, such as a history; their own axis then comes before that shape.

    It may have numbers `min_scale` and `max_scale`: a scale outside of them, or outside of [2^-126, 2^126] without
    them, is never used, wherever it comes from. It may have `needs`, a `Needs`: the statistics it wants to see; without
    it `event.finite` is all that is promised.

    It is not shown a step that was skipped because its loss was not finite (`Cause.LOSS`): bad data says nothing about
    the scale, and the state stays as it is. With `sees_every_step = True` it is shown these too, as the scalers of most
    other systems are. A strategy around another one, which it holds as its `strategy`, does as that one says.

    It may have `int64_counts = True`: then `update` takes and returns integer fields as int64 where they are kept so,
    which a GPU computes with; without it they are int32 as `init` made them, and go through the host.
    """

    def init(self) -> Any:
        """The state before the first step."""
        ...

    def update(self, state: Any, event: Event) -> Any:
        """The state after a step that was attempted with `state` and showed `event`."""
        ...


def needs_of(strategy: object) -> Needs:
    """The statistics a strategy declares.

    Raises:
        InvalidArgument: If it is not a `Needs`, or its edges are not positive and ascending.
    """
    needs = getattr(strategy, "needs", Needs())
    if not isinstance(needs, Needs):
        raise InvalidArgument(
            f"{type(strategy).__name__}.needs={needs!r}: expected hs.strategies.Needs(...), such as Needs(amax=True)."
        )
    check_edges(needs.edges)
    return needs


def takes_int64(strategy: object) -> bool:
    """Whether `update` also takes a state with int64 in place of `init`'s int32, and then returns int64."""
    return bool(getattr(strategy, "int64_counts", False))


def sees_every_step(strategy: object) -> bool:
    """Whether a strategy is also shown steps that were skipped because of their loss: see `Strategy`."""
    inner = getattr(strategy, "strategy", None)
    return bool(getattr(strategy, "sees_every_step", inner is not None and sees_every_step(inner)))


def after_step(strategy: Any, state: Any, event: Any, of_loss: tf.Tensor) -> Any:
    """The state after a step: as it was where bad data was skipped, unless the strategy sees every step.

    `LossScaler` and whoever steps a strategy without one ask here, so that they cannot part.

    Args:
        strategy: The strategy.
        state: With which the step was attempted.
        event: What it showed.
        of_loss: Scalar bool, whether it was skipped because its loss was not finite.
    """
    after = with_user_autograph(strategy.update)(state, event)
    if sees_every_step(strategy):
        return after
    pairs = zip(state, after, strict=True)
    return type(after)(*(new if new is old else choose(of_loss, old, tf.cast(new, old.dtype)) for old, new in pairs))


def int32_fields(fields: Mapping[str, tf.Tensor]) -> frozenset[str]:
    """Which fields of a state `init` made as int32. They are kept as int64: see `replicas.on_any_device`."""
    return frozenset(field for field, value in fields.items() if value.dtype == tf.int32)


def as_taken(strategy: object, fields: dict[str, tf.Tensor], int32: frozenset[str]) -> dict[str, tf.Tensor]:
    """Fields that were read from variables, with the integers that `update` takes."""
    return fields if takes_int64(strategy) else fields | {field: tf.cast(fields[field], tf.int32) for field in int32}


def check_edges(edges: Sequence[float]) -> None:
    """Refuses edges of a histogram that are not positive, finite and ascending."""
    for edge in edges:
        check_number("edges", edge, "positive finite numbers in ascending order", lambda v: 0 < v < math.inf)
    if any(second <= first for first, second in itertools.pairwise(edges)):
        raise InvalidArgument(f"edges={tuple(edges)!r}: expected positive finite numbers in ascending order.")


def together(*needs: Needs) -> Needs:
    """The needs of several strategies in one.

    Raises:
        InvalidArgument: If two of them want histograms with different edges.
    """
    edges = {each.edges for each in needs if each.edges}
    if len(edges) > 1:
        raise InvalidArgument(f"strategies with the histogram edges {sorted(edges)}: one event has one histogram only.")
    return Needs(
        amax=any(each.amax for each in needs),
        edges=edges.pop() if edges else (),
        norm=any(each.norm for each in needs),
        loss=any(each.loss for each in needs),
    )


def statistic(strategy: object, event: Event, name: str) -> tf.Tensor:
    """The statistic `name` of an event.

    Raises:
        InvalidArgument: If the event has none.
    """
    value = getattr(event, name)
    if value is None:
        raise InvalidArgument(
            f"{type(strategy).__name__}.update: the event has no {name}. Compute it from the step's gradients: "
            "Event(finite, amax=hs.gradients.amax(unscaled)), "
            "Event(finite, histogram=hs.gradients.histogram(grads, edges)), or "
            "Event(finite, norm=tf.linalg.global_norm(unscaled), loss=loss). By tensor add "
            "norms=tf.stack([tf.norm(grad) for grad in unscaled])."
        )
    return tf.convert_to_tensor(value)


def amax_of(strategy: object, event: Event) -> tuple[tf.Tensor, tf.Tensor]:
    """Whether the step was finite, and amax. A step whose amax is infinite or NaN counts as non-finite.

    Raises:
        InvalidArgument: If the event has no amax.
    """
    amax = tf.cast(statistic(strategy, event, "amax"), tf.float32)
    return tf.logical_and(event.finite, amax < math.inf), amax


def bounds_of(strategy: object) -> tuple[Any, Any]:
    """The least and the greatest scale a strategy may choose, numbers or scalar tensors."""
    return getattr(strategy, "min_scale", SMALLEST_SCALE), getattr(strategy, "max_scale", LARGEST_SCALE)


def float_bounds_of(strategy: object) -> tuple[tf.Tensor, tf.Tensor]:
    """The least and the greatest scale a strategy may choose, scalar float32."""
    low, high = bounds_of(strategy)
    return as_float(low), as_float(high)


def host_bounds_of(strategy: object) -> tuple[float, float]:
    """The least and the greatest scale a strategy may choose, on the host, without a tensor where they are numbers."""
    low, high = bounds_of(strategy)
    return _float32(low), _float32(high)


def _float32(bound: Any) -> float:
    """A bound on the host, rounded to float32."""
    return float(np.float32(bound)) if isinstance(bound, (int, float)) else float(as_float(bound))


def bounded(strategy: object, loss_scale: tf.Tensor) -> tf.Tensor:
    """The loss scale within the strategy's bounds."""
    return within(loss_scale, *float_bounds_of(strategy))


def first_scale(strategy: Any) -> tf.Tensor:
    """The `initial_scale` of a strategy, within its bounds, scalar float32."""
    scale = as_float(strategy.initial_scale)
    # Of numbers `check_bounds` knows that already.
    return bounded(strategy, scale) if any(map(is_symbolic, (strategy.initial_scale, *bounds_of(strategy)))) else scale


def usable_scale(strategy: Strategy, stored: tf.Tensor, initial: float | None = None) -> tf.Tensor:
    """A stored loss scale that a step may use: within the strategy's bounds, its initial scale in place of a NaN.

    Only a damaged or foreign checkpoint brings another one.

    Args:
        strategy: The strategy.
        stored: Scalar float32.
        initial: The initial scale, where it is known: a graph then holds no other field of a first state.
    """
    first = strategy.init().loss_scale if initial is None else initial
    return bounded(strategy, choose(tf.math.is_nan(stored), first, stored))


def only_scale(strategy: object) -> float | None:
    """The one scale that a strategy may choose, or None if it may choose among several."""
    low, high = bounds_of(strategy)
    numbers = isinstance(low, (int, float)) and isinstance(high, (int, float))
    return _float32(low) if numbers and low == high else None


def usable_scale_on_host(strategy: Strategy, stored: float) -> float:
    """As `usable_scale`, for a number. Nearly every stored scale may be used, which takes no tensor to see."""
    low, high = host_bounds_of(strategy)
    return stored if low <= stored <= high else float(usable_scale(strategy, tf.constant(stored)))


def usable_state(strategy: Strategy, state: Any) -> Any:
    """The state that a step is attempted with and `update` is given: a stored one with a loss scale that may be used.

    `LossScaler` and whoever steps a strategy without one ask here, so that they cannot part.
    """
    return state._replace(loss_scale=usable_scale(strategy, state.loss_scale))


def bounded_state(strategy: object, state: Any) -> Any:
    """The state with its loss scale within the strategy's bounds."""
    return state._replace(loss_scale=bounded(strategy, state.loss_scale))


def require_strategy(strategy: object, by: str = "LossScaler") -> None:
    """Refuses an object that is not a strategy; the message begins with `by`."""
    if isinstance(strategy, type) or not isinstance(strategy, Strategy):
        raise InvalidArgument(
            f"{by}({strategy!r}): expected a strategy such as hs.Dynamic(), hs.Static(1024.0) or "
            "hs.NoScaling(), an object with init() and update(state, event)."
        )


def require_inner(strategy: object, by: str) -> None:
    """Refuses what cannot be held by another strategy, or by `by`: no strategy at all, or a guard of steps."""
    require_strategy(strategy, by)
    if hasattr(strategy, "is_spike"):
        raise InvalidArgument(
            f"{by}({type(strategy).__name__}(...)): it decides about whole steps: expected it around all other "
            "strategies, in an hs.LossScaler or an hs.LossScaleOptimizer."
        )


def check_state(strategy: Strategy, state: Any) -> None:
    """Refuses a strategy whose state has no scalar float32 loss scale."""
    loss_scale = getattr(state, "loss_scale", None)
    known = None if loss_scale is None else tf.convert_to_tensor(loss_scale)
    if not hasattr(state, "_asdict") or known is None or known.shape.rank != 0 or known.dtype != tf.float32:
        raise InvalidArgument(
            f"{type(strategy).__name__}.init() returned {state!r}: expected a NamedTuple of scalar tensors with a "
            "field named loss_scale, of dtype float32."
        )


def check_event(strategy: object, event: Event) -> None:
    """Checks that this is an `Event`, and that its fields have the shapes and dtypes that `Event` names.

    Raises:
        InvalidArgument: With what was found.
    """
    if not isinstance(event, Event):
        raise InvalidArgument(f"update({event!r}): expected hs.Event(finite=...), around a scalar bool tensor.")

    def check(name: str, fits: Callable[[tf.Tensor], bool], expected: str) -> None:
        value = tf.convert_to_tensor(getattr(event, name))
        if not fits(value):
            call = name if name == "finite" else f"finite, {name}=..."
            field = "the histogram" if name == "histogram" else name
            raise InvalidArgument(
                f"update(Event({call})): {field} is {value.dtype.name} of shape {value.shape}: expected {expected}."
            )

    def is_number(value: tf.Tensor) -> bool:
        return value.dtype.is_floating and value.shape.rank in (0, None)

    check(
        "finite",
        lambda value: value.dtype == tf.bool and value.shape.rank in (0, None),
        "a scalar bool tensor, such as hs.all_finite(unscaled)",
    )
    numbers = {"amax": ", such as hs.gradients.amax(unscaled)", "norm": "", "loss": ""}
    for name, example in numbers.items():
        if getattr(event, name) is not None:
            check(name, is_number, f"a scalar float32 tensor{example}")
    if getattr(strategy, "by_tensor", None):
        statistic(strategy, event, "norms")
        check(
            "norms",
            lambda value: value.dtype.is_floating and value.shape.is_fully_defined() and value.shape.rank == 1,
            "float32 [variables], such as tf.stack([tf.norm(grad) for grad in unscaled])",
        )
    if event.histogram is not None:
        edges = needs_of(strategy).edges
        bins = len(edges) + 1 if edges else None
        check(
            "histogram",
            lambda value: value.dtype.is_integer and value.shape.is_compatible_with([bins]),
            f"int64 [{bins or 'edges + 1'}], such as hs.gradients.histogram(scaled, {edges or 'edges'})",
        )


def in_words(strategy: object) -> str:
    """A strategy as one would write it: its class, with the values that are not defaults."""
    if dataclasses.is_dataclass(strategy):
        fields = [field for field in dataclasses.fields(strategy) if field.init]
        values = [(field, getattr(strategy, field.name)) for field in fields]
        said = [
            f"{field.name}={_value(value)}" for field, value in values if is_symbolic(value) or value != field.default
        ]
        return f"{type(strategy).__name__}({', '.join(said)})"
    # Without a `repr` of its own, an object would be told by its address.
    own = type(strategy).__repr__ is not object.__repr__
    return repr(strategy) if own else f"{type(strategy).__name__}()"


def _value(value: object) -> str:
    """A value of a field in words."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))})"
    if is_symbolic(value):
        return str(value.numpy()) if hasattr(value, "numpy") else "a tensor"
    return in_words(value) if dataclasses.is_dataclass(value) else repr(value)
