"""Guards that a loss or probabilities in float16 are spoken of, once, and nothing else is."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import modes, modes_with

import loops
import scaler

X, Y = np.ones((4, 3), np.float32), np.zeros((4,), np.int32)
PROBABILITIES = keras.losses.SparseCategoricalCrossentropy()
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@modes_with(["face"], eager=[["scaler"], ["losses"]], graph=[["optimizer"]])
def test_a_float16_loss_is_named_once(execute, face):
    scale = {
        "scaler": lambda: scaler.LossScaler().scale,
        "optimizer": lambda: scaler.LossScaleOptimizer(keras.optimizers.SGD()).scale_loss,
        "losses": lambda: (lambda of: lambda loss: of.scale({"a": loss})["a"])(scaler.PerLoss({"a": scaler.Dynamic()})),
    }[face]()
    run = execute(lambda loss: scale(tf.cast(loss, tf.float16)))
    with pytest.warns(scaler.ScaleWarning, match="the loss is float16.*dtype='float32'"):
        assert run(np.float32(2.0)).dtype == tf.float32
    run(np.float32(2.0))
    tf.function(lambda: scale(tf.constant(2.0, tf.float16)))()


@modes_with(["kind"], eager=[["bfloat16"]], graph=[["float32"], ["float64"]], xla=[["bfloat16"]])
def test_other_losses_are_not(execute, kind):
    execute(scaler.LossScaler().scale)(tf.constant(2.0, kind))


def network(*last, kind="float16"):
    return keras.Sequential([keras.Input([3], dtype=kind), keras.layers.Dense(5, dtype=kind), *last])


def take(model, loss_fn, execute=tf.function):
    step = loops.TrainStep(model, loss_fn, keras.optimizers.SGD(0.1), loss_scaler=scaler.LossScaler())
    return execute(lambda x, y: step((x, y))["applied"])(tf.constant(X), tf.constant(Y))


class Written(keras.Model):
    """Its softmax is in its own call."""

    def __init__(self, kind="float16"):
        super().__init__(dtype=kind)
        self.dense = keras.layers.Dense(5, dtype=kind)

    def call(self, x):
        return tf.nn.softmax(self.dense(x))


@pytest.mark.slow_with("<lambda>1", "Written")
@pytest.mark.parametrize(
    "make",
    [
        lambda: network(keras.layers.Softmax(dtype="float16")),
        lambda: network(keras.layers.Dense(2, dtype="float16"), keras.layers.Activation("sigmoid", dtype="float16")),
        Written,
    ],
)
def test_probabilities_in_float16_are_named(make):
    with pytest.warns(scaler.ScaleWarning, match="softmax or sigmoid in float16.*dtype='float32'"):
        assert take(make(), PROBABILITIES)


@modes("eager")
def test_a_train_steps_loss_in_float16_is_named(execute):
    def loss(y, prediction):
        return tf.reduce_mean(prediction)

    with pytest.warns(scaler.ScaleWarning, match="the loss is float16"):
        assert take(network(), loss, execute)


def test_in_eager_mode_too():
    with pytest.warns(scaler.ScaleWarning, match="softmax or sigmoid in float16"):
        take(network(keras.layers.Dense(2, activation="softmax", dtype="float16")), PROBABILITIES, lambda step: step)


def dense(dtype, activation=None):
    return keras.layers.Dense(2, activation=activation, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(3))
def test_what_is_right_is_not(place):
    make, loss = (
        (lambda: network(dense("float32", "softmax")), PROBABILITIES),
        (lambda: network(dense("float16"), keras.layers.Softmax(dtype="float32")), PROBABILITIES),
        (lambda: network(dense("float16", "sigmoid"), dense("float32")), LOGITS),
    )[place]
    take(make(), loss)


def fitted(model, loss_fn):
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1)), loss=loss_fn, jit_compile=False)
    model.fit(X, Y, verbose=0)


def by_hand(model, loss_fn):
    loss_scaler, weights = scaler.LossScaler(), model.trainable_variables
    masters, optimizer = scaler.MasterWeights(weights), keras.optimizers.SGD(0.1)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(loss_fn(Y, model(X)))
        return loss_scaler.apply(optimizer, tape.gradient(scaled, weights), masters).finite

    step.get_concrete_function()


@pytest.mark.slow_with("fitted")
@pytest.mark.parametrize("train", [fitted, by_hand])
def test_probabilities_are_named_in_fit_and_by_hand_too(train):
    with pytest.warns(scaler.ScaleWarning, match="softmax or sigmoid in float16") as seen:
        train(network(keras.layers.Dense(2, activation="softmax", dtype="float16")), PROBABILITIES)
    assert len(seen) == 1


@pytest.mark.slow
def test_gates_and_pools_and_penalties_are_not():
    """A logarithm is taken of none of these."""
    x = keras.Input([3])
    logits = keras.layers.Dense(2, dtype="float32")(x)
    for activation in ("sigmoid", "softmax"):
        gate = keras.layers.Dense(2, activation=activation, dtype="float16")(x)
        by_hand(keras.Model(x, keras.layers.Multiply(dtype="float32")([logits, gate])), LOGITS)
    masks = keras.layers.Dense(1, activation="sigmoid", dtype="float16")(x)
    by_hand(keras.Model(x, masks), keras.losses.MeanSquaredError())


@pytest.mark.slow_with("by_hand", "fitted")
@pytest.mark.parametrize("train", [fitted, by_hand])
def test_a_softmax_before_the_last_layer_is_not(train):
    kind = "float16" if train is by_hand else "float32"
    train(network(keras.layers.Softmax(dtype="float16"), keras.layers.Dense(2, dtype=kind)), LOGITS)


def test_a_logarithm_in_float16_by_hand_is_named():
    loss_scaler, logits = scaler.LossScaler(), tf.Variable(tf.ones([4, 2], tf.float16))

    @tf.function
    def step():
        chosen = tf.gather(tf.nn.softmax(logits), tf.zeros([4], tf.int32), batch_dims=1)
        return loss_scaler.scale(tf.cast(-tf.reduce_mean(tf.math.log(chosen)), tf.float32))

    with pytest.warns(scaler.ScaleWarning, match="softmax or sigmoid in float16"):
        step()


@pytest.mark.parametrize("compiled", [True, False])
def test_a_bilinear_resize_that_xla_may_refuse_is_named(compiled):
    loss_scaler = scaler.LossScaler()

    @tf.function(jit_compile=compiled)
    def loss(x):
        with tf.name_scope("up"):
            return loss_scaler.scale(tf.reduce_sum(tf.image.resize(tf.cast(x, tf.float16), [8, 8])))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss.get_concrete_function(tf.TensorSpec([2, 4, 4, 1]))
    assert ["bilinear resizes ['up']" in str(one.message) for one in said] == [True] * compiled
