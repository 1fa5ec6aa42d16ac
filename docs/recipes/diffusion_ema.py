"""A diffusion model with an average of its weights (EMA), kept by the train step itself, in mixed float16 under fit."""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import scaler

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")


def make_network():
    image, level = keras.Input((64,)), keras.Input((1,))
    x = keras.layers.Concatenate()([image, level])
    x = keras.layers.Dense(256, activation="swish")(keras.layers.Dense(256, activation="swish")(x))
    return keras.Model([image, level], keras.layers.Dense(64, dtype="float32")(x))


class Diffusion(keras.Model):
    def __init__(self):
        super().__init__()
        self.network, self.average = make_network(), make_network()
        self.average.set_weights(self.network.get_weights())
        self.seeds, self.seen = keras.random.SeedGenerator(0), keras.metrics.Mean("error")

    @property
    def metrics(self):
        return [self.seen]

    def noisy(self, images):
        noise = keras.random.normal(tf.shape(images), dtype="float32", seed=self.seeds)
        angle = keras.random.uniform((tf.shape(images)[0], 1), 0.1, 1.5, dtype="float32", seed=self.seeds)
        return [tf.cos(angle) * images + tf.sin(angle) * noise, angle], noise

    def train_step(self, images):
        inputs, noise = self.noisy(images)
        with tf.GradientTape() as tape:
            error = tf.reduce_mean(tf.abs(self.network(inputs, training=True) - noise))
            scaled = self.optimizer.scale_loss(error)
        weights = self.network.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        for slow, fast in zip(self.average.weights, self.network.weights, strict=True):
            slow.assign(0.99 * slow + 0.01 * fast)  # taken back on a skipped step, too: see protect
        self.seen.update_state(error)
        return self.get_metrics_result()


images = load_digits().data[:1792].astype("float32") / 8.0 - 1.0  # 28 whole batches
model = Diffusion()
model.compile(scaler.LossScaleOptimizer(keras.optimizers.Adam(1e-3), scaler.Dynamic()))
scaler.protect(model)
history = model.fit(images, batch_size=64, epochs=20, verbose=0).history
print(f"error {history['error'][0]:.2f} -> {history['error'][-1]:.2f}")
before = model.average.get_weights()
model.fit(np.full((64, 64), np.nan, "float32"), batch_size=64, verbose=0)
same = all(np.array_equal(a, b) for a, b in zip(before, model.average.get_weights(), strict=True))
print("a batch of NaN moved the average:", not same)
