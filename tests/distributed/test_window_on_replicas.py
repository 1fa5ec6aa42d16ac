"""A micro-batch of an accumulation window overflows on one replica: the window is skipped on all, at its usual end.

Guards against windows that stretch, and against replicas that no longer agree on where a window ends.
"""

import functools

import keras
import models
import pytest
import replica_cases as cases

import scaler


@pytest.fixture(scope="module")
def half():
    model, adam = functools.partial(models.stateful_model, "float16"), functools.partial(keras.optimizers.Adam, 0.01)
    return cases.Rig(cases.mirrored(2), model, adam, kind="float16", steps_per_call=4, accumulate=2)


@pytest.mark.slow
def test_a_window_that_was_spoiled_on_one_replica_names_its_gradient(half):
    half.reset()
    outputs = half.run([cases.spoil(cases.batch(1), "gradients", 1, 2), cases.batch(0)])
    last = len(half.model.trainable_variables) - 1
    assert (outputs["cause"].tolist(), outputs["variable"].tolist()) == ([0, scaler.Cause.OVERFLOW], [-1, last])
    name = half.model.trainable_variables[last].path
    assert f"that of {name!r} the last" in half.loss_scaler.explain()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["gradients", "forward"])
def test_the_window_is_skipped_on_all_replicas(half, where):
    half.reset()
    before = cases.raw(half.moved())
    good, spoiled = cases.batch(0), cases.spoil(cases.batch(1), where, 1, 2)
    outputs = half.run([spoiled, good, good, spoiled])
    assert outputs["attempted"].tolist() == [False, True, False, True]
    assert not outputs["applied"].any()
    assert cases.raw(half.moved()) == before
    assert cases.finite(half.variables())
    assert half.run([good, good])["applied"].tolist() == [False, True]
    assert cases.agree([*half.weights(), *cases.shared(half.loss_scaler), *half.step.window._count.values])
    assert cases.finite(half.variables())


@pytest.mark.slow
def test_the_micro_batch_may_spoil_on_both_replicas_at_different_times(half):
    half.reset()
    before = cases.raw(half.moved())
    outputs = half.run([cases.spoil(cases.batch(replica), "gradients", replica, 2) for replica in (0, 1)])
    assert outputs["attempted"].tolist() == [False, True]
    assert cases.raw(half.moved()) == before
