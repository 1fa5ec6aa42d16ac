"""The last skip in the few numbers that checkpoints have held of it from the beginning.

`cause` and `index` were the numbers of a `Skip` once; what was added since lies in their higher bits, which are 0 in an
older checkpoint. More variables would have it refused, in a run's folder and in a Keras file.

    cause = cause + 2^4 lower_helps + 2^5 is_weight + 2^6 (1 + position)
    index = index + 2^20 count, or -1 if nothing was skipped yet

The position is that of the weight that was not finite, if there was one, or else the nearest gradient. Models have
fewer than 2^20 variables.
"""

from __future__ import annotations

import tensorflow as tf

from scaler.backend.variables import shared_variable
from scaler.outcome import Cause, Outcome, Skip

MOST_COUNTED = 2**11 - 1
"""This many gradients that are not finite, or more, are kept as one number."""
_HELPS, _IS_WEIGHT, _POSITION, _COUNT = 2**4, 2**5, 2**6, 2**20
_NEVER = {"loss_scale": 0.0, "cause": int(Cause.NONE), "has_nan": False, "index": -1}


class LastSkip:
    """Keeps the last skip of a scaler.

    Attributes:
        variables: By name, those that hold it.
    """

    def __init__(self) -> None:
        self.variables = {field: shared_variable(value, field) for field, value in _NEVER.items()}

    def keep(self, loss_scale: tf.Tensor, skip: Skip) -> None:
        """Keeps a skip, in the branch of the graph where a step is skipped."""
        for field, value in {"loss_scale": loss_scale, **packed(skip)}.items():
            self.variables[field].assign(value)

    def keep_where(self, skipped: tf.Tensor, outcome: Outcome) -> None:
        """Keeps the skip of an outcome, where `skipped`."""
        skip = Skip(*(getattr(outcome, field) for field in Skip._fields))
        for field, value in {"loss_scale": outcome.loss_scale, **packed(skip)}.items():
            self.variables[field].assign(tf.where(skipped, value, self.variables[field]))

    def correct(self, backward: tf.Tensor, lower_helps: tf.Tensor) -> None:
        """Corrects a kept cause of OVERFLOW once it is known better; both scalar bools."""
        self.variables["cause"].assign_add(correction(backward, lower_helps))

    def outcome(self) -> Outcome:
        """The outcome of the skip that is kept, without norms."""
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
    """What to keep of a skip: int32 `cause`, bool `has_nan` and int32 `index`, scalars."""
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
    """What to add to a kept `cause` of OVERFLOW once it is known better, scalar int32.

    Args:
        backward: Scalar bool, whether it is BACKWARD.
        lower_helps: Scalar bool.
    """
    to_backward = int(Cause.BACKWARD) - int(Cause.OVERFLOW)
    return to_backward * tf.cast(backward, tf.int32) + _HELPS * tf.cast(lower_helps, tf.int32)


def unpacked(cause: tf.Tensor, has_nan: tf.Tensor, index: tf.Tensor) -> Skip:
    """The skip that was kept so; `nearest` is -1 where a weight was kept in its place."""
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
