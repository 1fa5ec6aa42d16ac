"""Guards that the ready probes of two replicas are those of two micro-batches on one device."""

import contextlib

import keras
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf
from models import plain_model

import loops
import scaler
from scaler import observe


def measured(strategy, accumulate, batches, every):
    """The vectors of the last step."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = plain_model()
        step = loops.TrainStep(
            model,
            cases.squared_error,
            keras.optimizers.SGD(0.125),
            loss_scaler=scaler.LossScaler(scaler.Static(8.0)),
            probes=observe.watch(model, kinds=["noise_scale", "update_rms", "weights"], every=every),
            accumulate=accumulate,
        )
    seen = []
    data = tf.data.Dataset.from_tensor_slices(tuple(np.stack(part) for part in zip(*batches, strict=True)))
    loops.Loop(step, data, steps_per_call=2, strategy=strategy, actions=[seen.append]).run(len(batches))
    return seen[-1].vectors


@pytest.mark.exhaustive_with("2-1", "1-2")
@pytest.mark.slow
@pytest.mark.parametrize(("window", "every"), [(1, 2), (2, 1)])
def test_noise_and_updates_of_replicas_are_those_of_micro_batches(window, every):
    whole = [cases.batch(seed) for seed in range(2)]
    half = len(whole[0][0]) // 2
    halves = [tuple(part[at : at + half] for part in one) for one in whole for at in (0, half)]
    replicas = measured(cases.mirrored(2), window, whole, every)
    alone = measured(None, 2 * window, halves, every)
    assert np.isfinite(alone["noise_scale"][-1]).all()
    for name in ("noise_scale", "update_rms", "update_ratio"):
        np.testing.assert_allclose(replicas[name][-1], alone[name][-1], rtol=1e-4, err_msg=name)
