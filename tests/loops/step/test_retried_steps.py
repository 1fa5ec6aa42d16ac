"""Guards `TrainStep(retry=True)`: the run of a scale that never overflows, to the bit, from any scale."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored
from models import batch, squared_error, stateful_model
from rigs import Rig, raw

import loops
import scaler

# Below about 2^13 processors that add in float16 flush other gradients at each scale.
SOUND, HIGH = 2.0**14, 2.0**40
BATCHES = [batch(seed) for seed in range(6)]


def rig(scale, retry=True, **arguments):
    keras.utils.set_random_seed(1)
    loss_scaler = scaler.LossScaler(scaler.Dynamic(scale))
    model = stateful_model("mixed_float16")
    return Rig(model, keras.optimizers.Adam(1e-2), loss_scaler=loss_scaler, retry=retry, **arguments)


def run(rig, call, batches=BATCHES):
    outputs = [call(tuple(map(tf.constant, one))) for one in batches]
    return [{name: np.asarray(value) for name, value in one.items()} for one in outputs]


@pytest.mark.exhaustive_with("1-eager", "3-graph", "3-xla", "1-xla")
@pytest.mark.slow_with("1-eager")
@pytest.mark.parametrize("mode", ["eager", "graph", pytest.param("xla", marks=pytest.mark.slow)])
@pytest.mark.parametrize("accumulate", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_from_too_high_a_scale_is_the_run_from_a_sound_one(mode, accumulate):
    ends = []
    for scale in (SOUND, HIGH):
        here = rig(scale, accumulate=accumulate)
        call = {"eager": here.step, "graph": here.call, "xla": tf.function(here.step, jit_compile=True)}[mode]
        seen = run(here, call)
        model, optimizer = here.step.model, here.step.optimizer
        ends.append((raw(model.variables, optimizer.variables), [one["loss"].tobytes() for one in seen]))
        assert [bool(one["applied"]) for one in seen] == [bool(one["attempted"]) for one in seen]
    assert int(seen[0]["retries"]) > 10
    assert float(seen[0]["loss_scale"]) < 2.0**30
    assert ends[0] == ends[1]


def test_without_retry_the_same_run_loses_its_batches():
    seen = run(here := rig(HIGH, retry=False), here.call)
    assert not any(bool(one["applied"]) for one in seen)
    assert "retries" not in seen[0]


@pytest.mark.exhaustive_with("2-0", "2-1", "1-1")
@pytest.mark.slow_with("1-1", "2-0", "2-1")
@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_replicas_retry_together_whoever_overflowed(replica, accumulate):
    strategy, ends = mirrored(2), []
    for scale in (SOUND, 2.0**20):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = stateful_model("mixed_float16")
            loss_scaler, optimizer = scaler.LossScaler(scaler.Dynamic(scale)), keras.optimizers.Adam(1e-2)
            step = loops.TrainStep(
                model, squared_error, optimizer, loss_scaler=loss_scaler, retry=True, accumulate=accumulate
            )

        @tf.function
        def call(x, y, step=step):
            def own():
                # One replica's examples have gradients a thousand times those of the other.
                here = tf.distribute.get_replica_context().replica_id_in_sync_group
                return step((x, y * tf.where(tf.equal(here, replica), 1000.0, 1.0)))

            return strategy.run(own)

        seen = []
        for x, y in BATCHES:
            outputs = call(tf.constant(x), tf.constant(y))
            both = [strategy.experimental_local_results(outputs[name]) for name in ("retries", "loss_scale", "applied")]
            assert all(len(set(map(float, one))) == 1 for one in both)
            seen.append(int(both[0][0]))
            assert bool(both[2][0]) == bool(strategy.experimental_local_results(outputs["attempted"])[0])
        ends.append(raw(model.variables, optimizer.variables))
    assert seen[0] > 0
    assert ends[0] == ends[1]


def test_a_batch_that_one_replica_cannot_use_is_skipped_though_another_could_retry():
    """The first has an infinite loss with finite gradients, and the second overflows."""
    strategy = mirrored(2)
    with strategy.scope():
        weight = tf.Variable([0.0])
        loss_scaler, optimizer = scaler.LossScaler(scaler.Dynamic(2.0**20)), keras.optimizers.SGD(1.0)
        optimizer.build([weight])

    @tf.function
    def step():
        def own():
            first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
            with tf.GradientTape(persistent=True) as tape:
                narrow = tf.reduce_sum(tf.cast(tf.cast(weight, tf.float16) * 8.0, tf.float32))
                loss = tf.where(first, tf.reduce_sum(weight) + np.float32(np.inf), narrow)
                scaled = loss_scaler.scale(loss)
            return loss_scaler.apply(
                optimizer, None, [weight], again=lambda small: tape.gradient(scaled, [weight], output_gradients=small)
            )

        return strategy.run(own)

    outcome = step()
    assert not any(map(bool, strategy.experimental_local_results(outcome.finite)))
    assert not any(map(int, strategy.experimental_local_results(outcome.retries)))
    assert set(map(int, strategy.experimental_local_results(outcome.cause))) == {scaler.Cause.LOSS}
    assert float(loss_scaler.loss_scale) == 2.0**20
    assert [part.numpy().tolist() for part in weight.values] == [[0.0], [0.0]]


def test_a_batch_is_skipped_if_the_scale_of_another_replica_flushes_what_overflowed_here():
    """The second replica comes back at 2^15, and the first one needs 2^-13, where the second's gradient is zero."""
    strategy = mirrored(2)
    with strategy.scope():
        weights = [tf.Variable([0.0]), tf.Variable([0.0])]
        loss_scaler, optimizer = scaler.LossScaler(scaler.Dynamic(2.0**20)), keras.optimizers.SGD(2.0**-30)
        optimizer.build(weights)

    @tf.function
    def step(slope):
        def own():
            first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
            with tf.GradientTape(persistent=True) as tape:
                large, small = (
                    tf.reduce_sum(tf.cast(tf.cast(weight, tf.float16) * tf.cast(one, tf.float16), tf.float32))
                    for weight, one in zip(weights, (slope, 2.0**-14), strict=True)
                )
                scaled = loss_scaler.scale(tf.where(first, large * 2.0**14, small))
            return loss_scaler.apply(
                optimizer, None, weights, again=lambda small: tape.gradient(scaled, weights, output_gradients=small)
            )

        return strategy.experimental_local_results(strategy.run(own).finite)

    assert not any(map(bool, step(tf.constant(2.0**14))))
    assert float(loss_scaler.loss_scale) == 2.0**19
    assert [weight.values[1].numpy().tolist() for weight in weights] == [[0.0], [0.0]]
    assert all(map(bool, step(tf.constant(1.0))))
    assert float(loss_scaler.loss_scale) == 2.0
    assert [weight.values[1].numpy().tolist() for weight in weights] == [[-(2.0**-16)], [-(2.0**-44)]]


