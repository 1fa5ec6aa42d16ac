"""Models of a class that overrides `compile`, as keras-hub's tasks do: Keras loads them without our optimizer."""

import warnings

import keras
import numpy as np
import pytest
from keras_cases import data

import scaler

SAYS = r"Task overrides `compile`.*not restore the optimizer.*optimizer\.build.*load_weights"


@keras.saving.register_keras_serializable("overridden")
class Task(keras.Model):
    """With the members of a task of keras-hub: it compiles itself when it is made."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.dense = keras.layers.Dense(1)
        self.compile()

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)

    def compile(self, optimizer="auto", loss="mse", **arguments):
        optimizer = keras.optimizers.Adam(1e-2) if optimizer == "auto" else optimizer
        super().compile(optimizer=optimizer, loss=loss, **{"jit_compile": False, **arguments})


def compiled(task):
    task.compile(scaler.LossScaleOptimizer(keras.optimizers.Adam(1e-2), scaler.Dynamic(2.0**9, growth_interval=4)))
    return scaler.protect(task)


@pytest.fixture
def loaded(tmp_path):
    """A task whose file holds our optimizer."""
    path, task = tmp_path / "task.keras", compiled(Task())
    task.build([None, 4])
    task.optimizer.build(task.trainable_variables)
    task.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras says that `compile` is custom.
        return keras.saving.load_model(path)


def test_protect_says_so_at_once_and_the_first_step_refuses_and_so_does_the_logger(loaded):
    with pytest.raises(scaler.InvalidArgument, match=SAYS):
        loaded.fit(*data(8), verbose=0, callbacks=[scaler.LossScaleLogger()])
    with pytest.warns(scaler.ScaleWarning, match=f"compiled with Adam and not with.*{SAYS}"):
        scaler.protect(loaded)
    with pytest.raises(scaler.InvalidArgument, match=f"has no hs.LossScaleOptimizer.*{SAYS}"):
        loaded.fit(*data(8), verbose=0)


class TellsKeras(Task):
    def compile_from_config(self, config):
        compiled(self)


@pytest.mark.parametrize("make", [lambda: TellsKeras(), lambda: keras.Sequential([keras.layers.Dense(1)])])
def test_other_models_are_protected_in_silence_before_they_are_compiled(make):
    model = make()
    model.compile(keras.optimizers.SGD(), loss="mse")
    scaler.protect(model)
    with pytest.raises(scaler.InvalidArgument, match=r"has no hs\.LossScaleOptimizer") as caught:
        model.train_on_batch(np.ones((2, 4)), np.ones((2, 1)))
    assert "overrides" not in str(caught.value)
