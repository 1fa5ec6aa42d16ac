"""Guards that each operation of a trace is interpreted once, however many calls ask about it."""

import keras
import pytest
import tensorflow as tf

import scaler
from scaler.misuse import frame


@pytest.fixture
def interpreted(monkeypatch):
    """The operations that were interpreted and were not plain."""
    seen, units_of_results = [], frame.units_of_results

    def recorded(op, *given):
        seen.append(op)
        return units_of_results(op, *given)

    monkeypatch.setattr(frame, "units_of_results", recorded)
    return seen


def test_a_call_goes_on_where_the_last_one_stopped(interpreted):
    loss_scaler, optimizer = scaler.LossScaler(scaler.Dynamic(2.0**10), select=True), keras.optimizers.SGD(1.0)
    weights = [tf.Variable(tf.ones([3, 3])), tf.Variable(tf.ones([3]))]
    asked = []

    def step(x):
        for _ in range(3):
            with tf.GradientTape() as tape:
                hidden = tf.tanh(x @ weights[0])
                scaled = loss_scaler.scale(tf.reduce_mean(tf.square(hidden + tf.stop_gradient(hidden) * weights[1])))
            grads = tape.gradient(scaled, weights)
            interpreted.clear()
            loss_scaler.apply(optimizer, loss_scaler.unscale(grads, weights), weights, unscaled=True)
            asked.append(list(interpreted))

    tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([2, 3]))
    together = [op for one in asked for op in one]
    assert all(asked)
    assert len(set(together)) == len(together)
