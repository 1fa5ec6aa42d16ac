"""WGAN-GP in mixed float16: a penalty on gradients, which are scaled and unscaled like any others."""

import keras
import numpy as np
import tensorflow as tf

import loops
import scaler

BATCH, NOISE = 128, 4
keras.utils.set_random_seed(0)
random = tf.random.Generator.from_seed(0)


def make_model(inputs, outputs):
    hidden = [keras.layers.Dense(64, activation="leaky_relu") for _ in range(2)]
    return keras.Sequential([keras.Input([inputs]), *hidden, keras.layers.Dense(outputs, dtype="float32")])


keras.config.set_dtype_policy("mixed_float16")
generator, critic = make_model(NOISE, 2), make_model(2, 1)
c_scaler = scaler.LossScaler(scaler.Dynamic())


def losses(reals):
    noise, share = random.normal([BATCH, NOISE]), random.uniform([BATCH, 1])
    fakes = generator(noise, training=True)
    between = share * reals + (1.0 - share) * tf.stop_gradient(fakes)
    with tf.GradientTape() as inner:
        inner.watch(between)
        inner_scaled = c_scaler.scale(tf.reduce_sum(critic(between, training=True)))
    (slopes,) = c_scaler.unscale([inner.gradient(inner_scaled, between)])  # before they are squared
    norms = tf.sqrt(tf.reduce_sum(tf.square(slopes), axis=1) + 1e-12)
    real, fake = tf.reduce_mean(critic(reals, training=True)), tf.reduce_mean(critic(fakes, training=True))
    c_loss = fake - real + 0.3 * tf.reduce_mean(tf.square(norms - 1.0))
    return (c_loss, {"slope": tf.reduce_mean(norms)}), -fake


c_optimizer, g_optimizer = keras.optimizers.Adam(2e-3, beta_1=0.5), keras.optimizers.Adam(2e-3, beta_1=0.5)
c_part = loops.Part("critic", critic, lambda both: both[0], c_optimizer, loss_scaler=c_scaler)
train_step = loops.ComposedStep([c_part, loops.Part("generator", generator, lambda both: both[1], g_optimizer)], losses)


def report(visit):
    fakes = generator(random.normal([1000, NOISE]), training=False).numpy()
    away = np.mean(np.abs(np.linalg.norm(fakes, axis=1) - 1.0))
    slope = np.median(visit.outputs["critic/slope"])
    print(f"step {visit.counters.data}: {away:.2f} from the ring, median slope {slope:.2f}")


angles = np.random.default_rng(0).uniform(0.0, 2.0 * np.pi, 4096)
ring = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
dataset = tf.data.Dataset.from_tensor_slices(ring).shuffle(4096, seed=0).repeat().batch(BATCH)
print(loops.Loop(train_step, dataset, steps_per_call=500, actions=[report]).run(2000))
print("loss scales", {name: float(one.loss_scale) for name, one in train_step.scalers.items()})
