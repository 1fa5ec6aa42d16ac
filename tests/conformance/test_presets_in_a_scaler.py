"""Guards what a LossScaler needs of a preset: a state that is saved whole, bounds, and policies that raise in time."""

import numpy as np
import originals
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scaler import Event, LossScaler, StuckPolicy, presets
from scaler.outcome.stuck import Reading

SMALL = {
    "chainer": {"interval": 3},
    "deepspeed": {"growth_interval": 3},
    "fairseq": {"growth_interval": 3, "growth_factor": 1.7, "tolerance": 0.4},
    "guided_diffusion": {"growth": 0.3},
    "metaseq": {"growth_interval": 3, "growth_factor": 1.7},
    "mxnet": {"growth_interval": 3},
    "dalle": {},
    "nnabla": {"growth_interval": 2, "growth_factor": 1.7},
    "paddle": {"growth_interval": 3, "backoff_factor": 0.3, "hysteresis": 2},
}
WORD = [letter == "1" for letter in "111100111010"]


def drive(loss_scaler, word):
    scales = []
    for finite in word:
        loss_scaler.update(Event(tf.constant(finite)))
        scales.append(loss_scaler.loss_scale.numpy())
    return scales


@pytest.mark.parametrize("preset", sorted(set(SMALL) - {"deepspeed", "mxnet", "paddle"}))
def test_a_restored_scaler_goes_on_as_the_original_does(preset, tmp_path):
    want = originals.trace(preset, SMALL[preset], WORD)
    strategy = getattr(presets, preset)(**SMALL[preset])
    first = LossScaler(strategy)
    scales = drive(first, WORD[:6])
    path = tf.train.Checkpoint(scaler=first).write(str(tmp_path / "state"))
    second = LossScaler(strategy)
    tf.train.Checkpoint(scaler=second).read(path).assert_consumed()
    np.testing.assert_array_equal(scales + drive(second, WORD[6:]), want)


@pytest.mark.parametrize("preset", SMALL)
def test_a_scale_changed_from_outside_counts(preset):
    strategy = getattr(presets, preset)(**SMALL[preset])
    state = strategy.init()._replace(loss_scale=tf.constant(1024.0))
    scale = strategy.update(strategy.update(state, Event(tf.constant(False))), Event(tf.constant(False))).loss_scale
    steps = {"paddle": 0.3, "dalle": 0.5**0.5, "fairseq": 1 / 1.7**2, "metaseq": 1 / 1.7**2, "nnabla": 1 / 1.7**2}
    lower = {"deepspeed": 0.5, "mxnet": 0.5}
    np.testing.assert_allclose(scale, 1024.0 * steps.get(preset, lower.get(preset, 0.25)), rtol=1e-6)


def first_raise(policy, strategy, word):
    """The first step at which a policy, asked after each step, finds the strategy stuck; None if it never does."""
    state, skipped, row = strategy.init(), 0, 0
    readings = [Reading(0, 0, 0, 0.0)]
    for step, finite in enumerate(word):
        state = strategy.update(state, Event(np.bool_(finite)))
        skipped, row = skipped + (not finite), 0 if finite else row + 1
        readings.append(Reading(step + 1, skipped, row, float(state.loss_scale)))
        if policy.problem(readings, strategy.min_scale, getattr(strategy, "max_scale", 2.0**126)):
            return step
    return None


def their_first_raise(preset, arguments, word):
    original = originals.ORIGINALS[preset](**arguments)
    for step, finite in enumerate(word):
        try:
            original.step(finite)
        except originals.Raises:
            return step
    return None


HYSTERESIS = {"hysteresis": 2, "consecutive_hysteresis": False}
SHARED = st.fixed_dictionaries({"hysteresis": st.integers(1, 3), "consecutive_hysteresis": st.booleans()})


@pytest.mark.slow
@settings(max_examples=30)
@given(word=st.lists(st.sampled_from([True, False, False]), min_size=1, max_size=20), shared=SHARED)
@example(word=[False, False, True, False, True, False, False], shared=HYSTERESIS)
@example(word=[False, False, True, False, True, False, False], shared=HYSTERESIS | {"consecutive_hysteresis": True})
@example(word=[False, False, False], shared=HYSTERESIS)
def test_deepspeeds_policy_raises_at_its_step(word, shared):
    arguments = shared | {"initial_scale": 2.0, "growth_interval": 2}
    for preset in ("deepspeed", "deepspeed_2025_02"):
        raised = first_raise(presets.deepspeed_stuck(**shared), getattr(presets, preset)(**arguments), word)
        assert raised == their_first_raise(preset, arguments, word)


@settings(max_examples=15)
@given(word=st.lists(st.sampled_from([True, False, False]), min_size=1, max_size=30))
def test_fairseqs_policy_raises_at_its_step(word):
    arguments = {"initial_scale": 8.0, "growth_interval": 2, "min_loss_scale": 0.9}
    raised = first_raise(presets.fairseq_stuck(), presets.fairseq(**arguments), word)
    assert raised == their_first_raise("fairseq", arguments, word)


@pytest.mark.parametrize(("least", "kept"), [(1.0, 2.0), (0.99, 1.0)])
def test_fairseq_keeps_the_scale_at_which_it_raises(least, kept):
    strategy = presets.fairseq(8.0, min_loss_scale=least)
    state = strategy.init()
    for _ in range(5):
        state = strategy.update(state, Event(tf.constant(False)))
    assert state.loss_scale.numpy() == strategy.min_scale == kept


def test_a_growth_factor_below_1_shrinks_the_scale_as_in_mindspore():
    arguments = {"initial_scale": 8.0, "growth_factor": 0.5, "growth_interval": 2}
    word = [True] * 8 + [False] * 5
    want = originals.trace("mindspore", arguments, word)
    assert want.min() < 1
    np.testing.assert_array_equal(drive(LossScaler(presets.mindspore(**arguments)), word), want)


def test_mindspores_policy_raises_at_its_step():
    policy, word = presets.mindspore_stuck(), [False] * 1002
    assert their_first_raise("mindspore", {}, word) == 1000
    assert not policy.problem([Reading(1000, 1000, 1000, 1.0)], 1.0, 2.0**126)
    assert policy.problem([Reading(1001, 1001, 1001, 1.0)], 1.0, 2.0**126)


def test_a_policy_at_the_floor_waits_for_a_second_look():
    policy, low, high = presets.fairseq_stuck(), 0.5, 64.0
    start, above = Reading(0, 0, 0, 0.0), Reading(5, 1, 1, 1.0)
    at, again, fine = Reading(6, 2, 2, 0.5), Reading(7, 3, 3, 0.5), Reading(7, 2, 0, 0.5)
    assert isinstance(policy, StuckPolicy)
    assert policy.problem([start, at], low, high) is None
    assert policy.problem([start, above, at], low, high) is None
    assert policy.problem([above, at, at], low, high) is None
    assert policy.problem([above, at, fine], low, high) is None
    assert policy.problem([above, at, again], low, high) == (
        "a step was skipped that was attempted at the lowest loss scale, 0.5"
    )
    assert policy.problem([at, again], 0.5, 0.5) is None
