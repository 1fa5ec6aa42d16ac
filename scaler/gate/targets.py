"""What one step moves: float32 variables, the optimizer that moves them, and the 16-bit model behind masters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.gate.optimizers import Optimizer, variables_of
from scaler.gradients import measurement
from scaler.weights.masters import MasterWeights


@dataclasses.dataclass(frozen=True)
class Targets:
    """The variables of one step.

    A gradient is the derivative of the loss by its variable, or the variable's new value: see `gradients.overwrites`.

    Attributes:
        optimizer: A Keras optimizer or a function `(grads, variables) -> None`.
        known: The float32 or float64 variables the optimizer is built for, also those that have no gradient.
        positions: Where each updated variable stands in `known`, one for each gradient.
        masters: They are rounded into the model after an update; None if the model is float32.
    """

    optimizer: Optimizer
    known: Sequence
    positions: Sequence[int]
    masters: MasterWeights | None

    @property
    def updated(self) -> list:
        """The variables to update, one for each gradient."""
        return [self.known[position] for position in self.positions]

    @property
    def own_values(self) -> list:
        """The optimizer's own variables that have to stay finite."""
        own = variables_of(self.optimizer)
        return [variable for variable in own if replicas.native(variable).dtype.is_floating]

    def paths(self) -> tuple[list[str], list[str]]:
        """The names of the known variables, and those of `own_values`."""
        known, own = ([getattr(one, "path", one.name) for one in these] for these in (self.known, self.own_values))
        return known, own

    @property
    def takes_derivative(self) -> list[bool]:
        """For each gradient whether it is a derivative of the loss."""
        return [not gradients.overwrites(variable) for variable in self.updated]

    def derivatives(self, grads: Sequence) -> list:
        """Those of the gradients that are derivatives of the loss."""
        return [grad for grad, derivative in zip(grads, self.takes_derivative, strict=True) if derivative]

    def squared_norms(self, grads: Sequence, loss_scale: tf.Tensor, may_branch: bool) -> tf.Tensor:
        """The squared norm of each unscaled gradient, float32 or float64 [n].

        A new value counts as 0, or infinity if not finite.

        Args:
            grads: Scaled gradients without duplicate indices, of any floating dtype.
            loss_scale: Scalar float32, what the derivatives among them are scaled by.
            may_branch: As for `measurement.squared_norms`.
        """
        if all(self.takes_derivative):
            return measurement.squared_norms(grads, loss_scale, may_branch)
        derivatives = self.derivatives(grads)
        squares = measurement.squared_norms(derivatives, loss_scale, may_branch) if derivatives else tf.zeros([0])
        measured, pairs = iter(tf.unstack(squares)), zip(grads, self.takes_derivative, strict=True)

        def one(grad: tf.Tensor | tf.IndexedSlices, derivative: bool) -> tf.Tensor:
            return next(measured) if derivative else tf.cast(_zero_if_finite(grad), squares.dtype)

        return tf.stack([one(*pair) for pair in pairs])


@contextlib.contextmanager
def model_follows(masters: MasterWeights | None, weights: Sequence | None = None) -> Iterator[None]:
    """Surrounds an update: masters first take over what was assigned to the model, and are rounded into it last.

    Args:
        masters: None if the model itself is updated.
        weights: Those of the masters that the update moves; all if not given.
    """
    if masters:
        masters.refresh(weights)
    yield
    if masters:
        masters.write(weights)


def _zero_if_finite(grad: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    return tf.where(tf.reduce_all(tf.math.is_finite(gradients.values_of(grad))), 0.0, float("inf"))
