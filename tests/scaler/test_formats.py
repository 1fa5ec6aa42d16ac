"""Guards the facts about number formats: limits, and the three predicates against what casting really does.

The judge is NumPy's and ml_dtypes' cast where it rounds once, and exact arithmetic for float64, which ml_dtypes rounds
twice.
"""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import modes

import scaler

FORMATS = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float32": np.float32,
}
FRACTION_BITS = {"float16": 10, "bfloat16": 7, "float8_e5m2": 2, "float8_e4m3fn": 3, "float32": 23}
SOURCES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
PATTERNS = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32, "float64": np.uint64}


def to(x, dtype):
    """NumPy's cast, which would warn of every infinity and NaN made on purpose."""
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(dtype)


def rounded(x, name):
    """`x` rounded once to the format, as float64; what is too large becomes infinity."""
    x = to(x, np.float64)
    limits = ml_dtypes.finfo(FORMATS[name])
    _, exponent = np.frexp(np.where(np.isfinite(x) & (x != 0), x, 1.0))
    exponent = np.maximum(exponent - 1, round(math.log2(float(limits.smallest_normal))))
    step = np.ldexp(1.0, exponent - FRACTION_BITS[name])
    with np.errstate(all="ignore"):
        y = np.where(np.isfinite(x), np.rint(x / step) * step, x)
    return np.where(np.isfinite(y) & (np.abs(y) > float(limits.max)), np.copysign(np.inf, y), y)


def cast(x, name):
    """`x` as NumPy or ml_dtypes casts it, as float64; NaN that stands for infinity becomes infinity."""
    y, x = to(to(x, FORMATS[name]), np.float64), to(x, np.float64)
    return np.where(np.isnan(y) & ~np.isnan(x), np.copysign(np.inf, x), y)


def expected(x, name):
    """The three predicates for NumPy values, read off the value after the cast."""
    before = np.abs(to(x, np.float64))
    after = np.abs(rounded(x, name) if x.dtype == np.float64 else cast(x, name))
    tiny = float(ml_dtypes.finfo(FORMATS[name]).smallest_normal)
    return {
        "overflows": np.isfinite(before) & np.isinf(after),
        "underflows": (before > 0) & (after == 0),
        "becomes_subnormal": (after > 0) & (after < tiny),
    }


def predicates(x):
    """The three predicates for every format."""
    kinds = ("overflows", "underflows", "becomes_subnormal")
    return {name: {kind: getattr(scaler.float_format(name), kind)(x) for kind in kinds} for name in FORMATS}


def assert_predicates(x):
    """In eager mode and under XLA."""
    found = [how(tf.constant(x)) for how in (predicates, tf.function(predicates, jit_compile=True))]
    for name in FORMATS:
        for kind, want in expected(x, name).items():
            for each in found:
                wrong = each[name][kind].numpy() != want
                assert not wrong.any(), f"{name}.{kind} wrong at {x[wrong][:4]!r} of {x.dtype}"


def boundary_values(name):
    """Every value where something changes, with its neighbours in float64, both signs, zeros, infinities and NaN."""
    fmt = scaler.float_format(name)
    points = [
        fmt.max,
        fmt.overflow_threshold,
        fmt.smallest_normal,
        fmt.smallest_normal - fmt.smallest_subnormal / 2,
        fmt.smallest_normal - fmt.smallest_subnormal,
        fmt.smallest_subnormal,
        fmt.zero_threshold,
        3 * fmt.zero_threshold,
        1.0,
        65504.0,
        65519.996,
        65520.0,
        2.0**-14,
        2.0**-24,
        2.0**-25,
        0.0,
        math.inf,
        math.nan,
    ]
    values = np.array(points)
    near = [values, np.nextafter(values, 0), np.nextafter(values, math.inf)]
    low = to(values, np.float32)
    with np.errstate(all="ignore"):
        near += [np.nextafter(low, np.float32(0)), np.nextafter(low, np.float32(math.inf))]
    return to(np.concatenate([*near, *(-x for x in near)]), np.float64)


