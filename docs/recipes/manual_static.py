"""Static loss scaling as tutorials write it, and what it lets through, beside the same loop with a loss scaler."""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import scaler

keras.config.set_dtype_policy("mixed_float16")
SCALE = 1024.0
digits = load_digits()
images, labels = digits.data[:1536].astype("float32") / 16.0, digits.target[:1536].astype("int32")
images[700, 5] = 30_000.0  # one broken pixel: float16 still holds it, but not what the gradients make of it
batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(64)  # 24 batches, the 11th is the bad one
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_model():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10, dtype="float32")]
    return keras.Sequential([keras.Input((64,)), *layers])


def by_hand(model, optimizer):
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            scaled = cross_entropy(y, model(x, training=True)) * SCALE
        grads = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply([grad / SCALE for grad in grads], model.trainable_variables)

    return step


def with_a_scaler(model, optimizer, loss_scaler):
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(cross_entropy(y, model(x, training=True)))
        grads = tape.gradient(scaled, model.trainable_variables)
        loss_scaler.apply(optimizer, grads, model.trainable_variables)

    return step


loss_scaler = scaler.LossScaler(scaler.Static(SCALE))
makers = {"by hand": by_hand, "LossScaler": lambda *parts: with_a_scaler(*parts, loss_scaler)}
for name, make in makers.items():
    model = make_model()
    step = make(model, keras.optimizers.Adam(1e-3))
    for x, y in batches.repeat(4):
        step(x, y)
    good = np.mean([np.mean(np.isfinite(weight)) for weight in model.get_weights()])
    right = np.mean(np.argmax(model.predict(images, batch_size=512, verbose=0), axis=-1) == labels)
    print(f"{name}: {good:.0%} of the weights are finite, {right:.0%} of the digits right")
print(f"{int(loss_scaler.counters.skipped)} steps skipped. {loss_scaler.explain()}")
