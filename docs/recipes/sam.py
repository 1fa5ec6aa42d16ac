"""Sharpness-aware minimisation in mixed float16: two gradients a step, and one decision."""

import keras
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
digits = hs.loops.tasks.load("digits")
layers = [keras.layers.Flatten(), keras.layers.Dense(64, "relu"), keras.layers.Dense(10, dtype="float32")]
model = keras.Sequential([keras.Input([8, 8, 1]), *layers])
weights, optimizer, loss_scaler = model.trainable_variables, keras.optimizers.Adam(1e-3), hs.LossScaler()


def scaled_gradients(x, y):
    with tf.GradientTape() as tape:
        loss = digits.loss(y, model(x, training=True))
        scaled = loss_scaler.scale(loss)
    return loss, tape.gradient(scaled, weights)


def train_step(batch):
    loss, grads = scaled_gradients(*batch)
    here = [tf.identity(weight) for weight in weights]
    climb = hs.scaler.gradients.unscale(grads, loss_scaler.loss_scale)
    length = 0.05 / (tf.linalg.global_norm(climb) + 1e-12)
    for weight, grad in zip(weights, climb, strict=True):
        weight.assign_add(length * grad)
    _, grads = scaled_gradients(*batch)
    for weight, old in zip(weights, here, strict=True):
        weight.assign(old)
    outcome = loss_scaler.apply(optimizer, grads, weights)
    return {"loss": loss, "applied": outcome.finite}


loop = hs.Loop(train_step, digits.dataset(64, seed=0), steps_per_call=50)
print(loop.run(200))
print(f"accuracy {digits.accuracy(model):.1%}")
