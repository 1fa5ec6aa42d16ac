"""Guards that each preset's scale is the original's after every step, for words and arguments of all kinds.

The originals here are the rules written again in plain Python; `test_against_peers.py` has the real packages.
"""

import inspect

import golden
import numpy as np
import originals
import pytest
import tensorflow as tf
import words
from rigs import scales_of
from words import CASES, ORDERED

import scaler
from scaler import Event, LossScaler, StuckError, presets

STRATEGIES = [name for name in presets.__all__ if not name.endswith("_stuck")]
VARIANTS = [(preset, fixed) for preset, (_, variants) in CASES.items() for fixed in variants]


@pytest.mark.slow_with("apex-{}")
@pytest.mark.parametrize(("preset", "fixed"), VARIANTS, ids=str)
def test_scales_are_those_of_the_rule(preset, fixed):
    rng = np.random.default_rng(0)
    finite = words.random_words(rng, words=84)
    varied = words.arguments(rng, CASES[preset][0].split(), preset in ORDERED, words=84)
    got = words.scales(preset, finite, fixed, varied)
    for column, word in enumerate(finite.T):
        own = fixed | {name: values[column] for name, values in varied.items()}
        want = originals.trace(preset, own, word)
        np.testing.assert_array_equal(got[: len(want), column], want, err_msg=str(own))
    assert got.min() >= 2.0**-126
    assert got.max() <= 2.0**126


def scales_by_name(preset, arguments, finite):
    """The scales for words of the shape [steps, words] of one set of arguments: what may vary is given as tensors."""
    parameters = inspect.signature(getattr(presets, preset)).parameters
    given = {name: parameter.default for name, parameter in parameters.items()} | arguments
    names = [name for name in CASES[preset][0].split() if given[name] is not None]
    varied = {name: [given.pop(name)] * finite.shape[1] for name in names}
    return words.scales(preset, finite, given, varied)


def scales_and_refusals(strategy, policy, word):
    """The scales of a LossScaler after each step, and the steps at which the policy raises."""
    loss_scaler, scales, raised = LossScaler(strategy, stuck=policy), [], []
    for step, finite in enumerate(word):
        loss_scaler.update(Event(finite))
        scales.append(loss_scaler.loss_scale.numpy())
        try:
            loss_scaler.check()
        except StuckError:
            raised.append(step)
    return scales, raised


@pytest.mark.parametrize("preset", sorted({case.preset for case in golden.GOLDEN}))
def test_scales_are_those_recorded(preset):
    cases = [case for case in golden.GOLDEN if case.preset == preset]
    shortest = min((case.word for case in cases if case.scales.endswith("raises")), key=len, default=None)
    for case in cases:
        recorded = case.scales.split()
        raises = recorded[-1] == "raises"
        want = np.array(recorded[: len(recorded) - raises], np.float32)
        word = np.array([letter == "1" for letter in case.word])
        assert len(word) == len(recorded)
        np.testing.assert_array_equal(originals.trace(preset, case.arguments, word), want, err_msg=str(case))
        found = scales_by_name(preset, case.arguments, word[:, None])[: len(want), 0]
        np.testing.assert_array_equal(found, want, err_msg=str(case))
        if case.word == shortest:
            policy = getattr(presets, preset.removesuffix("_2025_02") + "_stuck")()
            scales, raised = scales_and_refusals(getattr(presets, preset)(**case.arguments), policy, word)
            np.testing.assert_array_equal(scales, [*want, want[-1]], err_msg=str(case))
            assert raised == [len(want)], case


@pytest.mark.parametrize("preset", STRATEGIES)
def test_every_preset_has_bounds_around_what_it_does(preset):
    required = {"initial_scale": 8.0, "growth_interval": 4} if preset == "tf_contrib" else {}
    arguments = required | ODD.get(preset, {})
    strategy = getattr(presets, preset)(**arguments)
    low, high = getattr(strategy, "min_scale", 2.0**-126), getattr(strategy, "max_scale", 2.0**126)
    assert 2.0**-126 <= low <= high <= 2.0**126
    # Side by side: finite for ever, and never.
    scales = scales_by_name(preset, arguments, np.tile([[True, False]], [200, 1]))
    assert np.all(np.float32(low) <= scales)
    assert np.all(scales <= np.float32(high))
    if preset in ("fairseq", "metaseq", "chainer", "deepspeed"):
        assert scales[-1, 1] == np.float32(low)


