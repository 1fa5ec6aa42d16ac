"""Guards the replay: the scales of a real loss scaler, bit for bit, and no silent guess where a trace does not know."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import tables

import loops
import scaler
from loops.replay.stepping import Facts, stepper
from loops.run.strategy_text import parse_strategy
from scaler import observe

STRATEGIES = [
    "headroom:memory=4,relax_interval=5",
    "log_normal:max_scale=2**40",
    "delayed_amax:history_length=3",
    "smooth:growth_interval=2.5",
    "pytorch:growth_interval=2",
    "deepspeed:growth_interval=2",
    "fairseq",
    "dalle",
    "bounded:2,2**18+warmup:7+headroom",
    "rising_floor:5=2**12+dynamic:growth_interval=1",
    "static:1000+then:4+dynamic:growth_interval=1+then:20+smooth",
]


def facts(steps, seed=0):
    """Random limits, and gradients that belong to them."""
    rng = np.random.default_rng(seed)
    limit = np.exp2(rng.normal(16, 4, steps)).astype(np.float32)
    # A scale that is the limit is finite.
    limit[::2] = np.exp2(np.round(np.log2(limit[::2])))
    amax = np.where(rng.random(steps) < 0.1, 0, 2.0**14 / limit).astype(np.float32)
    # Bad data is skipped at any scale.
    of_loss = rng.random(steps) < 0.2
    return np.where(of_loss, np.float32(0), limit), of_loss, amax


def taken(strategy, limit, of_loss, amax):
    """The scales of a real loss scaler that sees the same steps, one event at a time."""
    loss_scaler, used = scaler.LossScaler(strategy), []
    for most, bad, largest in zip(limit, of_loss, amax, strict=True):
        loss_scaler.scale(np.float32(np.nan if bad else 1.0))
        used.append(loss_scaler.loss_scale.numpy())
        finite = bool(used[-1] <= most)
        loss_scaler.update(
            scaler.Event(tf.constant(finite), amax=tf.constant(largest if finite else np.inf, tf.float32))
        )
    return np.array(used), float(loss_scaler.loss_scale)


@pytest.mark.slow_with("pytorch:growth_interval=2")
@pytest.mark.exhaustive_with(*set(STRATEGIES[1:]) - {"pytorch:growth_interval=2"})
@pytest.mark.parametrize("text", STRATEGIES)
def test_the_scales_are_those_of_a_loss_scaler(text):
    strategy, (limit, of_loss, amax) = parse_strategy(text), facts(20)
    needs = scaler.strategies.needs_of(strategy)
    found = stepper(strategy)(Facts(limit, of_loss, amax if needs.amax else None))
    used, final = taken(strategy, limit, of_loss, amax)
    np.testing.assert_array_equal(found.used, used)
    assert found.final == final


class OwnState(NamedTuple):
    loss_scale: tf.Tensor


class Own:
    """A strategy of one's own, with a Python branch, as AutoGraph rewrites it in a step."""

    def init(self):
        return OwnState(tf.constant(8.0))

    def update(self, state, event):
        if event.finite:
            return OwnState(state.loss_scale * 2.0)
        return OwnState(state.loss_scale / 4.0)


class Uncompiled(Own):
    """One that XLA cannot compile."""

    def update(self, state, event):
        return OwnState(tf.py_function(lambda scale: scale * 2.0, [state.loss_scale], tf.float32))


class OtherBits(Own):
    """One whose bits depend on who computes it: XLA joins the product and the sum."""

    def update(self, state, event):
        return OwnState(tf.where(event.finite, state.loss_scale * 1.1 + 0.3, state.loss_scale * 0.3 + 0.7))


@pytest.mark.slow
@pytest.mark.exhaustive_with("strategy0", "strategy2")
@pytest.mark.parametrize("strategy", [Uncompiled(), OtherBits(), scaler.strategies.Bounded(Own(), 1.0, 64.0)])
def test_strategies_of_ones_own(strategy):
    limit, of_loss, _ = facts(30)
    graph = tf.function(lambda state, event: strategy.update(state, event))
    state, used = strategy.init(), []
    for most, bad in zip(limit, of_loss, strict=True):
        state = scaler.strategies.usable_state(strategy, state)
        used.append(state.loss_scale.numpy())
        state = state if bad else graph(state, scaler.Event(tf.constant(bool(used[-1] <= most))))
    np.testing.assert_array_equal(stepper(strategy)(Facts(limit, of_loss)).used, used)


def dynamic(critical, interval, scale=2.0**15):
    """The scales and skips of `Dynamic` in plain Python."""
    good, scales, skips = 0, [], 0
    for most in critical:
        scales.append(scale)
        if scale > most:
            good, scale, skips = 0, max(scale / 2, 2.0**-14), skips + 1
        else:
            good += 1
            if good == interval:
                good, scale = 0, min(scale * 2, 2.0**40)
    return scales, skips, scale


