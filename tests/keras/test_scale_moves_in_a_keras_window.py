"""Guards that a window of `gradient_accumulation_steps` unscales each micro-batch by its own scale."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import scaler


def made(strategy=None):
    weight = keras.Variable(np.zeros(2, np.float32))
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer = scaler.LossScaleOptimizer(inner, strategy or scaler.Dynamic(16.0, growth_interval=1))
    optimizer.build([weight])

    def micro_batch(slope, unscale=False):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(weight.value) * slope)
        grads = tape.gradient(scaled, [weight.value])
        return optimizer.apply(optimizer.get_unscaled_gradients(grads) if unscale else grads, [weight]).finite

    return weight, optimizer, micro_batch


@pytest.mark.slow_with("xla-False")
@pytest.mark.exhaustive_with("graph-False", "loop-False", "loop-True", "xla-True")
@pytest.mark.parametrize("finite", [True, False])
def test_an_update_in_the_middle(execute, finite):
    weight, optimizer, micro_batch = made()
    run = execute(micro_batch)
    for number in range(1, 3):
        run(np.float32(1.0))
        optimizer.loss_scaler.update(scaler.Event(tf.constant(finite)))
        assert run(np.float32(3.0))
        np.testing.assert_array_equal(weight.numpy(), [-2.0 * number] * 2)


def test_one_micro_batch_unscaled_by_hand_and_one_scaled():
    weight, _, micro_batch = made()
    micro_batch(1.0)
    assert micro_batch(3.0, unscale=True)
    np.testing.assert_array_equal(weight.numpy(), [-2.0] * 2)
    micro_batch(1.0, unscale=True)
    assert micro_batch(3.0)
    np.testing.assert_array_equal(weight.numpy(), [-4.0] * 2)


@pytest.mark.parametrize("scales", [(2.0**-126, 2.0**126), (2.0**126, 2.0**-126)], ids=["up", "down"])
def test_a_scale_that_moves_beyond_float32_spoils_the_window(scales):
    scale = tf.Variable(scales[0])
    weight, optimizer, micro_batch = made(scaler.Dynamic(1.0, min_scale=scale, max_scale=scale))
    micro_batch(1.0)
    scale.assign(scales[1])
    assert not micro_batch(1e-3)
    assert np.isfinite([value for variable in optimizer._window._sums for value in variable.numpy()]).all()
    scale.assign(1.0)
    micro_batch(1.0)
    assert micro_batch(3.0)
    np.testing.assert_array_equal(weight.numpy(), [-2.0] * 2)
