"""Guards that a forgotten `scale` is noticed in a graph even if the scale was read, and no other step is suspected."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import descent, gradients_of, plain_descent
from step_programs import trace_no_branches
from ways import graph

import scaler

SAID = r"nothing that they are computed from comes from scale\(loss\)"
SEEDS = keras.random.SeedGenerator(1)
FORGOTTEN = pytest.warns(scaler.ScaleWarning, match=SAID)


@pytest.fixture(autouse=True)
def _without_branches(monkeypatch):
    trace_no_branches(monkeypatch)


def trace(loss_scaler, scaled):
    """Traces a step whose loss is what `scaled(loss, factor)` makes of it."""
    weight = tf.Variable([1.0, 2.0, 3.0])

    @graph
    def step(x, factor):
        with tf.GradientTape() as tape:
            loss = scaled(tf.reduce_mean(tf.square(tf.linalg.matvec(x, weight))), factor)
        outcome = loss_scaler.apply(scaler.move_nothing, [tape.gradient(loss, weight)], [weight])
        return outcome.finite, loss_scaler.loss_scale

    step.get_concrete_function(tf.TensorSpec([8, 3]), tf.TensorSpec([]))


def read_scaler():
    """One of which somebody has read the scale."""
    loss_scaler = scaler.LossScaler()
    assert loss_scaler.loss_scale == 2.0**15
    return loss_scaler


def test_a_log_of_the_scale_hides_nothing():
    with FORGOTTEN as seen:
        trace(read_scaler(), lambda loss, _: loss)
    assert len(seen) == 1


def test_nor_do_numbers_that_are_drawn():
    """As the time of a diffusion, or the weight of a mixture."""

    def scaled(loss, _):
        drawn = tf.random.uniform([]), keras.random.normal([], seed=SEEDS)
        return loss * drawn[0] * drawn[1] * tf.random.stateless_truncated_normal([], [1, 2])

    with FORGOTTEN:
        trace(read_scaler(), scaled)


def test_a_scale_in_another_function_hides_nothing():
    loss_scaler = scaler.LossScaler()
    trace(loss_scaler, lambda loss, _: loss_scaler.scale(loss))
    with FORGOTTEN:
        trace(loss_scaler, lambda loss, _: loss)


class ByHand:
    """Ways in which a loss is scaled, none of which uses `scale`."""

    def __init__(self):
        self.loss_scaler = read_scaler()
        self.read = self.loss_scaler.loss_scale

    def captured(self, loss, _):
        return loss * self.read

    def function(self, loss, _):
        return tf.numpy_function(lambda: self.read.numpy(), [], tf.float32) * loss

    def branch(self, loss, factor):
        return tf.cond(loss > 1.0, lambda: loss * factor, lambda: self.loss_scaler.scale(loss))

    def inner_function(self, loss, factor):
        return graph(lambda one, other: one * other)(loss, factor)


@pytest.mark.parametrize("how", [name for name in vars(ByHand) if not name.startswith("_")])
def test_no_loss_scaled_by_hand_is_suspected(how):
    by_hand = ByHand()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(by_hand.loss_scaler, getattr(by_hand, how))


def test_gradients_from_another_function_are_not_suspected():
    loss_scaler, weight = scaler.LossScaler(), tf.Variable([1.0, 2.0, 3.0])

    @graph
    def gradient():
        return gradients_of(loss_scaler, lambda: tf.reduce_sum(weight), weight)

    @graph
    def decay_and_apply(grad):
        return loss_scaler.apply(scaler.move_nothing, [grad + 0.01 * weight], [weight]).finite

    assert decay_and_apply(gradient())


def test_a_list_that_a_loop_fills_is_not_suspected():
    loss_scaler, weight = scaler.LossScaler(), tf.Variable([1.0, 2.0, 3.0])

    def fill(number, parts):
        return number + 1, parts.write(number, gradients_of(loss_scaler, lambda: tf.reduce_sum(weight) / 2.0, weight))

    @graph
    def step():
        _, parts = tf.while_loop(lambda number, _: number < 2, fill, (0, tf.TensorArray(tf.float32, 2)))
        grad = tf.reduce_sum(parts.stack(), axis=0) * (1.0 + 0.0 * weight)
        return loss_scaler.apply(scaler.move_nothing, [grad], [weight]).finite

    step.get_concrete_function()


def test_a_forgotten_scale_is_seen_where_there_are_masters():
    loss_scaler, weight = read_scaler(), tf.Variable(tf.ones([3], tf.float16))
    masters = scaler.MasterWeights([weight])

    @graph
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.cast(weight, tf.float32)))
        return loss_scaler.apply(scaler.move_nothing, [tape.gradient(loss, weight)], masters).finite

    with FORGOTTEN:
        step.get_concrete_function()


X = tf.random.stateless_normal([24, 3], [1, 2])


def by_hand_steps(loss_scaler, weight):
    """Correct steps that other people wrote, whose scale comes by unusual ways."""
    flat = tf.Variable(tf.zeros([1, 3]))

    def loss():
        return tf.reduce_mean(tf.square(tf.linalg.matvec(X, weight)))

    def gradient(scaled):
        with tf.GradientTape() as tape:
            value = scaled()
        return tape.gradient(value, weight)

    def accumulated():
        flat.assign(tf.reshape(gradient(lambda: loss_scaler.scale(loss())), [1, 3]))
        return tf.reshape(flat + 0.0, [3]) + 0.0 * weight

    def per_example():
        with tf.GradientTape() as tape:
            losses = tf.square(tf.linalg.matvec(X, weight))
            scale = tf.fill(tf.shape(losses), loss_scaler.loss_scale / 24.0)
        return tape.gradient(losses, weight, output_gradients=scale)

    def scaled_one():
        with tf.GradientTape() as tape:
            value = loss()
        return tape.gradient(value, weight, output_gradients=loss_scaler.scale(tf.ones_like(value)))

    return {
        "fill": lambda: gradient(lambda: tf.reduce_sum(loss() * tf.fill([1], loss_scaler.loss_scale))),
        "output gradients": per_example,
        "scale of ones like the loss": scaled_one,
        "a flat sum": accumulated,
        "a small constant": lambda: gradient(lambda: loss() * 128.0),
    }


UNUSUAL = list(by_hand_steps(scaler.LossScaler(), tf.Variable([1.0, 2.0, 3.0])))


@pytest.mark.parametrize("how", UNUSUAL)
def test_a_scale_that_comes_by_an_unusual_way_is_not_suspected(how):
    """And where it is the present one, it is what divides them."""
    loss_scaler, weight = read_scaler(), tf.Variable([1.0, 2.0, 3.0])
    optimizer, alone = descent(weight), tf.Variable(weight)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.linalg.matvec(X, alone)))
    plain_descent([tape.gradient(loss, alone)], [alone])
    grad = by_hand_steps(loss_scaler, weight)[how]
    assert graph(lambda: loss_scaler.apply(optimizer, [grad()], [weight]).finite)()
    if how != "a small constant":
        np.testing.assert_allclose(weight, alone, rtol=1e-6)


def test_flat_gradients_given_as_one_argument_are_not_suspected():
    loss_scaler, weight = read_scaler(), tf.Variable(tf.ones([2, 3]))

    @graph
    def apply(flat):
        grad = tf.reshape(flat, [2, 3]) + 0.01 * weight
        return loss_scaler.apply(scaler.move_nothing, [grad], [weight]).finite

    apply.get_concrete_function(tf.TensorSpec([6]))
