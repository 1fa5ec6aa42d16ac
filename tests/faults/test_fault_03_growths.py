"""Fault 3: 300 growths on all-zero gradients, then normal ones. The scale rests at its ceiling and comes back.

Guards lines 1, 2 and 6 of the promise: never corrupts, never leaves its range, never sticks.
"""

import numpy as np
import pytest
from fault_cases import batch, batches, rig


@pytest.mark.slow_with("by hand-xla")
@pytest.mark.exhaustive_with("by hand-graph", "composed-loop")
def test_the_scale_rests_at_its_ceiling_and_comes_back(compiled_rig):
    for high, steps in ((2.0**40, 120), (2.0**126, 300)):
        rests_and_comes_back(compiled_rig.reset(high=high, interval=1), high, steps)


@pytest.mark.slow_with("by hand")
@pytest.mark.exhaustive_with("composed")
@pytest.mark.parametrize("style", ["by hand", "composed"])
def test_in_eager_mode_too_from_near_the_ceiling(style):
    high = 2.0**22
    rests_and_comes_back(rig(style, "eager").reset(high=high, initial=high / 4, interval=1), high, steps=5)


def rests_and_comes_back(rig, high, steps):
    """Gradients of zero up to the ceiling, then normal ones."""
    weights = [weight.numpy() for weight in rig.masters.weights]
    outputs = rig.run([batch(number % 10, factor=0.0) for number in range(steps)])
    assert all(output["applied"] for output in outputs)
    assert max(output["loss_scale"] for output in outputs) <= high
    assert rig.scale() == high
    for weight, value in zip(rig.masters.weights, weights, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)
    before = rig.bits()
    back = []
    while not back or not back[-1]["applied"]:
        assert rig.bits() == before
        back += rig.run([batch(5)])
        assert len(back) < 130
    assert len(back) > 1
    scales = [output["loss_scale"] for output in back]
    assert scales == [high / 2**number for number in range(len(scales))]
    rig.run(batches(*range(3)))
    assert np.isfinite(rig.infer()).all()
    assert any((w.numpy() != value).any() for w, value in zip(rig.masters.weights, weights, strict=True))
    rig.assert_finite()


@pytest.mark.slow_with("by hand-eager", "by hand-xla")
@pytest.mark.exhaustive_with("by hand-graph", "composed-loop")
def test_growth_at_the_ceiling_does_not_wear_the_state_out(rig):
    rig.reset(high=2.0**12, interval=2)
    rig.run([batch(number % 4, factor=0.0) for number in range(8 if rig.mode == "eager" else 40)])
    assert rig.scale() == 2.0**12
    assert int(rig.loss_scaler.state.good_steps) == 0
    assert not rig.run([batch(0, factor=np.inf)])[0]["applied"]
    assert rig.scale() == 2.0**11
