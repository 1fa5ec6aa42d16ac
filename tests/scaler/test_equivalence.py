"""Guards that scaling by a power of two changes no bit of float32 training, and that the gate by itself does not."""

import keras
import numpy as np
import tensorflow as tf
from models import batch, stateful_model
from rigs import raw
from scaler_cases import OPTIMIZERS, slots

import scaler

STEPS = 7


def train(optimizer, strategy):
    """The bits of everything after some steps, with one compiled step for all of them; no strategy means no scaler."""
    keras.utils.set_random_seed(4)
    model, optimizer = stateful_model("float32"), OPTIMIZERS[optimizer]()
    optimizer.build(model.trainable_variables)
    loss_scaler = None if strategy is None else scaler.LossScaler(strategy)

    @tf.function
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


def test_a_graph_that_returns_its_loss_has_the_bits_of_the_optimizers_own():
    """TensorFlow regroups sums in it, as it does not in a function that returns nothing."""

    def bits(loss_scaler):
        weight = tf.Variable(np.random.default_rng(0).normal(size=[400]).astype(np.float32))
        optimizer = keras.optimizers.RMSprop(1e-2, centered=True)
        optimizer.build([weight])

        @tf.function
        def step(slope):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.sin(weight) * slope)
                scaled = loss * 1024.0 if loss_scaler is None else loss_scaler.scale(loss)
            grads = [tape.gradient(scaled, weight)]
            if loss_scaler is None:
                optimizer.apply([grads[0] / 1024.0], [weight])
            else:
                loss_scaler.apply(optimizer, grads, [weight])
            return loss

        for seed in range(STEPS):
            step(tf.constant(np.random.default_rng(seed).normal(size=[400]).astype(np.float32)))
        return raw([weight], slots(optimizer))

    assert bits(scaler.LossScaler(scaler.Dynamic(1024.0))) == bits(None)


def test_a_scale_that_moves_changes_nothing_either():
    growing = scaler.Dynamic(2.0**-10, growth_interval=3)
    assert train("SGD", growing) == train("SGD", scaler.NoScaling())
