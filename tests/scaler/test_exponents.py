"""Guards `observe.exponents`: every value of three formats is in its bin, however the step is run."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from exponent_cases import EDGES, FORMATS, PATTERNS, patterns_at, reference, values_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mirrored import mirrored
from scaler_cases import modes
from seeming import seeming_gpu

import scaler
from scaler import observe

WORDS = 24


def counted(*tensors):
    return [observe.exponents(tensor) for tensor in tensors]


@pytest.fixture(scope="module")
def count(execute, request):
    with seeming_gpu() if request.param == "gpu" else contextlib.nullcontext():
        yield execute(counted)


def on(*pairs):
    """A test in these modes, as if on these devices: XLA makes the same program for both."""
    return pytest.mark.parametrize(("execute", "count"), pairs, indirect=True)


def words(name):
    """Bits of a format: any at all, those at its limits, and those without anything special, for which it is fast."""
    bits = 8 * np.dtype(PATTERNS[name]).itemsize
    sign = 1 << (bits - 1)
    first, infinity = (
        int(np.array(value, np.float32).astype(FORMATS[name]).view(PATTERNS[name]))
        for value in ({"float16": 2.0**-14}.get(name, 2.0**-126), np.inf)
    )
    special = [0, 1, first - 1, first, infinity - 1, infinity, infinity + 1, sign - 1]
    special += [pattern for edge in EDGES for pattern in patterns_at(name, edge)]
    limits = st.sampled_from([*special, *(sign | pattern for pattern in special)])
    calm = st.integers(first, infinity - 1) | st.sampled_from([0, sign])
    row = [st.lists(each, min_size=WORDS, max_size=WORDS) for each in (st.integers(0, 2 * sign - 1), limits, calm)]
    return st.one_of(*row).map(lambda patterns: values_of(patterns, name))


@pytest.mark.slow_with("graph-cpu")
@on(("graph", "cpu"), ("xla", "cpu"))
@settings(max_examples=40)
@given(words("float16"), words("bfloat16"), words("float32"))
def test_as_frexp_says(count, half, brain, single):
    values = half, brain, single
    for found, value in zip(count(*values), values, strict=True):
        assert (found.dtype, found.shape) == (tf.int64, [observe.BINS])
        np.testing.assert_array_equal(found, reference(value))


@on(("eager", "cpu"), ("eager", "gpu"), ("xla", "cpu"))
def test_every_16_bit_pattern_and_both_sides_of_every_power_of_two(count):
    short = [values_of(np.arange(2**16), name) for name in ("float16", "bfloat16")]
    powers = np.concatenate([1 << np.arange(23), np.arange(1, 256) << 23])
    around = np.concatenate([powers - 1, powers, powers + 1])
    values = *short, values_of(np.concatenate([around, around | 1 << 31]), "float32")
    for found, value in zip(count(*values), values, strict=True):
        np.testing.assert_array_equal(found, reference(value))


@on(("eager", "cpu"), ("loop", "gpu"))
def test_a_single_special_value_among_zeros(count):
    formats = {"float16": 1 << 10, "bfloat16": 1 << 7, "float32": 1 << 23}
    infinities = {name: int(np.array(np.inf, FORMATS[name]).view(PATTERNS[name])) for name in formats}
    for place in range(4):
        values = []
        for name, first_normal in formats.items():
            special = (3, first_normal - 1, infinities[name], infinities[name] + 1)[place]
            values.append(values_of([0] * (WORDS - 1) + [special], name))
        for found, value in zip(count(*values), values, strict=True):
            np.testing.assert_array_equal(found, reference(value))


@modes("eager", "loop")
def test_lists_are_counted_as_one(execute):
    sparse = tf.IndexedSlices(tf.constant([[1.0, 0.0], [9.0, 2.0**-130]]), tf.constant([1, 1]), tf.constant([4, 2]))
    half = np.float16([[65504, 2.0**-24], [-0.0, np.inf]])
    found = execute(lambda *tensors: observe.exponents([None, *tensors, None]))(half, sparse, np.float32(3.0))
    np.testing.assert_array_equal(found, reference([65504, 2.0**-24, 0, np.inf, 1, 0, 9, 2.0**-130, 3]))


@modes("eager")
def test_nothing_is_nothing(execute):
    run = execute(lambda *tensors: [observe.exponents(empty) for empty in (None, [None], [], list(tensors))])
    for found in run(np.zeros([0, 3], np.float32), np.float16([])):
        np.testing.assert_array_equal(found, np.zeros(observe.BINS))


def test_the_bins_are_where_they_are_said_to_be():
    assert observe.exponents(tf.constant([2.0**-149]))[observe.bin_of(observe.LOWEST)] == 1
    assert observe.exponents(tf.constant([-3e38]))[observe.bin_of(observe.HIGHEST)] == 1
    found = observe.exponents(tf.constant([0.0, np.inf, np.nan, 1.0])).numpy()
    assert [found[index] for index in (observe.ZERO, observe.INFINITY, observe.NAN, observe.bin_of(0))] == [1] * 4


def test_what_is_no_tensor_is_refused():
    for wrong in ({"a": tf.constant(1.0)}, [object()]):
        with pytest.raises(scaler.InvalidArgument, match="where a tensor should be: expected a tensor"):
            observe.exponents(wrong)


@pytest.mark.parametrize("dtype", [tf.float64, tf.int32, tf.bool])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(scaler.InvalidArgument, match=f"dtype {dtype.name}: expected float16, bfloat16 or float32"):
        observe.exponents([tf.zeros([2], dtype)])


def test_two_replicas_summed_are_one_device():
    values = np.float32([[1.0, 0.0, 2.0**-140], [-5.0, np.inf, np.nan]])

    @tf.function
    def on_replicas():
        def replica():
            index = tf.distribute.get_replica_context().replica_id_in_sync_group
            counts = observe.exponents(tf.gather(tf.constant(values), index))
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, counts)

        return strategy.experimental_local_results(strategy.run(replica))

    strategy = mirrored(2)
    for found in on_replicas():
        np.testing.assert_array_equal(found, reference(values))


def test_steps_of_a_loop_are_summed():
    values = np.float16([[1.0, 0.0], [-5.0, np.nan], [2.0**-24, 2.0**-15]])

    @tf.function
    def steps():
        counts = tf.zeros([observe.BINS], tf.int64)
        for row in tf.constant(values):
            counts += observe.exponents(row)
        return counts

    np.testing.assert_array_equal(steps(), reference(values))
