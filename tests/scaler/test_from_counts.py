"""Guards what `observe` says of a cast from counts alone, against the casts themselves, value by value."""

import math

import numpy as np
import pytest
import tensorflow as tf
from exponent_cases import EDGES, FORMATS, patterns_at, reference, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

import scaler
from scaler import observe

HALF = scaler.float_format("float16")
NAMES = tuple(FORMATS)


def wide(values):
    """As float64, signalling NaN too."""
    with np.errstate(invalid="ignore"):
        return np.float64(values)


def real(values, name):
    """The values after a real cast, as float64. ml_dtypes casts a float32 directly, NumPy a float64 to float16."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        assert name == "float16" or np.array_equal(np.float32(values), values, equal_nan=True)
        return np.float64(np.asarray(values if name == "float16" else np.float32(values)).astype(FORMATS[name]))


def shares(values, name):
    """What the cast makes of values: zero, made zero, subnormal, overflowing; and of which it says nothing."""
    form, after = scaler.float_format(name), np.abs(real(values, name))
    small = (after > 0) & (after < form.smallest_normal)
    too_large = (np.isinf(after) | np.isnan(after)) & ~np.isnan(values)
    zero = after == 0
    return {
        "zero": zero.mean(),
        "underflow": (zero & (values != 0)).mean(),
        "subnormal": small.mean(),
        "overflow": too_large.mean(),
    }


def contains(interval, number):
    return interval.low - 1e-12 <= number <= interval.high + 1e-12


def headroom(values, name):
    magnitudes = np.abs(values[~np.isnan(values)])
    amax = magnitudes.max(initial=0.0)
    return math.inf if amax == 0 else math.log2(scaler.float_format(name).max) - math.log2(amax)


def at_the_limits(name="float32"):
    """Values at the limits of all formats, and any others."""
    special = sorted({pattern for edge in EDGES for pattern in patterns_at(name, edge)})
    sign = 1 << (31 if name == "float32" else 15)
    patterns = st.sampled_from(special + [sign | pattern for pattern in special]) | st.integers(0, 2 * sign - 1)
    return st.lists(patterns, min_size=1, max_size=12).map(lambda found: wide(values_of(found, name)))


def without_inexact(values, *scales):
    """Zeros in place of values that lose bits at a scale in float32: no reference is exact for them."""
    for scale in scales:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            exact = (np.float32(values * scale) == values * scale) | np.isnan(values)
        values = np.where(exact, values, 0.0)
    return values


POWERS = st.integers(-40, 40).map(lambda power: 2.0**power)


@given(at_the_limits(), st.sampled_from(NAMES), POWERS | st.just(1.0))
def test_what_is_said_of_a_cast_holds(values, name, scale):
    values = without_inexact(values / scale, 1.0, scale)
    said = observe.cast(reference(values), scaler.float_format(name), scale)
    assert (said.values, said.unknown) == (len(values), 0.0)
    for share, number in shares(values * scale, name).items():
        assert contains(getattr(said, share), number), share
    assert contains(said.headroom, headroom(values * scale, name))


@given(st.data(), st.sampled_from(["float16", "bfloat16"]), st.sampled_from(NAMES), POWERS)
def test_what_is_said_of_16_bit_values_holds(data, counted, name, scale):
    """Of values that were multiplied by a scale, at that scale."""
    values = data.draw(at_the_limits(counted))
    source = observe.Source(scaler.float_format(counted), scale)
    said = observe.cast(reference(values), scaler.float_format(name), scale, source)
    for share, number in shares(values, name).items():
        assert contains(getattr(said, share), number), share


@given(at_the_limits(), st.sampled_from(["float16", "bfloat16"]), st.sampled_from(NAMES), POWERS, st.integers(-12, 12))
def test_what_is_said_of_censored_values_holds(values, counted, name, seen_at, octaves):
    """The values as they were before they were scaled and cast to the format that was counted."""
    scale = seen_at * 2.0**octaves
    values = without_inexact(values / seen_at, 1.0, seen_at, scale)
    source = observe.Source(scaler.float_format(counted), seen_at, censored=True)
    said = observe.cast(reference(real(values * seen_at, counted)), scaler.float_format(name), scale, source)
    for share, number in shares(values * scale, name).items():
        assert contains(getattr(said, share), number), share
    assert contains(said.headroom, headroom(values * scale, name))


@pytest.mark.parametrize(
    ("value", "zero", "subnormal", "overflow"),
    [
        (2.0**-26, (1, 1), (0, 0), (0, 0)),
        (2.0**-25, (0, 1), (0, 1), (0, 0)),
        (2.0**-24, (0, 0), (1, 1), (0, 0)),
        # Rounded to the smallest normal number if it lies half a step below.
        (2.0**-15, (0, 0), (0, 1), (0, 0)),
        (2.0**-14, (0, 0), (0, 0), (0, 0)),
        (32768.0, (0, 0), (0, 0), (0, 1)),
        (65536.0, (0, 0), (0, 0), (1, 1)),
        (np.inf, (0, 0), (0, 0), (1, 1)),
        (np.nan, (0, 0), (0, 0), (0, 0)),
        (0.0, (1, 1), (0, 0), (0, 0)),
    ],
)
def test_the_answer_is_open_only_where_a_bin_lies_across_a_limit(value, zero, subnormal, overflow):
    said = observe.cast(reference([value]), HALF)
    assert (said.zero, said.subnormal, said.overflow) == (zero, subnormal, overflow)


def test_values_of_the_format_itself_are_known_exactly():
    every = values_of(np.arange(2**16), "float16")
    counts = observe.exponents(tf.constant(every))
    said = observe.cast(counts, HALF, source=observe.Source(HALF))
    for share, number in shares(wide(every), "float16").items():
        assert getattr(said, share) == (number, number), share
    assert said.zero.low == 2 / 2**16
    assert observe.cast(reference([3.0]), HALF, source=observe.Source(HALF)).sqnr == (math.inf, math.inf)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_at_the_scale_and_in_the_format_of_the_counts_only_nan_is_open(name):
    """What lies within half a step of a value was rounded to it, and would be again."""
    form, every = scaler.float_format(name), values_of(np.arange(2**15), name)
    nan = np.isnan(wide(every)).mean()
    said = observe.cast(reference(every), form, 2.0**7, observe.Source(form, 2.0**7, censored=True))
    actual = shares(wide(every), name)
    for share in ("zero", "subnormal", "overflow"):
        assert getattr(said, share) == pytest.approx((actual[share], actual[share] + nan)), share
    assert said.unknown == nan


def test_what_a_censored_count_cannot_know_is_unknown():
    seen = observe.Source(HALF, 2.0**10, censored=True)
    counts = reference([0.0, np.inf, np.nan, 1.0])
    same = observe.cast(counts, HALF, 2.0**10, seen)
    assert same.unknown == 0.25, "only the NaN: at the same scale a zero is zero and an infinity infinite"
    assert (same.zero, same.overflow) == ((0.25, 0.5), (0.25, 0.5))
    assert same.underflow == (0.0, 0.5), "the zero may always have been one"
    higher = observe.cast(counts, HALF, 2.0**12, seen)
    assert (higher.unknown, higher.zero, higher.overflow) == (0.5, (0.0, 0.5), (0.25, 0.5))
    lower = observe.cast(counts, HALF, 2.0**8, seen)
    assert (lower.unknown, lower.zero, lower.overflow) == (0.5, (0.25, 0.5), (0.0, 0.5))
    assert lower.sqnr == (-math.inf, math.inf)
    assert observe.best_scale(counts, HALF, seen).low == 0.0
    assert observe.best_scale(reference([np.inf]), HALF, seen) == (0.0, 2.0**9)
    assert observe.cast(reference([np.inf]), HALF, 1.0, seen).headroom == (-math.inf, pytest.approx(10, abs=1e-3))


@settings(max_examples=30)
@given(at_the_limits().map(lambda values: without_inexact(values, 2.0**-60, 2.0**60)), st.sampled_from(NAMES[:2]))
def test_the_best_scale_is_the_last_one_at_which_nothing_overflows(values, name):
    values = values[(np.abs(values) < 2.0**60) & (np.abs(values) > 2.0**-60)]
    if not len(values):
        with pytest.raises(scaler.InvalidArgument, match="nothing was counted"):
            observe.best_scale(reference(values), scaler.float_format(name))
        return
    found = observe.best_scale(reference(values), scaler.float_format(name))
    lost = {
        power: (real_share["overflow"], real_share["zero"], real_share["subnormal"])
        for power in range(-50, 50)
        for real_share in [shares(np.float64(values * 2.0**power), name)]
        if np.array_equal(np.float32(values * 2.0**power), values * 2.0**power)
    }
    least = min(lost.values())
    best = {2.0**power for power, losses in lost.items() if losses == least}
    if found.low > 2.0**-50 and found.high < 2.0**49:
        assert best & {found.low, found.high}
    assert found.high <= 2 * found.low


def test_of_infinities_no_scale_is_good_and_of_zeros_every_one():
    assert observe.best_scale(reference([np.inf]), HALF) == (0.0, 0.0)
    assert observe.best_scale(reference([0.0, np.nan]), HALF) == (2.0**126, 2.0**126)


def test_of_nothing_there_is_no_best_scale():
    with pytest.raises(scaler.InvalidArgument, match=r"nothing was counted.*watch\(every="):
        observe.best_scale(reference([]), HALF)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
@pytest.mark.parametrize("power", [0, -10, -20])
@pytest.mark.parametrize("kind", ["normal", "log-normal", "uniform"])
def test_the_rounding_error_is_near_the_real_one(name, power, kind):
    rng = np.random.default_rng(0)
    drawn = {"normal": rng.normal(0, 1, 4000), "log-normal": rng.lognormal(0, 1, 4000), "uniform": rng.random(4000)}
    values = np.float64(np.float32(drawn[kind] * 2.0**power))
    after = real(values, name)
    actual = 10 * math.log10((values**2).sum() / ((after - values) ** 2).sum())
    said = observe.cast(reference(values), scaler.float_format(name)).sqnr
    assert said.high == pytest.approx(actual, abs=1.5)
    assert said.low == said.high


def test_every_value_of_one_format_in_another():
    """Here the model is exact: all values of a bin are equally frequent."""
    every = np.float64(values_of(np.arange(1, 0x7B00), "float16"))
    for name in ("bfloat16", "float8_e5m2"):
        for exponents in ((-24, 14), (-24, -14), (-18, -17), (-17, -16)):
            values = every[(every >= 2.0 ** exponents[0]) & (every < 2.0 ** exponents[1])]
            noise = ((real(values, name) - values) ** 2).sum()
            said = observe.cast(reference(values), scaler.float_format(name), source=observe.Source(HALF)).sqnr.high
            if noise == 0:
                assert said == math.inf
            else:
                assert said == pytest.approx(10 * math.log10((values**2).sum() / noise), abs=1e-9)


def test_hidden_zeros_widen_the_rounding_error():
    values = np.float64(np.float32(np.random.default_rng(0).lognormal(-17, 3, 4000)))
    counts = reference(real(values, "float16"))
    source = observe.Source(HALF, 1.0, censored=True)
    for scale in (1.0, 4.0, 0.25):
        after = real(values * scale, "float16")
        actual = 10 * math.log10(((values * scale) ** 2).sum() / ((after - values * scale) ** 2).sum())
        said = observe.cast(counts, HALF, scale, source).sqnr
        assert said.low - 0.5 <= actual <= said.high + 0.5
    assert said.low < said.high


def test_no_values():
    said = observe.cast(np.zeros(observe.BINS, np.int64), HALF)
    assert (said.values, said.zero, said.headroom) == (0, (0.0, 0.0), (math.inf, math.inf))
    assert said.sqnr == (math.inf, math.inf)


@pytest.mark.parametrize("counts", [[1, 2], np.zeros(observe.BINS), np.full(observe.BINS, -1)])
def test_what_are_no_counts_is_refused(counts):
    for ask in (observe.cast, observe.best_scale):
        with pytest.raises(scaler.InvalidArgument, match="expected 280 integers"):
            ask(counts, HALF)


def test_other_arguments_are_refused():
    counts = reference([1.0])
    for scale in (3.0, 0.0, -2.0, 2.0**127, math.nan, "1", 1 + 1e-12):
        with pytest.raises(scaler.InvalidArgument, match="scale="):
            observe.cast(counts, HALF, scale)
        with pytest.raises(scaler.InvalidArgument, match="scale="):
            observe.Source(HALF, scale)
    with pytest.raises(scaler.InvalidArgument, match="to='float16': expected a FloatFormat"):
        observe.cast(counts, "float16")
    with pytest.raises(scaler.InvalidArgument, match="format=float8_e5m2"):
        observe.Source(scaler.float_format("float8_e5m2"))
    with pytest.raises(scaler.InvalidArgument, match="censored=1"):
        observe.Source(HALF, censored=1)
    with pytest.raises(scaler.InvalidArgument, match="source=None"):
        observe.cast(counts, HALF, source=None)
    for strange in (2.0**17, 2.0**-25):
        with pytest.raises(scaler.InvalidArgument, match="exponents outside -24 to 15"):
            observe.cast(reference([strange]), HALF, source=observe.Source(HALF))
