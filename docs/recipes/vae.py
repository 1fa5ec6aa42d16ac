"""A variational autoencoder, two networks with one optimizer, in mixed float16 under fit."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import scaler

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
Dense, CODE = keras.layers.Dense, 4


class VAE(keras.Model):
    def __init__(self):
        super().__init__()
        # Both networks end in float32: their losses are computed from what they return.
        self.encoder = keras.Sequential([Dense(64, activation="relu"), Dense(2 * CODE, dtype="float32")])
        self.decoder = keras.Sequential([Dense(64, activation="relu"), Dense(64, dtype="float32")])
        self.seeds = keras.random.SeedGenerator(0)
        self.seen = {name: keras.metrics.Mean(name) for name in ("reconstruction", "divergence")}

    @property
    def metrics(self):
        return list(self.seen.values())

    def train_step(self, images):
        with tf.GradientTape() as tape:
            mean, log_variance = tf.split(self.encoder(images, training=True), 2, axis=-1)
            noise = keras.random.normal(tf.shape(mean), dtype="float32", seed=self.seeds)
            logits = self.decoder(mean + tf.exp(0.5 * log_variance) * noise, training=True)
            errors = tf.nn.sigmoid_cross_entropy_with_logits(images, logits)
            divergences = 0.5 * (tf.square(mean) + tf.exp(log_variance) - 1.0 - log_variance)
            terms = {"reconstruction": errors, "divergence": divergences}
            terms = {name: tf.reduce_mean(tf.reduce_sum(term, axis=-1)) for name, term in terms.items()}
            scaled = self.optimizer.scale_loss(tf.add_n(list(terms.values())))
        weights = self.encoder.trainable_variables + self.decoder.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        for name, term in terms.items():
            self.seen[name].update_state(term)
        return self.get_metrics_result()


images = load_digits().data[:1792].astype("float32") / 16.0  # 28 whole batches
model = VAE()
model.compile(scaler.LossScaleOptimizer(keras.optimizers.Adam(3e-3), scaler.Dynamic()))
scaler.protect(model)  # also for a model without a call(): the sampler's seed is put back on a skip
history = model.fit(images, batch_size=64, epochs=20, verbose=0, callbacks=[scaler.LossScaleLogger()]).history
for epoch in (0, 4, 19):
    row = {name: values[epoch] for name, values in history.items()}
    print(f"epoch {epoch + 1:2}: reconstruction {row['reconstruction']:.1f}, divergence {row['divergence']:.1f}")
print(f"{row['skipped_steps']} steps skipped")
