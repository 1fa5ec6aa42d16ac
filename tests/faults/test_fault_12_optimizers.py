"""Fault 12: optimizers with state and habits of their own: accumulators, EMA, weight decay, clipping, Muon, Lion.

Guards lines 3 and 8 of the promise: a skipped step leaves every variable of the optimizer bit for bit as it was, and
with a power-of-two scale the scaled run equals the unscaled one.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from fault_cases import batch, batches, run_in, spoil_gradient
from rigs import assert_finite, raw
from versions import needs_keras, parameters

import scaler

OPTIMIZERS = {
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "EMA": lambda: keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipvalue=0.01),
    "Muon": lambda: keras.optimizers.Muon(0.01, exclude_layers=["last"]),
    "Lion": lambda: keras.optimizers.Lion(0.01, weight_decay=0.1),
}


class Trained:
    """Two dense layers in float32 and an optimizer, with a scaler or without one."""

    def __init__(self, name, mode, loss_scale=None, kind="float32"):
        keras.utils.set_random_seed(7)
        dense = functools.partial(keras.layers.Dense, dtype=kind)
        first, last = dense(6, activation="tanh", name="first"), dense(1, name="last")
        self.model = keras.Sequential([keras.Input([4], dtype=kind), first, last])
        self.optimizer, self.loss_scaler = OPTIMIZERS[name](), scaler.LossScaler(scaler.Static(loss_scale or 1.0))
        self.masters = scaler.MasterWeights(self.model.trainable_variables)
        self.optimizer.build(self.masters.weights)
        self.run = run_in(mode, self._scaled if loss_scale else self._plain)

    def _loss(self, x, y, factor):
        return tf.reduce_mean(tf.square(spoil_gradient(tf.cast(self.model(x), tf.float32), factor) - y))

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


def skips_leave_every_bit_and_the_rest_equals_an_unscaled_run(name, mode, steps, spoiled_at_once):
    # The run that it is compared with needs no trace.
    scaled, plain, factors = Trained(name, mode, 2.0**10), Trained(name, "eager"), (np.inf, np.nan, 1e25)
    for number in range(steps):
        assert scaled.run(batches(number))[0]["applied"]
        before = raw(scaled.variables())
        spoiled = [batch(50 + number, factor=factors[(number + n) % 3]) for n in range(spoiled_at_once)]
        assert not any(output["applied"] for output in scaled.run(spoiled))
        assert raw(scaled.variables()) == before
    plain.run(batches(*range(steps)))
    assert int(scaled.optimizer.iterations) == int(plain.optimizer.iterations)
    assert_finite(scaled.variables())
    # Compilers contract a * b + c differently with and without the gate around it.
    tolerance = 0 if mode == "eager" else 2e-5
    for our, their in zip(scaled.variables(), plain.variables(), strict=True):
        if our.dtype in ("float32", tf.float32):
            np.testing.assert_allclose(our.numpy(), their.numpy(), rtol=tolerance, atol=tolerance, err_msg=our.name)


@pytest.mark.parametrize("name", parameters(OPTIMIZERS))
def test_every_bit_is_that_of_an_unscaled_run(name):
    """In eager mode, where the two are equal to the last bit."""
    skips_leave_every_bit_and_the_rest_equals_an_unscaled_run(name, "eager", 4, 1)


# As a graph all of them are below, but for EMA.
@pytest.mark.exhaustive_with("graph-EMA", "loop-accumulation", "xla-accumulation")
@pytest.mark.parametrize(
    ("mode", "name"),
    [("graph", "EMA"), ("graph", "AdamW"), ("loop", "accumulation"), ("xla", "accumulation")],
)
def test_skips_leave_every_bit_and_the_rest_equals_that_run_in_graphs(name, mode):
    skips_leave_every_bit_and_the_rest_equals_an_unscaled_run(name, mode, 7, 3)


@pytest.mark.slow_with("AdamW", "Lion")
@pytest.mark.exhaustive_with("Muon", "accumulation", "clipnorm", "clipvalue")
@pytest.mark.parametrize("name", parameters(name for name in OPTIMIZERS if name != "EMA"))
def test_masters_under_the_same_optimizers(name):
    trained = Trained(name, "graph", 2.0**8, kind="float16")
    for number in range(4):
        assert trained.run(batches(number))[0]["applied"]
        before = raw(trained.variables())
        assert not trained.run([batch(number, factor=np.inf)])[0]["applied"]
        assert raw(trained.variables()) == before
    assert_finite(trained.variables())
    for variable, master in zip(trained.model.trainable_variables, trained.masters.weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), master.numpy().astype(np.float16))


@pytest.mark.slow
@needs_keras("Muon")
def test_muon_still_tells_masters_apart_by_their_paths():
    trained = Trained("Muon", "graph", 2.0**8, kind="float16")
    trained.run(batches(1))
    paths = {weight.path for weight in trained.masters.weights}
    assert any("first/kernel" in path for path in paths)
    # Adam's second moments exist for what Muon leaves to Adam, and only for that.
    seconds = [v.path for v in trained.optimizer.variables if "velocity" in v.path]
    assert len(seconds) == 3, seconds
