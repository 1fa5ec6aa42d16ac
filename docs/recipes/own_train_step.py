"""A Keras model with its own train_step: two noisy views of each image must get the same answer."""

import keras
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")


class Consistent(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            one, other = self(x, training=True), self(x, training=True)
            loss = self.compute_loss(x, y, one) + tf.reduce_mean(tf.square(one - other))
            scaled = self.optimizer.scale_loss(loss)  # the last line inside of the tape
        grads = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)  # divides by the scale, applies or skips
        return {**self.compute_metrics(x, y, one), "loss": loss}


digits = hs.loops.tasks.load("digits")
noise, body = keras.layers.GaussianNoise(0.2, seed=0), keras.layers.Dense(128, activation="relu")
hidden = [keras.layers.Flatten(), noise, body, keras.layers.BatchNormalization()]
model = Consistent([keras.Input((8, 8, 1)), *hidden, keras.layers.Dense(10, dtype="float32")])
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(hs.LossScaleOptimizer(keras.optimizers.Adam(1e-3)), cross_entropy, metrics=["accuracy"])
hs.protect(model)  # a skipped step also puts back BatchNorm, seed generators and metrics
logger = hs.LossScaleLogger()
history = model.fit(digits.images, digits.labels, epochs=6, verbose=0, callbacks=[logger]).history
print("accuracy", " ".join(f"{accuracy:.2f}" for accuracy in history["accuracy"]))
print(f"loss scale {history['loss_scale'][-1]:.0f}, {history['skipped_steps'][-1]} steps skipped")
print(f"held out: {digits.accuracy(model):.1%}")
