"""Fault 4: one batch overflows the forward pass of a float16 model with BatchNorm, dropout and a metric.

Guards lines 1 and 3 of the promise: afterwards everything is, bit for bit, as if that batch had never been there. The
metric is put back with the snapshot in the hand-written step, and is updated only `if applied` beside a `TrainStep`.
"""

import numpy as np
import pytest
from fault_cases import batch, batches


def fixed(rig):
    """With a scale that does not move: float16 gradients of other scales may round differently."""
    return rig.reset(low=2.0**10, high=2.0**10)


def forward_overflow(x):
    """A batch whose inputs are all that large and differ in sign, so that sums of a Dense layer are not finite."""
    inputs, targets, factor = batch(51)
    return np.sign(inputs) * np.float32(x), targets, factor


@pytest.mark.slow_with("by hand-xla")
@pytest.mark.exhaustive_with("by hand-graph", "composed-eager", "composed-loop")
def test_a_run_that_saw_the_batch_equals_one_that_did_not(rig):
    fixed(rig).run(batches(1, 2))
    never, inferred = rig.bits(), rig.infer()
    rig.run(batches(3, 4))
    never_later, metric = rig.bits(), float(rig.metric.result())

    fixed(rig).run(batches(1, 2))
    for x in (60000.0, np.inf, 1e30):
        (bad,) = rig.run([forward_overflow(x)])
        assert not np.isfinite(bad["loss"])
        assert not bad["applied"]
        assert rig.bits() == never
    assert rig.infer().tobytes() == inferred.tobytes()
    assert np.isfinite(inferred).all()
    rig.run(batches(3, 4))
    assert rig.bits() == never_later
    assert float(rig.metric.result()) == metric
    assert np.isfinite(metric)
    rig.assert_finite()


@pytest.mark.exhaustive_with("by hand-xla", "composed-loop")
def test_the_very_first_batch_may_be_the_one(rig):
    fixed(rig).run(batches(1, 2))
    never = rig.bits()
    fixed(rig).run([forward_overflow(6e4), *batches(1), forward_overflow(np.inf), *batches(2)])
    assert rig.bits() == never


@pytest.mark.slow_with("by hand-xla", "composed-loop")
def test_a_statistic_that_overflows_on_an_applied_step_keeps_what_it_was(rig):
    # The variance of such numbers is beyond float16, the numbers are not; the gradients of zero are finite.
    inputs, targets, _ = batch(52)
    outputs = fixed(rig).run([(inputs * 1000, targets, np.float32(0.0)), *batches(1)])
    assert outputs[1]["applied"]
    assert np.isfinite(rig.infer()).all()
    rig.assert_finite()
