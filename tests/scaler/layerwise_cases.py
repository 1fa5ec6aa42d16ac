"""What the tests of layer-wise scales share: networks that are gentle forward and steep backward, and a train step."""

import keras
import numpy as np
import tensorflow as tf

import scaler


class Steep(keras.layers.Layer):
    """The identity, with a gradient `gain` times as large: built without any rescaling."""

    def __init__(self, gain, **options):
        super().__init__(**options)
        self.gain = gain

    def call(self, x):
        return tf.stop_gradient(x) + self.gain * (x - tf.stop_gradient(x))


def chain(gains, dtype="float16", width=8, head=None):
    """Dense tanh layers, each followed by a `Steep`: steep_0 is nearest to the input, the head has no gain."""
    keras.utils.set_random_seed(1)
    x = inputs = keras.Input([width], dtype=dtype)
    for number, gain in enumerate(gains):
        x = keras.layers.Dense(width, activation="tanh", name=f"dense_{number}", dtype=dtype)(x)
        x = Steep(gain, name=f"steep_{number}", dtype=dtype)(x)
    return keras.Model(inputs, keras.layers.Dense(1, name="head", dtype=head or dtype)(x))


def cuts(gains):
    return [f"steep_{number}" for number in range(len(gains))]


def batch(seed=0, width=8):
    random = np.random.default_rng(seed)
    return random.normal(size=(16, width)).astype(np.float32), random.normal(size=(16, 1)).astype(np.float32)


class Run:
    """A model with cuts, its masters, optimizer and scaler, and one step of it."""

    def __init__(self, model, after, strategy=None, rate=0.01):
        self.model, self.layerwise = scaler.layerwise.insert_rescales(model, after, strategy=strategy)
        self.variables = self.model.trainable_variables
        self.masters = scaler.MasterWeights(self.variables)
        self.optimizer = keras.optimizers.SGD(rate, momentum=0.9)
        self.optimizer.build(self.masters.weights)
        self.loss_scaler = scaler.LossScaler(scaler.NoScaling())
        self.checkpoint = tf.train.Checkpoint(
            model=model,
            masters=self.masters,
            optimizer=self.optimizer,
            layerwise=self.layerwise,
            loss_scaler=self.loss_scaler,
        )

    def step(self, x, y, factor):
        """`factor` multiplies the loss."""
        with tf.GradientTape() as tape:
            scaled = self.loss_scaler.scale(loss_of(self.model, x, y) * factor)
        grads, seen = self.layerwise.gradient(tape, scaled, self.variables)
        outcome = self.loss_scaler.apply(self.optimizer, grads, self.masters)
        self.layerwise.update(seen)
        return outcome.finite, grads, seen


def loss_of(model, x, y):
    prediction = model(tf.cast(x, model.inputs[0].dtype))
    return tf.reduce_mean(tf.square(tf.cast(prediction, y.dtype) - y))


def exact_gradients(gains, x, y):
    """Of the same network with the same weights in float64."""
    narrow, wide = chain(gains), chain(gains, "float64")
    wide.set_weights([value.astype(np.float64) for value in narrow.get_weights()])
    with tf.GradientTape() as tape:
        loss = loss_of(wide, x.astype(np.float64), y.astype(np.float64))
    return [grad.numpy() for grad in tape.gradient(loss, wide.trainable_variables)]


def log2_scales(layerwise):
    return dict(zip(layerwise.names, np.log2(layerwise.scales.numpy()).astype(int).tolist(), strict=True))
