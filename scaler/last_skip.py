"""The last skip, packed into the variables that every checkpoint has held since the first version.

`cause` and `index` were once plain numbers of a `Skip`. Later additions use their higher bits, which are 0 in an older
checkpoint. With more variables an older run folder or Keras file would be refused.

    cause = cause + 2^4 lower_helps + 2^5 is_weight + 2^6 (1 + position)
    index = index + 2^20 count, or -1 if nothing was skipped yet

The position belongs to the non-finite weight if there is one, else to the nearest gradient. Models have fewer than 2^20
variables.
"""

from __future__ import annotations

import tensorflow as tf

from scaler.backend.variables import shared_variable
from scaler.outcome import Cause, Outcome, Skip

MOST_COUNTED = 2**11 - 1
"""The largest count that is kept. It stands for this many non-finite gradients or more."""
_HELPS, _IS_WEIGHT, _POSITION, _COUNT = 2**4, 2**5, 2**6, 2**20
_NEVER = {"loss_scale": 0.0, "cause": int(Cause.NONE), "has_nan": False, "index": -1}


class LastSkip:
    """Stores the last skip of a scaler.

    Attributes:
        variables: The variables that hold it, by name.
    """

    def __init__(self) -> None:
        self.variables = {field: shared_variable(value, field) for field, value in _NEVER.items()}

    def keep(self, loss_scale: tf.Tensor, skip: Skip) -> None:
        """Stores a skip, in the branch of the graph where the step is skipped."""
        for field, value in {"loss_scale": loss_scale, **packed(skip)}.items():
            self.variables[field].assign(value)

    def keep_where(self, skipped: tf.Tensor, outcome: Outcome) -> None:
        """Stores the skip of an outcome where `skipped` is True."""
        skip = Skip(*(getattr(outcome, field) for field in Skip._fields))
        for field, value in {"loss_scale": outcome.loss_scale, **packed(skip)}.items():
            self.variables[field].assign(tf.where(skipped, value, self.variables[field]))

    def correct(self, backward: tf.Tensor, lower_helps: tf.Tensor) -> None:
        """Corrects a stored cause of OVERFLOW after the diagnosis. Both arguments are scalar bools."""
        self.variables["cause"].assign_add(correction(backward, lower_helps))

    def outcome(self) -> Outcome:
        """The outcome of the stored skip, without norms."""
        kept = {field: tf.identity(variable) for field, variable in self.variables.items()}
        loss_scale, nan = kept.pop("loss_scale"), tf.constant(float("nan"))
        skip = unpacked(**kept)
        return Outcome(
            finite=tf.equal(skip.cause, int(Cause.NONE)),
            loss_scale=loss_scale,
            grad_norm=nan,
            clipped_norm=nan,
            **skip._asdict(),
        )


def packed(skip: Skip) -> dict[str, tf.Tensor]:
    """Packs a skip into three scalars: int32 `cause`, bool `has_nan` and int32 `index`."""
    is_weight = skip.weight >= 0
    position = tf.where(is_weight, skip.weight, skip.nearest)
    flags = _HELPS * tf.cast(skip.lower_helps, tf.int32) + _IS_WEIGHT * tf.cast(is_weight, tf.int32)
    count = tf.where(skip.index < 0, 0, tf.minimum(skip.count, MOST_COUNTED))
    return {
        "cause": skip.cause + flags + _POSITION * (1 + position),
        "has_nan": skip.has_nan,
        "index": skip.index + _COUNT * count,
    }


def correction(backward: tf.Tensor, lower_helps: tf.Tensor) -> tf.Tensor:
    """What to add to a stored `cause` of OVERFLOW after the diagnosis, scalar int32.

    Args:
        backward: Scalar bool, whether the cause is BACKWARD.
        lower_helps: Scalar bool, whether a lower scale helps.
    """
    to_backward = int(Cause.BACKWARD) - int(Cause.OVERFLOW)
    return to_backward * tf.cast(backward, tf.int32) + _HELPS * tf.cast(lower_helps, tf.int32)


def unpacked(cause: tf.Tensor, has_nan: tf.Tensor, index: tf.Tensor) -> Skip:
    """Unpacks a skip. `nearest` is -1 if the position of a weight was stored instead."""
    position, is_weight = cause // _POSITION - 1, cause // _IS_WEIGHT % 2 > 0
    return Skip(
        cause=cause % _HELPS,
        has_nan=has_nan,
        index=tf.where(index < 0, index, index % _COUNT),
        count=tf.where(index < 0, 0, index // _COUNT),
        nearest=tf.where(is_weight, -1, position),
        weight=tf.where(is_weight, position, -1),
        lower_helps=cause // _HELPS % 2 > 0,
    )
