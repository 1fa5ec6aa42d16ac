"""Every wrong use gets one sentence that says what was passed and what to do."""

import re

import keras
import pytest
import tensorflow as tf
from versions import needs_keras

import scaler

ADAM = keras.optimizers.Adam


def ours(**arguments):
    return scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0), **arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: scaler.LossScaleOptimizer("adam"), r"'adam'.*expected a Keras optimizer.*keras.optimizers.get"),
        (lambda: scaler.LossScaleOptimizer(None), r"None.*expected a Keras optimizer"),
        (lambda: scaler.LossScaleOptimizer(tf.Variable), r"expected a Keras optimizer"),
        (lambda: scaler.LossScaleOptimizer(ours()), r"LossScaleOptimizer\): it scales losses by itself"),
        (
            lambda: scaler.LossScaleOptimizer(keras.optimizers.LossScaleOptimizer(ADAM())),
            r"it scales losses by itself. Pass its inner_optimizer",
        ),
        pytest.param(
            lambda: keras.optimizers.LossScaleOptimizer(ours()),
            r"another loss scaler around it",
            marks=needs_keras("a word from Keras's LossScaleOptimizer to the optimizer that it wraps"),
        ),
        (
            lambda: ours(strategy=scaler.Static(2.0), initial_scale=4.0),
            r"Static.*together with initial_scale=4.0.*configure the default strategy",
        ),
        (lambda: ours(strategy=scaler.Dynamic(), dynamic_growth_steps=4), r"dynamic_growth_steps=4"),
        (lambda: scaler.LossScaleOptimizer(ADAM(), 1024.0), r"1024.0.*second argument is the strategy"),
        (lambda: ours(strategy=scaler.Dynamic), r"expected a strategy"),
        (lambda: ours(initial_scale=-1.0), r"initial_scale=-1.0"),
        (lambda: ours(dynamic_growth_steps=0), r"growth_interval=0"),
        (lambda: ours(dynamic=False), r"dynamic=False.*scaler.Static"),
        (lambda: ours(dynamic="dynamic"), r"dynamic='dynamic'.*expected True.*strategy"),
        (lambda: ours(dynamic=1024.0), r"dynamic=1024.0.*expected True"),
        (lambda: ours(dynamic=None), r"dynamic=None.*expected True"),
        (lambda: ours(name=3), r"name=3.*expected a string"),
        (lambda: ours(inner_optimizer=ADAM()), r"inner_optimizer=.*expected one optimizer"),
        (lambda: ours(initial_scale="large"), r"initial_scale='large'"),
        (lambda: ours(initial_scale=True), r"initial_scale=True"),
        (lambda: ours(initial_scale=float("nan")), r"initial_scale=nan"),
        (lambda: ours(dynamic_growth_steps="often"), r"growth_interval='often'"),
        (lambda: ours(dynamic_growth_steps=2.5), r"growth_interval=2.5"),
        (lambda: ours(dynamic_growth_steps=True), r"growth_interval=True"),
        (lambda: ours(clipnorm=1.0), r"`clipnorm`.*on the `inner_optimizer`"),
        (lambda: ours(use_ema=True), r"`use_ema`.*on the `inner_optimizer`"),
        (lambda: ours(ema_momentum=0.5), r"ema_momentum=0.5.*on the `inner_optimizer`"),
        (lambda: ours(gradient_accumulation_steps=2), r"steps=2.*on the `inner_optimizer`"),
        (lambda: ours(loss_scale_factor=2.0), r"loss_scale_factor=2.0.*scaler.Static\(2.0\)"),
        (lambda: ours(foo=1), r"`foo`"),
    ],
)
def test_construction(make, message):
    with pytest.raises(scaler.InvalidArgument, match=message):
        make()


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
    advice = re.search(r"scaler\.Static\((.*?)\)", str(caught.value)).group(0)
    # A factor of the inner optimizer does nothing, as the message says.
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0, loss_scale_factor=64.0), eval(advice))
    weight = tf.Variable(1.0)
    assert float(optimizer.scale_loss(tf.constant(1.0))) == factor
    optimizer.apply([optimizer.scale_loss(tf.constant(0.25))], [weight])
    assert float(weight) == 0.75


def test_gradients_that_do_not_match():
    weight, other = tf.Variable([1.0, 2.0]), tf.Variable(1.0)
    optimizer = ours()
    with pytest.raises(scaler.InvalidArgument, match="call build"):
        optimizer.apply([tf.constant([1.0, 2.0])])
    optimizer.apply([tf.constant([1.0, 2.0]) * optimizer.loss_scale], [weight])
    before = weight.numpy().tolist()
    for grads, variables, message in (
        ([tf.constant([1.0, 2.0])] * 2, [weight], "2 gradients for 1 variables"),
        ([tf.constant([1.0, 2.0])] * 2, None, "2 gradients for 1 variables"),
        ([tf.constant(1.0)], [other], "is not among those that the optimizer was built for"),
        ([tf.constant([1.0, 2.0, 3.0])], [weight], r"has shape \(3,\)"),
        ([None], [weight], "every gradient is None"),
        ([tf.constant([1, 2])], [weight], "int32"),
    ):
        with pytest.raises(scaler.InvalidArgument, match=message):
            optimizer.apply(grads, variables)
    assert weight.numpy().tolist() == before


@pytest.mark.parametrize(
    ("grads", "message"),
    [([None], "every gradient is None"), ([], "expected a list"), (3, r"grads=3.*expected a list")],
)
def test_the_first_step_has_no_gradients(grads, message):
    with pytest.raises(scaler.InvalidArgument, match=message):
        ours().apply(grads, [tf.Variable(1.0)])
    with pytest.raises(scaler.InvalidArgument, match="expected a list"):
        ours().apply_gradients([])


def test_what_is_no_loss():
    with pytest.raises(scaler.InvalidArgument, match=r"scale\(None\): expected the loss"):
        ours().scale_loss(None)
    with pytest.raises(scaler.InvalidArgument, match=r"scale\(dict\): expected a scalar"):
        ours().scale_loss({"loss": tf.constant(1.0)})


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
    with pytest.raises(
        scaler.InvalidArgument, match=r"LossScaleOptimizer whose get_unscaled_gradients.* returned them"
    ):
        of_another()
    assert of_its_own().grad_norm == 2.0


def test_a_loss_without_a_tape():
    with pytest.raises(scaler.InvalidArgument, match="needs the tape"):
        ours().minimize(tf.constant(1.0), [tf.Variable(1.0)])


def test_stateless_apply_and_integers():
    optimizer = ours()
    with pytest.raises(scaler.InvalidArgument, match="not supported"):
        optimizer.stateless_apply([], [], [])
    with pytest.raises(scaler.InvalidArgument, match="int32"):
        optimizer.scale_loss(tf.constant(1))


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
    with pytest.raises(scaler.InvalidArgument, match=f"{name}={value}.*Set it on .*inner_optimizer.{name}"):
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
