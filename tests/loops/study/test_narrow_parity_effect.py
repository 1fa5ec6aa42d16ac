"""Guards the effect of narrow formats: its verdicts are those of the numbers, and all its runs are paired."""

import math
import statistics

import numpy as np
import pytest

import scaler
from loops import tasks
from loops.study.effects import narrow_claims as claims
from loops.study.effects import narrow_parity
from loops.study.effects.narrow_runs import NarrowRuns, Way, first_weights

WHOLE, FITTING, HIGH = claims.TEXT, claims.SCALED[claims.FITTING], claims.SCALED[claims.HIGH]
NOISE = np.array([0.0, 0.01, -0.01, 0.005, -0.005])
"""Nats by seed: its mean is zero, and five seeds show 0.0098 of it."""
GOOD = {
    (WHOLE, "float32"): 3.0,
    (WHOLE, "bfloat16"): 3.0,
    (WHOLE, "FP8"): 3.0,
    (WHOLE, claims.UNSCALED): 9.0,
    (WHOLE, "MXFP8"): 3.005,
    (WHOLE, "MXFP6"): 3.02,
    (WHOLE, claims.WEIGHTS): 3.04,
    (WHOLE, "MXFP4"): 3.2,
    (WHOLE, "NVFP4"): 3.1,
    (WHOLE, claims.RANDOM): 3.03,
    (FITTING, "MXFP8"): 2.994,
    (FITTING, "MXFP6"): 3.0,
    (FITTING, "MXFP4"): 3.5,
    (FITTING, "NVFP4"): 3.1,
    (HIGH, "MXFP8"): 3.0,
    (HIGH, "MXFP6"): 3.0,
    (HIGH, "MXFP4"): 3.8,
    (HIGH, "NVFP4"): 3.1,
    (claims.CNN, "float32"): 0.1,
    (claims.CNN, "FP8"): 0.1,
    (claims.CNN, "MXFP6"): 0.1,
    (claims.CNN, "NVFP4"): 0.1,
}


def losses(means):
    """Losses of five seeds with these means. Each way has noise of its own, a rotation of the same."""
    return {key: mean + np.roll(NOISE, at) for at, (key, mean) in enumerate(means.items())}


def wrong(changes):
    """The numbers of the claims that do not hold."""
    effect = narrow_parity.effect_of(losses({**GOOD, **changes}), 5, 100)
    return [number for number, claim in enumerate(effect.claims) if not claim.holds]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({(WHOLE, "bfloat16"): 3.05}, [0]),
        ({(WHOLE, "FP8"): 3.05}, [1]),
        ({(WHOLE, "MXFP8"): 3.05}, [2]),
        ({(WHOLE, "MXFP6"): 3.06}, [3, 7]),
        ({(FITTING, "MXFP8"): 3.05}, [4, 12]),
        ({(FITTING, "MXFP6"): 3.05}, [5, 13]),
        ({(WHOLE, claims.WEIGHTS): 3.08}, [6]),
        ({(WHOLE, claims.WEIGHTS): 3.02}, [7]),
        ({(WHOLE, claims.RANDOM): 3.07}, [8]),
        ({(WHOLE, claims.RANDOM): 3.1}, [8, 9]),
        ({(WHOLE, "MXFP4"): 3.1}, [10]),
        ({(WHOLE, claims.UNSCALED): 3.0}, [11]),
        ({(WHOLE, "MXFP4"): 3.5}, [14]),
        ({(HIGH, "MXFP4"): 3.5}, [15]),
        ({(FITTING, "NVFP4"): 3.05}, [16, 17]),
        ({(HIGH, "NVFP4"): 3.15}, [17]),
        ({(claims.CNN, "FP8"): 0.2}, [18]),
        ({(claims.CNN, "NVFP4"): 0.2}, [20]),
    ],
)
def test_a_verdict_changes_with_its_numbers(changes, expected):
    base = wrong({})
    assert base in ([], [12]), base
    assert [number for number in wrong(changes) if number not in base or number in expected] == expected


def test_the_least_difference_is_half_of_students_interval():
    values = np.array([0.1, 0.3, 0.2, 0.5, 0.4])
    gap = claims.gap_of(values)
    assert gap.least == pytest.approx(2.776 * statistics.stdev(values) / math.sqrt(5))
    assert (gap.mean, gap.tie) == (pytest.approx(0.3), False)
    assert claims.gap_of(values - 0.2).tie
    assert claims.gap_of(values[:1]).tie
    assert claims.gap_of(np.tile(values, 4)).least == pytest.approx(
        2.262 * statistics.stdev(np.tile(values, 4).tolist()) / math.sqrt(20)
    )


@pytest.mark.parametrize(
    ("name", "factor", "expected"),
    # By hand: 94/95 of 1/512 is 1.979 * 2^-10; 3/4 of it is 1.484 * 2^-10, and 2/3 is 1.319 * 2^-10.
    [
        ("MXFP4", 1, 6 / (4 * 188 / 95)),
        ("MXFP4", 3 / 4, 6 / (4 * 141 / 95)),
        ("MXFP4", 2 / 3, 6 / (4 * 376 / 285)),
        ("MXFP6", 1, 28 / (16 * 188 / 95)),
        ("MXFP6", 3 / 4, 24 / (16 * 141 / 95)),
        ("MXFP6", 2 / 3, 20 / (16 * 376 / 285)),
        ("MXFP8", 1, 448 / (256 * 188 / 95)),
        ("MXFP8", 3 / 4, 384 / (256 * 141 / 95)),
    ],
)
def test_what_a_block_makes_of_its_largest_gradient(name, factor, expected):
    assert len(claims.ALPHABET) == 96
    assert claims.kept(name, factor, 512) == pytest.approx(expected * (94 / 95) / (95 / 96), rel=1e-4)


@pytest.mark.slow
def test_runs_of_one_seed_are_paired():
    """The same weights and batches, whatever ran before: state, slots and scales of tensors begin anew."""
    digits = tasks.load("digits")
    weights = first_weights(digits, 1)
    way = Way(scaler.formats.emulated("float8_e4m3fn"), compiled=False)
    runs = NarrowRuns(way, digits, 5, 1e-2, 16)
    first = runs.run(1, weights)
    assert runs.run(2, first_weights(digits, 2)) != first
    assert runs.run(1, weights, 0.75) != first
    assert runs.run(1, weights) == first
    unrounded = NarrowRuns(Way(scaler.formats.emulated("float32"), compiled=False), digits, 5, 1e-2, 16)
    assert unrounded.run(1, weights) == NarrowRuns(Way(None, compiled=False), digits, 5, 1e-2, 16).run(1, weights)


def test_only_weights_are_in_four_bits():
    rounding = narrow_parity._FourBitWeights("mxfp6_e3m2", "mxfp6_e3m2", None)
    assert [each.format for each in rounding.tensors] == ["mxfp6_e3m2", "mxfp4", "mxfp6_e3m2"]
