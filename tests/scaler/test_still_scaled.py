"""Guards that gradients which are called unscaled, and are not, do not move weights too far without a word."""

import pytest
import tensorflow as tf
from scaler_cases import gradients_of
from step_programs import trace_no_branches

import scaler


@pytest.fixture(autouse=True)
def _without_branches(monkeypatch):
    trace_no_branches(monkeypatch)


def descent(grads, variables):
    for grad, variable in zip(grads, variables, strict=True):
        variable.assign_sub(grad / 8)


def run(unscale, by_hand=False, strategy=None):
    """A step whose gradients go through `unscale` and are then said to be unscaled; the weights after it."""
    weights = [tf.Variable([[1.0, 2.0], [3.0, 4.0]]), tf.Variable([1.0, 2.0])]
    loss_scaler = scaler.LossScaler(strategy or scaler.Dynamic(1024.0))

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(x, weights[0]) + weights[1]))
            scale = loss_scaler.loss_scale if by_hand else None
            scaled = loss * scale if by_hand else loss_scaler.scale(loss)
        grads = unscale(loss_scaler, tape.gradient(scaled, weights), scale)
        loss_scaler.apply(descent, grads, weights, unscaled=True)

    step(tf.ones([1, 2]))
    return [weight.numpy().tolist() for weight in weights]


def twice_as_long(loss_scaler, grads, scale):
    del scale
    return [tf.clip_by_norm(grad, 1e6) + 0.0 for grad in loss_scaler.unscale(grads)]


UNSCALED = {
    "unscale": lambda loss_scaler, grads, scale: loss_scaler.unscale(grads),
    "unscale and more": twice_as_long,
    "divided": lambda loss_scaler, grads, scale: [grad / loss_scaler.loss_scale for grad in grads],
    "by the inverse": lambda loss_scaler, grads, scale: [grad * (1.0 / loss_scaler.loss_scale) for grad in grads],
    "by what gradients carry": lambda loss_scaler, grads, scale: [
        grad / loss_scaler.scale_of_gradients for grad in grads
    ],
    "by a constant": lambda loss_scaler, grads, scale: [grad * (1.0 / 1024.0) for grad in grads],
    "through integers": lambda loss_scaler, grads, scale: [
        grad / tf.cast(tf.cast(loss_scaler.loss_scale, tf.int32), tf.float32) for grad in grads
    ],
    "by the reciprocal": lambda loss_scaler, grads, scale: [
        grad * tf.math.reciprocal(loss_scaler.loss_scale) + 0.0 for grad in grads
    ],
}


RIGHT = [[[0.375, 1.0], [2.375, 3.0]], [0.375, 1.0]]


@pytest.mark.parametrize("how", UNSCALED)
def test_unscaled_gradients_are_not_suspected(how):
    assert run(UNSCALED[how]) == RIGHT


def test_a_scale_read_once_for_both_is_not_suspected():
    by_hand = run(lambda loss_scaler, grads, scale: [grad / scale for grad in grads], by_hand=True)
    assert by_hand == RIGHT


@pytest.mark.parametrize("how", ["argument", "inverse", "variable"])
def test_a_scale_that_comes_from_outside_is_not_suspected(how):
    weight, loss_scaler = tf.Variable([1.0, 2.0]), scaler.LossScaler(scaler.Dynamic(1024.0))
    own = tf.Variable(1024.0)

    @tf.function(autograph=False)
    def step(given):
        grad = gradients_of(loss_scaler, lambda: tf.reduce_sum(tf.square(weight)), weight)
        unscaled = {"argument": lambda: grad / given, "inverse": lambda: grad * given, "variable": lambda: grad / own}
        loss_scaler.apply(descent, [unscaled[how]()], [weight], unscaled=True)

    step(tf.constant(1.0 / 1024.0 if how == "inverse" else 1024.0))
    assert weight.numpy().tolist() == [0.75, 1.5]


def test_a_constant_is_taken_off_by_hand_as_tutorials_do():
    by_hand = run(lambda loss_scaler, grads, scale: [grad / 1024.0 for grad in grads], strategy=scaler.Static(1024.0))
    assert by_hand == RIGHT


@pytest.mark.parametrize("by_hand", [False, True])
def test_scaled_ones_are_named(by_hand):
    with pytest.warns(scaler.ScaleWarning, match=r"unscaled=True.*nothing divided them by the loss scale.*Leave"):
        run(lambda loss_scaler, grads, scale: [grad + 0.0 for grad in grads], by_hand=by_hand)
