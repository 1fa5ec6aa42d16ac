"""Guards that a scale which no strategy would choose is never used: out of bounds, zero, infinite or NaN."""

import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import plain_descent

from scaler import Dynamic, LossScaler, NoScaling, Static

STRATEGIES = {
    "dynamic": (lambda: Dynamic(8.0, min_scale=2.0, max_scale=64.0), (2.0, 8.0, 64.0)),
    "static": (lambda: Static(8.0), (8.0, 8.0, 8.0)),
    "no scaling": (NoScaling, (1.0, 1.0, 1.0)),
}


EVERY, FEW = (np.nan, np.inf, -np.inf, 0.0, -1.0, 1e-40, 0.5, 1.5, 2.5, 63.0, 65.0, 1e30), (np.nan, 0.0, 1e30)


@pytest.mark.parametrize(
    ("name", "foreign"),
    [(name, foreign) for name in STRATEGIES for foreign in (EVERY if name == "dynamic" else FEW)],
)
def test_a_foreign_scale_counts_as_the_nearest_bound_and_nan_as_the_first_scale(name, foreign):
    make, (low, first, high) = STRATEGIES[name]
    loss_scaler, weight = LossScaler(make()), tf.Variable([0.0])
    loss_scaler._state["loss_scale"].assign(foreign)  # As a restored checkpoint does.
    want = first if np.isnan(foreign) else min(max(foreign, low), high)
    assert loss_scaler.loss_scale.numpy() == np.float32(want)
    assert loss_scaler.state.loss_scale.numpy() == np.float32(want)
    with tf.GradientTape() as tape:
        scaled = loss_scaler.scale(tf.reduce_sum(weight * 0.5))
    outcome = loss_scaler.apply(plain_descent, tape.gradient(scaled, [weight]), [weight])
    assert outcome.finite
    assert outcome.loss_scale.numpy() == np.float32(want)
    assert weight.numpy()[0] == -0.5
    assert low <= loss_scaler.loss_scale.numpy() <= high


@pytest.mark.parametrize("run", [lambda read: read, tf.function], ids=["eager", "graph"])
def test_the_first_scale_of_a_variable_is_its_value_now(run):
    initial = tf.Variable(8.0)
    loss_scaler = LossScaler(Dynamic(initial, min_scale=2.0, max_scale=64.0))
    initial.assign(16.0)
    loss_scaler._state["loss_scale"].assign(np.nan)
    assert run(lambda: loss_scaler.loss_scale)() == 16.0
