"""Dynamic loss scaling in a loop that is written by hand: no fit, no Loop."""

import keras
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
digits = hs.loops.tasks.load("digits")
data = tf.data.Dataset.from_tensor_slices((digits.images, digits.labels)).shuffle(1438, seed=0).batch(50)
hidden = [keras.layers.Flatten(), keras.layers.Dense(64, activation="relu"), keras.layers.BatchNormalization()]
model = keras.Sequential([keras.Input((8, 8, 1)), *hidden, keras.layers.Dense(10, dtype="float32")])
optimizer = keras.optimizers.Adam(2e-3)
loss_scaler = hs.LossScaler(hs.Dynamic(2.0**20, growth_interval=100))
mean_loss = keras.metrics.Mean()


@tf.function
def train_step(x, y):
    before = hs.snapshot(model.non_trainable_variables)  # BatchNorm's statistics, before the forward pass
    with tf.GradientTape() as tape:
        loss = digits.loss(y, model(x, training=True))
        scaled = loss_scaler.scale(loss)
    grads = tape.gradient(scaled, model.trainable_variables)
    outcome = loss_scaler.apply(optimizer, grads, model.trainable_variables, rollback=before)
    # NaN times a weight of 0 is NaN.
    mean_loss.update_state(tf.where(outcome.finite, loss, 0.0), tf.cast(outcome.finite, tf.float32))


for epoch in range(1, 6):
    mean_loss.reset_state()
    for x, y in data:
        train_step(x, y)
    loss_scaler.check()  # raises StuckError if almost every step is skipped; reads four numbers
    print(f"epoch {epoch}: loss {mean_loss.result():.2f}, loss scale {loss_scaler.loss_scale:.0f}")
print(f"held out: {digits.accuracy(model):.1%}, skipped {loss_scaler.counters.skipped}\n{loss_scaler.explain()}")
