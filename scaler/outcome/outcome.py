"""What one attempted step did, as tensors; and the last skip, in one variable, for `explain` and checkpoints."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend.graphs import graphs_around, outermost_function
from scaler.backend.packed import Entry, Packed
from scaler.backend.replicas import replica_count
from scaler.backend.variables import choose, mark_private, shared_variable


class Cause(enum.IntEnum):
    """Why a step was skipped.

    Attributes:
        NONE: The step was applied.
        LOSS: The loss itself was non-finite. No scale makes it finite: look at the data and the forward pass.
        BACKWARD: The loss was finite, and no scale that was tried gives derivatives to use: a square root at 0, for
            example. They were found non-finite at 1 and at 2^-14, or at the strategy's floor if that is less. Or the
            gradients that are non-finite at 1 are all zero there, because float16 flushes what comes before them.
        OVERFLOW: The scaled backward pass overflowed. A lower scale helps if `Outcome.lower_helps` is True, else it may
            help. Without `diagnose`, `apply` cannot tell it from BACKWARD and presumes OVERFLOW.
        TOO_LARGE: Every scaled gradient was finite, but an unscaled one or the squared global norm exceeds float32.
        UPDATE: The optimizer turned finite gradients into a non-finite value, in a weight or in one of its slots. Or
            its learning rate is NaN, or so large that it would. Or the limit of the clipping is invalid.
        SPIKE: All was finite, but the global norm, the loss or the norm of one gradient was far beyond that of the last
            steps: see `SpikeGuard`.
    """

    NONE = 0
    LOSS = 1
    BACKWARD = 2
    OVERFLOW = 3
    TOO_LARGE = 4
    UPDATE = 5
    SPIKE = 6


class Skip(NamedTuple):
    """Why a step was skipped, as scalar tensors. A GPU computes with int64, and with int32 in its host's memory.

    Attributes:
        cause: Int64, a `Cause`.
        has_nan: Bool, whether an unscaled gradient had a NaN. False if there were only infinities.
        index: Int64, the position of the first non-finite gradient in the list, or else of the largest gradient. For
            UPDATE it is the position of the first non-finite variable, among those with a gradient and then the
            optimizer's own. There -1 stands for the learning rate, and -2 for the limit of the clipping; -3 and -4 for
            those of the second optimizer of `apply_together`, and so on. For SPIKE -1 stands for the loss, and
            otherwise it is the gradient that is farthest beyond its own limit, or else the largest one.
        count: Int64, the number of non-finite gradients. If all were finite, the number of gradients whose squared norm
            exceeds float32. For SPIKE the number of gradients beyond limits of their own, 0 if the global norm or the
            loss is why.
        nearest: Int64, the position of the last of these; -1 if there are none. It is the nearest to the loss if the
            list is in the order of the forward pass.
        lower_helps: Bool, whether the gradients were found finite at a lower loss scale.
    """

    cause: Any = Cause.NONE
    has_nan: Any = False
    index: Any = -1
    count: Any = 0
    nearest: Any = -1
    lower_helps: Any = False

    def packed(self) -> tf.Tensor:
        """All fields, tensors or numbers, as one tensor, float32 [6], which holds each exactly: a `reason`."""
        return side_by_side(self)

    @classmethod
    def of(cls, reason: tf.Tensor) -> Skip:
        """The fields of what `packed` returned."""
        fields = dict(zip(cls._fields, tf.unstack(reason, num=len(cls._fields)), strict=True))
        flags = ("has_nan", "lower_helps")
        return cls(*(tf.cast(one, tf.bool if name in flags else tf.int64) for name, one in fields.items()))


def side_by_side(numbers: Iterable) -> tf.Tensor:
    """Scalar tensors of any dtype and numbers as one tensor, float32 [n]."""
    numbers = list(numbers)
    if not any(map(tf.is_tensor, numbers)):
        return tf.constant([float(one) for one in numbers])
    return tf.stack([tf.cast(one, tf.float32) if tf.is_tensor(one) else float(one) for one in numbers])


def not_skipped() -> tf.Tensor:
    """The reason of a step that was applied or not attempted, float32 [6]: see `Skip.packed`."""
    return Skip().packed()


def int64(number: int) -> tf.Tensor:
    """A constant among the integers of a skip, scalar int64."""
    return tf.constant(int(number), tf.int64)


class Outcome(NamedTuple):
    """What one attempted step did, as scalar tensors. The host has read none of them.

    Attributes:
        finite: Bool, True if the step was applied, False if it was skipped.
        loss_scale: Float32, the loss scale of this step.
        grad_norm: Float32, the global norm of the unscaled gradients before clipping. Non-finite on a step that was
            skipped because of its gradients.
        cause: Int64, a `Cause`.
        has_nan: Bool, whether a gradient had a NaN. False if there were only infinities.
        index: Int64, the position of the first non-finite gradient in the list; -1 if the step was applied. `Skip` says
            what it is for TOO_LARGE and UPDATE.
        clipped_norm: Float32, the global norm of the unscaled gradients after clipping, as the optimizer saw them. NaN
            on a skipped step.
        count: Int64, the number of non-finite gradients; 0 if the step was applied or the number is unknown.
        nearest: Int64, the position of the last non-finite gradient; -1 if the step was applied or it is unknown.
        lower_helps: Bool, whether the gradients were found finite at a lower loss scale.
        replica: Int64, the first replica whose own loss or gradients were not finite. -1 if there is one replica alone,
            if the step was applied, and if all replicas were alike: then it is no replica's share of the batch.
        name_offset: Int64, where the names of this step's variables begin among the names that the scaler knows, for
            `LossScaler.explain`. -1 if the scaler does not know them, in `LossScaler.last_skip` after a checkpoint was
            restored.
        retries: Int64, how often the gradients were taken again at a lower scale, see `again` of `LossScaler.apply`.
        value: Float32, of a SPIKE the norm or the loss that was too large: the global norm, or that of the gradient of
            `index` if `count` is not 0. 0 for any other cause.
        usual: Float32, the median of the last steps, likewise; NaN if a fixed `largest_norm` was the limit.
        limit: Float32, the most that was allowed, likewise.
        clipped_tensors: Int64, how many gradients of an applied step `SpikeGuard(by_tensor="clip")` has clipped to
            limits of their own.
    """

    finite: tf.Tensor
    loss_scale: tf.Tensor
    grad_norm: tf.Tensor
    cause: tf.Tensor
    has_nan: tf.Tensor
    index: tf.Tensor
    clipped_norm: tf.Tensor
    count: tf.Tensor = 0
    nearest: tf.Tensor = -1
    lower_helps: tf.Tensor = False
    replica: tf.Tensor = -1
    name_offset: tf.Tensor = 0
    retries: tf.Tensor = 0
    value: tf.Tensor = 0.0
    usual: tf.Tensor = 0.0
    limit: tf.Tensor = 0.0
    clipped_tensors: tf.Tensor = 0

    @property
    def variable(self) -> tf.Tensor:
        """The position of the variable to look at first, scalar int64; -1 if the step was applied or not attempted.

        It is the last one with a non-finite gradient. The backward pass met that one first if the list is in the order
        of the forward pass. Else it is the variable of `index`. `LossScaler.explain` also looks at the weights.
        """
        return choose(tf.greater_equal(self.nearest, 0), self.nearest, self.index)


def presumed_cause(loss_finite: tf.Tensor, overflowed: tf.Tensor) -> tf.Tensor:
    """The `Cause` of a skipped step, scalar float32. Without a diagnosis it is OVERFLOW where it may be BACKWARD.

    Args:
        loss_finite: Scalar bool.
        overflowed: Scalar bool, whether a gradient was not finite before unscaling.
    """
    scaled = choose(overflowed, float(Cause.OVERFLOW), float(Cause.TOO_LARGE))
    return choose(loss_finite, scaled, float(Cause.LOSS))


MOST_NAMES = 2**20
"""How many names of variables a place may stand for: float32 holds each such number exactly."""
FIRST_PLACE = 2**16
"""Where the first list of names may begin."""
_NEVER = {
    name: -1.0 if name in ("index", "nearest", "replica") else 0.0
    for name in (*Skip._fields, "loss_scale", "replica", "name_offset", "waits")
}
"""`waits` is 1 for a skip by `apply(update=False)` until its step is counted: `update` tells it from an older one."""


class LastSkip:
    """Stores the last skip of a scaler.

    A scaler may apply gradients to several lists of variables, and another process may trace them in another order.
    Each list has a place that follows from its names, by which a skip knows its list: `Outcome.name_offset`.

    Attributes:
        variable: It holds all numbers.
    """

    def __init__(self) -> None:
        first = {name: tf.constant(value) for name, value in _NEVER.items()}
        self._kept = Packed(first, "last_skip", shared_variable)
        self.variable = self._kept.variable

    def entries(self) -> dict[str, Entry]:
        """What a checkpoint holds of it."""
        mark_private(self.variable)
        return self._kept.entries()

    def keep(
        self,
        loss_scale: tf.Tensor,
        reason: tf.Tensor,
        replica: tf.Tensor | None,
        name_offset: int | tf.Tensor = 0,
        where: tf.Tensor | None = None,
        counted: bool = True,
    ) -> tf.Tensor:
        """Stores a reason, float32 [6], where `where`, scalar bool, is true, or always in the branch of a skip.

        It returns the reason. `counted` is False if a later call of `count` belongs to the same step.
        """
        others = side_by_side([-1 if replica is None else replica, name_offset, not counted])
        new = tf.concat([reason, [loss_scale], others], 0)
        self.variable.assign(new if where is None else choose(where, new, self.variable))
        return reason

    def keep_where(self, skipped: tf.Tensor, outcome: Outcome) -> None:
        """Stores the skip of an outcome where `skipped` is True."""
        skip = Skip(*(getattr(outcome, field) for field in Skip._fields))
        replica = outcome.replica if replica_count() > 1 else None
        self.keep(outcome.loss_scale, skip.packed(), replica, outcome.name_offset, skipped)

    def kept_now(self, skipped: tf.Tensor | None) -> tf.Tensor:
        """Whether a skip was kept of the step that is counted next, scalar bool.

        Args:
            skipped: Scalar bool, whether a reason was kept in this step; None if only the variable tells, which may
                hold that of an earlier step that was never counted.
        """
        kept_now = self._kept.read()["waits"] > 0.0
        return kept_now if skipped is None else tf.logical_and(kept_now, skipped)

    def is_of_loss(self, kept_now: tf.Tensor) -> tf.Tensor:
        """Whether the kept skip is of the step that is counted next, and because of its loss: scalar bool."""
        return tf.logical_and(kept_now, tf.equal(self._kept.read()["cause"], float(Cause.LOSS)))

    def count(self, finite: tf.Tensor, kept_now: tf.Tensor) -> None:
        """Records that a step was counted without `keep`: one that was skipped for no reason that was kept has none.

        Args:
            finite: Scalar bool, whether it was applied.
            kept_now: From the method.
        """
        never = self._kept.joined({name: tf.constant(value) for name, value in _NEVER.items()})
        now = self._kept.joined({**self._kept.read(), "waits": tf.constant(0.0)})
        self.variable.assign(choose(tf.logical_or(finite, kept_now), now, never))

    def correct(self, backward: tf.Tensor, lower_helps: tf.Tensor) -> None:
        """Corrects a stored cause of OVERFLOW after the diagnosis. Both arguments are scalar bools."""
        kept = self._kept.read()
        cause = choose(backward, float(Cause.BACKWARD), kept["cause"])
        helps = choose(lower_helps, 1.0, kept["lower_helps"])
        self.variable.assign(self._kept.joined({**kept, "cause": cause, "lower_helps": helps}))

    def outcome(self, lists: Mapping[int, int] = MappingProxyType({})) -> Outcome:
        """The outcome of the stored skip, without norms.

        Args:
            lists: How many names each list has that the scaler knows, by the place where it begins.
        """
        kept, nan = self._kept.read(), tf.constant(float("nan"))
        numbers = {name: tf.cast(kept[name], tf.int64) for name in ("cause", "index", "count", "nearest")}
        place = tf.cast(kept["name_offset"], tf.int64)
        known = tf.reduce_any(tf.equal(tf.constant([0, *lists], tf.int64), place))
        # Positions of a list that is unknown here stay beyond any list.
        for name in ("index", "nearest"):
            at = numbers[name]
            numbers[name] = choose(tf.logical_or(known, at < 0), at, at + place)
        skip = Skip(has_nan=kept["has_nan"] > 0.0, lower_helps=kept["lower_helps"] > 0.0, **numbers)
        return Outcome(
            finite=tf.equal(skip.cause, int(Cause.NONE)),
            loss_scale=kept["loss_scale"],
            grad_norm=nan,
            clipped_norm=nan,
            **skip._asdict(),
            replica=tf.cast(kept["replica"], tf.int64),
            name_offset=choose(known, place, int64(-1)),
        )


_FOUND = "halfstep_found"


def note_skip_in_trace(judge: object, cause: tf.Tensor) -> None:
    """Records the cause that an `apply(update=False)` found, scalar int64.

    Args:
        judge: Whoever counts the step with `skip_in_trace`.
        cause: Of its outcome.
    """
    found = _of_this_trace(judge)
    if found is not None:
        found.append(cause)


def skip_in_trace(judge: object) -> tf.Tensor | None:
    """Whether one of the judgements since the last call in this trace found a reason to skip, scalar bool.

    Returns:
        None if this trace cannot tell: in eager mode, on several replicas, if it holds no judgement, or if one lies in
        a branch, a loop or a function that has ended.
    """
    found = _of_this_trace(judge)
    if not found:
        return None
    causes = list(found)
    found.clear()
    around = list(graphs_around())
    if not all(any(cause.graph is graph for graph in around) for cause in causes):
        return None
    return tf.reduce_any([tf.not_equal(cause, int(Cause.NONE)) for cause in causes])


def _of_this_trace(judge: object) -> list[tf.Tensor] | None:
    graph: Any = outermost_function()
    if graph is None or replica_count() > 1:
        return None
    # Kept by the graph itself: a table of graphs would keep each alive, since a tensor holds its graph.
    if not hasattr(graph, _FOUND):
        setattr(graph, _FOUND, weakref.WeakKeyDictionary())
    return getattr(graph, _FOUND).setdefault(judge, [])
