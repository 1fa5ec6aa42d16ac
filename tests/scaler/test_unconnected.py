"""Variables that the loss does not reach are named once; gradients that are unscaled and never counted, too."""

import keras
import pytest
import tensorflow as tf
from scaler_cases import gradients_of
from ways import graph

import loops
import scaler

X, Y = tf.ones([4, 3]), tf.zeros([4, 1])


class Unconnected(keras.Model):
    def __init__(self):
        super().__init__()
        self.used, self.lost = keras.layers.Dense(1, name="used"), keras.layers.Dense(1, name="lost")

    def call(self, inputs):
        self.lost(inputs)
        return self.used(inputs)


SAYS = r"no gradient for '.*lost/kernel', '.*lost/bias': .* on them, and they are not trained.* their layers"


def test_a_train_step_names_them_once():
    step = loops.TrainStep(Unconnected(), keras.losses.MeanSquaredError(), keras.optimizers.SGD())
    with pytest.warns(scaler.ScaleWarning, match=SAYS):
        graph(step)((X, Y))
    assert step((X, Y))["applied"]  # In silence.


def test_fit_names_them_as_with_kerass_own_optimizer():
    model = Unconnected()
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD()), loss="mse", run_eagerly=True)
    with pytest.warns(scaler.ScaleWarning, match=SAYS):
        model.fit(X, Y, verbose=0)


def partial(execute=tf.function, optimizer=None, **arguments):
    """A function that takes a step with a loss of one of two variables, made by this scaler."""
    one, other = tf.Variable([1.0], name="one"), tf.Variable([1.0], name="other")
    loss_scaler, optimizer = scaler.LossScaler(), optimizer or keras.optimizers.SGD()

    def step(variables=(one, other)):
        grads = gradients_of(loss_scaler, lambda: tf.reduce_sum(one), variables)
        return loss_scaler.apply(optimizer, grads, variables, **arguments).finite

    return execute(step), one, other


@pytest.mark.parametrize("execute", [lambda step: step, tf.function], ids=["eager", "graph"])
def test_apply_names_them_once_as_keras_does(execute):
    step, *_ = partial(execute)
    with pytest.warns(
        scaler.ScaleWarning,
        match="no gradient for 'other': .* depend on it, and it is .*leave it out of the list.* its layer",
    ):
        assert step()
    assert step()


def test_masters_are_named_by_the_variables_of_the_model():
    weights = [tf.Variable([1.0], dtype="float16", name=name) for name in ("one", "other")]
    masters, loss_scaler = scaler.MasterWeights(weights), scaler.LossScaler(scaler.NoScaling())
    with pytest.warns(scaler.ScaleWarning, match="no gradient for 'other'"):
        assert loss_scaler.apply(keras.optimizers.SGD(), [tf.constant([1.0]), None], masters).finite


@pytest.mark.parametrize(
    ("execute", "arguments"),
    [
        (lambda step: step, {"optimizer": lambda grads, variables: None}),
        (lambda step: step, {"update": False}),
        (tf.function, {"when": tf.constant(True)}),
    ],
    ids=["a function", "one of several calls", "a window"],
)
def test_a_step_that_may_be_meant_to_train_a_part_passes_in_silence(execute, arguments):
    step, *_ = partial(execute, **arguments)
    assert step()


def test_what_is_left_out_or_frozen_passes_in_silence():
    step, one, _ = partial()
    assert step((one,))
    weights = keras.Variable([1.0]), keras.Variable([1.0], trainable=False)
    loss_scaler = scaler.LossScaler(scaler.NoScaling())
    assert loss_scaler.apply(keras.optimizers.SGD(), [tf.constant([1.0]), None], weights).finite


def test_another_set_in_a_later_step_of_a_keras_optimizer_is_named_too():
    weights = [keras.Variable([1.0], name=name) for name in ("one", "other")]
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.Adam(), scaler.Static(1024.0))
    grad = tf.constant([1024.0])
    for grads in ([grad, grad], [grad, None]):
        optimizer.scale_loss(tf.constant(1.0))
        if grads[1] is None:
            with pytest.warns(scaler.ScaleWarning, match="no gradient for 'other'"):
                optimizer.apply(grads, weights)
        else:
            optimizer.apply(grads, weights)


def test_gradients_that_were_unscaled_and_never_counted_are_told_by_check():
    """The habit from tf.keras 2, in which nobody looks at the gradients."""
    weight, optimizer, loss_scaler = tf.Variable([1.0]), keras.optimizers.SGD(), scaler.LossScaler()
    optimizer.build([weight])

    @graph
    def step():
        optimizer.apply(
            loss_scaler.unscale(gradients_of(loss_scaler, lambda: tf.reduce_sum(weight), [weight])), [weight]
        )

    step()
    with pytest.warns(scaler.ScaleWarning, match="no step was ever counted"):
        loss_scaler.check()
    loss_scaler.check()  # It is said once.


def test_micro_batches_that_are_unscaled_and_summed_by_hand_are_no_mistake():
    weight, optimizer, loss_scaler = tf.Variable([1.0]), keras.optimizers.SGD(), scaler.LossScaler()
    total = tf.Variable([0.0])

    @graph
    def micro_batch(last):
        total.assign_add(loss_scaler.unscale(gradients_of(loss_scaler, lambda: tf.reduce_sum(weight), [weight]))[0])
        return loss_scaler.apply(optimizer, [tf.identity(total)], [weight], unscaled=True, when=last).finite

    assert not micro_batch(tf.constant(False))
    loss_scaler.check()  # Nothing is counted yet, and nothing is said.
    assert micro_batch(tf.constant(True))


def test_arguments_in_another_order_do_not_print_all_weights():
    variables = [tf.Variable(tf.zeros([100]))] * 2
    with pytest.raises(scaler.InvalidArgument, match="optimizer=a list of 2: expected a Keras optimizer"):
        scaler.LossScaler().apply(variables, variables, keras.optimizers.SGD())