@pytest.mark.parametrize("name", FORMATS)
def test_limits_are_those_of_the_number_type(name):
    fmt, limits = scaler.float_format(name), ml_dtypes.finfo(FORMATS[name])
    assert fmt.name == name
    assert fmt.dtype == tf.as_dtype(name)
    assert fmt.max == float(limits.max)
    assert fmt.smallest_normal == float(limits.smallest_normal)
    assert fmt.smallest_subnormal == float(limits.smallest_subnormal)
    assert fmt.epsilon == 2.0 ** -FRACTION_BITS[name]
    assert fmt.has_infinity == (name != "float8_e4m3fn")
    assert fmt.zero_threshold == fmt.smallest_subnormal / 2
    below = math.nextafter(fmt.overflow_threshold, 0)
    above = math.nextafter(fmt.overflow_threshold, math.inf)
    assert rounded(below, name) == fmt.max
    assert math.isinf(rounded(above, name))
    assert math.isinf(rounded(fmt.overflow_threshold, name)) == fmt.has_infinity


def test_facts_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        scaler.float_format("float16").max = 1.0


def test_known_numbers_of_float16_and_float8():
    half, e4m3 = scaler.float_format("float16"), scaler.float_format("float8_e4m3fn")
    assert (half.max, half.overflow_threshold) == (65504.0, 65520.0)
    assert (half.smallest_normal, half.smallest_subnormal, half.zero_threshold) == (2.0**-14, 2.0**-24, 2.0**-25)
    assert (e4m3.max, e4m3.overflow_threshold) == (448.0, 464.0)
    assert scaler.float_format("float8_e5m2").max == 57344.0


def near_the_limits(name):
    """Values of a format, from either end of its range, each moved by a few steps of float32."""
    fmt, octaves = scaler.float_format(name), np.exp2(np.arange(27.0))
    base = to([*(fmt.zero_threshold * octaves), *(fmt.max / octaves[:17])], np.float32)
    moved = base.view(np.int32) + np.arange(-3, 4, dtype=np.int32)[:, np.newaxis]
    return to(moved.view(np.float32).ravel(), np.float64)


@pytest.mark.parametrize("source", SOURCES)
def test_predicates_at_every_boundary_and_bit_pattern(source):
    """Every pattern of 16 bits, many at random of the others, and what lies around the limits of all formats."""
    kind, limits = PATTERNS[source], np.iinfo(PATTERNS[source])
    random = np.random.default_rng(0).integers(0, limits.max, 2**14, kind, endpoint=True)
    bits = np.arange(2**16, dtype=kind) if kind is np.uint16 else random
    special = np.concatenate([make(name) for name in FORMATS for make in (boundary_values, near_the_limits)])
    assert_predicates(np.concatenate([bits.view(SOURCES[source]), to(special, SOURCES[source])]))


def test_nan_with_any_payload_and_negative_zero_satisfy_nothing():
    bits = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x80000000, 0x7F800000], np.uint32)
    assert not np.any(tf.nest.flatten(predicates(tf.constant(bits.view(np.float32)))))


def test_numpy_casts_to_float16_as_exact_rounding_does():
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), to(boundary_values("float16"), np.float32)])
    np.testing.assert_array_equal(cast(x, "float16"), rounded(x, "float16"))


@pytest.mark.parametrize("jit", [False, True])
def test_tensorflow_casts_to_float16_as_numpy_does(jit):
    bits = np.random.default_rng(1).integers(0, 2**32, 100_000, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), to(boundary_values("float16"), np.float32)])
    ours = tf.function(lambda v: tf.cast(v, tf.float16), jit_compile=jit)(x).numpy()
    numpys = to(x, np.float16)
    np.testing.assert_array_equal(ours[~np.isnan(x)].view(np.uint16), numpys[~np.isnan(x)].view(np.uint16))
    assert np.isnan(ours[np.isnan(x)]).all()


@pytest.mark.parametrize("spelling", ["float16", tf.float16, np.float16, np.dtype("float16")])
def test_a_format_may_be_named_in_any_way(spelling):
    assert scaler.float_format(spelling) == scaler.float_format("float16")


@modes("eager")
def test_any_shape_keeps_its_shape(execute):
    shapes, half = ((), (0, 3), (1, 2, 1)), scaler.float_format("float16")
    each = (half.overflows, half.underflows, half.becomes_subnormal)
    values = [np.full(shape, 1e6, np.float32) for shape in shapes]
    found = execute(lambda *given: [[predicate(x) for predicate in each] for x in given])(*values)
    assert [[one.shape for one in kinds] for kinds in found] == [[shape] * 3 for shape in shapes]
