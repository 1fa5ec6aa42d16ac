"""The forward and backward pass of the parts of a `ComposedStep`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.step.again import only_first, taken_again
from loops.step.composed_outputs import OWN
from loops.step.loss_result import loss_and_extra
from loops.step.parts import Part
from loops.step.turns import Taken, taken_if

_Loss = tuple[tf.Tensor, dict[str, tf.Tensor]]


class PartPasses:
    """Takes the passes of parts.

    Args:
        scalers: The loss scaler of each part, by name.
        models: All that the parts may call.
        accumulate: Micro-batches per step.

    Attributes:
        extra: For each part the dtypes of the scalars that its loss function added when it was traced last.
    """

    def __init__(self, scalers: Mapping[str, scaler.LossScaler], models: Sequence[keras.layers.Layer], accumulate: int):
        self._scalers, self._models, self._accumulate = scalers, models, accumulate
        self.extra: dict[str, dict[str, tf.DType]] = {name: {} for name in scalers}

    def together(
        self, parts: Sequence[Part], turns: Sequence[tf.Tensor | bool], forward: Callable[[Any], Any], batch: Any
    ) -> dict[str, Taken]:
        """One forward pass, and the gradients of all parts; those of a part whose turn it is not mean nothing."""
        with tf.GradientTape(persistent=True) as tape:
            given = scaler.tracing.as_called(forward)(batch)
            losses = [self._loss(part, given) for part in parts]
            scaled = [
                self._scaled(part, turn, loss) for part, turn, (loss, _) in zip(parts, turns, losses, strict=True)
            ]
        return {
            part.name: self._taken(part, loss, tape, own, self._looks_again(part))
            for part, loss, own in zip(parts, losses, scaled, strict=True)
        }

    def in_turn(self, part: Part, batch: Any, before: scaler.Snapshot, turn: tf.Tensor | bool) -> Taken:
        """The pass of one part.

        Args:
            part: The part.
            batch: Given to its loss function.
            before: What the pass moves, as it is before.
            turn: Whether to take it; a tensor puts it into a branch.
        """
        looks_again = self._looks_again(part)

        def take() -> Taken:
            may_look_again = looks_again and turn is True
            with tf.GradientTape(persistent=may_look_again) as tape:
                loss = self._loss(part, batch)
                scaled = self._scaled(part, True, loss[0])
            return self._taken(part, loss, tape, scaled, may_look_again)

        @scaler.tracing.as_written
        def again(small: tf.Tensor) -> list:
            with tf.GradientTape() as tape:
                scaled = self._share(self._loss(part, batch)[0]) * loss_scale
            return tape.gradient(scaled, part.variables, output_gradients=small)

        if turn is True:
            return take()
        self._check_no_collectives(part)
        loss_scale, taken = self._scalers[part.name].loss_scale, taken_if(tf.convert_to_tensor(turn), take)
        # The tape of the pass is inside of the branch.
        return taken._replace(again=taken_again(again, before, None) if looks_again else None)

    def _loss(self, part: Part, given: Any) -> _Loss:
        """The loss of a part in float32, and the other scalars of its function."""
        loss, extra = loss_and_extra(scaler.tracing.as_called(part.loss_fn)(given), OWN)
        loss = tf.convert_to_tensor(loss)
        self._scalers[part.name].check_precision(loss, loss)
        loss = tf.cast(loss, tf.float32)
        for penalty in (one for model in part.models for one in getattr(model, "losses", ())):
            loss += tf.cast(penalty, tf.float32)
        extra = {name: tf.convert_to_tensor(value) for name, value in extra.items()}
        self.extra[part.name] = {name: value.dtype for name, value in extra.items()}
        return loss, extra

    def _scaled(self, part: Part, turn: tf.Tensor | bool, loss: tf.Tensor) -> tf.Tensor:
        share = self._share(loss)
        # The scaler would remember a loss that is not finite until it decides, which it does at the next turn.
        return self._scalers[part.name].scale(share if turn is True else tf.where(turn, share, 0.0))

    def _share(self, loss: tf.Tensor) -> tf.Tensor:
        """Of the mean over micro-batches and replicas, whose gradients are summed."""
        return loss / (self._accumulate * _replicas())

    def _taken(self, part: Part, loss: _Loss, tape: tf.GradientTape, scaled: tf.Tensor, may_look_again: bool) -> Taken:
        weights = part.variables
        grads = tape.gradient(scaled, weights)
        if all(grad is None for grad in grads):
            raise scaler.InvalidArgument(
                f"ComposedStep: part {part.name!r} gives no gradient: its loss depends on none of its variables. "
                "Compute it from its own model's predictions, without tf.stop_gradient or NumPy in between."
            )
        if self._accumulate == 1:  # A window checks that each micro-batch has the same gradients.
            self._scalers[part.name].check_connected(grads, weights)

        @scaler.tracing.as_written
        def again(small: tf.Tensor) -> list:
            return tape.gradient(scaled, weights, output_gradients=small)

        return Taken(*loss, grads, only_first(again) if may_look_again else None)

    def _looks_again(self, part: Part) -> bool:
        """Whether a second look at the gradients may tell why a part is skipped."""
        return self._accumulate == 1 and self._scalers[part.name].may_diagnose() and not self._meets()

    def _check_no_collectives(self, part: Part) -> None:
        if self._meets():
            raise scaler.InvalidArgument(
                f"ComposedStep: part {part.name!r} takes its turn at every {part.every}th call, and a "
                "BatchNormalization that synchronises its statistics over replicas cannot be left out of a call. Let "
                "the parts share one forward pass (forward=), or do without synchronized=True."
            )

    def _meets(self) -> bool:
        """Whether replicas wait for each other in a pass."""
        layers = [layer for model in self._models for layer in scaler.observe.layers_of(model)]
        return _replicas() > 1 and any(getattr(layer, "synchronized", False) for layer in layers)


def _replicas() -> int:
    return tf.distribute.get_strategy().num_replicas_in_sync
