"""Under `protect` on replicas `fit` and `evaluate` show Keras's own numbers, also of metrics that are no mean."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from replica_cases import mirrored

import scaler

BATCH, BATCHES = 8, 3


class Batches(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append({name: float(value) for name, value in logs.items()})


def made(ours):
    keras.backend.clear_session()
    with mirrored(2).scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input([5]), keras.layers.Dense(1, "sigmoid")])
        inner = keras.optimizers.SGD(0.5)
        model.compile(
            scaler.LossScaleOptimizer(inner, scaler.Static(64.0)) if ours else inner,
            loss="binary_crossentropy",
            weighted_metrics=[keras.metrics.Precision(name="precision")],
            jit_compile=False,
        )
    return scaler.protect(model) if ours else model


def weighted_data():
    random, size = np.random.default_rng(0), BATCH * BATCHES
    x, y = random.normal(size=(size, 5)), random.uniform(size=(size, 1)) < 0.3
    weight = random.uniform(0.1, 4.0, size)
    parts = (x.astype(np.float32), y.astype(np.float32), weight.astype(np.float32))
    return tf.data.Dataset.from_tensor_slices(parts).batch(BATCH, drop_remainder=True)


def shown(model):
    """What `fit` shows at the end of each epoch and after each batch, and what `evaluate` returns after it."""
    batches = Batches()
    history = model.fit(weighted_data(), epochs=2, shuffle=False, verbose=0, callbacks=[batches]).history
    return history, batches.seen, model.evaluate(weighted_data(), verbose=0, return_dict=True)


@pytest.mark.dear("two models are compiled and fitted on two devices, ours and Keras's")
def test_metrics_are_those_of_keras():
    ours, wanted = shown(made(True)), shown(made(False))
    for mine, theirs in zip(ours, wanted, strict=True):
        keras.tree.map_structure(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), mine, theirs)
