"""Under `protect` on replicas `fit` and `evaluate` show Keras's own numbers, also of metrics that are no mean."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from replica_cases import mirrored

import scaler

BATCH, BATCHES = 8, 3


class Own(keras.Sequential):
    """Returns the results of metrics, as Keras's step does, and a number of its own."""

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.compute_loss(x, y, prediction, weight)
            scaled = self.optimizer.scale_loss(loss)
        self.metrics[0].update_state(loss)
        self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        for metric in self.metrics[1:]:
            metric.update_state(y, prediction, weight)
        return {**self.get_metrics_result(), "own": tf.reduce_sum(prediction)}


class Batches(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append({name: float(value) for name, value in logs.items()})


def made(replicas, ours, kind=keras.Sequential, scale=64.0, factor=1.0):
    keras.backend.clear_session()
    scope = mirrored(replicas).scope() if replicas > 1 else contextlib.nullcontext()
    with scope:
        keras.utils.set_random_seed(1)
        model = kind([keras.Input([5]), keras.layers.Dense(1, "sigmoid")])
        inner = keras.optimizers.SGD(0.5)
        model.compile(
            scaler.LossScaleOptimizer(inner, scaler.Static(scale)) if ours else inner,
            loss=lambda y, prediction: factor * keras.losses.binary_crossentropy(y, prediction),
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
@pytest.mark.slow_with("own-4", "own-2")
@pytest.mark.exhaustive_with("keras-4", "own-4", "own-2")
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("kind", [keras.Sequential, Own], ids=["keras", "own"])
def test_metrics_are_those_of_keras(kind, replicas):
    ours, wanted = shown(made(replicas, True, kind)), shown(made(replicas, False, kind))
    for mine, theirs in zip(ours, wanted, strict=True):
        keras.tree.map_structure(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), mine, theirs)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_epoch_of_skipped_steps_shows_the_worst_there_is():
    model = made(2, True, scale=2.0**126, factor=1e6)
    history, _, evaluated = shown(model)
    assert model.optimizer.loss_scaler.counters.skipped == 2 * BATCHES
    assert history["loss"] == [np.inf] * 2
    assert history["precision"] == [-np.inf] * 2
    assert all(map(np.isfinite, evaluated.values()))
