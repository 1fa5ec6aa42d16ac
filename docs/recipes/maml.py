"""Learning to learn a sine from ten points (MAML), in mixed float16: a gradient through a gradient step."""

import keras
import numpy as np
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
layers = [keras.layers.Dense(40, "relu"), keras.layers.Dense(40, "relu"), keras.layers.Dense(1, dtype="float32")]
model = keras.Sequential([keras.Input([1]), *layers])
weights, optimizer = model.trainable_variables, keras.optimizers.Adam(1e-3)
loss_scaler, inner_scaler = hs.LossScaler(), hs.LossScaler(hs.Dynamic(2.0**10))


def sines(seed):
    random = np.random.default_rng(seed)
    while True:
        x = random.uniform(-5, 5, (2, 10, 1)).astype(np.float32)
        yield x, (random.uniform(1, 5) * np.sin(x + random.uniform(0, np.pi))).astype(np.float32)


def train_step(x, y):
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            scaled = inner_scaler.scale(tf.reduce_mean(tf.square(y[0] - model(x[0]))))
        grads = inner_scaler.unscale(inner.gradient(scaled, weights))  # the inner step is of unscaled gradients
        adapted = [weight - 0.01 * grad for weight, grad in zip(weights, grads, strict=True)]
        prediction, _ = model.stateless_call(adapted, model.non_trainable_variables, x[1])
        loss = tf.reduce_mean(tf.square(y[1] - prediction))
        scaled = loss_scaler.scale(loss)
    inner_scaler.update(hs.Event(finite=hs.all_finite(grads)))  # lowers its own scale at an inner overflow
    outcome = loss_scaler.apply(optimizer, outer.gradient(scaled, weights), weights)
    return {"loss": loss, "applied": outcome.finite}


said = hs.Call(lambda visit: print(f"loss after one inner step {visit.outputs['loss'].mean():.1f}"), every=500)
print(hs.Loop(train_step, sines(0), steps_per_call=500, actions=[said]).run(1000))
