"""Trainable variables as they were before a step, and what the step added to them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

import scaler

_KEEP_NOTHING = (scaler.weights.KahanWeights, scaler.weights.StochasticRounding)


class Before:
    """Trainable variables as they were before a step.

    Args:
        variables: The model's.
        masters: Their master weights, or None.
        read: Whether to keep their values.
        due: Whether this step is measured, scalar bool; None for always. The values of others are not kept.
    """

    def __init__(self, variables: list, masters: scaler.MasterWeights | None, read: bool, due: tf.Tensor | None):
        self.variables = variables
        self._updated = masters.weights if masters else variables
        self._own = [updated is variable for updated, variable in zip(self._updated, variables, strict=True)]

        def values() -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            values = [tf.identity(tf.convert_to_tensor(variable)) for variable in variables]
            kept = values if isinstance(masters, _KEEP_NOTHING) else self._updated
            pairs = zip(kept, values, strict=True)
            return values, [_start(tf.convert_to_tensor(one), value) for one, value in pairs]

        # Eagerly all is measured, also what is then thrown away.
        when = None if tf.executing_eagerly() else due
        self._kept = scaler.observe.if_due(when, values, fill=None) if read else ([], [])

    @property
    def values(self) -> list[tf.Tensor]:
        """The variables' values, at a step that is measured."""
        return self._shaped(self._kept[0])

    @property
    def start(self) -> list[tf.Tensor]:
        """What the step adds to, float32: the masters, where there are some."""
        return self._shaped(self._kept[1])

    def _shaped(self, kept: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        # At a step that is not measured there are no values, so a graph does not know their shape.
        pairs = zip(kept, self.variables, strict=True)
        return [one if one.shape == variable.shape else tf.reshape(one, variable.shape) for one, variable in pairs]

    def updates(self, applied: tf.Tensor) -> list[tf.Tensor]:
        """The step's change of each variable, float32; zeros if it was not applied."""
        after = [tf.cast(tf.convert_to_tensor(variable), tf.float32) for variable in self._updated]
        pairs = zip(after, self.start, strict=True)
        return [tf.where(applied, now - then, tf.zeros_like(then)) for now, then in pairs]

    def swallowed(self, updates: list[tf.Tensor], applied: tf.Tensor) -> tf.Tensor:
        """The share of each update that its variable's dtype rounds away, float32 [variables]; NaN if unknown."""
        shares = [
            tf.constant(float("nan")) if own else scaler.observe.swallowed_share(value, update)
            for own, value, update in zip(self._own, self.values, updates, strict=True)
        ]
        return tf.where(applied, tf.stack(shares), float("nan"))


def rms_by_layer(layers: Sequence[str], updates: Sequence[tf.Tensor], start: Sequence[tf.Tensor]) -> tf.Tensor:
    """For each layer the root mean square of its update, and its ratio to that of its weights: float32 [layers, 2].

    The ratio is infinite for weights that are all 0, as biases are at the start, and NaN for an update of 0 to them.

    Args:
        layers: The layer of each variable.
        updates: What was added to each, float32.
        start: What it was added to, float32.
    """
    found = []
    for layer in dict.fromkeys(layers):
        places = [place for place, own in enumerate(layers) if own == layer]
        size = float(sum(updates[place].shape.num_elements() for place in places))
        update, weight = (_sum_of_squares(values, places) for values in (updates, start))
        found.append([tf.sqrt(update / size), tf.sqrt(update / weight)])
    return tf.reshape(found, [len(found), 2])


def _sum_of_squares(values: Sequence[tf.Tensor], places: Sequence[int]) -> tf.Tensor:
    # l2_loss is half of it.
    return 2.0 * tf.add_n([tf.nn.l2_loss(values[place]) for place in places])


def _start(master: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """The value before the update, float32: the master, or a value assigned to the model since the last update."""
    kept = tf.equal(tf.saturate_cast(master, value.dtype), value)
    return tf.where(kept, tf.cast(master, tf.float32), tf.cast(value, tf.float32))
