"""A diffusion model with an average of its weights (EMA), kept by the train step itself, in mixed float16 under fit."""

import keras
import numpy as np
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
Dense, digits = keras.layers.Dense, hs.loops.tasks.load("digits")


def make_network():
    return keras.Sequential([keras.Input((65,)), Dense(256, "swish"), Dense(256, "swish"), Dense(64, dtype="float32")])


class Diffusion(keras.Model):
    def __init__(self):
        super().__init__()
        self.network, self.average, self.seeds = make_network(), make_network(), keras.random.SeedGenerator(0)
        self.average.set_weights(self.network.get_weights())

    def train_step(self, images):
        noise = keras.random.normal(tf.shape(images), dtype="float32", seed=self.seeds)
        angle = keras.random.uniform((tf.shape(images)[0], 1), 0.1, 1.5, dtype="float32", seed=self.seeds)
        noisy = tf.concat([tf.cos(angle) * images + tf.sin(angle) * noise, angle], axis=1)
        with tf.GradientTape() as tape:
            error = tf.reduce_mean(tf.abs(self.network(noisy, training=True) - noise))
            scaled = self.optimizer.scale_loss(error)
        grads = tape.gradient(scaled, self.network.trainable_variables)
        self.optimizer.apply(grads, self.network.trainable_variables)
        for slow, fast in zip(self.average.weights, self.network.weights, strict=True):
            slow.assign(0.99 * slow + 0.01 * fast)  # taken back on a skipped step, too: see protect
        return {"error": error}


model = Diffusion()
model.compile(hs.LossScaleOptimizer(keras.optimizers.Adam(1e-3)))
hs.protect(model)
errors = model.fit(digits.images.reshape(-1, 64) * 2.0 - 1.0, batch_size=64, epochs=20, verbose=0).history["error"]
print(f"error {errors[0]:.2f} -> {errors[-1]:.2f}")
before = model.average.get_weights()
model.fit(np.full((64, 64), np.nan, "float32"), batch_size=64, verbose=0)
print("a batch of NaN moved the average:", not all(map(np.array_equal, before, model.average.get_weights())))
