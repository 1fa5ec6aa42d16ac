"""Guards a step of `fit` on replicas whose loss is a mean that nothing divides by their number: it is said once."""

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


@pytest.mark.slow_with("two means", "a sum over the global batch", "a mean of losses of Keras")
@pytest.mark.parametrize("way", WAYS)
def test_a_mean_that_nothing_divides_is_told(way):
    loss_fn, told = WAYS[way]

    class Model(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                scaled = self.optimizer.scale_loss(loss_fn(y, self(x, training=True)))
            self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
            return {"loss": 0.0}

    with mirrored(2).scope():
        model = Model([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(tf.ones((8, 4)), tf.ones((8, 1)), batch_size=8, epochs=1, verbose=0)
    said = [str(one.message) for one in caught if issubclass(one.category, scaler.ScaleWarning)]
    assert len(said) == told
    assert all("2 replicas are added, and nothing divides this mean" in one for one in said)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda y, p: tf.reduce_sum((y - p) ** 2), True),
        (lambda y, p: tf.reduce_sum(tf.reduce_mean((y - p) ** 2, 0)), False),
        pytest.param(lambda y, p: tf.reduce_mean((y - p) ** 2), False, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_divides_tells_of_a_sum(loss, told):
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        step = loops.TrainStep(model, loss, keras.optimizers.SGD(0.1))
    run = tf.function(lambda: strategy.run(step, ((tf.ones((8, 4)), tf.ones((8, 1))),)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert ["a sum over examples" in str(one.message) for one in caught] == [True] * told
