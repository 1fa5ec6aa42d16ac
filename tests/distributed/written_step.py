"""The README's step written by hand for `strategy.run`, run from Python and in a `tf.range` loop."""

import keras
import models
import numpy as np
import replica_cases as cases
import tensorflow as tf

import scaler


class Written:
    """A step as a user writes it, on float16 variables with masters."""

    def __init__(self, strategy):
        self.strategy, self.replicas = strategy, strategy.num_replicas_in_sync
        with strategy.scope():
            self.model = models.stateful_model("float16")
            self.optimizer = keras.optimizers.Adam(0.01)
            self.loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10))
            self.masters = scaler.MasterWeights(self.model.trainable_variables)

    def train_step(self, x, y):
        before = scaler.snapshot(self.model.non_trainable_variables)
        with tf.GradientTape() as tape:
            loss = cases.squared_error(y, self.model(x, training=True)) / self.replicas
            scaled = self.loss_scaler.scale(loss)
        grads = tape.gradient(scaled, self.model.trainable_variables)
        return self.loss_scaler.apply(self.optimizer, grads, self.masters, clip_norm=1.0, rollback=before)

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
        def of(part):
            pieces = tf.split(part, self.replicas)
            return self.strategy.experimental_distribute_values_from_function(
                lambda context: pieces[context.replica_id_in_sync_group]
            )

        return tuple(of(part) for part in parts)

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

    def agreed(self):
        return [*self.model.trainable_variables, *self.masters.weights, *self.optimizer.variables]

    def moved(self):
        return [*self.agreed(), *self.model.non_trainable_variables]
