"""Why a step was skipped: the causes, inf or NaN, the first bad gradient, and the sentence that says so.

Guards line 6 of the promise: a skip names its tensor and what would help, in every mode, without asking the host.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf
from fault_cases import RIGS, batches, run_in
from mirrored import mirrored
from ways import second_look, selects

import scaler
from scaler import Cause


def still(grads, variables):
    """An optimizer that leaves all as it is."""
    for grad, variable in zip(grads, variables, strict=True):
        variable.assign_sub(grad * 0.0)


@functools.cache
def judged(mode):
    """Weights a, unused, b and c, of which b and c get the gradients `true`; and a square root of the offset."""
    names = ("a", "unused", "b", "c")
    weights = [tf.Variable(tf.ones([2]), name=name) for name in names]
    loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**15))

    def step(true, added, root):
        with tf.GradientTape(persistent=True) as tape:
            half = [tf.cast(tf.cast(weight, tf.float16), tf.float32) for weight in (weights[0], *weights[2:])]
            parts = [tf.reduce_sum(value - tf.stop_gradient(value)) * true[i] for i, value in enumerate(half)]
            zero = tf.reduce_sum(weights[2] - 1.0) + root
            scaled = loss_scaler.scale(tf.add_n(parts) + tf.sqrt(zero) + added)
        grads = tape.gradient(scaled, weights)
        assert grads[1] is None

        def diagnose(small):
            return tape.gradient(scaled, weights, output_gradients=small)

        return loss_scaler.apply(still, grads, weights, diagnose=diagnose)._asdict()

    return run_in(mode, step), loss_scaler


def given(true=(1.0, 1.0, 1.0), added=0.0, root=1.0):
    return [(np.float32(true), np.float32(added), np.float32(root))]


CASES = {
    "applied": (given(), Cause.NONE, -1, None),
    "loss infinite, gradients sound": (given(added=np.inf), Cause.NONE, -1, None),
    "loss NaN": (given(true=(1, 1, np.nan), added=np.nan), Cause.LOSS, 3, True),
    "overflow": (given(true=(1, 4096.0, 1)), Cause.OVERFLOW, 2, False),
    "two overflow": (given(true=(1, -4096.0, 4096.0)), Cause.OVERFLOW, 2, False),
    "square root at 0": (given(root=0.0), Cause.BACKWARD, 2, False),
    "only the last": (given(true=(1, 1, 1e5)), Cause.OVERFLOW, 3, False),
}


def taken(mode, batch):
    """The outcome of one batch at a loss scale of 2^15."""
    run, loss_scaler = judged(mode)
    loss_scaler._state["loss_scale"].assign(2.0**15)
    (output,) = run(batch)
    return scaler.Outcome(**output), loss_scaler


# Cases are taken one after the other: TensorFlow instantiates a graph anew in each test, as seeds are set there.
# A loop calls the graph; `test_where_it_began.py` reads causes from one.
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_step_says_why_it_was_skipped(mode):
    for case, (batch, cause, index, has_nan) in CASES.items():
        outcome, loss_scaler = taken(mode, batch)
        assert Cause(int(outcome.cause)) is cause, case
        assert outcome.finite == (cause is Cause.NONE), case
        assert outcome.index == index, case
        assert outcome.loss_scale == 2.0**15
        if has_nan is not None:
            assert bool(outcome.has_nan) == has_nan, case
            last = loss_scaler.last_skip
            assert (int(last.cause), int(last.index), bool(last.has_nan)) == (cause, index, has_nan), case
            assert not last.finite
            assert float(last.loss_scale) == 2.0**15
            assert loss_scaler.explain() == loss_scaler.explain(outcome)


def test_sentences(snapshot):
    if selects("graph"):
        pytest.skip("without a second look a cause is presumed, and said to be")
    said = {}
    for case, (batch, *_) in CASES.items():
        outcome, loss_scaler = taken("graph", batch)
        said[case] = loss_scaler.explain(outcome)
    assert said == snapshot


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_first_that_is_not_finite_or_the_largest(mode):
    """Of gradients as given, in float32, with None first; the loss is 0 whatever they are."""
    weights = [tf.Variable(tf.ones([2]), name=name) for name in ("none", "x", "y")]
    loss_scaler = scaler.LossScaler(scaler.Static(2.0**-20))

    def step(x, y):
        loss_scaler.scale(0.0)
        return loss_scaler.apply(still, [None, x, y], weights)._asdict()

    run = run_in(mode, step)
    for x, y, cause, index, nan in (
        ([1, 1], [1e15, 1e14], Cause.TOO_LARGE, 2, False),
        ([9.9e12, 9.9e12], [1.3e13, 1], Cause.TOO_LARGE, 1, False),
        ([1, 1e35], [1, 1], Cause.TOO_LARGE, 1, False),
        ([1, 1], [np.nan, np.inf], Cause.OVERFLOW, 2, True),
        ([np.inf, -np.inf], [1, 1], Cause.OVERFLOW, 1, False),
        ([1, -np.inf], [np.nan, 1], Cause.OVERFLOW, 1, True),
    ):
        (output,) = run([(np.float32(x), np.float32(y))])
        outcome = scaler.Outcome(**output)
        assert not outcome.finite
        assert (Cause(int(outcome.cause)), int(outcome.index), bool(outcome.has_nan)) == (cause, index, nan), (x, y)
        assert not np.isfinite(outcome.grad_norm)
        assert ("'x:0'", "'y:0'")[index - 1] in loss_scaler.explain(outcome)


@pytest.mark.slow_with("by hand-graph")
@pytest.mark.parametrize("rig", RIGS[:2], indirect=True, ids="-".join)
def test_the_last_skip_stays_when_steps_are_applied_again_and_the_next_is_judged_anew(rig):
    assert rig.loss_scaler.last_skip.finite
    rig.run(batches(1))
    assert "applied" in rig.loss_scaler.explain()
    x, y, _ = batches(2)[0]
    rig.run([(x, y, np.float32(np.nan)), *batches(3)])
    last = rig.loss_scaler.last_skip
    assert not last.finite
    assert bool(last.has_nan)
    assert float(last.loss_scale) == 2.0**10
    # The path of the model's first weight, though the optimizer updates a master of it.
    assert rig.model.trainable_variables[0].path in rig.loss_scaler.explain()
    # A step diagnoses by itself, and a loss is told from an overflow.
    rig.run([(np.full_like(x, np.nan), y, np.float32(1))])
    assert int(rig.loss_scaler.last_skip.cause) == Cause.LOSS
    # After a skip because of the loss, the next one is judged anew.
    rig.run([(x, y, np.float32(1e6))])
    assert int(rig.loss_scaler.last_skip.cause) == Cause.OVERFLOW


def test_a_look_again_with_python_branches_is_rewritten_as_the_step_is():
    """A user's own `diagnose` may take the forward pass again, with an `if` on a tensor in its loss."""
    weight, loss_scaler = tf.Variable(1.0), scaler.LossScaler(scaler.Static(2.0**10))

    def loss_of(x):
        if x > 1.0:
            return tf.cast(tf.cast(weight, tf.float16) * tf.cast(x, tf.float16), tf.float32) * x
        return weight * x

    @tf.function
    def step(x):
        def again(small):
            with tf.GradientTape() as tape:
                scaled = loss_of(x) * loss_scaler.scale_of_gradients
            return tape.gradient(scaled, [weight], output_gradients=small)

        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(loss_of(x))
        return loss_scaler.apply(still, tape.gradient(scaled, [weight]), [weight], diagnose=again)

    assert int(step(np.float32(0.5)).cause) == Cause.NONE
    assert int(step(np.float32(100.0)).cause) == Cause.OVERFLOW


@pytest.mark.slow_with("one device")
@pytest.mark.parametrize("how", ["one device", "mirrored"])
@second_look
def test_one_replica_looks_again_as_a_replica(how):
    strategy = mirrored(1) if how == "mirrored" else tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        variable = tf.Variable([0.0, 1.0])
        loss_scaler = scaler.LossScaler()

    def step():
        with tf.GradientTape(persistent=True) as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(tf.sqrt(variable)))

        def again(small):
            assert tf.distribute.get_replica_context() is not None
            return tape.gradient(scaled, [variable], output_gradients=small)

        outcome = loss_scaler.apply(still, tape.gradient(scaled, [variable]), [variable], diagnose=again)
        return outcome.cause, outcome.index

    cause, index = tf.function(lambda: strategy.run(step))()
    assert (int(cause), int(index)) == (scaler.Cause.BACKWARD, 0)
    assert int(loss_scaler.last_skip.cause) == scaler.Cause.BACKWARD
    assert variable.numpy().tolist() == [0.0, 1.0]