@settings(max_examples=20)
@given(st.lists(st.integers(5, 24), min_size=24, max_size=24), st.sampled_from([1, 3]))
def test_a_whole_replay_is_the_rule_in_plain_python(exponents, interval):
    critical = np.exp2(exponents)
    found = loops.observe.replay(tables(65504 / critical), f"dynamic:growth_interval={interval}")
    scales, skips, final = dynamic(critical, interval)
    (one,) = found.strategies
    assert one.scales.tolist() == scales
    assert (found.steps, one.skips, one.final_scale) == (len(scales), skips, final)
    assert one.skip_rate == skips / len(scales)
    assert one.mean_log2_scale == pytest.approx(np.mean(np.log2(scales)))
    assert one.uncertain == 0


def outcome(at, **trace):
    """Of one step at a static scale: whether it is skipped, and whether that is uncertain."""
    (one,) = loops.observe.replay(tables(**trace), f"static:{at!r}").strategies
    return one.skips, one.uncertain


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(2.0**10, (0, 0)), (2.0**11, (1, 0)), (1020.0, (0, 0)), (1400.0, (0, 0)), (1540.0, (1, 0)), (2.0**-10, (0, 0))],
)
def test_between_powers_of_two_the_largest_gradient_decides(scale, expected):
    # It is infinite from the scale 1535.6 on.
    assert outcome(scale, gradient=[65520 / 1535.6]) == expected


@pytest.mark.parametrize(
    ("scale", "expected"), [(2.0**8, (1, 0)), (2.0**9, (1, 0)), (2.0**7, (0, 1)), (1.0, (0, 1)), (250.0, (0, 1))]
)
def test_a_skipped_step_is_skipped_at_its_scale_and_above_and_unsure_below(scale, expected):
    assert outcome(scale, gradient=[1e4], scale=2.0**8) == expected


def test_a_step_of_an_uncertain_format_is_skipped_above_the_lower_end():
    wide = {"critical_low": [2.0**9], "critical_high": [2.0**60]}
    assert outcome(2.0**9, gradient=[100.0], **wide) == (0, 0)
    assert outcome(2.0**10, gradient=[100.0], **wide) == (1, 1)
    assert outcome(2.0**62, gradient=[100.0], **wide) == (1, 0)


def test_an_applied_step_is_finite_at_its_scale_whatever_was_measured():
    masked = {"critical_low": [0.0], "critical_high": [0.0], "applied": [True], "cause": [None]}
    assert outcome(2.0**4, gradient=[1.0], scale=2.0**4, **masked) == (0, 0)
    assert outcome(2.0**5, gradient=[1.0], scale=2.0**4, **masked) == (0, 1)
    assert outcome(2.0**16, gradient=[1.0], scale=2.0**4, **masked) == (1, 1)


@pytest.mark.parametrize("cause", ["LOSS", "BACKWARD", "TOO_LARGE", "UPDATE"])
def test_what_no_scale_helps_is_skipped_at_each(cause):
    skipped = {"applied": [False], "cause": [cause]}
    assert outcome(2.0**-14, gradient=[1.0], **skipped) == (1, 0)
    assert outcome(2.0**15, gradient=[1.0], **skipped) == (1, 0)


def test_bad_data_leaves_the_strategy_alone_unless_it_sees_every_step():
    trace = tables(
        [1.0] * 6, applied=[True, False, False, True, False, True], cause=[None, "LOSS", "LOSS", None, "UPDATE", None]
    )
    ours, theirs = loops.observe.replay(trace, ["dynamic:growth_interval=2", "dynamic:sees_every_step=True"]).strategies
    assert np.log2(ours.scales).tolist() == [15, 15, 15, 15, 16, 15]
    assert np.log2(theirs.scales).tolist() == [15, 15, 14, 13, 13, 12]
    assert ours.skips == theirs.skips == 3


def test_a_spike_is_finite_at_its_scale():
    """The strategy that is replayed is no guard, and would have applied it."""
    spike = {"applied": [False], "cause": ["SPIKE"], "scale": 2.0**4}
    assert outcome(2.0**4, gradient=[1.0], **spike) == (0, 0)
    assert outcome(2.0**-14, gradient=[1.0], **spike) == (0, 0)


def test_a_window_overflows_where_its_first_micro_batch_does():
    windows = {"attempted": [False, True, False, True, False], "applied": [False, True, False, True, False]}
    trace = tables([1.0, 40.0, 1.0, 1.0, 1e4], **windows, cause=[None] * 5)
    found = loops.observe.replay(trace, ["static:2048", "static:1024"])
    assert found.steps == 2
    assert found.numbers.tolist() == [2, 4]
    assert [one.skipped.tolist() for one in found.strategies] == [[True, False], [False, False]]


