"""Fault 11: a gradient penalty, as of WGAN-GP: second-order gradients through scaled ones.

    inner scaled loss -> inner gradients -> unscale -> penalty -> loss -> scale -> gradients -> apply

Guards lines 1, 4 and 8 of the promise: for a power-of-two scale float32 steps equal unscaled ones; an inner overflow is
one skipped step.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from fault_cases import batches, run_in, spoil_gradient
from rigs import assert_finite, raw

import scaler


class Critic:
    """A small smooth network, its penalty on the gradient for the inputs, and Adam."""

    def __init__(self, mode, loss_scale, kind="float32"):
        keras.utils.set_random_seed(5)
        dense = functools.partial(keras.layers.Dense, dtype=kind)
        self.model = keras.Sequential([keras.Input([4], dtype=kind), dense(6, activation="tanh"), dense(1)])
        self.masters = scaler.MasterWeights(self.model.trainable_variables)
        self.optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        self.optimizer.build(self.masters.weights)
        self.loss_scaler = scaler.LossScaler(loss_scale and scaler.Dynamic(loss_scale))
        self.kind = kind
        self.run = run_in(mode, self._scaled if loss_scale else self._plain)

    def _loss(self, x, y, inner):
        norm = tf.sqrt(tf.reduce_sum(tf.square(inner), axis=1) + 1e-6)
        score = tf.reduce_mean(tf.cast(self.model(x), tf.float32) * y)
        return score + 10.0 * tf.reduce_mean(tf.square(norm - 1.0))

    def _scaled(self, x, y, factor):
        weights, x = self.model.trainable_variables, tf.cast(x, self.kind)
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner_tape:
                inner_tape.watch(x)
                prediction = spoil_gradient(tf.cast(self.model(x), tf.float32), factor)
                inner_scaled = self.loss_scaler.scale(tf.reduce_sum(prediction))
            inner = self.loss_scaler.unscale([inner_tape.gradient(inner_scaled, x)])[0]
            loss = self._loss(x, y, inner)
            scaled = self.loss_scaler.scale(loss)
        outcome = self.loss_scaler.apply(self.optimizer, tape.gradient(scaled, weights), self.masters)
        return {"loss": loss, "applied": outcome.finite, "cause": outcome.cause}

    def _plain(self, x, y, factor):
        del factor
        weights = self.model.trainable_variables
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner_tape:
                inner_tape.watch(x)
                total = tf.reduce_sum(self.model(x))
            loss = self._loss(x, y, inner_tape.gradient(total, x))
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}

    def variables(self):
        return [*self.model.variables, *self.masters.weights, *self.optimizer.variables]


@functools.cache
def unscaled():
    """The losses and weights of a run without any scaler, in eager mode.

    In some traces of TensorFlow 2.21 the same step gives other numbers.
    """
    plain = Critic("eager", None)
    losses = [output["loss"] for output in plain.run(batches(1, 2))]
    return losses, [variable.numpy() for variable in plain.model.variables]


@pytest.mark.parametrize("loss_scale", [2.0**-10, 2.0**15])
def test_a_scaled_penalty_equals_the_unscaled_one(loss_scale):
    scaled, (losses, weights) = Critic("eager", loss_scale), unscaled()
    outputs = scaled.run(batches(1, 2))
    assert all(output["applied"] for output in outputs)
    assert [output["loss"] for output in outputs] == losses
    for variable, weight in zip(scaled.model.variables, weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), weight)


def test_an_overflow_in_the_inner_pass_skips():
    critic = Critic("graph", 2.0**10, "float16")
    assert critic.run(batches(1))[0]["applied"]
    before = raw(critic.variables())
    for factor in (np.inf, np.nan, 1e37):
        x, y, _ = batches(2)[0]
        (output,) = critic.run([(x, y, np.float32(factor))])
        assert not output["applied"]
        # The penalty is not finite, but the loss that its gradients are of is: a lower scale may help.
        assert output["cause"] == scaler.Cause.OVERFLOW
    assert raw(critic.variables()) == before
    assert float(critic.loss_scaler.loss_scale) == 2.0**7
    (output,) = critic.run([(np.full_like(x, np.nan), y, np.float32(1))])
    assert output["cause"] == scaler.Cause.LOSS
    assert raw(critic.variables()) == before
    assert float(critic.loss_scaler.loss_scale) == 2.0**7
    assert int(critic.loss_scaler.counters.attempted) == 5
    assert critic.run(batches(3))[0]["applied"]
    assert_finite(critic.variables())
