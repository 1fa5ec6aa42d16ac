"""A library whose own train_step does not scale the loss, and a subclass that does."""

import warnings

import keras
import numpy as np
import tensorflow as tf

import halfstep as hs


class Library(keras.Sequential):
    """Stands for the class of a library, such as an approximator of bayesflow."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data[0]) - data[1]))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


class Scaled(Library):
    def train_step(self, data):  # a copy of the library's, with two lines changed
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data[0]) - data[1]))
            scaled = self.optimizer.scale_loss(loss)  # the last line inside of the tape
        grads = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
for kind, strategy in ((Library, hs.Dynamic()), (Scaled, hs.Dynamic()), (Library, hs.NoScaling())):
    keras.utils.set_random_seed(0)
    model = kind([keras.layers.Dense(32, "relu", dtype="mixed_float16"), keras.layers.Dense(1, dtype="float32")])
    model.compile(hs.LossScaleOptimizer(keras.optimizers.SGD(0.05), strategy))
    hs.protect(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", hs.ScaleWarning)
        losses = model.fit(x, x[:, :1], epochs=10, verbose=0).history["loss"]
    print(f"{kind.__name__} with {type(strategy).__name__}: loss {losses[0]:.2f} to {losses[-1]:.2f}")
    for warning in said:
        print(warning.message)
