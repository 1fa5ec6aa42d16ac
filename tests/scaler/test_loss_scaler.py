"""Guards the stateful face: scaling the loss, the long form of a step, the counters, and what an Outcome says."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import by_hand, descent, modes, modes_with, plain_descent
from ways import graph

import scaler
from scaler import Dynamic, Event, LossScaler, NoScaling, Static


@modes_with(
    ("kind",),
    eager=[("float16",), ("bfloat16",), ("float32",), ("float64",)],
    graph=[("float16",), ("float64",)],
    xla=[("bfloat16",)],
)
def test_the_loss_is_scaled_in_float32(execute, kind):
    # 2^17 is infinite in float16, and so would be the product.
    # A float16 loss is named: see test_float16_outputs.
    with pytest.warns(scaler.ScaleWarning) if kind == "float16" else contextlib.nullcontext():
        scaled = execute(LossScaler(Static(2.0**17)).scale)(tf.constant(2.0, kind))
    assert (scaled.dtype, scaled.shape) == (tf.float32, [])
    assert scaled.numpy() == 2.0**18


def test_a_python_number_is_a_loss():
    assert LossScaler(Static(4.0)).scale(0.5).numpy() == 2.0


def test_a_forward_derivative_passes_through_scale():
    """As in a Hessian times a vector."""
    weight, loss_scaler = tf.Variable([1.0, 2.0]), LossScaler(Static(8.0))
    with tf.autodiff.ForwardAccumulator(weight, tf.ones([2])) as accumulator:
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(weight**3))
        grads = tape.gradient(scaled, [weight])
    np.testing.assert_array_equal(loss_scaler.unscale([accumulator.jvp(grads[0])])[0], [6.0, 12.0])


def test_dynamic_is_the_default():
    assert LossScaler().strategy == Dynamic()
    assert LossScaler().loss_scale.numpy() == 2.0**15
    assert LossScaler(NoScaling()).loss_scale.numpy() == 1.0


@pytest.mark.slow_with("xla")
@modes("graph", "xla")
def test_the_outcome_says_what_happened(execute):
    w = tf.Variable([1.0, 1.0])
    loss_scaler, optimizer = by_hand(Dynamic(8.0, growth_interval=1)), descent(w)
    run = execute(lambda grad: loss_scaler.apply(optimizer, [grad], [w], clip_norm=1.0))
    grown = run(np.float32([24, 32]))
    assert (grown.finite.dtype, grown.loss_scale.dtype, grown.grad_norm.dtype) == (tf.bool, tf.float32, tf.float32)
    assert grown.finite
    assert grown.loss_scale.numpy() == 8.0
    assert grown.grad_norm.numpy() == 5.0
    skipped = run(np.float32([np.inf, 0]))
    assert not skipped.finite
    assert skipped.loss_scale.numpy() == 16.0
    assert not np.isfinite(skipped.grad_norm.numpy())
    assert loss_scaler.loss_scale.numpy() == 8.0


@pytest.mark.slow_with("xla")
@modes("graph", "xla")
def test_counters(execute):
    loss_scaler = by_hand(Dynamic(8.0))
    w = tf.Variable([1.0])
    optimizer = descent(w)
    run = execute(lambda grad: loss_scaler.apply(optimizer, [grad], [w]).finite)
    seen = []
    for finite in (True, False, False, True, False, True, True):
        run(np.float32([0.0 if finite else np.nan]))
        seen.append(tuple(int(count) for count in loss_scaler.counters))
    assert seen == [(1, 1, 0, 0), (2, 1, 1, 1), (3, 1, 2, 2), (4, 2, 2, 0), (5, 2, 3, 1), (6, 3, 3, 0), (7, 4, 3, 0)]
    assert {count.dtype for count in loss_scaler.counters} == {tf.int64}


@pytest.mark.parametrize("proven", [False, True])
def test_a_step_that_breaks_off_in_the_optimizer_is_not_counted(proven, monkeypatch):
    """Also where the decision does not wait for the update, because its new values need no look."""
    loss_scaler, w = by_hand(Dynamic(8.0)), tf.Variable([1.0])

    def breaks_off(grads, variables):
        slow = tf.linalg.det(tf.random.normal([300, 300]))
        tf.debugging.assert_greater(variables[0], 1e9 + tf.tanh(slow))

    optimizer = keras.optimizers.SGD(0.1) if proven else breaks_off
    monkeypatch.setattr(keras.optimizers.SGD, "update_step", lambda self, grad, own, rate: breaks_off([grad], [own]))
    step = graph(lambda grad: loss_scaler.apply(optimizer, [grad], [w]).finite)
    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(tf.constant([1.0]))
    assert [int(count) for count in loss_scaler.counters] == [0, 0, 0, 0]
    assert int(loss_scaler.state.good_steps) == 0


@modes("eager", "graph")
def test_none_gradients_leave_their_variables_alone(execute):
    a, b, c = tf.Variable([1.0]), tf.Variable([2.0]), tf.Variable([3.0])
    loss_scaler = by_hand(Static(2.0))
    step = execute(lambda x, z: loss_scaler.apply(plain_descent, [x, None, z], [a, b, c]).finite)
    assert step(np.float32([2]), np.float32([4]))
    assert [v.numpy()[0] for v in (a, b, c)] == [0.0, 2.0, 1.0]


@modes("graph")
def test_clipping_comes_after_unscaling(execute):
    # Unscaled, the norm is 5 and the limit 10: nothing is clipped. Scaled, it would be 5120.
    w = tf.Variable([0.0, 0.0])
    loss_scaler, optimizer = by_hand(Static(1024.0)), descent(w)
    run = execute(lambda grad, limit: loss_scaler.apply(optimizer, [grad], [w], clip_norm=limit).grad_norm)
    assert run(np.float32([3, 4]) * 1024, np.float32(10)).numpy() == 5.0
    np.testing.assert_array_equal(w.numpy(), [-3, -4])
    assert run(np.float32([3, 4]) * 1024, np.float32(1)).numpy() == 5.0
    np.testing.assert_allclose(w.numpy(), [-3.6, -4.8], rtol=1e-6)


def test_no_clip_norm_turns_a_zero_gradient_into_nan():
    w = tf.Variable([1.0])
    for clip_norm in (1e-4, 2.0**-126, 1e-40, 1e-50):
        with pytest.raises(scaler.InvalidArgument) if clip_norm < 2.0**-126 else contextlib.nullcontext():
            by_hand(Static(8.0)).apply(plain_descent, [tf.zeros([1])], [w], clip_norm=clip_norm)
        assert w.numpy()[0] == 1.0


def test_the_state_has_the_fields_of_the_strategy():
    loss_scaler = LossScaler(Dynamic(8.0, hysteresis=3))
    loss_scaler.update(Event(tf.constant(False)))
    assert loss_scaler.state == scaler.strategies.DynamicState(8.0, 0, 2)
    assert LossScaler(Static(8.0)).state == scaler.strategies.StaticState(8.0)


def test_a_number_kept_as_a_tensor_never_starts_out_of_bounds():
    high = LossScaler(Dynamic(tf.constant(2.0**60)))
    low = LossScaler(Dynamic(tf.constant(2.0**-60)))
    assert high.loss_scale.numpy() <= 2.0**40
    assert low.loss_scale.numpy() >= 2.0**-14


def test_its_variables_are_not_trained():
    assert LossScaler().trainable_variables == ()
    assert len(LossScaler().variables) == 4


def test_what_is_no_event_no_snapshot_or_no_list_is_named():
    w = tf.Variable([1.0])
    with pytest.raises(scaler.InvalidArgument, match=r"update\(True\): expected hs.Event"):
        LossScaler().update(True)
    with pytest.raises(scaler.InvalidArgument, match=r"rollback=list\): expected hs.snapshot"):
        LossScaler().apply(keras.optimizers.SGD(), [tf.ones([1])], [w], rollback=[w])
    with pytest.raises(scaler.InvalidArgument, match="expected a list of variables"):
        scaler.MasterWeights(keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)]))


def test_printed_it_says_where_it_stands():
    loss_scaler = scaler.LossScaler(scaler.Dynamic(1024.0))
    for finite in (True, True, False):
        loss_scaler.update(scaler.Event(tf.constant(finite)))
    said = "LossScaler(Dynamic(initial_scale=1024.0)): loss scale 512, 2 steps applied, 1 skipped"
    assert repr(loss_scaler) == said
    shown = []
    graph(lambda: shown.append(repr(loss_scaler)))()
    assert shown == ["LossScaler(Dynamic(initial_scale=1024.0))"]
