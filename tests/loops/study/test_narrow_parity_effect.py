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


def losses(means, noise=NOISE):
    """Losses of five seeds with these means. Each way has noise of its own, a rotation of the same."""
    return {key: mean + np.roll(noise, at) for at, (key, mean) in enumerate(means.items())}


def verdicts(changes, noise=NOISE / 100):
    """Whether each claim holds. Noise that small hides no published difference."""
    effect = narrow_parity.effect_of(losses({**GOOD, **changes}, noise), 5, 100)
    return [claim.holds for claim in effect.claims]


def test_all_holds_where_the_seeds_show_small_differences():
    assert verdicts({}) == [True] * 21


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({(WHOLE, "bfloat16"): 3.05}, [0, 2]),
        ({(WHOLE, "FP8"): 3.05}, [1]),
        ({(WHOLE, "MXFP8"): 2.995}, [2]),
        ({(WHOLE, "MXFP6"): 3.06}, [4, 7]),
        ({(FITTING, "MXFP8"): 3.05}, [3, 12]),
        ({(FITTING, "MXFP6"): 3.05}, [5, 13]),
        ({(WHOLE, claims.WEIGHTS): 3.08}, [6]),
        ({(WHOLE, claims.WEIGHTS): 3.02}, [7]),
        ({(WHOLE, claims.RANDOM): 3.07}, [8]),
        ({(WHOLE, claims.RANDOM): 3.11}, [8, 9]),
        ({(WHOLE, "MXFP4"): 3.1}, [10]),
        ({(WHOLE, claims.UNSCALED): 2.9}, [11]),
        ({(WHOLE, "MXFP4"): 3.55}, [14]),
        ({(HIGH, "MXFP4"): 3.45}, [15]),
        ({(FITTING, "NVFP4"): 3.05}, [16, 17]),
        ({(HIGH, "NVFP4"): 3.15}, [17]),
        ({(claims.CNN, "FP8"): 0.2}, [18]),
        ({(claims.CNN, "NVFP4"): 0.2}, [20]),
    ],
)
def test_a_verdict_changes_with_its_numbers(changes, expected):
    assert [number for number, holds in enumerate(verdicts(changes)) if holds is False] == expected


def test_seeds_that_could_not_show_what_is_published_cannot_tell():
    """Among them FP8's 0.2 %, all of the CNN, and MXFP8's loss, which is half of the noise."""
    found = verdicts({}, NOISE)
    assert [number for number, holds in enumerate(found) if holds is None] == [1, 2, 6, 12, 18, 19, 20]
    assert False not in found
    # Two losses that are alike disagree only where a published difference would have been seen.
    assert verdicts({(WHOLE, claims.WEIGHTS): 3.02}, 2 * NOISE)[7] is None
    assert verdicts({(WHOLE, claims.WEIGHTS): 3.005}, 2 * NOISE)[7] is None
    assert verdicts({(WHOLE, "MXFP4"): 3.1}, 2 * NOISE)[10] is None
    assert verdicts({(WHOLE, "MXFP4"): 3.1}, NOISE)[10] is False


def test_the_least_difference_is_half_of_students_interval():
    values = np.array([0.1, 0.3, 0.2, 0.5, 0.4])
    gap = claims.gap_of(values)
    assert gap.least == pytest.approx(2.776 * statistics.stdev(values) / math.sqrt(5))
    assert (gap.low, gap.mean, gap.high) == pytest.approx((0.3 - gap.least, 0.3, 0.3 + gap.least))
    assert claims.gap_of(values[:1]).high == math.inf
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
