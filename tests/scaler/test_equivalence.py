"""Guards that scaling by a power of two changes no bit of float32 training, and that the gate by itself does not."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import batch, stateful_model
from rigs import raw
from scaler_cases import OPTIMIZERS, slots

import scaler

STEPS = 7


@functools.cache
def unscaled(optimizer):
    return train(optimizer, scaler.NoScaling())


def train(optimizer, strategy, jit=False):
    """The bits of everything after some steps, with one compiled step for all of them; no strategy means no scaler."""
    keras.utils.set_random_seed(4)
    model, optimizer = stateful_model("float32"), OPTIMIZERS[optimizer]()
    optimizer.build(model.trainable_variables)
    loss_scaler = None if strategy is None else scaler.LossScaler(strategy)

    @tf.function(jit_compile=jit)
    def step(x, y):
        before = scaler.snapshot(model.non_trainable_variables)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            scaled = loss if loss_scaler is None else loss_scaler.scale(loss)
        grads = tape.gradient(scaled, model.trainable_variables)
        if loss_scaler is None:
            optimizer.apply(grads, model.trainable_variables)
        else:
            loss_scaler.apply(optimizer, grads, model.trainable_variables, rollback=before)
        return loss

    losses = [step(*batch(number)).numpy() for number in range(STEPS)]
    assert losses[-1] != losses[0]
    return [np.array(losses).tobytes(), *raw(model.variables, slots(optimizer))]


def test_scaled_training_is_training_without_a_scaler():
    # In eager mode: graph optimizers regroup the optimizer's products, with and without the gate differently.
    tf.config.run_functions_eagerly(True)
    assert train("Adam", scaler.Static(2.0**15)) == train("Adam", None)


@pytest.mark.slow_with("SGD-32768.0")
@pytest.mark.exhaustive_with("Adam-1099511627776.0", "SGD-8.673617379884035e-19")
@pytest.mark.parametrize(("optimizer", "loss_scale"), [("SGD", 2.0**-60), ("SGD", 2.0**15), ("Adam", 2.0**40)])
def test_scaled_training_is_unscaled_training(optimizer, loss_scale):
    assert train(optimizer, scaler.Static(loss_scale)) == unscaled(optimizer)


def test_a_scale_that_moves_changes_nothing_either():
    growing = scaler.Dynamic(2.0**-10, growth_interval=3)
    assert train("SGD", growing) == unscaled("SGD")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_under_xla():
    assert train("Adam", scaler.Static(2.0**20), jit=True) == train("Adam", scaler.Static(1.0), jit=True)
