"""Knows, in eager mode, whether a tape differentiated what `scale` returned. There is no graph to ask then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from scaler import gradients
from scaler.backend.assignments import age_of
from scaler.backend.graphs import tape_records


class RecordedLosses:
    """The losses that one scaler scaled while a tape recorded, since gradients were last unscaled or applied.

    A tape that differentiates a scaled loss passes through it. If none did, the gradients are not those of it. They may
    still carry the scale if they were computed without a tape, or in a function, or if the user multiplied by the
    scale: then nothing is said. A false alarm is worse than a miss.
    """

    def __init__(self) -> None:
        self._open = _Open()
        self._in_functions = False

    def scaled(self, loss: tf.Tensor, followed: Callable[[bool], Callable[[float], None]]) -> tf.Tensor:
        """Returns the scaled loss, and records it: the same values, and the same gradient.

        Args:
            loss: The scaled loss.
            followed: Is told whether a tape follows the loss, and returns what is called with the age of each value
                that a tape passes back through it.
        """
        if not tf.executing_eagerly():
            self._in_functions = True
            return loss
        now, passes = self._open, followed(tape_records())
        if not tape_records():
            now.in_doubt = True
            return loss

        @tf.custom_gradient
        def passed(value: tf.Tensor) -> tuple:
            def backward(upstream: tf.Tensor) -> tf.Tensor:
                now.in_doubt = True
                passed_back = tf.identity(upstream)
                passes(age_of(passed_back) if tf.executing_eagerly() else float("inf"))
                return passed_back

            return tf.identity(value), backward

        result = passed(loss)
        now.age = age_of(result)
        return result

    def scaled_by_hand(self) -> None:
        """Records that the user multiplies something by the scale."""
        self._open.in_doubt = True

    def taken(self, method: str, grads: Sequence[gradients.Gradient]) -> str | None:
        """Records that gradients are unscaled or applied.

        Args:
            method: Who takes them.
            grads: The gradients.

        Returns:
            A warning if they certainly come from none of the losses, else None.
        """
        if not tf.executing_eagerly():
            return None
        last, self._open = self._open, _Open()
        ages = [age_of(gradients.values_of(grad)) for grad in grads if tf.is_tensor(grad)]
        # A gradient that is older is kept from before.
        are_younger = all(last.age < age < float("inf") for age in ages)
        if last.in_doubt or self._in_functions or last.age < 0 or not are_younger:
            return None
        return (
            f"{method}(grads): the gradients are divided by the loss scale, but no tape has differentiated what "
            "scale(loss) (scale_loss of a LossScaleOptimizer) returned: they seem to be gradients of the unscaled "
            "loss, and the step would be too small by this factor. Differentiate the result: "
            "tape.gradient(scale(loss), variables)."
        )


class _Open:
    """Losses of one step.

    Attributes:
        age: The age of the last one; -1 before the first.
        in_doubt: Whether a tape differentiated one of them, or the scale may have entered the gradients otherwise.
    """

    def __init__(self) -> None:
        self.age, self.in_doubt = -1.0, False
