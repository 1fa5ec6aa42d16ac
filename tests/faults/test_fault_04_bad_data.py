"""Faults 4 and 5: a batch that overflows the forward pass of a float16 model with BatchNorm, dropout and a metric, or
that holds NaN, or targets beyond all numbers: once and for ever.

Guards lines 1, 3 and 6 of the promise: afterwards everything is, bit for bit, as if that batch had never been there.
Bad data for ever costs nothing but time, and is said. The metric is put back with the snapshot in the hand-written
step, and is updated only `if applied` beside a `TrainStep`.
"""

import numpy as np
import pytest
from fault_cases import batch, batches, of_rigs

import scaler


def fixed(rig):
    """With a scale that does not move: float16 gradients of other scales may round differently."""
    return rig.reset(low=2.0**10, high=2.0**10)


def forward_overflow(x):
    """A batch whose inputs are all that large and differ in sign, so that sums of a Dense layer are not finite."""
    inputs, targets, factor = batch(51)
    return np.sign(inputs) * np.float32(x), targets, factor


BAD = [
    *map(forward_overflow, (60000.0, np.inf, 1e30)),
    *(batch(7, x=x, y=y) for x, y in ((np.nan, None), (None, np.nan), (np.nan, np.inf))),
    *(batch(5, y=y) for y in (np.inf, -np.inf, 1e30)),
]


@pytest.mark.dear("XLA compiles a whole step with an optimizer")
@pytest.mark.slow_with("by hand-graph")
@of_rigs(0, 1, 3)
def test_a_run_that_saw_a_bad_batch_equals_one_that_did_not(rig):
    fixed(rig).run(batches(1, 2))
    never, inferred = rig.bits(), rig.infer()
    rig.run(batches(3))
    never_later, metric = rig.bits(), float(rig.metric.result())

    # The very first batch may be the one.
    outputs = fixed(rig).run([BAD[0], *batches(1), BAD[1], *batches(2)])
    assert [bool(output["applied"]) for output in outputs] == [False, True, False, True]
    assert rig.bits() == never
    for bad in BAD:
        (output,) = rig.run([bad])
        assert not np.isfinite(output["loss"])
        assert not output["applied"]
        assert rig.bits() == never
        assert scaler.Cause(int(rig.loss_scaler.last_skip.cause)) is scaler.Cause.LOSS
    assert rig.infer().tobytes() == inferred.tobytes()
    assert np.isfinite(inferred).all()
    rig.run(batches(3))
    assert rig.bits() == never_later
    assert float(rig.metric.result()) == metric
    assert np.isfinite(metric)
    rig.assert_finite()


@of_rigs(0, 3)
def test_a_statistic_that_overflows_on_an_applied_step_keeps_what_it_was(rig):
    # The variance of such numbers is beyond float16, the numbers are not; the gradients of zero are finite.
    inputs, targets, _ = batch(52)
    outputs = fixed(rig).run([(inputs * 1000, targets, np.float32(0.0)), *batches(1)])
    assert outputs[1]["applied"]
    assert np.isfinite(rig.infer()).all()
    rig.assert_finite()


@of_rigs(1, 3)
@pytest.mark.slow_with("by hand-graph")
def test_nan_for_ever_moves_nothing_and_is_reported(rig):
    rig.run(batches(1))
    before, inferred = rig.bits(), rig.infer()
    outputs = rig.run([batch(number, x=np.nan) for number in range(20)] * 5)
    assert not any(output["applied"] for output in outputs)
    assert rig.bits() == before
    assert rig.infer().tobytes() == inferred.tobytes()
    assert {output["loss_scale"] for output in outputs} == {rig.scale()}
    with pytest.raises(scaler.StuckError, match=r"100 steps since the last applied one .*loss itself was not finite"):
        rig.loss_scaler.check()
    rig.assert_finite()
    # The data heals: the run does too.
    assert all(output["applied"] for output in rig.run(batches(1, 2)))
    rig.loss_scaler.check()
