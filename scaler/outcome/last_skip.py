"""The last skip of a scaler, as numbers in one variable: what `explain` tells of it, and a checkpoint keeps.

A scaler may apply gradients to several lists of variables, and another process may trace them in another order. Each
list has a place that follows from its names, by which a skip knows its list: `Outcome.name_offset`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from scaler.backend.graphs import graphs_around, outermost_function
from scaler.backend.packed import Entry, Packed
from scaler.backend.replicas import replica_count
from scaler.backend.variables import choose, mark_private, shared_variable
from scaler.outcome.outcome import Cause, Outcome, Skip, int64, side_by_side

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
        others = loss_scale, -1 if replica is None else replica, name_offset, not counted
        new = tf.concat([reason, side_by_side(others)], 0)
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
        # The positions of a list that nobody knows here are left beyond any list.
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
