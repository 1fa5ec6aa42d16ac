"""Guards that regularization counts once for each weight of a `Part`, whatever models the weight is in."""

import keras
import pytest
import tensorflow as tf

import loops


def dense(units, **arguments):
    return keras.layers.Dense(units, kernel_initializer="ones", use_bias=False, **arguments)


def heads():
    """Two models over one regularized layer, whose penalty is 16."""
    shared = dense(4, kernel_regularizer=keras.regularizers.L2(1.0))
    models = [keras.Sequential([keras.Input([4]), shared, dense(units)]) for units in (1, 2)]
    for model in models:
        model.build([None, 4])
    return shared, models


GIVEN = {
    "two heads": lambda shared, one, two: [one, two],
    "a model and its layer": lambda shared, one, two: [one, shared],
    "one model": lambda shared, one, two: one,
    "a layer": lambda shared, one, two: shared,
}


@pytest.mark.parametrize(("given", "mode"), [*((given, "eager") for given in GIVEN), ("two heads", "graph")])
def test_each_weight_is_regularized_once(given, mode):
    shared, (one, two) = heads()

    def loss_fn(x):
        return 0.0 * (tf.reduce_sum(one(x)) + tf.reduce_sum(two(x)))

    step = loops.ComposedStep([loops.Part("both", GIVEN[given](shared, one, two), loss_fn, keras.optimizers.SGD(0.01))])
    outputs = (step if mode == "eager" else tf.function(step))(tf.ones([2, 4]))
    assert float(outputs["both/loss"]) == 16.0
    # The slope of the penalty is 2.
    assert abs(float(shared.kernel[0, 0]) - 0.98) < 1e-6
