"""Guards that a scale which cannot move is a constant of the graph, and that nothing else is told by it."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from scaler_cases import by_hand, descent, gradients_of
from ways import graph

import scaler
from scaler.strategies.base import host_bounds_of, only_scale, usable_scale, usable_scale_on_host

FIXED = {1.0: scaler.NoScaling(), 8.0: scaler.Static(8.0)}
MOVING = {
    "dynamic": scaler.Dynamic(),
    "narrow": scaler.Dynamic(4.0, min_scale=2.0, max_scale=8.0),
    "a tensor": scaler.Static(tf.constant(8.0)),
}
DAMAGED = [0.0, -1.0, 1e30, np.inf, -np.inf, np.nan, 3.0, 2.0**-149]


def test_which_strategies_have_one_scale_only():
    assert {only_scale(strategy): strategy for strategy in FIXED.values()} == FIXED
    assert [only_scale(strategy) for strategy in MOVING.values()] == [None] * 3
    assert only_scale(scaler.Dynamic(4.0, min_scale=4.0, max_scale=4.0)) == 4.0


@pytest.mark.parametrize(
    ("strategy", "unscaled", "divides"),
    [
        (scaler.NoScaling(), False, False),
        (scaler.Static(2.0), False, True),
        (scaler.Static(2.0), True, False),
        (scaler.Dynamic(), False, True),
    ],
)
def test_nothing_is_divided_by_1(strategy, unscaled, divides):
    variable, loss_scaler = tf.Variable([1.0]), by_hand(strategy, select=True)

    @graph
    def norm(grad):
        return loss_scaler.apply(scaler.move_nothing, [grad], [variable], unscaled=unscaled).grad_norm

    operations = norm.get_concrete_function(tf.TensorSpec([1])).graph.get_operations()
    assert ("RealDiv" in {op.type for op in operations}) == divides


def test_a_damaged_checkpoint_brings_no_other_scale():
    scale, loss_scaler, variable = 8.0, scaler.LossScaler(FIXED[8.0], select=True), tf.Variable([1.0])
    optimizer = descent(variable)

    @graph
    def step():
        grads = gradients_of(loss_scaler, lambda: tf.reduce_sum(variable * 2.0), [variable])
        outcome = loss_scaler.apply(optimizer, grads, [variable])
        return grads[0], outcome.loss_scale, variable.read_value()

    for damaged in DAMAGED:
        variable.assign([2.0])
        loss_scaler._state["loss_scale"].assign(damaged)
        grad, used, now = step()
        assert (float(grad[0]), float(used), float(loss_scaler.loss_scale)) == (2 * scale, scale, scale)
        assert float(now[0]) == 0.0
        assert float(loss_scaler.state.loss_scale) == scale


@pytest.mark.parametrize(
    ("compile", "by_hand_read"), [(lambda step: step, True), (graph, False)], ids=["eager", "graph"]
)
def test_an_open_step_of_a_foreign_checkpoint_brings_no_other_scale(compile, by_hand_read):
    loss_scaler, variable = scaler.LossScaler(scaler.Static(8.0)), tf.Variable([1.0])
    optimizer = descent(variable)
    loss_scaler._open_step["used"].assign(1024.0)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * 2.0)
            scaled = loss * loss_scaler.loss_scale if by_hand_read else loss_scaler.scale(loss)
        grads = tape.gradient(scaled, [variable])
        return grads[0], loss_scaler.apply(optimizer, grads, [variable]).loss_scale

    grad, used = compile(step)()
    assert (float(grad[0]), float(used), float(variable[0])) == (16.0, 8.0, -1.0)


@pytest.mark.parametrize("name", ["narrow", "a tensor", 8.0])
@given(st.one_of(st.sampled_from(DAMAGED), st.floats(width=32), st.integers(-149, 127).map(lambda e: 2.0**e)))
def test_the_host_reads_the_scale_that_a_step_would_use(name, stored):
    strategy = {**MOVING, **FIXED}[name]
    expected = float(usable_scale(strategy, tf.constant(stored, tf.float32)))
    assert usable_scale_on_host(strategy, float(np.float32(stored))) == expected
    low, high = host_bounds_of(strategy)
    assert low <= expected <= high
