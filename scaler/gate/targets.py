"""What one step moves: for each optimizer its variables, and the 16-bit model behind masters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.variables import choose
from scaler.gate import proofs
from scaler.gate.optimizers import (
    Optimizer,
    as_called_by_the_gate,
    move_nothing,
    name_of,
    variables_of,
    waits_for_values,
)
from scaler.gate.shares import Share
from scaler.gradients import statistics
from scaler.gradients.clipping import Clipping, clipping_of
from scaler.outcome.skip_sentence import Named
from scaler.weights.masters import MasterWeights


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a step that one optimizer moves.

    Attributes:
        optimizer: A Keras optimizer or a function `(grads, variables) -> None`.
        built_for: The float32 or float64 variables the optimizer is built for, also those that have no gradient.
        positions: Where each updated variable stands in `built_for`, one for each gradient.
        masters: They are rounded into the model after an update; None if the model is float32.
        clip: How its unscaled gradients are limited, or None.
        proven: The learning rate up to which the update is proven to keep finite values finite, or None.
    """

    optimizer: Optimizer
    built_for: Sequence
    positions: Sequence[int]
    masters: MasterWeights | None = None
    clip: Clipping | None = None
    proven: float | None = None

    @classmethod
    def of(cls, share: Share, sum_duplicates: bool) -> Part:
        """The part that a share asks for.

        Args:
            share: What its optimizer takes.
            sum_duplicates: Whether the optimizer is given the sum of an index's duplicates.
        """
        optimizer, weights, positions = as_called_by_the_gate(share.optimizer), share.weights, share.positions
        if waits_for_values(optimizer, weights):
            optimizer = move_nothing
        proven = proofs.largest_learning_rate(optimizer, [weights[at] for at in positions], sum_duplicates)
        clip = clipping_of(share.clip_norm, share.clip)
        return cls(optimizer, weights, positions, share.masters, clip, proven)

    @functools.cached_property
    def updated(self) -> list:
        """The variables to update, one for each gradient."""
        return [self.built_for[position] for position in self.positions]

    @property
    def own_values(self) -> list:
        """The optimizer's own variables that have to stay finite."""
        own = variables_of(self.optimizer)
        return [variable for variable in own if replicas.native(variable).dtype.is_floating]

    def named(self) -> Named:
        """What sentences call the optimizer, its variables and its own values."""
        known, own = ([getattr(one, "path", one.name) for one in these] for these in (self.built_for, self.own_values))
        return Named(name_of(self.optimizer), tuple(known), tuple(own))

    @property
    def movable(self) -> list:
        """Every variable that the update may assign."""
        model = (*self.masters.model_variables, *self.masters.variables) if self.masters else ()
        return [*self.built_for, *variables_of(self.optimizer), *model]


@dataclasses.dataclass(frozen=True)
class Targets:
    """All that one decision is about: mostly one part, several with `apply_together`.

    A gradient is the derivative of the loss by its variable, or the variable's new value: see `gradients.overwrites`.

    Attributes:
        parts: Their variables and gradients follow each other.
    """

    parts: Sequence[Part]

    @functools.cached_property
    def built_for(self) -> list:
        """The variables of all parts."""
        return [variable for part in self.parts for variable in part.built_for]

    @functools.cached_property
    def positions(self) -> list[int]:
        """Where each updated variable stands in `built_for`, one for each gradient."""
        found, first = [], 0
        for part in self.parts:
            found += [first + position for position in part.positions]
            first += len(part.built_for)
        return found

    @functools.cached_property
    def updated(self) -> list:
        """The variables to update, one for each gradient."""
        return [self.built_for[position] for position in self.positions]

    @functools.cached_property
    def takes_derivative(self) -> list[bool]:
        """For each gradient whether it is a derivative of the loss."""
        return [not gradients.overwrites(variable) for variable in self.updated]

    def split(self, values: Any) -> list[Any]:
        """What belongs to each part of a list or a tensor with an entry for each gradient."""
        if len(self.parts) == 1:
            return [values]
        found, first = [], 0
        for part in self.parts:
            found.append(values[first : first + len(part.positions)])
            first += len(part.positions)
        return found

    def derivatives(self, grads: Sequence) -> list:
        """Those of the gradients that are derivatives of the loss."""
        return [grad for grad, derivative in zip(grads, self.takes_derivative, strict=True) if derivative]

    def squared_norms(self, grads: Sequence, loss_scale: tf.Tensor, may_branch: bool) -> tf.Tensor:
        """The squared norm of each unscaled gradient, float32 or float64 [n].

        A new value counts as 0, or infinity if not finite.

        Args:
            grads: Scaled gradients without duplicate indices, of any floating dtype.
            loss_scale: Scalar float32, what the derivatives among them are scaled by.
            may_branch: Whether a second measurement may stand in a branch.
        """
        if all(self.takes_derivative):
            return statistics.squared_norms(grads, loss_scale, may_branch)
        derivatives = self.derivatives(grads)
        squares = statistics.squared_norms(derivatives, loss_scale, may_branch) if derivatives else tf.zeros([0])
        measured, pairs = iter(tf.unstack(squares)), zip(grads, self.takes_derivative, strict=True)

        def one(grad: tf.Tensor | tf.IndexedSlices, derivative: bool) -> tf.Tensor:
            if derivative:
                return next(measured)
            finite = tf.reduce_all(tf.math.is_finite(gradients.values_of(grad)))
            return tf.cast(choose(finite, 0.0, float("inf")), squares.dtype)

        return tf.stack([one(*pair) for pair in pairs])
