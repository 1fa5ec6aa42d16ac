"""Guards that strategies count in int64, of which a GPU has variables and kernels, to the values that int32 gives."""

import dataclasses
import inspect

import numpy as np
import pytest
import tensorflow as tf

from scaler import Dynamic, Event, NoScaling, SpikeGuard, Static, presets, strategies
from scaler.layerwise import AdaptiveScale, LayerEvent
from scaler.strategies import Bounded, RisingFloor, Scheduled, Warmup
from scaler.strategies.base import needs_of, takes_int64

STRATEGIES = {
    "Dynamic": Dynamic(growth_interval=2, hysteresis=2, consecutive_hysteresis=True),
    "DelayedAmax": strategies.DelayedAmax(history_length=3),
    "Headroom": strategies.Headroom(headroom=2, memory=2, relax_interval=3),
    "Histogram": strategies.Histogram(period=2, dead_band=1.5),
    "LogNormal": strategies.LogNormal(),
    "Smooth": strategies.Smooth(growth_interval=3, search=True, backoff_interval=2),
    "Static": Static(2.0),
    "NoScaling": NoScaling(),
    "Bounded": Bounded(Dynamic(growth_interval=2), 1.0, 2.0**20),
    "RisingFloor": RisingFloor(Dynamic(growth_interval=2), {3: 1.0, 6: 2.0**16}),
    "Warmup": Warmup(Dynamic(growth_interval=2), 6),
    "Scheduled": Scheduled({0: strategies.Headroom(memory=2), 3: Dynamic(hysteresis=2), 6: strategies.Smooth()}),
    "SpikeGuard": SpikeGuard(Dynamic(growth_interval=2), window=3, share=0.5),
}
SMALL = {"initial_scale": 8.0, "growth_interval": 2, "interval": 2, "tolerance": 0.4, "hysteresis": 2}
PRESETS = [name for name in presets.__all__ if not name.endswith("_stuck")]
WORD = [letter == "1" for letter in "11010011"]
NORMS = [1.0, 2.0, 1.0, 1.0, 300.0, 400.0, 0.0, 500.0]


def strategy_of(name):
    if name in STRATEGIES:
        return STRATEGIES[name]
    make = getattr(presets, name)
    return make(**{key: value for key, value in SMALL.items() if key in inspect.signature(make).parameters})


OTHER_RULES = {type(strategy_of(name)): name for name in PRESETS}
"""A preset of each rule; the others are these with other numbers."""
MACHINES = [*STRATEGIES, *(name for kind, name in OTHER_RULES.items() if kind not in map(type, STRATEGIES.values()))]


def events_for(strategy):
    needs, events = needs_of(strategy), []
    for finite, norm in zip(WORD, NORMS, strict=True):
        size = tf.constant(norm if finite else float("inf"))
        counts = tf.constant([3, 2, 1][: len(needs.edges) + 1], tf.int64) * int(norm)
        seen = {"amax": needs.amax and size, "norm": needs.norm and size, "loss": needs.loss and size}
        seen = {name: value for name, value in seen.items() if value is not False}
        events.append(Event(tf.constant(finite), histogram=counts if needs.edges else None, **seen))
    return events


def with_counts(state, dtype, value=None):
    """The state with its int32 fields in another dtype, or filled with a value."""

    def changed(field):
        if field.dtype != tf.int32:
            return field
        return tf.cast(field if value is None else tf.fill(field.shape, value), dtype)

    return type(state)(*map(changed, state))


def assert_same(found, wanted, message):
    for field, now, was in zip(wanted._fields, found, wanted, strict=True):
        assert now.dtype == (tf.int64 if was.dtype == tf.int32 else was.dtype), field
        np.testing.assert_array_equal(now, was, err_msg=f"{field} {message}")


@pytest.mark.parametrize("name", MACHINES)
def test_int64_gives_what_int32_gives(name):
    strategy = strategy_of(name)
    state = strategy.init()
    traced = tf.function(lambda state, event: strategy.update(state, event), autograph=False)
    wide, kinds = with_counts(state, tf.int64), {tf.int32, *(field.dtype for field in state)}
    for step, event in enumerate(events_for(strategy)):
        state, wide = strategy.update(state, event), traced(wide, event)
        assert {field.dtype for field in state} <= kinds
        assert_same(wide, state, f"after step {step}")
    # What nothing but a damaged checkpoint brings; also without a graph.
    for count in (-7, 2**31 - 2):
        for event in events_for(strategy)[1:3]:
            odd, odd_wide = (with_counts(state, dtype, count) for dtype in (tf.int32, tf.int64))
            assert_same(strategy.update(odd_wide, event), strategy.update(odd, event), f"after {count}")
    assert_nothing_is_computed_in_int32(traced.get_concrete_function(wide, event))


def assert_nothing_is_computed_in_int32(concrete):
    of_int32 = {op.type for op in concrete.graph.get_operations() if tf.int32 in [out.dtype for out in op.outputs]}
    # Of shapes and axes, and places that nobody asks for.
    assert of_int32 <= {"Const", "TopKV2"}


def test_the_rule_for_layers_counts_in_int64():
    rule = AdaptiveScale(growth_interval=2)
    assert takes_int64(rule)
    state, wide = rule.init(), with_counts(rule.init(), tf.int64)
    for finite in WORD:
        event = LayerEvent(tf.constant(finite), *map(tf.constant, (1.0 if finite else float("inf"), 0.1, 1.0, True)))
        state, wide = rule.update(state, event), rule.update(wide, event)
        assert_same(wide, state, "of a layer")


def test_all_strategies_are_here():
    own = {kind for _, kind in inspect.getmembers(strategies, inspect.isclass) if hasattr(kind, "update")}
    assert own - {strategies.Strategy} == {type(strategy) for strategy in STRATEGIES.values()}


@dataclasses.dataclass(frozen=True)
class OfAnother(Static):
    """A strategy that says nothing of its counts."""

    int64_counts = None


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: Bounded(inner, 1.0, 4.0),
        lambda inner: RisingFloor(inner, {3: 1.0}),
        lambda inner: Warmup(inner, 2),
        lambda inner: Scheduled({0: Dynamic(), 3: inner}),
        SpikeGuard,
    ],
)
def test_a_strategy_around_another_counts_as_that_does(around):
    assert takes_int64(around(Dynamic())) is True
    assert takes_int64(around(OfAnother(2.0))) is False


def test_each_is_a_value():
    """With the members of a strategy, and none of them changes behind a scaler. That it takes int64 is no argument."""
    for name, strategy in STRATEGIES.items():
        assert isinstance(strategy, strategies.Strategy), name
        assert strategy == dataclasses.replace(strategy)
        assert hash(strategy) == hash(dataclasses.replace(strategy))
        assert strategy.min_scale <= strategy.init().loss_scale.numpy() <= strategy.max_scale
        with pytest.raises(dataclasses.FrozenInstanceError):
            strategy.growth_interval = 4
    for name in [*STRATEGIES, *PRESETS]:
        strategy = strategy_of(name)
        assert takes_int64(strategy), name
        assert "int64_counts" not in [field.name for field in dataclasses.fields(strategy)]
