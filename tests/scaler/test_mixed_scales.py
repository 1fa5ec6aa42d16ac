"""Gradients of which a part carries another factor than the scale that divides them: refused in every graph."""

import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import descent
from step_programs import trace_no_branches

import scaler


@pytest.fixture(autouse=True)
def _without_branches(monkeypatch):
    trace_no_branches(monkeypatch)


def parts(make):
    """Two losses of the slopes 1 and 2, and the gradients that `make(tape, first, second, u, v)` takes of them."""
    first, second = (scaler.LossScaler(scaler.Dynamic(scale)) for scale in (8.0, 1024.0))
    u, v = tf.Variable([0.0, 0.0]), tf.Variable([0.0])
    optimizer = descent(u, v)

    def step(**options):
        with tf.GradientTape(persistent=True) as tape:
            losses = tf.reduce_sum(u) + 3.0 * tf.reduce_sum(v), 2.0 * tf.reduce_sum(u) + 4.0 * tf.reduce_sum(v)
            made = make(tape, first, second, losses)
        grads = made([u, v])
        return first.apply(optimizer, grads, [u, v], **options).finite

    return step, u, v


def two_scalers(tape, first, second, losses):
    a, b = first.scale(losses[0]), second.scale(losses[1])
    return lambda weights: [
        tf.add(*pair) for pair in zip(*(tape.gradient(own, weights) for own in (a, b)), strict=True)
    ]


def losses_added(tape, first, second, losses):
    total = first.scale(losses[0]) + second.scale(losses[1])
    return lambda weights: tape.gradient(total, weights)


def subtracted_behind_a_product(tape, first, second, losses):
    a, b = first.scale(losses[0]), second.scale(losses[1])
    return lambda weights: [0.5 * (tape.gradient(a, weight) - tape.gradient(b, weight)) for weight in weights]


def unscaled_and_scaled(tape, first, second, losses):
    a, b = first.scale(losses[0]), first.scale(losses[1])
    return lambda weights: [
        one + other
        for one, other in zip(first.unscale(tape.gradient(a, weights)), tape.gradient(b, weights), strict=True)
    ]


def a_list_of_both(tape, first, second, losses):
    a, b = first.scale(losses[0]), second.scale(losses[1])
    return lambda weights: [tape.gradient(a, weights[0]), tape.gradient(b, weights[1])]


def a_list_with_one_unscaled(tape, first, second, losses):
    a = first.scale(losses[0])
    return lambda weights: [tape.gradient(a, weights[0]), *first.unscale([0.5 * tape.gradient(a, weights[1])])]


REFUSED = {
    two_scalers: "a sum of parts",
    losses_added: "a sum of parts",
    subtracted_behind_a_product: "a sum of parts",
    unscaled_and_scaled: "a sum of parts",
    a_list_of_both: "scaled a part of these gradients",
    a_list_with_one_unscaled: "scaled a part of these gradients|went through unscale already",
}


@pytest.mark.parametrize(("make", "compiles"), [*((make, False) for make in REFUSED), (two_scalers, True)])
def test_parts_of_other_scales_are_refused(make, compiles):
    step, u, v = parts(make)
    with pytest.raises(scaler.InvalidArgument, match=REFUSED[make]):
        tf.function(step, jit_compile=compiles)()
    assert not np.any(u.numpy())
    assert not np.any(v.numpy())


def test_a_list_of_unscaled_gradients_with_a_scaled_one_among_them():
    step, *_ = parts(a_list_with_one_unscaled)
    with pytest.warns(scaler.ScaleWarning, match="too large by this factor"):
        tf.function(lambda: step(unscaled=True)).get_concrete_function()


def sum_of_one_scaler(tape, first, second, losses):
    return two_scalers(tape, first, first, losses)


def a_penalty_by_another(tape, first, second, losses):
    """The other's scale is divided out by hand, in the forward pass."""
    (slope,) = tape.watched_variables()[:1]
    with tf.GradientTape() as inner:
        scaled = tf.reduce_sum(slope**2) * second.loss_scale
    penalty = tf.reduce_sum((inner.gradient(scaled, slope) / second.scale_of_gradients) ** 2)
    total = first.scale(losses[0] + losses[1] + penalty)
    return lambda weights: tape.gradient(total, weights)


@pytest.mark.parametrize("make", [sum_of_one_scaler, a_penalty_by_another])
def test_sums_of_one_scale_are_taken(make):
    step, u, v = parts(make)
    assert tf.function(step)()
    assert u.numpy().tolist() == [-3.0, -3.0]
    assert v.numpy().tolist() == [-7.0]


@pytest.mark.parametrize("how", ["one takes both", "in its branch"])
def test_branches_of_two_scalers(how):
    one, other = (scaler.LossScaler(scaler.Static(scale), select=True) for scale in (2.0**10, 2.0**6))
    weight = tf.Variable([0.0])
    optimizer = descent(weight)

    @tf.function
    def step(first):
        with tf.GradientTape() as tape:
            loss = -tf.reduce_sum(weight)
            scaled = tf.cond(first, lambda: one.scale(loss), lambda: other.scale(loss))
        grads = tape.gradient(scaled, [weight])
        if how == "one takes both":
            one.apply(optimizer, grads, [weight])
        else:
            tf.cond(
                first,
                lambda: one.apply(optimizer, grads, [weight]).finite,
                lambda: other.apply(optimizer, grads, [weight]).finite,
            )

    if how == "one takes both":
        with pytest.raises(scaler.InvalidArgument, match="one branch of a"):
            step(tf.constant(True))
    else:
        step(tf.constant(True))
        step(tf.constant(False))
        assert weight.numpy().tolist() == [2.0]
