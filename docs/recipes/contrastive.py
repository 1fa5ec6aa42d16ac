"""Contrastive learning in mixed float16: an encoder and a probe, each with an optimizer and a loss scale of its own."""

import keras
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
digits = hs.loops.tasks.load("digits")
Dense, Sequential, Input = keras.layers.Dense, keras.Sequential, keras.Input
noise = [keras.layers.GaussianNoise(0.15, seed=0), keras.layers.Dropout(0.2, seed=1), keras.layers.Flatten()]
encoder = Sequential([Input([8, 8, 1]), *noise, Dense(128, "relu"), keras.layers.BatchNormalization(), Dense(64)])
projection = Sequential([Input([64]), Dense(64, "relu"), Dense(32, dtype="float32")])
probe = Sequential([Input([64]), Dense(10, dtype="float32")])


def contrast(batch):
    # In float32: a similarity over a small temperature is large, and its exponential larger.
    one, other = (tf.math.l2_normalize(projection(encoder(batch[0], training=True)), axis=1) for _ in range(2))
    similarities = tf.matmul(one, other, transpose_b=True) / 0.1
    return digits.loss(tf.range(tf.shape(similarities)[0]), similarities)


def error(batch):
    logits = probe(tf.stop_gradient(encoder(batch[0], training=False)))
    hits = tf.equal(tf.argmax(logits, axis=1, output_type=tf.int32), batch[1])
    return digits.loss(batch[1], logits), {"accuracy": tf.reduce_mean(tf.cast(hits, tf.float32))}


encoder_part = hs.Part("encoder", [encoder, projection], contrast, keras.optimizers.Adam(1e-3))
probe_part = hs.Part("probe", probe, error, keras.optimizers.Adam(1e-2))
step = hs.ComposedStep([encoder_part, probe_part])
accuracy = hs.Call(lambda visit: print(f"accuracy {visit.outputs['probe/accuracy'].mean():.2f}"), every=50)
hs.Loop(step, digits.dataset(64, seed=0), steps_per_call=50, actions=[accuracy]).run(200)
for name, loss_scaler in step.scalers.items():
    print(f"{name}: loss scale {loss_scaler.loss_scale:.0f}, skipped {loss_scaler.counters.skipped}")
