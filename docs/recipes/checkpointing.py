"""Gradient checkpointing: the backward pass computes activations again instead of keeping them."""

import keras
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
x = tf.random.stateless_normal([2048, 64], seed=(0, 1))
y = tf.cast(x[:, 0] * x[:, 1] > 0, tf.int32)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(2048, seed=0).repeat().batch(256)


class Recomputed(keras.layers.Wrapper):
    """Calls the layer that it wraps, keeps only its input, and calls it again in the backward pass."""

    def call(self, inputs):
        return tf.recompute_grad(self.layer)(inputs)


inputs = outputs = keras.Input([64])
for _ in range(3):
    layers = [keras.layers.LayerNormalization(), keras.layers.Dense(256, activation="gelu"), keras.layers.Dense(64)]
    outputs = keras.layers.Add()([outputs, Recomputed(keras.Sequential(layers))(outputs)])
model = keras.Model(inputs, keras.layers.Dense(2, dtype="float32")(outputs))
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
step = hs.TrainStep(model, cross_entropy, keras.optimizers.Adam(1e-3))
losses = []
counters = hs.Loop(step, dataset, actions=[lambda visit: losses.extend(visit.outputs["loss"])]).run(100)
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, skipped {counters.skipped}")
