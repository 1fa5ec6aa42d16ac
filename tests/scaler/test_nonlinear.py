"""Guards that a function of a scaled loss is refused where its gradients are not the scale times those of a loss."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import plain_descent, said
from ways import graph

import scaler

SCALE = 2.0**10
START = [0.75, -0.5]
WEIGHTS = tf.Variable(START)
"""Which nobody moves."""


def one(weights):
    return tf.reduce_sum(weights * [2.0, 3.0]) + 1.0


def other(weights):
    return tf.reduce_sum(tf.square(weights)) + 0.25


LIMIT = 4.0

WRONG = {
    "a square": (lambda a, b, w: tf.square(a), "its power of 2"),
    "a power": (lambda a, b, w: a**3.0, "its power of 3"),
    "a root": (lambda a, b, w: tf.sqrt(b), "its power of 0.5"),
    "a root with an epsilon": (lambda a, b, w: tf.sqrt(b + 1e-7), "its power of 0.5"),
    "an inverse": (lambda a, b, w: 1.0 / b, "its power of -1"),
    "a logarithm": (lambda a, b, w: tf.math.log(b), "do not grow with it"),
    "a loss divided by itself": (lambda a, b, w: a / tf.stop_gradient(a), "do not grow with it"),
    "a product": (lambda a, b, w: a * b, "its power of 2"),
    "a product and a sum": (lambda a, b, w: a + a * b, "its power of 2"),
    "a ratio": (lambda a, b, w: a / b, "do not grow with it"),
    "a limit": (lambda a, b, w: tf.minimum(a, LIMIT), "in proportion"),
    "a limit below": (lambda a, b, w: tf.maximum(LIMIT, a), "in proportion"),
    "Huber": (lambda a, b, w: keras.losses.huber([0.0], [a], delta=LIMIT), "in proportion"),
    "a range": (lambda a, b, w: tf.clip_by_value(a, -LIMIT, LIMIT), "in proportion"),
    "a limit among several": (lambda a, b, w: tf.minimum(a + b, LIMIT) / 2.0, "in proportion"),
    "flooding": (lambda a, b, w: tf.abs(a - LIMIT) + LIMIT, "in proportion"),
    "a hinge": (lambda a, b, w: tf.nn.relu(a - LIMIT), "in proportion"),
    "an exponential": (lambda a, b, w: tf.exp(a * 1e-3), "in proportion"),
    "a tangent": (lambda a, b, w: tf.tanh(a), "in proportion"),
    "softplus": (lambda a, b, w: tf.nn.softplus(a), "in proportion"),
    "a choice by a limit": (lambda a, b, w: tf.where(a < LIMIT, a, 0.1 * a), "in proportion"),
    "a branch by a limit": (lambda a, b, w: tf.cond(a < LIMIT, lambda: a, lambda: 0.1 * a), "in proportion"),
    "in a function": (lambda a, b, w: graph(lambda loss: tf.square(loss))(a), "its power of 2"),
    "all in a function": (lambda a, b, w: graph(lambda: tf.minimum(a, LIMIT))(), "in proportion"),
}


def gradients(functions, scale, judge):
    """What `judge` makes of the gradient at START of each function of two scaled losses and the weights."""
    with tf.GradientTape(persistent=True) as tape:
        losses = scale(one(WEIGHTS)), scale(other(WEIGHTS))
        made = [function(*losses, WEIGHTS) for function in functions]
    return [judge(tape.gradient(loss, WEIGHTS)) for loss in made]


def eager(functions, scale=1.0):
    return gradients(functions, lambda loss: loss * scale, lambda grad: grad / scale)


def unscaled_in_a_graph(functions, strategy):
    loss_scaler = scaler.LossScaler(strategy)

    # AutoGraph would read a table of functions again for each of them.
    @graph
    def step():
        return loss_scaler.unscale(gradients(functions, loss_scaler.scale, lambda grad: grad))

    return step()


def test_a_function_that_is_not_proportional_to_the_scaled_loss_is_refused():
    """And trains otherwise."""
    loss_scaler, told = scaler.LossScaler(scaler.Dynamic(SCALE)), []

    def judge(grad):
        told.append(said(lambda: loss_scaler.apply(plain_descent, [grad], [WEIGHTS])))

    functions = [function for function, _ in WRONG.values()]
    graph(lambda: gradients(functions, loss_scaler.scale, judge)).get_concrete_function()
    for (name, (_, words)), one_said, *slopes in zip(
        WRONG.items(), told, eager(functions, SCALE), eager(functions), strict=True
    ):
        assert re.search(rf"apply\(grads\): .*{words}", one_said), name
        assert not np.allclose(*slopes, rtol=1e-3), name


RIGHT = {
    "itself": lambda a, b, w: a,
    "a sum": lambda a, b, w: a + b,
    "a weighted sum": lambda a, b, w: 0.25 * a - b * 3.0 + tf.add_n([a, b]),
    "a mean": lambda a, b, w: tf.reduce_mean(tf.stack([a, b, 0.0])),
    "for each replica": lambda a, b, w: a / tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, tf.float32),
    "by a batch": lambda a, b, w: a / tf.cast(tf.shape(w)[0], tf.float32),
    "16 bits": lambda a, b, w: tf.cast(tf.cast(a, tf.bfloat16), tf.float32),
    "a slice of a list": lambda a, b, w: tf.concat([tf.reshape(a, [1]), [b]], 0)[0],
    "unstacked": lambda a, b, w: tf.unstack(tf.stack([a, b]))[1],
    "gathered": lambda a, b, w: tf.gather(tf.stack([a, b]), [0, 0])[1],
    "a mask": lambda a, b, w: tf.reduce_sum(tf.stack([a, b]) * tf.cast(w > 0.0, tf.float32)),
    "a weight of the model": lambda a, b, w: a * w[0],
    "a softmax of weights": lambda a, b, w: tf.reduce_sum(tf.nn.softmax(w) * tf.stack([a, b])),
    "a product of a matrix": lambda a, b, w: tf.linalg.matvec([[0.5, 2.0]], tf.stack([a, b]))[0],
    "chosen where finite": lambda a, b, w: tf.where(tf.math.is_finite(a), a, 0.0),
    "a branch where finite": lambda a, b, w: tf.cond(tf.math.is_finite(a), lambda: 0.5 * a, lambda: tf.zeros_like(a)),
    "chosen below infinity": lambda a, b, w: tf.where(tf.abs(a) < np.inf, a, 0.0),
    "chosen below float16's largest": lambda a, b, w: tf.where(a < tf.float16.max, a, 0.0),
    "a branch by the data": lambda a, b, w: tf.cond(w[0] > 0.0, lambda: a, lambda: 2.0 * a),
    "stopped": lambda a, b, w: tf.identity(a) + tf.stop_gradient(tf.square(a)),
    "the largest": lambda a, b, w: tf.reduce_max(tf.stack([a, b])),
    "the smaller": lambda a, b, w: tf.minimum(a, b),
    "no less than zero": lambda a, b, w: tf.nn.relu(a) + tf.maximum(b, 0.0),
    "no less than an epsilon": lambda a, b, w: tf.maximum(b, 1e-7),
    "without its sign": lambda a, b, w: tf.abs(a) + tf.abs(a - b),
    "a norm": lambda a, b, w: tf.norm(tf.stack([a, b])),
    "a root of a product": lambda a, b, w: tf.sqrt(a * b),
    "weights by share": lambda a, b, w: tf.stop_gradient(b / (a + b + 1e-8)) * a + b,
    "checked": lambda a, b, w: tf.debugging.check_numerics(a, "loss"),
    "a constant": lambda a, b, w: a + LIMIT,
    "a factor and its inverse": lambda a, b, w: a * w[1] / w[1],
    "a function of two": lambda a, b, w: graph(lambda a, b: tf.maximum(a, b))(a, b),
}


def test_what_is_proportional_to_scaled_losses_trains_as_without_a_scale():
    functions = list(RIGHT.values())
    found = unscaled_in_a_graph(functions, scaler.Dynamic(SCALE))
    for name, *slopes in zip(RIGHT, found, eager(functions), strict=True):
        np.testing.assert_allclose(*slopes, rtol=1e-5, err_msg=name)


def test_a_loss_that_a_function_scales():
    loss_scaler, weights = scaler.LossScaler(scaler.Dynamic(SCALE)), tf.Variable(START)
    inner = graph(lambda: loss_scaler.scale(one(weights)))

    @graph
    def step(function):
        with tf.GradientTape() as tape:
            loss = function(inner())
        return loss_scaler.unscale([tape.gradient(loss, weights)])[0]

    np.testing.assert_array_equal(step(lambda loss: loss * 0.5), [1.0, 1.5])
    with pytest.raises(scaler.InvalidArgument, match="its power of 2"):
        step(tf.square)


READS = {
    "in the tape": lambda loss_scaler, losses: losses() * loss_scaler.loss_scale,
    "on the left": lambda loss_scaler, losses: loss_scaler.loss_scale * losses(),
    "of each example": lambda loss_scaler, losses: tf.stack([losses(), losses()]) * loss_scaler.loss_scale,
}


POWERS = {
    "0.5": lambda loss, scale: loss * tf.sqrt(scale),
    "2": lambda loss, scale: loss * scale**2,
    "-1": lambda loss, scale: loss / scale,
}
FIRST_POWERS = {
    "a root twice": lambda loss, scale: loss * tf.sqrt(scale) * tf.sqrt(scale),
    "a square and back": lambda loss, scale: loss * tf.square(scale) / scale,
    "by its logarithm": lambda loss, scale: loss * tf.exp(tf.math.log(scale)),
    "a part": lambda loss, scale: loss * (scale / 8.0),
    "twice and divided": lambda loss, scale: loss * scale * scale / scale,
}


def by_hand(function, **named):
    """The gradient of a step whose user reads the scale inside of the tape: `function` makes its loss of another."""
    loss_scaler = scaler.LossScaler(scaler.Dynamic(SCALE))

    @graph
    def step():
        with tf.GradientTape() as tape:
            loss = function(loss_scaler, lambda: one(WEIGHTS))
        own = {name: of(loss_scaler.loss_scale) for name, of in named.items()}
        return loss_scaler.unscale([tape.gradient(loss, WEIGHTS)], **own)[0]

    return step()


@pytest.mark.parametrize("power", POWERS)
def test_another_power_of_the_scale_is_refused(power):
    with pytest.raises(scaler.InvalidArgument, match=rf"unscale\(grads\): .*they grow with its power of {power}\."):
        by_hand(lambda own, loss: POWERS[power](loss(), own.loss_scale))


def test_what_comes_back_to_the_first_power_is_not():
    def added(own, loss):
        losses = [function(loss(), own.loss_scale) for function in FIRST_POWERS.values()]
        return tf.add_n([*losses, *(tf.reduce_sum(tf.abs(read(own, loss))) for read in READS.values())])

    # Of eight losses one is divided by 8, and one counts twice; the logarithm rounds.
    np.testing.assert_allclose(by_hand(added), np.multiply([2.0, 3.0], 8.125), rtol=1e-5)


def test_a_scale_of_ones_own_may_be_any_function_of_it():
    found = by_hand(lambda own, loss: POWERS["0.5"](loss(), own.loss_scale), loss_scale=tf.sqrt)
    np.testing.assert_array_equal(found, [2.0, 3.0])


@pytest.mark.parametrize("read", READS)
def test_a_function_of_a_loss_that_was_scaled_by_hand_is_refused(read):
    for function, words in ((tf.square, "its power of 2"), (lambda loss: tf.minimum(loss, LIMIT), "in proportion")):
        with pytest.raises(scaler.InvalidArgument, match=words):
            by_hand(lambda *given, function=function: function(READS[read](*given)))


def test_a_limit_that_moves_with_the_scale_is_no_mistake():
    loss_scaler = scaler.LossScaler(scaler.Dynamic(SCALE))

    @graph
    def step():
        with tf.GradientTape(persistent=True) as tape:
            scaled = tf.minimum(loss_scaler.scale(one(WEIGHTS)), LIMIT * loss_scaler.scale_of_gradients)
            grads, _ = tf.clip_by_global_norm([tape.gradient(scaled, WEIGHTS)], loss_scaler.loss_scale)
        return loss_scaler.unscale(grads)[0]

    np.testing.assert_allclose(step(), np.divide([2.0, 3.0], 13.0**0.5), rtol=1e-5)


def test_what_is_logged_of_a_scaled_loss_is_no_mistake():
    logged = tf.Variable(0.0)

    def function(loss, _, weights):
        logged.assign(tf.minimum(tf.square(loss), LIMIT))
        return loss

    np.testing.assert_array_equal(unscaled_in_a_graph([function], scaler.Dynamic(SCALE)), eager([function]))


@pytest.mark.parametrize("strategy", [scaler.NoScaling(), scaler.Static(1.0)])
def test_a_scale_of_one_multiplies_nothing(strategy):
    functions = [WRONG["a square"][0]]
    np.testing.assert_allclose(unscaled_in_a_graph(functions, strategy), eager(functions))


def test_a_limit_that_may_be_scaled_is_not_judged():
    """An argument may be the scaled loss of an earlier step, and a variable an average of such losses."""
    loss_scaler, average = scaler.LossScaler(scaler.Dynamic(SCALE)), tf.Variable(1e6)

    @graph
    def step(limit):
        with tf.GradientTape() as tape:
            scaled = tf.minimum(loss_scaler.scale(one(WEIGHTS)), limit) + loss_scaler.scale(other(WEIGHTS)) / average
        return loss_scaler.unscale([tape.gradient(scaled, WEIGHTS)])[0]

    assert np.isfinite(step(tf.constant(4.0))).all()


def test_micro_batches_in_a_loop():
    loss_scaler = scaler.LossScaler(scaler.Dynamic(SCALE))

    @graph
    def step(function):
        def add(index, total):
            with tf.GradientTape() as tape:
                loss = function(loss_scaler.scale(one(WEIGHTS) * tf.cast(index, tf.float32)))
            return index + 1, total + tape.gradient(loss, WEIGHTS)

        _, total = tf.while_loop(lambda index, _: index < 3, add, (0, tf.zeros([2])))
        return loss_scaler.unscale([total])[0]

    np.testing.assert_array_equal(step(tf.abs), [6.0, 9.0])
    with pytest.raises(scaler.InvalidArgument, match="its power of 2"):
        step(tf.square)


def test_under_fit():
    class Squares(keras.Sequential):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.square(self.optimizer.scale_loss(tf.reduce_mean(tf.square(self(data[0]) - data[1]))))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    squares = Squares([keras.Input([2]), keras.layers.Dense(1)])
    squares.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1), scaler.Dynamic(SCALE)))
    with pytest.raises(scaler.InvalidArgument, match="its power of 2"):
        squares.fit(np.ones([4, 2], np.float32), np.ones([4, 1], np.float32), verbose=0)
