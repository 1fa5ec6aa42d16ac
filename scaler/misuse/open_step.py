"""The scale that gradients carry between the scaling of a loss and the decision about its step."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.packed import Entry, Packed
from scaler.backend.variables import choose, mark_private


class OpenStep:
    """What each replica remembers for itself between `scale` and `apply`, in one variable.

    A run that goes on with another number of replicas begins with the mean of what they had. A loss that was finite on
    some of them only is then below 1, which is not finite, and the mean of their losses is that of all of them.

    Attributes:
        variable: It is assigned where a loss is scaled or retried, and by an `apply` that does not count its step.
        losses: How many whole losses make one: in `fit` the micro-batches of a window. 1 where each gives its share.

    Args:
        sums: Whether losses are summed.
        counted: Returns how many steps were counted: scalar float32. A step is open while their number is that of
            its last loss.
    """

    def __init__(self, sums: bool, counted: Callable[[], tf.Tensor]) -> None:
        names = ("used", "finite", "opened", *(["loss"] if sums else []))
        first = {name: tf.constant(1.0 if name == "finite" else 0.0) for name in names}
        self._kept = Packed(first, "open_step", replicas.local_variable)
        self.variable, self.losses, self._sums, self._counted = self._kept.variable, 1, sums, counted

    def entries(self) -> dict[str, Entry]:
        """What a checkpoint holds of it."""
        mark_private(self.variable)
        return self._kept.entries()

    def _keep(self, **values: tf.Tensor) -> None:
        self.variable.assign(self._kept.joined({**self._kept.read(), **values}))

    @property
    def used(self) -> tf.Tensor:
        """The scale that gradients carry until the next `scale`, even after an `update`. 0 before the first `scale`."""
        return self._kept.read()["used"]

    @property
    def loss_finite(self) -> tf.Tensor:
        """Whether all losses since the last decision were finite. One decision may take several `apply`."""
        return self._kept.read()["finite"] >= 1.0

    @property
    def decided(self) -> tf.Tensor:
        """Whether nothing has been scaled since the last decision."""
        return tf.not_equal(self._kept.read()["opened"], self._counted())

    @property
    def loss(self) -> tf.Tensor | None:
        """The sum of the losses since the last decision, over `losses`; None unless it is asked for."""
        return self._kept.read()["loss"] / replicas.replica_count() if self._sums else None

    def begin(self, loss: tf.Tensor, loss_finite: tf.Tensor, loss_scale: tf.Tensor) -> None:
        """Records that a loss, which is finite or not, was multiplied by the scale."""
        kept, counted = self._kept.read(), self._counted()
        decided = tf.not_equal(kept["opened"], counted)
        finite = choose(loss_finite, choose(decided, 1.0, kept["finite"]), 0.0)
        now = {"used": loss_scale, "finite": finite, "opened": counted}
        if self._sums:
            share = (loss if self.losses == 1 else loss / self.losses) * replicas.replica_count()
            now["loss"] = choose(decided, 0.0, kept["loss"]) + share
        self.variable.assign(self._kept.joined(now))

    def begin_by_hand(self, now: tf.Tensor) -> tf.Tensor:
        """Opens a step whose loss the user scales by hand, unless a step is open already.

        Args:
            now: The strategy's scale, scalar float32.

        Returns:
            The scale of the open step, scalar float32.
        """
        kept, counted = self._kept.read(), self._counted()
        opens = tf.logical_or(tf.not_equal(kept["opened"], counted), kept["used"] <= 0.0)
        loss_scale = choose(opens, now, kept["used"])
        opened = {"used": loss_scale, "finite": choose(opens, 1.0, kept["finite"]), "opened": counted}
        self.variable.assign(self._kept.joined({**opened, "loss": tf.constant(float("nan"))}))
        return loss_scale

    def end(self, decided: tf.Tensor) -> None:
        """Records where `decided`, scalar bool, is true that an `apply` decided about the step and did not count it."""
        self._keep(opened=choose(decided, -1.0, self._kept.read()["opened"]))

    def retried(self, before: tf.Tensor, loss_scale: tf.Tensor) -> None:
        """Records that gradients which carried one scale carry another now."""
        self._keep(used=choose(tf.equal(loss_scale, before), self.used, loss_scale))

    def is_decided(self) -> bool:
        """`decided` on the host, of this replica, or of the first one outside of them all."""
        return bool(self.decided)

    def last_scale(self) -> float:
        """`used` on the host, as `is_decided`."""
        return float(self.used)

    def is_bad(self, judged: tf.Tensor) -> tf.Tensor:
        """Whether a loss of the step that is counted now was not finite, scalar bool. One that is not known was.

        Args:
            judged: Scalar bool, whether an `apply` has decided about it, which left the count to others.
        """
        apart = not tf.distribute.in_cross_replica_context()
        finite = self.loss_finite if apart else self._everywhere(lambda kept: kept["finite"] >= 1.0)
        unknown = tf.logical_and(self.decided, tf.logical_not(judged))
        return tf.logical_not(tf.logical_or(finite, unknown))

    def ended_unseen(self) -> tf.Tensor:
        """Whether a decision followed losses of which one was not finite, on any replica: a scalar bool."""
        counted = self._counted()
        finite = self._everywhere(lambda kept: kept["finite"] >= 1.0)
        decided = self._everywhere(lambda kept: tf.not_equal(kept["opened"], counted))
        return tf.logical_and(tf.logical_not(finite), decided)

    def scale_of_gradients(self, now: tf.Tensor) -> tf.Tensor:
        """The scale that gradients carry: that of the last `scale`, or `now` if nothing was scaled yet."""
        used = self.used
        return choose(used > 0.0, used, now)

    def _everywhere(self, flag: Callable[[dict], tf.Tensor]) -> tf.Tensor:
        """Whether a flag of what is kept is true on all replicas."""
        flags = [flag(self._kept.read(one)) for one in replicas.replica_values(self.variable)]
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
