"""What one attempted step did, and one sentence that says so."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf


class Cause(enum.IntEnum):
    """Why a step was skipped.

    Attributes:
        NONE: It was applied.
        LOSS: The loss was not finite already. No scale can help: look at the data and the forward pass.
        BACKWARD: The loss was finite, but its derivatives are not, even at a loss scale of 2^-14 or the strategy's
            floor, whichever is less: a square root at 0, for example.
        OVERFLOW: The scaled backward pass overflowed; a lower scale helps. Presumed where `apply` was given no
            `diagnose` that tells it from BACKWARD.
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
            optimizer's own; -1 for its learning rate.
    """

    cause: tf.Tensor
    has_nan: tf.Tensor
    index: tf.Tensor


def not_skipped() -> Skip:
    """What a step that was applied, or not attempted, has in the place of a reason."""
    return Skip(tf.constant(int(Cause.NONE)), tf.constant(False), tf.constant(-1))


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
    """

    finite: tf.Tensor
    loss_scale: tf.Tensor
    grad_norm: tf.Tensor
    cause: tf.Tensor
    has_nan: tf.Tensor
    index: tf.Tensor
    clipped_norm: tf.Tensor


def presumed_cause(loss_finite: tf.Tensor, scaled_finite: tf.Tensor) -> tf.Tensor:
    """The `Cause` of a skipped step, scalar int32, as long as nobody has told BACKWARD from OVERFLOW.

    Args:
        loss_finite: Scalar bool.
        scaled_finite: Scalar bool, whether every gradient was finite before unscaling.
    """
    return tf.where(loss_finite, tf.where(scaled_finite, Cause.TOO_LARGE, Cause.OVERFLOW), Cause.LOSS)


def explain(outcome: Outcome, names: Sequence[str], optimizer: str) -> str:
    """One sentence on what happened and what would help. Reads the outcome: call it on the host.

    Args:
        outcome: From `LossScaler.apply`.
        names: The variables' names, in the order of the gradients, and those of the optimizer's own.
        optimizer: What the optimizer is called.
    """
    scale = f"{float(outcome.loss_scale):g}"
    why, index = Cause(int(outcome.cause)), int(outcome.index)
    if why is Cause.NONE:
        return f"The step was applied at loss scale {scale}."
    if why is Cause.UPDATE:
        return _explain_update(names[index] if 0 <= index < len(names) else None, bool(outcome.has_nan), optimizer)
    name = names[index] if 0 <= index < len(names) else f"number {index}"
    kind = "NaN" if bool(outcome.has_nan) else "infinity"
    where = f"the gradient of {name!r} is the first with {'a NaN' if kind == 'NaN' else 'an infinity'}"
    return {
        Cause.LOSS: (
            f"The step was skipped because the loss itself was not finite; {where}. No loss scale can help: look for "
            "non-finite data, or a forward pass that overflows."
        ),
        Cause.BACKWARD: (
            f"The step was skipped because the derivatives are not finite at any loss scale, though the loss is; "
            f"{where}. Look for a square root, logarithm, division or norm at 0."
        ),
        Cause.OVERFLOW: (
            f"The step was skipped because the backward pass overflowed at loss scale {scale}; {where}. A lower scale "
            "helps."
        ),
        Cause.TOO_LARGE: (
            f"The step was skipped because the gradients are finite at loss scale {scale}, but unscaled they or their "
            f"squared norm exceed float32; the gradient of {name!r} is the largest. No loss scale can help: lower the "
            "learning rate, or look for a loss that explodes."
        ),
    }[why]


def _explain_update(name: str | None, has_nan: bool, optimizer: str) -> str:
    if name is None:
        return (
            f"The step was skipped because the learning rate of {optimizer} is NaN, infinite or so large that it can "
            "make weights infinite, although the gradients are finite. Look at the learning rate or its schedule."
        )
    value = "a NaN" if has_nan else "an infinity"
    return (
        f"The step was skipped because {optimizer} made {value} of finite gradients, first in {name!r}; everything was "
        "put back. No loss scale can help: look at its epsilon and its slots, clip the gradients, or use another "
        "optimizer."
    )
