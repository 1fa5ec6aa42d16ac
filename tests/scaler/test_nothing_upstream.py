"""Guards that a forgotten `scale` is noticed in a graph even if the scale was read, and no other step is suspected."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored
from scaler_cases import gradients_of, plain_descent

import scaler

SAID = r"nothing that they are computed from comes from scale\(loss\)"
SEEDS = keras.random.SeedGenerator(1)
FORGOTTEN = pytest.warns(scaler.ScaleWarning, match=SAID)


def a_step(loss_scaler, weight, scaled, jit_compile=False):
    """A step whose loss is what `scaled(loss)` makes of it."""
    optimizer = keras.optimizers.SGD(1.0)

    @tf.function(jit_compile=jit_compile)
    def step(x, factor):
        with tf.GradientTape() as tape:
            loss = scaled(tf.reduce_mean(tf.square(tf.linalg.matvec(x, weight))), factor)
        outcome = loss_scaler.apply(optimizer, [tape.gradient(loss, weight)], [weight])
        return outcome.finite, loss_scaler.loss_scale

    return step


def run(step, factor=1.0):
    return step(tf.ones([8, 3]), tf.constant(factor))


@pytest.mark.slow_with("True")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_log_of_the_scale_hides_nothing(jit_compile):
    loss_scaler = scaler.LossScaler()
    assert loss_scaler.loss_scale == 2.0**15
    with FORGOTTEN as seen:
        run(a_step(loss_scaler, tf.Variable([1.0, 2.0, 3.0]), lambda loss, _: loss, jit_compile))
    assert len(seen) == 1


@pytest.mark.parametrize(
    "draw",
    [
        lambda: tf.random.uniform([]),
        lambda: keras.random.normal([], seed=SEEDS),
        lambda: tf.random.stateless_truncated_normal([], [1, 2]),
    ],
)
def test_nor_does_a_number_that_is_drawn(draw):
    """As the time of a diffusion, or the weight of a mixture."""
    loss_scaler = scaler.LossScaler(select=True)
    assert loss_scaler.loss_scale == 2.0**15
    with FORGOTTEN:
        run(a_step(loss_scaler, tf.Variable([1.0, 2.0, 3.0]), lambda loss, _: loss * draw()))


def test_a_scale_in_another_function_hides_nothing():
    loss_scaler, weight = scaler.LossScaler(select=True), tf.Variable([1.0, 2.0, 3.0])
    run(a_step(loss_scaler, weight, lambda loss, _: loss_scaler.scale(loss)))
    with FORGOTTEN:
        run(a_step(loss_scaler, weight, lambda loss, _: loss))


@pytest.mark.slow
def test_nor_inside_of_keras_layers_on_replicas():
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        loss_scaler = scaler.LossScaler()
    weights = model.trainable_variables
    assert loss_scaler.loss_scale == 2.0**15

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        return loss_scaler.apply(plain_descent, tape.gradient(loss, weights), weights).finite

    with FORGOTTEN:
        tf.function(lambda: strategy.run(step, (tf.ones([8, 3]),)))()


class ByHand:
    """Ways in which a loss is scaled, none of which uses `scale`."""

    def __init__(self):
        # What a step selects is traced in half the time of what it branches to.
        self.loss_scaler = scaler.LossScaler(select=True)
        self.kept = tf.Variable(2.0**15)
        self.read = self.loss_scaler.loss_scale

    def argument(self, loss, factor):
        return loss * factor

    def variable(self, loss, _):
        return loss * self.kept

    def captured(self, loss, _):
        return loss * self.read

    def number(self, loss, _):
        return loss * 2.0**15

    def read_in_the_tape(self, loss, _):
        return loss * self.loss_scaler.loss_scale

    def function(self, loss, _):
        return tf.numpy_function(lambda: self.read.numpy(), [], tf.float32) * loss

    def branch(self, loss, factor):
        return tf.cond(loss > 1.0, lambda: loss * factor, lambda: self.loss_scaler.scale(loss))

    def inner_function(self, loss, factor):
        return tf.function(lambda one, other: one * other)(loss, factor)


@pytest.mark.slow_with("branch")
@pytest.mark.parametrize("how", [name for name in vars(ByHand) if not name.startswith("_")])
def test_no_loss_scaled_by_hand_is_suspected(how):
    by_hand = ByHand()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(a_step(by_hand.loss_scaler, tf.Variable([1.0, 2.0, 3.0]), getattr(by_hand, how)), 2.0**15)


@pytest.mark.exhaustive_with("False-GRU", "False-LSTM", "False-SimpleRNN", "True-GRU", "True-LSTM")
@pytest.mark.parametrize("layer", [keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN])
@pytest.mark.parametrize("unroll", [False, True])
def test_no_recurrent_model_is_suspected(layer, unroll):
    model = keras.Sequential([keras.Input((4, 3)), layer(2, unroll=unroll)])
    loss_scaler, weights = scaler.LossScaler(), model.trainable_variables

    @tf.function(autograph=False)
    def step(x):
        return loss_scaler.apply(
            plain_descent, gradients_of(loss_scaler, lambda: tf.reduce_mean(model(x)), weights), weights
        ).finite

    assert step(tf.ones([2, 4, 3]))


def test_gradients_from_another_function_are_not_suspected():
    loss_scaler, weight = scaler.LossScaler(), tf.Variable([1.0, 2.0, 3.0])

    @tf.function(autograph=False)
    def gradient():
        return gradients_of(loss_scaler, lambda: tf.reduce_sum(weight), weight)

    @tf.function(autograph=False)
    def decay_and_apply(grad):
        return loss_scaler.apply(plain_descent, [grad + 0.01 * weight], [weight]).finite

    assert decay_and_apply(gradient())


def test_a_list_that_a_loop_fills_is_not_suspected():
    loss_scaler, weight = scaler.LossScaler(), tf.Variable([1.0, 2.0, 3.0])

    @tf.function
    def step():
        parts = tf.TensorArray(tf.float32, 2)
        for number in tf.range(2):
            parts = parts.write(number, gradients_of(loss_scaler, lambda: tf.reduce_sum(weight) / 2.0, weight))
        grad = tf.reduce_sum(parts.stack(), axis=0) * (1.0 + 0.0 * weight)
        return loss_scaler.apply(plain_descent, [grad], [weight]).finite

    assert step()


@pytest.mark.exhaustive_with("float16")
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_sums_of_scaled_gradients_that_the_user_keeps_are_not_suspected(kind):
    loss_scaler, weight = scaler.LossScaler(), tf.Variable(tf.ones([3], kind))
    masters, kept = scaler.MasterWeights([weight]), tf.Variable(tf.zeros([3]))

    @tf.function(autograph=False)
    def step(last):
        kept.assign_add(
            tf.cast(gradients_of(loss_scaler, lambda: tf.reduce_sum(tf.cast(weight, tf.float32)), weight), tf.float32)
        )
        if last:
            loss_scaler.apply(plain_descent, [kept + 0.0 * masters.weights[0]], masters)
        return kept

    step(False)
    # Of another mistake.
    with pytest.warns(scaler.ScaleWarning, match="sums scaled gradients over several calls") as said:
        step(True)
    assert len(said) == 1


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_a_forgotten_scale_is_seen_where_there_are_masters(kind):
    loss_scaler, weight = scaler.LossScaler(), tf.Variable(tf.ones([3], kind))
    masters = scaler.MasterWeights([weight])
    assert loss_scaler.loss_scale == 2.0**15

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.cast(weight, tf.float32)))
        return loss_scaler.apply(plain_descent, [tape.gradient(loss, weight)], masters).finite

    with FORGOTTEN:
        step()


X = tf.random.stateless_normal([24, 3], [1, 2])


def by_hand_steps(loss_scaler, weight):
    """Correct steps that other people wrote, whose scale comes by unusual ways."""
    kept, flat = tf.Variable([2.0**15]), tf.Variable(tf.zeros([1, 3]))

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

    def scaled_one(one):
        with tf.GradientTape() as tape:
            value = loss()
        return tape.gradient(value, weight, output_gradients=loss_scaler.scale(one(value)))

    def quantised():
        grad = gradient(lambda: loss_scaler.scale(loss()))
        return tf.cast(tf.cast(tf.round(grad), tf.int32), tf.float32)

    return {
        "stop_gradient": lambda: gradient(lambda: loss() * tf.stop_gradient(loss_scaler.loss_scale)),
        "fill": lambda: gradient(lambda: tf.reduce_sum(loss() * tf.fill([1], loss_scaler.loss_scale))),
        "output gradients": per_example,
        "scale of one": lambda: scaled_one(lambda loss: 1.0),
        "scale of ones like the loss": lambda: scaled_one(tf.ones_like),
        "a vector": lambda: gradient(lambda: loss() * kept[0]),
        "a flat sum": accumulated,
        "quantised": quantised,
        "a small constant": lambda: gradient(lambda: loss() * 128.0),
        "an odd constant": lambda: gradient(lambda: loss() * 1000.0),
    }


@pytest.mark.slow_with("a flat sum")
@pytest.mark.exhaustive_with("a vector", "an odd constant", "quantised", "stop_gradient")
@pytest.mark.parametrize("how", by_hand_steps(scaler.LossScaler(), tf.Variable([1.0, 2.0, 3.0])))
def test_a_scale_that_comes_by_an_unusual_way_is_not_suspected(how):
    loss_scaler, weight = scaler.LossScaler(select=True), tf.Variable([1.0, 2.0, 3.0])
    optimizer = keras.optimizers.SGD(1.0)
    assert loss_scaler.loss_scale == 2.0**15
    grad = by_hand_steps(loss_scaler, weight)[how]
    assert tf.function(lambda: loss_scaler.apply(optimizer, [grad()], [weight]).finite)()


@pytest.mark.parametrize("how", ["fill", "output gradients", "scale of one", "scale of ones like the loss"])
def test_and_it_is_what_divides_them(how):
    loss_scaler, weight = scaler.LossScaler(scaler.Dynamic(2.0**10), select=True), tf.Variable([1.0, 2.0, 3.0])
    optimizer = keras.optimizers.SGD(1.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.linalg.matvec(X, weight)))
    alone = tf.Variable(weight)
    plain_descent([tape.gradient(loss, weight)], [alone])
    grad = by_hand_steps(loss_scaler, weight)[how]
    assert tf.function(lambda: loss_scaler.apply(optimizer, [grad()], [weight]).finite)()
    np.testing.assert_allclose(weight, alone, rtol=1e-6)


def test_flat_gradients_given_as_one_argument_are_not_suspected():
    loss_scaler, weight = scaler.LossScaler(), tf.Variable(tf.ones([2, 3]))
    assert loss_scaler.loss_scale == 2.0**15

    @tf.function(autograph=False)
    def apply(flat):
        grad = tf.reshape(flat, [2, 3]) + 0.01 * weight
        return loss_scaler.apply(plain_descent, [grad], [weight]).finite

    assert apply(tf.ones([6]))
