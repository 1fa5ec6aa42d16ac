"""Guards that blocks are what the papers of their formats say: in NumPy from the same bits."""

import numpy as np
import pytest
import tensorflow as tf
from format_cases import ELEMENT, HOW, assert_same_bits, blocks

from scaler.formats.tensors import LAYOUTS, in_blocks


def numbers(shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 12, shape)).astype(np.float32)


@pytest.mark.slow_with("nvfp4-xla")
@pytest.mark.parametrize(("name", "how"), [*((name, "eager") for name in ELEMENT), ("nvfp4", "xla")])
def test_blocks_are_those_of_the_papers(name, how):
    values = numbers((3, 5, 70))
    values[0, 0] = 0.0
    values[1, 2, :32] *= np.float32(2.0**-100)
    values[1, 3, :32] *= np.float32(2.0**90) if name != "nvfp4" else np.float32(2.0**10)
    both = HOW[how](lambda values: (in_blocks(values, name, (2,)), in_blocks(values, name, (1,))))
    last, middle = both(tf.constant(values))
    assert_same_bits(last, blocks(values, name, 2))
    assert_same_bits(middle, blocks(values, name, 1))


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4"])
def test_scales_reach_from_the_least_to_the_largest_exponent(name):
    # In a block of 32 the largest magnitude alone counts, and whatever is a normal number is exact.
    values = np.repeat(2.0 ** np.arange(-126.0, 128.0)[:, None], 32, axis=1).astype(np.float32)
    assert_same_bits(in_blocks(tf.constant(values), name, (1,)), values)


def test_along_several_axes_blocks_are_those_of_the_flattened_one():
    values = numbers((4, 6, 10))
    found = in_blocks(tf.constant(values), "mxfp8_e4m3", (2, 0))
    flat = np.transpose(values, (1, 2, 0)).reshape(6, 40)
    assert_same_bits(np.transpose(found, (1, 2, 0)).reshape(6, 40), blocks(flat, "mxfp8_e4m3", 1))


@pytest.mark.parametrize("name", ["mxfp6_e3m2", "nvfp4"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_makes_its_block_nan(name, bad):
    values = numbers((2, 64))
    values[1, 3] = bad
    found = np.isnan(in_blocks(tf.constant(values), name, (1,)).numpy())
    size = LAYOUTS[name].size
    assert found[1, :size].all()
    assert found.sum() == size


def test_no_values_are_no_error():
    for shape in ((0, 8), (8, 0)):
        assert in_blocks(tf.zeros(shape), "mxfp4", (1,)).shape == shape
        assert in_blocks(tf.zeros(shape), "nvfp4", (1,)).shape == shape
