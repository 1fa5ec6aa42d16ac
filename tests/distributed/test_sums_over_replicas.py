"""Gradients that are finite on each replica, but not when summed over them: every replica skips.

Guards against deciding before the reduction. Each of the values alone is applied, which the tests look at, too.
"""

import keras
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf
from mirrored import one_for_each
from ways import second_look

import scaler


def shares_of(strategy, values):
    return one_for_each(strategy, [tf.constant(value, tf.float32) for value in values])


class Given:
    """Applies gradients given for each replica to a variable [2] of ones, by SGD with a learning rate of 1."""

    def __init__(self, strategy, loss_scale, *, sparse=False, optimizer=None, **arguments):
        self.strategy, self.sparse, self.arguments = strategy, sparse, arguments
        with strategy.scope():
            self.variable = tf.Variable([1.0, 1.0])
            self.optimizer = optimizer or keras.optimizers.SGD(1.0)
            self.loss_scaler = scaler.LossScaler(scaler.Static(loss_scale))
        assert self.loss_scaler.loss_scale == loss_scale
        self.call = tf.function(lambda values: strategy.run(self.take, args=(values,)))

    def take(self, value):
        """What a replica does with its own gradient."""
        grad = tf.IndexedSlices(value, tf.constant([1]), tf.constant([2])) if self.sparse else value
        return self.loss_scaler.apply(self.optimizer, [grad], [self.variable], **self.arguments)

    def __call__(self, *values):
        """The outcome on replica 0 and the variable after it, for one gradient a replica."""
        self.variable.assign([1.0, 1.0])
        outcome = self.call(shares_of(self.strategy, values))
        outcome = tf.nest.map_structure(lambda x: self.strategy.experimental_local_results(x)[0], outcome)
        assert cases.agree([self.variable])
        return outcome, self.variable.numpy()


def test_scaled_gradients_overflow_in_the_sum():
    given = Given(cases.mirrored(2), 2.0**120)
    alone, moved = given([2e38, 0.0], [0.0, 2e38])
    assert bool(alone.finite)
    assert np.all(moved != 1.0)
    both, kept = given([2e38, 0.0], [2e38, 0.0])
    assert not bool(both.finite)
    assert int(both.cause) == scaler.Cause.OVERFLOW
    assert kept.tolist() == [1.0, 1.0]


@pytest.fixture(scope="module")
def unscaled():
    return Given(cases.mirrored(2), 1.0)


@second_look
def test_the_norm_overflows_in_the_sum(unscaled):
    """1.5e19 squared is 2.25e38; twice of it, squared, is beyond float32."""
    assert bool(unscaled([1.5e19, 0.0], [0.0, 0.0])[0].finite)
    both, kept = unscaled([1.5e19, 0.0], [1.5e19, 0.0])
    assert not bool(both.finite)
    assert int(both.cause) == scaler.Cause.TOO_LARGE
    assert kept.tolist() == [1.0, 1.0]


def test_infinities_that_cancel_do_not(unscaled):
    outcome, kept = unscaled([np.inf, 0.0], [-np.inf, 0.0])
    assert not bool(outcome.finite)
    assert bool(outcome.has_nan)
    assert kept.tolist() == [1.0, 1.0]


def test_one_index_on_two_replicas():
    """`tf.IndexedSlices` are put behind one another, so the same row of both is a duplicate index."""
    given = Given(cases.mirrored(2), 2.0**120, sparse=True)
    assert bool(given([2e38], [0.0])[0].finite)
    both, kept = given([2e38], [2e38])
    assert not bool(both.finite)
    assert kept.tolist() == [1.0, 1.0]


def test_clipping_is_of_the_sum():
    """Keras clips what each replica has, and then sums: 5 on each of 2 replicas would move by 2, and 5 - 4.5 by 0."""
    strategy = cases.mirrored(2)
    clips = ({"clip_norm": 1.0}, {"global_clipnorm": 1.0}, {"clipnorm": 1.0}, {"clipvalue": 1.0})
    with strategy.scope():
        sgd = [keras.optimizers.SGD(1.0, **({} if "clip_norm" in clip else clip)) for clip in clips]
    each = [
        Given(strategy, 1.0, optimizer=optimizer, **(clip if "clip_norm" in clip else {}))
        for clip, optimizer in zip(clips, sgd, strict=True)
    ]
    together = tf.function(lambda values: strategy.run(lambda value: [one.take(value) for one in each], args=(values,)))

    def moved(*values):
        for one in each:
            one.variable.assign([1.0, 1.0])
        together(shares_of(strategy, values))
        assert cases.agree([one.variable for one in each])
        return [one.variable.numpy() for one in each]

    assert moved([5.0, 0.25], [5.0, 0.25])[-1].tolist() == [0.0, 0.5]
    for values, expected in (
        (([5.0, 0.0], [5.0, 0.0]), [0.0, 1.0]),
        (([5.0, 0.0], [-4.5, 0.0]), [0.5, 1.0]),
        (([3.0, 0.0], [0.0, 4.0]), [0.4, 0.2]),
    ):
        np.testing.assert_allclose(moved(*values)[:3], [expected] * 3, rtol=0, atol=1e-6)


def test_float64_variables_beside_float32_ones():
    strategy = cases.mirrored(2)
    with strategy.scope():
        kinds = ("float64", "float32")
        weights = [tf.Variable(tf.zeros([size + 1], kind)) for size, kind in enumerate(kinds)]
        loss_scaler, optimizer = scaler.LossScaler(scaler.Static(4.0)), keras.optimizers.SGD(1.0)

    @tf.function
    def step():
        def replica():
            with tf.GradientTape() as tape:
                losses = [-tf.cast(tf.reduce_sum(weight) * 0.5, tf.float32) for weight in weights]
                scaled = loss_scaler.scale(tf.add_n(losses))
            return loss_scaler.apply(optimizer, tape.gradient(scaled, weights), weights).finite

        return strategy.run(replica)

    assert all(bool(part) for part in strategy.experimental_local_results(step()))
    for size, weight in enumerate(weights):
        np.testing.assert_array_equal(weight.numpy(), np.ones(size + 1))
