"""Guards steps in which the scale moves between a loss and the `apply` of its gradients: never wrong in silence.

Each program is run with a scale that moves at every step, and without one. It ends with the same weights, or it is
refused or warned of; those that are right are neither.
"""

import warnings

import numpy as np
import pytest
import tensorflow as tf
from step_programs import trace_no_branches

import scaler

MOVES = scaler.Event(tf.constant(True))


def linear(values):
    return tf.reduce_sum(values * [2.0, 3.0]) + 1.0


def square(values):
    return tf.reduce_sum(tf.square(values)) + 0.25


def waves(values):
    return tf.reduce_sum(tf.sin(values) * values)


def descent(grads, variables):
    for grad, variable in zip(grads, variables, strict=True):
        variable.assign_sub(0.1 * grad)


class World:
    """Two weights, what is kept, and a scaler or two."""

    def __init__(self, scales):
        self.scales = scales
        self.s = self.scaler(2.0**10)
        self.a, self.b = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 1.0])
        self.kept = tf.Variable([0.0, 0.0], trainable=False)
        self.count, self.share = tf.Variable(1.0, trainable=False), tf.Variable([1.0], trainable=False)

    def scaler(self, first):
        return scaler.LossScaler(scaler.Dynamic(first, growth_interval=1) if self.scales else scaler.NoScaling())

    def grad(self, loss, variable, by=None):
        with tf.GradientTape() as tape:
            scaled = (by or self.s).scale(loss(variable))
        return tape.gradient(scaled, variable)

    def apply(self, grad, variable, **options):
        self.s.apply(descent, [grad], [variable], **options)

    def moves(self):
        self.s.update(MOVES)


def filled_in_a_loop(w):
    for _ in tf.range(2):
        w.kept.assign(w.grad(square, w.a))
    w.moves()
    w.apply(w.grad(waves, w.b), w.b)
    w.apply(w.kept.read_value(), w.a)


def loop_that_may_take_no_turn(w):
    grad = w.grad(square, w.a)
    w.moves()
    other = w.grad(waves, w.b)
    for _ in tf.range(tf.size(w.kept) - 2):
        grad = w.grad(square, w.a)
    w.apply(grad, w.a)
    w.apply(other, w.b)


def shift_register(w):
    first = second = third = tf.zeros([2])
    for _ in tf.range(5):
        third = second
        second = first
        first = w.grad(square, w.a)
    w.moves()
    w.apply(w.grad(waves, w.b), w.b)
    w.apply(third, w.a)


def momentum_over_a_counter(w):
    w.kept.assign(0.5 * w.kept + w.grad(square, w.a) / w.count)
    w.apply(w.kept.read_value(), w.a)


def added_in_a_function_before_and_after(w):
    inner = tf.function(lambda: w.kept.assign_add(w.grad(square, w.a) / 2.0))

    w.kept.assign(tf.zeros([2]))
    inner()
    w.apply(w.grad(waves, w.b), w.b)
    inner()
    w.apply(w.kept.read_value(), w.a)


def added_in_a_loop_that_moves(w):
    w.kept.assign(tf.zeros([2]))
    for _ in tf.range(3):
        w.kept.assign_add(w.grad(square, w.a) / 2.0)
        w.moves()
    w.apply(w.kept.read_value(), w.a)


def first_of_two_in_a_function(w):
    @tf.function
    def inner():
        grad = w.grad(square, w.a)
        w.moves()
        w.grad(waves, w.b)
        return grad

    w.apply(inner(), w.a)


def sum_of_two_in_a_branch(w):
    def branch():
        grad = w.grad(square, w.a)
        w.moves()
        return grad + w.grad(waves, w.a)

    w.apply(tf.cond(w.b[0] > 0.0, branch, lambda: w.grad(square, w.a)), w.a)


def divided_by_the_next_scale(w):
    grad = w.grad(square, w.a)
    w.moves()
    w.apply(grad / w.s.loss_scale, w.a, unscaled=True)


def multiplied_by_the_next_scale(w):
    grad = w.grad(square, w.a)
    w.moves()
    now = w.s.loss_scale
    with tf.GradientTape() as tape:
        scaled = waves(w.a) * now
    w.apply(grad + tape.gradient(scaled, w.a), w.a)


WRONG = [
    divided_by_the_next_scale,
    multiplied_by_the_next_scale,
    first_of_two_in_a_function,
    sum_of_two_in_a_branch,
    filled_in_a_loop,
    loop_that_may_take_no_turn,
    shift_register,
    momentum_over_a_counter,
    added_in_a_function_before_and_after,
    added_in_a_loop_that_moves,
]
"""What cannot be known, or mixes scales."""
LOOPS = {filled_in_a_loop, loop_that_may_take_no_turn, shift_register, added_in_a_loop_that_moves}
"""Those that AutoGraph has to convert."""


