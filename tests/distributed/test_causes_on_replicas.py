"""Why a step was skipped is one answer for all replicas, whichever of them saw the reason.

Guards against causes, names and counters that depend on the replica asked.
"""

import keras
import models
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf
from mirrored import one_for_each
from ways import second_look

import scaler


@pytest.fixture(scope="module")
def root():
    """Applies the square root of w times what each replica is given, whose derivative at 0 is infinite."""
    strategy = cases.mirrored(2)
    with strategy.scope():
        variables = [tf.Variable(1.0, name="idle"), tf.Variable(1.0, name="w")]
        optimizer, loss_scaler = keras.optimizers.SGD(0.0), scaler.LossScaler(scaler.Static(2.0**100))

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.sqrt(tf.abs(variables[1] * x)) + 0.0 * variables[0]
            scaled = loss_scaler.scale(loss)
        grads = tape.gradient(scaled, variables)
        return loss_scaler.apply(
            optimizer,
            grads,
            variables,
            diagnose=lambda small: tape.gradient(scaled, variables, output_gradients=small),
        )

    @tf.function
    def call(xs):
        return strategy.run(step, args=(one_for_each(strategy, xs),))

    def outcomes(*xs):
        returned = call(tf.constant(xs, tf.float32))
        parts = tf.nest.map_structure(strategy.experimental_local_results, returned)
        assert all(len({value.numpy().tobytes() for value in part}) == 1 for part in parts)
        return scaler.Outcome(*(part[0] for part in parts)), loss_scaler

    return outcomes


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (np.nan, scaler.Cause.LOSS),
        pytest.param(0.0, scaler.Cause.BACKWARD, marks=second_look),
        (3e38, scaler.Cause.OVERFLOW),
    ],
)
def test_one_cause_for_all(root, value, cause, replica):
    xs = [1.0, 1.0]
    xs[replica] = value
    outcome, loss_scaler = root(*xs)
    assert not bool(outcome.finite)
    assert int(outcome.cause) == cause
    assert int(outcome.index) == 1
    assert "'w" in loss_scaler.explain(outcome)
    assert [int(one.replica) for one in (outcome, loss_scaler.last_skip)] == [replica] * 2
    assert f"of the replicas, counted from 0, {replica} is the first whose own are not finite" in loss_scaler.explain()
    assert int(loss_scaler.last_skip.cause) == cause
    assert cases.agree(cases.shared(loss_scaler))

    outcome, loss_scaler = root(1.0, 2.0)
    assert bool(outcome.finite)
    assert int(outcome.cause) == scaler.Cause.NONE
    assert int(loss_scaler.last_skip.cause) == cause
    assert [int(one.replica) for one in (outcome, loss_scaler.last_skip)] == [-1, replica]


def test_no_replica_is_to_blame_where_all_are_alike(root):
    outcome, loss_scaler = root(np.nan, np.nan)
    assert int(outcome.cause) == scaler.Cause.LOSS
    assert [int(one.replica) for one in (outcome, loss_scaler.last_skip)] == [-1, -1]
    assert "of the replicas" not in loss_scaler.explain()


@pytest.mark.slow
def test_a_train_step_says_what_was_wrong_on_one_replica_and_which_weight_is_not_finite():
    rig = cases.Rig(cases.mirrored(2), models.one_layer, lambda: keras.optimizers.SGD(0.1))
    for replica in (0, 1):
        assert not rig.run([cases.spoil(cases.batch(0), "data", replica, 2)])["applied"].any()
        assert int(rig.loss_scaler.last_skip.cause) == scaler.Cause.LOSS
        assert not rig.run([cases.spoil(cases.batch(0), "gradients", replica, 2)])["applied"].any()
        assert int(rig.loss_scaler.last_skip.cause) == scaler.Cause.OVERFLOW
    bad = rig.model.trainable_variables[1]
    bad.assign(tf.fill(bad.shape, np.nan))
    outputs = rig.run([cases.batch(0)])
    assert outputs["cause"].tolist() == [scaler.Cause.LOSS]
    assert f"the weight {bad.path!r} is already non-finite, and so is the loss" in rig.loss_scaler.explain()
    assert cases.agree([rig.loss_scaler._kept.variable])
