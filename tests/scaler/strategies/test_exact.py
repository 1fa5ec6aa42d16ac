"""Guards powers and logarithms of 2: the values NumPy gives in float64, in every mode, to the bit."""

import numpy as np
from scaler_cases import modes

from scaler.strategies import exact


def everything(values, edges, powers, integers):
    return (
        *(exact.log2(each) for each in (values, edges)),
        *(exact.exponent(edges), exact.power_of_two_at_most(edges)),
        *(exact.exp2(powers), exact.power_of_two(integers)),
    )


@modes("eager", "graph", "xla")
def test_powers_and_logarithms(execute):
    rng = np.random.default_rng(0)
    values = rng.integers(0x00800000, 0x7F800000, 100_000, np.int32).view(np.float32)
    exponents = np.arange(-126, 128)
    values = np.concatenate([values, np.float32(2.0) ** np.float32(exponents)])
    edges = np.float32([0, 2.0**-149, 2.0**-127, 2.0**-126, 0.75, 1, 1.5, 4, 3e38, np.inf])
    powers = np.concatenate([rng.uniform(-140, 140, 100_000), exponents])
    integers = np.int32([-1000, -126, -1, 0, 10, 127, 1000])
    found = [each.numpy() for each in execute(everything)(values, edges, powers, integers)]
    logarithms, of_edges, exponents_of_edges, floors, two_to, two_to_integers = found

    # Logarithms are on the grid, and those of powers of two are exact.
    mantissa, power = np.frexp(values.astype(np.float64))
    np.testing.assert_array_equal(logarithms, np.round(np.log2(mantissa * 2) * 2**16) / 2**16 + power - 1)
    np.testing.assert_array_equal(logarithms[-len(exponents) :], exponents)
    # Those of zero and of subnormal numbers are none.
    np.testing.assert_array_equal(of_edges[:3], -np.inf)
    np.testing.assert_array_equal(exponents_of_edges, [-127, -127, -127, -126, -1, 0, 0, 2, 127, 128])
    np.testing.assert_array_equal(floors, np.float32([0, 0, 0, 2.0**-126, 0.5, 1, 1, 4, 2.0**127, np.inf]))
    # Powers are rounded to nearest.
    np.testing.assert_array_equal(two_to, np.exp2(np.clip(powers, -126, 127)).astype(np.float32))
    np.testing.assert_array_equal(two_to_integers, np.float32(2.0) ** np.float32([-126, -126, -1, 0, 10, 127, 127]))


def test_what_is_narrowed_is_never_subnormal(execute):
    found = execute(exact.narrow)(np.array([0.0, 2.0**-127, -(2.0**-140), 2.0**-126, -1.5])).numpy()
    assert found.tolist() == [0.0, 0.0, 0.0, 2.0**-126, -1.5]
