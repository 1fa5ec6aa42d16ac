"""What one attempted step did, as tensors."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend.variables import choose


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
        if not any(map(tf.is_tensor, self)):
            return tf.constant([float(field) for field in self])
        return side_by_side(self)

    @classmethod
    def of(cls, reason: tf.Tensor) -> Skip:
        """The fields of what `packed` returned."""
        fields = dict(zip(cls._fields, tf.unstack(reason, num=len(cls._fields)), strict=True))
        flags = ("has_nan", "lower_helps")
        return cls(*(tf.cast(one, tf.bool if name in flags else tf.int64) for name, one in fields.items()))


def side_by_side(numbers: Iterable) -> tf.Tensor:
    """Scalar tensors of any dtype and numbers as one tensor, float32 [n]."""
    return tf.stack([tf.cast(one, tf.float32) if tf.is_tensor(one) else float(one) for one in numbers])


def not_skipped() -> tf.Tensor:
    """The reason of a step that was applied or not attempted, float32 [6]: see `Skip.packed`."""
    return Skip().packed()


def int64(number: int) -> tf.Tensor:
    """A constant among the integers of a skip, scalar int64."""
    return tf.constant(int(number), tf.int64)


def as_spike(
    reason: tf.Tensor, spike: tf.Tensor, of_norm: tf.Tensor, where: tf.Tensor, beyond: tf.Tensor | None = None
) -> tf.Tensor:
    """Replaces the reason for a skip by SPIKE where the step was one.

    Args:
        reason: Why the step was skipped, judging by gradients and optimizer, float32 [6].
        spike: Scalar bool.
        of_norm: Scalar bool, whether a norm is why, and not its loss.
        where: Scalar int64, the position of the gradient to look at, if a norm is why.
        beyond: Scalar int64, how many gradients are beyond limits of their own, if that is why, else 0; None for 0.
    """
    other = Skip(Cause.SPIKE, index=choose(of_norm, where, -1), count=0 if beyond is None else beyond)
    return choose(spike, other.packed(), reason)


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


def presumed_cause(loss_finite: tf.Tensor, scaled_finite: tf.Tensor) -> tf.Tensor:
    """The `Cause` of a skipped step, scalar float32. Without a diagnosis it is OVERFLOW where it may be BACKWARD.

    Args:
        loss_finite: Scalar bool.
        scaled_finite: Scalar bool, whether every gradient was finite before unscaling.
    """
    scaled = choose(scaled_finite, float(Cause.TOO_LARGE), float(Cause.OVERFLOW))
    return choose(loss_finite, scaled, float(Cause.LOSS))
