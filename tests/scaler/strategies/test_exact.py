"""Guards powers and logarithms of 2: the values NumPy gives in float64, in every mode, to the bit."""

import numpy as np

from scaler.strategies import exact


def test_logarithms_are_on_the_grid(execute):
    rng = np.random.default_rng(0)
    values = rng.integers(0x00800000, 0x7F800000, 100_000, np.int32).view(np.float32)
    mantissa, power = np.frexp(values.astype(np.float64))
    want = np.round(np.log2(mantissa * 2) * 2**16) / 2**16 + power - 1
    np.testing.assert_array_equal(execute(exact.log2)(values).numpy(), want)


def test_logarithms_of_powers_of_two_zero_and_subnormal_numbers(execute):
    exponents = np.arange(-126, 128)
    np.testing.assert_array_equal(execute(exact.log2)(np.float32(2.0) ** np.float32(exponents)).numpy(), exponents)
    nothing = execute(exact.log2)(np.float32([0, 2.0**-149, 2.0**-127])).numpy()
    np.testing.assert_array_equal(nothing, -np.inf)


def test_powers_are_rounded_to_nearest(execute):
    values = np.concatenate([np.random.default_rng(1).uniform(-140, 140, 100_000), np.arange(-126, 128)])
    want = np.exp2(np.clip(values, -126, 127)).astype(np.float32)
    np.testing.assert_array_equal(execute(exact.exp2)(values).numpy(), want)


def test_exponents_and_powers_of_two_at_most(execute):
    values = np.float32([0, 2.0**-149, 2.0**-126, 0.75, 1, 1.5, 4, 3e38, np.inf])
    np.testing.assert_array_equal(execute(exact.exponent)(values).numpy(), [-127, -127, -126, -1, 0, 0, 2, 127, 128])
    floors = np.float32([0, 0, 2.0**-126, 0.5, 1, 1, 4, 2.0**127, np.inf])
    np.testing.assert_array_equal(execute(exact.power_of_two_at_most)(values).numpy(), floors)
    powers = execute(exact.power_of_two)(np.int32([-1000, -126, -1, 0, 10, 127, 1000])).numpy()
    np.testing.assert_array_equal(powers, np.float32(2.0) ** np.float32([-126, -126, -1, 0, 10, 127, 127]))


def test_what_is_narrowed_is_never_subnormal(execute):
    found = execute(exact.narrow)(np.array([0.0, 2.0**-127, -(2.0**-140), 2.0**-126, -1.5])).numpy()
    assert found.tolist() == [0.0, 0.0, 0.0, 2.0**-126, -1.5]
