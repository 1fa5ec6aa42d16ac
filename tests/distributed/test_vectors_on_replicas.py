"""Guards how replicas join what is no scalar: counts are summed, `amax` is the largest, other floats are averaged."""

import contextlib

import keras
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf

import loops
import scaler
from scaler import observe


def own(number):
    """Of each replica another value: 1 on the first, -2 on the second; NaN in one place of either."""
    index = tf.distribute.get_replica_context().replica_id_in_sync_group
    value = tf.where(tf.equal(index, 0), 1.0, -2.0)
    nan = float("nan")
    first = tf.where(tf.equal(index, 0), nan, 1.0)
    return {
        "loss": tf.reduce_mean(number),
        "counts": tf.stack([tf.cast(index, tf.int64) + 1, 10]),
        "amax": tf.stack([value, first, 3.0]),
        "floats": tf.stack([value, 4.0]),
        "flags": tf.stack([tf.equal(index, 0)]),
        "whole": index + 5,
    }


@pytest.mark.slow_with("1")
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_vectors_are_joined_by_what_they_are(steps_per_call):
    strategy, seen = cases.mirrored(2), []
    data = tf.data.Dataset.from_tensor_slices(np.zeros([4, 2], np.float32))
    loops.Loop(own, data, steps_per_call=steps_per_call, strategy=strategy, actions=[seen.append]).run(2)
    vectors = seen[-1].vectors
    np.testing.assert_array_equal(vectors["counts"][-1], [3, 20])
    np.testing.assert_array_equal(vectors["amax"][-1], [1, np.nan, 3])
    np.testing.assert_array_equal(vectors["floats"][-1], [-0.5, 4])
    np.testing.assert_array_equal(vectors["flags"][-1], [True])
    assert seen[-1].outputs["whole"][-1] == 5


def watched(replicas, batches, model, kinds, accumulate=1, every=1):
    """What the probes of a model are called, and the vectors of the last step."""
    strategy = cases.mirrored(replicas) if replicas > 1 else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = model()
        watch = observe.watch(model, kinds=kinds, every=every)
        optimizer, loss_scaler = keras.optimizers.SGD(0.125), scaler.LossScaler(scaler.Static(8.0))
        step = loops.TrainStep(
            model, cases.squared_error, optimizer, loss_scaler=loss_scaler, probes=watch, accumulate=accumulate
        )
    data = tf.data.Dataset.from_tensor_slices(tuple(np.stack(part) for part in zip(*batches, strict=True)))
    seen = []
    loops.Loop(step, data, steps_per_call=2, strategy=strategy, actions=[seen.append]).run(len(batches))
    return watch.names, seen[-1].vectors


@pytest.mark.exhaustive
@pytest.mark.parametrize(("window", "every"), [(1, 2), (2, 1)])
def test_noise_and_updates_of_replicas_are_those_of_micro_batches(window, every):
    whole, kinds = [cases.batch(seed) for seed in range(2)], ["noise_scale", "update_rms", "weights"]
    half = len(whole[0][0]) // 2
    halves = [tuple(part[at : at + half] for part in one) for one in whole for at in (0, half)]
    _, replicas = watched(2, whole, cases.plain_model, kinds, window, every)
    _, alone = watched(1, halves, cases.plain_model, kinds, 2 * window, every)
    assert np.isfinite(alone["noise_scale"][-1]).all()
    for name in ("noise_scale", "update_rms", "update_ratio"):
        np.testing.assert_allclose(replicas[name][-1], alone[name][-1], rtol=1e-4, err_msg=name)
