"""The last skip, packed into the variables that every checkpoint has held since the first version.

`cause` and `index` were once plain numbers of a `Skip`. Later additions use their higher bits, which are 0 in an older
checkpoint. With more variables an older run folder or Keras file would be refused.

    cause = cause + 2^4 lower_helps + 2^5 is_weight + 2^6 (1 + position) + 2^27 (1 + replica)
    index = index + 2^20 count, or -1 if nothing was skipped yet

The position belongs to the non-finite weight if there is one, else to the nearest gradient. Models have at most 2^20
variables. A replica beyond the 14th is kept as the 15th.

The scale is kept with a minus sign by an `apply(update=False)` until the step is counted: so `update` knows a skip of
its own step from that of an older one.

A scaler may apply gradients to several lists of variables, and another process may trace them in another order. Each
list has a place that follows from its names, and positions are kept from that place on, so that they tell which list it
was. An index of -1 or -2 is no position: twice the place is taken off it. Positions below `FIRST_PLACE` are in no list.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import tensorflow as tf

from scaler.backend.integers import saved_as_int32
from scaler.backend.replicas import replica_count
from scaler.backend.variables import shared_variable
from scaler.outcome.outcome import Cause, Outcome, Skip

MOST_COUNTED = 2**11 - 1
"""The largest count that is kept. It stands for this many non-finite gradients or more."""
LAST_REPLICA = 14
"""The largest number of a replica that is kept. It stands for this one or a later one."""
MOST_NAMES = 2**20
"""How many names of variables a position may stand for."""
FIRST_PLACE = 2**16
"""Where the first list of names may begin."""
_HELPS, _IS_WEIGHT, _POSITION, _REPLICA, _COUNT = 2**4, 2**5, 2**6, 2**27, 2**20
_NEVER = {"loss_scale": 0.0, "cause": int(Cause.NONE), "has_nan": False, "index": -1}


class LastSkip:
    """Stores the last skip of a scaler.

    Attributes:
        variables: The variables that hold it, by name.
    """

    def __init__(self) -> None:
        self.variables = {field: shared_variable(value, field) for field, value in _NEVER.items()}

    def save_as_before(self) -> None:
        """Has checkpoints hold what they always held."""
        for field in ("cause", "index"):
            saved_as_int32(self.variables[field])

    def keep(
        self,
        loss_scale: tf.Tensor,
        skip: Skip,
        replica: tf.Tensor | None,
        names_from: int = 0,
        where: tf.Tensor | None = None,
        counted: bool = True,
    ) -> Skip:
        """Stores a skip where `where`, scalar bool, is true, or always in the branch of a skip; and returns it.

        `counted` is False if a later call of `count` belongs to the same step.
        """
        moved = _moved(skip, names_from) if names_from else skip
        loss_scale = loss_scale if counted else -loss_scale
        for field, value in {"loss_scale": loss_scale, **packed(moved, replica)}.items():
            variable = self.variables[field]
            variable.assign(value if where is None else tf.where(where, value, variable))
        return skip

    def keep_where(self, skipped: tf.Tensor, outcome: Outcome) -> None:
        """Stores the skip of an outcome where `skipped` is True."""
        skip = _moved(Skip(*(getattr(outcome, field) for field in Skip._fields)), outcome.names_from)
        replica = outcome.replica if replica_count() > 1 else None
        for field, value in {"loss_scale": outcome.loss_scale, **packed(skip, replica)}.items():
            self.variables[field].assign(tf.where(skipped, value, self.variables[field]))

    def kept_now(self, skipped: tf.Tensor | None) -> tf.Tensor:
        """Whether a skip was kept of the step that is counted next, scalar bool.

        Args:
            skipped: Scalar bool, whether a reason was kept in this step; None if only the variables tell, which may
                hold that of an earlier step that was never counted.
        """
        kept_now = self.variables["loss_scale"] < 0.0
        return kept_now if skipped is None else tf.logical_and(kept_now, skipped)

    def is_of_loss(self, kept_now: tf.Tensor) -> tf.Tensor:
        """Whether the kept skip is of the step that is counted next, and because of its loss: scalar bool."""
        return tf.logical_and(kept_now, tf.equal(self.variables["cause"] % _HELPS, int(Cause.LOSS)))

    def count(self, finite: tf.Tensor, kept_now: tf.Tensor) -> None:
        """Records that a step was counted without `keep`: one that was skipped for no reason that was kept has none.

        Args:
            finite: Scalar bool, whether it was applied.
            kept_now: From the method.
        """
        known = tf.logical_or(finite, kept_now)
        for field, variable in self.variables.items():
            kept = tf.abs(variable) if field == "loss_scale" else variable
            variable.assign(tf.where(known, kept, tf.constant(_NEVER[field], variable.dtype)))

    def correct(self, backward: tf.Tensor, lower_helps: tf.Tensor) -> None:
        """Corrects a stored cause of OVERFLOW after the diagnosis. Both arguments are scalar bools."""
        self.variables["cause"].assign_add(correction(backward, lower_helps))

    def outcome(self, lists: Mapping[int, int] = MappingProxyType({})) -> Outcome:
        """The outcome of the stored skip, without norms.

        Args:
            lists: How many names each list has that the scaler knows, by the place where it begins.
        """
        kept = {field: tf.identity(variable) for field, variable in self.variables.items()}
        loss_scale, nan = tf.abs(kept.pop("loss_scale")), tf.constant(float("nan"))
        skip = unpacked(**kept)
        place = tf.where(skip.index < 0, (-skip.index - 1) // 2, skip.index)
        names_from = _beginning(place, lists)
        # The positions of a list that nobody knows here are left beyond any list.
        moved = _moved(skip, -tf.where((names_from < 0) & (skip.index < 0), place, tf.maximum(names_from, 0)))
        return Outcome(
            finite=tf.equal(skip.cause, int(Cause.NONE)),
            loss_scale=loss_scale,
            grad_norm=nan,
            clipped_norm=nan,
            **moved._asdict(),
            replica=kept["cause"] // _REPLICA - 1,
            names_from=names_from,
        )


def _moved(skip: Skip, by: int | tf.Tensor) -> Skip:
    """A skip whose positions are moved by a number of names."""
    positions = {field: getattr(skip, field) for field in ("nearest", "weight")}
    index = tf.where(skip.index < 0, skip.index - 2 * by, skip.index + by)
    return skip._replace(index=index, **{field: tf.where(at < 0, at, at + by) for field, at in positions.items()})


def _beginning(place: tf.Tensor, lists: Mapping[int, int]) -> tf.Tensor:
    """Where the list begins that holds this place, scalar int64. 0 below the first list, -1 if no list does."""
    lists = {0: FIRST_PLACE, **lists}
    begin, count = tf.constant(list(lists), tf.int64), tf.constant(list(lists.values()), tf.int64)
    return tf.reduce_max(tf.where((begin <= place) & (place < begin + count), begin, -tf.ones_like(begin)))


def packed(skip: Skip, replica: tf.Tensor | None = None) -> dict[str, tf.Tensor]:
    """Packs a skip into three scalars: int64 `cause`, bool `has_nan` and int64 `index`, which int32 can hold.

    Args:
        skip: The skip.
        replica: As in `Outcome`, or None on one replica alone.
    """
    is_weight = skip.weight >= 0
    position = tf.where(is_weight, skip.weight, skip.nearest)
    flags = _HELPS * tf.cast(skip.lower_helps, tf.int64) + _IS_WEIGHT * tf.cast(is_weight, tf.int64)
    count = tf.where(skip.index < 0, tf.zeros_like(skip.count), tf.minimum(skip.count, MOST_COUNTED))
    cause = skip.cause + flags + _POSITION * (1 + position)
    return {
        "cause": cause if replica is None else cause + _REPLICA * (1 + tf.minimum(replica, LAST_REPLICA)),
        "has_nan": skip.has_nan,
        "index": skip.index + _COUNT * count,
    }


def correction(backward: tf.Tensor, lower_helps: tf.Tensor) -> tf.Tensor:
    """What to add to a stored `cause` of OVERFLOW after the diagnosis, scalar int64.

    Args:
        backward: Scalar bool, whether the cause is BACKWARD.
        lower_helps: Scalar bool, whether a lower scale helps.
    """
    to_backward = int(Cause.BACKWARD) - int(Cause.OVERFLOW)
    return to_backward * tf.cast(backward, tf.int64) + _HELPS * tf.cast(lower_helps, tf.int64)


def unpacked(cause: tf.Tensor, has_nan: tf.Tensor, index: tf.Tensor) -> Skip:
    """Unpacks a skip. `nearest` is -1 if the position of a weight was stored instead."""
    position, is_weight = cause % _REPLICA // _POSITION - 1, cause // _IS_WEIGHT % 2 > 0
    nowhere = tf.constant(-1, tf.int64)
    return Skip(
        cause=cause % _HELPS,
        has_nan=has_nan,
        index=tf.where(index < 0, index, index % _COUNT),
        count=tf.where(index < 0, tf.zeros_like(index), index // _COUNT),
        nearest=tf.where(is_weight, nowhere, position),
        weight=tf.where(is_weight, position, nowhere),
        lower_helps=cause // _HELPS % 2 > 0,
    )
