"""Guards that tensors packed into one array of bytes keep every bit."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from loops.loop.results import pack, unpack

DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]


@given(data=st.data(), dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=5))
def test_each_tensor_comes_back_bit_for_bit(data, dtypes):
    arrays, layout = [], []
    for name in dtypes:
        dtype = tf.as_dtype(name)
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        size = int(np.prod(shape)) * dtype.size
        raw = data.draw(st.binary(min_size=size, max_size=size))
        bits = np.frombuffer(raw, np.uint8) & 1 if name == "bool" else np.frombuffer(raw, np.uint8)
        arrays.append(bits.view(dtype.as_numpy_dtype).reshape(shape))
        layout.append((dtype, shape))
    found = unpack(pack([tf.constant(array) for array in arrays]).numpy(), layout)
    for array, one in zip(arrays, found, strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_function_returns_them_in_the_same_order(compiled):
    function = tf.function(lambda: pack([tf.constant([True, False]), tf.constant(2.5)]), jit_compile=compiled)
    flags, number = unpack(function().numpy(), [(tf.bool, [2]), (tf.float32, [])])
    assert flags.tolist() == [True, False]
    assert float(number) == 2.5


def test_what_comes_back_may_be_changed():
    (array,) = unpack(pack([tf.constant([1, 2])]).numpy(), [(tf.int32, [2])])
    array[:] = 0
    assert array.tolist() == [0, 0]
