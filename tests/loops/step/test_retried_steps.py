"""Guards `TrainStep(retry=True)`: the run of a scale that never overflows, to the bit, from any scale."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored
from models import batch, normalized, squared_error
from rigs import Rig, raw

import loops
import scaler

# Below about 2^13 processors that add in float16 flush other gradients at each scale.
SOUND, HIGH = 2.0**14, 2.0**40
BATCHES = [batch(seed) for seed in range(6)]


def run_from(scale, rig):
    """The outputs of each batch, and what the run came to."""
    rig.reset()
    rig.step.loss_scaler._state["loss_scale"].assign(scale)
    seen = rig.run([tuple(map(tf.constant, one)) for one in BATCHES])
    return seen, [raw(rig.moved()), [one["loss"].tobytes() for one in seen]]


@pytest.mark.parametrize("accumulate", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_from_too_high_a_scale_is_the_run_from_a_sound_one(accumulate):
    loss_scaler = scaler.LossScaler(scaler.Dynamic(SOUND))
    model = normalized("mixed_float16")
    optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
    here = Rig(model, optimizer, loss_scaler=loss_scaler, retry=True, accumulate=accumulate)
    _, sound = run_from(SOUND, here)
    seen, end = run_from(HIGH, here)
    assert [bool(one["applied"]) for one in seen] == [bool(one["attempted"]) for one in seen]
    assert int(seen[0]["retries"]) > 10
    assert float(seen[0]["loss_scale"]) < 2.0**30
    assert end == sound
    assert here.call.experimental_get_tracing_count() == 1


@pytest.fixture(scope="module")
def on_replicas():
    """A step of two replicas, and its function of a batch and of the replica whose gradients are far larger."""
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1, use_bias=False, dtype="mixed_float16")])
        step = loops.TrainStep(
            model,
            squared_error,
            keras.optimizers.SGD(1e-2),
            loss_scaler=scaler.LossScaler(scaler.Dynamic(SOUND)),
            retry=True,
        )

    @tf.function
    def call(x, y, steep):
        def own():
            here = tf.distribute.get_replica_context().replica_id_in_sync_group
            return step((x, y * tf.where(tf.equal(here, steep), 1000.0, 1.0)))

        outputs = strategy.run(own)
        return {name: tf.stack(strategy.experimental_local_results(value)) for name, value in outputs.items()}

    return step, call


@pytest.mark.dear("traces a step with retries on two replicas")
@pytest.mark.parametrize("replica", [0, 1])
def test_replicas_retry_together_whoever_overflowed(on_replicas, replica):
    step, call = on_replicas
    model, ends = step.model, []
    start = [variable.numpy() for variable in model.variables]
    for scale in (SOUND, 2.0**20):
        for variable, value in zip(model.variables, start, strict=True):
            variable.assign(value)
        step.loss_scaler._state["loss_scale"].assign(scale)
        seen = [call(*map(tf.constant, one), tf.constant(replica)) for one in BATCHES[:4]]
        for one in seen:
            for name in ("retries", "loss_scale", "applied", "attempted"):
                assert len(set(one[name].numpy().tolist())) == 1, name
            assert bool(one["applied"][0]) == bool(one["attempted"][0])
        ends.append(raw(model.variables))
    assert int(seen[0]["retries"][0]) > 0
    assert ends[0] == ends[1] != raw(start)


@pytest.fixture(scope="module")
def two_lines():
    """Two weights with a float16 line each, the first of which counts on the first replica and the other on the second.

    The function takes the slope of the first line, what multiplies its loss, and what is added to that. The other's
    slope is 2^-14.
    """
    strategy = mirrored(2)
    with strategy.scope():
        weights = [tf.Variable([0.0]), tf.Variable([0.0])]
        loss_scaler, optimizer = scaler.LossScaler(scaler.Dynamic(2.0**20)), keras.optimizers.SGD(2.0**-30)
        optimizer.build(weights)

    @tf.function
    def step(slope, factor, more):
        def own():
            first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
            with tf.GradientTape(persistent=True) as tape:
                large, small = (
                    tf.reduce_sum(tf.cast(tf.cast(weight, tf.float16) * tf.cast(one, tf.float16), tf.float32))
                    for weight, one in zip(weights, (slope, 2.0**-14), strict=True)
                )
                scaled = loss_scaler.scale(tf.where(first, large * factor + more, small))
            return loss_scaler.apply(
                optimizer, None, weights, again=lambda small: tape.gradient(scaled, weights, output_gradients=small)
            )

        outcome = strategy.run(own)
        each = [strategy.experimental_local_results(one) for one in (outcome.finite, outcome.retries, outcome.cause)]
        return tf.nest.map_structure(tf.identity, each)

    def take(*given):
        return [{one.numpy().item() for one in each} for each in step(*map(tf.constant, given))]

    return loss_scaler, weights, take


def put_back(loss_scaler, weights):
    loss_scaler._state["loss_scale"].assign(2.0**20)
    for weight in weights:
        weight.assign([0.0])


def of_second(weights):
    return [weight.values[1].numpy().tolist() for weight in weights]


@pytest.mark.dear("traces a step with retries on two replicas")
def test_a_batch_that_one_replica_cannot_use_is_skipped_though_another_could_retry(two_lines):
    """The first has an infinite loss with finite gradients, and the second overflows."""
    loss_scaler, weights, take = two_lines
    put_back(loss_scaler, weights)
    assert take(1.0, 2.0**-10, np.inf) == [{False}, {0}, {scaler.Cause.LOSS}]
    assert float(loss_scaler.loss_scale) == 2.0**20
    assert of_second(weights) == [[0.0], [0.0]]


def test_a_batch_is_skipped_if_the_scale_of_another_replica_flushes_what_overflowed_here(two_lines):
    """The second replica comes back at 2^15, and the first one needs 2^-13, where the second's gradient is zero."""
    loss_scaler, weights, take = two_lines
    put_back(loss_scaler, weights)
    assert take(2.0**14, 2.0**14, 0.0)[0] == {False}
    assert float(loss_scaler.loss_scale) == 2.0**19
    assert of_second(weights) == [[0.0], [0.0]]
    assert take(1.0, 2.0**14, 0.0)[0] == {True}
    assert float(loss_scaler.loss_scale) == 2.0
    assert of_second(weights) == [[-(2.0**-16)], [-(2.0**-44)]]
