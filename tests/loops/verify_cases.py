"""A model in which reading a tensor changes the result, and runs of it."""

import keras
import tensorflow as tf

import loops
import scaler
from scaler import observe


class Regrouped(keras.layers.Layer):
    """(h * h) * 2^-6, which TensorFlow computes as h * (h * 2^-6) in a graph: at 300 only the first overflows."""

    def call(self, h):
        return observe.probe(h * h, "square") * tf.constant(2.0**-6, tf.float16)


def squared(y, prediction):
    return tf.reduce_mean(tf.square(tf.cast(prediction, tf.float32) - y)) * 2.0**-20


def build(regrouped=True):
    """Four inputs of 300 through a dense layer, a ReLU and then the product."""
    inputs = keras.Input([4], dtype="float16")
    x = keras.layers.Dense(4, kernel_initializer="identity", dtype="mixed_float16", name="dense")(inputs)
    x = keras.layers.ReLU(dtype="float16", name="relu")(x)
    if regrouped:
        x = Regrouped(dtype="float16", name="regrouped")(x)
    model = keras.Model(inputs, x)
    optimizer = keras.optimizers.SGD(2.0**-10)
    step = loops.TrainStep(model, squared, optimizer, loss_scaler=scaler.LossScaler(scaler.Static(1.0)))
    data = tf.data.Dataset.from_tensors((tf.fill([2, 4], tf.constant(300, tf.float16)), tf.zeros([2, 4]))).repeat()
    return loops.Loop(step, data, steps_per_call=2, actions=[_not_to_act])


def plain():
    """Without the product."""
    return build(regrouped=False)


def _not_to_act(visit):
    raise AssertionError
