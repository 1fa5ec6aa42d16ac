"""Guards the gate on two replicas: one decision, of the sum of all gradients, taken once.

The smallest tests that go red when one of these guards is taken out; `tests/distributed` has the large ones.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored, one_for_each

import scaler

SCALE = 4.0


class Pair:
    """One weight on two replicas, and a compiled step that is given each replica's loss factor."""

    def __init__(self, clip_norm=None):
        self.strategy = mirrored(2)
        with self.strategy.scope():
            self.weight = tf.Variable([1.0, 1.0])
            self.optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
            self.optimizer.build([self.weight])
            self.loss_scaler = scaler.LossScaler(scaler.Static(SCALE))
        self.clip_norm = clip_norm
        self.run = tf.function(self._run)

    def _step(self, slope, loss):
        self.loss_scaler.scale(loss)
        grads = [slope * SCALE * tf.constant([1.0, 0.0])]
        return self.loss_scaler.apply(self.optimizer, grads, [self.weight], clip_norm=self.clip_norm)

    def _run(self, slopes, losses):
        return self.strategy.run(self._step, args=[one_for_each(self.strategy, each) for each in (slopes, losses)])

    def __call__(self, slopes, losses=(1.0, 1.0)):
        """The outcome, each field of which has to be the same on both replicas."""
        outcome = self.run(tf.constant(slopes), tf.constant(losses))
        fields = [self.strategy.experimental_local_results(value) for value in outcome]
        for values in fields:
            np.testing.assert_array_equal(values[0], values[-1])
        return scaler.Outcome(*(values[0] for values in fields))

    def weights(self):
        """The weight on each replica."""
        return [value.numpy()[0] for value in self.strategy.experimental_local_results(self.weight)]


@pytest.fixture(scope="module")
def pair():
    return Pair()


@pytest.fixture(autouse=True)
def _start(pair):
    pair.weight.assign([1.0, 1.0])
    for slot in pair.optimizer.variables:
        if slot is not pair.optimizer.learning_rate:
            slot.assign(tf.zeros_like(slot))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("replica", [0, 1])
def test_an_overflow_on_either_replica_skips_both(pair, replica, bad):
    slopes = [0.25, 0.25]
    slopes[replica] = bad
    assert not pair(slopes).finite
    assert pair.weights() == [1.0, 1.0]
    assert pair.optimizer.iterations.numpy() == 0


@pytest.mark.parametrize(("slopes", "finite"), [([1.5e19, 1.5e19], False), ([1.5e19, -1.5e19], True)])
def test_what_counts_is_the_sum(pair, slopes, finite):
    # The squares of each fit float32; those of the sum do not.
    assert bool(pair(slopes).finite) == finite
    assert pair.weights() == [1.0, 1.0]


def test_the_sum_moves_both_replicas_once(pair):
    outcome = pair([0.25, 0.5])
    assert outcome.finite
    assert outcome.grad_norm.numpy() == 0.75
    assert pair.weights() == [0.25, 0.25]
    assert pair.optimizer.iterations.numpy() == 1


@pytest.mark.slow
def test_the_sum_is_clipped_not_the_parts(pair):
    clipped = Pair(clip_norm=1.0)
    assert clipped([1.0, 3.0]).grad_norm.numpy() == 4.0
    assert clipped.weights() == [0.0, 0.0]
    assert clipped([4.0, -3.5]).grad_norm.numpy() == 0.5
    # Momentum 0.5 of the step before, and a gradient below the limit.
    assert clipped.weights() == [-1.0, -1.0]


@pytest.mark.parametrize("replica", [0, 1])
def test_a_bad_loss_on_either_replica_is_the_cause(pair, replica):
    losses = [1.0, 1.0]
    losses[replica] = np.inf
    assert int(pair([np.nan, np.nan], losses).cause) == scaler.Cause.LOSS
    assert int(pair([np.nan, np.nan]).cause) == scaler.Cause.OVERFLOW