def sharpness_aware_twice(w):
    for _ in range(2):
        grads = [w.grad(square, w.a), w.grad(square, w.b)]
        norm = tf.linalg.global_norm(grads)
        away = [0.05 * grad / norm for grad in grads]
        w.a.assign_add(away[0])
        w.b.assign_add(away[1])
        there = [w.grad(waves, w.a), w.grad(waves, w.b)]
        w.a.assign_sub(away[0])
        w.b.assign_sub(away[1])
        w.s.apply(descent, there, [w.a, w.b])


def loss_weighted_by_norms(w):
    first, second = w.grad(square, w.a), w.grad(waves, w.a)
    share = tf.stop_gradient(tf.norm(first) / (tf.norm(second) + 1e-6))
    w.apply(w.grad(square, w.b), w.b)
    w.apply(w.grad(lambda v: square(v) + share * waves(v), w.a), w.a)


def descent_by_hand_and_on(w):
    grad = w.grad(square, w.a) / w.s.scale_of_gradients
    w.a.assign_sub(0.1 * grad)
    w.moves()
    w.apply(w.grad(lambda v: square(v) * square(w.a), w.b), w.b)


def share_in_a_variable(w):
    for _ in range(2):
        first, second = w.grad(linear, w.a), w.grad(square, w.a)
        w.share.assign(0.9 * w.share + 0.1 * tf.norm(first) / tf.norm(second))
        w.apply(first + w.share * second, w.a)


def last_loss_as_a_weight(w):
    with tf.GradientTape() as tape:
        scaled = w.s.scale(square(w.b))
    share = tf.stop_gradient(scaled / w.s.scale_of_gradients)
    w.apply(tape.gradient(scaled, w.b), w.b)
    w.apply(w.grad(lambda v: square(v) * share, w.a), w.a)


def one_in_a_function_that_moves_behind_it(w):
    @tf.function
    def inner():
        grad = w.grad(square, w.a)
        w.moves()
        return grad

    w.apply(inner(), w.a)


def last_of_two_in_a_function(w):
    @tf.function
    def inner():
        w.apply(w.grad(waves, w.b), w.b)
        return w.grad(square, w.a)

    w.apply(inner(), w.a)


def divided_by_the_scale_before(w):
    before = w.s.loss_scale
    grad = w.grad(square, w.a)
    inverse = 1.0 / w.s.loss_scale
    w.moves()
    w.apply(grad * inverse, w.a, unscaled=True)
    w.apply(w.grad(waves, w.b) * 1.0, w.b, loss_scale=w.s.scale_of_gradients)
    w.kept.assign(w.kept + before)


def divided_by_that_of_the_last_loss(w):
    grad = w.grad(square, w.a)
    w.moves()
    w.apply(grad / w.s.scale_of_gradients, w.a, unscaled=True)


def brought_to_one_scale(w):
    grad, before = w.grad(square, w.a), w.s.loss_scale
    w.moves()
    now = w.s.loss_scale
    with tf.GradientTape() as tape:
        scaled = waves(w.a) * now
    w.apply((grad * (now / before) + tape.gradient(scaled, w.a)) / now, w.a, unscaled=True)


RIGHT = [
    divided_by_the_scale_before,
    divided_by_that_of_the_last_loss,
    brought_to_one_scale,
    one_in_a_function_that_moves_behind_it,
    last_of_two_in_a_function,
    sharpness_aware_twice,
    loss_weighted_by_norms,
    descent_by_hand_and_on,
    share_in_a_variable,
    last_loss_as_a_weight,
]


def said_in(call, *arguments):
    """What a call returns, and what is said of a step while it is traced."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = call(*arguments)
        except scaler.InvalidArgument as error:
            return None, [str(error)]
    return found, [str(one.message) for one in said if issubclass(one.category, scaler.ScaleWarning)]


def weights_after(step, world):
    """The weights after two calls."""
    for _ in range(2):
        step(world)
    return [world.a.numpy(), world.b.numpy()]


@pytest.mark.parametrize("program", WRONG)
def test_what_mixes_scales_or_cannot_be_known_is_said(program, monkeypatch):
    trace_no_branches(monkeypatch)
    assert said_in(tf.function(program, autograph=program in LOOPS).get_concrete_function, World(True))[1]


@pytest.mark.parametrize("program", RIGHT)
def test_what_is_right_is_silent_and_ends_with_the_same_weights(program, monkeypatch):
    if program is not brought_to_one_scale:
        trace_no_branches(monkeypatch)
    weights, said = said_in(weights_after, tf.function(program, autograph=False), World(True))
    assert said == []
    np.testing.assert_allclose(weights, weights_after(program, World(False)), rtol=1e-5)
