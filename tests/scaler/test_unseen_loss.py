"""`check` says once that the last step was applied though its loss was not finite: by hand, in `fit`, on replicas."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import one_for_each
from scaler_cases import gradients_of

import scaler


def unseen(call):
    """What is said about a loss that is not finite while something is called."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if "loss is not finite" in str(one.message)]


class Step:
    """One weight, whose loss is what is asked for, and whose gradient is 1, or NaN."""

    def __init__(self):
        self.weight = tf.Variable(1.0)
        self.optimizer = keras.optimizers.SGD(0.1)
        self.loss_scaler = scaler.LossScaler(scaler.Dynamic(4.0))

    def take(self, constant, gradient=1.0):
        grads = [gradients_of(self.loss_scaler, lambda: self.weight * gradient + constant, self.weight)]
        return self.loss_scaler.apply(self.optimizer, grads, [self.weight])


@pytest.mark.parametrize(("mode", "loss"), [("eager", np.nan), ("graph", np.inf)])
def test_an_applied_step_with_such_a_loss_is_said_once(mode, loss):
    step = Step()
    take = tf.function(step.take) if mode == "graph" else step.take
    silent = [(1.0, 1.0), (np.inf, np.inf), (1.0, 1.0)]  # The second is skipped.
    for constant, gradient in silent:
        take(tf.constant(constant), tf.constant(gradient))
        assert unseen(step.loss_scaler.check) == []
    take(tf.constant(loss), tf.constant(1.0))
    (message,) = unseen(step.loss_scaler.check)
    assert message.startswith("The last of 4 attempted steps was applied though its loss is not finite.")
    take(tf.constant(loss), tf.constant(1.0))
    assert unseen(step.loss_scaler.check) == []


def test_nothing_is_said_of_a_step_that_is_not_decided():
    made = Step()
    made.take(tf.constant(1.0))
    made.loss_scaler.scale(tf.constant(np.inf))
    assert unseen(made.loss_scaler.check) == []


def test_a_step_in_the_long_form():
    loss_scaler = scaler.LossScaler(scaler.Dynamic(4.0))
    loss_scaler.scale(tf.constant(np.inf))
    loss_scaler.update(scaler.Event(finite=tf.constant(True)))
    assert len(unseen(loss_scaler.check)) == 1


def test_a_step_that_broke_off_leaves_nothing_of_its_loss():
    made = Step()
    with contextlib.suppress(RuntimeError), tf.GradientTape():
        made.loss_scaler.scale(made.weight + np.inf)
        raise RuntimeError("a batch that the step cannot read")
    made.take(tf.constant(1.0))
    assert unseen(made.loss_scaler.check) == []


def test_a_loss_that_a_tape_still_holds_is_one_of_the_step():
    made = Step()
    with tf.GradientTape() as first:
        bad = made.loss_scaler.scale(made.weight + np.inf)
    with tf.GradientTape() as second:
        scaled = made.loss_scaler.scale(made.weight)
    for tape, loss in ((second, scaled), (first, bad)):
        grads = [tape.gradient(loss, made.weight)]
        made.loss_scaler.apply(made.optimizer, grads, [made.weight], update=loss is bad)
    assert len(unseen(made.loss_scaler.check)) == 1


def test_the_loss_of_any_replica():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        made = Step()

    @tf.function
    def take(constants):
        return strategy.run(lambda constant: made.take(constant[0]), [constants])

    def constants(of_second):
        return one_for_each(strategy, tf.constant([[1.0], [of_second]]))

    take(constants(1.0))
    assert unseen(made.loss_scaler.check) == []
    take(constants(np.inf))
    assert len(unseen(made.loss_scaler.check)) == 1


def test_fit_says_it_through_its_logger():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    def loss(y, prediction):
        return tf.reduce_mean(prediction) + y[0, 0]

    model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1), scaler.Static(4.0)), loss, run_eagerly=True)
    x, y = np.ones([4, 2], np.float32), np.full([4, 1], np.inf, np.float32)
    assert len(unseen(lambda: model.fit(x, y, verbose=0, callbacks=[scaler.LossScaleLogger()]))) == 1
