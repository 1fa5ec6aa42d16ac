"""Guards the numbers at the edges: every default, every bound of an argument, and where a combinator hands over."""

import math

import numpy as np
import pytest
import tensorflow as tf

import scaler
from scaler import DelayedAmax, Dynamic, Event, Headroom, Histogram, InvalidArgument, LogNormal, Smooth, Static
from scaler.layerwise import AdaptiveScale
from scaler.strategies import Bounded, Needs, RisingFloor, Scheduled, Warmup

LOW, HIGH = 2.0**-14, 2.0**40
KINDS = (Dynamic, Headroom, Histogram, DelayedAmax, LogNormal, Smooth, AdaptiveScale)
NEEDS = {Histogram: Needs(edges=(8188.0,)), **dict.fromkeys((AdaptiveScale, Dynamic, Smooth), Needs())}


def test_limits_defaults(snapshot):
    assert {kind.__name__: vars(kind()) for kind in KINDS} == snapshot
    for kind in KINDS:
        assert getattr(kind(), "needs", Needs()) == NEEDS.get(kind, Needs(amax=True))


def just_above(value):
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


def just_below(value):
    return float(np.nextafter(np.float32(value), np.float32(-np.inf)))


# What is taken at either end, and what is not any more, with what is said then.
EDGES = [
    (Headroom, "headroom", [1, 2**31 - 1], [0, 2**31], r"integer in \[1, 2\^31\), such as 1\."),
    (Headroom, "memory", [1], [0], r"such as 100\."),
    (Headroom, "relax_interval", [1], [0], r"such as 300\."),
    (Histogram, "edge", [2.0**-24, 2.0**100], [just_below(2.0**-24), just_above(2.0**100)], r"in \[2\^-24, 2\^100\]"),
    (Histogram, "threshold", [0, just_below(1)], [just_below(0), 1], r"a share in \[0, 1\)"),
    (Histogram, "period", [1], [0], r"such as 1\."),
    (Histogram, "dead_band", [0, 64], [just_below(0), just_above(64)], r"octaves in \[0, 64\]"),
    (DelayedAmax, "margin", [0, 64, 3.0], [-1, 65, 0.5, just_below(64)], r"whole octaves in \[0, 64\]"),
    (DelayedAmax, "history_length", [1], [0], r"such as 1024\."),
    (DelayedAmax, "algorithm", ["max", "most_recent"], ["min", "Max", ""], "expected one of max, most_recent"),
    (DelayedAmax, "power_of_two", [True, False], [1, None], "True or False"),
    (LogNormal, "log_max", [-126, 126], [just_below(-126), just_above(126)], r"in \[-126, 126\]"),
    (LogNormal, "mean_decay", [2.0**-126, just_below(1)], [0, 1], r"in \(0, 1\)"),
    (LogNormal, "variance_decay", [2.0**-126, just_below(1)], [0, 1], r"in \(0, 1\)"),
    (LogNormal, "deviations", [0, 1000], [just_below(0), just_above(1000)], r"in \[0, 1000\]"),
    (LogNormal, "repaired", [True, False], [0], "True or False"),
    (Smooth, "growth_interval", [1, just_below(2.0**31)], [just_below(1), 2.0**31], r"in \[1, 2\^31\)"),
    (Smooth, "backoff_factor", [2.0**-126, just_below(1)], [just_below(2.0**-126), 1], r"in \[2\^-126, 1\)"),
    (Smooth, "backoff_interval", [1], [0], r"such as 125\."),
    (Smooth, "search", [True, False], [0], "True or False"),
    (AdaptiveScale, "underflow", [2.0**-20, just_below(1)], [0, 1], r"in \(0, 1\)"),
    (AdaptiveScale, "headroom", [1], [0], r"such as 4\."),
    (AdaptiveScale, "growth_interval", [1], [0], r"such as 1000\."),
]


