"""A library whose own train_step does not scale the loss, and a subclass that does."""

import warnings

import keras
import numpy as np
import tensorflow as tf

import scaler

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")


class Library(keras.Model):
    """Stands for the class of a library, such as an approximator of bayesflow."""

    def __init__(self):
        super().__init__()
        self.body = keras.layers.Dense(32, activation="relu")
        self.head = keras.layers.Dense(1, dtype="float32")

    def call(self, x):
        return self.head(self.body(x))

    def compute_metrics(self, x, y):
        return {"loss": tf.reduce_mean(tf.square(self(x) - y))}

    def train_step(self, data):
        with tf.GradientTape() as tape:
            metrics = self.compute_metrics(*data)
        grads = tape.gradient(metrics["loss"], self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return metrics


class Scaled(Library):
    def train_step(self, data):  # a copy of the library's, with two lines changed
        with tf.GradientTape() as tape:
            metrics = self.compute_metrics(*data)
            scaled = self.optimizer.scale_loss(metrics["loss"])  # the last line inside of the tape
        grads = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return metrics


x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
for kind, strategy in ((Library, scaler.Dynamic()), (Scaled, scaler.Dynamic()), (Library, scaler.NoScaling())):
    model = kind()
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.05), strategy))
    scaler.protect(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", scaler.ScaleWarning)
        losses = model.fit(x, x[:, :1], epochs=10, verbose=0).history["loss"]
    print(f"{kind.__name__} with {type(strategy).__name__}: loss {losses[0]:.2f} to {losses[-1]:.2f}")
    for warning in said:
        print(warning.message)
