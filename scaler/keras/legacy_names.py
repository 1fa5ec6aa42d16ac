"""The methods of `LossScaleOptimizer` for code written for other versions of Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from scaler.errors import InvalidArgument
from scaler.gate.loss_scaler import LossScaler
from scaler.gradients.lists import Gradient
from scaler.strategies import NoScaling, Static
from scaler.strategies.spike_guard import unguarded


class LegacyNames:
    """The names of tf.keras 2, and those of Keras 3 for its own way of loss scaling."""

    loss_scaler: LossScaler
    loss_scale: Any
    scale_loss: Any
    apply_gradients: Any
    _by_hand: bool
    _unscaled: tf.Variable

    @property
    def dynamic_scale(self) -> tf.Tensor:
        """The same as `loss_scale`, under Keras 3's name."""
        return self.loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return not isinstance(unguarded(self.loss_scaler.strategy), (Static, NoScaling))

    def get_scaled_loss(self, loss: Any) -> Any:
        """The same as `scale_loss`, under tf.keras 2's name.

        A function that returns a loss gives a function that returns the scaled loss.
        """
        return (lambda: self.scale_loss(loss())) if callable(loss) else self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Sequence[Gradient]) -> list[Gradient]:
        """Turns gradients of the scaled loss into gradients of the loss, in float32, as in tf.keras 2.

        In a graph `apply` knows them by what they are computed from. In eager mode it takes all gradients as unscaled
        until the next loss is scaled.
        """
        self._by_hand = True
        self._unscaled.assign(True)
        return self.loss_scaler.unscale(grads)

    def minimize(self, loss: Any, var_list: Sequence, tape: tf.GradientTape | None = None) -> tf.Variable:
        """Scales the loss, differentiates it and applies the gradients, as in tf.keras 2.

        Args:
            loss: A function that returns the loss, or the loss itself together with its `tape`.
            var_list: The variables to update.
            tape: The tape that recorded the loss, if the loss is a tensor.
        """
        if not callable(loss) and tape is None:
            raise InvalidArgument("minimize(loss, ...): a loss that is a tensor needs the tape that recorded it.")
        with tape or tf.GradientTape() as tape:
            scaled = self.scale_loss(loss() if callable(loss) else loss)
        return self.apply_gradients(zip(tape.gradient(scaled, var_list), var_list, strict=True))
