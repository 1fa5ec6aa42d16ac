"""A variable may be given more than one gradient, as where two losses share it: they are added."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import scaler

DENSE = tf.constant([[1.0, 2.0], [0.0, 0.0], [3.0, 0.0]])
SLICES = tf.IndexedSlices(tf.constant([[10.0, 0.0], [20.0, 0.0]]), tf.constant([2, 2], tf.int64), tf.constant([3, 2]))
OTHER = tf.IndexedSlices(tf.constant([[0.5, 0.5]]), tf.constant([1], tf.int32), None)


def as_array(grad):
    if isinstance(grad, tf.IndexedSlices):
        dense = np.zeros([3, 2], np.float32)
        np.add.at(dense, grad.indices.numpy(), grad.values.numpy())
        return dense
    return np.zeros([3, 2], np.float32) if grad is None else grad.numpy()


@pytest.mark.parametrize(
    ("built", "dtype", "steps"),
    [(False, "float16", None), (True, "float32", 2)],
    ids=["plain, in float16", "accumulated, in float32"],
)
@pytest.mark.parametrize(
    "grads",
    [(DENSE, DENSE), (SLICES, OTHER), (DENSE, SLICES), (OTHER, DENSE), (None, DENSE), (DENSE, None), (SLICES,) * 3],
    ids=["dense", "slices", "mixed", "mixed too", "none first", "none last", "three"],
)
def test_all_of_them_are_added(grads, built, dtype, steps):
    variable = keras.Variable(np.zeros([3, 2]), dtype=dtype)
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=steps)
    optimizer = scaler.LossScaleOptimizer(inner, scaler.Static(1.0))
    if built:
        optimizer.build([variable])
    for _ in range(steps or 1):
        optimizer.apply(list(grads), [variable] * len(grads))
    np.testing.assert_array_equal(np.asarray(variable), -sum(map(as_array, grads)))
    assert int(inner.iterations) == 1


def test_their_sum_is_taken_in_float32():
    variable = keras.Variable(np.zeros(1), dtype="float16")
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0), scaler.Static(1024.0))
    large, scale = tf.constant([60000.0], tf.float16), float(optimizer.loss_scale)
    optimizer.apply([large, large], [variable, variable])
    np.testing.assert_allclose(np.asarray(variable), [-2 * 60000.0 / scale], rtol=1e-3)
    assert optimizer.loss_scaler.counters.skipped == 0


def test_one_that_is_not_finite_is_not_lost_in_the_sum():
    variable = keras.Variable(np.zeros(1), dtype="float32")
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0), scaler.Static(1.0))
    for grads in ([[np.inf], [-np.inf]], [[np.nan], [1.0]]):
        assert not optimizer.apply([tf.constant(grad) for grad in grads], [variable] * 2).finite
    np.testing.assert_array_equal(np.asarray(variable), [0.0])


def test_two_new_values_for_one_variable_are_refused():
    variable = tf.Variable([1.0])
    variable.overwrite_with_gradient = True
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0), scaler.Static(1.0))
    with pytest.raises(scaler.InvalidArgument, match=r"2 new values for variable .* expected one"):
        optimizer.apply([tf.constant([2.0]), tf.constant([3.0])], [variable] * 2)
