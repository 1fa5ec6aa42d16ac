"""The forward and backward pass of the parts of a `ComposedStep`.

The own losses of models and layers: weight regularisation, and what layers add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.replica_losses import as_loss
from loops.step.again import Differentiate, only_first, repeated
from loops.step.composed_outputs import OWN
from loops.step.loss_result import read_loss
from loops.step.part_probes import Look, PartProbes
from loops.step.parts import Part
from loops.step.probing import OUTPUTS as PROBED
from loops.step.turns import Taken, taken_if
from loops.support.errors import BadOutputs

_Loss = tuple[tf.Tensor, dict[str, tf.Tensor]]


class PartPasses:
    """Takes the passes of parts.

    Args:
        scalers: The loss scaler of each part, by name.
        models: All that the parts may call.
        accumulate: Micro-batches per step.
        retry: Whether a backward pass that overflows is repeated.
        probes: What measures the passes.

    Attributes:
        extra: For each part the dtypes of the scalars that its loss function added when it was traced last.
    """

    def __init__(
        self,
        scalers: Mapping[str, scaler.LossScaler],
        models: Sequence[keras.layers.Layer],
        accumulate: int,
        retry: bool,
        probes: PartProbes,
    ):
        self._probes = probes
        self._scalers, self._models, self._accumulate, self._retry = scalers, models, accumulate, retry
        self.extra: dict[str, dict[str, tf.DType]] = {name: {} for name in scalers}

    def together(
        self,
        parts: Sequence[Part],
        turns: Sequence[tf.Tensor | bool],
        forward: Callable[[Any], Any],
        batch: Any,
        looks: Mapping[str, Look],
    ) -> dict[str, Taken]:
        """One forward pass, and the gradients of all parts; those of a part whose turn it is not mean nothing."""
        with tf.GradientTape(persistent=True) as tape, self._probes.forward(parts) as probed:
            given = as_loss(forward)(batch)
            losses = [self._loss(part, given) for part in parts]
            scaled = [
                self._scaled(part, turn, loss) for part, turn, (loss, _) in zip(parts, turns, losses, strict=True)
            ]
        return {
            part.name: self._taken(
                part, loss, tape, own, self._may_retry, probed.get(part.name), _due(looks.get(part.name))
            )
            for part, loss, own in zip(parts, losses, scaled, strict=True)
        }

    def again_together(
        self, parts: Sequence[Part], own: Sequence[Part], forward: Callable[[Any], Any], batch: Any
    ) -> Differentiate | None:
        """From an output gradient to the gradients of some parts, with a forward pass as the one that is taken next.

        Args:
            parts: All that share the pass.
            own: Those whose gradients are wanted, with one scaler.
            forward: The pass.
            batch: Given to it.

        Returns:
            The function; None if it is not asked for, or the pass cannot be repeated.
        """
        if not self._may_retry:
            return None
        loss_scale = self._scalers[own[0].name].loss_scale

        @scaler.authoring.no_autograph
        def again(small: tf.Tensor) -> list:
            with tf.GradientTape(persistent=True) as tape:
                given = as_loss(forward)(batch)
                # Also those of the others: where several loss functions call one Dropout, each moves its seed.
                losses = [(part, self._loss(part, given)[0]) for part in parts]
                scaled = [(part, self._share(loss) * loss_scale) for part, loss in losses if part in own]
            found = [tape.gradient(loss, part.variables, output_gradients=small) for part, loss in scaled]
            return [grad for grads in found for grad in grads]

        return repeated(again)

    def again_in_turn(self, part: Part, batch: Any) -> Differentiate | None:
        """The same of a part that takes its turn."""
        if not self._may_retry:
            return None
        loss_scale = self._scalers[part.name].loss_scale

        @scaler.authoring.no_autograph
        def again(small: tf.Tensor) -> list:
            with tf.GradientTape() as tape:
                scaled = self._share(self._loss(part, batch)[0]) * loss_scale
            return tape.gradient(scaled, part.variables, output_gradients=small)

        return repeated(again)

    def in_turn(
        self, part: Part, batch: Any, turn: tf.Tensor | bool, again: Differentiate | None, look: Look | None
    ) -> Taken:
        """The pass of one part.

        Args:
            part: The part.
            batch: Given to its loss function.
            turn: Whether to take it; a tensor puts it into a branch.
            again: From `again_in_turn`.
            look: What is known of its probes; None without any.
        """

        def take() -> Taken:
            may_look_again = self._may_retry and turn is True
            with tf.GradientTape(persistent=may_look_again) as tape, self._probes.forward([part]) as probed:
                loss = self._loss(part, batch)
                scaled = self._scaled(part, True, loss[0])
            # Of a branch that is taken the turn needs no second look.
            due = None if look is None else look.at_its_turn
            return self._taken(part, loss, tape, scaled, may_look_again, probed.get(part.name), due)

        if turn is True:
            return take()
        self._check_no_collectives(part)
        # The tape of the pass is inside of the branch.
        return taken_if(tf.convert_to_tensor(turn), take)._replace(again=again)

    def _loss(self, part: Part, given: Any) -> _Loss:
        """The loss of a part in float32, and the other scalars of its function."""
        taken = (*OWN, *(PROBED if part.name in self._probes.probing else ()))
        found = read_loss(as_loss(part.loss_fn)(given), taken)
        if found.weight is not None:
            raise BadOutputs(
                f"ComposedStep: the loss function of part {part.name!r} returned a WeightedLoss, which only a "
                "TrainStep takes: return a scalar, the mean over the batch."
            )
        loss, extra = tf.convert_to_tensor(found.mean), found.extra
        scaler.authoring.check_precision(self._scalers[part.name], loss, loss)
        loss = tf.cast(loss, tf.float32)
        for penalty in penalties(part.models):
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

    def _taken(
        self,
        part: Part,
        loss: _Loss,
        tape: tf.GradientTape,
        scaled: tf.Tensor,
        may_look_again: bool,
        probed: scaler.observe.Collection | None,
        due: tf.Tensor | None,
    ) -> Taken:
        weights = part.variables
        if probed is not None:
            # Of a shared pass it has also seen the gradients of the losses of other parts.
            probed.forget_gradients()
        grads = tape.gradient(scaled, weights)
        if all(grad is None for grad in grads):
            raise scaler.InvalidArgument(
                f"ComposedStep: part {part.name!r} gives no gradient: its loss depends on none of its variables. "
                "Compute it from its own model's predictions, without tf.stop_gradient or NumPy in between."
            )
        seen = self._probes.measured(part, probed, due)
        if self._accumulate == 1:  # A window checks that each micro-batch has the same gradients.
            scaler.authoring.check_connected(self._scalers[part.name], grads, weights)

        @scaler.authoring.no_autograph
        def again(small: tf.Tensor) -> list:
            return tape.gradient(scaled, weights, output_gradients=small)

        return Taken(*loss, grads, only_first(again) if may_look_again else None, seen)

    @property
    def _may_retry(self) -> bool:
        """Whether gradients may be taken again."""
        return self._retry and not self._meets()

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


def _due(look: Look | None) -> tf.Tensor | None:
    return None if look is None else look.due


def _replicas() -> int:
    return tf.distribute.get_strategy().num_replicas_in_sync


def penalties(models: Sequence[keras.layers.Layer]) -> list[tf.Tensor]:
    """The own losses of several models, each once: those of a layer that several of them share, too.

    Args:
        models: Models and layers, of which one may be in another.
    """
    inside = [id(layer) for model in models for layer in scaler.observe.layers_of(model)]
    if len(set(inside)) == len(inside):
        return [loss for model in models for loss in model.losses]
    # Keras counts the layers and the weights in a layer once.
    around = keras.layers.Layer(name="around")
    around.models = list(models)
    return around.losses
