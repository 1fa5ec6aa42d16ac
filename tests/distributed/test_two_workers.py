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

import scaler

SECONDS = 240
APPLIED = [True, False, True, False, True, False, False]


def work(index, folder, part):
    """One worker: its report, or what it raised."""
    try:
        import worker

        (folder / f"{index}.json").write_text(json.dumps(worker.REPORTS[part]()))
    except BaseException:
        (folder / f"{index}.log").write_text(traceback.format_exc())
        raise


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The reports of both workers, by part. Both are killed if one takes too long."""

    @functools.cache
    def of(part):
        folder = tmp_path_factory.mktemp("workers")
        found = statuses(start_workers(work, folder, part), SECONDS)
        said = [path.read_text()[-3000:] for path in sorted(folder.glob("*.log"))]
        assert found == [0, 0], said
        return [json.loads((folder / f"{index}.json").read_text()) for index in (0, 1)]

    return of


@pytest.mark.slow
@pytest.mark.exhaustive_with("written", "written in tf.range")
@pytest.mark.parametrize("name", ["written", "written in tf.range"])
def test_hand_written_steps_skip_on_both(reports, name):
    first, second = reports(name)
    assert first["applied"] == second["applied"] == APPLIED * 2
    assert first["unmoved"] == second["unmoved"] == [not applied for applied in APPLIED * 2]
    assert first["finite"]
    assert second["finite"]
    assert first["loss_scale"] == second["loss_scale"] == 2.0 ** (10 - 8)
    assert first["counters"] == second["counters"] == [15, 7, 8, 2]
    assert first["cause"] == second["cause"] == scaler.Cause.LOSS
    assert first["weights"] == second["weights"]
    assert first["statistics"] != second["statistics"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_loops_skip_on_both(reports):
    first, second = reports("Loop")
    assert first == second
    assert first["applied"] == APPLIED
    assert first["finite"]
    assert first["loss_scale"] == cases.LOSS_SCALE["float32"] / 2**4


@pytest.mark.slow
def test_a_window_is_skipped_on_both(reports):
    first, second = reports("Loop with accumulation")
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
    for worker in reports("Loop"):
        for ours, theirs in zip(worker["weights"], expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
