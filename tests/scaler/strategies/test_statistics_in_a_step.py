"""`apply` shows a strategy the statistics it needs, and computes no others."""

import pytest
import tensorflow as tf

import scaler


def descend(grads, variables):
    for grad, variable in zip(grads, variables, strict=True):
        variable.assign_sub(tf.convert_to_tensor(grad))


def scale_after_one_step(strategy):
    """The weights' gradients are 4, 1 and, for one row of an embedding that is read twice, 0.2."""
    weights, table = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([3, 2]))
    loss_scaler = scaler.LossScaler(strategy)

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights * [4.0, 1.0]) + tf.reduce_sum(tf.gather(table, [0, 0]) * 0.1)
        scaled = loss_scaler.scale(loss)
    assert loss_scaler.apply(descend, tape.gradient(scaled, [weights, table]), [weights, table]).finite
    return loss_scaler.loss_scale.numpy()


CASES = [
    (scaler.Headroom(), 2.0**12),  # 2^(16 - 3 - 1): 4 is below 2^3.
    (scaler.Histogram(2.0**10, edge=1000.0), 2.0**9),  # 2 of 6 scaled values are above the edge.
    (scaler.Histogram(2.0**10, edge=100_000.0), 2.0**11),
    (scaler.LogNormal(), 2.0**14),
    (scaler.DelayedAmax(), 2.0**13),
]


def test_the_scale_follows_the_gradients():
    assert [scale_after_one_step(strategy) for strategy, _ in CASES] == [scale for _, scale in CASES]


def test_nobody_pays_for_what_nobody_asked_for(monkeypatch):
    from scaler.gradients import statistics

    def refuse(*arguments):
        raise AssertionError("computed for nobody")

    monkeypatch.setattr(statistics, "amax", refuse)
    monkeypatch.setattr(statistics, "histogram", refuse)
    assert scale_after_one_step(scaler.Dynamic()) == 2.0**15
    with pytest.raises(AssertionError, match="computed for nobody"):
        scale_after_one_step(scaler.Headroom())
