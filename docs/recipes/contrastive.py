"""Contrastive learning in mixed float16: an encoder and a probe, each with an optimizer and a loss scale of its own."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import scaler

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
Dense, Sequential = keras.layers.Dense, keras.Sequential
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Contrastive(keras.Model):
    def __init__(self):
        super().__init__()
        self.augment = Sequential([keras.layers.GaussianNoise(0.15, seed=0), keras.layers.Dropout(0.2, seed=1)])
        self.encoder = Sequential([Dense(128, activation="relu"), keras.layers.BatchNormalization(), Dense(64)])
        self.projection = Sequential([Dense(64, activation="relu"), Dense(32, dtype="float32")])
        self.probe = Dense(10, dtype="float32")
        self.encoder_optimizer = scaler.LossScaleOptimizer(keras.optimizers.Adam(1e-3), scaler.Dynamic())
        self.probe_optimizer = scaler.LossScaleOptimizer(keras.optimizers.Adam(1e-2), scaler.Dynamic())
        self.seen = keras.metrics.Mean("contrast"), keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    @property
    def metrics(self):
        return list(self.seen)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            views = [self.projection(self.encoder(self.augment(x, training=True), training=True)) for _ in range(2)]
            # In float32: a similarity over a small temperature is large, and its exponential larger.
            one, other = (tf.math.l2_normalize(view, axis=1) for view in views)
            similarities = tf.matmul(one, other, transpose_b=True) / 0.1
            loss = cross_entropy(tf.range(tf.shape(similarities)[0]), similarities)
            scaled = self.encoder_optimizer.scale_loss(loss)
        weights = self.encoder.trainable_variables + self.projection.trainable_variables
        self.encoder_optimizer.apply(tape.gradient(scaled, weights), weights)
        with tf.GradientTape() as tape:
            logits = self.probe(tf.stop_gradient(self.encoder(x, training=False)))
            scaled = self.probe_optimizer.scale_loss(cross_entropy(y, logits))
        weights = self.probe.trainable_variables
        self.probe_optimizer.apply(tape.gradient(scaled, weights), weights)
        self.seen[0].update_state(loss)
        self.seen[1].update_state(y, logits)
        return self.get_metrics_result()


digits = load_digits()
model = scaler.protect(Contrastive())
model.compile()
data = digits.data[:1792].astype("float32") / 16.0, digits.target[:1792]  # 28 whole batches
history = model.fit(*data, batch_size=64, epochs=8, verbose=0, callbacks=[scaler.LossScaleLogger()]).history
for name in ("contrast", "accuracy"):
    print(f"{name} {history[name][0]:.2f} -> {history[name][-1]:.2f}")
for name in ("encoder_optimizer", "probe_optimizer"):
    print(f"{name}: loss scale {history[name + '_loss_scale'][-1]:.0f}")