def test_a_retried_step_is_traced_once():
    here = rig(HIGH)
    run(here, here.call)
    assert here.call.experimental_get_tracing_count() == 1


def refused(**arguments):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    return loops.TrainStep(model, squared_error, keras.optimizers.SGD(), **arguments)


def test_a_retry_that_cannot_work_is_refused():
    with pytest.raises(scaler.InvalidArgument, match=r"retry='yes'.*True or False"):
        refused(retry="yes")
    probed = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    with pytest.raises(scaler.InvalidArgument, match="measure the first backward pass"):
        loops.TrainStep(probed, squared_error, keras.optimizers.SGD(), probes=scaler.observe.watch(probed), retry=True)
    with pytest.raises(scaler.InvalidArgument, match="Compile the whole step"):
        refused(retry=True, jit_compile=True)
    with pytest.raises(scaler.InvalidArgument, match="Compile the whole step"):
        refused(retry=True).jit_compile = True


def test_a_step_that_calls_python_is_refused():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])

    def loss(y, prediction):
        return tf.py_function(lambda a, b: tf.reduce_mean(tf.square(a - b)), [y, prediction], tf.float32)

    step = loops.TrainStep(model, loss, keras.optimizers.SGD(), loss_scaler=scaler.LossScaler(), retry=True)
    with pytest.raises(scaler.InvalidArgument, match="can be taken only once"):
        tf.function(step)((tf.zeros([2, 3]), tf.zeros([2, 1])))
