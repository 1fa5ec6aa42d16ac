"""Guards that a small network trains in emulated float8 as in float32: E4M3 forward, E5M2 backward, delayed scaling."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from scaler.formats import emulated

SEEDS, STEPS = 3, 300


def accuracies(task, format):
    """The accuracy on held-out digits after each seed's run, of one traced step."""
    images, labels = task.images.reshape(-1, 64), task.labels
    model = keras.Sequential([keras.Input([64]), keras.layers.Dense(48, activation="relu"), keras.layers.Dense(10)])
    if format is not None:
        format(model)
    optimizer = keras.optimizers.SGD(0.2, momentum=0.9)
    step = loops.TrainStep(model, task.loss, optimizer, loss_scaler=scaler.LossScaler(scaler.NoScaling()))

    @tf.function
    def train(order):
        for batch in order:
            step((tf.gather(images, batch), tf.gather(labels, batch)))

    optimizer.build(model.trainable_variables)
    variables = (*model.variables, *optimizer.variables)
    start, found = [variable.numpy() for variable in variables], []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
        for layer in model.layers:
            layer.kernel.assign(rng.standard_normal(layer.kernel.shape) * np.sqrt(2 / layer.kernel.shape[0]))
        train(tf.constant(rng.integers(0, len(images), [STEPS, 64])))
        right = np.argmax(model(task.test_images.reshape(-1, 64)), axis=1) == task.test_labels
        found.append(right.mean())
    return np.array(found)


@pytest.mark.exhaustive
def test_accuracy_is_that_of_float32_within_its_noise():
    task = loops.tasks.load("digits")
    exact, narrow = accuracies(task, None), accuracies(task, emulated("float8_e4m3fn"))
    noise = exact.std(ddof=1) + narrow.std(ddof=1) + 1 / len(task.test_labels)
    assert exact.mean() > 0.95
    assert abs(narrow.mean() - exact.mean()) <= noise
    # It did round.
    assert not np.array_equal(exact, narrow)
