"""A Keras model with its own train_step: two noisy views of each image must get the same answer."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import scaler

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")


class Consistent(keras.Model):
    def __init__(self):
        super().__init__()
        self.noise = keras.layers.GaussianNoise(0.2, seed=0)
        self.body = keras.Sequential([keras.layers.Dense(128, activation="relu"), keras.layers.BatchNormalization()])
        self.head = keras.layers.Dense(10, dtype="float32")

    def call(self, x, training=False):
        return self.head(self.body(self.noise(x, training=training), training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            one, other = self(x, training=True), self(x, training=True)
            loss = self.compute_loss(x, y, one) + tf.reduce_mean(tf.square(one - other))
            scaled = self.optimizer.scale_loss(loss)  # the last line inside of the tape
        grads = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)  # divides by the scale, applies or skips
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, one)
        return self.get_metrics_result()


digits = load_digits()
x, y = digits.data.astype("float32") / 16.0, digits.target
model = Consistent()
model.compile(
    scaler.LossScaleOptimizer(keras.optimizers.Adam(1e-3), scaler.Dynamic()),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
scaler.protect(model)  # a skipped step also puts back BatchNorm, seed generators and metrics
history = model.fit(
    x[:1500], y[:1500], batch_size=50, epochs=6, verbose=0, callbacks=[scaler.LossScaleLogger()]
).history
print("loss", " ".join(f"{loss:.2f}" for loss in history["loss"]))
print(f"loss scale {history['loss_scale'][-1]:.0f}, {history['skipped_steps'][-1]} steps skipped")
print(f"held out: {model.evaluate(x[1500:], y[1500:], batch_size=99, verbose=0, return_dict=True)['accuracy']:.1%}")
