"""Every wrong use gets one sentence that says what was passed and what to do."""

import contextlib
import re

import keras
import pytest
import tensorflow as tf
from versions import needs_keras

import halfstep as hs
import scaler

ADAM = keras.optimizers.Adam


def ours(**arguments):
    return scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0), **arguments)


def trained():
    """One whose single weight, of two numbers, has been updated once."""
    optimizer = ours()
    optimizer.apply([tf.constant([1.0, 2.0]) * optimizer.loss_scale], [tf.Variable([1.0, 2.0], name="weight")])
    return optimizer


@pytest.mark.parametrize(
    "wrong",
    [
        "scaler.LossScaleOptimizer('adamm')",
        "scaler.LossScaleOptimizer(None)",
        "scaler.LossScaleOptimizer(tf.Variable)",
        "scaler.LossScaleOptimizer(ours())",
        "scaler.LossScaleOptimizer(keras.optimizers.LossScaleOptimizer(ADAM()))",
        pytest.param(
            "keras.optimizers.LossScaleOptimizer(ours())",
            marks=needs_keras("a word from Keras's LossScaleOptimizer to the optimizer that it wraps"),
        ),
        "scaler.LossScaleOptimizer(ADAM(), 1024.0)",
        "ours(strategy=scaler.Static(2.0), initial_scale=4.0)",
        "ours(strategy=scaler.Dynamic(), dynamic_growth_steps=4)",
        "ours(strategy=scaler.Dynamic)",
        "ours(initial_scale=-1.0)",
        "ours(initial_scale='large')",
        "ours(initial_scale=True)",
        "ours(initial_scale=float('nan'))",
        "ours(dynamic_growth_steps=0)",
        "ours(dynamic_growth_steps='often')",
        "ours(dynamic_growth_steps=2.5)",
        "ours(dynamic_growth_steps=True)",
        "ours(dynamic=False)",
        "ours(dynamic='dynamic')",
        "ours(dynamic=1024.0)",
        "ours(dynamic=None)",
        "ours(name=3)",
        "ours(inner_optimizer=ADAM())",
        "ours(clipnorm=1.0)",
        "ours(use_ema=True)",
        "ours(ema_momentum=0.5)",
        "ours(gradient_accumulation_steps=2)",
        "ours(loss_scale_factor=2.0)",
        "ours(foo=1)",
        "ours().apply([tf.constant([1.0, 2.0])])",
        "ours().apply([None], [tf.Variable(1.0)])",
        "ours().apply([], [tf.Variable(1.0)])",
        "ours().apply(3, [tf.Variable(1.0)])",
        "ours().apply([tf.Variable(1.0)], [tf.constant(1.0)])",
        "ours().apply_gradients([])",
        "trained().apply([tf.constant([1.0, 2.0])] * 2)",
        "trained().apply([tf.constant(1.0)], [tf.Variable(1.0, name='other')])",
        "trained().apply([tf.constant([1.0, 2.0, 3.0])])",
        "trained().apply([None])",
        "trained().apply([tf.constant([1, 2])])",
        "ours().apply([tf.constant(1.0)] * 2, [tf.Variable(1.0)])",
        "ours().scale_loss(None)",
        "ours().scale_loss({'loss': tf.constant(1.0)})",
        "ours().scale_loss(tf.constant(1))",
        "ours().minimize(tf.constant(1.0), [tf.Variable(1.0)])",
        "ours().stateless_apply([], [], [])",
    ],
)
def test_sentences(wrong, snapshot):
    with pytest.raises(scaler.InvalidArgument) as caught:
        eval(wrong)
    assert re.sub(r" at 0x\w+", "", str(caught.value)) == snapshot


def test_a_refused_step_moves_nothing():
    optimizer, weight = ours(), tf.Variable([1.0, 2.0])
    for grads in ([tf.constant([1.0, 2.0]) * optimizer.loss_scale], [tf.constant([1.0, 2.0, 3.0])], [None]):
        with contextlib.suppress(scaler.InvalidArgument):
            optimizer.apply(grads, [weight])
    assert weight.numpy().tolist() == [0.0, 0.0]
    assert int(optimizer.iterations) == 1


