"""Two processes of a `MultiWorkerMirroredStrategy` on the loopback interface, each of which overflows in turn.

Guards against workers that decide for themselves: one that applies while the other skips has different weights, and
one that waits for a reduction the other never reaches hangs, which ends in a failure here.
"""

import functools
import json
import traceback

import keras
import models
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf
from worker_cases import start_workers, statuses

SECONDS = 240
APPLIED = [True, False, True, False, True, False, False]


def work(index, folder, accumulate):
    """One worker's `TrainStep` in a loop, each worker of which overflows in turn: its report, or what it raised."""
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()  # Must come first.
        adam, model = functools.partial(keras.optimizers.Adam, 0.01), models.plain_model
        rig = cases.Rig(strategy, model, adam, steps_per_call=7, clip_norm=0.5, accumulate=accumulate)
        batches = [cases.batch(number) for number in range(7)]
        for number, worker in ((1, 0), (3, 1), (5, 0), (6, 1)):
            batches[number] = cases.spoil(batches[number], "gradients", worker, 2)
        report = {
            "applied": rig.run(batches)["applied"].tolist(),
            "finite": cases.finite(rig.variables()),
            "loss_scale": float(rig.loss_scaler.loss_scale),
            "counters": [int(count) for count in rig.loss_scaler.counters],
            "weights": [part.tolist() for parts in cases.components(rig.weights()) for part in parts],
        }
        (folder / f"{index}.json").write_text(json.dumps(report))
    except BaseException:
        (folder / f"{index}.log").write_text(traceback.format_exc())
        raise


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The reports of both workers, by the size of a window. Both are killed if one takes too long."""

    @functools.cache
    def of(accumulate):
        folder = tmp_path_factory.mktemp("workers")
        found = statuses(start_workers(work, folder, accumulate), SECONDS)
        said = [path.read_text()[-3000:] for path in sorted(folder.glob("*.log"))]
        assert found == [0, 0], said
        return [json.loads((folder / f"{index}.json").read_text()) for index in (0, 1)]

    return of


@pytest.mark.slow
def test_a_window_is_skipped_on_both(reports):
    first, second = reports(7)
    assert first == second
    assert not any(first["applied"])
    assert first["finite"]
    assert first["counters"] == [2, 1, 1, 1]


def test_as_one_process_on_the_concatenated_batch(reports):
    adam = functools.partial(keras.optimizers.Adam, 0.01)
    one = cases.Rig(tf.distribute.get_strategy(), models.plain_model, adam, clip_norm=0.5)
    one.run([cases.batch(99)] * 6)  # As many as an in-graph loop of 7 steps is traced with.
    one.run([cases.batch(number) for number in (0, 2, 4)])
    expected = [part for parts in cases.components(one.weights()) for part in parts]
    for worker in reports(1):
        assert worker["applied"] == APPLIED
        assert worker["finite"]
        assert worker["loss_scale"] == cases.LOSS_SCALE["float32"] / 2**4
        for ours, theirs in zip(worker["weights"], expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
