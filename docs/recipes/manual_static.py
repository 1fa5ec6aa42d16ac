"""Static loss scaling as tutorials write it, and what it lets through, beside the same loop with a loss scaler."""

import keras
import numpy as np
import tensorflow as tf

import halfstep as hs

keras.config.set_dtype_policy("mixed_float16")
digits = hs.loops.tasks.load("digits")
images = digits.images[:1408].reshape(-1, 64).copy()
images[700, 5] = 30_000.0  # one broken pixel: float16 still holds it, but not what the gradients make of it
batches = tf.data.Dataset.from_tensor_slices((images, digits.labels[:1408])).batch(64)  # 22, the 11th is the bad one


def train(name, loss_scaler=None):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10, dtype="float32")]
    model, optimizer = keras.Sequential([keras.Input((64,)), *layers]), keras.optimizers.Adam(1e-3)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = digits.loss(y, model(x, training=True))
            scaled = loss * 1024.0 if loss_scaler is None else loss_scaler.scale(loss)
        grads = tape.gradient(scaled, model.trainable_variables)
        if loss_scaler is None:
            optimizer.apply([grad / 1024.0 for grad in grads], model.trainable_variables)
        else:
            loss_scaler.apply(optimizer, grads, model.trainable_variables)

    for x, y in batches.repeat(4):
        step(x, y)
    good = np.mean([np.mean(np.isfinite(weight)) for weight in model.get_weights()])
    print(f"{name}: {good:.0%} of the weights are finite")


train("by hand")
loss_scaler = hs.LossScaler(hs.Static(1024.0))
train("LossScaler", loss_scaler)
print(f"{int(loss_scaler.counters.skipped)} steps skipped. {loss_scaler.explain()}")
