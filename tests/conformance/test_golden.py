"""Guards that the presets, and the rules they are tested against, give the scales recorded from the real code."""

import golden
import numpy as np
import originals
import pytest
import tensorflow as tf
from rigs import scales_of

from scaler import Event, LossScaler, StuckError, presets


def run(case, stuck=None):
    """Our scales after each step, and the steps at which the policy raised."""
    strategy, word = getattr(presets, case.preset)(**case.arguments), [letter == "1" for letter in case.word]
    if stuck is None:
        return scales_of(strategy, tf.constant(word)).numpy(), []
    loss_scaler, scales, raised = LossScaler(strategy, stuck=stuck), [], []
    for step, finite in enumerate(word):
        loss_scaler.update(Event(np.bool_(finite)))
        scales.append(loss_scaler.loss_scale.numpy())
        try:
            loss_scaler.check()
        except StuckError:
            raised.append(step)
    return np.array(scales), raised


def recorded(case):
    """The scales of a case, without the step that raised, and whether there was one."""
    scales = case.scales.split()
    raises = scales[-1] == "raises"
    return np.array(scales[: len(scales) - raises], np.float32), raises


@pytest.mark.slow_with("megatron-010")
@pytest.mark.parametrize("case", golden.GOLDEN, ids=lambda case: f"{case.preset}-{case.word}")
def test_scales_are_those_recorded(case):
    want, raises = recorded(case)
    policies = {
        "deepspeed": presets.deepspeed_stuck,
        "deepspeed_2025_02": presets.deepspeed_stuck,
        "fairseq": presets.fairseq_stuck,
    }
    stuck = policies[case.preset]() if raises else None
    got, raised = run(case, stuck)
    np.testing.assert_array_equal(got[: len(want)], want)
    np.testing.assert_array_equal(originals.trace(case.preset, case.arguments, map(int, case.word)), want)
    assert len(case.word) == len(want) + raises
    if raises:
        assert got[-1] == want[-1]
        assert raised == [len(want)]
