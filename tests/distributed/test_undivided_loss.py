"""Guards losses on replicas that certainly are not what a step takes them for: it is said once, while it is traced."""

import warnings

import keras
import pytest
import tensorflow as tf
from mirrored import mirrored

import loops
import scaler

WAYS = {
    "a mean": (lambda y, p: tf.reduce_mean((y - p) ** 2), True),
    "two means": (lambda y, p: tf.reduce_mean((y - p) ** 2) + tf.reduce_mean(tf.abs(p)), True),
    "a mean of what was divided": (lambda y, p: tf.reduce_mean((y - p) ** 2 / 2.0), False),
    "a mean of losses of Keras": (lambda y, p: tf.reduce_mean([keras.losses.MeanSquaredError()(y, p)]), False),
    "a mean, divided": (lambda y, p: tf.reduce_mean((y - p) ** 2) / 2.0, False),
    "a sum over the global batch": (lambda y, p: tf.reduce_sum((y - p) ** 2) / 8.0, False),
    "a loss of Keras": (lambda y, p: keras.losses.MeanSquaredError()(y, p), False),
}


def said_of(step):
    """What is said while a step is traced on two replicas."""
    batch = tf.ones((8, 4)), tf.ones((8, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tf.function(lambda: mirrored(2).run(step, (batch,))).get_concrete_function()
    return [str(one.message) for one in caught if issubclass(one.category, scaler.ScaleWarning)]


@pytest.mark.parametrize("way", WAYS)
def test_a_mean_that_nothing_divides_is_told(way, snapshot):
    """By the optimizer of Keras that a step of `fit` uses, whose gradients are added."""
    loss_fn, told = WAYS[way]
    with mirrored(2).scope():
        weight, optimizer = tf.Variable(1.0), scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build([weight])
    said = said_of(lambda batch: optimizer.scale_loss(loss_fn(batch[1], batch[0] * weight)))
    assert len(said) == told
    assert not told or said == snapshot


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda y, p: tf.reduce_sum((y - p) ** 2), True),
        (lambda y, p: tf.reduce_sum(tf.reduce_mean((y - p) ** 2, 0)), False),
    ],
    ids=["a sum", "a sum of means"],
)
def test_a_step_that_divides_tells_of_a_sum(loss, told, snapshot):
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        step = loops.TrainStep(model, loss, keras.optimizers.SGD(0.1))
    said = said_of(step)
    assert len(said) == told
    assert not told or said == snapshot
