"""Guards that a step whose gradients are those of the loss itself, and not of what `scale` returned, is noticed."""

import copy
import warnings

import keras
import pytest
import tensorflow as tf
from scaler_cases import plain_descent
from ways import graph

import scaler

WRONG = pytest.warns(scaler.ScaleWarning, match=r"apply\(grads\): the gradients are divided by the loss scale, but")
GROWS = scaler.Dynamic(8.0, growth_interval=1)


class Step:
    """One weight, a loss, and both losses recorded by one tape that can be asked often."""

    def __init__(self, loss_scaler=None):
        self.loss_scaler, self.weight = loss_scaler or scaler.LossScaler(GROWS), tf.Variable([1.0])

    def forward(self):
        with tf.GradientTape(persistent=True) as self.tape:
            self.loss = tf.reduce_sum(1.5 * self.weight**2)
            self.scaled = self.loss_scaler.scale(self.loss)

    def gradients(self, of):
        return self.tape.gradient(of, [self.weight])

    def apply(self, grads, **options):
        return self.loss_scaler.apply(plain_descent, grads, [self.weight], **options)


@pytest.mark.parametrize(
    "strategy", [GROWS, scaler.Static(8.0), scaler.SpikeGuard(GROWS)], ids=lambda one: type(one).__name__
)
def test_eager_gradients_of_the_unscaled_loss_are_warned_of_once(strategy):
    step = Step(scaler.LossScaler(strategy))
    step.forward()
    with WRONG as seen:
        step.apply(step.gradients(step.loss))
    assert len(seen) == 1
    step.forward()
    step.apply(step.gradients(step.loss))


def test_a_graph_names_the_same_reason_where_it_refuses():
    step = Step()

    @graph
    def one_step():
        step.forward()
        return step.apply(step.gradients(step.loss)).finite

    with WRONG, pytest.raises(scaler.InvalidArgument, match="these gradients are those of a loss that was not"):
        one_step()


def test_unscale_says_it_too():
    step = Step()
    step.forward()
    with pytest.warns(scaler.ScaleWarning, match=r"unscale\(grads\): .* no tape has differentiated"):
        step.loss_scaler.unscale(step.gradients(step.loss))


def test_the_optimizer_says_it_too():
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0), GROWS)
    weight = keras.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        losses = weight * 3.0
        optimizer.scale_loss(losses)
    with WRONG:
        optimizer.apply(tape.gradient(losses, [weight.value]), [weight])


RIGHT = []
"""Steps that are right, or of which nothing is known."""


def right(step):
    RIGHT.append(step)
    return step


@right
def right_gradients(step):
    step.forward()
    step.apply(step.gradients(step.scaled))


@right
def a_sum_of_scaled_losses(step):
    with tf.GradientTape() as tape:
        total = step.loss_scaler.scale(step.weight[0]) + 2.0 * step.loss_scaler.scale(step.weight[0] ** 2)
    step.apply(tape.gradient(total, [step.weight]))


@right
def two_losses_that_wait(step):
    first, second = Step(step.loss_scaler), step
    for one in (first, second):
        one.forward()
    first.apply(first.gradients(first.scaled), update=False)
    second.apply(second.gradients(second.scaled))


@right
def gradients_of_the_step_before(step):
    step.forward()
    kept, loss_scale = step.gradients(step.scaled), step.loss_scaler.scale_of_gradients
    step.forward()
    step.apply(kept, loss_scale=loss_scale)
    step.apply(step.gradients(step.scaled))


@right
def kept_and_unscaled(step):
    step.forward()
    kept = step.loss_scaler.unscale(step.gradients(step.scaled))
    step.forward()
    step.apply([kept[0] * 2.0], unscaled=True)
    step.apply(step.gradients(step.scaled))


@right
def kept_gradients_are_older(step):
    step.forward()
    kept = step.gradients(step.scaled)
    step.apply(kept)
    step.forward()
    step.apply(kept)
    step.apply(step.gradients(step.scaled))


@right
def scaled_by_hand(step):
    step.forward()
    with tf.GradientTape() as tape:
        scaled = step.loss_scaler.loss_scale * tf.reduce_sum(step.weight)
    step.apply(tape.gradient(scaled, [step.weight]))


@right
def without_a_tape(step):
    step.loss_scaler.scale(step.weight[0])
    step.apply([tf.constant([3.0]) * step.loss_scaler.scale_of_gradients])


@right
def in_a_function(step):
    @graph
    def taken():
        step.forward()
        return step.gradients(step.scaled)

    step.apply(taken())
    step.forward()
    step.apply(taken())


@right
def taken_again(step):
    step.forward()
    step.apply(None, again=lambda small: step.tape.gradient(step.scaled, [step.weight], output_gradients=small))


@right
def by_a_jacobian(step):
    step.forward()
    step.apply([step.tape.jacobian(step.scaled, step.weight)])


@right
def forward_over_reverse(step):
    with tf.autodiff.ForwardAccumulator(step.weight, tf.constant([1.0])) as along:
        scaled = step.loss_scaler.scale(tf.reduce_sum(3.0 * step.weight))
    step.apply([along.jvp(scaled)[tf.newaxis]])


@right
def of_a_copy(step):
    step.loss_scaler = copy.deepcopy(step.loss_scaler)
    right_gradients(step)


@pytest.mark.parametrize("way", RIGHT, ids=lambda way: way.__name__)
def test_nothing_is_said_of_what_is_right_or_not_known(way):
    step = Step(scaler.LossScaler(scaler.Dynamic(8.0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            way(step)


def test_a_gradient_of_the_gradient_is_the_same_through_a_scaled_loss():
    loss_scaler, weight = scaler.LossScaler(scaler.Static(8.0)), tf.Variable(2.0)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            scaled = loss_scaler.scale(weight**3)
        slope = inner.gradient(scaled, weight)
    assert float(slope) == 8.0 * 12.0
    assert float(outer.gradient(slope, weight)) == 8.0 * 12.0
