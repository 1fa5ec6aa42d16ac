"""A variational autoencoder, two networks with one optimizer, in mixed float16 under fit."""

import keras
import tensorflow as tf

import halfstep as hs

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

    def train_step(self, images):
        with tf.GradientTape() as tape:
            mean, log_variance = tf.split(self.encoder(images, training=True), 2, axis=-1)
            noise = keras.random.normal(tf.shape(mean), dtype="float32", seed=self.seeds)
            logits = self.decoder(mean + tf.exp(0.5 * log_variance) * noise, training=True)
            errors = tf.nn.sigmoid_cross_entropy_with_logits(images, logits)
            divergences = 0.5 * (tf.square(mean) + tf.exp(log_variance) - 1.0 - log_variance)
            terms = [tf.reduce_mean(tf.reduce_sum(term, axis=-1)) for term in (errors, divergences)]
            scaled = self.optimizer.scale_loss(tf.add_n(terms))
        weights = self.encoder.trainable_variables + self.decoder.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        return {"reconstruction": terms[0], "divergence": terms[1]}


model = VAE()
model.compile(hs.LossScaleOptimizer(keras.optimizers.Adam(3e-3)))
hs.protect(model)  # also for a model without a call(): the sampler's seed is put back on a skip
images = hs.loops.tasks.load("digits").images[:1408].reshape(-1, 64)  # 22 whole batches
history = model.fit(images, batch_size=64, epochs=20, verbose=0, callbacks=[hs.LossScaleLogger()]).history
for epoch in (1, 5, 20):
    reconstruction, divergence = (history[name][epoch - 1] for name in ("reconstruction", "divergence"))
    print(f"epoch {epoch:2}: reconstruction {reconstruction:.1f}, divergence {divergence:.1f}")
print(f"{history['skipped_steps'][-1]} steps skipped")
