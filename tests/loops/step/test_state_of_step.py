"""What a forward pass moves beside the non-trainable variables is put back by a skipped step, too."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from loop_cases import static
from models import batch, one_layer, squared_error

import loops
import scaler


def recurrent():
    return keras.Sequential([keras.Input(batch_shape=(2, 2, 3)), keras.layers.LSTM(1, stateful=True)]), (2, 2, 3)


def normalised():
    wrapped = keras.layers.SpectralNormalization(keras.layers.Dense(1))
    return keras.Sequential([keras.Input([4]), wrapped]), (2, 4)


MODELS = {"LSTM": recurrent, "SpectralNormalization": normalised}
MODES = {"eager": lambda step: step, "graph": tf.function, "xla": lambda step: tf.function(step, jit_compile=True)}


def everything(model):
    states = [state for layer in model.layers if getattr(layer, "stateful", False) for state in layer.states]
    return [variable.numpy().tobytes() for variable in (*model.variables, *states)]


SGD, RMSprop = keras.optimizers.SGD, keras.optimizers.RMSprop


# Each model, with an optimizer whose update branches. One whose does not is eager, and in the tests that follow.
@pytest.mark.slow_with("SpectralNormalization-xla-RMSprop", "LSTM-graph-RMSprop")
@pytest.mark.parametrize(
    ("name", "mode", "optimizer"),
    [
        *(("LSTM", "eager", SGD), ("LSTM", "graph", RMSprop)),
        *(("SpectralNormalization", "graph", RMSprop), ("SpectralNormalization", "xla", RMSprop)),
    ],
)
def test_a_skip_puts_back_what_the_forward_pass_moved(name, mode, optimizer):
    model, shape = MODELS[name]()
    step = loops.TrainStep(model, keras.losses.MeanSquaredError(), optimizer(0.01), loss_scaler=static(16.0))
    take = MODES[mode](step)
    rng = np.random.default_rng(0)
    x, y = tf.constant(rng.normal(size=shape), tf.float32), tf.ones([2, 1])
    assert take((x, y))["applied"]
    before = everything(model)
    for bad in (x * np.nan, x * np.inf):
        assert not take((bad, y))["applied"]
        assert everything(model) == before
    assert not take((x, y * 1e30))["applied"]
    assert everything(model) == before
    assert take((x, y))["applied"]
    assert everything(model) != before


def test_a_window_puts_it_back_as_well():
    model, shape = normalised()
    step = loops.TrainStep(model, keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.01), accumulate=2)
    x, y = tf.ones(shape), tf.ones([2, 1])
    before = everything(model)
    for _ in range(2):
        outputs = step((x, y * np.inf))
    assert not outputs["applied"]
    assert everything(model) == before


def test_an_update_that_is_taken_back_leaves_the_weight_as_before_the_forward_pass():
    model, shape = normalised()

    def spoils(grads, variables):
        for grad, variable in zip(grads, variables, strict=True):
            variable.assign_sub(grad * float("inf"))

    step = loops.TrainStep(model, keras.losses.MeanSquaredError(), spoils)
    before = everything(model)
    outputs = tf.function(step)((tf.ones(shape), tf.zeros([2, 1])))
    assert int(outputs["cause"]) == scaler.Cause.UPDATE
    assert everything(model) == before


@pytest.mark.parametrize("name", ["LSTM", "SpectralNormalization"])
def test_a_step_by_hand_puts_it_back(name):
    (model, shape), optimizer, loss_scaler = MODELS[name](), SGD(0.01), static(16.0)

    def step(x, y):
        before = scaler.snapshot(scaler.state_of(model))
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_mean((model(x, training=True) - y) ** 2))
        grads = tape.gradient(scaled, model.trainable_variables)
        return loss_scaler.apply(optimizer, grads, model.trainable_variables, rollback=before).finite

    assert step(tf.ones(shape), tf.ones([2, 1]))
    before = everything(model)
    assert not step(tf.ones(shape) * np.inf, tf.ones([2, 1]))
    assert everything(model) == before


@pytest.mark.slow_with("LSTM-False")
@pytest.mark.parametrize(("name", "eagerly"), [("LSTM", False), ("SpectralNormalization", True)])
def test_protect_puts_it_back(name, eagerly):
    model, shape = MODELS[name]()
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, "mse", run_eagerly=eagerly, jit_compile=False)
    scaler.protect(model)
    x, y = np.ones(shape, np.float32), np.ones([2, 1], np.float32)
    model.train_on_batch(x, y)
    before = everything(model)
    model.train_on_batch(x * np.inf, y)
    assert everything(model) == before
    model.train_on_batch(x, y)
    assert everything(model) != before


def test_variables_that_a_model_gets_after_the_step_was_made_are_put_back():
    model = one_layer()
    x, y = batch()
    steps = [
        (loops.ComposedStep([loops.Part("one", model, lambda x: tf.reduce_mean(model(x)), SGD())]), x * np.nan),
        (loops.TrainStep(model, squared_error, SGD(), accumulate=2), (x * np.nan, y)),
    ]
    scaler.formats.emulated("float8_e4m3fn")(model)
    for step, bad in steps:
        before = [variable.numpy() for variable in model.variables]
        for _ in range(2):
            outputs = step(bad)
        assert outputs["attempted"]
        assert not outputs["applied"]
        assert all(map(np.array_equal, before, [variable.numpy() for variable in model.variables]))
