"""Variables that the loss does not reach are named once; gradients that are unscaled and never counted, too."""

import warnings

import keras
import pytest
import tensorflow as tf

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


SAYS = r"no gradient for '.*lost/kernel', '.*lost/bias': .*not trained"


def test_a_train_step_names_them_once():
    step = loops.TrainStep(Unconnected(), keras.losses.MeanSquaredError(), keras.optimizers.SGD())
    compiled = tf.function(step)
    with pytest.warns(scaler.ScaleWarning, match=SAYS):
        compiled((X, Y))
    assert compiled((X[:2], Y[:2]))["applied"]  # A second trace, in silence.


def test_fit_names_them_as_with_kerass_own_optimizer():
    model = Unconnected()
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD()), loss="mse", jit_compile=False)
    with pytest.warns(scaler.ScaleWarning, match=SAYS):
        model.fit(X, Y, verbose=0)


def test_apply_takes_what_a_loss_is_not_meant_to_reach_in_silence():
    one, other = tf.Variable([1.0]), tf.Variable([1.0])
    loss_scaler = scaler.LossScaler()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(one))
        grads = tape.gradient(scaled, [one, other])
        assert loss_scaler.apply(keras.optimizers.SGD(), grads, [one, other]).finite


def test_gradients_that_were_unscaled_and_never_counted_are_told_by_check():
    """The habit from tf.keras 2, in which nobody looks at the gradients."""
    weight, optimizer, loss_scaler = tf.Variable([1.0]), keras.optimizers.SGD(), scaler.LossScaler()
    optimizer.build([weight])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(weight))
        optimizer.apply(loss_scaler.unscale(tape.gradient(scaled, [weight])), [weight])

    step()
    with pytest.warns(scaler.ScaleWarning, match="no step was ever counted"):
        loss_scaler.check()
    loss_scaler.check()  # It is said once.


def test_micro_batches_that_are_unscaled_and_summed_by_hand_are_no_mistake():
    weight, optimizer, loss_scaler = tf.Variable([1.0]), keras.optimizers.SGD(), scaler.LossScaler()
    total = tf.Variable([0.0])

    @tf.function
    def micro_batch(last):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(weight))
        total.assign_add(loss_scaler.unscale(tape.gradient(scaled, [weight]))[0])
        return loss_scaler.apply(optimizer, [tf.identity(total)], [weight], unscaled=True, when=last).finite

    assert not micro_batch(False)
    loss_scaler.check()  # Nothing is counted yet, and nothing is said.
    assert micro_batch(True)


def test_arguments_in_another_order_do_not_print_all_weights():
    variables = [tf.Variable(tf.zeros([100]))] * 2
    with pytest.raises(scaler.InvalidArgument, match="optimizer=a list of 2: expected a Keras optimizer"):
        scaler.LossScaler().apply(variables, variables, keras.optimizers.SGD())
