"""The README's step written by hand for `strategy.run`, run from Python and in a `tf.range` loop."""

import keras
import models
import numpy as np
import rigs
import tensorflow as tf
from mirrored import one_for_each

import scaler


class Written(rigs.Written):
    """A step as a user writes it, on float16 variables with masters."""

    def __init__(self, strategy):
        self.strategy, self.replicas = strategy, strategy.num_replicas_in_sync
        with strategy.scope():
            model, optimizer = models.stateful_model("float16"), keras.optimizers.Adam(0.01)
            loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10))
            super().__init__(model, optimizer, loss_scaler, 1.0 / self.replicas, clip_norm=1.0)

    def train_step(self, x, y):
        return self.take(x, y)[1]

    @tf.function
    def one(self, x, y):
        return self.strategy.run(self.train_step, args=self.shares(x, y))

    @tf.function
    def many(self, xs, ys):
        applied = tf.TensorArray(tf.bool, tf.shape(xs)[0])
        for number in tf.range(tf.shape(xs)[0]):
            outcome = self.strategy.run(self.train_step, args=self.shares(xs[number], ys[number]))
            applied = applied.write(number, self.strategy.experimental_local_results(outcome.finite)[0])
        return applied.stack()

    def shares(self, *parts):
        return tuple(one_for_each(self.strategy, tf.split(part, self.replicas)) for part in parts)

    def run(self, batches, in_graph):
        """Whether each of the batches was applied."""
        if in_graph:
            return self.many(*(np.stack(parts) for parts in zip(*batches, strict=True))).numpy().tolist()
        outcomes = [self.one(*map(tf.constant, one)) for one in batches]
        for outcome in outcomes:
            for field, value in outcome._asdict().items():
                own = [part.numpy().tobytes() for part in self.strategy.experimental_local_results(value)]
                assert len(set(own)) == 1, field
        return [bool(self.strategy.experimental_local_results(outcome.finite)[0]) for outcome in outcomes]
