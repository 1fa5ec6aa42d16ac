"""Guards that gradients are unscaled by the scale that scaled their loss, also on the steps where the scale moves.

The true gradient is constant, so every applied step has to move the weights by the same amount. Several scalers divide
by the grown scale on a growth step: there, the weights would move by half of it.
"""

import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import descent, gradients_of, modes, modes_with, plain_descent, steep
from ways import graph

import scaler

TRUE = np.float32([0.125, -2.0])


def constant_gradient(execute, strategy, masters=False, select=True):
    """A step whose true gradient is `TRUE`, whatever the weights; a factor of infinity spoils it, and not the loss."""
    weights = tf.Variable(tf.zeros([2], tf.float16 if masters else tf.float32))
    targets = scaler.MasterWeights([weights]) if masters else [weights]
    optimizer = descent(*(targets.weights if masters else targets)) if select else plain_descent
    loss_scaler = scaler.LossScaler(strategy, select=select)

    def step(factor):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(steep(tf.cast(weights, tf.float32) * TRUE, factor))
            scaled = loss_scaler.scale(loss)
        return loss_scaler.apply(optimizer, tape.gradient(scaled, [weights]), targets)

    return weights, loss_scaler, execute(step)


@pytest.mark.slow_with("xla-float16")
@modes_with(("masters",), eager=[("float16",)], graph=[("float32",)], xla=[("float16",)])
def test_every_applied_step_moves_by_the_true_gradient(execute, masters):
    strategy = scaler.Dynamic(8.0, growth_interval=3)
    weights, loss_scaler, step = constant_gradient(execute, strategy, masters == "float16", select=None)
    expected, scales = np.zeros(2, np.float32), []
    for letter in "11111111011101101111":
        outcome = step(np.float32(1 if letter == "1" else np.inf))
        assert bool(outcome.finite) == (letter == "1")
        expected -= TRUE * (letter == "1")
        np.testing.assert_array_equal(weights.numpy().astype(np.float32), expected)
        scales.append(outcome.loss_scale.numpy())
    # The scale of the attempt, not the one after it.
    np.testing.assert_array_equal(scales, [8, 8, 8, 16, 16, 16, 32, 32, 32, 16, 16, 16, 32, 16, 16, 16, 8, 8, 8, 16])
    assert loss_scaler.loss_scale.numpy() == 16.0


def test_also_with_factors_that_are_no_powers_of_two():
    growth, backoff = tf.Variable(2.0, dtype=tf.float64), tf.Variable(0.5, dtype=tf.float64)
    strategy = scaler.Dynamic(10.0, growth_factor=growth, backoff_factor=backoff, growth_interval=1)
    weights, loss_scaler, step = constant_gradient(graph, strategy)
    start = [variable.numpy() for variable in (weights, *loss_scaler.variables)]
    for factors in ((3.0, 0.3), (1.7, 0.9), (1024.0, 1 / 1024)):
        growth.assign(factors[0])
        backoff.assign(factors[1])
        for variable, value in zip((weights, *loss_scaler.variables), start, strict=True):
            variable.assign(value)
        before = weights.numpy()
        for letter in "1110110100011":
            scale = float(loss_scaler.loss_scale)
            step(np.float32(1 if letter == "1" else np.inf))
            expected = np.clip(scale * factors[letter == "0"], strategy.min_scale, strategy.max_scale)
            np.testing.assert_allclose(loss_scaler.loss_scale, expected, rtol=1e-6)
            moved = before - weights.numpy()
            np.testing.assert_allclose(moved, TRUE * (letter == "1"), rtol=2e-6)
            before = weights.numpy()


@modes("eager", "graph")
def test_the_long_form_unscales_by_the_scale_before_the_update(execute):
    weights, loss_scaler = tf.Variable(0.0), scaler.LossScaler(scaler.Dynamic(8.0, growth_interval=1))

    def step():
        (grad,) = loss_scaler.unscale(gradients_of(loss_scaler, lambda: weights * 0.5, [weights]))
        loss_scaler.update(scaler.Event(scaler.all_finite([grad])))
        weights.assign_sub(grad)
        return grad

    run = execute(step)
    assert [run().numpy() for _ in range(4)] == [0.5] * 4
    assert loss_scaler.loss_scale.numpy() == 128.0


@modes("eager", "graph")
def test_an_apply_after_an_update_unscales_by_the_scale_before_it(execute):
    weights, strategy = tf.Variable([0.0]), scaler.Dynamic(8.0, growth_interval=1)
    optimizer, loss_scaler = descent(weights), scaler.LossScaler(strategy, select=True)

    def step():
        grads = gradients_of(loss_scaler, lambda: tf.reduce_sum(weights) * 0.5, [weights])
        loss_scaler.update(scaler.Event(tf.constant(True)))
        used = loss_scaler.apply(optimizer, grads, [weights], update=False).loss_scale
        return used, loss_scaler.unscale(grads)[0]

    run = execute(step)
    for number in range(3):
        used, unscaled = run()
        assert used.numpy() == 8.0 * 2**number
        assert unscaled.numpy()[0] == 0.5
    assert weights.numpy()[0] == -1.5
    assert loss_scaler.loss_scale.numpy() == 64.0