@pytest.mark.parametrize("preset", STRATEGIES)
def test_each_preset_is_compared_and_has_its_defaults(preset):
    parameters = inspect.signature(getattr(presets, preset)).parameters
    ours = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert ours == originals.defaults(preset)
    varied, fixed = CASES[preset]
    assert set(varied.split()) | {name for variant in fixed for name in variant} == set(parameters)


# Factors that are no powers of two, so that any other arithmetic shows.
ODD = {
    "chainer": {"interval": 7},
    "deepspeed": {"growth_factor": 1.7, "growth_interval": 3},
    "deepspeed_2025_02": {"growth_factor": 3.0, "growth_interval": 3},
    "fairseq": {"growth_factor": 1.7, "growth_interval": 3, "tolerance": 0.3},
    "flax": {"growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3},
    "guided_diffusion": {"growth": 0.123},
    "jmp": {"growth_factor": 3.0, "growth_interval": 3, "min_scale": 0.01},
    "metaseq": {"growth_factor": 1.7, "growth_interval": 3},
    "mindspore": {"growth_factor": 3.0, "growth_interval": 3},
    "nnabla": {"growth_factor": 3.0, "growth_interval": 2},
    "openseq2seq_backoff": {"growth_factor": 3.0, "growth_interval": 3, "min_scale": 0.01},
    "paddle": {"growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3},
    "pytorch": {"growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3},
    "tf_contrib": {"initial_scale": 1000.0, "growth_factor": 1.7, "growth_interval": 3},
    "tf_keras": {"growth_factor": 1.7, "growth_interval": 3},
}
SMALL = {"growth_interval": 3}


def small(preset):
    """Arguments under which something happens in a short word."""
    few = SMALL if "growth_interval" in inspect.signature(getattr(presets, preset)).parameters else {}
    return ODD.get(preset, few)


def test_scales_are_those_of_the_rule_for_numbers_of_python():
    word = np.array([letter == "1" for letter in "1110111"])
    for name in STRATEGIES:
        got = scales_of(getattr(presets, name)(**small(name)), tf.constant(word))
        np.testing.assert_array_equal(got, originals.trace(name, small(name), word), err_msg=name)


# What the docstrings say of the defaults: non-finite steps in a row, and growths, after which the two part.
PARTING = {
    "apex": (143, None),
    "colossalai": (144, 111),
    "fairscale": (143, 111),
    "flax": (None, 111),
    "guided_diffusion": (147, None),
    "jmp": (None, 112),
    "keras": (142, 112),
    "megatron": (None, 95),
    "mindspore": (1001, 103),
    "mxnet": (144, None),
    "nemo": (143, 111),
    "nnabla": (130, 124),
    "paddle": (143, 111),
    "paddle_static": (None, 111),
    "pytorch": (143, 111),
    "tf_keras": (None, 112),
    "deepspeed": (18, 111),
    "fairseq": (29, 112),
}


@pytest.mark.parametrize("preset", PARTING)
def test_the_two_part_where_the_docstring_says(preset):
    skips, growths = PARTING[preset]
    survived = len(originals.trace(preset, {}, [False] * 1100))
    assert survived == (1100 if skips is None else skips - 1)
    if growths is not None:
        start = inspect.signature(getattr(presets, preset)).parameters["initial_scale"].default
        scales = originals.trace(preset, {"growth_interval": 1}, [True] * 1100)
        assert np.count_nonzero(np.diff([start, *scales])) == growths - 1


@pytest.mark.parametrize(
    ("preset", "bad"),
    [
        ("pytorch", {"initial_scale": 0.0}),
        ("pytorch", {"initial_scale": 2.0**127}),
        ("megatron", {"min_scale": 2.0**33}),
        ("apex", {"max_scale": float("inf")}),
        ("apex", {"min_scale": 8.0, "max_scale": 4.0}),
        ("openseq2seq_backoff", {"min_scale": 8.0, "max_scale": 4.0}),
        ("colossalai", {"min_scale": 8.0, "max_scale": 4.0}),
        ("metaseq", {"growth_interval": 1.5}),
        ("mxnet", {"max_scale": 1.0}),
        ("openseq2seq_backoff", {"min_scale": None}),
        ("optax_apply_if_finite_stuck", {"max_consecutive_errors": 0}),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(preset, bad):
    with pytest.raises(scaler.InvalidArgument, match=str(next(iter(bad)))):
        getattr(presets, preset)(**bad)
