"""Guards what strategies around other strategies add: bounds, a rising floor, a warm-up, a schedule."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs import scales_of

import scaler
from scaler import Dynamic, Event, Headroom, Histogram, LogNormal, Static
from scaler.strategies import Bounded, RisingFloor, Scheduled, Warmup
from scaler.strategies.nested import inner_of

STEPS = 48


def dynamic(**changes):
    return Dynamic(**{"initial_scale": 8.0, "growth_interval": 2, "min_scale": 2.0**-4, "max_scale": 2.0**8, **changes})


def plain_dynamic(scale, good, finite):
    """One step of `dynamic()` in plain Python: the scale and the count."""
    if not finite:
        return max(scale / 2, 2.0**-4), 0
    return (min(scale * 2, 2.0**8), 0) if good + 1 == 2 else (scale, good + 1)


def bounded(word):
    scale, good, scales = 8.0, 0, []
    for finite in word:
        scale, good = plain_dynamic(scale, good, finite)
        scale = min(max(scale, 3.0), 40.0)
        scales.append(scale)
    return scales


def rising(word):
    scale, good, scales = 8.0, 0, []
    for step, finite in enumerate(word, start=1):
        scale, good = plain_dynamic(scale, good, finite)
        floor = 32.0 if step >= 20 else 4.0 if step >= 5 else 0.0
        scale = max(scale, floor)
        scales.append(scale)
    return scales


def warming(word):
    target, used, good, scales = 8.0, 0.25, 0, []
    for step, finite in enumerate(word, start=1):
        going_on_from = target if finite or step > 10 else used
        target, good = plain_dynamic(going_on_from, good, finite)
        octaves = max(np.log2(target) + 2, 0)
        ceiling = 0.25 * 2.0 ** np.floor(octaves * step / 10)
        used = min(target, ceiling) if step < 10 else target
        scales.append(used)
    return scales


def scheduled(word):
    """Static(2), then from step 6 dynamic(), then from step 20 on dynamic() between 16 and 64."""
    scale, good, scales = 2.0, 0, []
    for step, finite in enumerate(word):
        if step in (6, 20):
            good = 0
        if step >= 6:
            scale, good = plain_dynamic(scale, good, finite)
        if step + 1 >= 20:
            scale = min(max(scale, 16.0), 64.0)
        scales.append(scale)
    return scales


CASES = {
    "Bounded": (Bounded(dynamic(), 3.0, 40.0), bounded),
    "RisingFloor": (RisingFloor(dynamic(), {20: 32.0, 5: 4.0}), rising),
    "Warmup": (Warmup(dynamic(), 10, initial_scale=0.25), warming),
    "Scheduled": (
        Scheduled({0: Static(2.0), 6: dynamic(), 20: dynamic(initial_scale=16.0, min_scale=16.0, max_scale=64.0)}),
        scheduled,
    ),
}


@functools.cache
def compiled(name):
    return tf.function(functools.partial(scales_of, CASES[name][0]))


@pytest.mark.slow_with("Scheduled")
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=20)
@given(word=st.lists(st.booleans(), min_size=STEPS, max_size=STEPS))
def test_scales_equal_plain_python(name, word):
    got = compiled(name)(tf.constant(word)).numpy()
    np.testing.assert_array_equal(got, np.float32(CASES[name][1](word)))


def test_an_overflow_in_the_warm_up_is_of_the_scale_that_was_used():
    strategy = Warmup(Dynamic(2.0**15), 100, initial_scale=2.0**4)
    state = strategy.update(strategy.init(), Event(tf.constant(False)))
    assert (state.loss_scale.numpy(), state.target_scale.numpy()) == (8.0, 8.0)


def test_combinators_of_one_kind_may_hold_each_other():
    strategy = RisingFloor(RisingFloor(dynamic(), {2: 16.0}), {3: 64.0})
    state = strategy.init()
    scales = []
    for _ in range(4):
        state = strategy.update(state, Event(tf.constant(False)))
        scales.append(state.loss_scale.numpy())
    assert scales == [4.0, 16.0, 64.0, 64.0]
    assert (state.floor_steps.numpy(), state.floor_steps_2.numpy()) == (4, 4)
    assert inner_of(inner_of(state))._fields == scaler.strategies.DynamicState._fields


def test_steps_do_not_overflow():
    strategy = RisingFloor(dynamic(), {5: 4.0})
    state = strategy.init()._replace(floor_steps=tf.constant(2**31 - 1))
    assert strategy.update(state, Event(tf.constant(False))).floor_steps.numpy() == 2**31 - 1


def test_needs_and_bounds_are_those_of_the_strategies():
    both = Scheduled({0: LogNormal(), 5: Histogram(edge=8.0, max_scale=2.0**60), 9: Static(2.0**-20)})
    assert both.needs == scaler.strategies.Needs(True, (8.0,))
    assert (both.min_scale, both.max_scale) == (2.0**-20, 2.0**60)
    for wrapped in (Bounded(Headroom(), 1.0, 2.0), RisingFloor(Headroom(), {1: 1.0}), Warmup(Headroom(), 5)):
        assert wrapped.needs == scaler.strategies.Needs(amax=True)
    assert Warmup(dynamic(), 5, initial_scale=2.0**-9).min_scale == 2.0**-9
    assert RisingFloor(dynamic(), {1: 1.0}).max_scale == 2.0**8
    assert (Bounded(dynamic(), 1.0, 2.0).min_scale, Bounded(dynamic(), 1.0, 2.0).max_scale) == (1.0, 2.0)


def test_bounds_may_be_tensors():
    ceiling = tf.Variable(64.0)
    for strategy in (
        RisingFloor(dynamic(max_scale=ceiling), {1: 1.0}),
        Warmup(dynamic(max_scale=ceiling), 1),
        Scheduled({0: dynamic(max_scale=ceiling), 99: dynamic(max_scale=16.0)}),
    ):
        ceiling.assign(64.0)
        loss_scaler = scaler.LossScaler(strategy)
        for _ in range(6):
            loss_scaler.update(Event(tf.constant(True)))
        assert loss_scaler.loss_scale.numpy() == 64.0
        ceiling.assign(32.0)
        assert loss_scaler.loss_scale.numpy() == 32.0


def test_a_scale_that_is_used_late_goes_on_from_the_one_put_in_its_place():
    strategy = scaler.strategies.Scheduled({0: scaler.Static(8.0), 2: scaler.presets.mxnet(growth_interval=100)})
    state, scales = strategy.init(), []
    for finite in (True, True, True, False, True, True):
        state = strategy.update(state, scaler.Event(tf.constant(finite)))
        scales.append(float(state.loss_scale))
    assert scales == [8, 8, 8, 8, 4, 4]
