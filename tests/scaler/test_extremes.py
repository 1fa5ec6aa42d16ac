"""Guards the ends of the range: hundreds of bad steps, hundreds of good ones, the least and the greatest scale."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from rigs import raw
from scaler_cases import modes_with, plain_descent, slots, steep, take

import scaler

SMALLEST, LARGEST = 2.0**-126, 2.0**126


def gated(strategy, jit):
    """A weight under Adam, and a step whose true gradient is given. Its loss is finite."""
    weight, optimizer = tf.Variable([1.0]), keras.optimizers.Adam(0.5)
    optimizer.build([weight])
    loss_scaler = scaler.LossScaler(strategy)

    @tf.function(jit_compile=jit)
    def step(gradient):
        return take(loss_scaler, optimizer, lambda: tf.reduce_sum(steep(weight, gradient)), [weight]).finite

    return weight, optimizer, loss_scaler, step


def in_a_row(step, gradients):
    """Takes steps in a loop of a graph, and returns which were applied."""
    step.get_concrete_function(tf.TensorSpec([1]))
    gradients = tf.constant(gradients)[:, tf.newaxis]
    return tf.function(lambda: tf.map_fn(step, gradients, fn_output_signature=tf.bool))().numpy()


@pytest.mark.exhaustive_with("1.0-True", "1.1754943508222875e-38-True")
@pytest.mark.parametrize(("low", "jit"), [(SMALLEST, False), (SMALLEST, True), (1.0, True)])
def test_300_nonfinite_steps_then_clean_ones_train_on(jit, low):
    weight, optimizer, loss_scaler, step = gated(scaler.Dynamic(min_scale=low, growth_interval=1), jit)
    before = raw([weight], slots(optimizer))
    assert not any(in_a_row(step, [np.nan, np.inf, -np.inf] * 100))
    assert raw([weight], slots(optimizer)) == before
    assert loss_scaler.loss_scale.numpy() == low
    assert [int(count) for count in loss_scaler.counters] == [300, 0, 300, 300]
    assert step(np.float32([4.0]))
    assert loss_scaler.loss_scale.numpy() == 2 * low
    assert int(loss_scaler.counters.consecutive_skips) == 0
    np.testing.assert_allclose(weight.numpy(), [0.5], rtol=1e-4)


@pytest.mark.exhaustive_with("True")
@pytest.mark.parametrize("jit", [False, True])
def test_300_growths_end_on_the_ceiling_and_train_on(jit):
    weight, _, loss_scaler, step = gated(scaler.Dynamic(max_scale=LARGEST, growth_interval=1), jit)
    assert all(in_a_row(step, [0.0] * 300))
    assert loss_scaler.loss_scale.numpy() == LARGEST
    assert weight.numpy()[0] == 1.0
    assert step(np.float32([0.5]))
    assert np.isfinite(weight.numpy()[0])
    assert weight.numpy()[0] < 1.0
    # What overflows at a great scale is skipped until it fits, and growth tries the next scale again.
    finite = [bool(step(np.float32([2.0**6]))) for _ in range(8)]
    assert finite == [False] * 5 + [True, False, True]
    assert loss_scaler.loss_scale.numpy() == 2.0**122
    assert np.isfinite(weight.numpy()[0])
    assert not step(np.float32([np.inf]))
    assert loss_scaler.loss_scale.numpy() == 2.0**121


@pytest.mark.slow_with("xla-8.507059173023462e+37")
@pytest.mark.exhaustive_with("xla-1.1754943508222875e-38")
@modes_with(("loss_scale",), eager=[(SMALLEST,)], graph=[(LARGEST,)], xla=[(SMALLEST,), (LARGEST,)])
def test_gradients_survive_the_least_and_the_greatest_scale(execute, loss_scale):
    gradient = np.float32([1.5, -(2.0**10)] if loss_scale == SMALLEST else [1.5, -(2.0**-10)])
    weight = tf.Variable([0.0, 0.0])
    loss_scaler = scaler.LossScaler(scaler.Static(loss_scale))

    def step(true):
        return take(loss_scaler, plain_descent, lambda: tf.reduce_sum(weight * true), [weight]).finite

    assert execute(step)(gradient)
    np.testing.assert_array_equal(weight.numpy(), -gradient)
