"""Guards which loss scaler of a step an explanation is about, and steps of one's own that take gradients again."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from loops.diagnose.graph.calls import recording_scaler_calls

STEPS = 6
SPIKE = 4
"""The step whose batch makes the second loss overflow, at scales above 64."""


def half(weight, factor):
    return tf.reduce_sum(tf.cast(tf.cast(weight, tf.float16) * tf.cast(factor, tf.float16), tf.float32))


def per_loss():
    weight = keras.Variable([1.0], name="weight")
    losses = scaler.PerLoss({"task": scaler.Dynamic(2.0**5), "penalty": scaler.Dynamic(2.0**10)})
    optimizer = keras.optimizers.SGD(2.0**-12)

    def step(first, second):
        with tf.GradientTape(persistent=True) as tape:
            own = half(weight.value, first), half(weight.value, second)
            scaled = losses.scale(dict(zip(losses.names, own, strict=True)))
        grads = {name: tape.gradient(loss, [weight.value]) for name, loss in scaled.items()}
        outcome = losses.apply(optimizer, grads, [weight])
        return {"loss": sum(own), "applied": outcome.finite, "loss_scale": outcome.loss_scale}

    return step


STATIC = scaler.Static(2.0**4), scaler.Static(2.0**10)


def two_optimizers(strategies=STATIC, says_cause=False):
    weights = [keras.Variable([1.0], name=name) for name in "ab"]
    scalers = [scaler.LossScaler(strategy) for strategy in strategies]
    optimizers = [keras.optimizers.SGD(2.0**-12) for _ in weights]

    def step(first, second):
        outcomes = []
        for own, weight, optimizer, factor in zip(scalers, weights, optimizers, (first, second), strict=True):
            with tf.GradientTape() as tape:
                scaled = own.scale(half(weight.value, factor))
            outcomes.append(own.apply(optimizer, tape.gradient(scaled, [weight.value]), [weight]))
        cause = {"cause": outcomes[0].cause} if says_cause else {}
        return {"loss": tf.constant(1.0), "applied": tf.reduce_all([one.finite for one in outcomes]), **cause}

    return step


def explained(place, make, first=1.0, second=512.0):
    """What is said of the step whose batch multiplies the losses by these numbers."""

    def loop():
        factors = np.ones([2, STEPS, 1], np.float32)
        factors[:, SPIKE - 1, 0] = first, second
        data = tf.data.Dataset.from_tensor_slices(tuple(factors)).repeat()
        saved = loops.Checkpoint(place / "checkpoints", every=STEPS, resume=True)
        return loops.Loop(make(), data, actions=[loops.JsonLines(place / "steps.jsonl"), saved])

    loop().run(STEPS)
    return loops.observe.explain(loop(), step=SPIKE)


@pytest.mark.exhaustive_with("two_optimizers")
@pytest.mark.slow
@pytest.mark.parametrize("make", [per_loss, two_optimizers])
def test_it_is_about_the_scaler_whose_gradients_overflowed(tmp_path, make, tried):
    tried()
    found = explained(tmp_path, make)
    assert (found.loss_scale, found.fits_at) == (1024.0, 64.0)
    if make is two_optimizers:
        assert "use hs.Static(64), or hs.Dynamic(), in the loss scaler that is at 1024" in found.sentence


@pytest.mark.exhaustive
def test_the_floor_and_the_cause_of_another_scaler_are_not_those_of_the_step(tmp_path):
    """The first scaler cannot go below its scale; it was applied, and the step logs its cause."""
    strategies = scaler.Static(2.0**10), scaler.Dynamic(2.0**10)
    found = explained(tmp_path, lambda: two_optimizers(strategies, says_cause=True))
    assert (found.verdict, found.loss_scale, found.fits_at) == ("overflow", 1024.0, 64.0)


@pytest.mark.exhaustive
def test_several_scalers_that_overflowed_each_have_a_scale_that_fits(tmp_path):
    strategies = scaler.Dynamic(2.0**15), scaler.Dynamic(2.0**10)
    found = explained(tmp_path, lambda: two_optimizers(strategies), first=8.0, second=4096.0)
    assert (found.verdict, found.loss_scale, found.fits_at) == ("overflow", 2.0**15, 2.0**12)
    assert found.other_scales == ((2.0**10, 8.0),)
    assert "loss scales: 32768 lowered to 4096, 1024 lowered to 8" in [one.name for one in found.remedies if one.helps]


@pytest.mark.parametrize("moves", [True, False])
def test_gradients_that_a_step_takes_again_are_seen(moves):
    weight, own = tf.Variable([1.0]), scaler.LossScaler(scaler.Dynamic(2.0**10))
    optimizer = keras.optimizers.SGD(2.0**-12)
    optimizer.build([weight])
    with recording_scaler_calls([own], moves=moves) as calls:

        @tf.function
        def step(factor):
            with tf.GradientTape(persistent=True) as tape:
                scaled = own.scale(half(weight, factor))
            return own.apply(
                optimizer, None, [weight], again=lambda small: tape.gradient(scaled, [weight], output_gradients=small)
            )

        outcome = step(tf.constant([512.0]))
    assert (len(calls.gradients), calls.owners) == (1, [own])
    assert not bool(outcome.finite)
    assert all(tf.is_tensor(value) for value in outcome)
