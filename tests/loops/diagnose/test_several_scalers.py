"""Guards which loss scaler of a step an explanation is about, and steps of one's own that take gradients again."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from loops.diagnose.graph.scaler_calls import recording_scaler_calls

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


def two_optimizers():
    weights = [keras.Variable([1.0], name=name) for name in "ab"]
    scalers = [scaler.LossScaler(scaler.Static(scale)) for scale in (2.0**4, 2.0**10)]
    optimizers = [keras.optimizers.SGD(2.0**-12) for _ in weights]

    def step(first, second):
        finite = []
        for own, weight, optimizer, factor in zip(scalers, weights, optimizers, (first, second), strict=True):
            with tf.GradientTape() as tape:
                scaled = own.scale(half(weight.value, factor))
            finite.append(own.apply(optimizer, tape.gradient(scaled, [weight.value]), [weight]).finite)
        return {"loss": tf.constant(1.0), "applied": tf.reduce_all(finite)}

    return step


@pytest.mark.slow
@pytest.mark.parametrize("make", [per_loss, two_optimizers])
def test_it_is_about_the_scaler_whose_gradients_overflowed(tmp_path, make):
    def loop():
        ones = np.ones([STEPS, 1], np.float32)
        spiked = ones.copy()
        spiked[SPIKE - 1] = 512.0
        data = tf.data.Dataset.from_tensor_slices((ones, spiked)).repeat()
        saved = loops.Checkpoint(tmp_path / "checkpoints", every=STEPS, resume=True)
        return loops.Loop(make(), data, actions=[loops.JsonLines(tmp_path / "steps.jsonl"), saved])

    loop().run(STEPS)
    found = loops.observe.explain(loop(), step=SPIKE)
    assert (found.loss_scale, found.fits_at) == (1024.0, 64.0)
    if make is two_optimizers:
        assert "use scaler.Static(64), or scaler.Dynamic(), in the loss scaler that is at 1024" in found.sentence


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
