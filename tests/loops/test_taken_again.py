"""A skipped step is differentiated again, from its batch: with nothing moved by it, and no activation kept for it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from scaler import Cause

BATCH, WIDTH = 6, 5
X, Y = np.ones([BATCH, 3], np.float32), np.zeros([BATCH, 1], np.float32)
OVERFLOWS, BACKWARD, SOUND = np.float32(3e4), np.float32(np.nan), np.float32(1.0)


@tf.custom_gradient
def with_slope(values, slope):
    return values, lambda upstream: (upstream * tf.cast(slope, values.dtype), None)


def model():
    layers = [keras.layers.Dense(WIDTH), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    return keras.Sequential([keras.Input([3]), *layers, keras.layers.Dense(1)])


def loss(slope, prediction):
    return tf.reduce_mean((with_slope(tf.cast(prediction, tf.float32), slope[0, 0]) - 1.0) ** 2)


def step_of(loss_fn):
    keras.config.set_dtype_policy("mixed_float16")
    made = loops.TrainStep(
        model(), loss_fn, keras.optimizers.SGD(0.01), loss_scaler=scaler.LossScaler(scaler.Static(2.0**10))
    )
    return made, tf.function(lambda slope: made((X, tf.fill([BATCH, 1], slope))))


def state(model):
    return [variable.numpy().tobytes() for variable in model.variables]


@pytest.mark.parametrize(("slope", "cause"), [(OVERFLOWS, Cause.OVERFLOW), (BACKWARD, Cause.BACKWARD)])
def test_the_cause_is_found_and_nothing_has_moved(slope, cause):
    made, step = step_of(loss)
    assert step(SOUND)["applied"]
    before = state(made.model)
    outputs = step(slope)
    assert int(outputs["cause"]) == cause
    assert not outputs["applied"]
    assert state(made.model) == before  # BatchNorm's statistics and the seed of Dropout among them.
    assert step(SOUND)["applied"]
    assert state(made.model) != before


def kept_shapes(step):
    """The shapes of the floating tensors that the branches of the step are given."""
    graph = step.get_concrete_function(tf.TensorSpec([], tf.float32)).graph
    branches = [op for op in graph.get_operations() if op.type in ("If", "StatelessIf")]
    return {tuple(given.shape) for op in branches for given in op.inputs if given.dtype.is_floating}


def test_activations_are_not_kept_for_it():
    _, step = step_of(loss)
    assert (BATCH, WIDTH) not in kept_shapes(step)


def test_what_the_loss_counts_is_counted_once_and_traced_once():
    calls, traced = tf.Variable(0, trainable=False), []

    def counting(slope, prediction):
        calls.assign_add(1)
        traced.append(slope)
        return loss(slope, prediction)

    _, step = step_of(counting)
    assert [int(step(slope)["cause"]) for slope in (SOUND, BACKWARD, OVERFLOWS)] == [
        Cause.NONE,
        Cause.BACKWARD,
        Cause.OVERFLOW,
    ]
    assert int(calls) == 3
    assert len(traced) == 1
    assert (BATCH, WIDTH) not in kept_shapes(step)


def test_a_metric_of_the_loss_function_has_seen_each_batch_once():
    metric = keras.metrics.Mean()

    def measuring(slope, prediction):
        metric.update_state(slope)
        return loss(slope, prediction), {"mean": metric.result(), "number": 3, "count": metric.count}

    _, step = step_of(measuring)
    for slope in (SOUND, BACKWARD, SOUND, OVERFLOWS):
        outputs = step(np.float32(2.0) if slope is SOUND else slope)
    assert float(metric.count) == float(outputs["count"]) == 4 * BATCH
    assert int(outputs["number"]) == 3


def test_a_loss_with_python_branches_is_rewritten_as_in_the_users_own_function():
    def branching(slope, prediction):
        if tf.reduce_mean(slope) > 2.0:
            return loss(slope, prediction)
        return 2.0 * loss(slope, prediction)

    _, step = step_of(branching)
    assert int(step(SOUND)["cause"]) == Cause.NONE
    assert int(step(OVERFLOWS)["cause"]) == Cause.OVERFLOW


def test_a_function_that_tensorflow_runs_as_python_is_looked_at_again_too():
    _, step = step_of(loss)
    tf.config.run_functions_eagerly(True)
    assert [int(step(slope)["cause"]) for slope in (SOUND, BACKWARD)] == [Cause.NONE, Cause.BACKWARD]
