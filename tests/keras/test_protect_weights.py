"""Under `protect` a step may assign weights that the optimizer also updates: an overflow in between leaves no NaN."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored

import scaler
from scaler.keras.variables import ProtectedStep


class Sharp(keras.Sequential):
    """Sharpness-aware: adds a gradient to the weights, differentiates there, and takes it off again."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        weights = self.trainable_variables
        first = self.optimizer.get_unscaled_gradients(self._grads(x, y)[1])
        norm = tf.linalg.global_norm(first)
        for weight, grad in zip(weights, first, strict=True):
            weight.assign_add(tf.cast(0.05 * grad / norm, weight.dtype))
        loss, grads = self._grads(x, y)
        for weight, grad in zip(weights, first, strict=True):
            weight.assign_sub(tf.cast(0.05 * grad / norm, weight.dtype))
        self.optimizer.apply(grads, weights)
        return {"loss": loss}

    def _grads(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(self(x, training=True), tf.float32) - y))
            scaled = self.optimizer.scale_loss(loss / tf.distribute.get_strategy().num_replicas_in_sync)
        return loss, tape.gradient(scaled, self.trainable_variables)


class InAFunction(Sharp):
    """The same, where the optimizer runs in a function of the step."""

    def train_step(self, data):
        return self._inner(data)

    @tf.function
    def _inner(self, data):
        return Sharp.train_step(self, data)


def made(kind, policy="mixed_float16", **arguments):
    keras.utils.set_random_seed(0)
    model = kind([keras.Input([6]), keras.layers.Dense(1, dtype=policy)])
    optimizer = scaler.LossScaleOptimizer(
        keras.optimizers.SGD(1e-2, momentum=0.9), scaler.Dynamic(2.0**6, growth_interval=10**6)
    )
    model.compile(optimizer, loss="mse", **{"jit_compile": False, **arguments})
    return scaler.protect(model)


def batch():
    x = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
    return x, x[:, :1]


def spoiled(row=0):
    x, y = batch()
    y[row] = 1e8  # The loss is finite; its scaled gradient is not, in float16.
    return x, y


def weights_of(model):
    parts = [weight.value for weight in model.trainable_variables]
    return [np.asarray(own) for part in parts for own in getattr(part, "values", [part])]


@pytest.mark.slow_with("eager", "function")
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [(Sharp, {}), (Sharp, {"run_eagerly": True}), (InAFunction, {})],
    ids=["graph", "eager", "function"],
)
def test_a_gradient_that_is_added_and_taken_off_again(kind, arguments):
    model = made(kind, "mixed_float16", **arguments)
    model.train_on_batch(*batch())
    before = weights_of(model)
    model.train_on_batch(*spoiled())
    assert model.optimizer.loss_scaler.counters.skipped == 1
    for now, then in zip(weights_of(model), before, strict=True):
        np.testing.assert_allclose(now, then, rtol=1e-5, atol=1e-3)
    assert np.isfinite(model.train_on_batch(*batch()))
    assert model.optimizer.loss_scaler.counters.applied == 2


@pytest.mark.slow
def test_on_replicas():
    with mirrored(2).scope():
        model = made(Sharp)
    model.fit(*batch(), batch_size=16, verbose=0)
    before = weights_of(model)
    model.fit(*spoiled(0), batch_size=16, verbose=0)
    assert model.optimizer.loss_scaler.counters.skipped == 1
    for now, then in zip(weights_of(model), before, strict=True):
        np.testing.assert_allclose(now, then, rtol=1e-5, atol=1e-3)


class Clipping(keras.Sequential):
    """Assigns one weight after the update."""

    def train_step(self, data):
        logs = super().train_step(data)
        weight = self.trainable_variables[0]
        weight.assign(tf.clip_by_value(weight, -1.0, 1.0))
        return logs


class Function(keras.Sequential):
    @tf.function
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.slow_with("Function-0", "Clipping-1")
@pytest.mark.parametrize(
    ("kind", "assigned"),
    [(keras.Sequential, 0), (Function, 0), (Clipping, 1)],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_a_plain_step_pays_nothing(kind, assigned, monkeypatch):
    """Only what a step assigns beside the optimizer is kept until its end."""
    told = {}
    assigns = ProtectedStep.assigns

    def noted(protected, variable):
        told[variable.path] = assigns(protected, variable)
        return told[variable.path]

    monkeypatch.setattr(ProtectedStep, "assigns", noted)
    model = made(kind)
    model.train_on_batch(*batch())
    assert (sum(told.values()), len(told)) == (assigned, len(model.trainable_variables))
