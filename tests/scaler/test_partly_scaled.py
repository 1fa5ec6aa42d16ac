"""Guards that gradients of an unscaled loss beside those of a scaled one are noticed, and that nothing else is."""

import warnings

import keras
import pytest
import tensorflow as tf
from step_programs import trace_no_branches

import scaler

SAID = "only a part of them comes from a scaled loss"


@pytest.fixture(autouse=True)
def _without_branches(monkeypatch):
    trace_no_branches(monkeypatch)


class Model:
    def __init__(self):
        self.loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10))
        self.first, self.second = tf.Variable(tf.ones([3, 2]), name="first"), tf.Variable(tf.ones([2]), name="second")
        self.weights = [self.first, self.second]
        self.momentum = tf.Variable(tf.zeros([3, 2]), trainable=False)

    def grads(self, x, loss_of):
        with tf.GradientTape(persistent=True) as tape:
            scaled = self.loss_scaler.scale(tf.reduce_mean(tf.square(tf.tanh(x @ self.first) + self.second)))
            plain = tf.reduce_sum(tf.square(self.first)) + tf.reduce_sum(tf.square(self.second))
            loss = loss_of(scaled, plain)
        return tape.gradient(scaled, self.weights), tape.gradient(loss, self.weights)


def total(scaled, plain):
    return scaled + plain


def penalty(scaled, plain):
    return plain


MISTAKES = {
    "noise": (penalty, lambda model, scaled, other: [one + tf.random.normal(one.shape) for one in scaled]),
    "scaled by a number": (
        penalty,
        lambda model, scaled, other: [a + b * 1024.0 for a, b in zip(scaled, other, strict=True)],
    ),
    "a penalty is added to the scaled loss": (total, lambda model, scaled, other: other),
    "a gradient of a list is not scaled": (penalty, lambda model, scaled, other: [scaled[0], other[1]]),
    "gradients are summed": (penalty, lambda model, scaled, other: [a + b for a, b in zip(scaled, other, strict=True)]),
    "weight decay by hand": (penalty, lambda model, scaled, other: [scaled[0] + 0.1 * model.first, scaled[1]]),
}
FINE = {
    "the penalty is scaled, too": (
        lambda scaled, plain: scaled, lambda model, scaled, other: other,
    ),
    "zeros": (penalty, lambda model, scaled, other: [scaled[0], tf.zeros_like(model.second)]),
    "a constant": (penalty, lambda model, scaled, other: [one + 1e-8 for one in scaled]),
    "a variable outside of the model": (
        penalty, lambda model, scaled, other: [scaled[0] + model.momentum, scaled[1]],
    ),
    "centred": (penalty, lambda model, scaled, other: [one - tf.reduce_mean(one) for one in scaled]),
    "scaled by hand": (
        penalty,
        lambda model, scaled, other: [a + b * model.loss_scaler.loss_scale for a, b in zip(scaled, other, strict=True)],
    ),
}  # fmt: skip


def run(loss_of, made):
    model = Model()

    @tf.function(autograph=False)
    def step(x):
        scaled, other = model.grads(x, loss_of)
        model.loss_scaler.apply(scaler.move_nothing, made(model, scaled, other), model.weights)

    step.get_concrete_function(tf.TensorSpec([4, 3]))


@pytest.mark.parametrize("case", MISTAKES)
def test_an_unscaled_part_is_noticed(case):
    with pytest.warns(scaler.ScaleWarning, match=SAID):
        run(*MISTAKES[case])


@pytest.mark.parametrize("how", ["unscale", "get_unscaled_gradients"])
def test_so_is_one_among_gradients_that_the_user_unscales(how):
    weight, x = tf.Variable(tf.ones([3, 2])), tf.ones([4, 3])
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1), scaler.Dynamic(2.0**10))
    optimizer.build([weight])
    loss_scaler = optimizer.loss_scaler

    @tf.function(autograph=False)
    def step(penalised):
        with tf.GradientTape() as tape:
            loss, penalty = tf.reduce_mean(tf.square(x @ weight)), tf.reduce_sum(tf.square(weight))
            scaled = loss_scaler.scale(loss) + penalty if penalised else loss_scaler.scale(loss + penalty)
        grads = tape.gradient(scaled, [weight])
        if how == "unscale":
            loss_scaler.apply(optimizer.inner_optimizer, loss_scaler.unscale(grads), [weight], unscaled=True)
        else:
            optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(grads), [weight], strict=True))

    with warnings.catch_warnings():
        warnings.simplefilter("error", scaler.ScaleWarning)
        step.get_concrete_function(False)
    with pytest.warns(scaler.ScaleWarning, match=rf"unscale\(grads\).*{SAID}"):
        step.get_concrete_function(True)


@pytest.mark.parametrize("case", FINE)
def test_nothing_else_is(case):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(*FINE[case])
    assert not [str(one.message) for one in said if SAID in str(one.message)]


@pytest.mark.parametrize("other", ["plain", "none", "scaled"])
def test_a_branch_that_does_not_scale_is_noticed(other):
    model = Model()
    weight = tf.Variable(tf.ones([3, 2]))
    given = {
        "plain": lambda loss: loss,
        "none": lambda loss: tf.constant(0.0),
        "scaled": lambda loss: model.loss_scaler.scale(loss * 2.0),
    }

    @tf.function(autograph=False)
    def step(x, first):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ weight)))
            scaled = tf.cond(first, lambda: model.loss_scaler.scale(loss), lambda: given[other](loss))
        model.loss_scaler.apply(scaler.move_nothing, [tape.gradient(scaled, weight)], [weight])

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step.get_concrete_function(tf.TensorSpec([4, 3]), tf.TensorSpec([], tf.bool))
    assert any(SAID in str(one.message) for one in said) == (other == "plain")
