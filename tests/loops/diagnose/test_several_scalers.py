"""Guards which loss scaler of a step an explanation is about, and steps of one's own that take gradients again."""

import contextlib
import json
import types

import keras
import numpy as np
import planted
import pytest
import tensorflow as tf

import loops
import scaler
from loops.diagnose.explain.measured import at_share_to_blame, in_whole_batch
from loops.diagnose.graph.calls import recording_scaler_calls
from loops.diagnose.graph.changes import slower
from loops.observe import explain
from loops.run.rewind import rewind

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
        actions = [loops.JsonLines(place / "steps.jsonl"), saved]
        return loops.Loop(make(), data, actions=actions, jit_compile=False)

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


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An example of replica 1's share overflows a layer in step 3."""
    made = tmp_path_factory.mktemp("replicas")
    planted.on_replicas(made).run(planted.STEPS["on_replicas"])
    return made


@pytest.mark.exhaustive
def test_the_share_is_found(run):
    """The scale is too high for the other share as well, which is not why."""
    found = explain(planted.on_replicas(run))
    assert (found.step, found.reproduced, found.verdict, found.replicas) == (3, True, "loss", (1,))
    assert (found.where, found.layer, found.kind) == ("forward", "first", "inf")
    assert not found.tensor.startswith("replica_1/")
    assert "every layer in float32" in {one.name for one in found.remedies if one.finite}
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["replicas"] == [1]


@pytest.mark.exhaustive
def test_the_replayed_steps_can_be_changed(run):
    """The learning rate is a variable of each replica."""
    moment = rewind(planted.on_replicas(run), 3, at_least=10)
    assert (moment.differs, moment.began_at, moment.replicas) == (None, 0, 2)
    changes = contextlib.ExitStack()

    def change(loop):
        changes.enter_context(slower(loop.train_step.optimizer, 0.1))
        return changes.close

    slow = moment.from_checkpoint(change)
    assert [bool(one["applied"]) for one in slow] == [False, True, False]
    assert float(moment.train_step.optimizer.learning_rate.value.numpy()) == pytest.approx(0.01)


@pytest.mark.parametrize(("bad", "share"), [((1,), 1), ((1, 2), 1), ((0, 1, 2), 0), ((), None)])
def test_the_first_share_that_fails_takes_the_place_of_all(bad, share):
    """Where none does by itself, the batch stays whole."""
    moment = types.SimpleNamespace(replicas=3, batch=tf.constant([0, 0, 1, 1, 2, 2]), next_batch=None)
    whole = types.SimpleNamespace(finite=False, cause="cause")

    def as_run(batch):
        return types.SimpleNamespace(finite=int(batch[0]) not in bad, cause="cause")

    found, attempt = at_share_to_blame(types.SimpleNamespace(moment=moment, as_run=as_run), whole)
    assert found == bad
    assert (attempt is whole) == (share is None)
    np.testing.assert_array_equal(moment.batch, [0, 0, 1, 1, 2, 2] if share is None else [share] * 6)
    assert in_whole_batch(1, found, moment) == 1 + 2 * (share or 0)
