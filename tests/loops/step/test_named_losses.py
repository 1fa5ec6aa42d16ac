"""Losses by output, with weights, as `compile` takes them: the same training as Keras's, and sentences for mistakes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
A, B = X[:, :1], X[:, 1:]
MSE, MAE = keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError()


def model(named):
    keras.utils.set_random_seed(0)
    x = keras.Input([3])
    a, b = keras.layers.Dense(1, name="a")(x), keras.layers.Dense(2, name="b")(x)
    return keras.Model(x, {"a": a, "b": b} if named else [a, b])


def made(losses, weights=None, named=True):
    return loops.TrainStep(model(named), losses, keras.optimizers.SGD(0.1), loss_weights=weights)


@pytest.mark.slow_with("names for a list of outputs", "a dict")
@pytest.mark.exhaustive_with("a dict", "a list")
@pytest.mark.parametrize(
    ("losses", "weights", "named", "outputs"),
    [
        ({"a": MSE, "b": MAE}, {"a": 0.5, "b": 2.0}, True, ["a_loss", "b_loss"]),
        ([MSE, MAE], [0.5, 2.0], False, ["loss_0", "loss_1"]),
        ({"b": MAE, "a": MSE}, None, False, ["a_loss", "b_loss"]),
    ],
    ids=["a dict", "a list", "names for a list of outputs"],
)
def test_it_trains_as_compile_does(losses, weights, named, outputs):
    y = {"a": A, "b": B} if named else (A, B)
    theirs = model(named)
    theirs.compile(keras.optimizers.SGD(0.1), loss=losses, loss_weights=weights, jit_compile=False)
    step = made(losses, weights, named)
    found = tf.function(step)((X, y))
    loss = theirs.train_on_batch(X, y if named else list(y))
    assert float(found["loss"]) == pytest.approx(float(np.ravel(loss)[0]), rel=1e-6)
    assert set(outputs) <= set(found)
    for one, other in zip(step.model.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [np.asarray, tf.constant], ids=["NumPy", "tensor"])
def test_one_array_of_weights_is_that_of_all_losses(kind):
    weights, ones = np.linspace(0.0, 2.0, 8, dtype=np.float32), np.ones(8, np.float32)
    losses, y = {"a": MSE, "b": MSE}, {"a": A, "b": B}
    found = made(losses)((X, y, kind(weights)))
    each = made(losses)((X, y, {"a": weights, "b": weights}))
    assert float(found["loss"]) == float(each["loss"]) != float(made(losses)((X, y, ones))["loss"])
