"""Guards that each micro-batch of a window is unscaled by its own scale, whatever moves the scale in between.

The true gradients are -1 for a factor of 1 and -3 for one of 3: their mean moves a weight from 0 to 2 or to -2.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler

ONE, THREE = (tf.ones((2, 3)), tf.ones((2, 1))), (tf.ones((2, 3)), 3.0 * tf.ones((2, 1)))


def product(y, prediction):
    return tf.reduce_mean(tf.cast(prediction, tf.float32) * y)


def train_step(loss_scaler, accumulate=1, kind="float32"):
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype=kind)
    model = keras.Sequential([keras.Input((3,), dtype=kind), dense])
    optimizer = keras.optimizers.SGD(1.0)
    step = loops.TrainStep(model, product, optimizer, loss_scaler=loss_scaler, accumulate=accumulate)
    return step, lambda: dense.kernel.numpy().ravel().astype(np.float32)


def test_a_scaler_that_another_step_shares():
    loss_scaler = scaler.LossScaler(scaler.Dynamic(16.0, growth_interval=1))
    (step, weights), (other, _) = train_step(loss_scaler, 2, "float16"), train_step(loss_scaler)
    step(ONE), other(ONE), step(THREE)
    np.testing.assert_array_equal(weights(), [-2.0] * 3)


def test_a_bound_that_is_a_variable():
    top = tf.Variable(2.0**20)
    step, weights = train_step(scaler.LossScaler(scaler.Dynamic(2.0**15, max_scale=top)), 2)
    step(ONE)
    top.assign(2.0**10)
    step(THREE)
    np.testing.assert_array_equal(weights(), [-2.0] * 3)


@pytest.mark.parametrize("finite", [True, False])
def test_an_update_in_the_middle(finite):
    loss_scaler = scaler.LossScaler(scaler.Dynamic(16.0, growth_interval=1))
    step, weights = train_step(loss_scaler, 2)
    for _ in range(2):
        step(ONE)
        loss_scaler.update(scaler.Event(tf.constant(finite)))
        assert step(THREE)["applied"]
    np.testing.assert_array_equal(weights(), [-4.0] * 3)


@pytest.mark.parametrize("scales", [(2.0**-126, 2.0**126), (2.0**126, 2.0**-126)], ids=["up", "down"])
def test_a_scale_that_moves_beyond_float32_spoils_the_window(scales):
    scale = tf.Variable(scales[0])
    wide = scaler.Dynamic(1.0, min_scale=scale, max_scale=scale)
    step, weights = train_step(scaler.LossScaler(wide), 2)
    step(ONE)
    scale.assign(scales[1])
    outputs = step((ONE[0], 1e-3 * ONE[1]))
    assert outputs["attempted"]
    assert not outputs["applied"]
    scale.assign(1.0)
    step(ONE)
    assert step(THREE)["applied"]
    np.testing.assert_array_equal(weights(), [-2.0] * 3)


def test_a_window_restored_in_its_middle_knows_its_scale(tmp_path):
    def made():
        loss_scaler = scaler.LossScaler(scaler.Dynamic(16.0, growth_interval=1))
        step, weights = train_step(loss_scaler, 2)
        return step, weights, loss_scaler, tf.train.Checkpoint(step=step, window=step.window, loss_scaler=loss_scaler)

    step, _, _, checkpoint = made()
    step(ONE)
    path = checkpoint.save(tmp_path / "middle")
    step, weights, loss_scaler, checkpoint = made()
    checkpoint.restore(path)
    loss_scaler.update(scaler.Event(tf.constant(True)))
    assert step(THREE)["applied"]
    np.testing.assert_array_equal(weights(), [-2.0] * 3)


def test_a_window_saved_without_its_scale_goes_on_as_it_was():
    step, weights = train_step(scaler.LossScaler(scaler.Dynamic(16.0)), 2)
    step(ONE)
    step.window._scale.assign(0.0)
    assert step(THREE)["applied"]
    np.testing.assert_array_equal(weights(), [-2.0] * 3)