def test_what_old_configurations_hold_does_nothing():
    held = {"weight_decay": None, "use_ema": False, "ema_momentum": 0.99, "loss_scale_factor": None, "dynamic": True}
    inner = keras.optimizers.SGD(1.0, loss_scale_factor=4.0)
    optimizer = scaler.LossScaleOptimizer(inner, initial_scale=2.0, name="mine", **held)
    assert (optimizer.name, optimizer.use_ema, optimizer.weight_decay) == ("mine", False, None)
    assert inner.loss_scale_factor is None
    weight = tf.Variable(1.0)
    optimizer.apply([optimizer.loss_scale], [weight])
    assert (float(weight), int(optimizer.iterations), int(inner.iterations)) == (0.0, 1, 1)


@pytest.mark.parametrize("factor", [4.0, 3])
def test_what_the_message_about_a_factor_says_works(factor):
    with pytest.raises(scaler.InvalidArgument, match="loss_scale_factor") as caught:
        ours(loss_scale_factor=factor)
    advice = re.search(r"hs\.Static\((.*?)\)", str(caught.value)).group(0)
    # A factor of the inner optimizer does nothing, as the message says.
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0, loss_scale_factor=64.0), eval(advice, {"hs": hs}))
    weight = tf.Variable(1.0)
    assert float(optimizer.scale_loss(tf.constant(1.0))) == factor
    optimizer.apply([optimizer.scale_loss(tf.constant(0.25))], [weight])
    assert float(weight) == 0.75


def test_gradients_that_another_scaler_unscaled():
    """What the error advises works: an optimizer takes what its own method unscaled, a scaler has an argument."""
    weight, optimizer, loss_scaler = tf.Variable(1.0), ours(), scaler.LossScaler(scaler.Static(4.0))

    def unscaled(scale, unscale):
        with tf.GradientTape() as tape:
            scaled = scale(weight * 2.0)
        return unscale([tape.gradient(scaled, weight)])

    @tf.function
    def of_another():
        return optimizer.apply(unscaled(loss_scaler.scale, loss_scaler.unscale), [weight])

    @tf.function
    def of_its_own():
        return optimizer.apply(unscaled(optimizer.scale_loss, optimizer.get_unscaled_gradients), [weight])

    optimizer.build([weight])
    with pytest.raises(scaler.InvalidArgument, match="get_unscaled_gradients"):
        of_another()
    assert of_its_own().grad_norm == 2.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight_decay", 0.9),
        ("clipnorm", 1.0),
        ("clipvalue", 1.0),
        ("global_clipnorm", 1.0),
        ("use_ema", True),
        ("ema_momentum", 0.9),
        ("gradient_accumulation_steps", 3),
        ("momentum", 0.9),
    ],
)
def test_what_only_the_optimizer_inside_has_is_set_there(name, value):
    optimizer = ours()
    with pytest.raises(scaler.InvalidArgument, match=f"{name}={value}.*inner_optimizer.{name}"):
        setattr(optimizer, name, value)
    setattr(optimizer.inner_optimizer, name, value)
    assert getattr(optimizer.inner_optimizer, name) == value


def test_what_both_have_and_what_neither_has_can_be_set():
    optimizer = ours()
    optimizer.learning_rate = 0.5
    optimizer.weight_decay = None
    optimizer.note = "of a user's own"
    assert float(optimizer.inner_optimizer.learning_rate) == 0.5
    assert optimizer.note == "of a user's own"


def test_another_optimizer_inside_is_refused():
    """A compiled `fit` would go on with the first one, in silence."""
    optimizer = ours()
    inner = optimizer.inner_optimizer
    optimizer.inner_optimizer = inner
    with pytest.raises(scaler.InvalidArgument, match=r"inner_optimizer = Adagrad: .* the SGD that"):
        optimizer.inner_optimizer = keras.optimizers.Adagrad()
    assert optimizer.inner_optimizer is inner
