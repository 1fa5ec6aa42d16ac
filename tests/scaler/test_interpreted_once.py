"""Guards that each operation of a trace is interpreted once, however many calls ask about it."""

import keras
import tensorflow as tf
from ways import graph

import scaler
from scaler.misuse import frame


def test_a_call_goes_on_where_the_last_one_stopped(monkeypatch):
    """By the operations that are not plain."""
    interpreted, of_results = [], frame.units_of_results
    monkeypatch.setattr(frame, "units_of_results", lambda op, *given: interpreted.append(op) or of_results(op, *given))
    loss_scaler, optimizer = scaler.LossScaler(scaler.Dynamic(2.0**10), select=True), keras.optimizers.SGD(1.0)
    weights = [tf.Variable(tf.ones([3, 3])), tf.Variable(tf.ones([3]))]
    asked = []

    def step(x):
        for _ in range(2):
            with tf.GradientTape() as tape:
                hidden = tf.tanh(x @ weights[0])
                scaled = loss_scaler.scale(tf.reduce_mean(tf.square(hidden + tf.stop_gradient(hidden) * weights[1])))
            grads = tape.gradient(scaled, weights)
            interpreted.clear()
            loss_scaler.apply(optimizer, loss_scaler.unscale(grads, weights), weights, unscaled=True)
            asked.append(list(interpreted))

    graph(step).get_concrete_function(tf.TensorSpec([2, 3]))
    together = [op for one in asked for op in one]
    assert all(asked)
    assert len(set(together)) == len(together)
