"""Guards that names of Keras and strategies stand for the objects that a step takes."""

import keras
import numpy as np
import pytest
from models import batch, plain_model, squared_error

import loops
import scaler


@pytest.mark.parametrize("name", ["mse", "MeanSquaredError", "mean_squared_error"])
def test_a_name_is_the_loss_that_compile_takes(name):
    x, y = batch()
    step = loops.TrainStep(plain_model(), name, "sgd")
    expected = keras.losses.MeanSquaredError()(y, step.model(x))
    assert float(step((x, y[:, 0]))["loss"]) == pytest.approx(float(expected), rel=1e-6)
    assert isinstance(step.optimizer, keras.optimizers.SGD)


def test_every_function_that_keras_finds_is_a_mean():
    names = [name for name in dir(keras.losses) if scaler.authoring.from_keras(keras.losses, name) is not name]
    found = {name: loops.TrainStep(plain_model(), name, "sgd").loss_fn for name in names if name != "Loss"}
    assert len(found) > 30
    assert all(isinstance(loss, keras.losses.Loss) for loss in found.values())


@pytest.mark.parametrize("losses", [["mae"], {0: "mae"}], ids=["list", "dict"])
def test_names_in_a_list_or_dict(losses):
    x, y = batch()
    step = loops.TrainStep(plain_model(), losses, "sgd")
    expected = np.abs(y - step.model(x)).mean()
    assert float(step((x, y))["loss"]) == pytest.approx(float(expected), rel=1e-6)


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
