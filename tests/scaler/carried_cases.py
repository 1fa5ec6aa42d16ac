"""Two losses, a weight for each, and one scaler whose scale doubles at every step: which of its scales is whose?

The true gradients are -1, and a descent by them moves a weight by 1: by 1/2 or 2 if the scale was another one.
"""

import keras
import tensorflow as tf
from ways import graph

import scaler

GROWS = scaler.Dynamic(2.0**10, growth_interval=1)


class Two:
    """The methods named in `functions` are a `tf.function` each."""

    def __init__(self, strategy=GROWS, functions=()):
        # What a step selects is traced in half the time of what it branches to.
        self.loss_scaler = scaler.LossScaler(strategy, select=True)
        self.weights = [tf.Variable([0.0], name=name) for name in ("first", "second")]
        self.optimizers = [keras.optimizers.SGD(1.0) for _ in self.weights]
        for optimizer, weight in zip(self.optimizers, self.weights, strict=True):
            optimizer.build([weight])
        for name in functions:
            setattr(self, name, graph(getattr(self, name)))

    def gradients(self, which, weight=1.0):
        """The gradient of a loss that is scaled now."""
        with tf.GradientTape() as tape:
            scaled = self.loss_scaler.scale(-tf.reduce_sum(self.weights[which]) * weight)
        return tape.gradient(scaled, [self.weights[which]])

    def first(self):
        return self.gradients(0)

    def second(self):
        return self.gradients(1)

    def apply(self, which, grads, **options):
        return self.loss_scaler.apply(self.optimizers[which], grads, [self.weights[which]], **options)

    def other_step(self):
        self.apply(1, self.gradients(1))

    def moves(self, between):
        """The scale moves: by an `update`, or by an `apply` of another loss."""
        self.loss_scaler.update(scaler.Event(tf.constant(True))) if between == "update" else self.other_step()

    def moved(self):
        return [float(weight[0]) for weight in self.weights]
