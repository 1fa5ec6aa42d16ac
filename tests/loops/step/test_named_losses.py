"""Losses by output, with weights, as `compile` takes them: the same training as Keras's, and sentences for mistakes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import batch, plain_model, squared_error

import loops
import scaler

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("losses", "weights", "named", "outputs"),
    [
        ({"a": MSE, "b": MAE}, {"a": 0.5, "b": 2.0}, True, ["a_loss", "b_loss"]),
        ({"b": MAE, "a": MSE}, None, False, ["a_loss", "b_loss"]),
    ],
    ids=["a dict", "names for a list of outputs"],
)
def test_it_trains_as_compile_does(losses, weights, named, outputs):
    y = {"a": A, "b": B} if named else (A, B)
    theirs = model(named)
    theirs.compile(keras.optimizers.SGD(0.1), loss=losses, loss_weights=weights, jit_compile=False)
    step = made(losses, weights, named)
    found = step((X, y))
    loss = theirs.train_on_batch(X, y if named else list(y))
    assert float(found["loss"]) == pytest.approx(float(np.ravel(loss)[0]), rel=1e-6)
    assert set(outputs) <= set(found)
    for one, other in zip(step.model.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_one_array_of_weights_is_that_of_all_losses():
    weights, ones = np.linspace(0.0, 2.0, 8, dtype=np.float32), np.ones(8, np.float32)

    def loss(of_examples):
        return float(made({"a": MSE, "b": MSE})((X, {"a": A, "b": B}, of_examples))["loss"])

    assert loss(weights) == loss(tf.constant(weights)) == loss({"a": weights, "b": weights}) != loss(ones)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [("mse", MSE), ("MeanSquaredError", MSE), (["mae"], MAE), ({0: "mae"}, MAE)],
    ids=["mse", "MeanSquaredError", "a list", "a dict"],
)
def test_a_name_is_the_loss_that_compile_takes(losses, expected):
    x, y = batch()
    step = loops.TrainStep(plain_model(), losses, "sgd")
    expected = float(expected(y, step.model(x)))
    assert float(step((x, y[:, 0]))["loss"]) == pytest.approx(expected, rel=1e-6)
    assert isinstance(step.optimizer, keras.optimizers.SGD)


def test_every_function_that_keras_finds_is_a_mean():
    names = [name for name in dir(keras.losses) if scaler.authoring.from_keras(keras.losses, name) is not name]
    model = plain_model()
    found = {name: loops.TrainStep(model, name, "sgd").loss_fn for name in names if name != "Loss"}
    assert len(found) > 30
    assert all(isinstance(loss, keras.losses.Loss) for loss in found.values())


@pytest.mark.parametrize("losses", ["mze", ["mze"], {"dense_1": "mze"}], ids=["alone", "list", "dict"])
def test_an_unknown_loss_is_answered_with_the_nearest(losses):
    with pytest.raises(scaler.InvalidArgument, match=r"Did you mean 'mse'\?"):
        loops.TrainStep(plain_model(), losses, "sgd")


def part(**arguments):
    model = plain_model()
    return loops.Part("one", model, lambda both: squared_error(both[1], model(both[0])), "nadam", **arguments)


def test_a_strategy_stands_for_a_scaler():
    strategy = scaler.Static(8.0)
    assert loops.TrainStep(plain_model(), "mse", "sgd", loss_scaler=strategy).loss_scaler.strategy == strategy
    own = part(loss_scaler=strategy)
    assert (own.loss_scaler.strategy, own.loss_scaler.name) == (strategy, "one")
    assert isinstance(own.optimizer, keras.optimizers.Nadam)
    step = loops.ComposedStep([part()], lambda both: both, loss_scaler=strategy)
    assert step.scalers["one"].strategy == strategy
    assert float(step(batch())["one/loss_scale"]) == 8.0
