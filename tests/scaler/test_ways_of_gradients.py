"""Guards that a gradient keeps its scale on its way: in lists of tensors, complex numbers, integers, bits.

The true gradients are -1, and a descent by them moves each weight by 1, unless another scale divides them.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import gradients_of, modes, plain_descent
from step_programs import trace_no_branches

import scaler

GROWS = scaler.Dynamic(2.0**10, growth_interval=1)


def gradient(loss_scaler, weight, loss=None, share=1.0):
    return gradients_of(loss_scaler, lambda: -tf.reduce_sum(weight if loss is None else loss(weight)) * share, weight)


def of_two(loss_scaler, weight, loop):
    return loop(lambda share: gradient(loss_scaler, weight, share=share), tf.constant([0.5, 0.5]))


def in_a_tensor_array(loss_scaler, weight):
    parts = tf.TensorArray(tf.float32, 2)
    for index in tf.range(2):
        parts = parts.write(index, gradient(loss_scaler, weight, share=0.5))
    return tf.reduce_sum(parts.stack(), 0)


def as_integers(loss_scaler, weight):
    return tf.cast(tf.cast(gradient(loss_scaler, weight), tf.int32), tf.float32)


def as_bits(loss_scaler, weight):
    return tf.bitcast(tf.bitcast(gradient(loss_scaler, weight), tf.uint8), tf.float32)


def as_a_string(loss_scaler, weight):
    written = tf.io.serialize_tensor(gradient(loss_scaler, weight))
    return tf.ensure_shape(tf.io.parse_tensor(written, tf.float32), weight.shape)


KNOWN = {
    "fft": lambda s, w: gradient(s, w, lambda w: tf.signal.irfft(tf.signal.rfft(w))),
    "stop_gradient": lambda s, w: tf.stop_gradient(gradient(s, w)),
    "integers": as_integers,
    "bits": as_bits,
    "string": as_a_string,
}
"""These come from a scale that the graph can reach. Out of a loop comes none."""
IN_LOOPS = {
    "TensorArray": in_a_tensor_array,
    "map_fn": lambda s, w: tf.reduce_sum(of_two(s, w, lambda f, x: tf.map_fn(f, x)), 0),
    "scan": lambda s, w: of_two(s, w, lambda f, x: tf.scan(lambda total, one: total + f(one), x, tf.zeros([4]))[-1]),
}
WAYS = KNOWN | IN_LOOPS


@pytest.mark.slow_with("fft")
@pytest.mark.parametrize("way", ["fft", "scan"])
def test_two_steps_of_another_model_come_between(way, monkeypatch):
    trace_no_branches(monkeypatch)
    loss_scaler, weight, other = scaler.LossScaler(GROWS), tf.Variable(tf.zeros(4)), tf.Variable([0.0])

    @tf.function
    def step():
        grad = WAYS[way](loss_scaler, weight)
        for _ in range(2):
            loss_scaler.apply(plain_descent, [gradient(loss_scaler, other)], [other])
        loss_scaler.apply(plain_descent, [grad], [weight])

    if way in IN_LOOPS:
        with pytest.raises(scaler.InvalidArgument, match="inside of a function or a loop"):
            step()
    else:
        step()
        assert weight.numpy().tolist() == [1.0] * 4


@pytest.mark.parametrize("way", ["fft", "bits", "string", "TensorArray", "scan"])
def test_another_scaler_is_refused(way):
    one, other, weight = scaler.LossScaler(GROWS), scaler.LossScaler(scaler.Dynamic(2.0**6)), tf.Variable(tf.zeros(4))

    @tf.function
    def step():
        other.scale(tf.constant(1.0))
        other.apply(plain_descent, [WAYS[way](one, weight)], [weight])

    with pytest.raises(scaler.InvalidArgument, match="another loss scaler scaled these gradients"):
        step()
    assert weight.numpy().tolist() == [0.0] * 4


@pytest.mark.parametrize("ways", [KNOWN, IN_LOOPS], ids=["known", "in loops"])
def test_steps_of_their_own_are_right(ways, monkeypatch):
    trace_no_branches(monkeypatch)
    loss_scaler, weights = scaler.LossScaler(GROWS), [tf.Variable(tf.zeros(4)) for _ in ways]

    @tf.function
    def step():
        grads = [way(loss_scaler, weight) for way, weight in zip(ways.values(), weights, strict=True)]
        loss_scaler.apply(plain_descent, grads, weights)

    step()
    step()
    assert [weight.numpy().tolist() for weight in weights] == [[2.0] * 4] * len(ways)


def test_a_recurrent_model(monkeypatch):
    trace_no_branches(monkeypatch)
    keras.utils.set_random_seed(0)
    model, x = keras.Sequential([keras.Input([3, 1]), keras.layers.SimpleRNN(2)]), tf.ones([2, 3, 1])
    weights = model.trainable_variables
    one = scaler.LossScaler(GROWS)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x))
    expected = [
        weight.numpy() - grad.numpy() for weight, grad in zip(weights, tape.gradient(loss, weights), strict=True)
    ]

    @tf.function
    def step():
        grads = gradients_of(one, lambda: tf.reduce_mean(model(x)), weights)
        one.update(scaler.Event(tf.constant(True)))
        gradients_of(one, lambda: tf.reduce_mean(model(x)), weights)
        one.apply(plain_descent, grads, [weight.value for weight in weights])
        return grads[0]

    step()
    for weight, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(weight.numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loop", ["TensorArray", "map_fn"])
def test_a_loss_scaled_in_a_list_is_not_scaled_again(loop):
    loss_scaler, weight = scaler.LossScaler(GROWS), tf.Variable(1.0)

    @tf.function
    def step():
        if loop == "map_fn":
            losses = tf.map_fn(lambda one: loss_scaler.scale(weight * one), tf.constant([1.0, 2.0]))
        else:
            parts = tf.TensorArray(tf.float32, 2)
            for index in tf.range(2):
                parts = parts.write(index, loss_scaler.scale(weight))
            losses = parts.stack()
        loss_scaler.scale(tf.reduce_sum(losses))

    with pytest.raises(scaler.InvalidArgument, match="scaled already"):
        step()


def test_unscaled_gradients_of_a_list_are_not_unscaled_again():
    loss_scaler, weight = scaler.LossScaler(GROWS), tf.Variable(tf.zeros(4))

    @tf.function
    def step():
        parts = tf.TensorArray(tf.float32, 2)
        for index in tf.range(2):
            parts = parts.write(index, loss_scaler.unscale([gradient(loss_scaler, weight)])[0])
        loss_scaler.apply(plain_descent, [tf.reduce_sum(parts.stack(), 0)], [weight])

    with pytest.raises(scaler.InvalidArgument, match="went through unscale already"):
        step()


@modes("graph")
def test_masks_indices_and_weights_of_a_loss_carry_nothing(execute):
    """What another step's gradients decide is no gradient of it: the scale that moved since divides these."""
    loss_scaler, weight = scaler.LossScaler(GROWS), tf.Variable(tf.zeros(4))

    def step():
        first = gradient(loss_scaler, weight)
        loss_scaler.update(scaler.Event(tf.constant(True)))
        largest, found = tf.argmax(-first), tf.cast(first < 0.0, tf.float32)
        factor = tf.stop_gradient(tf.norm(first) / tf.norm(first))
        second = gradient(loss_scaler, weight, lambda w: (w + 0.0 * tf.gather(w, largest)) * found * factor)
        return loss_scaler.apply(plain_descent, [second], [weight]).loss_scale

    assert float(execute(step)()) == 2.0**11
    assert weight.numpy().tolist() == [1.0] * 4
