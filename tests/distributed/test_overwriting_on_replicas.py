"""Guards new values in the place of gradients on several replicas: those of one device with the whole batch."""

import functools
import itertools

import keras
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf

import scaler


@pytest.mark.slow_with("2-eager", "3-graph")
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("count", [2, 3])
def test_the_largest_value_counts_element_by_element(mode, count):
    values = np.random.default_rng(1).normal(0, 5, (count, 7)).astype(np.float32)
    values[:, 0] = -np.arange(1, count + 1)  # No zero stands beside them.
    values[:, 1] = 1 / 3  # Of which a mean of three would lose the last bit.
    values[:, 2] = 2.0**127
    finite, kept, _ = stepping(count, mode)(values)
    assert finite
    np.testing.assert_array_equal(kept, values.max(axis=0))


@pytest.mark.slow_with("eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_new_value_that_is_not_finite_on_any_replica_skips_the_step(mode):
    for at, fault in itertools.product((0, 1), (np.nan, np.inf, -np.inf)):
        values = np.ones([2, 7], np.float32)
        values[at, 3] = fault
        finite, kept, replica = stepping(2, mode)(values)
        assert not finite
        assert replica == at
        np.testing.assert_array_equal(kept, np.zeros(7))


@pytest.mark.slow_with("eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_unscale_divides_on_each_replica_is_taken_back(mode):
    values = np.float32([[0.1] * 7, [0.7] * 7])
    finite, kept, _ = stepping(2, mode, unscales=True)(values)
    assert finite
    np.testing.assert_array_equal(kept, values[1])


@functools.cache
def stepping(replicas, mode, unscales=False):
    """A step on all replicas: from the new value of each to whether it counted, the value then, who is to blame."""
    strategy = cases.mirrored(replicas)
    with strategy.scope():
        weight, own = keras.Variable(tf.ones([7])), keras.Variable(tf.zeros([7]))  # Of one shape, as if to be joined.
        own.overwrite_with_gradient = True
        optimizer, loss_scaler = keras.optimizers.SGD(1.0), scaler.LossScaler(scaler.Static(3.0 if unscales else 8.0))

    def step(values):
        def replica():
            loss_scaler.scale(tf.constant(1.0))
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            grads = [tf.ones([7]), tf.gather(values, number)]
            grads = loss_scaler.unscale(grads) if unscales else grads
            return loss_scaler.apply(optimizer, grads, [weight, own], unscaled=unscales)

        return strategy.run(replica)

    run = step if mode == "eager" else tf.function(step)

    def take(values):
        own.assign(tf.zeros([7]))
        outcome = run(tf.constant(values))
        first = tf.nest.map_structure(lambda one: strategy.experimental_local_results(one)[0], outcome)
        parts = [part.numpy() for part in own.value.values]
        assert all((part == parts[0]).all() for part in parts)
        return bool(first.finite), parts[0], int(first.replica)

    return take
