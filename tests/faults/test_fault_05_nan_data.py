"""Fault 5: NaN in the data, once and for ever.

Guards lines 1, 3 and 6 of the promise: one NaN costs one step; NaN for ever costs nothing but time, and is said.
"""

import numpy as np
import pytest
from fault_cases import batch, batches

import scaler

PLACES = {"x": np.nan}, {"y": np.nan}, {"x": np.nan, "y": np.inf}


@pytest.mark.dear("XLA compiles a whole step with an optimizer")
@pytest.mark.slow_with("by hand-graph")
@pytest.mark.exhaustive_with("by hand-eager", "composed-eager", "composed-loop")
def test_a_nan_once_costs_one_step(rig):
    rig.reset(low=2.0**10, high=2.0**10).run(batches(1, 2, 3))
    without = rig.bits()
    for where in PLACES:
        outputs = rig.reset(low=2.0**10, high=2.0**10).run([*batches(1, 2), batch(7, **where), *batches(3)])
        assert [bool(output["applied"]) for output in outputs] == [True, True, False, True]
        assert rig.bits() == without
        rig.assert_finite()


@pytest.mark.slow_with("by hand-graph")
@pytest.mark.exhaustive_with("composed-loop")
def test_nan_for_ever_moves_nothing_and_is_reported(compiled_rig):
    rig = compiled_rig
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
