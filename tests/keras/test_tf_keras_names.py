"""Code written for `LossScaleOptimizer` of tf.keras 2 and of Keras 3 runs against ours with their meanings."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_cases import SCALE, data, make_model
from rigs import raw

import scaler


def optimizer_and_model():
    return scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=SCALE), make_model(stateful=False)


def loss_of(model, x, y):
    return tf.reduce_mean(tf.square(tf.cast(model(x), tf.float32) - y))


def keras_2(optimizer, model, x, y):
    with tf.GradientTape() as tape:
        scaled = optimizer.get_scaled_loss(loss_of(model, x, y))
    grads = optimizer.get_unscaled_gradients(tape.gradient(scaled, model.trainable_variables))
    grads, _ = tf.clip_by_global_norm(grads, 1e6)
    optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))


def keras_3(optimizer, model, x, y):
    with tf.GradientTape() as tape:
        scaled = optimizer.scale_loss(loss_of(model, x, y))
    optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)


def with_a_function(optimizer, model, x, y):
    optimizer.minimize(lambda: loss_of(model, x, y), model.trainable_variables)


def with_a_tape(optimizer, model, x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(model, x, y)
    optimizer.minimize(loss, model.trainable_variables, tape=tape)


@functools.cache
def moved_by(step):
    """The weights and the scale after five steps, of which one is skipped."""
    optimizer, model = optimizer_and_model()
    for seed in range(3):
        step(optimizer, model, *map(tf.constant, data(8, seed)))
    x, y = data(8)
    x[0] = 1e30
    step(optimizer, model, tf.constant(x), tf.constant(y))
    step(optimizer, model, *map(tf.constant, data(8)))
    assert optimizer.loss_scaler.counters.skipped == 1
    return raw(model.weights), float(optimizer.loss_scale)


@pytest.mark.parametrize("style", [keras_2, with_a_function, with_a_tape])
def test_all_styles_take_the_same_steps(style):
    assert moved_by(style) == moved_by(keras_3)


def test_gradients_that_were_unscaled_by_hand_count_so_until_the_next_loss():
    optimizer, weight = scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=SCALE), tf.Variable(0.0)
    for by_hand in (True, False, True):
        weight.assign(0.0)
        scaled = optimizer.get_scaled_loss(tf.constant(3.0))
        (grad,) = optimizer.get_unscaled_gradients([scaled]) if by_hand else [scaled]
        outcome = optimizer.apply([grad], [weight])
        assert weight.numpy() == -3.0
        assert outcome.loss_scale == SCALE


def test_in_a_graph_each_gradient_tells_whether_it_was_unscaled_by_hand():
    """Also after another loss is scaled, and beside gradients of another one."""
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=SCALE)
    first, second = weights = [tf.Variable(0.0), tf.Variable(0.0)]
    optimizer.build(weights)

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            one, other = optimizer.get_scaled_loss(first * 3.0), optimizer.get_scaled_loss(second * 5.0)
        (grad,) = optimizer.get_unscaled_gradients([tape.gradient(one, first)])
        optimizer.get_scaled_loss(tf.constant(1.0))
        optimizer.apply_gradients([(grad, first)])
        optimizer.apply_gradients([(tape.gradient(other, second), second)])

    step()
    assert [float(weight) for weight in weights] == [-3.0, -5.0]


def test_attributes():
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.Adam(0.5), initial_scale=64.0, dynamic_growth_steps=3)
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps, optimizer.dynamic) == (64.0, 3, True)
    assert optimizer.loss_scale == optimizer.dynamic_scale == 64.0
    assert optimizer.loss_scale.dtype == tf.float32
    assert float(optimizer.learning_rate) == 0.5
    assert optimizer.iterations is optimizer.inner_optimizer.iterations
    fixed = scaler.LossScaleOptimizer(keras.optimizers.Adam(), scaler.Static(8.0))
    assert (fixed.initial_scale, fixed.dynamic_growth_steps, fixed.dynamic) == (8.0, None, False)
    assert scaler.LossScaleOptimizer(inner_optimizer=keras.optimizers.Adam(), dynamic=True).initial_scale == 2.0**15
    assert optimizer.get_scaled_loss(lambda: tf.constant(2.0))() == 128.0
    assert optimizer.get_unscaled_gradients([None, tf.constant(128.0)])[1] == 2.0


def test_losses_of_examples_are_scaled_too():
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=64.0)
    with pytest.warns(scaler.ScaleWarning, match="the loss is float16"):
        scaled = optimizer.scale_loss(tf.constant([1.0, 2.0], tf.float16))
    assert scaled.dtype == tf.float32
    np.testing.assert_array_equal(scaled, [64.0, 128.0])
