"""Guards which loss a `SpikeGuard` judges and tells in `fit` with gradient accumulation: the mean of a window."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import scaler

STEPS = 4


def fitted(losses, run_eagerly=False):
    """A model whose loss is what its targets say, after windows of `STEPS` micro-batches."""
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    inner = keras.optimizers.SGD(1e-3, gradient_accumulation_steps=STEPS)
    guard = scaler.SpikeGuard(scaler.Static(8.0), window=4, norm=False, loss=True)
    optimizer = scaler.LossScaleOptimizer(inner, guard)

    def loss(y, prediction):
        own = tf.reduce_mean(prediction)
        return tf.reduce_mean(y) + own - tf.stop_gradient(own)

    model.compile(optimizer, loss, run_eagerly=run_eagerly)
    y = np.array(losses, np.float32).reshape([-1, 1])
    model.fit(np.ones_like(y), y, batch_size=1, shuffle=False, verbose=0)
    return optimizer.loss_scaler


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_the_loss_of_a_window_is_the_mean_of_its_micro_batches(run_eagerly):
    usual = [1.0, 2.0, 3.0, 2.0] * 4
    loss_scaler = fitted([*usual, 90.0, 110.0, 100.0, 100.0], run_eagerly)
    last = loss_scaler.last_skip
    assert (float(last.value), float(last.usual), float(last.limit)) == (100.0, 2.0, pytest.approx(6.0))
    assert "its loss is 100, above the limit of 6 that SpikeGuard draws from a median of 2" in loss_scaler.explain()
    assert int(loss_scaler.counters.skipped) == 1
    assert int(loss_scaler.counters.applied) == 4


def test_the_next_window_begins_anew():
    usual = [1.0, 2.0, 3.0, 2.0] * 4
    loss_scaler = fitted([*usual, *[100.0] * 4, *[3.0] * 4])
    assert int(loss_scaler.counters.applied) == 5
    np.testing.assert_allclose(loss_scaler.state.losses[-1], 3.0)
