"""Sparse gradients of embeddings, and what repeated ids do to them here and in Keras."""

import keras
import tensorflow as tf

import halfstep as hs


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
    ours = moved(make(), hs.LossScaler(hs.Static(1024.0)))
    same = moved(make(), hs.LossScaler(hs.Static(1024.0), sum_duplicates=False))
    print(f"{name:<13} Keras {moved(make())}   here {ours}   with sum_duplicates=False {same}")
