"""WGAN-GP in mixed float16: a penalty on gradients, which are scaled and unscaled like any others."""

import keras
import numpy as np
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
random = tf.random.Generator.from_seed(0)


def make_model(inputs, outputs):
    hidden = [keras.layers.Dense(64, activation="leaky_relu") for _ in range(2)]
    return keras.Sequential([keras.Input([inputs]), *hidden, keras.layers.Dense(outputs, dtype="float32")])


generator, critic, c_scaler = make_model(4, 2), make_model(2, 1), hs.LossScaler()


def losses(reals):
    fakes, share = generator(random.normal([128, 4]), training=True), random.uniform([128, 1])
    between = share * reals + (1.0 - share) * tf.stop_gradient(fakes)
    with tf.GradientTape() as inner:
        inner.watch(between)
        inner_scaled = c_scaler.scale(tf.reduce_sum(critic(between, training=True)))
    (slopes,) = c_scaler.unscale([inner.gradient(inner_scaled, between)])  # before they are squared
    norms = tf.sqrt(tf.reduce_sum(tf.square(slopes), axis=1) + 1e-12)
    real, fake = tf.reduce_mean(critic(reals, training=True)), tf.reduce_mean(critic(fakes, training=True))
    c_loss = fake - real + 0.3 * tf.reduce_mean(tf.square(norms - 1.0))
    return (c_loss, {"slope": tf.reduce_mean(norms)}), -fake


c_optimizer, g_optimizer = (keras.optimizers.Adam(2e-3, beta_1=0.5) for _ in range(2))
c_part = hs.Part("critic", critic, lambda both: both[0], c_optimizer, loss_scaler=c_scaler)
step = hs.ComposedStep([c_part, hs.Part("generator", generator, lambda both: both[1], g_optimizer)], losses)
slope = hs.Call(lambda visit: print(f"median slope {np.median(visit.outputs['critic/slope']):.2f}"), every=500)
angles = np.random.default_rng(0).uniform(0.0, 2.0 * np.pi, 4096)
ring = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
dataset = tf.data.Dataset.from_tensor_slices(ring).shuffle(4096, seed=0).repeat().batch(128)
print(hs.Loop(step, dataset, steps_per_call=500, actions=[slope]).run(2000))
distances = np.abs(np.linalg.norm(generator(random.normal([1000, 4]), training=False), axis=1) - 1.0)
scales = {name: float(one.loss_scale) for name, one in step.scalers.items()}
print(f"{np.mean(distances):.2f} from the ring, loss scales {scales}")
