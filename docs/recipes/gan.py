"""A GAN in float16: two models, two optimizers, a loss scale for each."""

import keras
import numpy as np
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("float16")
random = tf.random.Generator.from_seed(0)
cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)


def make_model(name, inputs, outputs):
    hidden = [keras.layers.Dense(64, activation="leaky_relu") for _ in range(2)]
    last = [keras.layers.Dense(outputs), keras.layers.Activation("linear", dtype="float32")]
    return keras.Sequential([keras.Input([inputs]), *hidden, *last], name=name)


generator, discriminator = make_model("generator", 4, 2), make_model("discriminator", 2, 1)


def losses(reals):
    fakes = generator(random.normal([128, 4]), training=True)
    real, fake = discriminator(reals, training=True), discriminator(fakes, training=True)
    d_loss = cross_entropy(tf.ones_like(real), real) + cross_entropy(tf.zeros_like(fake), fake)
    return d_loss, cross_entropy(tf.ones_like(fake), fake)


d_optimizer, g_optimizer = (keras.optimizers.Adam(1e-3, beta_1=0.5) for _ in range(2))
d_part = hs.Part("discriminator", discriminator, lambda both: both[0], d_optimizer)
g_part = hs.Part("generator", generator, lambda both: both[1], g_optimizer)
train_step = hs.ComposedStep([d_part, g_part], losses)
angles = np.random.default_rng(0).uniform(0.0, 2.0 * np.pi, 4096)
ring = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
dataset = tf.data.Dataset.from_tensor_slices(ring).shuffle(4096, seed=0).repeat().batch(128)
print(hs.Loop(train_step, dataset, steps_per_call=500).run(2000))
fakes = generator(random.normal([1000, 4]), training=False).numpy()
sectors = len(np.unique(np.floor(np.arctan2(fakes[:, 1], fakes[:, 0]) / (np.pi / 4))))
print(f"{np.mean(np.abs(np.linalg.norm(fakes, axis=1) - 1.0)):.2f} from the ring, in {sectors} of its 8 sectors")
print("loss scales", {name: float(one.loss_scale) for name, one in train_step.scalers.items()})
