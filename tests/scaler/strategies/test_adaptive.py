"""Guards `AdaptiveScale` by the paper's formula in plain Python, group by group."""

import math

import numpy as np
import pytest
import tensorflow as tf

from scaler.layerwise import AdaptiveScale, LayerEvent

RULE = AdaptiveScale(8.0, growth_interval=3, min_scale=2.0**-20, max_scale=2.0**30)
U_MIN, U_MAX = 2.0**-24, 65504.0


def erfinv(share):
    low, high = 0.0, 6.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erf(middle) < share else (low, middle)
    return low


def within(value):
    return min(max(value, 2.0**-20), 2.0**30)


def floored(value):
    return 2.0 ** math.floor(math.log2(value))


def expected(state, finite, amax, deviation, entering):
    """One group's state after a step: scale, ceiling, good steps."""
    scale, ceiling, good = state
    if not finite:
        fits = U_MAX / 16 / max(entering, 1e-30)
        return within(floored(min(scale / 2, fits))), within(scale / 2), 0
    low = U_MIN / (math.sqrt(2) * erfinv(1e-3) * max(deviation, 1e-30))
    chosen = within(floored(min(max(low, 1.0), U_MAX / 16 / amax, ceiling)))
    return (chosen, min(2 * ceiling, 2.0**30), 0) if good + 1 >= 3 else (chosen, ceiling, good + 1)


@pytest.mark.parametrize("execute", ["eager", "xla"], indirect=True)
def test_it_is_the_formula(execute):
    random = np.random.default_rng(0)
    groups, steps = 60, 25
    update = execute(lambda state, event: RULE.update(state, event))
    states = [(8.0, 2.0**30, 0)] * groups
    first = RULE.init()
    state = type(first)(*(tf.fill([groups], value) for value in first))
    for _ in range(steps):
        finite = random.random(groups) < 0.7
        amax = (2.0 ** random.uniform(-50, 30, groups)).astype(np.float32)
        deviation = np.where(random.random(groups) < 0.1, 0.0, amax * random.uniform(0.001, 1, groups))
        deviation, entering = deviation.astype(np.float32), amax * np.float32(0.75)
        event = LayerEvent(finite, np.where(finite, amax, np.inf), deviation, entering, np.full(groups, True))
        state = update(state, LayerEvent(*map(tf.constant, event)))
        numbers = zip(states, finite, amax.tolist(), deviation.tolist(), entering.tolist(), strict=True)
        states = [expected(*each) for each in numbers]
        np.testing.assert_array_equal(np.transpose([value.numpy() for value in state]), states)
