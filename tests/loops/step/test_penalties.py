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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (lambda shared, one, two: [one, two], 16.0),
        (lambda shared, one, two: [one, shared], 16.0),
        (lambda shared, one, two: one, 16.0),
        (lambda shared, one, two: shared, 16.0),
    ],
    ids=["two heads", "a model and its layer", "one model", "a layer"],
)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_each_weight_is_regularized_once(given, expected, mode):
    shared, (one, two) = heads()
    models = given(shared, one, two)

    def loss_fn(x):
        return 0.0 * (tf.reduce_sum(one(x)) + tf.reduce_sum(two(x)))

    part = loops.Part("both", models, loss_fn, keras.optimizers.SGD(0.01))
    step = loops.ComposedStep([part])
    outputs = (step if mode == "eager" else tf.function(step))(tf.ones([2, 4]))
    assert float(outputs["both/loss"]) == expected
    # The slope of the penalty is 2.
    assert abs(float(shared.kernel[0, 0]) - 0.98) < 1e-6
