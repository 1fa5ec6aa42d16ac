"""Guards new values in the place of gradients on their way through `unscale`, which divides what is a derivative."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import gradients_of, modes, modes_with

import scaler

SCALE = 3.0
"""No power of two: what is divided and multiplied again is another number."""
VALUES = np.float32([2e-38, 0.1, 7.7, 3e38])
LARGE = 2**17
"""Elements. Eager mode keeps no copy of as many."""


def made(size=4):
    weight, own = keras.Variable(tf.ones([2])), keras.Variable(tf.zeros([size]), name="own")
    own.overwrite_with_gradient = True
    return [weight, own], keras.optimizers.SGD(1.0), scaler.LossScaler(scaler.Static(SCALE))


def taken(loss_scaler, weight, values):
    """The gradients of a scaled loss, and a new value."""
    return [gradients_of(loss_scaler, lambda: tf.reduce_sum(weight * [3.0, 4.0]), weight), tf.identity(values)]


@modes_with(["tell"], eager=[[False], [True]], graph=[[True]])
def test_unscale_and_apply_leave_a_new_value_as_it_is(execute, tell):
    variables, optimizer, loss_scaler = made()

    def step(values):
        unscaled = loss_scaler.unscale(taken(loss_scaler, variables[0], values), *([variables] if tell else []))
        return loss_scaler.apply(optimizer, unscaled, variables, unscaled=True).finite, unscaled

    finite, unscaled = execute(step)(VALUES)
    assert finite
    np.testing.assert_array_equal(variables[1], VALUES)
    np.testing.assert_array_equal(variables[0], [-2.0, -3.0])
    if tell:
        np.testing.assert_array_equal(unscaled[1], VALUES)


@modes("eager")
def test_masters_know_which_values_are_new(execute):
    variables, optimizer, loss_scaler = made()
    variables[0] = keras.Variable(tf.ones([2], tf.float16), dtype="float16")
    masters = scaler.MasterWeights(variables)

    def step(values):
        unscaled = loss_scaler.unscale(taken(loss_scaler, masters.weights[0], values), masters)
        return loss_scaler.apply(optimizer, unscaled, masters, unscaled=True).finite

    assert execute(step)(VALUES)
    np.testing.assert_array_equal(variables[1], VALUES)


@modes_with(["steps"], eager=[[None]], graph=[[2]])
def test_the_calls_of_tf_keras_two(execute, steps):
    variables, _, _ = made()
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=steps)
    optimizer = scaler.LossScaleOptimizer(inner, scaler.Static(SCALE))
    optimizer.build(variables)

    def step(values):
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(tf.reduce_sum(variables[0] * [3.0, 4.0]))
        grads = [tape.gradient(scaled, variables[0]), tf.identity(values)]
        unscaled = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(zip(unscaled, variables, strict=True))
        return optimizer.loss_scaler.counters.applied

    run = execute(step)
    for values in [VALUES, VALUES / 2][: steps or 1]:
        run(values)
    np.testing.assert_array_equal(variables[1], VALUES)
    np.testing.assert_array_equal(variables[0], [-2.0, -3.0])


def test_a_step_in_eager_mode_goes_back_to_scaled_gradients():
    variables, _, _ = made()
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0), scaler.Static(SCALE))
    for unscales in (True, False):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(variables[0] * [3.0, 4.0]))
        grads = [tape.gradient(scaled, variables[0]), tf.constant(VALUES)]
        optimizer.apply(optimizer.get_unscaled_gradients(grads) if unscales else grads, variables)
        np.testing.assert_array_equal(variables[1], VALUES)


@pytest.mark.parametrize("change", [lambda one: one * 2.0, lambda one: tf.clip_by_norm(one, 1.0)])
@modes("eager", "graph")
def test_a_new_value_that_was_changed_since_is_refused(execute, change):
    variables, optimizer, loss_scaler = made()

    def step(values):
        unscaled = loss_scaler.unscale(taken(loss_scaler, variables[0], values))
        return loss_scaler.apply(optimizer, list(map(change, unscaled)), variables, unscaled=True).finite

    with pytest.raises(scaler.InvalidArgument, match=r"variable 'own' is its new value, and a loss scale may have"):
        execute(step)(VALUES)
    np.testing.assert_array_equal(variables[1], np.zeros(4))


@pytest.mark.parametrize(
    "divides", [lambda one, scale: one / scale, lambda one, scale: tf.cast(one, tf.float32) / scale]
)
def test_a_graph_sees_a_division_by_hand(divides):
    variables, optimizer, loss_scaler = made()

    @tf.function
    def step(values):
        grads = taken(loss_scaler, variables[0], values)
        unscaled = [divides(one, loss_scaler.loss_scale) for one in grads]
        return loss_scaler.apply(optimizer, unscaled, variables, unscaled=True).finite

    with pytest.raises(scaler.InvalidArgument, match="may have divided it"):
        step(VALUES)


@modes("eager", "graph")
def test_a_new_value_that_nobody_divided_may_stand_beside_gradients_divided_by_hand(execute):
    variables, optimizer, loss_scaler = made()

    def step(values):
        grad, new = taken(loss_scaler, variables[0], values)
        return loss_scaler.apply(optimizer, [grad / SCALE, new], variables, unscaled=True).finite

    assert execute(step)(VALUES)
    np.testing.assert_array_equal(variables[1], VALUES)


def test_a_graph_knows_a_new_value_that_did_not_come_through_unscale():
    variables, optimizer, loss_scaler = made()

    def step(values):
        grads = taken(loss_scaler, variables[0], values)
        unscaled = loss_scaler.unscale(grads)
        return loss_scaler.apply(optimizer, [unscaled[0], grads[1] + 0.0], variables, unscaled=True).finite

    assert tf.function(step)(VALUES)
    np.testing.assert_array_equal(variables[1], VALUES)


@pytest.mark.parametrize("apart", ["unscale", "apply"])
def test_what_another_function_unscaled_is_refused(apart):
    variables, optimizer, loss_scaler = made()

    def unscale(values):
        return loss_scaler.unscale(taken(loss_scaler, variables[0], values))

    def apply(*unscaled):
        return loss_scaler.apply(optimizer, list(unscaled), variables, unscaled=True).finite

    first, second = tf.function(unscale), apply if apart == "unscale" else tf.function(apply)
    with pytest.raises(scaler.InvalidArgument, match="may have divided it"):
        second(*first(VALUES))


def test_a_large_value_is_not_kept_alive_in_eager_mode():
    variables, optimizer, loss_scaler = made(LARGE)
    values = tf.fill([LARGE], 0.1)
    unscaled = loss_scaler.unscale(taken(loss_scaler, variables[0], values))
    with pytest.raises(scaler.InvalidArgument, match=r"what unscale\(grads, variables\) returned"):
        loss_scaler.apply(optimizer, unscaled, variables, unscaled=True)
    unscaled = loss_scaler.unscale(taken(loss_scaler, variables[0], values), variables)
    assert loss_scaler.apply(optimizer, unscaled, variables, unscaled=True).finite
    np.testing.assert_array_equal(variables[1], values)


def test_lists_that_do_not_match_are_refused():
    variables, _, loss_scaler = made()
    grads = taken(loss_scaler, variables[0], VALUES)
    with pytest.raises(scaler.InvalidArgument, match=r"^unscale: 2 gradients for 1 variables"):
        loss_scaler.unscale(grads, variables[:1])
    with pytest.raises(scaler.InvalidArgument, match=r"^unscale: the gradient of .* has shape"):
        loss_scaler.unscale(grads, variables[::-1])


@pytest.mark.parametrize("tell", [False, True])
def test_one_that_micro_batches_have_summed_in_a_variable_is_refused(tell):
    """Their mean is not the largest, which a whole batch gives; and `unscale` may have divided it."""
    variables, optimizer, loss_scaler = made()
    totals = [tf.Variable(tf.zeros(one.shape)) for one in variables]

    def add(values):
        grads = loss_scaler.unscale(taken(loss_scaler, variables[0], values), *([variables] if tell else []))
        for total, grad in zip(totals, grads, strict=True):
            total.assign_add(grad)

    def move():
        loss_scaler.apply(optimizer, [total / 4.0 for total in totals], variables, unscaled=True)

    with pytest.raises(scaler.InvalidArgument, match=r"'own' is its new value"):
        tf.function(lambda: (add(VALUES), move()), autograph=False)()
    tf.function(add, autograph=False)(VALUES)
    with pytest.raises(scaler.InvalidArgument, match=r"'own' is its new value"):  # The sum of another function.
        tf.function(move, autograph=False)()
    np.testing.assert_array_equal(variables[1], tf.zeros(4))


def test_an_eager_one_may_be_older_than_the_loss():
    weight, own = keras.Variable([1.0, 2.0]), keras.Variable(1.0)
    own.overwrite_with_gradient = True
    loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10, growth_interval=2))
    optimizer = keras.optimizers.SGD(0.0)
    for number in range(6):
        with tf.GradientTape() as tape:
            new = tf.constant(2.0 + number)
            scaled = loss_scaler.scale(tf.reduce_sum(weight.value))
        grads = [tape.gradient(scaled, weight.value), new]
        assert loss_scaler.apply(optimizer, grads, [weight, own]).finite
        assert own.numpy() == 2.0 + number
