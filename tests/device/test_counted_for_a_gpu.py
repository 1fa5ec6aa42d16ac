"""What is traced for a GPU measures the same bits as what is traced for a CPU, of every value that formats have."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import traced_steps as steps
from hypothesis import given, settings
from hypothesis import strategies as st
from seeming import seeming_gpu

from scaler import observe
from scaler.gradients.lists import unscale
from scaler.gradients.statistics import amax, histogram

PATTERNS = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32}
EDGES = (2.0**-20, 1.0, 8188.0)
WORDS = 24
NUMBERS = (0.0, 1.0, 65504.0, 65520.0, 65536.0, 2.0**-14, 2.0**-24, 2.0**-25, 2.0**-126, 2.0**-133, 2.0**-149, np.inf)


def boundary(name):
    """Bits at the limits of a format, each with its neighbours, of both signs: NaN of several payloads among them."""
    kind = PATTERNS[name]
    sign = 1 << (8 * np.dtype(kind).itemsize - 1)
    with np.errstate(over="ignore"):
        middle = [int(np.array(number, tf.as_dtype(name).as_numpy_dtype).view(kind)) for number in NUMBERS]
    around = {max(pattern + step, 0) for pattern in middle for step in (-1, 0, 1)} | {sign - 1, sign - 2}
    return sorted(around | {sign | pattern for pattern in around})


def words(name):
    """Bits of a format: any at all, those at its limits, and calm ones for which a CPU is fast."""
    kind = PATTERNS[name]
    one = int(np.array(1.0, tf.as_dtype(name).as_numpy_dtype).view(kind))
    drawn = (st.integers(0, np.iinfo(kind).max), st.sampled_from(boundary(name)), st.integers(one, one + 99))
    return st.one_of([st.lists(each, min_size=WORDS, max_size=WORDS) for each in drawn])


def measure(values, updates):
    counts, largest = observe.measured({"values": [values], "both": [values, updates], "nothing": [None]})
    pattern = tf.bitcast(largest, tf.uint32)
    share = observe.swallowed_share(values, updates)
    return observe.exponents([values, updates]), counts, pattern, share, amax([values]), histogram([values], EDGES)


@functools.cache
def traced(name, on_gpu):
    specs = tf.TensorSpec([WORDS], name), tf.TensorSpec([WORDS], tf.float32)
    with seeming_gpu() if on_gpu else contextlib.nullcontext():
        return tf.function(measure, autograph=False).get_concrete_function(*specs)


@pytest.mark.slow_with("float16")
@pytest.mark.parametrize("name", ["float16", "float32"])
@settings(max_examples=25)
@given(data=st.data())
def test_both_devices_measure_the_same(name, data):
    values = tf.bitcast(tf.constant(data.draw(words(name)), PATTERNS[name]), name)
    updates = tf.bitcast(tf.constant(data.draw(words("float32")), tf.uint32), tf.float32)
    for host, device in zip(traced(name, False)(values, updates), traced(name, True)(values, updates), strict=True):
        assert (host.dtype, host.shape) == (device.dtype, device.shape)
        np.testing.assert_array_equal(host, device)


@pytest.mark.parametrize("name", PATTERNS)
def test_values_at_the_limits_one_by_one(name):
    updates = tf.fill([WORDS], 2.0**-149)
    for pattern in boundary(name):
        values = tf.bitcast(tf.constant([pattern] + [0] * (WORDS - 1), PATTERNS[name]), name)
        for host, device in zip(traced(name, False)(values, updates), traced(name, True)(values, updates), strict=True):
            np.testing.assert_array_equal(host, device, err_msg=hex(pattern))


def test_a_gpu_looks_once_and_waits_for_nothing():
    """A CPU looks again for subnormals, which on a GPU would wait for the first look."""

    def kinds(name, on_gpu):
        graph = traced(name, on_gpu).graph
        return {op.type for op in graph.get_operations()}

    for name in PATTERNS:
        assert {"StatelessIf", "DenseBincount"} <= kinds(name, False)
        assert not {"If", "StatelessIf", "DenseBincount"} & kinds(name, True)


def test_empty_tensors_have_no_counts_on_either_device():
    for on_gpu in (False, True):
        with seeming_gpu() if on_gpu else contextlib.nullcontext():
            counts, largest = observe.measured({"empty": [tf.zeros([0], tf.float16)], "none": []})
        assert not counts.numpy().any()
        np.testing.assert_array_equal(largest, [0.0, 0.0])


def test_duplicate_indices_are_summed_to_the_same_bits():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((WORDS, 3)).astype(np.float16)
    indices = rng.integers(0, 7, WORDS)

    def summed():
        return unscale([tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([9, 3]))], 8.0)[0]

    host = tf.function(summed)()
    with seeming_gpu():
        device = tf.function(summed)()
    np.testing.assert_array_equal(host.values, device.values)
    np.testing.assert_array_equal(host.indices, device.indices)
    dense = tf.math.unsorted_segment_sum(tf.cast(values, tf.float32), indices, 9) / 8.0
    np.testing.assert_allclose(tf.convert_to_tensor(device), dense, rtol=1e-6)


def numbers_of_steps(strategy, held):
    """All outputs and weights of three steps, the second of which overflows."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    step = steps.made(strategy, policy="float16", masters=held, probes=steps.ALL_KINDS)
    call, found = tf.function(step), []
    for factor in (1.0, np.inf, 2.0):
        x = rng.standard_normal((32, 64)).astype(np.float32) * factor
        found.append(call((tf.constant(x), tf.constant(rng.integers(0, 10, 32)))))
    return found, step.model.get_weights()


@pytest.mark.slow
@pytest.mark.exhaustive_with("headroom-kahan", "histogram-stochastic", "log_normal-masters")
@pytest.mark.parametrize(
    ("strategy", "held"), [("headroom", "kahan"), ("histogram", "stochastic"), ("log_normal", "masters")]
)
def test_a_step_is_the_same_to_the_bit(strategy, held):
    arguments = steps.STRATEGIES[strategy], steps.WEIGHTS[held]
    host = numbers_of_steps(*arguments)
    with seeming_gpu():
        device = numbers_of_steps(*arguments)
    assert [bool(one["applied"]) for one in host[0]] == [True, False, True]
    for one, other in zip(tf.nest.flatten(host), tf.nest.flatten(device), strict=True):
        np.testing.assert_array_equal(one, other)
