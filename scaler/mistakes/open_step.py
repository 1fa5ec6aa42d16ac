"""The scale that gradients carry between the scaling of a loss and the decision about its step."""

from __future__ import annotations

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.variables import mark_private


class OpenStep:
    """What each replica remembers for itself between `scale` and `apply`.

    Attributes:
        used: The scale that gradients carry until the next `scale`, even after an `update`. 0 before the first `scale`.
        loss_finite: Whether all losses since the last decision were finite. One decision may take several `apply`.
        decided: Whether nothing has been scaled since the last decision.
        loss: The sum of the losses since the last decision, over `losses`; None unless it is asked for.
        losses: How many whole losses make one: in `fit` the micro-batches of a window. 1 where each gives its share.

    Args:
        sums: Whether losses are summed.
    """

    def __init__(self, sums: bool) -> None:
        self.used = replicas.local_variable(0.0, "scale_used")
        self.loss_finite = replicas.local_variable(True, "loss_finite")
        self.decided = replicas.local_variable(False, "decided")
        self.losses = 1
        self.loss = replicas.local_variable(0.0, "loss") if sums else None
        for variable in (self.used, self.loss_finite, self.decided, *([] if self.loss is None else [self.loss])):
            mark_private(variable)

    def begin(self, loss: tf.Tensor, loss_finite: tf.Tensor, loss_scale: tf.Tensor) -> None:
        """Records that a loss, which is finite or not, was multiplied by the scale."""
        self.used.assign(loss_scale)
        if self.loss is not None:
            share = loss if self.losses == 1 else loss / self.losses
            self.loss.assign(tf.where(self.decided, 0.0, self.loss) + share)
        earlier = tf.logical_or(self.decided, self.loss_finite)
        self.loss_finite.assign(tf.logical_and(earlier, loss_finite))
        self.decided.assign(False)

    def begin_by_hand(self, now: tf.Tensor) -> tf.Tensor:
        """Opens a step whose loss the user scales by hand, unless a step is open already.

        Args:
            now: The strategy's scale, scalar float32.

        Returns:
            The scale of the open step, scalar float32.
        """
        used = tf.identity(self.used)
        opens = tf.logical_or(self.decided, used <= 0.0)
        loss_scale = tf.where(opens, now, used)
        self.used.assign(loss_scale)
        self.loss_finite.assign(tf.logical_or(opens, self.loss_finite))
        if self.loss is not None:
            self.loss.assign(float("nan"))
        self.decided.assign(False)
        return loss_scale

    def end(self, attempted: tf.Tensor) -> None:
        """Records the decision about the step where `attempted` is True."""
        known = tf.get_static_value(attempted)
        self.decided.assign(True if known else tf.logical_or(self.decided, attempted))

    def is_decided(self) -> bool:
        """`decided` on the host, of this replica, or of the first one outside of them all."""
        # As a truth of Python's a variable of several replicas is always true, and as a number it is none.
        return bool(tf.convert_to_tensor(self.decided))

    def last_scale(self) -> float:
        """`used` on the host, as `is_decided`."""
        return float(tf.convert_to_tensor(self.used))

    def is_bad(self, judged: tf.Tensor) -> tf.Tensor:
        """Whether a loss of the step that is counted now was not finite, scalar bool. One that is not known was.

        Args:
            judged: Scalar bool, whether an `apply` has decided about it, which left the count to others.
        """
        apart = not tf.distribute.in_cross_replica_context()
        finite = tf.identity(self.loss_finite) if apart else _everywhere(self.loss_finite)
        unknown = tf.logical_and(tf.identity(self.decided), tf.logical_not(judged))
        return tf.logical_not(tf.logical_or(finite, unknown))

    def ended_unseen(self) -> tf.Tensor:
        """Whether a decision followed losses of which one was not finite, on any replica: a scalar bool."""
        return tf.logical_and(tf.logical_not(_everywhere(self.loss_finite)), _everywhere(self.decided))

    def scale_of_gradients(self, now: tf.Tensor) -> tf.Tensor:
        """The scale that gradients carry: that of the last `scale`, or `now` if nothing was scaled yet."""
        used = tf.identity(self.used)
        return tf.where(used > 0.0, used, now)


def _everywhere(flag: tf.Variable) -> tf.Tensor:
    """Whether a flag that each replica has for itself is true on all of them."""
    flags = replicas.in_each(flag)
    return flags[0] if len(flags) == 1 else tf.reduce_all(flags)


def unseen_loss(step: str) -> str:
    """The warning for a step that was applied though its loss is not finite: the run trains, and nobody sees its loss.

    Args:
        step: Which one, as the beginning of a sentence.
    """
    return (
        f"{step} was applied though its loss is not finite. Its gradients are finite, so the model goes on training, "
        "but its loss cannot be seen. The usual reason is a loss that overflows in float16, above 65504; others are an "
        "empty batch, over which a mean is NaN, and with deterministic operations a label that the model has no class "
        "for. Compute the loss in float32: cast the predictions and the targets to "
        "float32 before the loss, or give the model's last layer dtype='float32'."
    )
