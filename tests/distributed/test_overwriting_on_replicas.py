"""Guards new values in the place of gradients on several replicas: those of one device with the whole batch."""

import functools
import itertools

import keras
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf

import loops
import scaler

OUTLIER, RATE = 100.0, 2.0**-20


def data():
    """The outlier is in the second replica's share."""
    x = np.random.default_rng(0).uniform(-1, 1, (8, 4)).astype(np.float32)
    x[6, 0] = OUTLIER
    y = np.zeros([8, 2], np.float32)
    y[6] = 7.0
    return x, y


def quantized():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(3, name="first"), keras.layers.Dense(2, name="last")]
    )
    for layer in model.layers:
        layer.quantize("float8")
    return model


def by_train_step(strategy):
    with strategy.scope():
        model = quantized()
        step = loops.TrainStep(
            model,
            keras.losses.MeanSquaredError(),
            keras.optimizers.SGD(RATE),
            loss_scaler=scaler.LossScaler(scaler.Static(8.0)),
        )
    dataset = tf.data.Dataset.from_tensors(data()).unbatch().batch(8, drop_remainder=True).repeat()
    loops.Loop(step, dataset, strategy=strategy).run(3)
    return model


def by_fit(strategy):
    with strategy.scope():
        model = quantized()
        model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(RATE), scaler.Static(8.0)), loss="mse")
        scaler.protect(model)
    x, y = data()
    model.fit(np.tile(x, (3, 1)), np.tile(y, (3, 1)), batch_size=8, shuffle=False, verbose=0)
    return model


def new_values(model):
    return {
        one.path.partition("/")[2]: np.asarray(one) for one in model.trainable_variables if one.overwrite_with_gradient
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("trains", [by_train_step, by_fit])
def test_float8_on_two_replicas_is_that_of_one_device(trains):
    found, expected = (new_values(trains(one)) for one in (cases.mirrored(2), tf.distribute.get_strategy()))
    assert len(found) == 12
    assert found["first/inputs_amax_history"].max() == OUTLIER
    for path, values in found.items():
        np.testing.assert_allclose(values, expected[path], rtol=1e-6, err_msg=path)


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
