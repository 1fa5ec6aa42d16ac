"""A micro-batch of an accumulation window overflows on one replica: the window is skipped on all, at its usual end.

Guards against windows that stretch, and against replicas that no longer agree on where a window ends.
"""

import functools

import keras
import models
import numpy as np
import pytest
import replica_cases as cases

import scaler


def rig_of(kind, **arguments):
    model = functools.partial(models.stateful_model if kind == "float16" else models.plain_model, kind)
    return cases.Rig(
        cases.mirrored(2), model, lambda: keras.optimizers.Adam(0.01), kind=kind, steps_per_call=4, **arguments
    )


@pytest.fixture(scope="module")
def half():
    return rig_of("float16", accumulate=2)


@pytest.mark.slow
@pytest.mark.exhaustive_with("1", "0")
@pytest.mark.parametrize("replica", [0, 1])
def test_a_window_that_was_spoiled_on_one_replica_names_its_gradient(half, replica):
    half.reset()
    outputs = half.run([cases.spoil(cases.batch(1), "gradients", replica, 2), cases.batch(0)])
    last = len(half.model.trainable_variables) - 1
    assert (outputs["cause"].tolist(), outputs["variable"].tolist()) == ([0, scaler.Cause.OVERFLOW], [-1, last])
    name = half.model.trainable_variables[last].path
    assert f"that of {name!r} the last" in half.loss_scaler.explain()


@pytest.mark.slow_with("1-forward")
@pytest.mark.exhaustive_with("0-forward", "0-gradients", "1-gradients")
@pytest.mark.parametrize("where", ["gradients", "forward"])
@pytest.mark.parametrize("replica", [0, 1])
def test_the_window_is_skipped_on_all_replicas(half, where, replica):
    half.reset()
    before = cases.raw(half.moved())
    good, spoiled = cases.batch(0), cases.spoil(cases.batch(1), where, replica, 2)
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


@pytest.mark.exhaustive
def test_a_window_on_two_replicas_is_the_large_batch_on_one_device():
    """Four shares of two micro-batches, clipped once, after all of them are summed."""
    split = rig_of("float32", accumulate=2, clip_norm=0.5)
    whole = cases.Rig(
        cases.mirrored(1),
        models.plain_model,
        lambda: keras.optimizers.Adam(0.01),
        size=16,
        clip_norm=0.5,
    )
    micro = [cases.batch(seed) for seed in range(6)]
    large = [tuple(np.concatenate(parts) for parts in zip(*micro[at : at + 2], strict=True)) for at in (0, 2, 4)]
    # What the first windows were traced with differs: start from the same weights and empty slots.
    cases.assign(split.moved(), [[parts[0]] * 2 for parts in cases.components(whole.moved())])
    outputs, expected = split.run(micro), whole.run(large)
    np.testing.assert_allclose(outputs["grad_norm"][1::2], expected["grad_norm"], rtol=1e-5)
    for ours, theirs in zip(cases.components(split.moved()), cases.components(whole.moved()), strict=True):
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
