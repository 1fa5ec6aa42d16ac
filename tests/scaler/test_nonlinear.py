"""Guards that a function of a scaled loss is refused where its gradients are not the scale times those of a loss."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import modes, plain_descent

import scaler

SCALE = 2.0**10
START = [0.75, -0.5]


def as_graph(step):
    """Without AutoGraph, which would read a table of functions again for each of them."""
    return tf.function(step, autograph=False)


def gradient(function, execute=as_graph, scaled=True, strategy=None):
    """The gradient of `function(scale, weights)` at START, unscaled if `scale` scales."""
    loss_scaler, weights = scaler.LossScaler(strategy or scaler.Dynamic(SCALE)), tf.Variable(START)

    def step():
        with tf.GradientTape() as tape:
            loss = function(loss_scaler.scale if scaled else tf.identity, weights)
        grads = [tape.gradient(loss, weights)]
        return loss_scaler.unscale(grads)[0] if scaled else grads[0]

    return execute(step)()


def eager(step):
    return step


def one(weights):
    return tf.reduce_sum(weights * [2.0, 3.0]) + 1.0


def other(weights):
    return tf.reduce_sum(tf.square(weights)) + 0.25


LIMIT = 4.0

WRONG = {
    "a square": (lambda s, w: tf.square(s(one(w))), "its power of 2"),
    "a power": (lambda s, w: s(one(w)) ** 3.0, "its power of 3"),
    "a root": (lambda s, w: tf.sqrt(s(other(w))), "its power of 0.5"),
    "a root with an epsilon": (lambda s, w: tf.sqrt(s(other(w)) + 1e-7), "its power of 0.5"),
    "an inverse": (lambda s, w: 1.0 / s(other(w)), "its power of -1"),
    "a logarithm": (lambda s, w: tf.math.log(s(other(w))), "do not grow with it"),
    "a loss divided by itself": (
        lambda s, w: (lambda loss: loss / tf.stop_gradient(loss))(s(one(w))),
        "do not grow with it",
    ),
    "a product": (lambda s, w: s(one(w)) * s(other(w)), "its power of 2"),
    "a product and a sum": (lambda s, w: s(one(w)) + s(one(w)) * s(other(w)), "its power of 2"),
    "a ratio": (lambda s, w: s(one(w)) / s(other(w)), "do not grow with it"),
    "a limit": (lambda s, w: tf.minimum(s(one(w)), LIMIT), "in proportion"),
    "a limit below": (lambda s, w: tf.maximum(LIMIT, s(one(w))), "in proportion"),
    "Huber": (lambda s, w: keras.losses.huber([0.0], [s(one(w))], delta=LIMIT), "in proportion"),
    "a range": (lambda s, w: tf.clip_by_value(s(one(w)), -LIMIT, LIMIT), "in proportion"),
    "a limit among several": (lambda s, w: tf.minimum(s(one(w)) + s(other(w)), LIMIT) / 2.0, "in proportion"),
    "flooding": (lambda s, w: tf.abs(s(one(w)) - LIMIT) + LIMIT, "in proportion"),
    "a hinge": (lambda s, w: tf.nn.relu(s(one(w)) - LIMIT), "in proportion"),
    "an exponential": (lambda s, w: tf.exp(s(one(w)) * 1e-3), "in proportion"),
    "a tangent": (lambda s, w: tf.tanh(s(one(w))), "in proportion"),
    "softplus": (lambda s, w: tf.nn.softplus(s(one(w))), "in proportion"),
    "a choice by a limit": (
        lambda s, w: (lambda loss: tf.where(loss < LIMIT, loss, 0.1 * loss))(s(one(w))),
        "in proportion",
    ),
    "a branch by a limit": (
        lambda s, w: (lambda loss: tf.cond(loss < LIMIT, lambda: loss, lambda: 0.1 * loss))(s(one(w))),
        "in proportion",
    ),
    "in a function": (lambda s, w: tf.function(lambda loss: tf.square(loss))(s(one(w))), "its power of 2"),
    "scaled in a function": (lambda s, w: tf.square(tf.function(lambda: s(one(w)))()), "its power of 2"),
    "all in a function": (lambda s, w: tf.function(lambda: tf.minimum(s(one(w)), LIMIT))(), "in proportion"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_function_that_is_not_proportional_to_the_scaled_loss_is_refused(name):
    function, words = WRONG[name]
    loss_scaler, weights = scaler.LossScaler(scaler.Dynamic(SCALE)), tf.Variable(START)

    def step():
        with tf.GradientTape() as tape:
            loss = function(loss_scaler.scale, weights)
        loss_scaler.apply(plain_descent, [tape.gradient(loss, weights)], [weights])

    with pytest.raises(scaler.InvalidArgument, match=rf"apply\(grads\): .*{words}"):
        as_graph(step)()


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_would_train_otherwise(name):
    function, _ = WRONG[name]
    assert not np.allclose(gradient(function, eager), gradient(function, eager, scaled=False), rtol=1e-3)


RIGHT = {
    "itself": lambda s, w: s(one(w)),
    "a sum": lambda s, w: s(one(w)) + s(other(w)),
    "a weighted sum": lambda s, w: 0.25 * s(one(w)) - s(other(w)) * 3.0 + tf.add_n([s(one(w)), s(other(w))]),
    "a mean": lambda s, w: tf.reduce_mean(tf.stack([s(one(w)), s(other(w)), 0.0])),
    "for each replica": lambda s, w: s(one(w)) / tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, tf.float32),
    "by a batch": lambda s, w: s(one(w)) / tf.cast(tf.shape(w)[0], tf.float32),
    "16 bits": lambda s, w: tf.cast(tf.cast(s(one(w)), tf.bfloat16), tf.float32),
    "a slice of a list": lambda s, w: tf.concat([tf.reshape(s(one(w)), [1]), [s(other(w))]], 0)[0],
    "unstacked": lambda s, w: tf.unstack(tf.stack([s(one(w)), s(other(w))]))[1],
    "gathered": lambda s, w: tf.gather(tf.stack([s(one(w)), s(other(w))]), [0, 0])[1],
    "a mask": lambda s, w: tf.reduce_sum(tf.stack([s(one(w)), s(other(w))]) * tf.cast(w > 0.0, tf.float32)),
    "a weight of the model": lambda s, w: s(one(w)) * w[0],
    "a softmax of weights": lambda s, w: tf.reduce_sum(tf.nn.softmax(w) * tf.stack([s(one(w)), s(other(w))])),
    "a product of a matrix": lambda s, w: tf.linalg.matvec([[0.5, 2.0]], tf.stack([s(one(w)), s(other(w))]))[0],
    "chosen where finite": lambda s, w: (lambda loss: tf.where(tf.math.is_finite(loss), loss, 0.0))(s(one(w))),
    "a branch where finite": lambda s, w: (
        lambda loss: tf.cond(tf.math.is_finite(loss), lambda: 0.5 * loss, lambda: tf.zeros_like(loss))
    )(s(one(w))),
    "chosen below infinity": lambda s, w: (lambda loss: tf.where(tf.abs(loss) < np.inf, loss, 0.0))(s(one(w))),
    "chosen below float16's largest": lambda s, w: (lambda loss: tf.where(loss < tf.float16.max, loss, 0.0))(s(one(w))),
    "a branch by the data": lambda s, w: (lambda loss: tf.cond(w[0] > 0.0, lambda: loss, lambda: 2.0 * loss))(
        s(one(w))
    ),
    "stopped": lambda s, w: tf.identity(s(one(w))) + tf.stop_gradient(tf.square(s(one(w)))),
    "the largest": lambda s, w: tf.reduce_max(tf.stack([s(one(w)), s(other(w))])),
    "the smaller": lambda s, w: tf.minimum(s(one(w)), s(other(w))),
    "no less than zero": lambda s, w: tf.nn.relu(s(one(w))) + tf.maximum(s(other(w)), 0.0),
    "no less than an epsilon": lambda s, w: tf.maximum(s(other(w)), 1e-7),
    "without its sign": lambda s, w: tf.abs(s(one(w))) + tf.abs(s(one(w)) - s(other(w))),
    "a norm": lambda s, w: tf.norm(tf.stack([s(one(w)), s(other(w))])),
    "a root of a product": lambda s, w: tf.sqrt(s(one(w)) * s(other(w))),
    "weights by share": lambda s, w: (lambda a, b: tf.stop_gradient(b / (a + b + 1e-8)) * a + b)(
        s(one(w)), s(other(w))
    ),
    "checked": lambda s, w: tf.debugging.check_numerics(s(one(w)), "loss"),
    "a constant": lambda s, w: s(one(w)) + LIMIT,
    "a factor and its inverse": lambda s, w: s(one(w)) * w[1] / w[1],
    "a function": lambda s, w: tf.function(lambda loss: loss * 0.5)(s(one(w))),
    "scaled in a function": lambda s, w: tf.function(lambda: s(one(w)))() * 0.5,
    "a function of two": lambda s, w: tf.function(lambda a, b: tf.maximum(a, b))(s(one(w)), s(other(w))),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_proportional_to_scaled_losses_trains_as_without_a_scale(name):
    np.testing.assert_allclose(gradient(RIGHT[name]), gradient(RIGHT[name], eager, scaled=False), rtol=1e-5)


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


def a_step_by_hand(scaled, **named):
    """A step whose user reads the scale inside of the tape and multiplies by a function of it."""
    # What a step selects is traced in half the time of what it branches to.
    loss_scaler, optimizer = scaler.LossScaler(select=True), keras.optimizers.SGD(1.0)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2, "relu")])
    variables = model.trainable_variables

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = scaled(tf.reduce_mean(tf.square(model(tf.ones([4, 3])) - 1.0)), loss_scaler.loss_scale)
        own = {name: of(loss_scaler.loss_scale) for name, of in named.items()}
        return loss_scaler.apply(optimizer, tape.gradient(loss, variables), variables, **own).finite

    return step


@pytest.mark.parametrize("power", POWERS)
def test_another_power_of_the_scale_is_refused(power):
    with pytest.raises(scaler.InvalidArgument, match=f"they grow with its power of {power}\\."):
        a_step_by_hand(POWERS[power])()


@pytest.mark.parametrize("how", FIRST_POWERS)
def test_what_comes_back_to_the_first_power_is_not(how):
    assert a_step_by_hand(FIRST_POWERS[how])()


def test_a_scale_of_ones_own_may_be_any_function_of_it():
    assert a_step_by_hand(POWERS["0.5"], loss_scale=tf.sqrt)()


@pytest.mark.parametrize("read", READS)
def test_a_loss_that_was_scaled_by_hand(read):
    def scaled(function):
        loss_scaler, weights = scaler.LossScaler(scaler.Dynamic(SCALE), select=True), tf.Variable(START)
        optimizer = keras.optimizers.SGD(1.0)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = function(READS[read](loss_scaler, lambda: one(weights)))
            return loss_scaler.apply(optimizer, [tape.gradient(loss, weights)], [weights]).finite

        return step()

    assert scaled(lambda loss: tf.abs(loss) * 0.5)
    with pytest.raises(scaler.InvalidArgument, match="its power of 2"):
        scaled(tf.square)
    with pytest.raises(scaler.InvalidArgument, match="in proportion"):
        scaled(lambda loss: tf.minimum(loss, LIMIT))


@pytest.mark.parametrize("kind", ["scale_of_gradients", "loss_scale"])
def test_a_limit_that_moves_with_the_scale_is_no_mistake(kind):
    loss_scaler, weights = scaler.LossScaler(scaler.Dynamic(SCALE), select=True), tf.Variable(START)
    optimizer = keras.optimizers.SGD(1.0)

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            scaled = tf.minimum(loss_scaler.scale(one(weights)), LIMIT * getattr(loss_scaler, kind))
            grads, _ = tf.clip_by_global_norm([tape.gradient(scaled, weights)], getattr(loss_scaler, kind))
        return loss_scaler.apply(optimizer, grads, [weights]).finite

    assert step()
    np.testing.assert_allclose(weights, np.subtract(START, np.divide([2.0, 3.0], 13.0**0.5)), rtol=1e-5)


def test_what_is_logged_of_a_scaled_loss_is_no_mistake():
    logged = tf.Variable(0.0)

    def function(scale, weights):
        scaled = scale(one(weights))
        logged.assign(tf.minimum(tf.square(scaled), LIMIT))
        return scaled

    np.testing.assert_array_equal(gradient(function), gradient(function, scaled=False))


@pytest.mark.parametrize("strategy", [scaler.NoScaling(), scaler.Static(1.0)])
def test_a_scale_of_one_multiplies_nothing(strategy):
    square = WRONG["a square"][0]
    np.testing.assert_allclose(gradient(square, strategy=strategy), gradient(square, scaled=False))


def test_a_limit_that_may_be_scaled_is_not_judged():
    """An argument may be the scaled loss of an earlier step, and a variable an average of such losses."""
    loss_scaler, weights, average = scaler.LossScaler(scaler.Dynamic(SCALE)), tf.Variable(START), tf.Variable(1e6)

    @tf.function
    def step(limit):
        with tf.GradientTape() as tape:
            scaled = tf.minimum(loss_scaler.scale(one(weights)), limit) + loss_scaler.scale(other(weights)) / average
        return loss_scaler.apply(plain_descent, [tape.gradient(scaled, weights)], [weights]).finite

    assert step(tf.constant(4.0))


def test_unscale_refuses_it_too():
    loss_scaler, weights = scaler.LossScaler(scaler.Dynamic(SCALE)), tf.Variable(START)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.square(loss_scaler.scale(one(weights)))
        return loss_scaler.unscale([tape.gradient(loss, weights)])[0]

    with pytest.raises(scaler.InvalidArgument, match=r"unscale\(grads\): .*its power of 2"):
        step()


@modes("graph", "xla")
def test_micro_batches_in_a_loop(execute):
    loss_scaler, weights = scaler.LossScaler(scaler.Dynamic(SCALE)), tf.Variable(START)

    def step(function):
        total = tf.zeros([2])
        for index in tf.range(3):
            with tf.GradientTape() as tape:
                loss = function(loss_scaler.scale(one(weights) * tf.cast(index, tf.float32)))
            total += tape.gradient(loss, weights)
        return loss_scaler.apply(plain_descent, [total], [weights]).finite

    assert execute(lambda: step(tf.abs))()
    with pytest.raises(scaler.InvalidArgument, match="its power of 2"):
        execute(lambda: step(tf.square))()


def test_under_fit():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])

    class Squares(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = model

        def call(self, inputs):
            return self.inner(inputs)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.square(self.optimizer.scale_loss(tf.reduce_mean(tf.square(self(data[0]) - data[1]))))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    squares = Squares()
    squares.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1), scaler.Dynamic(SCALE)))
    with pytest.raises(scaler.InvalidArgument, match="its power of 2"):
        squares.fit(np.ones([4, 2], np.float32), np.ones([4, 1], np.float32), verbose=0)