def test_several_traces_begin_anew_and_are_summed():
    one, other = tables([1.0] * 3), tables([100.0] * 3)
    found = loops.observe.replay([one, other], "dynamic:growth_interval=1,initial_scale=1024").strategies[0]
    assert found.scales.tolist() == [1024, 2048, 4096, 1024, 512, 1024]
    assert (found.skips, found.final_scale) == (2, 512)


def test_floor_and_ceiling():
    found = loops.observe.replay(tables([1.0] * 4), ["dynamic:initial_scale=8,growth_interval=1,max_scale=32", "none"])
    assert [(one.at_floor, one.at_ceiling) for one in found.strategies] == [(0.0, 0.5), (None, None)]


counts = {2: {observe.ZERO: 5, observe.bin_of(-24): 3, observe.bin_of(-20): 2}}


@pytest.mark.parametrize(
    ("scale", "share"), [(2.0**4, 0.0), (2.0**3, 0.3), (2.0**-2, 0.5), (10.0, 0.0), (2.0**40, None)]
)
def test_what_is_flushed(scale, share):
    """A half of the smallest float16 number is zero, and a number of the octave -20 at 2^-6 of it is."""
    found = loops.observe.replay(tables([1.0] * 3, counts=counts), f"static:{scale!r}")
    assert found.strategies[0].flushed == share


def test_without_histograms_nothing_is_said_to_be_flushed():
    assert loops.observe.replay(tables([1.0] * 3), "static:1").strategies[0].flushed is None


@pytest.mark.slow
def test_a_histogram_is_moved_to_the_replayed_scale():
    rng, strategy = np.random.default_rng(0), scaler.Histogram(2.0**14, period=2, dead_band=0, threshold=0.1)
    octaves = [observe.bin_of(exponent) for exponent in range(-3, 9)]
    recorded = {step: {observe.ZERO: 3, **{one: int(rng.integers(9)) for one in octaves}} for step in range(1, 41)}
    found = loops.observe.replay(tables([40.0] * 40, counts=recorded), strategy).strategies[0]
    loss_scaler, used = scaler.LossScaler(strategy), []
    for bins in recorded.values():
        used.append(float(loss_scaler.loss_scale))
        magnitudes = [1.5 * 2.0 ** (place - observe.bin_of(0)) / 16 * used[-1] for place in bins]
        values = np.repeat(magnitudes, list(bins.values()))
        edges = scaler.strategies.needs_of(strategy).edges
        histogram = scaler.gradients.histogram([tf.constant(values, tf.float32)], edges)
        loss_scaler.update(scaler.Event(tf.constant(used[-1] * 40 < 65520), histogram=histogram))
    assert found.scales.tolist() == used
    assert len(set(used)) > 2


def test_the_largest_gradient_is_that_of_the_weights():
    """At 2^10 headroom sees a gradient of 2^-3, whatever scale the trace was recorded at."""
    for recorded in (1.0, 2.0**6):
        found = loops.observe.replay(tables([1.0] * 3, recorded, weight=[2.0**-3] * 3), "headroom").strategies[0]
        assert found.scales.tolist() == [2.0**15, 2.0**17, 2.0**16]


LACKING = {
    "replicas": ("headroom", {"lacks": ("replicas",)}),
    "micro-batches": ("headroom", {"lacks": ("micro-batches",)}),
    "weights": ("headroom", {"lacks": ("weights",)}),
    "histograms": ("histogram", {}),
    "an edge": ("histogram:edge=1000", {"counts": {1: {0: 1}}}),
    "histograms of micro-batches": ("histogram", {"counts": {1: {0: 1}}, "lacks": ("micro-batches",)}),
    "powers of two": ("histogram", {"counts": {1: {0: 1}}, "scale": 3.0}),
    "limits": ("dynamic", {"critical_low": np.array([np.nan])}),
    "finite limits": ("dynamic", {"critical_low": [math.inf]}),
    "a scale": ("dynamic", {"loss_scale": np.array([np.nan])}),
    "steps": ("dynamic", {"gradient": []}),
}


@pytest.mark.parametrize("name", LACKING)
def test_what_a_trace_lacks_is_named(snapshot, name):
    strategy, trace = LACKING[name]
    with pytest.raises(loops.LoopError) as error:
        loops.observe.replay(tables(**{"gradient": [1.0], **trace}), strategy)
    assert str(error.value) == snapshot


REFUSED = {
    "a misspelt name": ["dynamc"],
    "one twice": ["dynamic", "dynamic"],
    "a guard": ["spike_guard+dynamic"],
    "none": [],
    "a number": 3,
    "a scale between powers of two": ["histogram:initial_scale=3000"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_strategy_is_refused(snapshot, name):
    with pytest.raises(scaler.InvalidArgument) as error:
        loops.observe.replay(tables([1.0], counts={1: {0: 1}}), REFUSED[name])
    # Without the names of all strategies.
    assert str(error.value).partition("? expected")[0] == snapshot
