"""Fault 12: optimizers with state and habits of their own: accumulators, EMA, weight decay, clipping, Muon.

Guards lines 3 and 8 of the promise: a skipped step leaves every variable of the optimizer bit for bit as it was, and
with a power-of-two scale the scaled run equals the unscaled one.
"""

import functools

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from fault_cases import batch, batches, run_in, spoil_gradient
from rigs import assert_finite, raw
from versions import parameters

import scaler

OPTIMIZERS = {
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "EMA": lambda: keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.05),
    "Muon": lambda: keras.optimizers.Muon(0.01, exclude_layers=["last"]),
}


class Trained:
    """Two dense layers in float32 and an optimizer, with a scaler or without one."""

    def __init__(self, name, mode, loss_scale=None, kind="float32"):
        keras.utils.set_random_seed(7)
        dense = functools.partial(keras.layers.Dense, use_bias=False, dtype=kind)
        first, last = dense(6, activation="tanh", name="first"), dense(1, name="last")
        self.model = keras.Sequential([keras.Input([4], dtype=kind), first, last])
        self.optimizer, self.loss_scaler = OPTIMIZERS[name](), scaler.LossScaler(scaler.Static(loss_scale or 1.0))
        self.masters = scaler.MasterWeights(self.model.trainable_variables)
        self.optimizer.build(self.masters.weights)
        self.run = run_in(mode, self._scaled if loss_scale else self._plain)

    def _loss(self, x, y, factor):
        return models.squared_error(y, spoil_gradient(tf.cast(self.model(x), tf.float32), factor))

    def _scaled(self, x, y, factor):
        with tf.GradientTape() as tape:
            scaled = self.loss_scaler.scale(self._loss(x, y, factor))
        grads = tape.gradient(scaled, self.model.trainable_variables)
        return {"applied": self.loss_scaler.apply(self.optimizer, grads, self.masters).finite}

    def _plain(self, x, y, factor):
        with tf.GradientTape() as tape:
            loss = self._loss(x, y, factor)
        self.optimizer.apply(tape.gradient(loss, self.model.trainable_variables), self.model.trainable_variables)
        return {"loss": loss}

    def variables(self):
        return [*self.model.variables, *self.masters.weights, *self.optimizer.variables]

    def apply_and_skip(self, number, *factors):
        """A batch, and for each factor one that a skip must leave no bit of."""
        assert self.run(batches(number))[0]["applied"]
        before = raw(self.variables())
        outputs = self.run([batch(50 + number, factor=factor) for factor in factors])
        assert not any(output["applied"] for output in outputs)
        assert raw(self.variables()) == before


def equals_an_unscaled_run(name, mode, steps, spoiled):
    # The run that it is compared with needs no trace.
    scaled, plain, factors = Trained(name, mode, 2.0**10), Trained(name, "eager"), (np.inf, np.nan, 1e25)
    for number in range(steps):
        scaled.apply_and_skip(number, *(factors[(number + n) % 3] for n in range(spoiled)))
    plain.run(batches(*range(steps)))
    assert int(scaled.optimizer.iterations) == int(plain.optimizer.iterations)
    assert_finite(scaled.variables())
    # Compilers contract a * b + c differently with and without the gate around it.
    tolerance = 0 if mode == "eager" else 2e-5
    for our, their in zip(scaled.variables(), plain.variables(), strict=True):
        if our.dtype in ("float32", tf.float32):
            np.testing.assert_allclose(our.numpy(), their.numpy(), rtol=tolerance, atol=tolerance, err_msg=our.name)


@pytest.mark.parametrize("name", parameters([name for name in OPTIMIZERS if name != "global_clipnorm"]))
def test_every_bit_is_that_of_an_unscaled_run(name):
    """In eager mode, where the two are equal to the last bit."""
    equals_an_unscaled_run(name, "eager", steps=3, spoiled=1)


def test_skips_leave_every_bit_and_the_rest_equals_that_run_in_graphs():
    equals_an_unscaled_run("EMA", "graph", steps=7, spoiled=3)


@pytest.mark.slow_with("Muon")
@pytest.mark.parametrize("name", parameters(["global_clipnorm", "Muon"]))
def test_masters_under_the_same_optimizers(name):
    trained = Trained(name, "eager", 2.0**8, kind="float16")
    for number in range(2):
        trained.apply_and_skip(number, np.inf)
    assert_finite(trained.variables())
    for variable, master in zip(trained.model.trainable_variables, trained.masters.weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), master.numpy().astype(np.float16))
    if name == "Muon":
        # It still tells masters apart by their paths: Adam's second moments exist for what it leaves to Adam alone.
        assert {"first/kernel", "last/kernel"} == {"/".join(w.path.split("/")[-2:]) for w in trained.masters.weights}
        seconds = [variable.path for variable in trained.optimizer.variables if "velocity" in variable.path]
        assert len(seconds) == 1, seconds
