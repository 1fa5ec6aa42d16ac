"""Contrastive learning in mixed float16: an encoder and a probe, each with an optimizer and a loss scale of its own."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import loops

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
Dense, Sequential, Input = keras.layers.Dense, keras.Sequential, keras.Input
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

noise = [keras.layers.GaussianNoise(0.15, seed=0), keras.layers.Dropout(0.2, seed=1)]
augment = Sequential([Input([64]), *noise])
encoder = Sequential([Input([64]), Dense(128, activation="relu"), keras.layers.BatchNormalization(), Dense(64)])
projection = Sequential([Input([64]), Dense(64, activation="relu"), Dense(32, dtype="float32")])
probe = Sequential([Input([64]), Dense(10, dtype="float32")])


def contrast(batch):
    views = [projection(encoder(augment(batch[0], training=True), training=True)) for _ in range(2)]
    # In float32: a similarity over a small temperature is large, and its exponential larger.
    one, other = (tf.math.l2_normalize(view, axis=1) for view in views)
    similarities = tf.matmul(one, other, transpose_b=True) / 0.1
    return cross_entropy(tf.range(tf.shape(similarities)[0]), similarities)


def error(batch):
    x, y = batch
    logits = probe(tf.stop_gradient(encoder(x, training=False)))
    hits = tf.equal(tf.argmax(logits, axis=1), y)
    return cross_entropy(y, logits), {"accuracy": tf.reduce_mean(tf.cast(hits, tf.float32))}


encoder_part = loops.Part("encoder", [encoder, projection], contrast, keras.optimizers.Adam(1e-3))
probe_part = loops.Part("probe", probe, error, keras.optimizers.Adam(1e-2))
train_step = loops.ComposedStep([encoder_part, probe_part])


def report(visit):
    means = [visit.outputs[name].mean() for name in ("encoder/loss", "probe/accuracy")]
    print(f"epoch {visit.counters.data // 28}: contrast {means[0]:.2f}, accuracy {means[1]:.2f}")


digits = load_digits()
data = digits.data[:1792].astype("float32") / 16.0, digits.target[:1792]  # 28 whole batches
dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(1792, seed=0).repeat().batch(64, drop_remainder=True)
loops.Loop(train_step, dataset, steps_per_call=28, actions=[report]).run(8 * 28)
for name, loss_scaler in train_step.scalers.items():
    print(f"{name}: loss scale {loss_scaler.loss_scale:.0f}, skipped {loss_scaler.counters.skipped}")
