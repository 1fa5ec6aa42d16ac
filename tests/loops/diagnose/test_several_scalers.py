"""Guards which loss scaler of a step an explanation is about, and steps of one's own that take gradients again."""

import keras
import numpy as np
import planted
import pytest
import tensorflow as tf

import loops
import scaler
from loops.diagnose.graph.calls import recording_scaler_calls
from loops.observe import explain

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


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:a train step returned an 'applied'")
def test_a_step_that_its_program_alone_did_not_apply_is_said_to_be_that(tmp_path):
    def make():
        step = two_optimizers(says_cause=True)

        def guarded(first, second):
            return {**step(first, second), "applied": second[0] < 2.0}

        return guarded

    found = explained(tmp_path, make, second=4.0)
    assert (found.verdict, found.applied, found.attempted, found.finite_again) == ("healthy", False, True, False)


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


@pytest.mark.exhaustive
def test_the_forward_pass_of_a_later_part_is_not_called_its_backward_pass(tmp_path):
    """It lies behind the gradients of the first."""

    def square(prediction):
        return tf.reduce_mean(tf.cast(prediction, tf.float32) ** 2)

    def program(run):
        keras.utils.set_random_seed(1)
        root = keras.layers.Lambda(lambda x: tf.sqrt(x - 100.0), name="root")
        models = [planted.dense(planted.plain(1, "one")), planted.dense(planted.plain(1, "two"), root)]
        parts = [
            loops.Part(name, model, lambda x, model=model: square(model(x)), keras.optimizers.SGD(0.01))
            for name, model in zip("ab", models, strict=True)
        ]
        data = tf.data.Dataset.from_tensors(tf.ones([4, 8])).repeat()
        actions = [loops.JsonLines(run / "steps.jsonl"), loops.Checkpoint(run / "checkpoints", every=1, resume=True)]
        return loops.Loop(loops.ComposedStep(parts), data, actions=actions, steps_per_call=1)

    program(tmp_path).run(2)
    found = explain(program(tmp_path), 2)
    assert (found.where, found.layer.rpartition("/")[2], found.kind) == ("forward", "root", "nan")
