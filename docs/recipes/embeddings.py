"""Embeddings in float16: sparse gradients, and what repeated ids do to them here and in Keras."""

import keras
import numpy as np
import tensorflow as tf

import loops
import scaler

WORDS, LENGTH = 1000, 32
keras.utils.set_random_seed(0)
random = np.random.default_rng(0)
texts = np.int32(np.minimum(random.zipf(1.3, [4096, LENGTH]), WORDS - 1))  # frequent words are in nearly every text
labels = np.int32((texts % 3 == 0).sum(axis=1) > (texts % 3 == 2).sum(axis=1))

keras.config.set_dtype_policy("float16")
layers = [
    keras.layers.Embedding(WORDS, 16),
    keras.layers.GlobalAveragePooling1D(),
    keras.layers.Dense(2, dtype="float32"),
]
model = keras.Sequential([keras.Input([LENGTH], dtype="int32"), *layers])
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
step = loops.TrainStep(model, cross_entropy, keras.optimizers.Adam(1e-2), loss_scaler=scaler.LossScaler())
dataset = tf.data.Dataset.from_tensor_slices((texts[:3072], labels[:3072])).shuffle(3072, seed=0).repeat().batch(64)
counters = loops.Loop(step, dataset, steps_per_call=100).run(300)
accuracy = np.mean(np.argmax(model(texts[3072:]), axis=1) == labels[3072:])
print(f"accuracy {accuracy:.2f}, skipped {counters.skipped}")


def moved(optimizer, loss_scaler=None):
    """How far one step moves a row that is used four times with gradient 1, and one used once with gradient 4."""
    table = keras.Variable(tf.zeros([2, 1]), name="table")
    optimizer.build([table])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table.value, [0, 0, 0, 0, 1]) * [[1.0], [1.0], [1.0], [1.0], [4.0]])
        scaled = loss_scaler.scale(loss) if loss_scaler else loss
    gradients = tape.gradient(scaled, [table.value])  # tf.IndexedSlices: five rows with their ids
    if loss_scaler:
        loss_scaler.apply(optimizer, gradients, [table])
    else:
        optimizer.apply(gradients, [table])
    return ", ".join(f"{value:.3f}" for value in -table.numpy()[:, 0])


for name, make in {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "SGD, clipped": lambda: keras.optimizers.SGD(0.1, global_clipnorm=1.0),
    "Adam": lambda: keras.optimizers.Adam(0.1),
}.items():
    ours = moved(make(), scaler.LossScaler(scaler.Static(1024.0)))
    same = moved(make(), scaler.LossScaler(scaler.Static(1024.0), sum_duplicates=False))
    print(f"{name:<13} Keras {moved(make())}   here {ours}   with sum_duplicates=False {same}")
