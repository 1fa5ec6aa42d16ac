"""Keras's callbacks and methods that read or swap variables of an optimizer or a model, where there are masters."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_cases import compiled, data, make_model, started

import scaler

VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])
SWAPS_MASTERS = pytest.mark.skipif(
    VERSION < (3, 15), reason="There the callback adds float32 averages to float16 weights."
)


def averaging(policy, **arguments):
    inner = keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.7)
    return compiled(policy, inner, scaler.Static(64.0), stateful=False, **arguments)


class Peek(keras.callbacks.Callback):
    """What the model holds while it is evaluated, and at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.tested, self.ended = [], []

    def on_test_begin(self, logs=None):
        self.tested.append(self.weights())

    def on_epoch_end(self, epoch, logs=None):
        self.ended.append(self.weights())

    def weights(self):
        return [np.asarray(weight, np.float32) for weight in self.model.trainable_variables]


def values(variables):
    return [np.asarray(variable, np.float32) for variable in variables]


def assert_all_close(ones, others, tolerance):
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@SWAPS_MASTERS
def test_averages_are_swapped_in_for_evaluation_and_out_again():
    model, peek = started(averaging, policy="float16", run_eagerly=True), Peek()
    x, y = data()
    tolerance = 1e-3
    for _ in range(4):
        model.train_on_batch(x, y)
    inner = model.optimizer.inner_optimizer
    raw, averages = values(model.trainable_variables), values(inner._model_variables_moving_average)
    model.evaluate(x, y, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights(), peek])
    assert_all_close(peek.tested[0], averages, tolerance)
    assert np.abs(averages[0] - raw[0]).max() > 3 * tolerance
    assert_all_close(values(model.trainable_variables), raw, tolerance)
    model.train_on_batch(x, y)
    assert_all_close(values(model.trainable_variables), raw, 0.5)
    assert int(inner.iterations) == 5


@pytest.mark.slow
@SWAPS_MASTERS
def test_weights_that_were_set_before_a_swap_are_there_after_it():
    model = started(averaging, policy="float16", run_eagerly=True)
    x, y = data()
    model.train_on_batch(x, y)
    model.set_weights([np.full(weight.shape, 0.25) for weight in model.weights])
    model.evaluate(x, y, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()])
    assert_all_close(
        values(model.trainable_variables), [np.full(v.shape, 0.25) for v in model.trainable_variables], 1e-3
    )


@pytest.mark.slow
def test_steps_that_run_eagerly_are_not_taken_for_a_swap():
    runs = []
    for eager in (False, True):
        model = averaging("mixed_float16", run_eagerly=eager)
        for _ in range(3):
            model.train_on_batch(*data(8))
        runs.append(
            values([*model.trainable_variables, *model.optimizer.inner_optimizer._model_variables_moving_average])
        )
    assert_all_close(*runs, 1e-3)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="This Keras has no MultiOptimizer.")
def test_averages_of_optimizers_inside_are_swapped_and_taken_over():
    slow, fast = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.7)
    inner = keras.optimizers.MultiOptimizer(lambda variable: fast if len(variable.shape) == 2 else slow)
    model, peek = compiled("mixed_float16", inner, scaler.Static(64.0), stateful=False), Peek()
    x, y = data()
    for _ in range(3):
        model.train_on_batch(x, y)
    averages = values(fast._model_variables_moving_average)
    model.evaluate(x, y, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights(), peek])
    assert_all_close([w for w in peek.tested[0] if w.ndim == 2], averages, 1e-3)
    model.optimizer.finalize_variable_values(model.trainable_variables)
    assert_all_close([w for w in values(model.trainable_variables) if w.ndim == 2], averages, 1e-3)


def test_a_clone_of_a_model_has_masters_of_its_own():
    model = make_model("float16", stateful=False)
    clone = keras.models.clone_model(model)
    optimizers = [scaler.LossScaleOptimizer(keras.optimizers.SGD(0.5), scaler.Static(1.0)) for _ in range(2)]
    before = values(clone.trainable_variables)
    optimizers[0].apply([tf.ones(v.shape) for v in model.trainable_variables], model.trainable_variables)
    assert_all_close(values(clone.trainable_variables), before, 0.0)
