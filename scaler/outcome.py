"""What one attempted step did, as tensors."""

from __future__ import annotations

import enum
from typing import NamedTuple

import tensorflow as tf


class Cause(enum.IntEnum):
    """Why a step was skipped.

    Attributes:
        NONE: It was applied.
        LOSS: The loss was not finite already. No scale can help: look at the data and the forward pass.
        BACKWARD: The loss was finite, but its derivatives are not, even at a loss scale of 2^-14 or the strategy's
            floor, whichever is less: a square root at 0, for example. Or what is not finite at a scale of 1 is all
            zero there, since float16 flushes what comes before it.
        OVERFLOW: The scaled backward pass overflowed. A lower scale helps if `Outcome.lower_helps`, and may help if
            not. Presumed where `apply` was given no `diagnose` that tells it from BACKWARD.
        TOO_LARGE: Every scaled gradient was finite, but not the unscaled ones or their squared global norm in float32.
        UPDATE: The gradients were finite, but the optimizer made a value of them that is not, in a weight or in a slot
            of its own. Or its learning rate is NaN, or so large that it would.
    """

    NONE = 0
    LOSS = 1
    BACKWARD = 2
    OVERFLOW = 3
    TOO_LARGE = 4
    UPDATE = 5


class Skip(NamedTuple):
    """Why a step was skipped, as scalar tensors.

    Attributes:
        cause: Int32, a `Cause`.
        has_nan: Bool, whether an unscaled gradient had a NaN; False for infinities alone.
        index: Int32, the position in the list of gradients of the first one that was not finite, or else the largest.
            For UPDATE, the position of the first variable that was not finite, among those with a gradient and then the
            optimizer's own; -1 for its learning rate, -2 for the limit of a clipping.
        count: Int32, how many gradients were not finite; of finite ones, how many have a squared norm beyond float32.
        nearest: Int32, the position of the last of these, which is nearest to the loss if the list is in the order of
            the forward pass; -1 if there are none.
        weight: Int32, the position of the first variable that was not finite already; -1 if all were.
        lower_helps: Bool, whether the gradients were found finite at a lower loss scale.
    """

    cause: tf.Tensor
    has_nan: tf.Tensor
    index: tf.Tensor
    count: tf.Tensor
    nearest: tf.Tensor
    weight: tf.Tensor
    lower_helps: tf.Tensor


def not_skipped() -> Skip:
    """What a step that was applied, or not attempted, has in the place of a reason."""
    none, no = tf.constant(-1), tf.constant(False)
    return Skip(tf.constant(int(Cause.NONE)), no, none, tf.constant(0), none, none, no)


def unless_limited(skip: Skip, limited: tf.Tensor) -> Skip:
    """The reason of a skip, but UPDATE where gradients had no limit to clip them to.

    Args:
        skip: Why the step was skipped, as far as gradients and optimizer tell.
        limited: Scalar bool, whether the limit is a positive finite number.
    """
    cause, index = tf.where(limited, skip.cause, int(Cause.UPDATE)), tf.where(limited, skip.index, -2)
    return skip._replace(cause=cause, index=index)


class Outcome(NamedTuple):
    """What one attempted step did, as scalar tensors: nothing was read by the host.

    Attributes:
        finite: Bool, whether the step was applied; False when it was skipped.
        loss_scale: Float32, the scale this step was attempted with.
        grad_norm: Float32, the global norm of the unscaled gradients before clipping; not finite on a skipped step.
        cause: Int32, a `Cause`.
        has_nan: Bool, whether a gradient had a NaN; False for infinities alone.
        index: Int32, the position in the list of gradients of the first one that was not finite; -1 if applied.
        clipped_norm: Float32, the global norm of the unscaled gradients after clipping, as the optimizer saw them; NaN
            on a skipped step.
        count: Int32, how many gradients were not finite; 0 if applied, or not known.
        nearest: Int32, the position of the last one that was not finite; -1 if applied, or not known.
        weight: Int32, the position of the first variable that was not finite before the step already; -1 if none.
        lower_helps: Bool, whether the gradients were found finite at a lower loss scale.
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
    weight: tf.Tensor = -1
    lower_helps: tf.Tensor = False

    @property
    def variable(self) -> tf.Tensor:
        """The position of the variable to look at first, scalar int32; -1 if the step was applied or not attempted.

        The first one that was not finite already, if no lower scale was seen to help; or else the last one whose
        gradient was not finite, which the backward pass met first if the list is in the order of the forward pass; or
        else the one of `index`.
        """
        last = tf.where(tf.greater_equal(self.nearest, 0), self.nearest, self.index)
        spoiled = tf.logical_and(tf.greater_equal(self.weight, 0), tf.logical_not(self.lower_helps))
        return tf.where(spoiled, self.weight, last)


def presumed_cause(loss_finite: tf.Tensor, scaled_finite: tf.Tensor) -> tf.Tensor:
    """The `Cause` of a skipped step, scalar int32, as long as nobody has told BACKWARD from OVERFLOW.

    Args:
        loss_finite: Scalar bool.
        scaled_finite: Scalar bool, whether every gradient was finite before unscaling.
    """
    return tf.where(loss_finite, tf.where(scaled_finite, Cause.TOO_LARGE, Cause.OVERFLOW), Cause.LOSS)
