"""Dynamic loss scaling in a loop that is written by hand: no fit, no Loop."""

import math

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import scaler

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")

digits = load_digits()
images, labels = digits.data.astype("float32") / 16.0, digits.target.astype("int32")
train = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500])).shuffle(1500, seed=0).batch(50)
held_out = tf.data.Dataset.from_tensor_slices((images[1500:], labels[1500:])).batch(99)

model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(10, dtype="float32"),  # logits and loss in float32
    ]
)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(2e-3)
loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**20, growth_interval=100))
mean_loss, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()


@tf.function
def train_step(x, y):
    before = scaler.snapshot(model.non_trainable_variables)  # BatchNorm's statistics, before the forward pass
    with tf.GradientTape() as tape:
        loss = cross_entropy(y, model(x, training=True))
        scaled = loss_scaler.scale(loss)
    grads = tape.gradient(scaled, model.trainable_variables)
    outcome = loss_scaler.apply(optimizer, grads, model.trainable_variables, clip_norm=1.0, rollback=before)
    counted = tf.where(outcome.finite, loss, 0.0), tf.cast(outcome.finite, tf.float32)  # NaN times a weight of 0 is NaN
    mean_loss.update_state(*counted)
    return outcome


for epoch in range(1, 6):
    mean_loss.reset_state()
    for x, y in train:
        outcome = train_step(x, y)
        if not outcome.finite and loss_scaler.counters.skipped == 1:
            print(loss_scaler.explain(outcome))
    loss_scaler.check()  # raises StuckError if almost every step is skipped; reads four numbers
    octaves = math.log2(outcome.loss_scale)
    print(f"epoch {epoch}: loss {float(mean_loss.result()):.2f}, loss scale 2^{octaves:.0f}")
for x, y in held_out:
    accuracy.update_state(y, model(x, training=False))
counters = loss_scaler.counters
print(f"held out: {float(accuracy.result()):.1%}; {int(counters.applied)} applied, {int(counters.skipped)} skipped")
