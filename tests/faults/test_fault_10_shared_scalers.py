"""Fault 10: two losses and two optimizers on one scaler, one of them overflowing; a GAN step with two scalers.

Guards lines 1, 3 and 4 of the promise: each optimizer skips by its own gradients, and gradients are unscaled by the
scale that scaled their loss, also after the other loss made it back off.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from fault_cases import run_in
from rigs import assert_finite, raw

import scaler


@functools.cache
def compiled_pair(*arguments):
    """A pair, and the values of its variables at the start."""
    pair = Pair(*arguments)
    return pair, [variable.numpy() for variable in pair.variables()]


def started(*arguments):
    """A pair as it was when it was made; steps are compiled once."""
    pair, values = compiled_pair(*arguments)
    for variable, value in zip(pair.variables(), values, strict=True):
        variable.assign(value)
    return pair


class Pair:
    """Two weights, each with a loss whose true gradient is given, an optimizer, and one scaler for both."""

    def __init__(self, mode, shared_update=False):
        self.weights = [tf.Variable([1.0, -1.0], name=name) for name in ("a", "b")]
        self.optimizers = [keras.optimizers.SGD(0.5, momentum=0.5) for _ in range(2)]
        for optimizer, weight in zip(self.optimizers, self.weights, strict=True):
            optimizer.build([weight])
        self.loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**15, growth_interval=2))
        self._shared = shared_update
        self.run = run_in(mode, self._step)

    def _step(self, *true):
        with tf.GradientTape(persistent=True) as tape:
            scaled = [self.loss_scaler.scale(tf.reduce_sum(w * g)) for w, g in zip(self.weights, true, strict=True)]
        outcomes = []
        for loss, weight, optimizer in zip(scaled, self.weights, self.optimizers, strict=True):
            grads = tape.gradient(loss, [weight])
            outcomes.append(self.loss_scaler.apply(optimizer, grads, [weight], update=not self._shared))
        if self._shared:
            self.loss_scaler.update(scaler.Event(tf.logical_and(*(outcome.finite for outcome in outcomes))))
        names = ("a", "b")
        return {
            **{name: outcome.finite for name, outcome in zip(names, outcomes, strict=True)},
            **{f"{name}_scale": outcome.loss_scale for name, outcome in zip(names, outcomes, strict=True)},
            **{f"{name}_cause": outcome.cause for name, outcome in zip(names, outcomes, strict=True)},
        }

    def variables(self):
        optimizers = [variable for optimizer in self.optimizers for variable in optimizer.variables]
        return [*self.weights, *optimizers, *self.loss_scaler.variables]

    def bits(self, which):
        return raw([self.weights[which], *self.optimizers[which].variables])

    def scale(self):
        return float(self.loss_scaler.loss_scale)


def true(a, b):
    return [(np.float32(a), np.float32(b))]


@pytest.mark.slow_with("xla")
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_the_other_unscales_by_the_scale_of_its_loss(mode):
    for bad in range(2):
        pair = started(mode)
        before = pair.bits(bad)
        gradients = [0.5, 0.5]
        gradients[bad] = np.inf
        (output,) = pair.run(true(*gradients))
        assert [output["a"], output["b"]] == [bad != 0, bad != 1]
        # One multiplied both, whatever the first apply did to the scale.
        assert output["a_scale"] == output["b_scale"] == 2.0**15
        assert pair.bits(bad) == before
        np.testing.assert_array_equal(pair.weights[1 - bad].numpy(), [0.75, -1.25])
        assert [int(count) for count in pair.loss_scaler.counters][:3] == [2, 1, 1]
        assert_finite(pair.variables())


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_growth_by_the_first_does_not_reach_the_second(mode):
    pair = started(mode)
    for number in range(3):
        (output,) = pair.run(true(0.5, 0.5))
        # Two applied steps to a growth, and every call is two steps.
        assert output["a_scale"] == output["b_scale"] == 2.0 ** (15 + number)
    for weight in pair.weights:
        np.testing.assert_array_equal(weight.numpy(), pair.weights[0].numpy())


def test_one_update_for_both_moves_the_scale_once():
    for bad in range(2):
        pair = started("eager", True)
        before, other = pair.bits(bad), pair.bits(1 - bad)
        gradients = [0.5, 0.5]
        gradients[bad] = np.nan
        (output,) = pair.run(true(*gradients))
        assert [output["a"], output["b"]] == [bad != 0, bad != 1]
        assert pair.bits(bad) == before
        assert pair.bits(1 - bad) != other
        # Bad data of one of the losses.
        assert pair.scale() == 2.0**15
        assert [int(count) for count in pair.loss_scaler.counters] == [1, 0, 1, 1]
        # Finite losses, whose gradients overflow.
        for scale in (14, 13):
            (output,) = pair.run(true(2.0**126, -(2.0**126)))
            assert not output["a"]
            assert not output["b"]
            assert pair.scale() == 2.0**scale
        pair.run(true(0.5, 0.5) * 2)
        assert pair.scale() == 2.0**14
        assert [int(count) for count in pair.loss_scaler.counters] == [5, 2, 3, 0]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_cause_is_found_for_the_second_apply_too(mode):
    # A weight of 1 times infinity: the losses are not finite, whichever apply comes first.
    pair = started(mode, True)
    for gradients in ((0.5, np.inf), (np.inf, 0.5), (np.inf, np.inf)):
        (output,) = pair.run(true(*gradients))
        for name, gradient in zip("ab", gradients, strict=True):
            assert output[f"{name}_cause"] == (scaler.Cause.NONE if np.isfinite(gradient) else scaler.Cause.LOSS)
    # Nothing of it is left for the next step, where only the product with the scale is too large.
    (output,) = pair.run(true(0.5, 1e36))
    assert [output["a_cause"], output["b_cause"]] == [scaler.Cause.NONE, scaler.Cause.OVERFLOW]


class Gan:
    """A generator and a discriminator in float16, each with its scaler, in one step."""

    def __init__(self, mode):
        keras.utils.set_random_seed(3)
        self.models = [self._model(4), self._model(1)]
        self.masters = [scaler.MasterWeights(model.trainable_variables) for model in self.models]
        self.optimizers = [keras.optimizers.SGD(0.05, momentum=0.5) for _ in range(2)]
        self.scalers = [scaler.LossScaler(scaler.Dynamic(2.0**8), name=name) for name in ("generator", "discriminator")]
        for optimizer, masters in zip(self.optimizers, self.masters, strict=True):
            optimizer.build(masters.weights)
        self.run = run_in(mode, self._step)

    @staticmethod
    def _model(outputs):
        hidden = keras.layers.Dense(6, activation="relu", dtype="float16")
        norm = keras.layers.BatchNormalization(dtype="float16")
        return keras.Sequential([keras.Input([4], dtype="float16"), hidden, norm, keras.layers.Dense(outputs)])

    def _step(self, noise, real, spoil_generator, spoil_discriminator):
        before = [scaler.snapshot(model.non_trainable_variables) for model in self.models]
        generator, discriminator = self.models
        with tf.GradientTape(persistent=True) as tape:
            fake = generator(noise, training=True)
            judged, seen = discriminator(fake, training=True), discriminator(real, training=True)
            losses = [tf.nn.softplus(-judged), tf.nn.softplus(judged) + tf.nn.softplus(-seen)]
            factors = (spoil_generator, spoil_discriminator)
            losses = [tf.reduce_mean(tf.cast(x, tf.float32)) * f for x, f in zip(losses, factors, strict=True)]
            scaled = [own.scale(loss) for own, loss in zip(self.scalers, losses, strict=True)]
        outputs = {}
        grads = [tape.gradient(x, model.trainable_variables) for x, model in zip(scaled, self.models, strict=True)]
        for name, own, optimizer, grad, masters, rollback in zip(
            "gd", self.scalers, self.optimizers, grads, self.masters, before, strict=True
        ):
            outputs[name] = own.apply(optimizer, grad, masters, rollback=rollback).finite
        return outputs

    def bits(self, which):
        masters, optimizer = self.masters[which].weights, self.optimizers[which].variables
        return raw([*self.models[which].variables, *masters, *optimizer])


def test_a_gan_whose_one_half_overflows_trains_the_other():
    gan, random = Gan("eager"), np.random.default_rng(0)

    def data(generator=1.0, discriminator=1.0):
        draws = random.normal(size=(2, 8, 4)).astype(np.float32)
        return [(draws[0], draws[1] + 2, np.float32(generator), np.float32(discriminator))]

    assert gan.run(data())[0] == {"g": True, "d": True}
    # Bad data of one, an overflow of the other.
    for which, factors, by in ((0, (np.nan, 1.0), 1), (1, (1.0, 2.0**126), 2)):
        before, other, scales = gan.bits(which), gan.bits(1 - which), [float(own.loss_scale) for own in gan.scalers]
        (output,) = gan.run(data(*factors))
        assert [output["g"], output["d"]] == [which != 0, which != 1]
        assert gan.bits(which) == before
        assert gan.bits(1 - which) != other
        scales[which] /= by
        assert [float(own.loss_scale) for own in gan.scalers] == scales
    assert gan.run(data())[0] == {"g": True, "d": True}
    for which in range(2):
        assert_finite([*gan.models[which].variables, *gan.masters[which].weights, *gan.optimizers[which].variables])