@pytest.mark.parametrize(("kind", "name", "taken", "refused", "says"), EDGES)
def test_limits_of_arguments(kind, name, taken, refused, says):
    for value in taken:
        assert getattr(kind(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(InvalidArgument, match=f"^{name}=.*{says}"):
            kind(**{name: value})


@pytest.mark.parametrize("kind", KINDS)
def test_limits_of_bounds(kind):
    three = {"min_scale": 2.0, "initial_scale": 4.0, "max_scale": 8.0}
    assert kind(**three | {"initial_scale": 2.0}).init().loss_scale == 2.0
    assert kind(**three | {"initial_scale": 8.0}).init().loss_scale == 8.0
    for wrong in ({"initial_scale": 1.0}, {"initial_scale": 16.0}, {"min_scale": 16.0}):
        with pytest.raises(InvalidArgument, match="min_scale <= initial_scale <= max_scale"):
            kind(**three | wrong)
    with pytest.raises(InvalidArgument, match=r"2\^126"):
        kind(max_scale=2.0**127)


REFUSED = [
    lambda: Histogram(edge=tf.constant(1.0)),
    lambda: LogNormal(log_max=math.nan),
    lambda: Headroom(memory=2.5),
    *[lambda kind=kind: kind(format="bfloat17") for kind in (DelayedAmax, Headroom, AdaptiveScale)],
    lambda: DelayedAmax(power_of_two=tf.constant(True)),
    lambda: DelayedAmax(history_length=tf.constant(5)),
    lambda: Bounded(Dynamic, 1.0, 2.0),
    lambda: Bounded(Dynamic(), 2.0, 1.0),
    lambda: Bounded(Dynamic(), 0.0, 1.0),
    lambda: RisingFloor(None),
    lambda: RisingFloor(Dynamic(), {}),
    lambda: RisingFloor(Dynamic(), 5),
    lambda: RisingFloor(Dynamic(), ((1, 2.0, 3.0),)),
    lambda: RisingFloor(Dynamic(), ((1, 8.0), (1, 16.0))),
    *[lambda step=step: RisingFloor(Dynamic(), {step: 8.0}) for step in (-1, 1.5)],
    *[lambda floor=floor: RisingFloor(Dynamic(), {1: floor}) for floor in (0.0, 2.0**-127, tf.constant(1.0))],
    lambda: RisingFloor(Dynamic(), {1: 8.0, 2: 4.0}),
    lambda: RisingFloor(Dynamic(), {1: 2.0, 5: 2.0**41}),
    *[lambda steps=steps: Warmup(Dynamic(), steps) for steps in (0, 2**31, tf.constant(3))],
    *[lambda scale=scale: Warmup(Dynamic(), 5, initial_scale=scale) for scale in (3.0, 0.75, 2.0**41, 2.0**-130)],
    lambda: Warmup(Dynamic(), 5, initial_scale=2.0**-127),
    lambda: Scheduled({}),
    lambda: Scheduled({1: Static(2.0)}),
    lambda: Scheduled({0: Dynamic}),
    *[lambda step=step: Scheduled({0: Static(2.0), step: Static(2.0)}) for step in (2**31, True)],
    lambda: Scheduled({0: Histogram(edge=1.0), 5: Histogram(edge=2.0)}),
]


def test_limits_of_combinations(snapshot):
    said = []
    for make in REFUSED:
        with pytest.raises(InvalidArgument) as caught:
            make()
        said.append(str(caught.value))
    assert said == snapshot


def test_limits_that_combinators_take():
    assert RisingFloor(Dynamic()).floors == ((40_000, 8192.0), (150_000, 32768.0))
    assert RisingFloor(Dynamic(), {0: LOW, 2**31 - 1: HIGH}).floors == ((0, LOW), (2**31 - 1, HIGH))
    assert RisingFloor(Dynamic(), {1: 2.0, 5: 2.0}).floors == ((1, 2.0), (5, 2.0))
    assert Warmup(Dynamic(), 1, initial_scale=HIGH).init().loss_scale == 2.0**15
    assert Warmup(Dynamic(), 5).initial_scale == 1.0
    assert Warmup(Dynamic(), 5, initial_scale=2.0**-126).min_scale == 2.0**-126
    assert Bounded(Dynamic(), 2.0, 2.0).init().loss_scale == 2.0
    assert Scheduled({0: Dynamic(), 2**31 - 1: Static(8.0)}).init().schedule_steps == 0


def finite(strategy, state, steps=1):
    for _ in range(steps):
        state = strategy.update(state, Event(tf.constant(True)))
    return state


def test_limits_of_a_warm_up_to_a_scale_that_is_no_power_of_two():
    strategy = Warmup(Static(13.0), 4)
    state, scales = strategy.init(), []
    for _ in range(6):
        scales.append(float(state.loss_scale))
        state = finite(strategy, state)
    assert scales == [1.0, 1.0, 2.0, 4.0, 13.0, 13.0]
    late = state._replace(warmup_steps=tf.constant(2**31 - 1))
    assert finite(strategy, late).loss_scale == 13.0
    low = Warmup(Dynamic(3.0), 5, initial_scale=4.0)
    assert [float(finite(low, low.init(), n).loss_scale) for n in range(4)] == [3.0] * 4


def test_limits_of_an_overflow_in_the_last_step_of_a_warm_up():
    strategy = Warmup(Dynamic(64.0), 4)
    for steps, target in ((3, 8.0), (4, 32.0)):
        state = strategy.update(finite(strategy, strategy.init(), steps), Event(tf.constant(False)))
        assert state.target_scale == target


def compiled_bounds(strategy):
    return tf.function(lambda: (strategy.min_scale + 0.0, strategy.max_scale + 0.0))()


@pytest.mark.parametrize("low", [0.25, 4.0])
def test_limits_of_bounds_that_are_tensors(low):
    low_now, high_now = tf.Variable(low), tf.Variable(2.0**20)
    moving = Dynamic(8.0, min_scale=low_now, max_scale=high_now)
    cases = [
        (Warmup(moving, 5), min(low, 1.0), 2.0**20),
        (RisingFloor(moving, {1: 2.0}), low, 2.0**20),
        (Scheduled({0: moving, 5: Static(2.0)}), min(low, 2.0), 2.0**20),
        (Scheduled({0: moving, 5: Static(2.0**30)}), low, 2.0**30),
    ]
    for strategy, least, most in cases:
        assert [float(bound) for bound in compiled_bounds(strategy)] == [least, most]
    plain = Scheduled({0: Dynamic(), 5: Static(2.0**50), 9: Static(2.0**-20)})
    assert (plain.min_scale, plain.max_scale) == (2.0**-20, 2.0**50)
    assert type(plain.min_scale) is type(plain.max_scale) is float
    assert type(Warmup(Dynamic(), 5).min_scale) is float


def test_limits_of_steps_at_which_floors_and_strategies_begin():
    floored = RisingFloor(Dynamic(1.0), {2: 4.0, 3: 8.0})
    floored_scales = [float(finite(floored, floored.init(), n).loss_scale) for n in range(5)]
    assert floored_scales == [1.0, 1.0, 4.0, 8.0, 8.0]
    assert RisingFloor(Dynamic(1.0), {0: 4.0}).init().loss_scale == 4.0
    following = Scheduled({0: Static(2.0), 2: Static(8.0), 3: Dynamic(1.0, growth_interval=1)})
    scales = [float(finite(following, following.init(), n).loss_scale) for n in range(6)]
    assert scales == [2.0, 2.0, 8.0, 8.0, 16.0, 32.0]
    last = following.init()._replace(schedule_steps=tf.constant(2**31 - 1))
    assert finite(following, last).schedule_steps == 2**31 - 1


def test_limits_of_a_histograms_share():
    strategy = Histogram(64.0, edge=4.0, threshold=0.25, period=2)

    def after(*counts):
        state = strategy.init()
        for pair in counts:
            state = strategy.update(state, Event(tf.constant(True), histogram=tf.constant(pair, tf.int64)))
        return float(state.loss_scale)

    assert after([3, 1]) == 64.0  # A period has two steps.
    assert after([3, 1], [3, 1]) == 128.0  # A share that is the threshold is not above it.
    assert after([2, 1], [3, 1]) == 32.0
    assert after([0, 4], [0, 4]) == 32.0
    assert after([4, 0], [4, 0]) == 128.0
    banded = Histogram(edge=64.0, dead_band=3.0)
    assert banded.needs.edges == (8.0, 64.0)


def test_limits_of_what_amax_delayed_scaling_takes():
    def after(strategy, amax):
        return float(strategy.update(strategy.init(), Event(tf.constant(True), amax=tf.constant(amax))).loss_scale)

    assert after(DelayedAmax(8.0, history_length=1), 2.0**-127) == 8.0
    assert after(DelayedAmax(8.0, max_scale=2.0**126), 2.0**-60) == 2.0**75
    assert math.isclose(after(DelayedAmax(8.0, power_of_two=False), 3.0), 65504 / 3, rel_tol=1e-6)
    assert scaler.float_format("float16").max == 65504


def test_limits_of_counts_that_a_damaged_checkpoint_brings():
    far = Headroom(headroom=600)
    for distance, kept in ((700, 700), (600 + 512, 600 + 512), (2**31 - 1, 600 + 512), (-5, 600)):
        state = far.init()._replace(distance=tf.constant(distance))
        assert far.update(state, Event(tf.constant(True), amax=tf.constant(1.0))).distance == kept
    long = Histogram(64.0, edge=4.0, period=2**31 - 2)
    event = Event(tf.constant(True), histogram=tf.constant([1, 0], tf.int64))
    state = long.update(long.init()._replace(steps=tf.constant(2**31 - 1)), event)
    assert (float(state.loss_scale), int(state.steps)) == (128.0, 0)
