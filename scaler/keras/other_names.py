"""What `LossScaleOptimizer` is asked for by code written for other versions of Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from scaler.errors import InvalidArgument
from scaler.gradients.lists import Gradient
from scaler.loss_scaler import LossScaler
from scaler.strategies import NoScaling, Static


class OtherNames:
    """The names of tf.keras 2, and those of Keras 3 that speak of its own way of scaling."""

    loss_scaler: LossScaler
    loss_scale: Any
    scale_loss: Any
    apply_gradients: Any
    _by_hand: bool
    _unscaled: tf.Variable

    @property
    def dynamic_scale(self) -> tf.Tensor:
        """As `loss_scale`, by the name of Keras 3."""
        return self.loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return not isinstance(self.loss_scaler.strategy, (Static, NoScaling))

    def get_scaled_loss(self, loss: Any) -> Any:
        """As `scale_loss`, by the name of tf.keras 2; of a function that returns a loss, one that returns it scaled."""
        return (lambda: self.scale_loss(loss())) if callable(loss) else self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Sequence[Gradient]) -> list[Gradient]:
        """Gradients of the loss from those of the scaled loss, in float32, as in tf.keras 2.

        Whatever `apply` is given until the next loss is scaled counts as unscaled.
        """
        self._by_hand = True
        self._unscaled.assign(True)
        return self.loss_scaler.unscale(grads)

    def minimize(self, loss: Any, var_list: Sequence, tape: tf.GradientTape | None = None) -> tf.Variable:
        """Scales, differentiates and applies, as the optimizers of tf.keras 2 do it.

        Args:
            loss: A function that returns the loss, or the loss if `tape` is the one it was computed under.
            var_list: The variables to update.
            tape: For a loss that is no function, the tape that recorded it.
        """
        if not callable(loss) and tape is None:
            raise InvalidArgument("minimize(loss, ...): a loss that is a tensor needs the tape it was computed under.")
        with tape or tf.GradientTape() as tape:
            scaled = self.scale_loss(loss() if callable(loss) else loss)
        return self.apply_gradients(zip(tape.gradient(scaled, var_list), var_list, strict=True))
