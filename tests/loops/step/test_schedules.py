"""Guards learning rates: Keras's own wait at a skipped step, `ByAttempts` does not, and both go on after a resume."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from loop_cases import afresh, dataset, static
from models import one_layer, squared_error
from rigs import raw

import loops

HALVING = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
BAD = (1, 2)
"""The batches that overflow, from 0."""


def make(kind, momentum=0.0, accumulate=1):
    loss_scaler = static(8.0)
    schedule = HALVING if kind == "applied" else loops.ByAttempts(HALVING, loss_scaler)
    optimizer = keras.optimizers.SGD(schedule, momentum=momentum)
    return loops.TrainStep(one_layer(), squared_error, optimizer, loss_scaler=loss_scaler, accumulate=accumulate)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "expected", "steps_per_call"),
    [("applied", [1, None, None, 1 / 2, 1 / 4], 1), ("attempted", [1, None, None, 1 / 8, 1 / 16], 3)],
)
def test_a_skip_counts_for_one_and_not_for_the_other(kind, expected, steps_per_call):
    """The rate is a step's move over its gradient."""
    step, seen = make(kind), []

    def watched(batch):
        before = [tf.identity(variable) for variable in step.model.trainable_variables]
        outputs = step(batch)
        moves = [old - new for old, new in zip(before, step.model.trainable_variables, strict=True)]
        return {**outputs, "moved": tf.linalg.global_norm(moves)}

    loops.Loop(watched, dataset(5, bad=BAD), steps_per_call=steps_per_call, actions=[seen.append]).run(5)
    moved, norms, applied = (
        np.concatenate([visit.outputs[name] for visit in seen]) for name in ("moved", "grad_norm", "applied")
    )
    assert list(applied) == [rate is not None for rate in expected]
    rates = [rate for rate in expected if rate]
    np.testing.assert_allclose(moved[applied] / norms[applied], rates, rtol=1e-4)
    assert int(step.optimizer.iterations) == 3
    assert int(step.loss_scaler.counters.attempted) == 5


def test_a_window_is_one_attempt():
    step = make("attempted", accumulate=2)
    for one in dataset(6, bad=[3]):
        step(one)
    assert float(step.optimizer.learning_rate) == 2.0**-3
    assert int(step.optimizer.iterations) == 2


@pytest.mark.slow
def test_it_goes_on_bit_for_bit_after_a_resume(tmp_path):
    data, step = dataset(6, bad=BAD), make("attempted", momentum=0.5)
    again, own = afresh(step, data, steps_per_call=3), lambda: raw([*step.model.variables, *step.optimizer.variables])
    again(data).run(6)
    whole = own()
    for goal in (3, 6):  # The first stops just after two skips.
        again(data, loops.Checkpoint(tmp_path, every=100, resume=True)).run(goal)
    assert own() == whole
    other = make("applied", momentum=0.5)
    with pytest.raises(loops.CheckpointError, match="learning_rate"):
        loops.Loop(other, dataset(9), actions=[loops.Checkpoint(tmp_path, every=100, resume=True)]).run(9)
